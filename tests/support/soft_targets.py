"""The software device's backend for the contract suite (``targets.Backend``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_executor.helper.soft_driver import SoftDriver
from checkpoint_executor.softgpu import CONTEXT_BYTES, SoftGpu, device_name
from tests.support.targets import ChildProcess, close_all

__all__ = ["SoftBackend", "make_driver"]

_CAPACITY_BYTES = 64 << 20
_TARGET_BYTES = 4 << 20


def make_driver(root: str) -> SoftDriver:
    """A driver, opened; what ``caller_main`` builds its own from."""
    driver = SoftDriver(Path(root))
    driver.open()
    return driver


class SoftBackend:
    """A software device in a folder of its own."""

    kind = "soft"
    device = device_name(0)
    capacity_bytes = _CAPACITY_BYTES
    target_bytes = _TARGET_BYTES
    #: Unlike the real driver's 4 MiB, nothing at all stays.
    asleep_limit_bytes = 0

    def __init__(self, folder: Path) -> None:
        self.root = folder / "softgpu"
        self.gpu = SoftGpu(self.root, self.device, _CAPACITY_BYTES)
        self._children: list[ChildProcess] = []

    def driver(self) -> SoftDriver:
        return make_driver(str(self.root))

    def settled_used_bytes(self) -> int:
        return self.gpu.used_bytes()

    def spawn(self, *, size_bytes: int | None = None, seed: int = 0) -> ChildProcess:
        child = self.start(size_bytes=size_bytes, seed=seed)
        child.wait_ready()
        return child

    def start(self, *, size_bytes: int | None = None, seed: int = 0) -> ChildProcess:
        """Like ``spawn``, without waiting."""
        return self._start(
            "tests.support.soft_target_main",
            root=str(self.root),
            device=self.device,
            capacity_bytes=_CAPACITY_BYTES,
            size_bytes=_TARGET_BYTES if size_bytes is None else size_bytes,
            seed=seed,
        )

    def spawn_bystander(self) -> ChildProcess:
        child = self._start("tests.support.child")
        child.wait_ready()
        return child

    def spawn_caller(self) -> ChildProcess:
        child = self._start(
            "tests.support.caller_main",
            driver=f"{__name__}:make_driver",
            driver_arguments=[str(self.root)],
            device=self.device,
        )
        child.wait_ready()
        return child

    def fill(self, leave_bytes: int) -> ChildProcess:
        free_bytes = self.gpu.total_bytes - self.gpu.used_bytes()
        return self.spawn(size_bytes=free_bytes - leave_bytes - CONTEXT_BYTES)

    def close(self) -> None:
        close_all(self._children)

    def _start(self, module: str, **arguments: Any) -> ChildProcess:
        child = ChildProcess(module, arguments, device=self.device)
        self._children.append(child)
        return child

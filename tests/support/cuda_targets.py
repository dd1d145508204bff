"""The CUDA driver's backend for the contract suite (``targets.Backend``): ``pytest tests/contract --backend cuda``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor.driver_states import DriverError
from checkpoint_executor.helper.cuda_driver import CudaDriver
from tests.support.targets import DEADLINE_S, ChildProcess, close_all

__all__ = ["CudaBackend", "child_environment", "make_driver", "visible_gpus"]

_TARGET_BYTES = 64 << 20

#: How long a reading must not change to count as settled.
_SETTLED_S = 0.3


def make_driver() -> CudaDriver:
    """A driver, opened; what ``caller_main`` builds its own from."""
    driver = CudaDriver()
    driver.open()
    return driver


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs, in CUDA's order. Skips the test, with the reason, where there is none."""
    from checkpoint_executor.workers.cuda_calls import device_uuids

    try:
        make_driver()
        uuids = device_uuids()
    except DriverError as error:
        pytest.skip(f"no NVIDIA GPU here: {error}")
    if not uuids:
        pytest.skip("no NVIDIA GPU here")
    return uuids


def child_environment() -> dict[str, str]:
    """Variables for child processes beyond what they inherit: packages may live on ``PYTHONPATH`` alone."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


class CudaBackend:
    """The first visible GPU, which nobody else should be using."""

    kind = "cuda"
    target_bytes = _TARGET_BYTES
    #: 4 MiB were measured on H200, for each process.
    asleep_limit_bytes = 8 << 20

    def __init__(self, folder: Path) -> None:
        self.device = visible_gpus()[0]
        # Opened before the first reading: cuInit alone takes 4 MiB of the device, for as long as this process lives.
        self._driver = make_driver()
        self._children: list[ChildProcess] = []

    def driver(self) -> CudaDriver:
        return make_driver()

    def settled_used_bytes(self) -> int:
        """The device hears of a death a little after the parent has reaped it."""
        deadline = time.monotonic() + DEADLINE_S
        reading, since = -1, time.monotonic()
        while time.monotonic() - since < _SETTLED_S:
            now = self._driver.device_memory(self.device).used_bytes
            if now != reading:
                reading, since = now, time.monotonic()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the used memory of {self.device} does not settle")
            time.sleep(0.02)
        return reading

    def spawn(self, *, size_bytes: int | None = None, seed: int = 0) -> ChildProcess:
        return self._spawn_target(size_bytes=_TARGET_BYTES if size_bytes is None else size_bytes, seed=seed)

    def fill(self, leave_bytes: int) -> ChildProcess:
        # The child's own context takes memory as well, so it finds out by itself what is left.
        return self._spawn_target(leave_bytes=leave_bytes)

    def spawn_bystander(self) -> ChildProcess:
        return self._ready("tests.support.child")

    def spawn_caller(self) -> ChildProcess:
        return self._ready(
            "tests.support.caller_main", driver=f"{__name__}:make_driver", driver_arguments=[], device=self.device
        )

    def close(self) -> None:
        close_all(self._children)

    def _spawn_target(self, **arguments: Any) -> ChildProcess:
        return self._ready("tests.support.cuda_target_main", device=self.device, **arguments)

    def _ready(self, module: str, **arguments: Any) -> ChildProcess:
        child = ChildProcess(module, arguments, device=self.device, environment=child_environment())
        self._children.append(child)
        child.wait_ready()
        return child

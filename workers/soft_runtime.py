"""One rank's software device, opened: allocator, communicator, workspaces and graphs put together.

Knows how the parts of the soft backend are built and closed, and nothing of stages or of the parent. Opening imports no
torch.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from checkpoint_executor.softgpu import SoftProcess
from checkpoint_executor.workers.protocols import Workspace
from checkpoint_executor.workers.soft_communicator import SoftCommunicator
from checkpoint_executor.workers.soft_memory import SoftAllocator
from checkpoint_executor.workers.soft_workspace import SoftWorkspace

if TYPE_CHECKING:
    from checkpoint_executor.workers.soft_graphs import SoftGraph

__all__ = ["SoftRuntime"]

T = TypeVar("T")


class SoftRuntime:
    """Meets :class:`~checkpoint_executor.workers.protocols.DeviceRuntime`; made by :meth:`open`."""

    kind = "soft"
    torch_device = "cpu"

    def __init__(self, process: SoftProcess, communicator: SoftCommunicator) -> None:
        self._process = process
        self._communicator = communicator
        self._allocator = SoftAllocator(process)
        self._workspaces: list[Workspace] = []

    @classmethod
    def open(
        cls,
        *,
        root: Path,
        name: str,
        rank: int,
        world_size: int,
        rendezvous: Path,
        communication: str,
        capacity_bytes: int | None = None,
    ) -> SoftRuntime:
        """Open the device in this process and meet the other ranks. Collective.

        Args:
            root: folder of the software devices. name: the device's, e.g. ``"SOFT-0"``.
            rank, world_size: this rank's place. rendezvous: an existing folder for this set of ranks alone.
            communication: ``"suspend"`` or ``"socket"``. capacity_bytes: of the device; None: as it is.

        Raises:
            MemoryError: no room on the device. TimeoutError: a rank did not come. ValueError: a bad argument.
            RuntimeError: this process has a device open.
        """
        _share_cores()
        _allow_descriptors()
        process = SoftProcess.open(root, name, capacity_bytes=capacity_bytes)
        try:
            communicator = SoftCommunicator(process, rank, world_size, rendezvous, communication)
        except BaseException:
            process.close()
            raise
        return cls(process, communicator)

    @property
    def device_id(self) -> str:
        """The software device's name."""
        return self._process.device

    @property
    def allocator(self) -> SoftAllocator:
        return self._allocator

    @property
    def communicator(self) -> SoftCommunicator:
        return self._communicator

    @property
    def workspaces(self) -> list[Workspace]:
        """Registered workspaces, in the order in which they are prepared."""
        return self._workspaces

    def capture(self, function: Callable[[], T]) -> SoftGraph[T]:
        """Warm up and capture ``function``; see :mod:`~checkpoint_executor.workers.soft_graphs` for what can be.

        Raises:
            RuntimeError: it does something that a graph cannot hold. MemoryError: no room for its results.
        """
        from checkpoint_executor.workers.soft_graphs import SoftGraph

        return SoftGraph.capture(self._process, self._allocator, function)

    def shared_workspace(self, size_bytes: int) -> SoftWorkspace:
        """A peer-mapped workspace of ``size_bytes`` on each rank, registered. Collective. Raises MemoryError."""
        workspace = SoftWorkspace(self._process, self._communicator, size_bytes)
        self._workspaces.append(workspace)
        return workspace

    def device_call(self) -> AbstractContextManager[None]:
        """Hold the device while working on its memory. Waits while the driver holds the process. May nest."""
        return self._process.call()

    def prepare_backup(self) -> Mapping[str, int]:
        """Nothing to do: host memory of the backup costs what it costs, whenever it is touched."""
        return {}

    def synchronize(self) -> None:
        """All work is done when the call that started it returns; waits while the driver holds the process."""
        with self._process.call():
            pass

    def ledger(self) -> dict[str, int]:
        """To the byte: the kinds add up to what the device's own ledger says of this process."""
        allocator, communicator = self._allocator, self._communicator
        resident = {tag: 0 if tag in allocator.sleeping else size for tag, size in allocator.tag_bytes().items()}
        memory = communicator.memory_bytes()
        return {
            **resident,
            "graph_pools": allocator.untagged_bytes,
            "nccl_persistent": memory["persistent"],
            "nccl_suspendable": 0 if communicator.is_suspended else memory["suspendable"],
            "workspaces": sum(getattr(workspace, "device_bytes", 0) for workspace in self._workspaces),
            "local_memory": self._process.local_memory_bytes,
            "context": self._process.context_bytes - self._process.local_memory_bytes,
            "backup_arena": allocator.arena_bytes,
        }

    def trim(self) -> Mapping[str, int]:
        """There is nothing to give back."""
        return {}

    def release_local_memory(self) -> int:
        """Give back what the context keeps for kernels' local variables. Returns device bytes."""
        return self._process.release_local_memory()

    def restore_local_memory(self) -> None:
        """Get it again. Idempotent. Raises MemoryError."""
        self._process.restore_local_memory()

    def close(self) -> None:
        """Orderly end of an awake worker. Idempotent."""
        self._communicator.close()
        self._process.close()


def _share_cores() -> None:
    """One thread for torch, unless the user chose: the ranks share the host's cores, and small operations that wait for
    each other's threads there take up to 100 times as long (seen on two busy cores)."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch = sys.modules.get("torch")  # imported before, it has read the variable already
        if torch is not None:
            torch.set_num_threads(1)


def _allow_descriptors() -> None:
    """Raise the limit on open files as far as it goes: every segment takes two, and a model has hundreds of tensors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

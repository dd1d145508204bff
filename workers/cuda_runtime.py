"""One rank's GPU, opened: allocator, communicator, workspaces and graphs put together.

Knows how the parts of the CUDA backend are built, and which caches of torch can be given back. Knows nothing of
stages or of the parent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

from checkpoint_executor.communication import SUSPEND, check_environment
from checkpoint_executor.workers.cuda_arena import HostArena
from checkpoint_executor.workers.cuda_backup import Backup
from checkpoint_executor.workers.cuda_calls import PrimaryContext, choose_device, device_uuids
from checkpoint_executor.workers.cuda_communicator import CudaCommunicator, LocalCommunicator
from checkpoint_executor.workers.cuda_graphs import CudaGraph, GraphPool
from checkpoint_executor.workers.cuda_hash import open_hasher
from checkpoint_executor.workers.cuda_ledger import (
    DeviceMeter,
    Meter,
    NoMeter,
    TorchBytes,
    device_used_bytes,
    torch_bytes,
)
from checkpoint_executor.workers.cuda_local_memory import LocalMemory
from checkpoint_executor.workers.cuda_memory import CudaAllocator
from checkpoint_executor.workers.cuda_rendezvous import HostGroup
from checkpoint_executor.workers.cuda_workspace import CudaWorkspace
from checkpoint_executor.workers.protocols import Workspace

__all__ = ["CudaRuntime"]

T = TypeVar("T")


class CudaRuntime:
    """Meets :class:`~checkpoint_executor.workers.protocols.DeviceRuntime`; made by :meth:`open`, once in a process."""

    kind = "cuda"

    def __init__(
        self,
        context: PrimaryContext,
        group: HostGroup,
        *,
        communication: str,
        retain_backup: bool,
        meter: DeviceMeter | None = None,
    ) -> None:
        self._context = context
        self._group = group
        self._meter: Meter = meter or NoMeter()
        self._workspaces: list[Workspace] = []
        self._local_memory = LocalMemory(context)
        self._arena = HostArena(numa_node=context.numa_node)
        with self._meter.watch("context"):
            # It compiles and loads a kernel.
            hasher = open_hasher(context)
        self._allocator = CudaAllocator(context, Backup(self._arena), hasher=hasher, retain_backup=retain_backup)
        self._communicator: CudaCommunicator | LocalCommunicator = LocalCommunicator()
        if meter is not None:
            meter.explain(lambda: self._explained_bytes(), self.synchronize)
        if group.world_size > 1:
            with self._meter.watch("context"):
                self._communicator = CudaCommunicator(group, context.ordinal, suspendable=communication == SUSPEND)
        self._graphs = GraphPool(context.ordinal, self._allocator, self._communicator, self._meter)

    @classmethod
    def open(
        cls,
        *,
        device_uuid: str | None = None,
        index: int = 0,
        rank: int,
        world_size: int,
        rendezvous: Path,
        communication: str | None = SUSPEND,
        retain_backup: bool = True,
        attribution: bool = False,
    ) -> CudaRuntime:
        """Open the GPU in this process and meet the other ranks. Collective.

        Args:
            device_uuid: the GPU's UUID as NVML writes it (``GPU-...``). index: used without a UUID: its place among
                the devices that ``CUDA_VISIBLE_DEVICES`` leaves to this process.
            rank, world_size: this rank's place. rendezvous: an existing folder for this set of ranks alone.
            communication: ``"suspend"`` or ``"socket"``; None is ``"suspend"``.
            retain_backup: whether the host memory of the backup is kept after ``weights`` woke.
            attribution: whether to watch what contexts, modules and captures cost, for :meth:`ledger`.

        Raises:
            ValueError: no such device, or an environment that cannot work, with everything that is wrong with it.
            RuntimeError: NCCL cannot be suspended. TimeoutError, ConnectionError: a rank did not come, or is gone.
        """
        communication = communication or SUSPEND
        # The executor judged the parent's environment; whoever opens a device without it deserves to know as well.
        problems, _ = check_environment(communication, world_size, os.environ)
        if problems:
            raise ValueError("the environment cannot work:\n" + "\n".join(f"  - {problem}" for problem in problems))
        uuids = device_uuids()
        ordinal = choose_device(uuids, device_uuid, index)
        meter = DeviceMeter(device_used_bytes(uuids[ordinal])) if attribution else None
        if meter is not None and PrimaryContext.is_active(ordinal):
            # The user's module has used CUDA when it was imported.
            meter.explain(lambda: LocalMemory(PrimaryContext(ordinal)).size_bytes, lambda: None)
        with (meter or NoMeter()).watch("context"):
            # Before anything else of torch, or a context would appear on device 0 as well.
            torch.cuda.set_device(ordinal)
            context = PrimaryContext(ordinal)
            if meter is not None:
                # The context comes with some, which is a kind of its own.
                local_memory = LocalMemory(context)
                meter.explain(lambda: local_memory.size_bytes, context.synchronize)
        group = HostGroup(rank, world_size, rendezvous)
        return cls(context, group, communication=communication, retain_backup=retain_backup, meter=meter)

    @property
    def device_id(self) -> str:
        """The GPU's UUID, as NVML writes it: an index depends on ``CUDA_VISIBLE_DEVICES`` and this does not."""
        return self._context.uuid

    @property
    def torch_device(self) -> str:
        """What to give torch, e.g. ``"cuda:0"``."""
        return f"cuda:{self._context.ordinal}"

    @property
    def allocator(self) -> CudaAllocator:
        return self._allocator

    @property
    def communicator(self) -> CudaCommunicator | LocalCommunicator:
        return self._communicator

    @property
    def workspaces(self) -> list[Workspace]:
        """Registered workspaces, in the order in which they are prepared."""
        return self._workspaces

    def capture(self, function: Callable[[], T]) -> CudaGraph[T]:
        """Warm up and capture ``function``; see :meth:`GraphPool.capture`."""
        return self._graphs.capture(function)

    def shared_workspace(self, size_bytes: int) -> CudaWorkspace:
        """A peer-mapped workspace of ``size_bytes`` on each rank, registered. Collective. Raises MemoryError."""
        workspace = CudaWorkspace(self._context, self._group, size_bytes)
        self._workspaces.append(workspace)
        return workspace

    def device_call(self) -> AbstractContextManager[None]:
        """Nothing to hold: the driver itself sees work, and blocks calls, of a locked process."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until all submitted work is done."""
        torch.cuda.synchronize(self._context.ordinal)

    def prepare_backup(self) -> Mapping[str, int]:
        """Get the backup's host memory now, e.g. once the weights exist, so that the first sleep is as fast as the
        others.

        Returns:
            ``arena``: its bytes.
        """
        self._allocator.prepare_backup()
        return {"arena": self._arena.capacity_bytes}

    def ledger(self) -> dict[str, int]:
        """What can be told apart; ``torch`` is what its ordinary pool keeps beside cuBLAS's workspaces, tensors and
        cache. ``context`` and ``graph_executables`` are there only if the device was opened with ``attribution``."""
        torchs, memory = self._torch_bytes(), self._communicator_bytes()
        return {
            **self._resident_bytes(),
            "graph_pools": torchs.graph_pools,
            "graph_executables": self._meter.grown.get("graph_executables", 0),
            "nccl_persistent": memory["persistent"],
            "nccl_suspendable": memory["suspendable"],
            "workspaces": self._workspace_bytes(),
            "cublas": torchs.cublas,
            "local_memory": self._local_memory.size_bytes,
            "context": self._meter.grown.get("context", 0),
            "torch": torchs.other,
            "backup_arena": self._arena.capacity_bytes,
        }

    def trim(self) -> Mapping[str, int]:
        """Give torch's unused blocks back: the driver would copy them at about 2 GB/s, both ways.

        cuBLAS's workspaces stay. A captured graph may hold the address of one, and replaying it after
        ``_cuda_clearCublasWorkspaces`` would write to memory that is somebody else's by then; graphs that a worker
        captured by itself cannot be seen from here. They are 32 MiB on H200, 16 ms of copying.

        Returns:
            ``torch_cache``: bytes given back.
        """
        before = torch.cuda.memory_reserved(self._context.ordinal)
        # Blocks of captured graphs are in private pools, which this leaves alone for as long as the graph lives.
        torch.cuda.empty_cache()
        return {"torch_cache": before - torch.cuda.memory_reserved(self._context.ordinal)}

    def release_local_memory(self) -> int:
        """Give back what the driver keeps for kernels' local variables; see
        :mod:`~checkpoint_executor.workers.cuda_local_memory`. Returns device bytes."""
        return self._local_memory.release()

    def restore_local_memory(self) -> None:
        """Get it again, as large as it was. Idempotent. Raises MemoryError."""
        self._local_memory.restore()

    def close(self) -> None:
        """Orderly end of an awake worker. Idempotent.

        The communicator is left to the end of the process: destroying it is a collective, which would wait for a rank
        that died.
        """
        self.synchronize()
        self._group.close()
        self._arena.close()

    # Details: the ledger

    def _resident_bytes(self) -> dict[str, int]:
        sleeping = self._allocator.sleeping
        return {tag: 0 if tag in sleeping else size for tag, size in self._allocator.tag_bytes().items()}

    def _communicator_bytes(self) -> dict[str, int]:
        memory = self._communicator.memory_bytes()
        return {**memory, "suspendable": 0 if self._communicator.is_suspended else memory["suspendable"]}

    def _workspace_bytes(self) -> int:
        # Of others' (FlashInfer's) nothing is known.
        return sum(getattr(workspace, "device_bytes", 0) for workspace in self._workspaces)

    def _torch_bytes(self) -> TorchBytes:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return torch_bytes(segments, self._context.ordinal, self._allocator.pool_segments)

    def _explained_bytes(self) -> int:
        """What the device holds for this process and is accounted for, for the meter."""
        parts = (self._resident_bytes(), self._communicator_bytes())
        known = sum(size for part in parts for size in part.values())
        return known + self._local_memory.size_bytes + self._workspace_bytes() + self._torch_bytes().total

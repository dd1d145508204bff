"""Peer-mapped memory outside the communicator, released before the driver's checkpoint and mapped again afterwards.

Knows CUDA's virtual memory and file descriptors. Does not know when it is called: the coordinator orders the hooks
around the driver's stages. The ranks agree over host sockets, because the communicator is suspended by then.

Each rank makes memory of its own, exports it as a file descriptor, and maps everybody else's at addresses that it
reserved once: the way NCCL and FlashInfer reach peers without CUDA IPC. An import that is alive makes the checkpoint
succeed and every restore fail, and an exported allocation cannot be checkpointed either, so
:meth:`checkpoint_prepare` lets go of both and keeps only address ranges. No multicast object is ever made.

FlashInfer's workspaces have the same two methods (TRT-LLM all-reduce fusion, from the release that holds
https://github.com/flashinfer-ai/flashinfer/pull/3950), except that their ``checkpoint_restore`` takes the backend over
which the ranks exchange handles. A worker wraps them to pass it and appends the wrapper to ``context.workspaces``; the
backend has to be on host sockets (``TorchDistBackend`` of a gloo group). The ``trtllm`` backend passes
``enable_multicast=False``; ``mnnvl`` multicasts and is not accepted, and workspaces on torch's symmetric memory refuse
the hooks (NotImplementedError). Under vLLM also mind the compile pass ``fuse_allreduce_rms``, which makes workspaces of
its own.
"""

from __future__ import annotations

import ctypes
import os

from checkpoint_executor.workers.cuda_calls import PrimaryContext, bindings, call
from checkpoint_executor.workers.cuda_memory import DeviceProperties
from checkpoint_executor.workers.cuda_rendezvous import HostGroup

__all__ = ["CudaWorkspace"]


class CudaWorkspace:
    """Meets :class:`~checkpoint_executor.workers.protocols.Workspace`. The constructor is collective.

    Args:
        context: this rank's device. group: whose ranks share it.
        size_bytes: of each rank's part, the same on every rank.

    Raises:
        MemoryError: no room on the device. ConnectionError, TimeoutError: a rank is gone, or late.
        DriverError: the devices cannot reach each other.

    Contents are zero at first and after every restore.
    """

    def __init__(self, context: PrimaryContext, group: HostGroup, size_bytes: int) -> None:
        self._context = context
        self._group = group
        self._size_bytes = size_bytes
        context.make_current()
        self._properties = DeviceProperties(context, exportable=group.world_size > 1)
        self._mapped_bytes = self._properties.rounded(size_bytes)
        #: By rank: where its part is in this process. Never changes.
        self._addresses = [
            int(call("cuMemAddressReserve", self._mapped_bytes, 0, 0, 0)) for _ in range(group.world_size)
        ]
        self._prepared = True
        self.checkpoint_restore()

    @property
    def address(self) -> int:
        """Where this rank's part is, prepared or not."""
        return self._addresses[self._group.rank]

    @property
    def addresses(self) -> tuple[int, ...]:
        """By rank: where every rank's part is in this process, prepared or not."""
        return tuple(self._addresses)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory that this rank's part takes now; the peers' parts are on theirs."""
        return 0 if self._prepared else self._mapped_bytes

    def checkpoint_prepare(self) -> None:
        """Release peer memory and this rank's own, keep the addresses. Collective; nothing happens the second time.

        Raises:
            ConnectionError, TimeoutError: a rank is gone, or late.
        """
        if self._prepared:
            return
        self._context.synchronize()
        # Nobody unmaps while somebody's kernel may still look at its memory.
        self._group.barrier("workspace prepare: idle")
        for address in self._addresses:
            call("cuMemUnmap", address, self._mapped_bytes)
        self._prepared = True
        # And nobody goes on to be locked while somebody still holds an import of its memory.
        self._group.barrier("workspace prepare: released")

    def checkpoint_restore(self) -> None:
        """Map it again at the same addresses, all zero. Collective; nothing happens the second time.

        Raises:
            MemoryError: no room on the device. ConnectionError, TimeoutError: a rank is gone, or late.
        """
        if not self._prepared:
            return
        self._context.make_current()
        descriptor = self._make_own()
        shared = [descriptor] if descriptor is not None else []
        try:
            parts = self._group.exchange("workspace handles", descriptors=shared)
            for rank, part in enumerate(parts):
                for imported in part.descriptors:
                    try:
                        self._import(rank, imported)
                    finally:
                        os.close(imported)
        finally:
            for each in shared:
                os.close(each)
        self._prepared = False
        # Nobody writes to a peer, or prepares, before everybody has mapped and cleared.
        self._group.barrier("workspace mapped")

    def swap(self, data: bytes) -> list[bytes]:
        """Write ``data`` to this rank's part and read that of every rank, in rank order. Collective.

        Every rank passes the same number of bytes.

        Raises:
            RuntimeError: prepared for a checkpoint. ValueError: more than ``size_bytes``.
            ConnectionError, TimeoutError: a rank is gone, or late.
        """
        if self._prepared:
            raise RuntimeError("the workspace is prepared for a checkpoint; checkpoint_restore() first")
        if len(data) > self._size_bytes:
            raise ValueError(f"{len(data)} bytes do not fit into a workspace of {self._size_bytes}")
        self._context.make_current()
        source = ctypes.create_string_buffer(data, len(data))
        call("cuMemcpyHtoD", self.address, ctypes.addressof(source), len(data))
        self._context.synchronize()
        self._group.barrier("workspace swap: written")
        found = []
        for address in self._addresses:
            target = ctypes.create_string_buffer(len(data))
            call("cuMemcpyDtoH", ctypes.addressof(target), address, len(data))
            found.append(target.raw)
        # Or a fast rank's next swap would overwrite what a slow one still reads.
        self._group.barrier("workspace swap: read")
        return found

    # Details

    def _make_own(self) -> int | None:
        """Map this rank's part; a file descriptor of it, which the caller closes, None without peers."""
        handle = call("cuMemCreate", self._mapped_bytes, self._properties.allocation, 0)
        try:
            self._map(self.address, handle)
            call("cuMemsetD8", self.address, 0, self._mapped_bytes)
            self._context.synchronize()
            if self._group.world_size == 1:
                return None
            kind = bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            return int(call("cuMemExportToShareableHandle", handle, kind, 0))
        finally:
            # The mappings, here and at the peers, keep the memory.
            call("cuMemRelease", handle)

    def _import(self, rank: int, descriptor: int) -> None:
        kind = bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call("cuMemImportFromShareableHandle", descriptor, kind)
        try:
            self._map(self._addresses[rank], handle)
        finally:
            call("cuMemRelease", handle)

    def _map(self, address: int, handle: object) -> None:
        call("cuMemMap", address, self._mapped_bytes, 0, handle, 0)
        call("cuMemSetAccess", address, self._mapped_bytes, [self._properties.access], 1)

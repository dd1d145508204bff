"""Peer-mapped memory outside the communicator, as a FlashInfer all-reduce workspace is on a GPU.

Knows how to give its mappings up and take them back; the order around the driver's checkpoint belongs to the
coordinator. The ranks agree over the communicator's sockets, never over its staging memory: when ``checkpoint_prepare``
is called the communicator is suspended.
"""

from __future__ import annotations

from checkpoint_executor.softgpu import ImportedSegment, SoftProcess
from checkpoint_executor.workers.soft_communicator import SoftCommunicator

__all__ = ["SoftWorkspace"]


class SoftWorkspace:
    """Meets :class:`~checkpoint_executor.workers.protocols.Workspace`: a segment of each rank, mapped by all ranks.

    The constructor is collective.

    Args:
        process: this rank's device. communicator: whose ranks share it. size_bytes: of each rank's segment.

    Raises:
        MemoryError: no room on the device.
    """

    def __init__(self, process: SoftProcess, communicator: SoftCommunicator, size_bytes: int) -> None:
        self._process = process
        self._communicator = communicator
        self._segment = process.allocate(size_bytes)
        #: By rank; None stands for this rank's own segment. Empty while prepared.
        self._imports: list[ImportedSegment | None] = []
        self._prepared = False
        self._import_peers()

    @property
    def address(self) -> int:
        """Where this rank's segment is, prepared or not."""
        return self._segment.address

    @property
    def size_bytes(self) -> int:
        return self._segment.size_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory that this rank's part takes now."""
        return 0 if self._prepared else self._segment.size_bytes

    def checkpoint_prepare(self) -> None:
        """Release peer memory and drop the segment, keep its address. Collective; nothing happens the second time.

        Raises:
            ConnectionError: a rank is gone.
        """
        if self._prepared:
            return
        self._communicator.barrier("workspace prepare: begin")
        self._release_peers()
        # A rank that dropped its segment sooner would leave the others with mappings of nothing (SIGBUS).
        self._communicator.barrier("workspace prepare: peers released")
        self._segment.unmap()
        self._prepared = True

    def checkpoint_restore(self) -> None:
        """Map it again at the same address, contents undefined. Collective; nothing happens the second time.

        Raises:
            MemoryError: no room on the device. ConnectionError: a rank is gone.
        """
        if not self._prepared:
            return
        self._process.require_local_memory()
        self._segment.map()
        self._import_peers()
        self._prepared = False

    def swap(self, data: bytes) -> list[bytes]:
        """Write ``data`` to this rank's segment and read that of every rank, in rank order. Collective.

        Every rank passes the same number of bytes.

        Raises:
            RuntimeError: prepared for a checkpoint. ValueError: more than ``size_bytes``.
            ConnectionError: a rank is gone.
        """
        if self._prepared:
            raise RuntimeError("the workspace is prepared for a checkpoint; checkpoint_restore() first")
        with self._process.call():
            self._segment.write(data)
            self._communicator.barrier("workspace swap: written")
            buffers = [self._segment.buffer if peer is None else peer.buffer for peer in self._imports]
            found = [bytes(buffer[: len(data)]) for buffer in buffers]
            # Or a fast rank's next swap would overwrite what a slow one still reads.
            self._communicator.barrier("workspace swap: read")
        return found

    def close(self) -> None:
        """Give it up; not a collective."""
        self._release_peers()
        self._process.free(self._segment)

    def _import_peers(self) -> None:
        own = self._segment.export()
        handles = [handle.decode() for handle in self._communicator.exchange("workspace handles", own.encode())]
        self._imports = [None if handle == own else self._process.import_segment(handle) for handle in handles]
        # Nobody prepares, and so unmaps, before everybody has imported.
        self._communicator.barrier("workspace mapped")

    def _release_peers(self) -> None:
        for peer in self._imports:
            if peer is not None:
                peer.release()
        self._imports = []

"""Host memory for cumem's backups: got once, given out in pieces, and what is proven to lie in each piece.

cumem asks for a piece for each of its allocations at every sleep and lets go of all of them at the wake, so the same
pieces come round in the same order, and what a sleep put there is still there at the next. A piece remembers the
fingerprint of that; where it equals the fingerprint of what is to be copied there, nothing has to be copied.

Knows the arena and how it is divided. Knows nothing of cumem, and copies nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from checkpoint_executor.workers.cuda_arena import HostArena
from checkpoint_executor.workers.cuda_calls import PrimaryContext, bindings, call
from checkpoint_executor.workers.cuda_hash import Hasher, open_hasher

__all__ = ["BackupMemory", "Piece", "aligned"]

logger = init_logger(f"vllm.{__name__}")

#: Pieces begin at multiples of this, for the copy engine's sake.
_ALIGNMENT = 2 << 20


def aligned(size_bytes: int) -> int:
    """The room that a piece of so many bytes takes."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True, eq=False)
class Piece:
    """A part of the host memory.

    Attributes:
        address, size_bytes: where it lies. fingerprint: of the bytes that lie there, None if nobody vouches for them.
    """

    address: int
    size_bytes: int
    fingerprint: bytes | None = None


class BackupMemory:
    """All the host memory for backups of this process. For one thread at a time, beside its own."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._thread: threading.Thread | None = None
        self._context: PrimaryContext | None = None
        self._hasher: Hasher | None = None

    @property
    def capacity_bytes(self) -> int:
        """Host memory of all of it."""
        return sum(chunk.capacity_bytes for chunk in self._chunks)

    @property
    def hasher(self) -> Hasher | None:
        """Takes fingerprints of device memory; None before there is any room here, and where no kernel can be had."""
        return self._hasher

    def prepare_early(self, size_bytes: int) -> None:
        """Get the memory, and compile the kernel, in a thread; returns at once."""
        if self._thread is not None or size_bytes <= 0:
            return
        ordinal = torch.cuda.current_device()

        def prepare() -> None:
            try:
                # A capture of graphs in another thread forbids such calls everywhere, unless this thread says that it
                # knows what it does.
                driver = bindings()
                call("cuThreadExchangeStreamCaptureMode", driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
                self._grow(size_bytes, ordinal)
            except Exception as error:  # noqa: BLE001 - only speed is lost: the first sleep tries again
                logger.warning("the backup arena could not be made ahead of the first sleep: %s", error)

        self._thread = threading.Thread(target=prepare, name="backup-arena", daemon=True)
        self._thread.start()

    def make_room(self, sizes_bytes: Sequence[int]) -> None:
        """Have room for pieces of these sizes, taken in this order. Gets what is missing, and keeps it."""
        if self._thread is not None:
            self._thread.join()
        free = [chunk.free_bytes for chunk in self._chunks]
        missing = 0
        for size_bytes in sizes_bytes:
            place = next((index for index, room in enumerate(free) if size_bytes <= room), None)
            if place is None:
                missing += aligned(size_bytes)
            else:
                free[place] -= aligned(size_bytes)
        if missing > 0:
            try:
                self._grow(missing, torch.cuda.current_device())
            except Exception as error:  # noqa: BLE001 - torch's pinned memory serves as well, only slower
                logger.warning("the backup arena could not grow by %d MiB: %s", missing >> 20, error)

    def take(self, size_bytes: int) -> tuple[torch.Tensor, Piece] | None:
        """A piece as a tensor of bytes, or None if there is no room. It is free again when the tensor is gone."""
        for chunk in self._chunks:
            if (taken := chunk.take(size_bytes)) is not None:
                return taken
        return None

    def _grow(self, size_bytes: int, ordinal: int) -> None:
        if self._context is None:
            self._context = PrimaryContext(ordinal)
            self._hasher = open_hasher(self._context)
        arena = HostArena(numa_node=self._context.numa_node)
        arena.prepare(size_bytes)
        self._chunks.append(_Chunk(arena))
        logger.info("backup arena: %d MiB of pinned host memory", arena.capacity_bytes >> 20)


class _Chunk:
    """One arena and its pieces. Given out from the front, and all free again when no tensor of it is alive."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        #: Side by side from the front. Those behind the first ``_given`` wait for the next round.
        self._pieces: list[Piece] = []
        self._given = 0
        self._used_bytes = 0
        self._alive = 0

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    @property
    def free_bytes(self) -> int:
        return self._arena.capacity_bytes - self._used_bytes

    def take(self, size_bytes: int) -> tuple[torch.Tensor, Piece] | None:
        if size_bytes > self.free_bytes:
            return None
        tensor = torch.frombuffer(self._arena.view(self._used_bytes, size_bytes), dtype=torch.uint8)
        if self._given == len(self._pieces) or self._pieces[self._given].size_bytes != size_bytes:
            # The round differs from the one before: from here on pieces lie elsewhere, and overwrite what was there.
            del self._pieces[self._given :]
            self._pieces.append(Piece(self._arena.address + self._used_bytes, size_bytes))
        piece = self._pieces[self._given]
        self._given += 1
        self._used_bytes += aligned(size_bytes)
        self._alive += 1
        weakref.finalize(tensor, self._gone).atexit = False
        return tensor, piece

    def _gone(self) -> None:
        self._alive -= 1
        if self._alive == 0:
            self._given = self._used_bytes = 0

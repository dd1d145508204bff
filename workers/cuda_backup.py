"""Where each allocation's bytes lie in the host arena, and which of them are proven to be still right.

Decides what has to be copied; copies nothing itself and calls no CUDA. The rule is one: what is not proven is copied.
A region is proven if it is the same allocation, at the same place in an arena that was not given up since, and its
fingerprint equals the one recorded when its bytes were last put there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["Backup", "Region"]


class Arena(Protocol):
    """What is needed of :class:`~checkpoint_executor.workers.cuda_arena.HostArena`."""

    @property
    def address(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def prepare(self, size_bytes: int) -> None: ...
    def close(self) -> None: ...


class Region(NamedTuple):
    """Device memory to back up. ``key`` names the allocation and is never used again for another."""

    key: int
    address: int
    size_bytes: int


class Backup:
    """The arena's table of contents."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._generation = arena.generation
        self._sizes: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._fingerprints: dict[int, bytes] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes laid out: exactly the sum of the regions, nothing between them."""
        return sum(self._sizes.values())

    def lay_out(self, regions: Sequence[Region]) -> None:
        """Make room for these regions and no others. What lies there already stays if they are the same as before.

        Raises:
            MemoryError: no host memory; then nothing is backed up.
        """
        sizes = {region.key: region.size_bytes for region in regions}
        if sizes == self._sizes and self._arena.generation == self._generation:
            return
        # Nothing is laid out until there is room: the next call has to try again.
        self._forget({})
        self._arena.prepare(sum(sizes.values()))
        self._sizes = sizes
        self._generation = self._arena.generation
        # Odd sizes last, so that all others lie aligned although nothing is left between them.
        offset = 0
        for region in sorted(regions, key=lambda region: region.size_bytes % 512 != 0):
            self._offsets[region.key] = offset
            offset += region.size_bytes

    def holds(self, region: Region, fingerprint: bytes | None) -> bool:
        """Whether the region's bytes are proven to be there already.

        If not, what is there is forgotten until :meth:`record` vouches for it: a copy that breaks off proves nothing.

        Args:
            fingerprint: of the region's present contents, None if there is none: then nothing is proven.
        """
        if fingerprint is not None and self._fingerprints.get(region.key) == fingerprint:
            return True
        self._fingerprints.pop(region.key, None)
        return False

    def record(self, region: Region, fingerprint: bytes | None) -> None:
        """The arena now holds the region's bytes, whose fingerprint this is."""
        if fingerprint is not None:
            self._fingerprints[region.key] = fingerprint

    def place(self, region: Region) -> int:
        """Host address of a region's bytes.

        Raises:
            RuntimeError: they are not there.
        """
        if self._sizes.get(region.key) != region.size_bytes or self._arena.generation != self._generation:
            raise RuntimeError(f"no backup of the {region.size_bytes} bytes at {region.address:#x}")
        return self._arena.address + self._offsets[region.key]

    def discard(self) -> None:
        """Give the host memory up."""
        self._arena.close()
        self._forget({})

    def _forget(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self._offsets.clear()
        self._fingerprints.clear()

"""What the ways to give memory back have in common, whosever workers they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Rates", "Way", "gb_s"]

#: By name (``copy_down_gb_s``, ``copy_up_gb_s``), by rank.
Rates = dict[str, list[float]]


class Way(Protocol):
    """One way, on the ranks of one launch."""

    def down(self) -> None:
        """Give the memory back."""
        ...

    def up(self) -> None:
        """Get it again."""
        ...

    def states(self) -> list[str]:
        """By rank, in words, while asleep."""
        ...

    def rates(self, moved_bytes: Sequence[int]) -> Rates:
        """Of the last cycle, by rank, GB/s; empty where nothing was copied.

        Args:
            moved_bytes: by how much each device's reading went down.
        """
        ...


def gb_s(seconds: Sequence[float], size_bytes: Sequence[int]) -> list[float]:
    """By rank; of all ranks or of none."""
    pairs = list(zip(seconds, size_bytes, strict=True))
    if any(elapsed_s <= 0 or size <= 0 for elapsed_s, size in pairs):
        return []
    return [size / elapsed_s / 1e9 for elapsed_s, size in pairs]

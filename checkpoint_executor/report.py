"""PURE. What a sleep or a wake reports, as data."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["CycleReport", "StageReport"]


class StageReport(Struct, frozen=True):
    """One stage.

    Attributes:
        name: the stage. wall_s: from sending it until its last rank had answered, seconds.
        ranks: by rank, the seconds the rank itself reports.
        figures: by rank, bytes by name, as far as the stage reports any.
    """

    name: str
    wall_s: float
    ranks: tuple[float, ...]
    figures: tuple[dict[str, int], ...] = ()

    @property
    def overhead_s(self) -> float:
        """What the executor itself cost: wall time less the slowest rank's own time."""
        return self.wall_s - max(self.ranks, default=0.0)


class CycleReport(Struct, frozen=True):
    """A sleep, a release or a wake.

    Attributes:
        operation: ``"sleep"``, ``"release"``, ``"wake"``, or ``"pause"`` for level 0.
        performed: False for an acknowledged no-op; ``warnings`` say why.
        wall_s: the whole call, seconds. stages: in order.
        device_bytes_before, device_bytes_after: by rank, bytes in use on the rank's device, read from outside the
            workers (NVML, or the software device's ledger); empty where not read.
        sleeping: tags asleep afterwards.
    """

    operation: str
    performed: bool
    wall_s: float
    stages: tuple[StageReport, ...] = ()
    device_bytes_before: tuple[int, ...] = ()
    device_bytes_after: tuple[int, ...] = ()
    sleeping: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

"""PURE. What a sleep or a wake reports, as data."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["CycleReport", "MemoryStep", "RankMemory", "StageReport"]


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


class RankMemory(Struct, frozen=True):
    """Whose the bytes on one rank's device are, and what the rank takes in host memory.

    Attributes:
        rank: whose. empty_bytes: on the device before the executor was started, by anybody.
        used_bytes: on the device beyond that, by everybody, read from outside the workers.
        kinds: bytes by kind (:data:`~checkpoint_executor.attribution.KINDS`). They add up to ``used_bytes``, because
            ``remainder`` is what nobody accounts for; it is negative where the parts come to more than was read.
        host: bytes of host memory: ``backup_arena`` (the allocator's backup of the weights), ``driver_backup`` (by how
            much the worker's anonymous memory grew across its checkpoint; 0 at every other step), ``rss`` (all of it).
        unaccounted: parts of the remainder that have a name: ``torch`` is what torch's ordinary pool holds beside
            cuBLAS's workspaces.
    """

    rank: int
    used_bytes: int
    empty_bytes: int
    kinds: dict[str, int]
    host: dict[str, int]
    unaccounted: dict[str, int] = {}


class MemoryStep(Struct, frozen=True):
    """The devices at one step: ``"awake"``, ``"allocator_asleep"`` and so on
    (:data:`~checkpoint_executor.attribution.STEPS`)."""

    step: str
    ranks: tuple[RankMemory, ...]


class CycleReport(Struct, frozen=True):
    """A sleep, a release or a wake.

    Attributes:
        operation: ``"sleep"``, ``"release"``, ``"wake"``, or ``"pause"`` for level 0.
        performed: False for an acknowledged no-op; ``warnings`` say why.
        wall_s: the whole call, seconds. stages: in order.
        device_bytes_before, device_bytes_after: by rank, bytes in use on the rank's device, read from outside the
            workers (NVML, or the software device's ledger); empty where not read.
        sleeping: tags asleep afterwards.
        memory: with ``attribution=True``, whose the devices' bytes were after each stage that moves memory.
    """

    operation: str
    performed: bool
    wall_s: float
    stages: tuple[StageReport, ...] = ()
    device_bytes_before: tuple[int, ...] = ()
    device_bytes_after: tuple[int, ...] = ()
    sleeping: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: tuple[MemoryStep, ...] = ()

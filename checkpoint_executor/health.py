"""PURE. What an executor tells those who watch over it: its status as plain data, and each event as it happens.

Not to be confused with ``status.py``, which puts a few of these facts into a file for ``checkpoint-executor status``.
The control thread reports to a :class:`HealthRecord`; any thread may ask it for a :class:`HealthStatus`. The clock is
the caller's. "Asleep is not dead" is said here, once, in :attr:`HealthStatus.live` and :attr:`HealthStatus.ready`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from checkpoint_executor.report import CycleReport

__all__ = [
    "Failure",
    "HealthEvent",
    "HealthRecord",
    "HealthStatus",
    "Operated",
    "PhaseChanged",
    "RankFootprint",
    "Refused",
    "footprints",
]

_log = logging.getLogger(__name__)

#: Phases that no executor leaves again.
_ENDED = frozenset({"failed", "closing", "closed"})


class Refused(Struct, frozen=True):
    """A request that was not carried out.

    Attributes:
        cause: ``"no_memory"``, ``"busy"``, ``"undone"`` and so on (:class:`~checkpoint_executor.messages.Refusal`).
        message: what the caller was told. at_s: when, seconds since 1970.
    """

    cause: str
    message: str
    at_s: float


class Failure(Struct, frozen=True):
    """The end of an executor.

    Attributes:
        cause: ``"deadline"``, ``"process_exit"``, ``"stage_error"`` (:class:`~checkpoint_executor.messages.CauseKind`),
            or ``"crash"``. stage: in which stage. message: the error's. at_s: when, seconds since 1970.
    """

    cause: str
    stage: str | None
    message: str
    at_s: float


class PhaseChanged(Struct, frozen=True):
    """A new phase."""

    phase: str
    at_s: float


class Operated(Struct, frozen=True):
    """A start, sleep, release or wake was carried out."""

    report: CycleReport
    at_s: float


HealthEvent = PhaseChanged | Operated | Refused | Failure


class RankFootprint(Struct, frozen=True):
    """What a rank has.

    Attributes:
        rank, pid: who. device: its GPU's UUID, or the software device's name.
        device_bytes: in use on that device by everybody, when it was last read (after the last sleep or wake).
        wake_bytes: by kind (``weights``, ``kv_cache``, ``suspendable``, ``local_memory``), device bytes that the rank
            had when it last fell asleep and that waking it takes; empty before the first sleep.
    """

    rank: int
    pid: int
    device: str = ""
    device_bytes: int | None = None
    wake_bytes: dict[str, int] = {}


class HealthStatus(Struct, frozen=True):
    """An executor at one moment.

    Attributes:
        phase: ``"awake"``, ``"checkpointed"``, ``"suspending"`` and so on. since_s: since when, seconds since 1970.
        sleeping: tags asleep. paused: whether ``sleep(level=0)`` is in force.
        cycles: how many sleeps were woken from, all tags. operations: how many of each kind were carried out.
        refusals: how many, by cause. last_refusal, last_report: the last of each. failure: why it ended, if it failed.
        ranks: what each rank has.
    """

    phase: str
    since_s: float
    sleeping: tuple[str, ...] = ()
    paused: bool = False
    cycles: int = 0
    operations: dict[str, int] = {}
    refusals: dict[str, int] = {}
    last_report: CycleReport | None = None
    last_refusal: Refused | None = None
    failure: Failure | None = None
    ranks: tuple[RankFootprint, ...] = ()

    @property
    def live(self) -> bool:
        """Whether to leave it alone. Asleep, falling asleep and waking are alive: each stage has a deadline of its own,
        and an executor that misses one fails by itself."""
        return self.phase not in _ENDED

    @property
    def ready(self) -> bool:
        """Whether it can take work: awake, with all of its memory, and not paused."""
        return self.phase == "awake" and not self.sleeping and not self.paused


class HealthRecord:
    """Collects what happens. Written by one thread, read by any."""

    def __init__(self, phase: str, now_s: float) -> None:
        # Replaced as a whole, so that a reader in another thread never sees half of a change.
        self._status = HealthStatus(str(phase), now_s)
        #: Called with each event on the thread that reports it, the executor's own: they must return soon.
        self.listeners: list[Callable[[HealthEvent], None]] = []

    def phase_is(self, phase: str, sleeping: frozenset[str], paused: bool, now_s: float) -> None:
        """Where the executor is; an event only if the phase is another than before."""
        before = self._status
        phase = str(phase)  # plain data: an enum of ours could not leave a supervised engine
        changed = phase != before.phase
        since_s = now_s if changed else before.since_s
        self._status = replace(before, phase=phase, since_s=since_s, sleeping=tuple(sorted(sleeping)), paused=paused)
        if changed:
            self._tell(PhaseChanged(phase, now_s))

    def operated(self, report: CycleReport, now_s: float) -> None:
        """Something was carried out. A no-op does not count."""
        if not report.performed:
            return
        before = self._status
        woken = report.operation == "wake" and not report.sleeping
        slept = before.operations.get("sleep", 0)
        self._status = replace(
            before,
            # A wake after a release ends no sleep.
            cycles=min(slept, before.cycles + 1) if woken else before.cycles,
            operations=_counted(before.operations, report.operation),
            last_report=report,
        )
        self._tell(Operated(report, now_s))

    def refused(self, cause: str, message: str, now_s: float) -> None:
        """A request was refused."""
        event = Refused(cause, message, now_s)
        refusals = _counted(self._status.refusals, cause)
        self._status = replace(self._status, refusals=refusals, last_refusal=event)
        self._tell(event)

    def failed(self, cause: str, stage: str | None, message: str, now_s: float) -> None:
        """The executor ended. Only the first cause counts."""
        if self._status.failure is None:
            event = Failure(cause, stage, message, now_s)
            self._status = replace(self._status, failure=event)
            self._tell(event)

    def status(self, ranks: Sequence[RankFootprint] = ()) -> HealthStatus:
        """The status, with what the caller knows about the ranks."""
        return replace(self._status, ranks=tuple(ranks))

    def _tell(self, event: HealthEvent) -> None:
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - logged with its traceback
                # A counter that cannot count must not take an engine with it.
                _log.exception("a listener failed and is not called again")
                self.listeners.remove(listener)


def footprints(
    pids: Mapping[int, int],
    devices: Mapping[int, str],
    wake_bytes: Mapping[int, Mapping[str, int]],
    report: CycleReport | None,
) -> tuple[RankFootprint, ...]:
    """What each rank has, from what the control thread knows.

    Args:
        pids, devices, wake_bytes: by rank. report: the last one, for its readings of the devices.
    """
    readings = report.device_bytes_after if report is not None else ()
    kinds = ("weights", "kv_cache", "suspendable", "local_memory")
    return tuple(
        RankFootprint(
            rank,
            pid,
            devices.get(rank, ""),
            readings[rank] if rank < len(readings) else None,
            {kind: size for kind in kinds if (size := wake_bytes.get(rank, {}).get(kind)) is not None},
        )
        for rank, pid in sorted(pids.items())
    )


def _counted(counts: Mapping[str, int], name: str) -> dict[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}

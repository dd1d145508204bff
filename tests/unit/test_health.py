"""The health record: what it counts, and what "alive" and "ready" mean in each phase."""

from __future__ import annotations

import logging

import pytest

from checkpoint_executor.coordinator import Phase
from checkpoint_executor.health import (
    Failure,
    HealthEvent,
    HealthRecord,
    Operated,
    PhaseChanged,
    RankFootprint,
    Refused,
    footprints,
)
from checkpoint_executor.report import CycleReport

NOTHING: frozenset[str] = frozenset()


def report(operation: str, sleeping: tuple[str, ...] = (), performed: bool = True) -> CycleReport:
    return CycleReport(operation, performed, 0.5, device_bytes_after=(10, 20), sleeping=sleeping)


def test_the_phase_has_the_time_of_its_beginning() -> None:
    record = HealthRecord("starting", 1.0)
    record.phase_is("starting", NOTHING, False, 2.0)
    assert (record.status().phase, record.status().since_s) == ("starting", 1.0)
    record.phase_is("awake", frozenset({"kv_cache"}), True, 3.0)
    status = record.status()
    assert (status.phase, status.since_s, status.sleeping, status.paused) == ("awake", 3.0, ("kv_cache",), True)


@pytest.mark.parametrize("phase", list(Phase))
def test_asleep_is_not_dead_and_not_ready(phase: Phase) -> None:
    record = HealthRecord(phase, 0.0)
    dead = {Phase.FAILED, Phase.CLOSING, Phase.CLOSED}
    assert record.status().live is (phase not in dead)
    assert record.status().ready is (phase is Phase.AWAKE)


@pytest.mark.parametrize(("sleeping", "paused"), [(frozenset({"kv_cache"}), False), (NOTHING, True)])
def test_awake_is_not_ready_without_all_memory_or_while_paused(sleeping: frozenset[str], paused: bool) -> None:
    record = HealthRecord("awake", 0.0)
    record.phase_is("awake", sleeping, paused, 1.0)
    assert record.status().live
    assert not record.status().ready


def test_cycles_are_sleeps_that_were_woken_from() -> None:
    record = HealthRecord("awake", 0.0)
    steps = [
        (report("start"), 0),
        (report("sleep", ("kv_cache", "weights")), 0),
        (report("wake", ("kv_cache",)), 0),  # in two parts
        (report("wake"), 1),
        (report("sleep", ("kv_cache", "weights"), performed=False), 1),
        (report("release", ("kv_cache",)), 1),
        (report("wake"), 1),  # ends no sleep
        (report("sleep", ("kv_cache", "weights")), 1),
        (report("wake"), 2),
    ]
    for step, cycles in steps:
        record.operated(step, 1.0)
        assert record.status().cycles == cycles
    assert record.status().operations == {"start": 1, "sleep": 2, "wake": 4, "release": 1}
    assert record.status().last_report == steps[-1][0]


def test_refusals_are_counted_by_cause_and_the_last_is_kept() -> None:
    record = HealthRecord("awake", 0.0)
    record.refused("busy", "another call is in progress", 1.0)
    record.refused("no_memory", "GPU-0 lacks 5 bytes", 2.0)
    record.refused("busy", "another call is in progress", 3.0)
    assert record.status().refusals == {"busy": 2, "no_memory": 1}
    assert record.status().last_refusal == Refused("busy", "another call is in progress", 3.0)


def test_the_first_cause_stands() -> None:
    record = HealthRecord("awake", 0.0)
    record.failed("deadline", "restore", "no answer", 1.0)
    record.failed("process_exit", None, "worker 0 died", 2.0)
    assert record.status().failure == Failure("deadline", "restore", "no answer", 1.0)


def test_listeners_hear_every_event_once() -> None:
    record = HealthRecord("awake", 0.0)
    heard: list[HealthEvent] = []
    record.listeners.append(heard.append)
    record.phase_is("awake", NOTHING, False, 1.0)
    record.phase_is("suspending", NOTHING, False, 2.0)
    record.operated(report("sleep", performed=False), 3.0)
    record.operated(report("sleep"), 3.0)
    record.refused("busy", "no", 4.0)
    record.failed("crash", None, "boom", 5.0)
    record.failed("crash", None, "boom", 6.0)
    assert heard == [
        PhaseChanged("suspending", 2.0),
        Operated(report("sleep"), 3.0),
        Refused("busy", "no", 4.0),
        Failure("crash", None, "boom", 5.0),
    ]


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    health = HealthRecord("awake", 0.0)
    heard: list[HealthEvent] = []

    def fail(event: HealthEvent) -> None:
        raise RuntimeError("no space left")

    health.listeners += [fail, heard.append]
    with caplog.at_level(logging.ERROR):
        health.refused("busy", "no", 1.0)
        health.refused("busy", "no", 2.0)
    assert len(heard) == 2
    assert [record.message for record in caplog.records] == ["a listener failed and is not called again"]


def test_footprints_put_together_what_is_known_of_each_rank() -> None:
    found = footprints(
        {1: 101, 0: 100},
        {0: "GPU-0"},
        {0: {"weights": 5, "kv_cache": 0, "suspendable": 7, "local_memory": 3, "copied": 5, "torch_cache": 1}},
        report("sleep"),
    )
    assert found == (
        RankFootprint(0, 100, "GPU-0", 10, {"weights": 5, "kv_cache": 0, "suspendable": 7, "local_memory": 3}),
        RankFootprint(1, 101, "", 20, {}),
    )
    assert footprints({0: 100}, {}, {}, None) == (RankFootprint(0, 100),)

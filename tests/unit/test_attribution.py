"""Whose the bytes are: the arithmetic, the plans with readings, and what a GPU worker's ledger makes of torch's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from checkpoint_executor.attribution import KINDS, LEDGER_KINDS, STEPS, Observation, memory_steps
from checkpoint_executor.coordinator import OWN_STAGES, VLLM_STAGES, OnError, StageLists, Who, attributed
from checkpoint_executor.driver_states import DriverCode, DriverError
from checkpoint_executor.helper.accounts import Accounts
from checkpoint_executor.helper.drivers import DeviceMemory
from checkpoint_executor.workers.cuda_ledger import DeviceMeter, NoMeter, torch_bytes
from tests.support.coordinator_walk import walk

LEDGER = {"weights": 100, "kv_cache": 50, "context": 7, "backup_arena": 128, "torch": 3}


def seen(step: str, device_bytes: int, rank: int = 0, **outside: int) -> Observation:
    return Observation(step, rank, device_bytes, LEDGER, {"empty": 10, "helper": 4, "rss": 1000, **outside})


# ---------------------------------------------------------------------------------------------- arithmetic


def test_what_nobody_accounts_for_is_the_remainder() -> None:
    (step,) = memory_steps("sleep", [seen("awake", 200)])
    (memory,) = step.ranks
    assert (memory.empty_bytes, memory.used_bytes) == (10, 190)
    assert tuple(memory.kinds) == KINDS
    assert memory.kinds["remainder"] == 190 - (100 + 50 + 7) - 4
    assert sum(memory.kinds.values()) == memory.used_bytes
    assert memory.unaccounted == {"torch": 3}


def test_parts_that_come_to_more_than_was_read_are_not_hidden() -> None:
    (step,) = memory_steps("sleep", [seen("awake", 100)])
    assert step.ranks[0].kinds["remainder"] == 90 - 161 == -71


def test_a_checkpointed_process_has_nothing_on_the_device_whatever_it_said_last() -> None:
    readings = [seen("workspaces_prepared", 180, rss_anon=400), seen("asleep", 16, rss_anon=570)]
    prepared, asleep = memory_steps("sleep", readings)
    assert (prepared.step, asleep.step) == ("workspaces_prepared", "checkpointed")
    assert {kind for kind, size in asleep.ranks[0].kinds.items() if size} == {"helper", "remainder"}
    assert asleep.ranks[0].kinds["remainder"] == 16 - 10 - 4
    assert prepared.ranks[0].host == {"backup_arena": 128, "driver_backup": 0, "rss": 1000}
    assert asleep.ranks[0].host == {"backup_arena": 128, "driver_backup": 170, "rss": 1000}


def test_the_drivers_backup_is_each_ranks_own() -> None:
    readings = [
        seen("workspaces_prepared", 0, 0, rss_anon=100),
        seen("workspaces_prepared", 0, 1, rss_anon=1000),
        seen("asleep", 0, 1, rss_anon=1500),
        seen("asleep", 0, 0, rss_anon=101),
    ]
    ranks = memory_steps("sleep", readings)[1].ranks
    assert [(memory.rank, memory.host["driver_backup"]) for memory in ranks] == [(0, 1), (1, 500)]


def test_what_was_not_read_is_not_invented() -> None:
    (step,) = memory_steps("sleep", [Observation("asleep", 0, 5, {}, {})])
    assert step.ranks[0].host == {"backup_arena": 0, "driver_backup": 0, "rss": 0}
    assert step.ranks[0].kinds["remainder"] == 5


def test_a_release_ends_in_a_step_of_its_own_name() -> None:
    assert [step.step for step in memory_steps("release", [seen("awake", 1), seen("asleep", 1)])] == [
        "awake",
        "released",
    ]
    assert memory_steps("wake", []) == ()


# ---------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("stages", [OWN_STAGES, VLLM_STAGES], ids=["own", "vllm"])
def test_readings_are_added_and_nothing_else_changes(stages: StageLists) -> None:
    with_readings = attributed(stages)
    for name in ("start", "down", "up", "release", "wake"):
        before, after = getattr(stages, name), getattr(with_readings, name)
        added = [stage for stage in after if stage not in before]
        assert tuple(stage for stage in after if stage not in added) == before
        assert all(stage.on_error is OnError.IGNORE and not stage.undone_by for stage in added)
        assert all(stage.who is Who.HELPER for stage in added if stage.name != "account")
    assert with_readings.start == stages.start


def test_every_step_is_read_once_and_in_order() -> None:
    stages = attributed(OWN_STAGES)
    names = [stage.name.removeprefix("measure_") for stage in (*stages.down, *stages.up) if "measure_" in stage.name]
    assert tuple("checkpointed" if name == "asleep" else name for name in names) == STEPS


def test_stages_that_shared_a_deadline_still_do() -> None:
    stages = attributed(OWN_STAGES)
    for plan in (stages.down, stages.up):
        for before, stage in pairwise(plan):
            if stage.name not in ("measure_awake", "measure_asleep", "measure_woken") and "measure_" in stage.name:
                assert stage.deadline is before.deadline


@pytest.mark.parametrize("undo", [True, False])
def test_every_reachable_step_keeps_the_invariants_with_readings(undo: bool) -> None:
    seen_states = walk(2, attributed(OWN_STAGES), undo=undo)
    assert "measure_communicators_suspended" in seen_states.stages


# ---------------------------------------------------------------------------------------------- the helper


class TwoDevices:
    """A driver whose opening takes 4 bytes on each device."""

    def __init__(self) -> None:
        self.used = {"A": 100, "B": 0}

    def devices(self) -> tuple[str, ...]:
        return tuple(self.used)

    def device_memory(self, device: str) -> DeviceMemory:
        if device not in self.used:
            raise DriverError("device_memory", DriverCode.NO_DEVICE)
        return DeviceMemory(1000, self.used[device])


def test_the_helper_knows_what_was_there_before_and_what_is_its_own() -> None:
    import os

    from checkpoint_executor import procfs
    from checkpoint_executor.messages import Target

    driver: Any = TwoDevices()
    accounts = Accounts(driver)
    driver.used = {"A": 104, "B": 4, "C": 9}
    accounts.opened()
    target = Target(0, os.getpid(), procfs.start_time(os.getpid()), "A")
    figures = accounts.figures(target)
    assert (figures["empty"], figures["helper"]) == (100, 4)
    assert 0 < figures["rss_anon"] <= figures["rss"]
    late = accounts.figures(Target(0, os.getpid(), 0, "C"))  # made later, by a worker: nobody was there before
    assert (late["empty"], late["helper"]) == (0, 0)


def test_workers_that_were_there_before_the_first_reading_are_not_somebody_else() -> None:
    import os

    from checkpoint_executor.messages import Target

    mib = 1 << 20
    driver: Any = TwoDevices()
    driver.used = {"A": 1000 * mib, "B": 709 * mib}
    accounts = Accounts(driver)
    # The rest of A is somebody's, that of B nobody's: NVML's figures of processes are a little short.
    driver.device_memory = lambda device: DeviceMemory(9000 * mib, driver.used[device], ((os.getpid(), 700 * mib),))
    targets = [Target(0, os.getpid(), 0, "A"), Target(1, os.getpid(), 0, "B")]
    accounts.were_there(targets)
    assert [accounts.figures(target)["empty"] for target in targets] == [300 * mib, 0]


def test_where_the_driver_does_not_tell_holders_everything_is_taken_to_be_the_workers() -> None:
    import os

    from checkpoint_executor.messages import Target

    driver: Any = TwoDevices()
    accounts = Accounts(driver)
    target = Target(0, os.getpid(), 0, "A")
    assert accounts.figures(target)["empty"] == 100
    accounts.were_there([target])
    assert accounts.figures(target)["empty"] == 0


def test_a_device_that_cannot_be_read_keeps_nobody_from_starting(capsys: pytest.CaptureFixture[str]) -> None:
    driver: Any = TwoDevices()
    driver.devices = lambda: ("A", "no such device", "B")
    Accounts(driver).opened()
    assert "NO_DEVICE" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- a GPU worker's ledger


def test_a_meter_counts_what_is_not_explained() -> None:
    device = {"used": 100, "explained": 0, "settled": 0}
    meter = DeviceMeter(lambda: device["used"])
    with meter.watch("context"):
        device["used"] += 500
    meter.explain(lambda: device["explained"], lambda: device.update(settled=device["settled"] + 1))
    with meter.watch("graph_executables"):
        device["used"] += 70
        device["explained"] += 60
    with meter.watch("graph_executables"):
        device["used"] += 5
    assert meter.grown == {"context": 500, "graph_executables": 15}
    assert device["settled"] == 4


def test_only_the_first_replay_is_watched() -> None:
    readings = iter([10, 30])  # a third reading would be an error

    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    graph = Graph()
    meter = DeviceMeter(lambda: next(readings))
    watched = meter.watched(graph)
    watched.replay()
    watched.replay()
    assert graph.replays == 2
    assert meter.grown == {"graph_executables": 20}
    assert NoMeter().watched(graph) is graph


def test_torchs_bytes_are_told_apart_by_pool_and_size() -> None:
    pytest.importorskip("torch")
    workspace = 4096 * 8 * 1024

    def segment(address: int, total: int, pool: tuple[int, int] = (0, 0), *blocks: int, device: int = 0) -> Any:
        return {
            "device": device,
            "address": address,
            "total_size": total,
            "segment_pool_id": pool,
            "blocks": [{"size": size, "requested_size": size, "state": "active_allocated"} for size in blocks],
        }

    segments = [
        segment(1, 2 * workspace, (0, 0), workspace, 512),
        segment(2, 1000, (0, 1)),
        segment(3, 2000, (7, 0)),
        segment(4, 4000, (0, 2)),
        segment(5, 8000, device=1),
    ]
    found = torch_bytes(segments, 0, elsewhere=frozenset({4}))
    assert (found.graph_pools, found.cublas, found.other) == (3000, workspace, workspace)
    assert found.total == 2 * workspace + 3000


def test_every_kind_of_a_ledger_is_known() -> None:
    assert set(LEDGER_KINDS) < set(KINDS)

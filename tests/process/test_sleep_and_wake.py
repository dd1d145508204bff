"""The rules of sleep and wake-up: the sleep-mode page's executor section, one test a rule, on real processes."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_executor import AsleepError, CUDACheckpointExecutor, InvalidRequestError
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.softgpu import CONTEXT_BYTES, POISON_BYTE
from tests.support.executor_harness import SharedExecutor, SoftMachine, snapshot, states_of
from tests.support.executor_workers import KV_CACHE_BYTES, WEIGHTS_BYTES, HookWorker, pattern

RANKS = 2
RUNNING = {ProcessState.RUNNING}
CHECKPOINTED = {ProcessState.CHECKPOINTED}
STAGING_BYTES = 1 << 20  # of each rank's communicator
AWAKE_BYTES = CONTEXT_BYTES + STAGING_BYTES + WEIGHTS_BYTES + KV_CACHE_BYTES
WEIGHTS = [pattern(rank) for rank in range(RANKS)]


def stage_names(report: Any) -> list[str]:
    return [stage.name for stage in report.stages]


# ---------------------------------------------------------------------------------------------- level 1


def test_sleep_gives_all_device_memory_back(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    assert shared.machine.used_bytes(RANKS) == [AWAKE_BYTES] * RANKS
    report = executor.sleep()
    assert shared.machine.used_bytes(RANKS) == [0] * RANKS
    assert states_of(executor) == CHECKPOINTED
    assert (executor.phase, executor.is_sleeping) == ("checkpointed", True)
    assert (report.operation, report.performed) == ("sleep", True)
    assert report.device_bytes_before == (AWAKE_BYTES,) * RANKS
    assert report.device_bytes_after == (0,) * RANKS
    assert report.sleeping == ("kv_cache", "weights")
    report = executor.wake_up()
    assert shared.machine.used_bytes(RANKS) == [AWAKE_BYTES] * RANKS
    assert states_of(executor) == RUNNING
    assert (executor.phase, executor.is_sleeping) == ("awake", False)
    assert (report.operation, report.performed) == ("wake", True)
    assert report.device_bytes_before == (0,) * RANKS
    assert report.device_bytes_after == (AWAKE_BYTES,) * RANKS
    assert report.sleeping == ()


def test_a_report_names_every_stage_in_order_with_each_ranks_time(executor: CUDACheckpointExecutor) -> None:
    down, up = executor.sleep(), executor.wake_up()
    assert stage_names(down) == [
        "measure_awake",
        "sleep_allocator",
        "suspend_communicators",
        "confirm_suspended",
        "prepare_workspaces",
        "admit_sleep",
        "lock",
        "checkpoint",
        "measure_asleep",
    ]
    assert stage_names(up) == [
        "admit_wake",
        "restore",
        "unlock",
        "restore_workspaces",
        "resume_communicators",
        "confirm_resumed",
        "wake_allocator",
        "measure_woken",
    ]
    for report in (down, up):
        assert all(len(stage.ranks) == RANKS for stage in report.stages)
        assert all(0 <= max(stage.ranks) <= stage.wall_s for stage in report.stages)
        assert sum(stage.wall_s for stage in report.stages) <= report.wall_s
    assert executor.last_report == up
    slept = next(stage for stage in down.stages if stage.name == "sleep_allocator")
    expected = {"weights": WEIGHTS_BYTES, "kv_cache": KV_CACHE_BYTES, "copied": WEIGHTS_BYTES}
    expected |= {"device_weights": WEIGHTS_BYTES, "device_kv_cache": KV_CACHE_BYTES}
    assert slept.figures == (expected,) * RANKS


def test_weights_keep_their_bytes_and_addresses(executor: CUDACheckpointExecutor) -> None:
    addresses = executor.collective_rpc("addresses")
    assert executor.collective_rpc("read_weights") == WEIGHTS
    for _ in range(2):
        executor.sleep()
        executor.wake_up()
        assert executor.collective_rpc("addresses") == addresses
        assert executor.collective_rpc("read_weights") == WEIGHTS


def test_weights_written_while_awake_are_the_ones_that_come_back(executor: CUDACheckpointExecutor) -> None:
    changed = bytes(reversed(pattern(9)))
    executor.sleep()
    executor.wake_up()
    executor.collective_rpc("write_weights", args=(changed,))
    executor.sleep()
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == [changed] * RANKS
    executor.collective_rpc(restore_pattern)


def restore_pattern(worker: Any) -> None:
    worker.weights.write(pattern(worker.context.rank))


def test_kv_cache_contents_are_discarded(executor: CUDACheckpointExecutor) -> None:
    contents = b"\x17" * KV_CACHE_BYTES
    executor.collective_rpc("write_kv_cache", args=(contents,))
    assert executor.collective_rpc("read_kv_cache") == [contents] * RANKS
    executor.sleep()
    executor.wake_up()
    # Fresh memory of the software device, not a copy of the old.
    assert executor.collective_rpc("read_kv_cache") == [bytes([POISON_BYTE]) * KV_CACHE_BYTES] * RANKS


def test_the_workers_live_through_it(executor: CUDACheckpointExecutor) -> None:
    pids = executor.pids
    before = executor.collective_rpc("step")
    executor.sleep()
    executor.wake_up()
    assert executor.pids == pids
    assert executor.collective_rpc("step") == [count + 1 for count in before]


def test_communicators_work_after_waking(executor: CUDACheckpointExecutor) -> None:
    executor.sleep()
    executor.wake_up()
    assert executor.collective_rpc("check_communicator") == [True] * RANKS


def test_repeated_level_1_sleep_is_idempotent(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    executor.sleep()
    before = snapshot(shared.machine, executor)
    for _ in range(2):
        with pytest.warns(UserWarning, match="already asleep"):
            report = executor.sleep(level=1)
        assert (report.performed, report.stages) == (False, ())
        assert snapshot(shared.machine, executor) == before
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


# ---------------------------------------------------------------------------------------------- level 0


def test_level_0_is_a_scheduler_pause_and_no_checkpoint(
    executor: CUDACheckpointExecutor, shared: SharedExecutor
) -> None:
    before = snapshot(shared.machine, executor)
    contents = b"\x18" * KV_CACHE_BYTES
    executor.collective_rpc("write_kv_cache", args=(contents,))
    report = executor.sleep(level=0)
    assert (report.operation, report.performed, report.stages) == ("pause", True, ())
    assert (executor.is_paused, executor.is_sleeping, executor.phase) == (True, False, "awake")
    assert states_of(executor) == RUNNING
    assert shared.machine.used_bytes(RANKS) == [AWAKE_BYTES] * RANKS
    executor.wake_up()
    assert snapshot(shared.machine, executor) == before
    assert executor.collective_rpc("read_kv_cache") == [contents] * RANKS


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_execution_calls_are_refused_while_paused_and_others_are_served(
    executor: CUDACheckpointExecutor, mode: str
) -> None:
    count = executor.collective_rpc("step")
    executor.sleep(level=0, mode=mode)
    with pytest.raises(AsleepError, match=r"paused.*wake_up"):
        executor.collective_rpc("step")
    assert executor.collective_rpc("read_weights") == WEIGHTS
    executor.wake_up()
    assert executor.collective_rpc("step") == [calls + 1 for calls in count]


def test_an_unknown_mode_is_refused(executor: CUDACheckpointExecutor) -> None:
    with pytest.raises(InvalidRequestError, match="'later'"):
        executor.sleep(level=0, mode="later")
    assert not executor.is_paused


def test_a_repeated_pause_is_a_no_op(executor: CUDACheckpointExecutor) -> None:
    executor.sleep(level=0)
    assert not executor.sleep(level=0).performed
    executor.wake_up()
    assert not executor.is_paused


def test_level_0_touches_no_device_while_checkpointed(executor: CUDACheckpointExecutor) -> None:
    executor.sleep()
    executor.sleep(level=0)
    assert states_of(executor) == CHECKPOINTED
    assert executor.is_paused
    executor.wake_up()
    assert not executor.is_paused
    executor.collective_rpc("step")


def test_a_partial_wake_does_not_resume_a_pause(executor: CUDACheckpointExecutor) -> None:
    executor.sleep(level=0)
    executor.sleep()
    executor.wake_up(["weights"])
    assert executor.is_paused
    executor.wake_up(["kv_cache"])
    assert not executor.is_paused
    executor.collective_rpc("step")


# ---------------------------------------------------------------------------------------------- level 2


@pytest.mark.parametrize("level", [2, 3, -1, "1", None, 1.5, [1]])
def test_another_level_is_rejected_when_requested_and_nothing_is_touched(
    executor: CUDACheckpointExecutor, shared: SharedExecutor, level: Any
) -> None:
    before = snapshot(shared.machine, executor)
    with pytest.raises(InvalidRequestError, match="level"):
        executor.sleep(level=level)
    assert snapshot(shared.machine, executor) == before


def test_level_2_is_rejected_in_every_state(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    def check() -> None:
        before = snapshot(shared.machine, executor)
        with pytest.raises(InvalidRequestError, match=r"level=2.*not supported.*Nothing was touched"):
            executor.sleep(level=2)
        assert snapshot(shared.machine, executor) == before

    check()
    executor.sleep(level=0)
    check()
    executor.sleep()
    check()
    executor.wake_up(["weights"])
    check()
    executor.wake_up()
    check()
    assert executor.collective_rpc("read_weights") == WEIGHTS


# ---------------------------------------------------------------------------------------------- partial wake


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_the_first_partial_wake_restores_the_whole_process(
    executor: CUDACheckpointExecutor, shared: SharedExecutor, first: str
) -> None:
    addresses = executor.collective_rpc("addresses")
    executor.sleep()
    report = executor.wake_up([first])
    assert {"restore", "unlock"} <= set(stage_names(report))
    assert states_of(executor) == RUNNING
    # Everything that no tag holds is back too: the context and the communicator, which works.
    size = {"weights": WEIGHTS_BYTES, "kv_cache": KV_CACHE_BYTES}[first]
    assert shared.machine.used_bytes(RANKS) == [CONTEXT_BYTES + STAGING_BYTES + size] * RANKS
    assert executor.collective_rpc("check_communicator") == [True] * RANKS
    second = {"weights": "kv_cache", "kv_cache": "weights"}[first]
    assert executor.sleeping_tags == {second}

    report = executor.wake_up([second])
    assert stage_names(report) == ["admit_wake", "wake_allocator", "measure_woken"]
    assert shared.machine.used_bytes(RANKS) == [AWAKE_BYTES] * RANKS
    assert executor.collective_rpc("read_weights") == WEIGHTS
    assert executor.collective_rpc("addresses") == addresses


def test_it_is_sleeping_until_all_tags_are_awake(executor: CUDACheckpointExecutor) -> None:
    assert not executor.is_sleeping
    executor.sleep()
    assert executor.is_sleeping
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    executor.wake_up(["weights"])
    assert executor.is_sleeping
    assert executor.sleeping_tags == {"kv_cache"}
    executor.wake_up(["kv_cache"])
    assert not executor.is_sleeping
    assert executor.sleeping_tags == frozenset()


def test_weights_can_be_used_after_a_partial_wake_and_the_kv_cache_cannot(executor: CUDACheckpointExecutor) -> None:
    executor.sleep()
    executor.wake_up(["weights"])
    assert executor.collective_rpc("read_weights") == WEIGHTS
    with pytest.raises(Exception, match=r"kv_cache sleeps"):
        executor.collective_rpc("read_kv_cache")
    executor.wake_up()


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_execution_calls_are_refused_while_any_tag_sleeps(executor: CUDACheckpointExecutor, tag: str) -> None:
    executor.sleep()
    executor.wake_up([tag])
    with pytest.raises(AsleepError, match=r"asleep.*wake_up"):
        executor.collective_rpc("step")
    executor.wake_up()
    executor.collective_rpc("step")


def test_sleep_is_a_no_op_while_weights_sleep(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    executor.sleep()
    executor.wake_up(["kv_cache"])
    contents = b"\x19" * KV_CACHE_BYTES
    executor.collective_rpc("write_kv_cache", args=(contents,))
    before = snapshot(shared.machine, executor)
    with pytest.warns(UserWarning, match="weights are asleep: wake the remaining weights first"):
        report = executor.sleep()
    assert (report.performed, report.stages) == (False, ())
    assert snapshot(shared.machine, executor) == before
    assert before.states == RUNNING
    assert executor.collective_rpc("read_kv_cache") == [contents] * RANKS
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


def test_after_waking_the_weights_sleep_begins_a_second_full_cycle(
    executor: CUDACheckpointExecutor, shared: SharedExecutor
) -> None:
    executor.sleep()
    executor.wake_up(["weights"])
    report = executor.sleep()
    assert report.performed
    assert {"lock", "checkpoint"} <= set(stage_names(report))
    assert states_of(executor) == CHECKPOINTED
    assert shared.machine.used_bytes(RANKS) == [0] * RANKS
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS
    assert shared.machine.used_bytes(RANKS) == [AWAKE_BYTES] * RANKS


# ---------------------------------------------------------------------------------------------- tags


@pytest.mark.parametrize(
    "tags",
    [["nonsense"], ["weights", "nonsense"], [], "weights", [1], [["weights"]], [None]],
    ids=repr,
)
def test_an_unknown_tag_is_refused_before_anything_is_touched(
    executor: CUDACheckpointExecutor, shared: SharedExecutor, tags: Any
) -> None:
    before = snapshot(shared.machine, executor)
    with pytest.raises(InvalidRequestError, match=r"tag.*Nothing was touched"):
        executor.wake_up(tags)
    assert snapshot(shared.machine, executor) == before


def test_an_unknown_tag_is_refused_while_asleep_too(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    executor.sleep()
    for woken in (None, ["kv_cache"]):
        if woken is not None:
            executor.wake_up(woken)
        before = snapshot(shared.machine, executor)
        with pytest.raises(InvalidRequestError, match="'cuda_graphs'"):
            executor.wake_up(["weights", "cuda_graphs"])
        assert snapshot(shared.machine, executor) == before
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


def test_duplicate_tags_count_once(executor: CUDACheckpointExecutor) -> None:
    executor.sleep()
    report = executor.wake_up(["weights", "weights"])
    woken = next(stage for stage in report.stages if stage.name == "wake_allocator")
    assert woken.figures == ({"weights": WEIGHTS_BYTES},) * RANKS
    assert executor.sleeping_tags == {"kv_cache"}
    executor.wake_up(("kv_cache", "kv_cache"))
    assert not executor.is_sleeping


def test_a_tag_that_is_awake_already_warns_and_is_a_no_op(
    executor: CUDACheckpointExecutor, shared: SharedExecutor
) -> None:
    executor.sleep()
    executor.wake_up(["weights"])
    before = snapshot(shared.machine, executor)
    with pytest.warns(UserWarning, match="'weights' is already awake"):
        report = executor.wake_up(["weights"])
    assert (report.performed, report.stages) == (False, ())
    assert snapshot(shared.machine, executor) == before
    with pytest.warns(UserWarning, match="'weights' is already awake"):
        report = executor.wake_up(["weights", "kv_cache"])
    assert report.performed
    assert not executor.is_sleeping


@pytest.mark.parametrize("tags", [None, ["weights"], ["weights", "kv_cache"]])
def test_waking_what_is_not_asleep_warns_and_is_a_no_op(
    executor: CUDACheckpointExecutor, shared: SharedExecutor, tags: list[str] | None
) -> None:
    before = snapshot(shared.machine, executor)
    with pytest.warns(UserWarning, match=r"already awake|not asleep"):
        report = executor.wake_up(tags)
    assert (report.performed, report.stages) == (False, ())
    assert snapshot(shared.machine, executor) == before


# ---------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize("method", ["identify", "step", restore_pattern], ids=["method", "execution", "callable"])
def test_calls_are_rejected_while_checkpointed(executor: CUDACheckpointExecutor, method: Any) -> None:
    executor.sleep()
    for _ in range(2):
        with pytest.raises(AsleepError, match=r"checkpointed.*wake_up"):
            executor.collective_rpc(method)
    assert states_of(executor) == CHECKPOINTED
    executor.wake_up()
    executor.collective_rpc(method)


def test_check_health_is_quiet_awake_and_asleep(executor: CUDACheckpointExecutor) -> None:
    executor.check_health()
    executor.sleep()
    executor.check_health()
    executor.wake_up(["weights"])
    executor.check_health()
    executor.wake_up()
    executor.check_health()


# ---------------------------------------------------------------------------------------------- hooks


def test_hooks_are_called_in_order(machine: SoftMachine) -> None:
    executor = machine.make(HookWorker, ranks=2)
    executor.sleep()
    executor.wake_up(["weights"])
    executor.wake_up()
    notes = [
        "constructor",
        "before_sleep",
        # The communicator gives its memory up before the workspaces are prepared, and gets it back after them.
        "first.checkpoint_prepare (suspended)",
        "second.checkpoint_prepare (suspended)",
        "second.checkpoint_restore (suspended)",
        "first.checkpoint_restore (suspended)",
        "after_wake weights",
        "after_wake kv_cache",
    ]
    assert executor.collective_rpc("get_notes") == [notes] * 2


@pytest.mark.parametrize("communication", ["suspend", "socket"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_cycle_at_every_size_and_communication(machine: SoftMachine, ranks: int, communication: str) -> None:
    executor = machine.make(ranks=ranks, communication=communication)
    for _ in range(2):
        executor.sleep()
        assert states_of(executor) == CHECKPOINTED
        assert machine.used_bytes(ranks) == [0] * ranks
        executor.wake_up()
        assert executor.collective_rpc("read_weights") == [pattern(rank) for rank in range(ranks)]
        assert executor.collective_rpc("check_communicator") == [True] * ranks

"""The rules of ``release_kv_cache_memory``, from the sleep-mode page."""

from __future__ import annotations

import pytest

from checkpoint_executor import AsleepError, CUDACheckpointExecutor
from checkpoint_executor.driver_states import ProcessState
from tests.support.executor_harness import SharedExecutor, snapshot, states_of
from tests.support.executor_workers import KV_CACHE_BYTES, pattern

RANKS = 2


def release(executor: CUDACheckpointExecutor) -> None:
    executor.sleep(level=0, mode="keep")
    executor.release_kv_cache_memory()


def assert_refused(executor: CUDACheckpointExecutor, shared: SharedExecutor, why: str) -> None:
    before = snapshot(shared.machine, executor)
    with pytest.raises(AsleepError, match=why):
        executor.release_kv_cache_memory()
    assert snapshot(shared.machine, executor) == before


def test_release_drops_the_kv_cache_and_keeps_the_weights(
    executor: CUDACheckpointExecutor, shared: SharedExecutor
) -> None:
    awake = shared.machine.used_bytes(RANKS)
    addresses = executor.collective_rpc("addresses")
    executor.sleep(level=0, mode="keep")
    report = executor.release_kv_cache_memory()
    assert (report.operation, report.performed, report.sleeping) == ("release", True, ("kv_cache",))
    assert [stage.name for stage in report.stages] == ["measure_awake", "release_kv_cache", "measure_asleep"]
    assert shared.machine.used_bytes(RANKS) == [size - KV_CACHE_BYTES for size in awake]
    assert report.device_bytes_after == tuple(shared.machine.used_bytes(RANKS))
    assert states_of(executor) == {ProcessState.RUNNING}
    assert executor.collective_rpc("read_weights") == [pattern(rank) for rank in range(RANKS)]
    executor.wake_up()
    assert executor.collective_rpc("addresses") == addresses


def test_release_needs_a_completed_pause(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    assert_refused(executor, shared, r"pause.*sleep\(level=0\)")


def test_release_is_rejected_in_full_sleep(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    executor.sleep(level=0)
    executor.sleep()
    assert_refused(executor, shared, "resident")
    executor.wake_up()


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_release_is_rejected_in_a_partial_wake(
    executor: CUDACheckpointExecutor, shared: SharedExecutor, tag: str
) -> None:
    executor.sleep(level=0)
    executor.sleep()
    executor.wake_up([tag])
    assert_refused(executor, shared, "resident")
    executor.wake_up()


def test_repeated_release_is_rejected(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    release(executor)
    assert_refused(executor, shared, "kv_cache sleeps")
    executor.wake_up()


def test_execution_calls_are_refused_after_a_release_and_others_are_served(executor: CUDACheckpointExecutor) -> None:
    release(executor)
    with pytest.raises(AsleepError):
        executor.collective_rpc("step")
    executor.collective_rpc("identify")
    executor.wake_up()


def test_waking_the_kv_cache_after_a_release_restores_and_resumes(
    executor: CUDACheckpointExecutor, shared: SharedExecutor
) -> None:
    awake = shared.machine.used_bytes(RANKS)
    release(executor)
    assert (executor.is_paused, executor.is_sleeping) == (True, True)
    report = executor.wake_up(["kv_cache"])
    assert (executor.is_paused, executor.is_sleeping) == (False, False)
    assert [stage.name for stage in report.stages] == ["admit_wake", "wake_allocator", "measure_woken"]
    assert shared.machine.used_bytes(RANKS) == awake
    executor.collective_rpc("step")


def test_it_can_be_released_again_after_waking(executor: CUDACheckpointExecutor) -> None:
    for _ in range(2):
        release(executor)
        executor.wake_up(["kv_cache"])


def test_sleep_after_a_release_runs_a_full_cycle(executor: CUDACheckpointExecutor, shared: SharedExecutor) -> None:
    awake = shared.machine.used_bytes(RANKS)
    release(executor)
    report = executor.sleep()
    assert report.performed
    assert states_of(executor) == {ProcessState.CHECKPOINTED}
    assert shared.machine.used_bytes(RANKS) == [0] * RANKS
    executor.wake_up()
    assert shared.machine.used_bytes(RANKS) == awake
    assert executor.collective_rpc("read_weights") == [pattern(rank) for rank in range(RANKS)]
    executor.collective_rpc("step")

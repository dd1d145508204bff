"""A lock that fails is undone: nothing was checkpointed yet, and the executor serves on. Later nothing is undone."""

from __future__ import annotations

import pytest

from checkpoint_executor import CUDACheckpointExecutor, DeadlineError, FatalError, RefusedError
from checkpoint_executor.config import Deadlines
from checkpoint_executor.driver_states import DriverCode, ProcessState
from checkpoint_executor.faults import Fault, Injection
from tests.support.executor_harness import (
    Gate,
    SoftMachine,
    assert_failed,
    inject_helper,
    inject_worker,
    states_of,
)
from tests.support.executor_workers import KV_CACHE_BYTES, HookWorker, pattern

RANKS = 2
WEIGHTS = [pattern(rank) for rank in range(RANKS)]
NOT_READY = int(DriverCode.NOT_READY)


def assert_serves_on(machine: SoftMachine, executor: CUDACheckpointExecutor, used_bytes: list[int]) -> None:
    assert (executor.phase, executor.is_sleeping) == ("awake", False)
    assert states_of(executor) == {ProcessState.RUNNING}
    assert machine.used_bytes(RANKS) == used_bytes
    assert executor.collective_rpc("read_weights") == WEIGHTS
    assert executor.collective_rpc("check_communicator") == [True] * RANKS
    executor.collective_rpc("step")
    assert executor.sleep().performed
    assert machine.used_bytes(RANKS) == [0] * RANKS
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_failed_lock_is_undone_and_the_executor_serves_on(machine: SoftMachine, rank: int) -> None:
    executor = machine.make(ranks=RANKS, faults=(inject_helper(Fault.DRIVER_ERROR, rank, "lock", code=NOT_READY),))
    pids, addresses = executor.pids, executor.collective_rpc("addresses")
    used_bytes = machine.used_bytes(RANKS)
    with pytest.raises(RefusedError, match="serves on") as caught:
        executor.sleep()
    error = caught.value
    assert type(error) is RefusedError
    assert error.executor_alive
    assert (error.rank, error.pid, error.stage) == (rank, pids[f"worker {rank}"], "lock")
    assert (error.code, error.code_name) == (NOT_READY, "CUDA_ERROR_NOT_READY")
    assert executor.pids == pids
    assert executor.collective_rpc("addresses") == addresses
    assert_serves_on(machine, executor, used_bytes)


def test_a_lock_that_times_out_on_a_busy_rank_is_undone(machine: SoftMachine, gate: Gate) -> None:
    executor = machine.make(ranks=RANKS, deadlines=Deadlines(driver_lock_s=0.1))
    used_bytes = machine.used_bytes(RANKS)
    executor.collective_rpc("hold_device", args=(1, gate.path))
    gate.wait_reached()
    with pytest.raises(RefusedError, match="still ran after 100 ms") as caught:
        executor.sleep()
    assert (caught.value.rank, caught.value.code) == (1, NOT_READY)
    gate.open()
    assert_serves_on(machine, executor, used_bytes)


def test_a_failed_lock_on_every_rank_is_undone(machine: SoftMachine) -> None:
    faults = tuple(inject_helper(Fault.DRIVER_ERROR, rank, "lock", code=NOT_READY) for rank in range(RANKS))
    executor = machine.make(ranks=RANKS, faults=faults)
    used_bytes = machine.used_bytes(RANKS)
    with pytest.raises(RefusedError) as caught:
        executor.sleep()
    assert all(f"rank {rank}: lock: CUDA_ERROR_NOT_READY" in str(caught.value) for rank in range(RANKS))
    assert_serves_on(machine, executor, used_bytes)


def test_a_lock_that_had_no_effect_is_undone(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, faults=(inject_helper(Fault.WRONG_STATE, 0, "lock"),))
    used_bytes = machine.used_bytes(RANKS)
    with pytest.raises(RefusedError, match="the state reads running"):
        executor.sleep()
    assert_serves_on(machine, executor, used_bytes)


def test_it_is_undone_as_often_as_it_fails(machine: SoftMachine) -> None:
    executor = machine.make(
        ranks=RANKS, faults=(inject_helper(Fault.DRIVER_ERROR, 1, "lock", code=NOT_READY, times=3),)
    )
    used_bytes = machine.used_bytes(RANKS)
    for _ in range(3):
        with pytest.raises(RefusedError):
            executor.sleep()
    assert_serves_on(machine, executor, used_bytes)


def test_an_undone_sleep_loses_the_kv_cache_and_runs_the_hooks_in_mirror_order(machine: SoftMachine) -> None:
    executor = machine.make(
        HookWorker, ranks=RANKS, faults=(inject_helper(Fault.DRIVER_ERROR, 0, "lock", code=NOT_READY),)
    )
    contents = b"\x17" * KV_CACHE_BYTES
    executor.collective_rpc("write_kv_cache", args=(contents,))
    with pytest.raises(RefusedError, match="KV cache's contents are lost"):
        executor.sleep()
    assert contents not in executor.collective_rpc("read_kv_cache")
    notes = [
        "constructor",
        "before_sleep",
        "first.checkpoint_prepare (suspended)",
        "second.checkpoint_prepare (suspended)",
        "second.checkpoint_restore (suspended)",
        "first.checkpoint_restore (suspended)",
        "after_wake weights+kv_cache",
    ]
    assert executor.collective_rpc("get_notes") == [notes] * RANKS


def test_an_undone_sleep_after_a_release_leaves_the_release(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, faults=(inject_helper(Fault.DRIVER_ERROR, 0, "lock", code=NOT_READY),))
    executor.sleep(level=0)
    executor.release_kv_cache_memory()
    used_bytes = machine.used_bytes(RANKS)
    with pytest.raises(RefusedError):
        executor.sleep()
    assert executor.is_paused
    assert executor.sleeping_tags == {"kv_cache"}
    assert machine.used_bytes(RANKS) == used_bytes
    assert executor.collective_rpc("read_weights") == WEIGHTS
    executor.wake_up()
    executor.collective_rpc("step")


def test_without_undo_a_failed_lock_is_fatal(machine: SoftMachine) -> None:
    executor = machine.make(
        ranks=RANKS,
        undo_before_checkpoint=False,
        faults=(inject_helper(Fault.DRIVER_ERROR, 1, "lock", code=NOT_READY),),
    )
    pids = executor.pids
    with pytest.raises(FatalError) as caught:
        executor.sleep()
    assert (caught.value.stage, caught.value.rank, caught.value.code) == ("lock", 1, NOT_READY)
    assert_failed(machine, executor, caught.value, pids)


@pytest.mark.parametrize(
    "second",
    [
        inject_helper(Fault.DRIVER_ERROR, 1, "unlock"),
        inject_worker(Fault.EXCEPTION, 1, "restore_workspaces"),
        inject_worker(Fault.EXCEPTION, 0, "wake_allocator"),
    ],
    ids=lambda injection: injection.stage,
)
def test_an_error_while_undoing_is_fatal_and_names_both(machine: SoftMachine, second: Injection) -> None:
    first = inject_helper(Fault.DRIVER_ERROR, 0, "lock", code=NOT_READY)
    executor = machine.make(ranks=RANKS, faults=(first, second))
    pids = executor.pids
    with pytest.raises(FatalError, match=r"while undoing: lock: CUDA_ERROR_NOT_READY") as caught:
        executor.sleep()
    assert caught.value.stage == second.stage
    assert_failed(machine, executor, caught.value, pids)


def test_a_deadline_while_undoing_is_fatal(machine: SoftMachine) -> None:
    first = inject_helper(Fault.DRIVER_ERROR, 0, "lock", code=NOT_READY)
    second = inject_helper(Fault.HANG, 1, "unlock")
    executor = machine.make(ranks=RANKS, faults=(first, second), deadlines=Deadlines(driver_s=0.5, driver_lock_s=0.2))
    pids = executor.pids
    with pytest.raises(DeadlineError, match="while undoing") as caught:
        executor.sleep()
    assert_failed(machine, executor, caught.value, pids)

"""Control calls are serialised: a second caller gets a clear error, never a deadlock, and nobody is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from checkpoint_executor import (
    BusyError,
    CheckpointExecutorError,
    CUDACheckpointExecutor,
    InvalidRequestError,
    RefusedError,
)
from checkpoint_executor.driver_states import ProcessState
from tests.support.executor_harness import DEADLINE_S, Gate, SoftMachine, in_thread, state_of, wait_until
from tests.support.executor_workers import HookWorker, pattern

RANKS = 2


def control_calls(executor: CUDACheckpointExecutor) -> dict[str, Callable[[], Any]]:
    return {
        "sleep": executor.sleep,
        "pause": lambda: executor.sleep(level=0),
        "wake_up": executor.wake_up,
        "release": executor.release_kv_cache_memory,
        "collective_rpc": lambda: executor.collective_rpc("identify"),
    }


def assert_all_busy(executor: CUDACheckpointExecutor, match: str) -> None:
    for name, call in control_calls(executor).items():
        with pytest.raises(BusyError, match=match) as caught:
            call()
        assert caught.value.executor_alive, name


def test_a_second_caller_is_refused_while_a_call_runs(executor: CUDACheckpointExecutor, gate: Gate) -> None:
    call = in_thread(executor.collective_rpc, "wait_at", args=(gate.path,))
    gate.wait_reached(RANKS)
    assert_all_busy(executor, r"worker call is still running on rank\(s\) 0, 1")
    gate.open()
    assert call.result(DEADLINE_S) == ["passed"] * RANKS
    executor.collective_rpc("identify")


def slow_sleep(executor: CUDACheckpointExecutor, gate: Gate) -> Future[Any]:
    """A sleep that is held up in the lock stage until the gate is opened: rank 0 locked, rank 1 still at work."""
    executor.collective_rpc("hold_device", args=(1, gate.path))
    gate.wait_reached()
    call = in_thread(executor.sleep)
    wait_until(lambda: state_of(executor, 0) is ProcessState.LOCKED, "rank 0 is locked")
    return call


def test_a_second_caller_is_refused_while_a_sleep_is_in_progress(executor: CUDACheckpointExecutor, gate: Gate) -> None:
    call = slow_sleep(executor, gate)
    assert executor.phase == "suspending"
    assert_all_busy(executor, "'lock'")
    executor.check_health()
    gate.open()
    assert call.result(DEADLINE_S).performed
    executor.wake_up()


def test_what_can_never_be_right_is_said_even_while_busy(executor: CUDACheckpointExecutor, gate: Gate) -> None:
    call = slow_sleep(executor, gate)
    with pytest.raises(InvalidRequestError, match="level=2"):
        executor.sleep(level=2)
    with pytest.raises(InvalidRequestError, match="'nonsense'"):
        executor.wake_up(["nonsense"])
    gate.open()
    call.result(DEADLINE_S)
    executor.wake_up()


def test_a_second_caller_is_refused_while_a_wake_is_in_progress(machine: SoftMachine, gate: Gate) -> None:
    waits = {"waits": "after_wake weights", "gate": gate.path}
    executor = machine.make(HookWorker, ranks=2, worker_kwargs=waits)
    executor.sleep()
    call = in_thread(executor.wake_up, ["weights"])
    gate.wait_reached(RANKS)
    assert executor.phase == "resuming"
    assert executor.is_sleeping
    assert_all_busy(executor, "'wake_allocator'")
    gate.open()
    assert call.result(DEADLINE_S).performed
    assert executor.sleeping_tags == {"kv_cache"}


def test_many_threads_at_once_end_in_one_sleep_and_no_deadlock(executor: CUDACheckpointExecutor) -> None:
    calls = [in_thread(executor.sleep) for _ in range(16)]
    outcomes = []
    for call in calls:
        error = call.exception(DEADLINE_S)
        if error is None:
            outcomes.append(call.result().performed)
        else:
            # The no-op's warning is an error in this suite; everything else is a refusal.
            assert isinstance(error, (BusyError, UserWarning))
    assert outcomes == [True]
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == [pattern(rank) for rank in range(RANKS)]


def test_calls_may_come_from_any_thread(executor: CUDACheckpointExecutor) -> None:
    assert in_thread(executor.sleep).result(DEADLINE_S).performed
    assert in_thread(executor.wake_up).result(DEADLINE_S).performed


@pytest.mark.parametrize("operation", ["rpc", "sleep"])
def test_shutdown_ends_a_call_in_progress(machine: SoftMachine, gate: Gate, operation: str) -> None:
    executor = machine.make(ranks=2)
    if operation == "rpc":
        call = in_thread(executor.collective_rpc, "wait_at", args=(gate.path,))
        gate.wait_reached(RANKS)
    else:
        call = slow_sleep(executor, gate)
    executor.shutdown()
    machine.assert_empty()
    with pytest.raises(RefusedError, match="shut down"):
        call.result(DEADLINE_S)


def test_every_caller_is_answered_when_the_executor_is_shut_down_under_them(machine: SoftMachine) -> None:
    executor = machine.make()
    calls = [in_thread(call) for _ in range(8) for call in control_calls(executor).values()]
    executor.shutdown()
    for call in calls:
        error = call.exception(DEADLINE_S)
        assert error is None or isinstance(error, (CheckpointExecutorError, UserWarning))

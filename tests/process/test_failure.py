"""Failure terminates the workers: never a partial set, never a retry, and the error says all that is known.

Each case is one thing that goes wrong in one stage. Afterwards every process is gone, the device is empty, and every
later call fails at once with the first cause (``assert_failed``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from checkpoint_executor import CUDACheckpointExecutor, DeadlineError, FatalError, ProcessDiedError
from checkpoint_executor.config import Deadlines
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.faults import Fault, Injection
from tests.support.executor_harness import (
    DEADLINE_S,
    Gate,
    SoftMachine,
    assert_failed,
    in_thread,
    inject_helper,
    inject_worker,
    state_of,
    wait_until,
)
from tests.support.executor_workers import HookWorker

RANKS = 2
#: A deadline that is meant to pass.
SHORT_S = 0.5

SLEEP_STAGES = ("sleep_allocator", "suspend_communicators", "confirm_suspended", "prepare_workspaces")
WAKE_STAGES = ("restore_workspaces", "resume_communicators", "confirm_resumed", "wake_allocator")
DRIVER_DOWN = ("lock", "checkpoint")
DRIVER_UP = ("restore", "unlock")


def go_through(executor: CUDACheckpointExecutor) -> None:
    """A whole cycle; the fault is somewhere in it."""
    executor.sleep()
    executor.wake_up()


def fail_in_a_cycle(machine: SoftMachine, kind: type[FatalError], injection: Injection, **options: Any) -> FatalError:
    executor = machine.make(ranks=RANKS, faults=(injection,), **options)
    return fail(machine, executor, kind, lambda: go_through(executor))


def fail(
    machine: SoftMachine, executor: CUDACheckpointExecutor, kind: type[FatalError], call: Callable[[], object]
) -> FatalError:
    pids = executor.pids
    with pytest.raises(FatalError) as caught:
        call()
    assert type(caught.value) is kind
    if caught.value.rank is not None:
        assert caught.value.pid == pids[f"worker {caught.value.rank}"]
    elif caught.value.role == "helper":
        assert caught.value.pid == pids["helper"]
    assert_failed(machine, executor, caught.value, pids)
    return caught.value


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("stage", ["checkpoint", *DRIVER_UP])
def test_a_driver_error_is_fatal_and_keeps_the_drivers_code(machine: SoftMachine, stage: str) -> None:
    error = fail_in_a_cycle(machine, FatalError, inject_helper(Fault.DRIVER_ERROR, 1, stage, code=801))
    assert (error.stage, error.rank, error.role) == (stage, 1, "worker")
    assert (error.code, error.code_name) == (801, "CUDA_ERROR_NOT_SUPPORTED")
    before = {"checkpoint": "locked", "restore": "checkpointed", "unlock": "locked"}[stage]
    assert (error.state_before, error.state_after) == (before, before)
    assert "CUDA_ERROR_NOT_SUPPORTED (801)" in str(error)
    assert "rank 1" in str(error)
    assert stage in str(error)


def test_an_unknown_code_keeps_its_number(machine: SoftMachine) -> None:
    error = fail_in_a_cycle(machine, FatalError, inject_helper(Fault.DRIVER_ERROR, 0, "checkpoint", code=12345))
    assert (error.code, error.code_name) == (12345, "CUDA_ERROR_12345")


@pytest.mark.parametrize("stage", ["checkpoint", *DRIVER_UP])
def test_a_success_that_does_not_read_back_is_fatal(machine: SoftMachine, stage: str) -> None:
    error = fail_in_a_cycle(machine, FatalError, inject_helper(Fault.WRONG_STATE, 0, stage))
    assert (error.stage, error.rank, error.code) == (stage, 0, 0)
    assert "the state reads" in str(error)


def test_a_restore_that_runs_out_of_memory_is_fatal(machine: SoftMachine) -> None:
    error = fail_in_a_cycle(machine, FatalError, inject_helper(Fault.OUT_OF_MEMORY, 1, "restore"))
    assert (error.stage, error.code_name) == ("restore", "CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize("stage", [*SLEEP_STAGES, *WAKE_STAGES])
def test_an_exception_in_a_workers_stage_is_fatal(machine: SoftMachine, stage: str) -> None:
    error = fail_in_a_cycle(machine, FatalError, inject_worker(Fault.EXCEPTION, 1, stage))
    assert (error.stage, error.rank, error.role, error.code) == (stage, 1, "worker", None)
    assert f"injected into {stage}" in str(error)


def test_memory_that_does_not_come_back_is_fatal(machine: SoftMachine) -> None:
    error = fail_in_a_cycle(machine, FatalError, inject_worker(Fault.OUT_OF_MEMORY, 0, "wake_allocator"))
    assert (error.stage, error.rank) == ("wake_allocator", 0)
    assert "MemoryError" in str(error)


def test_an_error_in_a_release_is_fatal(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, faults=(inject_worker(Fault.EXCEPTION, 1, "release_kv_cache"),))
    executor.sleep(level=0)
    error = fail(machine, executor, FatalError, executor.release_kv_cache_memory)
    assert (error.stage, error.rank) == ("release_kv_cache", 1)


def test_a_reading_that_fails_is_not_fatal(machine: SoftMachine) -> None:
    faults = tuple(inject_helper(Fault.EXCEPTION, 1, f"measure_{when}") for when in ("awake", "asleep", "woken"))
    executor = machine.make(ranks=RANKS, faults=faults)
    assert executor.sleep().device_bytes_after == ()
    executor.wake_up()
    executor.check_health()


@pytest.mark.parametrize(
    "hook", ["before_sleep", "first.checkpoint_prepare", "second.checkpoint_restore", "after_wake weights+kv_cache"]
)
def test_an_exception_in_a_users_hook_is_fatal_and_arrives_with_its_traceback(machine: SoftMachine, hook: str) -> None:
    executor = machine.make(HookWorker, ranks=RANKS, worker_kwargs={"fails": hook, "on_rank": 1})
    error = fail(machine, executor, FatalError, lambda: go_through(executor))
    assert error.rank == 1
    assert f"LookupError: {hook} does not like it" in str(error)
    assert "Traceback" in str(error)


# ---------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("stage", ["sleep_allocator", "prepare_workspaces", "restore_workspaces", "wake_allocator"])
def test_a_worker_that_dies_in_its_stage_is_fatal(machine: SoftMachine, stage: str) -> None:
    error = fail_in_a_cycle(machine, ProcessDiedError, inject_worker(Fault.DIE, 1, stage, signal=signal.SIGSEGV))
    assert isinstance(error, ProcessDiedError)
    assert (error.stage, error.rank, error.role, error.exit_status) == (stage, 1, "worker", -signal.SIGSEGV)
    assert "worker 1" in str(error)
    assert f"signal {signal.SIGSEGV.value}" in str(error)


@pytest.mark.parametrize("stage", [*DRIVER_DOWN, *DRIVER_UP])
def test_a_helper_that_dies_in_its_stage_is_fatal(machine: SoftMachine, stage: str) -> None:
    error = fail_in_a_cycle(machine, ProcessDiedError, inject_helper(Fault.DIE, 0, stage))
    assert isinstance(error, ProcessDiedError)
    assert (error.stage, error.rank, error.role, error.exit_status) == (stage, None, "helper", -signal.SIGKILL)


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "checkpointed"])
@pytest.mark.parametrize("who", ["worker 1", "helper"])
def test_a_death_between_calls_is_fatal(machine: SoftMachine, who: str, asleep: bool) -> None:
    executor = machine.make(ranks=RANKS)
    if asleep:
        executor.sleep()
    pids = executor.pids
    os.kill(pids[who], signal.SIGKILL)
    wait_until(lambda: executor.phase == "failed", "the death is noticed without a call")
    with pytest.raises(ProcessDiedError, match=rf"{who} \(pid {pids[who]}\)") as caught:
        executor.check_health()
    assert caught.value.stage is None
    assert_failed(machine, executor, caught.value, pids)


def test_a_death_cuts_the_wait_for_another_rank_short(machine: SoftMachine, gate: Gate) -> None:
    waits = {"waits": "before_sleep", "gate": gate.path}
    executor = machine.make(HookWorker, ranks=RANKS, worker_kwargs=waits)
    pids = executor.pids
    call = in_thread(executor.sleep)
    gate.wait_reached(RANKS)
    os.kill(pids["worker 0"], signal.SIGKILL)
    with pytest.raises(ProcessDiedError, match="worker 0") as caught:
        call.result(DEADLINE_S)
    assert caught.value.stage == "sleep_allocator"
    assert_failed(machine, executor, caught.value, pids)


# ---------------------------------------------------------------------------------------------- deadlines


def fail_by_deadline(machine: SoftMachine, injection: Injection, deadlines: Deadlines) -> DeadlineError:
    error = fail_in_a_cycle(machine, DeadlineError, injection, deadlines=deadlines)
    assert isinstance(error, DeadlineError)
    assert isinstance(error, TimeoutError)
    assert (error.stage, error.deadline_s) == (injection.stage, SHORT_S)
    assert error.elapsed_s is not None
    assert error.elapsed_s >= SHORT_S
    assert f"within {SHORT_S:g} s" in str(error)
    return error


@pytest.mark.parametrize("stage", [*DRIVER_DOWN, *DRIVER_UP])
def test_a_driver_stage_that_hangs_on_one_rank_is_fatal_at_its_deadline(machine: SoftMachine, stage: str) -> None:
    deadlines = Deadlines(driver_s=SHORT_S, driver_lock_s=SHORT_S / 2)
    error = fail_by_deadline(machine, inject_helper(Fault.HANG, 1, stage), deadlines)
    assert (error.rank, error.role) == (1, "worker")
    assert "from worker 1" in str(error)


@pytest.mark.parametrize(
    ("stage", "deadlines"),
    [
        ("sleep_allocator", Deadlines(worker_sleep_s=SHORT_S)),
        ("prepare_workspaces", Deadlines(hook_s=SHORT_S)),
        ("restore_workspaces", Deadlines(hook_s=SHORT_S)),
        ("wake_allocator", Deadlines(worker_wake_s=SHORT_S)),
    ],
)
def test_a_worker_that_hangs_in_its_stage_is_fatal_at_its_deadline(
    machine: SoftMachine, stage: str, deadlines: Deadlines
) -> None:
    error = fail_by_deadline(machine, inject_worker(Fault.HANG, 0, stage), deadlines)
    assert (error.rank, error.role) == (0, "worker")


def test_a_worker_that_is_stopped_is_fatal_at_its_deadline(machine: SoftMachine) -> None:
    injection = inject_worker(Fault.STOP, 1, "sleep_allocator")
    fail_by_deadline(machine, injection, Deadlines(worker_sleep_s=SHORT_S))


def test_a_deadline_covers_the_stage_and_not_each_rank(machine: SoftMachine) -> None:
    slow, hanging = inject_helper(Fault.SLOW, 0, "lock", delay_s=SHORT_S / 2), inject_helper(Fault.HANG, 1, "lock")
    executor = machine.make(
        ranks=RANKS, faults=(slow, hanging), deadlines=Deadlines(driver_s=SHORT_S, driver_lock_s=SHORT_S / 4)
    )
    error = fail(machine, executor, DeadlineError, executor.sleep)
    assert error.elapsed_s is not None
    # Counted anew from the slow rank's answer, it would be at least 1.5 times as long.
    assert error.elapsed_s < 1.5 * SHORT_S


# ---------------------------------------------------------------------------------------------- stopped targets


def test_a_checkpointed_worker_that_is_stopped_is_an_error_and_not_a_hang(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS)
    executor.sleep()
    os.kill(executor.pids["worker 1"], signal.SIGSTOP)
    error = fail(machine, executor, FatalError, executor.wake_up)
    assert (error.stage, error.rank) == ("restore", 1)
    assert "is stopped (SIGSTOP)" in str(error)


def test_a_worker_that_is_stopped_before_its_lock_is_an_error_and_not_a_hang(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, faults=(inject_helper(Fault.SLOW, 1, "lock", delay_s=SHORT_S),))
    call = in_thread(executor.sleep)
    wait_until(lambda: state_of(executor, 0) is ProcessState.LOCKED, "the first rank is locked")
    os.kill(executor.pids["worker 1"], signal.SIGSTOP)
    error = fail(machine, executor, FatalError, lambda: call.result(DEADLINE_S))
    assert (error.stage, error.rank) == ("lock", 1)
    assert "is stopped (SIGSTOP)" in str(error)


# ---------------------------------------------------------------------------------------------- afterwards


def test_the_story_tells_what_happened_in_order(machine: SoftMachine) -> None:
    error = fail_in_a_cycle(machine, FatalError, inject_helper(Fault.DRIVER_ERROR, 1, "restore"))
    asked = [line for line in error.story if "Requested" in line]
    assert [line.split("(")[0] for line in asked] == ["StartRequested", "SleepRequested", "WakeRequested"]
    assert error.story[-1].endswith("[resuming -> failed]")


def test_a_new_executor_works_after_a_failure(machine: SoftMachine) -> None:
    fail_in_a_cycle(machine, FatalError, inject_helper(Fault.DRIVER_ERROR, 1, "restore"))
    executor = machine.make(ranks=RANKS)
    go_through(executor)
    executor.collective_rpc("step")


def test_leaving_the_context_manager_after_a_failure_is_quiet(machine: SoftMachine) -> None:
    injection = inject_worker(Fault.EXCEPTION, 0, "sleep_allocator")
    with pytest.raises(FatalError), machine.make(faults=(injection,)) as executor:
        executor.sleep()
    assert executor.phase == "failed"

"""Every fault ends well: the short form of the fault matrix, each point of failure of an undo, and bounded waits.

The whole matrix is ``scripts/fault_matrix.py``; how each cell has to end is ``expected`` in
``tests/support/fault_matrix.py``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

import pytest

from checkpoint_executor import (
    BusyError,
    CUDACheckpointExecutor,
    DeadlineError,
    FatalError,
    ProcessDiedError,
    RpcTimeoutError,
)
from checkpoint_executor.config import Deadlines
from checkpoint_executor.coordinator import OWN_STAGES
from checkpoint_executor.driver_states import DriverCode
from checkpoint_executor.faults import Fault, Injection, armed_name
from checkpoint_executor.messages import Role
from tests.support.executor_harness import SoftMachine, assert_failed, inject_helper, inject_worker, wait_until
from tests.support.fault_matrix import (
    FAULTS,
    OPERATIONS,
    SIZES,
    Bench,
    Cell,
    all_cells,
    expected,
    plan_of,
    senseless,
    short_form,
)

RANKS = 2
#: A deadline that is meant to pass, and a slack for what comes after it.
SHORT_S, SLACK_S = 0.5, 2.0
SHORT = Deadlines(
    driver_s=SHORT_S,
    driver_lock_s=SHORT_S / 2,
    worker_sleep_s=SHORT_S,
    worker_wake_s=SHORT_S,
    hook_s=SHORT_S,
    shutdown_s=SHORT_S,
)


# ---------------------------------------------------------------------------------------------- which cells there are


def test_every_fault_role_stage_state_and_size_is_in_the_matrix() -> None:
    cells = [cell for cell in all_cells() if senseless(cell) is None]
    assert {cell.ranks for cell in cells} == set(SIZES)
    assert {cell.fault for cell in cells} == set(FAULTS)
    assert {kind.fault for kind in FAULTS.values()} == {*Fault, None}
    assert {(cell.ranks, cell.rank) for cell in cells} == {(1, 0), (2, 0), (2, 1), (4, 0), (4, 3)}
    for operation, state in (("sleep", "awake"), ("sleep", "partially awake"), ("wake", "asleep")):
        for stage in plan_of(operation, state):
            for role in Role:
                place = (operation, state, stage.name, role)
                here = {cell.fault for cell in cells if (cell.operation, cell.state, cell.stage, cell.role) == place}
                assert {"death by SIGKILL", "stop"} <= here


def test_no_cell_is_both_run_and_given_a_reason_not_to() -> None:
    cells = list(all_cells())
    assert len(set(cells)) == len(cells)
    for cell in cells:
        reason = senseless(cell)
        if reason is None:
            assert expected(cell).what in ("succeeds", "refused", "fatal")
            assert expected(cell).why
        else:
            assert reason.strip()


def test_from_the_point_of_no_return_no_error_is_refused() -> None:
    driver = [stage.name for stage in (*OWN_STAGES.down, *OWN_STAGES.up)]
    after = {*driver[driver.index("checkpoint") :]} - {"admit_wake"}
    for cell in all_cells((2,)):
        if senseless(cell) is None and cell.operation != "undo" and cell.stage in after:
            assert expected(cell).what != "refused"


# ---------------------------------------------------------------------------------------------- running them


def run_cells(cells: Iterable[Cell]) -> None:
    """Run them on as few executors as their endings allow, and report all that went wrong at once."""
    with Bench(SHORT) as bench:
        problems = []
        for cell in cells:
            if bench.senseless(cell) is None and (outcome := bench.run(cell)).problem:
                problems.append(f"{cell}: {outcome.problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kind_of_fault_ends_as_it_should(operation: str) -> None:
    cells = [cell for cell in short_form(operation, RANKS) if expected(cell).error != "DeadlineError"]
    if operation == "undo":  # what is fatal there has a test of its own
        cells = [cell for cell in cells if expected(cell).what != "fatal"]
    run_cells(cells)


@pytest.mark.parametrize(("operation", "which"), [("sleep", 0), ("wake", 1)])
def test_silence_ends_at_a_deadline(operation: str, which: int) -> None:
    silent = [cell for cell in short_form(operation, 1) if expected(cell).error == "DeadlineError"]
    run_cells(silent[which::2])


def undo_cells() -> list[Cell]:
    """An error in every stage of an undo; a death and a silence of each role in one."""
    cells = [c for c in all_cells((RANKS,)) if c.operation == "undo" and c.rank == 1 and c.state == "awake"]
    role = {stage.name: Role.WORKER if stage.who == "workers" else Role.HELPER for stage in plan_of("undo", "awake")}
    elsewhere = {"death by SIGKILL": ("unlock", "wake_allocator"), "hang": ("unlock", "restore_workspaces")}
    return [
        cell
        for cell in cells
        if cell.role is role[cell.stage] and (cell.fault == "exception" or cell.stage in elsewhere.get(cell.fault, ()))
    ]


def test_each_possible_point_of_failure_of_an_undo_is_fatal() -> None:
    cells = undo_cells()
    assert {cell.stage for cell in cells} == {stage.name for stage in plan_of("undo", "awake")}
    assert {expected(cell).what for cell in cells} == {"fatal"}
    run_cells(cells)


# ---------------------------------------------------------------------------------------------- arming


def test_a_fault_is_armed_in_a_live_executor_and_met_once(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS)
    injection = inject_helper(Fault.DRIVER_ERROR, 1, "lock", code=int(DriverCode.NOT_READY))
    path = executor._control.runtime_dir / armed_name(injection.role, injection.rank, injection.stage)
    path.write_text(
        '{"fault": "driver_error", "role": "helper", "rank": 1, "stage": "lock", "code": 600}', encoding="ascii"
    )
    with pytest.raises(Exception, match="CUDA_ERROR_NOT_READY"):
        executor.sleep()
    assert not path.exists()
    executor.sleep()
    executor.wake_up()


# ---------------------------------------------------------------------------------------------- nobody waits for ever


def within(seconds: float, call: Callable[[], object]) -> None:
    """Call it; it must come back in that time, whatever it raises or returns."""
    begun = time.monotonic()
    try:
        call()
    finally:
        assert time.monotonic() - begun < seconds + SLACK_S


def stop(executor: CUDACheckpointExecutor, name: str) -> None:
    os.kill(executor.pids[name], signal.SIGSTOP)


@pytest.mark.parametrize("name", ["worker 1", "helper"])
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_a_client_waits_no_longer_than_a_deadline_for_a_stopped_process(
    machine: SoftMachine, name: str, asleep: bool
) -> None:
    executor = machine.make(ranks=RANKS, deadlines=SHORT)
    if asleep:
        executor.sleep()
    pids = executor.pids
    stop(executor, name)
    with pytest.raises(FatalError) as caught:
        within(SHORT_S, executor.wake_up if asleep else executor.sleep)
    assert isinstance(caught.value, DeadlineError) or "is stopped" in str(caught.value)
    assert_failed(machine, executor, caught.value, pids)


def test_a_call_on_a_stopped_worker_ends_by_its_timeout_and_later_ones_at_once(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, deadlines=SHORT)
    stop(executor, "worker 1")
    with pytest.raises(RpcTimeoutError):
        within(SHORT_S, lambda: executor.collective_rpc("identify", timeout=SHORT_S))
    for call in (executor.sleep, lambda: executor.collective_rpc("identify")):
        with pytest.raises(BusyError):
            within(0, call)
    os.kill(executor.pids["worker 1"], signal.SIGKILL)
    wait_until(lambda: executor.phase == "failed", "the death is noticed")
    with pytest.raises(ProcessDiedError):
        within(SHORT_S, lambda: executor.collective_rpc("identify"))


@pytest.mark.parametrize(("name", "asleep"), [("worker 0", False), ("helper", False), ("helper", True)])
def test_a_shutdown_waits_no_longer_than_its_deadline_for_a_stopped_process(
    machine: SoftMachine, name: str, asleep: bool
) -> None:
    executor = machine.make(ranks=RANKS, deadlines=SHORT)
    if asleep:
        executor.sleep()
    stop(executor, name)
    within(SHORT_S, executor.shutdown)
    machine.assert_empty()


def test_a_start_waits_no_longer_than_its_deadline_for_a_stopped_worker(machine: SoftMachine) -> None:
    faults: tuple[Injection, ...] = (inject_worker(Fault.STOP, 1, "build"),)
    with pytest.raises(FatalError, match="could not start"):
        within(2.0, lambda: machine.make(ranks=RANKS, faults=faults, deadlines=Deadlines(start_s=2.0)))
    machine.assert_empty()

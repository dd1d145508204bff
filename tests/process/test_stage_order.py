"""All ranks are locked before any is checkpointed, and all are restored before any is unlocked: seen from outside.

One rank is held up and the other's state is read from its own driver. What the coordinator sends is proved over all of
its states elsewhere; this shows that the processes really go through it.
"""

from __future__ import annotations

import pytest

from checkpoint_executor import CUDACheckpointExecutor
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.faults import Fault
from tests.support.executor_harness import (
    DEADLINE_S,
    Gate,
    SoftMachine,
    in_thread,
    inject_helper,
    inject_worker,
    state_of,
    wait_until,
)
from tests.support.executor_workers import HookWorker

RANKS = 2
DELAY_S = 0.2


@pytest.mark.parametrize("held", range(RANKS))
def test_no_rank_is_checkpointed_before_all_are_locked(executor: CUDACheckpointExecutor, gate: Gate, held: int) -> None:
    other = 1 - held
    executor.collective_rpc("hold_device", args=(held, gate.path))
    gate.wait_reached()
    call = in_thread(executor.sleep)
    wait_until(lambda: state_of(executor, other) is ProcessState.LOCKED, "the other rank is locked")
    for _ in range(50):
        assert state_of(executor, other) is ProcessState.LOCKED
    assert not call.done()
    gate.open()
    call.result(DEADLINE_S)
    assert state_of(executor, other) is ProcessState.CHECKPOINTED
    executor.wake_up()


@pytest.mark.parametrize("held", range(RANKS))
def test_no_rank_is_unlocked_before_all_are_restored(machine: SoftMachine, held: int) -> None:
    other = 1 - held
    faults = (inject_helper(Fault.SLOW, held, "restore", delay_s=DELAY_S),)
    executor = machine.make(ranks=RANKS, faults=faults)
    executor.sleep()
    call = in_thread(executor.wake_up)
    seen = set()
    while not call.done():
        # In this order: if the other rank ran, then the held one has been restored by now.
        first = state_of(executor, other)
        seen.add((first, state_of(executor, held)))
    call.result(DEADLINE_S)
    assert (ProcessState.LOCKED, ProcessState.CHECKPOINTED) in seen
    assert (ProcessState.RUNNING, ProcessState.CHECKPOINTED) not in seen


def test_no_rank_is_locked_before_all_workspaces_are_prepared(machine: SoftMachine, gate: Gate) -> None:
    waits = {"waits": "second.checkpoint_prepare", "gate": gate.path, "on_rank": 1}
    executor = machine.make(HookWorker, ranks=RANKS, worker_kwargs=waits)
    call = in_thread(executor.sleep)
    gate.wait_reached()
    for _ in range(50):
        assert state_of(executor, 0) is ProcessState.RUNNING
    gate.open()
    call.result(DEADLINE_S)


def test_operations_within_a_stage_run_concurrently_across_ranks(machine: SoftMachine) -> None:
    faults = tuple(inject_helper(Fault.SLOW, rank, "lock", delay_s=DELAY_S) for rank in range(RANKS)) + tuple(
        inject_worker(Fault.SLOW, rank, "sleep_allocator", delay_s=DELAY_S) for rank in range(RANKS)
    )
    executor = machine.make(ranks=RANKS, faults=faults)
    report = executor.sleep()
    stages = {stage.name: stage for stage in report.stages}
    for name in ("lock", "sleep_allocator"):
        assert min(stages[name].ranks) >= DELAY_S
        assert stages[name].wall_s < RANKS * DELAY_S

"""Nobody outlives the parent: SIGKILL at any moment leaves no process, no folder, no shared memory within 2 seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from checkpoint_executor import procfs
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.softgpu import RemoteProcess
from tests.support.executor_harness import ORPHANS_DEADLINE_S, Gate, SoftMachine, poll_exits, wait_until
from tests.support.targets import ChildProcess

RANKS = 2
HANG_IN_LOCK = {"fault": "hang", "role": "helper", "rank": 1, "stage": "lock"}


@pytest.fixture
def parent(machine: SoftMachine) -> ChildProcess:
    return machine.parent()


def kill_parent(machine: SoftMachine, parent: ChildProcess, expected: int = RANKS + 1) -> None:
    """Kill it and hold everything it started to the limit."""
    pids = machine.processes()
    assert len(pids) == expected
    pidfds = {os.pidfd_open(pid): pid for pid in pids}
    try:
        parent.kill()
        left = [pidfds[pidfd] for pidfd in poll_exits(pidfds, ORPHANS_DEADLINE_S)]
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
    assert left == []
    machine.assert_empty()


def state_of_worker(pid: int) -> ProcessState:
    return RemoteProcess(pid, procfs.start_time(pid)).get_state()


# ---------------------------------------------------------------------------------------------- moments


def awake(parent: ChildProcess, gate: Gate) -> None:
    parent.request("build")


def checkpointed(parent: ChildProcess, gate: Gate) -> None:
    parent.request("build")
    parent.request("sleep")


def partly_awake(parent: ChildProcess, gate: Gate) -> None:
    checkpointed(parent, gate)
    parent.request("wake_up", tags=["weights"])


def in_a_call(parent: ChildProcess, gate: Gate) -> None:
    parent.request("build")
    parent.send("call", method="wait_at", arguments=[gate.path])
    gate.wait_reached(RANKS)


def in_a_constructor(parent: ChildProcess, gate: Gate) -> None:
    parent.send("build", worker="HookWorker", worker_kwargs={"waits": "constructor", "gate": gate.path})
    gate.wait_reached(RANKS)


def in_a_worker_hook(parent: ChildProcess, gate: Gate) -> None:
    waits = {"waits": "first.checkpoint_prepare", "gate": gate.path}
    parent.request("build", worker="HookWorker", worker_kwargs=waits)
    parent.send("sleep")
    gate.wait_reached(RANKS)


def in_the_helpers_lock(parent: ChildProcess, gate: Gate) -> None:
    pids = parent.request("build", faults=[HANG_IN_LOCK])
    parent.send("sleep")
    wait_until(lambda: state_of_worker(pids["worker 0"]) is ProcessState.LOCKED, "the first rank is locked")


def in_a_wake(parent: ChildProcess, gate: Gate) -> None:
    parent.request("build", worker="HookWorker", worker_kwargs={"waits": "after_wake weights", "gate": gate.path})
    parent.request("sleep")
    parent.send("wake_up", tags=["weights"])
    gate.wait_reached(RANKS)


def in_a_shutdown(parent: ChildProcess, gate: Gate) -> None:
    parent.request("build", worker="HookWorker", worker_kwargs={"waits": "shutdown", "gate": gate.path})
    parent.send("shutdown")
    gate.wait_reached(RANKS)


MOMENTS = [
    awake,
    checkpointed,
    partly_awake,
    in_a_call,
    in_a_constructor,
    in_a_worker_hook,
    in_the_helpers_lock,
    in_a_wake,
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_nobody_outlives_the_parent(
    machine: SoftMachine, parent: ChildProcess, gate: Gate, moment: Callable[[ChildProcess, Gate], None]
) -> None:
    moment(parent, gate)
    kill_parent(machine, parent)


def test_workers_that_are_about_to_leave_do_not_outlive_the_parent(
    machine: SoftMachine, parent: ChildProcess, gate: Gate
) -> None:
    in_a_shutdown(parent, gate)
    wait_until(lambda: len(machine.processes()) == RANKS, "the helper has left")
    kill_parent(machine, parent, expected=RANKS)


@pytest.mark.parametrize("started", range(1, RANKS + 2))
def test_nobody_outlives_a_parent_that_dies_while_it_starts_them(
    machine: SoftMachine, parent: ChildProcess, started: int
) -> None:
    # The children find their parent gone before they have done anything.
    parent.send("kill_myself_after_starting", processes_started=started)
    assert parent.wait_exit() == -signal.SIGKILL
    machine.wait_empty()


# ---------------------------------------------------------------------------------------------- forks


@pytest.fixture
def fork(parent: ChildProcess) -> Iterator[Callable[[], int]]:
    """Have the parent fork a child that outlives it and holds all that it had open."""
    forks: list[int] = []

    def make() -> int:
        forks.append(parent.request("fork_a_child_that_waits"))
        return forks[-1]

    yield make
    for pid in forks:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("moment", [awake, checkpointed], ids=lambda moment: moment.__name__)
def test_nobody_outlives_a_parent_that_forked_while_it_had_an_executor(
    machine: SoftMachine,
    parent: ChildProcess,
    gate: Gate,
    fork: Callable[[], int],
    moment: Callable[[ChildProcess, Gate], None],
) -> None:
    moment(parent, gate)
    pid = fork()
    kill_parent(machine, parent)
    assert procfs.is_alive(pid)


@pytest.mark.parametrize("moment", [awake, in_a_worker_hook, in_the_helpers_lock], ids=lambda moment: moment.__name__)
def test_nobody_outlives_a_parent_that_forked_before_it_built_the_executor(
    machine: SoftMachine,
    parent: ChildProcess,
    gate: Gate,
    fork: Callable[[], int],
    moment: Callable[[ChildProcess, Gate], None],
) -> None:
    pid = fork()
    moment(parent, gate)
    kill_parent(machine, parent)
    assert procfs.is_alive(pid)


# ---------------------------------------------------------------------------------------------- helpless workers


def test_a_worker_that_holds_the_gil_does_not_outlive_the_parent(
    machine: SoftMachine, parent: ChildProcess, gate: Gate
) -> None:
    parent.request("build")
    parent.send("call", method="hold_the_gil", arguments=[gate.path])
    gate.wait_reached(RANKS)
    kill_parent(machine, parent)


def test_a_worker_that_holds_the_gil_in_its_constructor_does_not_outlive_the_parent(
    machine: SoftMachine, parent: ChildProcess, gate: Gate
) -> None:
    # The helper does not know it yet, so only the kernel can end it.
    parent.send("build", worker="StuckWorker", worker_kwargs={"gate": gate.path})
    gate.wait_reached(RANKS)
    kill_parent(machine, parent)


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "checkpointed"])
@pytest.mark.parametrize("who", [["worker 1"], ["helper"], ["worker 0", "worker 1", "helper"]], ids="+".join)
def test_whoever_is_stopped_does_not_outlive_the_parent(
    machine: SoftMachine, parent: ChildProcess, who: list[str], asleep: bool
) -> None:
    pids: Mapping[str, Any] = parent.request("build")
    if asleep:
        parent.request("sleep")
    for name in who:
        os.kill(pids[name], signal.SIGSTOP)
        wait_until(lambda pid=pids[name]: procfs.is_stopped(pid), f"{name} is stopped")  # type: ignore[misc]
    kill_parent(machine, parent)


def test_what_a_worker_started_does_not_outlive_the_parent(machine: SoftMachine, parent: ChildProcess) -> None:
    parent.request("build")
    grandchildren = parent.request("call", method="start_a_process")
    assert all(procfs.is_alive(pid) for pid in grandchildren)
    kill_parent(machine, parent)
    wait_until(lambda: not any(map(procfs.is_alive, grandchildren)), "the grandchildren are gone", ORPHANS_DEADLINE_S)


# ---------------------------------------------------------------------------------------------- the next one


def test_the_next_executor_sweeps_what_a_dead_one_left(machine: SoftMachine) -> None:
    # Killing parent and helper at once leaves the folder to the next executor.
    dead = machine.runtime_base / f"checkpoint-executor-{os.getuid()}" / "1-1-0"
    machine.make().shutdown()
    dead.mkdir()
    (dead / "control").touch()
    machine.make()
    assert not dead.exists()

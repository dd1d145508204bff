"""A forked child of the parent harms nothing, and Ctrl-C reaches the parent alone."""

from __future__ import annotations

import os
import signal
import time

import pytest

from checkpoint_executor import procfs
from checkpoint_executor.config import Deadlines
from tests.support.executor_harness import Gate, SoftMachine
from tests.support.targets import ChildProcess

RANKS = 2


@pytest.fixture
def parent(machine: SoftMachine) -> ChildProcess:
    made = machine.parent()
    made.request("build")
    return made


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "checkpointed"])
@pytest.mark.parametrize("fork", ["fork_a_child_that_exits", "fork_by_multiprocessing"])
def test_the_exit_of_a_forked_child_harms_nothing(
    machine: SoftMachine, parent: ChildProcess, fork: str, asleep: bool
) -> None:
    pids = machine.processes()
    if asleep:
        parent.request("sleep")
    begun = time.monotonic()
    assert parent.request(fork) == 0
    # It does not wait for a shutdown that would be its parent's to do.
    assert time.monotonic() - begun < Deadlines().shutdown_s
    if asleep:
        parent.request("wake_up")
    assert parent.request("cycle")
    assert machine.processes() == pids


def test_in_a_forked_child_every_method_is_refused_and_the_parents_executor_is_unharmed(
    machine: SoftMachine, parent: ChildProcess
) -> None:
    pids = machine.processes()
    assert parent.request("use_in_a_forked_child") == [
        "collective_rpc: ForkedError, alive True",
        "sleep: ForkedError, alive True",
        "pause: ForkedError, alive True",
        "wake_up: ForkedError, alive True",
        "release: ForkedError, alive True",
        "check_health: ForkedError, alive True",
        "shutdown: awake",
    ]
    assert parent.request("cycle")
    assert machine.processes() == pids


def test_ctrl_c_interrupts_the_caller_and_does_not_kill_the_workers(
    machine: SoftMachine, parent: ChildProcess, gate: Gate
) -> None:
    pids = machine.processes()
    parent.send("call_until_interrupted", method="wait_at", arguments=[gate.path])
    gate.wait_reached(RANKS)
    # What a terminal does: SIGINT to the whole group.
    assert os.getpgid(parent.target.pid) == parent.target.pid
    os.killpg(parent.target.pid, signal.SIGINT)
    assert parent.receive() == "KeyboardInterrupt"
    assert machine.processes() == pids
    gate.open()
    parent.request("wait_until_idle")
    assert parent.request("cycle")
    assert machine.processes() == pids


def test_every_child_is_in_a_group_of_its_own(machine: SoftMachine, parent: ChildProcess) -> None:
    for pid in machine.processes():
        assert os.getpgid(pid) == pid
        assert procfs.owner_uid(pid) == os.getuid()

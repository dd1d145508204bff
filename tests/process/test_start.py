"""Starting: all or nothing, with a reason."""

from __future__ import annotations

import errno
import functools
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import ConfigError, StartError, control, processes
from checkpoint_executor.config import Deadlines
from checkpoint_executor.faults import Fault
from checkpoint_executor.messages import Role
from checkpoint_executor.softgpu import ROOT_VARIABLE
from checkpoint_executor.workers import Worker, WorkerContext
from tests.support.executor_harness import Gate, SoftMachine, inject_helper, inject_worker, running
from tests.support.executor_workers import RawWorker, wait_at

RANKS = 2


class WaitingWorker(Worker):
    def __init__(self, context: WorkerContext, gate: str) -> None:
        super().__init__(context)
        wait_at(gate)


class LeavingWorker(Worker):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        sys.exit(5)


class FailingWorker(Worker):
    def __init__(self, context: WorkerContext, rank: int) -> None:
        super().__init__(context)
        if context.rank == rank:
            raise LookupError(f"no weights for rank {rank}")


class NoWorker:
    pass


def assert_start_fails(
    machine: SoftMachine, worker: type | str = RawWorker, *, match: str, **options: Any
) -> StartError:
    with pytest.raises(StartError, match=match) as caught:
        machine.make(worker, RANKS, **options)
    assert not caught.value.executor_alive
    machine.assert_empty()
    return caught.value


# ---------------------------------------------------------------------------------------------- the worker


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_constructor_that_raises_is_told_with_its_traceback(machine: SoftMachine, rank: int) -> None:
    error = assert_start_fails(machine, FailingWorker, worker_args=(rank,), match=f"no weights for rank {rank}")
    assert (error.rank, error.stage, error.role) == (rank, "build", "worker")
    assert "could not start" in str(error)
    assert "in __init__" in str(error)
    assert error.story


def test_a_constructor_that_leaves_is_told(machine: SoftMachine) -> None:
    error = assert_start_fails(machine, LeavingWorker, match="exited with status 5")
    assert error.stage == "build"


def test_a_device_that_is_full_is_told(machine: SoftMachine) -> None:
    assert_start_fails(machine, soft_capacity_bytes=2 << 20, match="SOFT-[01] is full")


@pytest.mark.parametrize(
    ("worker", "match"),
    [
        ("no_such_module:Worker", "no_such_module"),
        ("tests.support.executor_workers:NoSuchWorker", "NoSuchWorker"),
        ("tests.support.executor_workers:pattern", "not a subclass"),
        (NoWorker, "not a subclass"),
    ],
    ids=str,
)
def test_what_is_no_worker_is_told(machine: SoftMachine, worker: Any, match: str) -> None:
    assert_start_fails(machine, worker, match=match)


@pytest.mark.parametrize("worker", ["Worker", "", ":Worker", 5, functools.partial(RawWorker)], ids=str)
def test_what_is_neither_a_class_nor_the_name_of_one_is_refused_before_anything_is_started(
    machine: SoftMachine, worker: Any
) -> None:
    with pytest.raises(ConfigError, match=r"a class, or its name as 'package\.module:Class'.*Nothing was started"):
        machine.make(worker)
    assert list(machine.runtime_base.iterdir()) == []


def test_worker_arguments_reach_the_constructor(machine: SoftMachine) -> None:
    executor = machine.make(worker_args=(4096,), worker_kwargs={"kv_cache_bytes": 8192})
    executor.sleep()
    report = executor.last_report
    assert report is not None
    slept = next(stage for stage in report.stages if stage.name == "sleep_allocator")
    assert [(figures["weights"], figures["kv_cache"]) for figures in slept.figures] == [(4096, 8192)]


def test_worker_arguments_that_cannot_travel_are_refused_before_anything_is_started(machine: SoftMachine) -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent.*lock.*Nothing was started"):
        machine.make(worker_args=(threading.Lock(),))
    assert list(machine.runtime_base.iterdir()) == []


# ---------------------------------------------------------------------------------------------- processes


def test_a_start_that_takes_too_long_is_told(machine: SoftMachine, gate: Gate) -> None:
    deadlines = Deadlines(start_s=1.0)
    error = assert_start_fails(
        machine,
        WaitingWorker,
        worker_args=(gate.path,),
        deadlines=deadlines,
        match="no answer in stage '(connect|build)'",
    )
    assert error.deadline_s == 1.0


def test_a_worker_that_dies_at_the_start_is_told(machine: SoftMachine) -> None:
    error = assert_start_fails(machine, faults=(inject_worker(Fault.DIE, 1, "build"),), match="signal 9")
    assert (error.rank, error.stage) == (1, "build")


def test_a_driver_that_cannot_be_opened_is_told_and_not_only_printed_by_the_helper(
    machine: SoftMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The helper's import path begins with ours.
    bindings = tmp_path / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "driver.py").write_text('def cuInit(flags):\n    raise RuntimeError("no driver here.")\n')
    for package in (bindings, bindings.parent):
        (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    error = assert_start_fails(
        machine,
        device="cuda",
        soft_root=None,
        soft_capacity_bytes=None,
        match=r"helper failed in stage 'connect': cuInit: NO_DRIVER_FUNCTION \(999\): no driver here\. What had",
    )
    assert (error.role, error.stage, error.code_name) == ("helper", "connect", "NO_DRIVER_FUNCTION")


def test_a_child_that_is_another_process_than_was_started_is_not_taken(
    machine: SoftMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = processes.ChildProcess.__init__

    def lie(self: processes.ChildProcess, role: Role, rank: int, popen: Any) -> None:
        real(self, role, rank, popen)
        if (role, rank) == (Role.WORKER, 1):
            self.start_time += 1

    monkeypatch.setattr(processes.ChildProcess, "__init__", lie)
    assert_start_fails(machine, deadlines=Deadlines(start_s=1.0), match="no answer in stage 'connect'")


@pytest.mark.parametrize("fails_at", [0, 1, 2], ids=["helper", "first worker", "second worker"])
def test_a_process_that_cannot_be_started_is_told_and_the_others_are_killed(
    machine: SoftMachine, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    real = processes.spawn
    started: list[processes.ChildProcess] = []

    def spawn(*arguments: Any) -> processes.ChildProcess:
        if len(started) == fails_at:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real(*arguments))
        return started[-1]

    monkeypatch.setattr(processes, "spawn", spawn)
    assert_start_fails(machine, match="Resource temporarily unavailable")
    assert len(started) == fails_at
    assert running(child.pid for child in started) == []


def test_an_environment_that_the_system_does_not_take_is_told(machine: SoftMachine) -> None:
    assert_start_fails(machine, worker_env={"LARGE": "x" * (1 << 20)}, match="Argument list too long")


def test_a_socket_that_cannot_be_made_is_told(machine: SoftMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(control, "Transport", fail)
    assert_start_fails(machine, match="Too many open files")


def test_ctrl_c_during_the_start_leaves_nothing(machine: SoftMachine, gate: Gate) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        gate.wait_reached(RANKS)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        machine.make(WaitingWorker, ranks=RANKS, worker_args=(gate.path,))
    thread.join()
    machine.assert_empty()


# ---------------------------------------------------------------------------------------------- the environment


def test_problems_are_told_all_at_once_and_nothing_is_started(machine: SoftMachine) -> None:
    with pytest.raises(ConfigError) as caught:
        machine.make(ranks=0, communication="carrier pigeon", deadlines=Deadlines(driver_s=-1))
    assert len(caught.value.problems) == 4
    assert list(machine.runtime_base.iterdir()) == []


def test_folders_that_others_may_write_to_are_refused_and_nothing_is_left(
    machine: SoftMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.root.mkdir()
    machine.root.chmod(0o777)
    monkeypatch.setenv(ROOT_VARIABLE, str(machine.root))
    with pytest.raises(ConfigError, match=r"may write.*Nothing was started"):
        machine.make(soft_root=None)
    assert machine.processes() == []
    assert [path for parent in machine.runtime_base.iterdir() for path in parent.iterdir()] == []


def test_the_runtime_directory_is_private(machine: SoftMachine) -> None:
    executor = machine.make()
    folder = executor._control.runtime_dir
    for path in (folder, folder.parent, folder / "rendezvous"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((folder / "control").stat().st_mode)


def test_folders_may_be_relative_and_the_caller_may_move_on(
    machine: SoftMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(machine.folder)
    executor = machine.make(runtime_dir="run", soft_root="gpu")
    monkeypatch.chdir(tmp_path)
    executor.collective_rpc(lambda worker: os.chdir("/"))
    executor.sleep()
    executor.wake_up()
    executor.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_device_ids_choose_the_devices(machine: SoftMachine) -> None:
    machine.make(ranks=RANKS, device_ids=("SOFT-7", "SOFT-3"))
    assert machine.used_bytes(2) == [0, 0]
    assert machine.gpu(7).used_bytes() > 0
    assert machine.gpu(3).used_bytes() > 0


def test_worker_env_reaches_the_workers(machine: SoftMachine) -> None:
    executor = machine.make(worker_env={"CHECKPOINT_EXECUTOR_TEST": "here"})

    def look(worker: Any) -> str | None:
        import os

        return os.environ.get("CHECKPOINT_EXECUTOR_TEST")

    assert executor.collective_rpc(look) == ["here"]
    assert "CHECKPOINT_EXECUTOR_TEST" not in os.environ


def test_an_injection_that_is_never_met_does_nothing(machine: SoftMachine) -> None:
    executor = machine.make(faults=(inject_helper(Fault.DIE, 5, "lock"), inject_helper(Fault.DIE, 0, "no_such_stage")))
    executor.sleep()
    executor.wake_up()

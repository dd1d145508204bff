"""What goes wrong, at TP=1 and at TP=2, on an engine of its own each: what the client sees, how soon, and that nothing
is left. With several ranks it goes wrong on the last alone."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest

from checkpoint_executor import procfs
from checkpoint_executor.faults import Fault, Injection
from checkpoint_executor.messages import Role
from checkpoint_executor.softgpu import CONTEXT_BYTES
from tests.support.vllm_forked import cycle_in_process, forked, hold_engine
from tests.support.vllm_harness import Engine, VllmMachine
from tests.support.vllm_waiting import wait_until

#: Every test that asks for ``ranks`` runs with each; see conftest.
RANKS = (1, 2)

_FaultPoint = tuple[Fault, Role, str]


def inject(ranks: int, point: _FaultPoint, **details: object) -> list[Injection]:
    """A fault on the last of so many ranks, in this process and stage."""
    fault, role, stage = point
    return [Injection(fault=fault, role=role, rank=ranks - 1, stage=stage, **details)]  # type: ignore[arg-type]


def assert_dead(engine: Engine, within_s: float = 8.0) -> None:
    """The engine says that it is dead, and nothing of its workers or our helper is left."""
    from vllm.v1.engine.exceptions import EngineDeadError

    begun = time.monotonic()
    wait_until(
        lambda: not any(engine.is_alive(pid) for pid in (*engine.worker_pids, engine.pids["helper"])), "all gone"
    )
    assert time.monotonic() - begun < 2
    wait_until(lambda: not engine.is_alive(engine.core_pid), "EngineCore ended", within_s)
    with pytest.raises(EngineDeadError):
        engine.llm.wake_up()
    engine.assert_gone()


def fails(call: Callable[[], object], pattern: str, within_s: float = 5.0) -> None:
    """The call raises our message, soon."""
    begun = time.monotonic()
    with pytest.raises(Exception, match=re.compile(pattern, re.DOTALL)):
        call()
    assert time.monotonic() - begun < within_s


# ---------------------------------------------------------------------------------------------- undone and refused


def test_a_failed_lock_is_undone_and_the_engine_serves_on(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks, inject(ranks, (Fault.DRIVER_ERROR, Role.HELPER, "lock"), code=600))
    tokens = engine.tokens()
    fails(lambda: engine.llm.sleep(level=1), "the driver could not lock every rank .*ordinary level-1 sleep.*wake_up")
    assert engine.is_sleeping
    assert engine.status.phase == "awake"
    assert engine.status.sleeping == ("kv_cache", "weights")
    # Not checkpointed: workers answer, and batches wait.
    assert len(engine.rpc("known_requests")) == ranks
    engine.submit("queued")
    assert engine.wake()
    assert engine.finish() == {"queued": tokens}
    engine.llm.sleep(level=1)
    assert engine.used_bytes == engine.nothing
    engine.llm.wake_up()
    assert engine.tokens() == tokens


def test_a_sleep_after_an_undone_one_is_refused_until_wake_up(machine: VllmMachine, ranks: int) -> None:
    """A success would tell the caller that the device is empty."""
    engine = machine.start(ranks, inject(ranks, (Fault.DRIVER_ERROR, Role.HELPER, "lock"), code=600))
    tokens = engine.tokens()
    fails(lambda: engine.llm.sleep(level=1), "the driver could not lock every rank")
    assert all(engine.used_bytes)
    fails(lambda: engine.llm.sleep(level=1), "the last sleep was undone .*call wake_up")
    assert engine.wake()
    assert engine.tokens() == tokens
    engine.llm.sleep(level=1)
    assert engine.used_bytes == engine.nothing
    engine.llm.wake_up()
    assert engine.tokens() == tokens


def test_a_wake_that_lacks_room_for_the_tags_alone_is_refused(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks, environ={"CHECKPOINT_EXECUTOR_WAKE_MARGIN_MIB": "0"})
    tokens = engine.tokens()
    awake_bytes = engine.used_bytes[-1]
    engine.llm.sleep(level=1)
    for tags in (None, ["weights"]):
        lacking = awake_bytes // 2 if tags is None else awake_bytes
        # Enough for the driver's part, which is a context and little else.
        with machine.room_taken(ranks - 1, leave_bytes=max(awake_bytes - lacking, CONTEXT_BYTES + 4096)):
            fails(lambda tags=tags: engine.llm.wake_up(tags=tags), r"lacks \d+ bytes .*Nothing was touched")  # type: ignore[misc]
            assert engine.status.phase == "checkpointed"
    engine.llm.wake_up(tags=["weights"])
    with machine.room_taken(ranks - 1, leave_bytes=4096):
        fails(lambda: engine.llm.wake_up(tags=["kv_cache"]), r"lacks \d+ bytes .*Nothing was touched")
    assert engine.wake()
    assert engine.tokens() == tokens


def test_a_wake_that_lacks_room_after_a_release_is_refused(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks, environ={"CHECKPOINT_EXECUTOR_WAKE_MARGIN_MIB": "0"})
    tokens = engine.tokens()
    engine.llm.sleep(level=0)
    engine.client.call_utility("release_kv_cache_memory")
    with machine.room_taken(ranks - 1, leave_bytes=4096):
        fails(lambda: engine.llm.wake_up(tags=["kv_cache"]), r"lacks \d+ bytes .*Nothing was touched")
    assert engine.wake()
    assert engine.tokens() == tokens


def test_a_failed_lock_is_fatal_where_undo_is_switched_off(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(
        ranks,
        inject(ranks, (Fault.DRIVER_ERROR, Role.HELPER, "lock")),
        environ={"CHECKPOINT_EXECUTOR_UNDO_BEFORE_CHECKPOINT": "0"},
    )
    fails(lambda: engine.llm.sleep(level=1), f"rank {ranks - 1} failed in stage 'lock'.*were killed")
    assert_dead(engine)


# ---------------------------------------------------------------------------------------------- failures are fatal


@pytest.mark.parametrize(
    ("point", "pattern"),
    [
        ((Fault.DRIVER_ERROR, Role.HELPER, "checkpoint"), "rank {} failed in stage 'checkpoint'"),
        ((Fault.EXCEPTION, Role.WORKER, "worker_sleep"), "rank {} failed in stage 'worker_sleep': injected"),
        ((Fault.EXCEPTION, Role.WORKER, "prepare_workspaces"), "rank {} failed in stage 'prepare_workspaces'"),
        ((Fault.DIE, Role.WORKER, "worker_sleep"), "worker {} .* was ended by signal 9"),
        ((Fault.DIE, Role.HELPER, "lock"), "helper .* was ended by signal 9 in stage 'lock'"),
    ],
    ids=["checkpoint", "worker_sleep", "hook", "worker_dies", "helper_dies"],
)
def test_a_failure_in_sleep_kills_at_once_and_reaches_the_client(
    machine: VllmMachine, ranks: int, point: _FaultPoint, pattern: str
) -> None:
    engine = machine.start(ranks, inject(ranks, point))
    pattern = pattern.format(ranks - 1)
    fails(lambda: engine.llm.sleep(level=1), f"Call to sleep method failed: .*{pattern}.*were killed")
    assert_dead(engine)
    (line,) = machine.cycles()
    assert line["executor_alive"] is False


@pytest.mark.parametrize(
    ("point", "pattern"),
    [
        ((Fault.DRIVER_ERROR, Role.HELPER, "restore"), "rank {} failed in stage 'restore'"),
        ((Fault.EXCEPTION, Role.WORKER, "worker_wake"), "rank {} failed in stage 'worker_wake'"),
    ],
    ids=["restore", "worker_wake"],
)
def test_a_failure_in_wake_kills_at_once_and_reaches_the_client(
    machine: VllmMachine, ranks: int, point: _FaultPoint, pattern: str
) -> None:
    engine = machine.start(ranks, inject(ranks, point))
    engine.llm.sleep(level=1)
    pattern = pattern.format(ranks - 1)
    fails(lambda: engine.llm.wake_up(), f"Call to wake_up method failed: .*{pattern}.*were killed")
    assert_dead(engine)


def test_a_worker_that_hangs_meets_the_deadline(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(
        ranks,
        inject(ranks, (Fault.HANG, Role.WORKER, "worker_sleep")),
        environ={"CHECKPOINT_EXECUTOR_WORKER_SLEEP_S": "0.5"},
    )
    fails(lambda: engine.llm.sleep(level=1), "no answer in stage 'worker_sleep' within 0.5 s")
    assert_dead(engine)


def test_a_communicator_that_was_not_suspended_is_caught_before_the_lock(machine: VllmMachine) -> None:
    engine = machine.start(2)
    engine.rpc("lie_about_suspension")
    fails(
        lambda: engine.llm.sleep(level=1),
        "in stage 'confirm_suspended': the NCCL communicator of group 'tp:0' still holds its GPU memory",
    )
    assert_dead(engine)


def test_a_stopped_worker_cannot_keep_a_sleep_from_beginning(machine: VllmMachine, ranks: int) -> None:
    """vLLM asks the workers for things before it sleeps, and waits for the answers without a deadline."""
    engine = machine.start(ranks, environ={"CHECKPOINT_EXECUTOR_WORKER_SLEEP_S": "2"})
    os.kill(engine.worker_pids[-1], signal.SIGSTOP)
    fails(lambda: engine.llm.sleep(level=1), "no answer to '.*' within 2 s: a worker is stopped or stuck")
    assert_dead(engine)


def test_a_rank_that_never_answers_after_another_failed_meets_a_deadline(machine: VllmMachine) -> None:
    """Its answer, if it ever came, would be taken for the next call's."""
    engine = machine.start(2, environ={"CHECKPOINT_EXECUTOR_WORKER_SLEEP_S": "0.5"})
    fails(
        lambda: engine.rpc("fail_on_the_first_rank_alone"),
        "after a call that failed .*the first rank alone.* the other ranks did not finish it within 0.5 s.*were killed",
    )
    assert_dead(engine)


def test_a_worker_killed_while_asleep_ends_the_engine(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks)
    engine.llm.sleep(level=1)
    os.kill(engine.worker_pids[-1], signal.SIGKILL)
    assert_dead(engine)


def test_a_helper_killed_while_awake_ends_the_engine(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks)
    os.kill(engine.pids["helper"], signal.SIGKILL)
    assert_dead(engine)


def test_a_batch_that_needs_sleeping_memory_is_refused(
    machine: VllmMachine, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """An explicit resume past a sleeping engine: vLLM has no way to refuse a batch but to end."""
    from vllm.v1.engine.exceptions import EngineDeadError

    engine = machine.start(ranks)
    engine.llm.sleep(level=1)
    engine.llm.wake_up(tags=["weights"])
    engine.client.call_utility("resume_scheduler")
    engine.submit("forced")
    with pytest.raises(EngineDeadError):
        engine.finish()
    engine.assert_gone()
    text = capfd.readouterr()
    # The same end comes of a batch that ran on memory that is not there.
    assert "the call needs memory that is asleep (kv_cache)" in text.out + text.err


def test_a_failed_start_leaves_nothing(machine: VllmMachine, ranks: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        machine.start(ranks, inject(ranks, (Fault.EXCEPTION, Role.WORKER, "introduce")))
    text = capfd.readouterr()
    gc.collect()  # the zmq context that vLLM's client left open, or its warning comes when pytest ends
    assert (
        f"the executor could not start: rank {ranks - 1} failed in stage 'introduce': injected" in text.out + text.err
    )
    machine.assert_empty(ranks)


# ---------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("asleep", [True, False], ids=["asleep", "awake"])
def test_shutdown_is_done_at_once(machine: VllmMachine, ranks: int, asleep: bool) -> None:
    engine = machine.start(ranks)
    if asleep:
        engine.llm.sleep(level=1)
    engine.settle()
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("asleep", [True, False], ids=["asleep", "awake"])
def test_sigkill_of_engine_core_leaves_no_orphan(machine: VllmMachine, ranks: int, asleep: bool) -> None:
    engine = machine.start(ranks)
    if asleep:
        engine.llm.sleep(level=1)
    os.kill(engine.core_pid, signal.SIGKILL)
    engine.assert_gone(5)


@pytest.mark.parametrize("asleep", [True, False], ids=["asleep", "awake"])
def test_sigkill_of_the_front_end_leaves_no_orphan(machine: VllmMachine, ranks: int, asleep: bool) -> None:
    with forked(hold_engine, machine.environment(ranks), machine.options(ranks), asleep) as front_end:
        core_pid = front_end.answer()
        (found,) = machine.statuses()
        pids = [core_pid, *found.processes.values()]
        assert len(pids) == ranks + 2
        assert found.phase == ("checkpointed" if asleep else "awake")
        front_end.kill()
    for pid in pids:
        wait_until(lambda pid=pid: not procfs.is_alive(pid), f"{pid} is gone", 5)  # type: ignore[misc]
    machine.assert_empty(ranks)


# ---------------------------------------------------------------------------------------------- other ways to run


def test_without_an_engine_core_process_errors_are_clear_too(machine: VllmMachine, ranks: int) -> None:
    """vLLM has no failure callback there: stock, a wake after a death is an assertion about follower nodes."""
    environ = machine.environment(ranks, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with forked(cycle_in_process, environ, machine.options(ranks), str(machine.runtime_base)) as front_end:
        facts = front_end.answer()
    assert facts["asleep"] == (True, "checkpointed")
    assert facts["same_tokens"]
    assert facts["rpc"].startswith("AsleepError: the workers are checkpointed")
    for call in ("wake", "health", "again"):
        assert facts[call].startswith("ProcessDiedError: worker 0"), facts[call]
    machine.assert_empty()


@pytest.mark.timeout(240)  # the worker imports vLLM anew
def test_workers_that_are_spawned_instead_of_forked(machine: VllmMachine) -> None:
    engine = machine.start(
        2, environ={"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    assert engine.used_bytes == engine.nothing
    engine.llm.wake_up()
    assert engine.tokens() == tokens
    engine.llm.sleep(level=1)
    os.kill(engine.core_pid, signal.SIGKILL)
    engine.assert_gone(5)

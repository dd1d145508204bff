"""The end of an executor, however it comes: in good order when awake, by SIGKILL when asleep, and nothing is left."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import pytest

from checkpoint_executor import CUDACheckpointExecutor, FatalError, InvalidRequestError, RefusedError
from checkpoint_executor.config import Deadlines
from checkpoint_executor.faults import Fault
from tests.support.executor_harness import (
    DEADLINE_S,
    Gate,
    SoftMachine,
    in_thread,
    inject_worker,
    run_script,
    wait_until,
)
from tests.support.executor_workers import HookWorker, RawWorker

RANKS = 2


def unregistered(machine: SoftMachine) -> CUDACheckpointExecutor:
    """An executor that only the caller holds."""
    return CUDACheckpointExecutor(RawWorker, RANKS, **machine.options())


def assert_over(machine: SoftMachine, executor: CUDACheckpointExecutor) -> None:
    assert executor.phase == "closed"
    machine.assert_empty()
    for call in (
        executor.check_health,
        executor.sleep,
        lambda: executor.sleep(level=0),
        executor.wake_up,
        executor.release_kv_cache_memory,
        lambda: executor.collective_rpc("identify"),
    ):
        with pytest.raises(RefusedError, match="shut down") as caught:
            call()
        assert not isinstance(caught.value, InvalidRequestError)


@pytest.mark.parametrize("state", ["awake", "paused", "checkpointed", "partly awake", "released"])
def test_shutdown_ends_everything_in_every_state(machine: SoftMachine, state: str) -> None:
    executor = machine.make(ranks=RANKS)
    if state in ("paused", "released"):
        executor.sleep(level=0)
    if state == "released":
        executor.release_kv_cache_memory()
    if state in ("checkpointed", "partly awake"):
        executor.sleep()
    if state == "partly awake":
        executor.wake_up(["kv_cache"])
    executor.shutdown()
    assert_over(machine, executor)


def test_shutdown_may_be_repeated_and_called_from_many_threads(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS)
    for call in [in_thread(executor.shutdown) for _ in range(8)]:
        call.result(DEADLINE_S)
    executor.shutdown()
    wait_until(lambda: executor.phase == "closed", "the thread that was first has ended it")
    executor.shutdown()
    assert_over(machine, executor)


def test_an_awake_worker_is_told_of_the_end(machine: SoftMachine, gate: Gate) -> None:
    executor = machine.make(HookWorker, ranks=RANKS, worker_kwargs={"waits": "shutdown", "gate": gate.path})
    call = in_thread(executor.shutdown)
    gate.wait_reached(RANKS)
    assert executor.phase == "closing"
    with pytest.raises(RefusedError, match="shut down"):
        executor.collective_rpc("identify")
    gate.open()
    call.result(DEADLINE_S)
    assert_over(machine, executor)


def test_a_sleeping_worker_is_not(machine: SoftMachine, gate: Gate) -> None:
    executor = machine.make(HookWorker, ranks=RANKS, worker_kwargs={"waits": "shutdown", "gate": gate.path})
    executor.sleep()
    executor.shutdown()
    assert_over(machine, executor)
    gate.assert_unreached()


def test_a_worker_that_does_not_end_is_killed(machine: SoftMachine, gate: Gate) -> None:
    executor = machine.make(
        HookWorker,
        ranks=RANKS,
        worker_kwargs={"waits": "shutdown", "gate": gate.path, "on_rank": 1},
        deadlines=Deadlines(shutdown_s=0.2),
    )
    executor.shutdown()
    assert_over(machine, executor)


def test_a_worker_that_fails_to_end_is_heard_and_ends(machine: SoftMachine, capfd: pytest.CaptureFixture[str]) -> None:
    executor = machine.make(HookWorker, ranks=RANKS, worker_kwargs={"fails": "shutdown", "on_rank": 1})
    executor.shutdown()
    assert_over(machine, executor)
    assert "LookupError: shutdown does not like it" in capfd.readouterr().err


def test_a_worker_that_dies_at_the_end_ends(machine: SoftMachine) -> None:
    def die_at_the_end(worker: HookWorker) -> None:
        worker.shutdown = lambda: worker.leave(7)  # type: ignore[method-assign]

    executor = machine.make(HookWorker, ranks=RANKS)
    executor.collective_rpc(die_at_the_end)
    executor.shutdown()
    assert_over(machine, executor)


def test_the_context_manager_ends_it(machine: SoftMachine) -> None:
    with machine.make(ranks=RANKS) as executor:
        executor.collective_rpc("identify")
    assert_over(machine, executor)


def test_the_context_manager_ends_it_after_an_exception(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS)

    def sleep_and_raise() -> None:
        with executor:
            executor.sleep()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sleep_and_raise()
    assert_over(machine, executor)


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "checkpointed"])
def test_garbage_collection_ends_it(machine: SoftMachine, asleep: bool) -> None:
    executor = unregistered(machine)
    if asleep:
        executor.sleep()
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    machine.assert_empty()


def test_garbage_collection_on_the_control_thread_ends_it(machine: SoftMachine) -> None:
    executor = unregistered(machine)
    control, gone = executor._control, weakref.ref(executor)
    executor.cycle = executor  # type: ignore[attr-defined]

    def collect() -> None:
        gc.collect()

    gc.disable()
    try:
        del executor
        assert gone() is not None
        assert control.post(collect)
        assert control.join(DEADLINE_S)
    finally:
        gc.enable()
    assert gone() is None
    machine.assert_empty()


def test_an_executor_built_in_a_thread_that_has_ended_lives_on(machine: SoftMachine) -> None:
    made: list[CUDACheckpointExecutor] = []
    thread = threading.Thread(target=lambda: made.append(machine.make(ranks=RANKS)))
    thread.start()
    thread.join(DEADLINE_S)
    (executor,) = made
    pids = executor.pids
    executor.sleep()
    executor.wake_up()
    executor.collective_rpc("step")
    assert executor.pids == pids


def test_two_executors_in_one_process_do_not_meet(machine: SoftMachine) -> None:
    first, second = machine.make(ranks=RANKS), machine.make(ranks=RANKS)
    first.sleep()
    second.collective_rpc("step")
    first.shutdown()
    assert set(machine.processes()) == set(second.pids.values())
    second.sleep()
    second.wake_up()
    second.collective_rpc("step")


def test_a_failure_of_the_control_thread_itself_ends_it_and_leaves_nobody_waiting(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS)

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.PytestUnhandledThreadExceptionWarning)
        hook, threading.excepthook = threading.excepthook, lambda args: None
        try:
            assert executor._control.post(fail)
            assert executor._control.join(DEADLINE_S)
        finally:
            threading.excepthook = hook
    machine.assert_empty()
    for _ in range(2):
        with pytest.raises(FatalError, match="ZeroDivisionError: a bug"):
            executor.sleep()
    with pytest.raises(FatalError):
        executor.check_health()
    assert executor.phase == "failed"
    executor.shutdown()


def test_a_worker_that_is_asked_to_end_while_it_fails_is_killed(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, faults=(inject_worker(Fault.HANG, 0, "sleep_allocator"),))
    call = in_thread(executor.sleep)
    wait_until(lambda: executor.phase == "suspending", "the sleep has begun")
    executor.shutdown()
    assert_over(machine, executor)
    with pytest.raises(RefusedError, match="shut down"):
        call.result(DEADLINE_S)


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "checkpointed"])
def test_the_end_of_the_interpreter_ends_it(machine: SoftMachine, asleep: bool) -> None:
    script = machine.folder / "script.py"
    script.write_text(
        "from checkpoint_executor import CUDACheckpointExecutor\n"
        f"executor = CUDACheckpointExecutor('tests.support.executor_workers:RawWorker', 2, **{machine.options()!r})\n"
        f"{'executor.sleep()' if asleep else ''}\n"
    )
    assert run_script(script) == (0, "", "")
    machine.assert_empty()

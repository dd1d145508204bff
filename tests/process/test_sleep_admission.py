"""Before the first lock: what cannot end well is refused and undone. And what a wake can be asked to wait for."""

from __future__ import annotations

import threading

import pytest

from checkpoint_executor import FatalError, InsufficientMemoryError, InvalidRequestError
from checkpoint_executor.config import Deadlines
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.softgpu import CONTEXT_BYTES, SoftProcess
from checkpoint_executor.workers import WorkerContext
from tests.support.executor_harness import SoftMachine, states_of, wait_until
from tests.support.executor_workers import RawWorker, pattern

MIB = 1 << 20


class HoardingWorker(RawWorker):
    """Holds device memory that no allocator tag reaches, beside the usual."""

    def __init__(self, context: WorkerContext, hoard_bytes: int) -> None:
        super().__init__(context)
        process: SoftProcess = context.allocator._process  # type: ignore[attr-defined]
        self.hoard = process.allocate(hoard_bytes)


class ForgetfulWorker(RawWorker):
    """Its weights change on the way: what a bug in a backup would look like."""

    def after_wake(self, tags: tuple[str, ...]) -> None:
        self.calls += 1

    def corrupt_backup(self) -> None:
        original = self.context.allocator.wake

        def wake(tags: tuple[str, ...]) -> dict[str, int]:
            figures = original(tags)
            byte = self.weights.read(7, 1)[0]
            self.weights.write(bytes([byte ^ 1]), 7)
            return figures

        self.context.allocator.wake = wake  # type: ignore[assignment, method-assign]


def test_more_than_the_driver_can_move_in_time_is_refused_and_undone(machine: SoftMachine) -> None:
    # A deadline of 50 ms at the 1 GB/s that is counted on allows 50 MB; the lock's has to be below it.
    executor = machine.make(
        HoardingWorker, 2, worker_args=(64 * MIB,), deadlines=Deadlines(driver_s=0.05, driver_lock_s=0.04)
    )
    weights = executor.collective_rpc("read_weights")
    with pytest.raises(InsufficientMemoryError, match="still on the device after the ordinary sleep") as caught:
        executor.sleep()
    assert caught.value.stage == "admit_sleep"
    assert "The sleep was undone: the executor is awake and serves on" in caught.value.message
    assert states_of(executor) == {ProcessState.RUNNING}
    assert not executor.is_sleeping
    assert executor.collective_rpc("read_weights") == weights


def test_host_memory_that_cannot_be_had_is_refused_before_any_lock(machine: SoftMachine) -> None:
    executor = machine.make(host_margin_bytes=1 << 60)
    with pytest.raises(InsufficientMemoryError, match="host memory lacks") as caught:
        executor.sleep()
    assert caught.value.missing_bytes is not None
    assert caught.value.missing_bytes["host"] > 1 << 59
    assert states_of(executor) == {ProcessState.RUNNING}
    assert executor.collective_rpc("read_weights") == [pattern(0)]


def test_a_wake_waits_for_memory_and_goes_on_when_it_is_free(machine: SoftMachine) -> None:
    executor = machine.make()
    executor.sleep()
    hog = machine.take_all_but(2 * CONTEXT_BYTES)
    woken: list[object] = []
    caller = threading.Thread(target=lambda: woken.append(executor.wake_up(wait_for_memory_s=60)))
    caller.start()
    wait_until(lambda: executor.stage == "admit_wake", "admission waits")
    assert states_of(executor) == {ProcessState.CHECKPOINTED}
    hog.kill()
    caller.join(30)
    assert len(woken) == 1
    assert executor.collective_rpc("read_weights") == [pattern(0)]


def test_a_wait_for_memory_ends_in_the_refusal(machine: SoftMachine) -> None:
    executor = machine.make()
    executor.sleep()
    hog = machine.take_all_but(2 * CONTEXT_BYTES)
    with pytest.raises(InsufficientMemoryError, match="SOFT-0 lacks"):
        executor.wake_up(wait_for_memory_s=0.1)
    hog.kill()
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == [pattern(0)]


def test_a_negative_wait_is_refused(machine: SoftMachine) -> None:
    with pytest.raises(InvalidRequestError, match="wait_for_memory_s"):
        machine.make().wake_up(wait_for_memory_s=-1)


def test_verified_weights_that_came_back_right_are_silent(machine: SoftMachine) -> None:
    executor = machine.make(ranks=2, verify_weights=True)
    for _ in range(2):
        executor.sleep()
        executor.wake_up(["weights"])
        executor.wake_up(["kv_cache"])
    assert executor.collective_rpc("read_weights") == [pattern(0), pattern(1)]


def test_one_wrong_byte_of_a_weight_is_fatal_and_named_when_verified(machine: SoftMachine) -> None:
    executor = machine.make(ForgetfulWorker, verify_weights=True)
    executor.collective_rpc("corrupt_backup")
    address = executor.collective_rpc("addresses")[0][0]
    executor.sleep()
    with pytest.raises(FatalError, match=f"weights did not come back as they were: .* at {address:#x}") as caught:
        executor.wake_up()
    assert (caught.value.stage, caught.value.rank) == ("wake_allocator", 0)

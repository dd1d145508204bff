"""A restore that would not fit is refused before any rank is touched: a driver restore that runs out is permanent."""

from __future__ import annotations

import fcntl
from typing import Any

import pytest

from checkpoint_executor import CUDACheckpointExecutor, InsufficientMemoryError
from checkpoint_executor.config import Deadlines
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.softgpu import CONTEXT_BYTES
from tests.support.executor_harness import SoftMachine, snapshot, states_of
from tests.support.executor_workers import KV_CACHE_BYTES, WEIGHTS_BYTES, pattern

MIB = 1 << 20
CAPACITY_BYTES = 32 * MIB
STAGING_BYTES = 1 * MIB
RANKS = 2


def make(machine: SoftMachine, ranks: int = RANKS, **options: Any) -> CUDACheckpointExecutor:
    given: dict[str, Any] = {"soft_capacity_bytes": CAPACITY_BYTES, "wake_margin_bytes": 0, **options}
    return machine.make(ranks=ranks, **given)


def assert_refused(
    machine: SoftMachine, executor: CUDACheckpointExecutor, tags: list[str] | None = None
) -> InsufficientMemoryError:
    before = snapshot(machine, executor)
    with pytest.raises(InsufficientMemoryError, match="Nothing was touched") as caught:
        executor.wake_up(tags)
    assert caught.value.executor_alive
    assert snapshot(machine, executor) == before
    executor.check_health()
    return caught.value


def test_a_restore_that_would_not_fit_is_refused_before_any_rank_is_touched(machine: SoftMachine) -> None:
    executor = make(machine)
    executor.sleep()
    other = machine.take_all_but(MIB, rank=1)
    error = assert_refused(machine, executor)
    assert states_of(executor) == {ProcessState.CHECKPOINTED}
    needed = CONTEXT_BYTES + STAGING_BYTES + WEIGHTS_BYTES + KV_CACHE_BYTES
    assert error.missing_bytes == {"SOFT-1": needed - MIB}
    assert error.holders == {"SOFT-1": ((other.target.pid, CAPACITY_BYTES - MIB),)}
    assert (error.rank, error.stage) == (1, "admit_wake")
    assert str(other.target.pid) in str(error)
    assert_refused(machine, executor)  # and again, as often as it takes
    other.kill()
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == [pattern(rank) for rank in range(RANKS)]
    executor.collective_rpc("step")


def test_every_device_that_is_short_is_named(machine: SoftMachine) -> None:
    executor = make(machine)
    executor.sleep()
    for rank in range(RANKS):
        machine.take_all_but(MIB, rank)
    error = assert_refused(machine, executor)
    assert error.missing_bytes is not None
    assert set(error.missing_bytes) == {"SOFT-0", "SOFT-1"}


def exact_bytes(machine: SoftMachine) -> int:
    """Bytes one rank holds on its device, awake and whole."""
    return machine.used_bytes()[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fits_exactly_is_admitted_and_one_byte_less_is_not(machine: SoftMachine, ranks: int) -> None:
    executor = make(machine, ranks)
    needed = exact_bytes(machine)
    executor.sleep()
    other = machine.take_all_but(needed - 1)
    error = assert_refused(machine, executor)
    assert error.missing_bytes == {"SOFT-0": 1}
    other.kill()
    machine.take_all_but(needed)
    executor.wake_up()
    executor.collective_rpc("step")
    assert machine.gpu().used_bytes() == CAPACITY_BYTES


def test_a_margin_is_asked_for_beyond_the_need(machine: SoftMachine) -> None:
    executor = make(machine, 1, wake_margin_bytes=2 * MIB)
    needed = exact_bytes(machine)
    executor.sleep()
    other = machine.take_all_but(needed + 2 * MIB - 1)
    assert assert_refused(machine, executor).missing_bytes == {"SOFT-0": 1}
    other.kill()
    machine.take_all_but(needed + 2 * MIB)
    executor.wake_up()


def test_a_partial_wake_needs_only_its_tags(machine: SoftMachine) -> None:
    executor = make(machine, 1)
    needed = exact_bytes(machine)
    executor.sleep()
    other = machine.take_all_but(needed - KV_CACHE_BYTES)
    assert assert_refused(machine, executor).missing_bytes == {"SOFT-0": KV_CACHE_BYTES}
    executor.wake_up(["weights"])
    # The other tag's turn: a refusal now leaves a partly woken executor as it is.
    assert assert_refused(machine, executor).missing_bytes == {"SOFT-0": KV_CACHE_BYTES}
    assert executor.collective_rpc("read_weights") == [pattern(0)]
    other.kill()
    executor.wake_up()
    executor.collective_rpc("step")


def test_a_kv_cache_that_was_released_before_the_sleep_is_counted(machine: SoftMachine) -> None:
    executor = make(machine, 1)
    needed = exact_bytes(machine)
    executor.sleep(level=0)
    executor.release_kv_cache_memory()
    executor.sleep()
    machine.take_all_but(needed - 1)
    assert assert_refused(machine, executor).missing_bytes == {"SOFT-0": 1}


def test_a_kv_cache_that_slept_through_a_second_cycle_is_counted(machine: SoftMachine) -> None:
    executor = make(machine, 1)
    needed = exact_bytes(machine)
    executor.sleep()
    executor.wake_up(["weights"])
    executor.sleep()
    machine.take_all_but(needed - 1)
    assert assert_refused(machine, executor).missing_bytes == {"SOFT-0": 1}


def test_shutdown_while_asleep_needs_no_memory(machine: SoftMachine) -> None:
    executor = make(machine)
    executor.sleep()
    others = [machine.take_all_but(0, rank) for rank in range(RANKS)]
    executor.shutdown()
    assert machine.processes() == []
    assert machine.used_bytes(RANKS) == [CAPACITY_BYTES] * RANKS
    for other in others:
        other.kill()


def test_two_executors_take_turns_on_one_device(machine: SoftMachine) -> None:
    large = {"weights_bytes": 18 * MIB}
    first = make(machine, 1, worker_kwargs=large)
    first.sleep()
    second = make(machine, 1, worker_kwargs=large)
    weights = [pattern(0, large["weights_bytes"])]
    for _ in range(2):
        assert second.collective_rpc("read_weights") == weights
        error = assert_refused(machine, first)
        assert error.holders is not None
        assert [pid for pid, _ in error.holders["SOFT-0"]] == [second.pids["worker 0"]]
        second.sleep()
        first.wake_up()
        assert first.collective_rpc("read_weights") == weights
        first.sleep()
        second.wake_up()


# ---------------------------------------------------------------------------------------------- other executors


def test_another_executors_wake_on_the_device_is_waited_for_and_then_refused(machine: SoftMachine) -> None:
    device = "SOFT-0"
    executor = machine.make(deadlines=Deadlines(driver_lock_s=0.1))
    executor.sleep()
    folder = machine.root / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{device}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InsufficientMemoryError, match=f"another executor has been waking on {device} for 0.1 s"):
            executor.wake_up()
        assert states_of(executor) == {ProcessState.CHECKPOINTED}
    executor.wake_up()
    # Held until the wake has ended, and no longer.
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path.unlink()

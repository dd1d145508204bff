"""Two engines share one device that has room for one: they take turns, and wake at once, and none is ever lost."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from checkpoint_executor import CUDACheckpointExecutor, FatalError, InsufficientMemoryError
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.messages import Send
from checkpoint_executor.softgpu import CONTEXT_BYTES
from tests.support.executor_harness import SoftMachine, states_of
from tests.support.executor_workers import KV_CACHE_BYTES, WEIGHTS_BYTES, pattern

ROUNDS = 50


def try_to_wake(executor: CUDACheckpointExecutor, go: threading.Barrier, outcome: dict[str, bool], name: str) -> None:
    go.wait(30)
    try:
        executor.wake_up()
    except InsufficientMemoryError:
        outcome[name] = False
    else:
        outcome[name] = True


def test_two_engines_that_wake_at_once_50_times_are_never_lost(machine: SoftMachine) -> None:
    # Room for one engine awake and the other asleep, and for half of another.
    one = CONTEXT_BYTES + WEIGHTS_BYTES + KV_CACHE_BYTES
    options: dict[str, Any] = {"soft_capacity_bytes": one + one // 2, "wake_margin_bytes": 0, "device_ids": ("SOFT-0",)}
    engines = {}
    for name in ("a", "b"):
        engines[name] = machine.make(**options)
        engines[name].sleep()
    draw = random.Random(6)
    for number in range(ROUNDS):
        outcome: dict[str, bool] = {}
        go = threading.Barrier(2)
        callers = [threading.Thread(target=try_to_wake, args=(e, go, outcome, n)) for n, e in engines.items()]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        assert sorted(outcome.values()) == [False, True], f"round {number}: {outcome}"
        winner = next(name for name, woke in outcome.items() if woke)
        loser = "b" if winner == "a" else "a"
        assert engines[winner].collective_rpc("read_weights") == [pattern(0)]
        # The refused one was not touched: it is asleep, and wakes when it is its turn.
        assert states_of(engines[loser]) == {ProcessState.CHECKPOINTED}
        engines[winner].sleep()
        if draw.random() < 0.5:
            engines[loser].wake_up()
            assert engines[loser].collective_rpc("read_weights") == [pattern(0)]
            engines[loser].sleep()
    for engine in engines.values():
        engine.check_health()


def test_without_admission_the_loser_is_lost(machine: SoftMachine) -> None:
    """What the test above would be worth if the room were never short: nothing. Here it is, and nobody asks."""
    options: dict[str, Any] = {
        "soft_capacity_bytes": 2 * (CONTEXT_BYTES + WEIGHTS_BYTES + KV_CACHE_BYTES),
        "wake_margin_bytes": 0,
    }
    executor = machine.make(**options)
    executor.sleep()
    machine.take_all_but(CONTEXT_BYTES)
    control = executor._control
    original = control._arguments

    def arguments(send: Send) -> dict[str, Any]:
        # A need that no device can fail to have: admission is asked, and says yes to everything.
        return {**original(send), **({"needed_bytes": (-(1 << 40),)} if send.stage == "admit_wake" else {})}

    control._arguments = arguments  # type: ignore[method-assign]
    with pytest.raises(FatalError) as caught:
        executor.wake_up()
    assert (caught.value.stage, caught.value.code_name) in (
        ("restore", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("wake_allocator", None),
    )

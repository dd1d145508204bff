"""The real engine at TP=2 in the socket-only configuration: the GPUs share nothing, and nothing is suspended."""

from __future__ import annotations

from typing import Any

from tests.support.vllm_harness import SOCKET, VllmMachine


def test_the_wake_is_bit_exact_over_sockets(machine: VllmMachine) -> None:
    engine = machine.start(2, environ=SOCKET, enable_nccl_comm_suspend=False)
    tokens = engine.tokens()
    assert len(set(tokens)) >= 20
    for tags in (None, ["weights"]):
        engine.llm.sleep(level=1)
        assert engine.used_bytes == [0, 0]
        assert engine.wake(tags) == (tags is None)
    assert engine.wake(["kv_cache"])
    assert engine.tokens() == tokens
    assert {stage["figures"][rank]["suspendable"] for stage in slept(machine) for rank in range(2)} == {0}


def slept(machine: VllmMachine) -> list[dict[str, Any]]:
    """The stage of each cycle in which the workers slept."""
    return [stage for cycle in machine.cycles() for stage in cycle["stages"] if stage["name"] == "worker_sleep"]

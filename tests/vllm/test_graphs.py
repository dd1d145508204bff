"""The real engine with its graphs' memory in the allocator, at TP=1 and at TP=2 (``sleep_mode_offload_cudagraph``)."""

from __future__ import annotations

import pytest
from vllm.config import ModelConfig

from tests.support.vllm_harness import VllmMachine

RANKS = (1, 2)

pytestmark = pytest.mark.skipif(
    not hasattr(ModelConfig, "sleep_mode_offload_cudagraph"), reason="this vLLM cannot offload graphs"
)


def test_offloaded_graphs_sleep_with_the_weights_and_replay_after_every_wake(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks, sleep_mode_offload_cudagraph=True)
    tokens, used, ledgers = engine.tokens(), engine.used_bytes, engine.rpc("ledger")
    assert len(set(tokens)) >= 20
    # Nothing of the graph is left for the driver.
    assert [ledger["graph_pools"] for ledger in ledgers] == engine.nothing
    for tags in (["weights", "kv_cache"], ["weights"], ["kv_cache"]):
        engine.llm.sleep(level=1)
        assert engine.used_bytes == engine.nothing
        backed_up = [figures["weights"] for figures in machine.cycles()[-1]["stages"][1]["figures"]]
        assert backed_up == [ledger["weights"] for ledger in ledgers]
        assert engine.wake(tags) == (len(tags) == 2)
        assert engine.wake()
        assert engine.used_bytes == used
        assert engine.tokens() == tokens


def test_graphs_that_are_not_offloaded_are_left_to_the_driver(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks)
    tokens, used = engine.tokens(), engine.used_bytes
    assert all(ledger["graph_pools"] > 0 for ledger in engine.rpc("ledger"))
    engine.llm.sleep(level=1)
    assert engine.used_bytes == engine.nothing
    assert engine.wake()
    assert engine.used_bytes == used
    assert engine.tokens() == tokens

"""The real engine at TP=2, in the configuration with suspended communicators and a peer-mapped workspace."""

from __future__ import annotations

import pytest

from tests.support.vllm_harness import Engine

RANKS = 2


def test_both_devices_are_empty_asleep_and_the_wake_is_bit_exact(engine: Engine) -> None:
    tokens, checksums, used = engine.tokens(), engine.llm.collective_rpc("compute_weight_checksums"), engine.used_bytes
    assert len(set(tokens)) >= 20
    for _ in range(3):
        engine.llm.sleep(level=1)
        assert engine.used_bytes == [0, 0]
        engine.llm.wake_up()
        assert engine.used_bytes == used
        assert engine.tokens() == tokens
    assert engine.llm.collective_rpc("compute_weight_checksums") == checksums


def test_every_rank_answers_each_stage_before_the_next_begins(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    for cycle in engine.machine.cycles():
        for stage in cycle["stages"]:
            assert len(stage["ranks"]) == 2, stage
    names = [[stage["name"] for stage in cycle["stages"]] for cycle in engine.machine.cycles()]
    assert names[0].index("confirm_suspended") < names[0].index("lock") < names[0].index("checkpoint")
    assert names[1].index("restore") < names[1].index("unlock") < names[1].index("worker_wake")


def test_the_workspace_hooks_run_around_the_driver_stages_on_every_rank(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    for events in engine.events():
        wanted = [["sleep", 1], "checkpoint_prepare", "checkpoint_restore", ["wake_up", None]]
        assert [event for event in events if event in wanted] == wanted


def test_a_partial_wake_resumes_the_communicators(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    assert not engine.wake(["weights"])
    assert len(engine.llm.collective_rpc("compute_weight_checksums")) == 2
    assert engine.wake(["kv_cache"])
    assert engine.tokens() == tokens


def test_a_method_that_raises_leaves_no_answer_for_the_next_call(engine: Engine) -> None:
    """vLLM reads no further than the first rank that failed, and would take the other's answer for the sleep's."""
    tokens = engine.tokens()
    for _ in range(2):
        with pytest.raises(Exception, match="Worker failed with error"):
            engine.rpc("no_such_method")
    assert engine.rpc("known_requests") == [[], []]
    engine.llm.sleep(level=1)
    assert engine.used_bytes == [0, 0]
    engine.llm.wake_up()
    assert engine.tokens() == tokens


def test_housekeeping_and_rejections_count_the_ranks(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.sleep(level=1)
    with pytest.raises(Exception, match="the workers are checkpointed"):
        engine.llm.collective_rpc("known_requests")
    engine.llm.wake_up()
    assert len(engine.rpc("known_requests")) == 2


def test_an_abort_while_asleep_reaches_every_rank_after_the_wake(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    engine.submit("queued")
    engine.engine.abort_request(["queued"])
    assert engine.is_sleeping
    engine.llm.wake_up()
    for events in engine.events():
        assert events[-1][0] == "empty batch"
        assert events.index(["wake_up", None]) < len(events) - 1
    assert engine.tokens() == tokens


def test_a_kept_request_is_recomputed_on_both_ranks(engine: Engine) -> None:
    expected = engine.tokens(count=60)
    engine.rpc("set_step_delay", 0.01)
    engine.submit("kept", count=60)
    for _ in range(5):
        engine.engine.step()
    engine.client.sleep(1, "keep")
    assert engine.used_bytes == [0, 0]
    engine.llm.wake_up()
    engine.rpc("set_step_delay", 0.0)
    assert engine.finish() == {"kept": expected}


def test_a_release_keeps_the_weights_on_both_ranks(engine: Engine) -> None:
    tokens, used = engine.tokens(), engine.used_bytes
    engine.llm.sleep(level=0, mode="keep")
    engine.llm.release_kv_cache_memory()
    assert all(0 < now < before for now, before in zip(engine.used_bytes, used, strict=True))
    engine.llm.wake_up(tags=["kv_cache"])
    assert engine.tokens() == tokens

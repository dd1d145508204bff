"""The real engine at TP=2: what there is only with several ranks. The rules for any number are in test_rules."""

from __future__ import annotations

import pytest

from tests.support.vllm_harness import Engine

RANKS = (2,)


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

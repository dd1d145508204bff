"""The real engine at TP=1 and at TP=2: the rules of sleeping and waking, each a test, on one engine for each number."""

from __future__ import annotations

import json

import pytest

from checkpoint_executor.coordinator import VLLM_STAGES
from tests.support.vllm_harness import PROMPT, Engine
from tests.support.vllm_waiting import wait_until

#: Every test runs with each; see conftest.
RANKS = (1, 2)

DOWN = [stage.name for stage in VLLM_STAGES.down]
UP = [stage.name for stage in VLLM_STAGES.up]
PARTIAL = [stage.name for stage in VLLM_STAGES.wake]


def stages(engine: Engine) -> list[list[str]]:
    """Of each logged operation, the stages in order."""
    return [[stage["name"] for stage in cycle["stages"]] for cycle in engine.machine.cycles()]


def test_sleep_leaves_the_device_empty_and_wake_is_bit_exact(engine: Engine) -> None:
    tokens, checksums, used = engine.tokens(), engine.llm.collective_rpc("compute_weight_checksums"), engine.used_bytes
    assert len(set(tokens)) >= 20
    for _ in range(3):
        engine.llm.sleep(level=1)
        assert engine.used_bytes == engine.nothing
        assert engine.is_sleeping
        assert engine.wake()
        assert engine.used_bytes == used
        assert engine.tokens() == tokens
    assert engine.llm.collective_rpc("compute_weight_checksums") == checksums
    assert stages(engine) == [DOWN, UP] * 3


def test_repeated_sleep_is_idempotent_and_reaches_no_worker(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.sleep(level=1)
    engine.llm.sleep(level=1)
    assert engine.used_bytes == engine.nothing
    engine.llm.wake_up()
    for events in engine.events():
        assert [event for event in events if event == ["sleep", 1]] == [["sleep", 1]]
    assert [cycle["performed"] for cycle in engine.machine.cycles()] == [True, False, False, True]


def test_housekeeping_of_a_pause_is_answered_for_a_checkpointed_worker(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.sleep(level=0)
    assert engine.client.reset_encoder_cache() is None
    assert engine.client.reset_mm_cache() is None
    assert engine.status.phase == "checkpointed"
    engine.llm.wake_up()
    for events in engine.events():
        asleep = events[events.index("checkpoint_prepare") + 1 : events.index("checkpoint_restore")]
        assert asleep == []


def test_level_0_is_a_pause_and_no_checkpoint(engine: Engine) -> None:
    used = engine.used_bytes
    engine.llm.sleep(level=0)
    assert engine.is_sleeping
    assert engine.used_bytes == used
    assert engine.status.phase == "awake"
    engine.submit("queued")
    assert engine.wake()
    assert engine.finish()["queued"] == engine.tokens()


def test_level_2_is_rejected_when_requested(engine: Engine) -> None:
    used = engine.used_bytes
    with pytest.raises(Exception, match=r"sleep\(level=2\) is not supported .* Nothing was touched"):
        engine.llm.sleep(level=2)
    assert engine.used_bytes == used
    assert engine.status.phase == "awake"
    # vLLM paused its scheduler before it asked.
    assert engine.is_sleeping
    engine.llm.wake_up()
    assert len(engine.tokens()) == 24
    for events in engine.events():
        assert ["sleep", 2] not in events


def test_the_first_partial_wake_restores_the_whole_process(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    assert not engine.wake(["weights"])
    assert engine.is_sleeping
    assert engine.status.phase == "awake"
    assert engine.status.sleeping == ("kv_cache",)
    # Weights can be updated now.
    assert len(engine.llm.collective_rpc("compute_weight_checksums")) == engine.ranks
    assert engine.wake(["kv_cache"])
    assert engine.tokens() == tokens
    assert stages(engine) == [DOWN, UP, PARTIAL]


def test_sleep_after_the_weights_woke_checkpoints_again(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    engine.llm.wake_up(tags=["weights"])
    engine.llm.sleep(level=1)
    assert engine.used_bytes == engine.nothing
    assert engine.status.phase == "checkpointed"
    engine.llm.wake_up()
    assert engine.tokens() == tokens


def test_sleep_is_a_no_op_while_weights_sleep(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    engine.llm.wake_up(tags=["kv_cache"])
    engine.llm.sleep(level=1)
    assert engine.status.phase == "awake"
    assert engine.status.sleeping == ("weights",)
    assert not engine.machine.cycles()[-1]["performed"]
    engine.llm.wake_up(tags=["weights"])
    assert engine.tokens() == tokens


def test_an_unknown_tag_raises_before_anything_is_touched(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    with pytest.raises(Exception, match=r"unknown tag\(s\) 'wieghts'.*Nothing was touched"):
        engine.llm.wake_up(tags=["wieghts"])
    assert engine.status.phase == "checkpointed"
    engine.llm.wake_up()


def test_a_duplicate_tag_counts_once_and_an_awake_tag_is_a_no_op(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    engine.llm.wake_up(tags=["kv_cache", "kv_cache"])
    assert engine.status.sleeping == ("weights",)
    engine.llm.wake_up(tags=["kv_cache"])
    assert engine.status.sleeping == ("weights",)
    assert "tag 'kv_cache' is already awake" in engine.machine.cycles()[-1]["warnings"]
    assert engine.wake(["weights", "weights"])


def test_wake_when_awake_is_a_no_op(engine: Engine) -> None:
    assert engine.wake()
    assert not engine.machine.cycles()[-1]["performed"]
    assert len(engine.tokens()) == 24


def test_rpcs_are_rejected_while_checkpointed_and_the_engine_is_unharmed(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    for method in ("compute_weight_checksums", "known_requests"):
        with pytest.raises(Exception, match=r"the workers are checkpointed; call wake_up\(\) first"):
            engine.llm.collective_rpc(method)
    engine.llm.wake_up()
    assert engine.tokens() == tokens


def test_a_request_queued_while_asleep_runs_after_the_wake(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    engine.submit("queued")
    engine.llm.wake_up()
    assert engine.finish() == {"queued": tokens}


def test_aborting_a_queued_request_while_asleep_is_harmless_and_replayed(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    engine.submit("queued")
    engine.engine.abort_request(["queued"])
    # The abort makes EngineCore run an empty batch; a second call proves that it lives.
    assert engine.is_sleeping
    assert engine.used_bytes == engine.nothing
    engine.llm.wake_up()
    for events in engine.events():
        # The batch came while checkpointed, and reached the worker after its memory.
        assert events.index(["wake_up", None]) < max(i for i, event in enumerate(events) if event[0] == "empty batch")
    assert engine.tokens() == tokens


def test_a_kept_request_aborted_while_asleep_is_freed_in_the_worker_after_the_wake(engine: Engine) -> None:
    engine.rpc("set_step_delay", 0.01)
    engine.submit("kept", count=60)
    for _ in range(5):
        engine.engine.step()
    assert all(any(name.startswith("kept") for name in known) for known in engine.rpc("known_requests"))
    engine.client.sleep(1, "keep")
    engine.engine.abort_request(["kept"])
    assert engine.is_sleeping
    engine.llm.wake_up()
    assert not any(name.startswith("kept") for known in engine.rpc("known_requests") for name in known)
    engine.rpc("set_step_delay", 0.0)
    assert len(engine.tokens()) == 24


def test_kept_requests_are_recomputed_after_the_wake(engine: Engine) -> None:
    expected = engine.tokens(count=60)
    engine.rpc("set_step_delay", 0.01)
    try:
        engine.submit("kept", count=60)
        for _ in range(5):
            engine.engine.step()
        engine.client.sleep(1, "keep")
        assert engine.used_bytes == engine.nothing
        engine.llm.wake_up()
        assert engine.finish() == {"kept": expected}
    finally:
        engine.rpc("set_step_delay", 0.0)


def test_release_drops_the_kv_cache_alone_and_is_no_checkpoint(engine: Engine) -> None:
    tokens, used = engine.tokens(), engine.used_bytes
    engine.llm.sleep(level=0, mode="keep")
    engine.llm.release_kv_cache_memory()
    assert engine.status.phase == "awake"
    assert engine.status.sleeping == ("kv_cache",)
    assert all(0 < now < before for now, before in zip(engine.used_bytes, used, strict=True))
    # RPCs go through: this is not a checkpoint.
    assert len(engine.llm.collective_rpc("compute_weight_checksums")) == engine.ranks
    assert engine.wake(["kv_cache"])
    assert engine.used_bytes == used
    assert engine.tokens() == tokens


def test_release_is_rejected_without_a_pause_asleep_partly_awake_and_twice(engine: Engine) -> None:
    with pytest.raises(Exception, match="requires a completed pause"):
        engine.llm.release_kv_cache_memory()
    engine.llm.sleep(level=1)
    with pytest.raises(Exception, match="requires all executor memory to be resident"):
        engine.llm.release_kv_cache_memory()
    engine.llm.wake_up(tags=["weights"])
    with pytest.raises(Exception, match="requires all executor memory to be resident"):
        engine.llm.release_kv_cache_memory()
    engine.llm.wake_up()
    engine.llm.sleep(level=0)
    engine.llm.release_kv_cache_memory()
    with pytest.raises(Exception, match="requires all executor memory to be resident"):
        engine.llm.release_kv_cache_memory()
    engine.llm.wake_up()


def test_sleep_after_a_release_runs_a_whole_cycle(engine: Engine) -> None:
    tokens = engine.tokens()
    engine.llm.sleep(level=0)
    engine.llm.release_kv_cache_memory()
    engine.llm.sleep(level=1)
    assert engine.used_bytes == engine.nothing
    assert engine.status.phase == "checkpointed"
    assert engine.wake()
    assert engine.tokens() == tokens


def test_wake_during_a_drain_is_answered_and_calls_the_sleep_off(engine: Engine) -> None:
    tokens = engine.tokens(count=60)
    engine.rpc("set_step_delay", 0.01)
    engine.submit("running", count=60)
    for _ in range(3):
        engine.engine.step()
    draining = engine.begin("sleep", 1, "wait")
    # The drain has begun once EngineCore says that it is paused.
    wait_until(lambda: engine.is_sleeping, "the scheduler is paused")
    assert engine.wake()
    assert engine.finish() == {"running": tokens}
    with pytest.raises(Exception, match=r"a wake_up\(\) or resume overtook it.*Nothing was put to sleep"):
        draining.result(30)
    assert all(engine.used_bytes)
    engine.rpc("set_step_delay", 0.0)
    assert engine.tokens(count=60) == tokens


def test_status_is_read_without_a_worker(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    status = engine.status
    assert (status.front_door, status.phase, status.pid) == ("vllm", "checkpointed", engine.core_pid)
    assert status.model == str(engine.machine.model)
    assert status.sleeping == ("kv_cache", "weights")
    assert status.last_report is not None
    assert status.last_report.operation == "sleep"
    assert status.last_report.device_bytes_after == tuple(engine.nothing)
    engine.llm.wake_up()
    assert engine.status.last_report is not None
    assert engine.status.last_report.operation == "wake"


def test_each_cycle_appends_one_json_line(engine: Engine) -> None:
    engine.llm.sleep(level=1)
    with pytest.raises(Exception, match="unknown tag"):
        engine.llm.wake_up(tags=["nothing"])
    engine.llm.wake_up()
    lines = engine.machine.log.read_text().splitlines()
    sleep, refused, wake = (json.loads(line) for line in lines)
    assert (sleep["operation"], wake["operation"]) == ("sleep", "wake")
    assert sleep["pid"] == engine.core_pid
    assert all(size_bytes > 0 for size_bytes in sleep["device_bytes_before"])
    assert sleep["device_bytes_after"] == engine.nothing
    assert (refused["error"], refused["executor_alive"]) == ("InvalidRequestError", True)


def test_the_wake_asks_for_what_it_needs(engine: Engine) -> None:
    """Admission: a process that took the room makes the wake a refusal, and the engine stays asleep and well."""
    tokens = engine.tokens()
    engine.llm.sleep(level=1)
    with engine.machine.room_taken(rank=engine.ranks - 1):
        with pytest.raises(Exception, match=r"lacks \d+ bytes .*Nothing was touched: free the memory"):
            engine.llm.wake_up()
        assert engine.status.phase == "checkpointed"
        assert engine.is_sleeping
    assert engine.wake()
    assert engine.tokens() == tokens


def test_prompts_of_several_blocks_come_out_the_same(engine: Engine) -> None:
    prompt = PROMPT * 5
    tokens = engine.tokens(prompt)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    assert engine.tokens(prompt) == tokens

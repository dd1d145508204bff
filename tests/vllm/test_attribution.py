"""Whose the bytes are at each step of a cycle of the real engine, at TP=1 and at TP=2."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_executor import recorded
from checkpoint_executor.softgpu import CONTEXT_BYTES, LOCAL_MEMORY_BYTES
from checkpoint_executor.vllm import workers
from tests.support.vllm_harness import Engine, VllmMachine

RANKS = (1, 2)

STEPS_DOWN = ["awake", "communicators_suspended", "workspaces_prepared", "checkpointed"]
STEPS_UP = ["restored", "workspaces_restored", "woken"]


@pytest.fixture
def attributed(machine: VllmMachine, ranks: int) -> Engine:
    return machine.start(ranks, environ={"CHECKPOINT_EXECUTOR_ATTRIBUTION": "1"})


def held(cycle: dict[str, Any], step: str, rank: int) -> dict[str, int]:
    """What is there at a step, by kind."""
    (found,) = [each for each in cycle["memory"] if each["step"] == step]
    return {kind: size for kind, size in found["ranks"][rank]["kinds"].items() if size}


def test_every_byte_has_an_owner_at_every_step(attributed: Engine) -> None:
    tokens, ledgers = attributed.tokens(), attributed.rpc("ledger")
    attributed.llm.sleep(level=1)
    attributed.llm.wake_up()
    assert attributed.tokens() == tokens
    slept, woken = attributed.machine.cycles()
    assert [step["step"] for step in slept["memory"]] == STEPS_DOWN
    assert [step["step"] for step in woken["memory"]] == STEPS_UP
    for cycle in (slept, woken):
        for step in cycle["memory"]:
            for memory in step["ranks"]:
                assert sum(memory["kinds"].values()) == memory["used_bytes"]
                assert memory["kinds"]["remainder"] == 0, (step["step"], memory)
    for rank, ledger in enumerate(ledgers):
        whole = {kind: size for kind, size in ledger.items() if size and kind != "backup_arena"}
        context = {kind: whole[kind] for kind in ("context", "graph_pools")}
        assert held(slept, "awake", rank) == held(woken, "woken", rank) == whole
        assert whole["local_memory"] == LOCAL_MEMORY_BYTES
        assert whole["context"] == CONTEXT_BYTES - LOCAL_MEMORY_BYTES
        suspended = held(slept, "communicators_suspended", rank)
        assert suspended == {
            kind: size for kind, size in whole.items() if kind not in ("weights", "kv_cache", "nccl_suspendable")
        }
        assert held(slept, "workspaces_prepared", rank) == held(woken, "restored", rank) == context
        assert held(slept, "checkpointed", rank) == {}
        assert held(woken, "workspaces_restored", rank) == suspended


def test_a_ledger_that_cannot_be_read_is_all_remainder_and_fails_nothing(
    machine: VllmMachine, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.WorkerSide, "account", lambda side: {})  # (forked workers have it too)
    engine = machine.start(ranks, environ={"CHECKPOINT_EXECUTOR_ATTRIBUTION": "1"})
    used = engine.used_bytes
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    slept, _ = machine.cycles()
    assert [held(slept, "awake", rank) for rank in range(ranks)] == [{"remainder": size} for size in used]


def test_the_log_is_read_as_an_attribution(attributed: Engine) -> None:
    for _ in range(2):
        attributed.llm.sleep(level=1)
        attributed.llm.wake_up(tags=["weights"])
        attributed.llm.wake_up(tags=["kv_cache"])
    run = recorded.read("cycles.jsonl", attributed.machine.log.read_bytes())
    assert [cycle.number for cycle in run.attribution] == [1, 2]
    for cycle in run.attribution:
        assert [step.step for step in cycle.steps] == [*STEPS_DOWN, *STEPS_UP, "woken"]
        assert all(memory.missing_bytes == 0 for step in cycle.steps for memory in step.ranks)


def test_without_it_nothing_is_read_and_nobody_is_asked(machine: VllmMachine, ranks: int) -> None:
    engine = machine.start(ranks)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    assert [cycle["memory"] for cycle in machine.cycles()] == [[], []]

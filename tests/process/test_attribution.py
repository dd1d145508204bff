"""On the software device every byte has an owner, at every step of a cycle, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import CycleReport
from checkpoint_executor.attribution import HOST_KINDS, KINDS, STEPS
from checkpoint_executor.faults import Fault
from checkpoint_executor.softgpu import CONTEXT_BYTES, LOCAL_MEMORY_BYTES, SoftGpu, device_name
from checkpoint_executor.workers import Worker, WorkerContext
from tests.support.executor_harness import CAPACITY_BYTES, REPOSITORY, SoftMachine, inject_helper, run_script

RANKS = 2
WEIGHTS_BYTES = 3 << 20
KV_BYTES = 5 << 20
WORKSPACE_BYTES = 1 << 16
STAGING_BYTES = 1 << 20


class Ballast(Worker):
    """A known number of bytes of each kind that needs no torch."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.weights = context.allocator.allocate(WEIGHTS_BYTES, "weights")
        self.cache = context.allocator.allocate(KV_BYTES, "kv_cache")
        context.runtime.shared_workspace(WORKSPACE_BYTES)


def check_adds_up(report: CycleReport) -> None:
    for step in report.memory:
        assert [memory.rank for memory in step.ranks] == list(range(RANKS))
        for memory in step.ranks:
            assert sum(memory.kinds.values()) == memory.used_bytes, step.step
            assert memory.kinds["remainder"] == 0, step.step
            assert memory.empty_bytes == 0


def held(report: CycleReport, step: str, rank: int = 0) -> dict[str, int]:
    """What is there at a step, by kind."""
    (found,) = [each for each in report.memory if each.step == step]
    return {kind: size for kind, size in found.ranks[rank].kinds.items() if size}


def test_every_byte_has_an_owner_at_every_step(machine: SoftMachine) -> None:
    executor = machine.make(Ballast, RANKS, attribution=True)
    slept = executor.sleep()
    woken = executor.wake_up()
    assert tuple(step.step for step in (*slept.memory, *woken.memory)) == STEPS
    check_adds_up(slept)
    check_adds_up(woken)
    whole = {
        "weights": WEIGHTS_BYTES,
        "kv_cache": KV_BYTES,
        "nccl_suspendable": STAGING_BYTES,
        "workspaces": WORKSPACE_BYTES,
        "local_memory": LOCAL_MEMORY_BYTES,
        "context": CONTEXT_BYTES - LOCAL_MEMORY_BYTES,
    }
    context = {kind: whole[kind] for kind in ("local_memory", "context")}
    shared = {kind: whole[kind] for kind in ("nccl_suspendable", "workspaces", *context)}
    for rank in range(RANKS):
        assert held(slept, "awake", rank) == whole
        assert held(slept, "allocator_asleep", rank) == shared
        assert held(slept, "communicators_suspended", rank) == {"workspaces": WORKSPACE_BYTES, **context}
        # All that is left for the driver to copy.
        assert held(slept, "workspaces_prepared", rank) == {"context": whole["context"]}
        assert held(slept, "checkpointed", rank) == {}
        assert held(woken, "restored", rank) == {"context": whole["context"]}
        assert held(woken, "workspaces_restored", rank) == {"workspaces": WORKSPACE_BYTES, **context}
        assert held(woken, "communicators_resumed", rank) == shared
        assert held(woken, "woken", rank) == whole
    host = slept.memory[-1].ranks[0].host
    assert host["backup_arena"] == WEIGHTS_BYTES
    assert host["rss"] > 0


def test_local_memory_is_left_to_the_driver_where_the_user_wants_that(machine: SoftMachine) -> None:
    executor = machine.make(Ballast, RANKS, attribution=True, release_local_memory=False)
    for report, step in ((executor.sleep(), "workspaces_prepared"), (executor.wake_up(), "restored")):
        check_adds_up(report)
        assert held(report, step)["local_memory"] == LOCAL_MEMORY_BYTES


def test_a_wake_by_tag_and_a_release_add_up_too(machine: SoftMachine) -> None:
    executor = machine.make(Ballast, RANKS, attribution=True)
    executor.sleep()
    weights = executor.wake_up(["weights"])
    assert "kv_cache" not in held(weights, "woken")
    cache = executor.wake_up(["kv_cache"])
    assert [step.step for step in cache.memory] == ["woken"]
    executor.sleep(level=0)
    released = executor.release_kv_cache_memory()
    assert [step.step for step in released.memory] == ["awake", "released"]
    assert held(released, "released") == {
        kind: size for kind, size in held(cache, "woken").items() if kind != "kv_cache"
    }
    for report in (weights, cache, released):
        check_adds_up(report)


def test_another_process_on_the_device_is_remainder_or_was_there_before(machine: SoftMachine) -> None:
    before = 2 << 20
    SoftGpu(machine.root, device_name(0), CAPACITY_BYTES)  # there, with somebody on it, when the executor comes
    first = machine.take(before)
    executor = machine.make(Ballast, attribution=True)
    second = machine.take(1 << 21)
    (awake, *_) = executor.sleep().memory
    assert awake.ranks[0].empty_bytes == before
    assert awake.ranks[0].kinds["remainder"] == 1 << 21
    del first, second


def test_without_the_option_nothing_is_read(machine: SoftMachine) -> None:
    executor = machine.make(Ballast)
    report = executor.sleep()
    assert report.memory == ()
    assert [stage.name for stage in report.stages if "measure" in stage.name] == ["measure_awake", "measure_asleep"]
    assert "account" not in [stage.name for stage in report.stages]


def test_a_reading_that_fails_costs_the_cycle_nothing(machine: SoftMachine) -> None:
    faults = (inject_helper(Fault.EXCEPTION, 0, "measure_allocator_asleep"),)
    executor = machine.make(Ballast, RANKS, attribution=True, faults=faults)
    report = executor.sleep()
    assert report.performed
    (step,) = [step for step in report.memory if step.step == "allocator_asleep"]
    assert [memory.rank for memory in step.ranks] == [1]
    assert executor.wake_up().performed


def test_the_script_accounts_for_the_whole_transformer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "attribution.json"
    arguments = ("--device", "soft", "--tensor-parallel-size", "2", "--cycles", "2", "--out", str(out))
    status, output, errors = run_script(REPOSITORY / "scripts" / "attribution.py", *arguments, timeout_s=100)
    assert status == 0, f"{output}\n{errors}"
    assert "software device, rank 1" in output
    result: dict[str, Any] = json.loads(out.read_text())
    assert (result["kind"], result["device"], result["tensor_parallel_size"]) == ("attribution", "soft", 2)
    assert result["empty_bytes"] == [0, 0]
    assert [cycle["number"] for cycle in result["cycles"]] == [0, 1]
    for cycle in result["cycles"]:
        assert tuple(step["step"] for step in cycle["steps"]) == STEPS
        for rank in (rank for step in cycle["steps"] for rank in step["ranks"]):
            assert tuple(rank["kinds"]) == KINDS
            assert tuple(rank["host"]) == HOST_KINDS
            assert rank["kinds"]["remainder"] == 0
            assert sum(rank["kinds"].values()) == rank["device_used_bytes"]
        first = cycle["steps"][0]["ranks"][0]["kinds"]
        assert min(first[kind] for kind in ("weights", "kv_cache", "graph_pools", "nccl_suspendable", "context")) > 0
        last = cycle["steps"][-1]["ranks"][0]["kinds"]
        assert last == first

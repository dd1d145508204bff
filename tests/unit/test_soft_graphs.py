"""Soft graphs: a replay equals eager execution bit for bit, at the same addresses, whatever slept in between."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkpoint_executor.softgpu import CONTEXT_BYTES, LOCAL_MEMORY_BYTES
from checkpoint_executor.workers.soft_graphs import SoftGraph
from checkpoint_executor.workers.soft_runtime import SoftRuntime
from checkpoint_executor.workers.soft_tensors import same_bits
from tests.support.ranks_device import own_driver, single_runtime

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[SoftRuntime]:
    with single_runtime(tmp_path) as opened:
        yield opened


def held_bytes(runtime: SoftRuntime) -> int:
    return runtime._process.resident_bytes


class Work:
    """A function with many kinds of operations over a weight, a cache that it writes to, and an input."""

    def __init__(self, runtime: SoftRuntime) -> None:
        allocator = runtime.allocator
        self.weight = allocator.empty((8, 8), torch.float32).normal_()
        self.cache = allocator.empty((4, 8), torch.float32, "kv_cache").zero_()
        self.x = allocator.empty((4, 8), torch.float32, "kv_cache").normal_()

    def __call__(self) -> Tensors:
        h = torch.nn.functional.silu(self.x @ self.weight) + torch.arange(8)
        self.cache.index_copy_(0, torch.ones(1, dtype=torch.int64), h[:1])
        mean = h.pow(2).mean(-1, keepdim=True)
        values, indices = torch.topk(h.softmax(-1), 3)
        joined = torch.cat([values, mean], dim=-1).transpose(0, 1).reshape(4, 4)
        low = torch.where(h > 0, h, 0.0).to(torch.bfloat16)
        total = low.float().sum(-1)
        scratch = torch.zeros(4, 8)
        scratch.copy_(h)
        scratch.mul_(2)[0].add_(1)
        parts = torch.unbind(torch.linalg.qr(self.weight)[0])
        return h, values, indices, joined, low, total, scratch, parts[0], self.cache.clone(), torch.nan_to_num(h / 0)

    def fresh_input(self, seed: int) -> None:
        self.x.normal_(generator=torch.Generator().manual_seed(seed))

    def equals_eager(self, graph: SoftGraph[Tensors], seed: int) -> bool:
        self.fresh_input(seed)
        expected = self()
        self.cache.zero_()
        found = graph.replay()
        return all(same_bits(e, f) and e.stride() == f.stride() for e, f in zip(expected, found, strict=True))


def test_a_replay_equals_eager_at_the_same_addresses_and_allocates_nothing(runtime: SoftRuntime) -> None:
    work = Work(runtime)
    tags = runtime.allocator.tag_bytes()
    graph = runtime.capture(work)
    assert runtime.allocator.tag_bytes() == tags, "a graph's results must be in no tag"
    assert graph.tags == {"weights", "kv_cache"}
    assert len(graph) > 15
    held, addresses = held_bytes(runtime), [tensor.data_ptr() for tensor in graph.output]
    for seed in range(3):
        assert work.equals_eager(graph, seed)
    assert graph.replay() is graph.output
    assert held_bytes(runtime) == held
    assert [tensor.data_ptr() for tensor in graph.output] == addresses


def test_a_capture_under_inference_mode_replays_outside_it(runtime: SoftRuntime) -> None:
    work = Work(runtime)
    with torch.inference_mode():
        graph = runtime.capture(work)
        assert work.equals_eager(graph, 0)
    assert work.equals_eager(graph, 1)


def test_a_graph_survives_allocator_sleep_and_the_drivers_checkpoint(runtime: SoftRuntime) -> None:
    work = Work(runtime)
    graph = runtime.capture(work)
    addresses = [tensor.data_ptr() for tensor in graph.output]
    before = [tensor.clone() for tensor in graph.replay()]
    driver, held = own_driver(), held_bytes(runtime)
    for seed in range(2):
        runtime.allocator.sleep()
        assert held_bytes(runtime) == CONTEXT_BYTES + graph.pool_bytes, "no allocator sleep reaches a graph's pool"
        driver.lock(1000)
        driver.checkpoint()
        assert held_bytes(runtime) == 0, "the driver's checkpoint does"
        driver.restore()
        driver.unlock()
        assert all(same_bits(e, f) for e, f in zip(before, graph.output, strict=True))
        runtime.allocator.wake(["weights", "kv_cache"])
        assert held_bytes(runtime) == held
        work.cache.zero_()
        assert work.equals_eager(graph, seed)
        before = [tensor.clone() for tensor in graph.output]
    assert [tensor.data_ptr() for tensor in graph.output] == addresses


def test_local_memory_is_no_load_of_the_checkpoint_and_no_graph_runs_without_it(runtime: SoftRuntime) -> None:
    work = Work(runtime)
    graph = runtime.capture(work)
    before = [tensor.clone() for tensor in graph.replay()]
    held = held_bytes(runtime)
    assert runtime.release_local_memory() == LOCAL_MEMORY_BYTES
    assert runtime.release_local_memory() == 0
    assert held_bytes(runtime) == held - LOCAL_MEMORY_BYTES
    with pytest.raises(RuntimeError, match="local memory was given back"):
        graph.replay()
    driver = own_driver()
    driver.lock(1000)
    driver.checkpoint()
    assert held_bytes(runtime) == 0
    driver.restore()
    driver.unlock()
    assert held_bytes(runtime) == held - LOCAL_MEMORY_BYTES
    with pytest.raises(RuntimeError, match="local memory was given back"):
        graph.replay()
    assert all(same_bits(e, f) for e, f in zip(before, graph.output, strict=True))
    for _ in range(2):
        runtime.restore_local_memory()
        assert held_bytes(runtime) == held
    assert work.equals_eager(graph, 0)


def test_a_replay_over_sleeping_memory_is_refused_and_computes_nothing(runtime: SoftRuntime) -> None:
    work = Work(runtime)
    graph = runtime.capture(work)
    before = [tensor.clone() for tensor in graph.replay()]
    runtime.allocator.sleep()
    with pytest.raises(RuntimeError, match=r"weights, kv_cache sleeps and cannot be used by a graph; wake_up"):
        graph.replay()
    runtime.allocator.wake(["weights"])
    with pytest.raises(RuntimeError, match="kv_cache sleeps"):
        graph.replay()
    assert all(same_bits(e, f) for e, f in zip(before, graph.output, strict=True))
    weights_only = runtime.capture(lambda: work.weight * 2)
    assert same_bits(weights_only.replay(), work.weight * 2)


def test_a_replay_waits_while_the_driver_holds_the_process(runtime: SoftRuntime) -> None:
    work = Work(runtime)
    graph = runtime.capture(work)
    driver, done = own_driver(), threading.Event()

    def replay() -> None:
        graph.replay()
        done.set()

    driver.lock(1000)
    driver.checkpoint()
    thread = threading.Thread(target=replay, daemon=True)
    thread.start()
    assert not done.wait(0.05)
    driver.restore()
    assert not done.wait(0.05)
    driver.unlock()
    assert done.wait(10)
    thread.join(10)
    assert work.equals_eager(graph, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.ones(1).item(),
        lambda: torch.tensor([1.0]) + 1,
        lambda: torch.ones(3).nonzero(),
        lambda: bool(torch.ones(1) > 0),
    ],
    ids=["item", "host constant", "dynamic shape", "branch on data"],
)
def test_what_a_graph_cannot_hold_is_refused(runtime: SoftRuntime, function: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="cannot be captured"):
        runtime.capture(function)
    assert len(runtime.capture(lambda: torch.ones(2) + 1)) == 2, "the next capture must work"


def test_captures_do_not_nest(runtime: SoftRuntime) -> None:
    calls = []

    def outer() -> None:
        calls.append(1)
        if len(calls) == 2:  # the recorded run
            runtime.capture(lambda: torch.ones(1))

    with pytest.raises(RuntimeError, match="a graph is being captured"):
        runtime.capture(outer)


def test_a_dropped_graph_gives_its_memory_back(runtime: SoftRuntime) -> None:
    held = held_bytes(runtime)
    graph = runtime.capture(lambda: torch.ones(100) + 1)
    output = graph.output
    del graph
    gc.collect()
    runtime.allocator.drain_frees()
    assert held_bytes(runtime) > held, "its output is still looked at"
    del output
    gc.collect()
    runtime.allocator.drain_frees()
    assert held_bytes(runtime) == held


def test_a_random_operation_draws_once_for_each_replay(runtime: SoftRuntime) -> None:
    graph = runtime.capture(lambda: torch.rand(4))
    torch.manual_seed(7)
    expected = [torch.rand(4) for _ in range(2)]
    torch.manual_seed(7)
    assert [graph.replay().tolist() for _ in range(2)] == [tensor.tolist() for tensor in expected]

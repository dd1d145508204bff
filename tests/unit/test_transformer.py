"""The example model on one rank: varied greedy decoding that a cycle does not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_executor.workers.soft_runtime import SoftRuntime
from checkpoint_executor.workers.transformer import TransformerConfig, TransformerWorker
from checkpoint_executor.workers.worker import WorkerContext, execution_methods
from tests.support.ranks_device import own_driver, single_runtime

PROMPTS = [[1, 2, 3], [40, 50, 60, 70], [8], [90, 10]]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[SoftRuntime]:
    with single_runtime(tmp_path, capacity_bytes=256 << 20) as opened:
        yield opened


def build(runtime: SoftRuntime, config: TransformerConfig | None = None) -> TransformerWorker:
    return TransformerWorker(WorkerContext(0, 1, runtime), config)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_decoding_varies(runtime: SoftRuntime, seed: int, dtype: str) -> None:
    worker = build(runtime, TransformerConfig(seed=seed, dtype=dtype))
    result = worker.decode(PROMPTS, 32)
    assert [len(answer) for answer in result["tokens"]] == [32] * 4
    assert result["distinct_tokens"] >= 20
    assert min(len(set(answer)) for answer in result["tokens"]) >= 15
    assert worker.decode(PROMPTS, 32) == result


def test_a_sequence_does_not_depend_on_its_neighbours(runtime: SoftRuntime) -> None:
    worker = build(runtime)
    together = worker.decode(PROMPTS * 3, 12)["tokens"]  # 12 prompts: a batch of 8 and one of 4
    assert together == [worker.decode([prompt], 12)["tokens"][0] for prompt in PROMPTS] * 3
    assert worker.decode(PROMPTS[:3], 12)["tokens"] == together[:3]  # three sequences in the graph for four


def test_a_cycle_changes_no_token_no_bit_and_no_address(runtime: SoftRuntime) -> None:
    worker = build(runtime)
    before, addresses, checksums = worker.decode(PROMPTS, 16), worker.addresses(), worker.weight_checksums()
    memory = worker.memory()
    driver = own_driver()
    for _ in range(2):
        runtime.allocator.sleep()
        driver.lock(1000)
        driver.checkpoint()
        driver.restore()
        driver.unlock()
        runtime.allocator.wake(["weights", "kv_cache"])
        assert worker.weight_checksums() == checksums
        assert worker.decode(PROMPTS, 16) == before
        assert worker.addresses() == addresses
        assert worker.memory() == memory


def test_weights_can_be_updated_while_only_they_are_awake(runtime: SoftRuntime) -> None:
    worker = build(runtime)
    first, checksums = worker.decode(PROMPTS, 8), worker.weight_checksums()
    runtime.allocator.sleep()
    runtime.allocator.wake(["weights"])
    worker.load_weights(seed=5)
    assert worker.weight_checksums() != checksums
    with pytest.raises(RuntimeError, match="kv_cache sleeps"):
        worker._graphs[1].replay()
    runtime.allocator.wake(["kv_cache"])
    assert worker.decode(PROMPTS, 8) != first
    worker.load_weights(seed=0)
    assert worker.weight_checksums() == checksums
    assert worker.decode(PROMPTS, 8) == first
    worker.scale_weights(1.5)
    assert worker.decode(PROMPTS, 8)["logits_sha256"] != first["logits_sha256"]


def test_everything_that_the_graphs_read_has_a_tag(runtime: SoftRuntime) -> None:
    worker = build(runtime)
    addresses = worker.addresses()
    tags = {name: runtime.allocator.tag_at(address) for name, address in addresses.items()}
    assert {tags[name] for name in tags if name.startswith("weights.")} == {"weights"}
    assert {tags["kv_cache"], tags["input.tokens"], tags["input.positions"]} == {"kv_cache"}
    # The graphs' own memory has none: only the driver's checkpoint frees it.
    assert {tags[name] for name in tags if name.startswith("graph")} == {None}


def test_bad_requests_say_what_is_wrong(runtime: SoftRuntime) -> None:
    worker = build(runtime)
    bad: list[tuple[list[list[int]], int, str]] = [
        ([[]], 4, "must hold tokens below 512"),
        ([[512]], 4, "must hold tokens below 512"),
        ([[1]], 0, "max_new_tokens must be positive"),
        ([[1] * 100], 29, "more than max_seq_len=128"),
    ]
    for prompts, count, message in bad:
        with pytest.raises(ValueError, match=message):
            worker.decode(prompts, count)
    with pytest.raises(ValueError, match="heads=8, kv_heads=4, intermediate=256, vocab=512 cannot be divided among 3"):
        TransformerWorker(WorkerContext(0, 3, runtime))
    with pytest.raises(ValueError, match="not a floating type"):
        TransformerWorker(WorkerContext(0, 1, runtime), dtype="int32")
    assert execution_methods(TransformerWorker) == ("decode",)

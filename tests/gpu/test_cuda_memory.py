"""The sleeping allocator, the hash and the torch pool on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from tests.support import cuda_rank_scenarios as scenarios
from tests.support.cuda_rank_scenarios import GIB, MIB
from tests.support.cuda_ranks import CudaRankGroup

pytestmark = pytest.mark.gpu

ALL = [WEIGHTS, KV_CACHE]
#: Elements of bfloat16: less than a page, odd, more than one piece of a mapping; the last two of equal size.
SIZES = [1000, 3 * MIB + 1, 200 * MIB, 8 * MIB, 8 * MIB]


@pytest.fixture
def opened(single: CudaRankGroup, gpus: list[str], tmp_path: Path) -> CudaRankGroup:
    single.one(scenarios.open_runtime, tmp_path, gpus[:1])
    return single


def test_a_cycle_with_the_driver_keeps_bytes_and_addresses_and_leaves_next_to_nothing(
    single: CudaRankGroup, gpus: list[str], tmp_path: Path
) -> None:
    empty = single.used_bytes()[0]
    assert single.one(scenarios.open_runtime, tmp_path, gpus[:1]) == gpus[0]
    addresses = single.one(scenarios.make_tensors, SIZES)
    digests = single.one(scenarios.weight_digests)
    for number in range(3):
        figures = single.one(scenarios.sleep)
        assert figures[WEIGHTS] == 2 * sum(SIZES)
        assert figures["copied"] == (figures[WEIGHTS] if number == 0 else 0)
        single.checkpoint()
        assert single.used_bytes()[0] <= empty + 8 * MIB
        single.restore()
        single.one(scenarios.wake, ALL)
        assert single.one(scenarios.addresses) == addresses
        assert single.one(scenarios.weight_digests) == digests


def test_sleep_gives_the_memory_to_others_and_tag_bytes_says_how_much(opened: CudaRankGroup) -> None:
    opened.one(scenarios.make_tensors, SIZES)
    before = opened.one(scenarios.free_device_bytes)
    opened.one(scenarios.sleep)
    gained = opened.one(scenarios.free_device_bytes) - before
    assert gained >= 2 * sum(SIZES)
    opened.one(scenarios.wake, ALL)
    assert opened.one(scenarios.free_device_bytes) >= before - 4 * MIB


def test_weights_updated_after_a_partial_wake_come_back_updated(opened: CudaRankGroup) -> None:
    opened.one(scenarios.make_tensors, SIZES)
    opened.one(scenarios.sleep)
    opened.one(scenarios.wake, [WEIGHTS])
    assert opened.one(scenarios.sleeping) == [KV_CACHE]
    updated = opened.one(scenarios.update_weight, 2)
    opened.one(scenarios.wake, [KV_CACHE])
    digests = opened.one(scenarios.weight_digests)
    assert opened.one(scenarios.sleep)["copied"] == 2 * SIZES[2]
    opened.one(scenarios.wake, ALL)
    assert opened.one(scenarios.weight_digests) == digests
    assert digests[2] == updated


def test_two_swapped_tensors_of_equal_shape_come_back_swapped(opened: CudaRankGroup) -> None:
    opened.one(scenarios.make_tensors, SIZES)
    opened.one(scenarios.sleep)
    opened.one(scenarios.wake, ALL)
    *others, fourth, fifth = opened.one(scenarios.weight_digests)
    opened.one(scenarios.swap_weights, 3, 4)
    assert opened.one(scenarios.sleep)["copied"] == 2 * (SIZES[3] + SIZES[4])
    opened.one(scenarios.wake, ALL)
    assert opened.one(scenarios.weight_digests) == [*others, fifth, fourth]


@pytest.mark.parametrize(
    ("index", "offset"), [(0, 0), (0, 1999), (1, 1024), (1, 2 * SIZES[1] - 1), (2, 2 * SIZES[2] - 1)]
)
def test_one_flipped_byte_comes_back(opened: CudaRankGroup, index: int, offset: int) -> None:
    opened.one(scenarios.make_tensors, SIZES)
    opened.one(scenarios.sleep)
    opened.one(scenarios.wake, ALL)
    opened.one(scenarios.flip_byte, index, offset)
    digests = opened.one(scenarios.weight_digests)
    assert opened.one(scenarios.sleep)["copied"] == 2 * SIZES[index]
    opened.one(scenarios.wake, ALL)
    assert opened.one(scenarios.weight_digests) == digests


def test_resized_weights_are_copied_and_the_backup_laid_anew(opened: CudaRankGroup) -> None:
    opened.one(scenarios.make_tensors, SIZES)
    opened.one(scenarios.sleep)
    opened.one(scenarios.wake, ALL)
    opened.one(scenarios.replace_weight, 1, 20 * MIB)
    digests = opened.one(scenarios.weight_digests)
    figures = opened.one(scenarios.sleep)
    assert figures["copied"] == figures[WEIGHTS] == 2 * (sum(SIZES) - SIZES[1] + 20 * MIB)
    opened.one(scenarios.wake, ALL)
    assert opened.one(scenarios.weight_digests) == digests
    assert opened.one(scenarios.sleep)["copied"] == 0


def test_a_tensor_that_ends_gives_its_memory_back(opened: CudaRankGroup) -> None:
    opened.one(scenarios.make_tensors, SIZES)
    assert opened.one(scenarios.drop_weight, 2)[WEIGHTS] < 2 * (sum(SIZES) - SIZES[2]) + 10 * MIB


def test_a_backup_that_is_not_retained_is_given_back(single: CudaRankGroup, gpus: list[str], tmp_path: Path) -> None:
    single.one(scenarios.open_runtime, tmp_path, gpus[:1], "suspend", False)
    single.one(scenarios.make_tensors, SIZES)
    digests = single.one(scenarios.weight_digests)
    for _ in range(2):
        assert single.one(scenarios.sleep)["copied"] == 2 * sum(SIZES)
        assert single.one(scenarios.arena_bytes) >= 2 * sum(SIZES)
        single.one(scenarios.wake, ALL)
        assert single.one(scenarios.arena_bytes) == 0
        assert single.one(scenarios.weight_digests) == digests


def test_a_module_from_the_meta_device_gets_memory(opened: CudaRankGroup) -> None:
    found = opened.one(scenarios.materialize_model)
    assert found["shared"]
    assert found["table"] == list(range(7))
    assert found["devices"] == ["cuda:0"]
    assert found["leaves"]
    assert found["finite"]
    assert found["bytes"] == 2 * MIB  # its tensors lie together


# ---------------------------------------------------------------------------------------------- the hash


def test_the_kernel_computes_the_reference(opened: CudaRankGroup) -> None:
    sizes = [1, 15, 16, 17, 1023, 1024, 1025, 4096, 100_003, 5 * MIB, 64 * MIB + 5]
    assert opened.one(scenarios.hash_against_reference, sizes) == []


def test_the_hash_runs_at_memory_speed(opened: CudaRankGroup) -> None:
    speed = opened.one(scenarios.hash_bandwidth, 8 * GIB)
    print(f"hash: {speed / 1e12:.2f} TB/s")
    assert speed > 1e12  # a tenth of the time of the fastest copy, however the clocks are


def test_sleep_and_wake_copy_at_the_speed_of_plain_pinned_copies(opened: CudaRankGroup) -> None:
    speeds = opened.one(scenarios.copy_bandwidth, 8 * GIB, timeout_s=110)
    for name, value in speeds.items():
        print(f"{name}: {value:.2f} s" if name.endswith("_s") else f"{name}: {value / 1e9:.1f} GB/s")
    assert speeds["sleep"] > 0.85 * speeds["plain d2h"]
    assert speeds["wake"] > 0.85 * speeds["plain h2d"]


# ---------------------------------------------------------------------------------------------- the torch pool


def test_a_model_built_inside_a_pool_sleeps_and_wakes_with_it(opened: CudaRankGroup) -> None:
    landed = opened.one(scenarios.build_in_pool)
    # The parameters are in, with some of torch's rounding; the scratch that died inside and what was made outside are
    # not.
    assert 64 * MIB <= landed[WEIGHTS] < 110 * MIB
    assert 8 * MIB <= landed[KV_CACHE] <= 20 * MIB
    expected = opened.one(scenarios.expected_output)
    digests = opened.one(scenarios.weight_digests)
    for number in range(3):
        figures = opened.one(scenarios.sleep)
        assert (figures["copied"] > 0) is (number == 0)
        opened.checkpoint()
        opened.restore()
        opened.one(scenarios.wake, ALL)
        assert opened.one(scenarios.weight_digests) == digests
        assert opened.one(scenarios.run_model) == expected
    assert opened.one(scenarios.drop_model) == {WEIGHTS: 0, KV_CACHE: 0}


def test_threads_allocate_and_free_while_pools_are_open(opened: CudaRankGroup) -> None:
    """The deadlock of callbacks into Python: without it this takes ten seconds, with it the deadline."""
    found = opened.one(scenarios.churn_in_pool, 4, 10.0, timeout_s=60)
    print(found)
    assert found["inside"] > 0
    assert found["outside"] > 0
    assert found[WEIGHTS] == found[KV_CACHE] == 0

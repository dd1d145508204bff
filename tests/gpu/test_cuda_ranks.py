"""Graphs, communicators and workspaces through the driver's checkpoint, on one and two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from tests.support import cuda_rank_scenarios as scenarios
from tests.support.cuda_rank_scenarios import MIB
from tests.support.cuda_ranks import CudaRankGroup
from tests.support.ranks_processes import RemoteError

pytestmark = pytest.mark.gpu

ALL = [WEIGHTS, KV_CACHE]
START_S = 100  # torch, a context on each GPU, NCCL's channels

Start = Callable[..., CudaRankGroup]


def full_sleep(group: CudaRankGroup) -> None:
    """Down as the executor goes, each stage on all ranks before the next."""
    group.run(scenarios.sleep)
    suspended = group.run(scenarios.suspend)
    assert len({found["suspended"] for found in suspended}) == 1
    assert all(released > 0 for released in group.run(scenarios.release_local_memory))
    group.checkpoint()


def full_wake(group: CudaRankGroup) -> None:
    group.restore()
    group.run(scenarios.restore_local_memory)
    assert all(not found["suspended"] for found in group.run(scenarios.resume))
    group.run(scenarios.wake, [WEIGHTS])
    group.run(scenarios.wake, [KV_CACHE])


def test_a_graph_replays_bit_exact_at_its_addresses_after_cycles(
    single: CudaRankGroup, gpus: list[str], tmp_path: Path
) -> None:
    single.one(scenarios.open_runtime, tmp_path, gpus[:1])
    single.one(scenarios.capture, False)
    address = single.one(scenarios.graph_address)
    replayed, eager = single.one(scenarios.replay, 0.5)
    assert replayed == eager
    before = single.one(scenarios.replay_seconds)
    for _ in range(3):
        full_sleep(single)
        full_wake(single)
        assert single.one(scenarios.graph_address) == address
        assert single.one(scenarios.replay, 0.5) == (replayed, eager)
    after = single.one(scenarios.replay_seconds)
    print(f"replay: {before * 1e6:.1f} us before, {after * 1e6:.1f} us after")


def test_graphs_with_local_arrays_replay_bit_exact_after_their_memory_was_given_back(
    single: CudaRankGroup, gpus: list[str], tmp_path: Path
) -> None:
    single.one(scenarios.open_runtime, tmp_path, gpus[:1])
    # A graph holds the size of local memory that was set when it was captured: one from before it grew, one from after.
    single.one(scenarios.capture, False)
    plain = single.one(scenarios.replay, 0.5)
    array_ints = 1500
    expected = single.one(scenarios.capture_local_arrays, array_ints)
    other = single.one(scenarios.replay_local_arrays, 2)
    assert other != expected
    before = single.one(scenarios.free_device_bytes)
    for _ in range(3):
        single.one(scenarios.sleep)
        asleep = single.one(scenarios.free_device_bytes)
        released = single.one(scenarios.release_local_memory)
        assert released >= 4 * array_ints * 100_000  # for every thread that the device can hold
        assert single.one(scenarios.free_device_bytes) - asleep == released
        single.checkpoint()
        single.restore()
        single.one(scenarios.restore_local_memory)
        single.one(scenarios.wake, ALL)
        assert single.one(scenarios.free_device_bytes) >= before - 4 * MIB
        assert single.one(scenarios.replay, 0.5) == plain
        assert single.one(scenarios.replay_local_arrays, 1) == expected
        assert single.one(scenarios.replay_local_arrays, 2) == other


def test_a_graph_over_sleeping_memory_is_refused(single: CudaRankGroup, gpus: list[str], tmp_path: Path) -> None:
    single.one(scenarios.open_runtime, tmp_path, gpus[:1])
    single.one(scenarios.capture, False)
    single.one(scenarios.sleep)
    assert "sleeps" in single.one(scenarios.replay_refused)
    single.one(scenarios.wake, [WEIGHTS])
    assert KV_CACHE in single.one(scenarios.replay_refused)
    single.one(scenarios.wake, [KV_CACHE])
    assert single.one(scenarios.replay_refused) == ""


@pytest.mark.parametrize("communication", ["suspend", "socket"])
def test_graphs_that_hold_all_reduces_survive_the_driver(
    two_gpus: list[str], start_ranks: Start, tmp_path: Path, communication: str
) -> None:
    group = start_ranks(two_gpus)
    empty = group.used_bytes()
    group.run(scenarios.open_runtime, tmp_path, two_gpus, communication, timeout_s=START_S)
    group.run(scenarios.capture, True)
    before = group.run(scenarios.replay, 0.25)
    assert all(replayed == eager for replayed, eager in before)
    assert before[0] == before[1]  # an all-reduce gives every rank the same bits
    for _ in range(3):
        full_sleep(group)
        assert all(used <= base + 8 * MIB for used, base in zip(group.used_bytes(), empty, strict=True))
        full_wake(group)
        assert group.run(scenarios.replay, 0.25) == before


def test_a_suspended_communicator_says_so_and_refuses_collectives(
    two_gpus: list[str], start_ranks: Start, tmp_path: Path
) -> None:
    group = start_ranks(two_gpus)
    group.run(scenarios.open_runtime, tmp_path, two_gpus, timeout_s=START_S)
    group.run(scenarios.capture, True)
    awake = group.run(scenarios.replay, 1.0)
    before = group.used_bytes()
    found = group.run(scenarios.suspend)
    assert all(each["suspended"] for each in found)
    assert all(each["suspendable"] > 0 for each in found)
    assert all(used < base for used, base in zip(group.used_bytes(), before, strict=True))
    assert all(len(errors) == 3 for errors in group.run(scenarios.collectives_refused))
    assert all("suspended" in error for error in group.run(scenarios.replay_refused))
    with pytest.raises(RemoteError, match="already"):
        group.run(scenarios.suspend)
    assert all(not each["suspended"] for each in group.run(scenarios.resume))
    assert group.run(scenarios.replay, 1.0) == awake


def test_collectives_follow_torchs_current_stream(two_gpus: list[str], start_ranks: Start, tmp_path: Path) -> None:
    group = start_ranks(two_gpus)
    group.run(scenarios.open_runtime, tmp_path, two_gpus, timeout_s=START_S)
    expected = {"sum": [3.0], "strided": [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]], "gathered": [[0, 0], [1, 1]]}
    assert group.run(scenarios.reduce_and_gather) == [expected] * 2


def test_ranks_find_their_gpus_by_uuid_whatever_the_order(
    two_gpus: list[str], start_ranks: Start, tmp_path: Path
) -> None:
    group = start_ranks(two_gpus, environment={"CUDA_VISIBLE_DEVICES": ",".join(reversed(two_gpus))})
    before = group.used_bytes()
    assert group.run(scenarios.open_runtime, tmp_path, two_gpus, timeout_s=START_S) == two_gpus
    only_first = group.ranks[:1]
    group.run(scenarios.make_tensors, [512 * MIB], ranks=len(only_first))
    taken = [used - base for used, base in zip(group.used_bytes(), before, strict=True)]
    assert taken[0] - taken[1] > 900 * MIB  # the weights of rank 0 are on the GPU that was asked for


def test_a_workspace_gives_peer_memory_up_for_the_driver_and_comes_back_at_its_addresses(
    two_gpus: list[str], start_ranks: Start, tmp_path: Path
) -> None:
    group = start_ranks(two_gpus)
    empty = group.used_bytes()
    group.run(scenarios.open_runtime, tmp_path, two_gpus, timeout_s=START_S)
    addresses = group.run(scenarios.open_workspace, 5 * MIB)
    for number in range(3):
        assert group.run(scenarios.swap, f"{number}") == [[f"{number} 0".encode(), f"{number} 1".encode()]] * 2
        group.run(scenarios.suspend)
        assert group.run(scenarios.prepare) == addresses
        with pytest.raises(RemoteError, match="checkpoint_restore"):
            group.run(scenarios.swap, "asleep")
        group.checkpoint()
        assert all(used <= base + 8 * MIB for used, base in zip(group.used_bytes(), empty, strict=True))
        group.restore()
        assert group.run(scenarios.restore) == addresses
        group.run(scenarios.resume)

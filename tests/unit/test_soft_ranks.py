"""The soft communicator, workspace and the tensor-parallel example over real rank processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_executor.driver_states import DriverCode, DriverError, ProcessState
from checkpoint_executor.softgpu import CONTEXT_BYTES, RemoteProcess
from tests.support import ranks_scenarios as scenarios
from tests.support.ranks_processes import RankGroup, RankProcess, RemoteError

PROMPTS = [[1, 2, 3], [40, 50, 60, 70], [8], [90, 10]]
MODES = ["suspend", "socket"]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankGroup]:
    with RankGroup(4) as group:
        yield group


@pytest.fixture
def group(processes: RankGroup) -> Iterator[RankGroup]:
    """Rank processes without an open device, before and after."""
    yield processes
    processes.run(scenarios.close_runtime)


def driver_of(process: RankProcess) -> RemoteProcess:
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return RemoteProcess(process.pid, int(stat.rpartition(")")[2].split()[19]))


def checkpoint(drivers: list[RemoteProcess]) -> None:
    for driver in drivers:
        driver.lock(1000)
    for driver in drivers:
        driver.checkpoint()


def bring_back(drivers: list[RemoteProcess]) -> None:
    for driver in drivers:
        driver.restore()
    for driver in drivers:
        driver.unlock()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums_are_right_and_the_same_bits_on_every_rank(
    group: RankGroup, tmp_path: Path, mode: str, ranks: int
) -> None:
    group.run(scenarios.open_runtime, tmp_path, ranks, mode, ranks=ranks)
    needs = mode == "suspend" and ranks > 1
    assert group.run(scenarios.check, ranks=ranks) == [{"needs_suspend": needs, "suspended": False}] * ranks
    for dtype in ("float32", "float64", "bfloat16", "int64"):
        digests = group.run(scenarios.reduce, dtype, 100, ranks=ranks)
        assert len({digest for pair in digests for digest in pair}) == 1
        assert all(group.run(scenarios.gather, dtype, 100, ranks=ranks))
    doubled = [[1.0 * ranks, 3.0 * ranks, 5.0 * ranks], [2.0 * ranks, 4.0 * ranks, 6.0 * ranks]]
    assert group.run(scenarios.reduce_strided, ranks=ranks) == [doubled] * ranks


@pytest.mark.parametrize("mode", MODES)
def test_payloads_larger_than_the_staging_memory_go_in_pieces(group: RankGroup, tmp_path: Path, mode: str) -> None:
    group.run(scenarios.open_runtime, tmp_path, 2, mode, ranks=2)
    elements = 400_001  # 3.2 MB of float64; the staging memory is 1 MiB
    digests = group.run(scenarios.reduce, "float64", elements, ranks=2)
    assert len({digest for pair in digests for digest in pair}) == 1
    assert all(group.run(scenarios.gather, "bfloat16", elements, ranks=2))


@pytest.mark.parametrize("mode", MODES)
def test_suspend_gives_the_memory_up_and_resume_takes_it_back_at_the_same_address(
    group: RankGroup, tmp_path: Path, mode: str
) -> None:
    group.run(scenarios.open_runtime, tmp_path, 2, mode, ranks=2)
    with pytest.raises(RemoteError, match="not suspended") as refused:
        group.run(scenarios.resume, ranks=2)
    assert refused.value.kind == "RuntimeError"
    held = group.run(scenarios.device_bytes, ranks=2)
    addresses = group.run(scenarios.suspend, ranks=2)
    assert group.run(scenarios.device_bytes, ranks=2) == [CONTEXT_BYTES, CONTEXT_BYTES]

    for errors in group.run(scenarios.refused_while_suspended, ranks=2):
        assert set(errors) == {"all_reduce", "all_gather", "check", "suspend"}

    assert group.run(scenarios.resume, ranks=2) == addresses
    assert group.run(scenarios.device_bytes, ranks=2) == held
    group.run(scenarios.check, ranks=2)
    digests = group.run(scenarios.reduce, "float32", 1000, ranks=2)
    assert len({digest for pair in digests for digest in pair}) == 1


def test_a_suspended_communicator_survives_the_drivers_checkpoint(group: RankGroup, tmp_path: Path) -> None:
    group.run(scenarios.open_runtime, tmp_path, 2, "suspend", ranks=2)
    drivers = [driver_of(process) for process in group.ranks[:2]]
    for _ in range(2):
        group.run(scenarios.suspend, ranks=2)
        checkpoint(drivers)
        assert group.run(scenarios.device_bytes, ranks=2) == [0, 0]
        bring_back(drivers)
        group.run(scenarios.resume, ranks=2)
        group.run(scenarios.check, ranks=2)


def test_without_suspend_the_checkpoint_succeeds_and_the_restore_never_does(tmp_path: Path) -> None:
    with RankGroup(2) as group:
        group.run(scenarios.open_runtime, tmp_path, 2, "suspend")
        drivers = [driver_of(process) for process in group.ranks]
        checkpoint(drivers)
        for driver in drivers:
            with pytest.raises(DriverError) as failed:
                driver.restore()
            assert failed.value.code == DriverCode.NOT_SUPPORTED
            assert driver.get_state() is ProcessState.CHECKPOINTED


def test_socket_mode_needs_no_suspend_for_the_drivers_checkpoint(group: RankGroup, tmp_path: Path) -> None:
    group.run(scenarios.open_runtime, tmp_path, 2, "socket", ranks=2)
    drivers = [driver_of(process) for process in group.ranks[:2]]
    checkpoint(drivers)
    bring_back(drivers)
    group.run(scenarios.check, ranks=2)


def test_ranks_in_different_operations_all_get_an_error(tmp_path: Path) -> None:
    with RankGroup(2) as group:
        group.run(scenarios.open_runtime, tmp_path, 2, "socket")
        for process in group.ranks:
            process.begin(scenarios.other_operation)
        for process in group.ranks:
            with pytest.raises(RemoteError, match="rank 0 is in 'one', but rank 1 is in 'another'"):
                process.result(time.monotonic() + 10)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_death_ends_the_wait_of_all_others(tmp_path: Path, mode: str, victim: int) -> None:
    with RankGroup(3) as group:
        group.run(scenarios.open_runtime, tmp_path, 3, mode)
        assert group.run(scenarios.imported_torch) == [False] * 3
        others = [process for process in group.ranks if process.rank != victim]
        for process in others:
            process.begin(scenarios.wait_in_barrier)
        group.ranks[victim].kill()
        for process in others:
            with pytest.raises(RemoteError, match="is gone") as error:
                process.result(time.monotonic() + 10)
            assert error.value.kind == "ConnectionError"
        # The communicator is of no use after that, and says so at once.
        others[0].begin(scenarios.wait_in_barrier)
        with pytest.raises(RemoteError, match="lost a rank"):
            others[0].result(time.monotonic() + 10)


def test_collectives_are_captured_and_replayed(group: RankGroup, tmp_path: Path) -> None:
    group.run(scenarios.open_runtime, tmp_path, 2, "suspend", ranks=2)
    group.run(scenarios.capture_collective, ranks=2)
    # x is 5 and 6: the sum of 2x is 22, and each rank adds its own x.
    assert group.run(scenarios.replay_collective, 5.0, ranks=2) == [[[27.0] * 4, [28.0] * 4]] * 2
    group.run(scenarios.suspend, ranks=2)
    assert all("suspended" in text for text in group.run(scenarios.replay_refused, ranks=2))
    group.run(scenarios.resume, ranks=2)
    assert group.run(scenarios.replay_collective, 1.0, ranks=2) == [[[7.0] * 4, [8.0] * 4]] * 2


def test_the_workspace_gives_up_peer_memory_and_comes_back_at_its_address(group: RankGroup, tmp_path: Path) -> None:
    group.run(scenarios.open_runtime, tmp_path, 4, "suspend")
    addresses = group.run(scenarios.open_workspace)
    assert group.run(scenarios.swap, "before") == [[f"before {rank}".encode() for rank in range(4)]] * 4
    drivers = [driver_of(process) for process in group.ranks]
    for _ in range(2):
        group.run(scenarios.suspend)
        assert group.run(scenarios.prepare) == addresses
        with pytest.raises(RemoteError, match="checkpoint_restore"):
            group.run(scenarios.swap, "asleep")
        checkpoint(drivers)
        bring_back(drivers)
        assert group.run(scenarios.restore) == addresses
        group.run(scenarios.resume)
        assert group.run(scenarios.swap, "after") == [[f"after {rank}".encode() for rank in range(4)]] * 4


def test_the_model_gives_the_same_tokens_on_one_two_and_four_ranks(group: RankGroup, tmp_path: Path) -> None:
    answers = []
    for ranks in (1, 2, 4):
        root = tmp_path / str(ranks)
        root.mkdir()
        group.run(scenarios.open_runtime, root, ranks, "suspend", ranks=ranks)
        group.run(scenarios.build_transformer, ranks, ranks=ranks)
        results = group.run(scenarios.call_worker, "decode", PROMPTS, 24, ranks=ranks)
        assert all(result == results[0] for result in results)
        assert results[0]["distinct_tokens"] >= 20
        answers.append(results[0]["tokens"])
        group.run(scenarios.close_runtime)
    assert answers[0] == answers[1] == answers[2]


def test_the_model_is_bit_exact_after_a_whole_cycle_on_two_ranks(group: RankGroup, tmp_path: Path) -> None:
    group.run(scenarios.open_runtime, tmp_path, 2, "suspend", ranks=2)
    group.run(scenarios.build_transformer, 2, ranks=2)
    before = group.run(scenarios.call_worker, "decode", PROMPTS, 24, ranks=2)
    addresses = group.run(scenarios.call_worker, "addresses", ranks=2)
    checksums = group.run(scenarios.call_worker, "weight_checksums", ranks=2)
    held = group.run(scenarios.device_bytes, ranks=2)
    drivers = [driver_of(process) for process in group.ranks[:2]]
    for _ in range(2):
        group.run(scenarios.sleep_memory, ranks=2)
        group.run(scenarios.suspend, ranks=2)
        checkpoint(drivers)
        assert group.run(scenarios.device_bytes, ranks=2) == [0, 0]
        bring_back(drivers)
        group.run(scenarios.resume, ranks=2)
        group.run(scenarios.wake_memory, ["weights"], ranks=2)
        with pytest.raises(RemoteError, match="kv_cache sleeps"):
            group.run(scenarios.replay_any, ranks=2)
        group.run(scenarios.wake_memory, ["kv_cache"], ranks=2)
        assert group.run(scenarios.device_bytes, ranks=2) == held
        assert group.run(scenarios.call_worker, "addresses", ranks=2) == addresses
        assert group.run(scenarios.call_worker, "weight_checksums", ranks=2) == checksums
        assert group.run(scenarios.call_worker, "decode", PROMPTS, 24, ranks=2) == before

"""The ranks' host group: threads stand for processes here, the sockets are the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from checkpoint_executor.workers.cuda_rendezvous import HostGroup

T = TypeVar("T")

DEADLINE_S = 20.0


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[HostGroup]]:
    made = on_all(3, lambda rank: HostGroup(rank, 3, tmp_path, timeout_s=DEADLINE_S))
    yield made
    for group in made:
        group.close()


def on_all(size: int, function: Callable[[int], T]) -> list[T]:
    """Run it for every rank at the same time."""
    with ThreadPoolExecutor(size) as threads:
        return [future.result(DEADLINE_S) for future in [threads.submit(function, rank) for rank in range(size)]]


def test_everybody_gets_everybodys_bytes_in_rank_order(groups: list[HostGroup]) -> None:
    for word in ("one", "two", "three"):
        parts = on_all(3, lambda rank, word=word: groups[rank].exchange("words", f"{word} {rank}".encode()))  # type: ignore[misc]
        expected = [f"{word} {rank}".encode() for rank in range(3)]
        assert [[part.data for part in mine] for mine in parts] == [expected] * 3


def test_descriptors_reach_the_others_and_leak_nothing(groups: list[HostGroup]) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def share(rank: int) -> list[tuple[int, bytes]]:
        reading, writing = os.pipe()
        os.write(writing, f"from {rank}".encode())
        os.close(writing)
        try:
            parts = groups[rank].exchange("pipes", descriptors=[reading])
            # A pipe has one reader's worth of bytes: each descriptor is looked at by the next rank only.
            found = []
            for origin, part in enumerate(parts):
                for descriptor in part.descriptors:
                    if (origin + 1) % 3 == rank:
                        found.append((origin, os.read(descriptor, 100)))
                    assert not os.get_inheritable(descriptor)
                    os.close(descriptor)
            return found
        finally:
            os.close(reading)

    assert on_all(3, share) == [[((rank - 1) % 3, f"from {(rank - 1) % 3}".encode())] for rank in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_passes_a_barrier_alone(groups: list[HostGroup]) -> None:
    arrived = []

    def pass_barrier(rank: int) -> int:
        arrived.append(rank)
        groups[rank].barrier("gate")
        return len(arrived)

    assert on_all(3, pass_barrier) == [3, 3, 3]


def test_ranks_in_different_operations_get_errors_and_not_each_others_bytes(groups: list[HostGroup]) -> None:
    def attempt(rank: int) -> type[BaseException] | None:
        try:
            groups[rank].exchange("prepare" if rank == 1 else "restore")
        except (RuntimeError, ConnectionError) as error:
            return type(error)
        return None

    assert on_all(3, attempt) == [RuntimeError, ConnectionError, ConnectionError]


def test_a_rank_that_is_gone_is_noticed_by_all(groups: list[HostGroup]) -> None:
    groups[2].close()
    for rank in (0, 1):
        with pytest.raises(ConnectionError, match="gone"):
            groups[rank].exchange("words", b"x")


def test_a_rank_that_does_not_come_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        HostGroup(0, 2, tmp_path, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="rank 0"):
        HostGroup(1, 2, tmp_path, timeout_s=0.2)


def test_a_late_first_rank_is_waited_for_and_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    made: list[HostGroup] = []
    late = threading.Timer(0.2, lambda: made.append(HostGroup(0, 2, folder, timeout_s=DEADLINE_S)))
    late.start()
    made.append(HostGroup(1, 2, folder, timeout_s=DEADLINE_S))
    late.join()
    for group in made:
        group.close()
    assert list(folder.iterdir()) == []


def test_one_rank_talks_to_itself(tmp_path: Path) -> None:
    group = HostGroup(0, 1, tmp_path)
    assert group.exchange("words", b"mine")[0].data == b"mine"
    group.barrier("gate")

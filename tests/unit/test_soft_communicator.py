"""How the ranks of the software device meet. What they do then is in ``test_soft_ranks``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_executor.softgpu import SoftProcess
from checkpoint_executor.workers.soft_communicator import SoftCommunicator
from checkpoint_executor.workers.soft_runtime import SoftRuntime
from tests.support import ranks_scenarios as scenarios
from tests.support.ranks_device import single_runtime
from tests.support.ranks_processes import RankGroup, RemoteError


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[SoftRuntime]:
    with single_runtime(tmp_path) as opened:
        yield opened


@pytest.fixture
def process(runtime: SoftRuntime) -> SoftProcess:
    return runtime._process


@pytest.mark.parametrize("mode", ["suspend", "socket"])
def test_one_rank_needs_nobody(process: SoftProcess, tmp_path: Path, mode: str) -> None:
    held = process.resident_bytes
    communicator = SoftCommunicator(process, 0, 1, tmp_path / "missing", mode)
    assert not communicator.needs_suspend
    assert communicator.memory_bytes() == {"suspendable": 0, "persistent": 0}
    assert process.resident_bytes == held
    communicator.check()
    communicator.suspend()
    assert communicator.is_suspended
    with pytest.raises(RuntimeError, match="suspended"):
        communicator.check()
    with pytest.raises(RuntimeError, match="suspended already"):
        communicator.suspend()
    communicator.resume()
    with pytest.raises(RuntimeError, match="not suspended"):
        communicator.resume()
    communicator.check()


def test_a_rank_that_does_not_come_is_named(process: SoftProcess, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not come"):
        SoftCommunicator(process, 0, 3, tmp_path, "socket", timeout_s=0.05)
    with pytest.raises(TimeoutError, match="rank 0 did not open the rendezvous"):
        SoftCommunicator(process, 2, 3, tmp_path, "socket", timeout_s=0.05)
    assert not list(tmp_path.glob("*.sock")), "the socket must not be left behind"


def test_bad_arguments_are_refused(process: SoftProcess, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown communication 'nccl'; the software device has suspend, socket"):
        SoftCommunicator(process, 0, 1, tmp_path, "nccl")
    with pytest.raises(ValueError, match="rank 2 does not exist among 2 ranks"):
        SoftCommunicator(process, 2, 2, tmp_path, "socket")
    with pytest.raises(ValueError, match="multiple of 16"):
        SoftCommunicator(process, 0, 2, tmp_path, "suspend", staging_bytes=100)


def test_ranks_meet_in_a_folder_with_a_long_name_and_a_dead_socket(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 40)  # longer than the path of a unix socket may be
    root.mkdir()
    fd = os.open(root, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(f"/proc/self/fd/{fd}/communicator.sock")
    os.close(fd)
    with RankGroup(2) as group:
        # Rank 1 is there first: it finds a socket that nobody listens to, and tries again.
        group.ranks[1].begin(scenarios.open_runtime, root, 2, "suspend")
        with pytest.raises(TimeoutError):
            group.ranks[1].result(time.monotonic() + 0.3)
        group.ranks[0].begin(scenarios.open_runtime, root, 2, "suspend")
        for rank in group.ranks:
            rank.result(time.monotonic() + 20)
        group.run(scenarios.check)


def test_ranks_that_disagree_on_their_number_do_not_start(tmp_path: Path) -> None:
    with RankGroup(2) as group:
        group.ranks[0].begin(scenarios.open_runtime, tmp_path, 2, "suspend")
        group.ranks[1].begin(scenarios.open_runtime, tmp_path, 3, "suspend")
        with pytest.raises(RemoteError, match="rank 1 of 3 came to a rendezvous of 2 ranks"):
            group.ranks[0].result(time.monotonic() + 20)
        with pytest.raises(RemoteError, match="rank 0 is gone"):
            group.ranks[1].result(time.monotonic() + 20)

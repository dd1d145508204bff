"""What a running executor tells by its file, and the log of its cycles."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import FatalError, procfs
from checkpoint_executor.directories import make_runtime_directory
from checkpoint_executor.report import CycleReport, StageReport
from checkpoint_executor.status import CycleLog, StatusFile, read_all


class Control:
    """As much of the control thread as the file is written from."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.phase = "awake"
        self.sleeping: frozenset[str] = frozenset()
        self.paused = False
        self.pids = {"helper": 7, "worker 0": 8}
        self.last_report: CycleReport | None = None


@pytest.fixture
def base() -> Iterator[str]:
    """Not pytest's folder: sockets below it would have too long a path."""
    with tempfile.TemporaryDirectory(prefix="cx-") as folder:
        yield folder


@pytest.fixture
def control(base: str) -> Any:
    return Control(make_runtime_directory(base))


def test_a_reader_sees_the_last_state(control: Any, base: str) -> None:
    write = StatusFile("vllm", "Qwen/Qwen3-8B")
    write(control)
    control.phase = "checkpointed"
    control.sleeping = frozenset({"weights", "kv_cache"})
    control.last_report = CycleReport("sleep", True, 1.5, (StageReport("lock", 0.1, (0.1,)),))
    write(control)
    (found,) = read_all(base)
    assert (found.pid, found.front_door, found.model) == (os.getpid(), "vllm", "Qwen/Qwen3-8B")
    assert (found.phase, found.sleeping) == ("checkpointed", ("kv_cache", "weights"))
    assert found.processes == {"helper": 7, "worker 0": 8}
    assert found.last_report == control.last_report


def test_since_is_when_the_phase_began(control: Any, base: str) -> None:
    write = StatusFile("own")
    write(control)
    (first,) = read_all(base)
    control.paused = True
    write(control)
    (second,) = read_all(base)
    assert second.paused
    assert second.since == first.since
    control.phase = "suspending"
    write(control)
    assert read_all(base)[0].since > first.since


def test_the_dead_and_the_half_written_are_left_out(control: Any, base: str) -> None:
    (control.runtime_dir / "status.json").write_text('{"pid": 1, "front')
    dead = control.runtime_dir.with_name(f"{os.getpid()}-{procfs.start_time(os.getpid()) + 1}-0")
    dead.mkdir()
    assert read_all(base) == []


def test_a_reader_makes_no_directory(tmp_path: Path) -> None:
    assert read_all(str(tmp_path / "nowhere")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_gone_does_not_end_the_executor(control: Any) -> None:
    control.runtime_dir = Path("/nowhere")
    StatusFile("own")(control)


def test_the_log_has_a_line_for_each_operation(tmp_path: Path) -> None:
    log = CycleLog(str(tmp_path / "log"))
    log.report(CycleReport("wake", True, 0.5, sleeping=("kv_cache",)))
    log.error("sleep", FatalError("it broke", rank=1, stage="lock", code=None))
    wake, error = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert (wake["operation"], wake["wall_s"], wake["pid"]) == ("wake", 0.5, os.getpid())
    assert (error["operation"], error["error"], error["executor_alive"]) == ("sleep", "FatalError", False)
    assert (error["rank"], error["stage"]) == (1, "lock")
    assert "code" not in error


def test_a_log_that_cannot_be_written_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    CycleLog("/nowhere/log").report(CycleReport("wake", True, 0.5))
    assert "no line was written" in caplog.text
    CycleLog(None).report(CycleReport("wake", True, 0.5))

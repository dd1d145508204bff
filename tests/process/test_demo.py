"""The demo: what it shows when all is well, and that it fails when anything is not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import demo, directories, procfs
from checkpoint_executor.coordinator import OWN_STAGES
from tests.support import demo_workers
from tests.support.executor_harness import REPOSITORY, wait_until

_DOWN = [stage.name for stage in OWN_STAGES.down]
_UP = [stage.name for stage in OWN_STAGES.up]

#: Runs the command and proves, in the very process, that the parent has no torch.
_MAIN = (
    "import sys; from checkpoint_executor import cli; s = cli.main(); assert 'torch' not in sys.modules; sys.exit(s)"
)


def run_demo(worker: type, **options: Any) -> demo.DemoReport:
    name = f"{worker.__module__}:{worker.__qualname__}"
    return demo.run(demo.DemoOptions(device="soft", worker=name, **options))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _MAIN, "demo", "--device", "soft", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_file_that_cannot_be_written_costs_the_file_and_not_the_result() -> None:
    done = command("--cycles", "1", "--json", "/dev/full")
    assert done.returncode == 1
    assert "PASSED" in done.stdout
    assert "/dev/full could not be written: No space left on device" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_command_passes_with_the_example_model(ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = command("--tensor-parallel-size", str(ranks), "--cycles", "2", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "software device: no GPU was used" in done.stdout
    assert "PASSED" in done.stdout

    result = json.loads(file.read_bytes())
    assert (result["device"], result["tensor_parallel_size"]) == ("soft", ranks)
    assert result["passed"]
    assert not result["left_behind"]
    assert result["environment"]["versions"]["torch"]
    assert len(result["cycles"]) == 2
    for cycle in result["cycles"]:
        assert cycle["identical"]
        assert cycle["token_sha256"]["before"] == cycle["token_sha256"]["after"]
        assert cycle["logits_sha256"]["before"] == cycle["logits_sha256"]["after"]
        assert cycle["distinct_tokens"] >= 20
        assert cycle["sleep_s"] > 0
        assert cycle["wake_s"] > 0
        assert cycle["device_bytes"]["asleep"] == [0] * ranks
        assert cycle["device_bytes"]["woken"] == cycle["device_bytes"]["awake"]
        assert all(size > 0 for size in cycle["device_bytes"]["awake"])
        assert all(len(stage["ranks"]) == ranks and stage["wall_s"] > 0 for stage in cycle["stages"])
        assert [s["name"] for s in cycle["stages"] if s["operation"] == "sleep"] == _DOWN
        assert [s["name"] for s in cycle["stages"] if s["operation"] in ("wake", "wake weights")] == _UP
    assert [cycle["partial"] for cycle in result["cycles"]] == [False, True]


def test_the_last_cycle_wakes_weights_first() -> None:
    report = run_demo(demo_workers.HonestWorker, tensor_parallel_size=2, cycles=2)
    assert report.passed, report.problems
    whole, partial = report.cycles
    assert {stage.operation for stage in whole.stages} == {"sleep", "wake"}
    assert {stage.operation for stage in partial.stages} == {"sleep", "wake weights", "wake kv_cache"}
    assert whole.device_bytes.weights_woken is None
    between = partial.device_bytes.weights_woken
    assert between is not None
    assert all(0 < half < full for half, full in zip(between, partial.device_bytes.woken, strict=True))


def test_nothing_of_the_demo_is_left() -> None:
    before = set(directories.user_directory().iterdir())
    report = run_demo(demo_workers.HonestWorker, cycles=1)
    assert report.passed, report.problems
    assert report.closed_device_bytes == (0,)
    own = f"{os.getpid()}-"
    assert not [path for path in set(directories.user_directory().iterdir()) - before if path.name.startswith(own)]


def test_ballast_is_carried_and_compared() -> None:
    report = run_demo(demo_workers.HonestWorker, cycles=1, weights_gib=0.0625)
    assert report.passed, report.problems
    assert all(size > 64 << 20 for size in report.cycles[0].device_bytes.awake)


def test_an_audience_hears_of_every_cycle_and_phase() -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[str] = []
            self.cycles: list[int] = []

        def during(self, what: str, detail: Callable[[], str] | None = None) -> Any:
            self.heard.append(f"{what} [{detail()}]" if detail is not None else what)
            return nullcontext()

        def cycle_done(self, number: int, cycle: demo.Cycle) -> None:
            assert cycle.identical
            self.cycles.append(number)

    listener = Listener()
    name = f"{demo_workers.__name__}:HonestWorker"
    demo.run(demo.DemoOptions(cycles=1, device="soft", worker=name), listener)
    assert listener.cycles == [1]
    assert listener.heard == [
        "starting 1 worker(s)",
        "decoding",
        "cycle 1 of 1: sleep [awake]",
        "cycle 1 of 1: wake weights [checkpointed]",
        "cycle 1 of 1: wake kv_cache [awake]",
        "cycle 1 of 1: decoding again",
        "shutting down",
    ]


# -- what must make it fail ----------------------------------------------------------------------


def test_a_lost_bit_fails_the_demo() -> None:
    report = run_demo(demo_workers.DriftingWorker, cycles=1)
    assert not report.passed
    (cycle,) = report.cycles
    assert not cycle.identical
    assert not cycle.weights_identical
    assert cycle.addresses_identical
    assert any("tokens differ" in problem for problem in report.problems)
    assert any("weights differ" in problem for problem in report.problems)


def test_a_constant_answer_fails_the_demo() -> None:
    report = run_demo(demo_workers.MonotonousWorker, cycles=1)
    assert report.cycles[0].identical
    assert not report.passed
    assert any("distinct tokens" in problem for problem in report.problems)


def test_ranks_that_disagree_fail_the_demo() -> None:
    report = run_demo(demo_workers.QuarrellingWorker, tensor_parallel_size=2, cycles=1)
    assert not report.passed
    assert any("ranks decoded different" in problem for problem in report.problems)


def test_a_worker_that_does_not_exist_fails_the_demo() -> None:
    report = demo.run(demo.DemoOptions(device="soft", worker="no.such.module:Worker"))
    assert not report.passed
    assert report.cycles == ()
    (problem,) = report.problems
    assert problem.startswith("StartError: ")


def test_what_outlives_the_executor_fails_the_demo() -> None:
    report = run_demo(demo_workers.HoardingWorker, cycles=1)
    processes = [int(found[1]) for what in report.left_behind if (found := re.fullmatch(r"process (\d+)", what))]
    try:
        assert not report.passed
        assert len(processes) == 1
        assert any("stayed on the device of rank 0 while asleep" in problem for problem in report.problems)
        assert any("bytes on the device of rank 0" in what for what in report.left_behind)
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not procfs.is_alive(pid), f"process {pid} is gone")  # type: ignore[misc]

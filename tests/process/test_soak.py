"""The soak itself, in short: it runs clean, survives a kill, and its probe finds what was spoiled on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.executor_harness import REPOSITORY, run_script, wait_until

pytest.importorskip("torch")

SCRIPT = REPOSITORY / "scripts" / "soak.py"
SOFT = ("--device", "soft")


def test_a_short_soak_is_clean(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    arguments = ("--tensor-parallel-size", "2", "--iterations", "6", "--seed", "5", "--json", str(out))
    status, output, errors = run_script(SCRIPT, *SOFT, *arguments, timeout_s=100)
    assert status == 0, f"{output}\n{errors}"
    assert "software device, TP=2: 6 iterations" in output
    result: dict[str, Any] = json.loads(out.read_text())
    assert (result["kind"], result["device"], result["tensor_parallel_size"], result["seed"]) == ("soak", "soft", 2, 5)
    assert (result["mismatches"], result["failed_requests"], result["ok"]) == (0, 0, True)
    assert not out.with_suffix(".jsonl").exists()
    iterations = result["iterations"]
    assert [each["number"] for each in iterations] == list(range(6))
    assert [each["wake"] for each in iterations] == ["whole", "by_tag"] * 3
    assert sum(each["occupied"] for each in iterations) == 3
    awake = iterations[0]["device_awake_bytes"]
    processes = {"parent", "helper", "worker 0", "worker 1"}
    for each in iterations:
        assert each["identical"]
        assert 64 <= each["burst_requests"] <= 256
        assert each["burst_failed"] == 0
        assert min(each["burst_s"], each["sleep_s"], each["wake_s"], each["probe_s"], each["probe_cpu_s"]) > 0
        # Beside the executor there is only the context of the process that fills the device.
        assert each["device_asleep_bytes"] == [1 << 20] * 2
        assert each["device_awake_bytes"] == awake
        assert (each["occupied_bytes"] > 2 * 50 << 20) is each["occupied"]
        assert set(each["rss_bytes"]) == set(each["open_files"]) == processes
        assert min(*each["rss_bytes"].values(), *each["open_files"].values()) > 0
    assert {each["open_files"]["helper"] for each in iterations} == {iterations[0]["open_files"]["helper"]}
    assert set(result["slopes"]["rss_bytes helper"]) >= {"per_100", "standard_error", "unit", "bound", "ok"}


def test_a_kill_loses_nothing_that_was_done(tmp_path: Path) -> None:
    out, lines = tmp_path / "soak.json", tmp_path / "soak.jsonl"
    run = subprocess.Popen(
        [sys.executable, str(SCRIPT), *SOFT, "--iterations", "1000", "--json", str(out)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 3, "two iterations", 100)
    finally:
        run.kill()
        run.wait()
    done = len(lines.read_text().splitlines()) - 1
    status, output, _ = run_script(SCRIPT, "--finish", str(lines))
    assert status == 1
    assert f"only {done} of 1000 iterations were done" in output
    result = json.loads(out.read_text())
    assert len(result["iterations"]) == done >= 2
    assert result["mismatches"] == 0
    assert not result["ok"]


def test_the_probe_finds_a_spoiled_byte_and_a_moved_graph_input() -> None:
    status, output, errors = run_script(SCRIPT, *SOFT, "--show-probe-catches", timeout_s=110)
    assert status == 0, f"{output}\n{errors}"
    clean, weight, graph, verdict = output.splitlines()
    assert clean == "nothing altered: the probe reports no mismatch"
    assert weight.startswith("weight-byte (byte 1 of element ")
    assert graph.startswith("graph-input (the graphs' tokens, from 0x")
    assert all(line.endswith("the probe reports a mismatch in iterations [1, 2]") for line in (weight, graph))
    assert verdict == "the probe catches both, and only those"

"""The comparison of the arms on software devices: what each gives back, and that nothing of a launch outlives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import procfs, recorded
from checkpoint_executor.config import Deadlines
from checkpoint_executor.softgpu import CONTEXT_BYTES
from scripts.benchmarking import own_launch
from scripts.benchmarking.arms import Spec
from scripts.benchmarking.verbs import DriverAlone
from scripts.soaking.example import devices_of_its_own
from tests.support.executor_harness import REPOSITORY, run_script, wait_until

pytest.importorskip("torch")

SCRIPT = REPOSITORY / "scripts" / "bench_cycle.py"
MIB = 1 << 20
ARMS = ("nothing", "allocator", "allocator+nccl", "driver", "all")
#: 10 MiB of weights and 5 of KV cache.
SMALL = ("--device", "soft", "--gib", "0.01", "--kv-gib", "0.005", "--graphs", "1")
STAGING_BYTES = 1 * MIB


def cycles(document: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [cycle for launch in document["launches"] if launch["arm"] == arm for cycle in launch["cycles"]]


def test_every_arm_gives_back_what_it_should_and_changes_no_bit(tmp_path: Path) -> None:
    out = tmp_path / "arms.json"
    arguments = ("--arms", ",".join(ARMS), "--tensor-parallel-size", "2", "--launches", "1", "--cycles", "2")
    status, output, errors = run_script(SCRIPT, *SMALL, *arguments, "--out", str(out), timeout_s=110)
    assert status == 0, f"{output}\n{errors}"
    document: dict[str, Any] = json.loads(out.read_text())
    assert [launch["arm"] for launch in document["launches"]] == list(ARMS)
    for launch in document["launches"]:
        assert (launch["how"], launch["completed"], launch["left_processes"]) == ("completed", True, [])
        assert launch["empty_bytes"] == launch["after_bytes"] == [0, 0]
        assert [cycle["number"] for cycle in launch["cycles"]] == [0, 1]
        assert all(cycle["identical"] and cycle["weights_changed"] for cycle in launch["cycles"])
    assert all(cycle["down_s"] > 0 and cycle["up_s"] > 0 for arm in ARMS for cycle in cycles(document, arm))

    (awake,) = {tuple(cycle["used_awake_bytes"]) for cycle in cycles(document, "nothing")}
    # What no tag and no communicator has: the context, and the graph's results.
    rest = min(cycles(document, "allocator+nccl")[0]["used_asleep_bytes"])
    assert CONTEXT_BYTES <= rest < CONTEXT_BYTES + MIB
    assert min(awake) >= 15 * MIB + STAGING_BYTES + rest
    left = {
        "nothing": awake,
        "allocator": (rest + STAGING_BYTES,) * 2,
        "allocator+nccl": (rest,) * 2,
        "driver": (0, 0),
        "all": (0, 0),
    }
    states = {
        "nothing": "awake",
        "allocator": "allocator asleep",
        "allocator+nccl": "allocator asleep, communicator suspended",
        "driver": "checkpointed",
        "all": "checkpointed",
    }
    for arm in ARMS:
        for cycle in cycles(document, arm):
            assert tuple(cycle["used_asleep_bytes"]) == left[arm], arm
            assert cycle["states"] == [states[arm]] * 2
            rates = [len(cycle.get(name, ())) for name in ("copy_down_gb_s", "copy_up_gb_s")]
            assert rates == [0 if arm == "nothing" else 2] * 2, arm
    # The driver alone shares no memory among its ranks, and its row says why.
    (driver,) = [launch for launch in document["launches"] if launch["arm"] == "driver"]
    assert driver["communication"] == "socket"
    assert {tuple(cycle["used_awake_bytes"]) for cycle in driver["cycles"]} == {
        tuple(size - STAGING_BYTES for size in awake)
    }
    assert "over sockets" in output
    assert [summary["arm"] for summary in document["summaries"]] == list(ARMS)
    run = recorded.read(out.name, out.read_bytes())
    assert (run.kind, run.verdict, [way.way for way in run.ways]) == ("arms", "identical", list(ARMS))


def test_arms_that_start_together_count_what_is_their_own(tmp_path: Path) -> None:
    out = tmp_path / "arms.json"
    arguments = ("--arms", "all,nothing", "--together", "--launches", "1", "--cycles", "1", "--out", str(out))
    status, output, errors = run_script(SCRIPT, *SMALL, *arguments, timeout_s=100)
    assert status == 0, f"{output}\n{errors}"
    document = json.loads(out.read_text())
    others = cycles(document, "all")[0]["used_asleep_bytes"]
    assert min(others) > 15 * MIB
    everything, nothing = document["summaries"]
    assert (everything["left_bytes"], nothing["left_bytes"]) == ([0], others)
    assert document["launches"][-1]["after_bytes"] == [0]


def test_a_launch_that_takes_too_long_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    out = tmp_path / "arms.json"
    arguments = ("--arms", "nothing,allocator+nccl,all", "--launches", "1", "--limit-s", "0.3", "--out", str(out))
    status, output, errors = run_script(SCRIPT, *SMALL, *arguments, timeout_s=100)
    assert status == 1, f"{output}\n{errors}"
    document = json.loads(out.read_text())
    assert [launch["how"] for launch in document["launches"]] == ["cut off after 0.3 s"] * 2, errors
    assert all(launch["left_processes"] == [] for launch in document["launches"])
    assert "refused: one rank has no" in output
    assert "all, launch 1: cut off after 0.3 s" in output


def test_workers_that_the_driver_left_checkpointed_are_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[float] = []

    def fail(verbs: DriverAlone) -> None:
        assert verbs.states() == ["checkpointed"] * 2
        failed.append(time.monotonic())
        raise MemoryError("no room")

    monkeypatch.setattr(DriverAlone, "up", fail)
    with devices_of_its_own("soft", 64 * MIB) as devices:
        spec = Spec(
            front_door="own",
            arm="driver",
            communication="socket",
            device="soft",
            ranks=2,
            cycles=1,
            weights_bytes=MIB,
            graphs=1,
            soft_root=devices["soft_root"],
            soft_capacity_bytes=devices["soft_capacity_bytes"],
        )
        with pytest.raises(MemoryError, match="no room"):
            own_launch.run(spec, Untold())  # type: ignore[arg-type]
    # An orderly end would have waited for them as long as a shutdown may take.
    assert time.monotonic() - failed[0] < Deadlines().shutdown_s


class Untold:
    """Nobody is told, and it is always its turn."""

    def __call__(self, **facts: Any) -> None: ...

    def wait_turn(self) -> None: ...

    def cycle(self, **figures: Any) -> None: ...


def test_a_kill_loses_no_cycle_and_leaves_no_process(tmp_path: Path) -> None:
    out, marker = tmp_path / "arms.json", uuid.uuid4().hex
    run = subprocess.Popen(
        [sys.executable, str(SCRIPT), *SMALL, "--arms", "all", "--cycles", "100000", "--out", str(out)],
        env={**os.environ, "ARMS_TEST": marker},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def done() -> int:
        return len(cycles(json.loads(out.read_text()), "all")) if out.exists() else 0

    try:
        wait_until(lambda: done() >= 2, "two cycles", 60)
        assert len(marked(marker)) >= 4  # the warden, the launch, the helper and the worker
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not marked(marker), "the end of everything below")
    assert done() >= 2
    assert recorded.read(out.name, out.read_bytes()).verdict == "not finished"


def marked(marker: str) -> list[int]:
    """What lives with the marker in its environment."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and marker.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass  # it ended, or is not ours
    return [pid for pid in found if procfs.is_alive(pid)]

"""The loop of rollout and training, with kills: no iteration is lost and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.executor_harness import REPOSITORY, run_script

pytest.importorskip("torch")


def test_no_iteration_is_lost_when_the_engine_and_the_trainer_are_killed(tmp_path: Path) -> None:
    result_file, incidents_file = tmp_path / "result.json", tmp_path / "incidents.jsonl"
    status, output, errors = run_script(
        REPOSITORY / "scripts" / "rl_loop.py",
        *("--iterations", "4", "--kill-every", "2", "--seed", "3", "--versions", "4"),
        *("--json", str(result_file), "--incidents", str(incidents_file)),
        timeout_s=100,
    )
    assert status == 0, f"{output}\n{errors}"
    result = json.loads(result_file.read_text())
    assert (result["iterations"], result["completed"], result["lost"]) == (4, 4, 0)
    assert result["left_behind"] == []
    assert result["rollouts_whose_logits_differ"] == 0
    targets = [kill["target"] for kill in result["kills"]]
    assert len(targets) + result["kills_missed"] == 2
    assert result["restarts"] == sum(target != "trainer" for target in targets) == 1
    assert result["trainer_restarts"] == targets.count("trainer")
    assert len(incidents_file.read_text().splitlines()) == result["restarts"]
    assert set(result["seconds"]) >= {"start", "reference", "sleep", "train", "wake_weights", "copy", "rollout"}
    assert "software device" in output
    assert "iterations 4, completed 4, lost 0" in output

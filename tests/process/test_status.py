"""``checkpoint-executor status``: what a running executor tells without being asked."""

from __future__ import annotations

import json

import pytest

from checkpoint_executor import cli
from tests.support.executor_harness import SoftMachine


def read(machine: SoftMachine, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert cli.main(["status", "--json", "--runtime-dir", str(machine.runtime_base)]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_an_executor_is_listed_with_its_phase_and_last_report(
    machine: SoftMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read(machine, capsys) == []
    executor = machine.make(ranks=2)
    (awake,) = read(machine, capsys)
    assert (awake["front_door"], awake["model"], awake["phase"], awake["sleeping"]) == ("own", "RawWorker", "awake", [])
    assert awake["processes"] == executor.pids
    report = executor.sleep()
    (asleep,) = read(machine, capsys)
    assert (asleep["phase"], asleep["sleeping"]) == ("checkpointed", ["kv_cache", "weights"])
    assert isinstance(asleep["last_report"], dict)
    assert asleep["last_report"]["wall_s"] == report.wall_s
    executor.shutdown()
    assert read(machine, capsys) == []


def test_the_table_says_that_there_is_none(machine: SoftMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--runtime-dir", str(machine.runtime_base)]) == 0
    assert "no executor of this user is running" in capsys.readouterr().out

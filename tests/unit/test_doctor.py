"""The doctor without a machine: what it says, prints and ends with, for given facts and answers."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from checkpoint_executor import doctor, preflight
from checkpoint_executor.doctor import DoctorReport, ExitStatus, Options
from checkpoint_executor.facts import (
    DriverFacts,
    Facts,
    GpuFacts,
    HostFacts,
    ProcessFacts,
    StateQuery,
)
from checkpoint_executor.host_facts import Roots
from checkpoint_executor.probe_messages import ProbeDriver, ProbeState
from checkpoint_executor.report import CycleReport
from checkpoint_executor.self_test import SelfTestCycle, SelfTestReport, SelfTestSpec

GPU = GpuFacts("GPU-6a4c8e08", "NVIDIA H200", True, False, 0)
CLEAN = Facts(
    host=HostFacts(huge_pages="always"),
    driver=DriverFacts("580.159.04", True, "NVIDIA 580.159.04, CUDA 13.0"),
    gpus=(GPU, replace(GPU, uuid="GPU-0949b301")),
    front_door="own",
)
NOTED = replace(CLEAN, host=HostFacts(huge_pages="madvise"))
WARNED = replace(CLEAN, gpus=(replace(GPU, persistence=False),))
BLOCKED = replace(CLEAN, gpus=(replace(GPU, mig=True),))

CYCLE = SelfTestCycle(
    CycleReport("sleep", True, 0.5, device_bytes_before=(600 << 20,), device_bytes_after=(4 << 20,)),
    CycleReport("wake", True, 0.25, device_bytes_after=(600 << 20,)),
    identical=True,
)
PASSED = SelfTestReport("GPU-6a4c8e08", 3.0, 0, (CYCLE, CYCLE))
NOT_PASSED = replace(PASSED, problems=("cycle 1: the graph computed other bits",))


@pytest.fixture
def machine(tmp_path: Path) -> Roots:
    """A machine with a GPU, as far as its device files go."""
    roots = Roots(tmp_path / "proc", tmp_path / "sys", tmp_path)
    (tmp_path / "nvidia0").touch()
    return roots


class SelfTest:
    """Stands for the self-test, and notes that it was run."""

    def __init__(self, outcome: SelfTestReport) -> None:
        self._outcome = outcome
        self.ran: list[SelfTestSpec] = []

    def __call__(self, spec: SelfTestSpec) -> SelfTestReport:
        self.ran.append(spec)
        return self._outcome


def judge(facts: Facts, outcome: SelfTestReport | None = None) -> DoctorReport:
    """The report, with or without a self-test of this outcome."""
    if outcome is None:
        return doctor.judge(Options(), facts)
    return doctor.judge(Options(self_test=True), facts, SelfTest(outcome))


def printed(report: DoctorReport, width: int = 100) -> str:
    out = io.StringIO()
    doctor.print_report(report, Console(file=out, width=width))
    return out.getvalue()


# -- exit statuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "status"),
    [(CLEAN, 0), (NOTED, 0), (WARNED, 3), (BLOCKED, 4)],
    ids=["nothing", "notes", "warnings", "blockers"],
)
def test_the_worst_finding_decides(facts: Facts, status: int) -> None:
    report = judge(facts)
    assert report.exit_status == status
    assert report.worst is preflight.worst(report.findings)


def test_a_self_test_that_fails_outranks_warnings() -> None:
    assert judge(CLEAN, PASSED).exit_status is ExitStatus.OK
    assert judge(WARNED, PASSED).exit_status is ExitStatus.WARNINGS
    assert judge(WARNED, NOT_PASSED).exit_status is ExitStatus.SELF_TEST_FAILED


def test_no_self_test_where_something_forbids_it() -> None:
    test = SelfTest(PASSED)
    report = doctor.judge(Options(self_test=True), BLOCKED, test)
    assert report.exit_status is ExitStatus.BLOCKERS
    assert report.self_test is None
    assert test.ran == []
    assert "self-test not run" in printed(report)


def test_no_gpu_is_one_line_and_a_status_of_its_own(tmp_path: Path) -> None:
    report = doctor.examine(Options(), Roots(dev=tmp_path))
    assert report.exit_status is ExitStatus.NO_GPU
    text = printed(report)
    assert text.count("\n") == 1
    assert "no NVIDIA GPU" in text


@pytest.mark.parametrize("pid", [2**22 + 1, 0, -5])
def test_no_such_process_is_a_usage_error(machine: Roots, pid: int) -> None:
    report = doctor.examine(Options(pid=pid), machine)
    assert report.exit_status is ExitStatus.USAGE
    assert printed(report).strip() == f"doctor: no process {pid}"


def test_every_exit_status_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/preflight.md").read_text()
    for status in ExitStatus:
        assert f"| {int(status)} |" in text


# -- output --------------------------------------------------------------------------------------


def test_people_get_what_why_and_what_to_do() -> None:
    report = judge(BLOCKED)
    text = " ".join(printed(report).split())
    assert "NVIDIA 580.159.04, CUDA 13.0, open kernel module; 1 x NVIDIA H200" in text
    [finding] = report.findings
    for part in (finding.seen, finding.why, finding.do):
        assert part in text
    assert "1 blocker(s)" in text
    assert "exit status 4" in text


def test_text_from_a_machine_is_not_markup() -> None:
    text = printed(judge(replace(CLEAN, environ={"CUDA_INJECTION64_PATH": "/opt/[bold]x[/bold].so"})), width=200)
    assert "/opt/[bold]x[/bold].so" in text


def test_the_self_test_shows_times_and_mib() -> None:
    text = printed(judge(CLEAN, PASSED))
    for figure in ("0.500", "0.250", "600.0", "4.0", "identical"):
        assert figure in text
    assert "self-test passed" in text
    assert "the graph computed other bits" in printed(judge(CLEAN, NOT_PASSED))


def test_machines_get_everything() -> None:
    report = judge(WARNED, PASSED)
    read = json.loads(report.to_json())
    assert read["exit_status"] == 3
    assert read["worst"] == "warning"
    assert read["findings"][0]["check"] == "persistence_mode"
    assert set(read["findings"][0]) == {"check", "severity", "about", "seen", "why", "do", "source"}
    assert read["checks"] == list(preflight.CHECKS)
    assert read["facts"]["gpus"][0]["persistence"] is False
    assert read["self_test"]["cycles"][1]["identical"] is True
    assert msgspec.json.decode(report.to_json(), type=DoctorReport) == report


def test_json_goes_to_stdout_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    report = DoctorReport(ExitStatus.NO_GPU, "cuda", "no NVIDIA GPU")

    def examine(options: Options) -> DoctorReport:
        return report

    monkeypatch.setattr(doctor, "examine", examine)
    assert doctor.run(parse("--json", "--self-test")) == 5
    assert json.loads(capfdbinary.readouterr().out) == json.loads(report.to_json())


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(arguments)


def test_arguments_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def examine(options: Options) -> DoctorReport:
        seen.append(options)
        return DoctorReport(ExitStatus.NO_GPU, "cuda", "none")

    monkeypatch.setattr(doctor, "examine", examine)
    doctor.run(parse())
    doctor.run(parse("--device", "soft", "--pid", "12", "--self-test", "--longest-sleep", "60"))
    assert seen == [Options(), Options("soft", 12, True, 60.0)]
    for wrong in (["--pid", "x"], ["--longest-sleep", "-1"], ["--longest-sleep", "nan"], ["--device", "auto"]):
        with pytest.raises(SystemExit) as usage:
            parse(*wrong)
        assert usage.value.code == ExitStatus.USAGE


# -- the probe's answers -------------------------------------------------------------------------


def lines(*answers: Any) -> bytes:
    return b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)


def test_answers_of_a_probe_that_was_killed_in_the_middle_are_kept() -> None:
    driver = ProbeDriver(ProcessFacts(7), "NVIDIA 580.159.04, CUDA 13.0")
    state = ProbeState(1, StateQuery(state="running"))
    whole = lines(driver, state, ProbeState(2, StateQuery(code=304)))
    assert doctor._read_answers(whole) == (driver, {1: StateQuery(state="running"), 2: StateQuery(code=304)})
    assert doctor._read_answers(whole[:-5]) == (driver, {1: StateQuery(state="running")})
    assert doctor._read_answers(b"") == (None, {})
    assert doctor._read_answers(b"Traceback (most recent call last):\n") == (None, {})

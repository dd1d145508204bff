"""The command line: arguments, what a person reads, and exit statuses. The demo's run itself is a process test."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from checkpoint_executor import __version__, cli, demo

_REPOSITORY = Path(__file__).resolve().parents[2]


def make_cycle(*, ranks: int = 2, partial: bool = False, asleep: int = 0) -> demo.Cycle:
    mib = 1 << 20
    names = {"sleep": ["lock", "checkpoint"], "wake weights" if partial else "wake": ["restore", "wake_allocator"]}
    if partial:
        names["wake kv_cache"] = ["wake_allocator"]
    return demo.Cycle(
        sleep_s=0.25,
        wake_s=0.125,
        partial=partial,
        stages=tuple(
            demo.StageTimes(operation, name, 0.002, (0.001,) * ranks)
            for operation, stages in names.items()
            for name in stages
        ),
        device_bytes=demo.DeviceBytes(
            (5 * mib,) * ranks, (asleep,) * ranks, (5 * mib,) * ranks, (3 * mib,) * ranks if partial else None
        ),
        identical=True,
        token_sha256=demo.BeforeAfter("t", "t"),
        logits_sha256=demo.BeforeAfter("l", "l"),
        distinct_tokens=42,
        weights_identical=True,
        addresses_identical=True,
    )


def make_report(**changes: Any) -> demo.DemoReport:
    ranks = changes.get("tensor_parallel_size", 2)
    facts: dict[str, Any] = {
        "device": "soft",
        "device_note": demo.device_note("soft"),
        "tensor_parallel_size": ranks,
        "communication": "suspend",
        "start_s": 1.0,
        "cycles": (make_cycle(ranks=ranks), make_cycle(ranks=ranks, partial=True)),
        "empty_device_bytes": (0,) * ranks,
        "closed_device_bytes": (0,) * ranks,
        "left_behind": (),
        "problems": (),
        "passed": True,
        "environment": {},
    }
    return demo.DemoReport(**{**facts, **changes})


def shown(report: demo.DemoReport) -> str:
    console = Console(file=io.StringIO(), width=100)
    cli.print_demo(report, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def end_with(report: demo.DemoReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the demo by one that has this to report."""

    def run(options: demo.DemoOptions, audience: demo.Audience | None = None) -> demo.DemoReport:
        return report

    monkeypatch.setattr(demo, "run", run)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[demo.DemoOptions]:
    """Replaces the demo by one that only says what it was asked for, and passes."""
    options: list[demo.DemoOptions] = []

    def run(asked_for: demo.DemoOptions, audience: demo.Audience | None = None) -> demo.DemoReport:
        assert audience is not None
        with audience.during("decoding", lambda: "awake"):
            pass
        audience.cycle_done(1, make_cycle())
        options.append(asked_for)
        return make_report(tensor_parallel_size=asked_for.tensor_parallel_size)

    monkeypatch.setattr(demo, "run", run)
    return options


# -- arguments -----------------------------------------------------------------------------------


def test_version_needs_nothing_heavy() -> None:
    code = (
        "import sys\nfrom checkpoint_executor import cli\n"
        "try:\n    cli.main(['--version'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'zmq', 'cuda', 'psutil', 'checkpoint_executor.executor'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"checkpoint-executor {__version__}", "[]"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["demo", "--cycles", "0"],
        ["demo", "--cycles", "many"],
        ["demo", "--tensor-parallel-size", "-1"],
        ["demo", "--device", "tpu"],
        ["demo", "--weights-gib", "-1"],
        ["demo", "--weights-gib", "inf"],
        ["demo", "--json", "/no/such/directory/file.json"],
        ["demo", "--json", "/"],
    ],
)
def test_a_usage_error_ends_with_2_before_anything_runs(
    arguments: list[str], asked: list[demo.DemoOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == cli.EXIT_USAGE
    assert "usage:" in capsys.readouterr().err
    assert asked == []


def test_arguments_reach_the_demo(asked: list[demo.DemoOptions]) -> None:
    text = "demo --tensor-parallel-size 4 --cycles 7 --device soft --communication socket --weights-gib 1.5"
    assert cli.main(text.split()) == cli.EXIT_OK
    assert asked == [demo.DemoOptions(4, 7, "soft", "socket", 1.5)]
    cli.main(["demo"])
    assert asked[1] == demo.DemoOptions()


def test_without_torch_it_says_what_to_install(
    asked: list[demo.DemoOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    assert cli.main(["demo"]) == cli.EXIT_USAGE
    assert "pip install 'checkpoint-executor[torch]'" in capsys.readouterr().err
    assert asked == []


# -- exit statuses and files ---------------------------------------------------------------------


def test_the_status_is_0_only_if_the_demo_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(make_report(), monkeypatch)
    assert cli.main(["demo"]) == cli.EXIT_OK
    end_with(make_report(passed=False, problems=("it broke",)), monkeypatch)
    assert cli.main(["demo"]) == cli.EXIT_FAILED


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: demo.DemoOptions, audience: demo.Audience) -> demo.DemoReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == cli.EXIT_INTERRUPTED


def test_the_json_file_is_written_also_when_the_demo_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = make_report(passed=False, problems=("it broke",))
    end_with(report, monkeypatch)
    file = tmp_path / "result.json"
    assert cli.main(["demo", "--json", str(file)]) == cli.EXIT_FAILED
    assert msgspec.convert(json.loads(file.read_bytes()), demo.DemoReport) == report


def test_progress_goes_to_stderr_and_tables_to_stdout(
    asked: list[demo.DemoOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["demo"])
    out, err = capsys.readouterr()
    assert "decoding" in err
    assert "cycle 1: slept in 0.250 s, woke in 0.125 s, identical" in err
    assert "Device memory" in out
    assert "decoding" not in out


def test_a_terminal_sees_the_line_that_moves() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = cli._Progress(console)
    with progress.during("cycle 1: sleep", lambda: "suspending [1]"):
        pass
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"cycle 1: sleep.*suspending \[1\].* s", console.file.getvalue())


# -- what a person reads -------------------------------------------------------------------------


def test_the_software_device_is_called_by_its_name() -> None:
    text = shown(make_report())
    assert text.startswith("software device: no GPU was used\n")
    assert "PASSED on software device" in text


def test_memory_and_stage_times_are_shown_by_cycle_and_rank() -> None:
    text = shown(make_report())
    memory, _, stages = text.partition("Time of each stage")
    assert re.search(r"1 +0 +5\.00 +0 +- +5\.00", memory)
    assert re.search(r"2 +0 +5\.00 +0 +3\.00 +5\.00", memory)
    assert re.search(r"sleep +lock +2\.00 +2\.00 +1\.00", stages)
    # A wake by tag stands in the same rows as a whole one; its second half has its own.
    assert re.search(r"wake +restore +2\.00 +2\.00 +1\.00", stages)
    assert re.search(r"wake kv_cache +wake_allocator +- +2\.00", stages)
    assert re.search(r"sleep +whole call +250\.0 +250\.0", stages)


def test_the_stage_table_fits_into_80_characters() -> None:
    console = Console(file=io.StringIO(), width=80)
    stages = (demo.StageTimes("wake kv_cache", "suspend_communicators", 1.234567, (1.2,)),)
    cycle = msgspec.structs.replace(make_cycle(), stages=stages, sleep_s=12.345)
    cli.print_demo(make_report(cycles=(cycle,) * 3), console)
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue()


def test_many_cycles_are_summed_up() -> None:
    text = shown(make_report(cycles=(make_cycle(),) * 20))
    assert "median" in text
    assert "cycle 7" not in text
    assert re.search(r"20 +0 +5\.00", text)


def test_a_gpu_is_judged_beyond_its_empty_reading() -> None:
    mib = 1 << 20
    cycle = msgspec.structs.replace(
        make_cycle(ranks=1), device_bytes=demo.DeviceBytes((905 * mib,), (609 * mib,), (905 * mib,))
    )
    report = make_report(
        device="cuda",
        device_note=demo.device_note("cuda"),
        tensor_parallel_size=1,
        cycles=(cycle,),
        empty_device_bytes=(605 * mib,),
    )
    text = shown(report)
    assert "software" not in text
    assert re.search(r"1 +0 +300\.00 +4\.00 +300\.00", text)
    assert "at most 4.00 MiB beyond an empty" in text


def test_every_problem_is_listed() -> None:
    text = shown(make_report(passed=False, cycles=(), problems=("the first [thing]", "the second")))
    assert "FAILED" in text
    assert "  - the first [thing]\n  - the second\n" in text


# -- what the user can set right -----------------------------------------------------------------


def test_status_looks_where_the_engines_are_told_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHECKPOINT_EXECUTOR_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["status"]) == 0
    assert "no executor of this user is running below" in capsys.readouterr().out
    folder = tmp_path / f"checkpoint-executor-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    assert cli.main(["status"]) == 2
    error = capsys.readouterr().err
    assert "must be a directory of our own with mode 0700" in error
    assert "Traceback" not in error

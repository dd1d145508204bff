"""I/O. ``checkpoint-executor doctor``: the preflight from the command line, for a machine or a running process.

It collects facts (``host_facts.py``, and a helper of its own that asks the driver), has them judged (``preflight.py``)
and prints what was found. It changes nothing, on the machine or in the process; only ``--self-test`` starts something.

Exit statuses are :class:`ExitStatus`; the worst finding decides.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import msgspec
import psutil
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoint_executor import host_facts, preflight, processes, procfs, self_test, softgpu
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.facts import Facts, ProcessFacts, StateQuery
from checkpoint_executor.host_facts import MACHINE, Roots
from checkpoint_executor.messages import Role, Target
from checkpoint_executor.preflight import Finding, Severity
from checkpoint_executor.probe_messages import ProbeDriver, ProbeRequest, ProbeState
from checkpoint_executor.self_test import SelfTestReport, SelfTestSpec

__all__ = ["DoctorReport", "ExitStatus", "Options", "add_arguments", "examine", "judge", "print_report", "probe", "run"]

#: A state query takes a millisecond, opening the driver a quarter of a second, importing the bindings a second. A
#: query on a process that somebody is checkpointing right now waits for that: 30 s is the deadline of such a stage.
PROBE_TIMEOUT_S = 40.0


class ExitStatus(IntEnum):
    """What ``doctor`` ends with."""

    OK = 0  #: nothing was found, or notes only
    FAILED = 1  #: doctor itself failed (Python's own status)
    USAGE = 2  #: wrong arguments, no such process, or no torch for the self-test
    WARNINGS = 3  #: the worst finding is a warning
    BLOCKERS = 4  #: the worst finding is a blocker
    NO_GPU = 5  #: this machine has no NVIDIA GPU
    SELF_TEST_FAILED = 6  #: no blocker was found, but the self-test did not pass


_BY_SEVERITY = {Severity.NOTE: ExitStatus.OK, Severity.WARNING: ExitStatus.WARNINGS}
_BY_SEVERITY[Severity.BLOCKER] = ExitStatus.BLOCKERS


class Options(Struct, frozen=True):
    """What to look at.

    Attributes:
        device_kind: ``"cuda"`` or ``"soft"``. pid: a running process, instead of the machine alone.
        self_test: whether to run it, if nothing that was found forbids it.
        longest_sleep_s: how long sleeps may last, where somebody knows.
    """

    device_kind: str = "cuda"
    pid: int | None = None
    self_test: bool = False
    longest_sleep_s: float | None = None


class DoctorReport(Struct, frozen=True):
    """What ``--json`` prints.

    Attributes:
        exit_status: of the command. problem: why nothing could be looked at.
        findings: the worst first. checks: names of the checks that were made.
        facts: what the findings rest on.
        wants_self_test: whether it was asked for. self_test: if it was run; a blocker forbids it.
    """

    exit_status: ExitStatus
    device_kind: str
    problem: str | None = None
    worst: Severity | None = None
    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()
    facts: Facts | None = None
    wants_self_test: bool = False
    self_test: SelfTestReport | None = None

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


# -- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of ``doctor``."""
    parser.description = (
        "Look for what stands in the way of a sleep: on this machine, or in a running process. Nothing is changed. "
        "Exit "
        "status: 0 nothing or notes, 3 warnings, 4 blockers, 5 no NVIDIA GPU, 6 the self-test failed, 2 usage."
    )
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="a running CUDA process to look at, or one whose children use CUDA"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, facts included")
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="also put a small process with a graph to sleep and wake it, twice (needs torch; not with blockers)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "soft"),
        default="cuda",
        help="cuda, or the software device, which needs no GPU (default %(default)s)",
    )
    parser.add_argument(
        "--longest-sleep",
        type=_seconds,
        metavar="SECONDS",
        help="how long sleeps will last at most; timeouts of others are compared with it (default: without limit)",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    options = Options(args.device, args.pid, args.self_test, args.longest_sleep)
    out = Console()
    if not args.json and options.self_test:
        Console(stderr=True).print("looking, then running the self-test (about ten seconds) ...", highlight=False)
    report = examine(options)
    if args.json:
        sys.stdout.buffer.write(report.to_json())
        sys.stdout.buffer.flush()
    else:
        print_report(report, out)
    return int(report.exit_status)


def examine(options: Options, roots: Roots = MACHINE) -> DoctorReport:
    """Look, and judge."""
    kind = options.device_kind
    if kind == "cuda" and not host_facts.has_gpu(roots):
        problem = "no NVIDIA GPU on this machine: there is nothing to check (--device soft needs none)"
        return DoctorReport(ExitStatus.NO_GPU, kind, problem)
    if options.self_test and importlib.util.find_spec("torch") is None:
        problem = "the self-test needs torch: pip install 'checkpoint-executor[torch]'"
        return DoctorReport(ExitStatus.USAGE, kind, problem)
    try:
        facts = _collect(options, roots)
    except ProcessLookupError as error:
        return DoctorReport(ExitStatus.USAGE, kind, str(error))
    return judge(options, facts)


def judge(
    options: Options, facts: Facts, run_self_test: Callable[[SelfTestSpec], SelfTestReport] = self_test.run
) -> DoctorReport:
    """The findings, the self-test if it was asked for and nothing forbids it, and the exit status."""
    findings = preflight.check_start(facts)
    worst = preflight.worst(findings)
    status = ExitStatus.OK if worst is None else _BY_SEVERITY[worst]
    tested: SelfTestReport | None = None
    # A blocker may be one that hangs the host.
    if options.self_test and worst is not Severity.BLOCKER:
        tested = run_self_test(SelfTestSpec(facts.device_kind))
        if not tested.passed:
            status = ExitStatus.SELF_TEST_FAILED
    return DoctorReport(
        status,
        facts.device_kind,
        worst=worst,
        findings=findings,
        checks=tuple(check.name for check in preflight.CHECKS.values() if facts.device_kind in check.device_kinds),
        facts=facts,
        wants_self_test=options.self_test,
        self_test=tested,
    )


# -- facts ---------------------------------------------------------------------------------------


def _collect(options: Options, roots: Roots) -> Facts:
    kind = options.device_kind
    pids = _targets_of(options.pid, kind, roots) if options.pid is not None else []
    specs = [host_facts.spec_of(pid, roots) for pid in pids]
    ours = next((spec for spec in specs if spec is not None), None)
    driver, queries = probe(kind, pids)
    targets = [
        host_facts.collect_target(pid, rank=spec.rank if spec else None, query=queries.get(pid), roots=roots)
        for pid, spec in zip(pids, specs, strict=True)
    ]
    return host_facts.collect(
        targets,
        device_kind=kind,
        helper=_helper_of(ours, roots) or driver.helper,
        driver=host_facts.collect_driver(
            driver.helper.libcuda, description=driver.description, problem=driver.problem, roots=roots
        ),
        communication=ours.communication if ours else None,
        ranks=ours.world_size if ours else None,
        front_door="own" if ours else None,
        longest_sleep_s=options.longest_sleep_s,
        roots=roots,
    )


def _targets_of(pid: int, kind: str, roots: Roots) -> list[int]:
    """The process itself if it uses the device, or else those below it that do.

    Raises:
        ProcessLookupError: no such process.
    """
    if _uses_device(pid, kind, roots):
        return [pid]
    try:
        family = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except (psutil.NoSuchProcess, ValueError):  # psutil's word for a negative number
        raise ProcessLookupError(f"no process {pid}") from None
    using = []
    for child in family:
        try:
            if _uses_device(child, kind, roots):
                using.append(child)
        except ProcessLookupError:
            pass  # it ended meanwhile
    return sorted(using) or [pid]


def _uses_device(pid: int, kind: str, roots: Roots) -> bool:
    spec = host_facts.spec_of(pid, roots)
    if spec is not None:
        return spec.role is Role.WORKER  # a helper has libcuda too, and holds nothing
    return kind == "cuda" and host_facts.collect_target(pid, roots=roots).libcuda is not None


def _helper_of(spec: ChildSpec | None, roots: Roots) -> ProcessFacts | None:
    """The helper that a worker of ours was told of, if it is there."""
    if spec is None or not spec.helper_pid:
        return None
    try:
        facts = host_facts.collect_target(spec.helper_pid, roots=roots)
    except ProcessLookupError:
        return None
    theirs = host_facts.spec_of(spec.helper_pid, roots)
    return facts if theirs is not None and theirs.role is Role.HELPER else None


def probe(
    kind: str, pids: Iterable[int], timeout_s: float = PROBE_TIMEOUT_S
) -> tuple[ProbeDriver, dict[int, StateQuery]]:
    """Start a helper that opens the driver and asks it about these processes, each once.

    Stopped processes and thread ids are not asked about: the one would hang, the other lose its process.

    Returns:
        How the driver was opened, and the answers by pid.
    """
    targets = tuple(
        Target(rank, pid, procfs.start_time(pid), "")
        for rank, pid in enumerate(pids)
        if procfs.thread_group_leader(pid) == pid and not procfs.is_stopped(pid)
    )
    request = ProbeRequest(kind, str(softgpu.default_root()), targets)
    command = [sys.executable, "-P", "-m", "checkpoint_executor.helper.probe", msgspec.json.encode(request).decode()]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=processes.child_environment(os.environ, {}),
    )
    timed_out = False
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        child.kill()
        output, errors = child.communicate()
    except BaseException:
        child.kill()
        child.communicate()
        raise
    driver, answers = _read_answers(output)
    if driver is None:
        said = errors.decode(errors="replace").strip().splitlines()[-1:] or [f"status {child.returncode}"]
        problem = f"no answer within {timeout_s:g} s" if timed_out else said[0]
        driver = ProbeDriver(ProcessFacts(child.pid), problem=problem)
    if timed_out:
        answers |= {target.pid: StateQuery(timed_out=True) for target in targets if target.pid not in answers}
    return driver, answers


def _read_answers(output: bytes) -> tuple[ProbeDriver | None, dict[int, StateQuery]]:
    driver: ProbeDriver | None = None
    answers: dict[int, StateQuery] = {}
    for line in output.splitlines():
        try:
            answer = msgspec.json.decode(line, type=ProbeDriver | ProbeState)
        except msgspec.DecodeError:
            continue  # the last line of one that was killed
        if isinstance(answer, ProbeDriver):
            driver = answer
        else:
            answers[answer.pid] = answer.query
    return driver, answers


# -- for people ----------------------------------------------------------------------------------

_STYLES = {Severity.BLOCKER: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def print_report(report: DoctorReport, console: Console) -> None:
    """The report as a table and a verdict; one line if there was nothing to look at."""
    if report.facts is None:
        console.print(Text(f"doctor: {report.problem}"), soft_wrap=True)
        return
    for line in _headlines(report.facts):
        console.print(Text(line), soft_wrap=True)
    if report.findings:
        console.print(_findings_table(report.findings))
    if report.self_test is not None:
        _print_self_test(report.self_test, report.device_kind, console)
    console.print(_verdict(report))


def _headlines(facts: Facts) -> list[str]:
    if facts.device_kind == "soft":
        lines = ["software device: no GPU was looked at"]
    else:
        names: dict[str, int] = {}
        for gpu in facts.gpus:
            names[gpu.name] = names.get(gpu.name, 0) + 1
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU that NVML shows"
        module = {True: ", open kernel module", False: ", proprietary kernel module", None: ""}
        driver = facts.driver.description or f"NVIDIA {facts.driver.version or 'driver of unknown version'}"
        lines = [f"{driver}{module[facts.driver.open_module]}; {gpus}"]
    for target in facts.targets:
        query = target.query
        state = query.state if query is not None and query.state is not None else "state not known"
        lines.append(f"{target.label}: {state}")
    return lines


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("about", overflow="fold", max_width=20)
    table.add_column("what was seen, why it matters, and what to do")
    for finding in findings:
        style = _STYLES[finding.severity]
        text = Text.assemble(
            (f"{finding.seen}\n", "bold"), f"{finding.why}\n", (f"-> {finding.do}", "green"), f" [{finding.check}]"
        )
        table.add_row(Text(finding.severity.value, style=style), Text(finding.about), text)
    return table


def _print_self_test(report: SelfTestReport, kind: str, console: Console) -> None:
    where = "the software device" if kind == "soft" else report.device or "the GPU"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title=f"Self-test on {where}")
    for name in ("cycle", "sleep s", "wake s", "awake MiB", "asleep MiB", "woken MiB", "graph"):
        table.add_column(name, justify="right")
    for number, cycle in enumerate(report.cycles, 1):
        table.add_row(
            str(number),
            f"{cycle.sleep.wall_s:.3f}",
            f"{cycle.wake.wall_s:.3f}",
            _mib(cycle.sleep.device_bytes_before, report.empty_bytes),
            _mib(cycle.sleep.device_bytes_after, report.empty_bytes),
            _mib(cycle.wake.device_bytes_after, report.empty_bytes),
            "identical" if cycle.identical else "DIFFERENT",
        )
    if report.cycles:
        console.print(table)
    for problem in report.problems:
        console.print(Text(f"self-test: {problem}", style="bold red"), soft_wrap=True)


def _mib(readings: Sequence[int], empty_bytes: int) -> str:
    return f"{(readings[0] - empty_bytes) / (1 << 20):.1f}" if readings else "-"


def _verdict(report: DoctorReport) -> Text:
    counts = {severity: sum(f.severity is severity for f in report.findings) for severity in reversed(Severity)}
    found = ", ".join(f"{count} {severity.value}(s)" for severity, count in counts.items() if count) or "nothing found"
    tested = "; self-test not run, because of a blocker" if report.wants_self_test else ""
    if report.self_test is not None:
        tested = "; self-test passed" if report.self_test.passed else "; self-test FAILED"
    style = {ExitStatus.OK: "bold green", ExitStatus.WARNINGS: "bold yellow"}.get(report.exit_status, "bold red")
    return Text(f"{len(report.checks)} checks: {found}{tested} (exit status {int(report.exit_status)})", style=style)


def _main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="checkpoint-executor doctor")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(_main())

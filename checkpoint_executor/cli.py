"""I/O. The command line: arguments in, tables and an exit status out.

Each subcommand is a parser with a ``run`` of its own; the logic is elsewhere (``demo.py``) and returns data. Tables go
to stdout, progress to stderr, so that either can be sent elsewhere. Imports of what a subcommand needs wait until it
runs: ``--version`` and ``--help`` answer at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from checkpoint_executor import __version__
from checkpoint_executor.errors import ConfigError

if TYPE_CHECKING:
    from checkpoint_executor.demo import Cycle, DemoReport

__all__ = ["main"]

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

#: More cycles than this are summed up instead of having a column each.
_MAX_CYCLE_COLUMNS = 4

#: Narrow: four columns of times fit into 80 characters.
_TABLE_STYLE: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ConfigError as error:
        # What the user can set right says how by itself; a traceback would only hide it.
        Console(stderr=True).print(f"checkpoint-executor: {error}", style="red", markup=False, soft_wrap=True)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkpoint-executor", description="Put tensor-parallel workers to sleep so that the GPU is empty."
    )
    parser.add_argument("--version", action="version", version=f"checkpoint-executor {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_LateParser)
    _add_demo(commands.add_parser("demo", help="sleep and wake an example model, and compare what it decodes"))
    _add_status(commands.add_parser("status", help="list this user's running executors, without asking their workers"))
    commands.add_parser("doctor", help="look for what stands in the way of a sleep").fill = _fill_doctor
    commands.add_parser("report", help="turn recorded runs into a page and pictures").fill = _fill_report
    return parser


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the running executors of this user with their phase and last report. Reads files that the executors "
        "write: no worker is called, so it answers while they are checkpointed. Exit status 0, also if there is none."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        default=os.environ.get("CHECKPOINT_EXECUTOR_RUNTIME_DIR") or None,
        help="where they make their directories (default: CHECKPOINT_EXECUTOR_RUNTIME_DIR, or as they do)",
    )
    parser.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    import msgspec

    from checkpoint_executor.status import read_all

    found = read_all(args.runtime_dir)
    out = Console()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())  # noqa: T201 - data, not for a terminal
        return EXIT_OK
    table = Table("pid", "front door", "model", "phase", "for", "asleep", "last", title="Executors", **_TABLE_STYLE)
    for status in found:
        report = status.last_report
        table.add_row(
            str(status.pid),
            status.front_door,
            escape(status.model),
            status.phase,
            f"{time.time() - status.since:.0f} s",
            ", ".join(status.sleeping) or "-",
            f"{report.operation} {report.wall_s:.2f} s" if report else "-",
        )
    where = escape(args.runtime_dir or tempfile.gettempdir())
    out.print(table if found else f"no executor of this user is running below {where}")
    return EXIT_OK


class _LateParser(argparse.ArgumentParser):
    """A subcommand's parser that learns its arguments when it is used, because their module imports a lot."""

    fill: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it is overloaded there, for types only
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        if self.fill is not None:
            self.fill(self)
        return super().parse_known_args(args, namespace)


def _fill_doctor(parser: argparse.ArgumentParser) -> None:
    from checkpoint_executor import doctor

    doctor.add_arguments(parser)
    parser.set_defaults(run=doctor.run)


def _fill_report(parser: argparse.ArgumentParser) -> None:
    from checkpoint_executor import report_command

    report_command.add_arguments(parser)
    parser.set_defaults(run=report_command.run)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start the example model, decode, put it to sleep, wake it, decode again, and compare. Exit status 0 only if "
        "every cycle was identical, the devices were empty while asleep, and nothing was left behind."
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=_positive,
        default=1,
        metavar="N",
        help="number of ranks; one device each (default %(default)s)",
    )
    parser.add_argument(
        "--cycles",
        type=_positive,
        default=3,
        metavar="K",
        help="sleeps and wakes; the last wakes weights first, then the KV cache (default %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "soft", "cuda"),
        default="auto",
        help="auto: CUDA if this machine has an NVIDIA GPU, else the software device (default %(default)s)",
    )
    parser.add_argument(
        "--communication",
        choices=("suspend", "socket"),
        default="suspend",
        help="suspend: NCCL gives its memory back; socket: it shares none (default %(default)s)",
    )
    parser.add_argument(
        "--weights-gib",
        type=_not_negative,
        default=0.0,
        metavar="GIB",
        help="more weights for each rank, compared byte by byte after every wake (default none)",
    )
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write everything measured to FILE")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    out, progress = Console(), Console(stderr=True)
    if importlib.util.find_spec("torch") is None:
        progress.print("The example model needs torch: pip install 'checkpoint-executor\\[torch]'")
        return EXIT_USAGE

    from checkpoint_executor import demo

    options = demo.DemoOptions(
        tensor_parallel_size=args.tensor_parallel_size,
        cycles=args.cycles,
        device=args.device,
        communication=args.communication,
        weights_gib=args.weights_gib,
    )
    report = demo.run(options, _Progress(progress))
    # First, so that a full disk costs the file and not the result.
    print_demo(report, out)
    if args.json is not None:
        try:
            args.json.write_bytes(report.to_json())
        except OSError as error:
            progress.print(f"{args.json} could not be written: {error.strerror}", markup=False, highlight=False)
            return EXIT_FAILED
    return EXIT_OK if report.passed else EXIT_FAILED


class _Progress:
    """Shows on stderr what the demo is at: a line that moves on a terminal, one plain line each otherwise."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def during(self, what: str, detail: Callable[[], str] | None = None) -> Iterator[None]:
        begun = time.monotonic()

        def line() -> Spinner:
            now = f" [dim]{escape(detail())}[/dim]" if detail is not None else ""
            spinner.update(text=f"{escape(what)}{now} {time.monotonic() - begun:.1f} s")
            return spinner

        if not self._console.is_terminal:
            self._console.print(what, highlight=False)
            yield
            return
        spinner = Spinner("dots")
        with Live(get_renderable=line, console=self._console, transient=True, refresh_per_second=12):
            yield

    def cycle_done(self, number: int, cycle: Cycle) -> None:
        verdict = "identical" if cycle.identical else "[bold red]NOT identical[/bold red]"
        self._console.print(
            f"cycle {number}: slept in {cycle.sleep_s:.3f} s, woke in {cycle.wake_s:.3f} s, {verdict}", highlight=False
        )


# -- what a person reads -------------------------------------------------------------------------


def print_demo(report: DemoReport, console: Console) -> None:
    """The report as tables and a verdict."""
    style = "bold yellow" if report.device == "soft" else "bold"
    console.print(f"[{style}]{report.device_note}[/{style}]", highlight=False)
    if report.cycles:
        console.print(_memory_table(report))
        console.print(_stage_table(report.cycles))
    if not report.passed:
        console.print("[bold red]FAILED[/bold red]")
        for problem in report.problems:
            console.print(f"  - {problem}", markup=False, highlight=False)
        return
    tokens = report.cycles[-1].distinct_tokens
    ranks = report.tensor_parallel_size
    # Over all cycles, whether or not the table has room for them.
    asleep = max(
        used - empty
        for cycle in report.cycles
        for used, empty in zip(cycle.device_bytes.asleep, report.empty_device_bytes, strict=True)
    )
    left = "0 bytes" if asleep <= 0 else f"at most {_mib(asleep)} MiB beyond an empty device"
    console.print(
        f"[bold green]PASSED[/bold green] on {report.device_note.partition(':')[0]}: {ranks} rank(s), "
        f"{len(report.cycles)} cycle(s). Tokens ({tokens} distinct) and the bits of all logits are the same after "
        f"every wake; asleep each device held {left}; nothing was left behind.",
        highlight=False,
    )


def _memory_table(report: DemoReport) -> Table:
    """Bytes by cycle and rank."""
    by_tag = any(cycle.device_bytes.weights_woken for cycle in report.cycles)
    where = "the software device's ledger" if report.device == "soft" else "NVML, beyond the empty device"
    table = Table(title=f"Device memory, MiB ({where})", **_TABLE_STYLE)
    names = ["awake", "asleep", *(["weights awake"] if by_tag else []), "woken"]
    for name in ("cycle", "rank", *names):
        table.add_column(name, justify="right")
    for number, cycle in _shown(report.cycles):
        readings = cycle.device_bytes
        columns = [readings.awake, readings.asleep, *([readings.weights_woken] if by_tag else []), readings.woken]
        for rank in range(report.tensor_parallel_size):
            empty = report.empty_device_bytes[rank]
            cells = [_mib(column[rank] - empty) if column and rank < len(column) else "-" for column in columns]
            table.add_row(
                str(number) if rank == 0 else "",
                str(rank),
                *cells,
                end_section=rank == report.tensor_parallel_size - 1,
            )
    return table


def _stage_table(cycles: Sequence[Cycle]) -> Table:
    """Stage times: wall time of each cycle if there are few, median and worst otherwise."""
    table = Table(title="Time of each stage, ms (all ranks together)", **_TABLE_STYLE)
    table.add_column("", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    few = len(cycles) <= _MAX_CYCLE_COLUMNS
    for name in [f"cycle {n}" for n, _ in enumerate(cycles, 1)] if few else ["median", "worst"]:
        table.add_column(name, justify="right")
    table.add_column("slowest\nrank", justify="right")
    rows = _stage_rows(cycles)
    previous = ""
    for (operation, stage), (walls, ranks) in rows.items():
        if operation != previous and previous:
            table.add_section()
        known = [wall for wall in walls if wall is not None]
        cells = [_ms(w) for w in walls] if few else [_ms(statistics.median(known)), _ms(max(known))]
        table.add_row(operation if operation != previous else "", stage, *cells, _ms(max(ranks)))
        previous = operation
    table.add_section()
    for name, seconds in (("sleep", [c.sleep_s for c in cycles]), ("wake", [c.wake_s for c in cycles])):
        cells = [_ms(s) for s in seconds] if few else [_ms(statistics.median(seconds)), _ms(max(seconds))]
        table.add_row(name, "[bold]whole call[/bold]", *cells, "")
    return table


Row = tuple[list[float | None], list[float]]


def _stage_rows(cycles: Sequence[Cycle]) -> dict[tuple[str, str], Row]:
    """(operation, stage) -> wall time by cycle, and the slowest rank of each. A wake by tag is in line with others."""
    rows: dict[tuple[str, str], Row] = {}
    for at, cycle in enumerate(cycles):
        for stage in cycle.stages:
            operation = "wake" if stage.operation == "wake weights" else stage.operation
            walls, ranks = rows.setdefault((operation, stage.name), ([None] * len(cycles), []))
            walls[at] = stage.wall_s
            ranks.append(max(stage.ranks, default=0.0))
    return rows


def _shown(cycles: Sequence[Cycle]) -> Iterator[tuple[int, Cycle]]:
    """Cycles with their numbers; of many, the first and the last few."""
    for number, cycle in enumerate(cycles, 1):
        if number == 1 or number > len(cycles) - _MAX_CYCLE_COLUMNS + 1:
            yield number, cycle


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.2f}" if size_bytes else "0"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    milliseconds = seconds * 1000
    # As many decimals as three digits leave room for.
    return f"{milliseconds:.{2 if milliseconds < 100 else 1 if milliseconds < 1000 else 0}f}"


# -- arguments -----------------------------------------------------------------------------------


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return value


def _writable(text: str) -> Path:
    """Looked at before anything runs: a run of minutes must not end in "no such directory"."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a file in an existing directory")
    return path


if __name__ == "__main__":
    sys.exit(main())

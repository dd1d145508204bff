"""What the executor itself costs: a worker that does nothing is put to sleep and woken, and each stage is timed.

A stage's cost is its wall time in the parent less what its slowest rank reports for itself: sending, scheduling,
receiving, deciding. Readings of the devices are stages too, and there the ranks are read one after another, so what
the others wait for counts as cost.

    python scripts/bench_cycle.py --device soft --ranks 1,2,4,8,16,32 --cycles 100

writes ``docs/measurements/<date>-<device>-executor-overhead.json`` and a table of the same in ``.md`` beside it
(``--json FILE`` chooses another place), and prints the table. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from checkpoint_executor import CUDACheckpointExecutor
from checkpoint_executor.report import CycleReport
from checkpoint_executor.workers import Worker

#: The aim, on a machine of two cores: ranks -> largest median cost of a stage, seconds.
AIM_S = {8: 0.003, 32: 0.015}

WARM_UP_CYCLES = 3


class NothingWorker(Worker):
    """A worker without a model."""


class StageCost(Struct, frozen=True):
    """Cost of one stage over all cycles, seconds."""

    operation: str
    name: str
    median_s: float
    worst_s: float
    #: Medians of what the cost is the difference of.
    wall_s: float
    slowest_rank_s: float


class RanksResult(Struct, frozen=True):
    """All of one number of ranks. ``sleep_s`` and ``wake_s`` are (median, worst) of the whole calls."""

    ranks: int
    starts_s: tuple[float, ...]
    shutdowns_s: tuple[float, ...]
    sleep_s: tuple[float, float]
    wake_s: tuple[float, float]
    stages: tuple[StageCost, ...]

    @property
    def largest_median_s(self) -> float:
        return max(stage.median_s for stage in self.stages)

    @property
    def cycle_s(self) -> float:
        """Cost of a whole cycle: the sum over its stages."""
        return sum(stage.median_s for stage in self.stages)


class Result(Struct, frozen=True):
    """The file."""

    device: str
    cycles: int
    machine: dict[str, str | int | float | None]
    command: list[str]
    results: tuple[RanksResult, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the executor's own part of a sleep and wake cycle.")
    parser.add_argument("--device", choices=("soft", "cuda"), default="soft")
    parser.add_argument("--ranks", type=_numbers, default=(1, 2, 4, 8, 16, 32), help="e.g. 1,2,4,8")
    parser.add_argument("--cycles", type=int, default=100, help="cycles for each number of ranks")
    parser.add_argument("--starts", type=int, default=3, help="starts for each number of ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write; the table goes beside it as .md")
    args = parser.parse_args()

    # Read first: the benchmark itself raises it.
    machine = describe_machine()
    results = []
    for ranks in args.ranks:
        results.append(measure(args.device, ranks, args.cycles, args.starts))
        print(f"{ranks} rank(s) done", file=sys.stderr)
    result = Result(args.device, args.cycles, machine, sys.argv, tuple(results))

    path: Path = args.json or default_path(args.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    text = render(result, path.name)
    path.with_suffix(".md").write_text(text)
    print(text)
    print(f"written: {path} and {path.with_suffix('.md').name}", file=sys.stderr)
    return 0


def measure(device: str, ranks: int, cycles: int, starts: int) -> RanksResult:
    """Start ``starts`` executors of this many ranks, and run the cycles on the last of them."""
    starts_s: list[float] = []
    shutdowns_s: list[float] = []
    reports: list[tuple[CycleReport, CycleReport]] = []
    with tempfile.TemporaryDirectory(prefix="bench-cycle-") as root:
        for number in range(starts):
            begun = time.monotonic()
            executor = CUDACheckpointExecutor(
                NothingWorker, ranks, device=device, soft_root=root if device == "soft" else None
            )
            starts_s.append(time.monotonic() - begun)
            if number == starts - 1:
                for _ in range(WARM_UP_CYCLES):
                    cycle(executor)
                reports = [cycle(executor) for _ in range(cycles)]
            begun = time.monotonic()
            executor.shutdown()
            shutdowns_s.append(time.monotonic() - begun)
    return RanksResult(
        ranks,
        tuple(starts_s),
        tuple(shutdowns_s),
        _median_and_worst([sleep.wall_s for sleep, _ in reports]),
        _median_and_worst([wake.wall_s for _, wake in reports]),
        tuple(stage_costs(reports)),
    )


def cycle(executor: CUDACheckpointExecutor) -> tuple[CycleReport, CycleReport]:
    """One sleep and one whole wake."""
    return executor.sleep(), executor.wake_up()


def stage_costs(reports: Sequence[tuple[CycleReport, CycleReport]]) -> list[StageCost]:
    """Costs by stage, in the order of the stages."""
    costs = []
    for operations in zip(*reports, strict=True):
        for stages in zip(*(report.stages for report in operations), strict=True):
            overheads = [stage.overhead_s for stage in stages]
            costs.append(
                StageCost(
                    operations[0].operation,
                    stages[0].name,
                    *_median_and_worst(overheads),
                    statistics.median(stage.wall_s for stage in stages),
                    statistics.median(max(stage.ranks) for stage in stages),
                )
            )
    return costs


def render(result: Result, source: str) -> str:
    """The result as Markdown."""
    device = "the software device" if result.device == "soft" else "CUDA"
    lines = [
        f"# The executor's own cost, {device}",
        "",
        f"Written by `scripts/bench_cycle.py` from `{source}`; {result.cycles} cycles for each number of ranks.",
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in result.machine.items() if value is not None) + ".",
        "",
        "A stage's cost is its wall time less the time its slowest rank reports. The worker does nothing. With more",
        "ranks than cores, ranks wait for each other's processor time, and that wait counts as cost too.",
        "",
        "## Cost of each stage, ms: median (worst)",
        "",
        _row(["", "stage", *(f"{r.ranks} rank{'s' if r.ranks > 1 else ''}" for r in result.results)]),
        _row(["---", "---", *("---:" for _ in result.results)]),
    ]
    previous = ""
    for stages in zip(*(r.stages for r in result.results), strict=True):
        operation = stages[0].operation
        cells = [f"{_ms(stage.median_s)} ({_ms(stage.worst_s)})" for stage in stages]
        lines.append(_row([operation if operation != previous else "", stages[0].name, *cells]))
        previous = operation
    lines += [
        "",
        "## Sums and whole calls, ms: median (worst)",
        "",
        _row(["", *(f"{r.ranks}" for r in result.results)]),
        _row(["---", *("---:" for _ in result.results)]),
        _row(["largest median of a stage", *(_ms(r.largest_median_s) for r in result.results)]),
        _row(["all stages of a cycle", *(_ms(r.cycle_s) for r in result.results)]),
        _row(["the same for each rank", *(_ms(r.cycle_s / r.ranks) for r in result.results)]),
        _row(["sleep, whole call", *(f"{_ms(r.sleep_s[0])} ({_ms(r.sleep_s[1])})" for r in result.results)]),
        _row(["wake, whole call", *(f"{_ms(r.wake_s[0])} ({_ms(r.wake_s[1])})" for r in result.results)]),
        _row(["start, median", *(_ms(statistics.median(r.starts_s)) for r in result.results)]),
        _row(["shutdown, median", *(_ms(statistics.median(r.shutdowns_s)) for r in result.results)]),
        "",
        "## Against the aim",
        "",
        *(f"- {line}" for line in verdicts(result)),
        "",
    ]
    return "\n".join(lines)


def verdicts(result: Result) -> list[str]:
    """Whether the aims are met, one sentence each."""
    found = []
    for r in result.results:
        if (aim := AIM_S.get(r.ranks)) is not None:
            worst = max(r.stages, key=lambda stage: stage.median_s)
            met = "met" if worst.median_s < aim else "missed"
            found.append(
                f"{r.ranks} ranks: every stage's median below {_ms(aim)} ms: {met} (the largest is {worst.name} with "
                f"{_ms(worst.median_s)} ms)."
            )
    first, last = result.results[0], result.results[-1]
    if last.ranks > first.ranks:
        growth, factor = last.cycle_s / first.cycle_s, last.ranks / first.ranks
        met = "met" if growth <= factor else "missed"
        found.append(
            f"Growing no faster than the ranks: {met} (from {first.ranks} to {last.ranks} ranks, which is {factor:g} "
            f"times as many, the cost of a cycle grew {growth:.1f} times)."
        )
    return found


def describe_machine() -> dict[str, str | int | float | None]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def default_path(device: str) -> Path:
    folder = Path(__file__).resolve().parent.parent / "docs" / "measurements"
    return folder / f"{time.strftime('%Y-%m-%d')}-{device}-executor-overhead.json"


def _cpu_model() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _median_and_worst(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), max(values)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"ranks must be positive, not {text}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())

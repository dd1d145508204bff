r"""What a cycle costs: the executor's own part of it, or, with ``--arms``, the ways to give memory back side by side.

    python scripts/bench_cycle.py --device soft --ranks 1,2,4,8,16,32 --cycles 100

**The executor's own part**: a worker that does nothing is put to sleep and woken, and each stage is timed. A stage's
cost is its wall time in the parent less what its slowest rank reports for itself: sending, scheduling, receiving,
deciding. Readings of the devices are stages too, and there the ranks are read one after another, so what the others
wait for counts as cost. Writes ``docs/measurements/<date>-<device>-executor-overhead.json`` and a table of the same in
``.md`` beside it (``--json FILE`` chooses another place), and prints the table. Run it on a quiet machine.

    python scripts/bench_cycle.py --arms nothing,allocator,allocator+nccl,driver,all --device cuda \
        --tensor-parallel-size 2 --launches 3 --cycles 4 --out arms-tp2.json
    python scripts/bench_cycle.py --arms all,allocator --front-door vllm --model 0.6b --launches 2 --out arms-vllm.json

**The arms**, over the ballast worker or vLLM (Qwen3's dimensions, dummy weights): ``nothing`` (no sleep at all),
``allocator`` (its sleep alone; vLLM's own), ``allocator+nccl`` (and the communicators suspended), ``driver`` (its lock,
checkpoint, restore and unlock alone, on every rank at once) and ``all`` (everything together, by the executor). Each
launch is a process of its own with a limit of time, the arms take turns, and nothing of a launch is left when the next
begins. What cannot work is not tried, and its row says why. ``--out`` is written as it goes, so that a kill loses
nothing; the table comes last.
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
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # a checkout needs no installation

import msgspec  # noqa: E402
from msgspec import Struct  # noqa: E402

from checkpoint_executor import CUDACheckpointExecutor  # noqa: E402
from checkpoint_executor.executor import detect_device_kind  # noqa: E402
from checkpoint_executor.report import CycleReport  # noqa: E402
from checkpoint_executor.workers import Worker  # noqa: E402
from scripts.benchmarking.arms import ARMS, FRONT_DOORS  # noqa: E402

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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; those of the other purpose are refused. ``arms`` is None where the executor's own part is meant."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("auto", "soft", "cuda"), help="default: soft, and auto with --arms")
    parser.add_argument("--cycles", type=int, help="for each number of ranks (100), or for each launch of an arm (4)")
    parser.add_argument("--launch", nargs=3, help=argparse.SUPPRESS)
    own = parser.add_argument_group("the executor's own part")
    own.add_argument("--ranks", type=_numbers, help="default: 1,2,4,8,16,32")
    own.add_argument("--starts", type=int, help="for each number of ranks (3)")
    own.add_argument("--json", type=Path, metavar="FILE", help="where to write; the table goes beside it as .md")
    arms = parser.add_argument_group("the arms")
    arms.add_argument("--arms", type=_arms, help=f"some of {','.join(ARMS)}")
    arms.add_argument("--front-door", choices=FRONT_DOORS, help="whose workers: our own (default), or vLLM's")
    arms.add_argument("--out", type=Path, metavar="FILE", help="the JSON; logs go into a folder beside it")
    arms.add_argument("--launches", type=int, help="of each arm (2)")
    arms.add_argument("--tensor-parallel-size", type=int, help="ranks (1)")
    arms.add_argument("--communication", choices=("suspend", "socket"), help="of our own workers (suspend)")
    arms.add_argument("--gib", type=float, help="weights of a rank of our own worker (16; 1/16 on the software device)")
    arms.add_argument("--kv-gib", type=float, help="KV cache of a rank (8; 1/32 on the software device)")
    arms.add_argument("--graphs", type=int, help="of our own worker (16)")
    arms.add_argument(
        "--keep-weights",
        action="store_const",
        const=True,
        help="let a sleep find its backup still right; by default every weight changes before each cycle",
    )
    arms.add_argument("--model", choices=("0.6b", "8b"), help="dimensions of vLLM's model (0.6b)")
    arms.add_argument("--nccl", metavar="FILE", help="libnccl.so.2 of 2.29.7 or later, for several ranks")
    arms.add_argument(
        "--together",
        action="store_const",
        const=True,
        help="start the arms of a round at once, beside each other, and measure one after another",
    )
    arms.add_argument("--limit-s", type=float, help="of a launch's start and turn (300)")
    arms.add_argument("--budget", type=float, metavar="SECONDS", help="start no launch after so many")
    options = parser.parse_args(argv)
    if options.launch:
        return options
    _settle(parser, options)
    return options


#: Options of one purpose alone, with what they are if they are not given.
_OWN_DEFAULTS: dict[str, Any] = {"ranks": (1, 2, 4, 8, 16, 32), "starts": 3, "json": None}
_ARMS_DEFAULTS: dict[str, Any] = {
    "front_door": "own",
    "out": None,
    "launches": 2,
    "tensor_parallel_size": 1,
    "communication": "suspend",
    "gib": None,
    "kv_gib": None,
    "graphs": 16,
    "keep_weights": False,
    "model": "0.6b",
    "nccl": None,
    "together": False,
    "limit_s": 300.0,
    "budget": float("inf"),
}


def _settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in the defaults of the purpose; a usage error ends the process."""
    compares = options.arms is not None
    if foreign := [name for name in (_OWN_DEFAULTS if compares else _ARMS_DEFAULTS) if vars(options)[name] is not None]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        parser.error(f"{names} cannot be used {'with' if compares else 'without'} --arms")
    if compares and options.front_door == "vllm":
        if detect_device_kind() == "soft" or options.device == "soft":
            parser.error("vLLM's arms need a GPU")
        if options.communication or options.gib or options.graphs:
            parser.error("--communication, --gib and --graphs are of our own workers")
    if compares and options.front_door != "vllm" and options.model:
        parser.error("--model is of vLLM's arms")
    for name, default in (_ARMS_DEFAULTS if compares else _OWN_DEFAULTS).items():
        if vars(options)[name] is None:
            setattr(options, name, default)
    options.device = options.device or ("auto" if compares else "soft")
    options.cycles = (4 if compares else 100) if options.cycles is None else options.cycles
    if not compares and options.device == "auto":
        parser.error("--device auto is of --arms: which device the executor's own part is on stands in its file's name")
    if compares and options.out is None:
        parser.error("--arms needs --out")
    counts = ("cycles", "launches", "tensor_parallel_size", "graphs") if compares else ("cycles", "starts")
    if min(vars(options)[name] for name in counts) < 1:
        parser.error(f"{', '.join(counts)} must be at least 1")


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.launch:
        from scripts.benchmarking import launch

        spec, descriptor, log = args.launch
        launch.serve(spec, int(descriptor), log)
    if args.arms is not None:
        from scripts.benchmarking import comparison

        return comparison.run(args)

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


def _arms(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"no arm {', '.join(map(repr, unknown))}; they are {', '.join(ARMS)}")
    return tuple(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

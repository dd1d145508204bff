"""PURE. Recorded runs: the JSON files that the demo and the scripts write, as one kind of typed data.

Knows the formats of the files, and nothing of how they are shown. What a file is is told from its content, not from its
name. Nothing is repaired: a file that is not as its writer writes it is refused, with the place that is wrong. Sizes
are in bytes and times in seconds throughout.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

__all__ = [
    "AttributedCycle",
    "Cycle",
    "Iteration",
    "Operation",
    "RankMemory",
    "Run",
    "Slope",
    "Stage",
    "Step",
    "UnreadableRunError",
    "Way",
    "read",
    "read_all",
    "size_text",
]


class UnreadableRunError(ValueError):
    """A file is no recorded run, or a broken one. The text begins with the file and says what was expected."""


# -- what a run is, whoever wrote it -------------------------------------------------------------


class Stage(Struct, frozen=True):
    """One stage: from its sending until the last rank had answered, and by rank what the rank itself reports."""

    name: str
    wall_s: float
    ranks: tuple[float, ...]


class Operation(Struct, frozen=True):
    """A sleep or a wake; a wake by tag is several of them."""

    name: str
    wall_s: float
    stages: tuple[Stage, ...]


class Cycle(Struct, frozen=True):
    """One sleep and wake.

    Attributes:
        number: from 1. sleep_s, wake_s: whole calls, all of a wake by tag together.
        partial: whether it woke tag by tag. identical: None where nothing was compared in this cycle.
        asleep_bytes: by rank, what was in use on the device while asleep, less what an empty one has, if that is known.
        operations: with their stages; empty where the run recorded none.
        note: what was special about it.
    """

    number: int
    sleep_s: float
    wake_s: float
    partial: bool = False
    identical: bool | None = None
    asleep_bytes: tuple[int, ...] = ()
    operations: tuple[Operation, ...] = ()
    note: str = ""


class RankMemory(Struct, frozen=True):
    """What one rank's device holds, and the host for it.

    Attributes:
        device_used_bytes: the device's own reading. kinds: parts of it by name; ``remainder`` may be negative, where
            the parts overlap. host: bytes of host memory by what they are for.
        unaccounted: what somebody says to hold and no kind counts, so that it lies within the remainder.
    """

    rank: int
    device_used_bytes: int
    kinds: dict[str, int]
    host: dict[str, int] = {}
    unaccounted: dict[str, int] = {}

    @property
    def missing_bytes(self) -> int:
        """The reading less the sum of the parts: 0 in a file that is right."""
        return self.device_used_bytes - sum(self.kinds.values())


class Step(Struct, frozen=True):
    """A moment of a cycle."""

    step: str
    ranks: tuple[RankMemory, ...]


class AttributedCycle(Struct, frozen=True):
    """The steps of a cycle, in order."""

    number: int
    steps: tuple[Step, ...]


class Way(Struct, frozen=True):
    """One way to sleep, of several that were compared. Medians where it was tried more than once.

    Attributes:
        left_above_empty_bytes: on the device that kept most. rss_before_bytes, rss_asleep_bytes: of one worker.
        down_range_s, up_range_s: the least and the most; empty for a single try.
    """

    way: str
    down_s: float
    up_s: float
    left_above_empty_bytes: int
    rss_before_bytes: int
    rss_asleep_bytes: int
    identical: bool
    down_range_s: tuple[float, ...] = ()
    up_range_s: tuple[float, ...] = ()


class Iteration(Struct, frozen=True):
    """One iteration of a soak: a burst of requests, a sleep, a wake, and a probe that is compared with the first."""

    number: int
    burst_requests: int
    burst_failed: int
    burst_s: float
    sleep_s: float
    wake_s: float
    wake: str
    occupied: bool
    identical: bool
    probe_s: float
    device_awake_bytes: tuple[int, ...]
    device_asleep_bytes: tuple[int, ...]
    rss_bytes: dict[str, int]
    open_files: dict[str, int]
    occupied_bytes: int = 0


class Slope(Struct, frozen=True):
    """How a reading of a soak changes over 100 iterations, with the standard error of that and what is allowed."""

    per_100: float
    standard_error: float
    unit: str
    bound: float
    ok: bool
    #: False with too few readings to say anything; ``ok`` means nothing then.
    judged: bool = True


class Run(Struct, frozen=True):
    """A recorded run.

    Attributes:
        source: the file. kind: what wrote it. name: what it was, short enough for a heading.
        command: as it was typed, empty if the file does not say. when: UTC. device, machine: what it ran on.
        verdict: what the run says of itself. good: False if that is bad news, None if it says nothing.
        iterations: of a soak, those that came to their end; the slopes leave out the first ``warm_up_iterations``.
        evidence: what the comparison before and after rested on, as (what, how it came out).
        remarks: what a reader has to know to judge the figures.
    """

    source: str
    kind: str
    name: str
    ranks: int
    command: str = ""
    when: str = ""
    device: str = ""
    machine: str = ""
    verdict: str = ""
    good: bool | None = None
    cycles: tuple[Cycle, ...] = ()
    attribution: tuple[AttributedCycle, ...] = ()
    ways: tuple[Way, ...] = ()
    iterations: tuple[Iteration, ...] = ()
    warm_up_iterations: int = 0
    slopes: dict[str, Slope] = {}
    evidence: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()


def size_text(size_bytes: float) -> str:
    """A size as people read it: ``3.25 MiB``, ``24.9 GiB``; a negative one with its sign."""
    sign, size = ("-" if size_bytes < 0 else ""), abs(size_bytes)
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            value = size / scale
            return f"{sign}{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{sign}{size:.0f} B"


# -- reading -------------------------------------------------------------------------------------


def read(source: str, data: bytes) -> Run:
    """The one run that a file holds; as :func:`read_all`, which also says what is raised."""
    runs = read_all(source, data)
    if len(runs) != 1:
        raise UnreadableRunError(f"{source}: one run was expected, and it holds {len(runs)}")
    return runs[0]


def read_all(source: str, data: bytes) -> tuple[Run, ...]:
    """The runs that a file holds: one, but for what ``gpu_vllm.py`` writes about all its parts.

    Args:
        source: the file's name, for errors and for the reader. data: its content.

    Raises:
        UnreadableRunError: it is not JSON, of no known kind, or not as its writer writes it.
    """
    document = _document(source, data)
    if _are_parts(document):
        return tuple(_part_of_all(f"{source}#{name}", name, facts) for name, facts in document.items())
    if _is_log(document):
        # Executors may share the file, and one that was started again goes on in it.
        by_pid: dict[str, list[Any]] = {}
        for entry in document:
            by_pid.setdefault(str(entry.get("pid")), []).append(entry)
        if len(by_pid) > 1:
            return tuple(_run(f"{source}#pid {pid}", entries) for pid, entries in by_pid.items())
    return (_run(source, document),)


def _run(source: str, document: Any) -> Run:
    for known in _FORMATS:
        if known.recognised(document):
            try:
                return known.convert(source, msgspec.convert(document, known.type))
            except msgspec.ValidationError as error:
                raise UnreadableRunError(f"{source}: it looks like {known.name}, but is broken: {error}") from None
    raise UnreadableRunError(f"{source}: no recorded run: {_outline(document)}. {_EXPECTED}")


#: The last of them is about lists in lists in lists.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _document(source: str, data: bytes) -> Any:
    """The JSON value; of a file of JSON lines, the list of them."""
    if not data.strip():
        raise UnreadableRunError(f"{source}: the file is empty. {_EXPECTED}")
    try:
        return msgspec.json.decode(data)
    except _NOT_JSON as error:
        problem = str(error)
    try:
        lines = [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    except _NOT_JSON:
        lines = []
    # One line alone would have been JSON as a whole; several are judged together.
    if len(lines) > 1:
        if _is("soak")(lines[0]) and "iterations" not in lines[0]:
            return {**lines[0], "iterations": lines[1:]}  # as a soak writes it while it runs
        return lines
    raise UnreadableRunError(f"{source}: it is not JSON ({problem}). {_EXPECTED}")


def _outline(document: Any) -> str:
    """What a document is, for one who has to find out why it is not the right one."""
    if isinstance(document, dict):
        if "kind" in document:
            return f"its kind is {str(document['kind'])[:60]!r}"
        names = [str(name)[:40] for name in document]
        return f"its fields are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "it is empty"
    return f"it is a JSON {'list' if isinstance(document, list) else type(document).__name__}"


# -- the files, as they are written --------------------------------------------------------------


class _BeforeAfter(Struct):
    before: str
    after: str


class _DemoStage(Struct):
    operation: str
    name: str
    wall_s: float
    ranks: tuple[float, ...]


class _DemoBytes(Struct):
    awake: tuple[int, ...]
    asleep: tuple[int, ...]
    woken: tuple[int, ...]


class _DemoCycle(Struct):
    sleep_s: float
    wake_s: float
    partial: bool
    stages: tuple[_DemoStage, ...]
    device_bytes: _DemoBytes
    identical: bool
    token_sha256: _BeforeAfter
    logits_sha256: _BeforeAfter
    distinct_tokens: int
    weights_identical: bool
    addresses_identical: bool


class _Demo(Struct):
    device: str
    device_note: str
    tensor_parallel_size: int
    communication: str
    cycles: tuple[_DemoCycle, ...]
    empty_device_bytes: tuple[int, ...]
    left_behind: tuple[str, ...]
    problems: tuple[str, ...]
    passed: bool
    environment: dict[str, Any]


class _Reported(Struct):
    """A sleep or a wake as the benchmark keeps it."""

    wall_s: float
    stages: tuple[Stage, ...]


class _TableCycle(Struct):
    weights_changed: bool
    sleep: _Reported
    wake: tuple[_Reported, ...]
    asleep_above_empty_bytes: tuple[int, ...]
    identical: bool


class _Written(Struct, kw_only=True):
    """What our own scripts write beside their figures."""

    command: list[str] = []
    when: str = ""
    host: dict[str, Any] = {}


class _Table(_Written):
    ranks: int
    weights_gib: float
    communication: str
    cycles: tuple[_TableCycle, ...] = ()
    plain_copy_gb_s: tuple[dict[str, float], ...] = ()


class _Ways(_Written):
    weights_gib: float
    runs: tuple[Way, ...]


class _Arm(Struct):
    """One of those that ``bench_cycle.py`` was asked for."""

    name: str
    note: str = ""
    refused: str = ""


class _ArmCycle(Struct):
    down_s: float
    up_s: float
    used_asleep_bytes: tuple[int, ...]
    rss_before_bytes: tuple[int, ...]
    rss_asleep_bytes: tuple[int, ...]
    identical: bool
    weights_changed: bool = False
    #: By rank; empty where nothing was copied.
    copy_down_gb_s: tuple[float, ...] = ()
    copy_up_gb_s: tuple[float, ...] = ()


class _Launch(Struct):
    arm: str
    number: int
    cycles: tuple[_ArmCycle, ...] = ()
    completed: bool = False
    #: What the devices held before its start, and after its end; the latter counts if others ran beside it.
    empty_bytes: tuple[int, ...] = ()
    after_bytes: tuple[int, ...] = ()
    together: bool = False
    plain_copy_gb_s: tuple[dict[str, float], ...] = ()
    how: str = ""
    error: str = ""
    left_processes: tuple[int, ...] = ()


class _Arms(_Written):
    device: str
    front_door: str
    tensor_parallel_size: int
    arms: tuple[_Arm, ...]
    launches: tuple[_Launch, ...]
    model: str = ""
    weights_gib: float | None = None


class _LoggedMemory(Struct):
    rank: int
    used_bytes: int
    kinds: dict[str, int]
    host: dict[str, int] = {}
    unaccounted: dict[str, int] = {}


class _LoggedStep(Struct):
    step: str
    ranks: tuple[_LoggedMemory, ...]


class _LogEntry(Struct):
    """One line of ``CHECKPOINT_EXECUTOR_LOG``: an operation, or an ``error`` and none of its times."""

    operation: str
    wall_s: float = 0.0
    stages: tuple[Stage, ...] = ()
    error: str = ""
    performed: bool = True
    time: float | None = None
    device_bytes_before: tuple[int, ...] = ()
    device_bytes_after: tuple[int, ...] = ()
    memory: tuple[_LoggedStep, ...] = ()


class _PartCycle(Struct):
    sleep_s: float
    wake_s: float
    partial: bool
    mib_asleep: tuple[int, ...]
    same_tokens: bool
    same_logprobs: bool


class _PartName(Struct):
    name: str
    model: str
    ranks: int
    backend: str


class _Part(Struct):
    part: _PartName
    cycles: tuple[_PartCycle, ...]
    #: In use after its end; only in the file about all parts. A text if it could not be read.
    mib_after: tuple[int, ...] | str | None = None
    tokens_per_s_before: tuple[float, ...] = ()
    tokens_per_s_after: tuple[float, ...] = ()
    gpus: tuple[str, ...] = ()
    driver: str = ""
    versions: dict[str, Any] = {}
    mib_before_start: tuple[int, ...] = ()
    distinct_tokens: int | None = None
    same_before_any_sleep: bool | None = None
    same_checksums: bool | None = None
    log: tuple[_LogEntry, ...] = ()
    completed: bool = False
    command: list[str] = []
    when: str = ""


class _Iteration(Struct):
    """One that an error stopped lacks what came after the error."""

    number: int
    burst_requests: int
    burst_failed: int
    burst_s: float
    wake: str
    occupied: bool
    occupied_bytes: int = 0
    identical: bool | None = None
    sleep_s: float | None = None
    wake_s: float | None = None
    probe_s: float | None = None
    device_awake_bytes: tuple[int, ...] | None = None
    device_asleep_bytes: tuple[int, ...] | None = None
    rss_bytes: dict[str, int] | None = None
    open_files: dict[str, int] | None = None
    stopped: str | None = None


class _Attribution(_Written):
    device: str
    tensor_parallel_size: int
    cycles: tuple[AttributedCycle, ...]
    worker: str = ""


class _Soak(_Written):
    device: str
    tensor_parallel_size: int
    iterations: tuple[_Iteration, ...]
    seed: int | None = None
    warm_up_iterations: int = 0
    problems: tuple[str, ...] = ()
    #: Written as it goes: what is fitted and judged comes at the end.
    slopes: dict[str, Slope] = {}
    mismatches: int | None = None
    failed_requests: int | None = None
    ok: bool | None = None


# -- each kind, as a run -------------------------------------------------------------------------


def _demo(source: str, demo: _Demo) -> Run:
    environment = demo.environment
    cycles = []
    for number, cycle in enumerate(demo.cycles, 1):
        names = dict.fromkeys(stage.operation for stage in cycle.stages)
        operations = []
        for name in names:
            stages = [Stage(s.name, s.wall_s, s.ranks) for s in cycle.stages if s.operation == name]
            operations.append(Operation(name, sum(stage.wall_s for stage in stages), tuple(stages)))
        cycles.append(
            Cycle(
                number,
                cycle.sleep_s,
                cycle.wake_s,
                cycle.partial,
                cycle.identical,
                _above(cycle.device_bytes.asleep, demo.empty_device_bytes),
                tuple(operations),
            )
        )

    def count(equal: Callable[[_DemoCycle], bool]) -> str:
        return _count(map(equal, demo.cycles))

    evidence = [
        ("greedy tokens of every rank, SHA-256", count(lambda c: c.token_sha256.before == c.token_sha256.after)),
        ("bits of all logits, SHA-256", count(lambda c: c.logits_sha256.before == c.logits_sha256.after)),
        ("bytes of every weight", count(lambda c: c.weights_identical)),
        ("addresses that graphs use", count(lambda c: c.addresses_identical)),
    ]
    if demo.cycles:
        distinct = min(cycle.distinct_tokens for cycle in demo.cycles)
        evidence.append(("distinct tokens among those compared", f"at least {distinct}"))
    gpus = _strings(environment.get("gpus"))
    driver = environment.get("driver")
    return Run(
        source,
        "demo",
        f"Demo, TP={demo.tensor_parallel_size}, {_device(demo.device)}",
        demo.tensor_parallel_size,
        command=_command(_strings(environment.get("command"))),
        when=str(environment.get("time") or ""),
        device=demo.device_note,
        machine=_machine(gpus, driver, environment.get("cpus"), environment.get("python")),
        verdict="passed" if demo.passed else "; ".join(("FAILED", *demo.problems)),
        good=demo.passed,
        cycles=tuple(cycles),
        evidence=tuple(evidence),
        remarks=tuple(f"left behind: {what}" for what in demo.left_behind),
    )


def _table(source: str, table: _Table) -> Run:
    cycles = []
    for number, cycle in enumerate(table.cycles, 1):
        cycles.append(
            Cycle(
                number,
                cycle.sleep.wall_s,
                sum(wake.wall_s for wake in cycle.wake),
                len(cycle.wake) > 1,
                cycle.identical,
                cycle.asleep_above_empty_bytes,
                _operations(cycle.sleep, cycle.wake),
                "weights changed before it" if cycle.weights_changed else "",
            )
        )
    good = all(cycle.identical for cycle in table.cycles) if cycles else None
    remarks = []
    if table.plain_copy_gb_s:
        rates = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in table.plain_copy_gb_s[0].items())
        remarks.append(f"a plain copy between registered host memory and rank 0 in the same process: {rates}")
    return Run(
        source,
        "bench_gpu table",
        f"{table.weights_gib:g} GiB of weights, TP={table.ranks}, {table.communication}",
        table.ranks,
        command=_command(table.command),
        when=table.when,
        device=_bench_device(table.command),
        machine=_host(table.host),
        verdict=_identical(good),
        good=good,
        cycles=tuple(cycles),
        evidence=(
            ("bits of every graph's output and a checksum of every block of weights", _count(_identicals(cycles))),
            ("cycles before which the weights were changed", str(sum(c.weights_changed for c in table.cycles))),
        ),
        remarks=tuple(remarks),
    )


def _ways(source: str, ways: _Ways) -> Run:
    good = all(way.identical for way in ways.runs) if ways.runs else None
    return Run(
        source,
        "bench_gpu ways",
        f"Ways to sleep, {ways.weights_gib:g} GiB of weights",
        1,
        command=_command(ways.command),
        when=ways.when,
        device=_bench_device(ways.command),
        machine=_host(ways.host),
        verdict=_identical(good),
        good=good,
        ways=ways.runs,
        evidence=(("bits of every graph's output", _count(way.identical for way in ways.runs)),),
        remarks=("host memory is the resident memory of the one worker, the arena of its weights included",),
    )


def _arms(source: str, found: _Arms) -> Run:
    what = f"vLLM {found.model}" if found.front_door == "vllm" else "own workers"
    gib = found.weights_gib
    size = f", {size_text(gib * (1 << 30))} of weights a rank" if gib is not None else ""
    cycles = [cycle for launch in found.launches for cycle in launch.cycles]
    ended = [launch for launch in found.launches if launch.completed and not launch.left_processes]
    same = all(cycle.identical for cycle in cycles)
    # A launch says last how it ended.
    finished = bool(found.launches) and all(launch.how for launch in found.launches)
    good = False if not same else len(ended) == len(found.launches) if finished else None
    verdict = {True: "identical", None: "not finished", False: "a launch failed" if same else "NOT identical"}[good]
    compared = (
        "tokens, logprobs and weights" if found.front_door == "vllm" else "bits of every graph and block of weights"
    )
    evidence = [(compared, _count(cycle.identical for cycle in cycles))]
    evidence.append(("launches that came to their end", f"{len(ended)} of {len(found.launches)}"))
    remarks = ["medians and ranges are over all cycles of all launches, the first ones included"]
    for arm in found.arms:
        if arm.refused or arm.note:
            remarks.append(f"{arm.name}{' was refused' if arm.refused else ''}: {arm.refused or arm.note}")
        if copies := _copies([launch for launch in found.launches if launch.arm == arm.name]):
            evidence.append((f"copies of {arm.name}, down / up, medians", copies))
    for launch in found.launches:
        where = f"{launch.arm}, launch {launch.number}"
        if not launch.completed:
            remarks.append(f"{where}: {': '.join(filter(None, (launch.how or 'it did not end', launch.error)))}")
        if launch.left_processes:
            remarks.append(f"{where}: processes were left: {', '.join(map(str, launch.left_processes))}")
    if cycles and found.front_door != "vllm":
        changed = all(cycle.weights_changed for cycle in cycles)
        remarks.append(f"the weights were {'changed' if changed else 'not always changed'} before a sleep")
    return Run(
        source,
        "arms",
        f"Arms, {what}, TP={found.tensor_parallel_size}{size}, {_device(found.device)}",
        found.tensor_parallel_size,
        command=_command(found.command),
        when=found.when,
        device=_device(found.device),
        machine=_host(found.host),
        verdict=verdict,
        good=good,
        ways=tuple(way for arm in found.arms if (way := _way(arm.name, found.launches)) is not None),
        evidence=tuple(evidence),
        remarks=tuple(remarks),
    )


def _way(arm: str, launches: Sequence[_Launch]) -> Way | None:
    """An arm over all its launches; None if it has no cycle."""
    pairs = [(launch, cycle) for launch in launches if launch.arm == arm for cycle in launch.cycles]
    if not pairs:
        return None
    downs, ups = [cycle.down_s for _, cycle in pairs], [cycle.up_s for _, cycle in pairs]
    left = [
        size
        for launch, cycle in pairs
        for size in _above(
            cycle.used_asleep_bytes, (launch.after_bytes if launch.together else ()) or launch.empty_bytes
        )
    ]
    return Way(
        arm,
        statistics.median(downs),
        statistics.median(ups),
        max(left, default=0),
        _median_bytes(size for _, cycle in pairs for size in cycle.rss_before_bytes),
        _median_bytes(size for _, cycle in pairs for size in cycle.rss_asleep_bytes),
        all(cycle.identical for _, cycle in pairs),
        (min(downs), max(downs)),
        (min(ups), max(ups)),
    )


def _copies(launches: Sequence[_Launch]) -> str:
    """Rates of the copies both ways, and beside them what they are of plain copies in the same process."""
    texts = []
    for name, plain in (("copy_down_gb_s", "d2h"), ("copy_up_gb_s", "h2d")):
        rates: list[float] = []
        shares: list[float] = []
        for launch in launches:
            limits = [rank.get(plain, 0.0) for rank in launch.plain_copy_gb_s]
            for found in (getattr(cycle, name) for cycle in launch.cycles):
                rates += found
                if len(found) == len(limits):
                    shares += [rate / limit for rate, limit in zip(found, limits, strict=True) if limit]
        of = f" ({statistics.median(shares):.0%} of a plain copy)" if shares else ""
        texts.append(f"{statistics.median(rates):.2f} GB/s{of}" if rates else "-")
    return " / ".join(texts) if texts != ["-", "-"] else ""


def _median_bytes(sizes: Iterable[int]) -> int:
    return int(statistics.median(found)) if (found := list(sizes)) else 0


def _part(source: str, part: _Part) -> Run:
    logged = _log_cycles(part.log)
    # Beside other engines only the reading after its end tells what was its own.
    empty = part.mib_after if isinstance(part.mib_after, tuple) else part.mib_before_start
    cycles = []
    for number, cycle in enumerate(part.cycles, 1):
        # The log and the cycles are of one process and in one order; stock vLLM has no log.
        operations = logged[number - 1].operations if len(logged) == len(part.cycles) else ()
        asleep = _above([mib << 20 for mib in cycle.mib_asleep], [mib << 20 for mib in empty])
        identical = cycle.same_tokens and cycle.same_logprobs
        cycles.append(Cycle(number, cycle.sleep_s, cycle.wake_s, cycle.partial, identical, asleep, operations))
    good = None if not cycles else all(c.identical for c in cycles) and part.same_checksums is not False
    remarks = [] if part.completed else ["the run was cut off: it has no mark of its end"]
    if not isinstance(part.mib_after, tuple):
        remarks.append(
            "what stays is counted beyond what was in use before its start, which is wrong if other engines ran beside "
            "it (--together): the file about all parts has the right figure"
        )
    if part.tokens_per_s_before and part.tokens_per_s_after:
        before, after = statistics.median(part.tokens_per_s_before), statistics.median(part.tokens_per_s_after)
        remarks.append(f"tokens/s, medians: {before:,.0f} before any sleep, {after:,.0f} after the last wake")
    if part.log and len(logged) != len(part.cycles):
        remarks.append("the log has another number of cycles than the run: its stages are not shown")
    evidence = [
        ("greedy tokens, one request at a time", _count(cycle.same_tokens for cycle in part.cycles)),
        ("exact logprobs of these tokens", _count(cycle.same_logprobs for cycle in part.cycles)),
    ]
    if part.same_before_any_sleep is not None:
        evidence.append(("the same twice before any sleep", _yes(part.same_before_any_sleep)))
    if part.same_checksums is not None:
        evidence.append(("checksums of the weights after the last wake", _yes(part.same_checksums)))
    if part.distinct_tokens is not None:
        evidence.append(("distinct tokens among those compared", str(part.distinct_tokens)))
    versions = ", ".join(f"{name} {part.versions[name]}" for name in ("vllm", "torch") if part.versions.get(name))
    name = part.part
    return Run(
        source,
        "gpu_vllm",
        f"vLLM {name.model}, TP={name.ranks}, {name.backend}",
        name.ranks,
        command=_command(part.command) or f"scripts/gpu_vllm.py {shlex.quote(name.name)}",
        when=part.when,
        device="NVIDIA GPU",
        machine=", ".join(filter(None, (_machine(part.gpus, part.driver), versions))),
        verdict=_identical(good),
        good=good,
        cycles=tuple(cycles),
        evidence=tuple(evidence),
        remarks=tuple(remarks),
    )


def _part_of_all(source: str, name: str, facts: dict[str, Any]) -> Run:
    """One of all parts: with its cycles, or, where it has none, with what it says of itself."""
    if _is_part(facts) and facts["cycles"]:
        return _run(source, facts)
    summary = facts.get("summary")
    known = [(str(key), str(value)) for key, value in summary.items()] if isinstance(summary, dict) else []
    ended = str(facts.get("how") or "it is not known how it ended")
    return Run(
        source,
        "gpu_vllm",
        f"vLLM, {name}",
        1,
        command=f"scripts/gpu_vllm.py {shlex.quote(name)}",
        device="NVIDIA GPU",
        machine=_machine(_strings(facts.get("gpus")), facts.get("driver")),
        verdict=f"completed, {ended}" if facts.get("completed") is True else f"no result: {ended}",
        good=None if facts.get("completed") is True else False,
        evidence=tuple(known),
        remarks=(f"the log ends: {facts['log_ends']}",) if facts.get("log_ends") else (),
    )


def _cycle_log(source: str, entries: tuple[_LogEntry, ...]) -> Run:
    cycles = _log_cycles(entries)
    ranks = max((len(stage.ranks) for entry in entries for stage in entry.stages), default=1)
    errors = [f"{entry.operation}: {entry.error}" for entry in entries if entry.error]
    counted = ", ".join(f"{error} ({errors.count(error)})" for error in dict.fromkeys(errors))
    return Run(
        source,
        "cycle log",
        f"Cycle log of an executor, TP={ranks}",
        ranks,
        cycles=tuple(cycles),
        attribution=_log_attribution(entries),
        remarks=(
            "a log of sleeps and wakes alone: it says neither what ran nor whether the answers stayed the same",
            "device bytes are the whole reading: what an empty device has is not in the log",
            *([f"refused or failed, and not counted here: {counted}"] if errors else []),
        ),
    )


def _attribution(source: str, found: _Attribution) -> Run:
    worker = f", {found.worker}" if found.worker else ""
    remarks = []
    for cycle in found.cycles:
        for step in cycle.steps:
            for memory in step.ranks:
                where = f"cycle {cycle.number}, {step.step}, rank {memory.rank}"
                if memory.missing_bytes:
                    remarks.append(
                        f"{where}: the kinds add up to {size_text(sum(memory.kinds.values()))}, the device says "
                        f"{size_text(memory.device_used_bytes)}"
                    )
                if (rest := memory.kinds.get("remainder", 0)) < 0:
                    remarks.append(f"{where}: the remainder is negative ({size_text(rest)}), so kinds overlap")
    return Run(
        source,
        "attribution",
        f"Memory by kind{worker}, TP={found.tensor_parallel_size}, {_device(found.device)}",
        found.tensor_parallel_size,
        command=_command(found.command),
        when=found.when,
        device=_device(found.device),
        machine=_host(found.host),
        verdict="memory only: nothing was compared",
        attribution=found.cycles,
        remarks=tuple(remarks),
    )


def _soak(source: str, soak: _Soak) -> Run:
    iterations = [found for each in soak.iterations if (found := _completed(each)) is not None]
    cycles = [
        Cycle(
            iteration.number,
            iteration.sleep_s,
            iteration.wake_s,
            iteration.wake == "by_tag",
            iteration.identical,
            iteration.device_asleep_bytes,
            note=f"another process held {size_text(iteration.occupied_bytes)}" if iteration.occupied else "",
        )
        for iteration in iterations
    ]
    requests = sum(iteration.burst_requests for iteration in soak.iterations)
    failed = sum(iteration.burst_failed for iteration in soak.iterations)
    verdict = {True: "passed", False: "; ".join(("FAILED", *soak.problems)), None: "not finished"}[soak.ok]
    remarks = [f"stopped in iteration {each.number}: {each.stopped}" for each in soak.iterations if each.stopped]
    if soak.ok is None:
        remarks.append("the soak was cut off, or was still running when the file was copied")
    if soak.warm_up_iterations:
        remarks.append(f"the slopes leave out the first {soak.warm_up_iterations} iterations, the warm-up")
    if soak.mismatches is not None and soak.mismatches != sum(not each.identical for each in iterations):
        remarks.append(f"the file counts {soak.mismatches} mismatches, its iterations another number")
    if soak.failed_requests is not None and soak.failed_requests != failed:
        remarks.append(f"the file counts {soak.failed_requests} failed requests, its iterations {failed}")
    return Run(
        source,
        "soak",
        f"Soak, {len(iterations)} iterations, TP={soak.tensor_parallel_size}, {_device(soak.device)}",
        soak.tensor_parallel_size,
        command=_command(soak.command),
        when=soak.when,
        device=_device(soak.device),
        machine=_host(soak.host),
        verdict=verdict,
        good=soak.ok,
        cycles=tuple(cycles),
        iterations=tuple(iterations),
        warm_up_iterations=soak.warm_up_iterations,
        slopes=soak.slopes,
        evidence=(
            ("probe prompts, bit for bit as in iteration 0", _count(_identicals(cycles))),
            ("requests that failed", f"{failed:,} of {requests:,}"),
            (
                "sleeps during which another process held the freed memory",
                f"{sum(each.occupied for each in iterations)} of {len(iterations)}",
            ),
        ),
        remarks=tuple(remarks),
    )


def _completed(each: _Iteration) -> Iteration | None:
    """The iteration, if nothing of it is missing."""
    if (
        each.sleep_s is None
        or each.wake_s is None
        or each.probe_s is None
        or each.identical is None
        or each.device_awake_bytes is None
        or each.device_asleep_bytes is None
        or each.rss_bytes is None
        or each.open_files is None
    ):
        return None
    return Iteration(
        each.number,
        each.burst_requests,
        each.burst_failed,
        each.burst_s,
        each.sleep_s,
        each.wake_s,
        each.wake,
        each.occupied,
        each.identical,
        each.probe_s,
        each.device_awake_bytes,
        each.device_asleep_bytes,
        each.rss_bytes,
        each.open_files,
        each.occupied_bytes,
    )


# -- small parts of them -------------------------------------------------------------------------


def _operations(sleep: _Reported, wakes: Sequence[_Reported]) -> tuple[Operation, ...]:
    names = ["wake"] if len(wakes) == 1 else [f"wake, {at} of {len(wakes)}" for at in range(1, len(wakes) + 1)]
    woken = [Operation(name, wake.wall_s, wake.stages) for name, wake in zip(names, wakes, strict=True)]
    return Operation("sleep", sleep.wall_s, sleep.stages), *woken


def _log_cycles(entries: Iterable[_LogEntry]) -> list[Cycle]:
    """Cycles of a log: each sleep with the wakes after it. A sleep that nobody woke from is no cycle."""
    cycles: list[Cycle] = []
    sleep: _LogEntry | None = None
    wakes: list[_LogEntry] = []

    def close() -> None:
        if sleep is None or not wakes:
            return
        reported = [_Reported(entry.wall_s, entry.stages) for entry in (sleep, *wakes)]
        cycles.append(
            Cycle(
                len(cycles) + 1,
                sleep.wall_s,
                sum(wake.wall_s for wake in wakes),
                len(wakes) > 1,
                asleep_bytes=sleep.device_bytes_after,
                operations=_operations(reported[0], reported[1:]),
            )
        )

    for entry in entries:
        if not entry.performed or entry.error:
            continue
        if entry.operation == "sleep":
            close()
            sleep, wakes = entry, []
        elif entry.operation == "wake":
            wakes.append(entry)
    close()
    return cycles


def _log_attribution(entries: Iterable[_LogEntry]) -> tuple[AttributedCycle, ...]:
    """The steps of each cycle of a log whose executor told them: of a sleep, and of what came after it."""
    cycles: list[list[Step]] = []
    for entry in entries:
        if not entry.memory:
            continue
        if entry.operation == "sleep" or not cycles:
            cycles.append([])
        for step in entry.memory:
            ranks = (
                RankMemory(memory.rank, memory.used_bytes, memory.kinds, memory.host, memory.unaccounted)
                for memory in step.ranks
            )
            cycles[-1].append(Step(step.step, tuple(ranks)))
    return tuple(AttributedCycle(number, tuple(steps)) for number, steps in enumerate(cycles, 1))


def _above(used: Sequence[int], empty: Sequence[int]) -> tuple[int, ...]:
    """Readings beyond those of empty devices, where these are known."""
    if len(used) != len(empty):
        return tuple(used)
    return tuple(reading - before for reading, before in zip(used, empty, strict=True))


def _identicals(cycles: Iterable[Cycle]) -> Iterable[bool]:
    return (bool(cycle.identical) for cycle in cycles)


def _count(outcomes: Iterable[bool]) -> str:
    found = list(outcomes)
    return f"the same in {sum(found)} of {len(found)}"


def _identical(good: bool | None) -> str:
    return {True: "identical", False: "NOT identical", None: "no cycle was completed"}[good]


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _device(kind: str) -> str:
    return {"soft": "software device", "cuda": "CUDA"}.get(kind, kind)


def _bench_device(command: Sequence[str]) -> str:
    """``bench_gpu.py`` runs on CUDA unless it is told otherwise, and says so in its command only."""
    joined = " ".join(command)
    return _device("soft" if "--device soft" in joined or "--device=soft" in joined else "cuda")


def _command(words: Sequence[str]) -> str:
    return shlex.join(words)


def _strings(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _host(host: dict[str, Any]) -> str:
    described = _machine(_strings(host.get("gpus")), host.get("driver"), host.get("cpus"), host.get("python"))
    versions = host.get("versions")
    torch = versions.get("torch") if isinstance(versions, dict) else None
    return f"{described}, torch {torch}" if torch else described


def _machine(gpus: Sequence[str], driver: Any = None, cpus: Any = None, python: Any = None) -> str:
    counts = dict.fromkeys(gpus, 0)
    for gpu in gpus:
        counts[gpu] += 1
    parts = [f"{count} x {gpu}" if count > 1 else gpu for gpu, count in counts.items()]
    parts += [f"driver {driver}"] if driver else []
    parts += [f"{cpus} CPUs"] if cpus else []
    parts += [f"Python {python}"] if python else []
    return ", ".join(parts)


class _Format(Struct, frozen=True):
    """A kind of file: how it is called and told, what it is decoded as, and how that becomes a run."""

    name: str
    recognised: Callable[[Any], bool]
    type: Any
    convert: Callable[[str, Any], Run]


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda document: isinstance(document, dict) and all(name in document for name in names)


def _is(kind: str) -> Callable[[Any], bool]:
    return lambda document: isinstance(document, dict) and document.get("kind") == kind


def _is_part(document: Any) -> bool:
    """A part of gpu_vllm that puts engines to sleep again and again: others have no cycles, or other ones."""
    part = document.get("part") if _has("part", "cycles")(document) else None
    return isinstance(part, dict) and part.get("kind") == "cycles"


def _are_parts(document: Any) -> bool:
    return isinstance(document, dict) and bool(document) and all(map(_has("how", "seconds"), document.values()))


def _is_log(document: Any) -> bool:
    return isinstance(document, list) and bool(document) and all(map(_is_log_line, document))


def _is_log_line(document: Any) -> bool:
    return any(_has("operation", *others)(document) for others in (("stages", "wall_s"), ("error", "executor_alive")))


_FORMATS = (
    _Format("an attribution", _is("attribution"), _Attribution, _attribution),
    _Format("a soak's JSON", _is("soak"), _Soak, _soak),
    _Format("the arms of scripts/bench_cycle.py", _is("arms"), _Arms, _arms),
    _Format("the JSON of `checkpoint-executor demo --json`", _has("device_note", "cycles"), _Demo, _demo),
    _Format("a table of scripts/bench_gpu.py", _has("weights_gib", "communication", "ranks"), _Table, _table),
    _Format("the ways.json of scripts/bench_gpu.py", _has("weights_gib", "runs"), _Ways, _ways),
    _Format("a part with cycles of scripts/gpu_vllm.py", _is_part, _Part, _part),
    _Format("a log of CHECKPOINT_EXECUTOR_LOG", _is_log, tuple[_LogEntry, ...], _cycle_log),
    _Format(
        "a line of CHECKPOINT_EXECUTOR_LOG",
        _is_log_line,
        _LogEntry,
        lambda source, entry: _cycle_log(source, (entry,)),
    ),
)

_EXPECTED = f"Expected {', '.join(known.name for known in _FORMATS[:-2])}, or {_FORMATS[-2].name}"

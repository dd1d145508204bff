"""I/O. Pictures of recorded runs, drawn by matplotlib into PNGs in memory.

Knows the runs as data (``recorded.py``), and neither files nor the page. matplotlib is an extra and slow to import: it
is imported by the first picture and not before. Only its object interface is used: no window, no list of open figures,
and the user's own settings are put back. Colours carry meaning and are the same in every picture; what a colour cannot
show is written beside it.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

from checkpoint_executor.attribution import KINDS
from checkpoint_executor.recorded import AttributedCycle, Cycle, Iteration, Operation, Run, Stage, size_text
from checkpoint_executor.report_page import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "MissingMatplotlibError",
    "comparison",
    "cycle_times",
    "drift",
    "memory_by_step",
    "pictures_of",
    "require_matplotlib",
    "timeline",
    "ways",
]

DOTS_PER_INCH = 110

_PAPER, _INK, _FAINT, _GRID = "#ffffff", "#24292f", "#6a737d", "#e3e6e9"

#: Two shades of one colour for kinds that belong together: the allocator's, graphs, NCCL, workspaces, the process's.
KIND_COLOURS = {
    "weights": "#1f4e8c",
    "kv_cache": "#8db7e3",
    "graph_pools": "#b5540c",
    "graph_executables": "#f2a65e",
    "nccl_persistent": "#146b52",
    "nccl_suspendable": "#7fc8a9",
    "workspaces": "#6b3f94",
    "cublas": "#bda0dc",
    "local_memory": "#d9607a",
    "context": "#a62b40",
    "helper": "#ec98a4",
    "remainder": "#c9cdd1",
}
_UNKNOWN_KIND = "#8a8f94"

KIND_LABELS = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "graph_pools": "graph pools",
    "graph_executables": "graph executables",
    "nccl_persistent": "NCCL, persistent",
    "nccl_suspendable": "NCCL, suspendable",
    "workspaces": "workspaces",
    "cublas": "cuBLAS",
    "local_memory": "kernels' local memory",
    "context": "context and modules",
    "helper": "helper process",
    "remainder": "remainder (not told apart)",
}

#: Managed by the allocator, so that its own sleep removes them: left out where the rest is to be seen.
_ALLOCATED = ("weights", "kv_cache")

#: Who does the work of a stage, by the beginning of its name.
_ACTORS = (
    ("driver: lock, checkpoint, restore, unlock", "#c0392b", ("lock", "checkpoint", "restore", "unlock")),
    ("allocator: weights and KV cache", "#1f4e8c", ("sleep_allocator", "wake_allocator", "worker_")),
    ("communicators", "#2a9d73", ("suspend_", "resume_", "confirm_")),
    ("workspaces", "#7d52a5", ("prepare_", "restore_workspaces")),
    ("readings and admission", "#8a8f94", ("measure_", "admit_")),
)

_SLEEP, _WAKE = "#1f4e8c", "#d1701a"


_STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlepad": 7,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "hatch.color": "#8a8f94",
    "hatch.linewidth": 0.8,
    # Names are names, also with dollars in them.
    "text.parse_math": False,
}

P = ParamSpec("P")


class MissingMatplotlibError(ImportError):
    """matplotlib is not installed. The text names the extra that brings it."""


def _styled(draw: Callable[P, bytes]) -> Callable[P, bytes]:
    """Draw with these settings alone, whatever the user's own are, and leave those as they were."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> bytes:
        require_matplotlib()
        import matplotlib

        # Without the backend: none is asked for, and to set one would load it.
        defaults = {name: value for name, value in matplotlib.rcParamsDefault.items() if "backend" not in name}
        settings: Any = {**defaults, **_STYLE}
        with matplotlib.rc_context(settings):
            return draw(*args, **kwargs)

    return styled


def require_matplotlib() -> None:
    """Say at once if no picture can be drawn.

    Raises:
        MissingMatplotlibError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingMatplotlibError("pictures need matplotlib: pip install 'checkpoint-executor[report]'")


def pictures_of(runs: Sequence[Run]) -> list[tuple[Run | None, Picture]]:
    """Every picture that the runs have material for, with the run it belongs to; None for those of all together.

    Raises:
        MissingMatplotlibError: matplotlib is not installed.
    """
    require_matplotlib()
    found: list[tuple[Run | None, Picture]] = []
    timed = [run for run in runs if run.cycles]
    if len(timed) > 1:
        found.append(
            (None, Picture("comparison", "Sleep and wake, compared", _CAPTIONS["comparison"], comparison(timed)))
        )
    for number, run in enumerate(runs, 1):
        for kind, title, draw, has_material in _PICTURES:
            if has_material(run):
                picture = Picture(f"{number:02}-{kind}", title, _CAPTIONS[kind], draw(run))
                found.append((run, picture))
    return found


# -- GPU memory by step --------------------------------------------------------------------------


@_styled
def memory_by_step(run: Run, cycle: int = -1) -> bytes:
    """GPU memory by step and kind, stacked; above everything, below without weights and KV cache.

    Args:
        run: one with attribution. cycle: index into its cycles.

    Raises:
        ValueError: the run has no attribution.
    """
    attributed = _last_with_steps(run, cycle)
    steps = attributed.steps
    ranks = sorted({memory.rank for step in steps for memory in step.ranks})
    kinds = _kinds(attributed)
    figure = _figure(max(5.0, 1.05 * len(steps)) + 2.3, 7.2)
    axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1, 1.15)})
    figure.suptitle(_heading(run, f"GPU memory by step, cycle {attributed.number}"), **_TITLE)
    by_rank = f" (in each step one bar a rank: {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
    large = any(memory.device_used_bytes >= 1 << 30 for step in steps for memory in step.ranks)
    _stacks(axes[0], attributed, ranks, kinds, 1 << 30 if large else 1 << 20)
    axes[0].set_title(f"everything, {'GiB' if large else 'MiB'}{by_rank}", **_SUBTITLE)
    _stacks(axes[1], attributed, ranks, kinds, 1 << 20, left_out=_ALLOCATED)
    axes[1].set_title("without weights and KV cache, MiB", **_SUBTITLE)
    axes[1].set_xticks(range(len(steps)), [_wrap(step.step) for step in steps])
    for ax in axes:
        ax.tick_params(axis="x", length=0, labelsize=8)
    handles = [_swatch(kind) for kind in reversed(kinds)]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8.5, labelspacing=0.7)
    return _png(figure)


def _stacks(
    ax: Axes,
    cycle: AttributedCycle,
    ranks: Sequence[int],
    kinds: Sequence[str],
    scale: int,
    left_out: Sequence[str] = (),
) -> None:
    """Bars by step, the ranks' side by side. What is negative hangs below zero; above is what the device says."""
    width = 0.72 / len(ranks)
    top = 0.0
    for at, step in enumerate(cycle.steps):
        highest, totals = 0.0, []
        for memory in step.ranks:
            x = at + (ranks.index(memory.rank) - (len(ranks) - 1) / 2) * width
            up, down = 0.0, 0.0
            for kind in kinds:
                size = memory.kinds.get(kind, 0) / scale
                if kind in left_out or not size:
                    continue
                base = up if size > 0 else down
                ax.bar(x, size, width * 0.94, bottom=base, linewidth=0.6, edgecolor=_PAPER, **_fill(kind))
                up, down = (up + size, down) if size > 0 else (up, down + size)
            highest = max(highest, up)
            totals.append(memory.device_used_bytes - sum(memory.kinds.get(kind, 0) for kind in left_out))
        written = _mib if left_out else size_text
        text = "\nto ".join(dict.fromkeys(map(written, sorted({min(totals, default=0), max(totals, default=0)}))))
        place = at, highest
        ax.annotate(text, place, (0, 3), textcoords="offset points", ha="center", fontsize=8, color=_INK)
        top = max(top, highest)
    ax.axhline(0, color=_FAINT, linewidth=0.8)
    ax.spines["bottom"].set_visible(False)
    ax.set_xlim(-0.6, len(cycle.steps) - 0.4)
    ax.set_ylim(top=top * 1.15 if top else 1)
    ax.grid(axis="y", color=_GRID, linewidth=0.8)


def _last_with_steps(run: Run, cycle: int) -> AttributedCycle:
    found = [attributed for attributed in run.attribution if attributed.steps]
    if not found:
        raise ValueError(f"{run.source} has no attribution")
    return found[cycle]


def _kinds(cycle: AttributedCycle) -> list[str]:
    """Kinds that hold anything in the cycle, the known ones first, in their order."""
    present = {
        kind: None for step in cycle.steps for memory in step.ranks for kind, size in memory.kinds.items() if size
    }
    return (
        [kind for kind in KINDS[:-1] if kind in present]
        + [kind for kind in present if kind not in KINDS]
        + ["remainder"] * ("remainder" in present)
    )


def _fill(kind: str) -> dict[str, Any]:
    colour = KIND_COLOURS.get(kind, _UNKNOWN_KIND)
    # Hatched: it is not a kind of memory, but what nobody could tell.
    return {"facecolor": colour, "hatch": "////" if kind == "remainder" else None}


def _swatch(kind: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=KIND_LABELS.get(kind, kind.replace("_", " ")), edgecolor=_PAPER, **_fill(kind))


# -- stages --------------------------------------------------------------------------------------


@_styled
def timeline(run: Run, number: int | None = None) -> bytes:
    """The stages of one cycle, one lane a rank; sleep above, wake below, on one scale of seconds.

    Args:
        run: one with stages. number: the cycle's; by default the whole one whose time is the median.

    Raises:
        ValueError: the run has no stages, or no such cycle.
    """
    cycle = _typical(run, number)
    ranks = max(len(stage.ranks) for operation in cycle.operations for stage in operation.stages)
    rows = (
        [operation for operation in cycle.operations if operation.name == "sleep"],
        [operation for operation in cycle.operations if operation.name != "sleep"],
    )
    figure = _figure(10.5, 3.8 + 2 * min(0.42 * ranks, 5.0))
    axes = figure.subplots(2, 1, sharex=True)
    which = f"cycle {cycle.number}" + (f" of {len(run.cycles)}" if len(run.cycles) > 1 else "")
    figure.suptitle(_heading(run, f"Stages of a sleep and a wake, {which}"), **_TITLE)
    longest = max(sum(operation.wall_s for operation in row) for row in rows) or 1.0
    for ax, row, name in zip(axes, rows, ("sleep", "wake"), strict=True):
        seconds = sum(operation.wall_s for operation in row)
        ax.set_title(f"{name}, {_seconds(seconds)}{' (by tag)' if len(row) > 1 else ''}", **_SUBTITLE)
        small = _lanes(ax, row, ranks, longest, figure.get_figwidth())
        ax.set_xlim(0, longest * 1.005)
        ax.set_ylim(ranks - 0.45, -1.5)
        labels = range(ranks) if ranks <= 16 else range(0, ranks, 4)
        ax.set_yticks(labels, [f"rank {rank}" for rank in labels])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.grid(axis="x", color=_GRID, linewidth=0.8)
        if small:
            ax.set_xlabel(
                _folded("too short for a name: " + ", ".join(small), 165), fontsize=8, color=_FAINT, loc="left"
            )
        ax.tick_params(axis="x", labelbottom=True)
    note = "Seconds. Solid: what the rank itself reports; pale: until the last rank had answered."
    legend = figure.legend(
        handles=_actor_swatches(rows), loc="outside lower left", ncols=5, frameon=False, fontsize=8.5, title=note
    )
    legend.get_title().set_fontsize(8.5)
    legend.set_alignment("left")
    return _png(figure)


def _lanes(ax: Axes, operations: Sequence[Operation], ranks: int, longest_s: float, width_in: float) -> list[str]:
    """Draw the stages one after another; returns those too short to carry their name, with their times."""
    at, small = 0.0, []
    for operation in operations:
        for stage in operation.stages:
            colour = _actor(stage.name)[1]
            ax.barh(range(ranks), stage.wall_s, 0.8, left=at, color=colour, alpha=0.22, linewidth=0)
            for rank, seconds in enumerate(stage.ranks):
                ax.barh(rank, seconds, 0.56, left=at, color=colour, linewidth=0)
            name = stage.name.replace("_", " ")
            # In characters of 8.5 points, with some room.
            room = stage.wall_s / longest_s * (width_in - 1.2) / 0.075
            lines = [*([name] if len(name) < room else name.split()), _seconds(stage.wall_s)]
            if max(map(len, lines)) < room:
                label = "\n".join(lines)
                ax.text(at + stage.wall_s / 2, -0.5, label, ha="center", va="bottom", fontsize=8.5, color=_INK)
            else:
                # Kept together where the line is folded.
                small.append(f"{name} {_seconds(stage.wall_s)}".replace(" ", "\N{NO-BREAK SPACE}"))
            at += stage.wall_s
    return small


def _actor(stage: str) -> tuple[str, str]:
    """Who does a stage, and its colour."""
    best = ("others", "#24292f")
    length = 0
    for label, colour, beginnings in _ACTORS:
        for beginning in beginnings:
            # The longest: "restore_workspaces" is not the driver's "restore".
            if stage.startswith(beginning) and len(beginning) > length:
                best, length = (label, colour), len(beginning)
    return best


def _actor_swatches(rows: Iterable[Sequence[Operation]]) -> list[Any]:
    from matplotlib.patches import Patch

    seen = dict.fromkeys(_actor(stage.name) for row in rows for operation in row for stage in operation.stages)
    order = [(label, colour) for label, colour, _ in _ACTORS]
    return [Patch(facecolor=colour, label=label) for label, colour in sorted(seen, key=lambda a: [*order, a].index(a))]


def _typical(run: Run, number: int | None) -> Cycle:
    drawable = [cycle for cycle in run.cycles if _stages(cycle)]
    if number is not None:
        drawable = [cycle for cycle in drawable if cycle.number == number]
    if not drawable:
        raise ValueError(f"{run.source} has no stages" + (f" of a cycle {number}" if number is not None else ""))
    # The first pays for what the others find done, and a wake by tag is two calls.
    ordinary = [cycle for cycle in drawable[1:] if not cycle.partial] or drawable
    ordinary = sorted(ordinary, key=lambda cycle: cycle.sleep_s + cycle.wake_s)
    return ordinary[(len(ordinary) - 1) // 2]


def _stages(cycle: Cycle) -> list[Stage]:
    return [stage for operation in cycle.operations for stage in operation.stages if stage.ranks]


# -- times by cycle ------------------------------------------------------------------------------


@_styled
def cycle_times(run: Run) -> bytes:
    """Seconds of each sleep and wake by cycle.

    Raises:
        ValueError: the run has no cycles.
    """
    if not run.cycles:
        raise ValueError(f"{run.source} has no cycles")
    from matplotlib.ticker import MaxNLocator

    many = len(run.cycles) > 40
    figure = _figure(10 if many else 8, 4.2)
    ax = figure.subplots()
    figure.suptitle(_heading(run, "Seconds of each sleep and wake"), **_TITLE)
    numbers = [cycle.number for cycle in run.cycles]
    size = 3.0 if many else 6.5
    line: dict[str, Any] = {"linestyle": "none"} if many else {"linewidth": 1.2}
    sleeps = [cycle.sleep_s for cycle in run.cycles]
    ax.plot(numbers, sleeps, marker="o", markersize=size, color=_SLEEP, label=_summary("sleep", sleeps), **line)
    wakes = [(cycle.number, cycle.wake_s) for cycle in run.cycles]
    if not many:
        ax.plot(*zip(*wakes, strict=True), color=_WAKE, linewidth=1.2, zorder=1.5)
    for partial, name, face in ((False, "wake", _WAKE), (True, "wake by tag", _PAPER)):
        chosen = [(cycle.number, cycle.wake_s) for cycle in run.cycles if cycle.partial is partial]
        if chosen:
            label = _summary(name, [seconds for _, seconds in chosen])
            xs, ys = zip(*chosen, strict=True)
            ax.plot(xs, ys, "s", markersize=size, color=_WAKE, markerfacecolor=face, label=label)
    wrong = [cycle for cycle in run.cycles if cycle.identical is False]
    if wrong:
        label = f"NOT identical ({len(wrong)})"
        ax.plot([c.number for c in wrong], [c.wake_s for c in wrong], "x", color="#c0392b", markersize=10, label=label)
    ax.set_ylim(0, max(max(sleeps), max(seconds for _, seconds in wakes)) * 1.12 or 1)
    ax.set_ylabel("seconds")
    ax.set_xlabel("iteration" if run.iterations else "cycle")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="y", color=_GRID, linewidth=0.8)
    if len(numbers) <= 20:
        ax.set_xticks(numbers)
    figure.legend(loc="outside lower left", ncols=1, frameon=False, fontsize=9)
    return _png(figure)


@_styled
def comparison(runs: Sequence[Run]) -> bytes:
    """Sleep, wake and what stays on the device, one row a run: medians with ranges, the first sleep beside them.

    Raises:
        ValueError: none of the runs has cycles.
    """
    timed = [run for run in runs if run.cycles]
    if not timed:
        raise ValueError("none of the runs has cycles")
    figure = _figure(10.5, 1.9 + 0.5 * len(timed))
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (2.2, 1)})
    figure.suptitle("Sleep and wake, compared", **_TITLE)
    later = {at: run.cycles[1:] or run.cycles for at, run in enumerate(timed)}
    firsts = {at: run.cycles[0].sleep_s for at, run in enumerate(timed) if len(run.cycles) > 1}
    edge = max(max(cycle.sleep_s, cycle.wake_s) for cycles in later.values() for cycle in cycles)
    # One slow first sleep must not press everything else together: from there on it is a mark at the edge.
    edge = max([edge, *(first for first in firsts.values() if first < 1.6 * edge)])
    for at, run in enumerate(timed):
        for name, colour, y in (("sleep", _SLEEP, at - 0.14), ("wake", _WAKE, at + 0.14)):
            values = [cycle.sleep_s if name == "sleep" else cycle.wake_s for cycle in later[at]]
            middle, end = statistics.median(values), max(values)
            left.plot((min(values), end), (y, y), color=colour, linewidth=2.5, solid_capstyle="round")
            left.plot(middle, y, "o", color=colour, markersize=6, label=f"{name}, later cycles" if at == 0 else None)
            if name == "sleep" and at in firsts:
                first, mark = firsts[at], {"color": _SLEEP, "markerfacecolor": _PAPER, "markersize": 5.0}
                left.plot(min(first, edge * 1.08), y, "D" if first <= edge else ">", **mark)
                # Left of its mark where both texts have room between the range and the mark, else right of it.
                before = first > edge or first - end > 0.34 * edge
                if before or (0.15 * edge < first - end and first < 0.9 * edge):
                    text = f"the first: {_seconds(first)}"
                    side: dict[str, Any] = {"ha": "right" if before else "left", "xytext": (-6 if before else 6, 0)}
                    style: dict[str, Any] = {"va": "center", "fontsize": 8, "color": _SLEEP}
                    place = min(first, edge * 1.08), y
                    left.annotate(text, place, textcoords="offset points", **side, **style)
                else:
                    end = max(end, first)  # the text goes beyond the mark
            style = {"va": "center", "fontsize": 8, "color": _INK}
            left.annotate(_seconds(middle), (end, y), (7, 0), textcoords="offset points", **style)
        asleep = max((used for cycle in run.cycles for used in cycle.asleep_bytes), default=None)
        if asleep is not None:
            right.barh(at, asleep / (1 << 20), 0.4, color=_FAINT)
            style = {"va": "center", "fontsize": 8, "color": _INK}
            place = max(asleep / (1 << 20), 0), at
            right.annotate(_mib(asleep), place, (4, 0), textcoords="offset points", **style)
    if firsts:
        left.plot([], [], "D", color=_SLEEP, markerfacecolor=_PAPER, markersize=5, label="sleep, the first")
    left.set_yticks(range(len(timed)), [_folded(run.name, 34) for run in timed])
    left.set_ylim(len(timed) - 0.5, -0.5)
    left.set_xlim(0, edge * 1.12 or 1)
    right.set_xlim(0, (right.get_xlim()[1] or 1) * 1.35)
    left.set_title("seconds: median and range", **_SUBTITLE)
    right.set_title("MiB left while asleep, at most", **_SUBTITLE)
    for ax in (left, right):
        ax.grid(axis="x", color=_GRID, linewidth=0.8)
        ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return _png(figure)


@_styled
def ways(run: Run) -> bytes:
    """The ways to sleep of one run: seconds down and up, what is left on the device, and host memory: what a sleep
    took of it, or, of arms, all that a worker has asleep, because their processes hold different amounts awake.

    Raises:
        ValueError: the run compared no ways.
    """
    if not run.ways:
        raise ValueError(f"{run.source} compares no ways")
    figure = _figure(11, 1.9 + 0.42 * len(run.ways))
    axes = figure.subplots(1, 3, sharey=True, gridspec_kw={"width_ratios": (1.7, 1, 1)})
    figure.suptitle(_heading(run, run.name), **_TITLE)
    rows = range(len(run.ways))
    for offset, name, colour, values, ranges in (
        (-0.19, "down", _SLEEP, [way.down_s for way in run.ways], [way.down_range_s for way in run.ways]),
        (0.19, "up", _WAKE, [way.up_s for way in run.ways], [way.up_range_s for way in run.ways]),
    ):
        bars = axes[0].barh(
            [row + offset for row in rows], values, 0.36, color=colour, label=name, **_whiskers(values, ranges)
        )
        axes[0].bar_label(bars, [_seconds(value) for value in values], padding=3, fontsize=8, color=_INK)
    arms = run.kind == "arms"
    host = [way.rss_asleep_bytes - (0 if arms else way.rss_before_bytes) for way in run.ways]
    for ax, scale, written, sizes in (
        (axes[1], 1 << 20, _mib, [way.left_above_empty_bytes for way in run.ways]),
        (axes[2], 1 << 30, size_text, host),
    ):
        bars = ax.barh(rows, [size / scale for size in sizes], 0.5, color=_FAINT)
        ax.bar_label(bars, [written(size) for size in sizes], padding=3, fontsize=8, color=_INK)
    memory = "host memory of a worker, GiB" if arms else "host memory taken by it, GiB"
    titles = ("seconds", "left on the device, MiB", memory)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, **_SUBTITLE)
        ax.margins(x=0.28 if ax is not axes[0] else 0.14)
        ax.grid(axis="x", color=_GRID, linewidth=0.8)
        ax.tick_params(axis="y", length=0)
    # The panels are narrow, and numbers of five digits would run into each other.
    for ax in axes[1:]:
        ax.locator_params(axis="x", nbins=4)
    axes[0].set_yticks(rows, [way.way for way in run.ways])
    axes[0].set_ylim(len(run.ways) - 0.5, -0.5)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return _png(figure)


def _whiskers(values: Sequence[float], ranges: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Arguments of bars whose ranges are drawn too, if they have any."""
    if not any(ranges):
        return {}
    low = [max(value - found[0], 0.0) if found else 0.0 for value, found in zip(values, ranges, strict=True)]
    high = [max(found[-1] - value, 0.0) if found else 0.0 for value, found in zip(values, ranges, strict=True)]
    return {"xerr": (low, high), "error_kw": {"ecolor": _INK, "elinewidth": 0.9, "capsize": 2.5}}


# -- drift ---------------------------------------------------------------------------------------


@_styled
def drift(run: Run) -> bytes:
    """Everything that a soak watches, by iteration; memory as the change against the first iteration.

    Raises:
        ValueError: the run is no soak, or has no iterations.
    """
    if not run.iterations:
        raise ValueError(f"{run.source} has no iterations of a soak")
    panels = _panels(run.iterations)
    figure = _figure(11, 1.2 + 2.05 * ((len(panels) + 1) // 2))
    axes = figure.subplots((len(panels) + 1) // 2, 2, sharex=True, squeeze=False).ravel()
    figure.suptitle(_heading(run, "Drift: everything that the soak watches, by iteration"), **_TITLE)
    numbers = [iteration.number for iteration in run.iterations]
    for ax, (title, series, least) in zip(axes, panels, strict=False):
        ax.set_title(title, **_SUBTITLE)
        # Of many lines, those of one sort are one colour: which rank it is, the file says.
        sorts = [name.partition(" ")[0] if len(series) > 5 else name for name, _ in series]
        colours = dict(zip(dict.fromkeys(sorts), _LINES, strict=False))
        for at, (name, (_, values)) in enumerate(zip(sorts, series, strict=True)):
            label = name if name not in sorts[:at] else None
            known = [(x, y) for x, y in zip(numbers, values, strict=True) if y is not None]
            _readings(ax, known, colours[name], label)
        low, high = ax.get_ylim()
        if least is None:
            ax.set_ylim(0, high)
        elif high - low < 2 * least:
            # Noise of a page must not look like a mountain.
            middle = (low + high) / 2
            ax.set_ylim(middle - least, middle + least)
        ax.margins(x=0.02)
        if run.warm_up_iterations:
            ax.axvspan(numbers[0], numbers[0] + run.warm_up_iterations, color=_GRID, alpha=0.55, linewidth=0, zorder=0)
        ax.grid(axis="y", color=_GRID, linewidth=0.8)
        if len(series) > 1:
            place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.985), "borderaxespad": 0.2}
            ax.legend(
                frameon=False, fontsize=8, ncols=6, handlelength=1.0, columnspacing=0.9, handletextpad=0.4, **place
            )
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[: len(panels)][-2:]:
        ax.set_xlabel("iteration")
        ax.tick_params(axis="x", labelbottom=True)
    return _png(figure)


def _readings(ax: Axes, readings: Sequence[tuple[int, float]], colour: str, label: str | None) -> None:
    """Few as dots; many as the median of each stretch of them, in a band from the least to the most."""
    if len(readings) <= _MAX_DOTS:
        ax.plot(
            *zip(*readings, strict=True), color=colour, label=label, linewidth=0.8, marker="o", markersize=3, alpha=0.85
        )
        return
    stretch = -(-len(readings) // _STRETCHES)
    parts = [readings[at : at + stretch] for at in range(0, len(readings), stretch)]
    xs = [statistics.fmean(x for x, _ in part) for part in parts]
    values = [[y for _, y in part] for part in parts]
    ax.fill_between(xs, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.2, linewidth=0)
    ax.plot(xs, list(map(statistics.median, values)), color=colour, label=label, linewidth=1.5)


_MAX_DOTS, _STRETCHES = 60, 40

Series = tuple[str, list[float | None]]

#: Of the lines of one panel.
_LINES = ("#1f4e8c", "#d1701a", "#2a9d73", "#a62b40", "#7d52a5", "#8a8f94", "#8db7e3", "#b59b00")


def _panels(iterations: Sequence[Iteration]) -> list[tuple[str, list[Series], float | None]]:
    """Title, lines, and for a level the least half height of its panel; None for times."""
    mib = 1 << 20
    panels: list[tuple[str, list[Series], float | None]] = [
        ("burst of requests, s", [("burst", [i.burst_s for i in iterations])], None),
        ("probe, s", [("probe", [i.probe_s for i in iterations])], None),
        ("sleep, s", [("sleep", [i.sleep_s for i in iterations])], None),
    ]
    wakes: list[Series] = []
    for kind, name in (("whole", "whole"), ("by_tag", "by tag")):
        if any(i.wake == kind for i in iterations):
            wakes.append((name, [i.wake_s if i.wake == kind else None for i in iterations]))
    panels.append(("wake, s", wakes or [("wake", [i.wake_s for i in iterations])], None))
    first = iterations[0]
    for title, readings in (
        (f"device, awake: change in MiB (first: {_first(first.device_awake_bytes)})", "device_awake_bytes"),
        (f"device, asleep: change in MiB (first: {_first(first.device_asleep_bytes)})", "device_asleep_bytes"),
    ):
        by_rank: list[Series] = []
        for rank in range(len(getattr(first, readings))):
            values = [getattr(i, readings) for i in iterations]
            begun = values[0][rank]
            by_rank.append((f"rank {rank}", [(v[rank] - begun) / mib if rank < len(v) else None for v in values]))
        if by_rank:
            panels.append((title, by_rank, 1.0))
    resident: list[Series] = []
    for name, begun in first.rss_bytes.items():
        sizes = [i.rss_bytes.get(name) for i in iterations]
        resident.append((name, [None if size is None else (size - begun) / mib for size in sizes]))
    if resident:
        panels.append(("host RSS: change in MiB", resident, 1.0))
    files: list[Series] = [(name, [i.open_files.get(name) for i in iterations]) for name in first.open_files]
    if files:
        panels.append(("open files", files, 2.0))
    return panels


def _first(sizes: Sequence[int]) -> str:
    return " / ".join(dict.fromkeys(size_text(size) for size in sizes))


# -- what they have in common --------------------------------------------------------------------

_TITLE: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 12, "fontweight": "bold", "color": _INK}
_SUBTITLE: dict[str, Any] = {"loc": "left", "fontsize": 9.5, "color": _INK}

_CAPTIONS = {
    "comparison": (
        "Median and range over all cycles but the first, whose sleep stands beside them where it was timed; "
        "what stays is the most that any cycle and any rank left."
    ),
    "memory": (
        "The upper row has everything, the lower one leaves out weights and KV cache, in another unit. Figures above "
        "the bars are what the device says. The hatched remainder is what could not be told apart."
    ),
    "timeline": (
        "One cycle, the median one of the whole cycles after the first. A stage ends when every rank has answered, so "
        "the ranks' stages begin together."
    ),
    "cycles": "Whole calls as the caller sees them. A hollow square is a wake that brought tags back one by one.",
    "ways": "One process, one after another. Host memory is the growth of the worker's resident memory by the sleep.",
    "arms": (
        "Bars are medians over all cycles of all launches, lines go from the least to the most; what is left is the "
        "most that any cycle and device kept. Each launch is a process of its own, and the arms took turns. Host "
        "memory is all that a worker has resident while asleep, the backup of its weights included."
    ),
    "drift": (
        "Memory is the change against the first iteration. Of many iterations, a line is the median of each stretch of "
        "them and its band goes from the least to the most. The grey part is the warm-up, which the fitted slopes in "
        "the table leave out."
    ),
}

_PICTURES: tuple[tuple[str, str, Any, Any], ...] = (
    ("memory", "GPU memory by step", memory_by_step, lambda run: any(cycle.steps for cycle in run.attribution)),
    ("timeline", "Stages, one lane a rank", timeline, lambda run: any(map(_stages, run.cycles))),
    ("cycles", "Sleep and wake by cycle", cycle_times, lambda run: bool(run.cycles)),
    ("ways", "Ways to sleep", ways, lambda run: bool(run.ways) and run.kind != "arms"),
    ("arms", "Arms, compared", ways, lambda run: bool(run.ways) and run.kind == "arms"),
    ("drift", "Drift", drift, lambda run: bool(run.iterations)),
)


def _figure(width_in: float, height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=DOTS_PER_INCH, layout="constrained", facecolor=_PAPER)


def _heading(run: Run, what: str) -> str:
    name = run.name if run.name not in what else ""
    return what if not name else f"{what}\n{name}"


def _png(figure: Figure) -> bytes:
    """The figure as a PNG of at most 256 colours: a third of the size, and flat areas and text need no more."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    drawn = Image.open(buffer).convert("RGB")
    buffer = io.BytesIO()
    drawn.quantize(256, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def _summary(name: str, values: Sequence[float]) -> str:
    text = f"{name}: median {_seconds(statistics.median(values))}"
    return text if len(values) == 1 else f"{text} ({_seconds(min(values))} to {_seconds(max(values))})"


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        milliseconds = seconds * 1000
        return f"{milliseconds:.{1 if milliseconds < 10 else 0}f} ms"
    return f"{seconds:.{2 if seconds < 10 else 1}f} s"


def _mib(size_bytes: float) -> str:
    """A size in the unit of its axis, whatever its size."""
    mib = size_bytes / (1 << 20)
    return f"{mib:,.{2 if abs(mib) < 10 else 0}f} MiB"


def _wrap(text: str) -> str:
    return text.replace("_", "\n")


def _folded(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))

"""PURE. The page about recorded runs: HTML from data, with its pictures in it.

One file, no network, no script: it can be mailed, and looks the same in ten years. Everything that comes from a run is
escaped here, at the one place where text becomes HTML (``_text``); nothing else may put a run's words into the page.
"""

from __future__ import annotations

import base64
import html
import statistics
from collections.abc import Iterable, Sequence
from string import Template

from msgspec import Struct

from checkpoint_executor.attribution import KINDS
from checkpoint_executor.recorded import Run, size_text

__all__ = ["Picture", "render"]

#: Tables of more rows than this show their beginning and their end.
MAX_ROWS = 40


class Picture(Struct, frozen=True):
    """A drawn picture. ``name``: of its file, without ending. ``caption``: how to read it, in a sentence or two."""

    name: str
    title: str
    caption: str
    png: bytes


class _Html(str):
    """Text that is HTML already. Only this module makes it."""

    __slots__ = ()


Cell = str | _Html


def render(runs: Sequence[Run], pictures: Iterable[tuple[Run | None, Picture]], title: str = "Recorded runs") -> str:
    """The page.

    Args:
        runs: in the order in which they are shown. pictures: each with its run, None for one of all runs together.
        title: of the page.
    """
    drawn = list(pictures)
    sections = [_overview(runs)]
    sections += [_picture(picture) for run, picture in drawn if run is None]
    for number, run in enumerate(runs, 1):
        sections.append(_section(number, run, [picture for owner, picture in drawn if owner is run]))
    return _PAGE.substitute(title=_text(title), style=_STYLE, body="\n".join(sections))


def _overview(runs: Sequence[Run]) -> str:
    rows = []
    for number, run in enumerate(runs, 1):
        link = _Html(f'<a href="#run-{number}">{_text(run.name)}</a>')
        rows.append(
            [link, run.device, run.when or "not recorded", _verdict(run), _Html(f"<code>{_text(run.source)}</code>")]
        )
    return f"<h2>Runs</h2>\n{_table(['run', 'device', 'when (UTC)', 'result', 'file'], rows)}"


def _section(number: int, run: Run, pictures: Sequence[Picture]) -> str:
    command = _Html(f"<code>{_text(run.command)}</code>") if run.command else "not recorded"
    facts: list[Sequence[Cell]] = [
        ["command", command],
        ["file", _Html(f"<code>{_text(run.source)}</code>, {_text(run.kind)}")],
        ["when (UTC)", run.when or "not recorded"],
        ["device", run.device or "not recorded"],
        ["machine", run.machine or "not recorded"],
        ["ranks", str(run.ranks)],
        ["result", _verdict(run)],
    ]
    parts = [f'<h2 id="run-{number}">{_text(run.name)}</h2>', _table([], facts, "facts")]
    if run.remarks:
        shown = [remark for row in _some([[remark] for remark in run.remarks]) for remark in row]
        parts.append("<ul>" + "".join(f"<li>{_text(remark)}</li>" for remark in shown) + "</ul>")
    parts += map(_picture, pictures)
    if run.evidence:
        rows = [list(pair) for pair in run.evidence]
        parts.append(f"<h3>What the check rested on</h3>\n{_table(['compared', 'outcome'], rows)}")
    if run.slopes:
        parts.append(_slopes(run))
    if run.ways:
        parts.append(_ways(run))
    if run.cycles:
        parts.append(_cycles(run))
    parts += [_attribution(run, at) for at in range(len(run.attribution))][-1:]
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<figure><img alt="{_text(picture.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _cycles(run: Run) -> str:
    what = "iteration" if run.iterations else "cycle"
    rows: list[Sequence[Cell]] = []
    for cycle in run.cycles:
        compared = {None: "not compared", True: "identical", False: _Html("<strong>NOT identical</strong>")}
        rows.append(
            [
                str(cycle.number),
                f"{cycle.sleep_s:.3f}",
                f"{cycle.wake_s:.3f}" + (" by tag" if cycle.partial else ""),
                " / ".join(map(size_text, cycle.asleep_bytes)) or "not read",
                compared[cycle.identical],
                cycle.note,
            ]
        )
    sleeps, wakes = [c.sleep_s for c in run.cycles], [c.wake_s for c in run.cycles]
    middle: list[Sequence[Cell]] = [
        [
            "median",
            f"{statistics.median(sleeps):.3f}",
            f"{statistics.median(wakes):.3f}",
            "",
            "",
            f"sleep {min(sleeps):.3f} to {max(sleeps):.3f}, wake {min(wakes):.3f} to {max(wakes):.3f}",
        ]
    ]
    head = [what, "sleep, s", "wake, s", "on each device asleep", "compared", ""]
    return f"<h3>{what.capitalize()}s</h3>\n{_table(head, [*middle, *rows], 'numbers')}"


def _slopes(run: Run) -> str:
    rows: list[Sequence[Cell]] = []
    for name, slope in run.slopes.items():
        verdict: Cell = "within" if slope.ok else _Html("<strong>DRIFTS</strong>")
        if not slope.judged:
            verdict = "too few readings"
        # Sizes in one unit, so that slope, error and bound can be compared at a glance.
        values = [slope.per_100, slope.standard_error, slope.bound]
        unit = slope.unit
        if unit == "bytes":
            unit, values = "KiB", [value / 1024 for value in values]
        rows.append([name, *(f"{value:.4g}" for value in values), unit, verdict])
    head = ["reading", "slope per 100 iterations", "standard error", "bound", "unit", "verdict"]
    return f"<h3>Slopes</h3>\n{_table(head, rows, 'numbers')}"


def _ways(run: Run) -> str:
    rows: list[Sequence[Cell]] = [
        [
            way.way,
            _ranged(way.down_s, way.down_range_s),
            _ranged(way.up_s, way.up_range_s),
            size_text(way.left_above_empty_bytes),
            size_text(way.rss_asleep_bytes - way.rss_before_bytes),
            size_text(way.rss_asleep_bytes),
            "identical" if way.identical else _Html("<strong>NOT identical</strong>"),
        ]
        for way in run.ways
    ]
    head = ["way", "down, s", "up, s", "left on the device", "host memory taken", "host memory asleep", "compared"]
    return f"<h3>Ways</h3>\n{_table(head, rows, 'numbers')}"


def _ranged(median_s: float, range_s: Sequence[float]) -> str:
    least_and_most = f" ({range_s[0]:.3f} to {range_s[-1]:.3f})" if range_s else ""
    return f"{median_s:.3f}{least_and_most}"


def _attribution(run: Run, at: int) -> str:
    """One cycle: a table for each rank, kinds down, steps across; host memory below."""
    cycle = run.attribution[at]
    parts = []
    for rank in sorted({memory.rank for step in cycle.steps for memory in step.ranks}):
        found = [next((memory for memory in step.ranks if memory.rank == rank), None) for step in cycle.steps]
        rows: list[Sequence[Cell]] = []
        kinds = dict.fromkeys(kind for memory in found if memory for kind in memory.kinds)
        for kind in sorted(kinds, key=lambda kind: KINDS.index(kind) if kind in KINDS else len(KINDS) - 1.5):
            sizes = [memory.kinds.get(kind) if memory else None for memory in found]
            rows.append([kind.replace("_", " "), *("" if size is None else size_text(size) for size in sizes)])
        used = [_Html(f"<strong>{size_text(m.device_used_bytes)}</strong>") if m else "" for m in found]
        rows.append([_Html("<strong>device, as read</strong>"), *used])
        for label, of in (
            ("within the remainder:", [memory.unaccounted if memory else {} for memory in found]),
            ("host:", [memory.host if memory else {} for memory in found]),
        ):
            for kind in dict.fromkeys(kind for by_kind in of for kind in by_kind):
                texts = ["" if kind not in by_kind else size_text(by_kind[kind]) for by_kind in of]
                rows.append([f"{label} {kind.replace('_', ' ')}", *texts])
        head = ["", *(step.step.replace("_", " ") for step in cycle.steps)]
        parts.append(f"<h3>Rank {rank}, cycle {cycle.number}</h3>\n{_table(head, rows, 'numbers')}")
    return "\n".join(parts)


# -- HTML ----------------------------------------------------------------------------------------


def _verdict(run: Run) -> Cell:
    if run.good is None:
        return run.verdict or "says nothing of itself"
    style = "good" if run.good else "bad"
    return _Html(f'<span class="{style}">{_text(run.verdict)}</span>')


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]], style: str = "") -> str:
    top = "<thead><tr>" + "".join(f"<th>{_text(name)}</th>" for name in head) + "</tr></thead>" if head else ""
    lines = []
    for row in _some(rows):
        lines.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>")
    named = f' class="{style}"' if style else ""
    return f'<div class="wide"><table{named}>{top}<tbody>\n' + "\n".join(lines) + "\n</tbody></table></div>"


def _some(rows: Sequence[Sequence[Cell]]) -> list[Sequence[Cell]]:
    """The rows; of many, the beginning and the end, with a line that says how many are left out."""
    if len(rows) <= MAX_ROWS:
        return list(rows)
    half = MAX_ROWS // 2
    return [*rows[:half], [f"... {len(rows) - 2 * half} more"], *rows[-half:]]


def _text(text: str) -> str:
    """The text as HTML, whatever is in it."""
    return text if isinstance(text, _Html) else html.escape(text, quote=True)


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #24292f; --faint: #6a737d; --line: #d8dde2; --link: #1f4e8c;
  --good: #1a7f4b; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --paper: #16191d; --ink: #dfe3e8; --faint: #98a1ab; --line: #363c44;
  --link: #8db7e3; --good: #6cc79a; --bad: #f0857a; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1.2rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.6rem; } h3 { font-size: 1rem; margin-top: 1.8rem; }
a { color: var(--link); } code { font: 0.92em ui-monospace, monospace; overflow-wrap: anywhere; }
section { border-top: 1px solid var(--line); }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.9rem 0.25rem 0;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--faint); } .facts td:first-child { color: var(--faint); white-space: nowrap; }
.numbers { font-variant-numeric: tabular-nums; }
.good { color: var(--good); } .bad, strong { font-weight: 700; } .bad { color: var(--bad); }
figure { margin: 1.4rem 0; } figcaption { color: var(--faint); font-size: 0.9em; max-width: 60rem; }
img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; }
@media (prefers-color-scheme: dark) { img { filter: brightness(0.9); } }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")

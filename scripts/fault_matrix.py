#!/usr/bin/env python
"""The whole fault matrix on the software device, by one command.

    scripts/fault_matrix.py                    # all of it; about half an hour on two cores
    scripts/fault_matrix.py --list             # count the cells, run none
    scripts/fault_matrix.py --only 'undo from' # cells whose name matches a regular expression
    scripts/fault_matrix.py --again            # those that ended wrongly in the last run, and put them into its files

Prints the table of cells and how they ended; writes ``fault-matrix.json`` (every cell) and ``fault-matrix.md`` (the
summary) into ``--out``. A cell that ends wrongly is run once more, and reported if it takes two attempts. The exit
status is 0 only if every cell ended as ``tests/support/fault_matrix.py`` says it has to.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import msgspec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tests.support.executor_harness import warm_up_zmq  # noqa: E402
from tests.support.fault_matrix import (  # noqa: E402
    DEADLINES,
    FAULTS,
    OPERATIONS,
    SIZES,
    Bench,
    Cell,
    Outcome,
    all_cells,
    expected,
    plan_of,
    senseless,
)

#: Cells that one process runs on one machine before it makes another.
CHUNK = 40
_SIGNS = {"succeeds": "s", "refused": "r", "fatal": "F", "wrong": "WRONG"}


def run_chunk(cells: Sequence[Cell]) -> tuple[list[Outcome], list[tuple[Cell, str]]]:
    """Outcomes, and cells that this machine cannot run with the reason."""
    warm_up_zmq()
    # nohup leaves these ignored, or a shell for what it runs in the background: also in what is started from here.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    outcomes: list[Outcome] = []
    unable: list[tuple[Cell, str]] = []
    with Bench() as bench:
        for cell in cells:
            if (reason := bench.senseless(cell)) is not None:
                unable.append((cell, reason))
                continue
            outcome = bench.run(cell)
            if outcome.problem:
                outcome = msgspec.structs.replace(bench.run(cell), first_problem=outcome.problem)
            outcomes.append(outcome)
    return outcomes, unable


def read(path: Path) -> tuple[float, list[Outcome]]:
    """What an earlier run took, and its outcomes."""
    earlier = json.loads(path.read_text())
    outcomes = []
    for record in earlier["cells"]:
        cell = msgspec.convert({name: record[name] for name in Cell.__struct_fields__}, Cell)
        optional = {name: record[name] for name in ("gone_s", "reused", "problem", "first_problem") if name in record}
        outcomes.append(Outcome(cell, record["ends"], **{"problem": "", **optional}, call_s=record["call_s"]))
    return earlier["summary"]["wall_s"], outcomes


def summary(outcomes: Sequence[Outcome], listed: Counter[str], wall_s: float, jobs: int) -> dict[str, Any]:
    fatal = [outcome for outcome in outcomes if outcome.gone_s is not None]
    slowest = max(fatal, key=lambda outcome: outcome.gone_s or 0.0, default=None)
    longest = max(outcomes, key=lambda outcome: outcome.call_s, default=None)
    errors = Counter(expected(outcome.cell).error for outcome in outcomes if outcome.what == "fatal")
    return {
        "device": "software device",
        "date": date.today().isoformat(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "wall_s": round(wall_s, 1),
        "jobs": jobs,
        "deadlines": msgspec.to_builtins(DEADLINES),
        "cells_in_the_product": len(outcomes) + listed.total(),
        "cells_run": len(outcomes),
        "outcomes": dict(Counter(outcome.what for outcome in outcomes)),
        "fatal_by_error": dict(errors),
        "on_reused_executors": sum(outcome.reused for outcome in outcomes),
        "second_attempts": [
            {"cell": str(outcome.cell), "first": outcome.first_problem} for outcome in outcomes if outcome.first_problem
        ],
        "wrong": [{"cell": str(o.cell), "problem": o.problem} for o in outcomes if o.problem],
        "slowest_verdict_to_gone_s": slowest and round(slowest.gone_s or 0.0, 4),
        "slowest_verdict_cell": slowest and str(slowest.cell),
        "longest_call_s": longest and round(longest.call_s, 3),
        "longest_call_cell": longest and str(longest.cell),
        "listed_not_run": dict(listed),
    }


def stages_of(operation: str) -> list[str]:
    states = {"sleep": "awake", "wake": "asleep", "undo": "awake"}
    return [stage.name for stage in plan_of(operation, states[operation])]


def rows(outcomes: Iterable[Outcome], operation: str) -> list[list[str]]:
    """By role and fault: the endings in each stage, over all sizes, ranks and states."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        if cell.operation == operation:
            row = found.setdefault((str(cell.role), cell.fault), {})
            row.setdefault(cell.stage, set()).add(_SIGNS[outcome.what])
    order = {fault: number for number, fault in enumerate(FAULTS)}
    return [
        [role, fault, *("/".join(sorted(by_stage.get(stage, {"·"}))) for stage in stages_of(operation))]
        for (role, fault), by_stage in sorted(found.items(), key=lambda item: (item[0][0], order[item[0][1]]))
    ]


_LEGEND = (
    "s: succeeds; r: refused, and the executor serves on; F: fatal, nothing left; "
    "·: makes no sense (reasons below). Over all sizes, ranks and states."
)


def print_tables(console: Console, outcomes: Sequence[Outcome]) -> None:
    for operation in OPERATIONS:
        table = Table("role", "fault", *stages_of(operation), title=f"{operation} (software device)")
        for row in rows(outcomes, operation):
            table.add_row(*row)
        console.print(table)
    console.print(_LEGEND)


def markdown(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    lines = [
        "# The fault matrix on the software device",
        "",
        f"Made by `scripts/fault_matrix.py` on {facts['date']} (kernel {facts['kernel']}, Python {facts['python']}), "
        f"{facts['wall_s'] / 60:.0f} minutes with {facts['jobs']} processes. Every cell is in `fault-matrix.json`.",
        "",
        f"- {facts['cells_run']} cells run, {sum(facts['listed_not_run'].values())} listed with the reason why they "
        "make no sense.",
        f"- Outcomes: {', '.join(f'{number} {what}' for what, number in sorted(facts['outcomes'].items()))}. "
        f"Fatal: {', '.join(f'{number} {name}' for name, number in sorted(facts['fatal_by_error'].items()))}.",
        f"- Wrong: {len(facts['wrong'])}. Second attempts: {len(facts['second_attempts'])}.",
        f"- {facts['on_reused_executors']} cells ran on an executor that had survived the cell before.",
        f"- Slowest from verdict to nothing left: {facts['slowest_verdict_to_gone_s']} s (limit 2 s): "
        f"{facts['slowest_verdict_cell']}.",
        f"- Longest call: {facts['longest_call_s']} s (deadlines of 1 s): {facts['longest_call_cell']}.",
        "",
        "How a cell has to end is the pure function `expected` in `tests/support/fault_matrix.py`. A cell counts as "
        "succeeded or refused only if the executor then reads back its weights, runs a collective and executes, with "
        "the same processes; as fatal only if every process, runtime directory and device byte is gone within 2 s of "
        "the verdict, no descriptor, thread or shared memory is left in the parent, the error has its facts, and every "
        "later call fails at once with the same error.",
        "",
    ]
    for operation in OPERATIONS:
        stages = stages_of(operation)
        lines += [f"## {operation}", "", f"| role | fault | {' | '.join(stages)} |", "|" + "---|" * (len(stages) + 2)]
        lines += [f"| {' | '.join(row)} |" for row in rows(outcomes, operation)]
        lines.append("")
    lines += [_LEGEND, "", "## Cells that are not run", ""]
    lines += [f"- {number}: {reason}." for reason, number in sorted(facts["listed_not_run"].items())]
    for title, key in (("Second attempts", "second_attempts"), ("Wrong", "wrong")):
        if facts[key]:
            lines += ["", f"## {title}", ""]
            lines += [f"- {item['cell']}: {item.get('first') or item.get('problem')}" for item in facts[key]]
    return "\n".join(lines) + "\n"


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=_count, nargs="+", default=list(SIZES), help="tensor-parallel sizes")
    parser.add_argument("--only", type=_pattern, default="", help="a regular expression on the cell's name")
    parser.add_argument("--jobs", type=_count, default=3, help="processes; most of a hang is waiting")
    parser.add_argument("--list", action="store_true", help="count the cells and run none")
    parser.add_argument("--again", action="store_true", help="run what ended wrongly, update the files of the last run")
    parser.add_argument("--out", type=Path, default=None, help="default: docs/measurements/DATE-software-device")
    arguments = parser.parse_args()
    console = Console(width=200)

    listed: Counter[str] = Counter()
    cells: list[Cell] = []
    for cell in all_cells(tuple(arguments.sizes)):
        reason = senseless(cell)
        if reason is None and not re.search(arguments.only, str(cell)):
            reason = "not asked for (--only)"
        if reason is None:
            cells.append(cell)
        else:
            listed[reason] += 1
    console.print(
        f"software device: {len(cells)} cells to run, {listed.total()} listed; about "
        f"{len(cells) * 1.1 / arguments.jobs / 60:.0f} minutes with {arguments.jobs} processes"
    )
    for reason, number in sorted(listed.items()):
        console.print(f"  {number:6} not run: {reason}")
    if arguments.list:
        return 0
    if not cells:
        parser.error("no cell is left to run: see --list")

    begun = time.monotonic()
    outcomes: list[Outcome] = []
    kept: list[Outcome] = []
    before_s = 0.0
    folder = arguments.out or REPOSITORY / "docs" / "measurements" / f"{date.today().isoformat()}-software-device"
    if arguments.again:
        try:
            before_s, earlier = read(folder / "fault-matrix.json")
        except OSError as error:
            parser.error(f"--again needs the files of the last run: {error}")
        kept = [outcome for outcome in earlier if not outcome.problem]
        wrong = {outcome.cell for outcome in earlier if outcome.problem}
        cells = [cell for cell in cells if cell in wrong]
    # Cells of one size together, so that survivors are of use.
    chunks = [cells[start : start + CHUNK] for start in range(0, len(cells), CHUNK)]
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_chunk, chunk) for chunk in chunks]):
            ended, unable = done.result()
            outcomes += ended
            listed.update(reason for _, reason in unable)
            for outcome in ended:
                if outcome.problem or outcome.first_problem:
                    attempt = "WRONG" if outcome.problem else "second attempt"
                    console.print(
                        f"{attempt}: {outcome.cell}: {outcome.problem or outcome.first_problem}", markup=False
                    )
            console.print(f"{len(outcomes)} of {len(cells)} cells, {time.monotonic() - begun:.0f} s")
    order = {cell: number for number, cell in enumerate(all_cells(tuple({*SIZES, *arguments.sizes})))}
    outcomes = sorted([*kept, *outcomes], key=lambda outcome: order[outcome.cell])

    facts = summary(outcomes, listed, before_s + time.monotonic() - begun, arguments.jobs)
    facts["run_again"] = len(cells) if arguments.again else 0
    print_tables(console, outcomes)
    console.print_json(json.dumps({key: value for key, value in facts.items() if key != "listed_not_run"}))
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        {
            **msgspec.to_builtins(outcome.cell),
            "ends": outcome.what,
            "why": expected(outcome.cell).why,
            "call_s": round(outcome.call_s, 4),
            **({} if outcome.gone_s is None else {"gone_s": round(outcome.gone_s, 4)}),
            **({"reused": True} if outcome.reused else {}),
            **({"problem": outcome.problem} if outcome.problem else {}),
            **({"first_problem": outcome.first_problem} if outcome.first_problem else {}),
        }
        for outcome in outcomes
    ]
    lines = ",\n".join(json.dumps(record) for record in records)
    (folder / "fault-matrix.json").write_text(
        f'{{"summary": {json.dumps(facts, indent=1)},\n"cells": [\n{lines}\n]}}\n'
    )
    (folder / "fault-matrix.md").write_text(markdown(outcomes, facts))
    return 1 if facts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

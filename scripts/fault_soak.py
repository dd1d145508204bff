#!/usr/bin/env python
"""Many cycles on the software device with random faults: nothing may leak, and every failure must be the right one.

    scripts/fault_soak.py                          # 2,000 cycles at TP=2
    scripts/fault_soak.py --cycles 100 --seed 7

Each cycle is a clean sleep and wake, or (with ``--faults`` probability) a random cell of the fault matrix: the ending
has to be the one that ``tests/support/fault_matrix.py`` says. Every ``--every`` cycles the parent's open files,
threads, children, memory (RSS), shared memory, runtime directories and device bytes are read. Writes
``fault-soak.json`` into ``--out``. The exit status is 0 only if every ending was right and nothing grew.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import threading
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import psutil  # noqa: E402

from tests.support.executor_harness import warm_up_zmq  # noqa: E402
from tests.support.fault_matrix import Bench, Cell, all_cells, expected  # noqa: E402

#: RSS may differ by so much between the second and the last quarter: the allocator's own coming and going.
RSS_SLACK_BYTES = 4 << 20
#: Cells that wait for a deadline are chosen so much less often than others: they cost a second each.
DEADLINE_WEIGHT = 0.15


def reading(bench: Bench, cycle: int, ranks: int) -> dict[str, Any]:
    """What this process holds, and what exists on the bench's machine."""
    process = psutil.Process()
    machine = bench.machine
    return {
        "cycle": cycle,
        "open_files": process.num_fds(),
        "threads": threading.active_count(),
        "children": len(process.children(recursive=True)),
        "rss_bytes": process.memory_info().rss,
        "shared_memory_files": sum("checkpoint" in path.name for path in Path("/dev/shm").iterdir()),
        "runtime_directories": len(machine.runtime_directories()),
        "processes_on_machine": len(machine.processes()),
        "device_bytes": sum(machine.used_bytes(ranks)),
    }


def growth(samples: list[dict[str, Any]]) -> dict[str, str]:
    """What grew from the first samples to the last; empty if nothing did."""
    grown = {}
    for name in samples[0]:
        if name in ("cycle", "rss_bytes"):
            continue
        # An executor lives at every sample, so that the figures must be the same at each.
        values = {sample[name] for sample in samples}
        if len(values) > 1:
            grown[name] = f"not flat: {sorted(values)}"
    quarter = max(1, len(samples) // 4)
    rss = [sample["rss_bytes"] for sample in samples]
    early, late = statistics.median(rss[quarter : 2 * quarter] or rss), statistics.median(rss[-quarter:])
    if late - early > RSS_SLACK_BYTES:
        grown["rss_bytes"] = f"{(late - early) / (1 << 20):.1f} MiB more in the last quarter than in the second"
    return grown


def choices(bench: Bench, ranks: int) -> tuple[list[Cell], list[float]]:
    cells = [cell for cell in all_cells((ranks,)) if bench.senseless(cell) is None]
    return cells, [DEADLINE_WEIGHT if expected(cell).error == "DeadlineError" else 1.0 for cell in cells]


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults", type=float, default=0.15, help="probability that a cycle has a fault")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--every", type=int, default=50, help="cycles between readings")
    parser.add_argument("--out", type=Path, default=None, help="default: docs/measurements/DATE-software-device")
    arguments = parser.parse_args()

    warm_up_zmq()
    chance = random.Random(arguments.seed)
    endings: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    wrong: list[dict[str, str]] = []
    samples: list[dict[str, Any]] = []
    slowest_gone_s, begun = 0.0, time.monotonic()
    with Bench() as bench:
        cells, weights = choices(bench, arguments.ranks)
        bench.cycle(arguments.ranks)
        for cycle in range(1, arguments.cycles + 1):
            if chance.random() < arguments.faults:
                cell = chance.choices(cells, weights)[0]
                outcome = bench.run(cell)
                faults[cell.fault] += 1
                kind = expected(cell).error if outcome.what == "fatal" else ""
                endings[f"{outcome.what} {kind}".strip()] += 1
                slowest_gone_s = max(slowest_gone_s, outcome.gone_s or 0.0)
                if outcome.problem:
                    wrong.append({"cycle": str(cycle), "cell": str(cell), "problem": outcome.problem})
                    print(f"software device: cycle {cycle}: WRONG: {cell}: {outcome.problem}", flush=True)
            else:
                bench.cycle(arguments.ranks)
                endings["succeeds (no fault)"] += 1
            if cycle % arguments.every == 0:
                bench.cycle(arguments.ranks)  # an executor lives at every reading
                samples.append(reading(bench, cycle, arguments.ranks))
                last = samples[-1]
                print(
                    f"software device: cycle {cycle}, {time.monotonic() - begun:.0f} s, "
                    f"{last['open_files']} open files, {last['rss_bytes'] >> 20} MiB, "
                    f"{sum(faults.values())} faults, {len(wrong)} wrong",
                    flush=True,
                )
        left_at_the_end = bench.close()
    grown = growth(samples) if samples else {}
    report = {
        "device": "software device",
        "date": date.today().isoformat(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cycles": arguments.cycles,
        "ranks": arguments.ranks,
        "seed": arguments.seed,
        "fault_probability": arguments.faults,
        "wall_s": round(time.monotonic() - begun, 1),
        "faults": dict(sorted(faults.items())),
        "endings": dict(endings),
        "executors_killed": sum(number for what, number in endings.items() if what.startswith(("fatal", "wrong"))),
        "slowest_verdict_to_gone_s": round(slowest_gone_s, 4),
        "wrong": wrong,
        "grown": grown,
        "left_at_the_end": left_at_the_end,
        "samples": samples,
    }
    folder = arguments.out or REPOSITORY / "docs" / "measurements" / f"{date.today().isoformat()}-software-device"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fault-soak.json").write_text(json.dumps(report, indent=1) + "\n")
    shown = {key: value for key, value in report.items() if key not in ("samples", "faults")}
    print(json.dumps(shown, indent=1))
    return 1 if wrong or grown or left_at_the_end else 0


if __name__ == "__main__":
    sys.exit(main())

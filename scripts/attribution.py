#!/usr/bin/env python3
"""Whose the bytes on each device are, at every step of a sleep and a wake.

    scripts/attribution.py --device soft --tensor-parallel-size 2 --out attribution.json
    scripts/attribution.py --device cuda --tensor-parallel-size 2 --gib 8 --cycles 3 --out attribution.json

Starts the example transformer, or with ``--gib`` the ballast worker of the benchmarks with so many GiB of weights on
each rank, runs cycles, prints the last one as a table and writes all of them to ``--out``. Bytes are above what the
devices held before the start (``empty_bytes``). What nobody accounts for is shown as the remainder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # a checkout needs no installation

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from checkpoint_executor import CUDACheckpointExecutor, CycleReport  # noqa: E402
from checkpoint_executor.attribution import HOST_KINDS, KINDS  # noqa: E402
from scripts.soaking.example import EXAMPLE_WORKER, device_kind, devices_of_its_own, host  # noqa: E402

GIB = 1 << 30
MIB = 1 << 20
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [9], [100, 200]]


def steps(*reports: CycleReport) -> Iterator[dict[str, Any]]:
    """The steps of a cycle as they are written."""
    for report in reports:
        for step in report.memory:
            yield {
                "step": step.step,
                "ranks": [
                    {
                        "rank": memory.rank,
                        "device_used_bytes": memory.used_bytes,
                        "empty_bytes": memory.empty_bytes,
                        "kinds": memory.kinds,
                        "host": memory.host,
                        "unaccounted": memory.unaccounted,
                    }
                    for memory in step.ranks
                ],
            }


def start(options: argparse.Namespace, given: dict[str, Any]) -> CUDACheckpointExecutor:
    """The example transformer, or the ballast worker."""
    ranks = options.tensor_parallel_size
    given = {**given, "communication": options.communication, "attribution": True}
    if options.gib is None:
        return CUDACheckpointExecutor(EXAMPLE_WORKER, ranks, **given)
    from scripts.benchmarking.ballast import BallastWorker

    sizes = (int(options.gib * GIB), int(options.kv_gib * GIB), options.graphs)
    return CUDACheckpointExecutor(BallastWorker, ranks, worker_args=sizes, **given)


def work(executor: CUDACheckpointExecutor, options: argparse.Namespace) -> None:
    """Something for every graph to do, so that whatever is made at a first replay is there."""
    executor.collective_rpc("decode", args=() if options.gib is not None else (PROMPTS, 4))


def run(options: argparse.Namespace) -> dict[str, Any]:
    kind = device_kind(options.device)
    ballast = int(((options.gib or 0) + (options.kv_gib if options.gib is not None else 0)) * GIB)
    result: dict[str, Any] = {
        "kind": "attribution",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": host(kind),
        "device": kind,
        "tensor_parallel_size": options.tensor_parallel_size,
        "communication": options.communication,
        "worker": "transformer" if options.gib is None else f"ballast of {options.gib:g} GiB",
        "cycles": [],
    }
    with devices_of_its_own(kind, 256 * MIB + 2 * ballast) as given, start(options, given) as executor:
        for number in range(options.cycles):
            work(executor, options)
            reports = executor.sleep(), executor.wake_up()
            result["cycles"].append({"number": number, "steps": list(steps(*reports))})
        work(executor, options)
    first = result["cycles"][0]["steps"][0]["ranks"]
    result["empty_bytes"] = [rank["empty_bytes"] for rank in first]
    return result


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """The last cycle, a table a rank: kinds down, steps across, MiB."""
    cycle = result["cycles"][-1]
    device = "software device" if result["device"] == "soft" else "GPU"
    for rank in range(result["tensor_parallel_size"]):
        table = Table(title=f"{device}, rank {rank}, cycle {cycle['number']}: MiB by kind")
        table.add_column("")
        # A reading that failed is left out, and no other is put in its place.
        columns = [(step["step"], each) for step in cycle["steps"] for each in step["ranks"] if each["rank"] == rank]
        for name, _ in columns:
            table.add_column(name.replace("_", "\n"), justify="right")
        for kind in KINDS:
            style = "bold" if kind == "remainder" else None
            table.add_row(kind, *(_mib(memory["kinds"][kind]) for _, memory in columns), style=style)
        table.add_section()
        table.add_row("device, read", *(_mib(memory["device_used_bytes"]) for _, memory in columns), style="bold")
        table.add_section()
        for kind in HOST_KINDS:
            table.add_row(f"host: {kind}", *(_mib(memory["host"][kind]) for _, memory in columns))
        yield table


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f}" if size_bytes else "."


def negative(result: dict[str, Any]) -> list[str]:
    """Where the parts come to more than was read, in words."""
    return [
        f"cycle {cycle['number']}, {step['step']}, rank {rank['rank']}: the parts come to "
        f"{-rank['kinds']['remainder']} bytes more than was read: one of them is too large"
        for cycle in result["cycles"]
        for step in cycle["steps"]
        for rank in step["ranks"]
        if rank["kinds"]["remainder"] < 0
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "soft", "cuda"), default="auto", help="soft: the software device")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--communication", choices=("suspend", "socket"), default="suspend")
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--gib", type=float, help="ballast of weights on each rank, instead of the transformer")
    parser.add_argument("--kv-gib", type=float, default=1.0, help="KV cache of the ballast worker")
    parser.add_argument("--graphs", type=int, default=16, help="of the ballast worker")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(argv)
    if options.cycles < 1 or options.tensor_parallel_size < 1:
        parser.error("need at least 1 cycle and 1 rank")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    result = run(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    new = options.out.with_name(f"{options.out.name}.new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(new, options.out)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(result):
        console.print(table)
    for sentence in negative(result):
        console.print(sentence, style="yellow")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

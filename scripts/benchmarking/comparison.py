"""Launches of several arms in turn, their file as it grows, and the table at the end."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from checkpoint_executor.errors import CheckpointExecutorError
from checkpoint_executor.recorded import size_text
from scripts.benchmarking.arms import Arm, Spec, Summary, order, plan, summarise
from scripts.benchmarking.ballast import GIB, MIB
from scripts.benchmarking.launches import Launch
from scripts.benchmarking.machine import machine, used_bytes, wait_for_bytes
from scripts.soaking.example import device_kind, devices_of_its_own

__all__ = ["run", "table"]

#: Weights and KV cache of a rank, GiB, unless they are said.
_SIZES_GIB = {"soft": (1 / 16, 1 / 32), "cuda": (16.0, 8.0)}


def run(options: argparse.Namespace) -> int:
    """Compare, and print the table. 1 if a launch did not come to its end, something was not identical, or a process
    is left; else 0."""
    kind = device_kind(options.device)
    gib, kv_gib = (
        default if given is None else given
        for default, given in zip(_SIZES_GIB[kind], (options.gib, options.kv_gib), strict=True)
    )
    # In whole MiB, of which every block can be summed up in words of 8 bytes.
    weights, kv = (int(size * 1024) * MIB for size in (gib, kv_gib))
    ranks = options.tensor_parallel_size
    arms = [plan(name, options.front_door, ranks, options.communication) for name in options.arms]
    journal = Journal(options.out, _header(options, kind, weights, kv, arms))
    folder = options.out.resolve().with_name(f"{options.out.stem}-logs")
    folder.mkdir(parents=True, exist_ok=True)
    at_once = len(arms) if options.together else 1
    with devices_of_its_own(kind, 256 * MIB + (1 + at_once) * (weights + kv)) as devices:
        common = Spec(
            front_door=options.front_door,
            arm="",
            communication=options.communication,
            device=kind,
            ranks=ranks,
            cycles=options.cycles,
            weights_bytes=weights,
            kv_bytes=kv,
            graphs=options.graphs,
            keep_weights=options.keep_weights,
            soft_root=devices.get("soft_root", ""),
            soft_capacity_bytes=devices.get("soft_capacity_bytes", 0),
            together=options.together,
            model=options.model if options.front_door == "vllm" else "",
            nccl=options.nccl or "",
            folder=str(folder),
            limit_s=options.limit_s,
        )
        _launch_all(arms, common, journal, options.launches, options.budget)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table(journal.document))
    for sentence in notes(journal.document):
        console.print(sentence, style="yellow", highlight=False)
    return 0 if good(journal.document) else 1


class Journal:
    """The file: written anew after everything that happens, so that a kill loses nothing.

    Attributes:
        document: what stands in it.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self._new = path.with_name(f"{path.name}.new")
        self.document: dict[str, Any] = {**header, "launches": []}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def launch(self, **facts: Any) -> dict[str, Any]:
        """A new launch's entry, to be filled in place."""
        self.document["launches"].append(facts)
        return facts

    def write(self) -> None:
        names = [arm["name"] for arm in self.document["arms"] if not arm["refused"]]
        summaries = [summarise(name, self.document["launches"]) for name in names]
        document = {**self.document, "summaries": msgspec.to_builtins(summaries)}
        self._new.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(self._new, self._path)


def _header(
    options: argparse.Namespace, kind: str, weights_bytes: int, kv_bytes: int, arms: Sequence[Arm]
) -> dict[str, Any]:
    return {
        "kind": "arms",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": machine(),
        "device": kind,
        "front_door": options.front_door,
        "model": options.model if options.front_door == "vllm" else "",
        "tensor_parallel_size": options.tensor_parallel_size,
        "weights_gib": weights_bytes / GIB if options.front_door == "own" else None,
        "kv_gib": kv_bytes / GIB,
        "launches_asked": options.launches,
        "cycles_asked": options.cycles,
        "arms": msgspec.to_builtins(arms),
    }


def _launch_all(arms: Sequence[Arm], common: Spec, journal: Journal, launches: int, budget_s: float) -> None:
    begun = time.monotonic()
    for number, chosen in order(arms, launches):
        # A wave is what is up at once: all arms of a round, or one.
        for wave in [chosen] if common.together else [[arm] for arm in chosen]:
            if time.monotonic() - begun > budget_s:
                for arm in wave:
                    how = "not begun: the budget was spent"
                    journal.launch(arm=arm.name, number=number, cycles=[], completed=False, how=how)
                journal.write()
                continue
            _wave(wave, number, common, journal)


def _wave(wave: Sequence[Arm], number: int, common: Spec, journal: Journal) -> None:
    """Launches that are started at once and measured one after another."""
    devices = common.device, common.soft_root, common.ranks
    before = used_bytes(*devices)
    running: list[Launch] = []
    try:
        for arm in wave:
            spec = msgspec.structs.replace(common, arm=arm.name, communication=arm.communication)
            record = journal.launch(number=number, communication=arm.communication, empty_bytes=before)
            log = Path(common.folder) / f"{arm.name}-{number}.log"
            try:
                running.append(Launch(spec, record, journal.write, _environment(spec), log))
            except (CheckpointExecutorError, OSError) as error:
                # No process could be made, say: the others may fare better.
                record |= {"how": "not started", "error": f"{type(error).__name__}: {error}"}
                journal.write()
        for launch in running:
            launch.wait_up()
        while running:
            launch = running[0]
            launch.finish()
            # What is in use once it is gone: beside others that tells what was its own.
            launch.record["after_bytes"] = (
                _standing_still(devices) if running[1:] else wait_for_bytes(before, lambda: used_bytes(*devices))[0]
            )
            running.pop(0)
            journal.write()
            print(_line(launch.record), file=sys.stderr, flush=True)
    finally:
        for launch in running:
            launch.close()


def _standing_still(devices: tuple[str, str, int]) -> list[int]:
    """A reading of the devices that did not change for half a second; the last one after ten."""
    readings = [used_bytes(*devices)]
    while len(readings) < 100 and readings[-5:] != [readings[-1]] * 5:
        time.sleep(0.1)
        readings.append(used_bytes(*devices))
    return readings[-1]


def _environment(spec: Spec) -> Mapping[str, str]:
    if spec.front_door == "vllm":
        from scripts.benchmarking import vllm_launch

        return vllm_launch.environment(spec)
    if spec.nccl and spec.ranks > 1:
        return {**os.environ, "LD_PRELOAD": spec.nccl}
    return os.environ


# -- showing it ----------------------------------------------------------------------------------


def good(document: Mapping[str, Any]) -> bool:
    """Whether every launch came to its end, with everything identical, and left no process."""
    return all(
        launch["completed"]
        and not launch.get("left_processes")
        and all(cycle["identical"] for cycle in launch["cycles"])
        for launch in document["launches"]
    )


def table(document: Mapping[str, Any]) -> Table:
    """A row an arm: medians with ranges over all cycles of all launches."""
    shown = Table(title=_title(document), title_justify="left")
    shown.add_column("arm", no_wrap=True)
    for name in ("cycles", "first down, s", "down, s", "up, s", "left, MiB\na device"):
        shown.add_column(name, justify="right")
    for name in ("asleep, host\nGiB a rank", "of it taken\nby the sleep", "copies down / up,\nGB/s (of plain)", "same"):
        shown.add_column(name, justify="right")
    shown.add_column("", min_width=30)
    for arm in msgspec.convert(document["arms"], list[Arm]):
        if arm.refused:
            shown.add_row(arm.name, *[""] * 9, f"refused: {arm.refused}", style="dim")
            continue
        found = summarise(arm.name, document["launches"])
        shown.add_row(
            arm.name,
            f"{found.cycles} in {found.launches}",
            _spread(found.first_down_s, 2),
            _spread(found.down_s, 2),
            _spread(found.up_s, 2),
            " / ".join(dict.fromkeys(_mib(size) for size in found.left_bytes)),
            _spread(_scaled(found.host_bytes), 1),
            _spread(_scaled(found.taken_bytes), 1),
            _copies(found),
            {True: "yes", False: "[bold red]NO[/]", None: "-"}[found.identical],
            arm.note,
        )
    return shown


def notes(document: Mapping[str, Any]) -> Iterator[str]:
    """What the table does not show: launches that did not come to their end, and processes that are left."""
    for launch in document["launches"]:
        where = f"{launch['arm']}, launch {launch['number']}"
        if not launch["completed"]:
            yield f"{where}: {launch.get('how', 'unfinished')}: {launch.get('error') or launch.get('log_ends') or ''}"
        if launch.get("left_processes"):
            yield f"{where}: processes are left: {launch['left_processes']}"


def _title(document: Mapping[str, Any]) -> str:
    what = f"vLLM {document['model']}" if document["front_door"] == "vllm" else "own workers"
    gib = document["weights_gib"]
    size = "" if gib is None else f", {size_text(gib * GIB)} of weights a rank"
    device = "software device" if document["device"] == "soft" else "GPU"
    return f"{device}, {what}, TP={document['tensor_parallel_size']}{size}: median (range) over all cycles"


def _line(record: Mapping[str, Any]) -> str:
    downs = ", ".join(f"{cycle['down_s']:.2f}/{cycle['up_s']:.2f}" for cycle in record["cycles"])
    return f"{record['arm']}, launch {record['number']}: {record['how']}; down/up, s: {downs or '-'}"


def _spread(spread: tuple[float, float, float] | None, digits: int) -> str:
    if spread is None:
        return "-"
    # Rounded first, so that nothing is "-0.0".
    middle, least, most = (f"{round(value, digits) + 0.0:.{digits}f}" for value in spread)
    return middle if least == most else f"{middle}\n{least} to {most}"


def _scaled(spread: tuple[float, float, float] | None) -> tuple[float, float, float] | None:
    return None if spread is None else (spread[0] / GIB, spread[1] / GIB, spread[2] / GIB)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.{2 if size_bytes < 10 * MIB else 0}f}"


def _copies(found: Summary) -> str:
    parts = []
    for rate, share in (
        (found.copy_down_gb_s, found.of_plain_down),
        (found.copy_up_gb_s, found.of_plain_up),
    ):
        of = "" if share is None else f" ({share[0]:.0%})"
        parts.append("-" if rate is None else f"{rate[0]:.{1 if rate[0] >= 1 else 2}f}{of}")
    return " / ".join(parts) if parts != ["-", "-"] else "-"

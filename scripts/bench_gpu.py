#!/usr/bin/env python3
"""Benchmark of the whole cycle on real GPUs, with our own workers: stage times, bandwidth, and what stays.

Writes one JSON file per part into ``--out`` as it goes, so that a kill loses nothing, and prints a table last. A part
that fails says so and the rest goes on. On a machine without a GPU ``--device soft`` runs the same code, small.

Parts: ``table`` (stage times by GiB and ranks), ``ways`` (allocator sleep alone, driver checkpoint alone, both),
``leftovers`` (what is on the device after each way of ending), ``replay`` (a graph's replay time, read three times
before any sleep, after an allocator sleep alone, and after a whole cycle: what of a difference comes from where).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # a checkout needs no installation

from checkpoint_executor import CUDACheckpointExecutor, CycleReport, procfs  # noqa: E402
from checkpoint_executor.workers import Worker  # noqa: E402
from scripts.benchmarking.ballast import GIB, MIB, BallastWorker  # noqa: E402
from scripts.benchmarking.machine import (  # noqa: E402
    machine,
    open_driver,
    rss_bytes,
    target_of,
    used_bytes,
    wait_for_bytes,
)


def allocator_sleep(worker: Worker) -> float:
    """Allocator sleep alone, timed in the worker."""
    begun = time.perf_counter()
    worker.context.runtime.synchronize()
    worker.context.allocator.sleep()
    return time.perf_counter() - begun


def allocator_wake(worker: Worker) -> float:
    begun = time.perf_counter()
    worker.context.allocator.wake(("weights", "kv_cache"))
    worker.context.runtime.synchronize()
    return time.perf_counter() - begun


def fill_torch_cache(worker: Worker) -> None:
    """Leave 1 GiB of unused blocks in torch's caching allocator, as an engine's warm-up does."""
    import torch

    if torch.cuda.is_available():
        del_me = torch.empty(GIB, dtype=torch.uint8, device=worker.context.device)
        del del_me


def without_trim(worker: Worker) -> None:
    worker.context.runtime.trim = dict  # type: ignore[method-assign]


def with_trim(worker: Worker) -> None:
    del worker.context.runtime.trim


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[tuple[str, ...]] = []
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)

    # -- readings --------------------------------------------------------------------------------

    def used_bytes(self, ranks: int) -> list[int]:
        """Bytes in use on each device, from outside."""
        return used_bytes(self.args.device, self.args.soft_root, ranks)

    def wait_for_bytes(self, expected: list[int]) -> tuple[list[int], float]:
        """Poll until the devices are down to what they were; returns the last reading and how long it took."""
        return wait_for_bytes(expected, lambda: self.used_bytes(len(expected)), slack_bytes=0)

    def replay_us(self, executor: CUDACheckpointExecutor) -> list[float]:
        """By rank. The software device's graphs are slow and only have to run."""
        few = {"warm_up_s": 0.0, "batches": 3, "times": 5} if self.args.device == "soft" else {}
        return executor.collective_rpc("replay_us", kwargs=few)

    def executor(self, ranks: int, weights: int, kv: int, graphs: int, **options: Any) -> CUDACheckpointExecutor:
        if self.args.device == "soft":
            options["soft_root"] = self.args.soft_root
        return CUDACheckpointExecutor(
            BallastWorker,
            ranks,
            worker_args=(weights, kv, graphs),
            device=self.args.device,
            verify_weights=self.args.verify,
            **options,
        )

    def save(self, name: str, data: dict[str, Any]) -> None:
        data = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": machine(),
            **data,
        }
        (self.out / f"{name}.json").write_text(json.dumps(data, indent=1))

    # -- parts -----------------------------------------------------------------------------------

    def table(self) -> None:
        for communication in self.args.communication.split(","):
            for ranks in map(int, self.args.ranks.split(",")):
                if communication == "socket" and ranks == 1:
                    continue
                for gib in map(float, self.args.gib.split(",")):
                    self.guard(f"table-{communication}-tp{ranks}-{gib:g}gib", self.table_row, communication, ranks, gib)

    def table_row(self, communication: str, ranks: int, gib: float) -> None:
        empty = self.used_bytes(ranks)
        name = f"table-{communication}-tp{ranks}-{gib:g}gib"
        data: dict[str, Any] = {
            "ranks": ranks,
            "weights_gib": gib,
            "communication": communication,
            "empty_bytes": empty,
        }
        begun = time.monotonic()
        with self.executor(
            ranks, int(gib * GIB), int(self.args.kv_gib * GIB), self.args.graphs, communication=communication
        ) as executor:
            data["start_s"] = time.monotonic() - begun
            stages = executor._control._recorder.stages()
            data["start_stages"] = {stage.name: stage.wall_s for stage in stages}
            data["plain_copy_gb_s"] = executor.collective_rpc("plain_copy_gb_s")
            data["replay_us_before"] = self.replay_us(executor)
            decoded, sums = executor.collective_rpc("decode"), executor.collective_rpc("checksums")
            cycles: list[dict[str, Any]] = []
            data["cycles"] = cycles
            for number in range(self.args.cycles):
                # First cycle, then alternately with weights that did not change and weights that did.
                changed = number % 2 == 0 and number > 0
                if changed:
                    executor.collective_rpc("touch_weights")
                    decoded, sums = executor.collective_rpc("decode"), executor.collective_rpc("checksums")
                down = executor.sleep()
                asleep = self.used_bytes(ranks)
                if number == 1:
                    ups = [executor.wake_up(["weights"]), executor.wake_up(["kv_cache"])]
                else:
                    ups = [executor.wake_up()]
                same = executor.collective_rpc("decode") == decoded and executor.collective_rpc("checksums") == sums
                cycles.append(
                    {
                        "weights_changed": changed,
                        "sleep": report(down),
                        "wake": [report(up) for up in ups],
                        "asleep_above_empty_bytes": [a - e for a, e in zip(asleep, empty, strict=True)],
                        "identical": same,
                    }
                )
                self.save(name, data)
            data["replay_us_after"] = self.replay_us(executor)
            pids = executor.pids
            data["rss_bytes_awake"] = {n: rss_bytes(p) for n, p in pids.items()}
        data["left_bytes"], data["left_after_s"] = self.wait_for_bytes(empty)
        self.save(name, data)
        first, later = cycles[0], cycles[1:] or cycles
        changed_cycles = [c for c in later if c["weights_changed"]]
        kept_cycles = [c for c in later if not c["weights_changed"]]
        self.rows.append(
            (
                name,
                f"{first['sleep']['wall_s']:.2f}",
                median(c["sleep"]["wall_s"] for c in changed_cycles),
                median(c["sleep"]["wall_s"] for c in kept_cycles),
                median(sum(w["wall_s"] for w in c["wake"]) for c in later),
                f"{max(max(c['asleep_above_empty_bytes']) for c in cycles) / MIB:.0f}",
                str(all(c["identical"] for c in cycles)),
                f"{max(a / b for a, b in zip(data['replay_us_after'], data['replay_us_before'], strict=True)):.3f}",
            )
        )

    def ways(self) -> None:
        self.guard("ways", self.ways_row, float(self.args.ways_gib))

    def ways_row(self, gib: float) -> None:
        empty = self.used_bytes(1)
        data: dict[str, Any] = {"weights_gib": gib, "empty_bytes": empty, "runs": []}
        with self.executor(1, int(gib * GIB), int(self.args.kv_gib * GIB), self.args.graphs) as executor:
            pid = executor.pids["worker 0"]
            expected = executor.collective_rpc("decode")

            def record(way: str, down_s: float, up_s: float, left: int, rss: tuple[int, int]) -> None:
                ok = executor.collective_rpc("decode") == expected
                data["runs"].append(
                    {
                        "way": way,
                        "down_s": down_s,
                        "up_s": up_s,
                        "left_above_empty_bytes": left - empty[0],
                        "rss_before_bytes": rss[0],
                        "rss_asleep_bytes": rss[1],
                        "identical": ok,
                    }
                )
                self.save("ways", data)
                size = (rss[1] - rss[0]) / GIB
                row = f"{down_s:.2f}", f"{up_s:.2f}", f"{(left - empty[0]) / MIB:.0f}", f"{size:.1f}", str(ok)
                self.rows.append((f"ways {way} {gib:g} GiB", *row))

            def both(label: str) -> None:
                before = rss_bytes(pid)
                down = executor.sleep()
                rss, left = (before, rss_bytes(pid)), self.used_bytes(1)[0]
                up = executor.wake_up()
                record(label, down.wall_s, up.wall_s, left, rss)

            both("both, first")
            executor.collective_rpc("touch_weights")
            expected = executor.collective_rpc("decode")
            both("both, weights changed")
            both("both, weights unchanged")
            executor.collective_rpc(fill_torch_cache)
            both("both, 1 GiB in torch's cache, trimmed")
            executor.collective_rpc(fill_torch_cache)
            executor.collective_rpc(without_trim)
            both("both, 1 GiB in torch's cache, not trimmed")
            executor.collective_rpc(with_trim)
            for label in ("allocator, weights changed", "allocator, weights unchanged"):
                if "unchanged" not in label:
                    executor.collective_rpc("touch_weights")
                    expected = executor.collective_rpc("decode")
                before = rss_bytes(pid)
                down_s = executor.collective_rpc(allocator_sleep)[0]
                rss, left = (before, rss_bytes(pid)), self.used_bytes(1)[0]
                up_s = executor.collective_rpc(allocator_wake)[0]
                record(label, down_s, up_s, left, rss)
            driver, target = open_driver(self.args.device, self.args.soft_root), target_of(0, pid)
            for label in ("driver, first", "driver, second"):
                before = rss_bytes(pid)
                begun = time.monotonic()
                driver.lock(target, 10_000)
                driver.checkpoint(target)
                down_s = time.monotonic() - begun
                rss, left = (before, rss_bytes(pid)), self.used_bytes(1)[0]
                begun = time.monotonic()
                driver.restore(target)
                driver.unlock(target)
                record(label, down_s, time.monotonic() - begun, left, rss)

    def replay(self) -> None:
        for gib in map(float, self.args.gib.split(",")):
            self.guard(f"replay-{gib:g}gib", self.replay_row, gib)

    def replay_row(self, gib: float) -> None:
        data: dict[str, Any] = {"weights_gib": gib, "readings": []}
        name = f"replay-{gib:g}gib"
        with self.executor(1, int(gib * GIB), int(self.args.kv_gib * GIB), self.args.graphs) as executor:

            def read(when: str) -> None:
                readings = [self.replay_us(executor)[0] for _ in range(3)]
                data["readings"].append({"when": when, "replay_us": readings})
                self.save(name, data)

            read("before any sleep")
            for number in (1, 2):
                executor.collective_rpc(allocator_sleep)
                executor.collective_rpc(allocator_wake)
                read(f"after allocator sleep {number}")
            for number in (1, 2):
                executor.sleep()
                executor.wake_up()
                read(f"after cycle {number}")
        texts = (f"{r['when']}: " + "/".join(f"{us:.1f}" for us in r["replay_us"]) for r in data["readings"])
        self.rows.append((name, *texts))

    def leftovers(self) -> None:
        for how in (
            "exit",
            "shutdown-asleep",
            "sigkill-parent-asleep",
            "sigkill-worker-asleep",
            "sigkill-helper-asleep",
        ):
            self.guard(f"leftovers-{how}", self.leftover, how)

    def leftover(self, how: str) -> None:
        ranks = max(map(int, self.args.ranks.split(",")))
        empty = self.used_bytes(ranks)
        data: dict[str, Any] = {"how": how, "ranks": ranks, "empty_bytes": empty}
        if how == "sigkill-parent-asleep":
            command = [sys.executable, __file__, "--device", self.args.device, "--soft-root", self.args.soft_root]
            command += ["--hold", str(ranks), "--graphs", "4"]
            parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert parent.stdout is not None
            line = parent.stdout.readline()
            pids = json.loads(line)
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
        else:
            executor = self.executor(ranks, GIB if self.args.device != "soft" else 8 * MIB, 0, 4)
            pids = executor.pids
            if how != "exit":
                executor.sleep()
            if how.startswith("sigkill"):
                os.kill(pids["helper" if "helper" in how else "worker 0"], signal.SIGKILL)
                begun = time.monotonic()
                while True:
                    try:
                        executor.check_health()
                    except Exception as error:  # noqa: BLE001 - the point is to record it
                        data["error"] = f"{type(error).__name__}: {error}"
                        data["noticed_s"] = time.monotonic() - begun
                        break
                    if time.monotonic() - begun > 10:
                        raise RuntimeError("the death was not noticed in 10 s")
                    time.sleep(0.002)
            begun = time.monotonic()
            executor.shutdown()
            data["shutdown_s"] = time.monotonic() - begun
        begun = time.monotonic()
        data["left_bytes"], data["empty_after_s"] = self.wait_for_bytes(empty)
        # A process is dead before its parent, or here init, has reaped it.
        while (alive := [name for name, pid in pids.items() if procfs.is_alive(pid)]) and time.monotonic() - begun < 20:
            time.sleep(0.002)
        data["gone_after_s"] = time.monotonic() - begun
        data["processes_left"] = alive
        self.save(f"leftovers-{how}", data)
        left = max(a - b for a, b in zip(data["left_bytes"], empty, strict=True))
        self.rows.append((f"leftovers {how}", f"{left / MIB:.0f} MiB", f"{data['empty_after_s']:.2f} s"))

    def guard(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Run a part; a failure is recorded and the rest goes on."""
        print(f"--- {name}", flush=True)
        begun = time.monotonic()
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            self.save(f"{name}-failed", {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
            self.rows.append((name, "FAILED", f"{type(error).__name__}: {str(error)[:160]}"))
        print(f"--- {name}: {time.monotonic() - begun:.1f} s", flush=True)


def report(cycle: CycleReport) -> dict[str, Any]:
    return {
        "wall_s": cycle.wall_s,
        "stages": [
            {"name": s.name, "wall_s": s.wall_s, "ranks": list(s.ranks), "figures": list(s.figures)}
            for s in cycle.stages
        ],
        "device_bytes_before": list(cycle.device_bytes_before),
        "device_bytes_after": list(cycle.device_bytes_after),
    }


def median(values: Any) -> str:
    numbers = list(values)
    return f"{statistics.median(numbers):.2f}" if numbers else "-"


def hold(args: argparse.Namespace, ranks: int) -> None:
    """Be a parent that sleeps its executor, says so, and waits to be killed."""
    bench = Bench(args)
    executor = bench.executor(ranks, GIB if args.device != "soft" else 8 * MIB, 0, 4)
    executor.sleep()
    print(json.dumps(executor.pids), flush=True)
    signal.pause()


def _names(*known: str) -> Callable[[str], str]:
    """A list of some of these, with commas between them."""

    def names(text: str) -> str:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))}: known are {', '.join(known)}")
        return text

    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "soft"), default="cuda")
    parser.add_argument("--soft-root", default="")
    parser.add_argument("--parts", type=_names("table", "ways", "leftovers", "replay"), default="table,ways,leftovers")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--gib", default="1,8,16,32")
    parser.add_argument("--ways-gib", default="16")
    parser.add_argument("--kv-gib", type=float, default=8.0)
    parser.add_argument("--graphs", type=int, default=16)
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--communication", type=_names("suspend", "socket"), default="suspend")
    parser.add_argument("--verify", action="store_true", help="hash the weights before sleep and after wake")
    parser.add_argument("--out", default="bench-out")
    parser.add_argument("--hold", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "soft" and not args.soft_root:
        from checkpoint_executor.softgpu import default_root

        args.soft_root = str(default_root())
    if args.hold:
        hold(args, args.hold)
        return 0
    bench = Bench(args)
    for part in args.parts.split(","):
        getattr(bench, part)()
    print(
        "\nname | first sleep s | later changed s | later unchanged s | wake s | MiB asleep | identical | replay ratio"
    )
    for row in bench.rows:
        print(" | ".join(row))
    return 1 if any("FAILED" in row for row in bench.rows) else 0


if __name__ == "__main__":
    sys.exit(main())

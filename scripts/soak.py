#!/usr/bin/env python3
"""Sleeps and wakes for as long as it takes to see whether it holds: bursts, other processes, drift, exact answers.

    scripts/soak.py --device soft --tensor-parallel-size 2 --iterations 2000 --json soak.json
    scripts/soak.py --device cuda --tensor-parallel-size 2 --iterations 150 --json soak.json
    scripts/soak.py --finish soak.jsonl            # a run that was killed: judge what it did
    scripts/soak.py --show-probe-catches           # the probe finds a spoiled byte, and a moved graph input

One iteration: a burst of 64 to 256 concurrent requests to the example transformer; sleep; in a random half of the
iterations another process fills most of the freed device memory meanwhile, and lets go; wake, alternately whole and by
tag (weights first); probe prompts, whose tokens and bits of logits on every rank must be those of iteration 0, taken
before its sleep. Then it reads what everybody holds. Each iteration's line is written at once, so that a kill loses
nothing.

Exit status 1 if a probe differed, a request failed, an iteration is missing, or something drifts: after the warm-up,
the slope of a least-squares line is beyond its bound and more than 3 standard errors from zero. The bounds are in
``scripts/soaking/journal.py``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # a checkout needs no installation

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

from checkpoint_executor import CheckpointExecutorError, CUDACheckpointExecutor, procfs  # noqa: E402
from checkpoint_executor.demo import MIN_DISTINCT_TOKENS  # noqa: E402
from checkpoint_executor.tags import KV_CACHE, WEIGHTS  # noqa: E402
from scripts.soaking import tamper  # noqa: E402
from scripts.soaking.burst import BURST_REQUESTS, Burst, Queue  # noqa: E402
from scripts.soaking.example import EXAMPLE_WORKER, device_kind, devices_of_its_own, host  # noqa: E402
from scripts.soaking.journal import Journal, finish  # noqa: E402
from scripts.soaking.occupier import Occupiers  # noqa: E402

MIB = 1 << 20
SOFT_CAPACITY_BYTES = 64 * MIB
#: Sizes of graphs: the probe's, and the largest batch of a burst.
BATCH_SIZES = (4, 64)
VOCABULARY = 512
PROBE = [[1, 2, 3], [4, 5, 6, 7], [9], [100, 200]]
PROBE_TOKENS = 16
#: In which iteration something is spoiled, if anything is.
SPOILED_ITERATION = 1
#: How long a device may take to show that what filled it is gone, seconds.
ROOM_S = 5.0
#: How often a run without a terminal says how far it is.
_LOG_EVERY_S = 60.0


_libc = ctypes.CDLL(None)
_M_ARENA_MAX = -8


class Soak:
    """One run.

    Args:
        options: the command line. console: for the progress line.
        spoil: an error to make in the sleep of iteration 1, a name of ``tamper.KINDS``.
    """

    def __init__(self, options: argparse.Namespace, console: Console, spoil: str | None = None) -> None:
        self.options = options
        self.console = console
        self.spoil = spoil
        self.spoiled = ""
        self.kind = device_kind(options.device)
        self.ranks: int = options.tensor_parallel_size
        # Of its own, so that what one choice uses up does not change another.
        self._prompts = random.Random(f"prompts {options.seed}")
        self._sizes = random.Random(f"sizes {options.seed}")
        chance = random.Random(f"occupied {options.seed}")
        self._occupied = frozenset(chance.sample(range(options.iterations), options.iterations // 2))

    def header(self) -> dict[str, Any]:
        options = self.options
        return {
            "kind": "soak",
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": host(self.kind),
            "device": self.kind,
            "tensor_parallel_size": self.ranks,
            "communication": options.communication,
            "seed": options.seed,
            "wanted_iterations": options.iterations,
        }

    def run(self, lines: Path) -> None:
        """Run to the end, or to the first sleep or wake that fails, and record every iteration in ``lines``.

        Raises:
            CheckpointExecutorError: the executor did not start. OSError: the record cannot be written.
        """
        with (
            Journal(lines, self.header()) as journal,
            devices_of_its_own(self.kind, SOFT_CAPACITY_BYTES) as given,
            self._executor(given) as executor,
            Occupiers(self.kind, self.ranks, given.get("soft_root", "")) as occupiers,
            Burst(Queue(self._decoder(executor), max(BATCH_SIZES)), VOCABULARY) as burst,
            self._progress() as tell,
        ):
            reference, _ = self._probe(executor)
            distinct = int(reference[0]["distinct_tokens"])
            if distinct < MIN_DISTINCT_TOKENS:
                raise SystemExit(f"the probe decodes only {distinct} distinct tokens, so that equal ones prove little")
            for number in range(self.options.iterations):
                record = self._iteration(number, executor, occupiers, burst, reference)
                journal.iteration(record)
                tell(record)
                if "stopped" in record:
                    return

    def _executor(self, given: dict[str, Any]) -> CUDACheckpointExecutor:
        return CUDACheckpointExecutor(
            EXAMPLE_WORKER,
            self.ranks,
            worker_kwargs={"batch_sizes": BATCH_SIZES, "vocab": VOCABULARY},
            communication=self.options.communication,
            # Small devices are nearly filled, and this is the most that a wake may ask for beyond what it takes.
            wake_margin_bytes=MIB if self.kind == "soft" else 64 * MIB,
            **given,
        )

    @staticmethod
    def _decoder(executor: CUDACheckpointExecutor) -> Any:
        return lambda prompts, new_tokens: executor.collective_rpc("decode", args=(prompts, new_tokens))

    @staticmethod
    def _probe(executor: CUDACheckpointExecutor) -> tuple[list[dict[str, Any]], float]:
        """What every rank decodes, its tokens and a hash of the bits of all logits; and the CPU seconds of all."""
        answers = executor.collective_rpc(timed_decode, args=(PROBE, PROBE_TOKENS))
        return [answer for answer, _ in answers], sum(cpu_s for _, cpu_s in answers)

    # -- an iteration ----------------------------------------------------------------------------

    def _iteration(
        self,
        number: int,
        executor: CUDACheckpointExecutor,
        occupiers: Occupiers,
        burst: Burst,
        reference: list[dict[str, Any]],
    ) -> dict[str, Any]:
        sent = burst.send(self._sizes.randint(*BURST_REQUESTS), self._prompts)
        record: dict[str, Any] = {
            "number": number,
            "burst_requests": sent.requests,
            "burst_failed": len(sent.failures),
            "burst_s": round(sent.seconds, 6),
            "wake": "by_tag" if number % 2 else "whole",
            "occupied": number in self._occupied,
            "occupied_bytes": 0,
            "identical": True,
        }
        failures = sent.failures[:3]
        try:
            if self.spoil is not None and number == SPOILED_ITERATION:
                self.spoiled = executor.collective_rpc(tamper.KINDS[self.spoil])[0]
            slept = executor.sleep()
            record["device_awake_bytes"] = list(slept.device_bytes_before)
            record["device_asleep_bytes"] = list(slept.device_bytes_after)
            record["sleep_s"] = round(slept.wall_s, 6)
            if record["occupied"]:
                record["occupied_bytes"] = occupiers.take()
                occupiers.free()
            wakes = [[WEIGHTS], [KV_CACHE]] if record["wake"] == "by_tag" else [None]
            record["wake_s"] = round(sum(executor.wake_up(tags, wait_for_memory_s=ROOM_S).wall_s for tags in wakes), 6)
            begun = time.monotonic()
            probed, cpu_s = self._probe(executor)
            record["probe_s"] = round(time.monotonic() - begun, 6)
            record["probe_cpu_s"] = round(cpu_s, 6)
            record["identical"] = probed == reference
            record["rss_bytes"], record["open_files"] = held(executor)
        except (CheckpointExecutorError, RuntimeError, OSError) as error:
            # The executor, or what fills the devices, is in no state to go on: what was done so far is the result.
            record["stopped"] = f"{type(error).__name__}: {error}"
            failures.append(record["stopped"])
        if failures:
            record["failures"] = failures
        return record

    # -- telling ---------------------------------------------------------------------------------

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        """A live line; without a terminal, a line of text now and then."""
        counts = {"mismatches": 0, "failed": 0}
        note = "software device" if self.kind == "soft" else "GPU"
        said = time.monotonic()

        def text(record: dict[str, Any]) -> str:
            counts["mismatches"] += not record["identical"]
            counts["failed"] += record["burst_failed"] + ("stopped" in record)
            asleep = max(record.get("device_asleep_bytes") or [0])
            return (
                f"sleep {record.get('sleep_s', 0):.3f} s, wake {record.get('wake_s', 0):.3f} s, "
                f"{asleep / MIB:.1f} MiB asleep, {counts['mismatches']} mismatches, {counts['failed']} failed"
            )

        if not self.console.is_terminal:

            def say(record: dict[str, Any]) -> None:
                nonlocal said
                line = text(record)
                if time.monotonic() - said >= _LOG_EVERY_S:
                    said = time.monotonic()
                    self.console.print(f"{note}: {record['number'] + 1} of {self.options.iterations}: {line}")

            yield say
            return
        columns = (TextColumn(note), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*columns, TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task("soak", total=self.options.iterations, text="")
            yield lambda record: progress.update(task, advance=1, text=text(record))


def one_heap() -> None:
    """Have the C library give all threads of this process one heap: with one for every few of the hundreds of threads
    that come and go, it takes most of a run until each is as large as it gets."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def held(executor: CUDACheckpointExecutor) -> tuple[dict[str, int], dict[str, int]]:
    """Resident host bytes and open files of this process (``parent``) and the executor's."""
    # What the bursts freed is nobody's: objects that Python keeps to use again (a full collection gives them up; tuples
    # of every size filled their lists for thousands of sleeps), and memory that the C library does.
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
    pids = {"parent": os.getpid(), **executor.pids}
    memory = {name: procfs.host_memory(pid)[0] for name, pid in pids.items()}
    return memory, {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}


def timed_decode(worker: Any, prompts: list[list[int]], new_tokens: int) -> tuple[dict[str, Any], float]:
    """Decode in the worker; the answer, and the CPU time of its process, seconds."""
    begun = time.process_time()
    answer: dict[str, Any] = worker.decode(prompts, new_tokens)
    return answer, time.process_time() - begun


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def soak(options: argparse.Namespace, console: Console) -> int:
    with tempfile.TemporaryDirectory(prefix="cx-soak-") as folder:
        target: Path | None = options.json
        lines = target.with_suffix(".jsonl") if target is not None else Path(folder) / "soak.jsonl"
        try:
            Soak(options, console).run(lines)
        except KeyboardInterrupt:
            console.print("interrupted: what was done is judged")
        result = finish(lines, target)
    show(result, console)
    return 0 if result["ok"] else 1


def show(result: dict[str, Any], console: Console) -> None:
    device = "software device" if result["device"] == "soft" else "cuda"
    requests = sum(each["burst_requests"] for each in result["iterations"])
    console.print(
        f"{device}, TP={result['tensor_parallel_size']}: {len(result['iterations'])} iterations, {requests} requests, "
        f"{result['failed_requests']} failed, {result['mismatches']} mismatches"
    )
    for name, slope in result["slopes"].items():
        verdict = "ok" if slope["ok"] else "DRIFTS"
        verdict = f"{verdict} (let pass: {slope['bound']:.4g})" if slope["judged"] else "not judged"
        console.print(
            f"  {name}: {slope['per_100']:+.4g} ± {slope['standard_error']:.2g} {slope['unit']} in 100 iterations: "
            f"{verdict}",
            highlight=False,
        )
    for problem in result["problems"]:
        console.print(f"FAILED: {problem}", style="red", markup=False)
    if result["ok"]:
        console.print("ok", style="green")


def show_probe_catches(options: argparse.Namespace, console: Console) -> int:
    """Three short soaks: as it is, with a spoiled weight, with a moved graph input. Only the first may pass."""
    options.iterations = 3
    right = True
    for spoil in (None, *tamper.KINDS):
        run = Soak(options, console, spoil)
        with tempfile.TemporaryDirectory(prefix="cx-soak-") as folder:
            lines = Path(folder) / "soak.jsonl"
            run.run(lines)
            result = finish(lines, None)
        wrong = [each["number"] for each in result["iterations"] if not each["identical"]]
        expected = list(range(SPOILED_ITERATION, options.iterations)) if spoil else []
        as_expected = wrong == expected and not result["failed_requests"]
        right &= as_expected
        what = f"{spoil} ({run.spoiled})" if spoil else "nothing altered"
        verdict = f"the probe reports a mismatch in iterations {wrong}" if wrong else "the probe reports no mismatch"
        surprise = "" if as_expected else f"; EXPECTED {expected or 'none'} and no failure: {result['problems']}"
        console.print(f"{what}: {verdict}{surprise}", highlight=False, markup=False, soft_wrap=True)
    if right:
        console.print("the probe catches both, and only those", style="green")
    else:
        console.print("FAILED: the probe does not tell a right sleep from a spoiled one", style="red")
    return 0 if right else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--device", choices=("auto", "soft", "cuda"), default="auto", help="soft: the software device")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--communication", choices=("suspend", "socket"), default="suspend")
    parser.add_argument("--seed", type=int, default=20270107, help="of prompts, bursts and who is occupied when")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="the result; its lines lie beside it meanwhile, in a .jsonl"
    )
    parser.add_argument("--finish", type=Path, metavar="FILE.jsonl", help="judge a run that was killed")
    parser.add_argument("--show-probe-catches", action="store_true", help="show that the probe finds errors")
    options = parser.parse_args(argv)
    if options.iterations < 1 or options.tensor_parallel_size < 1:
        parser.error("need at least 1 iteration and 1 rank")
    if options.json is not None and options.json.suffix == ".jsonl":
        parser.error("--json names the final file; .jsonl is for its lines")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    one_heap()
    if options.finish is not None:
        try:
            result = finish(options.finish, options.json or options.finish.with_suffix(".json"))
        except (OSError, ValueError) as error:
            console.print(f"soak: {options.finish}: {error}", style="red", markup=False)
            return 2
        show(result, console)
        return 0 if result["ok"] else 1
    if options.show_probe_catches:
        return show_probe_catches(options, console)
    return soak(options, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

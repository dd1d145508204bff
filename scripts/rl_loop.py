#!/usr/bin/env python3
"""Reinforcement learning's loop in small: an engine and a trainer take turns on the same GPUs, and anything may die.

One iteration:

1. sleep: the engine gives all device memory back;
2. train: a process for each GPU fills most of what is free now, and makes the next version of the weights from the
   present one;
3. wake the weights; copy the new version in through host memory that both sides map (a memfd, handed over by its
   path: an open CUDA IPC handle would make the engine's checkpoint impossible to restore);
4. wake the KV cache;
5. rollout: decode with the new weights, and compare with what this version must give.

A version is made from the one before by flipping bits (exclusive or), which is exact and comes back to the first
version after ``--versions`` steps. So the state after any number of iterations is known beforehand, and an update
that is lost, or done twice, spoils every rollout after it.

With ``--kill-every K`` something is killed every K iterations: a worker, the helper, the trainer or the engine's own
process, at a random moment of a random step, mid-stage and asleep included. The supervisor brings the engine back,
and the iteration is done again from the trainer's state, which is the last version that is complete in host memory.

Prints iterations, restarts, lost iterations and seconds by phase. Exit status 0 only if no iteration was lost and
nothing is left behind: no process, no device memory, no file.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_executor import CheckpointExecutorError, InsufficientMemoryError, procfs
from checkpoint_executor.supervise import (
    EngineRestarted,
    RestartPolicy,
    Supervised,
    UsedBytes,
    append_incident,
    nvml_used_bytes,
    print_incident,
    soft_used_bytes,
    wait_free,
)

if TYPE_CHECKING:
    from checkpoint_executor import CUDACheckpointExecutor

MIB = 1 << 20
WORKER = "checkpoint_executor.workers.transformer:TransformerWorker"
SOFT_CAPACITY_BYTES = 64 * MIB
#: How much of the free device memory the trainer takes.
TRAINER_SHARE = 0.9
PROMPTS = [[1, 2, 3], [100, 200, 300, 400], [17]]
NEW_TOKENS = 16
#: Steps at which something may be killed, and what; the trainer lives in one of them only.
STEPS = ("sleep", "train", "wake_weights", "copy", "wake_kv_cache", "rollout")


# ------------------------------------------------------------------------------------------------
# Weights: in the engine, and in host memory
# ------------------------------------------------------------------------------------------------


class HostWeights:
    """Two versions of all ranks' weights in host memory that has no name on disk: the present one and the next.

    The memfd dies with this process, whatever happens, so there is nothing to clean up.
    """

    def __init__(self, rank_bytes: int, ranks: int) -> None:
        self.rank_bytes = rank_bytes
        self.ranks = ranks
        self._fd = os.memfd_create("rl-loop-weights")
        os.ftruncate(self._fd, 2 * ranks * rank_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._view = mmap.mmap(self._fd, 0)

    def offset(self, version: int, rank: int = 0) -> int:
        return ((version % 2) * self.ranks + rank) * self.rank_bytes

    def read(self, version: int) -> bytes:
        return self._view[self.offset(version) : self.offset(version) + self.ranks * self.rank_bytes]

    def write(self, version: int, data: bytes) -> None:
        self._view[self.offset(version) : self.offset(version) + len(data)] = data


def mask_of(version: int, versions: int) -> int:
    """Bits of the 23-bit mantissa that are flipped in every weight of a version, compared with the first."""
    number = version % versions
    low = int.from_bytes(hashlib.sha256(f"version {number}".encode()).digest()[:2], "little") if number else 0
    # The highest bits count most, so they tell the versions apart.
    return ((number % 16) << 19) | low


def step_mask(version: int, versions: int) -> int:
    """What makes version + 1 of a version."""
    return mask_of(version, versions) ^ mask_of(version + 1, versions)


def flip(data: bytes, mask: int) -> bytes:
    """Exclusive or of every 32-bit word."""
    pattern = mask.to_bytes(4, "little") * (len(data) // 4)
    return (int.from_bytes(data, "little") ^ int.from_bytes(pattern, "little")).to_bytes(len(data), "little")


# These two run in the workers: they travel by value, the class need not know them.


def count_weight_bytes(worker: Any) -> int:
    return sum(int(weight.numel()) * 4 for weight in worker._model.parameters())


def store_weights(worker: Any, path: str, rank_bytes: int) -> None:
    """Copy this rank's weights to its place in host memory."""
    import torch

    with open(path, "r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
    at = worker.context.rank * rank_bytes
    for weight in worker._model.parameters():
        there = torch.frombuffer(view, dtype=torch.float32, count=weight.numel(), offset=at)
        there.copy_(weight.detach().reshape(-1))
        at += weight.numel() * 4


def load_weights(worker: Any, path: str, offset: int, rank_bytes: int) -> None:
    """Copy this rank's weights from host memory, in place: the graphs read them where they are."""
    import torch

    with open(path, "rb") as file:
        # Private, because torch wants memory that could be written; it is not.
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    at = offset + worker.context.rank * rank_bytes
    with torch.no_grad():
        for weight in worker._model.parameters():
            there = torch.frombuffer(view, dtype=torch.float32, count=weight.numel(), offset=at)
            weight.copy_(there.view(weight.shape))
            at += weight.numel() * 4


# ------------------------------------------------------------------------------------------------
# The trainer: a process for each device, for one update
# ------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> None:
    """Fill most of the free device memory, make the next version of the weights there, and put it into host memory."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it does not outlive the loop
    if os.getppid() != job["parent"]:
        return
    with open(job["path"], "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        present = view[job["source"] : job["source"] + job["rank_bytes"]]
        update = train_soft if job["device"] == "soft" else train_cuda
        following, taken = update(job, present)
        view[job["target"] : job["target"] + job["rank_bytes"]] = following
    print(json.dumps({"taken_bytes": taken}))


def train_soft(job: dict[str, Any], present: bytes) -> tuple[bytes, int]:
    from checkpoint_executor.softgpu import SoftGpu, SoftProcess, device_name

    name = device_name(job["rank"])
    gpu = SoftGpu(job["soft_root"], name)
    free = gpu.total_bytes - gpu.used_bytes()
    process = SoftProcess.open(job["soft_root"], name)
    weights = process.allocate(len(present))
    ballast = process.allocate(int(free * TRAINER_SHARE) - process.resident_bytes)
    weights.write(present)
    weights.write(flip(weights.read(), job["mask"]))
    following, taken = weights.read(), process.resident_bytes
    process.free(ballast)
    process.close()
    return following, taken


def train_cuda(job: dict[str, Any], present: bytes) -> tuple[bytes, int]:
    # The driver's own calls: importing torch would take longer than all the rest of an iteration.
    import cuda.bindings.driver as driver

    def call(name: str, *arguments: Any) -> Any:
        code, *results = getattr(driver, name)(*arguments)
        if int(code) != 0:
            raise RuntimeError(f"{name}: {code}")
        return results[0] if len(results) == 1 else tuple(results)

    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", job["rank"])))
    size = len(present)
    host = ctypes.create_string_buffer(present, size)
    weights = call("cuMemAlloc", size)
    call("cuMemcpyHtoD", weights, ctypes.addressof(host), size)
    free, _ = call("cuMemGetInfo")
    taken = int(free * TRAINER_SHARE)
    call("cuMemsetD8", call("cuMemAlloc", taken), 1, taken)
    call("cuMemcpyDtoH", ctypes.addressof(host), weights, size)
    updated = ctypes.create_string_buffer(flip(host.raw, job["mask"]), size)
    call("cuMemcpyHtoD", weights, ctypes.addressof(updated), size)
    call("cuMemcpyDtoH", ctypes.addressof(host), weights, size)
    return host.raw, taken + size


# ------------------------------------------------------------------------------------------------
# Killing
# ------------------------------------------------------------------------------------------------


class Killer:
    """Kills one process of its choice at one moment of its choice, every ``every`` iterations.

    Args:
        every: 0 for never. seed: of the choices. ranks: number of workers.
    """

    def __init__(self, every: int, seed: int, ranks: int) -> None:
        self._every = every
        self._random = random.Random(seed)
        self._workers = [f"worker {rank}" for rank in range(ranks)]
        self._planned: list[tuple[str, str, float]] = []
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        #: Who can be killed, by name: pid and start time, so that nobody else ever is.
        self._targets: dict[str, tuple[int, int]] = {}
        self._step = ""
        self._usual_s: dict[str, list[float]] = {}
        self.kills: list[dict[str, Any]] = []

    @property
    def missed(self) -> int:
        """How many were planned and not carried out."""
        return len(self._planned)

    def know(self, pids: dict[str, int]) -> None:
        """These are the processes under these names now."""
        with self._lock:
            for name, pid in pids.items():
                try:
                    self._targets[name] = (pid, procfs.start_time(pid))
                except ProcessLookupError:
                    pass  # dead already: the next call to the engine says so

    def plan(self, iteration: int) -> None:
        """Decide whether, whom, in which step, and after which part of the step's usual time."""
        if self._every and iteration % self._every == 0:
            target = self._random.choice(["worker", "helper", "trainer", "engine"])
            step = "train" if target == "trainer" else self._random.choice(STEPS)
            if target == "worker":
                target = self._random.choice(self._workers)
            # The step ends with the last trainer, and it is the first that is killed.
            part = self._random.random() * (0.7 if target == "trainer" else 1.0)
            self._planned.append((target, step, part))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around every step."""
        self._step = name
        plan = next((plan for plan in self._planned if plan[1] == name), None)
        if plan is not None and self._timer is None:
            delay_s = plan[2] * statistics.median(self._usual_s.get(name, [0.05]))
            self._timer = threading.Timer(delay_s, self._fire, plan)
            self._timer.daemon = True
            self._timer.start()
        begun = time.monotonic()
        yield
        self._usual_s.setdefault(name, []).append(time.monotonic() - begun)

    def finish(self) -> None:
        """At the end of an iteration: wait for a shot that is still to come. One that missed is fired later."""
        if self._timer is not None:
            self._timer.join()
            self._timer = None

    def _fire(self, target: str, step: str, part: float) -> None:
        with self._lock:
            pid, started = self._targets.get(target, (0, 0))
        try:
            descriptor = procfs.open_pidfd(pid, started)
        except OSError:
            return  # a trainer that was done already: in the next iteration
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
        self._planned.remove((target, step, part))
        self.kills.append({"target": target, "step": self._step, "planned_step": step, "part": round(part, 3)})


# ------------------------------------------------------------------------------------------------
# The loop
# ------------------------------------------------------------------------------------------------


class MismatchError(Exception):
    """A rollout is not what its version of the weights gives."""


class Loop:
    """The state of the run; everything that must survive the engine is here."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ranks: int = options.tensor_parallel_size
        # Short, because sockets live below it.
        self.folder = Path(tempfile.mkdtemp(prefix="rl-"))
        self.killer = Killer(options.kill_every, options.seed, self.ranks)
        self.seconds: dict[str, float] = {}
        self.version = 0
        self.fresh = True
        self.trainer_restarts = 0
        self.trainer_bytes = 0
        self.lost: list[str] = []
        self.logits_differ = 0
        self.refused_wakes = 0
        self.references: list[dict[str, str]] = []
        self.host: HostWeights

    @property
    def soft_root(self) -> Path:
        return self.folder / "gpu"

    def used_bytes(self) -> UsedBytes:
        if self.options.device == "soft":
            return soft_used_bytes(self.soft_root)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(rank) for rank in range(self.ranks)]
        return nvml_used_bytes(names[: self.ranks])

    def make_engine(self) -> Callable[[], CUDACheckpointExecutor]:
        """What builds the engine; it runs in the engine's process."""
        soft = self.options.device == "soft"
        given: dict[str, Any] = {"device": self.options.device, "runtime_dir": str(self.folder)}
        if soft:
            given |= {"soft_root": str(self.soft_root), "soft_capacity_bytes": SOFT_CAPACITY_BYTES}
            given |= {"wake_margin_bytes": MIB}
        shape: dict[str, Any] = {} if soft else {"hidden": 512, "intermediate": 2048, "layers": 4}
        ranks = self.ranks

        def make() -> CUDACheckpointExecutor:
            from checkpoint_executor import CUDACheckpointExecutor

            arguments: tuple[Any, ...] = ()
            if shape:  # otherwise this process need not import torch
                from checkpoint_executor.workers.transformer import TransformerConfig

                arguments = (TransformerConfig(**shape),)
            return CUDACheckpointExecutor(WORKER, ranks, worker_args=arguments, **given)

        return make

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        options = self.options
        begun = time.monotonic()
        used_bytes = self.used_bytes()
        with self.phase("start"):
            self.engine = Supervised(
                self.make_engine(),
                name="rl_loop",
                policy=RestartPolicy(
                    max_restarts=100,
                    window_s=600,
                    backoff_s=0.1,
                    backoff_max_s=1,
                    free_slack_bytes=0 if options.device == "soft" else 32 * MIB,
                ),
                used_bytes=used_bytes,
                report=append_incident(options.incidents) if options.incidents else print_incident,
            )
        baseline = self.engine.baseline
        completed = 0
        try:
            with self.phase("reference"):
                self.prepare()
            for iteration in range(1, options.iterations + 1):
                self.killer.plan(iteration)
                self.iterate()
                completed += 1
            self.settle()
        except (CheckpointExecutorError, MismatchError) as error:
            self.lost.append(f"{type(error).__name__}: {error}")
        finally:
            with self.phase("close"):
                self.engine.close()
        left = self.left_behind(used_bytes, baseline)
        return {
            "device": "software device" if options.device == "soft" else "cuda",
            "tensor_parallel_size": self.ranks,
            "iterations": options.iterations,
            "completed": completed,
            "lost": options.iterations - completed + len(self.lost) * (completed == options.iterations),
            "lost_because": self.lost,
            "restarts": self.engine.restarts,
            "trainer_restarts": self.trainer_restarts,
            "kills": self.killer.kills,
            "kills_missed": self.killer.missed,
            "incidents": [
                {
                    "cause": str(incident.cause),
                    "dead_s": incident.dead_s,
                    "free_s": incident.free_s,
                    "left_bytes": sum((incident.left_bytes or {}).values()),
                }
                for incident in self.engine.incidents
            ],
            "refused_wakes": self.refused_wakes,
            "rollouts_whose_logits_differ": self.logits_differ,
            "trainer_bytes": self.trainer_bytes,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "wall_s": round(time.monotonic() - begun, 3),
            "left_behind": left,
        }

    def prepare(self) -> None:
        """What every version of the weights gives, from an engine that never slept, and bits flipped on the host."""
        sizes = self.call(lambda engine: engine.collective_rpc(count_weight_bytes))
        self.host = HostWeights(max(sizes), self.ranks)
        path, rank_bytes = self.host.path, self.host.rank_bytes
        self.call(lambda engine: engine.collective_rpc(store_weights, args=(path, rank_bytes)))
        first = self.host.read(0)
        versions = self.options.versions
        for version in range(versions):
            self.host.write(version, flip(first, mask_of(version, versions)))
            self.copy(version)
            self.references.append(self.decode())
        self.host.write(0, first)
        self.copy(0)
        if self.decode() != self.references[0]:
            raise MismatchError("the first version does not give the same twice")
        if len({reference["tokens"] for reference in self.references}) < versions:
            raise MismatchError("two versions of the weights give the same tokens, so a lost update would not show")
        self.killer.know(self.pids())
        self.fresh = False

    def iterate(self) -> None:
        """One iteration, as often as it takes: until its update is in the engine and the rollout is right."""
        wanted = self.version + 1
        while True:
            try:
                if self.fresh:
                    with self.phase("recover"):
                        self.adopt()
                if self.version < wanted:
                    with self.step("sleep"):
                        self.call(lambda engine: engine.sleep())
                    with self.step("train"):
                        self.train()
                    with self.step("wake_weights"):
                        self.wake("weights")
                    with self.step("copy"):
                        self.copy(self.version)
                    with self.step("wake_kv_cache"):
                        self.wake("kv_cache")
                with self.step("rollout"):
                    self.check(self.decode())
                self.killer.finish()
                return
            except EngineRestarted:
                self.fresh = True

    def settle(self) -> None:
        """A kill during the last rollout shows only now. The engine must be well, and hold the last version."""
        while True:
            try:
                if self.fresh:
                    with self.phase("recover"):
                        self.adopt()
                self.call(lambda engine: engine.check_health())
                self.check(self.decode())
                return
            except EngineRestarted:
                self.fresh = True

    def adopt(self) -> None:
        """A new engine holds the weights it was built with: give it the present ones."""
        self.killer.know(self.pids())
        self.copy(self.version)
        self.fresh = False

    # -- steps -----------------------------------------------------------------------------------

    def train(self) -> None:
        """Make the next version; again if a trainer dies, from the version that is complete."""
        while not self.train_once():
            self.trainer_restarts += 1
        self.version += 1

    def train_once(self) -> bool:
        trainers = []
        for rank in range(self.ranks):
            job = {
                "parent": os.getpid(),
                "device": self.options.device,
                "rank": rank,
                "soft_root": str(self.soft_root),
                "path": self.host.path,
                "rank_bytes": self.host.rank_bytes,
                "source": self.host.offset(self.version, rank),
                "target": self.host.offset(self.version + 1, rank),
                "mask": step_mask(self.version, self.options.versions),
            }
            trainers.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--train", json.dumps(job)],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdout=subprocess.PIPE,
                )
            )
        self.killer.know({"trainer": trainers[0].pid})
        done = True
        try:
            for trainer in trainers:
                output, _ = trainer.communicate(timeout=self.options.timeout_s)
                if trainer.returncode == 0:
                    self.trainer_bytes = max(self.trainer_bytes, json.loads(output)["taken_bytes"])
                elif trainer.returncode == -signal.SIGKILL:
                    done = False
                else:
                    raise MismatchError(f"the trainer failed with status {trainer.returncode}")
        except subprocess.TimeoutExpired:
            done = False
        finally:
            for trainer in trainers:
                trainer.kill()
                trainer.wait()
        return done

    def wake(self, tag: str) -> None:
        """Wake a tag. A refusal for want of room, or because another executor is waking there, touched nothing."""
        until = time.monotonic() + self.options.timeout_s
        while True:
            try:
                self.call(lambda engine: engine.wake_up([tag]))
                return
            except InsufficientMemoryError:
                self.refused_wakes += 1
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)

    def copy(self, version: int) -> None:
        """Copy a version from host memory into the engine."""
        arguments = (self.host.path, self.host.offset(version), self.host.rank_bytes)
        self.call(lambda engine: engine.collective_rpc(load_weights, args=arguments))

    def decode(self) -> dict[str, str]:
        """A rollout: hashes of its tokens and of the bits of its logits."""
        answers = self.call(lambda engine: engine.collective_rpc("decode", args=(PROMPTS, NEW_TOKENS)))
        if len({json.dumps(answer["tokens"]) for answer in answers}) != 1:
            raise MismatchError("the ranks decoded different tokens")
        tokens = hashlib.sha256(json.dumps(answers[0]["tokens"]).encode()).hexdigest()
        return {"tokens": tokens, "logits": answers[0]["logits_sha256"]}

    def check(self, rollout: dict[str, str]) -> None:
        expected = self.references[self.version % self.options.versions]
        if rollout["tokens"] != expected["tokens"]:
            raise MismatchError(f"the rollout with version {self.version} is not what this version gives")
        self.logits_differ += rollout["logits"] != expected["logits"]

    def pids(self) -> dict[str, int]:
        return {**self.call(lambda engine: engine.pids), "engine": self.engine.pid}

    def call(self, function: Callable[[CUDACheckpointExecutor], Any]) -> Any:
        generation, begun = self.engine.generation, time.monotonic()
        try:
            return self.engine.call(function, self.options.timeout_s)
        finally:
            if self.engine.generation != generation:
                # Mostly the start of the new engine.
                self.seconds["restart"] = self.seconds.get("restart", 0.0) + time.monotonic() - begun

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A phase in which something may be killed."""
        with self.phase(name), self.killer.step(name):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Seconds by phase. Those of a step that was interrupted are the restart's."""
        restarts_s, begun = self.seconds.get("restart", 0.0), time.monotonic()
        try:
            yield
        finally:
            restarted_s = self.seconds.get("restart", 0.0) - restarts_s
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun - restarted_s

    # -- the end ---------------------------------------------------------------------------------

    def left_behind(self, used_bytes: UsedBytes, baseline: dict[str, int]) -> list[str]:
        """What should not be there any more, as text."""
        slack = 0 if self.options.device == "soft" else 32 * MIB
        free_s, left = wait_free(used_bytes, baseline, slack_bytes=slack, timeout_s=30)
        found = [] if free_s is not None else [f"device memory: {left}"]
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != os.getpid():
                try:
                    line = (path / "cmdline").read_bytes()
                except OSError:
                    continue
                if os.fsencode(self.folder) in line and procfs.is_alive(int(path.name)):
                    found.append(f"process {path.name}: {line[:200]!r}")
        return [*found, *(f"file {path}" for path in self.folder.glob("checkpoint-executor-*/*"))]


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--kill-every", type=int, default=0, metavar="K", help="0: nothing is killed")
    parser.add_argument("--device", choices=("soft", "cuda"), default="soft", help="soft: the software device")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--versions", type=int, default=8, help="of the weights, before the first comes again")
    parser.add_argument("--seed", type=int, default=70, help="of what is killed, and when")
    parser.add_argument("--timeout-s", type=float, default=180.0, help="for each call to the engine, from outside")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    parser.add_argument("--incidents", metavar="FILE", help="append incidents here; by default on stderr")
    options = parser.parse_args(argv)
    if options.iterations < 1 or options.versions < 2 or options.tensor_parallel_size < 1 or options.kill_every < 0:
        parser.error("need at least 1 iteration, 2 versions and 1 rank, and --kill-every must not be negative")
    return options


def show(result: dict[str, Any]) -> None:
    print(f"{result['device']}, TP={result['tensor_parallel_size']}")
    print(f"iterations {result['iterations']}, completed {result['completed']}, lost {result['lost']}")
    for reason in result["lost_because"]:
        print(f"  {reason}")
    print(f"engine restarts {result['restarts']}, trainer restarts {result['trainer_restarts']}")
    for kill in result["kills"]:
        print(f"  killed {kill['target']} during {kill['step']}")
    print("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items()))
    print(f"wall {result['wall_s']:.1f} s, trainer took {result['trainer_bytes'] >> 20} MiB")
    for thing in result["left_behind"]:
        print(f"LEFT BEHIND: {thing}")
    print("ok" if is_good(result) else "FAILED")


def is_good(result: dict[str, Any]) -> bool:
    exact = result["device"] == "cuda" or result["rollouts_whose_logits_differ"] == 0
    return result["lost"] == 0 and not result["left_behind"] and exact


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--train"]:
        train(json.loads(argv[1]))
        return 0
    options = parse(argv)
    loop = Loop(options)
    try:
        result = loop.run()
    finally:
        shutil.rmtree(loop.folder, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One launch of an arm with our own workers: the ballast worker, put to sleep the arm's way again and again.

The executor starts and serves the workers in every arm, and puts them to sleep in the last one alone.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from checkpoint_executor import CUDACheckpointExecutor, CycleReport, procfs
from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from checkpoint_executor.workers import Worker
from scripts.benchmarking.arms import Spec
from scripts.benchmarking.ballast import BallastWorker
from scripts.benchmarking.launch import Teller
from scripts.benchmarking.machine import open_driver, rss_bytes, target_of, used_bytes
from scripts.benchmarking.verbs import DriverAlone
from scripts.benchmarking.way import Rates, Way, gb_s

__all__ = ["run"]


def run(spec: Spec, tell: Teller) -> None:
    """Start the workers, run the cycles, end the workers. Raises whatever went wrong; no worker is left then."""
    options: dict[str, Any] = {"device": spec.device, "communication": spec.communication}
    if spec.device == "soft":
        options |= {"soft_root": spec.soft_root, "soft_capacity_bytes": spec.soft_capacity_bytes}
    # Where no allocator puts them to sleep their backup's pinned memory would only cost.
    tag = KV_CACHE if spec.arm in ("nothing", "driver") else WEIGHTS
    begun = time.monotonic()
    arguments = (spec.weights_bytes, spec.kv_bytes, spec.graphs, tag)
    with CUDACheckpointExecutor(BallastWorker, spec.ranks, worker_args=arguments, **options) as executor:
        tell(start_s=time.monotonic() - begun, up=True)
        tell.wait_turn()
        tell(plain_copy_gb_s=executor.collective_rpc("plain_copy_gb_s"))
        with _killed_after_an_error(executor.pids):
            way = _way(spec, executor)
            # What a worker imports for the first such call would be counted as the first sleep's.
            executor.collective_rpc(state_of)
            for number in range(spec.cycles):
                tell.cycle(number=number, **_cycle(spec, executor, way))


def _cycle(spec: Spec, executor: CUDACheckpointExecutor, way: Way) -> dict[str, Any]:
    if not spec.keep_weights:
        executor.collective_rpc("touch_weights")
    expected = _bits(executor)
    pids = [executor.pids[f"worker {rank}"] for rank in range(spec.ranks)]
    awake, rss_before = used_bytes(spec.device, spec.soft_root, spec.ranks), list(map(rss_bytes, pids))
    begun = time.perf_counter()
    way.down()
    down_s = time.perf_counter() - begun
    asleep, rss_asleep = used_bytes(spec.device, spec.soft_root, spec.ranks), list(map(rss_bytes, pids))
    states = way.states()
    begun = time.perf_counter()
    way.up()
    up_s = time.perf_counter() - begun
    begun = time.perf_counter()
    executor.collective_rpc("decode")
    return {
        "work_s": time.perf_counter() - begun,
        "down_s": down_s,
        "up_s": up_s,
        "weights_changed": not spec.keep_weights,
        "used_awake_bytes": awake,
        "used_asleep_bytes": asleep,
        "rss_before_bytes": rss_before,
        "rss_asleep_bytes": rss_asleep,
        "states": states,
        **way.rates([before - after for before, after in zip(awake, asleep, strict=True)]),
        "identical": _bits(executor) == expected,
    }


def _bits(executor: CUDACheckpointExecutor) -> tuple[list[Any], list[Any]]:
    """By rank: a hash of every graph's output, and a sum of every block of weights that depends on the places."""
    return executor.collective_rpc("decode"), executor.collective_rpc("checksums")


@contextmanager
def _killed_after_an_error(pids: Mapping[str, int]) -> Iterator[None]:
    """After an error the workers are in nobody knows which state: asked to end in good order, a checkpointed one would
    call CUDA and never return."""
    started = {pid: procfs.start_time(pid) for name, pid in pids.items() if name != "helper"}
    try:
        yield
    except BaseException:
        for pid, at in started.items():
            try:
                descriptor = procfs.open_pidfd(pid, at)
            except ProcessLookupError:
                continue
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        raise


# -- the ways ------------------------------------------------------------------------------------


def _way(spec: Spec, executor: CUDACheckpointExecutor) -> Way:
    match spec.arm:
        case "nothing":
            return _Nothing(executor)
        case "allocator" | "allocator+nccl":
            return _Allocator(executor, suspend=spec.arm == "allocator+nccl")
        case "driver":
            if spec.communication == "suspend" and spec.ranks > 1:
                raise ValueError("peer memory is mapped: the driver's restore would fail for ever")
            targets = [target_of(rank, executor.pids[f"worker {rank}"]) for rank in range(spec.ranks)]
            return DriverAlone(open_driver(spec.device, spec.soft_root), targets)
        case "all":
            return _Everything(executor)
        case unknown:
            raise ValueError(f"no arm {unknown!r}")


class _Nothing:
    """A call that does nothing, twice: what the measurement itself costs."""

    def __init__(self, executor: CUDACheckpointExecutor) -> None:
        self._executor = executor

    def down(self) -> None:
        self._executor.collective_rpc(idle)

    up = down

    def states(self) -> list[str]:
        return [str(state) for state in self._executor.collective_rpc(state_of)]

    def rates(self, moved_bytes: Sequence[int]) -> Rates:
        del moved_bytes
        return {}


class _Allocator:
    """The workers' own part of a sleep, as calls, without the driver's; with ``suspend`` the communicators' too."""

    def __init__(self, executor: CUDACheckpointExecutor, *, suspend: bool) -> None:
        self._executor = executor
        self._suspend = suspend
        #: By rank, seconds and bytes.
        self._down: list[tuple[float, int]] = []
        self._up: list[tuple[float, int]] = []

    def down(self) -> None:
        self._down = self._executor.collective_rpc(fall_asleep, kwargs={"suspend": self._suspend})

    def up(self) -> None:
        self._up = self._executor.collective_rpc(awaken)

    def states(self) -> list[str]:
        return [str(state) for state in self._executor.collective_rpc(state_of)]

    def rates(self, moved_bytes: Sequence[int]) -> Rates:
        del moved_bytes
        both = (("copy_down_gb_s", self._down), ("copy_up_gb_s", self._up))
        return {name: gb_s([s for s, _ in ranks], [size for _, size in ranks]) for name, ranks in both}


class _Everything:
    """The executor's sleep and wake."""

    def __init__(self, executor: CUDACheckpointExecutor) -> None:
        self._executor = executor
        self._slept: CycleReport | None = None
        self._woken: CycleReport | None = None

    def down(self) -> None:
        self._slept = self._executor.sleep()

    def up(self) -> None:
        self._woken = self._executor.wake_up()

    def states(self) -> list[str]:
        return [self._executor.phase] * self._executor.config.tensor_parallel_size

    def rates(self, moved_bytes: Sequence[int]) -> Rates:
        del moved_bytes
        return {
            "copy_down_gb_s": _stage_rates(self._slept, "sleep_allocator", "copied"),
            "copy_up_gb_s": _stage_rates(self._woken, "wake_allocator", WEIGHTS),
        }


def _stage_rates(report: CycleReport | None, stage: str, figure: str) -> list[float]:
    for one in report.stages if report is not None else ():
        if one.name == stage:
            return gb_s(one.ranks, [figures.get(figure, 0) for figures in one.figures])
    return []


# -- in the worker -------------------------------------------------------------------------------


def idle(worker: Worker) -> None:
    """Nothing."""
    del worker


def fall_asleep(worker: Worker, *, suspend: bool) -> tuple[float, int]:
    """What the executor has a worker do before the driver's turn. Returns the allocator's seconds, and bytes copied."""
    runtime = worker.context.runtime
    begun = time.perf_counter()
    gc.collect()
    runtime.synchronize()
    figures = runtime.allocator.sleep()
    runtime.trim()
    elapsed_s = time.perf_counter() - begun
    if suspend:
        runtime.communicator.suspend()
    return elapsed_s, figures["copied"]


def awaken(worker: Worker) -> tuple[float, int]:
    """The reverse. Returns the allocator's seconds, and bytes of weights copied."""
    runtime = worker.context.runtime
    if runtime.communicator.is_suspended:
        runtime.communicator.resume()
    begun = time.perf_counter()
    figures = runtime.allocator.wake((WEIGHTS, KV_CACHE))
    runtime.synchronize()
    return time.perf_counter() - begun, figures[WEIGHTS]


def state_of(worker: Worker) -> str:
    """What sleeps, in words."""
    runtime = worker.context.runtime
    parts = ["allocator asleep"] if runtime.allocator.sleeping >= {WEIGHTS, KV_CACHE} else []
    parts += ["communicator suspended"] if runtime.communicator.is_suspended else []
    return ", ".join(parts) or "awake"

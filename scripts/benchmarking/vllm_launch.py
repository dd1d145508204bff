"""One launch of an arm with vLLM: an engine of ``gpu_vllm.py``, put to sleep the arm's way again and again.

Needs a GPU, but for the choice of what the engine is started with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint_executor import demo
from scripts import gpu_vllm
from scripts.benchmarking.arms import Spec
from scripts.benchmarking.ballast import plain_copy_gb_s
from scripts.benchmarking.launch import Teller
from scripts.benchmarking.machine import open_driver, rss_bytes, target_of, used_bytes
from scripts.benchmarking.verbs import DriverAlone
from scripts.benchmarking.way import Rates, Way, gb_s

__all__ = ["engine_options", "environment", "part_of", "run"]

#: What starts each arm's engine, in the words of gpu_vllm.
_BACKENDS = {
    "nothing": "stock",
    "allocator": "stock",
    "allocator+nccl": "stock+nccl",
    "driver": "stock",
    "all": "arena+graphs",
}


def part_of(spec: Spec) -> gpu_vllm.Part:
    """The launch as a part of gpu_vllm. Launches of one arm share a name, and with it what vLLM compiled."""
    name = f"{spec.arm}-{spec.model}-tp{spec.ranks}"
    return gpu_vllm.Part(
        name, "cycles", spec.model, spec.ranks, _BACKENDS[spec.arm], int(spec.limit_s), cycles=spec.cycles
    )


def engine_options(spec: Spec) -> dict[str, Any]:
    """What the arm's ``LLM`` gets beyond gpu_vllm's own choice."""
    more: dict[str, Any] = {"kv_cache_memory_bytes": spec.kv_bytes}
    if spec.arm in ("nothing", "driver"):
        more["enable_sleep_mode"] = False
    return more


def environment(spec: Spec) -> dict[str, str]:
    """Of the launch's process. Makes the plugin's entry points in the launch's folder."""
    return gpu_vllm.environment(part_of(spec), Path(spec.folder), spec.nccl or None, "")


def run(spec: Spec, tell: Teller) -> None:
    """Start the engine, run the cycles. Raises whatever went wrong; the engine is left to the parent to end."""
    engine = gpu_vllm.Engine(part_of(spec), tell, wait_turn=tell.wait_turn, **engine_options(spec))
    engine.llm.collective_rpc(gpu_vllm.enlarge_embeddings)
    tell(plain_copy_gb_s=engine.llm.collective_rpc(plain_copy))
    outputs = engine.outputs()
    distinct = len({token for row in outputs["tokens"] for token in row})
    tell(distinct_tokens=distinct, same_before_any_sleep=engine.outputs() == outputs)
    if distinct < demo.MIN_DISTINCT_TOKENS:
        raise RuntimeError(f"the probe decodes {distinct} distinct tokens: equal answers would prove nothing")
    pids = engine.llm.collective_rpc(worker_pid)
    way = _way(spec, engine, pids)
    for number in range(spec.cycles):
        if not spec.keep_weights:
            engine.llm.collective_rpc(gpu_vllm.negate_parameters)
        # After every second change the weights are those of the start. Changed back before the sleep, the backup of the
        # cycle before would be right.
        as_at_the_start = spec.keep_weights or number % 2 == 1
        weights = engine.fingerprints()
        awake, rss_before = used_bytes(spec.device, spec.soft_root, spec.ranks), list(map(rss_bytes, pids))
        down_s, _ = gpu_vllm.timed(way.down)
        asleep, rss_asleep = used_bytes(spec.device, spec.soft_root, spec.ranks), list(map(rss_bytes, pids))
        states = way.states()
        up_s, _ = gpu_vllm.timed(way.up)
        work_s = engine.first_request_s()
        tell.cycle(
            number=number,
            work_s=work_s,
            down_s=down_s,
            up_s=up_s,
            weights_changed=not spec.keep_weights,
            used_awake_bytes=awake,
            used_asleep_bytes=asleep,
            rss_before_bytes=rss_before,
            rss_asleep_bytes=rss_asleep,
            states=states,
            **way.rates([before - after for before, after in zip(awake, asleep, strict=True)]),
            identical=engine.fingerprints() == weights and (not as_at_the_start or engine.outputs() == outputs),
        )


# -- the ways ------------------------------------------------------------------------------------


def _way(spec: Spec, engine: gpu_vllm.Engine, pids: Sequence[int]) -> Way:
    match spec.arm:
        case "nothing":
            return _Nothing(engine, spec.ranks)
        case "driver":
            if spec.ranks > 1:
                raise ValueError("peer memory is mapped: the driver's restore would fail for ever")
            # Only now: an engine that is forked by a process with an open driver is not what a user has.
            return DriverAlone(open_driver(spec.device, spec.soft_root), [target_of(0, pids[0])])
        case _:
            ours = spec.arm == "all"
            return _Sleep(engine, "checkpointed" if ours else "asleep", copies=not (ours and spec.keep_weights))


class _Nothing:
    """A call that does nothing, twice: what the measurement itself costs."""

    def __init__(self, engine: gpu_vllm.Engine, ranks: int) -> None:
        self._engine = engine
        self._ranks = ranks

    def down(self) -> None:
        self._engine.llm.collective_rpc(worker_pid)

    up = down

    def states(self) -> list[str]:
        return ["awake"] * self._ranks

    def rates(self, moved_bytes: Sequence[int]) -> Rates:
        del moved_bytes
        return {}


class _Sleep:
    """vLLM's ``sleep(level=1)`` and ``wake_up()``, its own or ours.

    The rates are the weights' bytes over the whole call where the call is vLLM's own, and over the workers' stage of
    it where the executor's log tells one. ``copies``: whether the sleeps copy, and so have a rate.
    """

    def __init__(self, engine: gpu_vllm.Engine, state: str, *, copies: bool) -> None:
        self._engine = engine
        self._state = state
        self._copies = copies
        self._weights_bytes: list[int] = engine.llm.collective_rpc(parameter_bytes)
        self._down_s = self._up_s = 0.0

    def down(self) -> None:
        self._down_s, _ = gpu_vllm.timed(lambda: self._engine.llm.sleep(level=1))

    def up(self) -> None:
        self._up_s, _ = gpu_vllm.timed(self._engine.llm.wake_up)

    def states(self) -> list[str]:
        if not self._engine.llm.llm_engine.is_sleeping():
            raise RuntimeError("the engine says that it is awake after its sleep")
        return [self._state] * len(self._weights_bytes)

    def rates(self, moved_bytes: Sequence[int]) -> Rates:
        del moved_bytes
        ranks = len(self._weights_bytes)
        seconds = {"worker_sleep": [self._down_s] * ranks, "worker_wake": [self._up_s] * ranks}
        for entry in gpu_vllm.cycle_log()[-2:]:
            seconds |= {stage["name"]: stage["ranks"] for stage in entry["stages"] if stage["name"] in seconds}
        return {
            "copy_down_gb_s": gb_s(seconds["worker_sleep"], self._weights_bytes) if self._copies else [],
            "copy_up_gb_s": gb_s(seconds["worker_wake"], self._weights_bytes),
        }


# -- in the worker -------------------------------------------------------------------------------


def worker_pid(worker: Any) -> int:
    """Whose memory it is."""
    del worker
    return os.getpid()


def parameter_bytes(worker: Any) -> int:
    """Of all parameters."""
    parameters = worker.worker.model_runner.get_model().parameters()
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def plain_copy(worker: Any) -> dict[str, float]:
    """The machine's own limit, over the model's own parameters, which get the bytes back that they have."""
    return plain_copy_gb_s([parameter.data for parameter in worker.worker.model_runner.get_model().parameters()])

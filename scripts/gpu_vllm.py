#!/usr/bin/env python3
"""What vLLM does on real GPUs with our executor, and without: sleep, wake, tokens, memory, throughput, failures.

    scripts/gpu_vllm.py --out DIR [--nccl LIBNCCL] [PART...]

Each part runs in a process of its own with a hard limit of time, and leaves ``DIR/PART.json`` and ``DIR/PART.log``.
A part that fails does not stop the others. The table comes last. ``--list`` names the parts, in the order in which
they run when none is named: the most telling first, so that a budget (``--budget`` seconds) cuts off the least. Needs
no network: the models are Qwen3's dimensions with dummy weights.

Most of a part's time is vLLM's start. ``--together`` starts all the parts at once, beside each other on the same GPUs,
and gives them turns when all are up: whoever has its turn is measured while the others are stopped (SIGSTOP), so that
they hold memory and take no time, and ends before the next begins. What it holds on the GPU is what is in use less what
is in use after its end.

No NVLink multicast anywhere: symmetric memory, NVLS and mnnvl are off in every part, the stock ones included, because
on a shared host a multicast object can put GPUs out of service.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # a checkout needs no installation

from scripts.benchmarking.machine import visible_gpus  # noqa: E402

EXECUTOR = "checkpoint_executor.vllm.CUDACheckpointExecutor"

#: Qwen3's dimensions.
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}

#: Offline, the V2 runner, and multicast off everywhere.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The parts send functions of this file to the workers.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}

#: The rest of the accepted settings for more than one rank.
SUSPEND = {"NCCL_IB_DISABLE": "1", "NCCL_CUMEM_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}

#: Engines that are only to be killed need no compiled model.
QUICK = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


KV_CACHE_BYTES = 8 << 30


#: Decoded one after another, with so many tokens each. Dummy weights repeat one token, so the prompts have to be many.
PROMPTS, NEW_TOKENS = 30, 8


class Part(NamedTuple):
    """One run. ``backend``: stock (with vLLM's own all-reduce, and its own sleep), the same with its NCCL suspended and
    our communication settings (``stock+nccl``), or ours with cumem, cumem_arena, or the arena under cumem (``arena``),
    there with graphs offloaded too (``arena+graphs``)."""

    name: str
    kind: str
    model: str
    ranks: int
    backend: str
    limit_s: int
    cycles: int = 10

    @property
    def ours(self) -> bool:
        """Whether our executor runs it."""
        return not self.backend.startswith("stock")


PARTS = [
    Part("ours-8b-tp1", "cycles", "8b", 1, "arena+graphs", 420),
    Part("stock-8b-tp1", "cycles", "8b", 1, "stock", 420, 3),
    Part("ours-0.6b-tp1", "cycles", "0.6b", 1, "arena+graphs", 420),
    Part("stock-0.6b-tp1", "cycles", "0.6b", 1, "stock", 420, 3),
    Part("ours-8b-tp2", "cycles", "8b", 2, "arena+graphs", 420),
    Part("stock-8b-tp2", "cycles", "8b", 2, "stock", 420, 3),
    Part("ours-0.6b-tp2", "cycles", "0.6b", 2, "arena+graphs", 420),
    Part("stock-0.6b-tp2", "cycles", "0.6b", 2, "stock", 420, 3),
    Part("fail-worker", "fail_worker", "0.6b", 1, "arena", 240),
    Part("fail-fit", "fail_fit", "0.6b", 1, "arena", 240),
    Part("fail-core", "fail_core", "0.6b", 1, "arena", 240),
    Part("again-ours-8b-tp2", "cycles", "8b", 2, "arena+graphs", 420, 2),
    Part("again-stock-8b-tp2", "cycles", "8b", 2, "stock", 420, 1),
    Part("cumem_arena-8b-tp1", "cycles", "8b", 1, "cumem_arena", 420, 4),
    Part("cumem-8b-tp1", "cycles", "8b", 1, "cumem", 420, 4),
]

#: Not run unless named. The first two need FlashInfer, with its trtllm kernels compiled ahead: in the first, all-
#: reduces are calls of their own; in the second a compile pass fuses most with the norm that follows, as vLLM does by
#: default. The others tell whose the GPUs' bytes are at each step, which costs time: no seconds of theirs count.
EXTRA = [
    Part("flashinfer-0.6b-tp2", "flashinfer", "0.6b", 2, "arena", 330, 2),
    Part("flashinfer_fused-0.6b-tp2", "flashinfer", "0.6b", 2, "arena", 330, 2),
    Part("memory-0.6b-tp1", "memory", "0.6b", 1, "arena+graphs", 240, 2),
    Part("memory-8b-tp1", "memory", "8b", 1, "arena+graphs", 240, 2),
    Part("memory-8b-tp2", "memory", "8b", 2, "arena+graphs", 240, 2),
]


# ---------------------------------------------------------------------------------------------- in the part's process


class Recorder:
    """The facts of a part; written after each step, so that a part that is cut off leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.facts: dict[str, Any] = {}

    def __call__(self, **facts: Any) -> None:
        self.facts.update(facts)
        self._path.write_text(json.dumps(self.facts, indent=1, default=str))


class Gpus:
    """NVML's "used" of the GPUs in use, as nvidia-smi shows it (the driver's own reserve apart)."""

    def __init__(self, count: int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._nvml.nvmlInit()
        self._handles = visible_gpus(self._nvml, count)

    def used_mib(self) -> list[int]:
        read = self._nvml.nvmlDeviceGetMemoryInfo
        return [int(read(handle, self._nvml.nvmlMemory_v2).used) >> 20 for handle in self._handles]

    def names(self) -> list[str]:
        return [str(self._nvml.nvmlDeviceGetName(handle)) for handle in self._handles]

    def driver(self) -> str:
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def wait_empty(self, limit_mib: int, deadline_s: float) -> float | None:
        """Seconds until no GPU has more in use; None if not in time."""
        begun = time.monotonic()
        while time.monotonic() - begun < deadline_s:
            if all(used <= limit_mib for used in self.used_mib()):
                return time.monotonic() - begun
            threading.Event().wait(0.02)
        return None


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.monotonic()
    result = call()
    return time.monotonic() - begun, result


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """Call, and say what a client sees and after how long."""
    begun = time.monotonic()
    try:
        call()
        outcome: dict[str, Any] = {"error": None}
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        outcome = {"error": type(error).__name__, "message": str(error)[:600]}
    return {**outcome, "seconds": round(time.monotonic() - begun, 3)}


def write_model(name: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix=f"qwen3-{name}-"))
    (folder / "config.json").write_text(json.dumps({**COMMON, **MODELS[name]}))
    return str(folder)


def engine_options(part: Part, **more: Any) -> dict[str, Any]:
    """Arguments of ``LLM``."""
    options: dict[str, Any] = {
        "model": write_model(part.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": part.ranks,
        "max_model_len": 4096,
        # No profile of what is free: others may start beside it. The share is only checked against what is free.
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enable_prefix_caching": False,
        "enable_sleep_mode": True,
        "seed": 1,
    }
    if part.ranks > 1:
        options["disable_custom_all_reduce"] = part.backend != "stock"
    if not part.ours:
        options["distributed_executor_backend"] = "mp"
        if part.backend == "stock+nccl":
            options["enable_nccl_comm_suspend"] = True
    else:
        options["distributed_executor_backend"] = EXECUTOR
        if part.ranks > 1:
            options["enable_nccl_comm_suspend"] = True
        if part.backend == "cumem_arena":
            options["sleep_mode_backend"] = "cumem_arena"
        if part.backend == "arena+graphs":
            options["sleep_mode_offload_cudagraph"] = True
    return {**options, **more}


def flashinfer_options(part: Part) -> dict[str, Any]:
    """Arguments of ``LLM`` with which FlashInfer reduces and does nothing else.

    An installed FlashInfer is on by itself for more than that, and what is not compiled ahead would be compiled.
    """
    return {
        "attention_backend": "FLASH_ATTN",
        "enable_flashinfer_autotune": False,
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": part.name.startswith("flashinfer_fused")}},
    }


class Engine:
    """A running ``LLM``.

    Args:
        part: what to start. record: is told the facts, as they become known. more: arguments of ``LLM``.
        wait_turn: returns when it is this part's turn to be measured; by default when the parent writes a line.
    """

    def __init__(
        self,
        part: Part,
        record: Callable[..., None],
        *,
        wait_turn: Callable[[], object] | None = None,
        **more: Any,
    ) -> None:
        self.gpus = Gpus(part.ranks)
        record(
            part=part._asdict(),
            gpus=self.gpus.names(),
            driver=self.gpus.driver(),
            mib_before_start=self.gpus.used_mib(),
        )
        import torch
        import vllm
        from vllm import LLM

        record(versions={"vllm": vllm.__version__, "torch": torch.__version__, "nccl": os.environ.get("LD_PRELOAD")})
        seconds, self.llm = timed(lambda: LLM(**engine_options(part, **more)))
        record(start_s=round(seconds, 1), up=True)
        # The parent says when; at once if it runs alone.
        (wait_turn or sys.stdin.readline)()
        record(mib_awake=self.gpus.used_mib())

    @property
    def core_pid(self) -> int:
        return int(self.llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid)

    def processes(self) -> dict[str, int]:
        """Pids of the helper and the workers, from the executor's status."""
        from checkpoint_executor import status

        (found,) = [one for one in status.read_all() if one.pid == self.core_pid]
        return dict(found.processes)

    def outputs(self) -> dict[str, Any]:
        """Greedy tokens and their exact logprobs for several prompts, one after another.

        Together they would be batched as they arrive, and the last bits depend on the batch.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True, detokenize=False
        )
        tokens, chosen = [], []
        for number in range(PROMPTS):
            prompt = [{"prompt_token_ids": [1000 + 9973 * number % 140000 + 13 * j for j in range(48)]}]
            (found,) = self.llm.generate(prompt, parameters, use_tqdm=False)
            row = list(found.outputs[0].token_ids)
            tokens.append(row)
            entries = zip(row, found.outputs[0].logprobs, strict=True)
            chosen.append([float(entry[token].logprob) for token, entry in entries])
        return {"tokens": tokens, "logprobs": chosen}

    def first_request_s(self, prompt_tokens: int = 64) -> float:
        """One request of 8 tokens."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        prompt = [{"prompt_token_ids": list(range(100, 100 + prompt_tokens))}]
        return timed(lambda: self.llm.generate(prompt, parameters, use_tqdm=False))[0]

    def checksums(self) -> Any:
        """vLLM's own, computed on the host: 30 s for 16 GB."""
        return self.llm.collective_rpc("compute_weight_checksums")

    def fingerprints(self) -> Any:
        """128 bits over every parameter, taken on the GPU in milliseconds, by rank."""
        return self.llm.collective_rpc(hash_parameters)

    def throughput(self) -> list[float]:
        """Tokens per second of decoding, eight readings after one to warm up."""
        return [round(self.tokens_per_second(), 1) for _ in range(9)][1:]

    def tokens_per_second(self, requests: int = 64, length: int = 128) -> float:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [500 + i + j for j in range(128)]} for i in range(requests)]
        seconds, _ = timed(lambda: self.llm.generate(prompts, parameters, use_tqdm=False))
        return requests * length / seconds


def run_cycles(part: Part, record: Recorder) -> None:
    """Sleep and wake, one of the cycles with a partial wake; everything that must not change is compared. Throughput
    before any sleep and after the last wake."""
    engine = Engine(part, record)
    engine.llm.collective_rpc(enlarge_embeddings)
    before = engine.outputs()
    distinct = len({token for row in before["tokens"] for token in row})
    fingerprints = engine.fingerprints()
    checksums = engine.checksums() if part.model == "0.6b" else None
    record(
        distinct_tokens=distinct,
        same_before_any_sleep=engine.outputs() == before,
        request_awake_s=[round(engine.first_request_s(), 4) for _ in range(3)],
        tokens_per_s_before=engine.throughput(),
    )
    cycles: list[dict[str, Any]] = []
    for number in range(part.cycles):
        partial = part.cycles > 1 and number == part.cycles // 2
        sleep_s, _ = timed(lambda: engine.llm.sleep(level=1))
        asleep = engine.gpus.used_mib()
        if partial:
            weights_s, _ = timed(lambda: engine.llm.wake_up(tags=["weights"]))
            cache_s, _ = timed(lambda: engine.llm.wake_up(tags=["kv_cache"]))
            wake_s = weights_s + cache_s
        else:
            wake_s, _ = timed(engine.llm.wake_up)
        first_s = engine.first_request_s()
        after = engine.outputs()
        cycles.append(
            {
                "sleep_s": round(sleep_s, 3),
                "wake_s": round(wake_s, 3),
                "partial": partial,
                "mib_asleep": asleep,
                "mib_awake": engine.gpus.used_mib(),
                "first_request_s": round(first_s, 4),
                "same_tokens": after["tokens"] == before["tokens"],
                "same_logprobs": after["logprobs"] == before["logprobs"],
                "same_weights": engine.fingerprints() == fingerprints,
            }
        )
        record(cycles=cycles)
    record(tokens_per_s_after=engine.throughput())
    if checksums is not None:
        record(same_checksums=engine.checksums() == checksums)
    changed = change_weights(engine, before, record)
    record(log=cycle_log())
    later = [cycle for cycle in cycles[1:] if not cycle["partial"]]
    before_s, after_s = (statistics.median(record.facts[f"tokens_per_s_{when}"]) for when in ("before", "after"))
    record(
        summary={
            "sleep_first_s": cycles[0]["sleep_s"],
            "sleep_later_s": _median(later, "sleep_s"),
            "sleep_changed_s": _median(changed, "sleep_s"),
            "wake_first_s": cycles[0]["wake_s"],
            "wake_later_s": _median(later, "wake_s"),
            "first_request_s": _median(later, "first_request_s"),
            "distinct_tokens": distinct,
            "identical": record.facts.get("same_checksums", True)
            and all(cycle[f"same_{what}"] for cycle in cycles for what in ("tokens", "logprobs", "weights"))
            and all(cycle["same_weights"] for cycle in changed)
            and record.facts["identical_when_changed_back"],
            "cycles": len(cycles),
            "tokens_per_s": before_s,
            "after_to_before": round(after_s / before_s, 4),
        }
    )


def change_weights(engine: Engine, before: dict[str, Any], record: Recorder) -> list[dict[str, Any]]:
    """Cycles with every parameter changed in place since the last one, so that each sleep has to copy all of them.

    Negating loses nothing, so after an even number of changes the model is what it was.
    """
    cycles: list[dict[str, Any]] = []
    seen = [engine.fingerprints()]
    for _ in range(2):
        engine.llm.collective_rpc(negate_parameters)
        seen.append(engine.fingerprints())
        sleep_s, _ = timed(lambda: engine.llm.sleep(level=1))
        wake_s, _ = timed(engine.llm.wake_up)
        same = engine.fingerprints() == seen[-1] != seen[-2]
        cycles.append({"sleep_s": round(sleep_s, 3), "wake_s": round(wake_s, 3), "same_weights": same})
        record(changed_cycles=cycles)
    record(identical_when_changed_back=engine.outputs() == before)
    return cycles


def negate_parameters(worker: Any) -> None:
    """In the worker."""
    import torch

    for parameter in worker.worker.model_runner.get_model().parameters():
        parameter.data.neg_()
    torch.cuda.synchronize()


def hash_parameters(worker: Any) -> dict[str, str]:
    """In the worker: a fingerprint of every parameter, by name."""
    import torch

    from checkpoint_executor.workers.cuda_calls import PrimaryContext
    from checkpoint_executor.workers.cuda_hash import GpuHasher

    if not hasattr(worker.worker, "_hasher"):
        worker.worker._hasher = GpuHasher(PrimaryContext(torch.cuda.current_device()))
    torch.cuda.synchronize()
    found = dict(worker.worker.model_runner.get_model().named_parameters())
    hashes = worker.worker._hasher([(each.data_ptr(), each.numel() * each.element_size()) for each in found.values()])
    return {name: one.hex() for name, one in zip(found, hashes, strict=True)}


def enlarge_embeddings(worker: Any) -> None:
    """In the worker: dummy weights are so small that every prompt ends in the same few tokens. This spreads them."""
    for name, parameter in worker.worker.model_runner.get_model().named_parameters():
        if "embed_tokens" in name:
            parameter.data.mul_(300)


def run_fail_worker(part: Part, record: Recorder) -> None:
    """A worker is killed while asleep."""
    engine = Engine(part, record, compilation_config=QUICK)
    engine.llm.sleep(level=1)
    pids = engine.processes()
    record(mib_asleep=engine.gpus.used_mib())
    os.kill(pids["worker 0"], signal.SIGKILL)
    gone_s = wait_gone(pids.values(), 20)
    record(processes_gone_s=gone_s)
    seen = attempt_in_thread(engine.llm.wake_up, 15)
    empty_s = engine.gpus.wait_empty(limit_mib(record), 20)
    record(client_sees=seen, gpu_empty_s=empty_s)
    # In a thread too: vLLM's client waits for ever if it asks before it has noticed that EngineCore is dead.
    later = attempt_in_thread(engine.llm.wake_up, 15)
    record(
        then=later,
        mib_at_the_end=engine.gpus.used_mib(),
        summary={"client": seen["error"], "client_s": seen["seconds"], "gone_s": gone_s, "mib": engine.gpus.used_mib()},
    )


def run_fail_fit(part: Part, record: Recorder) -> None:
    """A wake that would not fit: another process has the GPU. Then it lets go, and the wake works."""
    engine = Engine(part, record, compilation_config=QUICK)
    before = engine.outputs()
    engine.llm.sleep(level=1)
    with Occupier() as occupier:
        record(mib_occupied=engine.gpus.used_mib(), occupier_pid=occupier.pid)
        seen = attempt(engine.llm.wake_up)
        still = bool(engine.llm.llm_engine.is_sleeping())
    engine.gpus.wait_empty(limit_mib(record), 10)
    then = attempt(engine.llm.wake_up)
    same = engine.outputs() == before
    record(
        client_sees=seen,
        still_asleep=still,
        then=then,
        identical=same,
        summary={"client": seen["error"], "client_s": seen["seconds"], "still_asleep": still, "identical": same},
    )


def run_fail_core(part: Part, record: Recorder) -> None:
    """EngineCore is killed while asleep: nobody is left but the helper and the workers."""
    engine = Engine(part, record, compilation_config=QUICK)
    engine.llm.sleep(level=1)
    pids = engine.processes()
    core = engine.core_pid
    os.kill(core, signal.SIGKILL)
    gone_s = wait_gone([core, *pids.values()], 20)
    empty_s = engine.gpus.wait_empty(limit_mib(record), 20)
    seen = attempt_in_thread(engine.llm.wake_up, 10)
    record(
        processes_gone_s=gone_s,
        gpu_empty_s=empty_s,
        client_sees=seen,
        mib_at_the_end=engine.gpus.used_mib(),
        summary={"client": seen["error"], "client_s": seen["seconds"], "gone_s": gone_s, "mib": engine.gpus.used_mib()},
    )


def run_flashinfer(part: Part, record: Recorder) -> None:
    """FlashInfer's trtllm workspace: that it reduces, that its hooks really run, and whether tokens match."""
    engine = Engine(part, record, **flashinfer_options(part))
    engine.llm.collective_rpc(enlarge_embeddings)
    before = engine.outputs()
    workspaces = engine.llm.collective_rpc(watch_flashinfer)
    # More tokens than the largest graph holds: a replay would not be seen from Python.
    engine.first_request_s(2048)
    reductions = [seen["reductions"] for seen in engine.llm.collective_rpc(flashinfer_seen)]
    distinct = len({token for row in before["tokens"] for token in row})
    record(workspaces=workspaces, reductions=reductions, distinct_tokens=distinct)
    cycles: list[dict[str, Any]] = []
    for _ in range(part.cycles):
        engine.llm.sleep(level=1)
        asleep = engine.gpus.used_mib()
        engine.llm.wake_up()
        cycles.append({"mib_asleep": asleep, "identical": engine.outputs() == before})
        record(cycles=cycles)
    hooks = [seen["hooks"] for seen in engine.llm.collective_rpc(flashinfer_seen)]
    record(
        hooks=hooks,
        log=cycle_log(),
        summary={
            "workspaces": workspaces,
            "reductions": reductions,
            "released": [_count(ran, "checkpoint_prepare") for ran in hooks],
            "mapped_again": [_count(ran, "checkpoint_restore") for ran in hooks],
            "mib_asleep": max(used for cycle in cycles for used in cycle["mib_asleep"]),
            "distinct_tokens": distinct,
            "identical": all(cycle["identical"] for cycle in cycles),
        },
    )


def _count(hooks: Sequence[Sequence[Any]], name: str) -> int:
    """Calls of a hook that did something: vLLM's own sleep calls them as well, and the second call is a no-op."""
    return sum(hook == name and before != after for hook, before, after in hooks)


def watch_flashinfer(worker: Any) -> str:
    """In the worker: note FlashInfer's reductions and hooks from now on. The type of the workspace that vLLM uses."""
    from flashinfer import comm
    from vllm.distributed.device_communicators import flashinfer_all_reduce

    seen: dict[str, Any] = {"reductions": 0, "hooks": []}
    worker.worker._flashinfer_seen = seen
    workspace = flashinfer_all_reduce._fi_ar_workspace
    reduce = comm.allreduce_fusion

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["reductions"] += 1
        return reduce(*args, **kwargs)

    # vLLM looks it up at every call, in the fused kernel's case too.
    comm.allreduce_fusion = counted
    if workspace is None:
        return "none"

    def note(name: str, hook: Callable[..., None]) -> None:
        def noted(*args: Any) -> None:
            before = [bool(handle.mapped) for handle in workspace.mem_handles]
            hook(*args)
            after = [bool(handle.mapped) for handle in workspace.mem_handles]
            seen["hooks"].append([name, before, after])

        setattr(workspace, name, noted)

    for name in ("checkpoint_prepare", "checkpoint_restore"):
        note(name, getattr(workspace, name))
    return type(workspace).__name__


def flashinfer_seen(worker: Any) -> dict[str, Any]:
    return dict(worker.worker._flashinfer_seen)


class Occupier:
    """A process that takes nearly all of the first GPU."""

    CODE = (
        "import torch, sys\n"
        "free = torch.cuda.mem_get_info()[0]\n"
        "held = torch.empty(free - (512 << 20), dtype=torch.uint8, device='cuda')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "ready"
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def attempt_in_thread(call: Callable[[], Any], limit_s: float) -> dict[str, Any]:
    """As :func:`attempt`, for a call that may never return: vLLM's client waits for ever for a dead EngineCore."""
    outcome: dict[str, Any] = {"error": "no answer", "seconds": limit_s}
    thread = threading.Thread(target=lambda: outcome.update(attempt(call)), daemon=True)
    thread.start()
    thread.join(limit_s)
    return dict(outcome)


def wait_gone(pids: Any, deadline_s: float) -> float | None:
    """Seconds until none of the processes exists (a zombie counts as gone); None if not in time."""
    from checkpoint_executor import procfs

    begun = time.monotonic()
    while time.monotonic() - begun < deadline_s:
        if not any(procfs.is_alive(pid) for pid in pids):
            return round(time.monotonic() - begun, 3)
        threading.Event().wait(0.005)
    return None


def limit_mib(record: Recorder) -> int:
    """What counts as empty: what the GPUs had before, and a little."""
    return int(max(record.facts["mib_before_start"])) + 8


def cycle_log() -> list[Any]:
    path = os.environ.get("CHECKPOINT_EXECUTOR_LOG")
    if not path or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _median(cycles: Sequence[dict[str, Any]], name: str) -> float | None:
    return round(statistics.median(cycle[name] for cycle in cycles), 3) if cycles else None


def run_memory(part: Part, record: Recorder) -> None:
    """Sleep and wake with the executor's attribution: what it read is in the log (``NAME.jsonl``)."""
    engine = Engine(part, record)
    engine.llm.collective_rpc(enlarge_embeddings)
    before = engine.outputs()
    same = []
    for _ in range(part.cycles):
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
        same.append(engine.outputs() == before)
    record(same_outputs=same, log=cycle_log(), summary={"identical": all(same), "cycles": len(same)})


KINDS: dict[str, Callable[[Part, Recorder], None]] = {
    "cycles": run_cycles,
    "fail_worker": run_fail_worker,
    "fail_fit": run_fail_fit,
    "fail_core": run_fail_core,
    "flashinfer": run_flashinfer,
    "memory": run_memory,
}


def child(name: str, out: Path) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: a stopped process ends by nothing else
    part = next(part for part in (*PARTS, *EXTRA) if part.name == name)
    record = Recorder(out / f"{name}.json")
    KINDS[part.kind](part, record)
    record(completed=True)
    # What is left is vLLM's orderly end, which is not measured here.
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------- the parts, one by one


def environment(part: Part, out: Path, nccl: str | None, flashinfer: str) -> dict[str, str]:
    environ = {**os.environ, **ENVIRONMENT}
    # Where it can be imported vLLM uses it, and compiles what it needs: so it is seen by its own parts only.
    also = flashinfer if part.kind == "flashinfer" else ""
    paths = [str(REPOSITORY), str(plugin_site(out)), also, os.environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if part.ranks > 1 and part.backend != "stock":
        environ |= SUSPEND
    if nccl and part.ranks > 1:
        environ["LD_PRELOAD"] = environ["VLLM_NCCL_SO_PATH"] = nccl
    if part.ours:
        environ["CHECKPOINT_EXECUTOR_LOG"] = str(out / f"{part.name}.jsonl")
        if part.backend.startswith("arena"):
            environ["CHECKPOINT_EXECUTOR_HOST_ARENA"] = "1"
    # Its own, because two that start together might write the same one.
    environ["VLLM_CACHE_ROOT"] = str(Path(tempfile.gettempdir()) / "gpu-vllm-cache" / part.name)
    if part.kind == "memory":
        environ["CHECKPOINT_EXECUTOR_ATTRIBUTION"] = "1"
    if part.kind == "flashinfer":
        environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "1"
        # A kernel that is missing is an error at once, and not minutes of nvcc.
        environ["FLASHINFER_DISABLE_JIT"] = "1"
    return environ


def plugin_site(out: Path) -> Path:
    """A folder with the project's entry points, so that vLLM finds the plugin in a checkout that is not installed."""
    site = out / "site"
    info = site / "checkpoint_executor-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checkpoint-executor\nVersion: 0\n")
    groups = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    text = "".join(
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()
    )
    (info / "entry_points.txt").write_text(text)
    return site


class Running:
    """A part in its process, until :meth:`finish`."""

    def __init__(self, part: Part, out: Path, nccl: str | None, flashinfer: str) -> None:
        self.part = part
        self._path = out / f"{part.name}.json"
        for path in (self._path, self._path.with_suffix(".jsonl")):
            path.unlink(missing_ok=True)
        self._begun = time.monotonic()
        self._log = self._path.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--child", part.name, "--out", str(out)],
                env=environment(part, out, nccl, flashinfer),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_up(self) -> None:
        """Until its engine is up, or it ended, or its time is over."""
        while self._process.poll() is None and self._left_s() > 0 and not self._facts().get("up"):
            threading.Event().wait(0.1)

    def kill(self) -> None:
        """End all of it, at once."""
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Have it take no time, until its turn."""
        self._signal(signal.SIGSTOP)

    def finish(self) -> dict[str, Any]:
        """Give it its turn, and wait for its end; what it recorded, and how it ended. Nothing of it is left."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        turn = time.monotonic()
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended already
        try:
            how = f"exit {self._process.wait(max(1.0, self._left_s()))}"
        except subprocess.TimeoutExpired:
            how = f"cut off after {self.part.limit_s} s"
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
        now = time.monotonic()
        facts = self._facts()
        if "summary" not in facts:
            facts["log_ends"] = self._log.read_text(errors="replace")[-600:]
        times = {"seconds": round(now - self._begun, 1), "turn_s": round(now - turn, 1)}
        return own_mib({**facts, "how": how, **times, "mib_after": _left(self.part.ranks)})

    def _signal(self, number: signal.Signals) -> None:
        """To the part, its engine and its workers. The helper, in a group of its own, is idle between calls anyway."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    def _left_s(self) -> float:
        return self.part.limit_s - (time.monotonic() - self._begun)

    def _facts(self) -> dict[str, Any]:
        try:
            facts: dict[str, Any] = json.loads(self._path.read_text())
        except (OSError, ValueError):  # not begun, or half written
            return {}
        return facts


def own_mib(facts: dict[str, Any]) -> dict[str, Any]:
    """With what the part itself held asleep: in use then, less what is in use after its end."""
    after = facts["mib_after"]
    if isinstance(after, list) and facts.get("summary") and facts.get("cycles"):
        asleep = [
            used - left for cycle in facts["cycles"] for used, left in zip(cycle["mib_asleep"], after, strict=True)
        ]
        facts["summary"] = {**facts["summary"], "mib_asleep": max(asleep)}
    return facts


def _left(ranks: int) -> Any:
    """MiB in use on each GPU once that number stands still."""
    try:
        gpus = Gpus(ranks)
        readings = [gpus.used_mib()]
        while len(readings) < 100 and readings[-5:] != [readings[-1]] * 5:
            threading.Event().wait(0.1)
            readings.append(gpus.used_mib())
        return readings[-1]
    except Exception as error:  # noqa: BLE001 - no NVML, no figure
        return str(error)


def last_error(result: dict[str, Any]) -> str:
    return f"the log ends: {result['log_ends']}" if result.get("log_ends") else "no result"


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'part':22} {'how':10} {'s':>6} {'start':>6}  result"]
    for name, result in results.items():
        summary = result.get("summary") or {"failed": last_error(result)}
        text = ", ".join(f"{key} {value}" for key, value in summary.items())
        lines.append(f"{name:22} {result['how'][:10]:10} {result['seconds']:6} {result.get('start_s', '-'):>6}  {text}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="names, or beginnings of names; all if none is given")
    parser.add_argument("--out", type=Path, default=Path("gpu-vllm"), help="directory of the results")
    parser.add_argument("--nccl", default=os.environ.get("VLLM_NCCL_SO_PATH"), help="libnccl.so.2 of 2.29.7 or later")
    parser.add_argument("--flashinfer", default="", metavar="DIR", help="where FlashInfer is, unless it is installed")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no part after so many seconds")
    parser.add_argument("--together", action="store_true", help="start all at once, then take turns")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        print("\n".join(part.name for part in (*PARTS, *EXTRA)))
        return 0
    unknown = [name for name in args.parts if not any(part.name.startswith(name) for part in (*PARTS, *EXTRA))]
    if unknown:
        parser.error(f"no part is called {' or '.join(unknown)}; --list names them")
    args.out.mkdir(parents=True, exist_ok=True)
    out: Path = args.out.resolve()
    if args.child:
        child(args.child, out)
        return 0
    chosen = [part for part in (*PARTS, *EXTRA) if any(part.name.startswith(name) for name in args.parts)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the finally below
    begun = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    waves = [chosen or PARTS] if args.together else [[part] for part in chosen or PARTS]
    for wave in waves:
        if time.monotonic() - begun > args.budget:
            print(f"{', '.join(part.name for part in wave)}: not begun, the budget is spent", flush=True)
            continue
        print(f"{', '.join(part.name for part in wave)} ...", flush=True)
        running = [Running(part, out, args.nccl, args.flashinfer) for part in wave]
        try:
            for one in running:
                one.wait_up()
            for one in running:
                one.stop()
            for one in running:
                results[one.part.name] = one.finish()
                print(table({one.part.name: results[one.part.name]}).splitlines()[1], flush=True)
                name = "all.json" if not chosen else f"all-{'-'.join(args.parts)}.json"
                (out / name).write_text(json.dumps(results, indent=1, default=str))
        finally:
            # What is stopped would stay so, with its memory.
            for one in running:
                one.kill()
    print()
    print(table(results))
    return 0 if all(result.get("completed") for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

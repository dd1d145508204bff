"""A worker for vLLM on the software device: real bytes in device memory, a real graph, real collectives, a tiny model.

The next token depends on the weights, on every token so far *as read from the KV cache*, and on a captured graph with
an all-reduce in it. So tokens are the same after a sleep only if weights, graph and communicator came back, and a
request that was kept over a sleep goes on right only if it was really computed again: the KV cache is poison after a
wake.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from checkpoint_executor import softgpu
from checkpoint_executor.workers.soft_runtime import SoftRuntime

__all__ = ["SoftWorker"]

_BLOCK_TOKENS = 16
_WEIGHTS = 1 << 16
_VOCABULARY = 32000
_CAPACITY_BYTES = 256 << 20


class _Nccl:
    """What :mod:`checkpoint_executor.vllm.workers` asks of vLLM's NCCL library."""

    def has_symbol(self, name: str) -> bool:
        return name == "ncclCommSuspend"


class _PyNccl:
    """vLLM's communicator, with the software device's behind it."""

    def __init__(self, runtime: SoftRuntime) -> None:
        self._runtime = runtime
        self.disabled = False
        self.nccl = _Nccl()
        self.comm = None
        #: For a test: claims to have been suspended no more.
        self.lies = False

    @property
    def _suspended(self) -> bool:
        return self._runtime.communicator.is_suspended and not self.lies


class _DeviceCommunicator:
    def __init__(self, pynccl: _PyNccl) -> None:
        self.pynccl_comm = pynccl


class _Group:
    def __init__(self, pynccl: _PyNccl) -> None:
        self.device_communicator = _DeviceCommunicator(pynccl)


class _Request:
    def __init__(self, tokens: list[int], blocks: list[int], computed: int) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.computed = computed


class SoftWorker(WorkerBase):  # type: ignore[misc, unused-ignore]
    """Behaves like vLLM's GPU worker as far as the executor can see, and writes down what it was asked to do."""

    runtime: SoftRuntime

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self.model_runner = None
        self.events: list[Any] = []
        self.step_delay_s = 0.0
        self._requests: dict[str, _Request] = {}
        self._scheduled: Any = None
        rendezvous = Path(self.distributed_init_method.removeprefix("file://") + ".soft")
        rendezvous.mkdir(exist_ok=True)
        world_size = self.parallel_config.world_size
        self.runtime = SoftRuntime.open(
            root=softgpu.default_root(),
            name=softgpu.device_name(self.local_rank),
            rank=self.rank,
            world_size=world_size,
            rendezvous=rendezvous,
            communication="suspend" if self.model_config.enable_nccl_comm_suspend else "socket",
            capacity_bytes=_CAPACITY_BYTES,
        )
        if world_size > 1:
            self._pynccl = _PyNccl(self.runtime)
            self._group = _Group(self._pynccl)
            parallel_state._groups["tp:0"] = lambda: self._group
            if self.model_config.enable_nccl_comm_suspend:
                self._workspace = self.runtime.shared_workspace(1 << 16)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        allocator = self.runtime.allocator
        self.weights = allocator.empty((_WEIGHTS,), torch.int64)
        with self.runtime.device_call():
            numbers = torch.arange(_WEIGHTS, dtype=torch.int64)
            self.weights.copy_((numbers * 6364136223846793005 + 1442695040888963407 * (self.rank + 1)) >> 33)
            self.index = allocator.empty((1,), torch.int64)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {
            f"layer.{i}": FullAttentionSpec(
                block_size=_BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
            )
            for i in range(2)
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        return 4 << 20

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.kv_cache = self.runtime.allocator.empty(
            (kv_cache_config.num_blocks * _BLOCK_TOKENS,), torch.int64, "kv_cache"
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        # vLLM captures into the allocator's memory with this option; the graph's own pool is out of a sleep's reach.
        offloaded = getattr(self.model_config, "sleep_mode_offload_cudagraph", False)
        result = self.runtime.allocator.empty((1,), torch.int64) if offloaded else None

        def step() -> torch.Tensor:
            value = torch.index_select(self.weights, 0, self.index, out=result)
            return self.runtime.communicator.all_reduce(value)

        with self.runtime.device_call():
            self.index.zero_()
            self._graph = self.runtime.capture(step)
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        pass

    # -- housekeeping: each touches the device, so that none may reach a checkpointed process ---------

    def synchronize_device(self) -> None:
        self.runtime.synchronize()
        self.events.append("synchronize_device")

    def reset_mm_cache(self) -> None:
        self.runtime.synchronize()
        self.events.append("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        self.runtime.synchronize()
        self.events.append("reset_encoder_cache")

    # -- a step ------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
        if scheduler_output.total_num_scheduled_tokens == 0:
            self.runtime.synchronize()
            self.events.append(["empty batch", sorted(scheduler_output.finished_req_ids)])
            return EMPTY_MODEL_RUNNER_OUTPUT
        for new in scheduler_output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self._requests[new.req_id] = _Request(tokens, list(new.block_ids[0]), new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self._requests[name]
            request.computed = computed
            request.blocks.extend(blocks[0] if blocks else [])
        self._scheduled = scheduler_output
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        if self.step_delay_s:
            threading.Event().wait(self.step_delay_s)
        scheduled = self._scheduled.num_scheduled_tokens
        names = list(scheduled)
        sampled = []
        with self.runtime.device_call(), torch.inference_mode():
            for name in names:
                sampled.append(self._run(self._requests[name], scheduled[name]))
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
        )

    def _run(self, request: _Request, count: int) -> list[int]:
        """Write the scheduled tokens into the KV cache; sample if that was all of them."""
        end = request.computed + count
        slots = torch.tensor(
            [request.blocks[i // _BLOCK_TOKENS] * _BLOCK_TOKENS + i % _BLOCK_TOKENS for i in range(end)]
        )
        tokens = torch.tensor(request.tokens[:end])
        self.kv_cache[slots[request.computed :]] = tokens[request.computed :]
        if end < len(request.tokens):
            return []
        seen = self.kv_cache[slots]
        state = int(((seen + 7) * torch.arange(1, end + 1)).sum())
        self.index.fill_(state % _WEIGHTS)
        token = int(self._graph.replay()) % (_VOCABULARY - 3) + 3
        request.tokens.append(token)
        return [token]

    def take_draft_token_ids(self) -> None:
        return None

    # -- sleep, as in vLLM's GPU worker --------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        self.events.append(["sleep", level])
        self.runtime.synchronize()
        self.runtime.allocator.sleep()
        if self.model_config.enable_nccl_comm_suspend and self.parallel_config.world_size > 1:
            self.runtime.communicator.suspend()

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.events.append(["wake_up", tags])
        self.runtime.allocator.wake(tags or ["weights", "kv_cache"])
        if self.runtime.communicator.is_suspended:
            self.runtime.communicator.resume()
        self.runtime.synchronize()

    def discard(self, tags: tuple[str, ...]) -> None:
        self.events.append(["discard", list(tags)])
        for tag in tags:
            self.runtime.allocator.release(tag)

    def checkpoint_prepare(self) -> None:
        self.events.append("checkpoint_prepare")
        for workspace in self.runtime.workspaces:
            workspace.checkpoint_prepare()

    def checkpoint_restore(self) -> None:
        self.events.append("checkpoint_restore")
        for workspace in reversed(self.runtime.workspaces):
            workspace.checkpoint_restore()

    # -- for tests ---------------------------------------------------------------------------------------------

    def compute_weight_checksums(self) -> dict[str, str]:
        with self.runtime.device_call():
            return {f"tp{self.rank}:weights": hashlib.sha256(self.weights.numpy().tobytes()).hexdigest()}

    def ledger(self) -> dict[str, int]:
        return self.runtime.ledger()

    def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def fail_on_the_first_rank_alone(self) -> None:
        """The other ranks stay in it for ever."""
        if self.rank == 0:
            raise ValueError("the first rank alone")
        threading.Event().wait()

    def set_step_delay(self, seconds: float) -> None:
        self.step_delay_s = seconds

    def lie_about_suspension(self) -> None:
        self._pynccl.lies = True

    def known_requests(self) -> list[str]:
        return sorted(self._requests)

    def shutdown(self) -> None:
        self.runtime.close()

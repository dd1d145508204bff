"""A worker whose ranks reduce through FlashInfer's own ``trtllm`` workspace, and what saw its hooks run.

Imported by the workers alone: importing FlashInfer opens CUDA.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from checkpoint_executor.workers import Worker, WorkerContext, execution
from checkpoint_executor.workers.cuda_calls import bindings

__all__ = ["HANDLES", "NO_MULTICAST", "FlashInferWorker"]

#: For every process that may load NCCL, torch's symmetric memory or NVSHMEM.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

#: Allocations of a trtllm workspace: the two-shot kernel's buffer, its flags, the one-shot kernel's buffers.
HANDLES = 3

_TOKENS, _HIDDEN = 64, 1024
#: The workspace is for more, so that what the devices have in use tells whether it is there: 128 MiB a rank.
_MAX_TOKENS = 8192

_MEET_S = 30


class ObservedWorkspace:
    """FlashInfer's workspace as the executor calls it: its restore wants to be told how handles are exchanged.

    Every call is written down with which of the workspace's allocations were mapped before and after.
    """

    def __init__(self, workspace: Any, exchange: Any) -> None:
        self.workspace = workspace
        self.calls: list[dict[str, Any]] = []
        self._exchange = exchange

    def checkpoint_prepare(self) -> None:
        self._observe("prepare", self.workspace.checkpoint_prepare)

    def checkpoint_restore(self) -> None:
        self._observe("restore", lambda: self.workspace.checkpoint_restore(self._exchange))

    def _observe(self, name: str, hook: Callable[[], None]) -> None:
        before = self._mapped()
        hook()
        self.calls.append({"hook": name, "before": before, "after": self._mapped()})

    def _mapped(self) -> list[bool]:
        return [bool(handle.mapped) for handle in self.workspace.mem_handles]


class FlashInferWorker(Worker):
    """Eager all-reduces and a graph of both kernels, one-shot and two-shot, over one workspace.

    Args:
        context: given by the executor. meeting: a file that does not exist, where the ranks meet.
    """

    def __init__(self, context: WorkerContext, meeting: str) -> None:
        super().__init__(context)
        wrong = [name for name, value in NO_MULTICAST.items() if os.environ.get(name) != value]
        if wrong:
            raise RuntimeError(f"multicast is not off: {', '.join(wrong)}")
        _forbid_multicast()
        # Host sockets, as vLLM does it: the handles are exchanged while the NCCL communicator is suspended.
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=_MEET_S),
        )
        from flashinfer import comm
        from flashinfer.comm.mnnvl import TorchDistBackend

        self._comm: Any = comm
        exchange = TorchDistBackend()
        workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=context.world_size,
            rank=context.rank,
            max_token_num=_MAX_TOKENS,
            hidden_dim=_HIDDEN,
            dtype=torch.bfloat16,
            comm_backend=exchange,
        )
        self._observed = ObservedWorkspace(workspace, exchange)
        context.workspaces.append(self._observed)

        shape = (_TOKENS, _HIDDEN)
        self._noise = context.allocator.empty(shape, torch.bfloat16, WEIGHTS)
        self._noise.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(context.rank)))
        self._input = context.allocator.empty(shape, torch.bfloat16, KV_CACHE)
        self._input.copy_(self._noise)
        self._graph = context.capture(self._step)

    def describe(self) -> dict[str, Any]:
        """The workspace's type, its addresses by allocation and rank, and whether anything of it multicasts."""
        workspace = self._observed.workspace
        handles = workspace.mem_handles
        return {
            "type": type(workspace).__name__,
            "library": _library(),
            "addresses": [[int(address) for address in addresses] for addresses in workspace.ipc_handles],
            "bytes": sum(int(handle.allocation_size) for handle in handles),
            "multicast": [bool(handle._enable_multicast) or int(handle.mc_ptr) != 0 for handle in handles],
        }

    def hooks(self) -> list[dict[str, Any]]:
        """What :class:`ObservedWorkspace` wrote down so far."""
        return self._observed.calls

    @execution
    def known_answer(self) -> dict[str, list[bool]]:
        """Sums of small whole numbers, which bfloat16 holds exactly: whether each is right, eager and from the graph.

        One-shot, then two-shot over half of it on every rank: on two ranks that is the same once more.
        """
        numbers = torch.arange(_TOKENS * _HIDDEN, device=self.context.device).reshape(_TOKENS, _HIDDEN) % 23
        ranks = self.context.world_size
        self._input.copy_(numbers * (self.context.rank + 1))
        expected = (numbers * (ranks * (ranks + 1) // 2)).to(torch.bfloat16)
        answers = [expected, expected * (ranks / 2)]
        found = {"eager": self._step(), "graph": self._graph.replay()}
        return {
            name: [torch.equal(one, answer) for one, answer in zip(outputs, answers, strict=True)]
            for name, outputs in found.items()
        }

    @execution
    def digests(self) -> dict[str, list[str]]:
        """SHA-256 of the bits of the reduced noise, of which each rank has its own, eager and from the graph."""
        self._input.copy_(self._noise)
        found = {"eager": self._step(), "graph": self._graph.replay()}
        return {name: [_digest(output) for output in outputs] for name, outputs in found.items()}

    @torch.no_grad()
    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        one = self._reduce(self._input, one_shot=True)
        return one, self._reduce(one * 0.5, one_shot=False)

    def _reduce(self, tensor: torch.Tensor, *, one_shot: bool) -> torch.Tensor:
        reduced: torch.Tensor = self._comm.allreduce_fusion(
            input=tensor,
            workspace=self._observed.workspace,
            pattern=self._comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=True,  # as vLLM does
            use_oneshot=one_shot,
        )
        return reduced


def _forbid_multicast() -> None:
    """On a shared host a multicast object can put GPUs out of service: raise before the driver is asked for one."""
    driver = bindings()

    def refuse(*_: object) -> None:
        raise RuntimeError("something asked for a multicast object")

    driver.cuMulticastCreate = refuse


def _library() -> str:
    """The file that FlashInfer's kernels were loaded from."""
    with open("/proc/self/maps") as maps:
        return next((line.split()[-1] for line in maps if line.rstrip().endswith("trtllm_comm.so")), "")


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()

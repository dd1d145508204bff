"""The worker of ``doctor --self-test``: a little of everything that a sleep must carry over, in a second.

Weights that are backed up, memory that is dropped, and a captured graph that reads the one and writes the other, with,
on CUDA, a kernel for which the context's local memory has to grow.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch

from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from checkpoint_executor.workers.self_test_kernel import open_local_arrays
from checkpoint_executor.workers.worker import Worker, WorkerContext, execution

__all__ = ["SelfTestWorker"]

_ROWS, _COLUMNS = 16, 1024
#: Of each thread's local array: 2 KB, above the default limit; half a GiB on H200.
_ARRAY_INTS = 500


class SelfTestWorker(Worker):
    """A graph of matrix products over weights of 4 MiB each.

    Args:
        context: given by the executor. layers: how many.
    """

    def __init__(self, context: WorkerContext, layers: int = 4) -> None:
        super().__init__(context)
        shape = (_COLUMNS, _COLUMNS)
        self._weights = [context.allocator.empty(shape, torch.float32, WEIGHTS) for _ in range(layers)]
        self._input = context.allocator.empty((_ROWS, _COLUMNS), torch.float32, KV_CACHE)
        generator = torch.Generator().manual_seed(0)
        for weight in self._weights:
            weight.copy_(torch.randn(shape, generator=generator) / _COLUMNS**0.5)
        self._noise = torch.randn((_ROWS, _COLUMNS), generator=generator)
        self._input.copy_(self._noise)
        self._local_arrays = None
        if context.runtime.kind == "cuda":
            self._local_arrays = open_local_arrays(torch.device(context.runtime.torch_device).index, _ARRAY_INTS)
        self._seeds = context.allocator.empty((1,), torch.int32, KV_CACHE).fill_(7)
        self._graph = context.capture(self._step)

    def device_id(self) -> str:
        return self.context.runtime.device_id

    @execution
    def replay(self) -> str:
        """Replay the graph on the same input; SHA-256 over the bits of what comes out."""
        self._input.copy_(self._noise)
        self._seeds.fill_(7)
        found = hashlib.sha256()
        for tensor in self._graph.replay():
            output = tensor.cpu().contiguous()
            found.update(ctypes.string_at(output.data_ptr(), output.numel() * output.element_size()))
        return found.hexdigest()

    @torch.no_grad()
    def _step(self) -> tuple[torch.Tensor, ...]:
        x = self._input
        for weight in self._weights:
            x = torch.tanh(x @ weight)
        if self._local_arrays is None:
            return (x,)
        mixed = torch.empty(self._local_arrays.numbers, dtype=torch.int32, device=x.device)
        self._local_arrays.launch(self._seeds, mixed)
        return x, mixed

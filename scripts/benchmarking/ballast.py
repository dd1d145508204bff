"""A worker that is nothing but its memory, and how fast that memory can be copied at all.

Knows the protocol of a worker and torch; nothing of how it is put to sleep or what is measured.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from checkpoint_executor.workers import Worker, WorkerContext, execution

__all__ = ["GIB", "MIB", "BallastWorker", "plain_copy_gb_s"]

GIB = 1 << 30
MIB = 1 << 20
BLOCK_BYTES = 512 * MIB


class BallastWorker(Worker):
    """Weights of a given size, a KV cache, and graphs that hold all-reduces: the shape of an engine without a model.

    Args:
        context: place and device. weights_bytes, kv_bytes: device memory by tag; weights are rounded down to whole
            64-bit words, of which the checksums are made. graphs: how many to capture.
        weights_tag: ``"kv_cache"`` if only the driver shall ever move the weights: then no host memory is kept for
            them, which would be pinned, and slow the driver down.
    """

    def __init__(
        self, context: WorkerContext, weights_bytes: int, kv_bytes: int, graphs: int, weights_tag: str = "weights"
    ) -> None:
        super().__init__(context)
        import torch

        self.torch = torch
        allocator = context.allocator
        weights_bytes -= weights_bytes % 8
        sizes = [BLOCK_BYTES] * (weights_bytes // BLOCK_BYTES)
        if weights_bytes % BLOCK_BYTES:
            sizes.append(weights_bytes % BLOCK_BYTES)
        self.blocks = [allocator.empty((size // 2,), torch.bfloat16, weights_tag) for size in sizes]
        for index, block in enumerate(self.blocks):
            generator = torch.Generator(device=context.device).manual_seed(1000 * context.rank + index)
            block.normal_(0, 0.02, generator=generator)
        self.kv = allocator.empty((kv_bytes // 2,), torch.bfloat16, "kv_cache") if kv_bytes else None
        width = 2048 if context.device != "cpu" else 64
        # One square matrix for each layer, cut from the weights, so that a replay reads what slept.
        flat = self.blocks[0]
        self.layers = [flat[i * width * width : (i + 1) * width * width].view(width, width) for i in range(8)]
        self.x = allocator.empty((graphs, width), torch.bfloat16, weights_tag)
        self.x.copy_(torch.linspace(-1, 1, graphs * width).view(graphs, width))
        self.graphs = [context.capture(self._forward(rows)) for rows in range(1, graphs + 1)]

    def _forward(self, rows: int) -> Callable[[], Any]:
        def forward() -> Any:
            x = self.x[:rows]
            for layer in self.layers:
                x = self.context.communicator.all_reduce(x @ layer)
            return x

        return forward

    @execution
    def decode(self) -> str:
        """Replay every graph; returns a hash of the outputs' exact bits."""
        digest = hashlib.sha256()
        for graph in self.graphs:
            out = graph.replay().contiguous().view(self.torch.uint8).cpu()
            digest.update(bytes(out.flatten().tolist()))
        return digest.hexdigest()

    @execution
    def replay_us(self, warm_up_s: float = 1.5, batches: int = 40, times: int = 100) -> float:
        """Time of one replay of the largest graph, microseconds: the median of batches, each waited for at its end.

        The warm-up brings the clocks up and fills the caches: without it the first reading after the start was up to
        9% slower than the last after many cycles. The number of warm-up replays is timed on rank 0 for all ranks,
        which have to replay equally often because the graph holds all-reduces.
        """
        graph = self.graphs[-1]

        def batch_s() -> float:
            begun = time.perf_counter()
            for _ in range(times):
                graph.replay()
            self.context.runtime.synchronize()
            return time.perf_counter() - begun

        self.context.runtime.synchronize()
        # Generous: at least warm_up_s if a replay takes as long as the first batch's average.
        for _ in range(self._agreed(int(warm_up_s / max(batch_s(), 1e-6)) + 1)):
            batch_s()
        return statistics.median(batch_s() for _ in range(batches)) / times * 1e6

    def _agreed(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        mine = self.torch.zeros(1, dtype=self.torch.float32, device=self.context.device)
        if self.context.rank == 0:
            mine += number
        return int(self.context.communicator.all_reduce(mine).item())

    def touch_weights(self) -> None:
        """Change one element of every block, so that nothing can be proven unchanged."""
        for block in self.blocks:
            block[-1] += 1

    def checksums(self) -> list[str]:
        """Position-dependent sums of every block, taken on the device."""
        out = []
        for block in self.blocks:
            words: Any = block.view(self.torch.int64)
            total = 0
            for part in words.split(1 << 23):
                index = self.torch.arange(1, part.numel() + 1, device=part.device)
                total = (total * 31 + int((part * index).sum())) % (1 << 63)
            out.append(f"{total:016x}")
        return out

    def plain_copy_gb_s(self) -> dict[str, float]:
        """The machine's own limit for the weights' copies: :func:`plain_copy_gb_s`."""
        return plain_copy_gb_s(self.blocks)


def plain_copy_gb_s(tensors: Sequence[Any]) -> dict[str, float]:
    """What plain copies over registered huge pages do on this machine, both ways, GB/s (median of 5).

    Over up to 8 GiB, as the weights' copies are: a small buffer is a little faster. Nothing on the software device.

    Args:
        tensors: whose bytes are copied to the host and back; nobody may change them meanwhile.
    """
    import torch

    if not tensors[0].is_cuda:
        return {}
    from checkpoint_executor.workers.cuda_arena import HostArena

    chosen, left = [], 8 * GIB
    for tensor in tensors:
        if tensor.nbytes <= left and tensor.is_contiguous():
            chosen.append(tensor)
            left -= tensor.nbytes
    arena = HostArena()
    arena.prepare(sum(tensor.nbytes for tensor in chosen))
    hosts, offset = [], 0
    for tensor in chosen:
        hosts.append(torch.frombuffer(arena.view(offset, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes
    rates: dict[str, list[float]] = {"d2h": [], "h2d": []}
    for _ in range(5):
        for name in rates:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for host, tensor in zip(hosts, chosen, strict=True):
                target, source = (host, tensor) if name == "d2h" else (tensor, host)
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates[name].append(offset / (time.perf_counter() - begun) / 1e9)
    del hosts
    arena.close()
    return {name: statistics.median(values) for name, values in rates.items()}

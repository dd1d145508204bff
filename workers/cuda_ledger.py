"""Whose a GPU's bytes are, from inside the process that holds them: what torch, NCCL and the allocator say, and what
the device lost while something was done that none of them knows of.

Knows NVML and torch's statistics. Changes nothing, and reads nothing of a process that is checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

__all__ = ["DeviceMeter", "Meter", "NoMeter", "TorchBytes", "WatchedGraph", "device_used_bytes", "torch_bytes"]

#: What torch gives cuBLAS for each stream where it cannot be asked (before 2.12): on Hopper, and elsewhere.
_CUBLAS_WORKSPACE_BYTES = frozenset({4096 * 8 * 1024, 4096 * 2 * 1024 + 16 * 8 * 1024})

_ORDINARY_POOL = (0, 0)


class Meter(Protocol):
    """Says what the device lost in a piece of work and nobody accounts for."""

    @property
    def grown(self) -> dict[str, int]:
        """Bytes by kind, so far."""
        ...

    def watch(self, kind: str) -> AbstractContextManager[None]:
        """Around work whose unexplained bytes are of this kind."""
        ...

    def watched(self, graph: Any) -> Any:
        """A captured graph whose first replay is watched: executables get device memory there too."""
        ...


class NoMeter:
    """The meter that is not there: costs nothing."""

    grown: dict[str, int] = {}

    def watch(self, kind: str) -> AbstractContextManager[None]:
        del kind
        return nullcontext()

    def watched(self, graph: Any) -> Any:
        return graph


class DeviceMeter:
    """Meets :class:`Meter` by reading the device before and after.

    Args:
        used_bytes: reads the device, by everybody: what others do meanwhile on it is taken for ours.
    """

    def __init__(self, used_bytes: Callable[[], int]) -> None:
        self._used_bytes = used_bytes
        self._explained: Callable[[], int] = lambda: 0
        self._settle: Callable[[], None] = lambda: None
        self.grown: dict[str, int] = {}

    def explain(self, explained_bytes: Callable[[], int], settle: Callable[[], None]) -> None:
        """From now on, growth of ``explained_bytes`` is no surprise, and ``settle`` waits for the device first."""
        self._explained = explained_bytes
        self._settle = settle

    @contextmanager
    def watch(self, kind: str) -> Iterator[None]:
        before = self._unexplained()
        yield
        self.grown[kind] = self.grown.get(kind, 0) + self._unexplained() - before

    def watched(self, graph: Any) -> Any:
        return WatchedGraph(graph, self)

    def _unexplained(self) -> int:
        self._settle()
        return self._used_bytes() - self._explained()


class WatchedGraph:
    """``torch.cuda.CUDAGraph`` as far as replaying goes; the first time with a meter."""

    def __init__(self, graph: Any, meter: DeviceMeter) -> None:
        self._graph = graph
        self._meter: DeviceMeter | None = meter

    def replay(self) -> None:
        meter, self._meter = self._meter, None
        with meter.watch("graph_executables") if meter is not None else nullcontext():
            self._graph.replay()


def device_used_bytes(uuid: str) -> Callable[[], int]:
    """A reader of NVML's "used" of a GPU, as the helper reads it: the driver's own reserve counts apart.

    Raises:
        ImportError: no nvidia-ml-py. pynvml.NVMLError: no such GPU.
    """
    import pynvml

    nvml: Any = pynvml
    # Never shut down again: see the helper's driver.
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used)


class TorchBytes(NamedTuple):
    """Device bytes of torch's allocator: private pools (of graphs), cuBLAS's workspaces, and the rest it keeps."""

    graph_pools: int
    cublas: int
    other: int

    @property
    def total(self) -> int:
        return self.graph_pools + self.cublas + self.other


def torch_bytes(segments: list[dict[str, Any]], device: int, elsewhere: frozenset[int]) -> TorchBytes:
    """What a snapshot of torch's allocator holds on one device.

    Args:
        segments: ``torch.cuda.memory_snapshot()``. device: torch's index.
        elsewhere: addresses of segments that somebody else counts (the sleeping allocator's pools).

    A workspace is told by its size alone: torch has no list of them. A tensor of just that size counts as one.
    """
    sizes = _cublas_workspace_sizes()
    graphs = cublas = other = 0
    for segment in segments:
        if segment["device"] != device or segment["address"] in elsewhere:
            continue
        if tuple(segment["segment_pool_id"]) != _ORDINARY_POOL:
            graphs += segment["total_size"]
            continue
        workspaces = sum(
            block["size"]
            for block in segment["blocks"]
            if block["state"] == "active_allocated" and block.get("requested_size", block["size"]) in sizes
        )
        cublas += workspaces
        other += segment["total_size"] - workspaces
    return TorchBytes(graphs, cublas, other)


def _cublas_workspace_sizes() -> frozenset[int]:
    import torch

    found = set()
    for name in ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize"):
        ask = getattr(torch._C, name, None)
        if ask is not None:
            try:
                found.add(int(ask()))
            except RuntimeError:
                pass  # a build without CUDA
    return frozenset(found - {0}) or _CUBLAS_WORKSPACE_BYTES

"""CUDA graphs: capture a function once, replay it over the same addresses, before and after any number of sleeps.

Knows torch's capture. It does not know what the function computes; from the allocator and the communicator it only asks
whether a replay may run now.

The graphs' own memory (intermediate results and outputs) is one private pool of torch's, which no allocator sleep
reaches: the driver's checkpoint moves it, at about 2 GB/s. It is shared by all graphs made here, so they must not be
replayed at the same time on different streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from checkpoint_executor.workers.cuda_communicator import CudaCommunicator, LocalCommunicator
from checkpoint_executor.workers.cuda_ledger import Meter, NoMeter
from checkpoint_executor.workers.cuda_memory import CudaAllocator

__all__ = ["CudaGraph", "GraphPool"]

T = TypeVar("T")

#: Runs before a capture: libraries make their handles and pick algorithms in the first, Triton and NCCL may need two.
_WARM_UP_RUNS = 2


class CudaGraph(Generic[T]):
    """Meets :class:`~checkpoint_executor.workers.protocols.Graph`; made by :meth:`GraphPool.capture`."""

    def __init__(self, graph: Any, output: T, require_replayable: Callable[[], None]) -> None:
        self._graph = graph
        self._output = output
        self._require_replayable = require_replayable

    @property
    def output(self) -> T:
        """What the function returned; its tensors are rewritten by every replay."""
        return self._output

    def replay(self) -> T:
        """Run it on the current stream and return :attr:`output`.

        Raises:
            RuntimeError: memory sleeps, or a collective of the graph needs a communicator that is suspended. Nothing
            ran.
        """
        self._require_replayable()
        self._graph.replay()
        return self._output


class GraphPool:
    """Captures graphs that share one pool of memory.

    Args:
        device: torch's index of the device. allocator, communicator: what the graphs may use.
        meter: is shown the warm-ups (modules are loaded there) and the captures.
    """

    def __init__(
        self,
        device: int,
        allocator: CudaAllocator,
        communicator: CudaCommunicator | LocalCommunicator,
        meter: Meter | None = None,
    ) -> None:
        self._device = device
        self._meter: Meter = meter or NoMeter()
        self._allocator = allocator
        self._communicator = communicator
        # One stream for all: the pool's blocks belong to the stream that captured them.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], T]) -> CudaGraph[T]:
        """Warm ``function`` up and capture it. It takes no arguments and works on tensors at fixed addresses.

        Raises:
            RuntimeError: it does something that a graph cannot hold. torch.OutOfMemoryError: no room for its results.
        """
        self._require_awake()
        collectives = self._communicator.collectives
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._meter.watch("context"):
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UP_RUNS):
                    function()
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Errors only for what this thread does: others (NCCL's proxies, a server's) may call CUDA meanwhile.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with self._meter.watch("graph_executables"), capture:
            output = function()
        guards = [self._require_awake]
        if self._communicator.collectives > collectives:
            guards.append(self._communicator.require_active)

        def require_replayable() -> None:
            for guard in guards:
                guard()

        return CudaGraph(self._meter.watched(graph), output, require_replayable)

    def _require_awake(self) -> None:
        """Which memory a graph touches cannot be told, and a replay over memory that sleeps ends the process."""
        sleeping = sorted(self._allocator.sleeping)
        if sleeping:
            raise RuntimeError(f"memory tagged {', '.join(sleeping)} sleeps, so no graph may run; wake_up() first")

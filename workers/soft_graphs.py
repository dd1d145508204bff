"""Graphs on the software device: a function's operations, recorded once and replayed over the same addresses.

Knows torch's operations, the device gate and which tags a graph touches. It does not know what the function computes,
nor how ranks talk: a collective enters as one opaque node (:func:`run_collective`).

As on CUDA, a graph is a list of operations with *addresses*: every input is a tensor at a fixed place, every result
goes to a place in the graph's pool. The pool is device memory without a tag, so that no allocator sleep frees it and
only the driver's checkpoint does; that is the memory this project is about.

As on CUDA, a function can be captured if it always does the same operations: no ``.item()``, no shape that depends on
data, no host constant made inside (``torch.tensor``). Unlike on CUDA, the recorded run also computes, so capture runs
the function twice; it must give the same result when run again, apart from tensors that it overwrites.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from checkpoint_executor.softgpu import SoftProcess
from checkpoint_executor.workers.soft_memory import SegmentPool, SoftAllocator
from checkpoint_executor.workers.soft_tensors import LIFT_FRESH, PlacementMode, fresh_outputs, same_bits, tensors_in

__all__ = ["SoftGraph", "run_collective"]

T = TypeVar("T")

#: What the factory functions take and their ``out=`` forms do not: the output tensor says it.
_OUTPUT_DESCRIPTION = {"dtype", "layout", "device", "pin_memory"}

_EMPTY = ("aten::empty", "aten::new_empty")

_thread = threading.local()


def run_collective(
    collective: Callable[[], None], tensors: Sequence[torch.Tensor], require_active: Callable[[], None]
) -> None:
    """Run a collective, or, inside a capture, run it and record it as one node.

    Args:
        collective: works on ``tensors``; called again by every replay.
        tensors: what it reads and writes, at addresses that stay.
        require_active: raises RuntimeError while the communicator is suspended; asked before a replay starts, so
            that a replay is refused as a whole.
    """
    recorder: _Recorder | None = getattr(_thread, "recorder", None)
    if recorder is None:
        collective()
    else:
        recorder.record_collective(collective, tensors, require_active)


class SoftGraph(Generic[T]):
    """Meets :class:`~checkpoint_executor.workers.protocols.Graph`; made by :meth:`capture`."""

    def __init__(self, process: SoftProcess, allocator: SoftAllocator, output: T, recorder: _Recorder) -> None:
        self._process = process
        self._allocator = allocator
        self._output = output
        self._nodes = tuple(recorder.nodes)
        self._guards = tuple(recorder.guards)
        self._tags = frozenset(recorder.tags)
        self._pool = recorder.pool

    @classmethod
    def capture(cls, process: SoftProcess, allocator: SoftAllocator, function: Callable[[], T]) -> SoftGraph[T]:
        """Run ``function`` once to warm up and once to record it.

        Raises:
            RuntimeError: the function does something that a graph cannot hold, or a capture is in progress.
            MemoryError: no room on the device for the results.
        """
        if getattr(_thread, "recorder", None) is not None:
            raise RuntimeError("a graph is being captured; end that capture before you begin another")
        with _device_work(process):
            function()
            recorder = _Recorder(allocator)
            _thread.recorder = recorder
            try:
                with recorder:
                    output = function()
            finally:
                _thread.recorder = None
        return cls(process, allocator, output, recorder)

    @property
    def output(self) -> T:
        """What the function returned; its tensors are rewritten by every replay."""
        return self._output

    @property
    def tags(self) -> frozenset[str]:
        """Tags of the memory that the graph reads or writes."""
        return self._tags

    @property
    def pool_bytes(self) -> int:
        """Device bytes of the graph's results."""
        return self._pool.size_bytes

    def __len__(self) -> int:
        """Number of recorded operations."""
        return len(self._nodes)

    def replay(self) -> T:
        """Run it, as one device call, and return :attr:`output`. Waits while the driver holds the process.

        Raises:
            RuntimeError: memory that the graph needs sleeps or was given back, or a communicator is suspended; nothing
                ran.
        """
        with _device_work(self._process):
            self._process.require_local_memory()
            self._allocator.require_awake(self._tags, "used by a graph")
            for require_active in self._guards:
                require_active()
            for node in self._nodes:
                node()
        return self._output


@contextmanager
def _device_work(process: SoftProcess) -> Iterator[None]:
    # Not under inference_mode, whoever calls: its tensors could not be written to outside it.
    with process.call(), torch.inference_mode(False), torch.no_grad():
        yield


class _Recorder(PlacementMode):  # type: ignore[no-untyped-call]  # torch's hook has no annotations
    """Records the operations of one run, and puts their results in a pool."""

    def __init__(self, allocator: SoftAllocator) -> None:
        self.pool: SegmentPool = allocator.untagged_pool()
        super().__init__(self.pool.empty)
        self._allocator = allocator
        self._paused = False
        self.nodes: list[Callable[[], object]] = []
        self.guards: list[Callable[[], None]] = []
        self.tags: set[str] = set()

    def record_collective(
        self, collective: Callable[[], None], tensors: Sequence[torch.Tensor], require_active: Callable[[], None]
    ) -> None:
        self._note_tags(tensors)
        self._paused = True
        try:
            collective()
        finally:
            self._paused = False
        self.nodes.append(collective)
        if require_active not in self.guards:
            self.guards.append(require_active)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is LIFT_FRESH or {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise RuntimeError(
                f"{func} cannot be captured: it moves data between host and device, or its shape depends on data."
                " Make constants before the capture, and read results after a replay."
            )
        self._note_tags(tensors_in((args, kwargs)))
        outputs = func(*args, **kwargs)
        results = fresh_outputs(func, (args, kwargs), outputs)
        if func._schema.is_mutable and not results:
            self.nodes.append(lambda: func(*args, **kwargs))
            return outputs
        if not results:
            return outputs  # a view: its address is all there is to it
        homes = {id(result): self.room_for(result) for result in results}
        if not func._schema.name.startswith(_EMPTY):
            self.nodes.append(self._writer(func, args, kwargs, outputs, homes))
        return tree_map(lambda leaf: homes.get(id(leaf), leaf), outputs)

    def _note_tags(self, tensors: Iterable[torch.Tensor]) -> None:
        tags = (self._allocator.tag_at(tensor.untyped_storage().data_ptr()) for tensor in tensors)
        self.tags.update(tag for tag in tags if tag is not None)

    @staticmethod
    def _writer(
        func: Any, args: Any, kwargs: dict[str, Any], outputs: Any, homes: dict[int, torch.Tensor]
    ) -> Callable[[], object]:
        """A node that computes ``func`` into ``homes``, which hold its results when this returns.

        The ``out=`` form writes them directly. It is taken only if it gives the very bits of the functional form,
        so that a replay equals eager execution whatever the operation; otherwise the results are copied.
        """
        leaves = tree_leaves(outputs)
        out = _out_form(func, kwargs, [homes.get(id(leaf)) for leaf in leaves])
        if out is not None:
            form, out_kwargs = out
            form(*args, **out_kwargs)
            if all(same_bits(leaf, homes[id(leaf)]) for leaf in leaves):
                return lambda: form(*args, **out_kwargs)

        pairs = [(index, homes[id(leaf)]) for index, leaf in enumerate(leaves) if id(leaf) in homes]

        def compute_and_copy() -> None:
            computed = tree_leaves(func(*args, **kwargs))
            for index, home in pairs:
                home.copy_(computed[index])

        for index, home in pairs:
            home.copy_(leaves[index])
        return compute_and_copy


def _out_form(func: Any, kwargs: dict[str, Any], homes: list[torch.Tensor | None]) -> tuple[Any, dict[str, Any]] | None:
    """The ``out=`` overload that matches a functional one, and its keyword arguments; None if there is none."""
    schema = func._schema
    # A seeded operation must run once in a capture, or the generator would be one step ahead of eager.
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or any(home is None for home in homes):
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in _OUTPUT_DESCRIPTION]
    packet = func.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        taken = form._schema.arguments
        outs = [a.name for a in taken if a.is_out]
        names = {a.name for a in taken}
        if len(outs) != len(homes) or torch.Tag.out not in form.tags:
            continue
        # An out= form that takes dtype itself (sum) is matched with it, one that does not (arange) without.
        if [(a.name, str(a.type)) for a in taken if not a.is_out and a.name not in _OUTPUT_DESCRIPTION] == wanted:
            kept = {name: value for name, value in kwargs.items() if name in names}
            return form, {**kept, **dict(zip(outs, homes, strict=True))}
    return None

"""The class that users subclass, and the context it is built with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from checkpoint_executor.workers.protocols import Allocator, Communicator, DeviceRuntime, Graph, Workspace

__all__ = ["Worker", "WorkerContext", "execution", "execution_methods"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_EXECUTION = "_checkpoint_executor_execution"


def execution(method: F) -> F:
    """Mark a method that needs all of the memory, such as a forward pass.

    The executor refuses it while any tag is asleep, and while paused by ``sleep(level=0)``. Methods that
    are not marked run whenever the process itself is awake: updating weights after
    ``wake_up(["weights"])``, say.
    """
    setattr(method, _EXECUTION, True)
    return method


def execution_methods(worker_class: type) -> tuple[str, ...]:
    """Names of the methods that :func:`execution` marked, sorted."""
    return tuple(sorted(n for n in dir(worker_class) if getattr(getattr(worker_class, n, None), _EXECUTION, False)))


class WorkerContext:
    """What a worker is given: its place among the ranks and its device.

    Attributes:
        rank: 0 to ``world_size - 1``. world_size: number of tensor-parallel ranks.
        runtime: the device backend, for what is not offered below.
    """

    def __init__(self, rank: int, world_size: int, runtime: DeviceRuntime) -> None:
        self.rank = rank
        self.world_size = world_size
        self.runtime = runtime

    @property
    def device(self) -> str:
        """What to give torch: ``"cuda:0"``, or ``"cpu"`` on the software device."""
        return self.runtime.torch_device

    @property
    def allocator(self) -> Allocator:
        """Memory that sleeps, by tag."""
        return self.runtime.allocator

    @property
    def communicator(self) -> Communicator:
        """Collectives among the ranks."""
        return self.runtime.communicator

    @property
    def workspaces(self) -> list[Workspace]:
        """Append a workspace (anything with ``checkpoint_prepare`` and ``checkpoint_restore``) to have its
        hooks called around the driver's stages."""
        return self.runtime.workspaces

    def capture(self, function: Callable[[], T]) -> Graph[T]:
        """Capture a graph of ``function``, which takes no arguments and works on tensors at fixed addresses."""
        return self.runtime.capture(function)


class Worker:
    """One tensor-parallel rank. Subclass it; every public method can be called with ``collective_rpc``.

    The constructor runs in the worker's own process and builds everything: weights, KV cache, graphs.

    Args:
        context: the rank's place and device.

    A worker does not call CUDA from threads of its own from the beginning of a sleep to the end of the wake, or of the
    error that undid the sleep. A synchronise on a checkpointed process ends it (seen on drivers 580 and 595), and a
    graph that is replayed while kernels' local memory is given back ends its context (H200, 580).
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def before_sleep(self) -> None:
        """Called first in every sleep, while everything still works. Raising is fatal to the executor."""

    def after_wake(self, tags: tuple[str, ...]) -> None:
        """Called after these tags became resident. ``kv_cache`` memory holds undefined bytes. Raising is fatal."""

    def shutdown(self) -> None:
        """Called before an orderly exit, awake only: a sleeping worker is ended by SIGKILL."""

"""vLLM's entry point ``vllm.general_plugins``: runs in the front end, in EngineCore and in every worker, once each.

Registers the sleep-mode backend by name, and has vLLM say something useful when it is handed the other executor.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from checkpoint_executor.vllm.validation import ARENA_BACKEND

__all__ = ["register"]

_OWN = ("checkpoint_executor.executor", "CUDACheckpointExecutor")

_registered = False


def register() -> None:
    """Called by vLLM; may be called again."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ImportError:
        # A vLLM too old for us has no such module. It must go on working where we are only installed; who asks for our
        # executor is told the version.
        return
    SleepModeBackendFactory.register_backend(ARENA_BACKEND, "checkpoint_executor.vllm.backend", "CumemArenaBackend")
    _explain_wrong_executor()


def _explain_wrong_executor() -> None:
    """Make ``issubclass(checkpoint_executor.CUDACheckpointExecutor, Executor)`` an error that names the right class.

    vLLM asks that of what it is given, and says only that it is no ``Executor``. Python puts the same question to the
    subclasses of ``Executor`` before it answers no, so one that knows the answer may give it.
    """
    from vllm.v1.executor.abstract import Executor

    class Explains(ABCMeta):
        def __subclasscheck__(cls, subclass: type) -> bool:
            if (subclass.__module__, subclass.__qualname__) == _OWN:
                raise TypeError(
                    "checkpoint_executor.CUDACheckpointExecutor is the executor that needs no engine: it starts "
                    "workers of your own class. For vLLM pass distributed_executor_backend="
                    '"checkpoint_executor.vllm.CUDACheckpointExecutor" (or that class)'
                )
            return super().__subclasscheck__(subclass)

    base: Any = Executor
    _kept.append(Explains("NotAnExecutor", (base,), {"__doc__": "Never built; it only answers issubclass()."}))


#: Python asks only subclasses that are alive.
_kept: list[type] = []

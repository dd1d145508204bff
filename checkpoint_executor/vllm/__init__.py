"""The front door for vLLM: what ``distributed_executor_backend`` takes.

::

    LLM(..., enable_sleep_mode=True,
        distributed_executor_backend="checkpoint_executor.vllm.CUDACheckpointExecutor")

Importing this package imports neither vLLM nor torch: both wait until the executor is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoint_executor.vllm.executor import CUDACheckpointExecutor

__all__ = ["CUDACheckpointExecutor"]


def __getattr__(name: str) -> Any:
    if name == "CUDACheckpointExecutor":
        from checkpoint_executor.vllm.executor import CUDACheckpointExecutor

        return CUDACheckpointExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Graph-preserving sleep for GPU inference engines.

Importing this package imports neither torch nor CUDA nor zmq: the executor is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkpoint_executor.errors import (
    AsleepError,
    BusyError,
    CheckpointExecutorError,
    ConfigError,
    DeadlineError,
    FatalError,
    ForkedError,
    InsufficientMemoryError,
    InvalidRequestError,
    ProcessDiedError,
    RefusedError,
    ResultTypeError,
    RpcTimeoutError,
    StartError,
    WireError,
    WorkerMethodError,
)
from checkpoint_executor.report import CycleReport, StageReport

if TYPE_CHECKING:
    from checkpoint_executor.executor import CUDACheckpointExecutor

__version__ = "0.1.0"

__all__ = [
    "AsleepError",
    "BusyError",
    "CUDACheckpointExecutor",
    "CheckpointExecutorError",
    "ConfigError",
    "CycleReport",
    "DeadlineError",
    "FatalError",
    "ForkedError",
    "InsufficientMemoryError",
    "InvalidRequestError",
    "ProcessDiedError",
    "RefusedError",
    "ResultTypeError",
    "RpcTimeoutError",
    "StageReport",
    "StartError",
    "WireError",
    "WorkerMethodError",
]


def __getattr__(name: str) -> Any:
    if name == "CUDACheckpointExecutor":
        from checkpoint_executor.executor import CUDACheckpointExecutor

        return CUDACheckpointExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

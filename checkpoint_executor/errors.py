"""PURE. Every exception a caller can meet, and nothing else.

The type says whether the executor survived:

- :class:`RefusedError`: the request was not carried out and the executor is unharmed.
- :class:`WorkerMethodError`, :class:`RpcTimeoutError`: the caller's own code failed or is late; the
  executor is unharmed.
- :class:`FatalError`: the workers and the helper were killed. Nothing is retried; build a new executor.

Facts are attributes, never only text, and every error pickles. A timeout *is* a ``TimeoutError``.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AsleepError",
    "BusyError",
    "CheckpointExecutorError",
    "ConfigError",
    "DeadlineError",
    "FatalError",
    "ForkedError",
    "InsufficientMemoryError",
    "InvalidRequestError",
    "ProcessDiedError",
    "RefusedError",
    "ResultTypeError",
    "RpcTimeoutError",
    "StartError",
    "WireError",
    "WorkerMethodError",
]


def _rebuild(cls: type[CheckpointExecutorError], message: str, facts: dict[str, Any]) -> CheckpointExecutorError:
    return cls(message, **facts)


class CheckpointExecutorError(Exception):
    """Base of every error of this package; not raised itself.

    Args:
        message: what went wrong, what to do, and whether the executor is unharmed.
        facts: the same as data; each becomes an attribute. Facts that were not given read as None.

    Attributes:
        rank: rank concerned. pid: process concerned. role: ``"worker"`` or ``"helper"``.
        stage: stage of the cycle. code, code_name: the driver's. state_before, state_after: the
        driver's process states. deadline_s, elapsed_s: seconds. story: the last events before a
        fatal error, oldest first. survivors: pids that SIGKILL did not end in time.
    """

    #: Whether the executor serves on after this error.
    executor_alive: ClassVar[bool] = True

    rank: int | None = None
    pid: int | None = None
    role: str | None = None
    stage: str | None = None
    code: int | None = None
    code_name: str | None = None
    state_before: str | None = None
    state_after: str | None = None
    deadline_s: float | None = None
    elapsed_s: float | None = None
    story: tuple[str, ...] = ()
    survivors: tuple[int, ...] = ()

    def __init__(self, message: str, **facts: Any) -> None:
        if type(self) is CheckpointExecutorError:
            raise TypeError("CheckpointExecutorError is abstract: raise a RefusedError or a FatalError")
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))


class RefusedError(CheckpointExecutorError):
    """The request was not carried out. The executor is unharmed and serves on."""


class InvalidRequestError(RefusedError, ValueError):
    """The request can never be right (an unknown tag, level 2). Nothing was touched."""


class ConfigError(RefusedError, ValueError):
    """The configuration or the environment cannot work. Lists every problem at once; nothing was started.

    Attributes:
        problems: one sentence each.
    """

    problems: tuple[str, ...] = ()


class BusyError(RefusedError):
    """Another call is in progress. Control calls are serialised: wait for it, then call again."""


class AsleepError(RefusedError):
    """The call needs memory that is asleep, or an executor that is not paused. Wake it first."""


class InsufficientMemoryError(RefusedError):
    """There is no room to restore. Nothing was touched, the executor is still checkpointed: free memory and retry.

    Attributes:
        missing_bytes: by device, what is missing. holders: by device, (pid, bytes) of who holds memory there.
    """

    missing_bytes: dict[str, int] | None = None
    holders: dict[str, tuple[tuple[int, int], ...]] | None = None


class ForkedError(RefusedError):
    """The executor belongs to the process that built it; this is a forked child of that process."""


class WorkerMethodError(CheckpointExecutorError):
    """A worker's method raised. The executor is unharmed; whether the worker's own state is, its author knows.

    Attributes:
        error_type: qualified name of the exception's type. traceback_text: the worker's traceback.
    """

    error_type: str | None = None
    traceback_text: str | None = None


class ResultTypeError(WorkerMethodError, TypeError):
    """A worker's method returned something that cannot travel. The message names the type and where it sits."""


class RpcTimeoutError(CheckpointExecutorError, TimeoutError):
    """``collective_rpc`` did not finish within the caller's timeout.

    The method may still be running in the workers: the executor is unharmed, and refuses further calls
    until every rank has answered the old one.
    """


class WireError(RefusedError):
    """A message is malformed, too large, or of another version. It was dropped without being acted on."""


class FatalError(CheckpointExecutorError):
    """The workers and the helper were killed rather than serve with a partial set. Build a new executor.

    Every later call raises an error of the same type with the first cause.
    """

    executor_alive = False


class DeadlineError(FatalError, TimeoutError):
    """A stage did not finish within its deadline. That says nothing about whether it completed."""


class ProcessDiedError(FatalError):
    """A worker or the helper died.

    Attributes:
        exit_status: exit code, negative for the number of the signal that ended it; None if not known.
    """

    exit_status: int | None = None


class StartError(FatalError):
    """The executor could not start; what had been started was killed."""

"""I/O. What happens between the loss of an engine and its next start: end it, wait until the GPUs are free, report.

This file knows what an incident is, when a restart is due, and device memory as a number read from outside. It does
not know how an engine is watched or built: that is ``supervise``.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from checkpoint_executor.errors import CheckpointExecutorError, ConfigError, FatalError
from checkpoint_executor.process_tree import ProcessTree

__all__ = [
    "Cause",
    "EngineRestarted",
    "Incident",
    "Keeper",
    "RestartPolicy",
    "RestartsExhaustedError",
    "UsedBytes",
    "append_incident",
    "begin",
    "default_used_bytes",
    "nvml_handle",
    "nvml_used_bytes",
    "print_incident",
    "restarted",
    "soft_used_bytes",
    "visible_devices",
    "wait_free",
    "within",
]

T = TypeVar("T")

#: Bytes in use, by device, as seen from outside every process. May block; it is never waited for without a bound.
UsedBytes = Callable[[], Mapping[str, int]]

_READING_TIMEOUT_S = 10.0


# ------------------------------------------------------------------------------------------------
# What is reported, and what is raised
# ------------------------------------------------------------------------------------------------


class Cause(StrEnum):
    """Why an engine was given up."""

    EXITED = "exited"  #: it ended by itself, or was killed by someone else
    FATAL = "fatal"  #: it said that it failed for good (FatalError)
    START = "start"  #: it did not come up
    TIMEOUT = "timeout"  #: a call did not return in time, or its connection broke: outcome unknown
    UNHEALTHY = "unhealthy"  #: no healthy answer for too long
    ASKED = "asked"  #: the caller asked for a new one


class Incident(Struct, frozen=True, kw_only=True):
    """One engine that was lost, as data; :meth:`line` is its JSON line.

    Attributes:
        what: name of the engine. when: time of the verdict, ISO 8601, UTC.
        cause, detail: why. exit_status: of the engine's own process, negative for a signal; None if it had not ended.
        uptime_s: from its start to the verdict.
        pids: the processes that made up the tree. survivors: those that SIGKILL did not end in time.
        dead_s: from the verdict until the last of them was gone; None if some survived.
        free_s: from the verdict until its device memory was free; None if it was not within the bound, or could not
            be read.
        left_bytes: by device, what was then still in use beyond the reading before the first start; None if it could
            not be read.
        restart: number of the restart that follows, from 1; None if there is none, because the limit is reached or it
            was stopped meanwhile.
        backoff_s: pause before it.
    """

    what: str
    when: str
    cause: Cause
    detail: str
    exit_status: int | None
    uptime_s: float
    pids: tuple[int, ...]
    survivors: tuple[int, ...]
    dead_s: float | None
    free_s: float | None
    left_bytes: dict[str, int] | None
    restart: int | None
    backoff_s: float | None

    def line(self) -> str:
        """The incident as one line of JSON, without a newline."""
        return msgspec.json.encode(self).decode()


class EngineRestarted(CheckpointExecutorError):  # noqa: N818 - it says that an engine serves again
    """The engine was lost during this call and a new one serves. What the old one held is gone.

    Whether the call had any effect is not known and does not matter any more: redo the work from your own state.

    Attributes:
        incident: the loss that interrupted the call.
    """

    incident: Incident


class RestartsExhaustedError(FatalError):
    """The engine was lost once too often; nothing was started again, and nothing is left running.

    Attributes:
        incident: the last loss.
    """

    incident: Incident


def print_incident(incident: Incident) -> None:
    """Report an incident as one JSON line on stderr."""
    print(incident.line(), file=sys.stderr, flush=True)  # noqa: T201


def append_incident(path: Path | str) -> Callable[[Incident], None]:
    """A report that appends one JSON line to a file; several supervisors may share it."""

    def append(incident: Incident) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, incident.line().encode() + b"\n")
        finally:
            os.close(descriptor)

    return append


class RestartPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often an engine is restarted, and how long each step may take.

    Attributes:
        max_restarts, window_s: no more than so many restarts within so many seconds.
        backoff_s, backoff_factor, backoff_max_s: the pause before a restart, for the first within the window, how
            it grows with each further one, and its bound.
        start_s: an engine that has not come up by then is given up.
        dead_s: how long SIGKILL may take. free_s: how long device memory may take to become free after that; the
            restart then goes ahead all the same, and the incident says how much was left: another user of the GPU
            may have taken it meanwhile.
        free_slack_bytes: how much above the first reading still counts as free, on each device.
    """

    max_restarts: int = 5
    window_s: float = 3600.0
    backoff_s: float = 1.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 60.0
    start_s: float = 900.0
    dead_s: float = 10.0
    free_s: float = 60.0
    free_slack_bytes: int = 32 << 20

    def next_delay_s(self, restarts_at: Sequence[float], now: float) -> float | None:
        """Pause before the next restart; None if the limit is reached. Times are of one clock, seconds."""
        recent = sum(now - at < self.window_s for at in restarts_at)
        if recent >= self.max_restarts:
            return None
        # The bound holds for the exponent too: a float overflows at 2**1024.
        return min(self.backoff_s * self.backoff_factor ** min(recent, 64), self.backoff_max_s)


# ------------------------------------------------------------------------------------------------
# Bounds from outside
# ------------------------------------------------------------------------------------------------


def begin(function: Callable[[], T]) -> Future[T]:
    """Call it in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)

    threading.Thread(target=run, name="supervise-call", daemon=True).start()
    return future


def within(function: Callable[[], T], timeout_s: float | None) -> T:
    """Call it, and wait no longer than that, whatever it waits for itself. Raises TimeoutError.

    Timeouts of sockets are for each operation and not for the whole: a server that sends a byte now and then beats
    them. The thread of a call that is late ends when the engine it waits for is killed.
    """
    return begin(function).result(timeout_s)


# ------------------------------------------------------------------------------------------------
# Device memory
# ------------------------------------------------------------------------------------------------


def visible_devices() -> list[str]:
    """The entries of ``CUDA_VISIBLE_DEVICES``; none where it chooses nothing."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def nvml_handle(nvml: Any, name: str) -> Any:
    """A device by its index or UUID. ``nvml`` is ``pynvml``, initialised. Raises NVMLError."""
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def nvml_used_bytes(devices: Sequence[str] | None = None) -> UsedBytes:
    """A reading of GPUs through NVML, by UUID. Makes no context.

    Args:
        devices: indices or UUIDs. None: those of ``CUDA_VISIBLE_DEVICES``, or all.

    Raises:
        ConfigError: NVML is missing or does not know a device.
    """
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise ConfigError(
            "nvidia-ml-py is not installed (pip install checkpoint-executor[cuda]). Nothing was started"
        ) from error
    if devices is None:
        visible = visible_devices()
        devices = visible if all(name.isdigit() or name.startswith("GPU-") for name in visible) else []
    try:
        # Initialised once and never shut down: a second owner of NVML in this process may be using it.
        pynvml.nvmlInit()
        names = devices or [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
        handles = [nvml_handle(pynvml, name) for name in names]
        by_uuid = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    except pynvml.NVMLError as error:
        raise ConfigError(f"NVML: {error} (devices {devices or 'all'}). Nothing was started") from error
    # Version 2 counts the driver's own reserve (some 600 MiB on H200) apart, as nvidia-smi does; version 1 as used.
    version = pynvml.nvmlMemory_v2
    return lambda: {uuid: int(pynvml.nvmlDeviceGetMemoryInfo(handle, version).used) for uuid, handle in by_uuid.items()}


def soft_used_bytes(root: Path | str | None = None) -> UsedBytes:
    """A reading of the software devices below ``root`` (by default the user's), from their ledgers."""
    from checkpoint_executor import softgpu

    folder = Path(root) if root is not None else softgpu.default_root()

    def read() -> dict[str, int]:
        names = sorted(path.parent.name for path in folder.glob("*/ledger.json"))
        return {name: softgpu.SoftGpu(folder, name).used_bytes() for name in names}

    return read


def default_used_bytes() -> UsedBytes:
    """NVML where there is an NVIDIA GPU, otherwise the user's software devices."""
    return nvml_used_bytes() if any(Path("/dev").glob("nvidia[0-9]*")) else soft_used_bytes()


def _never() -> bool:
    return False


def wait_free(
    used_bytes: UsedBytes,
    baseline: Mapping[str, int],
    *,
    slack_bytes: int,
    timeout_s: float,
    stopping: Callable[[], bool] = _never,
) -> tuple[float | None, dict[str, int] | None]:
    """Wait until no device has more in use than in ``baseline`` (a device that is not in it: nothing) and the slack.

    Device memory becomes free a little after the last process is gone, and with a wedged driver not at all. Ends as
    well once ``stopping`` says so.

    Returns:
        Seconds it took, or None if it did not happen in time or could not be read; and what was left by device at
        the last reading, only what is above the baseline, or None if there was no reading.
    """
    begun = time.monotonic()
    left: dict[str, int] | None = None
    pause_s = 0.01
    while True:
        remaining_s = begun + timeout_s - time.monotonic()
        try:
            used = within(used_bytes, max(0.1, min(remaining_s, _READING_TIMEOUT_S)))
        except Exception:  # noqa: BLE001 - the driver may be what failed: an engine is not given up for a reading
            pass
        else:
            above = {device: size - baseline.get(device, 0) for device, size in used.items()}
            left = {device: size for device, size in above.items() if size > 0}
            if all(size <= slack_bytes for size in left.values()):
                return time.monotonic() - begun, left
        if time.monotonic() - begun >= timeout_s or stopping():
            return None, left
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


# ------------------------------------------------------------------------------------------------
# Losing an engine
# ------------------------------------------------------------------------------------------------


class Keeper:
    """What both supervisors do when an engine is lost, and what they remember of it."""

    def __init__(
        self, name: str, policy: RestartPolicy, used_bytes: UsedBytes | None, report: Callable[[Incident], None]
    ) -> None:
        self.name = name
        self.policy = policy
        self.restarts = 0
        self.incidents: list[Incident] = []
        self._used_bytes = used_bytes or default_used_bytes()
        self._report = report
        self._restarts_at: list[float] = []
        try:
            self.baseline = dict(within(self._used_bytes, _READING_TIMEOUT_S))
        except Exception as error:
            raise ConfigError(
                f"device memory cannot be read: {type(error).__name__}: {error}. Nothing was started"
            ) from error

    def lost(
        self,
        tree: ProcessTree,
        cause: Cause,
        detail: str,
        started_at: float,
        stopping: Callable[[], bool] = _never,
    ) -> Incident:
        """End all of it, wait until the devices are free, and report.

        Once ``stopping`` says that no engine is wanted any more, nothing is waited for and no restart is promised.

        Raises:
            RestartsExhaustedError: it must not be started again.
        """
        verdict, when = time.monotonic(), datetime.now(UTC)
        before = tree.pids()
        ended = tree.kill(self.policy.dead_s)
        dead_s = time.monotonic() - verdict
        free_s, left = wait_free(
            self._used_bytes,
            self.baseline,
            slack_bytes=self.policy.free_slack_bytes,
            timeout_s=self.policy.free_s,
            stopping=stopping,
        )
        now = time.monotonic()
        stopped = stopping()
        delay_s = None if stopped else self.policy.next_delay_s(self._restarts_at, now)
        if delay_s is not None:
            self.restarts += 1
            self._restarts_at = [at for at in self._restarts_at if now - at < self.policy.window_s] + [now]
        incident = Incident(
            what=self.name,
            when=when.isoformat(timespec="milliseconds"),
            cause=cause,
            detail=detail,
            exit_status=tree.exit_status if cause is Cause.EXITED else None,
            uptime_s=round(verdict - started_at, 3),
            pids=tuple(sorted({*before, *ended.pids})),
            survivors=ended.survivors,
            dead_s=None if ended.survivors else round(dead_s, 3),
            free_s=None if free_s is None else round(dead_s + free_s, 3),
            left_bytes=left,
            restart=None if delay_s is None else self.restarts,
            backoff_s=delay_s,
        )
        self.incidents.append(incident)
        try:
            self._report(incident)
        except Exception as error:  # noqa: BLE001 - a full disk must not keep the engine down
            print(f"checkpoint-executor: the report failed ({error}): {incident.line()}", file=sys.stderr)  # noqa: T201
        if delay_s is None and not stopped:
            raise RestartsExhaustedError(
                f"{self.name} was lost ({cause}: {detail}) and is not started again: the limit is "
                f"{self.policy.max_restarts} restart(s) within {self.policy.window_s:g} s",
                incident=incident,
            )
        return incident


def restarted(incident: Incident) -> EngineRestarted:
    """The exception that tells a caller of it."""
    return EngineRestarted(
        f"{incident.what} was lost ({incident.cause}: {incident.detail}) and a new one serves (restart "
        f"{incident.restart}). Redo the work from your own state",
        incident=incident,
    )

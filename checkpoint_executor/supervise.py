"""I/O. Bringing an engine back: watch it, kill all of it, wait until the GPUs are free, start it again, and say so.

This file knows processes, device memory as a number, and when a restart is due. It must not know stages, ranks or
tags, and imports neither the executor nor torch, CUDA or zmq: it stands outside the engine, so that it works when the
engine does not, and for engines that are not ours (``vllm serve``).

The rule behind all of it: a timeout does not establish whether an operation completed. An engine whose last control
call has no known outcome is never asked again; it is killed as a whole and started anew, and the caller redoes its
work from its own state (:class:`EngineRestarted`).

- :class:`SupervisedCommand` runs a command; :class:`ControlClient` is for its HTTP control calls.
- :class:`Supervised` builds an engine with a factory in a process of its own, and runs functions there.
- :class:`ProcessTree` is what both stand on: a command that can be ended with everything below it.

**Why nothing escapes.** Engines leave orphans: an API server that dies leaves its engine core behind, with workers
that hold the GPU. Process groups and sessions do not hold them (each worker may have its own). So:

1. Between us and the command stands a *warden*, a small process that is a child subreaper: whoever below it loses
   its parent, by a crash or by a double fork, becomes the warden's child and nobody else's. "No child left" is then
   the kernel's own word for "no descendant left".
2. The warden holds a pidfd of us. When we die, by SIGKILL too, it kills everything and ends.
3. The command dies with the warden (``PR_SET_PDEATHSIG``). What was orphaned by *that* is found by a marker in its
   environment, which children inherit whatever they do to their session.

What escapes: a process that the tree asked someone else to start (a container, a systemd unit), and one that cleared
its environment before the warden was killed. The command must stay in the foreground: when it ends, all of it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from datetime import UTC, datetime
from enum import StrEnum
from http.client import HTTPException
from multiprocessing.connection import Connection
from pathlib import Path
from select import POLLIN, poll
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from checkpoint_executor import errors, payload, processes, procfs
from checkpoint_executor.errors import (
    CheckpointExecutorError,
    ConfigError,
    FatalError,
    ForkedError,
    InvalidRequestError,
    RefusedError,
    ResultTypeError,
)
from checkpoint_executor.report import CycleReport
from checkpoint_executor.wire import Frame

__all__ = [
    "Cause",
    "ControlCallError",
    "ControlClient",
    "EngineCallError",
    "EngineRestarted",
    "Incident",
    "OutcomeUnknownError",
    "ProcessTree",
    "RestartPolicy",
    "RestartsExhaustedError",
    "Supervised",
    "SupervisedCommand",
    "append_incident",
    "default_used_bytes",
    "nvml_used_bytes",
    "print_incident",
    "soft_used_bytes",
    "wait_free",
]

T = TypeVar("T")
E = TypeVar("E")

#: Bytes in use, by device, as seen from outside every process. May block; it is never waited for without a bound.
UsedBytes = Callable[[], Mapping[str, int]]

#: In the environment of everything below a warden: the tokens of the trees it is in, joined by colons.
MARKER = "CHECKPOINT_EXECUTOR_SUPERVISED"

#: A control call through HTTP: above the sum of what a sleep may take inside (worker 120 s, hooks 120 s, lock and
#: checkpoint 30 s each), so that the engine's own verdict comes first where it can still give one.
CONTROL_TIMEOUT_S = 360.0

_READING_TIMEOUT_S = 10.0
_WARDEN_START_S = 60.0
_ROUND_S = 0.005
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: Exceptions of other engines that mean what our FatalError means.
_FATAL_NAMES = frozenset({"EngineDeadError"})


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
        restart: number of the restart that follows, from 1; None if there is none, because the limit is reached.
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


class EngineCallError(CheckpointExecutorError):
    """The caller's own function raised in the engine's process. The engine is unharmed.

    Attributes:
        error_type: qualified name of the exception's type. traceback_text: its traceback there.
    """

    error_type: str | None = None
    traceback_text: str | None = None


class ControlCallError(CheckpointExecutorError):
    """A control call was answered with an error, or could not be sent. The engine was not restarted.

    Attributes:
        status: of the HTTP answer; None if nothing was sent. body: the answer, cut.
    """

    status: int | None = None
    body: str = ""


class OutcomeUnknownError(FatalError, TimeoutError):
    """A control call has no known outcome, and no supervisor that could restart the engine. Kill the engine.

    Every later call of the same client raises it again: such an engine is never asked twice.
    """


class _Lost(Exception):  # noqa: N818 - internal: why the engine must be given up
    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


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
            restart then goes ahead, and the incident says how much was left.
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


def _begin(function: Callable[[], T]) -> Future[T]:
    """Call it in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)

    threading.Thread(target=run, name="supervise-call", daemon=True).start()
    return future


def _within(function: Callable[[], T], timeout_s: float) -> T:
    """Call it, and wait no longer than that, whatever it waits for itself. Raises TimeoutError.

    Timeouts of sockets are for each operation and not for the whole: a server that sends a byte now and then beats
    them. The thread of a call that is late ends when the engine it waits for is killed.
    """
    return _begin(function).result(timeout_s)


# ------------------------------------------------------------------------------------------------
# Device memory
# ------------------------------------------------------------------------------------------------


def nvml_used_bytes(devices: Sequence[str] | None = None) -> UsedBytes:
    """A reading of GPUs through NVML, by UUID. Makes no context.

    Args:
        devices: indices or UUIDs. None: those of ``CUDA_VISIBLE_DEVICES``, or all.

    Raises:
        ConfigError: NVML is missing or does not know a device.
    """
    try:
        import pynvml
    except ImportError as error:
        raise ConfigError(
            "nvidia-ml-py is not installed (pip install checkpoint-executor[cuda]). Nothing was started"
        ) from error
    if devices is None:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        devices = visible if all(name.isdigit() or name.startswith("GPU-") for name in visible) else []
    try:
        # Initialised once and never shut down: a second owner of NVML in this process may be using it.
        pynvml.nvmlInit()
        names = devices or [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]
        by_uuid = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    except pynvml.NVMLError as error:
        raise ConfigError(f"NVML: {error} (devices {devices or 'all'}). Nothing was started") from error
    return lambda: {uuid: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for uuid, handle in by_uuid.items()}


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


def wait_free(
    used_bytes: UsedBytes, baseline: Mapping[str, int], *, slack_bytes: int, timeout_s: float
) -> tuple[float | None, dict[str, int] | None]:
    """Wait until no device has more in use than in ``baseline`` (a device that is not in it: nothing) and the slack.

    Device memory becomes free a little after the last process is gone, and with a wedged driver not at all.

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
            used = _within(used_bytes, max(0.1, min(remaining_s, _READING_TIMEOUT_S)))
        except Exception:  # noqa: BLE001 - the driver may be what failed: an engine is not given up for a reading
            pass
        else:
            above = {device: size - baseline.get(device, 0) for device, size in used.items()}
            left = {device: size for device, size in above.items() if size > 0}
            if all(size <= slack_bytes for size in left.values()):
                return time.monotonic() - begun, left
        if time.monotonic() - begun >= timeout_s:
            return None, left
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


# ------------------------------------------------------------------------------------------------
# A tree of processes
# ------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    parent: int
    started: int
    alive: bool


def _scan() -> dict[int, _Seen]:
    """Every process that ``/proc`` shows."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # From the state (field 3) on: a command's name may hold spaces and brackets.
            fields = text[text.rindex(b")") + 2 :].split()
            # A process whose first thread has ended looks like a zombie while its other threads run (field 20).
            alive = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
            found[int(name)] = _Seen(int(fields[1]), int(fields[19]), alive)
    return found


def _is_marked(pid: int, token: bytes) -> bool:
    try:
        return token in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # gone, or not ours


def _members(root: int, root_started: int, token: str) -> dict[int, int]:
    """Start times, by pid, of what lives below ``root`` or carries the token; neither ``root`` nor this process."""
    seen = _scan()
    children: dict[int, list[int]] = {}
    for pid, process in seen.items():
        children.setdefault(process.parent, []).append(pid)
    below: set[int] = set()
    # Its pid may belong to a stranger by now.
    waiting = [root] if root in seen and seen[root].started == root_started else []
    while waiting:
        added = children.get(waiting.pop(), [])
        below.update(added)
        waiting.extend(added)
    mark = token.encode()
    below.update(pid for pid in seen if pid not in below and _is_marked(pid, mark))
    return {pid: seen[pid].started for pid in below - {root, os.getpid()} if seen[pid].alive}


def _signal(pid: int, started: int, number: int) -> None:
    """Send a signal to exactly this process, if it is there and ours."""
    try:
        descriptor = procfs.open_pidfd(pid, started)
    except OSError:
        return
    try:
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        pass  # gone meanwhile, or another user's: then it shows among the survivors
    finally:
        os.close(descriptor)


def _kill_members(root: int, root_started: int, token: str, until: float) -> tuple[set[int], tuple[int, ...]]:
    """SIGKILL in rounds, because what is killed may have forked meanwhile. Returns pids killed, and survivors."""
    killed: set[int] = set()
    while members := _members(root, root_started, token):
        for pid, started in members.items():
            _signal(pid, started, signal.SIGKILL)
        killed.update(members)
        if time.monotonic() >= until:
            return killed, tuple(sorted(members))
        time.sleep(_ROUND_S)
    return killed, ()


class Ended(Struct, frozen=True):
    """How a tree ended: its pids, those that SIGKILL did not end in time, and how long it took."""

    pids: tuple[int, ...]
    survivors: tuple[int, ...]
    elapsed_s: float


class ProcessTree:
    """A command in a session of its own, with a warden above it, that can be ended with everything below it.

    Args:
        command: what to run; its stdin is empty. environ, cwd: its environment and folder, by default ours.
        pass_fds: descriptors it inherits under the same numbers. stdout: a descriptor; None: ours.

    Raises:
        ConfigError: the command cannot be run. FatalError: the warden did not start.

    For one thread at a time, but for :meth:`pids`. Dropping the object ends the tree, as our own death does.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
    ) -> None:
        self.command = tuple(map(str, command))
        self._token = uuid.uuid4().hex
        self._ended: Ended | None = None
        self._exited = False
        self._exit_status: int | None = None
        given = dict(os.environ if environ is None else environ)
        given[MARKER] = ":".join(filter(None, [given.get(MARKER), self._token]))
        spec = {
            "command": self.command,
            "environ": given,
            "cwd": None if cwd is None else str(cwd),
            "pass_fds": list(pass_fds),
            "token": self._token,
            "supervisor": [os.getpid(), procfs.start_time(os.getpid())],
        }
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Through a file, since an environment may be larger than a socket's buffer or a command line.
        with theirs, os.fdopen(os.memfd_create("supervise-spec"), "w+b") as file:
            file.write(json.dumps(spec).encode())
            file.seek(0)
            self._warden = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, "warden", str(theirs.fileno())],
                stdin=file,
                stdout=stdout,
                env=processes.child_environment({**os.environ, MARKER: given[MARKER]}, {}),
                pass_fds=[theirs.fileno(), *pass_fds],
                start_new_session=True,
            )
        self._warden_started = procfs.start_time(self._warden.pid)
        self.pid = 0
        hello = self._receive(_WARDEN_START_S)
        if hello is None or "pid" not in hello:
            self.kill()
            if hello is not None and "error" in hello:
                raise ConfigError(f"cannot run {self.command[0]!r}: {hello['error']}. Nothing was started")
            raise FatalError(f"the warden of {self.command[0]!r} did not start. Nothing of it is left running")
        self.pid = int(hello["pid"])

    def fileno(self) -> int:
        """Readable when the command has ended."""
        return self._channel.fileno()

    @property
    def warden_pid(self) -> int:
        return self._warden.pid

    @property
    def exit_status(self) -> int | None:
        """Of the command, negative for a signal; None if it runs, or if nobody knows."""
        return self._exit_status

    def wait(self, timeout_s: float) -> bool:
        """Wait until the command has ended (or its warden, which comes to the same). True if so."""
        until = time.monotonic() + timeout_s
        while not self._exited:
            message = self._receive(until - time.monotonic())
            if message is None:
                return False
            if "exited" in message:
                self._exit_status = message["exited"]
            self._exited = "exited" in message or not message
        return True

    def pids(self) -> tuple[int, ...]:
        """What lives of it now, without the warden."""
        return tuple(sorted(_members(self._warden.pid, self._warden_started, self._token)))

    def signal(self, number: int) -> None:
        """Send the command itself a signal."""
        self._tell({"signal": int(number)})

    def stop(self, grace_s: float) -> Ended:
        """SIGTERM to the command, some time for it to end by itself, then :meth:`kill`."""
        self.signal(signal.SIGTERM)
        self.wait(grace_s)
        return self.kill()

    def kill(self, timeout_s: float = 10.0) -> Ended:
        """SIGKILL everything and wait until it is gone. The second time it only says again how it went."""
        if self._ended is not None:
            return self._ended
        begun = time.monotonic()
        until = begun + timeout_s
        known = {self.pid} - {0}
        # From here rather than in the warden, which may be stopped or dead.
        killed, survivors = _kill_members(self._warden.pid, self._warden_started, self._token, until)
        # A responsive warden ends once the kernel has no child for it: nothing can have slipped through a scan.
        self.wait(0)
        self._tell({"finish": True})
        try:
            self._warden.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()
        if not survivors:
            again, survivors = _kill_members(0, 0, self._token, max(until, time.monotonic() + 1))
            killed |= again
        self.wait(0)
        self._channel.close()
        self._ended = Ended(tuple(sorted(known | killed)), survivors, time.monotonic() - begun)
        return self._ended

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it is gone or stuck: kill() does not depend on it

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The warden's next message, ``{}`` once it is gone, None if there is none in time."""
        if self._channel.fileno() < 0:
            return {}
        poller = poll()
        poller.register(self._channel, POLLIN)
        if not poller.poll(max(0.0, timeout_s) * 1000):
            return None
        try:
            data = self._channel.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError:
            return {}
        message: dict[str, Any] = json.loads(data) if data else {}
        return message


class _Warden:
    """The process between us and a command: adopts orphans, reaps them, and ends everything when we are gone."""

    def __init__(self, channel: socket.socket, spec: dict[str, Any]) -> None:
        self._channel = channel
        self._spec = spec
        self._command = 0
        self._command_started = 0
        self._status: int | None = None

    def run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            supervisor = procfs.open_pidfd(*self._spec["supervisor"])
        except ProcessLookupError:
            return
        try:
            self._start(libc)
        except (OSError, ValueError) as error:
            self._say({"error": str(error)})
            return
        self._say({"pid": self._command})
        poller = poll()
        poller.register(supervisor, POLLIN)
        poller.register(self._channel, POLLIN)
        poller.register(os.pidfd_open(self._command), POLLIN)
        while True:
            # Orphans that end are reaped within the second; nobody waits for them.
            ready = {descriptor for descriptor, _ in poller.poll(1000)}
            self._reap()
            if self._status is not None:
                self._say({"exited": self._status})
                break
            if supervisor in ready or (self._channel.fileno() in ready and not self._obey()):
                break
        self._end()

    def _start(self, libc: ctypes.CDLL) -> None:
        warden = os.getpid()

        def die_with_warden() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != warden:
                os._exit(1)

        pass_fds = self._spec["pass_fds"]
        popen = subprocess.Popen(
            self._spec["command"],
            env=self._spec["environ"],
            cwd=self._spec["cwd"],
            stdin=subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=die_with_warden,  # noqa: PLW1509 - this process has one thread
        )
        popen.returncode = 0  # it is reaped by _reap, with all the others
        for descriptor in pass_fds:
            os.close(descriptor)
        self._command = popen.pid
        self._command_started = procfs.start_time(popen.pid)

    def _obey(self) -> bool:
        """Do what we are told. False if it is to end, or if nobody is left to tell us."""
        try:
            message = json.loads(self._channel.recv(1 << 16) or b"{}")
        except OSError:
            return False
        if "signal" in message:
            _signal(self._command, self._command_started, message["signal"])
            return True
        return False

    def _reap(self) -> bool:
        """Reap whoever has ended. False if there is no child left, so no descendant either."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._command:
                self._status = os.waitstatus_to_exitcode(status)

    def _end(self) -> None:
        # No bound: what SIGKILL cannot end now may end later, and the supervisor, if it lives, kills us in time.
        me, started = os.getpid(), procfs.start_time(os.getpid())
        while self._reap():
            for pid, begun in _members(me, started, self._spec["token"]).items():
                _signal(pid, begun, signal.SIGKILL)
            time.sleep(_ROUND_S)
        _kill_members(me, started, self._spec["token"], time.monotonic() + 1)

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the supervisor is gone, and its pidfd says so


# ------------------------------------------------------------------------------------------------
# Losing an engine
# ------------------------------------------------------------------------------------------------


class _Keeper:
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
            self._baseline = dict(_within(self._used_bytes, _READING_TIMEOUT_S))
        except Exception as error:
            raise ConfigError(
                f"device memory cannot be read: {type(error).__name__}: {error}. Nothing was started"
            ) from error

    def lost(self, tree: ProcessTree, cause: Cause, detail: str, started_at: float) -> Incident:
        """End all of it, wait until the devices are free, and report.

        Raises:
            RestartsExhaustedError: it must not be started again.
        """
        verdict, when = time.monotonic(), datetime.now(UTC)
        before = tree.pids()
        ended = tree.kill(self.policy.dead_s)
        dead_s = time.monotonic() - verdict
        free_s, left = wait_free(
            self._used_bytes,
            self._baseline,
            slack_bytes=self.policy.free_slack_bytes,
            timeout_s=self.policy.free_s,
        )
        now = time.monotonic()
        delay_s = self.policy.next_delay_s(self._restarts_at, now)
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
        if delay_s is None:
            raise RestartsExhaustedError(
                f"{self.name} was lost {len(self._restarts_at) + 1} times within {self.policy.window_s:g} s and is not "
                f"started again. Last: {cause}: {detail}",
                incident=incident,
            )
        return incident


def _restarted(incident: Incident) -> EngineRestarted:
    return EngineRestarted(
        f"{incident.what} was lost ({incident.cause}: {incident.detail}) and a new one serves (restart "
        f"{incident.restart}). Redo the work from your own state",
        incident=incident,
    )


def _exit_text(status: int | None) -> str:
    if status is None:
        return "ended, nobody knows how"
    return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"


# ------------------------------------------------------------------------------------------------
# A factory
# ------------------------------------------------------------------------------------------------


class _Ask(Struct):
    kind: str
    frames: int


class _Reply(Struct):
    frames: int
    kind: str = "result"  # or "report", "error"
    error_type: str = ""
    message: str = ""
    traceback_text: str = ""
    fatal: bool = False


class Supervised(Generic[E]):
    """An engine that a factory builds, in a process of its own, and that is built anew whenever it is lost.

    Args:
        factory: builds the engine, e.g. ``lambda: CUDACheckpointExecutor(...)``. It and the functions given to
            :meth:`call` are pickled (``cloudpickle``: lambdas and what a script defines are fine).
        name: for reports. policy: see :class:`RestartPolicy`. used_bytes: reads device memory; by default NVML, or
            the software devices. report: gets every incident. environ: of the engine's process, by default ours.

    Raises:
        RefusedError, EngineCallError: the factory raised, for a reason that a second try would not change.
        RestartsExhaustedError: the engine did not come up.

    The engine has a process of its own so that the timeout stands outside: whatever hangs there, a driver call that
    holds the GIL included, this process goes on and can kill it. A loss is noticed by the call that meets it. Calls
    are serialised. Use it as a context manager, or :meth:`close` it.
    """

    def __init__(
        self,
        factory: Callable[[], E],
        *,
        name: str = "engine",
        policy: RestartPolicy | None = None,
        used_bytes: UsedBytes | None = None,
        report: Callable[[Incident], None] = print_incident,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._keeper = _Keeper(name, policy or RestartPolicy(), used_bytes, report)
        self._environ = environ
        self._factory = [bytes(frame) for frame in payload.dump_call(factory)]
        self._lock = threading.RLock()
        self._owner_pid = os.getpid()
        self._generation = 0
        self._failure: CheckpointExecutorError | None = None
        # In a list, so that the finalizer can hold what is current without holding us.
        self._trees: list[ProcessTree] = []
        self._connection: Connection | None = None
        self._exchange: Future[Any] | None = None
        self._started_at = 0.0
        self._finalizer = weakref.finalize(self, _kill_trees, self._trees, self._owner_pid)
        with self._lock:
            self._start(first=True)

    def call(self, function: Callable[[E], T], timeout_s: float) -> T:
        """Run ``function(engine)`` in the engine's process.

        Args:
            function: returns what ``collective_rpc`` may return, or a :class:`CycleReport`.
            timeout_s: from outside, for all of it.

        Raises:
            EngineRestarted: the engine failed for good, died, or did not return in time; a new one serves.
            RestartsExhaustedError: so it did, and is not started again; every later call raises the same.
            CheckpointExecutorError: any other that the engine raised; it is unharmed.
            EngineCallError: the function raised something else.
        """
        frames = payload.dump_call(function)
        with self._lock:
            self._check()
            try:
                result: T = self._ask("call", frames, timeout_s)
                return result
            except _Lost as lost:
                incident = self._replace(lost)
        raise _restarted(incident)

    def restart(self, detail: str = "asked for") -> Incident:
        """Give the engine up and build a new one, whatever its state."""
        with self._lock:
            self._check()
            return self._replace(_Lost(Cause.ASKED, detail))

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._trees[-1].pid if self._trees else 0

    @property
    def generation(self) -> int:
        """1 for the first engine that served, and one more for each that followed."""
        return self._generation

    @property
    def restarts(self) -> int:
        return self._keeper.restarts

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(self._keeper.incidents)

    def close(self, grace_s: float = 10.0) -> None:
        """Shut the engine down, with some time to do so in good order, and end what is left. Idempotent."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if self._trees:
                try:
                    self._ask("exit", (), grace_s)
                except (_Lost, CheckpointExecutorError):
                    pass  # it is killed in a moment
            self._drop()
            self._failure = self._failure or InvalidRequestError(f"{self._keeper.name} was closed; build a new one")
            self._finalizer.detach()

    def __enter__(self) -> Supervised[E]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private ---------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ForkedError(f"this engine belongs to process {self._owner_pid}; a forked child cannot use it")
        if self._failure is not None:
            raise type(self._failure)(self._failure.message, **self._failure.facts)

    def _start(self, *, first: bool) -> None:
        """Start until it serves, or until it must not be tried again."""
        while True:
            self._launch()
            try:
                self._ask("build", self._factory, self._keeper.policy.start_s)
            except _Lost as lost:
                verdict = _Lost(Cause.START if lost.cause is Cause.FATAL else lost.cause, lost.detail)
            except CheckpointExecutorError as error:
                if first:
                    self._drop()
                    raise
                verdict = _Lost(Cause.START, error.message)
            except BaseException:
                self._drop()
                raise
            else:
                self._generation += 1
                return
            self._give_up(verdict)

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._started_at = time.monotonic()
            try:
                tree = ProcessTree(
                    [sys.executable, "-P", "-m", __name__, "host", str(theirs.fileno())],
                    environ=processes.child_environment(os.environ if self._environ is None else self._environ, {}),
                    pass_fds=[theirs.fileno()],
                    # A caller's stdout may be data, and NCCL prints there.
                    stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        self._trees.append(tree)
        self._connection = Connection(ours.detach())

    def _replace(self, lost: _Lost) -> Incident:
        incident = self._give_up(lost)
        self._start(first=False)
        return incident

    def _give_up(self, lost: _Lost) -> Incident:
        """Lose the engine, and wait for as long as the next start must."""
        tree = self._trees[-1]
        detail = lost.detail
        if lost.cause is Cause.EXITED:
            tree.wait(1.0)
            detail = f"the engine's process {_exit_text(tree.exit_status)}, {detail}"
        try:
            incident = self._keeper.lost(tree, lost.cause, detail, self._started_at)
        except RestartsExhaustedError as error:
            self._failure = error
            raise
        finally:
            self._drop()
        threading.Event().wait(incident.backoff_s)
        return incident

    def _drop(self) -> None:
        """End the tree, and what belongs to it here."""
        _kill_trees(self._trees, self._owner_pid)
        if self._connection is not None:
            # Its thread has seen the end by now. If not (a process that survives SIGKILL holds the other end), the
            # descriptor stays open: it must not become another file's under that thread.
            if self._exchange is None or not wait_futures([self._exchange], 5).not_done:
                self._connection.close()
            self._connection = self._exchange = None

    def _ask(self, kind: str, frames: Sequence[Frame], timeout_s: float) -> Any:
        """One question, one answer. Raises _Lost, or what the engine raised."""
        connection = self._connection
        if connection is None:
            raise _Lost(Cause.EXITED, "there is no engine")
        if self._exchange is not None and not self._exchange.done():
            raise _Lost(Cause.TIMEOUT, "an earlier call was interrupted and has not returned: its outcome is unknown")

        def talk() -> tuple[_Reply, list[bytes]]:
            connection.send_bytes(msgspec.json.encode(_Ask(kind, len(frames))))
            for frame in frames:
                connection.send_bytes(frame)
            reply = msgspec.json.decode(connection.recv_bytes(), type=_Reply)
            return reply, [connection.recv_bytes() for _ in range(reply.frames)]

        self._exchange = exchange = _begin(talk)
        try:
            reply, answer = exchange.result(timeout_s)
        except TimeoutError:
            raise _Lost(Cause.TIMEOUT, f"{kind} did not return within {timeout_s:g} s: its outcome is unknown") from None
        except (EOFError, OSError):
            raise _Lost(Cause.EXITED, f"during {kind}") from None
        if reply.kind == "error":
            raise _rebuild_error(reply, answer)
        if reply.kind == "report":
            return msgspec.json.decode(answer[0], type=CycleReport)
        return payload.decode_result(answer)


def _kill_trees(trees: list[ProcessTree], owner_pid: int) -> None:
    """End all of them; from close(), garbage collection or interpreter exit. Nothing in a forked child."""
    if os.getpid() == owner_pid:
        while trees:
            trees.pop().kill()


def _rebuild_error(reply: _Reply, facts: list[bytes]) -> Exception:
    if reply.fatal:
        return _Lost(Cause.FATAL, f"{reply.error_type}: {reply.message}")
    name = reply.error_type.rpartition(".")[2]
    if name in errors.__all__ and facts:
        error: Exception = getattr(errors, name)(reply.message, **payload.decode_result(facts))
        return error
    return EngineCallError(
        f"{reply.error_type}: {reply.message}. The engine is unharmed.\n\n{reply.traceback_text}",
        error_type=reply.error_type,
        traceback_text=reply.traceback_text,
    )


def _host(connection: Connection) -> None:
    """The engine's process: build it, then do what is asked, one thing after another."""
    engine: Any = None
    while True:
        try:
            ask = msgspec.json.decode(connection.recv_bytes(), type=_Ask)
            frames = [connection.recv_bytes() for _ in range(ask.frames)]
        except (EOFError, OSError):
            os._exit(1)  # our supervisor is gone; the warden ends whatever else there is
        answer: Sequence[Frame] = ()
        try:
            match ask.kind:
                case "build":
                    engine = payload.load_call(frames)()
                    result: Any = None
                case "call":
                    result = payload.load_call(frames)(engine)
                case _:
                    shutdown = getattr(engine, "shutdown", None)
                    result = shutdown() if callable(shutdown) else None
            kind = "report" if isinstance(result, CycleReport) else "result"
            answer = [msgspec.json.encode(result)] if kind == "report" else payload.encode_result(result)
            reply = _Reply(len(answer), kind)
        except Exception as error:  # noqa: BLE001 - the caller's code
            reply, answer = _describe_error(error)
        connection.send_bytes(msgspec.json.encode(reply))
        for frame in answer:
            connection.send_bytes(frame)


def _describe_error(error: Exception) -> tuple[_Reply, Sequence[Frame]]:
    if isinstance(error, payload.UnsupportedResultError):
        error = ResultTypeError(f"{error}. The engine is unharmed")
    kind = type(error)
    answer: Sequence[Frame] = ()
    if isinstance(error, CheckpointExecutorError) and kind.__name__ in errors.__all__:
        try:
            answer = payload.encode_result(error.facts)
        except payload.UnsupportedResultError:
            answer = payload.encode_result({name: str(value) for name, value in error.facts.items()})
    reply = _Reply(
        len(answer),
        "error",
        error_type=kind.__name__ if answer else f"{kind.__module__}.{kind.__qualname__}",
        message=str(error),
        traceback_text="".join(traceback.format_exception(error)),
        fatal=isinstance(error, FatalError) or any(base.__name__ in _FATAL_NAMES for base in kind.__mro__),
    )
    return reply, answer


# ------------------------------------------------------------------------------------------------
# A command
# ------------------------------------------------------------------------------------------------


class SupervisedCommand:
    """A command, such as ``vllm serve MODEL``, that is started again whenever it fails.

    Args:
        command: what to run, in the foreground. Status 0 means that it is done; anything else is a failure.
        health: a URL that answers 200, or a function that returns True, while the engine is well; None: only its end
            is a failure.
        health_timeout_s: an engine without a healthy answer for so long has failed.
        probe_interval_s: pause between two probes.
        name, policy, used_bytes, report: as for :class:`Supervised`. environ, cwd: of the command.

    :meth:`run` does it all in the calling thread. As a context manager it runs in a thread of its own.

    A health answer says that the server is there and not that its engine makes progress (vLLM's ``/health`` asks no
    worker): control calls need an external timeout of their own, see :class:`ControlClient`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        health: str | Callable[[], bool] | None = None,
        health_timeout_s: float = 60.0,
        probe_interval_s: float = 1.0,
        name: str | None = None,
        policy: RestartPolicy | None = None,
        used_bytes: UsedBytes | None = None,
        report: Callable[[Incident], None] = print_incident,
        environ: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> None:
        if not command:
            raise ConfigError("there is no command to run. Nothing was started")
        self._command = tuple(map(str, command))
        self._health = _url_probe(health) if isinstance(health, str) else health
        self._health_timeout_s = health_timeout_s
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = max(0.1, min(5.0, health_timeout_s / 2))
        self._environ = environ
        self._cwd = cwd
        self._keeper = _Keeper(name or self._command[0], policy or RestartPolicy(), used_bytes, report)
        self._changed = threading.Condition()
        self._done = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        # All below under the condition.
        self._tree: ProcessTree | None = None
        self._generation = 0
        self._started_at = 0.0
        self._ready = False
        self._healthy_at = 0.0
        self._failed_probes = 0
        self._verdict: _Lost | None = None
        self._stop_grace_s: float | None = None
        self._losses: dict[int, Incident] = {}
        self._error: BaseException | None = None

    # -- running ---------------------------------------------------------------------------------

    def run(self) -> int | None:
        """Run the command until it ends with status 0 or :meth:`stop` is called. Once.

        Returns:
            0, or None after a stop.

        Raises:
            RestartsExhaustedError: it failed too often. ConfigError: it cannot be run.
        """
        prober = threading.Thread(target=self._probe, name="supervise-probe", daemon=True) if self._health else None
        if prober is not None:
            prober.start()
        try:
            while self._stop_grace_s is None:
                if self._run_once():
                    return 0
            return None
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._changed:
                if self._tree is not None:
                    self._tree.kill()
                    self._tree = None
                self._done.set()
                self._changed.notify_all()
            if prober is not None:
                prober.join(self._probe_timeout_s + 1)
            with self._changed:
                os.close(self._wake)
                self._wake = -1

    def stop(self, grace_s: float = 10.0) -> None:
        """Have :meth:`run` end: SIGTERM, so much time, then SIGKILL for all that is left. Does not wait.

        May be called from a signal handler.
        """
        with self._changed:
            self._stop_grace_s = grace_s
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def __enter__(self) -> SupervisedCommand:
        self._thread = threading.Thread(target=self._run_in_thread, name="supervise", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException:  # noqa: BLE001 - kept: wait_ready and fail raise it
            pass

    # -- for others, from any thread -------------------------------------------------------------

    @property
    def generation(self) -> int:
        """1 for the first engine that was started, and one more for each that followed."""
        return self._generation

    @property
    def pid(self) -> int:
        """Of the command; 0 between two of them."""
        tree = self._tree
        return 0 if tree is None else tree.pid

    @property
    def restarts(self) -> int:
        return self._keeper.restarts

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(self._keeper.incidents)

    def is_healthy(self) -> bool:
        """Ask now. Without a health check: whether the command runs."""
        if self._tree is None:
            return False
        if self._health is None:
            return True
        try:
            return _within(self._health, self._probe_timeout_s)
        except Exception:  # noqa: BLE001 - whatever it is, it is not a healthy answer
            return False

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until an engine is up: its first healthy answer, or without a health check its start.

        Raises:
            TimeoutError. RestartsExhaustedError: there will be none. InvalidRequestError: it was stopped.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready or self._done.is_set(), timeout_s):
                raise TimeoutError(f"{self._keeper.name} was not ready within {timeout_s:g} s")
            self._check()

    def fail(self, detail: str, cause: Cause = Cause.TIMEOUT, generation: int | None = None) -> Incident:
        """Give an engine up for a reason seen from outside; return when a new one is ready.

        Args:
            detail, cause: why. generation: which engine; None: the present one. If it is gone already, nothing is
                done to the one that followed.

        Raises:
            RestartsExhaustedError: there will be no new one. InvalidRequestError: it was stopped.
        """
        with self._changed:
            lost = self._generation if generation is None else generation
            if lost == self._generation and self._tree is not None and self._wake >= 0:
                self._verdict = self._verdict or _Lost(cause, detail)
                os.eventfd_write(self._wake, 1)
            self._changed.wait_for(lambda: self._done.is_set() or (self._generation > lost and self._ready))
            self._check()
            return self._losses[lost]

    def _check(self) -> None:
        if isinstance(self._error, CheckpointExecutorError):
            raise type(self._error)(self._error.message, **self._error.facts)
        if self._done.is_set():
            raise InvalidRequestError(f"{self._keeper.name} has ended and was not started again")

    # -- the loop --------------------------------------------------------------------------------

    def _run_once(self) -> bool:
        """One engine from its start to its end. True if it ended with status 0."""
        started_at = time.monotonic()
        tree = ProcessTree(self._command, environ=self._environ, cwd=self._cwd)
        with self._changed:
            self._tree = tree
            self._generation += 1
            self._started_at = started_at
            self._verdict = None
            self._healthy_at, self._failed_probes = 0.0, 0
            self._ready = self._health is None
            self._changed.notify_all()
        lost = self._watch(tree)
        with self._changed:
            self._tree = None
            self._ready = False
        if lost is None:
            if self._stop_grace_s is not None:
                tree.stop(self._stop_grace_s)
                return False
            tree.kill(self._keeper.policy.dead_s)
            return True
        incident = self._keeper.lost(tree, lost.cause, lost.detail, started_at)
        self._losses[self._generation] = incident
        self._sleep(incident.backoff_s or 0.0)
        return False

    def _watch(self, tree: ProcessTree) -> _Lost | None:
        """Wait for the end of it. None if it is done, or to be stopped."""
        poller = poll()
        poller.register(tree, POLLIN)
        poller.register(self._wake, POLLIN)
        while True:
            for descriptor, _ in poller.poll(self._probe_interval_s * 1000):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
            if self._stop_grace_s is not None:
                return None
            if tree.wait(0):
                if tree.exit_status == 0:
                    return None
                return _Lost(Cause.EXITED, f"the command {_exit_text(tree.exit_status)}")
            with self._changed:
                if self._verdict is not None:
                    return self._verdict
                if (lost := self._judge_health()) is not None:
                    return lost

    def _judge_health(self) -> _Lost | None:
        """Needs the condition. Looks at probes that failed, so that a pause of this process is not the engine's."""
        if self._health is None or self._failed_probes < 2:
            return None
        since_s = time.monotonic() - (self._healthy_at or self._started_at)
        if not self._ready:
            if since_s > self._keeper.policy.start_s:
                return _Lost(Cause.START, f"no healthy answer within {self._keeper.policy.start_s:g} s of its start")
            return None
        if since_s > self._health_timeout_s:
            return _Lost(Cause.UNHEALTHY, f"no healthy answer for {since_s:.1f} s")
        return None

    def _probe(self) -> None:
        while not self._done.wait(self._probe_interval_s):
            generation, tree = self._generation, self._tree
            if tree is None:
                continue
            healthy = self.is_healthy()
            with self._changed:
                if generation != self._generation or self._tree is None:
                    continue  # the answer of an engine that is gone
                if healthy:
                    self._healthy_at, self._failed_probes = time.monotonic(), 0
                    if not self._ready:
                        self._ready = True
                        self._changed.notify_all()
                else:
                    self._failed_probes += 1

    def _sleep(self, seconds: float) -> None:
        """Pause, but for a stop."""
        until = time.monotonic() + seconds
        poller = poll()
        poller.register(self._wake, POLLIN)
        while self._stop_grace_s is None and (left_s := until - time.monotonic()) > 0:
            if poller.poll(left_s * 1000):
                os.eventfd_read(self._wake)


# ------------------------------------------------------------------------------------------------
# Control calls over HTTP
# ------------------------------------------------------------------------------------------------


def _open(method: str, url: str, timeout_s: float, body: bytes | None = None) -> bytes:
    """One request. No proxy: an engine on this host must not be asked through one that the environment names."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
        data: bytes = answer.read()
        return data


def _url_probe(url: str) -> Callable[[], bool]:
    def is_healthy() -> bool:
        _open("GET", url, 5.0)
        return True

    return is_healthy


class ControlClient:
    """Control calls to an HTTP engine (vLLM with ``VLLM_SERVER_DEV_MODE=1``), each sent once, with an outer timeout.

    Args:
        base_url: e.g. ``"http://localhost:8000"``. engine: what to restart when an outcome is unknown; without it
            the client refuses every further call then. timeout_s: for a whole control call.

    Calls of one client are serialised, as the engine asks. Every one of them may raise:
        EngineRestarted: the call did not return in time, or its connection broke; a new engine serves.
        ControlCallError: the engine answered with an error, or nobody listens there. An error is an answer: vLLM
            reports so what our executor refused, and serves on.
        OutcomeUnknownError: as EngineRestarted, but there was nobody to restart the engine.
    """

    def __init__(
        self, base_url: str, engine: SupervisedCommand | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._engine = engine
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._unknown: str | None = None

    def sleep(self, level: int = 1, mode: str | None = None, *, timeout_s: float | None = None) -> None:
        """``POST /sleep``."""
        self.post("/sleep", {"level": level, **({} if mode is None else {"mode": mode})}, timeout_s=timeout_s)

    def wake_up(self, tags: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """``POST /wake_up``; all tags by default."""
        self.post("/wake_up", {} if tags is None else {"tags": list(tags)}, timeout_s=timeout_s)

    def release_kv_cache_memory(self, *, timeout_s: float | None = None) -> None:
        """``POST /release_kv_cache_memory``."""
        self.post("/release_kv_cache_memory", timeout_s=timeout_s)

    def is_sleeping(self, *, timeout_s: float = 30.0) -> bool:
        """``GET /is_sleeping``."""
        answer = json.loads(self._request("GET", "/is_sleeping", {}, None, timeout_s))
        return bool(answer["is_sleeping"])

    def post(
        self,
        path: str,
        parameters: Mapping[str, object] | None = None,
        *,
        body: object = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Any other control call, e.g. ``post("/collective_rpc", body={"method": "reload_weights"})``.

        Returns the answer's body.
        """
        data = None if body is None else json.dumps(body).encode()
        return self._request("POST", path, parameters or {}, data, self._timeout_s if timeout_s is None else timeout_s)

    def _request(
        self, method: str, path: str, parameters: Mapping[str, object], body: bytes | None, timeout_s: float
    ) -> bytes:
        query = urllib.parse.urlencode(parameters, doseq=True)
        url = f"{self._base_url}{path}" + (f"?{query}" if query else "")
        what = f"{method} {path}"
        with self._lock:
            if self._unknown is not None:
                raise OutcomeUnknownError(self._unknown)
            generation = self._engine.generation if self._engine is not None else 0
            try:
                return _within(lambda: _open(method, url, timeout_s, body), timeout_s)
            except urllib.error.HTTPError as error:
                with error:
                    text = error.read(1 << 16).decode(errors="replace")
                if error.code < 500 or self._engine is None or self._engine.is_healthy():
                    raise ControlCallError(
                        f"{what} was answered with status {error.code}: {text[:500]}", status=error.code, body=text
                    ) from None
                detail, cause = f"{what} was answered with status {error.code}: {text[:500]}", Cause.FATAL
            except urllib.error.URLError as error:
                if isinstance(error.reason, ConnectionRefusedError):
                    raise ControlCallError(f"{what} was not sent: nobody listens at {self._base_url}") from None
                detail, cause = f"{what}: {error.reason}; its outcome is unknown", Cause.TIMEOUT
            except TimeoutError:
                detail = f"{what} did not return within {timeout_s:g} s; its outcome is unknown"
                cause = Cause.TIMEOUT
            except (OSError, HTTPException) as error:
                detail = f"{what}: {type(error).__name__}: {error}; its outcome is unknown"
                cause = Cause.TIMEOUT
            if self._engine is None:
                self._unknown = f"{detail}. Kill the engine; it is not asked again"
                raise OutcomeUnknownError(self._unknown, deadline_s=timeout_s)
            raise _restarted(self._engine.fail(detail, cause, generation))


def _main(argv: Sequence[str]) -> None:
    """The processes of this file: ``warden FD`` and ``host FD``."""
    match argv[1:]:
        case ["warden", descriptor]:
            spec = json.load(sys.stdin.buffer)
            _Warden(socket.socket(fileno=int(descriptor)), spec).run()
        case ["host", descriptor]:
            _host(Connection(int(descriptor)))
        case _:
            sys.exit("this module is started by its own classes; see scripts/restart_on_failure.py")


if __name__ == "__main__":
    # Through the import, so that the classes here exist once: errors are told apart by them.
    from checkpoint_executor import supervise

    supervise._main(sys.argv)

"""I/O. Bringing an engine back: watch it from outside, kill all of it, wait until the GPUs are free, start it again.

This file knows when an engine is lost and how it is started. It must not know stages, ranks or tags, and imports
neither the executor nor torch, CUDA or zmq: it stands outside the engine, so that it works when the engine does not,
and for engines that are not ours (``vllm serve``).

The rule behind all of it: a timeout does not establish whether an operation completed. An engine whose last control
call has no known outcome is never asked again; it is killed as a whole and started anew, and the caller redoes its
work from its own state (:class:`EngineRestarted`).

- :class:`SupervisedCommand` runs a command; :class:`ControlClient` is for its HTTP control calls.
- :class:`Supervised` builds an engine with a factory in a process of its own, and runs functions there.
- :class:`ProcessTree` is what both stand on: a command that is ended with everything below it, orphans included.
- :class:`RestartPolicy` has the limits, :class:`Incident` is what is reported.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from multiprocessing.connection import Connection
from pathlib import Path
from select import POLLIN, poll
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from checkpoint_executor import errors, payload, processes
from checkpoint_executor.errors import (
    CheckpointExecutorError,
    ConfigError,
    FatalError,
    ForkedError,
    InvalidRequestError,
    ResultTypeError,
)
from checkpoint_executor.http_control import ControlCallError, ControlClient, OutcomeUnknownError, url_probe
from checkpoint_executor.incidents import (
    Cause,
    EngineRestarted,
    Incident,
    Keeper,
    RestartPolicy,
    RestartsExhaustedError,
    UsedBytes,
    append_incident,
    begin,
    default_used_bytes,
    nvml_used_bytes,
    print_incident,
    restarted,
    soft_used_bytes,
    wait_free,
    within,
)
from checkpoint_executor.process_tree import ProcessTree
from checkpoint_executor.report import CycleReport
from checkpoint_executor.timeouts import to_wait_s
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
    "UsedBytes",
    "append_incident",
    "default_used_bytes",
    "nvml_used_bytes",
    "print_incident",
    "soft_used_bytes",
    "wait_free",
]

T = TypeVar("T")
E = TypeVar("E")

#: Exceptions of other engines that mean what our FatalError means.
_FATAL_NAMES = frozenset({"EngineDeadError"})


class EngineCallError(CheckpointExecutorError):
    """The caller's own function raised in the engine's process. The engine is unharmed.

    Attributes:
        error_type: qualified name of the exception's type. traceback_text: its traceback there.
    """

    error_type: str | None = None
    traceback_text: str | None = None


class _Lost(Exception):  # noqa: N818 - internal: why the engine must be given up
    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


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
    #: Whether there was an engine when it happened.
    built: bool = True


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
        self._keeper = Keeper(name, policy or RestartPolicy(), used_bytes, report)
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
            timeout_s: from outside, for all of it; infinity for no limit.

        Raises:
            InvalidRequestError: the timeout is no number of seconds above 0; nothing was sent.
            EngineRestarted: the engine failed for good, died, or did not return in time; a new one serves.
            RestartsExhaustedError: so it did, and is not started again; every later call raises the same.
            CheckpointExecutorError: any other that the engine raised; it is unharmed.
            EngineCallError: the function raised something else.
        """
        limit_s = to_wait_s(timeout_s, "timeout_s")
        frames = payload.dump_call(function)
        with self._lock:
            self._check()
            try:
                result: T = self._ask("call", frames, limit_s)
                return result
            except _Lost as lost:
                incident = self._replace(lost)
        raise restarted(incident)

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

    @property
    def baseline(self) -> dict[str, int]:
        """Bytes in use by device before the first start: what counts as free."""
        return dict(self._keeper.baseline)

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
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
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
        try:
            incident = self._give_up(lost)
            self._start(first=False)
        except BaseException:
            # Also when the restart was interrupted: nobody would be told that the next engine is another one.
            self._drop()
            self._failure = self._failure or InvalidRequestError(
                f"the restart of {self._keeper.name} did not end well; build a new one"
            )
            raise
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

    def _ask(self, kind: str, frames: Sequence[Frame], timeout_s: float | None) -> Any:
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

        self._exchange = exchange = begin(talk)
        try:
            reply, answer = exchange.result(timeout_s)
        except TimeoutError:
            raise _Lost(
                Cause.TIMEOUT, f"{kind} did not return within {timeout_s:g} s: its outcome is unknown"
            ) from None
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
        f"{reply.error_type}: {reply.message}. {'The engine is unharmed' if reply.built else 'There is no engine yet'}."
        f"\n\n{reply.traceback_text}",
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
            reply, answer = _describe_error(error, built=engine is not None)
        connection.send_bytes(msgspec.json.encode(reply))
        for frame in answer:
            connection.send_bytes(frame)


def _describe_error(error: Exception, *, built: bool) -> tuple[_Reply, Sequence[Frame]]:
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
        built=built,
        fatal=isinstance(error, FatalError) or any(base.__name__ in _FATAL_NAMES for base in kind.__mro__),
    )
    return reply, answer


# ------------------------------------------------------------------------------------------------
# A command
# ------------------------------------------------------------------------------------------------


class SupervisedCommand:
    """A command, such as ``vllm serve MODEL``, that is started again whenever it fails.

    Args:
        command: what to run, in the foreground.
        health: a URL that answers 200, or a function that returns True, while the engine is well. A command that has
            one is a server: it fails when it gives no good answer, and when it ends, whatever its status (vLLM 0.33's
            API server ends with status 0 when its engine core has died). Without one it fails when it ends with a
            status other than 0, and with 0 it is done. ConfigError if it is no URL of HTTP.
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
        self._health_timeout_s = health_timeout_s
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = max(0.1, min(5.0, health_timeout_s / 2))
        self._health = url_probe(health, self._probe_timeout_s) if isinstance(health, str) else health
        self._environ = environ
        self._cwd = cwd
        self._keeper = Keeper(name or self._command[0], policy or RestartPolicy(), used_bytes, report)
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
        """Run the command until it is done or :meth:`stop` is called. Once.

        Returns:
            0, or None after a stop.

        Raises:
            RestartsExhaustedError: it failed too often. ConfigError: it cannot be run.
        """
        prober = threading.Thread(target=self._probe, name="supervise-probe", daemon=True) if self._health else None
        if prober is not None:
            prober.start()
        try:
            while not self._is_stopping():
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
            return within(self._health, self._probe_timeout_s)
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
            if lost == 0:
                raise InvalidRequestError(f"{self._keeper.name} has not been started")
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
        """One engine from its start to its end. True if the command is done."""
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
        incident = self._keeper.lost(tree, lost.cause, lost.detail, started_at, self._is_stopping)
        self._losses[self._generation] = incident
        self._sleep(incident.backoff_s or 0.0)
        return False

    def _is_stopping(self) -> bool:
        return self._stop_grace_s is not None

    def _watch(self, tree: ProcessTree) -> _Lost | None:
        """Wait for the end of it. None if it is done, or to be stopped."""
        poller = poll()
        poller.register(tree, POLLIN)
        poller.register(self._wake, POLLIN)
        while True:
            for descriptor, _ in poller.poll(self._probe_interval_s * 1000):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
            if self._is_stopping():
                return None
            if tree.wait(0):
                if tree.exit_status == 0 and self._health is None:
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
        while not self._is_stopping() and (left_s := until - time.monotonic()) > 0:
            if poller.poll(left_s * 1000):
                os.eventfd_read(self._wake)


def _main(argv: Sequence[str]) -> None:
    """The process of an engine that a factory builds."""
    _host(Connection(int(argv[1])))


if __name__ == "__main__":
    # Through the import, so that the classes here exist once: errors are told apart by them.
    from checkpoint_executor import supervise

    supervise._main(sys.argv)

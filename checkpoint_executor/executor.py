"""I/O. The public executor: vLLM's names and meanings over the control thread."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from checkpoint_executor import config as configuration
from checkpoint_executor import directories, payload, processes, procfs, softgpu
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.communication import worker_environment
from checkpoint_executor.config import ExecutorConfig
from checkpoint_executor.control import Control, OutgoingCall, Request, call_error
from checkpoint_executor.coordinator import OWN_STAGES, Phase, attributed
from checkpoint_executor.errors import (
    CheckpointExecutorError,
    ConfigError,
    FatalError,
    ForkedError,
    InvalidRequestError,
    RpcTimeoutError,
)
from checkpoint_executor.health import HealthRecord, HealthStatus
from checkpoint_executor.messages import (
    HELPER,
    Abandon,
    BuildWorker,
    Call,
    Event,
    Exit,
    ReleaseRequested,
    Role,
    RpcRequested,
    ShutdownRequested,
    SleepRequested,
    StageCommand,
    WakeRequested,
    identity,
)
from checkpoint_executor.preflight import Finding
from checkpoint_executor.report import CycleReport
from checkpoint_executor.status import StatusFile
from checkpoint_executor.timeouts import to_wait_s
from checkpoint_executor.wire import Frame

__all__ = ["CUDACheckpointExecutor"]

#: Pause modes of vLLM's level 0. Calls are serialised here, so when a pause is asked for nothing is running and all
#: three come to the same.
_PAUSE_MODES = ("abort", "wait", "keep")


class CUDACheckpointExecutor:
    """Tensor-parallel workers that can be put to sleep as a whole, graphs and communicators included.

    Starts one worker process a rank and a helper, builds ``worker(context, *worker_args, **worker_kwargs)`` in each
    worker, and returns when all are ready. Use it as a context manager, or call :meth:`shutdown`.

    Args:
        worker: a subclass of :class:`checkpoint_executor.workers.Worker`, or its name as ``"module:Class"``. A class
            defined in a script or a notebook works too.
        tensor_parallel_size: number of ranks; one device each.
        worker_args, worker_kwargs: what the constructor gets after its context; anything picklable.
        options: fields of :class:`checkpoint_executor.config.ExecutorConfig`, e.g. ``device="soft"``.

    Raises:
        ConfigError: the configuration or the environment cannot work; every problem in one message, nothing started.
        StartError: a worker or the helper failed to start; what had been started was killed.

    Calls are serialised: while one is in progress, a second caller gets BusyError. All methods may be called from any
    thread. In a forked child of the process that built the executor they raise ForkedError and touch nothing;
    properties and ``status()`` say there what was last known in the parent at the fork.
    """

    def __init__(
        self,
        worker: type | str,
        tensor_parallel_size: int = 1,
        *,
        worker_args: Sequence[Any] = (),
        worker_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _refuse_nesting()
        _require_worker_class(worker)
        self.config = configuration.parse({"tensor_parallel_size": tensor_parallel_size, **options})
        self.device_kind = detect_device_kind() if self.config.device == "auto" else self.config.device
        for warning in configuration.validate(self.config, os.environ, self.device_kind):
            warnings.warn(warning, stacklevel=2)
        if self.device_kind == "soft":
            self.config = msgspec.structs.replace(self.config, soft_root=resolve_soft_root(self.config.soft_root))
        try:
            frames = self._dump(worker, worker_args, worker_kwargs)
        except ValueError as error:
            message = f"the worker and its arguments cannot be sent: {error}. Nothing was started"
            raise ConfigError(message, problems=(message,)) from error
        runtime_dir = directories.make_runtime_directory(self.config.runtime_dir)
        self._owner_pid = os.getpid()
        link = _OwnWorkers(self.config, self.device_kind, runtime_dir, frames)
        self._control = Control(
            self.config,
            attributed(OWN_STAGES) if self.config.attribution else OWN_STAGES,
            link,
            runtime_dir,
            _encode_spec(link.spec(Role.HELPER, HELPER)),
            processes.child_environment(os.environ, {}),
            on_change=StatusFile("own", worker if isinstance(worker, str) else worker.__qualname__),
        )
        # Runs on shutdown(), on garbage collection, or at interpreter exit, once; in a forked child it does nothing.
        self._finalizer = weakref.finalize(self, _end, self._control, self._owner_pid)
        try:
            self._wait(self._control.start())
        except BaseException:
            self.shutdown()
            raise

    # -- calls -----------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every rank and return the results in rank order.

        Args:
            method: name of a method of the worker, or a callable that gets the worker as its first argument.
            timeout: seconds to wait; None waits as long as it takes (a worker that dies ends the wait).
            args, kwargs: picklable. Results may be None, bool, int, float, str, bytes, list, tuple, dict, numpy
                arrays and CPU tensors.

        Raises:
            WorkerMethodError: the method raised on some rank (the first is reported). ResultTypeError: its result
                cannot travel. Both leave the executor unharmed.
            RpcTimeoutError: not finished in time. The workers go on; further calls are refused until they have ended.
            AsleepError: the workers are checkpointed; or the method is an ``@execution`` method and a tag sleeps, or
                the executor is paused.
            InvalidRequestError: the arguments cannot be pickled, or are over ``max_payload_bytes``, or the timeout is
                no number of seconds; nothing was sent.
            BusyError: another call is in progress.
            FatalError: the executor failed, now or earlier.
        """
        self._check_owner()
        name = method if isinstance(method, str) else getattr(method, "__name__", "callable")
        timeout_s = to_wait_s(timeout, "timeout", zero_allowed=True)
        try:
            frames = self._dump(method, args, kwargs)
        except ValueError as error:
            raise InvalidRequestError(f"{name!r} cannot be sent: {error}. Nothing was touched") from error
        execution = isinstance(method, str) and method in self._control.execution_methods
        request = self._control.submit(lambda number: RpcRequested(number, execution), OutgoingCall(name, frames))
        try:
            replies = self._wait(request.future, timeout_s)
        except FatalError:
            raise  # a DeadlineError is a TimeoutError too, and not this call's
        except FutureTimeout:
            self._control.event(Abandon(request.number))
            raise RpcTimeoutError(
                f"{name!r} did not finish within {timeout_s:g} s. The executor is unharmed, but the workers are still "
                "at it: further calls are refused until they have ended",
                deadline_s=timeout_s,
            ) from None
        pids = self._control.pids
        for rank, (failure, _) in sorted(replies.items()):
            if failure is not None:
                raise call_error(rank, pids.get(f"worker {rank}"), failure)
        return [payload.decode_result(frames) for _, (_, frames) in sorted(replies.items())]

    def sleep(self, level: int = 1, mode: str = "abort") -> CycleReport:
        """Put the workers to sleep.

        Args:
            level: 1 gives all device memory back: weights are backed up, the KV cache is dropped, and each process is
                checkpointed by the driver. 0 only pauses: ``@execution`` methods are refused until :meth:`wake_up`.
            mode: of a level-0 pause, ``"abort"``, ``"wait"`` or ``"keep"`` as in vLLM. Calls are serialised here, so
                nothing is running and all three come to the same.

        Returns:
            A report; ``performed`` is False for a no-op (asleep already, or weights still asleep).

        Raises:
            InvalidRequestError: another level, such as 2; nothing was touched.
            RefusedError: the driver could not lock every rank; the sleep was undone and the executor serves on.
            BusyError: another call is in progress.
            FatalError: the executor failed, now or earlier.
        """
        if mode not in _PAUSE_MODES:
            raise InvalidRequestError(
                f"mode must be one of {', '.join(_PAUSE_MODES)}, not {mode!r}. Nothing was touched"
            )
        return self._control_call(lambda number: SleepRequested(number, level))

    def wake_up(self, tags: Sequence[str] | None = None, *, wait_for_memory_s: float = 0.0) -> CycleReport:
        """Wake what sleeps. The first wake after a sleep restores the whole process, whatever the tags.

        Args:
            tags: ``"weights"``, ``"kv_cache"``, or None for all that sleeps. Duplicates count once; a tag that is
                awake already warns and is a no-op.
            wait_for_memory_s: how long to wait for room on the devices before it is refused, seconds.

        Returns:
            A report. The KV cache's contents are undefined after its wake.

        Raises:
            InvalidRequestError: an unknown tag, or an empty list; nothing was touched.
            InsufficientMemoryError: there is no room; nothing was touched, still asleep, call again.
            BusyError: another call is in progress.
            FatalError: the executor failed, now or earlier.
        """
        if isinstance(tags, str):
            raise InvalidRequestError(f"tags must be a list of tags, not the string {tags!r}. Nothing was touched")
        if not 0 <= wait_for_memory_s < float("inf"):
            raise InvalidRequestError(
                f"wait_for_memory_s must be seconds, not {wait_for_memory_s!r}. Nothing was touched"
            )
        named = None if tags is None else tuple(tags)
        if named is not None and not all(isinstance(tag, str) for tag in named):
            raise InvalidRequestError(f"tags must be strings, not {named!r}. Nothing was touched")
        return self._control_call(lambda number: WakeRequested(number, named, wait_for_memory_s))

    def release_kv_cache_memory(self) -> CycleReport:
        """Drop the KV cache's memory and keep the weights. ``wake_up(["kv_cache"])`` brings it back and resumes.

        Raises:
            AsleepError: not paused by ``sleep(level=0)``, or something sleeps already; nothing was touched.
            BusyError: another call is in progress.
            FatalError: the executor failed, now or earlier.
        """
        return self._control_call(ReleaseRequested)

    # -- state -----------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Whether any tag sleeps: True until all are awake."""
        return bool(self._control.sleeping)

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """Tags that sleep."""
        return self._control.sleeping

    @property
    def is_paused(self) -> bool:
        """Whether ``sleep(level=0)`` is in force."""
        return self._control.paused

    @property
    def phase(self) -> str:
        """Where the executor is: ``awake``, ``suspending``, ``checkpointed``, ``resuming``, ``failed`` and so on."""
        return str(self._control.phase)

    @property
    def stage(self) -> str | None:
        """The stage in progress, e.g. ``"checkpoint"``; None while nothing is."""
        return self._control.stage

    @property
    def last_report(self) -> CycleReport | None:
        """The report of the last sleep, release or wake that did something."""
        return self._control.last_report

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: ``"helper"``, ``"worker 0"`` and on."""
        return self._control.pids

    def status(self) -> HealthStatus:
        """Phase, counts, the last report and refusal, and what each rank has. Asks no worker; works in every phase."""
        return self._control.status()

    @property
    def health(self) -> HealthRecord:
        """Where events can be listened to; ``metrics.py`` does."""
        return self._control.health

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the preflight found at the start, the worst first."""
        return self._control.findings

    def check_health(self) -> None:
        """Return if the executor serves or sleeps; quiet while asleep, and never a call to a worker.

        Raises:
            FatalError: it failed; the first cause. RefusedError: it was shut down.
        """
        self._check_owner()
        if self._control.phase is Phase.FAILED:
            # The cause is complete when everything has been reaped.
            self._control.join(self.config.deadlines.reap_s)
        if self._control.phase in (Phase.FAILED, Phase.CLOSING, Phase.CLOSED):
            raise self._control.ended()

    # -- end -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the workers and the helper: in good order when awake, by SIGKILL when asleep (it needs no device memory).

        Does nothing when called again, after a failure, or in a forked child.
        """
        self._finalizer()

    def __enter__(self) -> CUDACheckpointExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return (
            f"<CUDACheckpointExecutor {self.phase}, {self.config.tensor_parallel_size} rank(s) on {self.device_kind}>"
        )

    # -- private ---------------------------------------------------------------------------------

    def _control_call(self, make_event: Callable[[int], Event]) -> CycleReport:
        self._check_owner()
        report: CycleReport = self._wait(self._control.submit(make_event).future)
        for warning in report.warnings:
            warnings.warn(warning, stacklevel=3)
        return report

    def _dump(self, what: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Frame]:
        """A call as frames. Raises ValueError, saying why they cannot be sent."""
        try:
            frames = payload.dump_call((what, tuple(args), dict(kwargs or {})))
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if (problem := payload.oversized(frames, self.config.max_payload_bytes)) is not None:
            raise ValueError(problem)
        return frames

    def _wait(self, future: Future[Any], timeout_s: float | None = None) -> Any:
        try:
            return future.result(timeout_s)
        except FatalError:
            # The verdict is out; by the time the caller sees it, the processes and the directory are gone too.
            self._control.join(self.config.deadlines.reap_s)
            raise

    def _check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ForkedError(
                f"this executor belongs to process {self._owner_pid}; a forked child cannot use it. It is unharmed"
            )


def _require_worker_class(worker: object) -> None:
    """Raises ConfigError: it is neither a class nor the name of one."""
    if isinstance(worker, type):
        return
    if isinstance(worker, str):
        module, _, name = worker.rpartition(":" if ":" in worker else ".")
        if module and name:
            return
    message = (
        f"worker must be a class, or its name as 'package.module:Class', not {worker!r:.80}. What its constructor is "
        "to get goes into worker_args and worker_kwargs. Nothing was started"
    )
    raise ConfigError(message, problems=(message,))


def detect_device_kind() -> str:
    """``"cuda"`` if this machine has an NVIDIA driver with a GPU, else ``"soft"``. Makes no context."""
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "soft"


def resolve_soft_root(given: str | None) -> str:
    """Where the software devices are; absolute, since the caller may change folders.

    Raises:
        ConfigError: the default folder cannot be used.
    """
    if given is not None:
        return os.path.abspath(given)
    try:
        return os.path.abspath(softgpu.default_root())
    except OSError as error:
        message = f"{error}. Nothing was started"
        raise ConfigError(message, problems=(message,)) from error


def _encode_spec(spec: ChildSpec) -> str:
    return msgspec.json.encode(spec).decode()


def _end(control: Control, owner_pid: int) -> None:
    """Shut down, from shutdown(), garbage collection or interpreter exit; nothing in a forked child."""
    if os.getpid() != owner_pid:
        return
    request = control.submit(ShutdownRequested)
    if control.is_current_thread:
        return  # the garbage collector runs on any thread: this one has to go on, or nothing is shut down
    try:
        request.future.result(control.config.deadlines.shutdown_s + 2 * control.config.deadlines.reap_s)
    except (CheckpointExecutorError, FutureTimeout):
        pass  # failed before, or shut down: there is nothing left to end, or it cannot be ended
    control.join(2 * control.config.deadlines.reap_s)


def _refuse_nesting() -> None:
    """A worker or the helper imports what the user's script imports, and perhaps the script itself. If that built an
    executor, its children would do the same, and theirs, without end.

    Raises:
        ConfigError: this is a worker or the helper of an executor.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name in (
        "checkpoint_executor.workers.__main__",
        "checkpoint_executor.helper.__main__",
    ):
        message = (
            "an executor is being built in a worker or the helper of another one, where a module of yours is imported "
            'that builds one at import. Put that below `if __name__ == "__main__":`. Nothing was started here'
        )
        raise ConfigError(message, problems=(message,))


class _OwnWorkers:
    """The link to our own worker processes, over the control thread's transport."""

    def __init__(self, config: ExecutorConfig, device_kind: str, runtime_dir: Path, build: list[Frame]) -> None:
        self._config = config
        self._device_kind = device_kind
        self._runtime_dir = runtime_dir
        self._build = build
        self._ranks = tuple(range(config.tensor_parallel_size))

    def spec(self, role: Role, rank: int, helper_pid: int = 0) -> ChildSpec:
        """The command line of a child."""
        ids = self._config.device_ids
        return ChildSpec(
            role=role,
            rank=rank,
            world_size=self._config.tensor_parallel_size,
            parent_pid=os.getpid(),
            parent_start_time=procfs.start_time(os.getpid()),
            runtime_dir=str(self._runtime_dir),
            device_kind=self._device_kind,
            device_id=ids[rank] if ids and role is Role.WORKER else "",
            communication=self._config.communication,
            retain_backup=self._config.retain_backup,
            release_local_memory=self._config.release_local_memory,
            verify_weights=self._config.verify_weights,
            max_payload_bytes=self._config.max_payload_bytes,
            soft_root=self._config.soft_root or "",
            soft_capacity_bytes=self._config.soft_capacity_bytes,
            locks_dir=str(directories.locks_directory()),
            helper_pid=helper_pid,
            ignore_preflight=self._config.ignore_preflight,
            attribution=self._config.attribution,
            faults=self._config.faults,
        )

    def spawn(self, control: Control) -> Iterator[processes.ChildProcess]:
        extra = dict(self._config.worker_env)
        if self._device_kind == "cuda":
            size = self._config.tensor_parallel_size
            extra = {**worker_environment(self._config.communication, size, {**os.environ, **extra}), **extra}
        environ = processes.child_environment(os.environ, extra)
        for rank in self._ranks:
            spec = self.spec(Role.WORKER, rank, control.helper_pid)
            yield processes.spawn(Role.WORKER, rank, _encode_spec(spec), environ)

    def send_stage(self, control: Control, command: StageCommand) -> None:
        build = command.stage == "build"
        for rank in command.ranks:
            message = (
                BuildWorker(command.cycle, command.index) if build else msgspec.structs.replace(command, ranks=(rank,))
            )
            self._send(control, rank, message, self._build if build else ())

    def send_call(self, control: Control, request: Request) -> None:
        assert request.call is not None
        for rank in self._ranks:
            self._send(control, rank, Call(request.number, request.call.name), request.call.frames)

    def send_exit(self, control: Control) -> None:
        for rank in self._ranks:
            self._send(control, rank, Exit())

    @staticmethod
    def _send(
        control: Control, rank: int, message: StageCommand | BuildWorker | Call | Exit, frames: Sequence[Frame] = ()
    ) -> None:
        try:
            control.transport.send(identity(Role.WORKER, rank), message, frames)
        except ConnectionError:
            pass  # it is dying: its pidfd says so, and the deadline holds otherwise

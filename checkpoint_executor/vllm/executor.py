"""I/O. The executor that vLLM takes: vLLM's own worker processes, put through the project's own stages.

Knows vLLM's ``MultiprocExecutor`` and what EngineCore asks of it. It does not know the order of the stages, what a
failure means, or how a process is locked: the coordinator, the control thread and the helper are the ones that
:class:`checkpoint_executor.CUDACheckpointExecutor` has.

Two threads of EngineCore matter here. Its main thread makes every call and is the only one that may use vLLM's
queues, so it performs the workers' stages while it waits for an operation. vLLM's monitor thread calls
:meth:`CUDACheckpointExecutor.shutdown` when a
worker dies, at any moment.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from select import POLLIN, poll
from typing import Any, ClassVar

import cloudpickle
import msgspec
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from checkpoint_executor import directories, processes, procfs
from checkpoint_executor.child import error_info
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.communication import SUSPEND
from checkpoint_executor.config import ExecutorConfig
from checkpoint_executor.control import Control
from checkpoint_executor.coordinator import ACCOUNT, VLLM_STAGES, Phase, Stage, attributed
from checkpoint_executor.errors import (
    BusyError,
    CheckpointExecutorError,
    ConfigError,
    DeadlineError,
    FatalError,
    InvalidRequestError,
)
from checkpoint_executor.faults import Injection
from checkpoint_executor.messages import (
    HELPER,
    ErrorInfo,
    Event,
    ReleaseRequested,
    Role,
    RpcRequested,
    ShutdownRequested,
    SleepRequested,
    StageCommand,
    StageReply,
    WakeRequested,
)
from checkpoint_executor.report import CycleReport
from checkpoint_executor.status import CycleLog, StatusFile
from checkpoint_executor.tags import KV_CACHE
from checkpoint_executor.vllm.link import VllmWorkers
from checkpoint_executor.vllm.settings import PREFIX, Settings, parse_settings
from checkpoint_executor.vllm.validation import ARENA_BACKEND, check_config
from checkpoint_executor.vllm.versions import require_supported, version_note
from checkpoint_executor.vllm.workers import StageCall, WorkerSide, perform

__all__ = ["CUDACheckpointExecutor"]

require_supported(vllm.__version__)

logger = init_logger(f"vllm.{__name__}")

#: Calls that EngineCore repeats at every pause. While checkpointed their answer is known: the device is idle, and the
#: caches were reset by the pause before the checkpoint.
_HOUSEKEEPING = frozenset({"synchronize_device", "reset_mm_cache", "reset_encoder_cache"})

_STAGES: dict[str, Stage] = {
    stage.name: stage
    for plan in (VLLM_STAGES.start, VLLM_STAGES.down, VLLM_STAGES.up, VLLM_STAGES.release, VLLM_STAGES.wake, (ACCOUNT,))
    for stage in plan
}

#: Backups of plain cumem come from torch's pinned allocator, which these settings make 3.6 times faster (measured).
_PINNED_SETTINGS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class CUDACheckpointExecutor(MultiprocExecutor):  # type: ignore[misc, unused-ignore]  # vLLM is not installed everywhere
    """vLLM's multi-process executor whose sleep leaves the GPU empty and whose wake is bit-exact.

    Passed to vLLM as ``distributed_executor_backend``, as this class or as its name. Settings are
    ``CHECKPOINT_EXECUTOR_*`` variables; what is refused and why is in ``docs/vllm.md``.

    Raises:
        ConfigError: when it is built (and, where vLLM lets us, when the configuration is): every problem in one
            message, no worker started.
    """

    supports_pp = False

    #: The only worker class that is accepted.
    standard_worker: ClassVar[str] = "vllm.v1.worker.gpu_worker.Worker"
    #: Who performs the stages in the workers.
    worker_side: ClassVar[type[WorkerSide]] = WorkerSide
    #: What the helper drives.
    device_kind: ClassVar[str] = "cuda"

    # Defaults of the class, because vLLM's constructor and its finalizer call methods of a half-built object.
    _control: Control | None = None
    _link: VllmWorkers | None = None
    _owner_pid: int = 0
    _engine: Callable[[], Any] = staticmethod(lambda: None)
    _closing: Future[Any] | None = None

    # -- before and at the start -----------------------------------------------------------------

    @classmethod
    def machine_problems(cls) -> list[str]:
        """What this machine and this installation lack."""
        problems = []
        if not current_platform.is_cuda():
            problems.append(f"vLLM runs on {current_platform.device_name or 'no device'} here; an NVIDIA GPU is needed")
        for module, package in (("cuda.bindings", "cuda-bindings"), ("pynvml", "nvidia-ml-py")):
            try:
                __import__(module)
            except ImportError:
                problems.append(f"{package} is not installed: pip install 'checkpoint-executor[cuda]'")
        return problems

    @classmethod
    def check(cls, vllm_config: Any, environ: Mapping[str, str]) -> tuple[Settings, str, list[str]]:
        """Check a configuration and an environment.

        Returns:
            Our settings, the communication configuration (``"suspend"`` or ``"socket"``), and warnings.

        Raises:
            ConfigError: with every problem in one message.
        """
        settings, problems = parse_settings(environ)
        verdict = check_config(vllm_config, environ, settings, cls.standard_worker)
        problems += verdict.problems + cls.machine_problems()
        if settings.log is not None and not os.access(os.path.dirname(os.path.abspath(settings.log)), os.W_OK):
            problems.append(f"{PREFIX}LOG={settings.log}: cannot write there")
        elif settings.log is not None and os.path.isdir(settings.log):
            problems.append(f"{PREFIX}LOG={settings.log}: is a folder, not a file")
        try:
            directories.require_usable(settings.runtime_dir)
        except ConfigError as error:
            problems.append(f"{PREFIX}RUNTIME_DIR={settings.runtime_dir or ''}: {error.message}")
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise ConfigError(
                f"checkpoint_executor.vllm.CUDACheckpointExecutor cannot be used like this; no worker was started. "
                f"{len(problems)} problem(s):\n{listed}",
                problems=tuple(problems),
            )
        note = version_note(vllm.__version__)
        return settings, verdict.communication, [*verdict.warnings, *([note] if note else [])]

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Asked by vLLM while it builds its configuration, in the user's own process.

        That is the one moment at which an exception of ours reaches the user as it is: one inside EngineCore becomes
        "Engine core initialization failed". So what is known by then is checked here, and all of it again later.
        """
        config = _config_being_built()
        if config is not None and not _is_engine_process():
            cls.check(config, os.environ)
        return bool(super().supports_async_scheduling())

    def _init_executor(self) -> None:
        self._owner_pid = os.getpid()
        try:
            self._settings, self._communication, warnings = self.check(self.vllm_config, os.environ)
        except ConfigError as error:
            # In EngineCore: the exception itself is buried in a traceback above "Engine core initialization failed".
            logger.error("%s", error)
            raise
        for warning in warnings:
            logger.warning("%s", warning)
        self._log = CycleLog(self._settings.log)
        self._calls = threading.Lock()
        self._deferred: list[Any] = []
        self._uses_arena = self._settings.host_arena or self.model_config.sleep_mode_backend == ARENA_BACKEND
        if not self._uses_arena:
            _use_faster_pinning()
        if _is_engine_process():
            # Otherwise this is the user's own process, whose parent is no front end of vLLM's.
            _end_with_the_front_end()
        super()._init_executor()

    def _post_init_executor(self) -> None:
        """The workers are there: start the control thread and the helper, and make everybody known to each other."""
        super()._post_init_executor()
        settings = self._settings
        self._config = ExecutorConfig(
            tensor_parallel_size=self.world_size,
            device=self.device_kind,
            communication=self._communication,
            undo_before_checkpoint=settings.undo_before_checkpoint,
            deadlines=msgspec.structs.replace(
                settings.deadlines, shutdown_s=float(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)
            ),
            wake_margin_bytes=settings.wake_margin_mib << 20,
            attribution=settings.attribution,
            runtime_dir=settings.runtime_dir,
        )
        runtime_dir = directories.make_runtime_directory(settings.runtime_dir)
        self._link = VllmWorkers([worker.proc for worker in self.workers])
        spec = ChildSpec(
            role=Role.HELPER,
            rank=HELPER,
            world_size=self.world_size,
            parent_pid=os.getpid(),
            parent_start_time=procfs.start_time(os.getpid()),
            runtime_dir=str(runtime_dir),
            device_kind=self.device_kind,
            communication=self._communication,
            soft_root=self.soft_root(),
            locks_dir=str(directories.locks_directory()),
            front_door="vllm",
            ignore_preflight=self._config.ignore_preflight,
            attribution=settings.attribution,
            faults=self.helper_faults(),
        )
        self._endpoint = spec.endpoint
        self._control = Control(
            self._config,
            attributed(VLLM_STAGES) if settings.attribution else VLLM_STAGES,
            self._link,
            runtime_dir,
            msgspec.json.encode(spec).decode(),
            processes.child_environment(os.environ, {}),
            on_change=StatusFile("vllm", str(self.model_config.model)),
        )
        try:
            self._serve(self._control.start())
        except CheckpointExecutorError as error:
            logger.error("%s", error)
            raise

    def soft_root(self) -> str:
        """Folder of the software devices; there are none under vLLM."""
        return ""

    def helper_faults(self) -> tuple[Injection, ...]:
        """Faults for the helper to commit; none on a real device."""
        return ()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Remember whose callback it is.

        vLLM gives an executor no other way to ask whether the scheduler is paused, which :meth:`sleep` must know.
        """
        for cell in getattr(callback, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "is_scheduler_paused"):
                self._engine = weakref.ref(cell.cell_contents)
        super().register_failure_callback(callback)

    # -- what sleeps -----------------------------------------------------------------------------

    @property
    def sleeping_tags(self) -> set[str]:
        """vLLM's field, read from the coordinator: there is one truth."""
        return set() if self._control is None else set(self._control.sleeping)

    @sleeping_tags.setter
    def sleeping_tags(self, tags: set[str]) -> None:
        """vLLM's constructor sets it."""

    def sleep(self, level: int = 1) -> None:
        """Put the workers to sleep; EngineCore has paused its scheduler.

        Raises:
            InvalidRequestError: another level; nothing was touched (the scheduler stays paused until ``wake_up``).
            RefusedError: a rank could not be locked; undone, in ordinary level-1 sleep until ``wake_up``.
            FatalError: the executor failed; the workers were killed.
        """
        engine = self._engine()
        if level == 1 and engine is not None and not engine.is_scheduler_paused():
            raise InvalidRequestError(
                "the scheduler was resumed while this sleep waited for its requests to finish: a wake_up() or resume "
                "overtook it. Nothing was put to sleep; call sleep() again, one control call at a time"
            )
        self._operate(lambda number: SleepRequested(number, level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake what sleeps. The first wake after a sleep restores the whole process, whatever the tags.

        Raises:
            InvalidRequestError: an unknown tag; nothing was touched.
            InsufficientMemoryError: there is no room; nothing was touched, still asleep, call again.
            FatalError: the executor failed; the workers were killed.
        """
        # An empty list means everything to vLLM.
        self._operate(lambda number: WakeRequested(number, tuple(tags) if tags else None))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drop the KV cache's memory and keep the weights: not a checkpoint. EngineCore has seen to the pause.

        Raises:
            InvalidRequestError: a tag that would be lost; nothing was touched.
            FatalError: the executor failed; the workers were killed.
        """
        if set(tags) != {KV_CACHE}:
            raise InvalidRequestError(f"only {KV_CACHE!r} can be discarded, not {tags}. Nothing was touched")
        if KV_CACHE in self.sleeping_tags:
            logger.warning("Tags %s are already sleeping.", tags)
            return
        self._operate(lambda number: SleepRequested(number, 0), quiet=True)
        self._operate(ReleaseRequested)

    def _operate(self, make_event: Callable[[int], Event], *, quiet: bool = False) -> None:
        """Hand in a request and perform the workers' stages until it is answered."""
        control = self._require_control()
        if not self._calls.acquire(blocking=False):
            raise BusyError("another sleep, wake or release is in progress; wait for it, then call again")
        request = None
        try:
            request = control.submit(make_event)
            report: CycleReport = self._serve(request.future)
        except CheckpointExecutorError as error:
            if isinstance(error, FatalError):
                logger.error("%s", error)
            else:
                logger.warning("%s", error)
            if request is not None:
                self._log.error(type(request.event).__name__.removesuffix("Requested").lower(), error)
            raise
        finally:
            self._calls.release()
        for warning in report.warnings:
            logger.warning("%s", warning)
        if not quiet:
            self._log.report(report)
            if report.performed:
                logger.info("%s", _summary(report))

    def _serve(self, future: Future[Any]) -> Any:
        """Perform the workers' stages that the control thread hands over, until the future is answered."""
        assert self._link is not None
        work = self._link.work
        future.add_done_callback(lambda _: work.put(None))
        try:
            while (command := work.get()) is not None:
                self._perform(command)
        except BaseException:
            # An interrupt in the middle of a stage: its outcome is not known, and must not stay open.
            self._interrupted()
            raise
        try:
            return future.result()
        except FatalError:
            if self._control is not None:
                self._control.join(self._config.deadlines.reap_s)
            raise

    def _perform(self, command: StageCommand) -> None:
        """One stage on every rank, by an RPC whose replies are data of each rank."""
        control = self._require_control()
        stage = _STAGES[command.stage]
        call = StageCall(
            command=command,
            helper_pid=control.helper_pid,
            parent_pid=os.getpid(),
            parent_start_time=procfs.start_time(os.getpid()),
            endpoint=self._endpoint,
            suspended=self._communication == SUSPEND and self.world_size > 1,
            wakes_all=set(command.tags) >= control.sleeping,
            arena=self._uses_arena,
            local_memory=self._settings.release_local_memory,
            attribution=self._settings.attribution,
        )
        deferred = tuple(self._deferred) if command.stage == "worker_wake" else ()
        try:
            # A little longer than the control thread's deadline, which is the one that counts: it kills, and vLLM's
            # monitor then ends this wait.
            timeout_s = self._config.deadlines.seconds(stage.deadline) + 5
            replies = super().collective_rpc(
                perform,
                timeout=timeout_s,
                args=(self.worker_side, msgspec.msgpack.encode(call), deferred),
            )
        except Exception as error:  # noqa: BLE001 - the queue is out of step now: whatever it was, it is fatal
            self._reply_to_all(command, error_info(error))
            return
        if deferred:
            self._deferred.clear()
        for reply in replies:
            control.stage_replied(msgspec.msgpack.decode(reply, type=StageReply))

    def _reply_to_all(self, command: StageCommand, error: ErrorInfo) -> None:
        for rank in command.ranks:
            self._require_control().stage_replied(
                StageReply(command.cycle, command.index, command.stage, rank, 0.0, error=error)
            )

    def _interrupted(self) -> None:
        if self._control is not None:
            self._control.submit(ShutdownRequested).future.exception(2 * self._config.deadlines.reap_s)

    # -- calls to the workers --------------------------------------------------------------------

    def collective_rpc(  # EngineCore passes the first four by position
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **more: Any,
    ) -> Any:
        """Call the workers, unless they are checkpointed or the call needs memory that sleeps.

        Raises:
            AsleepError: it cannot be now; the engine is unharmed. FatalError: the executor failed earlier.
        """
        control = self._control
        if control is not None and (control.phase is not Phase.AWAKE or control.sleeping):
            batch = args[0] if method == "execute_model" and args else None
            tokens = 0 if batch is None else batch.total_num_scheduled_tokens
            if control.phase is Phase.CHECKPOINTED and (method in _HOUSEKEEPING or (batch is not None and not tokens)):
                if batch is not None:
                    self._deferred.append(batch)
                return self._answer(None if batch is None else EMPTY_MODEL_RUNNER_OUTPUT, non_block, unique_reply_rank)
            if control.phase is not Phase.AWAKE or tokens:
                # The rule is the coordinator's, and so are the words. In these phases it always refuses, unless the
                # phase has just changed.
                control.submit(lambda number: RpcRequested(number, execution=bool(tokens))).future.result()
        if timeout is None and method in _HOUSEKEEPING and control is not None:
            return self._keep_house(method, args, kwargs, non_block, unique_reply_rank, **more)
        try:
            return super().collective_rpc(method, timeout, args, kwargs, non_block, unique_reply_rank, **more)
        except RuntimeError as error:
            if control is not None and not non_block and unique_reply_rank is None and self.world_size > 1:
                self._realign(error)
            raise

    def _realign(self, failure: RuntimeError) -> None:
        """Skip what other ranks answer to a call that failed on one.

        vLLM stops reading at the first failure and takes those answers for the next call's (0.31 to 0.33): after a
        method that raised, the next sleep would get a wrong answer of the second rank.
        """
        if self.is_failed:
            return  # nobody answers any more
        mark = os.urandom(16)
        deadline_s = self._config.deadlines.worker_sleep_s
        until = time.monotonic() + deadline_s
        function = cloudpickle.dumps(_repeat)  # type: ignore[no-untyped-call]
        self.rpc_broadcast_mq.enqueue((function, (mark,), {}, None))
        try:
            for answers in self.response_mqs:
                while True:
                    _, answer = answers.dequeue(timeout=max(0.0, until - time.monotonic()))
                    if isinstance(answer, bytes) and answer == mark:
                        break
        except TimeoutError:
            what = f"after a call that failed ({failure}) the other ranks did not finish it within {deadline_s:g} s"
            raise self._kill_late(what, deadline_s) from failure

    def _kill_late(self, what: str, deadline_s: float) -> DeadlineError:
        """Kill the workers, whose answers are out of step from now on; the control thread ends the rest."""
        for worker in self.workers:
            worker.proc.kill()
        return DeadlineError(
            f"{what}. The workers and the helper were killed; build a new executor.", deadline_s=deadline_s
        )

    def _keep_house(self, method: Any, *more: Any, **options: Any) -> Any:
        """What EngineCore asks of the workers before a sleep, without a deadline: a stopped worker would keep the sleep
        from ever beginning. An answer that comes too late would be taken for that of the next call, so the workers go.
        """
        deadline_s = self._config.deadlines.worker_sleep_s
        try:
            return super().collective_rpc(method, deadline_s, *more, **options)
        except TimeoutError as error:
            what = f"no answer to {method!r} within {deadline_s:g} s: a worker is stopped or stuck"
            raise self._kill_late(what, deadline_s) from error

    def _answer(self, value: Any, non_block: bool, unique_reply_rank: int | None) -> Any:
        answer = [value] * self.world_size if unique_reply_rank is None else value
        if not non_block:
            return answer
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    def check_health(self) -> None:
        """Quiet while asleep, and never a call to a checkpointed worker.

        Raises:
            FatalError: the executor failed. RefusedError: it was shut down.
        """
        control = self._require_control()
        if control.phase in (Phase.FAILED, Phase.CLOSING, Phase.CLOSED):
            raise control.ended()
        if control.phase is Phase.AWAKE:
            super().check_health()

    # -- end -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the workers and the helper: in good order when awake, by SIGKILL when asleep or failed.

        Called by EngineCore, by vLLM's monitor thread after a death, and at interpreter exit.
        """
        if self._owner_pid not in (0, os.getpid()):
            return  # a forked child: they are not its workers
        control = self._control
        healthy = self._closing is None and not getattr(self, "is_failed", False)
        if control is not None and healthy and control.phase is Phase.AWAKE:
            # Said before vLLM closes the death pipes, so that the workers' exits are expected. Asleep it would kill at
            # once, which vLLM's monitor must not see before it knows of the shutdown.
            self._closing = control.submit(ShutdownRequested).future
        _keep_queues(self)
        super().shutdown()

    def _ensure_worker_termination(self, worker_procs: list[Any]) -> None:
        """Wait until they are gone. vLLM's own way takes 9 s with workers that are stuck in a CUDA call."""
        control = self._control
        if control is None:
            super()._ensure_worker_termination(worker_procs)
            return
        if control.is_current_thread:
            return
        reap_s = self._config.deadlines.reap_s
        if not getattr(self, "is_failed", False) and self._closing is None:
            self._closing = control.submit(ShutdownRequested).future
        # After a death the control thread has seen it too, or will in a moment: it kills the others and knows why.
        if not control.join(self._config.deadlines.shutdown_s + 2 * reap_s):
            logger.error("the control thread did not end in time")
        for process in worker_procs:
            process.kill()
        for process in worker_procs:
            process.join(reap_s)

    def _require_control(self) -> Control:
        if self._control is None or self._owner_pid != os.getpid():
            raise InvalidRequestError("the executor is not running in this process")
        return self._control


#: Of executors that were shut down, on a vLLM that cannot let go of them.
_kept_queues: list[Any] = []


def _keep_queues(executor: MultiprocExecutor) -> None:
    """Keep the message queues until the process ends, before vLLM 0.33.

    There the garbage collector ends their zmq contexts with sockets that still want to send: to workers that are dead
    that takes for ever, and EngineCore, which collects as it shuts down, would never end.
    """
    if not hasattr(MessageQueue, "_close_zmq_on_collect"):
        _kept_queues.append(getattr(executor, "rpc_broadcast_mq", None))
        _kept_queues.extend(getattr(executor, "response_mqs", None) or ())
        _kept_queues.extend(worker.worker_response_mq for worker in getattr(executor, "workers", None) or ())


def _summary(report: CycleReport) -> str:
    left = ", ".join(f"{used >> 20} MiB" for used in report.device_bytes_after)
    stages = ", ".join(f"{stage.name} {stage.wall_s:.3f}" for stage in report.stages)
    return (
        f"It took {report.wall_s:.3f} seconds to {report.operation}; in use on the device(s) now: {left or 'not read'} "
        f"(stages: {stages})"
    )


def _config_being_built() -> Any:
    """The VllmConfig whose construction is asking, if that is who asks.

    vLLM passes it to nothing of ours at that point, so it is taken from the caller's frame. If vLLM changes there,
    nothing is found, and the check happens in EngineCore alone.
    """
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, VllmConfig):
            return found
    return None


def _is_engine_process() -> bool:
    """Whether this is a process that vLLM started for EngineCore or a worker: vLLM rebuilds its configuration there."""
    name = multiprocessing.current_process().name
    return name.startswith(("EngineCore", "VllmWorker"))


def _repeat(_worker: object, mark: bytes) -> bytes:
    """In a worker: the answer that all answers to earlier calls are before."""
    return mark


def _use_faster_pinning() -> None:
    """Have torch's pinned allocator register memory with several threads, unless the user has chosen."""
    variable = next((name for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "PYTORCH_CUDA_ALLOC_CONF")
    chosen = os.environ.get(variable, "")
    if "pinned_" not in chosen:
        os.environ[variable] = f"{chosen},{_PINNED_SETTINGS}" if chosen else _PINNED_SETTINGS


def _end_with_the_front_end() -> None:
    """End this EngineCore when the process that started it is gone.

    vLLM's EngineCore does not notice a front end that was killed, and keeps its workers and their GPUs for ever
    (tried). The workers die with it: those that are starting by our hand, the others by the helper's.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    try:
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = poll()
        poller.register(descriptor, POLLIN)
        poller.poll()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, name="front-end-watch", daemon=True).start()

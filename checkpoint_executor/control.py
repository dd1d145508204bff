"""I/O. The control thread: feeds the coordinator with what happens, and performs what it says.

One thread owns the sockets, the children and the coordinator, so that none of them needs a lock. It lives as long as
the executor: children are spawned from it, and ``PR_SET_PDEATHSIG`` in them fires when it ends. Callers hand in
requests and wait for a future.

Every decision about order is the coordinator's. What is decided here is how: which bytes a command carries, what a
deadline class means in seconds, which exception a refusal becomes.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from select import POLLIN, poll
from typing import Any, NamedTuple, Protocol

import msgspec

from checkpoint_executor import preflight, processes
from checkpoint_executor.attribution import Observation, memory_steps
from checkpoint_executor.config import ExecutorConfig
from checkpoint_executor.coordinator import Coordinator, Phase, StageLists, Who
from checkpoint_executor.errors import (
    AsleepError,
    BusyError,
    DeadlineError,
    FatalError,
    InsufficientMemoryError,
    InvalidRequestError,
    ProcessDiedError,
    RefusedError,
    ResultTypeError,
    StartError,
    WorkerMethodError,
)
from checkpoint_executor.health import HealthRecord, HealthStatus, footprints
from checkpoint_executor.messages import (
    HELPER,
    Answer,
    ArmDeadline,
    CallReply,
    Cause,
    CauseKind,
    DeadlinePassed,
    DisarmDeadline,
    ErrorInfo,
    Event,
    Exit,
    Fail,
    Hello,
    Ignored,
    Instruction,
    KillEverything,
    Proceed,
    ProcessExited,
    Refusal,
    Refuse,
    ReleaseRequested,
    Replied,
    Role,
    RpcReplied,
    Send,
    ShutdownRequested,
    SleepRequested,
    StageCommand,
    StageReply,
    StartRequested,
    Target,
    WakeRequested,
    identity,
)
from checkpoint_executor.preflight import Finding, Severity
from checkpoint_executor.processes import WatchedProcess
from checkpoint_executor.report import CycleReport, MemoryStep, StageReport
from checkpoint_executor.tags import ALL_TAGS
from checkpoint_executor.transport import Transport, new_wake_descriptor
from checkpoint_executor.wire import Frame

__all__ = ["Control", "OutgoingCall", "Request", "WorkerLink", "call_error"]


#: How long an error of a worker's waits for the death that may be behind it.
_DYING_MS = 100

#: So that a stream of messages cannot keep requests, deaths and deadlines waiting.
_MESSAGES_A_TURN = 256


_log = logging.getLogger(__name__)


class WorkerLink(Protocol):
    """How a front door reaches its workers: our own over the transport, vLLM's over vLLM's queues."""

    def spawn(self, control: Control) -> Iterable[WatchedProcess]:
        """Start the workers (or take over running ones). Called once, on the control thread.

        Each is watched before the next is asked for, so that a failure in the middle leaves none behind.
        """
        ...

    def send_stage(self, control: Control, command: StageCommand) -> None:
        """Begin a stage on ``command.ranks``; the replies come back through :meth:`Control.stage_replied`."""
        ...

    def send_call(self, control: Control, request: Request) -> None:
        """Send a call to every rank."""
        ...

    def send_exit(self, control: Control) -> None:
        """Ask every worker to leave in good order."""
        ...


class OutgoingCall(NamedTuple):
    """What a call sends to every rank: a name for people, and the pickled method and arguments."""

    name: str
    frames: Sequence[Frame]


class Request:
    """What a caller asked for, and where the answer goes."""

    def __init__(self, number: int, event: Event, call: OutgoingCall | None = None) -> None:
        self.number = number
        self.event = event
        self.call = call
        self.future: Future[Any] = Future()
        #: Replies to a call, by rank.
        self.replies: dict[int, tuple[ErrorInfo | None, Sequence[Frame]]] = {}


class _Recorder:
    """Times and figures of the operation in progress."""

    def __init__(self, ranks: int) -> None:
        self.begun = time.monotonic()
        self._ranks = ranks
        self._observed: list[Observation] = []
        self._stages: list[tuple[str, float, float, dict[int, StageReply]]] = []

    def sent(self, stage: str) -> None:
        now = time.monotonic()
        self._stages.append((stage, now, now, {}))

    def replied(self, reply: StageReply) -> None:
        if self._stages and self._stages[-1][0] == reply.stage:
            name, begun, _, replies = self._stages[-1]
            replies[reply.rank] = reply
            self._stages[-1] = (name, begun, time.monotonic(), replies)

    def observed(self, observation: Observation) -> None:
        """A reading of one rank, with what the rank last said of itself."""
        self._observed.append(observation)

    def memory(self, operation: str) -> tuple[MemoryStep, ...]:
        return memory_steps(operation, self._observed)

    def stages(self) -> tuple[StageReport, ...]:
        return tuple(
            StageReport(
                name,
                ended - begun,
                tuple(replies[rank].elapsed_s for rank in sorted(replies)),
                tuple(replies[rank].figures for rank in sorted(replies))
                if any(reply.figures for reply in replies.values())
                else (),
            )
            for name, begun, ended, replies in self._stages
        )

    def readings(self) -> list[tuple[int, ...]]:
        """Bytes in use by rank, for each stage that read all of them, in order."""
        found = []
        for _, _, _, replies in self._stages:
            readings = [replies[rank].reading for rank in sorted(replies)]
            if len(readings) == self._ranks and all(readings):
                found.append(tuple(reading.used_bytes for reading in readings if reading is not None))
        return found


class Control:
    """The control thread.

    Args:
        config: the validated configuration. stages: the front door's plans. link: how its workers are reached.
        runtime_dir: the executor's private directory; removed at the end. helper_spec: the helper's command line.
        helper_environ: the helper's environment. on_change: called on the control thread after whatever changed the
            phase, the sleeping tags or the last report; it must return soon and raise nothing.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        stages: StageLists,
        link: WorkerLink,
        runtime_dir: Path,
        helper_spec: str,
        helper_environ: Mapping[str, str],
        on_change: Callable[[Control], None] | None = None,
    ) -> None:
        self.config = config
        self.runtime_dir = runtime_dir
        self._transport: Transport | None = None
        self._coordinator = Coordinator(
            config.tensor_parallel_size, stages, undo_before_checkpoint=config.undo_before_checkpoint
        )
        self._link = link
        self._helper_spec = helper_spec
        self._helper_environ = helper_environ
        self._on_change = on_change
        self._told: tuple[object, ...] = ()
        self._numbers = itertools.count(1)
        # Held while posting and while the inbox is closed for good: nothing is posted after its last look.
        # Reentrant: a finalizer that the garbage collector runs in the middle of it may post a shutdown.
        self._inbox_lock = threading.RLock()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = new_wake_descriptor()
        self._requests: dict[int, Request] = {}
        self._children: dict[int, WatchedProcess] = {}
        self._exited: set[int] = set()
        self._deadline: tuple[float, ArmDeadline, float] | None = None
        self._recorder = _Recorder(config.tensor_parallel_size)
        #: By rank, what a wake takes, bytes: of a tag (``device_weights``), of the communicator (``suspendable``),
        #: of kernels' local variables (``local_memory``).
        self._bytes_by_name: dict[int, dict[str, int]] = {}
        self._devices: dict[int, str] = {}
        #: By rank, what it last said it holds (attribution).
        self._ledgers: dict[int, dict[str, int]] = {}
        self._fatal: FatalError | None = None
        self.execution_methods: frozenset[str] = frozenset()
        self.last_report: CycleReport | None = None
        #: What the preflight found at the start, the worst first.
        self.findings: tuple[Finding, ...] = ()
        self.health = HealthRecord(Phase.NEW, time.time())
        self._thread = threading.Thread(target=self._run, name="checkpoint-executor", daemon=True)

    # -- for callers, from any thread ------------------------------------------------------------

    def start(self) -> Future[Any]:
        """Start the thread and the children."""
        request = self._new_request(StartRequested)
        self.post(lambda: self._start(request))
        self._thread.start()
        return request.future

    def submit(self, make_event: Callable[[int], Event], call: OutgoingCall | None = None) -> Request:
        """Hand in a request. Its future is answered, whatever happens."""
        request = self._new_request(make_event, call)
        if not self.post(lambda: self._begin(request)):
            request.future.set_exception(self.ended())
        return request

    def post(self, action: Callable[[], None]) -> bool:
        """Run something on the control thread. False if the thread has ended."""
        with self._inbox_lock:
            if self._wake < 0:
                return False
            self._inbox.put(action)
            os.eventfd_write(self._wake, 1)
        return True

    def event(self, event: Event) -> None:
        """Feed the coordinator from another thread."""
        self.post(lambda: self._feed(event))

    def stage_replied(self, reply: StageReply) -> None:
        """Hand in a worker's reply to a stage, from another thread."""
        self.post(lambda: self._on_stage_reply(reply))

    @property
    def phase(self) -> Phase:
        # A crash of the thread leaves the coordinator where it was.
        return self._coordinator.state.phase if self._fatal is None else Phase.FAILED

    @property
    def stage(self) -> str | None:
        """Name of the stage in progress."""
        stage = self._coordinator.state.stage
        return None if stage is None else stage.name

    @property
    def sleeping(self) -> frozenset[str]:
        return self._coordinator.state.sleeping

    @property
    def paused(self) -> bool:
        return self._coordinator.state.paused

    def status(self) -> HealthStatus:
        """The status, for any thread."""
        pids = {rank: child.pid for rank, child in self._children.copy().items() if child.role is Role.WORKER}
        return self.health.status(footprints(pids, self._devices, self._bytes_by_name, self.last_report))

    @property
    def fatal(self) -> FatalError | None:
        """The first cause, as a fresh exception, if the executor failed."""
        error = self._fatal
        return None if error is None else type(error)(error.message, **error.facts)

    @property
    def pids(self) -> dict[str, int]:
        """Pids by name, ``helper`` and ``worker 0`` on."""
        return {child.name: child.pid for child in self._children.values()}

    def ended(self) -> FatalError | RefusedError:
        """The error of a call that comes too late."""
        return self.fatal or RefusedError("the executor was shut down; build a new one")

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the control thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end. True if it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the loop --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport = Transport(self.runtime_dir, self.config.max_payload_bytes)
            self.transport.watch(self._wake)
            while self.phase not in (Phase.CLOSED, Phase.FAILED):
                self._turn()
        except BaseException as error:
            # It must not leave callers waiting or workers serving, whatever it was.
            self._crash(error)
            if not (isinstance(error, OSError) and isinstance(self._fatal, StartError)):
                raise  # a bug; what the machine has run out of, the caller is told
        finally:
            self._finish()

    def _turn(self) -> None:
        """Wait for the next thing, then take what came: requests, messages, deaths, the deadline."""
        timeout_s = None if self._deadline is None else self._deadline[0] - time.monotonic()
        ready = self.transport.poll(timeout_s)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while not self._inbox.empty():
            self._inbox.get()()
        for _ in range(_MESSAGES_A_TURN):
            if self._expired() or (received := self.transport.receive()) is None:
                break
            self._on_message(*received)
        for child in [child for child in self._children.values() if child.pidfd in ready]:
            if child.pid not in self._exited:
                self._on_exit(child)
        # Looked at in every turn, so that it holds against a stream of messages too.
        if self._expired() and self._deadline is not None:
            _, armed, _ = self._deadline
            self._feed(DeadlinePassed(armed.cycle, armed.index))

    def _expired(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline[0]

    def _feed(self, event: Event) -> None:
        for instruction in self._coordinator.handle(event):
            self._perform(instruction)
        self._tell()

    def _tell(self) -> None:
        """Tell the observer, before the caller has its answer and looks."""
        self.health.phase_is(self.phase, self.sleeping, self.paused, time.time())
        if self._on_change is not None:
            now = (self.phase, self.sleeping, self.paused, self.last_report)
            if now != self._told:
                self._told = now
                self._on_change(self)

    def _begin(self, request: Request) -> None:
        self._requests[request.number] = request
        if self._fatal is not None:
            return  # answered at the end
        if self._coordinator.state.operation is None:
            self._recorder = _Recorder(self.config.tensor_parallel_size)
        self._feed(request.event)

    def _start(self, request: Request) -> None:
        self._requests[request.number] = request
        if self._fatal is not None:
            return  # answered at the end
        self._adopt(processes.spawn(Role.HELPER, HELPER, self._helper_spec, self._helper_environ))
        for worker in self._link.spawn(self):
            self._adopt(worker)
        self._begin(request)

    def _adopt(self, child: WatchedProcess) -> None:
        self._children[child.rank] = child
        self.transport.watch(child.pidfd)

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the control thread has not begun")
        return self._transport

    @property
    def helper_pid(self) -> int:
        return self._children[HELPER].pid

    # -- what happens ----------------------------------------------------------------------------

    def _on_message(self, sender: bytes, message: object, frames: Sequence[Frame]) -> None:
        match message:
            case Hello(role, rank, pid, start_time, error):
                child = self._children.get(rank)
                known = child is not None and (child.role, child.pid, child.start_time) == (role, pid, start_time)
                state = self._coordinator.state
                if known and sender == identity(role, rank) and state.stage is not None and state.stage.silent:
                    self._feed(Replied(state.cycle, state.index, rank, error))
            case StageReply() if self._is_from(sender, message):
                self._on_stage_reply(message)
            case CallReply(call_id, rank, error) if sender == identity(Role.WORKER, rank):
                request = self._requests.get(call_id)
                if request is not None:
                    request.replies[rank] = (error, frames)
                self._feed(RpcReplied(call_id, rank))
            case _:
                pass  # nobody can speak for another: dropped, and the deadline holds

    def _is_from(self, sender: bytes, reply: StageReply) -> bool:
        """Whether the stage in progress is the one named, and the sender is who performs it for that rank."""
        stage = self._coordinator.state.stage
        if stage is None or stage.name != reply.stage:
            return False
        if sender == identity(Role.HELPER, HELPER):
            return stage.who in (Who.HELPER, Who.HELPER_ITSELF)
        return stage.who is Who.WORKERS and sender == identity(Role.WORKER, reply.rank)

    def _on_stage_reply(self, reply: StageReply) -> None:
        if reply.error is not None and (dead := self._death_behind(reply)) is not None:
            # The death is the cause, the error only the consequence.
            if dead.pid not in self._exited:
                self._on_exit(dead)
            return
        state = self._coordinator.state
        if (reply.cycle, reply.index) == (state.cycle, state.index):
            self._recorder.replied(reply)
            self._remember(reply)
            if self.config.attribution:
                self._attribute(reply)
        self._feed(Replied(reply.cycle, reply.index, reply.rank, reply.error, reply.state_before, reply.state_after))

    def _death_behind(self, reply: StageReply) -> WatchedProcess | None:
        """The child whose death explains an error: the rank's own, or that of a worker it was waiting for.

        A dying process closes its sockets before it is a zombie, so that its peers can be faster than its pidfd.
        """
        stage = self._coordinator.state.stage
        if stage is None or stage.who is not Who.WORKERS:
            own = self._children.get(reply.rank)
            return own if own is not None and own.poll_exit() is not None else None
        workers = [child for child in self._children.values() if child.role is Role.WORKER]
        poller = poll()
        for child in workers:
            poller.register(child.pidfd, POLLIN)
        poller.poll(_DYING_MS)
        return next((child for child in workers if child.poll_exit() is not None), None)

    def _remember(self, reply: StageReply) -> None:
        """Keep what later commands need: devices, methods, and bytes by tag."""
        match reply.stage:
            case "build" | "introduce":
                self._devices[reply.rank] = reply.device or ""
                self.execution_methods |= frozenset(reply.execution_methods)
            case "register":
                self.findings += reply.findings
                for finding in reply.findings:
                    if finding.severity is Severity.WARNING:
                        _log.warning("preflight:\n%s", preflight.explain([finding]))
            case (
                "sleep_allocator"
                | "release_kv_cache"
                | "suspend_communicators"
                | "prepare_workspaces"
                | "worker_sleep"
                | "worker_discard"
            ):
                self._bytes_by_name.setdefault(reply.rank, {}).update(reply.figures)

    def _attribute(self, reply: StageReply) -> None:
        """Put a reading beside what the rank last said of itself."""
        if reply.ledger:
            self._ledgers[reply.rank] = reply.ledger
        if reply.reading is not None and reply.stage.startswith("measure_"):
            step = reply.stage.removeprefix("measure_")
            ledger = self._ledgers.get(reply.rank, {})
            self._recorder.observed(
                Observation(step, reply.rank, reply.reading.used_bytes, ledger=ledger, outside=reply.figures)
            )

    def _on_exit(self, child: WatchedProcess) -> None:
        status = child.poll_exit()
        self.transport.unwatch(child.pidfd)
        self._exited.add(child.pid)
        self._feed(ProcessExited(child.role, child.rank, status))

    # -- what to do ------------------------------------------------------------------------------

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Send():
                self._send(instruction)
            case ArmDeadline(_, _, deadline):
                stage = self._coordinator.state.stage
                wait_s = self._memory_wait_s() if stage is not None and stage.name == "admit_wake" else 0.0
                seconds = self.config.deadlines.seconds(deadline) + wait_s
                self._deadline = (time.monotonic() + seconds, instruction, seconds)
            case DisarmDeadline():
                self._deadline = None
            case Answer():
                self._answer(instruction)
            case Refuse(number):
                self._tell()
                self.health.refused(instruction.refusal, instruction.message, time.time())
                self._requests.pop(number).future.set_exception(self._refusal(instruction))
            case Fail(number):
                self._tell()
                self._requests.pop(number).future.set_exception(self.ended())
            case Proceed(number):
                self._link.send_call(self, self._requests[number])
            case KillEverything(cause):
                self._kill_everything(cause)
            case Ignored():
                pass

    def _send(self, send: Send) -> None:
        if send.stage == "exit":
            if send.to_helper:
                self._send_to_helper(Exit())
            else:
                self._link.send_exit(self)
            return
        self._recorder.sent(send.stage)
        command = StageCommand(send.cycle, send.index, send.stage, send.ranks, tags=send.tags, restoring=send.restoring)
        command = msgspec.structs.replace(command, **self._arguments(send))
        if send.to_helper:
            self._send_to_helper(command)
        else:
            self._link.send_stage(self, command)

    def _arguments(self, send: Send) -> dict[str, Any]:
        """What a stage's command carries beside the tags."""
        config = self.config
        match send.stage:
            case "register":
                return {"targets": self._targets()}
            case "lock":
                return {"timeout_ms": int(config.deadlines.driver_lock_s * 1000)}
            case "admit_sleep":
                return {
                    # Without local memory: it may have grown since the first reading, which this is held against.
                    "needed_bytes": self._bytes_of(send, ["suspendable"]),
                    "margin_bytes": config.host_margin_bytes,
                    # The driver moves about 2 GB/s (measured); half of that is counted on.
                    "limit_bytes": int(config.deadlines.driver_s * 1e9),
                }
            case "admit_wake":
                untagged = ["local_memory"] if send.restoring else []
                # An undone sleep of vLLM's leaves them suspended although nothing is to be restored.
                if send.restoring or self._coordinator.state.sleeping == frozenset(ALL_TAGS):
                    untagged.append("suspendable")
                return {
                    "needed_bytes": self._bytes_of(send, untagged),
                    "margin_bytes": config.wake_margin_bytes,
                    # Below the stage's own deadline, so that a wait that is too long is a refusal that can be retried.
                    "wait_s": config.deadlines.driver_lock_s,
                    "memory_wait_s": self._memory_wait_s(),
                }
            case _:
                return {}

    def _memory_wait_s(self) -> float:
        """How long the wake in progress may wait for room."""
        request = self._requests.get(self._coordinator.state.request or 0)
        return request.event.wait_for_memory_s if request and isinstance(request.event, WakeRequested) else 0.0

    def _send_to_helper(self, message: StageCommand | Exit) -> None:
        try:
            self.transport.send(identity(Role.HELPER, HELPER), message)
        except ConnectionError:
            pass  # it is dying: its pidfd says so in this turn or the next, and the deadline holds otherwise

    def _bytes_of(self, send: Send, untagged: Sequence[str]) -> tuple[int, ...]:
        """By rank, the device bytes of the stage's tags, and of these kinds that have none."""
        names = [*(f"device_{tag}" for tag in send.tags), *untagged]
        return tuple(sum(self._bytes_by_name.get(rank, {}).get(name, 0) for name in names) for rank in send.ranks)

    def _targets(self) -> tuple[Target, ...]:
        return tuple(
            Target(rank, child.pid, child.start_time, self._devices.get(rank, ""))
            for rank, child in sorted(self._children.items())
            if child.role is Role.WORKER
        )

    def _answer(self, answer: Answer) -> None:
        request = self._requests.pop(answer.request)
        state = self._coordinator.state
        if request.replies:
            request.future.set_result(request.replies)
            return
        readings = self._recorder.readings()
        operation = _operation_name(request.event)
        report = CycleReport(
            operation=operation,
            performed=answer.performed,
            wall_s=time.monotonic() - self._recorder.begun,
            stages=self._recorder.stages() if answer.performed else (),
            device_bytes_before=readings[0] if readings else (),
            device_bytes_after=readings[-1] if len(readings) > 1 else (),
            sleeping=tuple(sorted(state.sleeping)),
            warnings=answer.warnings,
            memory=self._recorder.memory(operation) if answer.performed else (),
        )
        if answer.performed:
            self.last_report = report
        self._tell()
        self.health.operated(report, time.time())
        request.future.set_result(report)

    def _refusal(self, refuse: Refuse) -> RefusedError:
        kind = _REFUSALS[refuse.refusal]
        facts: dict[str, Any] = {}
        if refuse.stage is not None:
            facts["stage"] = refuse.stage
        if refuse.errors:
            rank, error = refuse.errors[0]
            facts |= {"rank": rank, "pid": self._children[rank].pid, "code": error.code, "code_name": error.code_name}
        if refuse.refusal is Refusal.NO_MEMORY:
            short = [error for _, error in refuse.errors if error.device is not None]
            facts["missing_bytes"] = {error.device: error.missing_bytes or 0 for error in short}
            facts["holders"] = {error.device: error.holders for error in short}
        return kind(refuse.message, **facts)

    # -- failure and end -------------------------------------------------------------------------

    def _kill_everything(self, cause: Cause) -> None:
        elapsed_s = time.monotonic() - self._recorder.begun
        processes.kill_all(self._children.values())
        survivors = processes.reap(self._children.values(), self.config.deadlines.reap_s)
        if cause.kind is not CauseKind.SHUTDOWN:
            self._fatal = self._fatal_error(cause, elapsed_s, survivors)
            self.health.failed(cause.kind, cause.stage, str(self._fatal), time.time())

    def _fatal_error(self, cause: Cause, elapsed_s: float, survivors: tuple[int, ...]) -> FatalError:
        child = self._children.get(cause.rank) if cause.rank is not None else None
        if cause.kind is CauseKind.DEADLINE and cause.pending:
            child = self._children.get(cause.pending[0])
        error = cause.error
        during = f" in stage {cause.stage!r}" if cause.stage else self._during_calls()
        deadline_s = None
        kind: type[FatalError] = FatalError
        match cause.kind:
            case CauseKind.DEADLINE:
                assert cause.deadline is not None
                kind = DeadlineError
                deadline_s = self.config.deadlines.seconds(cause.deadline)
                who = ", ".join(self._children[rank].name for rank in cause.pending if rank in self._children)
                what = f"no answer{during} within {deadline_s:g} s from {who or 'the children'}"
            case CauseKind.PROCESS_EXIT:
                kind = ProcessDiedError
                name = child.name if child else cause.role
                what = f"{name} (pid {child.pid if child else '?'}) {_exit_text(cause.exit_status)}{during}"
            case _:
                name = "helper" if cause.rank == HELPER else f"rank {cause.rank}"
                what = f"{name} failed{during}: {error.message if error else 'unknown error'}"
        if cause.undoing is not None:
            what += f". It happened while undoing: {cause.undoing.message}"
        traceback_text = (
            f"\n\n{error.traceback_text}" if error and error.traceback_text and error.kind != "driver" else ""
        )
        end = "What had been started was killed" if cause.starting else "The workers and the helper were killed"
        if survivors:
            end += f", but pids {survivors} are still there"
        if cause.starting:
            kind = StartError
            what = f"the executor could not start: {what}"
        rank = child.rank if child else cause.rank
        facts: dict[str, Any] = {
            "rank": None if rank == HELPER else rank,
            "pid": child.pid if child else None,
            "role": str(child.role) if child else cause.role,
            "stage": cause.stage,
            "code": error.code if error else None,
            "code_name": error.code_name if error else None,
            "state_before": cause.state_before,
            "state_after": cause.state_after,
            "deadline_s": deadline_s,
            "elapsed_s": elapsed_s,
            "story": tuple(self._coordinator.story),
            "survivors": survivors,
        }
        if kind is ProcessDiedError:
            facts["exit_status"] = cause.exit_status
        return kind(f"{what.removesuffix('.')}. {end}; build a new executor.{traceback_text}", **facts)

    def _during_calls(self) -> str:
        """What the workers were busy with, for a message: a method that ends its process is hard to find otherwise."""
        names = dict.fromkeys(repr(request.call.name) for request in self._requests.values() if request.call)
        return f" during the call of {', '.join(names)}" if names else ""

    def _crash(self, error: BaseException) -> None:
        processes.kill_all(self._children.values())
        what = f"{type(error).__name__}: {error}"
        story = tuple(self._coordinator.story)
        if self._fatal is not None:
            pass  # the first cause stands
        elif self._coordinator.state.phase is Phase.NEW:
            self._fatal = StartError(
                f"the executor could not start: {what}. What had been started was killed", story=story
            )
        else:
            self._fatal = FatalError(
                f"the control thread failed: {what}. The workers and the helper were killed; build a new executor",
                story=story,
            )

    def _finish(self) -> None:
        """The end of the thread: nothing of the executor is left, and nobody is left waiting."""
        if self._fatal is not None:
            self.health.failed("crash", None, str(self._fatal), time.time())  # unless there is a cause already
        self._tell()
        processes.kill_all(self._children.values())
        processes.reap(self._children.values(), self.config.deadlines.reap_s)
        with self._inbox_lock:
            wake, self._wake = self._wake, -1
        os.close(wake)
        while not self._inbox.empty():
            self._inbox.get()()
        for request in self._requests.values():
            if not request.future.done():
                request.future.set_exception(self.ended())
        self._requests.clear()
        if self._transport is not None:
            self._transport.close()
        for child in self._children.values():
            child.close()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _new_request(self, make_event: Callable[[int], Event], call: OutgoingCall | None = None) -> Request:
        number = next(self._numbers)
        return Request(number, make_event(number), call)


def call_error(rank: int, pid: int | None, error: ErrorInfo) -> WorkerMethodError:
    """The exception for a worker method that failed."""
    if error.kind == "result_type":
        return ResultTypeError(
            f"rank {rank}: {error.message}. The executor is unharmed", rank=rank, pid=pid, error_type=error.error_type
        )
    return WorkerMethodError(
        f"rank {rank} raised {error.error_type}: {error.message}. The executor is unharmed.\n\n{error.traceback_text}",
        rank=rank,
        pid=pid,
        error_type=error.error_type,
        traceback_text=error.traceback_text,
    )


def _exit_text(status: int | None) -> str:
    if status is None:
        return "died"
    return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"


_REFUSALS: dict[Refusal, type[RefusedError]] = {
    Refusal.INVALID: InvalidRequestError,
    Refusal.BUSY: BusyError,
    Refusal.ASLEEP: AsleepError,
    Refusal.NO_MEMORY: InsufficientMemoryError,
    Refusal.UNDONE: RefusedError,
    Refusal.CLOSED: RefusedError,
}


def _operation_name(event: Event) -> str:
    """What a report calls it."""
    match event:
        case SleepRequested(_, level):
            return "sleep" if level else "pause"
        case WakeRequested():
            return "wake"
        case ReleaseRequested():
            return "release"
        case ShutdownRequested():
            return "shutdown"
        case _:
            return "start"

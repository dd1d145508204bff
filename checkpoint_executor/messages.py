"""PURE. The nouns: what goes over the wire, and what goes into and comes out of the coordinator.

Three groups, kept apart because they are read by different people:

- *wire messages* travel between the parent and its children (``wire.py`` turns them into frames);
- *events* go into :class:`~checkpoint_executor.coordinator.Coordinator`;
- *instructions* come out of it, for the I/O layer to perform.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.preflight import Finding

__all__ = [
    "HELPER",
    "Abandon",
    "Answer",
    "ArmDeadline",
    "BuildWorker",
    "Call",
    "CallReply",
    "Cause",
    "CauseKind",
    "DeadlineClass",
    "DeadlinePassed",
    "DeviceReading",
    "DisarmDeadline",
    "ErrorInfo",
    "Event",
    "Exit",
    "Fail",
    "Hello",
    "Ignored",
    "Instruction",
    "KillEverything",
    "Proceed",
    "ProcessExited",
    "Refusal",
    "Refuse",
    "ReleaseRequested",
    "Replied",
    "Role",
    "RpcReplied",
    "RpcRequested",
    "Send",
    "ShutdownRequested",
    "SleepRequested",
    "StageCommand",
    "StageReply",
    "StartRequested",
    "Target",
    "ToChild",
    "ToParent",
    "WakeRequested",
    "identity",
]

#: The helper's place where a rank is asked for (ranks count from 0).
HELPER = -1


class Role(StrEnum):
    WORKER = "worker"
    HELPER = "helper"


def identity(role: Role, rank: int) -> bytes:
    """A child's name on the wire (its ROUTER identity)."""
    return f"{role}:{rank}".encode()


# ------------------------------------------------------------------------------------------------
# Wire messages: parent -> child
# ------------------------------------------------------------------------------------------------


class Target(Struct, frozen=True, forbid_unknown_fields=True):
    """A process the helper may act on.

    A pid alone is never enough: it can be reused. ``start_time`` is field 22 of ``/proc/PID/stat``
    (clock ticks since boot), which together with the pid names one process for good.
    ``device`` is the GPU's UUID, or the software device's name.
    """

    rank: int
    pid: int
    start_time: int
    device: str


class StageCommand(Struct, frozen=True, tag="stage", forbid_unknown_fields=True):
    """Do one stage for these ranks. The helper gets all ranks in one command, a worker its own."""

    cycle: int
    index: int
    stage: str
    ranks: tuple[int, ...]
    #: Tags to wake, for the stages that wake memory or make room for it.
    tags: tuple[str, ...] = ()
    #: Driver's own lock timeout, milliseconds.
    timeout_ms: int = 0
    #: By rank, bytes that waking ``tags`` will take on the rank's device, or that their sleep freed (admission).
    needed_bytes: tuple[int, ...] = ()
    #: The most the driver can move within its deadline, bytes (admission of a sleep).
    limit_bytes: int = 0
    #: How long admission may wait for device memory to become free, seconds.
    memory_wait_s: float = 0.0
    #: Free bytes that admission asks for beyond what is needed.
    margin_bytes: int = 0
    #: How long admission may wait for another executor's wake on the device, seconds.
    wait_s: float = 0.0
    #: Whether the processes are checkpointed, so that the driver's own bytes come back too (admission).
    restoring: bool = False
    #: Processes to register (the ``register`` stage).
    targets: tuple[Target, ...] = ()


class BuildWorker(Struct, frozen=True, tag="build", forbid_unknown_fields=True):
    """Build the user's Worker. Payload: the pickled (class, args, kwargs)."""

    cycle: int
    index: int


class Call(Struct, frozen=True, tag="call", forbid_unknown_fields=True):
    """Call a method of the worker. Payload: pickled (method name or callable, args, kwargs)."""

    call_id: int
    name: str


class Exit(Struct, frozen=True, tag="exit", forbid_unknown_fields=True):
    """Leave in good order: the executor is shutting down and nothing is asleep."""


ToChild = StageCommand | BuildWorker | Call | Exit


# ------------------------------------------------------------------------------------------------
# Wire messages: child -> parent
# ------------------------------------------------------------------------------------------------


class ErrorInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """An error as data, as it crosses a process boundary."""

    kind: str  #: ``"driver"``, ``"refused"``, ``"exception"`` or ``"result_type"``.
    message: str
    error_type: str = ""
    traceback_text: str = ""
    code: int | None = None
    code_name: str | None = None
    #: Admission: what is missing on the device, and who holds memory there (pid, bytes).
    missing_bytes: int | None = None
    device: str | None = None
    holders: tuple[tuple[int, int], ...] = ()


class DeviceReading(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of one rank's device, read from outside the workers (NVML, or the software device's ledger)."""

    device: str
    used_bytes: int
    total_bytes: int


class Hello(Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """First message of every child."""

    role: Role
    rank: int  #: ``HELPER`` for the helper.
    pid: int
    start_time: int
    #: Why it is of no use: the helper could not open the driver.
    error: ErrorInfo | None = None


class StageReply(Struct, frozen=True, tag="stage_reply", forbid_unknown_fields=True):
    """What became of one stage on one rank."""

    cycle: int
    index: int
    stage: str
    rank: int
    elapsed_s: float
    error: ErrorInfo | None = None
    state_before: ProcessState | None = None
    state_after: ProcessState | None = None
    #: Bytes by name, e.g. ``{"weights": 1024}`` from ``sleep_allocator``.
    figures: dict[str, int] = {}
    reading: DeviceReading | None = None
    #: With attribution, from a worker: the bytes it knows of after the stage, by kind (``attribution.py``).
    ledger: dict[str, int] = {}
    #: From ``build``: the GPU the worker opened, and its methods that are refused while anything sleeps.
    device: str | None = None
    execution_methods: tuple[str, ...] = ()
    #: From ``register``, with one rank's reply: what the preflight found.
    findings: tuple[Finding, ...] = ()


class CallReply(Struct, frozen=True, tag="call_reply", forbid_unknown_fields=True):
    """Result of a :class:`Call`. Payload: the result as ``results.py`` encodes it, unless ``error``."""

    call_id: int
    rank: int
    error: ErrorInfo | None = None


ToParent = Hello | StageReply | CallReply


# ------------------------------------------------------------------------------------------------
# Events into the coordinator
# ------------------------------------------------------------------------------------------------


class StartRequested(Struct, frozen=True):
    request: int


class SleepRequested(Struct, frozen=True):
    request: int
    level: int = 1


class WakeRequested(Struct, frozen=True):
    request: int
    tags: tuple[str, ...] | None = None
    #: How long admission may wait for room; decides nothing about order.
    wait_for_memory_s: float = 0.0


class ReleaseRequested(Struct, frozen=True):
    request: int


class RpcRequested(Struct, frozen=True):
    """A worker call is wanted. ``execution``: it uses all of the memory (it is refused while any tag sleeps)."""

    request: int
    execution: bool = False


class RpcReplied(Struct, frozen=True):
    request: int
    rank: int


class Abandon(Struct, frozen=True):
    """The caller of an RPC stopped waiting. The workers have not."""

    request: int


class ShutdownRequested(Struct, frozen=True):
    request: int


class Replied(Struct, frozen=True):
    """A stage's reply, reduced to what the rules depend on."""

    cycle: int
    index: int
    rank: int
    error: ErrorInfo | None = None
    state_before: ProcessState | None = None
    state_after: ProcessState | None = None


class ProcessExited(Struct, frozen=True):
    role: Role
    rank: int
    exit_status: int | None = None


class DeadlinePassed(Struct, frozen=True):
    cycle: int
    index: int


Event = (
    StartRequested
    | SleepRequested
    | WakeRequested
    | ReleaseRequested
    | RpcRequested
    | RpcReplied
    | Abandon
    | ShutdownRequested
    | Replied
    | ProcessExited
    | DeadlinePassed
)


# ------------------------------------------------------------------------------------------------
# Instructions out of the coordinator
# ------------------------------------------------------------------------------------------------


class DeadlineClass(StrEnum):
    """Which of the configured deadlines holds; ``config.Deadlines`` has the seconds."""

    START = "start"
    DRIVER = "driver"
    WORKER_SLEEP = "worker_sleep"
    WORKER_WAKE = "worker_wake"
    HOOK = "hook"
    SHUTDOWN = "shutdown"


class CauseKind(StrEnum):
    STAGE_ERROR = "stage_error"
    DEADLINE = "deadline"
    PROCESS_EXIT = "process_exit"
    SHUTDOWN = "shutdown"


class Cause(Struct, frozen=True):
    """Why everything was killed, as far as the rules know it; the I/O layer adds pids and seconds."""

    kind: CauseKind
    starting: bool = False
    stage: str | None = None
    role: Role | None = None
    rank: int | None = None
    exit_status: int | None = None
    error: ErrorInfo | None = None
    state_before: ProcessState | None = None
    state_after: ProcessState | None = None
    deadline: DeadlineClass | None = None
    #: Ranks that had not answered (a deadline), ``HELPER`` included.
    pending: tuple[int, ...] = ()
    #: The error that was being undone when this happened.
    undoing: ErrorInfo | None = None


class Send(Struct, frozen=True):
    """Send a stage's command to these ranks (``HELPER`` stands for the helper itself)."""

    cycle: int
    index: int
    stage: str
    to_helper: bool
    ranks: tuple[int, ...]
    tags: tuple[str, ...] = ()
    restoring: bool = False


class ArmDeadline(Struct, frozen=True):
    """Replace the deadline, if any, by this one, counted from now."""

    cycle: int
    index: int
    deadline: DeadlineClass


class DisarmDeadline(Struct, frozen=True):
    pass


class Answer(Struct, frozen=True):
    """The request is done. ``performed`` is False for an acknowledged no-op; warnings say why."""

    request: int
    performed: bool = True
    warnings: tuple[str, ...] = ()


class Refusal(StrEnum):
    """Why a request is refused; each has its exception type."""

    INVALID = "invalid"
    BUSY = "busy"
    ASLEEP = "asleep"
    NO_MEMORY = "no_memory"
    UNDONE = "undone"
    CLOSED = "closed"


class Refuse(Struct, frozen=True):
    """The request was not carried out, and the executor is unharmed."""

    request: int
    refusal: Refusal
    message: str
    #: The replies that led to it, by rank.
    errors: tuple[tuple[int, ErrorInfo], ...] = ()
    stage: str | None = None


class Proceed(Struct, frozen=True):
    """The RPC may go to every rank."""

    request: int


class Fail(Struct, frozen=True):
    """The request ends with the fatal error."""

    request: int


class KillEverything(Struct, frozen=True):
    """SIGKILL every worker and the helper, reap with a bound. Nothing is sent after this."""

    cause: Cause


class Ignored(Struct, frozen=True):
    """The event changed nothing; ``why`` is for the log."""

    why: str


Instruction = Send | ArmDeadline | DisarmDeadline | Answer | Refuse | Proceed | Fail | KillEverything | Ignored

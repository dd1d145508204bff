"""PURE. Every ordering rule of the executor: which stage follows which, and what a failure means.

Rules for editors of this file:

1. All ordering lives here. If another module needs to know what comes next, this file is missing a rule.
2. No I/O: no sockets, pids, clocks or threads. Events in, instructions out; every outcome of an instruction
   comes back as an event.
3. The stages are data (:data:`OWN_STAGES`, :data:`VLLM_STAGES`). A new front door is a new pair of lists.
4. An event that means nothing in the present state changes nothing and says so (:class:`Ignored`).
5. ``tests/unit/test_coordinator_walk.py`` visits every reachable state. If it became slow, a field of
   :class:`State` does not belong there.

Theory of operation. An operation (start, sleep, release, wake, undo) is a *plan*: a tuple of stages. One stage is
in progress at a time; it ends when each of its ranks has answered, which makes "all ranks are locked before any is
checkpointed" a property of the loop and not of a list of checks. A stage's ``on_error`` says what an error in it
means. The point of no return is the first ``checkpoint`` sent: only stages before it can be undone.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from checkpoint_executor.driver_states import EXPECTED_STATE, ProcessState, Verb
from checkpoint_executor.messages import (
    HELPER,
    Abandon,
    Answer,
    ArmDeadline,
    Cause,
    CauseKind,
    DeadlineClass,
    DeadlinePassed,
    DisarmDeadline,
    ErrorInfo,
    Event,
    Fail,
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
    RpcRequested,
    Send,
    ShutdownRequested,
    SleepRequested,
    StartRequested,
    WakeRequested,
)
from checkpoint_executor.tags import ALL_TAGS, KV_CACHE, WEIGHTS

__all__ = [
    "OWN_STAGES",
    "VLLM_STAGES",
    "Coordinator",
    "OnError",
    "Operation",
    "Phase",
    "Stage",
    "StageLists",
    "State",
    "Who",
    "attributed",
]


class Phase(StrEnum):
    NEW = "new"
    STARTING = "starting"
    AWAKE = "awake"  #: the processes run; some tags may be asleep, and the scheduler paused
    SUSPENDING = "suspending"
    CHECKPOINTED = "checkpointed"
    RESUMING = "resuming"
    UNDOING = "undoing"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


#: Phases in which a plan is being carried out.
WORKING = frozenset({Phase.STARTING, Phase.SUSPENDING, Phase.RESUMING, Phase.UNDOING})


class Operation(StrEnum):
    START = "start"
    SLEEP = "sleep"
    RELEASE = "release"
    WAKE = "wake"
    SHUTDOWN = "shutdown"


class Who(StrEnum):
    """Who performs a stage, and hence who must answer."""

    WORKERS = "workers"  #: each worker
    HELPER = "helper"  #: the helper, once for each rank
    HELPER_ITSELF = "helper_itself"  #: the helper, once
    EVERYONE = "everyone"  #: each worker and the helper


class OnError(StrEnum):
    """What an error reply to a stage means."""

    FATAL = "fatal"  #: something is uncertain: kill at once
    UNDO = "undo"  #: wait for all ranks, then undo the stages before it
    WITHDRAW = "withdraw"  #: the stage itself touched nothing: wait for all ranks, then undo the stages before it
    REFUSE = "refuse"  #: nothing was touched yet: wait for all ranks, go back to where the operation began
    IGNORE = "ignore"  #: a reading for the report; go on without it


class Stage(Struct, frozen=True):
    """One stage of a plan.

    ``undone_by`` are the stages that mirror it, in the order in which they run. ``silent`` stages are begun by
    the children themselves (they connect): nothing is sent.
    """

    name: str
    who: Who
    deadline: DeadlineClass
    on_error: OnError = OnError.FATAL
    undone_by: tuple[Stage, ...] = ()
    silent: bool = False


class StageLists(Struct, frozen=True):
    """The plans of one front door.

    ``undo_wakes``: whether undoing a failed sleep makes memory resident again (True), or leaves an ordinary
    allocator sleep for the caller to end (False).
    """

    start: tuple[Stage, ...]
    down: tuple[Stage, ...]
    up: tuple[Stage, ...]
    release: tuple[Stage, ...]
    #: A wake that needs no restore: the rest of a partial wake, or after a release.
    wake: tuple[Stage, ...]
    undo_wakes: bool = True


_SLEEP, _WAKE, _DRIVER, _HOOK = (
    DeadlineClass.WORKER_SLEEP,
    DeadlineClass.WORKER_WAKE,
    DeadlineClass.DRIVER,
    DeadlineClass.HOOK,
)

#: Consecutive stages of these classes share one deadline: the seed's 120 s cover the whole worker sleep and the
#: whole worker wake, while each driver stage has 30 s of its own.
SHARED_DEADLINES = frozenset({_SLEEP, _WAKE, DeadlineClass.START})

UNLOCK = Stage("unlock", Who.HELPER, _DRIVER)
RESTORE_WORKSPACES = Stage("restore_workspaces", Who.WORKERS, _HOOK)
RESUME_COMMUNICATORS = Stage("resume_communicators", Who.WORKERS, _WAKE)
CONFIRM_RESUMED = Stage("confirm_resumed", Who.WORKERS, _WAKE)
WAKE_ALLOCATOR = Stage("wake_allocator", Who.WORKERS, _WAKE)
WORKER_WAKE = Stage("worker_wake", Who.WORKERS, _WAKE)

PREPARE_WORKSPACES = Stage("prepare_workspaces", Who.WORKERS, _HOOK, undone_by=(RESTORE_WORKSPACES,))
LOCK = Stage("lock", Who.HELPER, _DRIVER, OnError.UNDO, undone_by=(UNLOCK,))
CHECKPOINT = Stage("checkpoint", Who.HELPER, _DRIVER)
RESTORE = Stage("restore", Who.HELPER, _DRIVER)
ADMIT_SLEEP = Stage("admit_sleep", Who.HELPER, _DRIVER, OnError.WITHDRAW)
ADMIT_WAKE = Stage("admit_wake", Who.HELPER, _DRIVER, OnError.REFUSE)


def measure(when: str, deadline: DeadlineClass = _DRIVER) -> Stage:
    """A reading of the devices for the report. An error in it does not fail the operation."""
    return Stage(f"measure_{when}", Who.HELPER, deadline, OnError.IGNORE)


#: With attribution: the workers tell what they hold, before anything is touched. Later stages of theirs say it anyway.
ACCOUNT = Stage("account", Who.WORKERS, _SLEEP, OnError.IGNORE)


REGISTER = Stage("register", Who.HELPER, DeadlineClass.START)

#: Our own workers: every part of the worker's sleep is a stage of its own.
OWN_STAGES = StageLists(
    start=(
        Stage("connect", Who.EVERYONE, DeadlineClass.START, silent=True),
        Stage("build", Who.WORKERS, DeadlineClass.START),
        REGISTER,
    ),
    down=(
        measure("awake"),
        Stage("sleep_allocator", Who.WORKERS, _SLEEP, undone_by=(WAKE_ALLOCATOR,)),
        Stage("suspend_communicators", Who.WORKERS, _SLEEP, undone_by=(RESUME_COMMUNICATORS, CONFIRM_RESUMED)),
        Stage("confirm_suspended", Who.WORKERS, _SLEEP),
        PREPARE_WORKSPACES,
        ADMIT_SLEEP,
        LOCK,
        CHECKPOINT,
        measure("asleep"),
    ),
    up=(
        ADMIT_WAKE,
        RESTORE,
        UNLOCK,
        RESTORE_WORKSPACES,
        RESUME_COMMUNICATORS,
        CONFIRM_RESUMED,
        WAKE_ALLOCATOR,
        measure("woken"),
    ),
    release=(measure("awake"), Stage("release_kv_cache", Who.WORKERS, _SLEEP), measure("asleep")),
    wake=(ADMIT_WAKE, WAKE_ALLOCATOR, measure("woken")),
)

#: vLLM's workers: their own ``sleep`` holds allocator sleep, FlashInfer detach and NCCL suspend, their
#: ``wake_up`` the mirror image. An undone sleep leaves vLLM's ordinary level-1 sleep, which only ``wake_up`` ends,
#: since EngineCore has paused its scheduler by then.
VLLM_STAGES = StageLists(
    start=(
        Stage("connect", Who.HELPER_ITSELF, DeadlineClass.START, silent=True),
        # vLLM built them: they say which GPU is theirs, and let the helper trace them.
        Stage("introduce", Who.WORKERS, DeadlineClass.START),
        REGISTER,
    ),
    down=(
        measure("awake"),
        Stage("worker_sleep", Who.WORKERS, _SLEEP),
        Stage("confirm_suspended", Who.WORKERS, _SLEEP),
        PREPARE_WORKSPACES,
        ADMIT_SLEEP,
        LOCK,
        CHECKPOINT,
        measure("asleep"),
    ),
    up=(ADMIT_WAKE, RESTORE, UNLOCK, RESTORE_WORKSPACES, WORKER_WAKE, measure("woken")),
    release=(measure("awake"), Stage("worker_discard", Who.WORKERS, _SLEEP), measure("asleep")),
    wake=(ADMIT_WAKE, WORKER_WAKE, measure("woken")),
    undo_wakes=False,
)


#: With attribution: the stages after which the devices are read, and what the step is called. ``checkpoint`` and
#: ``wake_allocator`` are followed by a reading in any case.
_STEPS = {
    "sleep_allocator": "allocator_asleep",
    "confirm_suspended": "communicators_suspended",
    "prepare_workspaces": "workspaces_prepared",
    "restore": "restored",
    "restore_workspaces": "workspaces_restored",
    "confirm_resumed": "communicators_resumed",
}


def attributed(stages: StageLists) -> StageLists:
    """The same plans, with a reading after every stage that moves memory and the workers' own account at the start.

    A reading has its stage's deadline class, so that stages that shared a deadline still do.
    """

    def read(plan: tuple[Stage, ...]) -> tuple[Stage, ...]:
        found: list[Stage] = []
        for stage in plan:
            if stage.name == "measure_awake":
                found.append(ACCOUNT)
            found.append(stage)
            if stage.name in _STEPS:
                found.append(measure(_STEPS[stage.name], stage.deadline))
        return tuple(found)

    return replace(
        stages, down=read(stages.down), up=read(stages.up), release=read(stages.release), wake=read(stages.wake)
    )


class State(Struct, frozen=True):
    """Everything the rules depend on. Replaced as a whole, never changed in place."""

    phase: Phase = Phase.NEW
    sleeping: frozenset[str] = frozenset()
    paused: bool = False
    cycle: int = 0
    #: The operation in progress and the request that asked for it.
    operation: Operation | None = None
    request: int | None = None
    plan: tuple[Stage, ...] = ()
    index: int = 0
    #: Ranks that still owe an answer to the stage in progress.
    pending: frozenset[int] = frozenset()
    #: Error replies of the stage in progress.
    errors: tuple[tuple[int, ErrorInfo], ...] = ()
    #: Ranks the driver reported as locked. Needed to undo: only these may be unlocked.
    locked: frozenset[int] = frozenset()
    #: Tags the wake in progress will have woken.
    wanted: frozenset[str] = frozenset()
    #: Why the plan in progress is an undo, and which stage failed.
    undoing: tuple[tuple[int, ErrorInfo], ...] = ()
    undone: str | None = None
    warnings: tuple[str, ...] = ()
    #: The deadline in force, and the stage with which it began: consecutive stages may share one.
    deadline: DeadlineClass | None = None
    armed: int = 0
    #: The RPC in progress: its request, who still owes an answer, and whether its caller still waits.
    rpc: int | None = None
    rpc_pending: frozenset[int] = frozenset()
    rpc_abandoned: bool = False
    cause: Cause | None = None

    @property
    def stage(self) -> Stage | None:
        return self.plan[self.index] if self.index < len(self.plan) else None

    @property
    def is_sleeping(self) -> bool:
        """Whether any tag is asleep (vLLM's meaning of the word)."""
        return bool(self.sleeping)


Step = tuple[State, list[Instruction]]


class Coordinator:
    """The machine: :meth:`handle` takes an event and returns what to do about it.

    Args:
        ranks: number of tensor-parallel ranks.
        stages: the plans, one set for each front door.
        undo_before_checkpoint: whether a failed lock is undone (True) or fatal, as the seed has it (False).
    """

    def __init__(
        self,
        ranks: int,
        stages: StageLists = OWN_STAGES,
        *,
        undo_before_checkpoint: bool = True,
        state: State | None = None,
    ) -> None:
        self.ranks = frozenset(range(ranks))
        self.stages = stages
        self.undo_before_checkpoint = undo_before_checkpoint
        self.state = state or State()
        #: The last events, for the story of a fatal error.
        self.story: deque[str] = deque(maxlen=64)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event. Returns the instructions to perform, in order; raises nothing for any event."""
        before = self.state.phase
        self.state, instructions = self._step(self.state, event)
        if not any(isinstance(i, Ignored) for i in instructions):
            after = self.state.phase
            self.story.append(f"{_brief(event)} [{before}{'' if after is before else f' -> {after}'}]")
        return instructions

    def _step(self, s: State, event: Event) -> Step:
        match event:
            case Replied():
                return self._replied(s, event)
            case ProcessExited():
                return self._process_exited(s, event)
            case DeadlinePassed(cycle, index):
                return self._deadline_passed(s, cycle, index)
            case RpcReplied(request, rank):
                return self._rpc_replied(s, request, rank)
            case Abandon(request):
                if s.rpc != request or s.rpc_abandoned:
                    return s, [Ignored("no such call in progress")]
                return replace(s, rpc_abandoned=True), []
            case ShutdownRequested(request):
                return self._shutdown(s, request)
            case StartRequested(request):
                if s.phase is not Phase.NEW:
                    return s, [Refuse(request, Refusal.INVALID, "the executor was started already")]
                return self._begin(s, Phase.STARTING, Operation.START, request, self.stages.start)
        return self._requested(s, event)

    # -- requests --------------------------------------------------------------------------------

    def _requested(self, s: State, event: SleepRequested | WakeRequested | ReleaseRequested | RpcRequested) -> Step:
        """What holds for every request; the order of the checks is the order of what a caller most needs to know."""
        request = event.request
        if s.phase is Phase.FAILED:
            return s, [Fail(request)]
        if s.phase in (Phase.CLOSING, Phase.CLOSED):
            return s, [Refuse(request, Refusal.CLOSED, "the executor was shut down; build a new one")]
        # What can never be right is said first: it stays wrong when the executor is no longer busy.
        if isinstance(event, SleepRequested) and event.level not in (0, 1):
            return s, [Refuse(request, Refusal.INVALID, _level_message(event.level))]
        if isinstance(event, WakeRequested) and (problem := _tags_problem(event.tags)):
            return s, [Refuse(request, Refusal.INVALID, problem)]
        if s.phase is Phase.NEW or s.operation is not None:
            doing = s.operation or "start"
            stage = f", stage {s.stage.name!r}" if s.stage else ""
            return s, [
                Refuse(request, Refusal.BUSY, f"a call is in progress ({doing}{stage}); wait for it, then call again")
            ]
        if s.rpc is not None:
            late = " whose caller stopped waiting" if s.rpc_abandoned else ""
            who = ", ".join(map(str, sorted(s.rpc_pending)))
            return s, [
                Refuse(
                    request,
                    Refusal.BUSY,
                    f"a worker call{late} is still running on rank(s) {who}; call again when it has ended",
                )
            ]
        match event:
            case SleepRequested(request, level):
                return self._sleep(s, request, level)
            case WakeRequested(request, tags):
                return self._wake(s, request, tags)
            case ReleaseRequested(request):
                return self._release(s, request)
            case RpcRequested(request, execution):
                return self._rpc(s, request, execution)

    def _sleep(self, s: State, request: int, level: int) -> Step:
        if level == 0:
            # A scheduler pause: no device is touched, also when the processes are checkpointed.
            return replace(s, paused=True), [Answer(request, performed=not s.paused)]
        if WEIGHTS in s.sleeping:
            if s.phase is Phase.AWAKE and s.sleeping == frozenset(ALL_TAGS):
                # Only an undone sleep of vLLM's leads here. A success would tell the caller that the device is empty.
                return s, [
                    Refuse(
                        request,
                        Refusal.UNDONE,
                        "the last sleep was undone and left an ordinary level-1 sleep, with graphs and contexts still "
                        "on the device: call wake_up(), then sleep again",
                    )
                ]
            if s.phase is Phase.CHECKPOINTED:
                why = "the executor is already asleep"
            else:
                why = "sleep has no effect while weights are asleep: wake the remaining weights first"
            return s, [Answer(request, performed=False, warnings=(why,))]
        return self._begin(s, Phase.SUSPENDING, Operation.SLEEP, request, self.stages.down)

    def _wake(self, s: State, request: int, tags: tuple[str, ...] | None) -> Step:
        named = ALL_TAGS if tags is None else tuple(dict.fromkeys(tags))
        wanted = frozenset(named) & s.sleeping
        awake = [tag for tag in named if tag not in s.sleeping]
        warnings = tuple(f"tag {tag!r} is already awake" for tag in awake) if tags is not None else ()
        if not wanted:
            if s.is_sleeping:
                return s, [Answer(request, performed=False, warnings=warnings)]
            if not s.paused and tags is None:
                warnings = ("the executor is not asleep",)
            # vLLM resumes the scheduler after any wake that leaves nothing asleep.
            return replace(s, paused=False), [Answer(request, performed=s.paused, warnings=warnings)]
        plan = self.stages.up if s.phase is Phase.CHECKPOINTED else self.stages.wake
        s = replace(s, wanted=wanted, warnings=warnings)
        return self._begin(s, Phase.RESUMING, Operation.WAKE, request, plan)

    def _release(self, s: State, request: int) -> Step:
        if s.is_sleeping:
            tags = ", ".join(sorted(s.sleeping))
            return s, [
                Refuse(
                    request,
                    Refusal.ASLEEP,
                    f"release_kv_cache_memory needs all memory resident, but {tags} sleeps; call wake_up() first",
                )
            ]
        if not s.paused:
            return s, [
                Refuse(
                    request,
                    Refusal.ASLEEP,
                    "release_kv_cache_memory needs a completed pause; call sleep(level=0) first",
                )
            ]
        return self._begin(s, Phase.SUSPENDING, Operation.RELEASE, request, self.stages.release)

    def _rpc(self, s: State, request: int, execution: bool) -> Step:
        if s.phase is Phase.CHECKPOINTED:
            return s, [Refuse(request, Refusal.ASLEEP, "the workers are checkpointed; call wake_up() first")]
        if execution and s.is_sleeping:
            tags = ", ".join(sorted(s.sleeping))
            message = f"the call needs memory that is asleep ({tags}); call wake_up() first"
            return s, [Refuse(request, Refusal.ASLEEP, message)]
        if execution and s.paused:
            return s, [
                Refuse(request, Refusal.ASLEEP, "the executor is paused by sleep(level=0); call wake_up() first")
            ]
        return replace(s, rpc=request, rpc_pending=self.ranks, rpc_abandoned=False), [Proceed(request)]

    def _rpc_replied(self, s: State, request: int, rank: int) -> Step:
        if s.rpc != request or rank not in s.rpc_pending:
            return s, [Ignored(f"reply of rank {rank} to a call that is not in progress")]
        pending = s.rpc_pending - {rank}
        if pending:
            return replace(s, rpc_pending=pending), []
        answer: list[Instruction] = [] if s.rpc_abandoned else [Answer(request)]
        return replace(s, rpc=None, rpc_pending=frozenset(), rpc_abandoned=False), answer

    def _shutdown(self, s: State, request: int) -> Step:
        if s.phase in (Phase.CLOSED, Phase.FAILED):
            return s, [Answer(request, performed=False)]  # later calls still fail with the first cause
        if s.phase is Phase.NEW:
            return replace(s, phase=Phase.CLOSED), [Answer(request, performed=False)]
        if s.phase is Phase.CLOSING:
            return s, [Refuse(request, Refusal.BUSY, "the executor is already shutting down")]
        if s.phase is Phase.AWAKE and s.rpc is None:
            closing = replace(
                s,
                phase=Phase.CLOSING,
                operation=Operation.SHUTDOWN,
                request=request,
                cycle=s.cycle + 1,
                plan=(),
                index=0,
                pending=self.ranks | {HELPER},
                deadline=DeadlineClass.SHUTDOWN,
                armed=0,
            )
            return closing, [
                Send(closing.cycle, 0, "exit", to_helper=False, ranks=_sorted(self.ranks)),
                Send(closing.cycle, 0, "exit", to_helper=True, ranks=(HELPER,)),
                ArmDeadline(closing.cycle, 0, DeadlineClass.SHUTDOWN),
            ]
        # Asleep, or in the middle of something: an orderly exit would call CUDA, which blocks in a checkpointed
        # process. SIGKILL works on it within 0.2 s and needs no GPU memory (both measured).
        cause = Cause(CauseKind.SHUTDOWN, stage=s.stage.name if s.stage else None)
        closed, instructions = self._kill(s, cause, Phase.CLOSED)
        return closed, [*instructions, Answer(request)]

    # -- the plan in progress --------------------------------------------------------------------

    def _begin(self, s: State, phase: Phase, operation: Operation, request: int, plan: tuple[Stage, ...]) -> Step:
        s = replace(s, phase=phase, operation=operation, request=request, plan=plan, cycle=s.cycle + 1, index=-1)
        return self._advance(s)

    def _advance(self, s: State) -> Step:
        """Go to the next stage of the plan, or finish."""
        previous = s.stage.deadline if s.index >= 0 and s.stage else None
        index = s.index + 1
        if index == len(s.plan):
            return self._finish(s)
        stage = s.plan[index]
        if stage.name == "unlock" and s.phase is Phase.UNDOING:
            addressed = s.locked
            if not addressed:
                return self._advance(replace(s, index=index))
        else:
            addressed = self._who(stage)
        instructions: list[Instruction] = []
        if previous is not stage.deadline or stage.deadline not in SHARED_DEADLINES:
            s = replace(s, deadline=stage.deadline, armed=index)
            instructions.append(ArmDeadline(s.cycle, index, stage.deadline))
        s = replace(s, index=index, pending=addressed, errors=())
        if not stage.silent:
            instructions.append(
                Send(
                    s.cycle,
                    index,
                    stage.name,
                    to_helper=stage.who is not Who.WORKERS,
                    ranks=_sorted(addressed),
                    tags=_in_order(self._tags(s)),
                    restoring=s.plan is self.stages.up,
                )
            )
        return s, instructions

    def _who(self, stage: Stage) -> frozenset[int]:
        match stage.who:
            case Who.EVERYONE:
                return self.ranks | {HELPER}
            case Who.HELPER_ITSELF:
                return frozenset({HELPER})
            case _:
                return self.ranks

    def _tags(self, s: State) -> frozenset[str]:
        """Tags a stage is about: what will be woken, or what the sleep puts (an undo: had put) to sleep."""
        if s.operation is Operation.WAKE:
            return s.wanted
        if s.operation is Operation.RELEASE:
            return frozenset({KV_CACHE})
        return frozenset(ALL_TAGS) - s.sleeping

    def _replied(self, s: State, event: Replied) -> Step:
        if s.phase not in WORKING or event.cycle != s.cycle or event.index != s.index or event.rank not in s.pending:
            return s, [Ignored(f"reply of rank {event.rank} to cycle {event.cycle}, stage {event.index}: not awaited")]
        stage = s.plan[s.index]
        if event.error is None and (problem := _state_problem(stage, event.state_after)):
            event = replace(event, error=problem)
        s = replace(s, pending=s.pending - {event.rank})
        if event.state_after is ProcessState.LOCKED:
            s = replace(s, locked=s.locked | {event.rank})
        elif event.state_after is not None:
            s = replace(s, locked=s.locked - {event.rank})
        if event.error is not None and stage.on_error is not OnError.IGNORE:
            s = replace(s, errors=(*s.errors, (event.rank, event.error)))
            if self._is_fatal(s, stage, event):
                return self._kill(s, self._cause_of_error(s, stage, event))
        if s.pending:
            return s, []
        if not s.errors:
            return self._advance(s)
        if stage.on_error is OnError.REFUSE:
            return self._refuse_operation(s)
        return self._undo(s)

    def _is_fatal(self, s: State, stage: Stage, event: Replied) -> bool:
        if stage.on_error in (OnError.REFUSE, OnError.WITHDRAW):
            return False
        if stage.on_error is OnError.UNDO and self.undo_before_checkpoint and s.phase is Phase.SUSPENDING:
            # Undo only what is known: a rank that reads back as anything but running or locked is lost.
            return event.state_after not in (ProcessState.RUNNING, ProcessState.LOCKED)
        return True

    def _undo(self, s: State) -> Step:
        """Mirror the completed stages, the failed one included: some of its ranks did succeed."""
        plan = tuple(mirror for stage in reversed(s.plan[: s.index + 1]) for mirror in stage.undone_by)
        failed = s.plan[s.index].name
        s = replace(s, phase=Phase.UNDOING, plan=plan, cycle=s.cycle + 1, index=-1, undoing=s.errors, undone=failed)
        return self._advance(s)

    def _finish(self, s: State) -> Step:
        request, operation = s.request, s.operation
        assert request is not None
        done: Instruction = Answer(request, warnings=s.warnings)
        phase, sleeping, paused = Phase.AWAKE, s.sleeping, s.paused
        if s.phase is Phase.UNDOING:
            sleeping = sleeping if self.stages.undo_wakes else frozenset(ALL_TAGS)
            refusal = Refusal.UNDONE if s.undone == LOCK.name else Refusal.NO_MEMORY
            message = _undone_message(s, self.stages.undo_wakes)
            done = Refuse(request, refusal, message, errors=s.undoing, stage=s.undone)
        elif operation is Operation.SLEEP:
            phase, sleeping = Phase.CHECKPOINTED, frozenset(ALL_TAGS)
        elif operation is Operation.RELEASE:
            sleeping = sleeping | {KV_CACHE}
        elif operation is Operation.WAKE:
            sleeping = sleeping - s.wanted
            # A partial wake does not resume execution; a whole one does.
            paused = paused and bool(sleeping)
        return self._idle(replace(s, phase=phase, sleeping=sleeping, paused=paused)), [DisarmDeadline(), done]

    def _refuse_operation(self, s: State) -> Step:
        """Nothing was touched: go back to where the operation began."""
        assert s.request is not None
        phase = Phase.CHECKPOINTED if s.plan is self.stages.up else Phase.AWAKE
        message = "; ".join(f"rank {rank}: {error.message}" for rank, error in s.errors)
        refuse = Refuse(s.request, Refusal.NO_MEMORY, message, errors=s.errors, stage=s.plan[s.index].name)
        return self._idle(replace(s, phase=phase)), [DisarmDeadline(), refuse]

    @staticmethod
    def _idle(s: State) -> State:
        return replace(
            s,
            operation=None,
            request=None,
            plan=(),
            index=0,
            pending=frozenset(),
            errors=(),
            locked=frozenset(),
            wanted=frozenset(),
            undoing=(),
            undone=None,
            warnings=(),
            deadline=None,
            armed=0,
        )

    # -- failure ---------------------------------------------------------------------------------

    def _process_exited(self, s: State, event: ProcessExited) -> Step:
        if s.phase in (Phase.FAILED, Phase.CLOSED):
            return s, [Ignored("expected after SIGKILL")]
        if s.phase is Phase.CLOSING:
            if event.rank not in s.pending:
                return s, [Ignored("not awaited")]
            pending = s.pending - {event.rank}
            if pending:
                return replace(s, pending=pending), []
            assert s.request is not None
            closed = self._idle(replace(s, phase=Phase.CLOSED))
            return closed, [DisarmDeadline(), Answer(s.request)]
        return self._kill(
            s,
            Cause(
                CauseKind.PROCESS_EXIT,
                starting=s.phase in (Phase.NEW, Phase.STARTING),
                stage=s.stage.name if s.stage else None,
                role=event.role,
                rank=event.rank,
                exit_status=event.exit_status,
                undoing=s.undoing[0][1] if s.undoing else None,
            ),
        )

    def _deadline_passed(self, s: State, cycle: int, index: int) -> Step:
        if s.deadline is None or (s.cycle, s.armed) != (cycle, index):
            return s, [Ignored("the deadline of a stage that is over")]
        if s.phase is Phase.CLOSING:
            assert s.request is not None
            closed, instructions = self._kill(replace(s, request=None), Cause(CauseKind.SHUTDOWN), Phase.CLOSED)
            return closed, [*instructions, Answer(s.request)]
        return self._kill(
            s,
            Cause(
                CauseKind.DEADLINE,
                starting=s.phase is Phase.STARTING,
                stage=s.stage.name if s.stage else None,
                deadline=s.deadline,
                pending=_sorted(s.pending),
                undoing=s.undoing[0][1] if s.undoing else None,
            ),
        )

    def _cause_of_error(self, s: State, stage: Stage, event: Replied) -> Cause:
        return Cause(
            CauseKind.STAGE_ERROR,
            starting=s.phase is Phase.STARTING,
            stage=stage.name,
            role=Role.HELPER if event.rank == HELPER or stage.who is Who.HELPER else Role.WORKER,
            rank=event.rank,
            error=event.error,
            state_before=event.state_before,
            state_after=event.state_after,
            undoing=s.undoing[0][1] if s.undoing else None,
        )

    def _kill(self, s: State, cause: Cause, phase: Phase = Phase.FAILED) -> Step:
        instructions: list[Instruction] = []
        if s.deadline is not None:
            instructions.append(DisarmDeadline())
        instructions.append(KillEverything(cause))
        if s.request is not None:
            instructions.append(Fail(s.request))
        if s.rpc is not None and not s.rpc_abandoned:
            instructions.append(Fail(s.rpc))
        dead = replace(self._idle(s), phase=phase, cause=cause, rpc=None, rpc_pending=frozenset(), rpc_abandoned=False)
        return dead, instructions


def _state_problem(stage: Stage, state_after: ProcessState | None) -> ErrorInfo | None:
    """A verb's success counts only if the process reads back in the state that the verb leads to."""
    expected = next((EXPECTED_STATE[verb] for verb in Verb if verb == stage.name), None)
    if state_after is expected or expected is None:
        return None
    found = "could not be read" if state_after is None else f"is {state_after.value}"
    return ErrorInfo("driver", f"{stage.name} reported success, but the state of the process {found}")


def _sorted(ranks: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _in_order(tags: frozenset[str]) -> tuple[str, ...]:
    return tuple(tag for tag in ALL_TAGS if tag in tags)


def _level_message(level: int) -> str:
    if level == 2:
        return (
            "sleep(level=2) is not supported by the checkpoint executor, which brings weights back as they were; "
            "use level 1. Nothing was touched"
        )
    return f"sleep level must be 0 or 1, not {level!r}. Nothing was touched"


def _tags_problem(tags: tuple[str, ...] | None) -> str | None:
    if tags is None:
        return None
    known = ", ".join(repr(tag) for tag in ALL_TAGS)
    if not tags:
        return f"tags is empty: name one of {known}, or pass None to wake everything. Nothing was touched"
    unknown = [tag for tag in dict.fromkeys(tags) if tag not in ALL_TAGS]
    if unknown:
        return f"unknown tag(s) {', '.join(map(repr, unknown))}: known are {known}. Nothing was touched"
    return None


def _undone_message(s: State, undo_wakes: bool) -> str:
    errors = "; ".join(f"rank {rank}: {error.message}" for rank, error in s.undoing)
    after = (
        "the executor is awake and serves on; the KV cache's contents are lost, as in any sleep"
        if undo_wakes
        else "the engine is unharmed, in ordinary level-1 sleep, and its scheduler is paused: call wake_up()"
    )
    what = "the driver could not lock every rank" if s.undone == LOCK.name else "the sleep was not admitted"
    return f"{what} ({errors}). The sleep was undone: {after}"


def _brief(event: Event) -> str:
    match event:
        case Replied(cycle, index, rank, error):
            return f"Replied(cycle={cycle}, index={index}, rank={rank}, {'ok' if error is None else error.message})"
        case _:
            return repr(event)

"""What must hold for every step of the coordinator, whatever came before: the invariants, and the history they need.

Rules for editors of this file:

1. :func:`observe` watches from outside. It reads the stage lists, the event, the instructions and the two states; it
   keeps its own account (:class:`History`) of who was sent what and who answered, and never takes the coordinator's
   word for it (``pending``, ``locked``, ``errors``).
2. Every check has a name, so that the mutation tests can say which one caught a bug.
3. The history is minimal: it is a part of the walk's state, and whatever is kept here multiplies the walk.
"""

from __future__ import annotations

from typing import NoReturn

from msgspec import Struct
from msgspec.structs import replace

from checkpoint_executor.coordinator import SHARED_DEADLINES, WORKING, Coordinator, OnError, Phase, Stage, State, Who
from checkpoint_executor.driver_states import EXPECTED_STATE, ProcessState, Verb
from checkpoint_executor.messages import (
    HELPER,
    Abandon,
    Answer,
    ArmDeadline,
    DeadlineClass,
    DeadlinePassed,
    DisarmDeadline,
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
    RpcReplied,
    RpcRequested,
    Send,
    ShutdownRequested,
    SleepRequested,
    StartRequested,
    WakeRequested,
)
from checkpoint_executor.tags import ALL_TAGS, KV_CACHE

__all__ = ["GATES", "REST", "TERMINAL", "History", "InvariantError", "observe", "validate"]

#: Phases without an operation. Nothing is awaited there, and no deadline is armed.
REST = frozenset({Phase.NEW, Phase.AWAKE, Phase.CHECKPOINTED, Phase.FAILED, Phase.CLOSED})
TERMINAL = frozenset({Phase.FAILED, Phase.CLOSED})

#: Stages whose success on *every* rank another stage depends on.
GATES = ("confirm_suspended", "prepare_workspaces", "admit_sleep", "lock", "admit_wake", "restore")
_REQUIRED: dict[str, tuple[str, ...]] = {
    "lock": ("confirm_suspended", "prepare_workspaces", "admit_sleep"),
    "checkpoint": ("confirm_suspended", "prepare_workspaces", "lock"),
    "restore": ("admit_wake",),
    "unlock": ("restore",),
}

_VERBS: dict[str, ProcessState] = {verb.value: state for verb, state in EXPECTED_STATE.items()}
_REQUESTS = (StartRequested, SleepRequested, WakeRequested, ReleaseRequested, RpcRequested, ShutdownRequested)
_OUTCOMES = (Replied, RpcReplied, DeadlinePassed, ProcessExited)
_KNOWN = frozenset({ProcessState.RUNNING, ProcessState.LOCKED})
_EMPTY: frozenset[int] = frozenset()


class InvariantError(AssertionError):
    """An invariant does not hold. ``rule`` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class History(Struct, frozen=True):
    """What an onlooker remembers."""

    #: Requests that were accepted and not answered yet.
    open: frozenset[int] = _EMPTY
    #: What the operation in progress was asked to do, e.g. ``("wake", frozenset({"weights"}))``.
    asked: tuple[str, frozenset[str]] | None = None
    #: The deadline in force, as the instructions had it: cycle, index, class.
    armed: tuple[int, int, DeadlineClass] | None = None
    killed: bool = False
    #: The stage in progress, and who was addressed and has not answered.
    stage: Stage | None = None
    place: tuple[int, int] = (0, 0)
    awaiting: frozenset[int] = _EMPTY
    #: (stage, rank) of the gates that were answered with success in this operation.
    done: frozenset[tuple[str, int]] = frozenset()
    #: What the driver said last of each rank that does not run.
    locked: frozenset[int] = _EMPTY
    checkpointed: frozenset[int] = _EMPTY
    #: Whether a checkpoint was sent in this operation: from there on nothing is undone.
    past_return: bool = False
    undoing: bool = False
    #: Whether a reply of this stage was an error that the stage does not ignore.
    failed: bool = False
    #: The worker call in progress and who owes an answer to it.
    call: int | None = None
    owing: frozenset[int] = _EMPTY
    abandoned: bool = False


def observe(
    machine: Coordinator, h: History, before: State, event: Event, instructions: list[Instruction], after: State
) -> History:
    """Check one step and return the history that includes it.

    Raises:
        InvariantError: naming the rule.
    """
    awaited = _is_awaited(h, before, event)
    if after is before or after == before:
        if awaited:
            _broken("an_awaited_event_has_an_effect", f"{event} in {before.phase}")
        _check_quiet(h, before, event, instructions)
        return h
    if before.phase in TERMINAL:
        _broken("failed_and_closed_are_final", f"{event} leads to {after.phase}")
    if not awaited and isinstance(event, _OUTCOMES):
        _broken("what_is_not_awaited_changes_nothing", f"{event} in {before.phase}")
    if _can_never_be_right(event):
        _broken("what_can_never_be_right_changes_nothing", f"{event} in {before.phase}")
    if any(isinstance(i, Ignored) for i in instructions):
        _broken("an_ignored_event_changes_nothing", f"{event} in {before.phase}")

    h = _take_event(machine, h, event)
    h = _take_instructions(machine, h, before, event, instructions, after)
    _check_failure_rules(machine, h, before, event, instructions, after)
    _check_tags(machine, h, before, event, instructions, after)
    if after.phase in REST:
        h = replace(
            h,
            asked=None,
            stage=None,
            awaiting=_EMPTY,
            done=frozenset(),
            past_return=False,
            undoing=False,
            failed=False,
        )
    validate(machine, h, after)
    return h


def validate(machine: Coordinator, h: History, state: State) -> None:
    """Check a state against its history. Also what a test's teardown calls.

    Raises:
        InvariantError: naming the rule.
    """
    held = {state.request, None if state.rpc_abandoned else state.rpc} - {None}
    if held != h.open:
        _broken("no_request_is_lost", f"open are {set(h.open)}, the state holds {held}")
    call = (state.rpc, state.rpc_pending, state.rpc_abandoned)
    if call != (h.call, h.owing, h.abandoned) or (h.call is not None) != bool(h.owing):
        _broken("a_call_ends_with_its_last_rank", f"{h.call} owed by {set(h.owing)}, state {state.rpc}")
    if state.rpc is not None and state.phase is not Phase.AWAKE:
        _broken("calls_and_operations_exclude_each_other", f"call {state.rpc} in {state.phase}")
    if (state.operation is None) != (state.phase in REST):
        _broken("an_operation_has_a_phase", f"{state.operation} in {state.phase}")

    if state.phase in REST:
        if h.armed is not None or state.deadline is not None:
            _broken("no_deadline_at_rest", f"{h.armed} in {state.phase}")
    elif h.armed is None:
        _broken("a_deadline_while_working", f"none in {state.phase}")
    elif h.armed != (state.cycle, state.armed, state.deadline):
        _broken("one_deadline", f"armed is {h.armed}, the state says {state.deadline} of {state.armed}")

    if state.phase in WORKING:
        if state.stage is None or state.pending != h.awaiting or not h.awaiting:
            _broken("a_stage_ends_with_its_last_rank", f"{state.stage}: {set(state.pending)} != {set(h.awaiting)}")
        if state.locked != h.locked:
            _broken("the_locked_are_known", f"{set(state.locked)} instead of {set(h.locked)}")
        expected = _deadline_start(state)
        if (state.armed, state.deadline) != expected:
            _broken("each_stage_has_its_deadline", f"{(state.armed, state.deadline)} instead of {expected}")
    if h.killed != (state.cause is not None):
        _broken("a_kill_has_a_cause", f"killed {h.killed}, cause {state.cause}")
    if state.phase is Phase.FAILED and not h.killed:
        _broken("failed_means_killed", "nothing was killed")
    if state.phase is Phase.AWAKE and (h.locked or h.checkpointed):
        _broken("awake_means_running", f"locked {set(h.locked)}, checkpointed {set(h.checkpointed)}")
    if state.phase is Phase.CHECKPOINTED and h.checkpointed != machine.ranks:
        _broken("checkpointed_means_all_ranks", f"only {set(h.checkpointed)}")


# -- parts of observe -----------------------------------------------------------------------------


def _broken(rule: str, detail: str) -> NoReturn:
    raise InvariantError(rule, detail)


def _is_awaited(h: History, before: State, event: Event) -> bool:
    if isinstance(event, Replied):
        return event.rank in h.awaiting and (event.cycle, event.index) == h.place and before.phase in WORKING
    if isinstance(event, RpcReplied):
        return event.request == h.call and event.rank in h.owing
    if isinstance(event, DeadlinePassed):
        return h.armed is not None and (event.cycle, event.index) == h.armed[:2]
    if isinstance(event, ProcessExited):
        # Outside of an orderly exit nobody may go: whoever it is, the set is not complete.
        return event.rank in h.awaiting if before.phase is Phase.CLOSING else before.phase not in TERMINAL
    return False


def _check_quiet(h: History, before: State, event: Event, instructions: list[Instruction]) -> None:
    """An event without effect says so, once, and answers the request that it is."""
    if len(instructions) != 1:
        _broken("an_event_without_effect_says_so", f"{event}: {instructions}")
    request = event.request if isinstance(event, _REQUESTS) else None
    match instructions[0]:
        case Ignored() if request is None:
            return
        case Refuse(answered) | Fail(answered) | Answer(answered, performed=False) if answered == request:
            if not isinstance(event, StartRequested | ShutdownRequested):
                _check_refusal(before, event, instructions[0])
            return
    _broken("an_event_without_effect_says_so", f"{event}: {instructions}")


def _check_refusal(before: State, event: Event, instruction: Instruction) -> None:
    """Whoever is refused hears the reason that matters most: what is over, what is wrong, what is in the way."""
    refusal = instruction.refusal if isinstance(instruction, Refuse) else None
    if before.phase is Phase.FAILED:
        right = isinstance(instruction, Fail)
    elif before.phase in (Phase.CLOSING, Phase.CLOSED):
        right = refusal is Refusal.CLOSED
    elif _can_never_be_right(event):
        right = refusal is Refusal.INVALID
    elif before.phase not in (Phase.AWAKE, Phase.CHECKPOINTED) or before.rpc is not None:
        right = refusal is Refusal.BUSY
    elif before.phase is Phase.AWAKE and before.sleeping == frozenset(ALL_TAGS) and _goes_to_sleep(event):
        # All sleeps and nothing is checkpointed: the last sleep was undone, and the devices are not empty.
        right = refusal is Refusal.UNDONE
    else:
        right = refusal is Refusal.ASLEEP or isinstance(instruction, Answer)
    if not right:
        _broken("a_refusal_has_its_reason", f"{event} in {before.phase}: {instruction}")


def _goes_to_sleep(event: Event) -> bool:
    return isinstance(event, SleepRequested) and event.level == 1


def _can_never_be_right(event: Event) -> bool:
    match event:
        case SleepRequested(_, level):
            return level not in (0, 1)
        case WakeRequested(_, tags):
            return tags is not None and (not tags or not set(tags) <= set(ALL_TAGS))
        case _:
            return False


def _take_event(machine: Coordinator, h: History, event: Event) -> History:
    """What the event itself tells an onlooker."""
    match event:
        case Replied(_, _, rank, error, _, state_after):
            assert h.stage is not None
            name = h.stage.name
            wrong = name in _VERBS and state_after is not _VERBS[name]
            done, locked, checkpointed = h.done, h.locked, h.checkpointed
            if error is None and not wrong and name in GATES:
                done = done | {(name, rank)}
            if state_after is not None:
                locked = locked | {rank} if state_after is ProcessState.LOCKED else locked - {rank}
                reached = state_after is ProcessState.CHECKPOINTED
                checkpointed = checkpointed | {rank} if reached else checkpointed - {rank}
            elif error is None and name == Verb.LOCK:
                locked = locked | {rank}  # whatever could not be read: it may well be locked
            failed = h.failed or ((error is not None or wrong) and h.stage.on_error is not OnError.IGNORE)
            return replace(
                h,
                awaiting=h.awaiting - {rank},
                done=done,
                locked=locked,
                checkpointed=checkpointed,
                failed=failed,
            )
        case RpcReplied(_, rank):
            owing = h.owing - {rank}
            return replace(h, owing=owing, call=h.call if owing else None, abandoned=h.abandoned and bool(owing))
        case Abandon(request):
            if request != h.call or h.abandoned:
                _broken("what_is_not_awaited_changes_nothing", f"{event}")
            return replace(h, open=h.open - {request}, abandoned=True)
        case ProcessExited(_, rank):
            return replace(h, awaiting=h.awaiting - {rank})
        case DeadlinePassed():
            return h
        case SleepRequested(request):
            return replace(h, open=h.open | {request}, asked=("sleep", frozenset()))
        case WakeRequested(request, tags):
            return replace(h, open=h.open | {request}, asked=("wake", frozenset(ALL_TAGS if tags is None else tags)))
        case ReleaseRequested(request):
            return replace(h, open=h.open | {request}, asked=("release", frozenset()))
        case RpcRequested(request):
            return replace(h, open=h.open | {request}, call=request, owing=machine.ranks, abandoned=False)
        case StartRequested(request):
            return replace(h, open=h.open | {request}, asked=("start", frozenset()))
        case ShutdownRequested(request):
            return replace(h, open=h.open | {request})


def _take_instructions(
    machine: Coordinator, h: History, before: State, event: Event, instructions: list[Instruction], after: State
) -> History:
    """Check the instructions one after the other; their order is part of the rules."""
    request = event.request if isinstance(event, _REQUESTS) else None
    if after.phase is Phase.UNDOING and before.phase is not Phase.UNDOING:
        h = _check_undo_begins(machine, h, before)
    if after.phase is Phase.CLOSING and before.phase is not Phase.CLOSING:
        # Everyone is told to go, and awaited.
        told = {rank for i in instructions if isinstance(i, Send) and i.stage == "exit" for rank in i.ranks}
        if told != machine.ranks | {HELPER}:
            _broken("an_orderly_exit_tells_everyone", f"{told}")
        h = replace(h, awaiting=frozenset(told))
    begun = after.phase in WORKING and (after.cycle, after.index) != (before.cycle, before.index)
    if begun:
        h = _check_stage_begins(machine, h, before, instructions, after)
    for instruction in instructions:
        if h.killed and not isinstance(instruction, Answer | Refuse | Fail):
            _broken("nothing_after_kill", f"{instruction}")
        match instruction:
            case Send(cycle, index, stage):
                if (cycle, index) != (after.cycle, after.index) or not (begun or stage == "exit"):
                    _broken("only_the_stage_in_progress_is_sent", f"{instruction} in {after.phase}")
            case ArmDeadline(cycle, index, deadline):
                h = replace(h, armed=(cycle, index, deadline))
            case DisarmDeadline():
                if h.armed is None:
                    _broken("one_deadline", "disarmed when none is armed")
                h = replace(h, armed=None)
            case KillEverything():
                h = replace(h, killed=True, awaiting=_EMPTY, locked=_EMPTY, checkpointed=_EMPTY)
            case Proceed(answered):
                _check_proceed(before, event, answered)
            case Answer(answered) | Refuse(answered) | Fail(answered):
                if answered not in h.open:
                    _broken("each_request_is_answered_once", f"{instruction} to {event}")
                if isinstance(instruction, Refuse) and answered == request:
                    _broken("a_refused_request_changes_nothing", f"{instruction}")
                if isinstance(instruction, Answer) and not instruction.performed and before.phase is not Phase.NEW:
                    _broken("a_no_op_changes_nothing", f"{instruction} to {event}")
                if answered == h.call and isinstance(event, RpcRequested):
                    _broken("each_request_is_answered_once", f"a call that may proceed was answered: {instruction}")
                if isinstance(instruction, Fail) and not h.killed:
                    _broken("failed_means_killed", f"{instruction}")
                h = replace(h, open=h.open - {answered})
            case Ignored():
                pass
    if isinstance(event, RpcRequested) and instructions != [Proceed(event.request)]:
        _broken("an_accepted_call_proceeds", f"{instructions}")
    if h.killed:
        if after.phase not in TERMINAL:
            _broken("failed_and_closed_are_final", f"killed, and now {after.phase}")
        h = replace(h, call=None, owing=_EMPTY, abandoned=False)
    elif after.phase is Phase.CLOSED and before.phase is not Phase.NEW and h.awaiting:
        _broken("closed_means_gone", f"{set(h.awaiting)} still run")
    elif begun is False and after.phase in REST and before.phase in WORKING and h.awaiting:
        _broken("a_stage_ends_with_its_last_rank", f"{set(h.awaiting)} had not answered")
    return h


def _check_undo_begins(machine: Coordinator, h: History, before: State) -> History:
    if h.past_return:
        _broken("nothing_is_undone_after_checkpoint", f"undo begins in {before.stage}")
    withdrawn = before.stage is not None and before.stage.on_error is OnError.WITHDRAW
    allowed = machine.undo_before_checkpoint or withdrawn
    if not allowed or before.phase is not Phase.SUSPENDING or not h.failed:
        _broken("only_a_failed_sleep_is_undone", f"undo begins in {before.phase}")
    if h.awaiting:
        _broken("a_stage_ends_with_its_last_rank", f"undo begins before {set(h.awaiting)} answered")
    return replace(h, undoing=True, done=frozenset(), failed=False)


def _check_stage_begins(
    machine: Coordinator, h: History, before: State, instructions: list[Instruction], after: State
) -> History:
    stage = after.stage
    if stage is None:
        _broken("a_stage_ends_with_its_last_rank", f"no stage in {after.phase}")
    if (after.cycle, after.index) <= (before.cycle, before.index):
        _broken("a_plan_only_goes_on", f"{(before.cycle, before.index)} -> {(after.cycle, after.index)}")
    if h.undoing and stage.name in (Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE):
        _broken("an_undo_only_goes_up", stage.name)
    undo_unlock = h.undoing and stage.name == Verb.UNLOCK
    if not undo_unlock:
        for gate in _REQUIRED.get(stage.name, ()):
            missing = {rank for rank in machine.ranks if (gate, rank) not in h.done}
            if missing:
                _broken(f"no_{stage.name}_before_every_{gate}", f"rank(s) {missing} did not answer {gate}")
    if h.awaiting:
        _broken("a_stage_ends_with_its_last_rank", f"{stage.name} begins before {set(h.awaiting)} answered")
    if h.failed:
        _broken("an_error_stops_the_plan", f"{stage.name} begins after an error")
    sends = [i for i in instructions if isinstance(i, Send)]
    if [i.stage for i in sends] != ([] if stage.silent else [stage.name]):
        _broken("a_stage_is_sent_once", f"{stage.name}: {sends}")
    everyone = {
        Who.EVERYONE: machine.ranks | {HELPER},
        Who.HELPER_ITSELF: frozenset({HELPER}),
        Who.HELPER: machine.ranks,
        Who.WORKERS: machine.ranks,
    }[stage.who]
    addressed = frozenset(sends[0].ranks) if sends else everyone
    if sends and sends[0].to_helper != (stage.who is not Who.WORKERS):
        _broken("a_stage_goes_to_who_performs_it", f"{sends[0]}")

    if undo_unlock:
        if addressed != h.locked:
            _broken("undo_unlocks_what_is_locked", f"{set(addressed)} instead of {set(h.locked)}")
    elif addressed != everyone:
        _broken("a_stage_goes_to_who_performs_it", f"{stage.name}: {set(addressed)}")
    if stage.who in (Who.WORKERS, Who.EVERYONE) and (h.locked or h.checkpointed):
        _broken("workers_act_only_when_all_run", f"{stage.name}: locked {set(h.locked)} {set(h.checkpointed)}")
    return replace(
        h,
        stage=stage,
        place=(after.cycle, after.index),
        awaiting=addressed,
        past_return=h.past_return or stage.name == Verb.CHECKPOINT,
        failed=False,
    )


def _check_proceed(before: State, event: Event, answered: int) -> None:
    if not isinstance(event, RpcRequested) or event.request != answered:
        _broken("a_call_proceeds_when_it_is_asked_for", f"{event}")
    if before.phase is not Phase.AWAKE or before.operation is not None or before.rpc is not None:
        _broken("no_call_while_checkpointed_or_busy", f"in {before.phase}, {before.operation}, call {before.rpc}")
    if event.execution and (before.sleeping or before.paused):
        _broken("no_execution_while_asleep_or_paused", f"{set(before.sleeping)}, paused {before.paused}")


def _check_failure_rules(
    machine: Coordinator, h: History, before: State, event: Event, instructions: list[Instruction], after: State
) -> None:
    """What kills, what is undone, what is refused."""
    fatal = False
    match event:
        case ProcessExited():
            fatal = before.phase is not Phase.CLOSING
        case DeadlinePassed():
            fatal = True
        case ShutdownRequested():
            fatal = before.phase not in (Phase.NEW, Phase.AWAKE) or before.rpc is not None
        case Replied(_, _, _, error, _, state_after):
            stage = before.stage
            assert stage is not None
            if error is not None or (stage.name in _VERBS and state_after is not _VERBS[stage.name]):
                undoable = machine.undo_before_checkpoint and stage.on_error is OnError.UNDO and state_after in _KNOWN
                fatal = not (undoable or stage.on_error in (OnError.WITHDRAW, OnError.REFUSE, OnError.IGNORE))
    kills = sum(isinstance(i, KillEverything) for i in instructions)
    if kills != fatal:
        _broken("what_is_uncertain_kills", f"{event} in {before.phase}: {kills} kill(s)")
    if fatal:
        closed = isinstance(event, ShutdownRequested) or before.phase is Phase.CLOSING
        if after.phase is not (Phase.CLOSED if closed else Phase.FAILED):
            _broken("what_is_uncertain_kills", f"{event} in {before.phase} leads to {after.phase}")


def _check_tags(
    machine: Coordinator, h: History, before: State, event: Event, instructions: list[Instruction], after: State
) -> None:
    """Tags and the pause change when an operation has ended, and by what was asked for."""
    ended = before.phase in WORKING and after.phase in REST and not h.killed
    sleeping, paused, phase = before.sleeping, before.paused, after.phase
    if ended:
        assert h.asked is not None
        refusals = [i.refusal for i in instructions if isinstance(i, Refuse)]
        undone = [Refusal.UNDONE] if before.undone == "lock" else [Refusal.NO_MEMORY]
        expected = undone if h.undoing else [Refusal.NO_MEMORY] if h.failed else []
        if refusals != expected:
            _broken("an_error_stops_the_plan", f"failed {h.failed}, undoing {h.undoing}: {refusals}")
        phase = Phase.AWAKE
        match h.asked:
            case _ if h.failed:
                phase = Phase.CHECKPOINTED if h.checkpointed else Phase.AWAKE
            case _ if h.undoing:
                sleeping = sleeping if machine.stages.undo_wakes else frozenset(ALL_TAGS)
            case ("sleep", _):
                phase, sleeping = Phase.CHECKPOINTED, frozenset(ALL_TAGS)
            case ("release", _):
                sleeping = sleeping | {KV_CACHE}
            case ("wake", named):
                sleeping = sleeping - named
                paused = paused and bool(sleeping)
    elif isinstance(event, SleepRequested) and event.level == 0:
        paused = True
    elif isinstance(event, WakeRequested) and after.phase is before.phase:
        paused = False  # nothing to wake: it only resumes
        if sleeping:
            _broken("tags_change_at_the_end", "resumed while something sleeps")
    if (after.sleeping, after.paused) != (sleeping, paused):
        _broken(
            "tags_change_at_the_end",
            f"{event} in {before.phase}: {set(before.sleeping)}, paused {before.paused} -> "
            f"{set(after.sleeping)}, paused {after.paused}; expected {set(sleeping)}, {paused}",
        )
    if after.phase is not phase:
        _broken("an_operation_ends_where_it_should", f"{after.phase} instead of {phase}")


def _deadline_start(state: State) -> tuple[int, DeadlineClass]:
    """The stage with which the deadline in force must have begun, and its class."""
    stage = state.stage
    assert stage is not None
    start = state.index
    if stage.deadline in SHARED_DEADLINES:
        while start and state.plan[start - 1].deadline is stage.deadline:
            start -= 1
    return start, stage.deadline

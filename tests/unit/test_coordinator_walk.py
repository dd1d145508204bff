"""Every reachable state of the coordinator, with every event in every state, at 1, 2, 4 and 8 ranks.

What is checked in each step is in ``tests/support/coordinator_rules.py``, how the states are visited and counted in
``tests/support/coordinator_walk.py``. The tests here run the walks, show that leaving out the identity of ranks and the
text of errors leaves out no behaviour, and break the coordinator on purpose to show that the walk would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from checkpoint_executor.coordinator import (
    CHECKPOINT,
    LOCK,
    OWN_STAGES,
    PREPARE_WORKSPACES,
    RESTORE_WORKSPACES,
    UNLOCK,
    VLLM_STAGES,
    Coordinator,
    OnError,
    Operation,
    Phase,
    Stage,
    StageLists,
    State,
    Step,
)
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.messages import (
    Answer,
    ArmDeadline,
    Cause,
    DisarmDeadline,
    Event,
    Fail,
    Ignored,
    Instruction,
    Proceed,
    ProcessExited,
    Refusal,
    Refuse,
    Replied,
    RpcRequested,
    Send,
    SleepRequested,
    StartRequested,
    WakeRequested,
)
from tests.support.coordinator_rules import InvariantError
from tests.support.coordinator_walk import View, Walk, check_liveness, events, key, walk

DOORS: dict[str, StageLists] = {"own": OWN_STAGES, "vllm": VLLM_STAGES}
RANKS = (1, 2, 4, 8)

each_door = pytest.mark.parametrize("door", list(DOORS))
each_undo = pytest.mark.parametrize("undo", [True, False], ids=["undo", "no_undo"])


@cache
def walked(door: str, undo: bool, ranks: int, view: View = View.REDUCED) -> Walk:
    """A walk that several tests look at. It fails at the first step that breaks an invariant."""
    return walk(ranks, DOORS[door], undo=undo, view=view)


# -- the walk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@each_undo
@each_door
def test_every_reachable_step_keeps_the_invariants(
    door: str, undo: bool, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    seen = walked(door, undo, ranks)
    record_property("states", len(seen.nodes))
    record_property("transitions", seen.transitions)
    print(f"{door}, undo={undo}, {ranks} rank(s): {len(seen.nodes)} states, {seen.transitions} transitions")


@pytest.mark.parametrize("ranks", RANKS)
@each_undo
@each_door
def test_every_state_has_a_way_to_end(door: str, undo: bool, ranks: int) -> None:
    check_liveness(walked(door, undo, ranks))


@pytest.mark.parametrize("ranks", RANKS)
@each_undo
@each_door
def test_the_walk_misses_no_phase_stage_event_or_instruction(door: str, undo: bool, ranks: int) -> None:
    seen = walked(door, undo, ranks)
    stages = DOORS[door]
    listed = {
        stage.name for plan in (stages.start, stages.down, stages.up, stages.release, stages.wake) for stage in plan
    }
    assert set(seen.stages) == listed
    assert set(seen.phases) == set(Phase)  # also without undo: a sleep that is not admitted is withdrawn
    tried = {
        type(event) for state, history in seen.nodes[:20] for event in events(seen.machine, state, history, seen.view)
    }
    assert tried == set(Event.__args__)
    given = {name for _, _, how in seen.edges for name in how.partition(":")[2].split(",")} - {""}
    assert given == {i.__name__ for i in Instruction.__args__} - {Ignored.__name__}
    unlocked = {len(h.locked) for s, h in seen.nodes if s.phase is Phase.UNDOING and s.stage == UNLOCK}
    assert unlocked == (set(range(1, ranks + 1)) if undo else set())


def test_summary_of_the_walks(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a check: what the walk covered, also in a run that captures output."""
    lines = [f"{'':<18}" + "".join(f"{f'{ranks} rank(s)':>18}" for ranks in RANKS)]
    states = transitions = 0
    for door in DOORS:
        for undo in (True, False):
            walks = [walked(door, undo, ranks) for ranks in RANKS]
            states += sum(len(seen.nodes) for seen in walks)
            transitions += sum(seen.transitions for seen in walks)
            cells = "".join(f"{f'{len(seen.nodes)} / {seen.transitions}':>18}" for seen in walks)
            lines.append(f"{f'{door}, undo {undo}':<18}{cells}")
    with capsys.disabled():
        print(f"\ncoordinator walk, states / transitions: {states} / {transitions} in all")
        print("\n".join(lines))


# -- the reductions are sound ------------------------------------------------------------------------


def _edges(seen: Walk, view: View) -> set[tuple[object, object, str]]:
    """The walk's edges as seen in a coarser view."""
    plans = {id(getattr(seen.machine.stages, name)): name for name in ("start", "down", "up", "release", "wake")}
    names = [key(state, history, view, plans, seen.machine.ranks) for state, history in seen.nodes]
    return {(names[source], names[target], how) for source, target, how in seen.edges}


@pytest.mark.parametrize(("ranks", "undo"), [(2, True), (2, False), (4, True)])
@each_door
def test_ranks_can_be_exchanged(door: str, undo: bool, ranks: int) -> None:
    """Walked with all ranks told apart, the states and steps are the reduced walk's, no more and no fewer."""
    full, reduced = walked(door, undo, ranks, View.FULL), walked(door, undo, ranks)
    assert len(full.nodes) > len(reduced.nodes)
    assert _edges(full, View.REDUCED) == _edges(reduced, View.REDUCED)


@each_door
def test_what_is_only_reported_decides_nothing(door: str) -> None:
    """Errors of every kind in every order, warnings and causes: the steps are those of the walk without them."""
    raw, full = walked(door, True, 2, View.RAW), walked(door, True, 2, View.FULL)
    assert len(raw.nodes) > len(full.nodes)
    assert _edges(raw, View.FULL) == _edges(full, View.FULL)


@each_undo
@each_door
def test_numbers_of_cycles_and_requests_decide_nothing(door: str, undo: bool) -> None:
    """The same step 1000 cycles and requests later is the same step."""
    seen = walked(door, undo, 2)
    for state, history in seen.nodes:
        later = _shifted(state)
        for event in events(seen.machine, state, history, seen.view):
            seen.machine.state = state
            expected = [_shifted(i) for i in seen.machine.handle(event)]
            expected_state = _shifted(seen.machine.state)
            seen.machine.state = later
            instructions = seen.machine.handle(_shifted(event))
            assert seen.machine.state == expected_state
            if not isinstance(expected[0] if expected else None, Ignored):  # whose text quotes the numbers
                assert instructions == expected


def _shifted(thing: Any) -> Any:
    assert isinstance(thing, Struct)
    numbers = {name: getattr(thing, name, None) for name in ("cycle", "request", "rpc")}
    return replace(thing, **{name: value + 1000 for name, value in numbers.items() if value is not None})


# -- the walk notices bugs ---------------------------------------------------------------------------


class AdvancesOnAStaleReply(Coordinator):
    def _replied(self, s: State, event: Replied) -> Step:
        return super()._replied(s, replace(event, cycle=s.cycle))


class AdvancesOnAReplyToAnotherStage(Coordinator):
    def _replied(self, s: State, event: Replied) -> Step:
        return super()._replied(s, replace(event, index=s.index))


class CountsADuplicateReply(Coordinator):
    def _replied(self, s: State, event: Replied) -> Step:
        rank = event.rank if event.rank in s.pending else min(s.pending, default=event.rank)
        return super()._replied(s, replace(event, rank=rank))


class UnlocksAfterTheFirstRestore(Coordinator):
    def _replied(self, s: State, event: Replied) -> Step:
        awaited = event.cycle == s.cycle and event.index == s.index and event.rank in s.pending
        if s.stage and s.stage.name == "restore" and awaited:
            s = replace(s, pending=frozenset({event.rank}))
        return super()._replied(s, event)


class ChecksNoStateAfterAVerb(Coordinator):
    """Believes a verb that reports success, as the coordinator once did."""

    def _replied(self, s: State, event: Replied) -> Step:
        if s.stage and s.stage.name == "lock" and event.error is None:
            event = replace(event, state_after=ProcessState.LOCKED)
        return super()._replied(s, event)


class OverlooksAnError(Coordinator):
    def _is_fatal(self, s: State, stage: Stage, event: Replied) -> bool:
        return super()._is_fatal(s, stage, event) and stage.name != "restore"


class UndoesWhatIsUnknown(Coordinator):
    def _is_fatal(self, s: State, stage: Stage, event: Replied) -> bool:
        return super()._is_fatal(s, stage, event) and stage.on_error is not OnError.UNDO


class ForgetsToDisarm(Coordinator):
    def _finish(self, s: State) -> Step:
        after, instructions = super()._finish(s)
        return after, [i for i in instructions if not isinstance(i, DisarmDeadline)]


class ForgetsToArm(Coordinator):
    def _advance(self, s: State) -> Step:
        after, instructions = super()._advance(s)
        return after, [i for i in instructions if not isinstance(i, ArmDeadline)]


class GivesEachStageOfASleepItsOwnDeadline(Coordinator):
    def _advance(self, s: State) -> Step:
        after, instructions = super()._advance(s)
        stage = after.stage
        if stage and not any(isinstance(i, ArmDeadline) for i in instructions):
            after = replace(after, armed=after.index)
            instructions = [ArmDeadline(after.cycle, after.index, stage.deadline), *instructions]
        return after, instructions


class OverlooksTheDeadline(Coordinator):
    def _deadline_passed(self, s: State, cycle: int, index: int) -> Step:
        return s, [Ignored("later")]


class TakesAnOldDeadlineForItsOwn(Coordinator):
    def _deadline_passed(self, s: State, cycle: int, index: int) -> Step:
        return super()._deadline_passed(s, s.cycle, index)


class UnlocksEveryRankInAnUndo(Coordinator):
    def _undo(self, s: State) -> Step:
        return super()._undo(replace(s, locked=self.ranks if s.locked else s.locked))


class LosesTheRequest(Coordinator):
    def _undo(self, s: State) -> Step:
        return super()._undo(replace(s, request=None))


class AnswersTwice(Coordinator):
    def _finish(self, s: State) -> Step:
        after, instructions = super()._finish(s)
        return after, [*instructions, instructions[-1]]


class AnswersEarly(Coordinator):
    def _begin(self, s: State, phase: Phase, operation: Operation, request: int, plan: tuple[Stage, ...]) -> Step:
        after, instructions = super()._begin(s, phase, operation, request, plan)
        return after, [*instructions, Answer(request)]


class KillsWithoutAWord(Coordinator):
    def _kill(self, s: State, cause: Cause, phase: Phase = Phase.FAILED) -> Step:
        after, instructions = super()._kill(s, cause, phase)
        return after, [i for i in instructions if not isinstance(i, Fail)]


class SendsAfterTheKill(Coordinator):
    def _kill(self, s: State, cause: Cause, phase: Phase = Phase.FAILED) -> Step:
        after, instructions = super()._kill(s, cause, phase)
        return after, [*instructions, Send(s.cycle, s.index, "exit", to_helper=True, ranks=(-1,))]


class ServesOnAfterADeath(Coordinator):
    def _process_exited(self, s: State, event: ProcessExited) -> Step:
        return s, [Ignored("it may come back")]


class ClosesBeforeAllAreGone(Coordinator):
    def _process_exited(self, s: State, event: ProcessExited) -> Step:
        if s.phase is Phase.CLOSING and event.rank in s.pending:
            s = replace(s, pending=frozenset({event.rank}))
        return super()._process_exited(s, event)


class RisesFromTheDead(Coordinator):
    def _step(self, s: State, event: Event) -> Step:
        if s.phase is Phase.FAILED and isinstance(event, StartRequested):
            s = replace(s, phase=Phase.NEW)
        return super()._step(s, event)


class SleepsInTheBooksAtOnce(Coordinator):
    def _sleep(self, s: State, request: int, level: int) -> Step:
        after, instructions = super()._sleep(s, request, level)
        return (replace(after, sleeping=frozenset({"weights"})) if after.operation else after), instructions


class ResumesAfterAPartialWake(Coordinator):
    def _finish(self, s: State) -> Step:
        after, instructions = super()._finish(s)
        return (replace(after, paused=False) if s.operation is Operation.WAKE else after), instructions


class ChangesSomethingAndRefuses(Coordinator):
    def _release(self, s: State, request: int) -> Step:
        after, instructions = super()._release(s, request)
        return (after if after.operation else replace(s, paused=True)), instructions


class ActsOnAnUnknownTag(Coordinator):
    def _requested(self, s: State, event: Any) -> Step:
        if isinstance(event, WakeRequested) and event.tags == ("bogus",):
            return s, []
        return super()._requested(s, event)


class SleepsAtLevel2(Coordinator):
    def _requested(self, s: State, event: Any) -> Step:
        if isinstance(event, SleepRequested) and event.level == 2 and s.phase is Phase.AWAKE and s.rpc is None:
            event = SleepRequested(event.request)
        return super()._requested(s, event)


class SaysBusyToAnUnknownTag(Coordinator):
    def _requested(self, s: State, event: Any) -> Step:
        after, instructions = super()._requested(s, event)
        if s.operation and isinstance(event, WakeRequested) and event.tags == ("bogus",):
            return after, [Refuse(event.request, Refusal.BUSY, "wait")]
        return after, instructions


class ClaimsANoOp(Coordinator):
    def _sleep(self, s: State, request: int, level: int) -> Step:
        after, instructions = super()._sleep(s, request, level)
        return after, [replace(i, performed=False) if isinstance(i, Answer) else i for i in instructions]


class CallsWhileCheckpointed(Coordinator):
    def _rpc(self, s: State, request: int, execution: bool) -> Step:
        if s.phase is Phase.CHECKPOINTED and not execution:
            return replace(s, rpc=request, rpc_pending=self.ranks), [Proceed(request)]
        return super()._rpc(s, request, execution)


class CallsDuringAnOperation(Coordinator):
    def _requested(self, s: State, event: Any) -> Step:
        if isinstance(event, RpcRequested) and s.phase is Phase.SUSPENDING and s.rpc is None:
            return self._rpc(s, event.request, event.execution)
        return super()._requested(s, event)


class ExecutesWhilePaused(Coordinator):
    def _rpc(self, s: State, request: int, execution: bool) -> Step:
        return super()._rpc(s, request, execution and not s.paused)


class ExecutesWhileATagSleeps(Coordinator):
    def _rpc(self, s: State, request: int, execution: bool) -> Step:
        return super()._rpc(s, request, execution and not s.sleeping)


class SleepsDuringACall(Coordinator):
    def _requested(self, s: State, event: Any) -> Step:
        if isinstance(event, SleepRequested) and event.level == 1 and s.rpc is not None and s.phase is Phase.AWAKE:
            return self._sleep(s, event.request, 1)
        return super()._requested(s, event)


class ForgetsAnAbandonedCall(Coordinator):
    def _requested(self, s: State, event: Any) -> Step:
        if s.rpc_abandoned:
            s = replace(s, rpc=None, rpc_pending=frozenset(), rpc_abandoned=False)
        return super()._requested(s, event)


class TakesARefusedWakeForAWake(Coordinator):
    def _refuse_operation(self, s: State) -> Step:
        after, instructions = super()._refuse_operation(s)
        return replace(after, phase=Phase.AWAKE), instructions


@pytest.mark.parametrize(
    ("machine", "rule"),
    [
        (AdvancesOnAStaleReply, "what_is_not_awaited_changes_nothing"),
        (AdvancesOnAReplyToAnotherStage, "what_is_not_awaited_changes_nothing"),
        (CountsADuplicateReply, "what_is_not_awaited_changes_nothing"),
        (UnlocksAfterTheFirstRestore, "no_unlock_before_every_restore"),
        (ChecksNoStateAfterAVerb, "what_is_uncertain_kills"),
        (OverlooksAnError, "what_is_uncertain_kills"),
        (UndoesWhatIsUnknown, "what_is_uncertain_kills"),
        (ForgetsToDisarm, "no_deadline_at_rest"),
        (ForgetsToArm, "a_deadline_while_working"),
        (GivesEachStageOfASleepItsOwnDeadline, "each_stage_has_its_deadline"),
        (OverlooksTheDeadline, "an_awaited_event_has_an_effect"),
        (TakesAnOldDeadlineForItsOwn, "what_is_not_awaited_changes_nothing"),
        (UnlocksEveryRankInAnUndo, "undo_unlocks_what_is_locked"),
        (LosesTheRequest, "no_request_is_lost"),
        (AnswersTwice, "each_request_is_answered_once"),
        (AnswersEarly, "no_request_is_lost"),
        (KillsWithoutAWord, "no_request_is_lost"),
        (SendsAfterTheKill, "nothing_after_kill"),
        (ServesOnAfterADeath, "an_awaited_event_has_an_effect"),
        (ClosesBeforeAllAreGone, "closed_means_gone"),
        (RisesFromTheDead, "failed_and_closed_are_final"),
        (SleepsInTheBooksAtOnce, "tags_change_at_the_end"),
        (ResumesAfterAPartialWake, "tags_change_at_the_end"),
        (ChangesSomethingAndRefuses, "a_refused_request_changes_nothing"),
        (ActsOnAnUnknownTag, "an_event_without_effect_says_so"),
        (SleepsAtLevel2, "what_can_never_be_right_changes_nothing"),
        (SaysBusyToAnUnknownTag, "a_refusal_has_its_reason"),
        (ClaimsANoOp, "a_no_op_changes_nothing"),
        (CallsWhileCheckpointed, "no_call_while_checkpointed_or_busy"),
        (CallsDuringAnOperation, "no_call_while_checkpointed_or_busy"),
        (ExecutesWhilePaused, "no_execution_while_asleep_or_paused"),
        (ExecutesWhileATagSleeps, "no_execution_while_asleep_or_paused"),
        (SleepsDuringACall, "calls_and_operations_exclude_each_other"),
        (ForgetsAnAbandonedCall, "a_call_ends_with_its_last_rank"),
        (TakesARefusedWakeForAWake, "an_operation_ends_where_it_should"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_the_walk_catches_a_broken_coordinator(machine: type[Coordinator], rule: str) -> None:
    with pytest.raises(InvariantError) as caught:
        walk(2, OWN_STAGES, machine=machine)
    assert caught.value.rule == rule, caught.value


def _without(plan: tuple[Stage, ...], name: str) -> tuple[Stage, ...]:
    assert name in [stage.name for stage in plan]
    return tuple(stage for stage in plan if stage.name != name)


def _swapped(plan: tuple[Stage, ...], name: str) -> tuple[Stage, ...]:
    """The plan with a stage one place earlier."""
    at = [stage.name for stage in plan].index(name)
    return (*plan[: at - 1], plan[at], plan[at - 1], *plan[at + 1 :])


def _replaced(plan: tuple[Stage, ...], old: Stage, new: Stage) -> tuple[Stage, ...]:
    assert old in plan
    return tuple(new if stage == old else stage for stage in plan)


@pytest.mark.parametrize(
    ("stages", "rule"),
    [
        ({"down": _without(OWN_STAGES.down, "lock")}, "no_checkpoint_before_every_lock"),
        ({"down": _swapped(OWN_STAGES.down, "checkpoint")}, "no_checkpoint_before_every_lock"),
        ({"down": _without(OWN_STAGES.down, "confirm_suspended")}, "no_lock_before_every_confirm_suspended"),
        ({"down": _without(OWN_STAGES.down, "prepare_workspaces")}, "no_lock_before_every_prepare_workspaces"),
        ({"down": _swapped(OWN_STAGES.down, "lock")}, "no_lock_before_every_admit_sleep"),
        ({"up": _without(OWN_STAGES.up, "admit_wake")}, "no_restore_before_every_admit_wake"),
        ({"up": _swapped(OWN_STAGES.up, "unlock")}, "no_unlock_before_every_restore"),
        ({"up": _swapped(OWN_STAGES.up, "restore_workspaces")}, "workers_act_only_when_all_run"),
        ({"up": _without(OWN_STAGES.up, "unlock")}, "workers_act_only_when_all_run"),
        (
            {"down": _replaced(OWN_STAGES.down, CHECKPOINT, replace(CHECKPOINT, on_error=OnError.UNDO))},
            "nothing_is_undone_after_checkpoint",
        ),
        ({"down": _replaced(OWN_STAGES.down, LOCK, replace(LOCK, undone_by=()))}, "workers_act_only_when_all_run"),
        (
            {
                "down": _replaced(
                    OWN_STAGES.down,
                    PREPARE_WORKSPACES,
                    replace(PREPARE_WORKSPACES, undone_by=(RESTORE_WORKSPACES, LOCK)),
                )
            },
            "an_undo_only_goes_up",
        ),
    ],
)
def test_the_walk_catches_a_wrong_stage_list(stages: dict[str, tuple[Stage, ...]], rule: str) -> None:
    with pytest.raises(InvariantError) as caught:
        walk(2, replace(OWN_STAGES, **stages))
    assert caught.value.rule == rule, caught.value


def test_a_broken_invariant_names_the_way_there() -> None:
    with pytest.raises(InvariantError, match=r"(?s)no_deadline_at_rest.*StartRequested\(request=1\)\n.*Replied"):
        walk(1, OWN_STAGES, machine=ForgetsToDisarm)


def test_a_state_without_a_way_out_is_noticed() -> None:
    seen = walk(1, OWN_STAGES)
    locking = next(node for node, (state, _) in enumerate(seen.nodes) if state.stage == LOCK)
    ways_on = seen.good[locking]
    seen.good[locking] = set()
    with pytest.raises(InvariantError, match="every_operation_can_end"):
        check_liveness(seen)
    seen.good[locking] = ways_on | {locking}
    with pytest.raises(InvariantError, match="every_operation_can_end"):
        check_liveness(seen)
    seen.good[locking] = ways_on
    del seen.expired[locking]
    with pytest.raises(InvariantError, match="a_deadline_ends_every_operation"):
        check_liveness(seen)

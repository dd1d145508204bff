"""Walks every reachable state of the coordinator, with every event in every state.

A node of the walk is a state and the history an onlooker has of it (``coordinator_rules.History``). What has no bound
is left out of a node's key: the number of the cycle and the numbers of the requests, which the rules only compare for
equality. Three views differ in what else is left out:

- ``RAW``: nothing;
- ``FULL``: what is only *reported*, i.e. the texts and the order of errors, warnings, the cause of a kill;
- ``REDUCED``: also which rank is which. Two nodes that differ by a permutation of the ranks have the same key, and of
  the ranks that are in the same situation only one replies, exits and so on.

``test_coordinator_walk.py`` shows that the views agree where the larger one can still be walked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from enum import Enum

from msgspec import Struct, field

from checkpoint_executor.coordinator import Coordinator, Phase, StageLists, State
from checkpoint_executor.driver_states import EXPECTED_STATE, ProcessState
from checkpoint_executor.messages import (
    HELPER,
    Abandon,
    DeadlinePassed,
    ErrorInfo,
    Event,
    Instruction,
    ProcessExited,
    ReleaseRequested,
    Replied,
    Role,
    RpcReplied,
    RpcRequested,
    ShutdownRequested,
    SleepRequested,
    StartRequested,
    WakeRequested,
)
from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from tests.support.coordinator_rules import GATES, REST, TERMINAL, History, InvariantError, observe

__all__ = ["ERRORS", "Edge", "View", "Walk", "check_liveness", "events", "key", "walk"]

Key = Hashable
#: From, to, and the types of the event and of the instructions.
Edge = tuple[int, int, str]


class View(Enum):
    RAW = "raw"
    FULL = "full"
    REDUCED = "reduced"


ERRORS: tuple[ErrorInfo, ...] = (
    ErrorInfo("driver", "CUDA_ERROR_NOT_READY", code=600, code_name="CUDA_ERROR_NOT_READY"),
    ErrorInfo("refused", "no room", missing_bytes=1, device="gpu", holders=((7, 1),)),
    ErrorInfo("exception", "boom", error_type="ValueError", traceback_text="..."),
    ErrorInfo("result_type", "not a tensor"),
)
#: How many kinds of error each view tries: where their order counts, two show what four would.
_ERRORS_IN = {View.RAW: 2, View.FULL: 1, View.REDUCED: len(ERRORS)}
_STATES: tuple[ProcessState | None, ...] = (None, *ProcessState)
_EXPECTED: dict[str, ProcessState] = {verb.value: state for verb, state in EXPECTED_STATE.items()}
_GATE_PLACES = {gate: place for place, gate in enumerate(GATES)}
_NOBODY = 99  #: a rank that does not exist
_SOME_REQUEST = 1

_WAKE_TAGS: tuple[tuple[str, ...] | None, ...] = (
    None,
    (WEIGHTS,),
    (KV_CACHE,),
    (KV_CACHE, WEIGHTS),
    (WEIGHTS, WEIGHTS),
)
_WRONG_TAGS: tuple[tuple[str, ...], ...] = ((), ("bogus",), (WEIGHTS, "bogus"))


class Walk(Struct):
    """What a walk saw."""

    machine: Coordinator
    view: View
    #: Concrete representatives, in the order in which they were found (breadth first).
    nodes: list[tuple[State, History]] = []
    keys: dict[Key, int] = {}
    #: How each node was first reached.
    origins: list[tuple[int, Event] | None] = []
    edges: set[Edge] = set()
    #: Number of (state, event) pairs tried.
    transitions: int = 0
    #: Edges of the events that a well-behaved environment sends, for liveness: node -> nodes.
    good: dict[int, set[int]] = {}
    #: Where the deadline leads: node -> node.
    expired: dict[int, int] = {}
    phases: Counter[Phase] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)

    def path(self, node: int) -> list[Event]:
        """The shortest way from the beginning to a node."""
        events_: list[Event] = []
        origin = self.origins[node]
        while origin is not None:
            node, event = origin
            events_.append(event)
            origin = self.origins[node]
        return events_[::-1]


def walk(
    ranks: int,
    stages: StageLists,
    *,
    undo: bool = True,
    view: View = View.REDUCED,
    machine: type[Coordinator] = Coordinator,
) -> Walk:
    """Visit every state that can be reached.

    Raises:
        InvariantError: of the first step that breaks an invariant, with the shortest way there.
    """
    coordinator = machine(ranks, stages, undo_before_checkpoint=undo)
    seen = Walk(coordinator, view)
    plans = _plans(stages)
    todo: deque[int] = deque()

    def visit(state: State, history: History, origin: tuple[int, Event] | None) -> int:
        k = key(state, history, view, plans, coordinator.ranks)
        node = seen.keys.get(k)
        if node is None:
            node = seen.keys[k] = len(seen.nodes)
            seen.nodes.append((state, history))
            seen.origins.append(origin)
            seen.phases[state.phase] += 1
            if state.stage is not None:
                seen.stages[state.stage.name] += 1
            todo.append(node)
        return node

    visit(coordinator.state, History(), None)
    while todo:
        node = todo.popleft()
        state, history = seen.nodes[node]
        for event in events(coordinator, state, history, view):
            seen.transitions += 1
            coordinator.state = state
            instructions = coordinator.handle(event)
            after = coordinator.state
            try:
                later = observe(coordinator, history, state, event, instructions, after)
            except InvariantError as error:
                way = "\n  ".join(map(repr, [*seen.path(node), event]))
                raise InvariantError(error.rule, f"{error}\n  {way}\n  -> {instructions}") from None
            if later is history:
                continue
            target = visit(after, later, (node, event))
            seen.edges.add((node, target, _signature(event, instructions)))
            if isinstance(event, DeadlinePassed):
                seen.expired[node] = target
            elif _is_good(state, event):
                seen.good.setdefault(node, set()).add(target)
    return seen


def check_liveness(seen: Walk) -> None:
    """Every state has a way to end.

    With good replies only, every maximal way from a working state is finite and ends awake or checkpointed (an orderly
    exit: closed). With the deadline, each ends failed (an exit: closed). Every state can be shut down for good.

    Raises:
        InvariantError: naming the rule.
    """
    ends = {
        Phase.STARTING: {Phase.AWAKE},
        Phase.SUSPENDING: {Phase.AWAKE, Phase.CHECKPOINTED},
        Phase.RESUMING: {Phase.AWAKE, Phase.CHECKPOINTED},
        Phase.UNDOING: {Phase.AWAKE},
        Phase.CLOSING: {Phase.CLOSED},
    }
    phase = [state.phase for state, _ in seen.nodes]
    good = {node: targets for node, targets in seen.good.items() if phase[node] not in REST}
    # Nodes whose every good way ends: taken away from the ends backwards until nothing is left.
    waiting = {node: len(targets) for node, targets in good.items()}
    sources: dict[int, list[int]] = {}
    for node, targets in good.items():
        for target in targets:
            sources.setdefault(target, []).append(node)
    ready = [node for node, p in enumerate(phase) if p in REST]
    while ready:
        for source in sources.get(ready.pop(), ()):
            waiting[source] -= 1
            if not waiting[source]:
                ready.append(source)
    for node, p in enumerate(phase):
        if p in TERMINAL:
            continue
        if p not in REST:
            if waiting.get(node, 1):
                raise InvariantError("every_operation_can_end", f"{p} after {seen.path(node)}")
            wrong = {phase[t] for t in good[node]} - ends[p] - {p} - _undoes(p)
            if wrong:
                raise InvariantError("an_operation_ends_where_it_should", f"{p} leads to {wrong}")
            final = phase[seen.expired[node]] if node in seen.expired else None
            if final is not (Phase.CLOSED if p is Phase.CLOSING else Phase.FAILED):
                raise InvariantError("a_deadline_ends_every_operation", f"{p} leads to {final}")
    closing = {source for source, target, how in seen.edges if how.startswith("ShutdownRequested")}
    for node, p in enumerate(phase):
        if p not in TERMINAL and p is not Phase.CLOSING and node not in closing:
            raise InvariantError("everything_can_be_shut_down", f"{p} after {seen.path(node)}")


def _undoes(phase: Phase) -> set[Phase]:
    return {Phase.UNDOING} if phase is Phase.SUSPENDING else set()


def _is_good(state: State, event: Event) -> bool:
    """Whether the event is what a healthy set of processes does."""
    match event:
        case Replied(_, index, _, error, _, state_after):
            name = state.plan[index].name if index < len(state.plan) else ""
            return error is None and state_after is _EXPECTED.get(name)
        case RpcReplied():
            return True
        case ProcessExited():
            return state.phase is Phase.CLOSING
        case _:
            return False


def _signature(event: Event, instructions: list[Instruction]) -> str:
    return f"{type(event).__name__}:{','.join(type(i).__name__ for i in instructions)}"


# -- events -----------------------------------------------------------------------------------------


def events(machine: Coordinator, s: State, h: History, view: View) -> Iterator[Event]:
    """Every event, possible or absurd, in this state.

    The views that exist for comparison leave out most of what has no effect; the reduced one tries it.
    """
    everything = view is View.REDUCED
    ranks = _representatives(machine, s, h) if everything else sorted(machine.ranks)
    anyone = (*ranks, HELPER, _NOBODY)
    new = max(s.request or 0, s.rpc or 0) + 1
    yield from _requests(new, everything)
    yield ProcessExited(Role.HELPER, HELPER, -9)
    for rank in (*ranks, _NOBODY):
        yield ProcessExited(Role.WORKER, rank, 1)
    for call in (s.rpc or _SOME_REQUEST, new) if everything else (s.rpc or _SOME_REQUEST,):
        yield Abandon(call)
        for rank in anyone:
            yield RpcReplied(call, rank)
    places = {(s.cycle, s.armed), (s.cycle, s.index), (s.cycle, s.index + 1), (s.cycle, s.index - 1)}
    for cycle, index in sorted(places | {(s.cycle - 1, s.armed), (s.cycle + 1, s.armed)}):
        yield DeadlinePassed(cycle, index)
    expected = _EXPECTED.get(s.stage.name) if s.stage else None
    for rank in anyone:
        yield Replied(s.cycle - 1, s.index, rank, state_after=expected)
        if everything:
            yield Replied(s.cycle - 1, s.index, rank, ERRORS[0], state_after=ProcessState.RUNNING)
            yield Replied(s.cycle + 1, s.index, rank, state_after=expected)
            yield Replied(s.cycle, s.index + 1, rank, state_after=expected)
            yield Replied(s.cycle, s.index - 1, rank, ERRORS[0], state_after=ProcessState.LOCKED)
        if rank in s.pending or rank in h.awaiting:
            yield from _replies(s, rank, ERRORS[: _ERRORS_IN[view]])
        else:  # a duplicate, or nobody's business
            yield Replied(s.cycle, s.index, rank, ERRORS[0], state_after=ProcessState.LOCKED)
            if everything:
                yield Replied(s.cycle, s.index, rank, state_after=expected)


def _requests(new: int, everything: bool) -> Iterator[Event]:
    yield StartRequested(new)
    for level in (0, 1, 2, 3, -1) if everything else (0, 1):
        yield SleepRequested(new, level)
    for tags in _WAKE_TAGS + _WRONG_TAGS if everything else _WAKE_TAGS:
        yield WakeRequested(new, tags)
    yield ReleaseRequested(new)
    yield RpcRequested(new, execution=False)
    yield RpcRequested(new, execution=True)
    yield ShutdownRequested(new)


def _replies(s: State, rank: int, errors: tuple[ErrorInfo, ...]) -> Iterator[Event]:
    """Every reply to the stage in progress. Only the helper knows process states."""
    name = s.stage.name if s.stage else ""
    states = _STATES if name in _EXPECTED else (None, ProcessState.RUNNING) if name == "register" else (None,)
    for state_after in states:
        yield Replied(s.cycle, s.index, rank, state_after=state_after)
        for error in errors:
            yield Replied(s.cycle, s.index, rank, error, state_after=state_after)


# -- keys -------------------------------------------------------------------------------------------


def _plans(stages: StageLists) -> dict[int, str]:
    """Names of the plans, which are long to hash, by identity. An undo has its own phase and needs none."""
    return {id(getattr(stages, name)): name for name in ("start", "down", "up", "release", "wake")}


def key(state: State, h: History, view: View, plans: dict[int, str], ranks: frozenset[int]) -> Key:
    """The node's name in a view."""
    plan: Key = plans.get(id(state.plan)) or (state.phase, len(state.plan))
    common = (
        state.phase,
        state.sleeping,
        state.paused,
        state.operation,
        state.request is None,
        plan,
        state.index,
        state.wanted,
        state.deadline,
        state.armed,
        state.rpc is None,
        state.rpc_abandoned,
        h.asked,
        h.killed,
        h.past_return,
        h.undoing,
        h.failed,
        bool(state.undoing),
    )
    if view is View.REDUCED:
        return (common, HELPER in state.pending, HELPER in h.awaiting, tuple(sorted(_situations(state, h, ranks))))
    sets = (
        state.pending,
        state.locked,
        state.rpc_pending,
        h.awaiting,
        h.locked,
        h.checkpointed,
        h.owing,
        h.done,
    )
    if view is View.FULL:
        return (common, sets, frozenset(rank for rank, _ in state.errors))
    return (common, sets, state.errors, state.undoing, state.warnings, state.cause)


def _situations(s: State, h: History, ranks: frozenset[int]) -> list[int]:
    """For each rank in order, everything that is said of it, as bits."""
    found = [0] * len(ranks)
    errors = [rank for rank, _ in s.errors]
    bit = 1
    for said_of in (
        s.pending, s.locked, errors, s.rpc_pending, h.awaiting, h.locked, h.checkpointed, h.owing,
    ):  # fmt: skip
        for rank in said_of:
            if rank in ranks:
                found[rank] |= bit
        bit <<= 1
    for gate, rank in h.done:
        found[rank] |= bit << _GATE_PLACES[gate]
    return found


def _representatives(machine: Coordinator, s: State, h: History) -> list[int]:
    """One rank for each situation that a rank is in: the others can be exchanged with it."""
    first: dict[int, int] = {}
    for rank, situation in enumerate(_situations(s, h, machine.ranks)):
        first.setdefault(situation, rank)
    return list(first.values())

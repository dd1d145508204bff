"""Draws ``docs/state-diagrams.md`` from the coordinator itself, so that the page cannot drift from the rules.

The stages come from the tables of both front doors. The phases, and what a request leads to, come from walking the
coordinator at one rank: an arrow on the page is a step that the machine took.

    python scripts/make_state_diagrams.py            # write the page
    python scripts/make_state_diagrams.py --check    # exit 1 if the page is stale
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation

from msgspec.structs import replace  # noqa: E402

from checkpoint_executor.config import Deadlines  # noqa: E402
from checkpoint_executor.coordinator import (  # noqa: E402
    OWN_STAGES,
    SHARED_DEADLINES,
    VLLM_STAGES,
    Coordinator,
    OnError,
    Phase,
    Stage,
    StageLists,
    State,
    Who,
)
from checkpoint_executor.driver_states import EXPECTED_STATE, ProcessState  # noqa: E402
from checkpoint_executor.messages import (  # noqa: E402
    HELPER,
    Answer,
    DeadlinePassed,
    ErrorInfo,
    Event,
    Fail,
    Proceed,
    ProcessExited,
    Refuse,
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
from checkpoint_executor.tags import ALL_TAGS, KV_CACHE, WEIGHTS  # noqa: E402
from checkpoint_executor.vllm.settings import Settings  # noqa: E402

PAGE = ROOT / "docs" / "state-diagrams.md"
DOORS: dict[str, StageLists] = {"own workers": OWN_STAGES, "vLLM": VLLM_STAGES}
#: What each has if nobody says otherwise.
DEADLINES = {"own workers": Deadlines(), "vLLM": Settings().deadlines}
PLANS = {
    "start": "Start",
    "down": "Sleep",
    "up": "Wake from a checkpoint",
    "release": "Release of the KV cache",
    "wake": "Wake without a checkpoint (the rest of a partial wake, or after a release)",
}
_VERBS: dict[str, ProcessState] = {verb.value: state for verb, state in EXPECTED_STATE.items()}
_REQUEST = 2  # a number that no request in a state has

#: What a caller may ask for, as it is written on the page.
REQUESTS: dict[str, Callable[[int], Event]] = {
    "`sleep(0)`": lambda n: SleepRequested(n, 0),
    "`sleep(1)`": lambda n: SleepRequested(n, 1),
    "`wake_up()`": lambda n: WakeRequested(n),
    "`wake_up([weights])`": lambda n: WakeRequested(n, (WEIGHTS,)),
    "`wake_up([kv_cache])`": lambda n: WakeRequested(n, (KV_CACHE,)),
    "release": lambda n: ReleaseRequested(n),
    "RPC": lambda n: RpcRequested(n, execution=False),
    "execution RPC": lambda n: RpcRequested(n, execution=True),
    "shutdown": lambda n: ShutdownRequested(n),
}


# -- walking the machine -----------------------------------------------------------------------------


def events(s: State) -> Iterator[tuple[str, Event]]:
    """What can happen in a state, and how an arrow names it."""
    yield "start", StartRequested(_REQUEST)
    yield "sleep", SleepRequested(_REQUEST)
    yield "pause", SleepRequested(_REQUEST, 0)
    yield "release", ReleaseRequested(_REQUEST)
    for tags in (None, (WEIGHTS,), (KV_CACHE,)):
        yield "wake_up", WakeRequested(_REQUEST, tags)
    yield "RPC", RpcRequested(_REQUEST)
    yield "shutdown" if s.rpc is None else "shutdown during an RPC", ShutdownRequested(_REQUEST)
    if s.rpc is not None:
        yield "RPC", RpcReplied(s.rpc, 0)
    stage, error = s.stage, ErrorInfo("exception", "an error")
    for rank in sorted(s.pending) if stage else ():
        assert stage is not None
        yield "all stages done", Replied(s.cycle, s.index, rank, state_after=_VERBS.get(stage.name))
        failed = "all stages done" if stage.on_error is OnError.IGNORE else f"error in {stage.name}"
        for state in (None, ProcessState.RUNNING, ProcessState.LOCKED) if stage.name in _VERBS else (None,):
            yield failed, Replied(s.cycle, s.index, rank, error, state_after=state)
    for role, rank in ((Role.WORKER, 0), (Role.HELPER, HELPER)):
        yield "all have exited" if s.phase is Phase.CLOSING else "a process died", ProcessExited(role, rank, 1)
    if s.deadline is not None:
        yield "deadline", DeadlinePassed(s.cycle, s.armed)


def reachable(stages: StageLists) -> tuple[list[State], dict[tuple[Phase, Phase], list[str]]]:
    """Every state at one rank, and for each pair of phases the names of the steps between them."""
    machine = Coordinator(1, stages)
    states: dict[State, None] = {}
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    todo = deque([machine.state])
    while todo:
        state = todo.popleft()
        for name, event in events(state):
            machine.state = state
            machine.handle(event)
            # A cycle's number has no bound, and what killed an executor has no consequence.
            after = replace(machine.state, cycle=1, cause=None, warnings=(), request=machine.state.request and 1)
            after = replace(after, rpc=after.rpc and 1)
            if after.phase is not state.phase:
                names = arrows.setdefault((state.phase, after.phase), [])
                names += [name] if name not in names else []
            if after not in states:
                states[after] = None
                todo.append(after)
    return list(states), arrows


def outcome(stages: StageLists, state: State, event: Event) -> str:
    """What a request comes to in a state at rest, in a word or two."""
    machine = Coordinator(1, stages, state=state)
    instructions = machine.handle(event)
    end = _at_rest(machine)
    match instructions[-1]:
        case Refuse(_, refusal):
            return f"refused: {refusal.value}"
        case Fail():
            return "fails"
        case Proceed():
            return "proceeds"
        case Answer(performed=False) if end == state:
            return "no-op"
    if end.phase in (Phase.CLOSING, Phase.CLOSED):
        return f"→ {end.phase.value}"
    return "→ " + rest_name(end)


def _at_rest(machine: Coordinator) -> State:
    """Let every stage succeed."""
    while (stage := machine.state.stage) is not None:
        for rank in sorted(machine.state.pending):
            s = machine.state
            machine.handle(Replied(s.cycle, s.index, rank, state_after=_VERBS.get(stage.name)))
    return machine.state


def rest_name(s: State) -> str:
    """A state at rest in words."""
    asleep = [tag for tag in ALL_TAGS if tag in s.sleeping]
    parts = [s.phase.value]
    if asleep and s.phase is Phase.AWAKE:
        parts.append(f"{' and '.join(asleep)} asleep")
    if s.paused:
        parts.append("paused")
    return ", ".join(parts)


# -- drawing -----------------------------------------------------------------------------------------


def phase_diagram(stages: StageLists) -> Iterator[str]:
    _, arrows = reachable(stages)
    order = list(Phase)
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {Phase.NEW.value}"
    for (source, target), names in sorted(arrows.items(), key=lambda item: [order.index(p) for p in item[0]]):
        yield f"    {source.value} --> {target.value}: {_label(names)}"
    for phase in (Phase.CLOSED, Phase.FAILED):
        yield f"    {phase.value} --> [*]"
    yield "```"


def _label(names: list[str]) -> str:
    """Errors in many stages are one arrow."""
    errors = [name for name in names if name.startswith("error in ")]
    others = [name for name in names if name not in errors]
    if len(errors) > 1:
        errors = ["an error"]
    return ", ".join([*others, *errors])


def request_table(stages: StageLists) -> Iterator[str]:
    states, _ = reachable(stages)
    # One state for each name; what else is in them (a call in progress) makes any of these requests busy.
    at_rest: dict[str, State] = {}
    for state in states:
        if state.phase in (Phase.AWAKE, Phase.CHECKPOINTED) and state.rpc is None:
            at_rest.setdefault(rest_name(state), state)
    yield f"| state | {' | '.join(REQUESTS)} |"
    yield "|---" * (len(REQUESTS) + 1) + "|"
    for name in sorted(at_rest):
        cells = [outcome(stages, at_rest[name], request(_REQUEST)) for request in REQUESTS.values()]
        yield f"| **{name}** | {' | '.join(cells)} |"


def plan_diagram(plan: tuple[Stage, ...]) -> Iterator[str]:
    yield "```mermaid"
    yield "flowchart LR"
    for i, stage in enumerate(plan):
        yield f'    s{i}["{stage.name}<br/><i>{_who(stage)}</i>"]'
    if len(plan) > 1:
        yield "    " + " --> ".join(f"s{i}" for i in range(len(plan)))
    yield "```"


def undo_diagram(plan: tuple[Stage, ...]) -> Iterator[str]:
    """What each stage is mirrored by."""
    mirrored = [stage for stage in plan if stage.undone_by]
    yield "```mermaid"
    yield "flowchart LR"
    names: list[str] = []
    for stage in reversed(mirrored):
        names += [mirror.name for mirror in stage.undone_by]
    for i, name in enumerate(names):
        yield f'    u{i}["{name}"]'
    yield "    " + " --> ".join(f"u{i}" for i in range(len(names)))
    yield "```"


def stage_table(plan: tuple[Stage, ...], deadlines: Deadlines) -> Iterator[str]:
    yield "| # | stage | who | deadline | on error | undone by |"
    yield "|---|---|---|---|---|---|"
    for i, stage in enumerate(plan):
        shared = stage.deadline in SHARED_DEADLINES and i > 0 and plan[i - 1].deadline is stage.deadline
        seconds = deadlines.seconds(stage.deadline)
        deadline = (
            f"{stage.deadline.value}, shared with the stage before"
            if shared
            else f"{stage.deadline.value}: {seconds:g} s"
        )
        undone_by = ", ".join(f"`{mirror.name}`" for mirror in stage.undone_by)
        yield f"| {i} | `{stage.name}` | {_who(stage)} | {deadline} | {stage.on_error.value} | {undone_by} |"


def _who(stage: Stage) -> str:
    who = {
        Who.WORKERS: "each worker",
        Who.HELPER: "helper, for each rank",
        Who.HELPER_ITSELF: "helper",
        Who.EVERYONE: "each worker and the helper",
    }[stage.who]
    return f"{who}, unasked" if stage.silent else who


def page() -> Iterator[str]:
    yield "# The coordinator, drawn from its tables"
    yield ""
    yield "Generated by `scripts/make_state_diagrams.py` from `checkpoint_executor/coordinator.py`. Do not edit: change"
    yield "the tables and run the script; a test fails while this page is stale."
    yield ""
    yield "## Phases"
    yield ""
    drawn: dict[str, list[str]] = {}
    for door, stages in DOORS.items():
        drawn.setdefault("\n".join(phase_diagram(stages)), []).append(door)
    yield "Every change of phase that the machine makes at one rank, with `undo_before_checkpoint=True`"
    yield "and the stages of " + (" or ".join(DOORS) if len(drawn) == 1 else "each front door") + "."
    for diagram, doors in drawn.items():
        yield ""
        if len(drawn) > 1:
            yield f"### {' and '.join(doors)}"
            yield ""
        yield diagram
    yield ""
    yield "## What a request comes to"
    yield ""
    yield "In each state at rest, if every stage succeeds. While an operation or a worker call is in progress,"
    yield "everything but `shutdown` is refused as busy. Level 2 and unknown tags are refused everywhere."
    for door, stages in DOORS.items():
        yield ""
        yield f"### {door}"
        yield ""
        yield from request_table(stages)
    for door, stages in DOORS.items():
        yield ""
        yield f"## Stages: {door}"
        for field, title in PLANS.items():
            plan: tuple[Stage, ...] = getattr(stages, field)
            yield ""
            yield f"### {title}"
            yield ""
            yield from plan_diagram(plan)
            yield ""
            yield from stage_table(plan, DEADLINES[door])
        yield ""
        yield "### Undo of a failed lock"
        yield ""
        after = "awake, as it was before" if stages.undo_wakes else "awake, in ordinary level-1 sleep until `wake_up`"
        yield f"Only ranks that read back as locked are unlocked. It ends {after}; any error in it is fatal."
        yield ""
        yield from undo_diagram(stages.down)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw docs/state-diagrams.md from the coordinator's tables.")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is stale; write nothing")
    parser.add_argument("--output", type=Path, default=PAGE, help="where the page is (default: %(default)s)")
    options = parser.parse_args(arguments)
    output: Path = options.output
    text = "\n".join(page()) + "\n"
    if options.check:
        if output.exists() and output.read_text(encoding="utf-8") == text:
            return 0
        print(f"{output} is stale: run python scripts/make_state_diagrams.py", file=sys.stderr)
        return 1
    output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Drives one coordinator by hand. Every step is checked against the invariants, and the final state once more."""

from __future__ import annotations

from collections.abc import Callable

from checkpoint_executor.coordinator import OWN_STAGES, Coordinator, Phase, StageLists, State
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
    Send,
    ShutdownRequested,
    SleepRequested,
    StartRequested,
    WakeRequested,
)
from tests.support.coordinator_rules import REST, History, observe, validate

__all__ = ["Machine", "sent"]

_EXPECTED: dict[str, ProcessState] = {verb.value: state for verb, state in EXPECTED_STATE.items()}


def sent(instructions: list[Instruction]) -> list[str]:
    """Names of the stages that were sent, in order."""
    return [i.stage for i in instructions if isinstance(i, Send)]


class Machine:
    """A coordinator, what an onlooker knows of it, and the numbers that a front door would hand out."""

    def __init__(self, ranks: int = 2, stages: StageLists = OWN_STAGES, *, undo: bool = True) -> None:
        self.coordinator = Coordinator(ranks, stages, undo_before_checkpoint=undo)
        self.history = History()
        #: The number of the last request.
        self.request = 0
        #: Everything that was to be done, in order.
        self.done: list[Instruction] = []

    @property
    def state(self) -> State:
        return self.coordinator.state

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def stage(self) -> str | None:
        return self.state.stage.name if self.state.stage else None

    def handle(self, event: Event) -> list[Instruction]:
        before = self.state
        instructions = self.coordinator.handle(event)
        self.history = observe(self.coordinator, self.history, before, event, instructions, self.state)
        self.done += instructions
        return instructions

    def validate(self) -> None:
        validate(self.coordinator, self.history, self.state)

    # -- requests --------------------------------------------------------------------------------

    def start(self) -> list[Instruction]:
        return self.handle(StartRequested(self._next()))

    def sleep(self, level: int = 1) -> list[Instruction]:
        return self.handle(SleepRequested(self._next(), level))

    def wake(self, *tags: str) -> list[Instruction]:
        """Wake these tags; without any, all."""
        return self.handle(WakeRequested(self._next(), tags or None))

    def release(self) -> list[Instruction]:
        return self.handle(ReleaseRequested(self._next()))

    def rpc(self, *, execution: bool = False) -> list[Instruction]:
        return self.handle(RpcRequested(self._next(), execution))

    def abandon(self, request: int) -> list[Instruction]:
        return self.handle(Abandon(request))

    def shutdown(self) -> list[Instruction]:
        return self.handle(ShutdownRequested(self._next()))

    @property
    def asks(self) -> tuple[Callable[[], list[Instruction]], ...]:
        """Every kind of request that one caller may make while another waits."""
        return (self.sleep, lambda: self.sleep(0), self.wake, self.release, self.rpc)

    def _next(self) -> int:
        self.request += 1
        return self.request

    # -- outcomes --------------------------------------------------------------------------------

    def reply(self, rank: int, error: ErrorInfo | None = None, state: ProcessState | None = None) -> list[Instruction]:
        """A rank answers the stage in progress; a success reads back as it should unless told otherwise."""
        if error is None and state is None:
            state = _EXPECTED.get(self.stage or "")
        return self.handle(Replied(self.state.cycle, self.state.index, rank, error, None, state))

    def rpc_reply(self, request: int, rank: int) -> list[Instruction]:
        return self.handle(RpcReplied(request, rank))

    def exit(self, rank: int, status: int | None = 0) -> list[Instruction]:
        role = Role.HELPER if rank == HELPER else Role.WORKER
        return self.handle(ProcessExited(role, rank, status))

    def deadline(self) -> list[Instruction]:
        """The deadline in force passes."""
        return self.handle(DeadlinePassed(self.state.cycle, self.state.armed))

    def finish_stage(self) -> list[Instruction]:
        """Every rank that owes an answer succeeds. Returns what the last answer led to."""
        instructions: list[Instruction] = []
        for rank in sorted(self.history.awaiting):
            instructions = self.reply(rank)
        return instructions

    def run_to(self, stage: str) -> None:
        """Let every stage succeed until this one is in progress."""
        while self.stage != stage:
            assert self.phase not in REST, f"{stage} was never begun"
            self.finish_stage()

    def finish(self) -> list[Instruction]:
        """Let every stage succeed. Returns everything that was to be done on the way."""
        begin = len(self.done)
        while self.phase not in REST:
            self.finish_stage()
        return self.done[begin:]

    # -- places to begin at ----------------------------------------------------------------------

    def new(self) -> Machine:
        return self

    def awake(self) -> Machine:
        self.start()
        self.finish()
        return self

    def asleep(self) -> Machine:
        self.awake().sleep()
        self.finish()
        return self

    def locking(self) -> Machine:
        """Asked to sleep, with the lock in progress."""
        self.awake().sleep()
        self.run_to("lock")
        return self

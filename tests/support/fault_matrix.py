"""The fault matrix: which cells there are, how each has to end, and a bench that runs them.

A *cell* is one fault in one place: (fault, role, rank, stage) in one operation (a sleep, a wake, the undo of a sleep),
from one state before it, at one tensor-parallel size. :func:`all_cells` is the full product; what makes no sense in it
has a reason (:func:`senseless`), and what does has exactly one right ending (:func:`expected`), with its reason.
Stages come from ``coordinator.OWN_STAGES``, so that a new stage is covered when it is added there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product

import msgspec
from msgspec import Struct

from checkpoint_executor import CUDACheckpointExecutor, DeadlineError, FatalError, ProcessDiedError, RefusedError
from checkpoint_executor.config import Deadlines
from checkpoint_executor.coordinator import LOCK, OWN_STAGES, OnError, Stage, Who
from checkpoint_executor.driver_states import DriverCode, Verb
from checkpoint_executor.faults import Fault, Injection, armed_name
from checkpoint_executor.messages import DeadlineClass, Role
from tests.support.executor_harness import Leaks, SoftMachine, assert_failed, in_thread
from tests.support.executor_workers import pattern
from tests.support.fault_matrix_worker import HOOKS, MatrixWorker

__all__ = [
    "DEADLINES",
    "SIZES",
    "Bench",
    "Cell",
    "Ending",
    "Outcome",
    "all_cells",
    "expected",
    "senseless",
    "short_form",
]

SIZES = (1, 2, 4)
STATES = ("awake", "partially awake", "asleep")
OPERATIONS = ("sleep", "wake", "undo")

#: Scaled down, so that a hang costs a second.
DEADLINES = Deadlines(
    driver_s=1.0,
    driver_lock_s=0.3,
    worker_sleep_s=1.0,
    worker_wake_s=1.0,
    hook_s=1.0,
    start_s=60.0,
    shutdown_s=5.0,
    reap_s=5.0,
)
#: How late a slow answer is; also how long a stage is held open for a fault of the role that has no part in it.
SLOW_S = 0.3
#: Everything must be gone so soon after the verdict, seconds.
GONE_S = 2.0
#: What a call may take beyond the deadline that ends it: the stages before, the kill and the reaping.
CALL_SLACK_S = 2.0
#: The runtime directory's file system, where one can be mounted.
RUNTIME_BYTES = 256 << 10

_EVERYWHERE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
#: Python ignores these from its start, so that a process "ended" by one only hangs.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
SIGNALS = (
    *_EVERYWHERE,
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS),
    *(signal.SIGFPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGSTKFLT, signal.SIGXCPU),
    *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR, signal.SIGSYS),
    *_IGNORED,
)
#: Where every signal is committed; elsewhere the first three are.
_SIGNAL_STAGES = ("sleep_allocator", "checkpoint", "restore", "wake_allocator")
_CODES = (
    DriverCode.UNKNOWN,
    DriverCode.OPERATING_SYSTEM,
    DriverCode.ILLEGAL_STATE,
    DriverCode.NOT_READY,
    DriverCode.NOT_SUPPORTED,
)
_HOOK_FAULTS = ("hook exception", "hook hang")
_VERBS = frozenset(map(str, Verb))


# ------------------------------------------------------------------------------------------------
# Cells
# ------------------------------------------------------------------------------------------------


class Cell(Struct, frozen=True):
    """One fault in one place.

    Attributes:
        ranks: tensor-parallel size. rank: whose stage the fault is in, and whose worker for role ``worker``.
        state: before the operation. fault: a name of :data:`FAULTS`.
    """

    ranks: int
    rank: int
    state: str
    operation: str
    stage: str
    role: Role
    fault: str

    def __str__(self) -> str:
        who = "helper" if self.role is Role.HELPER else f"worker {self.rank}"
        where = f"{self.stage} (rank {self.rank})"
        return f"TP={self.ranks} {self.operation} from {self.state}: {self.fault} of {who} in {where}"


class FaultKind(Struct, frozen=True):
    """A column of the matrix: what :class:`Injection` calls fault, code and signal; no ``fault`` for a user's hook."""

    fault: Fault | None
    code: int = 999
    signal: int = 9


def _fault_kinds() -> dict[str, FaultKind]:
    kinds: dict[str, FaultKind] = {}
    for fault in Fault:
        match fault:
            case Fault.DRIVER_ERROR:
                kinds |= {f"driver error {int(code)}": FaultKind(fault, code=int(code)) for code in _CODES}
            case Fault.DIE:
                kinds |= {f"death by {number.name}": FaultKind(fault, signal=int(number)) for number in SIGNALS}
            case _:
                kinds[fault.value.replace("_", " ")] = FaultKind(fault)
    return kinds | {name: FaultKind(None) for name in _HOOK_FAULTS}


#: Every fault by name.
FAULTS = _fault_kinds()


def _undo_plan() -> tuple[Stage, ...]:
    until = OWN_STAGES.down.index(LOCK)
    return tuple(mirror for stage in reversed(OWN_STAGES.down[: until + 1]) for mirror in stage.undone_by)


def plan_of(operation: str, state: str) -> tuple[Stage, ...]:
    """The stages the operation runs from that state; none for a no-op."""
    match operation, state:
        case "sleep", "awake" | "partially awake":
            return OWN_STAGES.down
        case "undo", "awake" | "partially awake":
            return _undo_plan()
        case "wake", "asleep":
            return OWN_STAGES.up
        case "wake", "partially awake":
            return OWN_STAGES.wake
    return ()


def all_cells(sizes: tuple[int, ...] = SIZES) -> Iterator[Cell]:
    """The full product: every fault, role, stage and state, and the first and the last rank of each size."""
    stages = {"sleep": OWN_STAGES.down, "wake": OWN_STAGES.up, "undo": _undo_plan()}
    for ranks in sizes:
        for operation, state, role, rank in product(OPERATIONS, STATES, Role, sorted({0, ranks - 1})):
            for stage, fault in product(stages[operation], FAULTS):
                yield Cell(ranks, rank, state, operation, stage.name, role, fault)


def _stage(cell: Cell) -> Stage | None:
    return next((stage for stage in plan_of(cell.operation, cell.state) if stage.name == cell.stage), None)


def _performs(stage: Stage, role: Role) -> bool:
    return (role is Role.WORKER) == (stage.who is Who.WORKERS)


def senseless(cell: Cell) -> str | None:
    """Why the cell is not run, or None if it is."""
    kind, stage = FAULTS[cell.fault], _stage(cell)
    if stage is None:
        return "the stage is not part of this operation from this state"
    if cell.operation == "undo" and cell.stage == "unlock" and cell.ranks == 1:
        return "with one rank, the lock that failed leaves nobody to unlock"
    if not _performs(stage, cell.role):
        if kind.fault is Fault.STOP or cell.fault == "death by SIGKILL":
            return None
        if kind.fault is Fault.DIE:
            return "whoever has no part in the stage dies from outside, by SIGKILL: the signal changes only the status"
        return "the role does nothing in this stage, and so cannot do it wrongly"
    if cell.fault in _HOOK_FAULTS and (cell.role is not Role.WORKER or cell.stage not in HOOKS):
        return "no hook of the user runs in this stage"
    if kind.fault is Fault.DRIVER_ERROR and cell.role is Role.WORKER:
        return "a worker's stage calls no verb of the driver's"
    if kind.fault is Fault.DRIVER_ERROR and cell.stage not in _VERBS and kind.code != _CODES[0]:
        return "a reading fails, or not: its code changes only the text"
    if kind.fault is Fault.WRONG_STATE and cell.stage not in _VERBS:
        return "only a verb of the driver's leads to a state"
    everywhere = kind.fault is not Fault.DIE or kind.signal in _EVERYWHERE
    if not everywhere and (cell.stage not in _SIGNAL_STAGES or cell.ranks > 1 or cell.operation == "undo"):
        return f"the signal changes only the status: every one is tried at TP=1 in {', '.join(_SIGNAL_STAGES)}"
    return None


# ------------------------------------------------------------------------------------------------
# The rule
# ------------------------------------------------------------------------------------------------


class Ending(Struct, frozen=True):
    """How a cell has to end.

    Attributes:
        what: ``"succeeds"``, ``"refused"`` or ``"fatal"``. why: for which reason.
        error: of a fatal one, the type's name; stage: where; code: the driver's; status: of the process that died.
        names_rank: whether the error is about the cell's rank (a deadline may name another that waits for it).
    """

    what: str
    why: str
    error: str = ""
    stage: str = ""
    code: int | None = None
    status: int | None = None
    names_rank: bool = False


def expected(cell: Cell) -> Ending:
    """The right ending of a cell that makes sense; a pure function of it."""
    kind, stage = FAULTS[cell.fault], _stage(cell)
    assert stage is not None
    if cell.operation == "undo":
        good = Ending("refused", "the failed lock is undone, and the executor serves on", stage=LOCK.name)
    else:
        good = Ending("succeeds", "")
    if not _performs(stage, cell.role):
        return _from_outside(cell, kind, stage, good)
    match kind.fault:
        case Fault.SLOW:
            return _but(good, "it answers within the deadline")
        case Fault.GARBAGE | Fault.STALE_REPLY | Fault.DUPLICATE_REPLY:
            return _but(good, "a frame that is not the awaited answer is dropped, and the right answer counts")
        case Fault.FULL_DIRECTORY:
            return _but(good, "nothing is written to the runtime directory after the start")
        case Fault.DIE if kind.signal in _IGNORED:
            return _deadline(stage, "the process ignores the signal and hangs")
        case Fault.DIE:
            return Ending("fatal", "a process died", "ProcessDiedError", stage.name, status=-kind.signal)
        case Fault.HANG | Fault.STOP | Fault.PARTIAL:
            return _deadline(stage, "no answer: whether the stage was completed is not known")
        case None if cell.fault == "hook hang":
            return _deadline(stage, "no answer: whether the stage was completed is not known")
    return _of_error(cell, kind, stage)


def _of_error(cell: Cell, kind: FaultKind, stage: Stage) -> Ending:
    """An error as the answer."""
    code = None
    if cell.role is Role.HELPER:
        codes = {
            Fault.DRIVER_ERROR: kind.code,
            Fault.OUT_OF_MEMORY: int(DriverCode.OUT_OF_MEMORY),
            Fault.WRONG_STATE: int(DriverCode.SUCCESS),
        }
        code = codes.get(kind.fault) if kind.fault is not None else None
    match stage.on_error:
        case OnError.IGNORE:
            return Ending("succeeds", "a reading for the report, which goes on without it")
        case OnError.REFUSE:
            return Ending("refused", "nothing was touched yet", stage=stage.name, code=code)
        case OnError.WITHDRAW:
            return Ending("refused", "admission touched no rank, so the sleep is undone", stage=stage.name, code=code)
        case OnError.UNDO if kind.fault is not Fault.EXCEPTION:
            return Ending("refused", "every state was read and is known, so it is undone", stage=stage.name, code=code)
        case OnError.UNDO:
            why = "before the point of no return, but no state was read: uncertain"
        case _ if cell.operation == "undo":
            why = "an error while undoing"
        case _:
            why = "an error where nothing can be undone"
    return Ending("fatal", why, "FatalError", stage.name, code=code, names_rank=True)


def _from_outside(cell: Cell, kind: FaultKind, stage: Stage, good: Ending) -> Ending:
    """A process dies or is stopped while the other role performs the stage."""
    if kind.fault is Fault.DIE:
        return Ending("fatal", "a process died", "ProcessDiedError", stage.name, status=-signal.SIGKILL)
    plan = plan_of(cell.operation, cell.state)
    for later in plan[plan.index(stage) :]:
        if cell.role is Role.WORKER and later.name in _VERBS:
            return Ending(
                "fatal",
                "the driver must not be asked about a stopped process, so its state is not known",
                "FatalError",
                later.name,
                code=int(DriverCode.NOT_READY),
                names_rank=True,
            )
        if _performs(later, cell.role):
            return _deadline(later, "stopped: it will not answer in the next stage that is its own")
    return _but(good, "stopped, but it had nothing more to do; it serves on when it is continued")


def _but(good: Ending, why: str) -> Ending:
    return msgspec.structs.replace(good, why=why)


def _deadline(stage: Stage, why: str) -> Ending:
    return Ending("fatal", why, "DeadlineError", stage.name)


# ------------------------------------------------------------------------------------------------
# Running
# ------------------------------------------------------------------------------------------------


class Outcome(Struct, frozen=True):
    """How a cell ended.

    Attributes:
        what: as in :class:`Ending`. problem: what was wrong, empty if nothing. call_s: what the call took.
        gone_s: of a fatal one, seconds from the verdict until nothing was left.
    """

    cell: Cell
    what: str
    problem: str
    call_s: float
    gone_s: float | None = None
    #: Whether it ran on the executor that survived the cell before, or on a new one.
    reused: bool = False
    #: What was wrong at a first attempt, if it took two.
    first_problem: str = ""


class WrongError(AssertionError):
    """The cell ended otherwise than it should."""


def _check(truth: bool, what: str) -> None:
    if not truth:
        raise WrongError(what)


class Bench:
    """A machine with software devices, and the executor that survived the last cell. Use as a context manager."""

    def __init__(self, deadlines: Deadlines = DEADLINES) -> None:
        self._deadlines = deadlines
        self._machine = SoftMachine()
        self._executor: CUDACheckpointExecutor | None = None
        self._leaks = Leaks()
        #: Whether the runtime directories are on a small file system of their own, which can be filled.
        self.can_fill = self._mount()

    def _mount(self) -> bool:
        if os.getuid() != 0:
            return False
        options = f"size={RUNTIME_BYTES},mode=0755"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._machine.runtime_base)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False

    def __enter__(self) -> Bench:
        return self

    def close(self) -> str:
        """End the executor. What it left behind, or nothing."""
        try:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None
            self._machine.assert_empty()
            self._leaks.check()
        except AssertionError as error:
            return str(error)
        return ""

    def __exit__(self, *_: object) -> None:
        try:
            _check(not (left := self.close()), left)
        finally:
            if self.can_fill:
                subprocess.run(["umount", "-l", str(self._machine.runtime_base)], check=True)
            self._machine.close()

    def senseless(self, cell: Cell) -> str | None:
        """As the function, with what is missing on this machine."""
        if FAULTS[cell.fault].fault is Fault.FULL_DIRECTORY and not self.can_fill:
            return senseless(cell) or "no small file system can be mounted here (needs root)"
        return senseless(cell)

    def run(self, cell: Cell) -> Outcome:
        """Run a cell; whatever is wrong is the outcome's ``problem``."""
        reused = self._executor is not None and self._executor.config.tensor_parallel_size == cell.ranks
        begun = time.monotonic()
        try:
            outcome = _Run(cell, self._machine, self._get(cell.ranks)).run()
        except Exception as error:  # noqa: BLE001 - a cell that cannot be run is a cell that is wrong
            outcome = Outcome(cell, "wrong", f"{type(error).__name__}: {error}", time.monotonic() - begun)
        if outcome.what in ("fatal", "wrong"):
            outcome = self._end(outcome)
        return msgspec.structs.replace(outcome, reused=reused)

    def cycle(self, ranks: int) -> None:
        """A sleep and a wake without a fault. Raises AssertionError if the weights are not what they were."""
        executor = self._get(ranks)
        executor.sleep()
        executor.wake_up()
        weights = executor.collective_rpc("read_weights")
        _check(weights == [pattern(rank) for rank in range(ranks)], "the weights are not what they were")

    @property
    def machine(self) -> SoftMachine:
        return self._machine

    def _get(self, ranks: int) -> CUDACheckpointExecutor:
        if self._executor is not None and self._executor.config.tensor_parallel_size != ranks:
            self._executor.shutdown()
            self._executor = None
        if self._executor is None:
            options = self._machine.options(deadlines=self._deadlines)
            self._executor = CUDACheckpointExecutor(MatrixWorker, ranks, **options)
        return self._executor

    def _end(self, outcome: Outcome) -> Outcome:
        executor, self._executor = self._executor, None
        try:
            if executor is not None:
                _continue(executor)
                executor.shutdown()
            self._machine.assert_empty()
            self._leaks.check()
        except AssertionError as error:
            problem = f"{outcome.problem} {error}".strip()
            return msgspec.structs.replace(outcome, what="wrong", problem=problem)
        return outcome


class _Run:
    """One cell on an executor that is awake."""

    def __init__(self, cell: Cell, machine: SoftMachine, executor: CUDACheckpointExecutor) -> None:
        self.cell = cell
        self.machine = machine
        self.executor = executor
        self.kind = FAULTS[cell.fault]
        self.ending = expected(cell)
        self.pids = executor.pids
        stage = _stage(cell)
        assert stage is not None
        self.performs = _performs(stage, cell.role)
        self.performer = cell.role if self.performs else Role.HELPER if cell.role is Role.WORKER else Role.WORKER
        self.folder = executor._control.runtime_dir

    def run(self) -> Outcome:
        self.prepare()
        call = self.executor.wake_up if self.cell.operation == "wake" else self.executor.sleep
        begun = time.monotonic()
        error: Exception | None = None
        try:
            if self.performs:
                call()
            else:
                self.call_and_strike(call)
        except (RefusedError, FatalError) as caught:
            error = caught
        call_s = time.monotonic() - begun
        what = "succeeds" if error is None else "fatal" if isinstance(error, FatalError) else "refused"
        gone_s = None
        try:
            if isinstance(error, FatalError):
                gone_s = self.wait_gone(error, call_s)
            _check(what == self.ending.what, f"should be {self.ending.what} ({self.ending.why})")
            if isinstance(error, FatalError):
                self.check_fatal(error, call_s)
            else:
                self.check_alive(error)
        except AssertionError as wrong:
            return Outcome(self.cell, "wrong", f"{what}: {wrong} [{type(error).__name__}: {error}]", call_s, gone_s)
        return Outcome(self.cell, what, "", call_s, gone_s)

    # Before

    def prepare(self) -> None:
        """Bring the executor into the state, with the fault in place."""
        _check(self.executor.phase == "awake" and not self.executor.is_sleeping, "the executor before is not awake")
        if self.cell.state != "awake":
            if self.cell.state == "asleep":
                self.arm_hook()
            self.executor.sleep()
        if self.cell.state == "partially awake":
            self.executor.wake_up(["weights"])
        if self.cell.state != "asleep":
            self.arm_hook()
        if self.cell.operation == "undo":
            # Another rank than the cell's where there is one: only ranks that are locked are unlocked.
            other = 0 if self.cell.rank else self.cell.ranks - 1
            self.arm(Injection(Fault.DRIVER_ERROR, Role.HELPER, other, LOCK.name, code=int(DriverCode.NOT_READY)))
        cell, kind = self.cell, self.kind
        if kind.fault is None:
            return
        if self.performs:
            injection = Injection(
                kind.fault, cell.role, cell.rank, cell.stage, code=kind.code, signal=kind.signal, delay_s=SLOW_S
            )
        else:
            injection = Injection(Fault.SLOW, self.performer, cell.rank, cell.stage, delay_s=SLOW_S)
        self.arm(injection)

    def arm_hook(self) -> None:
        if self.kind.fault is None:
            hook = HOOKS[self.cell.stage]
            self.executor.collective_rpc("arm_hook", args=(self.cell.rank, hook, self.cell.fault == "hook hang"))

    def arm(self, injection: Injection) -> None:
        path = self.folder / armed_name(injection.role, injection.rank, injection.stage)
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(injection))
        unfinished.rename(path)

    def call_and_strike(self, call: Callable[[], object]) -> None:
        """Call; when the stage is in progress, kill or stop the process that has no part in it."""
        name = "helper" if self.cell.role is Role.HELPER else f"worker {self.cell.rank}"
        future = in_thread(call)
        pause = threading.Event()
        # An undo runs stages of the same names as a wake, but no stage twice.
        while self.executor.stage != self.cell.stage:
            if future.done():
                break
            pause.wait(0.001)
        if not future.done():
            os.kill(self.pids[name], signal.SIGKILL if self.kind.fault is Fault.DIE else signal.SIGSTOP)
        future.result(60)

    # After

    def wait_gone(self, error: FatalError, call_s: float) -> float:
        """Until nothing is left; seconds from the verdict, which is when the error's clock stopped."""
        caught = time.monotonic()
        pause = threading.Event()
        while left := self.machine.leftovers():
            _check(time.monotonic() - caught < GONE_S, f"left {GONE_S:g} s after the error: {left}")
            pause.wait(0.005)
        gone_s = time.monotonic() - caught + call_s - (error.elapsed_s or 0.0)
        _check(gone_s < GONE_S, f"everything was gone only {gone_s:.2f} s after the verdict")
        return gone_s

    def check_fatal(self, error: FatalError, call_s: float) -> None:
        ending, cell = self.ending, self.cell
        _check(type(error).__name__ == ending.error, f"should be a {ending.error}")
        _check(error.stage == ending.stage, f"should be in {ending.stage}, not {error.stage}")
        _check(error.code == ending.code, f"its code should be {ending.code}, not {error.code}")
        _check(error.code is None or error.code_name is not None, "its code has no name")
        _check(error.elapsed_s is not None and bool(error.story) and error.survivors == (), "it lacks its facts")
        name = f"worker {error.rank}" if error.rank is not None else "helper"
        _check(error.pid == self.pids[name], f"its pid {error.pid} is not that of {name}")
        if ending.names_rank:
            _check(error.rank == cell.rank, f"it should be about rank {cell.rank}, not {error.rank}")
        if isinstance(error, ProcessDiedError):
            _check(error.exit_status == ending.status, f"status {error.exit_status} should be {ending.status}")
            died = f"worker {cell.rank}" if cell.role is Role.WORKER else "helper"
            _check(name == died, f"it should name {died}")
        allowed_s = CALL_SLACK_S + SLOW_S
        if isinstance(error, DeadlineError):
            stage = next(s for s in plan_of(cell.operation, cell.state) if s.name == ending.stage)
            seconds = self.executor.config.deadlines.seconds(DeadlineClass(stage.deadline))
            _check(error.deadline_s == seconds, f"its deadline should be {seconds:g} s, not {error.deadline_s}")
            if cell.role is Role.WORKER:
                _check(f"worker {cell.rank}" in error.message, f"its message should name worker {cell.rank}")
            allowed_s += seconds
        _check(call_s < allowed_s, f"the caller waited {call_s:.2f} s")
        if cell.operation == "undo":
            _check("while undoing" in error.message, "it should say that it happened while undoing")
        assert_failed(self.machine, self.executor, error, self.pids)

    def check_alive(self, error: Exception | None) -> None:
        """The executor serves on: its memory is right, it executes, and it still sleeps and wakes."""
        executor, cell, ending = self.executor, self.cell, self.ending
        _continue(executor)
        armed = [path.name for path in self.folder.glob("fault-*.json")]
        _check(not armed, f"the fault was never met: {armed}")
        _check(executor.pids == self.pids, "its processes are others")
        if isinstance(error, RefusedError):
            _check(error.executor_alive and error.stage == ending.stage, f"should be refused in {ending.stage}")
            if ending.code is not None and cell.stage in _VERBS:
                _check(error.code == ending.code, f"its code should be {ending.code}, not {error.code}")
        asleep = (cell.operation == "sleep") == (error is None) and cell.operation != "undo"
        asleep &= cell.state == "asleep" or error is None
        _check((executor.phase == "checkpointed") == asleep, f"its phase is {executor.phase}")
        if asleep:
            used = self.machine.used_bytes(cell.ranks)
            _check(not any(used), f"asleep, it holds {used} bytes")
        elif cell.operation == "wake":
            _check(executor.is_sleeping == (error is not None), f"asleep are {set(executor.sleeping_tags)}")
        else:
            tags = {"kv_cache"} if cell.state == "partially awake" else set()
            _check(set(executor.sleeping_tags) == tags, f"asleep are {set(executor.sleeping_tags)}")
        if executor.is_sleeping:
            executor.wake_up()
        weights = executor.collective_rpc("read_weights")
        _check(weights == [pattern(rank) for rank in range(cell.ranks)], "the weights are not what they were")
        _check(executor.collective_rpc("check_communicator") == [True] * cell.ranks, "the communicator is suspended")
        executor.collective_rpc("step")
        executor.check_health()
        (self.folder / "ballast").unlink(missing_ok=True)


def _continue(executor: CUDACheckpointExecutor) -> None:
    """SIGCONT to its processes, in case one was stopped. Nothing if they are gone."""
    if executor.phase not in ("failed", "closed"):
        for pid in executor.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# ------------------------------------------------------------------------------------------------
# The short form
# ------------------------------------------------------------------------------------------------


def short_form(operation: str, ranks: int = 2) -> list[Cell]:
    """One cell for each fault, role and ending of an operation, each in another stage than the last, last rank."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in all_cells((ranks,)):
        kind = FAULTS[cell.fault]
        rare = kind.fault is Fault.DIE and kind.signal != signal.SIGKILL
        rare |= kind.fault is Fault.DRIVER_ERROR and kind.code != _CODES[0]
        if cell.operation == operation and cell.rank == ranks - 1 and not rare and senseless(cell) is None:
            groups.setdefault((cell.fault, cell.role, expected(cell).what), []).append(cell)
    return [cells[number % len(cells)] for number, cells in enumerate(groups.values())]

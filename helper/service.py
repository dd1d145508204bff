"""The helper process: one loop, one thread per target, one thread for readings.

It carries out what the coordinator decided and judges nothing beyond a single verb: read the state back, compare it
with the table, keep the driver's code. Targets are driven concurrently, since a rank whose peer is locked can hang
any call on it (https://github.com/NVIDIA/cuda-checkpoint/issues/30). The loop itself never blocks in the driver, so it
always notices the parent's death, and then ends the workers: one that is inside a CUDA call may hold the GIL and
cannot act for itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from checkpoint_executor.child import Channel, FaultPlan, Stopwatch, die_with_parent, error_info
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.driver_states import (
    EXPECTED_STATE,
    DriverCode,
    DriverError,
    ProcessState,
    Verb,
)
from checkpoint_executor.faults import Fault, Injection
from checkpoint_executor.helper import preflight
from checkpoint_executor.helper.accounts import Accounts
from checkpoint_executor.helper.admission import DeviceLocks, judge_host, judge_sleep, judge_wake, needs
from checkpoint_executor.helper.drivers import DeviceMemory, Driver
from checkpoint_executor.helper.host_memory import rooms
from checkpoint_executor.helper.targets import HeldTarget
from checkpoint_executor.messages import DeviceReading, ErrorInfo, Exit, StageCommand, StageReply, Target
from checkpoint_executor.preflight import Finding

__all__ = ["serve"]

Job = Callable[[], None]

#: How often admission looks whether device memory has become free, seconds. A reading takes under a millisecond.
_MEMORY_POLL_S = 0.02

_VERBS = {str(verb): verb for verb in Verb}


def serve(spec: ChildSpec) -> None:
    """Run the helper until it is told to exit or its parent is gone."""
    parent = die_with_parent(spec)
    service = HelperService(spec, open_driver(spec), parent)
    service.run()


def open_driver(spec: ChildSpec) -> Driver:
    """The driver backend for this kind of device, not yet opened."""
    if spec.device_kind == "cuda":
        from checkpoint_executor.helper.cuda_driver import CudaDriver

        return CudaDriver()
    from checkpoint_executor.helper.soft_driver import SoftDriver

    return SoftDriver(Path(spec.soft_root))


def locks_directory(spec: ChildSpec) -> Path:
    """Where the locks on this kind of device are. Names of software devices mean something below their root only."""
    return Path(spec.soft_root) / "locks" if spec.device_kind == "soft" else Path(spec.locks_dir)


class _Lane:
    """A thread that does one thing after another."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


class HelperService:
    """The loop, and what it remembers: targets, their lanes, and the locks it holds for a wake."""

    def __init__(self, spec: ChildSpec, driver: Driver, parent_pidfd: int) -> None:
        self._spec = spec
        self._driver = driver
        self._parent_pidfd = parent_pidfd
        self._faults = FaultPlan(spec)
        self._accounts = Accounts(driver) if spec.attribution else None
        self._targets: dict[int, HeldTarget] = {}
        self._lanes: dict[int, _Lane] = {}
        self._readings = _Lane("readings")
        self._locks = DeviceLocks(locks_directory(spec))
        # zmq sockets belong to one thread: the lanes hand their replies over and wake the loop.
        self._replies: SimpleQueue[tuple[StageReply, Injection | None]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self) -> None:
        channel = Channel(self._spec)
        channel.watch(self._parent_pidfd)
        channel.watch(self._wake)
        error: ErrorInfo | None = None
        try:
            self._driver.open()
            if self._accounts is not None:
                self._accounts.opened()
        except DriverError as failure:
            # Told and not raised: a traceback here is far from whoever asked, and the parent ends us either way.
            error = error_info(failure)
        channel.hello(self._spec, error)
        while True:
            ready = channel.wait()
            if self._parent_pidfd in ready:
                self._parent_died()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while not self._replies.empty():
                    self._faults.send(channel, *self._replies.get())
            while (received := channel.receive()) is not None:
                message, _ = received
                match message:
                    case StageCommand():
                        self._begin(message)
                    case Exit():
                        channel.close()
                        # Now, not only in the parent: it may be killed before it gets there.
                        shutil.rmtree(self._spec.runtime_dir, ignore_errors=True)
                        os._exit(0)  # lanes may be inside the driver; there is nothing to clean up
                    case _:
                        print(f"checkpoint-executor helper: unexpected {message!r}", file=sys.stderr)  # noqa: T201

    def _parent_died(self) -> None:
        for held in self._targets.values():
            held.kill()
        # Sockets and the like: nobody else is left to remove them.
        shutil.rmtree(self._spec.runtime_dir, ignore_errors=True)
        os._exit(1)

    # -- stages ----------------------------------------------------------------------------------

    def _begin(self, command: StageCommand) -> None:
        if command.stage in _VERBS:
            verb = _VERBS[command.stage]
            for rank in command.ranks:
                self._lanes[rank].put(lambda rank=rank: self._verb(command, verb, rank))  # type: ignore[misc]
            return
        stage = {
            "register": self._register,
            "admit_sleep": self._admit_sleep,
            "admit_wake": self._admit_wake,
        }.get(command.stage, self._measure)
        self._readings.put(lambda: stage(command))

    def _reply(
        self,
        command: StageCommand,
        rank: int,
        elapsed_s: float,
        *,
        error: ErrorInfo | None = None,
        before: ProcessState | None = None,
        after: ProcessState | None = None,
        reading: DeviceReading | None = None,
        figures: dict[str, int] | None = None,
        findings: tuple[Finding, ...] = (),
        fault: Injection | None = None,
    ) -> None:
        reply = StageReply(
            command.cycle,
            command.index,
            command.stage,
            rank,
            elapsed_s,
            error=error,
            state_before=before,
            state_after=after,
            reading=reading,
            figures=figures or {},
            findings=findings,
        )
        self._replies.put((reply, fault))
        os.eventfd_write(self._wake, 1)

    def _verb(self, command: StageCommand, verb: Verb, rank: int) -> None:
        """One verb on one target: act, read the state back, compare."""
        held = self._targets[rank]
        watch = Stopwatch()
        error: ErrorInfo | None = None
        before: ProcessState | None = None
        after: ProcessState | None = None
        fault: Injection | None = None
        memory: DeviceMemory | None = None
        try:
            with self._faults.around(command.stage, rank) as fault:
                if held.is_stopped:
                    # Lock ignores its timeout on a stopped process, and even reading the state hangs.
                    raise DriverError(
                        verb, DriverCode.NOT_READY, detail=f"process {held.target.pid} is stopped (SIGSTOP); not called"
                    )
                before = self._driver.get_state(held.target)
                if verb is Verb.CHECKPOINT:
                    memory = self._driver.device_memory(held.target.device)
                try:
                    self._act(verb, held, command, fault)
                finally:
                    after = self._driver.get_state(held.target)
                if after is not EXPECTED_STATE[verb]:
                    raise DriverError(verb, DriverCode.SUCCESS, detail=f"succeeded, but the state reads {after}")
                if verb is Verb.CHECKPOINT:
                    held.checkpointed_bytes = self._given_back_bytes(held, memory)
        except DriverError as failure:
            if verb is Verb.UNLOCK and after is ProcessState.RUNNING:
                # Unlock has been seen to return an error although it worked: the state decides.
                print(f"checkpoint-executor helper: rank {rank}: {failure}, but it is running", file=sys.stderr)  # noqa: T201
            else:
                error = error_info(failure)
                if failure.code != DriverCode.NOT_READY:
                    # If it died, the parent is to see that first: it is the cause, and this only the consequence.
                    held.has_ended()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the parent must hear of it
            error = error_info(failure)
        self._reply(command, rank, watch.elapsed_s, error=error, before=before, after=after, fault=fault)

    def _act(self, verb: Verb, held: HeldTarget, command: StageCommand, fault: Injection | None) -> None:
        match fault.fault if fault else None:
            case Fault.DRIVER_ERROR if fault:
                raise DriverError(verb, fault.code, detail="injected")
            case Fault.OUT_OF_MEMORY:
                raise DriverError(verb, DriverCode.OUT_OF_MEMORY, detail="injected")
            case Fault.WRONG_STATE:
                return
        match verb:
            case Verb.LOCK:
                self._driver.lock(held.target, command.timeout_ms)
            case Verb.CHECKPOINT:
                self._driver.checkpoint(held.target)
            case Verb.RESTORE:
                self._driver.restore(held.target)
            case Verb.UNLOCK:
                self._driver.unlock(held.target)

    def _given_back_bytes(self, held: HeldTarget, before: DeviceMemory | None) -> int:
        """What a checkpoint freed: of the process, or of the whole device where processes cannot be told apart."""
        after = self._driver.device_memory(held.target.device)
        assert before is not None
        mine = dict(before.holders).get(held.target.pid)
        if mine is not None:
            return max(0, mine - dict(after.holders).get(held.target.pid, 0))
        return max(0, before.used_bytes - after.used_bytes)

    # -- readings --------------------------------------------------------------------------------

    def _register(self, command: StageCommand) -> None:
        """Take the targets, prove with a state query that each can be reached, and look for what stands in the way."""
        answers: list[tuple[Target, Stopwatch, ErrorInfo | None, ProcessState | None]] = []
        for target in command.targets:
            watch = Stopwatch()
            error = state = None
            try:
                held = HeldTarget(target)
                state = self._driver.get_state(target)
                if state is not ProcessState.RUNNING:
                    raise DriverError(
                        "get_state", DriverCode.SUCCESS, detail=f"a new worker should be running, not {state}"
                    )
                self._targets[target.rank] = held
                self._lanes[target.rank] = _Lane(f"target-{target.rank}")
            except Exception as failure:  # noqa: BLE001
                error = error_info(failure)
            answers.append((target, watch, error, state))
        if self._accounts is not None and self._spec.front_door == "vllm":
            self._accounts.were_there(command.targets)
        findings = preflight.inspect(
            [(target, preflight.query_of(state, error)) for target, _, error, state in answers],
            device_kind=self._spec.device_kind,
            communication=self._spec.communication,
            ranks=self._spec.world_size,
            front_door=self._spec.front_door,
        )
        # With the reply of the first rank that failed, or else the first: a finding may be about all of them.
        told = next((answer for answer in answers if answer[2] is not None), answers[0])
        for answer in answers:
            target, watch, error, state = answer
            mine = findings if answer is told else ()
            error = preflight.refusal(mine, self._spec.ignore_preflight, error)
            self._reply(command, target.rank, watch.elapsed_s, error=error, after=state, findings=mine)

    def _measure(self, command: StageCommand) -> None:
        if command.stage == "measure_woken":
            # The memory is resident. Before the replies, or a caller could see the wake end and the lock still held.
            self._locks.release()
        # One watch for all: the ranks are read one after another, and a rank's wait for the others is part of its time.
        watch = Stopwatch()
        for rank in command.ranks:
            error = reading = figures = None
            fault: Injection | None = None
            try:
                with self._faults.around(command.stage, rank) as fault:
                    target = self._targets[rank].target
                    memory = self._driver.device_memory(target.device)
                    if command.stage == "measure_awake":
                        # What a sleep is held to. Later readings come when some of it is gone.
                        self._targets[rank].measured = memory
                    reading = DeviceReading(target.device, memory.used_bytes, memory.total_bytes)
                    figures = self._accounts.figures(target) if self._accounts is not None else None
            except Exception as failure:  # noqa: BLE001
                error = error_info(failure)
            self._reply(command, rank, watch.elapsed_s, error=error, reading=reading, figures=figures, fault=fault)

    def _admit_sleep(self, command: StageCommand) -> None:
        """Look before the first lock: whatever is wrong now can still be undone."""
        watch = Stopwatch()
        moving: dict[int, int] = {}
        errors: dict[int, ErrorInfo | None] = {}
        faults: dict[int, Injection | None] = {}
        for index, rank in enumerate(command.ranks):
            try:
                with self._faults.around(command.stage, rank) as fault:
                    faults[rank] = fault
                    held = self._targets[rank]
                    now = self._driver.device_memory(held.target.device)
                    held_bytes, freed_bytes = held.compare(now)
                    moving[rank] = held_bytes
                    expected = command.needed_bytes[index]
                    errors[rank] = judge_sleep(held_bytes, freed_bytes, expected, command.limit_bytes)
            except Exception as failure:  # noqa: BLE001
                errors[rank] = error_info(failure)
        for rank in moving:
            if errors[rank] is None:
                # All of it at once, since the ranks move at once; in one group or not is not worth telling apart.
                limits = rooms(self._targets[rank].target.pid)
                errors[rank] = judge_host(limits, sum(moving.values()), command.margin_bytes)
        for rank in command.ranks:
            self._reply(command, rank, watch.elapsed_s, error=errors[rank], fault=faults.get(rank))

    def _admit_wake(self, command: StageCommand) -> None:
        """All ranks or none: a wake must not begin on some of them."""
        watch = Stopwatch()
        verdicts: dict[int, ErrorInfo | None] = dict.fromkeys(command.ranks)
        faults: dict[int, Injection | None] = {}
        readings: dict[int, DeviceReading] = {}
        pause = threading.Event()
        try:
            for rank in command.ranks:
                with self._faults.around(command.stage, rank) as fault:
                    faults[rank] = fault
            while True:
                verdicts, readings = self._try_to_admit(command)
                if not any(verdicts.values()) or watch.elapsed_s >= command.memory_wait_s:
                    break
                # Nobody tells when device memory becomes free. The locks are not held meanwhile, so that whoever
                # is to free it by waking and ending can do so.
                pause.wait(_MEMORY_POLL_S)
        except Exception as failure:  # noqa: BLE001
            self._locks.release()
            verdicts = dict.fromkeys(command.ranks, error_info(failure))
        for rank in command.ranks:
            self._reply(
                command,
                rank,
                watch.elapsed_s,
                error=verdicts[rank],
                reading=readings.get(rank),
                fault=faults.get(rank),
            )

    def _try_to_admit(self, command: StageCommand) -> tuple[dict[int, ErrorInfo | None], dict[int, DeviceReading]]:
        """Verdict and reading by rank; the locks are held afterwards if all ranks are admitted."""
        devices = {rank: self._targets[rank].target.device for rank in command.ranks}
        busy = self._locks.acquire(devices.values(), command.wait_s)
        if busy is not None:
            message = (
                f"another executor has been waking on {busy} for {command.wait_s:g} s. Nothing was touched: "
                "call wake_up() again"
            )
            return dict.fromkeys(command.ranks, ErrorInfo("refused", message, device=busy)), {}
        bytes_by_rank = {
            rank: needed + (self._targets[rank].checkpointed_bytes if command.restoring else 0)
            for rank, needed in zip(command.ranks, command.needed_bytes, strict=True)
        }
        wanted = needs(devices, bytes_by_rank, command.margin_bytes)
        memories = {device: self._driver.device_memory(device) for device in wanted}
        verdicts = {rank: judge_wake(device, memories[device], wanted[device]) for rank, device in devices.items()}
        readings = {
            rank: DeviceReading(device, memories[device].used_bytes, memories[device].total_bytes)
            for rank, device in devices.items()
        }
        if any(verdicts.values()):
            self._locks.release()
        return verdicts, readings

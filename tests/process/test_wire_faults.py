"""Frames that are malformed, late, doubled, forged or from a stranger are refused without harm."""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import zmq

from checkpoint_executor import CUDACheckpointExecutor, DeadlineError, procfs, wire
from checkpoint_executor.config import Deadlines
from checkpoint_executor.coordinator import OWN_STAGES
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.faults import Fault, Injection
from checkpoint_executor.messages import HELPER, CallReply, ErrorInfo, Hello, Role, StageReply, ToParent, identity
from checkpoint_executor.workers import WorkerContext
from tests.support.executor_harness import (
    DEADLINE_S,
    Gate,
    SoftMachine,
    assert_failed,
    in_thread,
    inject,
    inject_helper,
    inject_worker,
    state_of,
    states_of,
    wait_until,
)
from tests.support.executor_workers import RawWorker, pattern, wait_at

RANKS = 2
SHORT_S = 0.5
WEIGHTS = [pattern(rank) for rank in range(RANKS)]


def in_every_stage(fault: Fault) -> tuple[Injection, ...]:
    """The fault on every rank in every stage of a start, a sleep and a wake."""
    return tuple(
        inject(fault, Role.WORKER if stage.who == "workers" else Role.HELPER, rank, stage.name)
        for stage in (*OWN_STAGES.start, *OWN_STAGES.down, *OWN_STAGES.up)
        for rank in range(RANKS)
    )


@pytest.mark.parametrize("fault", [Fault.GARBAGE, Fault.DUPLICATE_REPLY, Fault.STALE_REPLY])
def test_a_cycle_succeeds_in_spite_of_bad_replies_in_every_stage(machine: SoftMachine, fault: Fault) -> None:
    executor = machine.make(ranks=RANKS, faults=in_every_stage(fault))
    for _ in range(2):
        report = executor.sleep()
        assert all(len(stage.ranks) == RANKS for stage in report.stages)
        assert states_of(executor) == {ProcessState.CHECKPOINTED}
        executor.wake_up()
        assert executor.collective_rpc("read_weights") == WEIGHTS


@pytest.mark.parametrize(
    ("injection", "deadlines"),
    [
        (inject_worker(Fault.PARTIAL, 1, "sleep_allocator"), Deadlines(worker_sleep_s=SHORT_S)),
        (inject_helper(Fault.PARTIAL, 1, "lock"), Deadlines(driver_s=SHORT_S, driver_lock_s=SHORT_S / 2)),
    ],
    ids=lambda value: value.stage if isinstance(value, Injection) else "",
)
def test_half_a_reply_is_none_and_the_deadline_holds(
    machine: SoftMachine, injection: Injection, deadlines: Deadlines
) -> None:
    executor = machine.make(ranks=RANKS, faults=(injection,), deadlines=deadlines)
    pids = executor.pids
    with pytest.raises(DeadlineError) as caught:
        executor.sleep()
    assert (caught.value.stage, caught.value.rank, caught.value.deadline_s) == (injection.stage, 1, SHORT_S)
    assert_failed(machine, executor, caught.value, pids)


# ---------------------------------------------------------------------------------------------- strangers


class Stranger:
    """Somebody of the same user who found the control socket."""

    def __init__(self, executor: CUDACheckpointExecutor, name: bytes = b"stranger") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndtimeo = 100
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.connect(f"ipc://{executor._control.runtime_dir}/control")

    def say(self, message: ToParent, payload: tuple[bytes, ...] = ()) -> None:
        self.say_frames(*wire.encode(message, payload))

    def say_frames(self, *frames: wire.Frame) -> None:
        self._socket.send_multipart(frames)

    def wait_heard(self) -> None:
        """Until all that was said has been taken: messages of one sender are taken in order, and noise is answered."""
        # Not capfd: what is written between its reading and its truncating is lost.
        with redirect_stderr(io.StringIO()) as said:
            self.say_frames(b"the last word")
            answer = "message from stranger refused: protocol version 116"
            wait_until(lambda: answer in said.getvalue(), "the stranger was heard")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def stranger(executor: CUDACheckpointExecutor) -> Iterator[Stranger]:
    made = Stranger(executor)
    yield made
    made.close()


def forged_replies(executor: CUDACheckpointExecutor) -> list[ToParent]:
    """What would carry the stage in progress on, if it were believed."""
    state = executor._control._coordinator.state
    stage = state.stage.name if state.stage else "sleep_allocator"
    facts: dict[str, Any] = {
        "state_before": ProcessState.RUNNING,
        "state_after": ProcessState.LOCKED,
        "figures": {"weights": 1 << 50, "kv_cache": 1 << 50, "suspendable": 1 << 50},
        "device": "SOFT-99",
        "execution_methods": ("identify",),
    }
    forged: list[ToParent] = []
    for rank in (*range(RANKS), HELPER):
        for name in (stage, "sleep_allocator", "suspend_communicators", "build", "anything"):
            for index in (state.index, 0):
                forged.append(StageReply(state.cycle, index, name, rank, 0.0, **facts))
        forged.append(StageReply(state.cycle, state.index, stage, rank, 0.0, error=ErrorInfo("driver", "forged")))
        pid = executor.pids["helper" if rank == HELPER else f"worker {rank}"]
        role = Role.HELPER if rank == HELPER else Role.WORKER
        forged.append(Hello(role, rank, pid, procfs.start_time(pid)))
    return forged


VERSION = bytes((wire.PROTOCOL_VERSION,))
NOISE = [
    (b"",),
    (VERSION,),
    (VERSION + b"\x80",),
    (bytes((wire.PROTOCOL_VERSION + 1,)) + wire.encode(CallReply(1, 0))[0][1:],),
    (VERSION + bytes(2 << 20),),
    tuple(b"" for _ in range(1000)),
    (VERSION + b"\xc1", b"payload"),
]


def test_noise_from_a_stranger_is_dropped(executor: CUDACheckpointExecutor, stranger: Stranger) -> None:
    for frames in NOISE:
        stranger.say_frames(*frames)
    stranger.wait_heard()
    executor.sleep()
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "checkpointed"])
def test_forged_messages_between_calls_change_nothing(
    executor: CUDACheckpointExecutor, stranger: Stranger, asleep: bool
) -> None:
    if asleep:
        executor.sleep()
    for message in forged_replies(executor):
        stranger.say(message)
    stranger.wait_heard()
    if not asleep:
        executor.sleep(level=0)
        executor.collective_rpc("identify")  # not an execution method, whoever says so
        executor.sleep()
    executor.wake_up()  # not refused for want of a pebibyte
    assert executor.collective_rpc("read_weights") == WEIGHTS


def test_forged_replies_do_not_carry_a_stage_on(
    executor: CUDACheckpointExecutor, stranger: Stranger, gate: Gate
) -> None:
    executor.collective_rpc("hold_device", args=(1, gate.path))
    gate.wait_reached()
    call = in_thread(executor.sleep)
    wait_until(lambda: state_of(executor, 0) is ProcessState.LOCKED, "the first rank is locked")
    wait_until(lambda: executor._control._coordinator.state.pending == {1}, "the first rank's reply was taken")
    for message in forged_replies(executor):
        stranger.say(message)
    stranger.wait_heard()
    assert executor._control._coordinator.state.pending == {1}
    assert state_of(executor, 0) is ProcessState.LOCKED
    assert not call.done()
    gate.open()
    call.result(DEADLINE_S)
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


@pytest.mark.parametrize("role", [Role.WORKER, Role.HELPER])
def test_a_stranger_cannot_take_the_name_of_a_child(
    executor: CUDACheckpointExecutor, gate: Gate, role: Role, stranger: Stranger
) -> None:
    impostor = Stranger(executor, identity(role, 1 if role is Role.WORKER else HELPER))
    try:
        executor.collective_rpc("hold_device", args=(1, gate.path))
        gate.wait_reached()
        call = in_thread(executor.sleep)
        wait_until(lambda: executor._control._coordinator.state.pending == {1}, "only the second rank is awaited")
        for message in forged_replies(executor):
            impostor.say(message)
        stranger.wait_heard()
        assert not call.done()
        gate.open()
        call.result(DEADLINE_S)
        executor.wake_up()
        assert executor.collective_rpc("read_weights") == WEIGHTS
    finally:
        impostor.close()


def test_bytes_that_are_no_zmq_at_all_are_dropped(executor: CUDACheckpointExecutor) -> None:
    path = str(executor._control.runtime_dir / "control")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as http,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute,
    ):
        mute.connect(path)
        http.connect(path)
        http.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        executor.sleep()
        executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


def test_a_frame_over_the_limit_is_not_taken(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, max_payload_bytes=1 << 20)
    stranger = Stranger(executor)
    try:
        stranger.say(CallReply(1, 0), (bytes(8 << 20),))
        executor.sleep()
        executor.wake_up()
        assert executor.collective_rpc("read_weights") == WEIGHTS
    finally:
        stranger.close()


def test_a_deadline_holds_against_a_stream_of_messages(machine: SoftMachine) -> None:
    injection = inject_worker(Fault.HANG, 1, "sleep_allocator")
    executor = machine.make(ranks=RANKS, faults=(injection,), deadlines=Deadlines(worker_sleep_s=SHORT_S))
    pids = executor.pids
    stranger = Stranger(executor)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            try:
                stranger.say(CallReply(1, 0))
            except zmq.Again:
                pass  # nobody listens any more

    thread = threading.Thread(target=chatter, daemon=True)
    thread.start()
    try:
        executor.collective_rpc("identify", timeout=DEADLINE_S)  # requests come through as well
        with pytest.raises(DeadlineError) as caught:
            executor.sleep()
    finally:
        stop.set()
        thread.join()
        stranger.close()
    assert caught.value.elapsed_s is not None
    assert caught.value.elapsed_s < 4 * SHORT_S
    assert_failed(machine, executor, caught.value, pids)


# ---------------------------------------------------------------------------------------------- children


def speak_for_others(worker: Any, gate: str) -> int:
    """Rank 0 answers this very call in rank 1's name; rank 1 takes its time."""
    rank: int = worker.context.rank
    if rank == 1:
        wait_at(gate)
    else:
        service = sys._getframe(1).f_locals["self"]  # of the worker service, which called us
        for call_id in range(10_000):
            service._channel.send(CallReply(call_id, 1), (b"\x18\x63",))
    return rank


def test_no_rank_can_answer_in_anothers_name(executor: CUDACheckpointExecutor, gate: Gate) -> None:
    call = in_thread(executor.collective_rpc, speak_for_others, args=(gate.path,))
    gate.wait_reached()
    wait_until(lambda: executor._control._coordinator.state.rpc_pending == {1}, "the first rank has answered")
    assert not call.done()
    gate.open()
    assert call.result(DEADLINE_S) == [0, 1]


class TwoFacedWorker(RawWorker):
    """Before a sleep, each rank says Hello again and answers for the others, and then takes its time."""

    def __init__(self, context: WorkerContext, gate: str) -> None:
        super().__init__(context)
        self._gate = gate

    def before_sleep(self) -> None:
        service = sys._getframe(1).f_locals["self"]
        service._channel.hello(service._spec)
        for rank in range(self.context.world_size):
            if rank != self.context.rank:
                for cycle in range(10):
                    service._channel.send(StageReply(cycle, 1, "sleep_allocator", rank, 0.0))
        service._channel.send_frames([b"the last word"])
        wait_at(self._gate)


def test_no_rank_can_end_a_stage_for_another_or_by_saying_hello(machine: SoftMachine, gate: Gate) -> None:
    executor = machine.make(TwoFacedWorker, ranks=RANKS, worker_kwargs={"gate": gate.path})
    with redirect_stderr(io.StringIO()) as said:
        call = in_thread(executor.sleep)
        gate.wait_reached(RANKS)
        answers = [f"message from worker:{rank} refused" for rank in range(RANKS)]
        wait_until(lambda: all(answer in said.getvalue() for answer in answers), "both ranks were heard")
    state = executor._control._coordinator.state
    assert (executor.stage, state.index) == ("sleep_allocator", 1)
    assert state.pending == set(range(RANKS))
    gate.open()
    call.result(DEADLINE_S)
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS


@pytest.mark.parametrize("child", [identity(Role.WORKER, 0), identity(Role.HELPER, HELPER)], ids=bytes.decode)
def test_a_child_drops_noise_from_the_parent(
    capfd: pytest.CaptureFixture[str], machine: SoftMachine, child: bytes
) -> None:
    executor = machine.make(ranks=RANKS)
    control = executor._control

    def send() -> None:
        for frames in NOISE:
            control.transport._socket.send_multipart([child, *frames])

    assert control.post(send)
    executor.sleep()
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == WEIGHTS
    assert capfd.readouterr().err.count("message from the parent refused") == len(NOISE)

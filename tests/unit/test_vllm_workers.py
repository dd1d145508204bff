"""The workers' part of the stages under vLLM, with a worker that only writes down what it is asked. Needs no vLLM."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from checkpoint_executor import procfs
from checkpoint_executor.messages import StageCommand, StageReply
from checkpoint_executor.vllm import workers
from checkpoint_executor.vllm.workers import Figures, StageCall, WorkerSide, perform


class Worker:
    """vLLM's wrapper and the worker in it, in one."""

    rank = 1

    def __init__(self) -> None:
        self.worker = self
        self.calls: list[Any] = []
        self.gc_during_restore: bool | None = None

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None) -> None:
        self.calls.append(("wake_up", tags))

    def execute_model(self, batch: str) -> None:
        self.calls.append(("execute_model", batch))

    def checkpoint_prepare(self) -> None:
        self.calls.append("prepare")

    def checkpoint_restore(self) -> None:
        self.gc_during_restore = gc.isenabled()
        self.calls.append("restore")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))


def _put(value: int, _communicator: Any, _which: Any, found: Any) -> int:
    """NCCL's way to answer: through a pointer."""
    found._obj.value = value
    return 0


class Communicator:
    comm = 0

    def __init__(
        self, suspended: bool, *, disabled: bool = False, has_suspend: bool = True, memory_bytes: int = 0
    ) -> None:
        self.lib = SimpleNamespace(ncclCommMemStats=partial(_put, memory_bytes))
        self._suspended = suspended
        self.disabled = disabled
        self.nccl = self
        self._has_suspend = has_suspend

    def has_symbol(self, name: str) -> bool:
        return self._has_suspend


class LocalMemory:
    """What the context has for kernels' local variables."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def release(self) -> int:
        self._calls.append(("release local memory", gc.isenabled()))
        return 11

    def restore(self) -> None:
        self._calls.append(("restore local memory", gc.isenabled()))


class Side(WorkerSide):
    found: list[tuple[str, Any]] = []

    def open_local_memory(self) -> Any:
        return LocalMemory(self.worker.calls)

    def device(self) -> str:
        return "GPU-x"

    def bytes_by_name(self) -> Figures:
        return {"weights": 10, "kv_cache": 20, "suspendable": 5}

    def communicators(self) -> Iterator[tuple[str, Any]]:
        yield from self.found

    def confirm_resumed(self, name: str, communicator: Any) -> None:
        self.worker.calls.append(("confirm_resumed", name))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    was = gc.isenabled()
    Side.found = []
    monkeypatch.setattr(workers._kept, "local_memory", None)
    yield
    (gc.enable if was else gc.disable)()


def do(
    worker: Worker,
    stage: str,
    *,
    tags: tuple[str, ...] = (),
    deferred: tuple[Any, ...] = (),
    side: type[WorkerSide] = Side,
    **told: Any,
) -> StageReply:
    call = StageCall(
        **{
            "command": StageCommand(cycle=3, index=2, stage=stage, ranks=(0, 1), tags=tags),
            "helper_pid": 0,
            "parent_pid": os.getppid(),
            "parent_start_time": procfs.start_time(os.getppid()),
            "endpoint": "ipc:///nowhere/control",
            "suspended": True,
            "wakes_all": False,
            "arena": False,
            "local_memory": True,
            "attribution": False,
            **told,
        }
    )
    return msgspec.msgpack.decode(perform(worker, side, msgspec.msgpack.encode(call), deferred), type=StageReply)


def test_a_reply_names_its_cycle_stage_and_rank() -> None:
    reply = do(Worker(), "worker_sleep")
    assert (reply.cycle, reply.index, reply.stage, reply.rank, reply.error) == (3, 2, "worker_sleep", 1, None)
    assert reply.figures == {
        "weights": 10,
        "kv_cache": 20,
        "suspendable": 5,
        "device_weights": 10,
        "device_kv_cache": 20,
    }


def test_an_exception_is_an_answer_and_never_leaves() -> None:
    worker = Worker()
    worker.sleep = None  # type: ignore[method-assign, assignment]
    reply = do(worker, "worker_sleep")
    assert reply.error is not None
    assert reply.error.error_type == "builtins.TypeError"
    assert do(Worker(), "dance").error is not None


class RealBytes(Side):
    """The bytes as cumem counts them; everything else stands in."""

    bytes_by_name = WorkerSide.bytes_by_name


def test_what_cumem_holds_is_counted_by_tag_and_the_rest_comes_back_with_any_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {
        0x1000: SimpleNamespace(tag="weights", handle=(0, 4 << 20, 0x1000, 0)),
        0x2000: SimpleNamespace(tag="weights", handle=(0, 2 << 20, 0x2000, 0)),
        0x3000: SimpleNamespace(tag="kv_cache", handle=(0, 8 << 20, 0x3000, 0)),
        0x4000: SimpleNamespace(tag="cudagraph", handle=(0, 1 << 20, 0x4000, 0)),
    }
    module = ModuleType("vllm.device_allocator")
    module.get_mem_allocator_instance = lambda: SimpleNamespace(pointer_to_data=entries)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", module)
    Side.found = [
        ("tp", Communicator(True, memory_bytes=3 << 20)),
        ("pp", None),
        ("off", Communicator(True, disabled=True)),
    ]
    expected = {"weights": 6 << 20, "kv_cache": 8 << 20, "suspendable": 4 << 20}
    on_device = {"device_weights": 6 << 20, "device_kv_cache": 8 << 20}
    assert do(Worker(), "worker_sleep", side=RealBytes, suspended=False).figures == {**expected, **on_device}
    assert do(Worker(), "worker_discard", side=RealBytes, tags=("kv_cache",)).figures == {
        "kv_cache": 8 << 20,
        "device_kv_cache": 8 << 20,
    }


def test_a_worker_lets_the_helper_trace_it_and_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(workers, "allow_tracing_by", lambda pid: done.append(("trace", pid)))
    monkeypatch.setattr(workers, "_die_with", lambda pid, started: done.append(("die with", pid, started)))
    monkeypatch.setattr(workers, "_require_workspace_hooks", lambda: done.append(("hooks",)))
    reply = do(Worker(), "introduce", helper_pid=77, suspended=False)
    assert reply.error is None
    assert done == [("trace", 77), ("die with", os.getppid(), procfs.start_time(os.getppid())), ("hooks",)]


@pytest.mark.parametrize("able", [False, True])
def test_a_flashinfer_that_cannot_give_its_workspaces_up_is_refused(
    monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    monkeypatch.setattr(workers, "allow_tracing_by", lambda pid: None)
    monkeypatch.setattr(workers, "_die_with", lambda pid, started: None)
    module = ModuleType("flashinfer.comm.allreduce")
    hooks = {"checkpoint_prepare": None} if able else {}
    module.TRTLLMAllReduceFusionWorkspace = type("Workspace", (), hooks)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.comm.allreduce", module)
    error = do(Worker(), "introduce", suspended=False).error
    assert (error is None) == able
    assert error is None or "no checkpoint_prepare: 0.6.18 or later is needed" in error.message


@pytest.mark.parametrize("given_back", [True, False])
def test_local_memory_is_given_back_last_and_got_again_first(monkeypatch: pytest.MonkeyPatch, given_back: bool) -> None:
    """Nothing may run without it. The collector is off between prepare and restore."""
    monkeypatch.setattr(workers, "allow_tracing_by", lambda pid: None)
    monkeypatch.setattr(workers, "_die_with", lambda pid, started: None)
    worker = Worker()
    gc.enable()
    replies = [do(worker, "introduce", suspended=False, local_memory=given_back), do(worker, "prepare_workspaces")]
    assert not gc.isenabled()
    replies.append(do(worker, "restore_workspaces"))
    assert gc.isenabled()
    assert worker.gc_during_restore
    assert [reply.error for reply in replies] == [None] * 3
    assert replies[1].figures == {"local_memory": 11 if given_back else 0}
    release, restore = ([("release local memory", False)], [("restore local memory", False)])
    assert worker.calls == ["prepare", *(release + restore if given_back else []), "restore"]


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    worker = Worker()
    assert [do(worker, stage).error for stage in ("prepare_workspaces", "restore_workspaces")] == [None, None]
    assert not gc.isenabled()


def test_a_whole_wake_wakes_what_has_no_known_tag_too() -> None:
    worker = Worker()
    do(worker, "worker_wake", tags=("weights", "kv_cache"), wakes_all=True)
    do(worker, "worker_wake", tags=("weights",))
    assert worker.calls == [("wake_up", None), ("wake_up", ["weights"])]


def test_deferred_batches_come_after_the_memory_and_the_communicators() -> None:
    worker = Worker()
    Side.found = [("tp", Communicator(True))]
    do(worker, "worker_wake", tags=("weights",), deferred=("batch 1", "batch 2"))
    assert worker.calls == [
        ("wake_up", ["weights"]),
        ("confirm_resumed", "tp"),
        ("execute_model", "batch 1"),
        ("execute_model", "batch 2"),
    ]


def test_suspension_is_read_from_every_communicator() -> None:
    Side.found = [("tp", Communicator(True)), ("ep", Communicator(False))]
    error = do(Worker(), "confirm_suspended").error
    assert error is not None
    assert "group 'ep' still holds its GPU memory" in error.message
    assert do(Worker(), "confirm_suspended", suspended=False).error is None
    Side.found = [("tp", Communicator(True))]
    assert do(Worker(), "confirm_suspended").error is None


@pytest.mark.parametrize(
    ("communicator", "expected"),
    [
        (None, "has no PyNccl communicator"),
        (Communicator(False, disabled=True), "has no PyNccl communicator"),
        (Communicator(False, has_suspend=False), "has no ncclCommSuspend"),
    ],
)
def test_a_communicator_that_cannot_be_suspended_is_refused_at_the_start(communicator: Any, expected: str) -> None:
    Side.found = [("tp", communicator)]
    error = do(Worker(), "introduce").error
    assert error is not None
    assert expected in error.message


def test_an_introduction_names_the_device() -> None:
    assert do(Worker(), "introduce").device == "GPU-x"


def test_a_release_reports_what_it_dropped() -> None:
    worker = Worker()
    assert do(worker, "worker_discard", tags=("kv_cache",)).figures == {
        "kv_cache": 20,
        "device_kv_cache": 20,
    }
    assert worker.calls == [("discard", ("kv_cache",))]

"""What the process tests share: real executors on software devices of their own, and proof that nothing is left.

Everything here looks at an executor from outside: its processes through ``/proc`` and pidfds, its device memory in the
device's own ledger, its ranks' states by asking their drivers.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec import Struct

from checkpoint_executor import CUDACheckpointExecutor, FatalError, procfs
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.faults import Fault, Injection
from checkpoint_executor.messages import Role
from checkpoint_executor.softgpu import CONTEXT_BYTES, RemoteProcess, SoftGpu, device_name
from tests.support.executor_workers import RawWorker
from tests.support.targets import ChildProcess, close_all

__all__ = [
    "CAPACITY_BYTES",
    "DEADLINE_S",
    "ORPHANS_DEADLINE_S",
    "REPOSITORY",
    "Gate",
    "Leaks",
    "SharedExecutor",
    "Snapshot",
    "SoftMachine",
    "assert_failed",
    "in_thread",
    "inject",
    "inject_helper",
    "inject_worker",
    "poll_exits",
    "run_script",
    "running",
    "snapshot",
    "state_of",
    "states_of",
    "wait_until",
    "warm_up_zmq",
]

#: How long a test waits for anything. Reached only when something is broken.
DEADLINE_S = 30.0

#: How long children may outlive a parent that was killed.
ORPHANS_DEADLINE_S = 2.0

#: zmq closes the connections of those who have left from a thread of its own, soon after.
_SETTLING_S = 2.0

#: Of each software device, unless a test says otherwise.
CAPACITY_BYTES = 256 << 20

REPOSITORY = Path(__file__).resolve().parents[2]

_CHILD_MODULES = (b"checkpoint_executor.helper", b"checkpoint_executor.workers")


# ---------------------------------------------------------------------------------------------- waiting


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a fact that nothing announces. Raises AssertionError naming it."""
    until = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s:g} s: {what}"
        pause.wait(0.001)


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call it in a thread; the future has its result or its exception."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Gate:
    """A place where a worker waits until the test opens it. The worker's side is ``executor_workers.wait_at``."""

    def __init__(self) -> None:
        # Not pytest's folder: a socket's path is limited to 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="cx-gate-"))
        self.path = str(self._folder / "gate")
        self._waiting: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._listener.settimeout(DEADLINE_S)

    def wait_reached(self, times: int = 1) -> list[int]:
        """Until so many more have come; their pids."""
        pids = []
        for _ in range(times):
            connection, _ = self._listener.accept()
            self._waiting.append(connection)
            size = struct.calcsize("3i")
            pids.append(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])
        return pids

    def assert_unreached(self) -> None:
        """Nobody is here, or on the way."""
        assert select.select([self._listener], [], [], 0)[0] == []

    def open(self) -> None:
        """Let everybody through who has come."""
        while self._waiting:
            self._waiting.pop().close()

    def close(self) -> None:
        self.open()
        self._listener.close()
        shutil.rmtree(self._folder)


# ---------------------------------------------------------------------------------------------- faults


def inject(fault: Fault, role: Role, rank: int, stage: str, **details: Any) -> Injection:
    return Injection(fault=fault, role=role, rank=rank, stage=stage, **details)


def inject_helper(fault: Fault, rank: int, stage: str, **details: Any) -> Injection:
    """A fault in the helper, when it does the stage for the rank."""
    return inject(fault, Role.HELPER, rank, stage, **details)


def inject_worker(fault: Fault, rank: int, stage: str, **details: Any) -> Injection:
    return inject(fault, Role.WORKER, rank, stage, **details)


# ---------------------------------------------------------------------------------------------- processes


def running(pids: Iterable[int]) -> list[int]:
    """Those that exist and are no zombies."""
    return [pid for pid in pids if procfs.is_alive(pid)]


def _command_lines() -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                yield int(path.name), (path / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                pass  # it ended meanwhile


def warm_up_zmq() -> None:
    """Have pyzmq start the thread, with descriptors, that it keeps for life after the first large message."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        receiver.bind("inproc://warm-up")
        sender.connect("inproc://warm-up")
        sender.send(bytes(2 * zmq.COPY_THRESHOLD), copy=False)
        receiver.recv()


class Leaks:
    """What this process holds; :meth:`check` says what was added since.

    A test that ran an executor, however it ended, leaves no child, descriptor, thread or shared memory behind.
    """

    def __init__(self) -> None:
        self._children = self._list_children()
        self._threads = set(threading.enumerate())
        self._descriptors = self._list_descriptors()
        self._shared = self._list_shared()

    def check(self) -> None:
        until = time.monotonic() + _SETTLING_S
        pause = threading.Event()
        while (left := self._left()) and time.monotonic() < until:
            pause.wait(0.001)
        assert not left, f"left behind: {left}"

    def _left(self) -> dict[str, set[Any]]:
        added: dict[str, set[Any]] = {
            "children": self._list_children() - self._children,
            "descriptors": {
                f"{number} -> {target}"
                for number, target in self._list_descriptors().items()
                if self._descriptors.get(number) != target
            },
            "threads": {
                thread.name
                for thread in threading.enumerate()
                if thread.name == "checkpoint-executor" and thread not in self._threads
            },
            "shared memory": self._list_shared() - self._shared,
        }
        if len(self._list_descriptors()) == len(self._descriptors):
            added["descriptors"] = set()  # pytest's own capture files may be reopened under other numbers
        return {kind: what for kind, what in added.items() if what}

    @staticmethod
    def _list_children() -> set[int]:
        # Zombies count: a child that nobody reaped is a leak too.
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found |= {int(pid) for pid in (task / "children").read_text().split()}
        return found

    @staticmethod
    def _list_descriptors() -> dict[int, str]:
        found = {}
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[int(path.name)] = os.readlink(path)
        return found

    @staticmethod
    def _list_shared() -> set[str]:
        # Other programs of this machine use the folder too.
        return {path.name for path in Path("/dev/shm").iterdir() if "checkpoint" in path.name}


# ---------------------------------------------------------------------------------------------- the machine


class SoftMachine:
    """Software devices in a folder of their own, the executors on them, and everything else that uses them."""

    def __init__(self) -> None:
        # Not pytest's folder: a socket's path is limited to 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="cx-"))
        self.root = self.folder / "gpu"
        self.runtime_base = self.folder / "run"
        self.runtime_base.mkdir()
        self._executors: list[CUDACheckpointExecutor] = []
        self._children: list[ChildProcess] = []

    # Making things

    def options(self, **options: Any) -> dict[str, Any]:
        """Keyword options of an executor on this machine."""
        given = {
            "device": "soft",
            "soft_root": str(self.root),
            "soft_capacity_bytes": CAPACITY_BYTES,
            "runtime_dir": str(self.runtime_base),
        }
        return {**given, **options}

    def make(self, worker: type | str = RawWorker, ranks: int = 1, **options: Any) -> CUDACheckpointExecutor:
        """An executor, shut down at the end of the test."""
        executor = CUDACheckpointExecutor(worker, ranks, **self.options(**options))
        self._executors.append(executor)
        return executor

    def take(self, size_bytes: int, rank: int = 0) -> ChildProcess:
        """Another process takes so many bytes on a rank's device, context included."""
        gpu = self.gpu(rank)
        child = ChildProcess(
            "tests.support.soft_target_main",
            {
                "root": str(self.root),
                "device": gpu.name,
                "capacity_bytes": gpu.total_bytes,
                "size_bytes": size_bytes - CONTEXT_BYTES,
                "seed": 0,
            },
            device=gpu.name,
        )
        self._children.append(child)
        child.wait_ready()
        return child

    def take_all_but(self, leave_bytes: int, rank: int = 0) -> ChildProcess:
        """Another process takes a rank's device but for exactly so many bytes."""
        gpu = self.gpu(rank)
        return self.take(gpu.total_bytes - gpu.used_bytes() - leave_bytes, rank)

    def parent(self) -> ChildProcess:
        """A process that builds an executor here, to be killed. See ``executor_parent_main`` for its commands."""
        child = ChildProcess("tests.support.executor_parent_main", {"options": self.options()}, device="")
        self._children.append(child)
        child.wait_ready()
        return child

    # Looking

    def gpu(self, rank: int = 0) -> SoftGpu:
        return SoftGpu(self.root, device_name(rank))

    def used_bytes(self, ranks: int = 1) -> list[int]:
        """By rank, what the device's ledger says."""
        return [self.gpu(rank).used_bytes() for rank in range(ranks)]

    def processes(self) -> list[int]:
        """Helpers and workers of every executor on this machine, orphans included."""
        mark = os.fsencode(self.runtime_base)
        return sorted(
            pid
            for pid, line in _command_lines()
            if mark in line and any(f in line for f in _CHILD_MODULES) and procfs.is_alive(pid)
        )

    def runtime_directories(self) -> list[str]:
        return [path.name for parent in self.runtime_base.iterdir() for path in parent.iterdir()]

    def leftovers(self) -> dict[str, Any]:
        """Processes, runtime directories and device memory, as far as there are any."""
        names = sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []
        devices = [name for name in names if SoftGpu.exists(self.root, name)]
        found = {
            "processes": self.processes(),
            "runtime directories": self.runtime_directories(),
            "device bytes": {name: used for name in devices if (used := SoftGpu(self.root, name).used_bytes())},
        }
        return {kind: what for kind, what in found.items() if what}

    def assert_empty(self) -> None:
        """Nothing is left, now: what an executor that ended or failed in its parent's life has to hold."""
        assert self.leftovers() == {}

    def wait_empty(self) -> None:
        """Nothing is left, in the time that children may outlive a parent that was killed."""
        until = time.monotonic() + ORPHANS_DEADLINE_S
        pause = threading.Event()
        while self.leftovers() and time.monotonic() < until:
            pause.wait(0.001)
        self.assert_empty()

    # The end

    def close(self) -> None:
        """End everything, and hold it to having left nothing."""
        try:
            for executor in self._executors:
                executor.shutdown()
            if not self._children:
                self.assert_empty()
            close_all(self._children)
            self.wait_empty()  # one of the children may have been a parent
        finally:
            for pid in self.processes():  # or one failure would be many
                os.kill(pid, 9)
            shutil.rmtree(self.folder)


def state_of(executor: CUDACheckpointExecutor, rank: int) -> ProcessState:
    """A rank's state, asked of its driver from here. Waits for a verb in progress."""
    pid = executor.pids[f"worker {rank}"]
    return RemoteProcess(pid, procfs.start_time(pid)).get_state()


def states_of(executor: CUDACheckpointExecutor) -> set[ProcessState]:
    """The states its ranks are in."""
    return {state_of(executor, rank) for rank in range(executor.config.tensor_parallel_size)}


class Snapshot(Struct, frozen=True):
    """What a call that is refused must not change."""

    phase: str
    sleeping: frozenset[str]
    paused: bool
    pids: dict[str, int]
    states: set[ProcessState]
    used_bytes: tuple[int, ...]


def snapshot(machine: SoftMachine, executor: CUDACheckpointExecutor) -> Snapshot:
    return Snapshot(
        phase=executor.phase,
        sleeping=executor.sleeping_tags,
        paused=executor.is_paused,
        pids=executor.pids,
        states=states_of(executor),
        used_bytes=tuple(machine.used_bytes(executor.config.tensor_parallel_size)),
    )


class SharedExecutor:
    """One executor for many tests that each leave it as they found it; a test that does not costs only a rebuild."""

    def __init__(self, machine: SoftMachine, worker: type, ranks: int) -> None:
        self.machine = machine
        self._worker = worker
        self._ranks = ranks
        self._executor: CUDACheckpointExecutor | None = None

    def get(self) -> CUDACheckpointExecutor:
        if self._executor is not None and not self._is_pristine(self._executor):
            self._executor.shutdown()
            self._executor = None
        if self._executor is None:
            self._executor = self.machine.make(self._worker, self._ranks)
        return self._executor

    @staticmethod
    def _is_pristine(executor: CUDACheckpointExecutor) -> bool:
        return executor.phase == "awake" and not executor.is_sleeping and not executor.is_paused


# ---------------------------------------------------------------------------------------------- failure


def assert_failed(
    machine: SoftMachine, executor: CUDACheckpointExecutor, first: FatalError, pids: dict[str, int]
) -> None:
    """It failed as a whole: nothing of it is left, and every later call says why at once.

    Args:
        first: what the first caller got. pids: the executor's, noted before.
    """
    assert executor.phase == "failed"
    assert not first.executor_alive
    assert running(pids.values()) == []
    machine.assert_empty()
    assert first.story
    assert first.survivors == ()
    assert first.elapsed_s is not None
    calls: list[Callable[[], object]] = [
        executor.check_health,
        executor.sleep,
        executor.wake_up,
        executor.release_kv_cache_memory,
        lambda: executor.collective_rpc("identify"),
        lambda: executor.collective_rpc("identify", timeout=DEADLINE_S),
        lambda: executor.sleep(level=0),
    ]
    for call in calls:
        with pytest.raises(type(first)) as later:
            call()
        assert type(later.value) is type(first)
        assert str(later.value) == str(first)
        assert later.value.facts == first.facts
    executor.shutdown()


def poll_exits(pidfds: Iterable[int], deadline_s: float) -> set[int]:
    """Those of the pidfds whose processes have not ended by then."""
    until = time.monotonic() + deadline_s
    waiting = set(pidfds)
    poller = select.poll()
    for descriptor in waiting:
        poller.register(descriptor, select.POLLIN)
    while waiting and (left_s := until - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(left_s * 1000):
            poller.unregister(descriptor)
            waiting.discard(descriptor)
    return waiting


def run_script(
    path: Path, *arguments: str, cwd: Path | None = None, timeout_s: float = DEADLINE_S
) -> tuple[int, str, str]:
    """Run a Python script as a user would. Exit status, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=cwd or path.parent,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr

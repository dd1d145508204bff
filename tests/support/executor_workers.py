"""Workers for the process tests: raw device memory and no torch, so that an executor starts in a fraction of a second.

Imported by the workers themselves (by name) and by the tests, which compute on the host what a worker must hold.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from checkpoint_executor.workers import Worker, WorkerContext, execution

__all__ = [
    "KV_CACHE_BYTES",
    "WEIGHTS_BYTES",
    "HookWorker",
    "RawWorker",
    "StuckWorker",
    "hold_the_gil_at",
    "pattern",
    "wait_at",
]

WEIGHTS_BYTES = 192 << 10
KV_CACHE_BYTES = 96 << 10


def pattern(rank: int, size_bytes: int = WEIGHTS_BYTES) -> bytes:
    """What rank's weights hold."""
    return hashlib.shake_128(f"weights of rank {rank}".encode()).digest(size_bytes)


def wait_at(gate: str) -> None:
    """Wait until the test opens the gate (``executor_harness.Gate``), or is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(gate)
        connection.recv(1)


def hold_the_gil_at(gate: str) -> None:
    """Announce this process at the gate, then keep the GIL for ever."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(gate)
    ctypes.PyDLL(None).pause()


class RawWorker(Worker):
    """Two allocations, one a tag; the weights are :func:`pattern`."""

    def __init__(
        self,
        context: WorkerContext,
        weights_bytes: int = WEIGHTS_BYTES,
        kv_cache_bytes: int = KV_CACHE_BYTES,
    ) -> None:
        super().__init__(context)
        self.weights = context.allocator.allocate(weights_bytes, "weights")
        self.kv_cache = context.allocator.allocate(kv_cache_bytes, "kv_cache")
        self.weights.write(pattern(context.rank, weights_bytes))
        self.calls = 0

    # Memory

    def addresses(self) -> tuple[int, int]:
        return self.weights.address, self.kv_cache.address

    def read_weights(self) -> bytes:
        return self.weights.read()

    def write_weights(self, data: bytes) -> None:
        self.weights.write(data)

    def read_kv_cache(self) -> bytes:
        return self.kv_cache.read()

    def write_kv_cache(self, data: bytes) -> None:
        self.kv_cache.write(data)

    def check_communicator(self) -> bool:
        """Use it, whatever it runs over; False if it says that it is suspended."""
        communicator = self.context.communicator
        if communicator.world_size > 1:
            communicator.check()
        return not communicator.is_suspended

    @execution
    def step(self) -> int:
        """Stands for a forward pass: needs both tags. Returns how often it ran."""
        self.weights.read()
        self.kv_cache.read()
        self.calls += 1
        return self.calls

    # Calls of every kind

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs) if kwargs else args

    def identify(self) -> tuple[int, int, int]:
        return self.context.rank, self.context.world_size, os.getpid()

    def fail(self, message: str) -> None:
        raise LookupError(message)

    def fail_on(self, rank: int) -> int:
        if self.context.rank == rank:
            raise LookupError(f"rank {rank} does not like it")
        return self.context.rank

    def leave(self, status: int) -> None:
        sys.exit(status)

    def imported(self, names: Sequence[str]) -> list[str]:
        """Which of these modules this process has imported."""
        return [name for name in names if name in sys.modules]

    def wait_at(self, gate: str) -> str:
        """Announce itself at the gate and wait until it is opened."""
        wait_at(gate)
        return "passed"

    def hold_device(self, rank: int, gate: str) -> None:
        """Keep a device call of this rank running until the gate is opened: a driver lock waits for it."""
        if rank != self.context.rank:
            return
        inside = threading.Event()

        def work() -> None:
            with self.context.runtime.device_call():
                inside.set()
                wait_at(gate)

        threading.Thread(target=work, daemon=True).start()
        inside.wait()

    def start_a_process(self) -> int:
        """Start a program that never ends; its pid."""
        self.program = subprocess.Popen(["sleep", "infinity"])
        return self.program.pid

    def hold_the_gil(self, gate: str) -> None:
        """Announce itself at the gate, then keep the GIL for ever, as a CUDA call may."""
        hold_the_gil_at(gate)


class StuckWorker(Worker):
    """Never gets out of its constructor, and no thread of it ever runs again."""

    def __init__(self, context: WorkerContext, gate: str) -> None:
        super().__init__(context)
        hold_the_gil_at(gate)


class _Hook:
    """A workspace without memory, which notes when it is called and how it finds the communicator."""

    def __init__(self, name: str, worker: HookWorker) -> None:
        self._name = name
        self._worker = worker

    def checkpoint_prepare(self) -> None:
        self._worker.note(f"{self._name}.checkpoint_prepare")

    def checkpoint_restore(self) -> None:
        self._worker.note(f"{self._name}.checkpoint_restore")


class HookWorker(RawWorker):
    """Notes every hook in order; ``fails`` names one that raises, ``waits`` one that waits at ``gate``.

    On one rank, or on all of them.
    """

    def __init__(
        self, context: WorkerContext, fails: str = "", waits: str = "", gate: str = "", on_rank: int | None = None
    ) -> None:
        concerned = on_rank in (None, context.rank)
        self._fails = fails if concerned else ""
        self._waits = waits if concerned else ""
        self._gate = gate
        self.notes: list[str] = []
        super().__init__(context)
        context.workspaces.extend([_Hook("first", self), _Hook("second", self)])
        self.note("constructor")

    def note(self, what: str) -> None:
        suspended = " (suspended)" if self.context.communicator.is_suspended else ""
        self.notes.append(what + suspended)
        if what == self._fails:
            raise LookupError(f"{what} does not like it")
        if what == self._waits:
            wait_at(self._gate)

    def get_notes(self) -> list[str]:
        return self.notes

    def before_sleep(self) -> None:
        self.note("before_sleep")

    def after_wake(self, tags: tuple[str, ...]) -> None:
        self.note(f"after_wake {'+'.join(tags)}")

    def shutdown(self) -> None:
        self.note("shutdown")

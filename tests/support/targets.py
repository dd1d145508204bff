"""What the contract suite asks of a backend, and the child processes both backends are made of.

A *backend* (:class:`Backend`) gives the suite driver objects and processes with device memory; there is one for
the software device (``soft_targets.SoftBackend``) and one for CUDA (``cuda_targets.CudaBackend``). A backend's
target is a module run as ``python -P -m MODULE FD JSON`` that speaks the commands of :class:`TargetProcess`;
:class:`ChildProcess` is the parent's side of it and is the same for every backend.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from checkpoint_executor.helper.drivers import Driver
from checkpoint_executor.messages import Target
from tests.support.channel import Channel

__all__ = ["DEADLINE_S", "Backend", "ChildProcess", "TargetProcess", "close_all"]

#: How long a test waits for anything. Reached only when something is broken.
DEADLINE_S = 60.0

_REPOSITORY = Path(__file__).resolve().parents[2]


class TargetProcess(Protocol):
    """A process that fills device memory with a pattern and then does what it is told.

    Commands (``request`` waits for the reply, ``send`` does not):

    - ``checksum``: SHA-256 (hex) of its device memory, read through the device.
    - ``address``: list of the addresses of its allocations.
    - ``start_busy`` (``kind="long"``): submit one device call that ends only with ``stop_busy``; replies when it runs.
      (``kind="short"``, ``threads=n``): n threads that make short device calls without a pause.
    - ``stop_busy``: end it and wait until it drained; replies how many short calls were made.
    - ``call_from_thread``: start a thread that computes ``checksum``; replies when the thread is about to.
    - ``call_done``: whether that thread finished. ``call_result``: wait for it; its checksum.
    - ``stray_read``: read device memory without asking the device.
    - ``exit``: leave in good order; no reply.
    """

    @property
    def target(self) -> Target: ...

    @property
    def pattern_checksum(self) -> str:
        """SHA-256 of the pattern, computed on the host: what ``checksum`` must answer."""
        ...

    def send(self, command: str, **arguments: Any) -> None: ...
    def receive(self) -> Any: ...
    def request(self, command: str, **arguments: Any) -> Any: ...

    def kill(self) -> None:
        """SIGKILL and reap."""
        ...

    def wait_exit(self) -> int:
        """Reap; the exit status, negative for a signal."""
        ...


class Backend(Protocol):
    """A device, drivers for it, and processes on it."""

    @property
    def kind(self) -> str:
        """``"soft"`` or ``"cuda"``."""
        ...

    @property
    def device(self) -> str:
        """The device's name, as ``Driver.device_memory`` takes it."""
        ...

    @property
    def target_bytes(self) -> int:
        """Device memory that a target spawned without a size fills, bytes."""
        ...

    @property
    def asleep_limit_bytes(self) -> int:
        """What a checkpointed process may leave on the device, bytes."""
        ...

    def driver(self) -> Driver:
        """A driver object of its own, opened."""
        ...

    def settled_used_bytes(self) -> int:
        """Used bytes of the device, once the deaths that were reaped so far have reached it."""
        ...

    def spawn(self, *, size_bytes: int | None = None, seed: int = 0) -> TargetProcess:
        """A target, ready. Raises MemoryError if it does not fit on the device."""
        ...

    def spawn_bystander(self) -> TargetProcess:
        """A process that never touches a device; it knows ``exit`` only."""
        ...

    def spawn_caller(self) -> TargetProcess:
        """A process with a driver of its own. Commands: ``verb`` (``name``, ``rank``, ``pid``, ``start_time``)."""
        ...

    def fill(self, leave_bytes: int) -> TargetProcess:
        """Another process takes the device's free memory but for about ``leave_bytes`` (at most that)."""
        ...

    def close(self) -> None:
        """Kill and reap every process that is left."""
        ...


class ChildProcess:
    """The parent's side of a target (or caller, or bystander): a process and its command channel."""

    def __init__(
        self, module: str, arguments: dict[str, Any], *, device: str, environment: dict[str, str] | None = None
    ):
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), json.dumps(arguments)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(_REPOSITORY), **(environment or {})},
                start_new_session=True,
            )
        self._device = device
        self._hello: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Until the child said hello. Raises MemoryError if it found no room on its device."""
        self._hello = self._channel.receive(DEADLINE_S)
        if "no_memory" in self._hello:
            raise MemoryError(self._hello["no_memory"])

    @property
    def target(self) -> Target:
        return Target(rank=0, pid=self._process.pid, start_time=self._hello["start_time"], device=self._device)

    @property
    def pattern_checksum(self) -> str:
        checksum: str = self._hello["checksum"]
        return checksum

    def send(self, command: str, **arguments: Any) -> None:
        self._channel.send({"command": command, **arguments})

    def receive(self) -> Any:
        return self._channel.receive(DEADLINE_S)["reply"]

    def request(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.receive()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def wait_exit(self) -> int:
        return self._process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self._channel.close()


def close_all(children: Sequence[ChildProcess]) -> None:
    """Kill and reap all of them, newest first."""
    for child in reversed(children):
        child.close()

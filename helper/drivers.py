"""The protocol that every driver backend meets, and the facts it returns.

The contract suite (``tests/contract``) is written against this file, so that the software device and
the CUDA driver are held to the same behaviour.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.messages import Target

__all__ = ["DeviceMemory", "Driver", "DriverInfo"]


class DriverInfo(Struct, frozen=True):
    """Which driver this is. ``device_kind`` is ``"soft"`` or ``"cuda"``; ``version`` is for people."""

    device_kind: str
    version: str


class DeviceMemory(Struct, frozen=True):
    """Memory of one device as seen from outside every process that uses it, in bytes.

    ``holders`` are (pid, bytes) pairs; pids the reader cannot see (another container's) are left out.
    """

    total_bytes: int
    used_bytes: int
    holders: tuple[tuple[int, int], ...] = ()

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


class Driver(Protocol):
    """The four verbs, the state, and readings that need no context.

    Every method may be called from several threads at once, for different targets. A verb returns after
    the driver did, and raises :class:`~checkpoint_executor.driver_states.DriverError` with the driver's own
    code otherwise; it neither retries nor judges. Verbs are never called on a target that is stopped
    (state T): they would hang until SIGCONT, whatever their timeout.
    """

    def open(self) -> DriverInfo:
        """Initialise once (CUDA: ``cuInit``, no context). Raises DriverError."""
        ...

    def get_state(self, target: Target) -> ProcessState:
        """State of the target. Blocks while a verb on the same target is in flight."""
        ...

    def lock(self, target: Target, timeout_ms: int) -> None:
        """RUNNING -> LOCKED: new device calls wait, submitted work drains; NOT_READY if not within ``timeout_ms``."""
        ...

    def checkpoint(self, target: Target) -> None:
        """LOCKED -> CHECKPOINTED: device memory moves to the target's host memory."""
        ...

    def restore(self, target: Target) -> None:
        """CHECKPOINTED -> LOCKED. OUT_OF_MEMORY here is permanent."""
        ...

    def unlock(self, target: Target) -> None:
        """LOCKED -> RUNNING."""
        ...

    def devices(self) -> tuple[str, ...]:
        """All devices of this host, as ``device_memory`` takes them. Needs no ``open``. Raises DriverError."""
        ...

    def device_memory(self, device: str) -> DeviceMemory:
        """Memory of a device by its UUID (or the software device's name). Needs no ``open``. Raises DriverError."""
        ...

    def close(self) -> None:
        """Let go of what ``open`` took. Targets keep their state."""
        ...

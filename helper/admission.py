"""Whether a wake will fit, decided before anything is touched.

A driver restore that runs out of memory is permanent (measured: OUT_OF_MEMORY, then OPERATING_SYSTEM for ever), so
the question must be asked first. Between the answer and the end of the wake, a lock per device keeps the user's
other executors from taking the same room; the kernel releases it if this process dies. Processes that do not take
the lock stay a race that nobody can close from here.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from checkpoint_executor.helper.drivers import DeviceMemory
from checkpoint_executor.messages import ErrorInfo

__all__ = ["DeviceLocks", "judge"]

_RETRY_S = 0.005


class Need(Struct, frozen=True):
    """What one device must have free, in bytes: for the wake itself, and beyond it."""

    wake_bytes: int
    margin_bytes: int


def judge(device: str, memory: DeviceMemory, need: Need) -> ErrorInfo | None:
    """None if there is room, otherwise the refusal."""
    missing = need.wake_bytes + need.margin_bytes - memory.free_bytes
    if missing <= 0:
        return None
    holders = tuple(sorted(memory.holders, key=lambda holder: -holder[1]))
    held = ", ".join(f"pid {pid}: {size >> 20} MiB" for pid, size in holders[:8]) or "no process visible from here"
    return ErrorInfo(
        kind="refused",
        message=(
            f"{device} lacks {missing} bytes ({missing >> 20} MiB): waking takes {need.wake_bytes >> 20} MiB and a "
            f"margin of {need.margin_bytes >> 20} MiB, {memory.free_bytes >> 20} of {memory.total_bytes >> 20} MiB are "
            f"free ({held}). Nothing was touched: free the memory and call wake_up() again"
        ),
        missing_bytes=missing,
        device=device,
        holders=holders,
    )


class DeviceLocks:
    """Exclusive locks on devices, by name, in a directory that the user's executors share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: list[int] = []

    def acquire(self, devices: Iterable[str], wait_s: float) -> str | None:
        """Lock all of them, or none. Returns None, or the device that another executor kept for ``wait_s``.

        In sorted order, so that two executors cannot each hold what the other waits for.
        """
        until = time.monotonic() + wait_s
        pause = threading.Event()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for device in sorted(set(devices)):
            path = self._directory / f"{device.replace('/', '_')}.lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._held.append(descriptor)
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # flock has no timeout of its own, and the wait must end before the stage's deadline.
                    if time.monotonic() >= until:
                        self.release()
                        return device
                    pause.wait(_RETRY_S)
        return None

    def release(self) -> None:
        """Let go of all locks. Harmless if none is held."""
        while self._held:
            os.close(self._held.pop())


def needs(devices: Mapping[int, str], bytes_by_rank: Mapping[int, int], margin_bytes: int) -> dict[str, Need]:
    """Add up what the ranks of each device need."""
    total: dict[str, int] = {}
    for rank, device in devices.items():
        total[device] = total.get(device, 0) + bytes_by_rank[rank]
    return {device: Need(size, margin_bytes) for device, size in total.items()}

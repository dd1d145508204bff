"""Whether a sleep or a wake will fit, decided before the driver is asked for anything.

Before a sleep: host memory for what the driver is about to move, and proof that the ordinary sleep freed what it should
have, since the driver drags the rest along at about 2 GB/s (measured) and would overrun its deadline.

Before a wake:

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
from checkpoint_executor.helper.host_memory import Room
from checkpoint_executor.messages import ErrorInfo

__all__ = ["DeviceLocks", "Need", "judge_host", "judge_sleep", "judge_wake", "needs"]

_RETRY_S = 0.005


class Need(Struct, frozen=True):
    """What one device must have free, in bytes: for the wake itself, and beyond it."""

    wake_bytes: int
    margin_bytes: int


def judge_wake(device: str, memory: DeviceMemory, need: Need) -> ErrorInfo | None:
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


#: How much less than expected the ordinary sleep may free: other processes come and go on the device.
_SLACK_BYTES = 64 << 20


def judge_sleep(held_bytes: int, freed_bytes: int | None, expected_bytes: int, limit_bytes: int) -> ErrorInfo | None:
    """None if the driver may be asked to move what one rank still holds on its device, otherwise the refusal.

    Args:
        held_bytes: what the process holds. freed_bytes: what it held more before the sleep, None if not known.
        expected_bytes: what the sleep should have freed. limit_bytes: the most that the driver can move in time.
    """
    if freed_bytes is not None and freed_bytes < expected_bytes - _SLACK_BYTES:
        missing = expected_bytes - freed_bytes
        return ErrorInfo(
            kind="refused",
            message=(
                f"the ordinary sleep freed {freed_bytes >> 20} MiB of the {expected_bytes >> 20} MiB that it should "
                f"have: {missing >> 20} MiB are still held, by something the allocator does not know"
            ),
            missing_bytes=missing,
        )
    if held_bytes > limit_bytes:
        return ErrorInfo(
            kind="refused",
            message=(
                f"{held_bytes >> 20} MiB are still on the device after the ordinary sleep; the driver moves about "
                f"2 GB/s and would miss its deadline with more than {limit_bytes >> 20} MiB. Allocate through "
                "context.allocator, or raise deadlines.driver_s"
            ),
            missing_bytes=held_bytes - limit_bytes,
        )
    return None


def judge_host(rooms: Iterable[Room], needed_bytes: int, margin_bytes: int) -> ErrorInfo | None:
    """None if host memory is enough for what is about to move there, otherwise the refusal."""
    tightest = min(rooms, key=lambda room: room.available_bytes)
    missing = needed_bytes + margin_bytes - tightest.available_bytes
    if missing <= 0:
        return None
    return ErrorInfo(
        kind="refused",
        message=(
            f"host memory lacks {missing} bytes ({missing >> 20} MiB): the checkpoint moves {needed_bytes >> 20} MiB "
            f"there, with a margin of {margin_bytes >> 20} MiB, and {tightest.name} has "
            f"{tightest.available_bytes >> 20} MiB left"
        ),
        missing_bytes=missing,
        device="host",
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

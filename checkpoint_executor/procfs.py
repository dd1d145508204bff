"""I/O. What ``/proc`` says about a process. Reads only."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "host_memory",
    "is_alive",
    "is_stopped",
    "open_pidfd",
    "owner_uid",
    "start_time",
    "thread_group_leader",
]


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state (field 3) on: a command name may hold spaces and brackets."""
    # As bytes: a process may call itself anything.
    text = Path(f"/proc/{pid}/stat").read_bytes()
    return text[text.rindex(b")") + 2 :].decode().split()


def start_time(pid: int) -> int:
    """Start time in clock ticks since boot (field 22). With the pid it names one process for good.

    Raises:
        ProcessLookupError: no such process.
    """
    try:
        return int(_stat(pid)[19])
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None


def is_alive(pid: int, started: int | None = None) -> bool:
    """Whether the process exists, is not a zombie and, if ``started`` is given, is the same process."""
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" and (started is None or int(fields[19]) == started)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (state T or t): driver calls on it would hang whatever their timeout."""
    try:
        return _stat(pid)[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError):
        return False


def owner_uid(pid: int) -> int:
    """Real uid of the process."""
    return _status_number(pid, b"Uid:")


def thread_group_leader(pid: int) -> int:
    """Tgid: equal to ``pid`` for a process, different for one of its other threads."""
    return _status_number(pid, b"Tgid:")


def host_memory(pid: int) -> tuple[int, int]:
    """Bytes of host memory that the process has resident, and how many of them are anonymous (not files' or shared).

    Raises:
        ProcessLookupError: no such process.
    """
    return _status_number(pid, b"VmRSS:") << 10, _status_number(pid, b"RssAnon:") << 10


def _status_number(pid: int, key: bytes) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    raise ProcessLookupError(f"no process {pid}")


def open_pidfd(pid: int, started: int) -> int:
    """A pidfd of exactly this process.

    Raises:
        ProcessLookupError: it is gone, or the pid belongs to another process by now.
    """
    descriptor = os.pidfd_open(pid)
    # Read after opening: the pidfd pins the process, so if the start time matches now, it is the right one.
    try:
        if start_time(pid) == started:
            return descriptor
    except ProcessLookupError:
        pass
    os.close(descriptor)
    raise ProcessLookupError(f"process {pid} started at {started} is gone")

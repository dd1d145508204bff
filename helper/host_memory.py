"""How much host memory processes may still take: the machine's, and that of every control group they are in.

A checkpoint moves device memory into the target's own memory, so it is charged to the *target's* control group: running
out there ends the target in the middle of it. Page cache counts as available, since the kernel gives it back first.
Reads files only; the roots are arguments so that tests can bring their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Room", "rooms"]


class Room(NamedTuple):
    """What one limit still allows. ``name`` is ``"MemAvailable"`` or the control group's folder."""

    name: str
    available_bytes: int


def rooms(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Room]:
    """Every limit that holds for a process: the machine's, its control group's, and those of all groups above it.

    Raises:
        OSError: ``/proc`` cannot be read.
    """
    found = [Room("MemAvailable", _meminfo(proc / "meminfo"))]
    for group in _groups(proc / str(pid) / "cgroup", cgroups):
        room = _room_v2(group) if (group / "memory.max").exists() else _room_v1(group)
        if room is not None:
            found.append(room)
    return found


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{path} has no MemAvailable")


def _groups(path: Path, cgroups: Path) -> Iterator[Path]:
    """The folders of the process's memory groups, innermost first, in version 2 and in version 1."""
    for line in path.read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            root = cgroups if (cgroups / "cgroup.controllers").exists() else cgroups / "unified"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
        else:
            continue
        # Seen from inside a cgroup namespace the name may lead outside of it: what is mounted here is all we can know.
        parts = [part for part in name.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _room_v2(group: Path) -> Room | None:
    limit = (group / "memory.max").read_text().strip()
    if limit == "max":
        return None
    used = int((group / "memory.current").read_text())
    return Room(str(group), int(limit) - used + _reclaimable(group, ("inactive_file", "active_file")))


def _room_v1(group: Path) -> Room | None:
    limit_file = group / "memory.limit_in_bytes"
    if not limit_file.exists():
        return None
    limit = int(limit_file.read_text())
    if limit >= 1 << 62:  # "no limit" is the largest multiple of a page
        return None
    used = int((group / "memory.usage_in_bytes").read_text())
    return Room(str(group), limit - used + _reclaimable(group, ("total_inactive_file", "total_active_file")))


def _reclaimable(group: Path, names: tuple[str, ...]) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(value) for name, value in (line.split() for line in lines) if name in names)

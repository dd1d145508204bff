"""The software device opened in the test process itself, and the driver's verbs on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint_executor.softgpu import RemoteProcess
from checkpoint_executor.workers.soft_runtime import SoftRuntime

__all__ = ["own_driver", "single_runtime"]


@contextmanager
def single_runtime(root: Path, capacity_bytes: int = 64 << 20) -> Iterator[SoftRuntime]:
    """A runtime of one rank on a device of its own."""
    runtime = SoftRuntime.open(
        root=root / "devices",
        name="SOFT-0",
        rank=0,
        world_size=1,
        rendezvous=root,
        communication="suspend",
        capacity_bytes=capacity_bytes,
    )
    try:
        yield runtime
    finally:
        runtime.close()


def own_driver() -> RemoteProcess:
    """The driver's verbs on this process; they run on the driver's own thread."""
    stat = Path("/proc/self/stat").read_text()
    return RemoteProcess(os.getpid(), int(stat.rpartition(")")[2].split()[19]))

"""What the measuring scripts have in common: the example executor on a device, and what a result depends on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from checkpoint_executor import demo, directories, procfs
from checkpoint_executor.executor import detect_device_kind

__all__ = ["EXAMPLE_WORKER", "device_kind", "devices_of_its_own", "host"]

EXAMPLE_WORKER = demo.EXAMPLE_WORKER


def device_kind(asked: str) -> str:
    """``"soft"`` or ``"cuda"``, from what was asked for or, with ``"auto"``, from the machine."""
    return detect_device_kind() if asked == "auto" else asked


@contextmanager
def devices_of_its_own(kind: str, capacity_bytes: int) -> Iterator[dict[str, Any]]:
    """Options of an executor: on software devices that nobody else uses, so that every byte on them is this run's.

    Args:
        capacity_bytes: of each software device.
    """
    if kind != "soft":
        yield {"device": kind}
        return
    # A directory that is named like this is swept by the next executor if we die.
    own = f"{os.getpid()}-{procfs.start_time(os.getpid())}"
    root = directories.user_directory() / f"{own}-soak"
    root.mkdir(mode=0o700)
    try:
        yield {"device": "soft", "soft_root": str(root), "soft_capacity_bytes": capacity_bytes}
    finally:
        shutil.rmtree(root)


def host(kind: str) -> dict[str, Any]:
    """The machine and the versions, for the record."""
    return {key: value for key, value in demo.environment(kind).items() if key not in ("time", "command")}

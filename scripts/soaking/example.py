"""What the measuring scripts have in common: the example executor on a device, and what a result depends on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint_executor import demo
from checkpoint_executor.executor import detect_device_kind

__all__ = ["EXAMPLE_WORKER", "device_kind", "devices_of_its_own", "host"]

MIB = 1 << 20
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
    # Short, because sockets may live below it.
    folder = Path(tempfile.mkdtemp(prefix="cx-soft-"))
    try:
        yield {"device": "soft", "soft_root": str(folder / "gpu"), "soft_capacity_bytes": capacity_bytes}
    finally:
        shutil.rmtree(folder)


def host(kind: str) -> dict[str, Any]:
    """The machine and the versions, for the record."""
    return {key: value for key, value in demo.environment(kind).items() if key not in ("time", "command")}

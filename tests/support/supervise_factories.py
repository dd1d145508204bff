"""Engines for the tests of ``Supervised`` that are no executors, and things to do with them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from checkpoint_executor import FatalError, RefusedError, StartError

__all__ = ["Plain", "fail_to_start", "read_weights", "stop_myself", "wake"]


class Plain:
    """An engine without devices."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def refuse(self) -> None:
        raise RefusedError("not now", rank=3, story=("a", "b"))

    def fail(self) -> None:
        raise FatalError("for good")

    def stumble(self) -> None:
        raise KeyError("the caller's own")

    def hang(self) -> None:
        threading.Event().wait()

    def shutdown(self) -> None:
        pass


def fail_to_start(times: Path) -> Plain:
    """Raise StartError as often as the file says, then build."""
    left = int(times.read_text())
    times.write_text(str(left - 1))
    if left > 0:
        raise StartError("no luck")
    return Plain()


def stop_myself(engine: Any) -> None:
    """Stop the engine's process: it cannot even say no."""
    os.kill(os.getpid(), signal.SIGSTOP)


# Here, and not beside the tests, because the engine's process imports what it calls.


def read_weights(executor: Any) -> Any:
    return executor.collective_rpc("read_weights")


def wake(executor: Any) -> Any:
    return executor.wake_up()

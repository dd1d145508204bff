"""Waiting in the vLLM tests. Imports nothing of vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["DEADLINE_S", "pause", "wait_until"]

#: Reached only when something is broken.
DEADLINE_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a fact that nothing announces. Raises AssertionError naming it."""
    until = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s:g} s: {what}"
        pause.wait(0.005)


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)

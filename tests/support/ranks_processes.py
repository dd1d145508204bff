"""Rank processes for tests: real processes that run importable functions, one call at a time, and are always reaped.

A process imports torch only if what it runs does, and keeps it, so one group serves many tests.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["RankGroup", "RankProcess", "RemoteError"]

_ROOT = Path(__file__).resolve().parents[2]


class RemoteError(Exception):
    """What a function raised in a rank: ``str()`` is its text, ``kind`` the name of its type."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class RankProcess:
    """One process; starts at once, does not wait for it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._popen = subprocess.Popen(
                [sys.executable, "-m", __name__, str(fd), str(rank)],
                pass_fds=[fd],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._popen.pid

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Start ``function(rank, *args)`` there; it must be importable. Arguments and result are pickled."""
        self._connection.send((function.__module__, function.__qualname__, args))

    def result(self, deadline: float) -> Any:
        """Wait for what ``begin`` started. Raises RemoteError, EOFError (the process died), TimeoutError."""
        if not wait([self._connection], max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {self.rank} did not answer in time")
        try:
            ok, *outcome = self._connection.recv()
        except ConnectionResetError:
            raise EOFError(f"rank {self.rank} died") from None
        if not ok:
            raise RemoteError(*outcome)
        return outcome[0]

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(10)

    def close(self) -> None:
        self.kill()
        self._connection.close()


class RankGroup:
    """Ranks 0 to ``size - 1``; use as a context manager."""

    def __init__(self, size: int) -> None:
        self.ranks = [RankProcess(rank) for rank in range(size)]

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self.ranks:
            rank.close()

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, timeout_s: float = 60
    ) -> list[Any]:
        """``function(rank, *args)`` on the first ``ranks`` ranks (None: all) at once. Returns the results by rank.

        Raises the error of the lowest rank that failed, after all of them have answered.
        """
        chosen = self.ranks[:ranks]
        for rank in chosen:
            rank.begin(function, *args)
        deadline = time.monotonic() + timeout_s
        outcomes: list[Any] = []
        for rank in chosen:
            try:
                outcomes.append(rank.result(deadline))
            except RemoteError as error:
                outcomes.append(error)
        for outcome in outcomes:
            if isinstance(outcome, RemoteError):
                raise outcome
        return outcomes


def _serve(connection: Connection, rank: int) -> None:
    while True:
        try:
            module, name, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(importlib.import_module(module), name)(rank, *args)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must see it
            connection.send((False, type(error).__name__, str(error)))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))

"""I/O. Starting, watching and ending child processes: pidfds, SIGKILL, and a bounded reap.

Nobody outlives the parent. Three lines hold that, because each has a case of its own: a pidfd of the parent that
every child polls; ``PR_SET_PDEATHSIG``, which also ends a child that holds the GIL inside a CUDA call; and the
helper, which SIGKILLs the workers. (A pipe whose write end the parent keeps would not do: any fork of the parent
keeps it open too.) ``PR_SET_PDEATHSIG`` fires when the spawning *thread* ends, so children are spawned from the
control thread, which lives as long as the executor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from select import POLLIN, poll
from typing import Protocol

from checkpoint_executor import procfs
from checkpoint_executor.messages import Role

__all__ = ["ChildProcess", "WatchedProcess", "child_environment", "kill_all", "reap", "spawn"]


class WatchedProcess(Protocol):
    """A process that the control thread watches and may kill."""

    role: Role
    rank: int
    pid: int
    start_time: int
    pidfd: int

    @property
    def name(self) -> str: ...

    def poll_exit(self) -> int | None:
        """Exit status if it has ended (negative: the signal), and reap it."""
        ...

    def kill(self) -> None:
        """SIGKILL, also if it is gone already."""
        ...

    def close(self) -> None: ...


class ChildProcess:
    """A child of ours, held by a pidfd: signals can never reach a process that reused its pid."""

    def __init__(self, role: Role, rank: int, popen: subprocess.Popen[bytes]) -> None:
        self.role = role
        self.rank = rank
        self.pid = popen.pid
        self._popen = popen
        # Our child cannot be reaped by anyone else, so its pid is still its own here, zombie or not.
        self.start_time = procfs.start_time(popen.pid)
        self.pidfd = os.pidfd_open(popen.pid)

    @property
    def name(self) -> str:
        return "helper" if self.role is Role.HELPER else f"worker {self.rank}"

    def poll_exit(self) -> int | None:
        """Exit status if the process has ended (negative: the signal), and reap it."""
        return self._popen.poll()

    def kill(self) -> None:
        """SIGKILL the process and what it started in its own process group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # gone, group and all
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # reaped already

    def close(self) -> None:
        """Let go of the pidfd. The process must have been reaped or given up."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def child_environment(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: ours, and our import path.

    ``-P`` keeps the child from importing out of the current folder, which would let a user's own ``workers/``
    shadow ours, but it also hides the tree the parent itself was imported from.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**environ, **extra, "PYTHONPATH": path}


def spawn(role: Role, rank: int, spec: str, environ: Mapping[str, str]) -> ChildProcess:
    """Start a helper or a worker.

    Args:
        role: which. rank: whose. spec: its ``ChildSpec`` as JSON. environ: its environment.

    The child's stdout is our stderr: NCCL prints there, and a caller's stdout may be data.
    """
    package = "helper" if role is Role.HELPER else "workers"
    # A daemon may have been started without one: descriptor 2 is then whatever was opened since, a socket of ours.
    output = sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL
    popen = subprocess.Popen(
        [sys.executable, "-P", "-m", f"checkpoint_executor.{package}", spec],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(environ),
        close_fds=True,
        # A group of its own: Ctrl-C in a terminal reaches the parent alone, which decides what happens.
        process_group=0,
    )
    return ChildProcess(role, rank, popen)


def kill_all(children: Iterable[WatchedProcess]) -> None:
    """SIGKILL all of them, workers and helper alike, before waiting for any."""
    for child in children:
        child.kill()


def reap(children: Iterable[WatchedProcess], deadline_s: float) -> tuple[int, ...]:
    """Wait for killed children together, no longer than ``deadline_s``. Returns the pids of survivors."""
    until = time.monotonic() + deadline_s
    waiting = {child.pidfd: child for child in children if child.poll_exit() is None}
    poller = poll()
    for descriptor in waiting:
        poller.register(descriptor, POLLIN)
    while waiting:
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        for descriptor, _ in poller.poll(left_s * 1000):
            poller.unregister(descriptor)
            waiting.pop(descriptor).poll_exit()
    return tuple(sorted(child.pid for child in waiting.values()))

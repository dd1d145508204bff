"""The processes the helper may act on: verified once, then held by pidfd."""

from __future__ import annotations

import os
import signal
from select import POLLIN, poll

from checkpoint_executor import procfs
from checkpoint_executor.helper.drivers import DeviceMemory
from checkpoint_executor.messages import Target

__all__ = ["HeldTarget"]


_DYING_MS = 100
_LAST_THREADS_MS = 2000


class HeldTarget:
    """A registered target.

    Args:
        target: what the parent says about it.

    Raises:
        ProcessLookupError: it is gone, or the pid belongs to another process.
        PermissionError: another user's process, or a thread id: the driver ends a process that is named by one of
            its thread ids (https://github.com/NVIDIA/cuda-checkpoint/issues/41).
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pidfd = procfs.open_pidfd(target.pid, target.start_time)
        try:
            if procfs.thread_group_leader(target.pid) != target.pid:
                raise PermissionError(f"{target.pid} is a thread id, not a process")
            if procfs.owner_uid(target.pid) != os.getuid():
                raise PermissionError(f"process {target.pid} belongs to uid {procfs.owner_uid(target.pid)}, not to us")
            self._leads_group = os.getpgid(target.pid) == target.pid
        except OSError:
            os.close(self.pidfd)
            raise
        #: Device bytes the driver gave back when it checkpointed the process: what its restore will take.
        self.checkpointed_bytes = 0
        #: The device when it was last measured awake.
        self.measured: DeviceMemory | None = None

    def compare(self, now: DeviceMemory) -> tuple[int, int | None]:
        """Device bytes it holds now, and how many fewer than when measured; of the whole device, and None, if NVML does
        not tell processes apart."""
        mine = dict(now.holders).get(self.target.pid)
        if mine is None:
            return now.used_bytes, None
        before = None if self.measured is None else dict(self.measured.holders).get(self.target.pid)
        return mine, None if before is None else before - mine

    @property
    def is_stopped(self) -> bool:
        return procfs.is_stopped(self.target.pid)

    def has_ended(self) -> bool:
        """Whether the process is dead, waiting for a dying one to be.

        A call on a dying process fails before it is a zombie, and one whose main thread is a zombie is dead only when
        its other threads are gone too.
        """
        poller = poll()
        poller.register(self.pidfd, POLLIN)
        if poller.poll(_DYING_MS):
            return True
        return not procfs.is_alive(self.target.pid, self.target.start_time) and bool(poller.poll(_LAST_THREADS_MS))

    def kill(self) -> None:
        """SIGKILL the process, and what it started if it leads a group of its own (our workers do)."""
        if self._leads_group:
            try:
                os.killpg(self.target.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone, group and all
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it was faster

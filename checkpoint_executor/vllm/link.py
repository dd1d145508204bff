"""I/O. vLLM's workers as the control thread sees them.

vLLM started them and owns them: its queues may be used by EngineCore's main thread only, and its ``multiprocessing``
reaps them. So a stage of the workers is handed to the caller who waits for the operation, and a death is read from
the kernel without reaping.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

from checkpoint_executor import procfs
from checkpoint_executor.control import Control, Request
from checkpoint_executor.messages import Role, RpcReplied, StageCommand

__all__ = ["VllmWorkerProcess", "VllmWorkers"]

#: How long the status of a reaped process is waited for. Microseconds, unless the thread that reaped it is held up.
_NOTED_S = 0.5


class VllmWorkerProcess:
    """One of vLLM's worker processes; meets :class:`~checkpoint_executor.processes.WatchedProcess`.

    Raises:
        ProcessLookupError: it is gone already.
    """

    role = Role.WORKER

    def __init__(self, rank: int, process: BaseProcess) -> None:
        assert process.pid is not None
        self.rank = rank
        self.pid = process.pid
        self.start_time = procfs.start_time(process.pid)
        self.pidfd = procfs.open_pidfd(process.pid, self.start_time)
        self._process = process

    @property
    def name(self) -> str:
        return f"worker {self.rank}"

    def poll_exit(self) -> int | None:
        """Exit status if it has ended (negative: the signal). Left for ``multiprocessing`` to reap."""
        try:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._reaped_status()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _reaped_status(self) -> int | None:
        """The status that vLLM's monitor thread got, which was faster. It notes it a moment after it has reaped; until
        then ``multiprocessing`` says None, as if the process lived."""
        until = time.monotonic() + _NOTED_S
        while self._process.exitcode is None and time.monotonic() < until:
            time.sleep(0.001)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL, also if it is gone already."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """Let go of the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class VllmWorkers:
    """Meets :class:`~checkpoint_executor.control.WorkerLink`.

    Args:
        processes: by rank.

    Attributes:
        work: what the caller of the operation in progress has to do, in order: a stage, or None at the end.
    """

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._processes = processes
        self.work: SimpleQueue[StageCommand | None] = SimpleQueue()

    def spawn(self, control: Control) -> Iterator[VllmWorkerProcess]:
        """Take over the running workers."""
        del control
        for rank, process in enumerate(self._processes):
            yield VllmWorkerProcess(rank, process)

    def send_stage(self, control: Control, command: StageCommand) -> None:
        """Hand the stage to the caller."""
        del control
        self.work.put(command)

    def send_call(self, control: Control, request: Request) -> None:
        """The caller makes the call by itself, so for the coordinator it is over."""
        for rank in range(len(self._processes)):
            request.replies[rank] = (None, ())
            control.event(RpcReplied(request.number, rank))

    def send_exit(self, control: Control) -> None:
        """vLLM closes the workers' death pipes, which ends them."""

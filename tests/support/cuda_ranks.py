"""Rank processes on GPUs, and the driver's verbs on them: what ``tests/gpu`` is made of."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checkpoint_executor import procfs
from checkpoint_executor.driver_states import EXPECTED_STATE, Verb
from checkpoint_executor.helper.cuda_driver import CudaDriver
from checkpoint_executor.messages import Target
from tests.support import ranks_processes
from tests.support.cuda_targets import child_environment, make_driver
from tests.support.ranks_processes import RankGroup, RankProcess

__all__ = ["CudaRankGroup"]

_ROOT = Path(__file__).resolve().parents[2]
#: Longest that a verb may take here; the processes hold little outside the allocator.
_VERB_S = 60.0


class _CudaRank(RankProcess):
    """As its base, with an environment of its own: it must be right before CUDA and NCCL are loaded."""

    def __init__(self, rank: int, environment: dict[str, str]) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._popen = subprocess.Popen(
                [sys.executable, "-m", ranks_processes.__name__, str(descriptor), str(rank)],
                pass_fds=[descriptor],
                cwd=_ROOT,
                env={**os.environ, **child_environment(), **environment},
            )
        self._connection = Connection(ours.detach())


class CudaRankGroup(RankGroup):
    """Ranks on GPUs. A rank that does not answer in time fails the test, and all of them are killed at its end.

    Args:
        gpus: the UUID of each rank's GPU. environment: variables for all ranks.
    """

    def __init__(self, gpus: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._gpus = list(gpus)
        self._driver: CudaDriver = make_driver()
        self.ranks = [_CudaRank(rank, environment or {}) for rank in range(len(gpus))]

    def one(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> Any:
        """The result of rank 0, for groups of one."""
        return self.run(function, *args, timeout_s=timeout_s)[0]

    def used_bytes(self) -> list[int]:
        """Used bytes of each rank's GPU."""
        return [self._driver.device_memory(gpu).used_bytes for gpu in self._gpus]

    def checkpoint(self) -> None:
        """Lock all ranks, then checkpoint all."""
        self._verb(Verb.LOCK)
        self._verb(Verb.CHECKPOINT)

    def restore(self) -> None:
        """Restore all ranks, then unlock all."""
        self._verb(Verb.RESTORE)
        self._verb(Verb.UNLOCK)

    def _verb(self, verb: Verb) -> None:
        def act(rank: int) -> None:
            pid = self.ranks[rank].pid
            target = Target(rank, pid, procfs.start_time(pid), self._gpus[rank])
            if verb is Verb.LOCK:
                self._driver.lock(target, 10_000)
            else:
                getattr(self._driver, verb)(target)
            assert self._driver.get_state(target) is EXPECTED_STATE[verb]

        # Not a with block: leaving it would wait for a verb that hangs.
        threads = ThreadPoolExecutor(len(self.ranks), thread_name_prefix=verb)
        deadline = time.monotonic() + _VERB_S
        try:
            for done in [threads.submit(act, rank) for rank in range(len(self.ranks))]:
                done.result(deadline - time.monotonic())
        except TimeoutError:
            for rank in self.ranks:
                rank.kill()  # which ends the verb, and with it the thread
            raise
        finally:
            threads.shutdown(wait=False)

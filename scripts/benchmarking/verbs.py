"""The driver's four verbs on every rank at once, without the executor: one arm of the comparison.

Nothing is checked beforehand and nothing is suspended: whoever calls this knows that no peer has memory mapped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.helper.drivers import Driver
from checkpoint_executor.messages import Target
from scripts.benchmarking.way import Rates, gb_s

__all__ = ["DriverAlone"]

LOCK_TIMEOUT_MS = 10_000


class DriverAlone:
    """Lock and checkpoint, restore and unlock; a stage begins when the one before has ended on every rank.

    Its rates are of everything that left the device, not of the weights alone.

    Args:
        driver: opened. targets: the ranks' processes, in rank order.
    """

    def __init__(self, driver: Driver, targets: Sequence[Target]) -> None:
        self._driver = driver
        self._targets = targets
        self._threads = ThreadPoolExecutor(len(targets))
        # By rank, seconds of the last checkpoint and of the last restore.
        self._checkpoint_s: list[float] = []
        self._restore_s: list[float] = []

    def down(self) -> None:
        """Raises DriverError (after a lock that timed out its rank runs on), RuntimeError for a state that is wrong."""
        self._all(lambda target: self._driver.lock(target, LOCK_TIMEOUT_MS), ProcessState.LOCKED)
        self._checkpoint_s = self._all(self._driver.checkpoint, ProcessState.CHECKPOINTED)

    def up(self) -> None:
        """Raises DriverError, after which a rank may be lost for ever; RuntimeError for a state that is wrong."""
        self._restore_s = self._all(self._driver.restore, ProcessState.LOCKED)
        self._all(self._driver.unlock, ProcessState.RUNNING)

    def states(self) -> list[str]:
        """By rank, as the driver says."""
        return [str(self._driver.get_state(target)) for target in self._targets]

    def rates(self, moved_bytes: Sequence[int]) -> Rates:
        return {
            "copy_down_gb_s": gb_s(self._checkpoint_s, moved_bytes),
            "copy_up_gb_s": gb_s(self._restore_s, moved_bytes),
        }

    def _all(self, verb: Callable[[Target], None], expected: ProcessState) -> list[float]:
        """The verb on every rank at once; by rank, its seconds."""

        def one(target: Target) -> float:
            begun = time.perf_counter()
            verb(target)
            elapsed_s = time.perf_counter() - begun
            # Success of a verb proves nothing by itself.
            if (state := self._driver.get_state(target)) is not expected:
                raise RuntimeError(f"rank {target.rank} is {state}, not {expected}")
            return elapsed_s

        futures = [self._threads.submit(one, target) for target in self._targets]
        return [future.result() for future in futures]

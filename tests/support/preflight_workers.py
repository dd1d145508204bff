"""Workers that fail the self-test, each in its own way. No torch: they start in a moment."""

from __future__ import annotations

import threading

from checkpoint_executor.workers import Worker, WorkerContext

__all__ = ["FailingWorker", "ForgetfulWorker", "HangingWorker"]


class ForgetfulWorker(Worker):
    """Never answers the same twice."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._replays = 0

    def device_id(self) -> str:
        return self.context.runtime.device_id

    def replay(self) -> int:
        self._replays += 1
        return self._replays


class HangingWorker(ForgetfulWorker):
    """Does not come back from a replay."""

    def replay(self) -> int:
        threading.Event().wait()
        return 0


class FailingWorker(Worker):
    """Cannot be built."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        raise LookupError("it does not like this machine")

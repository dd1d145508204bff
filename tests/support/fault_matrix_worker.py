"""The worker of the fault matrix and of the soak: raw memory, and hooks that fail when they were told to. No torch."""

from __future__ import annotations

import threading

from checkpoint_executor.workers import WorkerContext
from tests.support.executor_workers import RawWorker

__all__ = ["HOOKS", "MatrixWorker"]

#: The user's hook that runs within a stage, if any.
HOOKS = {
    "sleep_allocator": "before_sleep",
    "prepare_workspaces": "checkpoint_prepare",
    "restore_workspaces": "checkpoint_restore",
    "wake_allocator": "after_wake",
}


class _Workspace:
    """A workspace without memory, which only reports its hooks."""

    def __init__(self, worker: MatrixWorker) -> None:
        self._worker = worker

    def checkpoint_prepare(self) -> None:
        self._worker.enter("checkpoint_prepare")

    def checkpoint_restore(self) -> None:
        self._worker.enter("checkpoint_restore")


class MatrixWorker(RawWorker):
    """A RawWorker whose hooks can be armed once, by :meth:`arm_hook`."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._armed: dict[str, bool] = {}
        context.workspaces.append(_Workspace(self))

    def arm_hook(self, rank: int, hook: str, hangs: bool) -> None:
        """Let ``hook`` of this rank raise, or hang for ever, when it is next entered."""
        if rank == self.context.rank:
            self._armed[hook] = hangs

    def enter(self, hook: str) -> None:
        hangs = self._armed.pop(hook, None)
        if hangs:
            threading.Event().wait()
        elif hangs is not None:
            raise LookupError(f"{hook} does not like it")

    def before_sleep(self) -> None:
        self.enter("before_sleep")

    def after_wake(self, tags: tuple[str, ...]) -> None:
        self.enter("after_wake")

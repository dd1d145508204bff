"""The worker processes, and the base class that users subclass."""

from checkpoint_executor.workers.worker import Worker, WorkerContext, execution

__all__ = ["Worker", "WorkerContext", "execution"]

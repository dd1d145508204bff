"""The executor under test: all of the production class, with the software device instead of CUDA below it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec

from checkpoint_executor import softgpu
from checkpoint_executor.child import FaultPlan
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.faults import Injection
from checkpoint_executor.messages import Role, StageCommand
from checkpoint_executor.tags import ALL_TAGS
from checkpoint_executor.vllm.executor import CUDACheckpointExecutor
from checkpoint_executor.vllm.workers import Figures, StageCall, WorkerSide

__all__ = ["FAULTS_VARIABLE", "LateCheckExecutor", "SoftCheckpointExecutor", "SoftWorkerSide"]

#: Faults for the helper and the workers, as JSON. No setting of ours: the production class does not know it.
FAULTS_VARIABLE = "TEST_VLLM_FAULTS"

_plan: FaultPlan | None = None


def _faults() -> tuple[Injection, ...]:
    return msgspec.json.decode(os.environ.get(FAULTS_VARIABLE, "[]"), type=tuple[Injection, ...])


class SoftWorkerSide(WorkerSide):
    """The workers' stages on the software device, with faults."""

    def __init__(self, worker: Any, call: StageCall, deferred: Sequence[Any]) -> None:
        super().__init__(worker, call, deferred)
        self.soft = worker.worker

    def perform(self, command: StageCommand) -> Figures:
        global _plan
        if _plan is None:
            _plan = FaultPlan(
                ChildSpec(
                    role=Role.WORKER,
                    rank=self.soft.rank,
                    world_size=1,
                    parent_pid=0,
                    parent_start_time=0,
                    runtime_dir="",
                    device_kind="soft",
                    faults=_faults(),
                )
            )
        with _plan.around(command.stage, self.soft.rank):
            return super().perform(command)

    def device(self) -> str:
        return str(self.soft.runtime.device_id)

    def bytes_by_name(self) -> Figures:
        communicator = self.soft.runtime.communicator
        figures = {tag: self.soft.runtime.allocator.tag_bytes()[tag] for tag in ALL_TAGS}
        return {
            **figures,
            "suspendable": communicator.memory_bytes()["suspendable"] if communicator.needs_suspend else 0,
        }

    def ledger(self) -> Figures:
        return dict(self.soft.runtime.ledger())

    def open_local_memory(self) -> Any:
        runtime = self.soft.runtime
        return SimpleNamespace(release=runtime.release_local_memory, restore=runtime.restore_local_memory)

    def confirm_resumed(self, name: str, communicator: Any) -> None:
        assert not communicator._suspended
        self.soft.runtime.communicator.check()


class SoftCheckpointExecutor(CUDACheckpointExecutor):
    standard_worker: ClassVar[str] = "tests.support.vllm_worker.SoftWorker"
    worker_side: ClassVar[type[WorkerSide]] = SoftWorkerSide
    device_kind: ClassVar[str] = "soft"

    @classmethod
    def machine_problems(cls) -> list[str]:
        return []

    def soft_root(self) -> str:
        return str(softgpu.default_root())

    def helper_faults(self) -> tuple[Injection, ...]:
        return tuple(fault for fault in _faults() if fault.role is Role.HELPER)


class LateCheckExecutor(SoftCheckpointExecutor):
    """As if vLLM had not let us look at the configuration in the front end."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

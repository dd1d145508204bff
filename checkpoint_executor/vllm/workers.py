"""What runs inside vLLM's worker processes: the workers' part of each stage.

Sent by ``collective_rpc`` as importable functions, so it needs no switch for insecure serialisation, and each rank
answers with data of its own. An exception must never leave :func:`perform`: vLLM reports only the first rank's and
leaves the others' replies in the queue for the next call to find.

Between ``prepare_workspaces`` and ``restore_workspaces`` nothing here may touch CUDA: the worker waits in vLLM's queue,
and the garbage collector is off, since the finalizer of a CUDA object would synchronise, which ends a checkpointed
process.
"""

from __future__ import annotations

import gc
import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from select import POLLIN, poll
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from msgspec import Struct

from checkpoint_executor import procfs, wire
from checkpoint_executor.child import Stopwatch, allow_tracing_by, error_info
from checkpoint_executor.messages import ErrorInfo, Role, StageCommand, StageReply, identity
from checkpoint_executor.tags import ALL_TAGS, KV_CACHE
from checkpoint_executor.vllm.ledger import SUSPENDABLE, ledger, memory_statistic

if TYPE_CHECKING:
    from checkpoint_executor.workers.cuda_local_memory import LocalMemory

__all__ = ["StageCall", "WorkerSide", "perform"]

Figures = dict[str, int]


class StageCall(Struct, frozen=True):
    """What the executor tells every rank beside the command itself.

    Attributes:
        helper_pid: whom to let trace this process. parent_pid, parent_start_time: EngineCore.
        endpoint: the control thread's socket. suspended: whether the communicators must be suspended for a checkpoint.
        wakes_all: whether nothing sleeps after this wake. arena: whether backups go to our own arena.
        local_memory: whether kernels' local memory is given back before a checkpoint.
        attribution: whether to tell after the stage what this worker holds.
    """

    command: StageCommand
    helper_pid: int
    parent_pid: int
    parent_start_time: int
    endpoint: str
    suspended: bool
    wakes_all: bool
    arena: bool
    local_memory: bool
    attribution: bool


def perform(worker: Any, side: type[WorkerSide], call_bytes: bytes, deferred: Sequence[Any] = ()) -> bytes:
    """Do one stage in this worker; the encoded :class:`~checkpoint_executor.messages.StageReply`. Raises nothing.

    Args:
        worker: vLLM's wrapper of the worker. side: who performs the stages. call_bytes: an encoded :class:`StageCall`.
        deferred: empty batches that came while the process was checkpointed.
    """
    call = msgspec.msgpack.decode(call_bytes, type=StageCall)
    command = call.command
    watch = Stopwatch()
    error: ErrorInfo | None = None
    figures: Figures = {}
    held: Figures = {}
    device: str | None = None
    rank = -1
    try:
        rank = worker.worker.rank
        stages = side(worker, call, deferred)
        figures = stages.perform(command)
        device = stages.found_device
        held = stages.account() if call.attribution else {}
    except Exception as failure:  # noqa: BLE001 - whatever vLLM's worker raises belongs to the executor
        error = error_info(failure)
    reply = StageReply(
        command.cycle,
        command.index,
        command.stage,
        rank,
        watch.elapsed_s,
        error=error,
        figures=figures,
        device=device,
        ledger=held,
    )
    if error is not None:
        _tell_at_once(call.endpoint, reply)
    return msgspec.msgpack.encode(reply)


def _tell_at_once(endpoint: str, reply: StageReply) -> None:
    """Say it to the control thread directly.

    vLLM reads the replies in the order of the ranks, and the others may be in a barrier that waits for this one
    (NCCL's suspend has no timeout): the error would be heard when the deadline passes.
    """
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.ROUTING_ID, identity(Role.WORKER, reply.rank))
            socket.linger = 1000
            socket.connect(endpoint)
            socket.send_multipart(wire.encode(reply))
    except zmq.ZMQError:
        pass  # the reply by vLLM's queue says it too


class WorkerSide:
    """The stages of one worker. Made for each stage anew; what lasts is in :data:`_kept`.

    Tests put a software device below it by overriding what is asked of vLLM and CUDA.
    """

    def __init__(self, worker: Any, call: StageCall, deferred: Sequence[Any]) -> None:
        self.worker = worker
        self.call = call
        self.deferred = deferred
        self.found_device: str | None = None

    def perform(self, command: StageCommand) -> Figures:
        match command.stage:
            case "introduce":
                return self.introduce()
            case "account":
                return {}
            case "worker_sleep":
                return self.sleep()
            case "confirm_suspended":
                return self.confirm_suspended()
            case "prepare_workspaces":
                return self.prepare_workspaces()
            case "restore_workspaces":
                return self.restore_workspaces()
            case "worker_wake":
                return self.wake(command.tags)
            case "worker_discard":
                return self.discard(command.tags)
            case unknown:
                raise ValueError(f"unknown stage {unknown!r}: executor and worker differ")

    # -- what is asked of vLLM and CUDA ----------------------------------------------------------

    def device(self) -> str:
        """UUID of this worker's GPU as NVML writes it."""
        import torch

        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return f"GPU-{uuid.removeprefix('GPU-')}"

    def bytes_by_name(self) -> Figures:
        """What cumem has: by tag, and ``suspendable`` for what any first wake brings back whatever its tags.

        Asked while awake: it also asks NCCL.
        """
        from vllm.device_allocator import get_mem_allocator_instance

        figures: Figures = dict.fromkeys((*ALL_TAGS, "suspendable"), 0)
        allocator = get_mem_allocator_instance()
        for data in list(allocator.pointer_to_data.values()):
            name = data.tag if data.tag in ALL_TAGS else "suspendable"
            figures[name] += int(data.handle[1])
        figures["suspendable"] += sum(
            memory_statistic(communicator, SUSPENDABLE) for _, communicator in self.communicators()
        )
        return figures

    def open_local_memory(self) -> LocalMemory:
        """What the context has for kernels' local variables."""
        import torch

        from checkpoint_executor.workers.cuda_calls import PrimaryContext
        from checkpoint_executor.workers.cuda_local_memory import LocalMemory

        return LocalMemory(PrimaryContext(torch.cuda.current_device()))

    def ledger(self) -> Figures:
        """What this worker holds, by kind."""
        import torch

        from checkpoint_executor.vllm import backend

        return ledger(
            torch.cuda.current_device(),
            [communicator for _, communicator in self.communicators()],
            _kept.local_memory.size_bytes if _kept.local_memory is not None else 0,
            backend.arena_bytes() if self.call.arena else 0,
        )

    def communicators(self) -> Iterator[tuple[str, Any]]:
        """(group, PyNccl communicator or None) of every group of more than one rank."""
        from vllm.distributed import parallel_state

        for name, reference in list(parallel_state._groups.items()):
            group = reference()
            if group is not None and group.device_communicator is not None:
                yield name, getattr(group.device_communicator, "pynccl_comm", None)

    def account(self) -> Figures:
        """The ledger. A reading for the report: an error in it must not fail the stage."""
        try:
            return self.ledger()
        except Exception:  # noqa: BLE001 - then all of it is remainder, and the log says why
            traceback.print_exc()
            return {}

    # -- stages ----------------------------------------------------------------------------------

    def introduce(self) -> Figures:
        """Say which GPU is ours, let the helper trace us, and refuse what could not be checkpointed later."""
        allow_tracing_by(self.call.helper_pid)
        _die_with(self.call.parent_pid, self.call.parent_start_time)
        self.found_device = self.device()
        if self.call.suspended:
            for name, communicator in self.communicators():
                _require_suspendable(name, communicator)
        _require_workspace_hooks()
        # Here, where what fails is a start that is refused, and not an engine that dies in its first sleep.
        _kept.local_memory = self.open_local_memory() if self.call.local_memory else None
        if self.call.arena:
            from checkpoint_executor.vllm import backend

            model_config = self.worker.worker.vllm_config.model_config
            # vLLM before 0.33 has no such option.
            backend.prepare_early(getattr(model_config, "sleep_mode_offload_cudagraph", False))
        return {}

    def sleep(self) -> Figures:
        figures = _with_device_bytes(self.bytes_by_name())
        if self.call.arena:
            from checkpoint_executor.vllm import backend

            with backend.lent_arena():
                self.worker.sleep(level=1)
        else:
            self.worker.sleep(level=1)
        return figures

    def confirm_suspended(self) -> Figures:
        """Look at every communicator's own flag: the call also succeeds where it does nothing."""
        if not self.call.suspended:
            return {}
        for name, communicator in self.communicators():
            _require_suspendable(name, communicator)
            if not communicator._suspended:
                raise RuntimeError(
                    f"the NCCL communicator of group {name!r} still holds its GPU memory after sleep: a checkpoint "
                    "would succeed and its restore fail for ever"
                )
        return {}

    def prepare_workspaces(self) -> Figures:
        self.worker.checkpoint_prepare()
        # No collection first: it takes a second over vLLM's heap, cumem's sleep has just made one, and what it would
        # find is not touched while the collector is off.
        _kept.gc_was_enabled = gc.isenabled()
        gc.disable()
        return {"local_memory": _kept.local_memory.release() if _kept.local_memory is not None else 0}

    def restore_workspaces(self) -> Figures:
        if _kept.local_memory is not None:
            # First: nothing may run without it.
            _kept.local_memory.restore()
        if _kept.gc_was_enabled:
            gc.enable()
        self.worker.checkpoint_restore()
        return {}

    def wake(self, tags: Sequence[str]) -> Figures:
        # None wakes what has none of the known tags as well; naming all of them does not, before vLLM 0.32.
        self.worker.wake_up(tags=None if self.call.wakes_all else list(tags))
        if self.call.suspended:
            for name, communicator in self.communicators():
                self.confirm_resumed(name, communicator)
        # V2's model runner frees what it keeps for a request in the empty batch after the request's end.
        for batch in self.deferred:
            self.worker.execute_model(batch)
        return {}

    def confirm_resumed(self, name: str, communicator: Any) -> None:
        """NCCL logs a failed import as a warning and carries on: only a collective proves the mappings."""
        import torch

        if communicator._suspended:
            raise RuntimeError(f"the NCCL communicator of group {name!r} still says it is suspended after the wake")
        numbers = torch.full((1,), float(communicator.rank + 1), device=communicator.device)
        total = communicator.all_reduce(numbers)
        expected = communicator.world_size * (communicator.world_size + 1) / 2
        if (found := float((numbers if total is None else total).item())) != expected:
            raise RuntimeError(
                f"the NCCL communicator of group {name!r} is broken after the wake: the ranks sum to {found:g}, not to "
                f"{expected:g}"
            )

    def discard(self, tags: Sequence[str]) -> Figures:
        figures = self.bytes_by_name()
        self.worker.discard(tuple(tags))
        return _with_device_bytes({KV_CACHE: figures[KV_CACHE]}) if KV_CACHE in tags else {}


def _with_device_bytes(figures: Figures) -> Figures:
    """The same, and what each tag takes on the device, which is what admission asks for: cumem counts whole pages."""
    return {**figures, **{f"device_{tag}": figures[tag] for tag in ALL_TAGS if tag in figures}}


class _Kept:
    """What a worker process remembers from one stage to another."""

    gc_was_enabled = True
    local_memory: LocalMemory | None = None
    watched_parent = 0


_kept = _Kept()


def _die_with(pid: int, started: int) -> None:
    """End this process when EngineCore is gone.

    vLLM's own watcher has the main thread shut down in good order, which calls CUDA and never returns in a
    checkpointed process; the helper's SIGKILL is first, and this is for the case that the helper is gone too.
    """
    if _kept.watched_parent == pid:
        return
    _kept.watched_parent = pid
    descriptor = procfs.open_pidfd(pid, started)

    def watch() -> None:
        poller = poll()
        poller.register(descriptor, POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="engine-core-watch", daemon=True).start()


def _require_suspendable(name: str, communicator: Any) -> None:
    if communicator is None or communicator.disabled:
        raise RuntimeError(
            f"group {name!r} has no PyNccl communicator, so vLLM would fall back to PyTorch's own NCCL communicator, "
            "which nobody suspends. vLLM disables PyNccl silently when the loaded NCCL is older than 2.29.7 (torch "
            "2.11 brings 2.28.9): put a newer libnccl.so.2 first, with LD_PRELOAD and VLLM_NCCL_SO_PATH"
        )
    if not communicator.nccl.has_symbol("ncclCommSuspend"):
        raise RuntimeError(f"the NCCL of group {name!r} has no ncclCommSuspend: 2.29.7 or later is needed")


def _require_workspace_hooks() -> None:
    """A FlashInfer that vLLM has loaded must be able to give its workspaces up and take them back."""
    import sys

    module = sys.modules.get("flashinfer.comm.allreduce")
    workspace = getattr(module, "TRTLLMAllReduceFusionWorkspace", None)
    if workspace is not None and not hasattr(workspace, "checkpoint_prepare"):
        raise RuntimeError(
            "this FlashInfer's all-reduce workspace has no checkpoint_prepare: 0.6.18 or later is needed, or "
            "VLLM_ALLREDUCE_USE_FLASHINFER=0 and the compile pass fuse_allreduce_rms off"
        )

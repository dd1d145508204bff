"""The worker process: one loop on the main thread, which is also the only one that touches the device.

It builds the user's Worker, runs its methods, and performs the worker's side of each stage. Ordering is not decided
here. Between ``prepare_workspaces`` and ``restore_workspaces`` nothing in this process may touch the device: the loop
waits on a socket, and the garbage collector is off, since a finalizer of a device object would synchronise, which
ends a checkpointed process (seen on drivers 580 and 595).
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from checkpoint_executor import payload, wire
from checkpoint_executor.child import (
    Channel,
    FaultPlan,
    Stopwatch,
    allow_tracing_by,
    die_with_parent,
    error_info,
)
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.faults import Fault, Injection
from checkpoint_executor.messages import BuildWorker, Call, CallReply, ErrorInfo, Exit, StageCommand, StageReply
from checkpoint_executor.tags import WEIGHTS
from checkpoint_executor.workers.protocols import DeviceRuntime
from checkpoint_executor.workers.worker import Worker, WorkerContext, execution_methods

__all__ = ["serve"]

Figures = dict[str, int]


def serve(spec: ChildSpec) -> None:
    """Run the worker until it is told to exit or its parent is gone."""
    die_with_parent(spec, on_death=lambda: os._exit(1))
    allow_tracing_by(spec.helper_pid)
    channel = Channel(spec)
    channel.hello(spec)
    WorkerService(spec, channel).run()


def open_runtime(spec: ChildSpec) -> DeviceRuntime:
    """Open the rank's device. Imports no torch on the software device."""
    rendezvous = Path(spec.runtime_dir) / "rendezvous"
    if spec.device_kind == "cuda":
        from checkpoint_executor.workers.cuda_runtime import CudaRuntime

        return CudaRuntime.open(
            device_uuid=spec.device_id or None,
            index=spec.rank,
            rank=spec.rank,
            world_size=spec.world_size,
            rendezvous=rendezvous,
            communication=spec.communication,
            retain_backup=spec.retain_backup,
            attribution=spec.attribution,
        )
    from checkpoint_executor.softgpu import device_name
    from checkpoint_executor.workers.soft_runtime import SoftRuntime

    return SoftRuntime.open(
        root=Path(spec.soft_root),
        name=spec.device_id or device_name(spec.rank),
        rank=spec.rank,
        world_size=spec.world_size,
        rendezvous=rendezvous,
        communication=spec.communication,
        capacity_bytes=spec.soft_capacity_bytes,
    )


def resolve_worker_class(worker: type | str) -> type[Worker]:
    """The Worker class from itself or its name, ``"package.module:Class"`` or ``"package.module.Class"``.

    Raises:
        TypeError: it is not a subclass of Worker.
    """
    if isinstance(worker, str):
        module, _, name = worker.rpartition(":" if ":" in worker else ".")
        found = getattr(importlib.import_module(module), name)
    else:
        found = worker
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise TypeError(f"{worker!r} is not a subclass of checkpoint_executor.workers.Worker")
    return found


class WorkerService:
    """The loop, the user's worker, and its device."""

    def __init__(self, spec: ChildSpec, channel: Channel) -> None:
        self._spec = spec
        self._channel = channel
        self._faults = FaultPlan(spec)
        self._runtime: DeviceRuntime | None = None
        self._worker: Worker | None = None
        #: Hashes of the weights before the sleep, where they are to be verified.
        self._weights: dict[str, bytes] = {}

    def run(self) -> None:
        while True:
            received = self._channel.receive()
            if received is None:
                self._channel.wait()
                continue
            message, frames = received
            match message:
                case BuildWorker():
                    self._build(message, frames)
                case StageCommand():
                    self._stage(message)
                case Call():
                    self._call(message, frames)
                case Exit():
                    self._exit()

    # -- the user's worker -----------------------------------------------------------------------

    @property
    def runtime(self) -> DeviceRuntime:
        if self._runtime is None:
            raise RuntimeError("the worker has not been built")
        return self._runtime

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the worker has not been built")
        return self._worker

    def _build(self, message: BuildWorker, frames: Sequence[wire.Frame]) -> None:
        watch = Stopwatch()
        error: ErrorInfo | None = None
        methods: tuple[str, ...] = ()
        fault: Injection | None = None
        try:
            with self._faults.around("build", self._spec.rank) as fault:
                worker, args, kwargs = payload.load_call(frames)
                worker_class = resolve_worker_class(worker)
                methods = execution_methods(worker_class)
                self._runtime = open_runtime(self._spec)
                context = WorkerContext(self._spec.rank, self._spec.world_size, self._runtime)
                with self._runtime.device_call():
                    self._worker = worker_class(context, *args, **kwargs)
                    self._runtime.synchronize()
                # Now, and not in the first sleep, which would be the slowest by far.
                self._runtime.prepare_backup()
                # What exists now lives as long as the worker. A full collection beside a loaded torch takes 60 ms
                # (H200 host), and every sleep makes one; frozen objects are not looked at again.
                gc.collect()
                gc.freeze()
        except Exception as failure:  # noqa: BLE001 - the user's code: whatever it raises belongs to the parent
            error = error_info(failure)
        reply = StageReply(
            message.cycle,
            message.index,
            "build",
            self._spec.rank,
            watch.elapsed_s,
            error=error,
            device=self._runtime.device_id if self._runtime is not None else None,
            execution_methods=methods,
        )
        self._faults.send(self._channel, reply, fault)

    def _call(self, message: Call, frames: Sequence[wire.Frame]) -> None:
        error: ErrorInfo | None = None
        out: Sequence[wire.Frame] = ()
        try:
            # In a function of its own, so that arguments and result die there and not at the next call: they may
            # hold device memory.
            out = self._call_method(frames)
        except payload.UnsupportedResultError as failure:
            error = ErrorInfo("result_type", str(failure), error_type="TypeError")
        except Exception as failure:  # noqa: BLE001 - the user's code
            error = error_info(failure)
        self._channel.send(CallReply(message.call_id, self._spec.rank, error), out)

    def _call_method(self, frames: Sequence[wire.Frame]) -> Sequence[wire.Frame]:
        method, args, kwargs = payload.load_call(frames)
        with self.runtime.device_call():
            if isinstance(method, str):
                out = payload.encode_result(getattr(self.worker, method)(*args, **kwargs))
            else:
                out = payload.encode_result(method(self.worker, *args, **kwargs))
        if (problem := payload.oversized(out, self._spec.max_payload_bytes)) is not None:
            raise payload.UnsupportedResultError(f"result: {problem}")
        return out

    def _exit(self) -> None:
        try:
            if self._worker is not None:
                self._worker.shutdown()
            if self._runtime is not None:
                self._runtime.close()
        except BaseException:  # noqa: BLE001 - the parent waits for the end and not for an answer
            traceback.print_exc()
        finally:
            self._channel.close()
            sys.stdout.flush()
            sys.stderr.flush()
            # Interpreter teardown of a CUDA process can take seconds and block; everything is closed already.
            os._exit(0)

    # -- stages ----------------------------------------------------------------------------------

    def _stage(self, command: StageCommand) -> None:
        watch = Stopwatch()
        error: ErrorInfo | None = None
        figures: Figures = {}
        ledger: Figures = {}
        fault: Injection | None = None
        try:
            with self._faults.around(command.stage, self._spec.rank) as fault:
                if fault is not None and fault.fault is Fault.OUT_OF_MEMORY:
                    raise MemoryError(f"injected into {command.stage}")
                figures = self._perform(command)
                if self._spec.attribution:
                    ledger = self._account()
        except Exception as failure:  # noqa: BLE001
            error = error_info(failure)
        reply = StageReply(
            command.cycle,
            command.index,
            command.stage,
            self._spec.rank,
            watch.elapsed_s,
            error=error,
            figures=figures,
            ledger=ledger,
        )
        self._faults.send(self._channel, reply, fault)

    def _perform(self, command: StageCommand) -> Figures:
        match command.stage:
            case "account":
                return {}
            case "sleep_allocator":
                return self._sleep_allocator()
            case "suspend_communicators":
                return self._suspend_communicators()
            case "confirm_suspended":
                return self._confirm_suspended()
            case "prepare_workspaces":
                return self._prepare_workspaces()
            case "restore_workspaces":
                return self._restore_workspaces()
            case "resume_communicators":
                return self._resume_communicators()
            case "confirm_resumed":
                return self._confirm_resumed()
            case "wake_allocator":
                return self._wake_allocator(command.tags)
            case "release_kv_cache":
                return self._release(command.tags)
            case unknown:
                raise ValueError(f"unknown stage {unknown!r}: parent and worker differ")

    def _account(self) -> Figures:
        """What the runtime knows of. A reading for the report: an error in it must not fail the stage."""
        try:
            return self.runtime.ledger()
        except Exception:  # noqa: BLE001 - then all of it is remainder, and the log says why
            traceback.print_exc()
            return {}

    def _sleep_allocator(self) -> Figures:
        self.worker.before_sleep()
        gc.collect()
        self.runtime.synchronize()
        # Before, since tensors that end with the sleep do not come back; in whole device blocks, as a wake takes them.
        device = {f"device_{tag}": size for tag, size in self.runtime.allocator.tag_bytes().items()}
        if self._spec.verify_weights:
            self._weights = self.runtime.allocator.fingerprints(WEIGHTS)
        figures = self.runtime.allocator.sleep()
        return {**figures, **device, **self.runtime.trim()}

    def _suspend_communicators(self) -> Figures:
        communicator = self.runtime.communicator
        if not communicator.needs_suspend:
            return {}
        communicator.suspend()
        return communicator.memory_bytes()

    def _confirm_suspended(self) -> Figures:
        communicator = self.runtime.communicator
        if communicator.needs_suspend and not communicator.is_suspended:
            raise RuntimeError(
                "the communicator still holds its device memory after suspend: a checkpoint would succeed and its "
                "restore fail for ever"
            )
        return {}

    def _prepare_workspaces(self) -> Figures:
        for workspace in self.runtime.workspaces:
            workspace.checkpoint_prepare()
        self.runtime.synchronize()
        gc.disable()
        return {"local_memory": self.runtime.release_local_memory() if self._spec.release_local_memory else 0}

    def _restore_workspaces(self) -> Figures:
        # First: nothing may run without it.
        self.runtime.restore_local_memory()
        gc.enable()
        for workspace in reversed(self.runtime.workspaces):
            workspace.checkpoint_restore()
        return {}

    def _resume_communicators(self) -> Figures:
        communicator = self.runtime.communicator
        if communicator.needs_suspend:
            communicator.resume()
        return communicator.memory_bytes()

    def _confirm_resumed(self) -> Figures:
        communicator = self.runtime.communicator
        if communicator.needs_suspend and communicator.is_suspended:
            raise RuntimeError("the communicator still says it is suspended after resume")
        if communicator.world_size > 1:
            # Resume logs a failed import as a warning and carries on: only a collective proves the mappings.
            communicator.check()
        return {}

    def _wake_allocator(self, tags: tuple[str, ...]) -> Figures:
        figures = self.runtime.allocator.wake(tags)
        self.runtime.synchronize()
        if self._spec.verify_weights and WEIGHTS in tags:
            self._verify_weights()
        self.worker.after_wake(tags)
        return figures

    def _verify_weights(self) -> None:
        """Raises RuntimeError if an allocation did not come back as it was."""
        now = self.runtime.allocator.fingerprints(WEIGHTS)
        # Tensors may have died since; none can have been made while asleep.
        wrong = sorted(name for name, fingerprint in now.items() if self._weights.get(name) != fingerprint)
        if wrong:
            raise RuntimeError(f"weights did not come back as they were: {', '.join(wrong[:8])} ({len(wrong)} in all)")

    def _release(self, tags: tuple[str, ...]) -> Figures:
        self.runtime.synchronize()
        allocator = self.runtime.allocator
        device = allocator.tag_bytes()
        figures = {f"device_{tag}": device[tag] for tag in tags}
        for tag in tags:
            figures.update(allocator.release(tag))
        return figures

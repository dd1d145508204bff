"""A process that builds an executor and does what the test says, to be killed, interrupted or forked.

Run as ``python -P -m tests.support.executor_parent_main FD JSON``; ``SoftMachine.parent()`` starts it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpoint_executor import BusyError, CUDACheckpointExecutor, ForkedError, processes
from checkpoint_executor.faults import Injection
from checkpoint_executor.messages import Role
from tests.support import child, executor_workers


class Parent:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._executor: CUDACheckpointExecutor | None = None

    @property
    def executor(self) -> CUDACheckpointExecutor:
        assert self._executor is not None
        return self._executor

    # The executor

    def build(
        self,
        worker: str = "RawWorker",
        ranks: int = 2,
        worker_kwargs: dict[str, Any] | None = None,
        faults: tuple[dict[str, Any], ...] = (),
    ) -> dict[str, int]:
        injections = tuple(Injection(**{**fault, "role": Role(fault["role"])}) for fault in faults)
        self._executor = CUDACheckpointExecutor(
            getattr(executor_workers, worker),
            ranks,
            worker_kwargs=worker_kwargs,
            **{**self._options, "faults": injections},
        )
        return self._executor.pids

    def sleep(self) -> None:
        self.executor.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.executor.wake_up(tags)

    def shutdown(self) -> None:
        self.executor.shutdown()

    def call(self, method: str, arguments: Sequence[Any] = ()) -> Any:
        return self.executor.collective_rpc(method, args=tuple(arguments))

    def cycle(self) -> bool:
        """Whether it still serves, sleeps and wakes."""
        before = self.executor.collective_rpc("read_weights")
        self.executor.sleep()
        self.executor.wake_up()
        return bool(self.executor.collective_rpc("read_weights") == before)

    def kill_myself_after_starting(self, processes_started: int) -> None:
        """SIGKILL to this process as soon as so many children have been started, then build."""
        real = processes.spawn
        started: list[processes.ChildProcess] = []

        def spawn(role: Role, rank: int, spec: str, environ: Mapping[str, str]) -> processes.ChildProcess:
            started.append(real(role, rank, spec, environ))
            if len(started) == processes_started:
                os.kill(os.getpid(), signal.SIGKILL)
            return started[-1]

        processes.spawn = spawn
        self.build()

    # Forks

    def fork_a_child_that_waits(self) -> int:
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return pid

    def fork_a_child_that_exits(self) -> int:
        """A child that leaves as programs do: through exit handlers and finalizers. Its exit status."""
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def fork_by_multiprocessing(self) -> int | None:
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(0,))
        process.start()
        process.join()
        return process.exitcode

    def use_in_a_forked_child(self) -> list[str]:
        """What each method says in a forked child, which then drops the executor."""
        executor = self.executor
        calls: dict[str, Callable[[], object]] = {
            "collective_rpc": lambda: executor.collective_rpc("identify"),
            "sleep": executor.sleep,
            "pause": lambda: executor.sleep(level=0),
            "wake_up": executor.wake_up,
            "release": executor.release_kv_cache_memory,
            "check_health": executor.check_health,
        }
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = []
            for name, call in calls.items():
                try:
                    call()
                    said.append(f"{name}: nothing")
                except ForkedError as error:
                    said.append(f"{name}: ForkedError, alive {error.executor_alive}")
            with executor:
                pass
            executor.shutdown()
            said.append(f"shutdown: {executor.phase}")
            self._executor = None
            del executor, calls, call
            gc.collect()
            os.write(writing, "\n".join(said).encode())
            sys.exit(0)
        os.close(writing)
        with os.fdopen(reading) as answers:
            said = answers.read().splitlines()
        os.waitpid(pid, 0)
        return said

    def wait_until_idle(self) -> None:
        """Until the workers have ended a call that nobody waits for."""
        while True:
            try:
                self.executor.collective_rpc("identify")
            except BusyError:
                continue
            return

    def call_until_interrupted(self, method: str, arguments: Sequence[Any] = ()) -> str:
        """A call that Ctrl-C ends, as far as the caller is concerned."""
        try:
            self.call(method, arguments)
        except KeyboardInterrupt:
            return "KeyboardInterrupt"
        return "answered"


def main() -> None:
    parent = Parent(child.arguments()["options"])
    commands = {
        name: getattr(parent, name)
        for name in (
            "build",
            "sleep",
            "wake_up",
            "shutdown",
            "call",
            "wait_until_idle",
            "cycle",
            "kill_myself_after_starting",
            "fork_a_child_that_waits",
            "fork_a_child_that_exits",
            "fork_by_multiprocessing",
            "use_in_a_forked_child",
            "call_until_interrupted",
        )
    }
    child.serve(child.channel(), commands)


if __name__ == "__main__":
    main()

"""I/O. What a running executor tells about itself without being asked: a file in its runtime directory, and a log.

The control thread writes, ``checkpoint-executor status`` reads; no worker and no socket takes part, so it answers
while the workers are checkpointed, and in the middle of a stage that hangs. The file goes with the directory when the
executor ends; one that was left behind by SIGKILL is told apart by the pid and start time in the directory's name.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from checkpoint_executor import directories, procfs
from checkpoint_executor.control import Control
from checkpoint_executor.coordinator import Phase
from checkpoint_executor.errors import CheckpointExecutorError
from checkpoint_executor.report import CycleReport

__all__ = ["CycleLog", "Status", "StatusFile", "read_all"]

_log = logging.getLogger(__name__)

_FILE_NAME = "status.json"


class Status(Struct, frozen=True):
    """An executor at one moment.

    Attributes:
        pid: the process that has the executor. front_door: ``"own"`` or ``"vllm"``. model: what it serves, for people.
        phase: ``"awake"``, ``"checkpointed"``, ``"suspending"`` and so on. sleeping: tags asleep.
        paused: whether ``sleep(level=0)`` is in force (under vLLM the scheduler's own pause is not seen here).
        since: when the phase began, seconds since 1970.
        processes: pids by name. last_report: of the last sleep, wake or release that did something.
    """

    pid: int
    front_door: str
    model: str
    phase: str
    sleeping: tuple[str, ...] = ()
    paused: bool = False
    since: float = 0.0
    processes: dict[str, int] = {}
    last_report: CycleReport | None = None


class StatusFile:
    """Writes the status; made to be given to :class:`~checkpoint_executor.control.Control` as ``on_change``.

    Args:
        front_door, model: as in :class:`Status`.
    """

    def __init__(self, front_door: str, model: str = "") -> None:
        self._front_door = front_door
        self._model = model
        self._phase = ""
        self._since = 0.0

    def __call__(self, control: Control) -> None:
        if control.phase in (Phase.CLOSING, Phase.CLOSED, Phase.FAILED):
            # The helper, or the end of the control thread, is removing the directory: a file made meanwhile would stay.
            return
        phase = str(control.phase)
        if phase != self._phase:
            self._phase, self._since = phase, time.time()
        status = Status(
            pid=os.getpid(),
            front_door=self._front_door,
            model=self._model,
            phase=phase,
            sleeping=tuple(sorted(control.sleeping)),
            paused=control.paused,
            since=self._since,
            processes=control.pids,
            last_report=control.last_report,
        )
        path = control.runtime_dir / _FILE_NAME
        try:
            path.with_suffix(".new").write_bytes(msgspec.json.encode(status))
            # A reader sees the old one or the new one, never half of it.
            path.with_suffix(".new").replace(path)
        except OSError:
            pass  # a full disk must not end an executor that works


def read_all(base: str | None = None) -> list[Status]:
    """The running executors of this user.

    Args:
        base: where their runtime directories are made, if not in the default place.

    Raises:
        ConfigError: the user's directory is not ours alone.
    """
    found = []
    folder = directories.user_directory(base, make=False)
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        pid, _, rest = path.name.partition("-")
        started, _, _ = rest.partition("-")
        if not (pid.isdigit() and started.isdigit() and procfs.is_alive(int(pid), int(started))):
            continue
        try:
            found.append(msgspec.json.decode((path / _FILE_NAME).read_bytes(), type=Status))
        except (OSError, msgspec.DecodeError):
            pass  # it is just starting or ending
    return found


class CycleLog:
    """One JSON line for each operation, appended to a file. Several executors may share the file.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)

    def report(self, report: CycleReport) -> None:
        """An operation that was carried out, or acknowledged as a no-op."""
        self._append(json.loads(msgspec.json.encode(report)))

    def error(self, operation: str, error: CheckpointExecutorError) -> None:
        """An operation that was refused or ended the executor."""
        facts = {name: value for name, value in error.facts.items() if value is not None}
        self._append(
            {
                "operation": operation,
                "error": type(error).__name__,
                "message": error.message,
                "executor_alive": error.executor_alive,
                **facts,
            }
        )

    def _append(self, record: dict[str, object]) -> None:
        if self._path is None:
            return
        line = json.dumps({"time": time.time(), "pid": os.getpid(), **record}, default=str)
        try:
            # One write to a file opened for appending: lines of several processes do not mix.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning("no line was written to %s: %s", self._path, error)

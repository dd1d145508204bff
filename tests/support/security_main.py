"""Programs of the security tests, run as processes of their own: a whole cycle, and what a second user may try.

``cycle`` prints what it is and that its memory came back. ``attack`` gets, as JSON, a runtime directory and the pids
and start times of somebody's executor, gives up every privilege, tries each way in, and prints which of them worked.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_executor import CUDACheckpointExecutor
from checkpoint_executor.driver_states import DriverError
from checkpoint_executor.softgpu import RemoteProcess
from tests.support.executor_workers import RawWorker, pattern

_NOBODY = 65534
_PTRACE_ATTACH, _PIDFD_GETFD = 16, 438


def cycle() -> dict[str, Any]:
    """A sleep and a wake at TP=2 as whoever we are."""
    with (
        tempfile.TemporaryDirectory(prefix="") as folder,  # a short path: sockets are in it
        CUDACheckpointExecutor(RawWorker, 2, device="soft", soft_root=f"{folder}/gpu", runtime_dir=folder) as executor,
    ):
        executor.sleep()
        executor.wake_up()
        same = executor.collective_rpc("read_weights") == [pattern(0), pattern(1)]
    return {"uid": os.getuid(), "pid": os.getpid(), "weights are the same": same}


def attack(runtime_dir: str, processes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """By attempt, whether it worked; afterwards we are nobody."""
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = libc.ptrace.restype = ctypes.c_long

    def connect() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"{runtime_dir}/control")

    def checked(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), "refused")

    attempts: dict[str, Callable[[], object]] = {
        "list the runtime directory": lambda: os.listdir(runtime_dir),
        "connect to the control socket": connect,
        "arm a fault": lambda: Path(runtime_dir, "fault-worker-0-sleep_allocator.json").write_text("{}"),
    }
    for name, (pid, started) in processes.items():
        descriptor = os.pidfd_open(pid)
        attempts |= {
            f"read the memory of {name}": lambda pid=pid: Path(f"/proc/{pid}/mem").read_bytes(),  # type: ignore[misc]
            f"list the open files of {name}": lambda pid=pid: os.listdir(f"/proc/{pid}/fd"),  # type: ignore[misc]
            f"read the environment of {name}": lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),  # type: ignore[misc]
            f"read the maps of {name}": lambda pid=pid: Path(f"/proc/{pid}/maps").read_bytes(),  # type: ignore[misc]
            f"signal {name}": lambda pid=pid: os.kill(pid, signal.SIGTERM),  # type: ignore[misc]
            f"signal {name} by pidfd": lambda fd=descriptor: signal.pidfd_send_signal(fd, signal.SIGTERM),  # type: ignore[misc]
            f"take a descriptor of {name}": lambda fd=descriptor: checked(libc.syscall(_PIDFD_GETFD, fd, 3, 0)),  # type: ignore[misc]
            f"trace {name}": lambda pid=pid: checked(libc.ptrace(_PTRACE_ATTACH, pid, None, None)),  # type: ignore[misc]
            f"ask the driver in {name}": RemoteProcess(pid, started).get_state,
            f"lock {name}": lambda pid=pid, started=started: RemoteProcess(pid, started).lock(100),  # type: ignore[misc]
        }
    worked = {}
    for what, attempt in attempts.items():
        try:
            attempt()
            worked[what] = True
        except (OSError, DriverError):
            worked[what] = False
    return {"uid": os.getuid(), "worked": worked}


if __name__ == "__main__":
    print(json.dumps(cycle() if sys.argv[1] == "cycle" else attack(**json.loads(sys.argv[2]))))

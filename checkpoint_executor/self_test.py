"""I/O. The self-test of ``doctor``: one small process with a graph, asleep and awake again twice, by the real executor.

It runs in a process of its own (``python -P -m checkpoint_executor.self_test SPEC``), so that :func:`run` can end it,
and everything it started, whatever a driver does. Its report is one line of JSON on stdout.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from checkpoint_executor import directories, processes, procfs, softgpu
from checkpoint_executor.incidents import nvml_used_bytes
from checkpoint_executor.report import CycleReport

__all__ = ["SelfTestCycle", "SelfTestReport", "SelfTestSpec", "run"]

WORKER = "checkpoint_executor.workers.self_test_worker:SelfTestWorker"

CYCLES = 2

#: Ten seconds are usual; importing torch from a cold disk takes longest. Reached only when something hangs.
TIMEOUT_S = 180.0

#: What may stay on a GPU: 4 MiB were measured (H200, 580.159), and other users of the GPU move the reading.
MAX_ASLEEP_BYTES = 64 << 20

_REAP_S = 5.0


class SelfTestSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What to test: ``device_kind`` is ``"cuda"`` or ``"soft"``; ``worker`` has the methods of the default one."""

    device_kind: str
    worker: str = WORKER
    cycles: int = CYCLES


class SelfTestCycle(Struct, frozen=True):
    """A sleep and a wake, and whether the graph computed the same bits afterwards as before."""

    sleep: CycleReport
    wake: CycleReport
    identical: bool


class SelfTestReport(Struct, frozen=True):
    """What came of it. ``passed`` if ``problems`` is empty.

    Attributes:
        device: its name. start_s: until the executor was ready. empty_bytes: on the device before the start.
        problems: why it did not pass, one sentence each.
    """

    device: str = ""
    start_s: float = 0.0
    empty_bytes: int = 0
    cycles: tuple[SelfTestCycle, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems


def run(spec: SelfTestSpec, timeout_s: float = TIMEOUT_S) -> SelfTestReport:
    """Run it in a child process. What goes wrong is in the report; nothing is left running, whatever it was."""
    command = [sys.executable, "-P", "-m", "checkpoint_executor.self_test", msgspec.json.encode(spec).decode()]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=processes.child_environment(os.environ, {}),
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except BaseException as error:
        # KeyboardInterrupt too: the children have sessions of their own, which a terminal's Ctrl-C does not reach.
        left = _end(child)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        outcome = f"; processes {left} are still there" if left else ", and everything it had started was killed"
        return SelfTestReport(problems=(f"it was not done within {timeout_s:g} s{outcome}",))
    try:
        return msgspec.json.decode(output, type=SelfTestReport)
    except msgspec.DecodeError:
        said = errors.decode(errors="replace").strip().splitlines()[-1:] or ["nothing on stderr"]
        return SelfTestReport(problems=(f"it ended with status {child.returncode}: {said[0]}",))


def _end(child: subprocess.Popen[bytes]) -> list[int]:
    """SIGKILL the child and all below it; pids of what is left after a while."""
    try:
        # Looked for first: orphans are nobody's children.
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass  # its parent's death was enough
    child.communicate()
    _, alive = psutil.wait_procs(family, timeout=_REAP_S)
    return [process.pid for process in alive]


# -- in the child --------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Do what the command line says, and report on stdout."""
    spec = msgspec.json.decode(argv[1], type=SelfTestSpec)
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints goes to stderr
    report = _perform(spec)
    with os.fdopen(out, "wb") as file:
        file.write(msgspec.json.encode(report))


def _perform(spec: SelfTestSpec) -> SelfTestReport:
    # A directory named like this is removed by the user's next executor if we die.
    own = f"{os.getpid()}-{procfs.start_time(os.getpid())}-doctor"
    soft_root = directories.user_directory() / own
    try:
        return _cycles(spec, soft_root)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test found
        return SelfTestReport(problems=(f"{type(error).__name__}: {error}",))
    finally:
        shutil.rmtree(soft_root, ignore_errors=True)


def _cycles(spec: SelfTestSpec, soft_root: Path) -> SelfTestReport:
    from checkpoint_executor.executor import CUDACheckpointExecutor

    options: dict[str, Any] = {"device": spec.device_kind}
    if spec.device_kind == "soft":
        soft_root.mkdir(mode=0o700)
        options["soft_root"] = str(soft_root)
        # A name that no other executor uses: wakes on devices of one name wait for each other.
        options["device_ids"] = [softgpu.device_name(os.getpid())]
    empty = dict(nvml_used_bytes()()) if spec.device_kind == "cuda" else {}
    begun = time.monotonic()
    cycles: list[SelfTestCycle] = []
    with CUDACheckpointExecutor(spec.worker, 1, **options) as executor:
        start_s = time.monotonic() - begun
        [device] = executor.collective_rpc("device_id")
        before = executor.collective_rpc("replay")
        for _ in range(spec.cycles):
            sleep = executor.sleep()
            wake = executor.wake_up()
            cycles.append(SelfTestCycle(sleep, wake, executor.collective_rpc("replay") == before))
    limit = 0 if spec.device_kind == "soft" else MAX_ASLEEP_BYTES
    return SelfTestReport(
        device=device,
        start_s=start_s,
        empty_bytes=empty.get(device, 0),
        cycles=tuple(cycles),
        problems=tuple(_problems(cycles, empty.get(device, 0), limit)),
    )


def _problems(cycles: list[SelfTestCycle], empty_bytes: int, limit_bytes: int) -> list[str]:
    found = []
    for number, cycle in enumerate(cycles, 1):
        if not cycle.identical:
            found.append(f"cycle {number}: the graph computed other bits after the wake than before the sleep")
        for asleep in cycle.sleep.device_bytes_after:
            if asleep - empty_bytes > limit_bytes:
                found.append(f"cycle {number}: {asleep - empty_bytes >> 20} MiB stayed on the device while asleep")
        if not cycle.sleep.device_bytes_after:
            found.append(f"cycle {number}: the device's memory could not be read")
    return found


if __name__ == "__main__":
    main(sys.argv)

"""Nobody but the user drives or reads an executor, and it needs no privilege. ``SECURITY.md`` says why."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoint_executor import StartError, payload, procfs, wire
from checkpoint_executor.child import FaultPlan, allow_tracing_by
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.errors import WireError
from checkpoint_executor.faults import Fault, armed_name
from checkpoint_executor.helper.targets import HeldTarget
from checkpoint_executor.messages import Role, Target
from tests.support.executor_harness import DEADLINE_S, REPOSITORY, SoftMachine, inject_worker
from tests.support.executor_workers import pattern

RANKS = 2
NOBODY = 65534
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")


def program(*arguments: str, prefix: tuple[str, ...] = (), **environ: str) -> dict[str, Any]:
    """Run ``security_main`` and return what it printed."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.support.security_main", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


# ---------------------------------------------------------------------------------------------- what is private


def test_everything_on_disk_is_the_users_alone_whatever_the_umask(machine: SoftMachine) -> None:
    before = os.umask(0)
    try:
        executor = machine.make(ranks=RANKS)
    finally:
        os.umask(before)
    folder = executor._control.runtime_dir
    for path in (folder.parent, folder, folder / "rendezvous"):
        status = path.lstat()
        assert (stat.S_ISDIR(status.st_mode), stat.S_IMODE(status.st_mode)) == (True, 0o700)
        assert status.st_uid == os.getuid()
    assert stat.S_ISSOCK((folder / "control").lstat().st_mode)
    assert executor.sleep().performed


def test_a_command_line_holds_no_secret(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS, worker_env={"MY_TOKEN": "hunter2"})
    for pid in executor.pids.values():
        assert b"hunter2" not in Path(f"/proc/{pid}/cmdline").read_bytes()


@as_root
def test_a_second_user_can_neither_drive_nor_read_it(machine: SoftMachine) -> None:
    executor = machine.make(ranks=RANKS)
    machine.folder.chmod(0o755)  # so that it is the runtime directory that keeps them out
    machine.runtime_base.chmod(0o755)
    processes = {name: (pid, procfs.start_time(pid)) for name, pid in executor.pids.items()}
    given = {"runtime_dir": str(executor._control.runtime_dir), "processes": processes}
    for _ in ("awake", "asleep"):
        tried = program("attack", json.dumps(given))
        assert tried["uid"] == NOBODY
        assert len(tried["worked"]) == 3 + 10 * len(processes)
        assert [what for what, worked in tried["worked"].items() if worked] == []
        if not executor.is_sleeping:
            executor.sleep()
    executor.wake_up()
    assert executor.collective_rpc("read_weights") == [pattern(rank) for rank in range(RANKS)]


# ---------------------------------------------------------------------------------------------- the helper's targets


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another user."""
    process = subprocess.Popen(["/bin/sleep", "infinity"], user=NOBODY, group=NOBODY, extra_groups=[])
    yield process
    process.kill()
    process.wait()


def target(pid: int, start_time: int | None = None) -> Target:
    return Target(0, pid, procfs.start_time(pid) if start_time is None else start_time, "SOFT-0")


@as_root
def test_another_users_process_is_no_target(stranger: subprocess.Popen[bytes]) -> None:
    with pytest.raises(PermissionError, match=f"belongs to uid {NOBODY}"):
        HeldTarget(target(stranger.pid))


def test_a_thread_id_is_no_target() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        # The kernel may refuse a pidfd for it before we can say why.
        with pytest.raises((PermissionError, OSError)):
            HeldTarget(target(thread.native_id))
    finally:
        stop.set()
        thread.join()


def test_a_reused_pid_is_no_target() -> None:
    with pytest.raises(ProcessLookupError):
        HeldTarget(target(os.getpid(), procfs.start_time(os.getpid()) - 1))


def test_a_pid_that_is_gone_is_no_target() -> None:
    process = subprocess.Popen(["/bin/true"])
    started = procfs.start_time(process.pid)
    process.wait()
    with pytest.raises(ProcessLookupError):
        HeldTarget(target(process.pid, started))


@as_root
def test_the_helper_takes_only_what_passes_that_check(
    machine: SoftMachine, stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint_executor.control.Control._targets", lambda control: (target(stranger.pid),))
    with pytest.raises(StartError, match=f"belongs to uid {NOBODY}"):
        machine.make()
    assert stranger.poll() is None
    machine.assert_empty()


# ---------------------------------------------------------------------------------------------- unpickling


class _Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._mark,))


def test_the_parent_unpickles_nothing(tmp_path: Path) -> None:
    frame = pickle.dumps(_Evil(tmp_path / "mark"))
    with pytest.raises((msgspec.DecodeError, ValueError)):
        payload.decode_result([frame])
    with pytest.raises(WireError):
        wire.decode_to_parent([bytes([wire.PROTOCOL_VERSION]) + frame])
    assert not (tmp_path / "mark").exists()


def calls_of(name: str) -> set[str]:
    """Source files, below the repository, that call a function of that name."""
    found = set()
    for folder in ("checkpoint_executor", "helper", "workers"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name):
                    found.add(str(path.relative_to(REPOSITORY)))
    return found


def test_unpickling_is_in_one_place_and_only_children_go_there() -> None:
    assert calls_of("pickle.loads") == {"checkpoint_executor/payload.py"}
    assert calls_of("pickle.load") == set()
    # The worker, and the supervised engine's process: each over a channel that its own parent made.
    assert calls_of("load_call") == {"workers/service.py", "checkpoint_executor/supervise.py"}


# ---------------------------------------------------------------------------------------------- injections


def test_a_real_device_takes_no_injection(tmp_path: Path) -> None:
    injection = inject_worker(Fault.EXCEPTION, 0, "sleep_allocator")
    (tmp_path / armed_name(Role.WORKER, 0, "sleep_allocator")).write_bytes(msgspec.json.encode(injection))
    facts: dict[str, Any] = {
        "role": Role.WORKER,
        "rank": 0,
        "world_size": 1,
        "parent_pid": os.getpid(),
        "parent_start_time": 0,
        "runtime_dir": str(tmp_path),
        "faults": (injection,),
    }
    assert FaultPlan(ChildSpec(device_kind="cuda", **facts)).take("sleep_allocator", 0) is None
    assert FaultPlan(ChildSpec(device_kind="soft", **facts)).take("sleep_allocator", 0) == injection


# ---------------------------------------------------------------------------------------------- privileges


def as_nobody(folder: Path) -> tuple[str, ...]:
    """A command prefix: another user, without a capability, who can read this interpreter wherever root keeps it."""
    for tool in ("unshare", "setpriv", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    interpreter = Path(sys.executable).resolve().parent.parent
    hold = folder / "python"
    hold.mkdir()
    # In a mount namespace of its own: nothing is changed for anybody else.
    script = (
        'set -e; mount --make-rprivate /; mount --bind "$1" "$2"; top=/$(echo "$1" | cut -d/ -f2); '
        'if ! setpriv --reuid=65534 --regid=65534 --clear-groups test -x "$1/bin"; then '
        'mount -t tmpfs -o mode=755 tmpfs "$top"; mkdir -p "$1"; mount --bind "$2" "$1"; fi; '
        "shift 2; exec setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all --no-new-privs "
        '--inh-caps=-all "$@"'
    )
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh", str(interpreter), str(hold))
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if probe.returncode != 0:
        pytest.skip(f"cannot become another user here: {probe.stderr.strip()}")
    return prefix


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that any user may write to, with a path short enough for sockets."""
    folder = Path("/tmp") / f"cx{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_a_cycle_works_as_the_user_we_are(public_folder: Path) -> None:
    assert program("cycle", TMPDIR=str(public_folder))["weights are the same"]


@as_root
def test_a_cycle_works_as_an_ordinary_user_without_capabilities(public_folder: Path) -> None:
    prefix = as_nobody(public_folder)
    told = program("cycle", prefix=prefix, TMPDIR=str(public_folder), HOME="/nonexistent")
    assert told["uid"] == NOBODY
    assert told["weights are the same"]


@as_root
def test_a_cycle_works_in_a_pid_namespace_of_its_own(public_folder: Path) -> None:
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    told = program("cycle", prefix=prefix, TMPDIR=str(public_folder))
    assert told["pid"] < 10
    assert told["weights are the same"]


@pytest.mark.skipif(not YAMA.exists(), reason="this kernel has no Yama: no ptrace_scope to try")
@pytest.mark.parametrize("scope", ["0", "1"])
def test_a_cycle_works_under_ptrace_scope(public_folder: Path, scope: str) -> None:
    if YAMA.read_text().strip() != scope:
        pytest.skip(f"ptrace_scope is {YAMA.read_text().strip()} here, and is the administrator's to change")
    assert program("cycle", TMPDIR=str(public_folder))["weights are the same"]


@pytest.mark.skipif(YAMA.exists(), reason="this kernel has Yama")
def test_without_yama_naming_the_tracer_is_no_error() -> None:
    allow_tracing_by(os.getppid())

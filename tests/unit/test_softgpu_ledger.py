"""The software device's capacity: who holds what, across processes and deaths, and whose folder it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_executor import softgpu
from checkpoint_executor.softgpu import CONTEXT_BYTES, DEFAULT_CAPACITY_BYTES, SoftGpu, SoftProcess
from tests.support.soft_targets import SoftBackend

MIB = 1 << 20
NOBODY = 65534


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[SoftBackend]:
    made = SoftBackend(tmp_path)
    yield made
    made.close()
    assert made.gpu.holders() == ()


# ---------------------------------------------------------------------------------------------- capacity


def test_a_new_device_has_the_default_capacity_and_no_holders(tmp_path: Path) -> None:
    gpu = SoftGpu(tmp_path / "root", "SOFT-0")
    assert (gpu.name, gpu.total_bytes, gpu.used_bytes(), gpu.holders()) == ("SOFT-0", DEFAULT_CAPACITY_BYTES, 0, ())


def test_a_device_keeps_the_capacity_it_was_given(tmp_path: Path) -> None:
    SoftGpu(tmp_path, "SOFT-0", 5 * MIB)
    assert SoftGpu(tmp_path, "SOFT-0").total_bytes == 5 * MIB
    assert SoftGpu(tmp_path, "SOFT-1").total_bytes == DEFAULT_CAPACITY_BYTES


def test_the_capacity_changes_only_while_nobody_holds_memory(tmp_path: Path) -> None:
    with_memory = SoftProcess.open(tmp_path, "SOFT-0", capacity_bytes=5 * MIB)
    try:
        with pytest.raises(ValueError, match="in use"):
            SoftGpu(tmp_path, "SOFT-0", 6 * MIB)
        assert SoftGpu(tmp_path, "SOFT-0", 5 * MIB).total_bytes == 5 * MIB
    finally:
        with_memory.close()
    assert SoftGpu(tmp_path, "SOFT-0", 6 * MIB).total_bytes == 6 * MIB


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", "a b"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        SoftGpu(tmp_path, name)


@pytest.mark.parametrize("capacity_bytes", [0, -1])
def test_a_capacity_must_be_positive(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        SoftGpu(tmp_path, "SOFT-0", capacity_bytes)


def test_looking_for_a_device_does_not_create_it(tmp_path: Path) -> None:
    assert not SoftGpu.exists(tmp_path, "SOFT-0")
    assert list(tmp_path.iterdir()) == []
    SoftGpu(tmp_path, "SOFT-0")
    assert SoftGpu.exists(tmp_path, "SOFT-0")


# ---------------------------------------------------------------------------------------------- many processes


def test_no_update_is_lost_when_processes_charge_at_the_same_time(backend: SoftBackend) -> None:
    targets = [backend.start(size_bytes=MIB) for _ in range(4)]
    for each in targets:
        each.wait_ready()
    for each in targets:
        each.send("churn", size_bytes=1000, rounds=50)
    for each in targets:
        each.receive()
    expected = {each.target.pid: CONTEXT_BYTES + MIB for each in targets}
    assert dict(backend.gpu.holders()) == expected
    assert {each.target.pid: each.request("resident_bytes") for each in targets} == expected


def test_processes_that_compete_never_get_more_than_the_capacity(backend: SoftBackend) -> None:
    size_bytes = backend.capacity_bytes // 3
    targets = [backend.start(size_bytes=size_bytes) for _ in range(4)]
    refused = 0
    for each in targets:
        try:
            each.wait_ready()
        except MemoryError:
            refused += 1
            each.wait_exit()  # until then it holds what it had before it was refused
    # Three thirds do not fit beside three contexts.
    assert refused == 2
    assert backend.gpu.used_bytes() == 2 * (size_bytes + CONTEXT_BYTES)


def test_a_zombie_holds_nothing(backend: SoftBackend) -> None:
    target = backend.spawn()
    target.signal(signal.SIGKILL)
    # Dead, and not reaped: the way a killed worker looks until its parent comes round to it.
    os.waitid(os.P_PID, target.target.pid, os.WEXITED | os.WNOWAIT)
    assert backend.gpu.holders() == ()


def test_a_reused_pid_does_not_inherit_memory(tmp_path: Path) -> None:
    gpu = SoftGpu(tmp_path, "SOFT-0", 5 * MIB)
    gpu._charge(f"{os.getpid()}:1", MIB)
    assert gpu.holders() == ()


def test_half_a_ledger_left_by_a_killed_writer_harms_nobody(tmp_path: Path) -> None:
    gpu = SoftGpu(tmp_path, "SOFT-0", 5 * MIB)
    (tmp_path / "SOFT-0" / "ledger.json.new").write_text('{"capacity_by')
    process = SoftProcess.open(tmp_path, "SOFT-0")
    try:
        assert gpu.used_bytes() == CONTEXT_BYTES
    finally:
        process.close()


def test_a_killed_process_leaves_only_the_ledger_behind(backend: SoftBackend) -> None:
    target = backend.spawn()
    maps = Path(f"/proc/{target.target.pid}/maps").read_text()
    memory = [line for line in maps.splitlines() if "memfd:checkpoint-executor-softgpu" in line]
    assert [int(line.split("-")[0], 16) for line in memory] == sorted(target.request("address"))
    assert "/dev/shm" not in maps
    target.kill()
    left = sorted(path.relative_to(backend.root).as_posix() for path in backend.root.rglob("*") if path.is_file())
    assert left == ["SOFT-0/ledger.json", "SOFT-0/lock"]


# ---------------------------------------------------------------------------------------------- whose folder


def test_the_default_folder_is_per_user_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(softgpu.ROOT_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = softgpu.default_root()
    assert root == tmp_path / f"checkpoint-executor-{os.geteuid()}" / "softgpu"
    assert [path.stat().st_mode & 0o777 for path in (root, root.parent)] == [0o700, 0o700]
    assert softgpu.default_root() == root


def test_the_environment_overrides_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(softgpu.ROOT_VARIABLE, str(tmp_path / "a" / "b"))
    assert softgpu.default_root() == tmp_path / "a" / "b"
    assert softgpu.default_root().is_dir()


def test_a_link_in_the_folders_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv(softgpu.ROOT_VARIABLE, str(tmp_path / "root"))
    with pytest.raises(PermissionError, match="not a folder"):
        softgpu.default_root()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        SoftGpu(tmp_path / "root", "SOFT-0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    os.chown(tmp_path / "root", NOBODY, NOBODY)
    monkeypatch.setenv(softgpu.ROOT_VARIABLE, str(tmp_path / "root"))
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
        softgpu.default_root()
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
        SoftGpu(tmp_path / "root", "SOFT-0")


# ---------------------------------------------------------------------------------------------- import


def test_importing_softgpu_imports_nothing_heavy() -> None:
    script = "import sys, checkpoint_executor.softgpu; print(*sys.modules)"
    repository = Path(softgpu.__file__).parents[1]
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "numpy", "zmq", "asyncio", "subprocess", "tempfile"} & set(loaded)

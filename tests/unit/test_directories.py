"""The directories of an executor: private, short enough for sockets, and swept of what the dead left."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_executor import ConfigError, procfs
from checkpoint_executor.directories import locks_directory, make_runtime_directory, sweep, user_directory


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder:
        yield Path(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def own(base: Path) -> Path:
    return base / f"checkpoint-executor-{os.getuid()}"


def test_a_runtime_directory_is_private_and_says_whose_it_is(base: Path) -> None:
    path = make_runtime_directory(str(base))
    assert path.parent == own(base)
    assert path.name.startswith(f"{os.getpid()}-{procfs.start_time(os.getpid())}-")
    assert [mode(folder) for folder in (path.parent, path, path / "rendezvous")] == [0o700] * 3


def test_it_is_private_whatever_the_umask(base: Path) -> None:
    before = os.umask(0)
    try:
        path = make_runtime_directory(str(base))
    finally:
        os.umask(before)
    assert [mode(folder) for folder in (path.parent, path, path / "rendezvous")] == [0o700] * 3


def test_every_executor_gets_one_of_its_own(base: Path) -> None:
    assert make_runtime_directory(str(base)) != make_runtime_directory(str(base))


def test_it_is_absolute_whatever_was_given(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    path = make_runtime_directory("relative")
    assert path.is_absolute()
    assert path.is_relative_to(base)


def test_missing_parents_are_made(base: Path) -> None:
    assert make_runtime_directory(str(base / "a" / "b")).is_dir()


def test_by_default_it_is_in_the_temporary_directory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    assert user_directory() == own(base)
    assert locks_directory() == own(base) / "locks"


@pytest.mark.parametrize("permissions", [0o701, 0o710, 0o770, 0o777])
def test_a_directory_that_is_open_to_others_is_refused(base: Path, permissions: int) -> None:
    own(base).mkdir()
    own(base).chmod(permissions)
    with pytest.raises(ConfigError, match=r"of our own with mode 0700.*Nothing was started"):
        make_runtime_directory(str(base))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(base: Path) -> None:
    own(base).mkdir(mode=0o700)
    os.chown(own(base), 65534, 65534)
    with pytest.raises(ConfigError, match="uid 65534"):
        make_runtime_directory(str(base))


def test_a_link_is_not_followed(base: Path) -> None:
    (base / "planted").mkdir(mode=0o700)
    own(base).symlink_to(base / "planted")
    with pytest.raises(ConfigError, match="must be a directory of our own"):
        make_runtime_directory(str(base))
    assert list((base / "planted").iterdir()) == []


def test_a_file_in_its_place_is_refused(base: Path) -> None:
    own(base).touch()
    with pytest.raises(ConfigError, match="Nothing was started"):
        make_runtime_directory(str(base))


def test_a_base_that_is_a_file_is_refused(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(ConfigError, match="cannot make"):
        make_runtime_directory(str(base / "file"))


def test_a_path_that_is_too_long_for_sockets_is_refused_before_anything_is_made(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"too long for sockets.*shorter runtime_dir"):
        make_runtime_directory(str(base / ("x" * 80)))
    assert [path for path in base.rglob("*") if path.name == "rendezvous"] == []


# ---------------------------------------------------------------------------------------------- sweeping


def name_of(pid: int, start_time: int) -> str:
    return f"{pid}-{start_time}-0"


def test_what_the_dead_left_is_swept_and_the_rest_is_not(base: Path) -> None:
    parent = user_directory(str(base))
    child = subprocess.Popen(["sleep", "infinity"])
    try:
        living = parent / name_of(child.pid, procfs.start_time(child.pid))
        # A pid that was reused: the same number, another process.
        reused = parent / name_of(child.pid, procfs.start_time(child.pid) - 1)
        others = [parent / "locks", parent / "softgpu", parent / "1-x-0", parent / "notes.txt"]
        for path in (living, reused, *others):
            path.mkdir()
            (path / "control").touch()
        sweep(parent)
        assert living.exists()
        assert not reused.exists()
        assert all(path.exists() for path in others)
    finally:
        child.kill()
        child.wait()
    sweep(parent)
    assert not living.exists()


def test_a_zombies_directory_is_swept(base: Path) -> None:
    parent = user_directory(str(base))
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    path = parent / name_of(child.pid, procfs.start_time(child.pid))
    path.mkdir()
    sweep(parent)
    child.wait()
    assert not path.exists()


def test_making_one_sweeps(base: Path) -> None:
    dead = user_directory(str(base)) / "1-1-0"
    dead.mkdir()
    make_runtime_directory(str(base))
    assert not dead.exists()

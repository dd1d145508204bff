"""The wheel: what is in it, and that it works from an empty folder. Nothing here needs the network.

``helper/`` and ``workers/`` reach the package through two links. A checkout without links (``core.symlinks=false``)
builds a wheel without them and exits 0, so these tests look into the wheel itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_LINKS = {"helper": "../helper", "workers": "../workers"}
_SOURCES = ("checkpoint_executor", "helper", "workers", "pyproject.toml", "README.md", "LICENSE")

_CYCLE = """
import sys
import checkpoint_executor
from checkpoint_executor import CUDACheckpointExecutor
from checkpoint_executor.workers import Worker

class Small(Worker):
    def __init__(self, context):
        super().__init__(context)
        self.memory = context.allocator.allocate(1 << 20, "weights")
        self.memory.write(b"kept")

    def read(self):
        return self.memory.read(0, 4)

    def where(self):
        import checkpoint_executor
        return checkpoint_executor.__file__

with CUDACheckpointExecutor(Small, 2, device="soft", soft_root=sys.argv[1]) as executor:
    print(checkpoint_executor.__file__, *executor.collective_rpc("where"))
    assert executor.sleep().device_bytes_after == (0, 0)
    executor.wake_up()
    assert executor.collective_rpc("read") == [b"kept", b"kept"]
"""


def copy_sources(target: Path) -> Path:
    """The sources alone: a build in the checkout would leave folders there, and find those of an earlier one."""
    target.mkdir()
    for name in _SOURCES:
        source = _REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


def build_wheel(sources: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(sources)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def expected_modules() -> set[str]:
    """Every module of the checkout, by its name in the wheel."""
    folders = [("checkpoint_executor", _REPOSITORY / "checkpoint_executor")]
    folders += [(f"checkpoint_executor/{name}", _REPOSITORY / name) for name in _LINKS]
    return {f"{prefix}/{path.relative_to(folder)}" for prefix, folder in folders for path in folder.rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_sources(folder / "sources"), folder / "out")


def test_every_module_of_helper_and_workers_is_in_the_wheel(wheel: Path) -> None:
    expected = expected_modules()
    assert {"checkpoint_executor/helper/service.py", "checkpoint_executor/workers/worker.py"} <= expected
    assert expected - names_in(wheel) == set()


def test_the_wheel_holds_no_other_top_level_name(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in names_in(wheel)}
    (metadata,) = {name for name in top if name.endswith(".dist-info")}
    assert top == {"checkpoint_executor", metadata}
    extra = {name for name in names_in(wheel) if name.endswith(".py")} - expected_modules()
    assert extra == set()


def test_the_wheel_is_typed_and_licensed_and_has_the_command(wheel: Path) -> None:
    names = names_in(wheel)
    assert "checkpoint_executor/py.typed" in names
    (licence,) = (name for name in names if name.endswith("/LICENSE"))
    (entries,) = (name for name in names if name.endswith("/entry_points.txt"))
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        assert "Apache License" in archive.read(licence).decode()
        assert "checkpoint-executor = checkpoint_executor.cli:main" in archive.read(entries).decode()
        header = archive.read(metadata).decode().partition("\n\n")[0]
    assert "License-Expression: Apache-2.0" in header
    assert "Requires-Python: >=3.11" in header
    for extra in ("cuda", "vllm", "dev"):
        assert f"Provides-Extra: {extra}" in header


def test_a_cycle_runs_from_the_installed_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel],
        check=True,
        timeout=100,
    )
    # Folders of a user's own with our names: they must not be imported instead of ours.
    for name in _LINKS:
        (empty / name).mkdir()
        (empty / name / "__init__.py").write_text("raise RuntimeError('the user\\'s own folder was imported')\n")
    (empty / "main.py").write_text(_CYCLE)
    done = subprocess.run(
        [sys.executable, "main.py", str(tmp_path / "devices")],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The parent and both workers use the installed files, not the checkout's.
    assert done.stdout.split() == [str(target / "checkpoint_executor" / "__init__.py")] * 3


def test_the_links_are_relative() -> None:
    for name, points_to in _LINKS.items():
        link = _REPOSITORY / "checkpoint_executor" / name
        assert link.is_symlink(), f"{link} is not a link: was the checkout made with core.symlinks=false?"
        assert os.readlink(link) == points_to
        assert (link / "__init__.py").is_file()


def test_git_tracks_the_links_as_links() -> None:
    if shutil.which("git") is None or not (_REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    paths = [f"checkpoint_executor/{name}" for name in _LINKS]
    listed = subprocess.run(
        ["git", "ls-files", "--stage", *paths], cwd=_REPOSITORY, capture_output=True, text=True, check=True
    )
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == dict.fromkeys(paths, "120000")


def test_a_checkout_without_links_would_be_noticed(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    for name, points_to in _LINKS.items():
        link = sources / "checkpoint_executor" / name
        link.unlink()
        link.write_text(points_to)  # what git writes there instead
    missing = expected_modules() - names_in(build_wheel(sources, tmp_path / "out"))
    assert {"checkpoint_executor/helper/service.py", "checkpoint_executor/workers/worker.py"} <= missing

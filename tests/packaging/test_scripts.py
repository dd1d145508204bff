"""The scripts of the checkout: that they are what the README says, and how they treat torch. Nothing is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_SCRIPTS = ("scripts/demo", "scripts/check", ".ci/run")

#: A Python that says what pip would have installed, and writes down what it was told to install.
_FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *--dry-run*) while [ "$1" != --report ]; do shift; done; cp "$FAKE_REPORT" "$2" ;;
    *"pip install"*) echo "$*" >>"$FAKE_LOG" ;;
    "- "*) shift; exec "$REAL_PYTHON" - "$@" ;;
    -) exit 1 ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


@pytest.mark.parametrize("script", [*_SCRIPTS, "scripts/environment.sh"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", script], cwd=_REPOSITORY, check=True)


@pytest.mark.parametrize("script", _SCRIPTS)
def test_scripts_are_executable_and_stop_at_errors(script: str) -> None:
    path = _REPOSITORY / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()


def test_every_pin_is_exact_and_every_dependency_is_pinned() -> None:
    lines = (_REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # vLLM brings a torch of its own choice.
    chosen = ("torch", "cuda", "report", "docs", "dev")
    wanted = [*project["dependencies"], *(one for extra in chosen for one in extras[extra])]
    names = {requirement.partition(">=")[0].partition("[")[0].lower() for requirement in wanted}
    assert names - {"checkpoint-executor"} <= {name.lower() for name in pins}


def make_environment(folder: Path, *packages: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run ``make_environment`` over a Python that installs nothing, and would pick these packages for torch."""
    log, report, python = folder / "log", folder / "report.json", folder / "venv" / "bin" / "python"
    log.touch()
    report.write_text(json.dumps({"install": [{"metadata": {"name": name}} for name in packages]}))
    python.parent.mkdir(parents=True)
    python.write_text(_FAKE_PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euc", "source scripts/environment.sh; gpu_count() { echo 0; }; make_environment torch"],
        cwd=_REPOSITORY,
        env={
            **os.environ,
            "CHECKPOINT_EXECUTOR_VENV": str(folder / "venv"),
            "FAKE_LOG": str(log),
            "FAKE_REPORT": str(report),
            "REAL_PYTHON": sys.executable,
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, log.read_text()


@pytest.mark.parametrize("package", ["nvidia-cublas", "cuda-toolkit", "triton"])
def test_a_cuda_build_of_torch_is_not_downloaded_without_a_gpu(package: str, tmp_path: Path) -> None:
    done, installed = make_environment(tmp_path, "torch", package)
    assert done.returncode == 1
    assert "would install a CUDA build of torch" in done.stderr
    assert "CHECKPOINT_EXECUTOR_ALLOW_CUDA_TORCH=1" in done.stderr
    assert "torch" not in installed.split()


def test_a_cuda_build_comes_when_it_is_asked_for(tmp_path: Path) -> None:
    done, installed = make_environment(tmp_path, "torch", "nvidia-cublas", CHECKPOINT_EXECUTOR_ALLOW_CUDA_TORCH="1")
    assert done.returncode == 0, done.stderr
    assert "torch" in installed.split()


def test_a_cpu_build_of_torch_comes_without_questions(tmp_path: Path) -> None:
    done, installed = make_environment(tmp_path, "torch", "sympy")
    assert done.returncode == 0, done.stderr
    assert "torch" in installed.split()

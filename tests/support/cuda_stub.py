"""A stub libcuda for machines without a GPU: built once by gcc, loaded by child processes only.

Never load it into the test process: on a GPU machine that would hide the real driver from the tests that need it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["CudaStub", "build_stub"]

_REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCE = Path(__file__).with_suffix(".c")
#: A scenario takes a second or two; reached only when one hangs.
_DEADLINE_S = 60.0


class CudaStub:
    """The built library, and how to run something over it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, scenario: Callable[..., None], *arguments: str) -> str:
        """Run a module-level function in a process of its own that finds the stub as its CUDA driver; its stdout.

        A failed assertion there fails the test here, with its traceback.
        """
        code = f"import sys; from {scenario.__module__} import {scenario.__name__} as run; run(*sys.argv[1:])"
        finished = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "LD_LIBRARY_PATH": str(self._folder),
                # A preloaded NCCL brings nothing here, and wants a driver of its own.
                "LD_PRELOAD": "",
            },
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        assert finished.returncode == 0, f"{scenario.__name__} failed:\n{finished.stdout}{finished.stderr}"
        return finished.stdout


def build_stub(folder: Path) -> CudaStub:
    """Build it, or skip the test where that is not possible."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to build the stub driver")
    bindings = [sys.executable, "-c", "import cuda.bindings.driver"]
    imported = subprocess.run(bindings, capture_output=True, text=True, timeout=_DEADLINE_S)
    if imported.returncode != 0:
        pytest.skip(f"cuda-bindings cannot be imported: {imported.stderr.strip().splitlines()[-1]}")
    library = folder / "libcuda.so.1"
    options = ["-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, "-o", library, _SOURCE, "-ldl", "-lpthread"], check=True)
    return CudaStub(folder)

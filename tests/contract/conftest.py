"""Fixtures of the contract suite: the backend that ``--backend`` names (registered in ``tests/conftest.py``)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor.helper.drivers import Driver
from tests.support.targets import Backend, TargetProcess

#: Imported only when asked for: the CUDA backend needs a GPU and the cuda extra.
_BACKENDS = {
    "soft": ("tests.support.soft_targets", "SoftBackend"),
    "cuda": ("tests.support.cuda_targets", "CudaBackend"),
}


@pytest.fixture
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """A device with nobody on it, as far as this test is concerned; all its processes are gone afterwards."""
    module, name = _BACKENDS[request.config.getoption("--backend")]
    made: Any = getattr(importlib.import_module(module), name)(tmp_path)
    baseline_bytes = made.settled_used_bytes()
    try:
        yield made
    finally:
        made.close()
    # Whatever state they died in, dead processes leave nothing on the device.
    assert made.settled_used_bytes() <= baseline_bytes


@pytest.fixture
def driver(backend: Backend) -> Iterator[Driver]:
    made = backend.driver()
    yield made
    made.close()


@pytest.fixture
def target(backend: Backend) -> TargetProcess:
    """A process with device memory full of a pattern."""
    return backend.spawn()

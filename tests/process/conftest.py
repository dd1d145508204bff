"""Fixtures of the process tests: every test is checked for what it left behind. Shared code is in ``tests/support``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from checkpoint_executor import CUDACheckpointExecutor
from tests.support.executor_harness import Leaks, SharedExecutor, SoftMachine
from tests.support.executor_workers import RawWorker


@pytest.fixture(scope="module")
def two_ranks_of_module() -> Iterator[SharedExecutor]:
    """Two ranks that the tests of a module share."""
    leaks = Leaks()
    machine = SoftMachine()
    try:
        yield SharedExecutor(machine, RawWorker, ranks=2)
    finally:
        machine.close()
    leaks.check()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    leaks = Leaks()
    yield
    leaks.check()


@pytest.fixture
def machine() -> Iterator[SoftMachine]:
    """Software devices of the test's own; whatever was made on them is gone afterwards."""
    made = SoftMachine()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def shared(two_ranks_of_module: SharedExecutor) -> SharedExecutor:
    return two_ranks_of_module


@pytest.fixture
def executor(shared: SharedExecutor) -> CUDACheckpointExecutor:
    """Two ranks, awake. A test leaves it awake, or pays for the next one's."""
    return shared.get()

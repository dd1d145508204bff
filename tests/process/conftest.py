"""Fixtures of the process tests: every test is checked for what it left behind. Shared code is in ``tests/support``."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from checkpoint_executor import CUDACheckpointExecutor
from tests.support.executor_harness import Gate, Leaks, SharedExecutor, SoftMachine, warm_up_zmq
from tests.support.executor_workers import RawWorker


@pytest.fixture(scope="session", autouse=True)
def _warm_zmq() -> None:
    warm_up_zmq()


@pytest.fixture(scope="session", autouse=True)
def _heed_ctrl_c() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore SIGINT, and their children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if "shared" in request.fixturenames:
        request.getfixturevalue("shared").get()  # made now, so that it does not count as left behind
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
def gate() -> Iterator[Gate]:
    """Where workers wait until the test, or its end, lets them go on."""
    made = Gate()
    yield made
    made.close()


@pytest.fixture
def shared(two_ranks_of_module: SharedExecutor) -> SharedExecutor:
    return two_ranks_of_module


@pytest.fixture
def executor(shared: SharedExecutor) -> CUDACheckpointExecutor:
    """Two ranks, awake. A test leaves it awake, or pays for the next one's."""
    return shared.get()

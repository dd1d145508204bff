"""Fixtures of the vLLM tests. They need an environment with vLLM: ``scripts/check_vllm`` makes one and runs them."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None

# Without vLLM the modules cannot be imported at all.
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:
    from tests.support.vllm_harness import Engine, VllmMachine, install_plugins

    install_plugins()


@pytest.fixture(scope="session", autouse=True)
def _collect_before_the_end() -> Iterator[None]:
    """vLLM's client leaves its zmq context to the garbage collector when EngineCore died. Its warning is to come while
    a test still filters it, not when pytest ends, where it would be an error."""
    yield
    gc.collect()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module that has ``RANKS`` with each of these numbers of ranks."""
    numbers = getattr(metafunc.module, "RANKS", ())
    if numbers and "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", numbers, ids="tp{}".format, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/vllm/" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            # vLLM's own imports warn; what they warn of is not ours.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> int:
    """How many ranks the test is for."""
    return int(request.param)


@pytest.fixture
def machine() -> Iterator[VllmMachine]:
    """Software devices of the test's own; whatever was made on them is gone afterwards."""
    made = VllmMachine()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def engine_of_module(ranks: int) -> Iterator[Engine]:
    """An engine that the tests of a module share."""
    made = VllmMachine()
    try:
        yield made.start(ranks)
    finally:
        made.close()


@pytest.fixture
def engine(engine_of_module: Engine) -> Iterator[Engine]:
    """The shared engine, awake, with nothing queued; a test that leaves it otherwise has failed."""
    engine_of_module.reset()
    yield engine_of_module
    assert engine_of_module.status.phase == "awake"
    assert not engine_of_module.is_sleeping
    assert not engine_of_module.engine.has_unfinished_requests()

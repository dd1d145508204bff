"""Fixtures of the GPU tests. Without a GPU all of them are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.cuda_ranks import CudaRankGroup
from tests.support.cuda_targets import visible_gpus


@pytest.fixture(scope="session")
def gpus() -> list[str]:
    """UUIDs of the GPUs, in CUDA's order."""
    return visible_gpus()


@pytest.fixture
def two_gpus(gpus: list[str]) -> list[str]:
    if len(gpus) < 2:
        pytest.skip(f"needs two GPUs, there is {len(gpus)}")
    return gpus[:2]


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., CudaRankGroup]]:
    """Starts rank processes that are killed and reaped when the test ends, however it ends."""
    with ExitStack() as groups:

        def start(gpus: list[str], **options: Any) -> CudaRankGroup:
            group = CudaRankGroup(gpus, **options)
            groups.enter_context(group)
            return group

        yield start


@pytest.fixture
def single(gpus: list[str], start_ranks: Callable[..., CudaRankGroup]) -> CudaRankGroup:
    """One rank on the first GPU."""
    return start_ranks(gpus[:1])

"""The helper's CUDA driver over a stub libcuda; the contract suite has the real one (``--backend cuda``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from checkpoint_executor.driver_states import DriverCode, DriverError
from checkpoint_executor.helper.cuda_driver import CudaDriver
from checkpoint_executor.messages import Target
from tests.support import cuda_scenarios as scenarios
from tests.support.cuda_stub import CudaStub, build_stub


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return build_stub(tmp_path_factory.mktemp("stub"))


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.the_verbs_lead_through_the_states,
        scenarios.an_error_keeps_the_code_and_the_name,
        scenarios.a_pid_that_is_another_process_by_now_is_not_touched,
        scenarios.verbs_on_several_targets_run_at_the_same_time,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_over_the_stub(stub: CudaStub, scenario: Callable[[], None]) -> None:
    stub.run(scenario)


def test_a_driver_that_was_not_opened_says_so() -> None:
    import os

    from checkpoint_executor import procfs

    with pytest.raises(DriverError, match="open") as caught:
        CudaDriver().get_state(Target(0, os.getpid(), procfs.start_time(os.getpid()), "GPU-0"))
    assert caught.value.code == DriverCode.NOT_INITIALIZED

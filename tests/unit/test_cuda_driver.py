"""The helper's CUDA driver over a stub libcuda; the contract suite has the real one (``--backend cuda``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pynvml
import pytest

from checkpoint_executor.driver_states import DriverCode, DriverError
from checkpoint_executor.helper import cuda_driver
from checkpoint_executor.helper.cuda_driver import CudaDriver
from checkpoint_executor.helper.drivers import DeviceMemory
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
    from checkpoint_executor import procfs

    with pytest.raises(DriverError, match="open") as caught:
        CudaDriver().get_state(Target(0, os.getpid(), procfs.start_time(os.getpid()), "GPU-0"))
    assert caught.value.code == DriverCode.NOT_INITIALIZED


def nvml(processes: list[Any] | int) -> Any:
    """NVML with one GPU, as far as a reading asks it; instead of processes, the code of an error."""

    def fail(code: int) -> NoReturn:
        raise pynvml.NVMLError(code)  # type: ignore[no-untyped-call]

    def handle(uuid: str) -> str:
        return uuid if uuid == "GPU-0" else fail(pynvml.NVML_ERROR_NOT_FOUND)

    def memory(handle: str, version: int) -> Any:
        assert (handle, version) == ("GPU-0", 2)
        return SimpleNamespace(total=1000, used=300, free=600)  # the rest is the driver's own reserve

    def running(handle: str) -> list[Any]:
        return fail(processes) if isinstance(processes, int) else processes

    return SimpleNamespace(
        nvmlMemory_v2=2,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=running,
    )


def reading(monkeypatch: pytest.MonkeyPatch, processes: list[Any] | int, device: str = "GPU-0") -> DeviceMemory:
    monkeypatch.setattr(cuda_driver, "_open_nvml", lambda: nvml(processes))
    return CudaDriver().device_memory(device)


def test_a_reading_names_the_holders_that_are_processes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(pid=os.getpid(), usedGpuMemory=200)
    elsewhere = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=90)  # no pid of this namespace
    unsized = SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)
    found = reading(monkeypatch, [here, elsewhere, unsized])
    assert found == DeviceMemory(total_bytes=900, used_bytes=300, holders=((os.getpid(), 200),))


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_a_reading_does_without_the_holders_where_nvml_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert reading(monkeypatch, code) == DeviceMemory(total_bytes=900, used_bytes=300, holders=())


def test_a_reading_whose_holders_fail_otherwise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them it would be taken for a GPU that nobody else uses."""
    with pytest.raises(DriverError, match="nvmlDeviceGetComputeRunningProcesses"):
        reading(monkeypatch, pynvml.NVML_ERROR_GPU_IS_LOST)


def test_a_reading_of_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverError) as caught:
        reading(monkeypatch, [], "GPU-1")
    assert caught.value.code == DriverCode.NO_DEVICE

"""What is refused before anything is started, as the user meets it: in the process that asked, all at once."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import checkpoint_executor
from tests.support.vllm_harness import EXECUTOR, SOCKET, VllmMachine, suspend_environment

Make = Callable[..., Any]


@pytest.fixture
def make(machine: VllmMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds vLLM's configuration as a front end does."""
    from vllm.engine.arg_utils import EngineArgs

    def build(ranks: int = 1, environ: dict[str, str | None] | None = None, **options: Any) -> Any:
        for name, value in {**machine.environment(ranks), **(environ or {})}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        missing = sorted(set(options) - {field.name for field in dataclasses.fields(EngineArgs)})
        if missing:
            pytest.skip(f"this vLLM has no {', '.join(missing)}")
        return EngineArgs(**machine.options(ranks, **options)).create_engine_config()

    yield build
    assert multiprocessing.active_children() == []


def problems_of(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="no worker was started") as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- accepted


def test_one_rank_needs_no_communication_setting(make: Make) -> None:
    config = make(1, environ=dict.fromkeys(suspend_environment(2)))
    assert config.parallel_config.distributed_executor_backend == EXECUTOR
    assert config.scheduler_config.async_scheduling


def test_the_suspend_configuration_is_accepted(make: Make) -> None:
    make(2)


def test_the_socket_configuration_is_accepted_without_suspend(make: Make) -> None:
    make(2, environ=SOCKET, enable_nccl_comm_suspend=False)


def test_flashinfer_with_trtllm_is_accepted(make: Make) -> None:
    make(2, environ={"VLLM_ALLREDUCE_USE_FLASHINFER": "1", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"})


def test_the_class_is_accepted_as_well_as_its_name(make: Make) -> None:
    from tests.support.vllm_executor import SoftCheckpointExecutor

    config = make(1, distributed_executor_backend=SoftCheckpointExecutor)
    assert config.parallel_config.distributed_executor_backend is SoftCheckpointExecutor


def test_offloading_of_graphs_is_accepted_with_cumem(make: Make) -> None:
    make(1, sleep_mode_offload_cudagraph=True)


def test_our_sleep_mode_backend_is_registered_and_accepted(make: Make) -> None:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    make(1, sleep_mode_backend="cumem_arena")
    assert "cumem_arena" in SleepModeBackendFactory._registry


def test_plain_cumem_gets_the_faster_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoint_executor.vllm.executor import _use_faster_pinning

    faster = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    _use_faster_pinning()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == faster
    # What the user chose stays, in the variable that the user chose.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    _use_faster_pinning()
    assert os.environ["PYTORCH_ALLOC_CONF"] == f"max_split_size_mb:64,{faster}"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_num_register_threads:2")
    _use_faster_pinning()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "pinned_num_register_threads:2"


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("ranks", "options", "environ", "expected"),
    [
        (1, {"enable_sleep_mode": False}, {}, "enable_sleep_mode=True is missing"),
        (1, {"sleep_mode_backend": "zzz"}, {}, "sleep_mode_backend='zzz': must be 'cumem' or 'cumem_arena'"),
        (
            1,
            {"sleep_mode_backend": "cumem_arena", "sleep_mode_offload_cudagraph": True},
            {},
            "CHECKPOINT_EXECUTOR_HOST_ARENA=1",
        ),
        (1, {"worker_cls": "my.Worker"}, {}, "worker_cls=my.Worker: only vLLM's own GPU worker"),
        (1, {"worker_extension_cls": "my.Extension"}, {}, "worker_extension_cls=my.Extension"),
        (1, {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "the V2 model runner is needed"),
        (1, {"kv_offloading_size": 4}, {}, "kv_offloading_size is set"),
        (2, {"enable_nccl_comm_suspend": False}, {}, "enable_nccl_comm_suspend=True is missing"),
        (2, {"disable_custom_all_reduce": False}, {}, "disable_custom_all_reduce=True is missing"),
        (2, {"enable_shm_tensor_arena": True}, {}, "enable_shm_tensor_arena=True"),
        (2, {}, {"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE=1 must be 0"),
        (2, {}, {"NCCL_NVLS_ENABLE": None}, "NCCL_NVLS_ENABLE must be set to 0"),
        (2, {}, {"NCCL_CUMEM_HOST_ENABLE": "1"}, "NCCL_CUMEM_HOST_ENABLE=1 must be 0"),
        (2, {}, {"VLLM_ALLREDUCE_USE_SYMM_MEM": None}, "VLLM_ALLREDUCE_USE_SYMM_MEM must be set to 0"),
        (2, {}, {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "mnnvl"}, "must be trtllm, not mnnvl"),
        (2, {}, {"VLLM_DISTRIBUTED_USE_SPLIT_GROUP": "1"}, "NCCL communicators of its own"),
        (2, {}, {"VLLM_DISABLE_PYNCCL": "1"}, "VLLM_DISABLE_PYNCCL=1"),
        (2, {"enable_nccl_comm_suspend": True}, SOCKET, "NCCL_CUMEM_ENABLE=0 must be 1"),
        (1, {}, {"CHECKPOINT_EXECUTOR_DRIVR_S": "3"}, "did you mean CHECKPOINT_EXECUTOR_DRIVER_S?"),
        (1, {}, {"CHECKPOINT_EXECUTOR_LOG": "/nowhere/at/all"}, "/nowhere/at/all: cannot write there"),
        (1, {}, {"CHECKPOINT_EXECUTOR_LOG": "/tmp"}, "LOG=/tmp: is a folder"),
        (1, {}, {"CHECKPOINT_EXECUTOR_RUNTIME_DIR": "/proc/nope"}, "RUNTIME_DIR=/proc/nope: cannot make"),
        (1, {}, {"CHECKPOINT_EXECUTOR_RUNTIME_DIR": f"/tmp/{'x' * 90}"}, "too long for sockets"),
    ],
)
def test_what_is_refused(
    make: Make, ranks: int, options: dict[str, Any], environ: dict[str, str | None], expected: str
) -> None:
    assert expected in problems_of(lambda: make(ranks, environ, **options))


@pytest.mark.parametrize("backend", ["", "mnnvl"])
def test_the_fused_allreduce_pass_obeys_the_flashinfer_rules_by_itself(make: Make, backend: str) -> None:
    fused = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}
    environ: dict[str, str | None] = {
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_FLASHINFER_ALLREDUCE_BACKEND": backend or None,
    }
    assert "fuse_allreduce_rms is on" in problems_of(lambda: make(2, environ, **fused))
    assert "socket-only configuration needs" in problems_of(
        lambda: make(2, {**environ, **SOCKET}, enable_nccl_comm_suspend=False, **fused)
    )


@pytest.mark.parametrize(
    ("part", "name", "value", "expected"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism is not supported"),
        ("parallel_config", "data_parallel_size", 2, "data parallelism is not supported"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism is not supported"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism is not supported"),
        ("parallel_config", "nnodes", 2, "more than one node is not supported"),
        ("parallel_config", "enable_expert_parallel", True, "expert parallelism"),
        ("parallel_config", "enable_eplb", True, "expert load balancing"),
        ("parallel_config", "enable_elastic_ep", True, "elastic expert parallelism"),
        ("parallel_config", "enable_dbo", True, "dual batch overlap"),
        ("parallel_config", "enable_fault_tolerance", True, "fault tolerance"),
        ("parallel_config", "enable_batch_sharded_sampling", True, "an NCCL communicator of PyTorch's own"),
        ("", "kv_transfer_config", object(), "KV transfer"),
        ("", "ec_transfer_config", object(), "encoder cache transfer"),
        ("", "weight_transfer_config", object(), "weight transfer"),
        ("load_config", "load_format", "ipc_cache", "weights come from another process"),
    ],
)
def test_what_vllm_itself_may_not_let_through_is_refused_too(
    make: Make, part: str, name: str, value: Any, expected: str
) -> None:
    """Set on a finished configuration, because vLLM refuses several of them by itself, in another order."""
    from tests.support.vllm_executor import SoftCheckpointExecutor

    config = make(2)
    object.__setattr__(getattr(config, part) if part else config, name, value)
    assert expected in problems_of(lambda: SoftCheckpointExecutor.check(config, os.environ))


def test_a_backend_whose_plugin_was_not_loaded_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    monkeypatch.setattr(SleepModeBackendFactory, "_registry", {})
    text = problems_of(lambda: make(1, sleep_mode_backend="cumem_arena"))
    assert "sleep_mode_backend='cumem_arena' is not registered" in text


def test_everything_that_is_wrong_is_named_in_one_message(make: Make) -> None:
    text = problems_of(
        lambda: make(
            2,
            {"NCCL_CUMEM_ENABLE": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "CHECKPOINT_EXECUTOR_SPEED": "9"},
            enable_nccl_comm_suspend=False,
            disable_custom_all_reduce=False,
            worker_extension_cls="my.Extension",
        )
    )
    for part in (
        "6 problem(s)",
        "CHECKPOINT_EXECUTOR_SPEED is not a setting",
        "worker_extension_cls=my.Extension",
        "V2 model runner",
        "NCCL_CUMEM_ENABLE=0 must be 1",
        "enable_nccl_comm_suspend=True is missing",
        "disable_custom_all_reduce=True is missing",
    ):
        assert part in text


def test_a_whole_front_end_says_it_and_starts_nothing(machine: VllmMachine) -> None:
    with pytest.raises(ValueError, match="enable_sleep_mode=True is missing"):
        machine.start(1, enable_sleep_mode=False)
    assert machine.statuses() == []


def test_what_only_engine_core_can_see_is_logged_as_one_error(
    machine: VllmMachine, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        machine.start(
            1,
            enable_sleep_mode=False,
            worker_extension_cls="my.Extension",
            distributed_executor_backend="tests.support.vllm_executor.LateCheckExecutor",
        )
    gc.collect()  # the zmq context that vLLM's client left open, or its warning comes when pytest ends
    captured = capfd.readouterr()
    lines = (captured.out + captured.err).splitlines()
    assert [line for line in lines if "ERROR" in line and "2 problem(s)" in line]
    assert [line for line in lines if "ERROR" in line and "enable_sleep_mode=True is missing" in line]
    assert [line for line in lines if "ERROR" in line and "worker_extension_cls=my.Extension" in line]


def test_preserved_parameter_names_have_no_effect_and_that_is_said(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.vllm_executor import SoftCheckpointExecutor

    config = make(1, sleep_preserve_parameter_names=["draft.*"])
    _, _, warnings = SoftCheckpointExecutor.check(config, {})
    assert any("sleep_preserve_parameter_names has no effect" in warning for warning in warnings)


def test_the_production_class_asks_for_cuda(make: Make) -> None:
    text = problems_of(lambda: make(1, distributed_executor_backend="checkpoint_executor.vllm.CUDACheckpointExecutor"))
    assert "an NVIDIA GPU is needed" in text
    assert "cuda-bindings is not installed" in text


# ---------------------------------------------------------------------------------------------- the wrong executor


@pytest.mark.parametrize("form", ["name", "class"])
def test_the_executor_that_needs_no_engine_is_told_apart(make: Make, form: str) -> None:
    backend: Any = "checkpoint_executor.CUDACheckpointExecutor"
    if form == "class":
        backend = checkpoint_executor.CUDACheckpointExecutor
    with pytest.raises(TypeError, match=r'pass distributed_executor_backend="checkpoint_executor\.vllm\.CUDACheck'):
        make(1, distributed_executor_backend=backend)

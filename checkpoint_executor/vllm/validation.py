"""What a vLLM configuration and an environment have against being checkpointed: every problem at once.

Reads a ``VllmConfig`` by its attributes and an environment handed in; starts nothing, touches no CUDA. Called twice:
in the user's own process while vLLM builds the configuration (where an exception reaches the user as it is), and in
EngineCore before any worker starts, when everything has been resolved. So a value may still be "auto" here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint_executor import communication
from checkpoint_executor.vllm.settings import Settings

__all__ = ["ARENA_BACKEND", "CUMEM_BACKEND", "Verdict", "check_config"]

CUMEM_BACKEND = "cumem"
#: The name under which :mod:`checkpoint_executor.vllm.backend` is registered.
ARENA_BACKEND = "cumem_arena"

#: (attribute of parallel_config, what it is): sizes that must be 1.
_SIZES = (
    ("pipeline_parallel_size", "pipeline parallelism"),
    ("data_parallel_size", "data parallelism"),
    ("prefill_context_parallel_size", "prefill context parallelism"),
    ("decode_context_parallel_size", "decode context parallelism"),
    ("nnodes", "more than one node"),
)

#: Switches of parallel_config that must be off, and why.
_SWITCHES = (
    ("enable_expert_parallel", "expert parallelism"),
    ("enable_eplb", "expert load balancing"),
    ("enable_elastic_ep", "elastic expert parallelism"),
    ("enable_dbo", "dual batch overlap, whose communicators are not known to survive a checkpoint"),
    ("enable_fault_tolerance", "vLLM's fault tolerance, which would serve on with a partial rank set"),
    ("enable_shm_tensor_arena", "the shared tensor arena, which registers shared memory with CUDA"),
)

#: Parts of VllmConfig that must be absent, and why.
_ABSENT = (
    ("kv_transfer_config", "KV transfer registers the KV cache outside the process"),
    ("ec_transfer_config", "encoder cache transfer registers memory outside the process"),
    ("weight_transfer_config", "weight transfer makes communicators of its own"),
)

#: Environment variables that make vLLM use PyTorch's own NCCL communicators, which nobody suspends.
_INDEPENDENT_NCCL = (
    (
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP",
        "it makes PyTorch create NCCL communicators of its own, which nobody suspends",
    ),
    ("VLLM_DISABLE_PYNCCL", "collectives would fall back to PyTorch's NCCL communicator, which nobody suspends"),
)


class Verdict:
    """What was found.

    Attributes:
        problems, warnings: one sentence each. communication: ``"suspend"`` or ``"socket"``.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.communication = communication.SUSPEND


def check_config(config: Any, environ: Mapping[str, str], settings: Settings, standard_worker: str) -> Verdict:
    """Check everything.

    Args:
        config: a ``VllmConfig``. environ: what the workers will inherit. settings: ours.
        standard_worker: name of the only worker class that is accepted.
    """
    verdict = Verdict()
    _check_parallel(verdict, config, standard_worker)
    if config.model_config is not None:
        _check_sleep_mode(verdict, config, settings)
    _check_model_runner(verdict, config)
    _check_outside_memory(verdict, config)
    _check_communication(verdict, config, environ)
    return verdict


def _check_parallel(verdict: Verdict, config: Any, standard_worker: str) -> None:
    parallel = config.parallel_config
    for name, what in _SIZES:
        if (size := getattr(parallel, name, 1)) != 1:
            verdict.problems.append(f"{name}={size}: {what} is not supported; only tensor parallelism on one node is")
    for name, what in _SWITCHES:
        if getattr(parallel, name, False):
            verdict.problems.append(f"{name}=True: not supported: {what}")
    if parallel.worker_cls not in ("auto", standard_worker):
        verdict.problems.append(
            f"worker_cls={parallel.worker_cls}: only vLLM's own GPU worker ({standard_worker}) is supported"
        )
    if parallel.worker_extension_cls:
        verdict.problems.append(
            f"worker_extension_cls={parallel.worker_extension_cls}: an extension may hold CUDA memory that a "
            "checkpoint cannot carry; not supported"
        )


def _check_sleep_mode(verdict: Verdict, config: Any, settings: Settings) -> None:
    model = config.model_config
    if not model.enable_sleep_mode:
        verdict.problems.append("enable_sleep_mode=True is missing: there is nothing to checkpoint without it")
    if model.sleep_mode_backend not in (CUMEM_BACKEND, ARENA_BACKEND):
        verdict.problems.append(
            f"sleep_mode_backend={model.sleep_mode_backend!r}: must be {CUMEM_BACKEND!r} or {ARENA_BACKEND!r}"
        )
    if getattr(model, "sleep_mode_offload_cudagraph", False) and model.sleep_mode_backend == ARENA_BACKEND:
        verdict.problems.append(
            f"sleep_mode_offload_cudagraph=True has no effect with sleep_mode_backend={ARENA_BACKEND!r}: vLLM offloads "
            f"graphs only for the backend called {CUMEM_BACKEND!r}. Use that one, and CHECKPOINT_EXECUTOR_HOST_ARENA=1 "
            "for the same arena"
        )
    if model.sleep_mode_backend == ARENA_BACKEND and not _is_registered(ARENA_BACKEND):
        verdict.problems.append(
            f"sleep_mode_backend={ARENA_BACKEND!r} is not registered: vLLM has not loaded the plugin "
            "'checkpoint_executor'. Is the package installed, and is it in VLLM_PLUGINS if you set that?"
        )
    if settings.host_arena and model.sleep_mode_backend == ARENA_BACKEND:
        verdict.warnings.append(f"CHECKPOINT_EXECUTOR_HOST_ARENA=1 says again what {ARENA_BACKEND!r} means")
    if getattr(model, "sleep_preserve_parameter_names", None):
        verdict.warnings.append(
            "sleep_preserve_parameter_names has no effect: it is about sleep level 2, and only level 1 is supported "
            "here, which keeps every parameter"
        )


def _is_registered(backend: str) -> bool:
    """vLLM itself finds out at the first sleep."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        SleepModeBackendFactory.get_backend_class(backend)
    except (ImportError, ValueError):
        return False
    return True


def _check_model_runner(verdict: Verdict, config: Any) -> None:
    try:
        uses_v2 = bool(config.use_v2_model_runner)
    except ValueError as error:  # vLLM's own complaint about a combination
        verdict.problems.append(str(error))
        return
    if not uses_v2:
        verdict.problems.append(
            "the V2 model runner is needed: set VLLM_USE_V2_MODEL_RUNNER=1 (vLLM says in its log why it did not choose "
            "it by itself)"
        )


def _check_outside_memory(verdict: Verdict, config: Any) -> None:
    """Memory that is registered with, shared with or owned by somebody outside the process."""
    for name, why in _ABSENT:
        if getattr(config, name, None) is not None:
            verdict.problems.append(f"{name} is set: {why}; not supported")
    if getattr(config.cache_config, "kv_offloading_size", None) is not None:
        verdict.problems.append(
            "kv_offloading_size is set: the offloaded KV cache is outside the checkpoint; not supported"
        )
    multimodal = getattr(config.model_config, "multimodal_config", None)
    ipc = getattr(multimodal, "mm_tensor_ipc", "direct_rpc")
    if ipc != "direct_rpc":
        verdict.problems.append(f"mm_tensor_ipc={ipc!r}: shares memory with the front end; must be 'direct_rpc'")
    load_format = getattr(getattr(config, "load_config", None), "load_format", "auto")
    if str(load_format) in ("ipc_cache", "modelexpress"):
        verdict.problems.append(
            f"load_format={load_format!r}: weights come from another process by CUDA IPC or RDMA; not supported"
        )
    profiler = getattr(getattr(config, "profiler_config", None), "profiler", None)
    if profiler is not None:
        verdict.warnings.append(
            f"profiler={profiler!r}: what a checkpoint does to a process that is being profiled is not defined"
        )


def _check_communication(verdict: Verdict, config: Any, environ: Mapping[str, str]) -> None:
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size
    suspend = bool(getattr(config.model_config, "enable_nccl_comm_suspend", False))
    detected = communication.detect_communication(environ)
    # The flag decides which configuration is meant; without it, only a complete socket environment is one.
    verdict.communication = (
        communication.SUSPEND if suspend or detected != communication.SOCKET else communication.SOCKET
    )
    problems, warnings = communication.check_environment(verdict.communication, size, environ, vllm=True)
    verdict.problems.extend(problems)
    verdict.warnings.extend(warnings)
    if size <= 1:
        return
    if not suspend and verdict.communication == communication.SUSPEND:
        verdict.problems.append(
            "enable_nccl_comm_suspend=True is missing: without it NCCL's peer memory stays, the checkpoint succeeds "
            "and its restore fails for ever (or choose the socket-only environment, see docs/vllm.md)"
        )
    if not parallel.disable_custom_all_reduce:
        verdict.problems.append(
            "disable_custom_all_reduce=True is missing: vLLM's own all-reduce holds CUDA IPC memory"
        )
    if getattr(parallel, "enable_batch_sharded_sampling", None):
        verdict.problems.append(
            "enable_batch_sharded_sampling=True: it makes an NCCL communicator of PyTorch's own, which nobody suspends"
        )
    for name, why in _INDEPENDENT_NCCL:
        if environ.get(name, "").strip().lower() not in ("", "0", "false"):
            verdict.problems.append(f"{name}={environ[name]}: {why}; unset it")
    if fuses_allreduce(config):
        _check_fused_allreduce(verdict, environ)


def _check_fused_allreduce(verdict: Verdict, environ: Mapping[str, str]) -> None:
    """The compile pass makes FlashInfer workspaces of its own, whatever ``VLLM_ALLREDUCE_USE_FLASHINFER`` says."""
    off = "compilation_config={'pass_config': {'fuse_allreduce_rms': False}}"
    if verdict.communication == communication.SOCKET:
        verdict.problems.append(
            "the compile pass fuse_allreduce_rms is on and makes FlashInfer workspaces, which are peer memory; the "
            f"socket-only configuration needs {off}"
        )
    elif environ.get("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "").strip() != "trtllm":
        verdict.problems.append(
            "the compile pass fuse_allreduce_rms is on and makes FlashInfer workspaces even with "
            "VLLM_ALLREDUCE_USE_FLASHINFER=0: set VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm (the other backends "
            f"multicast), or {off}"
        )


def fuses_allreduce(config: Any) -> bool:
    """Whether the pass is on, or will be once vLLM has filled in its defaults."""
    chosen = getattr(config.compilation_config.pass_config, "fuse_allreduce_rms", None)
    if chosen is not None:
        return bool(chosen)
    if int(getattr(config, "optimization_level", 0)) < 2:
        return False
    try:
        from vllm.config.vllm import enable_allreduce_rms_fusion

        return bool(enable_allreduce_rms_fusion(config))
    except (ImportError, AttributeError):
        return False  # looked at again when vLLM has decided

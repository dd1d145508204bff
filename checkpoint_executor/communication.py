"""PURE. The two accepted communication configurations as data, and what an environment has against them.

Knows the variables and why each is what it is. It does not read ``os.environ``, start anything, or know which NCCL is
loaded. The values are those of the sleep-mode page and of ``docs/measurements``:

- *suspend* keeps NCCL's peer-to-peer transport and has it give up its memory before the driver's checkpoint. It needs
  NCCL's memory in cuMem allocations, which is what ``ncclCommSuspend`` can release.
- *socket* never shares device memory at all, so there is nothing to suspend; an all-reduce is 16 times slower.

Everything is set **explicitly**: unset is not the default, since ``/etc/nccl.conf`` and ``~/.nccl.conf`` fill in what
the environment leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "COMMUNICATIONS",
    "SOCKET",
    "SUSPEND",
    "Setting",
    "check_environment",
    "detect_communication",
    "required_settings",
    "worker_environment",
]

SUSPEND = "suspend"
SOCKET = "socket"
COMMUNICATIONS = (SUSPEND, SOCKET)


class Setting(NamedTuple):
    """One environment variable of a configuration."""

    name: str
    value: str
    why: str


_COMMON = (
    Setting("NCCL_IB_DISABLE", "1", "InfiniBand leaves device files open that a checkpoint cannot carry"),
    Setting("NCCL_NVLS_ENABLE", "0", "a live NVLink multicast object makes the checkpoint hang"),
    Setting("NCCL_CUMEM_HOST_ENABLE", "0", "NCCL's cuMem host memory deadlocks on restore (NVIDIA/nccl#2350)"),
)

#: The variables that NCCL itself reads, by configuration.
_NCCL: dict[str, tuple[Setting, ...]] = {
    SUSPEND: (
        *_COMMON,
        Setting("NCCL_CUMEM_ENABLE", "1", "only cuMem allocations can be suspended at fixed addresses"),
    ),
    SOCKET: (
        *_COMMON,
        Setting("NCCL_P2P_DISABLE", "1", "peer memory that is not suspended cannot be restored"),
        Setting("NCCL_SHM_DISABLE", "1", "the socket configuration shares no memory between ranks"),
        Setting("NCCL_CUMEM_ENABLE", "0", "nothing is suspended here, so nothing may be shared"),
    ),
}

#: Other libraries' ways to NVLink multicast: set in our workers, refused if they say otherwise.
_MULTICAST = (
    Setting("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", "a live multicast object makes the checkpoint hang"),
    Setting("NVSHMEM_DISABLE_NVLS", "1", "a live multicast object makes the checkpoint hang"),
)

#: What vLLM reads, the same in both configurations; see also :func:`_check_flashinfer`.
_VLLM = (
    Setting("VLLM_ALLREDUCE_USE_SYMM_MEM", "0", "symmetric memory is peer memory that nobody suspends"),
    Setting("VLLM_USE_NCCL_SYMM_MEM", "0", "symmetric memory is peer memory that nobody suspends"),
    Setting("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "0", "CUDA IPC cannot be checkpointed"),
)

_FLASHINFER = "VLLM_ALLREDUCE_USE_FLASHINFER"
_FLASHINFER_BACKEND = "VLLM_FLASHINFER_ALLREDUCE_BACKEND"

#: Registration pins graph pools and makes replays stale after a remap (torch_memory_saver#88).
_GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
_MEM_MANAGER = "NCCL_DISABLE_MEM_MANAGER"

#: Both spellings of torch's allocator options.
_ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def required_settings(communication: str, tensor_parallel_size: int, *, vllm: bool = False) -> tuple[Setting, ...]:
    """The variables of a configuration; none for one rank, which has nobody to communicate with.

    Raises:
        ValueError: unknown configuration.
    """
    if communication not in COMMUNICATIONS:
        raise ValueError(f"communication must be 'suspend' or 'socket', not {communication!r}")
    if tensor_parallel_size <= 1:
        return ()
    return (*_NCCL[communication], *(_VLLM if vllm else _MULTICAST))


def worker_environment(communication: str, tensor_parallel_size: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to ``environ`` for our own workers. Call :func:`check_environment` first: nothing is judged here.

    Raises:
        ValueError: unknown configuration.
    """
    added = {setting.name: setting.value for setting in required_settings(communication, tensor_parallel_size)}
    if added and not _is_set(environ, _GRAPH_REGISTER):
        added[_GRAPH_REGISTER] = "0"
    return added


def detect_communication(environ: Mapping[str, str]) -> str | None:
    """The configuration whose NCCL variables are all set as they should be; None if neither's are."""
    for communication in COMMUNICATIONS:
        if all(_agrees(environ, setting) for setting in _NCCL[communication]):
            return communication
    return None


def check_environment(
    communication: str, tensor_parallel_size: int, environ: Mapping[str, str], *, vllm: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Everything an environment has against a configuration, in one go.

    Args:
        communication: ``"suspend"`` or ``"socket"``.
        tensor_parallel_size: number of ranks; one rank needs no setting.
        environ: what the workers would inherit.
        vllm: they are vLLM's workers, whose environment is not ours to complete: a variable that is not set is a
            problem too, and vLLM's own variables count.

    Returns:
        (problems, warnings), one sentence each. No problems means that the configuration holds.
    """
    problems = [
        f"{name} asks for expandable segments, with which the sleeping allocator cannot work: remove them there"
        for name in _ALLOCATOR_OPTIONS
        if _wants_expandable_segments(environ.get(name, ""))
    ]
    warnings: list[str] = []
    if communication not in COMMUNICATIONS:
        problems.append(f"communication must be 'suspend' or 'socket', not {communication!r}")
        return tuple(problems), tuple(warnings)
    if tensor_parallel_size <= 1:
        return tuple(problems), tuple(warnings)

    for setting in required_settings(communication, tensor_parallel_size, vllm=vllm):
        problems.extend(_judge(environ, setting, must_be_set=vllm))
    if vllm:
        for setting in _MULTICAST:
            problems.extend(_judge(environ, setting, must_be_set=False))
        problems.extend(_check_flashinfer(communication, environ))
    if communication == SUSPEND and _is_set(environ, _MEM_MANAGER) and _normal(environ[_MEM_MANAGER]) != "0":
        problems.append(
            f"{_MEM_MANAGER}={environ[_MEM_MANAGER]}: ncclCommSuspend fails without NCCL's memory manager; unset it"
        )
    if _is_set(environ, _GRAPH_REGISTER) and _normal(environ[_GRAPH_REGISTER]) != "0":
        warnings.append(
            f"{_GRAPH_REGISTER}={environ[_GRAPH_REGISTER]} is kept as you set it, but registration pins the graphs' "
            "memory and replays have hung after a wake (torch_memory_saver#88); 0 is the default here"
        )
    return tuple(problems), tuple(warnings)


def _judge(environ: Mapping[str, str], setting: Setting, *, must_be_set: bool) -> list[str]:
    if not _is_set(environ, setting.name):
        return [f"{setting.name} must be set to {setting.value}: {setting.why}"] if must_be_set else []
    if _agrees(environ, setting):
        return []
    return [f"{setting.name}={environ[setting.name]} must be {setting.value}: {setting.why}"]


def _check_flashinfer(communication: str, environ: Mapping[str, str]) -> list[str]:
    """FlashInfer's all-reduce: ``trtllm`` in *suspend*, off in *socket*, never ``mnnvl`` (it multicasts).

    Both are judged explicitly: vLLM's defaults are on, and "auto", which tries mnnvl first on one node. The backend
    counts even when the standalone all-reduce is off, since the compile pass ``fuse_allreduce_rms`` makes workspaces
    of its own.
    """
    problems = []
    use = _normal(environ.get(_FLASHINFER, ""))
    backend = environ.get(_FLASHINFER_BACKEND, "").strip()
    if use == "":
        problems.append(
            f"{_FLASHINFER} must be set{' to 0' if communication == SOCKET else ' (0, or 1 with the trtllm backend)'}"
        )
    elif communication == SOCKET and use != "0":
        problems.append(f"{_FLASHINFER}={environ[_FLASHINFER]} must be 0: its workspaces are peer memory")
    if backend not in ("", "trtllm") or (use not in ("", "0") and backend == ""):
        problems.append(f"{_FLASHINFER_BACKEND} must be trtllm, not {backend or 'unset (auto)'}: the others multicast")
    return problems


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip() != ""


def _agrees(environ: Mapping[str, str], setting: Setting) -> bool:
    return _normal(environ.get(setting.name, "")) == setting.value


def _normal(value: str) -> str:
    """A number in its plain form (NCCL reads ``01`` as 1); any other text stripped."""
    text = value.strip()
    try:
        return str(int(text))
    except ValueError:
        return text


def _wants_expandable_segments(options: str) -> bool:
    """Whether torch's allocator options switch expandable segments on (``key:value`` pairs between commas)."""
    for option in options.split(","):
        key, _, value = option.partition(":")
        if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
            return True
    return False

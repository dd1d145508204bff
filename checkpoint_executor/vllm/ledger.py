"""Whose a GPU's bytes are, from inside one of vLLM's workers: what cumem, torch and NCCL say.

For attribution only. Makes no call that reaches the device, so it may also be asked while the worker must not touch
CUDA. What none of them knows (context, modules, graph executables) is the report's remainder: vLLM made it before
anybody of ours was there to watch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from checkpoint_executor.tags import ALL_TAGS

__all__ = ["SUSPENDABLE", "ledger", "memory_statistic"]

#: ``ncclCommMemStats``: bytes that a suspend releases, and bytes that stay.
SUSPENDABLE, _PERSISTENT = 0, 2

#: cumem's tags that are nobody's to wake: the graphs' pools with ``sleep_mode_offload_cudagraph``. Others (LoRA's
#: "runtime") are workspaces.
_OTHER_TAGS = {"cudagraph": "graph_pools"}


def ledger(device: int, communicators: Iterable[Any], local_memory_bytes: int, arena_bytes: int) -> dict[str, int]:
    """Bytes by kind (:data:`~checkpoint_executor.attribution.LEDGER_KINDS`), as far as they can be told apart.

    ``torch`` is what torch's ordinary pool keeps beside cuBLAS's workspaces, ``backup_arena`` is host memory.

    Args:
        device: torch's index of the GPU. communicators: PyNccl's of every group, None where there is none.
        local_memory_bytes: of the context, now. arena_bytes: of our own backup arena.
    """
    import torch
    from vllm.device_allocator import get_mem_allocator_instance

    from checkpoint_executor.workers.cuda_ledger import torch_bytes

    kinds = dict.fromkeys((*ALL_TAGS, "graph_pools", "workspaces", "nccl_suspendable", "nccl_persistent"), 0)
    cumem = dict(get_mem_allocator_instance().pointer_to_data)
    for data in cumem.values():
        if not data.is_asleep:
            kind = data.tag if data.tag in ALL_TAGS else _OTHER_TAGS.get(data.tag, "workspaces")
            kinds[kind] += int(data.handle[1])
    for communicator in communicators:
        kinds["nccl_persistent"] += memory_statistic(communicator, _PERSISTENT)
        if communicator is not None and not communicator._suspended:
            kinds["nccl_suspendable"] += memory_statistic(communicator, SUSPENDABLE)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    torchs = torch_bytes(segments, device, frozenset(cumem))
    kinds["graph_pools"] += torchs.graph_pools
    return {
        **kinds,
        "cublas": torchs.cublas,
        "torch": torchs.other,
        "local_memory": local_memory_bytes,
        "backup_arena": arena_bytes,
    }


def memory_statistic(communicator: Any, which: int) -> int:
    """One of NCCL's statistics of a PyNccl communicator, bytes; 0 where NCCL cannot say."""
    if communicator is None or communicator.disabled:
        return 0
    try:
        statistics = communicator.nccl.lib.ncclCommMemStats
        found = ctypes.c_uint64()
        if statistics(communicator.comm, ctypes.c_int(which), ctypes.byref(found)) == 0:
            return int(found.value)
    except (AttributeError, ctypes.ArgumentError):
        pass
    return 0

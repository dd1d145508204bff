"""Whose the bytes are inside vLLM's worker, over stand-ins for cumem, torch's statistics and NCCL."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint_executor.vllm.ledger import ledger

MIB = 1 << 20


def entry(tag: str, size_mib: int, asleep: bool = False) -> SimpleNamespace:
    return SimpleNamespace(tag=tag, handle=(0, size_mib * MIB, 0, 0), is_asleep=asleep)


def segment(address: int, size_mib: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": address,
        "segment_pool_id": pool,
        "total_size": size_mib * MIB,
        "blocks": [],
    }


def communicator(suspended: bool = False, **more: Any) -> SimpleNamespace:
    """PyNccl's, with 480 MiB that a suspend releases and 4 that stay."""
    sizes = {0: 480 * MIB, 2: 4 * MIB}

    def statistic(_communicator: Any, which: Any, found: Any) -> int:
        found._obj.value = sizes[which.value]
        return 0

    nccl = SimpleNamespace(lib=SimpleNamespace(ncclCommMemStats=statistic))
    return SimpleNamespace(**{"comm": 1, "disabled": False, "nccl": nccl, "_suspended": suspended, **more})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ledger of a worker with these allocations of cumem and segments of torch."""

    def with_(cumem: dict[int, Any], segments: list[dict[str, Any]], *communicators: Any) -> dict[str, int]:
        module = ModuleType("vllm.device_allocator")
        module.get_mem_allocator_instance = lambda: SimpleNamespace(pointer_to_data=cumem)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.device_allocator", module)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
        found = ledger(0, communicators, local_memory_bytes=264 * MIB, arena_bytes=7 * MIB)
        return {kind: size // MIB for kind, size in found.items() if size}

    return with_


def test_each_byte_is_counted_once(read: Any) -> None:
    cumem = {0x1000: entry("weights", 100), 0x2000: entry("kv_cache", 50), 0x3000: entry("runtime", 3)}
    segments = [
        segment(0x1000, 100, (0, 5)),  # cumem's pools are torch's as well
        segment(0x2000, 50, (0, 6)),
        segment(0x3000, 3, (0, 7)),
        segment(0x4000, 20, (0, 8)),  # a graph's
        segment(0x5000, 9),
        segment(0x6000, 999, device=1),
    ]
    assert read(cumem, segments) == {
        "weights": 100,
        "kv_cache": 50,
        "workspaces": 3,
        "graph_pools": 20,
        "torch": 9,
        "local_memory": 264,
        "backup_arena": 7,
    }


def test_what_sleeps_is_not_on_the_device(read: Any) -> None:
    cumem = {0x1000: entry("weights", 100, asleep=True), 0x2000: entry("kv_cache", 50), 0x3000: entry("cudagraph", 8)}
    segments = [segment(0x1000, 100, (0, 5)), segment(0x3000, 8, (0, 6))]
    assert read(cumem, segments) == {"kv_cache": 50, "graph_pools": 8, "local_memory": 264, "backup_arena": 7}


def test_nccl_keeps_a_part_while_it_is_suspended(read: Any) -> None:
    rest = {"local_memory": 264, "backup_arena": 7}
    assert read({}, [], communicator(), None) == {"nccl_suspendable": 480, "nccl_persistent": 4, **rest}
    assert read({}, [], communicator(suspended=True)) == {"nccl_persistent": 4, **rest}
    assert read({}, [], communicator(disabled=True), communicator(nccl=None)) == rest

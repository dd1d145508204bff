"""The sleep-mode backend: cumem's own code, with host memory in place of a GPU's, and its backups in our arena."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from checkpoint_executor.workers.cuda_arena import HostArena

PIECE = 2 << 20


class HostMemory:
    """What cumem calls its C extension for: "device" memory that is really the host's."""

    def __init__(self) -> None:
        self.buffers: dict[int, Any] = {}
        self.mapped: set[int] = set()

    def allocate(self, allocator: Any, tag: str, fill: int, size_bytes: int = PIECE) -> int:
        buffer = (ctypes.c_ubyte * size_bytes)()
        address = ctypes.addressof(buffer)
        self.buffers[address] = buffer
        self.mapped.add(address)
        ctypes.memset(address, fill, size_bytes)
        with_tag, allocator.current_tag = allocator.current_tag, tag
        allocator.python_malloc_callback((0, size_bytes, address, 0))
        allocator.current_tag = with_tag
        return address

    def unmap(self, device: int, size_bytes: int, address: int, handle: int) -> None:
        assert address in self.mapped
        self.mapped.remove(address)
        ctypes.memset(address, 0xDD, size_bytes)

    def map(self, device: int, size_bytes: int, address: int, handle: int) -> None:
        assert address not in self.mapped
        self.mapped.add(address)

    def contents(self, address: int) -> set[int]:
        return set(bytes(self.buffers[address]))


class Cudart:
    def cudaMemcpy(self, target: int, source: int, size_bytes: int) -> None:  # noqa: N802 - CUDA's name
        ctypes.memmove(target, source, size_bytes)


class Context:
    def __init__(self, ordinal: int) -> None:
        self.numa_node = -1


class Arena(HostArena):
    """Without CUDA, so not pinned."""

    made: list[Arena] = []

    def __init__(self, *, numa_node: int = -1) -> None:
        super().__init__(numa_node=numa_node, registered=False)
        Arena.made.append(self)


class Bench:
    """cumem, our backend, and the memory below both."""

    def __init__(self, cumem: Any, backend: Any, memory: HostMemory) -> None:
        self.cumem = cumem
        self.allocator = cumem.CuMemAllocator.get_instance()
        self.backend = backend.CumemArenaBackend()
        self.module = backend
        self.memory = memory

    def backups(self) -> list[int]:
        data = self.allocator.pointer_to_data.values()
        return [entry.cpu_backup_tensor.data_ptr() for entry in data if entry.cpu_backup_tensor is not None]

    def in_arena(self, address: int) -> bool:
        return any(arena.address <= address < arena.address + arena.capacity_bytes for arena in Arena.made)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    import vllm.device_allocator as device_allocator
    from vllm.distributed.device_communicators import cuda_wrapper

    memory = HostMemory()
    extension = types.ModuleType("vllm.cumem_allocator")
    extension.__dict__.update(init_module=None, python_create_and_map=memory.map, python_unmap_and_release=memory.unmap)
    monkeypatch.setitem(sys.modules, "vllm.cumem_allocator", extension)
    monkeypatch.setattr(cuda_wrapper, "CudaRTLibrary", Cudart)
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem", raising=False)
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    monkeypatch.setattr(cumem, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", cumem.CuMemAllocator.get_instance)
    for name in ("synchronize", "empty_cache"):  # 0.31 calls torch.cuda's
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    backend = importlib.import_module("checkpoint_executor.vllm.backend")
    monkeypatch.setattr(backend, "_arena", backend._Arena())
    monkeypatch.setattr(backend, "HostArena", Arena)
    monkeypatch.setattr(backend, "PrimaryContext", Context)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    Arena.made = []
    yield Bench(cumem, backend, memory)
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem")


def test_backups_lie_in_the_arena_and_come_back(bench: Bench) -> None:
    weights = [bench.memory.allocate(bench.allocator, "weights", fill) for fill in (1, 2, 3)]
    cache = bench.memory.allocate(bench.allocator, "kv_cache", 9)
    bench.backend.suspend(level=1)
    assert bench.memory.mapped == set()
    assert len(bench.backups()) == 3
    assert all(bench.in_arena(address) for address in bench.backups())
    bench.backend.resume(["weights"])
    assert [bench.memory.contents(address) for address in weights] == [{1}, {2}, {3}]
    assert cache not in bench.memory.mapped
    bench.backend.resume(None)
    assert bench.memory.mapped == {*weights, cache}


def test_the_arena_is_got_once(bench: Bench) -> None:
    for fill in (1, 2):
        bench.memory.allocate(bench.allocator, "weights", fill)
    seen = []
    for _ in range(3):
        bench.backend.suspend(level=1)
        seen.append(bench.backups())
        bench.backend.resume(None)
    assert seen[0] == seen[1] == seen[2]
    assert [arena.capacity_bytes for arena in Arena.made] == [2 * PIECE]


def test_memory_that_came_later_gets_an_arena_of_its_own(bench: Bench) -> None:
    bench.memory.allocate(bench.allocator, "weights", 1)
    bench.module._arena.make_room(PIECE)
    later = bench.memory.allocate(bench.allocator, "weights", 2, 3 * PIECE)
    bench.backend.suspend(level=1)
    assert all(bench.in_arena(address) for address in bench.backups())
    assert len(Arena.made) == 2
    bench.backend.resume(None)
    assert bench.memory.contents(later) == {2}


def test_cumem_serves_itself_where_the_arena_cannot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = bench.memory.allocate(bench.allocator, "weights", 1)

    def refuse(self: object, size_bytes: int) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(Arena, "prepare", refuse)
    bench.backend.suspend(level=1)
    assert not any(bench.in_arena(address) for address in bench.backups())
    bench.backend.resume(None)
    assert bench.memory.contents(weights) == {1}


def test_nothing_of_cumem_stays_changed(bench: Bench) -> None:
    bench.memory.allocate(bench.allocator, "weights", 1)
    bench.backend.suspend(level=1)
    assert bench.cumem.torch is torch


def test_plain_cumem_borrows_the_arena_in_the_same_way(bench: Bench) -> None:
    """``CHECKPOINT_EXECUTOR_HOST_ARENA=1``: the executor lends the arena around the worker's own sleep."""
    weights = bench.memory.allocate(bench.allocator, "weights", 7)
    with bench.module.lent_arena():
        bench.allocator.sleep(offload_tags=("weights",))
    assert all(bench.in_arena(address) for address in bench.backups())
    bench.allocator.wake_up()
    assert bench.memory.contents(weights) == {7}


def test_the_arena_is_made_ahead_by_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench.module,
        "bindings",
        lambda: types.SimpleNamespace(CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)),
    )
    modes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench.module, "call", lambda *args: modes.append(args))
    bench.memory.allocate(bench.allocator, "weights", 1, 4 * PIECE)
    bench.module.prepare_early()
    bench.module._arena._thread.join()
    assert modes == [("cuThreadExchangeStreamCaptureMode", 2)]
    assert [arena.capacity_bytes for arena in Arena.made] == [4 * PIECE]
    bench.backend.suspend(level=1)
    assert len(Arena.made) == 1

"""The sleep-mode backend: cumem's own code, with host memory in place of a GPU's, and its backups in our arena."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
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
        self.hashed_unmapped: list[int] = []

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

    def write(self, address: int, fill: int, offset_bytes: int = 0, size_bytes: int = 1) -> None:
        assert address in self.mapped
        ctypes.memset(address + offset_bytes, fill, size_bytes)

    def contents(self, address: int) -> set[int]:
        return set(bytes(self.buffers[address]))


class Cudart:
    """Keeps the address and the first byte of what it was to copy."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, int]] = []
        self.broken = False

    def cudaMemcpy(self, target: int, source: int, size_bytes: int) -> None:  # noqa: N802 - CUDA's name
        ctypes.memmove(target, source, size_bytes // 2)
        if self.broken:
            raise RuntimeError("CUDA error: the copy broke off")
        ctypes.memmove(target, source, size_bytes)
        self.copied.append((source, ctypes.c_ubyte.from_address(source).value))


def hash_of_host_memory(memory: HostMemory, regions: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """As the GPU's: fingerprints in order, which name contents and size."""
    for address, size_bytes in regions:
        if address not in memory.mapped:
            memory.hashed_unmapped.append(address)  # which would end a GPU's context
        yield hashlib.sha256(ctypes.string_at(address, size_bytes)).digest()


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
        self.cudart: Cudart = cumem.libcudart

    def sleep(self) -> list[int]:
        """Which device addresses were copied."""
        self.cudart.copied.clear()
        self.backend.suspend(level=1)
        return [address for address, _ in self.cudart.copied]

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
    backup_memory = importlib.import_module("checkpoint_executor.vllm.backup_memory")
    monkeypatch.setattr(backend, "_memory", backup_memory.BackupMemory())
    monkeypatch.setattr(backup_memory, "HostArena", Arena)
    monkeypatch.setattr(backup_memory, "PrimaryContext", Context)
    monkeypatch.setattr(backup_memory, "open_hasher", lambda context: functools.partial(hash_of_host_memory, memory))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    Arena.made = []
    yield Bench(cumem, backend, memory)
    assert memory.hashed_unmapped == []
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
    bench.module._memory.make_room([PIECE])
    later = bench.memory.allocate(bench.allocator, "weights", 2, 3 * PIECE)
    bench.backend.suspend(level=1)
    assert all(bench.in_arena(address) for address in bench.backups())
    assert len(Arena.made) == 2
    bench.backend.resume(None)
    assert bench.memory.contents(later) == {2}


def test_what_fits_into_no_arena_gets_one_although_there_are_as_many_bytes(bench: Bench) -> None:
    bench.module._memory.make_room([PIECE])
    bench.module._memory.make_room([PIECE, PIECE])
    assert [arena.capacity_bytes for arena in Arena.made] == [PIECE, PIECE]
    larger = bench.memory.allocate(bench.allocator, "weights", 3, 2 * PIECE)
    bench.backend.suspend(level=1)
    assert all(bench.in_arena(address) for address in bench.backups())
    bench.backend.resume(None)
    assert bench.memory.contents(larger) == {3}


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
    assert bench.cumem.libcudart is bench.cudart


def test_plain_cumem_borrows_the_arena_in_the_same_way(bench: Bench) -> None:
    """``CHECKPOINT_EXECUTOR_HOST_ARENA=1``: the executor lends the arena around the worker's own sleep."""
    weights = bench.memory.allocate(bench.allocator, "weights", 7)
    with bench.module.lent_arena():
        bench.allocator.sleep(offload_tags=("weights",))
    assert all(bench.in_arena(address) for address in bench.backups())
    bench.allocator.wake_up()
    assert bench.memory.contents(weights) == {7}


def test_the_arena_is_made_ahead_by_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    backup_memory = sys.modules["checkpoint_executor.vllm.backup_memory"]
    monkeypatch.setattr(
        backup_memory,
        "bindings",
        lambda: types.SimpleNamespace(CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)),
    )
    modes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(backup_memory, "call", lambda *args: modes.append(args))
    bench.memory.allocate(bench.allocator, "weights", 1, 4 * PIECE)
    bench.module.prepare_early()
    bench.module._memory._thread.join()
    assert modes == [("cuThreadExchangeStreamCaptureMode", 2)]
    assert [arena.capacity_bytes for arena in Arena.made] == [4 * PIECE]
    bench.backend.suspend(level=1)
    assert len(Arena.made) == 1


def test_graphs_that_are_captured_later_find_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    backup_memory = sys.modules["checkpoint_executor.vllm.backup_memory"]
    modes = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    monkeypatch.setattr(backup_memory, "bindings", lambda: types.SimpleNamespace(CUstreamCaptureMode=modes))
    monkeypatch.setattr(backup_memory, "call", lambda *args: None)
    monkeypatch.setattr(bench.module, "_GRAPH_POOLS_BYTES", 2 * PIECE)
    bench.memory.allocate(bench.allocator, "weights", 1)
    bench.module.prepare_early(offload_graphs=True)
    # (Their tag is "cudagraph", which 0.31 does not back up.)
    graphs = bench.memory.allocate(bench.allocator, "weights", 5, 2 * PIECE)
    bench.backend.suspend(level=1)
    assert [arena.capacity_bytes for arena in Arena.made] == [3 * PIECE]
    bench.backend.resume(None)
    assert bench.memory.contents(graphs) == {5}


# What is not copied again


def test_unchanged_weights_are_copied_once(bench: Bench) -> None:
    weights = [bench.memory.allocate(bench.allocator, "weights", fill) for fill in (1, 2, 3)]
    assert bench.sleep() == weights
    for _ in range(3):
        bench.backend.resume(None)
        assert bench.sleep() == []
    bench.backend.resume(None)
    assert [bench.memory.contents(address) for address in weights] == [{1}, {2}, {3}]


def test_one_changed_byte_is_copied(bench: Bench) -> None:
    weights = [bench.memory.allocate(bench.allocator, "weights", fill) for fill in (1, 2, 3)]
    bench.sleep()
    bench.backend.resume(["weights"])
    bench.memory.write(weights[1], 0x77, offset_bytes=PIECE - 1)
    assert bench.sleep() == [weights[1]]
    bench.backend.resume(None)
    assert [bench.memory.contents(address) for address in weights] == [{1}, {2, 0x77}, {3}]
    assert bench.memory.buffers[weights[1]][PIECE - 1] == 0x77
    assert bench.sleep() == []


def test_two_weights_that_are_swapped_are_both_copied(bench: Bench) -> None:
    weights = [bench.memory.allocate(bench.allocator, "weights", fill) for fill in (1, 2)]
    bench.sleep()
    bench.backend.resume(None)
    for address, fill in zip(weights, (2, 1), strict=True):
        bench.memory.write(address, fill, size_bytes=PIECE)
    assert bench.sleep() == weights
    bench.backend.resume(None)
    assert [bench.memory.contents(address) for address in weights] == [{2}, {1}]


def test_where_the_pieces_shift_everything_behind_is_copied(bench: Bench) -> None:
    """A larger allocation comes before the others: its backup lies where theirs were."""
    first, second, third = (bench.memory.allocate(bench.allocator, "weights", fill) for fill in (1, 2, 3))
    bench.sleep()
    bench.backend.resume(None)
    entries = bench.allocator.pointer_to_data
    del entries[second]
    entries[third] = entries.pop(third)
    larger = bench.memory.allocate(bench.allocator, "weights", 9, 2 * PIECE)
    entries[third] = entries.pop(third)
    assert list(entries) == [first, larger, third]
    assert bench.sleep() == [larger, third]
    bench.backend.resume(None)
    assert [bench.memory.contents(address) for address in (first, larger, third)] == [{1}, {9}, {3}]
    assert bench.sleep() == []


def test_a_copy_that_broke_off_is_made_again(bench: Bench) -> None:
    weights = bench.memory.allocate(bench.allocator, "weights", 1)
    bench.sleep()
    bench.backend.resume(None)
    bench.memory.write(weights, 2, size_bytes=PIECE)
    bench.cudart.broken = True
    with pytest.raises(RuntimeError, match="broke off"):
        bench.sleep()
    bench.cudart.broken = False
    # Half of what was there before is overwritten now: even the old contents have to be copied.
    bench.memory.write(weights, 1, size_bytes=PIECE)
    assert bench.sleep() == [weights]
    assert len(Arena.made) == 1
    bench.backend.resume(None)
    assert bench.memory.contents(weights) == {1}


def test_a_backup_that_was_lent_for_something_else_proves_nothing(bench: Bench) -> None:
    """cumem's ``torch.empty`` for other purposes is answered from the arena too; who gets it may write to it."""
    weights = bench.memory.allocate(bench.allocator, "weights", 1)
    bench.sleep()
    bench.backend.resume(None)
    with bench.module.lent_arena():
        other = bench.cumem.torch.empty(PIECE, dtype=torch.uint8, device="cpu")
    assert bench.in_arena(other.data_ptr())
    ctypes.memset(other.data_ptr(), 0x55, PIECE)  # (torch would start its threads, and the other tests fork)
    del other
    assert bench.sleep() == [weights]
    bench.backend.resume(None)
    assert bench.memory.contents(weights) == {1}


def test_a_second_sleep_while_the_arena_is_lent_copies_what_changed(bench: Bench) -> None:
    weights = bench.memory.allocate(bench.allocator, "weights", 1)
    with bench.module.lent_arena():
        bench.sleep()
        bench.backend.resume(None)
        bench.memory.write(weights, 2, size_bytes=PIECE)
        assert bench.sleep() == [weights]
    bench.backend.resume(None)
    assert bench.memory.contents(weights) == {2}


def test_pieces_of_what_still_sleeps_are_not_given_away(bench: Bench) -> None:
    """One of two allocations is back; the next sleep must not lay it over the other's backup, nor hash the other."""
    first, second = (bench.memory.allocate(bench.allocator, "weights", fill) for fill in (1, 2))
    bench.sleep()
    entry = bench.allocator.pointer_to_data[second]
    bench.memory.map(*entry.handle)
    bench.cudart.cudaMemcpy(second, entry.cpu_backup_tensor.data_ptr(), PIECE)
    entry.cpu_backup_tensor, entry.is_asleep = None, False
    assert bench.sleep() == [second]
    bench.backend.resume(None)
    assert [bench.memory.contents(address) for address in (first, second)] == [{1}, {2}]


def test_a_hash_that_fails_costs_only_a_copy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(regions: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(sys.modules["checkpoint_executor.vllm.backup_memory"], "open_hasher", lambda context: fail)
    weights = bench.memory.allocate(bench.allocator, "weights", 1)
    assert bench.sleep() == [weights]
    bench.backend.resume(None)
    assert bench.memory.contents(weights) == {1}


def test_without_a_hash_everything_is_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["checkpoint_executor.vllm.backup_memory"], "open_hasher", lambda context: None)
    weights = bench.memory.allocate(bench.allocator, "weights", 1)
    for _ in range(2):
        assert bench.sleep() == [weights]
        bench.backend.resume(None)
    assert bench.memory.contents(weights) == {1}

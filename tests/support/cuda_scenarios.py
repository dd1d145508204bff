"""What the unit tests run over the stub driver, each in a process of its own (``cuda_stub.CudaStub.run``)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import procfs
from checkpoint_executor.driver_states import DriverCode, DriverError, ProcessState
from checkpoint_executor.messages import Target
from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from checkpoint_executor.workers.cuda_arena import HostArena
from checkpoint_executor.workers.cuda_backup import Backup
from checkpoint_executor.workers.cuda_calls import PrimaryContext, call, device_uuids
from checkpoint_executor.workers.cuda_hash import reference_fingerprint
from checkpoint_executor.workers.cuda_local_memory import LocalMemory
from checkpoint_executor.workers.cuda_memory import CudaAllocation, CudaAllocator

MIB = 1 << 20
#: More than one piece of a mapping, and no multiple of one; the stub's memory is sparse.
LARGE_BYTES = 300 * MIB


class Stub:
    """The stub's own functions: ``stub.used()`` calls ``stub_used``. Loaded at the first use, in the child only."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(ctypes.CDLL("libcuda.so.1"), f"stub_{name}")
        function.restype = ctypes.c_uint64
        return lambda *arguments: function(*(ctypes.c_uint64(argument) for argument in arguments))


stub = Stub()


def hash_on_the_host(regions: Sequence[tuple[int, int]]) -> list[bytes]:
    return [reference_fingerprint(ctypes.string_at(address, size)) for address, size in regions]


class Device:
    """An allocator over the stub, and the arena behind it."""

    def __init__(self, *, hashing: bool = True, retain_backup: bool = True) -> None:
        self.arena = HostArena()
        self.backup = Backup(self.arena)
        self.allocator = CudaAllocator(
            PrimaryContext(0),
            self.backup,
            hasher=hash_on_the_host if hashing else None,
            retain_backup=retain_backup,
        )

    def weights(self, *sizes: int) -> list[CudaAllocation]:
        made = [self.allocator.allocate(size) for size in sizes]
        for allocation in made:
            allocation.write(os.urandom(allocation.size_bytes))
        return made

    def cycle(self) -> dict[str, int]:
        """Sleep and wake all; what sleep said."""
        figures = self.allocator.sleep()
        self.allocator.wake([WEIGHTS, KV_CACHE])
        return figures


# ------------------------------------------------------------------------------------------------
# The allocator
# ------------------------------------------------------------------------------------------------


def a_cycle_keeps_bytes_and_addresses() -> None:
    device = Device()
    weights = device.weights(5 * MIB, 1000, 7, LARGE_BYTES)
    cache = device.allocator.allocate(3 * MIB, KV_CACHE)
    addresses = [each.address for each in (*weights, cache)]
    contents = [each.read() for each in weights]
    resident = stub.used()
    for _ in range(3):
        figures = device.allocator.sleep()
        assert stub.used() == 0
        assert stub.live_handles() == stub.live_mappings() == 0
        assert figures[WEIGHTS] == sum(each.size_bytes for each in weights)
        assert figures[KV_CACHE] == 3 * MIB
        device.allocator.wake([WEIGHTS, KV_CACHE])
        assert stub.used() == resident
        assert [each.address for each in (*weights, cache)] == addresses
        assert [each.read() for each in weights] == contents


def the_backup_is_exactly_the_bytes_of_the_allocations() -> None:
    device = Device()
    weights = device.weights(5 * MIB, 1001, 3, 4 * MIB)
    device.allocator.sleep()
    assert device.backup.size_bytes == sum(each.size_bytes for each in weights)
    assert device.arena.capacity_bytes == 10 * MIB  # whole huge pages
    assert stub.registered() == 10 * MIB


def unchanged_weights_are_not_copied_again() -> None:
    device = Device()
    total = sum(each.size_bytes for each in device.weights(5 * MIB, 1000))
    assert [device.cycle()["copied"] for _ in range(3)] == [total, 0, 0]
    assert stub.to_host() == total
    assert stub.to_device() == 3 * total


def without_a_hasher_everything_is_copied() -> None:
    device = Device(hashing=False)
    total = sum(each.size_bytes for each in device.weights(5 * MIB, 1000))
    assert [device.cycle()["copied"] for _ in range(2)] == [total, total]


def a_copy_that_breaks_off_is_never_taken_for_a_backup() -> None:
    device = Device()
    weights = device.weights(5 * MIB, 4 * MIB, 3 * MIB)
    device.cycle()
    for each in weights:
        each.write(os.urandom(each.size_bytes))
    contents = [each.read() for each in weights]
    stub.fail_copy(2)
    with pytest.raises(DriverError):
        device.allocator.sleep()
    assert not device.allocator.sleeping
    assert [each.read() for each in weights] == contents
    assert device.cycle()["copied"] == 12 * MIB
    assert [each.read() for each in weights] == contents


def an_update_after_a_partial_wake_comes_back() -> None:
    device = Device()
    first, second = device.weights(2 * MIB, 4 * MIB)
    device.allocator.sleep()
    device.allocator.wake([WEIGHTS])
    new = os.urandom(first.size_bytes)
    first.write(new)
    kept = second.read()
    device.allocator.wake([KV_CACHE])
    assert device.cycle()["copied"] == first.size_bytes
    assert first.read() == new
    assert second.read() == kept


def two_swapped_tensors_come_back_swapped() -> None:
    device = Device()
    first, second = device.weights(MIB, MIB)
    device.cycle()
    one, two = first.read(), second.read()
    first.write(two)
    second.write(one)
    assert device.cycle()["copied"] == 2 * MIB
    assert (first.read(), second.read()) == (two, one)


def every_single_flipped_byte_comes_back() -> None:
    device = Device()
    (weights,) = device.weights(5000)
    device.cycle()
    for offset in (0, 1, 15, 16, 511, 512, 1023, 1024, 4095, 4999):
        flipped = bytes([weights.read(offset, 1)[0] ^ 1])
        weights.write(flipped, offset)
        assert device.cycle()["copied"] == 5000
        assert weights.read(offset, 1) == flipped


def a_new_or_freed_or_resized_allocation_is_copied_and_the_rest_with_it() -> None:
    device = Device()
    first, second = device.weights(MIB, 3 * MIB)
    device.cycle()
    (third,) = device.weights(2 * MIB)
    assert device.cycle()["copied"] == 6 * MIB
    device.allocator.free(second)
    assert device.cycle()["copied"] == 3 * MIB
    device.allocator.free(third)
    (resized,) = device.weights(4 * MIB)
    contents = [first.read(), resized.read()]
    assert device.cycle()["copied"] == 5 * MIB
    assert [first.read(), resized.read()] == contents
    assert device.cycle()["copied"] == 0


def a_backup_that_is_not_retained_is_given_back_and_copied_anew() -> None:
    device = Device(retain_backup=False)
    (weights,) = device.weights(3 * MIB)
    contents = weights.read()
    for _ in range(2):
        assert device.allocator.sleep()["copied"] == 3 * MIB
        assert stub.registered() == device.arena.capacity_bytes > 0
        device.allocator.wake([WEIGHTS])
        assert stub.registered() == device.arena.capacity_bytes == 0
        assert weights.read() == contents


def the_arena_is_kept_and_grows_only_when_more_is_needed() -> None:
    device = Device()
    device.weights(3 * MIB)
    assert device.allocator.prepare_backup() == 3 * MIB
    address, generation = device.arena.address, device.arena.generation
    device.cycle()
    device.cycle()
    assert (device.arena.address, device.arena.generation) == (address, generation)
    device.weights(64 * MIB)
    device.cycle()
    assert device.arena.generation != generation
    assert stub.registered() == device.arena.capacity_bytes == 68 * MIB


def preparing_the_backup_of_sleeping_weights_loses_nothing() -> None:
    device = Device()
    first, second = device.weights(2 * MIB, 3 * MIB)
    contents = first.read()
    device.allocator.sleep()
    device.allocator.free(second)
    device.allocator.prepare_backup()
    device.allocator.wake([WEIGHTS])
    assert first.read() == contents


def a_wake_without_room_leaves_everything_asleep_and_can_be_repeated() -> None:
    device = Device()
    weights = device.weights(2 * MIB, LARGE_BYTES)
    contents = [each.read() for each in weights]
    device.allocator.sleep()
    stub.set_capacity(280 * MIB)
    with pytest.raises(MemoryError, match="wake_up again"):
        device.allocator.wake([WEIGHTS])
    assert stub.used() == 0
    assert WEIGHTS in device.allocator.sleeping
    stub.set_capacity(400 * MIB)
    device.allocator.wake([WEIGHTS])
    assert [each.read() for each in weights] == contents


def a_wake_that_breaks_off_leaves_everything_asleep_and_can_be_repeated() -> None:
    device = Device()
    weights = device.weights(2 * MIB, LARGE_BYTES)
    contents = [each.read() for each in weights]
    device.allocator.sleep()
    stub.fail_copy(2)
    with pytest.raises(DriverError):
        device.allocator.wake([WEIGHTS])
    assert stub.used() == 0
    assert WEIGHTS in device.allocator.sleeping
    device.allocator.wake([WEIGHTS])
    assert [each.read() for each in weights] == contents


def a_sleep_without_host_memory_leaves_everything_resident_and_can_be_repeated() -> None:
    device = Device()
    weights = device.weights(5 * MIB, 1000)
    contents = [each.read() for each in weights]

    def no_memory(_: int) -> None:
        raise MemoryError("no host memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.arena, "prepare", no_memory)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no host memory"):
                device.allocator.sleep()
            assert not device.allocator.sleeping
    assert [each.read() for each in weights] == contents
    assert device.cycle()["copied"] == 5 * MIB + 1000
    assert [each.read() for each in weights] == contents


def an_allocation_without_room_takes_nothing() -> None:
    device = Device()
    stub.set_capacity(280 * MIB)
    before = stub.reservations()
    with pytest.raises(MemoryError):
        device.allocator.allocate(LARGE_BYTES)
    assert stub.used() == 0
    assert stub.reservations() == before
    assert device.allocator.tag_bytes() == {WEIGHTS: 0, KV_CACHE: 0}


def small_allocations_share_memory_and_give_it_back() -> None:
    device = Device()
    small = [device.allocator.allocate(4096) for _ in range(300)]
    assert stub.used() <= 2 * MIB
    assert all(each.address % 512 == 0 for each in small)
    for each in small:
        device.allocator.free(each)
    assert stub.used() > 0  # an end is only noted
    device.allocator.allocate(1)
    assert stub.used() == 2 * MIB
    assert stub.synchronizations() > 0  # queued work may still have read it


def a_sleeping_tag_takes_no_allocation_and_no_access() -> None:
    device = Device()
    (weights,) = device.weights(100)
    device.allocator.sleep()
    for refused, kind in (
        (lambda: device.allocator.allocate(1), ValueError),
        (lambda: device.allocator.allocate(1, "graphs"), ValueError),
        (weights.read, RuntimeError),
        (lambda: weights.write(b"x"), RuntimeError),
        (lambda: device.allocator.release(WEIGHTS), ValueError),
        (lambda: device.allocator.release(KV_CACHE), RuntimeError),
        (lambda: device.allocator.wake(["graphs"]), ValueError),
    ):
        with pytest.raises(kind):
            refused()
    assert stub.used() == 0


def release_drops_the_cache_alone() -> None:
    device = Device()
    (weights,) = device.weights(3 * MIB)
    device.allocator.allocate(5 * MIB, KV_CACHE)
    assert device.allocator.release(KV_CACHE) == {KV_CACHE: 5 * MIB}
    assert device.allocator.sleeping == {KV_CACHE}
    assert stub.used() == device.allocator.tag_bytes()[WEIGHTS]
    assert weights.read(0, 1)
    # A full sleep after a release, and home again.
    assert device.allocator.sleep() == {WEIGHTS: 3 * MIB, KV_CACHE: 0, "copied": 3 * MIB}
    assert device.allocator.wake([WEIGHTS, KV_CACHE]) == {WEIGHTS: 3 * MIB, KV_CACHE: 5 * MIB}


# ------------------------------------------------------------------------------------------------
# The pool's callbacks
# ------------------------------------------------------------------------------------------------


def _callbacks(code: tuple[bytes, int, int] | None = None) -> tuple[Any, Any, Any]:
    """The callbacks, and their two functions as torch would call them."""
    from checkpoint_executor.workers import cuda_pool
    from checkpoint_executor.workers.cuda_memory import DeviceProperties

    properties = DeviceProperties(PrimaryContext(0))
    chosen = {} if code is None else {"code": code}
    callbacks = cuda_pool.NativeCallbacks(
        cuda_pool.driver_functions(),
        context=int(PrimaryContext(0).handle),
        properties=properties.allocation.getPtr(),
        access=properties.access.getPtr(),
        granularity=properties.granularity,
        device=0,
        **chosen,
    )
    callbacks.keep = properties  # type: ignore[attr-defined]
    alloc_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    free_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return callbacks, alloc_type(callbacks.alloc_pointer), free_type(callbacks.free_pointer)


def _check_callbacks(code: tuple[bytes, int, int] | None) -> None:
    callbacks, alloc, free = _callbacks(code)
    # One allocation: usable memory, journalled with its real size.
    address = alloc(3 * MIB, 0, None)
    ctypes.memset(address, 7, 3 * MIB)
    assert callbacks.drain() == [(address, 4 * MIB)]
    assert stub.used() == 4 * MIB
    assert stub.live_handles() == 1
    waits = stub.synchronizations()
    free(address, 3 * MIB, 0, None)
    assert callbacks.drain() == [(address, -4 * MIB)]
    assert stub.used() == stub.live_handles() == stub.live_mappings() == stub.reservations() == 0
    assert stub.synchronizations() == waits + 1
    # What cannot be had leaves nothing behind.
    assert alloc(2 * MIB, 1, None) is None
    stub.set_capacity(3 * MIB)
    assert alloc(4 * MIB, 0, None) is None
    stub.set_capacity(64 << 30)
    assert callbacks.drain() == []
    assert stub.reservations() == stub.live_handles() == 0
    # Several threads, the GIL released in the callbacks as in torch's operations, a reader at the same time.
    live: dict[int, int] = {}

    def apply(events: list[tuple[int, int]]) -> None:
        for where, size in events:
            if size > 0:
                assert where not in live
                live[where] = size
            else:
                assert live.pop(where) == -size

    def churn(seed: int) -> None:
        mine: list[tuple[int, int]] = []
        for number in range(500):
            size = (1 + (seed + number) % 5) * MIB
            mine.append((alloc(size, 0, None), size))
            if number % 3 == 2:
                free(*mine.pop(number % len(mine)), 0, None)
        for address, size in mine:
            free(address, size, 0, None)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        apply(callbacks.drain())
        time.sleep(0.001)
    apply(callbacks.drain())
    assert live == {}
    assert stub.used() == stub.live_handles() == stub.live_mappings() == stub.reservations() == 0


def the_callbacks_hold_under_threads() -> None:
    _check_callbacks(None)


def the_compiled_source_holds_as_well(binary: str, alloc_offset: str, free_offset: str) -> None:
    _check_callbacks((Path(binary).read_bytes(), int(alloc_offset), int(free_offset)))


def the_callbacks_run_while_another_thread_holds_the_gil() -> None:
    """The deadlock that a Python callback had: the GIL is held for the whole time that the callback runs."""
    callbacks, _, _ = _callbacks()
    # PyDLL functions keep the GIL: were the callback to ask for it, the waiting thread below would never be let go.
    alloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(callbacks.alloc_pointer)
    assert alloc(2 * MIB, 0, None)
    assert len(callbacks.drain()) == 1


def the_page_of_the_callbacks_is_never_writable_and_executable() -> None:
    callbacks, _, _ = _callbacks()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= callbacks.alloc_pointer < end:
            assert line.split()[1] == "r-xp"
            return
    raise AssertionError("not mapped")


# ------------------------------------------------------------------------------------------------
# The workspace, over two processes
# ------------------------------------------------------------------------------------------------


def a_workspace_gives_peer_memory_up_and_comes_back_at_its_addresses() -> None:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    _workspace_rank(rank, Path(folder))
                    sys.stdout.flush()
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def _workspace_rank(rank: int, rendezvous: Path) -> None:
    from checkpoint_executor.workers.cuda_rendezvous import HostGroup
    from checkpoint_executor.workers.cuda_workspace import CudaWorkspace

    group = HostGroup(rank, 2, rendezvous, timeout_s=20)
    workspace = CudaWorkspace(PrimaryContext(0), group, 5000)
    descriptors = len(os.listdir("/proc/self/fd"))
    addresses = workspace.addresses
    assert workspace.swap(bytes(3)) == [bytes(3)] * 2
    for number in range(3):
        mine = f"{number} {rank}".encode()
        assert workspace.swap(mine) == [f"{number} 0".encode(), f"{number} 1".encode()]
        workspace.checkpoint_prepare()
        workspace.checkpoint_prepare()
        assert stub.used() == stub.live_handles() == stub.live_mappings() == 0
        with pytest.raises(RuntimeError, match="prepared"):
            workspace.swap(mine)
        workspace.checkpoint_restore()
        workspace.checkpoint_restore()
        assert workspace.addresses == addresses
        assert workspace.swap(bytes(3)) == [bytes(3)] * 2
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ------------------------------------------------------------------------------------------------
# The helper's driver
# ------------------------------------------------------------------------------------------------


def _driver() -> Any:
    """The helper's driver with NVML left out, which the stub does not have."""
    from checkpoint_executor.helper.cuda_driver import CudaDriver

    made = CudaDriver()
    with pytest.raises(DriverError, match=r"NVML|nvml"):
        made.open()
    return made


def _self() -> Target:
    return Target(0, os.getpid(), procfs.start_time(os.getpid()), "GPU-0")


def the_verbs_lead_through_the_states() -> None:
    driver, target = _driver(), _self()
    states = [driver.get_state(target)]
    for verb in (lambda t: driver.lock(t, 1234), driver.checkpoint, driver.restore, driver.unlock):
        verb(target)
        states.append(driver.get_state(target))
    assert states == [
        ProcessState.RUNNING,
        ProcessState.LOCKED,
        ProcessState.CHECKPOINTED,
        ProcessState.LOCKED,
        ProcessState.RUNNING,
    ]
    assert stub.last_timeout_ms() == 1234


def an_error_keeps_the_code_and_the_name() -> None:
    driver, target = _driver(), _self()
    for code in (DriverCode.NOT_SUPPORTED, DriverCode.OPERATING_SYSTEM, DriverCode.NOT_READY):
        stub.set_next(code)
        with pytest.raises(DriverError) as caught:
            driver.lock(target, 1)
        assert (caught.value.call, caught.value.code) == ("lock", code)
        assert caught.value.name == f"CUDA_ERROR_{code.name}"
    # A code that the bindings have never heard of.
    stub.set_next(12345)
    with pytest.raises(DriverError, match="12345"):
        driver.lock(target, 1)
    with pytest.raises(DriverError) as caught:
        driver.unlock(target)
    assert caught.value.code == DriverCode.ILLEGAL_STATE


def a_pid_that_is_another_process_by_now_is_not_touched() -> None:
    driver, target = _driver(), _self()
    stranger = Target(0, target.pid, target.start_time - 1, "GPU-0")
    for verb in (lambda t: driver.lock(t, 1), driver.checkpoint, driver.restore, driver.unlock, driver.get_state):
        with pytest.raises(DriverError) as caught:
            verb(stranger)
        assert caught.value.code == DriverCode.OPERATING_SYSTEM
    assert driver.get_state(target) is ProcessState.RUNNING


def verbs_on_several_targets_run_at_the_same_time() -> None:
    driver = _driver()
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        children.append(pid)
    try:
        targets = [Target(rank, pid, procfs.start_time(pid), "GPU-0") for rank, pid in enumerate(children)]
        for target in targets:
            driver.lock(target, 1)
        stub.set_verb_ms(500)
        threads = [threading.Thread(target=driver.checkpoint, args=(target,)) for target in targets]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - begun < 1.5  # one after another they would take two seconds
        assert all(driver.get_state(target) is ProcessState.CHECKPOINTED for target in targets)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def local_memory_is_given_back_and_got_again_as_large_as_it_was() -> None:
    memory = LocalMemory(PrimaryContext(0))
    # The default, and what kernels with large arrays leave behind; sizes as read on H200.
    for limit_bytes, whole in ((1024, 264 * MIB), (4096, 1056 * MIB), (6000, 1548 * MIB)):
        stub.set_stack_limit(limit_bytes)
        assert memory.size_bytes == stub.local_bytes() == whole
        assert memory.release() == whole
        assert memory.size_bytes == stub.local_bytes() == 0
        assert memory.release() == 0
        for _ in range(2):
            memory.restore()
            assert memory.size_bytes == stub.local_bytes() == whole


def local_memory_for_which_there_is_no_room_can_be_asked_for_again() -> None:
    memory = LocalMemory(PrimaryContext(0))
    whole = memory.release()
    stub.set_capacity(whole - 1)
    with pytest.raises(MemoryError, match="cuCtxSetLimit"):
        memory.restore()
    assert stub.local_bytes() == 0
    stub.set_capacity(whole)
    memory.restore()
    assert stub.local_bytes() == whole


def local_memory_that_the_driver_keeps_costs_no_sleep() -> None:
    memory = LocalMemory(PrimaryContext(0))
    stub.set_lowest_stack_limit(512)
    assert memory.release() == 0
    memory.restore()
    assert stub.local_bytes() == 132 * 2048 * 1024


def a_device_is_named_as_nvml_names_it() -> None:
    assert device_uuids()[1] == "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe01"
    assert PrimaryContext(1).uuid == device_uuids()[1]


def the_arena_stays_out_of_children_and_is_zero_at_first() -> None:
    arena = HostArena()
    PrimaryContext(0)
    arena.prepare(5 * MIB)
    assert bytes(arena.view(0, 10)) == bytes(10)
    arena.view(4 * MIB, 3)[:] = b"abc"
    pid = os.fork()
    if pid == 0:
        ctypes.string_at(arena.address, 1)  # not mapped here: SIGSEGV
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    assert bytes(arena.view(4 * MIB, 3)) == b"abc"
    arena.prepare(3 * MIB)
    assert bytes(arena.view(4 * MIB, 3)) == b"abc"
    arena.close()
    assert stub.registered() == 0


def a_failed_call_says_what_it_was() -> None:
    with pytest.raises(DriverError) as caught:
        call("cuMemUnmap", 0x1000, 1)
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuMemUnmap", DriverCode.INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")

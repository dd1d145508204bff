"""A software device opened in this very process: its memory, its gate, and what the verbs do to both."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint_executor import softgpu
from checkpoint_executor.driver_states import DriverCode, DriverError, ProcessState, Verb
from checkpoint_executor.softgpu import CONTEXT_BYTES, POISON_BYTE, RemoteProcess, Segment, SoftGpu, SoftProcess

DEADLINE_S = 60.0
MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SoftProcess]:
    opened = SoftProcess.open(tmp_path, "SOFT-0", capacity_bytes=8 * MIB)
    yield opened
    opened.close()
    assert SoftGpu(tmp_path, "SOFT-0").holders() == ()


@pytest.fixture
def gpu(process: SoftProcess, tmp_path: Path) -> SoftGpu:
    return SoftGpu(tmp_path, "SOFT-0")


@pytest.fixture
def driver(process: SoftProcess) -> RemoteProcess:
    pid, start_time = map(int, process.owner.split(":"))
    return RemoteProcess(pid, start_time)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


class TellingGate(softgpu._Gate):
    """Says when it is shut to newcomers and about to wait for those inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shut = threading.Event()

    def _wait_until_drained(self, timeout_s: float | None) -> bool:
        self.shut.set()
        return super()._wait_until_drained(timeout_s)


def code_of(verb: Callable[[], object]) -> DriverCode:
    with pytest.raises(DriverError) as caught:
        verb()
    return DriverCode(caught.value.code)


def cycle(driver: RemoteProcess) -> None:
    driver.lock(0)
    driver.checkpoint()
    driver.restore()
    driver.unlock()


# ---------------------------------------------------------------------------------------------- the gate


def test_a_nested_call_is_left_only_with_the_outermost() -> None:
    gate = softgpu._Gate()
    gate.enter()
    gate.enter()
    gate.leave()
    assert gate.close(timeout_ms=1) is False
    gate.leave()
    assert gate.close(timeout_ms=0) is True


def test_a_thread_inside_may_enter_again_while_the_gate_is_closing(process: SoftProcess, driver: RemoteProcess) -> None:
    process._gate = gate = TellingGate()
    with process.call():
        locker = in_thread(lambda: driver.lock(0))
        assert gate.shut.wait(DEADLINE_S)
        segment = process.allocate(PAGE)
        segment.write(b"inside")
        assert segment.read(0, 6) == b"inside"
    join(locker)
    assert process.state is ProcessState.LOCKED


def test_a_newcomer_waits_while_the_gate_is_closing() -> None:
    gate = TellingGate()
    order: list[str] = []

    def close() -> None:
        gate.close(timeout_ms=0)
        order.append("closed")
        gate.open()

    def newcomer() -> None:
        gate.enter()
        order.append("newcomer")
        gate.leave()

    gate.enter()
    closer = in_thread(close)
    assert gate.shut.wait(DEADLINE_S)
    late = in_thread(newcomer)
    gate.leave()
    join(closer)
    join(late)
    assert order == ["closed", "newcomer"]


def test_closing_times_out_under_a_stream_of_calls_and_lets_everybody_in_again() -> None:
    gate = softgpu._Gate()
    gate.enter()
    assert gate.close(timeout_ms=1) is False

    def pass_through() -> None:
        gate.enter()
        gate.leave()

    join(in_thread(pass_through))
    gate.leave()


def test_a_killed_gate_turns_everybody_away() -> None:
    gate = softgpu._Gate()
    assert gate.close(timeout_ms=0)
    answers: list[str] = []

    def wait_at_the_gate() -> None:
        try:
            gate.enter()
        except RuntimeError as error:
            answers.append(str(error))

    waiting = in_thread(wait_at_the_gate)
    gate.kill()
    join(waiting)
    assert answers == ["the software device is closed in this process"]


# ---------------------------------------------------------------------------------------------- memory


def test_fresh_memory_is_poisoned_never_zeros(process: SoftProcess) -> None:
    segment = process.allocate(MIB + 5)
    poison = bytes([POISON_BYTE]) * (MIB + 5)
    assert segment.read() == poison
    segment.write(bytes(MIB + 5))
    segment.unmap()
    segment.map()
    assert segment.read() == poison


def test_memory_stays_at_its_address_and_in_its_buffer(process: SoftProcess) -> None:
    segment = process.allocate(3 * PAGE)
    address, buffer = segment.address, segment.buffer
    with memoryview(buffer) as view:
        segment.unmap()
        assert not segment.resident
        segment.map()
        segment.write(b"again", PAGE)
        assert bytes(view[PAGE : PAGE + 5]) == b"again"
        view[0] = 7
    assert segment.read(0, 1) == b"\x07"
    assert segment.buffer is buffer
    assert (segment.address, softgpu._address_of(buffer)) == (address, address)


def test_unmapping_gives_the_bytes_back_and_mapping_takes_them(process: SoftProcess, gpu: SoftGpu) -> None:
    segment = process.allocate(MIB)
    assert gpu.used_bytes() == process.resident_bytes == CONTEXT_BYTES + MIB
    segment.unmap()
    segment.unmap()
    assert gpu.used_bytes() == process.resident_bytes == CONTEXT_BYTES
    segment.map()
    segment.map()
    assert gpu.used_bytes() == process.resident_bytes == CONTEXT_BYTES + MIB


def test_a_full_device_refuses_and_nothing_changes(process: SoftProcess, gpu: SoftGpu) -> None:
    segment = process.allocate(4 * MIB)
    segment.unmap()
    other = process.allocate(4 * MIB)
    with pytest.raises(MemoryError, match="SOFT-0 is full"):
        segment.map()
    with pytest.raises(MemoryError, match="SOFT-0 is full"):
        process.allocate(4 * MIB)
    assert not segment.resident
    assert gpu.used_bytes() == process.resident_bytes == CONTEXT_BYTES + 4 * MIB
    process.free(other)
    segment.map()
    assert segment.resident


def test_reads_and_writes_stay_inside_the_segment(process: SoftProcess) -> None:
    segment = process.allocate(10)
    for offset, size in ((0, 11), (10, 1), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            segment.read(offset, size)
    with pytest.raises(ValueError, match="outside"):
        segment.write(b"12", 9)
    segment.write(b"1", 9)
    assert segment.read(9) == b"1"
    assert segment.read(10) == b""


def test_memory_that_is_not_there_is_an_error_not_a_crash(process: SoftProcess) -> None:
    segment = process.allocate(10)
    segment.unmap()
    with pytest.raises(RuntimeError, match="not mapped"):
        segment.read()
    with pytest.raises(RuntimeError, match="not mapped"):
        segment.write(b"1")
    process.free(segment)
    for use in (segment.read, segment.map, segment.unmap, segment.export):
        with pytest.raises(RuntimeError, match="freed"):
            use()
    with pytest.raises(ValueError, match="freed"):
        process.free(segment)


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_an_allocation_has_a_size(process: SoftProcess, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        process.allocate(size_bytes)


def test_freeing_under_a_live_view_gives_the_bytes_back_all_the_same(process: SoftProcess, gpu: SoftGpu) -> None:
    segment = process.allocate(MIB)
    with memoryview(segment.buffer):
        process.free(segment)
        assert gpu.used_bytes() == CONTEXT_BYTES


# ---------------------------------------------------------------------------------------------- open and close


def test_a_process_opens_one_device_at_a_time(process: SoftProcess, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="SOFT-0 open already"):
        SoftProcess.open(tmp_path, "SOFT-1")


def test_a_context_that_does_not_fit_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        SoftProcess.open(tmp_path, "SOFT-0", capacity_bytes=MIB, context_bytes=MIB + 1)
    assert SoftGpu(tmp_path, "SOFT-0").holders() == ()
    SoftProcess.open(tmp_path, "SOFT-0", context_bytes=MIB).close()


def test_close_leaves_no_descriptor_thread_or_byte(tmp_path: Path) -> None:
    descriptors = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    process = SoftProcess.open(tmp_path, "SOFT-0")
    process.allocate(PAGE)
    process.allocate(PAGE).unmap()
    process.close()
    process.close()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert process.resident_bytes == SoftGpu(tmp_path, "SOFT-0").used_bytes() == 0
    with pytest.raises(RuntimeError, match="closed"):
        process.allocate(PAGE)


def test_closing_a_checkpointed_process_frees_its_backup(tmp_path: Path) -> None:
    process = SoftProcess.open(tmp_path, "SOFT-0")
    pid, start_time = map(int, process.owner.split(":"))
    segment = process.allocate(PAGE)
    driver = RemoteProcess(pid, start_time)
    driver.lock(0)
    driver.checkpoint()
    assert segment._backup is not None
    process.close()
    assert segment._backup is None
    assert code_of(driver.restore) is DriverCode.NOT_INITIALIZED


# ---------------------------------------------------------------------------------------------- the verbs


def test_checkpoint_takes_the_context_too_and_restore_brings_all_back(
    process: SoftProcess, gpu: SoftGpu, driver: RemoteProcess
) -> None:
    segment = process.allocate(MIB)
    segment.write(b"kept", 100)
    driver.lock(0)
    driver.checkpoint()
    assert not segment.resident
    assert gpu.used_bytes() == process.resident_bytes == 0
    driver.restore()
    assert segment.resident
    assert gpu.used_bytes() == process.resident_bytes == CONTEXT_BYTES + MIB
    driver.unlock()
    assert segment.read(100, 4) == b"kept"


def test_memory_that_was_unmapped_stays_so_through_a_cycle(process: SoftProcess, driver: RemoteProcess) -> None:
    kept, dropped = process.allocate(PAGE), process.allocate(PAGE)
    kept.write(b"kept")
    dropped.unmap()
    cycle(driver)
    assert (kept.resident, dropped.resident) == (True, False)
    assert kept.read(0, 4) == b"kept"


def test_copies_in_many_pieces_keep_every_byte(
    process: SoftProcess, driver: RemoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softgpu, "_CHUNK_BYTES", 1000)
    segment = process.allocate(10_007)
    data = bytes(index * index % 251 for index in range(10_007))
    segment.write(data)
    cycle(driver)
    assert segment.read() == data
    assert segment.read(999, 2002) == data[999:3001]


def test_a_checkpoint_without_host_memory_changes_nothing(
    process: SoftProcess, gpu: SoftGpu, driver: RemoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = process.allocate(PAGE), process.allocate(PAGE)
    first.write(b"kept")
    driver.lock(0)
    copy_to_backup = Segment._copy_to_backup

    def fail_on_the_second(segment: Segment) -> None:
        if segment is second:
            raise OSError("no host memory")
        copy_to_backup(segment)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "_copy_to_backup", fail_on_the_second)
        assert code_of(driver.checkpoint) is DriverCode.OUT_OF_MEMORY
    assert driver.get_state() is ProcessState.LOCKED
    assert gpu.used_bytes() == CONTEXT_BYTES + 2 * PAGE
    driver.unlock()
    assert first.resident
    assert first.read(0, 4) == b"kept"


def test_a_restore_that_breaks_in_the_middle_is_failed_for_good(
    process: SoftProcess, driver: RemoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.allocate(PAGE)
    driver.lock(0)
    driver.checkpoint()

    def fail(segment: Segment) -> None:
        raise OSError("no memory behind the device")

    monkeypatch.setattr(Segment, "_bring_back", fail)
    assert code_of(driver.restore) is DriverCode.UNKNOWN
    assert driver.get_state() is ProcessState.FAILED
    verbs: list[Callable[[], object]] = [lambda: driver.lock(0), driver.checkpoint, driver.restore, driver.unlock]
    for verb in verbs:
        assert code_of(verb) is DriverCode.ILLEGAL_STATE
    assert driver.get_state() is ProcessState.FAILED


def test_a_timeout_below_zero_is_an_invalid_value(driver: RemoteProcess) -> None:
    assert code_of(lambda: driver.lock(-1)) is DriverCode.INVALID_VALUE


def test_an_error_names_the_verb_the_process_and_the_reason(driver: RemoteProcess) -> None:
    with pytest.raises(DriverError) as caught:
        driver.unlock()
    assert caught.value.call == Verb.UNLOCK
    assert caught.value.detail == f"process {os.getpid()}: the process is running"

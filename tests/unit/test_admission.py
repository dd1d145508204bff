"""What admission decides, from numbers; and how host memory is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_executor.helper.admission import Need, judge_host, judge_sleep, judge_wake
from checkpoint_executor.helper.drivers import DeviceMemory
from checkpoint_executor.helper.host_memory import Room, rooms

MIB = 1 << 20
GIB = 1 << 30


def test_a_wake_that_fits_exactly_is_admitted() -> None:
    memory = DeviceMemory(total_bytes=100 * MIB, used_bytes=40 * MIB)
    assert judge_wake("GPU-a", memory, Need(50 * MIB, 10 * MIB)) is None


def test_a_wake_that_lacks_one_byte_is_refused_with_the_numbers_and_the_holders() -> None:
    memory = DeviceMemory(100 * MIB, 40 * MIB, holders=((7, 10 * MIB), (9, 30 * MIB)))
    error = judge_wake("GPU-a", memory, Need(50 * MIB + 1, 10 * MIB))
    assert error is not None
    assert (error.kind, error.device, error.missing_bytes) == ("refused", "GPU-a", 1)
    assert error.holders == ((9, 30 * MIB), (7, 10 * MIB))


def test_a_sleep_that_freed_what_it_should_is_admitted() -> None:
    assert judge_sleep(500 * MIB, 16 * GIB, 16 * GIB + 64 * MIB, 30 * GIB) is None


def test_a_sleep_that_left_memory_behind_is_refused() -> None:
    error = judge_sleep(5 * GIB, 11 * GIB, 16 * GIB, 30 * GIB)
    assert error is not None
    assert error.missing_bytes == 5 * GIB
    assert "freed 11264 MiB of the 16384 MiB" in error.message


def test_what_the_device_does_not_tell_by_process_is_not_held_against_a_sleep() -> None:
    assert judge_sleep(5 * GIB, None, 16 * GIB, 30 * GIB) is None


def test_more_than_the_driver_can_move_in_time_is_refused() -> None:
    error = judge_sleep(31 * GIB, None, 0, 30 * GIB)
    assert error is not None
    assert error.missing_bytes == GIB


def test_host_memory_is_judged_by_the_tightest_limit() -> None:
    limits = [Room("MemAvailable", 100 * GIB), Room("/pod", 3 * GIB), Room("/", 50 * GIB)]
    assert judge_host(limits, 2 * GIB, GIB) is None
    error = judge_host(limits, 2 * GIB + 1, GIB)
    assert error is not None
    assert (error.missing_bytes, error.device) == (1, "host")
    assert "/pod" in error.message


# -- host memory -------------------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "42").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    2048 kB\n")
    return folder


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_no_control_group_leaves_the_machines_memory(proc: Path, tmp_path: Path) -> None:
    (proc / "42" / "cgroup").write_text("")
    assert rooms(42, proc, tmp_path / "none") == [Room("MemAvailable", 2 * MIB)]


def test_version_2_counts_every_ancestor_and_gives_page_cache_back(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root, cgroup__controllers="memory")
    write(root / "pod", memory__max=10 * MIB, memory__current=8 * MIB)
    (root / "pod" / "memory.stat").write_text(f"anon 1\ninactive_file {MIB}\nactive_file {2 * MIB}\n")
    write(root / "pod" / "worker", memory__max="max", memory__current=5)
    (proc / "42" / "cgroup").write_text("0::/pod/worker\n")
    assert rooms(42, proc, root) == [Room("MemAvailable", 2 * MIB), Room(str(root / "pod"), 5 * MIB)]


def test_version_1_is_read_too_and_its_no_limit_is_none(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group = root / "memory" / "box"
    write(group, memory__limit_in_bytes=4 * MIB, memory__usage_in_bytes=3 * MIB)
    (group / "memory.stat").write_text(f"total_inactive_file {MIB // 2}\n")
    write(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    (proc / "42" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/box\n")
    assert rooms(42, proc, root) == [Room("MemAvailable", 2 * MIB), Room(str(group), MIB + MIB // 2)]


def test_a_name_from_outside_the_namespace_reads_what_is_mounted(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root, cgroup__controllers="memory", memory__max=MIB, memory__current=0)
    (proc / "42" / "cgroup").write_text("0::/../../elsewhere\n")
    assert rooms(42, proc, root)[1:] == [Room(str(root), MIB)]

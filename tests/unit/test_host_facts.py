"""Facts from machines that are made of files, from this very process, and from real library files."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from checkpoint_executor import elf, host_facts
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.facts import NCCL_SUSPEND_SYMBOL, GpuFacts, LibraryFile, ProcessFacts, StateQuery
from checkpoint_executor.host_facts import Roots
from checkpoint_executor.messages import Role

PID = 4711

STATUS = """Name:\tpython3
State:\tS (sleeping)
Tgid:\t4711
Pid:\t4711
Uid:\t1000\t1000\t1000\t1000
Gid:\t100\t100\t100\t100
CapEff:\t0000000000080000
Cpus_allowed_list:\t0-3,8
"""

#: As seen on H200 with driver 580.159.04.
MAPS = """204a00000-204c00000 rw-s 204a00000 00:06 177                             /dev/nvidia-uvm
7fefe3db4000-7fefe3f1a000 r--p 00000000 fe:10 42                         /usr/local/nvidia/lib64/libcuda.so.580.159.04
7fefe3f1a000-7fefe4e9e000 r-xp 00166000 fe:10 42                         /usr/local/nvidia/lib64/libcuda.so.580.159.04
7feff0000000-7feff0001000 rw-p 00000000 00:00 0
7feff1000000-7feff1001000 rw-s 00000000 00:06 178                        /dev/nvidia-uvm-tools
7feff2000000-7feff2001000 rw-p 00000000 00:00 0                          [stack]
"""

OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
    "GCC version:  gcc version 15.3.0 (GCC) \n"
)
PROPRIETARY_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version:\n"
)


class Machine:
    """A machine of files."""

    def __init__(self, folder: Path) -> None:
        self.roots = Roots(folder / "proc", folder / "sys", folder / "dev")
        for root in self.roots:
            root.mkdir()
        self.process = self.roots.proc / str(PID)
        self.write(self.process / "status", STATUS)
        self.write(self.process / "stat", f"{PID} (a (strange) name) S 1 1 1")
        self.write(self.process / "maps", MAPS)
        self.write(self.process / "environ", "NCCL_NVLS_ENABLE=0\0HF_TOKEN=secret\0PATH=/bin\0")
        self.write(self.process / "task/4711/comm", "python3\n")
        self.write(self.process / "task/4712/comm", "pt_nccl_watchdg\n")
        (self.process / "ns").mkdir()
        (self.process / "ns/pid").symlink_to("pid:[4026531836]")
        (self.process / "fd").mkdir()
        self.open(0, "/dev/null")
        self.open(1, "pipe:[1234]")
        self.open(2, "/dev/nvidia0")

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def open(self, number: int, target: str) -> None:
        (self.process / "fd" / str(number)).symlink_to(target)

    def target(self, **known: Any) -> ProcessFacts:
        return host_facts.collect_target(PID, roots=self.roots, **known)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# -- processes -----------------------------------------------------------------------------------


def test_a_process_is_read(machine: Machine) -> None:
    machine.write(machine.roots.sys / "devices/system/node/node0/cpulist", "0-7\n")
    machine.write(machine.roots.sys / "devices/system/node/node1/cpulist", "8-15\n")
    machine.write(machine.roots.sys / "devices/system/node/node2/cpulist", "16-23\n")
    found = machine.target(rank=3, device="GPU-x", query=StateQuery(state="running"))
    assert (found.pid, found.rank, found.device, found.query) == (PID, 3, "GPU-x", StateQuery(state="running"))
    assert (found.leader, found.run_state, found.uid, found.gid) == (True, "S", 1000, 100)
    assert found.tracing_capability is True
    assert found.pid_namespace == "pid:[4026531836]"
    assert found.hidden == ()
    assert found.threads == ("pt_nccl_watchdg", "python3")
    assert (found.cpus, found.nodes) == ("0-3,8", (0, 1))
    assert found.devices == ("/dev/nvidia0",)
    assert found.uvm_mappings == 1
    assert found.libcuda is not None
    assert (found.libcuda.device, found.libcuda.inode, found.libcuda.version) == ("fe:10", 42, "580.159.04")
    assert found.libcuda.symbols is None  # the file is not on this machine
    assert (found.nccl, found.profilers, found.shared_cuda) == ((), (), ())


def test_managed_memory_shows_as_a_second_mapping(machine: Machine) -> None:
    more = "7f87fe000000-7f87fe200000 rw-s 7f87fe000000 00:06 177                    /dev/nvidia-uvm\n"
    machine.write(machine.process / "maps", MAPS + more)
    assert machine.target().uvm_mappings == 2


def test_shared_cuda_events_are_found_among_mappings_and_descriptors(machine: Machine) -> None:
    machine.open(3, "/dev/shm/cuda.shm.0.2ca.1")
    more = (
        "7f0000000000-7f0000001000 rw-s 00000000 00:19 9                          /dev/shm/cuda.shm.0.2ca.2 (deleted)\n"
    )
    machine.write(machine.process / "maps", MAPS + more)
    assert machine.target().shared_cuda == ("/dev/shm/cuda.shm.0.2ca.1", "/dev/shm/cuda.shm.0.2ca.2")


def test_profilers_are_found(machine: Machine) -> None:
    more = (
        "7f0000000000-7f0000001000 r-xp 00000000 fe:10 60                         "
        "/site/nvidia/cu13/lib/libcupti.so.13\n"
        "7f0000001000-7f0000002000 r-xp 00000000 fe:10 61                         /opt/nsys/libToolsInjection64.so\n"
    )
    machine.write(machine.process / "maps", MAPS + more)
    assert machine.target().profilers == ("/opt/nsys/libToolsInjection64.so", "/site/nvidia/cu13/lib/libcupti.so.13")


def test_a_library_that_was_replaced_is_deleted_and_keeps_its_version(machine: Machine) -> None:
    machine.write(machine.process / "maps", MAPS.replace("libcuda.so.580.159.04", "libcuda.so.580.159.04 (deleted)"))
    found = machine.target().libcuda
    assert found is not None
    assert (found.deleted, found.version, found.path[-10:]) == (True, "580.159.04", "580.159.04")


def test_devices_of_others_are_found(machine: Machine) -> None:
    machine.open(3, "/dev/infiniband/uverbs0")
    machine.open(4, "/dev/gdrdrv")
    machine.open(5, "/dev/pts/0")
    assert machine.target().devices == ("/dev/gdrdrv", "/dev/infiniband/uverbs0", "/dev/nvidia0")


def test_secrets_of_the_environment_stay_where_they_are(machine: Machine) -> None:
    assert machine.target().environ == {"NCCL_NVLS_ENABLE": "0"}
    assert host_facts.relevant_environment({"OPENAI_API_KEY": "x", "TORCH_NCCL_ENABLE_MONITORING": "0"}) == {
        "TORCH_NCCL_ENABLE_MONITORING": "0"
    }


def test_an_environment_that_a_title_has_overwritten_counts_as_hidden(machine: Machine) -> None:
    # What setproctitle leaves: it uses the environment's place for the title.
    machine.write(machine.process / "environ", "VLLM::Worker_TP0\0\0\0    ")
    found = machine.target()
    assert (found.environ, found.hidden) == ({}, ("environ",))


def test_a_caller_who_knows_the_environment_better_is_believed(machine: Machine) -> None:
    machine.write(machine.process / "environ", "VLLM::Worker_TP0\0")
    found = machine.target(environ={"NCCL_CUMEM_ENABLE": "1", "HF_TOKEN": "secret"})
    assert (found.environ, found.hidden) == ({"NCCL_CUMEM_ENABLE": "1"}, ())


def test_what_cannot_be_read_is_named(machine: Machine) -> None:
    for name in ("maps", "environ"):
        (machine.process / name).unlink()
    shutil.rmtree(machine.process / "fd")
    (machine.process / "ns/pid").unlink()
    found = machine.target()
    assert found.hidden == ("maps", "fd", "environ")
    assert (found.libcuda, found.pid_namespace) == (None, None)


def test_a_thread_is_no_process(machine: Machine) -> None:
    machine.write(machine.process / "status", STATUS.replace("Tgid:\t4711", "Tgid:\t4700"))
    assert machine.target().leader is False


def test_ids_that_differ_are_nobodys(machine: Machine) -> None:
    machine.write(machine.process / "status", STATUS.replace("Uid:\t1000\t1000", "Uid:\t1000\t0"))
    assert machine.target().uid == -1


def test_a_process_that_is_gone_says_so(machine: Machine) -> None:
    with pytest.raises(ProcessLookupError, match="no process 1"):
        host_facts.collect_target(1, roots=machine.roots)


def test_this_very_process_is_read() -> None:
    found = host_facts.collect_target(os.getpid())
    assert found.run_state == "R"
    assert found.uid == os.getuid()
    assert found.leader
    assert found.hidden == ()
    assert found.pid_namespace == os.readlink("/proc/self/ns/pid")
    assert found.nodes or not Path("/sys/devices/system/node").exists()


def test_a_worker_of_ours_says_what_it_was_told(machine: Machine) -> None:
    spec = ChildSpec(Role.WORKER, 1, 2, 10, 11, "/run/x", "cuda", helper_pid=99)
    line = f"/usr/bin/python3\0-P\0-m\0checkpoint_executor.workers\0{msgspec.json.encode(spec).decode()}\0"
    machine.write(machine.process / "cmdline", line)
    assert host_facts.spec_of(PID, machine.roots) == spec
    # Of another version, or of another kind of process.
    machine.write(machine.process / "cmdline", "python3\0-m\0checkpoint_executor.workers\0{}\0")
    assert host_facts.spec_of(PID, machine.roots) is None
    machine.write(machine.process / "cmdline", "python3\0train.py\0checkpoint_executor.workers")
    assert host_facts.spec_of(PID, machine.roots) is None
    assert host_facts.spec_of(1, machine.roots) is None


# -- the machine ---------------------------------------------------------------------------------


def test_the_host_is_read(machine: Machine) -> None:
    machine.write(machine.roots.proc / "sys/kernel/yama/ptrace_scope", "1\n")
    machine.write(machine.roots.sys / "kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    machine.write(machine.roots.sys / "devices/system/node/online", "0-1\n")
    found = host_facts.collect_host({}, machine.roots)
    assert (found.ptrace_scope, found.huge_pages, found.numa_nodes) == (1, "madvise", 2)
    assert found.mps_directory is None


def test_a_bare_host_is_not_known(machine: Machine) -> None:
    found = host_facts.collect_host({}, machine.roots)
    assert (found.ptrace_scope, found.huge_pages, found.numa_nodes) == (None, None, None)


@pytest.mark.parametrize(
    ("banner", "version", "is_open"),
    [(OPEN_MODULE, "580.159.04", True), (PROPRIETARY_MODULE, "550.54.14", False), ("", None, None)],
)
def test_the_kernel_module_is_told_apart(
    machine: Machine, banner: str, version: str | None, is_open: bool | None
) -> None:
    machine.write(machine.roots.proc / "driver/nvidia/version", banner)
    found = host_facts.collect_driver(roots=machine.roots)
    assert (found.version, found.open_module) == (version, is_open)


def test_the_module_has_a_version_even_where_its_banner_is_hidden(machine: Machine) -> None:
    machine.write(machine.roots.sys / "module/nvidia/version", "595.71.05\n")
    found = host_facts.collect_driver(roots=machine.roots)
    assert (found.version, found.open_module) == ("595.71.05", None)


def test_a_gpu_is_a_device_file(machine: Machine) -> None:
    machine.write(machine.roots.dev / "nvidiactl", "")
    machine.write(machine.roots.dev / "nvidia-uvm", "")
    assert not host_facts.has_gpu(machine.roots)
    machine.write(machine.roots.dev / "nvidia0", "")
    assert host_facts.has_gpu(machine.roots)


class FakeNvml:
    """``pynvml`` as far as it is asked, for two GPUs of which the second knows less."""

    class NVMLError(Exception):
        pass

    def __init__(self, pids: tuple[int, ...] = ()) -> None:
        self._pids = pids

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid not in ("GPU-0", "GPU-1"):
            raise self.NVMLError("not found")
        return int(uuid[-1])

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if handle == 1:
            raise self.NVMLError("not supported")
        return [1, 1]

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self._pids]


def test_gpus_are_read(machine: Machine) -> None:
    machine.write(machine.roots.sys / "bus/pci/devices/0000:00:00.0/numa_node", "1\n")
    machine.write(machine.process / "comm", "nvidia-cuda-mps-server\n")
    nvml = FakeNvml(pids=(PID, 1))
    names = ("nvidia-cuda-mps-server",)
    assert host_facts.collect_gpus(nvml=nvml, roots=machine.roots) == (
        GpuFacts("GPU-0", "NVIDIA H200", False, True, 1, names),
        GpuFacts("GPU-1", "NVIDIA H200", False, None, -1, names),
    )
    [only] = host_facts.collect_gpus(["GPU-1"], nvml=nvml, roots=machine.roots)
    assert only.uuid == "GPU-1"
    assert host_facts.collect_gpus(["GPU-7"], nvml=nvml, roots=machine.roots) == ()


def test_facts_are_those_of_the_targets_gpus(machine: Machine) -> None:
    found = host_facts.collect(
        [machine.target(device="GPU-1")],
        helper=machine.target(),
        environ={"NCCL_NVLS_ENABLE": "0", "HOME": "/root"},
        ranks=1,
        nvml=FakeNvml(),
        roots=machine.roots,
    )
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-1"]
    assert found.environ == {"NCCL_NVLS_ENABLE": "0"}
    assert found.driver.libcuda == found.targets[0].libcuda
    assert host_facts.collect([], device_kind="soft", nvml=FakeNvml()).gpus == ()


# -- MPS -----------------------------------------------------------------------------------------


def test_an_mps_daemon_that_listens_is_found() -> None:
    folder = Path("/tmp") / f"cx-mps-{os.getpid()}"
    folder.mkdir()
    try:
        environ = {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
        assert host_facts.collect_host(environ).mps_directory is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
            daemon.bind(str(folder / "control"))
            daemon.listen()
            assert host_facts.collect_host(environ).mps_directory == str(folder)
        # It died and left its socket behind.
        assert (folder / "control").exists()
        assert host_facts.collect_host(environ).mps_directory is None
    finally:
        shutil.rmtree(folder)


def test_an_mps_daemon_is_found_by_its_pid(machine: Machine, tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")}
    machine.write(tmp_path / "mps/nvidia-cuda-mps-control.pid", f"{PID}\n")
    assert host_facts.collect_host(environ, machine.roots).mps_directory is None
    machine.write(machine.process / "comm", "nvidia-cuda-mps\n")
    assert host_facts.collect_host(environ, machine.roots).mps_directory == environ["CUDA_MPS_PIPE_DIRECTORY"]


# -- library files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake_nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to build a library")
    folder = tmp_path_factory.mktemp("nccl")
    source = folder / "nccl.c"
    source.write_text(
        'const char *ncclVersion = "NCCL version 2.30.7+cuda13.0";\n'
        "int ncclCommSuspend(void *comm) { return 0; }\n"
        "int ncclCommMissing(void *comm);\n"
        "int ncclCommResume(void *comm) { return ncclCommMissing(comm); }\n"
    )
    library = folder / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_symbols_that_are_defined_are_told_from_those_that_are_needed(fake_nccl: Path) -> None:
    names = [NCCL_SUSPEND_SYMBOL, "ncclCommResume", "ncclCommMissing", "ncclVersion", "ncclComm"]
    expected = {NCCL_SUSPEND_SYMBOL, "ncclCommResume", "ncclVersion"}
    image = fake_nccl.read_bytes()
    assert elf.exported(image, names) == expected
    with fake_nccl.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert elf.exported(mapped, names) == expected
    assert b"NCCL version 2.30.7" in (elf.section(image, ".rodata") or b"")
    assert elf.section(image, ".no_such") is None


def test_damaged_files_are_refused_and_nothing_worse(fake_nccl: Path) -> None:
    image = fake_nccl.read_bytes()
    with pytest.raises(ValueError, match="ELF"):
        elf.exported(b"#!/bin/sh\n", [])
    for size in range(0, len(image) - 1, 97):
        with pytest.raises(ValueError, match="ELF"):
            elf.exported(image[:size], [NCCL_SUSPEND_SYMBOL])


def test_a_loaded_nccl_is_found_with_its_version_and_what_it_can(fake_nccl: Path) -> None:
    code = (
        "import ctypes, os; ctypes.CDLL(os.environ['LIB'], mode=os.RTLD_LAZY)\n"
        "from checkpoint_executor import host_facts; import msgspec, sys\n"
        "sys.stdout.buffer.write(msgspec.json.encode(host_facts.collect_target(os.getpid()).nccl))"
    )
    # In a process of its own: a library is never really unloaded.
    environ = {**os.environ, "LIB": str(fake_nccl), "PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, capture_output=True, timeout=30
    ).stdout
    [found] = msgspec.json.decode(output, type=tuple[LibraryFile, ...])
    assert found.path == str(fake_nccl)
    assert found.inode == fake_nccl.stat().st_ino
    assert (found.version, found.symbols, found.deleted) == ("2.30.7", (NCCL_SUSPEND_SYMBOL,), False)


def test_a_preloaded_nccl_is_what_a_process_would_load(fake_nccl: Path, machine: Machine) -> None:
    [found] = host_facts.collect_host({"LD_PRELOAD": f"/none/libx.so:{fake_nccl}"}, machine.roots).nccl
    assert (found.path, found.version) == (str(fake_nccl), "2.30.7")
    assert host_facts.collect_host({"LD_PRELOAD": "/none/libnccl.so.2"}, machine.roots).nccl == ()


def test_reading_a_process_touches_neither_it_nor_its_threads() -> None:
    """Reads only: no thread, no descriptor is left."""
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    host_facts.collect([host_facts.collect_target(os.getpid())], device_kind="soft")
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before

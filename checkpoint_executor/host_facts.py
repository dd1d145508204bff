"""I/O. Collects what the preflight judges: ``/proc``, sysfs, NVML, and a few library files. Reads only; judges nothing.

Nothing here makes a CUDA context, sends a signal or asks the driver about a process: whoever calls brings the answer
to the state query along. What cannot be read is left out, and named in ``hidden`` where that matters; a process that
ended in the middle raises ProcessLookupError.

Every root is a parameter, so that tests can make a machine out of files.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from checkpoint_executor import elf
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.facts import (
    CHECKPOINT_SYMBOLS,
    NCCL_SUSPEND_SYMBOL,
    DriverFacts,
    Facts,
    GpuFacts,
    HostFacts,
    LibraryFile,
    ProcessFacts,
    StateQuery,
)
from checkpoint_executor.messages import Role

__all__ = [
    "Roots",
    "collect",
    "collect_driver",
    "collect_gpus",
    "collect_host",
    "collect_target",
    "has_gpu",
    "relevant_environment",
    "spec_of",
]


class Roots(NamedTuple):
    """Where to look."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")


MACHINE = Roots()

#: Only these variables are taken along: environments hold secrets, and facts are printed.
_VARIABLES = (
    "CUDA_",
    "LD_PRELOAD",
    "NCCL_",
    "NVSHMEM_",
    "NVTX_",
    "PYTORCH_",
    "TORCH_NCCL_",
    "TORCH_SYMM_MEM_",
    "VLLM_ALLREDUCE_",
    "VLLM_FLASHINFER_",
    "VLLM_NCCL_",
    "VLLM_USE_NCCL_",
)

#: Beginnings of the file names of libraries that profilers and debuggers bring into a process.
_PROFILERS = (
    "libcupti.so",
    "libToolsInjection",  # Nsight Systems
    "libcuda-injection.so",  # Nsight Compute
    "libInterceptorInjection",  # compute-sanitizer
    "libsanitizer-collection",
)

#: Device files that say nothing.
_COMMON_DEVICES = (
    "/dev/full",
    "/dev/null",
    "/dev/ptmx",
    "/dev/pts/",
    "/dev/random",
    "/dev/shm/",
    "/dev/tty",
    "/dev/urandom",
    "/dev/zero",
)

_CAP_SYS_PTRACE = 19

_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_LIBRARY_VERSION = re.compile(r"\.so\.(\d+\.\d+[\d.]*)$")
_KERNEL_MODULE = re.compile(r"NVRM version:.*?\bKernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s")


def has_gpu(roots: Roots = MACHINE) -> bool:
    """Whether this machine has an NVIDIA GPU that a process here may open."""
    return any(roots.dev.glob("nvidia[0-9]*"))


def collect(
    targets: Sequence[ProcessFacts] = (),
    *,
    device_kind: str = "cuda",
    helper: ProcessFacts | None = None,
    driver: DriverFacts | None = None,
    environ: Mapping[str, str] | None = None,
    communication: str | None = None,
    ranks: int | None = None,
    front_door: str | None = None,
    longest_sleep_s: float | None = None,
    nvml: Any = None,
    roots: Roots = MACHINE,
) -> Facts:
    """All facts, around those of the targets.

    Args:
        targets: from :func:`collect_target`. helper: likewise; by default this process.
        driver: by default what :func:`collect_driver` finds with the helper's libcuda.
        environ: what workers would inherit; by default this process's environment.
        communication, ranks, front_door, longest_sleep_s: see :class:`checkpoint_executor.facts.Facts`.
        nvml: the ``pynvml`` module, by default imported; only the targets' GPUs are taken, or all without targets.
    """
    environ = os.environ if environ is None else environ
    shared: dict[str, Any] = {
        "device_kind": device_kind,
        "targets": tuple(targets),
        "helper": helper or collect_target(os.getpid(), roots=roots),
        "environ": relevant_environment(environ),
        "communication": communication,
        "ranks": ranks,
        "front_door": front_door,
        "longest_sleep_s": longest_sleep_s,
    }
    if device_kind != "cuda":
        return Facts(**shared)
    return Facts(
        **shared,
        host=collect_host(environ, roots, look_for_nccl=not targets),
        driver=driver or collect_driver(shared["helper"].libcuda, roots=roots),
        gpus=collect_gpus(sorted({target.device for target in targets if target.device}), nvml=nvml, roots=roots),
    )


# -- the machine ---------------------------------------------------------------------------------


def collect_host(environ: Mapping[str, str], roots: Roots = MACHINE, *, look_for_nccl: bool = True) -> HostFacts:
    """The machine, as a process with this environment would find it."""
    scope = _text(roots.proc / "sys/kernel/yama/ptrace_scope")
    nodes = _text(roots.sys / "devices/system/node/online")
    huge_pages = re.search(r"\[(\w+)\]", _text(roots.sys / "kernel/mm/transparent_hugepage/enabled"))
    return HostFacts(
        architecture=platform.machine(),
        ptrace_scope=int(scope) if scope.isdigit() else None,
        huge_pages=huge_pages.group(1) if huge_pages else None,
        numa_nodes=len(_numbers(nodes)) if nodes else None,
        mps_directory=_mps_directory(environ, roots),
        nccl=tuple(_nccl_candidates(environ)) if look_for_nccl else (),
    )


def _mps_directory(environ: Mapping[str, str], roots: Roots) -> str | None:
    """Where an MPS control daemon listens. A directory that a dead one left behind does not count."""
    directory = environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    # Looked up in the kernel's list, not connected to: a connection would be a client, and start a server.
    paths = {line.split()[-1] for line in _text(roots.proc / "net/unix").splitlines()}
    if os.path.join(directory, "control") in paths:
        return directory
    pid = _text(Path(directory) / "nvidia-cuda-mps-control.pid").strip()
    if pid.isdigit() and _text(roots.proc / pid / "comm").startswith("nvidia-cuda-mps"):
        return directory
    return None


def _nccl_candidates(environ: Mapping[str, str]) -> Iterator[LibraryFile]:
    """What a process started from here would load as NCCL: a preloaded one, then the one beside torch."""
    paths = [Path(part) for part in re.split(r"[ :]+", environ.get("LD_PRELOAD", "")) if "libnccl" in part]
    if not paths:
        try:
            package = importlib.util.find_spec("nvidia.nccl")
        except ModuleNotFoundError:
            package = None
        folders = list(package.submodule_search_locations or ()) if package is not None else []
        paths = [path for folder in folders for path in sorted(Path(folder).glob("lib/libnccl.so*"))]
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        yield _library(LibraryFile(str(path), device, status.st_ino), path)


def collect_driver(
    libcuda: LibraryFile | None = None, *, description: str = "", problem: str | None = None, roots: Roots = MACHINE
) -> DriverFacts:
    """The driver.

    Args:
        libcuda: as the helper has it mapped. description, problem: how the helper fared when it opened the driver.
    """
    banner = _text(roots.proc / "driver/nvidia/version")
    match = _KERNEL_MODULE.search(banner)
    # Without the banner (some sandboxes) the module's version is there, but not which of the two modules it is.
    version = match.group(1) if match else _text(roots.sys / "module/nvidia/version").strip() or None
    return DriverFacts(
        version=version,
        open_module="Open Kernel Module" in banner if match else None,
        description=description,
        libcuda=libcuda,
        problem=problem,
    )


def collect_gpus(uuids: Sequence[str] = (), *, nvml: Any = None, roots: Roots = MACHINE) -> tuple[GpuFacts, ...]:
    """The GPUs of these UUIDs, or all that NVML shows; none where NVML cannot be asked.

    Args:
        uuids: which. nvml: the ``pynvml`` module; by default imported and initialised here, and never shut down:
            unloading NVML made a later lock crash its target (https://github.com/NVIDIA/cuda-checkpoint/issues/58).
    """
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return ()
    try:
        nvml.nvmlInit()
        if uuids:
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        else:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(_gpu(nvml, handle, roots) for handle in handles)
    except nvml.NVMLError:
        return ()


def _gpu(nvml: Any, handle: Any, roots: Roots) -> GpuFacts:
    def ask(name: str, *arguments: Any) -> Any:
        """None where this GPU, or this NVML, does not know it."""
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    persistence, mig = ask("nvmlDeviceGetPersistenceMode"), ask("nvmlDeviceGetMigMode")
    processes = ask("nvmlDeviceGetComputeRunningProcesses") or ()
    names = {_text(roots.proc / str(process.pid) / "comm").strip() for process in processes}
    return GpuFacts(
        uuid=_decoded(nvml.nvmlDeviceGetUUID(handle)),
        name=_decoded(ask("nvmlDeviceGetName") or ""),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
        numa_node=_numa_node(_decoded(getattr(ask("nvmlDeviceGetPciInfo"), "busId", "")), roots),
        processes=tuple(sorted(name for name in names if name)),
    )


def _numa_node(pci_address: str, roots: Roots) -> int:
    """NVML writes the address with eight digits of domain, sysfs with four."""
    domain, _, rest = pci_address.lower().partition(":")
    text = _text(roots.sys / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node").strip()
    return int(text) if text.lstrip("-").isdigit() else -1


# -- a process -----------------------------------------------------------------------------------


def collect_target(
    pid: int,
    *,
    rank: int | None = None,
    device: str | None = None,
    query: StateQuery | None = None,
    environ: Mapping[str, str] | None = None,
    roots: Roots = MACHINE,
) -> ProcessFacts:
    """A process that shall be checkpointed, or the helper.

    Args:
        pid: its id. rank, device: what the caller knows of it. query: the driver's answer about it.
        environ: its environment where the caller knows better than ``/proc``, which has the one it was *started* with:
            a forked worker's is its parent's, and a process that writes itself a title overwrites it.

    Raises:
        ProcessLookupError: no such process.
    """
    folder = roots.proc / str(pid)
    try:
        status = _status(folder)
        run_state = _bytes(folder / "stat").rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        raise ProcessLookupError(f"no process {pid}") from None
    hidden: list[str] = []
    maps = _Maps(folder, hidden)
    devices, shared = _descriptors(folder, hidden)
    variables = relevant_environment(environ) if environ is not None else _environment(folder, hidden)
    cpus = status.get("Cpus_allowed_list", "")
    capabilities = status.get("CapEff")
    return ProcessFacts(
        pid=pid,
        rank=rank,
        device=device,
        leader=status.get("Tgid", str(pid)) == str(pid),
        run_state=run_state,
        uid=_single(status.get("Uid")),
        gid=_single(status.get("Gid")),
        tracing_capability=None if capabilities is None else bool(int(capabilities, 16) >> _CAP_SYS_PTRACE & 1),
        pid_namespace=_link(folder / "ns/pid"),
        hidden=tuple(hidden),
        libcuda=next(maps.libraries("libcuda.so"), None),
        nccl=tuple(maps.libraries("libnccl.so")),
        profilers=maps.profilers(),
        uvm_mappings=maps.count("/dev/nvidia-uvm"),
        devices=devices,
        shared_cuda=tuple(sorted({*shared, *maps.shared_cuda()})),
        threads=_thread_names(folder),
        environ=variables,
        cpus=cpus,
        nodes=_nodes_of(cpus, roots),
        query=query,
    )


def spec_of(pid: int, roots: Roots = MACHINE) -> ChildSpec | None:
    """What a worker or helper of ours was told when it was started; None for any other process."""
    arguments = _bytes_or_empty(roots.proc / str(pid) / "cmdline").split(b"\0")
    for module, role in ((b"checkpoint_executor.workers", Role.WORKER), (b"checkpoint_executor.helper", Role.HELPER)):
        if module in arguments[:-1]:
            try:
                spec = msgspec.json.decode(arguments[arguments.index(module) + 1], type=ChildSpec)
            except msgspec.DecodeError:
                return None  # of another version, or cut off
            return spec if spec.role is role else None
    return None


def relevant_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that some check looks at, and no others."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(_VARIABLES)}


class _Maps:
    """``/proc/PID/maps``, as far as it concerns us."""

    def __init__(self, folder: Path, hidden: list[str]) -> None:
        self._root = folder / "root"
        #: path, device, inode and whether deleted, of every mapping of a file.
        self._files: list[tuple[str, str, int, bool]] = []
        try:
            lines = _bytes(folder / "maps").splitlines()
        except OSError:
            hidden.append("maps")
            return
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(b"/"):
                path = os.fsdecode(fields[5])
                deleted = path.endswith(" (deleted)")
                self._files.append((path.removesuffix(" (deleted)"), fields[3].decode(), int(fields[4]), deleted))

    def count(self, path: str) -> int:
        return sum(1 for file in self._files if file[0] == path)

    def libraries(self, name: str) -> Iterator[LibraryFile]:
        """The different files whose name begins like this, in the order of their addresses."""
        for path, device, inode, deleted in dict.fromkeys(self._files):
            if os.path.basename(path).startswith(name):
                library = LibraryFile(path, device, inode, deleted=deleted)
                # In the process's own root: it may be in another container. Without the right to go there, in ours.
                inside = self._root / path.lstrip("/")
                yield _library(library, inside if _exists(inside) else Path(path))

    def profilers(self) -> tuple[str, ...]:
        return tuple(sorted({path for path, *_ in self._files if os.path.basename(path).startswith(_PROFILERS)}))

    def shared_cuda(self) -> set[str]:
        return {path for path, *_ in self._files if _is_shared_cuda(path)}


def _library(library: LibraryFile, path: Path) -> LibraryFile:
    """Add what the file itself says: its version, and which of the symbols that matter it exports."""
    # libcuda.so.1 is a link to the file whose name has the version; mappings name the file itself.
    match = _LIBRARY_VERSION.search(os.path.realpath(path) if library.path == str(path) else library.path)
    version = match.group(1) if match else None
    if library.deleted:
        return msgspec.structs.replace(library, version=version)
    try:
        status = path.stat()
        found, contents_version = _read_library(str(path), status.st_dev, status.st_ino, status.st_mtime_ns)
    except (OSError, ValueError):
        return msgspec.structs.replace(library, version=version)
    return msgspec.structs.replace(library, version=version or contents_version, symbols=found)


@functools.lru_cache(maxsize=32)
def _read_library(path: str, device: int, inode: int, changed_ns: int) -> tuple[tuple[str, ...], str | None]:
    """Symbols and version; remembered by file, as every rank has the same one."""
    del device, inode, changed_ns
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        symbols = elf.exported(image, (*CHECKPOINT_SYMBOLS, NCCL_SUSPEND_SYMBOL))
        version = None
        if os.path.basename(path).startswith("libnccl"):
            match = _NCCL_VERSION.search(elf.section(image, ".rodata") or b"")
            version = match.group(1).decode() if match else None
    return tuple(sorted(symbols)), version


def _descriptors(folder: Path, hidden: list[str]) -> tuple[tuple[str, ...], set[str]]:
    """Device files that are open, and files of CUDA's inter-process communication."""
    try:
        names = os.listdir(folder / "fd")
    except OSError:
        hidden.append("fd")
        return (), set()
    links = {link for name in names if (link := _link(folder / "fd" / name)) is not None}
    devices = {link for link in links if link.startswith("/dev/") and not link.startswith(_COMMON_DEVICES)}
    return tuple(sorted(devices)), {link for link in links if _is_shared_cuda(link)}


def _is_shared_cuda(path: str) -> bool:
    # Made for shared events (measured on H200, 580.159), which torch uses with every CUDA tensor that it shares. Bare
    # memory handles leave no trace in /proc, neither where they were made nor where they were opened.
    return os.path.basename(path).startswith("cuda.shm.")


def _environment(folder: Path, hidden: list[str]) -> dict[str, str]:
    try:
        entries = os.fsdecode(_bytes(folder / "environ")).split("\0")
    except OSError:
        entries = []
    pairs = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    if not pairs:
        hidden.append("environ")  # not readable, or overwritten by the title of a process that renamed itself
    return relevant_environment(pairs)


def _thread_names(folder: Path) -> tuple[str, ...]:
    try:
        tasks = os.listdir(folder / "task")
    except OSError:
        return ()
    names = {_text(folder / "task" / task / "comm").strip() for task in tasks}
    return tuple(sorted(name for name in names if name))


def _status(folder: Path) -> dict[str, str]:
    lines = _bytes(folder / "status").decode(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _single(ids: str | None) -> int | None:
    """The id if real, effective and saved ones agree: the kernel compares all three."""
    if ids is None:
        return None
    numbers = set(ids.split()[:3])
    return int(numbers.pop()) if len(numbers) == 1 else -1


def _nodes_of(cpus: str, roots: Roots) -> tuple[int, ...]:
    """NUMA nodes of a list of processors."""
    allowed = _numbers(cpus)
    found = []
    for path in (roots.sys / "devices/system/node").glob("node[0-9]*"):
        if allowed & _numbers(_text(path / "cpulist")):
            found.append(int(path.name.removeprefix("node")))
    return tuple(sorted(found))


# -- details -------------------------------------------------------------------------------------


def _numbers(text: str) -> set[int]:
    """The kernel's lists, ``0-3,8``. Empty for what is not one."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last if last.isdigit() else first) + 1))
    return found


def _bytes(path: Path) -> bytes:
    # As bytes: a process may call itself, and its files, anything.
    return path.read_bytes()


def _bytes_or_empty(path: Path) -> bytes:
    try:
        return _bytes(path)
    except OSError:
        return b""


def _text(path: Path) -> str:
    """Contents, or nothing."""
    return _bytes_or_empty(path).decode(errors="replace").strip("\n")


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _exists(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _decoded(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

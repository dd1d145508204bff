"""PURE. What the preflight judges, as plain data: the machine, its driver and GPUs, and the processes concerned.

``host_facts.py`` collects them and ``preflight.py`` judges them; nothing here reads or decides. None, or an empty
tuple, is always "not known", so that a check stays silent about what nobody could see.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "CHECKPOINT_SYMBOLS",
    "NCCL_SUSPEND_SYMBOL",
    "DriverFacts",
    "Facts",
    "GpuFacts",
    "HostFacts",
    "LibraryFile",
    "ProcessFacts",
    "StateQuery",
]

#: The driver's checkpoint calls, by the names that libcuda exports.
CHECKPOINT_SYMBOLS = (
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)

#: What tells an NCCL that can give up its memory.
NCCL_SUSPEND_SYMBOL = "ncclCommSuspend"


class LibraryFile(Struct, frozen=True):
    """A shared library: the very file, so that two processes can be compared.

    Attributes:
        path: as mapped. device, inode: of the mapping, as ``/proc/PID/maps`` has them; together they are the file.
        version: from its name (``libcuda.so.580.159``) or its contents.
        symbols: of those asked for, the ones that it exports; None if it could not be read.
        deleted: whether the file is gone from the disk (a driver update under a running process).
    """

    path: str
    device: str = ""
    inode: int = 0
    version: str | None = None
    symbols: tuple[str, ...] | None = None
    deleted: bool = False

    def is_same_file(self, other: LibraryFile) -> bool:
        """Whether both are one file."""
        return (self.device, self.inode) == (other.device, other.inode)


class HostFacts(Struct, frozen=True):
    """The machine.

    Attributes:
        architecture: of the processor, e.g. ``"x86_64"``. ptrace_scope: Yama's; None without Yama.
        huge_pages: the transparent huge pages in force, ``"always"``, ``"madvise"`` or ``"never"``.
        numa_nodes: how many. mps_directory: where an MPS control daemon has its socket, if there is one.
        nccl: the NCCL libraries that a process started from here would load, as far as can be told, the first one
            first.
    """

    architecture: str = ""
    ptrace_scope: int | None = None
    huge_pages: str | None = None
    numa_nodes: int | None = None
    mps_directory: str | None = None
    nccl: tuple[LibraryFile, ...] = ()


class DriverFacts(Struct, frozen=True):
    """The NVIDIA driver.

    Attributes:
        version: of the kernel module, e.g. ``"580.159"``. open_module: whether it is the open one.
        description: of the driver as the helper opened it, for people.
        libcuda: the user-mode driver that a helper started from here loads; its ``symbols`` are those of
            :data:`CHECKPOINT_SYMBOLS` that it exports.
        problem: why the driver could not be opened, in its own words.
    """

    version: str | None = None
    open_module: bool | None = None
    description: str = ""
    libcuda: LibraryFile | None = None
    problem: str | None = None


class GpuFacts(Struct, frozen=True):
    """One GPU.

    Attributes:
        uuid: as NVML writes it. persistence, mig: whether the mode is on. numa_node: its own, -1 where the system
            does not say. processes: names of the processes that compute on it.
    """

    uuid: str
    name: str = ""
    persistence: bool | None = None
    mig: bool | None = None
    numa_node: int = -1
    processes: tuple[str, ...] = ()


class StateQuery(Struct, frozen=True):
    """The driver's answer about a process: its state, or the error instead.

    Attributes:
        state: ``"running"``, ``"locked"`` and so on. code, code_name: the driver's error. message: in words.
        timed_out: it did not answer at all.
    """

    state: str | None = None
    code: int | None = None
    code_name: str | None = None
    message: str = ""
    timed_out: bool = False


class ProcessFacts(Struct, frozen=True):
    """A process: one that shall be checkpointed, or the helper that does it.

    Attributes:
        pid: its id. rank: where known. device: its GPU's UUID, where known.
        leader: False if the id is that of another thread than the first. run_state: field 3 of ``/proc/PID/stat``.
        uid, gid: its own if real, effective and saved ids are all the same, otherwise -1.
        tracing_capability: whether it has ``CAP_SYS_PTRACE`` in effect (of the helper).
        pid_namespace: its name. hidden: what of ``/proc/PID`` could not be read.
        libcuda, nccl: as mapped. profilers: libraries of profilers that are mapped, by path.
        uvm_mappings: how many mappings of ``/dev/nvidia-uvm``. devices: device files it has open.
        shared_cuda: files of CUDA's inter-process communication that it has mapped or open.
        threads: their names, each once. environ: the variables that matter here, as they were when it was started.
        cpus: the processors it may run on, as the kernel lists them. nodes: the NUMA nodes of those processors.
        query: the driver's answer about its state; None if it was not asked.
    """

    pid: int
    rank: int | None = None
    device: str | None = None
    leader: bool = True
    run_state: str = ""
    uid: int | None = None
    gid: int | None = None
    tracing_capability: bool | None = None
    pid_namespace: str | None = None
    hidden: tuple[str, ...] = ()
    libcuda: LibraryFile | None = None
    nccl: tuple[LibraryFile, ...] = ()
    profilers: tuple[str, ...] = ()
    uvm_mappings: int = 0
    devices: tuple[str, ...] = ()
    shared_cuda: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    environ: dict[str, str] = {}
    cpus: str = ""
    nodes: tuple[int, ...] = ()
    query: StateQuery | None = None

    @property
    def label(self) -> str:
        """For people: the rank if there is one, and the pid."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank} (pid {self.pid})"


class Facts(Struct, frozen=True):
    """Everything that is known.

    Attributes:
        device_kind: ``"cuda"`` or ``"soft"``.
        targets: what shall be checkpointed; empty before anything runs.
        helper: who does it; for ``doctor``, one that was started to be looked at.
        environ: of a process that is started from here, judged while there are no targets.
        communication: ``"suspend"`` or ``"socket"``, None if not known. ranks: how many, None if not known.
        front_door: ``"own"`` or ``"vllm"``, None if not known: who backs up the weights.
        longest_sleep_s: how long a sleep may last; None if nobody said.
    """

    device_kind: str = "cuda"
    host: HostFacts = HostFacts()
    driver: DriverFacts = DriverFacts()
    gpus: tuple[GpuFacts, ...] = ()
    targets: tuple[ProcessFacts, ...] = ()
    helper: ProcessFacts | None = None
    environ: dict[str, str] = {}
    communication: str | None = None
    ranks: int | None = None
    front_door: str | None = None
    longest_sleep_s: float | None = None

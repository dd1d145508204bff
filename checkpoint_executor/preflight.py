"""PURE. What stands in the way of a checkpoint, found before the first sleep: facts in, findings out.

Rules for editors of this file:

1. One function a check. It yields findings and reads nothing: what it needs is a fact (``facts.py``) that
   ``host_facts.py`` collects. A fact that is not known yields nothing.
2. A check is registered under a name. ``docs/preflight.md`` has a section of that name with the source, and
   ``tests/unit/test_preflight.py`` a case that makes it fire and one that shows it silent: tests hold both.
3. A blocker is what was seen, or is documented, to end in a lost executor (or host). What only costs time, or may
   not apply, is a warning; what is merely worth knowing is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from checkpoint_executor import communication
from checkpoint_executor.driver_states import DriverCode, ProcessState
from checkpoint_executor.facts import (
    CHECKPOINT_SYMBOLS,
    NCCL_SUSPEND_SYMBOL,
    DriverFacts,
    Facts,
    LibraryFile,
    ProcessFacts,
    StateQuery,
)

__all__ = [
    "CHECKS",
    "OLDEST_DRIVER",
    "OLDEST_NCCL",
    "Check",
    "Finding",
    "Severity",
    "check_start",
    "explain",
    "worst",
]

#: The first driver with the checkpoint calls in its public interface.
OLDEST_DRIVER = 570
#: The driver this project was measured with; others are used on the word of others.
MEASURED_DRIVER = "580.159"
#: The first driver that checkpoints on ARM.
OLDEST_ARM_DRIVER = 595
#: The first NCCL with ``ncclCommSuspend``.
OLDEST_NCCL = "2.29.7"
#: torch's own default of ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`` (ProcessGroupNCCL.cpp).
TORCH_HEARTBEAT_S = 480.0
#: Threads that torch's NCCL process group starts: the watchdog, and the heartbeat monitor that watches it.
TORCH_NCCL_THREADS = ("pt_nccl_watchdg", "pt_nccl_heartbt")

_CUDA_CHECKPOINT = "https://github.com/NVIDIA/cuda-checkpoint"


class Severity(StrEnum):
    """How bad it is, best first."""

    NOTE = "note"  #: worth knowing
    WARNING = "warning"  #: costs time, or may go wrong
    BLOCKER = "blocker"  #: sleeping would fail, or lose the executor

    @property
    def rank(self) -> int:
        """A number to sort by."""
        return list(Severity).index(self)


class Finding(Struct, frozen=True):
    """One thing that was found.

    Attributes:
        check: name of the check, a heading of ``docs/preflight.md``. about: what it is about: the host, a GPU, a rank.
        seen: what was seen. why: why it matters. do: what to do about it.
        source: where the claim comes from, if not from this project's own measurements.
    """

    check: str
    severity: Severity
    about: str
    seen: str
    why: str
    do: str
    source: str = ""


class Check(Struct, frozen=True):
    """A check: its name, what it looks at, and the kinds of device it is meant for."""

    name: str
    find: Callable[[Facts], Iterable[Finding]]
    device_kinds: tuple[str, ...]


#: By name, in the order in which they are made.
CHECKS: dict[str, Check] = {}

_Function = Callable[[Facts], Iterator[Finding]]


def _check(name: str, *, soft_too: bool = False) -> Callable[[_Function], _Function]:
    """Register a check."""

    def register(function: _Function) -> _Function:
        CHECKS[name] = Check(name, function, ("cuda", "soft") if soft_too else ("cuda",))
        return function

    return register


def check_start(facts: Facts) -> tuple[Finding, ...]:
    """Every finding of every check, the worst first."""
    found = [
        finding for check in CHECKS.values() if facts.device_kind in check.device_kinds for finding in check.find(facts)
    ]
    return tuple(sorted(found, key=lambda finding: -finding.severity.rank))


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The worst severity; None if nothing was found."""
    return max((finding.severity for finding in findings), key=lambda severity: severity.rank, default=None)


def explain(findings: Iterable[Finding]) -> str:
    """Findings as the text of an error or a log entry, one a line."""
    return "\n".join(
        f"  - {finding.about}: {finding.seen}. {finding.why} {finding.do} (preflight check {finding.check!r})"
        for finding in findings
    )


# ------------------------------------------------------------------------------------------------
# The driver
# ------------------------------------------------------------------------------------------------


@_check("driver_version")
def check_driver_version(facts: Facts) -> Iterator[Finding]:
    version = facts.driver.version
    if version is None:
        return
    if _major(version) < OLDEST_DRIVER:
        yield Finding(
            "driver_version",
            Severity.BLOCKER,
            "driver",
            f"NVIDIA driver {version}",
            f"The checkpoint calls are part of the driver's interface from {OLDEST_DRIVER} on.",
            f"Install driver {OLDEST_DRIVER} or newer.",
            f"{_CUDA_CHECKPOINT}#readme",
        )
    elif not _is_within(version, MEASURED_DRIVER):
        yield Finding(
            "driver_version",
            Severity.NOTE,
            "driver",
            f"NVIDIA driver {version}",
            f"This project was measured with {MEASURED_DRIVER} only; checkpoints differ from driver to driver.",
            "Run `checkpoint-executor doctor --self-test` once on this machine.",
        )


@_check("driver_symbols")
def check_driver_symbols(facts: Facts) -> Iterator[Finding]:
    libcuda = facts.driver.libcuda
    if libcuda is None or libcuda.symbols is None:
        return
    missing = [name for name in CHECKPOINT_SYMBOLS if name not in libcuda.symbols]
    if missing:
        yield Finding(
            "driver_symbols",
            Severity.BLOCKER,
            "driver",
            f"{libcuda.path} lacks {', '.join(missing)}",
            "Without these calls no process can be put to sleep.",
            "Install a newer driver; in a container, see that no older libcuda (a forward-compatibility package, a "
            "stub) comes first on the library path.",
        )


@_check("driver_opens")
def check_driver_opens(facts: Facts) -> Iterator[Finding]:
    if facts.driver.problem is not None:
        yield Finding(
            "driver_opens",
            Severity.BLOCKER,
            "driver",
            f"the helper could not open the driver: {facts.driver.problem}",
            "The helper does every checkpoint; it needs cuda-bindings, nvidia-ml-py, the driver's libraries and its "
            "device files.",
            "Install checkpoint-executor[cuda]; in a container, give it the GPU's device files and driver libraries.",
            f"{_CUDA_CHECKPOINT}/issues/10",
        )


class _Known(Struct, frozen=True):
    """Trouble that was reported for certain drivers."""

    versions: str  #: ``"595"`` is the whole branch, ``"595.71.05"`` the one driver.
    severity: Severity
    why: str
    do: str
    source: str
    open_module_only: bool = False
    #: Whether it applies to these facts; None is "to all".
    applies: Callable[[Facts], bool] | None = None


def _may_have_several_ranks(facts: Facts) -> bool:
    return facts.ranks is None or facts.ranks > 1


def _has_torch_process_group(facts: Facts) -> bool:
    return any(_torch_nccl_threads(target) for target in facts.targets)


#: Reports about drivers, each with its source. Not seen by us, unless ``docs/preflight.md`` says so.
_KNOWN_DRIVERS = (
    _Known(
        "595.71.05",
        Severity.BLOCKER,
        "Ending a process that was restored and runs again hung the whole host about 35 s later, 4 of 4 times; "
        "ending a sleeping one is safe.",
        "Use the proprietary kernel module or another driver. If you must not: put the executor to sleep before you "
        "end it.",
        f"{_CUDA_CHECKPOINT}/issues/53",
        open_module_only=True,
    ),
    _Known(
        "575",
        Severity.WARNING,
        "With one rank locked, every call on its NCCL peers, even a state query, was reported to hang.",
        "Use driver 580 or newer for more than one rank.",
        f"{_CUDA_CHECKPOINT}/issues/30",
        applies=_may_have_several_ranks,
    ),
    _Known(
        "590",
        Severity.WARNING,
        "Restores of vLLM on several GPUs were reported to fail or crash.",
        "Use driver 580 for more than one rank, or try the self-test and your own model first.",
        f"{_CUDA_CHECKPOINT}/issues/27",
        applies=_may_have_several_ranks,
    ),
    _Known(
        "595",
        Severity.WARNING,
        "A process with torch's NCCL process group on one GPU was reported to abort at the checkpoint, 4 of 4 times.",
        "Use another driver, or destroy the process group before the first sleep.",
        "https://github.com/VivianSobers/gpunap (validation/FINDINGS.md)",
        applies=_has_torch_process_group,
    ),
    _Known(
        "610",
        Severity.WARNING,
        "A lock was reported to crash its target if that had unloaded NVML without shutting it down.",
        "Load NVML once in a worker and never unload it, or do not load it there.",
        f"{_CUDA_CHECKPOINT}/issues/58",
    ),
)


@_check("known_driver")
def check_known_driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if driver.version is None:
        return
    for known in _KNOWN_DRIVERS:
        if not _is_within(driver.version, known.versions) or (known.applies is not None and not known.applies(facts)):
            continue
        if known.open_module_only and not driver.open_module:
            continue
        module = "open kernel module " if known.open_module_only else ""
        yield Finding(
            "known_driver",
            known.severity,
            "driver",
            f"NVIDIA {module}{driver.version}",
            known.why,
            known.do,
            known.source,
        )


@_check("arm_driver")
def check_arm_driver(facts: Facts) -> Iterator[Finding]:
    version = facts.driver.version
    if facts.host.architecture == "aarch64" and version is not None and _major(version) < OLDEST_ARM_DRIVER:
        yield Finding(
            "arm_driver",
            Severity.BLOCKER,
            "driver",
            f"NVIDIA driver {version} on {facts.host.architecture}",
            "On ARM such drivers lock a process and then refuse the checkpoint with NOT_SUPPORTED.",
            f"Install driver {OLDEST_ARM_DRIVER} or newer.",
            f"{_CUDA_CHECKPOINT}/issues/51",
        )


@_check("user_mode_driver")
def check_user_mode_driver(facts: Facts) -> Iterator[Finding]:
    helper = facts.helper.libcuda if facts.helper is not None else facts.driver.libcuda
    yield from _judge_kernel_module(facts.driver, helper)
    for target in facts.targets:
        theirs = target.libcuda
        if theirs is None:
            if "maps" not in target.hidden:
                yield Finding(
                    "user_mode_driver",
                    Severity.BLOCKER,
                    target.label,
                    "no libcuda is loaded in it",
                    "It does not use CUDA, or not yet: there is nothing to checkpoint.",
                    "Name the process that holds the GPU's memory (a worker, not the server in front of it).",
                )
            continue
        if theirs.deleted:
            yield Finding(
                "user_mode_driver",
                Severity.WARNING,
                target.label,
                f"its libcuda ({theirs.path}) has been deleted or replaced since it started",
                "A helper that starts now loads another user-mode driver than the workers have.",
                "Restart the engine after a driver update.",
            )
        if helper is None or theirs.is_same_file(helper):
            continue
        same_version = theirs.version is not None and theirs.version == helper.version
        yield Finding(
            "user_mode_driver",
            Severity.WARNING if same_version else Severity.BLOCKER,
            target.label,
            f"it uses {_named(theirs)}, the helper {_named(helper)}",
            "They are two files of the same version, as across containers."
            if same_version
            else "With an older user-mode driver in the helper than in the workers, the freeze was reported to hang.",
            "Start both in the same container and environment, so that both load one libcuda.",
            "https://github.com/vllm-project/vllm/pull/58183",
        )


def _judge_kernel_module(driver: DriverFacts, libcuda: LibraryFile | None) -> Iterator[Finding]:
    if driver.version is None or libcuda is None or libcuda.version is None or libcuda.version == driver.version:
        return
    yield Finding(
        "user_mode_driver",
        Severity.NOTE,
        "driver",
        f"user-mode driver {libcuda.version} on kernel module {driver.version}",
        "A forward-compatibility package is in use, which nobody is known to have tried with checkpoints.",
        "Run `checkpoint-executor doctor --self-test`, and see that workers and helper load the same libcuda.",
    )


# ------------------------------------------------------------------------------------------------
# Reaching the processes
# ------------------------------------------------------------------------------------------------


@_check("rights", soft_too=True)
def check_rights(facts: Facts) -> Iterator[Finding]:
    """Whether the helper reaches each process. An answer to a state query is the proof; without one, reasons."""
    for target in facts.targets:
        if not target.leader:
            yield Finding(
                "rights",
                Severity.BLOCKER,
                target.label,
                f"{target.pid} is the id of a thread, not of a process",
                "The driver takes it for a process and ends that.",
                "Name the process: the Tgid in /proc/PID/status.",
                f"{_CUDA_CHECKPOINT}/issues/41",
            )
            continue
        query = target.query
        if query is not None and (query.state is not None or query.code == DriverCode.NOT_INITIALIZED):
            continue  # it answered
        obstacles = [what for what, _ in _obstacles(facts, target)]
        remedies = [remedy for _, remedy in _obstacles(facts, target)]
        if query is None and not obstacles:
            continue
        failed = "" if query is None else f"its state could not be read: {_answer(query)}"
        yield Finding(
            "rights",
            Severity.BLOCKER,
            target.label,
            "; ".join([*filter(None, [failed]), *obstacles]),
            "The driver lets only those checkpoint a process who may trace it, and says no more than OPERATING_SYSTEM "
            "(304) otherwise."
            if facts.device_kind == "cuda"
            else "The helper must reach each process to put it to sleep.",
            " ".join(dict.fromkeys(remedies))
            or "Start the helper as the same user and in the same container as the workers, with CAP_SYS_PTRACE.",
            f"{_CUDA_CHECKPOINT}/issues/6",
        )


def _obstacles(facts: Facts, target: ProcessFacts) -> list[tuple[str, str]]:
    """What keeps the helper from the process, and what to do about each."""
    helper = facts.helper
    found: list[tuple[str, str]] = []
    if helper is None:
        return found
    capable = bool(helper.tracing_capability)
    if _known_different(helper.pid_namespace, target.pid_namespace):
        found.append(
            (
                f"it is in {target.pid_namespace}, the helper in {helper.pid_namespace}",
                "Start helper and workers in one pid namespace (Kubernetes: shareProcessNamespace).",
            )
        )
    if facts.device_kind != "cuda":
        return found
    if not capable and (_known_different(helper.uid, target.uid) or _known_different(helper.gid, target.gid)):
        found.append(
            (
                f"it runs as user {target.uid}, group {target.gid}, the helper as {helper.uid}, {helper.gid}",
                "Run both as the same user and group, or give the helper CAP_SYS_PTRACE.",
            )
        )
    scope = facts.host.ptrace_scope
    asked = target.query is not None
    if scope == 3:
        found.append(
            ("kernel.yama.ptrace_scope is 3, which forbids tracing to all", "Set it to 2 or less; that takes a reboot.")
        )
    elif scope == 2 and not capable:
        found.append(
            (
                "kernel.yama.ptrace_scope is 2 and the helper lacks CAP_SYS_PTRACE",
                "Give the helper CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope to 1 or 0.",
            )
        )
    elif scope == 1 and not capable and asked:
        # Whether the worker let the helper trace it (PR_SET_PTRACER) cannot be read: only a failed query tells.
        found.append(
            (
                "kernel.yama.ptrace_scope is 1 and the helper lacks CAP_SYS_PTRACE",
                "Let the process call prctl(PR_SET_PTRACER, helper), as our own workers do, or give the helper "
                "CAP_SYS_PTRACE.",
            )
        )
    if target.hidden and not capable:
        found.append((f"/proc/{target.pid}/{target.hidden[0]} cannot be read", ""))
    return found


@_check("process_state", soft_too=True)
def check_process_state(facts: Facts) -> Iterator[Finding]:
    for target in facts.targets:
        if target.run_state in ("T", "t"):
            yield Finding(
                "process_state",
                Severity.BLOCKER,
                target.label,
                f"it is stopped (state {target.run_state})",
                "Lock, restore and even the state query hang on a stopped process, whatever their timeout.",
                "Send it SIGCONT, or detach the debugger.",
                "https://github.com/VivianSobers/gpunap (validation/FINDINGS.md)",
            )
        if target.query is not None and target.query.code == DriverCode.NOT_INITIALIZED:
            yield Finding(
                "process_state",
                Severity.BLOCKER,
                target.label,
                f"the driver does not know it: {_answer(target.query)}",
                "It has not used the device: there is nothing to checkpoint.",
                "Name the process that holds the device's memory.",
            )
        match target.query.state if target.query is not None else None:
            case ProcessState.CHECKPOINTED:
                yield Finding(
                    "process_state",
                    Severity.NOTE,
                    target.label,
                    "it is checkpointed",
                    "It is asleep: its device memory is in its host memory.",
                    "Wake it through its own executor.",
                )
            case ProcessState.LOCKED:
                yield Finding(
                    "process_state",
                    Severity.WARNING,
                    target.label,
                    "it is locked",
                    "A sleep or a wake is in progress, or whoever did it died in the middle: its device calls wait.",
                    "If no executor is at work on it, end it with SIGKILL; nobody can tell what state its peers are "
                    "in.",
                )
            case ProcessState.FAILED:
                yield Finding(
                    "process_state",
                    Severity.BLOCKER,
                    target.label,
                    "its checkpoint state is failed",
                    "The driver makes no attempt to keep a process good after a failed operation.",
                    "End it with SIGKILL and start a new one.",
                    f"{_CUDA_CHECKPOINT}#readme",
                )


# ------------------------------------------------------------------------------------------------
# GPUs
# ------------------------------------------------------------------------------------------------


@_check("persistence_mode")
def check_persistence_mode(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.persistence is False:
            yield Finding(
                "persistence_mode",
                Severity.WARNING,
                gpu.uuid,
                "persistence mode is off",
                "A restore needs it, or a caller that has initialised CUDA, as our helper has. Without it the "
                "cuda-checkpoint tool was reported to fail and to lose the process, and every first start on the GPU "
                "takes seconds more.",
                "Start nvidia-persistenced (or run `nvidia-smi -pm 1`).",
                f"{_CUDA_CHECKPOINT}/issues/25",
            )


@_check("mig")
def check_mig(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.mig:
            yield Finding(
                "mig",
                Severity.BLOCKER,
                gpu.uuid,
                "the GPU is partitioned (MIG)",
                "The driver does not checkpoint processes on MIG partitions.",
                "Turn MIG off on this GPU, or use another.",
                f"{_CUDA_CHECKPOINT}#readme",
            )


@_check("mps")
def check_mps(facts: Facts) -> Iterator[Finding]:
    why = "The driver does not checkpoint clients of the Multi-Process Service: their GPU memory belongs to its server."
    for gpu in facts.gpus:
        if any("nvidia-cuda-mps-server" in name for name in gpu.processes):
            yield Finding(
                "mps",
                Severity.BLOCKER,
                gpu.uuid,
                "an MPS server computes on it",
                why,
                "End it (`echo quit | nvidia-cuda-mps-control`) and start the workers anew.",
                f"{_CUDA_CHECKPOINT}#readme",
            )
    if facts.host.mps_directory is not None:
        yield Finding(
            "mps",
            Severity.BLOCKER,
            "host",
            f"an MPS control daemon listens in {facts.host.mps_directory}",
            f"{why} A process that starts while it listens becomes a client.",
            "End the daemon (`echo quit | nvidia-cuda-mps-control`), or point CUDA_MPS_PIPE_DIRECTORY of the workers "
            "to an empty directory.",
            "https://docs.nvidia.com/deploy/mps/",
        )


# ------------------------------------------------------------------------------------------------
# What the processes hold
# ------------------------------------------------------------------------------------------------


@_check("managed_memory")
def check_managed_memory(facts: Facts) -> Iterator[Finding]:
    for target in facts.targets:
        # An ordinary CUDA process has one mapping; managed memory adds its own (measured on H200, 580.159: 1 and 2).
        if target.uvm_mappings > 1:
            yield Finding(
                "managed_memory",
                Severity.BLOCKER,
                target.label,
                f"{target.uvm_mappings} mappings of /dev/nvidia-uvm, where one is normal",
                "It uses managed memory (cudaMallocManaged, paged optimizers), which the driver refuses to "
                "checkpoint; on driver 595 the refusal leaves the process without a working context.",
                "Use ordinary device memory.",
                "https://github.com/VivianSobers/gpunap (validation/FINDINGS.md)",
            )


@_check("cuda_ipc")
def check_cuda_ipc(facts: Facts) -> Iterator[Finding]:
    for target in facts.targets:
        if target.shared_cuda:
            yield Finding(
                "cuda_ipc",
                Severity.BLOCKER,
                target.label,
                f"it has {target.shared_cuda[0]} open: it shares a CUDA event, and likely memory, with another process",
                "Before driver 610 the driver cannot checkpoint legacy CUDA IPC: the checkpoint hangs for minutes, "
                "or its restore fails for ever.",
                "Share no CUDA tensors between processes; vLLM: disable_custom_all_reduce=True.",
                "https://github.com/VivianSobers/gpunap (validation/FINDINGS.md)",
            )


@_check("open_devices")
def check_open_devices(facts: Facts) -> Iterator[Finding]:
    for target in facts.targets:
        for prefix, what, do in (
            (
                "/dev/infiniband/",
                "InfiniBand",
                "Set NCCL_IB_DISABLE=1, and NCCL_NET=Socket if a plugin opens it anyway.",
            ),
            ("/dev/gdrdrv", "GDRCopy", "Set NCCL_GDRCOPY_ENABLE=0, and UCX_TLS without gdr_copy."),
        ):
            names = [name for name in target.devices if name.startswith(prefix)]
            if names:
                yield Finding(
                    "open_devices",
                    Severity.BLOCKER,
                    target.label,
                    f"it has {', '.join(names)} open ({what})",
                    "Memory that a network card or GDRCopy has pinned cannot leave the GPU, and a checkpoint does "
                    "not bring the registration back.",
                    do,
                    f"{_CUDA_CHECKPOINT}#readme",
                )


@_check("profiler")
def check_profiler(facts: Facts) -> Iterator[Finding]:
    why = "Checkpoints of a process with a profiler attached are not supported: what happens is undefined."
    for about, environ in _environments(facts):
        for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
            if environ.get(name):
                yield Finding(
                    "profiler",
                    Severity.WARNING,
                    about,
                    f"{name}={environ[name]} injects a profiler into CUDA",
                    why,
                    f"Unset {name}, or do not sleep while profiling.",
                    f"{_CUDA_CHECKPOINT}/issues/15",
                )
    for target in facts.targets:
        for path in target.profilers:
            # torch itself loads CUPTI, without a subscription: that alone says nothing.
            is_cupti = _file_name(path).startswith("libcupti.so")
            yield Finding(
                "profiler",
                Severity.NOTE if is_cupti else Severity.WARNING,
                target.label,
                f"{path} is loaded",
                "torch loads CUPTI itself, and as long as no torch.profiler runs this is harmless."
                if is_cupti
                else why,
                "Sleep only when no profiler is running." if is_cupti else "Start the process without the profiler.",
                f"{_CUDA_CHECKPOINT}/issues/15",
            )


# ------------------------------------------------------------------------------------------------
# Communication and torch
# ------------------------------------------------------------------------------------------------


@_check("nccl_suspend")
def check_nccl_suspend(facts: Facts) -> Iterator[Finding]:
    if facts.ranks == 1 or facts.communication == communication.SOCKET:
        return
    # Before anything runs, what would be loaded; a process of unknown company may be a single rank, as torch always
    # loads NCCL.
    severity = Severity.BLOCKER if facts.ranks is not None and facts.targets else Severity.WARNING
    loaded = [(target.label, target.environ, target.nccl) for target in facts.targets] or [
        ("host", facts.environ, facts.host.nccl)
    ]
    for about, environ, libraries in loaded:
        if communication.detect_communication(environ) == communication.SOCKET:
            continue
        known = [library for library in libraries if library.symbols is not None]
        able = [library for library in known if NCCL_SUSPEND_SYMBOL in (library.symbols or ())]
        if known and not able:
            listed = ", ".join(_named(library) for library in known)
            yield Finding(
                "nccl_suspend",
                severity,
                about,
                f"{listed} cannot suspend communicators (no {NCCL_SUSPEND_SYMBOL})",
                "With more than one rank, NCCL's peer memory must be given up before a checkpoint: otherwise the "
                "checkpoint succeeds and its restore fails for ever (measured).",
                f"Put NCCL {OLDEST_NCCL} or newer into LD_PRELOAD (vLLM: VLLM_NCCL_SO_PATH too), or choose "
                "communication='socket'.",
            )
        elif len(libraries) > 1:
            yield Finding(
                "nccl_suspend",
                Severity.WARNING,
                about,
                f"{len(libraries)} NCCL libraries are loaded: {', '.join(_named(library) for library in libraries)}",
                "Only the communicators of one of them are suspended; any of another keep their peer memory.",
                "Have one NCCL in every process: put it into LD_PRELOAD (vLLM: VLLM_NCCL_SO_PATH too).",
            )


@_check("communication_environment")
def check_communication_environment(facts: Facts) -> Iterator[Finding]:
    if facts.ranks is None or facts.ranks < 2:
        return
    for target in facts.targets:
        if "environ" in target.hidden:
            continue
        wanted = facts.communication or communication.detect_communication(target.environ) or communication.SUSPEND
        for problem in _environment_problems(facts, target, wanted):
            yield Finding(
                "communication_environment",
                Severity.BLOCKER,
                target.label,
                problem,
                f"The {wanted!r} configuration was measured with exactly these settings; others leave memory that "
                "cannot be restored, or hang.",
                "Set it for the workers, explicitly: configuration files fill in what the environment leaves open.",
            )


def _environment_problems(facts: Facts, target: ProcessFacts, wanted: str) -> Iterator[str]:
    ranks = facts.ranks or 1
    vllm = facts.front_door == "vllm"
    problems, _ = communication.check_environment(wanted, ranks, target.environ, vllm=vllm)
    for problem in problems:
        if "expandable segments" not in problem:  # has a check of its own, which looks at one rank too
            yield problem
    if not vllm:  # which is told of them already
        for setting in communication.required_settings(wanted, ranks):
            if not target.environ.get(setting.name, "").strip():
                yield f"{setting.name} is not set and must be {setting.value}: {setting.why}"


@_check("expandable_segments")
def check_expandable_segments(facts: Facts) -> Iterator[Finding]:
    for about, environ in _environments(facts):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            if _allocator_options(environ.get(name, "")).get("expandable_segments", "").lower() in ("true", "1"):
                yield Finding(
                    "expandable_segments",
                    Severity.BLOCKER,
                    about,
                    f"{name}={environ[name]}",
                    "The allocator that sleeps keeps its memory in torch's memory pools, which expandable segments "
                    "bypass: weights would be neither backed up nor freed.",
                    f"Remove expandable_segments:True from {name}.",
                )


@_check("torch_heartbeat")
def check_torch_heartbeat(facts: Facts) -> Iterator[Finding]:
    for target in facts.targets:
        environ = target.environ
        # Only a process group of torch's has the monitor; our own communicators do not.
        if not _torch_nccl_threads(target) or environ.get("TORCH_NCCL_ENABLE_MONITORING", "").strip() == "0":
            continue
        timeout_s = _number(environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"), TORCH_HEARTBEAT_S)
        if facts.longest_sleep_s is not None and facts.longest_sleep_s < timeout_s:
            continue
        sleep = "without a limit" if facts.longest_sleep_s is None else f"of up to {facts.longest_sleep_s:g} s"
        yield Finding(
            "torch_heartbeat",
            Severity.WARNING,
            target.label,
            f"torch's NCCL heartbeat is {timeout_s:g} s, for sleeps {sleep}",
            "torch's watchdog thread blocks if it calls CUDA in a checkpointed process; when it has not moved for "
            "that long, the monitor ends the process.",
            "Set TORCH_NCCL_ENABLE_MONITORING=0, or TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC above the longest sleep, for "
            "the workers.",
            "https://github.com/pytorch/pytorch/pull/112518",
        )


# ------------------------------------------------------------------------------------------------
# Tuning, with the effect that was measured (H200, driver 580.159: docs/measurements)
# ------------------------------------------------------------------------------------------------


@_check("transparent_huge_pages")
def check_transparent_huge_pages(facts: Facts) -> Iterator[Finding]:
    if facts.host.huge_pages is not None and facts.host.huge_pages != "always":
        yield Finding(
            "transparent_huge_pages",
            Severity.NOTE,
            "host",
            f"transparent huge pages are {facts.host.huge_pages!r}",
            "A checkpoint costs a page fault for every page it moves. With 'always' it took 3.3 instead of 4.7 s for "
            "10 GiB, and 0.8 instead of 1.15 s for 2 GiB (measured).",
            "echo always > /sys/kernel/mm/transparent_hugepage/enabled",
        )


@_check("numa_placement")
def check_numa_placement(facts: Facts) -> Iterator[Finding]:
    if (facts.host.numa_nodes or 1) < 2:
        return
    nodes = {gpu.uuid: gpu.numa_node for gpu in facts.gpus}
    for target in facts.targets:
        node = nodes.get(target.device or "", -1)
        if node >= 0 and target.nodes and any(other != node for other in target.nodes):
            yield Finding(
                "numa_placement",
                Severity.NOTE,
                target.label,
                f"it may run on CPUs {target.cpus} of NUMA nodes {', '.join(map(str, target.nodes))}; its GPU is on "
                f"node {node}",
                "What the driver copies at a checkpoint lands on the node that the process runs on, and crosses the "
                "processors' link if that is not the GPU's. Our own arena of weights is bound to the GPU's node "
                "already. The effect was not measured: our machines show one node.",
                f"numactl --cpunodebind={node} for this worker.",
            )


@_check("module_loading")
def check_module_loading(facts: Facts) -> Iterator[Finding]:
    for about, environ in _environments(facts):
        if environ.get("CUDA_MODULE_LOADING", "").strip().upper() == "EAGER":
            yield Finding(
                "module_loading",
                Severity.WARNING,
                about,
                f"CUDA_MODULE_LOADING={environ['CUDA_MODULE_LOADING']}",
                "Every kernel of every library is loaded, and each checkpoint and restore moves all of them: 2.4 "
                "instead of 1.3 GiB beside weights and KV cache, 1.05 instead of 0.6 s down and 0.46 instead of 0.3 s "
                "up (measured).",
                "Remove CUDA_MODULE_LOADING: torch asks for lazy loading by itself.",
            )


@_check("pinned_memory")
def check_pinned_memory(facts: Facts) -> Iterator[Finding]:
    if facts.front_door == "own":
        return  # our own workers pin their arena of weights themselves
    for about, environ in _environments(facts):
        options = _allocator_options(environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or "")
        if options.get("pinned_use_cuda_host_register", "").lower() != "true":
            yield Finding(
                "pinned_memory",
                Severity.NOTE,
                about,
                "torch pins host memory page by page (the default)",
                "It matters under vLLM, whose first sleep pins the weights' backup: 16 GiB took 7.9 s, and 2.2 s "
                "with the setting below (measured). Our own workers do not depend on it.",
                "PYTORCH_CUDA_ALLOC_CONF=pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
            )


# ------------------------------------------------------------------------------------------------
# Details
# ------------------------------------------------------------------------------------------------


def _environments(facts: Facts) -> Sequence[tuple[str, Mapping[str, str]]]:
    """The environments to judge: those of the targets, or the one that workers would inherit."""
    if not facts.targets:
        return [("environment", facts.environ)]
    return [(target.label, target.environ) for target in facts.targets if "environ" not in target.hidden]


def _torch_nccl_threads(target: ProcessFacts) -> bool:
    return any(name in target.threads for name in TORCH_NCCL_THREADS)


def _major(version: str) -> int:
    head = version.split(".", 1)[0]
    return int(head) if head.isdigit() else 0


def _is_within(version: str, branch: str) -> bool:
    """Whether a version is that of a branch or one below it: ``595.71.05`` is within ``595``, ``5951`` is not."""
    return version == branch or version.startswith(f"{branch}.")


def _known_different(one: object, other: object) -> bool:
    return one is not None and other is not None and one != other


def _answer(query: StateQuery) -> str:
    if query.timed_out:
        return "the driver did not answer in time"
    code = "" if query.code is None else f"{query.code_name or 'error'} ({query.code})"
    return ": ".join(filter(None, [code, query.message])) or "the driver gave no reason"


def _named(library: LibraryFile) -> str:
    return library.path if library.version is None else f"{library.path} ({library.version})"


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


def _allocator_options(text: str) -> dict[str, str]:
    """``name:value,name:value`` as torch reads it."""
    pairs = (part.partition(":") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text is not None else default
    except ValueError:
        return default

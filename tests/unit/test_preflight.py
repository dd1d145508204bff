"""Every check, by name: facts that make it fire, and nearby facts about which it is silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from checkpoint_executor import preflight
from checkpoint_executor.communication import SOCKET, SUSPEND, required_settings
from checkpoint_executor.driver_states import DriverCode, code_name
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
from checkpoint_executor.preflight import CHECKS, Finding, Severity, check_start, explain, worst

NOTE, WARNING, BLOCKER = Severity.NOTE, Severity.WARNING, Severity.BLOCKER

LIBCUDA = LibraryFile(
    "/usr/lib/libcuda.so.580.159.04", "fe:10", 42, version="580.159.04", symbols=tuple(sorted(CHECKPOINT_SYMBOLS))
)
NEW_NCCL = LibraryFile("/opt/nccl/libnccl.so.2", "fe:10", 50, version="2.30.7", symbols=(NCCL_SUSPEND_SYMBOL,))
OLD_NCCL = LibraryFile("/opt/torch/libnccl.so.2", "fe:10", 51, version="2.28.9", symbols=())

ENVIRON = {setting.name: setting.value for setting in required_settings(SUSPEND, 2)}


def target(rank: int = 0, **changes: Any) -> ProcessFacts:
    """A worker with which all is well."""
    good = ProcessFacts(
        pid=100 + rank,
        rank=rank,
        device=f"GPU-{rank}",
        run_state="S",
        uid=1000,
        gid=1000,
        tracing_capability=False,
        pid_namespace="pid:[1]",
        libcuda=LIBCUDA,
        nccl=(NEW_NCCL,),
        uvm_mappings=1,
        devices=("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"),
        threads=("cuda-EvtHandlr", "python3"),
        environ=ENVIRON,
        cpus="0-15",
        nodes=(0,),
        query=StateQuery(state="running"),
    )
    return replace(good, **changes)


HELPER = target(rank=-1, pid=99, device=None, nccl=(), query=None, uvm_mappings=0)

GOOD = Facts(
    host=HostFacts(architecture="x86_64", ptrace_scope=1, huge_pages="always", numa_nodes=2),
    driver=DriverFacts(version="580.159.04", open_module=True, libcuda=LIBCUDA),
    gpus=tuple(GpuFacts(f"GPU-{rank}", "NVIDIA H200", True, False, 0, ("python3",)) for rank in range(2)),
    targets=(target(0), target(1)),
    helper=HELPER,
    communication=SUSPEND,
    ranks=2,
    front_door="own",
)

#: Before anything runs: what ``doctor`` looks at.
ALONE = replace(GOOD, targets=(), communication=None, ranks=None)


def host(**changes: Any) -> Facts:
    return replace(GOOD, host=replace(GOOD.host, **changes))


def driver(version: str = "580.159.04", **changes: Any) -> Facts:
    libcuda = changes.pop("libcuda", replace(LIBCUDA, version=version))
    helper = replace(HELPER, libcuda=libcuda)
    targets = changes.pop("targets", tuple(target(rank, libcuda=libcuda) for rank in range(2)))
    ranks = changes.pop("ranks", 2)
    made = replace(GOOD.driver, version=version, libcuda=libcuda, **changes)
    return replace(GOOD, driver=made, helper=helper, targets=targets, ranks=ranks)


def gpu(**changes: Any) -> Facts:
    return replace(GOOD, gpus=(replace(GOOD.gpus[0], **changes), GOOD.gpus[1]))


def ranks(**changes: Any) -> Facts:
    """Rank 1 is another than it should be."""
    return replace(GOOD, targets=(target(0), target(1, **changes)))


def single(facts: Facts = GOOD, **changes: Any) -> Facts:
    """A single rank, whose company is known to be none."""
    return replace(facts, targets=(target(0, **changes),), ranks=1)


def refused(code: int = DriverCode.OPERATING_SYSTEM) -> StateQuery:
    return StateQuery(code=int(code), code_name=code_name(code))


def environ(**variables: str) -> dict[str, str]:
    return {**ENVIRON, **variables}


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in ENVIRON.items() if key != name}


WATCHED = ("pt_nccl_heartbt", "pt_nccl_watchdg", "python3")
OTHER_LIBCUDA = LibraryFile("/usr/local/cuda/compat/libcuda.so.595.84", "fe:10", 43, version="595.84")
SAME_VERSION = replace(LIBCUDA, path="/other/libcuda.so.580.159.04", inode=44)

#: check -> (what it is about, facts, severity) that fire.
FIRING: dict[str, list[tuple[str, Facts, Severity]]] = {
    "driver_version": [
        ("too old", driver("565.57.01"), BLOCKER),
        ("too old, alone", Facts(driver=DriverFacts(version="550.54.14"), front_door="own"), BLOCKER),
        ("not the one that was measured", driver("580.95.05"), NOTE),
        ("newer", driver("600.10"), NOTE),
    ],
    "driver_symbols": [
        ("one is missing", driver(libcuda=replace(LIBCUDA, symbols=CHECKPOINT_SYMBOLS[:-1])), BLOCKER),
        ("a stub", driver(libcuda=replace(LIBCUDA, symbols=())), BLOCKER),
    ],
    "driver_opens": [("cuInit failed", driver(problem="cuInit: CUDA_ERROR_NO_DEVICE (100)"), BLOCKER)],
    "known_driver": [
        ("hangs the host", driver("595.71.05", open_module=True), BLOCKER),
        ("multi-process lock", driver("575.57.08"), WARNING),
        ("multi-GPU restore", driver("590.44.01"), WARNING),
        ("lock after dlclose of NVML", driver("610.57.04"), WARNING),
        (
            "torch's process group",
            driver(
                "595.84",
                targets=(
                    target(threads=WATCHED, libcuda=OTHER_LIBCUDA, environ=environ(TORCH_NCCL_ENABLE_MONITORING="0")),
                ),
                libcuda=OTHER_LIBCUDA,
                ranks=1,
            ),
            WARNING,
        ),
    ],
    "arm_driver": [("before 595", host(architecture="aarch64"), BLOCKER)],
    "user_mode_driver": [
        ("another version", ranks(libcuda=OTHER_LIBCUDA), BLOCKER),
        ("another file of the same version", ranks(libcuda=SAME_VERSION), WARNING),
        ("no libcuda", ranks(libcuda=None), BLOCKER),
        ("deleted", ranks(libcuda=replace(LIBCUDA, deleted=True)), WARNING),
        ("compatibility package", driver(libcuda=OTHER_LIBCUDA), NOTE),
    ],
    "rights": [
        ("no answer", ranks(query=refused()), BLOCKER),
        ("no answer in time", ranks(query=StateQuery(timed_out=True)), BLOCKER),
        ("another user", ranks(query=refused(), uid=1001), BLOCKER),
        ("another user, not asked", ranks(query=None, uid=1001), BLOCKER),
        ("another pid namespace", ranks(query=None, pid_namespace="pid:[2]"), BLOCKER),
        ("Yama 2", replace(host(ptrace_scope=2), targets=(target(query=None),), ranks=2), BLOCKER),
        ("Yama 3", replace(host(ptrace_scope=3), targets=(target(query=None),), ranks=2), BLOCKER),
        ("hidden", ranks(query=None, hidden=("maps",), libcuda=None), BLOCKER),
        ("a thread id", ranks(leader=False), BLOCKER),
        (
            "soft",
            Facts(device_kind="soft", helper=HELPER, targets=(target(query=refused()),)),
            BLOCKER,
        ),
    ],
    "process_state": [
        ("stopped", ranks(run_state="T", query=None), BLOCKER),
        ("in a debugger", ranks(run_state="t", query=None), BLOCKER),
        ("without CUDA", ranks(query=refused(DriverCode.NOT_INITIALIZED)), BLOCKER),
        ("failed", ranks(query=StateQuery(state="failed")), BLOCKER),
        ("locked", ranks(query=StateQuery(state="locked")), WARNING),
        ("asleep", ranks(query=StateQuery(state="checkpointed")), NOTE),
        ("soft", Facts(device_kind="soft", targets=(target(run_state="T", query=None),)), BLOCKER),
    ],
    "persistence_mode": [("off", gpu(persistence=False), WARNING)],
    "mig": [("on", gpu(mig=True), BLOCKER)],
    "mps": [
        ("a server computes", gpu(processes=("nvidia-cuda-mps-server", "python3")), BLOCKER),
        ("a daemon listens", host(mps_directory="/tmp/nvidia-mps"), BLOCKER),
    ],
    "managed_memory": [("two mappings", ranks(uvm_mappings=2), BLOCKER)],
    "cuda_ipc": [("a shared event", ranks(shared_cuda=("/dev/shm/cuda.shm.0.2ca.1",)), BLOCKER)],
    "open_devices": [
        ("InfiniBand", ranks(devices=("/dev/infiniband/uverbs0", "/dev/nvidia0")), BLOCKER),
        ("GDRCopy", ranks(devices=("/dev/gdrdrv",)), BLOCKER),
    ],
    "profiler": [
        ("injected", ranks(environ=environ(CUDA_INJECTION64_PATH="/opt/nsys/libToolsInjection64.so")), WARNING),
        ("injected by NVTX", ranks(environ=environ(NVTX_INJECTION64_PATH="/opt/x.so")), WARNING),
        ("would be injected", replace(ALONE, environ={"CUDA_INJECTION64_PATH": "/opt/x.so"}), WARNING),
        ("loaded", ranks(profilers=("/opt/nsys/libToolsInjection64.so",)), WARNING),
        ("CUPTI, as torch loads it", ranks(profilers=("/site/nvidia/cu13/lib/libcupti.so.13",)), NOTE),
    ],
    "nccl_suspend": [
        ("too old", ranks(nccl=(OLD_NCCL,)), BLOCKER),
        ("two libraries", ranks(nccl=(OLD_NCCL, NEW_NCCL)), WARNING),
        ("too old, of unknown company", replace(ranks(nccl=(OLD_NCCL,)), ranks=None), WARNING),
        ("what would be loaded", replace(ALONE, host=replace(GOOD.host, nccl=(OLD_NCCL,))), WARNING),
    ],
    "communication_environment": [
        ("one is missing", ranks(environ=without("NCCL_CUMEM_ENABLE")), BLOCKER),
        ("multicast is on", ranks(environ=environ(NCCL_NVLS_ENABLE="1")), BLOCKER),
        ("not the one that was asked for", replace(GOOD, communication=SOCKET), BLOCKER),
    ],
    "expandable_segments": [
        ("on", ranks(environ=environ(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")), BLOCKER),
        ("on, in the new spelling", single(environ={"PYTORCH_ALLOC_CONF": "a:1, expandable_segments:true"}), BLOCKER),
        ("would be on", replace(ALONE, environ={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}), BLOCKER),
    ],
    "torch_heartbeat": [
        ("the default, no limit to sleeps", ranks(threads=WATCHED), WARNING),
        (
            "shorter than the longest sleep",
            replace(
                ranks(threads=WATCHED, environ=environ(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="600")), longest_sleep_s=3600.0
            ),
            WARNING,
        ),
    ],
    "transparent_huge_pages": [
        ("madvise", host(huge_pages="madvise"), NOTE),
        ("never", host(huge_pages="never"), NOTE),
    ],
    "numa_placement": [
        ("on both nodes", ranks(nodes=(0, 1), cpus="0-31"), NOTE),
        ("on the other node", ranks(nodes=(1,), cpus="16-31"), NOTE),
    ],
    "module_loading": [
        ("eager", single(environ={"CUDA_MODULE_LOADING": "EAGER"}), WARNING),
        ("would be eager", replace(ALONE, environ={"CUDA_MODULE_LOADING": "eager"}), WARNING),
    ],
    "pinned_memory": [
        ("vLLM", replace(single(environ={}), front_door="vllm"), NOTE),
        ("nothing runs yet", replace(ALONE, front_door=None), NOTE),
    ],
}

#: check -> (what it is about, facts) that look alike and say nothing.
SILENT: dict[str, list[tuple[str, Facts]]] = {
    "driver_version": [("measured", driver("580.159.04")), ("not known", replace(GOOD, driver=DriverFacts()))],
    "driver_symbols": [("all there", driver()), ("unreadable", driver(libcuda=replace(LIBCUDA, symbols=None)))],
    "driver_opens": [("opened", driver(problem=None))],
    "known_driver": [
        ("proprietary module", driver("595.71.05", open_module=False)),
        ("module not known", driver("595.71.05", open_module=None)),
        ("a neighbour", driver("595.71.06", open_module=True)),
        ("one rank", driver("575.57.08", ranks=1, targets=(target(),))),
        ("a longer number", driver("5750.1")),
    ],
    "arm_driver": [
        ("x86", host(architecture="x86_64")),
        ("new enough", replace(driver("595.84"), host=HostFacts("aarch64"))),
    ],
    "user_mode_driver": [
        ("one file under two names", ranks(libcuda=replace(LIBCUDA, path="/link/libcuda.so.580.159.04"))),
        ("maps could not be read", ranks(libcuda=None, hidden=("maps",), query=None)),
    ],
    "rights": [
        ("proved, whatever it looks like", ranks(uid=1001, pid_namespace="pid:[2]", hidden=("fd",))),
        ("proved by another error", ranks(query=refused(DriverCode.NOT_INITIALIZED))),
        ("not asked, nothing in the way", ranks(query=None)),
        ("no Yama", replace(host(ptrace_scope=None), targets=(target(query=None),))),
        (
            "capable",
            replace(
                host(ptrace_scope=2),
                helper=replace(HELPER, tracing_capability=True),
                targets=(target(query=None, uid=0),),
            ),
        ),
    ],
    "process_state": [("sleeping in the kernel", ranks(run_state="D")), ("not asked", ranks(query=None))],
    "persistence_mode": [("on", gpu(persistence=True)), ("not known", gpu(persistence=None))],
    "mig": [("off", gpu(mig=False)), ("not known to this GPU", gpu(mig=None))],
    "mps": [("others compute", gpu(processes=("python3", "Xorg")))],
    "managed_memory": [("one mapping", ranks(uvm_mappings=1)), ("none", ranks(uvm_mappings=0))],
    "cuda_ipc": [("nothing shared", ranks(shared_cuda=()))],
    "open_devices": [("NVIDIA's own", ranks(devices=("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1")))],
    "profiler": [("set to nothing", ranks(environ=environ(CUDA_INJECTION64_PATH="")))],
    "nccl_suspend": [
        ("new enough", ranks(nccl=(NEW_NCCL,))),
        ("one rank", single(nccl=(OLD_NCCL,))),
        ("socket-only", replace(ranks(nccl=(OLD_NCCL,)), communication=SOCKET)),
        ("unreadable", ranks(nccl=(replace(OLD_NCCL, symbols=None),))),
        ("none loaded", ranks(nccl=())),
    ],
    "communication_environment": [
        ("one rank", single(environ={})),
        ("of unknown company", replace(ranks(environ={}), ranks=None)),
        ("unreadable", ranks(environ={}, hidden=("environ",))),
    ],
    "expandable_segments": [
        ("off", single(environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})),
        ("another option", single(environ={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})),
    ],
    "torch_heartbeat": [
        ("no process group of torch's", ranks(threads=("python3",))),
        ("monitor off", ranks(threads=WATCHED, environ=environ(TORCH_NCCL_ENABLE_MONITORING="0"))),
        ("long enough", replace(ranks(threads=WATCHED), longest_sleep_s=60.0)),
    ],
    "transparent_huge_pages": [("always", host(huge_pages="always")), ("not known", host(huge_pages=None))],
    "numa_placement": [
        ("bound", ranks(nodes=(0,))),
        ("the GPU's node is not known", replace(ranks(nodes=(0, 1)), gpus=(GpuFacts("GPU-1", numa_node=-1),))),
        ("one node", replace(ranks(nodes=(0, 1)), host=replace(GOOD.host, numa_nodes=1))),
    ],
    "module_loading": [
        ("torch chooses", single(environ={})),
        ("lazy", single(environ={"CUDA_MODULE_LOADING": "LAZY"})),
    ],
    "pinned_memory": [
        ("our own workers", single(environ={})),
        (
            "set",
            replace(
                single(environ={"PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:True"}), front_door="vllm"
            ),
        ),
    ],
}


def by_check(cases: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, *case[1:], id=f"{name}: {case[0]}") for name, some in cases.items() for case in some]


def test_every_check_has_a_case_that_fires_and_one_that_is_silent() -> None:
    assert set(FIRING) == set(SILENT) == set(CHECKS)


def test_nothing_is_found_where_all_is_well() -> None:
    assert check_start(GOOD) == ()
    assert check_start(single()) == ()
    assert check_start(ALONE) == ()
    assert check_start(Facts(device_kind="soft", helper=HELPER, targets=(target(),))) == ()


def test_what_is_not_known_is_not_judged() -> None:
    # But torch's way of pinning memory, which is its default.
    assert {finding.check for finding in check_start(Facts())} == {"pinned_memory"}
    assert check_start(Facts(device_kind="soft")) == ()


@pytest.mark.parametrize(("name", "facts", "severity"), by_check(FIRING))
def test_it_fires(name: str, facts: Facts, severity: Severity) -> None:
    found = [finding for finding in CHECKS[name].find(facts) if finding.severity is severity]
    assert found
    for finding in found:
        assert finding.check == name
        assert all((finding.about, finding.seen, finding.why, finding.do))
    # Nothing is found twice.
    assert len(set(map(msgspec.json.encode, check_start(facts)))) == len(check_start(facts))


@pytest.mark.parametrize(("name", "facts", "severity"), by_check(FIRING))
def test_it_is_the_only_one_that_fires(name: str, facts: Facts, severity: Severity) -> None:
    others = {finding.check for finding in check_start(facts)} - {name}
    # A driver that is not the measured one is said so, whatever else is wrong with it.
    assert others <= ({"driver_version"} if name == "known_driver" else set())


@pytest.mark.parametrize(("name", "facts"), by_check(SILENT))
def test_it_is_silent(name: str, facts: Facts) -> None:
    assert list(CHECKS[name].find(facts)) == []


def test_a_finding_names_the_rank_and_not_its_peers() -> None:
    [finding] = check_start(ranks(uvm_mappings=3))
    assert finding.about == "rank 1 (pid 101)"
    assert "3 mappings" in finding.seen


def test_a_failed_query_says_what_may_be_the_reason_and_the_remedy() -> None:
    facts = replace(ranks(query=refused(), uid=1001, pid_namespace="pid:[2]"), host=replace(GOOD.host, ptrace_scope=1))
    [finding] = check_start(facts)
    assert "CUDA_ERROR_OPERATING_SYSTEM (304)" in finding.seen
    assert "user 1001" in finding.seen
    assert "pid:[2]" in finding.seen
    assert "ptrace_scope is 1" in finding.seen
    assert "PR_SET_PTRACER" in finding.do
    assert "CAP_SYS_PTRACE" in finding.do


def test_the_worst_comes_first() -> None:
    facts = replace(
        GOOD,
        host=replace(GOOD.host, huge_pages="never"),
        gpus=(replace(GOOD.gpus[0], persistence=False, mig=True), GOOD.gpus[1]),
    )
    found = check_start(facts)
    assert [finding.severity for finding in found] == [BLOCKER, WARNING, NOTE]
    assert worst(found) is BLOCKER
    assert worst(found[1:]) is WARNING
    assert worst(()) is None


def test_checks_of_the_real_driver_say_nothing_about_the_software_device() -> None:
    bad = replace(ranks(uvm_mappings=2, nccl=(OLD_NCCL,)), device_kind="soft", driver=DriverFacts(version="1.0"))
    assert check_start(bad) == ()


def test_an_explanation_has_a_line_for_each_finding() -> None:
    found = check_start(ranks(uvm_mappings=2, shared_cuda=("/dev/shm/cuda.shm.0.1.1",)))
    lines = explain(found).splitlines()
    assert len(lines) == 2
    for line, finding in zip(lines, found, strict=True):
        assert finding.about in line
        assert finding.do in line


def test_findings_survive_the_wire() -> None:
    found = check_start(ranks(uvm_mappings=2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=tuple[Finding, ...]) == found


def test_every_check_has_a_section_in_the_documentation_with_its_remedy() -> None:
    text = (Path(__file__).parents[2] / "docs/preflight.md").read_text()
    headings = re.findall(r"^### `(\w+)`", text, flags=re.MULTILINE)
    assert headings == list(CHECKS)


def test_the_oldest_nccl_is_the_one_that_workers_ask_for() -> None:
    source = (Path(__file__).parents[2] / "workers/cuda_communicator.py").read_text()
    assert f'COLLECTIVES_NEED = "{preflight.OLDEST_NCCL}"' in source

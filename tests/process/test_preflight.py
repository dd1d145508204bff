"""The preflight and the doctor against real processes: workers and helpers of a running executor, and the self-test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from checkpoint_executor import CUDACheckpointExecutor, doctor, host_facts, preflight, procfs, self_test
from checkpoint_executor.doctor import ExitStatus, Options
from checkpoint_executor.facts import StateQuery
from checkpoint_executor.helper.preflight import inspect
from checkpoint_executor.host_facts import Roots
from checkpoint_executor.messages import Role, Target
from checkpoint_executor.preflight import Finding
from checkpoint_executor.self_test import SelfTestSpec
from tests.support.executor_harness import REPOSITORY, SoftMachine, state_of, wait_until


def worker_pid(executor: CUDACheckpointExecutor, rank: int = 0) -> int:
    return executor.pids[f"worker {rank}"]


# -- facts of real processes ---------------------------------------------------------------------


def test_a_worker_and_its_helper_are_what_they_were_told_to_be(executor: CUDACheckpointExecutor) -> None:
    for rank in range(2):
        spec = host_facts.spec_of(worker_pid(executor, rank))
        assert spec is not None
        assert (spec.role, spec.rank, spec.world_size, spec.device_kind) == (Role.WORKER, rank, 2, "soft")
        assert spec.helper_pid == executor.pids["helper"]
    helper = host_facts.spec_of(executor.pids["helper"])
    assert helper is not None
    assert helper.role is Role.HELPER
    assert host_facts.spec_of(os.getpid()) is None


def test_a_worker_is_read_without_anything_hidden(executor: CUDACheckpointExecutor) -> None:
    found = host_facts.collect_target(worker_pid(executor), rank=0)
    assert found.hidden == ()
    assert found.uid == os.getuid()
    assert found.pid_namespace == os.readlink("/proc/self/ns/pid")
    assert found.libcuda is None


def test_collecting_and_judging_takes_a_tenth_of_what_a_start_may_lose(executor: CUDACheckpointExecutor) -> None:
    begun = time.monotonic()
    targets = [
        host_facts.collect_target(worker_pid(executor, rank), rank=rank, query=StateQuery(state="running"))
        for rank in range(2)
    ]
    findings = preflight.check_start(host_facts.collect(targets, ranks=2, front_door="own"))
    elapsed_s = time.monotonic() - begun
    # As on a GPU, where these processes would have to use CUDA.
    assert {finding.check for finding in findings} >= {"user_mode_driver"}
    assert elapsed_s < 0.5, f"{elapsed_s:.3f} s"


def test_a_helper_inspects_its_workers_and_misses_none_that_ended(executor: CUDACheckpointExecutor) -> None:
    gone = Target(1, 2**22 + 1, 0, "")
    alive = Target(0, worker_pid(executor), procfs.start_time(worker_pid(executor)), "SOFT-0")

    def find(asked: list[tuple[Target, StateQuery]]) -> tuple[Finding, ...]:
        return inspect(asked, device_kind="soft", communication="suspend", ranks=2, front_door="own")

    assert find([(alive, StateQuery(state="running")), (gone, StateQuery(message="gone"))]) == ()
    [finding] = find([(alive, StateQuery(code=304))])
    assert (finding.check, finding.about) == ("rights", f"rank 0 (pid {alive.pid})")


# -- doctor --pid --------------------------------------------------------------------------------


def test_a_running_worker_is_asked_and_answers(executor: CUDACheckpointExecutor) -> None:
    report = doctor.examine(Options("soft", worker_pid(executor, 1)))
    assert report.exit_status is ExitStatus.OK
    assert report.findings == ()
    assert report.facts is not None
    [target] = report.facts.targets
    assert (target.pid, target.rank, target.query) == (worker_pid(executor, 1), 1, StateQuery(state="running"))
    assert report.facts.helper is not None
    assert report.facts.helper.pid == executor.pids["helper"]
    assert (report.facts.ranks, report.facts.communication, report.facts.front_door) == (2, "suspend", "own")


def test_a_sleeping_worker_is_asked_and_stays_asleep(executor: CUDACheckpointExecutor) -> None:
    executor.sleep()
    try:
        report = doctor.examine(Options("soft", worker_pid(executor)))
        assert report.exit_status is ExitStatus.OK
        assert [(finding.check, finding.seen) for finding in report.findings] == [
            ("process_state", "it is checkpointed")
        ]
        assert state_of(executor, 0) == "checkpointed"
    finally:
        executor.wake_up()


def test_the_pid_of_the_executors_process_stands_for_its_workers(machine: SoftMachine) -> None:
    parent = machine.parent()
    pids = parent.request("build")
    report = doctor.examine(Options("soft", parent.target.pid))
    assert report.exit_status is ExitStatus.OK
    assert report.facts is not None
    assert {target.rank: target.pid for target in report.facts.targets} == {
        rank: pids[f"worker {rank}"] for rank in range(2)
    }


def test_a_stopped_worker_is_not_asked(machine: SoftMachine) -> None:
    executor = machine.make()
    pid = worker_pid(executor)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: procfs.is_stopped(pid), "the worker is stopped")
        report = doctor.examine(Options("soft", pid))
        assert report.exit_status is ExitStatus.BLOCKERS
        assert [finding.check for finding in report.findings] == ["process_state"]
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_process_without_a_device_is_a_blocker() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        report = doctor.examine(Options("soft", other.pid))
        other.kill()
    assert report.exit_status is ExitStatus.BLOCKERS
    assert {finding.about for finding in report.findings} == {f"process {other.pid}"}


def test_a_probe_that_hangs_is_killed_and_counts_as_no_answer(executor: CUDACheckpointExecutor) -> None:
    pid = worker_pid(executor)
    driver, queries = doctor.probe("soft", [pid], timeout_s=0.001)
    assert driver.problem == "no answer within 0.001 s"
    assert queries == {pid: StateQuery(timed_out=True)}


# -- the command ---------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "checkpoint_executor.doctor", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(host_facts.has_gpu(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so_in_one_line_and_ends_with_its_own_status() -> None:
    done = command()
    assert (done.returncode, done.stderr) == (ExitStatus.NO_GPU, "")
    assert done.stdout.count("\n") == 1
    assert "no NVIDIA GPU" in done.stdout
    done = command("--json")
    assert (done.returncode, json.loads(done.stdout)["exit_status"]) == (ExitStatus.NO_GPU, ExitStatus.NO_GPU)


@pytest.mark.skipif(host_facts.has_gpu(), reason="this machine has a driver")
def test_a_machine_with_device_files_and_no_driver_is_told_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    report = doctor.examine(Options(), Roots(dev=tmp_path))
    assert report.exit_status is ExitStatus.BLOCKERS
    assert [finding.check for finding in report.findings if finding.severity == "blocker"] == ["driver_opens"]


def test_the_self_test_passes_on_the_software_device() -> None:
    done = command("--device", "soft", "--self-test", "--json")
    assert done.returncode == ExitStatus.OK, done.stdout + done.stderr
    tested = json.loads(done.stdout)["self_test"]
    assert tested["problems"] == []
    assert [cycle["identical"] for cycle in tested["cycles"]] == [True, True]
    for cycle in tested["cycles"]:
        [awake], [asleep], [woken] = (
            cycle["sleep"]["device_bytes_before"],
            cycle["sleep"]["device_bytes_after"],
            cycle["wake"]["device_bytes_after"],
        )
        assert awake == woken > 16 << 20
        assert asleep == 0
        assert {"checkpoint", "lock"} <= {stage["name"] for stage in cycle["sleep"]["stages"]}


# -- the self-test's own end ---------------------------------------------------------------------


def test_a_self_test_that_hangs_is_killed_with_everything_below_it() -> None:
    spec = SelfTestSpec("soft", worker="tests.support.preflight_workers:HangingWorker")
    report = self_test.run(spec, timeout_s=1.5)
    assert report.problems == ("it was not done within 1.5 s, and everything it had started was killed",)
    assert not report.passed
    left = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any("preflight_workers" in part for part in process.info["cmdline"] or ())
    ]
    assert left == []


def test_a_self_test_whose_worker_cannot_be_built_says_why() -> None:
    report = self_test.run(SelfTestSpec("soft", worker="tests.support.preflight_workers:FailingWorker"))
    [problem] = report.problems
    assert "StartError" in problem
    assert "it does not like this machine" in problem


def test_a_self_test_sees_a_graph_that_computes_something_else() -> None:
    report = self_test.run(SelfTestSpec("soft", worker="tests.support.preflight_workers:ForgetfulWorker"))
    assert [cycle.identical for cycle in report.cycles] == [False, False]
    assert report.problems[0] == "cycle 1: the graph computed other bits after the wake than before the sleep"


def test_a_self_test_that_dies_is_reported() -> None:
    report = self_test.run(SelfTestSpec("no such device"))
    [problem] = report.problems
    assert "ConfigError" in problem

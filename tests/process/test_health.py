"""Status, findings and metrics of real executors: in every phase, from outside, and after the end."""

from __future__ import annotations

import os
import urllib.error
import urllib.request

import pytest

from checkpoint_executor import BusyError, ConfigError, FatalError, InsufficientMemoryError, metrics
from checkpoint_executor.faults import Fault
from checkpoint_executor.softgpu import LOCAL_MEMORY_BYTES
from tests.support.executor_harness import Gate, SoftMachine, in_thread, inject_worker
from tests.support.executor_workers import KV_CACHE_BYTES, WEIGHTS_BYTES


def test_the_status_tells_a_whole_life(machine: SoftMachine) -> None:
    executor = machine.make(ranks=2)
    status = executor.status()
    assert (status.phase, status.live, status.ready, status.cycles) == ("awake", True, True, 0)
    assert status.operations == {"start": 1}
    assert [(rank.rank, rank.pid) for rank in status.ranks] == [
        (0, executor.pids["worker 0"]),
        (1, executor.pids["worker 1"]),
    ]

    executor.sleep()
    status = executor.status()
    assert (status.phase, status.live, status.ready) == ("checkpointed", True, False)
    assert status.sleeping == ("kv_cache", "weights")
    for rank in status.ranks:
        assert rank.device == machine.gpu(rank.rank).name
        assert rank.device_bytes == 0
        assert rank.wake_bytes["weights"] >= WEIGHTS_BYTES
        assert rank.wake_bytes["kv_cache"] >= KV_CACHE_BYTES
        assert rank.wake_bytes["local_memory"] == LOCAL_MEMORY_BYTES

    executor.wake_up(["weights"])
    status = executor.status()
    assert (status.phase, status.live, status.ready, status.cycles) == ("awake", True, False, 0)
    executor.wake_up()
    status = executor.status()
    assert (status.live, status.ready, status.cycles) == (True, True, 1)
    assert status.last_report == executor.last_report
    assert [rank.device_bytes for rank in status.ranks] == machine.used_bytes(2)

    executor.sleep(level=0)
    assert not executor.status().ready
    executor.wake_up()
    executor.shutdown()
    status = executor.status()
    assert (status.phase, status.live, status.ready, status.failure) == ("closed", False, False, None)


def test_since_is_when_the_phase_began(machine: SoftMachine) -> None:
    executor = machine.make()
    awake = executor.status().since_s
    executor.collective_rpc("identify")
    assert executor.status().since_s == awake
    executor.sleep()
    assert executor.status().since_s > awake


def test_a_refusal_is_remembered_and_harms_nothing(machine: SoftMachine) -> None:
    executor = machine.make()
    executor.sleep()
    other = machine.take_all_but(1 << 20)
    with pytest.raises(InsufficientMemoryError) as refused:
        executor.wake_up()
    status = executor.status()
    assert (status.phase, status.live, status.ready) == ("checkpointed", True, False)
    assert status.refusals == {"no_memory": 1}
    assert status.last_refusal is not None
    assert status.last_refusal.message == str(refused.value)
    other.kill()
    executor.wake_up()
    assert executor.status().ready


def test_the_status_answers_while_a_call_is_in_progress(machine: SoftMachine, gate: Gate) -> None:
    executor = machine.make()
    call = in_thread(executor.collective_rpc, "wait_at", args=(gate.path,))
    gate.wait_reached()
    with pytest.raises(BusyError):
        executor.sleep()
    assert executor.status().refusals == {"busy": 1}
    assert executor.status().live
    gate.open()
    call.result()


def test_a_failure_has_a_cause_and_is_dead(machine: SoftMachine) -> None:
    executor = machine.make(faults=(inject_worker(Fault.EXCEPTION, 0, "confirm_resumed"),))
    executor.sleep()
    with pytest.raises(FatalError) as fatal:
        executor.wake_up()
    status = executor.status()
    assert (status.phase, status.live, status.ready) == ("failed", False, False)
    assert status.failure is not None
    assert (status.failure.cause, status.failure.stage) == ("stage_error", "confirm_resumed")
    assert status.failure.message == str(fatal.value)


def test_a_death_while_asleep_is_a_failure(machine: SoftMachine) -> None:
    executor = machine.make()
    executor.sleep()
    os.kill(executor.pids["worker 0"], 9)
    with pytest.raises(FatalError):
        executor.wake_up()
    failure = executor.status().failure
    assert failure is not None
    assert failure.cause == "process_exit"


def test_the_preflight_is_made_at_the_start_and_costs_little(machine: SoftMachine) -> None:
    executor = machine.make(ranks=2)
    assert executor.findings == ()
    report = executor.status().last_report
    assert report is not None
    assert report.operation == "start"
    [register] = [stage for stage in report.stages if stage.name == "register"]
    assert register.wall_s < 0.5


def test_only_checks_that_exist_can_be_ignored(machine: SoftMachine) -> None:
    machine.make(ignore_preflight=("open_devices", "cuda_ipc"))
    with pytest.raises(ConfigError, match="no_such_check"):
        machine.make(ignore_preflight=("no_such_check",))


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_probes_and_metrics_answer_while_asleep(machine: SoftMachine) -> None:
    executor = machine.make()
    with metrics.serve(executor, port=0) as server:
        assert get(server.port, "/readyz") == (200, "awake\n")
        executor.sleep()
        assert get(server.port, "/livez") == (200, "checkpointed\n")
        assert get(server.port, "/readyz") == (503, "checkpointed\n")
        text = get(server.port, "/metrics")[1]
        assert 'checkpoint_executor_phase{phase="checkpointed"} 1.0' in text
        assert 'checkpoint_executor_operations_total{operation="sleep"} 1.0' in text
        assert 'checkpoint_executor_stage_seconds_count{operation="sleep",stage="checkpoint"} 1.0' in text
        assert 'kind="weights",rank="0",state="asleep"' in text
        executor.wake_up()
        assert get(server.port, "/readyz") == (200, "awake\n")
        executor.shutdown()
        assert get(server.port, "/livez") == (503, "closed\n")

"""Metrics and probes of an executor that is nothing but its health."""

from __future__ import annotations

import gc
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from checkpoint_executor import metrics
from checkpoint_executor.health import HealthRecord, HealthStatus, RankFootprint
from checkpoint_executor.metrics import ExecutorMetrics, MetricsServer
from checkpoint_executor.report import CycleReport, StageReport

ALL = frozenset({"weights", "kv_cache"})


class Executor:
    """What metrics need of one."""

    def __init__(self) -> None:
        self.health = HealthRecord("awake", 100.0)
        kinds = {"weights": 100, "kv_cache": 50, "suspendable": 7, "local_memory": 3}
        self.ranks = (RankFootprint(0, 10, "GPU-0", 4 << 20, kinds),)

    def status(self) -> HealthStatus:
        return self.health.status(self.ranks)


@pytest.fixture
def executor() -> Executor:
    return Executor()


def sleep_report() -> CycleReport:
    return CycleReport(
        "sleep", True, 0.9, (StageReport("lock", 0.002, (0.001,)), StageReport("checkpoint", 0.8, (0.7,)))
    )


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"checkpoint_executor_{name}", labels)


def test_operations_and_stages_are_counted_and_timed(executor: Executor) -> None:
    registry = ExecutorMetrics(executor).registry
    executor.health.operated(sleep_report(), 1.0)
    executor.health.operated(sleep_report(), 2.0)
    assert value(registry, "operations_total", operation="sleep") == 2
    assert value(registry, "operation_seconds_sum", operation="sleep") == pytest.approx(1.8)
    assert value(registry, "stage_seconds_count", operation="sleep", stage="checkpoint") == 2
    assert value(registry, "stage_seconds_bucket", operation="sleep", stage="lock", le="0.003") == 2
    assert value(registry, "stage_seconds_bucket", operation="sleep", stage="checkpoint", le="0.5") == 0


def test_refusals_and_failures_are_counted_by_cause(executor: Executor) -> None:
    registry = ExecutorMetrics(executor).registry
    executor.health.refused("no_memory", "GPU-0 lacks 5 bytes", 1.0)
    executor.health.failed("deadline", "restore", "no answer", 2.0)
    assert value(registry, "refusals_total", cause="no_memory") == 1
    assert value(registry, "failures_total", cause="deadline", stage="restore") == 1


def test_phase_readiness_and_cycles_are_those_of_now(executor: Executor) -> None:
    registry = ExecutorMetrics(executor).registry
    assert (value(registry, "phase", phase="awake"), value(registry, "ready")) == (1, 1)
    executor.health.phase_is("checkpointed", ALL, False, 200.0)
    assert (value(registry, "phase", phase="awake"), value(registry, "phase", phase="checkpointed")) == (0, 1)
    assert (value(registry, "ready"), value(registry, "phase_since_seconds"), value(registry, "cycles")) == (0, 200, 0)


def test_bytes_are_told_by_rank_device_kind_and_whether_they_sleep(executor: Executor) -> None:
    registry = ExecutorMetrics(executor).registry

    def held(kind: str, state: str) -> float | None:
        return value(registry, "bytes", rank="0", device="GPU-0", kind=kind, state=state)

    kinds = ("weights", "kv_cache", "suspendable", "local_memory")
    assert [held(kind, "resident") for kind in kinds] == [100, 50, 7, 3]
    executor.health.phase_is("checkpointed", ALL, False, 1.0)
    assert [held(kind, "asleep") for kind in kinds] == [100, 50, 7, 3]
    executor.health.phase_is("awake", frozenset({"kv_cache"}), False, 2.0)
    assert held("weights", "resident") == 100
    assert held("kv_cache", "asleep") == 50
    assert [held(kind, "resident") for kind in ("suspendable", "local_memory")] == [7, 3]
    assert value(registry, "device_used_bytes", rank="0", device="GPU-0") == 4 << 20


def test_a_registry_takes_one_executor(executor: Executor) -> None:
    registry = CollectorRegistry()
    ExecutorMetrics(executor, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        ExecutorMetrics(Executor(), registry)


def test_metrics_keep_no_executor_alive() -> None:
    executor = Executor()
    kept = ExecutorMetrics(executor)
    executor.health.operated(sleep_report(), 1.0)
    del executor
    gc.collect()
    assert value(kept.registry, "phase", phase="awake") is None
    assert value(kept.registry, "operations_total", operation="sleep") == 1


def test_a_closed_one_counts_no_longer(executor: Executor) -> None:
    closed = ExecutorMetrics(executor)
    closed.close()
    closed.close()
    executor.health.operated(sleep_report(), 1.0)
    assert value(closed.registry, "operations_total", operation="sleep") is None
    assert executor.health.listeners == []


# -- HTTP ----------------------------------------------------------------------------------------


@pytest.fixture
def server(executor: Executor) -> Iterator[MetricsServer]:
    with metrics.serve(executor, port=0) as serving:
        yield serving


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_scrape_is_valid_and_holds_every_family(executor: Executor, server: MetricsServer) -> None:
    executor.health.operated(sleep_report(), 1.0)
    executor.health.refused("busy", "no", 1.0)
    executor.health.failed("crash", None, "boom", 1.0)
    status, text = get(server, "/metrics")
    assert status == 200
    families = {family.name for family in text_string_to_metric_families(text)}
    names = ("phase", "phase_since_seconds", "ready", "cycles", "bytes", "device_used_bytes", "operations")
    more = ("operation_seconds", "stage_seconds", "refusals", "failures")
    assert {f"checkpoint_executor_{name}" for name in (*names, *more)} <= families


def test_asleep_is_alive_and_not_ready(executor: Executor, server: MetricsServer) -> None:
    assert (get(server, "/livez"), get(server, "/readyz")) == ((200, "awake\n"), (200, "awake\n"))
    for phase in ("suspending", "checkpointed", "resuming"):
        executor.health.phase_is(phase, ALL, False, 1.0)
        assert (get(server, "/livez"), get(server, "/readyz")) == ((200, f"{phase}\n"), (503, f"{phase}\n"))
    executor.health.phase_is("failed", ALL, False, 2.0)
    assert (get(server, "/livez"), get(server, "/readyz")) == ((503, "failed\n"), (503, "failed\n"))


def test_another_path_is_not_found(server: MetricsServer) -> None:
    assert get(server, "/")[0] == 404


def test_a_server_ends_with_its_port(executor: Executor) -> None:
    server = metrics.serve(executor, port=0)
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server, "/livez")
    again = metrics.serve(executor, port=server.port)
    again.close()

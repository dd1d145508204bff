"""I/O. Prometheus metrics of an executor, and an HTTP server with them and the two probes of an orchestrator.

Needs the extra ``metrics`` (``prometheus_client``). Counters and histograms are fed by the executor's events; phase
and bytes are read from its status when somebody scrapes. Neither asks a worker or the GPU anything, so all of it
answers while the workers are checkpointed. ``docs/preflight.md`` has the names, and probes for Kubernetes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric

from checkpoint_executor.coordinator import Phase
from checkpoint_executor.health import Failure, HealthEvent, HealthRecord, HealthStatus, Operated, Refused
from checkpoint_executor.tags import ALL_TAGS

__all__ = ["ExecutorMetrics", "MetricsServer", "Observable", "serve"]

#: From a lock of one millisecond to the deadline of two minutes.
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)

#: How soon a server notices that it shall end.
_POLL_S = 0.1


class Observable(Protocol):
    """What is needed of an executor."""

    @property
    def health(self) -> HealthRecord: ...

    def status(self) -> HealthStatus: ...


class ExecutorMetrics:
    """The metrics of one executor, in a registry.

    Args:
        executor: watched until it is collected as garbage; its metrics stay readable after it was shut down.
        registry: where to register; by default one of its own. A registry takes one executor.

    Raises:
        ValueError: the registry has an executor already.
    """

    def __init__(self, executor: Observable, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry if registry is not None else CollectorRegistry()
        # A strong reference would keep an executor that nobody else has, and its workers, alive.
        self._executor = weakref.ref(executor)

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"checkpoint_executor_{name}", help_, labels, registry=registry)

        def histogram(name: str, help_: str, *labels: str) -> Histogram:
            return Histogram(f"checkpoint_executor_{name}", help_, labels, buckets=_BUCKETS_S, registry=registry)

        self._operations = counter("operations", "Starts, sleeps, releases and wakes carried out", "operation")
        self._operation_s = histogram("operation_seconds", "Wall time of a whole call", "operation")
        self._stage_s = histogram("stage_seconds", "Wall time of a stage, all ranks together", "operation", "stage")
        self._refusals = counter("refusals", "Requests not carried out; the executor was unharmed", "cause")
        self._failures = counter("failures", "Fatal errors; everything was killed", "cause", "stage")
        registry.register(self)
        executor.health.listeners.append(self._handle)

    def close(self) -> None:
        """Watch no longer. The counters stay in the registry."""
        executor = self._executor()
        if executor is not None and self._handle in executor.health.listeners:
            executor.health.listeners.remove(self._handle)
            self.registry.unregister(self)

    def _handle(self, event: HealthEvent) -> None:
        match event:
            case Operated(report):
                self._operations.labels(report.operation).inc()
                self._operation_s.labels(report.operation).observe(report.wall_s)
                for stage in report.stages:
                    self._stage_s.labels(report.operation, stage.name).observe(stage.wall_s)
            case Refused(cause):
                self._refusals.labels(cause).inc()
            case Failure(cause, stage):
                self._failures.labels(cause, stage or "").inc()
            case _:
                pass  # the phase is read when somebody asks

    def collect(self) -> Iterator[Metric]:
        """What is true now, for a scrape."""
        executor = self._executor()
        if executor is None:
            return
        status = executor.status()
        phase = _gauge("phase", "1 for the phase that the executor is in", "phase")
        for known in Phase:
            phase.add_metric([known.value], float(known.value == status.phase))
        yield phase
        yield _gauge("phase_since_seconds", "When the phase began, since 1970", value=status.since_s)
        yield _gauge("ready", "1 if it can take work", value=float(status.ready))
        yield _gauge("cycles", "Sleeps that were woken from", value=float(status.cycles))
        held = _gauge("bytes", "Device bytes of a rank, resident or asleep, by kind", "rank", "device", "kind", "state")
        used = _gauge("device_used_bytes", "Bytes in use on the device, by everybody, when last read", "rank", "device")
        for rank in status.ranks:
            for kind, size in rank.wake_bytes.items():
                state = "asleep" if _is_asleep(kind, status) else "resident"
                held.add_metric([str(rank.rank), rank.device, kind, state], float(size))
            if rank.device_bytes is not None:
                used.add_metric([str(rank.rank), rank.device], float(rank.device_bytes))
        yield held
        yield used

    def describe(self) -> Iterable[Metric]:
        """Nothing: so that registering asks the executor nothing yet."""
        return ()


def _is_asleep(kind: str, status: HealthStatus) -> bool:
    # What communicators and the context give up is back as soon as the process is.
    return kind in status.sleeping if kind in ALL_TAGS else status.phase == Phase.CHECKPOINTED


def _gauge(name: str, help_: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"checkpoint_executor_{name}", help_, value=value, labels=labels or None)


# -- HTTP ----------------------------------------------------------------------------------------


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a slow scraper must not keep the interpreter from exiting


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass  # a probe every few seconds is no news


class MetricsServer:
    """Answers ``/metrics``, ``/livez`` and ``/readyz`` until it is closed. ``port`` is the one it listens on."""

    def __init__(self, executor: Observable, metrics: ExecutorMetrics, host: str, port: int) -> None:
        self.metrics = metrics
        self._server = make_server(
            host, port, _application(executor, metrics), server_class=_Server, handler_class=_QuietHandler
        )
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="checkpoint-executor-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self.metrics.close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def serve(executor: Observable, port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve an executor's metrics and probes in a thread of this process.

    Args:
        executor: which. port: 0 takes a free one. host: ``"0.0.0.0"`` for a kubelet, which comes from outside.

    Raises:
        OSError: the port is taken.
    """
    return MetricsServer(executor, ExecutorMetrics(executor), host, port)


def _application(executor: Observable, metrics: ExecutorMetrics) -> Callable[..., Iterable[bytes]]:
    watched = weakref.ref(executor)
    scrape = make_wsgi_app(metrics.registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            result: Iterable[bytes] = scrape(environ, start_response)
            return result
        found = watched()
        status = found.status() if found is not None else None
        if path == "/livez":
            good = status is not None and status.live
        elif path == "/readyz":
            good = status is not None and status.ready
        else:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"/metrics, /livez, /readyz\n"]
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [(status.phase if status is not None else "gone").encode() + b"\n"]

    return answer

"""I/O. Control calls to an engine over HTTP, each sent once and bounded from outside.

A control call (sleep, wake) that did not return may have happened or not, and nothing can tell which: it is never
sent again to the same engine. vLLM's own client waits for ever when its engine core dies during such a call.
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from typing import TYPE_CHECKING

from checkpoint_executor.errors import CheckpointExecutorError, ConfigError, FatalError
from checkpoint_executor.incidents import Cause, restarted, within
from checkpoint_executor.timeouts import to_wait_s

if TYPE_CHECKING:
    from checkpoint_executor.supervise import SupervisedCommand

__all__ = ["CONTROL_TIMEOUT_S", "ControlCallError", "ControlClient", "OutcomeUnknownError", "url_probe"]

#: Above the sum of what a sleep may take inside: vLLM's three calls before it and the worker's part, the hooks (120 s
#: each), lock, checkpoint, admission and three readings (30 s each). So the engine's own verdict comes first where it
#: can still give one.
CONTROL_TIMEOUT_S = 900.0

_BODY_CHARACTERS = 2000


class ControlCallError(CheckpointExecutorError):
    """A control call was answered with an error, or could not be sent. The engine was not restarted.

    Attributes:
        status: of the HTTP answer; None if nothing was sent. body: the answer, cut.
    """

    status: int | None = None
    body: str = ""


class OutcomeUnknownError(FatalError, TimeoutError):
    """A control call has no known outcome, and the client no supervisor that could restart the engine. Kill it.

    Every later call of the same client raises it again: such an engine is never asked twice.
    """


class ControlClient:
    """Control calls to an HTTP engine (vLLM with ``VLLM_SERVER_DEV_MODE=1``), each sent once, with an outer timeout.

    Args:
        base_url: e.g. ``"http://localhost:8000"``. engine: what to restart when an outcome is unknown; without it
            the client refuses every further call then. timeout_s: for a whole control call.

    Calls of one client are serialised, as the engine asks. Every one of them may raise:
        EngineRestarted: the call did not return in time, or its connection broke; a new engine serves.
        ControlCallError: the engine answered with an error, or nobody listens there. An error is an answer: vLLM
            reports so what our executor refused, and serves on.
        OutcomeUnknownError: as EngineRestarted, but there was nobody to restart the engine.
        InvalidRequestError: the timeout is no number of seconds above 0; nothing was sent.

    Raises:
        ConfigError: ``base_url`` is no URL of HTTP; a typing error must not cost an engine.
        InvalidRequestError: ``timeout_s`` is no number of seconds above 0.
    """

    def __init__(
        self, base_url: str, engine: SupervisedCommand | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        _require_http(base_url, "base_url", "http://localhost:8000")
        to_wait_s(timeout_s, "timeout_s")
        self._base_url = base_url.rstrip("/")
        self._engine = engine
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._unknown: OutcomeUnknownError | None = None

    def sleep(self, level: int = 1, mode: str | None = None, *, timeout_s: float | None = None) -> None:
        """``POST /sleep``."""
        self.post("/sleep", {"level": level, **({} if mode is None else {"mode": mode})}, timeout_s=timeout_s)

    def wake_up(self, tags: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """``POST /wake_up``; all tags by default."""
        self.post("/wake_up", {} if tags is None else {"tags": list(tags)}, timeout_s=timeout_s)

    def release_kv_cache_memory(self, *, timeout_s: float | None = None) -> None:
        """``POST /release_kv_cache_memory``."""
        self.post("/release_kv_cache_memory", timeout_s=timeout_s)

    def is_sleeping(self, *, timeout_s: float = 30.0) -> bool:
        """``GET /is_sleeping``."""
        return bool(json.loads(self._request("GET", "/is_sleeping", {}, None, timeout_s))["is_sleeping"])

    def post(
        self,
        path: str,
        parameters: Mapping[str, object] | None = None,
        *,
        body: object = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Any other control call, e.g. ``post("/collective_rpc", body={"method": "reload_weights"})``.

        Returns the answer's body.
        """
        data = None if body is None else json.dumps(body).encode()
        return self._request("POST", path, parameters or {}, data, self._timeout_s if timeout_s is None else timeout_s)

    def _request(
        self, method: str, path: str, parameters: Mapping[str, object], body: bytes | None, timeout_s: float
    ) -> bytes:
        query = urllib.parse.urlencode(parameters, doseq=True)
        url = f"{self._base_url}{path}" + (f"?{query}" if query else "")
        what = f"{method} {path}"
        limit_s = to_wait_s(timeout_s, "timeout_s")
        with self._lock:
            if self._unknown is not None:
                raise OutcomeUnknownError(self._unknown.message, **self._unknown.facts)
            generation = self._engine.generation if self._engine is not None else 0
            try:
                status, answer = within(lambda: _open(method, url, limit_s, body), limit_s)
            except TimeoutError:
                why = f"{what} did not return within {timeout_s:g} s"
            except (OSError, HTTPException) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                if isinstance(reason, ConnectionRefusedError):
                    raise ControlCallError(f"{what} was not sent: nobody listens at {self._base_url}") from None
                if isinstance(reason, socket.gaierror):
                    raise ControlCallError(f"{what} was not sent: {self._base_url}: {reason.strerror}") from None
                why = f"{what}: {type(reason).__name__}: {reason}"
            else:
                if status < 400:
                    return answer
                text = answer.decode(errors="replace")[:_BODY_CHARACTERS]
                why = f"{what} was answered with status {status}: {text}"
                if status < 500 or self._engine is None or self._engine.is_healthy():
                    raise ControlCallError(why, status=status, body=text)
                raise restarted(self._engine.fail(f"{why}; and it is not healthy", Cause.FATAL, generation))
            if self._engine is not None:
                raise restarted(self._engine.fail(f"{why}: its outcome is unknown", Cause.TIMEOUT, generation))
            self._unknown = OutcomeUnknownError(
                f"{why}: its outcome is unknown. Kill the engine; this client does not ask it again",
                deadline_s=timeout_s,
            )
            raise self._unknown


def url_probe(url: str, timeout_s: float) -> Callable[[], bool]:
    """A health check: whether the URL answers with a status of success.

    Raises:
        ConfigError: it is no URL of HTTP. Asking it would fail for ever, as if the engine were never well.
    """
    _require_http(url, "health", "http://localhost:8000/health")
    return lambda: _open("GET", url, timeout_s)[0] < 400


def _require_http(url: str, name: str, example: str) -> None:
    """Raises ConfigError: it is no URL of HTTP."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, an address that is none
        good = False
    if not good:
        raise ConfigError(
            f"{name} {url!r} is not a URL such as {example}. Nothing was started",
            problems=(f"{name} {url!r} is not a URL of HTTP",),
        )


def _open(method: str, url: str, timeout_s: float | None, body: bytes | None = None) -> tuple[int, bytes]:
    """One request: status and body. ``timeout_s`` holds for each operation of the socket only."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    # No proxy: an engine on this host must not be asked through one that the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()

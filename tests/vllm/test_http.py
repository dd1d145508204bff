"""The development endpoints of vLLM's API server, through our executor."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.vllm_harness import VllmMachine
from tests.support.vllm_server import Server
from tests.support.vllm_waiting import DEADLINE_S, wait_until

#: Every test runs with each; see conftest.
RANKS = (1, 2)

#: The first test starts the server, which imports half of vLLM first.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def server(ranks: int) -> Iterator[Server]:
    machine = VllmMachine()
    made = Server(machine, ranks)
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()
        machine.close()


def refused(answer: tuple[int, Any], pattern: str) -> None:
    """vLLM answers 500 to whatever EngineCore raised; the client is to read our message in it, and the server lives."""
    code, body = answer
    assert (code, body["error"]["code"]) == (500, 500)
    assert re.search(pattern, body["error"]["message"], re.DOTALL), body


def test_sleep_level_1_and_wake_over_http(server: Server) -> None:
    before = server.tokens()
    assert server.post("/sleep?level=1")[0] == 200
    assert server.used_bytes == server.nothing
    assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
    assert server.get("/health")[0] == 200
    assert server.post("/wake_up")[0] == 200
    assert server.get("/is_sleeping") == (200, {"is_sleeping": False})
    assert server.tokens() == before


def test_repeated_sleep_and_level_0_over_http_while_asleep(server: Server) -> None:
    for path in ("/sleep?level=1", "/sleep?level=1", "/sleep?level=0&mode=keep"):
        assert server.post(path)[0] == 200
    assert server.status.phase == "checkpointed"
    assert server.post("/wake_up")[0] == 200


def test_partial_wake_over_http(server: Server) -> None:
    before = server.tokens()
    server.post("/sleep?level=1")
    assert server.post("/wake_up?tags=weights")[0] == 200
    assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
    assert server.post("/wake_up?tags=kv_cache")[0] == 200
    assert server.get("/is_sleeping") == (200, {"is_sleeping": False})
    assert server.tokens() == before


def test_an_unknown_tag_over_http_is_refused_and_the_engine_sleeps_on(server: Server) -> None:
    before = server.tokens()
    server.post("/sleep?level=1")
    refused(server.post("/wake_up?tags=wieghts"), r"unknown tag\(s\) 'wieghts'.*Nothing was touched")
    assert server.status.phase == "checkpointed"
    assert server.used_bytes == server.nothing
    assert server.get("/health")[0] == 200
    assert server.post("/wake_up")[0] == 200
    assert server.tokens() == before


def test_release_over_http(server: Server) -> None:
    before = server.tokens()
    refused(server.post("/release_kv_cache_memory"), "requires a completed pause")
    assert server.post("/sleep?level=0&mode=keep")[0] == 200
    assert server.post("/release_kv_cache_memory")[0] == 200
    assert server.status.phase == "awake"
    assert server.status.sleeping == ("kv_cache",)
    assert server.post("/wake_up?tags=kv_cache")[0] == 200
    assert server.tokens() == before


def test_collective_rpc_over_http_is_refused_asleep(server: Server) -> None:
    assert server.post("/collective_rpc", {"method": "known_requests"})[0] == 200
    server.post("/sleep?level=1")
    refused(
        server.post("/collective_rpc", {"method": "known_requests"}),
        r"the workers are checkpointed; call wake_up\(\) first",
    )
    assert server.get("/health")[0] == 200
    server.post("/wake_up")
    assert server.post("/collective_rpc", {"method": "known_requests"})[0] == 200


def test_level_2_over_http_is_refused_and_wake_resumes(server: Server) -> None:
    before = server.tokens()
    refused(server.post("/sleep?level=2"), r"sleep\(level=2\) is not supported .* Nothing was touched")
    assert server.get("/health")[0] == 200
    assert server.post("/wake_up")[0] == 200
    assert server.tokens() == before


def test_requests_that_come_while_asleep_wait_and_a_disconnect_is_harmless(server: Server) -> None:
    before = server.tokens()
    server.post("/sleep?level=1")
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.tokens) for _ in range(2)]
        wait_until(lambda: server.requests_in_flight() == 2, "both are queued")
        server.connect_and_leave()
        assert server.post("/sleep?level=1&mode=keep")[0] == 200  # "abort" would abort what is queued
        assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
        assert not any(request.done() for request in waiting)
        assert server.used_bytes == server.nothing
        server.post("/wake_up")
        assert [request.result(30) for request in waiting] == [before, before]


def test_a_dead_executor_shows_as_unhealthy(server: Server) -> None:
    """The last test of the module: it ends the server."""
    server.post("/sleep?level=1")
    os.kill(server.status.processes[f"worker {server.ranks - 1}"], signal.SIGKILL)
    wait_until(server.is_unhealthy, "the server is unhealthy or gone", 10)
    server.machine.assert_empty(server.ranks)
    # Why a supervisor must not take status 0 for success.
    server.process.join(DEADLINE_S)
    assert server.process.exitcode == 0

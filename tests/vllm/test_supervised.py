"""``vllm serve`` under the supervisor: what ``scripts/restart_on_failure.py -- vllm serve ...`` does."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from checkpoint_executor.supervise import (
    Cause,
    ControlCallError,
    ControlClient,
    Incident,
    RestartPolicy,
    SupervisedCommand,
    soft_used_bytes,
)
from tests.support.vllm_harness import REPOSITORY, VllmMachine
from tests.support.vllm_server import Client, free_port, serve_command, server_environment
from tests.support.vllm_waiting import DEADLINE_S, wait_until

#: Two starts of a server from nothing; each imports half of vLLM twice.
pytestmark = pytest.mark.timeout(400)

START_S = 180.0

POLICY = RestartPolicy(max_restarts=1, backoff_s=0.01, start_s=START_S, free_s=30, free_slack_bytes=0)


def test_a_server_whose_worker_dies_asleep_is_restarted_and_answers_as_before(machine: VllmMachine) -> None:
    client = Client(free_port())
    _, *arguments = serve_command(machine, client.port)
    incidents: list[Incident] = []
    engine = SupervisedCommand(
        [sys.executable, "-m", "tests.support.vllm_serve_main", *arguments],
        health=f"http://127.0.0.1:{client.port}/health",
        environ={**os.environ, **server_environment(machine), "PYTHONPATH": str(REPOSITORY)},
        policy=POLICY,
        used_bytes=soft_used_bytes(machine.root),
        report=incidents.append,
    )
    control = ControlClient(f"http://127.0.0.1:{client.port}", engine)
    with engine:
        engine.wait_ready(START_S)
        before = client.tokens()
        control.sleep()
        assert control.is_sleeping()
        assert machine.used_bytes() == [0]
        (status,) = machine.statuses()
        os.kill(status.processes["worker 0"], signal.SIGKILL)
        wait_until(lambda: engine.generation == 2, "the server was started again", START_S)
        engine.wait_ready(START_S)
        assert client.tokens() == before
        control.sleep()
        control.wake_up(["weights"])
        assert control.is_sleeping()
        control.wake_up(["kv_cache"])
        assert not control.is_sleeping()
        assert client.tokens() == before
        with pytest.raises(ControlCallError, match="level"):
            control.sleep(level=2)
        control.wake_up()
        assert client.tokens() == before
        assert engine.generation == 2
        engine.stop(grace_s=DEADLINE_S)  # in good order, however busy the machine is
    (incident,) = incidents
    assert (incident.cause, incident.exit_status, incident.survivors) == (Cause.EXITED, 0, ())
    assert incident.free_s is not None
    machine.assert_empty()

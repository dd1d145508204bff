"""vLLM under the supervisor: ``vllm serve`` as ``scripts/restart_on_failure.py`` runs it, at TP=1, and an ``LLM`` at
TP=2."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from checkpoint_executor import directories
from checkpoint_executor.supervise import (
    Cause,
    ControlCallError,
    ControlClient,
    EngineRestarted,
    Incident,
    RestartPolicy,
    Supervised,
    SupervisedCommand,
    soft_used_bytes,
)
from tests.support.vllm_harness import PROMPT, REPOSITORY, VllmMachine, install_plugins
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
    (incident,) = incidents
    assert (incident.cause, incident.exit_status, incident.survivors) == (Cause.EXITED, 0, ())
    assert incident.free_s is not None
    assert_nothing_left(machine)


def test_an_llm_that_a_function_builds_is_built_again_when_its_engine_core_dies_asleep(machine: VllmMachine) -> None:
    """vLLM's client waits for ever for the answer of a dead engine core: the timeout from outside ends that."""
    environ, options = machine.environment(2), machine.options(2)

    def build() -> Any:
        install_plugins()
        os.environ.update(environ)
        from vllm import LLM

        return LLM(**options)

    incidents: list[Incident] = []
    used_bytes = soft_used_bytes(machine.root)
    with Supervised(build, policy=POLICY, used_bytes=used_bytes, report=incidents.append) as engine:
        before = engine.call(decode, timeout_s=START_S)
        engine.call(lambda llm: llm.sleep(level=1), timeout_s=DEADLINE_S)
        assert machine.used_bytes(2) == [0, 0]
        engine.call(lambda llm: llm.wake_up(), timeout_s=DEADLINE_S)
        assert engine.call(decode, timeout_s=DEADLINE_S) == before
        engine.call(lambda llm: llm.sleep(level=1), timeout_s=DEADLINE_S)
        (status,) = machine.statuses()
        os.kill(status.pid, signal.SIGKILL)
        with pytest.raises(EngineRestarted):
            engine.call(lambda llm: llm.wake_up(), timeout_s=5)
        assert engine.call(decode, timeout_s=DEADLINE_S) == before
    (incident,) = incidents
    # (vLLM's client may have noticed before it was asked, and says so at once.)
    assert incident.cause in (Cause.TIMEOUT, Cause.FATAL)
    assert (incident.survivors, incident.left_bytes) == ((), {})
    assert_nothing_left(machine)


def assert_nothing_left(machine: VllmMachine) -> None:
    assert machine.statuses() == []
    assert machine.used_bytes(2) == [0, 0]
    # vLLM's front end kills its EngineCore and our helper as it ends, sometimes before either has removed the
    # executor's directory. The next start does.
    for folder in machine.runtime_base.iterdir():
        directories.sweep(folder)
        assert list(folder.iterdir()) == []


def decode(llm: Any) -> list[int]:
    """Greedy tokens after the usual prompt."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (found,) = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    return list(found.outputs[0].token_ids)

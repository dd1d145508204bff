"""Front ends in processes of their own, forked from the test, which has vLLM imported already (that takes 10 s).

Each function runs in the child and answers by a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from checkpoint_executor import procfs, status
from tests.support.vllm_waiting import DEADLINE_S, wait_until

__all__ = ["Forked", "cycle_in_process", "forked", "hold_engine"]


class Forked:
    """A forked front end."""

    def __init__(self, process: Any, answers: Connection) -> None:
        self.process = process
        self._answers = answers

    def answer(self) -> Any:
        """What the function sent."""
        assert self._answers.poll(DEADLINE_S), "no answer"
        return self._answers.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def forked(function: Callable[..., None], environ: dict[str, str], *args: Any) -> Iterator[Forked]:
    """Run ``function(pipe, *args)`` in a forked process with these environment variables."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        os.environ.update(environ)
        function(theirs, *args)

    process = multiprocessing.get_context("fork").Process(target=run, name="front-end")
    process.start()
    theirs.close()
    made = Forked(process, ours)
    try:
        yield made
    finally:
        made.kill()
        ours.close()


def hold_engine(pipe: Connection, options: dict[str, Any], asleep: bool) -> None:
    """Build an engine, put it to sleep if told, answer with EngineCore's pid, and wait to be killed."""
    from vllm import LLM

    llm = LLM(**options)
    if asleep:
        llm.sleep(level=1)
    pipe.send(llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid)
    threading.Event().wait()


def cycle_in_process(pipe: Connection, options: dict[str, Any], runtime_base: str) -> None:
    """vLLM without an EngineCore process: a cycle, then a failure. Answers with facts."""
    from vllm import LLM, SamplingParams

    from tests.support.vllm_executor import SoftCheckpointExecutor

    llm = LLM(**{**options, "distributed_executor_backend": SoftCheckpointExecutor})
    executor = llm.llm_engine.model_executor
    parameters = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False)

    def tokens() -> list[int]:
        return list(llm.generate([{"prompt_token_ids": [5, 6, 7]}], parameters, use_tqdm=False)[0].outputs[0].token_ids)

    facts: dict[str, Any] = {}
    before = tokens()
    executor.check_health()
    llm.sleep(level=1)
    executor.check_health()
    facts["asleep"] = (executor.is_sleeping, str(executor._control.phase))
    facts["rpc"] = _error(lambda: llm.collective_rpc("known_requests"))
    llm.wake_up()
    facts["same_tokens"] = tokens() == before
    llm.sleep(level=1)
    (found,) = status.read_all(runtime_base)
    os.kill(found.processes["worker 0"], signal.SIGKILL)
    wait_until(lambda: not procfs.is_alive(found.processes["helper"]), "the helper is gone")
    facts["wake"] = _error(llm.wake_up)
    facts["health"] = _error(executor.check_health)
    facts["again"] = _error(lambda: llm.sleep(level=1))
    pipe.send(facts)
    os._exit(0)


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        return f"{type(error).__name__}: {error}"
    return "none"

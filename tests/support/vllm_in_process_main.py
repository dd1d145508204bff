"""vLLM without an EngineCore process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): a cycle, then a failure. Prints facts as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from checkpoint_executor import procfs, status
from tests.support.vllm_waiting import wait_until


def main() -> None:
    from vllm import LLM, SamplingParams

    from tests.support.vllm_executor import SoftCheckpointExecutor

    told = json.loads(sys.argv[1])
    llm = LLM(**{**told["options"], "distributed_executor_backend": SoftCheckpointExecutor})
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
    (found,) = status.read_all(told["runtime_base"])
    os.kill(found.processes["worker 0"], signal.SIGKILL)
    wait_until(lambda: not procfs.is_alive(found.processes["helper"]), "the helper is gone")
    facts["wake"] = _error(llm.wake_up)
    facts["health"] = _error(executor.check_health)
    facts["again"] = _error(lambda: llm.sleep(level=1))
    print("FACTS " + json.dumps(facts), flush=True)


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    main()

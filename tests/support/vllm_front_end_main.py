"""A front end to be killed: builds the engine it is told, says so, puts it to sleep if told, and waits."""

from __future__ import annotations

import json
import sys
import threading


def main() -> None:
    told = json.loads(sys.argv[1])
    from vllm import LLM

    llm = LLM(**told["options"])
    if told["asleep"]:
        llm.sleep(level=1)
    core = llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
    print("READY " + json.dumps({"core_pid": core}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

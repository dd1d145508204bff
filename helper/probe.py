"""Entry point: ``python -P -m checkpoint_executor.helper.probe REQUEST``. The helper of ``doctor``: it looks and goes.

It is a process of its own because it loads what a helper loads, so that the caller sees the very driver that a helper
would use, and because a state query can hang: then the caller kills it. It changes no target; every answer is one
line of JSON on stdout (:class:`~checkpoint_executor.probe_messages.ProbeDriver`, then
:class:`~checkpoint_executor.probe_messages.ProbeState` in the order in which they come).
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec

from checkpoint_executor import host_facts
from checkpoint_executor.driver_states import DriverError
from checkpoint_executor.facts import StateQuery
from checkpoint_executor.helper.drivers import Driver
from checkpoint_executor.messages import Target
from checkpoint_executor.probe_messages import ProbeDriver, ProbeRequest, ProbeState

__all__ = ["main"]


def main(argv: list[str]) -> None:
    """Answer the request on the command line."""
    request = msgspec.json.decode(argv[1], type=ProbeRequest)
    # The answers' own way out: what a library prints goes to stderr.
    out = os.dup(1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def say(answer: ProbeDriver | ProbeState) -> None:
        line = msgspec.json.encode(answer) + b"\n"
        with lock:
            while line:
                line = line[os.write(out, line) :]

    driver = _driver(request)
    description, problem = "", None
    try:
        description = driver.open().version
    except DriverError as error:
        problem = str(error)
    say(ProbeDriver(host_facts.collect_target(os.getpid()), description, problem))
    if problem is None:
        # At once: with one rank locked, a query on its peer may hang, and must not hide the answers of the others.
        threads = [
            threading.Thread(target=lambda target: say(_ask(driver, target)), args=(target,), daemon=True)
            for target in request.targets
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    os._exit(0)  # no teardown: NVML stays loaded, and a hung thread keeps nobody


def _driver(request: ProbeRequest) -> Driver:
    if request.device_kind == "cuda":
        from checkpoint_executor.helper.cuda_driver import CudaDriver

        return CudaDriver()
    from checkpoint_executor.helper.soft_driver import SoftDriver

    return SoftDriver(Path(request.soft_root))


def _ask(driver: Driver, target: Target) -> ProbeState:
    try:
        return ProbeState(target.pid, StateQuery(state=driver.get_state(target).value))
    except DriverError as error:
        return ProbeState(target.pid, StateQuery(code=error.code, code_name=error.name, message=error.detail))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return ProbeState(target.pid, StateQuery(message=f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(sys.argv)

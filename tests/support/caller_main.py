"""A process with a driver of its own, so that a test can kill the caller.

Backends name their driver as ``module:function``.
"""

from __future__ import annotations

import importlib
from typing import Any

from checkpoint_executor.driver_states import DriverError
from checkpoint_executor.messages import Target
from tests.support import child


def main() -> None:
    given = child.arguments()
    module, _, function = given["driver"].partition(":")
    driver = getattr(importlib.import_module(module), function)(*given["driver_arguments"])

    def verb(name: str, pid: int, start_time: int, timeout_ms: int = 10_000) -> Any:
        target = Target(rank=0, pid=pid, start_time=start_time, device=given["device"])
        extra = (timeout_ms,) if name == "lock" else ()
        try:
            return getattr(driver, name)(target, *extra)
        except DriverError as error:
            return {"code": error.code}

    child.serve(child.channel(), {"verb": verb})


if __name__ == "__main__":
    main()

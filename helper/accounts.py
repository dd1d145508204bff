"""What the devices held before the executor came, what the helper itself takes there, and the targets' host memory.

For attribution only. Knows the driver's readings and ``/proc``; does not know what the workers hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from checkpoint_executor import procfs
from checkpoint_executor.driver_states import DriverError
from checkpoint_executor.helper.drivers import Driver
from checkpoint_executor.messages import Target

__all__ = ["Accounts"]

#: No process that uses a GPU holds less of it (a bare context on H200: 357 MiB at the least).
_SOMEBODY_BYTES = 32 << 20


class Accounts:
    """Made before the driver is opened: the first reading is of devices that nobody of this executor has touched, since
    workers open theirs only when every process is connected, and this one connects when it has opened the driver. (Not
    so under vLLM: :meth:`were_there`.)

    A device that cannot be read (another's on this host, say) counts as empty: readings must not keep anybody from
    starting.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._empty = self._used()
        self._own: dict[str, int] = {}

    def opened(self) -> None:
        """The driver is open: the difference is this process's own."""
        self._own = {device: used - self._empty.get(device, used) for device, used in self._used().items()}

    def were_there(self, targets: Iterable[Target]) -> None:
        """These workers held their devices before the first reading (vLLM's do), which was of no empty device then.

        Where the driver does not tell what a process holds, nobody else is taken to have been there; nor for what is
        less than any process with a context takes: NVML's figures of processes left 9 MiB of a GPU to nobody (H200).
        """
        for target in targets:
            try:
                theirs = dict(self._driver.device_memory(target.device).holders).get(target.pid)
            except DriverError:
                theirs = None
            others = 0 if theirs is None else self._empty.get(target.device, 0) - theirs
            self._empty[target.device] = others if others >= _SOMEBODY_BYTES else 0

    def figures(self, target: Target) -> dict[str, int]:
        """Bytes: ``empty`` and ``helper`` on the target's device, ``rss`` and ``rss_anon`` of the target on the host.

        Raises:
            ProcessLookupError: the target is gone.
        """
        rss, anonymous = procfs.host_memory(target.pid)
        return {
            "empty": self._empty.get(target.device, 0),
            "helper": self._own.get(target.device, 0),
            "rss": rss,
            "rss_anon": anonymous,
        }

    def _used(self) -> dict[str, int]:
        found = {}
        try:
            for device in self._driver.devices():
                found[device] = self._driver.device_memory(device).used_bytes
        except DriverError as error:
            print(f"checkpoint-executor helper: attribution: {error}", file=sys.stderr)  # noqa: T201
        return found

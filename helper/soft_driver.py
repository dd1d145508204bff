"""I/O. The :class:`~checkpoint_executor.helper.drivers.Driver` of the software device.

Only translates: targets to ``softgpu.RemoteProcess``, device names to ``softgpu.SoftGpu``. The rules are in
``driver_states`` and the mechanics in ``softgpu``; nothing here may know better.
"""

from __future__ import annotations

from pathlib import Path

from checkpoint_executor.driver_states import DriverCode, DriverError, ProcessState
from checkpoint_executor.helper.drivers import DeviceMemory, DriverInfo
from checkpoint_executor.messages import Target
from checkpoint_executor.softgpu import RemoteProcess, SoftGpu

__all__ = ["SoftDriver"]


class SoftDriver:
    """The four verbs on processes that opened a software device.

    Args:
        root: folder of the software devices, as the targets opened them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._gpus: dict[str, SoftGpu] = {}

    def open(self) -> DriverInfo:
        """Nothing to initialise: the driver lives in the targets."""
        return DriverInfo("soft", "software device")

    def get_state(self, target: Target) -> ProcessState:
        return _remote(target).get_state()

    def lock(self, target: Target, timeout_ms: int) -> None:
        _remote(target).lock(timeout_ms)

    def checkpoint(self, target: Target) -> None:
        _remote(target).checkpoint()

    def restore(self, target: Target) -> None:
        _remote(target).restore()

    def unlock(self, target: Target) -> None:
        _remote(target).unlock()

    def devices(self) -> tuple[str, ...]:
        try:
            names = sorted(path.name for path in self._root.iterdir())
        except FileNotFoundError:
            return ()  # made by the first worker that opens one
        except OSError as error:
            raise DriverError("devices", DriverCode.OPERATING_SYSTEM, detail=str(error)) from error
        return tuple(name for name in names if SoftGpu.exists(self._root, name))

    def device_memory(self, device: str) -> DeviceMemory:
        """Raises DriverError with NO_DEVICE for a device that nobody ever opened, INVALID_VALUE for a bad name."""
        try:
            gpu = self._gpus.get(device)
            if gpu is None:
                # Looked for first: a reading must not create a device.
                if not SoftGpu.exists(self._root, device):
                    raise DriverError("device_memory", DriverCode.NO_DEVICE, detail=f"no software device {device!r}")
                gpu = self._gpus[device] = SoftGpu(self._root, device)
            holders = gpu.holders()
            return DeviceMemory(gpu.total_bytes, sum(size for _, size in holders), holders)
        except ValueError as error:
            raise DriverError("device_memory", DriverCode.INVALID_VALUE, detail=str(error)) from error
        except OSError as error:
            raise DriverError("device_memory", DriverCode.OPERATING_SYSTEM, detail=str(error)) from error

    def close(self) -> None:
        """Nothing is held."""


def _remote(target: Target) -> RemoteProcess:
    # Pid and start time go together: a reused pid answers OPERATING_SYSTEM, never for another process.
    return RemoteProcess(target.pid, target.start_time)

"""CUDA driver calls that raise, and the worker's one context. The other ``cuda_*`` files call CUDA through this one.

Knows ``cuda.bindings.driver`` and sysfs. Knows no torch, so that the host arena can be used beside any framework, and
nothing of tags, sleeping or ranks. Importing it needs no CUDA: the bindings are imported by the first call.
"""

from __future__ import annotations

import os
import uuid
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint_executor.driver_states import DriverCode, DriverError

__all__ = ["PrimaryContext", "bindings", "call", "choose_device", "device_uuids"]


@cache
def bindings() -> Any:
    """``cuda.bindings.driver``. Raises ImportError."""
    import cuda.bindings.driver as driver

    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function; its result (a tuple if there are several, None if there is none).

    Raises:
        MemoryError: CUDA_ERROR_OUT_OF_MEMORY. DriverError: any other code, with the driver's own name.
    """
    code, *results = getattr(bindings(), name)(*arguments)
    if int(code) != 0:
        if int(code) == DriverCode.OUT_OF_MEMORY:
            raise MemoryError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY ({int(code)})")
        raise DriverError(name, int(code), getattr(code, "name", None))
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


def device_uuids() -> list[str]:
    """UUIDs of the devices this process may use, in CUDA's order, written as NVML does (``GPU-...``).

    ``CUDA_VISIBLE_DEVICES`` chooses and permutes them, so an index means nothing outside this process: the UUID does.
    """
    call("cuInit", 0)
    return [_uuid_of(call("cuDeviceGet", index)) for index in range(int(call("cuDeviceGetCount")))]


def choose_device(uuids: list[str], device_uuid: str | None, index: int) -> int:
    """The index of a device among those of this process, from its UUID or, without one, from its place.

    Raises:
        ValueError: no such device.
    """
    if device_uuid is None:
        if not 0 <= index < len(uuids):
            raise ValueError(f"there is no device {index}: this process may use {len(uuids)}")
        return index
    # UUIDs of different sources differ in case.
    wanted = device_uuid.lower()
    for ordinal, found in enumerate(uuids):
        if found.lower() == wanted:
            return ordinal
    raise ValueError(
        f"no device {device_uuid} for this process (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); "
        f"it may use {', '.join(uuids) or 'none'}"
    )


def _uuid_of(device: Any) -> str:
    # The octets come as a bytes object of 16; some bindings hand them over signed, as a list.
    octets = bytes(octet & 0xFF for octet in call("cuDeviceGetUuid", device).bytes)
    return f"GPU-{uuid.UUID(bytes=octets)}"


class PrimaryContext:
    """The primary context of one device, the one that torch and NCCL use as well.

    Attributes:
        ordinal: the device's index in this process. uuid: its UUID as NVML writes it. device, handle: the driver's.
    """

    def __init__(self, ordinal: int) -> None:
        call("cuInit", 0)
        self.ordinal = ordinal
        self.device = call("cuDeviceGet", ordinal)
        self.uuid = _uuid_of(self.device)
        # Kept until the process ends: letting go of it while torch holds it would gain nothing.
        self.handle = call("cuDevicePrimaryCtxRetain", self.device)
        self.make_current()

    @staticmethod
    def is_active(ordinal: int) -> bool:
        """Whether somebody in this process has made the device's primary context already."""
        call("cuInit", 0)
        _, active = call("cuDevicePrimaryCtxGetState", call("cuDeviceGet", ordinal))
        return bool(active)

    def make_current(self) -> None:
        """Bind the context to the calling thread: any thread may be the one that sleeps or wakes."""
        call("cuCtxSetCurrent", self.handle)

    def synchronize(self) -> None:
        """Wait until all work submitted to the device is done."""
        self.make_current()
        call("cuCtxSynchronize")

    def attribute(self, name: str) -> int:
        """A device attribute by its name without the prefix, e.g. ``"MULTIPROCESSOR_COUNT"``."""
        which = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", which, self.device))

    @property
    def architecture(self) -> str:
        """What a kernel is compiled for, e.g. ``"sm_90"``."""
        return f"sm_{self.attribute('COMPUTE_CAPABILITY_MAJOR')}{self.attribute('COMPUTE_CAPABILITY_MINOR')}"

    @property
    def numa_node(self) -> int:
        """NUMA node of the device, -1 where the system does not say (one node, or most virtual machines)."""
        address = call("cuDeviceGetPCIBusId", 32, self.device).split(b"\0")[0].decode().lower()
        try:
            return int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        except (OSError, ValueError):
            return -1

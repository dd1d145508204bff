"""What the benchmarks read of a machine and its processes from outside, and the driver's verbs without the executor.

Knows both kinds of devices; nothing of workers, engines or what is compared.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_executor import procfs
from checkpoint_executor.helper.drivers import Driver
from checkpoint_executor.incidents import nvml_handle, visible_devices
from checkpoint_executor.messages import Target

__all__ = ["machine", "open_driver", "rss_bytes", "target_of", "used_bytes", "visible_gpus", "wait_for_bytes"]


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "cpus": os.cpu_count()}
    try:
        query = "--query-gpu=name,driver_version,memory.total"
        text = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
        found["gpus"] = text.stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        found["gpus"] = []
    return found


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def used_bytes(device: str, soft_root: str, ranks: int) -> list[int]:
    """Bytes in use on each of the first devices of this process, by everybody, without taking any.

    Args:
        device: ``"soft"`` or ``"cuda"``. soft_root: the software devices' folder. ranks: how many devices.
    """
    if device == "soft":
        from checkpoint_executor.softgpu import SoftGpu, device_name

        return [SoftGpu(Path(soft_root), device_name(rank)).used_bytes() for rank in range(ranks)]
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    read = pynvml.nvmlDeviceGetMemoryInfo
    return [int(read(handle, version=pynvml.nvmlMemory_v2).used) for handle in visible_gpus(pynvml, ranks)]


def visible_gpus(nvml: Any, count: int) -> list[Any]:
    """NVML's handles of the first GPUs that CUDA shows this process: NVML itself counts all of the machine.

    Args:
        nvml: ``pynvml``, initialised. count: how many.

    Raises:
        ValueError: it is shown fewer.
    """
    chosen = visible_devices() or [str(index) for index in range(count)]
    if len(chosen) < count:
        raise ValueError(f"CUDA_VISIBLE_DEVICES shows {len(chosen)} GPU(s), and {count} are wanted")
    return [nvml_handle(nvml, name) for name in chosen[:count]]


def wait_for_bytes(
    expected: list[int], read: Callable[[], list[int]], deadline_s: float = 20.0, slack_bytes: int = 1 << 20
) -> tuple[list[int], float]:
    """Poll until the devices are down to what they were; returns the last reading and how long it took, seconds.

    Args:
        slack_bytes: how much more than before counts as nothing.
    """
    begun = time.monotonic()
    while True:
        used = read()
        waited = time.monotonic() - begun
        if all(u <= e + slack_bytes for u, e in zip(used, expected, strict=True)) or waited > deadline_s:
            return used, waited
        time.sleep(0.02)


def open_driver(device: str, soft_root: str) -> Driver:
    """The driver's verbs, for this process to call.

    Raises:
        DriverError: there is no driver, or it lacks the verbs.
    """
    if device == "soft":
        from checkpoint_executor.helper.soft_driver import SoftDriver

        driver: Driver = SoftDriver(Path(soft_root))
    else:
        from checkpoint_executor.helper.cuda_driver import CudaDriver

        driver = CudaDriver()
    driver.open()
    return driver


def target_of(rank: int, pid: int) -> Target:
    """A process as the verbs take it.

    Raises:
        ProcessLookupError: it is gone.
    """
    return Target(rank, pid, procfs.start_time(pid), "")

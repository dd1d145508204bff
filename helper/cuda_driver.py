"""The CUDA driver's checkpoint verbs and NVML's memory readings, behind
:class:`~checkpoint_executor.helper.drivers.Driver`.

Knows ``cuda.bindings.driver`` and ``pynvml``, and is the only file that does in the helper. It does not know which verb
is legal, what a state ought to be after it, or whether a target may be called at all: the service and the tables judge.

Why the bindings and not ``cuda.core.checkpoint``: that folds NOT_SUPPORTED into "driver too old", and 801 on a
driver that has the calls means managed memory, IPC or multicast, which is what the caller must be told.

No context is ever made here: a context costs hundreds of MiB on the very device that should be empty, and the
checkpoint calls need ``cuInit`` only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from checkpoint_executor import procfs
from checkpoint_executor.driver_states import DriverCode, DriverError, ProcessState
from checkpoint_executor.helper.drivers import DeviceMemory, DriverInfo
from checkpoint_executor.messages import Target

__all__ = ["CudaDriver"]

#: ``CUprocessState`` by value.
_STATES = {
    0: ProcessState.RUNNING,
    1: ProcessState.LOCKED,
    2: ProcessState.CHECKPOINTED,
    3: ProcessState.FAILED,
}

_nvml_lock = threading.Lock()
_nvml_ready = False


class CudaDriver:
    """The real driver. Stateless after :meth:`open`, so every method may run in several threads at once: the bindings
    release the GIL in all checkpoint calls (measured with 13.3.1 and 13.5.0)."""

    def __init__(self) -> None:
        self._cuda: Any = None

    def open(self) -> DriverInfo:
        """``cuInit`` and NVML. Raises DriverError, with NVML's names where NVML failed."""
        try:
            import cuda.bindings.driver as driver
        except ImportError as error:
            raise DriverError(
                "open", DriverCode.UNKNOWN, "IMPORT_ERROR", f"cuda-bindings is needed: {error}"
            ) from error
        self._cuda = driver
        self._call("cuInit", driver.cuInit, 0)
        cuda_version = int(self._call("cuDriverGetVersion", driver.cuDriverGetVersion))
        nvml = _open_nvml()
        version = _nvml_call("nvmlSystemGetDriverVersion", nvml.nvmlSystemGetDriverVersion)
        if isinstance(version, bytes):  # nvidia-ml-py returned bytes until 11.5
            version = version.decode()
        return DriverInfo("cuda", f"NVIDIA {version}, CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}")

    def get_state(self, target: Target) -> ProcessState:
        """``cuCheckpointProcessGetState``. Blocks while a verb on the same target is in flight."""
        self._require_same_process("get_state", target)
        state = int(self._call("get_state", self._opened.cuCheckpointProcessGetState, target.pid))
        try:
            return _STATES[state]
        except KeyError:
            detail = f"process {target.pid} is in state {state}, which this version does not know"
            raise DriverError("get_state", DriverCode.UNKNOWN, detail=detail) from None

    def lock(self, target: Target, timeout_ms: int) -> None:
        """``cuCheckpointProcessLock``. ``timeout_ms`` 0 waits for ever; NOT_READY leaves the target running."""
        self._require_same_process("lock", target)
        arguments = self._opened.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._call("lock", self._opened.cuCheckpointProcessLock, target.pid, arguments)

    def checkpoint(self, target: Target) -> None:
        """``cuCheckpointProcessCheckpoint``. Device memory moves into the target's own RSS, at about 2 GB/s."""
        self._require_same_process("checkpoint", target)
        self._call("checkpoint", self._opened.cuCheckpointProcessCheckpoint, target.pid, None)

    def restore(self, target: Target) -> None:
        """``cuCheckpointProcessRestore`` to the same GPUs. OUT_OF_MEMORY is permanent (measured)."""
        self._require_same_process("restore", target)
        # No GPU map: an identity restore needs none, and a map would have to name every GPU of the host.
        self._call("restore", self._opened.cuCheckpointProcessRestore, target.pid, None)

    def unlock(self, target: Target) -> None:
        """``cuCheckpointProcessUnlock``. It may return an error although the state is RUNNING afterwards."""
        self._require_same_process("unlock", target)
        self._call("unlock", self._opened.cuCheckpointProcessUnlock, target.pid, None)

    def devices(self) -> tuple[str, ...]:
        """UUIDs of all GPUs that NVML sees, whatever ``CUDA_VISIBLE_DEVICES`` says."""
        nvml = _open_nvml()
        found = []
        for index in range(int(_nvml_call("nvmlDeviceGetCount", nvml.nvmlDeviceGetCount))):
            handle = _nvml_call("nvmlDeviceGetHandleByIndex", nvml.nvmlDeviceGetHandleByIndex, index)
            uuid = _nvml_call("nvmlDeviceGetUUID", nvml.nvmlDeviceGetUUID, handle)
            # nvidia-ml-py returned bytes until 11.5
            found.append(uuid.decode() if isinstance(uuid, bytes) else str(uuid))
        return tuple(found)

    def device_memory(self, device: str) -> DeviceMemory:
        """NVML's reading of a GPU by UUID (``GPU-...``), in bytes.

        ``used_bytes`` is the "used" of ``nvidia-smi``: NVML's version 2 structure, which counts the driver's own
        reserve (some 600 MiB on H200) apart; version 1 counts it as used. ``total_bytes`` is used + free, without
        that reserve: nobody can have it, and admission must not promise it.

        Raises:
            DriverError: NO_DEVICE for a UUID that is not on this host, otherwise UNKNOWN with NVML's name.
        """
        nvml = _open_nvml()
        handle = _nvml_call("nvmlDeviceGetHandleByUUID", nvml.nvmlDeviceGetHandleByUUID, device)
        memory = _nvml_call("nvmlDeviceGetMemoryInfo", nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        used = int(memory.used)
        return DeviceMemory(total_bytes=used + int(memory.free), used_bytes=used, holders=_holders(nvml, handle))

    def close(self) -> None:
        """Nothing to let go of. NVML is never shut down: unloading it made a later lock segfault its target (driver
        610, https://github.com/NVIDIA/cuda-checkpoint/issues/58)."""

    # Details

    @property
    def _opened(self) -> Any:
        if self._cuda is None:
            raise DriverError("driver", DriverCode.NOT_INITIALIZED, detail="open() has not been called")
        return self._cuda

    @staticmethod
    def _require_same_process(call: str, target: Target) -> None:
        """A pid can be reused, and a verb on a stranger would freeze or break it.

        The driver takes a pid, so a small window stays open after this; the service closes it with a pidfd on a child
        that only our parent reaps.
        """
        try:
            started = procfs.start_time(target.pid)
        except ProcessLookupError:
            started = None
        if started != target.start_time:
            detail = f"process {target.pid}, started at {target.start_time}, is gone"
            raise DriverError(call, DriverCode.OPERATING_SYSTEM, detail=detail)

    def _call(self, name: str, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        """Call the driver; its result, or DriverError with the driver's own code and name."""
        try:
            code, *results = function(*arguments)
        except ValueError as error:
            # The bindings' enums refuse a value that is younger than they are.
            raise DriverError(name, DriverCode.UNKNOWN, detail=f"answered something unknown: {error}") from error
        except (RuntimeError, OSError) as error:
            # The bindings raise these when libcuda is not there, or lacks the function (driver before 570).
            raise DriverError(name, DriverCode.UNKNOWN, "NO_DRIVER_FUNCTION", str(error)) from error
        if int(code) != 0:
            raise DriverError(name, int(code), getattr(code, "name", None))
        return results[0] if results else None


def _holders(nvml: Any, handle: Any) -> tuple[tuple[int, int], ...]:
    """(pid, bytes) of the processes on a GPU; none where NVML does not tell, which is no reason to fail a reading."""
    import pynvml

    try:
        processes = _nvml_call(
            "nvmlDeviceGetComputeRunningProcesses", nvml.nvmlDeviceGetComputeRunningProcesses, handle
        )
    except DriverError as error:
        # In some virtual machines and containers.
        if error.name in (
            f"NVML_ERROR_{pynvml.NVML_ERROR_NOT_SUPPORTED}",
            f"NVML_ERROR_{pynvml.NVML_ERROR_NO_PERMISSION}",
        ):
            return ()
        raise
    # A pid of another pid namespace means nothing here, or names a bystander. NVML gives no size (None) where
    # accounting is not possible, in some virtual machines.
    return tuple(
        (int(process.pid), int(process.usedGpuMemory))
        for process in processes
        if process.usedGpuMemory is not None and os.path.exists(f"/proc/{process.pid}")
    )


def _open_nvml() -> Any:
    """pynvml, initialised once in this process."""
    global _nvml_ready
    try:
        import pynvml
    except ImportError as error:
        raise DriverError("nvml", DriverCode.UNKNOWN, "IMPORT_ERROR", f"nvidia-ml-py is needed: {error}") from error
    with _nvml_lock:
        if not _nvml_ready:
            _nvml_call("nvmlInit", pynvml.nvmlInit)
            _nvml_ready = True
    return pynvml


def _nvml_call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; its errors as DriverError with NVML's number in the name."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        missing = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        number = getattr(error, "value", -1)
        code = DriverCode.NO_DEVICE if number in missing else DriverCode.UNKNOWN
        raise DriverError(name, code, f"NVML_ERROR_{number}", f"{error} {arguments[:1]}") from error

"""A target on a GPU; the commands are those of ``targets.TargetProcess``. The driver API only: no torch to wait for."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time

from checkpoint_executor.workers.cuda_calls import PrimaryContext, bindings, call, choose_device, device_uuids
from checkpoint_executor.workers.cuda_hash import compile_cubin
from tests.support import child

#: Above this, memory is only taken: nobody asks a process that fills the device for its checksum.
_PATTERN_LIMIT_BYTES = 256 << 20

#: Runs until the host says stop, and tells the host when it runs and when it is done: nobody has to call CUDA for that.
_BUSY_SOURCE = """
extern "C" __global__ void busy(volatile int *flags) {
  flags[0] = 1;
  __threadfence_system();
  while (flags[1] == 0) {}
  flags[2] = 1;
  __threadfence_system();
}
"""


class CudaTarget(child.CallsFromThread):
    def __init__(self, device: str, seed: int = 0, size_bytes: int = 0, leave_bytes: int | None = None) -> None:
        self._context = PrimaryContext(choose_device(device_uuids(), device, 0))
        if leave_bytes is None:
            # More than one allocation, of uneven sizes that are no multiple of a page.
            sizes = [size for size in (size_bytes // 3 + 1, size_bytes - size_bytes // 3 - 1) if size > 0]
            self._memory = [(int(call("cuMemAlloc", size)), size) for size in sizes]
        else:
            self._memory = take_all_but(leave_bytes)
        self.pattern_checksum = self._fill(seed) if size_bytes <= _PATTERN_LIMIT_BYTES and leave_bytes is None else ""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._calls = 0
        self._flags: ctypes.Array[ctypes.c_int] | None = None

    def _fill(self, seed: int) -> str:
        expected = hashlib.sha256()
        for index, (address, size) in enumerate(self._memory):
            pattern = hashlib.shake_128(f"{seed}/{index}".encode()).digest(size)
            expected.update(pattern)
            buffer = ctypes.create_string_buffer(pattern, size)
            call("cuMemcpyHtoD", address, ctypes.addressof(buffer), size)
        return expected.hexdigest()

    def checksum(self) -> str:
        # No synchronise: on a checkpointed process it would end it (seen on drivers 580 and 595); a copy waits.
        call("cuCtxSetCurrent", self._context.handle)
        digest = hashlib.sha256()
        for address, size in self._memory:
            buffer = ctypes.create_string_buffer(size)
            call("cuMemcpyDtoH", ctypes.addressof(buffer), address, size)
            digest.update(buffer.raw)
        return digest.hexdigest()

    def address(self) -> list[int]:
        return [address for address, _ in self._memory]

    def start_busy(self, kind: str = "long", threads: int = 1) -> None:
        if kind == "long":
            self._start_kernel()
            return
        self._stop.clear()
        inside = threading.Barrier(threads + 1)
        self._threads = [
            threading.Thread(target=self._short_calls, args=(inside,), daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        inside.wait()

    def _start_kernel(self) -> None:
        cuda = bindings()
        cubin = compile_cubin(_BUSY_SOURCE, self._context.architecture)
        kernel = call("cuModuleGetFunction", call("cuModuleLoadData", ctypes.addressof(cubin)), b"busy")
        mapped = int(call("cuMemHostAlloc", 3 * 4, int(cuda.CU_MEMHOSTALLOC_DEVICEMAP)))
        self._flags = (ctypes.c_int * 3).from_address(mapped)
        self._flags[:] = [0, 0, 0]
        argument = ctypes.c_uint64(int(call("cuMemHostGetDevicePointer", mapped, 0)))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream = call("cuStreamCreate", int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        self._wait_for(0)

    def _wait_for(self, flag: int) -> None:
        while self._flags is not None and self._flags[flag] == 0:
            time.sleep(0.001)

    def _short_calls(self, inside: threading.Barrier) -> None:
        call("cuCtxSetCurrent", self._context.handle)
        scratch = int(call("cuMemAlloc", 4096))
        inside.wait()
        while not self._stop.is_set():
            call("cuMemsetD8", scratch, 1, 4096)
            self._calls += 1
        call("cuMemFree", scratch)

    def stop_busy(self) -> int:
        self._stop.set()
        if self._flags is not None:
            self._flags[1] = 1
            self._wait_for(2)
            self._flags = None
        for thread in self._threads:
            thread.join()
        return self._calls


def take_all_but(leave_bytes: int) -> list[tuple[int, int]]:
    """Allocate until at most so many bytes are free."""
    taken: list[tuple[int, int]] = []
    size = 1 << 34
    while size >= 2 << 20:
        free, _ = call("cuMemGetInfo")
        if int(free) <= leave_bytes:
            break
        try:
            if int(free) - size < leave_bytes and size > 2 << 20:
                raise MemoryError("too much at once")
            taken.append((int(call("cuMemAlloc", size)), size))
        except MemoryError:
            size //= 2
    return taken


def main() -> None:
    given = child.arguments()
    parent = child.channel()
    try:
        target = CudaTarget(**given)
    except MemoryError as error:
        parent.send({"no_memory": str(error)})
        return
    commands = {name: getattr(target, name) for name in dir(target) if not name.startswith("_")}
    child.serve(parent, commands, checksum=target.pattern_checksum)


if __name__ == "__main__":
    main()

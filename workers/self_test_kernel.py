"""A kernel whose threads need much local memory, for the self-test.

The driver makes a context's local memory larger for it, and a sleep gives that back and gets it again
(:mod:`~checkpoint_executor.workers.cuda_local_memory`). A driver that does not tell the larger limit, or with which the
kernel's graph does not survive it, shows in the self-test instead of in somebody's engine.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

from checkpoint_executor.workers.cuda_calls import PrimaryContext, call
from checkpoint_executor.workers.cuda_hash import compile_cubin

if TYPE_CHECKING:
    import torch

__all__ = ["LocalArrays", "open_local_arrays"]

_log = logging.getLogger(__name__)

_THREADS = 256

#: Each thread fills its array, mixes it in an order that depends on the data, so that it cannot be kept in registers,
#: and folds it. What another thread or an old launch left there would change the result.
_SOURCE = """
extern "C" __global__ void mix(const int *seeds, int *out) {
  unsigned array[ARRAY];
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned state = seeds[0] + index;
  for (int i = 0; i < ARRAY; ++i) array[i] = state = state * 1664525u + 1013904223u;
  for (int i = 0; i < ARRAY; ++i) array[(state >> 8) % ARRAY] ^= state = state * 1664525u + array[i];
  for (int i = 0; i < ARRAY; ++i) state = state * 31u + array[i];
  out[index] = state;
}
"""


def open_local_arrays(ordinal: int, array_ints: int) -> LocalArrays | None:
    """The kernel; None, and a word about it in the log, where it cannot be compiled."""
    try:
        return LocalArrays(ordinal, array_ints)
    except Exception as error:  # noqa: BLE001 - the bindings raise what they like if NVRTC is missing or too old
        _log.warning("kernels' local memory is not tested: %s", error)
        return None


class LocalArrays:
    """The kernel, loaded.

    Args:
        ordinal: torch's index of the device. array_ints: length of each thread's array; 4 bytes of local memory each,
            for every thread that the device can run at once.

    Raises:
        ImportError, RuntimeError, DriverError: no NVRTC, or it refused the kernel.
    """

    def __init__(self, ordinal: int, array_ints: int) -> None:
        context = PrimaryContext(ordinal)
        #: More threads than the device holds at once, so that all of its local memory is used.
        threads = 2 * context.attribute("MULTIPROCESSOR_COUNT") * context.attribute("MAX_THREADS_PER_MULTIPROCESSOR")
        self._blocks = threads // _THREADS
        self._cubin = compile_cubin(f"#define ARRAY {array_ints}\n{_SOURCE}", context.architecture)
        self._module = call("cuModuleLoadData", ctypes.addressof(self._cubin))
        self._kernel = call("cuModuleGetFunction", self._module, b"mix")

    @property
    def numbers(self) -> int:
        """How many numbers it computes."""
        return self._blocks * _THREADS

    def launch(self, seeds: torch.Tensor, out: torch.Tensor) -> None:
        """Compute ``out`` (int32, shape ``(numbers,)``) from ``seeds`` (int32, shape ``(1,)``) on torch's current
        stream, whose capture it joins."""
        import torch

        values = (ctypes.c_uint64(seeds.data_ptr()), ctypes.c_uint64(out.data_ptr()))
        # The driver copies the arguments before it returns, and into the graph in a capture.
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = torch.cuda.current_stream(out.device).cuda_stream
        arguments = ctypes.addressof(pointers)
        call("cuLaunchKernel", self._kernel, self._blocks, 1, 1, _THREADS, 1, 1, 0, stream, arguments, 0)

"""The memory that the driver keeps for kernels' local variables: given back before a checkpoint, got again after it.

Knows the context's stack limit and what it costs. Knows nothing of stages.

A context holds local memory for as many threads as the device can run at once, whether or not a kernel needs any: on
H200 (132 multiprocessors, 2,048 threads each) 264 MiB at the default of 1,024 bytes a thread. The driver grows it when
a kernel needs more, and keeps it: one kernel with 16 KiB of local arrays makes it 4.1 GiB. Nothing in it is worth
keeping once the device is idle, and a checkpoint would copy it at about 2 GB/s.

Only between the last work of a sleep and the first of a wake may it be gone. A graph holds the size that was set when
it was captured, and its replay at a smaller one is an unspecified launch failure, which ends the context (measured,
driver 580.159); the same size at another place is as good, since a growing does just that.
"""

from __future__ import annotations

from checkpoint_executor.driver_states import DriverError
from checkpoint_executor.workers.cuda_calls import PrimaryContext, bindings, call

__all__ = ["LocalMemory"]

_PAGE_BYTES = 2 << 20


class LocalMemory:
    """A context's local memory.

    Args:
        context: the context whose it is.
    """

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._threads = context.attribute("MULTIPROCESSOR_COUNT") * context.attribute("MAX_THREADS_PER_MULTIPROCESSOR")
        #: The limit to set again, while it is given back.
        self._limit_bytes: int | None = None

    @property
    def size_bytes(self) -> int:
        """Device bytes that it takes now: the limit a thread times all threads of the device, in whole pages.

        NVML sees the same of every change, to the byte (H200, limits of 0 to 16,384).
        """
        return -(-self._limit() * self._threads // _PAGE_BYTES) * _PAGE_BYTES

    def release(self) -> int:
        """Give it back. Nothing may run in the context until :meth:`restore`; the caller has waited for what did.

        Returns:
            Device bytes given back; 0 where the driver would not, which costs only time.
        """
        if self._limit_bytes is not None:
            return 0
        try:
            limit_bytes, size_bytes = self._limit(), self.size_bytes
            self._set(0)
        except DriverError:
            return 0
        self._limit_bytes = limit_bytes
        return size_bytes - self.size_bytes

    def restore(self) -> None:
        """Get it again, as large as it was. Idempotent.

        Raises:
            MemoryError: no room on the device. DriverError: any other code.
        """
        if self._limit_bytes is not None:
            self._set(self._limit_bytes)
            self._limit_bytes = None

    def _limit(self) -> int:
        self._context.make_current()
        return int(call("cuCtxGetLimit", bindings().CUlimit.CU_LIMIT_STACK_SIZE))

    def _set(self, limit_bytes: int) -> None:
        self._context.make_current()
        call("cuCtxSetLimit", bindings().CUlimit.CU_LIMIT_STACK_SIZE, limit_bytes)

"""One host arena for everything a worker backs up: huge pages, touched by several threads, pinned once, kept.

Knows memory of the host and how the driver pins it. Does not know what is put there. No torch, so that other
front doors (vLLM's workers) can use it as well.

Why not torch's pinned allocator: 16 GiB took 7.9 s there and 1.2 s this way (0.77 s touching, 0.42 s registering), it
rounds up to powers of two, and the driver re-pins registered memory page by page at every restore, which huge pages
make 0.3 s faster (``docs/measurements``; H200, 580.159).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from checkpoint_executor.workers.cuda_calls import call

__all__ = ["HostArena"]

_log = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20

#: With eight, touching 16 GiB of huge pages took 0.77 s.
_TOUCH_THREADS = 8

_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_MADV_DONTFORK = getattr(mmap, "MADV_DONTFORK", 10)
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1

_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


class HostArena:
    """Pinned host memory that is got once and kept, at an address that changes only when it grows.

    Args:
        numa_node: node to take the memory from, normally the GPU's; -1 leaves the choice to the kernel.
        registered: whether to pin it with the driver (``cuMemHostRegister``), which needs a current context.

    For one thread at a time. A child of this process does not inherit the memory (``MADV_DONTFORK``): without that,
    forking with 4 GiB took 98 ms instead of 0.8, and a child's copy of pinned pages is undefined.
    """

    def __init__(self, *, numa_node: int = -1, registered: bool = True) -> None:
        self._numa_node = numa_node
        self._registered = registered
        self._address = 0
        self._capacity_bytes = 0
        self._generation = 0
        self._warned = False

    @property
    def address(self) -> int:
        """Where it begins; 0 while there is none."""
        return self._address

    @property
    def capacity_bytes(self) -> int:
        """Its size: what was asked for, rounded up to whole huge pages."""
        return self._capacity_bytes

    @property
    def generation(self) -> int:
        """Changes whenever the memory, and with it what it held, was given up."""
        return self._generation

    def prepare(self, size_bytes: int) -> None:
        """Have room for ``size_bytes``; what it held is lost if it has to grow. Nothing is done if there is room.

        May be called early (while a model loads, say), so that the first sleep is not the slow one.

        Raises:
            MemoryError: the host has no such memory. DriverError: it could not be pinned (``ulimit -l`` does not count
                for the driver; a cgroup's memory limit does).
        """
        if size_bytes <= self._capacity_bytes:
            return
        # The old memory goes first: both at once may not fit, and its contents are copied anew anyway.
        self.close()
        capacity = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        address = _map_aligned(capacity)
        self._address, self._capacity_bytes = address, capacity
        try:
            self._advise()
            self._touch()
            if self._registered:
                call("cuMemHostRegister", address, capacity, 0)
        except BaseException:
            self._unmap()
            raise

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The bytes themselves. Valid until :meth:`close` or a :meth:`prepare` that grows: do not keep it."""
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self._capacity_bytes:
            raise ValueError(f"{offset_bytes}+{size_bytes} is outside the arena of {self._capacity_bytes} bytes")
        buffer = (ctypes.c_char * size_bytes).from_address(self._address + offset_bytes)
        return memoryview(buffer).cast("B")

    def close(self) -> None:
        """Give the memory back. May be called again."""
        if self._address:
            if self._registered:
                call("cuMemHostUnregister", self._address)
            self._unmap()

    # Details

    def _unmap(self) -> None:
        _libc.munmap(self._address, self._capacity_bytes)
        self._address = self._capacity_bytes = 0
        self._generation += 1

    def _advise(self) -> None:
        if _libc.madvise(self._address, self._capacity_bytes, _MADV_DONTFORK) != 0:
            _log.warning("the backup arena is copied when this process forks: %s", os.strerror(ctypes.get_errno()))
        if _libc.madvise(self._address, self._capacity_bytes, _MADV_HUGEPAGE) != 0:
            self._warn_small_pages(os.strerror(ctypes.get_errno()))
        self._bind()

    def _bind(self) -> None:
        """Prefer the GPU's node. Preferred and not strict: memory of the far node is slower, no memory is worse."""
        number = _SYS_MBIND.get(os.uname().machine)
        if self._numa_node < 0 or number is None:
            return
        bits = ctypes.sizeof(ctypes.c_ulong) * 8
        words = self._numa_node // bits + 1
        mask = (ctypes.c_ulong * words)()
        mask[self._numa_node // bits] = 1 << (self._numa_node % bits)
        # The kernel reads one bit less than it is told (mbind(2), "maxnode").
        result = _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(self._address),
            ctypes.c_ulong(self._capacity_bytes),
            ctypes.c_int(_MPOL_PREFERRED),
            mask,
            ctypes.c_ulong(words * bits + 1),
            ctypes.c_uint(0),
        )
        if result != 0:
            # Seccomp profiles of containers refuse it. Only speed is lost.
            _log.info(
                "the backup arena is not bound to NUMA node %d: %s", self._numa_node, os.strerror(ctypes.get_errno())
            )

    def _touch(self) -> None:
        """Fault every page in now, by several threads: ctypes releases the GIL for the time of the memset."""
        pages = self._capacity_bytes // _HUGE_PAGE_BYTES
        share = -(-pages // _TOUCH_THREADS) * _HUGE_PAGE_BYTES
        starts = range(0, self._capacity_bytes, share)
        with ThreadPoolExecutor(_TOUCH_THREADS, thread_name_prefix="arena-touch") as threads:
            sizes = (min(share, self._capacity_bytes - start) for start in starts)
            list(threads.map(lambda start, size: ctypes.memset(self._address + start, 0, size), starts, sizes))
        if not self._warned and not self._has_huge_pages():
            self._warn_small_pages("the kernel gave small ones")

    def _has_huge_pages(self) -> bool:
        """Whether at least half of the arena lies on huge pages. True where the kernel does not say."""
        try:
            mapping = _smaps_kib(self._address, self._capacity_bytes)
        except OSError:
            return True
        return mapping is None or mapping * 2 >= self._capacity_bytes >> 10

    def _warn_small_pages(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "no huge pages for the backup arena (%s): carrying on with small ones; getting the arena and every "
                "driver restore take longer. /sys/kernel/mm/transparent_hugepage/enabled should say madvise or always",
                why,
            )


def _map_aligned(size_bytes: int) -> int:
    """Anonymous memory that begins on a huge page, so that all of it can lie on such. Raises MemoryError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    total = size_bytes + _HUGE_PAGE_BYTES
    start = _libc.mmap(None, total, _PROT_READ_WRITE, flags, -1, 0)
    if start in (None, _MAP_FAILED):
        raise MemoryError(f"no host memory for a backup arena of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    address = -(-int(start) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    if address > start:
        _libc.munmap(start, address - start)
    if address + size_bytes < start + total:
        _libc.munmap(address + size_bytes, start + total - address - size_bytes)
    return address


def _smaps_kib(address: int, size_bytes: int) -> int | None:
    """KiB of anonymous huge pages in the mappings that begin inside the range; None if no mapping was found."""
    inside = False
    found: int | None = None
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                # The kernel may have merged the arena with a neighbour that has the same flags.
                inside = start < address + size_bytes and end > address
            elif inside and head == "AnonHugePages:":
                found = (found or 0) + int(line.split()[1])
    return found

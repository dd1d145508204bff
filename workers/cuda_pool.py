"""Memory for ``torch.cuda.MemPool`` whose callbacks never enter Python, so that torch's lock and the GIL cannot
deadlock.

torch calls a pool's allocator while it holds its own lock. A callback into Python then waits for the GIL, while
another thread that frees a tensor holds the GIL and waits for that lock: seen at once with four threads
(``driver-facts``). Nothing that only orders *our* threads helps, since any thread of the process may free a tensor at
any time. So the callbacks must be native, and no library in the process has a function that maps memory behind
torch's signature: hence 366 bytes of machine code, which call the driver's functions through a table and note what
they did in a journal. They take no lock and know no Python. Python reads the journal when it wants to know
(:meth:`NativeCallbacks.drain`).

The code is compiled from :data:`SOURCE`, which is the thing to read and to change; it has no relocations, uses no
global and no vector register, and finds its state in an extra argument that a stub of 22 bytes adds. A test compiles
the source anew, and runs both it and the bytes here against the same fake driver, with several threads.

This file knows neither tags nor sleeping. The tables of torch, the driver and the journal are its only subjects.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

__all__ = ["SOURCE", "NativeCallbacks", "TorchPool", "driver_functions"]

#: Compiled by gcc 12.2 with ``COMPILER_OPTIONS``; the bytes of its .text section are ``_CODE``.
SOURCE = r"""
typedef unsigned long long u64;

struct record { u64 address; long long size; };

struct state {
  int (*reserve)(u64 *, u64, u64, u64, u64);            /* cuMemAddressReserve */
  int (*unreserve)(u64, u64);                           /* cuMemAddressFree */
  int (*create)(u64 *, u64, const void *, u64);         /* cuMemCreate */
  int (*release)(u64);                                  /* cuMemRelease */
  int (*map)(u64, u64, u64, u64, u64);                  /* cuMemMap */
  int (*unmap)(u64, u64);                               /* cuMemUnmap */
  int (*set_access)(u64, u64, const void *, u64);       /* cuMemSetAccess */
  int (*push)(void *);                                  /* cuCtxPushCurrent */
  int (*pop)(void **);                                  /* cuCtxPopCurrent */
  int (*synchronize)(void);                             /* cuCtxSynchronize */
  void *context;
  const void *properties, *access;
  u64 granularity, device, capacity, claimed, drained;
  struct record *journal;
};

static inline void publish(struct state *s, u64 address, long long size) {
  u64 slot = __atomic_fetch_add(&s->claimed, 1, __ATOMIC_SEQ_CST) & (s->capacity - 1);
  s->journal[slot].size = size;
  __atomic_store_n(&s->journal[slot].address, address, __ATOMIC_RELEASE);
}

void *pool_alloc(u64 size, int device, void *stream, struct state *s) {
  u64 address = 0, handle = 0;
  size = (size + s->granularity - 1) & -s->granularity;
  /* Half of the journal is kept for the frees of what is allocated: a free is never lost. */
  if (device != (int)s->device || s->claimed - s->drained >= s->capacity / 2) return 0;
  if (s->reserve(&address, size, 0, 0, 0)) return 0;
  int failed = s->create(&handle, size, s->properties, 0);
  if (!failed) {
    failed = s->map(address, size, 0, handle, 0);
    if (!failed && (failed = s->set_access(address, size, s->access, 1))) s->unmap(address, size);
    s->release(handle); /* from here on the mapping alone keeps the memory */
  }
  if (failed) {
    s->unreserve(address, size);
    return 0;
  }
  publish(s, address, size);
  return (void *)address;
}

void pool_free(u64 address, u64 size, int device, void *stream, struct state *s) {
  void *context;
  size = (size + s->granularity - 1) & -s->granularity;
  /* cudaFree would wait for work that still uses the memory; cuMemUnmap does not. */
  s->push(s->context);
  s->synchronize();
  s->pop(&context);
  s->unmap(address, size); /* fails harmlessly if the tag sleeps */
  /* Before the address can be given out again, so that the journal stays in order. */
  publish(s, address, -(long long)size);
  s->unreserve(address, size);
}
"""

COMPILER_OPTIONS = (
    "-Os -ffreestanding -fno-stack-protector -fPIC -fno-asynchronous-unwind-tables -fcf-protection=none "
    "-mgeneral-regs-only"
)

_CODE = bytes.fromhex(
    "b901000000f0480fc18f80000000488b477848ffc84821c848c1e0044803879000000048895008488930c35531c05348"
    "83ec18488b69684889042448894424083b7170740731c0e9bf000000488b4178488b91800000004889cb482b91880000"
    "0048d1e84839c273dc488d443dff48f7dd4531c031c94821c531d24889e74889eeff1385c075be31c9488b5358488d7c"
    "24084889eeff531085c075604531c031d2488b4c2408488b3c244889eeff532085c07521488b5360488b3c24b9010000"
    "004889eeff533085c07414488b3c244889eeff5328488b7c2408ff5318eb1d488b7c2408ff5318488b34244889ea4889"
    "dfe80affffff488b0424eb0f488b3c244889eeff5308e93affffff4883c4185b5dc341544989fc55534c89c34883ec10"
    "498b6868498b7850488d4435ff48f7dd4821c541ff5038ff5348488d7c2408ff53404889ee4c89e7ff53284889ea4c89"
    "e64889df48f7dae8a4feffff4889ee4c89e7ff53084883c4105b5d415cc3"
)
_ALLOC_OFFSET = 0x2B
_FREE_OFFSET = 0x112

#: Entries of the journal, a power of two. Half of them exceeds the number of 2 MiB segments that 192 GiB can hold.
_JOURNAL_ENTRIES = 1 << 18

#: The driver's exported names, in the order of the table. The unversioned names of two are their old forms.
_DRIVER_FUNCTIONS = (
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
)


class _Record(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_int64)]


class _State(ctypes.Structure):
    """``struct state`` of the source."""

    _fields_: ClassVar[Any] = [
        ("functions", ctypes.c_void_p * len(_DRIVER_FUNCTIONS)),
        ("context", ctypes.c_void_p),
        ("properties", ctypes.c_void_p),
        ("access", ctypes.c_void_p),
        ("granularity", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("claimed", ctypes.c_uint64),
        ("drained", ctypes.c_uint64),
        ("journal", ctypes.c_void_p),
    ]


def driver_functions() -> tuple[int, ...]:
    """Addresses of the driver's functions, in the table's order. Raises OSError or AttributeError without a driver."""
    library = ctypes.CDLL("libcuda.so.1")
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _DRIVER_FUNCTIONS)


class NativeCallbacks:
    """An allocate and a free function with torch's signatures, for one device.

    Every allocation reserves an address range, fills it with memory and maps it; a free undoes all of it. Neither is
    ever stopped, so this object must live as long as torch may call: callers keep it for the life of the process.

    Args:
        functions: the driver's functions (:func:`driver_functions`).
        context: ``CUcontext`` to synchronise before memory is unmapped.
        properties, access: addresses of a ``CUmemAllocationProp`` and a ``CUmemAccessDesc`` that stay alive.
        granularity: to which sizes are rounded up, bytes, a power of two.
        device: torch's index of the device; for any other the allocation fails.
        code: machine code and its two offsets, for tests.

    Raises:
        NotImplementedError: no code for this processor. OSError: the system forbids new executable memory.
    """

    def __init__(
        self,
        functions: tuple[int, ...],
        *,
        context: int,
        properties: int,
        access: int,
        granularity: int,
        device: int,
        code: tuple[bytes, int, int] = (_CODE, _ALLOC_OFFSET, _FREE_OFFSET),
    ) -> None:
        machine = platform.machine()
        if machine != "x86_64":
            # The driver's checkpoint does not support Arm before 595 either.
            raise NotImplementedError(
                f"allocator.use() has no code for {machine}: use allocator.empty() or allocator.materialize()"
            )
        self._journal = (_Record * _JOURNAL_ENTRIES)()
        self._state = _State(
            functions=(ctypes.c_void_p * len(_DRIVER_FUNCTIONS))(*functions),
            context=context,
            properties=properties,
            access=access,
            granularity=granularity,
            device=device,
            capacity=_JOURNAL_ENTRIES,
            journal=ctypes.addressof(self._journal),
        )
        self._drain_lock = threading.Lock()
        self.alloc_pointer, self.free_pointer = _load(code, ctypes.addressof(self._state))

    def drain(self) -> list[tuple[int, int]]:
        """What happened since the last call, oldest first: (address, bytes) allocated, (address, -bytes) freed."""
        events = []
        with self._drain_lock:
            for number in range(self._state.drained, self._state.claimed):
                record = self._journal[number & (_JOURNAL_ENTRIES - 1)]
                while record.address == 0:
                    # Another thread has taken the slot and is about to fill it, a few instructions later.
                    time.sleep(0)
                events.append((record.address, record.size))
                record.address = 0
            self._state.drained += len(events)
        return events


def _load(code: tuple[bytes, int, int], state: int) -> tuple[int, int]:
    """Put the code and one stub per function on a page; addresses of the stubs."""
    body, alloc_offset, free_offset = code
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    if page in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "no page for the pool's callbacks")
    stubs = body + bytes(-len(body) % 16)
    entries = []
    # The state goes into the argument after the function's own: the fourth (rcx) and the fifth (r8).
    for register, offset in ((b"\x48\xb9", alloc_offset), (b"\x49\xb8", free_offset)):
        entries.append(page + len(stubs))
        stubs += register + state.to_bytes(8, "little")  # mov $state, %rcx or %r8
        stubs += b"\x48\xb8" + (page + offset).to_bytes(8, "little")  # mov $function, %rax
        stubs += b"\xff\xe0"  # jmp *%rax
    ctypes.memmove(page, stubs, len(stubs))
    # Never writable and executable at once: hardened systems forbid that.
    if libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        error = ctypes.get_errno()
        libc.munmap(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE))
        raise OSError(error, f"the system forbids executable memory, which allocator.use() needs: {os.strerror(error)}")
    return entries[0], entries[1]


class _OpenPool:
    """A MemPool that the current thread allocates from, and can leave and enter again."""

    def __init__(self, pool: Any, device: int) -> None:
        self.pool = pool
        self._device = device
        self._routing: Any = None

    def enter(self) -> None:
        import torch

        self._routing = torch.cuda.use_mem_pool(self.pool, device=self._device)
        self._routing.__enter__()

    def leave(self) -> None:
        routing, self._routing = self._routing, None
        routing.__exit__(None, None, None)


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Pools that this thread has open, innermost last; only the last one is entered.
        self.open: list[_OpenPool] = []


_thread = _Thread()


class _Closed:
    """MemPools whose use has ended, until none is open in any thread.

    torch lets go of a MemPool's unused segments when its object dies, and ends the process if any thread routes its
    allocations to a pool at that moment (seen with torch 2.11: "captures_underway.empty() INTERNAL ASSERT FAILED" in
    ``MemPool::~MemPool``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._waiting: list[Any] = []

    def opening(self) -> None:
        with self._lock:
            self._open += 1

    def closed(self, pool: _OpenPool | None) -> None:
        """Takes the MemPool out of ``pool``: the last reference must go in here."""
        with self._lock:
            self._open -= 1
            if pool is not None:
                self._waiting.append(pool.pool)
                pool.pool = None
            if self._open == 0:
                # Here and not after the lock: an opening must not come between the look and the destructors.
                self._waiting.clear()


_closed = _Closed()


class TorchPool:
    """``torch.cuda.MemPool`` over :class:`NativeCallbacks`; one for each tag, kept for the life of the process."""

    def __init__(self, callbacks: NativeCallbacks, device: int) -> None:
        import torch

        self._callbacks = callbacks
        self._device = device
        # Pools outlive their MemPool objects while tensors do, and refer to this by a plain pointer.
        self._allocator: Any = torch._C._cuda_customAllocator(callbacks.alloc_pointer, callbacks.free_pointer)

    def drain(self) -> list[tuple[int, int]]:
        """Segments allocated and freed since the last call; see :meth:`NativeCallbacks.drain`."""
        return self._callbacks.drain()

    @contextmanager
    def use(self) -> Iterator[None]:
        """What this thread allocates inside lands in the pool. Other threads open it for themselves; it may nest.

        Each use has a MemPool of its own: torch refuses to open one twice at a time, and lets go of the unused
        segments of a pool only when its object is gone. Tensors keep their memory for as long as they live.
        """
        import torch

        # torch routes to the pool that was opened first, so an inner one has to close the outer one meanwhile.
        outer = _thread.open[-1] if _thread.open else None
        pool: _OpenPool | None = None
        _closed.opening()
        try:
            pool = _OpenPool(torch.cuda.MemPool(self._allocator), self._device)
            if outer:
                outer.leave()
            try:
                pool.enter()
                _thread.open.append(pool)
                try:
                    yield
                finally:
                    _thread.open.pop().leave()
            finally:
                if outer:
                    outer.enter()
        finally:
            _closed.closed(pool)

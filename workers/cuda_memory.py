"""The sleeping allocator on a GPU: memory by tag, at addresses that are reserved once and never change.

Knows CUDA's virtual memory, the tags' rules (``weights`` are backed up, ``kv_cache`` is dropped) and what torch needs
to see a tensor there. Knows nothing of ranks, graphs or the driver's checkpoint, and judges no order of calls.

How memory sleeps: an address range is reserved (``cuMemAddressReserve``), physical memory is made and mapped into it;
sleep unmaps the memory, which frees it, and keeps the range; wake makes and maps new memory at the same address, so
that pointers in captured graphs and kernels stay right. A handle is released as soon as its memory is mapped: the
mapping alone then keeps the memory, and unmapping frees it. Nothing here is ever exported, managed
(``cuMemAllocManaged``) or multicast: the driver can checkpoint none of that.

How tensors get there, without a C++ extension: ``torch.as_tensor`` over an object with ``__cuda_array_interface__``,
a public protocol that keeps the object alive for as long as any tensor looks at the memory, and therefore says when
it is free. The interface knows no bfloat16 or float8, so the bytes are taken as uint8 and a tensor of the wanted type
is set on their storage; it is no view, so it can be a parameter. (``torch._C._construct_storage_from_data_pointer``
would be one call, but has no owner; a DLPack capsule from ctypes would be the same idea with more code.)

Why frees are queued: a tensor dies whenever Python says so, in the garbage collector of any thread, perhaps while the
process is checkpointed, where a CUDA call would end it. So the end of a tensor only notes its allocation; the device
hears of it at the allocator's next call.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from checkpoint_executor.driver_states import DriverError
from checkpoint_executor.tags import ALL_TAGS, BACKED_UP, KV_CACHE, WEIGHTS
from checkpoint_executor.workers.cuda_backup import Backup, Region
from checkpoint_executor.workers.cuda_calls import PrimaryContext, bindings, call
from checkpoint_executor.workers.cuda_hash import Hasher

if TYPE_CHECKING:
    import torch

    from checkpoint_executor.workers.cuda_pool import TorchPool

__all__ = ["AddressRange", "Copier", "CudaAllocation", "CudaAllocator", "DeviceProperties"]

M = TypeVar("M", bound="torch.nn.Module")

#: torch's own allocator aligns to this, and kernels choose their vector width by it.
_ALIGNMENT = 512

#: Large ranges are mapped, and so woken, in pieces of this size: the copy of one runs while the next is mapped.
_PIECE_BYTES = 256 << 20


class DeviceProperties:
    """How physical memory on one device is asked for.

    Args:
        context: the device. exportable: whether peers may import it (a workspace; never the allocator's own memory).
    """

    def __init__(self, context: PrimaryContext, *, exportable: bool = False) -> None:
        cuda = bindings()
        self.allocation = cuda.CUmemAllocationProp()
        self.allocation.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.allocation.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.allocation.location.id = context.ordinal
        if exportable:
            handle_type = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self.allocation.requestedHandleTypes = handle_type
        self.access = cuda.CUmemAccessDesc()
        self.access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.access.location.id = context.ordinal
        self.access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(call("cuMemGetAllocationGranularity", self.allocation, minimum))

    def rounded(self, size_bytes: int) -> int:
        """The size of physical memory that holds so many bytes."""
        return -(-size_bytes // self.granularity) * self.granularity


class AddressRange:
    """A range of device addresses and the memory behind it, if any.

    Args:
        properties: of the memory. size_bytes: a multiple of the granularity.
        address: a range reserved by somebody else and mapped in one piece; 0 reserves a new one, not mapped.

    Raises:
        MemoryError: no addresses left.
    """

    def __init__(self, properties: DeviceProperties, size_bytes: int, address: int = 0) -> None:
        self._properties = properties
        self.size_bytes = size_bytes
        self._piece_bytes = size_bytes if address else _PIECE_BYTES
        self._mapped_bytes = size_bytes if address else 0
        self.address = address or int(call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory behind any of it."""
        return self._mapped_bytes > 0

    def map(self) -> Iterator[tuple[int, int]]:
        """Make memory and map it, piece by piece; yields (address, bytes) of each piece as it becomes usable.

        Raises:
            MemoryError: no room on the device; the pieces before stay mapped (:meth:`unmap`).
        """
        while self._mapped_bytes < self.size_bytes:
            size = min(self._piece_bytes, self.size_bytes - self._mapped_bytes)
            address = self.address + self._mapped_bytes
            handle = call("cuMemCreate", size, self._properties.allocation, 0)
            try:
                call("cuMemMap", address, size, 0, handle, 0)
            finally:
                # From here on the mapping alone keeps the memory.
                call("cuMemRelease", handle)
            self._mapped_bytes += size
            call("cuMemSetAccess", address, size, [self._properties.access], 1)
            yield address, size

    def map_all(self) -> None:
        """Map all of it or, raising MemoryError, none."""
        try:
            for _ in self.map():
                pass
        except BaseException:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Free the memory, keep the addresses. The caller has made sure that no work uses it."""
        while self._mapped_bytes:
            # Only whole mappings can be undone.
            size = self._mapped_bytes % self._piece_bytes or self._piece_bytes
            call("cuMemUnmap", self.address + self._mapped_bytes - size, size)
            self._mapped_bytes -= size

    def free(self) -> None:
        """Give memory and addresses back."""
        self.unmap()
        call("cuMemAddressFree", self.address, self.size_bytes)


class Copier:
    """Copies between host and device that overlap with what the caller does next; :meth:`finish` waits for them."""

    def __init__(self) -> None:
        non_blocking = int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)
        # Two, so that the next copy is on the device before the last one ends.
        self._streams = itertools.cycle([call("cuStreamCreate", non_blocking) for _ in range(2)])

    def to_host(self, host: int, device: int, size_bytes: int) -> None:
        call("cuMemcpyDtoHAsync", host, device, size_bytes, next(self._streams))

    def to_device(self, device: int, host: int, size_bytes: int) -> None:
        call("cuMemcpyHtoDAsync", device, host, size_bytes, next(self._streams))

    def finish(self) -> None:
        """Wait for all of them, also if one failed: nothing may still be copied to what the caller unmaps then.

        Raises:
            DriverError: one failed.
        """
        failure: DriverError | None = None
        for _ in range(2):
            try:
                call("cuStreamSynchronize", next(self._streams))
            except DriverError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class _Block:
    """An address range with allocations in it; freed when the last of them is."""

    def __init__(self, memory: AddressRange, tag: str) -> None:
        self.memory = memory
        self.tag = tag
        self.used_bytes = 0
        self.allocations: dict[int, CudaAllocation] = {}

    def take(self, size_bytes: int) -> int | None:
        """An address for so many bytes, None if they do not fit behind what was taken. Nothing is taken twice."""
        offset = -(-self.used_bytes // _ALIGNMENT) * _ALIGNMENT
        if offset + size_bytes > self.memory.size_bytes:
            return None
        self.used_bytes = offset + size_bytes
        return self.memory.address + offset


class CudaAllocation:
    """Device memory at a fixed address; meets :class:`~checkpoint_executor.workers.protocols.Allocation`."""

    def __init__(self, allocator: CudaAllocator, block: _Block, address: int, size_bytes: int, key: int) -> None:
        self._allocator = allocator
        self._block = block
        self._address = address
        self._size_bytes = size_bytes
        self.key = key

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def tag(self) -> str:
        return self._block.tag

    def read(self, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Copy bytes to the host, after all work submitted so far.

        Raises:
            RuntimeError: the tag sleeps. ValueError: outside the allocation.
        """
        size = self._size_bytes - offset_bytes if size_bytes is None else size_bytes
        self._check(offset_bytes, size, "read")
        if size == 0:
            return b""
        buffer = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoH", ctypes.addressof(buffer), self._address + offset_bytes, size)
        return buffer.raw

    def write(self, data: bytes, offset_bytes: int = 0) -> None:
        """Copy bytes to the device, after all work submitted so far and before any submitted later.

        Raises:
            RuntimeError: the tag sleeps. ValueError: outside the allocation.
        """
        size = len(data)
        self._check(offset_bytes, size, "written")
        if size:
            buffer = (ctypes.c_char * size).from_buffer_copy(data)
            call("cuMemcpyHtoD", self._address + offset_bytes, ctypes.addressof(buffer), size)
            # From pageable memory it may return once the bytes are staged, and other streams do not wait for the rest.
            self._allocator.context.synchronize()

    def _check(self, offset_bytes: int, size_bytes: int, what: str) -> None:
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self._size_bytes:
            raise ValueError(f"{offset_bytes}+{size_bytes} is outside an allocation of {self._size_bytes} bytes")
        if not self._block.memory.is_mapped:
            raise RuntimeError(f"memory tagged {self.tag} sleeps and cannot be {what}; wake_up([{self.tag!r}]) first")
        # Streams other than the default one are not waited for by a synchronous copy.
        self._allocator.context.synchronize()


class _Lease:
    """Lends an allocation's bytes to torch, which keeps this object until the last tensor over them is gone."""

    def __init__(self, allocation: CudaAllocation) -> None:
        # Version 2, which says nothing of streams: the memory is idle, there is nobody to wait for.
        self.__cuda_array_interface__ = {
            "shape": (allocation.size_bytes,),
            "typestr": "|u1",
            "data": (allocation.address, False),
            "strides": None,
            "version": 2,
        }


class CudaAllocator:
    """Meets :class:`~checkpoint_executor.workers.protocols.Allocator` on one GPU.

    Args:
        context: the device. backup: where the bytes of ``weights`` go.
        hasher: proves that a backup is still right; without one everything is copied at every sleep.
        retain_backup: whether the host memory is kept after ``weights`` woke, for the next sleep.

    Allocations smaller than half of the granularity (2 MiB) share memory. Allocating is possible from any thread;
    ``sleep`` and ``wake`` expect that no work is in progress.
    """

    def __init__(
        self, context: PrimaryContext, backup: Backup, *, hasher: Hasher | None = None, retain_backup: bool = True
    ) -> None:
        self.context = context
        self._backup = backup
        self._hasher = hasher
        self._retain_backup = retain_backup
        context.make_current()
        self._properties = DeviceProperties(context)
        self._copier = Copier()
        # Re-entrant: the garbage collector may run a caller's finalizer inside.
        self._lock = threading.RLock()
        #: By (origin, address): origin is a tag for the segments of its torch pool, "" for the blocks made here.
        #: Segments are kept apart since their journal may tell late of one whose address was given out again since.
        self._blocks: dict[tuple[str, int], _Block] = {}
        self._open_blocks: dict[str, _Block] = {}
        self._keys = itertools.count()
        self._ended: deque[CudaAllocation] = deque()
        self._sleeping: set[str] = set()
        self._pools: dict[str, TorchPool] = {}
        self._pools_in_use = dict.fromkeys(ALL_TAGS, 0)

    @property
    def sleeping(self) -> frozenset[str]:
        return frozenset(self._sleeping)

    def tag_bytes(self) -> dict[str, int]:
        """Device bytes by tag when resident: whole physical blocks, tensors that ended but were not freed yet included.
        Makes no CUDA call, so it may be asked at any time."""
        with self._lock:
            self._read_journals()
            return {tag: sum(block.memory.size_bytes for block in self._blocks_of(tag)) for tag in ALL_TAGS}

    @property
    def pool_segments(self) -> frozenset[int]:
        """Addresses of what torch's pools (:meth:`use`) hold here: torch counts these bytes as its own too."""
        with self._lock:
            self._read_journals()
            return frozenset(address for origin, address in self._blocks if origin)

    # Allocation

    def allocate(self, size_bytes: int, tag: str = WEIGHTS) -> CudaAllocation:
        """Raw memory, contents undefined, until :meth:`free`.

        Raises:
            ValueError: unknown or sleeping tag, or not a positive size. MemoryError: no room on the device.
        """
        if size_bytes <= 0:
            raise ValueError(f"an allocation takes at least one byte, not {size_bytes}")
        return self._allocate([size_bytes], tag)[0]

    def free(self, allocation: CudaAllocation) -> None:
        """End a raw allocation. The device gets the memory back at the allocator's next call."""
        self._ended.append(allocation)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tag: str = WEIGHTS) -> torch.Tensor:
        """An uninitialised contiguous tensor on the device.

        Raises:
            ValueError: unknown or sleeping tag. MemoryError: no room on the device.
        """
        return self._empty_many([(tuple(shape), dtype)], tag)[0]

    def materialize(self, module: M, tag: str = WEIGHTS) -> M:
        """Give every parameter and buffer that is on the meta device memory of this tag; returns ``module``.

        Contents are uninitialised. Tensors that are not on the meta device are moved with their contents (a table
        computed in the constructor, say). A parameter that is shared stays shared. The module's tensors lie together.

        Raises:
            ValueError: unknown or sleeping tag. MemoryError: no room; the module is then unchanged.
        """
        import torch

        places: list[tuple[Any, str, torch.Tensor]] = [
            (store, name, tensor)
            for part in module.modules()
            for store in (part._parameters, part._buffers)
            for name, tensor in store.items()
            if tensor is not None
        ]
        old = {id(tensor): tensor for _, _, tensor in places}
        empties = self._empty_many([(tuple(tensor.shape), tensor.dtype) for tensor in old.values()], tag)
        new: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for (key, tensor), made in zip(old.items(), empties, strict=True):
                if not tensor.is_meta:
                    made.copy_(tensor)
                if isinstance(tensor, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
                made.__dict__.update(tensor.__dict__)
                new[key] = made
        for store, name, tensor in places:
            store[name] = new[id(tensor)]
        return module

    @contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """What torch allocates on the device in this thread, inside the ``with``, lands in this tag
        (``torch.cuda.MemPool``).

        That includes temporaries and, at a first matrix product, cuBLAS's workspace: build modules inside, run them
        outside. Any number of threads may have a pool open and free tensors at any time (see ``cuda_pool``); the tag
        cannot sleep meanwhile.

        Raises:
            ValueError: unknown or sleeping tag. NotImplementedError, OSError: not on this system (``cuda_pool``).
        """
        with self._lock:
            self._check_usable(tag)
            pool = self._pool(tag)
            self._pools_in_use[tag] += 1
        try:
            with pool.use():
                yield
        finally:
            with self._lock:
                self._pools_in_use[tag] -= 1
                self._read_journals()

    # Sleep

    def prepare_backup(self) -> int:
        """Get host memory for all ``weights`` now instead of at the first sleep. Returns its size in bytes."""
        with self._lock:
            # While they sleep the arena holds the only copy, and it is there already.
            if not self._sleeping & BACKED_UP:
                self.context.make_current()
                self._collect()
                self._backup.lay_out(self._regions())
            return self._backup.size_bytes

    def sleep(self) -> dict[str, int]:
        """Back up and drop everything that is resident; tags that sleep already are left alone.

        Returns:
            Bytes: ``weights`` backed up, ``kv_cache`` dropped, ``copied`` copied to the host.

        Raises:
            MemoryError: no host memory for the backup; everything is still resident.
            RuntimeError: a pool of :meth:`use` is open; nothing was touched.
        """
        with self._lock:
            awake = [tag for tag in ALL_TAGS if tag not in self._sleeping]
            busy = [tag for tag in awake if self._pools_in_use[tag]]
            if busy:
                raise RuntimeError(f"a pool of {', '.join(busy)} is open: leave every use() before sleeping")
            self.context.synchronize()
            if self._pools:
                import torch

                # Segments that no tensor uses any more must not be backed up.
                torch.cuda.empty_cache()
            self._collect()
            copied = self._back_up() if any(tag in BACKED_UP for tag in awake) else 0
            for tag in awake:
                self._drop(tag)
            figures = {tag: self._allocated_bytes(tag) if tag in awake else 0 for tag in ALL_TAGS}
            return {**figures, "copied": copied}

    def fingerprints(self, tag: str) -> dict[str, bytes]:
        """A hash of every allocation, by address and size, taken on the device at memory speed.

        Raises:
            ValueError: unknown or sleeping tag. RuntimeError: no NVRTC, so nothing can be hashed.
        """
        self._check_usable(tag)
        if self._hasher is None:
            raise RuntimeError("this device cannot hash its memory: NVRTC is missing (see the log)")
        with self._lock:
            self.context.synchronize()
            self._collect()
            regions = [region for block in self._blocks_of(tag) for region in _regions(block)]
            hashes = list(self._hasher([(region.address, region.size_bytes) for region in regions]))
            names = (f"{region.size_bytes} bytes at {region.address:#x}" for region in regions)
            return dict(zip(names, hashes, strict=True))

    def wake(self, tags: Sequence[str]) -> dict[str, int]:
        """Make the tags resident at their old addresses. ``weights`` get their bytes back, the contents of the others
        are undefined. A tag that is awake is left alone.

        Returns:
            Bytes made resident, by tag asked for.

        Raises:
            ValueError: unknown tag. MemoryError: no room on the device; all of these tags still sleep.
        """
        for tag in tags:
            self._check_known(tag)
        with self._lock:
            self.context.make_current()
            self._collect()
            waking = [tag for tag in ALL_TAGS if tag in tags and tag in self._sleeping]
            self._restore([block for tag in waking for block in self._blocks_of(tag)])
            self._sleeping.difference_update(waking)
            if not self._retain_backup and any(tag in BACKED_UP for tag in waking):
                self._backup.discard()
            return {tag: self._allocated_bytes(tag) if tag in waking else 0 for tag in tags}

    def release(self, tag: str) -> dict[str, int]:
        """Drop a tag without a backup. Returns bytes by tag.

        Raises:
            ValueError: unknown tag, or one that level-1 sleep backs up. RuntimeError: it sleeps already, or is in use.
        """
        self._check_known(tag)
        if tag in BACKED_UP:
            raise ValueError(f"{tag} would be lost; only {KV_CACHE} can be released, use sleep() for {tag}")
        with self._lock:
            if tag in self._sleeping:
                raise RuntimeError(f"{tag} is released already; wake_up([{tag!r}]) first")
            if self._pools_in_use[tag]:
                raise RuntimeError(f"a pool of {tag} is open: leave every use() before releasing it")
            self.context.synchronize()
            self._collect()
            self._drop(tag)
            return {tag: self._allocated_bytes(tag)}

    # Details: what there is

    def _blocks_of(self, tag: str) -> list[_Block]:
        return [block for block in self._blocks.values() if block.tag == tag]

    def _allocated_bytes(self, tag: str) -> int:
        return sum(a.size_bytes for block in self._blocks_of(tag) for a in block.allocations.values())

    def _regions(self) -> list[Region]:
        blocks = [block for tag in ALL_TAGS if tag in BACKED_UP for block in self._blocks_of(tag)]
        return [region for block in blocks for region in _regions(block)]

    def _check_known(self, tag: str) -> None:
        if tag not in ALL_TAGS:
            raise ValueError(f"unknown tag {tag!r}; the tags are {', '.join(ALL_TAGS)}")

    def _check_usable(self, tag: str) -> None:
        self._check_known(tag)
        if tag in self._sleeping:
            raise ValueError(f"{tag} sleeps, so nothing can be allocated there; wake_up([{tag!r}]) first")

    # Details: allocation

    def _allocate(self, sizes: Sequence[int], tag: str) -> list[CudaAllocation]:
        """Allocations that lie together, all or none of them."""
        with self._lock:
            self._check_usable(tag)
            self.context.make_current()
            self._collect()
            total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
            if total == 0:
                return []
            block = self._open_blocks.get(tag)
            small = total <= self._properties.granularity // 2
            if not small or block is None or block.used_bytes + total > block.memory.size_bytes - _ALIGNMENT:
                block = self._new_block(total, tag)
                if small:
                    self._open_blocks[tag] = block
            return [self._place(block, size) for size in sizes]

    def _new_block(self, size_bytes: int, tag: str) -> _Block:
        memory = AddressRange(self._properties, self._properties.rounded(size_bytes))
        try:
            memory.map_all()
        except BaseException:
            memory.free()
            raise
        block = self._blocks["", memory.address] = _Block(memory, tag)
        return block

    def _place(self, block: _Block, size_bytes: int) -> CudaAllocation:
        address = block.take(size_bytes)
        if address is None:
            raise RuntimeError(f"{size_bytes} bytes do not fit into a block made for them")
        allocation = CudaAllocation(self, block, address, size_bytes, next(self._keys))
        block.allocations[allocation.key] = allocation
        return allocation

    def _empty_many(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], tag: str) -> list[torch.Tensor]:
        import torch

        device = torch.device("cuda", self.context.ordinal)
        self._check_usable(tag)
        counts = [_element_count(shape) for shape, _ in wanted]
        sizes = [count * dtype.itemsize for count, (_, dtype) in zip(counts, wanted, strict=True)]
        allocations = iter(self._allocate([size for size in sizes if size], tag))
        tensors = []
        for size, (shape, dtype) in zip(sizes, wanted, strict=True):
            tensor = torch.empty(0, dtype=dtype, device=device)
            if size:
                allocation = next(allocations)
                lease = _Lease(allocation)
                # deque.append is all that may happen at the end: it is atomic, takes no lock and calls no CUDA.
                weakref.finalize(lease, self._ended.append, allocation).atexit = False
                storage = torch.as_tensor(lease, device=device).untyped_storage()
                tensor.set_(storage, 0, shape, _contiguous_stride(shape))
            else:
                tensor.resize_(shape)
            tensors.append(tensor)
        return tensors

    def _pool(self, tag: str) -> TorchPool:
        from checkpoint_executor.workers.cuda_pool import NativeCallbacks, TorchPool, driver_functions

        if tag not in self._pools:
            callbacks = NativeCallbacks(
                driver_functions(),
                context=int(self.context.handle),
                properties=self._properties.allocation.getPtr(),
                access=self._properties.access.getPtr(),
                granularity=self._properties.granularity,
                device=self.context.ordinal,
            )
            self._pools[tag] = TorchPool(callbacks, self.context.ordinal)
        return self._pools[tag]

    # Details: frees

    def _collect(self) -> None:
        """Free what has ended, and learn what torch's pools allocated and freed by themselves."""
        empty = []
        while self._ended:
            allocation = self._ended.popleft()
            block = allocation._block
            if block.allocations.pop(allocation.key, None) is not None and not block.allocations:
                empty.append(block)
        if any(block.memory.is_mapped for block in empty):
            # The tensor is gone, but work that reads it may still be queued, on any stream.
            self.context.synchronize()
        for block in empty:
            if self._open_blocks.get(block.tag) is block:
                del self._open_blocks[block.tag]
            del self._blocks["", block.memory.address]
            block.memory.free()
        self._read_journals()

    def _read_journals(self) -> None:
        for tag, pool in self._pools.items():
            for address, size_bytes in pool.drain():
                if size_bytes > 0:
                    block = _Block(AddressRange(self._properties, size_bytes, address), tag)
                    self._blocks[tag, address] = block
                    self._place(block, size_bytes)
                else:
                    # Unmapped and given back already; only the note of it is left.
                    del self._blocks[tag, address]

    # Details: sleeping

    def _back_up(self) -> int:
        """Copy what is not proven to be in the arena already. Returns the number of bytes.

        What is hashed is copied while the next is hashed. Unmapping what is copied at the same time gains nothing:
        cuMemUnmap waits for the copies (H200, 580.159: 12 ms for 24 GiB before and after).
        """
        regions = self._regions()
        self._backup.lay_out(regions)
        # The same reading of the memory serves to compare and to vouch: nothing runs in between.
        fingerprints: Iterable[bytes | None] = itertools.repeat(None, len(regions))
        if self._hasher is not None:
            fingerprints = self._hasher([(region.address, region.size_bytes) for region in regions])
        read: list[tuple[Region, bytes | None]] = []
        copied = 0
        try:
            for region, fingerprint in zip(regions, fingerprints, strict=True):
                read.append((region, fingerprint))
                if not self._backup.holds(region, fingerprint):
                    self._copier.to_host(self._backup.place(region), region.address, region.size_bytes)
                    copied += region.size_bytes
        finally:
            self._copier.finish()
        for region, fingerprint in read:
            self._backup.record(region, fingerprint)
        return copied

    def _drop(self, tag: str) -> None:
        # First of all: if an unmap fails half-way, nothing may take the rest for usable.
        self._sleeping.add(tag)
        for block in self._blocks_of(tag):
            block.memory.unmap()

    def _restore(self, blocks: Sequence[_Block]) -> None:
        """Map the blocks and copy their backups, all or none of them: a piece is copied while the next is mapped."""
        try:
            try:
                for block in blocks:
                    waiting = deque(_regions(block) if block.tag in BACKED_UP else ())
                    for address, size in block.memory.map():
                        end = address + size
                        while waiting and waiting[0].address < end:
                            self._copy_back(waiting[0], address, end)
                            if waiting[0].address + waiting[0].size_bytes > end:
                                break  # the rest of it lies in the next piece
                            waiting.popleft()
            finally:
                self._copier.finish()
        except BaseException as error:
            # Whatever it was: memory that stayed mapped would be taken for restored by the next wake.
            for block in blocks:
                block.memory.unmap()
            if not isinstance(error, MemoryError):
                raise
            needed = sum(block.memory.size_bytes for block in blocks)
            raise MemoryError(f"waking takes {needed} bytes: {error}; free device memory and wake_up again") from error

    def _copy_back(self, region: Region, start: int, end: int) -> None:
        """Copy the part of a region that lies between two addresses."""
        first = max(start, region.address)
        last = min(end, region.address + region.size_bytes)
        if first < last:
            self._copier.to_device(first, self._backup.place(region) + first - region.address, last - first)


def _regions(block: _Block) -> list[Region]:
    """The block's allocations, by address: they were placed in that order."""
    return [Region(a.key, a.address, a.size_bytes) for a in block.allocations.values()]


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(_element_count(shape[axis + 1 :]) for axis in range(len(shape)))


def _element_count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

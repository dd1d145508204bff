"""The software device's allocator: memory by tag that sleeps and wakes at the addresses it was made at.

Knows the tags' rules (``weights`` are backed up, ``kv_cache`` is dropped) and the device's segments. Knows nothing of
graphs, ranks or the driver's checkpoint. torch is imported only by the methods that hand out tensors: a worker that
asks for none must not pay two seconds for it.

Why frees are queued: a tensor dies whenever Python says so, in the garbage collector of any thread, perhaps inside
``allocate`` itself, perhaps while the process is checkpointed, where a device call would hang until the restore. So the
end of a tensor only notes its segment; the device hears of it at the allocator's next call, or in ``drain_frees``.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from checkpoint_executor.softgpu import Segment, SoftProcess
from checkpoint_executor.tags import ALL_TAGS, BACKED_UP, KV_CACHE, WEIGHTS

if TYPE_CHECKING:
    import torch

__all__ = ["SegmentPool", "SoftAllocation", "SoftAllocator"]

M = TypeVar("M", bound="torch.nn.Module")

#: Backups are copied in pieces of this size, so that the host never holds a second copy of a large segment.
_PIECE_BYTES = 16 << 20

#: torch aligns its own host memory to this; results may depend on it (vectorised loops split differently).
_ALIGNMENT = 64


class _Frees:
    """Segments that nothing looks at any more, to be freed when device calls are allowed."""

    def __init__(self, process: SoftProcess) -> None:
        self._process = process
        self._ended: deque[Segment] = deque()
        self.deferred = False

    def lease(self, segment: Segment) -> Any:
        """The segment's bytes as an object for ``torch.frombuffer``. The segment ends with the last tensor over it."""
        # Its own object, because the mapping itself is held by the segment for ever.
        view = (ctypes.c_char * segment.size_bytes).from_buffer(segment.buffer)
        # deque.append is all that may happen here: it is atomic, and it takes no lock.
        weakref.finalize(view, self._ended.append, segment).atexit = False
        return view

    def collect(self) -> list[Segment]:
        """Free what has ended, unless that is deferred. Returns the segments freed."""
        freed = []
        while self._ended and not self.deferred:
            segment = self._ended.popleft()
            self._process.free(segment)
            freed.append(segment)
        return freed


class SegmentPool:
    """Device memory without a tag, cut from large chunks: no allocator sleep reaches it, only the driver's checkpoint.

    Made by :meth:`SoftAllocator.untagged_pool`. Nothing is reused; the chunks are freed when the pool and all tensors
    on them are gone.
    """

    def __init__(self, allocate: Callable[[int], tuple[Segment, Any]], chunk_bytes: int) -> None:
        self._allocate = allocate
        self._chunk_bytes = chunk_bytes
        self._chunks: list[tuple[Segment, Any]] = []
        self._used = 0

    @property
    def size_bytes(self) -> int:
        """Device bytes of the chunks."""
        return sum(segment.size_bytes for segment, _ in self._chunks)

    def empty(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """An uninitialised tensor with these strides (in elements). Raises MemoryError (no room on the device)."""
        from checkpoint_executor.workers.soft_tensors import tensor_over

        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        size_bytes = -(-span * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not self._chunks or self._used + size_bytes > self._chunks[-1][0].size_bytes:
            self._chunks.append(self._allocate(max(size_bytes, self._chunk_bytes)))
            self._used = 0
        tensor = tensor_over(self._chunks[-1][1], dtype, shape, stride, self._used)
        self._used += size_bytes
        return tensor


class _Block:
    """A segment of the allocator: its tag and where its backup lies in the host arena."""

    def __init__(self, segment: Segment, tag: str) -> None:
        self.segment = segment
        self.tag = tag
        self.backup_offset = 0


class SoftAllocation:
    """Raw device memory at a fixed address; meets :class:`~checkpoint_executor.workers.protocols.Allocation`."""

    def __init__(self, allocator: SoftAllocator, segment: Segment, tag: str) -> None:
        self._allocator = allocator
        self._segment = segment
        self._tag = tag

    @property
    def address(self) -> int:
        return self._segment.address

    @property
    def size_bytes(self) -> int:
        return self._segment.size_bytes

    @property
    def tag(self) -> str:
        return self._tag

    def read(self, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Copy bytes to the host. Raises RuntimeError (the tag sleeps), ValueError (outside the allocation)."""
        self._allocator.require_awake([self._tag], "read")
        return self._segment.read(offset_bytes, size_bytes)

    def write(self, data: bytes, offset_bytes: int = 0) -> None:
        """Copy bytes to the device. Raises RuntimeError (the tag sleeps), ValueError (outside the allocation)."""
        self._allocator.require_awake([self._tag], "written")
        self._segment.write(data, offset_bytes)


class SoftAllocator:
    """Meets :class:`~checkpoint_executor.workers.protocols.Allocator` on a software device.

    Raw allocations live as long as the device is open. The segment of a tensor is freed after its last tensor is gone.
    Every tensor has a segment of its own, at two file descriptors each. For one thread at a time.
    """

    def __init__(self, process: SoftProcess) -> None:
        self._process = process
        self._frees = _Frees(process)
        #: By address, in order of allocation.
        self._blocks: dict[int, _Block] = {}
        #: By address, bytes of the segments that no tag reaches.
        self._untagged: dict[int, int] = {}
        self._sleeping: set[str] = set()
        self._arena: mmap.mmap | None = None

    @property
    def sleeping(self) -> frozenset[str]:
        return frozenset(self._sleeping)

    def tag_bytes(self) -> dict[str, int]:
        """Device bytes by tag when resident, tensors that ended but were not freed yet included. Makes no device call
        while frees are deferred."""
        self._collect()
        return {tag: self._bytes_of(tag) for tag in ALL_TAGS}

    @property
    def untagged_bytes(self) -> int:
        """Device bytes that no tag reaches: the graphs' results."""
        return sum(self._untagged.values())

    @property
    def arena_bytes(self) -> int:
        """Host bytes of the backup."""
        return 0 if self._arena is None else len(self._arena)

    def tag_at(self, address: int) -> str | None:
        """The tag of the allocation that starts at ``address``, None if there is none."""
        block = self._blocks.get(address)
        return block.tag if block else None

    def require_awake(self, tags: Sequence[str] | frozenset[str], what: str) -> None:
        """Raises RuntimeError, with the way out, if one of the tags sleeps. ``what`` completes "cannot be ..."."""
        asleep = [tag for tag in ALL_TAGS if tag in tags and tag in self._sleeping]
        if asleep:
            raise RuntimeError(
                f"memory tagged {', '.join(asleep)} sleeps and cannot be {what}; wake_up({asleep}) first"
            )

    # Allocation

    def allocate(self, size_bytes: int, tag: str = WEIGHTS) -> SoftAllocation:
        """Raw memory, contents undefined.

        Raises:
            ValueError: unknown or sleeping tag, or not a positive size. MemoryError: no room on the device.
        """
        return SoftAllocation(self, self._new_segment(size_bytes, tag), tag)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tag: str = WEIGHTS) -> torch.Tensor:
        """An uninitialised contiguous tensor on the device.

        Raises:
            ValueError: unknown or sleeping tag. MemoryError: no room on the device.
        """
        from checkpoint_executor.workers.soft_tensors import contiguous_stride

        return self._empty_strided(dtype, shape, contiguous_stride(shape), tag)

    def materialize(self, module: M, tag: str = WEIGHTS) -> M:
        """Give every parameter and buffer that is on the meta device memory of this tag; returns ``module``.

        Contents are uninitialised. Tensors that are not on the meta device are moved with their contents (a table
        computed in the constructor, say). A parameter that is shared stays shared.

        Raises:
            ValueError: unknown or sleeping tag. MemoryError: no room; the module is then unchanged.
        """
        import torch

        made: dict[int, torch.Tensor] = {}
        places: list[tuple[Any, str, int]] = []
        with torch.no_grad():
            for part in module.modules():
                for store in (part._parameters, part._buffers):
                    for name, tensor in store.items():
                        if tensor is not None:
                            if id(tensor) not in made:
                                made[id(tensor)] = self._counterpart(tensor, tag)
                            places.append((store, name, id(tensor)))
        for store, name, key in places:
            store[name] = made[key]
        return module

    @contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """Tensors that torch creates inside the ``with`` land in this tag, an ``nn.Module`` built there for one.

        Raises:
            ValueError: unknown or sleeping tag. MemoryError: no room, at the operation that finds none.
        """
        from checkpoint_executor.workers.soft_tensors import PlacementMode

        self._check_usable(tag)
        with PlacementMode(lambda dtype, shape, stride: self._empty_strided(dtype, shape, stride, tag)):
            yield

    def untagged_pool(self, chunk_bytes: int = 256 << 10) -> SegmentPool:
        """Device memory that no tag reaches, for graphs. ``chunk_bytes``: size of its segments."""
        return SegmentPool(self._untagged_segment, chunk_bytes)

    # Sleep

    def sleep(self) -> dict[str, int]:
        """Back up and drop everything that is resident; tags that sleep already are left alone.

        Returns:
            Bytes: ``weights`` backed up, ``kv_cache`` dropped, ``copied`` copied to the host.

        Raises:
            MemoryError: no host memory for the backup; everything is still resident.
        """
        awake = [tag for tag in ALL_TAGS if tag not in self._sleeping]
        with self._process.call():
            self._collect()
            copied = self._back_up([tag for tag in awake if tag in BACKED_UP])
            for tag in awake:
                self._drop(tag)
        figures = {tag: self._bytes_of(tag) if tag in awake else 0 for tag in ALL_TAGS}
        return {**figures, "copied": copied}

    def fingerprints(self, tag: str) -> dict[str, bytes]:
        """A hash of every allocation, by address and size. Raises ValueError (unknown or sleeping tag)."""
        self._check_usable(tag)
        self._collect()
        return {
            f"{block.segment.size_bytes} bytes at {address:#x}": hashlib.blake2b(
                block.segment.read(), digest_size=16
            ).digest()
            for address, block in self._blocks.items()
            if block.tag == tag
        }

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
        waking = [tag for tag in ALL_TAGS if tag in tags and tag in self._sleeping]
        with self._process.call():
            self._collect()
            blocks = [block for block in self._blocks.values() if block.tag in waking]
            self._map(blocks)
            for block in blocks:
                if block.tag in BACKED_UP:
                    self._restore(block)
            self._sleeping.difference_update(waking)
        return {tag: self._bytes_of(tag) if tag in waking else 0 for tag in tags}

    def release(self, tag: str) -> dict[str, int]:
        """Drop a tag without a backup. Returns bytes by tag.

        Raises:
            ValueError: unknown tag, or one that level-1 sleep backs up. RuntimeError: it sleeps already.
        """
        self._check_known(tag)
        if tag in BACKED_UP:
            raise ValueError(f"{tag} would be lost; only {KV_CACHE} can be released, use sleep() for {tag}")
        if tag in self._sleeping:
            raise RuntimeError(f"{tag} is released already; wake_up([{tag!r}]) first")
        with self._process.call():
            self._collect()
            self._drop(tag)
        return {tag: self._bytes_of(tag)}

    # Frees

    def defer_frees(self) -> None:
        """From now on free nothing: no device call may happen between ``checkpoint_prepare`` and the restore."""
        self._frees.deferred = True

    def drain_frees(self) -> int:
        """End the deferral and free what ended meanwhile. Returns the number of segments freed."""
        self._frees.deferred = False
        return self._collect()

    # Details

    def _collect(self) -> int:
        freed = self._frees.collect()
        for segment in freed:
            if self._untagged.pop(segment.address, None) is None:
                self._blocks.pop(segment.address, None)
        return len(freed)

    def _bytes_of(self, tag: str) -> int:
        return sum(block.segment.size_bytes for block in self._blocks.values() if block.tag == tag)

    def _check_known(self, tag: str) -> None:
        if tag not in ALL_TAGS:
            raise ValueError(f"unknown tag {tag!r}; the tags are {', '.join(ALL_TAGS)}")

    def _check_usable(self, tag: str) -> None:
        self._check_known(tag)
        if tag in self._sleeping:
            raise ValueError(f"{tag} sleeps, so nothing can be allocated there; wake_up([{tag!r}]) first")

    def _new_segment(self, size_bytes: int, tag: str) -> Segment:
        self._check_usable(tag)
        self._collect()
        segment = self._process.allocate(size_bytes)
        self._blocks[segment.address] = _Block(segment, tag)
        return segment

    def _untagged_segment(self, size_bytes: int) -> tuple[Segment, Any]:
        """A segment that no tag reaches, and its lease."""
        self._collect()
        segment = self._process.allocate(size_bytes)
        self._untagged[segment.address] = segment.size_bytes
        return segment, self._frees.lease(segment)

    def _empty_strided(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], tag: str) -> torch.Tensor:
        import torch

        from checkpoint_executor.workers.soft_tensors import tensor_over

        self._check_usable(tag)
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)  # no bytes, so nothing to keep
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        segment = self._new_segment(span * dtype.itemsize, tag)
        return tensor_over(self._frees.lease(segment), dtype, shape, stride)

    def _counterpart(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """A tensor of this tag to stand where ``tensor`` does, with the attributes that were set on it."""
        import torch

        new = self.empty(tensor.shape, tensor.dtype, tag)
        if not tensor.is_meta:
            new.copy_(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
        return new

    def _drop(self, tag: str) -> None:
        # First of all: if an unmap fails half-way, nothing may take the rest for usable.
        self._sleeping.add(tag)
        for block in self._blocks.values():
            if block.tag == tag:
                block.segment.unmap()

    def _map(self, blocks: list[_Block]) -> None:
        """Map all of the blocks or none of them."""
        mapped: list[_Block] = []
        try:
            for block in blocks:
                block.segment.map()
                mapped.append(block)
        except MemoryError as error:
            for block in mapped:
                block.segment.unmap()
            needed = sum(block.segment.size_bytes for block in blocks)
            raise MemoryError(f"waking takes {needed} bytes: {error}; free device memory and wake_up again") from error

    def _back_up(self, tags: list[str]) -> int:
        """Copy the tags' bytes to the host arena. Returns the number of bytes."""
        blocks = [block for block in self._blocks.values() if block.tag in tags]
        total = sum(block.segment.size_bytes for block in blocks)
        if total == 0:
            return 0
        if self._arena is None or len(self._arena) < total:
            if self._arena is not None:
                self._arena.close()
                self._arena = None
            try:
                # Private: a child forked by the user's code must not be able to write to our only copy.
                self._arena = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"no host memory for a backup of {total} bytes: {error}") from error
        start = 0
        for block in blocks:
            block.backup_offset = start
            for offset in range(0, block.segment.size_bytes, _PIECE_BYTES):
                piece = block.segment.read(offset, min(_PIECE_BYTES, block.segment.size_bytes - offset))
                self._arena[start + offset : start + offset + len(piece)] = piece
            start += block.segment.size_bytes
        return total

    def _restore(self, block: _Block) -> None:
        if self._arena is None:
            raise RuntimeError(f"no backup of {block.tag} at {block.segment.address:#x}")
        start = block.backup_offset
        with memoryview(self._arena) as arena, arena[start : start + block.segment.size_bytes] as backup:
            block.segment.write(backup)

"""A sleep-mode backend for vLLM: cumem as it is, with its backups in one huge-page arena that is pinned once, and
without copying again what lies there already.

cumem asks torch for pinned host memory at every sleep, piece by piece. The first time that costs most of the sleep
(21 of 21.7 s for 16 GB), because pages are found and pinned one by one. Here the arena is made by a thread while vLLM
compiles, and cumem's own code gets pieces of it: what it calls ``torch.empty`` is answered from the arena for as long
as it backs up. What it calls ``cudaMemcpy`` copies to such a piece only what is not proven to lie there: by a hash of
the allocation, taken on the GPU, equal to the hash of what was copied there last. Weights that nobody changed since are
then not copied (0.3 s for 16 GB). Nothing of cumem is copied or changed; where a request is not the expected one, torch
and CUDA answer.

Runs in vLLM's workers. Selected with ``sleep_mode_backend="cumem_arena"``, or with ``CHECKPOINT_EXECUTOR_HOST_ARENA=1``
under the name ``cumem``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.logger import init_logger

from checkpoint_executor.vllm.backup_memory import BackupMemory, Piece, aligned
from checkpoint_executor.workers.cuda_calls import bindings

__all__ = ["CumemArenaBackend", "lent_arena", "prepare_early"]

logger = init_logger(f"vllm.{__name__}")

#: What a level-1 sleep backs up; the rest is dropped.
_BACKED_UP = frozenset({"weights", "runtime", "cudagraph"})

#: Room for the graphs' pools: 334 MiB at Qwen3 8B's dimensions with vLLM's default sizes (H200). What is missing is got
#: in the first sleep.
_GRAPH_POOLS_BYTES = 512 << 20

_memory = BackupMemory()


class CumemArenaBackend(CuMemBackend):  # type: ignore[misc, unused-ignore]  # vLLM is not installed everywhere
    """cumem with its backups in the arena."""

    def suspend(self, level: int = 1) -> None:
        with lent_arena(level):
            super().suspend(level)

    @classmethod
    def is_supported(cls) -> bool:
        """Needs CUDA and its Python bindings."""
        try:
            bindings()
        except ImportError:
            return False
        return torch.cuda.is_available()


class _Lending:
    """One sleep of cumem: which pieces it was lent, and what lies in the memory it backs up.

    Args:
        tags: what it will back up. copy: CUDA's ``cudaMemcpy``.
    """

    def __init__(self, tags: frozenset[str], copy: Any) -> None:
        self._tags = tags
        self._copy = copy
        self._pieces: dict[int, Piece] = {}
        #: By the piece's address: what lay there when it was lent.
        self._before: dict[int, bytes | None] = {}
        self._fingerprints: dict[tuple[int, int], bytes] | None = None

    def lend(self, size_bytes: int) -> torch.Tensor | None:
        """A piece of the arena for a backup of so many bytes, None if there is no room."""
        taken = _memory.take(size_bytes)
        if taken is None:
            return None
        tensor, piece = taken
        self._pieces[piece.address] = piece
        # Whoever has the tensor may write to it. Only a copy from here on vouches for the piece again.
        self._before[piece.address], piece.fingerprint = piece.fingerprint, None
        return tensor

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Have the bytes of device memory at ``source`` lie at ``target``."""
        piece = self._pieces.get(target)
        before = self._before.pop(target, None)
        if piece is not None:
            piece.fingerprint = None  # a copy that breaks off, or of something else, proves nothing
        if piece is None or piece.size_bytes != size_bytes:
            self._copy(target, source, size_bytes)
            return
        fingerprint = self._fingerprint(source, size_bytes)
        if fingerprint is None or fingerprint != before:
            self._copy(target, source, size_bytes)
        piece.fingerprint = fingerprint

    def _fingerprint(self, address: int, size_bytes: int) -> bytes | None:
        if self._fingerprints is None:
            self._fingerprints = self._take_fingerprints()
        # Once: should there be a second sleep within this lending, the memory may have changed since it was hashed.
        return self._fingerprints.pop((address, size_bytes), None)

    def _take_fingerprints(self) -> dict[tuple[int, int], bytes]:
        """Of all that is still to be backed up, at once, since launching kernels takes longer than most of them run.

        Asked for by the first copy: from there to the last one cumem does nothing else, and the worker is quiet.
        """
        if _memory.hasher is None:
            return {}
        torch.cuda.synchronize()
        regions = list(_to_back_up(self._tags))
        try:
            return dict(zip(regions, _memory.hasher(regions), strict=True))
        except Exception as error:  # noqa: BLE001 - only speed is lost: everything is copied
            logger.warning("the weights cannot be hashed, so all of them are copied: %s", error)
            return {}


class _StandIn:
    """Stands where cumem has a module's name, until the lending ends."""

    def __init__(self, original: Any, lending: _Lending) -> None:
        self._original = original
        self._lending = lending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Torch(_StandIn):
    """Answers cumem's request for backup memory from the arena."""

    def empty(self, *size: Any, **options: Any) -> Any:
        expected = len(size) == 1 and isinstance(size[0], int) and options.get("dtype") is torch.uint8
        if expected and options.get("device") == "cpu":
            piece = self._lending.lend(size[0])
            if piece is not None:
                return piece
        return self._original.empty(*size, **options)


class _Cudart(_StandIn):
    """Copies what is not proven to be there."""

    def cudaMemcpy(self, target: int, source: int, size_bytes: int) -> None:  # noqa: N802 - CUDA's name
        self._lending.copy(target, source, size_bytes)


@contextmanager
def lent_arena(level: int = 1) -> Iterator[None]:
    """Within this, what cumem backs up goes to the arena. May nest."""
    from vllm.device_allocator import cumem

    if isinstance(cumem.torch, _Torch):
        yield
        return
    tags = _BACKED_UP if level == 1 else _BACKED_UP - {"weights"}
    _memory.make_room([size_bytes for _, size_bytes in _to_back_up(tags)])
    torch_of_cumem, cudart_of_cumem = cumem.torch, cumem.libcudart
    lending = _Lending(tags, cudart_of_cumem.cudaMemcpy)
    cumem.torch, cumem.libcudart = _Torch(torch_of_cumem, lending), _Cudart(cudart_of_cumem, lending)
    try:
        yield
    finally:
        cumem.torch, cumem.libcudart = torch_of_cumem, cudart_of_cumem


def prepare_early(offload_graphs: bool = False) -> None:
    """Begin to make the arena: the model is loaded, and vLLM will compile for some time.

    Args:
        offload_graphs: whether graph pools will be backed up too, which nobody has captured yet.
    """
    size_bytes = sum(aligned(size_bytes) for _, size_bytes in _to_back_up(_BACKED_UP))
    _memory.prepare_early(size_bytes + (_GRAPH_POOLS_BYTES if offload_graphs else 0))


def arena_bytes() -> int:
    """Host memory of the arena."""
    return _memory.capacity_bytes


def _to_back_up(tags: frozenset[str]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each of cumem's allocations that a sleep will back up."""
    from vllm.device_allocator import get_mem_allocator_instance

    for address, entry in list(get_mem_allocator_instance().pointer_to_data.items()):
        if entry.tag in tags and not entry.is_asleep:
            yield address, int(entry.handle[1])

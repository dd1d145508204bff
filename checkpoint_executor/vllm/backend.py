"""A sleep-mode backend for vLLM: cumem as it is, with its backups in one huge-page arena that is pinned once.

cumem asks torch for pinned host memory at every sleep, piece by piece. The first time that costs most of the sleep
(21 of 21.7 s for 16 GB), because pages are found and pinned one by one. Here the arena is made by a thread while vLLM
compiles, and cumem's own code gets pieces of it: what it calls ``torch.empty`` is answered from the arena for as long
as it backs up. Nothing of cumem is copied or changed; where a request is not the expected one, torch answers.

Runs in vLLM's workers. Selected with ``sleep_mode_backend="cumem_arena"``, or with ``CHECKPOINT_EXECUTOR_HOST_ARENA=1``
under the name ``cumem``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.logger import init_logger

from checkpoint_executor.workers.cuda_arena import HostArena
from checkpoint_executor.workers.cuda_calls import PrimaryContext, bindings, call

__all__ = ["CumemArenaBackend", "lent_arena", "prepare_early"]

logger = init_logger(f"vllm.{__name__}")

#: What a level-1 sleep backs up; the rest is dropped.
_BACKED_UP = frozenset({"weights", "runtime", "cudagraph"})

#: Pieces begin at multiples of this, for the copy engine's sake.
_ALIGNMENT = 2 << 20


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


class _Chunk:
    """One arena and how much of it is given away. Filled from the start, and empty again when no piece is alive."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._used_bytes = 0
        self._alive = 0

    @property
    def free_bytes(self) -> int:
        return self._arena.capacity_bytes - self._used_bytes

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """A tensor of so many bytes, or None if they do not fit. The room is free again when it is gone."""
        if size_bytes > self.free_bytes:
            return None
        view = self._arena.view(self._used_bytes, size_bytes)
        piece = torch.frombuffer(view, dtype=torch.uint8)
        self._used_bytes += _aligned(size_bytes)
        self._alive += 1
        weakref.finalize(piece, self._gone).atexit = False
        return piece

    def _gone(self) -> None:
        self._alive -= 1
        if self._alive == 0:
            self._used_bytes = 0


class _Arena:
    """All the host memory for backups of this process."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._thread: threading.Thread | None = None

    def prepare_early(self, size_bytes: int) -> None:
        """Get the memory in a thread, and return at once."""
        if self._thread is not None or size_bytes <= 0:
            return
        ordinal = torch.cuda.current_device()

        def prepare() -> None:
            try:
                # A capture of graphs in another thread forbids such calls everywhere, unless this thread says that it
                # knows what it does.
                driver = bindings()
                call("cuThreadExchangeStreamCaptureMode", driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
                self._grow(size_bytes, ordinal)
            except Exception as error:  # noqa: BLE001 - only speed is lost: the first sleep tries again
                logger.warning("the backup arena could not be made ahead of the first sleep: %s", error)

        self._thread = threading.Thread(target=prepare, name="backup-arena", daemon=True)
        self._thread.start()

    def make_room(self, size_bytes: int) -> None:
        """Have at least so many bytes free. Gets what is missing, and keeps it."""
        if self._thread is not None:
            self._thread.join()
        missing = size_bytes - sum(chunk.free_bytes for chunk in self._chunks)
        if missing > 0:
            try:
                self._grow(missing, torch.cuda.current_device())
            except Exception as error:  # noqa: BLE001 - torch's pinned memory serves as well, only slower
                logger.warning("the backup arena could not grow by %d MiB: %s", missing >> 20, error)

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """A piece, or None if there is no room."""
        for chunk in self._chunks:
            if (piece := chunk.take(size_bytes)) is not None:
                return piece
        return None

    def _grow(self, size_bytes: int, ordinal: int) -> None:
        context = PrimaryContext(ordinal)
        arena = HostArena(numa_node=context.numa_node)
        arena.prepare(size_bytes)
        self._chunks.append(_Chunk(arena))
        logger.info("backup arena: %d MiB of pinned host memory", arena.capacity_bytes >> 20)


_arena = _Arena()


class _Lender:
    """Stands where cumem has the name ``torch``, and answers its request for backup memory from the arena."""

    def __init__(self, lent: Any) -> None:
        self._torch = lent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *size: Any, **options: Any) -> Any:
        expected = len(size) == 1 and isinstance(size[0], int) and options.get("dtype") is torch.uint8
        if expected and options.get("device") == "cpu":
            piece = _arena.take(size[0])
            if piece is not None:
                return piece
        return self._torch.empty(*size, **options)


@contextmanager
def lent_arena(level: int = 1) -> Iterator[None]:
    """Within this, what cumem backs up goes to the arena. May nest."""
    from vllm.device_allocator import cumem

    if isinstance(cumem.torch, _Lender):
        yield
        return
    _arena.make_room(_bytes_to_back_up(_BACKED_UP if level == 1 else _BACKED_UP - {"weights"}))
    original = cumem.torch
    cumem.torch = _Lender(original)
    try:
        yield
    finally:
        cumem.torch = original


def prepare_early() -> None:
    """Begin to make the arena: the model is loaded, and vLLM will compile for some time."""
    _arena.prepare_early(_bytes_to_back_up(_BACKED_UP))


def _bytes_to_back_up(tags: frozenset[str]) -> int:
    """What cumem will ask for, with each piece rounded up."""
    from vllm.device_allocator import get_mem_allocator_instance

    data = list(get_mem_allocator_instance().pointer_to_data.values())
    return sum(_aligned(int(entry.handle[1])) for entry in data if entry.tag in tags and not entry.is_asleep)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT

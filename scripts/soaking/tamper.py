"""Errors made on purpose, to see the probe find them: they run in the worker of rank 0, while it sleeps.

Both act in a workspace hook. Those run when the allocator sleeps and before the driver's lock, so that the only copy of
the weights is the backup in host memory, and no memory of any tag is on the device. No CUDA call is made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

__all__ = ["KINDS", "move_graph_input", "spoil_weight"]


class _Once:
    """A workspace in name only: does something in its first preparation."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def checkpoint_prepare(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()

    def checkpoint_restore(self) -> None:
        pass


def spoil_weight(worker: Any) -> str:
    """In the next sleep, invert one byte of one weight in its backup. Returns which, in words."""
    if worker.context.rank != 0:
        return ""
    weight = worker._model.lm_head.weight
    # In the middle of the matrix, the second byte of a number: of a float32, 1/128 of its value at most.
    number = weight.numel() // 2
    address = weight.data_ptr() + number * weight.element_size() + 1

    def spoil() -> None:
        with _backup_byte(worker.context.allocator, address) as byte:
            byte[0] ^= 0xFF

    worker.context.workspaces.append(_Once(spoil))
    return f"byte 1 of element {number} of lm_head.weight, in the backup"


def move_graph_input(worker: Any) -> str:
    """In the next sleep, have the worker take another buffer for the tokens it feeds its graphs.

    The graphs read the address that they were captured with. After the wake that is zeroed, so that they read a token
    that exists: what they would find there is undefined, and a token that does not exist would end the process instead.
    """
    if worker.context.rank != 0:
        return ""
    captured = worker._tokens
    other = worker.context.allocator.empty(captured.shape, captured.dtype, "kv_cache")
    after_wake = worker.after_wake

    def move() -> None:
        worker._tokens = other

    def clean(tags: tuple[str, ...]) -> None:
        after_wake(tags)
        if "kv_cache" in tags:
            captured.zero_()

    worker.after_wake = clean
    worker.context.workspaces.append(_Once(move))
    return f"the graphs' tokens, from {captured.data_ptr():#x} to {other.data_ptr():#x}"


#: What can be spoiled, by name.
KINDS: dict[str, Callable[[Any], str]] = {"weight-byte": spoil_weight, "graph-input": move_graph_input}


@contextmanager
def _backup_byte(allocator: Any, address: int) -> Any:
    """The byte of the backup that will come back at a device address, writable."""
    if hasattr(allocator, "_arena"):  # the software device
        for start, block in allocator._blocks.items():
            if start <= address < start + block.segment.size_bytes:
                at = block.backup_offset + address - start
                with memoryview(allocator._arena) as arena, arena[at : at + 1] as byte:
                    yield byte
                return
    else:
        arena = allocator._backup._arena
        for region in allocator._regions():
            if region.address <= address < region.address + region.size_bytes:
                at = allocator._backup.place(region) - arena.address + address - region.address
                yield arena.view(at, 1)
                return
    raise LookupError(f"no weight is backed up from {address:#x}")

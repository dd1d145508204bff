"""Torch tensors over the software device's memory: the only place that knows how the two meet.

Knows torch's dispatch and nothing of tags, graphs or ranks, so that the allocator (:mod:`soft_memory`) and the
graphs (:mod:`soft_graphs`) place tensors by the same rule. Importing this file imports torch; ``soft_memory``
therefore imports it only where a tensor is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "LIFT_FRESH",
    "PlacementMode",
    "contiguous_stride",
    "fresh_outputs",
    "same_bits",
    "tensor_over",
    "tensor_view",
    "tensors_in",
]

#: Integer types through which bits are compared: a comparison of floats would take NaN for different.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: What ``torch.tensor(...)`` ends in: an alias of host memory that nobody else holds.
LIFT_FRESH = torch.ops.aten.lift_fresh.default


def tensor_over(
    buffer: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None = None, offset_bytes: int = 0
) -> torch.Tensor:
    """A tensor whose storage *is* ``buffer`` from ``offset_bytes`` on, without a copy; it keeps ``buffer`` alive.

    Args:
        buffer: writable, as ``memoryview`` takes it. stride: in elements; None: contiguous.

    Raises:
        ValueError: the buffer is too small, or the shape has no elements.
    """
    stride = contiguous_stride(shape) if stride is None else stride
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # Never an inference tensor, or a graph captured under inference_mode could not be replayed outside it.
    with torch.inference_mode(False):
        flat = torch.frombuffer(buffer, dtype=dtype, count=span, offset=offset_bytes)
        # In place, because a view would carry the grad mode it was made in and refuse later in-place work.
        return flat.as_strided_(tuple(shape), tuple(stride))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def tensor_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable and without a copy (and without numpy).

    The caller keeps the tensor alive for as long as it uses the view.

    Raises:
        ValueError: not contiguous, or not in host memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"need a contiguous tensor in host memory, got {tensor.device}, strides {tensor.stride()}")
    array = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape hold the same bits; False also where that cannot be compared."""
    bits = _BITS.get(left.element_size())
    if bits is None or left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def fresh_outputs(operation: Any, inputs: Any, outputs: Any) -> list[torch.Tensor]:
    """The output tensors of an operation whose memory is new: not a view of an input, not an input itself."""
    old = (
        set()
        if operation is LIFT_FRESH
        else {t.untyped_storage().data_ptr() for t in tensors_in(inputs) if _is_plain(t)}
    )
    return [t for t in tensors_in(outputs) if _is_plain(t) and t.untyped_storage().data_ptr() not in old]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has bytes in host memory (meta, sparse and empty tensors have not)."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0


class PlacementMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook has no annotations
    """Moves what torch creates inside the ``with`` into memory that ``place`` chooses.

    Works below autograd, on factory functions and on the results of all other operations alike. An
    operation still computes in host memory of torch's own first.

    Args:
        place: given (dtype, shape, stride), returns a tensor like that, contents undefined.
    """

    def __init__(self, place: Callable[[torch.dtype, Sequence[int], Sequence[int]], torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's default, True, imports all of torch._dynamo at the first operation: 1.3 s of every worker's start.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        moved = {id(t): self.placed(t) for t in fresh_outputs(func, (args, kwargs), outputs)}
        return tree_map(lambda leaf: moved.get(id(leaf), leaf), outputs) if moved else outputs

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in chosen memory, with its strides (contiguous where elements overlap)."""
        return self.room_for(tensor).copy_(tensor)

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Chosen memory for a tensor like this one, contents undefined."""
        overlaps = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        stride = contiguous_stride(tensor.shape) if overlaps else tensor.stride()
        return self._place(tensor.dtype, tensor.shape, stride)

"""PURE. User data to payload frames and back: what goes into a worker, and what comes out of it.

The two directions are not alike. Into a worker goes anything Python can pickle, by ``cloudpickle``: importable
things by reference, what a user defined in ``__main__`` or a notebook by value. Only the parent's data is ever
unpickled, and only in its own children. Out of a worker come msgpack types (None, bool, int, float, str, bytes,
list, tuple, dict), numpy arrays and CPU tensors, nothing that needs unpickling; anything else is an error that
names the type and where it sits. Tuples come back as tuples.

Large data is never copied into the first frame: arrays travel as frames of their own, in both directions.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from checkpoint_executor.wire import Frame

__all__ = ["UnsupportedResultError", "decode_result", "dump_call", "encode_result", "load_call", "oversized"]

_ARRAY, _TENSOR, _TUPLE, _BIG_INT = 1, 2, 3, 4

#: Types that msgpack says as they are.
_PLAIN = frozenset({type(None), bool, float, str, bytes})


class UnsupportedResultError(TypeError):
    """A result holds something that cannot travel. The message says what and where."""


def dump_call(obj: object) -> list[Frame]:
    """Pickle call arguments (or a worker class with its arguments) into frames.

    Raises:
        TypeError, pickle.PicklingError: something in it cannot be pickled.
    """
    import cloudpickle  # a quarter of a second to import: only where something is really called

    # What multiprocessing calls the main script in a process that it spawned: a name that no other process can import.
    spawned_main = sys.modules.get("__mp_main__")
    if spawned_main is not None:
        cloudpickle.register_pickle_by_value(spawned_main)  # type: ignore[no-untyped-call]
    buffers: list[pickle.PickleBuffer] = []
    head: bytes = cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)  # type: ignore[no-untyped-call]
    return [head, *(buffer.raw() for buffer in buffers)]


def load_call(frames: Sequence[Frame]) -> Any:
    """The inverse of :func:`dump_call`. Only for data from the parent: unpickling is acting on it."""
    return pickle.loads(frames[0], buffers=frames[1:])


def oversized(frames: Sequence[Frame], limit_bytes: int) -> str | None:
    """What is wrong with frames of which one is over the limit. Such a frame would never arrive: zmq drops the peer."""
    largest = max(memoryview(frame).nbytes for frame in frames)
    if largest <= limit_bytes:
        return None
    return f"a frame of {largest} bytes is over max_payload_bytes ({limit_bytes})"


class _ArrayMeta(msgspec.Struct, array_like=True):
    frame: int
    dtype: str
    shape: tuple[int, ...]


def encode_result(value: object) -> list[Frame]:
    """Turn a worker's result into frames.

    Raises:
        UnsupportedResultError: naming the type that cannot travel, and its place in the result.
    """
    buffers: list[Frame] = []
    try:
        lowered = _lower(value, "result", buffers)
        return [msgspec.msgpack.encode(lowered), *buffers]
    except RecursionError:
        raise UnsupportedResultError("result is nested too deeply, or holds itself") from None
    except (UnicodeEncodeError, ValueError, OverflowError) as error:
        # A lone surrogate, or an int of more digits than Python writes.
        raise UnsupportedResultError(f"result holds what cannot be encoded: {error}") from error


def decode_result(frames: Sequence[Frame]) -> Any:
    """The inverse of :func:`encode_result`. Arrays and tensors own their memory and are writable.

    Raises:
        msgspec.DecodeError: malformed frames.
    """
    if not frames:
        raise msgspec.DecodeError("a result has at least one frame")
    buffers = frames[1:]

    def ext_hook(code: int, data: memoryview) -> Any:
        if code == _ARRAY:
            return _array(msgspec.msgpack.decode(data, type=_ArrayMeta), buffers)
        if code == _TENSOR:
            return _tensor(msgspec.msgpack.decode(data, type=_ArrayMeta), buffers)
        if code == _TUPLE:
            return tuple(msgspec.msgpack.decode(data, ext_hook=ext_hook))
        if code == _BIG_INT:
            return int(bytes(data))
        raise msgspec.DecodeError(f"unknown extension {code}")

    return msgspec.msgpack.decode(frames[0], ext_hook=ext_hook)


def _lower(value: object, where: str, buffers: list[Frame]) -> object:
    """Reduce a value to what msgpack can say, moving arrays out of band."""
    # The exact types: a subclass (numpy.float64 is a float) would not come back as what it was.
    if type(value) in _PLAIN:
        return value
    if type(value) is int:
        if _fits_msgpack(value):
            return value
        return msgspec.msgpack.Ext(_BIG_INT, str(value).encode())
    if isinstance(value, dict):
        items: dict[object, object] = {}
        for key, item in value.items():
            if not (type(key) in _PLAIN or (type(key) is int and _fits_msgpack(key))):
                raise UnsupportedResultError(
                    f"{where} has a key of type {_name(key)} ({key!r:.40}); keys must be str, bytes, or 64-bit int"
                )
            items[key] = _lower(item, f"{where}[{key!r}]", buffers)
        return items
    if isinstance(value, (list, tuple)):
        lowered = [_lower(item, f"{where}[{i}]", buffers) for i, item in enumerate(value)]
        if type(value) is list:
            return lowered
        if type(value) is tuple:
            return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(lowered))
    for module, lower in _LOWER_ARRAYS:
        # A value of a library's type exists only if that library is already imported: never import it here.
        library = sys.modules.get(module)
        if library is not None and (result := lower(library, value, where, buffers)) is not None:
            return result
    raise UnsupportedResultError(
        f"{where} is of type {_name(value)}, which cannot leave a worker: return None, bool, int, float, str, bytes, "
        "list, tuple, dict, numpy arrays or CPU tensors"
    )


def _fits_msgpack(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 64


def _name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def _lower_numpy(np: Any, value: Any, where: str, buffers: list[Frame]) -> object | None:
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.hasobject or value.dtype.names:
        raise UnsupportedResultError(f"{where} is a numpy array of dtype {value.dtype}, which cannot leave a worker")
    meta = _ArrayMeta(len(buffers), value.dtype.str, value.shape)
    buffers.append(value.tobytes())
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(meta))


def _lower_torch(torch: Any, value: Any, where: str, buffers: list[Frame]) -> object | None:
    if not isinstance(value, torch.Tensor):
        return None
    if value.device.type != "cpu" or value.layout is not torch.strided:
        raise UnsupportedResultError(
            f"{where} is a {value.layout} tensor on {value.device}, which cannot leave a worker: return .cpu()"
        )
    # A copy: bfloat16 has no buffer type, and the worker's own memory may change or go to sleep while the frame is
    # still in flight.
    buffer = bytearray(value.numel() * value.element_size())
    if buffer:
        # Conjugates and negatives are views of torch's own, whose bytes say something else.
        plain = value.detach().resolve_conj().resolve_neg()
        raw = plain.contiguous().view(-1).view(torch.uint8)
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(raw)
    meta = _ArrayMeta(len(buffers), str(value.dtype).removeprefix("torch."), tuple(value.shape))
    buffers.append(buffer)
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(meta))


def _array(meta: _ArrayMeta, buffers: Sequence[Frame]) -> Any:
    import numpy as np

    return np.frombuffer(bytearray(_frame(meta, buffers)), dtype=np.dtype(meta.dtype)).reshape(meta.shape)


def _tensor(meta: _ArrayMeta, buffers: Sequence[Frame]) -> Any:
    import torch

    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise msgspec.DecodeError(f"unknown tensor type {meta.dtype!r}")
    data = bytearray(_frame(meta, buffers))
    if not data:
        return torch.empty(meta.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(meta.shape)


def _frame(meta: _ArrayMeta, buffers: Sequence[Frame]) -> Frame:
    if not 0 <= meta.frame < len(buffers):
        raise msgspec.DecodeError(f"frame {meta.frame} of {len(buffers)} is missing")
    return buffers[meta.frame]


_LOWER_ARRAYS: tuple[tuple[str, Callable[[Any, Any, str, list[Frame]], object | None]], ...] = (
    ("numpy", _lower_numpy),
    ("torch", _lower_torch),
)

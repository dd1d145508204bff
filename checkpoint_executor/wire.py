"""PURE. Messages to frames and back: version, size limits, validation. No sockets.

A message is one header frame, and for those that carry data any number of payload frames behind it. The header is
one byte of protocol version, then msgpack. Decoding validates against the expected types and does nothing else:
acting on a message is the receiver's business, so a malformed one is harmless. Nothing here unpickles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from checkpoint_executor.errors import WireError
from checkpoint_executor.messages import ToChild, ToParent

__all__ = ["MAX_HEADER_BYTES", "PROTOCOL_VERSION", "Frame", "decode_to_child", "decode_to_parent", "encode"]

PROTOCOL_VERSION = 2

#: A header holds names, numbers and at most a traceback. 1 MiB leaves room for the traceback of a deep recursion
#: (errors are cut to :data:`MAX_TEXT_CHARACTERS` where they are made); user data travels in payload frames.
MAX_HEADER_BYTES = 1 << 20

#: Longest message or traceback text that a child puts into a header.
MAX_TEXT_CHARACTERS = 64 << 10

Frame = bytes | bytearray | memoryview

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class _Decoder(Generic[T]):
    def __init__(self, type_: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type_)

    def __call__(self, frames: Sequence[Frame]) -> tuple[T, Sequence[Frame]]:
        if not frames:
            raise WireError("empty message: expected a header frame")
        header = memoryview(frames[0])
        if header.nbytes > MAX_HEADER_BYTES:
            raise WireError(f"header of {header.nbytes} bytes is over the limit of {MAX_HEADER_BYTES}")
        if header.nbytes < 2:
            raise WireError(f"header of {header.nbytes} bytes is too short")
        if header[0] != PROTOCOL_VERSION:
            raise WireError(f"protocol version {header[0]}, expected {PROTOCOL_VERSION}: parent and child differ")
        try:
            message = self._decoder.decode(header[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"malformed header: {error}") from None
        return message, frames[1:]


#: frames -> (message, payload frames). Raise :class:`WireError` and have no other effect.
decode_to_child: _Decoder[ToChild] = _Decoder(ToChild)
decode_to_parent: _Decoder[ToParent] = _Decoder(ToParent)


def encode(message: ToChild | ToParent, payload: Sequence[Frame] = ()) -> list[Frame]:
    """Turn a message and its payload into frames.

    Raises:
        WireError: the header would be over :data:`MAX_HEADER_BYTES`.
    """
    header = bytes((PROTOCOL_VERSION,)) + _encoder.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    return [header, *payload]

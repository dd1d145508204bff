"""Messages to frames and back: what is valid survives, and whatever is not is a WireError and nothing else."""

from __future__ import annotations

import random
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from checkpoint_executor import wire
from checkpoint_executor.errors import WireError
from checkpoint_executor.messages import (
    HELPER,
    Call,
    CallReply,
    ErrorInfo,
    Exit,
    Hello,
    Role,
    StageReply,
    ToChild,
    ToParent,
)
from checkpoint_executor.wire import MAX_HEADER_BYTES, MAX_TEXT_CHARACTERS, PROTOCOL_VERSION
from tests.support.random_messages import random_message

SEED = 20260
TO_CHILD: tuple[type, ...] = typing.get_args(ToChild)
TO_PARENT: tuple[type, ...] = typing.get_args(ToParent)
DIRECTIONS: list[tuple[type, Callable[..., Any]]] = [
    *((message, wire.decode_to_child) for message in TO_CHILD),
    *((message, wire.decode_to_parent) for message in TO_PARENT),
]

every_message = pytest.mark.parametrize(
    ("message_type", "decode"), DIRECTIONS, ids=[message.__name__ for message, _ in DIRECTIONS]
)


def header_of(message: ToChild | ToParent) -> bytes:
    (header,) = wire.encode(message)
    return bytes(header)


@every_message
def test_every_message_survives(message_type: type, decode: Callable[..., Any]) -> None:
    rng = random.Random(SEED)
    for _ in range(500):
        message = random_message(message_type, rng)
        frames = wire.encode(message)
        assert len(frames) == 1
        assert decode(frames) == (message, [])


@every_message
def test_payload_frames_are_passed_on_untouched(message_type: type, decode: Callable[..., Any]) -> None:
    message = random_message(message_type, random.Random(SEED))
    payload: list[wire.Frame] = [b"", b"\x00" * 10, memoryview(b"view"), bytearray(b"array")]
    back, rest = decode(wire.encode(message, payload))
    assert back == message
    assert all(given is received for given, received in zip(payload, rest, strict=True))


@every_message
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_header_may_be_any_buffer(message_type: type, decode: Callable[..., Any], kind: type) -> None:
    message = random_message(message_type, random.Random(SEED))
    (header,) = wire.encode(message)
    assert decode([kind(header)]) == (message, [])


# ---------------------------------------------------------------------------------------------- what is not valid


def mutations(header: bytes, rng: random.Random) -> Iterator[bytes]:
    """Headers that differ in a bit, a byte, or a piece that is cut, doubled, moved or made up."""
    for _ in range(200):
        position, other = sorted(rng.choices(range(len(header) + 1), k=2))
        piece = header[position:other]
        flipped = bytearray(header)
        at = rng.randrange(len(header))
        flipped[at] ^= 1 << rng.randrange(8)
        yield bytes(flipped)
        flipped[at] = rng.randrange(256)
        yield bytes(flipped)
        yield header[:position]
        yield header[:position] + header[other:]
        yield header[:other] + piece + header[other:]
        yield header[:position] + piece[::-1] + header[other:]
        yield header[:position] + rng.randbytes(rng.randrange(8)) + header[position:]
        yield bytes((PROTOCOL_VERSION,)) + rng.randbytes(rng.randrange(64))


@every_message
def test_any_mutation_is_a_valid_message_or_a_wire_error(message_type: type, decode: Callable[..., Any]) -> None:
    rng = random.Random(SEED)
    refused = 0
    for _ in range(10):
        header = header_of(random_message(message_type, rng))
        for mutation in mutations(header, rng):
            try:
                message, rest = decode([mutation])
            except WireError:
                refused += 1
                continue
            # Then it says exactly what some sender could have said.
            assert rest == []
            assert type(message) in (TO_CHILD if decode is wire.decode_to_child else TO_PARENT)
            assert repr(decode([header_of(message)])[0]) == repr(message)
    assert refused > 5000


@every_message
def test_every_truncation_is_a_wire_error(message_type: type, decode: Callable[..., Any]) -> None:
    rng = random.Random(SEED)
    for _ in range(20):
        header = header_of(random_message(message_type, rng))
        for length in range(len(header)):
            with pytest.raises(WireError):
                decode([header[:length]])


@every_message
def test_bytes_behind_the_message_are_a_wire_error(message_type: type, decode: Callable[..., Any]) -> None:
    header = header_of(random_message(message_type, random.Random(SEED)))
    with pytest.raises(WireError, match="malformed"):
        decode([header + b"\x00"])


@every_message
def test_another_version_is_a_wire_error(message_type: type, decode: Callable[..., Any]) -> None:
    header = header_of(random_message(message_type, random.Random(SEED)))
    for version in range(256):
        if version != PROTOCOL_VERSION:
            with pytest.raises(WireError, match=f"protocol version {version}, expected {PROTOCOL_VERSION}"):
                decode([bytes((version,)) + header[1:]])


@every_message
def test_a_message_of_the_other_direction_is_a_wire_error(message_type: type, decode: Callable[..., Any]) -> None:
    header = header_of(random_message(message_type, random.Random(SEED)))
    other = wire.decode_to_parent if decode is wire.decode_to_child else wire.decode_to_child
    with pytest.raises(WireError, match="malformed"):
        other([header])


@pytest.mark.parametrize("decode", [wire.decode_to_child, wire.decode_to_parent])
@pytest.mark.parametrize("frames", [[], [b""], [b"\x01"]], ids=repr)
def test_too_little_is_a_wire_error(frames: list[bytes], decode: Callable[..., Any]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_an_unknown_field_is_a_wire_error() -> None:
    header = bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode({"type": "exit", "why": "because"})
    with pytest.raises(WireError, match="why"):
        wire.decode_to_child([header])


def test_a_wrong_type_is_a_wire_error() -> None:
    header = bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode({"type": "call", "call_id": "1", "name": "f"})
    with pytest.raises(WireError, match="call_id"):
        wire.decode_to_child([header])


def test_nesting_without_end_is_a_wire_error() -> None:
    nested = b"\x91" * 100_000 + b"\x90"
    with pytest.raises(WireError):
        wire.decode_to_parent([bytes((PROTOCOL_VERSION,)) + nested])


# ---------------------------------------------------------------------------------------------- sizes


def test_a_header_over_the_limit_is_refused_by_the_sender() -> None:
    with pytest.raises(WireError, match="over the limit"):
        wire.encode(Call(1, "x" * MAX_HEADER_BYTES))


def test_a_header_over_the_limit_is_refused_by_the_receiver() -> None:
    header = bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode(Call(1, "x" * MAX_HEADER_BYTES))
    with pytest.raises(WireError, match=f"{len(header)} bytes is over the limit of {MAX_HEADER_BYTES}"):
        wire.decode_to_child([header])


def test_a_header_at_the_limit_passes() -> None:
    room = MAX_HEADER_BYTES - len(wire.encode(Call(1, ""))[0])
    message = Call(1, "x" * (room - 4))  # msgpack needs 4 bytes more for the length of a long string
    (header,) = wire.encode(message)
    assert len(header) == MAX_HEADER_BYTES
    assert wire.decode_to_child([header]) == (message, [])


def test_a_payload_has_no_limit_here() -> None:
    payload = bytes(2 * MAX_HEADER_BYTES)
    assert wire.decode_to_child(wire.encode(Call(1, "f"), [payload])) == (Call(1, "f"), [payload])


def test_the_longest_error_that_a_child_makes_fits_a_header() -> None:
    text = "\N{PILE OF POO}" * MAX_TEXT_CHARACTERS
    error = ErrorInfo("exception", text, error_type="x" * 1000, traceback_text=text)
    for message in (CallReply(1, 0, error), StageReply(1, 1, "lock", 0, 0.1, error=error)):
        assert wire.decode_to_parent(wire.encode(message)) == (message, [])


def test_the_wire_format_of_a_version_does_not_change() -> None:
    # Parent and child are of one installation, so this may change with the version; but never without.
    assert PROTOCOL_VERSION == 2
    assert wire.encode(Exit()) == [b"\x02\x81\xa4type\xa4exit"]
    assert bytes(wire.encode(Hello(Role.HELPER, HELPER, 42, 7))[0]) == (
        b"\x02\x86\xa4type\xa5hello\xa4role\xa6helper\xa4rank\xff\xa3pid*\xaastart_time\x07\xa5error\xc0"
    )

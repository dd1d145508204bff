"""User data to frames and back: what comes back is what went in, or an error that names the type and its place."""

from __future__ import annotations

import collections
import enum
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from checkpoint_executor.payload import (
    UnsupportedResultError,
    decode_result,
    dump_call,
    encode_result,
    load_call,
    oversized,
)
from checkpoint_executor.wire import Frame

SEED = 20261


def there_and_back(value: Any) -> Any:
    return decode_result(encode_result(value))


def same(one: Any, other: Any) -> bool:
    """Equal in value and in every type, to the bottom."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(key, k) and same(value, v) for (key, value), (k, v) in pairs)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


# ---------------------------------------------------------------------------------------------- plain values


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        0,
        -1,
        (1 << 63) - 1,
        -(1 << 63),
        (1 << 64) - 1,
        1 << 64,
        -(1 << 63) - 1,
        10**40,
        0.0,
        -0.0,
        1e-320,
        float("nan"),
        float("-inf"),
        "",
        "text \N{SNOWMAN}\x00",
        b"",
        bytes(range(256)),
        [],
        (),
        {},
        [None, (1, [2, (3,)], "four")],
        (((((),),),),),
        {"a": (1, 2), 3: [4], b"b": None, None: True, 2.5: "float", False: 0},
        {"nested": {"deeper": ({"deepest": ()},)}},
    ],
    ids=repr,
)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert same(there_and_back(value), value)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    leaves: list[Any] = [
        None,
        rng.random() < 0.5,
        rng.randrange(-(1 << 70), 1 << 70),
        rng.random(),
        "é" * rng.randrange(5),
    ]
    kind = rng.randrange(4 if depth < 4 else 1)
    size = rng.randrange(4)
    if kind == 1:
        return [random_value(rng, depth + 1) for _ in range(size)]
    if kind == 2:
        return tuple(random_value(rng, depth + 1) for _ in range(size))
    if kind == 3:
        return {f"key {i}": random_value(rng, depth + 1) for i in range(size)}
    return rng.choice([*leaves, rng.randbytes(size)])


def test_random_nests_come_back_with_their_types() -> None:
    rng = random.Random(SEED)
    for _ in range(2000):
        value = random_value(rng)
        assert same(there_and_back(value), value)


def test_a_dict_of_another_kind_comes_back_as_a_dict() -> None:
    assert same(there_and_back(collections.OrderedDict(a=1)), {"a": 1})
    assert same(there_and_back(collections.defaultdict(int, a=1)), {"a": 1})


# ---------------------------------------------------------------------------------------------- arrays


ARRAYS = [
    np.arange(24).reshape(2, 3, 4).astype(dtype)
    for dtype in ("<i1", "<u2", "<i4", "<u8", "<f2", "<f4", "<f8", "<c8", ">i4", "?")
] + [
    np.arange(24).reshape(4, 6)[::2, ::3],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.broadcast_to(np.arange(3), (4, 3)),
    np.zeros((0,)),
    np.zeros((3, 0, 2), np.int8),
    np.array(7),
    np.array([b"ab", b"c"]),
    np.array(["ab", "ç"]),
    np.array(["2026-01-01", "NaT"], "datetime64[s]"),
    np.array([1, 2], "timedelta64[ms]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_come_back_the_same_and_own_their_memory(array: Any) -> None:
    back = there_and_back(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    assert not np.shares_memory(back, array)


def test_arrays_travel_in_frames_of_their_own_wherever_they_sit() -> None:
    arrays = [np.full(1000, number, np.uint8) for number in range(3)]
    frames = encode_result({"first": arrays[0], "rest": (arrays[1], [arrays[2], "text"])})
    assert [len(frame) for frame in frames[1:]] == [1000] * 3
    assert len(frames[0]) < 200
    back = decode_result(frames)
    assert [int(found[0]) for found in (back["first"], back["rest"][0], back["rest"][1][0])] == [0, 1, 2]


@pytest.mark.parametrize(
    "value", [np.float64(2.5), np.float32(2.5), np.int64(-3), np.uint8(3), np.bool_(True)], ids=repr
)
def test_numpy_scalars_come_back_as_arrays_without_dimensions(value: Any) -> None:
    back = there_and_back([value])[0]
    assert (back.dtype, back.shape) == (value.dtype, ())
    assert back == value


# ---------------------------------------------------------------------------------------------- tensors


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


TENSORS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda torch: torch.randn(3, 4),
    "bfloat16": lambda torch: torch.randn(3, 4, dtype=torch.bfloat16),
    "float8": lambda torch: torch.randn(3, 4).to(torch.float8_e4m3fn),
    "int64": lambda torch: torch.arange(5),
    "bool": lambda torch: torch.tensor([True, False]),
    "complex": lambda torch: torch.randn(3, dtype=torch.complex64),
    "conjugated": lambda torch: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda torch: torch.randn(3, dtype=torch.complex64).conj().imag,
    "transposed": lambda torch: torch.randn(3, 4).t(),
    "strided": lambda torch: torch.arange(10)[::3],
    "expanded": lambda torch: torch.arange(3).expand(4, 3),
    "scalar": lambda torch: torch.tensor(2.5),
    "empty": lambda torch: torch.zeros(0, 3),
    "with a gradient": lambda torch: torch.randn(3, requires_grad=True) * 2,
    "parameter": lambda torch: torch.nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_the_same_bits_and_own_their_memory(torch: Any, name: str) -> None:
    tensor = TENSORS[name](torch)
    back = there_and_back({"tensor": tensor})["tensor"]
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
    expected = tensor.detach().resolve_conj().resolve_neg().contiguous()
    assert back.numel() == 0 or torch.equal(back.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    if back.numel():
        back.zero_()  # it is its own


def test_torch_shapes_and_types_are_refused(torch: Any) -> None:
    with pytest.raises(UnsupportedResultError, match=r"torch\.Size"):
        encode_result(torch.zeros(3).shape)
    with pytest.raises(UnsupportedResultError, match=r"torch\.dtype"):
        encode_result(torch.float32)


@pytest.mark.parametrize("kind", ["on another device", "sparse"])
def test_a_tensor_that_is_no_plain_cpu_memory_is_refused(torch: Any, kind: str) -> None:
    tensor = torch.zeros(3).to_sparse() if kind == "sparse" else torch.zeros(3, device="meta")
    with pytest.raises(UnsupportedResultError, match=r"result\[0\] is a .* tensor on .*return .cpu()"):
        encode_result([tensor])


# ---------------------------------------------------------------------------------------------- what cannot travel


class Opaque:
    pass


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    YES = "yes"


class Text(str):
    __slots__ = ()


class Rows(list[int]):
    pass


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "place", "name"),
    [
        (Opaque(), "result", "test_payload.Opaque"),
        ([0, {"a": (Opaque(),)}], "result[1]['a'][0]", "test_payload.Opaque"),
        (Number.ONE, "result", "test_payload.Number"),
        (Word.YES, "result", "test_payload.Word"),
        (Text("t"), "result", "test_payload.Text"),
        (Rows([1]), "result", "test_payload.Rows"),
        (Pair(1, 2), "result", "test_payload.Pair"),
        ({1}, "result", "builtins.set"),
        (bytearray(b"x"), "result", "builtins.bytearray"),
        (memoryview(b"x"), "result", "builtins.memoryview"),
        (1 + 2j, "result", "builtins.complex"),
        (iter(()), "result", "builtins.tuple_iterator"),
        (Opaque, "result", "builtins.type"),
        ({(1, 2): 3}, "result has a key", "builtins.tuple"),
        ({1 << 64: 3}, "result has a key", "builtins.int"),
        ({np.str_("a"): 3}, "result has a key", "numpy.str_"),
        (np.array([None]), "result", "object"),
        (np.zeros(1, [("a", "<i4")]), "result", "dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_travel_is_named_with_its_place(value: Any, place: str, name: str) -> None:
    with pytest.raises(UnsupportedResultError) as caught:
        encode_result(value)
    assert str(caught.value).startswith(place)
    assert name in str(caught.value)


# ---------------------------------------------------------------------------------------------- what is malformed


def _holds_itself() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (_holds_itself(), "nested too deeply, or holds itself"),
        ("\ud800", "cannot be encoded: .*surrogates"),
        (10**5000, "cannot be encoded: .*digits"),
    ],
    ids=["recursive", "surrogate", "huge int"],
)
def test_what_cannot_be_encoded_is_no_exception_of_the_users(value: object, why: str) -> None:
    with pytest.raises(UnsupportedResultError, match=f"^result .*{why}|^result is {why}"):
        encode_result(value)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b""))],
        [msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode([0, "<f4", [1]])))],
        [msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode([-1, "<f4", [1]]))), b"1234"],
        [msgspec.msgpack.encode(msgspec.msgpack.Ext(2, msgspec.msgpack.encode([0, "save", [1]]))), b"1234"],
    ],
    ids=["nothing", "empty", "noise", "extension", "no frame", "negative frame", "no dtype"],
)
def test_malformed_results_are_a_decode_error(frames: list[bytes]) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_result(frames)


def test_a_result_is_never_unpickled() -> None:
    assert there_and_back(dump_call(os.getcwd)[0]) == dump_call(os.getcwd)[0]


# ---------------------------------------------------------------------------------------------- calls


def test_a_call_comes_back_as_it_was() -> None:
    call = ("method", (1, "two", [3]), {"four": {4}, "five": Pair(5, 5), "six": Number.ONE})
    assert same(load_call(dump_call(call)), call)


def test_a_spawned_processs_main_script_goes_by_value(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(
        """
import multiprocessing
import pickle
import subprocess
import sys

class Model:
    answer = 42

def train() -> None:
    from checkpoint_executor.payload import dump_call

    frames = [bytes(frame) for frame in dump_call(Model)]
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).answer)"
    subprocess.run([sys.executable, "-c", code], input=frames[0], check=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "trainer.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "42\n"), ran.stderr


def test_what_is_importable_goes_by_reference_and_the_rest_by_value() -> None:
    offset = 10
    function, closure = load_call(dump_call((os.path.join, lambda x: x + offset)))
    assert function is os.path.join
    assert closure(1) == 11


def test_arrays_in_calls_travel_in_frames_of_their_own() -> None:
    array = np.arange(100_000, dtype=np.uint8)
    frames = dump_call(("method", (array,), {}))
    assert len(frames[0]) < 1000
    (back,) = load_call(frames)[1]
    assert np.array_equal(back, array)


def iter_nothing() -> Iterator[None]:
    yield


def test_what_cannot_be_pickled_is_an_error_that_says_so() -> None:
    with pytest.raises(TypeError, match="generator"):
        dump_call(iter_nothing())


def test_a_frame_over_the_limit_is_told_by_its_size() -> None:
    frames: list[Frame] = [b"x" * 10, memoryview(bytes(40)).cast("i"), bytearray(20)]
    assert oversized(frames, 40) is None
    assert oversized(frames, 39) == "a frame of 40 bytes is over max_payload_bytes (39)"


@pytest.mark.parametrize("library", ["numpy", "torch", "cloudpickle"])
def test_plain_results_import_no_library(library: str) -> None:
    code = (
        "import sys; from checkpoint_executor import payload; "
        "assert payload.decode_result(payload.encode_result({'a': [1, (2,)]})) == {'a': [1, (2,)]}; "
        f"assert {library!r} not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )

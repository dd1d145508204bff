"""Calls to the workers: what goes in, what comes out, and what a call that goes wrong leaves as it was."""

from __future__ import annotations

import collections
import enum
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from checkpoint_executor import (
    BusyError,
    CUDACheckpointExecutor,
    InvalidRequestError,
    ProcessDiedError,
    ResultTypeError,
    RpcTimeoutError,
    WorkerMethodError,
)
from tests.support.executor_harness import DEADLINE_S, Gate, SoftMachine, assert_failed, in_thread
from tests.support.executor_workers import pattern

RANKS = 2


@pytest.fixture(autouse=True)
def _serves_on(request: pytest.FixtureRequest) -> Any:
    """Whatever a call did, the executor that ran it serves on and sleeps on."""
    shares = "executor" in request.fixturenames
    executor: CUDACheckpointExecutor | None = request.getfixturevalue("executor") if shares else None
    yield
    if executor is not None:
        executor.check_health()
        assert executor.collective_rpc("read_weights") == [pattern(rank) for rank in range(RANKS)]


def echo(executor: CUDACheckpointExecutor, value: Any) -> Any:
    """The value after it went into the workers and came back."""
    first, second = executor.collective_rpc("echo", args=(value,))
    assert type(first) is type(second)
    return first[0]


# ---------------------------------------------------------------------------------------------- in and out


def test_results_come_in_rank_order(executor: CUDACheckpointExecutor) -> None:
    results = executor.collective_rpc("identify")
    assert [(rank, size) for rank, size, _ in results] == [(0, RANKS), (1, RANKS)]
    assert [pid for _, _, pid in results] == [executor.pids["worker 0"], executor.pids["worker 1"]]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -7,
        1 << 100,
        2.5,
        float("inf"),
        "text \N{SNOWMAN}",
        b"\x00bytes",
        [1, [2, (3, [4])]],
        (),
        {"a": {"b": (1, None)}, 3: "number", b"c": b"bytes"},
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_were(executor: CUDACheckpointExecutor, value: Any) -> None:
    assert echo(executor, value) == value
    assert type(echo(executor, value)) is type(value)


def test_positional_and_named_arguments(executor: CUDACheckpointExecutor) -> None:
    results = executor.collective_rpc("echo", args=(1, "two"), kwargs={"three": 3})
    assert results == [((1, "two"), {"three": 3})] * RANKS


def add_to_rank(worker: Any, number: int, *, factor: int = 1) -> int:
    rank: int = worker.context.rank
    return (rank + number) * factor


def test_a_callable_gets_the_worker_as_its_first_argument(executor: CUDACheckpointExecutor) -> None:
    assert executor.collective_rpc(add_to_rank, args=(10,), kwargs={"factor": 2}) == [20, 22]


def test_a_closure_and_a_lambda_travel_too(executor: CUDACheckpointExecutor) -> None:
    offset = 100

    def closure(worker: Any) -> int:
        rank: int = worker.context.rank
        return rank + offset

    assert executor.collective_rpc(closure) == [100, 101]
    assert executor.collective_rpc(lambda worker: worker.context.world_size) == [RANKS] * RANKS


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.int16).reshape(3, 4).T,
        np.zeros((0, 3), np.float64),
        np.array(5, np.uint8),
        np.array([True, False]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.array([1 + 2j]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_as_they_were(executor: CUDACheckpointExecutor, array: Any) -> None:
    back = echo(executor, array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)
    if back.ndim:
        back.flags.writeable = True  # raises if the memory is not its own


def test_an_array_argument_is_the_workers_own_to_change(executor: CUDACheckpointExecutor) -> None:
    def change(worker: Any, array: Any) -> Any:
        array += worker.context.rank
        return array

    array = np.zeros(100_000)
    first, second = executor.collective_rpc(change, args=(array,))
    assert (first.sum(), second.sum(), array.sum()) == (0, 100_000, 0)


@pytest.mark.parametrize("value", [np.float64(2.5), np.float32(2.5), np.int64(3), np.bool_(True)], ids=repr)
def test_numpy_scalars_travel(executor: CUDACheckpointExecutor, value: Any) -> None:
    assert echo(executor, value) == value
    assert echo(executor, {"nested": [value]}) == {"nested": [value]}


def test_large_arrays_pass_both_ways(executor: CUDACheckpointExecutor) -> None:
    array = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    for back in executor.collective_rpc("echo", args=(array,)):
        assert np.array_equal(back[0], array)


def test_large_bytes_pass_both_ways(executor: CUDACheckpointExecutor) -> None:
    data = bytes(range(256)) * (32 << 12)
    assert executor.collective_rpc("echo", args=(data,)) == [(data,)] * RANKS


def test_large_tensors_pass_both_ways(machine: SoftMachine) -> None:
    torch = pytest.importorskip("torch")
    executor = machine.make()
    tensor = torch.arange(16 << 20, dtype=torch.float32)
    ((back,),) = executor.collective_rpc("echo", args=(tensor,))
    assert back.dtype is torch.float32
    assert torch.equal(back, tensor)
    half = torch.randn(3, 5, dtype=torch.bfloat16)
    ((back,),) = executor.collective_rpc("echo", args=(half.t(),))
    assert torch.equal(back, half.t())


# ---------------------------------------------------------------------------------------------- what cannot travel


class Opaque:
    pass


class Colour(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "name", "place"),
    [
        (Opaque(), "Opaque", "result"),
        ({"rows": [0, Opaque()]}, "Opaque", r"result\['rows'\]\[1\]"),
        ({1, 2}, "builtins.set", "result"),
        (Colour.RED, "Colour", "result"),
        (Text("text"), "Text", "result"),
        (Pair(1, 2), "Pair", "result"),
        ({(1, 2): 3}, "builtins.tuple", "result has a key"),
        (range(3), "builtins.range", "result"),
        (bytearray(b"x"), "builtins.bytearray", "result"),
        (np.array([object()]), "object", "result"),
        (np.zeros(1, [("a", "<i4")]), "numpy array of dtype", "result"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_result_that_cannot_travel_is_an_error_that_names_its_type_and_place(
    executor: CUDACheckpointExecutor, value: Any, name: str, place: str
) -> None:
    with pytest.raises(ResultTypeError, match=name) as caught:
        executor.collective_rpc(lambda worker: value)
    assert isinstance(caught.value, TypeError)
    assert caught.value.executor_alive
    assert caught.value.rank == 0
    with pytest.raises(ResultTypeError, match=place):
        executor.collective_rpc(lambda worker: value)


def test_arguments_that_cannot_travel_are_refused_before_anything_is_sent(executor: CUDACheckpointExecutor) -> None:
    with pytest.raises(InvalidRequestError, match=r"'echo'.*cannot be sent.*lock") as caught:
        executor.collective_rpc("echo", args=(threading.Lock(),))
    assert caught.value.__cause__ is not None


def test_arguments_that_the_worker_cannot_rebuild_are_its_error(executor: CUDACheckpointExecutor) -> None:
    class Fragile:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    with pytest.raises(WorkerMethodError, match="not a number") as caught:
        executor.collective_rpc("echo", args=(Fragile(),))
    assert caught.value.error_type == "builtins.ValueError"


def test_a_result_without_end_is_an_error(executor: CUDACheckpointExecutor) -> None:
    def endless(worker: Any) -> Any:
        result: list[Any] = []
        result.append(result)
        return result

    with pytest.raises(ResultTypeError, match="rank 0: result is nested too deeply, or holds itself"):
        executor.collective_rpc(endless)


def test_a_result_over_the_payload_limit_is_an_error_and_not_a_silence(machine: SoftMachine) -> None:
    executor = machine.make(max_payload_bytes=2 << 20)
    with pytest.raises(ResultTypeError, match=r"4194304 bytes.*max_payload_bytes"):
        executor.collective_rpc(lambda worker: np.zeros(4 << 20, np.uint8), timeout=DEADLINE_S)
    with pytest.raises(ResultTypeError, match="max_payload_bytes"):
        executor.collective_rpc(lambda worker: bytes(4 << 20), timeout=DEADLINE_S)
    assert executor.collective_rpc(lambda worker: np.zeros(1 << 20, np.uint8).nbytes) == [1 << 20]
    with pytest.raises(InvalidRequestError, match="max_payload_bytes"):
        executor.collective_rpc("echo", args=(np.zeros(4 << 20, np.uint8),), timeout=DEADLINE_S)
    executor.sleep()
    executor.wake_up()


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_an_exception_arrives_with_type_and_traceback(executor: CUDACheckpointExecutor) -> None:
    with pytest.raises(WorkerMethodError, match=r"rank 0 raised builtins.LookupError: no such thing") as caught:
        executor.collective_rpc("fail", args=("no such thing",))
    error = caught.value
    assert not isinstance(error, ResultTypeError)
    assert (error.error_type, error.rank, error.pid) == ("builtins.LookupError", 0, executor.pids["worker 0"])
    assert error.traceback_text is not None
    assert "in fail" in error.traceback_text
    assert "raise LookupError(message)" in str(error)


def test_an_exception_on_one_rank_names_the_rank(executor: CUDACheckpointExecutor) -> None:
    with pytest.raises(WorkerMethodError, match="rank 1 does not like it") as caught:
        executor.collective_rpc("fail_on", args=(1,))
    assert (caught.value.rank, caught.value.pid) == (1, executor.pids["worker 1"])


def test_an_exception_with_a_text_without_end_arrives(executor: CUDACheckpointExecutor) -> None:
    with pytest.raises(WorkerMethodError, match="LookupError"):
        executor.collective_rpc("fail", args=("x" * (4 << 20),))


def test_an_exception_that_cannot_print_itself_arrives(executor: CUDACheckpointExecutor) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("nothing to say")

    def fail(worker: Any) -> None:
        raise MuteError

    with pytest.raises(WorkerMethodError, match="MuteError"):
        executor.collective_rpc(fail)


def test_an_exception_whose_text_is_no_utf_8_arrives(executor: CUDACheckpointExecutor) -> None:
    with pytest.raises(WorkerMethodError, match=r"caf\\udce9"):
        executor.collective_rpc("fail", args=("caf\udce9",))


@pytest.mark.parametrize("method", ["no_such_method", "context"])
def test_a_method_that_is_none_is_an_error(executor: CUDACheckpointExecutor, method: str) -> None:
    with pytest.raises(WorkerMethodError, match=r"no_such_method|not callable"):
        executor.collective_rpc(method)


def test_a_worker_that_leaves_is_fatal(machine: SoftMachine) -> None:
    executor = machine.make(ranks=2)
    pids = executor.pids
    with pytest.raises(ProcessDiedError, match="exited with status 3 during the call of 'leave'") as caught:
        executor.collective_rpc("leave", args=(3,))
    assert (caught.value.exit_status, caught.value.role) == (3, "worker")
    assert_failed(machine, executor, caught.value, pids)


# ---------------------------------------------------------------------------------------------- time


def test_a_call_that_is_late_is_a_timeout_and_the_next_is_refused_until_it_has_ended(
    executor: CUDACheckpointExecutor, gate: Gate
) -> None:
    with pytest.raises(RpcTimeoutError, match=r"'wait_at'.*0\.05 s.*unharmed") as caught:
        executor.collective_rpc("wait_at", timeout=0.05, args=(gate.path,))
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.deadline_s, caught.value.executor_alive) == (0.05, True)
    gate.wait_reached(RANKS)
    for call in (
        lambda: executor.collective_rpc("identify"),
        executor.sleep,
        executor.wake_up,
        lambda: executor.sleep(level=0),
    ):
        with pytest.raises(BusyError, match=r"stopped waiting.*rank\(s\) 0, 1"):
            call()
    executor.check_health()
    gate.open()
    # The late answers are for nobody; the first call that is let in is the next one's.
    _wait_until_idle(executor)
    assert executor.collective_rpc("echo", args=("fresh",)) == [("fresh",)] * RANKS
    executor.sleep()
    executor.wake_up()


def _wait_until_idle(executor: CUDACheckpointExecutor) -> None:
    for _ in range(1_000_000):
        try:
            executor.collective_rpc("identify")
        except BusyError:
            continue
        return
    raise AssertionError("still busy")


def test_a_call_within_its_timeout_is_answered(executor: CUDACheckpointExecutor) -> None:
    assert executor.collective_rpc("echo", timeout=DEADLINE_S, args=(1,)) == [(1,)] * RANKS


def test_a_call_without_a_timeout_waits(executor: CUDACheckpointExecutor, gate: Gate) -> None:
    call = in_thread(executor.collective_rpc, "wait_at", args=(gate.path,))
    gate.wait_reached(RANKS)
    assert not call.done()
    gate.open()
    assert call.result(DEADLINE_S) == ["passed"] * RANKS


def test_a_worker_that_dies_ends_the_wait(machine: SoftMachine, gate: Gate) -> None:
    executor = machine.make(ranks=2)
    pids = executor.pids
    call = in_thread(executor.collective_rpc, "wait_at", args=(gate.path,))
    gate.wait_reached(2)
    os.kill(pids["worker 1"], signal.SIGKILL)
    with pytest.raises(ProcessDiedError, match=r"worker 1.*signal 9 during the call of 'wait_at'") as caught:
        call.result(DEADLINE_S)
    assert (caught.value.rank, caught.value.pid, caught.value.exit_status) == (1, pids["worker 1"], -9)
    assert_failed(machine, executor, caught.value, pids)


# ---------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", ["{}:RawWorker", "{}.RawWorker"])
def test_a_worker_is_found_by_its_name(machine: SoftMachine, name: str) -> None:
    executor = machine.make(name.format("tests.support.executor_workers"))
    assert executor.collective_rpc("read_weights") == [pattern(0)]


def test_a_worker_that_does_nothing_imports_neither_torch_nor_numpy(machine: SoftMachine) -> None:
    executor = machine.make()
    executor.sleep()
    executor.wake_up()
    assert executor.collective_rpc("imported", args=(["torch", "numpy", "vllm", "cuda"],)) == [[]]

"""Every error: its type says whether the executor survived, its facts are attributes, and it pickles."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

import checkpoint_executor
from checkpoint_executor import errors
from checkpoint_executor.errors import CheckpointExecutorError, FatalError, RefusedError, WorkerMethodError

CLASSES: list[type[CheckpointExecutorError]] = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, CheckpointExecutorError) and found is not CheckpointExecutorError
]
every_error = pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)

FACTS: dict[str, Any] = {
    "rank": 1,
    "pid": 42,
    "role": "worker",
    "stage": "lock",
    "code": 600,
    "code_name": "CUDA_ERROR_NOT_READY",
    "state_before": "running",
    "state_after": "running",
    "deadline_s": 30.0,
    "elapsed_s": 30.1,
    "story": ("first", "second"),
    "survivors": (43,),
    "problems": ("one",),
    "missing_bytes": {"SOFT-0": 1},
    "holders": {"SOFT-0": ((42, 1),)},
    "error_type": "builtins.ValueError",
    "traceback_text": "Traceback",
    "exit_status": -9,
}


@every_error
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_pickles_with_its_facts(kind: type[CheckpointExecutorError], protocol: int) -> None:
    error = kind("what happened", **FACTS)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is kind
    assert (str(back), back.args, back.facts) == ("what happened", ("what happened",), FACTS)
    assert {name: getattr(back, name) for name in FACTS} == FACTS
    assert back.executor_alive == error.executor_alive


@every_error
def test_an_error_can_be_copied(kind: type[CheckpointExecutorError]) -> None:
    back = copy.copy(kind("what happened", **FACTS))
    assert (type(back), str(back), back.facts) == (kind, "what happened", FACTS)


@every_error
def test_facts_that_were_not_given_read_as_none_or_empty(kind: type[CheckpointExecutorError]) -> None:
    error = kind("what happened")
    assert error.facts == {}
    for name in ("rank", "pid", "role", "stage", "code", "code_name", "state_before", "state_after", "deadline_s"):
        assert getattr(error, name) is None
    assert (error.story, error.survivors) == ((), ())


@every_error
def test_the_type_says_whether_the_executor_survived(kind: type[CheckpointExecutorError]) -> None:
    assert kind.executor_alive is not issubclass(kind, FatalError)
    assert not issubclass(kind, (FatalError,)) or not issubclass(kind, (RefusedError, WorkerMethodError))


def test_a_timeout_is_a_timeout_error() -> None:
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.RpcTimeoutError, TimeoutError)


@pytest.mark.parametrize("kind", [errors.InvalidRequestError, errors.ConfigError])
def test_what_can_never_be_right_is_a_value_error(kind: type[CheckpointExecutorError]) -> None:
    assert issubclass(kind, ValueError)
    assert issubclass(kind, RefusedError)


def test_a_result_that_cannot_travel_is_a_type_error() -> None:
    assert issubclass(errors.ResultTypeError, TypeError)


def test_the_base_is_not_raised_itself() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CheckpointExecutorError("what happened")


def test_every_error_is_public() -> None:
    names = {kind.__name__ for kind in CLASSES} | {"CheckpointExecutorError"}
    assert names == set(errors.__all__)
    assert names <= set(checkpoint_executor.__all__)
    for name in names:
        assert getattr(checkpoint_executor, name) is getattr(errors, name)


@every_error
def test_every_error_says_what_it_means(kind: type[CheckpointExecutorError]) -> None:
    assert kind.__doc__
    assert kind.__doc__ != CheckpointExecutorError.__doc__

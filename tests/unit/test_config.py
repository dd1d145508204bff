"""The configuration: every problem at once, unknown names refused, and defaults that are the seed's."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_executor import ConfigError
from checkpoint_executor.config import Deadlines, ExecutorConfig, parse, validate
from checkpoint_executor.faults import Fault, Injection
from checkpoint_executor.messages import DeadlineClass, Role
from checkpoint_executor.preflight import CHECKS

INJECTION = Injection(Fault.HANG, Role.HELPER, 0, "lock")


def problems_of(**options: Any) -> tuple[str, ...]:
    """What parsing and validating options for the software device finds."""
    with pytest.raises(ConfigError) as caught:
        validate(parse(options), {}, "soft")
    error = caught.value
    assert isinstance(error, ValueError)
    assert "nothing was started" in str(error)
    assert all(problem in str(error) for problem in error.problems)
    return error.problems


# ---------------------------------------------------------------------------------------------- what is right


def test_the_deadlines_are_the_seeds() -> None:
    deadlines = ExecutorConfig().deadlines
    assert deadlines.seconds(DeadlineClass.DRIVER) == 30
    assert deadlines.driver_lock_s == 10
    assert deadlines.seconds(DeadlineClass.WORKER_SLEEP) == 120
    assert deadlines.seconds(DeadlineClass.WORKER_WAKE) == 120
    assert deadlines.seconds(DeadlineClass.HOOK) == 120


@pytest.mark.parametrize("deadline", list(DeadlineClass))
def test_every_deadline_class_has_its_seconds(deadline: DeadlineClass) -> None:
    assert Deadlines(**{f"{deadline.value}_s": 7.5}).seconds(deadline) == 7.5


def test_the_defaults_are_valid_on_the_software_device() -> None:
    assert validate(parse({}), {}, "soft") == ()


def test_every_option_can_be_given() -> None:
    options: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "device": "soft",
        "device_ids": ("SOFT-1", "SOFT-0"),
        "communication": "socket",
        "undo_before_checkpoint": False,
        "retain_backup": False,
        "release_local_memory": False,
        "deadlines": Deadlines(driver_s=5, driver_lock_s=1),
        "wake_margin_bytes": 0,
        "host_margin_bytes": 0,
        "verify_weights": True,
        "attribution": True,
        "ignore_preflight": (next(iter(CHECKS)),),
        "runtime_dir": "/somewhere",
        "soft_root": "/elsewhere",
        "soft_capacity_bytes": 1 << 30,
        "max_payload_bytes": 1 << 30,
        "worker_env": {"NAME": "value"},
        "faults": (INJECTION,),
    }
    assert set(options) == set(ExecutorConfig.__struct_fields__)
    config = parse(options)
    assert {name: getattr(config, name) for name in options} == options
    assert validate(config, {}, "soft") == ()


def test_options_may_be_plain_data() -> None:
    config = parse({"device_ids": ["SOFT-0"], "deadlines": {"driver_s": 5, "driver_lock_s": 1}, "faults": []})
    assert config.device_ids == ("SOFT-0",)
    assert config.deadlines == Deadlines(driver_s=5, driver_lock_s=1)


# ---------------------------------------------------------------------------------------------- what is wrong


def test_every_problem_is_told_at_once() -> None:
    problems = problems_of(
        tensor_parallel_size=0,
        device="tpu",
        device_ids=("SOFT-0", "SOFT-0"),
        communication="carrier pigeon",
        deadlines={"driver_s": 5, "driver_lock_s": 5, "hook_s": 0, "start_s": float("inf")},
        wake_margin_bytes=-1,
        host_margin_bytes=-1,
        soft_capacity_bytes=0,
        max_payload_bytes=10,
        worker_env={"A=B": "value", "NUL": "\0"},
    )
    for found, expected in zip(
        problems,
        [
            "tensor_parallel_size must be at least 1, not 0",
            "device must be",
            "communication must be",
            "device_ids names 2 devices for 0 rank(s)",
            "device_ids names a device twice",
            "deadlines.hook_s must be a positive number",
            "deadlines.start_s must be a positive number",
            "deadlines.driver_lock_s (5.0) must be below deadlines.driver_s (5.0)",
            "wake_margin_bytes must not be negative",
            "host_margin_bytes must not be negative",
            "max_payload_bytes must be at least",
            "soft_capacity_bytes must be positive",
            "worker_env: 'A=B'",
            "worker_env: 'NUL'",
        ],
        strict=True,
    ):
        assert expected in found


def test_unknown_names_wrong_types_and_bad_values_are_told_together() -> None:
    problems = problems_of(
        tensor_paralel_size=2,
        pipeline_parallel_size=2,
        device=7,
        retain_backup="yes",
        deadlines={"driver": 5},
        communication="carrier pigeon",
    )
    for found, expected in zip(
        problems,
        [
            "unknown option 'pipeline_parallel_size'; known are attribution, communication,",
            "unknown option 'tensor_paralel_size'",
            "device: Expected `str`, got `int`",
            "retain_backup: Expected `bool`, got `str`",
            "deadlines: Object contains unknown field `driver`",
            "communication must be",
        ],
        strict=True,
    ):
        assert expected in found


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tensor_parallel_size", "2"),
        ("tensor_parallel_size", 2.5),
        ("tensor_parallel_size", True),
        ("tensor_parallel_size", None),
        ("device", None),
        ("device_ids", "SOFT-0"),
        ("device_ids", [0]),
        ("undo_before_checkpoint", 1),
        ("deadlines", 30),
        ("deadlines", {"driver_s": "30"}),
        ("wake_margin_bytes", 1.5),
        ("runtime_dir", 7),
        ("worker_env", {"NAME": 1}),
        ("faults", ["hang"]),
    ],
)
def test_a_wrong_type_is_told_with_the_options_name(option: str, value: Any) -> None:
    (problem,) = problems_of(**{option: value})
    assert problem.startswith(f"{option}: Expected")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [name for name in Deadlines.__struct_fields__ if not name.startswith("driver")])
def test_a_deadline_is_a_positive_finite_number(name: str, seconds: float) -> None:
    (problem,) = problems_of(deadlines={name: seconds})
    assert problem.startswith(f"deadlines.{name} must be a positive number of seconds")


def test_a_preflight_check_that_does_not_exist_cannot_be_ignored() -> None:
    (problem,) = problems_of(ignore_preflight=["no_such_check"])
    assert "no_such_check" in problem


def test_faults_are_for_the_software_device_only() -> None:
    config = parse({"faults": (INJECTION,)})
    assert validate(config, {}, "soft") == ()
    with pytest.raises(ConfigError, match="software device only"):
        validate(config, {}, "cuda")


def test_the_environment_is_judged_for_cuda_with_what_the_workers_are_given() -> None:
    bad = {"NCCL_NVLS_ENABLE": "1"}
    with pytest.raises(ConfigError, match="NCCL_NVLS_ENABLE"):
        validate(parse({"tensor_parallel_size": 2}), bad, "cuda")
    validate(parse({"tensor_parallel_size": 2}), bad, "soft")
    validate(parse({"tensor_parallel_size": 2, "worker_env": {"NCCL_NVLS_ENABLE": "0"}}), bad, "cuda")


def test_problems_of_values_and_of_the_environment_are_told_together() -> None:
    config = parse({"tensor_parallel_size": 2, "wake_margin_bytes": -1, "faults": (INJECTION,)})
    with pytest.raises(ConfigError) as caught:
        validate(config, {"NCCL_NVLS_ENABLE": "1"}, "cuda")
    assert len(caught.value.problems) == 3

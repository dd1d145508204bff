"""The rules of restarting that need no process: limits and pauses, what counts as free, what a report says."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoint_executor import FatalError, RefusedError
from checkpoint_executor.config import Deadlines
from checkpoint_executor.http_control import CONTROL_TIMEOUT_S
from checkpoint_executor.softgpu import SoftGpu
from checkpoint_executor.supervise import (
    Cause,
    EngineRestarted,
    Incident,
    RestartPolicy,
    RestartsExhaustedError,
    append_incident,
    soft_used_bytes,
    wait_free,
)


def incident(**changes: Any) -> Incident:
    given: dict[str, Any] = {
        "what": "engine",
        "when": "2026-01-01T00:00:00.000+00:00",
        "cause": Cause.TIMEOUT,
        "detail": 'line one\n"line two"',
        "exit_status": None,
        "uptime_s": 3.5,
        "pids": (10, 11),
        "survivors": (),
        "dead_s": 0.1,
        "free_s": 0.2,
        "left_bytes": {"SOFT-0": 7},
        "restart": 1,
        "backoff_s": 1.0,
    }
    return Incident(**{**given, **changes})


# ---------------------------------------------------------------------------------------------- the policy


def test_the_pause_grows_by_the_factor_up_to_its_bound() -> None:
    policy = RestartPolicy(max_restarts=1000, backoff_s=1.0, backoff_factor=2.0, backoff_max_s=10.0)
    delays = [policy.next_delay_s([0.0] * restarts, 1.0) for restarts in range(6)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert policy.next_delay_s([0.0] * 999, 1.0) == 10.0  # and 2.0**999 does not overflow


def test_no_more_restarts_than_the_limit_within_the_window() -> None:
    policy = RestartPolicy(max_restarts=3, window_s=100.0)
    assert policy.next_delay_s([0.0, 1.0], 2.0) is not None
    assert policy.next_delay_s([0.0, 1.0, 2.0], 3.0) is None


def test_restarts_older_than_the_window_count_neither_for_the_limit_nor_for_the_pause() -> None:
    policy = RestartPolicy(max_restarts=3, window_s=100.0, backoff_s=1.0)
    assert policy.next_delay_s([0.0, 1.0, 2.0], 99.9) is None
    assert policy.next_delay_s([0.0, 1.0, 2.0], 100.0) == 4.0
    assert policy.next_delay_s([0.0, 1.0, 2.0], 1000.0) == 1.0


def test_a_limit_of_nought_never_restarts() -> None:
    assert RestartPolicy(max_restarts=0).next_delay_s([], 0.0) is None


def test_a_control_call_may_take_as_long_as_a_whole_sleep_inside_the_engine() -> None:
    # Otherwise the supervisor would kill engines that are about to give their own verdict.
    deadlines = Deadlines()
    assert deadlines.worker_sleep_s + deadlines.hook_s + 2 * deadlines.driver_s < CONTROL_TIMEOUT_S
    assert deadlines.worker_wake_s + deadlines.hook_s + 2 * deadlines.driver_s < CONTROL_TIMEOUT_S


def test_the_supervisor_imports_neither_the_executor_nor_what_engines_are_made_of() -> None:
    code = (
        "import sys, checkpoint_executor.supervise; "
        "print(*sorted({'zmq', 'torch', 'cuda', 'pynvml', 'checkpoint_executor.executor'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environ, text=True).strip() == ""


# ---------------------------------------------------------------------------------------------- reports


def test_an_incident_is_one_line_of_json_with_all_that_is_known() -> None:
    line = incident().line()
    assert "\n" not in line
    read = json.loads(line)
    assert set(read) == set(Incident.__struct_fields__)
    assert (read["cause"], read["pids"], read["left_bytes"]) == ("timeout", [10, 11], {"SOFT-0": 7})
    assert msgspec.json.decode(line, type=Incident) == incident()


def test_incidents_are_appended_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    report = append_incident(path)
    report(incident(restart=1))
    append_incident(path)(incident(restart=2))
    assert [json.loads(line)["restart"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("kind", [EngineRestarted, RestartsExhaustedError])
def test_errors_carry_the_incident_and_pickle(kind: type[EngineRestarted | RestartsExhaustedError]) -> None:
    error = pickle.loads(pickle.dumps(kind("text", incident=incident())))
    assert type(error) is kind
    assert error.incident == incident()


def test_the_type_says_whether_an_engine_serves() -> None:
    assert EngineRestarted.executor_alive
    assert not issubclass(EngineRestarted, FatalError | RefusedError)
    assert not RestartsExhaustedError.executor_alive
    assert issubclass(RestartsExhaustedError, FatalError)


# ---------------------------------------------------------------------------------------------- free devices


class Readings:
    """One after another, the last for ever."""

    def __init__(self, *readings: Mapping[str, int] | Exception) -> None:
        self.left = list(readings)

    def __call__(self) -> Mapping[str, int]:
        reading = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if isinstance(reading, Exception):
            raise reading
        return reading


def test_free_is_when_every_device_is_back_at_the_first_reading() -> None:
    readings = Readings({"a": 50, "b": 0}, {"a": 10, "b": 20}, {"a": 10, "b": 0})
    seconds, left = wait_free(readings, {"a": 10}, slack_bytes=0, timeout_s=30)
    assert seconds is not None
    assert left == {}
    assert len(readings.left) == 1


def test_a_device_that_does_not_become_free_is_waited_for_no_longer_than_the_bound() -> None:
    assert wait_free(Readings({"a": 50, "b": 1}), {"b": 1}, slack_bytes=0, timeout_s=0.05) == (None, {"a": 50})


def test_what_is_within_the_slack_is_free_and_still_told() -> None:
    seconds, left = wait_free(Readings({"a": 50}), {}, slack_bytes=50, timeout_s=30)
    assert seconds is not None
    assert left == {"a": 50}


def test_less_than_at_the_first_reading_is_free() -> None:
    assert wait_free(Readings({"a": 5}), {"a": 10}, slack_bytes=0, timeout_s=30)[1] == {}


def test_a_reading_that_fails_is_tried_again() -> None:
    seconds, left = wait_free(Readings(OSError("driver"), {"a": 0}), {}, slack_bytes=0, timeout_s=30)
    assert seconds is not None
    assert left == {}


def test_a_device_that_cannot_be_read_is_unknown_and_not_free() -> None:
    assert wait_free(Readings(OSError("driver")), {}, slack_bytes=0, timeout_s=0.05) == (None, None)


def test_a_reading_that_hangs_is_given_up() -> None:
    release = threading.Event()

    def hang() -> Mapping[str, int]:
        release.wait()
        return {}

    try:
        assert wait_free(hang, {}, slack_bytes=0, timeout_s=0.05) == (None, None)
    finally:
        release.set()


def test_the_software_devices_are_read_from_their_ledgers(tmp_path: Path) -> None:
    read = soft_used_bytes(tmp_path / "gpu")
    assert read() == {}
    SoftGpu(tmp_path / "gpu", "SOFT-0")
    SoftGpu(tmp_path / "gpu", "SOFT-1")
    assert read() == {"SOFT-0": 0, "SOFT-1": 0}


def test_pauses_never_shrink_within_a_window() -> None:
    policy = RestartPolicy(max_restarts=50)
    delays = [policy.next_delay_s([0.0] * restarts, 1.0) or 0.0 for restarts in range(50)]
    assert all(first <= second <= policy.backoff_max_s for first, second in pairwise(delays))

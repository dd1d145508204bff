"""What the preflight of a start comes to: which findings keep an executor from starting, and what it then says."""

from __future__ import annotations

import pytest

from checkpoint_executor.driver_states import DriverCode, ProcessState
from checkpoint_executor.facts import StateQuery
from checkpoint_executor.helper import preflight
from checkpoint_executor.messages import ErrorInfo
from checkpoint_executor.preflight import Finding, Severity


def finding(check: str, severity: Severity) -> Finding:
    return Finding(check, severity, "rank 1 (pid 101)", f"{check} was seen", "It matters.", "Do something.")


MIG, IPC = finding("mig", Severity.BLOCKER), finding("cuda_ipc", Severity.BLOCKER)
WARNING, NOTE = finding("persistence_mode", Severity.WARNING), finding("profiler", Severity.NOTE)

QUERY_FAILED = ErrorInfo(
    "driver",
    "get_state: CUDA_ERROR_OPERATING_SYSTEM (304)",
    error_type="DriverError",
    code=int(DriverCode.OPERATING_SYSTEM),
    code_name="CUDA_ERROR_OPERATING_SYSTEM",
)


def test_only_blockers_keep_an_executor_from_starting() -> None:
    assert preflight.refusal((), ()) is None
    assert preflight.refusal((WARNING, NOTE), ()) is None


def test_a_refusal_names_every_blocker_and_the_way_around() -> None:
    refused = preflight.refusal((MIG, IPC, WARNING), ())
    assert refused is not None
    assert refused.kind == "refused"
    for part in ("2 blocker(s)", "rank 1 (pid 101)", "mig was seen", "cuda_ipc was seen", "ignore_preflight"):
        assert part in refused.message
    assert "persistence_mode" not in refused.message


def test_checks_that_are_ignored_do_not_count() -> None:
    refused = preflight.refusal((MIG, IPC), ("mig",))
    assert refused is not None
    assert "mig was seen" not in refused.message
    assert preflight.refusal((MIG, IPC), ("mig", "cuda_ipc")) is None


def test_a_failed_query_keeps_its_code_and_gets_the_reasons() -> None:
    error = preflight.refusal((finding("rights", Severity.BLOCKER),), (), QUERY_FAILED)
    assert error is not None
    assert (error.kind, error.code, error.code_name) == ("driver", 304, "CUDA_ERROR_OPERATING_SYSTEM")
    assert error.message.startswith(QUERY_FAILED.message)
    assert "rights was seen" in error.message


def test_a_failed_query_fails_whatever_is_ignored() -> None:
    assert preflight.refusal((finding("rights", Severity.BLOCKER),), ("rights",), QUERY_FAILED) == QUERY_FAILED


@pytest.mark.parametrize(
    ("state", "error", "query"),
    [
        (ProcessState.RUNNING, None, StateQuery(state="running")),
        (ProcessState.LOCKED, QUERY_FAILED, StateQuery(state="locked")),
        (None, QUERY_FAILED, StateQuery(None, 304, "CUDA_ERROR_OPERATING_SYSTEM", QUERY_FAILED.message)),
        (None, None, StateQuery()),
    ],
)
def test_the_answer_of_the_driver_becomes_a_fact(
    state: ProcessState | None, error: ErrorInfo | None, query: StateQuery
) -> None:
    assert preflight.query_of(state, error) == query

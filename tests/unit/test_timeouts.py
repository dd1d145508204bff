"""How long a caller is willing to wait, and what is no such time."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_executor import ConfigError, InvalidRequestError
from checkpoint_executor.http_control import ControlCallError, ControlClient
from checkpoint_executor.timeouts import to_wait_s


@pytest.mark.parametrize(
    ("given", "waits"), [(None, None), (0.5, 0.5), (3, 3.0), (float("inf"), None), (1e300, None), (10**400, None)]
)
def test_a_number_of_seconds_is_kept_and_what_never_ends_is_none(given: Any, waits: float | None) -> None:
    assert to_wait_s(given, "timeout") == waits


@pytest.mark.parametrize("given", ["1", True, float("nan"), -1, [], 1j])
def test_what_is_no_time_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"timeout_s must .* Nothing was sent"):
        to_wait_s(given, "timeout_s", zero_allowed=True)


def test_not_waiting_at_all_makes_sense_only_where_nothing_is_killed_for_it() -> None:
    assert to_wait_s(0, "timeout", zero_allowed=True) == 0
    with pytest.raises(InvalidRequestError, match="must be above 0"):
        to_wait_s(0, "timeout_s")
    with pytest.raises(InvalidRequestError, match="must be above 0"):
        ControlClient("http://localhost:1", timeout_s=0)


@pytest.mark.parametrize("url", ["127.0.0.1:18000", "http://127.0.0.1:abc", "http://", "ftp://localhost", "http://[::"])
def test_a_mistyped_url_is_refused_before_it_can_cost_an_engine(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL such as http://localhost:8000"):
        ControlClient(url)


def test_a_host_that_nobody_knows_was_sent_nothing() -> None:
    with pytest.raises(ControlCallError, match=r"POST /sleep was not sent: http://no-such-host\.invalid:8000"):
        ControlClient("http://no-such-host.invalid:8000", timeout_s=60).sleep()

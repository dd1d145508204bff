"""PURE. How long a caller is willing to wait, looked at before anything is sent.

A timeout that turns out to be none only after the call was sent leaves a worker at a call that nobody waits for.
"""

from __future__ import annotations

from checkpoint_executor.errors import InvalidRequestError

__all__ = ["to_wait_s"]

#: A year. The system cannot count some three hundred of them, and nobody waits so long.
_FOR_EVER_S = 365 * 86400.0


def to_wait_s(given: object, name: str, *, zero_allowed: bool = False) -> float | None:
    """Seconds to wait; None for as long as it takes, which is what infinity means too.

    Args:
        given: None or a number of seconds. name: what the caller calls it. zero_allowed: whether not to wait at all
            makes sense.

    Raises:
        InvalidRequestError: it is no such number; nothing was sent.
    """
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given != given:
        raise InvalidRequestError(f"{name} must be a number of seconds, not {given!r}. Nothing was sent")
    if given < 0 or (given == 0 and not zero_allowed):
        raise InvalidRequestError(
            f"{name} must {'not be negative' if zero_allowed else 'be above 0'}, not {given!r}. Nothing was sent"
        )
    return float(given) if given < _FOR_EVER_S else None

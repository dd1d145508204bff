"""Whether something grows: a straight line through a series, its standard error, and a bound on its slope.

Pure arithmetic; knows nothing of what is measured. The line is fitted by least squares. The textbook's standard error
takes the points as independent, which memory is not: it grows by a step and stays there. So the error is widened by how
much a point resembles the one before it, ``sqrt((1 + r) / (1 - r))``, where r is the lag-1 autocorrelation of what the
line leaves over. One large step can still look like a slope that is certain, which is why a slope must also be beyond a
bound before it counts. Growth that goes on stays as certain as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["MIN_POINTS", "SIGMAS", "Bound", "Fit", "Verdict", "fit", "judge", "warm_up"]

#: A slope counts only if it is so many standard errors from zero.
SIGMAS = 3.0

#: With fewer points after the warm-up nothing is judged.
MIN_POINTS = 20

#: The warm-up: so many iterations, or a tenth of a longer run, but never more than a quarter. Caches and the host's
#: allocator come close to what they need by then (seen on the software device).
WARM_UP_ITERATIONS = 50

#: A run cannot tell how much two points resemble each other better than this.
_MAX_RESEMBLANCE = 0.99


class Bound(NamedTuple):
    """How much a series may change in 100 iterations.

    ``both_ways``: a fall counts as much as growth. ``exact``: nothing may change at all, not even once.
    """

    per_100: float
    unit: str
    both_ways: bool = False
    exact: bool = False


class Fit(NamedTuple):
    """A slope and its standard error, in units for each step of the series."""

    slope: float
    standard_error: float


class Verdict(NamedTuple):
    """What became of a series; as it is written, all but ``judged`` in the units of the bound."""

    per_100: float
    standard_error: float
    unit: str
    bound: float
    judged: bool
    ok: bool


def warm_up(iterations: int) -> int:
    """How many iterations at the beginning of a run are left out."""
    return min(max(WARM_UP_ITERATIONS, iterations // 10), iterations // 4)


def fit(values: Sequence[float]) -> Fit:
    """The least-squares line through values at steps 0, 1, 2 and on, and the error of its slope, widened as said above.

    Raises:
        ValueError: fewer than three values, so that there is no error to speak of.
    """
    count = len(values)
    if count < 3:
        raise ValueError(f"a line with an error needs three points, not {count}")
    # From the first value on, so that a constant series of large numbers comes out as exactly zero.
    heights = [value - values[0] for value in values]
    middle, mean = (count - 1) / 2, math.fsum(heights) / count
    spread = math.fsum((step - middle) ** 2 for step in range(count))
    slope = math.fsum((step - middle) * (height - mean) for step, height in enumerate(heights)) / spread
    left = [height - mean - slope * (step - middle) for step, height in enumerate(heights)]
    rest = math.fsum(each**2 for each in left)
    return Fit(slope, math.sqrt(rest / (count - 2) / spread) * _widening(left, rest))


def _widening(left: Sequence[float], rest: float) -> float:
    """By how much points that resemble the ones before them widen the error; what alternates does not narrow it."""
    if rest == 0.0:
        return 1.0
    resemblance = math.fsum(before * after for before, after in pairwise(left)) / rest
    resemblance = min(max(resemblance, 0.0), _MAX_RESEMBLANCE)
    return math.sqrt((1 + resemblance) / (1 - resemblance))


def judge(values: Sequence[float], bound: Bound) -> Verdict:
    """Whether a series (after its warm-up) drifts: beyond the bound, and not by chance.

    One that is exact is not asked for chance.
    """
    found = fit(values) if len(values) >= 3 else Fit(0.0, 0.0)
    per_100, error = 100 * found.slope, 100 * found.standard_error
    judged = bound.exact or len(values) >= MIN_POINTS
    size = abs(per_100) if bound.both_ways else per_100
    drifts = len(set(values)) > 1 if bound.exact else judged and size > bound.per_100 and size > SIGMAS * error
    return Verdict(per_100, error, bound.unit, bound.per_100, judged, not drifts)

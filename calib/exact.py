"""Tests and bounds that hold at every sample size: counts in, p-values and limits out.

Leaves to others: what is counted (`calib.risk`), the bootstrap (`calib.intervals`), verdicts (`calib.certify`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

from calib.errors import CalibError

__all__ = [
    "binomial_test_at_most",
    "bounded_interval",
    "bounded_needed",
    "bounded_test_at_most",
    "clopper_pearson",
    "critical_count",
    "holm",
    "mcnemar",
    "percentile_interval",
    "percentile_ranks",
    "questions_needed",
]

Floats = NDArray[np.float64]

_MOST_QUESTIONS = 10**7
"""A rate so close to its limit that more than this would be needed counts as never."""


def clopper_pearson(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval of a rate, 0 to 1, from k events among n independent questions.

    References
    ----------
    Clopper, Pearson (1934), The use of confidence or fiducial limits illustrated in the case of the binomial.
    """
    _check_count(k, n)
    tail = (1 - level) / 2
    low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, tail))
    high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1 - tail))
    return low, high


def binomial_test_at_most(k: int, n: int, share: float) -> float:
    """Exact one-sided p-value of the hypothesis that the true rate is ``share`` or more.

    Small when k events among n are too few for that: at or below alpha it certifies a rate below ``share``, which is
    the same as a one-sided Clopper-Pearson bound at or below it. 1 without questions.
    """
    _check_count(k, n)
    if share <= 0 or n == 0:
        return 1.0
    return float(special.bdtr(k, n, min(share, 1.0)))


def critical_count(n: int, share: float, alpha: float) -> int:
    """Most events among n with which `binomial_test_at_most` passes at alpha; -1 when none is few enough."""
    if n == 0 or share <= 0:
        return -1
    k = int(stats.binom.ppf(alpha, n, min(share, 1.0)))  # smallest count whose probability reaches alpha
    while k >= 0 and binomial_test_at_most(k, n, share) > alpha:
        k -= 1
    return k


def questions_needed(k: int, n: int, share: float, alpha: float) -> int | None:
    """Number of questions from which on the binomial test passes for good, at the observed rate k / n.

    Counts grow in proportion and are rounded to the nearest, halves up. Because counts are whole, the test can pass at
    some number of questions and fail again at the next: the answer is the smallest number after which it never fails
    again, never the first lucky one.

    Returns
    -------
    int or None
        None for never: the observed rate is at the limit or above, or within a hair of it.
    """
    _check_count(k, n)
    if n == 0 or share <= 0 or k >= share * n:
        return None
    if share >= 1:
        return 1
    rate = k / n

    def surely_passes(m: int) -> bool:
        # Smooth in m and one event above the rate, so that no rounding can fail beyond it.
        events = rate * m + 1
        return m > events and bool(special.betainc(m - events, events + 1, 1 - share) <= alpha)

    high = 2
    while not surely_passes(high):
        high *= 2
        if high > _MOST_QUESTIONS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if surely_passes(middle) else (middle, high)
    while high > 0:
        m = np.arange(max(1, high - 1023), high + 1)
        fails = np.flatnonzero(special.bdtr((2 * k * m + n) // (2 * n), m, share) > alpha)
        if fails.size:
            return int(m[fails[-1]]) + 1
        high = int(m[0]) - 1
    return 1


def bounded_test_at_most(total: float, capacity: ArrayLike, share: float) -> float:
    """Conservative p-value of the hypothesis that the expected total is ``share`` of the capacity or more.

    Parameters
    ----------
    total : float
        Sum over independent blocks (groups of questions) of a loss.
    capacity : array_like of shape (G,)
        Largest possible loss of each block (its weight); the smallest is 0. Taken as given, not as random.
    share : float

    Returns
    -------
    float
        The smallest of three bounds on the probability of so small a total: Hoeffding's in the Kullback-Leibler form
        and Bentkus', both after scaling to the largest capacity, and Hoeffding's with unequal capacities. Each is
        increasing in the total, so their minimum is valid as well. The blocks need not be alike.

    References
    ----------
    Hoeffding (1963), Probability inequalities for sums of bounded random variables.
    Bentkus (2004), On Hoeffding's inequalities.
    """
    c = np.asarray(capacity, dtype=np.float64)
    if share <= 0 or not c.size:
        return 1.0
    if share > 1:
        return 0.0
    scaled, expected = total / c.max(), share * c.sum() / c.max()
    # A sum of weights that rounding left just above a whole number must not count as the next one.
    count = math.ceil(scaled - 1e-9 * max(1.0, scaled))
    bentkus = math.e * float(special.bdtr(min(count, c.size), c.size, min(expected / c.size, 1.0)))
    return min(1.0, bentkus, math.exp(_hoeffding_exponent(total, c, share)))


def _hoeffding_exponent(total: float, c: Floats, share: float) -> float:
    """Logarithm of the smaller Hoeffding bound; it grows in proportion to the number of blocks."""
    gap = share * c.sum() - total
    if gap <= 0:
        return 0.0
    whole = c.size * float(c.max())
    seen, expected = min(total / whole, 1.0), min(share * float(c.sum()) / whole, 1.0)
    divergence = float(special.rel_entr(seen, expected) + special.rel_entr(1 - seen, 1 - expected))
    return -max(c.size * divergence, float(2 * gap * gap / (c * c).sum()))


def bounded_needed(total: float, capacity: ArrayLike, share: float, alpha: float) -> float | None:
    """How many times as many blocks of the same kind would pass `bounded_test_at_most`; None for never.

    Counted with Hoeffding's bounds alone, which are powers in the number of blocks: enough, perhaps not least.
    """
    exponent = _hoeffding_exponent(total, np.asarray(capacity, dtype=np.float64), share)
    if share <= 0 or exponent > math.log(alpha) / _MOST_QUESTIONS:
        return None
    return float(math.log(alpha) / exponent)


def bounded_interval(total: float, capacity: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Conservative two-sided interval of the expected share of the capacity, 0 to 1, by inverting the test."""
    c = np.asarray(capacity, dtype=np.float64)
    tail = (1 - level) / 2

    def upper(part: float) -> float:
        def over(share: float) -> float:
            return bounded_test_at_most(part, c, share) - tail

        seen = part / c.sum()
        return 1.0 if seen >= 1 or over(1.0) > 0 else float(optimize.brentq(over, seen, 1.0, xtol=1e-9))

    return 1 - upper(float(c.sum()) - total), upper(total)


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value that changes for the better and for the worse are equally likely."""
    return min(1.0, 2 * float(special.bdtr(min(gained, lost), gained + lost, 0.5)))


def holm(p_values: ArrayLike) -> Floats:
    """P-values adjusted for their number, so that comparing each with alpha keeps the chance of one false alarm.

    References
    ----------
    Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return adjusted


def percentile_ranks(n: int, q: float, level: float = 0.95) -> tuple[int, int]:
    """Ranks (from 1) of the sorted values between which the true percentile lies with at least this level.

    0 and n + 1 say that no value of n is low or high enough.
    """
    tail = (1 - level) / 2
    low, high = stats.binom.ppf([tail, 1 - tail], n, q / 100)
    return int(low), int(high) + 1


def percentile_interval(values: ArrayLike, q: float, level: float = 0.95) -> tuple[float, float]:
    """Interval of a percentile by order statistics: exact for independent values of any distribution.

    Parameters
    ----------
    values : array_like of shape (N,)
    q : float
        Percentage, above 0 and below 100.
    level : float, default 0.95

    Returns
    -------
    tuple of float
        Infinite where there are too few values to bound that side; NaN when a value is NaN or none is given.
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    if not x.size or math.isnan(x[-1]):
        return math.nan, math.nan
    low, high = percentile_ranks(x.size, q, level)
    return (float(x[low - 1]) if low >= 1 else -math.inf), (float(x[high - 1]) if high <= x.size else math.inf)


def _check_count(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise CalibError(f"a count must be from 0 to the number of questions, got {k} of {n}")

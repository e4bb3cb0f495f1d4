"""Evidence that may be looked at after every request: betting e-processes and confidence sequences for shares.

A test of a fixed size is spent when it has been looked at; traffic is looked at for ever. Here a bettor who starts with
1 bets against "the mean is at most q" at odds that are fair there: by Ville's inequality the chance that he ever holds
1 / alpha is at most alpha while it is true, however often one looks, with no independence beyond "given all that came
before, the mean is at most q". Pure: leaves what is counted to `calib.watch`.

References
----------
Shafer (2021), Testing by betting. Waudby-Smith, Ramdas (2024), Estimating means of bounded random variables by betting.
Shin, Ramdas, Rinaldo (2024), E-detectors. Robbins (1970), Statistical methods related to the law of the iterated
logarithm.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from calib import exact
from calib.errors import CalibError

__all__ = ["Bets", "confidence_sequence", "reference_interval", "start_weights"]

Floats = NDArray[np.float64]

SHIFTS = (0.2, 0.4, 0.8, 1.4, 2.2)
"""Log odds above q that the bets aim at, from 10 % against 12 % up to 10 % against 50 %."""

_LEAST = 1e-6  # a mean of exactly 0 cannot be bet against at finite odds
_FAR = 0.05  # what the boldest bet aims at, at least: where nothing is allowed, a few events must do


def start_weights(first: int, count: int) -> tuple[Floats, Floats]:
    """Stake kept for a change that begins at each request, and what is left for later ones.

    1 / log2(j + 1) - 1 / log2(j + 2) for request j = 1, 2, ...: they sum to 1, more than a third is for a difference
    from the very first request on, and a change after a million requests costs only 20 nats of evidence.

    Parameters
    ----------
    first : int
        Requests seen before.
    count : int

    Returns
    -------
    tuple of ndarray of shape (count,)
    """
    left = 1 / np.log2(np.arange(first, first + count + 1) + 2.0)
    return left[:-1] - left[1:], left[1:]


class Bets:
    """Wealth of bettors against "the mean of stream s is at most q[s], given all that came before".

    Each stream has one bettor for each of `SHIFTS` and each request at which a change may have begun; all their stakes
    sum to 1. So a change is found soon after it happens, not only after what spoke against it before is used up.

    Parameters
    ----------
    q : array_like of shape (S,)
        Largest mean without a change, 0 to 1; a stream with q = 1 cannot be bet against and keeps its 1.

    Attributes
    ----------
    n : int
        Values seen in each stream.
    log_wealth : ndarray of shape (S,)
        Natural logarithm of the wealth now.
    """

    def __init__(self, q: ArrayLike) -> None:
        self.q = np.clip(np.asarray(q, dtype=np.float64), _LEAST, 1.0)
        if self.q.ndim != 1 or not self.q.size or np.isnan(self.q).any():
            raise CalibError(f"largest means must be one list of numbers from 0 to 1, got {q!r}")
        aimed = special.expit(special.logit(self.q)[:, None] + np.array(SHIFTS))
        aimed[:, -1] = np.maximum(aimed[:, -1], _FAR)
        # Best bet for a share of p: the likelihood ratio of p to q. Where q = 1 the aim is 1 as well: a factor of 1.
        self._won = np.log(aimed / self.q[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = np.log((1 - aimed) / (1 - self.q[:, None]))
        self._lost = np.where(self.q[:, None] < 1, lost, 0.0)
        self.n = 0
        self.log_wealth = np.zeros(self.q.size)
        self._total = np.zeros(self._won.shape)  # log of the product of all factors so far
        self._begun = np.full(self._won.shape, -np.inf)  # log of the stakes so far, each over the product at its start
        self._sum = np.zeros(self.q.size)
        # the most credible start: its stake over the product there, values seen before it and their sum
        self._best = np.full(self._won.shape, -np.inf)
        self._start = np.zeros(self._won.shape, dtype=np.int64)
        self._sum_at_start = np.zeros(self._won.shape)

    def update(self, values: ArrayLike) -> Floats:
        """Take values and return the log wealth after each, shape (T, S).

        Parameters
        ----------
        values : array_like of shape (T, S)
            0 to 1. Between the two the bet is the mean of both outcomes' factors, as fair as at the ends.
        """
        x = np.asarray(values, dtype=np.float64).reshape(-1, self.q.size)
        if not len(x):
            return np.empty((0, self.q.size))
        if not ((x >= 0) & (x <= 1)).all():
            raise CalibError("a bet is settled by values from 0 to 1")
        whole = ((x == 0) | (x == 1)).all()
        factor = np.where(x[..., None] > 0, self._won, self._lost)
        if not whole:
            factor = np.log(x[..., None] * np.exp(self._won) + (1 - x[..., None]) * np.exp(self._lost))
        total = self._total + np.cumsum(factor, axis=0)
        before = np.concatenate([self._total[None], total[:-1]])
        stake, left = start_weights(self.n, len(x))
        opened = np.log(stake)[:, None, None] - before
        begun = np.logaddexp.accumulate(np.concatenate([self._begun[None], opened]), axis=0)[1:]
        sums = self._sum + np.concatenate([np.zeros((1, self.q.size)), np.cumsum(x, axis=0)])
        self._keep_best(opened, sums)
        self._total, self._begun, self._sum, self.n = total[-1], begun[-1], sums[-1], self.n + len(x)
        wealth = np.logaddexp(total + begun, np.log(left)[:, None, None])
        wealth = special.logsumexp(wealth, axis=-1) - math.log(len(SHIFTS))
        self.log_wealth = wealth[-1]
        return np.asarray(wealth)

    def _keep_best(self, opened: Floats, sums: Floats) -> None:
        at = opened.argmax(axis=0)
        best = np.take_along_axis(opened, at[None], 0)[0]
        better = best > self._best
        self._best = np.where(better, best, self._best)
        self._start = np.where(better, self.n + at, self._start)
        self._sum_at_start = np.where(better, sums[at, np.arange(self.q.size)[:, None]], self._sum_at_start)

    def began(self, stream: int) -> tuple[int, float]:
        """Values of the stream before the one at which a change most credibly began, and their mean from there on."""
        richest = int((self._total + self._begun)[stream].argmax())
        start = int(self._start[stream, richest])
        rest = self.n - start
        return start, float(self._sum[stream] - self._sum_at_start[stream, richest]) / rest if rest else math.nan


def confidence_sequence(k: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of a share from k events among n, that holds at every n at once: one may look after each request.

    The shares that a bettor with Jeffreys' mixture of alternatives has not yet ruled out at 1 / (1 - level).

    Parameters
    ----------
    k : float
        Events, or a sum of values from 0 to 1 (then it is conservative).
    n : int
    level : float, default 0.95
    """
    if not 0 <= k <= n:
        raise CalibError(f"a count must be from 0 to the number of requests, got {k} of {n}")
    if n == 0:
        return 0.0, 1.0
    mixture = float(special.betaln(k + 0.5, n - k + 0.5) - special.betaln(0.5, 0.5))

    def over(p: float) -> float:
        return mixture - float(special.xlogy(k, p) + special.xlog1py(n - k, -p)) + math.log1p(-level)

    share = k / n
    tiny = 1e-12
    low = 0.0 if share <= tiny or over(tiny) < 0 else float(optimize.brentq(over, tiny, share, xtol=1e-12))
    high = 1.0 if share >= 1 - tiny or over(1 - tiny) < 0 else float(optimize.brentq(over, share, 1 - tiny, xtol=1e-12))
    return low, high


def reference_interval(share: float, n: float, alpha: float) -> tuple[float, float]:
    """Clopper-Pearson interval at level 1 - alpha of a share that was estimated from n questions.

    Parameters
    ----------
    share : float
    n : float
        Questions, or their effective number where they differ in weight or come in groups: the interval is then an
        approximation, since the count share * n need not be whole.
    alpha : float
    """
    k = share * n
    if n >= 1 and abs(n - round(n)) < 1e-9 and abs(k - round(k)) < 1e-6:
        return exact.clopper_pearson(round(k), round(n), 1 - alpha)
    if n <= 0:
        return 0.0, 1.0
    low = 0.0 if k <= 0 else float(special.betaincinv(k, n - k + 1, alpha / 2))
    high = 1.0 if k >= n else float(special.betaincinv(k + 1, n - k, 1 - alpha / 2))
    return low, high

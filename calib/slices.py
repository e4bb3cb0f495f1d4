"""What `calib.curves` is made of: the questions of one dataset in order of confidence, bands, thinning, a memory."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from scipy import special

from calib import exact
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, NEVER, candidate_thresholds
from calib.table import PERCENTILES

__all__ = ["Recent", "Slice", "needed_weight", "share_band", "slices", "thin"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")


class Recent:
    """The last few results by key; several threads may ask."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is known under the key, else what is made now."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return cast(T, self._known[key])
        made = make()  # outside the lock: two threads may compute the same, none waits for another's work
        with self._lock:
            self._known[key] = made
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        return made


@dataclass(frozen=True, eq=False)
class Slice:
    """The questions of one dataset, or all: positions and weights, no copies of the answers.

    Attributes
    ----------
    dataset : str or None
    members : ndarray of int, shape (n,)
        Positions in the outcomes.
    order : ndarray of int
        Places among the members that can think, least confident first.
    stops : ndarray of int
        How many of `order` think in the rows 1, 2, ...
    thresholds, starts, ends : ndarray of shape (K,)
        One threshold for each row; every threshold above its start and up to its end means that row.
    units, weight : ndarray of shape (n,)
        Weights as whole numbers, and as given.
    effective : float
        Independent questions of equal weight that would be worth as much: (sum of weights)^2 / sum over groups of
        (weight of the group)^2, Kish's number with each group taken as one question. n without weights and groups.
    """

    dataset: str | None
    members: Ints
    order: Ints
    stops: Ints
    thresholds: Floats
    starts: Floats
    ends: Floats
    units: Ints
    weight: Floats
    effective: float
    level: float
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", int(self.units.sum()))

    @property
    def n(self) -> int:
        """Number of questions."""
        return len(self.members)

    @property
    def weights(self) -> Floats | None:
        """Weights as `calib.metrics` takes them."""
        return None if (self.weight == self.weight[0]).all() else self.weight

    def rows(self, thinking: NDArray[Any]) -> NDArray[Any]:
        """Sum over the questions that think, for every row, of a value per member."""
        return np.concatenate([[0], np.cumsum(thinking[self.order])[self.stops - 1]])

    @cached_property
    def ranks(self) -> dict[str, tuple[float, float]]:
        """Shares between whose order statistics each percentile lies; 0 and infinity where none does."""
        m = max(int(self.effective), 1)
        return {name: _rank_shares(m, q, self.level) for name, q in PERCENTILES.items()}


def slices(outcomes: Outcomes, confidence: Floats, units: Ints, level: float) -> dict[str | None, Slice]:
    """All questions together (None) and those of each dataset.

    Parameters
    ----------
    outcomes : Outcomes
    confidence : ndarray of shape (N,)
        What the threshold is compared with.
    units : ndarray of int, shape (N,)
        Weights as whole numbers.
    level : float
        Of the bands.
    """
    codes = outcomes.dataset_codes
    turn = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[turn], np.arange(len(outcomes.dataset_names) + 1))
    found: dict[str | None, Slice] = {None: _slice(None, np.arange(outcomes.n), outcomes, confidence, units, level)}
    for k, name in enumerate(outcomes.dataset_names):
        found[name] = _slice(name, turn[ends[k] : ends[k + 1]], outcomes, confidence, units, level)
    return found


def _slice(
    dataset: str | None, members: Ints, outcomes: Outcomes, confidence: Floats, units: Ints, level: float
) -> Slice:
    c = confidence[members]
    thinkers = np.flatnonzero(outcomes.can_think[members])
    order = thinkers[np.argsort(c[thinkers], kind="stable")]
    ordered = c[order]
    last = np.append(ordered[1:] != ordered[:-1], True)[: ordered.size]
    starts, ends = np.concatenate([[NEVER], ordered[last]]), np.concatenate([ordered[last], [ALWAYS]])
    thresholds = candidate_thresholds(ordered[last]) if ordered.size else starts
    weight = outcomes.weight[members]
    weight.setflags(write=False)
    by_group = np.bincount(outcomes.group_codes[members], weight)
    effective = float(weight.sum() ** 2 / (by_group**2).sum())
    if math.isclose(effective, len(members), rel_tol=1e-9):
        effective = float(len(members))
    stops = np.flatnonzero(last) + 1
    return Slice(dataset, members, order, stops, thresholds, starts, ends, units[members], weight, effective, level)


def _rank_shares(m: int, q: float, level: float) -> tuple[float, float]:
    low, high = exact.percentile_ranks(m, q, level)
    return low / m, (high / m if high <= m else math.inf)


def needed_weight(share: float, total: int) -> int:
    """Cumulative whole-number weight that a percentile must reach, as `calib.metrics.percentiles` rounds it."""
    return int(min(max(math.ceil(min(share, 1.0) * total * (1 - 1e-12)), 1), total))


def share_band(share: Floats, n: float | Floats, level: float) -> tuple[Floats, Floats]:
    """Clopper and Pearson's interval of many shares at once; n may be an effective number and no whole one.

    Parameters
    ----------
    share : ndarray of shape (K,)
        0 to 1.
    n : float or ndarray of shape (K,)
        Questions, at least 1.
    level : float

    Returns
    -------
    low, high : ndarray of shape (K,)
    """
    k = np.clip(share, 0, 1) * n
    k = np.where(np.abs(k - np.rint(k)) < 1e-9 * np.maximum(k, 1), np.rint(k), k)  # a count is whole
    tail = (1 - level) / 2
    missed = n - k
    low = np.where(k > 0, special.betaincinv(np.maximum(k, 1e-300), missed + 1, tail), 0.0)
    high = np.where(missed > 0, special.betaincinv(k + 1, np.maximum(missed, 1e-300), 1 - tail), 1.0)
    return low, high


def thin(x: Floats, *columns: Floats, points: int) -> Ints:
    """Positions to draw, ascending: about this many at most, with all that the eye could see of the whole line.

    Both ends, and the first, lowest and highest of every column in each stretch. Half of the stretches are equally
    wide in x, half hold equally many points, so that a dense end hides nothing elsewhere.

    Parameters
    ----------
    x : ndarray of shape (K,)
        Ascending, finite.
    *columns : ndarray of shape (K,)
        NaN counts as the lowest.
    points : int
    """
    n = len(x)
    if n <= max(points, 2):
        return np.arange(n)
    stretches = max(points // (1 + 2 * len(columns)) // 2, 1)
    wide = np.searchsorted(x, np.linspace(x[0], x[-1], stretches, endpoint=False))
    starts = np.unique(np.concatenate([[0], wide, np.linspace(0, n, stretches, endpoint=False).astype(np.int64)]))
    starts = starts[starts < n]
    stretch = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, n)))
    kept = [starts, np.array([n - 1])]
    for column in columns:
        turn = np.lexsort((np.nan_to_num(column, nan=-np.inf), stretch))  # within each stretch by value
        kept += [turn[starts], turn[np.append(starts[1:], n) - 1]]
    return np.unique(np.concatenate(kept))

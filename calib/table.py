"""`Table`: every metric at every threshold, budget and arm, with the best mix of each: what the optimum is read from.

Owns the rows: a `Part` is one set of questions with one row for each threshold that makes a difference to it. Leaves
the loops to `calib.sweep` and the choice among the rows to `calib.optimise`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib import metrics, sweep
from calib import policy as rule
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import CONFIDENCES, LATENCY_METRICS, NEVER, POOLS, candidate_thresholds, pooled

__all__ = ["PERCENTILES", "Part", "Scores", "Table", "tabulate"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_KEEPS: dict[str, Any] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_UNITS = 2.0**61
"""Total of the whole-number weights where the given ones are no multiples of the smallest."""
_CHUNK = 2_000_000
"""Most entries of one array of scores on a grid of mixes, so that memory stays bounded."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Metrics that depend on the mix, for every row at one budget.

    Attributes
    ----------
    accuracy : ndarray of shape (K,)
    ece, brier, nll, macro_f1 : ndarray of shape (K,), or None where they were not asked for
    """

    accuracy: Floats
    ece: Floats | None = None
    brier: Floats | None = None
    nll: Floats | None = None
    macro_f1: Floats | None = None


class Part:
    """Metrics of one set of questions for every threshold that makes a difference to it.

    Row 0 thinks about nothing, row r about the questions of the r lowest confidences. Equal confidences stay
    together, and questions that cannot think never do. Arms and budgets are given by their position in the outcomes;
    what was computed once is kept.

    Attributes
    ----------
    thresholds : ndarray of shape (K,)
        Ascending, from 0 (never think) to 1.1 (always).
    order, stops : ndarray of int
        Questions that can think, least confident first; how many of them think in the rows 1, 2, ...
    units : ndarray of int, shape (N,)
        Weights as whole numbers, so that sums are exact and do not depend on their order.
    """

    def __init__(self, outcomes: Outcomes, confidence: str = "max", pool: str = "linear") -> None:
        self.outcomes, self.pool = outcomes, pool
        c = rule.confidence(outcomes.p1, confidence, outcomes.n_options)
        thinkers = np.flatnonzero(outcomes.can_think)
        self.order: Ints = thinkers[np.argsort(c[thinkers])]
        ordered = c[self.order]
        last = np.append(ordered[1:] != ordered[:-1], True)[: ordered.size]
        self.stops: Ints = np.flatnonzero(last) + 1
        self._levels: Floats = ordered[last]
        self.thresholds: Floats = candidate_thresholds(self._levels) if ordered.size else np.array([NEVER])
        self.units: Ints = np.ones(outcomes.n, np.int64) if outcomes.unweighted else _units(outcomes.weight)
        self._total = int(self.units.sum())
        self._weight = _readonly(np.ones(outcomes.n) if outcomes.unweighted else outcomes.weight)
        self._right1 = np.asarray(metrics.chosen(outcomes.p1) == outcomes.answer)
        self._p1, self._p2 = _readonly(outcomes.p1), _readonly(outcomes.p2)
        self._best: dict[int, tuple[Floats, Floats]] = {}
        self._latency: dict[tuple[int, int], dict[str, Floats]] = {}
        self._by_alone: dict[int, Ints] = {}
        self._tokens: dict[int, Floats] = {}

    def rows_at(self, thresholds: Floats) -> Ints:
        """The row that each threshold means here."""
        return np.searchsorted(self._levels, thresholds, side="left")

    @cached_property
    def chance(self) -> float:
        """Accuracy of a blind guess, as `calib.metrics.skill` takes it."""
        return metrics.mean(
            1 / self.outcomes.n_options.astype(np.float64), None if self.outcomes.unweighted else self.outcomes.weight
        )

    def exact(self, metric: str) -> bool:
        """Whether the values equal those of `evaluate` to the last bit; the others may differ by rounding."""
        if metric == "tokens":
            return self.outcomes.unweighted and bool((self.outcomes.tokens % 1 == 0).all())
        return self.outcomes.unweighted and metric in ("accuracy", "skill", "think_rate", *PERCENTILES)

    @cached_property
    def think_rate(self) -> Floats:
        """Share that thinks, 0 to 1, shape (K,)."""
        return np.asarray(self._thinking_sum(self.units) / self._total)

    def tokens(self, b: int) -> Floats:
        """Mean thinking tokens, shape (K,)."""
        if b not in self._tokens:
            used = self._thinking_sum(self._weight * self.outcomes.tokens[:, b])
            self._tokens[b] = np.asarray(used / self._weight.sum())
        return self._tokens[b]

    def _thinking_sum(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([[0], np.cumsum(values[self.order])[self.stops - 1]])

    def latency(self, a: int, b: int) -> Mapping[str, Floats]:
        """Mean and percentiles of the latency by name, seconds, shape (K,) each; NaN where an unknown one enters."""
        if (a, b) not in self._latency:
            self._latency[a, b] = self._latency_rows(a, b)
        return self._latency[a, b]

    def _latency_rows(self, a: int, b: int) -> dict[str, Floats]:
        o, order = self.outcomes, self.order
        alone = o.t1[a]
        if np.isnan(alone).any():
            return dict.fromkeys(LATENCY_METRICS, np.full(len(self.thresholds), np.nan))
        thought = alone + np.where(o.can_think, o.t2[a, :, b], 0.0)
        unknown = np.flatnonzero(np.isnan(thought[order]))
        thought[np.isnan(thought)] = np.inf
        if a not in self._by_alone:
            self._by_alone[a] = np.argsort(alone)
        share = np.array(list(PERCENTILES.values())) / 100
        need = np.ceil(share * self._total * (1 - 1e-12)).astype(np.int64)
        by_thought = order[np.argsort(thought[order])]
        rows = sweep.latency_rows(
            _readonly(alone),
            thought,
            self._by_alone[a],
            by_thought,
            order,
            self.stops,
            self.units,
            self._weight,
            need,
        )
        if unknown.size:
            rows[:, np.searchsorted(self.stops, unknown[0], side="right") + 1 :] = np.nan
        return dict(zip(["mean", *PERCENTILES], rows, strict=True))

    def share_beyond(self, a: int, b: int, op: str, seconds: float) -> Floats:
        """Share of questions whose latency does not keep a limit, shape (K,); NaN where a latency is not known.

        Parameters
        ----------
        a, b : int
        op : {"<", "<=", ">", ">="}
        seconds : float
        """
        o = self.outcomes
        alone = o.t1[a]
        thought = alone + np.where(o.can_think, o.t2[a, :, b], 0.0)
        late_alone = self.units * ~_KEEPS[op](alone, seconds)
        late_thought = self.units * ~_KEEPS[op](thought, seconds)
        late = late_alone.sum() + self._thinking_sum(late_thought - late_alone)
        return np.where(np.isnan(self.latency(a, b)["mean"]), np.nan, late / self._total)

    def _questions(self, b: int) -> tuple[Floats, Floats, int, Ints, Ints]:
        o = self.outcomes
        return self._p1, self._p2, b, _readonly(o.answer), _readonly(o.n_options)

    def best(self, b: int) -> tuple[Floats, Floats]:
        """Largest accuracy over all mixes, and a mix that attains it, shape (K,) each; of the linear pool only."""
        if self.pool != "linear":
            raise ValueError("the optimum over all mixes is known for the linear pool only; use scores")
        if b not in self._best:
            questions = self._questions(b)
            kind, bounds, lows, highs, doubt = sweep.intervals(*questions, _readonly(self.outcomes.can_think))
            mixes, width = sweep.axis(lows, highs, doubt)
            right, at = sweep.best_mixes(
                *questions, self.units, self._right1, self.order, self.stops, kind, bounds, mixes, width
            )
            self._best[b] = right / self._total, mixes[at]
        return self._best[b]

    def widest(self, b: int, row: int) -> tuple[float, float, float]:
        """The widest interval of mixes with the largest accuracy of one row: its low end, a mix inside, its high end.

        The mix is the middle; where rounding at the middle loses a question, the middle of the widest piece.
        """
        which = self.order[: self.stops[row - 1]] if row else self.order[:0]
        thinks = np.zeros(self.outcomes.n, bool)
        thinks[which] = True
        questions = self._questions(b)
        kind, bounds, lows, highs, doubt = sweep.intervals(*questions, _readonly(thinks))
        mixes, width = sweep.axis(lows, highs, doubt, ends_too=True)

        def right(at: Floats) -> Ints:
            return np.asarray(sweep.right_units(*questions, self.units, which, kind, bounds, at))

        found = right(mixes)
        rounded = self.outcomes.n if self._total > 2**53 else 0  # what rounding of the weights may tell apart
        most = found.max() - rounded
        turns = np.flatnonzero(np.diff(np.concatenate([[False], found >= most, [False]])))
        first, last = turns[::2], turns[1::2] - 1
        # a piece whose end point loses a question reaches up to that point
        low = mixes[np.where(width[first] > 0, first - 1, first)]
        high = mixes[np.where(width[last] > 0, last + 1, last)]
        k = int(np.argmax(high - low))
        middle = low[k] + (high[k] - low[k]) / 2
        if right(np.array([middle]))[0] < most:
            inside = slice(first[k], last[k] + 1)
            middle = mixes[inside][np.argmax(width[inside])]
        return float(low[k]), float(middle), float(high[k])

    def scores(self, b: int, mixes: Floats, *, of_labels: bool) -> Iterator[Scores]:
        """Scores at each of the mixes in turn; macro F1 only where it is asked for."""
        if self.pool != "linear":
            yield from self._pooled_scores(b, mixes, of_labels=of_labels)
            return
        questions = (*self._questions(b), self.units)
        edges = np.linspace(0, 1, metrics.ECE_BINS + 1)
        step = max(1, _CHUNK // len(self.thresholds))
        for start in range(0, len(mixes), step):
            some = mixes[start : start + step].copy()
            right, ece, brier, nll = sweep.score_rows(*questions, self._weight, self.order, self.stops, some, edges)
            f1 = self._macro_f1(b, some) if of_labels else None
            for g in range(len(some)):
                yield Scores(right[g] / self._total, ece[g], brier[g], nll[g], None if f1 is None else f1[g])

    def _pooled_scores(self, b: int, mixes: Floats, *, of_labels: bool) -> Iterator[Scores]:
        """Scores under another pool: at each mix, what it makes of both systems stands in for System 2 alone."""
        o = self.outcomes
        for mix in mixes.tolist():
            after = pooled(o.p1, o.p2[:, b], mix, self.pool, o.n_options)
            stand_in = Part.__new__(Part)
            stand_in.__dict__.update(self.__dict__, pool="linear", _p2=_readonly(after[:, None]))
            yield from stand_in.scores(0, np.ones(1), of_labels=of_labels)

    def _macro_f1(self, b: int, mixes: Floats) -> Floats:
        """Macro F1 at each mix, shape (G, K); NaN where some question has no fixed label set."""
        sets, width = self.outcomes.label_set, self.outcomes.p1.shape[1]
        if (sets < 0).any():
            return np.full((len(mixes), len(self.thresholds)), np.nan)
        known, number = np.unique(sets, return_inverse=True)
        return np.asarray(
            sweep.label_scores(
                *self._questions(b), self.units, number * width, len(known) * width, self.order, self.stops, mixes
            )
        )


def _units(weight: Floats) -> Ints:
    multiple = weight / weight.min()
    whole = np.rint(multiple)
    if (np.abs(multiple - whole) <= 1e-12 * multiple).all() and whole.sum() < 2**53:
        return np.asarray(whole, dtype=np.int64)
    return np.asarray(np.maximum(np.rint(weight * (_UNITS / weight.sum())), 1), dtype=np.int64)


def _readonly(array: NDArray[Any]) -> NDArray[Any]:
    """Contiguous and read-only, so that each loop is compiled for one layout only."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view


@dataclass(frozen=True, eq=False)
class Table:
    """All policies that differ in what they decide: A arms, B budgets, K thresholds, each with its best mix.

    Attributes
    ----------
    outcomes : Outcomes
    arms : tuple of str, length A
    budgets : tuple of int, length B
    whole : Part
        All questions together.
    confidence, pool : str
        Definitions that the policies use.
    """

    outcomes: Outcomes
    arms: tuple[str, ...]
    budgets: tuple[int, ...]
    whole: Part
    confidence: str = "max"
    pool: str = "linear"
    _parts: dict[str, Part] = field(default_factory=dict, repr=False)
    _rows: dict[str, Ints] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Arms, budgets, thresholds."""
        return len(self.arms), len(self.budgets), len(self.thresholds)

    @property
    def thresholds(self) -> Floats:
        """Every threshold that makes a difference, ascending, shape (K,)."""
        return self.whole.thresholds

    @cached_property
    def accuracy(self) -> Floats:
        """Largest accuracy over all mixes, exactly, shape (B, K)."""
        return np.asarray([self.whole.best(self.outcomes.budget_index(b))[0] for b in self.budgets])

    @cached_property
    def mix(self) -> Floats:
        """A mix that attains it under the floating-point rule of `decide`, shape (B, K): the middle of a piece."""
        return np.array([self.whole.best(self.outcomes.budget_index(b))[1] for b in self.budgets])

    @cached_property
    def think_rate(self) -> Floats:
        """Share that thinks, shape (K,)."""
        return self.whole.think_rate

    @cached_property
    def tokens(self) -> Floats:
        """Mean thinking tokens over all questions, shape (B, K)."""
        return np.array([self.whole.tokens(self.outcomes.budget_index(b)) for b in self.budgets])

    def latency(self, metric: str) -> Floats:
        """Seconds, one of mean, p50, p90, p95, p99; NaN where unknown; shape (A, B, K)."""
        o = self.outcomes
        return np.array(
            [[self.whole.latency(o.arm_index(a), o.budget_index(b))[metric] for b in self.budgets] for a in self.arms]
        )

    def part(self, dataset: str | None) -> Part:
        """All questions, or those of one dataset."""
        if dataset is None:
            return self.whole
        if dataset not in self._parts:
            self._parts[dataset] = Part(self.outcomes.select([dataset]), self.confidence, self.pool)
        return self._parts[dataset]

    def spread(self, column: Floats, dataset: str | None) -> Floats:
        """A column of a `part` at every threshold of the table, shape (K,)."""
        if dataset is None:
            return column
        if dataset not in self._rows:
            self._rows[dataset] = self.part(dataset).rows_at(self.thresholds)
        return column[self._rows[dataset]]

    def only(self, arms: Sequence[str] | None = None, budgets: Sequence[int] | None = None) -> Table:
        """The same table for some of the arms and budgets; what was computed is shared."""
        return tabulate(
            self.outcomes, self.arms if arms is None else arms, self.budgets if budgets is None else budgets, like=self
        )


def tabulate(
    outcomes: Outcomes,
    arms: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    *,
    confidence: str = "max",
    pool: str = "linear",
    like: Table | None = None,
) -> Table:
    """The table of these outcomes; its columns are computed when they are first looked at, and kept.

    Parameters
    ----------
    outcomes : Outcomes
    arms, budgets : sequence, optional
        All that were collected when left out.
    confidence : str
        Definition of the confidence, one of `calib.policy.CONFIDENCES`.
    pool : str
        One of `calib.policy.POOLS`; the optimum over all mixes is known for the linear one, else on a grid of them.
    like : Table, optional
        A table of the same outcomes whose columns may be used again; it gives confidence and pool.

    Raises
    ------
    CalibError
        When an arm or a budget was not collected, or no thought at all; an unknown confidence or pool.
    """
    for name, value, known in (("confidence", confidence, CONFIDENCES), ("pool", pool, POOLS)):
        if value not in known:
            raise CalibError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    arms = outcomes.arms if arms is None else tuple(dict.fromkeys(arms))
    chosen = outcomes.budgets.tolist() if budgets is None else sorted({int(b) for b in budgets})
    if not chosen:
        raise CalibError("no thought was collected; run: calib collect QUESTIONS --budgets 8192")
    if not arms:
        raise CalibError(f"no arm was chosen; there are {', '.join(outcomes.arms)}")
    for arm in arms:
        outcomes.arm_index(arm)
    for budget in chosen:
        outcomes.budget_index(budget)
    if like is None:
        whole = Part(outcomes, confidence, pool)
        return Table(outcomes, tuple(arms), tuple(chosen), whole, confidence, pool)
    same = (like.whole, like.confidence, like.pool, like._parts, like._rows)
    return Table(outcomes, tuple(arms), tuple(chosen), *same)

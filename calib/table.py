"""`Table`: every metric at every threshold, budget and arm, with the best mix of each: what the optimum is read from.

Owns the rows: a `Part` is one set of questions with one row for each threshold that makes a difference to it. Leaves
the loops to `calib.sweep` and the choice among the rows to `calib.optimise`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calib import metrics, sweep
from calib import policy as rule
from calib.deadline import Cut, close_in_time
from calib.errors import CalibError
from calib.fitness import Repeats
from calib.outcomes import Outcomes
from calib.policy import CONFIDENCES, LATENCY_METRICS, NEVER, ON_DEADLINE, POOLS, candidate_thresholds, pooled

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


class Limit(NamedTuple):
    """A deadline: position of the arm whose seconds it is about, seconds, and whose answer stands then."""

    arm: int
    deadline: float
    on_deadline: str


class Part:
    """Metrics of one set of questions for every threshold that makes a difference to it.

    Row 0 thinks about nothing, row r about the questions of the r lowest confidences. Equal confidences stay
    together, and questions that cannot think never do. Arms and budgets are given by their position in the outcomes;
    what was computed once is kept.

    Under a deadline, which acts on the seconds of one arm, a question that System 1 answers in place of a closed
    thought is in the rows for its seconds and its tokens, and not for its answer.

    Attributes
    ----------
    thresholds : ndarray of shape (K,)
        Ascending, from 0 (never think) to 1.1 (always).
    order, stops : ndarray of int
        Questions that can think, least confident first; how many of them think in the rows 1, 2, ...
    units : ndarray of int, shape (N,)
        Weights as whole numbers, so that sums are exact and do not depend on their order.
    """

    def __init__(
        self, outcomes: Outcomes, confidence: str = "max", pool: str = "linear", limit: Limit | None = None
    ) -> None:
        self.outcomes, self.pool, self.limit = outcomes, pool, limit
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
        self._cut_at: tuple[int, Cut] | None = None

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
            return self.limit is None and self.outcomes.unweighted and bool((self.outcomes.tokens % 1 == 0).all())
        return self.outcomes.unweighted and metric in ("accuracy", "skill", "think_rate", *PERCENTILES)

    @cached_property
    def think_rate(self) -> Floats:
        """Share that thinks, 0 to 1, shape (K,)."""
        return np.asarray(self._thinking_sum(self.units) / self._total)

    def tokens(self, b: int) -> Floats:
        """Mean thinking tokens, shape (K,)."""
        if b not in self._tokens:
            tokens = self.outcomes.tokens[:, b] if self.limit is None else self._cut(b).tokens
            used = self._thinking_sum(self._weight * tokens)
            self._tokens[b] = np.asarray(used / self._weight.sum())
        return self._tokens[b]

    def _thinking_sum(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([[0], np.cumsum(values[self.order])[self.stops - 1]])

    def _cut(self, b: int) -> Cut:
        """What becomes of the thoughts at a budget; kept for the last one, since its columns are asked in turn."""
        assert self.limit is not None
        if self._cut_at is None or self._cut_at[0] != b:
            limit = self.limit
            self._cut_at = b, close_in_time(self.outcomes, limit.arm, b, limit.deadline, limit.on_deadline)
        return self._cut_at[1]

    def _thought(self, a: int, b: int) -> Floats:
        """Seconds of every question if all thought that can, shape (N,)."""
        o = self.outcomes
        if self.limit is None:
            return np.asarray(o.t1[a] + np.where(o.can_think, o.t2[a, :, b], 0.0))
        if a != self.limit.arm:
            raise ValueError(f"the deadline is about arm {self.limit.arm}, not {a}")
        return np.where(o.can_think, self._cut(b).latency, o.t1[a])

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
        thought = self._thought(a, b)
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
        alone, thought = o.t1[a], self._thought(a, b)
        late_alone = self.units * ~_KEEPS[op](alone, seconds)
        late_thought = self.units * ~_KEEPS[op](thought, seconds)
        late = late_alone.sum() + self._thinking_sum(late_thought - late_alone)
        return np.where(np.isnan(self.latency(a, b)["mean"]), np.nan, late / self._total)

    def _questions(self, b: int) -> tuple[Floats, Floats, int, Ints, Ints]:
        o = self.outcomes
        answers = _readonly(o.answer), _readonly(o.n_options)
        if self.limit is None:
            return self._p1, self._p2, b, *answers
        return self._p1, _readonly(self._read(b)[:, None]), 0, *answers

    def _read(self, b: int) -> Floats:
        """What is read of System 2 at a budget, shape (N, C)."""
        if self.limit is None:
            return self._p2[:, b]
        return self._p2[np.arange(self.outcomes.n), self._cut(b).budget]

    def _answered(self, b: int) -> tuple[Ints, Ints]:
        """`order` and `stops` of the questions whose thought counts for the answer."""
        if self.limit is None:
            return self.order, self.stops
        counts = ~self._cut(b).degraded[self.order]
        return self.order[counts], np.asarray(np.cumsum(counts, dtype=np.int64)[self.stops - 1])

    def best(self, b: int) -> tuple[Floats, Floats]:
        """Largest accuracy over all mixes, and a mix that attains it, shape (K,) each; of the linear pool only."""
        if self.pool != "linear":
            raise ValueError("the optimum over all mixes is known for the linear pool only; use scores")
        if b not in self._best:
            questions = self._questions(b)
            order, stops = self._answered(b)
            thinks = np.zeros(self.outcomes.n, bool)
            thinks[order] = True
            kind, bounds, lows, highs, doubt = sweep.intervals(*questions, _readonly(thinks))
            mixes, width = sweep.axis(lows, highs, doubt)
            right, at = sweep.best_mixes(*questions, self.units, self._right1, order, stops, kind, bounds, mixes, width)
            self._best[b] = right / self._total, mixes[at]
        return self._best[b]

    def widest(self, b: int, row: int) -> tuple[float, float, float]:
        """The widest interval of mixes with the largest accuracy of one row: its low end, a mix inside, its high end.

        The mix is the middle; where rounding at the middle loses a question, the middle of the widest piece.
        """
        order, stops = self._answered(b)
        which = order[: stops[row - 1]] if row else order[:0]
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
        questions, answered = (*self._questions(b), self.units), self._answered(b)
        edges = np.linspace(0, 1, metrics.ECE_BINS + 1)
        step = max(1, _CHUNK // len(self.thresholds))
        for start in range(0, len(mixes), step):
            some = mixes[start : start + step].copy()
            right, ece, brier, nll = sweep.score_rows(*questions, self._weight, *answered, some, edges)
            f1 = self._macro_f1(b, some) if of_labels else None
            for g in range(len(some)):
                yield Scores(right[g] / self._total, ece[g], brier[g], nll[g], None if f1 is None else f1[g])

    def _pooled_scores(self, b: int, mixes: Floats, *, of_labels: bool) -> Iterator[Scores]:
        """Scores under another pool: at each mix, what it makes of both systems stands in for System 2 alone."""
        o = self.outcomes
        for mix in mixes.tolist():
            after = pooled(o.p1, self._read(b), mix, self.pool, o.n_options)
            stand_in = Part.__new__(Part)
            order, stops = self._answered(b)
            own = {"pool": "linear", "limit": None, "order": order, "stops": stops, "_p2": _readonly(after[:, None])}
            stand_in.__dict__.update(self.__dict__, **own)
            yield from stand_in.scores(0, np.ones(1), of_labels=of_labels)

    def _macro_f1(self, b: int, mixes: Floats) -> Floats:
        """Macro F1 at each mix, shape (G, K); NaN where some question has no fixed label set."""
        sets, width = self.outcomes.label_set, self.outcomes.p1.shape[1]
        if (sets < 0).any():
            return np.full((len(mixes), len(self.thresholds)), np.nan)
        known, number = np.unique(sets, return_inverse=True)
        return np.asarray(
            sweep.label_scores(
                *self._questions(b), self.units, number * width, len(known) * width, *self._answered(b), mixes
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
    deadline, on_deadline
        Of the policies; with a deadline there is one arm.
    repeats : Repeats or None
        To what p1 repeats; gates that are finer meet no targets.
    """

    outcomes: Outcomes
    arms: tuple[str, ...]
    budgets: tuple[int, ...]
    whole: Part
    confidence: str = "max"
    pool: str = "linear"
    deadline: float | None = None
    on_deadline: str = "system2"
    repeats: Repeats | None = None
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
            some = self.outcomes.select([dataset])
            self._parts[dataset] = Part(some, self.confidence, self.pool, self.whole.limit)
        return self._parts[dataset]

    def spread(self, column: Floats, dataset: str | None) -> Floats:
        """A column of a `part` at every threshold of the table, shape (K,)."""
        if dataset is None:
            return column
        if dataset not in self._rows:
            self._rows[dataset] = self.part(dataset).rows_at(self.thresholds)
        return column[self._rows[dataset]]

    def refused(self, arm: str) -> NDArray[np.bool_]:
        """Thresholds whose gate is finer than what p1 of an arm repeats to, shape (K,)."""
        if self.repeats is None:
            return np.zeros(len(self.thresholds), dtype=bool)
        return self.repeats.noisy(self.thresholds, arm)

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
    deadline: float | None = None,
    on_deadline: str = "system2",
    repeats: Repeats | None = None,
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
    deadline : float, optional
        Seconds after which the policies close a thought. It is about one arm: which thoughts it closes depends on it.
    on_deadline : str
        One of `calib.policy.ON_DEADLINE`.
    repeats : Repeats, optional
        To what p1 repeats, of the plain confidence: gates that are finer are refused.
    like : Table, optional
        A table of the same outcomes whose columns may be used again; it gives confidence, pool, deadline and repeats.

    Raises
    ------
    CalibError
        When an arm or a budget was not collected, or no thought at all; an unknown confidence or pool; a deadline and
        several arms.
    """
    names = ("confidence", confidence, CONFIDENCES), ("pool", pool, POOLS), ("on_deadline", on_deadline, ON_DEADLINE)
    for name, value, known in names:
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
    if like is not None:
        return replace(like, arms=tuple(arms), budgets=tuple(chosen))
    limit = None
    if deadline is not None:
        if len(arms) > 1:
            raise CalibError(f"a deadline is tabulated for one arm at a time, not for {', '.join(arms)}")
        limit = Limit(outcomes.arm_index(arms[0]), deadline, on_deadline)
    whole = Part(outcomes, confidence, pool, limit)
    return Table(outcomes, tuple(arms), tuple(chosen), whole, confidence, pool, deadline, on_deadline, repeats)

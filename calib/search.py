"""The search through a `calib.table.Table`: which policies there are, which meet the targets, which one is best.

Owns the objective, the comparison of columns with limits, the ties, and when the optimum is known over all mixes and
when only on a grid of them. `calib.optimise` asks it and says what the answers mean.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import LATENCY_METRICS, Cost, Policy, evaluate
from calib.table import PERCENTILES, Part, Scores, Table, tabulate
from calib.target import HIGHER_IS_BETTER, METRICS, Target

__all__ = ["GRID", "Entries", "Entry", "Least", "Search", "Slice", "slacks", "tabulated", "tightened"]

Floats = NDArray[np.float64]
Entry = tuple[int, int, int]
"""Position of an arm, a budget and a threshold in the table."""

GRID: Floats = np.linspace(0, 1, 101)
"""Mixes that are tried where the optimum over all of them is not known exactly."""

_ROUNDING = 1e-9
"""Sums in the table and in `evaluate` may differ by this share: nearer to a limit `evaluate` decides."""
_SAME = 1e-12
"""Objectives this close are equal."""


def tightened(targets: Sequence[Target], margins: Mapping[Target, float] | None) -> tuple[Target, ...]:
    """Targets with a stricter limit, each by its margin in the unit of its value; no margin leaves it as it is."""
    shift = margins or {}
    return tuple(
        replace(t, value=t.value - shift[t] if t.upper else t.value + shift[t]) if shift.get(t) else t for t in targets
    )


def tabulated(outcomes: Outcomes | Table, arms: Sequence[str] | None, budgets: Sequence[int] | None) -> Table:
    """The table of these outcomes, or the part of a given one."""
    if isinstance(outcomes, Table):
        return outcomes if arms is None and budgets is None else outcomes.only(arms, budgets)
    return tabulate(outcomes, arms, budgets)


def slacks(target: Target, value: Floats) -> Floats:
    """`Target.slack` of many values."""
    distance = target.value - value if target.upper else value - target.value
    if target.op in ("<", ">"):
        distance = np.where(distance == 0, math.nextafter(0, -1), distance)
    return np.asarray(np.where(np.isnan(distance), -np.inf, distance))


@dataclass(frozen=True, eq=False)
class Slice:
    """The policies of one arm and budget, for every threshold: each with its best mix, or all with one mix."""

    search: Search
    a: int
    b: int
    mix: Floats | float
    scores: Mapping[str | None, Scores]
    shared: dict[Target, Floats]  # values that no arm changes, once for all arms

    def value(self, metric: str, dataset: str | None = None) -> Floats:
        """Metric over all questions or in one dataset, shape (K,)."""
        table = self.search.table
        return table.spread(self._column(table.part(dataset), metric, self.scores.get(dataset)), dataset)

    def _column(self, part: Part, metric: str, scores: Scores | None) -> Floats:
        a, b = self.search.arm_numbers[self.a], self.search.budget_numbers[self.b]
        if metric in LATENCY_METRICS:
            return part.latency(a, b)[metric]
        if metric == "think_rate":
            return part.think_rate
        if metric == "tokens":
            return part.tokens(b)
        if metric == "cost":
            prices = self.search.prices
            column = prices.token * part.tokens(b) if prices.token else np.zeros(len(part.thresholds))
            if prices.second:
                column = column + prices.second * part.latency(a, b)["mean"]
            return column + prices.wrong * (1 - _of(scores, "accuracy")) if prices.wrong else column
        if metric == "skill":
            return (_of(scores, "accuracy") - part.chance) / (1 - part.chance)
        return _of(scores, metric)

    def of(self, target: Target) -> Floats:
        """The value that the target looks at, as `Target.value_of`."""
        if not target.worst:
            return self.value(target.metric, target.dataset)
        if target in self.shared:
            return self.shared[target]
        worse = np.fmax if target.upper else np.fmin  # of a number and NaN, the number
        unknown = np.zeros(len(self.search.table.thresholds), int)
        worst = np.full(unknown.size, np.nan)
        for name in self.search.outcomes.dataset_names:
            value = self.value(target.metric, name)
            worse(worst, value, out=worst)
            unknown += np.isnan(value)
        if target.is_latency:
            worst[unknown > 0] = np.nan
        elif target.metric != "cost":
            self.shared[target] = worst
        return worst

    def broken(self, target: Target) -> Floats:
        """Share of questions that break the target, shape (K,): late, wrong, or thinking; the largest one of `worst`.

        NaN where a latency is not known.
        """
        names = self.search.outcomes.dataset_names if target.worst else [target.dataset]
        if target.metric in PERCENTILES:
            shares = [self._late(target, name) for name in names]
        elif target.metric in ("accuracy", "skill", "think_rate"):
            metric = "think_rate" if target.metric == "think_rate" else "accuracy"
            shares = [self.value(metric, name) for name in names]
            shares = shares if target.upper else [1 - share for share in shares]
        else:
            raise CalibError(f"target {target}: {target.metric} is no share of questions that could break it")
        return np.asarray(np.max(shares, axis=0))

    def _late(self, target: Target, dataset: str | None) -> Floats:
        table = self.search.table
        a, b = self.search.arm_numbers[self.a], self.search.budget_numbers[self.b]
        return table.spread(table.part(dataset).share_beyond(a, b, target.op, target.value), dataset)

    def score(self, metric: str) -> Floats:
        """The objective, larger is better."""
        return self.value(metric) if self.search.maximize else -self.value(metric)


def _of(scores: Scores | None, metric: str) -> Floats:
    column: Floats | None = getattr(scores, metric)
    if column is None:
        raise ValueError(f"{metric} was not computed")
    return column


@dataclass(frozen=True, eq=False)
class Entries:
    """What is left of the mixes: the best one of each entry.

    Attributes
    ----------
    score : ndarray of shape (A, B, K)
        Objective, larger is better; -inf where no mix meets the targets.
    mix : ndarray of shape (A, B, K)
    doubtful : ndarray of bool, shape (A, B, K)
        Whether rounding could decide if the targets are met.
    """

    score: Floats
    mix: Floats
    doubtful: NDArray[np.bool_]


class Search:
    """One table, targets and objective: which slices there are, which entries are feasible, which one is best."""

    def __init__(
        self,
        outcomes: Outcomes | Table,
        targets: Sequence[Target],
        maximize: str | None,
        minimize: str | None,
        cost: Cost | None,
        arms: Sequence[str] | None,
        budgets: Sequence[int] | None,
        margins: Mapping[Target, float] | None,
        *,
        requirements: Mapping[Target, float] | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        self.table = tabulated(outcomes, arms, budgets)
        self.outcomes = self.table.outcomes
        self.arm_numbers = [self.outcomes.arm_index(arm) for arm in self.table.arms]
        self.budget_numbers = [self.outcomes.budget_index(budget) for budget in self.table.budgets]
        self.targets = tightened(targets, margins)
        self.requirements = dict(requirements or {})
        self.metric, self.maximize = _objective(maximize, minimize)
        self.cost = cost
        looked_at = [*metrics] if metrics else [self.metric]
        limited = [*self.targets, *self.requirements]
        every = [*looked_at, *(target.metric for target in limited)]
        for target in limited:
            self._check_dataset(target)
        for metric in every:
            if metric not in METRICS:
                raise CalibError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
            if metric == "cost" and cost is None:
                raise CalibError("the metric cost needs prices: --cost wrong=1,second=0.01")
        self.prices = cost or Cost()
        on_grid = self.table.pool != "linear"
        on_grid |= any(not self._sees_best_mix(metric) for metric in looked_at)
        on_grid |= any(not self._exact_target(target) for target in limited)
        self.method = "grid" if on_grid else "exact"
        self._of_labels = "macro_f1" in every
        self._refused: set[tuple[Entry, float]] = set()
        self._check_seconds(every)

    def _check_dataset(self, target: Target) -> None:
        names = self.outcomes.dataset_names
        if target.dataset is not None and target.dataset not in names:
            near = difflib.get_close_matches(target.dataset, names, 1)
            hint = f" Did you mean [{near[0]}]?" if near else ""
            raise CalibError(f"target {target}: no dataset {target.dataset!r}; there are: {', '.join(names)}.{hint}")

    def _mix_free(self, metric: str) -> bool:
        return metric in (*LATENCY_METRICS, "think_rate", "tokens") or (metric == "cost" and not self.prices.wrong)

    def _sees_best_mix(self, metric: str) -> bool:
        """Whether the mix that is best for accuracy is best for this metric."""
        return self._mix_free(metric) or metric in ("accuracy", "skill", "cost")

    def _exact_target(self, target: Target) -> bool:
        if self._mix_free(target.metric):
            return True
        whole = target.dataset is None and not target.worst
        return whole and self._sees_best_mix(target.metric) and target.upper == (target.metric == "cost")

    def _check_seconds(self, metrics: Sequence[str]) -> None:
        """Refuse a latency that is known for no thought of any arm: never thinking would look like the only choice."""
        needed = [m for m in metrics if m in LATENCY_METRICS or (m == "cost" and self.prices.second)]
        if needed and not any(self._has_seconds(a) for a in self.arm_numbers):
            raise CalibError(
                f"{needed[0]} needs seconds, which are not known for {', '.join(self.table.arms)}. Give rates "
                "(calib import FILE --system1-ms 45 --tokens-per-second 250), or measure: calib collect QUESTIONS"
            )

    def _has_seconds(self, a: int) -> bool:
        o = self.outcomes
        if np.isnan(o.t1[a]).any():
            return False
        thinkers = np.flatnonzero(o.can_think)
        # the first question alone mostly settles it
        return not thinkers.size or any(
            not np.isnan(o.t2[a, some][:, self.budget_numbers]).all() for some in (thinkers[:1], thinkers)
        )

    def slices(self, only: Entry | None = None) -> Iterator[Slice]:
        """Every slice of the search; with an entry, those of its arm and budget."""
        for b, number in enumerate(self.budget_numbers):
            if only and only[1] != b:
                continue
            arms = range(len(self.arm_numbers)) if only is None else [only[0]]
            for mix, scores in self._mixes(number):
                shared: dict[Target, Floats] = {}
                for a in arms:
                    yield Slice(self, a, b, mix, scores, shared)

    def _mixes(self, b: int) -> Iterator[tuple[Floats | float, Mapping[str | None, Scores]]]:
        if self.method == "exact":
            accuracy, mix = self.table.whole.best(b)
            yield mix, {None: Scores(accuracy)}
            return
        limited = [*self.targets, *self.requirements]
        datasets: set[str | None] = {None, *(target.dataset for target in limited)}
        if any(target.worst for target in limited):
            datasets.update(self.outcomes.dataset_names)
        each = {name: self.table.part(name).scores(b, GRID, of_labels=self._of_labels) for name in datasets}
        for mix in GRID.tolist():
            yield mix, {name: next(scores) for name, scores in each.items()}

    def reduce(self) -> Entries:
        """The best mix of every entry, among the mixes that meet the targets."""
        shape = self.table.shape
        found = Entries(np.full(shape, -np.inf), np.full(shape, 0.5), np.zeros(shape, bool))
        for part in self.slices():
            value = part.score(self.metric)
            met, doubtful = self._met(part)
            at = part.a, part.b
            better = met & (value > found.score[at])  # NaN is not
            found.score[at][better] = value[better]
            found.mix[at][better] = np.broadcast_to(part.mix, value.shape)[better]
            found.doubtful[at][better] = doubtful[better]
        return found

    def _met(self, part: Slice) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which thresholds meet the targets, and of which rounding could say otherwise, shape (K,) each."""
        met = ~self.table.refused(self.table.arms[part.a])
        doubtful = np.zeros(len(met), bool)
        for target in self.targets:
            slack, tolerance = slacks(target, part.of(target)), self._tolerance(target)
            met &= slack >= -tolerance
            if tolerance:
                doubtful |= np.abs(slack) <= tolerance
        for target, most in self.requirements.items():
            met &= part.broken(target) <= most + _SAME
        for (a, b, k), mix in self._refused:
            if (a, b) == (part.a, part.b):
                met[k] &= not (isinstance(part.mix, np.ndarray) or part.mix == mix)
        return met, doubtful

    def refuse(self, entry: Entry, mix: float) -> None:
        """Leave out an entry that `evaluate` finds outside the targets: on a grid at this mix, else altogether."""
        self._refused.add((entry, mix))

    def _tolerance(self, target: Target) -> float:
        parts = self.outcomes.dataset_names if target.worst else [target.dataset]
        if all(self.table.part(name).exact(target.metric) for name in parts):
            return 0.0
        return _ROUNDING * (abs(target.value) or 1.0)

    def met(self, policy: Policy) -> bool:
        """Whether `evaluate` says that the policy meets the targets."""
        by_dataset = any(target.worst or target.dataset is not None for target in self.targets)
        evaluation = evaluate(self.outcomes, policy, by_dataset=by_dataset, cost=self.cost)
        return all(target.met(evaluation) for target in self.targets)

    def cheapness(self, a: NDArray[Any], b: NDArray[Any], k: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """Keys of `numpy.lexsort`, the last one first: mean latency, tokens, think rate, budget, arm, threshold."""
        seconds, tokens = np.empty(len(k)), np.empty(len(k))
        for i, arm in enumerate(self.arm_numbers):
            for j, budget in enumerate(self.budget_numbers):
                here = (a == i) & (b == j)
                if here.any():
                    seconds[here] = self.table.whole.latency(arm, budget)["mean"][k[here]]
                    tokens[here] = self.table.whole.tokens(budget)[k[here]]
        seconds = np.where(np.isnan(seconds), np.inf, seconds)
        return k, a, b, self.table.whole.think_rate[k], tokens, seconds

    def best_of(self, score: Floats) -> Entry | None:
        """The entry with the best objective, the cheapest of equal ones; None when none is feasible."""
        most = score.max()
        if most == -np.inf:
            return None
        a, b, k = np.nonzero(score >= most - _SAME * max(abs(most), 1.0))
        first = int(np.lexsort(self.cheapness(a, b, k))[0])
        return int(a[first]), int(b[first]), int(k[first])

    def interval(self, entry: Entry) -> tuple[float, float, float]:
        """The widest interval of mixes that does as well as this one: low end, a mix inside, high end."""
        if self.method == "exact":
            return self.table.whole.widest(self.budget_numbers[entry[1]], entry[2])
        values = []
        for part in self.slices(entry):
            met, _ = self._met(part)
            values.append(part.score(self.metric)[entry[2]] if met[entry[2]] else -np.inf)
        most = max(values)
        same = np.array(values) >= most - _SAME * max(abs(most), 1.0)
        turns = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
        first, last = turns[::2], turns[1::2] - 1
        k = int(np.argmax(last - first))
        return float(GRID[first[k]]), float(GRID[(first[k] + last[k]) // 2]), float(GRID[last[k]])

    def policy(self, entry: Entry, mix: float) -> Policy:
        """The policy of an entry at a mix."""
        a, b, k = entry
        table = self.table
        where = float(table.thresholds[k]), float(mix), table.budgets[b], table.arms[a]
        return Policy(
            *where,
            confidence=table.confidence,
            pool=table.pool,
            deadline=table.deadline,
            on_deadline=table.on_deadline,
        )


def _objective(maximize: str | None, minimize: str | None) -> tuple[str, bool]:
    if maximize is not None and minimize is not None:
        raise CalibError("give one objective: --maximize or --minimize")
    if minimize is None:
        metric = maximize or "accuracy"
        if metric not in HIGHER_IS_BETTER:
            raise CalibError(f"--maximize takes one of {', '.join(HIGHER_IS_BETTER)}; got {metric!r}")
        return metric, True
    lower = [metric for metric in METRICS if metric not in HIGHER_IS_BETTER]
    if minimize not in lower:
        raise CalibError(f"--minimize takes one of {', '.join(lower)}; got {minimize!r}")
    return minimize, False


class Least:
    """The entry with the least value so far; of equal ones the best objective, then the cheapest."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.value = math.inf
        self._key: tuple[float, ...] = ()
        self._entry: Entry | None = None
        self._mix = 0.0

    def offer(self, part: Slice, value: Floats, objective: Floats) -> None:
        """Look at every threshold of one slice."""
        least = float(value.min())
        if least == math.inf or least > self.value:
            return
        rows = np.flatnonzero(value == least)
        a, b = np.full(rows.size, part.a), np.full(rows.size, part.b)
        cheap = self.search.cheapness(a, b, rows)
        score = np.where(np.isnan(objective[rows]), -np.inf, objective[rows])
        i = int(np.lexsort((*cheap, -score))[0])
        key = (least, -float(score[i]), *(float(column[i]) for column in reversed(cheap)))
        if self._entry is None or key < self._key:
            self.value, self._key = least, key
            self._entry = part.a, part.b, int(rows[i])
            self._mix = float(np.broadcast_to(part.mix, value.shape)[rows[i]])

    def policy(self) -> Policy | None:
        """Its policy; None when every value was infinite."""
        return None if self._entry is None else self.search.policy(self._entry, self._mix)

"""Numbers of the figures: every threshold at once, per dataset, with a band; distributions; fronts.

`Curves` keeps what was computed, so that a slider move costs a few sums. Leaves the drawing to `calib.figures`, the
choice of a policy to `calib.optimise`, and the bookkeeping of the questions to `calib.slices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from calib import exact, metrics, sweep
from calib.calibrate import apply
from calib.certify import marks_of
from calib.errors import CalibError
from calib.flips import Flips, flips
from calib.optimise import Front, pareto
from calib.outcomes import SIMULATED, Outcomes
from calib.policy import CONFIDENCES, LATENCY_METRICS, Decisions, Policy, confidence, decide, pooled
from calib.slices import Recent, Slice, needed_weight, share_band, slices, thin
from calib.stages import Bins, binned
from calib.table import PERCENTILES, Table, tabulate

__all__ = [
    "METRICS",
    "POINTS",
    "Curve",
    "Curves",
    "Distribution",
    "Flips",
    "Frontier",
    "Marked",
    "flips",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

METRICS = ("accuracy", "think_rate", "tokens", *LATENCY_METRICS)
"""What a curve can show."""
POINTS = 2000
"""Most points of all curves of one figure together, about."""

_FEWEST = 40  # points of one curve, however many share the figure
_SLOW_MIXES = 41  # points of a curve against the mix where no interval of mixes is known
_KEPT = 8  # entries of each memory: the last few arms, budgets, mixes


@dataclass(frozen=True, eq=False)
class Curve:
    """One line of a figure, every point exact.

    Attributes
    ----------
    dataset : str or None
        None for all questions together.
    metric : str
        What y is.
    n : int
        Questions behind it.
    x, y : ndarray of shape (K,)
        Ascending x; y is a share 0 to 1, seconds or tokens; NaN where a latency is not known.
    low, high : ndarray of shape (K,)
        Pointwise band; NaN without one, infinite where there are too few questions to bound a latency from above.
    marks : tuple of str
        `estimated`, `simulated`, where they touch this metric.
    summary : float
        One number for the whole line: the area under a risk-coverage curve; NaN for the others.
    starts, ends : ndarray of shape (K,), or None
        Where y is a step function: the x above which and up to which each value holds. A thinned curve has gaps.
    """

    dataset: str | None
    metric: str
    n: int
    x: Floats
    y: Floats
    low: Floats
    high: Floats
    marks: tuple[str, ...] = ()
    summary: float = math.nan
    starts: Floats | None = None
    ends: Floats | None = None


@dataclass(frozen=True, eq=False)
class Marked:
    """A policy with a name that figures mark, with its values per dataset.

    Attributes
    ----------
    label : str
        For instance "current", "published default", "tuned optimum".
    policy : Policy
    values : mapping of (str or None) to mapping of str to float
        By dataset (None: all questions) and metric: `METRICS`, ``coverage`` (share that does not think) and ``risk``
        (share of wrong answers among these; NaN without any).
    marks : tuple of str
    """

    label: str
    policy: Policy
    values: Mapping[str | None, Mapping[str, float]]
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Distribution:
    """Latency of one arm under a policy.

    Attributes
    ----------
    arm : str
    n : int
    seconds, share : ndarray of shape (K,)
        Ascending; share of the questions that finish within them, 0 to 1. Empty where latency is not known.
    percentiles : mapping of str to float
        p50, p90, p95, p99 in seconds.
    marks : tuple of str
    """

    arm: str
    n: int
    seconds: Floats
    share: Floats
    percentiles: Mapping[str, float]
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Frontier:
    """A front with what stands beside each of its points.

    Attributes
    ----------
    arms : tuple of str
        Arms that were looked at.
    front : Front
    like : Policy
        Gives what all policies of the front have in common: confidence, pool, temperatures.
    p90, p99 : ndarray of shape (F,)
        Seconds; NaN where unknown.
    marks : tuple of str
    """

    arms: tuple[str, ...]
    front: Front
    like: Policy
    p90: Floats
    p99: Floats
    marks: tuple[str, ...] = ()

    def policy(self, point: int) -> Policy:
        """What to serve for one point."""
        return replace(self.front[point].policy, temperatures=self.like.temperatures)

    def policies(self) -> Iterator[Policy]:
        """Policies of all points."""
        return map(self.policy, range(len(self.front)))


@dataclass(frozen=True, eq=False)
class _Did:
    """What a policy does, without its distributions, shape (N,) each."""

    thinks: Bools
    right: Bools
    latency: Floats
    tokens: Floats


class Curves:
    """Curves of one set of outcomes; what depends on the budget, the arm or the mix alone is kept.

    Keep one object for the same outcomes: it remembers, and is otherwise never changed. Several threads may use it.

    Parameters
    ----------
    outcomes : Outcomes or Table
        A table of the same outcomes (as the systems gave them) saves work where one exists.
    like : Policy, optional
        Whose confidence, pool and temperatures the curves use, whatever its knobs are; a plain policy's, or those of
        the table, when left out. Curves against the mix are slower under another pool than the linear one.
    level : float, default 0.95
        Of the pointwise bands: Clopper and Pearson's for shares, order statistics for percentiles; none for means.
        Exact for unweighted, independent questions; otherwise with Kish's effective number of questions, each group
        taken as one.

    Raises
    ------
    CalibError
        When no thought was collected.

    References
    ----------
    Korn, Graubard (1998), Confidence intervals for proportions with small expected number of positive counts.
    """

    def __init__(self, outcomes: Outcomes | Table, *, like: Policy | None = None, level: float = 0.95) -> None:
        given = outcomes if isinstance(outcomes, Table) else None
        self.outcomes = outcomes.outcomes if isinstance(outcomes, Table) else outcomes
        if like is None:
            like = Policy() if given is None else Policy(confidence=given.confidence, pool=given.pool)
        self.like = like
        self.level = level
        o = self.outcomes
        self._seen = apply(o, like.calibration)  # what a plain policy decides as a calibrated one decides the outcomes
        if given is None or self._seen is not o or (given.confidence, given.pool) != (like.confidence, like.pool):
            given = tabulate(self._seen, confidence=like.confidence, pool=like.pool)
        self.table = given
        self._confidence = confidence(self._seen.p1, like.confidence, o.n_options)
        self._right1 = np.asarray(metrics.chosen(self._seen.p1) == o.answer)
        self._wins: dict[int, tuple[NDArray[np.int8], Floats]] = {}
        self._thought = Recent(4 * _KEPT)  # by budget and mix
        self._latency = Recent(_KEPT)  # by arm and budget, all slices
        self._decided = Recent(_KEPT)  # by policy
        self._marked = Recent(4 * _KEPT)  # by policy
        self._fronts = Recent(4 * _KEPT)  # by metrics, arms and budgets

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the datasets, sorted."""
        return self.outcomes.dataset_names

    def against_threshold(
        self,
        metric: str,
        *,
        mix: float,
        think_budget: int,
        arm: str,
        datasets: Sequence[str | None] | None = None,
        points: int | None = POINTS,
    ) -> list[Curve]:
        """A metric at every threshold that makes a difference.

        Parameters
        ----------
        metric : str
            One of `METRICS`.
        mix, think_budget, arm
            As of a policy; the arm matters to latency only, the mix to accuracy only.
        datasets : sequence of str or None, optional
            One curve for each; None stands for all questions together. All questions and each dataset when left out.
        points : int or None
            Most points of all curves together, about; None for every threshold.

        Raises
        ------
        CalibError
            Unknown metric, dataset, arm or budget.
        """
        _check_metric(metric)
        a, b = self.outcomes.arm_index(arm), self.outcomes.budget_index(think_budget)
        self._policy(0.0, mix, think_budget, arm)
        chosen = self._slices(datasets)
        each = None if points is None else max(points // max(len(chosen), 1), _FEWEST)
        marks = self._marks(metric, arm, think_budget)
        curves = []
        for part in chosen:
            y, low, high = self._rows(part, metric, a, b, mix)
            at: Any = slice(None) if each is None else thin(part.thresholds, y, points=each)
            x, y = part.thresholds[at], y[at]
            low, high = self._band(part, metric, y) if low is None or high is None else (low[at], high[at])
            steps = {"starts": part.starts[at], "ends": part.ends[at]}
            curves.append(Curve(part.dataset, metric, part.n, x, y, low, high, marks, **steps))
        return curves

    def against_budget(
        self,
        metric: str,
        *,
        threshold: float,
        mix: float,
        arm: str,
        datasets: Sequence[str | None] | None = None,
    ) -> list[Curve]:
        """A metric at every collected think budget; x in tokens.

        Parameters
        ----------
        metric : str
            One of `METRICS`.
        threshold, mix, arm
            As of a policy.
        datasets : sequence of str or None, optional
            As for `against_threshold`.
        """
        _check_metric(metric)
        chosen = self._slices(datasets)
        budgets = self.outcomes.budgets
        values = np.empty((len(chosen), 3, len(budgets)))
        for k, budget in enumerate(budgets.tolist()):
            did = self._did(self._policy(threshold, mix, budget, arm), latency=metric in LATENCY_METRICS)
            for s, part in enumerate(chosen):
                values[s, :, k] = self._value(part, metric, did)
        marks = self._marks(metric, arm, *budgets.tolist())
        x = budgets.astype(np.float64)
        return [
            Curve(part.dataset, metric, part.n, x, y, low, high, marks)
            for part, (y, low, high) in zip(chosen, values, strict=True)
        ]

    def against_mix(
        self,
        *,
        threshold: float,
        think_budget: int,
        datasets: Sequence[str | None] | None = None,
        points: int = 201,
    ) -> list[Curve]:
        """Accuracy at evenly spaced mixes from 0 to 1.

        Parameters
        ----------
        threshold, think_budget
            As of a policy.
        datasets : sequence of str or None, optional
            As for `against_threshold`.
        points : int
            Mixes, at least 2; fewer where many curves share the figure.
        """
        o = self.outcomes
        b = o.budget_index(think_budget)
        self._policy(threshold, 0.0, think_budget, o.arms[0])
        chosen = self._slices(datasets)
        most = points if self.like.pool == "linear" else min(points, _SLOW_MIXES)
        mixes = np.linspace(0, 1, max(2, min(most, max(POINTS // max(len(chosen), 1), _FEWEST))))
        thinks = (self._confidence < threshold) & o.can_think
        right = self._right_at(b, mixes, thinks, chosen)
        marks = self._marks("accuracy", o.arms[0], think_budget)
        return [
            Curve(part.dataset, "accuracy", part.n, mixes, y, *self._band(part, "accuracy", y), marks)
            for part, y in ((part, units / part.total) for part, units in zip(chosen, right, strict=True))
        ]

    def _right_at(self, b: int, mixes: Floats, thinks: Bools, chosen: Sequence[Slice]) -> Iterator[NDArray[np.int64]]:
        """Weight of the right answers of each slice at each mix."""
        o, units = self._seen, self.table.whole.units
        if self.like.pool != "linear":
            after = [np.where(thinks, self._thought_right(b, mix), self._right1) for mix in mixes.tolist()]
            for part in chosen:
                yield np.array([part.units[right[part.members]].sum() for right in after])
            return
        kind, bounds = self._intervals(b)
        sure = np.where(thinks, kind == sweep.ALWAYS, self._right1)
        for part in chosen:
            which = part.members[thinks[part.members]]
            found = sweep.right_units(o.p1, o.p2, b, o.answer, o.n_options, units, which, kind, bounds, mixes)
            yield found + int(part.units[sure[part.members]].sum())

    def latency(
        self, policy: Policy, *, arms: Sequence[str] | None = None, dataset: str | None = None, points: int = POINTS
    ) -> list[Distribution]:
        """Share of the questions that finish within a time, when each arm serves the policy.

        Parameters
        ----------
        policy : Policy
            Its own arm does not matter.
        arms : sequence of str, optional
            All when left out.
        dataset : str, optional
            All questions when left out.
        points : int
            Most points of all arms together, about.
        """
        part = self._slices([dataset])[0]
        arms = self.outcomes.arms if arms is None else arms
        return [self._distribution(part, replace(policy, arm=arm), points // max(len(arms), 1)) for arm in arms]

    def _distribution(self, part: Slice, policy: Policy, points: int) -> Distribution:
        seconds = self._did(policy).latency[part.members]
        percentiles = dict(
            zip(PERCENTILES, metrics.percentiles(seconds, [*PERCENTILES.values()], part.weights).tolist(), strict=True)
        )
        marks = marks_of(policy, self.outcomes)
        if np.isnan(seconds).any():
            return Distribution(policy.arm, part.n, np.empty(0), np.empty(0), percentiles, marks)
        turn = np.argsort(seconds, kind="stable")
        x = seconds[turn]
        share = np.cumsum(part.units[turn]) / part.total
        last = np.append(x[1:] != x[:-1], True) & np.isfinite(x)
        x, share = x[last], share[last]
        at = thin(share, x, points=points)
        return Distribution(policy.arm, part.n, x[at], share[at], percentiles, marks)

    def risk_coverage(
        self,
        policy: Policy | None = None,
        *,
        datasets: Sequence[str | None] | None = None,
        points: int = POINTS,
    ) -> list[Curve]:
        """Share of wrong answers among the most confident questions, against their share.

        Parameters
        ----------
        policy : Policy, optional
            Answers and confidence (of the combined distribution) are System 1's when left out.
        datasets : sequence of str or None, optional
            As for `against_threshold`.
        points : int
            Most points of all curves together, about.

        Returns
        -------
        list of Curve
            x is the coverage, y the risk, both 0 to 1; ``summary`` is the area under the curve.
        """
        if policy is None:
            sure, right = self._confidence, self._right1
            marks = (SIMULATED,) * self.outcomes.simulated
        else:
            decisions = self._decisions(policy)
            top = decisions.p.max(axis=1)
            sure = np.where(np.isnan(top), 0.0, top)  # without a usable answer: kept last
            right = decisions.choice == self.outcomes.answer
            marks = self._marks("accuracy", policy.arm, policy.think_budget)
        chosen = self._slices(datasets)
        each = max(points // max(len(chosen), 1), _FEWEST)
        return [self._risk(part, sure, right, marks, each) for part in chosen]

    def confidences(self, *, dataset: str | None = None, points: int = POINTS) -> dict[str, Curve]:
        """Risk against coverage of System 1's answers under each definition of the confidence.

        Parameters
        ----------
        dataset : str, optional
            All questions when left out.
        points : int
            Most points of all curves together, about.

        Returns
        -------
        dict of str to Curve
            By definition, as `risk_coverage`: what is compared is the order in which each sends questions to think.
        """
        part, o = self._slices([dataset])[0], self.outcomes
        marks = (SIMULATED,) * o.simulated
        each = points // len(CONFIDENCES)
        return {
            name: self._risk(part, confidence(self._seen.p1, name, o.n_options), self._right1, marks, each)
            for name in CONFIDENCES
        }

    def _risk(self, part: Slice, sure: Floats, right: Bools, marks: tuple[str, ...], points: int) -> Curve:
        weight = part.weights
        found = metrics.risk_coverage(sure[part.members], right[part.members], weight)
        at = thin(found.coverage, found.risk, points=points)
        x, y = found.coverage[at], found.risk[at]
        low, high = share_band(y, np.maximum(x * part.effective, 1.0), self.level)
        area = metrics.aurc(sure[part.members], right[part.members], weight)
        return Curve(part.dataset, "risk", part.n, x, y, low, high, marks, area)

    def reliability(self, policy: Policy, *, dataset: str | None = None) -> dict[str, Bins]:
        """Confidence and accuracy by bin, with intervals: of each system as it answered, and after the policy.

        Parameters
        ----------
        policy : Policy
        dataset : str, optional
            All questions when left out.

        Returns
        -------
        dict of str to Bins
            ``p1`` of all questions, ``p2`` at the policy's budget of those that the server can think about, ``final``.
        """
        part = self._slices([dataset])[0]
        o, members = self.outcomes, part.members
        b = o.budget_index(policy.think_budget)
        able = members[o.can_think[members]]
        forecasts = {
            "p1": (o.p1[members], members),
            "p2": (o.p2[able, b], able),
            "final": (self._decisions(policy).p[members], members),
        }
        return {
            name: binned(p, o.answer[who], None if o.unweighted else o.weight[who], level=self.level)
            for name, (p, who) in forecasts.items()
        }

    def marked(self, label: str, policy: Policy) -> Marked:
        """A policy with its values for all questions and for each dataset, to be marked in figures.

        Raises
        ------
        CalibError
            When its arm or budget was not collected.
        """
        values = self._marked.of(policy, lambda: self._values(policy))
        return Marked(label, policy, values, marks_of(policy, self.outcomes))

    def _values(self, policy: Policy) -> dict[str | None, dict[str, float]]:
        did = self._did(policy)
        found: dict[str | None, dict[str, float]] = {}
        for part in self._all_slices.values():
            m, weight = part.members, part.weights
            kept = ~did.thinks[m]
            mean = metrics.mean
            found[part.dataset] = {
                "accuracy": mean(did.right[m], weight),
                "think_rate": mean(did.thinks[m], weight),
                "tokens": mean(did.tokens[m], weight),
                "mean": mean(did.latency[m], weight),
                **dict(
                    zip(
                        PERCENTILES,
                        metrics.percentiles(did.latency[m], [*PERCENTILES.values()], weight).tolist(),
                        strict=True,
                    )
                ),
                "coverage": mean(kept, weight),
                "risk": mean(~did.right[m][kept], None if weight is None else weight[kept]),
            }
        return found

    def frontier(
        self,
        x: str = "p90",
        y: str = "accuracy",
        *,
        arms: Sequence[str] | None = None,
        budgets: Sequence[int] | None = None,
    ) -> Frontier:
        """The exact front of two metrics, with both latency percentiles beside each point.

        Parameters
        ----------
        x, y : str
            Metrics.
        arms, budgets : sequence, optional
            Where to look; everywhere when left out.

        Raises
        ------
        CalibError
            When a latency is needed that is not known.
        """
        arms = self.outcomes.arms if arms is None else tuple(arms)
        chosen = None if budgets is None else tuple(budgets)
        return self._fronts.of((x, y, arms, chosen), lambda: self._frontier(x, y, arms, chosen))

    def _frontier(self, x: str, y: str, arms: tuple[str, ...], budgets: tuple[int, ...] | None) -> Frontier:
        front = pareto(self.table, x, y, arms=arms, budgets=budgets)
        whole, o = self.table.whole, self.outcomes
        rows = whole.rows_at(front.threshold)
        p90, p99 = np.empty(len(front)), np.empty(len(front))
        marks: set[str] = set()
        for arm, budget in sorted(set(zip(front.arm.tolist(), front.think_budget.tolist(), strict=True))):
            here = (front.arm == arm) & (front.think_budget == budget)
            columns = whole.latency(o.arm_index(arm), o.budget_index(budget))
            p90[here], p99[here] = columns["p90"][rows[here]], columns["p99"][rows[here]]
            marks.update(o.marks_of(arm, budget))
        return Frontier(arms, front, self.like, p90, p99, tuple(sorted(marks)))

    def alike(self, policies: Iterable[Policy] | Frontier | Front, chosen: Policy) -> Bools:
        """Which policies cannot be told apart from the chosen one by accuracy.

        Parameters
        ----------
        policies : iterable of Policy, Frontier, or Front of plain policies
        chosen : Policy

        Returns
        -------
        ndarray of bool, shape (F,)
            By the exact McNemar test at 1 - level for unweighted independent questions, else by the paired difference
            in standard errors of its group totals. Pointwise: no allowance for the number of policies.
        """
        o = self.outcomes
        if isinstance(policies, Frontier):
            several = list(policies.policies())
        elif isinstance(policies, Front):
            several = [point.policy for point in policies]
        else:
            several = list(policies)
        whole = self._all_slices[None]
        ours = self._did(chosen, latency=False).right
        exactly = whole.effective == whole.n
        z = float(stats.norm.isf((1 - self.level) / 2))
        found = np.empty(len(several), bool)
        for i, policy in enumerate(several):
            theirs = self._did(policy, latency=False).right
            if exactly:
                gained, lost = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
                found[i] = exact.mcnemar(gained, lost) > 1 - self.level
                continue
            change = np.bincount(o.group_codes, o.weight * (theirs.astype(np.float64) - ours))
            weight = np.bincount(o.group_codes, o.weight)
            mean = change.sum() / weight.sum()
            error = math.sqrt(float(((change - mean * weight) ** 2).sum())) / float(weight.sum())
            found[i] = bool(abs(mean) <= z * error)
        return found

    # what curves are made of

    @cached_property
    def _all_slices(self) -> dict[str | None, Slice]:
        return slices(self.outcomes, self._confidence, self.table.whole.units, self.level)

    def _slices(self, datasets: Sequence[str | None] | None) -> list[Slice]:
        known = self._all_slices
        if datasets is None:
            names = self.datasets
            datasets = [None, *names] if len(names) > 1 else list(names)
        for name in datasets:
            if name not in known:
                raise CalibError(f"unknown dataset {name!r}; there are: {', '.join(self.datasets)}")
        return [known[name] for name in datasets]

    def _policy(self, threshold: float, mix: float, think_budget: int, arm: str) -> Policy:
        """The rule of these curves at these knobs; a `CalibError` where one is out of range."""
        return replace(self.like, threshold=threshold, mix=mix, think_budget=think_budget, arm=arm, routes={})

    def _marks(self, metric: str, arm: str, *budgets: int) -> tuple[str, ...]:
        if metric not in LATENCY_METRICS:
            return (SIMULATED,) * self.outcomes.simulated
        return tuple(sorted({mark for budget in budgets for mark in self.outcomes.marks_of(arm, budget)}))

    def _rows(
        self, part: Slice, metric: str, a: int, b: int, mix: float
    ) -> tuple[Floats, Floats | None, Floats | None]:
        """Values for every threshold; the band too where it comes with them."""
        if metric in LATENCY_METRICS:
            found = self._latency.of((a, b), dict)  # one entry holds all slices of an arm and budget
            if part.dataset not in found:
                found[part.dataset] = self._latency_rows(part, a, b)
            rows = found[part.dataset]
            return rows[metric], rows.get(f"{metric} low"), rows.get(f"{metric} high")
        if metric == "think_rate":
            return part.rows(part.units) / part.total, None, None
        if metric == "tokens":
            used = part.rows(part.weight * self.outcomes.tokens[part.members, b])
            return used / part.weight.sum(), None, None
        before = self._right1[part.members]
        change = (self._thought_right(b, mix)[part.members].astype(np.int64) - before) * part.units
        return (part.rows(change) + int(part.units[before].sum())) / part.total, None, None

    def _latency_rows(self, part: Slice, a: int, b: int) -> dict[str, Floats]:
        """Mean, percentiles and their bands for every threshold, seconds, as `calib.table` computes them."""
        o, m = self.outcomes, part.members
        alone = o.t1[a, m]
        names = ["mean", *(f"{name}{side}" for name in PERCENTILES for side in ("", " low", " high"))]
        if np.isnan(alone).any():
            return dict.fromkeys(names, np.full(len(part.thresholds), np.nan))
        thought = alone + np.where(o.can_think[m], o.t2[a, m, b], 0.0)
        unknown = np.flatnonzero(np.isnan(thought[part.order]))
        thought[np.isnan(thought)] = np.inf
        alone.setflags(write=False)
        shares = [(q / 100, *part.ranks[name]) for name, q in PERCENTILES.items()]
        need = np.array([[needed_weight(share, part.total) for share in three] for three in shares], np.int64).ravel()
        rows = sweep.latency_rows(
            alone,
            thought,
            np.argsort(alone),
            part.order[np.argsort(thought[part.order])],
            part.order,
            part.stops,
            part.units,
            part.weight,
            need,
        )
        found = dict(zip(names, rows, strict=True))
        for name, (low, high) in part.ranks.items():
            if low == 0:
                found[f"{name} low"][:] = 0.0
            if high == math.inf:
                found[f"{name} high"][:] = np.inf
        if unknown.size:
            rows[:, np.searchsorted(part.stops, unknown[0], side="right") + 1 :] = np.nan
        return found

    def _intervals(self, b: int) -> tuple[NDArray[np.int8], Floats]:
        if b not in self._wins:
            o = self._seen
            kind, bounds, *_ = sweep.intervals(o.p1, o.p2, b, o.answer, o.n_options, o.can_think)
            self._wins[b] = kind, bounds
        return self._wins[b]

    def _thought_right(self, b: int, mix: float) -> Bools:
        """Whether each question is right after a thought, by the floating-point rule of `decide`, shape (N,)."""
        return self._thought.of((b, mix), lambda: self._ask_thought(b, mix))

    def _ask_thought(self, b: int, mix: float) -> Bools:
        o = self._seen
        if self.like.pool != "linear":
            after = pooled(o.p1, o.p2[:, b], mix, self.like.pool, o.n_options)
            return np.asarray(metrics.chosen(after) == o.answer)
        kind, bounds = self._intervals(b)
        right = np.asarray(kind == sweep.ALWAYS)
        partly = np.flatnonzero(kind == sweep.PARTLY)
        outer_low, inner_low, inner_high, outer_high = bounds[partly].T
        sure = (inner_low < mix) & (mix < inner_high)
        right[partly] = sure
        asked = partly[~sure & (outer_low <= mix) & (mix <= outer_high)]
        if asked.size:
            after = pooled(o.p1[asked], o.p2[asked, b], mix, "linear")
            right[asked] = metrics.chosen(after) == o.answer[asked]
        return right

    def _alike_rule(self, policy: Policy) -> bool:
        """Whether the policy decides as the curves do: confidence, pool, temperatures (the last moves no answer)."""
        ours, theirs = (one.calibration.only("p1", "p2", "cut") for one in (self.like, policy))
        same = (policy.confidence, policy.pool) == (self.like.confidence, self.like.pool) and ours == theirs
        return same and policy.deadline is None

    def _did(self, policy: Policy, *, latency: bool = True) -> _Did:
        o = self.outcomes
        if not self._alike_rule(policy):
            made = self._decisions(policy)
            return _Did(made.thinks, made.choice == o.answer, made.latency, made.tokens)
        thinks, right = np.zeros(o.n, bool), self._right1.copy()
        seconds, tokens = np.full(o.n, np.nan), np.zeros(o.n)
        for part, mask in policy.parts(o):
            a, b = o.arm_index(part.arm), o.budget_index(part.think_budget)
            think = mask & (self._confidence < part.threshold) & o.can_think
            thinks |= think
            np.copyto(right, self._thought_right(b, part.mix), where=think)
            np.copyto(tokens, o.tokens[:, b], where=think)
            if latency:
                np.copyto(seconds, o.t1[a] + np.where(think, o.t2[a, :, b], 0.0), where=mask)
        return _Did(thinks, right, seconds, tokens)

    def _decisions(self, policy: Policy) -> Decisions:
        return self._decided.of(policy, lambda: decide(self.outcomes, policy))

    def _value(self, part: Slice, metric: str, did: _Did) -> tuple[float, float, float]:
        """Value, low and high of one policy."""
        m, weight = part.members, part.weights
        if metric in PERCENTILES:
            low, high = part.ranks[metric]
            asked = [PERCENTILES[metric], 100 * low if low else 100, 100 * min(high, 1.0)]
            value, at_low, at_high = metrics.percentiles(did.latency[m], asked, weight).tolist()
            if math.isnan(value):
                return math.nan, math.nan, math.nan
            return value, (at_low if low else 0.0), (at_high if high <= 1 else math.inf)
        column: dict[str, NDArray[Any]] = {
            "accuracy": did.right,
            "think_rate": did.thinks,
            "tokens": did.tokens,
            "mean": did.latency,
        }
        value = metrics.mean(column[metric][m], weight)
        lows, highs = self._band(part, metric, np.array([value]))
        return value, float(lows[0]), float(highs[0])

    def _band(self, part: Slice, metric: str, y: Floats) -> tuple[Floats, Floats]:
        if metric not in ("accuracy", "think_rate"):
            return np.full(y.shape, np.nan), np.full(y.shape, np.nan)
        return share_band(y, part.effective, self.level)


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise CalibError(f"no curve of {metric!r}; there are: {', '.join(METRICS)}")

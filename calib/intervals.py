"""How sure each number is: an interval for every metric of a policy, and paired differences between policies.

Exact where the questions are independent and count the same (Clopper-Pearson for shares, order statistics for
percentiles), else a bootstrap that draws whole groups. Every reported interval has two sides at the same level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from calib import exact, metrics
from calib.outcomes import Outcomes
from calib.policy import Cost, Decisions, evaluate_decisions
from calib.risk import capacities, independent
from calib.target import METRICS

__all__ = ["Comparison", "Interval", "bootstrap_interval", "compare", "difference", "intervals"]

Floats = NDArray[np.float64]

RESAMPLES = 2000
_CHUNK = 2_000_000  # numbers drawn at a time: 16 MB
_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


class Interval(NamedTuple):
    """A value with its interval; NaN or infinite ends where the data say nothing about that side."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """``{"value": ..., "interval": [low, high]}`` with None for what is not finite."""
        value, low, high = (x if math.isfinite(x) else None for x in self)
        return {"value": value, "interval": [low, high]}


def intervals(
    outcomes: Outcomes,
    decisions: Decisions,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    cost: Cost | None = None,
    names: Sequence[str] = METRICS,
) -> dict[str, Interval]:
    """Value and interval of metrics of what a policy did.

    Parameters
    ----------
    outcomes : Outcomes
        Held-out questions; on those that the policy was tuned on the intervals are optimistic.
    decisions : Decisions
    rng : numpy.random.Generator
    level : float, default 0.95
    resamples : int, default 2000
    cost : Cost, optional
        Prices of the metric ``cost``.
    names : sequence of str
        Metrics to give, all by default.

    Returns
    -------
    dict of str to Interval
        Skill takes the chance level as fixed. ECE uses the reflected bootstrap, since each resample adds to it, widened
        to hold the value. A share or a token mean on which every resample agrees gets the conservative bound instead
        of an interval of no width.
    """
    score = evaluate_decisions(outcomes, decisions, cost=cost)
    exactly = outcomes.unweighted and independent(outcomes)
    shares = {"accuracy": decisions.choice == outcomes.answer, "think_rate": decisions.thinks}
    found: dict[str, tuple[float, float]] = {}
    if exactly:
        for name, event in shares.items():
            found[name] = exact.clopper_pearson(int(event.sum()), outcomes.n, level)
        for name in set(_PERCENTILES).intersection(names):
            low, high = exact.percentile_interval(decisions.latency, _PERCENTILES[name], level)
            found[name] = max(low, 0.0) if low < 0 else low, high
    wanted = {"accuracy" if name == "skill" else name for name in names} - set(found)
    if wanted:
        replicates = _replicates(outcomes, decisions, cost, wanted, rng, resamples)
        tails = (1 - level) / 2, (1 + level) / 2
        for name, values in replicates.items():
            found[name] = _quantiles(values, tails)
        if "ece" in found:
            low, high = found["ece"]
            found["ece"] = max(0.0, min(2 * score.ece - high, score.ece)), max(2 * score.ece - low, score.ece)
        most = float(outcomes.budgets[-1]) if outcomes.budgets.size else 0.0
        losses = {name: event.astype(np.float64) for name, event in shares.items()}
        for name, loss, scale in (*((k, v, 1.0) for k, v in losses.items()), ("tokens", decisions.tokens, most)):
            if name in wanted and scale and found[name][0] == found[name][1] and (loss <= scale).all():
                total = float((loss / scale * outcomes.weight).sum())
                low, high = exact.bounded_interval(total, capacities(outcomes), level)
                found[name] = scale * low, scale * high
    if "accuracy" in found:
        chance = metrics.mean(1 / outcomes.n_options, outcomes.weight)
        low, high = ((a - chance) / (1 - chance) for a in found["accuracy"])
        found["skill"] = low, high
    return {name: Interval(getattr(score, name), *found[name]) for name in names}


def bootstrap_interval(
    numerator: ArrayLike,
    denominator: ArrayLike,
    group: ArrayLike,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Percentile interval of sum(numerator) / sum(denominator), drawing whole groups with replacement.

    Parameters
    ----------
    numerator, denominator : array_like of shape (N,)
        For a weighted mean weight * value and weight; for a paired difference weight * (a - b) and weight.
    group : array_like of int, shape (N,)
        Number of the group of each question, from 0.
    rng : numpy.random.Generator
    level : float, default 0.95
    resamples : int, default 2000

    Returns
    -------
    tuple of float
        NaN with fewer than two groups: one group says nothing about others.
    """
    top = np.asarray(numerator, dtype=np.float64)[:, None]
    return _ratio_intervals(top, denominator, group, rng, level, resamples)[0]


def _ratio_intervals(
    numerators: Floats,
    denominator: ArrayLike,
    group: ArrayLike,
    rng: np.random.Generator,
    level: float,
    resamples: int,
) -> list[tuple[float, float]]:
    """`bootstrap_interval` of each column of the numerators (N, K) on the same resamples."""
    sums = _by_group(np.column_stack([denominator, numerators]).astype(np.float64), np.asarray(group))
    drawn = np.concatenate([np.empty((0, sums.shape[1])), *(c @ sums for c in _counts(len(sums), resamples, rng))])
    tails = (1 - level) / 2, (1 + level) / 2
    return [_quantiles(_ratio(column, drawn[:, 0]), tails) for column in drawn[:, 1:].T]


@dataclass(frozen=True)
class Comparison:
    """One policy's accuracy minus another's on the same questions.

    Attributes
    ----------
    name : str
        The other policy.
    n : int
        Questions.
    difference, low, high : float
        Weighted difference of accuracy with its interval, paired by group; above 0: ours is better.
    gained, lost : int
        Questions that ours alone, and the other alone, answers right.
    p_value : float or None
        Exact McNemar test; None for weighted or grouped questions, for which it does not hold.
    level : float
    """

    name: str
    n: int
    difference: float
    low: float
    high: float
    gained: int
    lost: int
    p_value: float | None
    level: float

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves out 0 and the exact test, where it holds, agrees."""
        apart = self.low > 0 or self.high < 0
        return apart and (self.p_value is None or self.p_value <= 1 - self.level + 1e-12)

    @property
    def sentence(self) -> str:
        """What one may say about the two."""
        points = f"{100 * self.difference:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        if self.gained == self.lost == 0:
            return f"the same right answers as {self.name} on {self.n} questions: they cannot be told apart"
        if not self.distinguishable:
            apart = self.low > 0 or self.high < 0  # then the exact test is what says no
            test = f" (exact test p = {self.p_value:.2g})" if apart and self.p_value is not None else ""
            return f"{points} against {self.name}: they cannot be told apart on {self.n} questions{test}"
        return f"{points} against {self.name}: {'better' if self.difference > 0 else 'worse'} at {self.level:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        low, high = (x if math.isfinite(x) else None for x in (self.low, self.high))
        return {
            "name": self.name,
            "n": self.n,
            "difference": self.difference,
            "interval": [low, high],
            "gained": self.gained,
            "lost": self.lost,
            "p_value": self.p_value,
            "distinguishable": self.distinguishable,
            "sentence": self.sentence,
        }


def compare(
    outcomes: Outcomes,
    ours: Decisions,
    others: Mapping[str, Decisions],
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> dict[str, Comparison]:
    """Accuracy of one policy minus that of each other on the same questions, by name."""
    right = ours.choice == outcomes.answer
    theirs = {name: other.choice == outcomes.answer for name, other in others.items()}
    if not theirs:
        return {}
    weight, exactly = outcomes.weight, outcomes.unweighted and independent(outcomes)
    changes = weight[:, None] * np.column_stack([right.astype(np.float64) - other for other in theirs.values()])
    ends = _ratio_intervals(changes, weight, outcomes.group_codes, rng, level, resamples)
    found = {}
    for (name, other), change, (low, high) in zip(theirs.items(), changes.T, ends, strict=True):
        gained, lost = int((right & ~other).sum()), int((other & ~right).sum())
        p = exact.mcnemar(gained, lost) if exactly else None
        difference = float(change.sum() / weight.sum())
        found[name] = Comparison(name, outcomes.n, difference, low, high, gained, lost, p, level)
    return found


def difference(
    outcomes: Outcomes,
    ours: Decisions,
    other: Decisions,
    metric: str,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    cost: Cost | None = None,
) -> Interval:
    """Any metric of one policy minus that of another on the same questions, each resample scored under both.

    Skill takes the chance level as fixed. ECE adds to itself with each resample, but to both policies alike.
    """
    scores = [getattr(evaluate_decisions(outcomes, d, cost=cost), metric) for d in (ours, other)]
    name, scale = metric, 1.0
    if metric == "skill":
        name, scale = "accuracy", 1 / (1 - metrics.mean(1 / outcomes.n_options, outcomes.weight))
    seed = int(rng.integers(2**63))
    first, second = (
        _replicates(outcomes, d, cost, {name}, np.random.default_rng(seed), resamples)[name] for d in (ours, other)
    )
    with np.errstate(invalid="ignore"):  # two infinite ones have no known difference
        low, high = _quantiles(scale * (first - second), ((1 - level) / 2, (1 + level) / 2))
        return Interval(float(np.subtract(*scores)), low, high)


def _counts(groups: int, resamples: int, rng: np.random.Generator) -> Iterator[Floats]:
    """How often each group is drawn in each resample, in chunks of shape (resamples, groups); none below 2 groups."""
    step = max(1, _CHUNK // max(1, groups))
    for start in range(0, resamples if groups > 1 else 0, step):
        rows = min(step, resamples - start)
        draw = rng.integers(groups, size=(rows, groups))
        draw += groups * np.arange(rows)[:, None]
        yield np.bincount(draw.ravel(), minlength=rows * groups).reshape(rows, groups).astype(np.float64)


def _replicates(
    outcomes: Outcomes,
    decisions: Decisions,
    cost: Cost | None,
    wanted: set[str],
    rng: np.random.Generator,
    resamples: int,
) -> dict[str, Floats]:
    """Each wanted metric on each resample, shape (resamples,)."""
    codes, groups = outcomes.group_codes, int(outcomes.group_codes.max()) + 1
    collected: dict[str, list[Floats]] = {name: [np.empty(0)] for name in wanted}
    recipe = _Recipe(outcomes, decisions, cost, wanted)
    for counts in _counts(groups, resamples, rng):
        for name, values in recipe.metrics(counts, codes).items():
            collected[name].append(values)
    return {name: np.concatenate(parts) for name, parts in collected.items()}


class _Recipe:
    """Sums over groups from which the metrics of any resample follow by matrix products."""

    def __init__(self, outcomes: Outcomes, decisions: Decisions, cost: Cost | None, wanted: set[str]) -> None:
        codes, w = outcomes.group_codes, outcomes.weight
        right = decisions.choice == outcomes.answer
        given = np.asarray(~np.isnan(decisions.p).any(axis=1))
        p = np.where(given[:, None], decisions.p, 0.0)
        truth = np.take_along_axis(p, outcomes.answer[:, None], 1)[:, 0]
        columns: dict[str, tuple[Floats, Floats]] = {
            "accuracy": (w * right, w),
            "think_rate": (w * decisions.thinks, w),
            "tokens": (w * decisions.tokens, w),
            "mean": (w * decisions.latency, w),
            "cost": (w * (cost.of(right, decisions.latency, decisions.tokens) if cost else np.nan), w),
            "brier": (w * given * ((p * p).sum(1) - 2 * truth + 1), w * given),
            "nll": (w * given * -np.log(np.maximum(truth, metrics.NLL_CLIP)), w * given),
        }
        self.means = [name for name in columns if name in wanted]
        self.numerators = _by_group(np.column_stack([w, *(columns[name][0] for name in self.means)]), codes)
        self.denominators = _by_group(np.column_stack([w, *(columns[name][1] for name in self.means)]), codes)
        self.bins = _bin_sums(p, right, given, w, codes) if "ece" in wanted else None
        self.labels = _label_sums(outcomes, decisions, codes) if "macro_f1" in wanted else None
        self.percentiles = [name for name in _PERCENTILES if name in wanted]
        self.latency, self.weight = decisions.latency, w

    def metrics(self, counts: Floats, codes: NDArray[np.int64]) -> dict[str, Floats]:
        """Metrics of resamples in which groups are drawn this often, shape (resamples, groups)."""
        with np.errstate(invalid="ignore"):  # 0 * infinity: the mean of a censored latency has no interval
            ratio = _ratio(counts @ self.numerators, counts @ self.denominators)
        found = {name: ratio[:, 1 + i] for i, name in enumerate(self.means)}
        if self.bins is not None:
            weight, sure, hit = np.split(_product(counts, self.bins), 3, axis=1)
            found["ece"] = _ratio(np.abs(sure - hit).sum(1), weight.sum(1))
        if self.labels is not None:
            support, chosen, hit = np.split(_product(counts, self.labels), 3, axis=1)
            seen = (support > 0) | (chosen > 0)
            f1 = np.where(seen, _ratio(2 * hit, support + chosen), 0.0)
            found["macro_f1"] = _ratio(f1.sum(1), seen.sum(1).astype(np.float64))
        if self.percentiles:
            found |= self._latency_percentiles(counts, codes)
        return found

    def _latency_percentiles(self, counts: Floats, codes: NDArray[np.int64]) -> dict[str, Floats]:
        if np.isnan(self.latency).any():
            return {name: np.full(len(counts), np.nan) for name in self.percentiles}
        order = np.argsort(self.latency, kind="stable")
        ordered, w, who = self.latency[order], self.weight[order], codes[order]
        found = {name: np.empty(len(counts)) for name in self.percentiles}
        for i, row in enumerate(counts):
            total = np.cumsum(row[who] * w)
            for name in self.percentiles:
                at = np.searchsorted(total, _PERCENTILES[name] / 100 * total[-1] * (1 - 1e-12), side="left")
                found[name][i] = ordered[min(int(at), len(ordered) - 1)]
        return found


def _bin_sums(
    p: Floats, right: NDArray[np.bool_], given: NDArray[np.bool_], w: Floats, codes: NDArray[np.int64]
) -> sparse.csr_matrix:
    """Weight, summed confidence and summed right answers of each group in each ECE bin, shape (G, 3 * bins)."""
    top = p[given].max(axis=1, initial=0.0)
    edges = np.linspace(0, 1, metrics.ECE_BINS + 1)
    k = np.clip(np.searchsorted(edges, top, side="left") - 1, 0, metrics.ECE_BINS - 1)
    values = np.concatenate([w[given], w[given] * top, w[given] * right[given]])
    at = np.concatenate([k + j * metrics.ECE_BINS for j in range(3)])
    return _sparse(values, np.tile(codes[given], 3), at, int(codes.max()) + 1, 3 * metrics.ECE_BINS)


def _label_sums(outcomes: Outcomes, decisions: Decisions, codes: NDArray[np.int64]) -> sparse.csr_matrix:
    """Support, choices and hits of each group for each label, shape (G, 3 * labels).

    Zeros, which give NaN, where some question has no fixed label set.
    """
    if (outcomes.label_set < 0).any():
        return sparse.csr_matrix((int(codes.max()) + 1, 3))
    answered = decisions.choice >= 0
    place = outcomes.label_set * outcomes.p1.shape[1]
    _, label = np.unique(
        np.concatenate([place + outcomes.answer, (place + decisions.choice)[answered]]), return_inverse=True
    )
    true, picked = label[: outcomes.n], label[outcomes.n :]
    hit = np.flatnonzero(answered)[picked == true[answered]]
    labels, w = int(label.max()) + 1, outcomes.weight
    return _sparse(
        np.concatenate([w, w[answered], w[hit]]),
        np.concatenate([codes, codes[answered], codes[hit]]),
        np.concatenate([true, picked + labels, true[hit] + 2 * labels]),
        int(codes.max()) + 1,
        3 * labels,
    )


def _sparse(
    values: Floats, rows: NDArray[np.int64], columns: NDArray[np.int64], n_rows: int, n_columns: int
) -> sparse.csr_matrix:
    return sparse.csr_matrix((values, (rows, columns)), shape=(n_rows, n_columns))  # repeated places add up


def _product(counts: Floats, sums: sparse.csr_matrix) -> Floats:
    return np.asarray((sums.T @ counts.T).T)


def _by_group(columns: Floats, codes: NDArray[np.int64]) -> Floats:
    """Sums of columns (N, K) over the questions of each group, shape (G, K)."""
    return np.column_stack([np.bincount(codes, column) for column in columns.T])


def _ratio(top: Floats, bottom: Floats) -> Floats:
    out: Floats = np.full(np.shape(top), np.nan)
    return np.asarray(np.divide(top, bottom, out=out, where=bottom > 0))


def _quantiles(values: Floats, tails: tuple[float, float]) -> tuple[float, float]:
    """Ends of a percentile interval, observed values so that infinite ones do no harm; NaN without any."""
    known = values[~np.isnan(values)]
    if not known.size:
        return math.nan, math.nan
    low, high = np.quantile(known, tails, method="inverted_cdf")
    return float(low), float(high)

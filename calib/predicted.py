"""Predicted beside measured: what `decide` says of stored outcomes against what a client got for the same questions.

Pure: arrays in, lines and reasons out. Each comparison is paired by question, so that the luck of drawing questions
cancels. Leaves to others: asking (`calib.verify`), exact tests of targets (`calib.certify`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from calib import exact, metrics
from calib.intervals import RESAMPLES, Interval, bootstrap_interval, intervals
from calib.outcomes import Outcomes
from calib.policy import Decisions, Policy, confidence
from calib.risk import independent

__all__ = [
    "REASONS",
    "Difference",
    "Line",
    "Measured",
    "Obedience",
    "budgets_kept",
    "deadline_kept",
    "differences",
    "lines",
    "paired_percentile",
    "shift_of_p1",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_Two = tuple[Interval, Interval]  # predicted, measured

DEADLINE_GRACE = 0.2
"""Seconds after a deadline that an answer may still take to arrive."""

_PERCENTILES = ("p50", "p90", "p99")
_EQUAL = 1e-9
"""Relative distance of two seconds that are the same: a server adds its parts in another order than we do."""
_ROUNDING = 1e-6
"""Distance of two probabilities or thresholds that are the same."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What a plain client got for N questions, in the order of their outcomes.

    Attributes
    ----------
    p : ndarray of shape (N, C)
        Final distribution; a row of NaN without a usable answer.
    thinks, closed, degraded : ndarray of bool, shape (N,)
        As the server told.
    tokens : ndarray of shape (N,)
    latency : ndarray of shape (N,)
        Seconds until the usable answer; infinite without one: however long one waits, none comes.
    spent : ndarray of shape (N,)
        Seconds from sending the request until its answer, or until it was given up.
    threshold, budget : ndarray of shape (N,)
        Under which the server says it decided; NaN where it does not tell.
    version, failure : ndarray of object, shape (N,)
        Policy version of the answer, and why there is none; None.
    """

    p: Floats
    thinks: Bools
    closed: Bools
    degraded: Bools
    tokens: Floats
    latency: Floats
    spent: Floats
    threshold: Floats
    budget: Floats
    version: NDArray[np.object_]
    failure: NDArray[np.object_]

    @property
    def failed(self) -> Bools:
        """Whether a question got no usable answer, shape (N,)."""
        return np.array([reason is not None for reason in self.failure], dtype=bool)

    def decisions(self, predicted: Decisions) -> Decisions:
        """As a policy's decisions.

        Nobody knows whether a request that failed was thought about: there it counts as predicted.
        """
        failed = self.failed
        return Decisions(
            p=self.p,
            thinks=np.where(failed, predicted.thinks, self.thinks),
            latency=self.latency,
            tokens=np.where(failed, predicted.tokens, self.tokens),
            closed=self.closed,
            degraded=self.degraded,
        )


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One metric, predicted beside measured.

    Attributes
    ----------
    metric : str
    predicted, measured : Interval
        Each with its own interval, about new questions.
    difference : Interval
        Measured less predicted on the same questions, paired; of seconds and tokens a share of the predicted value.
        All lines of a run hold together at the level.
    relative : bool
        Whether the difference is a share of the predicted value.
    same : bool or None
        Whether the difference may be chance; None where nothing is predicted.
    verdict : str
        The same in words.
    """

    metric: str
    predicted: Interval
    measured: Interval
    difference: Interval
    relative: bool
    same: bool | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, None for what is not finite."""
        return {
            "metric": self.metric,
            "predicted": self.predicted.to_dict(),
            "measured": self.measured.to_dict(),
            "difference": self.difference.to_dict(),
            "relative": self.relative,
            "same": self.same,
            "verdict": self.verdict,
        }


_WORDS = {
    "accuracy": ("higher", "lower"),
    "think_rate": ("thinks more often", "thinks less often"),
    "tokens": ("more tokens", "fewer tokens"),
    "closed": ("closes more thoughts", "closes fewer thoughts"),
    "degraded": ("degrades more answers", "degrades fewer answers"),
}
_AS_PREDICTED = "as predicted"
_ON_EACH = "as predicted, on every question"
_NO_PREDICTION = "not predicted: its seconds are not known at this load"


def lines(
    outcomes: Outcomes,
    predicted: Decisions,
    measured: Decisions,
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> tuple[Line, ...]:
    """Accuracy, think rate, tokens, p50, p90, p99, and where there are any, thoughts closed and answers degraded.

    Parameters
    ----------
    outcomes : Outcomes
        Of the questions that were asked.
    predicted, measured : Decisions
        Of the same questions in the same order.
    rng : numpy.random.Generator
    level : float, default 0.95
        Of each interval, and of all differences together.
    resamples : int
    """
    o = outcomes
    events = {
        "accuracy": (predicted.choice == o.answer, measured.choice == o.answer),
        "think_rate": (predicted.thinks, measured.thinks),
        "closed": (predicted.closed, measured.closed),
        "degraded": (predicted.degraded, measured.degraded),
    }
    shown = ["accuracy", "think_rate", "tokens", *_PERCENTILES]
    extra = [name for name in ("closed", "degraded") if events[name][0].any() or events[name][1].any()]
    apart = 1 - (1 - level) / (len(shown) + len(extra))
    known = [intervals(o, d, rng=rng, level=level, resamples=resamples, names=shown) for d in (predicted, measured)]
    found = []
    for name in (*shown, *extra):
        if name in extra:
            before, after = events[name]
            two = _share(before, o, rng, level, resamples), _share(after, o, rng, level, resamples)
        else:
            two = known[0][name], known[1][name]
        if name in events:
            found.append(_share_line(name, two, events[name], o, rng, apart, resamples))
        elif name == "tokens":
            found.append(_tokens_line(two, predicted.tokens, measured.tokens, o, rng, apart, resamples))
        else:
            found.append(_percentile_line(name, two, predicted.latency, measured, o, rng, apart, resamples))
    return tuple(found)


def _share(event: Bools, o: Outcomes, rng: np.random.Generator, level: float, resamples: int) -> Interval:
    value = metrics.mean(event, o.weight)
    if o.unweighted and independent(o):
        return Interval(value, *exact.clopper_pearson(int(event.sum()), o.n, level))
    ends = bootstrap_interval(o.weight * event, o.weight, o.group_codes, rng=rng, level=level, resamples=resamples)
    return Interval(value, *ends)


def _paired(
    before: ArrayLike, after: ArrayLike, o: Outcomes, rng: np.random.Generator, level: float, resamples: int
) -> Interval:
    """Mean of after less before, drawn by group."""
    change = o.weight * (np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64))
    ends = bootstrap_interval(change, o.weight, o.group_codes, rng=rng, level=level, resamples=resamples)
    return Interval(float(change.sum() / o.weight.sum()), *ends)


def _share_line(
    name: str,
    two: _Two,
    events: tuple[Bools, Bools],
    o: Outcomes,
    rng: np.random.Generator,
    level: float,
    resamples: int,
) -> Line:
    before, after = events
    change = _paired(before, after, o, rng, level, resamples)
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    apart = change.low > 0 or change.high < 0
    if o.unweighted and independent(o):
        apart = apart and exact.mcnemar(gained, lost) <= 1 - level
    verdict = _ON_EACH if gained == lost == 0 else _AS_PREDICTED
    if apart:
        value, low, high = (100 * end for end in change)
        word = _WORDS[name][value < 0]
        verdict = f"{word} than predicted by {abs(value):.1f} points (interval {low:+.1f} to {high:+.1f})"
    return Line(name, *two, change, False, not apart, verdict)


def _tokens_line(
    two: _Two,
    before: Floats,
    after: Floats,
    o: Outcomes,
    rng: np.random.Generator,
    level: float,
    resamples: int,
) -> Line:
    # a server counts whole tokens; what is predicted of a thought that a deadline closes may lie between two
    after = np.where(np.abs(after - before) < 1, before, after)
    change = _paired(before, after, o, rng, level, resamples)
    apart = change.low > 0 or change.high < 0
    base = two[0].value
    relative = Interval(*(end / base if base else math.nan for end in change))
    verdict = _ON_EACH if (before == after).all() else _AS_PREDICTED
    if apart:
        word = _WORDS["tokens"][change.value < 0]
        by = f"{abs(change.value):,.0f} a question" if not base else _by(relative)
        verdict = f"{word} than predicted by {by}"
    return Line("tokens", *two, relative, True, not apart, verdict)


def _percentile_line(
    name: str,
    two: _Two,
    before: Floats,
    measured: Decisions,
    o: Outcomes,
    rng: np.random.Generator,
    level: float,
    resamples: int,
) -> Line:
    base = two[0].value
    if math.isnan(base) or not base > 0:
        return Line(name, *two, Interval(math.nan, math.nan, math.nan), True, None, _NO_PREDICTION)
    if o.unweighted and independent(o):
        value, low, high = paired_percentile(before, measured.latency, float(name[1:]), level)
    else:  # the pairs of a group are not exchangeable one by one
        value, low, high = intervals(o, measured, rng=rng, level=level, resamples=resamples, names=[name])[name]
    same = low <= base * (1 + _EQUAL) and base <= high * (1 + _EQUAL)
    change = Interval(*(end / base - 1 for end in (value, low, high)))
    if np.allclose(before, measured.latency, rtol=_EQUAL, atol=0):
        verdict = _ON_EACH
    elif same:
        verdict = _AS_PREDICTED
    elif math.isinf(value):
        verdict = f"slower than predicted without end: more than {100 - float(name[1:]):g} % got no answer"
    else:
        verdict = f"{'slower' if value > base else 'faster'} than predicted by {_by(change)}"
    return Line(name, *two, change, True, same, verdict)


def _by(change: Interval) -> str:
    value, low, high = (100 * end for end in change)
    ends = f"{low:+.0f} %" if math.isinf(high) else f"{low:+.0f} % to {high:+.0f} %"
    return f"{abs(value):.0f} % (interval {'from ' if math.isinf(high) else ''}{ends})"


def paired_percentile(before: ArrayLike, after: ArrayLike, q: float, level: float = 0.95) -> Interval:
    """Percentile of ``after``, with the values m that the same questions do not rule out for it.

    A value m stands when as many questions may lie above it afterwards as lay above the percentile before: questions
    that are above on one side only decide by an exact McNemar test, questions above on both sides cancel. The ends are
    order statistics of ``after``.

    Parameters
    ----------
    before, after : array_like of shape (N,)
        Seconds of the same independent questions, none NaN.
    q : float
        Percentage.
    level : float, default 0.95
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    above = first > metrics.percentile(first, q) * (1 + _EQUAL)
    order = np.argsort(second, kind="stable")
    x, n = second[order], second.size
    passed = np.arange(n + 1)  # how many of the values after lie at or below m
    kept = np.concatenate([[0], np.cumsum(above[order])])  # of these, how many were above before
    lost, gained = kept, int((~above).sum()) - (passed - kept)
    p = np.minimum(1.0, 2 * special.bdtr(np.minimum(lost, gained), lost + gained, 0.5))
    block = np.concatenate([[True], x[1:] > x[:-1], [True]])  # no m lies between equal values
    stands = np.flatnonzero(block & (p > 1 - level))
    value = metrics.percentile(second, q)
    if not stands.size:  # ties so large that no value has as many above it
        return Interval(value, value, value)
    low, high = int(stands[0]), int(stands[-1])
    return Interval(value, float(x[low - 1]) if low else 0.0, float(x[high]) if high < n else math.inf)


# --- is the server doing what the policy says -------------------------------------------------------------------------


@dataclass(frozen=True)
class Obedience:
    """How many answers broke a rule, and by how much at worst.

    Attributes
    ----------
    n, broken : int
        Answers that the rule is about; those that break it.
    worst : float
        Largest excess over the limit, tokens or seconds; 0 when none breaks it.
    examples : tuple of str
        ``dataset/id`` of the worst few.
    """

    n: int
    broken: int
    worst: float
    examples: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"n": self.n, "broken": self.broken, "worst": self.worst, "examples": list(self.examples)}


def budgets_kept(outcomes: Outcomes, policy: Policy, measured: Measured) -> Obedience:
    """Whether no thought is longer than the policy's think budget."""
    return _kept(outcomes, measured.thinks & ~measured.failed, measured.tokens - _rules(outcomes, policy).budget)


def deadline_kept(outcomes: Outcomes, deadline: float, measured: Measured, *, own: Floats | None = None) -> Obedience:
    """Whether no answer came later than the deadline and `DEADLINE_GRACE`; ``own`` are a simulated server's seconds."""
    spent = measured.spent if own is None else own
    return _kept(outcomes, ~measured.failed, spent - deadline - DEADLINE_GRACE)


def _kept(o: Outcomes, about: Bools, excess: Floats, most: int = 3) -> Obedience:
    over = np.where(about, excess, 0.0)
    worst = [int(i) for i in np.argsort(-over, kind="stable")[:most] if over[i] > 0]
    return Obedience(
        int(about.sum()), int((over > 0).sum()), max(0.0, float(over.max())), tuple(_name(o, i) for i in worst)
    )


def _name(o: Outcomes, i: int) -> str:
    return f"{o.dataset[i]}/{o.ids[i]}"


@dataclass(frozen=True, eq=False)
class _Rules:
    """Threshold, budget and confidence of each question under the policy's routes, shape (N,)."""

    threshold: Floats
    budget: Floats
    confidence: Floats


def _rules(o: Outcomes, policy: Policy) -> _Rules:
    threshold, budget, sure = np.empty(o.n), np.empty(o.n), np.empty(o.n)
    for part, mask in policy.parts(o):
        if not mask.any():
            continue
        threshold[mask], budget[mask] = part.threshold, part.think_budget
        p = part.alone(o.p1[mask], kind=o.kind[mask], n_options=o.n_options[mask])
        sure[mask] = confidence(p, part.confidence, o.n_options[mask])
    return _Rules(threshold, budget, sure)


# --- decisions that differ, and why -----------------------------------------------------------------------------------

REASONS = {
    "failed": "no usable answer",
    "degraded": "System 1's answer stood in for System 2",
    "other_version": "the server decided under another policy",
    "other_threshold": "the server decided by another threshold",
    "other_budget": "the server thought under another budget",
    "p1_crossed": "System 1's confidence moved across the threshold",
    "closed": "the deadline closed the thought elsewhere",
    "other_thought": "the thought was another one",
    "other_p2": "System 2 reads the same length of thought differently",
    "other_p1": "System 1 answers differently",
}
"""Why a decision is not the predicted one; the first that applies is given."""


@dataclass(frozen=True)
class Difference:
    """A question that was answered, or thought about, differently than predicted.

    Attributes
    ----------
    index : int
        Its place among the outcomes.
    name : str
        ``dataset/id``.
    reason, detail : str
        One of `REASONS`; by how much.
    answers, thinks : tuple of int, tuple of bool
        Predicted, measured; -1 without an answer.
    """

    index: int
    name: str
    reason: str
    detail: str
    answers: tuple[int, int]
    thinks: tuple[bool, bool]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "question": self.name,
            "reason": self.reason,
            "detail": self.detail,
            "answer": list(self.answers),
            "think": list(self.thinks),
        }


def differences(
    outcomes: Outcomes, policy: Policy, predicted: Decisions, measured: Measured, *, version: str | None = None
) -> tuple[Difference, ...]:
    """Every question whose answer, or whether it is thought about, is not the predicted one.

    Parameters
    ----------
    outcomes, policy, predicted
        What the prediction rests on.
    measured : Measured
    version : str, optional
        Of the policy, as its server would name it.
    """
    rules = _rules(outcomes, policy)
    got, expected, failed = metrics.chosen(measured.p), predicted.choice, measured.failed
    changed = (got != expected) | (~failed & (measured.thinks != predicted.thinks))
    found = []
    for i in np.flatnonzero(changed).tolist():
        reason, detail = _why(i, outcomes, policy, rules, predicted, measured, version)
        thinks = bool(predicted.thinks[i]), bool(measured.thinks[i])
        answers = int(expected[i]), int(got[i])
        found.append(Difference(i, _name(outcomes, i), reason, detail, answers, thinks))
    return tuple(found)


def _why(
    i: int,
    o: Outcomes,
    policy: Policy,
    rules: _Rules,
    predicted: Decisions,
    measured: Measured,
    version: str | None,
) -> tuple[str, str]:
    told = measured.version[i]
    if measured.failure[i] is not None:
        return "failed", str(measured.failure[i])
    if measured.degraded[i] and not predicted.degraded[i]:
        return "degraded", "System 2 failed or was late"
    if version is not None and told is not None and told != version:
        return "other_version", f"version {told} instead of {version}"
    threshold, budget = float(measured.threshold[i]), float(measured.budget[i])
    if abs(threshold - rules.threshold[i]) > _ROUNDING:  # NaN, which is not told, differs from nothing
        return "other_threshold", f"{threshold:.6g} instead of {rules.threshold[i]:.6g}"
    off = float(np.abs(measured.p[i] - predicted.p[i]).max())
    if measured.thinks[i] != predicted.thinks[i]:
        return "p1_crossed", _crossing(i, o, policy, rules, measured)
    if not measured.thinks[i]:
        return "other_p1", f"probabilities up to {off:.3g} apart"
    if abs(budget - rules.budget[i]) > _ROUNDING and measured.tokens[i] != predicted.tokens[i]:
        return "other_budget", f"{budget:,.0f} tokens instead of {rules.budget[i]:,.0f}"
    lengths = f"{measured.tokens[i]:,.0f} tokens instead of {predicted.tokens[i]:,.0f}"
    if measured.closed[i] != predicted.closed[i] or (measured.closed[i] and measured.tokens[i] != predicted.tokens[i]):
        return "closed", lengths
    if measured.tokens[i] != predicted.tokens[i]:
        return "other_thought", lengths
    return "other_p2", f"probabilities up to {off:.3g} apart after {measured.tokens[i]:,.0f} tokens"


def _crossing(i: int, o: Outcomes, policy: Policy, rules: _Rules, measured: Measured) -> str:
    """By how much; the confidence of a question that was thought about is not told to a plain client."""
    stored, limit = float(rules.confidence[i]), float(rules.threshold[i])
    if measured.thinks[i]:
        return f"stored {stored:.6f}, {stored - limit:.2g} above the threshold {limit:.6f}; the server's is below it"
    now = float(confidence(measured.p[i, : o.n_options[i]], policy.confidence))
    return f"from {stored:.6f} to {now:.6f} ({now - stored:+.2g}), across the threshold {limit:.6f}"


def shift_of_p1(predicted: Decisions, measured: Measured) -> Mapping[str, float | int | None]:
    """How far the answers without thinking are from the stored ones: many, a median, the most (None without any)."""
    alone = ~predicted.thinks & ~measured.thinks & ~measured.failed & ~measured.degraded
    off = np.abs(measured.p - predicted.p).max(axis=1)[alone]
    if not off.size:
        return {"n": 0, "median": None, "most": None}
    return {"n": int(off.size), "median": float(np.median(off)), "most": float(off.max())}


def counted(found: Sequence[Difference]) -> dict[str, int]:
    """How many differ for each reason, most frequent first."""
    return dict(Counter(one.reason for one in found).most_common())

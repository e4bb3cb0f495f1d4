"""A target restated as a share of questions that break it: `p90<10s` says that at most 10 % take 10 s or longer.

With that, accuracy, think rate and latency percentiles are one kind of risk, which exact tests certify and which a
search can be held to more strictly than the target asks: `auto_margin`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from calib import exact, metrics
from calib.outcomes import Outcomes
from calib.policy import Cost, Decisions, Policy
from calib.target import Target

__all__ = [
    "SHARE_METRICS",
    "Requirement",
    "Risk",
    "Untestable",
    "auto_margin",
    "capacities",
    "independent",
    "restate",
    "share_limit",
    "split_selector",
    "violation_share",
    "violations",
]

Floats = NDArray[np.float64]

_BEYOND = {"p50": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01}
SHARE_METRICS = ("accuracy", "skill", "think_rate", *_BEYOND)
"""Metrics whose targets limit the share of questions that break something."""

_HOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_NEVER = {
    "ece": "ece is not a mean over questions, so no exact test of it exists",
    "brier": "brier leaves out questions without a usable answer, so it is no mean over all questions to be tested",
    "nll": "nll has no useful largest value and leaves out questions without a usable answer, so no bound on it helps",
    "macro_f1": "macro_f1 is a mean of ratios over labels, not over questions, so no exact test of it exists",
    "mean": "seconds have no largest value known in advance, so no bound on their mean is valid; "
    "limit a percentile, or serve with a deadline",
}


def independent(outcomes: Outcomes) -> bool:
    """Whether every question is its own group."""
    return int(outcomes.group_codes.max()) + 1 == outcomes.n


def share_limit(target: Target, outcomes: Outcomes) -> float:
    """Largest share of questions that may break the target, see `violations`.

    Skill takes the chance level of these questions as fixed: it is then a limit on accuracy.
    """
    if target.metric in _BEYOND:
        return _BEYOND[target.metric] if target.upper else round(1 - _BEYOND[target.metric], 12)
    value = target.value
    if target.metric == "skill":
        chance = metrics.mean(1 / outcomes.n_options, outcomes.weight)
        value = chance + value * (1 - chance)
    return round(value if target.upper else 1 - value, 12)  # 1 - 0.83 must not be 0.17000000000000004


def violations(target: Target, outcomes: Outcomes, decisions: Decisions) -> NDArray[np.bool_]:
    """True for each question that counts against the target, shape (N,); its dataset selector is not applied.

    Latency percentiles: the seconds do not keep the limit (equality breaks ``<`` and keeps ``<=``; an unknown latency
    breaks every limit). Accuracy and skill: wrong for a limit from below. Think rate: thinks for a limit from above.
    """
    if target.metric in _BEYOND:
        return ~np.asarray(_HOLDS[target.op](decisions.latency, target.value), dtype=bool)
    event = decisions.thinks if target.metric == "think_rate" else decisions.choice == outcomes.answer
    return np.asarray(event if target.upper else ~event)


def violation_share(target: Target, outcomes: Outcomes, decisions: Decisions) -> float:
    """Weighted share of the target's questions (its dataset, or all) that count against it; not for ``worst``."""
    broken, w = violations(target, outcomes, decisions), outcomes.weight
    if target.dataset is not None:
        inside = outcomes.dataset == target.dataset
        broken, w = broken[inside], w[inside]
    return metrics.mean(broken, w)


def split_selector(
    target: Target, outcomes: Outcomes, datasets: Sequence[str] = ()
) -> Iterator[tuple[Target, NDArray[np.int64]]]:
    """The target on each set of questions in which it must hold, with their positions.

    Parameters
    ----------
    target : Target
    outcomes : Outcomes
    datasets : sequence of str
        Datasets that ``worst`` means besides those of the outcomes; no question of them is here.
    """
    if target.worst:
        names: Sequence[str] = sorted({*outcomes.dataset_names, *datasets})
    elif target.dataset is not None:
        names = [target.dataset]
    else:
        yield target, np.arange(outcomes.n)
        return
    for name in names:
        yield replace(target, worst=False, dataset=name), np.flatnonzero(outcomes.dataset == name)


@dataclass(frozen=True, eq=False)
class Risk:
    """A target on its questions: the mean loss must not exceed the limit.

    Attributes
    ----------
    loss : ndarray of shape (N,)
        0 to 1 for each question.
    limit : float
        Largest mean that the target allows; as a share of the bound for means and tokens.
    strict : bool
        Whether equality breaks the target.
    binary : bool
        Whether a loss is 0 or 1.
    """

    loss: Floats
    limit: float
    strict: bool
    binary: bool

    @property
    def always_holds(self) -> bool:
        """Whether no question could break the target."""
        return self.limit > 1 or (self.limit == 1 and not self.strict)


@dataclass(frozen=True)
class Untestable:
    """Why no test can certify a target."""

    reason: str


def restate(
    target: Target,
    outcomes: Outcomes,
    policy: Policy,
    decisions: Decisions,
    *,
    cost: Cost | None = None,
    deadline: float | None = None,
) -> Risk | Untestable:
    """The target as a mean of losses between 0 and 1, or why there is none. Selectors are applied before.

    Parameters
    ----------
    target, outcomes, policy, decisions
        Target on all these questions, and what the policy did with them.
    cost : Cost, optional
        Prices of the metric ``cost``.
    deadline : float, optional
        Seconds after which the gateway answers at the latest: the bound that a mean latency needs.
    """
    strict = target.op in ("<", ">")
    if target.metric in ("ece", "brier", "nll", "macro_f1"):
        return Untestable(_NEVER[target.metric])
    priced = target.metric == "cost" and cost is not None and cost.second > 0
    if (target.is_latency or priced) and np.isnan(decisions.latency).any():
        return Untestable("the latency of some questions is unknown")
    if target.metric in SHARE_METRICS:
        broken = violations(target, outcomes, decisions).astype(np.float64)
        if target.metric in _BEYOND:
            strict = not target.upper  # p90 < 10 s holds at exactly 10 %, p90 > 10 s does not at exactly 90 %
        return Risk(broken, share_limit(target, outcomes), strict, binary=True)
    budget = float(max(part.think_budget for part, _ in policy.parts(outcomes)))
    if target.metric == "tokens":
        return _bounded(target, decisions.tokens, budget, strict)
    if (target.metric == "mean" or priced) and deadline is None:
        return Untestable(_NEVER["mean"])
    if target.metric == "mean":
        return _bounded(target, decisions.latency, float(deadline or 0), strict)
    if cost is None:
        return Untestable("the metric cost needs prices: --cost wrong=1,second=0.01")
    right = decisions.choice == outcomes.answer
    most = cost.wrong + cost.token * budget + (cost.second * float(deadline or 0) if priced else 0.0)
    return _bounded(target, cost.of(right, decisions.latency, decisions.tokens), most, strict)


def _bounded(target: Target, values: Floats, most: float, strict: bool) -> Risk | Untestable:
    if most <= 0 or (values > most * (1 + 1e-9)).any():
        return Untestable(f"some values of {target.metric} exceed the bound {most:g} that a test needs")
    loss, limit = np.minimum(values / most, 1.0), target.value / most
    return Risk(loss, limit, strict, False) if target.upper else Risk(1 - loss, 1 - limit, strict, False)


@dataclass(frozen=True)
class Requirement:
    """A target with a margin: what a policy must keep on the tune questions so that a certificate is likely.

    Attributes
    ----------
    target : Target
        Where a target says ``worst``, one requirement for each dataset names it.
    limit : float
        Largest share of questions that the target itself lets break it.
    max_share : float
        Largest share on the tune questions that leaves the margin; the limit when no margin can help.
    power : float
        Chance that a policy which breaks the target on that share of the tune questions passes on the test questions;
        0 when no margin can help.
    reason : str
        Why no margin can help, or nothing.
    """

    target: Target
    limit: float
    max_share: float
    power: float
    reason: str = ""

    @property
    def stricter(self) -> Target | None:
        """The same demand as a stricter target, for accuracy and think rate; percentiles and skill have none."""
        if self.target.metric not in ("accuracy", "think_rate"):
            return None
        value = self.max_share if self.target.upper else round(1 - self.max_share, 12)
        return replace(self.target, value=value, op="<=" if self.target.upper else ">=") if self.power else self.target

    def share(self, outcomes: Outcomes, decisions: Decisions) -> float:
        """Share of questions that count against the target."""
        return violation_share(self.target, outcomes, decisions)

    def holds(self, share: float | Floats) -> NDArray[np.bool_]:
        """Whether a share (or each of many) leaves the margin."""
        return np.asarray(share) <= self.max_share + 1e-12


def auto_margin(
    targets: Sequence[Target], tune: Outcomes, test: Outcomes, *, alpha: float = 0.05, power: float = 0.85
) -> tuple[Requirement, ...]:
    """Stricter shares for the search, such that what it finds is certified on the test questions with this chance.

    The share on the tune questions is itself uncertain: seen k times among n, the true share is taken to have
    Jeffreys' posterior Beta(k + 1/2, n - k + 1/2), and the count on the test questions is beta-binomial. The largest
    k whose count passes with the wanted chance is the margin. Several targets share the chance of failing; the datasets
    of ``worst`` do not, since mostly one of them decides. Weighted or grouped questions: the same with the conservative
    bound and a normal approximation that takes the questions of a group to be all alike.

    Parameters
    ----------
    targets : sequence of Target
        Those that limit no share (means, tokens, scores) are passed over.
    tune, test : Outcomes
    alpha : float, default 0.05
        Level of each test, after what earlier looks spent.
    power : float, default 0.85
        Chance of passing all, above one half.

    Returns
    -------
    tuple of Requirement
    """
    shares = [target for target in targets if target.metric in SHARE_METRICS]
    each = 1 - (1 - power) / max(1, len(shares))
    found = []
    for target in shares:
        for part, in_test in split_selector(target, test, tune.dataset_names):
            in_tune = np.arange(tune.n) if part.dataset is None else np.flatnonzero(tune.dataset == part.dataset)
            found.append(_requirement(part, tune, in_tune, test, in_test, alpha, each))
    return tuple(found)


def _requirement(
    target: Target,
    tune: Outcomes,
    in_tune: NDArray[np.int64],
    test: Outcomes,
    in_test: NDArray[np.int64],
    alpha: float,
    power: float,
) -> Requirement:
    if not (in_tune.size and in_test.size):
        whole = share_limit(target, tune)
        side = "test" if in_tune.size else "tune"
        return Requirement(target, whole, whole, 0.0, f"no question of {target.dataset!r} is on the {side} side")
    tune, test = tune.take(in_tune), test.take(in_test)
    limit = share_limit(target, test)
    if limit >= 1:
        return Requirement(target, limit, limit, 0.0, "no question can break it")
    if all(o.unweighted and independent(o) for o in (tune, test)):
        share, reached = _binomial_margin(tune.n, test.n, limit, alpha, power)
    else:
        share, reached = _blocks_margin(capacities(tune), capacities(test), limit, alpha, power)
    if math.isnan(share):
        reason = f"{test.n} test questions are too few to certify {target}, whatever the policy"
        return Requirement(target, limit, limit, 0.0, reason)
    return Requirement(target, limit, min(share, limit), reached)


def _binomial_margin(n_tune: int, n_test: int, limit: float, alpha: float, power: float) -> tuple[float, float]:
    most = exact.critical_count(n_test, limit, alpha)
    if most < 0:
        return math.nan, 0.0
    seen = np.arange(most + 1)

    def chance(k: int) -> float:
        a, b = k + 0.5, n_tune - k + 0.5
        log = special.gammaln(n_test + 1) - special.gammaln(seen + 1) - special.gammaln(n_test - seen + 1)
        log = log + special.betaln(seen + a, n_test - seen + b) - special.betaln(a, b)
        return float(np.exp(log).sum())

    low, high = 0, n_tune + 1  # with `high` events the chance falls short; `low` is kept even where 0 falls short
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= n_tune and chance(middle) >= power else (low, middle)
    return low / n_tune, chance(low)


def _blocks_margin(tune: Floats, test: Floats, limit: float, alpha: float, power: float) -> tuple[float, float]:
    def over(share: float) -> float:
        return exact.bounded_test_at_most(share * float(test.sum()), test, limit) - alpha

    if over(0.0) > 0:
        return math.nan, 0.0
    # The bound is a step function of the share: the root is a step, and a little below it the test passes.
    passes = float(optimize.brentq(over, 0.0, limit, xtol=1e-9)) - 1e-8
    spread = sum(float((c * c).sum() / c.sum() ** 2) for c in (tune, test))

    def chance(share: float) -> float:
        return float(stats.norm.cdf((passes - share) / math.sqrt(max(share * (1 - share), 1e-12) * spread)))

    if chance(0.0) < power:
        return 0.0, chance(0.0)
    share = float(optimize.brentq(lambda m: chance(m) - power, 0.0, 1.0, xtol=1e-9))
    return share, power


def capacities(outcomes: Outcomes) -> Floats:
    """Total weight of each group, shape (G,): what independent blocks can lose at most."""
    return np.bincount(outcomes.group_codes, outcomes.weight).astype(np.float64)

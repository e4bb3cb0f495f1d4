"""One run of ``calib optimize``: split, search with a margin, verdict, and the document that is saved.

Pure but for the ledger: `tune` takes a callable that counts the looks at the test split. Leaves to others: the search
itself (`calib.optimise`), the tests (`calib.certify`), where the document goes (`calib.store`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from calib import calibrate, certify, intervals, metrics, optimise, risk
from calib.calibrate import Calibration
from calib.certify import Certificate, alpha_at_look, marks_of
from calib.errors import CalibError
from calib.intervals import Comparison
from calib.optimise import Optimum, Table, optimum, tabulate
from calib.outcomes import ESTIMATED, SIMULATED, Outcomes
from calib.policy import Cost, Decisions, Policy, baselines, decide, evaluate, evaluate_decisions
from calib.risk import Requirement
from calib.target import Target
from calib.why import hurting, why

__all__ = [
    "CALIBRATE",
    "FACTORS",
    "Demand",
    "Tuned",
    "look_of",
    "split_identity",
    "sustainable_rate",
    "throughput",
    "tune",
]

FACTORS = (2.0, 1.5, 1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of the automatic margin that the candidates leave; 1 is the one that is returned when none is certified."""

CALIBRATE = ("none", "auto")
"""Whether the policy is tuned on calibrated probabilities: no, or with the steps that gain beyond noise."""

_SAME = 1e-12
"""Objectives this close are equal."""

Ledger = Callable[[str, Mapping[str, Any]], int]
"""Enters a look (identity of the test split, what was looked at) and returns its number, 1 at first."""


@dataclass(frozen=True)
class Demand:
    """What is asked of `tune`.

    Attributes
    ----------
    targets : tuple of Target
    maximize, minimize : str or None
        The objective; accuracy is maximised when both are None.
    cost : Cost or None
        Prices of the metric ``cost``.
    arms, budgets : sequence or None
        Where to look; everywhere when None.
    test_share : float
        Share of the questions held out; 0 tunes and reports on all.
    level : float
        Of the certificate and the intervals.
    margin : bool
        Whether to leave room below the limits, so that a certificate is likely.
    cheapest : bool
        Whether to return the cheapest policy that cannot be told apart from the best.
    rate : float or None
        Requests per second that the thinking must keep up with.
    calibrate : {"none", "auto"}
        Whether to fit temperatures and pool on the tune questions (`calib.calibrate`) and to tune on what they give.
    confidence : str
        Definition that the threshold means, one of `calib.policy.CONFIDENCES`.
    seed, resamples : int
        Of the bootstrap: intervals and comparisons rest on it, the verdict does not.
    """

    targets: tuple[Target, ...] = ()
    maximize: str | None = None
    minimize: str | None = None
    cost: Cost | None = None
    arms: Sequence[str] | None = None
    budgets: Sequence[int] | None = None
    test_share: float = 0.3
    level: float = 0.95
    margin: bool = True
    cheapest: bool = False
    rate: float | None = None
    calibrate: str = "none"
    confidence: str = "max"
    seed: int = 0
    resamples: int = intervals.RESAMPLES

    def __post_init__(self) -> None:
        if self.calibrate not in CALIBRATE:
            raise CalibError(f"--calibrate must be one of {', '.join(CALIBRATE)}, got {self.calibrate!r}")

    def limits(self, outcomes: Outcomes, arm: str) -> tuple[Target, ...]:
        """The targets, and the most tokens a request that the arm sustains at the rate, where it is known."""
        supply = None if self.rate is None else throughput(outcomes, arm)
        if supply is None or self.rate is None:
            return self.targets
        return (*self.targets, Target("tokens", "<=", supply / self.rate))

    def baselines(self, outcomes: Outcomes) -> dict[str, Policy]:
        """What one would serve without tuning, in the first arm that is looked at."""
        return baselines(outcomes, self.arms[0] if self.arms else None)


@dataclass(frozen=True, eq=False)
class Tuned:
    """What a run found; `to_dict` is the JSON of ``calib optimize``.

    Attributes
    ----------
    demand : Demand
    outcomes, tune, test : Outcomes
        All questions, those that were tuned on, those held out (None at share 0).
    best : Optimum
        On the tune questions, without any margin.
    certificate : Certificate or None
        None when no policy meets the targets on the tune questions.
    nearest : optimise.Nearest or None
        When no policy does.
    prices : tuple of optimise.Price
        What each limit costs.
    margin_cost : float
        How much of the objective the margin costs on the tune questions; NaN without one.
    comparisons : mapping of str to Comparison
        Paired difference to each baseline on the reported questions.
    warnings : tuple of str
    calibration : Calibration or None
        What was fitted on the tune questions, with the step after the mix of the policy; None when it was not asked.
    searched : Outcomes or None
        The tune questions as the search saw them, calibrated; a study in the same space runs on them. None without any
        policy.
    """

    demand: Demand
    outcomes: Outcomes
    tune: Outcomes
    test: Outcomes | None
    best: Optimum
    certificate: Certificate | None
    nearest: optimise.Nearest | None
    prices: tuple[optimise.Price, ...]
    margin_cost: float
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    calibration: Calibration | None = None
    searched: Outcomes | None = None

    @property
    def policy(self) -> Policy | None:
        """The policy to serve."""
        return None if self.certificate is None else self.certificate.policy

    @property
    def verdict(self) -> str:
        """``certified``, ``met`` or ``not_met``."""
        return "not_met" if self.certificate is None else self.certificate.verdict

    @property
    def reported(self) -> Outcomes:
        """The questions that the verdict is about."""
        return self.tune if self.test is None else self.test

    @property
    def sustainable(self) -> float | None:
        """`sustainable_rate` of the policy: infinite when it never thinks, None where it is unknown."""
        return None if self.policy is None else sustainable_rate(self.outcomes, self.policy)

    def to_dict(self, name: str = "best") -> dict[str, Any]:
        """The document of ``calib optimize --json``: rates 0 to 1, seconds, unknown numbers None."""
        policy, certificate, cost = self.policy, self.certificate, self.demand.cost
        rng = np.random.default_rng(self.demand.seed)
        return {
            "name": name,
            "verdict": self.verdict,
            "marks": self._marks(),
            "model": self.outcomes.model,
            "policy": None if policy is None else policy.to_dict(),
            "targets": [] if certificate is None else [test.to_dict() for test in certificate.tests],
            "tune": None if policy is None else self._scores(self.tune, policy, cost),
            "test": None if policy is None or self.test is None else self._measured(self.test, policy, rng),
            "baselines": self._baselines(rng),
            "exact": {
                "objective": _known(self.best.objective),
                "metric": self.best.metric,
                "policy": None if self.best.policy is None else self.best.policy.to_dict(),
                "method": self.best.method,
                "mixes": [_known(mix) for mix in self.best.mixes],
            },
            "study": None,
            "nearest": self._nearest(),
            "prices": [
                {"target": str(p.target), "without_it": _known(p.objective), "gain": _known(p.gain)}
                for p in self.prices
            ],
            "margin": {"auto": self.demand.margin and self.test is not None, "costs": _known(self.margin_cost)},
            "sustainable_rate": None if self.sustainable is None else _known(self.sustainable),
            "certificate": None if certificate is None else certificate.to_dict(),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "split": self._split(),
            "fingerprints": {"model": self.outcomes.fingerprint, "questions": _questions_hash(self.outcomes)},
            "warnings": list(self.warnings),
        }

    def _marks(self) -> list[str]:
        """Marks of the policy; without one those of the numbers that are shown instead."""
        if self.policy is not None:
            return list(marks_of(self.policy, self.outcomes))
        shown = [*self.demand.baselines(self.outcomes).values()]
        if self.nearest is not None and self.nearest.policy is not None:
            shown.append(self.nearest.policy)
        return sorted({mark for policy in shown for mark in marks_of(policy, self.outcomes)})

    def _scores(self, outcomes: Outcomes, policy: Policy, cost: Cost | None) -> dict[str, Any]:
        decisions = decide(outcomes, policy)
        return evaluate_decisions(outcomes, decisions, cost=cost).to_dict() | self._tail(outcomes, decisions)

    def _tail(self, outcomes: Outcomes, decisions: Decisions) -> dict[str, Any]:
        """Share of the questions that take more than twice each latency limit: what p90 alone does not say."""
        limits = [t for t in self.demand.targets if t.is_latency and t.upper and t.dataset is None and not t.worst]
        seconds = decisions.latency

        def share(target: Target) -> float | None:
            over = np.where(np.isnan(seconds), np.nan, seconds > 2 * target.value)
            return _known(metrics.mean(over, outcomes.weight))

        return {"over_twice_limit": {str(target): share(target) for target in limits}}

    def _measured(self, outcomes: Outcomes, policy: Policy, rng: np.random.Generator) -> dict[str, Any]:
        """Each metric with its interval."""
        decisions = decide(outcomes, policy)
        found = intervals.intervals(
            outcomes,
            decisions,
            rng=rng,
            level=self.demand.level,
            resamples=self.demand.resamples,
            cost=self.demand.cost,
        )
        score = evaluate_decisions(outcomes, decisions)
        counts = {"n": score.n, "unanswered": score.unanswered, "clipped": score.clipped}
        measured = {metric: interval.to_dict() for metric, interval in found.items()}
        return counts | measured | self._tail(outcomes, decisions)

    def _baselines(self, rng: np.random.Generator) -> dict[str, Any]:
        result = {}
        for name, policy in self.demand.baselines(self.outcomes).items():
            comparison = self.comparisons.get(name)
            result[name] = {
                "policy": policy.to_dict(),
                **self._scores(self.tune, policy, self.demand.cost),
                "test": None if self.test is None else self._measured(self.test, policy, rng),
                "difference": None if comparison is None else comparison.to_dict(),
            }
        return result

    def _nearest(self) -> dict[str, Any] | None:
        if self.nearest is None:
            return None
        return {
            "policy": None if self.nearest.policy is None else self.nearest.policy.to_dict(),
            "metrics": None if self.nearest.evaluation is None else self.nearest.evaluation.to_dict(),
            "relaxations": [
                {
                    "target": str(r.target),
                    "needs": None if r.needs is None else _known(r.needs),
                    "policy": None if r.policy is None else r.policy.to_dict(),
                }
                for r in self.nearest.relaxations
            ],
        }

    def _split(self) -> dict[str, Any]:
        def count(outcomes: Outcomes | None, name: str) -> int:
            return 0 if outcomes is None else int((outcomes.dataset == name).sum())

        names = self.outcomes.dataset_names
        by_dataset = {name: {"tune": count(self.tune, name), "test": count(self.test, name)} for name in names}
        return {"test_share": self.demand.test_share, "by_dataset": by_dataset}


def tune(outcomes: Outcomes, demand: Demand, *, ledger: Ledger | None = None) -> Tuned:
    """Find the best policy inside the targets on the tune questions, and test it on those held out.

    Parameters
    ----------
    outcomes : Outcomes
    demand : Demand
    ledger : callable, optional
        Counts the looks at the test split; each run is the first look when left out.

    Raises
    ------
    CalibError
        A target on a metric that is not known here, an arm or a budget that was not collected, too few to split.
    """
    tuned_on, held_out = outcomes.split(demand.test_share)
    tuned_on = _weighted_as(outcomes, tuned_on)
    held_out = None if held_out is None else _weighted_as(outcomes, held_out)
    serving = _Serving(tuned_on, demand)
    search = _Search(serving.table(), demand)
    best = search.optimum()
    warnings = [*outcomes.warnings, *search.unsustainable(), *_unheard(outcomes, held_out)]
    if best.policy is None:
        nearest = serving.nearest(search.nearest())
        warnings.extend(serving.warnings(None))
        return Tuned(
            *(demand, outcomes, tuned_on, held_out, best, None, nearest, (), math.nan, {}, tuple(warnings)),
            calibration=serving.fitted(None),
            searched=serving.searched,
        )

    found, whole = {0.0: best}, True
    required: dict[float, Mapping[Target, float]] = {0.0: {}}
    if demand.margin and held_out is not None and demand.targets:
        # sized for a first look whatever the ledger says, so that the same run again finds the same candidates
        requirements = risk.auto_margin(demand.targets, tuned_on, held_out, alpha=alpha_at_look(demand.level, 1))
        for factor in FACTORS[:-1]:
            required[factor] = _scaled(requirements, factor)
            stricter = search.optimum(required[factor])
            if stricter.policy is not None:
                found[factor] = stricter
        whole = 1.0 in found
    if not whole:
        alone = [t for t, most in required[1.0].items() if search.optimum({t: most}).policy is None]
        named = f" of {', '.join(map(str, alone))}" if alone else "s"
        warnings.append(
            f"no policy leaves the whole margin below the limit{named}: on new questions they may well be broken. "
            "More questions need less margin"
        )
    chosen = found[max(factor for factor in found if factor <= 1)]
    margin_cost = abs(best.objective - chosen.objective) if len(found) > 1 else math.nan
    if demand.cheapest:
        found = {factor: search.cheapest(one, required[factor]) for factor, one in found.items()}
        chosen = found[max(factor for factor in found if factor <= 1)]
    candidates = [serving.policy(policy) for policy in _distinct(found, best.maximize)]

    rng = np.random.default_rng(demand.seed)
    look = 1
    if held_out is not None and ledger is not None:
        look = ledger(split_identity(outcomes), look_of(demand, candidates, outcomes))
    certificate = certify.certify(
        candidates,
        tuned_on,
        held_out,
        demand.targets,
        rng=rng,
        level=demand.level,
        look=look,
        cost=demand.cost,
        resamples=demand.resamples,
        fallback=candidates.index(serving.policy(_policy(chosen))),
    )
    reported = tuned_on if held_out is None else held_out
    rivals = {name: decide(reported, policy) for name, policy in demand.baselines(outcomes).items()}
    ours = decide(reported, certificate.policy)
    comparisons = intervals.compare(reported, ours, rivals, rng=rng, level=demand.level, resamples=demand.resamples)
    return Tuned(
        demand,
        outcomes,
        tuned_on,
        held_out,
        serving.optimum(best),
        certificate,
        None,
        serving.prices(search.prices(best)),
        margin_cost,
        comparisons,
        (*warnings, *serving.warnings(certificate.policy), *_warnings(serving.searched, certificate, comparisons)),
        serving.fitted(certificate.policy),
        serving.searched,
    )


class _Serving:
    """From what the search sees to what is served.

    The search looks at calibrated probabilities with plain policies, for which the table is exact. What is served, and
    tested, is the same rule on probabilities as the systems give them: the policy carries temperatures and pool, and
    a step after the mix of its own.
    """

    def __init__(self, tuned_on: Outcomes, demand: Demand) -> None:
        self.raw, self.demand = tuned_on, demand
        self._fitted = calibrate.fit(tuned_on) if demand.calibrate == "auto" else None
        self.searched = tuned_on if self._fitted is None else calibrate.apply(tuned_on, self._fitted)
        self._served: dict[Policy, Policy] = {}
        self._finished: dict[Policy, Calibration] = {}

    def table(self) -> Table:
        """Of the questions as the search sees them."""
        pool = "linear" if self._fitted is None else self._fitted.pool
        asked = self.demand
        return tabulate(self.searched, asked.arms, asked.budgets, confidence=asked.confidence, pool=pool)

    def policy(self, plain: Policy) -> Policy:
        """What is served for a policy of the search."""
        if self._fitted is None:
            return plain
        if plain not in self._served:
            finished = calibrate.finish(self.raw, self._fitted, plain)
            self._served[plain] = served = finished.policy(plain)
            self._finished[served] = finished
        return self._served[plain]

    def fitted(self, served: Policy | None) -> Calibration | None:
        """What was fitted, with the step after the mix of a policy that is served."""
        return self._fitted if served is None else self._finished.get(served, self._fitted)

    def _unfinished(self, plain: Policy | None) -> Policy | None:
        """A policy that is shown only: without a step after the mix, which changes no answer."""
        return plain if plain is None or self._fitted is None else self._fitted.policy(plain)

    def optimum(self, best: Optimum) -> Optimum:
        """The optimum with what is served for it."""
        if self._fitted is None:
            return best
        policy = self.policy(_policy(best))
        evaluation = evaluate(self.raw, policy, by_dataset=True, cost=self.demand.cost)
        return replace(best, policy=policy, evaluation=evaluation, objective=float(getattr(evaluation, best.metric)))

    def nearest(self, found: optimise.Nearest) -> optimise.Nearest:
        """The same with policies for probabilities as the systems give them."""
        relaxations = tuple(replace(one, policy=self._unfinished(one.policy)) for one in found.relaxations)
        return replace(found, policy=self._unfinished(found.policy), relaxations=relaxations)

    def prices(self, found: Iterable[optimise.Price]) -> tuple[optimise.Price, ...]:
        """The same with policies for probabilities as the systems give them."""
        return tuple(replace(one, policy=self._unfinished(one.policy)) for one in found)

    def warnings(self, served: Policy | None) -> list[str]:
        """What the threshold means, when it is no longer the top probability that the server gives."""
        found = []
        fitted = self.fitted(served)
        if fitted is not None and fitted.nothing:
            found.append("--calibrate auto: no step gains beyond noise; probabilities and threshold mean what they did")
        elif fitted is not None:
            kept = "; ".join(step.name for step in fitted.kept)
            found.append(
                f"calibrated ({kept}): the threshold means the calibrated confidence, and the optimum over the mix is "
                f"{'exact' if fitted.pool == 'linear' else 'searched on a grid of mixes'}; serve it with calib serve"
            )
        if self.demand.confidence != "max":
            found.append(
                f"the threshold means the confidence {self.demand.confidence!r}, not the top probability: only the "
                "gateway applies it (calib serve)"
            )
        return found


def _weighted_as(whole: Outcomes, side: Outcomes) -> Outcomes:
    """One side of a split, each dataset with the share of the weight that it has in the whole.

    Chance gives a side more of one dataset and less of another; where weights stand for traffic, the verdict must be
    about that traffic and not about the one that the split happened to draw.
    """
    if side.unweighted or side is whole:  # nothing to restore, and exact tests need equal weights
        return side
    share = dict(zip(whole.dataset_names, np.bincount(whole.dataset_codes, whole.weight), strict=True))
    wanted = np.array([share[name] for name in side.dataset_names])
    weight = side.weight * (wanted / np.bincount(side.dataset_codes, side.weight))[side.dataset_codes]
    return replace(side, weight=weight * side.n / weight.sum())


def _unheard(whole: Outcomes, held_out: Outcomes | None) -> list[str]:
    """Datasets with a share of the traffic and without a test question."""
    if whole.unweighted or held_out is None:
        return []
    missing = sorted(set(whole.dataset_names) - set(held_out.dataset_names))
    return [f"no test question of {', '.join(map(repr, missing))}: the verdict is about the other traffic"] * bool(
        missing
    )


class _Search:
    """The questions that `tune` puts to the exact table: always the same targets, objective and sustainable arms."""

    def __init__(self, table: Table, demand: Demand) -> None:
        self.demand = demand
        self._asked: dict[str, Any] = {"maximize": demand.maximize, "minimize": demand.minimize, "cost": demand.cost}
        self._tables = {table: demand.targets}
        if demand.rate is not None:  # each arm can sustain its own number of tokens a request
            self._tables = {table.only([arm]): demand.limits(table.outcomes, arm) for arm in table.arms}

    def _best_of(self, found: Iterable[Optimum]) -> Optimum:
        several = list(found)
        known = [one for one in several if one.policy is not None]
        if not known:
            return several[0]
        sign = 1 if several[0].maximize else -1
        most = max(sign * one.objective for one in known)
        return min((one for one in known if sign * one.objective >= most - _SAME * max(abs(most), 1.0)), key=_expense)

    def optimum(self, requirements: Mapping[Target, float] | None = None) -> Optimum:
        """The best policy; requirements say which share may break a target at most."""
        return self._best_of(
            optimum(table, targets, **self._asked, requirements=requirements) for table, targets in self._tables.items()
        )

    def nearest(self) -> optimise.Nearest:
        """What to give up; of several arms the one that violates least."""
        found = [optimise.nearest(table, targets, **self._asked) for table, targets in self._tables.items()]
        return min(found, key=lambda one: one.violation)

    def prices(self, best: Optimum) -> tuple[optimise.Price, ...]:
        """What each limit costs, in the arm of the best policy where arms differ in what they sustain."""
        arm = _policy(best).arm
        table, targets = next((t, limits) for t, limits in self._tables.items() if arm in t.arms)
        return optimise.prices(table, targets, best, cost=self.demand.cost)

    def cheapest(self, best: Optimum, requirements: Mapping[Target, float]) -> Optimum:
        """The cheapest policy that keeps the same margin and cannot be told apart from the best by accuracy."""
        if best.metric != "accuracy":
            raise CalibError("--prefer cheapest compares accuracy: leave out --minimize, or use --prefer best")
        found = (self._cheapest_in(table, targets, best, requirements) for table, targets in self._tables.items())
        return min((one for one in found if one is not None), key=_expense, default=best)

    def _cheapest_in(
        self, table: Table, targets: Sequence[Target], best: Optimum, requirements: Mapping[Target, float]
    ) -> Optimum | None:
        """The same among the arms of one table; compared in pairs, by group."""
        outcomes = table.outcomes
        ours = decide(outcomes, _policy(best))
        # a larger paired difference cannot hide in noise: within a group the answers change by 1 at most
        shares = np.bincount(outcomes.group_codes, outcomes.weight) / outcomes.weight.sum()
        floor = best.objective - 4 * math.sqrt(float((shares**2).sum()))
        close = (*targets, Target("accuracy", ">=", floor))
        asked = {**self._asked, "requirements": requirements}
        for rival in optimise.feasible(table, close, order="cheapest", **asked):
            other = decide(outcomes, rival)
            if _surely_worse(outcomes, ours, other):
                continue
            demand = self.demand
            rng = np.random.default_rng(demand.seed)  # every rival on the same resamples, whatever the order
            compared = intervals.compare(
                outcomes, ours, {"": other}, rng=rng, level=demand.level, resamples=demand.resamples
            )[""]
            if not compared.distinguishable:
                evaluation = evaluate(outcomes, rival, by_dataset=True, cost=demand.cost)
                return replace(best, policy=rival, objective=evaluation.accuracy, evaluation=evaluation)
        return None

    def unsustainable(self) -> list[str]:
        """What is not known about the load that each arm carries."""
        if self.demand.rate is None:
            return []
        outcomes = next(iter(self._tables)).outcomes
        unknown = [arm for table in self._tables for arm in table.arms if throughput(outcomes, arm) is None]
        return [
            f"--rate: tokens/s of arm {arm!r} were not measured at a known concurrency: what it sustains is unknown"
            for arm in unknown
        ]


def throughput(outcomes: Outcomes, arm: str) -> float | None:
    """Thought tokens per second that an arm delivered at the collected concurrency; None where it was not measured.

    By Little's law: at C requests in flight the server finishes C / (mean seconds) requests a second, each of mean
    tokens. Taken at the largest budget.
    """
    a = outcomes.arm_index(arm)
    concurrency = int(outcomes.concurrency[a])
    if concurrency < 1 or outcomes.simulated or outcomes.estimated[a, -1] or not outcomes.budgets.size:
        return None
    thinking = outcomes.can_think & ~outcomes.failed[:, -1]
    seconds = outcomes.t1[a, thinking] + outcomes.t2[a, thinking, -1]
    if not thinking.any() or not np.isfinite(seconds).all() or seconds.sum() <= 0:
        return None
    return float(concurrency * outcomes.tokens[thinking, -1].sum() / seconds.sum())


def sustainable_rate(outcomes: Outcomes, policy: Policy) -> float | None:
    """Requests per second at which the policy's thinking takes all the tokens/s of its arm; None where unknown."""
    supply = throughput(outcomes, policy.arm)
    tokens = evaluate(outcomes, policy).tokens
    if supply is None:
        return None
    return supply / tokens if tokens > 0 else math.inf


def _surely_worse(outcomes: Outcomes, ours: Decisions, other: Decisions) -> bool:
    """Whether the paired difference is beyond 3 standard errors by group: no need for a bootstrap."""
    change = (ours.choice == outcomes.answer) * 1.0 - (other.choice == outcomes.answer)
    total = np.bincount(outcomes.group_codes, outcomes.weight * change)
    weight = np.bincount(outcomes.group_codes, outcomes.weight)
    mean = total.sum() / weight.sum()
    error = math.sqrt(float(((total - mean * weight) ** 2).sum())) / float(weight.sum())
    return bool(mean > 3 * error)


def _policy(found: Optimum) -> Policy:
    assert found.policy is not None
    return found.policy


def _expense(found: Optimum) -> tuple[float, float, float]:
    """What ties between arms go by: mean latency where it is known, tokens, think rate."""
    score = found.evaluation
    assert score is not None
    return (math.inf if math.isnan(score.mean) else score.mean), score.tokens, score.think_rate


def _scaled(requirements: Iterable[Requirement], factor: float) -> dict[Target, float]:
    """Largest share that may break each target, for a part or a multiple of the margin."""
    return {r.target: max(0.0, r.limit - factor * (r.limit - r.max_share)) for r in requirements if r.power}


def _distinct(found: Mapping[float, Optimum], maximize: bool) -> list[Policy]:
    """Different policies, best first: less margin is never worse on the tune questions, and ties keep more of it."""
    sign = -1.0 if maximize else 1.0
    ordered = sorted(found.items(), key=lambda item: (sign * item[1].objective, -item[0]))
    return list(dict.fromkeys(_policy(one) for _, one in ordered))


def _warnings(tuned_on: Outcomes, certificate: Certificate, comparisons: Mapping[str, Comparison]) -> list[str]:
    policy, found = certificate.policy, []
    if ESTIMATED in certificate.marks:
        found.append("latency is estimated from rates or a fitted line: it can be met, never certified")
    if SIMULATED in certificate.marks:
        found.append("simulated: no real model answered; the numbers say nothing about a real server")
    alike = [name for name, c in comparisons.items() if not c.distinguishable]
    if alike:
        found.append(f"accuracy cannot be told apart from {', '.join(alike)} on {certificate.n} questions")
    if policy.threshold > 0:
        for row in hurting(why(tuned_on, policy.think_budget, policy.arm, policy.mix)):
            if row.proven:
                found.append(
                    f"thinking hurts on {row.dataset!r}: {row.lost} right answers lost, {row.gained} won on {row.n} "
                    "questions; send thinking: off there (calib why)"
                )
    return found


def split_identity(outcomes: Outcomes) -> str:
    """One ledger for all test splits of one model: a smaller test share holds none but questions of a larger one."""
    return f"test of {outcomes.fingerprint}"


def look_of(demand: Demand, policies: Sequence[Policy], outcomes: Outcomes) -> dict[str, Any]:
    """What is looked at: the same candidates and targets on the same numbers are the same look, and learn nothing new.

    Anything that could change a test or the order of the tests makes another look: answers that were asked again,
    seconds of another pass or load, prices.
    """
    return {
        "targets": [str(target) for target in demand.targets],
        "cost": None if demand.cost is None else asdict(demand.cost),
        "policies": [policy.to_dict() for policy in policies],
        "level": demand.level,
        "test_share": demand.test_share,
        "numbers": _numbers_hash(outcomes, policies),
    }


def _numbers_hash(outcomes: Outcomes, policies: Sequence[Policy]) -> str:
    """Identity of all that the tests of these policies read, and of how it is split, whatever the order of rows."""
    o = outcomes.take(np.lexsort((outcomes.ids.astype(str), outcomes.dataset.astype(str))))
    digest = hashlib.sha256(json.dumps([o.dataset.tolist(), o.ids.tolist(), o.group.tolist()]).encode())
    arrays = [o.p1, o.answer, o.n_options, o.can_think, o.weight, o.split_position]
    served = sorted({(part.arm, part.think_budget) for policy in policies for part, _ in policy.parts(o)})
    for arm, budget in served:
        a, b = o.arm_index(arm), o.budget_index(budget)
        arrays += [o.p2[:, b], o.tokens[:, b], o.t1[a], o.t2[a, :, b], o.estimated[a, [0, 1 + b]]]
        if any(policy.temperatures is not None for policy in policies):  # a thought that was cut has its own
            arrays.append(o.finished[:, b])
    for array in arrays:
        digest.update(f"{array.shape}{array.dtype.str}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _questions_hash(outcomes: Outcomes) -> str:
    """Identity of a question set: names, right answers and weights, whatever their order."""
    columns = (outcomes.dataset.tolist(), outcomes.ids.tolist(), outcomes.answer.tolist(), outcomes.weight.tolist())
    rows = sorted(json.dumps(row) for row in zip(*columns, strict=True))
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None

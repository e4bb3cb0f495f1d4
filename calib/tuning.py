"""One run of ``calib optimize``: split, search with a margin, verdict, and the document that is saved.

Pure but for the ledger: `tune` takes a callable that counts the looks at the test split. Leaves to others: what is
asked (`calib.demand`), the search (`calib.spaces`), the tests (`calib.certify`), where the document goes
(`calib.store`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from calib import certify, deadline, intervals, metrics, optimise, risk
from calib.calibrate import Calibration
from calib.certify import Certificate, alpha_at_look, marks_of
from calib.demand import CALIBRATE, Demand, sustainable_rate, throughput
from calib.envelope import envelope
from calib.gain import Gain
from calib.intervals import Comparison
from calib.jsonnumbers import finite
from calib.optimise import Optimum
from calib.outcomes import ESTIMATED, SIMULATED, Outcomes
from calib.policy import NEVER, Cost, Decisions, Policy, decide, evaluate_decisions
from calib.risk import Requirement
from calib.routing import Offer, Routed, Taken, check_routes, factor_of, taken
from calib.spaces import LeftOut, Serving, Spaces, Tried, policy_of
from calib.target import Target
from calib.why import hurting, why

__all__ = [
    "CALIBRATE",
    "FACTORS",
    "Demand",
    "Tried",
    "Tuned",
    "judged",
    "look_of",
    "split_identity",
    "sustainable_rate",
    "throughput",
    "tune",
]

FACTORS = (2.0, 1.5, 1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of the automatic margin that the candidates leave; 1 is the one that is returned when none is certified."""

ONE_FOR_ALL = "one policy for all"
"""What a policy with routes is compared with, beside the baselines."""

Ledger = Callable[[str, Mapping[str, Any]], int]
"""Enters a look (identity of the test split, what was looked at) and returns its number, 1 at first."""


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
    without_deadline : Optimum or None
        As `best`, among the policies without a deadline; None where no deadline was asked for.
    tried : tuple of Tried
        Deadlines that were looked at.
    left_out : LeftOut or None
        The deadline among them whose gain could be chance, where it was left to calib to take one.
    deadline_gain : Gain or None
        Else what the best policy gains over the best one without a deadline, both with the margin.
    routed : Routed or None
        What came of looking for routes; None where none were asked for.
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
    without_deadline: Optimum | None = None
    tried: tuple[Tried, ...] = ()
    left_out: LeftOut | None = None
    deadline_gain: Gain | None = None
    routed: Routed | None = None

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
    def studied(self) -> Optimum:
        """The optimum in the space of the studies, which have no deadline."""
        return self.best if self.without_deadline is None else self.without_deadline

    @property
    def deadline_reason(self) -> str | None:
        """Why a deadline was taken that was left to calib; None where none was.

        ``gain``: beyond chance. Untested: ``feasible``, where no policy meets the targets without one, and ``margin``,
        where none leaves as much of the margin.
        """
        if self.demand.deadlines != "auto" or self.policy is None or self.policy.deadline is None:
            return None
        if self.deadline_gain is not None:
            return "gain"
        return "feasible" if self.without_deadline is None or self.without_deadline.policy is None else "margin"

    @property
    def sustainable(self) -> float | None:
        """`sustainable_rate` of the policy: infinite when it never thinks, None where it is unknown."""
        return None if self.policy is None else sustainable_rate(self.outcomes, self.policy)

    def to_dict(self, name: str = "best") -> dict[str, Any]:
        """The document of ``calib optimize --json``: rates 0 to 1, seconds, unknown numbers None."""
        policy, certificate, cost = self.policy, self.certificate, self.demand.cost
        rng = np.random.default_rng(self.demand.seed)
        document: dict[str, Any] = {
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
                "objective": finite(self.best.objective),
                "metric": self.best.metric,
                "policy": None if self.best.policy is None else self.best.policy.to_dict(),
                "method": self.best.method,
                "mixes": [finite(mix) for mix in self.best.mixes],
            },
            "study": None,
            "nearest": self._nearest(),
            "prices": [
                {"target": str(p.target), "without_it": finite(p.objective), "gain": finite(p.gain)}
                for p in self.prices
            ],
            "margin": {"auto": self.demand.margin and self.test is not None, "costs": finite(self.margin_cost)},
            "sustainable_rate": finite(self.sustainable),
            "certificate": None if certificate is None else certificate.to_dict(),
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "envelope": None if certificate is None else self._envelope(certificate),
            "split": self._split(),
            "fingerprints": {"model": self.outcomes.fingerprint, "questions": _questions_hash(self.outcomes)},
            "warnings": list(self.warnings),
        }
        if self.without_deadline is not None:
            document["deadline"] = self._deadline(self.without_deadline)
        if self.routed is not None:
            document["routes"] = self._routes(self.routed)
        return document

    def _routes(self, routed: Routed) -> dict[str, Any]:
        """What routes change: the best one policy for all, and the difference to it on the reported questions."""
        compared = self.comparisons.get(ONE_FOR_ALL)
        return routed.to_dict() | {"difference": None if compared is None else compared.to_dict()}

    def _deadline(self, without: Optimum) -> dict[str, Any]:
        """What a deadline changes: the deadlines that were tried, the optimum without one, and what is closed."""

        def shares(outcomes: Outcomes | None) -> dict[str, float] | None:
            if outcomes is None or self.policy is None or self.policy.deadline is None:
                return None
            decisions = decide(outcomes, self.policy)
            return {
                "closed": metrics.mean(decisions.closed, outcomes.weight),
                "degraded": metrics.mean(decisions.degraded, outcomes.weight),
            }

        with_one, alone = self.best.objective, without.objective
        return {
            "seconds": None if self.policy is None else self.policy.deadline,
            "on_deadline": None if self.policy is None or self.policy.deadline is None else self.policy.on_deadline,
            "gain": finite(with_one - alone if self.best.maximize else alone - with_one),
            "without": {
                "objective": finite(without.objective),
                "policy": None if without.policy is None else without.policy.to_dict(),
            },
            "tune": shares(self.tune),
            "test": shares(self.test),
            "reason": self.deadline_reason,
            "gain_with_margin": None if self.deadline_gain is None else self.deadline_gain.to_dict(),
            "left_out": None if self.left_out is None else self.left_out.to_dict(),
            "tried": [asdict(one) | {"objective": finite(one.objective)} for one in self.tried],
        }

    def _envelope(self, certificate: Certificate) -> dict[str, Any]:
        """What ``calib watch`` holds traffic against.

        Any candidate could have come out first on held-out questions; the tune questions chose among all budgets and
        deadlines, and the policies with routes that were offered.
        """
        held_out = self.test is not None
        knobs = len(self.outcomes.budgets) * (1 + len(self.tried))
        knobs += 0 if self.routed is None else self.routed.tried
        return envelope(
            self.reported,
            certificate.policy,
            self.demand.targets,
            held_out=held_out,
            candidates=certificate.candidates if held_out else knobs,
            sample=self.outcomes,
        )

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

        def share(target: Target) -> float:
            over = np.where(np.isnan(seconds), np.nan, seconds > 2 * target.value)
            return metrics.mean(over, outcomes.weight)

        return {"over_twice_limit": finite({str(target): share(target) for target in limits})}

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
                    "needs": finite(r.needs),
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


def tune(outcomes: Outcomes, demand: Demand, *, ledger: Ledger | None = None, routes: Offer | None = None) -> Tuned:
    """Find the best policy inside the targets on the tune questions, and test it on those held out.

    Parameters
    ----------
    outcomes : Outcomes
    demand : Demand
    ledger : callable, optional
        Counts the looks at the test split; each run is the first look when left out.
    routes : callable, optional
        Offers policies with routes, where the demand says what they go by.

    Raises
    ------
    CalibError
        A target on a metric that is not known here, an arm or a budget that was not collected, too few to split,
        routes by something that is the same for all questions.
    """
    tuned_on, held_out = outcomes.split(demand.test_share)
    tuned_on = _weighted_as(outcomes, tuned_on)
    held_out = None if held_out is None else _weighted_as(outcomes, held_out)
    if demand.route_by is not None:
        check_routes(tuned_on, demand.route_by)
    serving = Serving(tuned_on, demand)
    search = Spaces(serving, demand, outcomes)
    warnings = [*outcomes.warnings, *search.warnings, *_unheard(outcomes, held_out)]
    required = _required(demand, tuned_on, held_out)
    found = _found(search, required)
    if demand.deadlines == "auto" and found:
        at = _kept(found)
        worth = search.worthwhile(found[at], required[at])
        if worth is not search:
            search, found = worth, _found(worth, required)
    best, plain, tried, cut_short, several = search.best, found, 0, False, Taken(found)
    if demand.route_by is not None and routes is not None:
        starts = list(dict.fromkeys(policy_of(one) for one in found.values()))
        given = routes(tuned_on, best, starts, required.get(1.0, {}))
        cut_short = given is None
        offered = [one for one in given or () if one.routes]
        tried, several = len(offered), taken(offered, tuned_on, demand, found, required, best)
        found = dict(several.best)
    if not found:
        nearest = serving.nearest(search.nearest())
        nowhere = None
        if demand.route_by is not None:
            nowhere = Routed(demand.route_by, tried, best, None, several.refused, cut_short=cut_short)
            warnings.extend(nowhere.warnings())
        warnings.extend(serving.warnings(None))
        return Tuned(
            *(demand, outcomes, tuned_on, held_out, best, None, nearest, (), math.nan, {}, tuple(warnings)),
            calibration=serving.fitted(None),
            searched=serving.searched,
            without_deadline=search.without_deadline,
            tried=search.tried,
            routed=nowhere,
        )

    if search.left_out is not None:
        warnings.append(search.left_out.sentence)
    if 1.0 in required and 1.0 not in found:
        each = search.optima([{target: most} for target, most in required[1.0].items()])
        alone = [target for target, one in zip(required[1.0], each, strict=True) if one.policy is None]
        named = f" of {', '.join(map(str, alone))}" if alone else "s"
        warnings.append(
            f"no policy leaves the whole margin below the limit{named}: on new questions they may well be broken. "
            "More questions need less margin"
        )
    chosen = found[_kept(found)]
    margin_cost = abs(found[0.0].objective - chosen.objective) if len(found) > 1 else math.nan
    if demand.cheapest:
        found = {factor: search.cheapest(one, required[factor]) for factor, one in found.items()}
        chosen = found[_kept(found)]
    candidates = [serving.policy(policy) for policy in _distinct(found, best.maximize)]

    rng = np.random.default_rng(demand.seed)
    fallback = candidates.index(serving.policy(policy_of(chosen)))
    beside: dict[Policy, Policy] = {}
    for policy in candidates if demand.route_by is not None else ():
        without = plain.get(factor_of(found, plain, policy)) if policy.routes else None
        if without is not None:
            beside[policy] = policy_of(without)
    certificate, comparisons = judged(outcomes, demand, candidates, tuned_on, held_out, ledger, rng, fallback, beside)
    routed = None
    if demand.route_by is not None:
        factor, routes_of = factor_of(found, plain, certificate.policy), policy_of(chosen).routes
        routed = Routed(
            *(demand.route_by, tried, found[factor], plain.get(factor), several.refused, several.left_out),
            policy_of(chosen) if routes_of and not certificate.policy.routes else None,
            cut_short,
        )
    return Tuned(
        demand,
        outcomes,
        tuned_on,
        held_out,
        serving.optimum(best),
        certificate,
        None,
        () if best.policy is None else serving.prices(search.prices(best)),
        margin_cost,
        comparisons,
        (
            *warnings,
            *serving.warnings(certificate.policy),
            *deadline.warnings(tuned_on, certificate.policy),
            *([] if routed is None else routed.warnings()),
            *_warnings(serving.searched, certificate, comparisons),
        ),
        serving.fitted(certificate.policy),
        serving.searched,
        None if search.without_deadline is None else serving.optimum(search.without_deadline),
        search.tried,
        search.left_out,
        search.gain,
        routed,
    )


def judged(
    outcomes: Outcomes,
    demand: Demand,
    candidates: Sequence[Policy],
    tuned_on: Outcomes,
    test: Outcomes | None,
    ledger: Ledger | None,
    rng: np.random.Generator,
    fallback: int = 0,
    beside: Mapping[Policy, Policy] | None = None,
) -> tuple[Certificate, dict[str, Comparison]]:
    """The verdict on candidates, and the returned one beside each baseline; one look at the test side, if there is one.

    Parameters
    ----------
    outcomes, tuned_on, test : Outcomes
        All questions and both sides; without a test side the figures are those of the tune side.
    demand : Demand
    candidates : sequence of Policy
        In the order in which they are tested.
    ledger : callable, optional
        Counts the look.
    rng : numpy.random.Generator
        Of the bootstrap.
    fallback : int, default 0
        The candidate that is returned when none is certified.
    beside : mapping of Policy to Policy, optional
        What a candidate is compared with besides, if it is returned: the best one policy for all (`ONE_FOR_ALL`).
    """
    look = 1
    if test is not None and ledger is not None:
        look = ledger(split_identity(outcomes), look_of(demand, candidates, outcomes))
    certificate = certify.certify(
        candidates,
        tuned_on,
        test,
        demand.targets,
        rng=rng,
        level=demand.level,
        look=look,
        cost=demand.cost,
        resamples=demand.resamples,
        fallback=fallback,
    )
    reported = tuned_on if test is None else test
    alone = (beside or {}).get(certificate.policy)
    others = {} if alone is None else {ONE_FOR_ALL: alone}
    rivals = {name: decide(reported, policy) for name, policy in (demand.baselines(outcomes) | others).items()}
    ours = decide(reported, certificate.policy)
    compared = intervals.compare(reported, ours, rivals, rng=rng, level=demand.level, resamples=demand.resamples)
    return certificate, compared


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


def _required(demand: Demand, tuned_on: Outcomes, held_out: Outcomes | None) -> dict[float, Mapping[Target, float]]:
    """By the share of the automatic margin: which share of the questions may break each target at most."""
    required: dict[float, Mapping[Target, float]] = {0.0: {}}
    if demand.margin and held_out is not None and demand.targets:
        # sized for a first look whatever the ledger says, so that the same run again finds the same candidates
        requirements = risk.auto_margin(demand.targets, tuned_on, held_out, alpha=alpha_at_look(demand.level, 1))
        required |= {factor: _scaled(requirements, factor) for factor in FACTORS[:-1]}
    return required


def _found(search: Spaces, required: Mapping[float, Mapping[Target, float]]) -> dict[float, Optimum]:
    """The best policy that leaves each share of the margin, where there is one; empty where none is feasible."""
    if search.best.policy is None:
        return {}
    stricter = [factor for factor in required if factor > 0]
    optima = search.optima([required[factor] for factor in stricter])
    return {0.0: search.best} | {f: one for f, one in zip(stricter, optima, strict=True) if one.policy is not None}


def _kept(found: Mapping[float, Optimum]) -> float:
    """The largest share of the margin, up to all of it, that some policy leaves."""
    return max(factor for factor in found if factor <= 1)


def _scaled(requirements: Iterable[Requirement], factor: float) -> dict[Target, float]:
    """Largest share that may break each target, for a part or a multiple of the margin."""
    return {r.target: max(0.0, r.limit - factor * (r.limit - r.max_share)) for r in requirements if r.power}


def _distinct(found: Mapping[float, Optimum], maximize: bool) -> list[Policy]:
    """Different policies, best first: less margin is never worse on the tune questions, and ties keep more of it."""
    sign = -1.0 if maximize else 1.0
    ordered = sorted(found.items(), key=lambda item: (sign * item[1].objective, -item[0]))
    return list(dict.fromkeys(policy_of(one) for _, one in ordered))


def _warnings(tuned_on: Outcomes, certificate: Certificate, comparisons: Mapping[str, Comparison]) -> list[str]:
    policy, found = certificate.policy, []
    if ESTIMATED in certificate.marks:
        found.append("latency is estimated from rates or a fitted line: it can be met, never certified")
    if SIMULATED in certificate.marks:
        found.append("simulated: no real model answered; the numbers say nothing about a real server")
    alike = [name for name, c in comparisons.items() if not c.distinguishable]
    if alike:
        found.append(f"accuracy cannot be told apart from {', '.join(alike)} on {certificate.n} questions")
    thinking = np.zeros(tuned_on.n, dtype=bool)  # whatever its route goes by
    for part, mask in policy.parts(tuned_on):
        thinking |= mask & (part.threshold > NEVER)
    if thinking.any():
        for row in hurting(why(tuned_on, policy.think_budget, policy.arm, policy.mix)):
            if row.proven and thinking[tuned_on.dataset == row.dataset].any():
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
    readings = {reading for policy in policies for reading in policy.readings(o)}
    for arm, budget in sorted(readings, key=lambda reading: (reading[0], reading[1] or 0)):
        a = o.arm_index(arm)
        arrays += [o.t1[a], o.estimated[a, :1]]
        if budget is None:
            continue
        b = o.budget_index(budget)
        arrays += [o.p2[:, b], o.tokens[:, b], o.t2[a, :, b], o.estimated[a, 1 + b : 2 + b]]
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

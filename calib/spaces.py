"""The spaces that `tune` searches: without a deadline, arm by arm at a rate, and one for each deadline.

`Spaces` asks the exact tables of all of them the same questions and compares what they find; `Serving` knows what the
search sees of the questions, and what is served for a policy that it finds. Leaves to `calib.optimise` the search in
one table, to `calib.tuning` margin and verdict.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from calib import calibrate, deadline, intervals, optimise
from calib.calibrate import Calibration
from calib.demand import Demand, throughput
from calib.errors import CalibError
from calib.gain import Gain, Unproven, gain_over
from calib.optimise import Optimum, Table, optimum, tabulate
from calib.outcomes import Outcomes
from calib.policy import ON_DEADLINE, Decisions, Policy, decide, evaluate
from calib.target import Target

__all__ = ["LeftOut", "Serving", "Spaces", "Tried", "gain_of", "policy_of"]

_SAME = 1e-12
"""Objectives this close are equal."""

_KEPT = 5_000_000
"""Most thresholds, over all budgets, of tables with a deadline that are kept at once (about 64 bytes each)."""


class Serving:
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

    def table(self, late: _Late | None = None) -> Table:
        """Of the questions as the search sees them; under a deadline where one is given."""
        pool = "linear" if self._fitted is None else self._fitted.pool
        asked = self.demand
        # what p1 repeats to is known of the plain confidence alone
        repeats = asked.repeats if asked.confidence == "max" and self._fitted is None else None
        if late is None:
            return tabulate(
                self.searched, asked.arms, asked.budgets, confidence=asked.confidence, pool=pool, repeats=repeats
            )
        return tabulate(
            self.searched,
            [late.arm],
            late.budgets,
            confidence=asked.confidence,
            pool=pool,
            deadline=late.deadline,
            on_deadline=late.on_deadline,
            repeats=repeats,
        )

    def policy(self, plain: Policy) -> Policy:
        """What is served for a policy of the search."""
        if self._fitted is None:
            return plain
        if plain not in self._served:
            read = self.raw
            if plain.deadline is not None:
                read = deadline.as_read(read, plain.arm, plain.think_budget, plain.deadline, plain.on_deadline)
            finished = calibrate.finish(read, self._fitted, plain)
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
        if self._fitted is None or best.policy is None:
            return best
        policy = self.policy(best.policy)
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


@dataclass(frozen=True)
class Tried:
    """One deadline that was looked at, in one arm, with one rule for the thoughts that it closes.

    Attributes
    ----------
    arm : str
    deadline : float
        Seconds.
    on_deadline : str
        One of `calib.policy.ON_DEADLINE`.
    objective : float
        Best inside the targets on the tune questions; NaN where they cannot be met.
    """

    arm: str
    deadline: float
    on_deadline: str
    objective: float


@dataclass(frozen=True, eq=False)
class LeftOut(Unproven):
    """The best policy with a deadline, which was not taken: its gain over the best one without could be chance.

    Attributes
    ----------
    tried : int
        Deadlines, arms and rules that it is the best of.
    """

    tried: int

    @property
    def sentence(self) -> str:
        """What was left out, and how to have it all the same."""
        seconds = f"{self.policy.deadline:g}s"
        return (
            f"a deadline of {seconds} was left out: its gain on the tune questions, {self.gain}, could be chance (the "
            f"best of {self.tried} tried), and only the gateway could keep it; to have it: --deadline {seconds}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**super().to_dict(), "tried": self.tried}


class _Late(NamedTuple):
    """A deadline to be searched: in one arm, with one rule, at the budgets where it changes something."""

    arm: str
    deadline: float
    on_deadline: str
    budgets: tuple[int, ...]


class Spaces:
    """The questions that `tune` puts to the exact tables: always the same targets, objective and sustainable arms.

    One table has the policies without a deadline (one for each arm where a rate is asked for). Each deadline has a
    table for each arm and rule; few are kept at a time, since they are many, so what can be asked together is.

    Parameters
    ----------
    serving : Serving
    demand : Demand
    whole : Outcomes
        All questions, those held out too: a deadline must be known for each of them.

    Attributes
    ----------
    best : Optimum
        Inside the targets. Of equal ones the cheapest, then the one without a deadline.
    without_deadline : Optimum or None
        The best without a deadline; None where no deadline was asked for.
    tried : tuple of Tried
    left_out : LeftOut or None
        What `worthwhile` left out.
    gain : Gain or None
        Why `worthwhile` left none out, where some policy leaves the same margin without: the gain over that.
    warnings : list of str
    """

    left_out: LeftOut | None = None
    gain: Gain | None = None

    def __init__(self, serving: Serving, demand: Demand, whole: Outcomes) -> None:
        self.demand, self._serving = demand, serving
        self._asked: dict[str, Any] = {"maximize": demand.maximize, "minimize": demand.minimize, "cost": demand.cost}
        table = serving.table()
        self._plain = {table: demand.targets}
        if demand.rate is not None:  # each arm can sustain its own number of tokens a request
            self._plain = {table.only([arm]): demand.limits(table.outcomes, arm) for arm in table.arms}
        self.warnings = self._unsustainable()
        self._late = list(self._deadlines(table, whole)) if demand.deadlines else []
        self._kept: dict[_Late, Table] = {}

        optima = [(late, optimum(table, targets, **self._asked)) for late, table, targets in self._tables()]
        self.best = self._best_of(one for _, one in optima)
        self.without_deadline = self._best_of(one for late, one in optima if late is None) if demand.deadlines else None
        self.tried = tuple(Tried(*late[:3], one.objective) for late, one in optima if late is not None)

    def _deadlines(self, table: Table, whole: Outcomes) -> Iterator[_Late]:
        """Every deadline that closes a thought, by arm, rule and budgets; arms whose seconds are not known are told."""
        o, refused = table.outcomes, []
        for arm in table.arms:
            missing = deadline.unknown(whole, arm, table.budgets[-1])
            if missing is not None:
                refused.append(missing)
                continue
            a = o.arm_index(arm)
            for seconds in self.demand.deadlines_of(o, arm, table.budgets[-1]):
                cuts = {b: deadline.close_in_time(o, a, o.budget_index(b), seconds, "system2") for b in table.budgets}
                closing = tuple(b for b, cut in cuts.items() if cut.closed.any())
                # where nothing is known of any closed thought both rules are one here, and only this one is predicted
                read = tuple(b for b in closing if not cuts[b].unread[cuts[b].closed].all())
                for rule, budgets in zip(ON_DEADLINE, (read, closing), strict=True):
                    if budgets:
                        yield _Late(arm, seconds, rule, budgets)
        if len(refused) == len(table.arms):
            raise CalibError(f"--deadline: {refused[0]}")
        self.warnings += [f"no deadline was tried in one arm: {text}" for text in refused]

    def _tables(self) -> Iterator[tuple[_Late | None, Table, Sequence[Target]]]:
        """Each table with its targets: without a deadline, then each deadline."""
        for table, targets in self._plain.items():
            yield None, table, targets
        size = 0
        for late in self._late:
            made = self._kept.get(late) or self._serving.table(late)
            size += math.prod(made.shape)
            if size <= _KEPT:
                self._kept[late] = made
            yield late, made, self.demand.limits(made.outcomes, late.arm)

    def _best_of(self, found: Iterable[Optimum]) -> Optimum:
        several = list(found)
        known = [one for one in several if one.policy is not None]
        if not known:
            return several[0]
        sign = 1 if several[0].maximize else -1
        most = max(sign * one.objective for one in known)
        return min((one for one in known if sign * one.objective >= most - _SAME * max(abs(most), 1.0)), key=_expense)

    def optima(self, requirements: Sequence[Mapping[Target, float]]) -> list[Optimum]:
        """The best policy under each of the requirements: which share may break a target at most."""
        found: list[list[Optimum]] = [[] for _ in requirements]
        for _, table, targets in self._tables():
            for kept, required in zip(found, requirements, strict=True):
                kept.append(optimum(table, targets, **self._asked, requirements=required))
        return [self._best_of(some) for some in found]

    def worthwhile(self, found: Optimum, requirements: Mapping[Target, float]) -> Spaces:
        """These spaces, or those without a deadline where none is worth what it takes: a gateway to keep it.

        One is where nothing is feasible without, or none without leaves as much of the margin (untested then: only the
        deadline keeps that room), or where the policy that was found under the requirements gains more in the objective
        than chance would, on the tune questions, over the best without a deadline and with the same margin. The level
        is not shared out among the deadlines that were tried: the policy without one is the best of as many as well,
        and where none gains in truth one in a thousand was taken in simulations.
        """
        if self.without_deadline is None or not self._late:
            return self
        policy = policy_of(found)
        alone = copy.copy(self)
        alone._late, alone._kept, alone.best = [], {}, self.without_deadline
        if policy.deadline is None:
            return alone
        (plain,) = alone.optima([requirements])
        if plain.policy is None:
            return self
        gain = gain_of(found, plain, next(iter(self._plain)).outcomes, self.demand)
        if gain.beyond_noise:
            self.gain = gain
            return self
        if gain.value > 0:  # else it is merely the cheaper one of two that do alike
            alone.left_out = LeftOut(policy, gain, len(self._late))
        return alone

    def nearest(self) -> optimise.Nearest:
        """What to give up: the policy that violates least, and the least change of each limit that some table has.

        Where arms differ in what they sustain, so do their limits: there the changes are those of the policy's arm.
        """
        arms, found = [], []
        for _, table, targets in self._tables():
            arms.append(table.arms)
            found.append(optimise.nearest(table, targets, **self._asked))
        closest = min(range(len(found)), key=lambda i: found[i].violation)
        comparable = [
            one.relaxations
            for one, of in zip(found, arms, strict=True)
            if self.demand.rate is None or of == arms[closest]
        ]
        relaxations = tuple(min(alike, key=_change) for alike in zip(*comparable, strict=True))
        return replace(found[closest], relaxations=relaxations)

    def prices(self, best: Optimum) -> tuple[optimise.Price, ...]:
        """What each limit costs, in the arm of the best policy where arms differ in what they sustain."""
        arm = policy_of(best).arm
        limits = next(targets for table, targets in self._plain.items() if arm in table.arms)
        free: list[list[Optimum]] = [[] for _ in limits]
        for _, table, _ in self._tables():
            if self.demand.rate is None or table.arms == (arm,):
                for some, target in zip(free, limits, strict=True):
                    rest = [other for other in limits if other != target]
                    some.append(optimum(table, rest, **self._asked))
        return tuple(
            optimise.Price.of(target, self._best_of(some), best) for target, some in zip(limits, free, strict=True)
        )

    def cheapest(self, best: Optimum, requirements: Mapping[Target, float]) -> Optimum:
        """The cheapest policy that keeps the same margin and cannot be told apart from the best by accuracy."""
        if best.metric != "accuracy":
            raise CalibError("--prefer cheapest compares accuracy: leave out --minimize, or use --prefer best")
        found = (self._cheapest_in(table, targets, best, requirements) for _, table, targets in self._tables())
        return min((one for one in found if one is not None), key=_expense, default=best)

    def _cheapest_in(
        self, table: Table, targets: Sequence[Target], best: Optimum, requirements: Mapping[Target, float]
    ) -> Optimum | None:
        """The same among the arms of one table; compared in pairs, by group."""
        outcomes = table.outcomes
        ours = decide(outcomes, policy_of(best))
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

    def _unsustainable(self) -> list[str]:
        """What is not known about the load that each arm carries."""
        if self.demand.rate is None:
            return []
        outcomes = next(iter(self._plain)).outcomes
        unknown = [arm for table in self._plain for arm in table.arms if throughput(outcomes, arm) is None]
        return [
            f"--rate: tokens/s of arm {arm!r} were not measured at a known concurrency: what it sustains is unknown"
            for arm in unknown
        ]


def policy_of(found: Optimum) -> Policy:
    """The policy of an optimum that has one."""
    assert found.policy is not None
    return found.policy


def gain_of(ours: Optimum, other: Optimum, outcomes: Outcomes, demand: Demand) -> Gain:
    """What one optimum gains over another in the objective, on the tune questions."""
    return gain_over(
        outcomes,
        decide(outcomes, policy_of(ours)),
        decide(outcomes, policy_of(other)),
        ours.metric,
        maximize=ours.maximize,
        rng=np.random.default_rng(demand.seed),
        level=demand.level,
        resamples=demand.resamples,
        cost=demand.cost,
    )


def _expense(found: Optimum) -> tuple[float, float, float]:
    """What ties between arms go by: mean latency where it is known, tokens, think rate."""
    score = found.evaluation
    assert score is not None
    return (math.inf if math.isnan(score.mean) else score.mean), score.tokens, score.think_rate


def _change(relaxation: optimise.Relaxation) -> float:
    """How far a limit has to move, to compare changes of the same target."""
    if relaxation.needs is None:
        return math.inf
    return relaxation.needs if relaxation.target.upper else -relaxation.needs


def _surely_worse(outcomes: Outcomes, ours: Decisions, other: Decisions) -> bool:
    """Whether the paired difference is beyond 3 standard errors by group: no need for a bootstrap."""
    change = (ours.choice == outcomes.answer) * 1.0 - (other.choice == outcomes.answer)
    total = np.bincount(outcomes.group_codes, outcomes.weight * change)
    weight = np.bincount(outcomes.group_codes, outcomes.weight)
    mean = total.sum() / weight.sum()
    error = math.sqrt(float(((total - mean * weight) ** 2).sum())) / float(weight.sum())
    return bool(mean > 3 * error)

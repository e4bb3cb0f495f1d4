"""The verdict on stores of known truth: how often a certificate is false, and how often a good policy gets one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from calib import exact
from calib.certify import alpha_at_look, certify
from calib.policy import Policy
from calib.target import Target, parse_targets
from calib.tuning import Demand, tune
from tests.worlds import World, indifferent, ladder, seven_percent

RESAMPLES = 2
"""Of the bootstrap: the verdict does not rest on it."""
P90 = parse_targets("p90<1s")
_STEEP = ladder(60, late2=0.25)


class Ledger:
    """Numbers the looks of one store, as its ledger does: the same look keeps its number."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], int] = {}

    def __call__(self, split: str, look: Mapping[str, Any]) -> int:
        key = split, json.dumps(look, sort_keys=True)
        return self._known.setdefault(key, 1 + sum(known == split for known, _ in self._known))


class Family(NamedTuple):
    """Stores that are drawn from one law, or each from its own, and what is asked of them."""

    name: str
    about: str
    n: int


FAMILIES = (
    Family("p90 on the limit", "10 arms; every policy is late on exactly 10 %", 1000),
    Family("p90 slightly broken", "10 arms; every policy is late on 10.3 %", 1000),
    Family("accuracy on the limit", "3 budgets; every policy is right exactly as often as asked, 72 %", 1000),
    Family("accuracy slightly broken", "3 budgets; every policy is right 0.3 points less often than asked", 1000),
    Family("one of two broken", "10 arms; every policy is late on 10.3 %, and 20 points better than asked", 1000),
    Family("ordinary", "2 arms, 2 budgets, 40 laws; asked is 6 points less to 1 more than the best inside p90", 2340),
)

LAWS = 40
"""Different laws in the family `ordinary`."""


@cache
def _law(family: str, number: int) -> tuple[World, tuple[Target, ...], float]:
    """Law, targets besides the one on accuracy, and the true accuracy that this one is placed beside, if any."""
    if family in ("p90 on the limit", "p90 slightly broken", "one of two broken"):
        share = 0.1 if family == "p90 on the limit" else 0.103
        world = ladder(12, late1=[share] * 10)
        return (
            world,
            P90,
            world.truth(Policy(0.0, 0.5, 100, "arm0")).accuracy if family == "one of two broken" else math.nan,
        )
    if family != "ordinary":
        world = indifferent(12, 3)
        return world, (), world.best()
    rng = np.random.default_rng([0, number])
    world = ladder(12, 2, late1=[0.02, 0.05], late2=float(rng.uniform(0.05, 0.25)), rng=rng)
    return world, P90, world.best(late=0.1)


_ASKED = {"accuracy on the limit": 0.0, "accuracy slightly broken": 0.003, "one of two broken": -0.2}


def _asked(family: str, number: int, rng: np.random.Generator) -> tuple[World, tuple[Target, ...]]:
    world, targets, accuracy = _law(family, number)
    if math.isnan(accuracy):
        return world, targets
    beyond = float(rng.uniform(-0.06, 0.01)) if family == "ordinary" else _ASKED[family]
    return world, (*targets, Target("accuracy", ">=", accuracy + beyond))


def _false(family: str, world: World, targets: tuple[Target, ...], policy: Policy) -> bool:
    """Exactly on a limit counts as broken: there the test spends all that it may."""
    if family.endswith("on the limit"):
        truth = world.truth(policy)
        on_it = truth.late - 0.1 if targets == P90 else truth.accuracy - targets[0].value
        assert abs(on_it) < 1e-9
        return True
    return any(world.truth(policy).breaks(target) for target in targets)


def verdicts(family: Family, seed: int) -> dict[str, float]:
    """One store, one run of `tune`."""
    rng = np.random.default_rng([1, seed])
    world, targets = _asked(family.name, seed % LAWS if family.name == "ordinary" else 0, rng)
    tuned = tune(world.draw(rng, family.n), Demand(targets, resamples=RESAMPLES))
    certified = tuned.verdict == "certified"
    false = certified and tuned.policy is not None and _false(family.name, world, targets, tuned.policy)
    return {"feasible": tuned.policy is not None, "certified": certified, "false": false}


def ten_candidates(seed: int) -> dict[str, float]:
    """Ten policies exactly on the limit in one call of `certify`; naive: keep whichever passes by itself."""
    rng = np.random.default_rng([2, seed])
    world = ladder(12, late1=[0.1] * 10)
    seen, held_out = world.draw(rng, 1000).split(0.3)
    assert held_out is not None
    candidates = [Policy(0.7, 0.5, 100, arm) for arm in world.arms]
    found = certify(candidates, seen, held_out, P90, rng=rng, resamples=RESAMPLES)
    late = (held_out.t1 > 1).sum(axis=1)
    naive = (late <= exact.critical_count(held_out.n, 0.1, alpha_at_look(0.95, 1))).any()
    return {"false": found.verdict == "certified", "naive": naive}


def twenty_runs(seed: int) -> dict[str, float]:
    """Twenty runs of `tune` on one split, each for another arm, all exactly on the limit; naive: no ledger."""
    rng = np.random.default_rng([3, seed])
    world, ledger = ladder(6, late1=[0.1] * 20), Ledger()
    outcomes = world.draw(rng, 1000)
    false, naive, looks = False, False, 0
    for arm in world.arms:
        tuned = tune(outcomes, Demand(P90, arms=[arm], resamples=RESAMPLES), ledger=ledger)
        if tuned.certificate is None:
            continue
        looks = tuned.certificate.look
        false |= tuned.verdict == "certified"
        p = tuned.certificate.tests[0].p_value
        naive |= p is not None and p <= alpha_at_look(0.95, 1)
    return {"false": false, "naive": naive, "looks": looks}


def power(seed: int) -> dict[str, float]:
    """2,340 questions, 702 of them held out, where the best policy inside the limit is late on 7 %."""
    rng, world = np.random.default_rng([4, seed]), seven_percent()
    tuned = tune(world.draw(rng, 2340), Demand(P90, resamples=RESAMPLES))
    ours = tuned.policy is not None and abs(world.truth(tuned.policy).late - 0.07) < 1e-12
    return {"certified": ours and tuned.verdict == "certified"}


def power_by_law() -> float:
    """Chance that the test alone passes at 7 % of 702."""
    most = exact.critical_count(702, 0.1, alpha_at_look(0.95, 1))
    return float(stats.binom.cdf(most, 702, 0.07))


def onto_the_limit(seed: int) -> dict[str, float]:
    """2,340 questions where thinking about more of them is better and later: the search goes as far as it may."""
    rng, world = np.random.default_rng([5, seed]), _STEEP
    outcomes = world.draw(rng, 2340)
    found: dict[str, float] = {}
    for name, margin in (("auto", True), ("0", False)):
        tuned = tune(outcomes, Demand(P90, margin=margin, resamples=RESAMPLES))
        assert tuned.policy is not None
        truth = world.truth(tuned.policy)
        found[f"certified {name}"] = tuned.verdict == "certified"
        found[f"broken {name}"] = truth.breaks(P90[0])
        found[f"late {name}"], found[f"accuracy {name}"] = truth.late, truth.accuracy
    return found


def onto_the_limit_best() -> float:
    """Largest true accuracy inside the limit, of the law of `onto_the_limit`."""
    return _STEEP.best(late=0.1)

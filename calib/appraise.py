"""The evidence for a policy that a person chose: figures on the tune questions, and the test once it is asked for.

`calib.tuning.tune` searches and then tests; here the policy is given. The document has the same form, so that what
was chosen by hand is exported, compared and rolled back like what was tuned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from calib.certify import alpha_at_look
from calib.optimise import Table, optimum
from calib.outcomes import ESTIMATED, SIMULATED, Outcomes
from calib.policy import Policy
from calib.tuning import Demand, Ledger, Tuned, judged

__all__ = ["Allowance", "allowance", "appraise"]


@dataclass(frozen=True)
class Allowance:
    """What looks at a test split have spent of the chance of a false certificate, and what is left.

    Attributes
    ----------
    looks : int
        So far.
    total, spent : float
        1 - level, and what the looks so far took of it.
    next_alpha : float
        What the next look may spend.
    """

    looks: int
    total: float
    spent: float
    next_alpha: float

    @property
    def left(self) -> float:
        """Share of the total that is left, 0 to 1."""
        return 1 - self.spent / self.total


def allowance(looks: int, level: float = 0.95) -> Allowance:
    """What is left after so many looks."""
    spent = math.fsum(alpha_at_look(level, k) for k in range(1, looks + 1))
    return Allowance(looks, 1 - level, spent, alpha_at_look(level, looks + 1))


def appraise(
    outcomes: Outcomes,
    demand: Demand,
    policy: Policy,
    *,
    table: Table | None = None,
    ledger: Ledger | None = None,
) -> Tuned:
    """Judge one given policy.

    Parameters
    ----------
    outcomes : Outcomes
    demand : Demand
        Targets, test share, level; the rest only says what the exact optimum beside it is.
    policy : Policy
    table : Table, optional
        Of the tune questions, where it is known.
    ledger : callable, optional
        Counts the look at the test split. Without one the test questions are not looked at: the figures are those of
        the tune questions and the verdict is ``met`` at best.

    Raises
    ------
    CalibError
        A target on a metric that is not known here, an arm or a budget that was not collected, too few to split.
    """
    tuned_on, held_out = outcomes.split(demand.test_share)
    best = optimum(
        tuned_on if table is None else table,
        demand.targets,
        maximize=demand.maximize,
        minimize=demand.minimize,
        cost=demand.cost,
    )
    test = None if ledger is None else held_out
    rng = np.random.default_rng(demand.seed)
    certificate, comparisons = judged(outcomes, demand, [policy], tuned_on, test, ledger, rng)
    warnings = [*outcomes.warnings]
    if test is None:
        warnings.append("not tested on held-out questions: these are figures of the tune questions")
    if ESTIMATED in certificate.marks:
        warnings.append("latency is estimated from rates or a fitted line: it can be met, never certified")
    if SIMULATED in certificate.marks:
        warnings.append("simulated: no real model answered; the numbers say nothing about a real server")
    return Tuned(demand, outcomes, tuned_on, test, best, certificate, None, (), math.nan, comparisons, tuple(warnings))

"""Policies with routes in a run of ``calib optimize``: what they are asked for, and which of them is taken.

No table holds their space: somebody else offers policies (``calib optimize --routes``: the trials of a study), and here
they are held against the best one policy for all, with each share of the margin. Leaves to `calib.spaces` that policy,
to `calib.tuning` the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from calib.demand import ROUTES, Demand
from calib.errors import CalibError
from calib.knobs import uncarried
from calib.optimise import Optimum
from calib.outcomes import Outcomes
from calib.policy import Policy, decide, evaluate_decisions
from calib.risk import violation_share
from calib.target import Target

__all__ = ["Offer", "Routed", "check_routes", "taken"]

_SAME = 1e-12
"""Objectives and shares this close are equal."""


class Offer(Protocol):
    """Gives policies with routes that were found on the tune questions."""

    def __call__(
        self, outcomes: Outcomes, exact: Optimum, starts: Sequence[Policy], requirements: Mapping[Target, float], /
    ) -> Iterable[Policy]:
        """Look for them.

        Parameters
        ----------
        outcomes : Outcomes
            The tune questions.
        exact : Optimum
            The best one policy for all inside the targets.
        starts : sequence of Policy
            One policy for all each, with and without the margin; empty where none is feasible.
        requirements : mapping of Target to float
            Share of the questions that may break each target at most, so that the whole margin is left.
        """


@dataclass(frozen=True, eq=False)
class Routed:
    """What came of looking for routes.

    Attributes
    ----------
    by : str
        What they go by.
    tried : int
        Policies with routes that were offered.
    best : Optimum
        The best policy with the margin, with routes or without.
    without : Optimum or None
        The same without routes: one policy for all, or None where none is feasible.
    """

    by: str
    tried: int
    best: Optimum
    without: Optimum | None

    @property
    def gain(self) -> float:
        """Of the objective on the tune questions; NaN without anything to compare with.

        Below 0 where only routes leave all of the margin, and one policy for all does better with less of it.
        """
        if self.without is None:
            return math.nan
        gain = self.best.objective - self.without.objective
        return gain if self.best.maximize else 0.0 - gain

    def warnings(self, policy: Policy) -> list[str]:
        """What to know of the routes of the policy that is returned: that it has none, or who can take them."""
        if not policy.routes:
            return [
                f"no policy with routes by {self.by} does better than one policy for all ({self.tried} tried): this is "
                "one policy for all"
            ]
        missing = uncarried(policy, ())
        by = f", by the {self.by} that clients send with each request: --route-keys {self.by}" if missing else ""
        return [f"only the gateway takes the routes (calib serve; calib export --held-by gateway){by}"]


def check_routes(outcomes: Outcomes, by: str) -> None:
    """Refuse routes by something that is the same for all questions."""
    values = np.unique(column(outcomes, by))
    if len(values) < 2:
        raise CalibError(
            f"--routes {by}: {by} is {str(values[0])!r} for all of the {outcomes.n} tune questions, so that no route "
            f"could tell them apart; leave the option out, or take another: {', '.join(ROUTES)}"
        )


def column(outcomes: Outcomes, by: str) -> np.ndarray:
    """What routes go by, as text, shape (N,)."""
    found = {"dataset": outcomes.dataset, "kind": outcomes.kind, "n_options": outcomes.n_options}[by]
    return found.astype(str)


def taken(
    offered: Iterable[Policy],
    outcomes: Outcomes,
    demand: Demand,
    found: Mapping[float, Optimum],
    required: Mapping[float, Mapping[Target, float]],
    exact: Optimum,
) -> dict[float, Optimum]:
    """The best policy for each share of the margin, with routes where those do better.

    Parameters
    ----------
    offered : iterable of Policy
    outcomes : Outcomes
        The tune questions.
    demand : Demand
    found : mapping of float to Optimum
        The best one policy for all by the share of the margin that it leaves.
    required : mapping of float to mapping
        Share of the questions that may break each target at most, for each share of the margin.
    exact : Optimum
        Says what is maximised or minimised.
    """
    sign = 1 if exact.maximize else -1
    known: list[tuple[Optimum, Mapping[Target, float]]] = []
    broken = {target for requirements in required.values() for target in requirements}
    for policy in offered:
        decisions = decide(outcomes, policy)
        score = evaluate_decisions(outcomes, decisions, by_dataset=True, cost=demand.cost)
        value = float(getattr(score, exact.metric))
        if not math.isnan(value) and all(target.met(score) for target in demand.limits(outcomes, policy.arm)):
            one = replace(exact, policy=policy, objective=value, evaluation=score)
            known.append((one, {target: violation_share(target, outcomes, decisions) for target in broken}))
    best = dict(found)
    for factor, requirements in required.items():
        fitting = [one for one, of in known if all(of[t] <= most + _SAME for t, most in requirements.items())]
        winner = max(fitting, key=lambda one: sign * one.objective, default=None)
        if winner is None:
            continue
        rival = found.get(factor)
        if rival is None or sign * (winner.objective - rival.objective) > _SAME * max(abs(rival.objective), 1.0):
            best[factor] = winner
    return best

"""Policies with routes in a run of ``calib optimize``: what they are asked for, and which of them is taken.

No table holds their space: somebody else offers policies (``calib optimize --routes``: the trials of a study), and here
they are held against the best one policy for all, with each share of the margin, and left out where what they gain
could be chance. Leaves to `calib.spaces` that policy, to `calib.tuning` the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from calib.demand import Demand
from calib.errors import CalibError
from calib.gain import Unproven
from calib.jsonnumbers import finite
from calib.knobs import ROUTE_KEYS, uncarried
from calib.optimise import Optimum
from calib.outcomes import Outcomes
from calib.policy import Policy, decide, evaluate_decisions
from calib.risk import violation_share
from calib.spaces import gain_of, policy_of
from calib.target import Target

__all__ = ["Offer", "Routed", "Taken", "check_routes", "column", "factor_of", "taken"]

_SAME = 1e-12
"""Objectives and shares this close are equal."""


class Offer(Protocol):
    """Gives policies with routes that were found on the tune questions."""

    def __call__(
        self, outcomes: Outcomes, exact: Optimum, starts: Sequence[Policy], requirements: Mapping[Target, float], /
    ) -> Iterable[Policy] | None:
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

        Returns
        -------
        iterable of Policy or None
            None where the search was cut short: then nothing is known of routes.
        """


@dataclass(frozen=True, eq=False)
class Taken:
    """What `taken` made of the policies that were offered.

    Attributes
    ----------
    best : mapping of float to Optimum
        The best policy for each share of the margin, with routes where those do better beyond chance.
    refused : int
        Policies that were offered and have a gate finer than what p1 repeats to.
    left_out : Unproven or None
    """

    best: Mapping[float, Optimum]
    refused: int = 0
    left_out: Unproven | None = None


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
        What is returned, with routes or without; without a policy where nothing is feasible.
    without : Optimum or None
        The best one policy for all that leaves the same share of the margin; None where none does.
    refused : int
        Of those that were offered: with a gate finer than what p1 repeats to.
    left_out : Unproven or None
        The best with routes, where its gain could be chance.
    passed_over : Policy or None
        The best with routes, where another candidate without any is returned since that one passed the test.
    cut_short : bool
        Whether the search was interrupted, so that nothing is known of routes.
    """

    by: str
    tried: int
    best: Optimum
    without: Optimum | None
    refused: int = 0
    left_out: Unproven | None = None
    passed_over: Policy | None = None
    cut_short: bool = False

    @property
    def gain(self) -> float:
        """Of the objective on the tune questions; NaN without anything to compare with."""
        if self.without is None:
            return math.nan
        gain = self.best.objective - self.without.objective
        return gain if self.best.maximize else 0.0 - gain

    def warnings(self) -> list[str]:
        """What to know of the routes of what is returned: why it has none, or who can take them."""
        policy = self.best.policy
        refused = []
        if self.refused:
            refused = [
                f"{self.refused} of {self.tried} policies with routes by {self.by} were refused: their gates are finer "
                "than what p1 repeats to (calib doctor)"
            ]
        if policy is not None and policy.routes:
            missing = uncarried(policy, ())
            by = f", by the {self.by} that clients send with each request: --route-keys {self.by}" if missing else ""
            return [*refused, f"only the gateway takes the routes (calib serve; calib export --held-by gateway){by}"]
        if self.cut_short:
            return [f"the search for routes by {self.by} was cut short, so that nothing is known of them"]
        if policy is None:
            text = (
                f"no policy with routes by {self.by} meets the targets either ({self.tried} tried); the nearest is one "
                "policy for all"
            )
        elif self.passed_over is not None:
            text = (
                f"routes by {self.by} did better on the tune questions, but the candidate that passed the test has "
                "none: this is one policy for all"
            )
        elif self.left_out is not None:
            text = (
                f"routes by {self.by} were left out: their gain on the tune questions, {self.left_out.gain}, could be "
                f"chance (the best of {self.tried} tried), and only the gateway could take them: this is one policy "
                "for all"
            )
        else:
            text = (
                f"no policy with routes by {self.by} does better than one policy for all ({self.tried} tried): this is "
                "one policy for all"
            )
        return [*refused, text]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, unknown numbers None."""
        without = self.without
        return {
            "by": self.by,
            "tried": self.tried,
            "refused": self.refused,
            "cut_short": self.cut_short,
            "taken": self.best.policy is not None and bool(self.best.policy.routes),
            "gain": finite(self.gain),
            "without": None
            if without is None or without.policy is None
            else {"objective": finite(without.objective), "policy": without.policy.to_dict()},
            "left_out": None if self.left_out is None else self.left_out.to_dict(),
            "passed_over": None if self.passed_over is None else self.passed_over.to_dict(),
        }


def check_routes(outcomes: Outcomes, by: str) -> None:
    """Refuse routes by something that is the same for all questions."""
    values = np.unique(column(outcomes, by))
    if len(values) < 2:
        raise CalibError(
            f"--routes {by}: {by} is {str(values[0])!r} for all of the {outcomes.n} tune questions, so that no route "
            f"could tell them apart; leave the option out, or take another: {', '.join(ROUTE_KEYS)}"
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
) -> Taken:
    """The best policy for each share of the margin, with routes where those do better beyond chance.

    That is where none without leaves as much of the margin, or where the gain over the best without, with the same
    margin, is more than chance gives on the tune questions. No share has routes unless the largest one that is left,
    up to the whole margin, does: what is best with less margin is merely the luckier one.

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
    refused = 0
    broken = {target for requirements in required.values() for target in requirements}
    for policy in offered:
        if _noisy(policy, outcomes, demand):
            refused += 1
            continue
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
    plain = dict(found)
    at = max((factor for factor in best if factor <= 1), default=0.0)
    gains = {
        f: gain_of(one, found[f], outcomes, demand) for f, one in best.items() if f in found and one is not found[f]
    }
    if at not in best or best[at] is found.get(at):
        return Taken(plain, refused)
    if at in gains and not gains[at].beyond_noise:
        return Taken(plain, refused, Unproven(policy_of(best[at]), gains[at]))
    unproven = {factor for factor, gain in gains.items() if not gain.beyond_noise}
    return Taken({f: found[f] if f in unproven else one for f, one in best.items()}, refused)


def factor_of(found: Mapping[float, Optimum], plain: Mapping[float, Optimum], policy: Policy) -> float:
    """The share of the margin at which a policy that was found is compared with the best one policy for all.

    Of the shares for which it was found those that one policy for all leaves too, if any: the largest up to the whole
    margin, else the least beyond it.
    """
    shares = [factor for factor, one in found.items() if one.policy == policy]
    shares = [factor for factor in shares if factor in plain] or shares
    return max((factor for factor in shares if factor <= 1), default=min(shares))


def _noisy(policy: Policy, outcomes: Outcomes, demand: Demand) -> bool:
    """Whether a gate that some tune question goes through is finer than what p1 repeats to in its arm."""
    repeats = demand.repeats
    return repeats is not None and any(
        mask.any() and bool(repeats.noisy(part.threshold, part.arm)) for part, mask in policy.parts(outcomes)
    )

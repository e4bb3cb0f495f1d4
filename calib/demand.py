"""`Demand`: what is asked of `calib optimize`; the load that an arm sustains.

Leaves to `calib.spaces` how the best policy is found, to `calib.tuning` how far it can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from calib import deadline, intervals
from calib.errors import CalibError
from calib.fitness import Repeats
from calib.knobs import ROUTE_KEYS
from calib.outcomes import Outcomes
from calib.policy import Cost, Policy, baselines, evaluate
from calib.target import Target

__all__ = ["CALIBRATE", "Demand", "sustainable_rate", "throughput"]

CALIBRATE = ("none", "auto")
"""Whether the policy is tuned on calibrated probabilities: no, or with the steps that gain beyond noise."""


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
    deadlines : tuple of float or "auto"
        Seconds after which a thought is closed that are tried beside none; "auto" takes them from the limits on the
        latency and from the seconds of thinking (`calib.deadline.candidates`), and none of them where the gain could be
        chance, unless no policy leaves as much of the margin without one (`calib.spaces.Spaces.worthwhile`).
    route_by : {"dataset", "kind", "n_options"} or None
        What routes may go by that are looked for beside one policy for all; None looks for none.
    repeats : Repeats or None
        To what p1 repeats; gates that are finer are refused. None refuses none.
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
    deadlines: tuple[float, ...] | Literal["auto"] = ()
    route_by: str | None = None
    repeats: Repeats | None = None
    seed: int = 0
    resamples: int = intervals.RESAMPLES

    def __post_init__(self) -> None:
        if self.deadlines != "auto" and not all(0 < seconds < math.inf for seconds in self.deadlines):
            raise CalibError(f"deadlines must be seconds above 0, got {list(self.deadlines)}")
        if self.calibrate not in CALIBRATE:
            raise CalibError(f"--calibrate must be one of {', '.join(CALIBRATE)}, got {self.calibrate!r}")
        if self.route_by is not None and self.route_by not in ROUTE_KEYS:
            raise CalibError(f"--routes must be one of {', '.join(ROUTE_KEYS)}, got {self.route_by!r}")
        others = {
            "--deadline": bool(self.deadlines),
            "--calibrate auto": self.calibrate == "auto",
            f"--confidence {self.confidence}": self.confidence != "max",
            "--prefer cheapest": self.cheapest,
        }
        if self.route_by is not None and any(others.values()):
            named = next(name for name, given in others.items() if given)
            raise CalibError(
                f"--routes {self.route_by} with {named}: routes are looked for without it only; leave one of both out"
            )

    def limits(self, outcomes: Outcomes, arm: str) -> tuple[Target, ...]:
        """The targets, and the most tokens a request that the arm sustains at the rate, where it is known."""
        supply = None if self.rate is None else throughput(outcomes, arm)
        if supply is None or self.rate is None:
            return self.targets
        return (*self.targets, Target("tokens", "<=", supply / self.rate))

    def deadlines_of(self, outcomes: Outcomes, arm: str, largest: int) -> list[float]:
        """The deadlines to try in an arm, ascending."""
        if self.deadlines != "auto":
            return sorted(set(self.deadlines))
        limits = [target.value for target in self.targets if target.is_latency and target.upper]
        return deadline.candidates(outcomes, arm, largest, limits)

    def baselines(self, outcomes: Outcomes) -> dict[str, Policy]:
        """What one would serve without tuning, in the first arm that is looked at."""
        return baselines(outcomes, self.arms[0] if self.arms else None)


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

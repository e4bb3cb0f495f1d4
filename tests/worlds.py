"""Stores of known truth: questions drawn from a law under which the true figures of any policy are sums, not samples.

A question has two options and one of L levels of difficulty. The level fixes System 1's confidence and the chances
of everything else, and given the level all draws are independent, so that each budget and arm has its own luck: the
hardest case for a promise that must survive a search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib import metrics
from calib.outcomes import Outcomes
from calib.policy import Policy, candidate_thresholds
from calib.target import Target

LIMIT = 1.0
"""Seconds: what is late is later than this, what is not is earlier."""
QUICK, THOUGHT, LATE = 0.05, 0.4, 2.0
_SURE = 0.98  # of System 2's choice


class Truth(NamedTuple):
    """True figures of a policy on new questions: shares, 0 to 1."""

    accuracy: float
    late: float
    think_rate: float

    def breaks(self, target: Target) -> bool:
        """Whether the policy truly breaks a target on accuracy, think rate or p90 at `LIMIT`."""
        if target.metric == "p90":
            assert target.value == LIMIT
            return self.late > 0.1 + 1e-12
        value = self.accuracy if target.metric == "accuracy" else self.think_rate
        return target.slack(value) < -1e-12


@dataclass(frozen=True, eq=False)
class World:
    """L levels, B budgets, A arms.

    Attributes
    ----------
    share, confidence, right1 : ndarray of shape (L,)
        Chance of the level, System 1's confidence (above one half, ascending), chance that it is right.
    right2 : ndarray of shape (L, B)
        Chance that System 2 is right.
    late1 : ndarray of shape (A,)
        Chance that System 1 alone is late.
    late2 : ndarray of shape (L, B)
        Chance that a thought is late.
    """

    share: NDArray[np.float64]
    confidence: NDArray[np.float64]
    right1: NDArray[np.float64]
    right2: NDArray[np.float64]
    late1: NDArray[np.float64]
    late2: NDArray[np.float64]

    @property
    def budgets(self) -> NDArray[np.int64]:
        return 100 * np.arange(1, self.right2.shape[1] + 1)

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(f"arm{a}" for a in range(len(self.late1)))

    def draw(self, rng: np.random.Generator, n: int) -> Outcomes:
        """Outcomes of n independent questions; the first ones are the test questions, whatever the share."""
        level = rng.choice(len(self.share), n, p=self.share)
        b, a = len(self.budgets), len(self.arms)
        c = self.confidence[level]
        answer = (rng.random(n) >= self.right1[level]).astype(int)  # System 1 always chooses option 0
        chosen = np.where(rng.random((n, b)) < self.right2[level], answer[:, None], 1 - answer[:, None])
        slow1 = rng.random((a, n)) < self.late1[:, None]
        slow2 = rng.random((a, n, b)) < self.late2[level]
        return Outcomes(
            p1=np.stack([c, 1 - c], axis=1),
            p2=np.where(chosen[..., None] == np.arange(2), _SURE, 1 - _SURE),
            tokens=np.broadcast_to(self.budgets, (n, b)),
            finished=np.ones((n, b), bool),
            t1=np.where(slow1, LATE, QUICK),
            t2=np.where(slow2, LATE, THOUGHT),
            answer=answer,
            budgets=self.budgets,
            arms=self.arms,
        )

    def truth(self, policy: Policy) -> Truth:
        """By the law of the world and the rule of the policy itself."""
        a, b = self.arms.index(policy.arm), int(np.flatnonzero(self.budgets == policy.think_budget)[0])
        p1 = np.stack([self.confidence, 1 - self.confidence], axis=1)
        thinks = policy.thinks(p1)
        first, second = (metrics.chosen(policy.combine(p1, [v, 1 - v])) for v in (_SURE, 1 - _SURE))
        r1, r2 = self.right1, self.right2[:, b]
        thought = np.where(first == 0, r1 * r2, 0) + np.where(first == 1, (1 - r1) * (1 - r2), 0)
        thought += np.where(second == 0, r1 * (1 - r2), 0) + np.where(second == 1, (1 - r1) * r2, 0)
        slow = self.late1[a] + (1 - self.late1[a]) * thinks * self.late2[:, b]
        columns = np.where(thinks, thought, r1), slow, thinks
        return Truth(*(float((self.share * column).sum()) for column in columns))

    def best(self, *, late: float = 1.0) -> float:
        """Largest true accuracy of any policy whose true share of late answers is at most this."""
        flips = (self.confidence - 0.5) / (self.confidence - (1 - _SURE))  # mix beyond which System 2 decides
        mixes = np.concatenate([[0.0], (flips[1:] + flips[:-1]) / 2, [1.0]])
        found = (
            self.truth(Policy(float(t), float(m), int(b), arm))
            for arm in self.arms
            for b in self.budgets
            for t in candidate_thresholds(self.confidence)
            for m in mixes
        )
        return max((one.accuracy for one in found if one.late <= late + 1e-12), default=float("nan"))


def ladder(
    levels: int,
    budgets: int = 1,
    *,
    late1: ArrayLike = (0.0,),
    late2: float = 0.0,
    rng: np.random.Generator | None = None,
) -> World:
    """A world as models are: confidence tells easy from hard, thinking helps where it is hard, and takes longer there.

    Parameters
    ----------
    levels, budgets : int
    late1 : array_like of shape (A,)
    late2 : float
        Share of late answers when everything is thought about.
    rng : numpy.random.Generator, optional
        Makes one world unlike another.
    """
    c = np.linspace(0.55, 0.99, levels)
    bump = np.zeros(levels) if rng is None else rng.uniform(-0.08, 0.08, levels)
    right1 = np.clip(c - 0.05 + bump, 0.05, 0.99)
    reach = np.linspace(0.85, 0.92, budgets) if budgets > 1 else np.array([0.92])
    if rng is not None:
        reach = rng.uniform(0.75, 0.95, budgets)
    hard = np.linspace(1.6, 0.4, levels)
    return World(
        np.full(levels, 1 / levels),
        c,
        right1,
        np.tile(reach, (levels, 1)),
        np.asarray(late1, dtype=np.float64),
        late2 * hard[:, None] * np.ones(budgets),
    )


def indifferent(levels: int, budgets: int) -> World:
    """Thinking changes answers and not how often they are right: every policy is equally good, and never late."""
    right = np.linspace(0.5, 0.94, levels)
    return World(
        np.full(levels, 1 / levels),
        np.linspace(0.55, 0.99, levels),
        right,
        np.tile(right[:, None], (1, budgets)),
        np.zeros(1),
        np.zeros((levels, budgets)),
    )


def seven_percent() -> World:
    """Three policies: never think; think where it is hard, 7 % late and the best inside p90<1s; always, 14 % late."""
    return World(
        share=np.array([0.5, 0.5]),
        confidence=np.array([0.6, 0.95]),
        right1=np.array([0.55, 0.95]),
        right2=np.array([[0.9], [0.9]]),
        late1=np.zeros(1),
        late2=np.array([[0.14], [0.14]]),
    )


def few(n: int = 10, **changes: object) -> Outcomes:
    """Questions that are all alike, with two budgets; the first three of ten are the test side at a share of 0.3."""
    fields = {
        "p1": np.tile([0.8, 0.2], (n, 1)),
        "p2": np.tile([0.6, 0.4], (n, 2, 1)),
        "tokens": np.tile([50, 100], (n, 1)),
        "finished": np.tile([False, True], (n, 1)),
        "t1": np.full((1, n), 0.1),
        "t2": np.full((1, n, 2), 1.0),
        "answer": np.zeros(n, dtype=int),
        "budgets": [50, 200],
    }
    return Outcomes(**(fields | changes))

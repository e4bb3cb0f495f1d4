"""Who changes: questions that two policies answer differently, or that only one of them thinks about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calib.outcomes import Outcomes
from calib.policy import Decisions, Policy, decide

__all__ = ["Flips", "flips"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Flips:
    """Questions that two policies answer differently, or that only one of them thinks about.

    Attributes
    ----------
    index : ndarray of int, shape (M,)
        Position in the outcomes: right by ours alone first, then right by the other alone, then the rest.
    p_ours, p_other : ndarray of shape (M, C)
        NaN in a row without a usable answer.
    ours, other : ndarray of int, shape (M,)
        Chosen option; -1 without a usable answer.
    thinks_ours, thinks_other, right_ours, right_other : ndarray of bool, shape (M,)
    seconds_ours, seconds_other : ndarray of shape (M,)
        NaN where unknown.
    tokens_ours, tokens_other : ndarray of shape (M,)
        Thinking tokens.
    finished_ours, finished_other : ndarray of bool, shape (M,)
        False where a thought was cut at the budget.
    """

    index: Ints
    p_ours: Floats
    p_other: Floats
    ours: Ints
    other: Ints
    thinks_ours: Bools
    thinks_other: Bools
    right_ours: Bools
    right_other: Bools
    seconds_ours: Floats
    seconds_other: Floats
    tokens_ours: Floats
    tokens_other: Floats
    finished_ours: Bools
    finished_other: Bools

    def __len__(self) -> int:
        return len(self.index)


def flips(outcomes: Outcomes, ours: Policy, other: Policy) -> Flips:
    """Questions whose answer or thinking differs between two policies.

    Parameters
    ----------
    outcomes : Outcomes
    ours, other : Policy
        For instance the tuned policy and the default.
    """
    a, b = decide(outcomes, ours), decide(outcomes, other)
    right_a, right_b = a.choice == outcomes.answer, b.choice == outcomes.answer
    index = np.flatnonzero((a.choice != b.choice) | (a.thinks != b.thinks))
    kind = np.where(right_a & ~right_b, 0, np.where(right_b & ~right_a, 1, 2))[index]
    index = index[np.argsort(kind, kind="stable")]

    def ended(policy: Policy, decisions: Decisions) -> Bools:
        found = np.ones(outcomes.n, bool)
        for part, mask in policy.parts(outcomes):
            cut = ~outcomes.finished[:, outcomes.budget_index(part.think_budget)]
            found[mask & decisions.thinks & cut] = False
        return found

    return Flips(
        index,
        a.p[index],
        b.p[index],
        a.choice[index],
        b.choice[index],
        a.thinks[index],
        b.thinks[index],
        right_a[index],
        right_b[index],
        a.latency[index],
        b.latency[index],
        a.tokens[index],
        b.tokens[index],
        ended(ours, a)[index],
        ended(other, b)[index],
    )

"""What a deadline does to cached thoughts: which end in time, what a closed one says, when its answer is there.

A gateway that keeps a deadline closes a thought when the time nears and reads the answer from what was thought so far.
Of that cut the cache knows the thought at the collected budgets: the largest one that ends in time stands for it, so
the real cut, which comes a little later, has read a little more. Where no collected budget ends in time, nothing is
known of the cut and System 1's answer counts. The deadline is about the seconds of one arm at the collected load.

Leaves to `calib.policy` what the policy makes of it, to `calib.spaces` the search for the best one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib.errors import CalibError
from calib.metrics import percentiles
from calib.outcomes import Outcomes

if TYPE_CHECKING:
    from calib.policy import Policy

__all__ = [
    "Cut",
    "as_read",
    "budgets_to_collect",
    "candidates",
    "close_in_time",
    "parse_seconds",
    "unknown",
    "warnings",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOM = 0.95
"""Share of a latency limit at which a deadline is tried: closing a thought and reading its answer takes a moment."""
_UNREAD = 0.1
"""Share of the closed thoughts of which nothing is known that is worth a warning."""
PERCENTILES = (50, 75, 90, 95, 99)
"""Of the seconds of thinking: where deadlines are tried."""
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, eq=False)
class Cut:
    """What becomes of the thought of each of N questions in one arm at one think budget under a deadline.

    Attributes
    ----------
    budget : ndarray of int, shape (N,)
        Position of the budget whose reading counts: the policy's own, or the largest one that ends in time.
    closed : ndarray of bool, shape (N,)
        Whether the deadline closed the thought.
    unread : ndarray of bool, shape (N,)
        Closed ones of which no collected budget ends in time.
    degraded : ndarray of bool, shape (N,)
        Closed ones that System 1 answers: because they are unread, or because the rule says so.
    latency : ndarray of shape (N,)
        Seconds of System 1, thought and answer: the deadline where the thought was closed, but never before System 1
        has answered.
    tokens : ndarray of shape (N,)
        Thinking tokens at the end of the thought, between collected budgets in proportion to the seconds.
    """

    budget: NDArray[np.int64]
    closed: Bools
    unread: Bools
    degraded: Bools
    latency: Floats
    tokens: Floats


def close_in_time(
    outcomes: Outcomes, arm: int, budget: int, deadline: float, on_deadline: str, asked: Bools | None = None
) -> Cut:
    """Close the thoughts that would end after the deadline.

    A thought that failed after a time that is not known stays a failure, and takes until the deadline.

    Parameters
    ----------
    outcomes : Outcomes
    arm, budget : int
        Positions in the outcomes.
    deadline : float
        Seconds from the request to the answer, System 1 included.
    on_deadline : str
        One of `calib.policy.ON_DEADLINE`.
    asked : ndarray of bool, shape (N,), optional
        Questions that think; all that can when left out. Of the others nothing is said, and their seconds need not be
        known.

    Raises
    ------
    CalibError
        When it is not known how long a thought takes that was asked for.
    """
    o = outcomes
    asked = o.can_think if asked is None else asked
    latency = o.t1[arm] + o.t2[arm, :, budget]
    _refuse(o, arm, budget, deadline, asked & _missing(o, arm, budget))
    lost = asked & np.isnan(latency)
    late = asked & (latency > deadline)
    latency = np.where(late | lost, np.maximum(o.t1[arm], deadline), latency)
    read = np.full(o.n, budget)
    tokens = o.tokens[:, budget]
    unread = np.zeros(o.n, dtype=bool)
    at = np.flatnonzero(late)
    if at.size:
        tokens = tokens.copy()
        read[at], tokens[at] = _cut_rows(o, arm, budget, deadline, at)
        unread[at] = read[at] < 0
        read[unread] = budget
    degraded = late if on_deadline == "system1" else unread
    return Cut(read, late, unread, degraded, latency, tokens)


def _cut_rows(
    o: Outcomes, arm: int, budget: int, deadline: float, at: NDArray[np.intp]
) -> tuple[NDArray[np.int64], Floats]:
    """Of late thoughts the last budget that ends in time, -1 where none does, and the tokens at the deadline."""
    seconds, left = o.t2[arm, at, : budget + 1], deadline - o.t1[arm, at]
    whole = o.t1[arm, at, None] + seconds  # the sum that is compared elsewhere too, not the difference
    asked = np.zeros(o.n, dtype=bool)
    asked[at] = True
    for smaller in range(budget):
        _refuse(o, arm, smaller, deadline, asked & _missing(o, arm, smaller))
    position = np.arange(budget + 1)
    ends = whole <= deadline
    last = np.where(ends, position, -1).max(axis=1)
    next_known = np.where((position > last[:, None]) & ~np.isnan(seconds), position, budget).min(axis=1)
    row, first = np.arange(len(at)), np.maximum(last, 0)
    begun = last >= 0
    from_seconds, from_tokens = np.where(begun, seconds[row, first], 0.0), np.where(begun, o.tokens[at, first], 0.0)
    to_seconds, to_tokens = seconds[row, next_known], o.tokens[at, next_known]
    # the next budget ends after the deadline and the last one before it, so only rounding could make them equal
    span = np.maximum(to_seconds - from_seconds, np.finfo(np.float64).tiny)
    share = np.clip((left - from_seconds) / span, 0.0, 1.0)
    return last, from_tokens + share * (to_tokens - from_tokens)


def _missing(o: Outcomes, arm: int, budget: int) -> Bools:
    """Questions whose seconds a deadline needs and nobody knows; a thought that failed may lack them."""
    return np.asarray(np.isnan(o.t1[arm]) | (np.isnan(o.t2[arm, :, budget]) & ~o.failed[:, budget]))


def _refuse(o: Outcomes, arm: int, budget: int, deadline: float, missing: Bools) -> None:
    if missing.any():
        raise CalibError(f"deadline {deadline:g} s: {_unknown(o, arm, budget, missing)}")


def _unknown(o: Outcomes, arm: int, budget: int, missing: Bools) -> str:
    i, name = int(np.argmax(missing)), o.arms[arm]
    return (
        f"the seconds of {int(missing.sum())} of {o.n} questions (first: {o.ids[i]!r} in {o.dataset[i]!r}) are not "
        f"known in arm {name!r} at think_budget {int(o.budgets[budget])}, so nobody knows which thoughts it would "
        f"close. Measure them: calib collect QUESTIONS --arm {name}=URL, or import with rates: calib import FILE "
        f"--system1-ms {name}=45 --tokens-per-second {name}=250"
    )


def unknown(outcomes: Outcomes, arm: str, largest: int) -> str | None:
    """What keeps every deadline from being worked out in an arm up to the largest budget, and what to type; or None."""
    a = outcomes.arm_index(arm)
    for budget in range(outcomes.budget_index(largest) + 1):
        missing = outcomes.can_think & _missing(outcomes, a, budget)
        if missing.any():
            return _unknown(outcomes, a, budget, missing)
    return None


def candidates(outcomes: Outcomes, arm: str, largest: int, limits: Sequence[float]) -> list[float]:
    """Deadlines that are worth a look in an arm, ascending, in seconds.

    A little below each limit on the latency, so that a thought which is closed keeps it, and at percentiles of the
    seconds of thinking at the largest budget; all to three digits.
    """
    o, a = outcomes, outcomes.arm_index(arm)
    ends = (o.t1[a] + o.t2[a, :, o.budget_index(largest)])[o.can_think]
    ends = ends[~np.isnan(ends)]
    some = [*(ROOM * limit for limit in limits), *(percentiles(ends, PERCENTILES).tolist() if ends.size else ())]
    return sorted({rounded for value in some if (rounded := float(f"{value:.3g}")) > 0})


def as_read(outcomes: Outcomes, arm: str, think_budget: int, deadline: float, on_deadline: str) -> Outcomes:
    """The questions with the one budget, and its thoughts as they are read under the deadline.

    A policy without a deadline gives the same probabilities on them. Questions that System 1 answers in place of a
    closed thought cannot think here.
    """
    o, b = outcomes, outcomes.budget_index(think_budget)
    cut = close_in_time(o, o.arm_index(arm), b, deadline, on_deadline)
    rows = np.arange(o.n)
    return replace(
        o,
        p2=o.p2[rows, cut.budget][:, None],
        tokens=cut.tokens[:, None],
        finished=o.finished[rows, cut.budget][:, None],
        t2=o.t2[:, :, b : b + 1],
        budgets=o.budgets[b : b + 1],
        label_mass=np.column_stack([o.label_mass[:, 0], o.label_mass[rows, 1 + cut.budget]]),
        estimated=o.estimated[:, [0, 1 + b]],
        can_think=o.can_think & ~cut.degraded,
    )


def warnings(outcomes: Outcomes, policy: Policy) -> list[str]:
    """What to know of the deadline of a policy: who keeps it, and which budgets would say more of what it closes."""
    if policy.deadline is None:
        return []
    found = [
        f"only the gateway keeps the deadline of {policy.deadline:g} s (calib serve), in front of a server that can "
        "stream its thoughts; serve.env cannot express it"
    ]
    closed, reached = 0, []
    for part, mask in policy.parts(outcomes):
        a, b = outcomes.arm_index(part.arm), outcomes.budget_index(part.think_budget)
        asked = mask & outcomes.can_think
        asked &= part.thinks(outcomes.p1, kind=outcomes.kind, n_options=outcomes.n_options)
        cut = close_in_time(outcomes, a, b, policy.deadline, policy.on_deadline, asked)
        closed += int(cut.closed.sum())
        reached += cut.tokens[cut.unread].tolist()
    if len(reached) > _UNREAD * closed:
        budgets = {*budgets_to_collect(reached), *outcomes.budgets.tolist()}
        listed = ",".join(map(str, sorted(budgets)))
        found.append(
            f"of {len(reached)} of {closed} thoughts that the deadline closes no collected budget ends in time, so "
            f"System 1's answer counts for them. To know what they say by then: calib collect QUESTIONS --budgets "
            f"{listed}"
        )
    return found


def budgets_to_collect(reached: ArrayLike) -> list[int]:
    """Budgets that end in time for thoughts which a deadline closes: powers of two.

    Parameters
    ----------
    reached : array_like of shape (M,)
        Tokens of each thought at the deadline. One budget is below those of nine in ten of them, one below those of one
        half; none below 1.
    """
    tokens = np.asarray(reached, dtype=np.float64)
    if not tokens.size:
        return []
    return sorted({2 ** int(math.log2(some)) for some in np.quantile(tokens, [0.1, 0.5]).tolist() if some >= 1})


def parse_seconds(text: str, option: str = "--deadline") -> float:
    """Seconds from ``8s`` or ``800ms``.

    Raises
    ------
    CalibError
        A number without a unit, and what is no number above 0; says what to write.
    """
    plain = text.strip()
    unit = next((unit for unit in _UNITS if plain.endswith(unit)), "")
    number = plain.removesuffix(unit)
    try:
        value = float(number) * _UNITS.get(unit, 1.0)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise CalibError(f"{option} {text!r} is no time above 0; write for instance: {option} 8s or {option} 800ms")
    if not unit:
        raise CalibError(f"{option} {text!r} has no unit; write {option} {number}s or {option} {number}ms")
    return value

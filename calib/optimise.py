"""The exact optimum over threshold, mix, think_budget and arm; the front; the nearest policy; what a limit costs.

Reads the rows of `calib.table`: at each threshold, budget and arm the largest accuracy over all mixes is known
exactly, and everything else does not depend on the mix. So the best row that meets the targets is the best policy
there is, under any definition of the confidence. Targets that see the mix in another way (ece, brier, nll, macro_f1,
accuracy of one dataset or of the worst, accuracy from above) are checked at every threshold on a grid of mixes instead,
and so is everything under the log-odds pool; the result says so.

Leaves to `calib.certify` whether a difference or a limit will hold on new questions.

Ties go to the cheaper policy: lower mean latency where it is known, then fewer tokens, fewer thoughts, the smaller
budget, the arm that is named first, the lower threshold; then to the middle of the widest interval of mixes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Cost, Evaluation, Policy, evaluate
from calib.search import GRID, Least, Search, slacks, tabulated, tightened
from calib.table import Table, tabulate
from calib.target import HIGHER_IS_BETTER, Target

__all__ = [
    "GRID",
    "Front",
    "Nearest",
    "Optimum",
    "Point",
    "Price",
    "Relaxation",
    "Table",
    "feasible",
    "nearest",
    "optimum",
    "pareto",
    "prices",
    "tabulate",
    "tightened",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best policy inside the targets.

    Attributes
    ----------
    policy : Policy or None
        None when no policy meets the targets (see `nearest`).
    objective : float
        Value of `metric` that `evaluate` gives for the policy; NaN without one.
    evaluation : Evaluation or None
        Of the policy, by dataset too.
    metric : str
        What was maximised or minimised.
    maximize : bool
    method : {"exact", "grid"}
        Whether over all mixes, or over a grid of them.
    mixes : tuple of float
        Interval of mixes around the policy's that does as well, all else equal; NaN without a policy.
    candidates : int
        Entries of the table (arm, budget, threshold) that meet the targets.
    """

    policy: Policy | None
    objective: float
    evaluation: Evaluation | None
    metric: str
    maximize: bool
    method: str
    mixes: tuple[float, float]
    candidates: int

    @property
    def feasible(self) -> bool:
        """Whether any policy meets the targets."""
        return self.policy is not None


@dataclass(frozen=True)
class Point:
    """One point of a `Front`."""

    x: float
    y: float
    policy: Policy


@dataclass(frozen=True, eq=False)
class Front(Sequence[Point]):
    """Points that no policy beats: better in one of both metrics and no worse in the other.

    A sequence of `Point`, from the best x to the best y.

    Attributes
    ----------
    x, y : ndarray of shape (F,)
        Values of both metrics.
    threshold, mix : ndarray of shape (F,)
    think_budget : ndarray of int, shape (F,)
    arm : ndarray of str, shape (F,)
    metrics : tuple of str
        What x and y are.
    method : {"exact", "grid"}
        Whether over all mixes, or over a grid of them.
    confidence, pool : str
        Definitions that the policies use.
    deadline, on_deadline
        Of all the policies.
    """

    x: Floats
    y: Floats
    threshold: Floats
    mix: Floats
    think_budget: NDArray[np.int64]
    arm: NDArray[np.object_]
    metrics: tuple[str, str]
    method: str
    confidence: str = "max"
    pool: str = "linear"
    deadline: float | None = None
    on_deadline: str = "system2"

    def __len__(self) -> int:
        return len(self.x)

    @overload
    def __getitem__(self, at: int) -> Point: ...
    @overload
    def __getitem__(self, at: slice) -> list[Point]: ...
    def __getitem__(self, at: int | slice) -> Point | list[Point]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        where = float(self.threshold[at]), float(self.mix[at]), int(self.think_budget[at]), str(self.arm[at])
        policy = Policy(
            *where,
            confidence=self.confidence,
            pool=self.pool,
            deadline=self.deadline,
            on_deadline=self.on_deadline,
        )
        return Point(float(self.x[at]), float(self.y[at]), policy)


@dataclass(frozen=True)
class Relaxation:
    """The least change of one target alone that makes all targets feasible.

    Attributes
    ----------
    target : Target
    needs : float or None
        The limit that would do, in seconds, as a share of 1 or plain; None when no change of this target alone helps.
    policy : Policy or None
        Meets the other targets and this limit.
    """

    target: Target
    needs: float | None
    policy: Policy | None


@dataclass(frozen=True, eq=False)
class Nearest:
    """What comes closest when no policy meets the targets.

    Attributes
    ----------
    policy : Policy or None
        Least sum of violations, each as a share of its limit; None when no policy has a known value of every target.
    evaluation : Evaluation or None
        Of that policy, by dataset too.
    violation : float
        That sum; 0 when the targets can be met, infinite without a policy.
    relaxations : tuple of Relaxation
        One for each target.
    """

    policy: Policy | None
    evaluation: Evaluation | None
    violation: float
    relaxations: tuple[Relaxation, ...]


@dataclass(frozen=True)
class Price:
    """What one limit costs: the best objective without it, the other limits kept.

    Attributes
    ----------
    target : Target
    objective : float
        Best objective without this target; NaN where the other targets cannot be met either.
    gain : float
        How much better than the optimum with it, 0 or more in the unit of the objective; NaN without either.
    policy : Policy or None
    """

    target: Target
    objective: float
    gain: float
    policy: Policy | None

    @classmethod
    def of(cls, target: Target, free: Optimum, found: Optimum) -> Price:
        """What a target costs by the optimum without it and the one with it."""
        gain = free.objective - found.objective if found.maximize else found.objective - free.objective
        return cls(target, free.objective, max(gain, 0.0) if gain == gain else gain, free.policy)


def optimum(
    outcomes: Outcomes | Table,
    targets: Sequence[Target] = (),
    *,
    maximize: str | None = None,
    minimize: str | None = None,
    cost: Cost | None = None,
    arms: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    margins: Mapping[Target, float] | None = None,
    requirements: Mapping[Target, float] | None = None,
) -> Optimum:
    """The best policy inside the targets, over threshold, mix, think_budget and arm.

    Parameters
    ----------
    outcomes : Outcomes or Table
        A table is worth keeping where several questions are asked about the same outcomes.
    targets : sequence of Target
        All of them must be met.
    maximize, minimize : str, optional
        The objective; accuracy is maximised when both are left out.
    cost : Cost, optional
        Prices for the metric ``cost``.
    arms, budgets : sequence, optional
        Where to look; everywhere when left out.
    margins : mapping of Target to float, optional
        Room to leave below each limit (see `tightened`).
    requirements : mapping of Target to float, optional
        Largest share of questions that may break each of these targets besides: late for a percentile, wrong for
        accuracy and skill, thinking for the think rate. ``p90<10s`` with 0.08 asks that 92 % finish under 10 s.

    Raises
    ------
    CalibError
        When the objective is not one, a latency or the prices are needed and not known, or a dataset, an arm or a
        budget does not exist.
    """
    search = Search(outcomes, targets, maximize, minimize, cost, arms, budgets, margins, requirements=requirements)
    while True:
        found = search.reduce()
        entry = search.best_of(found.score)
        if entry is None:
            break
        low, mix, high = search.interval(entry)
        policy = search.policy(entry, mix)
        evaluation = evaluate(search.outcomes, policy, by_dataset=True, cost=cost)
        if all(target.met(evaluation) for target in search.targets):
            value = float(getattr(evaluation, search.metric))
            return Optimum(
                policy,
                value,
                evaluation,
                search.metric,
                search.maximize,
                search.method,
                (low, high),
                candidates=int((found.score > -np.inf).sum()),
            )
        search.refuse(entry, mix)  # the table and `evaluate` differ by rounding, just at a limit
    nan = float("nan")
    return Optimum(None, nan, None, search.metric, search.maximize, search.method, (nan, nan), 0)


def feasible(
    outcomes: Outcomes | Table,
    targets: Sequence[Target] = (),
    *,
    order: str = "best",
    maximize: str | None = None,
    minimize: str | None = None,
    cost: Cost | None = None,
    arms: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    margins: Mapping[Target, float] | None = None,
    requirements: Mapping[Target, float] | None = None,
) -> Iterator[Policy]:
    """Policies that meet the targets, one for each entry of the table, with its best mix.

    Parameters
    ----------
    outcomes, targets, maximize, minimize, cost, arms, budgets, margins, requirements
        As for `optimum`.
    order : {"best", "cheapest"}
        From the best objective down, equal ones from the cheapest up; or from the cheapest up, leaving out those
        that cost more than an earlier one and are no better.
    """
    if order not in ("best", "cheapest"):
        raise CalibError(f"order must be best or cheapest, got {order!r}")
    search = Search(outcomes, targets, maximize, minimize, cost, arms, budgets, margins, requirements=requirements)
    found = search.reduce()
    a, b, k = np.nonzero(found.score > -np.inf)
    value = found.score[a, b, k]
    cheap = search.cheapness(a, b, k)
    if order == "best":
        turn = np.lexsort((*cheap, -value))
    else:
        turn = np.lexsort((-value, *cheap))
        best = np.maximum.accumulate(value[turn])
        turn = turn[np.append(True, best[1:] > best[:-1])[: turn.size]]
    for at in turn.tolist():
        entry = int(a[at]), int(b[at]), int(k[at])
        policy = search.policy(entry, float(found.mix[entry]))
        if not found.doubtful[entry] or search.met(policy):
            yield policy


def pareto(
    outcomes: Outcomes | Table,
    x: str = "p90",
    y: str = "accuracy",
    *,
    cost: Cost | None = None,
    arms: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
) -> Front:
    """Every pair of metrics that no policy beats, over all knobs, from the best x to the best y.

    Of equal pairs the cheapest policy is given. Its mix is the middle of a piece of the mix axis; `optimum` centres
    the mix of the one policy that it returns further.

    Parameters
    ----------
    outcomes, cost, arms, budgets
        As for `optimum`.
    x, y : str
        Metrics. Accuracy, skill and macro_f1 are better when higher, all others when lower.
    """
    search = Search(outcomes, (), None, None, cost, arms, budgets, None, metrics=(x, y))
    sign_x, sign_y = (-1 if name in HIGHER_IS_BETTER else 1 for name in (x, y))
    found: list[tuple[NDArray[Any], ...]] = []
    for part in search.slices():
        vx, vy = sign_x * part.value(x), sign_y * part.value(y)
        rows = _undominated(vx, vy)
        a, b = np.full(rows.size, part.a), np.full(rows.size, part.b)
        found.append((vx[rows], vy[rows], a, b, rows, np.broadcast_to(part.mix, vx.shape)[rows]))
    vx, vy, a, b, k, mix = (np.concatenate(column) for column in zip(*found, strict=True))
    turn = np.lexsort((vy, vx))
    x_sorted, y_sorted = vx[turn], vy[turn]
    first = np.append(True, y_sorted[1:] < np.minimum.accumulate(y_sorted)[:-1])[: turn.size]
    point = np.cumsum(first) - 1  # of the front, that stands at or before each entry
    equal = (x_sorted == x_sorted[first][point]) & (y_sorted == y_sorted[first][point])
    turn = turn[equal]
    turn = turn[np.lexsort((*search.cheapness(a[turn], b[turn], k[turn]), vx[turn]))]
    turn = turn[np.append(True, vx[turn][1:] > vx[turn][:-1])[: turn.size]]
    table = search.table
    return Front(
        sign_x * vx[turn],
        sign_y * vy[turn],
        table.thresholds[k[turn]],
        mix[turn],
        np.array(table.budgets)[b[turn]],
        np.array(table.arms, dtype=object)[a[turn]],
        (x, y),
        search.method,
        table.confidence,
        table.pool,
        table.deadline,
        table.on_deadline,
    )


def nearest(
    outcomes: Outcomes | Table,
    targets: Sequence[Target],
    *,
    maximize: str | None = None,
    minimize: str | None = None,
    cost: Cost | None = None,
    arms: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    margins: Mapping[Target, float] | None = None,
) -> Nearest:
    """What to give up when the targets cannot be met: each limit alone, and the policy that violates them least.

    Parameters
    ----------
    outcomes, targets, maximize, minimize, cost, arms, budgets, margins
        As for `optimum`.
    """
    search = Search(outcomes, targets, maximize, minimize, cost, arms, budgets, margins)
    n = len(search.targets)
    least = [Least(search) for _ in range(n)]
    closest = Least(search)
    for part in search.slices():
        rows = len(search.table.thresholds)
        value = np.array([part.of(target) for target in search.targets]).reshape(n, rows)
        slack = np.array([slacks(target, v) for target, v in zip(search.targets, value, strict=True)]).reshape(n, rows)
        objective = part.score(search.metric)
        met = slack >= 0
        refused = search.table.refused(search.table.arms[part.a])
        for t, target in enumerate(search.targets):
            others = np.delete(met, t, axis=0).all(axis=0) & ~np.isnan(value[t]) & ~refused
            least[t].offer(part, np.where(others, value[t] if target.upper else -value[t], np.inf), objective)
        scale = np.array([abs(target.value) or 1.0 for target in search.targets])[:, None]
        closest.offer(part, np.where(refused, np.inf, (np.maximum(-slack, 0) / scale).sum(axis=0)), objective)
    relaxations = []
    for original, target, found in zip(targets, search.targets, least, strict=True):
        policy, needs = found.policy(), None
        if policy is not None:
            reached = target.value_of(evaluate(search.outcomes, policy, by_dataset=True, cost=cost))
            needs = original.value if target.slack(reached) >= 0 else _limit(original, reached, margins)
        relaxations.append(Relaxation(original, needs, policy))
    policy = closest.policy()
    evaluation = None if policy is None else evaluate(search.outcomes, policy, by_dataset=True, cost=cost)
    return Nearest(policy, evaluation, closest.value, tuple(relaxations))


def _limit(target: Target, reached: float, margins: Mapping[Target, float] | None) -> float:
    """The strictest limit that a value meets, with the margin given back."""
    margin = (margins or {}).get(target, 0.0)
    limit = reached + margin if target.upper else reached - margin
    if target.op in ("<", ">"):
        limit = math.nextafter(limit, math.inf if target.upper else -math.inf)
    return limit


def prices(
    outcomes: Outcomes | Table,
    targets: Sequence[Target],
    found: Optimum,
    *,
    cost: Cost | None = None,
    arms: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    margins: Mapping[Target, float] | None = None,
) -> tuple[Price, ...]:
    """What each limit costs: the optimum without it, beside the one that was found with all.

    Parameters
    ----------
    outcomes, targets, cost, arms, budgets, margins
        As for `optimum`.
    found : Optimum
        The optimum under all targets; says what is maximised or minimised.
    """
    table = tabulated(outcomes, arms, budgets)
    up, down = (found.metric, None) if found.maximize else (None, found.metric)
    result = []
    for target in targets:
        rest = [other for other in targets if other != target]
        free = optimum(table, rest, maximize=up, minimize=down, cost=cost, margins=margins)
        result.append(Price.of(target, free, found))
    return tuple(result)


def _undominated(x: Floats, y: Floats) -> NDArray[np.intp]:
    """Rows that no other row of the same arm and budget beats, lower being better; of equal ones the first."""
    known = np.flatnonzero(~(np.isnan(x) | np.isnan(y)))
    x, y = x[known], y[known]
    if (x[1:] < x[:-1]).any():
        turn = np.lexsort((y, x))
        known, y = known[turn], y[turn]
    lowest = np.minimum.accumulate(y)
    return np.asarray(known[np.append(True, y[1:] < lowest[:-1])[: y.size]])

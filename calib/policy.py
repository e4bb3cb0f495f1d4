"""`Policy`: the think and mix rule; `decide` applies it to cached questions, `evaluate` scores it.

The gateway calls the same `Policy.alone`, `Policy.thinks` and `Policy.combine`, so that the two paths cannot drift
apart.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib import metrics
from calib.deadline import close_in_time
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.temperature import Temperatures

__all__ = [
    "ALWAYS",
    "CONFIDENCES",
    "LATENCY_METRICS",
    "NEVER",
    "ON_DEADLINE",
    "POOLS",
    "Cost",
    "Decisions",
    "Evaluation",
    "Policy",
    "Route",
    "baselines",
    "candidate_thresholds",
    "confidence",
    "decide",
    "evaluate",
    "evaluate_decisions",
    "pooled",
]

NEVER, ALWAYS = 0.0, 1.1
"""Thresholds that never think and always think (a confidence is from 0 to 1)."""

CONFIDENCES = ("max", "margin", "entropy")
"""Definitions of the confidence, all from 0 to 1: see `confidence`."""
POOLS = ("linear", "log_odds")
"""Ways to combine both distributions: see `pooled`."""
ON_DEADLINE = ("system2", "system1")
"""Whose answer stands when the deadline closed the thought: the cut thought, mixed as any other, or System 1's."""
_NOTHING = Temperatures()
LATENCY_METRICS = ("mean", "p50", "p90", "p95", "p99")

Floats = NDArray[np.float64]


def confidence(p1: ArrayLike, definition: str = "max", n_options: ArrayLike | None = None) -> Floats:
    """Confidence of System 1, 0 to 1, recomputed here: servers report other things under that name.

    Parameters
    ----------
    p1 : array_like of shape (C,) or (N, C)
    definition : {"max", "margin", "entropy"}
        Top probability; its distance to the second; 1 - entropy / ln(number of options).
    n_options : array_like of int, shape () or (N,), optional
        For ``entropy`` where options are padded; all C when left out.
    """
    p = np.asarray(p1, dtype=np.float64)
    if definition == "max":
        return np.asarray(np.take_along_axis(p, p.argmax(axis=-1)[..., None], -1)[..., 0])  # twice as fast as max
    if definition == "margin":
        two = np.partition(p, -2, axis=-1)
        return np.asarray(two[..., -1] - two[..., -2])
    k = np.asarray(p.shape[-1] if n_options is None else n_options)
    bits = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(axis=-1)
    return np.asarray(np.clip(1 - bits / np.log(k), 0.0, 1.0))


def pooled(p1: ArrayLike, p2: ArrayLike, mix: float, pool: str, n_options: ArrayLike | None = None) -> Floats:
    """Both distributions as one: (1 - mix) * p1 + mix * p2, or ``log_odds``: p1 ** (1 - mix) * p2 ** mix, renormalised.

    Parameters
    ----------
    p1, p2 : array_like of shape (C,) or (N, C)
        A probability below 1e-12 counts as that in the log-odds pool: one system alone must not rule an option out.
    mix : float
        Weight of System 2, 0 to 1.
    pool : {"linear", "log_odds"}
    n_options : array_like of int, shape () or (N,), optional
        For ``log_odds`` where options are padded; all C when left out.
    """
    first, second = np.asarray(p1, dtype=np.float64), np.asarray(p2, dtype=np.float64)
    if pool == "linear":
        return (1 - mix) * first + mix * second
    low = metrics.NLL_CLIP
    z = (1 - mix) * np.log(np.maximum(first, low)) + mix * np.log(np.maximum(second, low))
    if n_options is not None:
        z = np.where(np.arange(z.shape[-1]) < np.asarray(n_options)[..., None], z, -np.inf)
    z = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(z / z.sum(axis=-1, keepdims=True))


def candidate_thresholds(confidence: ArrayLike) -> Floats:
    """Every threshold that makes a difference, ascending: K distinct confidences give K + 1.

    Never on an observed confidence but midway between neighbours, so that a rounding error on the server flips
    nobody; 0 and 1.1 at the ends. Where the midpoint rounds onto the lower value, the upper value is used.
    """
    c = np.unique(np.asarray(confidence, dtype=np.float64))
    low, high = c[:-1], c[1:]
    middle = low + (high - low) / 2
    return np.concatenate([[NEVER], np.where(middle > low, middle, high), [ALWAYS]])


@dataclass(frozen=True)
class Route:
    """What a policy does differently for the requests of one route; None keeps the policy's own value."""

    threshold: float | None = None
    think_budget: int | None = None


@dataclass(frozen=True)
class Policy:
    """One operating point.

    Parameters
    ----------
    threshold : float, default 0.8
        Think when the confidence is below (equal stays): 0 never thinks, 1.1 always does.
    mix : float, default 0.5
        Weight of System 2 in the answer after thinking, 0 to 1.
    think_budget : int, default 8192
        Most thinking tokens.
    arm : str, default "base"
        Way of serving.
    confidence : str, default "max"
        Definition of the confidence that the threshold means.
    routes : mapping of str to Route
        Exceptions by something that a request carries, ``KEY=VALUE`` with KEY one of dataset, kind, n_options;
        the first that matches wins.
    temperatures : Temperatures, mapping or None
        What calibrates both systems before the threshold and the mix, and the answer after it: the threshold then means
        the calibrated confidence, and an answer without thinking is the calibrated p1.
    pool : str, default "linear"
        How both distributions are combined (see `pooled`).
    deadline : float or None, default None
        Seconds from the request to its answer, System 1 included: a thought that would end later is closed in time.
        None, or an infinite one, closes none.
    on_deadline : {"system2", "system1"}
        What answers when the deadline closed the thought: the cut thought, mixed as any other one, or System 1 alone.
        Without a deadline it means nothing and is always "system2".

    Raises
    ------
    CalibError
        When a value is out of range.
    """

    threshold: float = 0.8
    mix: float = 0.5
    think_budget: int = 8192
    arm: str = "base"
    confidence: str = "max"
    routes: Mapping[str, Route] = field(default_factory=dict)
    temperatures: Temperatures | Mapping[str, Any] | None = None
    pool: str = "linear"
    deadline: float | None = None
    on_deadline: str = "system2"

    def __post_init__(self) -> None:
        _check_threshold(self.threshold, "threshold")
        if not 0 <= self.mix <= 1:
            raise CalibError(f"mix must be from 0 (System 1 alone) to 1 (System 2 alone), got {self.mix}")
        _check_budget(self.think_budget, "think_budget")
        if self.confidence not in CONFIDENCES:
            raise CalibError(f"confidence must be one of {', '.join(CONFIDENCES)}, got {self.confidence!r}")
        if self.pool not in POOLS:
            raise CalibError(f"pool must be one of {', '.join(POOLS)}, got {self.pool!r}")
        if self.deadline is not None and not self.deadline > 0:
            raise CalibError(f"deadline must be seconds above 0, or None for no deadline, got {self.deadline}")
        if self.on_deadline not in ON_DEADLINE:
            raise CalibError(f"on_deadline must be one of {', '.join(ON_DEADLINE)}, got {self.on_deadline!r}")
        if self.deadline is None or self.deadline > sys.float_info.max:
            object.__setattr__(self, "deadline", None)
            object.__setattr__(self, "on_deadline", ON_DEADLINE[0])
        if self.temperatures is not None:
            read = Temperatures.read(self.temperatures)
            object.__setattr__(self, "temperatures", None if read.nothing else read)
        for key, route in self.routes.items():
            if key.partition("=")[0] not in ("dataset", "kind", "n_options") or "=" not in key:
                raise CalibError(f"route {key!r} must be dataset=NAME, kind=NAME or n_options=NUMBER")
            _check_threshold(route.threshold, f"threshold of route {key!r}")
            _check_budget(route.think_budget, f"think_budget of route {key!r}")
        object.__setattr__(self, "routes", MappingProxyType(dict(self.routes)))

    def __hash__(self) -> int:
        return hash(
            (
                *(self.threshold, self.mix, self.think_budget, self.arm, self.confidence, self.pool),
                *(self.temperatures, tuple(self.routes.items()), self.deadline, self.on_deadline),
            )
        )

    @property
    def calibration(self) -> Temperatures:
        """The temperatures; of a policy without any those that change nothing."""
        return _NOTHING if self.temperatures is None else Temperatures.read(self.temperatures)

    def alone(self, p1: ArrayLike, *, kind: ArrayLike | None = None, n_options: ArrayLike | None = None) -> Floats:
        """Distribution without thinking: p1, calibrated where the policy has temperatures; one question or N.

        Parameters
        ----------
        p1 : array_like of shape (C,) or (N, C)
        kind, n_options : optional
            Of the question or of each; they choose the temperature.
        """
        return self.calibration.at("p1", p1, kind, n_options)

    def thinks(
        self, p1: ArrayLike, *, kind: ArrayLike | None = None, n_options: ArrayLike | None = None
    ) -> NDArray[np.bool_]:
        """Whether to think, for one question (C,) or N (N, C); arguments as for `alone`."""
        sure = self.alone(p1, kind=kind, n_options=n_options)
        return np.asarray(confidence(sure, self.confidence, n_options) < self.threshold)

    def combine(
        self,
        p1: ArrayLike,
        p2: ArrayLike,
        *,
        kind: ArrayLike | None = None,
        n_options: ArrayLike | None = None,
        finished: ArrayLike = True,
    ) -> Floats:
        """Distribution after thinking, for one question or N: (1 - mix) * p1 + mix * p2 of a plain policy.

        Parameters
        ----------
        p1, p2 : array_like of shape (C,) or (N, C)
            As the systems gave them.
        kind, n_options : optional
            As for `alone`.
        finished : array_like of bool, shape () or (N,)
            Whether the thought ended by itself: one that was cut has its own temperature.
        """
        t = self.calibration
        first, second = t.at("p1", p1, kind, n_options), t.system2(p2, finished, kind, n_options)
        return t.at("final", pooled(first, second, self.mix, self.pool, n_options), kind, n_options)

    def routed(self, *, dataset: str | None = None, kind: str | None = None, n_options: int | None = None) -> Policy:
        """The policy without routes that a request with these features is answered under."""
        features = {"dataset": dataset, "kind": kind, "n_options": n_options}
        carried = {f"{name}={value}" for name, value in features.items() if value is not None}
        for key, route in self.routes.items():
            if key in carried:
                return self._with(route)
        return replace(self, routes={}) if self.routes else self

    def _with(self, route: Route) -> Policy:
        changed = {f.name: v for f in fields(route) if (v := getattr(route, f.name)) is not None}
        return replace(self, routes={}, **changed)

    def parts(self, outcomes: Outcomes) -> Iterator[tuple[Policy, NDArray[np.bool_]]]:
        """Each policy without routes, with the mask (N,) of the questions that it answers."""
        left = np.ones(outcomes.n, dtype=bool)
        columns = {"dataset": outcomes.dataset, "kind": outcomes.kind, "n_options": outcomes.n_options}
        for key, route in self.routes.items():
            name, _, value = key.partition("=")
            mask = left & (columns[name].astype(str) == value)
            left &= ~mask
            yield self._with(route), mask
        yield replace(self, routes={}), left

    def readings(self, outcomes: Outcomes) -> tuple[tuple[str, int | None], ...]:
        """Arm and think budget of all that an answer or its seconds may come from, over all routes.

        The budget is None where nothing is thought about: whatever was read of a thought then counts for nothing.
        Under a deadline a thought may be closed at any smaller budget that was collected.
        """
        found: dict[tuple[str, int | None], None] = {}
        for part, _ in self.parts(outcomes):
            if part.threshold == NEVER:
                found[part.arm, None] = None
                continue
            found[part.arm, part.think_budget] = None
            if self.deadline is not None:
                found |= {(part.arm, b): None for b in outcomes.budgets.tolist() if b < part.think_budget}
        return tuple(sorted(found, key=lambda reading: (reading[0], reading[1] or 0)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as `from_dict` reads them; a policy without a deadline does not speak of one."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.deadline is None:
            del plain["deadline"], plain["on_deadline"]
        routes = {
            key: {f.name: v for f in fields(route) if (v := getattr(route, f.name)) is not None}
            for key, route in self.routes.items()
        }
        fitted = None if self.temperatures is None else self.calibration.to_dict()
        return plain | {"routes": routes, "temperatures": fitted}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        """Policy from the values of `to_dict`; a `CalibError` names a field that is unknown or of a wrong type."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise CalibError(
                f"unknown field {unknown[0]!r} in a policy; known: {', '.join(f.name for f in fields(cls))}"
            )
        absent = {"deadline"} if values.get("deadline") is None else set()
        plain = {name: value for name, value in values.items() if name in _FIELD_TYPES and name not in absent}
        _check_types(plain, "policy")
        routes = values.get("routes") or {}
        if not isinstance(routes, Mapping) or not all(isinstance(route, Mapping) for route in routes.values()):
            raise CalibError("routes of a policy must be an object that holds an object for each route")
        for key, route in routes.items():
            strange = sorted(set(route) - {f.name for f in fields(Route)})
            if strange:
                raise CalibError(f"unknown field {strange[0]!r} in route {key!r}; known: threshold, think_budget")
            _check_types(route, f"route {key!r}")
        try:
            return cls(**{**values, "routes": {key: Route(**route) for key, route in routes.items()}})
        except TypeError as error:
            raise CalibError(f"not a policy: {error}") from None


_FIELD_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "threshold": ((int, float), "a number"),
    "mix": ((int, float), "a number"),
    "think_budget": ((int,), "a whole number"),
    "arm": ((str,), "a name"),
    "confidence": ((str,), "a name"),
    "pool": ((str,), "a name"),
    "deadline": ((int, float), "a number of seconds"),
    "on_deadline": ((str,), "a name"),
}


def _check_types(values: Mapping[str, Any], where: str) -> None:
    """Refuse what JSON can hold and a policy cannot: texts for numbers, true for 1, an arm without a name."""
    for name, value in values.items():
        expected, words = _FIELD_TYPES[name]
        if isinstance(value, bool) or not isinstance(value, expected) or value == "":
            raise CalibError(f"{name} of a {where} must be {words}, got {value!r}")


def _check_threshold(value: float | None, name: str) -> None:
    if value is not None and not 0 <= value <= ALWAYS:
        raise CalibError(f"{name} must be from 0 (never think) to 1.1 (always think), got {value}")


def _check_budget(value: int | None, name: str) -> None:
    if value is not None and (isinstance(value, bool) or value != int(value) or value < 1):
        raise CalibError(f"{name} must be a whole number of tokens, 1 or more, got {value}")


@dataclass(frozen=True)
class Cost:
    """Prices that make accuracy and latency one number: mean of wrong * C + seconds * D + tokens * E."""

    wrong: float = 0.0
    second: float = 0.0
    token: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Cost:
        """Cost from ``wrong=1,second=0.01,token=0.0001`` (any of the three)."""
        prices: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            if name.strip() in prices:
                raise CalibError(f"--cost {text!r} names {name.strip()!r} twice; give each price once")
            try:
                prices[name.strip()] = float(number)
            except ValueError:
                raise CalibError(f"--cost {text!r}: {part!r} is not NAME=NUMBER; write wrong=1,second=0.01") from None
        unknown = sorted(set(prices) - {"wrong", "second", "token"})
        if unknown or not all(math.isfinite(v) and v >= 0 for v in prices.values()):
            raise CalibError(f"--cost {text!r}: give wrong, second or token a price of 0 or more: wrong=1,second=0.01")
        return cls(**prices)

    def of(self, right: NDArray[np.bool_], latency: Floats, tokens: Floats) -> Floats:
        """Cost of each question, shape (N,); an unknown latency is needed only when seconds have a price."""
        cost = self.wrong * ~right + self.token * tokens
        return cost + self.second * latency if self.second else cost


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a policy did with each of N questions.

    Attributes
    ----------
    p : ndarray of shape (N, C)
        Final distribution; a row of NaN where System 2 was asked and failed.
    thinks : ndarray of bool, shape (N,)
    latency : ndarray of shape (N,)
        Seconds; NaN where unknown.
    tokens : ndarray of shape (N,)
        Thinking tokens, 0 without thinking.
    closed : ndarray of bool, shape (N,)
        Whether the deadline closed the thought (see `calib.deadline`).
    degraded : ndarray of bool, shape (N,)
        Whether System 1 answers in place of a thought that the deadline closed.
    """

    p: Floats
    thinks: NDArray[np.bool_]
    latency: Floats
    tokens: Floats
    closed: NDArray[np.bool_] = None  # type: ignore[assignment]  # none, unless given
    degraded: NDArray[np.bool_] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in ("closed", "degraded"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.zeros(len(self.thinks), dtype=bool))

    @cached_property
    def choice(self) -> NDArray[np.int64]:
        """Index of the answer, -1 without a usable one."""
        return metrics.chosen(self.p)

    def take(self, which: NDArray[Any]) -> Decisions:
        """Those of the questions at these positions, or where the mask is true."""
        return Decisions(*(getattr(self, f.name)[which] for f in fields(self)))


def decide(outcomes: Outcomes, policy: Policy) -> Decisions:
    """Apply the policy to every cached question."""
    if not policy.routes:
        return _decide(outcomes, policy)
    n = outcomes.n
    found = Decisions(outcomes.p1.copy(), np.zeros(n, dtype=bool), np.zeros(n), np.zeros(n))
    for part, mask in policy.parts(outcomes):
        if mask.any():
            d = _decide(outcomes.take(mask), part)
            for f in fields(Decisions):
                getattr(found, f.name)[mask] = getattr(d, f.name)
    return found


def _decide(outcomes: Outcomes, policy: Policy) -> Decisions:
    a, b = outcomes.arm_index(policy.arm), outcomes.budget_index(policy.think_budget)
    p1, asked = outcomes.p1, {"kind": outcomes.kind, "n_options": outcomes.n_options}
    thinks = policy.thinks(p1, **asked) & outcomes.can_think
    if policy.deadline is not None:
        return _decide_in_time(outcomes, policy, thinks, policy.deadline)
    after = policy.combine(p1, outcomes.p2[:, b], **asked, finished=outcomes.finished[:, b])
    p = np.where(thinks[:, None], after, policy.alone(p1, **asked))
    # System 1 always runs first; `where` and not a product, since 0 * NaN would spoil a question that does not think
    latency = outcomes.t1[a] + np.where(thinks, outcomes.t2[a, :, b], 0.0)
    return Decisions(p, thinks, latency, np.where(thinks, outcomes.tokens[:, b], 0.0))


def _decide_in_time(outcomes: Outcomes, policy: Policy, thinks: NDArray[np.bool_], deadline: float) -> Decisions:
    """The same under a deadline, which closes thoughts."""
    a, b = outcomes.arm_index(policy.arm), outcomes.budget_index(policy.think_budget)
    p1, asked, rows = outcomes.p1, {"kind": outcomes.kind, "n_options": outcomes.n_options}, np.arange(outcomes.n)
    cut = close_in_time(outcomes, a, b, deadline, policy.on_deadline, thinks)
    after = policy.combine(p1, outcomes.p2[rows, cut.budget], **asked, finished=outcomes.finished[rows, cut.budget])
    p = np.where((thinks & ~cut.degraded)[:, None], after, policy.alone(p1, **asked))
    latency, tokens = np.where(thinks, cut.latency, outcomes.t1[a]), np.where(thinks, cut.tokens, 0.0)
    return Decisions(p, thinks, latency, tokens, cut.closed, cut.degraded)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Every metric of one policy on N questions. Rates and scores 0 to 1 (brier 0 to 2), seconds, tokens.

    NaN where a metric has no meaning: latency that is not known, macro F1 where some question has no fixed label
    set, cost without prices. ``unanswered`` counts questions whose System 2 failed, ``clipped`` right answers below
    1e-12 in nll.
    """

    n: int
    accuracy: float
    skill: float
    think_rate: float
    tokens: float
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    ece: float
    brier: float
    nll: float
    macro_f1: float
    cost: float
    unanswered: int
    clipped: int
    by_dataset: Mapping[str, Evaluation] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Metrics by name, NaN as None; without the breakdown."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "by_dataset"}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def evaluate(outcomes: Outcomes, policy: Policy, *, by_dataset: bool = False, cost: Cost | None = None) -> Evaluation:
    """Score the policy: accuracy, skill, think rate, latency percentiles, calibration, cost.

    Parameters
    ----------
    outcomes : Outcomes
    policy : Policy
    by_dataset : bool, default False
        Whether to score each dataset as well.
    cost : Cost, optional
        Prices for the metric ``cost``.
    """
    return evaluate_decisions(outcomes, decide(outcomes, policy), by_dataset=by_dataset, cost=cost)


def evaluate_decisions(
    outcomes: Outcomes, decisions: Decisions, *, by_dataset: bool = False, cost: Cost | None = None
) -> Evaluation:
    """Score decisions that were made already, as `evaluate`."""
    score = _score(outcomes, decisions, None, cost)
    if not by_dataset:
        return score
    each = {
        name: _score(outcomes, decisions, np.flatnonzero(outcomes.dataset_codes == k), cost)
        for k, name in enumerate(outcomes.dataset_names)
    }
    return replace(score, by_dataset=each)


def _score(o: Outcomes, d: Decisions, where: NDArray[np.int64] | None, cost: Cost | None) -> Evaluation:
    pick: Any = slice(None) if where is None else where
    p, answer, latency, tokens = d.p[pick], o.answer[pick], d.latency[pick], d.tokens[pick]
    w = None if o.unweighted else o.weight[pick]
    labels = o.label_set[pick]
    right = d.choice[pick] == answer
    accuracy = metrics.mean(right, w)
    p50, p90, p95, p99 = metrics.percentiles(latency, [50, 90, 95, 99], w).tolist()
    return Evaluation(
        n=len(answer),
        accuracy=accuracy,
        skill=metrics.skill(accuracy, o.n_options[pick], w),
        think_rate=metrics.mean(d.thinks[pick], w),
        tokens=metrics.mean(tokens, w),
        mean=metrics.mean(latency, w),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        ece=metrics.ece(p, answer, w),
        brier=metrics.brier(p, answer, w),
        nll=metrics.nll(p, answer, w),
        macro_f1=metrics.macro_f1(p, answer, labels, w) if (labels >= 0).all() else float("nan"),
        cost=float("nan") if cost is None else metrics.mean(cost.of(right, latency, tokens), w),
        unanswered=int((d.choice[pick] < 0).sum()),
        clipped=metrics.nll_clipped(p, answer),
    )


def baselines(outcomes: Outcomes, arm: str | None = None) -> dict[str, Policy]:
    """What one would serve without tuning, by name: system1, default, always_think, system2.

    Parameters
    ----------
    outcomes : Outcomes
        Gives the server's own threshold and mix, and the largest budget.
    arm : str, optional
        The first arm when left out.
    """
    arm = arm or outcomes.arms[0]
    if not outcomes.budgets.size:
        raise CalibError("no thought was collected; run: calib collect QUESTIONS --budgets 8192")
    largest = int(outcomes.budgets[-1])
    mix = outcomes.default_mix
    return {
        "system1": Policy(NEVER, mix, largest, arm),
        "default": Policy(outcomes.default_threshold, mix, largest, arm),
        "always_think": Policy(ALWAYS, mix, largest, arm),
        "system2": Policy(ALWAYS, 1.0, largest, arm),
    }

"""The promises of an envelope as bets that the decisions of a log settle, and what they say in words.

Pure. Leaves to others: what was promised (`calib.envelope`), how evidence grows (`calib.anytime`), the report on all of
them (`calib.watch`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calib.anytime import Bets, confidence_sequence, reference_interval
from calib.jsonnumbers import finite
from calib.policy import Policy, confidence
from calib.target import Target, parse_target

__all__ = ["AT_RISK", "STATES", "Batch", "Finding", "Promise", "State", "percent", "promises"]

State = Literal["ok", "at_risk", "broken"]
STATES: tuple[State, ...] = ("ok", "at_risk", "broken")
"""What a promise can be, from the best to the worst."""

AT_RISK = 4.0
"""How many times the chance of a false alarm a false "at risk" may have."""

_TIMES = 10.0  # a mean of seconds is bet on with values cut here, in multiples of its limit: they have no largest one
_KEEPS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Batch:
    """Decisions of a log in order, as arrays of shape (T,); NaN where unknown.

    Attributes
    ----------
    at, confidence, tokens, seconds, t1, t2 : ndarray of float
    think, finished, closed, degraded : ndarray of bool
    dataset, kind, mode : list of str
    """

    at: Floats
    confidence: Floats
    tokens: Floats
    seconds: Floats
    t1: Floats
    t2: Floats
    think: Bools
    finished: Bools
    closed: Bools
    degraded: Bools
    dataset: list[str]
    kind: list[str]
    mode: list[str]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], policy: Policy) -> Batch:
        """Arrays of rows of a log; a confidence that it does not hold is taken of p1 as the policy sees it."""

        def numbers(name: str) -> Floats:
            return np.array([math.nan if row.get(name) is None else row[name] for row in rows], dtype=np.float64)

        def flags(name: str, absent: bool = False) -> Bools:
            return np.array([bool(row.get(name, absent)) for row in rows], dtype=bool)

        def texts(name: str, absent: str = "") -> list[str]:
            return [str(row.get(name) or absent) for row in rows]

        sure = numbers("confidence")
        for i in np.flatnonzero(np.isnan(sure)):
            row = rows[int(i)]
            if row.get("p1"):
                alone = policy.alone(row["p1"], kind=row.get("kind"), n_options=len(row["p1"]))
                sure[i] = float(confidence(alone, policy.confidence, len(row["p1"])))
        return cls(
            at=numbers("at"),
            confidence=sure,
            tokens=numbers("tokens"),
            seconds=numbers("seconds"),
            t1=numbers("t1"),
            t2=numbers("t2"),
            think=flags("think"),
            finished=flags("finished", absent=True),
            closed=flags("closed"),
            degraded=flags("degraded"),
            dataset=texts("dataset"),
            kind=texts("kind", "choice"),
            mode=texts("mode", "auto"),
        )

    def take(self, where: Bools) -> Batch:
        """The decisions where the mask is true."""
        picked = np.flatnonzero(where).tolist()
        taken: dict[str, Any] = {
            name: value[where] if isinstance(value, np.ndarray) else [value[i] for i in picked]
            for name, value in vars(self).items()
        }
        return Batch(**taken)


@dataclass(frozen=True)
class Finding:
    """One promise and what the traffic says of it.

    Attributes
    ----------
    promise : str
        A target as it was written, or what the questions showed: think rate, cut thoughts, confidence, thought length.
    kind : {"limit", "think", "cut", "confidence", "thought", "unseen"}
    state : {"ok", "at_risk", "broken"}
    n : int
        Requests that it is about.
    share : float
        What was seen: a share, 0 to 1, for a distribution of values below ``cut``; or a mean.
    low, high : float
        Interval of it that holds at every number of requests, at the promise's own level; NaN for a mean.
    allowed_low, allowed_high : float
        What it may be; for a promise by questions the interval of their share.
    promised : float
        What the questions showed; NaN where unknown.
    cut : float
        Of a distribution, where traffic and questions are furthest apart; else NaN.
    evidence : float
        Largest wealth of a bettor against the promise so far, from 1; broken from `decisive` on.
    decisive : float
    since : int
        Requests (of ``n``) before the one at which the change most credibly began.
    share_since : float
        What was seen from there on; NaN for a mean.
    alarm : int or None
        Number of requests (of ``n``) after which it counted as broken; ``alarm_at`` its unix seconds.
    alarm_at : float
    text : str
        The finding in words.
    """

    promise: str
    kind: str
    state: State
    n: int
    text: str
    share: float = math.nan
    low: float = math.nan
    high: float = math.nan
    allowed_low: float = math.nan
    allowed_high: float = math.nan
    promised: float = math.nan
    cut: float = math.nan
    evidence: float = 1.0
    decisive: float = math.inf
    since: int = 0
    share_since: float = math.nan
    alarm: int | None = None
    alarm_at: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not finite."""
        plain = dict(vars(self))
        plain["interval"] = [plain.pop("low"), plain.pop("high")]
        plain["allowed"] = [plain.pop("allowed_low"), plain.pop("allowed_high")]
        return {name: finite(value) for name, value in plain.items()}


@dataclass(eq=False)
class Promise:
    """One promise with its bets: E events (1 but for distributions), each bet against from above, or from both sides.

    Attributes
    ----------
    name, kind : str
    pick : callable
        Mask of the decisions of a batch that it is about.
    values : callable
        Of those decisions the values that are bet on, 0 to 1, shape (T, E).
    promised, low, high : ndarray of shape (E,)
        What the questions showed, and the interval that the mean must stay in without a change.
    alpha : float
        Chance of a false alarm that the bets may spend.
    cuts : list of float
    level : float
        Of the shown interval.
    scale : float
        What a value of 1 stands for.
    raw : callable, optional
        Of a mean: the values before they are cut to be bet on, shape (T,).
    """

    name: str
    kind: str
    pick: Callable[[Batch], Bools]
    values: Callable[[Batch], Floats]
    promised: Floats
    low: Floats
    high: Floats
    alpha: float
    words: Callable[[Finding], str]
    cuts: Sequence[float] = ()
    scale: float = 1.0
    raw: Callable[[Batch], Floats] | None = None
    n: int = 0
    raw_sum: float = 0.0
    log_evidence: float = 0.0
    alarm: int | None = None
    alarm_at: float = math.nan
    sums: Floats = field(init=False)

    def __post_init__(self) -> None:
        events = len(self.high)
        self.sums = np.zeros(events)
        above, below = np.flatnonzero(self.high < 1), np.flatnonzero(self.low > 0)
        self._event = np.concatenate([above, below])
        self._sign = np.repeat([1.0, -1.0], [len(above), len(below)])
        self._bets = Bets(np.concatenate([self.high[above], 1 - self.low[below]])) if self._event.size else None

    def update(self, batch: Batch) -> None:
        """Bet on the decisions of a batch that the promise is about."""
        part = batch.take(self.pick(batch))
        x = self.values(part)
        if not len(x):
            return
        self.sums += x.sum(axis=0)
        if self.raw is not None:
            self.raw_sum += float(self.raw(part).sum())
        if self._bets is not None:
            wealth = self._bets.update(np.where(self._sign > 0, x[:, self._event], 1 - x[:, self._event]))
            most = wealth.max(axis=1)
            together = most + np.log(np.exp(wealth - most[:, None]).mean(axis=1))
            if self.alarm is None and (together >= self.log_decisive).any():
                first = int((together >= self.log_decisive).argmax())
                self.alarm, self.alarm_at = self.n + first + 1, float(part.at[first])
            self.log_evidence = max(self.log_evidence, float(together.max()))
        self.n += len(x)

    @property
    def log_decisive(self) -> float:
        """Logarithm of the evidence from which on the promise counts as broken."""
        return -math.log(self.alpha)

    @property
    def state(self) -> State:
        """By the largest evidence so far: an alarm stays."""
        if self.log_evidence >= self.log_decisive:
            return "broken"
        return "at_risk" if self.log_evidence >= self.log_decisive - math.log(AT_RISK) else "ok"

    def _worst(self) -> tuple[int, int, float]:
        """The event with the richest bettor, where its change most credibly began, and its mean since."""
        if self._bets is None or not self.n:
            return 0, 0, self._mean(0)
        stream = int(self._bets.log_wealth.argmax())
        since, mean = self._bets.began(stream)
        return int(self._event[stream]), since, mean if self._sign[stream] > 0 else 1 - mean

    def _mean(self, event: int) -> float:
        return float(self.sums[event]) / self.n if self.n else math.nan

    def finding(self) -> Finding:
        """What is known now."""
        event, since, later = self._worst()
        if self.raw is None:
            share = self._mean(event)
            low, high = confidence_sequence(float(self.sums[event]), self.n, 1 - self.alpha)
        else:
            share, later = self.raw_sum / self.n if self.n else math.nan, math.nan
            low = high = math.nan
        found = Finding(
            self.name,
            self.kind,
            self.state,
            self.n,
            "",
            share=share,
            low=low,
            high=high,
            allowed_low=self.scale * float(self.low[event]),
            allowed_high=self.scale * float(self.high[event]),
            promised=float(self.promised[event]),
            cut=float(self.cuts[event]) if self.cuts else math.nan,
            evidence=math.exp(min(self.log_evidence, 700.0)),
            decisive=1 / self.alpha,
            since=since,
            share_since=later,
            alarm=self.alarm,
            alarm_at=self.alarm_at,
        )
        return replace(found, text=self.words(found))


def percent(value: float) -> str:
    """Share as ``14.1 %``."""
    return f"{100 * value:.1f} %"


def _later(found: Finding) -> str:
    """Since when, where a change began after the first requests."""
    if found.state == "ok" or found.since < 1:
        return ""
    return f"; {percent(found.share_since)} since request {found.since + 1:,}"


def _promised(low: float, high: float) -> str:
    if high >= 1:
        return f"at least {percent(low)} promised"
    return f"at most {percent(high)} promised" if low <= 0 else f"{percent(low)} to {percent(high)} promised"


def promises(record: Mapping[str, Any], policy: Policy, alpha: float) -> list[Promise]:
    """All promises, each with its part of alpha; the datasets of one target share the part of the target."""
    limits = record["limits"]
    families = len({row["target"] for row in limits}) + sum(
        1 for name in ("think", "cut", "confidence", "thought") if _is_promised(record, name)
    )
    part = alpha / max(families, 1)
    found = [_limit(row, policy, part / row["of"]) for row in limits]
    among = record["chosen_among"]
    if _is_promised(record, "think"):
        found.append(_by_share("think rate", "think", record["think"], _every, _thinks, part, among, below=True))
    if _is_promised(record, "cut"):
        found.append(_by_share("cut thoughts", "cut", record["cut"], _thought, _cut, part, among, below=False))
    if _is_promised(record, "confidence"):
        found.append(_by_cuts("confidence", "confidence", record["confidence"], _sure, "confidence", part, 1, ""))
    if _is_promised(record, "thought"):
        found.append(
            _by_cuts("thought length", "thought", record["thought"], _thought, "tokens", part, among, " tokens")
        )
    return found


def _is_promised(record: Mapping[str, Any], name: str) -> bool:
    part = record[name]
    return bool(part["n"] > 0 and (part.get("cuts") or part.get("share") is not None))


def _every(batch: Batch) -> Bools:
    return np.ones(len(batch.at), dtype=bool)


def _sure(batch: Batch) -> Bools:
    return ~np.isnan(batch.confidence)


def _thought(batch: Batch) -> Bools:
    """A thought whose answer counts: a System 2 that failed says nothing about its length."""
    return np.asarray(batch.think & ~batch.degraded & ~np.isnan(batch.tokens))


def _thinks(batch: Batch) -> Floats:
    return batch.think[:, None].astype(np.float64)


def _cut(batch: Batch) -> Floats:
    return (~batch.finished)[:, None].astype(np.float64)


def _limit(row: Mapping[str, Any], policy: Policy, alpha: float) -> Promise:
    """A target that traffic shows: a limit on a share, or on the mean of values with a largest one."""
    target = parse_target(row["target"])
    dataset, allowed = row["dataset"], float(row["allowed"])
    name = str(target) if dataset is None or not target.worst else f"{target} in {dataset!r}"

    def pick(batch: Batch) -> Bools:
        inside = _every(batch) if dataset is None else np.array([d == dataset for d in batch.dataset], dtype=bool)
        unknown = np.isnan(batch.tokens if target.metric == "tokens" else batch.seconds)
        return inside if target.metric == "think_rate" else np.asarray(inside & ~unknown)

    scale, raw = 1.0, None
    if target.metric == "tokens":
        budgets = [policy.think_budget, *(r.think_budget for r in policy.routes.values() if r.think_budget)]
        scale, raw = float(max(budgets)), _tokens
    elif target.metric == "mean":
        scale, raw = _TIMES * allowed, _seconds

    def values(batch: Batch) -> Floats:
        counted = _broken(target, batch) if raw is None else np.minimum(raw(batch) / scale, 1.0)
        return counted[:, None]

    high = np.array([min(allowed / scale, 1.0)])
    found = math.nan if row["found"] is None else float(row["found"])
    words = _limit_words(target, name, found, mean=raw is not None)
    ends = np.zeros(1), high
    return Promise(name, "limit", pick, values, np.array([found]), *ends, alpha, words, scale=scale, raw=raw)


def _tokens(batch: Batch) -> Floats:
    return batch.tokens


def _seconds(batch: Batch) -> Floats:
    return batch.seconds


def _broken(target: Target, batch: Batch) -> Floats:
    """1 for each decision that counts against a target on a share; the same rule as `calib.risk.violations`."""
    if target.metric == "think_rate":
        return np.asarray(batch.think if target.upper else ~batch.think).astype(np.float64)
    return np.asarray(~np.asarray(_KEEPS[target.op](batch.seconds, target.value), dtype=bool)).astype(np.float64)


def _limit_words(target: Target, name: str, found: float, *, mean: bool) -> Callable[[Finding], str]:
    """A finding on a target in words."""
    if target.metric == "think_rate":
        event = "think" if target.upper else "do not think"
    else:
        seconds = f"{target.value:g} s"
        later = {"<": f"took {seconds} or longer", "<=": f"took longer than {seconds}"}
        event = later.get(target.op, f"took no longer than {seconds}")

    def of_mean(f: Finding) -> str:
        unit = "tokens" if target.metric == "tokens" else "s"
        was = "" if math.isnan(found) else f", {found:.4g} promised by the questions"
        return f"{name}: {f.share:.4g} {unit} in the mean of {f.n:,} requests, at most {target.value:g} allowed{was}"

    def of_share(f: Finding) -> str:
        was = "" if math.isnan(found) else f" ({percent(found)} of the questions)"
        return (
            f"{name}: {percent(f.share)} [{percent(f.low)}, {percent(f.high)}] of {f.n:,} requests {event}, at most "
            f"{percent(f.allowed_high)} promised{was}{_later(f)}"
        )

    return _or_nothing(name, of_mean if mean else of_share)


def _or_nothing(name: str, words: Callable[[Finding], str]) -> Callable[[Finding], str]:
    return lambda f: words(f) if f.n else f"{name}: no such request yet"


def _by_share(
    name: str,
    kind: str,
    promised: Mapping[str, Any],
    pick: Callable[[Batch], Bools],
    values: Callable[[Batch], Floats],
    alpha: float,
    among: int,
    *,
    below: bool,
) -> Promise:
    """A share that the questions showed; ``below`` says whether less than promised breaks it too."""
    share, n = float(promised["share"]), float(promised["n"])
    low, high = reference_interval(share, n, alpha / 2 / among)
    what = {"think": "requests think", "cut": "thoughts were cut"}[kind]

    def words(f: Finding) -> str:
        return (
            f"{name}: {percent(f.share)} [{percent(f.low)}, {percent(f.high)}] of {f.n:,} {what}, "
            f"{_promised(f.allowed_low, f.allowed_high)} ({percent(share)} of the questions){_later(f)}"
        )

    ends = np.array([low if below else 0.0]), np.array([high])
    return Promise(name, kind, pick, values, np.array([share]), *ends, alpha / 2, _or_nothing(name, words))


def _by_cuts(
    name: str,
    kind: str,
    promised: Mapping[str, Any],
    pick: Callable[[Batch], Bools],
    column: str,
    alpha: float,
    among: int,
    unit: str,
) -> Promise:
    """A distribution: the share below each cut, which all the intervals hold at once."""
    cuts, below, n = list(promised["cuts"]), list(promised["below"]), float(promised["n"])
    ends = np.array([reference_interval(share, n, alpha / 2 / among / len(cuts)) for share in below])
    at = np.array(cuts)

    def values(batch: Batch) -> Floats:
        return np.asarray(getattr(batch, column)[:, None] < at).astype(np.float64)

    def words(f: Finding) -> str:
        return (
            f"{name}: {percent(f.share)} of {f.n:,} are below {f.cut:.4g}{unit}, "
            f"{_promised(f.allowed_low, f.allowed_high)} ({percent(f.promised)} of the questions){_later(f)}"
        )

    return Promise(
        *(name, kind, pick, values, np.array(below), ends[:, 0], ends[:, 1], alpha / 2, _or_nothing(name, words)),
        cuts=cuts,
    )

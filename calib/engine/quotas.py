"""Outcomes of a simulated model, assigned by quota so that a set of questions meets its figures exactly.

Leaves to others: which figures to meet (`profiles`), reading an answer at a budget (`traces`).

What is assumed, beyond the quotas:

- System 1's confidence is continuous and roughly calibrated; its errors keep the right option as a frequent runner-up.
- Thoughts are longer where System 1 is less confident (rank correlation about 0.6, unless a plan says otherwise).
- A thought cut early leans to System 1's answer. Late in the thought (after 30 to 100 % of it) some leanings move to a
  wrong option, so that cut thoughts lose about one in 25 of System 1's right answers: they are a little worse than
  System 1 and nearly as sure as finished ones. A cut thought moves to the right option only where the quotas cannot
  be met otherwise.
- Among the questions that System 1 gets wrong, short thoughts put it right more often than long ones; a share ``harm``
  of its right answers is spoilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calib.engine.traces import JITTER, Bools, Floats, Ints, Traces

__all__ = ["LENGTH_FOLLOWS_DOUBT", "Reference", "SetPlan", "build", "lengths_by_rank"]

CUT_LOSES = 0.04
"""Share of System 1's right answers that a cut thought loses: 17.0 % right against 17.7 %, as published."""
CUT_WANDERS = 0.2
"""Share of System 1's wrong answers that a cut thought exchanges for another wrong one."""
MOST_FINISHED_RIGHT = 0.97
"""Largest share of the finished thoughts of a set that are right before cut ones have to be."""
LENGTH_FOLLOWS_DOUBT = 0.6
KEPT_LENGTH = 0.6
"""Length of a thought on a question that the threshold keeps, relative to those it sends."""
SHORTEST = 40
"""Tokens."""
LATE = 0.5
"""Thoughts longer than the reference budget, and thoughts on kept questions, change an answer this much less often."""
KEPT_SURE = 0.95
"""Least weight of System 2's option where it overrules a confident System 1."""


@dataclass(frozen=True)
class Reference:
    """The policy at which the quotas hold."""

    threshold: float
    mix: float
    think_budget: int


@dataclass(frozen=True, eq=False)
class SetPlan:
    """What one set of N questions has to come to, in whole questions.

    Attributes
    ----------
    name : str
        For messages.
    n_options, key : ndarray of int, shape (N,)
        Number of options; index of the right one.
    think : int
        Questions whose confidence is below the threshold.
    kept_right, system1 : int
        Right answers of System 1 among the kept questions, and in all.
    adaptive : int
        Right answers under the reference policy.
    always : int or None
        Right answers when every question thinks; None leaves it to the rates of those that think.
    harm : float
        Share of System 1's right answers that a finished thought spoils, 0 to 1.
    lengths : ndarray of int, shape (think,), or None
        Thought lengths of the questions that think, ascending, tokens; None takes them from a pool over all sets.
    follows_doubt : float
        Rank correlation of thought length and doubt (1 - confidence), 0 to 1; of no use with a pool.
    """

    name: str
    n_options: Ints
    key: Ints
    think: int
    kept_right: int
    system1: int
    adaptive: int
    always: int | None
    harm: float
    lengths: Ints | None
    follows_doubt: float = LENGTH_FOLLOWS_DOUBT


def lengths_by_rank(n: int, knots: Sequence[tuple[int, int]]) -> Ints:
    """N ascending thought lengths, tokens, log-linear between (rank from 1, tokens).

    Raises
    ------
    ValueError
        When the knots do not ascend.
    """
    ranks, tokens = np.array(sorted(knots), dtype=np.float64).T
    if (np.diff(ranks) <= 0).any() or (np.diff(tokens) <= 0).any():
        raise ValueError(f"thought lengths must ascend with their rank, got {sorted(knots)}")
    lengths: Floats = np.rint(np.exp(np.interp(np.arange(1, n + 1), ranks, np.log(tokens))))
    return lengths.astype(np.int64)


def build(
    plans: Sequence[SetPlan],
    reference: Reference,
    *,
    seed: Sequence[int],
    pool: Ints | None = None,
    overconfidence: float = 0.0,
    stubborn: float = 0.5,
) -> Traces:
    """Traces that meet every plan exactly.

    Parameters
    ----------
    plans : sequence of SetPlan
    reference : Reference
        The policy at which the quotas hold.
    seed : sequence of int
        Another seed gives another model that meets the same quotas.
    pool : ndarray of int, shape (N,), optional
        Thought lengths of all questions, ascending, for plans without their own.
    overconfidence : float, default 0
        Share of System 1's error that its mean top probability hides, 0 to 1.
    stubborn : float, default 0.5
        Share of the wrong answers after thinking that are System 1's own, 0 to 1.

    Raises
    ------
    ValueError
        When a quota cannot be met.
    """
    drafts = [_system1(plan, reference, _rng(seed, k, 0), overconfidence) for k, plan in enumerate(plans)]
    rngs = [_rng(seed, k, 1) for k in range(len(plans))]
    lengths = _lengths(plans, [d.confidence for d in drafts], rngs, reference.threshold, pool)
    parts = [
        _system2(plan, draft, length, reference, _rng(seed, k, 2), stubborn)
        for k, (plan, draft, length) in enumerate(zip(plans, drafts, lengths, strict=True))
    ]
    return Traces.concatenate(parts)


def _rng(seed: Sequence[int], *stage: int) -> np.random.Generator:
    """A stream for each set and stage, so that one stage's draws do not move another's."""
    return np.random.default_rng(np.random.SeedSequence([*seed, *stage]))


@dataclass(frozen=True, eq=False)
class _System1:
    p1: Floats
    confidence: Floats
    top: Ints
    runner_up: Ints


def _system1(plan: SetPlan, reference: Reference, rng: np.random.Generator, overconfidence: float) -> _System1:
    n, k = len(plan.key), plan.n_options
    thinks = np.zeros(n, dtype=bool)
    thinks[rng.permutation(n)[: plan.think]] = True
    confidence, right = np.empty(n), np.empty(n, dtype=bool)
    floor = np.where(k == 2, 0.505, 1.12 / k)  # below 1 / k nothing can be the top option
    for sent, quota in ((True, plan.system1 - plan.kept_right), (False, plan.kept_right)):
        group = thinks == sent
        size = int(group.sum())
        if not 0 <= quota <= size:
            raise ValueError(f"{plan.name}: {quota} right answers of System 1 among {size} questions")
        if not size:
            continue
        aim = quota / size + overconfidence * (1 - quota / size)
        u = (rng.permutation(size) + 0.5) / size
        if sent:
            low, high = floor[group], reference.threshold - 0.002
            power = float(np.clip((high - low.mean()) / max(aim - low.mean(), 1e-9) - 1, 0.35, 5.0))
            confidence[group] = low + (high - low) * u**power
        else:
            most = 1 - reference.threshold - 0.002
            confidence[group] = 1 - most * np.exp(-_decay((1 - aim) / most) * u)
        right[group] = _calibrated(confidence[group], quota, rng.uniform(0.1, 0.9))
    top = np.where(right, plan.key, (plan.key + 1 + rng.integers(0, k - 1)) % k)
    third = _other(top, plan.key, k, rng)
    runner_up = np.where(~right & ((rng.random(n) < 0.6) | (k == 2)), plan.key, third)
    return _System1(_spread(confidence, top, runner_up, k, rng), confidence, top, runner_up)


def _decay(share: float) -> float:
    """Rate x, 1 to 20, with mean of exp(-x u) = (1 - exp(-x)) / x = share for an even u from 0 to 1."""
    low, high = 1.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-middle) / middle > share else (low, middle)
    return low


def _calibrated(confidence: Floats, quota: int, offset: float) -> Bools:
    """Exactly ``quota`` right answers, spread so that accuracy follows confidence.

    Systematic sampling: the logits are shifted until the probabilities sum to the quota; then one answer in each unit
    of their running sum is right.
    """
    n = len(confidence)
    if quota in (0, n):
        return np.full(n, quota == n)
    order = np.argsort(confidence)
    logit = np.log(confidence[order]) - np.log1p(-confidence[order])
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-logit - middle))).sum() < quota else (low, middle)
    total = np.cumsum(1 / (1 + np.exp(-logit - low)))
    total *= quota / total[-1]
    steps = np.floor(np.concatenate([[0.0], total]) + offset)
    right = np.zeros(n, dtype=bool)
    right[order] = np.diff(steps) > 0
    return right


def _other(first: Ints, second: Ints, k: Ints, rng: np.random.Generator) -> Ints:
    """An option that is neither of the two where there is one, else the one that is not ``first``."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    same = low == high
    left = np.where(same, k - 1, k - 2)
    drawn = np.floor(rng.random(len(k)) * left).astype(np.int64)
    drawn += drawn >= low
    drawn += ~same & (drawn >= high)
    return np.where(left < 1, second, drawn)


def _spread(confidence: Floats, top: Ints, runner_up: Ints, k: Ints, rng: np.random.Generator) -> Floats:
    """Rows with the given top probability; the rest falls off geometrically from the runner-up, always below it."""
    n, width = len(k), int(k.max())
    rows, place = np.arange(n), np.arange(width - 1)
    rest = rng.uniform(0.35, 0.75, n)[:, None] ** place
    rest[place >= (k - 1)[:, None]] = 0
    rest /= rest.sum(1, keepdims=True)
    even = (place < (k - 1)[:, None]) / (k - 1)[:, None]
    limit = 0.97 * confidence / (1 - confidence)  # share of the rest that the runner-up may hold
    steep = rest[:, 0] - even[:, 0]
    blend = np.clip((limit - even[:, 0]) / np.where(steep > 0, steep, 1.0), 0, 1)[:, None]
    rest = even + blend * (rest - even)
    draw = rng.random((n, width))
    draw[np.arange(width) >= k[:, None]] = np.inf
    draw[rows, runner_up] = -1
    draw[rows, top] = -2
    p1 = np.empty((n, width))
    values = np.concatenate([confidence[:, None], (1 - confidence)[:, None] * rest], axis=1)
    np.put_along_axis(p1, np.argsort(draw, axis=1), values, axis=1)
    return p1


def _lengths(
    plans: Sequence[SetPlan],
    confidence: Sequence[Floats],
    rngs: Sequence[np.random.Generator],
    threshold: float,
    pool: Ints | None,
) -> list[Ints]:
    """Thought length of each question, set by set; the less confident System 1, the longer."""
    if pool is not None:
        ranked = np.empty_like(pool)
        ranked[np.argsort(_doubt(np.concatenate(confidence), rngs[0]))] = pool
        return np.split(ranked, np.cumsum([len(c) for c in confidence])[:-1])
    lengths = []
    for plan, c, rng in zip(plans, confidence, rngs, strict=True):
        if plan.lengths is None:
            raise ValueError(f"{plan.name}: no thought lengths, neither its own nor a pool's")
        order = np.argsort(_doubt(c, rng, plan.follows_doubt))
        sent, kept = order[c[order] < threshold], np.flatnonzero(c >= threshold)
        length = np.empty(len(c), dtype=np.int64)
        length[sent] = plan.lengths
        length[kept] = np.maximum(SHORTEST, KEPT_LENGTH * rng.choice(plan.lengths, len(kept)))
        lengths.append(length)
    return lengths


def _doubt(confidence: Floats, rng: np.random.Generator, follows: float = LENGTH_FOLLOWS_DOUBT) -> Floats:
    rank = np.argsort(np.argsort(-confidence)) / len(confidence) - 0.5
    noise = rng.permutation(len(confidence)) / len(confidence) - 0.5
    return follows * rank + float(np.sqrt(1 - follows**2)) * noise


@dataclass(frozen=True, eq=False)
class _Assignment:
    """The options that finished and cut thoughts read, while quotas move them away from System 1's."""

    name: str
    rng: np.random.Generator
    final: Ints
    leaning: Ints

    def move(self, target: Ints, option: Ints, where: Bools, quota: int, prefer: Ints | None = None) -> Bools:
        """Move exactly ``quota`` of these places to ``option``, at random; leaning to a high ``prefer``.

        Returns
        -------
        ndarray of bool, shape (N,)
            The places that were moved.
        """
        places = np.flatnonzero(where)
        if not 0 <= quota <= len(places):
            raise ValueError(f"{self.name}: a quota of {quota} among {len(places)} questions cannot be met")
        score = self.rng.permutation(len(places)).astype(np.float64)
        if prefer is not None:
            score += np.argsort(np.argsort(prefer[places], kind="stable"), kind="stable")
        moved = np.zeros(len(where), dtype=bool)
        moved[places[np.argsort(-score, kind="stable")[:quota]]] = True
        target[moved] = option[moved]
        return moved


def _system2(
    plan: SetPlan, one: _System1, length: Ints, reference: Reference, rng: np.random.Generator, stubborn: float
) -> Traces:
    n, key, top = len(plan.key), plan.key, one.top
    thinks, right, ends = one.confidence < reference.threshold, top == key, length <= reference.think_budget
    wrong = np.where(right & (rng.random(n) < 0.5), one.runner_up, _other(top, key, plan.n_options, rng))
    to = _Assignment(plan.name, rng, top.copy(), top.copy())

    # of those that think: right answers are RR + WR of finished thoughts, and what the cut ones keep or win
    end_right, end_wrong = thinks & ends & right, thinks & ends & ~right
    cut_right, cut_wrong = thinks & ~ends & right, thinks & ~ends & ~right
    after = plan.adaptive - plan.kept_right
    missing = after - _n(cut_right) - int(MOST_FINISHED_RIGHT * _n(thinks & ends))
    won, lost = max(0, missing), min(round(CUT_LOSES * _n(cut_right)), max(0, -missing))
    need = after - (_n(cut_right) - lost + won)
    least, most = max(0, _n(end_right) - need), max(0, _n(thinks & ends) - need)
    spoilt = int(np.clip(round(plan.harm * _n(end_right)), least, most))
    repaired = need - _n(end_right) + spoilt
    rate = repaired / max(1, _n(end_wrong))

    # what cut thoughts read; the finished ones, cut earlier, lose and wander alike
    to.move(to.leaning, wrong, cut_right, lost)
    winners = to.move(to.leaning, key, cut_wrong, won)
    to.move(to.leaning, wrong, end_right, round(CUT_LOSES * _n(end_right)))
    for group in (cut_wrong & ~winners, end_wrong):
        others = group & (plan.n_options > 2)
        to.move(to.leaning, wrong, others, round(CUT_WANDERS * _n(others)))

    # what finished thoughts read
    to.move(to.final, wrong, end_right, spoilt)
    fixed = to.move(to.final, key, end_wrong, repaired, prefer=-length)
    others = end_wrong & ~fixed & (plan.n_options > 2)
    to.move(to.final, wrong, others, round((1 - stubborn) * _n(others)))
    # beyond the reference budget nothing is published: the set's rates, less often right since the thought is long
    to.move(to.final, key, winners, won)
    to.move(to.final, key, cut_wrong & ~winners, round(LATE * rate * _n(cut_wrong & ~winners)))
    to.move(to.final, wrong, cut_right, round(plan.harm * _n(cut_right)))

    # the kept questions, when all think: only answers that the mix lets through are moved
    sure_final = np.where(to.final == key, rng.uniform(0.95, 0.995, n), rng.uniform(0.90, 0.98, n))
    rival = np.where(right, wrong, key)
    gap = one.confidence - one.p1[np.arange(n), rival]
    heard = ~thinks & ends & (gap * (1 - KEPT_SURE * reference.mix) < KEPT_SURE * reference.mix)
    if plan.always is None:
        gained = min(round(LATE * rate * _n(~thinks & ~right)), _n(heard & ~right))
        spoilt = min(round(LATE * plan.harm * _n(~thinks & right)), _n(heard & right))
    else:
        net = plan.always - plan.adaptive
        gained, spoilt = max(0, net), max(0, -net)
    flipped = to.move(to.final, rival, heard & ~right, gained) | to.move(to.final, rival, heard & right, spoilt)
    sure_final[flipped] = np.maximum(sure_final[flipped], KEPT_SURE)

    traces = Traces(
        p1=one.p1,
        n_options=plan.n_options,
        key=key,
        length=length,
        final=to.final,
        leaning=to.leaning,
        turns=np.ceil(rng.uniform(0.3, 1.0, n) * np.minimum(length, reference.think_budget)).astype(np.int64),
        sure_final=sure_final,
        sure_cut=rng.uniform(0.90, 0.97, n),
        jitter=rng.uniform(-JITTER, JITTER, (n, 2)),
    )
    _check(plan, traces, thinks, reference)
    return traces


def _n(mask: Bools) -> int:
    return int(np.count_nonzero(mask))


def _check(plan: SetPlan, traces: Traces, thinks: Bools, reference: Reference) -> None:
    """The exact decision rule at the reference policy must give the plan's counts."""
    rows = np.arange(len(plan.key))
    p2, _, _ = traces.read(rows, np.array([reference.think_budget]))
    mixed = (1 - reference.mix) * traces.p1 + reference.mix * p2[:, 0]
    first, after = traces.p1.argmax(1) == plan.key, mixed.argmax(1) == plan.key
    got = (int(thinks.sum()), int(first.sum()), int(np.where(thinks, after, first).sum()))
    if got != (plan.think, plan.system1, plan.adaptive):
        raise ValueError(f"{plan.name}: (think, System 1, adaptive) came to {got}")
    if plan.always is not None and int(after.sum()) != plan.always:
        raise ValueError(f"{plan.name}: always thinking came to {int(after.sum())} right, not {plan.always}")

"""The exact optimum against brute force, by hand, and on recorded data."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numba
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from calib import search, sweep
from calib.errors import CalibError
from calib.optimise import feasible, nearest, optimum, pareto, prices, tabulate, tightened
from calib.outcomes import Outcomes
from calib.policy import Cost, Evaluation, Policy, candidate_thresholds, confidence, decide, evaluate
from calib.risk import split_selector, violation_share
from calib.target import Target, parse_targets

PRICES = Cost(wrong=2.0, second=0.25, token=0.001)


# --------------------------------------------------------------------------------------------------- brute force
@st.composite
def outcomes(draw: st.DrawFn, *, latency: bool = True, max_n: int = 7) -> Outcomes:
    """Few questions with coarse numbers, so that ties of every sort are common."""
    n, c = draw(st.integers(1, max_n)), draw(st.integers(2, 4))
    b, a = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    coarse = draw(st.sampled_from([2, 4, 10, 1000, 10**9]))
    k = rng.integers(2, c + 1, n)
    mask = np.arange(c) < k[:, None]

    def distributions(*shape: int) -> np.ndarray:
        raw = rng.integers(0, coarse + 1, (*shape, c)) * (mask if len(shape) == 1 else mask[:, None])
        raw[..., 0] += raw.sum(-1) == 0
        return raw / raw.sum(-1, keepdims=True)

    p1, p2 = distributions(n), distributions(n, b)
    if draw(st.booleans()):  # equal confidences, and System 2 like System 1
        p1[:] = np.where(mask, 1 / k[:, None], 0)
        p2[rng.random(n) < 0.3] = p1[:, None].repeat(b, 1)[0] if c == 2 else p2[0]
        p2 = np.where(mask[:, None], p2, 0)
        p2[..., 0] += p2.sum(-1) == 0
        p2 /= p2.sum(-1, keepdims=True)
    if draw(st.booleans()):
        p2[rng.random((n, b)) < 0.2] = np.nan
    answer = np.zeros(n, int) if draw(st.booleans()) else rng.integers(0, k)
    t1 = rng.integers(1, 4, (a, n)) / 10
    t2 = rng.integers(0, 6, (a, n, b)) / 2
    if not latency:
        t2[rng.random((a, n, b)) < 0.2] = np.nan
    weight = draw(st.sampled_from(["none", "whole", "any"]))
    return Outcomes(
        p1=p1,
        p2=p2,
        tokens=rng.integers(0, 5, (n, b)) * 100,
        finished=np.ones((n, b), bool),
        t1=t1,
        t2=t2,
        answer=answer,
        budgets=np.array([100, 400])[:b],
        arms=("base", "mtp")[:a],
        n_options=k,
        can_think=rng.random(n) < draw(st.sampled_from([1.0, 0.6, 0.0])),
        dataset=rng.choice(["x", "y, z"], n),
        label_set=rng.integers(-1, 1, n) if draw(st.booleans()) else rng.integers(0, 2, n),
        weight={"none": None, "whole": rng.integers(1, 4, n), "any": rng.uniform(0.5, 2, n)}[weight],
    )


def crossings(o: Outcomes) -> np.ndarray:
    """Every mix at which any two options of any question tie, with 0 and 1."""
    p1, p2 = o.p1[:, None], o.p2
    lead1 = p1[..., :, None] - p1[..., None, :]
    lead2 = p2[..., :, None] - p2[..., None, :]
    with np.errstate(all="ignore"):
        mix = lead1 / (lead1 - lead2)
    mix = mix[(mix > 0) & (mix < 1)]
    ends = np.unique(np.concatenate([[0, 1], mix]))
    return np.unique(np.concatenate([ends, ends[:-1] + np.diff(ends) / 2]))


def every_policy(o: Outcomes, mixes: np.ndarray) -> list[tuple[Policy, Evaluation]]:
    able = o.p1[o.can_think]
    thresholds = candidate_thresholds(confidence(able)) if len(able) else [0.0]
    return [
        (policy, evaluate(o, policy, by_dataset=True, cost=PRICES))
        for threshold in thresholds
        for mix in mixes
        for budget in o.budgets.tolist()
        for arm in o.arms
        for policy in [Policy(float(threshold), float(mix), budget, arm)]
    ]


def best(entries: list[tuple[Policy, Evaluation]], targets, metric: str, sign: int) -> float:
    values = [sign * getattr(e, metric) for _, e in entries if all(t.met(e) for t in targets)]
    values = [v for v in values if not math.isnan(v)]
    return sign * max(values) if values else math.nan


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=1e-11, abs=1e-12)


EXACT = [
    "",
    "accuracy>=50%",
    "accuracy>0.5",
    "skill>=0.2",
    "p90<1.2s",
    "p90<=1.1s, accuracy>=60%",
    "p50<=200ms",
    "p99<2.2s, think_rate<50%",
    "mean<1s",
    "tokens<150, p95<=2.6s",
    "think_rate>=30%",
    "cost<1.5",
    "p90[x]<1.2s, think_rate[worst]<=60%",
]
ON_GRID = [
    "accuracy[x]>=50%",
    "accuracy[worst]>=40%, p90<2s",
    "skill['y, z']>0",
    "accuracy<=50%",
    "ece<0.3",
    "brier<=0.8, mean[worst]<1.5s",
    "nll<1",
    "macro_f1>=0.3",
    "macro_f1[worst]>0.2, think_rate>0",
    "cost[x]<1.5",
    "cost>=0.5",
]
OBJECTIVES = [*(("accuracy", 1), ("skill", 1)), *((m, -1) for m in ("p90", "mean", "tokens", "think_rate", "cost"))]
SCORES = [("ece", -1), ("brier", -1), ("nll", -1), ("macro_f1", 1)]
COARSE = np.linspace(0, 1, 9)


def targets_of(o: Outcomes, text: str) -> list[Target]:
    return [t for t in (parse_targets(text) if text else ()) if t.dataset is None or t.dataset in o.dataset_names]


def objective_of(metric: str, sign: int) -> dict[str, str]:
    return {"maximize" if sign > 0 else "minimize": metric}


def check(o: Outcomes, targets: list[Target], metric: str, sign: int, mixes: np.ndarray) -> None:
    found = optimum(o, targets, **objective_of(metric, sign), cost=PRICES)
    entries = every_policy(o, mixes)
    assert same(found.objective, best(entries, targets, metric, sign))
    if found.policy is None:
        assert found.evaluation is None
        assert found.candidates == 0
        return
    again = evaluate(o, found.policy, by_dataset=True, cost=PRICES)
    assert getattr(again, metric) == found.objective
    assert again.to_dict() == found.evaluation.to_dict()
    assert all(t.met(again) for t in targets)
    assert found.mixes[0] <= found.policy.mix <= found.mixes[1]
    assert found.candidates >= 1
    # of equal objectives the cheapest
    rivals = [e for _, e in entries if same(getattr(e, metric), found.objective) and all(t.met(e) for t in targets)]
    if not math.isnan(again.mean):
        assert again.mean <= min(e.mean for e in rivals if not math.isnan(e.mean)) + 1e-12


@given(outcomes(), st.sampled_from(EXACT), st.sampled_from(OBJECTIVES))
@settings(max_examples=70)
def test_no_policy_beats_the_optimum(o: Outcomes, text: str, objective: tuple[str, int]) -> None:
    targets = targets_of(o, text)
    assert optimum(o, targets, **objective_of(*objective), cost=PRICES).method == "exact"
    check(o, targets, *objective, crossings(o))


@given(outcomes(max_n=6), st.sampled_from(ON_GRID), st.sampled_from([*OBJECTIVES, *SCORES]))
@settings(max_examples=45)
def test_no_policy_on_the_grid_beats_the_optimum_on_it(o: Outcomes, text: str, objective: tuple[str, int]) -> None:
    targets = targets_of(o, text)
    assume(targets)
    with mock.patch.object(search, "GRID", COARSE):
        assert optimum(o, targets, **objective_of(*objective), cost=PRICES).method == "grid"
        check(o, targets, *objective, COARSE)


@given(outcomes(latency=False), st.sampled_from(["p90<1.2s", "mean<=1s", "accuracy>=50%"]))
@settings(max_examples=40)
def test_an_unknown_latency_never_meets_a_limit(o: Outcomes, text: str) -> None:
    targets = targets_of(o, text)
    known = not o.can_think.any() or not np.isnan(o.t2[:, o.can_think]).all()
    if targets[0].is_latency and not known:
        with pytest.raises(CalibError, match="needs seconds"):
            optimum(o, targets)
    else:
        check(o, targets, "accuracy", 1, crossings(o))


@given(outcomes(max_n=12) | outcomes(max_n=12, latency=False), st.integers(0, 1))
@settings(max_examples=120)
def test_every_row_of_the_table(o: Outcomes, b: int) -> None:
    """The columns equal `evaluate` at every threshold, and no mix has one more right answer than the table says."""
    b = min(b, len(o.budgets) - 1)
    table = tabulate(o)
    failed = o.failed[:, b]
    mixes = crossings(o)[:, None, None]
    p = (1 - mixes) * o.p1 + mixes * np.where(failed[:, None], 0, o.p2[:, b])
    right2 = (p.argmax(2) == o.answer) & ~failed
    right1 = o.p1.argmax(1) == o.answer
    for k, threshold in enumerate(table.thresholds.tolist()):
        thinks = (confidence(o.p1) < threshold) & o.can_think
        accuracy = ((np.where(thinks, right2, right1) * o.weight).sum(1) / o.weight.sum()).max()
        found = table.accuracy[b, k]
        for mix in (float(table.mix[b, k]), table.whole.widest(b, k)[1]):
            e = evaluate(o, Policy(threshold, mix, int(o.budgets[b]), o.arms[-1]))
            assert e.accuracy == pytest.approx(found, abs=1e-12)
        assert found >= accuracy - 1e-12
        assert e.think_rate == pytest.approx(table.think_rate[k], abs=1e-12)
        assert e.tokens == pytest.approx(table.tokens[b, k], rel=1e-12)
        for metric in ("mean", "p50", "p90", "p95", "p99"):
            assert getattr(e, metric) == pytest.approx(table.latency(metric)[-1, b, k], rel=1e-12, nan_ok=True)
        if o.unweighted:
            assert (e.accuracy, e.think_rate, e.tokens) == (found, table.think_rate[k], table.tokens[b, k])
            assert math.isnan(e.p50) or [e.p50, e.p90] == [table.latency(m)[-1, b, k] for m in ("p50", "p90")]


def many(n: int, c: int, seed: int = 3) -> Outcomes:
    """Questions with probabilities of every size, in two budgets and one label set."""
    rng = np.random.default_rng(seed)
    p1 = rng.dirichlet(np.full(c, 0.4), n)
    return Outcomes(
        p1=p1,
        p2=rng.dirichlet(np.full(c, 0.3), (n, 2)),
        tokens=rng.integers(1, 500, (n, 2)),
        finished=np.ones((n, 2), bool),
        t1=rng.random((1, n)),
        t2=rng.random((1, n, 2)) * 10,
        answer=np.where(rng.random(n) < 0.5, p1.argmax(1), rng.integers(0, c, n)),
        budgets=np.array([100, 500]),
        can_think=rng.random(n) < 0.9,
        label_set=np.zeros(n),
    )


def test_every_row_of_many_questions() -> None:
    o = many(400, 6)
    table = tabulate(o)
    order = np.argsort(confidence(o.p1))
    order = order[o.can_think[order]]
    right1 = o.p1.argmax(1) == o.answer
    mixes = crossings(o)
    for b in range(2):
        right2 = np.array([((1 - mix) * o.p1 + mix * o.p2[:, b]).argmax(1) == o.answer for mix in mixes])
        gain = np.cumsum(right2[:, order].astype(int) - right1[order], axis=1).max(axis=0)
        best = right1.sum() + np.append(0, gain)
        assert (np.rint(table.accuracy[b] * o.n) == best).all()


def test_scores_on_the_grid_equal_evaluate() -> None:
    o = many(90, 5)
    part = tabulate(o).whole
    mixes = np.array([0.0, 0.35, 1.0])
    for mix, scores in zip(mixes.tolist(), part.scores(1, mixes, of_labels=True), strict=True):
        for k in range(0, len(part.thresholds), 4):
            e = evaluate(o, Policy(float(part.thresholds[k]), mix, 500, "base"))
            assert e.accuracy == scores.accuracy[k]
            for metric in ("ece", "brier", "nll", "macro_f1"):
                assert getattr(e, metric) == pytest.approx(getattr(scores, metric)[k], rel=1e-11)


@given(outcomes(max_n=6), st.sampled_from([("p90", "accuracy"), ("mean", "accuracy"), ("think_rate", "skill")]))
@settings(max_examples=60)
def test_the_front_holds_every_pair_that_nothing_beats(o: Outcomes, axes: tuple[str, str]) -> None:
    x, y = axes
    front = pareto(o, x, y)
    pairs = [(getattr(e, x), getattr(e, y)) for _, e in every_policy(o, crossings(o))]
    for px, py in pairs:  # whatever brute force finds is on the front or beaten by a point of it
        assert any(q.x <= px + 1e-12 and q.y >= py - 1e-12 for q in front)
    for i, point in enumerate(front):
        e = evaluate(o, point.policy)
        assert (getattr(e, x), getattr(e, y)) == pytest.approx((point.x, point.y), rel=1e-12)
        assert not any(px <= point.x + 1e-12 and py > point.y + 1e-12 for px, py in pairs)
        assert not any(px < point.x - 1e-12 and py >= point.y - 1e-12 for px, py in pairs)
        assert i == 0 or (point.x > front[i - 1].x and point.y > front[i - 1].y)
    assert [q.policy for q in front[:2]] == [front[i].policy for i in range(min(2, len(front)))]


@given(outcomes(max_n=6), st.sampled_from([("brier", "accuracy"), ("p90", "ece"), ("ece", "macro_f1")]))
@settings(max_examples=25)
def test_the_front_on_the_grid(o: Outcomes, axes: tuple[str, str]) -> None:
    x, y = axes
    sign = 1 if y == "macro_f1" or y == "accuracy" else -1
    with mock.patch.object(search, "GRID", COARSE):
        front = pareto(o, x, y)
    assert front.method == "grid"
    pairs = [(getattr(e, x), sign * getattr(e, y)) for _, e in every_policy(o, COARSE)]
    pairs = [p for p in pairs if not np.isnan(p).any()]
    assert len(front) > 0 or not pairs
    for point in front:
        e = evaluate(o, point.policy)
        assert (getattr(e, x), getattr(e, y)) == pytest.approx((point.x, point.y), abs=1e-9)
        assert not any(px <= point.x - 1e-9 and py >= sign * point.y - 1e-9 for px, py in pairs)
    for px, py in pairs:
        assert any(q.x <= px + 1e-9 and sign * q.y >= py - 1e-9 for q in front)


IMPOSSIBLE = [
    "accuracy>=99%, p90<=0.2s",
    "accuracy>90%, tokens<50, think_rate<40%",
    "p90<100ms, accuracy>=50%",
    "mean<=50ms, skill>0.9",
    "accuracy>=80%, p90<300ms, p90[x]<200ms",
]


@given(outcomes(max_n=6), st.sampled_from(IMPOSSIBLE))
@settings(max_examples=45)
def test_nearest(o: Outcomes, text: str) -> None:
    targets = targets_of(o, text)
    found = nearest(o, targets)
    entries = [e for _, e in every_policy(o, crossings(o))]
    assert [r.target for r in found.relaxations] == targets
    for relaxation in found.relaxations:
        target = relaxation.target
        rest = [t for t in targets if t != target]
        values = [target.value_of(e) for e in entries if all(t.met(e) for t in rest)]
        if not values:
            assert relaxation.needs is None
            assert relaxation.policy is None
            continue
        least = min(values) if target.upper else max(values)
        if target.slack(least) >= 0:
            assert relaxation.needs == target.value
        else:
            assert relaxation.needs == pytest.approx(least, rel=1e-12, abs=1e-300)
        loosened = replace(target, value=relaxation.needs)
        again = evaluate(o, relaxation.policy, by_dataset=True)
        assert all(t.met(again) for t in (*rest, loosened))
        assert optimum(o, [*rest, loosened]).feasible
    violation = min(sum(max(-t.slack(t.value_of(e)), 0) / abs(t.value) for t in targets) for e in entries)
    assert found.violation == pytest.approx(violation, rel=1e-9, abs=1e-12)
    reached = sum(max(-t.margin(found.evaluation), 0) / abs(t.value) for t in targets)
    assert reached == pytest.approx(violation, rel=1e-9, abs=1e-12)


@given(outcomes(max_n=6), st.sampled_from(["p90<1.2s, accuracy>=30%", "tokens<150, think_rate<80%"]))
@settings(max_examples=40)
def test_a_limit_costs_what_the_optimum_without_it_gains(o: Outcomes, text: str) -> None:
    targets = targets_of(o, text)
    found = optimum(o, targets)
    for price in prices(o, targets, found):
        free = optimum(o, [t for t in targets if t != price.target])
        assert same(price.objective, free.objective)
        if found.feasible:
            assert price.gain == pytest.approx(free.objective - found.objective)
            assert price.gain >= 0
        else:
            assert math.isnan(price.gain)


@given(outcomes(max_n=6), st.sampled_from(["", "p90<1.2s", "mean<=1s, accuracy>=30%", "accuracy[worst]>=40%"]))
@settings(max_examples=50)
def test_feasible_policies_in_order(o: Outcomes, text: str) -> None:
    targets = targets_of(o, text)
    scored = {
        order: [evaluate(o, p, by_dataset=True) for p in feasible(o, targets, order=order)]
        for order in ("best", "cheapest")
    }
    found = optimum(o, targets)
    for order, evaluations in scored.items():
        assert all(t.met(e) for e in evaluations for t in targets), order
        assert bool(evaluations) == found.feasible
        if evaluations:
            assert max(e.accuracy for e in evaluations) == pytest.approx(found.objective, abs=1e-12)
    accuracies = [e.accuracy for e in scored["best"]]
    assert all(a >= b - 1e-12 for a, b in pairwise(accuracies))
    assert all(a.accuracy < b.accuracy and a.mean <= b.mean + 1e-12 for a, b in pairwise(scored["cheapest"]))
    if scored["best"]:
        assert scored["cheapest"][0].mean == pytest.approx(min(e.mean for e in scored["best"]))


# ------------------------------------------------------------------------------------------------------ by hand
def two_options(
    p1: list[float], p2: list[float], answer: list[int], *, thoughts: np.ndarray | None = None, **other: object
) -> Outcomes:
    """Questions with the given probability of option 0."""
    n = len(p1)
    values: dict[str, object] = {
        "p1": np.array([[p, 1 - p] for p in p1]),
        "p2": np.array([[[p, 1 - p]] for p in p2]) if thoughts is None else thoughts,
        "tokens": np.full((n, 1), 100),
        "finished": np.ones((n, 1), bool),
        "t1": np.full((1, n), 0.5),
        "t2": np.full((1, n, 1), 4.0),
        "answer": np.array(answer),
        "budgets": np.array([100]),
    }
    return Outcomes(**{**values, **other})


def test_by_hand() -> None:
    # right at mix: q0 above 0.25 (0.75 -> 0 crosses 0.5 at 1/3, so above 1/3), q1 always alone but not with System 2
    o = two_options([0.75, 0.875, 0.625], [0.0, 0.0, 1.0], [1, 0, 0])
    found = optimum(o)
    # q0 needs thought: wins for mix > 1/3. q1 falls at 0.875 * (1 - w) = 0.5, w = 3/7, but needs no thought.
    # threshold between 0.75 and 0.875 keeps q1 out: 3 of 3, for every mix above 1/3
    assert found.objective == 1.0
    assert found.policy.threshold == (0.75 + 0.875) / 2
    assert found.mixes == pytest.approx((1 / 3, 1.0))
    assert found.policy.mix == pytest.approx(2 / 3)
    assert (found.method, found.candidates, found.metric, found.maximize) == ("exact", 4, "accuracy", True)
    assert found.evaluation.think_rate == pytest.approx(2 / 3)
    # two of three may think below p50 < 1 s? the median thinks then, so only one may: q2 gains nothing, nobody thinks
    limited = optimum(o, parse_targets("p50<1s"))
    assert limited.objective == pytest.approx(2 / 3)
    assert (limited.policy.threshold, limited.policy.mix) == (0.0, 0.5)
    assert nearest(o, parse_targets("p50<1s, accuracy>=90%")).relaxations[0].needs == math.nextafter(4.5, math.inf)
    assert nearest(o, parse_targets("p50<1s, accuracy>=90%")).relaxations[1].needs == pytest.approx(2 / 3)
    assert [(q.x, q.y) for q in pareto(o, "p50")] == [(0.5, pytest.approx(2 / 3)), (4.5, 1.0)]
    (price,) = prices(o, parse_targets("p50<1s"), limited)
    assert price.gain == pytest.approx(1 / 3)


def test_a_mix_that_only_a_tie_allows_is_found() -> None:
    # option 0 is right for both; the first wins up to 0.5, the second from 0.5 on, and a tie goes to the lowest index
    o = two_options([0.75, 0.25], [0.25, 0.75], [0, 0])
    always = Policy(1.1, 0.5, 100, "base")
    assert evaluate(o, always).accuracy == 1.0
    table = tabulate(o)
    assert table.accuracy[0].tolist() == [0.5, 1.0]  # both are equally confident
    assert table.mix[0, 1] == 0.5
    assert optimum(o).mixes == (0.5, 0.5)
    # option 1 is right for both: at the tie both are wrong, beside it one is right
    o = two_options([0.75, 0.25], [0.25, 0.75], [1, 1])
    assert tabulate(o).accuracy[0].tolist()[-1] == 0.5
    assert evaluate(o, always).accuracy == 0.0


def test_one_question_and_failures() -> None:
    right = two_options([0.75], [1.0], [0])
    assert optimum(right).policy == Policy(0.0, 0.5, 100, "base")  # no thought is needed, so none is paid for
    failed = two_options([0.75], [math.nan], [1])
    assert optimum(failed).objective == 0.0
    assert not optimum(failed, parse_targets("accuracy>=1%")).feasible
    assert nearest(failed, parse_targets("accuracy>=1%")).relaxations[0].needs == 0.0
    mute = two_options([0.75], [0.0], [1], can_think=np.array([False]))
    assert optimum(mute).objective == 0.0
    assert tabulate(mute).shape == (1, 1, 1)


def test_an_infinite_latency_stays_one() -> None:
    o = two_options([0.75, 0.875], [0.0, 0.0], [1, 1], t2=np.array([[[math.inf], [1.0]]]))
    assert tabulate(o).latency("mean")[0, 0].tolist() == [0.5, math.inf, math.inf]
    assert tabulate(o).latency("p50")[0, 0].tolist() == [0.5, 0.5, 1.5]
    assert optimum(o, parse_targets("p50<1s")).objective == 0.5


def test_margins_shift_each_limit() -> None:
    targets = parse_targets("p90<10s, accuracy>=80%, tokens<5")
    margins = {targets[0]: 1.5, targets[1]: 0.05}
    assert [t.value for t in tightened(targets, margins)] == [8.5, pytest.approx(0.85), 5]
    o = two_options([0.75, 0.875, 0.625], [0.0, 0.0, 1.0], [1, 0, 0])
    slow = parse_targets("p50<=5s")
    assert optimum(o, slow, margins={slow[0]: 0.5}).objective == 1.0
    assert optimum(o, slow, margins={slow[0]: 0.6}).objective == pytest.approx(2 / 3)
    strict = parse_targets("p50<=3s, accuracy>=90%")
    needs = nearest(o, strict, margins={strict[0]: 1.0}).relaxations[0].needs
    assert needs == 5.5
    loosened = replace(strict[0], value=needs)
    assert optimum(o, [loosened, strict[1]], margins={loosened: 1.0}).feasible


REQUIRED = [
    ("p90<1.2s", 0.05),
    ("p50<=0.3s", 0.4),
    ("accuracy>=30%", 0.5),
    ("skill>=0.1", 0.4),
    ("think_rate<90%", 0.5),
    ("think_rate>10%", 0.7),
    ("p90[x]<2s", 0.1),
    ("p99[worst]<2.5s", 0.0),
    ("accuracy[worst]>=10%", 0.6),
]


@given(outcomes(max_n=6), st.sampled_from(REQUIRED))
@settings(max_examples=50)
def test_a_share_that_may_break_a_target(o: Outcomes, required: tuple[str, float]) -> None:
    text, most = required
    targets = targets_of(o, text)
    assume(targets)
    (target,) = targets
    on_grid = target.metric == "accuracy" and target.worst
    with mock.patch.object(search, "GRID", COARSE):
        found = optimum(o, requirements={target: most})
        allowed = list(feasible(o, requirements={target: most}))
    assert found.method == ("grid" if on_grid else "exact")

    def keeps(policy: Policy) -> bool:
        parts = [part for part, _ in split_selector(target, o)]
        decisions = decide(o, policy)
        return all(violation_share(part, o, decisions) <= most + 1e-12 for part in parts)

    entries = every_policy(o, COARSE if on_grid else crossings(o))
    assert same(found.objective, best([(p, e) for p, e in entries if keeps(p)], [], "accuracy", 1))
    assert all(keeps(policy) for policy in allowed)
    assert bool(allowed) == found.feasible


def test_only_shares_can_be_required() -> None:
    o = two_options([0.75], [0.0], [1])
    with pytest.raises(CalibError, match="mean is no share"):
        optimum(o, requirements={parse_targets("mean<1s")[0]: 0.1})


def test_arms_and_budgets_can_be_chosen() -> None:
    o = two_options(
        [0.75, 0.875],
        [0.0, 0.0],
        [1, 1],
        thoughts=np.array([[[0.75, 0.25], [0.0, 1.0]]] * 2),
        tokens=np.array([[10, 20]] * 2),
        finished=np.ones((2, 2), bool),
        budgets=np.array([10, 20]),
        arms=("base", "mtp"),
        t1=np.array([[0.5] * 2, [0.6] * 2]),
        t2=np.array([[[1.0, 2.0]] * 2, [[0.5, 1.0]] * 2]),
    )
    table = tabulate(o)
    assert table.shape == (2, 2, 3)
    assert (optimum(table).policy.arm, optimum(table).policy.think_budget) == ("mtp", 20)
    assert optimum(table, arms=["base"]).policy.arm == "base"
    assert optimum(table, budgets=[10]).objective == 0.0
    assert optimum(o, budgets=[10]).policy == Policy(0.0, 0.5, 10, "base")
    assert {p.arm for p in feasible(table, arms=["base"])} == {"base"}
    for wrong in ({"arms": ["fast"]}, {"budgets": [15]}, {"arms": []}, {"budgets": []}):
        with pytest.raises(CalibError):
            optimum(table, **wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: optimum(o, maximize="p90"), "--maximize takes one of accuracy"),
        (lambda o: optimum(o, minimize="accuracy"), "--minimize takes one of mean"),
        (lambda o: optimum(o, maximize="accuracy", minimize="p90"), "one objective"),
        (lambda o: optimum(o, minimize="cost"), "needs prices"),
        (lambda o: optimum(o, parse_targets("cost<1")), "needs prices"),
        (lambda o: optimum(o, parse_targets("accuracy[al]>=50%")), r"no dataset 'al'.*Did you mean \[all\]"),
        (lambda o: pareto(o, "speed"), "unknown metric 'speed'"),
        (lambda o: list(feasible(o, order="random")), "best or cheapest"),
        (lambda o: optimum(replace(o, t1=np.full((1, 2), np.nan)), parse_targets("p90<1s")), "needs seconds"),
        (lambda o: pareto(replace(o, t2=np.full((1, 2, 1), np.nan))), "needs seconds"),
    ],
)
def test_mistakes_say_what_to_do(call: Callable[[Outcomes], object], message: str) -> None:
    with pytest.raises(CalibError, match=message):
        call(two_options([0.75, 0.25], [0.25, 0.75], [0, 0]))


def test_without_a_thought_the_error_says_so() -> None:
    o = two_options([0.75], [0.0], [1])
    none = replace(
        o,
        budgets=np.array([], int),
        p2=np.empty((1, 0, 2)),
        tokens=np.empty((1, 0)),
        finished=np.empty((1, 0), bool),
        t2=np.empty((1, 1, 0)),
        label_mass=None,
        estimated=None,
    )
    with pytest.raises(CalibError, match="no thought was collected"):
        optimum(none)


def test_latency_is_not_needed_for_accuracy() -> None:
    o = two_options([0.75], [0.0], [1], t1=np.full((1, 1), np.nan))
    assert optimum(o).objective == 1.0
    assert math.isnan(optimum(o).evaluation.p90)


def test_the_import_is_light() -> None:
    heavy = ["vllm", "optuna", "streamlit", "sqlalchemy", "aiohttp"]
    code = f"import sys, calib.optimise; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_folder_for_machine_code_it_is_not_kept() -> None:
    compile_it = numba.njit

    def refuse(*args: object, **options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_it(*args, **options)

    with mock.patch.object(sweep.numba, "njit", refuse):
        double = sweep.compiled(lambda x: 2 * x)
    assert double(21) == 42


# ------------------------------------------------------------------------------------------------ recorded data
def read(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def recorded(rows: list[dict], seconds: Callable[[dict, int], float] | None) -> Outcomes:
    """Outcomes of a file of records; seconds of a thought from its tokens, or else unknown."""
    budgets = sorted(int(b) for b in rows[0]["p2_by_budget"])
    k = np.array([len(r["p1"]) for r in rows])

    def vectors(values: list[list[float]]) -> np.ndarray:
        padded = np.zeros((len(values), k.max()))
        for i, v in enumerate(values):
            padded[i, : len(v)] = v
        return padded / padded.sum(1, keepdims=True)

    tokens = np.array([[min(r["think_tokens"], b) for b in budgets] for r in rows], float)
    return Outcomes(
        p1=vectors([r["p1"] for r in rows]),
        p2=np.stack([vectors([r["p2_by_budget"][str(b)] for r in rows]) for b in budgets], axis=1),
        tokens=tokens,
        finished=tokens < budgets,
        t1=np.full((1, len(rows)), 0.045),
        t2=tokens[None] / 250,
        answer=np.array([r["answer"] for r in rows]),
        n_options=k,
        budgets=np.array(budgets),
    )


def test_recorded_gpqa(shared: Path) -> None:
    o = recorded(read(shared / "realdata/unlicensed/gemma4_gpqa_trajectory.jsonl.gz"), None)
    table = tabulate(o)

    def right(*texts: str, **where: list[int]) -> tuple[int, int]:
        found = optimum(table, parse_targets(texts) if texts else (), **where)
        return round(found.objective * o.n), found.policy.think_budget

    assert o.n == 198
    assert right() == (111, 32768)
    assert right(budgets=[512]) == (80, 512)
    assert right("p90<20s") == (108, 2048)
    assert right("p90<2s") == (68, 256)


def test_recorded_h200(shared: Path) -> None:
    o = recorded(read(shared / "reference/h200_base_c128.jsonl.gz"), None)
    found = optimum(o)
    assert (round(found.objective * o.n), o.n) == (1451, 1500)
    assert found.policy.think_budget == 600
    assert found.policy.threshold == pytest.approx(0.845, abs=0.003)
    assert found.policy.mix == pytest.approx(0.41, abs=0.01)

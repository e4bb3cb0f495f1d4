"""Targets as shares of questions, and the margin that makes a certificate likely."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from calib import exact
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, NEVER, Cost, Policy, decide, evaluate
from calib.risk import (
    Risk,
    Untestable,
    auto_margin,
    capacities,
    independent,
    restate,
    share_limit,
    violation_share,
    violations,
)
from calib.target import parse_target


def store(seconds, right=None, **more):
    """Two options, System 1 right where said, always thinking takes these seconds."""
    t2 = np.asarray(seconds, dtype=float)
    n = len(t2)
    right = np.ones(n, dtype=bool) if right is None else np.asarray(right)
    p = np.where(right[:, None], [0.8, 0.2], [0.2, 0.8])
    more = {"tokens": np.full((n, 1), 100.0)} | more
    return Outcomes(
        p1=p, p2=p[:, None], finished=np.ones((n, 1), bool), t1=np.zeros((1, n)), t2=t2[None, :, None],
        answer=np.zeros(n, int), budgets=np.array([1000]), **more,
    )  # fmt: skip


POLICY = Policy(ALWAYS, 0.5, 1000)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("p90<10s", 0.1),
        ("p50<=10s", 0.5),
        ("p99<10s", 0.01),
        ("p90>10s", 0.9),
        ("accuracy>=83%", 0.17),
        ("accuracy<90%", 0.9),
        ("think_rate<40%", 0.4),
        ("think_rate>=40%", 0.6),
        ("skill>=60%", 0.2),  # two options: chance 1/2, so an accuracy of 80 %
        ("skill<60%", 0.8),
    ],
)
def test_share_limit_by_hand(text, share):
    assert share_limit(parse_target(text), store([1.0])) == share


@pytest.mark.parametrize(
    ("op", "expected"),
    [("<", [0, 1, 1]), ("<=", [0, 0, 1]), (">", [1, 1, 0]), (">=", [1, 0, 0])],
)
def test_equality_breaks_strict_limits_only(op, expected):
    o = store([9.0, 10.0, 11.0])
    assert violations(parse_target(f"p90{op}10s"), o, decide(o, POLICY)).tolist() == [bool(x) for x in expected]


@pytest.mark.parametrize("op", ["<", ">"])
def test_an_unknown_latency_breaks_every_limit(op):
    o = store([np.nan, 10.0])
    assert violations(parse_target(f"p90{op}10s"), o, decide(o, POLICY))[0]


@given(
    st.lists(st.integers(1, 12).map(float), min_size=1, max_size=40),
    st.sampled_from(["p50", "p90", "p95", "p99"]),
    st.sampled_from(["<", "<=", ">", ">="]),
    st.data(),
)
@settings(max_examples=80)
def test_the_share_agrees_with_the_percentile(seconds, metric, op, data):
    weight = data.draw(st.none() | st.lists(st.integers(1, 4), min_size=len(seconds), max_size=len(seconds)))
    o = store(seconds, weight=None if weight is None else np.array(weight, float))
    target = parse_target(f"{metric}{op}6s")
    d = decide(o, POLICY)
    share, limit = violation_share(target, o, d), share_limit(target, o)
    risk = restate(target, o, POLICY, d)
    assert isinstance(risk, Risk)
    kept = share < limit - 1e-9 if risk.strict else share <= limit + 1e-9
    assert kept == target.met(evaluate(o, POLICY))


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 99), st.sampled_from(["<", "<=", ">", ">="]))
@settings(max_examples=60)
def test_the_share_agrees_with_accuracy_and_skill(right, percent, op):
    o = store(np.ones(len(right)), right)
    for metric in ("accuracy", "skill"):
        target = parse_target(f"{metric}{op}{percent}%")
        risk = restate(target, o, POLICY, decide(o, POLICY))
        assert isinstance(risk, Risk)
        kept = risk.loss.mean() < risk.limit - 1e-9 if risk.strict else risk.loss.mean() <= risk.limit + 1e-9
        margin = target.margin(evaluate(o, POLICY))
        assert kept == (margin >= 0) or abs(margin) < 1e-9


def test_tokens_are_a_share_of_the_budget():
    o = store(np.ones(4), tokens=np.array([[0.0], [500], [1000], [500]]))
    risk = restate(parse_target("tokens<700"), o, POLICY, decide(o, POLICY))
    assert isinstance(risk, Risk)
    assert risk.loss.tolist() == [0, 0.5, 1, 0.5]
    assert risk.limit == 0.7
    over = store(np.ones(1), tokens=np.array([[1001.0]]))
    refused = restate(parse_target("tokens<700"), over, POLICY, decide(over, POLICY))
    assert isinstance(refused, Untestable)
    assert "exceed the bound 1000" in refused.reason


def test_a_mean_latency_needs_a_deadline():
    o = store([1.0, 4.0])
    d = decide(o, POLICY)
    target = parse_target("mean<3s")
    assert isinstance(restate(target, o, POLICY, d), Untestable)
    risk = restate(target, o, POLICY, d, deadline=5)
    assert isinstance(risk, Risk)
    assert risk.loss.tolist() == [0.2, 0.8]
    assert isinstance(restate(target, o, POLICY, d, deadline=3), Untestable)  # 4 s exceed it


def test_cost_is_bounded_by_its_dearest_question():
    o = store([1.0, 4.0], [True, False])
    d = decide(o, POLICY)
    target = parse_target("cost<2")
    assert isinstance(restate(target, o, POLICY, d), Untestable)
    assert isinstance(restate(target, o, POLICY, d, cost=Cost(wrong=3, second=1)), Untestable)
    risk = restate(target, o, POLICY, d, cost=Cost(wrong=3, second=1, token=0.001), deadline=6)
    assert isinstance(risk, Risk)
    # dearest 3 + 6 + 1 = 10; the questions cost 1.1 and 7.1
    assert risk.loss == pytest.approx([0.11, 0.71])
    assert risk.limit == pytest.approx(0.2)


@pytest.mark.parametrize("metric", ["ece", "brier", "nll", "macro_f1"])
def test_scores_say_why_they_are_never_certified(metric):
    o = store([1.0])
    refused = restate(parse_target(f"{metric}<0.5"), o, POLICY, decide(o, POLICY))
    assert isinstance(refused, Untestable)
    assert metric in refused.reason


def test_groups_are_blocks():
    o = store(np.ones(4), group=np.array(["a", "b", "a", "c"]), weight=np.array([1.0, 2, 3, 4]))
    assert not independent(o)
    assert capacities(o).tolist() == [4, 2, 4]
    assert independent(store(np.ones(3)))


def test_the_margin_by_hand():
    # 29 test questions certify p90 only without one violation; with none seen among n_tune the true share is
    # Beta(1/2, n + 1/2), and that none of 29 breaks it has the chance E (1 - p)^29, here for 1000 tune questions
    tune, test = store(np.ones(1000)), store(np.ones(29))
    (margin,) = auto_margin(parse_targets("p90<10s"), tune, test, power=0.5)
    k = round(margin.max_share * 1000)
    chance = stats.betabinom(29, k + 0.5, 1000 - k + 0.5).pmf(0)
    assert margin.power == pytest.approx(chance)
    assert chance >= 0.5 > stats.betabinom(29, k + 1.5, 1000 - k - 0.5).pmf(0)
    assert margin.limit == 0.1
    assert margin.target == parse_target("p90<10s")


def parse_targets(text):
    return [parse_target(item) for item in text.split(",")]


def test_702_test_questions_leave_seven_percent():
    (margin,) = auto_margin(parse_targets("p90<10s"), store(np.ones(1638)), store(np.ones(702)))
    assert 0.065 < margin.max_share < 0.075
    assert margin.power >= 0.85
    assert bool(margin.holds(margin.max_share))
    assert margin.holds(np.array([0.0, 0.09])).tolist() == [True, False]


def test_more_tune_questions_and_more_test_questions_need_less_margin():
    def share(tune, test, text="p90<10s"):
        return auto_margin(parse_targets(text), store(np.ones(tune)), store(np.ones(test)))[0].max_share

    assert share(300, 300) < share(3000, 300) < share(3000, 3000) < 0.1
    assert share(300, 300, "p90<10s,accuracy>=50%") < share(300, 300)  # two targets share the chance of failing


def test_too_few_test_questions_get_no_margin_and_a_reason():
    (margin,) = auto_margin(parse_targets("p90<10s"), store(np.ones(100)), store(np.ones(28)))
    assert (margin.max_share, margin.power) == (0.1, 0.0)
    assert "28 test questions are too few" in margin.reason
    assert margin.stricter is None
    assert auto_margin(parse_targets("think_rate<50%"), store(np.ones(9)), store(np.ones(4)))[
        0
    ].stricter == parse_target("think_rate<50%")


def test_margins_by_dataset():
    tune = store(np.ones(200), dataset=np.repeat(["a", "b", "c"], [100, 60, 40]))
    test = store(np.ones(160), dataset=np.repeat(["a", "b"], [100, 60]))
    worst = auto_margin(parse_targets("accuracy[worst]>=50%"), tune, test)
    assert [m.target.dataset for m in worst] == ["a", "b", "c"]
    assert worst[0].max_share > worst[1].max_share  # fewer questions, more margin
    assert "no question of 'c' is on the test side" in worst[2].reason
    assert worst[2].max_share == worst[2].limit == 0.5
    d = decide(tune, POLICY)
    assert worst[0].share(tune, d) == 0


def test_stricter_targets_that_a_search_can_use():
    o = store(np.ones(500))
    accuracy, thinks, p90, skill = auto_margin(parse_targets("accuracy>=80%,think_rate<50%,p90<10s,skill>=50%"), o, o)
    assert accuracy.stricter is not None
    assert accuracy.stricter.value == pytest.approx(1 - accuracy.max_share)
    assert accuracy.stricter.value > 0.8
    assert thinks.stricter is not None
    assert thinks.stricter.value == thinks.max_share < 0.5
    assert p90.stricter is None
    assert skill.stricter is None
    assert auto_margin(parse_targets("tokens<500"), o, o) == ()


def test_weighted_questions_get_a_wider_margin_whose_share_passes():
    plain = store(np.ones(800))
    weighted = replace(plain, weight=np.tile([1.0, 3.0], 400))
    (wide,) = auto_margin(parse_targets("p90<10s"), weighted, weighted)
    (narrow,) = auto_margin(parse_targets("p90<10s"), plain, plain)
    assert 0 < wide.max_share < narrow.max_share
    c = capacities(weighted)
    assert exact.bounded_test_at_most(wide.max_share * c.sum(), c, 0.1) <= 0.05
    few = weighted.take(np.arange(20))
    assert auto_margin(parse_targets("p90<10s"), weighted, few)[0].power == 0


def test_system1_alone_uses_no_tokens():
    o = store(np.ones(2))
    policy = Policy(NEVER, 0.5, 1000)
    risk = restate(parse_target("tokens>10"), o, policy, decide(o, policy))
    assert isinstance(risk, Risk)
    assert risk.loss.tolist() == [1, 1]
    assert risk.limit == pytest.approx(0.99)

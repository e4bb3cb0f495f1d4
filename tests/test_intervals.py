"""Intervals: exact where they can be, a bootstrap of groups elsewhere, checked against the metrics themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from calib import exact
from calib.intervals import Comparison, Interval, _counts, _Recipe, bootstrap_interval, compare, intervals
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, NEVER, Cost, Policy, decide, evaluate
from calib.target import METRICS

COST = Cost(wrong=1, second=0.1)


def random_outcomes(n=60, seed=0, **more):
    rng = np.random.default_rng(seed)
    p1, p2 = rng.dirichlet(np.ones(4), n), rng.dirichlet(np.full(4, 0.3), (n, 1))
    p2[rng.random((n, 1)) < 0.1] = np.nan
    return Outcomes(
        p1=p1, p2=p2, tokens=rng.integers(1, 900, (n, 1)), finished=np.ones((n, 1), bool),
        t1=rng.uniform(0, 0.1, (1, n)), t2=rng.lognormal(size=(1, n, 1)), answer=rng.integers(0, 4, n),
        budgets=np.array([1000]), **({"label_set": rng.integers(0, 2, n)} | more),
    )  # fmt: skip


POLICY = Policy(0.6, 0.5, 1000)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_resample_is_scored_like_the_questions_repeated(weighted):
    rng = np.random.default_rng(3)
    group = np.array([f"g{i}" for i in rng.integers(0, 20, 60)], dtype=object)
    o = random_outcomes(group=group, weight=rng.uniform(0.5, 2, 60) if weighted else None)
    d = decide(o, POLICY)
    recipe = _Recipe(o, d, COST, set(METRICS) - {"skill"})
    groups = int(o.group_codes.max()) + 1
    counts = np.concatenate([np.ones((1, groups)), next(_counts(groups, 5, rng))])
    replicates = recipe.metrics(counts, o.group_codes)
    for i, times in enumerate(counts.astype(int)):
        repeated = o.take(np.repeat(np.arange(o.n), times[o.group_codes]))
        score = evaluate(repeated, POLICY, cost=COST)
        for name, values in replicates.items():
            assert values[i] == pytest.approx(getattr(score, name)), name


def test_shares_and_percentiles_are_exact_for_independent_questions():
    o = random_outcomes(200)
    d, score = decide(o, POLICY), evaluate(o, POLICY)
    found = intervals(o, d, rng=np.random.default_rng(0), cost=COST, resamples=200)
    k = round(score.accuracy * 200)
    assert found["accuracy"] == (score.accuracy, *exact.clopper_pearson(k, 200))
    assert found["p90"] == (score.p90, *exact.percentile_interval(d.latency, 90))
    # chance is 1/4 on every question
    assert found["skill"].low == pytest.approx((found["accuracy"].low - 0.25) / 0.75)
    for name in METRICS:
        low, high = found[name][1:]
        assert low < found[name].value < high, name


def test_groups_widen_an_interval():
    once = random_outcomes(100)
    four = once.take(np.tile(np.arange(100), 4))  # the same questions four times, known as such by their group
    d = decide(four, POLICY)
    grouped = intervals(four, d, rng=np.random.default_rng(0), names=["accuracy", "p50"])
    pretended = replace(four, group=np.arange(400).astype(str))
    naive = intervals(pretended, d, rng=np.random.default_rng(0), names=["accuracy", "p50"])
    honest = intervals(once, decide(once, POLICY), rng=np.random.default_rng(0), names=["accuracy", "p50"])
    width = {k: x["accuracy"].high - x["accuracy"].low for k, x in [("g", grouped), ("n", naive), ("h", honest)]}
    assert width["n"] < 0.6 * width["h"]
    assert width["g"] == pytest.approx(width["h"], rel=0.1)


def test_all_right_is_not_certain_even_with_weights():
    o = random_outcomes(40, weight=np.tile([1.0, 2.0], 20))
    right = replace(o, answer=o.p1.argmax(1))
    found = intervals(right, decide(right, Policy(NEVER, 0.5, 1000)), rng=np.random.default_rng(0))
    assert found["accuracy"].value == found["accuracy"].high == 1
    assert 0.8 < found["accuracy"].low < 0.95
    assert found["tokens"].value == found["tokens"].low == 0
    assert 0 < found["tokens"].high < 200


def test_one_group_says_nothing_about_others():
    o = random_outcomes(30, group=np.array(["same"] * 30, dtype=object))
    found = intervals(o, decide(o, POLICY), rng=np.random.default_rng(0))
    assert math.isnan(found["mean"].low)
    assert found["mean"].to_dict()["interval"] == [None, None]
    low, high = bootstrap_interval(np.ones(3), np.ones(3), np.zeros(3, int), rng=np.random.default_rng(0))
    assert math.isnan(low)
    assert math.isnan(high)


def test_unknown_and_censored_latencies_have_no_interval_of_the_mean():
    o = random_outcomes(50)
    for bad in (np.nan, np.inf):
        t2 = o.t2.copy()
        t2[0, 0] = bad
        spoilt = replace(o, t2=t2)
        found = intervals(spoilt, decide(spoilt, Policy(ALWAYS, 0.5, 1000)), rng=np.random.default_rng(0))
        assert not math.isfinite(found["mean"].value)
        assert found["mean"].to_dict()["interval"] != [0, 0]
        assert math.isfinite(found["p50"].high) == (bad == np.inf)


def test_the_same_seed_gives_the_same_interval():
    o = random_outcomes(50)
    a, b = (intervals(o, decide(o, POLICY), rng=np.random.default_rng(5), names=["ece"]) for _ in range(2))
    assert a == b


def test_bootstrap_interval_covers_a_mean():
    rng = np.random.default_rng(6)
    covered = 0
    for _ in range(300):
        x = rng.exponential(size=80)
        low, high = bootstrap_interval(x, np.ones(80), np.arange(80), rng=rng, resamples=300)
        covered += low <= 1 <= high
    assert exact.clopper_pearson(covered, 300)[1] >= 0.93  # the skew of 80 values costs the bootstrap a little


def test_macro_f1_needs_a_label_set_on_every_question():
    o = random_outcomes(50, label_set=np.r_[-1, np.zeros(49)])
    found = intervals(o, decide(o, POLICY), rng=np.random.default_rng(0), names=["macro_f1"])
    assert found["macro_f1"].to_dict() == {"value": None, "interval": [None, None]}


def test_several_comparisons_use_the_same_resamples():
    o, ours, others = two_policies(30, 5, 65)
    found = compare(
        o, ours, {"a": others["system1"], "b": others["system1"], "same": ours}, rng=np.random.default_rng(0)
    )
    assert (found["a"].low, found["a"].high) == (found["b"].low, found["b"].high)
    assert "the same right answers" in found["same"].sentence
    assert compare(o, ours, {}, rng=np.random.default_rng(0)) == {}


def test_interval_dict():
    assert Interval(0.5, 0.4, math.inf).to_dict() == {"value": 0.5, "interval": [0.4, None]}


def two_policies(gained, lost, same, **more):
    """System 1 against always thinking, which changes as many answers as said."""
    n = gained + lost + same
    first = np.repeat([[0.3, 0.7], [0.7, 0.3], [0.7, 0.3]], [gained, lost, same], axis=0)
    second = np.repeat([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [gained, lost, same], axis=0)[:, None]
    o = Outcomes(
        p1=first, p2=second, tokens=np.ones((n, 1)), finished=np.ones((n, 1), bool), t1=np.zeros((1, n)),
        t2=np.zeros((1, n, 1)), answer=np.zeros(n, int), budgets=np.array([1000]), **more,
    )  # fmt: skip
    return o, decide(o, Policy(ALWAYS, 1, 1000)), {"system1": decide(o, Policy(NEVER, 1, 1000))}


def test_paired_difference_by_hand():
    o, ours, others = two_policies(30, 5, 65)
    found = compare(o, ours, others, rng=np.random.default_rng(0))["system1"]
    assert (found.gained, found.lost, found.n) == (30, 5, 100)
    assert found.difference == pytest.approx(0.25)
    # paired standard error sqrt((35 / 100 - 0.25^2) / 100) = 0.0536
    assert found.low == pytest.approx(0.25 - 1.96 * 0.0536, abs=0.015)
    assert found.high == pytest.approx(0.25 + 1.96 * 0.0536, abs=0.015)
    assert found.p_value == pytest.approx(exact.mcnemar(30, 5))
    assert found.sentence.startswith("+25.0 points [")
    assert found.sentence.endswith("against system1: better at 95%")
    assert found.to_dict()["distinguishable"] is True


@pytest.mark.parametrize(("gained", "lost"), [(6, 5), (5, 0), (0, 0)])
def test_policies_that_cannot_be_told_apart(gained, lost):
    # five against none: the bootstrap alone would tell them apart, the exact test (p = 1/16) does not
    o, ours, others = two_policies(gained, lost, 100)
    found = compare(o, ours, others, rng=np.random.default_rng(0))["system1"]
    assert not found.distinguishable
    assert "cannot be told apart" in found.sentence


def test_a_worse_policy_is_called_worse():
    o, ours, others = two_policies(2, 30, 60)
    assert "worse" in compare(o, ours, others, rng=np.random.default_rng(0))["system1"].sentence


def test_groups_make_a_difference_less_sure():
    group = np.array(["a"] * 9 + [f"g{i}" for i in range(91)], dtype=object)
    o, ours, others = two_policies(9, 0, 91, group=group)
    found = compare(o, ours, others, rng=np.random.default_rng(0))["system1"]
    assert found.p_value is None  # McNemar needs independent questions
    assert found.low == 0  # a resample without that group shows no difference
    assert not found.distinguishable
    assert isinstance(found, Comparison)

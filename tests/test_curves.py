"""Curves equal `evaluate` wherever one looks; bands equal the exact intervals; thinning loses no extreme."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib import exact, metrics
from calib.curves import METRICS, Curves, flips
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Policy, Route, confidence, decide, evaluate
from calib.slices import share_band, thin
from calib.temperature import Temperatures
from tests import strategies
from tests.worlds import ladder

RULES = st.sampled_from(
    [
        Policy(),
        Policy(confidence="margin"),
        Policy(confidence="entropy", pool="log_odds"),
        Policy(temperatures=Temperatures(p1={"*": 2.0}, p2={"*": 0.7}, cut={"*": 1.5}, final={"*": 1.2})),
    ]
)


def of(outcomes: Outcomes, dataset: str | None) -> Outcomes:
    return outcomes if dataset is None else outcomes.select([dataset])


def same(ours: float, theirs: float) -> bool:
    return (math.isnan(ours) and math.isnan(theirs)) or ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@settings(max_examples=40)
@given(strategies.outcomes(), RULES, st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.data())
def test_every_threshold_is_what_evaluate_gives(o, like, mix, data):
    budget, arm = data.draw(st.sampled_from(o.budgets.tolist())), data.draw(st.sampled_from(o.arms))
    curves = Curves(o, like=like)
    for metric in METRICS:
        for curve in curves.against_threshold(metric, mix=mix, think_budget=budget, arm=arm, points=None):
            here = of(o, curve.dataset)
            assert curve.n == here.n
            assert curve.x[0] == 0
            for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True):
                policy = replace(like, threshold=x, mix=mix, think_budget=budget, arm=arm)
                assert same(y, getattr(evaluate(here, policy), metric)), (metric, curve.dataset, x)


@settings(max_examples=30)
@given(strategies.outcomes(), RULES, st.floats(0, 1.1), st.floats(0, 1))
def test_budgets_mixes_and_marks_are_what_evaluate_gives(o, like, threshold, mix):
    curves = Curves(o, like=like)
    for metric in ("accuracy", "tokens", "p90", "mean"):
        for curve in curves.against_budget(metric, threshold=threshold, mix=mix, arm=o.arms[0]):
            for budget, y in zip(o.budgets.tolist(), curve.y.tolist(), strict=True):
                policy = replace(like, threshold=threshold, mix=mix, think_budget=budget, arm=o.arms[0])
                assert same(y, getattr(evaluate(of(o, curve.dataset), policy), metric))
    budget = int(o.budgets[-1])
    for curve in curves.against_mix(threshold=threshold, think_budget=budget, points=9):
        for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True):
            policy = replace(like, threshold=threshold, mix=x, think_budget=budget, arm=o.arms[0])
            assert same(y, evaluate(of(o, curve.dataset), policy).accuracy)
    routed = replace(
        like,
        threshold=threshold,
        mix=mix,
        think_budget=budget,
        arm=o.arms[-1],
        routes={"dataset=a": Route(threshold=1.1), "n_options=3": Route(threshold=0.0, think_budget=int(o.budgets[0]))},
    )
    for policy in (routed, Policy(threshold, mix, budget, o.arms[0])):  # the second one has another rule at times
        for dataset, values in curves.marked("one", policy).values.items():
            expected = evaluate(of(o, dataset), policy)
            assert all(same(values[metric], getattr(expected, metric)) for metric in METRICS)


def test_an_unknown_latency_spoils_only_the_rows_it_enters():
    o = ladder(5).draw(np.random.default_rng(0), 60)
    t2 = o.t2.copy()
    t2[0, np.argsort(o.p1.max(1), kind="stable")[-1]] = np.nan  # the surest level thinks last
    holed = replace(o, t2=t2)
    (curve,) = Curves(holed).against_threshold("p90", mix=0.5, think_budget=100, arm="arm0", points=None)
    assert np.isnan(curve.y).tolist() == [False] * (len(curve.y) - 1) + [True]
    assert Curves(holed).latency(Policy(1.1, 0.5, 100, "arm0"))[0].seconds.size == 0


@given(st.integers(1, 60), st.data(), st.sampled_from([0.8, 0.95]))
def test_the_band_of_a_share_is_clopper_pearsons(n, data, level):
    k = data.draw(st.integers(0, n))
    low, high = share_band(np.array([k / n]), float(n), level)
    assert (low[0], high[0]) == pytest.approx(exact.clopper_pearson(k, n, level), abs=1e-9)


@pytest.mark.parametrize("n", [4, 60, 400])
def test_bands_of_independent_questions_are_exact(n):
    rng = np.random.default_rng(n)
    o = ladder(6, rng=rng, late2=0.3).draw(rng, n)
    o = replace(o, t2=o.t2 + rng.random(o.t2.shape))
    knobs = {"mix": 0.5, "think_budget": 100, "arm": "arm0"}
    curves = Curves(o)
    for metric, q in (("p50", 50), ("p90", 90), ("p99", 99)):
        (curve,) = curves.against_threshold(metric, **knobs)
        for at in (0, len(curve.x) // 2, -1):
            seconds = decide(o, Policy(float(curve.x[at]), 0.5, 100, "arm0")).latency
            low, high = exact.percentile_interval(seconds, q)
            assert (curve.low[at], curve.high[at]) == (max(low, 0.0), high)
            (one,) = curves.against_budget(metric, threshold=float(curve.x[at]), mix=0.5, arm="arm0")
            assert (one.low[0], one.high[0]) == (max(low, 0.0), high)
    (curve,) = curves.against_threshold("accuracy", **knobs)
    right = round(curve.y[-1] * n)
    assert (curve.low[-1], curve.high[-1]) == pytest.approx(exact.clopper_pearson(right, n))


def test_groups_and_weights_widen_the_band():
    o = ladder(6).draw(np.random.default_rng(1), 200)
    knobs = {"mix": 0.5, "think_budget": 100, "arm": "arm0"}

    def width(outcomes: Outcomes) -> float:
        (curve,) = Curves(outcomes).against_threshold("accuracy", **knobs)
        return float(curve.high[-1] - curve.low[-1])

    in_fours = replace(o, group=[str(i // 4) for i in range(200)])
    half = ladder(6).draw(np.random.default_rng(1), 50)
    assert width(in_fours) > 1.5 * width(o)
    assert width(in_fours) == pytest.approx(width(half), rel=0.2)  # as 50 questions
    assert width(replace(o, weight=np.where(np.arange(200) % 2, 1.0, 9.0))) > width(o)


@given(st.integers(1, 3000), st.integers(20, 400), st.integers(0, 2**32 - 1))
def test_thinning_keeps_ends_and_extremes(n, points, seed):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.beta(8, 0.5, n))
    y = rng.normal(size=n)
    y[rng.integers(0, n)] = 100.0
    kept = thin(x, y, points=points)
    assert (np.diff(kept) > 0).all()
    assert {0, n - 1} <= set(kept.tolist())
    assert y[kept].max() == y.max()
    assert y[kept].min() == y.min()
    assert len(kept) <= max(points, 8) + 2


def test_a_figure_gets_a_few_thousand_points_whatever_the_questions():
    rng = np.random.default_rng(0)
    p1 = rng.dirichlet(np.ones(3), 6000)
    o = Outcomes(
        p1=p1,
        p2=p1[:, None],
        tokens=np.ones((6000, 1)),
        finished=np.ones((6000, 1), bool),
        t1=rng.random((1, 6000)),
        t2=rng.random((1, 6000, 1)),
        answer=np.zeros(6000),
        budgets=[8],
        dataset=[f"d{i % 5}" for i in range(6000)],
    )
    curves = Curves(o)
    drawn = curves.against_threshold("p90", mix=0.5, think_budget=8, arm="base")
    assert [c.dataset for c in drawn] == [None, "d0", "d1", "d2", "d3", "d4"]
    assert sum(len(c.x) for c in drawn) <= 2500
    (whole,) = curves.against_threshold("p90", mix=0.5, think_budget=8, arm="base", datasets=[None], points=None)
    assert set(drawn[0].x.tolist()) <= set(whole.x.tolist())
    assert whole.y.max() == drawn[0].y.max()


@settings(max_examples=25)
@given(strategies.outcomes(), st.floats(0, 1.1))
def test_risk_latency_reliability_and_front(o, threshold):
    curves, budget = Curves(o), int(o.budgets[0])
    policy = Policy(threshold, 0.5, budget, o.arms[0])
    made = decide(o, policy)
    for curve in curves.risk_coverage(policy):
        where = slice(None) if curve.dataset is None else np.flatnonzero(o.dataset == curve.dataset)
        sure = np.nan_to_num(made.p.max(1))[where]
        assert curve.summary == pytest.approx(metrics.aurc(sure, (made.choice == o.answer)[where], o.weight[where]))
        assert curve.x[-1] == pytest.approx(1)
    for one in curves.latency(policy):
        seconds = decide(o, replace(policy, arm=one.arm)).latency
        assert one.percentiles["p90"] == metrics.percentile(seconds, 90, o.weight)
        at_p90 = one.share[np.searchsorted(one.seconds, one.percentiles["p90"])]
        assert at_p90 >= 0.9 - 1e-9
    stages = curves.reliability(policy)
    assert stages["p1"].ece == pytest.approx(metrics.ece(o.p1, o.answer, o.weight))
    assert stages["final"].ece == pytest.approx(metrics.ece(made.p, o.answer, o.weight), nan_ok=True)
    able = o.can_think & ~np.isnan(o.p2[:, 0]).any(1)
    assert stages["p2"].count.sum() == able.sum()
    for name, curve in curves.confidences().items():
        sure = confidence(o.p1, name, o.n_options)
        assert curve.summary == pytest.approx(metrics.aurc(sure, metrics.chosen(o.p1) == o.answer, o.weight))
    found = curves.frontier()
    for i, point in enumerate(found.policies()):
        e = evaluate(o, point)
        assert (found.front.x[i], found.p90[i], found.p99[i]) == pytest.approx((e.p90, e.p90, e.p99))
        assert found.front.y[i] == pytest.approx(e.accuracy)


def test_policies_of_a_calibrated_front_carry_the_temperatures():
    o = ladder(6, 2).draw(np.random.default_rng(3), 120)
    like = Policy(temperatures=Temperatures(p1={"*": 1.5}), confidence="margin")
    found = Curves(o, like=like).frontier("tokens")
    assert len(found.front) > 2
    for i, policy in enumerate(found.policies()):
        assert (policy.temperatures, policy.confidence) == (like.temperatures, "margin")
        assert evaluate(o, policy).accuracy == found.front.y[i]


@pytest.mark.parametrize("grouped", [False, True])
def test_alike_is_a_paired_test(grouped):
    # 20 questions that only thinking answers and 20 that nothing changes: never thinking loses 20 to 0
    n = 40
    p1 = np.array([[0.6, 0.4]] * n)
    answer = np.repeat([1, 0], 20)
    p2 = np.where(answer[:, None, None] == np.arange(2), 0.9, 0.1)
    o = Outcomes(
        p1=p1,
        p2=p2,
        tokens=np.ones((n, 1)),
        finished=np.ones((n, 1), bool),
        t1=np.ones((1, n)),
        t2=np.ones((1, n, 1)),
        answer=answer,
        budgets=[8],
        group=[str(i // 2) for i in range(n)] if grouped else None,
    )
    never, always = Policy(0.0, 1.0, 8), Policy(1.1, 1.0, 8)
    found = Curves(o).alike([never, always, Policy(0.61, 1.0, 8)], always)
    assert found.tolist() == [False, True, True]


def test_flips_by_hand():
    # confidences .9 .6 .7 .55; System 2 says option 1 for sure, and fails on the last question
    p1 = np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.55, 0.45]])
    p2 = np.array([[[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 1.0]], [[np.nan, np.nan]]])
    o = Outcomes(
        p1=p1,
        p2=p2,
        tokens=[[5], [6], [7], [8]],
        finished=[[True], [False], [True], [False]],
        t1=np.full((1, 4), 0.1),
        t2=np.full((1, 4, 1), 2.0),
        answer=[0, 0, 1, 1],
        budgets=[8],
    )
    found = flips(o, Policy(0.8, 1.0, 8), Policy(0.0, 1.0, 8))
    # 2 is won, 1 is lost, 3 had the wrong answer and has none now; 0 is as before
    assert found.index.tolist() == [2, 1, 3]
    assert found.ours.tolist() == [1, 1, -1]
    assert found.other.tolist() == [0, 0, 0]
    assert found.right_ours.tolist() == [True, False, False]
    assert found.right_other.tolist() == [False, True, False]
    assert found.thinks_ours.all()
    assert not found.thinks_other.any()
    assert found.tokens_ours.tolist() == [7, 6, 8]
    assert found.seconds_other.tolist() == pytest.approx([0.1] * 3)
    assert found.seconds_ours.tolist() == pytest.approx([2.1] * 3)
    assert found.finished_ours.tolist() == [True, False, False]
    assert found.finished_other.all()
    assert len(flips(o, Policy(0.8, 1.0, 8), Policy(0.8, 1.0, 8))) == 0


def test_marks_follow_what_they_touch():
    o = ladder(4, 2).draw(np.random.default_rng(0), 30)
    estimated = np.zeros((1, 3), bool)
    estimated[0, 2] = True  # the seconds of the larger budget
    o = replace(o, estimated=estimated, simulated=True)
    curves = Curves(o)

    def marks(metric: str, budget: int) -> tuple[str, ...]:
        (curve,) = curves.against_threshold(metric, mix=0.5, think_budget=budget, arm="arm0")
        return curve.marks

    assert marks("accuracy", 200) == marks("p90", 100) == ("simulated",)
    assert marks("p90", 200) == ("estimated", "simulated")
    assert curves.against_budget("p50", threshold=0.8, mix=0.5, arm="arm0")[0].marks == ("estimated", "simulated")
    assert curves.marked("x", Policy(0.8, 0.5, 200, "arm0")).marks == ("estimated", "simulated")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.against_threshold("f1", mix=0.5, think_budget=100, arm="arm0"), "no curve of 'f1'"),
        (lambda c: c.against_threshold("p90", mix=0.5, think_budget=7, arm="arm0"), "think_budget 7 was not collected"),
        (lambda c: c.against_threshold("p90", mix=0.5, think_budget=100, arm="gpu"), "arm 'gpu' was not collected"),
        (lambda c: c.against_threshold("p90", mix=1.5, think_budget=100, arm="arm0"), "mix must be from 0"),
        (lambda c: c.against_mix(threshold=2.0, think_budget=100), "threshold"),
        (lambda c: c.risk_coverage(datasets=["nope"]), "unknown dataset 'nope'"),
    ],
)
def test_what_was_not_collected_is_an_error(ask, said):
    with pytest.raises(CalibError, match=said):
        ask(Curves(ladder(3).draw(np.random.default_rng(0), 20)))


@settings(max_examples=25)
@given(strategies.outcomes())
def test_each_value_holds_above_its_start_and_up_to_the_next(o):
    (budget, arm), curves = (int(o.budgets[0]), o.arms[0]), Curves(o)
    for curve in curves.against_threshold("think_rate", mix=0.5, think_budget=budget, arm=arm, points=None):
        ends = curve.ends
        assert ends[-1] == 1.1 or not of(o, curve.dataset).can_think.any()
        assert ((curve.starts < curve.x) | (curve.x == 0)).all()
        assert (curve.x <= ends).all()
        for start, end, y in zip(curve.starts.tolist(), ends.tolist(), curve.y.tolist(), strict=True):
            for threshold in (np.nextafter(start, 2), end):  # a confidence at the threshold stays
                made = evaluate(of(o, curve.dataset), Policy(min(threshold, 1.1), 0.5, budget, arm))
                assert made.think_rate == pytest.approx(y)

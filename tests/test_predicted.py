"""Predicted beside measured, by hand and against brute force; every reason for a difference gets its words."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib import exact, metrics
from calib.outcomes import Outcomes
from calib.policy import Policy, Route, decide
from calib.predicted import (
    Measured,
    budgets_kept,
    counted,
    deadline_kept,
    differences,
    lines,
    paired_percentile,
    shift_of_p1,
)


def world(n: int = 200, **changes) -> Outcomes:
    """Two options; confidence from 0.5 to 1; System 2 is sure and right; a second per 100 tokens."""
    rng = np.random.default_rng(0)
    sure = np.linspace(0.501, 0.999, n)
    tokens = rng.integers(100, 1000, n).astype(float)
    answer = (rng.random(n) > sure).astype(int)
    p2 = np.where(answer[:, None] == [0, 1], 0.9, 0.1)
    o = Outcomes(
        p1=np.stack([sure, 1 - sure], 1),
        p2=p2[:, None],
        tokens=tokens[:, None],
        finished=np.ones((n, 1), bool),
        t1=np.full((1, n), 0.05) + rng.random(n) * 0.01,
        t2=tokens[None, :, None] / 100,
        answer=answer,
        budgets=np.array([1000]),
        concurrency=np.array([8]),
    )
    return replace(o, **changes)


POLICY = Policy(threshold=0.8, mix=0.8, think_budget=1000)


def obeyed(o: Outcomes, policy: Policy = POLICY, **changes) -> Measured:
    """What a server that does exactly the predicted would give."""
    d = decide(o, policy)
    told = Measured(
        p=d.p.copy(),
        thinks=d.thinks.copy(),
        closed=d.closed.copy(),
        degraded=d.degraded.copy(),
        tokens=d.tokens.copy(),
        latency=d.latency.copy(),
        spent=d.latency.copy(),
        threshold=np.full(o.n, policy.threshold),
        budget=np.full(o.n, float(policy.think_budget)),
        version=np.full(o.n, "v1", dtype=object),
        failure=np.full(o.n, None, dtype=object),
    )
    return replace(told, **changes)


def by_metric(o: Outcomes, measured: Measured, policy: Policy = POLICY):
    d = decide(o, policy)
    found = lines(o, d, measured.decisions(d), rng=np.random.default_rng(0), resamples=400)
    return {line.metric: line for line in found}


# --- percentiles ------------------------------------------------------------------------------------------------------


def test_a_percentile_by_hand():
    before = np.arange(1.0, 101)
    # five on one side only are no surprise (2 / 2^5 = 0.0625), six are (0.03125): m may move by five order statistics
    assert paired_percentile(before, before, 90) == (90, 85, 96)
    value, low, high = paired_percentile(before, 1.3 * before, 90)
    assert (value, low, high) == pytest.approx((117, 1.3 * 85, 1.3 * 96))


def test_a_request_that_never_ends_lies_beyond_every_percentile():
    before = np.arange(1.0, 101)
    after = np.where(before % 5 == 0, np.inf, before)  # a fifth fails
    value, low, high = paired_percentile(before, after, 90)
    assert value == high == math.inf
    assert low > 90


@given(st.integers(0, 10_000), st.integers(5, 60), st.sampled_from([50.0, 90.0, 99.0]))
@settings(max_examples=60)
def test_percentiles_equal_brute_force(seed, n, q):
    rng = np.random.default_rng(seed)
    before = rng.integers(1, 30, n).astype(float)
    after = rng.integers(1, 30, n).astype(float)
    above = before > metrics.percentile(before, q)

    def p(m: float) -> float:
        late = after > m
        return exact.mcnemar(int((late & ~above).sum()), int((above & ~late).sum()))

    steps = np.unique(after)  # p is constant from one value of after up to the next
    stands = [m for m in (0.0, *steps) if p(m) > 0.05]
    found = paired_percentile(before, after, q)
    if not stands:
        assert found.low == found.high == found.value
        return
    assert found.low == stands[0]
    assert found.high == min((m for m in steps if m > stands[-1]), default=math.inf)


def test_noise_alone_is_rarely_called_slower():
    rng = np.random.default_rng(5)
    outside = 0
    for _ in range(400):
        base = rng.lognormal(size=120)
        before, after = (base * rng.lognormal(sigma=0.2, size=120) for _ in range(2))
        _, low, high = paired_percentile(before, after, 90)
        outside += not low <= metrics.percentile(before, 90) <= high
    assert outside <= 0.05 * 400 + 3 * math.sqrt(0.05 * 0.95 * 400)


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_server_that_does_what_is_predicted_is_said_to():
    o = world()
    found = by_metric(o, obeyed(o))
    assert list(found) == ["accuracy", "think_rate", "tokens", "p50", "p90", "p99"]
    for line in found.values():
        assert (line.same, line.verdict) == (True, "as predicted, on every question")
        assert line.difference.value == 0
        assert line.predicted.value == line.measured.value
    d = decide(o, POLICY)
    assert found["accuracy"].measured[1:] == exact.clopper_pearson(int((d.choice == o.answer).sum()), o.n)
    assert found["tokens"].measured.value == pytest.approx(d.tokens.mean())


def test_slower_by_a_third():
    o = world()
    found = by_metric(o, obeyed(o, latency=1.3 * decide(o, POLICY).latency))
    assert found["accuracy"].verdict == "as predicted, on every question"
    line = found["p90"]
    assert line.same is False
    assert line.verdict.startswith("slower than predicted by 30 % (interval +")
    assert 0 < line.difference.low < 0.3 < line.difference.high
    assert line.relative
    assert found["p50"].same  # half of the questions think: few of them lie near the middle
    assert found["p50"].difference.value == pytest.approx(0.3)
    faster = by_metric(o, obeyed(o, latency=0.7 * decide(o, POLICY).latency))["p90"]
    assert faster.verdict.startswith("faster than predicted by 30 % (interval -")


def test_failures_are_wrong_and_slow_and_think_as_predicted():
    o = world()
    failure = np.where(np.arange(o.n) % 10 < 2, "timeout", None)
    lost = failure == "timeout"
    m = obeyed(o)
    p = np.where(lost[:, None], np.nan, m.p)
    m = replace(
        m,
        p=p,
        failure=failure,
        latency=np.where(lost, np.inf, m.latency),
        thinks=m.thinks & ~lost,
        tokens=m.tokens * ~lost,
    )
    found = by_metric(o, m)
    d = decide(o, POLICY)
    right = d.choice == o.answer
    assert found["accuracy"].measured.value == pytest.approx((right & ~lost).mean())
    assert found["accuracy"].verdict.startswith("lower than predicted by ")
    assert found["think_rate"].verdict == found["tokens"].verdict == "as predicted, on every question"
    assert found["p90"].verdict == "slower than predicted without end: more than 10 % got no answer"
    assert found["p90"].to_dict()["measured"]["value"] is None


def test_words_for_each_share():
    o = world()
    m = obeyed(o)
    every = np.ones(o.n, bool)
    assert by_metric(o, replace(m, thinks=every))["think_rate"].verdict.startswith(
        "thinks more often than predicted by "
    )
    assert by_metric(o, replace(m, thinks=~every))["think_rate"].verdict.startswith("thinks less often than predicted")
    assert by_metric(o, replace(m, tokens=1.5 * m.tokens))["tokens"].verdict.startswith(
        "more tokens than predicted by 50 %"
    )
    whole = by_metric(o, replace(m, tokens=np.floor(m.tokens * 1.0001)))["tokens"]  # a server counts whole tokens
    assert (whole.verdict, whole.same) == ("as predicted, on every question", True)
    assert not by_metric(o, replace(m, tokens=np.where(m.thinks, m.tokens - 1, 0)))["tokens"].same
    assert by_metric(o, replace(m, degraded=every))["degraded"].verdict.startswith("degrades more answers")
    assert by_metric(o, replace(m, closed=m.thinks))["closed"].verdict.startswith("closes more thoughts")
    one = np.arange(o.n) == 3
    assert by_metric(o, replace(m, degraded=one))["degraded"].verdict == "as predicted"  # one of 200 proves nothing


def test_where_no_second_is_known_nothing_is_predicted():
    o = world(t1=np.full((1, 200), np.nan))
    m = replace(obeyed(world()), latency=np.ones(200), spent=np.ones(200))
    line = by_metric(o, m)["p90"]
    assert (line.same, line.measured.value) == (None, 1.0)
    assert line.verdict.startswith("not predicted")


def test_grouped_and_weighted_questions_use_the_bootstrap():
    o = world(group=np.repeat([f"g{i}" for i in range(100)], 2).astype(object), weight=np.linspace(1, 2, 200))
    found = by_metric(o, obeyed(o, latency=2 * decide(o, POLICY).latency))
    assert found["p90"].verdict.startswith("slower than predicted by 100 %")
    assert found["accuracy"].same
    assert found["accuracy"].measured.value == pytest.approx(
        metrics.mean(decide(o, POLICY).choice == o.answer, o.weight)
    )


# --- obedience --------------------------------------------------------------------------------------------------------


def test_budgets_and_deadlines_that_are_broken_are_counted():
    o = world(10)
    policy = Policy(threshold=1.1, mix=0.8, think_budget=1000, routes={"dataset=all": Route(think_budget=1000)})
    m = obeyed(o, policy)
    assert budgets_kept(o, policy, m).broken == 0
    long = replace(m, tokens=np.where(np.arange(10) < 2, [1200.0, 1100] + [0.0] * 8, m.tokens))
    found = budgets_kept(o, policy, long)
    assert (found.n, found.broken, found.worst, found.examples) == (10, 2, 200, ("all/0", "all/1"))

    spent = np.array([0.1, 2.0, 2.19, 2.21, 3.2, 9.0, 1, 1, 1, 1])
    failure = np.where(np.arange(10) == 5, "timeout", None)  # no answer at all is no late answer
    found = deadline_kept(o, 2.0, replace(m, spent=spent, failure=failure))
    assert (found.n, found.broken, found.examples) == (9, 2, ("all/4", "all/3"))
    assert found.worst == pytest.approx(1.0)


# --- why decisions differ ---------------------------------------------------------------------------------------------


def at(n: int, i: int, value, rest):
    """An array that differs in one place."""
    found = np.array(rest, copy=True)
    found[i] = value
    return found


def only(o: Outcomes, measured: Measured, **more):
    (found,) = differences(o, POLICY, decide(o, POLICY), measured, version="v1", **more)
    return found


def test_every_reason_by_hand():
    o = world()
    d, m = decide(o, POLICY), obeyed(o)
    assert differences(o, POLICY, d, m, version="v1") == ()
    sure = o.p1.max(axis=1)
    thought, alone = int(np.flatnonzero(d.thinks)[-1]), int(np.flatnonzero(~d.thinks)[0])
    n = o.n

    def other(i: int, **told) -> Measured:
        """The other answer, with what the server told of it."""
        changed = {name: at(n, i, value, getattr(m, name)) for name, value in told.items()}
        return replace(m, p=at(n, i, m.p[i][::-1], m.p), **changed)

    assert only(o, other(thought, failure="http_500")).reason == "failed"
    assert only(o, other(thought, degraded=True)).reason == "degraded"
    found = only(o, other(alone, version="v2"))
    assert (found.reason, found.detail) == ("other_version", "version v2 instead of v1")
    found = only(o, other(alone, threshold=0.6))
    assert (found.reason, found.detail) == ("other_threshold", "0.6 instead of 0.8")
    found = only(o, other(thought, budget=500, tokens=500))
    assert (found.reason, found.detail) == ("other_budget", "500 tokens instead of 1,000")
    found = only(o, other(thought, closed=True, tokens=50))
    assert found.reason == "closed"
    found = only(o, other(thought, tokens=77))
    assert found.reason == "other_thought"
    assert found.detail.startswith("77 tokens instead of ")
    assert only(o, other(thought)).reason == "other_p2"
    found = only(o, other(alone))
    assert (found.reason, found.answers) == ("other_p1", (0, 1))
    assert found.name == f"all/{alone}"

    # the confidence crossed the threshold: upwards it is told, downwards only the stored one is known
    moved = replace(m, thinks=at(n, thought, False, m.thinks), p=at(n, thought, (0.81, 0.19), m.p))
    found = only(o, moved)
    assert found.reason == "p1_crossed"
    assert found.detail.startswith(f"from {sure[thought]:.6f} to 0.810000 (+")
    found = only(o, replace(m, thinks=at(n, alone, True, m.thinks)))
    assert found.reason == "p1_crossed"
    assert f"{sure[alone] - 0.8:.2g} above the threshold 0.8" in found.detail
    assert counted([found, found]) == {"p1_crossed": 2}


def test_a_version_that_nobody_tells_is_no_reason():
    o = world()
    m = obeyed(o, version=np.full(200, None, dtype=object), threshold=np.full(200, np.nan))
    d = decide(o, POLICY)
    i = int(np.flatnonzero(~d.thinks)[0])
    assert only(o, replace(m, p=at(200, i, m.p[i][::-1], m.p))).reason == "other_p1"


def test_the_shift_of_system1_leaves_thoughts_out():
    o = world()
    d, m = decide(o, POLICY), obeyed(o)
    assert shift_of_p1(d, m) == {"n": int((~d.thinks).sum()), "median": 0.0, "most": 0.0}
    off = np.where(d.thinks[:, None], 0.0, [0.03, -0.03])
    found = shift_of_p1(d, replace(m, p=m.p - off))
    assert found["median"] == pytest.approx(0.03)
    everything = Policy(threshold=1.1, mix=0.8, think_budget=1000)
    assert shift_of_p1(decide(o, everything), obeyed(o, everything)) == {"n": 0, "median": None, "most": None}

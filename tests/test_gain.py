"""Gains beyond noise: by hand, against a bootstrap that scores every resample from its questions, and by objective."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.gain import Gain, gain_over
from calib.intervals import difference
from calib.outcomes import Outcomes
from calib.policy import Cost, Decisions, Policy, decide, evaluate_decisions
from calib.target import METRICS
from tests.strategies import outcomes as any_outcomes

PRICES = Cost(wrong=1.0, second=0.1, token=0.01)


def asked(n: int, **changes: object) -> Outcomes:
    """Questions of which the first option is right."""
    given_ = {
        "p1": np.tile([0.6, 0.4], (n, 1)),
        "p2": np.tile([0.9, 0.1], (n, 1, 1)),
        "tokens": np.ones((n, 1)),
        "finished": np.ones((n, 1), bool),
        "t1": np.ones((1, n)),
        "t2": np.ones((1, n, 1)),
        "answer": np.zeros(n, int),
        "budgets": [1],
    }
    return Outcomes(**{**given_, **changes})


def did(right: list[int] | np.ndarray, seconds: list[float] | np.ndarray | None = None) -> Decisions:
    """Right where it says 1, after these seconds."""
    right = np.asarray(right, dtype=bool)
    latency = np.ones(len(right)) if seconds is None else np.asarray(seconds, dtype=np.float64)
    p = np.where(right[:, None], [0.8, 0.2], [0.2, 0.8])
    return Decisions(p, np.zeros(len(right), dtype=bool), latency, np.zeros(len(right)))


def gain(o: Outcomes, ours: Decisions, other: Decisions, metric: str, **options: object) -> Gain:
    terms = {"maximize": metric in ("accuracy", "skill"), "rng": np.random.default_rng(0), "resamples": 500}
    return gain_over(o, ours, other, metric, **{**terms, **options})


def test_accuracy_by_hand():
    five, six = (
        gain(asked(20), did([1] * (10 + k) + [0] * (10 - k)), did([1] * 10 + [0] * 10), "accuracy") for k in (5, 6)
    )
    # five questions won and none lost: 2 * 0.5 ** 5; six: 2 * 0.5 ** 6
    assert (five.value, five.p_value) == (pytest.approx(0.25), 0.0625)
    assert (six.value, six.p_value) == (pytest.approx(0.3), 0.03125)
    assert five.low > 0
    assert not five.beyond_noise
    assert six.beyond_noise
    skill = gain(asked(20), did([1] * 16 + [0] * 4), did([1] * 10 + [0] * 10), "skill")
    assert (skill.value, skill.low) == (pytest.approx(2 * six.value), pytest.approx(2 * six.low))  # chance is one half
    same = gain(asked(20), did([1] * 10 + [0] * 10), did([1] * 10 + [0] * 10), "accuracy")
    assert (same.value, same.low, same.high, same.beyond_noise) == (0, 0, 0, False)


def test_a_percentile_far_out_needs_more_than_a_few_late_questions():
    o = asked(400)

    def late(k: int) -> Decisions:
        return did([1] * 400, np.where(np.arange(400) < k, 9.0, 2.0))

    # p99 of ours is 2 s, of the other 9 s as soon as five of 400 are late. A resample draws four or fewer of the late
    # ones, and has a p99 of 2 s, with probability 0.44 when there are five and 0.0076 when there are twelve
    few, many = (gain(o, late(0), late(k), "p99") for k in (5, 12))
    assert (few.value, few.low, few.high, few.beyond_noise) == (7, 0, 7, False)
    assert (many.value, many.low, many.high, many.beyond_noise) == (7, 7, 7, True)
    other_way = gain(o, late(12), late(0), "p99")
    assert (other_way.value, other_way.low, other_way.high, other_way.beyond_noise) == (-7, -7, -7, False)


def test_means_go_by_the_pairs():
    rng = np.random.default_rng(1)
    seconds = rng.lognormal(1, 1, 300)
    faster = gain(asked(300), did([1] * 300, seconds - 0.05), did([1] * 300, seconds), "mean")
    # each question 50 ms faster, though the seconds themselves vary by more than that
    assert (faster.value, faster.low, faster.high) == (pytest.approx(0.05),) * 3
    assert faster.beyond_noise
    assert faster.p_value is None
    noise = gain(asked(300), did([1] * 300, rng.permutation(seconds) - 0.05), did([1] * 300, seconds), "mean")
    assert not noise.beyond_noise


def test_groups_and_weights_have_no_exact_test():
    ours, other = did([1] * 16 + [0] * 4), did([1] * 10 + [0] * 10)
    grouped = gain(asked(20, group=np.repeat(np.arange(10), 2).astype(str)), ours, other, "accuracy")
    weighted = gain(asked(20, weight=np.linspace(1, 2, 20)), ours, other, "accuracy")
    assert grouped.p_value is weighted.p_value is None
    alone = gain(asked(20, group=np.zeros(20).astype(str)), ours, other, "accuracy")
    assert not alone.beyond_noise  # one group says nothing about others
    assert json.loads(json.dumps(alone.to_dict(), allow_nan=False))["interval"] == [None, None]


def test_in_words():
    assert str(Gain("accuracy", 0.004, -0.002, 0.01, 0.375, 0.95)) == "0.4 points [-0.2, 1.0] of accuracy, p = 0.38"
    assert str(Gain("p90", 0.2106, 0.08, 0.35, None, 0.95)) == "0.211 s [0.08, 0.35] of p90"
    assert str(Gain("tokens", 12.34, -0.0, 20.0, None, 0.95)) == "12.34 [0, 20] of tokens"


@given(any_outcomes(max_n=12), st.floats(0, 1), st.floats(0, 1), st.sampled_from(METRICS))
@settings(max_examples=60)
def test_the_difference_is_that_of_a_bootstrap_that_scores_every_resample(o, one, two, metric):
    o = replace(o, group=np.array([f"g{i // 2}" for i in range(o.n)]))
    ours, other = (decide(o, Policy(t, t, int(o.budgets[-1]), o.arms[0])) for t in (one, two))
    found = difference(o, ours, other, metric, rng=np.random.default_rng(3), resamples=20, cost=PRICES)
    value = [getattr(evaluate_decisions(o, d, cost=PRICES), metric) for d in (ours, other)]
    assert found.value == pytest.approx(value[0] - value[1], nan_ok=True)
    groups = int(o.group_codes.max()) + 1
    if groups < 2 or np.isnan(found.value):
        assert np.isnan([found.low, found.high]).all()
        return
    rng = np.random.default_rng(int(np.random.default_rng(3).integers(2**63)))
    seen = []
    for draw in rng.integers(groups, size=(20, groups)):
        rows = np.concatenate([np.flatnonzero(o.group_codes == g) for g in draw])
        again = replace(o.take(rows), ids=np.arange(len(rows)).astype(str))
        scores = [getattr(evaluate_decisions(again, d.take(rows), cost=PRICES), metric) for d in (ours, other)]
        if metric == "skill":  # chance as it is on all questions
            chance = np.average(1 / o.n_options, weights=o.weight)
            scores = [(evaluate_decisions(again, d.take(rows)).accuracy) / (1 - chance) for d in (ours, other)]
        seen.append(scores[0] - scores[1])
    known = np.array(seen)[~np.isnan(seen)]
    if not known.size:
        assert np.isnan([found.low, found.high]).all()
        return
    ends = np.quantile(known, [0.025, 0.975], method="inverted_cdf")
    assert [found.low, found.high] == pytest.approx(ends.tolist(), abs=1e-9)

"""Bins, splits and intervals: by hand, as identities, and against data of known truth."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib import metrics
from calib.errors import CalibError
from calib.exact import clopper_pearson
from calib.policy import ALWAYS, Policy, decide
from calib.stages import binned, brier_split, stages

from .strategies import outcomes
from .test_outcomes import small


def tops(*values: float) -> np.ndarray:
    return np.array([[v, 1 - v] for v in values])


def test_bins_of_equal_width_by_hand():
    # 0.6 and 0.8 are upper ends and belong below; in (0.8, 1] lie 0.9, right, and 1.0, wrong
    bins = binned(tops(0.6, 0.8, 0.9, 1.0), [0, 1, 0, 1], bins=5)
    assert bins.edges.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert bins.count.tolist() == [0, 0, 1, 1, 2]
    assert bins.confidence[2:].tolist() == pytest.approx([0.6, 0.8, 0.95])
    assert bins.accuracy[2:].tolist() == [1.0, 0.0, 0.5]
    # (0.4 + 0.8 + 2 * 0.45) / 4
    assert bins.ece == pytest.approx(0.525)
    assert (bins.low[4], bins.high[4]) == clopper_pearson(1, 2)
    assert np.isnan(bins.low[:2]).all()


def test_bins_of_equal_mass_by_hand():
    # halves: (0.55, 0.6) with one of two right, (0.9, 0.95) with both
    bins = binned(tops(0.9, 0.55, 0.95, 0.6), [0, 1, 0, 0], bins=2, by="mass")
    assert bins.edges.tolist() == [0.0, 0.6, 1.0]
    assert bins.count.tolist() == [2, 2]
    assert bins.ece == pytest.approx((abs(0.575 - 0.5) * 2 + abs(0.925 - 1) * 2) / 4)
    # equal values stay together, and there are fewer bins than asked for
    alike = binned(tops(0.7, 0.7, 0.7, 0.9), [0, 0, 1, 0], bins=4, by="mass")
    assert alike.count.tolist() == [3, 1]
    weighted = binned(tops(0.9, 0.55, 0.95, 0.6), [0, 1, 0, 0], [1, 3, 1, 1], bins=2, by="mass")
    assert weighted.count.tolist() == [1, 3]  # half of the weight lies on the least confident one
    assert np.isnan(weighted.low).all()


@given(outcomes(failures=False), st.integers(1, 20))
def test_ece_of_equal_width_is_the_metric(o, bins):
    found = binned(o.p1, o.answer, o.weight, bins=bins)
    assert found.ece == pytest.approx(metrics.ece(o.p1, o.answer, o.weight, bins=bins), abs=1e-12)
    assert found.count.sum() == binned(o.p1, o.answer, bins=bins, by="mass").count.sum() == o.n


def test_no_questions_give_nan_and_an_unknown_binning_is_refused():
    nothing = binned(np.full((2, 2), np.nan), [0, 1])
    assert math.isnan(nothing.ece)
    assert nothing.count.sum() == 0
    assert math.isnan(brier_split(np.full((2, 2), np.nan), [0, 1]).brier)
    with pytest.raises(CalibError, match="width or mass"):
        binned(tops(0.6), [0], by="depth")


def test_the_brier_split_by_hand():
    # forecasts 0.8 and 0.2 of four questions, three of which are right: pairs (0.8; 3 of 4 come), (0.2; 1 of 4)
    split = brier_split(tops(0.8, 0.8, 0.8, 0.8), [0, 0, 0, 1], bins=2)
    assert split.reliability == pytest.approx(2 * 0.05**2)
    assert split.resolution == pytest.approx(2 * 0.25**2)
    assert split.uncertainty == pytest.approx(2 * 0.25)
    assert split.within == pytest.approx(0, abs=1e-12)
    assert split.brier == pytest.approx((3 * 0.08 + 1.28) / 4)


@given(outcomes(), st.integers(1, 20))
def test_the_brier_split_adds_up_to_the_metric(o, bins):
    p = o.p2[:, 0]
    split = brier_split(p, o.answer, o.weight, o.n_options, bins=bins)
    expected = metrics.brier(p, o.answer, o.weight)
    assert split.brier == pytest.approx(expected, abs=1e-12, nan_ok=True)
    total = split.reliability - split.resolution + split.uncertainty + split.within
    assert total == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert not split.reliability < 0
    assert not split.resolution < 0


def test_each_stage_looks_at_its_own_questions():
    o = small(can_think=[False, True])
    policy = Policy(ALWAYS, 0.5, 16, temperatures={"p1": {"*": 2.0}})
    found = stages(o, policy, rng=np.random.default_rng(0), resamples=20)
    assert {name: stage.n for name, stage in found.items()} == {"p1": 2, "p2": 1, "final": 2}
    assert found["p1"].nll == pytest.approx(metrics.nll(policy.alone(o.p1), o.answer))
    assert found["p2"].nll == pytest.approx(metrics.nll(o.p2[1:, 0], o.answer[1:]))
    assert found["final"].nll == pytest.approx(metrics.nll(decide(o, policy).p, o.answer))
    assert json.loads(json.dumps(found["final"].to_dict(), allow_nan=False))["ece"]["value"] == found["final"].ece.value


def test_a_failed_thought_is_counted_and_left_out():
    o = small(p2=[[[np.nan] * 3], [[0.0, 0.0, 1.0]]])
    found = stages(o, Policy(ALWAYS, 1.0, 16), rng=np.random.default_rng(0), resamples=20)
    assert (found["final"].n, found["final"].unanswered, found["final"].accuracy) == (1, 1, 1.0)
    assert math.isnan(found["final"].ece.low)  # one group says nothing about others


def test_the_interval_of_ece_draws_whole_groups():
    rng = np.random.default_rng(0)
    n = 400
    p = tops(*rng.uniform(0.5, 1, n))
    answer = (rng.random(n) > 0.5).astype(int)  # always a coin: confidence means nothing
    o = small_like(p, answer)
    alone = stages(o, Policy(0.0, 0.5, 8), rng=np.random.default_rng(1))["p1"].ece
    assert alone.low < alone.value < alone.high
    # each question eight times over in one group says no more than once
    copies = np.repeat(np.arange(n), 8)
    eight = replace(o.take(copies), group=[f"g{i}" for i in copies], ids=[str(i) for i in range(len(copies))])
    grouped = stages(eight, Policy(0.0, 0.5, 8), rng=np.random.default_rng(1))["p1"].ece
    assert grouped.high - grouped.low == pytest.approx(alone.high - alone.low, rel=0.25)


def small_like(p, answer):
    n = len(p)
    return replace(
        small().take([0] * n),
        p1=np.column_stack([p, np.zeros(n)]),
        answer=answer,
        n_options=np.full(n, 2),
        budgets=np.array([8]),
        group=[f"g{i}" for i in range(n)],
        ids=[str(i) for i in range(n)],
    )

"""Whether thinking helps: counts by hand, and the datasets in which it hurts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from calib import exact
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, NEVER, Policy, evaluate
from calib.why import hurting, ranking_auc, why


def store(sure, right1, right2, dataset=None, **more):
    """Two options; System 1 this sure, System 2 certain; thought 2 s and 500 tokens."""
    sure, right1, right2 = np.asarray(sure, float), np.asarray(right1, bool), np.asarray(right2, bool)
    n = len(sure)
    p1 = np.column_stack([np.where(right1, sure, 1 - sure), np.where(right1, 1 - sure, sure)])
    p2 = np.where(right2[:, None], [1.0, 0.0], [0.0, 1.0])[:, None]
    return Outcomes(
        p1=p1, p2=p2, tokens=np.full((n, 1), 500.0), finished=np.ones((n, 1), bool), t1=np.full((1, n), 0.05),
        t2=np.full((1, n, 1), 2.0), answer=np.zeros(n, int), budgets=np.array([1000]), dataset=dataset, **more,
    )  # fmt: skip


def test_counts_by_hand():
    o = store([0.6, 0.6, 0.75, 0.995], [0, 1, 1, 1], [1, 1, 0, 1])
    total, whole, *bands = why(o, 1000, "base", 1.0)
    assert (total.dataset, whole.dataset) == (None, "all")
    assert (whole.n, whole.gained, whole.lost, whole.net) == (4, 1, 1, 0)
    assert (whole.system1, whole.thought) == (0.75, 0.75)
    assert whole.p_value == 1
    assert whole.advice == "never"
    assert [(b.low, b.high, b.n, b.gained, b.lost) for b in bands] == [
        (0.5, 0.7, 2, 1, 0),
        (0.7, 0.8, 1, 0, 1),
        (0.99, 1.0, 1, 0, 0),
    ]
    assert bands[0].seconds_per_correction == 4  # two thoughts of 2 s for one answer
    assert bands[0].tokens_per_correction == 1000
    assert whole.seconds_per_correction == math.inf
    assert whole.to_dict()["seconds_per_correction"] is None
    assert bands[0].to_dict()["band"] == [0.5, 0.7]


def test_a_band_holds_its_lower_edge_as_a_threshold_does():
    rows = why(store([0.8, 0.8, 1.0], [1, 1, 1], [1, 1, 1]), 1000, "base", 1.0)
    assert [(b.low, b.n) for b in rows[2:]] == [(0.8, 2), (0.99, 1)]


def test_accuracies_agree_with_evaluate():
    rng = np.random.default_rng(0)
    o = store(rng.uniform(0.5, 1, 200), rng.random(200) < 0.7, rng.random(200) < 0.8)
    total = why(o, 1000, "base", 0.3)[0]
    assert total.system1 == evaluate(o, Policy(NEVER, 0.3, 1000)).accuracy
    assert total.thought == evaluate(o, Policy(ALWAYS, 0.3, 1000)).accuracy


def banking_and_maths():
    """Thinking turns 88 % into 80 % on the first set and 60 % into 90 % on the second, whose gate works."""
    names = np.repeat(["BANKING77", "GSM8K"], 300)
    right1 = np.r_[np.arange(300) < 264, np.arange(300) < 180]
    right2 = np.r_[np.arange(300) < 240, np.arange(300) < 270]
    sure = np.r_[np.full(300, 0.9), np.linspace(0.99, 0.55, 300)]
    return store(sure, right1, right2, names)


def test_names_the_dataset_in_which_thinking_hurts():
    rows = why(banking_and_maths(), 1000, "base", 1.0)
    (bad,) = hurting(rows)
    assert bad.dataset == "BANKING77"
    assert (bad.gained, bad.lost) == (0, 24)
    assert bad.p_holm == pytest.approx(2 / 2**24, abs=0)  # the larger p of two
    assert bad.proven
    assert bad.advice == "never"
    assert "88.0 -> 80.0 %" in bad.reason
    assert bad.reason.endswith("thinking: off")
    good = next(r for r in rows if r.dataset == "GSM8K" and r.low is None)
    assert good.advice == "gate"
    assert good.auc == 1
    assert good.p_holm == pytest.approx(2 * exact.mcnemar(90, 0), abs=0)


def test_a_small_loss_is_named_but_not_called_proven():
    o = store(np.full(100, 0.9), np.arange(100) < 88, np.arange(100) < 85)
    (bad,) = hurting(why(o, 1000, "base", 1.0))
    assert not bad.proven  # 3 lost, none gained: p = 0.25
    assert "may be chance" in bad.reason
    assert bad.to_dict()["hurts"] is True


def test_a_useless_gate_means_always_or_never():
    rng = np.random.default_rng(1)
    o = store(rng.uniform(0.5, 1, 300), rng.random(300) < 0.6, np.ones(300))
    whole = why(o, 1000, "base", 1.0)[1]
    assert whole.gate_is_useless
    assert whole.advice == "think"
    assert "route always or never" in whole.reason
    # all wrong: nothing to rank, and thinking is worth it everywhere
    whole = why(store(np.full(20, 0.9), np.zeros(20), np.ones(20)), 1000, "base", 1.0)[1]
    assert math.isnan(whole.auc)
    assert whole.advice == "think"
    assert whole.to_dict()["auc"] is None


def test_auc_is_that_of_scikit_learn():
    rng = np.random.default_rng(2)
    sure, right = rng.integers(1, 9, 120) / 10, rng.random(120) < 0.6
    area, p = ranking_auc(sure, right)
    assert area == pytest.approx(roc_auc_score(right, sure))
    assert 0 < p < 1
    assert ranking_auc(np.full(5, 0.7), [True, False, True, True, False]) == (0.5, 1.0)


def test_questions_that_cannot_think_and_failed_thoughts():
    o = store([0.6, 0.6, 0.6], [1, 1, 0], [1, 1, 1], can_think=np.array([True, True, False]))
    p2 = o.p2.copy()
    p2[0] = np.nan
    failed = replace(o, p2=p2)
    whole = why(failed, 1000, "base", 1.0)[1]
    assert (whole.n, whole.gained, whole.lost) == (2, 0, 1)  # no usable answer counts as wrong
    none = store([0.6], [1], [1], can_think=np.array([False]))
    with pytest.raises(CalibError, match="can think on none"):
        why(none, 1000, "base", 1.0)
    with pytest.raises(CalibError, match="think_budget 7 was not collected"):
        why(o, 7, "base", 1.0)


def test_questions_of_one_group_are_one_observation():
    # three groups of ten that all gain: 2 * (1/2)^3 for three of three, not for thirty of thirty
    sure, wrong, right = [0.6] * 30, [False] * 30, [True] * 30
    grouped = why(store(sure, wrong, right, group=[f"g{i // 10}" for i in range(30)]), 1000, "base", 1.0)[0]
    alone = why(store(sure, wrong, right), 1000, "base", 1.0)[0]
    assert (grouped.gained, alone.gained) == (30, 30)
    assert grouped.p_value == pytest.approx(0.25)
    assert not grouped.proven
    assert alone.p_value == pytest.approx(2 * 0.5**30)


def test_marks_and_unknown_seconds():
    o = store([0.6, 0.6], [0, 0], [1, 1], simulated=True, estimated=np.array([[False, True]]))
    row = why(o, 1000, "base", 1.0)[0]
    assert row.to_dict()["marks"] == ["estimated", "simulated"]
    unknown = replace(o, t2=np.full((1, 2, 1), np.nan))
    assert why(unknown, 1000, "base", 1.0)[0].to_dict()["seconds_per_correction"] is None

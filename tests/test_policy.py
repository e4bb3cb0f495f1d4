import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.policy import (
    ALWAYS,
    Cost,
    Policy,
    Route,
    baselines,
    candidate_thresholds,
    decide,
    evaluate,
)

from .strategies import outcomes
from .test_outcomes import small


def test_think_strictly_below_the_threshold():
    p1 = [[0.7, 0.3], [0.69, 0.31]]
    assert Policy(threshold=0.7).thinks(p1).tolist() == [False, True]
    assert not Policy(threshold=0.0).thinks([0.5, 0.5])
    assert Policy(threshold=1.1).thinks([1.0, 0.0])


def test_combine_by_hand_for_one_question_and_for_many():
    policy = Policy(mix=0.25)
    assert policy.combine([0.8, 0.2], [0.0, 1.0]).tolist() == pytest.approx([0.6, 0.4])
    assert policy.combine([[0.8, 0.2]], [[0.0, 1.0]]).tolist() == [pytest.approx([0.6, 0.4])]


def test_decide_by_hand():
    # question 0: confidence 0.6 thinks: 0.5 * (0.6, 0.4) + 0.5 * (0.1, 0.9) = (0.35, 0.65); question 1: 0.5 thinks
    d = decide(small(), Policy(threshold=0.55, mix=0.5, think_budget=16))
    assert d.thinks.tolist() == [False, True]
    assert d.choice.tolist() == [0, 2]
    assert d.latency.tolist() == pytest.approx([0.1, 2.1])
    assert d.tokens.tolist() == [0, 7]
    e = evaluate(small(), Policy(threshold=1.1, mix=0.5, think_budget=16))
    assert (e.accuracy, e.think_rate, e.tokens) == (1.0, 1.0, 6.0)
    assert (e.p50, e.p90, e.p99) == (1.1, 2.1, 2.1)
    assert e.mean == pytest.approx(1.6)
    # chance (1/2 + 1/3) / 2
    assert e.skill == 1.0


def test_a_failed_thought_is_wrong_counted_and_left_out_of_the_scores():
    o = small(p2=[[[np.nan] * 3], [[0.0, 0.0, 1.0]]])
    e = evaluate(o, Policy(threshold=1.1, mix=1.0, think_budget=16))
    assert (e.accuracy, e.unanswered, e.brier) == (0.5, 1, 0.0)
    kept = evaluate(o, Policy(threshold=0.55, mix=1.0, think_budget=16))
    assert kept.unanswered == 0


def test_unknown_seconds_of_a_thought_that_is_not_used_do_no_harm():
    o = small(t2=[[[np.nan], [2.0]]])
    assert evaluate(o, Policy(threshold=0.55, think_budget=16)).p99 == 2.1
    assert math.isnan(evaluate(o, Policy(threshold=1.1, think_budget=16)).p50)
    assert evaluate(o, Policy(threshold=1.1, think_budget=16)).to_dict()["p50"] is None


def test_questions_that_cannot_think_keep_system_1():
    d = decide(small(can_think=[False, True]), Policy(threshold=1.1, think_budget=16))
    assert d.thinks.tolist() == [False, True]


def test_cost_by_hand():
    cost = Cost.parse("wrong=10, second=0.1,token=0.01")
    e = evaluate(small(), Policy(threshold=0.55, think_budget=16), cost=cost)
    # question 0: wrong, 0.1 s; question 1: right, 2.1 s, 7 tokens
    assert e.cost == pytest.approx(((10 + 0.01) + (0.21 + 0.07)) / 2)


def test_a_price_given_twice_is_refused():
    with pytest.raises(CalibError, match="'wrong' twice"):
        Cost.parse("wrong=1,wrong=2")


@pytest.mark.parametrize("text", ["wrong", "wrong=x", "speed=1", "wrong=-1", "second=nan", ""])
def test_a_cost_that_cannot_be_read_is_refused(text):
    with pytest.raises(CalibError, match="wrong=1,second=0.01"):
        Cost.parse(text)


@pytest.mark.parametrize(
    "bad",
    [
        {"threshold": -0.1},
        {"threshold": 1.2},
        {"threshold": float("nan")},
        {"mix": 1.01},
        {"mix": float("nan")},
        {"think_budget": 0},
        {"think_budget": 1.5},
        {"confidence": "median"},
        {"pool": "logit"},
        {"temperatures": {"p1": 1.2}},
        {"routes": {"colour=red": Route(0.5)}},
        {"routes": {"kind=noul": Route(threshold=2)}},
    ],
)
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(CalibError):
        Policy(**bad)


def test_candidate_thresholds_lie_midway_and_never_on_a_confidence():
    assert candidate_thresholds([0.5, 0.9, 0.5]).tolist() == [0, 0.7, ALWAYS]
    up = np.nextafter(0.5, 1)
    assert candidate_thresholds([0.5, up]).tolist() == [0, up, ALWAYS]  # the midpoint rounds onto the lower


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20))
def test_candidate_thresholds_give_every_split_once(values):
    c = np.array(values)
    counts = [(c < t).sum() for t in candidate_thresholds(c)]
    assert counts == sorted(set(counts))
    assert {0, len(c)} <= set(counts)
    assert len(counts) == len(np.unique(c)) + 1


@given(outcomes(), st.floats(0, ALWAYS), st.floats(0, ALWAYS))
def test_a_higher_threshold_never_makes_fewer_questions_think(o, a, b):
    low, high = (decide(o, Policy(t, 0.5, int(o.budgets[0]), o.arms[0])) for t in sorted([a, b]))
    assert (low.thinks <= high.thinks).all()


@given(outcomes(), st.floats(0, ALWAYS), st.floats(0, 1))
def test_decide_equals_the_rule_question_by_question(o, threshold, mix):
    policy = Policy(threshold, mix, int(o.budgets[-1]), o.arms[-1])
    d = decide(o, policy)
    for i in range(o.n):
        c = o.n_options[i]
        p1, p2 = o.p1[i, :c], o.p2[i, -1, :c]
        thinks = bool(o.can_think[i] and p1.max() < threshold)
        p = (1 - mix) * p1 + mix * p2 if thinks else p1
        assert d.thinks[i] == thinks
        assert d.choice[i] == (-1 if np.isnan(p).any() else int(np.argmax(p)))
        assert d.choice[i] < c  # a padded option never wins
        assert d.latency[i] == o.t1[-1, i] + (o.t2[-1, i, -1] if thinks else 0)


@given(outcomes(), st.floats(0, ALWAYS))
def test_the_breakdown_adds_up(o, threshold):
    e = evaluate(o, Policy(threshold, 0.5, int(o.budgets[0])), by_dataset=True)
    assert list(e.by_dataset) == list(o.dataset_names)
    assert sum(part.n for part in e.by_dataset.values()) == o.n
    weight = {name: o.weight[o.dataset == name].sum() for name in o.dataset_names}
    mean = sum(part.accuracy * weight[name] for name, part in e.by_dataset.items()) / o.weight.sum()
    assert mean == pytest.approx(e.accuracy)


@given(outcomes(), st.floats(0, ALWAYS), st.floats(0, ALWAYS))
def test_routes_equal_deciding_each_part_alone(o, threshold, other):
    budget = int(o.budgets[-1])
    routes = {"dataset=a": Route(threshold=other), "n_options=2": Route(think_budget=int(o.budgets[0]))}
    policy = Policy(threshold, 0.5, budget, routes=routes)
    d = decide(o, policy)
    for i in range(o.n):
        alone = policy.routed(dataset=o.dataset[i], kind=o.kind[i], n_options=int(o.n_options[i]))
        one = decide(o.take([i]), alone)
        assert one.thinks[0] == d.thinks[i]
        assert one.latency[0] == d.latency[i]
        np.testing.assert_array_equal(one.p[0], d.p[i])


def test_a_request_without_a_feature_takes_no_route_of_it():
    policy = Policy(0.8, routes={"dataset=None": Route(0.1), "kind=noul": Route(0.2)})
    assert policy.routed().threshold == 0.8
    assert policy.routed(kind="noul").threshold == 0.2
    assert policy.routed(dataset="None", kind="noul").threshold == 0.1


@given(st.floats(0, ALWAYS), st.floats(0, 1), st.integers(1, 10**6))
def test_a_policy_survives_json(threshold, mix, budget):
    policy = Policy(threshold, mix, budget, "mtp", routes={"dataset=x": Route(0.5), "kind=noul": Route(None, 7)})
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


@pytest.mark.parametrize(
    "values",
    [
        {"treshold": 1},
        {"threshold": "high"},
        {"threshold": True},
        {"mix": True},
        {"mix": None},
        {"think_budget": 512.0},
        {"think_budget": float("inf")},
        {"arm": 5},
        {"arm": ""},
        {"routes": [1]},
        {"routes": {"kind=noul": 1}},
        {"routes": {"kind=noul": {"x": 1}}},
        {"routes": {"kind=noul": {"threshold": "low"}}},
    ],
)
def test_what_is_no_policy_is_refused(values):
    with pytest.raises(CalibError):
        Policy.from_dict(values)


def test_baselines_use_the_servers_defaults_and_the_largest_budget():
    found = baselines(small(default_threshold=0.6, default_mix=0.4))
    assert {name: (p.threshold, p.mix, p.think_budget) for name, p in found.items()} == {
        "system1": (0.0, 0.4, 16),
        "default": (0.6, 0.4, 16),
        "always_think": (1.1, 0.4, 16),
        "system2": (1.1, 1.0, 16),
    }


def test_numbers_of_a_file_that_no_float_can_be():
    assert Policy.from_dict({"deadline": 10**400}).deadline is None  # as an infinite one, which closes nothing
    for changed in ({"threshold": 10**400}, {"mix": -(10**400)}, {"temperatures": {"p1": {"choice": 10**400}}}):
        with pytest.raises(CalibError):
            Policy.from_dict(changed)


def test_a_policy_reads_what_its_answers_may_come_from():
    one = small()
    read = replace(
        one,
        budgets=[16, 32, 64],
        **{name: np.repeat(getattr(one, name), 3, axis) for name, axis in (("p2", 1), ("tokens", 1), ("finished", 1))},
        t2=np.repeat(one.t2, 3, 2),
        label_mass=np.repeat(one.label_mass[:, :1], 4, 1),
        estimated=np.repeat(one.estimated[:, :1], 4, 1),
    )
    assert Policy(0.5, 0.5, 64).readings(read) == (("base", 64),)
    assert Policy(0.5, 0.5, 64, deadline=1.0).readings(read) == (("base", 16), ("base", 32), ("base", 64))
    assert Policy(0.0, 0.5, 64, deadline=1.0).readings(read) == (("base", None),)
    routed = Policy(0.0, 0.5, 64, routes={"kind=noul": Route(threshold=0.9, think_budget=32)})
    assert routed.readings(read) == (("base", None), ("base", 32))

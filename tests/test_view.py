"""The dashboard's state in the URL."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Policy, Route
from calib.view import FRONT_METRICS, GROUPS, KEYS, View, read_view, traffic_of

NAMES = ("a", "b=c", "ä, ö & 50 %")


def outcomes() -> Outcomes:
    n = len(NAMES)
    return Outcomes(
        p1=[[0.6, 0.4]] * n,
        p2=[[[0.6, 0.4]] * 2] * n,
        tokens=[[10, 20]] * n,
        finished=[[True, True]] * n,
        t1=[[0.1] * n] * 2,
        t2=[[[1.0, 2.0]] * n] * 2,
        answer=[0] * n,
        budgets=[100, 400],
        arms=("base", "mtp"),
        dataset=list(NAMES),
    )


START = View(0.8, 0.5, 400, "base", name="default")


def as_sent(query: dict) -> dict[str, list[str]]:
    return {name: value if isinstance(value, list) else [value] for name, value in query.items()}


views = st.builds(
    View,
    threshold=st.floats(0, 1.1),
    mix=st.floats(0, 1),
    think_budget=st.sampled_from([100, 400]),
    arm=st.sampled_from(["base", "mtp"]),
    name=st.sampled_from(["", "default", "mine"]),
    datasets=st.lists(st.sampled_from(NAMES), unique=True).map(tuple),
    traffic=st.sampled_from(["", "a=3, b=c=1"]),
    limits=st.sampled_from(["", "p90<10s, accuracy>=80%"]),
    metric=st.sampled_from(FRONT_METRICS),
    group=st.sampled_from(GROUPS),
    rival=st.sampled_from(["default", "system1"]),
    study=st.sampled_from(["", "policy-1"]),
)


@given(views)
@settings(max_examples=100)
def test_a_link_reopens_the_same_view(view):
    read = read_view(as_sent(view.to_query()), View(0.1, 0.1, 100, "mtp"), outcomes())
    assert read.view == view
    assert read.notices == ()


def test_without_a_query_the_start_is_shown():
    assert read_view({}, START, outcomes()) == (START, ())


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"t": ["2"]}, "t=2, which is no number from 0 to 1.1"),
        ({"t": ["nan"]}, "t=nan"),
        ({"m": ["much"]}, "m=much"),
        ({"b": ["300"]}, "b=300; there are: 100, 400"),
        ({"arm": ["<script>"]}, "there are: base, mtp"),
        ({"set": ["zz"]}, "not there: zz"),
        ({"against": ["p50"]}, "against=p50"),
        ({"limits": ["p90<10"]}, "p90<10s"),
        ({"traffic": ["a"]}, "NAME=NUMBER"),
    ],
)
def test_what_a_link_cannot_have_is_said_and_left_as_it_was(query, said):
    read = read_view(query, START, outcomes())
    assert said in " ".join(read.notices)
    shown = {"threshold", "mix", "think_budget", "arm", "datasets", "metric"}
    assert all(getattr(read.view, name) == getattr(START, name) for name in shown)


def test_a_link_with_knobs_alone_names_no_saved_policy():
    assert read_view({"t": ["0.3"]}, START, outcomes()).view.name == ""
    assert read_view({"t": ["0.3"], "policy": ["mine"]}, START, outcomes()).view.name == "mine"


def test_choosing_a_policy_keeps_the_rest_of_the_view():
    view = View(0.8, 0.5, 400, "base", name="default", datasets=("a",), limits="p90<10s")
    chosen = view.with_policy(Policy(0.3, 0.2, 100, "mtp"))
    assert chosen.policy() == Policy(0.3, 0.2, 100, "mtp")
    assert (chosen.name, chosen.datasets, chosen.limits) == ("", ("a",), "p90<10s")


RULE = Policy(
    0.8,
    0.5,
    400,
    "base",
    routes={"dataset=a": Route(0.2)},
    temperatures={"p1": {"*": 2.0}},
    pool="log_odds",
    deadline=8.0,
)


def test_moved_knobs_keep_the_rule_of_the_saved_policy():
    view = START.with_policy(RULE, "best", "best")
    assert view.policy(RULE) == RULE
    moved = replace(view, threshold=0.4, name="")
    assert moved.policy(RULE) == replace(RULE, threshold=0.4)
    read = read_view(as_sent(moved.to_query()), START, outcomes())
    assert (read.view.rule, read.view.whole) == ("best", True)
    assert read.view.policy(RULE) == moved.policy(RULE)


def test_a_point_of_a_front_has_the_rule_without_its_routes_and_deadline():
    view = START.with_policy(replace(RULE, routes={}, deadline=None, mix=0.9), "", "best")
    assert view.policy(RULE) == replace(RULE, routes={}, deadline=None, mix=0.9)


def test_names_in_the_url_differ():
    assert len(set(KEYS)) == len(KEYS)


def test_traffic_may_name_a_dataset_with_an_equals_sign():
    assert traffic_of("a=3, b=c=0.5", outcomes()) == {"a": 3.0, "b=c": 0.5}
    assert traffic_of(" ", outcomes()) == {}


@pytest.mark.parametrize("text", ["a", "a=", "=3", "a=-1", "a=inf", "a=nan", "zz=1"])
def test_traffic_that_cannot_be_read_is_refused(text):
    with pytest.raises(CalibError, match=r"NAME=NUMBER|unknown dataset"):
        traffic_of(text, outcomes())

"""Two policies side by side: lines, numbers, sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.diff import changes, difference
from calib.policy import Policy, Route

ONE = Policy(0.7, 0.4, 2048, "mtp")
TWO = Policy(0.9, 0.6, 8192, "base")


def document(policy: Policy, verdict: str = "certified", **more) -> dict:
    told = {"name": "best", "model": "m", "verdict": verdict, "marks": [], "targets": [{"target": "p90<10s"}]}
    return told | {"policy": policy.to_dict(), "fingerprints": {"model": "f", "questions": "q"}} | more


def said(now: Policy, chosen: Policy) -> str:
    return " | ".join(difference(document(now), document(chosen)).meaning)


def test_changes_name_each_knob_the_verdict_and_the_limits():
    rows = {row.what: row for row in changes(None, document(ONE))}
    assert list(rows) == ["threshold", "mix", "think_budget", "arm", "verdict", "limits"]
    assert (rows["threshold"].now, rows["threshold"].chosen, rows["threshold"].differs) == (None, "0.7", True)
    same = changes(document(ONE), document(ONE))
    assert not any(row.differs for row in same)
    routed = document(ONE) | {"policy": ONE.to_dict() | {"routes": {"dataset=a": {"threshold": 0.5}}}}
    assert {row.what for row in changes(document(ONE), routed) if row.differs} == {"routes"}
    other = {row.what for row in changes(document(ONE, "met"), document(TWO)) if row.differs}
    assert other == {"threshold", "mix", "think_budget", "arm", "verdict"}


def test_every_knob_that_differs_has_a_sentence():
    assert "more questions are thought about: below a confidence of 0.9, before 0.7" in said(ONE, TWO)
    assert "System 2 weighs more" in said(ONE, TWO)
    assert "thoughts may be longer" in said(ONE, TWO)
    assert "served as base instead of mtp" in said(ONE, TWO)
    assert "fewer questions" in said(TWO, ONE)
    assert "System 1 weighs more" in said(TWO, ONE)
    assert "cut earlier" in said(TWO, ONE)
    assert said(ONE, replace(ONE, threshold=0.0)) == "no question is thought about any more"
    assert said(ONE, replace(ONE, threshold=1.1)) == "every question is thought about"
    assert said(ONE, replace(ONE, pool="log_odds")) == "the two distributions are combined in another way (pool)"
    assert said(ONE, ONE) == "the policy is the same: what is served does not change"


def test_thresholds_of_another_confidence_are_not_compared():
    assert "cannot be compared" in said(ONE, replace(ONE, threshold=0.9, confidence="margin"))
    calibrated = replace(ONE, threshold=0.9, temperatures={"p1": {"*": 2.0}})
    assert "cannot be compared" in said(ONE, calibrated)
    assert "more questions" not in said(ONE, calibrated)
    assert "are calibrated now" in said(ONE, calibrated)
    assert "no longer calibrated" in said(calibrated, ONE)


def test_deadlines_and_routes_come_change_and_go():
    five, two = replace(ONE, deadline=5.0), replace(ONE, deadline=2.0, on_deadline="system1")
    assert "a deadline of 5 s" in said(ONE, five)
    assert "the deadline is earlier: 2 s, before 5 s" in said(five, two)
    assert "System 1 answers now" in said(five, two)
    assert "no deadline any more, before 2 s" in said(two, ONE)
    routed = replace(ONE, routes={"kind=noul": Route(0.1)})
    assert said(ONE, routed) == "new routes: kind=noul"
    assert said(routed, ONE) == "routes left out: kind=noul"
    assert said(routed, replace(ONE, routes={"kind=noul": Route(0.2)})) == "changed routes: kind=noul"


def test_metrics_are_of_the_held_out_questions_where_both_have_them():
    measured = {"accuracy": {"value": 0.8, "interval": [0.7, 0.9]}, "p90": {"value": 9.0, "interval": [8, None]}}
    one = document(ONE, tune={"accuracy": 0.9, "p90": 8.0}, test=measured)
    two = document(TWO, tune={"accuracy": 0.95, "p90": None}, test=None)
    on_test = difference(one, one)
    assert on_test.on == "test"
    rows = {row.metric: row for row in on_test.metrics}
    assert (rows["accuracy"].chosen, rows["accuracy"].interval, rows["p90"].interval) == (0.8, (0.7, 0.9), None)
    on_tune = difference(one, two)
    rows = {row.metric: row for row in on_tune.metrics}
    assert on_tune.on == "tune"
    assert rows["accuracy"].difference == pytest.approx(0.05)
    assert rows["p90"].difference is None
    assert difference(document(ONE), two).on is None
    assert on_tune.to_dict()["metrics"][0]["difference"] == pytest.approx(0.05)


def test_what_makes_numbers_incomparable_is_noted():
    one = document(ONE, tune={"accuracy": 0.9})
    other = document(ONE, marks=["simulated"], tune={"accuracy": 0.9}, fingerprints={"model": "g", "questions": "r"})
    notes = " | ".join(difference(one, other).notes)
    assert "two different models" in notes
    assert "different question sets" in notes
    assert "only the second is simulated" in notes
    assert difference(one, one).notes == ()
    assert "less sure: met, before certified" in " ".join(difference(one, document(ONE, "met")).meaning)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(document(ONE))), inner),
        max_leaves=8,
    ),
    st.sampled_from(["policy", "targets", "marks", "fingerprints", "tune", "test", "verdict", "model"]),
)
def test_a_file_that_holds_anything_at_all_is_compared(value, key):
    found = difference({key: value}, document(ONE))
    assert found.changes
    assert difference(document(ONE), {key: value}).to_dict()["changes"]


@given(st.builds(Policy, st.floats(0, 1.1), st.floats(0, 1), st.integers(1, 9000), st.sampled_from(["base", "mtp"])))
def test_a_policy_and_itself_are_the_same(policy):
    assert difference(document(policy), document(policy)).same
    assert not difference(document(policy), document(replace(policy, think_budget=policy.think_budget + 1))).same

"""What the dashboard keeps: by content, never by time; and what it looks at without changing it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from calib import workspace
from calib.appraise import allowance, appraise
from calib.certify import alpha_at_look
from calib.latency import RateModel
from calib.policy import Policy, evaluate
from calib.store import Store
from calib.store.contents import content_key, counts, loads, text_of, texts
from calib.target import parse_targets
from calib.trials import importance, names, read_trials
from calib.tuning import Demand, split_identity
from calib.view import View
from calib.workspace import Kept, Workspace, load, point_of, select, snapshot, start_view
from tests.appstore import made_up_store, simulated_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(simulated_store(tmp_path_factory.mktemp("app") / "s.db", every=8, trials=12))


@pytest.fixture(scope="module")
def space(store) -> Workspace:
    found = snapshot(store)
    return select(found, start_view(found, load(found)))


def test_kept_results_are_computed_once_however_many_ask():
    kept, calls = Kept(2), []

    def slow():
        calls.append(1)
        time.sleep(0.05)
        return object()

    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(kept.get("a", slow))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(map(id, results))) == 1
    kept.get("b", object)
    kept.get("c", object)  # pushes the oldest out
    kept.get("a", slow)
    assert len(calls) == 2


def test_an_exception_is_not_kept():
    kept = Kept(1)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda: 1 // 0)
    assert kept.get("a", lambda: 7) == 7


def test_the_same_content_is_read_once_and_a_policy_or_a_look_changes_no_content(store):
    first = snapshot(store)
    with Store.open(store) as opened:
        opened.save_policy("other", {"policy": None})
        opened.record_look("elsewhere", {"k": 1})
    again = snapshot(store)
    assert again.content == first.content
    assert {saved.name for saved in again.saved} == {"best", "other"}
    assert load(again) is load(first)


def test_each_kind_of_new_row_changes_the_content(tmp_path):
    path = made_up_store(tmp_path / "a.db", n=20)
    with Store.open(path) as store:
        seen = [content_key(store)]
        seen.append(content_key(store))
        assert seen[0] == seen[1]
        (model,) = store.models()
        store.set_rates(model.fingerprint, "base", RateModel(0.05, 100.0, 0.01))
        seen.append(content_key(store))
        store.set_rates(model.fingerprint, "base", RateModel(0.06, 100.0, 0.01))
        seen.append(content_key(store))
    made_up_store(path, n=24)  # four more questions
    with Store.open(path) as store:
        seen.append(content_key(store))
        assert counts(store).questions == 24
        assert [(arm.arm, arm.answers, arm.failures) for arm in counts(store).arms] == [("base", 24, 0), ("mtp", 24, 0)]
        assert loads(store, model.fingerprint) == {"base": (4,), "mtp": (4,)}
    assert len(set(seen[1:])) == 4


def test_texts_and_thoughts_are_those_of_the_question(store):
    with Store.open(store) as opened:
        question = opened.questions()[3]
        (model,) = opened.models()
        found = text_of(opened, model.fingerprint, question.dataset, question.id)
        assert (found.state, found.question, found.options) == (question.state, question.question, question.options)
        assert set(found.thoughts) <= {"base", "mtp"}
        assert texts(opened)[question.dataset, question.id] == question.question
        assert text_of(opened, model.fingerprint, "no", "such").options == ()


def test_the_start_is_the_saved_policy_with_its_limits(store):
    found = snapshot(store)
    view = start_view(found, load(found))
    document = next(saved.document for saved in found.saved if saved.name == "best")
    assert (view.name, view.limits) == ("best", "p90<10s")
    assert view.rule == "best"
    assert view.policy(Policy.from_dict(document["policy"])) == Policy.from_dict(document["policy"])


def test_a_saved_policy_that_does_not_fit_is_not_the_start(tmp_path):
    path = made_up_store(tmp_path / "a.db")
    with Store.open(path) as opened:
        opened.save_policy("best", {"policy": Policy(0.5, 0.5, 12345, "base").to_dict()})
    found = snapshot(str(path))
    assert start_view(found, load(found)).name == "default"
    assert workspace.fitting(found, load(found)) == {}


def test_figures_are_of_the_tune_questions_alone(space):
    policy = space.baselines["default"]
    assert space.test is not None
    assert space.tune.n + space.test.n == space.outcomes.n
    values = space.marked("x", policy).values[None]
    assert values["accuracy"] == pytest.approx(evaluate(space.tune, policy).accuracy)
    assert values["p99"] == pytest.approx(evaluate(space.tune, policy).p99)


def test_selection_keeps_the_names_of_all_datasets(store):
    found = snapshot(store)
    view = start_view(found, load(found))
    one = load(found).dataset_names[0]
    small = select(found, View(view.threshold, view.mix, view.think_budget, view.arm, datasets=(one,)))
    assert small.outcomes.dataset_names == (one,)
    assert small.names == load(found).dataset_names


def test_a_thinned_front_holds_exact_points_and_a_click_finds_its_policy(space, monkeypatch):
    monkeypatch.setattr(workspace, "FRONT_POINTS", 20)
    whole = space.curves.frontier("tokens", arms=["mtp"])
    few = workspace.thinned(whole)
    assert 2 < len(few.front) < len(whole.front)
    points = set(zip(whole.front.x.tolist(), whole.front.y.tolist(), strict=True))
    assert set(zip(few.front.x.tolist(), few.front.y.tolist(), strict=True)) <= points
    at = len(few.front) - 1
    policy = point_of([few], [{"customdata": [f"0:{at}", "", ""]}])
    assert policy == few.front[at].policy
    score = evaluate(space.tune, policy)
    assert (score.tokens, score.accuracy) == pytest.approx((few.front.x[at], few.front.y[at]))
    for nothing in ({}, {"customdata": None}, {"customdata": ["threshold 0.3"]}, {"customdata": ["7:0"]}):
        assert point_of([few], [nothing]) is None
    assert point_of([few], [{"customdata": [f"0:{at + 1}"]}]) is None


def test_alike_between_the_compared_points_is_as_the_nearest(space, monkeypatch):
    front = space.front("p90", "mtp")
    chosen = front.front[len(front.front) - 1].policy
    exact = space.curves.alike(front.front, chosen)
    monkeypatch.setattr(workspace, "COMPARED", len(front.front))
    assert (Workspace(space.outcomes, space.names).alike(front, chosen) == exact).all()
    monkeypatch.setattr(workspace, "COMPARED", 10)
    rough = Workspace(space.outcomes, space.names).alike(front, chosen)
    assert rough.shape == exact.shape
    assert rough[-1] == exact[-1]
    assert np.mean(rough == exact) > 0.7


CALIBRATED = Policy(0.6, 0.5, 512, "mtp", confidence="margin", temperatures={"p1": {"*": 1.7}})


def test_the_best_under_a_rule_is_scored_as_it_is_served(space):
    targets = parse_targets("p90<20s")
    best = space.best(targets, CALIBRATED)
    assert best is not None
    assert (best.confidence, best.temperatures) == (CALIBRATED.confidence, CALIBRATED.temperatures)
    score = evaluate(space.tune, best)
    assert score.p90 < 20
    for threshold in np.linspace(0, 1.1, 12):  # no policy of the same rule does better
        other = evaluate(space.tune, replace(best, threshold=float(threshold)))
        assert other.p90 >= 20 or other.accuracy <= score.accuracy + 1e-12
    assert space.marked("x", best).values[None]["accuracy"] == pytest.approx(score.accuracy)


def test_a_front_under_a_rule_gives_policies_of_that_rule(space):
    front = space.front("p90", "mtp", CALIBRATED)
    at = len(front.front) - 1
    policy = point_of([front], [{"customdata": [f"0:{at}"]}])
    assert policy is not None
    assert policy.temperatures == CALIBRATED.temperatures
    assert evaluate(space.tune, policy).accuracy == pytest.approx(front.front.y[at])
    assert space.alike(front, policy)[at]


def test_the_confidences_are_compared_by_what_can_be_reached(space):
    rows = {row.definition: row for row in space.confidences(parse_targets("p90<20s"))}
    assert list(rows) == ["max", "margin", "entropy"]
    assert rows["max"].policy == space.best(parse_targets("p90<20s"))
    for name, row in rows.items():
        assert row.policy is not None
        assert row.score is not None
        assert row.policy.confidence == name
        assert evaluate(space.tune, row.policy).accuracy == row.score.accuracy
        assert row.aurc == pytest.approx(space.curves.confidences()[name].summary)


# --- evidence for a chosen policy -------------------------------------------------------------------------------------


def test_an_appraisal_without_a_ledger_never_looks_at_the_test_questions(space):
    demand = Demand(targets=parse_targets("p90<20s"), resamples=100)
    found = appraise(space.outcomes, demand, space.baselines["default"], table=space.table)
    document = found.to_dict("chosen")
    assert (document["verdict"] == "met") == (evaluate(space.tune, space.baselines["default"]).p90 < 20)
    assert document["test"] is None
    assert found.reported.n == space.tune.n
    assert any("not tested" in text for text in document["warnings"])


def test_certifying_counts_one_look_and_the_same_look_again_none(store, space):
    demand = Demand(targets=parse_targets("p90<30s"), resamples=100)
    policy = Policy(0.3, 0.5, 512, "mtp")
    identity = split_identity(space.outcomes)
    with Store.open(store) as opened:
        before = opened.looks(identity)
        found = appraise(space.outcomes, demand, policy, ledger=opened.record_look)
        assert opened.looks(identity) == before + 1
        again = appraise(space.outcomes, demand, policy, ledger=opened.record_look)
        assert opened.looks(identity) == before + 1
    assert found.certificate is not None
    assert found.certificate.look == before + 1
    assert found.certificate.alpha == pytest.approx(alpha_at_look(0.95, before + 1))
    assert found.to_dict()["verdict"] == again.to_dict()["verdict"] == "certified"
    assert found.to_dict()["test"]["n"] == space.test.n


def test_the_tuned_policy_is_judged_as_tune_judged_it(store, space):
    """The look of `tune` on the same candidate has the same identity in the ledger."""
    with Store.open(store) as opened:
        saved = opened.policy("best")
    assert saved["certificate"]["look"] == 1
    assert saved["split"]["test_share"] == workspace.TEST_SHARE
    assert sum(row["tune"] for row in saved["split"]["by_dataset"].values()) == space.tune.n


def test_what_is_left_of_the_level():
    fresh, later = allowance(0), allowance(3)
    assert (fresh.spent, fresh.left) == (0, 1)
    assert fresh.next_alpha == pytest.approx(0.05 * 6 / np.pi**2)
    assert later.spent == pytest.approx(0.05 * 6 / np.pi**2 * (1 + 1 / 4 + 1 / 9))
    assert later.left == pytest.approx(1 - 6 / np.pi**2 * (1 + 1 / 4 + 1 / 9))
    assert allowance(10_000).left > 0


# --- studies ----------------------------------------------------------------------------------------------------------


def test_trials_are_those_of_the_study(store):
    (study,) = names(store)
    assert study.trials == 12
    found = read_trials(store, study.name)
    assert found.metric == "accuracy"
    assert found.maximize
    assert found.targets == ("p90<10s",)
    assert len(found.values) == len(found.policies) == len(found.metrics["p90"]) == 12
    assert (found.feasible == (found.metrics["p90"] < 10)).all()
    assert found.margins["p90<10s"] == pytest.approx(10 - found.metrics["p90"])
    order = found.order
    ranked = [(bool(found.feasible[i]), found.values[i]) for i in order]
    assert ranked == sorted(ranked, reverse=True)
    assert found.best == (order[0] if found.feasible.any() else None)
    mattered = importance(store, study.name)
    assert set(mattered) <= set(found.params)
    assert not mattered or sum(mattered.values()) == pytest.approx(1)


def test_looking_for_studies_makes_no_file(tmp_path):
    path = made_up_store(tmp_path / "a.db", n=20)
    assert names(path) == ()
    assert sorted(p.name for p in tmp_path.iterdir() if "studies" in p.name) == []

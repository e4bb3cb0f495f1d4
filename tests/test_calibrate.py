"""What is fitted and what is kept: closed forms, known truth, scikit-learn, and the rule that serves it."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator

from calib import metrics
from calib.calibrate import (
    CELL_ROWS,
    LEAST_GROUPS,
    START_ROWS,
    Calibration,
    apply,
    finish,
    fit,
    fit_temperature,
)
from calib.decidefiles import calibration_json, serve_env
from calib.errors import CalibError
from calib.export import export
from calib.gateway import DecideRequest, Gateway
from calib.importer import import_files
from calib.knobs import refusals
from calib.optimise import optimum, pareto, tabulate
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, CONFIDENCES, Policy, candidate_thresholds, confidence, decide, evaluate, pooled
from calib.policyfile import load_policy_file
from calib.provenance import Provenance
from calib.search import GRID
from calib.stages import stages
from calib.store import Store, load_outcomes
from calib.temperature import Temperatures, cell
from calib.tuning import Demand, tune
from tests.scripted import ScriptedEngine
from tests.strategies import outcomes

Two = np.ndarray


def sure(top: float, n: int) -> Two:
    return np.tile([top, 1 - top], (n, 1))


def answers(right: int, n: int) -> Two:
    return (np.arange(n) >= right).astype(int)


def world(p1: Two, p2: Two, answer: Two, **changes) -> Outcomes:
    """Outcomes of one budget, 8 tokens; half of the questions are test questions."""
    n = len(p1)
    values = {
        "p1": p1,
        "p2": p2[:, None],
        "tokens": np.full((n, 1), 8),
        "finished": np.ones((n, 1), bool),
        "t1": np.full((1, n), 0.1),
        "t2": np.full((1, n, 1), 1.0),
        "answer": answer,
        "budgets": [8],
    }
    return Outcomes(**(values | changes))


def two_systems(n: int, seed: int, *, hot1: float = 1.0, hot2: float = 1.0, options: int = 4, **changes) -> Outcomes:
    """Two forecasts that know different things, both calibrated at ``hot`` 1, the temperature that is to be found.

    The answer is drawn from System 1's forecast; System 2 does not see that one but evidence of its own about the
    answer, which Bayes makes a calibrated forecast.
    """
    rng = np.random.default_rng(seed)
    first = softmax(1.2 * rng.gumbel(0, 1, (n, options)), axis=1)
    answer = drawn_from(first, rng)
    evidence = 1.5 * (np.arange(options) == answer[:, None]) + rng.normal(0, 1, (n, options))
    second = softmax(1.5 * evidence, axis=1)
    p1, p2 = (softmax(np.log(p) * hot, axis=1) for p, hot in ((first, hot1), (second, hot2)))
    return world(p1, p2, answer, **changes)


def drawn_from(p: Two, rng: np.random.Generator) -> Two:
    return (rng.random((len(p), 1)) > np.cumsum(p, axis=1)).sum(axis=1)


def kept(found: Calibration, stage: str) -> list[str]:
    return [step.name for step in found.kept if step.stage == stage]


# --- one temperature --------------------------------------------------------------------------------------------------


def test_closed_form_of_one_confidence():
    # 60 of 80 right at a top probability of 0.9: the best forecast says 0.75
    t = fit_temperature(sure(0.9, 80), answers(60, 80))
    assert t == pytest.approx(logit(0.9) / logit(0.75), rel=1e-6)


def test_closed_form_with_a_start_that_counts_for_questions():
    # 20 questions more, of which the start (temperature 1) says 0.9 are right: 78 of 100
    t = fit_temperature(sure(0.9, 80), answers(60, 80), rows=20)
    assert t == pytest.approx(logit(0.9) / logit(0.78), rel=1e-6)
    # weights count as questions
    same = fit_temperature(sure(0.9, 40), answers(30, 40), np.full(40, 2.0), rows=20)
    assert same == pytest.approx(t, rel=1e-6)


def test_closed_form_with_a_share_of_the_uniform_distribution():
    # 0.8 * q + 0.1 = 0.75
    t = fit_temperature(sure(0.9, 80), answers(60, 80), uniform=0.2)
    assert t == pytest.approx(logit(0.9) / logit(0.65 / 0.8), rel=1e-6)


def test_a_system_that_was_always_right_does_not_become_infinitely_sure():
    t = fit_temperature(sure(0.99, 100), answers(100, 100), rows=START_ROWS)
    # 100 + 20 * 0.99 of 120
    assert expit(logit(0.99) / t) == pytest.approx((100 + START_ROWS * 0.99) / 120, rel=1e-6)


class Stored(ClassifierMixin, BaseEstimator):
    """A classifier whose logits are its features."""

    def fit(self, x, y):
        self.classes_ = np.unique(y)
        return self

    def decision_function(self, x):
        return x

    def predict(self, x):
        return self.classes_[x.argmax(axis=1)]


@pytest.mark.filterwarnings("ignore:Since FrozenEstimator:UserWarning")  # the weights are for the calibration alone
@pytest.mark.parametrize("weighted", [False, True])
def test_it_agrees_with_scikit_learn(weighted):
    rng = np.random.default_rng(5)
    z = rng.normal(0, 2, (400, 5))
    answer = drawn_from(softmax(z / 1.7, axis=1), rng)
    weight = rng.uniform(0.5, 2, 400) if weighted else None
    theirs = CalibratedClassifierCV(FrozenEstimator(Stored().fit(z, answer)), method="temperature", cv=2)
    theirs.fit(z, answer, sample_weight=weight)
    (pair,) = theirs.calibrated_classifiers_
    ours = fit_temperature(softmax(z, axis=1), answer, weight)
    assert ours == pytest.approx(1 / pair.calibrators[0].beta_, rel=1e-5)


def test_a_known_temperature_is_recovered_within_its_error():
    truth, errors = 2.5, []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        logs = np.log(softmax(rng.normal(0, 3, (300, 4)), axis=1))
        q = softmax(logs / truth, axis=1)
        inverse = 1 / fit_temperature(np.exp(logs), drawn_from(q, rng))
        # Fisher information of 1 / T: the variance of the log probabilities under the forecast
        information = float(((q * logs**2).sum(1) - (q * logs).sum(1) ** 2).sum())
        errors.append((inverse - 1 / truth) * math.sqrt(information))
    assert abs(np.mean(errors)) < 3 / math.sqrt(60)
    assert 0.6 < np.std(errors) < 1.4


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_an_overheated_system_is_cooled_and_the_other_left_alone():
    o = two_systems(1500, 1, hot1=2.5)
    found = fit(o)
    assert kept(found, "p1")[0] == "System 1: one temperature"
    assert not kept(found, "p2")
    assert found.temperatures.p1["*"] == pytest.approx(2.5, rel=0.1)
    (step,) = (s for s in found.steps if s.name == "System 1: one temperature")
    assert step.nll[0] == pytest.approx(metrics.nll(o.p1, o.answer))  # out of fold, nothing is fitted without the step
    assert step.nll[1] < step.nll[0]
    assert step.nll[2] > 0 < step.brier[2]


def test_calibrated_systems_are_left_alone():
    tried = [fit(two_systems(300, seed)) for seed in range(10)]
    assert sum(bool(kept(found, "p1") + kept(found, "p2")) for found in tried) <= 1
    # what was not kept is recorded with its figures
    names = [step.name for step in tried[0].steps]
    assert names[0] == "System 1: one temperature"
    assert all(math.isfinite(step.nll[2]) for step in tried[0].steps if not step.note)


def test_a_cut_thought_is_its_own_class():
    o = two_systems(1200, 2)
    finished = np.arange(o.n)[:, None] % 2 == 0
    p2 = np.where(finished[..., None], o.p2, softmax(6 * np.log(o.p2), axis=-1))
    found = fit(replace(o, p2=p2, finished=finished))
    assert not kept(found, "p2")
    assert found.temperatures.cut["*"] == pytest.approx(6, rel=0.15)
    assert set(found.temperatures.to_dict()) == {"cut"}


def test_few_questions_of_a_kind_lean_on_all_and_how_far_is_said():
    # both kinds have one confidence, 0.9; one is right in 95 of 100 questions, the other in 240 of 400
    few, many = 100, 400
    p = sure(0.9, few + many)
    answer = np.concatenate([answers(95, few), answers(240, many)])
    order = np.random.default_rng(0).permutation(few + many)
    kind = np.array(["noul"] * few + ["choice"] * many, dtype=object)
    o = world(p[order], p[order], answer[order], kind=kind[order])
    found = fit(o)
    assert "System 1: temperature by kind" in kept(found, "p1")
    pooled_share = (335 + START_ROWS * 0.9) / (500 + START_ROWS)
    t = found.temperatures
    assert t.p1["*"] == pytest.approx(logit(0.9) / logit(pooled_share), rel=1e-5)
    for name, right, n in (("noul", 95, few), ("choice", 240, many)):
        share = (right + CELL_ROWS * pooled_share) / (n + CELL_ROWS)
        assert t.p1[name] == pytest.approx(logit(0.9) / logit(share), rel=1e-5)
        (one,) = (c for c in found.cells if (c.stage, c.key) == ("p1", name))
        assert (one.rows, one.own) == (n, n / (n + CELL_ROWS))
    assert float(t.of("p1", "score", 6)) == t.p1["*"]  # a kind that was not seen takes the pooled one


def test_the_log_odds_pool_wins_where_both_systems_know_different_things():
    o = two_systems(1500, 3)
    assert fit(o).pool == "log_odds"  # the product of both is the truth here, whatever the mix of the linear one
    rng = np.random.default_rng(4)
    coin = rng.random(1500) < 0.5  # the answer comes from one of both: then the mean is the truth
    p1, p2 = (rng.dirichlet(np.full(3, 0.3), 1500) for _ in range(2))
    assert fit(world(p1, p2, drawn_from(np.where(coin[:, None], p1, p2), rng))).pool == "linear"


def test_mixing_two_calibrated_forecasts_is_not_calibrated_and_the_step_after_the_mix_repairs_it():
    o = two_systems(6000, 5)
    seen, unseen = o.split(0.5)
    policy = Policy(ALWAYS, 0.5, 8)
    plain = Calibration(Temperatures(), "linear", (), (), seen.n, 0.95)
    found = finish(seen, plain, policy)
    assert kept(found, "final") == ["after the mix: one temperature"]
    assert found.temperatures.final["*"] < 0.9  # the mix lacks confidence
    before, after = (
        stages(unseen, one, rng=np.random.default_rng(0), resamples=200) for one in (policy, found.policy(policy))
    )
    # each system alone is calibrated, to within what 3000 questions can tell
    assert before["p1"].ece.low < 0.01
    assert before["p2"].ece.low < 0.01
    mixed, repaired = before["final"], after["final"]
    assert mixed.mean_top < mixed.accuracy - 0.03
    assert mixed.ece.low > 0.03
    assert repaired.ece.high < mixed.ece.low
    assert repaired.nll < mixed.nll
    assert repaired.brier.brier < mixed.brier.brier
    assert repaired.accuracy == mixed.accuracy  # no answer changes


def test_the_step_after_the_mix_holds_at_its_mix_only():
    o = two_systems(800, 5)
    policy = Policy(ALWAYS, 0.5, 8)
    found = fit(o, policy=policy)
    found = replace(found, temperatures=Temperatures(final={"*": 0.5}), pool="linear", final_mix=0.5)
    assert found.policy(policy).calibration.final == {"*": 0.5}
    assert found.policy(replace(policy, mix=0.4)).temperatures is None
    again = finish(o, found, replace(policy, mix=0.0))
    assert [s.stage for s in again.steps].count("final") == [s.stage for s in found.steps].count("final")


def test_with_few_groups_nothing_is_tried_and_the_note_says_so():
    o = two_systems(400, 6, hot1=4.0, group=[f"g{i % (LEAST_GROUPS - 1)}" for i in range(400)])
    found = fit(o)
    assert found.nothing
    assert all(not step.kept and step.note for step in found.steps)
    assert f"{LEAST_GROUPS - 1} groups" in found.steps[0].note


def test_copies_of_a_question_in_one_group_are_no_evidence():
    o = two_systems(60, 7, hot1=1.35)
    found = fit(o)
    many = np.repeat(np.arange(60), 20)
    copies = fit(replace(o.take(many), group=[f"g{i}" for i in many], ids=[str(i) for i in range(len(many))]))
    alone, copied = found.steps[0], copies.steps[0]
    assert copied.nll[0] == pytest.approx(alone.nll[0])
    assert copied.nll[0] - copied.nll[1] - copied.nll[2] > 0.7 * (alone.nll[0] - alone.nll[1] - alone.nll[2])


def test_the_order_of_the_questions_does_not_matter():
    o = two_systems(300, 8, hot1=2.0)
    turn = np.random.default_rng(0).permutation(o.n)
    one, other = fit(o), fit(o.take(turn))
    assert [s.kept for s in one.steps] == [s.kept for s in other.steps]
    assert one.temperatures.p1["*"] == pytest.approx(other.temperatures.p1["*"], rel=1e-6)


def test_a_calibration_survives_json():
    found = fit(two_systems(300, 9, hot1=2.0), policy=Policy(0.8, 0.5, 8))
    again = Calibration.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert again.to_dict() == found.to_dict()
    assert again.temperatures == found.temperatures
    with pytest.raises(CalibError, match="not a calibration"):
        Calibration.from_dict({"temperatures": {}})


@given(outcomes())
@settings(max_examples=15)
def test_odd_questions_do_no_harm(o):
    found = fit(o, policy=Policy(0.8, 0.5, int(o.budgets[0])))
    assert found.nothing  # far too few
    no_thought = Outcomes(
        o.p1, np.empty((o.n, 0, o.p1.shape[1])), np.empty((o.n, 0)), np.empty((o.n, 0), bool), o.t1,
        np.empty((len(o.arms), o.n, 0)), o.answer, np.empty(0), arms=o.arms, n_options=o.n_options,
    )  # fmt: skip
    assert [step.stage for step in fit(no_thought).steps] == ["p1"] * 4


# --- the rule that serves it ------------------------------------------------------------------------------------------


@st.composite
def temperatures(draw) -> Temperatures:
    number = st.floats(0.3, 5)
    keys = st.sampled_from(["*", "choice", cell("choice", 2), cell("choice", 4), "noul"])
    tables = {stage: draw(st.dictionaries(keys, number, max_size=3)) for stage in ("p1", "p2", "cut", "final")}
    shares = draw(st.dictionaries(st.sampled_from(["p1", "p2", "final"]), st.floats(0, 0.4), max_size=2))
    return Temperatures(**tables, uniform=shares)


@given(outcomes(), temperatures(), st.floats(0, 1.1), st.floats(0, 1), st.sampled_from(CONFIDENCES), st.booleans())
@settings(max_examples=60)
def test_a_policy_with_temperatures_decides_as_a_plain_one_on_calibrated_outcomes(o, t, threshold, mix, how, linear):
    pool = "linear" if linear else "log_odds"
    plain = Policy(threshold, mix, int(o.budgets[-1]), o.arms[0], confidence=how, pool=pool)
    served = decide(o, replace(plain, temperatures=t))
    left = t.only("final")  # acts on answers, and is all that is left to do
    expected = decide(apply(o, t), replace(plain, temperatures=left))
    np.testing.assert_array_equal(served.p, expected.p)
    np.testing.assert_array_equal(served.thinks, expected.thinks)
    np.testing.assert_array_equal(served.latency, expected.latency)
    np.testing.assert_array_equal(served.tokens, expected.tokens)


@given(outcomes(), temperatures(), st.floats(0, 1.1), st.floats(0, 1), st.sampled_from(CONFIDENCES), st.booleans())
@settings(max_examples=60)
def test_the_rule_question_by_question(o, t, threshold, mix, how, linear):
    pool = "linear" if linear else "log_odds"
    policy = Policy(threshold, mix, int(o.budgets[-1]), o.arms[0], confidence=how, pool=pool, temperatures=t)
    d = decide(o, policy)
    for i in range(o.n):
        c = int(o.n_options[i])
        asked = {"kind": str(o.kind[i]), "n_options": c}
        p1, p2 = o.p1[i, :c], o.p2[i, -1, :c]
        doubt = abs(float(confidence(policy.alone(p1, **asked), how)) - threshold) < 1e-9
        thinks = bool(policy.thinks(p1, **asked)) and bool(o.can_think[i])
        assert thinks == d.thinks[i] or doubt
        p = policy.combine(p1, p2, **asked, finished=o.finished[i, -1]) if d.thinks[i] else policy.alone(p1, **asked)
        np.testing.assert_allclose(d.p[i, :c], p, atol=1e-12)
        if not np.isnan(d.p[i]).any():
            assert not d.p[i, c:].any()
            assert d.p[i].sum() == pytest.approx(1)


@given(o=outcomes(max_n=5, failures=False, weighted=False), t=temperatures(), how=st.sampled_from(CONFIDENCES),
       linear=st.booleans(), threshold=st.floats(0, 1.1), mix=st.floats(0, 1))  # fmt: skip
@settings(max_examples=25)
def test_the_gateway_answers_as_the_offline_rule(o, t, how, linear, threshold, mix):
    pool, budget = "linear" if linear else "log_odds", int(o.budgets[-1])
    policy = Policy(threshold, mix, budget, o.arms[0], confidence=how, pool=pool, temperatures=t)
    able = replace(o, can_think=np.ones(o.n, bool), kind=np.array(["choice"] * o.n, dtype=object))
    expected = decide(able, policy)
    for i in range(o.n):
        c = int(o.n_options[i])
        sure_by = float(confidence(policy.alone(o.p1[i, :c], kind="choice", n_options=c), how))
        if abs(sure_by - threshold) < 1e-9:
            continue
        engine = ScriptedEngine(
            p1=o.p1[i, :c], p2=o.p2[i, -1, :c], length=budget if o.finished[i, -1] else budget + 1
        )  # fmt: skip
        gate = Gateway(engine, asyncio.run(engine.info()), policy)
        body = {"kind": "choice", "question": "q", "options": [f"o{j}" for j in range(c)], "debug": True}
        answer = asyncio.run(gate.decide(DecideRequest.model_validate_json(json.dumps(body))))
        assert answer["thinking"]["used"] == expected.thinks[i]
        np.testing.assert_allclose(answer["probabilities"], expected.p[i, :c], atol=1e-12)
        assert answer["thinking"]["system1"] == o.p1[i, :c].tolist()  # as the system gave it


def test_the_gateway_chooses_the_temperature_by_kind_and_number_of_options():
    t = Temperatures(p1={"noul": 2.0, "choice:3-4": 0.5, "score": 4.0})
    engine = ScriptedEngine(p1=lambda q: np.array([0.8, *[0.2 / (len(q.options) - 1)] * (len(q.options) - 1)]))
    gate = Gateway(engine, asyncio.run(engine.info()), Policy(0.0, 0.5, 8, temperatures=t))

    def top(**body):
        request = DecideRequest.model_validate_json(json.dumps({"question": "q"} | body))
        return asyncio.run(gate.decide(request))["probabilities"][0]

    assert top(kind="noul") == pytest.approx(2 / 3)
    assert top(kind="noul", thinking="off") == pytest.approx(2 / 3)  # System 1 alone is calibrated too
    assert top(kind="choice", options=["a", "b"]) == 0.8
    assert top(kind="choice", options=["a", "b", "c"]) == pytest.approx(0.64 / (0.64 + 2 * 0.01))
    assert top(kind="score") == pytest.approx(0.8**0.25 / (0.8**0.25 + 5 * 0.04**0.25))
    told = gate.describe()
    assert told["policy"]["temperatures"] == t.to_dict()
    # what is collected through it without thinking is calibrated: it must not pass for the engine's own answers
    assert told["identity"] == {**engine_identity(engine), "gateway_temperatures": {"p1": dict(t.p1)}}
    plain = Gateway(engine, asyncio.run(engine.info()), Policy(0.0, 0.5, 8, temperatures={"p2": {"*": 2.0}}))
    assert plain.describe()["identity"] == engine_identity(engine)


def engine_identity(engine: ScriptedEngine) -> dict:
    return dict(asyncio.run(engine.info()).identity)


@pytest.mark.parametrize("how", CONFIDENCES)
def test_confidences_by_hand(how):
    p = np.array([[0.6, 0.3, 0.1, 0.0], [0.5, 0.5, 0.0, 0.0]])
    k = np.array([4, 2])
    bits = -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1))
    expected = {"max": [0.6, 0.5], "margin": [0.3, 0.0], "entropy": [1 - bits / math.log(4), 0.0]}[how]
    assert confidence(p, how, k).tolist() == pytest.approx(expected, abs=1e-12)
    assert confidence([0.0, 1.0], how) == 1.0
    # 0 never thinks and 1.1 always does, whatever the definition
    assert not Policy(0.0, confidence=how).thinks(p, n_options=k).any()
    assert Policy(ALWAYS, confidence=how).thinks(p, n_options=k).all()


def test_pools_by_hand():
    p1, p2 = [0.8, 0.2, 0.0], [0.2, 0.8, 0.0]
    assert pooled(p1, p2, 0.25, "linear").tolist() == pytest.approx([0.65, 0.35, 0.0])
    # log-odds 0.75 * ln 4 - 0.25 * ln 4 = ln 2
    assert pooled(p1, p2, 0.25, "log_odds", 2).tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])
    # one system alone rules nothing out: 0 counts as 1e-12
    against = pooled([1.0, 0.0], [0.0, 1.0], 0.5, "log_odds")
    assert against.tolist() == pytest.approx([0.5, 0.5])


@given(outcomes(max_n=8), temperatures(), st.sampled_from(CONFIDENCES))
@settings(max_examples=12)
def test_the_exact_optimum_stays_exact_on_calibrated_probabilities(o, t, how):
    both = t.only("p1", "p2", "cut")
    o2 = apply(o, both)
    found = optimum(tabulate(o2, confidence=how))
    assert found.method == "exact"
    assert found.policy.confidence == how
    served = replace(found.policy, temperatures=both)
    assert evaluate(o, served).accuracy == found.objective
    cuts = candidate_thresholds(confidence(o2.p1[o2.can_think], how, o2.n_options[o2.can_think])) if (
        o2.can_think.any()
    ) else [0.0]  # fmt: skip
    for budget, threshold, mix in product(o.budgets.tolist(), cuts, np.linspace(0, 1, 21)):
        rival = Policy(float(threshold), float(mix), budget, o.arms[0], confidence=how, temperatures=both)
        assert evaluate(o, rival).accuracy <= found.objective + 1e-12


@given(outcomes(max_n=6), st.sampled_from(CONFIDENCES), st.sampled_from(["accuracy", "brier", "nll"]))
@settings(max_examples=6)
def test_the_log_odds_pool_is_searched_on_the_grid_and_says_so(o, how, metric):
    asked = {"maximize": metric} if metric == "accuracy" else {"minimize": metric}
    found = optimum(tabulate(o, confidence=how, pool="log_odds"), **asked)
    assert found.method == "grid"
    if found.policy is None:  # no question with a usable answer
        return
    assert found.policy.pool == "log_odds"
    sign = 1 if metric == "accuracy" else -1
    cuts = candidate_thresholds(confidence(o.p1[o.can_think], how, o.n_options[o.can_think])) if (
        o.can_think.any()
    ) else [0.0]  # fmt: skip
    best = -math.inf
    for budget, threshold, mix in product(o.budgets.tolist(), cuts, GRID.tolist()):
        rival = Policy(float(threshold), mix, budget, o.arms[0], confidence=how, pool="log_odds")
        value = sign * getattr(evaluate(o, rival), metric)
        best = max(best, -math.inf if math.isnan(value) else value)
    assert sign * found.objective == pytest.approx(best, abs=1e-9)
    front = pareto(tabulate(o, confidence=how, pool="log_odds"), "tokens", "accuracy")
    assert all(point.policy.pool == "log_odds" and point.policy.confidence == how for point in front)


def test_the_optimum_over_all_mixes_is_not_known_for_the_log_odds_pool():
    table = tabulate(two_systems(20, 0), pool="log_odds")
    with pytest.raises(ValueError, match="linear pool only"):
        table.whole.best(0)
    with pytest.raises(CalibError, match="pool must be one of"):
        tabulate(two_systems(20, 0), pool="geometric")
    with pytest.raises(CalibError, match="confidence must be one of"):
        tabulate(two_systems(20, 0), confidence="median")
    assert table.only(["base"]).pool == "log_odds"


# --- tuning -----------------------------------------------------------------------------------------------------------


def test_tuning_on_calibrated_probabilities_serves_the_same_decisions():
    o = two_systems(500, 10, hot1=2.0, hot2=5.0)
    tuned = tune(o, Demand(calibrate="auto", resamples=50))
    assert tuned.policy.temperatures is not None
    left = replace(tuned.policy, temperatures=tuned.policy.calibration.only("final"))
    np.testing.assert_array_equal(decide(tuned.tune, tuned.policy).p, decide(tuned.searched, left).p)
    assert tuned.best.objective == pytest.approx(evaluate(tuned.searched, left).accuracy)
    assert any("the threshold means the calibrated confidence" in w for w in tuned.warnings)
    document = tuned.to_dict()
    assert Policy.from_dict(document["policy"]) == tuned.policy
    assert Calibration.from_dict(document["calibration"]).temperatures == tuned.calibration.temperatures
    json.dumps(document, allow_nan=False)
    # the baselines stay what one would serve without tuning
    assert all(one["policy"]["temperatures"] is None for one in document["baselines"].values())


def test_nothing_is_fitted_on_test_questions():
    o = two_systems(250, 11, hot1=2.0, hot2=4.0)
    test = o.test_mask(0.3)
    other = replace(o, answer=np.where(test, (o.answer + 1) % 4, o.answer))
    one, two = (tune(x, Demand(calibrate="auto", resamples=20)) for x in (o, other))
    assert one.policy == two.policy
    assert one.calibration.to_dict() == two.calibration.to_dict()


def test_without_a_gain_the_threshold_keeps_its_meaning():
    o = two_systems(60, 12)
    tuned = tune(o, Demand(calibrate="auto", resamples=20))
    assert tuned.policy.temperatures is None
    assert any("mean what they did" in w for w in tuned.warnings)
    assert tune(o, Demand(resamples=20)).calibration is None
    with pytest.raises(CalibError, match="--calibrate"):
        Demand(calibrate="always")


def test_another_confidence_is_searched_exactly_and_named():
    o = two_systems(300, 13)
    tuned = tune(o, Demand(confidence="margin", resamples=20))
    assert tuned.policy.confidence == "margin"
    assert tuned.best.method == "exact"
    assert any("'margin'" in w for w in tuned.warnings)


def test_recorded_answers_become_calibrated(shared, tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        import_files(store, [shared / "reference" / "h200_base_c128.jsonl.gz"])
        o = load_outcomes(store)
    seen, unseen = o.split(0.3)
    policy = Policy(0.8, 0.5, 600)
    found = fit(seen, policy=policy)
    assert not kept(found, "p1")  # System 1 was trained to be calibrated
    assert kept(found, "cut")  # a cut thought is sure and wrong
    assert found.temperatures.cut["*"] > 10
    short = Policy(ALWAYS, 0.5, 16)
    before, after = (
        stages(unseen, one, rng=np.random.default_rng(0), resamples=50)
        for one in (short, finish(seen, found, short).policy(short))
    )
    assert after["p2"].nll < before["p2"].nll - 1
    assert after["p2"].ece.high < before["p2"].ece.low
    assert after["final"].nll < before["final"].nll - 0.2


# --- export -----------------------------------------------------------------------------------------------------------


def document(policy: Policy) -> dict:
    return {"name": "best", "verdict": "met", "policy": policy.to_dict()}


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(confidence="margin"), "'margin'"),
        (Policy(pool="log_odds"), "linearly"),
        (Policy(temperatures={"p2": {"*": 2.0}}), "System 2 after a finished thought"),
        (Policy(temperatures={"cut": {"*": 2.0}}), "System 2 after a cut thought"),
        (Policy(temperatures={"final": {"*": 2.0}}), "after the mix"),
        (Policy(temperatures={"uniform": {"p1": 0.1}}), "uniform"),
        (Policy(temperatures={"p1": {"choice": 2.0, "choice:2": 3.0}}), "choice by number of options"),
    ],
)
def test_serve_env_is_refused_with_the_reason(tmp_path, policy, reason):
    with pytest.raises(CalibError, match=reason):
        serve_env(policy)
    for name in ("serve.env", "decide-defaults.json", "calibration.json"):
        (tmp_path / name).write_text("of an earlier policy")
    result = export(document(policy), tmp_path)
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {"policy.json", "vllm.yaml", "README.md"}
    assert reason in result.refused[0]
    assert any(reason in warning for warning in result.warnings)
    assert not result.done
    assert {k.holder for k in result.knobs if k.knob != "arm"} == {"nobody"}
    by_gateway = export(document(policy), tmp_path, held_by="gateway")
    assert by_gateway.done
    assert load_policy_file(tmp_path / "policy.json") == policy


def test_temperatures_of_system_1_by_kind_go_to_the_server_on_top_of_its_own(tmp_path):
    policy = Policy(0.7, 0.4, 512, temperatures={"p1": {"*": 1.1, "noul": 1.5, "noul:2": 1.5}})
    own = {"noul": 1.003, "choice": 1.017, "score": 0.999}
    origin = Provenance({"protocol": "jev27-bare-v1", "temperatures": own})
    assert refusals(policy) == ()
    assert calibration_json(policy, own) == pytest.approx({"noul": 1.5045, "choice": 1.1187, "score": 1.0989})
    result = export(document(policy), tmp_path, origin=origin)
    assert set(result.files) == {"policy.json", "serve.env", "decide-defaults.json", "calibration.json", "README.md"}
    assert json.loads((tmp_path / "calibration.json").read_text()) == calibration_json(policy, own)
    assert "JEV_DECIDE_CALIBRATION=calibration.json" in (tmp_path / "serve.env").read_text()
    assert {k.knob: k.holder for k in result.knobs}["temperatures"] == "server"
    # a gateway applies them itself: the server must not do it as well
    result = export(document(policy), tmp_path, held_by="gateway", origin=origin)
    assert not (tmp_path / "calibration.json").exists()
    assert "JEV_DECIDE_CALIBRATION" not in (tmp_path / "serve.env").read_text()
    assert {k.knob: k.holder for k in result.knobs}["temperatures"] == "gateway"
    # what the server's own are is not guessed
    result = export(document(policy), tmp_path)
    assert "serve.env" not in result.files
    assert "noul, choice, score is not known" in result.refused[0]


def test_the_file_names_the_confidence_that_it_means(tmp_path):
    policy = Policy(confidence="entropy", temperatures={"p1": {"*": 2.0}})
    export(document(policy), tmp_path, held_by="gateway")
    told = json.loads((tmp_path / "policy.json").read_text())["confidence_definition"]
    assert told.startswith("1 - entropy(p1) / ln(number of options)")
    assert told.endswith("after the temperatures of System 1")

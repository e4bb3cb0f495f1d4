"""The simulated engine: one trace for all budgets, quotas met exactly, the same answers everywhere."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib import metrics
from calib.engine.base import AskFailed
from calib.engine.profiles import option_counts
from calib.engine.quotas import Reference, SetPlan, build, lengths_by_rank
from calib.engine.simulated import CONTEXT_TOKENS, PROFILES, SimulatedEngine, answer_key, load_profile
from calib.engine.texts import generate
from calib.engine.traces import Traces
from calib.errors import CalibError
from calib.policy import Policy, decide, evaluate
from calib.questions import Question

LADDER = [64, 512, 2048, 8192, CONTEXT_TOKENS]


@pytest.fixture(scope="module")
def validation():
    return load_profile("gev-validation")


@pytest.fixture(scope="module")
def knowledge():
    return load_profile("gev-knowledge")


def ask(engine, question, budgets=LADDER, **kwargs):
    return asyncio.run(engine.ask(question, budgets, **kwargs))


# --- deadlines


def test_a_deadline_closes_the_thought_in_simulated_seconds(validation):
    engine = SimulatedEngine(validation)
    question = next(q for q in validation.questions() if ask(engine, q).tokens[-1] >= 4000)
    whole = ask(engine, question)
    left = float(whole.t2[2]) + 1e-6  # the third budget ends just in time
    closed = ask(engine, question, deadline=whole.t1 + left, keep_text=True)
    assert closed.closed
    assert "deadline" in closed.text
    cut = int(closed.tokens[-1])
    assert cut == LADDER[2]
    assert closed.tokens.tolist() == [min(cut, b) for b in LADDER]
    assert not closed.finished.any()
    assert closed.p2[:3] == pytest.approx(whole.p2[:3])
    assert (closed.p2[3:] == closed.p2[2]).all()
    assert closed.t1 + closed.t2[-1] <= whole.t1 + left
    without = ask(engine, question, system1=False, deadline=left)
    assert without.tokens.tolist() == closed.tokens.tolist()
    late = ask(engine, question, deadline=1e6)
    assert (late.tokens.tolist(), late.closed) == (whole.tokens.tolist(), False)


def test_a_deadline_that_leaves_no_token_is_a_failure(validation):
    engine = SimulatedEngine(validation)
    assert asyncio.run(engine.info()).keeps_deadline
    question = validation.questions()[0]
    with pytest.raises(AskFailed) as caught:
        ask(engine, question, deadline=0.05)
    assert (caught.value.reason, caught.value.stage, caught.value.seconds) == ("deadline", "system2", 0.05)
    assert ask(engine, question, (), deadline=0.001).p1 is not None  # only thoughts are closed


# --- one trace, by hand


def one_row(**changes) -> Traces:
    """A question with three options: System 1 says 0, the finished thought (1,000 tokens) says 2, late cuts say 1."""
    row = {
        "p1": np.array([[0.6, 0.3, 0.1]]),
        "n_options": np.array([3]),
        "key": np.array([2]),
        "length": np.array([1000]),
        "final": np.array([2]),
        "leaning": np.array([1]),
        "turns": np.array([500]),
        "sure_final": np.array([0.9]),
        "sure_cut": np.array([0.8]),
        "jitter": np.zeros((1, 2)),
    }
    return Traces(**(row | changes))


def test_a_cut_thought_reads_system1s_answer_then_its_leaning_then_the_final_one_by_hand():
    p2, tokens, finished = one_row().read(np.array([0]), np.array([499, 500, 999, 1000, 1001]))
    assert tokens.tolist() == [[499, 500, 999, 1000, 1000]]
    assert finished.tolist() == [[False, False, False, True, True]]
    # cut: 0.2 * p1 + 0.8 on the option; finished: 0.1 * p1 + 0.9 on the option
    assert p2[0] == pytest.approx(
        np.array([[0.92, 0.06, 0.02], [0.12, 0.86, 0.02], [0.12, 0.86, 0.02], [0.06, 0.03, 0.91], [0.06, 0.03, 0.91]])
    )


def test_lengths_pass_through_their_knots_log_linearly():
    # halfway between 100 and 400 in logs is 200
    assert lengths_by_rank(5, [(1, 100), (3, 400), (5, 1600)]).tolist() == [100, 200, 400, 800, 1600]
    with pytest.raises(ValueError, match="ascend"):
        lengths_by_rank(5, [(1, 100), (3, 90)])


def test_option_counts_meet_a_chance_by_hand():
    # halves and quarters average 0.4 when 60 % are halves: 0.6 * 0.5 + 0.4 * 0.25
    counts = option_counts(10, (2, 4), 40.0)
    assert counts.tolist() == [2] * 6 + [4] * 4


# --- quotas


def plan(**changes) -> SetPlan:
    n = 40
    values = {
        "name": "toy",
        "n_options": np.full(n, 4),
        "key": np.arange(n) % 4,
        "think": 20,
        "kept_right": 18,
        "system1": 26,
        "adaptive": 30,
        "always": 31,
        "harm": 0.1,
        "lengths": np.arange(100, 2100, 100),
    }
    return SetPlan(**(values | changes))


TOY = Reference(0.8, 0.5, 1500)


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_every_seed_meets_the_quotas_by_the_exact_rule(seed):
    p = plan()
    traces = build([p], TOY, seed=(seed,))
    p2, _, _ = traces.read(np.arange(40), np.array([1500]))
    thinks = traces.p1.max(1) < 0.8
    mixed = 0.5 * traces.p1 + 0.5 * p2[:, 0]
    final = np.where(thinks[:, None], mixed, traces.p1)
    assert thinks.sum() == 20
    assert (traces.p1.argmax(1) == p.key).sum() == 26
    assert (final.argmax(1) == p.key).sum() == 30
    assert (mixed.argmax(1) == p.key).sum() == 31
    assert np.sort(traces.length[thinks]).tolist() == p.lengths.tolist()
    assert traces.p1.sum(1) == pytest.approx(np.ones(40))
    assert (np.sort(traces.p1, axis=1)[:, -1] > np.sort(traces.p1, axis=1)[:, -2]).all()


def test_cut_thoughts_are_right_only_where_the_quota_forces_it():
    # 5 of 20 thoughts are cut at 1,500; the 15 others cannot make 19 right answers among those that think
    forced = build([plan(adaptive=18 + 19, always=None)], TOY, seed=(1,))
    free = build([plan(always=None)], TOY, seed=(1,))
    for traces, gains in ((forced, True), (free, False)):
        cut = (traces.length > 1500) & (traces.p1.max(1) < 0.8)
        p2, _, _ = traces.read(np.flatnonzero(cut), np.array([1500]))
        before = traces.p1[cut].argmax(1) == traces.key[cut]
        after = p2[:, 0].argmax(1) == traces.key[cut]
        assert (after & ~before).any() == gains


def test_an_impossible_quota_is_refused():
    with pytest.raises(ValueError, match="toy"):
        build([plan(kept_right=18, system1=18 + 21)], TOY, seed=(0,))
    with pytest.raises(ValueError, match="cannot be met"):
        build([plan(always=40)], TOY, seed=(0,))


# --- both profiles


@pytest.mark.parametrize("name", PROFILES)
def test_budgets_cut_one_thought(name):
    profile = load_profile(name)
    o, traces = profile.outcomes(LADDER, arms=["base"]), profile.traces()
    assert (o.tokens == np.minimum(traces.length[:, None], LADDER)).all()
    assert (o.finished == (traces.length[:, None] <= LADDER)).all()
    assert (np.diff(o.finished.astype(int), axis=1) >= 0).all()
    assert o.finished[:, -1].all()  # the context is room enough for every thought
    at_budget, at_most = o.p2[:, 3], o.p2[:, 4]
    assert (at_budget[o.finished[:, 3]] == at_most[o.finished[:, 3]]).all()


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("seed", [0, 3])
def test_system2_is_sure_and_a_cut_thought_no_better_than_system1(name, seed):
    profile = load_profile(name)
    o = profile.outcomes(LADDER, arms=["base"], seed=seed)
    free = o.dataset != "GPQA Diamond (simulated)"  # its published gain needs right answers of cut thoughts
    right1, thinks = o.p1.argmax(1) == o.answer, o.p1.max(1) < 0.8
    for b in range(len(LADDER)):
        cut, ended = ~o.finished[:, b] & free, o.finished[:, b] & thinks
        if ended.any():
            assert 0.96 <= o.p2[ended, b].max(1).mean() <= 0.99
        if cut.any():
            right2 = o.p2[cut, b].argmax(1) == o.answer[cut]
            assert right1[cut].mean() - 0.03 <= right2.mean() <= right1[cut].mean()
            assert o.p2[cut, b].max(1).mean() > 0.9 > right2.mean()  # over-confident


@pytest.mark.parametrize("name", PROFILES)
def test_thinking_fixes_and_breaks_and_takes_longer_in_doubt(name):
    profile = load_profile(name)
    o, traces = profile.outcomes([8192], arms=["base"]), profile.traces()
    d = decide(o, Policy())
    before, after = o.p1.argmax(1) == o.answer, d.choice == o.answer
    for dataset in o.dataset_names:
        here = (o.dataset == dataset) & d.thinks
        assert (~before & after & here).any(), dataset
        assert (before & ~after & here).any(), dataset
    confidence = o.p1.max(1)
    rank = np.corrcoef(np.argsort(np.argsort(confidence)), np.argsort(np.argsort(traces.length)))[0, 1]
    assert rank < -0.3
    values, counts = np.unique(confidence, return_counts=True)
    assert counts.max() <= 3
    assert len(values) > 0.99 * o.n


def test_validation_thoughts_hurt_commonsenseqa_and_help_aqua(validation):
    o = validation.outcomes([8192], arms=["base"])
    gains = {}
    for name in o.dataset_names:
        part = o.select([name])
        gains[name] = evaluate(part, Policy()).accuracy - evaluate(part, Policy(threshold=0)).accuracy
    assert gains["CommonsenseQA (simulated)"] < 0
    assert gains["AQuA-RAT (simulated)"] > 0.2


def test_another_seed_is_another_model_with_the_same_figures(validation):
    scores = []
    for seed in (0, 1, 2):
        o = validation.outcomes([8192], seed=seed)
        e, s1 = evaluate(o, Policy()), evaluate(o, Policy(threshold=0))
        scores.append((e.accuracy, e.think_rate, s1.accuracy))
        assert e.ece == pytest.approx(0.035, abs=0.005)
        assert s1.ece == pytest.approx(0.035, abs=0.005)
        assert e.ece == metrics.ece(decide(o, Policy()).p, o.answer)
    assert scores[0] == scores[1] == scores[2]
    assert not np.array_equal(validation.traces(0).p1, validation.traces(1).p1)
    prints = {json.dumps(asyncio.run(SimulatedEngine(validation, seed=s).info()).identity) for s in (0, 1)}
    assert len(prints) == 2


def test_questions_are_generated_marked_and_carry_a_recomputable_key(validation, knowledge):
    for profile, total in ((validation, 1754), (knowledge, 33846)):
        questions = profile.questions()
        assert len(questions) == total
        assert len({q.question for q in questions}) == total
        assert len({(q.dataset, q.id) for q in questions}) == total
        for q in questions[:: total // 500]:
            assert q.dataset.endswith(" (simulated)")
            assert len(set(q.options)) == len(q.options)
            assert q.answer == answer_key(q.question, len(q.options))
            assert q.options == ("false", "true") or q.kind == "choice"
    assert {q.kind for q in validation.questions()} == {"choice", "noul"}
    # 255 options, the most a question may have, still differ
    assert len(set(generate("wide", "choice", [255])[0].options)) == 255


def test_the_answer_key_is_pinned():
    # blake2b with 8 bytes, big-endian, modulo the number of options: the same on every machine, for ever
    assert [answer_key("Which?", n) for n in (2, 3, 5, 255)] == [0, 0, 0, 150]


def test_answers_do_not_depend_on_the_process():
    code = (
        "import hashlib\n"
        "from calib.engine.simulated import load_profile\n"
        "p = load_profile('gev-validation')\n"
        "t = p.traces(4)\n"
        "print(hashlib.sha256(t.p1.tobytes() + t.length.tobytes() + t.final.tobytes() + "
        "repr(p.questions()).encode()).hexdigest())\n"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": h}, capture_output=True, text=True, check=True
        ).stdout
        for h in ("1", "2")
    }
    assert len(runs) == 1


# --- the engine


def test_ask_gives_what_the_arrays_hold(validation):
    engine = SimulatedEngine(validation)
    o = validation.outcomes(LADDER)
    questions = validation.questions()
    for i in range(0, o.n, 97):
        answer = ask(engine, questions[i])
        n = o.n_options[i]
        assert answer.budgets == tuple(LADDER)
        assert (answer.p1 == o.p1[i, :n]).all()
        assert (answer.p2 == o.p2[i, :, :n]).all()
        assert (answer.tokens == o.tokens[i]).all()
        assert (answer.finished == o.finished[i]).all()
        assert answer.t1 == o.t1[0, i]
        assert answer.t2 == pytest.approx(o.t2[0, i], rel=1e-12)
        alone = ask(engine, questions[i], [2048], system1=False)
        assert alone.p1 is None
        assert np.isnan(alone.t1)
        assert (alone.p2[0] == answer.p2[2]).all()


def test_arms_share_answers_and_differ_in_seconds(validation):
    base, mtp = (SimulatedEngine(validation, arm=arm) for arm in ("base", "mtp"))
    for q in validation.questions()[::150]:
        a, b = ask(base, q), ask(mtp, q)
        assert (a.p1 == b.p1).all()
        assert (a.p2 == b.p2).all()
        assert (a.tokens == b.tokens).all()
        assert a.t1 < b.t1
        assert (a.t2 > b.t2).all()
        # thought at 250 or 438 tokens/s, then a read of about 45 ms
        assert a.t2 == pytest.approx(a.tokens / 250 + 0.045, abs=0.002)
        assert b.t2 == pytest.approx(b.tokens / 438 + 0.045, abs=0.002)
        assert sum(a.stages.values()) == pytest.approx(a.t2[-1])
    infos = [asyncio.run(engine.info()) for engine in (base, mtp)]
    assert infos[0].identity == infos[1].identity  # one model, two ways of serving
    o = validation.outcomes([8192])
    assert np.median(o.t1, axis=1) == pytest.approx([0.045, 0.050], abs=0.0005)


def test_info_has_the_fields_of_the_reference_server_and_says_simulated(validation):
    info = asyncio.run(SimulatedEngine(validation, seed=2).info())
    assert info.simulated
    assert (info.threshold, info.mix) == (0.8, 0.5)
    assert "(simulated)" in info.model
    fields = ["protocol", "model", "model_type", "max_options", "native_choice_options", "temperatures", "defaults"]
    assert [*fields, "reasoning_controls", "simulated", "profile"] == list(info.raw)[:10]
    assert info.raw["simulated"] is True
    assert info.raw["defaults"]["think_budget"] is None
    assert info.identity["protocol"] == "jev27-bare-v1"
    assert info.identity["seed"] == 2
    assert not {"threshold", "mix", "arm"} & set(info.identity)
    json.dumps([info.identity, info.raw])


def test_an_unknown_question_gets_the_generic_profile(validation):
    engine = SimulatedEngine(validation)
    known = validation.questions()[0]
    unknown = Question("x", "mine", "choice", "", "Which of these?", ("a", "b", "c"))
    first, again = ask(engine, unknown), ask(engine, replace(unknown, id="y", dataset="other"))
    assert (first.p1 == again.p1).all()
    assert (first.p2 == again.p2).all()
    assert first.p1.sum() == pytest.approx(1)
    assert first.p2.sum(1) == pytest.approx(np.ones(len(LADDER)))
    assert (first.tokens == np.minimum(first.tokens[-1], LADDER)).all()
    assert first.finished[-1]
    # a known text with other options, state or kind is another question
    for other in (replace(known, state="changed"), replace(known, options=known.options[::-1])):
        assert not np.array_equal(ask(engine, other).p1, ask(engine, known).p1)
    assert not np.array_equal(ask(SimulatedEngine(validation, seed=1), unknown).p1, first.p1)
    assert "hash" in asyncio.run(engine.info()).raw["unknown_question"]


@given(st.integers(2, 256), st.text(max_size=20), st.integers(1, CONTEXT_TOKENS))
@settings(max_examples=50)
def test_generic_answers_are_distributions_with_a_clear_winner(n, text, budget):
    question = Question("x", "mine", "choice", text, "?", tuple(map(str, range(n))))
    answer = ask(SimulatedEngine(load_profile("gev-validation")), question, [budget])
    for p in (answer.p1, answer.p2[0]):
        assert p.sum() == pytest.approx(1)
        assert (p >= 0).all()
        assert (np.sort(p)[-1] > np.sort(p)[-2]) or n == 1
    assert answer.tokens[0] <= budget


def test_score_has_system1_but_no_thought(validation):
    engine = SimulatedEngine(validation)
    score = Question("x", "mine", "score", "", "How good?", ("0", "1", "2", "3", "4", "5"))
    assert ask(engine, score, []).p2.shape == (0, 6)
    with pytest.raises(AskFailed, match="score") as failed:
        ask(engine, score, [8192])
    assert failed.value.reason == "refused"


@pytest.mark.parametrize("budgets", [[0], [-5, 100]])
def test_a_budget_below_one_token_is_refused(validation, budgets):
    with pytest.raises(AskFailed, match="1 token"):
        ask(SimulatedEngine(validation), validation.questions()[0], budgets)


def test_too_many_options_are_refused(validation):
    question = Question("x", "mine", "choice", "", "?", tuple(map(str, range(257))))
    with pytest.raises(AskFailed, match="257"):
        ask(SimulatedEngine(validation), question, [])


def test_budgets_come_back_ascending_and_once(validation):
    answer = ask(SimulatedEngine(validation), validation.questions()[0], [4096, 256, 4096])
    assert answer.budgets == (256, 4096)


def test_time_scale_sleeps_that_share_of_the_seconds(validation):
    engine = SimulatedEngine(validation, time_scale=1.0)
    start = time.perf_counter()
    answer = ask(engine, validation.questions()[0], [25])  # 25 tokens at 250/s: 0.1 s, and two passes of 45 ms
    assert time.perf_counter() - start >= answer.t1 + answer.t2[0] > 0.18


def test_text_is_a_stated_stand_in(validation):
    engine = SimulatedEngine(validation)
    text = ask(engine, validation.questions()[0], [1], keep_text=True).text
    assert text is not None
    assert "simulated" in text
    assert "cut" in text
    assert ask(engine, validation.questions()[0], [1]).text is None


def test_wrong_arguments_say_what_to_type(validation):
    with pytest.raises(CalibError, match="gev-validation"):
        load_profile("gev")
    with pytest.raises(CalibError, match="base, mtp"):
        SimulatedEngine(validation, arm="fast")
    for scale in (-0.1, 1.5, float("nan")):
        with pytest.raises(CalibError, match="--time-scale"):
            SimulatedEngine(validation, time_scale=scale)
    with pytest.raises(CalibError, match="seed"):
        SimulatedEngine(validation, seed=-1)

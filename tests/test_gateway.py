"""What a request is answered with: by hand, against the offline rule, and what is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from calib.engine import Answer, AskFailed, EngineInfo, ServerBusy
from calib.gateway import BadRequest, DecideAnswer, DecideRequest, Gateway, System2Answer, Thinking, policy_version
from calib.policy import Policy, Route, decide
from calib.questions import text_hash
from tests.scripted import ScriptedEngine
from tests.strategies import outcomes

CHOICE = {"kind": "choice", "state": "s", "question": "q", "options": ["red", "green", "blue"]}


def request(**fields) -> DecideRequest:
    return DecideRequest.model_validate_json(json.dumps(CHOICE | fields))


def gateway(engine: ScriptedEngine | None = None, policy: Policy | None = None, **options) -> Gateway:
    engine = engine or ScriptedEngine()
    return Gateway(engine, asyncio.run(engine.info()), policy, **options)


def ask(gate: Gateway, **fields):
    return asyncio.run(gate.decide(request(**fields)))


# --- answers by hand --------------------------------------------------------------------------------------------------


def test_off_is_system_1_alone_and_says_nothing_of_thinking():
    engine = ScriptedEngine()
    answer = ask(gateway(engine), thinking="off")
    assert answer == {
        "kind": "choice",
        "effective_kind": "choice",
        "options": ("red", "green", "blue"),
        "probabilities": [0.7, 0.2, 0.1],
        "choice_index": 0,
        "choice": "red",
        "adaptation": "native",
        "protocol": "jev27-bare-v1",
        "model": "scripted",
        # characters: s + q + red + green + blue = 14, a token for each 4 and one more
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
        "elapsed_seconds": 0.05,
        "num_model_requests": 1,
    }
    assert [(budgets, system1) for _, budgets, system1, _ in engine.asked] == [((), True)]


def test_auto_thinks_below_the_threshold_under_the_policy():
    engine = ScriptedEngine()
    answer = ask(gateway(engine, Policy(threshold=0.75, mix=0.4, think_budget=512)), thinking="auto")
    # 0.6 * [0.7, 0.2, 0.1] + 0.4 * [0.1, 0.8, 0.1]
    assert answer["probabilities"] == pytest.approx([0.46, 0.44, 0.1], abs=1e-15)
    assert (answer["choice_index"], answer["choice"], answer["num_model_requests"]) == (0, "red", 3)
    # a thought of 600 tokens, cut at 512, a second per 100 tokens
    assert answer["thinking"] == {
        "mode": "auto",
        "threshold": 0.75,
        "budget": 512,
        "used": True,
        "think_tokens": 512,
        "think_seconds": 5.12,
        "finished_within_budget": False,
    }
    assert answer["elapsed_seconds"] == pytest.approx(0.05 + 5.12)
    # prompts: 4 for System 1, 4 for the thought, 4 + 512 for the answer read; completions: 1 + 512 + 1
    assert answer["usage"] == {"prompt_tokens": 524, "completion_tokens": 514, "total_tokens": 1038}
    assert [(budgets, system1) for _, budgets, system1, _ in engine.asked] == [((), True), ((512,), False)]


@pytest.mark.parametrize(("threshold", "used"), [(0.7, False), (0.7000001, True), (0, False), (1.1, True)])
def test_a_confidence_that_equals_the_threshold_stays(threshold, used):
    answer = ask(gateway(), thinking="auto", threshold=threshold)
    assert answer["thinking"]["used"] is used
    assert set(answer["thinking"]) >= {"mode", "threshold", "budget"}
    assert ("think_tokens" in answer["thinking"]) is used


def test_without_a_policy_the_servers_defaults_hold_and_the_thought_may_fill_the_context():
    engine = ScriptedEngine()
    answer = ask(gateway(engine, context_tokens=1000), thinking="auto")
    # threshold 0.8 and mix 0.5 of the engine: (0.7 + 0.1) / 2, (0.2 + 0.8) / 2
    assert answer["probabilities"] == pytest.approx([0.4, 0.5, 0.1], abs=1e-15)
    assert answer["choice"] == "green"
    assert answer["thinking"]["threshold"] == 0.8
    assert answer["thinking"]["budget"] is None
    assert answer["thinking"]["finished_within_budget"] is True
    assert engine.asked[1][1] == (1000,)


def test_the_requests_threshold_and_budget_win_over_the_policy_and_its_mix_does_not_exist():
    engine = ScriptedEngine()
    gate = gateway(engine, Policy(threshold=0.1, mix=0.4, think_budget=512))
    assert ask(gate)["thinking"] == {"mode": "auto", "threshold": 0.1, "budget": 512, "used": False}
    answer = ask(gate, threshold=0.9, think_budget=100, mix=1.0)
    assert answer["thinking"]["threshold"] == 0.9
    assert answer["thinking"]["budget"] == answer["thinking"]["think_tokens"] == 100
    assert answer["probabilities"] == pytest.approx([0.46, 0.44, 0.1], abs=1e-15)


def test_a_budget_beyond_the_context_is_shown_as_sent_and_asked_as_the_context():
    engine = ScriptedEngine()
    answer = ask(gateway(engine, context_tokens=1000), thinking="on", think_budget=10**30)
    assert answer["thinking"]["budget"] == 10**30
    assert engine.asked[1][1] == (1000,)


def test_on_thinks_whatever_the_confidence_and_debug_shows_both_systems():
    answer = ask(gateway(policy=Policy(threshold=0.0, mix=1.0, think_budget=8192)), thinking="on", debug=True)
    assert answer["probabilities"] == answer["thinking"]["system2"] == [0.1, 0.8, 0.1]
    assert answer["thinking"]["system1"] == [0.7, 0.2, 0.1]
    assert answer["thinking"]["mode"] == "on"
    assert answer["thinking"]["finished_within_budget"] is True
    assert "reasoning" not in answer["thinking"]


def test_debug_without_a_thought_shows_system_1_only():
    thinking = ask(gateway(), thinking="auto", threshold=0.5, debug=True)["thinking"]
    assert thinking == {"mode": "auto", "threshold": 0.5, "budget": None, "used": False, "system1": [0.7, 0.2, 0.1]}


def test_reasoning_is_returned_when_asked_for():
    assert ask(gateway(), thinking="on", return_reasoning=True)["thinking"]["reasoning"] == "a thought"


def test_chat_template_kwargs_are_echoed_without_the_switch():
    kwargs = {"enable_thinking": False, "style": "brief"}
    assert ask(gateway(), chat_template_kwargs=kwargs)["thinking"]["chat_template_kwargs"] == {"style": "brief"}
    assert "chat_template_kwargs" not in ask(gateway(), chat_template_kwargs={"enable_thinking": 1})["thinking"]


def test_system2_only_skips_system_1():
    engine = ScriptedEngine()
    answer = ask(gateway(engine, Policy(mix=0.3, think_budget=512)), system2_only=True)
    assert answer == {
        "kind": "choice",
        "options": ("red", "green", "blue"),
        "probabilities": [0.1, 0.8, 0.1],
        "choice_index": 1,
        "choice": "green",
        "system": 2,
        "model": "scripted",
        "thinking": {
            "used": True,
            "budget": 512,
            "think_tokens": 512,
            "think_seconds": 5.12,
            "finished_within_budget": False,
        },
        "usage": {"prompt_tokens": 4 + 4 + 512, "completion_tokens": 513},
        "elapsed_seconds": 5.12,
        "num_model_requests": 2,
    }
    assert [(budgets, system1) for _, budgets, system1, _ in engine.asked] == [((512,), False)]


def test_noul_and_score_have_their_own_options_whatever_is_sent():
    noul = ask(gateway(ScriptedEngine(p1=(0.4, 0.6), p2=(0.9, 0.1))), kind="noul", thinking="off")
    assert (noul["options"], noul["choice"]) == (("false", "true"), "true")
    score = ask(gateway(ScriptedEngine(p1=(0.1, 0.1, 0.1, 0.5, 0.1, 0.1))), kind="score", options=None)
    assert (score["options"], score["choice"], score["choice_index"]) == (("0", "1", "2", "3", "4", "5"), "3", 3)
    assert "thinking" not in score  # "default" is off for score; only auto and on are refused


def test_score_thinks_where_the_engine_can():
    p1, p2 = (0.1, 0.1, 0.1, 0.5, 0.1, 0.1), (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    able = gateway(ScriptedEngine(p1=p1, p2=p2, thinks_about_scores=True))
    for fields in ({"thinking": "auto"}, {}):
        answer = ask(able, kind="score", options=None, **fields)
        assert answer["thinking"]["used"]
        assert answer["choice"] == "5"
    assert ask(able, kind="score", options=None, system2_only=True)["probabilities"] == list(p2)
    assert "thinking" not in ask(able, kind="score", options=None, thinking="off")


def test_equal_probabilities_go_to_the_first_option():
    assert ask(gateway(ScriptedEngine(p1=(0.2, 0.4, 0.4))), thinking="off")["choice_index"] == 1


@pytest.mark.parametrize(
    ("n", "fields", "name"),
    [
        (16, {"strategy": "permute"}, "native"),
        (17, {}, "tournament"),
        (17, {"strategy": "single"}, "single"),
        (256, {"strategy": "permute"}, "permute"),
    ],
)
def test_a_strategy_is_named_above_16_options(n, fields, name):
    engine = ScriptedEngine(p1=[1 / n] * n, raw={"defaults": {"strategy": "tournament"}})
    options = [f"o{i}" for i in range(n)]
    assert ask(gateway(engine), thinking="off", options=options, **fields)["adaptation"] == name


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        ({"b": 1, "a": ["é", None]}, '{"b":1,"a":["é",null]}'),
        (["one", {"type": "text", "text": "two"}, {"k": 2.5}, 3, ["x"]], 'one\ntwo\n{"k":2.5}\n3\n["x"]'),
        (7, "7"),
        (True, "true"),
    ],
)
def test_the_state_becomes_text(state, text):
    engine = ScriptedEngine()
    ask(gateway(engine), state=state, thinking="off", dataset="d")
    question = engine.asked[0][0]
    assert (question.state, question.dataset, question.kind, question.question) == (text, "d", "choice", "q")
    assert question.answer is None


def test_routes_look_at_dataset_kind_and_number_of_options():
    routes = {"dataset=a": Route(threshold=0.0), "kind=noul": Route(think_budget=64), "n_options=3": Route(1.1, 256)}
    gate = gateway(policy=Policy(0.9, 0.5, 512, routes=routes))
    assert ask(gate, dataset="a")["thinking"]["threshold"] == 0.0
    three = ask(gate, dataset="b")["thinking"]
    assert (three["threshold"], three["budget"]) == (1.1, 256)
    assert ask(gate, dataset="b", think_budget=7)["thinking"]["budget"] == 7
    two = gateway(ScriptedEngine(p1=(0.6, 0.4), p2=(1, 0)), gate.policy)
    assert ask(two, kind="noul")["thinking"]["budget"] == 64
    assert ask(two, options=["x", "y"])["thinking"]["budget"] == 512


def test_seconds_of_a_real_engine_are_measured():
    class Slow(ScriptedEngine):
        async def ask(self, *args, **kwargs):
            await asyncio.sleep(0.02)
            answer = await super().ask(*args, **kwargs)
            return replace(answer, t2=np.full(len(answer.budgets), np.nan))

    answer = ask(gateway(Slow(simulated=False)), thinking="on")
    assert 0.04 <= answer["elapsed_seconds"] < 2  # not the 0.05 + 6 that the engine tells
    assert 0.02 <= answer["thinking"]["think_seconds"] < answer["elapsed_seconds"]


def test_every_field_that_is_answered_is_documented():
    full = ask(gateway(), thinking="on", debug=True, return_reasoning=True, chat_template_kwargs={"a": 1})
    assert set(full) == set(DecideAnswer.model_fields)
    assert set(full["thinking"]) == set(Thinking.model_fields)
    DecideAnswer.model_validate(full)
    small = ask(gateway(), system2_only=True)
    assert set(small) == set(System2Answer.model_fields)
    System2Answer.model_validate(small)


# --- the same as offline ----------------------------------------------------------------------------------------------


@given(
    outcomes(weighted=False),
    st.floats(0, 1.1) | st.sampled_from([1 / 3, 0.5]),
    st.floats(0, 1),
    st.booleans(),
    st.data(),
)
@settings(max_examples=60)
def test_the_gateway_answers_as_the_offline_rule(o, threshold, mix, routed, data):
    budgets = o.budgets.tolist()
    budget, arm = data.draw(st.sampled_from(budgets)), data.draw(st.sampled_from(o.arms))
    routes = {"dataset=a": Route(1 - threshold if threshold < 1 else 0.0, budgets[-1]), "n_options=2": Route(1.1)}
    policy = Policy(threshold, mix, budget, arm, routes=routes if routed else {})
    expected = decide(o, policy)
    a = o.arm_index(arm)

    class Recorded(ScriptedEngine):
        """Each question's text is its row."""

        async def ask(self, question, budgets, *, system1=True, keep_text=False):
            i, b = int(question.question), [o.budget_index(x) for x in budgets]
            n = o.n_options[i]
            return Answer(
                p1=o.p1[i, :n] if system1 else None,
                t1=o.t1[a, i],
                budgets=tuple(budgets),
                p2=o.p2[i, b][:, :n],
                tokens=o.tokens[i, b],
                finished=o.finished[i, b],
                t2=o.t2[a, i, b],
            )

    gate = gateway(Recorded(), policy)

    async def answers():
        for i in np.flatnonzero(o.can_think):
            n = int(o.n_options[i])
            body = {"question": str(i), "options": [f"o{k}" for k in range(n)], "dataset": o.dataset[i]}
            try:
                answer = await gate.decide(request(**body, thinking="auto"))
            except AskFailed:
                assert expected.choice[i] == -1
                continue
            assert answer["choice_index"] == expected.choice[i]
            assert answer["thinking"]["used"] == expected.thinks[i]
            assert np.abs(np.array(answer["probabilities"]) - expected.p[i, :n]).max() <= 1e-12
            assert answer["elapsed_seconds"] == pytest.approx(expected.latency[i], abs=1e-12)
            assert answer["thinking"].get("think_tokens", 0) == expected.tokens[i]

    asyncio.run(answers())


def test_an_object_state_is_the_same_question_as_its_text_in_a_file():
    engine = ScriptedEngine()
    gate = gateway(engine)
    ask(gate, state={"a": [1, "ü"]}, thinking="off")
    ask(gate, state='{"a":[1,"ü"]}', thinking="off")
    assert text_hash(engine.asked[0][0]) == text_hash(engine.asked[1][0])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"options": ["a"]}, "2 to 256 options, got 1"),
        ({"options": None}, "2 to 256 options, got 0"),
        ({"options": [str(i) for i in range(257)]}, "got 257"),
        ({"kind": "score", "thinking": "auto"}, "not available for kind 'score'"),
        ({"kind": "score", "thinking": "on"}, "not available for kind 'score'"),
        ({"kind": "score", "system2_only": True}, "system2_only is not available for kind 'score'"),
        ({"reasoning_effort": "low"}, "reasoning_effort is not supported by scripted"),
        ({"state": ["x", {"image": "data:..."}]}, "image"),
        ({"state": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "image"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_asked(fields, said):
    engine = ScriptedEngine()
    with pytest.raises(BadRequest, match=said):
        ask(gateway(engine), **fields)
    assert engine.asked == []


def test_a_state_that_json_cannot_hold_is_refused():
    body = b'{"kind":"noul","question":"q","state":{"a":[1e999]}}'
    with pytest.raises(BadRequest, match="state"):
        asyncio.run(gateway().decide(DecideRequest.model_validate_json(body)))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "open"},
        {"kind": None},
        {"question": None},
        {"question": 5},
        {"options": "red, green"},
        {"options": ["a", 2]},
        {"thinking": "maybe"},
        {"thinking": True},
        {"strategy": "best"},
        {"threshold": "0.5"},
        {"threshold": -0.01},
        {"threshold": 1.11},
        {"threshold": float("nan")},
        {"threshold": float("inf")},
        {"threshold": True},
        {"think_budget": 0},
        {"think_budget": -5},
        {"think_budget": 1.5},
        {"think_budget": True},
        {"debug": "yes"},
        {"system2_only": 1},
        {"return_reasoning": None},
        {"chat_template_kwargs": []},
        {"reasoning_effort": 3},
        {"dataset": 1},
    ],
)
def test_wrong_types_and_ranges_are_refused(fields):
    (field,) = fields
    with pytest.raises(ValidationError) as caught:
        request(**fields)
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize(
    ("stage", "p", "reason"),
    [
        ("system1", (0.5, 0.5), "wrong_length"),
        ("system1", (float("nan"), 0.5, 0.5), "nan"),
        ("system2", (0.2, 0.2, 0.3, 0.3), "wrong_length"),
        ("system2", (float("inf"), 0.0, 0.0), "nan"),
    ],
)
def test_what_is_no_distribution_is_never_an_answer(stage, p, reason):
    engine = ScriptedEngine(**{"p1" if stage == "system1" else "p2": p})
    with pytest.raises(AskFailed) as caught:
        ask(gateway(engine), thinking="on")
    assert (caught.value.reason, caught.value.stage) == (reason, stage)


@pytest.mark.parametrize("failure", [AskFailed("timeout", "no answer in 9 s"), ServerBusy("later", 3)])
def test_failures_of_the_engine_pass_through(failure):
    with pytest.raises(type(failure)) as caught:
        ask(gateway(ScriptedEngine(failure=failure, fails_in="system2")), thinking="on")
    assert caught.value is failure


# --- info -------------------------------------------------------------------------------------------------------------


def test_info_without_a_policy_shows_the_engines_defaults():
    engine = ScriptedEngine(raw={"model_type": "gemma", "profile": "p", "defaults": {"thinking": "off"}})
    told = gateway(engine, context_tokens=777).describe()
    assert told["defaults"] == {
        "strategy": "single",
        "thinking": "off",
        "threshold": 0.8,
        "mix": 0.5,
        "think_budget": None,
    }
    assert told["policy"] is None
    assert (told["model"], told["model_type"], told["profile"]) == ("scripted", "gemma", "p")
    assert told["protocol"] == "jev27-bare-v1"
    assert told["native_choice_options"] == 16
    assert told["temperatures"] == {"noul": 1.0, "choice": 1.0, "score": 1.0}
    assert told["reasoning_controls"]["reasoning_effort"] is None
    assert "777" in told["reasoning_controls"]["think_budget"]
    assert told["gateway"].startswith("calib ")
    assert told["simulated"] is True
    assert "simulated" not in gateway(ScriptedEngine(simulated=False)).describe()
    assert "thinking" not in ask(gateway(engine))  # the default that info tells


def test_info_shows_the_policy_that_is_effective():
    policy = Policy(0.7, 0.4, 2048, "mtp", routes={"kind=noul": Route(threshold=0.5)})
    engine = ScriptedEngine(raw={"defaults": {"thinking": "off", "threshold": 0.8, "mix": 0.5, "think_budget": None}})
    told = gateway(engine, policy).describe()
    effective = {name: told["defaults"][name] for name in ("thinking", "threshold", "mix", "think_budget")}
    assert effective == {"thinking": "auto", "threshold": 0.7, "mix": 0.4, "think_budget": 2048}
    assert told["policy"] == {
        "threshold": 0.7,
        "mix": 0.4,
        "think_budget": 2048,
        "arm": "mtp",
        "confidence": "max",
        "routes": {"kind=noul": {"threshold": 0.5}},
        "version": policy_version(policy),
    }


def test_the_version_names_what_a_policy_says():
    policy = Policy(0.7, 0.4, 2048)
    assert policy_version(policy) == policy_version(Policy(0.7, 0.4, 2048))
    others = [replace(policy, mix=0.5), replace(policy, arm="mtp"), replace(policy, routes={"kind=noul": Route(0.5)})]
    assert len({policy_version(p) for p in [policy, *others]}) == 4


def test_the_engines_own_temperatures_are_told():
    info = EngineInfo("m", {}, raw={"temperatures": {"noul": 2.0}})
    assert Gateway(ScriptedEngine(), info).describe()["temperatures"] == {"noul": 2.0}

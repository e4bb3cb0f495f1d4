"""What a request is answered with: by hand, against the offline rule, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from calib.engine import Answer, AskFailed, EngineInfo, ServerBusy
from calib.errors import CalibError
from calib.gateway import (
    BadRequest,
    DecideAnswer,
    DecideRequest,
    Gateway,
    Observation,
    System2Answer,
    policy_version,
)
from calib.outcomes import Outcomes
from calib.policy import CONFIDENCES, ON_DEADLINE, POOLS, Policy, Route, decide
from calib.questions import Question, text_hash
from calib.temperature import Temperatures
from calib.wire import Thinking
from tests.patience import undisturbed
from tests.scripted import ScriptedEngine
from tests.strategies import distributions, outcomes

CHOICE = {"kind": "choice", "state": "s", "question": "q", "options": ["red", "green", "blue"]}


def request(**fields) -> DecideRequest:
    return DecideRequest.model_validate_json(json.dumps(CHOICE | fields))


def gateway(engine: ScriptedEngine | None = None, policy: Policy | None = None, **options) -> Gateway:
    engine = engine or ScriptedEngine()
    return Gateway(engine, asyncio.run(engine.info()), policy, **options)


def ask(gate: Gateway, **fields):
    return asyncio.run(gate.decide(request(**fields)))


async def timed(gate: Gateway, **fields) -> tuple[dict[str, Any], float]:
    """An answer, and the real seconds that it took."""
    started = time.perf_counter()
    return await gate.decide(request(**fields)), time.perf_counter() - started


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
        "policy_version": policy_version(Policy(mix=0.3, think_budget=512)),
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
    for way in ({"thinking": "auto"}, {}):
        answer = ask(able, kind="score", options=None, **way)
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
    named = asyncio.run(gate.decide(request(), dataset="a"))  # what the HTTP part reads from a header
    assert named["thinking"]["threshold"] == 0.0
    both = asyncio.run(gate.decide(request(dataset="b"), dataset="a"))
    assert both["thinking"]["threshold"] == 1.1  # the body wins
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
    short = Policy(1.1, deadline=3.0)
    said: dict[str, set[str]] = {"answer": set(), "thinking": set(), "alone": set()}
    for engine in (ScriptedEngine(keeps_deadline=True), ScriptedEngine(failure=ServerBusy(), fails_in="system2")):
        full = ask(gateway(engine, short), debug=True, return_reasoning=True, chat_template_kwargs={"a": 1})
        DecideAnswer.model_validate(full)
        said["answer"] |= set(full)
        said["thinking"] |= set(full["thinking"])
    small = ask(gateway(policy=short), system2_only=True)
    System2Answer.model_validate(small)
    assert said["answer"] == set(DecideAnswer.model_fields)
    assert said["thinking"] == set(Thinking.model_fields)
    assert set(small) == set(System2Answer.model_fields)


def test_an_answer_names_the_policy_it_was_given_under():
    policy = Policy(0.75, routes={"kind=noul": Route(0.1)}, deadline=9.0)
    assert ask(gateway(policy=policy))["policy_version"] == policy_version(policy)
    assert "policy_version" not in ask(gateway())


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_closes_the_thought_and_its_cut_is_mixed():
    engine = ScriptedEngine(keeps_deadline=True)
    policy = Policy(0.75, 0.4, 8192, temperatures={"cut": {"*": 2.0}}, deadline=4.05)
    answer = ask(gateway(engine, policy))
    # System 1 takes 0.05 s; of the thought of 600 tokens, 100 a second, 4 s hold 400
    cut = np.sqrt([0.1, 0.8, 0.1])
    assert answer["probabilities"] == pytest.approx(0.6 * np.array([0.7, 0.2, 0.1]) + 0.4 * cut / cut.sum())
    assert answer["thinking"] == {
        "mode": "auto",
        "threshold": 0.75,
        "budget": 8192,
        "used": True,
        "think_tokens": 400,
        "think_seconds": 4.0,
        "finished_within_budget": False,
        "closed_by_deadline": True,
    }
    assert "degraded" not in answer
    assert answer["elapsed_seconds"] == pytest.approx(4.05)
    assert answer["num_model_requests"] == 3
    assert engine.deadlines == [None, pytest.approx(4.0)]


def test_a_thought_that_ends_in_time_is_not_closed():
    answer = ask(gateway(ScriptedEngine(keeps_deadline=True), Policy(0.75, deadline=6.06)))
    assert answer["thinking"]["finished_within_budget"]
    assert "closed_by_deadline" not in answer["thinking"]


def test_the_requests_deadline_wins_over_the_policys():
    gate = gateway(ScriptedEngine(keeps_deadline=True), Policy(0.75, deadline=4.05))
    assert ask(gate, deadline=2.05)["thinking"]["think_tokens"] == 200
    assert ask(gate, deadline=60.0)["thinking"]["think_tokens"] == 600
    assert ask(gate, deadline=None)["thinking"]["think_tokens"] == 400
    assert ask(gateway(ScriptedEngine(keeps_deadline=True)), deadline=2.05)["thinking"]["think_tokens"] == 200


def test_a_policy_that_does_not_trust_closed_thoughts_answers_by_system_1():
    policy = Policy(0.75, deadline=4.05, on_deadline="system1", temperatures={"p1": {"*": 2.0}})
    answer = ask(gateway(ScriptedEngine(keeps_deadline=True), policy), debug=True, return_reasoning=True)
    assert answer["probabilities"] == policy.alone([0.7, 0.2, 0.1]).tolist()
    assert (answer["degraded"], answer["degraded_reason"]) == (True, "deadline")
    thinking = answer["thinking"]
    assert (thinking["used"], thinking["think_tokens"], thinking["closed_by_deadline"]) == (True, 400, True)
    assert (thinking["system2"], thinking["reasoning"]) == ([0.1, 0.8, 0.1], "a thought")
    # only closed thoughts: one that ended, or that the budget cut, counts
    gate = gateway(ScriptedEngine(keeps_deadline=True), policy)
    for asked in ({"deadline": 60.0}, {"think_budget": 300}):
        assert "degraded" not in ask(gate, **asked)


def test_where_system_1_takes_all_of_the_time_system_2_is_not_asked():
    engine = ScriptedEngine(keeps_deadline=True, t1=1.0)
    answer = ask(gateway(engine, Policy(1.1, deadline=0.5)), debug=True)
    assert answer["probabilities"] == answer["thinking"]["system1"] == [0.7, 0.2, 0.1]
    assert (answer["degraded"], answer["degraded_reason"], answer["num_model_requests"]) == (True, "deadline", 1)
    assert answer["thinking"]["used"] is False
    assert "think_tokens" not in answer["thinking"]
    assert answer["usage"]["completion_tokens"] == 1
    assert len(engine.asked) == 1


def test_where_not_one_token_comes_in_time_system_1_answers():
    answer = ask(gateway(ScriptedEngine(keeps_deadline=True), Policy(1.1, deadline=0.055)))
    assert answer["probabilities"] == [0.7, 0.2, 0.1]
    assert (answer["degraded"], answer["degraded_reason"], answer["num_model_requests"]) == (True, "deadline", 2)
    assert answer["thinking"]["used"] is True
    assert answer["thinking"]["think_tokens"] == 0
    assert answer["thinking"]["think_seconds"] == answer["elapsed_seconds"] - 0.05


class Slow(ScriptedEngine):
    """A real engine whose stages take ``seconds``; it may pay no heed to being cancelled."""

    seconds: Sequence[float] = (0.0, 0.0)
    stubborn: float = 0.0
    cancelled: int = 0
    late: Exception | None = None

    async def ask(self, *args, system1=True, **kwargs):
        answer = await super().ask(*args, system1=system1, **kwargs)
        try:
            await asyncio.sleep(self.seconds[0 if system1 else 1])
        except asyncio.CancelledError:
            self.cancelled += 1
            if self.stubborn:
                await asyncio.sleep(self.stubborn)
            if self.late is not None:
                raise self.late from None
            if not self.stubborn:
                raise
        return answer


def slow(*seconds: float, **attributes: Any) -> Slow:
    engine = Slow(simulated=False)
    engine.seconds = seconds
    for name, value in attributes.items():
        setattr(engine, name, value)
    return engine


@undisturbed
async def test_an_engine_that_keeps_no_deadline_is_left_at_the_deadline():
    engine = slow(0.0, 60.0)
    answer, seconds = await timed(Gateway(engine, await engine.info(), Policy(1.1, deadline=0.15)))
    assert answer["probabilities"] == [0.7, 0.2, 0.1]
    assert (answer["degraded"], answer["degraded_reason"]) == (True, "deadline")
    assert answer["thinking"]["used"] is True
    assert answer["thinking"]["finished_within_budget"] is False
    assert engine.deadlines == [None, None]  # it would not know what to do with one
    assert 0.14 <= seconds < 0.35
    assert answer["elapsed_seconds"] == pytest.approx(seconds, abs=0.05)
    await asyncio.sleep(0)
    assert engine.cancelled == 1


@pytest.mark.parametrize("keeps", [False, True])
@undisturbed
async def test_an_engine_that_does_not_stop_when_told_to_holds_nobody_up(keeps):
    engine = slow(0.0, 60.0, stubborn=0.4, keeps_deadline=keeps)
    gate = Gateway(engine, await engine.info(), Policy(1.1, deadline=0.1))
    answer, seconds = await timed(gate)
    assert answer["degraded_reason"] == "deadline"
    assert seconds < 0.3
    assert len(gate._calls) == 1
    await asyncio.sleep(0.5)
    assert not gate._calls


async def test_what_an_engine_fails_of_when_nobody_listens_any_more_is_not_reported(caplog):
    engine = slow(0.0, 60.0, late=AskFailed("connection", "gone"))
    gate = Gateway(engine, await engine.info(), Policy(1.1, deadline=0.05))
    assert (await gate.decide(request()))["degraded_reason"] == "deadline"
    await asyncio.sleep(0.02)
    gc.collect()
    assert not gate._calls
    assert caplog.records == []


async def test_a_client_that_goes_away_stops_the_engine():
    engine = slow(0.0, 60.0)
    task = asyncio.create_task(Gateway(engine, await engine.info(), Policy(1.1, deadline=30)).decide(request()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert engine.cancelled == 1


@pytest.mark.parametrize("mode", [{"thinking": "off"}, {"thinking": "on"}, {"system2_only": True}])
@undisturbed
async def test_without_an_answer_of_system_1_a_deadline_is_an_error_and_not_late(mode):
    engine = slow(60.0, 60.0, stubborn=5.0)
    gate = Gateway(engine, await engine.info(), Policy(deadline=0.1))
    started = time.perf_counter()
    with pytest.raises(AskFailed) as caught:
        await gate.decide(request(**mode))
    assert caught.value.reason == "deadline"
    assert caught.value.stage == ("system2" if "system2_only" in mode else "system1")
    assert time.perf_counter() - started < 0.3
    for task in gate._calls:
        task.cancel()


@undisturbed
async def test_system_1_may_be_a_little_late_for_there_is_nothing_else_to_answer():
    engine = slow(0.1, 60.0)
    answer, seconds = await timed(Gateway(engine, await engine.info(), Policy(1.1, deadline=0.05)))
    assert (answer["degraded_reason"], answer["thinking"]["used"]) == ("deadline", False)
    assert seconds < 0.25


async def test_a_deadline_counts_from_when_the_request_arrived():
    engine = Slow(simulated=False, keeps_deadline=True)
    gate = Gateway(engine, await engine.info(), Policy(1.1, deadline=10.0))
    answer = await gate.decide(request(), arrived=time.perf_counter() - 7.5)
    assert engine.deadlines[1] == pytest.approx(2.5, abs=0.2)
    assert answer["elapsed_seconds"] == pytest.approx(7.5, abs=0.2)
    late = await gate.decide(request(), arrived=time.perf_counter() - 10.05)
    assert (late["degraded_reason"], late["probabilities"]) == ("deadline", [0.7, 0.2, 0.1])


@undisturbed
async def test_a_thousand_open_thoughts_cost_the_loop_next_to_nothing():
    engine = slow(0.0, 60.0)
    gate = Gateway(engine, await engine.info(), Policy(1.1))
    started = time.perf_counter()
    deadlines = [1.5 + i / 1000 for i in range(1000)]
    open_ones = [asyncio.create_task(gate.decide(request(deadline=deadline))) for deadline in deadlines]
    while len(engine.asked) < 2000:
        await asyncio.sleep(0)
    begun = time.perf_counter() - started
    before, lag = time.process_time(), []
    while time.perf_counter() - started < begun + 0.5:
        at = time.perf_counter()
        await asyncio.sleep(0.01)
        lag.append(time.perf_counter() - at - 0.01)
    assert time.process_time() - before < 0.25  # half a second of waiting, with a thousand deadlines to come
    assert np.median(lag) < 0.005
    answers = await asyncio.gather(*open_ones)
    assert all(answer["degraded"] for answer in answers)
    late = [answer["elapsed_seconds"] - deadline for answer, deadline in zip(answers, deadlines, strict=True)]
    assert min(late) > -0.01
    assert np.quantile(late, 0.9) < 0.2


# --- degraded answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (AskFailed("timeout", "no answer in 9 s", tokens=40), "timeout"),
        (AskFailed("http_500"), "http_500"),
        (ServerBusy("later", 3), "busy"),
        (ConnectionResetError("gone"), "connection"),
        (CalibError("the key is refused"), "misconfigured"),
    ],
)
@pytest.mark.parametrize("policy", [None, Policy(0.75, deadline=9.0), Policy(0.75)])
def test_a_failure_of_system_2_is_never_an_error(failure, reason, policy):
    engine = ScriptedEngine(failure=failure, fails_in="system2")
    answer = ask(gateway(engine, policy), thinking="auto", debug=True)
    assert answer["probabilities"] == [0.7, 0.2, 0.1]
    assert answer["choice"] == "red"
    assert (answer["degraded"], answer["degraded_reason"], answer["num_model_requests"]) == (True, reason, 2)
    spent = 40 if reason == "timeout" else 0
    thinking = answer["thinking"]
    assert (thinking["used"], thinking["think_tokens"], thinking["finished_within_budget"]) == (True, spent, False)
    assert thinking["system1"] == [0.7, 0.2, 0.1]
    assert "system2" not in thinking
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 1 + spent, "total_tokens": 9 + spent}
    DecideAnswer.model_validate(answer)


@pytest.mark.parametrize(("p", "reason"), [((0.2, 0.2, 0.3, 0.3), "wrong_length"), ((math.inf, 0.0, 0.0), "nan")])
def test_a_system_2_that_gives_no_distribution_degrades(p, reason):
    answer = ask(gateway(ScriptedEngine(p2=p)), thinking="on")
    assert (answer["probabilities"], answer["degraded_reason"]) == ([0.7, 0.2, 0.1], reason)


def test_a_bug_is_not_taken_for_a_failure_of_system_2():
    with pytest.raises(ZeroDivisionError):
        ask(gateway(ScriptedEngine(failure=ZeroDivisionError(), fails_in="system2")), thinking="on")


# --- observations -----------------------------------------------------------------------------------------------------


def observed(engine: ScriptedEngine, policy: Policy | None = None, **asked) -> Observation:
    seen: list[Observation] = []
    ask(gateway(engine, policy, observe=seen.append), **asked)
    (one,) = seen
    return one


def test_an_observation_tells_a_decision_in_numbers():
    policy = Policy(0.75, temperatures={"p1": {"*": 2.0}}, confidence="margin", deadline=4.05)
    before = time.time()
    one = observed(ScriptedEngine(keeps_deadline=True), policy, dataset="d")
    alone = policy.alone([0.7, 0.2, 0.1])
    question = Question("", "d", "choice", "s", "q", ("red", "green", "blue"))
    assert before <= one.at <= time.time()
    assert one == Observation(
        at=one.at,
        hash=text_hash(question),
        dataset="d",
        kind="choice",
        n_options=3,
        p1=(0.7, 0.2, 0.1),
        confidence=alone[0] - alone[1],
        think=True,
        mode="auto",
        tokens=400,
        finished=False,
        closed=True,
        degraded=False,
        seconds=pytest.approx(4.05),
        t1=0.05,
        t2=4.0,
        policy_version=policy_version(policy),
    )


def test_observations_of_other_decisions():
    quick = observed(ScriptedEngine(), thinking="off")
    assert (quick.think, quick.mode, quick.tokens, quick.finished, quick.policy_version) == (
        False,
        "off",
        0,
        False,
        None,
    )
    assert (quick.seconds, quick.t1, quick.dataset) == (0.05, 0.05, "")
    assert math.isnan(quick.t2)
    whole = observed(ScriptedEngine(), thinking="on")
    assert (whole.think, whole.mode, whole.tokens, whole.finished, whole.closed) == (True, "on", 600, True, False)
    failed = observed(ScriptedEngine(failure=AskFailed("timeout", tokens=7), fails_in="system2"), thinking="on")
    assert (failed.think, failed.degraded, failed.tokens, failed.finished) == (True, True, 7, False)
    hurried = observed(ScriptedEngine(t1=1.0), Policy(1.1, deadline=0.5))
    assert (hurried.think, hurried.degraded, hurried.tokens) == (True, True, 0)
    alone = observed(ScriptedEngine(), system2_only=True)
    assert (alone.mode, alone.p1, alone.think, alone.t2) == ("system2", (), True, 6.0)
    assert math.isnan(alone.confidence)
    assert math.isnan(alone.t1)


def test_a_request_that_is_refused_is_no_decision():
    seen: list[Observation] = []
    with pytest.raises(BadRequest):
        ask(gateway(observe=seen.append), options=["one"])
    with pytest.raises(AskFailed):
        ask(gateway(ScriptedEngine(failure=AskFailed("timeout")), observe=seen.append))
    assert seen == []


def test_an_observation_holds_no_text_of_the_request():
    one = observed(ScriptedEngine(), state="the state", question="the question", options=["x1", "x2", "x3"])
    values = [str(getattr(one, field.name)) for field in fields(one)]
    assert not any(text in value for value in values for text in ("the state", "the question", "x1"))


# --- the same as offline ----------------------------------------------------------------------------------------------


class Recorded(ScriptedEngine):
    """Outcomes as an engine that keeps deadlines in their seconds: each question's text is its row."""

    def __init__(self, o: Outcomes, arm: int, deadline: float | None) -> None:
        super().__init__(keeps_deadline=True)
        self.o, self.arm, self.deadline = o, arm, deadline

    async def ask(self, question, budgets, *, system1=True, keep_text=False, deadline=None):
        o, a, i = self.o, self.arm, int(question.question)
        n, at = o.n_options[i], [o.budget_index(x) for x in budgets]
        t2, closed = o.t2[a, i, at], False
        if at:
            assert (deadline is None) == (self.deadline is None)
        if deadline is not None:
            assert deadline == pytest.approx(self.deadline - o.t1[a, i])
            in_time = [b for b in range(at[0] + 1) if o.t1[a, i] + o.t2[a, i, b] <= self.deadline]
            closed = at[0] not in in_time
            if closed and not in_time:
                raise AskFailed("deadline", seconds=deadline, stage="system2")
            if closed:
                at, t2 = [in_time[-1]], np.array([deadline])
        return Answer(
            p1=o.p1[i, :n] if system1 else None,
            t1=o.t1[a, i],
            budgets=tuple(budgets),
            p2=o.p2[i, at][:, :n],
            tokens=o.tokens[i, at],
            finished=o.finished[i, at],
            t2=t2,
            closed=closed,
        )


async def compare(o: Outcomes, policy: Policy) -> dict[str, int]:
    """The gateway's answers with the offline decisions; counts what became of the thoughts."""
    expected, a = decide(o, policy), o.arm_index(policy.arm)
    seen: list[Observation] = []
    engine = Recorded(o, a, policy.deadline)
    gate = Gateway(engine, await engine.info(), policy, observe=seen.append)
    rows = np.flatnonzero(o.can_think).tolist()
    count = {"thinks": 0, "closed": 0, "degraded": 0, "failed": 0}
    for i in rows:
        n = int(o.n_options[i])
        body = {"kind": "choice", "question": str(i), "options": [f"o{k}" for k in range(n)], "thinking": "auto"}
        answer = await gate.decide(DecideRequest.model_construct(**body), dataset=str(o.dataset[i]))
        thinking = answer["thinking"]
        assert seen[-1].think == expected.thinks[i]
        assert thinking["used"] == (expected.thinks[i] and not (policy.deadline and o.t1[a, i] >= policy.deadline))
        if np.isnan(expected.p[i, :n]).any():  # offline a failure is no answer; the gateway gives System 1's
            assert answer["degraded_reason"] == "nan"
            alone = policy.alone(o.p1[i, :n], kind="choice", n_options=n)
            assert np.abs(np.array(answer["probabilities"]) - alone).max() <= 1e-9
            count["failed"] += 1
            continue
        assert answer["choice_index"] == expected.choice[i]
        assert np.abs(np.array(answer["probabilities"]) - expected.p[i, :n]).max() <= 1e-9
        assert answer.get("degraded", False) == expected.degraded[i]
        if answer.get("degraded_reason") != "nan":  # the seconds of what was no answer are not told
            assert answer["elapsed_seconds"] == pytest.approx(expected.latency[i], abs=1e-9)
        if policy.on_deadline == "system2":
            assert thinking.get("closed_by_deadline", False) == (expected.closed[i] and not expected.degraded[i])
        if not expected.closed[i]:
            assert thinking.get("think_tokens", 0) == expected.tokens[i]
        for name in ("thinks", "closed", "degraded"):
            count[name] += int(getattr(expected, name)[i])
    return count


@given(
    outcomes(weighted=False),
    st.floats(0, 1.1) | st.sampled_from([1 / 3, 0.5]),
    st.floats(0, 1),
    st.booleans(),
    st.none() | st.floats(0.001, 13.0),
    st.sampled_from(ON_DEADLINE),
    st.data(),
)
@settings(max_examples=60)
def test_the_gateway_answers_as_the_offline_rule(o, threshold, mix, routed, deadline, rule, data):
    budgets = o.budgets.tolist()
    budget, arm = data.draw(st.sampled_from(budgets)), data.draw(st.sampled_from(o.arms))
    routes = {"dataset=a": Route(1 - threshold if threshold < 1 else 0.0, budgets[-1]), "n_options=2": Route(1.1)}
    policy = Policy(threshold, mix, budget, arm, routes=routes if routed else {}, deadline=deadline, on_deadline=rule)
    asyncio.run(compare(o, policy))


def random_outcomes(rng: np.random.Generator, n: int, width: int) -> Outcomes:
    """Distributions and seconds of every shape; now and then a System 2 that failed."""
    k = rng.integers(2, width + 1, n)
    k[0] = width
    budgets = np.array([8, 16, 32])
    length = rng.integers(1, 40, n)
    tokens = np.minimum(length[:, None], budgets)
    p2 = np.stack([distributions(rng, k, width, coarse=False) for _ in budgets], axis=1)
    p2[rng.random((n, 3)) < 0.02] = np.nan
    return Outcomes(
        p1=distributions(rng, k, width, coarse=bool(rng.integers(2))),
        p2=p2,
        tokens=tokens,
        finished=length[:, None] <= budgets,
        t1=rng.uniform(0.01, 0.1, (1, n)),
        t2=tokens[None] * rng.uniform(0.01, 0.2, (1, n, 1)) + rng.uniform(0.01, 0.1, (1, n, 1)),
        answer=rng.integers(0, k),
        n_options=k,
        budgets=budgets,
        arms=("base",),
        dataset=rng.choice(np.array(["a", "b"], dtype=object), n),
    )


def random_policy(rng: np.random.Generator) -> Policy:
    """Any temperatures, pool, definition of confidence, routes and deadline."""

    def table() -> dict[str, float]:
        keys = ("*", "choice", "choice:2", "choice:3-4")
        return {key: float(rng.uniform(0.3, 4)) for key in keys if rng.random() < 0.4}

    stages = {stage: table() for stage in ("p1", "p2", "cut", "final")}
    uniform = {stage: float(rng.uniform(0, 0.2)) for stage in stages if rng.random() < 0.3}
    routes = {
        key: Route(float(rng.uniform(0, 1.1)), int(rng.choice([8, 16, 32])))
        for key in ("dataset=a", "n_options=2", "kind=choice")
        if rng.random() < 0.3
    }
    return Policy(
        threshold=float(rng.uniform(0, 1.1)),
        mix=float(rng.uniform()),
        think_budget=int(rng.choice([8, 16, 32])),
        confidence=str(rng.choice(CONFIDENCES)),
        routes=routes,
        temperatures=Temperatures(**stages, uniform=uniform) if rng.random() < 0.7 else None,
        pool=str(rng.choice(POOLS)),
        deadline=float(rng.uniform(0.02, 4)) if rng.random() < 0.6 else None,
        on_deadline=str(rng.choice(ON_DEADLINE)),
    )


def test_thousands_of_policies_answer_as_offline():
    rng = np.random.default_rng(6)

    async def all_of_them() -> dict[str, int]:
        total = dict.fromkeys(("thinks", "closed", "degraded", "failed"), 0)
        for _ in range(250):
            o = random_outcomes(rng, 3, 5)
            for _ in range(8):
                for name, n in (await compare(o, random_policy(rng))).items():
                    total[name] += n
        return total

    total = asyncio.run(all_of_them())
    assert min(total.values()) >= 50, total  # each of the ways has been taken, and often
    assert total["thinks"] > 2000


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
        {"deadline": 0},
        {"deadline": -1.0},
        {"deadline": "2"},
        {"deadline": True},
        {"deadline": float("inf")},
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
        ask(gateway(engine), **({"thinking": "on"} if stage == "system1" else {"system2_only": True}))
    assert (caught.value.reason, caught.value.stage) == (reason, stage)


@pytest.mark.parametrize("failure", [AskFailed("timeout", "no answer in 9 s"), ServerBusy("later", 3)])
@pytest.mark.parametrize("stage", ["system1", "system2"])
def test_failures_pass_through_where_system_1_has_no_answer(failure, stage):
    asked = {"thinking": "on"} if stage == "system1" else {"system2_only": True}
    with pytest.raises(type(failure)) as caught:
        ask(gateway(ScriptedEngine(failure=failure, fails_in=stage)), **asked)
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


def test_info_tells_of_deadlines():
    plain = gateway(policy=Policy(0.7)).describe()
    assert (plain["deadline"], plain["keeps_deadline"]) == (None, False)
    assert "deadline" not in plain["policy"]
    policy = Policy(0.7, deadline=8.0, on_deadline="system1")
    told = gateway(ScriptedEngine(keeps_deadline=True), policy).describe()
    assert (told["deadline"], told["keeps_deadline"]) == (8.0, True)
    assert (told["policy"]["deadline"], told["policy"]["on_deadline"]) == (8.0, "system1")


def test_the_version_names_what_a_policy_says():
    policy = Policy(0.7, 0.4, 2048)
    assert policy_version(policy) == policy_version(Policy(0.7, 0.4, 2048))
    others = [replace(policy, mix=0.5), replace(policy, arm="mtp"), replace(policy, routes={"kind=noul": Route(0.5)})]
    assert len({policy_version(p) for p in [policy, *others]}) == 4


def test_the_engines_own_temperatures_are_told():
    info = EngineInfo("m", {}, raw={"temperatures": {"noul": 2.0}})
    assert Gateway(ScriptedEngine(), info).describe()["temperatures"] == {"noul": 2.0}

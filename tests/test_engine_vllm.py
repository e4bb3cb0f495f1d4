"""The vLLM engine against a server that answers as vLLM does, and goes wrong in each known way."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from calib.engine.base import AskFailed, PartlyFailed
from calib.engine.completions import Trace
from calib.engine.http import HttpClient
from calib.engine.labels import Seam
from calib.engine.ladder import Ladder, Reader, Rungs
from calib.engine.prometheus import between, parse, snapshot
from calib.engine.prompts import DEFAULT_PROMPT, Layout, Marks, read_prompt
from calib.engine.vllm import VllmEngine, _seconds
from calib.errors import CalibError
from calib.questions import NOUL_OPTIONS, SCORE_LEVELS, Question
from tests.misbehaving import cut_body, cut_json, edit, reset, slow, status, text
from tests.vllm_like import MASKED, VllmLike

CHOICE = Question("1", "d", "choice", "A blue cube.", "What colour is it?", ("blue", "red", "green"), 0)
NOUL = Question("2", "d", "noul", "", "Is it red?", NOUL_OPTIONS, 1)
SCORE = Question("3", "d", "score", "", "How red is it?", SCORE_LEVELS, 4)
BUDGETS = (5, 20, 80, 300)
LONG = 400


async def _no_wait(_seconds: float) -> None:
    return None


_engines: list[VllmEngine] = []
"""All that a test opened, closed behind it."""


def engine_of(server: VllmLike, *, retries: int = 1, timeout: float = 5.0, **options: Any) -> VllmEngine:
    client = HttpClient(server.url, timeout=timeout, retries=retries, rng=random.Random(3), sleep=_no_wait)
    _engines.append(VllmEngine(server.url, client=client, **options))
    return _engines[-1]


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[tuple[VllmLike, VllmEngine]]]]:
    """Starts servers, each with an engine; all are closed at the end."""
    servers: list[VllmLike] = []

    async def start(family: str = "qwen", *, ask: dict[str, Any] | None = None, **options: Any) -> Any:
        servers.append(await VllmLike(family, **options).__aenter__())
        return servers[-1], engine_of(servers[-1], **(ask or {}))

    yield start
    while _engines:
        await _engines.pop().close()
    for server in servers:
        await server.__aexit__()


def bare(server: VllmLike, question: Question, texts: tuple[str, ...], *, thinks: bool) -> list[int]:
    """The rendered chat, made here from the template."""
    lines = {"choice": "({}) {}", "noul": "({})", "score": "({})"}[question.kind]
    shown = [lines.format(t, o) for t, o in zip(texts, question.options, strict=True)]
    shown = shown[::-1] if question.kind == "noul" else shown
    endings = {
        "choice": "End with the letter of the one best option, in this form: Answer: (X)",
        "noul": "End with yes or no, in this form: Answer: (yes) or Answer: (no)",
        "score": "End with the one level that fits best, in this form: Answer: (X)",
    }
    head = f"{question.state}\n\n" if question.state else ""
    user = f"{head}Question: {question.question}\n" + "\n".join(shown) + f"\n\n{endings[question.kind]}"
    tail = "" if thinks else "<think>\n\n</think>\n\n"
    return server.tokenizer.encode(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{tail}")


# --- good answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "texts"),
    [(CHOICE, ("A", "B", "C")), (NOUL, ("no", "yes")), (SCORE, SCORE_LEVELS)],
    ids=["choice", "noul", "score"],
)
async def test_system1_reads_the_labels_where_thinking_is_off(
    start: Any, question: Question, texts: tuple[str, ...]
) -> None:
    server, engine = await start()
    answer = await engine.ask(question, ())
    prompt = bare(server, question, texts, thinks=False) + server.tokenizer.encode("Answer: (")
    labels = [server.tokenizer.ids[t] for t in texts]
    assert answer.p1 == pytest.approx(server.probabilities(prompt, labels))
    assert answer.label_mass1 == pytest.approx(server.mass(prompt, labels))
    assert answer.budgets == ()
    assert answer.p2.shape == (0, len(texts))
    assert answer.t1 > 0
    assert not server.bodies("trace")[1:]  # the one at the start asks what the server lists


async def test_system2_is_one_thought_read_at_every_budget(start: Any) -> None:
    server, engine = await start()
    answer = await engine.ask(CHOICE, BUDGETS, keep_text=True)
    trace = server.bodies("trace")[-1]
    opening = bare(server, CHOICE, ("A", "B", "C"), thinks=True) + server.tokenizer.encode("<think>\n")
    assert trace["prompt"] == opening
    thought, reason = server.thought(opening, 300, trace["seed"], [server.end])
    assert reason == "stop"
    length = len(thought)
    assert 20 < length < 80
    labels = [server.tokenizer.ids[t] for t in "ABC"]
    for row, budget in enumerate(BUDGETS):
        kept = thought[:-1] if budget >= length else [*thought[:budget], *server.tokenizer.encode("\n")]
        prompt = opening + kept + server.tokenizer.encode("</think>\n\nAnswer: (")
        assert answer.p2[row] == pytest.approx(server.probabilities(prompt, labels))
        assert answer.label_mass2[row] == pytest.approx(server.mass(prompt, labels))
    assert answer.tokens.tolist() == [min(length, b) for b in BUDGETS]
    assert answer.finished.tolist() == [length <= b for b in BUDGETS]
    assert answer.text == server.tokenizer.decode(thought[:-1])
    assert (np.diff(answer.t2) >= 0).all()
    assert set(answer.stages) == {"render", "prefill", "thought", "read"}
    assert answer.t2[-1] == pytest.approx(answer.stages["render"] + answer.stages["thought"] + answer.stages["read"])


async def test_cut_reads_equal_a_fresh_run_with_that_budget(start: Any) -> None:
    _, engine = await start()
    ladder = await engine.ask(CHOICE, BUDGETS)
    for row, budget in enumerate(BUDGETS):
        fresh = await engine.ask(CHOICE, (budget,), system1=False)
        assert fresh.p2[0] == pytest.approx(ladder.p2[row])
        assert fresh.tokens[0] == ladder.tokens[row]
        assert fresh.finished[0] == ladder.finished[row]


async def test_a_budget_at_the_end_of_the_thought_cuts_like_a_fresh_run(start: Any) -> None:
    _, engine = await start()
    length = int((await engine.ask(CHOICE, (LONG,))).tokens[0])
    answer = await engine.ask(CHOICE, (length - 1, length))
    assert answer.finished.tolist() == [False, True]
    fresh = await engine.ask(CHOICE, (length - 1,))
    assert fresh.p2[0] == pytest.approx(answer.p2[0])
    assert fresh.finished.tolist() == [False]


async def test_the_requests_are_as_agreed(start: Any) -> None:
    server, engine = await start(ask={"sampling": {"temperature": 0.6, "top_p": 0.95}, "cache_salt": "pass 1"})
    await engine.ask(CHOICE, BUDGETS)
    (trace,) = server.bodies("trace")[-1:]
    assert trace.pop("prompt")
    assert 0 <= trace.pop("seed") < 2**31
    assert trace == {
        "model": "toy",
        "add_special_tokens": False,
        "max_tokens": 300,
        "stop_token_ids": [server.end],
        "skip_special_tokens": False,
        "return_token_ids": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "cache_salt": "pass 1",
    }
    reads = server.bodies("read")
    labels = [server.tokenizer.ids[t] for t in "ABC"]
    assert [len(read["prompt"]) for read in reads[-3:]] == [1, 1, 2]
    for read in reads[-3:]:
        assert read["prompt"]
        assert {name: value for name, value in read.items() if name != "prompt"} == {
            "model": "toy",
            "add_special_tokens": False,
            "max_tokens": 1,
            "logprobs": 3,
            "allowed_token_ids": labels,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "temperature": 1,
            "top_p": 1,
            "top_k": 0,
            "min_p": 0,
            "repetition_penalty": 1,
            "cache_salt": "pass 1",
        }
    for _, body in server.asked:
        assert "logprob_token_ids" not in body
        assert "thinking_token_budget" not in body


async def test_the_seed_follows_the_question_and_the_users_seed(start: Any) -> None:
    server, one = await start()
    other = engine_of(server, seed=1)
    for engine, question in ((one, CHOICE), (one, CHOICE), (one, NOUL), (other, CHOICE)):
        await engine.ask(question, (10,))
    first, again, noul, seeded = [body["seed"] for body in server.bodies("trace") if "seed" in body]
    assert first == again
    assert len({first, noul, seeded}) == 3


async def test_system1_may_be_left_out_and_label_mass_too(start: Any) -> None:
    server, engine = await start(ask={"label_mass": False})
    await engine.info()
    before = len(server.bodies("mass"))
    answer = await engine.ask(CHOICE, (50,), system1=False)
    assert answer.p1 is None
    assert math.isnan(answer.t1)
    assert np.isnan(answer.label_mass2).all()
    assert "prefill" not in answer.stages
    assert len(server.bodies("mass")) == before


async def test_seconds_before_the_first_token_are_told_apart_where_the_server_reports_them(start: Any) -> None:
    server, engine = await start()
    metrics = {"queue_time_ms": 20.0, "time_to_first_token_ms": 30.0, "generation_time_ms": 400.0}
    await engine.info()
    server.always["trace"] = edit(lambda answer: answer.update(metrics=metrics))
    answer = await engine.ask(CHOICE, (50,))
    assert answer.stages["queue"] == pytest.approx(0.02)
    assert answer.stages["prefill"] == pytest.approx(0.03)


def test_seconds_of_smaller_budgets_are_in_proportion_to_their_tokens() -> None:
    trace = Trace(tuple(range(99)), True, 100, seconds=10.05, queue=0.02, prefill=0.03)
    rungs = Rungs((25, 50, 200), (), (25, 50, 100), (False, False, True), read_seconds=0.1)
    t2, stages = _seconds(trace, rungs, rendered=0.01, t1=0.04)
    # 0.01 + 0.05 + 10 * share + 0.1
    assert t2 == pytest.approx([2.66, 5.16, 10.16])
    assert stages == pytest.approx({"render": 0.01, "queue": 0.02, "prefill": 0.03, "thought": 10.0, "read": 0.1})


# --- thinking marks and templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opens", ["model", "template", "always"])
async def test_a_thought_is_opened_once_and_system1_never_within_one(start: Any, opens: str) -> None:
    server, engine = await start(opens=opens)
    info = await engine.info()
    await engine.ask(CHOICE, (20,))
    prompt = server.tokenizer.decode(server.bodies("trace")[-1]["prompt"])
    assert prompt.endswith("assistant\n<think>\n")
    system1 = next(body for kind, body in server.asked[::-1] if kind == "read" and len(body["prompt"]) == 1)
    assert system1
    first = server.bodies("read")[-2]["prompt"][0]
    closed = "<think>\n</think>\n\nAnswer: (" if opens == "always" else "<think>\n\n</think>\n\nAnswer: ("
    assert server.tokenizer.decode(first).endswith(closed)
    assert any("always opens" in note for note in info.raw["notes"]) == (opens == "always")


async def test_gemmas_channel(start: Any) -> None:
    server, engine = await start("gemma")
    server.end_share = 0.0
    info = await engine.info()
    assert info.raw["marks"]["end"] == "<channel|>"
    answer = await engine.ask(CHOICE, (20, LONG))
    prompt = server.tokenizer.decode(server.bodies("trace")[-1]["prompt"])
    assert prompt.startswith("<|turn>system\n<|think|><turn|>\n")
    assert prompt.endswith("<|turn>model\n<|channel>thought\n")
    cut = server.tokenizer.decode(server.bodies("read")[-1]["prompt"][0])
    assert cut.endswith("<channel|>Answer: (")
    assert answer.tokens[0] == 20


async def test_unknown_marks_are_asked_of_the_reasoning_parser(start: Any) -> None:
    server, engine = await start("own", reasoning_parser=True)
    info = await engine.info()
    assert (info.raw["marks"]["start"], info.raw["marks"]["end"]) == ("<muse>", "</muse>")
    await engine.ask(CHOICE, (20,))
    assert server.bodies("trace")[-1]["stop_token_ids"] == [server.tokenizer.ids["</muse>"]]


async def test_marks_may_be_given(start: Any) -> None:
    server, engine = await start("own", ask={"marks": Marks("<muse>", "</muse>", cut="", after="")})
    await engine.ask(CHOICE, (20,))
    assert server.tokenizer.decode(server.bodies("trace")[-1]["prompt"]).endswith("assistant\n<muse>")


async def test_a_model_that_does_not_think_is_refused_with_what_was_looked_at(start: Any) -> None:
    _, engine = await start("none")
    with pytest.raises(CalibError, match=r"</think>.*reasoning_config is not configured.*Give the marks"):
        await engine.info()


async def test_an_end_mark_of_several_tokens_is_refused(start: Any) -> None:
    _, engine = await start(ask={"marks": Marks(end="</thinking>")})
    with pytest.raises(CalibError, match="'</thinking>' is 11 tokens"):
        await engine.info()


# --- labels -----------------------------------------------------------------------------------------------------------


async def test_newlines_that_merge_only_at_the_end_are_read_as_they_stand_before_a_label(start: Any) -> None:
    prompt = replace(
        DEFAULT_PROMPT,
        kinds={kind: replace(layout, answer="") for kind, layout in DEFAULT_PROMPT.kinds.items()},
    )
    server, engine = await start(merge_newlines=True, ask={"prompt": prompt})
    await engine.ask(CHOICE, (5,))
    newline, merged = server.tokenizer.ids["\n"], server.tokenizer.ids["\n\n"]
    system1, system2 = (body["prompt"][0] for body in server.bodies("read")[-2:])
    for ids in (system1, system2):
        assert ids[-3:] == [server.end, newline, newline]
    rendered = server.bodies("render")
    assert server.chat(rendered[-2])[-1] == merged


async def test_a_letter_that_merges_with_the_bracket_is_passed_over(start: Any) -> None:
    prompt = replace(
        DEFAULT_PROMPT,
        kinds={kind: replace(layout, answer="(") for kind, layout in DEFAULT_PROMPT.kinds.items()},
    )
    server, engine = await start(merged=["(B"], ask={"prompt": prompt})
    await engine.ask(CHOICE, ())
    shown = server.bodies("render")[-1]["messages"][0]["content"]
    assert "(A) blue\n(C) red\n(D) green" in shown


async def test_more_options_than_letters_take_other_single_tokens(start: Any) -> None:
    server, engine = await start(context=5000)
    options = tuple(f"option number {i}" for i in range(60))
    answer = await engine.ask(Question("1", "d", "choice", "", "Which?", options), ())
    shown = server.bodies("render")[-1]["messages"][0]["content"]
    assert "(Z) option number 25\n(AA) option number 26\n(AB) option number 27\n(a) option number 28" in shown
    assert "(3) option number 57" in shown
    assert answer.p1 is not None
    assert answer.p1.shape == (60,)


async def test_too_few_labels_are_an_error_that_says_which_failed(start: Any) -> None:
    _, engine = await start(context=5000)
    question = Question("1", "d", "choice", "", "Which?", tuple(map(str, range(120))))
    with pytest.raises(CalibError, match=r"120 options.*only 64 are.*'AC'.*--prompt-template"):
        await engine.ask(question, ())


async def test_levels_that_are_no_tokens_are_numbered(start: Any) -> None:
    server, engine = await start()
    await engine.ask(Question("1", "d", "score", "", "How good?", ("very poor", "fair", "good")), (10,))
    assert "(0) very poor\n(1) fair\n(2) good" in server.bodies("render")[-1]["messages"][0]["content"]


# --- raw log-probabilities, few log-probabilities ---------------------------------------------------------------------


async def test_raw_logprobs_are_read_label_by_label_and_give_the_mass(start: Any) -> None:
    server, engine = await start()
    expected = await engine.ask(CHOICE, BUDGETS)
    server.processed, server.max_logprobs = False, 20
    raw = engine_of(server)
    info = await raw.info()
    assert info.raw["logprobs"] == "raw"
    assert any("--logprobs-mode processed_logprobs" in note for note in info.raw["notes"])
    before = len(server.bodies("read"))
    answer = await raw.ask(CHOICE, BUDGETS)
    assert answer.p1 == pytest.approx(expected.p1)
    assert answer.p2 == pytest.approx(expected.p2)
    assert answer.label_mass1 == pytest.approx(expected.label_mass1)
    assert answer.label_mass2 == pytest.approx(expected.label_mass2)
    allowed = [body["allowed_token_ids"] for body in server.bodies("read")[before:]]
    assert all(len(ids) == 1 for ids in allowed)
    assert len(allowed) == 9  # three labels: System 1, the largest budget, the others


@pytest.mark.parametrize("most", [2, 3, 5])
async def test_more_labels_than_listed_are_read_in_groups_exactly(start: Any, most: int) -> None:
    server, engine = await start()
    question = replace(CHOICE, options=tuple("abcdefg"))
    expected = await engine.ask(question, BUDGETS)
    server.max_logprobs = most
    few = engine_of(server)
    info = await few.info()
    assert info.raw["max_logprobs"] == most
    assert any("--max-logprobs 256" in note for note in info.raw["notes"])
    answer = await few.ask(question, BUDGETS)
    assert answer.p1 == pytest.approx(expected.p1)
    assert answer.p2 == pytest.approx(expected.p2)


async def test_a_server_that_lists_no_second_one_names_the_flag(start: Any) -> None:
    server, engine = await start()
    await engine.info()
    reader = Reader(engine._server, processed=True, most=1)
    with pytest.raises(CalibError, match="--max-logprobs 256"):
        await reader.read([[1, 2]], [3, 4])
    server.max_logprobs = 1
    with pytest.raises(CalibError, match="max allowed: 1.*--max-logprobs 256"):
        await engine_of(server).info()


async def test_a_limit_that_shrinks_later_names_the_flag(start: Any) -> None:
    server, engine = await start()
    await engine.ask(CHOICE, ())
    server.max_logprobs = 2  # started anew, with other flags
    with pytest.raises(CalibError, match="fewer log-probabilities than the 3 .*--max-logprobs 256"):
        await engine.ask(CHOICE, ())


@pytest.mark.parametrize(("most", "found"), [(64, 20), (19, 5), (4, 2)])
async def test_a_limit_that_is_refused_in_other_words_is_found_by_trying(start: Any, most: int, found: int) -> None:
    server, engine = await start()
    question = replace(CHOICE, options=tuple("abcdefg"))
    expected = await engine.ask(question, BUDGETS)

    async def other_words(request: web.Request, answer: Any) -> web.StreamResponse:
        if (await request.json())["logprobs"] > most:
            return web.json_response({"error": {"message": "logprobs: too many", "code": 400}}, status=400)
        return web.json_response(answer)

    server.always["mass"] = server.always["read"] = other_words
    few = engine_of(server)
    assert (await few.info()).raw["max_logprobs"] == found
    answer = await few.ask(question, BUDGETS)
    assert answer.p1 == pytest.approx(expected.p1)
    assert answer.p2 == pytest.approx(expected.p2)


async def test_a_server_that_forbids_to_ask_stops_at_once(start: Any) -> None:
    server, engine = await start()
    await engine.info()
    for kind in ("read", "trace"):
        server.always = {kind: status(403, "not for you")}
        with pytest.raises(CalibError, match=r"forbids to ask it .*/v1/completions: not for you") as refused:
            await engine.ask(CHOICE, BUDGETS)
        assert refused.value.exit_code == 1


async def test_logits_are_refused(start: Any) -> None:
    server, engine = await start()
    server.logits = True
    with pytest.raises(CalibError, match="logits instead of log-probabilities.*--logprobs-mode processed_logprobs"):
        await engine.info()


async def test_no_cap_on_logprobs(start: Any) -> None:
    server, engine = await start()
    server.max_logprobs = -1
    assert (await engine.info()).raw["max_logprobs"] == 256


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_fillers_are_dropped_and_a_spoiled_read_is_no_answer(start: Any) -> None:
    server, engine = await start()
    good = await engine.ask(CHOICE, ())

    def fill(answer: dict[str, Any]) -> None:
        answer["choices"][0]["logprobs"]["top_logprobs"][0].update({"token_id:0": MASKED, "token_id:1": -10000.0})

    server.faults["read"] = [edit(fill)]
    assert (await engine.ask(CHOICE, ())).p1 == pytest.approx(good.p1)

    def spoil(answer: dict[str, Any]) -> None:  # as a request with logprob_token_ids does to others in its step
        listed = answer["choices"][0]["logprobs"]
        listed["top_logprobs"][0] = {listed["tokens"][0]: listed["token_logprobs"][0], "token_id:0": MASKED}

    server.faults["read"] = [edit(spoil)]
    with pytest.raises(AskFailed, match="missing_label: .* 2 of 3 labels") as failed:
        await engine.ask(CHOICE, ())
    assert failed.value.stage == "system1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda listed: listed.update(token_logprobs=[float("nan")]), "nan"),
        (lambda listed: listed["top_logprobs"].clear(), "missing_field"),
        (lambda listed: listed.update(tokens=["A"]), "missing_field"),
        (lambda listed: listed.update(top_logprobs=[dict.fromkeys(listed["top_logprobs"][0], -5.0)]), "sum_off"),
    ],
    ids=["nan", "no list", "a text for an id", "sum off"],
)
async def test_a_read_that_is_no_distribution(start: Any, change: Any, reason: str) -> None:
    server, engine = await start()
    await engine.info()

    def changed(answer: dict[str, Any]) -> None:
        listed = answer["choices"][0]["logprobs"]
        if reason == "nan":
            listed["top_logprobs"][0].pop(listed["tokens"][0])
        if reason == "sum_off":
            listed["token_logprobs"] = [-5.0]
        change(listed)

    server.faults["read"] = [edit(changed)]
    with pytest.raises(AskFailed) as failed:
        await engine.ask(CHOICE, ())
    assert failed.value.reason == reason


async def test_a_budget_that_is_ignored(start: Any) -> None:
    server, engine = await start()
    server.end_share = 0.0
    await engine.info()
    server.ignores = {"budget"}
    with pytest.raises(PartlyFailed, match="30 tokens at max_tokens 20") as failed:
        await engine.ask(CHOICE, (10, 20))
    assert (failed.value.reason, failed.value.stage) == ("budget_exceeded", "system2")
    assert failed.value.partial.p1 is not None
    assert failed.value.partial.budgets == ()


async def test_a_stop_token_that_is_ignored_still_ends_the_thought(start: Any) -> None:
    server, engine = await start()
    expected = await engine.ask(CHOICE, (LONG,))
    server.ignores = {"stop"}
    answer = await engine.ask(CHOICE, (LONG,))
    assert answer.tokens.tolist() == expected.tokens.tolist()
    assert answer.finished.tolist() == [True]
    assert answer.p2 == pytest.approx(expected.p2)


async def test_an_ignored_seed_shows_and_does_not_upset_the_ladder(start: Any) -> None:
    server, engine = await start()
    assert await engine.obeys_seed(CHOICE)
    server.ignores = {"seed"}
    assert not await engine.obeys_seed(CHOICE)
    answer = await engine.ask(CHOICE, BUDGETS)
    prompts = [p for body in server.bodies("read")[-2:] for p in body["prompt"]]
    thoughts = [
        server.tokenizer.decode(p).partition("assistant\n<think>\n")[2].partition("</think>")[0] for p in prompts
    ]
    longest = max(thoughts, key=len)
    assert all(longest.startswith(thought.rstrip("\n")) for thought in thoughts)
    assert answer.budgets == BUDGETS


async def test_a_turn_that_ends_within_the_thought_is_unfinished(start: Any) -> None:
    server, engine = await start()
    await engine.info()
    turn_end = server.tokenizer.ids["<|im_end|>"]
    words = server.tokenizer.encode(" w1 w2 w3")

    def ends(answer: dict[str, Any]) -> None:
        answer["choices"][0].update(token_ids=[*words, turn_end], finish_reason="stop", stop_reason=None)

    server.faults["trace"] = [edit(ends)]
    answer = await engine.ask(CHOICE, (2, 100))
    assert answer.tokens.tolist() == [2, 3]
    assert answer.finished.tolist() == [False, False]
    read = server.tokenizer.decode(server.bodies("read")[-2]["prompt"][0])
    assert read.endswith("<think>\n w1 w2 w3\n</think>\n\nAnswer: (")


async def test_a_thought_that_ends_at_once(start: Any) -> None:
    server, engine = await start()
    server.end_share = 1.0
    answer = await engine.ask(CHOICE, (1, 100))
    assert answer.tokens.tolist() == [1, 1]
    assert answer.finished.tolist() == [True, True]


async def test_the_context_caps_the_thought_and_it_shows(start: Any) -> None:
    server, engine = await start(context=300)
    server.end_share = 0.0
    answer = await engine.ask(CHOICE, (50, 5000))
    prompt = server.bodies("trace")[-1]["prompt"]
    closing = len(server.tokenizer.encode("\n</think>\n\nAnswer: ("))
    assert answer.tokens.tolist() == [50, 300 - len(prompt) - closing - 1]
    assert answer.finished.tolist() == [False, False]
    longest = max(len(p) for body in server.bodies("read") for p in body["prompt"])
    assert longest + 1 == 300


async def test_no_room_for_a_thought_keeps_system1(start: Any) -> None:
    _, engine = await start(context=150)
    with pytest.raises(PartlyFailed, match="leaves no room for a thought") as failed:
        await engine.ask(replace(CHOICE, state="x" * 100), (50,))
    assert (failed.value.reason, failed.value.stage) == ("context", "system2")
    assert failed.value.partial.p1 is not None


async def test_a_smaller_context_than_told_is_refused_by_the_server(start: Any) -> None:
    server, engine = await start()
    await engine.info()
    server.context = 100
    with pytest.raises(AskFailed, match="maximum context length is 100") as failed:
        await engine.ask(CHOICE, (400,), system1=False)
    assert (failed.value.reason, failed.value.stage) == ("refused", "system2")


async def test_smaller_budgets_that_fail_leave_the_largest(start: Any) -> None:
    server, engine = await start()
    expected = await engine.ask(CHOICE, (5, LONG))
    broken = status(500, "list index out of range")

    async def several(request: Any, answer: Any) -> Any:
        return (
            await broken(request, answer) if len(answer["choices"]) > 1 else await edit(lambda _: None)(request, answer)
        )

    server.always["read"] = several
    with pytest.raises(PartlyFailed, match="list index out of range") as failed:
        await engine.ask(CHOICE, (3, 5, LONG))
    assert failed.value.partial.budgets == (LONG,)
    assert failed.value.partial.p2[0] == pytest.approx(expected.p2[1])
    assert failed.value.partial.p1 == pytest.approx(expected.p1)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(429, Retry_After="1"), "http_429"),
        (status(500, "EngineCore encountered a fatal error"), "http_500"),
        (status(501, "not supported"), "http_501"),
        (status(400, "Out of range float values are not JSON compliant"), "refused"),
        (status(404, "The model `toy` does not exist."), "http_404"),
        (cut_body, "bad_json"),
        (cut_json, "bad_json"),
        (text("<html>"), "bad_json"),
        (text("{}"), "missing_field"),
        (text('{"choices": []}'), "wrong_length"),
        (reset, "connection"),
        (slow(9), "timeout"),
    ],
    ids=["429", "500", "501", "400", "404", "cut body", "cut json", "html", "empty", "no choice", "reset", "slow"],
)
@pytest.mark.parametrize("kind", ["read", "trace"])
async def test_faults_that_stay_are_failures_with_their_stage(start: Any, fault: Any, reason: str, kind: str) -> None:
    server, engine = await start(ask={"timeout": 0.3, "retries": 1})
    await engine.info()
    server.always[kind] = fault
    with pytest.raises(AskFailed) as failed:
        await engine.ask(CHOICE, (20,))
    assert failed.value.reason == reason
    assert failed.value.stage == ("system1" if kind == "read" else "system2")
    assert failed.value.seconds > 0
    assert isinstance(failed.value, PartlyFailed) == (kind == "trace")


@pytest.mark.parametrize("fault", [status(429), status(503), cut_body, cut_json, reset], ids=lambda f: f.__name__)
async def test_faults_that_pass_are_borne(start: Any, fault: Any) -> None:
    server, engine = await start()
    expected = await engine.ask(CHOICE, BUDGETS)
    for kind in ("render", "trace", "read", "mass"):
        server.faults[kind] = [fault]
    answer = await engine.ask(CHOICE, BUDGETS)
    assert answer.p1 == pytest.approx(expected.p1)
    assert answer.p2 == pytest.approx(expected.p2)


async def test_label_mass_that_cannot_be_read_costs_no_answer(start: Any) -> None:
    server, engine = await start()
    await engine.info()
    server.always["mass"] = status(500)
    answer = await engine.ask(CHOICE, BUDGETS)
    assert math.isnan(answer.label_mass1)
    assert np.isnan(answer.label_mass2).all()
    assert answer.p2.shape == (4, 3)


async def test_token_ids_that_are_missing_name_the_version(start: Any) -> None:
    server, engine = await start()
    await engine.info()
    server.ignores = {"token_ids"}
    with pytest.raises(AskFailed, match=r"missing_field: .* lacks token_ids.*vLLM 0\.10\.2"):
        await engine.ask(CHOICE, (20,), system1=False)


async def test_a_mask_that_is_ignored(start: Any) -> None:
    server, engine = await start()
    server.letters = -9.0
    server.ignores = {"mask"}
    with pytest.raises(CalibError, match="allowed_token_ids leaves out"):
        await engine.info()


async def test_an_aborted_thought(start: Any) -> None:
    server, engine = await start()
    await engine.info()
    server.faults["trace"] = [edit(lambda answer: answer["choices"][0].update(finish_reason="abort"))]
    with pytest.raises(AskFailed, match="ended by 'abort'"):
        await engine.ask(CHOICE, (20,), system1=False)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_the_name_of_the_reasoning_field_is_never_looked_at(start: Any, field: str) -> None:
    server, engine = await start("own", reasoning_parser=True)

    def rename(answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        message[field] = message.pop("reasoning")

    server.always["chat"] = edit(rename)
    assert (await engine.info()).raw["marks"]["end"] == "</muse>"
    await engine.ask(CHOICE, (20,))
    assert len(server.bodies("chat")) == 1


# --- who answers ------------------------------------------------------------------------------------------------------


async def test_info_tells_what_was_found(start: Any) -> None:
    _, engine = await start()
    info = await engine.info()
    assert info.model == "toy"
    assert info.thinks_about_scores
    assert not info.simulated
    assert (info.raw["version"], info.raw["max_model_len"]) == ("0.32.0", 600)
    assert (info.raw["logprobs"], info.raw["max_logprobs"]) == ("processed", 256)
    assert set(info.raw["system1_label_mass"]) == {"choice", "noul", "score"}
    assert info.raw["notes"] == []
    json.dumps([info.identity, info.raw], allow_nan=False)


async def test_identity_holds_what_changes_an_answer_and_nothing_of_the_address(start: Any) -> None:
    server, engine = await start()
    base = (await engine.info()).identity
    assert server.url not in json.dumps(base)
    assert base["root"] == "toy"  # not the folder on that machine
    assert (await engine_of(server).info()).identity == base
    prompt = replace(DEFAULT_PROMPT, system="Be brief.")
    for options in ({"seed": 1}, {"sampling": {"temperature": 0.5}}, {"prompt": prompt}, {"marks": Marks(cut="")}):
        assert (await engine_of(server, **options).info()).identity != base
    for options in ({"label_mass": False}, {"cache_salt": "x"}):
        assert (await engine_of(server, **options).info()).identity == base
    server.models[0]["max_model_len"] = 500
    assert (await engine.info()).identity == base
    server.opens = "template"  # another chat template
    assert (await engine.info()).identity != base


async def test_letters_that_mean_nothing_are_said_so_and_asked_all_the_same(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server, engine = await start()
    server.letters = -6.0
    with caplog.at_level(logging.WARNING, "calib.engine.vllm"):
        info = await engine.info()
    assert "System 1 would rather say something else" in caplog.text
    assert info.raw["notes"][0] in caplog.text
    answer = await engine.ask(CHOICE, (20,))
    assert answer.label_mass1 < 0.1
    assert answer.p1 is not None


async def test_a_prompt_that_changes_every_day_is_said_once(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    dated = replace(DEFAULT_PROMPT, system=f"Today is {datetime.now().astimezone():%d %b %Y}.")
    _, engine = await start(ask={"prompt": dated})
    for _ in range(2):
        assert "today's date" in (await engine.info()).raw["notes"][0]
    assert caplog.text.count("today's date") == 1


async def test_a_kind_without_labels_does_not_hinder_the_others(start: Any) -> None:
    kinds = {**DEFAULT_PROMPT.kinds, "choice": replace(DEFAULT_PROMPT.kinds["choice"], labels=("one", "two", "six"))}
    _, engine = await start(ask={"prompt": replace(DEFAULT_PROMPT, kinds=kinds)})
    assert set((await engine.info()).raw["system1_label_mass"]) == {"noul", "score"}
    assert (await engine.ask(NOUL, (5,))).p1 is not None
    with pytest.raises(CalibError, match="no labels for a choice question of 3 options"):
        await engine.ask(CHOICE, (5,))


async def test_which_model(start: Any) -> None:
    server, engine = await start()
    server.models.append({"id": "adapter", "parent": "toy", "root": "org/adapter", "max_model_len": None})
    assert (await engine.info()).model == "toy"
    adapter = await engine_of(server, model="adapter").info()
    assert (adapter.model, adapter.identity["parent"], adapter.raw["max_model_len"]) == ("adapter", "toy", 600)
    with pytest.raises(CalibError, match="serves no 'other'; it serves: toy, adapter"):
        await engine_of(server, model="other").info()
    server.models.append({"id": "second", "parent": None, "max_model_len": 600})
    with pytest.raises(CalibError, match="several models; name one of: toy, adapter, second"):
        await engine.info()


async def test_without_render_the_chat_is_tokenised(start: Any) -> None:
    server, engine = await start(render=False)
    other, usual = await start()
    answer, expected = await engine.ask(CHOICE, BUDGETS), await usual.ask(CHOICE, BUDGETS)
    assert answer.p2 == pytest.approx(expected.p2)
    assert "token_strs" not in server.bodies("render")[0]
    assert other.bodies("render")[0]["add_generation_prompt"] is True


async def test_a_render_route_that_is_switched_off(start: Any) -> None:
    server, engine = await start(render=True)
    server.faults["render"] = [status(403, "Scale-out endpoints are disabled.")]
    await engine.ask(CHOICE, ())
    assert len([1 for kind, body in server.asked if kind == "render"]) > 1


async def test_without_any_way_to_tokens_it_says_so(start: Any) -> None:
    server, engine = await start()
    server.always["render"] = status(404, "Not Found")
    with pytest.raises(CalibError, match=r"neither render a chat nor tokenise.*POST /tokenize.*proxy"):
        await engine.info()
    server.always["tokenize"] = server.always["render"]
    with pytest.raises(CalibError, match="cannot be asked as a vLLM server .*http_404.*POST /tokenize: Not Found"):
        await engine.info()


async def test_no_server_says_what_to_try() -> None:
    engine = VllmEngine("http://127.0.0.1:9", retries=0)
    with pytest.raises(CalibError, match=r"curl http://127\.0\.0\.1:9/v1/models") as failed:
        await engine.info()
    assert failed.value.exit_code == 1
    await engine.close()


async def test_no_context_length_is_not_vllm(start: Any) -> None:
    server, engine = await start()
    del server.models[0]["max_model_len"]
    with pytest.raises(CalibError, match="max_model_len"):
        await engine.info()


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"max_tokens": 5}, "unknown field 'max_tokens'"),
        ({"temperature": "0.6"}, "temperature should be a number"),
        ({"temperature": float("nan")}, "temperature should be a number"),
        ({"top_k": True}, "top_k should be a number"),
    ],
)
def test_sampling_is_checked(sampling: Any, said: str) -> None:
    with pytest.raises(CalibError, match=said):
        VllmEngine("http://127.0.0.1:9", sampling=sampling)


async def test_a_budget_below_one_token(start: Any) -> None:
    _, engine = await start()
    with pytest.raises(CalibError, match="1 token or more"):
        await engine.ask(CHOICE, (0, 5))


# --- prompt files -----------------------------------------------------------------------------------------------------


def test_a_prompt_file(tmp_path: Path) -> None:
    file = tmp_path / "prompt.toml"
    file.write_text(
        "system = 'Be brief.'\nuser = '{state}|{question}|{options}'\nline = '{label}: {option}'\nanswer = ''\n"
        "[noul]\nline = '{label}'\n[score]\nlabels = 'digits'\n[chat_template_kwargs]\nreasoning_effort = 'low'\n"
    )
    prompt = read_prompt(file)
    assert prompt.messages(replace(CHOICE, state="{question} {x}"), ("A", "B", "C")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "{question} {x}|What colour is it?|A: blue\nB: red\nC: green"},
    ]
    assert prompt.messages(NOUL, ("no", "yes"))[1]["content"] == "|Is it red?|yes\nno"
    assert prompt.kinds["score"] == Layout("{state}|{question}|{options}", "{label}: {option}", "", "digits")
    assert prompt.kinds["noul"].labels == ("no", "yes")
    assert prompt.chat_template_kwargs == {"reasoning_effort": "low"}
    assert prompt.fingerprint != DEFAULT_PROMPT.fingerprint
    assert read_prompt(file).fingerprint == prompt.fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("sytem = 'x'", "unknown field 'sytem'"),
        ("user = 'x", "is not TOML"),
        ("user = 'no places'", r"choice.user: \{question\} is missing"),
        ("line = '- {option}'", r"choice.line: \{label\} is missing"),
        ("labels = 'roman'", "choice.labels: expected letters"),
        ("[noul]\nlabels = ['yes', 'yes']", "noul.labels: .* different"),
        ("[score]\ncolour = 1", "score.colour: unknown field"),
        ("system = 3", "system: expected text"),
        ("[choice]\nanswer = 3", "choice.answer: expected text"),
        ("chat_template_kwargs = 3", "expected a table"),
        ("noul = 3", r"expected a table \[noul\]"),
        ("[chat_template_kwargs]\nday = 2026-01-01", "put it in quotes"),
    ],
)
def test_a_flaw_in_a_prompt_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "prompt.toml"
    file.write_text(content)
    with pytest.raises(CalibError, match=said) as failed:
        read_prompt(file)
    assert str(file) in str(failed.value)


def test_a_prompt_file_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(CalibError, match="cannot be read: No such file"):
        read_prompt(tmp_path / "none.toml")


async def test_the_users_prompt_is_what_is_asked(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.toml"
    file.write_text("system = 'Be brief.'\nanswer = ''\n[chat_template_kwargs]\nreasoning_effort = 'low'\n")
    server, engine = await start(ask={"prompt": read_prompt(file)})
    await engine.ask(CHOICE, (10,))
    rendered = server.bodies("render")[-1]
    assert rendered["messages"][0] == {"role": "system", "content": "Be brief."}
    assert rendered["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}


# --- the ladder by itself ---------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(10, 99), max_size=30),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_a_cut_is_the_thought_of_that_budget(ids: list[int], ended: bool, budget: int, longer: int) -> None:
    ladder = Ladder(Reader.__new__(Reader), cut=(7,))
    seam = Seam((8, 9), (1, 2))
    trace = Trace(tuple(ids), ended, len(ids) + ended, 1.0)
    prompt = ladder.prompt((5,), trace, budget, seam)
    # what a run with that budget would have generated
    short = Trace(tuple(ids[:budget]), ended and len(ids) < budget, min(len(ids) + ended, budget), 1.0)
    assert prompt == ladder.prompt((5,), short, budget, seam)
    assert prompt[:1] == (5,)
    assert prompt[-2:] == (8, 9)
    assert len(prompt) <= len(ladder.prompt((5,), trace, budget + longer, seam)) + 1  # the cut's own token


# --- /metrics ---------------------------------------------------------------------------------------------------------

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 2.0
vllm:num_requests_running{{engine="1",model_name="m"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 5.0
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:generation_tokens_total{{engine="0",model_name="m"}} 1.5e+03
"""
SPECULATION = """vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} 7.0
process_cpu_seconds_total 3.0
"""


def test_metrics_by_hand() -> None:
    before = parse((METRICS + SPECULATION).format(queries=1000, hits=100, drafts=10, drafted=40, accepted=20))
    after = parse((METRICS + SPECULATION).format(queries=3000, hits=1100, drafts=110, drafted=440, accepted=345))
    assert (before.running, before.waiting, before.generated) == (3, 0, 1500)
    assert before.speculates
    assert not before.idle
    what = between(before, after)
    assert what.prefix_hit_rate == pytest.approx(0.5)
    assert what.acceptance_length == pytest.approx(1 + 325 / 100)
    assert what.acceptance_length_max == pytest.approx(5)
    assert what.acceptance_share == pytest.approx(325 / 400)
    assert str(what) == (
        "acceptance length 4.25 of at most 5; 81% of the drafted tokens accepted, of at most 100%; "
        "50% of the prompt tokens from the prefix cache"
    )
    restarted = between(after, before)
    assert math.isnan(restarted.acceptance_length)
    assert math.isnan(restarted.prefix_hit_rate)
    assert str(restarted) == "nothing counted"


def test_metrics_without_speculation() -> None:
    counters = parse(METRICS.format(queries=10, hits=0) + "vllm:num_requests_running x\n")
    assert not counters.speculates
    assert math.isnan(between(counters, counters).acceptance_length)
    assert not parse("").idle


async def test_a_snapshot_and_a_server_without_one(start: Any) -> None:
    server, engine = await start()
    assert await snapshot(engine.client) is None
    server.metrics = METRICS.format(queries=10, hits=4)
    counters = await snapshot(engine.client)
    assert counters is not None
    assert counters.prefix_hits == 4

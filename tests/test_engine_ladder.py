"""A decide server's smaller budgets, read on its base model: used only where that reproduces its own answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from zlib import crc32

import pytest
from aiohttp import web

from calib.engine.decide import DecideEngine
from calib.engine.ladder import LadderCheck
from calib.engine.prompts import DECIDE_PROMPT, DEFAULT_PROMPT, PromptTemplate
from calib.engine.vllm import VllmEngine
from calib.questions import NOUL_OPTIONS, Question
from tests.vllm_like import VllmLike

BUDGETS = (4, 15, 400)


def questions(n: int) -> list[Question]:
    """Choice and noul questions in turn."""
    kinds = [("choice", ("blue", "red", "green")), ("noul", NOUL_OPTIONS)]
    return [
        Question(str(i), "d", kinds[i % 2][0], f"state {i}", f"question {i}?", kinds[i % 2][1], 0) for i in range(n)
    ]


class DecideLike(VllmLike):
    """vLLM with the decide route around it, whose System 2 shows the base model ``prompt``.

    ``text`` changes the thought's text on its way out; ``asked_to_think`` holds the budgets of all thoughts.
    """

    def __init__(self, prompt: PromptTemplate, family: str = "qwen") -> None:
        super().__init__(family)
        self.prompt = prompt
        self.text: Callable[[str], str | None] = lambda text: text
        self.asked_to_think: list[int] = []
        self._runner.app.router.add_get("/v1/decide/info", self._describe)
        self._runner.app.router.add_post("/v1/decide", self._decide)

    async def _describe(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"protocol": "jev27-bare-v1", "model": "toy", "defaults": {"threshold": 0.8, "mix": 0.5}}
        )

    async def _decide(self, request: web.Request) -> web.Response:
        body = await request.json()
        options = tuple(body.get("options") or NOUL_OPTIONS)
        question = Question("", "", body["kind"], body["state"], body["question"], options)
        texts = "BA" if body["kind"] == "noul" else "ABC"[: len(options)]
        budget = body["think_budget"]
        self.asked_to_think.append(budget)
        encode = self.tokenizer.encode
        chat = self.chat({"messages": self.prompt.messages(question, tuple(texts))})
        start = encode("<think>\n" if self.family == "qwen" else "<|channel>thought\n")
        ids, reason = self.thought(chat + start, budget, crc32(body["question"].encode()), [self.end])
        finished = reason == "stop"
        kept = ids[:-1] if finished else ids
        closing = ("</think>\n\n" if finished else "\n</think>\n\n") if self.family == "qwen" else "<channel|>"
        labels = [self.tokenizer.ids[text] for text in texts]
        p2 = self.probabilities([*chat, *start, *kept, *encode(closing), *encode("Answer: (")], labels).tolist()
        p1 = self.probabilities(encode("(A)"), labels).tolist()
        await asyncio.sleep(0.005)
        thinking = {
            "used": True,
            "think_tokens": len(ids),
            "think_seconds": 0.004,
            "finished_within_budget": finished,
            "system1": p1,
            "system2": p2,
        }
        if body.get("return_reasoning"):
            thinking["reasoning"] = self.text(self.tokenizer.decode(kept))
        mixed = p2 if body.get("system2_only") else [(a + b) / 2 for a, b in zip(p1, p2, strict=True)]
        answer = {"options": list(options), "probabilities": mixed, "thinking": thinking, "elapsed_seconds": 0.004}
        return web.json_response(answer | ({"system": 2} if body.get("system2_only") else {}))


@pytest.fixture
async def pair() -> AsyncIterator[Callable[..., Any]]:
    """A decide server, its engine, and an engine for its base model."""
    opened: list[Any] = []

    async def pair(prompt: PromptTemplate = DECIDE_PROMPT, family: str = "qwen") -> Any:
        server = await DecideLike(prompt, family).__aenter__()
        opened.append((server, DecideEngine(server.url, retries=0), VllmEngine(server.url, prompt=DECIDE_PROMPT)))
        return opened[-1]

    yield pair
    for server, decide, base in opened:
        await decide.close()
        await base.close()
        await server.__aexit__()


@pytest.mark.parametrize("family", ["qwen", "gemma"])
async def test_cuts_read_on_the_base_model_are_the_servers_own_smaller_budgets(pair: Any, family: str) -> None:
    server, decide, base = await pair(family=family)
    asked = questions(24)
    one_by_one = [await decide.ask(question, BUDGETS) for question in asked[:4]]
    check = await decide.try_ladder(base, asked, 400)
    assert check.accepted
    assert (check.n, check.agreeing, check.failed) == (24, 24, 0)
    assert check.worst == pytest.approx(0, abs=1e-9)
    server.asked_to_think.clear()
    ladder = [await decide.ask(question, BUDGETS) for question in asked[:4]]
    assert server.asked_to_think == [400] * 4  # one thought a question, where it were three
    for one, other in zip(one_by_one, ladder, strict=True):
        assert other.budgets == one.budgets
        assert other.p2 == pytest.approx(one.p2)
        assert other.tokens.tolist() == one.tokens.tolist()
        assert other.finished.tolist() == one.finished.tolist()
        assert other.text is None
        assert (other.t2 > 0).all()
        assert (other.t2 <= other.t2[-1]).all()


async def test_another_prompt_is_not_accepted_and_budgets_are_asked_one_by_one(pair: Any) -> None:
    server, decide, base = await pair(DEFAULT_PROMPT)
    asked = [question for question in questions(60) if question.kind == "choice"]
    check = await decide.try_ladder(base, asked, 400)
    assert not check.accepted
    assert check.n == 30
    assert "are asked one by one" in str(check)
    server.asked_to_think.clear()
    await decide.ask(asked[0], (1, 2, 400))
    assert server.asked_to_think == [400, 2, 1]


@pytest.mark.parametrize("text", [lambda _: None, lambda text: text + " w1 w2 w3 w4"], ids=["no text", "another text"])
async def test_a_thought_that_cannot_be_read_again_is_asked_for(pair: Any, text: Any) -> None:
    server, decide, base = await pair()
    asked = questions(24)
    server.text = text
    failed = await decide.try_ladder(base, asked, 400)
    assert (failed.n, failed.failed, failed.accepted) == (0, 24, False)
    server.text = lambda text: text
    assert (await decide.try_ladder(base, asked, 400)).accepted
    server.text = text
    server.asked_to_think.clear()
    answer = await decide.ask(asked[0], (1, 2, 400))
    assert answer.budgets == (1, 2, 400)
    assert server.asked_to_think == [400, 2, 1]


async def test_an_offer_is_taken_before_the_first_question_with_several_budgets(pair: Any) -> None:
    server, decide, _ = await pair()
    asked, said = questions(24), []
    decide.offer_ladder(asked, said.append)
    await decide.ask(asked[0], (400,))
    assert (server.asked_to_think, server.asked, said) == ([400], [], [])
    answers = await asyncio.gather(*(decide.ask(question, BUDGETS) for question in asked[:4]))
    assert server.asked_to_think == [400] * (1 + 24 + 4)  # one comparison, and one thought a question
    assert [answer.budgets for answer in answers] == [BUDGETS] * 4
    (line,) = said
    assert line.startswith(server.url)
    assert "own answer on 24 of 24 questions" in line


async def test_an_offer_of_another_prompt_is_declined_aloud_and_one_of_few_questions_not_made(pair: Any) -> None:
    server, decide, _ = await pair(DEFAULT_PROMPT)
    said: list[str] = []
    decide.offer_ladder([question for question in questions(60) if question.kind == "choice"], said.append)
    await decide.ask(questions(1)[0], (1, 400))
    assert "are asked one by one" in said[0]
    assert server.asked_to_think == [400] * 31 + [1]
    decide.offer_ladder(questions(19), said.append)
    await decide.ask(questions(1)[0], (1, 400))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("n", "agreeing", "failed", "accepted"),
    [(30, 27, 0, True), (30, 26, 0, False), (19, 19, 0, False), (27, 27, 3, True), (26, 26, 4, False)],
)
def test_how_many_must_agree(n: int, agreeing: int, failed: int, accepted: bool) -> None:
    assert LadderCheck(n, agreeing, 0.01, failed).accepted is accepted

"""A real HTTP server with the decide route that goes wrong where it is told to.

Answers are a function of the question's text, so that any two runs get the same ones. A fault is scripted per question
and used up by one request; every request is written down.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Self

import numpy as np
from aiohttp import web

from calib.questions import SCORE_LEVELS, Question

PROTOCOL = "jev27-bare-v1"
MIX = 0.4
BUDGET = 1000

Fault = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
"""From the request and the good answer, what is sent instead."""


def questions(n: int, *, options: int = 4, dataset: str = "small", kind: str = "choice") -> list[Question]:
    """``n`` questions with distinct texts."""
    levels = {"noul": ("false", "true"), "score": SCORE_LEVELS}
    texts = levels.get(kind, tuple(f"option {j}" for j in range(options)))
    return [
        Question(f"q{i}", dataset, kind, f"state {i}", f"{dataset}: question {i}?", texts, i % len(texts))
        for i in range(n)
    ]


def truth(text: str, n: int) -> tuple[np.ndarray, np.ndarray, int]:
    """What the server thinks of a question: p1 (C,), p2 at the end of the thought (C,), tokens of the whole thought."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
    return rng.dirichlet(np.ones(n)), rng.dirichlet(np.full(n, 0.2)), int(rng.integers(100, 1500))


def read(text: str, n: int, budget: int) -> tuple[np.ndarray, int, bool]:
    """System 2 at a budget: p2 (C,), tokens, finished. A cut thought leans to System 1."""
    p1, p2, length = truth(text, n)
    return (p2, length, True) if length <= budget else (0.5 * (p1 + p2), budget, False)


def think_seconds(text: str, n: int, tokens: int, delay: float) -> float:
    """Seconds of System 2: at most 80 % of the delay, by tokens and a little by question."""
    return max(0.8 * delay, 1e-6) * tokens / 1500 * (0.9 + 0.1 * float(truth(text, n)[0][0]))


class MisbehavingServer:
    """``async with MisbehavingServer() as server: server.url``.

    Attributes
    ----------
    faults : dict of str to list of Fault
        By text of the question: what the next requests get, first to last; a good answer once they are used up.
    always : list of Fault
        What every request gets whose question has no fault of its own.
    asked : list of dict
        The bodies of all requests, in order.
    on_request : callable, optional
        Called with the number of requests so far.
    delay : float
        Seconds that each request takes; up to 80 % of them count as thought.
    info : dict
        What ``GET /v1/decide/info`` answers.
    """

    def __init__(self, *, delay: float = 0.0, **info: Any) -> None:
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.always: list[Fault] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.on_request: Callable[[int], None] | None = None
        self.delay = delay
        self.info: dict[str, Any] = {
            "protocol": PROTOCOL,
            "model": "tiny",
            "model_type": "test",
            "max_options": 256,
            "native_choice_options": 16,
            "temperatures": {"noul": 1.0, "choice": 1.0, "score": 1.0},
            "defaults": {
                "strategy": "single",
                "thinking": "auto",
                "threshold": 0.8,
                "mix": MIX,
                "think_budget": None,
            },
        } | info
        self.url = ""
        app = web.Application()
        app.router.add_post("/v1/decide", self._decide)
        app.router.add_get("/v1/decide/info", self._describe)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._runner.cleanup()

    def times_asked(self) -> Counter[str]:
        """Requests by text of the question."""
        return Counter(body["question"] for body in self.asked)

    async def _describe(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        return web.json_response(self.info)

    async def _decide(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.on_request is not None:
            self.on_request(len(self.asked))
        if self.delay:
            await asyncio.sleep(self.delay)
        answer = self._answer(body)
        script = self.faults[body["question"]]
        if script:
            return await script.pop(0)(request, answer)
        for fault in self.always:
            return await fault(request, answer)
        return web.json_response(answer)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        fixed = {"noul": ["false", "true"], "score": list(SCORE_LEVELS)}
        options = fixed.get(body["kind"]) or body["options"]
        text, n = body["question"], len(options)
        p1, _, _ = truth(text, n)
        p = p1
        answer: dict[str, Any] = {"kind": body["kind"], "options": options, "model": self.info["model"]}
        if body["thinking"] == "on":
            p2, tokens, finished = read(text, n, body["think_budget"])
            answer["thinking"] = thinking = {
                "used": True,
                "budget": body["think_budget"],
                "think_tokens": tokens,
                "think_seconds": think_seconds(text, n, tokens, self.delay),
                "finished_within_budget": finished,
            }
            if body.get("return_reasoning"):
                thinking["reasoning"] = thought(tokens)
            if body.get("system2_only"):
                answer["system"] = 2
                p = p2
            else:
                thinking.update(mode="on", threshold=0.8)
                if body.get("debug"):
                    thinking.update(system1=p1.tolist(), system2=p2.tolist())
                p = (1 - self.info["defaults"]["mix"]) * p1 + self.info["defaults"]["mix"] * p2
        best = int(p.argmax())
        answer.update(
            probabilities=p.tolist(), choice_index=best, choice=options[best], elapsed_seconds=max(self.delay, 1e-6)
        )
        return answer


def thought(tokens: int) -> str:
    """Text of a thought: that of a shorter one is its beginning."""
    return " ".join(f"w{i}" for i in range(tokens))


# --- faults -----------------------------------------------------------------------------------------------------------


def status(code: int, text: str = "on purpose", **headers: str) -> Fault:
    """An error of this status; ``Retry_After="1"`` becomes a header."""

    async def fault(_request: web.Request, _answer: dict[str, Any]) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"message": text, "code": code}}, status=code, headers=named)

    return fault


async def reset(request: web.Request, _answer: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks before any answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut_body(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks in the middle of the answer."""
    content = json.dumps(answer).encode()
    response = web.StreamResponse(headers={"Content-Length": str(len(content)), "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(content[: len(content) // 2])
    assert request.transport is not None
    request.transport.close()
    return response


async def cut_json(_request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """Half an answer, sent as if it were whole."""
    content = json.dumps(answer)
    return web.Response(text=content[: len(content) // 2], content_type="application/json")


def slow(seconds: float) -> Fault:
    """The good answer, late."""

    async def fault(_request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.json_response(answer)

    return fault


def edit(change: Callable[[dict[str, Any]], object]) -> Fault:
    """The good answer, changed."""

    async def fault(_request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        change(answer)
        return web.json_response(answer)

    return fault


def text(content: str) -> Fault:
    """This text in place of an answer."""

    async def fault(_request: web.Request, _answer: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=content, content_type="application/json")

    return fault


def everywhere(change: Callable[[list[float]], object]) -> Fault:
    """The good answer with each of its distributions changed."""

    def apply(answer: dict[str, Any]) -> None:
        change(answer["probabilities"])
        for name in ("system1", "system2"):
            if name in answer.get("thinking", {}):
                change(answer["thinking"][name])

    return edit(apply)

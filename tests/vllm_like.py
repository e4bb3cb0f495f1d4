"""A real HTTP server that answers as a stock vLLM does, with a toy model, and goes wrong where it is told to.

The shapes are those recorded from vLLM 0.32. The toy model is a function of the token ids before it, and its sampling
of the seed too, so that what was read from a cut of one thought can be compared with a run that had that budget.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self
from zlib import crc32

import numpy as np
from aiohttp import web

from tests.misbehaving import Fault

WORDS = [f" w{i}" for i in range(30)]
SPECIALS = {
    "qwen": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    "gemma": ["<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"],
    "none": ["<|im_start|>", "<|im_end|>"],
    "own": ["<|im_start|>", "<|im_end|>", "<muse>", "</muse>"],
}
MASKED = -9999.0
TAIL = {
    "service_tier": None,
    "system_fingerprint": "vllm-0.32.0-37e45f03",
    "kv_transfer_params": None,
    "metrics": None,
}


class Tokenizer:
    """Longest match first, over special tokens, words and single characters.

    ``merge_newlines``: two newlines are one token, unless a letter follows (as SmolLM2's). ``merged``: more texts that
    are one token.
    """

    def __init__(self, family: str, *, merge_newlines: bool, merged: Sequence[str]) -> None:
        characters = [chr(i) for i in range(32, 127)] + ["\n"]
        pieces = [*SPECIALS[family], *WORDS, " (", "yes", "no", "thought", "\n\n", "AA", "AB", *merged, *characters]
        self.pieces = list(dict.fromkeys(pieces))
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        longest = sorted((p for p in self.pieces if p != "\n\n"), key=len, reverse=True)
        newlines = ["\n\n(?![A-Za-z])"] if merge_newlines else []
        self._pattern = re.compile("|".join([*newlines, *map(re.escape, longest)]))

    def encode(self, text: str) -> list[int]:
        return [self.ids[piece] for piece in self._pattern.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


class VllmLike:
    """``async with VllmLike() as server: server.url``.

    Attributes
    ----------
    faults : dict of str to list of Fault
        By what is asked (``models``, ``render``, ``tokenize``, ``detokenize``, ``chat``, ``trace``, ``read``,
        ``mass``): what the next requests get.
    always : dict of str to Fault
        What every such request gets.
    asked : list of (str, dict)
        All requests.
    processed, max_logprobs : bool, int
        As ``--logprobs-mode`` and ``--max-logprobs``.
    logits : bool
        Lists logits in place of log-probabilities.
    ignores : set of str
        Of ``budget``, ``seed``, ``mask``, ``stop``, ``token_ids``: what requests say in vain.
    letters : float
        What a label's logit has over that of other tokens.
    end_share : float
        Chance of the end mark at each token of a thought.
    pace, per_event : float, int
        Of a streamed thought: seconds between two events, tokens in each (several under speculative decoding).
    stalls_after, breaks_after, fails_after : int or None
        Tokens after which a streamed thought stands still (one that is over by then: does not say so), loses its
        connection, or ends in an error event.
    left_at : list of int
        Of streams that the client left: the tokens that had been sent.
    """

    def __init__(
        self,
        family: str = "qwen",
        *,
        context: int = 600,
        opens: str = "model",
        merge_newlines: bool = False,
        merged: Sequence[str] = (),
        render: bool = True,
        reasoning_parser: bool = False,
    ) -> None:
        self.family, self.context, self.opens, self.reasoning_parser = family, context, opens, reasoning_parser
        self.tokenizer = Tokenizer(family, merge_newlines=merge_newlines, merged=merged)
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.always: dict[str, Fault] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.processed, self.max_logprobs, self.logits = True, 256, False
        self.ignores: set[str] = set()
        self.end_share = 0.02
        self.letters = 12.0
        self.pace, self.per_event = 0.0, 1
        self.stalls_after: int | None = None
        self.breaks_after: int | None = None
        self.fails_after: int | None = None
        self.left_at: list[int] = []
        self.models: list[dict[str, Any]] = [
            {"id": "toy", "object": "model", "owned_by": "vllm", "root": "/models/toy", "max_model_len": context}
        ]
        self.metrics = ""
        self.url = ""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        if render:
            app.router.add_post("/v1/chat/completions/render", self._render)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._runner.cleanup()

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        """What requests of one kind said."""
        return [body for asked, body in self.asked if asked == kind]

    # --- the toy model ------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int | None:
        marks = {"qwen": "</think>", "gemma": "<channel|>", "own": "</muse>"}
        return self.tokenizer.ids[marks[self.family]] if self.family in marks else None

    def logits_after(self, prompt: Sequence[int]) -> np.ndarray:
        """Over the whole vocabulary; what the prompt holds in brackets is likely: the labels."""
        rng = np.random.default_rng(crc32(np.array(prompt, dtype=np.int64).tobytes()))
        logits = 2 * rng.standard_normal(len(self.tokenizer.pieces))
        for label in set(re.findall(r"\((\w+)\)", self.tokenizer.decode(prompt))) - {"X"}:
            logits[self.tokenizer.ids[label]] += self.letters
        return logits

    def probabilities(self, prompt: Sequence[int], labels: Sequence[int]) -> np.ndarray:
        """What a read of these labels should give."""
        logits = self.logits_after(prompt)[list(labels)]
        p = np.exp(logits - logits.max())
        return p / p.sum()

    def mass(self, prompt: Sequence[int], labels: Sequence[int]) -> float:
        """The labels' share of the whole vocabulary."""
        logits = np.exp(self.logits_after(prompt))
        return float(logits[list(labels)].sum() / logits.sum())

    def thought(self, prompt: Sequence[int], most: int, seed: int, stop: Sequence[int]) -> tuple[list[int], str]:
        ids: list[int] = []
        words = [self.tokenizer.ids[word] for word in WORDS]
        while len(ids) < most:
            before = np.array([seed, *prompt, *ids], dtype=np.int64).tobytes()
            rng = np.random.default_rng(crc32(before))
            token = self.end if self.end is not None and rng.random() < self.end_share else int(rng.choice(words))
            ids.append(token)
            if token in stop:
                return ids, "stop"
        return ids, "length"

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _answer(self, kind: str, request: web.Request, body: dict[str, Any], answer: Any) -> web.StreamResponse:
        self.asked.append((kind, body))
        fault = self.faults[kind].pop(0) if self.faults[kind] else self.always.get(kind)
        if fault is not None:
            return await fault(request, answer)
        return _error(answer) if isinstance(answer, str) else web.json_response(answer)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._answer("models", request, {}, {"object": "list", "data": self.models})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return await self._answer("version", request, {}, {"version": "0.32.0"})

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.metrics) if self.metrics else web.Response(status=404)

    def chat(self, body: dict[str, Any]) -> list[int]:
        thinks = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        if self.family == "gemma":
            head = "<|turn>system\n<|think|><turn|>\n" if thinks else ""
            turns = "".join(f"<|turn>{m['role']}\n{m['content']}<turn|>\n" for m in body["messages"])
            return self.tokenizer.encode(f"{head}{turns}<|turn>model\n")
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"])
        text = f"{turns}<|im_start|>assistant\n"
        if self.family == "qwen":
            opened = {"model": "", "template": "<think>\n", "always": "<think>\n"}[self.opens]
            text += opened if thinks or self.opens == "always" else "<think>\n\n</think>\n\n"
        return self.tokenizer.encode(text)

    async def _render(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer("render", request, body, {"request_id": "r", "token_ids": self.chat(body)})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = self.chat(body) if "messages" in body else self.tokenizer.encode(body["prompt"])
        kind = "render" if "messages" in body else "tokenize"
        answer = {"count": len(ids), "max_model_len": self.context, "tokens": ids, "token_strs": None}
        return await self._answer(kind, request, body, answer)

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer("detokenize", request, body, {"prompt": self.tokenizer.decode(body["tokens"])})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not self.reasoning_parser:
            answer: Any = "thinking_token_budget is set but reasoning_config is not configured."
            return await self._answer("chat", request, body, answer)
        start = [self.tokenizer.ids["<muse>"]] if self.family == "own" else []
        ids = [*start, self.end, *self.tokenizer.encode(" w1")]
        message = {"role": "assistant", "content": " w1", "reasoning": None}
        choice = {"index": 0, "message": message, "finish_reason": "length", "stop_reason": None, "token_ids": ids}
        return await self._answer("chat", request, body, {"choices": [choice], **TAIL})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        if body.get("stream"):
            return await self._stream(request, body, self._traced(body, prompts))
        if not body.get("logprobs"):
            return await self._answer("trace", request, body, self._traced(body, prompts))
        kind = "read" if "allowed_token_ids" in body else "mass"
        return await self._answer(kind, request, body, self._read(body, prompts))

    def _traced(self, body: dict[str, Any], prompts: list[list[int]]) -> Any:
        (prompt,) = prompts
        if len(prompt) >= self.context:
            return f"This model's maximum context length is {self.context} tokens."
        most = min(body["max_tokens"], self.context - len(prompt)) + (10 if "budget" in self.ignores else 0)
        seed = len(self.asked) if "seed" in self.ignores else body["seed"]
        stop = () if "stop" in self.ignores else body["stop_token_ids"]
        ids, reason = self.thought(prompt, most, seed, stop)
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(ids),
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": ids[-1] if reason == "stop" else None,
            "token_ids": None if "token_ids" in self.ignores and not body.get("stream") else ids,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage, **TAIL}

    async def _stream(self, request: web.Request, body: dict[str, Any], whole: Any) -> web.StreamResponse:
        """The completion, event by event."""
        if isinstance(whole, str) or self.faults["trace"] or "trace" in self.always:
            return await self._answer("trace", request, body, whole)
        self.asked.append(("trace", body))
        (choice,) = whole["choices"]
        ids = choice["token_ids"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sent = 0
        try:
            while sent < len(ids):
                piece = ids[sent : sent + self.per_event]
                if self.stalls_after is not None and sent >= self.stalls_after:
                    await asyncio.sleep(60)
                if self.breaks_after is not None and sent >= self.breaks_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if self.fails_after is not None and sent >= self.fails_after:
                    error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
                    await response.write(f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode())
                    return response
                await asyncio.sleep(self.pace)
                sent += len(piece)
                last = sent == len(ids)
                stopped = last and choice["finish_reason"] == "stop"
                told = {
                    "index": 0,
                    "text": self.tokenizer.decode(piece[:-1] if stopped else piece),
                    "logprobs": None,
                    "finish_reason": choice["finish_reason"] if last else None,
                    "stop_reason": choice["stop_reason"] if last else None,
                }
                if "token_ids" not in self.ignores:
                    told["token_ids"] = piece
                if sent == len(piece):
                    told["prompt_token_ids"] = body["prompt"]
                event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "toy", "choices": [told]}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if self.stalls_after is not None:
                await asyncio.sleep(60)
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionResetError):
            self.left_at.append(sent)
            raise
        return response

    def _read(self, body: dict[str, Any], prompts: list[list[int]]) -> Any:
        n = body["logprobs"]
        if 0 <= self.max_logprobs < n:
            return f"Requested sample logprobs of {n}, which is greater than max allowed: {self.max_logprobs}"
        choices = [self._choice(i, prompt, body.get("allowed_token_ids"), n) for i, prompt in enumerate(prompts)]
        return {"id": "cmpl-2", "object": "text_completion", "choices": choices[::-1], "usage": {}, **TAIL}

    def _choice(self, index: int, prompt: list[int], allowed: list[int] | None, n: int) -> dict[str, Any]:
        logits = self.logits_after(prompt)
        raw = logits - np.log(np.exp(logits).sum())
        masked = np.full_like(raw, MASKED)
        kept = range(len(raw)) if allowed is None else allowed
        masked[list(kept)] = raw[list(kept)] - np.log(np.exp(raw[list(kept)]).sum())
        listed = logits if self.logits else masked if self.processed else raw
        drawn = int((raw if "mask" in self.ignores else masked).argmax())
        top = [int(i) for i in np.argsort(-listed, kind="stable")[:n]]
        logprobs = {
            "text_offset": [0],
            "tokens": [f"token_id:{drawn}"],
            "token_logprobs": [float(listed[drawn])],
            "top_logprobs": [{f"token_id:{i}": float(listed[i]) for i in dict.fromkeys([drawn, *top])}],
        }
        return {
            "index": index,
            "text": self.tokenizer.decode([drawn]),
            "logprobs": logprobs,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }


def _error(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": 400}}, status=400)

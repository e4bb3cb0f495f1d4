"""`VllmServer`: the routes of a stock vLLM server that the engine uses, each answer checked on entry.

Owns the wire format: token ids in and out of ``/v1/completions``, chats rendered to token ids, texts tokenised. Leaves
to others: retries and clocks (`calib.engine.http`), what is asked (`calib.engine.vllm`), what it means.

Three of vLLM's own ways are avoided. ``logprob_token_ids`` fails or kills the engine under speculative decoding, and
without it spoils the log-probabilities of other requests in the same step. ``thinking_token_budget`` is not kept with
MTP. The chat route splits off the thought, under a field that was renamed between versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from calib.engine.base import AskFailed
from calib.engine.http import HttpClient, Reply, shorten
from calib.errors import CalibError

__all__ = ["ABSENT", "Trace", "VllmServer"]

ABSENT = frozenset({"http_403", "http_404", "http_405", "http_501"})
"""Reasons that say a server lacks a route, or has it switched off (403: vLLM without ``--enable-scale-out``)."""

MASKED = -9999.0
"""Log-probability that stands for a masked token; so does anything below."""

_COMPLETIONS, _RENDER, _TOKENIZE, _DETOKENIZE = (
    "/v1/completions",
    "/v1/chat/completions/render",
    "/tokenize",
    "/detokenize",
)
_NEUTRAL = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""Explicit, because a model's generation_config would else cut the distribution that is read."""

_TOO_MANY = re.compile(r"logprobs of (\d+).*max allowed: (-?\d+)")
_TOKEN = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True)
class Trace:
    """A thought as token ids.

    Attributes
    ----------
    ids : tuple of int
        Without the end mark.
    ended : bool
        Whether the end mark came.
    generated : int
        Tokens that the server generated in ``seconds``.
    seconds : float
        Wall seconds of the request, from its first attempt.
    queue, prefill : float or None
        Seconds before the first token, where the server reports them.
    attempts : int
    """

    ids: tuple[int, ...]
    ended: bool
    generated: int
    seconds: float
    queue: float | None = None
    prefill: float | None = None
    attempts: int = 1

    @property
    def length(self) -> int:
        """Thinking tokens, the end mark among them: what a budget counts."""
        return len(self.ids) + self.ended


class VllmServer:
    """A stock vLLM server.

    Parameters
    ----------
    client : HttpClient
    cache_salt : str, optional
        Sent with each completion, so that only requests with the same one share cached prefixes.
    """

    def __init__(self, client: HttpClient, *, cache_salt: str | None = None) -> None:
        self.client = client
        self.model = ""
        self.cache_salt = cache_salt
        self._renders = True

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def models(self) -> list[Mapping[str, Any]]:
        """Served models, each with an ``id``."""
        data = (await self.client.get("/v1/models")).data
        models = data.get("data") if isinstance(data, dict) else None
        if not isinstance(models, list) or not models:
            raise AskFailed("missing_field", f"GET /v1/models names no model: {shorten(data, 80)}")
        for model in models:
            if not isinstance(model, dict) or not isinstance(model.get("id"), str):
                raise AskFailed("missing_field", f"GET /v1/models: a model without id: {shorten(model, 80)}")
        return models

    async def version(self) -> str | None:
        """The server's version; None when it does not tell."""
        try:
            data = (await self.client.get("/version")).data
        except AskFailed:
            return None
        version = data.get("version") if isinstance(data, dict) else None
        return version if isinstance(version, str) else None

    # --- texts and tokens ---------------------------------------------------------------------------------------------

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it stands, nothing added."""
        if not text:
            return ()
        payload = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return _ids(await self.client.post(_TOKENIZE, payload), "tokens", _TOKENIZE)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        if not ids:
            return ""
        data = (await self.client.post(_DETOKENIZE, {"model": self.model, "tokens": list(ids)})).data
        text = data.get("prompt") if isinstance(data, dict) else None
        if not isinstance(text, str):
            raise AskFailed("missing_field", f"{_DETOKENIZE} gave no prompt: {shorten(data, 80)}")
        return text

    async def render(self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of a chat up to where the model goes on, by the server's chat template.

        Raises
        ------
        CalibError
            The server has neither of the two routes that can do it.
        """
        payload = {
            "model": self.model,
            "messages": list(messages),
            "add_generation_prompt": True,
            "chat_template_kwargs": dict(kwargs),
        }
        if self._renders:
            try:
                return _ids(await self.client.post(_RENDER, payload), "token_ids", _RENDER)
            except AskFailed as failure:
                if failure.reason not in ABSENT:
                    raise
                self._renders = False
        try:
            return _ids(await self.client.post(_TOKENIZE, payload), "tokens", _TOKENIZE)
        except AskFailed as failure:
            if failure.reason not in ABSENT:
                raise
            raise CalibError(
                f"{self.client.url} can neither render a chat nor tokenise (POST {_RENDER} and POST {_TOKENIZE}: "
                f"{failure.detail}); calib needs one of them. Let the proxy in front of it pass both through, or give "
                "the address of vLLM itself"
            ) from None

    # --- completions --------------------------------------------------------------------------------------------------

    async def think(
        self, prompt: Sequence[int], *, most: int, end: int, seed: int, sampling: Mapping[str, Any]
    ) -> Trace:
        """One thought of at most ``most`` tokens, the end mark counted.

        Raises
        ------
        AskFailed
            Among others ``budget_exceeded`` when the server went on after ``most`` tokens.
        """
        payload = self._completion(
            prompt=list(prompt),
            max_tokens=most,
            stop_token_ids=[end],
            seed=seed,
            skip_special_tokens=False,
            return_token_ids=True,
            **sampling,
        )
        reply = await self.client.post(_COMPLETIONS, payload)
        (choice,) = _choices(reply, 1)
        ids = choice.get("token_ids")
        if not _is_ids(ids):
            raise AskFailed(
                "missing_field",
                "the completion lacks token_ids, which return_token_ids asks for (vLLM 0.10.2 or newer)",
            )
        if len(ids) > most:
            raise AskFailed("budget_exceeded", f"{len(ids)} tokens at max_tokens {most}")
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise AskFailed("unfinished", f"the completion ended by {reason!r}, expected stop or length")
        ended = end in ids
        if ended:
            kept = ids[: ids.index(end)]
        elif reason == "stop":
            # The model ended its turn within the thought. Where its end-of-turn token is returned, it is no thought.
            kept = ids[:-1] if choice.get("stop_reason") is None else ids
        else:
            kept = ids
        if reason == "stop" and not ended and choice.get("stop_reason") == end:
            kept, ended = ids, True  # the stop token was left out of the ids
        queue, prefill = _before_first_token(reply.data)
        return Trace(tuple(kept), ended, len(ids), reply.seconds, queue, prefill, reply.attempts)

    async def first_token(
        self, prompts: Sequence[Sequence[int]], *, allowed: Sequence[int] | None, top: int
    ) -> list[dict[int, float]]:
        """Log-probabilities of the next token after each prompt, by token id; masked ones are left out.

        Parameters
        ----------
        prompts : sequence of token ids
            All in one request.
        allowed : sequence of int or None
            Tokens that may be drawn; None allows all.
        top : int
            How many of the most likely to list; the drawn one is listed besides.
        """
        mask = {} if allowed is None else {"allowed_token_ids": list(allowed)}
        payload = self._completion(
            prompt=[list(prompt) for prompt in prompts],
            max_tokens=1,
            logprobs=top,
            return_tokens_as_token_ids=True,
            skip_special_tokens=False,
            **mask,
            **_NEUTRAL,
        )
        reply = await self.client.post(_COMPLETIONS, payload)
        return [_listed(choice, allowed) for choice in _choices(reply, len(prompts))]

    async def most_logprobs(self, prompt: Sequence[int], wanted: int) -> int:
        """How many log-probabilities the server lists (``--max-logprobs``), at most ``wanted``."""
        payload = self._completion(prompt=list(prompt), max_tokens=1, logprobs=wanted)
        try:
            await self.client.post(_COMPLETIONS, payload)
        except AskFailed as failure:
            match = _TOO_MANY.search(failure.detail)
            if failure.reason != "refused" or match is None:
                raise
            return int(match[2])
        return wanted

    async def forced_end(self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """What the server generates when its reasoning parser is told to end the thought at once.

        Raises
        ------
        AskFailed
            The server has no reasoning parser, or no chat route.
        """
        payload = {
            "model": self.model,
            "messages": list(messages),
            "chat_template_kwargs": dict(kwargs),
            "thinking_token_budget": 0,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        (choice,) = _choices(await self.client.post("/v1/chat/completions", payload), 1)
        ids = choice.get("token_ids")
        return tuple(ids) if _is_ids(ids) else ()

    def _completion(self, **fields: Any) -> dict[str, Any]:
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"model": self.model, "add_special_tokens": False, **fields, **salt}


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _ids(reply: Reply, name: str, route: str) -> tuple[int, ...]:
    ids = reply.data.get(name) if isinstance(reply.data, dict) else None
    if not _is_ids(ids):
        raise AskFailed("missing_field", f"{route} gave no list of token ids as {name}: {shorten(reply.data, 80)}")
    return tuple(ids)


def _choices(reply: Reply, n: int) -> list[Mapping[str, Any]]:
    """The answers in the order of the prompts."""
    choices = reply.data.get("choices") if isinstance(reply.data, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise AskFailed("missing_field", f"the completion lacks choices: {shorten(reply.data, 80)}")
    by_index = {choice.get("index"): choice for choice in choices}
    if len(choices) != n or set(by_index) != set(range(n)):
        raise AskFailed("wrong_length", f"{len(choices)} answers came back for {n} prompts")
    return [by_index[i] for i in range(n)]


def _listed(choice: Mapping[str, Any], allowed: Sequence[int] | None) -> dict[int, float]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise AskFailed("missing_field", "the completion lacks logprobs")
    try:
        (drawn,), (value,) = logprobs["tokens"], logprobs["token_logprobs"]
        pairs = {drawn: value, **logprobs["top_logprobs"][0]}
        listed = {int(_matched(token)[1]): float(value) for token, value in pairs.items()}
        token = int(_matched(drawn)[1])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise AskFailed("missing_field", f"logprobs are not as expected ({error!r}): {shorten(logprobs, 80)}") from None
    if allowed is not None and token not in allowed:
        raise AskFailed("ignored_mask", f"the server drew token {token}, which allowed_token_ids leaves out")
    listed = {token: value for token, value in listed.items() if not value <= MASKED}
    if any(math.isnan(value) or value == math.inf for value in listed.values()):
        raise AskFailed("nan", f"log-probabilities hold what is not a number: {shorten(listed, 80)}")
    return listed


def _matched(token: Any) -> re.Match[str]:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError(f"token {token!r} is not token_id:N")
    return match


def _before_first_token(data: Any) -> tuple[float | None, float | None]:
    """Seconds in the queue and of the prefill, of a server with ``--enable-per-request-metrics``."""
    metrics = data.get("metrics")
    if not isinstance(metrics, dict):
        return None, None
    queue, prefill = metrics.get("queue_time_ms"), metrics.get("time_to_first_token_ms")  # the latter from its schedule
    if isinstance(queue, int | float) and isinstance(prefill, int | float) and queue >= 0 and prefill >= 0:
        return queue / 1000, prefill / 1000
    return None, None

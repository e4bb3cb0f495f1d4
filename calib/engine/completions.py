"""`VllmServer`: the routes of a stock vLLM server that the engine uses, each answer checked on entry.

Owns the wire format: token ids in and out of ``/v1/completions``, chats rendered to token ids, texts tokenised. Leaves
to others: retries and clocks (`calib.engine.http`), what is asked (`calib.engine.vllm`), what it means.

Three of vLLM's own ways are avoided. ``logprob_token_ids`` fails or kills the engine under speculative decoding, and
without it spoils the log-probabilities of other requests in the same step. ``thinking_token_budget`` is not kept with
MTP. The chat route splits off the thought, under a field that was renamed between versions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from calib.engine.base import AskFailed
from calib.engine.closing import Closing
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
_FEWER = (20, 5, 2)
"""Numbers of log-probabilities to try where the server does not say how many it lists; 20 is vLLM's default."""
_TOKEN = re.compile(r"token_id:(\d+)")


_MISFITS = frozenset({"missing_field", "budget_exceeded"})
"""Reasons that say a server streams otherwise than asked for, so that the tokens that came are of no use."""

_MOVED = 0.01
"""Seconds by which the time to close a thought must have changed for its timer to be set anew."""

log = logging.getLogger(__name__)


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
    closed : bool
        Whether the deadline closed it.
    text : str or None
        Where it came with the tokens.
    """

    ids: tuple[int, ...]
    ended: bool
    generated: int
    seconds: float
    queue: float | None = None
    prefill: float | None = None
    attempts: int = 1
    closed: bool = False
    text: str | None = None

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
        self,
        prompt: Sequence[int],
        *,
        most: int,
        end: int,
        seed: int,
        sampling: Mapping[str, Any],
        closing: Closing | None = None,
    ) -> Trace:
        """One thought of at most ``most`` tokens, the end mark counted.

        With ``closing`` the thought is streamed, and cut where it stands when it must be closed: the server stops
        generating once the connection is closed. A stream that breaks gives the tokens that had come.

        Raises
        ------
        AskFailed
            Among others ``budget_exceeded`` when the server went on after ``most`` tokens, and ``deadline`` when it
            must be closed before its first token.
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
        if closing is not None:
            return await self._stream(payload, most, end, closing)
        reply = await self.client.post(_COMPLETIONS, payload, asks=True)
        (choice,) = _choices(reply, 1)
        ids = _generated(choice, most)
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise AskFailed("unfinished", f"the completion ended by {reason!r}, expected stop or length")
        kept, ended = _thought(ids, reason, choice.get("stop_reason"), end)
        queue, prefill = _before_first_token(reply.data)
        return Trace(kept, ended, len(ids), reply.seconds, queue, prefill, reply.attempts)

    async def _stream(self, payload: Mapping[str, Any], most: int, end: int, closing: Closing) -> Trace:
        pieces = _Pieces(most)
        started = time.perf_counter()
        attempts, closed = 1, False
        try:
            async with asyncio.timeout_at(closing.due) as timer:

                def take(event: Any) -> None:
                    pieces.take(event)
                    if not timer.expired() and abs(closing.due - (timer.when() or 0.0)) > _MOVED:
                        timer.reschedule(closing.due)

                reply = await self.client.stream(_COMPLETIONS, {**payload, "stream": True}, take)
                attempts = reply.attempts
        except TimeoutError:
            closed = pieces.reason is None
        except AskFailed as failure:
            if not pieces.ids or failure.reason in _MISFITS:
                raise
            log.info("%s: a thought broke after %d tokens (%s)", self.client.url, len(pieces.ids), failure.reason)
        seconds = time.perf_counter() - started
        if not pieces.ids:
            reason, said = ("deadline", "in time") if closed else ("unfinished", "in a stream that ended")
            raise AskFailed(reason, f"no thinking token came {said}", attempts=attempts)
        kept, ended = _thought(pieces.ids, pieces.reason, pieces.stop_reason, end)
        text = "".join(pieces.texts)
        return Trace(kept, ended, len(pieces.ids), seconds, attempts=attempts, closed=closed and not ended, text=text)

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
        try:
            reply = await self.client.post(_COMPLETIONS, payload, asks=True)
        except AskFailed as failure:
            if failure.reason == "refused" and _TOO_MANY.search(failure.detail):
                raise self._lists_too_few(top, failure) from None
            raise
        return [_listed(choice, allowed) for choice in _choices(reply, len(prompts))]

    async def most_logprobs(self, prompt: Sequence[int], wanted: int) -> int:
        """How many log-probabilities the server lists (``--max-logprobs``), at most ``wanted``.

        The refusal of too many says it; where it is worded in another way, fewer are tried.

        Raises
        ------
        CalibError
            Fewer than two: no comparison of labels can be read.
        """
        for tried in (wanted, *(few for few in _FEWER if few < wanted)):
            payload = self._completion(prompt=list(prompt), max_tokens=1, logprobs=tried)
            try:
                await self.client.post(_COMPLETIONS, payload, asks=True)
            except AskFailed as failure:
                if failure.reason != "refused" or "logprobs" not in failure.detail:
                    raise
                refused = failure
                if match := _TOO_MANY.search(failure.detail):
                    return int(match[2])
            else:
                return tried
        raise self._lists_too_few(_FEWER[-1], refused)

    def _lists_too_few(self, wanted: int, failure: AskFailed) -> CalibError:
        return CalibError(
            f"{self.client.url} lists fewer log-probabilities than the {wanted} that a read needs ({failure.detail}): "
            "start vllm serve with --max-logprobs 256"
        )

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


class _Pieces:
    """What has come of a streamed completion: one event may bring several tokens, or none."""

    def __init__(self, most: int) -> None:
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.reason: str | None = None
        self.stop_reason: Any = None
        self._most = most

    def take(self, event: Any) -> None:
        if isinstance(event, dict) and "error" in event:
            error = event["error"]
            code = error.get("code") if isinstance(error, dict) else None
            raise AskFailed(f"http_{code}" if type(code) is int else "unfinished", shorten(error))
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise AskFailed("missing_field", f"an event of the stream lacks choices: {shorten(event, 80)}")
        for choice in choices:  # none in an event that only tells usage
            self.ids += _generated(choice, self._most, len(self.ids))
            self.texts.append(str(choice.get("text") or ""))
            if choice.get("finish_reason") is not None:
                self.reason, self.stop_reason = choice["finish_reason"], choice.get("stop_reason")


def _generated(choice: Mapping[str, Any], most: int, before: int = 0) -> list[int]:
    """Token ids of a completion, or of a piece of one that had so many before."""
    ids = choice.get("token_ids")
    if not _is_ids(ids):
        raise AskFailed(
            "missing_field",
            "the completion lacks token_ids, which return_token_ids asks for (vLLM 0.10.2 or newer)",
        )
    if before + len(ids) > most:
        raise AskFailed("budget_exceeded", f"{before + len(ids)} tokens at max_tokens {most}")
    return ids


def _thought(ids: Sequence[int], reason: str | None, stop_reason: Any, end: int) -> tuple[tuple[int, ...], bool]:
    """The thought without its end mark, and whether that came."""
    if end in ids:
        return tuple(ids[: ids.index(end)]), True
    if reason == "stop" and stop_reason == end:
        return tuple(ids), True  # the stop token was left out of the ids
    if reason == "stop" and stop_reason is None:
        # The model ended its turn within the thought. Where its end-of-turn token is returned, it is no thought.
        return tuple(ids[:-1]), False
    return tuple(ids), False


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

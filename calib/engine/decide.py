"""`DecideEngine`: asks a server that speaks ``POST /v1/decide`` and ``GET /v1/decide/info``.

Owns this wire format and the checks of every answer; nothing that breaks one gets past as good. Leaves to others:
retries and clocks of HTTP (`calib.engine.http`), what is asked and kept (`calib.collect`).

How one question with several budgets becomes one thought: the largest budget is asked first, with both systems' parts
shown (``debug``). The server derives its sampling seed from the question, so a smaller budget cuts the same thought;
one that holds all of the tokens used needs no request, each other one is a ``system2_only`` request. Its thought is
compared with the beginning of the whole one, since batches move the last digits and it may part from it. Where the
server's base model can be asked too and gives the same answers (`DecideEngine.offer_ladder`), the smaller ones are
read there from cuts of the thought instead, which costs a read and not a thought each.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.engine.base import Answer, AskFailed, EngineInfo, PartlyFailed
from calib.engine.http import UNREACHABLE, HttpClient, Reply, shorten
from calib.engine.ladder import LadderCheck, Rungs
from calib.engine.prompts import DECIDE_PROMPT
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from calib.questions import SCORE_LEVELS, Question

__all__ = ["PROTOCOLS", "DecideEngine"]

PROTOCOLS = ("jev27-bare-v1",)
"""Values of ``protocol`` whose fields mean what this module takes them for."""

_DECIDE, _INFO = "/v1/decide", "/v1/decide/info"
_IDENTITY = (
    "protocol",
    "model",
    "model_type",
    "max_options",
    "native_choice_options",
    "temperatures",
    "simulated",
    "profile",
    "seed",
)
_SUM_TOLERANCE = 0.01
_MIX_TOLERANCE = 1e-3
_CLOCK_TOLERANCE = 1e-3
"""Seconds by which the server's clock may run ahead of ours."""

_HUGE = 1e300
_COMPARED_AT_A_TIME = 8
_TORN = 8
"""Characters at the end of a cut thought that may be another text in the whole one: its last token's."""

log = logging.getLogger(__name__)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Thought:
    """System 2 at one budget: p2 of shape (C,), tokens used, whether it ended by itself, seconds, text."""

    p2: Floats
    tokens: int
    finished: bool
    seconds: float
    text: str | None


class DecideEngine:
    """A server with the ``/v1/decide`` route: autotrust's own, or calib's gateway.

    Parameters
    ----------
    base_url : str
        ``http://host:port``; a trailing ``/v1`` or ``/v1/decide`` is dropped.
    client : HttpClient, optional
        Used instead of one made from the options below.
    **options
        Of `HttpClient`: ``timeout``, ``retries``, ``api_key_env``, ``connections``.
    """

    def __init__(self, base_url: str, *, client: HttpClient | None = None, **options: Any) -> None:
        root = base_url.rstrip("/").removesuffix("/decide").removesuffix("/v1")
        self.client = client or HttpClient(root, **options)
        self._info: EngineInfo | None = None
        self._ladder: VllmEngine | None = None
        self._offer: tuple[tuple[Question, ...], Callable[[str], None]] | None = None
        self._comparing = asyncio.Lock()
        self._compared = self._other = 0

    def __repr__(self) -> str:
        return f"DecideEngine({self.client.url!r})"

    async def info(self) -> EngineInfo:
        """Who answers, asked anew each time.

        Raises
        ------
        CalibError
            No server at the address, no such route, another protocol, or a description that lacks what is needed.
        """
        try:
            reply = await self.client.get(_INFO)
        except AskFailed as failure:
            raise await self._no_info(failure) from None
        self._info = self._described(reply.data)
        return self._info

    async def ask(
        self,
        question: Question,
        budgets: Sequence[int],
        *,
        system1: bool = True,
        keep_text: bool = False,
        deadline: float | None = None,  # noqa: ARG002 - the protocol knows none
    ) -> Answer:
        """System 1 and, for each budget of one thought, System 2.

        A score question never thinks: its answer holds no budget, whatever was asked. Seconds of System 2 are the
        server's own; those of System 1 are our wall time less them, or the server's own from a simulated one. The
        protocol has no deadline, so ``deadline`` changes nothing.

        Raises
        ------
        AskFailed
            No good answer. As `PartlyFailed` it carries the larger budgets, where only smaller ones failed.
        CalibError
            The server wants another API key, or cannot be described (see `info`).
        """
        ladder = () if question.kind == "score" else tuple(sorted({int(budget) for budget in budgets}))
        if ladder and ladder[0] < 1:
            raise CalibError(f"a think budget must be 1 token or more, got {ladder[0]}")
        _check_levels(question)
        info = self._info or await self.info()
        if len(ladder) > 1 and self._offer is not None:
            await self._take_offer(ladder[-1])
        if not ladder:
            return await self._system1(question, info) if system1 else _answer(None, math.nan, {})
        p1, t1 = None, math.nan
        # smaller budgets are compared with the thought, or read from it; a simulated one has no text to compare
        with_text = keep_text or (len(ladder) > 1 and not info.simulated)
        if system1:
            p1, t1, whole = await self._both(question, ladder[-1], info, with_text)
        else:
            whole = await self._system2(question, ladder[-1], info, with_text)
        thoughts = await self._cuts(question, ladder[:-1], whole)
        thoughts[ladder[-1]] = whole if keep_text else replace(whole, text=None)
        failure = None
        for budget in reversed(ladder[:-1]):
            if budget in thoughts:
                continue
            try:
                thoughts[budget] = await self._cut(question, budget, whole, info)
            except AskFailed as failed:
                failure = failure or failed
                if failed.reason == "timeout" or failed.reason in UNREACHABLE:
                    break  # the next one would wait as long for as little
        if failure is not None:
            failure.stage = "system2"
            raise PartlyFailed(failure, _answer(p1, t1, thoughts))
        return _answer(p1, t1, thoughts)

    def offer_ladder(self, questions: Sequence[Question], say: Callable[[str], None] = log.info) -> None:
        """Compare with the base model on the same address before the first question with several budgets.

        A server without one, which is not stock vLLM then, is asked budget by budget and nothing is said.

        Parameters
        ----------
        questions : sequence of Question
            About 30 that can think; fewer than `LadderCheck.FEWEST` decide nothing and are not asked.
        say : callable
            Gets the outcome, one line.
        """
        able = tuple(question for question in questions if question.kind != "score")
        self._offer = (able, say) if len(able) >= LadderCheck.FEWEST else None

    async def _take_offer(self, budget: int) -> None:
        async with self._comparing:  # whoever comes meanwhile waits for the outcome
            if self._offer is None:
                return
            questions, say = self._offer
            base = VllmEngine(self.client.url, client=self.client, prompt=DECIDE_PROMPT, label_mass=False)
            try:
                await base.info()
            except CalibError as error:
                log.debug("no base model to read on: %s", error)
            else:
                say(f"{self.client.url}: {await self.try_ladder(base, questions, budget)}")
            self._offer = None

    async def try_ladder(self, base: VllmEngine, questions: Sequence[Question], budget: int) -> LadderCheck:
        """Compare System 2 as the server reads it with the same thoughts read on its base model.

        When they agree, smaller budgets are from now on read from cuts of the one thought.

        Parameters
        ----------
        base : VllmEngine
            The base model of the same server, asked as the server asks it (`calib.engine.prompts.DECIDE_PROMPT`). The
            caller closes it.
        questions : sequence of Question
            About 30 that can think.
        budget : int
            Think budget, tokens.
        """
        info = self._info or await self.info()
        differences: list[float] = []
        agreeing = failed = 0
        slots = asyncio.Semaphore(_COMPARED_AT_A_TIME)

        async def compare(question: Question) -> None:
            nonlocal agreeing, failed
            async with slots:
                try:
                    whole = await self._system2(question, budget, info, keep_text=True)
                    (reading,) = (await _read_again(base, question, whole, (budget,))).readings
                except AskFailed:
                    failed += 1
                    return
            difference = float(np.abs(reading.p - whole.p2).max())
            differences.append(difference)
            agreeing += bool(reading.p.argmax() == whole.p2.argmax() and difference <= LadderCheck.TOLERANCE)

        await asyncio.gather(*(compare(question) for question in questions if question.kind != "score"))
        check = LadderCheck(len(differences), agreeing, max(differences, default=math.nan), failed)
        self._ladder = base if check.accepted else None
        return check

    async def close(self) -> None:
        """Give back connections."""
        await self.client.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _system1(self, question: Question, info: EngineInfo) -> Answer:
        reply = await self.client.post(_DECIDE, _request(question, thinking="off"), asks=True)
        with _blaming("system1", reply):
            data = _object(reply.data, "the answer")
            _check_options(data, question)
            if _thought_anyway(data):
                raise AskFailed("ignored_thinking", "thinking was switched off, and the server thought")
            p1 = _distribution(data, "probabilities", len(question.options))
            t1 = _seconds(data, "elapsed_seconds") if info.simulated else reply.seconds
        return _answer(p1, t1, {})

    async def _both(
        self, question: Question, budget: int, info: EngineInfo, keep_text: bool
    ) -> tuple[Floats, float, _Thought]:
        """System 1 and System 2 by one request."""
        request = _request(question, thinking="on", budget=budget, reasoning=keep_text)
        reply = await self.client.post(_DECIDE, request, asks=True)
        n = len(question.options)
        with _blaming("both", reply):
            data = _object(reply.data, "the answer")
            _check_options(data, question)
            thinking = _object(data.get("thinking"), "thinking")
            p1 = _distribution(thinking, "system1", n)
        with _blaming("system2", reply):
            thought = _thought(thinking, "system2", thinking, n, budget)
            mixed = _distribution(data, "probabilities", n)
            if info.raw.get("policy") is None:  # a gateway's policy may mix by route, pool and temperatures
                _check_mix(mixed, p1, thought.p2, info.mix)
            t1 = self._rest(data, reply, thought, info)
        return p1, t1, thought

    def _rest(self, data: Mapping[str, Any], reply: Reply, thought: _Thought, info: EngineInfo) -> float:
        """Seconds that are not System 2's."""
        whole = _seconds(data, "elapsed_seconds") if info.simulated else reply.seconds
        if thought.seconds > whole + _CLOCK_TOLERANCE:
            raise AskFailed("bad_seconds", f"think_seconds {thought.seconds:g} exceed the whole {whole:g} s")
        return max(0.0, whole - thought.seconds)

    async def _system2(self, question: Question, budget: int, info: EngineInfo, keep_text: bool) -> _Thought:
        request = _request(question, thinking="on", budget=budget, reasoning=keep_text)
        request["system2_only"] = True
        reply = await self.client.post(_DECIDE, request, asks=True)
        with _blaming("system2", reply):
            data = _object(reply.data, "the answer")
            _check_options(data, question)
            if data.get("system") != 2:
                # A server that does not know the field drops it without a word, and answers with the mix.
                raise AskFailed("missing_field", "the answer lacks system: 2, so it may not be System 2's alone")
            thinking = _object(data.get("thinking"), "thinking")
            thought = _thought(data, "probabilities", thinking, len(question.options), budget)
            self._rest(data, reply, thought, info)
        return thought

    async def _cuts(self, question: Question, budgets: Sequence[int], whole: _Thought) -> dict[int, _Thought]:
        """Those budgets that cut the thought, read by the ladder; none where it cannot, so that they are asked."""
        cutting = [budget for budget in budgets if budget < whole.tokens]
        if self._ladder is None or not cutting:
            return {}
        try:
            rungs = await _read_again(self._ladder, question, whole, cutting)
        except AskFailed:
            return {}
        read = min(rungs.read_seconds, whole.seconds)
        return {
            budget: _Thought(
                p2=reading.p,
                tokens=budget,
                finished=False,
                seconds=(whole.seconds - read) * budget / whole.tokens + read,  # derived: in proportion to the tokens
                text=None,
            )
            for budget, reading in zip(rungs.budgets, rungs.readings, strict=True)
        }

    async def _cut(self, question: Question, budget: int, whole: _Thought, info: EngineInfo) -> _Thought:
        """The same thought at a smaller budget."""
        if whole.tokens <= budget:  # it ended, or met the end of the context, before this budget would cut it
            return whole
        compare = whole.text is not None and not info.simulated
        thought = await self._system2(question, budget, info, keep_text=compare)
        if thought.finished or thought.tokens != budget:
            raise AskFailed(
                "other_thought",
                f"at budget {budget} the thought {'ended' if thought.finished else 'was cut'} after {thought.tokens} "
                f"tokens, at a larger one after {whole.tokens}: two different thoughts",
                stage="system2",
            )
        if compare and thought.text is not None and whole.text is not None:
            self._compared += 1
            self._other += not whole.text.startswith(thought.text.rstrip()[:-_TORN])
        return replace(thought, text=None)

    def remarks(self) -> list[str]:
        """What was odd about the answers so far, in words."""
        if not self._other:
            return []
        return [
            f"{self._other} of {self._compared} thoughts at a smaller budget are not the beginning of the one at the "
            "largest, though they were asked for with one seed: p2 at smaller budgets is that of other thoughts there"
        ]

    # --- the server's description -------------------------------------------------------------------------------------

    async def _no_info(self, failure: AskFailed) -> CalibError:
        url, tried = self.client.url, f"GET {_INFO}"
        if failure.reason not in ("http_404", "http_405"):
            tries = f"{failure.attempts} attempts in {failure.seconds:.1f} s"
            return CalibError(
                f"{url} does not say what it is ({failure.reason} after {tries}: {failure.detail}). "
                f"Start the server or mend the address, and see that this answers: curl {url.rstrip('/')}{_INFO}",
                exit_code=1,
            )
        try:
            models = (await self.client.get("/v1/models")).data
            names = ", ".join(str(model["id"]) for model in models["data"])
            found = f"GET /v1/models (an OpenAI-compatible server of: {shorten(names)})"
        except (AskFailed, KeyError, TypeError):
            found = "GET /v1/models (no answer of use either)"
        return CalibError(
            f"{url} has no decide route. Tried: {tried} ({failure.detail}); {found}. "
            "Expected a server with POST /v1/decide and GET /v1/decide/info: "
            "give the address of one (calib serve starts one in front of an engine)"
        )

    def _described(self, raw: Any) -> EngineInfo:
        where = f"{self.client.url.rstrip('/')}{_INFO}"
        if not isinstance(raw, dict):
            raise CalibError(f"{where}: expected a JSON object, got {shorten(raw, 80)}")
        protocol = raw.get("protocol")
        if protocol not in PROTOCOLS:
            raise CalibError(
                f"{where}: protocol is {protocol!r}, expected {' or '.join(map(repr, PROTOCOLS))}. "
                "Its answers may mean something else: use a server of this protocol, or a newer calib"
            )
        model, defaults = raw.get("model"), raw.get("defaults")
        if not isinstance(model, str) or not model:
            raise CalibError(f"{where}: model should be the served model's name, got {model!r}")
        if not isinstance(defaults, dict):
            raise CalibError(f"{where}: defaults should be an object with threshold and mix, got {defaults!r}")
        for name, top in (("threshold", math.inf), ("mix", 1.0)):
            value = _number(defaults.get(name))
            if value is None or not 0 <= value <= top:
                expected = "0 or more" if top > 1 else "from 0 to 1"
                raise CalibError(f"{where}: defaults.{name} should be {expected}, got {defaults.get(name)!r}")
        return EngineInfo(
            model=model,
            identity=_identity(raw),
            threshold=float(defaults["threshold"]),
            mix=float(defaults["mix"]),
            simulated=raw.get("simulated") is True,
            raw=raw,
        )


def _identity(raw: Mapping[str, Any]) -> dict[str, Any]:
    """All that the server tells of what can change an answer.

    Threshold, mix and budget are left out: calib writes them back, and both systems' parts do not depend on them. So
    is whatever else a server may tell (its arm, its load): a list of what counts cannot be upset by a new field.
    """
    own = raw.get("identity")
    if isinstance(own, dict) and own:  # calib's gateway knows the engine behind it better than these fields do
        return dict(own)
    identity = {name: raw[name] for name in _IDENTITY if name in raw}
    if "strategy" in raw["defaults"]:
        identity["strategy"] = raw["defaults"]["strategy"]
    return identity


# --- one request, one answer ------------------------------------------------------------------------------------------


def _request(
    question: Question, *, thinking: str, budget: int | None = None, reasoning: bool = False
) -> dict[str, Any]:
    request: dict[str, Any] = {
        "kind": question.kind,
        "state": question.state,
        "question": question.question,
        "thinking": thinking,  # always sent: what a server does without it depends on its revision
    }
    if question.kind == "choice":
        request["options"] = question.options
    if budget is not None:
        request.update(think_budget=budget, debug=True)
    if reasoning:
        request["return_reasoning"] = True
    return request


def _answer(p1: Floats | None, t1: float, thoughts: Mapping[int, _Thought]) -> Answer:
    budgets = tuple(sorted(thoughts))
    read = [thoughts[budget] for budget in budgets]
    return Answer(
        p1=p1,
        t1=t1,
        budgets=budgets,
        p2=np.array([thought.p2 for thought in read]) if read else np.empty((0, 0 if p1 is None else len(p1))),
        tokens=np.array([thought.tokens for thought in read], dtype=np.int64),
        finished=np.array([thought.finished for thought in read], dtype=np.bool_),
        t2=np.array([thought.seconds for thought in read], dtype=np.float64),
        label_mass2=np.full(len(read), np.nan),
        text=read[-1].text if read else None,
    )


async def _read_again(base: VllmEngine, question: Question, whole: _Thought, budgets: Sequence[int]) -> Rungs:
    """The same thought read on the base model."""
    if whole.text is None:
        raise AskFailed("missing_field", "the answer lacks the thought's text, which return_reasoning asks for")
    return await base.read_thought(question, whole.text, budgets, tokens=whole.tokens, finished=whole.finished)


class _blaming:  # noqa: N801 - reads as a word in `with _blaming(...)`
    """Puts the stage, the seconds and the attempts of a reply into an `AskFailed` raised while it is read."""

    def __init__(self, stage: str, reply: Reply) -> None:
        self._stage = stage
        self._reply = reply

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, AskFailed):
            error.stage, error.seconds, error.attempts = self._stage, self._reply.seconds, self._reply.attempts


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_levels(question: Question) -> None:
    if question.kind == "score" and question.options != SCORE_LEVELS:
        raise AskFailed(
            "refused",
            f"the server's score levels are {SCORE_LEVELS[0]} to {SCORE_LEVELS[-1]}, this question has "
            f"{shorten(list(question.options), 80)}: give it the kind choice",
        )


def _check_options(data: Mapping[str, Any], question: Question) -> None:
    if data.get("degraded") is True:
        raise AskFailed("degraded", f"the gateway gave System 1's answer alone ({data.get('degraded_reason')})")
    options = data.get("options")
    if options is None:
        raise AskFailed("missing_field", "the answer lacks options")
    if not isinstance(options, list) or tuple(options) != question.options:
        raise AskFailed("wrong_options", f"options came back as {shorten(options, 80)}: the order cannot be trusted")


def _check_mix(mixed: Floats, p1: Floats, p2: Floats, mix: float) -> None:
    """Whether both parts are those that the answer was made of: a foreign mix or a mixed-up part shows here."""
    off = float(np.abs(mixed - ((1 - mix) * p1 + mix * p2)).max())
    if off > _MIX_TOLERANCE:
        raise AskFailed(
            "mix_mismatch",
            f"probabilities are {off:.2g} off (1 - mix) * system1 + mix * system2 at the mix {mix:g} of {_INFO}",
        )


def _thought_anyway(data: Mapping[str, Any]) -> bool:
    thinking = data.get("thinking")
    return isinstance(thinking, dict) and thinking.get("used") is not False


def _thought(
    holder: Mapping[str, Any], name: str, thinking: Mapping[str, Any], n_options: int, budget: int
) -> _Thought:
    if thinking.get("used") is not True:
        raise AskFailed("ignored_thinking", "thinking was asked for, and the server did not think")
    tokens, finished = thinking.get("think_tokens"), thinking.get("finished_within_budget")
    if type(tokens) is not int or tokens < 0:
        raise AskFailed("missing_field", f"think_tokens should be a count, got {tokens!r}")
    if type(finished) is not bool:
        raise AskFailed("missing_field", f"finished_within_budget should be true or false, got {finished!r}")
    if tokens > budget:
        raise AskFailed("budget_exceeded", f"{tokens} thinking tokens at think_budget {budget}")
    if thinking.get("closed_by_deadline") is True:
        raise AskFailed(
            "closed_by_deadline",
            f"the gateway's deadline closed the thought after {tokens} tokens, so it is not the one of think_budget "
            f"{budget}: ask the server behind it, or a gateway without a deadline",
        )
    text = thinking.get("reasoning")
    return _Thought(
        p2=_distribution(holder, name, n_options),
        tokens=tokens,
        finished=finished,
        seconds=_seconds(thinking, "think_seconds"),
        text=text if isinstance(text, str) else None,
    )


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise AskFailed("missing_field", f"{name} should be an object, got {shorten(value, 80)}")
    return value


def _number(value: Any) -> float | None:
    """Return a finite number; None for anything else, also for true and for an integer that no float can hold."""
    if type(value) not in (int, float) or not -_HUGE < value < _HUGE:
        return None
    return float(value)


def _seconds(holder: Mapping[str, Any], name: str) -> float:
    value = holder.get(name)
    if value is None:
        raise AskFailed("missing_field", f"the answer lacks {name}")
    seconds = _number(value)
    if seconds is None or seconds < 0:
        raise AskFailed("bad_seconds", f"{name} is {shorten(repr(value), 80)}")
    return seconds


def _distribution(holder: Mapping[str, Any], name: str, n_options: int) -> Floats:
    """Checked and renormalised probabilities, shape (C,)."""
    values = holder.get(name)
    if not isinstance(values, list):
        raise AskFailed("missing_field", f"{name} should be a list, got {shorten(values, 80)}")
    if len(values) != n_options:
        raise AskFailed("wrong_length", f"{name} holds {len(values)} numbers for {n_options} options")
    numbers = [number for value in values if (number := _number(value)) is not None]
    if len(numbers) != n_options:
        raise AskFailed("nan", f"{name} holds what is not a finite number: {shorten(values, 80)}")
    if min(numbers) < 0:
        raise AskFailed("negative", f"{name} holds {min(numbers):g}")
    total = math.fsum(numbers)
    if abs(total - 1) > _SUM_TOLERANCE:
        raise AskFailed("sum_off", f"{name} sums to {total:.6g}")
    return np.array(numbers) / total

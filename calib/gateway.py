"""The decision behind `POST /v1/decide`: one request, any `Engine`, one `Policy`; no HTTP.

Requests and answers have the shape of autotrust's ``serve_decide.py``, so that its clients work unchanged. What a
request does not say, the policy says: threshold and think budget of a request win over the policy's, and a plain
``thinking: auto`` is answered under the policy whole. Without a policy the engine's own defaults hold. The rule is
`Policy.alone`, `Policy.thinks` and `Policy.combine`, the code that `calib.policy.decide` applies offline: temperatures
and pool of the policy too. ``debug`` and ``system2_only`` show the systems as they answered, never calibrated.

A deadline, of the policy or of the request, counts from when the request arrived. An engine that keeps deadlines closes
the thought in time and reads the answer from the cut; in front of any other one the gateway stops waiting. Whatever
happens to System 2, a question that System 1 answered gets that answer, marked ``degraded``, and is never an error.

Routes look at what a request carries: its dataset (in the body, else by a header that the HTTP part reads), its kind
and its number of options. These are all the keys that a policy's routes can have; two sets of options of the same
length are told apart by a dataset of their own.

Leaves to others: HTTP (`calib.serve`), the fields of requests and answers (`calib.wire`), wire formats of models and
closing a thought (`calib.engine`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from calib import __version__
from calib.engine.base import Answer, AskFailed, Engine, EngineInfo, ServerBusy
from calib.errors import CalibError
from calib.policy import Policy, confidence
from calib.questions import Question, text_hash
from calib.wire import (
    MAX_OPTIONS,
    NATIVE_OPTIONS,
    BadRequest,
    DecideAnswer,
    DecideRequest,
    ErrorBody,
    System2Answer,
    question_of,
)

__all__ = [
    "CONTEXT_TOKENS",
    "MAX_OPTIONS",
    "PROTOCOL",
    "BadRequest",
    "DecideAnswer",
    "DecideRequest",
    "ErrorBody",
    "Gateway",
    "Observation",
    "System2Answer",
    "policy_version",
]

PROTOCOL = "jev27-bare-v1"
CONTEXT_TOKENS = 32768
_CHARACTERS_PER_TOKEN = 4
_GRACE = 0.1
"""Seconds after the deadline that System 1 may still take, as nothing else could be answered. A simulated engine, which
keeps deadlines in its own seconds, has them too."""

Floats = NDArray[np.float64]

# --- what is told of a decision ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """One decision in numbers, without any text: what logs and metrics are made of.

    Attributes
    ----------
    at : float
        Unix seconds of the answer.
    hash : str
        Hexadecimal; of kind, state, question and options (`calib.questions.text_hash`).
    dataset : str
        Empty when the request names none.
    kind : str
    n_options : int
    p1 : tuple of float
        As System 1 gave it; empty when the request skipped System 1.
    confidence : float
        As the policy sees it: of the calibrated p1, by its definition. NaN without p1.
    think : bool
        Whether it was for System 2, whatever came of it.
    mode : str
        Effective thinking mode: ``off``, ``auto``, ``on``; ``system2`` when the request skipped System 1.
    tokens : int
        Thinking tokens, as far as known when System 2 failed.
    finished : bool
        Whether the thought ended by itself.
    closed : bool
        Whether the deadline closed the thought.
    degraded : bool
        Whether System 1's answer stood in for a System 2 that failed or was late.
    seconds : float
        The whole request; a simulated engine's own.
    t1, t2 : float
        Seconds of System 1 and of System 2; NaN for one that was not asked.
    policy_version : str or None
        None without a policy.
    """

    at: float
    hash: str
    dataset: str
    kind: str
    n_options: int
    p1: tuple[float, ...]
    confidence: float
    think: bool
    mode: str
    tokens: int
    finished: bool
    closed: bool
    degraded: bool
    seconds: float
    t1: float
    t2: float
    policy_version: str | None


# --- deciding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """A request with all that it is answered under."""

    request: DecideRequest
    question: Question
    mode: str
    policy: Policy
    budget: int | None
    """As the answer shows it: None is the context window."""
    deadline: float | None
    started: float

    @property
    def asked(self) -> dict[str, Any]:
        """What the policy's rule looks at besides probabilities."""
        return {"kind": self.question.kind, "n_options": len(self.question.options)}


@dataclass(frozen=True, slots=True)
class _Thought:
    """What came of System 2: an answer with its distribution, or why there is none."""

    answer: Answer | None = None
    p2: Floats | None = None
    tokens: int = 0
    seconds: float = math.nan
    failed: str | None = None


class Gateway:
    """Answers requests over one engine under one policy; knows nothing of HTTP.

    Parameters
    ----------
    engine : Engine
    info : EngineInfo
        What ``engine.info()`` returned.
    policy : Policy, optional
        Without one the engine's defaults hold, and a thought may fill the context window.
    context_tokens : int
        The longest thought that the engine can hold.
    observe : callable, optional
        Gets an `Observation` of each decision, just before its answer is returned; must be quick and must not raise.
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        policy: Policy | None = None,
        *,
        context_tokens: int = CONTEXT_TOKENS,
        observe: Callable[[Observation], None] | None = None,
    ) -> None:
        self.engine = engine
        self.info = info
        self.policy = policy
        self.context_tokens = context_tokens
        self.version = None if policy is None else policy_version(policy)
        self._observe = observe
        self._calls: set[asyncio.Task[Answer]] = set()
        self._policy = policy or Policy(threshold=info.threshold, mix=info.mix, think_budget=context_tokens)
        own = _mapping(info.raw.get("defaults"))
        self._strategy = str(own.get("strategy", "single"))
        # under a policy a plain request thinks as the policy says, whatever the engine's server would do
        self._thinking = "auto" if policy or own.get("thinking") not in ("off", "on") else str(own["thinking"])

    def describe(self) -> dict[str, Any]:
        """The answer to ``GET /v1/decide/info``: the reference's fields, and what is effective here."""
        raw, policy = self.info.raw, self.policy
        own: dict[str, Any] = {
            "protocol": PROTOCOL,
            "model": self.info.model,
            "model_type": raw.get("model_type", "unknown"),
            "identity": self._identity(),
            "max_options": MAX_OPTIONS,
            "native_choice_options": NATIVE_OPTIONS,
            "temperatures": raw.get("temperatures", {"noul": 1.0, "choice": 1.0, "score": 1.0}),
            "defaults": {
                "strategy": self._strategy,
                "thinking": self._thinking,
                "threshold": self._policy.threshold,
                "mix": self._policy.mix,
                "think_budget": policy.think_budget if policy else None,
            },
            "reasoning_controls": {
                "enable_thinking": True,
                "reasoning_effort": None,
                "think_budget": f"most thinking tokens; without it up to {self.context_tokens}"
                if policy is None
                else f"most thinking tokens; without it the policy's {policy.think_budget}",
            },
            "deadline": self._policy.deadline,
            "keeps_deadline": self.info.keeps_deadline,
            "policy": None,
            "gateway": f"calib {__version__}",
        }
        if policy is not None:
            names = ["threshold", "mix", "think_budget", "arm", "confidence", "routes"]
            names += ["temperatures"] * (policy.temperatures is not None) + ["pool"] * (policy.pool != "linear")
            names += ["deadline", "on_deadline"] * (policy.deadline is not None)
            plain = policy.to_dict()
            own["policy"] = {name: plain[name] for name in names} | {"version": self.version}
        if self.info.simulated:
            own["simulated"] = True
        return {**raw, **own}

    def _identity(self) -> dict[str, Any]:
        """The engine's; with temperatures of System 1, answers without thinking are not the engine's own any more."""
        first = self._policy.calibration.only("p1")
        calibrated = {} if first.nothing else {"gateway_temperatures": first.to_dict()}
        return dict(self.info.identity) | calibrated

    async def decide(
        self, request: DecideRequest, *, dataset: str | None = None, arrived: float | None = None
    ) -> dict[str, Any]:
        """Answer one request, wholly under the policy that stands when it starts.

        Parameters
        ----------
        request : DecideRequest
        dataset : str, optional
            Where the question comes from, when the request itself does not say.
        arrived : float, optional
            When the request arrived, by `time.perf_counter`; now when left out. Deadline and seconds count from there.

        Raises
        ------
        BadRequest
            When the request asks for what cannot be.
        AskFailed, ServerBusy
            As the engine raises them for System 1, and for System 2 when the request skips System 1; `AskFailed` also
            when the answer is no distribution, and with the reason ``deadline`` when there is none in time.
        """
        case = self._case(request, dataset, time.perf_counter() if arrived is None else arrived)
        if request.system2_only:
            return await self._system2_only(case)

        question, policy = case.question, case.policy
        first = await self._within(self.engine.ask(question, ()), self._left(case, 0.0, grace=_GRACE), "system1")
        p1 = _usable(first.p1, question, "system1")
        p = policy.alone(p1, **case.asked)
        thinks = case.mode == "on" or (case.mode == "auto" and bool(policy.thinks(p1, **case.asked)))
        thought: _Thought | None = None
        failed: str | None = None
        if thinks and (left := self._left(case, first.t1)) is not None and left <= 0:
            failed = "deadline"  # System 1 alone took all of the time, and System 2 is not asked
        elif thinks:
            thought = await self._try_to_think(case, first.t1)
            if thought.answer is None:
                failed = thought.failed
            elif thought.answer.closed and policy.on_deadline == "system1":
                failed = "deadline"
            else:
                finished = bool(thought.answer.finished[0])
                p = policy.combine(p1, cast(Floats, thought.p2), **case.asked, finished=finished)

        elapsed = self._elapsed(case, first, thought)
        answer: dict[str, Any] = {
            "kind": request.kind,
            "effective_kind": request.kind,
            "options": question.options,
            **_choice(p, question),
            "adaptation": self._adaptation(request, question),
            "protocol": PROTOCOL,
            "model": self.info.model,
            "usage": _usage(question, thought, system1=True),
            "elapsed_seconds": elapsed,
            # System 1; the thought; the answer read, which a thought that failed did not come to
            "num_model_requests": 1 if thought is None else 2 if thought.failed else 3,
        }
        if self.version is not None:
            answer["policy_version"] = self.version
        if failed is not None:
            answer |= {"degraded": True, "degraded_reason": failed}
        if case.mode != "off":
            answer["thinking"] = self._thinking_told(case, p1, thought)
        if self._observe is not None:
            self._observe(self._observed(case, p1, thinks, thought, failed is not None, elapsed, first.t1))
        return answer

    async def _system2_only(self, case: _Case) -> dict[str, Any]:
        request, question = case.request, case.question
        thought = await self._think(case, 0.0)
        elapsed = self._elapsed(case, None, thought)
        usage = _usage(question, thought, system1=False)
        del usage["total_tokens"]  # as at the reference
        answer = {
            "kind": request.kind,
            "options": question.options,
            **_choice(cast(Floats, thought.p2), question),
            "system": 2,
            "model": self.info.model,
            "thinking": {"used": True, "budget": case.budget, **_told(request, thought)},
            "usage": usage,
            "elapsed_seconds": elapsed,
            "num_model_requests": 2,
        }
        if self.version is not None:
            answer["policy_version"] = self.version
        if self._observe is not None:
            self._observe(self._observed(case, None, True, thought, False, elapsed, math.nan))
        return answer

    async def _try_to_think(self, case: _Case, t1: float) -> _Thought:
        """System 2's answer, or why there is none: System 1's stands in for it then."""
        asked = time.perf_counter()
        try:
            return await self._think(case, t1)
        except AskFailed as failure:
            reason, tokens, told = failure.reason, failure.tokens, failure.seconds
        except ServerBusy:
            reason, tokens, told = "busy", 0, math.nan
        except CalibError:  # a key that is refused from now on, a server that was replaced
            reason, tokens, told = "misconfigured", 0, math.nan
        except OSError:
            reason, tokens, told = "connection", 0, math.nan
        seconds = told if self.info.simulated and math.isfinite(told) else time.perf_counter() - asked
        return _Thought(tokens=tokens, seconds=seconds, failed=reason)

    async def _think(self, case: _Case, t1: float) -> _Thought:
        question, left = case.question, self._left(case, t1)
        if left is not None and left <= 0:
            raise AskFailed("deadline", f"no time is left of {case.deadline:g} s", stage="system2")
        asked = time.perf_counter()
        call = self.engine.ask(
            question,
            (min(case.policy.think_budget, self.context_tokens),),
            system1=False,
            keep_text=case.request.return_reasoning,
            deadline=left if self.info.keeps_deadline else None,
        )
        grace = _GRACE if self.info.simulated else 0.0
        answer = await self._within(call, None if left is None else left + grace, "system2")
        if len(answer.p2) != 1:
            raise AskFailed("wrong_length", f"one think budget was asked, {len(answer.p2)} answered", stage="system2")
        p2 = _usable(answer.p2[0], question, "system2")
        seconds = float(answer.t2[0])
        if not math.isfinite(seconds):
            seconds = time.perf_counter() - asked
        return _Thought(answer, p2, int(answer.tokens[0]), seconds)

    async def _within(self, call: Coroutine[Any, Any, Answer], seconds: float | None, stage: str) -> Answer:
        """The engine's answer, waited for no longer than these seconds.

        The call is cancelled then, and whatever it still does is nobody's concern: an engine that takes its time to
        stop must not hold up the answer.

        Raises
        ------
        AskFailed
            Reason ``deadline``.
        """
        if seconds is None:
            return await call
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._over)
        try:
            await asyncio.wait((task,), timeout=max(0.0, seconds))
            if not task.done():
                raise AskFailed("deadline", "no answer came in time", stage=stage, seconds=seconds)
            return task.result()
        finally:
            task.cancel()  # also when the client is gone; nothing happens to one that is done

    def _over(self, task: asyncio.Task[Answer]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # seen, so that the loop does not warn of one that nobody waited for

    def _left(self, case: _Case, t1: float, *, grace: float = 0.0) -> float | None:
        """Seconds until the deadline; after ``t1`` of them by the clock of a simulated engine."""
        if case.deadline is None:
            return None
        if self.info.simulated:
            return case.deadline - t1 + grace
        return case.deadline - (time.perf_counter() - case.started) + grace

    def _thinking_told(self, case: _Case, p1: Floats, thought: _Thought | None) -> dict[str, Any]:
        """The field ``thinking``."""
        request = case.request
        told: dict[str, Any] = {"mode": case.mode, "threshold": case.policy.threshold, "budget": case.budget}
        kwargs = {k: v for k, v in (request.chat_template_kwargs or {}).items() if k != "enable_thinking"}
        if kwargs:
            told["chat_template_kwargs"] = kwargs
        told["used"] = thought is not None
        if thought is not None:
            told |= _told(request, thought)
        if request.debug:
            told["system1"] = p1.tolist()
            if thought is not None and thought.p2 is not None:
                told["system2"] = thought.p2.tolist()
        return told

    def _observed(
        self,
        case: _Case,
        p1: Floats | None,
        think: bool,
        thought: _Thought | None,
        degraded: bool,
        seconds: float,
        t1: float,
    ) -> Observation:
        question, policy = case.question, case.policy
        answer = None if thought is None else thought.answer
        sure = math.nan
        if p1 is not None:
            alone = policy.alone(p1, **case.asked)
            sure = float(confidence(alone, policy.confidence, len(question.options)))
        return Observation(
            at=time.time(),
            hash=text_hash(question),
            dataset=question.dataset,
            kind=question.kind,
            n_options=len(question.options),
            p1=() if p1 is None else tuple(p1.tolist()),
            confidence=sure,
            think=think,
            mode="system2" if case.request.system2_only else case.mode,
            tokens=0 if thought is None else thought.tokens,
            finished=answer is not None and bool(answer.finished[0]),
            closed=answer is not None and answer.closed,
            degraded=degraded,
            seconds=seconds,
            t1=t1,
            t2=math.nan if thought is None else thought.seconds,
            policy_version=self.version,
        )

    def _case(self, request: DecideRequest, dataset: str | None, started: float) -> _Case:
        dataset = dataset if request.dataset is None else request.dataset
        question = question_of(request, dataset)
        mode = self._mode(request)
        policy = self._policy.routed(dataset=dataset, kind=request.kind, n_options=len(question.options))
        if request.threshold is not None:
            policy = replace(policy, threshold=request.threshold)
        if request.think_budget is not None:
            policy = replace(policy, think_budget=request.think_budget)
        bounded = self.policy is not None or request.think_budget is not None
        deadline = policy.deadline if request.deadline is None else request.deadline
        return _Case(request, question, mode, policy, policy.think_budget if bounded else None, deadline, started)

    def _mode(self, request: DecideRequest) -> str:
        """Effective thinking mode; refuses what the engine cannot do."""
        if request.reasoning_effort is not None:
            raise BadRequest(f"reasoning_effort is not supported by {self.info.model}; leave it out")
        if request.kind != "score" or self.info.thinks_about_scores:
            return self._thinking if request.thinking == "default" else request.thinking
        if request.system2_only:
            raise BadRequest("system2_only is not available for kind 'score'")
        if request.thinking in ("auto", "on"):
            raise BadRequest(f"thinking {request.thinking!r} is not available for kind 'score'; use 'off'")
        return "off"

    def _adaptation(self, request: DecideRequest, question: Question) -> str:
        if len(question.options) <= NATIVE_OPTIONS:
            return "native"
        return self._strategy if request.strategy == "auto" else request.strategy

    def _elapsed(self, case: _Case, first: Answer | None, thought: _Thought | None) -> float:
        """Seconds in the server: a simulated engine's own, which do not depend on how long it really slept."""
        if not self.info.simulated:
            return time.perf_counter() - case.started
        return (first.t1 if first else 0.0) + (thought.seconds if thought else 0.0)


def policy_version(policy: Policy) -> str:
    """Short hash of all that a policy says: equal policies have equal versions."""
    return hashlib.sha256(json.dumps(policy.to_dict(), sort_keys=True).encode()).hexdigest()[:12]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _usable(p: Any, question: Question, stage: str) -> Floats:
    """The engine's distribution over the options; a wrong one must not reach a client as an answer."""
    if p is None or np.shape(p) != (len(question.options),):
        raise AskFailed("wrong_length", f"{stage} gave no probability for each option", stage=stage)
    values = np.asarray(p, dtype=np.float64)
    if not math.isfinite(float(values.sum())):
        raise AskFailed("nan", f"{stage} gave probabilities that are not finite", stage=stage)
    return values


def _choice(p: Floats, question: Question) -> dict[str, Any]:
    best = int(p.argmax())  # the first of equals
    return {"probabilities": p.tolist(), "choice_index": best, "choice": question.options[best]}


def _told(request: DecideRequest, thought: _Thought) -> dict[str, Any]:
    """What the field ``thinking`` tells of a thought."""
    answer = thought.answer
    told: dict[str, Any] = {
        "think_tokens": thought.tokens,
        "think_seconds": thought.seconds,
        "finished_within_budget": answer is not None and bool(answer.finished[0]),
    }
    if answer is not None and answer.closed:
        told["closed_by_deadline"] = True
    if request.return_reasoning and answer is not None and answer.text is not None:
        told["reasoning"] = answer.text
    return told


def _usage(question: Question, thought: _Thought | None, *, system1: bool) -> dict[str, int]:
    """Tokens of each call: System 1 reads one, System 2 thinks, then reads one after prompt and thought."""
    characters = len(question.state) + len(question.question) + sum(map(len, question.options))
    prompt = characters // _CHARACTERS_PER_TOKEN + 1
    prompts, completion = (prompt, 1) if system1 else (0, 0)
    if thought is not None:
        prompts += prompt
        completion += thought.tokens
        if thought.failed is None:
            prompts += prompt + thought.tokens
            completion += 1
    return {"prompt_tokens": prompts, "completion_tokens": completion, "total_tokens": prompts + completion}

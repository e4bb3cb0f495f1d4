"""The decision behind `POST /v1/decide`: one request, any `Engine`, one `Policy`; no HTTP.

Requests and answers have the shape of autotrust's ``serve_decide.py``, so that its clients work unchanged. What a
request does not say, the policy says: threshold and think budget of a request win over the policy's, and a plain
``thinking: auto`` is answered under the policy whole. Without a policy the engine's own defaults hold. The rule is
`Policy.alone`, `Policy.thinks` and `Policy.combine`, the code that `calib.policy.decide` applies offline: temperatures
and pool of the policy too. ``debug`` and ``system2_only`` show the systems as they answered, never calibrated.

Leaves to others: HTTP (`calib.serve`), wire formats of models (`calib.engine`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from calib import __version__
from calib.engine.base import Answer, AskFailed, Engine, EngineInfo
from calib.policy import Policy
from calib.questions import NOUL_OPTIONS, SCORE_LEVELS, Question

__all__ = [
    "CONTEXT_TOKENS",
    "MAX_OPTIONS",
    "PROTOCOL",
    "BadRequest",
    "DecideAnswer",
    "DecideRequest",
    "ErrorBody",
    "Gateway",
    "System2Answer",
    "policy_version",
]

PROTOCOL = "jev27-bare-v1"
MAX_OPTIONS = 256
NATIVE_OPTIONS = 16
"""Up to here the reference reads all options in one prompt; above, a strategy is named in ``adaptation``."""
CONTEXT_TOKENS = 32768
_CHARACTERS_PER_TOKEN = 4

Floats = NDArray[np.float64]

# --- what goes over the wire ------------------------------------------------------------------------------------------


class DecideRequest(BaseModel):
    """One question. Unknown fields are ignored, among them ``mix``: it belongs to the policy."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    kind: Literal["noul", "score", "choice"] = Field(description="No or yes; a level from 0 to 5; free options.")
    question: str
    state: Any = Field(
        "",
        description="Context. Text stands as it is; an object becomes compact JSON text; in a list, text and text "
        "parts stand as they are and anything else becomes JSON text, one a line. Images are refused.",
    )
    options: list[str] | None = Field(None, description=f"For choice only: 2 to {MAX_OPTIONS} texts.")
    strategy: Literal["auto", "single", "tournament", "permute"] = Field(
        "auto",
        description=f"Named in `adaptation` above {NATIVE_OPTIONS} options; the engine reads them in its own way.",
    )
    thinking: Literal["default", "off", "auto", "on"] = Field(
        "default",
        description="`auto` thinks when the top probability is below the threshold. For score if the engine can.",
    )
    threshold: float | None = Field(None, ge=0, le=1.1, description="Wins over the policy's.")
    think_budget: int | None = Field(None, ge=1, description="Most thinking tokens; wins over the policy's.")
    reasoning_effort: str | None = Field(None, description="Refused: no engine takes it.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Echoed without `enable_thinking`; the engine's prompt is fixed and does not use it."
    )
    return_reasoning: bool = False
    debug: bool = Field(False, description="Adds both systems' own distributions.")
    system2_only: bool = Field(False, description="Skips System 1. For score if the engine can.")
    dataset: str | None = Field(None, description="Where the question comes from; a policy's routes look at it.")


class Usage(BaseModel):
    """Tokens over all calls to the model; those of prompts are estimated at four characters a token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int | None = None


class Thinking(BaseModel):
    """What System 2 did."""

    mode: Literal["auto", "on"] | None = None
    threshold: float | None = None
    budget: int | None = Field(description="Thinking tokens allowed; null: up to the context window.")
    chat_template_kwargs: dict[str, Any] | None = None
    used: bool
    think_tokens: int | None = None
    think_seconds: float | None = Field(None, description="Thought and answer read.")
    finished_within_budget: bool | None = None
    reasoning: str | None = None
    system1: list[float] | None = None
    system2: list[float] | None = None


class DecideAnswer(BaseModel):
    """The answer; `thinking` is absent when the mode is off."""

    kind: str
    effective_kind: str
    options: list[str]
    probabilities: list[float]
    choice_index: int
    choice: str
    adaptation: str
    protocol: str
    model: str
    usage: Usage
    elapsed_seconds: float
    num_model_requests: int
    thinking: Thinking | None = None


class System2Answer(BaseModel):
    """The smaller answer to `system2_only`."""

    kind: str
    options: list[str]
    probabilities: list[float]
    choice_index: int
    choice: str
    system: Literal[2]
    model: str
    thinking: Thinking
    usage: Usage
    elapsed_seconds: float
    num_model_requests: int


class Problem(BaseModel):
    """What is wrong."""

    message: str
    type: str
    code: int


class ErrorBody(BaseModel):
    """Body of every answer that is not 200."""

    error: Problem


class BadRequest(Exception):  # noqa: N818 - an answer to the client, not a failure of the gateway
    """A request that cannot be answered as it stands."""


# --- deciding ---------------------------------------------------------------------------------------------------------


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
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        policy: Policy | None = None,
        *,
        context_tokens: int = CONTEXT_TOKENS,
    ) -> None:
        self.engine = engine
        self.info = info
        self.policy = policy
        self.context_tokens = context_tokens
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
            "policy": None,
            "gateway": f"calib {__version__}",
        }
        if policy is not None:
            names = ["threshold", "mix", "think_budget", "arm", "confidence", "routes"]
            names += ["temperatures"] * (policy.temperatures is not None) + ["pool"] * (policy.pool != "linear")
            plain = policy.to_dict()
            own["policy"] = {name: plain[name] for name in names} | {"version": policy_version(policy)}
        if self.info.simulated:
            own["simulated"] = True
        return {**raw, **own}

    def _identity(self) -> dict[str, Any]:
        """The engine's; with temperatures of System 1, answers without thinking are not the engine's own any more."""
        first = self._policy.calibration.only("p1")
        calibrated = {} if first.nothing else {"gateway_temperatures": first.to_dict()}
        return dict(self.info.identity) | calibrated

    async def decide(self, request: DecideRequest) -> dict[str, Any]:
        """Answer one request, wholly under the policy that stands when it starts.

        Raises
        ------
        BadRequest
            When the request asks for what cannot be.
        AskFailed, ServerBusy
            As the engine raises them; `AskFailed` also when it answers with something that is no distribution.
        """
        started = time.perf_counter()
        question = _question(request)
        mode = self._mode(request)
        if request.system2_only:
            return await self._system2_only(request, question, started)

        policy, budget = self._effective(request, question)
        asked: dict[str, Any] = {"kind": request.kind, "n_options": len(question.options)}
        first = await self.engine.ask(question, ())
        p1 = _usable(first.p1, question, "system1")
        p = policy.alone(p1, **asked)
        second: Answer | None = None
        thinking: dict[str, Any] | None = None
        if mode != "off":
            thinking = {"mode": mode, "threshold": policy.threshold, "budget": budget}
            kwargs = {k: v for k, v in (request.chat_template_kwargs or {}).items() if k != "enable_thinking"}
            if kwargs:
                thinking["chat_template_kwargs"] = kwargs
            thinks = mode == "on" or bool(policy.thinks(p1, **asked))
            thinking["used"] = thinks
            if thinks:
                second, p2, told = await self._think(request, question, policy)
                p = policy.combine(p1, p2, **asked, finished=bool(second.finished[0]))
                thinking |= told
            if request.debug:
                thinking["system1"] = p1.tolist()
                if second is not None:
                    thinking["system2"] = p2.tolist()

        answer: dict[str, Any] = {
            "kind": request.kind,
            "effective_kind": request.kind,
            "options": question.options,
            **_choice(p, question),
            "adaptation": self._adaptation(request, question),
            "protocol": PROTOCOL,
            "model": self.info.model,
            "usage": _usage(question, second, system1=True),
            "elapsed_seconds": self._elapsed(started, first, second),
            "num_model_requests": 1 if second is None else 3,  # System 1; thought and answer read
        }
        if thinking is not None:
            answer["thinking"] = thinking
        return answer

    async def _system2_only(self, request: DecideRequest, question: Question, started: float) -> dict[str, Any]:
        policy, budget = self._effective(request, question)
        second, p2, told = await self._think(request, question, policy)
        usage = _usage(question, second, system1=False)
        del usage["total_tokens"]  # as at the reference
        return {
            "kind": request.kind,
            "options": question.options,
            **_choice(p2, question),
            "system": 2,
            "model": self.info.model,
            "thinking": {"used": True, "budget": budget, **told},
            "usage": usage,
            "elapsed_seconds": self._elapsed(started, None, second),
            "num_model_requests": 2,
        }

    async def _think(
        self, request: DecideRequest, question: Question, policy: Policy
    ) -> tuple[Answer, Floats, dict[str, Any]]:
        """System 2's answer, its distribution, and what the field ``thinking`` tells of it."""
        budget = min(policy.think_budget, self.context_tokens)
        asked = time.perf_counter()
        answer = await self.engine.ask(question, (budget,), system1=False, keep_text=request.return_reasoning)
        if len(answer.p2) != 1:
            raise AskFailed("wrong_length", f"one think budget was asked, {len(answer.p2)} answered", stage="system2")
        p2 = _usable(answer.p2[0], question, "system2")
        seconds = float(answer.t2[0])
        told: dict[str, Any] = {
            "think_tokens": int(answer.tokens[0]),
            "think_seconds": seconds if math.isfinite(seconds) else time.perf_counter() - asked,
            "finished_within_budget": bool(answer.finished[0]),
        }
        if request.return_reasoning and answer.text is not None:
            told["reasoning"] = answer.text
        return answer, p2, told

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

    def _effective(self, request: DecideRequest, question: Question) -> tuple[Policy, int | None]:
        """The policy of this request, and its budget as the answer shows it: None is the context window."""
        policy = self._policy.routed(dataset=request.dataset, kind=request.kind, n_options=len(question.options))
        if request.threshold is not None:
            policy = replace(policy, threshold=request.threshold)
        if request.think_budget is not None:
            policy = replace(policy, think_budget=request.think_budget)
        bounded = self.policy is not None or request.think_budget is not None
        return policy, policy.think_budget if bounded else None

    def _adaptation(self, request: DecideRequest, question: Question) -> str:
        if len(question.options) <= NATIVE_OPTIONS:
            return "native"
        return self._strategy if request.strategy == "auto" else request.strategy

    def _elapsed(self, started: float, first: Answer | None, second: Answer | None) -> float:
        """Seconds in the server: a simulated engine's own, which do not depend on how long it really slept."""
        if not self.info.simulated:
            return time.perf_counter() - started
        return (first.t1 if first else 0.0) + (float(second.t2[0]) if second else 0.0)


def policy_version(policy: Policy) -> str:
    """Short hash of all that a policy says: equal policies have equal versions."""
    return hashlib.sha256(json.dumps(policy.to_dict(), sort_keys=True).encode()).hexdigest()[:12]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _question(request: DecideRequest) -> Question:
    if request.kind == "choice":
        options = tuple(request.options or ())
        if not 2 <= len(options) <= MAX_OPTIONS:
            raise BadRequest(f"kind 'choice' needs 2 to {MAX_OPTIONS} options, got {len(options)}")
    else:
        options = NOUL_OPTIONS if request.kind == "noul" else SCORE_LEVELS
    return Question("", request.dataset or "", request.kind, _state_text(request.state), request.question, options)


def _state_text(state: Any) -> str:
    if isinstance(state, str):
        return state
    if state is None:
        return ""
    if isinstance(state, list):
        return "\n".join(_part_text(part) for part in state)
    return _json_text(state)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind = part.get("type")
        if "image" in part or "image_url" in part or kind in ("image", "image_url", "input_image"):
            raise BadRequest("state holds an image; this gateway takes text only")
        if kind == "text" and isinstance(part.get("text"), str):
            return cast(str, part["text"])
    return _json_text(part)


def _json_text(value: Any) -> str:
    """Compact JSON text, as question files keep their states: the same question gives the same text."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise BadRequest("state holds NaN or a number too large for JSON") from None


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


def _usage(question: Question, second: Answer | None, *, system1: bool) -> dict[str, int]:
    """Tokens of each call: System 1 reads one, System 2 thinks, then reads one after prompt and thought."""
    characters = len(question.state) + len(question.question) + sum(map(len, question.options))
    prompt = characters // _CHARACTERS_PER_TOKEN + 1
    prompts, completion = (prompt, 1) if system1 else (0, 0)
    if second is not None:
        thought = int(second.tokens[0])
        prompts += 2 * prompt + thought
        completion += thought + 1
    return {"prompt_tokens": prompts, "completion_tokens": completion, "total_tokens": prompts + completion}

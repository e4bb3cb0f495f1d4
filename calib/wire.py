"""What goes over the wire of `POST /v1/decide`: requests and answers in the shape of autotrust's ``serve_decide.py``.

The models are the documentation of the route, too. Leaves to others: what is answered (`calib.gateway`), HTTP
(`calib.serve`).
"""

from __future__ import annotations

import json
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from calib.questions import NOUL_OPTIONS, SCORE_LEVELS, Question

__all__ = [
    "MAX_OPTIONS",
    "NATIVE_OPTIONS",
    "BadRequest",
    "DecideAnswer",
    "DecideRequest",
    "ErrorBody",
    "Problem",
    "System2Answer",
    "Thinking",
    "Usage",
    "question_of",
]

MAX_OPTIONS = 256
NATIVE_OPTIONS = 16
"""Up to here the reference reads all options in one prompt; above, a strategy is named in ``adaptation``."""


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
    deadline: float | None = Field(
        None,
        gt=0,
        description="Seconds within which to answer, System 1 included; wins over the policy's. A thought that would "
        "take longer is closed and read there.",
    )


class Usage(BaseModel):
    """Tokens over all calls to the model; those of prompts are estimated at four characters a token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int | None = None


class Thinking(BaseModel):
    """What System 2 did. In a degraded answer ``think_tokens`` are those known to have been spent in vain."""

    mode: Literal["auto", "on"] | None = None
    threshold: float | None = None
    budget: int | None = Field(description="Thinking tokens allowed; null: up to the context window.")
    chat_template_kwargs: dict[str, Any] | None = None
    used: bool
    think_tokens: int | None = None
    think_seconds: float | None = Field(None, description="Thought and answer read.")
    finished_within_budget: bool | None = None
    closed_by_deadline: bool | None = Field(None, description="True when the deadline cut the thought; else absent.")
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
    policy_version: str | None = Field(None, description="Names the policy that the answer was given under, if any.")
    degraded: bool | None = Field(
        None,
        description="True when System 2 was due, and failed or was late (with a policy that does not trust closed "
        "thoughts: was closed by the deadline): System 1's answer stands in for it.",
    )
    degraded_reason: str | None = Field(None, description="Why: `deadline`, `busy`, `timeout`, `http_500`, ...")
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
    policy_version: str | None = Field(None, description="Names the policy that the answer was given under, if any.")


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


# --- the question of a request ----------------------------------------------------------------------------------------


def question_of(request: DecideRequest, dataset: str | None) -> Question:
    """The question of a request, its state as the text that a model sees.

    Raises
    ------
    BadRequest
        Too few options or too many; a state that holds an image or what JSON cannot.
    """
    if request.kind == "choice":
        options = tuple(request.options or ())
        if not 2 <= len(options) <= MAX_OPTIONS:
            raise BadRequest(f"kind 'choice' needs 2 to {MAX_OPTIONS} options, got {len(options)}")
    else:
        options = NOUL_OPTIONS if request.kind == "noul" else SCORE_LEVELS
    return Question("", dataset or "", request.kind, _state_text(request.state), request.question, options)


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

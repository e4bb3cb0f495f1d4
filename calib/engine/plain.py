"""`PlainClient`: asks ``POST /v1/decide`` as any application would, and reads what such an answer tells.

It sends the question and ``thinking: auto``, no debug fields, and does not try again: what it gets is what a user gets.
Leaves to others: the fields for collecting (`decide`), when each question is asked (`calib.arrivals`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.engine.base import AskFailed
from calib.engine.http import HttpClient, shorten
from calib.jsonnumbers import is_number
from calib.questions import Question

__all__ = ["PlainAnswer", "PlainClient"]

_SUM_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """What an answer without debug fields tells.

    Attributes
    ----------
    p : ndarray of shape (C,)
        Final probabilities, renormalised.
    thinks, finished, closed, degraded : bool
        Whether System 2 was used, its thought ended by itself, the deadline closed it; whether System 1's answer stands
        in for a System 2 that failed or was late.
    tokens : int
        Thinking tokens; 0 without thinking.
    threshold, budget : float or None
        Under which the server says it decided.
    version : str or None
        Of the policy in force, where the server names it.
    reason : str or None
        Why the answer is degraded.
    elapsed : float
        Seconds by the server's clock; NaN where it does not tell.
    """

    p: NDArray[np.float64]
    thinks: bool
    finished: bool
    closed: bool
    degraded: bool
    tokens: int
    threshold: float | None
    budget: float | None
    version: str | None
    reason: str | None
    elapsed: float


class PlainClient:
    """A client of a server with the decide route: autotrust's own, or calib's gateway.

    Parameters
    ----------
    base_url : str
        ``http://host:port``; a trailing ``/v1`` or ``/v1/decide`` is dropped.
    with_dataset : bool
        Whether to name the dataset of each question: routes may go by it.
    timeout : float
        Seconds after which an answer is given up.
    api_key_env : str, optional
        NAME of the environment variable that holds the bearer token.
    """

    def __init__(
        self, base_url: str, *, with_dataset: bool = False, timeout: float = 600.0, api_key_env: str | None = None
    ) -> None:
        root = base_url.rstrip("/").removesuffix("/decide").removesuffix("/v1")
        self.client = HttpClient(root, timeout=timeout, retries=0, api_key_env=api_key_env)
        self._with_dataset = with_dataset

    async def ask(self, question: Question) -> PlainAnswer:
        """The answer to one question.

        Raises
        ------
        AskFailed
            No usable answer, with the reason and the seconds until then.
        CalibError
            The server wants another API key.
        """
        reply = await self.client.post("/v1/decide", body(question, with_dataset=self._with_dataset))
        try:
            return _read(reply.data, len(question.options))
        except AskFailed as failure:
            failure.seconds = reply.seconds
            raise

    async def close(self) -> None:
        """Give back the connections."""
        await self.client.close()


def body(question: Question, *, with_dataset: bool) -> dict[str, Any]:
    """The request: nothing of what calib knows is in it."""
    found: dict[str, Any] = {
        "kind": question.kind,
        "state": question.state,
        "question": question.question,
        # always sent: what a server does without it depends on its revision; score questions may not be thought about
        "thinking": "default" if question.kind == "score" else "auto",
    }
    if question.kind == "choice":
        found["options"] = list(question.options)
    if with_dataset:
        found["dataset"] = question.dataset
    return found


def _read(data: Any, n_options: int) -> PlainAnswer:
    if not isinstance(data, dict):
        raise AskFailed("missing_field", f"the answer should be an object, got {shorten(data, 80)}")
    thinking = data.get("thinking")
    thinking = thinking if isinstance(thinking, dict) else {}
    tokens = _number(thinking, "think_tokens")
    thinks = thinking.get("used") is True
    return PlainAnswer(
        p=_distribution(data.get("probabilities"), n_options),
        thinks=thinks,
        finished=thinking.get("finished_within_budget") is True,
        closed=thinking.get("closed_by_deadline") is True,
        degraded=data.get("degraded") is True,
        tokens=int(tokens) if thinks and tokens is not None and tokens >= 0 else 0,
        threshold=_number(thinking, "threshold"),
        budget=_number(thinking, "budget"),
        version=_text(data, "policy_version"),
        reason=_text(data, "degraded_reason"),
        elapsed=_elapsed(data),
    )


def _distribution(values: Any, n_options: int) -> NDArray[np.float64]:
    if not isinstance(values, list) or len(values) != n_options:
        raise AskFailed("wrong_length", f"probabilities of {n_options} options came as {shorten(values, 80)}")
    if not all(type(value) in (int, float) and 0 <= value <= 1 + _SUM_TOLERANCE for value in values):
        raise AskFailed("nan", f"probabilities hold what is none: {shorten(values, 80)}")
    total = math.fsum(values)
    if abs(total - 1) > _SUM_TOLERANCE:
        raise AskFailed("sum_off", f"probabilities sum to {total:.6g}")
    p = np.array(values, dtype=np.float64)
    return p if total == 1 else p / total


def _number(holder: Mapping[str, Any], name: str) -> float | None:
    value = holder.get(name)
    return float(value) if is_number(value) else None


def _text(holder: Mapping[str, Any], name: str) -> str | None:
    value = holder.get(name)
    return value if isinstance(value, str) else None


def _elapsed(data: Mapping[str, Any]) -> float:
    seconds = _number(data, "elapsed_seconds")
    return math.nan if seconds is None or seconds < 0 else seconds

"""What every engine promises: one asynchronous `ask`, and what the answer holds.

Leaves to others: HTTP (`calib.engine.http`), wire formats (`decide`, `vllm`), made-up answers (`simulated`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from calib.questions import Question

__all__ = ["Answer", "AskFailed", "Engine", "EngineInfo", "PartlyFailed", "ServerBusy"]


@dataclass(frozen=True, eq=False)
class Answer:
    """What one question got from both systems: C options, B think budgets of ONE thought.

    Attributes
    ----------
    p1 : ndarray of shape (C,) or None
        System 1's probability of each option; None when it was not asked (``system1=False``).
    t1 : float
        Seconds of System 1; NaN when it was not asked.
    label_mass1 : float
        Share of the full vocabulary's probability that lies on the labels; NaN when the server does not tell.
    budgets : tuple of int
        Think budgets, tokens, ascending; empty when System 2 was not asked.
    p2 : ndarray of shape (B, C)
        System 2's probability of each option, read after at most that many thinking tokens of the one thought.
    tokens : ndarray of int, shape (B,)
        Thinking tokens used: min(length, budget, room left in the context).
    finished : ndarray of bool, shape (B,)
        Whether the thought ended by itself within the budget.
    t2 : ndarray of shape (B,)
        Seconds of System 2: thought and answer read.
    label_mass2 : ndarray of shape (B,)
        As ``label_mass1``, at each budget.
    stages : mapping of str to float
        Seconds by stage where the engine can tell them apart (``prefill``, ``thought``, ``read``, ``queue``),
        at the largest budget.
    text : str or None
        The thought, when it was asked for and the server returns it.
    closed : bool
        Whether the deadline closed the thought. Budgets beyond the tokens that had come by then hold the cut there.
    """

    p1: np.ndarray | None
    t1: float
    budgets: tuple[int, ...]
    p2: np.ndarray
    tokens: np.ndarray
    finished: np.ndarray
    t2: np.ndarray
    label_mass1: float = float("nan")
    label_mass2: np.ndarray = field(default_factory=lambda: np.empty(0))
    stages: Mapping[str, float] = field(default_factory=dict)
    text: str | None = None
    closed: bool = False


@dataclass(frozen=True)
class EngineInfo:
    """Who answers: what identifies the model, and what the server does by default.

    Attributes
    ----------
    model : str
        Served model name.
    identity : mapping
        All that can change an answer (model, protocol, prompt template, sampling, decision head, temperatures);
        JSON-able. Its hash is the model fingerprint. Never holds what calib writes back (threshold, mix).
    threshold, mix : float
        The server's own defaults: the ``default`` baseline.
    simulated : bool
        True when no real model answers. The mark follows every number.
    raw : mapping
        The server's own description, as received.
    thinks_about_scores : bool
        Whether questions of the kind score can be thought about; those of the other kinds always can.
    keeps_deadline : bool
        Whether ``ask`` closes a thought in time for the ``deadline`` that it is given; else it ignores one.
    """

    model: str
    identity: Mapping[str, Any]
    threshold: float = 0.8
    mix: float = 0.5
    simulated: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    thinks_about_scores: bool = False
    keeps_deadline: bool = False

    @property
    def canonical_identity(self) -> str:
        """Canonical JSON of the identity: equal identities give equal texts."""
        return json.dumps(self.identity, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical identity, by which a store knows the model."""
        return hashlib.sha256(self.canonical_identity.encode()).hexdigest()

    def can_think_about(self, question: Question) -> bool:
        """Whether System 2 can be asked."""
        return question.kind != "score" or self.thinks_about_scores


class AskFailed(Exception):  # noqa: N818 - a finding that is kept with its reason, not a programming error
    """One question could not be answered well; kept as a failure with its reason.

    Parameters
    ----------
    reason : str
        One of a small set of slugs that can be counted: ``timeout``, ``http_500``, ``connection``, ``bad_json``,
        ``nan``, ``wrong_length``, ``sum_off``, ``negative``, ``budget_exceeded``, ``refused``, ``missing_field``,
        ``deadline``.
    detail : str
        One line for the user.
    stage : {"system1", "system2", "both"}
        What was being asked.
    seconds : float
        Wall seconds from the first attempt until it was given up: a timeout is censored there, never dropped.
    attempts : int
        Requests sent.
    tokens : int
        Thinking tokens that are known to have been generated in vain.
    """

    def __init__(
        self,
        reason: str,
        detail: str = "",
        *,
        stage: str = "both",
        seconds: float = float("nan"),
        attempts: int = 1,
        tokens: int = 0,
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.stage = stage
        self.seconds = seconds
        self.attempts = attempts
        self.tokens = tokens


class PartlyFailed(AskFailed):
    """One part of a question failed, another was answered well and must not be lost.

    Parameters
    ----------
    failure : AskFailed
        What failed, with its reason, stage, seconds and attempts.
    partial : Answer
        The good part: System 1, and the budgets that were read.
    """

    def __init__(self, failure: AskFailed, partial: Answer) -> None:
        super().__init__(
            failure.reason,
            failure.detail,
            stage=failure.stage,
            seconds=failure.seconds,
            attempts=failure.attempts,
            tokens=failure.tokens,
        )
        self.partial = partial


class ServerBusy(Exception):  # noqa: N818 - asks for patience
    """The engine refuses for now (HTTP 429 or 503); ``retry_after`` seconds are asked for, if it said so."""

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Engine(Protocol):
    """A model that answers option questions with both systems."""

    async def info(self) -> EngineInfo:
        """Who answers; asked once before anything else."""
        ...

    async def ask(
        self,
        question: Question,
        budgets: Sequence[int],
        *,
        system1: bool = True,
        keep_text: bool = False,
        deadline: float | None = None,
    ) -> Answer:
        """System 1 and, for each budget of ONE thought, System 2.

        Parameters
        ----------
        question : Question
            What is asked.
        budgets : sequence of int
            Think budgets, tokens; empty asks System 1 only.
        system1 : bool, default True
            False leaves System 1 out, for callers who hold p1 already.
        keep_text : bool, default False
            Whether to return the thought itself.
        deadline : float, optional
            Seconds from the call within which the answer should be there; a simulated engine counts its own seconds.
            An engine that keeps deadlines (`EngineInfo.keeps_deadline`) closes the thought in time and reads the
            answer from the cut; any other one takes no notice. It is an aim and no promise: a caller that must not be
            late stops waiting by itself.

        Raises
        ------
        AskFailed
            When no good answer could be had, in time; never returns a bad one as good. As `PartlyFailed` it carries
            what was answered well.
        """
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...

"""An engine that answers what a test scripted, and keeps what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calib.engine import Answer, AskFailed, EngineInfo
from calib.questions import Question

NAN = float("nan")


@dataclass
class ScriptedEngine:
    """System 1 answers ``p1`` in ``t1`` seconds, System 2 at each budget of ``p2`` in a second per 100 tokens.

    The thought has ``length`` tokens. With ``keeps_deadline`` a deadline closes it, in those seconds. ``p1`` and ``p2``
    may be callables that get the question (and the budget).
    ``failure`` is raised in the stage ``fails_in``; a ``gate`` holds every answer back until it is set.
    """

    p1: Any = (0.7, 0.2, 0.1)
    p2: Any = (0.1, 0.8, 0.1)
    t1: float = 0.05
    length: int = 600
    failure: Exception | None = None
    fails_in: str = "system1"
    gate: asyncio.Event | None = None
    simulated: bool = True
    thinks_about_scores: bool = False
    keeps_deadline: bool = False
    raw: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[Question, tuple[int, ...], bool, bool]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    most_open: int = 0
    closed: int = 0
    _open: int = 0

    async def info(self) -> EngineInfo:
        return EngineInfo(
            "scripted",
            {"model": "scripted"},
            0.8,
            0.5,
            simulated=self.simulated,
            raw=self.raw,
            thinks_about_scores=self.thinks_about_scores,
            keeps_deadline=self.keeps_deadline,
        )

    async def ask(
        self,
        question: Question,
        budgets: Sequence[int],
        *,
        system1: bool = True,
        keep_text: bool = False,
        deadline: float | None = None,
    ) -> Answer:
        self.asked.append((question, tuple(budgets), system1, keep_text))
        self.deadlines.append(deadline)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.failure is not None and (self.fails_in == "system1") == system1:
                raise self.failure
        finally:
            self._open -= 1
        used = [min(self.length, b) for b in budgets]
        closed = False
        if used and deadline is not None and self.keeps_deadline and used[-1] > 100 * deadline:
            if deadline < 0.01:
                raise AskFailed("deadline", "no token in time", stage="system2", seconds=deadline)
            used, closed = [min(n, int(100 * deadline + 1e-6)) for n in used], True
        return Answer(
            p1=np.array(_called(self.p1, question)) if system1 else None,
            t1=self.t1 if system1 else NAN,
            budgets=tuple(budgets),
            p2=np.array([_called(self.p2, question, b) for b in budgets]),
            tokens=np.array(used, dtype=np.int64),
            finished=np.array([n == self.length for n in used], dtype=bool),
            t2=np.array([n / 100 for n in used]),
            text="a thought" if keep_text else None,
            closed=closed,
        )

    async def close(self) -> None:
        self.closed += 1


def _called(value: Any, *arguments: Any) -> Any:
    return value(*arguments) if isinstance(value, Callable) else value

"""`SimulatedEngine`: answers from a profile, with the seconds that the published rates give.

No model runs. Everything that this engine tells carries the mark ``simulated``. Leaves to others: the profiles and
their figures (`profiles`), how outcomes are assigned (`quotas`) and read (`traces`), HTTP (`calib.serve`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from calib.engine.base import Answer, AskFailed, EngineInfo
from calib.engine.profiles import CONTEXT_TOKENS, PROFILES, Profile, load_profile, seconds
from calib.engine.texts import answer_key, simulated_name
from calib.engine.traces import JITTER, Traces
from calib.errors import CalibError
from calib.questions import Question

__all__ = ["CONTEXT_TOKENS", "PROFILES", "PROTOCOL", "Profile", "SimulatedEngine", "answer_key", "load_profile"]

PROTOCOL = "jev27-bare-v1"
TEMPERATURES = {"noul": 1.003, "choice": 1.017, "score": 0.999}
"""Published temperatures of System 1 by kind; the profiles' probabilities are meant with them applied."""
MAX_OPTIONS = 256
GENERIC = (
    "A question that is not of the profile gets an answer by a hash of its text, options and the seed: System 1's "
    "top probability even from just above chance to 0.995, a thought of 300 to 30,000 tokens (log-even), and System 2 "
    "keeps System 1's answer seven times in ten and else moves to the answer key. It says nothing about the question."
)


class SimulatedEngine:
    """A simulated dual-system model.

    Parameters
    ----------
    profile : Profile
        From `load_profile`.
    arm : {"base", "mtp"}, default "base"
        Sets the seconds; answers are the same.
    time_scale : float, default 0
        Share of the simulated seconds that `ask` really sleeps, 0 to 1. The seconds it tells are always whole.
    seed : int, default 0
        Another seed is another model that meets the same figures.

    Attributes
    ----------
    context_tokens : int
        The longest thought; as a budget it means no limit.

    Raises
    ------
    CalibError
        When an argument is out of range.
    """

    def __init__(self, profile: Profile, *, arm: str = "base", time_scale: float = 0.0, seed: int = 0) -> None:
        if arm not in profile.arms:
            raise CalibError(f"arm {arm!r} is not simulated; choose one of: {', '.join(profile.arms)}")
        if not 0 <= time_scale <= 1:
            raise CalibError(f"--time-scale must be from 0 (never sleep) to 1 (real time), got {time_scale}")
        if seed < 0:
            raise CalibError(f"the seed must be 0 or more, got {seed}")
        self.profile, self.arm, self.time_scale, self.seed = profile, arm, time_scale, seed
        self.context_tokens = CONTEXT_TOKENS
        self._rates = profile.arms[arm]
        self._questions = profile.questions()
        self._positions = profile.positions
        self._traces = profile.traces(seed)

    async def info(self) -> EngineInfo:
        """Who answers, with ``raw`` in the fields of ``GET /v1/decide/info``."""
        model = simulated_name("GEV-26B-Decide")
        reference = self.profile.reference
        identity: dict[str, Any] = {
            "protocol": PROTOCOL,
            "model": model,
            "profile": self.profile.name,
            "seed": self.seed,
            "temperatures": TEMPERATURES,
        }
        raw: dict[str, Any] = {
            "protocol": PROTOCOL,
            "model": model,
            "model_type": "simulated",
            "max_options": MAX_OPTIONS,
            "native_choice_options": 16,
            "temperatures": TEMPERATURES,
            "defaults": {
                "strategy": "tournament",
                "thinking": "auto",
                "threshold": reference.threshold,
                "mix": reference.mix,
                "think_budget": None,
            },
            "reasoning_controls": {
                "enable_thinking": True,
                "reasoning_effort": None,
                "think_budget": f"most thinking tokens; without it up to {self.context_tokens}",
            },
            "simulated": True,
            "profile": self.profile.name,
            "seed": self.seed,
            "arm": self.arm,
            "figures_from": self.profile.figures["source"],
            "unknown_question": GENERIC,
        }
        return EngineInfo(
            model, identity, reference.threshold, reference.mix, simulated=True, raw=raw, keeps_deadline=True
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
        """Both systems' answers; the budgets cut one thought. A deadline counts in simulated seconds.

        Raises
        ------
        AskFailed
            Reason ``refused``: thinking on a score question, a budget below 1, too many options. Reason ``deadline``:
            it leaves no time for one token and the read.
        """
        ladder = np.array(sorted(set(budgets)), dtype=np.int64)
        thinks = ladder.size > 0
        if thinks and question.kind == "score":
            raise AskFailed("refused", "thinking is not available for kind 'score'", stage="system2")
        if thinks and ladder[0] < 1:
            raise AskFailed("refused", f"a think budget must be 1 token or more, got {ladder[0]}", stage="system2")
        if not 2 <= len(question.options) <= MAX_OPTIONS:
            raise AskFailed("refused", f"a question needs 2 to {MAX_OPTIONS} options, got {len(question.options)}")
        traces, row = self._find(question)
        n = len(question.options)
        rows = np.array([row])
        whole = int(min(traces.length[row], ladder[-1])) if thinks else 0
        used = whole
        if thinks and deadline is not None:
            first, _, read = seconds(self._rates, traces.jitter[rows], np.zeros((1, 1), dtype=np.int64))
            left = deadline - float(first[0]) * system1 - float(read[0])
            used = math.floor(min(whole, max(left, 0.0) * self._rates.tokens_per_second))
            if used < 1:
                await asyncio.sleep(self.time_scale * deadline)
                raise AskFailed("deadline", "no token comes in time", stage="system2", seconds=deadline)
        closed = used < whole
        p2, tokens, finished = traces.read(rows, np.minimum(ladder, used) if closed else ladder)
        first, thought, read = seconds(self._rates, traces.jitter[rows], tokens)
        t1, t2 = float(first[0]), thought[0] + read[0]
        stages = {"thought": float(thought[0, -1]), "read": float(read[0])} if thinks else {}
        if self.time_scale:
            await asyncio.sleep(self.time_scale * (t1 * system1 + (float(t2[-1]) if thinks else 0.0)))
        return Answer(
            p1=traces.p1[row, :n].copy() if system1 else None,
            t1=t1 if system1 else float("nan"),
            budgets=tuple(ladder.tolist()),
            p2=p2[0, :, :n].copy(),
            tokens=tokens[0],
            finished=finished[0],
            t2=t2,
            label_mass2=np.full(len(ladder), np.nan),
            stages=stages,
            text=_thought(int(tokens[0, -1]), bool(finished[0, -1]), closed) if keep_text and thinks else None,
            closed=closed,
        )

    async def close(self) -> None:
        """Nothing to give back."""

    def _find(self, question: Question) -> tuple[Traces, int]:
        """The traces and the row that answer this question; generic ones unless its whole text is the profile's."""
        row = self._positions.get(question.question)
        if row is not None:
            known = self._questions[row]
            if (known.options, known.state, known.kind) == (question.options, question.state, question.kind):
                return self._traces, row
        return _generic(question, self.seed), 0


def _generic(question: Question, seed: int) -> Traces:
    """One row by a hash of the text, as `GENERIC` says."""
    text = "\x1f".join((str(seed), question.kind, question.state, question.question, *question.options))
    u = np.frombuffer(blake2b(text.encode()).digest(), dtype=">u8") / 2.0**64
    n = len(question.options)
    key = answer_key(question.question, n)
    top = min(int(u[0] * n), n - 1)
    floor = 1.02 / n
    confidence = floor + (0.995 - floor) * u[1]
    p1 = np.full((1, n), (1 - confidence) / (n - 1))
    p1[0, top] = confidence
    length = int(300 * 100.0 ** u[2])
    final = top if u[3] < 0.7 else key
    return Traces(
        p1=p1,
        n_options=np.array([n]),
        key=np.array([key]),
        length=np.array([length]),
        final=np.array([final]),
        leaning=np.array([top]),
        turns=np.array([length]),
        sure_final=np.array([0.90 + 0.095 * u[4]]),
        sure_cut=np.array([0.90 + 0.07 * u[5]]),
        jitter=JITTER * (2 * u[None, 6:8] - 1),
    )


def _thought(tokens: int, finished: bool, closed: bool) -> str:
    end = "It ended by itself." if finished else f"The {'deadline' if closed else 'budget'} cut it."
    return f"(simulated thought of {tokens} tokens; no model wrote one) {end}"

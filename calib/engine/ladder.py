"""Reading answers: the distribution over the labels at the next token, and System 2 at every budget of one thought.

`Reader` reads; `Ladder` cuts a thought, closes it and reads what the model would answer there. Leaves to others: the
thought itself and the chat around it (`calib.engine.vllm`), requests (`calib.engine.completions`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from calib.engine.base import AskFailed
from calib.engine.completions import Trace, VllmServer
from calib.engine.labels import Seam
from calib.errors import CalibError

__all__ = ["Ladder", "LadderCheck", "Reader", "Reading", "Rungs"]

_SUM_TOLERANCE = 0.01
_LISTED = 20
"""Log-probabilities of the whole vocabulary to ask for: what vLLM lists unless told otherwise."""

_READS_AT_A_TIME = 256
"""One-label reads in flight, over all questions: each holds a connection."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """One answer that was read.

    Attributes
    ----------
    p : ndarray of shape (C,)
        Sums to 1.
    mass : float
        Share of the full vocabulary's probability on the labels; NaN when it was not read. Where a label was not among
        the most likely tokens, what those hold: a lower bound.
    """

    p: Floats
    mass: float = math.nan


class Reader:
    """Reads distributions over labels in the way that the server's settings allow.

    Parameters
    ----------
    server : VllmServer
    processed : bool
        Whether the server's log-probabilities are taken after masks (``--logprobs-mode processed_logprobs``). Then one
        request gives all labels; else one for each label is sent, allowing it alone, and their sum is the label mass.
    most : int
        Log-probabilities that the server lists (``--max-logprobs``). Only processed ones need as many as there are
        labels. More labels than that are read in groups that share their first label, which ties them together
        exactly: (n - 1) / (most - 1) requests, rounded up. One request for each label could not do it, since a label
        that alone is allowed has all of the probability once the mask counts. Raw ones are read label by label at any
        limit.
    """

    def __init__(self, server: VllmServer, *, processed: bool, most: int) -> None:
        self.server = server
        self.processed = processed
        self.most = most
        self._slots = asyncio.Semaphore(_READS_AT_A_TIME)

    async def read(self, prompts: Sequence[Sequence[int]], labels: Sequence[int]) -> list[Reading]:
        """The next token's distribution over ``labels`` after each prompt.

        Raises
        ------
        AskFailed
            A label is missing, or what came back is no distribution.
        CalibError
            The server lists too few log-probabilities.
        """
        if not self.processed:
            logprobs = await self._one_by_one(prompts, labels)
            return [_distribution(row, math.exp(_log_sum(row))) for row in logprobs]
        if self.most >= len(labels):
            logprobs = await self._masked(prompts, labels)
        else:
            logprobs = await self._in_groups(prompts, labels)
        return [_distribution(row) for row in logprobs]

    async def mass(self, prompts: Sequence[Sequence[int]], labels: Sequence[int]) -> list[float]:
        """Share of the full vocabulary's probability on ``labels`` after each prompt, 0 to 1.

        Labels that are not among the most likely tokens count as nothing.
        """
        listed = await self.server.first_token(prompts, allowed=None, top=min(self.most, max(_LISTED, len(labels))))
        return [math.fsum(math.exp(row[label]) for label in labels if label in row) for row in listed]

    async def _masked(self, prompts: Sequence[Sequence[int]], labels: Sequence[int]) -> list[Floats]:
        rows = await self.server.first_token(prompts, allowed=labels, top=len(labels))
        return [_of_labels(row, labels, normalised=True) for row in rows]

    async def _in_groups(self, prompts: Sequence[Sequence[int]], labels: Sequence[int]) -> list[Floats]:
        if self.most < 2:
            raise CalibError(
                f"the server lists {self.most} log-probabilities, and calib needs 2 or more to read an answer: "
                "start vllm serve with --max-logprobs 256"
            )
        anchor, size = labels[0], self.most - 1
        groups = [labels[i : i + size] for i in range(1, len(labels), size)]
        parts = await asyncio.gather(*(self._masked(prompts, [anchor, *group]) for group in groups))
        # each group is normalised by itself; what it says about the first label ties it to the others
        return [np.concatenate([[0.0], *(group[i][1:] - group[i][0] for group in parts)]) for i in range(len(prompts))]

    async def _one_by_one(self, prompts: Sequence[Sequence[int]], labels: Sequence[int]) -> list[Floats]:
        async def alone(label: int) -> list[float]:
            async with self._slots:
                rows = await self.server.first_token(prompts, allowed=[label], top=1)
            return [_of_labels(row, [label], normalised=False)[0] for row in rows]

        columns = await asyncio.gather(*map(alone, labels))
        return list(np.array(columns).T)


def _of_labels(row: dict[int, float], labels: Sequence[int], *, normalised: bool) -> Floats:
    missing = [label for label in labels if label not in row]
    if missing:
        raise AskFailed(
            "missing_label",
            f"no log-probability came back for {len(missing)} of {len(labels)} labels: another client may use "
            "logprob_token_ids, or the server speculates on a CPU; either spoils what others read",
        )
    logprobs = np.array([row[label] for label in labels])
    total = math.exp(min(_log_sum(logprobs), 1.0))  # logits can be any number
    if (normalised and abs(total - 1) > _SUM_TOLERANCE) or total > 1 + _SUM_TOLERANCE:
        raise AskFailed("sum_off", f"the labels' probabilities sum to {total:.6g}")
    return logprobs


def _log_sum(logprobs: Floats) -> float:
    top = float(logprobs.max())
    return top + math.log(math.fsum(np.exp(logprobs - top))) if math.isfinite(top) else top


def _distribution(logprobs: Floats, mass: float = math.nan) -> Reading:
    if mass > 1 + _SUM_TOLERANCE:
        raise AskFailed("sum_off", f"the labels' probabilities sum to {mass:.6g}")
    p = np.exp(logprobs - logprobs.max())
    return Reading(p / p.sum(), mass)


# --- one thought, every budget ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rungs:
    """System 2 at each budget of one thought.

    Attributes
    ----------
    budgets : tuple of int
        Ascending.
    readings : tuple of Reading
    tokens : tuple of int
        Thinking tokens at each budget, the end mark counted.
    finished : tuple of bool
    read_seconds : float
        Wall seconds of the read at the largest budget, which is sent alone: what a server that reads once pays.
    failure : AskFailed or None
        Why only the largest budget was read.
    """

    budgets: tuple[int, ...]
    readings: tuple[Reading, ...]
    tokens: tuple[int, ...]
    finished: tuple[bool, ...]
    read_seconds: float
    failure: AskFailed | None = None


@dataclass(frozen=True)
class LadderCheck:
    """Whether cuts read here reproduce what another route reads after the same thought.

    Attributes
    ----------
    n : int
        Questions whose thought was read by both.
    agreeing : int
        Those with the same answer and probabilities at most ``TOLERANCE`` apart.
    worst : float
        Largest difference of a probability; NaN without a question.
    failed : int
        Questions that could not be compared.
    """

    n: int
    agreeing: int
    worst: float
    failed: int = 0

    TOLERANCE: ClassVar[float] = 0.05
    """Batches alone move probabilities by about 0.01 in bfloat16."""
    SHARE: ClassVar[float] = 0.9
    FEWEST: ClassVar[int] = 20

    @property
    def accepted(self) -> bool:
        """Whether enough of them agree, of enough."""
        return self.n >= self.FEWEST and self.agreeing >= self.SHARE * (self.n + self.failed)

    def __str__(self) -> str:
        verdict = "are read from cuts of one thought" if self.accepted else "are asked one by one"
        return (
            f"reading the server's thoughts on its base model gives its own answer on {self.agreeing} of {self.n} "
            f"questions (largest difference {self.worst:.3f}; {self.failed} not comparable): smaller budgets {verdict}"
        )


class Ladder:
    """Reads the answer from cuts of a thought.

    A thought of ``length`` tokens, its end mark among them, is finished at budgets from ``length`` on. At a smaller
    budget the first ``budget`` tokens are kept and the thought is closed, exactly what a run with that budget does: the
    sampling of a token does not depend on how many may follow.

    Parameters
    ----------
    reader : Reader
    cut : sequence of int
        Tokens that close a thought which is cut, in front of what closes every thought (the seam's context).
    label_mass : bool, default True
        Read the label mass where one more request must be sent for it.
    """

    def __init__(self, reader: Reader, cut: Sequence[int], *, label_mass: bool = True) -> None:
        self.reader = reader
        self.cut = tuple(cut)
        self.label_mass = label_mass

    def prompt(self, opening: Sequence[int], trace: Trace, budget: int, seam: Seam) -> tuple[int, ...]:
        """Token ids up to the label: chat, the thought at that budget, its close, the answer's beginning."""
        if trace.ended and budget >= trace.length:
            return (*opening, *trace.ids, *seam.context)
        return (*opening, *trace.ids[:budget], *self.cut, *seam.context)

    async def read(self, opening: Sequence[int], trace: Trace, budgets: Sequence[int], seam: Seam) -> Rungs:
        """System 2 at each budget: the largest one by itself, the others by one request.

        Parameters
        ----------
        opening : sequence of int
            Chat and start mark, as the thought was asked for.
        trace : Trace
        budgets : sequence of int
            Ascending.
        seam : Seam
            Of the answer after a thought.

        Raises
        ------
        AskFailed
            The answer at the largest budget could not be read.
        """
        prompts = [self.prompt(opening, trace, budget, seam) for budget in budgets]
        whole = prompts[-1]
        started = time.perf_counter()
        (last,) = await self.reader.read([whole], seam.labels)
        seconds = time.perf_counter() - started
        readings = {whole: last}
        failure = None
        others = [prompt for prompt in dict.fromkeys(prompts) if prompt != whole]
        if others:
            try:
                readings |= zip(others, await self.reader.read(others, seam.labels), strict=True)
            except AskFailed as failed:
                failure = failed
        readings = await self._with_mass(readings, seam)
        kept = [(budget, prompt) for budget, prompt in zip(budgets, prompts, strict=True) if prompt in readings]
        return Rungs(
            budgets=tuple(budget for budget, _ in kept),
            readings=tuple(readings[prompt] for _, prompt in kept),
            tokens=tuple(min(trace.length, budget) for budget, _ in kept),
            finished=tuple(trace.ended and trace.length <= budget for budget, _ in kept),
            read_seconds=seconds,
            failure=failure,
        )

    async def _with_mass(self, readings: dict[tuple[int, ...], Reading], seam: Seam) -> dict[tuple[int, ...], Reading]:
        if not (self.label_mass and self.reader.processed):
            return readings
        prompts = list(readings)
        try:
            masses = await self.reader.mass(prompts, seam.labels)
        except AskFailed:  # the answer is good without it
            return readings
        return {prompt: Reading(readings[prompt].p, mass) for prompt, mass in zip(prompts, masses, strict=True)}

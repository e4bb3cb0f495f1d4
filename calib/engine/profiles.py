"""Profiles of simulated models: published figures turned into whole questions, and what is assumed beside them.

The figures come from ``data/published/NAME.json``. Leaves to others: assigning the outcomes (`quotas`), answering one
question (`simulated`), comparing the result with the figures (`calib.published`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from calib import metrics
from calib.engine.quotas import LENGTH_FOLLOWS_DOUBT, Reference, SetPlan, build, lengths_by_rank
from calib.engine.texts import generate
from calib.engine.traces import Traces
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.questions import Question
from calib.resources import find

__all__ = ["CONTEXT_TOKENS", "PROFILES", "Profile", "Rates", "load_profile", "published_figures"]

CONTEXT_TOKENS = 32768
"""Room for a thought, tokens: no simulated thought is longer, so this budget never cuts."""
READ_SECONDS = 0.045
"""Reading an answer is one forward pass, as System 1 is."""
MTP_SYSTEM1_SECONDS = 0.050
"""System 1 gets slower beside the draft model: published medians without thinking are 0.04 s, and 0.05 s with MTP."""


@dataclass(frozen=True)
class Rates:
    """How fast an arm serves: seconds of System 1 and of an answer read, thought tokens per second."""

    system1: float
    tokens_per_second: float
    read: float = READ_SECONDS


@dataclass(frozen=True)
class Assumed:
    """What the published figures leave open for one set.

    Attributes
    ----------
    options : tuple of int
        Numbers of options that occur; their shares are chosen to meet the published chance.
    kept_accuracy : float
        System 1's accuracy where its confidence reaches the threshold, 0 to 1.
    harm : float
        Share of System 1's right answers that a finished thought spoils, 0 to 1.
    kind : str
    follows_doubt : float
        See `SetPlan`.
    shortest : int
        Shortest thought, tokens.
    cut : float or None
        Share of the thoughts that the budget cuts, in percent, where it is not published.
    knots : tuple of (float, int)
        More points of the distribution of thought lengths: (share of the thoughts, tokens).
    """

    options: tuple[int, ...]
    kept_accuracy: float
    harm: float = 0.06
    kind: str = "choice"
    follows_doubt: float = LENGTH_FOLLOWS_DOUBT
    shortest: int = 250
    cut: float | None = None
    knots: tuple[tuple[float, int], ...] = ()


_NOUL = (2,)
_ASSUMED: dict[str, dict[str, Assumed]] = {
    "gev-validation": {
        "AQuA-RAT": Assumed((5,), 0.93),
        "LogiQA": Assumed((4,), 0.88),
        "StrategyQA": Assumed(_NOUL, 0.90, kind="noul"),
        "MedMCQA": Assumed((4,), 0.91, harm=0.12),
        "OpenBookQA": Assumed((4,), 0.98),
        "CommonsenseQA": Assumed((5,), 0.945, harm=0.22),
    },
    # the points of CLadder, ChessBench and MMLU-Pro make the median over all ten benchmarks the published one
    "gev-knowledge": {
        "GPQA Diamond": Assumed((4,), 0.85, shortest=1400),
        "CRUXEval": Assumed((2, 3, 4), 0.93, cut=6.0, knots=((0.5, 2400),)),
        "CLadder": Assumed(_NOUL, 0.90, kind="noul", shortest=1500, cut=5.0, knots=((0.5, 5600),)),
        "GSM8K": Assumed((4,), 0.996, shortest=300),
        # non-empty subsets of six or seven statements
        "SATA-Bench": Assumed((63, 127), 0.38, cut=20.0, knots=((0.5, 3700),)),
        "MuSR": Assumed((2, 3, 5), 0.85, harm=0.2, shortest=1200, cut=8.0, knots=((0.5, 2900),)),
        # these reproduce the published accuracies of cut and of finished thoughts, which fit this benchmark alone
        "ChessBench": Assumed((8, 10, 12, 14, 16, 18), 0.625, harm=0.3, follows_doubt=0.1, knots=((0.062, 3300),)),
        "HLE": Assumed((5, 6, 8, 10), 0.016, shortest=1200),
        "MMLU-Pro": Assumed((4, 5, 6, 7, 8, 9, 10), 0.93, harm=0.03, shortest=500, knots=((0.0955, 3300),)),
        "BBH": Assumed((2, 3, 4, 5, 6, 7, 11, 18), 0.95, harm=0.04, shortest=350),
    },
}
PROFILES: tuple[str, ...] = tuple(_ASSUMED)
"""Names of the profiles."""
_ECE_TOLERANCE = 0.001
_SHIFTS = tuple(np.linspace(0.0, 0.25, 26).tolist())
_STUBBORN = tuple(np.linspace(0.0, 1.0, 21).tolist())
_SHIFTS_TRIED = 4
"""Of the values, those that bring the ECE of System 1 nearest to the published one."""


def published_figures(profile: str) -> dict[str, Any]:
    """The published figures of a profile and their source, as ``data/published`` holds them."""
    figures: dict[str, Any] = json.loads(find(f"data/published/{profile}.json").read_text(encoding="utf-8"))
    return figures


@lru_cache
def load_profile(name: str) -> Profile:
    """A profile by name; the same object within a process.

    Raises
    ------
    CalibError
        When there is none of that name.
    """
    if name not in PROFILES:
        raise CalibError(f"unknown profile {name!r}; choose one of: --profile {', --profile '.join(PROFILES)}")
    return Profile(name, published_figures(name))


@dataclass(frozen=True, eq=False)
class Profile:
    """A simulated model's questions and, for a seed, its answers.

    Attributes
    ----------
    name : str
        One of `PROFILES`.
    figures : mapping
        Published figures with their source.
    """

    name: str
    figures: Mapping[str, Any]
    _traces: dict[int, Traces] = field(default_factory=dict, repr=False)

    @cached_property
    def reference(self) -> Reference:
        """The published policy, at which the figures hold."""
        return Reference(**self.figures["policy"])

    @cached_property
    def arms(self) -> dict[str, Rates]:
        """Rates of each arm."""
        latency = self.figures["latency"]
        system1 = {"base": latency["system1_ms"] / 1000, "mtp": MTP_SYSTEM1_SECONDS}
        return {arm: Rates(system1[arm], rate) for arm, rate in latency["tokens_per_second"].items()}

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        """Questions set by set; the same for every seed."""
        questions: list[Question] = []
        for row in self.figures["sets"]:
            assumed = _ASSUMED[self.name][row["name"]]
            counts = option_counts(row["requests"], assumed.options, row.get("chance"))
            order = np.random.default_rng(crc32(row["name"].encode())).permutation(len(counts))
            questions += generate(row["name"], assumed.kind, counts[order])
        return tuple(questions)

    def questions(self) -> list[Question]:
        """The generated questions, datasets marked as simulated, with their answers."""
        return list(self._questions)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Place of each question by its text."""
        return {q.question: i for i, q in enumerate(self._questions)}

    def traces(self, seed: int = 0) -> Traces:
        """Answers to all questions, in the order of `questions`; kept for the process.

        Raises
        ------
        ValueError
            When the figures cannot be met.
        """
        if seed not in self._traces:
            self._traces[seed] = self._build(seed)
        return self._traces[seed]

    def outcomes(
        self, budgets: Sequence[int] = (8192,), *, arms: Sequence[str] | None = None, seed: int = 0
    ) -> Outcomes:
        """What a collection from the simulated engine would hold, without asking it.

        Parameters
        ----------
        budgets : sequence of int
            Think budgets, tokens, ascending.
        arms : sequence of str, optional
            All arms when left out.
        seed : int, default 0
        """
        arms = tuple(self.arms) if arms is None else tuple(arms)
        traces, rows, ladder = self.traces(seed), np.arange(len(self._questions)), np.asarray(budgets, dtype=np.int64)
        p2, tokens, finished = traces.read(rows, ladder)
        spent = [seconds(self.arms[arm], traces.jitter, tokens) for arm in arms]
        return Outcomes(
            p1=traces.p1,
            p2=p2,
            tokens=tokens.astype(np.float64),
            finished=finished,
            t1=np.stack([t1 for t1, _, _ in spent]),
            t2=np.stack([thought + read[:, None] for _, thought, read in spent]),
            answer=traces.key,
            budgets=ladder,
            arms=arms,
            n_options=traces.n_options,
            dataset=np.array([q.dataset for q in self._questions], dtype=np.object_),
            kind=np.array([q.kind for q in self._questions], dtype=np.object_),
            ids=np.array([q.id for q in self._questions], dtype=np.object_),
            simulated=True,
            model=f"{self.name} (simulated)",
            default_threshold=self.reference.threshold,
            default_mix=self.reference.mix,
        )

    def _build(self, seed: int) -> Traces:
        plans, pool = self._plans(), self._pool()
        identity = (seed, crc32(self.name.encode()))
        published = self.figures["all"]
        if "ece_system1" not in published:
            return build(plans, self.reference, seed=identity, pool=pool)
        # two free shares are set by search, so that both calibration errors come out as published
        key = np.concatenate([plan.key for plan in plans])

        def miss(figure: str, overconfidence: float, stubborn: float) -> float:
            traces = build(
                plans, self.reference, seed=identity, pool=pool, overconfidence=overconfidence, stubborn=stubborn
            )
            p = traces.p1
            if figure == "ece_adaptive":
                p2, _, _ = traces.read(np.arange(len(key)), np.array([self.reference.think_budget]))
                mixed = (1 - self.reference.mix) * p + self.reference.mix * p2[:, 0]
                p = np.where((p.max(1) < self.reference.threshold)[:, None], mixed, p)
            return abs(metrics.ece(p, key) - float(published[figure]))

        first = {shift: miss("ece_system1", shift, 0.5) for shift in _SHIFTS}  # System 2 does not move it
        best = (np.inf, 0.0, 0.0)
        for shift, stubborn in product(sorted(_SHIFTS, key=first.__getitem__)[:_SHIFTS_TRIED], _STUBBORN):
            best = min(best, (max(first[shift], miss("ece_adaptive", shift, stubborn)), shift, stubborn))
            if best[0] < _ECE_TOLERANCE:
                break
        return build(plans, self.reference, seed=identity, pool=pool, overconfidence=best[1], stubborn=best[2])

    def _plans(self) -> list[SetPlan]:
        plans, start = [], 0
        for row in self.figures["sets"]:
            n = row["requests"]
            part = self._questions[start : start + n]
            start += n
            assumed = _ASSUMED[self.name][row["name"]]
            think = _whole(row["think"], n)
            kept_accuracy = row["kept_accuracy"] / 100 if "kept_accuracy" in row else assumed.kept_accuracy
            plans.append(
                SetPlan(
                    name=row["name"],
                    n_options=np.array([len(q.options) for q in part]),
                    key=np.array([q.answer for q in part]),
                    think=think,
                    kept_right=round(kept_accuracy * (n - think)),
                    system1=_whole(row["system1"], n),
                    adaptive=_whole(row["adaptive"], n),
                    always=_whole(row["always_think"], n) if "always_think" in row else None,
                    harm=assumed.harm,
                    follows_doubt=assumed.follows_doubt,
                    lengths=None if "thought_p90" in self.figures["all"] else self._lengths(row, assumed, n, think),
                )
            )
        return plans

    def _pool(self) -> NDArray[np.int64] | None:
        """Thought lengths over all questions, where they are published so."""
        figures = self.figures["all"]
        if "thought_p90" not in figures:
            return None
        n = sum(row["requests"] for row in self.figures["sets"])
        knots = {1: 180, round(0.1 * n): 620, _rank(0.5, n): figures["thought_median"]}
        knots[_rank(0.9, n)] = figures["thought_p90"]
        return lengths_by_rank(n, [*knots.items(), *self._around_budget(_whole(figures["finished"], n), n)])

    def _lengths(self, row: Mapping[str, Any], assumed: Assumed, n: int, think: int) -> NDArray[np.int64]:
        """Thought lengths of those that think, from the published cut share, median thought and median latency."""
        budget, rates = self.reference.think_budget, self.arms["base"]
        cut = _whole(row.get("cut", assumed.cut), think)
        knots = {1: assumed.shortest} | {_rank(share, think): tokens for share, tokens in assumed.knots}
        if row.get("thought_median", budget) < budget:
            knots[_rank(0.5, think)] = row["thought_median"]
        # the median request, when it thinks, is this one of the thoughts
        median = _rank(0.5, n) - (n - think)
        tokens = round((row["p50_base"] - rates.system1 - rates.read) * rates.tokens_per_second)
        if median > 1 and tokens < 0.99 * budget:
            knots[median] = tokens
        return lengths_by_rank(think, [*knots.items(), *self._around_budget(think - cut, think)])

    def _around_budget(self, finished: int, n: int) -> list[tuple[int, int]]:
        """Knots that let exactly ``finished`` of n thoughts end within the reference budget."""
        budget = self.reference.think_budget
        return [(finished, budget - 30), (finished + 1, budget + 30), (n, CONTEXT_TOKENS - 1000)]


def seconds(
    rates: Rates, jitter: NDArray[np.float64], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of System 1 (R,), thought (R, B) and answer read (R,) of R questions that used so many tokens."""
    t1, read = rates.system1 * (1 + jitter[:, 0]), rates.read * (1 + jitter[:, 1])
    return t1, tokens / rates.tokens_per_second, read


def option_counts(n: int, support: Sequence[int], chance: float | None) -> NDArray[np.int64]:
    """Number of options of n questions, ascending, such that mean(1 / options) is the published chance.

    The even distribution over ``support`` is tilted, exp(a / options), until it fits (the least change that does).

    Parameters
    ----------
    n : int
    support : sequence of int, ascending
    chance : float or None
        Percent; None keeps the even distribution.
    """
    counts = np.asarray(support)
    inverse = 1 / counts
    share = np.full(len(counts), 1 / len(counts))
    if chance is not None and len(counts) > 1:
        scaled = (inverse - inverse.mean()) / np.ptp(inverse)
        low, high = -60.0, 60.0
        for _ in range(80):
            tilt = (low + high) / 2
            share = np.exp(tilt * scaled)
            share /= share.sum()
            low, high = (tilt, high) if share @ inverse < chance / 100 else (low, tilt)
    edges = np.rint(np.cumsum(share) * n).astype(np.int64)
    return np.repeat(counts, np.diff(edges, prepend=0))


def _whole(percent: float, n: int) -> int:
    return round(percent * n / 100)


def _rank(share: float, n: int) -> int:
    """Rank, from 1, of the smallest value that at least this share does not exceed."""
    return int(np.ceil(share * n - 1e-9))

"""Does thinking help here: per dataset and confidence band, before any tuning.

Counts every question once, whatever its weight: it asks what thinking does to answers, not what traffic makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from calib import exact, metrics
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, Policy, confidence

__all__ = ["BANDS", "Advice", "WhyRow", "hurting", "ranking_auc", "why"]

Advice = Literal["think", "never", "gate"]

BANDS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Edges of the confidence bands ``[low, high)``, as a threshold cuts; the last holds 1 as well."""

ALPHA = 0.05
USELESS_AUC = 0.55
"""A confidence that ranks errors worse than this saves next to nothing as a gate, even where it beats a coin."""


@dataclass(frozen=True)
class WhyRow:
    """What thinking does to the answers of one dataset, or of one confidence band of it.

    Attributes
    ----------
    dataset : str or None
        None for all datasets together.
    low, high : float or None
        Confidence band; None for all confidences.
    n : int
        Questions on which the server can think.
    system1, thought : float
        Accuracy without thinking, and when all of them think, 0 to 1.
    gained, lost : int
        Wrong to right, right to wrong. A thought without a usable answer counts as wrong.
    p_value : float
        Exact McNemar test that both are equally likely; questions of one group count as one by their balance.
    p_holm : float or None
        The same among all datasets; None for bands and for all datasets together.
    seconds, tokens : float
        Mean of one thought; NaN where unknown.
    auc : float
        Chance that a right answer of System 1 has more confidence than a wrong one, 0.5 is a coin; NaN when all are
        right or all wrong, and within bands.
    auc_p : float
        One-sided p-value that it is no better than a coin; NaN where ``auc`` is.
    marks : tuple of str
        `estimated`, `simulated`.
    """

    dataset: str | None
    low: float | None
    high: float | None
    n: int
    system1: float
    thought: float
    gained: int
    lost: int
    p_value: float
    p_holm: float | None
    seconds: float
    tokens: float
    auc: float
    auc_p: float
    marks: tuple[str, ...]

    @property
    def net(self) -> int:
        """Right answers won on balance."""
        return self.gained - self.lost

    @property
    def seconds_per_correction(self) -> float:
        """Seconds of thinking for one right answer won on balance; infinite when none is."""
        return self.n * self.seconds / self.net if self.net > 0 else math.inf

    @property
    def tokens_per_correction(self) -> float:
        """Thinking tokens for one right answer won on balance; infinite when none is."""
        return self.n * self.tokens / self.net if self.net > 0 else math.inf

    @property
    def hurts(self) -> bool:
        """Whether thinking loses right answers here, proven or not."""
        return self.net < 0

    @property
    def proven(self) -> bool:
        """Whether the change is more than chance, allowing for the number of datasets."""
        return (self.p_value if self.p_holm is None else self.p_holm) <= ALPHA

    @property
    def gate_is_useless(self) -> bool:
        """Whether confidence cannot tell System 1's errors from its right answers."""
        return not (self.auc >= USELESS_AUC and self.auc_p <= ALPHA)

    @property
    def advice(self) -> Advice:
        """``never`` where thinking wins nothing, ``think`` where no gate can choose, else ``gate``."""
        if self.net <= 0:
            return "never"
        return "think" if self.gate_is_useless else "gate"

    @property
    def reason(self) -> str:
        """The advice in words."""
        change = f"{100 * self.system1:.1f} -> {100 * self.thought:.1f} % on {self.n} questions"
        change += f" ({self.gained} gained, {self.lost} lost, p = {self.p_value:.2g})"
        if self.hurts:
            return f"thinking hurts here: {change}{'' if self.proven else ', which may be chance'}; thinking: off"
        if self.net == 0:
            return f"thinking wins nothing here: {change}; thinking: off"
        doubt = "" if self.proven else ", which may be chance"
        if self.low is None and self.gate_is_useless:
            ranks = "there is nothing to rank" if math.isnan(self.auc) else f"AUC {self.auc:.2f}"
            return f"thinking helps: {change}{doubt}; confidence is no gate ({ranks}): route always or never"
        return f"thinking helps: {change}{doubt}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is unknown or infinite."""
        numbers = {
            "system1": self.system1,
            "thought": self.thought,
            "p_value": self.p_value,
            "p_holm": self.p_holm,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "seconds_per_correction": self.seconds_per_correction,
            "tokens_per_correction": self.tokens_per_correction,
            "auc": self.auc,
            "auc_p": self.auc_p,
        }
        return {
            "dataset": self.dataset,
            "band": None if self.low is None else [self.low, self.high],
            "n": self.n,
            "gained": self.gained,
            "lost": self.lost,
            **{name: x if x is not None and math.isfinite(x) else None for name, x in numbers.items()},
            "hurts": self.hurts,
            "proven": self.proven,
            "advice": self.advice,
            "reason": self.reason,
            "marks": list(self.marks),
        }


def why(outcomes: Outcomes, think_budget: int, arm: str, mix: float, *, bands: Sequence[float] = BANDS) -> list[WhyRow]:
    """Compare System 1 with thinking on every question, per dataset and confidence band.

    Parameters
    ----------
    outcomes : Outcomes
    think_budget : int
        One of the collected budgets.
    arm : str
        Gives the seconds.
    mix : float
        Weight of System 2 in the answer after thinking, 0 to 1.
    bands : sequence of float
        Ascending edges of the confidence bands.

    Returns
    -------
    list of WhyRow
        All datasets together, then each dataset (sorted by name) followed by its bands that hold a question. Questions
        on which the server cannot think are left out.

    Raises
    ------
    CalibError
        When the budget or arm was not collected, or no question can think.
    """
    a, b = outcomes.arm_index(arm), outcomes.budget_index(think_budget)
    policy = Policy(ALWAYS, mix, think_budget, arm)
    if not outcomes.can_think.any():
        raise CalibError("the server can think on none of these questions: there is nothing to compare")
    sure = confidence(outcomes.p1)
    before = metrics.chosen(outcomes.p1) == outcomes.answer
    after = metrics.chosen(policy.combine(outcomes.p1, outcomes.p2[:, b])) == outcomes.answer
    marks = outcomes.marks_of(arm, think_budget)

    def row(where: NDArray[np.bool_], dataset: str | None, low: float | None, high: float | None) -> WhyRow:
        was, now = before[where], after[where]
        gained, lost = int((~was & now).sum()), int((was & ~now).sum())
        auc, auc_p = ranking_auc(sure[where], was) if low is None else (math.nan, math.nan)
        return WhyRow(
            dataset,
            low,
            high,
            int(where.sum()),
            metrics.mean(was),
            metrics.mean(now),
            gained,
            lost,
            exact.mcnemar(*_pairs(outcomes.group_codes[where], now.astype(np.int64) - was)),
            None,
            metrics.mean(outcomes.t2[a, where, b]),
            metrics.mean(outcomes.tokens[where, b]),
            auc,
            auc_p,
            marks,
        )

    sets = [(name, outcomes.can_think & (outcomes.dataset_codes == k)) for k, name in enumerate(outcomes.dataset_names)]
    wholes = [row(where, name, None, None) for name, where in sets if where.any()]
    adjusted = dict(zip([w.dataset for w in wholes], exact.holm([w.p_value for w in wholes]).tolist(), strict=True))
    rows = [row(outcomes.can_think, None, None, None)]
    for whole, (name, where) in zip(wholes, [s for s in sets if s[1].any()], strict=True):
        rows.append(replace(whole, p_holm=adjusted[name]))
        rows.extend(row(inside, name, low, high) for low, high, inside in _bands(sure, where, bands))
    return rows


def _pairs(group: NDArray[np.int64], change: NDArray[np.int64]) -> tuple[int, int]:
    """Groups that gain on balance and that lose: within a group answers go together, between groups they do not."""
    net = np.bincount(group, change)
    return int((net > 0).sum()), int((net < 0).sum())


def hurting(rows: Sequence[WhyRow]) -> list[WhyRow]:
    """Datasets in which thinking loses right answers, the worst first; see `WhyRow.proven`."""
    found = [row for row in rows if row.dataset is not None and row.low is None and row.hurts]
    return sorted(found, key=lambda row: (row.thought - row.system1, row.dataset))


def ranking_auc(sure: ArrayLike, right: ArrayLike) -> tuple[float, float]:
    """How well confidence ranks right answers above wrong ones: AUC (ties count half) and its one-sided p-value.

    Returns
    -------
    tuple of float
        Area 0 to 1, and the p-value of Mann and Whitney's test (normal approximation with ties) that it is 0.5 or
        less; NaN when there is nothing to rank.
    """
    c, was = np.asarray(sure, dtype=np.float64), np.asarray(right, dtype=bool)
    if was.all() or not was.any():
        return math.nan, math.nan
    if (c == c[0]).all():
        return 0.5, 1.0
    test = stats.mannwhitneyu(c[was], c[~was], alternative="greater", method="asymptotic")
    return float(test.statistic) / (int(was.sum()) * int((~was).sum())), float(test.pvalue)


def _bands(
    sure: NDArray[np.float64], where: NDArray[np.bool_], edges: Sequence[float]
) -> Iterator[tuple[float, float, NDArray[np.bool_]]]:
    for low, high in pairwise(edges):
        inside = where & (sure >= low) & ((sure < high) | (high == edges[-1]))
        if inside.any():
            yield low, high, inside

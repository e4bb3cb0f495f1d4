"""The definitions of the confidence beside each other: how each orders the questions, what can be reached with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calib import metrics
from calib.optimise import Table, optimum, tabulate
from calib.outcomes import Outcomes
from calib.policy import CONFIDENCES, Evaluation, Policy, confidence, evaluate
from calib.target import Target

__all__ = ["ConfidenceRow", "compare_confidences"]


@dataclass(frozen=True)
class ConfidenceRow:
    """One definition.

    Attributes
    ----------
    definition : str
        Of `calib.policy.CONFIDENCES`.
    aurc : float
        Area under the risk-coverage curve of System 1, 0 to 1; lower is better.
    policy : Policy or None
        The exact optimum inside the limits with it; None when none keeps them.
    score : Evaluation or None
        Of that policy, on the same questions.
    """

    definition: str
    aurc: float
    policy: Policy | None
    score: Evaluation | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "confidence": self.definition,
            "aurc": self.aurc,
            "policy": None if self.policy is None else self.policy.to_dict(),
            "metrics": None if self.score is None else self.score.to_dict(),
        }


def compare_confidences(
    outcomes: Outcomes, targets: Sequence[Target] = (), *, table: Table | None = None
) -> list[ConfidenceRow]:
    """Compare the definitions of the confidence on the same questions, as the systems answered them.

    Parameters
    ----------
    outcomes : Outcomes
        Tune questions: the optimum is chosen and scored on them.
    targets : sequence of Target
        Limits that the optimum keeps.
    table : Table, optional
        Where one is known: used if it is of these very outcomes, for its own definition.

    Returns
    -------
    list of ConfidenceRow
        In the order of `calib.policy.CONFIDENCES`.
    """
    right = metrics.chosen(outcomes.p1) == outcomes.answer
    rows = []
    for name in CONFIDENCES:
        sure = confidence(outcomes.p1, name, outcomes.n_options)
        fits = table is not None and table.outcomes is outcomes and (table.confidence, table.pool) == (name, "linear")
        policy = optimum(table if table is not None and fits else tabulate(outcomes, confidence=name), targets).policy
        score = None if policy is None else evaluate(outcomes, policy)
        rows.append(ConfidenceRow(name, metrics.aurc(sure, right, outcomes.weight), policy, score))
    return rows

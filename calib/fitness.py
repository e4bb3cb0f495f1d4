"""What is fit to tune on: which rows an audit leaves out, on which side of the split, and which gates are only noise.

Rows that fail are kept and marked; this module leaves them out where a policy is tuned. A row whose numbers are another
model's says nothing of this one: it counts on neither side. A row that is the server's own, but weakly founded (the
label was forced, the budget was not kept), is no guide for the search and counts on no tune side; what is served meets
such questions too, so that it stays on the test side, and the verdict is about all of them.

A gate compares System 1's confidence with a threshold, and asked again the confidence is a little another one. Where
most of the questions that a gate sets apart could go the other way, it sorts noise: `Repeats` knows such gates, and
the search takes none of them.

Pure: arrays in, arrays out. Leaves to others: the marks of rows (`calib.store`), what is said of whole datasets
(`calib.audit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib.errors import CalibError
from calib.outcomes import Outcomes

__all__ = ["BUDGET", "LOW_MASS", "MASS", "REPLACED", "Fit", "Repeats", "fit_rows", "flaws", "forced"]

BUDGET, REPLACED, MASS = "budget", "replaced", "label mass"
"""What a row can fail: its thought kept its budget; its server was the same to the end; its label was meant."""

LOW_MASS = 0.5
"""Label mass below which a forced letter is not what the model would say."""

_WORDS = {
    BUDGET: "whose thought did not keep its budget",
    REPLACED: "that may be another model's, since the server was replaced while they were asked",
    MASS: f"where less than {LOW_MASS:g} of the probability lies on the labels",
}
_OPTION = "--include-failed-audits"

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Fit:
    """Rows that are fit, and what is to be said of the others.

    Attributes
    ----------
    outcomes : Outcomes
    warnings : tuple of str
        How many rows are left out and why, and where System 1's letter is forced throughout.
    """

    outcomes: Outcomes
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Repeats:
    """To what System 1's confidence repeats: the floor under the precision of a threshold.

    Attributes
    ----------
    sure : ndarray of shape (M,)
        Confidences of the questions that can be thought about, ascending.
    floors : mapping of str to float
        How far the confidence moves when an arm is asked again at another load, by arm. An arm that was not asked
        again gets the largest of the others'.
    """

    sure: NDArray[np.float64]
    floors: Mapping[str, float]

    def floor(self, arm: str) -> float:
        """How far the confidence of an arm moves; 0 where it is not known of any arm."""
        return self.floors.get(arm, max(self.floors.values(), default=0.0))

    def undecided(self, thresholds: ArrayLike, arm: str) -> NDArray[np.float64]:
        """Share of the questions within the floor of each threshold: asked again they may go the other way."""
        low, _, high = self._places(thresholds, arm)
        return (high - low) / max(len(self.sure), 1) * (self.floor(arm) > 0)

    def noisy(self, thresholds: ArrayLike, arm: str) -> Bools:
        """Gates of which more than half of the questions on the smaller side are undecided.

        To think about none, or about all, is no gate.
        """
        at = np.asarray(thresholds, dtype=np.float64)
        low, below, high = self._places(at, arm)
        n = len(self.sure)
        under = below * 2 <= n  # the smaller side
        small, doubtful = np.where(under, below, n - below), np.where(under, below - low, high - below)
        return np.asarray((self.floor(arm) > 0) & (at > 0) & (at <= 1) & (2 * doubtful > small))

    def _places(self, thresholds: ArrayLike, arm: str) -> tuple[NDArray[np.int64], ...]:
        """How many confidences lie below the floor's reach of each threshold, below it, and up to that above it."""
        at, floor = np.asarray(thresholds, dtype=np.float64), self.floor(arm)
        ends = ((at - floor, "left"), (at, "left"), (at + floor, "right"))
        return tuple(np.searchsorted(self.sure, end, side=side) for end, side in ends)  # type: ignore[call-overload]


def flaws(outcomes: Outcomes) -> dict[str, Bools]:
    """Rows that fail each audit of single rows, shape (N,) each.

    The label mass is that of System 1 and of System 2 at the largest budget. It fails single rows only: in a dataset
    where the middle row is low the system does not answer by a label at all, no row there is odder than the others,
    and `forced` names it.
    """
    found = {name: np.asarray(outcomes.flaw == name) for name in (REPLACED, BUDGET)}
    mass = np.zeros(outcomes.n, dtype=bool)
    low = forced(outcomes)
    for k, name in enumerate(outcomes.dataset_names):
        here = outcomes.dataset_codes == k
        for column in _columns(outcomes):
            if (name, column) not in low:
                mass |= here & (outcomes.label_mass[:, column] < LOW_MASS)  # unknown is not low
    found[MASS] = mass
    return found


def forced(outcomes: Outcomes) -> dict[tuple[str, int], float]:
    """Median label mass, by dataset and column of ``label_mass``, where it is below `LOW_MASS`."""
    found = {}
    for k, name in enumerate(outcomes.dataset_names):
        rows = outcomes.label_mass[outcomes.dataset_codes == k]
        for column in _columns(outcomes):
            known = rows[np.isfinite(rows[:, column]), column]
            if known.size and (middle := float(np.median(known))) < LOW_MASS:
                found[name, column] = middle
    return found


def _columns(outcomes: Outcomes) -> tuple[int, ...]:
    """System 1, and System 2 at the largest budget."""
    return (0, len(outcomes.budgets)) if outcomes.budgets.size else (0,)


def fit_rows(outcomes: Outcomes, test_share: float, *, everything: bool = False) -> Fit:
    """Leave out the rows that failed an audit, each where it does harm.

    Parameters
    ----------
    outcomes : Outcomes
    test_share : float
        Questions that are held out, see `Outcomes.test_mask`.
    everything : bool, default False
        Keep all rows, and say what is held against them.

    Raises
    ------
    CalibError
        No row of the tune side is fit.
    """
    failing = flaws(outcomes)
    tuned_on = ~outcomes.test_mask(test_share)
    gone = failing[REPLACED] | (tuned_on & (failing[BUDGET] | failing[MASS]))
    counts = {name: int((rows & (gone | everything)).sum()) for name, rows in failing.items()}
    said = [f"{count:,} {_questions(count)} {_WORDS[name]}" for name, count in counts.items() if count]
    warnings = list(_forced_words(outcomes))
    if everything:
        warnings += [f"audit: kept {one}" for one in said]
        return Fit(outcomes, tuple(warnings))
    if not gone.any():
        return Fit(outcomes, tuple(warnings))
    if not (tuned_on & ~gone).any():
        raise CalibError(
            f"no question is fit to tune on: {'; '.join(said)}. See calib status; "
            f"to tune on them all the same: {_OPTION}"
        )
    warnings += [f"audit: left out {one}; {_OPTION} keeps them" for one in said]
    return Fit(outcomes.take(~gone), tuple(warnings))


def _forced_words(outcomes: Outcomes) -> list[str]:
    found = []
    for (name, column), middle in forced(outcomes).items():
        if column == 0:
            found.append(
                f"audit: System 1 is made to give a letter throughout {name!r} (median label mass {middle:.2g}): its "
                "confidence may mean little there. No row is left out for it; calib why says whether it is a gate"
            )
    return found


def _questions(count: int) -> str:
    return "question" if count == 1 else "questions"

"""Arrays in, one number out: accuracy, skill, Brier, ECE, NLL, macro F1, risk-coverage, percentiles.

Every function takes an optional ``weight`` of shape (N,). A row of NaN in ``p`` is a question without a usable
answer: wrong for accuracy, left out of the scores of probabilities. No data gives NaN, never a flattering 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib.errors import CalibError

__all__ = [
    "ECE_BINS",
    "NLL_CLIP",
    "Reliability",
    "accuracy",
    "aurc",
    "brier",
    "chosen",
    "ece",
    "macro_f1",
    "mean",
    "nll",
    "nll_clipped",
    "percentile",
    "percentiles",
    "reliability",
    "risk_coverage",
    "skill",
]

ECE_BINS = 15
NLL_CLIP = 1e-12

Floats = NDArray[np.float64]


def chosen(p: ArrayLike) -> NDArray[np.int64]:
    """Index of the first largest probability, -1 for a row without an answer.

    Parameters
    ----------
    p : array_like of shape (N, C)
        Probabilities; padded options hold 0 and cannot win, since a distribution has a positive entry.
    """
    given = np.asarray(p, dtype=np.float64)
    best = given.argmax(axis=-1)  # arg max of a row with NaN is the NaN's place
    return np.where(np.isnan(np.take_along_axis(given, best[..., None], -1)[..., 0]), -1, best)


def mean(values: ArrayLike, weight: ArrayLike | None = None) -> float:
    """Weighted mean; NaN without values."""
    x = np.asarray(values, dtype=np.float64)
    if not x.size:
        return float("nan")
    if weight is None:
        return float(x.sum() / x.size)
    w = np.asarray(weight, dtype=np.float64)
    return float((x * w).sum() / w.sum())


def accuracy(p: ArrayLike, answer: ArrayLike, weight: ArrayLike | None = None) -> float:
    """Weighted share of right answers, 0 to 1; a row of NaN is wrong, a tie goes to the lowest index."""
    return mean(chosen(p) == np.asarray(answer), weight)


def skill(accuracy: float, n_options: ArrayLike, weight: ArrayLike | None = None) -> float:
    """(accuracy - chance) / (1 - chance) with chance the mean of 1 / number of options; at most 1."""
    chance = mean(1 / np.asarray(n_options, dtype=np.float64), weight)
    return (accuracy - chance) / (1 - chance)


def _answered(p: ArrayLike, weight: ArrayLike | None, *rest: ArrayLike) -> tuple[Any, ...]:
    given = np.asarray(p, dtype=np.float64)
    w = np.ones(len(given)) if weight is None else np.asarray(weight, dtype=np.float64)
    lost = np.isnan(given[:, 0])  # a row is NaN as a whole, or not at all
    if not lost.any():
        return (given, w, *map(np.asarray, rest))
    return (given[~lost], w[~lost], *(np.asarray(r)[~lost] for r in rest))


def brier(p: ArrayLike, answer: ArrayLike, weight: ArrayLike | None = None) -> float:
    """Multi-class Brier score, 0 to 2: mean over questions of the summed squared distance to the right answer.

    References
    ----------
    Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    given, w, y = _answered(p, weight, answer)
    right = np.take_along_axis(given, y[:, None], 1)[:, 0]
    return mean(np.einsum("ij,ij->i", given, given) - 2 * right + 1, w)


def nll(p: ArrayLike, answer: ArrayLike, weight: ArrayLike | None = None) -> float:
    """Mean negative log likelihood of the right answer, nats; p is clipped at 1e-12 (see `nll_clipped`)."""
    given, w, y = _answered(p, weight, answer)
    right = np.take_along_axis(given, y[:, None], 1)[:, 0]
    return mean(-np.log(np.maximum(right, NLL_CLIP)), w)


def nll_clipped(p: ArrayLike, answer: ArrayLike) -> int:
    """Number of questions whose right answer had less than 1e-12."""
    given, _, y = _answered(p, None, answer)
    return int((np.take_along_axis(given, y[:, None], 1) < NLL_CLIP).sum())


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence and accuracy by bin of the top option's probability.

    Attributes
    ----------
    edges : ndarray of shape (bins + 1,)
        Bin k is ``(edges[k], edges[k + 1]]``.
    count, weight, confidence, accuracy : ndarray of shape (bins,)
        Questions, their weight, mean top probability, share right; NaN for the last two where a bin is empty.
    ece : float
        Weighted mean distance between the last two, 0 to 1.
    """

    edges: Floats
    count: NDArray[np.intp]
    weight: Floats
    confidence: Floats
    accuracy: Floats
    ece: float


def reliability(
    p: ArrayLike, answer: ArrayLike, weight: ArrayLike | None = None, *, bins: int = ECE_BINS
) -> Reliability:
    """Reliability of the top option in equal-width bins ``(lo, hi]``.

    References
    ----------
    Guo et al. (2017), On calibration of modern neural networks.
    """
    given, w, y = _answered(p, weight, answer)
    edges = np.linspace(0, 1, bins + 1)
    best = given.argmax(axis=1)
    top = np.take_along_axis(given, best[:, None], 1)[:, 0]
    k = np.clip(np.searchsorted(edges, top, side="left") - 1, 0, bins - 1)
    count = np.bincount(k, minlength=bins)
    total: Floats = np.bincount(k, w, bins).astype(np.float64)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(k, w * top, bins) / total
        right = np.bincount(k, w * (best == y), bins) / total
    gap = np.where(count > 0, np.abs(confidence - right), 0.0)
    return Reliability(edges, count, total, confidence, right, mean(gap, total) if len(given) else float("nan"))


def ece(p: ArrayLike, answer: ArrayLike, weight: ArrayLike | None = None, *, bins: int = ECE_BINS) -> float:
    """Expected calibration error of the top option, 0 to 1, in 15 equal-width bins ``(lo, hi]``."""
    return reliability(p, answer, weight, bins=bins).ece


def macro_f1(
    p: ArrayLike, answer: ArrayLike, label_set: ArrayLike | None = None, weight: ArrayLike | None = None
) -> float:
    """Mean over labels of F1, 0 to 1, on the questions whose options are one fixed label set.

    Parameters
    ----------
    p : array_like of shape (N, C)
    answer : array_like of int, shape (N,)
    label_set : array_like of int, shape (N,), optional
        Number of the fixed label set of each question, -1 for none; one common set when left out.
    weight : array_like of shape (N,), optional

    Returns
    -------
    float
        NaN where no question has a fixed label set. A label counts when it is the right answer of a question or was
        chosen (as in scikit-learn). A question without a usable answer lowers the recall of its label.
    """
    pick, y = chosen(p), np.asarray(answer, dtype=np.int64)
    w = np.ones(len(y)) if weight is None else np.asarray(weight, dtype=np.float64)
    sets = np.zeros(len(y), dtype=np.int64) if label_set is None else np.asarray(label_set)
    keep = sets >= 0
    if not keep.any():
        return float("nan")
    pick, y, w, sets = pick[keep], y[keep], w[keep], sets[keep]
    width = int(max(y.max(), pick.max())) + 1
    true, guess = sets * width + y, np.where(pick < 0, -1, sets * width + pick)
    size = int(max(true.max(), guess.max())) + 1
    support = np.bincount(true, w, size)
    given = np.bincount(guess[guess >= 0], w[guess >= 0], size)
    hit = np.bincount(true[true == guess], w[true == guess], size)
    seen = (support > 0) | (given > 0)
    return float((2 * hit[seen] / (support[seen] + given[seen])).mean())


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Error among the kept questions as coverage grows.

    Attributes
    ----------
    coverage, risk : ndarray of shape (K,)
        One point for each distinct confidence, from the most confident down; both 0 to 1.
    """

    coverage: Floats
    risk: Floats


def risk_coverage(confidence: ArrayLike, right: ArrayLike, weight: ArrayLike | None = None) -> RiskCoverage:
    """Risk among the questions of at least each confidence; equal confidences enter together."""
    c = np.asarray(confidence, dtype=np.float64)
    w = np.ones(len(c)) if weight is None else np.asarray(weight, dtype=np.float64)
    order = np.argsort(-c, kind="stable")
    last = np.append(c[order][1:] != c[order][:-1], True)
    kept = np.cumsum(w[order])[last]
    wrong = np.cumsum((w * ~np.asarray(right, dtype=bool))[order])[last]
    return RiskCoverage(kept / w.sum(), wrong / kept)


def aurc(confidence: ArrayLike, right: ArrayLike, weight: ArrayLike | None = None) -> float:
    """Area under the risk-coverage curve, 0 to 1, lower is better: mean risk over all coverages.

    References
    ----------
    Geifman, Uziel, El-Yaniv (2019), Bias-reduced uncertainty estimation for deep neural classifiers.
    """
    curve = risk_coverage(confidence, right, weight)
    if not curve.coverage.size:
        return float("nan")
    return float((np.diff(curve.coverage, prepend=0.0) * curve.risk).sum())


def percentiles(values: ArrayLike, q: ArrayLike, weight: ArrayLike | None = None) -> Floats:
    """Smallest observed values that at least these shares do not exceed (``inverted_cdf``).

    Parameters
    ----------
    values : array_like of shape (N,)
        A NaN makes every percentile NaN: an unknown latency is not a fast one. An infinite value is allowed.
    q : array_like of shape (Q,)
        Percentages, above 0 to 100.
    weight : array_like of shape (N,), optional
        Positive. Smallest value with cumulative weight >= q * total * (1 - 1e-12): constant weights equal no weights.

    Returns
    -------
    ndarray of shape (Q,)
    """
    x = np.asarray(values, dtype=np.float64)
    share = np.asarray(q, dtype=np.float64) / 100
    if ((share <= 0) | (share > 1)).any():
        raise CalibError(f"a percentile must be above 0 and at most 100, got {q!r}")
    if not x.size or np.isnan(x).any():
        return np.full(share.shape, np.nan)
    if weight is None:
        rank = np.ceil(share * x.size * (1 - 1e-12)).astype(np.int64) - 1
        return np.asarray(np.partition(x, np.unique(rank))[rank])
    order = np.argsort(x, kind="stable")
    total = np.cumsum(np.asarray(weight, dtype=np.float64)[order])
    at = np.searchsorted(total, share * total[-1] * (1 - 1e-12), side="left")
    return np.asarray(x[order][np.minimum(at, x.size - 1)])


def percentile(values: ArrayLike, q: float, weight: ArrayLike | None = None) -> float:
    """One percentile, as `percentiles`."""
    return float(percentiles(values, [q], weight)[0])

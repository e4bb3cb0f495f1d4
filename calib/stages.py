"""How far probabilities mean what they say, at three stages: System 1, System 2, and the answer of a policy.

Reliability by bin with intervals, ECE in bins of equal width and of equal mass with a bootstrap interval, the Brier
score split into reliability, resolution and uncertainty, NLL, and the risk-coverage curve. Leaves the drawing to
`calib.figures` and what to do about it to `calib.calibrate`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib import exact, metrics
from calib.errors import CalibError
from calib.intervals import Interval
from calib.jsonnumbers import finite
from calib.outcomes import Outcomes
from calib.policy import Policy, confidence, decide

__all__ = ["BINNINGS", "RESAMPLES", "Bins", "BrierSplit", "Stage", "binned", "brier_split", "stages"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BINNINGS = ("width", "mass")
"""Bins of equal width on 0 to 1, or with equally many questions."""

RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class Bins:
    """Reliability of the top option by bin, for a reliability diagram.

    Attributes
    ----------
    edges : ndarray of shape (K + 1,)
        Bin k is ``(edges[k], edges[k + 1]]``.
    count : ndarray of int, shape (K,)
        Questions.
    weight, confidence, accuracy : ndarray of shape (K,)
        Their weight, mean top probability, share right; NaN for the last two where a bin is empty.
    low, high : ndarray of shape (K,)
        Clopper-Pearson interval of the share right; NaN where a bin is empty or its questions differ in weight.
    ece : float
        Weighted mean distance between confidence and accuracy, 0 to 1; NaN without questions.
    """

    edges: Floats
    count: Ints
    weight: Floats
    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats
    ece: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not known."""
        plain = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(self).items()}
        return {name: finite(v) for name, v in plain.items()}


def binned(
    p: ArrayLike,
    answer: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bins: int = metrics.ECE_BINS,
    by: str = "width",
    level: float = 0.95,
) -> Bins:
    """Reliability of the top option.

    Parameters
    ----------
    p : array_like of shape (N, C)
        A row of NaN is left out.
    answer : array_like of int, shape (N,)
    weight : array_like of shape (N,), optional
    bins : int, default 15
    by : {"width", "mass"}
        Bins of equal mass keep equal confidences together, and are fewer where many are equal.
    level : float, default 0.95
        Of the intervals.
    """
    top, right, w = _top(p, answer, weight)
    edges = _edges(top, w, bins, by)
    k = _bin_of(top, edges)
    size = len(edges) - 1
    count = np.bincount(k, minlength=size)
    total, sure, hit = (np.bincount(k, x, size).astype(np.float64) for x in (w, w * top, w * right))
    with np.errstate(invalid="ignore"):
        mean, share = sure / total, hit / total
    low, high = np.full(size, np.nan), np.full(size, np.nan)
    if w.size and bool(np.all(w == w[0])):
        for i in np.flatnonzero(count):
            low[i], high[i] = exact.clopper_pearson(round(share[i] * count[i]), int(count[i]), level)
    ece = float(np.abs(sure - hit).sum() / w.sum()) if len(w) else math.nan
    return Bins(edges, count, total, mean, share, low, high, ece)


def _top(p: ArrayLike, answer: ArrayLike, weight: ArrayLike | None) -> tuple[Floats, NDArray[np.bool_], Floats]:
    given = np.asarray(p, dtype=np.float64)
    kept = np.asarray(~np.isnan(given).any(axis=1))
    w = np.ones(len(given)) if weight is None else np.asarray(weight, dtype=np.float64)
    best = given[kept].argmax(axis=1)
    return np.take_along_axis(given[kept], best[:, None], 1)[:, 0], best == np.asarray(answer)[kept], w[kept]


def _edges(top: Floats, w: Floats, bins: int, by: str) -> Floats:
    if by not in BINNINGS:
        raise CalibError(f"bins must be of equal {' or '.join(BINNINGS)}, got {by!r}")
    if by == "width" or not len(top):
        return np.linspace(0, 1, bins + 1)
    values, at = np.unique(top, return_inverse=True)
    mass = np.bincount(at, w)
    middle = (np.cumsum(mass) - mass / 2) / mass.sum()  # equal values go where the middle of their mass lies
    k = np.minimum((middle * bins).astype(np.int64), bins - 1)
    last = np.append(k[1:] != k[:-1], True)
    return np.concatenate([[0.0], values[last][:-1], [1.0]])


def _bin_of(values: Floats, edges: Floats) -> Ints:
    return np.clip(np.searchsorted(edges, values, side="left") - 1, 0, len(edges) - 2)


@dataclass(frozen=True)
class BrierSplit:
    """Multi-class Brier score as reliability - resolution + uncertainty + within.

    Every option of every question is a yes-or-no forecast; bins of equal width.

    Attributes
    ----------
    brier : float
        The sum, 0 to 2.
    reliability : float
        Squared distance between forecast and share by bin; 0 when calibrated.
    resolution : float
        How far the shares differ between bins; larger is better.
    uncertainty : float
        What a forecast of the mean share alone would score.
    within : float
        What the bins hide; it vanishes as they get narrow.
    """

    brier: float
    reliability: float
    resolution: float
    uncertainty: float
    within: float


def brier_split(
    p: ArrayLike,
    answer: ArrayLike,
    weight: ArrayLike | None = None,
    n_options: ArrayLike | None = None,
    *,
    bins: int = metrics.ECE_BINS,
) -> BrierSplit:
    """Split of the Brier score; rows of NaN are left out, no row gives NaN.

    References
    ----------
    Murphy (1973), A new vector partition of the probability score. Stephenson, Coelho, Jolliffe (2008), Two extra
    components in the Brier score decomposition.
    """
    given = np.asarray(p, dtype=np.float64)
    kept = np.asarray(~np.isnan(given).any(axis=1))
    given, y = given[kept], np.asarray(answer)[kept]
    if not len(given):
        return BrierSplit(*(math.nan,) * 5)
    w = (np.ones(len(kept)) if weight is None else np.asarray(weight, dtype=np.float64))[kept]
    width = given.shape[1]
    k = np.full(len(given), width) if n_options is None else np.asarray(n_options)[kept]
    exists = np.arange(width) < k[:, None]
    forecast = given[exists]
    event = (np.arange(width) == y[:, None])[exists]
    mass = np.broadcast_to(w[:, None], given.shape)[exists]
    b = _bin_of(forecast, np.linspace(0, 1, bins + 1))
    total, said, came = (np.bincount(b, x, bins) for x in (mass, mass * forecast, mass * event))
    used = total > 0
    total, said, came = total[used], said[used], came[used]
    questions, base = float(w.sum()), float(came.sum() / total.sum())
    brier = float((mass * (forecast - event) ** 2).sum()) / questions
    reliability = float(((said - came) ** 2 / total).sum()) / questions
    resolution = float((total * (came / total - base) ** 2).sum()) / questions
    uncertainty = float(total.sum()) * base * (1 - base) / questions
    return BrierSplit(brier, reliability, resolution, uncertainty, brier - reliability + resolution - uncertainty)


@dataclass(frozen=True, eq=False)
class Stage:
    """How well calibrated one stage is.

    Attributes
    ----------
    name : {"p1", "p2", "final"}
    n, unanswered : int
        Questions with a distribution, and without one.
    accuracy : float
        Share right of those with one.
    mean_top : float
        Mean top probability; above the accuracy: over-confident.
    ece, ece_mass : Interval
        In bins of equal width and of equal mass, with a bootstrap interval that draws whole groups.
    bins, bins_mass : Bins
    brier : BrierSplit
    nll : float
    clipped : int
        Right answers below 1e-12.
    aurc : float
        Area under `curve`, lower is better.
    curve : calib.metrics.RiskCoverage
        By the confidence of the policy.
    """

    name: str
    n: int
    unanswered: int
    accuracy: float
    mean_top: float
    ece: Interval
    ece_mass: Interval
    bins: Bins
    bins_mass: Bins
    brier: BrierSplit
    nll: float
    clipped: int
    aurc: float
    curve: metrics.RiskCoverage

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the curve; None for what is not known."""
        return {
            "n": self.n,
            "unanswered": self.unanswered,
            **{name: finite(getattr(self, name)) for name in ("accuracy", "mean_top", "nll", "aurc")},
            "ece": self.ece.to_dict(),
            "ece_mass": self.ece_mass.to_dict(),
            "brier": finite(asdict(self.brier)),
            "clipped": self.clipped,
            "bins": self.bins.to_dict(),
            "bins_mass": self.bins_mass.to_dict(),
        }


def stages(
    outcomes: Outcomes,
    policy: Policy,
    *,
    rng: np.random.Generator,
    bins: int = metrics.ECE_BINS,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> dict[str, Stage]:
    """The three stages of a policy: p1 on all questions, p2 at its budget where the server can think, its answers.

    Parameters
    ----------
    outcomes : Outcomes
        As the systems answered; a policy with temperatures gives the calibrated stages.
    policy : Policy
        Its budget must have been collected.
    rng : numpy.random.Generator
        Of the bootstrap.
    bins : int, default 15
    level : float, default 0.95
    resamples : int, default 1000

    Returns
    -------
    dict of str to Stage
        ``p1``, ``p2``, ``final``.
    """
    b = outcomes.budget_index(policy.think_budget)
    asked = {"kind": outcomes.kind, "n_options": outcomes.n_options}
    able = np.flatnonzero(outcomes.can_think)
    p2 = policy.calibration.system2(outcomes.p2[:, b], outcomes.finished[:, b], **asked)
    every = np.arange(outcomes.n)
    forecasts = {
        "p1": (policy.alone(outcomes.p1, **asked), every),
        "p2": (p2[able], able),
        "final": (decide(outcomes, policy).p, every),
    }

    def stage(name: str, p: Floats, who: Ints) -> Stage:
        answer, weight, k = outcomes.answer[who], outcomes.weight[who], outcomes.n_options[who]
        given = ~np.isnan(p).any(axis=1)
        p, answer, weight, k, who = p[given], answer[given], weight[given], k[given], who[given]
        top, right, _ = _top(p, answer, weight)
        kinds = {by: binned(p, answer, weight, bins=bins, by=by, level=level) for by in BINNINGS}
        codes = outcomes.group_codes[who]
        ece = {by: _ece_interval(one, top, right, weight, codes, rng, level, resamples) for by, one in kinds.items()}
        sure = confidence(p, policy.confidence, k) if len(p) else np.empty(0)
        return Stage(
            name,
            len(p),
            int((~given).sum()),
            metrics.mean(right, weight),
            metrics.mean(top, weight),
            ece["width"],
            ece["mass"],
            kinds["width"],
            kinds["mass"],
            brier_split(p, answer, weight, k, bins=bins),
            metrics.nll(p, answer, weight),
            metrics.nll_clipped(p, answer),
            metrics.aurc(sure, right, weight),
            metrics.risk_coverage(sure, right, weight),
        )

    return {name: stage(name, *given) for name, given in forecasts.items()}


def _ece_interval(
    bins: Bins,
    top: Floats,
    right: NDArray[np.bool_],
    weight: Floats,
    codes: Ints,
    rng: np.random.Generator,
    level: float,
    resamples: int,
) -> Interval:
    """ECE with a reflected bootstrap interval: each resample adds to it. The bins stay where they are."""
    groups, code = np.unique(codes, return_inverse=True)
    if len(groups) < 2:
        return Interval(bins.ece, math.nan, math.nan)
    size = len(bins.edges) - 1
    place = code * size + _bin_of(top, bins.edges)
    gap = np.bincount(place, weight * (top - right), len(groups) * size).reshape(len(groups), size)
    mass = np.bincount(code, weight)
    found = np.empty(resamples)
    for r in range(resamples):
        times = np.bincount(rng.integers(len(groups), size=len(groups)), minlength=len(groups)).astype(np.float64)
        found[r] = np.abs(times @ gap).sum() / (times @ mass)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    ece = bins.ece
    return Interval(ece, max(0.0, min(2 * ece - float(high), ece)), max(2 * ece - float(low), ece))

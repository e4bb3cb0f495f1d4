"""What a policy would do on real traffic before it is served there: predicted from System 1's answers alone.

Pure. Whether a request thinks follows from its p1 and the policy's own rule; what its thought would cost is taken from
collected questions of the same band of confidence (`calib.envelope`). So the prediction rests on one assumption: at the
same confidence, a thought on the traffic is like one on the questions. Seconds are those of the collected load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.envelope import bin_of, sample_of
from calib.errors import CalibError
from calib.intervals import Interval
from calib.jsonnumbers import finite
from calib.outcomes import ESTIMATED
from calib.policy import Policy, confidence

__all__ = ["PREDICTED", "Band", "Prediction", "predict"]

PREDICTED = ("think_rate", "tokens", "cut", "mean", "p50", "p90", "p99")
"""Rates 0 to 1 (``cut``: thoughts that do not end by themselves, of all requests), tokens a request, seconds."""

THIN = 20
"""A band of fewer questions than this says little about what thoughts there cost."""

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_WINDOW_S = 60.0  # of the busiest time

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """One band of confidence, from ``low`` to below ``high``: its share of the traffic and of the questions.

    ``n`` counts the questions; ``borrowed`` says that none of them has a thought, so that those of the nearest band
    that has some stand in.
    """

    low: float
    high: float
    traffic: float
    collected: float
    n: int
    thinks: float
    borrowed: bool


@dataclass(frozen=True)
class Prediction:
    """What a policy would do on the traffic.

    Attributes
    ----------
    policy : Policy
    n : int
        Requests.
    values : dict of str to Interval
        Each of `PREDICTED`; NaN where no seconds are known.
    rate, peak : float
        Requests a second over the whole log and in its busiest minute; NaN without times.
    tokens_per_second, tokens_per_second_peak : Interval
        Thinking tokens that the traffic would need. The rate is taken as given, here and below.
    in_flight, in_flight_peak : Interval
        Requests in flight (Little's law), at the seconds of the collected load.
    servers, servers_peak : Interval
        Servers like the one collected on that deliver so many tokens; NaN where its throughput is unknown.
    bands : tuple of Band
    outside : float
        Share of the traffic with a confidence below or above all that was collected.
    thin : float
        Share of the traffic that thinks in bands of fewer than `THIN` questions, or with borrowed thoughts.
    distance : float
        Total variation between both distributions over the bands, 0 to 1.
    left_out : int
        Lines without a usable p1.
    marks : tuple of str
    warnings : tuple of str
    level : float
    """

    policy: Policy
    n: int
    values: Mapping[str, Interval]
    rate: float
    peak: float
    tokens_per_second: Interval
    tokens_per_second_peak: Interval
    in_flight: Interval
    in_flight_peak: Interval
    servers: Interval
    servers_peak: Interval
    bands: tuple[Band, ...]
    outside: float
    thin: float
    distance: float
    left_out: int
    marks: tuple[str, ...]
    warnings: tuple[str, ...]
    level: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not known."""
        plain = {
            name: value.to_dict() if isinstance(value, Interval) else finite(value)
            for name, value in vars(self).items()
        }
        return plain | {
            "policy": self.policy.to_dict(),
            "values": {name: value.to_dict() for name, value in self.values.items()},
            "bands": [dict(vars(band)) for band in self.bands],
            "marks": list(self.marks),
            "warnings": list(self.warnings),
        }


def predict(
    record: Mapping[str, Any],
    policy: Policy,
    rows: Sequence[Mapping[str, Any]],
    *,
    rng: np.random.Generator,
    think_budget: int | None = None,
    rate: float | None = None,
    level: float = 0.95,
    resamples: int = 500,
) -> Prediction:
    """Predict what a policy does on traffic of which System 1's answers are known.

    Parameters
    ----------
    record : mapping
        The key ``envelope`` of a ``policy.json``.
    policy : Policy
        May have another threshold than the record's; mix and pool change answers only.
    rows : sequence of mapping
        Each with ``p1``; ``kind``, ``dataset`` and ``at`` (unix seconds) where known.
    rng : numpy.random.Generator
        Of the bootstrap, which draws requests and, in each band, questions.
    think_budget : int, optional
        Cut the collected thoughts here; their seconds shrink in proportion, and count as estimated.
    rate : float, optional
        Requests a second, instead of those of the log.
    level, resamples
        Of the intervals.

    Raises
    ------
    CalibError
        No usable p1; a budget above the collected one where thoughts were cut.
    """
    if not 0 < level < 1:
        raise CalibError(f"--level must be between 0 and 1, for instance 0.95, got {level}")
    usable = [row for row in rows if _is_distribution(row.get("p1"))]
    if not usable:
        raise CalibError(
            "no line of the log holds a p1 (a list of 2 or more probabilities); write one with calib serve --log, or "
            'give JSONL of the form {"p1": [0.7, 0.3]}'
        )
    shadow = record["shadow"]
    sure, thinks = _decided(policy, usable, frozenset(record["cannot_think"]))
    edges = np.asarray(shadow["edges"], dtype=np.float64)
    at = bin_of(edges, sure)
    budgets = [policy.think_budget, *(route.think_budget or math.inf for route in policy.routes.values())]
    thoughts = [_Thoughts.read(band, think_budget, min(budgets)) for band in shadow["bands"]]
    counts = np.zeros((2, len(thoughts)))
    np.add.at(counts, (thinks.astype(int), at), 1.0)
    lender = _lenders(thoughts)
    cells = _Cells(thoughts, lender, counts)
    values = cells.intervals(rng, level, resamples)

    tokens, seconds = values["tokens"], values["mean"]
    mean_rate, peak = _rates(usable, rate)
    supply = record["load"]["tokens_per_second"] or math.nan
    ends = [-math.inf, *edges.tolist(), math.inf]
    borrowed = [counts[1, b] > 0 and lender[b] != b for b in range(len(thoughts))]
    bands = tuple(
        Band(
            low=max(ends[b], 0.0),
            high=min(ends[b + 1], 1.0),
            traffic=float(counts[:, b].sum() / counts.sum()),
            collected=float(shadow["bands"][b]["share"]),
            n=int(shadow["bands"][b]["n"]),
            thinks=float(counts[1, b] / counts[:, b].sum()) if counts[:, b].any() else 0.0,
            borrowed=bool(borrowed[b]),
        )
        for b in range(len(thoughts))
    )
    weak = [borrowed[b] or bands[b].n < THIN for b in range(len(bands))]
    found = Prediction(
        policy=policy,
        n=len(usable),
        values=values,
        rate=mean_rate,
        peak=peak,
        tokens_per_second=_times(tokens, mean_rate),
        tokens_per_second_peak=_times(tokens, peak),
        in_flight=_times(seconds, mean_rate),
        in_flight_peak=_times(seconds, peak),
        servers=_times(tokens, mean_rate / supply),
        servers_peak=_times(tokens, peak / supply),
        bands=bands,
        outside=float(((sure < shadow["low"]) | (sure > shadow["high"])).mean()),
        thin=float(counts[1, weak].sum() / counts.sum()),
        distance=sum(abs(band.traffic - band.collected) for band in bands) / 2,
        left_out=len(rows) - len(usable),
        marks=tuple(sorted({*record["marks"], *[ESTIMATED] * (think_budget is not None)})),
        warnings=(),
        level=level,
    )
    return replace(found, warnings=_warnings(found, record))


def _times(interval: Interval, factor: float) -> Interval:
    return Interval(*(factor * end for end in interval))


def _is_distribution(p1: Any) -> bool:
    """Whether it can be an answer of System 1; a server's rounding is forgiven."""
    if not isinstance(p1, (list, tuple)) or len(p1) < 2:
        return False
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x <= 1 for x in p1):
        return False
    return abs(sum(p1) - 1) < 0.01


def _decided(
    policy: Policy, rows: Sequence[Mapping[str, Any]], cannot: frozenset[str]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Confidence of each request as the policy sees it, and whether it thinks: the rule of `calib.policy`."""
    sizes = np.array([len(row["p1"]) for row in rows])
    p1 = np.zeros((len(rows), int(sizes.max())))
    for i, row in enumerate(rows):
        p1[i, : sizes[i]] = row["p1"]
    kinds = np.array([str(row.get("kind") or "choice") for row in rows], dtype=object)
    sure = confidence(policy.alone(p1, kind=kinds, n_options=sizes), policy.confidence, sizes)
    threshold = np.full(len(rows), policy.threshold)
    if policy.routes:
        carried = [(row.get("dataset") or None, kinds[i], int(sizes[i])) for i, row in enumerate(rows)]
        own = {
            features: policy.routed(dataset=features[0], kind=features[1], n_options=features[2]).threshold
            for features in set(carried)
        }
        threshold = np.array([own[features] for features in carried])
    can = ~np.isin(kinds.astype(str), sorted(cannot))
    return sure, np.asarray((sure < threshold) & can)


def _rates(rows: Sequence[Mapping[str, Any]], rate: float | None) -> tuple[float, float]:
    """Requests a second: over the whole log, and in the busiest minute of it."""
    if rate is not None:
        return rate, rate
    times = np.sort([float(row["at"]) for row in rows if isinstance(row.get("at"), (int, float))])
    if len(times) < 2 or times[-1] <= times[0]:
        return math.nan, math.nan
    mean = (len(times) - 1) / float(times[-1] - times[0])
    if times[-1] - times[0] < _WINDOW_S:
        return mean, mean
    inside = np.searchsorted(times, times + _WINDOW_S, side="left") - np.arange(len(times))
    return mean, float(inside.max()) / _WINDOW_S


def _warnings(found: Prediction, record: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the prediction stands on little."""
    said = []
    if found.outside >= 0.005:
        said.append(
            f"{100 * found.outside:.1f} % of the requests have a confidence outside of all that was collected "
            f"({record['shadow']['low']:.3g} to {record['shadow']['high']:.3g}): the nearest band stands in for them"
        )
    if found.thin >= 0.005:
        said.append(
            f"{100 * found.thin:.1f} % of the requests would think where fewer than {THIN} questions were collected: "
            "collect more questions of these confidences before you trust tokens and seconds"
        )
    if math.isnan(found.values["p90"].value):
        said.append("seconds of the collected thoughts are not known: tokens only (calib collect measures them)")
    if math.isnan(found.rate):
        said.append("the log holds no times of arrival: give --rate 2/s for tokens/s and requests in flight")
    if found.left_out:
        said.append(f"{found.left_out} lines without a usable p1 were left out")
    return tuple(said)


# --- thoughts by band -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Thoughts:
    """Kept questions of one band, arrays of shape (V,); NaN where unknown."""

    tokens: Floats
    t1: Floats
    t2: Floats
    cut: Floats

    @classmethod
    def read(cls, band: Mapping[str, Any], think_budget: int | None, known: float) -> _Thoughts:
        """The packed sample, its thoughts cut at another budget; up to the one ``known`` nothing is missing.

        What a deadline closed, or the context, ended before that and would end there again.
        """
        tokens, t1, t2 = (sample_of(band[name]) for name in ("tokens", "t1", "t2"))
        cut = np.array([mark == "0" for mark in band["finished"]], dtype=np.float64)
        if think_budget is None:
            return cls(tokens, t1, t2, cut)
        if think_budget > known and ((cut > 0) & (tokens < think_budget)).any():
            most = float(np.nanmax(np.where(cut > 0, tokens, np.nan)))
            raise CalibError(
                f"--think-budget {think_budget}: thoughts were cut at {most:.0f} tokens when they were collected, so "
                f"longer ones are not known; give at most that, or collect with --budgets {think_budget}"
            )
        kept = np.minimum(tokens, think_budget)
        share = np.divide(kept, tokens, out=np.ones_like(kept), where=tokens > 0)
        return cls(kept, t1, t2 * share, np.where(tokens > think_budget, 1.0, cut))

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which of the questions have a thought."""
        return ~np.isnan(self.tokens)


def _lenders(thoughts: Sequence[_Thoughts]) -> list[int]:
    """For each band the nearest one with a thought in it, itself where it has one; -1 where none has."""
    having = [b for b, band in enumerate(thoughts) if band.known.any()]
    return [min(having, key=lambda h: abs(h - b)) if having else -1 for b in range(len(thoughts))]


class _Cells:
    """The traffic as a weighted sample: each kept question stands for a part of the requests of its band.

    A question appears twice, without its thought for the requests of its band that do not think, and with it.
    """

    def __init__(self, thoughts: Sequence[_Thoughts], lender: Sequence[int], counts: Floats) -> None:
        self.counts = counts
        columns: list[tuple[int, int, NDArray[np.intp], Floats, Floats, Floats]] = []
        self._sizes = [len(band.t1) for band in thoughts]
        for b in range(len(thoughts)):
            source = b if len(thoughts[b].t1) else lender[b]
            if counts[0, b] and source >= 0:
                own = thoughts[source]
                rows, nothing = np.arange(len(own.t1)), np.zeros(len(own.t1))
                columns.append((b, source, rows, own.t1, nothing, nothing))
            if counts[1, b] and lender[b] >= 0:
                lent = thoughts[lender[b]]
                rows = np.flatnonzero(lent.known)
                columns.append(
                    (b + len(thoughts), lender[b], rows, (lent.t1 + lent.t2)[rows], lent.tokens[rows], lent.cut[rows])
                )
        if not columns:
            raise CalibError("the envelope holds no collected question: tune and export again (calib optimize)")
        self._cell = np.concatenate([np.full(len(rows), cell) for cell, _, rows, *_ in columns])
        self._source = [(source, rows) for _, source, rows, *_ in columns]
        self._latency, self._tokens, self._cut = (np.concatenate([c[k] for c in columns]) for k in (3, 4, 5))
        self._order = np.argsort(self._latency, kind="stable")

    def intervals(self, rng: np.random.Generator, level: float, resamples: int) -> dict[str, Interval]:
        """Each of `PREDICTED` with its bootstrap interval over requests and questions."""
        n = float(self.counts.sum())
        value = self._metrics(self.counts.ravel()[None], [np.ones((1, size)) for size in self._sizes])
        drawn = rng.multinomial(round(n), self.counts.ravel() / n, size=resamples).astype(np.float64)
        picked = [
            rng.multinomial(size, np.full(size, 1 / size), size=resamples).astype(np.float64)
            if size
            else np.ones((resamples, 0))
            for size in self._sizes
        ]
        spread = self._metrics(drawn, picked)
        tails = (1 - level) / 2, (1 + level) / 2
        found = {}
        for name in PREDICTED:
            known = spread[name][~np.isnan(spread[name])]
            low, high = np.quantile(known, tails, method="inverted_cdf") if known.size else (math.nan, math.nan)
            found[name] = Interval(float(value[name][0]), float(low), float(high))
        return found

    def _metrics(self, counts: Floats, picked: Sequence[Floats]) -> dict[str, Floats]:
        """Metrics of R resamples: requests in each cell (R, 2 * bands), and how often each question was drawn."""
        often = np.concatenate([picked[source][:, rows] for source, rows in self._source], axis=1)
        cells = counts.shape[1]
        inside = np.zeros((len(self._cell), cells))
        inside[np.arange(len(self._cell)), self._cell] = 1.0
        total = often @ inside
        share = np.divide(counts, total, out=np.zeros_like(total), where=total > 0)
        weight = often * share[:, self._cell]
        whole = weight.sum(axis=1, keepdims=True)  # 0 where a resample holds none of the few questions with a thought
        weight = np.divide(weight, whole, out=np.full_like(weight, np.nan), where=whole > 0)
        half = cells // 2
        found = {
            "think_rate": counts[:, half:].sum(axis=1) / counts.sum(axis=1),
            "tokens": weight @ self._tokens,
            "cut": weight @ self._cut,
        }
        if np.isnan(self._latency).any():
            return found | {name: np.full(len(counts), np.nan) for name in ("mean", *_PERCENTILES)}
        found["mean"] = weight @ self._latency
        ordered = self._latency[self._order]
        upto = np.cumsum(weight[:, self._order], axis=1)
        for name, q in _PERCENTILES.items():
            reached = upto >= q * upto[:, -1:] * (1 - 1e-12)
            found[name] = np.where(reached[:, -1], ordered[reached.argmax(axis=1)], np.nan)
        return found

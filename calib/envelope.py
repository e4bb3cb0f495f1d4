"""What a tuned policy promises that can be seen without labels: the record that ``calib watch`` holds traffic against.

Pure: outcomes in, JSON-able values out, a few 10 kB at most. Leaves to others: the tests (`calib.watch`), predictions
for other traffic (`calib.shadow`), where the record lies (``policy.json``, `calib.export`).

Which questions: those held out, where there are some. The search chose threshold, budget and arm by what it saw on the
tune questions, so their shares flatter; on the held-out ones only the few candidates of the verdict had a say.
Without held-out questions the record is about the tune questions. In both cases ``chosen_among`` says how many policies
the choice was made among, and each interval of a share that depends on the policy is taken at its level divided by that
number: it then holds whichever was chosen. On the tune questions that is one for each threshold, at each setting of the
other knobs. Confidences, and what a thought costs at a confidence, depend on no knob that is searched: they are taken
from all collected questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib import metrics
from calib.certify import marks_of
from calib.demand import throughput
from calib.errors import CalibError
from calib.jsonnumbers import finite, is_number
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, Decisions, Policy, candidate_thresholds, confidence, decide, evaluate_decisions
from calib.risk import share_limit, split_selector, violation_share
from calib.target import Target

__all__ = ["ENVELOPE_SCHEMA", "SAMPLE", "bin_of", "envelope", "read_envelope", "sample_of"]

ENVELOPE_SCHEMA = 1

SAMPLE = 64
"""Most questions of a confidence band whose tokens and seconds are kept."""

_BANDS = 12  # bands of confidence with about as many questions each, before they are split at the thresholds
_CUTS = tuple(k / 10 for k in range(1, 10))  # shares at which distributions are compared
_DATASETS = 40  # most datasets that are told apart
_MEANS = ("tokens", "mean")
_SEEN = ("p50", "p90", "p95", "p99", "think_rate", *_MEANS)  # metrics that need no label

Floats = NDArray[np.float64]


def envelope(
    outcomes: Outcomes,
    policy: Policy,
    targets: Sequence[Target] = (),
    *,
    held_out: bool = False,
    candidates: int = 1,
    sample: Outcomes | None = None,
) -> dict[str, Any]:
    """What these questions promise of the policy's traffic, as plain values for JSON.

    Parameters
    ----------
    outcomes : Outcomes
        The questions that the promises are about.
    policy : Policy
    targets : sequence of Target
        Those on latency, think rate and tokens become limits on shares or means; the others are named as unseen.
    held_out : bool, default False
        Whether the policy was found on other questions.
    candidates : int, default 1
        What the questions chose among: policies where they are held out, else settings of the knobs but the threshold.
    sample : Outcomes, optional
        All collected questions, for what no search chose by: confidences, and what a thought costs at a confidence.
        The same ones when left out.

    Returns
    -------
    dict
        ``think``, ``cut`` (thoughts that did not end by themselves, among those whose answer counts), ``confidence``,
        ``thought`` (their tokens) with share and effective number of questions; ``limits`` for each target; ``shadow``,
        the joint sample of tokens and seconds by confidence. A distribution is the share below each of some cuts, the
        first and last of which no question lies beyond.
    """
    d = decide(outcomes, policy)
    weight = outcomes.weight
    score = evaluate_decisions(outcomes, d)
    failed = np.isnan(d.p).any(axis=1)
    thought = d.thinks & ~failed & ~d.degraded
    whole = outcomes if sample is None else sample
    sure = _confidence(whole, policy)
    arm = outcomes.arm_index(policy.arm)
    seen, unseen = _limits(outcomes, d, targets)
    return {
        "schema": ENVELOPE_SCHEMA,
        "questions": "held out" if held_out else "tuned on",
        "n": outcomes.n,
        "chosen_among": candidates if held_out else candidates * (outcomes.n + 1),
        "marks": list(marks_of(policy, outcomes)),
        "think": {"share": score.think_rate, "n": _effective(outcomes)},
        "cut": _share(~_finished(outcomes, policy, d), thought, outcomes),
        "closed": metrics.mean(d.closed, weight),
        "degraded": metrics.mean(d.degraded | (d.thinks & failed), weight),
        "confidence": {"definition": policy.confidence} | _distribution(sure, np.ones(whole.n, dtype=bool), whole),
        "thought": _distribution(d.tokens, thought, outcomes),
        "limits": seen,
        "unseen": unseen,
        "expected": {name: finite(getattr(score, name)) for name in ("tokens", "mean", "p50", "p90", "p99")},
        "speed": _speed(outcomes, d, thought, arm),
        "load": {
            "arm": policy.arm,
            "concurrency": int(outcomes.concurrency[arm]),
            "tokens_per_second": throughput(whole, policy.arm),
        },
        "datasets": _datasets(outcomes, d),
        "cannot_think": sorted({k for k in outcomes.kind.tolist() if not outcomes.can_think[outcomes.kind == k].any()}),
        "shadow": _shadow(whole, policy),
    }


def _confidence(outcomes: Outcomes, policy: Policy) -> Floats:
    """What the threshold is compared with, shape (N,)."""
    alone = policy.alone(outcomes.p1, kind=outcomes.kind, n_options=outcomes.n_options)
    return confidence(alone, policy.confidence, outcomes.n_options)


def _finished(outcomes: Outcomes, policy: Policy, d: Decisions) -> NDArray[np.bool_]:
    """Whether the thought ends by itself within its route's budget and the deadline, shape (N,)."""
    found = np.ones(outcomes.n, dtype=bool)
    for part, mask in policy.parts(outcomes):
        found[mask] = outcomes.finished[mask, outcomes.budget_index(part.think_budget)]
    return found & ~d.closed


def _effective(outcomes: Outcomes, where: NDArray[np.bool_] | None = None) -> float:
    """Independent questions of equal weight that would say as much: groups count as one draw each (Kish)."""
    w = outcomes.weight if where is None else np.where(where, outcomes.weight, 0.0)
    total = np.bincount(outcomes.group_codes, w)
    return float(total.sum() ** 2 / (total**2).sum()) if total.any() else 0.0


def _share(event: NDArray[np.bool_], where: NDArray[np.bool_], outcomes: Outcomes) -> dict[str, Any]:
    """Share of an event among some of the questions."""
    share = metrics.mean(event[where], outcomes.weight[where])
    return {"share": finite(share), "n": _effective(outcomes, where)}


def _distribution(values: Floats, where: NDArray[np.bool_], outcomes: Outcomes) -> dict[str, Any]:
    """Shares of the values below cuts near the deciles, and the ends of what was seen."""
    x, w = values[where], outcomes.weight[where]
    if not x.size:
        return {"cuts": [], "below": [], "n": 0.0}
    order = np.argsort(x, kind="stable")
    ordered, total = x[order], np.concatenate([[0.0], np.cumsum(w[order])])
    between = _between(ordered)
    inner = total[np.searchsorted(ordered, between, side="left")] / total[-1]
    chosen = sorted({int(np.abs(inner - share).argmin()) for share in _CUTS}) if between.size else []
    cuts = [float(ordered[0]), *between[chosen].tolist(), math.nextafter(float(ordered[-1]), math.inf)]
    return {"cuts": cuts, "below": [0.0, *inner[chosen].tolist(), 1.0], "n": _effective(outcomes, where)}


def _between(values: Floats) -> Floats:
    """Places between neighbouring values, ascending: a value at a place counts as above it."""
    x = np.unique(values)
    middle = x[:-1] + (x[1:] - x[:-1]) / 2
    return np.asarray(np.where(middle > x[:-1], middle, x[1:]))


def _limits(outcomes: Outcomes, d: Decisions, targets: Sequence[Target]) -> tuple[list[dict[str, Any]], list[str]]:
    """Targets that traffic shows, each on its questions with the share (or mean) allowed and found; names of others."""
    seen: list[dict[str, Any]] = []
    unseen: list[str] = []
    for target in targets:
        # a mean from below cannot be told from values that are cut at the top, which bets on a mean need
        if target.metric not in _SEEN or (target.metric in _MEANS and not target.upper):
            unseen.append(str(target))
            continue
        parts = list(split_selector(target, outcomes))
        for part, where in parts:
            row = {"target": str(target), "dataset": part.dataset, "of": len(parts)}
            if target.metric in _MEANS:
                values = d.tokens if target.metric == "tokens" else d.latency
                found = metrics.mean(values[where], outcomes.weight[where])
                seen.append(row | {"allowed": target.value, "found": finite(found), "n": len(where)})
            else:
                allowed = share_limit(part, outcomes)
                unknown = part.is_latency and bool(np.isnan(d.latency[where]).any())
                found = math.nan if unknown else violation_share(part, outcomes, d)
                seen.append(row | {"allowed": allowed, "found": finite(found), "n": len(where)})
    return seen, unseen


def _speed(outcomes: Outcomes, d: Decisions, thought: NDArray[np.bool_], arm: int) -> float | None:
    """Thinking tokens a second of the thoughts, the answer read included; None where unknown."""
    seconds = (d.latency - outcomes.t1[arm])[thought].sum()
    return float(d.tokens[thought].sum() / seconds) if seconds > 0 and math.isfinite(seconds) else None


def _datasets(outcomes: Outcomes, d: Decisions) -> dict[str, dict[str, float]]:
    """Share of the questions and think rate of each dataset, the largest first."""
    weight = np.bincount(outcomes.dataset_codes, outcomes.weight)
    thinks = np.bincount(outcomes.dataset_codes, outcomes.weight * d.thinks)
    largest = np.argsort(-weight, kind="stable")[:_DATASETS]
    return {
        outcomes.dataset_names[k]: {"share": float(weight[k] / weight.sum()), "think": float(thinks[k] / weight[k])}
        for k in largest
    }


def bin_of(edges: ArrayLike, sure: ArrayLike) -> NDArray[np.intp]:
    """Number of the band of each confidence: an edge belongs to the band above it, as a threshold does."""
    return np.searchsorted(np.asarray(edges, dtype=np.float64), np.asarray(sure, dtype=np.float64), side="right")


def _shadow(outcomes: Outcomes, policy: Policy) -> dict[str, Any]:
    """Tokens and seconds of some questions of each band of confidence, had each been thought about.

    Numbers as text, parted by blanks: a JSON list with a line for each would be three times as long.
    """
    always = replace(
        policy,
        threshold=ALWAYS,
        routes={
            key: replace(route, threshold=None if route.threshold is None else ALWAYS)
            for key, route in policy.routes.items()
        },
    )
    d = decide(outcomes, always)
    t1 = outcomes.t1[outcomes.arm_index(policy.arm)]
    thought = d.thinks & ~np.isnan(d.p).any(axis=1)
    t2 = np.where(thought, d.latency - t1, np.nan)
    tokens = np.where(thought, d.tokens, np.nan)
    finished = _finished(outcomes, always, d)
    sure = _confidence(outcomes, policy)
    edges = _edges(sure, policy)
    band = bin_of(edges, sure)
    rows = []
    for k in range(len(edges) + 1):
        inside = np.flatnonzero(band == k)
        kept = _spread(inside, np.nan_to_num(t2[inside], nan=math.inf), outcomes)
        rows.append(
            {
                "n": len(inside),
                "share": float(outcomes.weight[inside].sum() / outcomes.weight.sum()),
                "tokens": _packed(tokens[kept]),
                "t1": _packed(t1[kept]),
                "t2": _packed(t2[kept]),
                "finished": "".join("01"[int(one)] for one in finished[kept]),
            }
        )
    return {"n": outcomes.n, "low": float(sure.min()), "high": float(sure.max()), "edges": edges, "bands": rows}


def _edges(sure: Floats, policy: Policy) -> list[float]:
    """Ends of the bands: at each threshold, so that a band thinks as one, and near equal shares of the questions."""
    own = {policy.threshold, *(r.threshold for r in policy.routes.values() if r.threshold is not None)}
    edges = sorted(float(t) for t in own if 0 < t <= 1)
    places, ordered = candidate_thresholds(sure)[1:-1], np.sort(sure)

    def below(at: ArrayLike) -> Floats:
        return np.searchsorted(ordered, at) / len(ordered)

    taken = below(edges)
    for k in range(1, _BANDS if places.size else 0):
        place = float(places[np.abs(below(places) - k / _BANDS).argmin()])
        # no narrow band beside a threshold: too few questions would speak for it
        if place not in edges and (np.abs(below(place) - taken) >= 0.5 / _BANDS).all():
            edges.append(place)
    return sorted(edges)


def _spread(inside: NDArray[np.intp], seconds: Floats, outcomes: Outcomes) -> NDArray[np.intp]:
    """All questions of a band, or as many as are kept: evenly over their seconds, each for an equal part of weight."""
    order = inside[np.argsort(seconds, kind="stable")]
    w = outcomes.weight[order]
    if not order.size or (len(order) <= SAMPLE and (w == w[0]).all()):
        return order
    total = np.cumsum(w)
    at = (np.arange(SAMPLE) + 0.5) / SAMPLE * total[-1]
    return np.asarray(order[np.searchsorted(total, at, side="left")])


def _packed(values: Floats) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def sample_of(text: str) -> Floats:
    """Numbers of a packed text, NaN where unknown; a `ValueError` when it holds anything else."""
    return np.array(text.split(), dtype=np.float64)


# --- reading it back --------------------------------------------------------------------------------------------------

_NUMBER, _PERHAPS = (float,), (float, None)
_DISTRIBUTION: Mapping[str, Any] = {"cuts": [_NUMBER], "below": [_NUMBER], "n": _NUMBER}
_FORM: Mapping[str, Any] = {
    "questions": (str,),
    "n": (int,),
    "chosen_among": (int,),
    "marks": [(str,)],
    "think": {"share": _PERHAPS, "n": _NUMBER},
    "cut": {"share": _PERHAPS, "n": _NUMBER},
    "closed": _NUMBER,
    "degraded": _NUMBER,
    "confidence": _DISTRIBUTION,
    "thought": _DISTRIBUTION,
    "limits": [
        {"target": (str,), "dataset": (str, None), "of": (int,), "allowed": _NUMBER, "found": _PERHAPS, "n": (int,)}
    ],
    "unseen": [(str,)],
    "expected": {"tokens": _PERHAPS, "mean": _PERHAPS, "p50": _PERHAPS, "p90": _PERHAPS, "p99": _PERHAPS},
    "speed": _PERHAPS,
    "load": {"tokens_per_second": _PERHAPS},
    "datasets": {"*": {"share": _NUMBER, "think": _NUMBER}},
    "cannot_think": [(str,)],
    "shadow": {
        "low": _NUMBER,
        "high": _NUMBER,
        "edges": [_NUMBER],
        "bands": [
            {"n": (int,), "share": _NUMBER, "tokens": (str,), "t1": (str,), "t2": (str,), "finished": (str,)},
        ],
    },
}
"""What readers rely on: a tuple of types, None for null, in lists and under names; ``*`` stands for any name."""


def read_envelope(record: Any) -> Mapping[str, Any]:
    """The record as `envelope` wrote it, whoever had the file in hands since.

    Raises
    ------
    CalibError
        Another schema, or a part that is missing or of another form.
    """
    schema = record.get("schema") if isinstance(record, Mapping) else None
    if schema != ENVELOPE_SCHEMA:
        raise CalibError(
            f"envelope of schema {schema!r}, this calib reads {ENVELOPE_SCHEMA}: tune and export again (calib "
            "optimize, calib export), or install the calib that wrote it"
        )
    misfit = _misfit(record, _FORM, "envelope") or _odd_sizes(record)
    if misfit is not None:
        raise CalibError(f"{misfit} is not as calib export writes it: export the policy again")
    return dict(record)


def _misfit(value: Any, form: Any, at: str) -> str | None:
    """Where a value is not of a form; None where it is."""
    if isinstance(form, tuple):
        fits = any(_is_a(value, kind) for kind in form)
        return None if fits else at
    if isinstance(form, list):
        if not isinstance(value, list):
            return at
        parts = [(one, form[0], f"{at}[{i}]") for i, one in enumerate(value)]
    else:
        if not isinstance(value, Mapping) or not (form.keys() - {"*"}) <= value.keys():
            return at
        names = value if "*" in form else form
        parts = [(value[name], form.get(name, form.get("*")), f"{at}.{name}") for name in names]
    return next((found for part in parts if (found := _misfit(*part)) is not None), None)


def _is_a(value: Any, kind: type | None) -> bool:
    if kind is None or value is None:
        return value is kind
    if kind is float:
        return is_number(value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _odd_sizes(record: Mapping[str, Any]) -> str | None:
    """A part whose lists do not belong together, or which counts nothing."""
    for name in ("confidence", "thought"):
        if len(record[name]["cuts"]) != len(record[name]["below"]):
            return f"envelope.{name}"
    if record["chosen_among"] < 1 or any(row["of"] < 1 for row in record["limits"]):
        return "envelope.chosen_among" if record["chosen_among"] < 1 else "envelope.limits"
    shadow = record["shadow"]
    if len(shadow["bands"]) != len(shadow["edges"]) + 1:
        return "envelope.shadow.bands"
    for i, band in enumerate(shadow["bands"]):
        try:
            sizes = {len(band["finished"]), *(len(sample_of(band[name])) for name in ("tokens", "t1", "t2"))}
        except ValueError:
            sizes = set()
        if len(sizes) != 1:
            return f"envelope.shadow.bands[{i}]"
    return None

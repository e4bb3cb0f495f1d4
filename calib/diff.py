"""Two policies side by side: knobs, verdict, predicted metrics, and what the difference means in words.

Pure. Leaves to others: where a policy comes from (`calib.saved`), how it is printed (`calib.show`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from calib.policy import ALWAYS, NEVER, Policy

__all__ = ["METRICS", "Change", "Difference", "MetricChange", "changes", "difference"]

METRICS = ("accuracy", "think_rate", "tokens", "mean", "p50", "p90", "p95", "p99", "ece", "brier")
"""Predicted metrics that are compared."""

_ALWAYS_SHOWN = ("threshold", "mix", "think_budget", "arm")
_KNOBS = (*_ALWAYS_SHOWN, "confidence", "routes", "temperatures", "pool", "deadline", "on_deadline")


@dataclass(frozen=True)
class Change:
    """One line of a diff; None where a side has no policy."""

    what: str
    now: str | None
    chosen: str | None

    @property
    def differs(self) -> bool:
        """Whether writing would change it."""
        return self.now != self.chosen


@dataclass(frozen=True)
class MetricChange:
    """A predicted metric of both sides; None where it is not known.

    Attributes
    ----------
    metric : str
    now, chosen : float or None
    interval : tuple of float or None
        Of the chosen side, where it was measured on held-out questions.
    """

    metric: str
    now: float | None
    chosen: float | None
    interval: tuple[float, float] | None = None

    @property
    def difference(self) -> float | None:
        """Chosen - now."""
        return None if self.now is None or self.chosen is None else self.chosen - self.now


@dataclass(frozen=True)
class Difference:
    """What distinguishes two policies.

    Attributes
    ----------
    changes : tuple of Change
        Knobs, verdict, limits.
    metrics : tuple of MetricChange
    on : {"test", "tune"} or None
        Which questions the metrics are of; None when both sides hold none in common.
    meaning : tuple of str
        What it means, in sentences.
    notes : tuple of str
        Why the numbers of both may not be comparable.
    """

    changes: tuple[Change, ...]
    metrics: tuple[MetricChange, ...]
    on: str | None
    meaning: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether both are served in the same way."""
        return not any(change.differs for change in self.changes if change.what in _KNOBS)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "same": self.same,
            "changes": [asdict(change) | {"differs": change.differs} for change in self.changes],
            "metrics": [asdict(metric) | {"difference": metric.difference} for metric in self.metrics],
            "on": self.on,
            "meaning": list(self.meaning),
            "notes": list(self.notes),
        }


def changes(now: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> list[Change]:
    """What writing a document would change in each knob, and in what is known about it.

    Parameters
    ----------
    now : mapping or None
        ``policy.json`` as it is.
    chosen : mapping
        Document of a tuned or appraised policy.
    """
    before, after = _mapping((now or {}).get("policy")), _mapping(chosen.get("policy"))
    usual = Policy().to_dict()
    rows = [
        Change(knob, _shown(before.get(knob)), _shown(after.get(knob)))
        for knob in _KNOBS
        if knob in _ALWAYS_SHOWN or before.get(knob, usual.get(knob)) != after.get(knob, usual.get(knob))
    ]
    rows.append(Change("verdict", _shown((now or {}).get("verdict")), _shown(chosen.get("verdict"))))
    rows.append(Change("limits", _limits(now), _limits(chosen)))
    return rows


def difference(now: Mapping[str, Any], chosen: Mapping[str, Any]) -> Difference:
    """Compare two documents, each what ``policy.json`` or ``calib optimize`` says."""
    notes = list(_notes(now, chosen))
    on = next((part for part in ("test", "tune") if _mapping(now.get(part)) and _mapping(chosen.get(part))), None)
    metrics = () if on is None else tuple(_metrics(_mapping(now[on]), _mapping(chosen[on])))
    if on is None:
        notes.append("the two hold no metrics of the same kind of questions")
    elif _of(now, "questions") != _of(chosen, "questions"):
        notes.append("the metrics are of different question sets: their difference is not the policies' alone")
    return Difference(tuple(changes(now, chosen)), metrics, on, tuple(_meaning(now, chosen)), tuple(notes))


# --- numbers ----------------------------------------------------------------------------------------------------------


def _metrics(now: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[MetricChange]:
    for metric in METRICS:
        if metric in now or metric in chosen:
            yield MetricChange(
                metric, _value(now.get(metric)), _value(chosen.get(metric)), _interval(chosen.get(metric))
            )


def _value(told: Any) -> float | None:
    """A plain number, or one with its interval."""
    value = told.get("value") if isinstance(told, Mapping) else told
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _interval(told: Any) -> tuple[float, float] | None:
    bounds = told.get("interval") if isinstance(told, Mapping) else None
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        return None
    low, high = map(_value, bounds)
    return None if low is None or high is None else (low, high)


# --- words ------------------------------------------------------------------------------------------------------------


def _notes(now: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[str]:
    models = _of(now, "model"), _of(chosen, "model")
    if None not in models and models[0] != models[1]:
        yield (
            f"two different models: {now.get('model')} ({str(models[0])[:8]}) and {chosen.get('model')} "
            f"({str(models[1])[:8]}); a policy of one means nothing for the other"
        )
    marks = (set(_texts(now.get("marks"))), set(_texts(chosen.get("marks"))))
    for mark in sorted(marks[0] ^ marks[1]):
        yield f"only the {'first' if mark in marks[0] else 'second'} is {mark}: the numbers are not of one kind"


def _meaning(now: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[str]:
    before, after = _mapping(now.get("policy")), _mapping(chosen.get("policy"))
    comparable = before.get("confidence", "max") == after.get("confidence", "max") and before.get(
        "temperatures"
    ) == after.get("temperatures")
    yield from _threshold(_value(before.get("threshold")), _value(after.get("threshold")), comparable=comparable)
    yield from _amount(
        (before, after),
        "mix",
        "System 2 weighs more in the answer after thinking",
        "System 1 weighs more in the answer after thinking",
    )
    yield from _amount(
        (before, after),
        "think_budget",
        "thoughts may be longer: fewer are cut, and the slowest answers come later",
        "thoughts are cut earlier: the slowest answers come sooner, and more of them rest on a cut thought",
    )
    if before.get("arm") != after.get("arm"):
        yield (
            f"served as {after.get('arm')} instead of {before.get('arm')}: the server has to be started that way; "
            "latency changes, the answers should not"
        )
    if before.get("pool", "linear") != after.get("pool", "linear"):
        yield "the two distributions are combined in another way (pool)"
    yield from _temperatures(before.get("temperatures"), after.get("temperatures"))
    yield from _deadline(before, after)
    yield from _routes(_mapping(before.get("routes")), _mapping(after.get("routes")))
    yield from _verdict(now.get("verdict"), chosen.get("verdict"))
    if before == after:
        yield "the policy is the same: what is served does not change"


def _threshold(before: float | None, after: float | None, *, comparable: bool) -> Iterator[str]:
    if before is None or after is None or (before == after and comparable):
        return
    if not comparable:
        yield "the threshold means another confidence: its two values cannot be compared"
    elif after == NEVER:
        yield "no question is thought about any more"
    elif after >= ALWAYS:
        yield "every question is thought about"
    elif after > before:
        yield f"more questions are thought about: below a confidence of {after:.4g}, before {before:.4g}"
    else:
        yield f"fewer questions are thought about: below a confidence of {after:.4g}, before {before:.4g}"


def _amount(both: tuple[Mapping[str, Any], Mapping[str, Any]], knob: str, more: str, less: str) -> Iterator[str]:
    before, after = (_value(one.get(knob)) for one in both)
    if before is not None and after is not None and before != after:
        yield more if after > before else less


def _temperatures(before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if not before:
        yield "probabilities are calibrated now: the threshold means the calibrated confidence"
    elif not after:
        yield "probabilities are no longer calibrated: the threshold means the confidence as the server gives it"
    else:
        yield "probabilities are calibrated by other temperatures"


def _deadline(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = _value(before.get("deadline")), _value(after.get("deadline"))
    if old != new:
        if new is None:
            yield f"no deadline any more, before {old:g} s: a slow thought is limited by its tokens alone"
        elif old is None:
            yield f"a deadline of {new:g} s: a thought that would end later is closed"
        else:
            yield f"the deadline is {'later' if new > old else 'earlier'}: {new:g} s, before {old:g} s"
    if None not in (old, new) and before.get("on_deadline") != after.get("on_deadline"):
        who = "System 1 answers" if after.get("on_deadline") == "system1" else "the cut thought is read"
        yield f"when the deadline closes a thought, {who} now"


def _routes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    new, gone = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
    other = sorted(key for key in before.keys() & after.keys() if before[key] != after[key])
    for keys, what in ((new, "new routes"), (gone, "routes left out"), (other, "changed routes")):
        if keys:
            yield f"{what}: {', '.join(keys)}"


_RANK = {"certified": 2, "met": 1, "not_met": 0}


def _verdict(before: Any, after: Any) -> Iterator[str]:
    old, new = (_RANK.get(verdict) if isinstance(verdict, str) else None for verdict in (before, after))
    if old is not None and new is not None and old != new:
        sense = "surer" if new > old else "less sure"
        yield f"the promise is {sense}: {after}, before {before}"


def _of(document: Mapping[str, Any], fingerprint: str) -> Any:
    return _mapping(document.get("fingerprints")).get(fingerprint)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, (list, tuple)) else []


def _limits(document: Mapping[str, Any] | None) -> str | None:
    if document is None:
        return None
    told = document.get("targets")
    targets = [target for target in told if isinstance(target, Mapping)] if isinstance(told, (list, tuple)) else []
    return ", ".join(str(target.get("target")) for target in targets) or "none"


def _shown(value: Any) -> str | None:
    if value is None or value == {}:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

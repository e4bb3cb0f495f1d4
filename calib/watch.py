"""Whether a served policy keeps what it promised at tuning, told from the decision log alone: without labels.

Pure: batches of decisions in, a report out. Leaves to others: reading the log (`calib.logread`), what was promised
(`calib.envelope`), each promise and its evidence (`calib.promises`, `calib.anytime`).

Each promise gets a part of 1 - level: all of them together raise one false alarm, ever, with at most that chance. A
limit of a target spends its part on the traffic. What is promised by a share of questions (think rate, cut thoughts,
confidences, lengths of thoughts) is itself only known from those questions: half of the part pays for an interval of
the promised share, half for evidence that the traffic is outside of it. "At risk" is evidence that would be enough at
four times that chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib import metrics
from calib.errors import CalibError
from calib.jsonnumbers import finite
from calib.policy import Policy
from calib.promises import STATES, Batch, Finding, State, percent, promises

__all__ = ["Report", "Watch"]

_DATASETS = 50  # most datasets of the traffic that are told apart


@dataclass(frozen=True)
class Report:
    """What the log says of all promises.

    Attributes
    ----------
    state : {"ok", "at_risk", "broken"}
        The worst of the findings.
    findings : tuple of Finding
    n : int
        Requests under the policy.
    first, last : float
        Unix seconds; NaN where unknown.
    left_out : dict of str to int
        Decisions that the promises are not about, by reason.
    shown : dict of str to float
        What is shown beside the promises: shares of closed and of degraded answers, tokens/s of thoughts, percentiles,
        each with what was promised under ``..._promised``.
    datasets : dict of str to dict
        Share of the traffic and think rate by dataset, with those of the questions.
    level : float
    advice : tuple of str
        What to do.
    about : str
        What was compared, and how the chance of a false alarm is shared.
    marks : tuple of str
        Of what was promised: `estimated`, `simulated`.
    """

    state: State
    findings: tuple[Finding, ...]
    n: int
    first: float
    last: float
    left_out: Mapping[str, int]
    shown: Mapping[str, float]
    datasets: Mapping[str, Mapping[str, float | None]]
    level: float
    advice: tuple[str, ...]
    about: str
    marks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not finite."""
        return {
            "state": self.state,
            "requests": self.n,
            "first": finite(self.first),
            "last": finite(self.last),
            "left_out": dict(self.left_out),
            "level": self.level,
            "promises": [finding.to_dict() for finding in self.findings],
            "shown": {name: finite(value) for name, value in self.shown.items()},
            "datasets": {name: dict(row) for name, row in self.datasets.items()},
            "advice": list(self.advice),
            "about": self.about,
            "marks": list(self.marks),
        }


class Watch:
    """Holds the decisions of a log, batch after batch, against what was promised at tuning.

    Parameters
    ----------
    record : mapping
        The key ``envelope`` of a ``policy.json`` (`calib.envelope.read_envelope`).
    policy : Policy
    level : float, default 0.95
        1 - level is the chance that any of the promises ever counts as broken while all hold.
    """

    def __init__(self, record: Mapping[str, Any], policy: Policy, *, level: float = 0.95) -> None:
        if not 0 < level < 1:
            raise CalibError(f"--level must be between 0 and 1, for instance 0.95, got {level}")
        self.record, self.policy, self.level = record, policy, level
        self.n = 0
        self.first = self.last = math.nan
        self.left_out: Counter[str] = Counter()
        self._promises = promises(record, policy, 1 - level)
        self._tally: Counter[str] = Counter()
        self._tokens = np.zeros(2)  # their sum, and requests whose tokens are known
        self._thought = np.zeros(2)  # tokens and seconds of thoughts whose seconds are known
        self._seconds: list[NDArray[np.float64]] = []
        self._traffic: dict[str, list[int]] = {}

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take decisions of a log, in its order.

        Requests that ask for a thinking mode of their own are left out and counted: the policy did not choose for them.
        """
        if not rows:
            return
        batch = Batch.of(rows, self.policy)
        cannot = set(self.record["cannot_think"])
        own = np.array(
            [
                mode != "auto" and not (mode == "off" and kind in cannot)
                for mode, kind in zip(batch.mode, batch.kind, strict=True)
            ]
        )
        for mode in (batch.mode[int(i)] for i in np.flatnonzero(own)):
            self.left_out[f"asked for thinking {mode!r}"] += 1
        batch = batch.take(~own)
        if not len(batch.at):
            return
        for promise in self._promises:
            promise.update(batch)
        self._count(batch)

    def _count(self, batch: Batch) -> None:
        times = batch.at[~np.isnan(batch.at)]
        if times.size:
            self.first = float(np.fmin(self.first, times.min()))
            self.last = float(np.fmax(self.last, times.max()))
        self.n += len(batch.at)
        known = np.isfinite(batch.tokens)
        self._tokens += batch.tokens[known].sum(), known.sum()
        thought = batch.think & ~batch.degraded
        timed = thought & np.isfinite(batch.t2) & np.isfinite(batch.tokens)
        self._thought += batch.tokens[timed].sum(), batch.t2[timed].sum()
        self._seconds.append(batch.seconds)
        for name, mask in (("closed", batch.closed), ("degraded", batch.degraded)):
            self._tally[name] += int(mask.sum())
        for dataset, think in zip(batch.dataset, batch.think.tolist(), strict=True):
            row = self._traffic.setdefault(dataset, [0, 0])
            row[0] += 1
            row[1] += think

    def report(self) -> Report:
        """What is known now."""
        found = [promise.finding() for promise in self._promises]
        doubtful = [f for f in found if f.kind in ("confidence", "thought", "cut") and f.state != "ok"]
        found += [self._unseen(name, doubtful) for name in self.record["unseen"]]
        state: State = max((f.state for f in found), key=STATES.index, default="ok")
        questions = f"{self.record['n']:,} questions {self.record['questions']}"
        about = (
            f"{len(self._promises)} promises, held against {questions}; the chance of ever calling one broken while "
            f"all hold is at most {percent(1 - self.level)}, in equal parts; half of a part goes into how well the "
            "questions know what they promise"
        )
        if self.record["questions"] == "tuned on":
            about += "; the policy was found on these questions, so their intervals hold for every threshold at once"
        advice = _advice(found, self._shown())
        return Report(
            state=state,
            findings=tuple(found),
            n=self.n,
            first=self.first,
            last=self.last,
            left_out=dict(self.left_out),
            shown=self._shown(),
            datasets=self._datasets(),
            level=self.level,
            advice=advice,
            about=about,
            marks=tuple(self.record["marks"]),
        )

    def _unseen(self, name: str, doubtful: Sequence[Finding]) -> Finding:
        if not doubtful:
            return Finding(
                name, "unseen", "ok", self.n, f"{name}: cannot be seen without labels; nothing speaks against it"
            )
        why = ", ".join(sorted({f.promise for f in doubtful}))
        text = (
            f"{name}: cannot be seen without labels, and the traffic is not like the questions it was found on ({why})"
        )
        return Finding(name, "unseen", "at_risk", self.n, text)

    def _shown(self) -> dict[str, float]:
        record = self.record
        seconds = np.concatenate(self._seconds) if self._seconds else np.empty(0)
        p50, p90, p99 = metrics.percentiles(seconds[~np.isnan(seconds)], [50, 90, 99]).tolist()
        thought, thinking = self._thought
        tokens, requests = self._tokens
        known = {name: math.nan if value is None else value for name, value in record["expected"].items()}

        def share(name: str) -> float:
            return self._tally[name] / self.n if self.n else math.nan

        return {
            "closed": share("closed"),
            "closed_promised": record["closed"],
            "degraded": share("degraded"),
            "degraded_promised": record["degraded"],
            "speed": thought / thinking if thinking > 0 else math.nan,
            "speed_promised": math.nan if record["speed"] is None else record["speed"],
            "p50": p50,
            "p50_promised": known["p50"],
            "p90": p90,
            "p90_promised": known["p90"],
            "p99": p99,
            "p99_promised": known["p99"],
            "tokens": tokens / requests if requests else math.nan,
            "tokens_promised": known["tokens"],
        }

    def _datasets(self) -> dict[str, dict[str, float | None]]:
        largest = sorted(self._traffic, key=lambda name: -self._traffic[name][0])[:_DATASETS]
        found: dict[str, dict[str, float | None]] = {}
        for name in largest:
            count, thinks = self._traffic[name]
            promised = self.record["datasets"].get(name, {})
            found[name] = {
                "share": count / self.n,
                "think": thinks / count,
                "share_promised": promised.get("share"),
                "think_promised": promised.get("think"),
            }
        return found


def _advice(found: Sequence[Finding], shown: Mapping[str, float]) -> tuple[str, ...]:
    """What to do about the promises that do not hold."""
    bad = {f.kind for f in found if f.state != "ok"}
    if not bad:
        return ()
    advice = []
    if bad & {"confidence", "thought", "think", "cut"}:
        advice.append(
            "the traffic is not like the questions collected: take questions with known answers from it, then "
            "calib collect NEW.jsonl and calib optimize with the same targets"
        )
        advice.append("calib watch LOG --shadow --policy FILE predicts what another policy would do on this traffic")
    elif "limit" in bad:
        speed, was = shown["speed"], shown["speed_promised"]
        measured = f" ({speed:.0f} tokens/s, {was:.0f} when it was tuned)" if speed > 0 and was > 0 else ""
        advice.append(
            f"as many requests think, and as long, as promised: what is late is the server or its load{measured}. "
            "Time it at this load (calib collect QUESTIONS --latency-concurrency N) and calib optimize again, or serve "
            "with a deadline"
        )
    return tuple(advice)

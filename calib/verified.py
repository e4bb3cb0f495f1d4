"""What a verification found, as a document and as a row of the store, and what one should know before believing it.

Leaves to others: asking (`calib.verify`), targets (`calib.measured`), the comparison itself (`calib.predicted`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib import predicted as comparison
from calib.arrivals import Load
from calib.engine.base import EngineInfo
from calib.gateway import policy_version
from calib.measured import Checked, Served
from calib.outcomes import SIMULATED, Outcomes
from calib.policy import Decisions
from calib.predicted import Difference, Line, Measured, Obedience
from calib.queueing import Forecast
from calib.store import Verification, VerifiedRows

__all__ = ["Verified", "model_behind", "served_otherwise", "warnings_of"]

_EXAMPLES = 5
_FAR_OFF, _OFTEN_CROSSED = 0.02, 0.05
"""Median shift of System 1's probabilities, and share of questions that cross the threshold, beyond which one should
doubt that the model is the same: rounding and batching move probabilities by some thousandths."""


def model_behind(info: EngineInfo) -> str:
    """Fingerprint of the model behind a server: temperatures of a gateway's policy make it no other one."""
    identity = {name: value for name, value in info.identity.items() if name != "gateway_temperatures"}
    return replace(info, identity=identity).fingerprint


@dataclass(frozen=True, eq=False)
class Verified:
    """What came of it.

    Attributes
    ----------
    served : Served
    url : str
        Without credentials.
    info : EngineInfo
        What the server said to be.
    load : Load
    outcomes : Outcomes
        Of the questions that were asked.
    predicted : Decisions
        Offline, on these outcomes; latency from the forecast where there is one.
    forecast : Forecast or None
        What the arrivals do to the latency, where seconds of several loads are known; None where those of one load are
        the prediction.
    note : str
        Which load was taken, where nobody chose one of several; else empty.
    due : ndarray of shape (N,), or None
        When each question arrived, seconds from the start; None with a fixed number in flight.
    measured : Measured
    lines : tuple of Line
    targets : tuple of Checked
    budgets, deadline : Obedience, Obedience or None
        None without a deadline.
    differences : tuple of Difference
    certificate : mapping or None
        What tests of measured latency say, where only estimated latency was promised.
    counts : mapping
        ``held_out``, ``without_text``, ``other_text``, ``asked``: how many questions.
    seconds, in_flight : float
        How long it took, and how many requests were in flight on average.
    interrupted : bool
        Whether it was stopped before the end.
    warnings : tuple of str
    """

    served: Served
    url: str
    info: EngineInfo
    load: Load
    outcomes: Outcomes
    predicted: Decisions
    forecast: Forecast | None
    note: str
    due: NDArray[np.float64] | None
    measured: Measured
    lines: tuple[Line, ...]
    targets: tuple[Checked, ...]
    budgets: Obedience
    deadline: Obedience | None
    differences: tuple[Difference, ...]
    certificate: Mapping[str, Any] | None
    counts: Mapping[str, int]
    seconds: float
    in_flight: float
    interrupted: bool
    warnings: tuple[str, ...]

    @property
    def missed(self) -> tuple[Checked, ...]:
        """Targets that the measurement misses."""
        return tuple(target for target in self.targets if target.met is False)

    @property
    def verdict(self) -> str:
        """``kept``, ``missed``, or ``no_targets`` where nothing was promised that could be looked at."""
        if self.missed:
            return "missed"
        return "kept" if any(target.met for target in self.targets) else "no_targets"

    @property
    def failures(self) -> dict[str, int]:
        """Questions without a usable answer, by reason."""
        return dict(Counter(str(reason) for reason in self.measured.failure if reason is not None).most_common())

    def to_dict(self) -> dict[str, Any]:
        """The document of ``calib verify --json``: rates 0 to 1, seconds, None for what is not finite."""
        policy = self.served.policy
        return {
            "name": self.served.name,
            "verdict": self.verdict,
            "marks": list(self.marks),
            "model": self.info.model,
            "fingerprints": {"policy": self.served.fingerprint, "server": model_behind(self.info)},
            "policy": policy.to_dict(),
            "policy_version": policy_version(policy),
            "arm": policy.arm,
            "url": self.url,
            "load": {
                "rate": self.load.rate,
                "concurrency": self.load.concurrency,
                "in_flight": self.in_flight,
                # no document says which of several was tuned
                "tuned_concurrency": self.taken if self.forecast is None else None,
                "predicted_from": self._rests_on(),
            },
            "n": self.outcomes.n,
            "counts": dict(self.counts),
            "failed": self.failures,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "lines": [line.to_dict() for line in self.lines],
            "targets": [target.to_dict() for target in self.targets],
            "certificate": None if self.certificate is None else dict(self.certificate),
            "obedience": {
                "think_budget": self.budgets.to_dict(),
                "deadline": None if self.deadline is None else {"limit": policy.deadline, **self.deadline.to_dict()},
            },
            "differences": {
                "n": len(self.differences),
                "answers": sum(one.answers[0] != one.answers[1] for one in self.differences),
                "thinking": sum(one.thinks[0] != one.thinks[1] for one in self.differences if one.answers[1] >= 0),
                "reasons": comparison.counted(self.differences),
                "examples": [one.to_dict() for one in self.examples],
                "p1": dict(comparison.shift_of_p1(self.predicted, self.measured)),
            },
            "warnings": list(self.warnings),
        }

    @property
    def taken(self) -> int | None:
        """Requests in flight when the seconds of the outcomes were taken; None where that is not known."""
        return int(self.outcomes.concurrency[self.outcomes.arm_index(self.served.policy.arm)]) or None

    def _rests_on(self) -> dict[str, Any]:
        """The loads whose seconds are the prediction, and what it says of this one."""
        if self.forecast is None:
            return {"concurrency": [self.taken] if self.taken else [], "nearest": self.taken, "in_flight": None}
        return self.forecast.to_dict()

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of the measured numbers: a simulated server's are simulated; none is estimated."""
        return (SIMULATED,) * self.info.simulated

    @property
    def examples(self) -> tuple[Difference, ...]:
        """A few of the differences, of each reason one first."""
        firsts = {one.reason: one for one in reversed(self.differences)}
        ordered = [*firsts.values(), *(one for one in self.differences if firsts[one.reason] is not one)]
        return tuple(sorted(ordered[: max(_EXAMPLES, len(firsts))], key=lambda one: one.index))

    def row(self) -> Verification:
        """As the store keeps it."""
        o, m = self.outcomes, self.measured
        rows = VerifiedRows(
            questions=tuple(zip(map(str, o.dataset), map(str, o.ids), strict=True)),
            answers=m.decisions(self.predicted).choice,
            thinks=m.thinks,
            tokens=m.tokens,
            seconds=np.where(m.failed, m.spent, m.latency),
            p=m.p,
        )
        version = policy_version(self.served.policy)
        named = (self.served.name, version, model_behind(self.info), self.served.policy.arm, self.url)
        return Verification(*named, self.load.rate, self.load.concurrency, self.to_dict(), rows)


def warnings_of(found: Verified) -> list[str]:
    """What one should know before believing the lines, most important first."""
    o, policy = found.outcomes, found.served.policy
    said = served_otherwise(found.served, found.info, o, found.measured)
    if found.failures:
        reasons = ", ".join(f"{reason} {n}" for reason, n in found.failures.items())
        said.append(
            f"{sum(found.failures.values())} of {o.n} questions got no usable answer ({reasons}): counted as wrong, "
            "and as slower than any limit"
        )
    if found.budgets.broken:
        said.append(
            f"{found.budgets.broken} of {found.budgets.n} thoughts are longer than the think budget, by up to "
            f"{found.budgets.worst:,.0f} tokens: the server does not obey it ({', '.join(found.budgets.examples)})"
        )
    if found.deadline is not None and found.deadline.broken:
        said.append(
            f"{found.deadline.broken} of {found.deadline.n} answers came later than the deadline of "
            f"{policy.deadline:g} s + {comparison.DEADLINE_GRACE:g} s, by up to {found.deadline.worst:.2f} s "
            f"({', '.join(found.deadline.examples)})"
        )
    said += _another_system1(found)
    if found.note:
        said.append(found.note)
    said += _other_load(found)
    left_out = {name: found.counts[name] for name in ("without_text", "other_text") if found.counts[name]}
    if left_out:
        what = {"without_text": "have no known text", "other_text": "have another text in the file"}
        parts = ", ".join(f"{n} {what[name]}" for name, n in left_out.items())
        said.append(f"of {found.counts['held_out']} held-out questions {parts}: these were not asked")
    if found.interrupted:
        said.append("it was stopped before the end: the lines are about the questions that were asked")
    if found.info.simulated:
        said.append("simulated: no real model answered, and the seconds are the server's own")
    return said


def _another_system1(found: Verified) -> list[str]:
    """What the answers themselves say of the model behind them."""
    shift = comparison.shift_of_p1(found.predicted, found.measured)
    crossed = comparison.counted(found.differences).get("p1_crossed", 0)
    answered = found.outcomes.n - sum(found.failures.values())
    signs = []
    if crossed > _OFTEN_CROSSED * answered:
        signs.append(f"its confidence crossed the threshold on {crossed} of {answered} questions")
    if shift["median"] is not None and shift["median"] > _FAR_OFF:
        signs.append(f"its probabilities are {shift['median']:.2g} off in the median, up to {shift['most']:.2g}")
    if not signs:
        return []
    return [f"System 1 answers as another model does, whatever the server says it is: {' and '.join(signs)}"]


def served_otherwise(served: Served, info: EngineInfo, outcomes: Outcomes, measured: Measured) -> list[str]:
    """In what the server is not the one that the policy is about: its model, knobs, arm."""
    said = []
    policy, raw = served.policy, info.raw
    expected = served.fingerprint or outcomes.fingerprint
    if served.imported:
        said.append("the outcomes were imported: whether the server is their model is not known (--allow-other-model)")
    elif expected and model_behind(info) != expected:
        said.append("the server is another model than the policy was tuned for (--allow-other-model)")
    version = policy_version(policy)
    held = raw.get("policy")
    told = sorted({str(v) for v in measured.version if v is not None and v != version})
    if isinstance(held, dict) and held.get("version") != version:
        said.append(f"the gateway serves policy version {held.get('version')}, not {version} of {served.name!r}")
    elif told:
        said.append(f"some answers were given under policy version {', '.join(told)}, not {version}")
    elif not isinstance(held, dict):
        if abs(info.threshold - policy.threshold) > 1e-6:
            said.append(f"the server's threshold is {info.threshold:g}, the policy's {policy.threshold:g}")
        if abs(info.mix - policy.mix) > 1e-6:
            said.append(f"the server's mix is {info.mix:g}, the policy's {policy.mix:g}")
        limit = (raw.get("defaults") or {}).get("think_budget")
        if limit != policy.think_budget:
            most = "unlimited" if limit is None else f"{limit:,}"
            said.append(f"the server's think budget is {most}, the policy's {policy.think_budget:,}")
    arm = raw.get("arm")
    if isinstance(arm, str) and arm != policy.arm:
        said.append(f"the server says that it is arm {arm!r}, not {policy.arm!r}")
    return said


def _other_load(found: Verified) -> list[str]:
    taken = found.taken
    if found.forecast is not None and found.load.rate is not None:
        return found.forecast.warnings(found.load.rate)
    if taken is None:
        return ["at which load the stored seconds were taken is not known: compare latency with care"]
    if found.load.rate is not None:
        return [
            f"the stored seconds were taken with {taken} requests in flight, these at {found.load}: "
            f"{found.in_flight:.3g} in flight on average"
        ]
    if found.load.concurrency != taken:
        return [f"the stored seconds were taken with {taken} requests in flight, these with {found.load.concurrency}"]
    return []

"""A policy with what was promised of it, and its targets on what was measured under it.

Latency that was only estimated when the policy was tuned is tested exactly on the measurement, which is a look at the
test split and is paid for as one. Leaves to others: the tests (`calib.certify`), asking (`calib.verify`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calib.certify import TargetTest, Terms, alpha_at_look, check_targets, marks_of
from calib.intervals import RESAMPLES
from calib.outcomes import ESTIMATED, SIMULATED, Outcomes
from calib.policy import Decisions, Evaluation, Policy, evaluate_decisions
from calib.saved import saved
from calib.store import Store
from calib.target import Target, parse_target
from calib.tuning import split_identity

__all__ = ["Checked", "Served", "check", "read_served"]


@dataclass(frozen=True)
class Served:
    """A policy with what was promised of it.

    Attributes
    ----------
    name : str
    policy : Policy
    document : mapping
        Of ``policy.json``, or as ``calib optimize`` saved it.
    imported : bool
        Whether the outcomes that it was tuned on were collected elsewhere: no server can be told to be their model's.
    """

    name: str
    policy: Policy
    document: Mapping[str, Any]
    imported: bool = False

    @property
    def fingerprint(self) -> str | None:
        """Of the model that it was tuned for, where the document knows it."""
        return (self.document.get("fingerprints") or {}).get("model") or None

    @property
    def targets(self) -> tuple[Target, ...]:
        """What it was tuned to keep."""
        return tuple(parse_target(one["target"]) for one in self.document.get("targets") or ())

    @property
    def marks(self) -> tuple[str, ...]:
        """Of the numbers that it was tuned on."""
        return tuple(self.document.get("marks") or ())

    @property
    def level(self) -> float:
        """Of its certificate, where it has one."""
        return float((self.document.get("certificate") or {}).get("level", 0.95))


def read_served(given: str, store: Store) -> Served:
    """The policy that a text names (`calib.saved.saved`), parsed."""
    found = saved(given, store)
    return Served(found.name, Policy.from_dict(found.document["policy"]), found.document)


@dataclass(frozen=True)
class Checked:
    """A target, predicted beside measured.

    Attributes
    ----------
    target : Target
    predicted : float
    test : TargetTest
        On the measured decisions: value, interval, and the exact test.
    tested : bool
        Whether the test counts: its latency was only estimated before, and a look at the test split was spent on it.
    """

    target: Target
    predicted: float
    test: TargetTest
    tested: bool

    @property
    def met(self) -> bool | None:
        """Whether the measurement keeps it; None where it cannot tell, for want of questions or prices."""
        return None if self.test.n == 0 or math.isnan(self.test.value) else self.test.met

    @property
    def certified(self) -> bool | None:
        """Whether the measurement certifies it; None where that was not asked."""
        return self.test.certified if self.tested else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = self.test.to_dict()
        tested = {name: found[name] if self.tested else None for name in ("needs_more", "p_value", "reason")}
        return {
            "target": found["target"],
            "predicted": self.predicted if math.isfinite(self.predicted) else None,
            "value": found["value"],
            "interval": found["interval"],
            "n": self.test.n,
            "met": self.met,
            "certified": self.certified,
            **tested,
        }


def check(
    served: Served,
    outcomes: Outcomes,
    decisions: tuple[Decisions, Decisions],
    everything: Outcomes,
    *,
    level: float,
    rng: np.random.Generator,
    ledger: Callable[[str, Mapping[str, Any]], int],
    conditions: str,
    obstacle: str = "",
    resamples: int = RESAMPLES,
) -> tuple[tuple[Checked, ...], dict[str, Any] | None]:
    """Each target on the measurement; where its latency was only estimated, with an exact test.

    Parameters
    ----------
    served : Served
    outcomes : Outcomes
        Of the questions that were asked, held out from tuning.
    decisions : tuple of Decisions
        Predicted and measured.
    everything : Outcomes
        All of the model: whose test split is looked at, and which datasets there are.
    level : float
    rng : numpy.random.Generator
    ledger : callable
        Enters a look and returns its number (`Store.record_look`); called only where something is tested.
    conditions : str
        The load, in words.
    obstacle : str
        Why nothing may be tested; empty when it may.
    resamples : int

    Returns
    -------
    tuple
        The targets, and what the tests say together: None where no latency was estimated.
    """
    targets, policy = served.targets, served.policy
    predicted, measured = decisions
    # what the promise rested on: the prediction beside a measurement may rest on the seconds of another load
    marks = served.marks if served.document.get("marks") is not None else marks_of(policy, outcomes)
    estimated = ESTIMATED in marks
    wanted = [target for target in targets if target.is_latency and estimated]
    look = 1
    if wanted and not obstacle:
        look = ledger(split_identity(everything), _look(served, wanted, measured, level))
    alpha = alpha_at_look(level, look)
    # the measurement holds no estimated second
    clocked = replace(outcomes, estimated=np.zeros_like(outcomes.estimated))
    named = {target.dataset for target in targets if target.dataset is not None}  # some may not have been asked about
    known = tuple(sorted(named | set(everything.dataset_names)))
    terms = Terms(alpha, level, None, policy.deadline, known, resamples)
    tests: dict[Target, TargetTest] = {}
    for group in (wanted, [target for target in targets if target not in wanted]):  # Holm among those that count
        found = check_targets(group, clocked, policy, terms, rng=rng, decisions=measured)
        tests.update(zip(group, found, strict=True))
    score = evaluate_decisions(outcomes, predicted, by_dataset=True)
    checked = tuple(Checked(t, _value(t, score), tests[t], not obstacle and t in wanted) for t in targets)
    if not wanted:
        return checked, None
    if obstacle:
        statement = f"estimated latency is not tested: {obstacle}"
        return checked, {"verdict": "not_tested", "conditions": conditions, "statement": statement}
    passed = all(tests[t].passed for t in wanted)
    paid = f", look {look} at the test split" if look > 1 else ""
    by = f"{outcomes.n:,} measured latencies {conditions}"
    if passed:
        statement = f"certified at level {level:.0%}{paid}: {', '.join(map(str, wanted))}, by {by}"
    else:
        statement = f"not certified{paid}: {'; '.join(_hint(tests[t]) for t in wanted if not tests[t].passed)} ({by})"
    if SIMULATED in served.marks or outcomes.simulated:
        statement += ". It is about a simulated server"
    return checked, {
        "verdict": "certified" if passed else "not_certified",
        "level": level,
        "look": look,
        "alpha": alpha,
        "conditions": conditions,
        "statement": statement,
    }


def _value(target: Target, score: Evaluation) -> float:
    known = target.dataset is None or target.dataset in score.by_dataset
    return target.value_of(score) if known else math.nan


def _hint(test: TargetTest) -> str:
    if not test.met:
        return f"{test.target} is missed"
    if isinstance(test.needs_more, int):
        return f"{test.target} needs about {test.needs_more} more questions at this rate"
    return f"{test.target}: {test.reason}"


def _look(served: Served, targets: Sequence[Target], measured: Decisions, level: float) -> dict[str, Any]:
    """What is looked at; another measurement is another look."""
    digest = hashlib.sha256(np.ascontiguousarray(measured.latency).tobytes())
    return {
        "verify": served.name,
        "targets": [str(target) for target in targets],
        "policies": [served.policy.to_dict()],
        "level": level,
        "numbers": digest.hexdigest(),
    }

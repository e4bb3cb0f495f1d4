"""What a store holds: coverage for resuming a collection, counts and failures for `calib status`.

Leaves to others: the arrays (`calib.store.loading`).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from calib.latency import RateModel
from calib.store import schema
from calib.store.schema import ModelRow

__all__ = [
    "CoverageCount",
    "Covered",
    "FailureCount",
    "ModelStatus",
    "SavedPolicy",
    "StoreStatus",
    "coverage",
    "model_status",
    "saved_policies",
]

_EXAMPLES = 3  # question ids shown for each reason of failure


@dataclass(frozen=True)
class Covered:
    """What the store holds of one question for one arm.

    Attributes
    ----------
    system1 : bool
        Whether p1 is there.
    budgets : frozenset of int
        Think budgets with p2.
    timed_system1, timed : bool, frozenset of int
        The same for seconds (at the concurrency that was asked about, if one was).
    failed, failed_system1 : frozenset of int, bool
        Asked and not answered since; with a concurrency: at it, and not timed since.
    """

    system1: bool
    budgets: frozenset[int]
    timed_system1: bool
    timed: frozenset[int]
    failed: frozenset[int]
    failed_system1: bool


@dataclass(frozen=True)
class CoverageCount:
    """How many of a dataset's questions one arm has answered."""

    dataset: str
    arm: str
    questions: int
    system1: int
    budgets: dict[int, int]
    timed: dict[int, int]


@dataclass(frozen=True)
class FailureCount:
    """How many questions failed for one reason in one arm, with a few of their ids and the last detail."""

    arm: str
    stage: str
    reason: str
    questions: int
    examples: list[str]
    detail: str


@dataclass(frozen=True)
class ModelStatus:
    """What the store holds of one model."""

    name: str
    fingerprint: str
    threshold: float
    mix: float
    simulated: bool
    coverage: list[CoverageCount]
    failures: list[FailureCount]
    rates: dict[str, RateModel]


@dataclass(frozen=True)
class SavedPolicy:
    """The newest document saved under a name; ``versions`` counts it and those before."""

    name: str
    document: dict[str, Any]
    created: str
    versions: int


@dataclass(frozen=True)
class StoreStatus:
    """What a store holds, for `calib status`."""

    location: str
    schema_version: int
    questions: dict[str, int]
    models: list[ModelStatus]
    policies: list[SavedPolicy]
    runs: list[dict[str, Any]]
    verifications: list[dict[str, Any]]

    @property
    def answered(self) -> list[ModelStatus]:
        """Models with any answer; of the others all that is known is what failed."""
        return [one for one in self.models if any(row.system1 or row.budgets for row in one.coverage)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON (budgets become texts); without the envelopes, the bulk of a document."""
        plain = asdict(self)
        for policy in plain["policies"]:
            policy["document"].pop("envelope", None)
        return plain


def coverage(
    conn: sa.Connection, model: int, fingerprint: str, arm: str, concurrency: int | None
) -> dict[tuple[str, str], Covered]:
    """See `calib.store.Store.coverage`. Sets are shared between rows: 100,000 questions know only a few of them."""
    none: frozenset[int] = frozenset()
    a, t, f, q = schema.answers, schema.timings, schema.failures, schema.questions
    decoded: dict[bytes, frozenset[int]] = {}

    def add(found: dict[bytes, frozenset[int]], key: bytes, budgets: frozenset[int]) -> None:
        earlier = found.get(key)
        found[key] = budgets if earlier is None else earlier | budgets

    answered: dict[bytes, frozenset[int]] = {}
    for key, blob, system1 in conn.execute(
        sa.select(a.c.key, a.c.budgets, a.c.system1).where(a.c.model == model, a.c.arm == arm)
    ):
        name = blob + b"1" * system1
        if name not in decoded:
            decoded[name] = frozenset(schema.unpack_budgets(blob) + (schema.SYSTEM1,) * system1)
        add(answered, key, decoded[name])

    timed: dict[bytes, frozenset[int]] = {}
    known: dict[tuple[bytes, bytes, bool], frozenset[int]] = {}
    statement = sa.select(t.c.key, t.c.budgets, t.c.t1, t.c.t2).where(t.c.model == model, t.c.arm == arm, t.c.timed)
    statement = statement if concurrency is None else statement.where(t.c.concurrency == concurrency)
    for budgets_blob, rows in _by_budgets(conn.execute(statement)).items():
        budgets = schema.unpack_budgets(budgets_blob)
        finite = np.isfinite(schema.unpack([row.t2 for row in rows], schema.FLOAT, len(budgets)))
        for row, flags in zip(rows, finite, strict=True):
            pattern = (budgets_blob, flags.tobytes(), row.t1 is not None)
            if pattern not in known:
                seen = {b for b, flag in zip(budgets, flags, strict=True) if flag}
                known[pattern] = frozenset(seen | ({schema.SYSTEM1} if pattern[2] else set()))
            add(timed, row.key, known[pattern])

    failed: dict[bytes, frozenset[int]] = {}
    failures = sa.select(f.c.key, f.c.budget).where(f.c.model == model, f.c.arm == arm)
    failures = failures if concurrency is None else failures.where(f.c.concurrency == concurrency)
    for key, budget in conn.execute(failures):
        add(failed, key, frozenset([budget]))
    for key in failed:
        failed[key] -= (answered if concurrency is None else timed).get(key, none)

    made: dict[tuple[frozenset[int], frozenset[int], frozenset[int]], Covered] = {}
    covered: dict[tuple[str, str], Covered] = {}
    for dataset, ext_id, text_key in conn.execute(sa.select(q.c.dataset, q.c.ext_id, q.c.text_key).order_by(q.c.n)):
        key = schema.answer_key(text_key, fingerprint)
        found = (answered.get(key, none), timed.get(key, none), failed.get(key, none))
        if not any(found):
            continue
        if found not in made:
            only = {schema.SYSTEM1}
            p, s, x = found
            made[found] = Covered(bool(p & only), p - only, bool(s & only), s - only, x - only, bool(x & only))
        covered[dataset, ext_id] = made[found]
    return covered


def _by_budgets(rows: Iterable[Any]) -> dict[bytes, list[Any]]:
    groups: dict[bytes, list[Any]] = defaultdict(list)
    for row in rows:
        groups[row.budgets].append(row)
    return groups


def model_status(conn: sa.Connection, model: ModelRow) -> ModelStatus:
    """Coverage, failures and rates of one model."""
    tables = (schema.answers, schema.timings, schema.failures)
    arms: set[str] = set()
    for table in tables:
        arms |= set(conn.execute(sa.select(table.c.arm).where(table.c.model == model.n).distinct()).scalars())
    r = schema.rates
    rates = conn.execute(sa.select(r).where(r.c.model == model.n).order_by(r.c.arm)).all()
    return ModelStatus(
        name=model.name,
        fingerprint=model.fingerprint,
        threshold=model.threshold,
        mix=model.mix,
        simulated=model.simulated,
        coverage=[count for arm in sorted(arms) for count in _coverage_counts(conn, model, arm)],
        failures=_failure_counts(conn, model),
        rates={row.arm: RateModel(row.system1_s, row.tokens_per_second, row.read_s) for row in rates},
    )


def _coverage_counts(conn: sa.Connection, model: ModelRow, arm: str) -> list[CoverageCount]:
    by_dataset: dict[str, list[Covered]] = defaultdict(list)
    for (dataset, _), covered in coverage(conn, model.n, model.fingerprint, arm, None).items():
        by_dataset[dataset].append(covered)
    return [
        CoverageCount(
            dataset=dataset,
            arm=arm,
            questions=len(rows),
            system1=sum(row.system1 for row in rows),
            budgets=_counted(row.budgets for row in rows),
            timed=_counted(row.timed for row in rows),
        )
        for dataset, rows in sorted(by_dataset.items())
    ]


def _counted(sets: Iterable[frozenset[int]]) -> dict[int, int]:
    return dict(sorted(Counter(budget for budgets in sets for budget in budgets).items()))


def _failure_counts(conn: sa.Connection, model: ModelRow) -> list[FailureCount]:
    f = schema.failures
    columns = (f.c.arm, f.c.stage, f.c.reason, f.c.dataset, f.c.ext_id, f.c.detail)
    rows = conn.execute(sa.select(*columns).where(f.c.model == model.n).order_by(f.c.n)).all()
    by_reason: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for arm, stage, reason, dataset, ext_id, detail in rows:
        by_reason[arm, stage, reason][f"{dataset}/{ext_id}"] = detail
    counts = [
        FailureCount(arm, stage, reason, len(ids), list(ids)[:_EXAMPLES], list(ids.values())[-1])
        for (arm, stage, reason), ids in by_reason.items()
    ]
    return sorted(counts, key=lambda count: -count.questions)


def saved_policies(conn: sa.Connection) -> list[SavedPolicy]:
    """Newest document of each name, by name."""
    p = schema.policies
    rows = conn.execute(sa.select(p.c.name, p.c.document, p.c.at).order_by(p.c.n)).all()
    versions = Counter(row.name for row in rows)
    newest = {row.name: row for row in rows}
    return [SavedPolicy(n, json.loads(row.document), row.at, versions[n]) for n, row in sorted(newest.items())]

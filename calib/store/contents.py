"""Cheap looks at a store by a page that looks again and again: has it changed, how far is a collection, one text.

Leaves to others: the whole coverage (`calib.store.holdings`), the arrays (`calib.store.loading`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from calib.fitness import REPLACED
from calib.store import schema
from calib.store.store import Store

__all__ = ["ArmCount", "Counts", "Text", "content_key", "counts", "loads", "text_of", "texts"]


@dataclass(frozen=True)
class ArmCount:
    """What one arm of one model has done so far: asks that were answered, and questions that failed."""

    model: str
    arm: str
    answers: int
    failures: int


@dataclass(frozen=True)
class Counts:
    """How far a collection is."""

    questions: int
    arms: tuple[ArmCount, ...]


@dataclass(frozen=True)
class Text:
    """What is kept of one question's text; None where only hashes and numbers are.

    Attributes
    ----------
    state, question : str or None
    options : tuple of str
        Empty when their texts are not kept.
    thoughts : mapping of str to str
        Longest kept thought of each arm.
    """

    state: str | None
    question: str | None
    options: tuple[str, ...]
    thoughts: dict[str, str]


def content_key(store: Store) -> str:
    """Identity of all that outcomes are made of: equal while no answer, timing, question or rate changes.

    Reads counts, newest rows and what may be changed in place, not every row: some milliseconds for 100,000 answers.
    Saved policies and the ledger are left out: they change no outcome.
    """
    digest = hashlib.sha256()
    with store._reading() as conn:
        for statement in _content():
            for row in conn.execute(statement):
                digest.update(repr(tuple(row)).encode())
            digest.update(b"\n")
    return digest.hexdigest()


def _content() -> Iterator[sa.Select[*tuple[Any, ...]]]:
    m, q, a, t = schema.models, schema.questions, schema.answers, schema.timings
    f, s = schema.failures, schema.samples
    yield sa.select(m).order_by(m.c.n)
    yield sa.select(sa.func.count(), sa.func.max(q.c.n), sa.func.sum(q.c.weight)).select_from(q)
    for table in (a, t):  # rows are only added: how many, and the newest of them
        yield sa.select(sa.func.count(), sa.func.max(table.c.n)).select_from(table)
        yield sa.select(table).order_by(table.c.n.desc()).limit(1)
    yield sa.select(sa.func.count(), sa.func.max(f.c.n), sa.func.max(f.c.at)).select_from(f)
    yield sa.select(sa.func.count(), sa.func.max(s.c.n), sa.func.sum(s.c.round)).select_from(s)
    yield sa.select(sa.func.count()).select_from(schema.audits).where(schema.audits.c.audit == REPLACED)
    for small in (schema.rates, schema.passes):
        yield sa.select(small).order_by(small.c.n)


def counts(store: Store) -> Counts:
    """How many questions there are, and how far each arm is."""
    m, q, a, f = schema.models, schema.questions, schema.answers, schema.failures
    answered = sa.select(m.c.name, a.c.arm, sa.func.count()).join(m, m.c.n == a.c.model).group_by(m.c.name, a.c.arm)
    failed = sa.select(m.c.name, f.c.arm, sa.func.count(f.c.key.distinct())).join(m, m.c.n == f.c.model)
    with store._reading() as conn:
        questions = int(conn.execute(sa.select(sa.func.count()).select_from(q)).scalar_one())
        done = {(name, arm): int(n) for name, arm, n in conn.execute(answered)}
        lost = {(name, arm): int(n) for name, arm, n in conn.execute(failed.group_by(m.c.name, f.c.arm))}
    arms = sorted(done.keys() | lost.keys())
    return Counts(questions, tuple(ArmCount(*name, done.get(name, 0), lost.get(name, 0)) for name in arms))


def loads(store: Store, fingerprint: str) -> dict[str, tuple[int, ...]]:
    """Concurrencies at which each arm of a model was timed, ascending; 0 where unknown."""
    m, t = schema.models, schema.timings
    statement = sa.select(t.c.arm, t.c.concurrency).join(m, m.c.n == t.c.model).distinct()
    found: dict[str, list[int]] = {}
    with store._reading() as conn:
        for arm, load in conn.execute(statement.where(m.c.fingerprint == fingerprint, t.c.timed)):
            found.setdefault(arm, []).append(int(load))
    return {arm: tuple(sorted(several)) for arm, several in sorted(found.items())}


def texts(store: Store) -> dict[tuple[str, str], str]:
    """Text of every question whose text is kept, by (dataset, id)."""
    q = schema.questions
    statement = sa.select(q.c.dataset, q.c.ext_id, q.c.question).where(q.c.question.is_not(None))
    with store._reading() as conn:
        return {(dataset, name): text for dataset, name, text in conn.execute(statement)}


def text_of(store: Store, fingerprint: str, dataset: str, name: str) -> Text:
    """Texts of one question, with the thoughts of a model about it."""
    q, a = schema.questions, schema.answers
    with store._reading() as conn:
        columns = (q.c.text_key, q.c.state, q.c.question, q.c.options)
        row = conn.execute(sa.select(*columns).where(q.c.dataset == dataset, q.c.ext_id == name)).one_or_none()
        if row is None:
            return Text(None, None, (), {})
        key = schema.answer_key(row.text_key, fingerprint)
        thought = sa.select(a.c.arm, a.c.thought).where(a.c.key == key, a.c.thought.is_not(None)).order_by(a.c.n)
        longest: dict[str, str] = {}
        for arm, text in conn.execute(thought):
            if len(text) > len(longest.get(arm, "")):
                longest[arm] = text
    return Text(row.state, row.question, tuple(json.loads(row.options)) if row.options else (), longest)

"""Rows of staged collections, latency passes and audits.

Leaves to others: who is chosen and what it stands for (`calib.sampling`), what an audit finds (`calib.audit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from calib.fitness import REPLACED
from calib.store import entries, schema
from calib.store.schema import ModelRow

__all__ = [
    "AuditAnswer",
    "LatencyPass",
    "PassState",
    "Planned",
    "StoredAnswer",
    "add_audits",
    "answers",
    "audits",
    "choose",
    "open_pass",
    "own_thoughts",
    "passes",
    "plan",
    "planned",
    "replaced",
    "set_pass",
    "timed_in_pass",
]

PassState = Literal["open", "done", "void"]
FIRST_PASS = 2
"""Number of an arm's first latency pass: 0 is a plain collection, 1 the rounds of a staged one."""

Floats = NDArray[np.float64]
Name = tuple[str, str]


@dataclass(frozen=True)
class Planned:
    """A question that a staged collection may think about.

    Attributes
    ----------
    dataset, id : str
    part : str
        Which part of the questions its collector asks (``1/4``); empty for all.
    test : bool
        On the test side.
    band : int
        Confidence band, see `calib.sampling.bands`.
    wrong : bool
        Whether System 1 answers it wrong.
    round : int
        Round in which it was chosen, from 1; 0 until it is.
    """

    dataset: str
    id: str
    part: str
    test: bool
    band: int
    wrong: bool
    round: int = 0


@dataclass(frozen=True)
class LatencyPass:
    """One latency pass of one arm.

    Attributes
    ----------
    arm : str
    concurrency, number : int
    state : {"open", "done", "void"}
        Seconds of a void pass are kept and do not count.
    note : str
        What could not be checked, or why it is void.
    hit_rate : float or None
        Share of the prompt tokens that came from the prefix cache.
    """

    arm: str
    concurrency: int
    number: int
    state: PassState
    note: str
    hit_rate: float | None


@dataclass(frozen=True, eq=False)
class StoredAnswer:
    """One ask of one question by one arm: C options, B budgets; NaN where a number is unknown.

    Attributes
    ----------
    dataset, id, arm : str
    answer, n_options : int
    budgets : tuple of int
    p1 : ndarray of shape (C,) or None
    p2 : ndarray of shape (B, C)
    tokens : ndarray of shape (B,)
    finished : ndarray of bool, shape (B,)
    label_mass1 : float
    label_mass2 : ndarray of shape (B,)
    """

    dataset: str
    id: str
    arm: str
    answer: int
    n_options: int
    budgets: tuple[int, ...]
    p1: Floats | None
    p2: Floats
    tokens: Floats
    finished: NDArray[np.bool_]
    label_mass1: float
    label_mass2: Floats


@dataclass(frozen=True, eq=False)
class AuditAnswer:
    """An answer that was asked for an audit alone, or the mark of one that failed.

    Attributes
    ----------
    dataset, id, arm : str
    audit : {"rotated", "seed", "load", "replaced"}
        With the options in another order, with another seed, at another load; ``replaced`` marks a stored answer that
        may be another model's, and holds no answer itself.
    variant : int
        Places that the options were rotated by, seeds further, requests in flight; 0 of a mark.
    p1, p2 : ndarray of shape (C,) or None
        In the order of the stored options.
    budget : int or None
        Think budget of ``p2``.
    """

    dataset: str
    id: str
    arm: str
    audit: str
    variant: int
    p1: Floats | None
    budget: int | None = None
    p2: Floats | None = None


# --- staged collections -----------------------------------------------------------------------------------------------


def plan(conn: sa.Connection, model: int, rows: Iterable[Planned]) -> None:
    """Enter questions that may be thought about; one that is there keeps its stratum and its round."""
    numbers = _question_numbers(conn)
    new = [
        {
            "model": model,
            "question": numbers[row.dataset, row.id],
            "part": row.part,
            "test": row.test,
            "band": row.band,
            "wrong": row.wrong,
            "round": row.round,
        }
        for row in rows
    ]
    schema.insert(conn, schema.samples, new)


def choose(conn: sa.Connection, model: int, names: Iterable[Name], number: int) -> None:
    """Write down the round in which these questions were chosen."""
    numbers, s = _question_numbers(conn), schema.samples
    rows = [{"question_": numbers[name], "round_": number} for name in names]
    if rows:
        which = (s.c.model == model) & (s.c.question == sa.bindparam("question_")) & (s.c.round == 0)
        conn.execute(s.update().where(which).values(round=sa.bindparam("round_")), rows)


def planned(conn: sa.Connection, model: int) -> list[Planned]:
    """All questions that were entered, in that order."""
    s, q = schema.samples, schema.questions
    columns = (q.c.dataset, q.c.ext_id, s.c.part, s.c.test, s.c.band, s.c.wrong, s.c.round)
    statement = sa.select(*columns).join(q, q.c.n == s.c.question).where(s.c.model == model).order_by(s.c.n)
    return [Planned(*row) for row in conn.execute(statement)]


def _question_numbers(conn: sa.Connection) -> dict[Name, int]:
    q = schema.questions
    return {(dataset, ext_id): n for dataset, ext_id, n in conn.execute(sa.select(q.c.dataset, q.c.ext_id, q.c.n))}


# --- latency passes ---------------------------------------------------------------------------------------------------


def open_pass(conn: sa.Connection, model: int, arm: str, concurrency: int) -> int:
    """Number of the pass that is open, or of a new one."""
    mine = [one for one in passes(conn, model) if (one.arm, one.concurrency) == (arm, concurrency)]
    waiting = [one.number for one in mine if one.state == "open"]
    if waiting:
        return waiting[-1]
    number = max((one.number + 1 for one in mine), default=FIRST_PASS)
    set_pass(conn, model, LatencyPass(arm, concurrency, number, "open", "", None))
    return number


def set_pass(conn: sa.Connection, model: int, found: LatencyPass) -> None:
    """Enter a pass, or what became of it."""
    row = {
        "model": model,
        "arm": found.arm,
        "concurrency": found.concurrency,
        "pass": found.number,
        "state": found.state,
        "note": found.note,
        "hit_rate": found.hit_rate,
        "at": entries.now(),
    }
    schema.insert(conn, schema.passes, [row], replace_by=["model", "arm", "concurrency", "pass"])


def passes(conn: sa.Connection, model: int) -> list[LatencyPass]:
    """Latency passes, in the order in which they began."""
    p = schema.passes
    columns = (p.c.arm, p.c.concurrency, p.c["pass"], p.c.state, p.c.note, p.c.hit_rate)
    return [LatencyPass(*row) for row in conn.execute(sa.select(*columns).where(p.c.model == model).order_by(p.c.n))]


def timed_in_pass(conn: sa.Connection, model: ModelRow, arm: str, concurrency: int, number: int) -> set[Name]:
    """Questions whose seconds this pass holds."""
    t = schema.timings
    which = (t.c.model == model.n, t.c.arm == arm, t.c.concurrency == concurrency, t.c["pass"] == number, t.c.timed)
    keys = set(conn.execute(sa.select(t.c.key).where(*which)).scalars())
    return {name for key, names in _names_by_key(conn, model).items() if key in keys for name in names}


def _names_by_key(conn: sa.Connection, model: ModelRow) -> dict[bytes, list[Name]]:
    q = schema.questions
    found: dict[bytes, list[Name]] = {}
    for dataset, ext_id, text_key in conn.execute(sa.select(q.c.dataset, q.c.ext_id, q.c.text_key).order_by(q.c.n)):
        found.setdefault(schema.answer_key(text_key, model.fingerprint), []).append((dataset, ext_id))
    return found


# --- audits -----------------------------------------------------------------------------------------------------------


def answers(conn: sa.Connection, model: ModelRow) -> Iterator[StoredAnswer]:
    """Every ask, in the order in which they were written; of questions with equal texts under the first one's name."""
    a, q = schema.answers, schema.questions
    facts: dict[bytes, Any] = {}
    columns = (q.c.dataset, q.c.ext_id, q.c.text_key, q.c.answer, q.c.n_options)
    for row in conn.execute(sa.select(*columns).order_by(q.c.n)):
        facts.setdefault(schema.answer_key(row.text_key, model.fingerprint), row)
    names = ("key", "arm", "budgets", "p1", "p2", "tokens", "finished", "label_mass1", "label_mass2")
    for row in conn.execute(sa.select(*(a.c[name] for name in names)).where(a.c.model == model.n).order_by(a.c.n)):
        fact = facts.get(row.key)
        if fact is None:
            continue
        budgets = schema.unpack_budgets(row.budgets)
        yield StoredAnswer(
            dataset=fact.dataset,
            id=fact.ext_id,
            arm=row.arm,
            answer=fact.answer,
            n_options=fact.n_options,
            budgets=budgets,
            p1=_distribution(row.p1),
            p2=schema.unpack([row.p2], schema.FLOAT, len(budgets), fact.n_options)[0],
            tokens=_array(row.tokens),
            finished=np.frombuffer(row.finished, dtype=schema.FLAG).astype(bool),
            label_mass1=np.nan if row.label_mass1 is None else row.label_mass1,
            label_mass2=_array(row.label_mass2),
        )


def own_thoughts(conn: sa.Connection, model: ModelRow) -> Iterator[tuple[str, tuple[int, ...], Floats]]:
    """Arm, budgets and tokens (B,) of every thought that was run."""
    t = schema.timings
    statement = sa.select(t.c.arm, t.c.budgets, t.c.tokens).where(t.c.model == model.n).order_by(t.c.n)
    for arm, blob, tokens in conn.execute(statement):
        if budgets := schema.unpack_budgets(blob):
            yield arm, budgets, _array(tokens)


def add_audits(conn: sa.Connection, model: ModelRow, rows: Sequence[tuple[str, AuditAnswer]]) -> None:
    """Enter answers by the text key of their question; one that is there stays."""
    new: list[Mapping[str, Any]] = [
        {
            "model": model.n,
            "key": schema.answer_key(text_key, model.fingerprint),
            "dataset": row.dataset,
            "ext_id": row.id,
            "arm": row.arm,
            "audit": row.audit,
            "variant": row.variant,
            "p1": None if row.p1 is None else schema.pack(row.p1),
            "budget": row.budget,
            "p2": None if row.p2 is None else schema.pack(row.p2),
            "at": entries.now(),
        }
        for text_key, row in rows
    ]
    schema.insert(conn, schema.audits, new)


def audits(conn: sa.Connection, model: int) -> list[AuditAnswer]:
    """Answers that were asked for audits, in the order in which they were written."""
    a = schema.audits
    names = ("dataset", "ext_id", "arm", "audit", "variant", "p1", "budget", "p2")
    statement = sa.select(*(a.c[name] for name in names)).where(a.c.model == model).order_by(a.c.n)
    return [
        AuditAnswer(
            row.dataset,
            row.ext_id,
            row.arm,
            row.audit,
            row.variant,
            _distribution(row.p1),
            row.budget,
            _distribution(row.p2),
        )
        for row in conn.execute(statement)
    ]


def replaced(conn: sa.Connection, model: int) -> list[tuple[bytes, str]]:
    """Key and arm of every answer that may be another model's, since its server was replaced while it was asked."""
    a = schema.audits
    statement = sa.select(a.c.key, a.c.arm).where(a.c.model == model, a.c.audit == REPLACED).order_by(a.c.n)
    return [(key, arm) for key, arm in conn.execute(statement)]


def _array(blob: bytes) -> Floats:
    return np.frombuffer(blob, dtype=schema.FLOAT)


def _distribution(blob: bytes | None) -> Floats | None:
    return None if blob is None else _array(blob)

"""Runs of `calib verify` as rows: what was predicted and measured, and what each question got.

Leaves to others: the table (`calib.store.schema`), what is compared (`calib.predicted`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from calib.store import entries, schema

__all__ = ["Verification", "VerifiedRows", "read", "row"]


@dataclass(frozen=True, eq=False)
class VerifiedRows:
    """What each of N questions got.

    Attributes
    ----------
    questions : tuple of (str, str), length N
        Dataset and id.
    answers : ndarray of int, shape (N,)
        Index of the answer; -1 without a usable one.
    thinks : ndarray of bool, shape (N,)
    tokens, seconds : ndarray of shape (N,)
        Seconds of a question without an answer are those until it was given up.
    p : ndarray of shape (N, C)
        Probabilities; NaN without an answer, 0 at padded options.
    """

    questions: tuple[tuple[str, str], ...]
    answers: NDArray[np.int64]
    thinks: NDArray[np.bool_]
    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]
    p: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Verification:
    """One run: predicted beside measured.

    Attributes
    ----------
    name, version : str
        Of the policy; the version is a hash of all that it says.
    fingerprint : str
        Of the model that the server said to be.
    arm, url : str
    rate, concurrency : float or None, int or None
        Requests per second, or requests in flight: one of both.
    summary : mapping
        The document of ``calib verify --json``.
    rows : VerifiedRows or None
        None where they were not read.
    at : str
        When it was stored, ISO 8601 in UTC.
    """

    name: str
    version: str
    fingerprint: str
    arm: str
    url: str
    rate: float | None
    concurrency: int | None
    summary: Mapping[str, Any]
    rows: VerifiedRows | None = None
    at: str = field(default_factory=entries.now)


def row(run: Verification) -> dict[str, Any]:
    """Row of ``verifications``."""
    if run.rows is None:
        raise ValueError("a run is stored with its rows")
    return {
        "at": run.at,
        "name": run.name,
        "version": run.version,
        "fingerprint": run.fingerprint,
        "arm": run.arm,
        "url": entries.without_secrets(run.url),
        "rate": run.rate,
        "concurrency": run.concurrency,
        "summary": entries.as_json(_harmless(run.summary)),
        "questions": entries.as_json(run.rows.questions),
        "answers": schema.pack(run.rows.answers, schema.BUDGET),
        "thinks": schema.pack(run.rows.thinks, schema.FLAG),
        "tokens": schema.pack(run.rows.tokens),
        "seconds": schema.pack(run.rows.seconds),
        "p": schema.pack(run.rows.p),
    }


def _harmless(value: Any) -> Any:
    """Copy without logins in the URLs of its texts; its names are calib's own (``tokens`` is no secret)."""
    if isinstance(value, Mapping):
        return {name: _harmless(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_harmless(part) for part in value]
    return entries.without_secrets(value) if isinstance(value, str) else value


def read(conn: sa.Connection, name: str | None, *, rows: bool) -> list[Verification]:
    """See `calib.store.Store.verifications`; none where the table is not there yet."""
    v = schema.verifications
    if not sa.inspect(conn).has_table(v.name):
        return []
    packed = ("questions", "answers", "thinks", "tokens", "seconds", "p")
    columns = [column for column in v.c if rows or column.name not in packed]
    statement = sa.select(*columns).order_by(v.c.n)
    if name is not None:
        statement = statement.where(v.c.name == name)
    return [
        Verification(
            name=found["name"],
            version=found["version"],
            fingerprint=found["fingerprint"],
            arm=found["arm"],
            url=found["url"],
            rate=found["rate"],
            concurrency=found["concurrency"],
            summary=json.loads(found["summary"]),
            rows=_unpacked(found) if rows else None,
            at=found["at"],
        )
        for found in conn.execute(statement).mappings()
    ]


def _unpacked(found: Mapping[Any, Any]) -> VerifiedRows:
    names = tuple((dataset, one) for dataset, one in json.loads(found["questions"]))
    n = len(names)
    return VerifiedRows(
        questions=names,
        answers=np.frombuffer(found["answers"], schema.BUDGET),
        thinks=np.frombuffer(found["thinks"], schema.FLAG).astype(bool),
        tokens=np.frombuffer(found["tokens"], schema.FLOAT),
        seconds=np.frombuffer(found["seconds"], schema.FLOAT),
        p=np.frombuffer(found["p"], schema.FLOAT).reshape(n, -1),
    )

"""Tables of the store, their version and migrations, and how arrays become bytes.

Leaves to others: what is written (`calib.store.entries`), and rows to arrays (`calib.store.loading`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike
from sqlalchemy.dialects import postgresql, sqlite

from calib.errors import CalibError
from calib.questions import Question, text_hash
from calib.store.database import VERSION_TABLE

__all__ = [
    "BUDGET",
    "FLAG",
    "FLOAT",
    "MIGRATIONS",
    "READABLE_FROM",
    "SYSTEM1",
    "ModelRow",
    "answer_key",
    "answers",
    "audits",
    "check_version",
    "failures",
    "insert",
    "looks",
    "models",
    "pack",
    "passes",
    "policies",
    "questions",
    "rates",
    "runs",
    "samples",
    "text_key",
    "timings",
    "unpack",
    "unpack_budgets",
    "upgrade",
    "verifications",
    "version",
]

metadata = sa.MetaData()

SYSTEM1 = -1
"""In ``failures.budget``: System 1 failed, not a think budget."""

FLOAT, BUDGET, FLAG = "<f8", "<i8", "u1"  # little-endian on every machine: a store may be carried around


def _number() -> sa.Column[int]:
    return sa.Column("n", sa.Integer, primary_key=True, autoincrement=True)


def _model() -> sa.Column[int]:
    return sa.Column("model", sa.ForeignKey("models.n"), nullable=False)


_version = sa.Table(VERSION_TABLE, metadata, sa.Column("version", sa.Integer, nullable=False))

models = sa.Table(
    "models",
    metadata,
    _number(),
    sa.Column("fingerprint", sa.Text, nullable=False, unique=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("identity", sa.Text, nullable=False),  # JSON
    sa.Column("threshold", sa.Double, nullable=False),
    sa.Column("mix", sa.Double, nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("thinks_about_scores", sa.Boolean, nullable=False, server_default=sa.false()),
)

questions = sa.Table(
    "questions",
    metadata,
    _number(),
    sa.Column("dataset", sa.Text, nullable=False),
    sa.Column("ext_id", sa.Text, nullable=False),
    sa.Column("text_key", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("n_options", sa.Integer, nullable=False),
    sa.Column("answer", sa.Integer, nullable=False),
    sa.Column("weight", sa.Double, nullable=False),
    sa.Column("grp", sa.Text),  # "group" is a word of SQL
    sa.Column("split_position", sa.Double, nullable=False),
    sa.Column("label_key", sa.Text),  # hash of the list of options; null when their texts are unknown
    sa.Column("state", sa.Text),
    sa.Column("question", sa.Text),
    sa.Column("options", sa.Text),  # JSON
    sa.UniqueConstraint("dataset", "ext_id"),
)

# One row for each ask of one thought. Questions with the same text share it. The arm is part of the key since an arm
# may answer differently (the audit compares); the concurrency is not.
answers = sa.Table(
    "answers",
    metadata,
    _number(),
    _model(),
    sa.Column("key", sa.LargeBinary(32), nullable=False),  # see answer_key
    sa.Column("arm", sa.Text, nullable=False),
    sa.Column("budgets", sa.LargeBinary, nullable=False),
    sa.Column("system1", sa.Boolean, nullable=False),  # whether p1 is there: an ask for both is not one for System 2
    sa.Column("p1", sa.LargeBinary),
    sa.Column("label_mass1", sa.Double),
    sa.Column("p2", sa.LargeBinary, nullable=False),  # (B, C)
    sa.Column("tokens", sa.LargeBinary, nullable=False),  # (B,), NaN where unknown
    sa.Column("finished", sa.LargeBinary, nullable=False),
    sa.Column("label_mass2", sa.LargeBinary, nullable=False),
    sa.Column("thought", sa.Text),
    sa.UniqueConstraint("key", "arm", "budgets", "system1"),
    sa.Index("answers_by_arm", "model", "arm"),
)

# What an arm's own thought took, with its own tokens: a later pass may think longer than the stored answer did.
timings = sa.Table(
    "timings",
    metadata,
    _number(),
    _model(),
    sa.Column("key", sa.LargeBinary(32), nullable=False),
    sa.Column("arm", sa.Text, nullable=False),
    sa.Column("concurrency", sa.Integer, nullable=False),  # 0 = unknown
    sa.Column("pass", sa.Integer, nullable=False),
    sa.Column("budgets", sa.LargeBinary, nullable=False),
    sa.Column("system1", sa.Boolean, nullable=False),
    sa.Column("timed", sa.Boolean, nullable=False),  # whether any second is known
    sa.Column("t1", sa.Double),
    sa.Column("t2", sa.LargeBinary, nullable=False),
    sa.Column("tokens", sa.LargeBinary, nullable=False),
    sa.Column("finished", sa.LargeBinary, nullable=False),
    sa.Column("stages", sa.Text),  # JSON
    sa.UniqueConstraint("key", "arm", "concurrency", "pass", "budgets", "system1"),
    sa.Index("timings_by_arm", "model", "arm"),
)

# One row for each budget (and System 1) without a usable answer, so that a later success takes back exactly its part.
failures = sa.Table(
    "failures",
    metadata,
    _number(),
    _model(),
    sa.Column("key", sa.LargeBinary(32), nullable=False),
    sa.Column("dataset", sa.Text, nullable=False),
    sa.Column("ext_id", sa.Text, nullable=False),
    sa.Column("arm", sa.Text, nullable=False),
    sa.Column("concurrency", sa.Integer, nullable=False),
    sa.Column("budget", sa.Integer, nullable=False),  # SYSTEM1 for System 1
    sa.Column("stage", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("seconds", sa.Double),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("at", sa.Text, nullable=False),
    sa.UniqueConstraint("key", "arm", "concurrency", "budget"),
    sa.Index("failures_by_arm", "model", "arm"),
)

rates = sa.Table(
    "rates",
    metadata,
    _number(),
    _model(),
    sa.Column("arm", sa.Text, nullable=False),
    sa.Column("system1_s", sa.Double, nullable=False),
    sa.Column("tokens_per_second", sa.Double, nullable=False),
    sa.Column("read_s", sa.Double, nullable=False),
    sa.UniqueConstraint("model", "arm"),
)

policies = sa.Table(
    "policies",
    metadata,
    _number(),
    sa.Column("name", sa.Text, nullable=False, index=True),
    sa.Column("document", sa.Text, nullable=False),  # JSON
    sa.Column("at", sa.Text, nullable=False),
)

looks = sa.Table(
    "looks",
    metadata,
    _number(),
    sa.Column("split_id", sa.Text, nullable=False),
    sa.Column("k", sa.Integer, nullable=False),
    sa.Column("document", sa.Text, nullable=False),  # JSON
    sa.Column("at", sa.Text, nullable=False),
    sa.UniqueConstraint("split_id", "k"),
)

runs = sa.Table(
    "runs",
    metadata,
    _number(),
    sa.Column("arguments", sa.Text, nullable=False),  # JSON
    sa.Column("at", sa.Text, nullable=False),
)

# Questions that a staged collection may think about, and the round in which it chose to. See calib.sampling.
samples = sa.Table(
    "samples",
    metadata,
    _number(),
    _model(),
    sa.Column("question", sa.ForeignKey("questions.n"), nullable=False),
    sa.Column("part", sa.Text, nullable=False),  # of the questions that one of several collectors asks; "" for all
    sa.Column("test", sa.Boolean, nullable=False),
    sa.Column("band", sa.Integer, nullable=False),
    sa.Column("wrong", sa.Boolean, nullable=False),  # System 1's answer
    sa.Column("round", sa.Integer, nullable=False),  # 0 until it is chosen
    sa.UniqueConstraint("model", "question"),
)

# A latency pass: timings with its arm, concurrency and number belong to it.
passes = sa.Table(
    "passes",
    metadata,
    _number(),
    _model(),
    sa.Column("arm", sa.Text, nullable=False),
    sa.Column("concurrency", sa.Integer, nullable=False),
    sa.Column("pass", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),  # open, done, void
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("hit_rate", sa.Double),  # of the prefix cache; null where unknown
    sa.Column("at", sa.Text, nullable=False),
    sa.UniqueConstraint("model", "arm", "concurrency", "pass"),
)

# Answers that were asked for an audit alone: never part of the outcomes. And marks of stored answers that failed one.
audits = sa.Table(
    "audits",
    metadata,
    _number(),
    _model(),
    sa.Column("key", sa.LargeBinary(32), nullable=False),  # of the question as it is stored, see answer_key
    sa.Column("dataset", sa.Text, nullable=False),
    sa.Column("ext_id", sa.Text, nullable=False),
    sa.Column("arm", sa.Text, nullable=False),
    sa.Column("audit", sa.Text, nullable=False),  # rotated, seed, load; replaced: a mark
    sa.Column("variant", sa.Integer, nullable=False),  # places rotated by, seeds further, requests in flight
    sa.Column("p1", sa.LargeBinary),  # in the order of the stored options
    sa.Column("budget", sa.Integer),
    sa.Column("p2", sa.LargeBinary),
    sa.Column("at", sa.Text, nullable=False),
    sa.UniqueConstraint("model", "key", "arm", "audit", "variant"),
)

# Runs of `calib verify`: what a plain client got from a server under a policy, one row each.
verifications = sa.Table(
    "verifications",
    metadata,
    _number(),
    sa.Column("at", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),  # of the policy
    sa.Column("version", sa.Text, nullable=False),  # hash of all that the policy says
    sa.Column("fingerprint", sa.Text, nullable=False),  # of the model that the server said to be
    sa.Column("arm", sa.Text, nullable=False),
    sa.Column("url", sa.Text, nullable=False),  # without credentials
    sa.Column("rate", sa.Double),  # requests/s; null for a fixed number in flight
    sa.Column("concurrency", sa.Integer),  # null at a rate
    sa.Column("summary", sa.Text, nullable=False),  # JSON
    sa.Column("questions", sa.Text, nullable=False),  # JSON, (dataset, id) of each
    sa.Column("answers", sa.LargeBinary, nullable=False),  # (N,), -1 without a usable one
    sa.Column("thinks", sa.LargeBinary, nullable=False),
    sa.Column("tokens", sa.LargeBinary, nullable=False),
    sa.Column("seconds", sa.LargeBinary, nullable=False),  # of a failure: until it was given up
    sa.Column("p", sa.LargeBinary, nullable=False),  # (N, C), NaN without an answer, 0 at padded options
    sa.Index("verifications_by_name", "name"),
)


@dataclass(frozen=True)
class ModelRow:
    """A registered model.

    Attributes
    ----------
    n : int
        Its number in the store.
    fingerprint, name : str
    threshold, mix : float
        The server's own defaults.
    simulated : bool
        Whether no real model answers.
    thinks_about_scores : bool
        Whether questions of the kind score can be thought about.
    """

    n: int
    fingerprint: str
    name: str
    threshold: float
    mix: float
    simulated: bool
    thinks_about_scores: bool


# --- version ----------------------------------------------------------------------------------------------------------


def _create(conn: sa.Connection) -> None:
    metadata.create_all(conn)


def _add_stages(conn: sa.Connection) -> None:
    for table in (samples, passes, audits):
        table.create(conn, checkfirst=True)


def _add_thinks_about_scores(conn: sa.Connection) -> None:
    name = models.c.thinks_about_scores.name
    if name not in {column["name"] for column in sa.inspect(conn).get_columns(models.name)}:
        conn.execute(sa.text(f"ALTER TABLE {models.name} ADD COLUMN {name} BOOLEAN DEFAULT false NOT NULL"))


def _add_verifications(conn: sa.Connection) -> None:
    verifications.create(conn, checkfirst=True)


MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (
    _create,
    _add_stages,
    _add_thinks_about_scores,
    _add_verifications,
)
"""Step i brings a store from version i to i + 1. Append, never edit. The first makes the tables as they are now, so a
later step looks first (``sqlalchemy.inspect``) whether a new store has its change already."""

READABLE_FROM = 3
"""Oldest version that can be read as it is: what came later are whole tables, and one that is absent is empty."""


def version(conn: sa.Connection) -> int:
    """Version of the schema in a database; 0 when calib has no tables there."""
    if not sa.inspect(conn).has_table(_version.name):
        return 0
    return int(conn.execute(sa.select(_version.c.version)).scalar_one_or_none() or 0)


def check_version(found: int, where: str, *, read_only: bool = False) -> None:
    """Refuse a store that a newer calib has written; one that is too old to be read as it is, where nothing is written.

    Raises
    ------
    CalibError
    """
    if found > len(MIGRATIONS):
        raise CalibError(
            f"{where}: the store has schema version {found}, this calib knows up to {len(MIGRATIONS)}; "
            "upgrade: pip install --upgrade calib-decide"
        )
    if read_only and 0 < found < READABLE_FROM:
        raise CalibError(
            f"{where}: the store has schema version {found}; read-only, nothing is written, and this calib reads from "
            f"version {READABLE_FROM} on as it is. Bring the store up to date once: calib status --store {where}"
        )


def upgrade(conn: sa.Connection, where: str) -> None:
    """Run the missing migrations; ``conn`` is in a transaction that keeps other writers out.

    Raises
    ------
    CalibError
        When a newer calib has written the store.
    """
    if conn.dialect.name == "postgresql":  # creating a table is no lock there: two processes would collide
        conn.execute(sa.text("SELECT pg_advisory_xact_lock(4711)"))
    found = version(conn)
    check_version(found, where)
    for step in MIGRATIONS[found:]:
        step(conn)
    if found < len(MIGRATIONS):
        conn.execute(_version.delete())
        conn.execute(_version.insert().values(version=len(MIGRATIONS)))


# --- keys and bytes ---------------------------------------------------------------------------------------------------


def text_key(question: Question) -> str:
    """Hash of all that a model sees; of dataset and id for an imported question whose text is unknown ("")."""
    if question.question:
        return text_hash(question)
    named = f"{len(question.dataset)}:{question.dataset}{question.id}"
    return hashlib.sha256(f"no text:{named}".encode()).hexdigest()


def answer_key(text_key: str, fingerprint: str) -> bytes:
    """Hash of all that can change an answer: the text and the model with everything that belongs to it."""
    return hashlib.sha256(f"{text_key}:{fingerprint}".encode()).digest()


def pack(values: ArrayLike, dtype: str = FLOAT) -> bytes:
    """Bytes of an array, little-endian, without its shape; float64 comes back exactly."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def unpack(blobs: Sequence[bytes], dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Array of shape (rows, *shape) from one packed array a row."""
    return np.frombuffer(b"".join(blobs), dtype=dtype).reshape(len(blobs), *shape)


def unpack_budgets(blob: bytes) -> tuple[int, ...]:
    """Think budgets of one row."""
    return tuple(np.frombuffer(blob, dtype=BUDGET).tolist())


_Insert = TypeVar("_Insert", bound=sa.Insert)


def insert(
    conn: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]], *, replace_by: Sequence[str] = ()
) -> None:
    """Insert rows; one that is there already stays, or is replaced when its unique columns are named."""
    if not rows:
        return
    statement = (postgresql if conn.dialect.name == "postgresql" else sqlite).insert(table)
    if replace_by:
        changed = {name: statement.excluded[name] for name in rows[0] if name not in replace_by}
        conn.execute(statement.on_conflict_do_update(index_elements=list(replace_by), set_=changed), list(rows))
    else:
        conn.execute(statement.on_conflict_do_nothing(), list(rows))

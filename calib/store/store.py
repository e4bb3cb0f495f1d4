"""`Store`: rows on disk, written by several processes at once; `load_outcomes` turns them into arrays.

SQLite (a file, WAL) by default, PostgreSQL by URL. Nothing secret is stored or shown: a database's password stays in
its URL. Leaves to others: the tables (`calib.schema`), rows to arrays (`calib.loading`), what to ask (`calib.collect`).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from calib.engine.base import EngineInfo
from calib.errors import CalibError
from calib.latency import RateModel
from calib.outcomes import Outcomes
from calib.questions import Question
from calib.store import database, entries, holdings, schema, staging, verifications
from calib.store.entries import Answered, Failed
from calib.store.holdings import Covered, SavedPolicy, StoreStatus
from calib.store.loading import read_outcomes
from calib.store.schema import ModelRow
from calib.store.staging import AuditAnswer, LatencyPass, Planned, StoredAnswer
from calib.store.verifications import Verification

__all__ = ["Store", "load_outcomes"]

DEFAULT_LOCATION = "calib.db"


class Store:
    """Questions, answers, timings, failures, policies and the ledger of one project.

    Open it by `Store.open`, close it by `close` or as a context manager. One store may be used by several threads, and
    one database by several processes.
    """

    def __init__(self, engine: sa.Engine, location: str, *, read_only: bool = False) -> None:
        self.location = location
        """Path or URL without a password, for messages."""
        self.read_only = read_only
        """Whether whatever would write is refused."""
        self._engine = engine
        self._writer = engine.execution_options(writes=True)
        self._lock = threading.RLock()
        self._open: sa.Connection | None = None
        self._numbers: dict[str, int] = {}

    @classmethod
    def open(
        cls, location: str | os.PathLike[str] | None = None, *, must_exist: bool = False, read_only: bool = False
    ) -> Store:
        """Open a store, made when absent, migrated when it is of an older version.

        Parameters
        ----------
        location : str or path, optional
            File, or URL such as ``postgresql+psycopg://user@host/database``; the environment variable CALIB_STORE,
            else ``calib.db``, when left out.
        must_exist : bool, default False
            Whether to refuse to make a new one.
        read_only : bool, default False
            Whether to write nothing, ever: an older store is read as it is, or refused where it is too old for that;
            one that is absent is refused.

        Raises
        ------
        CalibError
            No store there (with ``must_exist`` or ``read_only``), not a database, a newer version, a database out of
            reach, an older version that cannot be read without writing.
        """
        given = os.fspath(location) if location is not None else os.environ.get("CALIB_STORE") or DEFAULT_LOCATION
        url, shown = database.url_of(given)
        must_exist = must_exist or read_only
        if must_exist and url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
            raise CalibError(database.absent(shown))
        store = cls(database.engine_of(url, shown, read_only=read_only), shown, read_only=read_only)
        try:
            store._prepare(must_exist)
        except BaseException:
            store.close()
            raise
        return store

    def _prepare(self, must_exist: bool) -> None:
        with self._reading() as conn:
            found = schema.version(conn)
            schema.check_version(found, self.location, read_only=self.read_only)
            strange = () if found or conn.dialect.name != "sqlite" else sa.inspect(conn).get_table_names()
        if strange:
            raise CalibError(
                f"{self.location}: an SQLite file with tables of something else ({', '.join(sorted(strange)[:3])}), no "
                "store of calib; name another file by --store"
            )
        if found == 0 and must_exist:
            raise CalibError(database.absent(self.location))
        if found < len(schema.MIGRATIONS) and not self.read_only:
            with self._writing() as conn:
                schema.upgrade(conn, self.location)

    def close(self) -> None:
        """Give back the connections."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.location!r})"

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Name the store when the database itself fails: out of reach, no database, read-only, a full disk."""
        try:
            yield
        except sa.exc.DatabaseError as error:
            if type(error) not in (sa.exc.DatabaseError, sa.exc.OperationalError):
                raise  # a row that breaks a rule is a mistake in calib
            if "file is not a database" in str(error.orig):
                raise CalibError(
                    f"{self.location}: not a store of calib, nor any SQLite file; name another file by --store"
                ) from None
            reason = str(error.orig).strip().replace(str(self._engine.url.password or "\0"), "***")
            raise CalibError(f"{self.location}: the database failed: {reason}", exit_code=1) from None

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        """One consistent view; inside `transaction`, with what it wrote."""
        with self._lock:
            if self._open is not None:
                yield self._open
                return
        with self._outside(), self._engine.connect() as conn:
            if conn.dialect.name == "postgresql":  # SQLite's transactions see one snapshot anyway
                conn = conn.execution_options(isolation_level="REPEATABLE READ")
            with conn.begin():
                yield conn

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        if self.read_only:
            raise CalibError(f"{self.location}: was opened read-only, so nothing is written")
        with self._lock:
            if self._open is not None:
                yield self._open
                return
            with self._outside(), database.begin(self._writer) as conn:
                self._open = conn
                try:
                    yield conn
                    conn.commit()
                finally:
                    self._open = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all writes inside one transaction: all of them are kept, or after an exception none."""
        with self._writing():
            yield

    # --- models and questions ---

    def register_model(self, info: EngineInfo) -> str:
        """Remember who answers; return its fingerprint.

        Registering again updates the name and the server's own threshold and mix, which change no answer.
        """
        row = {
            "fingerprint": info.fingerprint,
            "name": info.model,
            "identity": info.canonical_identity,
            "threshold": float(info.threshold),
            "mix": float(info.mix),
            "simulated": info.simulated,
            "thinks_about_scores": info.thinks_about_scores,
        }
        with self._writing() as conn:
            schema.insert(conn, schema.models, [row], replace_by=["fingerprint"])
        return info.fingerprint

    def models(self) -> list[ModelRow]:
        """Registered models, in the order of registration."""
        with self._reading() as conn:
            return _models(conn)

    def identity(self, fingerprint: str) -> dict[str, Any]:
        """All that can change an answer of a registered model; empty for one that is not there."""
        with self._reading() as conn:
            table = schema.models
            found = conn.execute(sa.select(table.c.identity).where(table.c.fingerprint == fingerprint)).scalar()
        return {} if found is None else dict(json.loads(found))

    def _number(self, conn: sa.Connection, fingerprint: str) -> int:
        if fingerprint not in self._numbers:
            found = conn.execute(sa.select(schema.models.c.n).where(schema.models.c.fingerprint == fingerprint))
            number = found.scalar_one_or_none()
            if number is None:
                raise CalibError(f"{self.location}: no model with the fingerprint {fingerprint}; register it first")
            self._numbers[fingerprint] = int(number)
        return self._numbers[fingerprint]

    def add_questions(self, questions: Iterable[Question], *, keep_text: bool = True) -> int:
        """Add questions; those that are there stay as they are, but for their weight.

        Parameters
        ----------
        questions : iterable of Question
            Each with its answer. An empty ``question`` text says that the text is unknown (imports).
        keep_text : bool, default True
            False keeps hashes and numbers only.

        Returns
        -------
        int
            How many are new.

        Raises
        ------
        CalibError
            A question without an answer; the same dataset and id with another text, answer or group.
        """
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for question in questions:
            row = entries.question_row(question, keep_text)
            earlier = rows.setdefault((question.dataset, question.id), row)
            entries.refuse_change(self.location, earlier, row)
        with self._writing() as conn:
            present = _present(conn, {dataset for dataset, _ in rows})
            new, weights = [], []
            for name, row in rows.items():
                if name not in present:
                    new.append(row)
                    continue
                entries.refuse_change(self.location, present[name], row)
                if present[name]["weight"] != row["weight"]:
                    weights.append({"dataset_": name[0], "id_": name[1], "weight_": row["weight"]})
            schema.insert(conn, schema.questions, new)
            if weights:
                q = schema.questions
                which = (q.c.dataset == sa.bindparam("dataset_")) & (q.c.ext_id == sa.bindparam("id_"))
                conn.execute(q.update().where(which).values(weight=sa.bindparam("weight_")), weights)
        return len(new)

    def questions(self, datasets: Sequence[str] | None = None) -> list[Question]:
        """Questions whose text is kept, by dataset, in the order in which they were added."""
        q = schema.questions
        statement = sa.select(q).where(q.c.question.is_not(None)).order_by(q.c.n)
        if datasets is not None:
            statement = statement.where(q.c.dataset.in_(datasets))
        with self._reading() as conn:
            rows = conn.execute(statement).all()
        found = [
            Question(
                id=row.ext_id,
                dataset=row.dataset,
                kind=row.kind,
                state=row.state,
                question=row.question,
                options=tuple(json.loads(row.options)),
                answer=row.answer,
                weight=row.weight,
                group=row.grp,
            )
            for row in rows
        ]
        return sorted(found, key=lambda question: question.dataset)

    # --- answers ---

    def write(
        self,
        fingerprint: str,
        records: Sequence[Answered | Failed],
        *,
        keep_text: bool = True,
        timings_only: bool = False,
    ) -> None:
        """Write answers and failures in one transaction; what is there already stays, a success ends its failure.

        Parameters
        ----------
        fingerprint : str
            From `register_model`.
        records : sequence of Answered or Failed
            In the order in which they happened.
        keep_text : bool, default True
            Whether to keep thoughts.
        timings_only : bool, default False
            Whether to keep only the seconds of answers.
        """
        answers: list[dict[str, Any]] = []
        timings: list[dict[str, Any]] = []
        failures: dict[tuple[bytes, str, int, int], dict[str, Any]] = {}  # by key, arm, concurrency, budget
        ended: set[tuple[bytes, str, int, int]] = set()
        now = entries.now()
        with self._writing() as conn:
            model = self._number(conn, fingerprint)
            for record in records:
                key = schema.answer_key(schema.text_key(record.question), fingerprint)
                where = (key, record.arm, record.concurrency)
                if isinstance(record, Failed):
                    row = entries.failure_row(record, model, key, now)
                    failures |= {(*where, budget): row | {"budget": budget} for budget in record.asked}
                    continue
                answers.append(entries.answer_row(record, model, key, keep_text))
                timings.append(entries.timing_row(record, model, key))
                system1 = () if record.answer.p1 is None else (schema.SYSTEM1,)
                done = {(*where, budget) for budget in system1 + tuple(record.answer.budgets)}
                ended |= done
                for name in done & failures.keys():
                    del failures[name]
            _end_failures(conn, model, ended)
            schema.insert(conn, schema.answers, [] if timings_only else answers)
            schema.insert(conn, schema.timings, timings)
            unique = ["key", "arm", "concurrency", "budget"]
            schema.insert(conn, schema.failures, list(failures.values()), replace_by=unique)

    def set_rates(self, fingerprint: str, arm: str, model: RateModel) -> None:
        """Give an arm rates for the seconds that nobody measured; newer ones replace older ones."""
        with self._writing() as conn:
            row = {"model": self._number(conn, fingerprint), "arm": arm, **asdict(model)}
            schema.insert(conn, schema.rates, [row], replace_by=["model", "arm"])

    def coverage(self, fingerprint: str, arm: str, *, concurrency: int | None = None) -> dict[tuple[str, str], Covered]:
        """What one arm has answered, by (dataset, id); questions without anything are left out.

        Parameters
        ----------
        fingerprint, arm : str
        concurrency : int, optional
            Count only timings and failures at this load.
        """
        with self._reading() as conn:
            return holdings.coverage(conn, self._number(conn, fingerprint), fingerprint, arm, concurrency)

    def status(self) -> StoreStatus:
        """What the store holds, and what failed and why."""
        with self._reading() as conn:
            q = schema.questions
            counted = sa.select(q.c.dataset, sa.func.count()).group_by(q.c.dataset)
            runs = conn.execute(sa.select(schema.runs).order_by(schema.runs.c.n)).all()
            return StoreStatus(
                location=self.location,
                schema_version=schema.version(conn),
                questions=dict(sorted((dataset, n) for dataset, n in conn.execute(counted))),
                models=[holdings.model_status(conn, model) for model in _models(conn)],
                policies=holdings.saved_policies(conn),
                runs=[{"at": run.at, "arguments": json.loads(run.arguments)} for run in runs],
                verifications=[
                    {
                        "name": run.name,
                        "arm": run.arm,
                        "url": run.url,
                        "verdict": run.summary.get("verdict"),
                        "at": run.at,
                    }
                    for run in verifications.read(conn, None, rows=False)
                ],
            )

    # --- staged collections, latency passes, audits ---

    def _model(self, conn: sa.Connection, fingerprint: str) -> ModelRow:
        number = self._number(conn, fingerprint)
        return next(model for model in _models(conn) if model.n == number)

    def plan(self, fingerprint: str, rows: Iterable[Planned]) -> None:
        """Enter questions that may be thought about; one that is there keeps its stratum and its round."""
        with self._writing() as conn:
            staging.plan(conn, self._number(conn, fingerprint), rows)

    def choose(self, fingerprint: str, names: Iterable[tuple[str, str]], number: int) -> None:
        """Write down the round in which these questions, (dataset, id), were chosen to be thought about."""
        with self._writing() as conn:
            staging.choose(conn, self._number(conn, fingerprint), names, number)

    def planned(self, fingerprint: str) -> list[Planned]:
        """Questions that a staged collection may think about, in the order in which they were entered."""
        with self._reading() as conn:
            return staging.planned(conn, self._number(conn, fingerprint))

    def open_pass(self, fingerprint: str, arm: str, concurrency: int) -> int:
        """Number of the arm's latency pass that is open at this load, or of a new one."""
        with self._writing() as conn:
            return staging.open_pass(conn, self._number(conn, fingerprint), arm, concurrency)

    def set_pass(self, fingerprint: str, found: LatencyPass) -> None:
        """Write down what became of a latency pass."""
        with self._writing() as conn:
            staging.set_pass(conn, self._number(conn, fingerprint), found)

    def passes(self, fingerprint: str) -> list[LatencyPass]:
        """Latency passes, in the order in which they began."""
        with self._reading() as conn:
            return staging.passes(conn, self._number(conn, fingerprint))

    def timed_in_pass(self, fingerprint: str, arm: str, concurrency: int, number: int) -> set[tuple[str, str]]:
        """Questions, (dataset, id), whose seconds a latency pass holds."""
        with self._reading() as conn:
            return staging.timed_in_pass(conn, self._model(conn, fingerprint), arm, concurrency, number)

    def answers(self, fingerprint: str) -> list[StoredAnswer]:
        """Every ask, in the order in which they were written: more than the outcomes, which hold one a question."""
        with self._reading() as conn:
            return list(staging.answers(conn, self._model(conn, fingerprint)))

    def own_thoughts(self, fingerprint: str) -> list[tuple[str, tuple[int, ...], NDArray[np.float64]]]:
        """Arm, budgets and tokens, shape (B,), of every thought that was run."""
        with self._reading() as conn:
            return list(staging.own_thoughts(conn, self._model(conn, fingerprint)))

    def add_audits(self, fingerprint: str, rows: Sequence[tuple[Question, AuditAnswer]]) -> None:
        """Enter answers that were asked for an audit, each with its question as it is stored."""
        with self._writing() as conn:
            keyed = [(schema.text_key(question), row) for question, row in rows]
            staging.add_audits(conn, self._model(conn, fingerprint), keyed)

    def audits(self, fingerprint: str) -> list[AuditAnswer]:
        """Answers that were asked for audits."""
        with self._reading() as conn:
            return staging.audits(conn, self._number(conn, fingerprint))

    # --- policies, ledger, runs ---

    def save_policy(self, name: str, document: Mapping[str, Any]) -> None:
        """Save a policy document under a name; earlier ones are kept as its history."""
        with self._writing() as conn:
            row = {"name": name, "document": entries.as_json(document), "at": entries.now()}
            conn.execute(schema.policies.insert(), row)

    def policy(self, name: str) -> dict[str, Any]:
        """Newest document under this name; a `CalibError` lists the names."""
        saved = {policy.name: policy.document for policy in self.policies()}
        if name not in saved:
            there = f"there are: {', '.join(saved)}" if saved else "none is saved yet: run calib optimize --name NAME"
            raise CalibError(f"{self.location}: no policy {name!r}; {there}")
        return saved[name]

    def policies(self) -> list[SavedPolicy]:
        """Newest document of each name, by name."""
        with self._reading() as conn:
            return holdings.saved_policies(conn)

    def record_look(self, split_id: str, document: Mapping[str, Any]) -> int:
        """Enter a look at a test split in the ledger; return its number: 1, 2, 3, ..., each given to one look.

        The same look again (an equal document) learns nothing new: it keeps its number.

        Parameters
        ----------
        split_id : str
            Identity of the split's test questions.
        document : mapping
            What was looked at: policy, targets.
        """
        with self._writing() as conn:
            if conn.dialect.name == "postgresql":  # several writers at once: keep them out until the commit
                conn.execute(sa.text("LOCK TABLE looks IN SHARE ROW EXCLUSIVE MODE"))
            text, table = entries.as_json(document), schema.looks
            same = sa.select(table.c.k).where(table.c.split_id == split_id, table.c.document == text)
            known = conn.execute(same).scalar()
            if known is not None:
                return int(known)
            k = _looks(conn, split_id) + 1
            conn.execute(table.insert(), {"split_id": split_id, "k": k, "document": text, "at": entries.now()})
        return k

    def looks(self, split_id: str) -> int:
        """How often this test split was looked at."""
        with self._reading() as conn:
            return _looks(conn, split_id)

    def add_verification(self, run: Verification) -> None:
        """Keep a run of ``calib verify``, without credentials in its URL."""
        with self._writing() as conn:
            conn.execute(schema.verifications.insert(), verifications.row(run))

    def verifications(self, name: str | None = None, *, rows: bool = False) -> list[Verification]:
        """Runs of ``calib verify``, in their order.

        Parameters
        ----------
        name : str, optional
            Only those of the policies of this name.
        rows : bool, default False
            Whether to read what was answered to each question as well.
        """
        with self._reading() as conn:
            return verifications.read(conn, name, rows=rows)

    def text_keys(self) -> dict[tuple[str, str], str]:
        """Hash of the text of every question, by (dataset, id); see `schema.text_key`."""
        q = schema.questions
        statement = sa.select(q.c.dataset, q.c.ext_id, q.c.text_key)
        with self._reading() as conn:
            return {(dataset, name): key for dataset, name, key in conn.execute(statement)}

    def record_run(self, arguments: Mapping[str, Any]) -> None:
        """Remember what a collect run was told, without what may be secret: keys, tokens, logins in URLs."""
        with self._writing() as conn:
            harmless = entries.as_json(entries.without_secrets(arguments))
            conn.execute(schema.runs.insert(), {"arguments": harmless, "at": entries.now()})

    def runs(self) -> list[dict[str, Any]]:
        """What collect runs were told (`record_run`), the newest first."""
        with self._reading() as conn:
            told = conn.execute(sa.select(schema.runs.c.arguments).order_by(schema.runs.c.n.desc())).scalars()
            return [dict(json.loads(text)) for text in told]


def load_outcomes(
    store: Store | str | os.PathLike[str] | None = None,
    *,
    model: str | None = None,
    datasets: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    arms: Sequence[str] | None = None,
    concurrency: int | None = None,
    void_passes: bool = False,
) -> Outcomes:
    """Outcomes of one model from a store.

    Parameters
    ----------
    store : Store, str or path, optional
        An open store, or where it is (see `Store.open`).
    model : str, optional
        Name, or the start of the fingerprint; needed when the store holds several.
    datasets, arms : sequence of str, optional
        All when left out.
    budgets : sequence of int, optional
        Those that about all questions have, when left out; ``warnings`` names the others. Questions that lack any of
        the kept budgets are left out and counted in ``warnings``.
    concurrency : int, optional
        Load at which seconds were taken; needed when an arm was timed at several.
    void_passes : bool, default False
        Whether seconds of latency passes count that were disturbed.

    Raises
    ------
    CalibError
        Nothing there, several models or loads, or a dataset, budget or arm that was not collected.

    Notes
    -----
    Answers are shared between arms: those of the arm ``base`` (else of the first by name), per question those of
    another arm where it has none. Seconds are each arm's own. A second that was not measured comes, in this order,
    from the same thought having ended within a smaller budget, from the arm's rates, or from a line fitted to its
    measured seconds with a residual resampled (``estimated`` says so), else it is NaN.

    Where a staged collection thought about a part of the questions, the others are left out, counted in ``warnings``,
    and those that are there weigh as many questions as they stand for (`calib.sampling.presented`).
    """
    opened = store if isinstance(store, Store) else Store.open(store, must_exist=True)
    try:
        with opened._reading() as conn:
            chosen = _choose(_models(conn, answered=True), model, opened.location)
            return read_outcomes(
                conn,
                chosen,
                where=opened.location,
                datasets=datasets,
                budgets=budgets,
                arms=arms,
                concurrency=concurrency,
                void_passes=void_passes,
            )
    finally:
        if opened is not store:
            opened.close()


def _models(conn: sa.Connection, *, answered: bool = False) -> list[ModelRow]:
    m = schema.models
    columns = (m.c.n, m.c.fingerprint, m.c.name, m.c.threshold, m.c.mix, m.c.simulated, m.c.thinks_about_scores)
    statement = sa.select(*columns).order_by(m.c.n)
    if answered:
        statement = statement.where(sa.exists().where(schema.answers.c.model == m.c.n))
    return [ModelRow(*row) for row in conn.execute(statement)]


def _choose(models: Sequence[ModelRow], wanted: str | None, where: str) -> ModelRow:
    if not models:
        raise CalibError(
            f"{where}: holds no answers yet; fill it: calib collect QUESTIONS --arm base=URL, or calib import FILE"
        )
    there = ", ".join(f"{model.name} ({model.fingerprint[:12]})" for model in models)
    found = list(models)
    if wanted is not None:
        named = [model for model in models if model.name == wanted]
        found = named or [model for model in models if wanted and model.fingerprint.startswith(wanted)]
    if not found:
        raise CalibError(f"{where}: no answers of a model {wanted!r}; there are: {there}")
    if len(found) > 1:
        raise CalibError(
            f"{where}: holds answers of several models, which never mix: {there}; "
            "choose one by its name or the start of its fingerprint: --model "
            + (found[0].fingerprint[:12] if wanted is not None else repr(found[0].name))
        )
    return found[0]


def _present(conn: sa.Connection, datasets: set[str]) -> dict[tuple[str, str], Mapping[str, Any]]:
    q = schema.questions
    columns = [q.c.dataset, q.c.ext_id, q.c.weight, *(q.c[name] for name in entries.FIXED)]
    found = conn.execute(sa.select(*columns).where(q.c.dataset.in_(sorted(datasets)))).mappings()
    return {(row["dataset"], row["ext_id"]): dict(row) for row in found}


def _end_failures(conn: sa.Connection, model: int, ended: set[tuple[bytes, str, int, int]]) -> None:
    """Delete the failures that a success at the same load ends; usually there are none."""
    f = schema.failures
    columns = (f.c.n, f.c.key, f.c.arm, f.c.concurrency, f.c.budget)
    rows = conn.execute(sa.select(*columns).where(f.c.model == model)).all()
    gone = [{"n_": n} for n, *name in rows if tuple(name) in ended]
    if gone:
        conn.execute(f.delete().where(f.c.n == sa.bindparam("n_")), gone)


def _looks(conn: sa.Connection, split_id: str) -> int:
    table = schema.looks
    return int(conn.execute(sa.select(sa.func.max(table.c.k)).where(table.c.split_id == split_id)).scalar() or 0)

"""Opening a database: its URL, how messages show it, and how SQLite is told to serve several processes.

Leaves to others: what is in it (`calib.store.schema`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from calib.errors import CalibError

__all__ = ["PATIENCE_S", "absent", "begin", "engine_of", "url_of"]

PATIENCE_S = 60.0
"""How long a writer waits for another one."""


VERSION_TABLE = "calib_schema"
"""Table by which a database is known as a store."""


def url_of(given: str) -> tuple[sa.URL, str]:
    """URL of a database, and how messages show it: without password and query."""
    if "://" not in given:
        return sa.URL.create("sqlite", database=given), given
    if given.partition("://")[2].partition("/")[0].count("@") > 1:
        raise CalibError("--store: the login in the URL holds an @; write it as %40 (any other @ ends the login)")
    try:
        url = sa.make_url(given)
    except (sa.exc.ArgumentError, ValueError):
        raise CalibError("--store: not a URL that can be read; write postgresql+psycopg://USER@HOST/DATABASE") from None
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("postgresql+psycopg", "sqlite"):
        raise CalibError(
            f"--store: databases of the kind {url.drivername!r} are not supported; "
            "give a file, or postgresql+psycopg://USER@HOST/DATABASE"
        )
    shown = url.set(query={}).render_as_string(hide_password=True)
    return url, (url.database or "") if url.drivername == "sqlite" else shown


def engine_of(url: sa.URL, shown: str, *, read_only: bool = False) -> sa.Engine:
    """SQLAlchemy engine; its connections with the option ``writes`` take the writer's lock when they begin.

    With ``read_only`` the database itself refuses whatever would write.
    """
    if url.get_backend_name() != "sqlite":
        told = {"options": "-c default_transaction_read_only=on"} if read_only else {}
        try:
            return sa.create_engine(url, pool_pre_ping=True, connect_args=told)
        except ModuleNotFoundError:
            raise CalibError(f"{shown}: PostgreSQL needs a driver: pip install 'calib-decide[postgres]'") from None
    folder = Path(url.database or "").resolve().parent
    if not folder.is_dir():
        raise CalibError(f"{shown}: the folder {folder} does not exist; make it first: mkdir -p {folder}")
    engine = sa.create_engine(url, connect_args={"timeout": PATIENCE_S})

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the module would begin transactions by itself, and too late: see below
        if read_only:
            connection.execute("PRAGMA query_only=ON")
            return
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables or VERSION_TABLE in tables:  # a file of something else stays as it is
            _patiently(connection, "PRAGMA journal_mode=WAL")  # readers and a writer do not block each other
        connection.execute("PRAGMA synchronous=NORMAL")  # with WAL: a killed process loses nothing, a power cut may

    @sa.event.listens_for(engine, "begin")
    def begun(conn: sa.Connection) -> None:
        # a writer takes its lock at once: upgrading a reader's would fail when another one wrote in between
        conn.exec_driver_sql("BEGIN IMMEDIATE" if conn.get_execution_options().get("writes") else "BEGIN")

    return engine


def _patiently(connection: Any, statement: str) -> None:
    """Run a statement that SQLite refuses at once, without its timeout, while another process changes the mode."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection.execute(statement)
        except connection.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def absent(shown: str) -> str:
    """What to say when there is no store, and what to type next."""
    return (
        f"{shown}: no store there; name another one by --store or CALIB_STORE, or fill this one: "
        f"calib collect QUESTIONS --arm base=URL --store {shown}, or calib import FILE --store {shown}"
    )


def begin(engine: sa.Engine) -> sa.Connection:
    """Connection in a transaction; of an SQLite file no other writer is in one."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        conn = engine.connect()
        try:
            conn.begin()
        except sa.exc.OperationalError as error:
            conn.close()
            if "locked" not in str(error.orig) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        except BaseException:
            conn.close()
            raise
        else:
            return conn

"""Where studies are kept: any database that Optuna knows, opened for several processes, and shown without secrets.

Leaves to `calib.study` what is in it. Optuna is imported when a storage is opened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from calib.errors import CalibError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, RDBStorage

__all__ = ["PATIENCE_S", "default_storage", "opened", "patiently", "shown"]

PATIENCE_S = 60.0
"""How long a process waits for another one that writes the same SQLite storage."""

_RACES = ("locked", "already exists", "unique constraint", "duplicate key")
"""What a database says when another process made the same table or row, or is writing."""

T = TypeVar("T")


def default_storage(store: str | os.PathLike[str]) -> str:
    """Storage of the studies that belong to a store: an SQLite file beside a file, the same database for a URL."""
    text = os.fspath(store)
    return text if "://" in text else f"sqlite:///{text}.studies.db"


def shown(storage: str) -> str:
    """URL of a storage without password and query."""
    return _url(storage).set(query={}).render_as_string(hide_password=True)


@contextmanager
def opened(storage: str | None) -> Iterator[BaseStorage]:
    """Storage by URL or SQLite file, in memory for None; closed afterwards.

    Raises
    ------
    CalibError
        A URL that cannot be read, a driver that is missing, or a database that fails, here or while it is open.
    """
    from optuna.exceptions import StorageInternalError
    from optuna.storages import InMemoryStorage

    if storage is None:
        yield InMemoryStorage()
        return
    url = _url(storage)
    name = shown(storage)
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        yield InMemoryStorage()  # SQLite's own memory would be another one for each thread
        return
    rdb: RDBStorage | None = None
    try:
        rdb = patiently(lambda: _open(url))
        yield rdb
    except ImportError as error:
        raise CalibError(f"--storage {name}: {_driver(url)}") from error
    except (sa.exc.SQLAlchemyError, StorageInternalError) as error:
        raise CalibError(f"--storage {name}: {_reason(error, url)}", exit_code=1) from error
    finally:
        if rdb is not None:
            rdb.remove_session()
            rdb.engine.dispose()


def patiently(call: Callable[[], T]) -> T:
    """The result of a call that is repeated while other processes are in its way."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except sa.exc.DBAPIError as error:
            said = str(error.orig).lower()
            if not any(race in said for race in _RACES) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _url(storage: str) -> sa.URL:
    if "://" not in storage:
        return sa.URL.create("sqlite", database=storage)
    try:
        url = sa.make_url(storage)
    except (sa.exc.ArgumentError, ValueError):
        raise CalibError(
            "--storage: not a URL that can be read; write sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE"
        ) from None
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _open(url: sa.URL) -> RDBStorage:
    from optuna.storages import RDBStorage

    text = url.render_as_string(hide_password=False)
    if url.get_backend_name() != "sqlite":
        return RDBStorage(text, engine_kwargs={"pool_pre_ping": True})
    folder = Path(url.database or "").resolve().parent
    if not folder.is_dir():
        raise CalibError(f"--storage {text}: the folder {folder} does not exist; make it first: mkdir -p {folder}")
    rdb = RDBStorage(text, engine_kwargs={"connect_args": {"timeout": PATIENCE_S}})
    try:
        with rdb.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")  # stays with the file: readers do not block a writer
    except sa.exc.DBAPIError:
        rdb.engine.dispose()
        raise

    # a trial writes some twenty rows, each on its own: with WAL a killed process loses none, a power cut may
    @sa.event.listens_for(rdb.engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA synchronous=NORMAL")

    rdb.engine.dispose()  # the connections made so far have not heard of it
    return rdb


def _driver(url: sa.URL) -> str:
    if url.get_backend_name() == "postgresql":
        return "PostgreSQL needs a driver: pip install 'calib-decide[postgres]'"
    return f"SQLAlchemy's driver for {url.drivername} is not installed"


def _reason(error: BaseException, url: sa.URL) -> str:
    """What the database said, without the password."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    return said.replace(url.password, "***") if url.password else said

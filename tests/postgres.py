"""A real PostgreSQL for the tests: started in a temporary folder on a socket of its own, where its programs are."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from calib.store import schema
from calib.store.database import url_of


def _program(name: str) -> str | None:
    """The newest one in Debian's folders, else that of the path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4].split(".")[0]))
    return str(found[-1]) if found else shutil.which(name)


def _user() -> str | None:
    """Who runs it: never root, which PostgreSQL refuses."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """URL of an empty database, for the length of the block."""
    initdb, server, user = _program("initdb"), _program("postgres"), _user()
    assert initdb is not None
    assert server is not None
    assert user is not None
    folder = Path(tempfile.mkdtemp(prefix="calib-pg-", dir="/tmp"))  # a socket's path may not be long
    who = {"user": user} if os.geteuid() == 0 else {}
    try:
        if who:
            shutil.chown(folder, user)
        data = folder / "data"
        made = [initdb, "-D", str(data), "-U", "calib", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, cwd=folder, timeout=120, **who)
        settings = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([server, "-D", str(data), *options], stdout=log, stderr=log, cwd=folder, **who)
        try:
            url = f"postgresql+psycopg://calib@/postgres?host={folder}"
            _wait_for(url, process, folder / "log")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    engine = sa.create_engine(url_of(url)[0])
    until = time.monotonic() + 30
    try:
        while True:
            try:
                engine.connect().close()
            except sa.exc.OperationalError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            else:
                return
    finally:
        engine.dispose()


def drop_tables(url: str) -> None:
    """Take away what calib made."""
    engine = sa.create_engine(url_of(url)[0])
    schema.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a database for tests: ``CALIB_TEST_POSTGRES``, or one that is started."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("PostgreSQL needs a driver: pip install 'calib-decide[postgres]'")
    named = os.environ.get("CALIB_TEST_POSTGRES")
    if named:
        yield named
        return
    if not (_program("initdb") and _program("postgres")):
        pytest.skip("no PostgreSQL here (initdb, postgres); set CALIB_TEST_POSTGRES to the URL of an empty database")
    if _user() is None:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")
    with running_postgres() as url:
        yield url


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[str]:
    """URL of a database without calib's tables."""
    drop_tables(postgres_server)
    yield postgres_server
    drop_tables(postgres_server)

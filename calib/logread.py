"""Reads the decision log of ``calib serve`` (JSONL, also gzipped), whole or as it grows: batches of checked rows.

A log is written while it is read, rotated and copied: the unfinished last line is waited for or passed over, a broken
one is counted, a file that was renamed or cut short is opened again. Leaves what the fields mean to `calib.promises`.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from calib.errors import CalibError
from calib.jsonnumbers import is_number

__all__ = ["LogReader", "check_logs"]

BATCH = 4096
"""Rows in one batch, at most."""

_CHUNK = 1 << 20
_POLL_S = 0.5
_NUMBERS = ("at", "confidence", "tokens", "seconds", "t1", "t2")
_FLAGS = ("think", "finished", "closed", "degraded")

Row = dict[str, Any]


class LogReader:
    """Rows of one or several logs, the oldest first.

    Parameters
    ----------
    paths : sequence of path
        Rotated files before the current one; the last one can be followed.

    Attributes
    ----------
    rows : int
        Decisions read.
    broken : int
        Lines that are no decision; an unfinished last line is not counted.
    versions : Counter of str
        Decisions by policy version; ``none`` without one.

    Raises
    ------
    CalibError
        A file is not there.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._paths = check_logs(paths)
        self.rows = self.broken = 0
        self.versions: Counter[str] = Counter()

    def batches(self, *, follow: bool = False, wait: Callable[[float], object] = time.sleep) -> Iterator[list[Row]]:
        """Rows in order. With ``follow`` it never ends, and an empty batch says that nothing is new for now.

        Parameters
        ----------
        follow : bool
        wait : callable
            Waits so many seconds.
        """
        *earlier, last = self._paths
        for path in earlier:
            yield from self._whole(path)
        if last.suffix == ".gz" and follow:
            raise CalibError(f"{last}: a compressed log does not grow; leave out --follow")
        yield from self._growing(last, wait) if follow else self._whole(last)

    def _whole(self, path: Path) -> Iterator[list[Row]]:
        rest = b""
        try:
            with _opened(path) as stream:
                while chunk := self._chunk(stream):
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from self._parsed(lines)
        except OSError as error:
            raise CalibError(f"{path}: {error.strerror or error}", exit_code=1) from None
        row = _row(rest)  # a last line may be whole without its end of line, or half written
        if row is not None:
            yield self._counted([row])

    def _chunk(self, stream: IO[bytes]) -> bytes:
        try:
            return stream.read(_CHUNK)
        except (EOFError, gzip.BadGzipFile, zlib.error):  # the rest of a file that was copied while it was written
            self.broken += 1
            return b""

    def _growing(self, path: Path, wait: Callable[[float], object]) -> Iterator[list[Row]]:
        while True:
            with path.open("rb") as stream:
                rest, last_look = b"", False
                while True:
                    chunk = stream.read(_CHUNK)
                    if chunk:
                        *lines, rest = (rest + chunk).split(b"\n")
                        yield from self._parsed(lines)
                        continue
                    if last_look:
                        break
                    yield []
                    # who writes learns of a new file a moment after it is there: the old one is read to its end then
                    last_look = _moved(path, stream)
                    wait(_POLL_S)

    def _parsed(self, lines: Sequence[bytes]) -> Iterator[list[Row]]:
        for start in range(0, len(lines), BATCH):
            found = []
            for line in lines[start : start + BATCH]:
                row = _row(line)
                if row is not None:
                    found.append(row)
                elif line.strip():
                    self.broken += 1
            if found:
                yield self._counted(found)

    def _counted(self, rows: list[Row]) -> list[Row]:
        self.rows += len(rows)
        self.versions.update(str(row.get("policy_version") or "none") for row in rows)
        return rows


def check_logs(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The logs; a `CalibError` names one that is not there."""
    found = [Path(path) for path in paths]
    for path in found:
        if not path.is_file():
            raise CalibError(f"{path}: no such file; name the log that calib serve --log writes")
    return found


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _moved(path: Path, stream: IO[bytes]) -> bool:
    """Whether the name stands for another file by now, or for one that was cut short."""
    mine = os.fstat(stream.fileno())
    try:
        now = path.stat()
    except FileNotFoundError:  # renamed, and the new one is not there yet
        return False
    return (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev) or now.st_size < stream.tell()


def _row(line: bytes) -> Row | None:
    """A decision, None for what is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not ("p1" in row or "think" in row):
        return None
    p1 = row.get("p1") or []
    if not isinstance(p1, list) or not all(map(is_number, p1)):
        return None
    if not all(row.get(name) is None or is_number(row[name]) for name in _NUMBERS):
        return None
    if any(not isinstance(row.get(name, False), bool) for name in _FLAGS):
        return None
    return row

"""`DecisionLog`: one JSON line for each decision, appended to a file; numbers only, no text.

A request never waits for the disk: lines are kept in memory, at most so much of it, and one background task writes
them. A line that finds no room is dropped and counted. `calib.watch` reads the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import to_json

from calib.errors import CalibError

if TYPE_CHECKING:
    from calib.gateway import Observation

__all__ = ["MAX_BYTES", "DecisionLog"]

MAX_BYTES = 32 * 1024 * 1024
"""Kept in memory until written: a minute of disk trouble at 1,000 decisions a second and 500 bytes a line."""
_LONGEST_NAME = 200
"""Characters of a dataset's name, which the client chooses."""
_EVERY_SECONDS = 0.25
_MODE = 0o640

log = logging.getLogger(__name__)


class DecisionLog:
    """An append-only file of decisions.

    Parameters
    ----------
    path : path
        Made when missing. A renamed file goes on growing until `reopen`, as log rotation expects.
    max_bytes : int
        Of lines kept in memory until they are written.

    Attributes
    ----------
    written, dropped : int
        Lines in the file, and lines lost because memory or disk was full.

    Raises
    ------
    CalibError
        The file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> None:
        self.path = Path(path)
        self.written = self.dropped = 0
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._reopen = False
        self._failed = self._torn = False
        self._writing: asyncio.Future[int] | None = None
        # one thread of its own: a disk that hangs must not hold up name look-ups and the like in the shared one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="calib-log")
        try:
            self._file = self._open()
        except OSError as error:
            raise CalibError(f"--log {self.path}: {error.strerror or error}; name a file that can be written") from None

    def put(self, decided: Observation) -> None:
        """Keep one decision, to be written soon; never waits."""
        if len(decided.dataset) > _LONGEST_NAME:
            decided = replace(decided, dataset=decided.dataset[:_LONGEST_NAME])
        # Now, since a batch would hold up the requests of its moment; ASCII, since some readers end lines at U+2028.
        line = to_json(decided, inf_nan_mode="null", ensure_ascii=True)
        if self._bytes + len(line) > self._max_bytes:
            self.dropped += 1
            return
        self._bytes += len(line)
        self._lines.append(line)

    def reopen(self) -> None:
        """Open the file anew before the next write: its name may stand for another file now."""
        self._reopen = True

    async def run(self) -> None:
        """Write what `put` kept, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self._flush()

    async def close(self) -> None:
        """Write the rest and close the file."""
        if self._writing is not None:
            await self._writing
        await self._flush()
        self._thread.shutdown()
        os.close(self._file)

    async def _flush(self) -> None:
        if not self._lines and not self._reopen:
            return
        lines, self._lines = self._lines, []
        size = self._bytes
        reopen, self._reopen = self._reopen, False
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, lines, reopen)

        def count(done: asyncio.Future[int]) -> None:
            self._bytes -= size  # not before: until then they fill the memory
            self.written += len(lines) - done.result()
            self.dropped += done.result()

        writing.add_done_callback(count)
        self._writing = writing
        await asyncio.shield(writing)  # whoever stops waiting must not take back lines that nobody else holds

    def _write(self, lines: list[bytes], reopen: bool) -> int:
        """Append the lines (in the thread); how many were lost."""
        data = memoryview(b"".join(line + b"\n" for line in lines))
        done = 0
        if reopen:
            self._open_anew()
        try:
            if self._torn:
                os.write(self._file, b"\n")
            self._torn = False
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            whole = bytes(data[:done]).count(b"\n")
            self._torn = self._torn or (done > 0 and data[done - 1] != ord("\n"))
            if not self._failed:
                log.warning("the decision log %s cannot be written: %s", self.path, error.strerror or error)
            self._failed = True
            return len(lines) - whole
        self._failed = False
        return 0

    def _open_anew(self) -> None:
        try:
            fresh = self._open()
        except OSError as error:
            log.warning(
                "the decision log %s cannot be opened anew: %s; the old file goes on", self.path, error.strerror
            )
            return
        os.close(self._file)
        self._file, self._torn = fresh, False

    def _open(self) -> int:
        """Descriptor for appending; half a line that a crash left is ended first."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        with contextlib.suppress(OSError):  # a pipe or a terminal has no end to look at
            size = os.lseek(descriptor, 0, os.SEEK_END)
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
        return descriptor

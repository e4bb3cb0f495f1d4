"""`Family`: a command in a session of its own, ended with everything that it started and nothing else; `stop_signals`.

Two things outlive a careless parent: children of the command, and the command itself when the parent dies first. The
first are found by their session, whatever process group they moved to. Against the second a guard, a shell that waits
for the other end of a pipe to close, ends the session when this process was killed; when it ends by an interrupt that
came at a bad moment, the interpreter's exit does.

Leaves to others: what is run and when it is ready (`calib.launch`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from calib.errors import CalibError

__all__ = ["Family", "stop_signals"]


_KILL_SECONDS = 10.0
"""How long a killed process may take to go: it may have gigabytes to give back."""

_POLL = 0.05
_PROC = Path("/proc")

_GUARD = """
leader=$1 left=$2
read -r line && exit
members() {
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    case "$3 $4 $1" in
    *Z) ;;
    "$leader "* | *" $leader "*) echo "${line%% *}" ;;
    esac
  done
}
end() {
  kill -s "$1" -- "-$leader"
  for pid in $(members); do kill -s "$1" "$pid"; done
}
end TERM
while [ "$left" -gt 0 ] && { [ -n "$(members)" ] || [ ! -e /proc/self/stat ]; }; do
  sleep 1
  left=$((left - 1))
done
end KILL
"""
"""The same as `Family.end`, in a shell."""


class Family:
    """A running command and its descendants.

    Parameters
    ----------
    command : sequence of str
        Program and arguments, run without a shell.
    env : mapping of str to str
        Its whole environment.
    folder : Path
        Where it runs.
    output : binary file
        Takes stdout and stderr.
    grace : float
        Seconds between SIGTERM and SIGKILL.

    Raises
    ------
    OSError
        It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, output: IO[bytes], grace: float
    ) -> None:
        self.grace = grace
        self._leader = subprocess.Popen(  # noqa: S603 - what the user wrote, without a shell
            command,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._leader.pid
        self._ended = False
        try:
            self._guard = subprocess.Popen(  # noqa: S603 - our own text
                ["/bin/sh", "-c", _GUARD, "guard", str(self.pid), str(round(grace))],
                env={"PATH": os.environ.get("PATH", os.defpath)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            self._signal(signal.SIGKILL)
            self._leader.wait()
            raise
        atexit.register(self._signal, signal.SIGKILL)

    @property
    def exit_code(self) -> int | None:
        """Of the command itself; negative for a signal, None while it runs."""
        return self._leader.poll()

    def members(self) -> list[int]:
        """Process ids of the command and its descendants that are alive."""
        if self._ended:  # the number may be another's by now
            return []
        if self._leader.poll() is None:
            return _session(self.pid) or [self.pid]
        # Looking takes a while, in which one that was not seen yet may start another and end: twice nothing is nothing.
        found = _session(self.pid) or _session(self.pid)
        self._ended = not found
        return found

    async def end(self) -> None:
        """End all of it: SIGTERM, and SIGKILL to what is left after the grace. Returns when nothing is left.

        Another cancellation while this waits, such as a second Ctrl-C, does away with the grace.

        Raises
        ------
        CalibError
            A process outlived SIGKILL.
        """
        ending = asyncio.ensure_future(self._end())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                if ending.cancelled():
                    raise
                cancelled = error
                self.grace = 0.0
        ending.result()
        if cancelled is not None:
            raise cancelled

    async def _end(self) -> None:
        try:
            self._signal(signal.SIGTERM)
            await self._until_gone(lambda: self.grace)
            self._signal(signal.SIGKILL)
            await self._until_gone(lambda: _KILL_SECONDS)
        except BaseException:  # the loop itself is being closed: no time for anything else
            self._signal(signal.SIGKILL)
            raise
        finally:
            self._dismiss_guard()
        if left := self.members():
            raise CalibError(
                f"the processes {', '.join(map(str, left))} outlived SIGKILL for {_KILL_SECONDS:g} s; a driver may "
                f"hold them. See: ps -o pid,stat,wchan:30,cmd -p {','.join(map(str, left))}",
                exit_code=1,
            )
        self._leader.wait()
        atexit.unregister(self._signal)

    async def _until_gone(self, seconds: Callable[[], float]) -> None:
        """Wait at most so long; the time may shrink meanwhile."""
        started = time.monotonic()
        while self.members() and time.monotonic() - started < seconds():
            await asyncio.sleep(_POLL)

    def _signal(self, number: int) -> None:
        members = self.members()
        if members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        for pid in members:  # those that left the process group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) != self.pid:
                    os.kill(pid, number)

    def _dismiss_guard(self) -> None:
        if self._guard.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.communicate(b"done\n")


def _session(leader: int) -> list[int]:
    """Living processes of a session."""
    if not _PROC.joinpath("self/stat").exists():
        try:
            os.killpg(leader, 0)
        except (ProcessLookupError, PermissionError):  # the second is macOS's answer for a group of zombies
            return []
        return [leader]
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # gone in the meantime
                # The name of the program, in parentheses, may hold spaces and parentheses of its own.
                state, _parent, group, session = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
                if str(leader) in (group, session) and state not in "ZX":
                    found.append(int(entry.name))
    return found


def stop_signals() -> list[signal.Signals]:
    """What asks this process to stop: SIGTERM, and SIGINT unless the process was started to ignore it.

    A shell starts its background jobs so.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGINT]

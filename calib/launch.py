"""Starts, watches and stops the server of an arm.

Owns when a server may be started (nothing answers there yet, its GPU is free) and when it is ready. Leaves to others:
what ends all of it (`calib.processes`), where arms come from (`calib.arms`), and that arms which share a GPU run one
after another (`calib.collect`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from yarl import URL

from calib.arms import Arm
from calib.engine.base import AskFailed
from calib.engine.http import HttpClient, shorten
from calib.environment import Environment, flags
from calib.errors import CalibError
from calib.gpu import Gpu, read_gpus
from calib.processes import Family

__all__ = ["ServedArm", "launched", "needs_launch"]

_ROUTES = ("/health", "/v1/models", "/v1/decide/info")
"""What is asked whether the server is ready: one answers 200, and none says that it is not so far (5xx)."""

_PATIENCE = 10.0
_POLL_FIRST, _POLL_LONGEST = 0.1, 2.0
_TELL_EVERY = 15.0
_TAIL_LINES, _TAIL_BYTES, _TAIL_WIDTH = 20, 65_536, 300
_MEMORY_WAIT = 30.0
"""Seconds in which the memory of a server that was just stopped comes back."""

_VLLM_SHARE = 0.9
"""Of a GPU's memory that vLLM reserves unless told otherwise."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Say = Callable[[str], None]


@dataclass(frozen=True)
class ServedArm:
    """An arm that answers.

    Attributes
    ----------
    arm : str
    urls : tuple of str
        Addresses that answer. Of servers that run already, one that does not is left out.
    started : bool
        Whether calib started it, and will stop it.
    seconds : float
        From the start until it was ready; 0 when it ran already.
    pid : int or None
        Process id of the command.
    log : Path or None
        Where its output goes.
    """

    arm: str
    urls: tuple[str, ...]
    started: bool = False
    seconds: float = 0.0
    pid: int | None = None
    log: Path | None = None


def needs_launch(arm: Arm) -> bool:
    """Whether calib is to start the arm's server: such arms run one after another."""
    return arm.start is not None


@contextlib.asynccontextmanager
async def launched(
    arm: Arm, *, log_dir: str | os.PathLike[str], say: Say, environ: Mapping[str, str] | None = None
) -> AsyncIterator[ServedArm]:
    """The arm's servers for the length of the block: started and stopped, or found running.

    Whatever ends the block (its end, an error, Ctrl-C), what was started is stopped with all that it started, and
    nothing else is.

    Parameters
    ----------
    arm : Arm
    log_dir : path
        Folder for ``NAME.log``, unless the arm names a log.
    say : callable
        Gets progress, a line at a time.
    environ : mapping of str to str, optional
        Where the arm's variables are looked up; by default this process's environment.

    Raises
    ------
    CalibError
        Something else serves there already, the GPU's memory is taken, the command ends or is not ready in time (with
        the end of its log), or no running server answers. Of a server that ends within the block, an error of the block
        tells that too.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for url in arm.urls:
            client = HttpClient(url, timeout=_PATIENCE, retries=0, api_key_env=arm.api_key_env)
            stack.push_async_callback(client.close)
            clients.append(client)
        if arm.start is None:
            yield await _running(arm, clients, say)
            return
        environment = arm.environment(environ)
        await _check_unoccupied(arm, clients)
        await _check_memory(arm, environment, say)
        server = _Server(arm, environment, arm.log or Path(log_dir) / f"{arm.name}.log", say)
        try:
            seconds = await server.until_ready(clients)
            try:
                yield ServedArm(arm.name, arm.urls, True, seconds, server.family.pid, server.log)
            except CalibError as error:
                if server.family.exit_code is not None:
                    raise CalibError(f"{error}\n{server.ended()}", exit_code=1) from error
                raise
            if server.family.exit_code is not None:
                say(f"{arm.name}: {server.ended()}")
        finally:
            try:
                say(f"{arm.name}: stopping")
            except BaseException:  # a second Ctrl-C, most likely
                server.family.grace = 0.0
                raise
            finally:
                await server.family.end()


# --- before the start -------------------------------------------------------------------------------------------------


async def _running(arm: Arm, clients: Sequence[HttpClient], say: Say) -> ServedArm:
    states = await asyncio.gather(*map(_state, clients))
    answering = tuple(url for url, state in zip(arm.urls, states, strict=True) if state.ready)
    silent = [f"{client.url} ({state.text})" for client, state in zip(clients, states, strict=True) if not state.ready]
    if not answering:
        raise CalibError(
            f"no server of arm {arm.name!r} is ready: {'; '.join(silent)}. Start it and try again, or let calib start "
            'it: write start = ["bash", "serve.sh"] below its table in arms.toml (calib init writes examples)',
            exit_code=1,
        )
    for text in silent:
        say(f"{arm.name}: not ready and left out: {text}")
    return ServedArm(arm.name, answering)


async def _check_unoccupied(arm: Arm, clients: Sequence[HttpClient]) -> None:
    """Refuse to start where something listens: the arm would be measured on another server."""
    for client in clients:
        url = URL(client.url)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(url.host, url.port), _PATIENCE)
        except (OSError, TimeoutError):
            continue
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        raise CalibError(
            f"something already serves {client.url.rstrip('/')} ({await _who(client)}), where arm {arm.name!r} is to "
            f"be started. Stop it (ss -ltnp 'sport = :{url.port}' shows the process), or use it as it is: take start "
            f"out of {arm.origin or 'the arm'}",
            exit_code=1,
        )


async def _who(client: HttpClient) -> str:
    try:
        models = (await client.get("/v1/models")).data
        return "it serves " + shorten(", ".join(str(model["id"]) for model in models["data"]), 100)
    except (AskFailed, CalibError, KeyError, TypeError):
        return "what it is does not show"


async def _check_memory(arm: Arm, environment: Environment, say: Say) -> None:
    if arm.gpu_free_gib == 0:
        return
    waited = 0.0
    while lacking := _lacking(arm, await read_gpus(environment.values)):
        if waited >= _MEMORY_WAIT:
            raise CalibError(
                f"{lacking}. Stop what uses it, or say how much arm {arm.name!r} needs: gpu_free_gib = 40 "
                f"(0 does not look) in {arm.origin or 'arms.toml'}",
                exit_code=1,
            )
        if waited == 0:
            say(f"{arm.name}: waiting up to {_MEMORY_WAIT:.0f} s for GPU memory: {lacking}")
        await asyncio.sleep(_POLL_LONGEST)
        waited += _POLL_LONGEST


def _lacking(arm: Arm, gpus: Sequence[Gpu]) -> str:
    """Which of the GPUs that the server will take has too little free memory; empty when none has."""
    arguments = dict(flags(arm.start or ()))
    sizes = (
        ("--tensor-parallel-size", "-tp"),
        ("--pipeline-parallel-size", "-pp"),
        ("--data-parallel-size", "-dp"),
    )
    count = 1
    for names in sizes:
        given = next((arguments[name] for name in names if name in arguments), "1")
        count *= int(given) if given.isdecimal() else 1
    try:
        share = float(arguments.get("--gpu-memory-utilization", _VLLM_SHARE))
    except ValueError:
        share = _VLLM_SHARE
    for gpu in gpus[:count]:
        needed = share * gpu.total if arm.gpu_free_gib is None else arm.gpu_free_gib
        if gpu.free < needed:
            users = ", ".join(gpu.users) or "nvidia-smi names no process"
            return f"GPU {gpu.index} has {gpu.free:.1f} of {gpu.total:.1f} GiB free, {needed:.1f} are needed ({users})"
    return ""


# --- ready or not -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    """Whether a server can be asked, and why not."""

    ready: bool
    text: str = ""


async def _state(client: HttpClient) -> _State:
    answered, silent = False, []
    for route in _ROUTES:
        try:
            await client.get(route)
        except AskFailed as failure:
            if failure.reason == "bad_json":  # status 200 and nothing in it: vLLM's /health
                answered = True
            elif failure.reason in ("http_404", "http_405"):
                silent.append(failure.detail)
            else:
                return _State(False, failure.detail)
        except CalibError as error:
            raise CalibError(f'{error}; in arms.toml: api_key_env = "NAME"', exit_code=error.exit_code) from None
        else:
            answered = True
    return _State(answered, "" if answered else "; ".join(silent))


class _Server:
    """A server that was started for an arm, and the end of its log."""

    def __init__(self, arm: Arm, environment: Environment, log: Path, say: Say) -> None:
        assert arm.start is not None
        self.arm = arm
        self.environment = environment
        self.log = log
        self.say = say
        self.command = shlex.join(arm.start)
        self.started = time.monotonic()
        if not arm.folder.is_dir():
            raise CalibError(f"{arm.origin} folder: there is no folder {arm.folder}, where {self.command} is to run")
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            # Only for its owner: a server may print what it was given.
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise CalibError(f"the log {log} cannot be written: {error.strerror}", exit_code=1) from None
        with os.fdopen(descriptor, "ab") as output:
            at = datetime.now(UTC).isoformat(timespec="seconds")
            output.write(f"--- {at} calib starts arm {arm.name}: {self.command}\n".encode())
            output.flush()
            self.offset = output.tell()
            try:
                self.family = Family(
                    arm.start, env=environment.values, folder=arm.folder, output=output, grace=arm.stop_seconds
                )
            except OSError as error:
                raise CalibError(
                    f"{arm.origin} start: {arm.start[0]!r} cannot be started: {error.strerror}. Is it installed, and "
                    'on the PATH of this shell? A script is started as: start = ["bash", "serve.sh"]',
                    exit_code=1,
                ) from None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    async def until_ready(self, clients: Sequence[HttpClient]) -> float:
        """Seconds until every address answered."""
        self.say(f"{self.arm.name}: started {self.command}; its output goes to {self.log}")
        pause, told = _POLL_FIRST, 0.0
        while True:
            unready = await self._unready(clients)
            if self.family.exit_code not in (None, 0) or not self.family.members():
                raise CalibError(self.ended(), exit_code=1)
            if not unready:
                self.say(f"{self.arm.name}: ready after {self.seconds:.0f} s")
                return self.seconds
            if self.seconds >= self.arm.ready_seconds:
                raise CalibError(self._late(unready), exit_code=1)
            if self.seconds - told >= _TELL_EVERY:
                told = self.seconds
                last = "".join(self.tail(1)) or "nothing so far"
                self.say(f"{self.arm.name}: not ready after {told:.0f} s; its log: {shorten(last, 120)}")
            await asyncio.sleep(min(pause, max(0.0, self.arm.ready_seconds - self.seconds)))
            pause = min(pause * 1.5, _POLL_LONGEST)

    async def _unready(self, clients: Sequence[HttpClient]) -> str:
        """What the first server that is not ready says; empty when all are."""
        try:
            async with asyncio.timeout(max(_POLL_FIRST, self.arm.ready_seconds - self.seconds)):
                for client in clients:
                    state = await _state(client)
                    if not state.ready:
                        return state.text
        except TimeoutError:
            return "no answer"
        return ""

    def ended(self) -> str:
        """How the command ended, with the end of its log."""
        code = self.family.exit_code
        if code is None or code >= 0:
            how = f"ended with exit code {code}"
        else:
            how = f"was ended by {signal.Signals(-code).name}"
        hint = ""
        if code == 0:
            hint = " calib stops what it starts, so the command has to stay: start no service or detached container."
        elif code == -signal.SIGKILL:
            hint = " When nobody killed it, the machine ran out of memory (dmesg tells)."
        return f"the server of arm {self.arm.name!r} {how} after {self.seconds:.0f} s.{hint}\n{self._evidence()}"

    def _late(self, unready: str) -> str:
        return (
            f"the server of arm {self.arm.name!r} was not ready within {self.arm.ready_seconds:g} s: {unready}. Does "
            f"it listen at {' and '.join(self.arm.shown_urls)}? If it needs longer to load, raise ready_seconds in "
            f"{self.arm.origin or 'arms.toml'}\n{self._evidence()}"
        )

    def _evidence(self) -> str:
        lines = [f"command: {self.command} (in {self.arm.folder})"]
        if self.environment.withheld:
            names = ", ".join(self.environment.withheld)
            lines.append(
                f"not passed on to it, since they look like secrets: {names} (env_from = [...] passes them on)"
            )
        tail = self.tail(_TAIL_LINES)
        lines.append(f"the end of {self.log}:" if tail else f"{self.log} holds nothing of it")
        return "\n".join([*lines, *(f"  {line}" for line in tail)])

    def tail(self, count: int) -> list[str]:
        """The last lines of its output that say something, without secrets, colours and overwritten progress bars."""
        try:
            with self.log.open("rb") as output:
                output.seek(max(self.offset, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = output.read().decode("utf-8", "replace")
        except OSError as error:
            return [f"(the log cannot be read: {error.strerror})"]
        lines: deque[str] = deque(maxlen=count)
        for line in self.environment.masked(_ESCAPES.sub("", text)).splitlines():
            shown = "".join(letter if letter.isprintable() else " " for letter in line).rstrip()
            if shown:
                lines.append(shown[:_TAIL_WIDTH])
        return list(lines)

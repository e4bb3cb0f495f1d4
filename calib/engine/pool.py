"""`EnginePool`: several servers of one model as one engine.

Each question goes to the server with the fewest questions in flight. One that cannot be reached is left out and probed
again, and its question goes to another; a question that a server could not answer well is not passed on, since that is
a finding. Leaves to others: what one server is (`calib.engine.decide`, `calib.engine.vllm`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from calib.engine.base import Answer, AskFailed, Engine, EngineInfo, PartlyFailed, ServerBusy
from calib.engine.http import UNREACHABLE, HttpClient
from calib.errors import CalibError
from calib.questions import Question

__all__ = ["EnginePool", "Upstream"]

PROBE_S = 10.0
"""Seconds after which a server that was left out is asked again whether it is there."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upstream:
    """How a server of the pool is now: its address, whether it is asked, and its questions in flight."""

    name: str
    alive: bool
    open: int


class _Member:
    """One server: how many questions it has, and since when it is left out."""

    __slots__ = ("away", "engine", "identity", "open", "retry_at")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.identity: dict[str, Any] = {}
        self.open = 0
        self.away = False
        self.retry_at = 0.0


class EnginePool:
    """Engines that serve one model.

    Parameters
    ----------
    engines : sequence of Engine
        One or more; closed by `close`.
    probe_s : float
        Seconds between two looks at a server that is left out.
    """

    def __init__(self, engines: Sequence[Engine], *, probe_s: float = PROBE_S) -> None:
        if not engines:
            raise CalibError("a pool needs one engine or more")
        self._members = [_Member(engine) for engine in engines]
        self._probe_s = probe_s
        self._probing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"EnginePool({[member.engine for member in self._members]!r})"

    @property
    def clients(self) -> tuple[HttpClient, ...]:
        """Connections to the servers that are not left out, for `calib.busyness`."""
        engines = [member.engine for member in self._members if not member.away]
        return tuple(client for engine in engines if (client := getattr(engine, "client", None)) is not None)

    @property
    def alive(self) -> bool:
        """Whether any server can be asked."""
        return not all(member.away for member in self._members)

    def upstreams(self) -> tuple[Upstream, ...]:
        """The servers, in the order in which they were given."""
        return tuple(Upstream(_name(member.engine), not member.away, member.open) for member in self._members)

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same one share cached prefixes, on all servers."""
        return getattr(self._members[0].engine, "cache_salt", None)

    @cache_salt.setter
    def cache_salt(self, salt: str | None) -> None:
        for member in self._members:
            member.engine.cache_salt = salt  # type: ignore[attr-defined]

    @property
    def takes_salt(self) -> bool:
        """Whether all servers do."""
        return all(hasattr(member.engine, "cache_salt") for member in self._members)

    async def info(self) -> EngineInfo:
        """Who answers: all servers that can be reached must be the same model.

        Raises
        ------
        CalibError
            No server can be reached, or two are different models.
        """
        found = await asyncio.gather(*(self._described(member) for member in self._members))
        infos = [one for one in found if isinstance(one, EngineInfo)]
        if not infos:
            raise next(one for one in found if isinstance(one, CalibError))
        for member, one in zip(self._members, found, strict=True):
            if isinstance(one, EngineInfo) and one.identity != infos[0].identity:
                raise CalibError(
                    f"{member.engine!r} serves another model than the other addresses of its arm ({one.model!r} and "
                    f"{infos[0].model!r}, or the same one differently): give it an arm of its own, or leave it out"
                )
        return infos[0]

    async def _described(self, member: _Member) -> EngineInfo | CalibError:
        try:
            info = await member.engine.info()
        except CalibError as error:
            if error.exit_code != 1:  # not a matter of reach
                raise
            self._leave_out(member, str(error))
            return error
        member.identity, member.away = dict(info.identity), False
        return info

    async def ask(
        self,
        question: Question,
        budgets: Sequence[int],
        *,
        system1: bool = True,
        keep_text: bool = False,
        deadline: float | None = None,
    ) -> Answer:
        """Ask the server with the fewest questions in flight; another one where it cannot be reached.

        Seconds that were lost on servers that could not be reached count: latency is that of the question.

        Raises
        ------
        AskFailed
            See `calib.engine.base.Engine.ask`; no server can be reached.
        """
        started = time.perf_counter()
        lost, attempts = 0.0, 0
        tried: set[int] = set()
        while True:
            member = await self._least(tried)
            tried.add(id(member))
            member.open += 1
            try:
                answer = await member.engine.ask(
                    question,
                    budgets,
                    system1=system1,
                    keep_text=keep_text,
                    deadline=None if deadline is None else max(0.0, deadline - lost),
                )
            except PartlyFailed as failure:
                failure.partial = _later(failure.partial, lost)
                raise
            except AskFailed as failure:
                attempts += failure.attempts
                if failure.reason not in UNREACHABLE:
                    raise
                self._leave_out(member, str(failure))
                lost = time.perf_counter() - started
                if len(tried) == len(self._members):
                    failure.seconds, failure.attempts = lost, attempts
                    raise
            except ServerBusy:
                if len(tried) == len(self._members):
                    raise
                lost = time.perf_counter() - started
            else:
                return _later(answer, lost)
            finally:
                member.open -= 1

    async def _least(self, tried: set[int]) -> _Member:
        """The server with the fewest questions in flight that was not tried; the first of equals."""
        due = any(member.away and time.monotonic() >= member.retry_at for member in self._members)
        if due and (self._probing is None or self._probing.done()):
            self._probing = asyncio.create_task(self._probe())  # beside the questions: its seconds are not theirs
        if self._probing is not None and all(member.away for member in self._members):
            await asyncio.shield(self._probing)
        untried = [member for member in self._members if id(member) not in tried]
        there = [member for member in untried if not member.away]
        return min(there or untried, key=lambda member: member.open)

    async def _probe(self) -> None:
        """Ask servers that are left out whether they are back."""
        for member in self._members:
            if not member.away or time.monotonic() < member.retry_at:
                continue
            member.retry_at = time.monotonic() + self._probe_s
            try:
                info = await member.engine.info()
            except CalibError:
                continue
            if member.identity and info.identity != member.identity:
                log.warning("%s came back as another model: it stays left out", member.engine)
                continue
            member.identity, member.away = dict(info.identity), False
            log.warning("%r is back", member.engine)

    async def look(self) -> None:
        """See whether the servers are there, also when nobody asks them anything: for a readiness probe."""
        await asyncio.gather(self._probe(), *(self._ping(member) for member in self._members if not member.away))

    async def _ping(self, member: _Member) -> None:
        client: HttpClient | None = getattr(member.engine, "client", None)
        if client is None:
            return
        try:
            async with asyncio.timeout(self._probe_s):
                await client.get_text("/health")
        except AskFailed as failure:  # any answer is a sign of life, also that there is no such route
            if failure.reason in UNREACHABLE:
                self._leave_out(member, str(failure))
        except TimeoutError:
            self._leave_out(member, f"GET /health gave no answer within {self._probe_s:g} s")
        except CalibError as error:  # a key that is refused: those who ask will be told
            log.debug("%r: %s", member.engine, error)

    def _leave_out(self, member: _Member, why: str) -> None:
        if not member.away:
            log.warning("%s is left out: %s", member.engine, why)
        member.away = True
        member.retry_at = time.monotonic() + self._probe_s

    def remarks(self) -> list[str]:
        """What was odd about the answers of any server, in words."""
        told = [getattr(member.engine, "remarks", None) for member in self._members]
        return list(dict.fromkeys(line for tell in told if tell is not None for line in tell()))

    async def close(self) -> None:
        """Close all engines."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))


def _later(answer: Answer, lost: float) -> Answer:
    """The answer, with seconds that were lost before: with System 1 where it was asked, else with System 2."""
    if not lost:
        return answer
    return replace(answer, t2=answer.t2 + lost) if math.isnan(answer.t1) else replace(answer, t1=answer.t1 + lost)


def _name(engine: Engine) -> str:
    """Address of a server, without login; what it calls itself when it has none."""
    client: HttpClient | None = getattr(engine, "client", None)
    return repr(engine) if client is None else client.url.rstrip("/")

"""How busy a server is, by its ``/metrics``: whether it is idle, and holding back while others wait there.

Leaves to others: the wire format (`calib.engine.prometheus`), who is held back (`calib.crew`, `calib.passes`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from calib.engine.base import Engine
from calib.engine.http import HttpClient
from calib.engine.prometheus import ServerCounters, snapshot

__all__ = ["Brake", "clients_of", "counters_of", "running", "together"]

POLL_S, PATIENCE_S = 1.0, 10.0
"""Seconds between two looks of a brake; seconds that one look may take."""


def clients_of(engine: Engine) -> tuple[HttpClient, ...]:
    """The connections to the servers behind an engine; empty for one without any."""
    several = getattr(engine, "clients", None)
    if several is not None:
        return tuple(several)
    client = getattr(engine, "client", None)
    return (client,) if isinstance(client, HttpClient) else ()


async def counters_of(engine: Engine) -> ServerCounters | None:
    """What the servers behind an engine count now, together; None unless all of them tell in time."""
    clients = clients_of(engine)
    if not clients:
        return None
    try:
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(*(snapshot(client) for client in clients))
    except TimeoutError:
        return None
    known = [one for one in found if one is not None]
    return together(known) if len(known) == len(found) else None


def together(found: Sequence[ServerCounters]) -> ServerCounters:
    """Sum of several servers' counters; NaN where one of them does not tell."""
    names = ServerCounters.__dataclass_fields__
    return ServerCounters(**{name: float(sum(getattr(one, name) for one in found)) for name in names})


async def running(engine: Engine) -> float:
    """Requests that run or wait on the servers of an engine; NaN when they do not tell."""
    counters = await counters_of(engine)
    return math.nan if counters is None else counters.running + counters.waiting


class Brake:
    """Holds back new questions while more than so many requests wait on the servers.

    A server that does not tell is never waited for: the first look says so in ``blind``.

    Parameters
    ----------
    engine : Engine
    most_waiting : int
        Requests that may wait, 0 or more.
    poll_s : float
        Seconds between two looks.
    """

    def __init__(self, engine: Engine, most_waiting: int, *, poll_s: float = POLL_S) -> None:
        self.blind = False
        self._engine = engine
        self._most = most_waiting
        self._poll_s = poll_s
        self._free = asyncio.Event()

    @property
    def held(self) -> bool:
        """Whether new questions are held back."""
        return not self._free.is_set()

    async def released(self, stop: asyncio.Event) -> None:
        """Return once a question may be begun, or all is to stop."""
        while self.held and not stop.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._free, stop)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                counters = await counters_of(self._engine)
                waiting = math.nan if counters is None else counters.waiting
                self.blind = math.isnan(waiting)
                if self.blind or waiting <= self._most:
                    self._free.set()
                else:
                    self._free.clear()
                await asyncio.sleep(self._poll_s)
        finally:
            self._free.set()  # whoever waits must not wait for a brake that nobody works

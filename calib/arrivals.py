"""When each question is asked: Poisson arrivals that wait for nobody, or a fixed number in flight.

Leaves to others: what is asked and what its answer means (`calib.verify`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from calib.errors import CalibError

__all__ = ["Load", "arrival_times", "offer", "parse_rate"]

T = TypeVar("T")
_TICK = 0.2  # seconds between two calls of ``tick``


@dataclass(frozen=True)
class Load:
    """How a server is asked: one of both.

    Attributes
    ----------
    rate : float or None
        Requests per second that arrive by a Poisson process, however late the server is (an open loop).
    concurrency : int or None
        Requests in flight: the next one begins when one is answered (a closed loop).
    """

    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise CalibError("give the load by --rate 2/s or by --concurrency 8, one of both")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise CalibError(f"--rate must be above 0 requests per second, got {self.rate:g}")
        if self.concurrency is not None and self.concurrency < 1:
            raise CalibError(f"--concurrency must be 1 request in flight or more, got {self.concurrency}")

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} request{'s' * (self.concurrency != 1)} in flight"


_RATE = re.compile(r"\s*([0-9.]+(?:[eE][-+]?\d+)?)\s*(?:/\s*(s|sec|second|min|minute|h|hour))?\s*")


def parse_rate(text: str) -> float:
    """Requests per second from ``2/s``, ``90/min`` or ``2`` (per second).

    Raises
    ------
    CalibError
        What is no rate above 0; says what to write.
    """
    match = _RATE.fullmatch(text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not 0 < number < math.inf:
        raise CalibError(f"--rate {text!r} is no rate above 0; write for instance: --rate 2/s, or --rate 90/min")
    return number / {"m": 60.0, "h": 3600.0}.get((match[2] or "s")[0], 1.0)


def arrival_times(n: int, rate: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds from the start at which n requests arrive: gaps are exponential with the mean 1 / rate."""
    return np.cumsum(rng.exponential(1 / rate, n))


async def offer(
    ask: Callable[[int, float], Awaitable[T]],
    n: int,
    load: Load,
    *,
    times: NDArray[np.float64] | None = None,
    stop: asyncio.Event | None = None,
    now: Callable[[], float] = time.perf_counter,
    tick: Callable[[], None] | None = None,
) -> list[T]:
    """Ask n questions under a load; the results in the order in which they came.

    Parameters
    ----------
    ask : callable
        Gets the number of the question and when it was due by ``now``; an exception ends everything and is raised.
    n : int
    load : Load
    times : ndarray of shape (n,), optional
        When each is due, seconds from the start, at a rate: see `arrival_times`.
    stop : asyncio.Event, optional
        Once set, no question is begun any more; those in flight are waited for.
    now : callable
        The clock; tests replace it.
    tick : callable, optional
        Called several times a second.

    Raises
    ------
    CalibError
        A rate without as many times as questions.
    """
    if load.rate is not None and (times is None or len(times) != n):
        raise CalibError(f"{n} questions at {load} need a time each, got {0 if times is None else len(times)}")
    stop = stop or asyncio.Event()
    found: list[T] = []

    async def one(i: int, due: float) -> None:
        found.append(await ask(i, due))

    if times is not None and load.rate is not None:
        asking = _open(one, times, stop, now)
    else:
        asking = _closed(one, n, load.concurrency or 1, stop, now)
    ticking = asyncio.create_task(_tick(tick)) if tick is not None else None
    try:
        await asking
    finally:
        if ticking is not None:
            await _cancelled({ticking})
    return found


_One = Callable[[int, float], Coroutine[Any, Any, None]]


async def _open(one: _One, times: NDArray[np.float64], stop: asyncio.Event, now: Callable[[], float]) -> None:
    """Each question at its time, whatever became of those before; one begun late counts from when it was due."""
    begun = now()
    wake = asyncio.Event()  # there is something to do before the next arrival

    async def watch() -> None:
        await stop.wait()
        wake.set()

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            wake.set()

    watching = asyncio.create_task(watch())
    tasks: set[asyncio.Task[None]] = set()
    try:
        for i, due in enumerate((begun + times).tolist()):
            while not wake.is_set() and (left := due - now()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), left)
            if wake.is_set():
                break
            task = asyncio.create_task(one(i, due))
            task.add_done_callback(ended)
            tasks.add(task)
        await _all(tasks)
    finally:
        await _cancelled({watching, *tasks})


async def _closed(one: _One, n: int, concurrency: int, stop: asyncio.Event, now: Callable[[], float]) -> None:
    """As many in flight as allowed, each followed by the next."""
    waiting = iter(range(n))

    async def work() -> None:
        for i in waiting:
            if stop.is_set():
                return
            await one(i, now())

    tasks = {asyncio.create_task(work()) for _ in range(min(concurrency, n))}
    try:
        await _all(tasks)
    finally:
        await _cancelled(tasks)


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    """Wait for all; the first exception is raised at once."""
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _tick(tick: Callable[[], None]) -> None:
    while True:
        tick()
        await asyncio.sleep(_TICK)

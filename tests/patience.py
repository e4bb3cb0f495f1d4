"""For tests about moments: what a busy machine does to them is told apart from what the code does."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

TICK = 0.005
MOST_STOLEN = 0.03
"""Seconds that may be missing in a test whose result counts."""
TRIES = 6


class Stolen:
    """Seconds for which the loop wanted to run and this process was not let: its own work does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stolen:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _tick(self) -> None:
        while True:
            wall, own = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK)
            wall, own = time.perf_counter() - wall, time.process_time() - own
            self.seconds += max(0.0, wall - own - 2 * TICK)


def undisturbed(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Repeat a failed test of moments while the machine was not there for it; a failure on a free machine stands."""

    @functools.wraps(test)
    async def patient(*args: Any, **kwargs: Any) -> None:
        for _ in range(TRIES):
            async with Stolen() as stolen:
                try:
                    return await test(*args, **kwargs)
                except (AssertionError, LookupError, pytest.fail.Exception):
                    if stolen.seconds < MOST_STOLEN:
                        raise
            await asyncio.sleep(1.0)
        pytest.skip(f"this machine is too busy: {stolen.seconds:.2f} s were missing in a test about moments")

    return patient

"""The servers behind the gateway: several addresses of one model as one engine, whether or not all are there yet.

Leaves to others: which engine an address needs (`calib.engine.auto`), who is asked next (`calib.engine.pool`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from calib.engine.auto import probe
from calib.engine.base import Answer, AskFailed, Engine, EngineInfo, ServerBusy
from calib.engine.http import HttpClient
from calib.engine.pool import EnginePool
from calib.errors import CalibError
from calib.questions import Question

__all__ = ["CountedEngine", "LateEngine", "open_upstreams"]

_PROBE_S = 5.0
"""Seconds between two looks at a server that is left out."""
_RETRIES = 4
_RETRIES_OF_SEVERAL = 2
"""A question waits for a server to recover only where there is no other one to go to."""


class LateEngine:
    """The engine at an address, found out as soon as the server is there.

    Parameters
    ----------
    url : str
    vllm : mapping
        Further arguments for a stock vLLM (see `calib.engine.auto.probe`).
    **options
        Of `HttpClient`.
    """

    def __init__(self, url: str, *, vllm: dict[str, Any], **options: Any) -> None:
        self.client = HttpClient(url, **options)  # asks for signs of life
        self._find = partial(probe, url, vllm=vllm, **options)
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        return f"LateEngine({self.client.url!r})"

    def __str__(self) -> str:
        return self.client.url

    async def info(self) -> EngineInfo:
        """Who answers.

        Raises
        ------
        CalibError
            Nobody does yet, or no engine can speak to who does.
        """
        if self._engine is None:
            self._engine = await self._find()
        return await self._engine.info()

    async def ask(self, question: Question, budgets: Sequence[int], **how: Any) -> Answer:
        """See `calib.engine.base.Engine.ask`."""
        if self._engine is None:
            raise AskFailed("connection", f"{self.client.url} was not there when it was looked for")
        return await self._engine.ask(question, budgets, **how)

    async def close(self) -> None:
        """Give back connections."""
        await self.client.close()
        if self._engine is not None:
            await self._engine.close()


class CountedEngine:
    """Another engine, with the calls counted that failed for good.

    Parameters
    ----------
    engine : Engine
    failures : Counter of (str, str)
        By stage (``system1``, ``system2``) and kind.
    """

    def __init__(self, engine: Engine, failures: Counter[tuple[str, str]]) -> None:
        self.engine, self.failures = engine, failures

    async def info(self) -> EngineInfo:
        """Who answers."""
        return await self.engine.info()

    async def ask(self, question: Question, budgets: Sequence[int], *, system1: bool = True, **how: Any) -> Answer:
        """See `calib.engine.base.Engine.ask`."""
        try:
            return await self.engine.ask(question, budgets, system1=system1, **how)
        except AskFailed as failure:
            self._count(system1, failure.reason)
            raise
        except ServerBusy:
            self._count(system1, "busy")
            raise
        except CalibError:
            self._count(system1, "misconfigured")
            raise

    def _count(self, system1: bool, kind: str) -> None:
        self.failures["system1" if system1 else "system2", kind] += 1

    async def close(self) -> None:
        """Give back connections."""
        await self.engine.close()


async def open_upstreams(urls: Sequence[str], *, vllm: dict[str, Any], **options: Any) -> tuple[EnginePool, EngineInfo]:
    """One engine of all addresses, and who answers there.

    Servers that are away are left out and looked for again.

    Parameters
    ----------
    urls : sequence of str
        One or more, each once.
    vllm : mapping
        Further arguments for a stock vLLM.
    **options
        Of `HttpClient`.

    Raises
    ------
    CalibError
        An address is named twice, none answers, or two serve different models.
    """
    twice = [url for url, n in Counter(url.rstrip("/") for url in urls).items() if n > 1]
    if twice:
        raise CalibError(f"--upstream names {twice[0].rpartition('@')[2]} twice; give each server once")
    options = {"retries": _RETRIES if len(urls) == 1 else _RETRIES_OF_SEVERAL} | options
    pool = EnginePool([LateEngine(url, vllm=vllm, **options) for url in urls], probe_s=_PROBE_S)
    try:
        return pool, await pool.info()
    except BaseException:
        await pool.close()
        raise

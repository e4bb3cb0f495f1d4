"""Records what servers of the reference model do: `calib collect` at several loads, with what it took of both sides.

    python data/reference/record.py PLAN.json --out FOLDER

A plan says what is measured (``about``: hardware, versions, flags, date) and holds a list of runs, made in order::

    {"model": "main", "arm": "base", "url": "http://127.0.0.1:8001", "concurrency": 128, "questions": 3080}

One run is made at a time; with ``--at-once`` one at a time for each server, which is right where each server has a GPU
and processors of its own. Each run asks the first ``questions`` of the fixed order, for at most ``seconds``, through
`calib.collect.collect` and its own engine. Before it, the load is reached with other questions, so that compilation and
warm-up are no part of it, and it has a cache salt of its own, so that no run profits from prompts that an earlier one
left in the prefix cache. After it, System 1 alone is asked at the same load. Chats are rendered and tokenised by the
server, within the seconds, as a gateway's would be. Beside the answers it keeps the clients' processor seconds and the
lag of their event loops: where they are high, the client and not the server is what was measured.

The folder gets the recording that `calib.recorded` reads, after each run anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import multiprocessing
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from write_questions import questions as make_questions

from calib.collect import collect, in_order
from calib.engine.base import Answer, AskFailed, EngineInfo
from calib.engine.prometheus import Serving, between, snapshot
from calib.engine.prompts import read_prompt
from calib.engine.vllm import VllmEngine
from calib.questions import Question
from calib.recorded import Row, write_recorded
from calib.store import Store

log = logging.getLogger("record")

BUDGETS = (32, 64, 128, 256, 512, 1024)
SAMPLING = {"temperature": 0.6}
PROMPT = Path(__file__).with_name("prompt.toml")
WARM_UP_SEED, WARM_UP_TASKS = 1, ("chain", "count", "kth", "parity")
"""Tasks with short thoughts, so that the load is full again once a run begins."""

SYSTEM1_SECONDS = 4
TICK = 0.01
PER_CLIENT = 32
"""Questions in flight in one client process."""

LAGS = {"p50": 50, "p99": 99, "most": 100}


@dataclass(frozen=True)
class Run:
    """One arm of one model at one load."""

    model: str
    arm: str
    url: str
    concurrency: int
    questions: int
    seconds: float = math.inf


@dataclass(frozen=True, eq=False)
class Heard:
    """An answer, and when it was asked for and came; seconds since 1970."""

    question: Question
    answer: Answer
    began: float
    ended: float


@dataclass(eq=False)
class Listener:
    """An engine that keeps what it hears."""

    engine: VllmEngine
    heard: list[Heard] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def ask(self, question: Question, budgets: Sequence[int], **options: Any) -> Answer:
        """As the engine."""
        began = time.time()
        answer = await self.engine.ask(question, budgets, **options)
        self.heard.append(Heard(question, answer, began, time.time()))
        return answer


@dataclass(eq=False)
class Watch:
    """What this process took meanwhile: wall and processor seconds, and lags of the event loop."""

    wall: float = 0.0
    cpu: float = 0.0
    lags: list[float] = field(default_factory=list)


@asynccontextmanager
async def watched() -> AsyncIterator[Watch]:
    """Measure this process until the block ends."""
    watch = Watch()

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            watch.lags.append(max(0.0, time.perf_counter() - due))

    ticking = asyncio.create_task(tick())
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield watch
    finally:
        watch.wall, watch.cpu = time.perf_counter() - wall, time.process_time() - cpu
        ticking.cancel()


async def at_load(
    engine: VllmEngine, questions: Sequence[Question], budgets: Sequence[int], load: int, seconds: float = math.inf
) -> int:
    """Ask without keeping anything; how many were answered."""
    waiting, until, done = iter(questions), time.perf_counter() + seconds, 0

    async def work() -> None:
        nonlocal done
        for question in waiting:
            if time.perf_counter() > until:
                return
            try:
                await engine.ask(question, budgets)
            except AskFailed as failure:
                log.warning("%s", failure)
                continue
            done += 1

    await asyncio.gather(*(work() for _ in range(load)))
    return done


@dataclass(eq=False)
class Part:
    """What one client process got, and what it took."""

    heard: list[Heard]
    info: EngineInfo
    began: float
    watch: Watch
    system1: int
    alone: Watch
    served: Serving | None


_BARRIER: Barrier | None = None


def _start_client(barrier: Barrier) -> None:
    global _BARRIER
    _BARRIER = barrier


async def _together() -> None:
    """Wait until all clients have come this far."""
    assert _BARRIER is not None
    await asyncio.to_thread(_BARRIER.wait)


async def ask(run: Run, load: int, questions: Sequence[Question], warm_up: Sequence[Question]) -> Part:
    """One client's share of a run, ``load`` questions in flight."""
    engine = VllmEngine(run.url, prompt=read_prompt(PROMPT), sampling=SAMPLING, label_mass=False)
    listener, stop = Listener(engine), asyncio.Event()
    try:
        info = await engine.info()
        engine.cache_salt = secrets.token_hex(8)
        await at_load(engine, warm_up, BUDGETS, load)
        await _together()
        began = time.time()
        before = await snapshot(engine.client)
        timer = asyncio.get_running_loop().call_later(run.seconds, stop.set)
        with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "run.db") as store:
            async with watched() as watch:
                await collect(
                    questions, {run.arm: listener}, store,
                    budgets=BUDGETS, concurrency=load, keep_text=False, stop=stop, grace=30,
                )  # fmt: skip
        timer.cancel()
        after = await snapshot(engine.client)
        await _together()
        engine.cache_salt = secrets.token_hex(8)
        async with watched() as alone:
            system1 = await at_load(engine, questions, (), load, SYSTEM1_SECONDS)
    finally:
        await engine.close()
    served = None if before is None or after is None else between(before, after)
    return Part(listener.heard, info, began, watch, system1, alone, served)


def _client(run: Run, load: int, questions: Sequence[Question], warm_up: Sequence[Question]) -> Part:
    return uvloop.run(ask(run, load, questions, warm_up))


def record(
    run: Run, questions: Sequence[Question], warm_up: Sequence[Question]
) -> tuple[list[Row], dict[str, Any], EngineInfo]:
    """Make one run by as many client processes as keep each of them far from its limit."""
    clients = max(1, run.concurrency // PER_CLIENT)
    load, context = run.concurrency // clients, multiprocessing.get_context("fork")
    chosen = questions[: run.questions]
    with ProcessPoolExecutor(clients, context, _start_client, (context.Barrier(clients),)) as pool:
        shares = [(run, load, chosen[i::clients], warm_up[i::clients][: max(4, 2 * load)]) for i in range(clients)]
        parts = [waiting.result() for waiting in [pool.submit(_client, *share) for share in shares]]
    heard = [one for part in parts for one in part.heard]
    # the load is full until the first client begins its last question; rates are of that time
    began = max(part.began for part in parts)
    full = min(max(one.began for one in part.heard) for part in parts) - began
    within = [one for one in heard if one.ended <= began + full]
    lags = np.concatenate([part.watch.lags for part in parts])
    length = parts[0].served.acceptance_length if parts[0].served else math.nan
    told = {
        "model": run.model,
        "arm": run.arm,
        "concurrency": run.concurrency,
        "asked": len(heard),
        "seconds": max(one.ended for one in heard) - began,
        "questions_per_s": len(within) / full,
        "thought_tokens_per_s": sum(int(one.answer.tokens[-1]) for one in within if one.answer.budgets) / full,
        "system1_per_s": sum(part.system1 / part.alone.wall for part in parts),
        "acceptance_length": None if math.isnan(length) else length,
        "clients": clients,
        "client_cpu_share": max(part.watch.cpu / part.watch.wall for part in parts),
        "client_cpu_share_system1": max(part.alone.cpu / part.alone.wall for part in parts),
        "client_cpu_ms_per_question": 1e3 * sum(part.watch.cpu for part in parts) / max(1, len(heard)),
        "client_lag_ms": {name: 1e3 * float(np.percentile(lags, q)) for name, q in LAGS.items()},
        "server": parts[0].info.raw.get("version"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    rows = [Row(run.model, run.arm, run.concurrency, one.question, one.answer) for one in heard]
    return rows, told, parts[0].info


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=220)
    parser.add_argument("--at-once", action="store_true", help="servers at once, which then must not share anything")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    given.out.mkdir(parents=True, exist_ok=True)
    questions = in_order(make_questions(given.per_task))
    warm_up = in_order(make_questions(64, seed=WARM_UP_SEED, only=WARM_UP_TASKS))
    rows: list[Row] = []
    found: list[dict[str, Any]] = []
    infos: dict[str, EngineInfo] = {}
    plan = json.loads(given.plan.read_text())
    about, runs = plan["about"], [Run(**document) for document in plan["runs"]]
    with ExitStack() as stack:
        queues = {
            name: stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("fork")))
            for name in {_queue(run, at_once=given.at_once) for run in runs}
        }
        waiting = {
            queues[_queue(run, at_once=given.at_once)].submit(record, run, questions, warm_up): run for run in runs
        }
        for done in as_completed(waiting):
            run = waiting[done]
            if (failure := done.exception()) is not None:  # a run that fails costs no other
                log.error("%s, %s at %d: %s", run.model, run.arm, run.concurrency, failure)
                continue
            more, told, infos[run.model] = done.result()
            rows += more
            found.append(told)
            write_recorded(given.out, questions, rows, found, infos, about)
            sys.stderr.write(json.dumps(told) + "\n")
            sys.stderr.flush()
    if len(found) < len(runs):
        raise SystemExit(f"{len(runs) - len(found)} of {len(runs)} runs failed")


def _queue(run: Run, *, at_once: bool) -> str:
    return run.url if at_once else ""


if __name__ == "__main__":
    main()

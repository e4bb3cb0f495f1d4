"""Latency passes: which questions, the load, idle neighbours, salts, and what the loaded seconds become."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from calib import passes, staged
from calib.busyness import Brake, counters_of, running
from calib.collect import collect as collect_all
from calib.crew import Progress
from calib.engine.base import Answer, AskFailed, EngineInfo
from calib.engine.decide import DecideEngine
from calib.engine.http import HttpClient
from calib.engine.pool import EnginePool
from calib.errors import CalibError
from calib.passes import reserve
from calib.questions import Question, split_key, split_position
from calib.store import Store, load_outcomes
from tests.misbehaving import questions, truth
from tests.scripted import ScriptedEngine

ASKED = questions(300)
QUICK: dict = {"budgets": (600,), "patience_s": 0.05, "poll_s": 0.01}
INFO = EngineInfo("scripted", {})
ABLE = EngineInfo("scripted", {}, thinks_about_scores=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "l.db") as store:
        yield store


@dataclass
class Metrics:
    """A server that tells how many requests run and wait, as vLLM does."""

    url: str = ""
    running: float = 0
    waiting: float = 0
    queries: float = 0
    hits: float = 0
    there: bool = True
    clients: list[HttpClient] = field(default_factory=list)

    async def answer(self, _request: web.Request) -> web.Response:
        if not self.there:
            return web.Response(status=404)
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0"}} {self.running}\n'
            f"vllm:num_requests_waiting {self.waiting}\n"
            f"vllm:prefix_cache_queries_total {self.queries}\nvllm:prefix_cache_hits_total {self.hits}\n"
        )


@pytest.fixture
async def servers() -> AsyncIterator[list[Metrics]]:
    found, runners = [], []
    for _ in range(2):
        one, app = Metrics(), web.Application()
        app.router.add_get("/metrics", one.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found.append(one)
        runners.append(runner)
    yield found
    for one, runner in zip(found, runners, strict=True):
        for client in one.clients:
            await client.close()
        await runner.cleanup()


class Timed(ScriptedEngine):
    """Answers after a moment; may have metrics, and notes what it does."""

    client: HttpClient | None = None
    metrics: Metrics | None = None
    on_ask = None

    async def ask(self, question: Question, budgets: Sequence[int], **options: bool) -> Answer:
        if self.on_ask is not None:
            self.on_ask(question)
        await asyncio.sleep(0.001)
        if self.metrics is not None:
            self.metrics.queries += 100
            self.metrics.hits += 25
        return await super().ask(question, budgets, **options)


@dataclass
class Salted(Timed):
    """Takes a salt, as the engine of vLLM does."""

    cache_salt: str | None = "the user's"
    salts: list[str | None] = field(default_factory=list)

    async def ask(self, question: Question, budgets: Sequence[int], **options: bool) -> Answer:
        self.salts.append(self.cache_salt)
        return await super().ask(question, budgets, **options)


def timed(kind: type[Timed] = Timed, metrics: Metrics | None = None) -> Timed:
    engine = kind(p1=lambda q: truth(q.question, 4)[0], p2=lambda q, _: truth(q.question, 4)[1], simulated=False)
    if metrics is not None:
        engine.metrics, engine.client = metrics, HttpClient(metrics.url, retries=0)
        metrics.clients.append(engine.client)
    return engine


# --- which questions --------------------------------------------------------------------------------------------------


def test_what_is_reserved_is_an_even_share_of_the_tune_side() -> None:
    both = ASKED + questions(100, dataset="other") + questions(50, dataset="levels", kind="score")
    kept = reserve(both, 20, (1, 8), INFO, test_share=0.3)
    counts = Counter(question.dataset for question in kept)
    assert len(kept) == 40
    assert counts["small"] == pytest.approx(30, abs=2)
    assert all(split_position(split_key(question)) >= 0.3 for question in kept)
    assert reserve(both, 10, (1, 8), INFO, test_share=0.3) == kept[:20]
    assert not any(question.kind == "score" for question in kept)
    assert any(question.kind == "score" for question in reserve(both, 20, (1, 8), ABLE, test_share=0.3))
    few = reserve(ASKED[:40], 100, (1,), INFO, test_share=0.3)
    assert 3 <= len(few) <= 40 // 5  # at most a fifth


async def test_each_pass_has_questions_of_its_own_that_the_server_does_not_know(store: Store) -> None:
    engine = timed()
    reserved = reserve(ASKED, 15, (1, 4), INFO, test_share=0.3)
    options: dict = {"budgets": (600,), "concurrency": 4, "pilot": 40}
    await staged.collect(ASKED, "base", engine, store, confirm=lambda _: False, reserved=reserved, **options)
    known = {question.id for question, *_ in engine.asked}
    assert not known & {question.id for question in reserved}
    engine.asked.clear()
    progress: list[Progress] = []
    one, four = await passes.collect(
        ASKED, {"base": engine}, store, concurrencies=(1, 4), sample=15, progress=progress.append, answers_at=4, **QUICK
    )
    assert (one.state, one.timed, one.concurrency, four.state, four.timed) == ("done", 15, 1, "done", 15)
    (model,) = store.models()
    first, second = (store.timed_in_pass(model.fingerprint, "base", load, 2) for load in (1, 4))
    assert first | second == {(question.dataset, question.id) for question in reserved}
    assert not first & second
    assert {p.stage for p in progress} == {"latency at 1", "latency at 4"}
    assert one.gpu_hours == pytest.approx(15 * 6.05 / 3600)
    # at the load of the answers they are answers too; at another one they are seconds alone
    covered = store.coverage(model.fingerprint, "base")
    assert all(covered[name].budgets == {600} for name in second)
    assert all(not covered[name].system1 and covered[name].timed == {600} for name in first)
    assert await passes.collect(ASKED, {"base": engine}, store, concurrencies=(1, 4), sample=15, **QUICK) == []
    (again,) = await passes.collect(
        ASKED, {"base": engine}, store, concurrencies=(1,), sample=5, again=True, answers_at=4, **QUICK
    )
    assert (again.number, again.timed) == (3, 5)
    assert "asked some of these questions before" in again.note  # there are no new ones left


async def test_another_arm_is_timed_on_questions_that_the_first_one_answered(store: Store) -> None:
    base, mtp = timed(), timed()
    await staged.collect(ASKED, "base", base, store, budgets=(600,), pilot=40, confirm=lambda _: False)
    (report,) = await passes.collect(ASKED, {"mtp": mtp}, store, concurrencies=(2,), sample=30, answers_at=32, **QUICK)
    (model,) = store.models()
    thought = {name for name, one in store.coverage(model.fingerprint, "base").items() if one.budgets}
    assert len(store.timed_in_pass(model.fingerprint, "mtp", 2, report.number) & thought) == 30
    outcomes = load_outcomes(store, arms=["mtp"])
    assert outcomes.concurrency.tolist() == [2]
    assert outcomes.has_latency("mtp")  # the line fills in what was not timed, System 1's seconds too
    assert outcomes.estimated.tolist() == [[True, True]]
    assert (outcomes.t1 == 0.05).all()
    np.testing.assert_allclose(outcomes.t2, 6.0)


async def test_a_salt_keeps_the_cache_out_and_is_taken_back(store: Store) -> None:
    engine = timed(Salted)
    await collect_all(ASKED[:60], {"base": engine}, store, budgets=(600,), concurrency=4)
    engine.salts.clear()
    reports = await passes.collect(ASKED[:60], {"base": engine}, store, concurrencies=(1, 2), sample=10, **QUICK)
    assert [report.timed for report in reports] == [10, 10]
    assert all("cache" not in report.note for report in reports)
    assert len(set(engine.salts)) == 2  # one for each pass
    assert "the user's" not in engine.salts
    assert engine.cache_salt == "the user's"
    assert passes.takes_salt(EnginePool([timed(Salted), timed(Salted)]))
    assert not passes.takes_salt(EnginePool([timed(Salted), timed()]))


# --- the load ---------------------------------------------------------------------------------------------------------


async def test_the_load_is_full_from_the_first_measured_question_to_the_last(store: Store) -> None:
    engine = timed()
    (report,) = await passes.collect(ASKED, {"base": engine}, store, concurrencies=(8,), sample=20, **QUICK)
    (model,) = store.models()
    measured = {name for _, name in store.timed_in_pass(model.fingerprint, "base", 8, report.number)}
    order = [question.id for question, *_ in engine.asked]
    places = [i for i, name in enumerate(order) if name in measured]
    assert len(measured) == report.timed == 20
    assert places[0] >= 1  # some were asked to warm it up
    assert not measured & set(order[:1])
    assert engine.most_open <= 8
    assert load_outcomes(store).n == 20  # what only kept up the load is not stored


async def test_failures_are_seconds_too(store: Store) -> None:
    engine = timed()
    engine.failure, engine.fails_in = AskFailed("timeout", "late", seconds=30.0), "system1"
    (report,) = await passes.collect(ASKED, {"base": engine}, store, concurrencies=(2,), sample=5, **QUICK)
    assert (report.timed, report.failed, report.state) == (0, 5, "done")
    (status,) = store.status().models
    assert status.failures[0].questions == 5
    assert report.gpu_hours == pytest.approx(5 * 30 / 2 / 3600)


async def test_a_stop_leaves_a_pass_open_and_the_next_call_goes_on(store: Store) -> None:
    engine, stop = timed(), asyncio.Event()
    engine.on_ask = lambda _: stop.set() if len(engine.asked) >= 12 else None
    (report,) = await passes.collect(ASKED, {"base": engine}, store, concurrencies=(1,), sample=20, stop=stop, **QUICK)
    assert report.state == "open"
    assert 0 < report.timed < 20
    engine.on_ask = None
    (rest,) = await passes.collect(ASKED, {"base": engine}, store, concurrencies=(1,), sample=20, **QUICK)
    assert (rest.number, rest.state, rest.timed) == (report.number, "done", 20 - report.timed)


# --- idle neighbours --------------------------------------------------------------------------------------------------


async def test_a_pass_beside_a_busy_server_is_void_and_does_not_count(store: Store, servers: list[Metrics]) -> None:
    base, mtp = timed(metrics=servers[0]), timed(metrics=servers[1])

    def others_work(_: Question) -> None:
        servers[1].running = 3 * (len(base.asked) >= 10)

    base.on_ask = others_work
    base_slow = base.ask
    arms = {"base": base, "mtp": mtp}

    async def ask(question: Question, budgets: Sequence[int], **options: bool) -> Answer:
        await asyncio.sleep(0.03)
        return await base_slow(question, budgets, **options)

    base.ask = ask  # type: ignore[method-assign]
    options: dict = {"concurrencies": (2,), "sample": 30, "only": ["base"], **QUICK}
    (void,) = await passes.collect(ASKED, arms, store, **options)
    assert void.state == "void"
    assert void.note == "3 requests ran on 'mtp' meanwhile"
    assert 0 < void.timed < 30
    outcomes = load_outcomes(store)
    assert np.isnan(outcomes.t1).all()  # kept, and not used
    assert (load_outcomes(store, void_passes=True).t1 == 0.05).all()
    base.asked.clear()
    (still,) = await passes.collect(ASKED, arms, store, **options)
    assert (still.state, still.timed, base.asked) == ("void", 0, [])
    assert "before it began" in still.note
    servers[1].running, base.on_ask = 0, None
    (done,) = await passes.collect(ASKED, arms, store, **options)
    assert (done.state, done.timed, done.note, done.number) == ("done", 30, "", 4)
    assert done.hit_rate == pytest.approx(0.25)
    assert not np.isnan(load_outcomes(store).t1).all()


async def test_what_cannot_be_checked_is_said(store: Store, servers: list[Metrics]) -> None:
    servers[1].there = False
    arms = {"base": timed(metrics=servers[0]), "mtp": timed(metrics=servers[1])}
    (report,) = await passes.collect(ASKED, arms, store, concurrencies=(1,), sample=3, only=["base"], **QUICK)
    assert report.state == "done"
    assert "'mtp' has no /metrics" in report.note
    assert np.isnan(await running(arms["mtp"]))
    assert await counters_of(timed()) is None


async def test_score_questions_are_timed_where_the_engine_can_think_about_them(store: Store) -> None:
    engine = timed()
    engine.thinks_about_scores = True
    engine.p1, engine.p2 = (lambda q: truth(q.question, 6)[0]), (lambda q, _: truth(q.question, 6)[1])
    levels = questions(40, dataset="levels", kind="score")
    (one,) = await passes.collect(levels, {"base": engine}, store, concurrencies=(4,), **QUICK)
    assert (one.state, one.failed) == ("done", 0)
    assert one.timed > 0
    assert all(budgets for _, budgets, *_ in engine.asked)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sample": 0}, "--latency-sample"),
        ({"concurrencies": ()}, "--latency-concurrency"),
        ({"budgets": ()}, "budgets"),
        ({"only": ["mtp"]}, "does not run"),
        ({"questions": questions(5, kind="score")}, "can be thought about"),
    ],
)
async def test_what_cannot_be_timed(store: Store, change: dict, named: str) -> None:
    with pytest.raises(CalibError, match=named):
        await passes.collect(**({"questions": ASKED, "arms": {"base": timed()}, "store": store} | QUICK | change))


# --- holding back -----------------------------------------------------------------------------------------------------


async def test_no_question_is_begun_while_requests_wait(store: Store, servers: list[Metrics]) -> None:
    engine = timed(metrics=servers[0])
    servers[0].waiting = 6
    progress: list[Progress] = []
    task = asyncio.create_task(
        collect_all(
            ASKED[:20],
            {"base": engine},
            store,
            budgets=(),
            pause_when_waiting=5,
            progress=progress.append,
            concurrency=4,
        )
    )
    await asyncio.sleep(0.5)
    assert engine.asked == []
    assert progress[-1].paused
    servers[0].waiting = 5
    summary = await task
    assert (summary.arms[0].asked, summary.warnings) == (20, ())


async def test_a_stop_gets_through_a_brake_and_a_blind_one_never_holds(store: Store, servers: list[Metrics]) -> None:
    engine, stop = timed(metrics=servers[0]), asyncio.Event()
    servers[0].waiting = 1
    asyncio.get_running_loop().call_later(0.2, stop.set)
    summary = await collect_all(
        ASKED[:5], {"base": engine}, store, budgets=(), pause_when_waiting=0, stop=stop, grace=1.0
    )
    assert summary.interrupted
    servers[0].there = False
    summary = await collect_all(ASKED[:5], {"base": engine}, store, budgets=(), pause_when_waiting=0)
    assert summary.arms[0].asked == 5
    assert "no /metrics" in summary.warnings[0]


async def test_a_brake_that_breaks_lets_go() -> None:
    engine = DecideEngine("http://127.0.0.1:9")

    class Broken:
        def __iter__(self) -> Iterator[HttpClient]:
            raise CalibError("the key is refused", exit_code=1)

    engine.clients = Broken()  # type: ignore[attr-defined]
    brake = Brake(engine, 0)
    with pytest.raises(CalibError):
        await brake.run()
    assert not brake.held


async def test_a_pool_is_as_busy_as_all_its_servers(servers: list[Metrics]) -> None:
    pool = EnginePool([timed(metrics=one) for one in servers])
    servers[0].running, servers[1].waiting = 2, 3
    assert await running(pool) == 5
    servers[1].there = False
    assert np.isnan(await running(pool))


async def test_a_server_that_is_another_one_after_the_pass_makes_it_void(store: Store) -> None:
    class Changing(ScriptedEngine):
        async def info(self) -> EngineInfo:
            info = await super().info()
            return replace(info, identity={"model": "other"}) if self.asked else info

        async def ask(self, question: Question, budgets: Sequence[int], **options: bool) -> Answer:
            await asyncio.sleep(0.001)
            return await super().ask(question, budgets, **options)

    one = Changing(p1=lambda q: truth(q.question, 4)[0], p2=lambda q, _: truth(q.question, 4)[1])
    with pytest.raises(CalibError, match="replaced while it was asked"):
        await passes.collect(ASKED, {"base": one}, store, concurrencies=(2,), sample=20, answers_at=2, **QUICK)
    (model,) = store.models()
    (row,) = store.passes(model.fingerprint)
    assert (row.state, row.note) == ("void", "the server was replaced")
    assert (load_outcomes(store).flaw == "replaced").all()

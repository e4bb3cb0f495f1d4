"""Thoughts that must be answered in time: closed, read from the cut, whatever the stream does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from calib.engine.base import AskFailed, PartlyFailed
from calib.engine.closing import SLACK, Closing, ReadTimes
from calib.engine.http import HttpClient
from calib.engine.vllm import VllmEngine
from calib.gateway import DecideRequest, Gateway
from calib.policy import Policy
from calib.questions import Question
from tests.misbehaving import edit, reset, slow, status, text
from tests.patience import undisturbed
from tests.vllm_like import VllmLike

CHOICE = Question("1", "d", "choice", "A blue cube.", "What colour is it?", ("blue", "red", "green"), 0)
BUDGETS = (5, 20, 300)
LATE = 0.2
"""Seconds by which an answer may miss its deadline on a busy machine."""

Start = Callable[..., Awaitable[tuple[VllmLike, VllmEngine]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts servers, each with an engine that was made known to it."""
    opened: list[tuple[VllmLike, VllmEngine]] = []

    async def start(*, endless: bool = True, pace: float = 0.01, retries: int = 1) -> tuple[VllmLike, VllmEngine]:
        server = await VllmLike().__aenter__()
        client = HttpClient(server.url, timeout=30, retries=retries)
        engine = VllmEngine(server.url, client=client, label_mass=False)
        opened.append((server, engine))
        await engine.info()
        server.end_share = 0.0 if endless else server.end_share
        server.pace = pace
        return server, engine

    yield start
    for server, engine in opened:
        await engine.close()
        await server.__aexit__()


def good(_answer: Any) -> None:
    """No change."""


def p_of_cut(server: VllmLike, tokens: int) -> Any:
    """What the model answers after so many tokens of the thought that was asked for last."""
    body = server.bodies("trace")[-1]
    ids, _ = server.thought(body["prompt"], tokens, body["seed"], body["stop_token_ids"])
    close = server.tokenizer.encode("\n") + server.tokenizer.encode("</think>\n\nAnswer: (")
    return server.probabilities(body["prompt"] + ids + close, [server.tokenizer.ids[t] for t in "ABC"])


async def timed(call: Awaitable[Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return await call, time.perf_counter() - started


# --- a thought that is streamed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_event", [1, 4, 1000])
async def test_a_thought_that_ends_in_time_is_the_same_as_without_a_deadline(start: Start, per_event: int) -> None:
    server, engine = await start(endless=False, pace=0.0)
    server.per_event = per_event
    whole = await engine.ask(CHOICE, BUDGETS, keep_text=True)
    assert "stream" not in server.bodies("trace")[-1]
    streamed = await engine.ask(CHOICE, BUDGETS, keep_text=True, deadline=20)
    assert server.bodies("trace")[-1]["stream"] is True
    assert 20 < whole.tokens[-1] < 300
    assert streamed.p2 == pytest.approx(whole.p2)
    assert streamed.p1 == pytest.approx(whole.p1)
    for name in ("tokens", "finished"):
        assert getattr(streamed, name).tolist() == getattr(whole, name).tolist()
    assert streamed.text == whole.text
    assert not streamed.closed
    assert server.left_at == []


async def test_the_budget_cuts_a_streamed_thought_as_any(start: Start) -> None:
    server, engine = await start(pace=0.0)
    answer = await engine.ask(CHOICE, (20,), deadline=20)
    assert (answer.tokens.tolist(), answer.finished.tolist(), answer.closed) == ([20], [False], False)
    assert answer.p2[0] == pytest.approx(p_of_cut(server, 20))


@pytest.mark.parametrize("per_event", [1, 4])
@undisturbed
async def test_a_deadline_closes_the_thought_and_the_answer_is_read_from_the_cut(start: Start, per_event: int) -> None:
    server, engine = await start()
    server.per_event = per_event
    answer, seconds = await timed(engine.ask(CHOICE, (300,), keep_text=True, deadline=0.8))
    (tokens,) = answer.tokens.tolist()
    assert answer.closed
    assert answer.finished.tolist() == [False]
    assert 10 < tokens < 300
    assert tokens % per_event == 0
    assert answer.p2[0] == pytest.approx(p_of_cut(server, tokens))
    assert seconds < 0.8 + LATE
    assert answer.t2[0] == pytest.approx(seconds - answer.t1, abs=0.05)
    await asyncio.sleep(0.05)
    assert server.left_at  # the server saw the client leave, and generates no more
    assert tokens <= server.left_at[0] <= tokens + 3 * per_event
    body = server.bodies("trace")[-1]
    ids, _ = server.thought(body["prompt"], tokens, body["seed"], body["stop_token_ids"])
    assert answer.text == server.tokenizer.decode(ids)


@undisturbed
async def test_of_several_budgets_those_beyond_hold_the_cut(start: Start) -> None:
    server, engine = await start()
    answer = await engine.ask(CHOICE, BUDGETS, deadline=0.8)
    got = int(answer.tokens[-1])
    assert answer.closed
    assert answer.budgets == BUDGETS
    assert 20 < got < 300
    assert answer.tokens.tolist() == [5, 20, got]
    assert not answer.finished.any()
    for row, tokens in enumerate(answer.tokens.tolist()):
        assert answer.p2[row] == pytest.approx(p_of_cut(server, tokens))


@undisturbed
async def test_a_stream_that_stands_still_is_closed_by_the_clock(start: Start) -> None:
    server, engine = await start(pace=0.0)
    server.stalls_after = 7
    answer, seconds = await timed(engine.ask(CHOICE, (300,), deadline=0.5))
    assert (answer.tokens.tolist(), answer.closed) == ([7], True)
    assert answer.p2[0] == pytest.approx(p_of_cut(server, 7))
    assert 0.2 < seconds < 0.5 + LATE


@undisturbed
async def test_a_thought_that_is_over_is_whole_though_the_stream_goes_on(start: Start) -> None:
    server, engine = await start(endless=False, pace=0.0)
    whole = await engine.ask(CHOICE, (300,))
    server.stalls_after = 300
    answer, seconds = await timed(engine.ask(CHOICE, (300,), deadline=0.5))
    assert (answer.finished.tolist(), answer.closed) == ([True], False)
    assert answer.tokens.tolist() == whole.tokens.tolist()
    assert answer.p2 == pytest.approx(whole.p2)
    assert seconds < 0.5 + LATE


@undisturbed
async def test_without_a_token_in_time_there_is_no_answer_but_system_1s(start: Start) -> None:
    server, engine = await start()
    server.stalls_after = 0
    failed, seconds = await timed(_failure(engine.ask(CHOICE, (300,), deadline=0.3)))
    assert isinstance(failed, PartlyFailed)
    assert (failed.reason, failed.stage, failed.tokens) == ("deadline", "system2", 0)
    assert failed.partial.p1 is not None
    assert seconds < 0.3 + LATE
    assert (await _failure(engine.ask(CHOICE, (300,), system1=False, deadline=-1))).reason == "deadline"


@contextmanager
def elsewhere() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Another thread with an event loop, which runs what it is given."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@undisturbed
async def test_what_came_while_the_loop_was_busy_counts() -> None:
    with elsewhere() as run:
        server = run(VllmLike().__aenter__())
        engine = VllmEngine(server.url, label_mass=False)
        try:
            await engine.info()
            server.end_share, server.pace, server.stalls_after = 0.0, 0.01, 40
            asked = asyncio.create_task(engine.ask(CHOICE, (300,), system1=False, deadline=1.0))
            await asyncio.sleep(0.1)
            time.sleep(1.2)  # meanwhile the deadline passes, and the rest of the tokens comes
            answer = await asked
        finally:
            await engine.close()
            run(server.__aexit__())
    assert (answer.tokens.tolist(), answer.closed) == ([40], True)
    assert answer.p2[0] == pytest.approx(p_of_cut(server, 40))


@pytest.mark.parametrize("way", ["breaks_after", "fails_after"])
async def test_a_stream_that_breaks_is_read_from_the_cut(start: Start, way: str) -> None:
    server, engine = await start(pace=0.0)
    setattr(server, way, 9)
    answer = await engine.ask(CHOICE, (5, 300), deadline=20)
    assert (answer.tokens.tolist(), answer.finished.tolist(), answer.closed) == ([5, 9], [False, False], False)
    assert answer.p2[1] == pytest.approx(p_of_cut(server, 9))
    assert len(server.bodies("trace")) == 1  # it was not asked for again


async def test_a_stream_that_never_begins_is_asked_for_again_and_then_given_up(start: Start) -> None:
    server, engine = await start(pace=0.0)
    server.faults["trace"] = [reset]
    assert (await engine.ask(CHOICE, (20,), deadline=20)).tokens.tolist() == [20]
    server.faults["trace"] = [status(503), reset]
    failed = await _failure(engine.ask(CHOICE, (20,), system1=False, deadline=20))
    assert (failed.reason, failed.stage, failed.attempts) == ("connection", "system2", 2)
    server.fails_after = 0
    failed = await _failure(engine.ask(CHOICE, (20,), system1=False, deadline=20))
    assert (failed.reason, failed.detail) == (
        "http_500",
        "{'message': 'EngineCore encountered an issue.', 'type': 'InternalServerError', 'code': 500}",
    )


@undisturbed
async def test_patience_with_a_busy_server_ends_in_time(start: Start) -> None:
    server, engine = await start(retries=100)
    server.always["trace"] = status(503, Retry_After="1")
    failed, seconds = await timed(_failure(engine.ask(CHOICE, (20,), deadline=0.4)))
    assert failed.reason == "deadline"
    assert seconds < 0.4 + LATE


@pytest.mark.parametrize(("ignored", "reason"), [("budget", "budget_exceeded"), ("token_ids", "missing_field")])
async def test_a_server_that_streams_otherwise_than_asked_is_no_cut_thought(
    start: Start, ignored: str, reason: str
) -> None:
    server, engine = await start(pace=0.0)
    server.ignores.add(ignored)
    assert (await _failure(engine.ask(CHOICE, (20,), system1=False, deadline=20))).reason == reason


async def test_a_read_that_fails_tells_how_much_was_thought(start: Start) -> None:
    server, engine = await start(pace=0.0)
    server.faults["read"] = [status(400)]
    failed = await _failure(engine.ask(CHOICE, (20,), system1=False, deadline=20))
    assert (failed.reason, failed.tokens) == ("refused", 20)


async def _failure(call: Awaitable[Any]) -> AskFailed:
    with pytest.raises(AskFailed) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_may_come_in_any_pieces(size: int) -> None:
    body = b': a comment\r\nid: 3\r\ndata: {"a":"\xc3\xbc"}\r\n\r\ndata:{"b":[1,2]}\n\ndata: [DONE]\n\n'

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for at in range(0, len(body), size):
            await response.write(body[at : at + size])
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_post("/x", answer)
    async with TestServer(app) as server:
        client, taken = HttpClient(str(server.make_url("/"))), []
        reply = await client.stream("/x", {}, taken.append)
        await client.close()
    assert taken == [{"a": "ü"}, {"b": [1, 2]}]
    assert (reply.data, reply.attempts) == (None, 1)


@pytest.mark.parametrize("event", ["{", "[1, 2]", "{}", '{"choices": [3]}'])
async def test_an_event_that_is_none_is_refused(start: Start, event: str) -> None:
    server, engine = await start()
    server.always["trace"] = text(f"data: {event}\n\n")
    failed = await _failure(engine.ask(CHOICE, (20,), system1=False, deadline=20))
    assert failed.reason == ("bad_json" if event == "{" else "missing_field")


# --- how much time a read is given ------------------------------------------------------------------------------------


def test_read_times_by_hand() -> None:
    times = ReadTimes()
    assert times.reserve == float("inf")
    times.system1_took(0.4)  # mean 0.4, deviation half of it
    assert times.reserve == pytest.approx(0.4 + 4 * 0.2 + SLACK)
    times.system1_took(0.8)  # 0.4 off: deviation 0.2 + (0.4 - 0.2) / 4 = 0.25; mean 0.4 + 0.4 / 8 = 0.45
    assert times.reserve == pytest.approx(0.45 + 4 * 0.25 + SLACK)
    times.took(0.1)  # 0.1 + 4 * 0.05: the larger one holds
    assert times.reserve == pytest.approx(0.45 + 4 * 0.25 + SLACK)
    times.took(2.1)  # 2.0 off: deviation 0.05 + 1.95 / 4 = 0.5375; mean 0.1 + 0.25 = 0.35
    assert times.reserve == pytest.approx(0.35 + 4 * 0.5375 + SLACK)


def test_steady_reads_need_little_reserve_and_a_slow_one_is_forgotten() -> None:
    times = ReadTimes()
    for _ in range(100):
        times.took(0.05)
    assert times.reserve == pytest.approx(0.05 + SLACK, abs=1e-3)
    times.took(2.0)
    assert times.reserve > 2.0
    for _ in range(20):
        times.took(0.05)
    assert times.reserve < 0.3


async def test_at_most_half_of_the_time_is_kept_for_the_read() -> None:
    times, now = ReadTimes(), asyncio.get_running_loop().time()
    assert Closing(times, now + 1.0).due == pytest.approx(now + 0.5, abs=0.01)  # nothing is known
    for _ in range(100):
        times.took(0.1)
    closing = Closing(times, now + 1.0)
    assert closing.due == pytest.approx(now + 0.9 - SLACK, abs=0.01)
    for _ in range(20):
        times.took(3.0)
    assert closing.due == pytest.approx(now + 0.5, abs=0.01)  # it follows, also of a thought that is on its way


async def test_a_read_that_is_given_up_counts_twice_and_one_that_fails_not() -> None:
    times = ReadTimes()
    closing = Closing(times, asyncio.get_running_loop().time() + 10)

    async def read(seconds: float) -> None:
        with closing.reading(closed=False):
            await asyncio.sleep(seconds)

    task = asyncio.create_task(read(10))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert times.reserve == pytest.approx(0.2 + 4 * 0.1 + SLACK, abs=0.15)
    before = times.reserve
    with pytest.raises(AskFailed), closing.reading(closed=False):
        raise AskFailed("http_500")
    assert times.reserve == before


async def test_a_late_closing_counts_as_reading() -> None:
    times = ReadTimes()
    closing = Closing(times, asyncio.get_running_loop().time())  # it was due at once
    await asyncio.sleep(0.1)
    with closing.reading(closed=True):
        pass
    assert times.reserve >= 0.1 + 4 * 0.05


@undisturbed
async def test_thoughts_are_closed_the_earlier_the_slower_reads_are(start: Start) -> None:
    server, engine = await start()
    await engine.ask(CHOICE, (5,), deadline=5)
    quick = await engine.ask(CHOICE, (300,), system1=False, deadline=1.0)
    server.always["read"] = slow(0.3)
    for _ in range(4):
        await engine.ask(CHOICE, (1,), system1=False, deadline=5)
    late, seconds = await timed(engine.ask(CHOICE, (300,), system1=False, deadline=1.0))
    assert late.closed
    assert late.tokens[0] < quick.tokens[0] - 10
    assert seconds < 1.0 + LATE


# --- through the gateway ----------------------------------------------------------------------------------------------


def request(**fields: Any) -> DecideRequest:
    whole = {"kind": CHOICE.kind, "state": CHOICE.state, "question": CHOICE.question, "options": list(CHOICE.options)}
    return DecideRequest.model_validate({**whole, **fields})


async def gateway(engine: VllmEngine, policy: Policy) -> Gateway:
    return Gateway(engine, await engine.info(), policy)


@undisturbed
async def test_the_gateway_answers_from_the_cut_in_time(start: Start) -> None:
    server, engine = await start()
    gate = await gateway(engine, Policy(1.1, 1.0, 300, deadline=0.8))
    answer, seconds = await timed(gate.decide(request(return_reasoning=True)))
    thinking = answer["thinking"]
    assert (thinking["closed_by_deadline"], thinking["finished_within_budget"]) == (True, False)
    assert answer["probabilities"] == pytest.approx(p_of_cut(server, thinking["think_tokens"]))
    assert thinking["reasoning"].startswith(" w")
    assert "degraded" not in answer
    assert seconds < 0.8 + LATE


@undisturbed
async def test_a_read_that_hangs_gives_system_1s_answer_at_the_deadline(start: Start) -> None:
    server, engine = await start()
    gate = await gateway(engine, Policy(1.1, 1.0, 300, deadline=0.5))
    alone = (await gate.decide(request(thinking="off")))["probabilities"]
    before = engine._read_times.reserve
    server.faults["read"] = [edit(good), slow(60)]
    answer, seconds = await timed(gate.decide(request()))
    assert answer["probabilities"] == pytest.approx(alone)
    assert (answer["degraded"], answer["degraded_reason"]) == (True, "deadline")
    assert 0.4 < seconds < 0.5 + LATE
    await asyncio.sleep(0.05)
    assert engine._read_times.reserve > 1.5 * before  # the read that was given up has been learned from


@pytest.mark.parametrize("kind", ["render", "read", "trace"])
@undisturbed
async def test_an_upstream_that_hangs_anywhere_holds_no_answer_up(start: Start, kind: str) -> None:
    server, engine = await start()
    gate = await gateway(engine, Policy(1.1, 0.5, 300, deadline=0.4))
    server.faults[kind] = [slow(60)] if kind == "trace" else [edit(good), slow(60)]  # System 1 comes first
    answer, seconds = await timed(gate.decide(request()))
    assert answer["degraded_reason"] == "deadline"
    assert seconds < 0.4 + LATE
    assert (await gate.decide(request(deadline=5.0, think_budget=5)))["thinking"]["think_tokens"] == 5


@undisturbed
async def test_many_thoughts_at_once_are_all_closed_in_time(start: Start) -> None:
    _, engine = await start(pace=0.05)
    gate = await gateway(engine, Policy(1.1, 1.0, 60, deadline=2.0))
    asked = [request(question=f"Which one is {i}?") for i in range(60)]
    answers = await asyncio.gather(*(timed(gate.decide(one)) for one in asked))
    assert all(answer["thinking"].get("closed_by_deadline") or answer.get("degraded") for answer, _ in answers)
    assert sum("degraded" in answer for answer, _ in answers) <= 6
    assert max(seconds for _, seconds in answers) < 2.0 + LATE
    assert len({answer["policy_version"] for answer, _ in answers}) == 1

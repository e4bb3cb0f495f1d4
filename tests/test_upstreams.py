"""The gateway in front of several real servers: who is asked, who is left out, and when it is ready."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from calib import serve as serve_module
from calib import upstreams
from calib.engine.base import AskFailed, ServerBusy
from calib.errors import CalibError
from calib.serve import create_app, serving
from calib.upstreams import CountedEngine, LateEngine, open_upstreams
from tests.misbehaving import MisbehavingServer, questions, status, truth
from tests.scripted import ScriptedEngine

ASKED = questions(40)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(upstreams, "_PROBE_S", 0.1)
    monkeypatch.setattr(serve_module, "_LOOK_SECONDS", 0.05)


@asynccontextmanager
async def servers(*infos: dict):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MisbehavingServer(delay=0.005, **info)) for info in infos]


@asynccontextmanager
async def gateway(*urls: str, retries: int = 0):
    pool, info = await open_upstreams(urls, vllm={}, retries=retries)
    async with serving(create_app(pool, info=info)) as url, aiohttp.ClientSession(url) as session:
        yield session


async def ask(session, question, thinking="off"):
    body = {"kind": "choice", "state": question.state, "question": question.question, "options": question.options}
    async with session.post("/v1/decide", json=body | {"thinking": thinking}) as response:
        return response.status, await response.json()


async def ready(session) -> int:
    async with session.get("/ready") as response:
        return response.status


async def until(check, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not await check():
            await asyncio.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def test_the_work_is_shared_and_the_answers_are_the_models():
    async with servers({}, {}) as (one, two), gateway(one.url, two.url) as session:
        found = await asyncio.gather(*(ask(session, question) for question in ASKED))
        for question, (code, answer) in zip(ASKED, found, strict=True):
            assert code == 200
            assert np.abs(truth(question.question, 4)[0] - answer["probabilities"]).max() < 1e-12
        assert min(len(one.asked), len(two.asked)) > 10


async def test_a_server_that_dies_loses_no_request_and_one_that_comes_back_is_asked_again():
    async with servers({}, {}) as (one, two), gateway(one.url, two.url) as session:
        port = int(one.url.rpartition(":")[2])
        tasks = [asyncio.create_task(ask(session, question)) for question in ASKED]
        await asyncio.sleep(0.01)
        await one._runner.cleanup()
        assert [code for code, _ in await asyncio.gather(*tasks)] == [200] * len(ASKED)
        before = len(two.asked)
        for question in ASKED[:5]:
            assert (await ask(session, question))[0] == 200
        assert len(two.asked) == before + 5
        assert await ready(session) == 200
        async with session.get("/metrics") as response:
            text = await response.text()
        assert f'calib_upstream_up{{upstream="{one.url}"}} 0.0' in text
        assert f'calib_upstream_up{{upstream="{two.url}"}} 1.0' in text

        async with MisbehavingServer() as again:  # the same model at the old address
            await web.TCPSite(again._runner, "127.0.0.1", port).start()

            async def is_asked() -> bool:
                await asyncio.gather(*(ask(session, question) for question in ASKED[:4]))
                return len(again.asked) > 0

            await until(is_asked)


async def test_it_is_not_ready_while_no_server_is_there_even_if_nobody_asks():
    async with servers({}) as (one,), gateway(one.url) as session:
        assert await ready(session) == 200
        await one._runner.cleanup()

        async def unready() -> bool:
            return await ready(session) == 503

        await until(unready)
        code, answer = await ask(session, ASKED[0])
        assert (code, answer["error"]["type"]) == (502, "UpstreamError")
        async with session.get("/health") as response:
            assert response.status == 200  # the process itself is well: a restart would not help
        async with MisbehavingServer() as again:
            await web.TCPSite(again._runner, "127.0.0.1", int(one.url.rpartition(":")[2])).start()
            await until(lambda: is_ready(session))
            assert (await ask(session, ASKED[0]))[0] == 200


async def is_ready(session) -> bool:
    return await ready(session) == 200


async def test_a_server_that_is_not_there_yet_is_asked_once_it_is():
    port = free_port()
    async with servers({}) as (one,), gateway(one.url, f"http://127.0.0.1:{port}") as session:
        for question in ASKED[:4]:
            assert (await ask(session, question))[0] == 200
        async with MisbehavingServer() as late:
            await web.TCPSite(late._runner, "127.0.0.1", port).start()

            async def is_asked() -> bool:
                await asyncio.gather(*(ask(session, question) for question in ASKED[:4]))
                return len(late.asked) > 0

            await until(is_asked)


async def test_servers_of_different_models_are_refused():
    async with servers({}, {"model": "another"}) as (one, two):
        with pytest.raises(CalibError, match="serves another model .*'another' and 'tiny'"):
            await open_upstreams((one.url, two.url), vllm={})


async def test_no_server_at_all_is_refused_with_the_address():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CalibError, match=f"{url}.* gives no answer") as caught:
        await open_upstreams((url,), vllm={}, retries=0)
    assert caught.value.exit_code == 1


async def test_an_address_that_is_named_twice_is_refused():
    with pytest.raises(CalibError, match="names 127.0.0.1:8000 twice"):
        await open_upstreams(("http://u:secret@127.0.0.1:8000", "http://u:secret@127.0.0.1:8000/"), vllm={})


async def test_a_login_in_an_address_is_never_shown():
    engine = LateEngine("http://user:secret@127.0.0.1:9", vllm={}, retries=0)
    assert "secret" not in repr(engine)
    assert "secret" not in engine.client.url
    with pytest.raises(AskFailed) as caught:
        await engine.ask(ASKED[0], ())
    assert "secret" not in str(caught.value)
    await engine.close()


async def test_a_question_that_a_server_fails_is_tried_again_and_counted_once_it_failed_for_good():
    async with servers({}) as (one,), gateway(one.url, retries=1) as session:
        one.faults[ASKED[0].question] = [status(500)]
        one.faults[ASKED[1].question] = [status(500), status(500)]
        assert (await ask(session, ASKED[0]))[0] == 200
        assert (await ask(session, ASKED[1]))[0] == 502
        async with session.get("/metrics") as response:
            assert 'calib_upstream_errors_total{kind="http_500",stage="system1"} 1.0' in await response.text()


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(AskFailed("nan"), "nan"), (ServerBusy(), "busy"), (CalibError("another key"), "misconfigured")],
)
async def test_failures_are_counted_by_stage_and_kind(failure, kind):
    failures: Counter[tuple[str, str]] = Counter()
    engine = CountedEngine(ScriptedEngine(failure=failure, fails_in="system2"), failures)
    await engine.ask(ASKED[0], ())
    assert failures == {}
    for _ in range(2):
        with pytest.raises(type(failure)):
            await engine.ask(ASKED[0], (8,), system1=False)
    assert failures == {("system2", kind): 2}
    await engine.close()

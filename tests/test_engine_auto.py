"""Which engine an address needs, found out against servers of each kind and of none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from calib.engine.auto import probe
from calib.engine.base import Engine
from calib.engine.decide import DecideEngine
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from tests.misbehaving import MisbehavingServer, questions, status, text
from tests.vllm_like import VllmLike

(QUESTION,) = questions(1)


@pytest.fixture
async def found() -> AsyncIterator[Callable[..., Any]]:
    """Probes, and closes what was found."""
    engines: list[Engine] = []

    async def found(url: str, **options: Any) -> Engine:
        engines.append(await probe(url, **{"retries": 0, "timeout": 5, **options}))
        return engines[-1]

    yield found
    for engine in engines:
        await engine.close()


@pytest.fixture
async def other() -> AsyncIterator[Callable[..., Any]]:
    """A server that answers these paths with this JSON."""
    runners: list[web.AppRunner] = []

    async def other(answers: dict[str, Any], code: int = 200) -> str:
        async def answer(request: web.Request) -> web.Response:
            if request.path not in answers:
                return web.Response(status=404, text="Not Found")
            return web.json_response(answers[request.path], status=code)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runners.append(web.AppRunner(app, access_log=None, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield other
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/decide"])
async def test_a_decide_server(found: Any, suffix: str) -> None:
    said: list[str] = []
    async with MisbehavingServer() as server:
        engine = await found(server.url + suffix, say=said.append)
        assert isinstance(engine, DecideEngine)
        assert (await engine.ask(QUESTION, ())).p1 is not None
    assert said == [f"{server.url}: a decide server, protocol jev27-bare-v1, model tiny"]


async def test_a_vllm_server_with_the_users_options(found: Any) -> None:
    said: list[str] = []
    async with VllmLike() as server:
        engine = await found(server.url + "/v1", vllm={"seed": 4, "sampling": {"temperature": 0.5}}, say=said.append)
        assert isinstance(engine, VllmEngine)
        assert (await engine.info()).identity["seed"] == 4
        assert (await engine.ask(QUESTION, (10,))).budgets == (10,)
    assert said == [f"{server.url}: a stock vLLM server of toy"]


async def test_a_decide_route_of_another_protocol_is_passed_over(found: Any, other: Any) -> None:
    url = await other({"/v1/decide/info": {"protocol": "trust-me"}})
    with pytest.raises(CalibError, match=r"(?s)protocol 'trust-me', another one.*HTTP 404 from GET /v1/models"):
        await found(url)


async def test_another_openai_server_is_told_apart(found: Any, other: Any) -> None:
    url = await other({"/v1/models": {"data": [{"id": "llama"}]}})
    with pytest.raises(CalibError) as failed:
        await found(url)
    assert str(failed.value) == (
        f"{url} is no server that calib can ask. Tried:\n"
        "  HTTP 404 from GET /v1/decide/info: Not Found\n"
        "  GET /v1/models: serves llama, no max_model_len\n"
        "Expected autotrust's server or calib's gateway (GET /v1/decide/info), or vLLM (GET /v1/models with "
        "max_model_len, POST /tokenize). Give the address of one, or name the engine to skip this look"
    )
    assert failed.value.exit_code == 2


async def test_vllm_behind_a_proxy_that_hides_tokenize(found: Any) -> None:
    async with VllmLike() as server:
        server.always["tokenize"] = status(404, "no such route")
        with pytest.raises(CalibError, match=r"(?s)serves toy\n.*HTTP 404 from POST /tokenize: no such route"):
            await found(server.url)
        server.always["tokenize"] = text('{"tokens": 3}')
        with pytest.raises(CalibError, match="no tokens in"):
            await found(server.url)


@pytest.mark.parametrize("models", [{}, {"data": []}, [], {"data": ["x"]}])
async def test_models_that_are_none(found: Any, other: Any, models: Any) -> None:
    url = await other({"/v1/models": models})
    with pytest.raises(CalibError, match="no model, no max_model_len"):
        await found(url)


async def test_a_web_page(found: Any) -> None:
    async with VllmLike() as server:
        server.always["models"] = text("<html>")
        with pytest.raises(CalibError, match=r"GET /v1/models is not JSON"):
            await found(server.url)


async def test_nobody_there(found: Any) -> None:
    with pytest.raises(CalibError, match=r"gives no answer. Tried:\n  GET /v1/decide/info at") as failed:
        await found("http://127.0.0.1:9")
    assert failed.value.exit_code == 1


async def test_a_server_that_wants_a_key(found: Any, other: Any) -> None:
    url = await other({"/v1/decide/info": {}}, code=401)
    with pytest.raises(CalibError, match="wants a key"):
        await found(url)

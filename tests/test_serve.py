"""The gateway over real HTTP: bodies, errors, load, starting and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from calib import __version__
from calib.declog import DecisionLog
from calib.engine import AskFailed, ServerBusy
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.errors import CalibError
from calib.gateway import policy_version
from calib.limits import Admission
from calib.policy import Policy, Route
from calib.running import listen
from calib.serve import ServerThread, open_app, serving
from tests.patience import undisturbed
from tests.scripted import ScriptedEngine

CHOICE = {"kind": "choice", "state": "s", "question": "q", "options": ["red", "green", "blue"]}


@asynccontextmanager
async def client(engine=None, **options):
    app = await open_app(engine or ScriptedEngine(), **options)
    async with serving(app) as url, aiohttp.ClientSession(url) as session:
        yield session


@pytest.fixture(scope="module")
def plain():
    """One server for the tests that leave no trace in it: its engine and URL."""
    engine = ScriptedEngine()
    with ServerThread(lambda: open_app(engine)) as url:
        yield engine, url


@pytest.fixture
async def session(plain):
    plain[0].asked.clear()
    async with aiohttp.ClientSession(plain[1]) as session:
        yield session


async def post(session: aiohttp.ClientSession, data=None, **fields):
    """Status and body of a request; ``data`` is sent as it is."""
    body = json.dumps(CHOICE | fields).encode() if data is None else data
    async with session.post("/v1/decide", data=body) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def metrics(session: aiohttp.ClientSession):
    """Samples of /metrics by name and labels."""
    async with session.get("/metrics") as response:
        assert response.status == 200
        families = text_string_to_metric_families(await response.text())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


async def get(session: aiohttp.ClientSession, path: str):
    async with session.get(path) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


def problem(status: int, kind: str, message: str) -> tuple[int, dict]:
    return status, {"error": {"message": message, "type": kind, "code": status}}


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_an_answer_over_http():
    async with client(policy=Policy(0.75, 0.4, 512)) as session:
        status, answer = await post(session, thinking="auto", debug=True, mix=0.9, surprise={"a": 1})
    assert status == 200
    assert answer["options"] == ["red", "green", "blue"]
    assert answer["probabilities"] == pytest.approx([0.46, 0.44, 0.1], abs=1e-15)
    assert answer["thinking"] == {
        "mode": "auto",
        "threshold": 0.75,
        "budget": 512,
        "used": True,
        "think_tokens": 512,
        "think_seconds": 5.12,
        "finished_within_budget": False,
        "system1": [0.7, 0.2, 0.1],
        "system2": [0.1, 0.8, 0.1],
    }


async def test_the_other_routes():
    async with client(policy=Policy(0.75, 0.4, 512), context_tokens=999) as session:
        status, told = await get(session, "/v1/decide/info")
        assert (status, told["defaults"]["mix"], told["policy"]["think_budget"]) == (200, 0.4, 512)
        assert await get(session, "/health") == (200, {"status": "alive"})
        assert await get(session, "/ready") == (200, {"status": "ready", "model": "scripted"})
        status, models = await get(session, "/v1/models")
        assert (status, models["object"]) == (200, "list")
        (model,) = models["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 999)
        assert abs(model["created"] - time.time()) < 100


async def test_openapi_documents_request_answer_and_errors(session):
    _, described = await get(session, "/openapi.json")
    route = described["paths"]["/v1/decide"]["post"]
    fields = route["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"kind", "state", "question", "options", "thinking", "threshold", "think_budget", "debug"} <= set(fields)
    assert "mix" not in fields
    # no 422: it cannot come
    assert set(route["responses"]) == {"200", "400", "408", "413", "429", "502", "503", "504"}
    assert [each["name"] for each in route["parameters"]] == ["x-calib-dataset"]
    assert set(described["paths"]) == {"/v1/decide", "/v1/decide/info", "/v1/models", "/metrics", "/health", "/ready"}


async def test_numbers_survive_the_way():
    rng = np.random.default_rng(5)
    p1 = rng.dirichlet(np.full(200, 0.01))  # down to 1e-300 and below
    async with client(ScriptedEngine(p1=p1)) as session:
        _, answer = await post(session, thinking="off", options=[f"o{i}" for i in range(200)])
    assert answer["probabilities"] == p1.tolist()


async def test_texts_of_every_alphabet_come_back():
    options = ['a "quoted", one', "naïve\n二行", "三🦜", "\\\\", ""]
    async with client(ScriptedEngine(p1=[0.1, 0.1, 0.6, 0.1, 0.1])) as session:
        _, answer = await post(session, thinking="off", options=options)
    assert (answer["options"], answer["choice"]) == (options, "三🦜")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": ["a"]}, "kind 'choice' needs 2 to 256 options, got 1"),
        ({"kind": "score", "thinking": "on"}, "thinking 'on' is not available for kind 'score'; use 'off'"),
        ({"kind": "score", "system2_only": True}, "system2_only is not available for kind 'score'"),
        ({"reasoning_effort": "high"}, "reasoning_effort is not supported by scripted; leave it out"),
        ({"threshold": 1.2}, "threshold: Input should be less than or equal to 1.1"),
        ({"threshold": float("nan")}, "threshold: Input should be a finite number"),
        ({"think_budget": 0}, "think_budget: Input should be greater than or equal to 1"),
        ({"kind": "open"}, "kind: Input should be 'noul', 'score' or 'choice'"),
        ({"options": ["a", 1]}, "options.1: Input should be a valid string"),
    ],
)
async def test_a_bad_request_says_which_field(session, fields, message):
    assert await post(session, **fields) == problem(400, "BadRequestError", message)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"kind":"noul","question":"\xff"}',
        b'{"kind":"noul","question":"\\ud800"}',
        b'{"kind":"noul","question":"q"} x',
        b'{"kind":"noul","question":"q","state":' + b"[" * 100_000,
        b'{"kind":"noul","question":"q","state":NaN}',
        b'{"kind":"noul","question":"q","think_budget":' + b"9" * 10_000 + b"}",
        b'{"question":"q"}',
    ],
)
async def test_what_is_no_request_is_a_400_and_the_connection_goes_on(plain, session, body):
    status, answer = await post(session, data=body)
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (400, "BadRequestError", 400)
    assert plain[0].asked == []
    assert (await post(session))[0] == 200


async def test_no_error_holds_the_text_of_a_request(session):
    for fields in ({"question": ["private"]}, {"kind": "private"}, {"threshold": "private"}):
        assert "private" not in json.dumps(await post(session, **fields))


async def test_unknown_routes_and_methods(session):
    status, answer = await get(session, "/v1/decide/")
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (404, "NotFoundError", 404)
    async with session.get("/v1/decide") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == 405


async def test_a_body_over_the_limit_is_refused_and_the_connection_goes_on():
    async def chunks():
        for _ in range(30):
            yield b" " * 1000

    engine = ScriptedEngine()
    async with client(engine, max_body=20_000) as session:
        refusal = problem(413, "RequestTooLargeError", "the body has more than 20000 bytes")
        assert await post(session, data=io.BytesIO(b" " * 20_001)) == refusal
        assert await post(session, data=chunks()) == refusal  # its length is not declared
        assert engine.asked == []
        assert (await post(session, state="x" * 19_000))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        *(b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST /v1/decide HTTP/9.9\r\n\r\n"),
        b"POST /v1/decide HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/decide HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /v1/decide HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/decide HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/decide/info\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Calib-Dataset: a\r\n\tb: c\nd\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_harms_nobody(plain, session, sent):
    host, port = plain[1].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    with contextlib.suppress(TimeoutError):
        got = await asyncio.wait_for(reader.read(65536), 0.3)
        assert b" 500 " not in got.partition(b"\r\n")[0]
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert plain[0].asked == []
    assert (await post(session))[0] == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(plain, session, caplog):
    host, port = plain[1].removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v1/decide HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"kind": ')
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await writer.wait_closed()
    assert (await post(session))[0] == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_failure_of_system_1_is_a_502():
    async with client(ScriptedEngine(failure=AskFailed("timeout", "no answer"))) as session:
        assert await post(session, thinking="on") == problem(502, "UpstreamError", "timeout: no answer")


async def test_a_failure_of_system_2_is_system_1s_answer_and_is_counted():
    engine = ScriptedEngine(failure=AskFailed("http_500", "broken"), fails_in="system2")
    async with client(engine) as session:
        status, answer = await post(session, thinking="on")
        assert (status, answer["degraded"], answer["degraded_reason"]) == (200, True, "http_500")
        assert answer["probabilities"] == [0.7, 0.2, 0.1]
        counted = await metrics(session)
    assert counted["calib_degraded_total", (("reason", "http_500"),)] == 1
    assert counted["calib_upstream_errors_total", (("kind", "http_500"), ("stage", "system2"))] == 1


@pytest.mark.parametrize(("fields", "policy", "status"), [({"deadline": 0.05}, None, 408), ({}, 0.05, 504)])
async def test_a_system_1_that_misses_the_deadline_is_no_answer(fields, policy, status):
    engine = ScriptedEngine(gate=asyncio.Event(), simulated=False)
    async with client(engine, policy=Policy(deadline=policy)) as session:
        refusal = problem(status, "DeadlineError", "the model gave no answer within the deadline")
        assert await post(session, thinking="off", **fields) == refusal


async def test_a_refused_key_of_the_model_is_a_502_that_tells_the_log_and_not_the_client(caplog):
    engine = ScriptedEngine(failure=CalibError("10.0.0.7 refuses the key in MODEL_KEY"))
    async with client(engine) as session:
        for _ in range(3):
            status, answer = await post(session)
            assert (status, answer["error"]["type"]) == (502, "UpstreamError")
            assert "10.0.0.7" not in answer["error"]["message"]
    assert caplog.messages == ["10.0.0.7 refuses the key in MODEL_KEY"]  # once, not for each request


@pytest.mark.parametrize(("asked", "told"), [(None, "1"), (0.2, "1"), (2.5, "3"), (40, "40")])
async def test_a_busy_model_is_a_429_with_retry_after(asked, told):
    engine = ScriptedEngine(failure=ServerBusy("full", asked))
    async with client(engine) as session, session.post("/v1/decide", json=CHOICE) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, told)
        assert await response.json() == problem(429, "ServerBusyError", "full")[1]


async def test_a_bug_is_a_500_in_the_same_shape_and_is_logged(caplog):
    async with client(ScriptedEngine(failure=ZeroDivisionError())) as session:
        status, answer = await post(session)
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert any(record.exc_info for record in caplog.records)


async def test_nothing_is_logged_of_requests_that_are_answered_or_refused(caplog):
    caplog.set_level(logging.DEBUG)
    async with client() as session:
        await post(session, state="private", thinking="on", return_reasoning=True)
        await post(session, state="private", options=["private"])
    told = [record for record in caplog.records if record.name != "asyncio"]
    assert "private" not in "".join(record.getMessage() for record in told)


# --- limits, key, routes, counters, log -------------------------------------------------------------------------------


@undisturbed
async def test_a_request_without_a_place_is_a_429_and_those_in_the_queue_are_answered():
    gate = asyncio.Event()
    engine = ScriptedEngine(gate=gate)
    async with client(engine, admission=Admission(2, 3)) as session:
        tasks = [asyncio.create_task(post(session, thinking="off")) for _ in range(5)]
        async with asyncio.timeout(10):
            while (seen := await metrics(session))["calib_requests_queued", ()] < 3:
                await asyncio.sleep(0.01)
        assert (seen["calib_requests_in_flight", ()], engine.most_open) == (2, 2)
        async with session.post("/v1/decide", json=CHOICE) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["type"] == "ServerBusyError"
        started = time.monotonic()
        status, _ = await post(session, deadline=0.2)  # the queue is full for it too
        assert (status, time.monotonic() - started < 0.2) == (429, True)
        gate.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 5
        seen = await metrics(session)
    assert engine.most_open == 2
    assert (seen["calib_requests_in_flight", ()], seen["calib_requests_queued", ()]) == (0, 0)
    assert seen["calib_refused_total", (("reason", "queue_full"),)] == 2
    assert seen["calib_responses_total", (("code", "429"),)] == 2
    assert seen["calib_responses_total", (("code", "200"),)] == 5


async def test_waiting_in_the_queue_counts_for_the_deadline():
    """System 1 comes 0.3 s late because of the queue, and a thought of 6 s is closed that much earlier."""
    gate = asyncio.Event()
    engine = ScriptedEngine(gate=gate, simulated=False, keeps_deadline=True, length=10_000)
    policy = Policy(1.1, 0.5, 8192, deadline=30.0)
    async with client(engine, policy=policy, admission=Admission(1, 3)) as session:
        first = asyncio.create_task(post(session, thinking="off"))
        while not engine.asked:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(post(session))
        asyncio.get_running_loop().call_later(0.3, gate.set)
        (_, _), (status, answer) = await asyncio.gather(first, second)
    assert (status, answer["thinking"]["closed_by_deadline"]) == (200, True)
    assert engine.deadlines[-1] < 29.75
    assert answer["elapsed_seconds"] >= 0.25


async def test_a_request_that_would_wait_beyond_its_deadline_is_a_429():
    engine = ScriptedEngine(gate=asyncio.Event())
    async with client(engine, policy=Policy(deadline=0.1), admission=Admission(1, 3)) as session:
        task = asyncio.create_task(post(session, thinking="off", deadline=60))  # wins over the policy's
        while not engine.asked:
            await asyncio.sleep(0.01)
        status, answer = await post(session)
        assert (status, answer["error"]["message"]) == (
            429,
            "no place came within the deadline of 0.1 s; try again in 1 s",
        )
        engine.gate.set()
        assert (await task)[0] == 200


async def test_a_bug_gives_its_place_back():
    engine = ScriptedEngine(failure=ZeroDivisionError())
    async with client(engine, admission=Admission(1, 0)) as session:
        for _ in range(3):
            async with session.post("/v1/decide", json=CHOICE, headers={"Connection": "close"}) as response:
                assert response.status == 500
        engine.failure = None
        assert (await post(session))[0] == 200
        assert (await metrics(session))["calib_responses_total", (("code", "500"),)] == 3


async def test_with_a_key_only_probes_go_without():
    engine = ScriptedEngine()
    async with client(engine, key="s3cret") as session:
        for path in ("/v1/decide/info", "/v1/models", "/metrics", "/openapi.json", "/absent"):
            async with session.get(path) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert (await response.json())["error"]["code"] == 401
        wrong = {"Authorization": "Bearer s3cres"}
        async with session.post("/v1/decide", json=CHOICE, headers=wrong) as response:
            assert response.status == 401
        assert engine.asked == []
        assert await get(session, "/health") == (200, {"status": "alive"})
        assert await get(session, "/ready") == (200, {"status": "ready"})  # who answers is not for everyone
        right = {"Authorization": "Bearer s3cret"}
        async with session.post("/v1/decide", json=CHOICE, headers=right) as response:
            assert response.status == 200
        async with session.get("/openapi.json", headers=right) as response:
            described = await response.json()
    assert described["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    assert described["paths"]["/v1/decide"]["post"]["security"] == [{"bearer": []}]
    assert "security" not in described["paths"]["/health"]["get"]


async def test_an_oversized_body_without_the_key_is_not_read():
    async with client(key="s3cret", max_body=1000) as session:
        assert (await post(session, data=io.BytesIO(b" " * 5_000_000)))[0] == 401
        assert await get(session, "/health") == (200, {"status": "alive"})


ROUTED = Policy(0.5, 0.5, 256, routes={"dataset=deep": Route(1.1, 512), "dataset=tiefgründig": Route(1.1, 1024)})


async def test_a_header_names_the_dataset_where_the_body_does_not():
    async def budget(session, header, **fields):
        headers = {} if header is None else {"X-Calib-Dataset": header}
        async with session.post("/v1/decide", json=CHOICE | {"thinking": "auto"} | fields, headers=headers) as response:
            assert response.status == 200
            return (await response.json())["thinking"]["budget"]

    async with client(policy=ROUTED) as session:
        assert await budget(session, None) == 256
        assert await budget(session, "deep") == 512
        assert await budget(session, "tiefgründig") == 1024
        assert await budget(session, "deep", dataset="other") == 256  # the body wins
        assert await budget(session, "other", dataset="deep") == 512
        for strange in ("", "deep ", "dataset=deep", "x" * 4000, "a, deep", "%64eep", "\x80\xff"):
            assert await budget(session, strange) == (512 if strange == "deep " else 256)


async def test_the_counters_of_a_few_decisions():
    engine = ScriptedEngine(simulated=True, keeps_deadline=True, length=600)
    policy = Policy(0.75, 0.5, 512)
    version = policy_version(policy)
    async with client(engine, policy=policy) as session:
        await post(session, thinking="off")
        await post(session, thinking="auto")  # 512 tokens in 5.12 s, cut by the budget
        await post(session, thinking="auto", think_budget=1000)  # 600 tokens in 6 s, whole
        await post(session, thinking="on", deadline=2.05)  # 200 tokens in 2 s, closed
        await post(session, thinking="auto", threshold=0.1)  # sure enough
        await post(session, system2_only=True)
        await post(session, thinking="sometimes")
        seen = await metrics(session)

    def decisions(mode, thought):
        return seen["calib_decisions_total", (("mode", mode), ("policy_version", version), ("thought", thought))]

    assert decisions("off", "no") == 1
    assert (decisions("auto", "yes"), decisions("auto", "no")) == (2, 1)
    assert (decisions("on", "yes"), decisions("system2", "yes")) == (1, 1)
    assert seen["calib_thought_tokens_total", ()] == 512 + 600 + 200 + 512
    assert seen["calib_thought_length_tokens_bucket", (("le", "512.0"),)] == 3
    assert seen["calib_thought_length_tokens_bucket", (("le", "1024.0"),)] == 4
    assert seen["calib_thoughts_cut_total", (("by", "budget"),)] == 2
    assert seen["calib_thoughts_cut_total", (("by", "deadline"),)] == 1
    assert seen["calib_decision_seconds_bucket", (("le", "0.05"), ("thought", "no"))] == 2  # just 50 ms, inclusive
    assert seen["calib_decision_seconds_bucket", (("le", "0.025"), ("thought", "no"))] == 0
    assert seen["calib_decision_seconds_bucket", (("le", "5.0"), ("thought", "yes"))] == 1
    assert seen["calib_decision_seconds_bucket", (("le", "+Inf"), ("thought", "yes"))] == 4
    assert seen["calib_decision_seconds_sum", (("thought", "yes"),)] == pytest.approx(5.17 + 6.05 + 2.05 + 5.12)
    assert seen["calib_responses_total", (("code", "200"),)] == 6
    assert seen["calib_responses_total", (("code", "400"),)] == 1
    (told,) = (dict(labels) for name, labels in seen if name == "calib_policy_info")
    assert (told["version"], told["threshold"], told["mix"], told["think_budget"]) == (version, "0.75", "0.5", "512")
    assert seen["calib_build_info", (("version", __version__),)] == 1
    assert seen["process_resident_memory_bytes", ()] > 1e7


async def test_metrics_in_the_newer_format_for_those_who_ask(session):
    async with session.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")
    async with session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")


async def test_no_text_of_a_request_gets_into_metrics_or_log(tmp_path):
    """Whatever a client writes, an exposition stays one, and the log's lines stay lines."""
    strange = ['a"} 1\ncalib_decisions_total 1e9', "\u2028{}\\", "private"]
    async with client(policy=ROUTED, decision_log=DecisionLog(tmp_path / "d.jsonl")) as session:
        for text in strange:
            status, _ = await post(session, state=text, question=text, options=[text, "b", "c"], dataset=text)
            assert status == 200
        for fields in ({"kind": strange[0]}, {"thinking": strange[0]}):
            assert (await post(session, **fields))[0] == 400
        async with session.get("/metrics") as response:
            text = await response.text()
    assert "1e9" not in text
    assert "private" not in text
    logged = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert [line["dataset"] for line in logged] == strange  # the one name that a log of datasets needs
    assert not any("private" in str(value) for line in logged for key, value in line.items() if key != "dataset")


async def test_each_decision_is_logged_once_and_before_the_end(tmp_path):
    path = tmp_path / "d.jsonl"
    async with client(policy=ROUTED, decision_log=DecisionLog(path)) as session:
        answers = [await post(session, question=str(i), thinking="auto") for i in range(20)]
        await post(session, thinking="sometimes")
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["p1"] for line in logged] == [[0.7, 0.2, 0.1]] * 20
    assert {line["policy_version"] for line in logged} == {answer["policy_version"] for _, answer in answers}
    assert len({line["hash"] for line in logged}) == 20


# --- load, starting and stopping --------------------------------------------------------------------------------------


async def test_a_hundred_requests_at_once():
    gate = asyncio.Event()
    engine = ScriptedEngine(p1=lambda q: (1.0, 0.0) if int(q.question) % 2 else (0.0, 1.0), gate=gate)
    async with client(engine) as session:
        asked = [post(session, question=str(i), options=["odd", "even"], thinking="off") for i in range(100)]
        tasks = [asyncio.create_task(each) for each in asked]
        async with asyncio.timeout(20):
            while engine.most_open < 100:
                await asyncio.sleep(0.01)
        gate.set()
        answers = await asyncio.gather(*tasks)
    assert [answer["choice"] for _, answer in answers] == ["even", "odd"] * 50


async def test_leaving_finishes_the_request_in_flight_and_closes_the_engine():
    engine = ScriptedEngine(gate=asyncio.Event())
    async with aiohttp.ClientSession() as session:
        async with serving(await open_app(engine)) as url:
            task = asyncio.create_task(session.post(f"{url}/v1/decide", json=CHOICE | {"thinking": "off"}))
            while not engine.asked:
                await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(0.3, engine.gate.set)
            assert engine.closed == 0
        async with await task as response:
            assert (response.status, (await response.json())["choice"]) == (200, "red")
        assert engine.closed == 1
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/health")


async def test_the_drain_has_an_end():
    engine = ScriptedEngine(gate=asyncio.Event())
    async with aiohttp.ClientSession() as session:
        started = time.monotonic()
        async with serving(await open_app(engine), drain_seconds=1) as url:
            task = asyncio.create_task(session.post(f"{url}/v1/decide", json=CHOICE))
            while not engine.asked:
                await asyncio.sleep(0.01)
        assert 1 <= time.monotonic() - started < 10
        async with await task as response:
            assert (response.status, (await response.json())["error"]["type"]) == (503, "ShuttingDownError")


async def test_an_error_inside_the_block_stops_the_server():
    engine = ScriptedEngine()
    server = serving(await open_app(engine))
    url = await server.__aenter__()
    error = ZeroDivisionError()
    assert not await server.__aexit__(ZeroDivisionError, error, None)
    assert engine.closed == 1
    listen("127.0.0.1", int(url.rpartition(":")[2])).close()  # free again


async def test_an_address_that_is_taken_says_what_to_type():
    app = await open_app(ScriptedEngine())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CalibError, match=f"cannot listen on 127.0.0.1:{port}.*--port") as caught:
            async with serving(app, port=port):
                pass
    assert caught.value.exit_code == 1


async def test_connections_do_not_wait_for_acknowledgements():
    """Nagle's algorithm would put 40 ms between headers and body of an answer."""
    seen = asyncio.Queue()
    with listen("127.0.0.1", 0) as listener:
        server = await asyncio.start_server(lambda _, writer: seen.put_nowait(writer), sock=listener)
        async with server:
            _, mine = await asyncio.open_connection(*listener.getsockname())
            theirs = await seen.get()
            accepted = theirs.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            for writer in (mine, theirs):
                writer.close()
                await writer.wait_closed()


def test_a_server_in_a_thread():
    engine = ScriptedEngine()
    server = ServerThread(lambda: open_app(engine, policy=Policy(mix=0.25)))
    with server as url, urllib.request.urlopen(f"{url}/v1/decide/info") as response:
        assert json.load(response)["defaults"]["mix"] == 0.25
    assert engine.closed == 1


def test_a_thread_that_cannot_start_says_why():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        thread = ServerThread(lambda: open_app(ScriptedEngine()), port=taken.getsockname()[1])
        with pytest.raises(CalibError, match="cannot listen"), thread:
            pass


SERVER = """
import sys
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.serve import open_app, run
engine = SimulatedEngine(load_profile("gev-validation"), time_scale=1)
run(lambda: open_app(engine), announce=lambda url: print(url, file=sys.stderr, flush=True))
print("clean", file=sys.stderr)
"""


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-W", "error", "-c", SERVER], stderr=subprocess.PIPE, text=True)
    with child:
        yield child
        if child.poll() is None:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_finishes_the_request_in_flight(process, number):
    url = process.stderr.readline().strip()
    async with aiohttp.ClientSession(url) as session:
        assert (await get(session, "/health"))[0] == 200  # the one line says where it really listens
        task = asyncio.create_task(post(session, thinking="on", think_budget=200))  # 0.9 s
        await asyncio.sleep(0.4)
        os.kill(process.pid, number)
        status, answer = await task
        assert (status, answer["thinking"]["think_tokens"]) == (200, 200)
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert process.stderr.read() == "clean\n"


async def test_a_second_signal_does_not_wait(process):
    url = process.stderr.readline().strip()
    async with aiohttp.ClientSession(url) as session:
        task = asyncio.create_task(post(session, thinking="on"))  # at least 1.2 s, at most two minutes
        await asyncio.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM)
        assert (await task)[0] == 503  # and not 200, which waiting would have given
    assert await asyncio.to_thread(process.wait, 20) == 0


async def test_a_background_job_ignores_ctrl_c_and_obeys_sigterm():
    """A shell starts a job in the background so that it ignores SIGINT."""
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-W", "error", "-c", SERVER]
    with subprocess.Popen(background, stderr=subprocess.PIPE, text=True) as child:
        try:
            url = child.stderr.readline().strip()
            async with aiohttp.ClientSession(url) as session:
                os.kill(child.pid, signal.SIGINT)
                await asyncio.sleep(0.2)
                assert (await get(session, "/health"))[0] == 200
            os.kill(child.pid, signal.SIGTERM)
            assert await asyncio.to_thread(child.wait, 20) == 0
            assert child.stderr.read() == "clean\n"
        finally:
            child.kill()


# --- in front of the simulated engine ---------------------------------------------------------------------------------


async def test_the_simulated_model_over_http_is_what_the_engine_says():
    engine = SimulatedEngine(load_profile("gev-validation"), arm="mtp")
    policy = Policy(0.7, 0.4, 2048, "mtp")
    questions = engine.profile.questions()[::40]
    async with client(engine, policy=policy, context_tokens=engine.context_tokens) as session:
        _, told = await get(session, "/v1/decide/info")
        assert told["simulated"] is True
        assert told["profile"] == "gev-validation"
        assert told["policy"]["arm"] == told["arm"] == "mtp"
        thought = 0
        for q in questions:
            fields = {"kind": q.kind, "state": q.state, "question": q.question, "options": list(q.options)}
            status, answer = await post(session, **fields, thinking="auto")
            assert status == 200
            cached = await engine.ask(q, (2048,))
            thinks = cached.p1.max() < 0.7
            p = 0.6 * cached.p1 + 0.4 * cached.p2[0] if thinks else cached.p1
            assert answer["thinking"]["used"] == thinks
            assert np.abs(p - answer["probabilities"]).max() <= 1e-12
            assert answer["elapsed_seconds"] == pytest.approx(cached.t1 + (cached.t2[0] if thinks else 0), abs=1e-12)
            thought += bool(thinks)
        assert 0 < thought < len(questions)

"""What a request costs the gateway: decisions/s over loopback, and the server's own CPU time.

The server is a process of its own and the client another, as in use; on two cores they share what there is. The
figure that does not depend on the client is ``server_cpu_ms`` in the extra info: CPU of the server process a request,
uvicorn, the engine and all. Aim: 0.3 ms.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import aiohttp
import psutil
import pytest
import uvloop

from calib.engine.simulated import load_profile

SERVER = """
import sys
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.serve import open_app, run
engine = SimulatedEngine(load_profile("gev-validation"))
run(lambda: open_app(engine), announce=lambda url: print(url, file=sys.stderr, flush=True))
"""
REQUESTS, CLIENTS = 2000, 64


@pytest.fixture(scope="module")
def server():
    with subprocess.Popen([sys.executable, "-c", SERVER], stderr=subprocess.PIPE, text=True) as child:
        yield psutil.Process(child.pid), child.stderr.readline().strip()
        child.terminate()


def bodies(**fields):
    """Requests for as many questions as are asked in a round."""
    questions = load_profile("gev-validation").questions()
    return [
        json.dumps(
            {"kind": q.kind, "state": q.state, "question": q.question, "options": list(q.options)} | fields
        ).encode()
        for q in (questions[i % len(questions)] for i in range(REQUESTS))
    ]


async def ask_all(url: str, requests: list[bytes], clients: int) -> int:
    """Send the requests, so many at a time; how many were answered with 200."""
    left, good = iter(requests), 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal good
        for body in left:
            async with session.post("/v1/decide", data=body) as response:
                await response.read()
                good += response.status == 200

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=clients)) as session:
        await asyncio.gather(*(work(session) for _ in range(clients)))
    return good


@pytest.mark.parametrize("clients", [1, CLIENTS])
@pytest.mark.parametrize(
    "fields",
    [{"thinking": "off"}, {"thinking": "on", "debug": True, "think_budget": 8192}],
    ids=["system1", "on-debug"],
)
def test_decisions_a_second(benchmark, server, fields, clients):
    process, url = server
    requests = bodies(**fields)[: REQUESTS if clients > 1 else REQUESTS // 4]

    def once() -> int:
        return uvloop.run(ask_all(url, requests, clients))

    assert once() == len(requests)  # warm
    before = sum(process.cpu_times()[:2])
    rounds = 3
    answered = benchmark.pedantic(once, rounds=rounds)
    cpu = sum(process.cpu_times()[:2]) - before
    assert answered == len(requests)
    benchmark.extra_info["server_cpu_ms"] = round(1000 * cpu / (rounds * len(requests)), 3)
    benchmark.extra_info["decisions_per_second"] = round(len(requests) / benchmark.stats.stats.min)

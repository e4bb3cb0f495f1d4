"""What a request costs the gateway: decisions/s over loopback, the server's own CPU time, and the latency it adds.

The server is a process of its own and the client another, as in use; on two cores they share what there is. The
figure that does not depend on the client is ``server_cpu_ms`` in the extra info: CPU of the server process a request,
uvicorn, the engine and all. Aim: 0.3 ms.

In front of a model of its own process (`null_decide`) each figure is beside that of asking the model directly, in turns
in one run, so that a machine that is slow at the moment is slow for both.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
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


# --- in front of a model ----------------------------------------------------------------------------------------------

NULL_DECIDE = Path(__file__).parent / "null_decide.py"
SYSTEM1 = json.dumps(
    {"kind": "choice", "question": "q", "options": ["a", "b", "c"], "thinking": "off", "debug": True}
).encode()
THOUGHT = json.dumps(
    {"kind": "choice", "question": "q", "options": ["a", "b", "c"], "thinking": "on", "think_budget": 512}
).encode()
THOUGHT_SECONDS = 20.0


@pytest.fixture(scope="module")
def model_and_gateway():
    """Addresses of a model that answers at once and thinks for 20 s, and of the gateway in front, with its process."""
    command = [sys.executable, str(NULL_DECIDE), str(THOUGHT_SECONDS), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as model:
        url = model.stdout.readline().strip()
        command = [sys.executable, "-m", "calib", "serve", "--upstream", url, "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
            yield url, gateway.stderr.readline().split()[1], psutil.Process(gateway.pid)
            gateway.terminate()
        model.terminate()


async def in_turns(direct: str, through: str, thoughts: int, asked: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of System 1's answers, asked directly and through the gateway in turns, while thoughts are open there."""
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limit) as session:

        async def ask(url: str, body: bytes) -> float:
            began = time.perf_counter()
            async with session.post(f"{url}/v1/decide", data=body) as response:
                await response.read()
                assert response.status == 200
            return time.perf_counter() - began

        tasks = [asyncio.create_task(ask(through, THOUGHT)) for _ in range(thoughts)]
        opened = 0
        while opened < thoughts:
            await asyncio.sleep(0.1)
            async with session.get(f"{direct}/asked") as response:
                opened = (await response.json())["open"]
        seconds = [[await ask(url, SYSTEM1) for url in (direct, through)] for _ in range(asked)]
        assert not any(task.done() for task in tasks)  # all of them were open all the time
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    one, other = np.array(seconds).T
    return one, other


@pytest.mark.parametrize("thoughts", [0, 1000])
def test_latency_that_the_gateway_adds(benchmark, model_and_gateway, thoughts):
    """Aim: p99 less than 5 ms later than without the gateway, with 1,000 thoughts open."""
    direct, through = benchmark.pedantic(
        lambda: uvloop.run(in_turns(*model_and_gateway[:2], thoughts, 1000)), rounds=1, iterations=1
    )
    for name, seconds in (("direct", direct), ("gateway", through)):
        for q in (50, 99):
            benchmark.extra_info[f"{name}_p{q}_ms"] = round(1000 * float(np.percentile(seconds, q)), 2)
    for q in (50, 99):
        added = float(np.percentile(through, q) - np.percentile(direct, q))
        benchmark.extra_info[f"added_p{q}_ms"] = round(1000 * added, 2)


@pytest.mark.parametrize("clients", [1, 64, 256])
def test_system_1_decisions_a_second(benchmark, model_and_gateway, clients):
    """Through the gateway and directly, a thousand questions each in turns; aim 1,000/s."""
    *urls, process = model_and_gateway
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    requests = [SYSTEM1] * 1000

    def once() -> None:
        for name, url in zip(rates, urls, strict=True):
            began = time.perf_counter()
            assert uvloop.run(ask_all(url, requests, clients)) == len(requests)
            rates[name].append(len(requests) / (time.perf_counter() - began))

    once()  # warm
    for found in rates.values():
        found.clear()
    before = sum(process.cpu_times()[:2])
    benchmark.pedantic(once, rounds=3)
    cpu = sum(process.cpu_times()[:2]) - before
    direct, through = (float(np.median(found)) for found in rates.values())
    benchmark.extra_info |= {"direct_per_s": round(direct), "gateway_per_s": round(through)}
    benchmark.extra_info["gateway_cpu_ms"] = round(1000 * cpu / (3 * len(requests)), 3)
    benchmark.extra_info["share_of_direct"] = round(through / direct, 2)

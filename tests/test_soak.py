"""The gateway under load in front of a model that fails: nothing is lost, nothing is late, nothing grows.

Eight seconds, or as many as ``CALIB_SOAK_SECONDS`` says (60 for a full soak), and then the figures are printed. Gateway
and model are processes of their own; all traffic stays on the loopback.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from calib.policyfile import POLICY_SCHEMA

SECONDS = float(os.environ.get("CALIB_SOAK_SECONDS", 8))
RATE = 60.0
"""Requests a second, at random moments, however many are open."""
DEADLINE, LATE = 3.0, 0.2
THOUGHT = 2.0
"""Mean seconds of a thought, which may take twice that: a quarter of the thoughts meets the deadline."""
FAILING = 0.05
NULL_DECIDE = Path(__file__).parent / "benchmarks/null_decide.py"


@contextmanager
def started(*command: str, stream: str):
    """A process, and the address in its first line."""
    pipes = {stream: subprocess.PIPE}
    with subprocess.Popen([sys.executable, *command], text=True, **pipes) as process:
        try:
            line = getattr(process, stream).readline()
            yield process, next(word for word in line.split() if word.startswith("http"))
        finally:
            process.terminate()
            try:
                process.wait(20)
            finally:
                process.kill()


class Soak:
    """Asks at random moments and writes down what came of it."""

    def __init__(self, session: aiohttp.ClientSession, process: psutil.Process) -> None:
        self.session, self.process = session, process
        self.answers: list[dict] = []
        self.failures: list[object] = []
        self.seconds: list[float] = []
        self.inside: list[float] = []
        self.stall = 0.0
        self.memory: list[float] = []

    async def ask(self, number: int) -> None:
        body = {"kind": "choice", "question": f"q{number}", "options": ["a", "b", "c"]}
        body["thinking"] = "off" if number % 3 == 0 else "auto"
        began = time.perf_counter()
        try:
            async with self.session.post("/v1/decide", json=body) as response:
                told = await response.json()
                (self.answers if response.status == 200 else self.failures).append(told)
                self.inside.append(told.get("elapsed_seconds", 0.0))
        except aiohttp.ClientError as error:
            self.failures.append(error)
        self.seconds.append(time.perf_counter() - began)

    async def watch(self) -> None:
        """The gateway's memory, and how long it takes to say that it is alive: what this machine's stalls are."""
        while True:
            began = time.perf_counter()
            async with self.session.get("/health") as response:
                await response.read()
            self.stall = max(self.stall, time.perf_counter() - began)
            self.memory.append(self.process.memory_info().rss / 2**20)
            await asyncio.sleep(0.02)

    async def run(self) -> int:
        """Number of requests that were sent."""
        rng, tasks = random.Random(7), []
        watching = asyncio.create_task(self.watch())
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(self.ask(len(tasks))))
            await asyncio.sleep(rng.expovariate(RATE))
        await asyncio.gather(*tasks)
        watching.cancel()
        return len(tasks)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_nothing_is_lost_or_late_and_nothing_grows(tmp_path, capsys):
    policy = {"threshold": 0.8, "mix": 0.5, "think_budget": 512, "arm": "base", "deadline": DEADLINE}
    (tmp_path / "policy.json").write_text(json.dumps({"schema": POLICY_SCHEMA, "policy": policy}))
    serve = ("-m", "calib", "serve", "--policy", str(tmp_path / "policy.json"), "--port", "0")
    with (
        started(str(NULL_DECIDE), str(THOUGHT), str(FAILING), stream="stdout") as (_, model),
        started(*serve, "--log", str(tmp_path / "d.jsonl"), "--upstream", model, stream="stderr") as (process, url),
    ):
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
            soak = Soak(session, psutil.Process(process.pid))
            sent = await soak.run()
            async with session.get("/metrics") as response:
                families = list(text_string_to_metric_families(await response.text()))
            async with session.get(f"{model}/asked") as response:
                asked = await response.json()
    found = {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}
    degraded = {key[1][0]: int(n) for key, n in found.items() if key[0] == "calib_degraded_total"}
    late = max(soak.seconds) - DEADLINE
    quarter = len(soak.memory) // 4
    early, end = (float(np.median(part)) for part in (soak.memory[quarter : 2 * quarter], soak.memory[-quarter:]))
    logged = (tmp_path / "d.jsonl").read_text().splitlines()
    if "CALIB_SOAK_SECONDS" in os.environ:
        with capsys.disabled():
            p50, p99 = np.percentile(soak.seconds, [50, 99])
            print(
                f"\n{sent} requests in {SECONDS:g} s, {len(soak.failures)} without an answer; {asked['asked']} calls "
                f"to the model, {asked['failed']} failed; degraded {degraded}; p50 {p50:.3f} s, p99 {p99:.3f} s, "
                f"latest {late:+.3f} s after the deadline of {DEADLINE:g} s "
                f"({max(soak.inside) - DEADLINE:+.3f} s by the gateway's clock; slowest /health {soak.stall:.3f} s); "
                f"memory {early:.1f} MiB in the second quarter, {end:.1f} MiB in the last"
            )
    assert soak.failures == []
    assert len(soak.answers) == sent > 0.5 * RATE * SECONDS
    assert asked["failed"] > 0.02 * asked["asked"]
    assert asked["open"] == 0  # what nobody waits for any more was given up at the model too
    # A busy machine delays the simplest answer as well, and that is measured. It can hit a request three times: on its
    # way in, at the deadline, and on the way out; of these the gateway's own clock sees one.
    assert max(soak.inside) <= DEADLINE + LATE + soak.stall
    assert late <= LATE + 3 * soak.stall
    assert degraded["deadline"] > 0.05 * sent
    thought = [answer for answer in soak.answers if "thinking" in answer and "degraded" not in answer]
    mixed = (0.5 * 0.7 + 0.5 * 0.1, 0.5 * 0.2 + 0.5 * 0.8, 0.5 * 0.1 + 0.5 * 0.1)
    assert {tuple(answer["probabilities"]) for answer in thought} == {mixed}
    alone = [answer for answer in soak.answers if "thinking" not in answer or "degraded" in answer]
    assert {tuple(answer["probabilities"]) for answer in alone} == {(0.7, 0.2, 0.1)}
    assert sum(n for key, n in found.items() if key[0] == "calib_decisions_total") == sent
    assert found["calib_requests_in_flight", ()] == found["calib_requests_queued", ()] == 0
    assert len(logged) == sent
    assert end < early * 1.05 + 4 * math.sqrt(8 / SECONDS)  # a short run is still warming up

"""What a client's own work adds to the seconds that it reports, next to vLLM's client; what reads of one thought cost.

The null server waits a fixed time and tells how long it held each request, so what a client reports beyond that
(``excess_ms``) is the way there and back and the client's processor. Were the client's processor to show in measured
seconds, the excess would grow with the requests in flight; 64 that take 100 ms each are 640 a second, more than real
servers answer. Without a wait, requests a second are what client and server manage together on the machine's cores.
vLLM's client streams, since it tells time to first token; both send the same number of tokens to the same route and
get one. It is left out where vLLM is not installed (tests/vllm/install.sh).

Reads: the answer after 8 cuts of one thought, by one request with 8 prompts and by 8 requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from calib.engine.completions import Trace
from calib.engine.http import HttpClient
from calib.engine.vllm import VllmEngine
from calib.questions import Question
from tests.vllm.conftest import server, tiny_model, vllm_python  # noqa: F401 - fixtures
from tests.vllm.servers import Server

LOADS = [(0.1, 1, 40), (0.1, 8, 320), (0.1, 64, 1920), (0.0, 64, 3000)]
"""Seconds that the server waits, requests in flight, requests."""

NULL_SERVER = Path(__file__).with_name("null_server.py")


@contextmanager
def null_server(delay: float) -> Iterator[str]:
    with subprocess.Popen([sys.executable, NULL_SERVER, str(delay)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield child.stdout.readline().strip()
        child.terminate()


def held(url: str) -> np.ndarray:
    """Seconds for which the server held each request since the last call."""
    with urllib.request.urlopen(f"{url}/held", timeout=10) as response:
        return np.array(json.load(response))


async def asked(url: str, n: int, in_flight: int) -> list[float]:
    """Seconds that the collector's client reports of each of n requests."""
    prompts = np.random.default_rng(0).integers(5, 400, (n, 64)).tolist()
    payload = {"model": "m", "max_tokens": 1, "temperature": 1.0, "logprobs": 2, "allowed_token_ids": [5, 6]}
    left = iter(prompts)
    client = HttpClient(url, retries=0)
    seconds: list[float] = []

    async def work() -> None:
        for prompt in left:
            seconds.append((await client.post("/v1/completions", payload | {"prompt": prompt})).seconds)

    try:
        await asyncio.gather(*(work() for _ in range(in_flight)))
    finally:
        await client.close()
    return seconds


def shown(reported_s: float, there: np.ndarray, delay: float) -> dict[str, float]:
    """Medians in milliseconds."""
    assert there.min() > delay - 0.002  # timers of uvloop count whole milliseconds
    kept = float(np.median(there))
    return {
        "reported_ms": round(1000 * reported_s, 2),
        "held_by_server_ms": round(1000 * kept, 2),
        "excess_ms": round(1000 * (reported_s - kept), 2),
    }


@pytest.mark.parametrize(("delay", "in_flight", "n"), LOADS)
def test_what_the_collectors_client_adds(benchmark: Any, delay: float, in_flight: int, n: int) -> None:
    reported: list[float] = []
    cpu: list[float] = []

    def once() -> None:
        began = time.process_time()
        reported[:] = uvloop.run(asked(url, n, in_flight))
        cpu.append((time.process_time() - began) / n)

    with null_server(delay) as url:
        once()  # warm
        held(url)
        benchmark.pedantic(once, rounds=3)
        there = held(url)
    assert (len(reported), len(there)) == (n, 3 * n)
    benchmark.extra_info |= shown(float(np.median(reported)), there[-n:], delay)
    benchmark.extra_info["requests_per_second"] = round(n / benchmark.stats.stats.min)
    benchmark.extra_info["client_cpu_ms"] = round(1000 * min(cpu), 3)
    print(benchmark.extra_info)
    assert delay == 0 or benchmark.extra_info["excess_ms"] < 250 * delay


@pytest.mark.parametrize(("delay", "in_flight", "n"), LOADS)
def test_what_the_client_of_vllm_bench_serve_adds(
    benchmark: Any,
    vllm_python: Path,  # noqa: F811 - the fixture
    tiny_model: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
    delay: float,
    in_flight: int,
    n: int,
) -> None:
    with null_server(delay) as url:
        command = [
            *(str(vllm_python.with_name("vllm")), "bench", "serve", "--backend", "openai", "--base-url", url),
            *("--model", "m", "--tokenizer", str(tiny_model), "--dataset-name", "random", "--random-input-len", "64"),
            *("--random-output-len", "1", "--num-prompts", str(n), "--max-concurrency", str(in_flight)),
            *("--num-warmups", "20", "--disable-tqdm", "--percentile-metrics", "e2el", "--metric-percentiles", "99"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
        ]

        def once() -> None:
            subprocess.run(command, check=True, capture_output=True, timeout=200)

        benchmark.pedantic(once, rounds=1)  # its time holds the start of the process; what counts is what it reports
        there = held(url)
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["completed"] == n
    benchmark.extra_info |= shown(found["median_e2el_ms"] / 1000, there[-n:], delay)
    benchmark.extra_info["requests_per_second"] = round(found["request_throughput"])
    print(benchmark.extra_info)


@pytest.mark.parametrize("server", ["tiny"], indirect=True)
@pytest.mark.parametrize("way", ["one request", "one by one", "at once"])
def test_reads_of_one_thought(benchmark: Any, server: Server, way: str) -> None:  # noqa: F811 - the fixture
    question = Question("1", "d", "choice", "A blue cube.", "What colour is it?", ("blue", "red", "green"), 0)
    rng = random.Random(way)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engine = VllmEngine(server.url)
        setup = runner.run(engine._ready())
        labels = runner.run(setup.finder.find(engine.prompt.kinds["choice"], question))
        opening = runner.run(engine._opening(setup, question, labels))

        def thought() -> tuple[tuple[Any, ...], dict[str, Any]]:
            """Cuts of a thought whose tokens are in the server's cache, as those that it generated are."""
            ids = tuple(rng.choices(range(5, 400), k=512))
            trace = Trace(ids, ended=False, generated=len(ids), seconds=0.0)
            prompts = [setup.ladder.prompt(opening, trace, 64 * i, labels.thought) for i in range(1, 9)]
            runner.run(setup.reader.read([prompts[-1]], labels.thought.labels))
            return (prompts,), {}

        async def read(prompts: list[tuple[int, ...]]) -> list[Any]:
            reader, wanted = setup.reader, labels.thought.labels
            if way == "one request":
                return await reader.read(prompts, wanted)
            if way == "one by one":
                return [(await reader.read([prompt], wanted))[0] for prompt in prompts]
            return [one for (one,) in await asyncio.gather(*(reader.read([prompt], wanted) for prompt in prompts))]

        found = benchmark.pedantic(lambda prompts: runner.run(read(prompts)), setup=thought, rounds=15)
        assert len(found) == 8
        runner.run(engine.close())
    benchmark.extra_info["ms_for_8_reads"] = round(1000 * benchmark.stats.stats.median, 1)
    print(way, benchmark.extra_info)

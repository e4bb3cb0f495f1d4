"""Questions per second that the collector asks and stores, against the simulated server in a process of its own.

One thinking request a question, no simulated second is slept. Both processes share the machine's cores, so what bounds
it is the processor: the extra info holds the CPU time a question of each, which does not depend on what else runs.
Aim: 1,500 questions/s on two idle cores, that is at most 0.67 ms each.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from calib.collect import run
from calib.engine.simulated import load_profile
from calib.store import Store

SERVER = """
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.serve import open_app, run

engine = SimulatedEngine(load_profile("gev-validation"), time_scale=0)
run(lambda: open_app(engine), announce=lambda url: print(url, flush=True))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[psutil.Process, str]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield psutil.Process(child.pid), child.stdout.readline().strip()
        child.terminate()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@pytest.mark.parametrize("concurrency", [32, 128])
def test_questions_per_second_with_the_store_written(
    benchmark: Any, server: tuple[psutil.Process, str], tmp_path: Path, concurrency: int
) -> None:
    process, url = server
    questions = load_profile("gev-validation").questions()
    stores = iter(range(100))
    mine: list[float] = []
    theirs: list[float] = []

    def collect() -> None:
        mine.append(time.process_time())
        theirs.append(_cpu(process))
        with Store.open(tmp_path / f"{next(stores)}.db") as store:
            summary = run(questions, {"base": url}, store, concurrency=concurrency)
        mine[-1], theirs[-1] = time.process_time() - mine[-1], _cpu(process) - theirs[-1]
        (arm,) = summary.arms
        assert (arm.asked, arm.failed) == (len(questions), 0)

    benchmark.pedantic(collect, rounds=5, warmup_rounds=1)
    benchmark.extra_info["questions_per_second"] = round(len(questions) / benchmark.stats.stats.median)
    benchmark.extra_info["client_cpu_ms"] = round(1000 * min(mine) / len(questions), 3)
    benchmark.extra_info["server_cpu_ms"] = round(1000 * min(theirs) / len(questions), 3)

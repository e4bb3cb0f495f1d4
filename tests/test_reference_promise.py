"""``data/reference/promise.py``: from a recording to a document, through the commands and a real gateway."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from calib import metrics
from calib.engine.prompts import read_prompt
from calib.engine.vllm import VllmEngine
from calib.policy import Policy, decide
from calib.queueing import replay
from calib.recorded import Row, fill, open_recording, write_recorded
from calib.store import Store, load_outcomes
from tests.reference import FOLDER, PROMPT, load, questions
from tests.vllm_like import VllmLike

promise = load("promise")

LOADS, BUDGETS = (1, 4), (8, 32)


@contextmanager
def toy_server() -> Iterator[str]:
    """The address of a toy vLLM that runs in a thread, since what asks it has a loop of its own."""
    started, ended = threading.Event(), asyncio.Event()
    loop, url = asyncio.new_event_loop(), []

    async def main() -> None:
        async with VllmLike(context=4000) as server:
            server.end_share = 0.1
            url.append(server.url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert started.wait(10)
        yield url[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def record(folder: Path, url: str) -> None:
    """A few questions of each task; what is told of a load was timed one by one."""
    asked = questions(6)
    engine = VllmEngine(url, prompt=read_prompt(PROMPT), sampling={"temperature": 0.6}, label_mass=False)
    try:
        info = await engine.info()
        rows = [Row("main", "base", c, q, await engine.ask(q, BUDGETS)) for c in LOADS for q in asked]
    finally:
        await engine.close()
    write_recorded(folder, asked, rows, [], {"main": info})


@pytest.mark.slow
def test_from_a_recording_to_a_document(tmp_path):
    with toy_server() as url:
        asyncio.run(record(tmp_path / "recording", url))
        given = [str(tmp_path / "recording"), "--upstream", url, "--out", str(tmp_path), "--tune-at", "4"]
        promise.main([*given, "--target", "p90<60s", "--rates", "40:12:1,5:8"])
    text = (tmp_path / "verify.json").read_text()
    found = json.loads(text)
    assert list(found) == ["target", "tuned_at", "policy", "verdict", "verified"]
    assert (found["target"], found["tuned_at"]) == ("p90<60s", 4)
    assert [(one["rate"], one["seed"], one["verify"]["n"]) for one in found["verified"]] == [(5.0, 0, 8), (40.0, 1, 12)]
    policy = Policy.from_dict(found["policy"])
    recorded = [load_outcomes(tmp_path / "promise.db", arms=["base"], concurrency=c) for c in LOADS]
    shipped = json.loads((FOLDER.parent / "recorded" / "verify.json").read_text())
    assert list(found) == list(shipped)
    for one in found["verified"]:
        assert list(one) == list(shipped["verified"][0])
        assert list(one["verify"]) == list(shipped["verified"][0]["verify"])
        assert one["verify"]["failed"] == {}
        assert one["verify"]["load"]["predicted_from"]["concurrency"] == list(LOADS)
        assert one["verify"]["load"]["predicted_from"]["nearest"] == one["load"]
        assert one["verify"]["load"]["tuned_concurrency"] is None
        asked = one["questions"]
        assert list(asked) == list(shipped["verified"][0]["questions"])
        assert {len(column) for column in asked.values()} == {one["verify"]["n"]}
        again = replay(recorded, policy, asked["id"], 1e-3 * np.array(asked["arrival_ms"]))
        np.testing.assert_allclose(1e3 * again.latency, asked["predicted_ms"], atol=0.5)
        here = recorded[LOADS.index(one["load"])]
        place = [here.ids.tolist().index(name) for name in asked["id"]]
        there = decide(here.take(place), policy)
        assert one["at_load"] == {f"p{q}": metrics.percentile(there.latency, q) for q in (50, 90, 99)}
        np.testing.assert_array_equal(asked["thinks"], there.thinks)  # the toy says the same whenever it is asked
        lines = {line["metric"]: line for line in one["verify"]["lines"]}
        measured = np.sort(asked["measured_ms"])
        assert 1e3 * lines["p90"]["measured"]["value"] == pytest.approx(
            measured[int(np.ceil(0.9 * len(measured))) - 1], abs=0.05
        )
        assert lines["accuracy"]["measured"] == lines["accuracy"]["predicted"]
    assert "[1, 4]" in text  # innermost lists are on one line
    assert not list(tmp_path.glob(".verify.json*"))


def test_a_gateway_that_does_not_start_says_why(tmp_path):
    with pytest.raises(SystemExit, match="no_policy.json"), promise.gateway(tmp_path / "no_policy.json", "http://x"):
        pass


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("30:887", [(30.0, 887, 0)]),
        ("100:5:0,6:500:0, 12.5:500:1", [(6.0, 500, 0), (12.5, 500, 1), (100.0, 5, 0)]),
        ("6:5:1,6:5:0", [(6.0, 5, 0), (6.0, 5, 1)]),
    ],
)
def test_rates_are_read_and_sorted(text, runs):
    assert promise.parse_runs(text) == [promise.Run(*run) for run in runs]


def test_the_rates_that_made_the_shipped_document():
    shipped = json.loads((FOLDER.parent / "recorded" / "verify.json").read_text())
    made = [promise.Run(one["rate"], one["verify"]["n"], one["seed"]) for one in shipped["verified"]]
    assert promise.parse_runs(promise.RATES) == made


def test_the_shipped_predictions_are_what_is_predicted_now(tmp_path):
    shipped = json.loads((FOLDER.parent / "recorded" / "verify.json").read_text())
    policy = Policy.from_dict(shipped["policy"])
    loads = shipped["verified"][0]["verify"]["load"]["predicted_from"]["concurrency"]
    with Store.open(tmp_path / "shipped.db") as store:
        fill(store, promise.MODEL, open_recording())
        recorded = [load_outcomes(store, arms=[promise.ARM], concurrency=load) for load in loads]
    for one in shipped["verified"]:
        asked, told = one["questions"], one["verify"]
        again = replay(recorded, policy, asked["id"], 1e-3 * np.array(asked["arrival_ms"]))
        np.testing.assert_allclose(asked["predicted_ms"], 1e3 * again.latency, atol=0.051)
        expected = again.to_dict()
        rests_on = told["load"]["predicted_from"]
        assert rests_on.keys() == expected.keys()
        for name, value in expected.items():
            assert rests_on[name] == (pytest.approx(value) if isinstance(value, float) else value)
        assert (one["load"], told["warnings"]) == (expected["nearest"], again.warnings(one["rate"]))
        for line in told["lines"]:
            if line["metric"].startswith("p"):
                predicted = metrics.percentile(again.latency, float(line["metric"][1:]))
                assert line["predicted"]["value"] == pytest.approx(predicted)
                change = line["measured"]["value"] / predicted - 1
                assert line["difference"]["value"] == pytest.approx(change)


@pytest.mark.parametrize("text", ["", "30", "30:", "0:5", "30:0", "30:5:1:2", "30:5:-1", "x:5", "1e400:5", "30:5,,6:5"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not RATE:QUESTIONS"):
        promise.parse_runs(text)

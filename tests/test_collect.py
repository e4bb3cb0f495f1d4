"""The collector against real HTTP servers that go wrong on order, and against being killed."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calib.collect import CollectSummary, Progress, choose, collect, in_loop, run
from calib.engine.base import ServerBusy
from calib.engine.decide import DecideEngine
from calib.engine.http import HttpClient
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.questions import Question
from calib.store import Covered, Store, load_outcomes
from tests.misbehaving import (
    BUDGET,
    MisbehavingServer,
    cut_body,
    cut_json,
    edit,
    everywhere,
    questions,
    read,
    reset,
    slow,
    status,
    think_seconds,
    truth,
)
from tests.scripted import ScriptedEngine

FEW = questions(6)
ODD = FEW[0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "c.db") as store:
        yield store


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


async def instantly(_seconds: float) -> None:
    await asyncio.sleep(0)


def engine_for(server: MisbehavingServer, *, timeout: float = 5.0, retries: int = 3) -> DecideEngine:
    client = HttpClient(server.url, timeout=timeout, retries=retries, rng=random.Random(0), sleep=instantly)
    return DecideEngine(server.url, client=client)


async def gather(
    server: MisbehavingServer, store: Store, asked: Sequence[Question] = FEW, *, arm: str = "base", **options: object
) -> CollectSummary:
    """One run with a fresh engine."""
    how = {name: options.pop(name) for name in ("timeout", "retries") if name in options}
    engine = engine_for(server, **how)
    try:
        return await collect(asked, {arm: engine}, store, **({"budgets": (BUDGET,), "concurrency": 3} | options))
    finally:
        await engine.close()


def covered(store: Store, question: Question, arm: str = "base") -> Covered | None:
    (model,) = store.models()
    return store.coverage(model.fingerprint, arm).get((question.dataset, question.id))


def failures(store: Store) -> dict[str, int]:
    (model,) = store.status().models
    return {failure.reason: failure.questions for failure in model.failures}


def assert_true(outcomes: Outcomes, asked: Sequence[Question], budgets: Sequence[int] = (BUDGET,)) -> None:
    """Every answer is what the server thinks of that question."""
    by_id = {question.id: question for question in asked}
    assert sorted(outcomes.ids.tolist()) == sorted(by_id)
    assert outcomes.budgets.tolist() == list(budgets)
    for i, name in enumerate(outcomes.ids):
        question = by_id[name]
        n = len(question.options)
        np.testing.assert_allclose(outcomes.p1[i, :n], truth(question.question, n)[0], rtol=1e-12)
        for b, budget in enumerate(budgets):
            p2, tokens, finished = read(question.question, n, budget)
            np.testing.assert_allclose(outcomes.p2[i, b, :n], p2, rtol=1e-12)
            assert (outcomes.tokens[i, b], outcomes.finished[i, b]) == (tokens, finished)


# --- which questions --------------------------------------------------------------------------------------------------


def test_a_limit_takes_an_even_sample_that_larger_limits_contain() -> None:
    many = questions(300) + questions(100, dataset="other")
    order = choose(many)
    assert set(order) == set(many)
    assert choose(list(reversed(many))) == order
    assert choose(many, limit=40) == order[:40]
    assert 5 <= sum(question.dataset == "other" for question in order[:40]) <= 15
    assert choose(many, datasets=["other"]) == [question for question in order if question.dataset == "other"]


def test_what_cannot_be_chosen() -> None:
    with pytest.raises(CalibError, match="unknown dataset 'large'; there are: small"):
        choose(FEW, datasets=["large"])
    with pytest.raises(CalibError, match="--limit"):
        choose(FEW, limit=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"questions": []}, "no questions"),
        ({"arms": {}}, "--arm"),
        ({"concurrency": 0}, "--concurrency"),
        ({"budgets": (0, 10)}, "--budgets"),
    ],
)
async def test_what_cannot_be_collected(store: Store, change: dict, named: str) -> None:
    arguments = {"questions": FEW, "arms": {"base": ScriptedEngine()}, "store": store} | change
    with pytest.raises(CalibError, match=named):
        await collect(**arguments)


# --- the plain way ----------------------------------------------------------------------------------------------------


async def test_everything_is_stored_and_nothing_asked_twice(server: MisbehavingServer, store: Store) -> None:
    mixed = FEW + questions(3, dataset="yesno", kind="noul") + questions(2, dataset="levels", kind="score")
    server.delay = 0.01
    budgets = (200, 600, 3000)
    summary = await gather(server, store, mixed, budgets=budgets)
    (arm,) = summary.arms
    assert (arm.arm, arm.model, arm.asked, arm.failed, arm.already) == ("base", "tiny", 11, 0, 0)
    assert not summary.interrupted
    assert not summary.simulated
    outcomes = load_outcomes(store, datasets=["small", "yesno"])
    assert_true(outcomes.select(["small"]), FEW, budgets)
    assert_true(outcomes.select(["yesno"]), mixed[6:9], budgets)
    assert outcomes.concurrency.tolist() == [3]
    texts = {question.id: question.question for question in FEW}
    for i in np.flatnonzero(outcomes.dataset == "small"):
        for b in range(3):
            used = int(outcomes.tokens[i, b])
            assert outcomes.t2[0, i, b] == think_seconds(texts[outcomes.ids[i]], 4, used, server.delay)  # its own
    assert (outcomes.t1[0] + outcomes.t2[0, :, -1] >= 0.0099).all()  # wall time, and the server took 0.01
    requests = len(server.asked)
    again = await gather(server, store, mixed, budgets=budgets)
    assert len(server.asked) == requests
    assert (again.arms[0].asked, again.arms[0].already, again.interrupted) == (0, 11, False)
    json.dumps(again.to_dict())


async def test_only_what_is_lacking_is_asked(server: MisbehavingServer, store: Store) -> None:
    await gather(server, store, FEW[:2], budgets=())
    assert {body["thinking"] for body in server.asked} == {"off"}
    server.asked.clear()
    await gather(server, store, FEW[:2], budgets=(9000,))  # System 1 is there: System 2 alone
    assert [body.get("system2_only") for body in server.asked] == [True, True]
    server.asked.clear()
    await gather(server, store, FEW[:3], budgets=(50, 9000))
    asked = sorted((body["question"], body["think_budget"], body.get("system2_only", False)) for body in server.asked)
    texts = [question.question for question in FEW[:3]]
    assert asked == [(texts[0], 50, True), (texts[1], 50, True), (texts[2], 50, True), (texts[2], 9000, False)]
    assert_true(load_outcomes(store), FEW[:3], (50, 9000))


async def test_seconds_belong_to_an_arm_and_a_concurrency(server: MisbehavingServer, store: Store) -> None:
    await gather(server, store)
    for options in ({"arm": "mtp"}, {"concurrency": 2}):
        server.asked.clear()
        await gather(server, store, **options)
        assert len(server.asked) == len(FEW)
        await gather(server, store, **options)
        assert len(server.asked) == len(FEW)
    outcomes = load_outcomes(store, concurrency=3)
    assert outcomes.arms == ("base", "mtp")
    assert not np.isnan(outcomes.t1).any()


async def test_no_text_reaches_the_disk_unless_it_is_wanted(server: MisbehavingServer, tmp_path: Path) -> None:
    secret = [Question("s", "small", "choice", "a SECRETSTATE", "a SECRETQUESTION?", ("SECRETONE", "SECRETTWO"), 0)]
    for keep_text in (True, False):
        path = tmp_path / f"{keep_text}.db"
        with Store.open(path) as store:
            await gather(server, store, secret, keep_text=keep_text, budgets=(9000,))
            assert_true(load_outcomes(store), secret, (9000,))
        content = b"".join(file.read_bytes() for file in tmp_path.glob(f"{keep_text}.db*"))
        assert (b"SECRETQUESTION" in content) == keep_text
        assert ("return_reasoning" in server.asked[-1]) == keep_text


async def test_arms_are_never_asked_at_the_same_time(server: MisbehavingServer, store: Store) -> None:
    order: list[str] = []

    class Noting(ScriptedEngine):
        async def ask(self, question: Question, budgets: Sequence[int], **options: bool):
            order.append(self.raw["arm"])
            return await super().ask(question, budgets, **options)

    three = questions(9, options=3)
    arms = {name: Noting(raw={"arm": name}) for name in ("base", "mtp")}
    summary = await collect(three, arms, store, concurrency=4)
    assert order == ["base"] * 9 + ["mtp"] * 9
    assert [arm.arm for arm in summary.arms] == ["base", "mtp"]
    assert summary.simulated


async def test_no_more_than_the_concurrency_is_asked_or_unwritten(store: Store) -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    asyncio.get_running_loop().call_later(0.1, engine.gate.set)
    most = written = 0
    real = store.write

    def write(fingerprint: str, records: Sequence, **options: bool) -> None:
        nonlocal most, written
        most = max(most, len(engine.asked) - written)
        real(fingerprint, records, **options)
        written += len(records)

    store.write = write  # type: ignore[method-assign]
    await collect(questions(100, options=3), {"base": engine}, store, concurrency=7)
    assert engine.most_open == 7
    assert 1 <= most <= 7
    assert written == 100


async def test_progress_counts_to_the_end(server: MisbehavingServer, store: Store) -> None:
    await gather(server, store, FEW[:2])
    server.faults[FEW[2].question] = [everywhere(lambda values: values.pop())] * 2
    seen: list[Progress] = []
    await gather(server, store, progress=seen.append)
    assert [(p.done, p.total, p.already) for p in (seen[0], seen[-1])] == [(2, 6, 2), (6, 6, 2)]
    assert math.isnan(seen[0].eta_s)
    last = seen[-1]
    assert (last.arm, last.failed, last.in_flight, last.eta_s) == ("base", 1, 0, 0)
    assert last.rate == pytest.approx(4 / last.elapsed_s)


# --- bad answers ------------------------------------------------------------------------------------------------------


def _set(index: int, value: object) -> Callable[[list[float]], None]:
    return lambda values: values.__setitem__(index, value)  # type: ignore[call-overload]


BOTH_BAD = {  # whatever is asked, so System 1 has no answer either
    "nan": everywhere(_set(0, math.nan)),
    "wrong_length": everywhere(lambda values: values.append(0.0)),
    "sum_off": everywhere(lambda values: values.__setitem__(0, values[0] + 0.02)),
    "negative": everywhere(lambda values: values.__setitem__(slice(0, 2), [values[0] + values[1] + 0.1, -0.1])),
    "wrong_options": edit(lambda a: a["options"].reverse()),
    "missing_field": edit(lambda a: a.pop("options")),
    "bad_json": cut_json,
    "http_500": status(500),
    "refused": status(422),
}
THOUGHT_BAD = {
    "budget_exceeded": edit(lambda a: a["thinking"].update(think_tokens=BUDGET + 1)),
    "missing_field": edit(lambda a: a["thinking"].pop("system2")),
    "nan": edit(lambda a: a["thinking"]["system2"].__setitem__(0, math.nan)),
    "mix_mismatch": edit(lambda a: a.update(probabilities=a["thinking"]["system2"])),
    "bad_json": cut_json,
    "http_500": status(500),
}


@pytest.mark.parametrize("reason", BOTH_BAD)
async def test_a_bad_answer_is_kept_as_a_failure_and_asked_again_on_request(
    server: MisbehavingServer, store: Store, reason: str
) -> None:
    server.faults[ODD.question] = [BOTH_BAD[reason]] * 8  # four attempts with thinking, four without
    summary = await gather(server, store)
    assert (summary.arms[0].asked, summary.arms[0].failed) == (6, 1)
    assert summary.arms[0].reasons == {reason: 1} == failures(store)
    found = covered(store, ODD)
    assert found is not None
    assert (found.system1, found.budgets, found.failed, found.failed_system1) == (False, set(), {BUDGET}, True)
    assert_true(load_outcomes(store), FEW[1:])

    server.asked.clear()
    server.faults.clear()
    summary = await gather(server, store)
    assert (summary.arms[0].failed_before, server.asked) == (1, [])
    summary = await gather(server, store, retry_failed=True)
    assert server.times_asked() == {ODD.question: 1}
    assert failures(store) == {}
    assert_true(load_outcomes(store), FEW)


@pytest.mark.parametrize("reason", THOUGHT_BAD)
async def test_a_failed_thought_does_not_cost_the_answer_of_system1(
    server: MisbehavingServer, store: Store, reason: str
) -> None:
    tries = 4 if reason in ("bad_json", "http_500") else 1
    server.faults[ODD.question] = [THOUGHT_BAD[reason]] * tries
    await gather(server, store)
    assert failures(store) == {reason: 1}
    found = covered(store, ODD)
    assert found is not None
    assert (found.system1, found.timed_system1, found.failed_system1) == (True, True, False)
    assert (found.budgets, found.failed) == (set(), {BUDGET})

    server.asked.clear()
    await gather(server, store)
    assert not server.asked
    await gather(server, store, retry_failed=True)
    assert [body.get("system2_only") for body in server.asked] == [True]
    assert_true(load_outcomes(store), FEW)


async def test_the_budgets_that_were_good_are_kept(server: MisbehavingServer, store: Store) -> None:
    text = ODD.question
    server.faults[text] = [edit(lambda a: None), edit(lambda a: a["thinking"].update(think_tokens=61))]
    await gather(server, store, [ODD], budgets=(60, 9000))
    found = covered(store, ODD)
    assert found is not None
    assert (found.system1, found.budgets, found.failed) == (True, {9000}, {60})
    server.asked.clear()
    await gather(server, store, [ODD], budgets=(60, 9000), retry_failed=True)
    assert [(body["think_budget"], body["system2_only"]) for body in server.asked] == [(60, True)]
    assert_true(load_outcomes(store), [ODD], (60, 9000))


@pytest.mark.parametrize(
    "fault", [status(500), status(429, Retry_After="1"), status(503), reset, cut_body, cut_json, slow(0.05)]
)
async def test_passing_faults_leave_no_trace_but_time(server: MisbehavingServer, store: Store, fault: object) -> None:
    for question in FEW[:3]:
        server.faults[question.question] = [fault]
    summary = await gather(server, store)
    assert summary.arms[0].failed == 0
    assert failures(store) == {}
    assert_true(load_outcomes(store), FEW)


async def test_a_timeout_is_kept_with_its_seconds(server: MisbehavingServer, store: Store) -> None:
    server.faults[ODD.question] = [slow(30), slow(30)]
    summary = await gather(server, store, timeout=0.15, retries=1)
    assert summary.arms[0].reasons == {"timeout": 1}
    with sqlite3.connect(store.location) as rows:
        (row,) = rows.execute("SELECT stage, seconds, attempts, concurrency FROM failures").fetchall()
    rows.close()
    assert row[0] == "system2"  # without thinking it answered
    assert 0.3 <= row[1] < 3
    assert row[2:] == (2, 3)


async def test_a_busy_engine_is_a_failure_of_the_question(store: Store) -> None:
    await collect(FEW[:1], {"base": ScriptedEngine(failure=ServerBusy("full"))}, store)
    assert failures(store) == {"busy": 1}


async def test_a_mistake_in_the_engine_is_not_swallowed(store: Store) -> None:
    with pytest.raises(ZeroDivisionError):
        await collect(FEW, {"base": ScriptedEngine(failure=ZeroDivisionError())}, store)


async def test_a_disk_that_fails_ends_the_collection(store: Store) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError("disk full")

    store.write = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk full"):
        await asyncio.wait_for(collect(questions(50, options=3), {"base": ScriptedEngine()}, store), 10)


# --- servers that are gone, or another one ----------------------------------------------------------------------------


async def test_a_server_that_is_not_there(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    engine = DecideEngine(url, client=HttpClient(url, retries=1, sleep=instantly))
    with pytest.raises(CalibError, match=url) as error:
        await collect(FEW, {"base": engine}, store)
    assert error.value.exit_code == 1
    await engine.close()


@pytest.mark.parametrize("gone", [reset, status(503), status(502)])
async def test_a_server_that_dies_costs_no_question(server: MisbehavingServer, store: Store, gone: object) -> None:
    many = questions(120)

    def die(requests: int) -> None:
        if requests == 60:
            server.always = [gone]

    server.on_request = die
    with pytest.raises(CalibError, match="20 questions in a row got no answer") as error:
        await gather(server, store, many, retries=1)
    assert error.value.exit_code == 1
    assert "give the same command" in str(error.value)
    assert failures(store) == {}
    done = load_outcomes(store).n
    assert 55 <= done <= 60

    server.on_request, server.always = None, []
    server.asked.clear()
    await gather(server, store, many)
    assert sum(server.times_asked().values()) == 120 - done
    assert_true(load_outcomes(store), many)


async def test_a_server_that_dies_before_the_last_questions_costs_none_either(
    server: MisbehavingServer, store: Store
) -> None:
    engine = engine_for(server, retries=0)
    server.on_request = lambda _: server.info.update(protocol="none")  # no longer what it was
    server.always = [reset]
    with pytest.raises(CalibError, match="server is gone"):
        await collect(FEW, {"base": engine}, store, budgets=(BUDGET,))
    assert failures(store) == {}
    await engine.close()


async def test_single_questions_without_an_answer_are_failures(server: MisbehavingServer, store: Store) -> None:
    for question in FEW:
        server.faults[question.question] = [reset] * 4
    server.faults[FEW[2].question].clear()
    summary = await gather(server, store)
    assert summary.arms[0].reasons == {"connection": 5} == failures(store)
    assert summary.arms[0].asked == 6


async def test_arms_of_different_models_never_mix(store: Store) -> None:
    async with MisbehavingServer() as one, MisbehavingServer(model="other") as other:
        engines = {"base": engine_for(one), "mtp": engine_for(other)}
        with pytest.raises(CalibError, match=r"'base' and 'mtp' serve different models \(model: 'tiny' and 'other'\)"):
            await collect(FEW, engines, store)
        assert not one.asked + other.asked
        assert store.models() == []
        for engine in engines.values():
            await engine.close()


async def test_a_server_that_was_replaced_meanwhile_is_told(server: MisbehavingServer, store: Store) -> None:
    server.on_request = lambda _: server.info.update(model="other")
    with pytest.raises(CalibError, match="replaced while it was asked") as error:
        await gather(server, store)
    assert error.value.exit_code == 1


async def test_answers_since_the_last_look_at_a_replaced_server_are_marked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ten answers another model answers; a look every few answers finds it and stops."""

    class Changing(ScriptedEngine):
        changed = False

        async def info(self):
            info = await super().info()
            return replace(info, identity={"model": "other"}) if self.changed else info

        async def ask(self, question, budgets, **options):
            await asyncio.sleep(0.02)
            self.changed = len(self.asked) >= 10
            return await super().ask(question, budgets, **options)

    engine = Changing()
    asked = questions(200, options=3)
    monkeypatch.setattr("calib.crew.CHECK_S", 0.05)
    with pytest.raises(CalibError, match="replaced while it was asked.*marked, and left out of tuning"):
        await collect(asked, {"base": engine}, store, concurrency=2)
    assert len(engine.asked) < 100  # it stopped in the middle
    outcomes = load_outcomes(store)
    marked = outcomes.flaw == "replaced"
    late = [question.id for question, *_ in engine.asked[10:]]
    assert set(late) & set(outcomes.ids.tolist()) <= set(outcomes.ids[marked].tolist())
    assert marked.sum() < outcomes.n  # those before the last good look are the first model's
    (model,) = store.models()
    assert [row.audit for row in store.audits(model.fingerprint)] == ["replaced"] * int(marked.sum())


async def test_a_threshold_that_was_written_back_meanwhile_is_fine(server: MisbehavingServer, store: Store) -> None:
    server.on_request = lambda _: server.info["defaults"].update(threshold=0.1)
    assert (await gather(server, store)).warnings == ()


async def test_a_server_that_is_gone_after_the_last_answer_is_a_warning(store: Store) -> None:
    class Leaving(ScriptedEngine):
        async def info(self):
            if len(self.asked) == 6:
                raise CalibError("gone", exit_code=1)
            return await super().info()

    summary = await collect(questions(6, options=3), {"base": Leaving()}, store)
    assert "not known: gone" in summary.warnings[0]
    assert load_outcomes(store).n == 6


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_a_clean_stop_lets_questions_in_flight_finish(server: MisbehavingServer, store: Store) -> None:
    server.delay = 0.05
    stop = asyncio.Event()
    server.on_request = lambda requests: stop.set() if requests == 5 else None
    summary = await gather(server, store, questions(60), stop=stop, arm="base")
    assert summary.interrupted
    assert 5 <= len(server.asked) <= 7  # concurrency 3: at most two were begun beside the fifth
    assert summary.arms[0].asked == len(server.asked) == load_outcomes(store).n


async def test_after_the_grace_nothing_is_waited_for(server: MisbehavingServer, store: Store) -> None:
    stop = asyncio.Event()
    server.faults[ODD.question] = [slow(60)]
    server.on_request = lambda requests: stop.set() if requests == 6 else None
    summary = await asyncio.wait_for(gather(server, store, stop=stop, grace=0.2), 10)
    assert summary.interrupted
    assert_true(load_outcomes(store), FEW[1:])
    assert (await gather(server, store)).arms[0].asked == 1


async def test_a_stop_between_arms(store: Store) -> None:
    stop = asyncio.Event()
    arms = {"base": ScriptedEngine(), "mtp": ScriptedEngine()}

    def at_the_end(progress: Progress) -> None:
        if progress.done == 6:
            stop.set()

    summary = await collect(questions(6, options=3), arms, store, progress=at_the_end, stop=stop)
    assert [arm.arm for arm in summary.arms] == ["base"]
    assert summary.interrupted
    assert not arms["mtp"].asked


# --- the process ------------------------------------------------------------------------------------------------------

CONCURRENCY = 8

COLLECTOR = """
import json, os, sys
from calib.collect import run
from calib.store import Store
from tests.misbehaving import BUDGET, questions

def main(url, path, n, concurrency):
    with Store.open(path) as store:
        summary = run(questions(n), {"base": url}, store, budgets=(60, BUDGET), concurrency=concurrency, grace=20)
    print(json.dumps(summary.to_dict()), flush=True)

for line in sys.stdin:  # a fresh process each time, without the second that the imports take
    child = os.fork()
    if child == 0:
        status = 1
        try:
            main(*json.loads(line))
            status = 0
        except KeyboardInterrupt:
            status = 130
        finally:
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Collectors:
    """Starts collector processes one after the other."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = 0

    async def _line(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), 60)).decode().strip()

    async def start(self, url: str, path: Path, n: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([url, str(path), n, CONCURRENCY]).encode() + b"\n")
        self.pid = int(await self._line())

    async def end(self) -> tuple[int, dict | None]:
        """Exit code (negative: killed by that signal) and summary of the process that was started."""
        summary = None
        while (line := await self._line()).startswith("{"):
            summary = json.loads(line)
        return int(line), summary


@pytest.fixture
async def collectors() -> AsyncIterator[Collectors]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COLLECTOR,
        cwd=Path(__file__).parents[1],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    yield Collectors(process)
    assert process.stdin is not None
    process.stdin.close()
    await asyncio.wait_for(process.wait(), 60)


def stored(path: Path) -> dict[tuple[str, str], Covered]:
    with Store.open(path, must_exist=True) as store:
        models = store.models()
        return store.coverage(models[0].fingerprint, "base", concurrency=CONCURRENCY) if models else {}


async def test_killed_at_ten_random_moments_it_ends_with_the_store_of_an_undisturbed_run(
    server: MisbehavingServer, collectors: Collectors, tmp_path: Path
) -> None:
    n = 160
    moments = random.Random(20261101)
    loop = asyncio.get_running_loop()
    path = tmp_path / "killed.db"
    server.delay = 0.005
    lost = 0
    for _ in range(10):
        before = stored(path) if path.exists() else {}
        complete = {name for name, has in before.items() if has.timed_system1 and has.timed == {60, BUDGET}}
        server.asked.clear()
        deadline = moments.randint(1, 50)  # requests, two or three for a question

        def kill(requests: int, deadline: int = deadline) -> None:
            if requests == deadline:
                loop.call_later(moments.uniform(0, 0.008), os.kill, collectors.pid, signal.SIGKILL)

        server.on_request = kill
        await collectors.start(server.url, path, n)
        code, summary = await collectors.end()
        assert (code, summary) == (-signal.SIGKILL, None)
        repeated = {("small", "q" + text.split()[2].rstrip("?")) for text in server.times_asked()} & complete
        assert not repeated
        fresh = len(server.times_asked())
        new = len(stored(path)) - len(before)
        assert fresh - new <= CONCURRENCY
        lost += fresh - new
    assert lost > 0  # it was killed in the midst of things
    assert 0 < len(stored(path)) < n

    server.on_request = None
    await collectors.start(server.url, path, n)
    code, summary = await collectors.end()
    assert code == 0
    assert summary is not None
    assert summary["arms"][0]["asked"] + summary["arms"][0]["already"] == n

    calm = tmp_path / "calm.db"
    await collectors.start(server.url, calm, n)
    assert (await collectors.end())[0] == 0
    killed, undisturbed = (in_order(load_outcomes(at)) for at in (path, calm))
    assert_true(killed, questions(n), (60, BUDGET))
    for name in ("ids", "p1", "p2", "tokens", "finished", "answer", "n_options", "budgets", "dataset", "kind"):
        np.testing.assert_array_equal(getattr(killed, name), getattr(undisturbed, name))
    assert killed.fingerprint == undisturbed.fingerprint
    for seconds in (killed.t1, killed.t2):  # seconds differ from run to run, but none is missing
        assert not np.isnan(seconds).any()


def in_order(outcomes: Outcomes) -> Outcomes:
    return outcomes.take(np.argsort(outcomes.ids.astype(str)))


async def test_ctrl_c_stops_cleanly(server: MisbehavingServer, collectors: Collectors, tmp_path: Path) -> None:
    server.delay = 0.02
    server.on_request = lambda requests: os.kill(collectors.pid, signal.SIGINT) if requests == 40 else None
    path = tmp_path / "stopped.db"
    await collectors.start(server.url, path, 200)
    code, summary = await collectors.end()
    assert code == 0
    assert summary is not None
    assert summary["interrupted"]
    # every question that was begun was finished, and is there
    assert summary["arms"][0]["asked"] == len(server.times_asked()) == len(stored(path)) < 60


async def test_a_second_ctrl_c_does_not_wait(server: MisbehavingServer, collectors: Collectors, tmp_path: Path) -> None:
    for question in questions(200)[::2]:
        server.faults[question.question] = [slow(60)]
    loop = asyncio.get_running_loop()

    def twice(_requests: int) -> None:
        if sum(question.question in server.times_asked() for question in questions(200)[::2]) == CONCURRENCY:
            server.on_request = None
            for delay in (0.1, 0.3):
                loop.call_later(delay, os.kill, collectors.pid, signal.SIGINT)

    server.on_request = twice
    path = tmp_path / "aborted.db"
    await collectors.start(server.url, path, 200)
    code, summary = await asyncio.wait_for(collectors.end(), 15)
    assert (code, summary) == (130, None)
    assert len(stored(path)) == len(server.times_asked()) - CONCURRENCY  # what was answered is there


def test_a_background_job_ignores_ctrl_c_and_obeys_sigterm() -> None:
    """A shell starts a job in the background so that it ignores SIGINT."""
    seen: list[bool] = []

    async def main(stop: asyncio.Event) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
            seen.append(stop.is_set())

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        in_loop(main)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [False, True]


def test_run_asks_every_arm_and_remembers_what_it_was_told_but_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "hunter2-hunter2")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def both() -> list[str]:
        async with MisbehavingServer(simulated=True) as server, asyncio.timeout(30):
            with Store.open(tmp_path / "r.db") as store:
                urls = {"base": server.url, "mtp": server.url + "/v1"}
                # run has its own loop, so not in this thread
                summary = await asyncio.to_thread(
                    run, FEW, urls, store, budgets=(BUDGET,), concurrency=2, api_key_env="SOME_KEY"
                )
                assert [arm.asked for arm in summary.arms] == [6, 6]
                assert summary.simulated
                assert store.status().runs[0]["arguments"]["concurrency"] == 2
            return [headers.get("Authorization", "") for headers in server.headers]

    assert set(asyncio.run(both())) == {"Bearer hunter2-hunter2"}
    content = b"".join(file.read_bytes() for file in tmp_path.glob("r.db*"))
    assert b"hunter2" not in content
    assert b"SOME_KEY" in content
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

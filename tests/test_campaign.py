"""Whole collections over HTTP: the arms in order, several addresses, shards into one PostgreSQL, and a look back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calib import audit, campaign
from calib.arms import Arm, arm_of
from calib.campaign import Campaign, Options
from calib.collect import choose, parse_shard
from calib.crew import Progress
from calib.engine.prompts import DECIDE_PROMPT, DEFAULT_PROMPT
from calib.errors import CalibError
from calib.policy import Policy, evaluate
from calib.questions import Question
from calib.staged import Headroom
from calib.store import Store, load_outcomes
from calib.target import parse_targets
from calib.tuning import Demand
from tests.misbehaving import MisbehavingServer, questions, status
from tests.postgres import postgres, postgres_server  # noqa: F401 - fixtures
from tests.test_engine_ladder import DecideLike
from tests.test_engine_ladder import questions as ladder_questions

ASKED = questions(200)
QUICK = Options(budgets=(300, 2000), concurrency=8, pilot=40, latency_sample=10, retries=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "c.db") as store:
        yield store


async def collected(
    store: Store, arms: list[Arm], asked: list[Question] = ASKED, options: Options = QUICK, **more: object
) -> Campaign:
    return await campaign.collect(asked, arms, store, options, **more)


# --- all of it --------------------------------------------------------------------------------------------------------


async def test_answers_of_the_first_arm_then_seconds_of_each_then_audits(store: Store) -> None:
    async with MisbehavingServer(delay=0.002) as base, MisbehavingServer(delay=0.002) as mtp:
        arms = [arm_of("base", base.url), arm_of("mtp", mtp.url)]
        options = Options(**(vars(QUICK) | {"audit": 25, "latency_concurrency": (8, 2)}))
        seen: list[Progress] = []
        found = await collected(store, arms, options=options, progress=seen.append)
        assert found.stages is not None
        assert not found.interrupted
        assert [(one.arm, one.concurrency, one.state) for one in found.passes] == [
            ("base", 8, "done"),
            ("base", 2, "done"),
            ("mtp", 8, "done"),
            ("mtp", 2, "done"),
        ]
        assert any("has no /metrics" in warning for warning in found.warnings)
        assert [one.arm for one in found.audits] == ["base", "mtp"]
        assert found.audits[0].asked["rotated"] == 25
        stages = list(dict.fromkeys((p.arm, p.stage.split(" at ")[0]) for p in seen))
        assert stages[:2] == [("base", "system1"), ("base", "pilot")]
        assert stages.index(("base", "latency")) < stages.index(("mtp", "latency"))
        assert all(p.gpu_hours >= 0 for p in seen)
        json.dumps(found.to_dict(), allow_nan=False)

        outcomes = load_outcomes(store, concurrency=8)
        assert outcomes.arms == ("base", "mtp")
        assert not outcomes.estimated[0].any()  # the first arm was timed on every question that counts
        assert outcomes.estimated[1].any()
        assert outcomes.has_latency("mtp")
        everything = load_outcomes(store, budgets=[], concurrency=8)
        assert everything.n == 200  # also what was kept for the passes
        tuned_on, test = outcomes.split(0.3)
        assert test is not None
        assert test.unweighted
        assert tuned_on.weight.sum() == pytest.approx((~everything.test_mask(0.3)).sum())
        checked = {finding.audit: finding for finding in audit.findings(store)}
        assert checked["arms p1"].level == checked["arms p2"].level == "ok"  # the servers are one
        assert checked["repeatability"].value == 0
        evaluate(outcomes, Policy(0.5, 0.5, 300, "mtp"))

        asked = len(base.asked), len(mtp.asked)
        again = await collected(store, arms, options=options)
        assert again.passes == ()
        # what gave its seconds at the other load alone is thought about now, like any other question
        assert again.stages.rounds[-1].tune == again.stages.arm.asked == 10
        assert len(mtp.asked) == asked[1]
        asked = len(base.asked), len(mtp.asked)
        await collected(store, arms, options=options)
        assert (len(base.asked), len(mtp.asked)) == asked


async def test_no_at_the_question_ends_it_before_the_passes(store: Store) -> None:
    async with MisbehavingServer() as base:
        seen: list[Headroom] = []
        found = await collected(store, [arm_of("base", base.url)], confirm=lambda h: bool(seen.append(h)))
        assert len(seen) == 1
        assert found.stages is not None
        assert (found.stages.ended, found.passes, found.audits) == ("ended after the pilot", (), ())
        # all but what is kept for the passes
        assert load_outcomes(store, budgets=[]).n == found.stages.headroom.system1[0].n == 190


async def test_everything_by_every_arm(store: Store) -> None:
    async with MisbehavingServer() as base, MisbehavingServer() as mtp:
        arms = [arm_of("base", base.url), Arm("mtp", (mtp.url,), concurrency=4)]
        found = await collected(store, arms, ASKED[:30], Options(**(vars(QUICK) | {"everything": True})))
        assert found.stages is None
        assert [(arm.arm, arm.asked) for summary in found.whole for arm in summary.arms] == [("base", 30), ("mtp", 30)]
        assert [(one.arm, one.concurrency, one.state, one.timed) for one in found.passes] == [
            ("base", 8, "done", 10),
            ("mtp", 4, "done", 10),
        ]
        assert load_outcomes(store, arms=["mtp"]).concurrency.tolist() == [4]
        assert load_outcomes(store, arms=["base"]).unweighted
        assert not load_outcomes(store).estimated.any()
        asked = len(base.asked), len(mtp.asked)
        again = await collected(store, arms, ASKED[:30], Options(**(vars(QUICK) | {"everything": True})))
        assert [(arm.asked, arm.already) for arm in again.arms] == [(0, 30), (0, 30)]
        assert (len(base.asked), len(mtp.asked)) == asked


async def test_everything_without_a_latency_sample_asks_each_question_once(store: Store) -> None:
    async with MisbehavingServer() as base:
        options = Options(**(vars(QUICK) | {"everything": True, "latency_sample": 0}))
        found = await collected(store, [arm_of("base", base.url)], ASKED[:30], options)
        assert found.passes == ()
        # those that did not end at the smaller budget were asked for the larger one first
        thinking = Counter(body["question"] for body in base.asked if not body.get("system2_only"))
        assert set(thinking.values()) == {1}
        assert len(thinking) == 30


async def test_a_question_that_fails_in_the_pass_is_asked_once_more(store: Store) -> None:
    async with MisbehavingServer() as base:
        options = Options(**(vars(QUICK) | {"everything": True, "retries": 0}))
        for question in ASKED[:60]:
            base.faults[question.question] = [status(404)]  # the first request for each
        found = await collected(store, [arm_of("base", base.url)], ASKED[:60], options)
        (one,) = found.passes
        assert (one.timed, one.failed) == (0, 10)
        # those of the pass, and what kept up its load, were asked before
        assert found.arms[0].asked == 60
        assert found.arms[0].failed <= 50
        assert load_outcomes(store).failed.sum() == 2 * found.arms[0].failed


async def test_a_server_that_dies_in_a_pass_costs_no_question(store: Store) -> None:
    async with MisbehavingServer() as base:
        options = Options(**(vars(QUICK) | {"everything": True, "retries": 0, "latency_sample": 40}))

        def die(requests: int) -> None:
            if requests > 12:
                base.always = [status(503)]

        base.on_request = die
        with pytest.raises(CalibError, match="the server is gone"):
            await collected(store, [arm_of("base", base.url)], options=options)
        assert store.status().models[0].failures == []


# --- when nobody says when to stop ------------------------------------------------------------------------------------


async def test_few_questions_are_all_asked_by_every_arm_when_nobody_says_when_to_stop(store: Store) -> None:
    async with MisbehavingServer() as base, MisbehavingServer() as mtp:
        arms = [arm_of("base", base.url), arm_of("mtp", mtp.url)]
        said: list[str] = []
        options = Options(**(vars(QUICK) | {"unattended": True}))
        found = await collected(store, arms, options=options, say=said.append)
        assert found.stages is not None
        assert found.stages.headroom is not None
        assert found.stages.ended == "every question was thought about"
        assert [(arm.arm, arm.asked, arm.failed) for arm in found.arms] == [("base", 200, 0), ("mtp", 200, 0)]
        assert found.passes == ()
        assert any("few questions" in line for line in said)
        outcomes = load_outcomes(store)
        assert (outcomes.n, outcomes.arms, outcomes.unweighted) == (200, ("base", "mtp"), True)
        assert not outcomes.estimated.any()
        asked = len(base.asked), len(mtp.asked)
        again = await collected(store, arms, options=options)
        assert [(arm.asked, arm.already) for arm in again.arms] == [(0, 200), (0, 200)]
        assert (len(base.asked), len(mtp.asked)) == asked


async def test_many_questions_of_a_real_server_are_thought_about_while_it_pays(store: Store) -> None:
    async with MisbehavingServer() as base:
        options = Options(budgets=(300,), concurrency=32, unattended=True, latency_sample=20)
        demand = Demand(targets=parse_targets(["think_rate<99%"]))  # soon certain
        found = await collected(store, [arm_of("base", base.url)], questions(700), replace(options, demand=demand))
        assert found.stages is not None
        assert found.stages.ended == "certified"
        assert found.stages.thoughts < 700
        assert [one.state for one in found.passes] == ["done"]


async def test_many_questions_of_a_simulated_server_are_all_asked_too(store: Store) -> None:
    async with MisbehavingServer(simulated=True) as base:
        options = Options(budgets=(300,), concurrency=32, unattended=True)
        found = await collected(store, [arm_of("base", base.url)], questions(700), options)
        assert found.stages is not None
        assert (found.stages.thoughts, load_outcomes(store).n) == (700, 700)


@pytest.mark.parametrize("kind", ["score", "choice"])
async def test_without_anything_to_stage_all_is_asked(store: Store, kind: str) -> None:
    asked = questions(20, kind=kind)
    async with MisbehavingServer() as base:
        if kind == "choice":
            base.always = [status(404)]
        said: list[str] = []
        options = Options(**(vars(QUICK) | {"unattended": True, "retries": 0}))
        found = await collected(store, [arm_of("base", base.url)], asked, options, say=said.append)
        assert (found.stages, len(found.arms)) == (None, 1)
        assert any("everything is asked" in line for line in said)
        if kind == "score":
            assert load_outcomes(store).n == 20
        else:
            assert {one.reason for one in store.status().models[0].failures} == {"http_404"}
            with pytest.raises(CalibError, match="--all asks everything"):
                await collected(store, [arm_of("base", base.url)], asked)


async def test_several_addresses_share_the_work_of_one_arm(store: Store) -> None:
    async with MisbehavingServer(delay=0.005) as one, MisbehavingServer(delay=0.005) as other:
        found = await collected(store, [arm_of("base", f"{one.url},{other.url}")], ASKED[:60])
        assert not found.interrupted
        share = len(one.asked) / (len(one.asked) + len(other.asked))
        assert 0.3 < share < 0.7


async def test_arms_of_two_models_are_refused(store: Store) -> None:
    async with MisbehavingServer() as base, MisbehavingServer(model="other") as mtp:
        with pytest.raises(CalibError, match="different models"):
            await collected(store, [arm_of("base", base.url), arm_of("mtp", mtp.url)])
        with pytest.raises(CalibError, match="--arms arms.toml"):
            await collected(store, [])


async def test_a_launched_arm_has_the_machine_for_itself() -> None:
    arms = [Arm("a", ("http://x:1",)), Arm("b", ("http://x:2",), start=("true",)), Arm("c", ("http://x:3",))]
    assert [[arm.name for arm in group] for group in campaign.groups(arms)] == [["a", "c"], ["b"]]
    assert [[arm.name for arm in group] for group in campaign.groups(arms[1:])] == [["b"], ["c"]]


async def test_a_target_is_looked_at_between_rounds(store: Store) -> None:
    async with MisbehavingServer() as base:
        demand = Demand(targets=parse_targets(["think_rate<99%"]))
        found = await collected(
            store, [arm_of("base", base.url)], options=Options(**(vars(QUICK) | {"demand": demand}))
        )
        assert found.stages is not None
        assert found.stages.ended == "certified"
        assert found.stages.thoughts < 200


async def test_smaller_budgets_are_read_on_a_base_model_that_gives_the_same_answers(store: Store) -> None:
    asked = ladder_questions(60)
    options = Options(**(vars(QUICK) | {"budgets": (4, 15, 400), "everything": True, "latency_sample": 0}))
    async with DecideLike(DECIDE_PROMPT) as own, DecideLike(DEFAULT_PROMPT) as other:
        for server, verdict in ((own, "read from cuts"), (other, "asked one by one")):
            said: list[str] = []
            arms = [arm_of("base", server.url)]
            with Store.open(store.location + verdict[:4]) as fresh:
                await collected(fresh, arms, asked, options, say=said.append)
                outcomes = load_outcomes(fresh)
                assert (outcomes.n, outcomes.budgets.tolist()) == (60, [4, 15, 400])
                thoughts = len(server.asked_to_think)
                await collected(fresh, arms, asked, options, say=said.append)
                assert len(server.asked_to_think) == thoughts  # nothing is asked, so nothing is compared
            assert sum(verdict in line for line in said) == 1
        assert own.asked_to_think == [400] * 90  # 30 to compare, and one a question
        assert other.asked_to_think.count(400) == 90
        assert other.asked_to_think.count(4) > 50


async def test_a_decide_server_without_a_base_model_is_asked_quietly(store: Store) -> None:
    async with MisbehavingServer() as base:
        said: list[str] = []
        await collected(
            store,
            [arm_of("base", base.url)],
            ASKED[:40],
            Options(**(vars(QUICK) | {"everything": True})),
            say=said.append,
        )
        (line,) = said  # what was found at the address, and nothing of a ladder
        assert "a decide server, protocol jev27-bare-v1, model tiny" in line
        assert {body["think_budget"] for body in base.asked if body["thinking"] == "on"} == {300, 2000}


# --- from the command line's side -------------------------------------------------------------------------------------


def test_run_remembers_what_it_was_told_and_stops_on_a_signal(tmp_path: Path) -> None:
    code = """
    import sys
    from calib import campaign
    from calib.arms import arm_of
    from calib.store import Store
    from tests.misbehaving import questions
    with Store.open(sys.argv[1]) as store:
        options = campaign.Options(concurrency=2, pilot=40)
        found = campaign.run(questions(400), [arm_of("base", sys.argv[2])], store, options)
    print("interrupted", found.interrupted)
    """

    async def main() -> str:
        async with MisbehavingServer(delay=0.01) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "r.db"), server.url, stdout=subprocess.PIPE
            )
            while len(server.asked) < 50:
                await asyncio.sleep(0.05)
                assert process.returncode is None
            os.kill(process.pid, signal.SIGINT)
            told, _ = await asyncio.wait_for(process.communicate(), 60)
            return told.decode()

    assert asyncio.run(main()).strip() == "interrupted True"
    with Store.open(tmp_path / "r.db") as store:
        (run,) = store.status().runs
        assert run["arguments"]["arms"][0]["name"] == "base"
        assert run["arguments"]["questions"] == 400
        assert 40 < load_outcomes(store, budgets=[]).n < 400


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shards_are_a_partition_that_keeps_equal_texts_together() -> None:
    twins = [Question("t", "twins", q.kind, q.state, q.question, q.options, q.answer) for q in ASKED[:1]]
    parts = [choose(ASKED + twins, shard=(k, 3)) for k in (1, 2, 3)]
    assert Counter(q for part in parts for q in part) == Counter(ASKED + twins)
    assert all(len(part) > 40 for part in parts)
    assert any({"small", "twins"} <= {q.dataset for q in part if q.question == ASKED[0].question} for part in parts)
    assert choose(ASKED, shard=(1, 1)) == choose(ASKED)
    assert parse_shard("2/3") == (2, 3)
    for text in ("0/3", "4/3", "2", "a/b", "1/0", "-1/2"):
        with pytest.raises(CalibError, match="--shard"):
            parse_shard(text)
    with pytest.raises(CalibError, match="--shard"):
        choose(ASKED, shard=(4, 3))


async def _in_shards(where: str, url: str, parts: int) -> None:
    """Collectors in processes of their own, each with its part."""
    code = """
    import sys
    from calib import campaign
    from calib.arms import arm_of
    from calib.collect import choose, parse_shard
    from calib.store import Store
    from tests.misbehaving import questions
    where, url, part = sys.argv[1:]
    with Store.open(where) as store:
        campaign.run(
            choose(questions(240), shard=parse_shard(part)), [arm_of("base", url)], store,
            campaign.Options(budgets=(2000,), concurrency=4, pilot=20, latency_sample=0, part=part),
        )
    """
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(code), where, url, f"{k}/{parts}", stderr=subprocess.PIPE
        )
        for k in range(1, parts + 1)
    ]
    for process in running:
        _, said = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, said.decode()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_several_collectors_fill_one_store(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    where = str(tmp_path / "s.db") if kind == "sqlite" else request.getfixturevalue("postgres")
    async with MisbehavingServer(delay=0.002) as server:
        await _in_shards(where, server.url, 3)
        thinking = Counter(body["question"] for body in server.asked if body["thinking"] == "on")
        reads = Counter(body["question"] for body in server.asked if body["thinking"] == "off")
    assert set(reads.values()) == {1}  # nobody asked what another one did
    assert set(thinking.values()) == {1}
    assert len(reads) == 240
    with Store.open(where) as store:
        (model,) = store.models()
        planned = store.planned(model.fingerprint)
        assert {row.part for row in planned} == {"1/3", "2/3", "3/3"}
        assert len(planned) == 240
        outcomes = load_outcomes(store)
        assert outcomes.n == len(thinking)
        tuned_on, test = outcomes.split(0.3)
        assert test is not None
        assert test.unweighted
        held_out = load_outcomes(store, budgets=[]).test_mask(0.3)
        assert tuned_on.weight.sum() == pytest.approx((~held_out).sum())
        assert np.isfinite(outcomes.t2).all()
        audit.findings(store)

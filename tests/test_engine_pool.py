"""Several servers as one engine: shared work, servers that die and come back, and models that differ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from calib.collect import collect
from calib.engine.base import Answer, AskFailed, EngineInfo, PartlyFailed
from calib.engine.pool import EnginePool
from calib.errors import CalibError
from calib.questions import Question
from calib.store import Store
from tests.misbehaving import questions
from tests.scripted import ScriptedEngine


class Server(ScriptedEngine):
    """One that can be away, and may come back as another model."""

    away = False
    model = "scripted"

    async def info(self) -> EngineInfo:
        if self.away:
            raise CalibError("no server there", exit_code=1)
        return EngineInfo(self.model, {"model": self.model})

    async def ask(self, question: Question, budgets: Sequence[int], **options: bool) -> Answer:
        await asyncio.sleep(0.002)
        if self.away:
            raise AskFailed("connection", "refused", attempts=2)
        return await super().ask(question, budgets, **options)


ASKED = questions(40, options=3)


async def test_the_server_with_the_fewest_questions_is_next() -> None:
    slow, quick = Server(gate=asyncio.Event()), Server()
    pool = EnginePool([slow, quick])
    await pool.info()
    waiting = [asyncio.create_task(pool.ask(question, ())) for question in ASKED[:2]]  # one each
    await asyncio.sleep(0.05)
    for question in ASKED[2:10]:
        await pool.ask(question, ())
    assert (len(slow.asked), len(quick.asked)) == (1, 9)
    slow.gate.set()
    await asyncio.gather(*waiting)
    await pool.close()
    assert (slow.closed, quick.closed) == (1, 1)


async def test_what_a_dead_server_cost_is_taken_off_the_deadline() -> None:
    dead, alive = Server(), Server()
    pool = EnginePool([dead, alive])
    await pool.info()
    dead.away = True
    await pool.ask(ASKED[0], (600,), deadline=1.0)
    (deadline,) = alive.deadlines
    assert deadline is not None
    assert 0.5 < deadline < 1.0 - 0.0019
    await pool.ask(ASKED[1], (600,))
    assert alive.deadlines[1] is None
    await pool.close()


async def test_a_dead_server_is_left_out_and_probed_again(caplog: pytest.LogCaptureFixture) -> None:
    dead, alive = Server(), Server()
    pool = EnginePool([dead, alive], probe_s=0.02)
    await pool.info()
    dead.away = True
    with caplog.at_level(logging.WARNING):
        answer = await pool.ask(ASKED[0], (600,))
        assert answer.t1 > 0.05 + 0.0019  # what was lost on the dead one is the question's
        assert len(alive.asked) == 1
        for question in ASKED[1:5]:
            assert (await pool.ask(question, ())).t1 == 0.05  # it is not tried again and again
        dead.away = False
        await asyncio.sleep(0.03)
        await pool.ask(ASKED[5], ())  # begins the probe
        await asyncio.sleep(0.01)
        await asyncio.gather(*(pool.ask(question, ()) for question in ASKED[6:16]))
    assert len(dead.asked) == 5
    assert [line.split(") ")[-1] for line in caplog.messages][-1].endswith("is back")
    await pool.close()


async def test_what_a_server_could_not_answer_well_is_a_finding_and_not_passed_on() -> None:
    bad = Server(failure=AskFailed("nan", "broken"))
    other = Server()
    pool = EnginePool([bad, other])
    with pytest.raises(AskFailed, match="nan"):
        await pool.ask(ASKED[0], ())
    assert other.asked == []
    await pool.close()


async def test_seconds_that_were_lost_count_for_a_part_too() -> None:
    dead, alive = Server(), Server()
    pool = EnginePool([dead, alive])
    dead.away = True
    partial = await ScriptedEngine().ask(ASKED[0], ())
    alive.failure = PartlyFailed(AskFailed("nan", "", stage="system2"), partial)
    with pytest.raises(PartlyFailed) as caught:
        await pool.ask(ASKED[0], (600,))
    assert caught.value.partial.t1 > 0.05 + 0.0019
    alive.failure = None
    dead_again = EnginePool([dead, alive])
    answer = await dead_again.ask(ASKED[0], (600,), system1=False)
    assert answer.t2[0] > 6.0 + 0.0019
    await pool.close()
    await dead_again.close()


async def test_no_server_at_all_is_a_failure_that_counts_all_attempts() -> None:
    both = [Server(), Server()]
    pool = EnginePool(both, probe_s=100)
    await pool.info()
    for server in both:
        server.away = True
    with pytest.raises(AskFailed) as caught:
        await pool.ask(ASKED[0], ())
    assert (caught.value.reason, caught.value.attempts) == ("connection", 4)
    with pytest.raises(CalibError, match="no server there"):
        await pool.info()
    await pool.close()


async def test_two_models_are_no_pool_and_one_that_changes_stays_out() -> None:
    one, other = Server(), Server()
    other.model = "another"
    pool = EnginePool([one, other], probe_s=0.0)
    with pytest.raises(CalibError, match="another model"):
        await pool.info()
    other.model = "scripted"
    await pool.info()
    other.away = True
    await asyncio.gather(*(pool.ask(question, ()) for question in ASKED[:2]))
    other.away, other.model = False, "another"
    for question in ASKED[:4]:
        await pool.ask(question, ())
        await asyncio.sleep(0.001)
    assert other.asked == []
    await pool.close()
    with pytest.raises(CalibError, match="one engine or more"):
        EnginePool([])


async def test_a_collection_survives_the_loss_of_a_server(tmp_path: Path) -> None:
    dying, alive = Server(), Server()
    real = dying.ask

    async def ask(question: Question, budgets: Sequence[int], **options: bool) -> Answer:
        dying.away = dying.away or len(dying.asked) >= 5
        return await real(question, budgets, **options)

    dying.ask = ask  # type: ignore[method-assign]
    pool = EnginePool([dying, alive])
    with Store.open(tmp_path / "p.db") as store:
        summary = await collect(ASKED, {"base": pool}, store, budgets=(600,), concurrency=4)
    await pool.close()
    assert (summary.arms[0].asked, summary.arms[0].failed) == (40, 0)
    assert 5 <= len(dying.asked) < 10

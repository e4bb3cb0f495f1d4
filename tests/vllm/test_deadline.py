"""Deadlines on real vLLM: the thought is closed in time, the server stops, and the answer is that of the cut."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

import pytest

from calib.engine.base import Answer, AskFailed
from calib.engine.prometheus import snapshot
from calib.engine.vllm import VllmEngine
from calib.gateway import DecideRequest, Gateway
from calib.policy import Policy
from calib.questions import Question
from tests.patience import undisturbed
from tests.vllm.servers import Server
from tests.vllm.test_real_vllm import QUESTIONS, SAME

pytestmark = pytest.mark.vllm

LONG = 900
"""Tokens that this machine cannot generate before the deadline."""
ENDLESS = {"temperature": 0.0, "frequency_penalty": -2.0, "presence_penalty": -2.0}
"""What was said once is said again, so that the thoughts of a random model do not end."""
LATE = 0.2


async def _idle_soon(engine: VllmEngine) -> bool:
    for _ in range(50):
        found = await snapshot(engine.client)
        if found is not None and found.idle:
            return True
        await asyncio.sleep(0.1)
    return False


async def _deadline(engine: VllmEngine) -> float:
    """Six times what 40 tokens take on this machine as it is now."""
    seconds = []
    for _ in range(15):
        started = time.perf_counter()
        await engine.ask(QUESTIONS[0], (20, 40), deadline=30)
        seconds.append(time.perf_counter() - started)
    return 6 * sorted(seconds)[7]


async def _closed(engine: VllmEngine, question: Question, deadline: float) -> list[Answer]:
    """Answers in time, one to three of twenty tries: a shared machine may stand still for seconds."""
    answers: list[Answer] = []
    for _ in range(20):
        started = time.perf_counter()
        with suppress(AskFailed):
            answer = await engine.ask(question, (20, LONG), deadline=deadline, keep_text=True)
            if answer.closed and time.perf_counter() - started < deadline + LATE:
                answers.append(answer)
        assert await _idle_soon(engine)  # closing the connection ended the thought in the server too
        if len(answers) == 3:
            break
    assert answers
    return answers


@pytest.mark.parametrize("server", ["tiny", "tiny --speculative"], indirect=True)
@undisturbed
async def test_a_deadline_is_kept(server: Server) -> None:
    engine = VllmEngine(server.url, sampling=ENDLESS, label_mass=False)
    try:
        assert (await engine.info()).keeps_deadline
        deadline = await _deadline(engine)
        for closed in await _closed(engine, QUESTIONS[0], deadline):
            got = int(closed.tokens[1])
            assert closed.tokens[0] == min(20, got)
            assert 0 < got < LONG
            assert not closed.finished.any()
            assert closed.p2.sum(axis=1) == pytest.approx([1, 1])
            assert closed.text is not None
            if not server.flags:  # the same thought, stopped there by its budget
                stopped = await engine.ask(QUESTIONS[0], (got,))
                assert (stopped.tokens.tolist(), stopped.closed) == ([got], False)
                assert stopped.p2[0] == pytest.approx(closed.p2[1], abs=SAME)
        whole = await engine.ask(QUESTIONS[0], (20, 60), deadline=60)
        assert (whole.tokens.tolist(), whole.closed) == ([20, 60], False)
        gate = Gateway(engine, await engine.info(), Policy(1.1, 1.0, LONG, deadline=deadline))
        asked = [
            DecideRequest(kind="choice", state="A cube.", question=f"What is it, {i}?", options=["a", "b"], debug=True)
            for i in range(6)
        ]
        slowest = [math.inf]
        while len(slowest) < 10 and min(slowest) > deadline + LATE:
            answers = await asyncio.gather(*map(gate.decide, asked))
            slowest.append(max(answer["elapsed_seconds"] for answer in answers))
            for answer in answers:
                thinking, degraded = answer["thinking"], answer.get("degraded", False)
                assert not (degraded and thinking.get("closed_by_deadline", False))
                assert answer["probabilities"] == pytest.approx(thinking["system1" if degraded else "system2"])
            assert await _idle_soon(engine)
        assert min(slowest) <= deadline + LATE
    finally:
        await engine.close()

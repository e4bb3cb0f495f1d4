"""The vLLM engine against real vLLM: what is read from cuts of one thought is what runs with those budgets give.

Install first: tests/vllm/install.sh. Then: pytest tests/vllm -m vllm
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

from calib.engine.auto import probe
from calib.engine.base import Answer, AskFailed
from calib.engine.prometheus import between, snapshot
from calib.engine.prompts import read_prompt
from calib.engine.vllm import VllmEngine
from calib.questions import NOUL_OPTIONS, SCORE_LEVELS, Question
from tests.reference import PROMPT, questions
from tests.vllm.servers import Server

pytestmark = pytest.mark.vllm

QUESTIONS = (
    Question("1", "d", "choice", "A blue cube.", "What colour is it?", ("blue", "red", "green"), 0),
    Question("2", "d", "noul", "", "Is it red?", NOUL_OPTIONS, 1),
    Question("3", "d", "score", "", "How red is it?", SCORE_LEVELS, 4),
)
BUDGETS = (3, 10, 40, 200)
SAME = 2e-3
"""How far apart two reads of one prompt may be in float32: the other prompts of a batch move the last digits."""


@pytest.fixture(scope="session")
def answers() -> dict[str, list[Answer]]:
    """What the first way of serving a model answered, by the model's name."""
    return {}


@pytest.mark.parametrize("server", ["tiny"], indirect=True)
async def test_the_context_and_the_errors_of_a_real_server(server: Server) -> None:
    engine = VllmEngine(server.url, sampling={"temperature": 1.0, "top_k": 0})
    try:
        capped = await engine.ask(QUESTIONS[0], (10, 5000))
        assert capped.tokens[1] < 1024
        assert capped.tokens[0] == min(10, capped.tokens[1])
        with pytest.raises(AskFailed, match="maximum context length is 1024") as failed:
            await engine._server.think([5] * 1100, most=500, end=3, seed=1, sampling={})
        assert failed.value.reason == "refused"
        with pytest.raises(AskFailed, match="out-of-vocab") as failed:
            await engine._server.first_token([[5, 6]], allowed=[10**6], top=1)
        assert failed.value.reason == "refused"
        many = Question("4", "d", "choice", "", "Which?", tuple(f"option {i}" for i in range(26)))
        assert (await engine.ask(many, (5,))).p1 is not None
    finally:
        await engine.close()


Read = tuple[tuple[int, ...], tuple[int, ...], np.ndarray]
"""Token ids of a prompt, of the labels, and what was read after it."""


async def _reads_alone_equal_reads_together(
    engine: VllmEngine, question: Question, budgets: Sequence[int]
) -> list[Read]:
    """One thought, its cuts read by one request and one by one: whatever serves, the same tokens give the same."""
    setup = await engine._ready()
    labels = await setup.finder.find(engine.prompt.kinds[question.kind], question)
    opening = await engine._opening(setup, question, labels)
    trace = await engine._think(setup, question, opening, budgets[-1])
    rungs = await setup.ladder.read(opening, trace, budgets, labels.thought)
    assert rungs.budgets == budgets
    read = []
    for budget, reading in zip(budgets, rungs.readings, strict=True):
        prompt = setup.ladder.prompt(opening, trace, budget, labels.thought)
        (alone,) = await setup.reader.read([prompt], labels.thought.labels)
        assert alone.p == pytest.approx(reading.p, abs=SAME)
        read.append((prompt, labels.thought.labels, alone.p))
    return read


async def _cuts_equal_runs_with_that_budget(engine: VllmEngine, question: Question, ladder: Answer) -> None:
    """What was read from cuts of one thought, and a fresh run for each budget."""
    for row, budget in enumerate(ladder.budgets):
        fresh = await engine.ask(question, (budget,))
        assert fresh.tokens[0] == ladder.tokens[row]
        assert fresh.finished[0] == ladder.finished[row]
        assert fresh.p2[0] == pytest.approx(ladder.p2[row], abs=SAME)


@pytest.fixture(scope="session")
def reads() -> list[Read]:
    """Reads of the first way of serving, for the others to repeat."""
    return []


@pytest.mark.parametrize("server", ["tiny", "tiny --raw", "tiny --speculative"], indirect=True)
async def test_the_ladder_on_a_random_model(
    server: Server, answers: dict[str, list[Answer]], reads: list[Read]
) -> None:
    """What is guaranteed whatever serves: the same tokens give the same distribution, in float32.

    So p2 at a budget is what a run with that budget gives, for one and the same thought. That a run thinks the same
    thought again is guaranteed by the seed without speculative decoding, and with it only where nothing is drawn.
    """
    raw, speculative = (flag in server.flags for flag in ("--raw", "--speculative"))
    engine = await probe(server.url, vllm={"sampling": {"temperature": 0.7}})
    assert isinstance(engine, VllmEngine)
    try:
        info = await engine.info()
        assert info.raw["version"].startswith("0.")
        assert info.raw["logprobs"] == ("raw" if raw else "processed")
        assert info.raw["max_logprobs"] == (20 if raw else 64)
        assert (info.raw["marks"]["end"], info.raw["marks"]["after"]) == ("</think>", "\n\n")
        before = await snapshot(engine.client)
        ladders = await asyncio.gather(*(engine.ask(question, BUDGETS) for question in QUESTIONS))
        for question, ladder in zip(QUESTIONS, ladders, strict=True):
            assert ladder.budgets == BUDGETS
            assert (await engine.ask(question, ())).p1 == pytest.approx(ladder.p1, abs=SAME)
            read = await _reads_alone_equal_reads_together(engine, question, BUDGETS)
            if not server.flags:
                reads += read
            if not speculative:
                await _cuts_equal_runs_with_that_budget(engine, question, ladder)
        setup = await engine._ready()
        for prompt, labels, p in reads:  # tokens that another server generated
            (again,) = await setup.reader.read([prompt], labels)
            assert again.p == pytest.approx(p, abs=SAME)
        if speculative:
            # a thought that is drawn is another one each time, whatever its seed; the most likely one is the same
            greedy = VllmEngine(server.url, sampling={"temperature": 0})
            try:
                ladder = await greedy.ask(QUESTIONS[0], BUDGETS)
                await _cuts_equal_runs_with_that_budget(greedy, QUESTIONS[0], ladder)
            finally:
                await greedy.close()
        after = await snapshot(engine.client)
        assert before is not None
        assert after is not None
        assert after.idle
        assert before.speculates == speculative
        what = between(before, after)
        assert 0 < what.prefix_hit_rate < 1
        if speculative:
            assert 1 <= what.acceptance_length <= what.acceptance_length_max <= 5
            assert 0 <= what.acceptance_share <= 1
        for one, other in zip(answers.setdefault("tiny", ladders), ladders, strict=True):
            assert other.p1 == pytest.approx(one.p1, abs=SAME)
            # with processed log-probabilities only labels among the 20 most likely tokens count
            assert not raw or one.label_mass1 <= other.label_mass1 + SAME
            assert not raw or 0 < other.label_mass1 < 1
        assert speculative or await engine.obeys_seed(QUESTIONS[0])
    finally:
        await engine.close()


# --- the reference model, which was trained to think ------------------------------------------------------------------

CLOSED = "\n</think>\n\n"
"""How each of its thoughts ends, by itself or cut."""


@pytest.mark.parametrize("server", ["main", "main --draft"], indirect=True)
async def test_the_ladder_on_a_model_that_thinks(server: Server, answers: dict[str, list[Answer]]) -> None:
    """The most likely thought is the same with its draft model, is closed where it is cut, and answers alike.

    One question at a time: while it speculates, vLLM 0.32 for the CPU spoils a thought that shares a step with a read.
    """
    engine = VllmEngine(server.url, prompt=read_prompt(PROMPT), sampling={"temperature": 0})
    asked, budgets = questions(2, only=("chain", "parity", "checks")), (8, 32, 256)
    try:
        before = await snapshot(engine.client)
        ladders = [await engine.ask(question, budgets, keep_text=True) for question in asked]
        for question, ladder in zip(asked, ladders, strict=True):
            assert ladder.p1.sum() == pytest.approx(1)
            assert ladder.p2.sum(axis=1) == pytest.approx(np.ones(len(budgets)))
            assert not ladder.finished[0]
            assert (ladder.tokens == budgets)[~ladder.finished].all()
            for prompt, _, _ in await _reads_alone_equal_reads_together(engine, question, budgets):
                shown = await engine._server.detokenize(prompt)
                assert shown.endswith(CLOSED)
                assert shown.count("</think>") == 1
            await _cuts_equal_runs_with_that_budget(engine, question, ladder)
        after = await snapshot(engine.client)
    finally:
        await engine.close()
    assert before is not None
    assert after is not None
    assert before.speculates == bool(server.flags)
    if server.flags:
        assert 1 < between(before, after).acceptance_length <= 5
    for one, other in zip(answers.setdefault("main", ladders), ladders, strict=True):
        assert other.text == one.text
        assert other.p1 == pytest.approx(one.p1, abs=SAME)
        assert other.p2 == pytest.approx(one.p2, abs=SAME)


@pytest.mark.parametrize("server", ["main"], indirect=True)
async def test_thinking_helps_a_model_that_thinks(server: Server) -> None:
    engine = VllmEngine(server.url, prompt=read_prompt(PROMPT), sampling={"temperature": 0.6})
    # tasks where System 1 knows something, thinking was trained, and thoughts end within 600 tokens; and chain
    asked = questions(16, only=("chain", "checks", "count", "disorder", "kth", "product", "sums"))
    slots = asyncio.Semaphore(8)

    async def ask(question: Question) -> Answer:
        async with slots:
            return await engine.ask(question, (16, 64, 600))

    try:
        info = await engine.info()
        assert info.raw["notes"] == []
        started = time.perf_counter()
        got = await asyncio.gather(*map(ask, asked))
        seconds = time.perf_counter() - started
    finally:
        await engine.close()
    key = np.array([question.answer for question in asked])
    task = np.array([question.dataset for question in asked])
    right1 = np.array([answer.p1.argmax() for answer in got]) == key
    right2 = np.array([answer.p2.argmax(axis=1) for answer in got]) == key[:, None]
    finished, tokens = (np.array([getattr(answer, name)[2] for answer in got]) for name in ("finished", "tokens"))
    system1, system2 = right1.mean(), right2.mean(axis=0)
    print(f"System 1 {system1:.3f}, System 2 {np.round(system2, 3)}, {len(asked) / seconds:.1f} questions/s")
    chance = np.mean([1 / len(question.options) for question in asked])
    assert system1 > chance + 0.1
    assert system2[0] < system1  # a thought that is cut early does harm
    assert system2[0] < system2[1] < system2[2]
    assert system2[2] > system1 + 0.1
    assert finished.mean() > 0.9
    assert right2[finished & (task == "chain"), 2].mean() > 0.7
    assert np.median(tokens[task == "disorder"]) > 100
    assert tokens[task == "disorder"].max() > 200
    assert min(answer.label_mass1 for answer in got) > 0.2

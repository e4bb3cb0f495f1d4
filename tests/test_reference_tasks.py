"""Tasks of the reference model: right answers, graded, worded as vLLM words them, and held out from its training."""

from __future__ import annotations

import random
import re
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from calib.engine.prompts import read_prompt
from calib.questions import NOUL_OPTIONS, SCORE_LEVELS, Question, read_questions, split_key, write_questions
from tests.reference import FOLDER, load

tasks = load("tasks")
writer = load("write_questions")

MANY = 60


def some(name: str, n: int = MANY, seed: int = 0) -> list[Any]:
    return list(islice(tasks.cases(name, tasks.QUESTION_SEED + seed, training=False), n))


def said(case: Any) -> str:
    return case.options[case.answer]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# --- an answer is right by the text alone -----------------------------------------------------------------------------


def chain(case: Any) -> str:
    first, *steps = case.state.rstrip(".").split(". ")
    value = int(first.split()[-1])
    for step in steps:
        operand = int(step.split()[-1])
        value = {"A": value + operand, "S": value - operand, "M": value * operand}[step[0]]
    return str(value % 10)  # taking the last digit after each step changes nothing


def cups(case: Any) -> str:
    told, *swaps = case.state.rstrip(".").split(". ")
    held = dict(part.split(" has ") for part in told.split(", "))
    for swap in swaps:
        one, other = swap.split(" swaps with ")
        held[one], held[other] = held[other], held[one]
    return held[case.question.split()[2]]


def arrows(case: Any) -> dict[str, str]:
    told = case.state.removeprefix("Arrows: ").rstrip(".")
    return dict(part.split(" to ") for part in told.split(", "))


def hop(case: Any) -> str:
    at, to = re.search(r"Start at (\w)", case.question)[1], arrows(case)
    for _ in range(numbers(case.question)[0]):
        at = to[at]
    return at


def reach(case: Any) -> str:
    start, goal = re.search(r"at (\w) and .* to (\w)\?", case.question).groups()
    to, seen = arrows(case), {start}
    while (start := to[start]) not in seen:
        seen.add(start)
    return str(goal in seen).lower()


def count(case: Any) -> str:
    wanted = re.search(r"does (\w) occur", case.question)[1]
    return str(case.state.removeprefix("Letters: ").rstrip(".").split().count(wanted))


def product(case: Any) -> str:
    x, y = numbers(case.state)
    return str(x * y)


def disorder(case: Any) -> str:
    xs = numbers(case.state)
    return str(sum(a > b for i, a in enumerate(xs) for b in xs[i + 1 :]))


def collatz(case: Any) -> str:
    (n,), steps = numbers(case.state.split(".")[0]), 0
    while n != 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return str(steps)


def kth(case: Any) -> str:
    return str(sorted(numbers(case.state))[numbers(case.question)[0] - 1])


def parity(case: Any) -> str:
    return str(sum(numbers(case.state)) % 2 == 1).lower()


def sums(case: Any) -> str:
    left, right = case.state.split("Right")
    return str(sum(numbers(left)) > sum(numbers(right))).lower()


def checks(case: Any) -> str:
    xs = numbers(case.state)
    return str(sum(a * b <= limit for a, b, limit in zip(xs[::3], xs[1::3], xs[2::3], strict=True)))


SOLVERS = (chain, cups, hop, reach, count, product, disorder, collatz, kth, parity, sums, checks)


@pytest.mark.parametrize("solve", SOLVERS, ids=lambda solve: solve.__name__)
def test_the_answer_follows_from_the_text(solve: Any) -> None:
    for case in some(solve.__name__):
        assert said(case) == solve(case), case


def test_all_tasks_but_the_noisy_ones_are_solved_here() -> None:
    assert set(tasks.TASKS) - {solve.__name__ for solve in SOLVERS} == {"intent", "rating"}


def test_the_intent_is_the_one_that_a_phrase_names() -> None:
    for case in some("intent"):
        assert any(phrase in case.state for phrase in tasks._INTENTS[said(case)])


# --- what the tasks are for -------------------------------------------------------------------------------------------


def test_a_dozen_tasks_of_all_kinds_and_two_to_ten_options() -> None:
    cases = [case for name in tasks.TASKS for case in some(name)]
    assert len(tasks.TASKS) >= 12
    assert {case.kind for case in cases} == {"choice", "noul", "score"}
    counts = {len(case.options) for case in cases}
    assert (min(counts), max(counts)) == (2, 10)
    for case in cases:
        assert len(set(case.options)) == len(case.options)
        assert 0 <= case.answer < len(case.options)
        assert case.kind != "noul" or case.options == NOUL_OPTIONS
        assert case.kind != "score" or case.options == SCORE_LEVELS


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_difficulty_is_graded_and_answers_are_not_all_alike(name: str) -> None:
    cases = some(name)
    assert len({case.level for case in cases}) >= 3
    assert len({case.answer for case in cases}) >= 2


def test_a_thought_ends_by_naming_the_label() -> None:
    for name in set(tasks.TASKS) - {"intent", "rating"}:
        for case in some(name):
            if case.ends:
                assert case.thought.endswith(tasks.label(case)), case
    assert all(case.thought is None for case in some("intent"))


def test_the_drill_names_the_label_of_every_option_and_ends_with_the_one_that_is_asked_for() -> None:
    rng = random.Random(2)
    for case in (tasks.drill(rng) for _ in range(MANY)):
        assert said(case) == case.question.removeprefix("Which option is ").rstrip("?")
        named = re.findall(r"so (\S+) is ([A-J])", case.thought)
        assert sorted(named) == sorted(zip(case.options, "ABCDEFGHIJ", strict=False))
        assert named[-1] == (said(case), tasks.label(case))
    assert "drill" not in tasks.TASKS  # it is practised, not asked


def test_thoughts_are_ten_to_fifteen_hundred_tokens_long() -> None:
    # every character of these thoughts is a token
    lengths = sorted(len(case.thought) for case in some("collatz", 200))
    assert lengths[0] < 100
    assert 1024 < lengths[-1] < 1550
    assert min(len(case.thought.split()[0]) for case in some("rating")) <= 10


def test_a_place_that_cannot_be_reached_is_walked_to_for_ever() -> None:
    cases = some("reach")
    endless = [case for case in cases if not case.ends]
    assert 0.3 < len(endless) / len(cases) < 0.7
    for case in endless:
        walk, to = case.thought.split(), arrows(case)
        assert len(walk) == tasks.ENDLESS > 1024
        assert all(to[one] == other for one, other in pairwise(walk))
        assert "</think>" not in tasks.text(case, think=True)


def test_the_ceiling_of_a_rating_is_what_guessing_the_likeliest_level_gets() -> None:
    state = "Review: great poor nice sad lovely."  # 3 of 5 words are good: levels spread around 3
    rng = random.Random(0)
    drawn = [min(5, max(0, round(3 + rng.gauss(0, tasks.NOISE)))) for _ in range(20_000)]
    assert tasks.rating_ceiling(state) == pytest.approx(drawn.count(3) / len(drawn), abs=0.012)
    assert tasks.rating_ceiling("Review: sad sad sad.") > tasks.rating_ceiling(state)  # the scale ends there


# --- held out ---------------------------------------------------------------------------------------------------------


def test_seeds_of_the_two_sides_do_not_meet() -> None:
    assert abs(tasks.TRAIN_SEED - tasks.QUESTION_SEED) >= 1_000_000
    for seed, training in ((tasks.QUESTION_SEED, True), (tasks.TRAIN_SEED, False), (tasks.TRAIN_SEED - 1, True)):
        with pytest.raises(ValueError, match="seed"):
            next(tasks.cases("chain", seed, training=training))


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_no_question_was_trained_on(name: str) -> None:
    trained = {case.state for case in islice(tasks.cases(name, tasks.TRAIN_SEED, training=True), 400)}
    asked = some(name)
    assert not trained & {case.state for case in asked}
    assert all(tasks.held_out(case) for case in asked)


def test_about_a_sixteenth_of_the_texts_is_held_out() -> None:
    rng = random.Random(1)
    kept = [tasks.held_out(tasks.chain(rng)) for _ in range(4000)]
    assert sum(kept) / len(kept) == pytest.approx(tasks.HELD_OUT_SHARE, abs=0.015)


def test_questions_are_the_same_each_time_and_a_larger_set_contains_a_smaller_one(tmp_path: Path) -> None:
    small, large = writer.questions(4), writer.questions(9)
    assert len(small) == 4 * len(tasks.TASKS)
    assert small == [q for q in large if int(q.id.rpartition("-")[2]) <= 4]
    assert len({split_key(q) for q in large}) == len(large)
    write_questions(large, tmp_path / "q.jsonl.gz")
    assert read_questions([tmp_path / "q.jsonl.gz"]) == large


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_calib_asks_in_the_words_that_were_trained(name: str) -> None:
    prompt = read_prompt(FOLDER / "prompt.toml")
    for case in some(name, 5):
        question = Question("1", name, case.kind, case.state, case.question, case.options, case.answer)
        labels = {
            "choice": tuple("ABCDEFGHIJ")[: len(case.options)],
            "noul": ("no", "yes"),
            "score": SCORE_LEVELS,
        }[case.kind]
        assert prompt.messages(question, labels) == [{"role": "user", "content": tasks.user_turn(case)}]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("choice", ("x", "y"), "s\n\nQuestion: q\nA: x\nB: y\nAnswer with the letter of one option only."),
        ("noul", NOUL_OPTIONS, "s\n\nQuestion: q\nyes\nno\nAnswer with yes or no only."),
        (
            "score",
            SCORE_LEVELS,
            "s\n\nQuestion: q\n0: 0\n1: 1\n2: 2\n3: 3\n4: 4\n5: 5\nAnswer with the number of one level only.",
        ),
    ],
)
def test_the_text_is_that_of_systemone(kind: str, options: tuple[str, ...], expected: str) -> None:
    assert tasks.user_turn(tasks.Case("d", kind, "s", "q", options, 1, "t", 1)) == expected


def test_thinking_is_switched_by_the_prompt_alone() -> None:
    case = tasks.Case("d", "noul", "s", "q", NOUL_OPTIONS, 1, "a thought", 1)
    turn = f"<|im_start|>user\n{tasks.user_turn(case)}<|im_end|>\n<|im_start|>assistant\n"
    assert tasks.text(case, think=False) == f"{turn}yes<|im_end|>\n"
    assert tasks.text(case, think=True) == f"{turn}<think>\na thought\n</think>\n\nyes<|im_end|>\n"
    with pytest.raises(ValueError, match="no thoughts"):
        tasks.text(some("intent", 1)[0], think=True)

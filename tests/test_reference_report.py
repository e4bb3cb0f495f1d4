"""The arithmetic of ``reports/reference.md``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from calib.engine.base import Answer
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import evaluate
from calib.questions import Question
from calib.recorded import Row
from tests.reports.reference import answered, break_even, pace, routed, speedup
from tests.strategies import outcomes


def row(i: int, tokens: int, t1: float, t2: float) -> Row:
    question = Question(str(i), "d", "noul", "", "q?", ("false", "true"), 0)
    half = np.array([0.5, 0.5])
    budgets = (64,)
    whole = Answer(half, t1, budgets, half[None], np.array([tokens]), np.array([True]), np.array([t2]))
    return Row("m", "base", 4, question, whole)


def test_pace_by_hand() -> None:
    # 3 s for 30 tokens; a question takes (1.1 + 2.1) / 2 = 1.6 s, and four are in flight: 2.5 a second
    found = pace([row(0, 10, 0.1, 1.0), row(1, 20, 0.1, 2.0)], 4)
    assert found.token == pytest.approx(0.1)
    assert found.rate == pytest.approx(2.5)


def test_speedup_is_a_ratio_of_sums() -> None:
    base = [row(i, 10, 0.1, 2.0) for i in range(5)]
    draft = [row(i, 20, 0.1, 2.0) for i in range(5)]
    assert speedup(base, draft) == pytest.approx((2.0, 2.0, 2.0))


def test_questions_a_second_when_some_think() -> None:
    # half at 100/s, half at 10/s: 0.5 / 100 + 0.5 / 10 = 0.055 s each
    assert answered((100.0, 10.0), np.array([0.0, 0.5, 1.0])) == pytest.approx([100, 1 / 0.055, 10])


def test_where_drafting_breaks_even() -> None:
    # (1 - s) / 100 + s / 10 = (1 - s) / 50 + s / 20: 0.01 (1 - s) = 0.05 s, s = 1/6
    assert break_even((100.0, 10.0), (50.0, 20.0)) == "17%"
    assert break_even((50.0, 20.0), (100.0, 10.0)) == "up to 17%"
    assert break_even((100.0, 10.0), (100.1, 11.0)) == "always"
    assert break_even((100.0, 10.0), (99.0, 9.0)) == "never"


@settings(max_examples=30, deadline=None)
@given(outcomes(weighted=False, failures=False))
def test_a_route_for_each_task_is_no_worse_than_one_policy_where_it_was_tuned(o: Outcomes) -> None:
    policy = optimum(o).policy
    assert policy is not None
    free = routed(o, policy)
    for name in set(o.dataset.tolist()):
        one = o.select([name])
        assert evaluate(one, free).accuracy >= evaluate(one, policy).accuracy - 1e-12

"""A slider move on the largest store that must feel instant: 33,846 questions, 10 budgets, 2 arms, 12 datasets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from calib.curves import Curves
from calib.figures import dataset_colours, threshold_curves
from calib.outcomes import Outcomes
from calib.policy import Policy

N, BUDGETS, OPTIONS, DATASETS = 33_846, 10, 8, 12


@pytest.fixture(scope="module")
def curves() -> Curves:
    rng = np.random.default_rng(0)
    n_options = rng.integers(2, OPTIONS + 1, N)
    real = np.arange(OPTIONS) < n_options[:, None]

    def distributions(spread: float, *shape: int) -> np.ndarray:
        raw = (rng.gamma(spread, size=(N, *shape, OPTIONS)) + 1e-9) * real.reshape(N, *(1 for _ in shape), OPTIONS)
        return raw / raw.sum(-1, keepdims=True)

    budgets = 16 * 2 ** np.arange(BUDGETS)
    length = rng.lognormal(7, 1, N)
    tokens = np.minimum(length[:, None], budgets)
    outcomes = Outcomes(
        p1=distributions(0.3),
        p2=distributions(0.2, BUDGETS),
        tokens=tokens,
        finished=length[:, None] <= budgets,
        t1=0.045 + 0.01 * rng.random((2, N)),
        t2=tokens / np.array([250.0, 438.0])[:, None, None],
        answer=rng.integers(0, n_options),
        n_options=n_options,
        budgets=budgets,
        arms=("base", "mtp"),
        dataset=np.array([f"dataset {i:02}" for i in range(DATASETS)], object)[rng.integers(0, DATASETS, N)],
    )
    made = Curves(outcomes)
    everything(made, Policy(0.8, 0.5, int(budgets[0]), "base"))  # the loops are compiled
    return made


def everything(curves: Curves, p: Policy) -> int:
    """Numbers of all figures of a policy, for all questions and each dataset; how many points."""
    at = {"mix": p.mix, "think_budget": p.think_budget, "arm": p.arm}
    drawn = [
        c for metric in ("accuracy", "think_rate", "p50", "p90", "p99") for c in curves.against_threshold(metric, **at)
    ]
    drawn += curves.against_budget("accuracy", threshold=p.threshold, mix=p.mix, arm=p.arm)
    drawn += curves.against_mix(threshold=p.threshold, think_budget=p.think_budget)
    drawn += curves.risk_coverage()
    curves.latency(p)
    curves.reliability(p)
    curves.marked("current", p)
    return sum(len(curve.x) for curve in drawn)


def moves(curves: Curves):
    """Policies of which no two share a mix or a budget with the one before, so that nothing is known yet."""
    budgets = itertools.cycle(curves.outcomes.budgets.tolist())
    for i in itertools.count():
        yield Policy(0.3 + 0.017 * (i % 40), 0.1 + 0.0113 * (i % 70), next(budgets), curves.outcomes.arms[i % 2])


def test_every_number_of_a_slider_move(benchmark, curves):
    policies = moves(curves)
    points = benchmark.pedantic(everything, setup=lambda: ((curves, next(policies)), {}), rounds=8)
    assert points < 20_000  # in seven figures
    assert benchmark.stats.stats.min < 0.3


def test_one_figure_of_a_slider_move(benchmark, curves):
    policies, styles = moves(curves), dataset_colours(curves.datasets)

    def move(p: Policy) -> int:
        found = curves.against_threshold("p90", mix=p.mix, think_budget=p.think_budget, arm=p.arm)
        return len(threshold_curves(found, marked=[curves.marked("current", p)], styles=styles).to_json())

    size = benchmark.pedantic(move, setup=lambda: ((next(policies),), {}), rounds=8)
    assert size < 250_000  # bytes to the browser
    assert benchmark.stats.stats.min < 0.2

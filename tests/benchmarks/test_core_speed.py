"""Start-up of the command line, and one evaluation: compared within one run, since the machine is noisy."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from calib.outcomes import Outcomes
from calib.policy import Policy, evaluate

N, OPTIONS, BUDGETS = 33_846, 18, 10


@pytest.fixture(scope="module")
def large() -> Outcomes:
    """33,846 questions, 4 to 18 options, 10 budgets, 2 arms."""
    rng = np.random.default_rng(0)
    k = rng.integers(4, OPTIONS + 1, N)
    mask = np.arange(OPTIONS) < k[:, None]

    def distributions(shape, sharp):
        raw = rng.exponential(1.0, shape) ** sharp
        raw *= mask if raw.ndim == 2 else mask[:, None]
        return raw / raw.sum(-1, keepdims=True)

    length = rng.gamma(2.0, 1500.0, N).astype(int) + 1
    budgets = np.array([2**i for i in range(5, 5 + BUDGETS)])
    tokens = np.minimum(length[:, None], budgets)
    return Outcomes(
        p1=distributions((N, OPTIONS), 2),
        p2=distributions((N, BUDGETS, OPTIONS), 4),
        tokens=tokens,
        finished=length[:, None] <= budgets,
        t1=np.full((2, N), 0.045),
        t2=tokens[None] / np.array([250.0, 438.0])[:, None, None],
        answer=rng.integers(0, k),
        n_options=k,
        budgets=budgets,
        arms=("base", "mtp"),
        dataset=np.array([f"set {i}" for i in range(10)], dtype=object)[rng.integers(0, 10, N)],
    )


def test_help_over_bare_python(benchmark):
    """`calib --help` against a Python that does nothing, in turns."""

    def seconds(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        return time.perf_counter() - start

    pairs = [(seconds("-c", "pass"), seconds("-m", "calib", "--help")) for _ in range(9)]
    bare, full = (float(np.median(column)) for column in zip(*pairs, strict=True))
    benchmark.extra_info.update(bare_ms=1000 * bare, help_ms=1000 * full, over_bare_ms=1000 * (full - bare))
    benchmark.pedantic(lambda: seconds("-m", "calib", "--help"), rounds=5)


@pytest.mark.parametrize("by_dataset", [False, True])
def test_evaluate(benchmark, large, by_dataset):
    """Every metric of one policy on 33,846 questions."""
    policy = Policy(0.5, 0.4, 2048, "mtp")
    result = benchmark(lambda: evaluate(large, policy, by_dataset=by_dataset))
    assert result.n == N

"""How long the exact optimum takes: the table, the best policy under a limit and the whole front, over all four knobs.

Aims at the size of a published index (33,846 questions with 4 to 18 options, 10 budgets, 2 arms): 0.3 s on one core
once compiled, under 1 GB; the first use, which compiles, under 10 s, and the next process finds the machine code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from calib.demand import Demand
from calib.optimise import optimum, pareto, tabulate
from calib.outcomes import Outcomes
from calib.spaces import Serving, Spaces
from calib.target import parse_targets

INDEX = 33_846
LIMIT = parse_targets("p90<10s")


def synthetic(n: int, *, widest: int, budgets: int, arms: int = 2, seed: int = 0) -> Outcomes:
    """Questions with 4 to `widest` options and no two equal confidences; System 2 gains with the budget."""
    rng = np.random.default_rng(seed)
    tokens = 2 ** np.arange(16 - budgets, 16)
    k = rng.integers(4, widest + 1, n)
    answer = rng.integers(0, k)
    padded = np.arange(widest) >= k[:, None]

    def distribution(strength: float, noise: float) -> np.ndarray:
        logits = noise * rng.standard_normal((n, widest))
        logits[np.arange(n), answer] += strength
        logits[padded] = -np.inf
        p = np.exp(logits - logits.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True)

    p2 = np.empty((n, budgets, widest))
    for b, strength in enumerate(np.linspace(0.5, 5, budgets)):
        p2[:, b] = distribution(strength, 2.0)
    length = rng.lognormal(7.5, 1, n).round()
    used = np.minimum(length[:, None], tokens)
    return Outcomes(
        p1=distribution(1.5, 1.5),
        p2=p2,
        tokens=used,
        finished=length[:, None] <= tokens,
        t1=rng.lognormal(-3, 0.1, (arms, n)),
        t2=np.stack([used / (250 * (1 + a)) + rng.lognormal(-3, 0.2, (n, 1)) for a in range(arms)]),
        answer=answer,
        n_options=k,
        dataset=np.array([f"set {i}" for i in range(10)], dtype=object)[rng.integers(0, 10, n)],
        budgets=tokens,
        arms=tuple(f"arm{a}" for a in range(arms)),
    )


def everything(outcomes: Outcomes) -> tuple[float, int]:
    table = tabulate(outcomes)
    return optimum(table, LIMIT).objective, len(pareto(table))


@pytest.mark.parametrize(
    ("n", "widest", "budgets"),
    [
        (1_000, 18, 10),
        (10_000, 18, 10),
        (INDEX, 4, 10),
        (INDEX, 18, 10),
        (100_000, 4, 10),
        pytest.param(1_000_000, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_optimum_and_front(benchmark: Any, n: int, widest: int, budgets: int) -> None:
    outcomes = synthetic(n, widest=widest, budgets=budgets)
    objective, points = benchmark.pedantic(everything, args=(outcomes,), rounds=5, warmup_rounds=1)
    benchmark.extra_info |= {"objective": objective, "points": points}
    benchmark.extra_info["ns_a_question_and_budget"] = 1e9 * benchmark.stats["min"] / (n * budgets)
    assert 0.5 < objective < 1
    assert points > 100


def test_optimum_on_the_grid(benchmark: Any) -> None:
    outcomes = synthetic(INDEX, widest=18, budgets=10)
    targets = parse_targets("p90<10s, ece<10%, accuracy[worst]>=50%")
    found = benchmark.pedantic(optimum, args=(outcomes, targets), rounds=1, warmup_rounds=1)
    assert found.method == "grid"
    assert found.feasible


@pytest.mark.parametrize("n", [1_000, 10_000, pytest.param(INDEX, marks=pytest.mark.slow)])
def test_deadlines_beside_none(benchmark: Any, n: int) -> None:
    """Each deadline is a table of its own for each arm and rule: `ratio` is all of them to the one without."""
    outcomes = synthetic(n, widest=18, budgets=10)

    def search(deadlines: tuple[float, ...] | Literal["auto"]) -> Spaces:
        demand = Demand(LIMIT, deadlines=deadlines, test_share=0)
        return Spaces(Serving(outcomes, demand), demand, outcomes)

    plain = min(timeit.repeat(lambda: search(()), number=1, repeat=3))
    found = benchmark.pedantic(search, args=("auto",), rounds=1, warmup_rounds=1)
    ratio = benchmark.stats["min"] / plain
    tables = len(found.tried)
    benchmark.extra_info |= {"without_s": plain, "ratio": ratio, "tables": tables, "ratio_a_table": ratio / tables}
    assert tables > 10
    assert found.best.objective >= found.without_deadline.objective
    assert ratio / tables < 3  # a table with a deadline has one arm, the one without has two


CHILD = """
import pathlib, re, time
from tests.benchmarks.test_optimise_speed import INDEX, everything, synthetic
few, outcomes = synthetic(200, widest=18, budgets=10), synthetic(INDEX, widest=18, budgets=10)
start = time.perf_counter()
everything(few)
first = time.perf_counter() - start
everything(outcomes)
status = pathlib.Path("/proc/self/status").read_text()  # a child's ru_maxrss begins at its parent's
print(first, int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_first_use_and_memory(benchmark: Any, tmp_path: Path) -> None:
    def child() -> tuple[float, float]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
        )
        first, megabytes = map(float, done.stdout.split())
        return first, megabytes

    compiling, megabytes = benchmark.pedantic(child, rounds=1)
    compiled, _ = child()
    benchmark.extra_info |= {"first_use_s": compiling, "next_process_s": compiled, "peak_mb": megabytes}
    assert megabytes < 1024
    assert compiled < compiling / 2

"""How far a study stays from the exact optimum after 200 trials, without the warm start, and how long both take.

Printed as a table (``-s``) and kept as extra info: the gap in points of accuracy over several seeds, for random search
and for TPE. Recorded data are read where they are (see the fixture ``shared``).
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from calib.importer import import_files
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, Policy, evaluate
from calib.store import Store, load_outcomes
from calib.study import run_study
from calib.target import Target, parse_targets

pytestmark = pytest.mark.slow

TRIALS, SEEDS = 200, range(5)
RATES = {"system1_ms": "45", "tokens_per_second": "250"}
RECORDED = {
    "h200 c128": ("reference/h200_base_c128.jsonl.gz", {}),
    "gemma4 GPQA": ("realdata/unlicensed/gemma4_gpqa_trajectory.jsonl.gz", RATES),
}


def synthetic(n: int = 3000) -> Outcomes:
    """Four options, eight budgets, two arms: System 2 is better the more it may think, and often overrules System 1."""
    rng = np.random.default_rng(0)
    answer = rng.integers(0, 4, n)
    right = np.eye(4)[answer]
    budgets = 2 ** np.arange(7, 15)
    length = rng.lognormal(6.5, 1, n).round() + 1
    finished = length[:, None] <= budgets
    tokens = np.minimum(length[:, None], budgets)
    skill = rng.beta(2, 2, n)

    def read(knows: np.ndarray, sharpness: float) -> np.ndarray:
        p = rng.gamma(0.6, size=(n, 4)) + sharpness * np.where(rng.random((n, 1)) < knows[:, None], right, 0)
        return p / p.sum(axis=1, keepdims=True)

    return Outcomes(
        p1=read(skill, 2.0),
        p2=np.stack([read(np.where(f, 0.3 + 0.7 * skill, skill / 2), 4.0) for f in finished.T], axis=1),
        tokens=tokens,
        finished=finished,
        t1=np.full((2, n), [[0.045], [0.05]]),
        t2=tokens / np.array([250, 438])[:, None, None] + 0.05,
        answer=answer,
        budgets=budgets,
        arms=("base", "mtp"),
    )


def recorded(name: str, shared: Path, folder: Path) -> Outcomes:
    path, rates = RECORDED[name]
    if not (shared / path).is_file():
        pytest.skip(f"no recorded data at {shared / path}")
    with Store.open(folder / "s.db") as store:
        import_files(store, [shared / path], **rates)
    return load_outcomes(folder / "s.db")


def halfway(o: Outcomes) -> tuple[Target, ...]:
    """A limit on p90 at half of what always thinking at the largest budget takes: it binds."""
    slowest = evaluate(o, Policy(ALWAYS, 0.5, int(o.budgets[-1]), o.arms[0])).p90
    return parse_targets(f"p90<{slowest / 2:.3g}s")


@pytest.mark.parametrize("name", ["synthetic", *RECORDED])
def test_gap_after_200_trials(benchmark, name, tmp_path, request):
    o = synthetic() if name == "synthetic" else recorded(name, request.getfixturevalue("shared"), tmp_path)
    targets = halfway(o)
    optimum(o, targets)  # compiles
    exact = benchmark.pedantic(optimum, args=(o, targets), rounds=3)
    rows = {}
    for sampler in ("random", "tpe"):
        began = time.perf_counter()
        gaps = [
            100 * run_study(o, targets, sampler=sampler, trials=TRIALS, seed=seed, exact=exact).gap for seed in SEEDS
        ]
        seconds = (time.perf_counter() - began) / len(SEEDS)
        assert min(gaps) >= 0  # NaN, a study that found nothing feasible, fails too
        rows[sampler] = {
            "gap_points_mean": round(float(np.mean(gaps)), 3),
            "gap_points_worst": round(max(gaps), 3),
            "found_it": sum(gap == 0 for gap in gaps),
            "seconds": round(seconds, 2),
        }
    benchmark.extra_info.update(n=o.n, target=str(targets[0]), optimum=exact.objective, trials=TRIALS, **rows)
    print(f"\n{name}: N = {o.n}, {targets[0]}, exact {100 * exact.objective:.2f} %")
    print(f"  {'200 trials, 5 seeds':20} {'mean gap':>10} {'worst gap':>10} {'found it':>9} {'seconds':>8}")
    for sampler, row in rows.items():
        print(
            f"  {sampler:20} {row['gap_points_mean']:>7.2f} pt {row['gap_points_worst']:>7.2f} pt "
            f"{row['found_it']:>7}/{len(SEEDS)} {row['seconds']:>8.2f}"
        )

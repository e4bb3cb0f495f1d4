"""Recorded answers of real models: the optimum of each file, and what it is worth on questions it was not tuned on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from calib.importer import import_files
from calib.optimise import Optimum, optimum, tabulate
from calib.outcomes import Outcomes
from calib.policy import Policy, baselines, decide, evaluate
from calib.store import Store, load_outcomes
from calib.study import StudyResult, run_study
from calib.target import Target, parse_targets
from calib.tuning import Demand, tune

TEST_SHARE = 0.3
RESAMPLES = 50
"""Of the bootstrap in runs of which only policy and verdict are looked at: neither rests on it."""
GRID_THRESHOLDS = np.linspace(0.2, 1.1, 10)
GRID_MIXES = np.linspace(0.125, 1, 8)
RIVALS = ("grid", "default", "always_think")


@dataclass(frozen=True)
class Case:
    """One file, or the rows of one pair of systems in it.

    Attributes
    ----------
    name, path : str
    targets : str
        For the verdict.
    limit : str
        One limit that binds, for the random splits.
    options : mapping
        Of the import.
    """

    name: str
    path: str
    targets: str
    limit: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, shared: Path) -> Outcomes:
        with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "case.db") as store:
            import_files(store, [shared / self.path], **self.options)
            return load_outcomes(store)


_RATES = {"system1_ms": 45, "tokens_per_second": 250}
_PAIRS = "realdata/stated_probs_pairs.jsonl.gz"
CASES = (
    Case(
        "gemma-4-12B, GPQA Diamond",
        "realdata/unlicensed/gemma4_gpqa_trajectory.jsonl.gz",
        "accuracy>=45%, p90<60s",
        "p90<80s",
        _RATES,
    ),
    Case("h200_base_c128", "reference/h200_base_c128.jsonl.gz", "accuracy>=94%, p90<0.8s", "p90<0.7s"),
    Case(
        "llama3.1-8B, MMLU",
        "realdata/unlicensed/mmlu_direct_cot/llama3.1-8B.jsonl.gz",
        "accuracy>=65%, think_rate<60%",
        "p90<0.7s",
        {**_RATES, "tokens_key": "think_words"},
    ),
    Case(
        "gpt-4o, o3",
        _PAIRS,
        "accuracy>=82%, think_rate<40%",
        "think_rate<17%",
        {"where": {"s1": "gpt-4o"}},
    ),
    Case(
        "deepseek v3, r1",
        _PAIRS,
        "accuracy>=82%, think_rate<40%",
        "think_rate<27%",
        {"where": {"s1": "deepseek-v3"}},
    ),
    Case(
        "claude 3 haiku, sonnet 4",
        _PAIRS,
        "accuracy>=70%, think_rate<40%",
        "think_rate<24%",
        {"where": {"s1": "claude-3-haiku-20240307"}},
    ),
)


class Found(NamedTuple):
    """The optimum of all questions of a case, without limits, and what a study of 200 trials finds."""

    exact: Optimum
    seconds: float
    study: StudyResult | None


def find(outcomes: Outcomes, trials: int) -> Found:
    """Search; the second run of the exact one is timed, when everything is compiled."""
    for _ in range(2):
        began = time.perf_counter()
        exact = optimum(tabulate(outcomes))
        seconds = time.perf_counter() - began
    study = run_study(outcomes, trials=trials, exact=exact) if trials else None
    return Found(exact, seconds, study)


class Splits:
    """Random splits of one case by group; all that does not depend on the split is worked out once."""

    def __init__(self, case: Case, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        (self.limit,) = parse_targets(case.limit)
        largest, arm = int(outcomes.budgets[-1]), outcomes.arms[0]
        self._right = {name: self._answers(policy) for name, policy in baselines(outcomes).items()}
        grid = [Policy(float(t), float(m), largest, arm) for t in GRID_THRESHOLDS for m in GRID_MIXES]
        self._grid = np.array([self._answers(policy) for policy in grid])

    def _answers(self, policy: Policy) -> NDArray[np.bool_]:
        return np.asarray(decide(self.outcomes, policy).choice == self.outcomes.answer)

    def run(self, seed: int) -> dict[str, float]:
        """Figures of one split; NaN where the limit cannot be met on the tune questions."""
        rng = np.random.default_rng([seed, self.outcomes.n])
        codes = self.outcomes.group_codes
        split = replace(self.outcomes, split_position=rng.random(int(codes.max()) + 1)[codes])
        unseen = split.test_mask(TEST_SHARE)
        seen, held_out = split.split(TEST_SHARE)
        assert held_out is not None
        best = optimum(tabulate(seen)).policy
        assert best is not None
        exact = self._answers(best)
        by_grid = self._grid[int(np.argmax(self._grid[:, ~unseen].mean(axis=1)))]
        rivals = {"grid": by_grid, "default": self._right["default"], "always_think": self._right["always_think"]}
        found = {"exact": float(exact[unseen].mean()), "optimism": float(exact[~unseen].mean() - exact[unseen].mean())}
        found |= {name: found["exact"] - float(right[unseen].mean()) for name, right in rivals.items()}
        for name, margin in (("0", False), ("auto", True)):
            tuned = tune(split, Demand((self.limit,), test_share=TEST_SHARE, margin=margin, resamples=RESAMPLES))
            if tuned.policy is None:
                found |= {f"{what} {name}": np.nan for what in ("unseen", "all", "accuracy", "certified")}
                continue
            found[f"unseen {name}"] = _broken(self.limit, held_out, tuned.policy)
            found[f"all {name}"] = _broken(self.limit, self.outcomes, tuned.policy)
            found[f"accuracy {name}"] = float(self._answers(tuned.policy)[unseen].mean())
            found[f"certified {name}"] = float(tuned.verdict == "certified")
        return found


def _broken(limit: Target, outcomes: Outcomes, policy: Policy) -> float:
    return float(not limit.met(evaluate(outcomes, policy)))


def over_splits(values: NDArray[np.float64], level: float = 0.95) -> tuple[float, float, float]:
    """Mean over random splits of one file, with an interval that allows for their overlap.

    References
    ----------
    Nadeau, Bengio (2003), Inference for the generalization error.
    """
    j = len(values)
    error = np.sqrt(values.var(ddof=1) * (1 / j + TEST_SHARE / (1 - TEST_SHARE)))
    half = float(stats.t.ppf((1 + level) / 2, j - 1) * error)
    return float(values.mean()), float(values.mean()) - half, float(values.mean()) + half

"""Makes ``reports/optimum.md``: the exact optimum and the verdict, on recorded data and on stores of known truth.

Run as ``python -m tests.reports.optimum --shared ../shared --out reports/optimum.md``; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import calib
from calib import exact
from calib.certify import alpha_at_look
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, Policy
from calib.show import in_unit
from calib.target import parse_targets
from calib.tuning import Demand, tune
from tests.reports import simulated
from tests.reports.recorded import (
    CASES,
    GRID_MIXES,
    GRID_THRESHOLDS,
    RIVALS,
    TEST_SHARE,
    Case,
    Found,
    Splits,
    find,
    over_splits,
)
from tests.reports.simulated import FAMILIES

COMMAND = "python -m tests.reports.optimum --shared ../shared --out reports/optimum.md"
CHUNK = 10

Columns = dict[str, NDArray[np.float64]]
Loaded = Sequence[tuple[Case, Outcomes]]


def progress(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Markdown; the first columns are texts, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in [head, rule, *rows])


def knobs(policy: Policy) -> str:
    """Budget, threshold and mix in one cell."""
    threshold = "always" if policy.threshold == ALWAYS else f"{policy.threshold:.4g}"
    return f"{policy.think_budget}, {threshold}, {policy.mix:.3f}"


def share(count: float, n: int) -> str:
    """A share with its Clopper-Pearson interval, per cent."""
    low, high = exact.clopper_pearson(int(count), n)
    return f"{100 * count / n:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


# --- many runs --------------------------------------------------------------------------------------------------------

_splits: Splits | None = None


def _prepare(case: Case, outcomes: Outcomes) -> None:
    global _splits
    _splits = Splits(case, outcomes)


def _split(seed: int) -> dict[str, float]:
    assert _splits is not None
    return _splits.run(seed)


def many(pool: ProcessPoolExecutor, run: Callable[[int], dict[str, float]], count: int) -> Columns:
    """Each figure of the runs with the seeds 0, 1, ..."""
    found = list(pool.map(run, range(count), chunksize=CHUNK))
    return {name: np.array([float(one[name]) for one in found]) for name in found[0]}


# --- recorded data ----------------------------------------------------------------------------------------------------


def optima(loaded: Loaded, trials: int) -> Iterator[str]:
    yield "## The optimum of each file\n"
    yield (
        "All questions, no limit, no test split. `right`: of N questions. Seconds: the table and the search together, "
        f"once compiled; for Optuna {trials} trials of TPE (multivariate, seed 0, in memory, no warm start). `gap`: "
        "questions that the study leaves.\n"
    )
    rows = []
    for case, outcomes in loaded:
        progress(f"optimum: {case.name}")
        found = find(outcomes, trials)
        rows.append(_optimum_row(case, outcomes, found))
        if case is CASES[0]:
            at512 = optimum(outcomes, budgets=[512])
            rows.append(_optimum_row(case, outcomes, Found(at512, float("nan"), None), " (budget 512 alone)"))
    head = ["data", "N", "right", "accuracy", "budget, threshold, mix", "mixes as good", "s", "Optuna", "gap", "s"]
    yield table(head, rows) + "\n"


def _optimum_row(case: Case, outcomes: Outcomes, found: Found, note: str = "") -> list[object]:
    best, study, n = found.exact, found.study, outcomes.n
    assert best.policy is not None
    known = "-" if np.isnan(found.seconds) else f"{found.seconds:.3f}"
    other = ["-"] * 3 if study is None else [round(study.objective * n), round(study.gap * n), f"{study.seconds:.1f}"]
    mixes = f"{best.mixes[0]:.4f} to {best.mixes[1]:.4f}"
    right = round(best.objective * n)
    return [case.name + note, n, right, f"{100 * best.objective:.1f} %", knobs(best.policy), mixes, known, *other]


def verdicts(loaded: Loaded) -> Iterator[str]:
    yield "## Verdicts\n"
    yield (
        "One run of `tune` each, with the split that the store gives for ever (30 % held out), `--margin auto`, level "
        f"95 % (a first look spends {100 * alpha_at_look(0.95, 1):.2f} %). Beside each target: its value on the tune "
        "questions, which is optimistic, then on those held out with its interval.\n"
    )
    rows = []
    for case, outcomes in loaded:
        progress(f"verdict: {case.name}")
        tuned = tune(outcomes, Demand(parse_targets(case.targets)))
        assert tuned.test is not None
        if tuned.certificate is None or tuned.policy is None:
            rows.append([case.name, case.targets, "not_met", "-", "-", "no policy on the tune questions", "-"])
            continue
        seen = tuned.to_dict()["tune"]
        cells = []
        for test in tuned.certificate.tests:
            values = [seen[test.target.metric], test.value, test.low, test.high]
            before, now, low, high = (in_unit(test.target, value) for value in values)
            cells.append(f"`{test.target}`: {before}, then {now} [{low}, {high}]{_more(test.needs_more, test.reason)}")
        marks = f" ({', '.join(tuned.certificate.marks)})" if tuned.certificate.marks else ""
        cost = "-" if np.isnan(tuned.margin_cost) else f"{100 * tuned.margin_cost:.1f}"
        counts = f"{tuned.tune.n} / {tuned.test.n}"
        rows.append([case.name, f"**{tuned.verdict}**{marks}", knobs(tuned.policy), "<br>".join(cells), counts, cost])
    head = ["data", "verdict", "budget, threshold, mix", "targets", "tune / test", "margin costs, points"]
    yield table(head, rows, left=4) + "\n"


def _more(needs: object, reason: str) -> str:
    if isinstance(needs, int):
        return f", needs {needs} more"
    return f", never: {reason}" if needs == "never" else ""


def unseen(loaded: Loaded, splits: int, jobs: int) -> Iterator[str]:
    found: list[tuple[Case, Outcomes, Columns]] = []
    for case, outcomes in loaded:
        progress(f"{splits} splits: {case.name}")
        with ProcessPoolExecutor(jobs, initializer=_prepare, initargs=(case, outcomes)) as pool:
            found.append((case, outcomes, many(pool, _split, splits)))
    wider = np.sqrt(1 + splits * TEST_SHARE / (1 - TEST_SHARE))
    yield f"## Accuracy on unseen questions, {splits} random splits\n"
    yield (
        "Each split draws 30 % of the groups at random. `exact` is the optimum of the other 70 %, without limits. "
        f"`grid` is the best there of {len(GRID_THRESHOLDS) * len(GRID_MIXES)} points at the largest budget: "
        f"thresholds {', '.join(f'{t:.1f}' for t in GRID_THRESHOLDS)}; mixes "
        f"{', '.join(f'{m:g}' for m in GRID_MIXES)}. "
        "`default` is threshold 0.8, mix 0.5, largest budget; `always_think` the same with threshold 1.1. Differences "
        "in points of accuracy, exact minus the other, on the unseen 30 %: mean and 95 % interval. The splits of one "
        f"file overlap, so the interval is the one of Nadeau and Bengio (2003), {wider:.0f} times as wide as if they "
        "were independent. `optimism`: accuracy of `exact` on its own 70 % minus that on the rest.\n"
    )
    rows = [
        [case.name, f"{100 * c['exact'].mean():.2f}", *(_points(c[name]) for name in (*RIVALS, "optimism"))]
        for case, _, c in found
    ]
    yield table(["data", "exact, %", *(f"minus {name}" for name in RIVALS), "optimism"], rows) + "\n"
    yield f"## How often a chosen limit is broken, {splits} random splits\n"
    yield (
        "`tune` on each split with one limit. `held out`: share of the splits whose returned policy breaks the limit "
        "on the 30 %; `all`: on all questions of the file, the nearest there is to the truth (70 % of them are those "
        "that it was tuned on; the stores of known truth below have no such tie). Accuracy is on the 30 %. With a "
        "margin the returned policy may be the one of several candidates that passed its test on the 30 %. Stated "
        "confidences are coarse: a think rate has few steps there, and the limit was put beside one, where it is "
        "critical.\n"
    )
    head = [
        "data",
        "limit",
        "margin",
        "no policy",
        "held out",
        "all",
        "certified",
        "accuracy, %",
        "margin costs, points",
    ]
    rows = [row for case, _, columns in found for row in _limit_rows(case, columns)]
    yield table(head, rows, left=3) + "\n"


def _limit_rows(case: Case, c: Columns) -> Iterator[list[str]]:
    for margin in ("0", "auto"):
        known = ~np.isnan(c[f"all {margin}"])
        shown = [_percent(c[f"{what} {margin}"][known]) for what in ("unseen", "all", "certified")]
        accuracy = f"{100 * c[f'accuracy {margin}'][known].mean():.2f}"
        both = ~np.isnan(c["accuracy 0"] + c["accuracy auto"])
        cost = "-" if margin == "0" else _points((c["accuracy 0"] - c["accuracy auto"])[both])
        yield [case.name, f"`{case.limit}`", margin, str(int((~known).sum())), *shown, accuracy, cost]


def _percent(values: NDArray[np.float64]) -> str:
    return f"{100 * values.mean():.0f} %" if values.size else "-"


def _points(values: NDArray[np.float64]) -> str:
    mean, low, high = (100 * x for x in over_splits(values))
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


# --- known truth ------------------------------------------------------------------------------------------------------


def truths(stores: int, jobs: int) -> Iterator[str]:
    with ProcessPoolExecutor(jobs) as pool:
        yield from _false_certificates(pool, stores)
        yield from _powers(pool, stores)


def _false_certificates(pool: ProcessPoolExecutor, stores: int) -> Iterator[str]:
    yield "## False certificates, on stores of known truth\n"
    yield (
        "Questions drawn from laws under which the true accuracy, think rate and share of late answers of any policy "
        "are sums (`tests/worlds.py`), 30 % held out, level 95 %, margin auto. A certificate is false when its policy "
        "truly breaks a target; exactly on a limit counts as broken. Shares of all stores, with Clopper-Pearson "
        "intervals of 95 %. At most 5 % may be false.\n"
    )
    rows = []
    for family in FAMILIES:
        progress(f"{stores} stores: {family.name}")
        c = many(pool, partial(simulated.verdicts, family), stores)
        passed = [share(c[name].sum(), stores) for name in ("feasible", "certified")]
        rows.append([family.name, family.about, family.n, stores, *passed, f"**{share(c['false'].sum(), stores)}**"])
    head = ["stores", "which", "questions", "number", "feasible on tune", "certified", "false certificates"]
    yield table(head, rows, left=2) + "\n"
    progress(f"{2 * stores} stores: ten candidates")
    ten = many(pool, simulated.ten_candidates, 2 * stores)
    runs = stores // 2
    progress(f"{runs} stores: twenty runs")
    twenty = many(pool, simulated.twenty_runs, runs)
    rows = [
        [
            "ten candidates, each exactly on the limit, in one call of `certify`",
            2 * stores,
            f"**{share(ten['false'].sum(), 2 * stores)}**",
            share(ten["naive"].sum(), 2 * stores),
        ],
        [
            f"twenty runs of `tune` on one split, each for another arm on the limit ({twenty['looks'].mean():.0f} "
            "looks in the mean: a run without a feasible policy looks at nothing); at least one false",
            runs,
            f"**{share(twenty['false'].sum(), runs)}**",
            share(twenty["naive"].sum(), runs),
        ],
    ]
    yield table(["what", "stores", "false certificates", "without the order, or the ledger"], rows) + "\n"
    yield (
        "The last column is what would come of keeping whichever candidate passes by itself, and of giving every run "
        "what the first may spend. The ledger's promise is about runs whose demands are made without the test "
        "questions' numbers: whoever chooses the next target by what the last run showed of them is not covered.\n"
    )


def _powers(pool: ProcessPoolExecutor, stores: int) -> Iterator[str]:
    yield "## Power, and what the margin buys\n"
    more = 4 * stores
    progress(f"{more} stores: power")
    c = many(pool, simulated.power, more)
    yield (
        "2,340 questions, 702 of them held out, `p90<1s`, margin auto. The best policy inside the limit is truly late "
        f"on 7 %; it is returned and certified on **{share(c['certified'].sum(), more)}** of {more} stores (asked for: "
        f"at least 80 %). The exact test alone passes there with a chance of {100 * simulated.power_by_law():.1f} %: "
        "the difference is what the search and the margin lose, and chance.\n"
    )
    progress(f"{stores} stores: onto the limit")
    c = many(pool, simulated.onto_the_limit, stores)
    best = 100 * simulated.onto_the_limit_best()
    yield (
        "The same numbers of questions where every threshold is a policy of its own, so that the search goes as far as "
        f"it may. The best policy that truly keeps the limit is right on {best:.1f} %.\n"
    )
    rows = []
    for margin in ("0", "auto"):
        shares = [share(c[f"{what} {margin}"].sum(), stores) for what in ("broken", "certified")]
        means = [f"{100 * c[f'{what} {margin}'].mean():.2f} %" for what in ("late", "accuracy")]
        rows.append([margin, *shares, *means])
    yield table(["margin", "limit truly broken", "certified", "truly late, mean", "true accuracy, mean"], rows) + "\n"


def _options(case: Case) -> str:
    given = {key: f"{name}={v}" for key, value in case.options.items() if key == "where" for name, v in value.items()}
    given |= {key: str(value) for key, value in case.options.items() if key != "where"}
    return ", ".join(f"`--{key.replace('_', '-')} {value}`" for key, value in given.items()) or "as it is"


def report(shared: Path, splits: int, stores: int, trials: int, jobs: int) -> str:
    began = time.monotonic()
    loaded = []
    for case in CASES:
        progress(f"load: {case.name}")
        loaded.append((case, case.load(shared)))
    body = [*optima(loaded, trials), *verdicts(loaded), *unseen(loaded, splits, jobs), *truths(stores, jobs)]
    files = [
        f"- {case.name}: `{case.path}` ({_options(case)}), {outcomes.n} questions, budgets "
        f"{', '.join(map(str, outcomes.budgets))}"
        for case, outcomes in loaded
    ]
    spent = os.times()
    cpu = spent.user + spent.system + spent.children_user + spent.children_system
    head = "\n".join(
        [
            "# The exact optimum, and a verdict that survives the search\n",
            f"Made by `{COMMAND}` on {datetime.now(UTC):%Y-%m-%d} in {time.monotonic() - began:.0f} s ({cpu:.0f} s of "
            f"processor time, {jobs} processes on {os.cpu_count()} cores that others shared; {platform.machine()}, "
            f"Python {platform.python_version()}, numpy {np.__version__}, calib {calib.__version__}): {splits} splits, "
            f"{stores} stores, {trials} trials. Not edited by hand. Every random number comes from a fixed seed, so "
            "that all but the seconds repeat.\n",
            "Recorded answers of real models, read where they lie and not part of this repository:\n",
            *files,
            "\nWhere a file holds no seconds they come from rates, 45 ms for System 1 and 250 tokens/s, and are "
            "`estimated`: such a limit can be met, never certified. The MMLU file holds words and no tokens: a word "
            "was counted as a token, so its seconds are only something of the right shape for a limit to act on. The "
            "stated-probability pairs hold neither tokens nor seconds: latency is left out, and the limit is on the "
            "think rate.\n",
        ]
    )
    return "\n".join([head, *body]).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder that holds realdata/")
    parser.add_argument("--out", type=Path, default=Path("reports/optimum.md"), help="file to write")
    parser.add_argument("--splits", type=int, default=300, help="random splits of each file")
    parser.add_argument("--stores", type=int, default=1200, help="stores of each family")
    parser.add_argument("--trials", type=int, default=200, help="Optuna trials; 0 leaves the columns empty")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given: Any = parser.parse_args(arguments)
    text = report(given.shared, given.splits, given.stores, given.trials, given.jobs)
    temporary = given.out.with_name(given.out.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(given.out)
    progress(f"wrote {given.out}")


if __name__ == "__main__":
    main()

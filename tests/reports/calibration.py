"""Makes ``reports/calibration.md``: probabilities before and after calibration on recorded data, held-out questions.

Run as ``python -m tests.reports.calibration --shared ../shared --out reports/calibration.md``; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from numpy.typing import NDArray
from scipy import stats
from scipy.special import softmax
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression

import calib
from calib import metrics
from calib.calibrate import (
    CELL_ROWS,
    FOLDS,
    LEAST_GROUPS,
    START_ROWS,
    Calibration,
    apply,
    finish,
    fit,
    folds_of,
    refit,
)
from calib.optimise import optimum, tabulate
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, CONFIDENCES, Policy, baselines, candidate_thresholds, confidence, decide, evaluate
from calib.search import GRID
from calib.stages import Stage, stages
from calib.target import parse_targets
from calib.temperature import Temperatures
from tests.reports.optimum import progress, table
from tests.reports.recorded import CASES, TEST_SHARE, Case
from tests.test_calibrate import Stored, two_systems

COMMAND = "python -m tests.reports.calibration --shared ../shared --out reports/calibration.md"
THINK_RATES = (0.25, 0.5, 0.75)
COVERAGES = (0.5, 0.8)
LEVEL = 0.95

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Loaded:
    """One case: its split, the server's defaults, and what was fitted on the tune questions."""

    case: Case
    tune: Outcomes
    test: Outcomes
    policy: Policy
    calibration: Calibration

    @classmethod
    def of(cls, case: Case, shared: Path) -> Loaded:
        tune, test = case.load(shared).split(TEST_SHARE)
        assert test is not None
        return cls(case, tune, test, baselines(tune)["default"], fit(tune))

    def calibrated(self, policy: Policy) -> tuple[Policy, Calibration]:
        """The policy on calibrated probabilities: as many tune questions think, and the step after the mix is its own.

        The threshold lies midway between neighbouring calibrated confidences of questions that can think.
        """
        raw, seen = self.tune, apply(self.tune, self.calibration)
        able = raw.can_think
        count = int((policy.thinks(raw.p1) & able).sum())
        sure = confidence(seen.p1[able], policy.confidence, seen.n_options[able])
        cuts = candidate_thresholds(sure)
        at = int(np.argmin(np.abs(np.searchsorted(np.sort(sure), cuts, side="left") - count)))
        found = finish(raw, self.calibration, replace(policy, threshold=float(cuts[at])))
        return found.policy(replace(policy, threshold=float(cuts[at]))), found


def points(share: float) -> str:
    return f"{100 * share:.1f}"


def interval(value: Any) -> str:
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


# --- the three stages -------------------------------------------------------------------------------------------------


def three_stages(loaded: Sequence[Loaded]) -> Iterator[str]:
    yield "## Three stages, before and after, on held-out questions\n"
    yield (
        "The server's defaults (threshold 0.8, mix 0.5, largest budget) as they are, and calibrated with the threshold "
        "moved so that as many tune questions think; temperatures, pool and threshold come from the tune questions "
        "alone. `final` is the answer of that policy. ECE with its 95 % bootstrap interval, 15 bins of equal width or "
        "of equal mass; Brier (0 to 2) = reliability - resolution + uncertainty + what the bins hide.\n"
    )
    head = ["data", "stage", "", "n", "right %", "mean top %", "ECE, equal width", "ECE, equal mass"]
    head += ["Brier", "reliability", "resolution", "NLL", "clipped", "AURC"]
    rows = []
    for one in loaded:
        progress(f"stages: {one.case.name}")
        rows += _stage_rows(one, one.policy, one.case.name)
    yield table(head, rows, 3) + "\n"
    yield (
        "Reliability diagrams with counts and intervals come from the same figures (`calib.stages.binned`). `clipped` "
        "counts right answers with a stored probability below 1e-12, which NLL takes as 1e-12: the stated "
        "probabilities hold exact zeros that no temperature lifts.\n"
    )
    yield "### At a small budget, where most thoughts are cut\n"
    rows = []
    for one in loaded:
        for budget in one.tune.budgets.tolist()[:-1]:
            policy = replace(one.policy, think_budget=budget, threshold=ALWAYS)
            rows += _stage_rows(one, policy, f"{one.case.name}, {budget}", ["p2"])
    yield table(head, rows, 3) + "\n"


def _stage_rows(
    one: Loaded, policy: Policy, label: str, names: Sequence[str] = ("p1", "p2", "final")
) -> list[list[str]]:
    after, _ = one.calibrated(policy)
    both = [stages(one.test, p, rng=np.random.default_rng(0)) for p in (policy, after)]
    rows: list[list[str]] = []
    for name in names:
        for when, found in zip(("before", "after"), both, strict=True):
            rows.append([label if len(rows) == 0 else "", name, when, *_figures(found[name])])
    return rows


def _figures(s: Stage) -> list[str]:
    return [
        str(s.n),
        points(s.accuracy),
        points(s.mean_top),
        interval(s.ece),
        interval(s.ece_mass),
        *(f"{value:.4f}" for value in (s.brier.brier, s.brier.reliability, s.brier.resolution, s.nll)),
        str(s.clipped),
        f"{s.aurc:.4f}",
    ]


# --- what was kept ----------------------------------------------------------------------------------------------------


def steps(loaded: Sequence[Loaded]) -> Iterator[str]:
    yield "## Which steps were kept\n"
    yield (
        f"Cross-validation on the tune questions, {FOLDS} folds of whole groups, each step fitted without the fold "
        f"that judges it. Kept when the one-sided {LEVEL:.0%} bounds of the gain in NLL and in Brier are both above "
        f"0 (at least {LEAST_GROUPS} groups). The pooled fit starts at temperature 1 as {START_ROWS:.0f} questions "
        f"would; a kind or band of n questions keeps n / (n + {CELL_ROWS:.0f}) of its own temperature.\n"
    )
    rows, fitted = [], []
    for one in loaded:
        policy, found = one.calibrated(one.policy)
        for i, step in enumerate(found.steps):
            figures = [
                f"{scores[0]:.4f} -> {scores[1]:.4f} ({scores[2]:+.4f})" if not step.note else ""
                for scores in (step.nll, step.brier)
            ]
            verdict = step.note or ("**kept**" if step.kept else "no")
            rows.append([one.case.name if i == 0 else "", step.name, verdict, str(step.n), *figures])
        fitted.append([one.case.name, policy.pool, _temperatures(policy.calibration)])
    yield table(["data", "step", "kept", "n", "NLL (gain at least)", "Brier (gain at least)"], rows, 3) + "\n"
    yield table(["data", "pool", "temperatures of the policy above"], fitted, 3) + "\n"


def _temperatures(t: Temperatures) -> str:
    plain = t.to_dict()
    shares = plain.pop("uniform", {})
    found = [f"{stage} {', '.join(f'{k} {v:.3g}' for k, v in values.items())}" for stage, values in plain.items()]
    found += [f"uniform share of {stage} {share:.3g}" for stage, share in shares.items()]
    return "; ".join(found).replace("*", "all") or "none"


# --- what it does to the answers --------------------------------------------------------------------------------------


def equal_rates(loaded: Sequence[Loaded]) -> Iterator[str]:
    yield "## Accuracy at an equal think rate\n"
    yield (
        "Thresholds at which as many tune questions think before and after, near the rate that is named (stated "
        "probabilities have few different values), and the mix that is best there, of 101; accuracy in per cent and "
        "think rate on the held-out ones. The difference is paired, with its 95 % interval by group.\n"
    )
    rows = []
    for one in loaded:
        progress(f"equal rates: {one.case.name}")
        for i, rate in enumerate(THINK_RATES):
            sides = _at_rate(one, rate)
            right = [decide(one.test, p).choice == one.test.answer for p in sides]
            scores = [evaluate(one.test, p) for p in sides]
            cells = [f"{points(s.accuracy)} ({points(s.think_rate)})" for s in scores]
            rows.append(
                [one.case.name if i == 0 else "", f"{rate:.0%}", *cells, _difference(one.test, right[1], right[0])]
            )
    yield table(["data", "think rate", "before", "after", "difference, points"], rows, 1) + "\n"


def _at_rate(one: Loaded, rate: float) -> tuple[Policy, Policy]:
    """The best policy on the tune questions at this think rate, before and after."""
    sides = ((one.tune, "linear"), (apply(one.tune, one.calibration), one.calibration.pool))
    tables = [tabulate(seen, budgets=[one.policy.think_budget], pool=pool) for seen, pool in sides]
    gap = np.abs(tables[0].think_rate[:, None] - tables[1].think_rate)
    rows = np.unravel_index(np.argmin(10 * gap + np.abs(tables[0].think_rate[:, None] - rate)), gap.shape)
    found = []
    for (seen, pool), rows_of, k in zip(sides, tables, rows, strict=True):
        at = replace(one.policy, threshold=float(rows_of.thresholds[k]), pool=pool)
        right = [evaluate(seen, replace(at, mix=mix)).accuracy for mix in GRID.tolist()]
        best = float(GRID[int(np.argmax(right))])
        found.append(replace(at, mix=best))
    before, after = found
    return before, finish(one.tune, one.calibration, after).policy(after)


def _difference(o: Outcomes, ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> str:
    change = np.bincount(o.group_codes, ours.astype(float) - theirs)
    size = np.bincount(o.group_codes)
    mean = change.sum() / o.n
    error = np.sqrt(((change - mean * size) ** 2).sum()) / o.n
    half = float(stats.norm.ppf(0.975)) * error
    return f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


def confidences(loaded: Sequence[Loaded]) -> Iterator[str]:
    yield "## Which confidence\n"
    yield (
        "System 1's risk-coverage on held-out questions (one curve for each definition): area, and error in per cent "
        "among the half and the four fifths that it is surest of. Then the exact optimum on the tune questions with "
        "each, without a limit and with `think_rate<50%`, and what it gives on the held-out ones. `grid` marks the "
        "log-odds pool, whose mixes were tried on a grid.\n"
    )
    head = ["data", "", "confidence", "AURC", *(f"error at {c:.0%}" for c in COVERAGES)]
    head += ["optimum, tune", "held out", "think_rate<50%, tune", "held out"]
    limit = parse_targets("think_rate<50%")
    rows = []
    for one in loaded:
        progress(f"confidences: {one.case.name}")
        for when, calibrated in (("before", False), ("after", True)):
            for how in CONFIDENCES:
                seen, unseen = (apply(o, one.calibration) if calibrated else o for o in (one.tune, one.test))
                pool = one.calibration.pool if calibrated else "linear"
                found = tabulate(seen, confidence=how, pool=pool)
                best = [optimum(found, targets) for targets in ((), limit)]
                right = metrics.chosen(unseen.p1) == unseen.answer
                curve = metrics.risk_coverage(confidence(unseen.p1, how, unseen.n_options), right, unseen.weight)
                errors = [points(float(curve.risk[np.searchsorted(curve.coverage, c)])) for c in COVERAGES]
                cells = []
                for b in best:
                    assert b.policy is not None
                    mark = "" if b.method == "exact" else " (grid)"
                    cells += [points(b.objective) + mark, points(evaluate(unseen, b.policy).accuracy)]
                area = f"{metrics.aurc(confidence(unseen.p1, how, unseen.n_options), right, unseen.weight):.4f}"
                label = one.case.name if (when, how) == ("before", "max") else ""
                rows.append([label, when if how == "max" else "", how, area, *errors, *cells])
    yield table(head, rows, 3) + "\n"


# --- other methods ----------------------------------------------------------------------------------------------------


def methods(loaded: Sequence[Loaded]) -> Iterator[str]:
    yield "## Other methods\n"
    yield (
        f"Out of fold on the tune questions ({FOLDS} folds by group), all finished thoughts or System 1. `isotonic`: "
        "scikit-learn's isotonic regression of being right on the top probability, the other options rescaled; it can "
        "make the second option the first. `scikit-learn`: its temperature scaling, which lifts a stored 0 to 2e-16. "
        "The last column: gain of isotonic over what calib kept, NLL and Brier, with the one-sided 95 % bound.\n"
    )
    head = ["data", "stage", "method", "NLL", "Brier", "ECE", "right %", "isotonic over kept"]
    rows, wins = [], []
    for one in loaded:
        progress(f"methods: {one.case.name}")
        for stage, o, p in _stage_inputs(one):
            fold = folds_of(o)
            kept = one.calibration.temperatures.only(stage)
            names = ("as it is", "scikit-learn", "isotonic", "kept by calib")
            found = {name: np.empty_like(p) for name in names}
            for f in range(FOLDS):
                seen, held = fold != f, fold == f
                found["as it is"][held] = p[held]
                found["scikit-learn"][held] = _sklearn(p[seen], o.answer[seen], p[held])
                found["isotonic"][held] = _isotonic(p[seen], o.answer[seen], p[held], o.weight[seen])
                found["kept by calib"][held] = _again(o, p, seen, held, kept, stage)
            gains = [
                _gain(o, score(found["kept by calib"], o), score(found["isotonic"], o)) for score in (_nll, _brier)
            ]
            if all(least > 0 for _, least in gains):
                wins.append(f"{one.case.name} {stage}")
            for i, (name, q) in enumerate(found.items()):
                gain = "; ".join(f"{m:+.4f} ({least:+.4f})" for m, least in gains) if name == "isotonic" else ""
                label = [one.case.name if stage == "p1" and i == 0 else "", stage if i == 0 else "", name]
                scores = [
                    f"{metrics.nll(q, o.answer):.4f}",
                    f"{metrics.brier(q, o.answer):.4f}",
                    f"{metrics.ece(q, o.answer):.4f}",
                ]
                rows.append([*label, *scores, points(metrics.accuracy(q, o.answer)), gain])
    yield table(head, rows, 3) + "\n"
    uniform = [f"{one.case.name} {stage}" for one in loaded for stage in one.calibration.temperatures.uniform]
    yield (
        f"Isotonic regression wins beyond noise in both scores on: {', '.join(wins) or 'none of them'}. "
        "It gives many confidences one value, so that a threshold can no longer tell them apart, and it leaves zeros "
        "among the other options. The one method beside temperatures that calib has is a share of the uniform "
        f"distribution; it was kept on: {', '.join(uniform) or 'none of them'}.\n"
    )


def _stage_inputs(one: Loaded) -> Iterator[tuple[str, Outcomes, Floats]]:
    yield "p1", one.tune, one.tune.p1
    usable = one.tune.can_think & one.tune.finished[:, -1] & ~one.tune.failed[:, -1]
    o = one.tune.take(usable)
    yield "p2", o, o.p2[:, -1]


def _sklearn(p: Floats, answer: NDArray[np.int64], new: Floats) -> Floats:
    """scikit-learn's temperature scaling of stored probabilities, on the options that are ever right."""
    tiny = np.finfo(np.float64).eps
    classes = np.unique(answer)
    logits = np.log(p + tiny)[:, classes]
    model = Stored().fit(logits, answer)  # type: ignore[no-untyped-call]
    scaled = CalibratedClassifierCV(FrozenEstimator(model), method="temperature", cv=2).fit(logits, answer)
    (pair,) = scaled.calibrated_classifiers_
    return np.asarray(softmax(pair.calibrators[0].beta_ * np.log(new + tiny), axis=1))


def _isotonic(p: Floats, answer: NDArray[np.int64], new: Floats, weight: Floats) -> Floats:
    best = p.argmax(axis=1)
    model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
    model.fit(p.max(axis=1), best == answer, sample_weight=weight)
    top, at = new.max(axis=1), new.argmax(axis=1)
    sure = np.clip(model.predict(top), 1e-6, 1 - 1e-6)
    rest = 1 - top
    q = np.where(rest[:, None] > 0, new * ((1 - sure) / np.where(rest > 0, rest, 1))[:, None], 0.0)
    q[np.arange(len(q)), at] = np.where(rest > 0, sure, 1.0)
    return np.asarray(q / q.sum(axis=1, keepdims=True))


def _again(o: Outcomes, p: Floats, seen: Mask, held: Mask, kept: Temperatures, stage: str) -> Floats:
    """The steps of a stage that were kept, fitted on some of the questions as if they were System 1."""
    if kept.nothing:
        return p[held]
    form = Temperatures(p1=getattr(kept, stage), uniform={"p1": kept.uniform.get(stage, 0.0)})
    t = refit(replace(o, p1=p).take(seen), form)
    return t.at("p1", p[held], o.kind[held], o.n_options[held])


def _nll(p: Floats, o: Outcomes) -> Floats:
    return -np.log(np.maximum(np.take_along_axis(p, o.answer[:, None], 1)[:, 0], metrics.NLL_CLIP))


def _brier(p: Floats, o: Outcomes) -> Floats:
    return np.asarray((p * p).sum(axis=1) - 2 * np.take_along_axis(p, o.answer[:, None], 1)[:, 0] + 1)


def _gain(o: Outcomes, without: Floats, with_: Floats) -> tuple[float, float]:
    change, size = np.bincount(o.group_codes, without - with_), np.bincount(o.group_codes)
    mean = float(change.sum()) / o.n
    error = float(np.sqrt(((change - mean * size) ** 2).sum())) / o.n
    return mean, mean - float(stats.norm.ppf(LEVEL)) * error


# --- the theorem ------------------------------------------------------------------------------------------------------


def theorem() -> Iterator[str]:
    yield "## Mixing two calibrated forecasts\n"
    yield (
        "Synthetic, 10,000 questions of 4 options: the answer is drawn from System 1's forecast, System 2 has evidence "
        "of its own, both are calibrated by construction. Half of the questions fit the step after the mix, the other "
        "half is shown. The linear mix lacks confidence, as it must; the step after it gives it back; the log-odds "
        "pool is the truth here at equal weights of 1, and a temperature of 1/2 after mix 0.5 makes it so.\n"
    )
    o = two_systems(10000, 5)
    seen, unseen = o.split(0.5)
    assert unseen is not None
    rows = []
    for pool in ("linear", "log_odds"):
        policy = Policy(ALWAYS, 0.5, 8, pool=pool)
        found = finish(seen, Calibration(Temperatures(), pool, (), (), seen.n, LEVEL), policy)
        for when, one in (("before", policy), ("after", found.policy(policy))):
            measured = stages(unseen, one, rng=np.random.default_rng(0))
            if pool == "linear" and when == "before":
                rows += [[name, "", *_figures(measured[name])] for name in ("p1", "p2")]
            note = "" if when == "before" else f", T = {found.temperatures.final.get('*', 1.0):.3f}"
            rows.append([f"mix 0.5, {pool}", when + note, *_figures(measured["final"])])
    head = ["stage", "", "n", "right %", "mean top %", "ECE, equal width", "ECE, equal mass"]
    yield table([*head, "Brier", "reliability", "resolution", "NLL", "clipped", "AURC"], rows, 2) + "\n"


def report(shared: Path) -> str:
    began = time.monotonic()
    loaded = []
    for case in CASES:
        progress(f"fit: {case.name}")
        loaded.append(Loaded.of(case, shared))
    body = [
        *three_stages(loaded),
        *steps(loaded),
        *equal_rates(loaded),
        *confidences(loaded),
        *methods(loaded),
        *theorem(),
    ]
    files = [
        f"- {one.case.name}: `{one.case.path}`, {one.tune.n} tune and {one.test.n} held-out questions, budget "
        f"{one.policy.think_budget}, {100 * one.tune.finished[:, -1].mean():.0f} % of the thoughts finished there"
        for one in loaded
    ]
    head = [
        "# Calibrated probabilities, before and after the mix\n",
        f"Made by `{COMMAND}` on {datetime.now(UTC):%Y-%m-%d} in {time.monotonic() - began:.0f} s "
        f"({platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, scikit-learn "
        f"{sklearn.__version__}, calib {calib.__version__}). Not edited by hand; every random number comes from a "
        f"fixed seed. Test share {TEST_SHARE:g}, by a hash of the question's group.\n",
        "Recorded answers of real models, read where they lie and not part of this repository:\n",
        *files,
        "",
    ]
    return "\n".join([*head, *body]).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder that holds realdata/")
    parser.add_argument("--out", type=Path, default=Path("reports/calibration.md"), help="file to write")
    given: Any = parser.parse_args(arguments)
    text = report(given.shared)
    temporary = given.out.with_name(given.out.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(given.out)
    progress(f"wrote {given.out}")


if __name__ == "__main__":
    main()

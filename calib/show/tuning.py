"""What the commands that score, tune and calibrate print."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from calib.jsonnumbers import finite
from calib.knobs import uncarried
from calib.show.text import (
    DEFAULT_STORE,
    apart,
    in_unit,
    marked_with,
    number,
    percent,
    policy_line,
    say,
    seconds,
    table,
    warn,
)
from calib.target import Target

if TYPE_CHECKING:
    from calib.calibrate import Calibration
    from calib.confidences import ConfidenceRow
    from calib.outcomes import Outcomes
    from calib.policy import Evaluation, Policy
    from calib.stages import Stage
    from calib.tuning import Tuned
    from calib.why import WhyRow

__all__ = [
    "calibration",
    "calibration_notes",
    "confidences",
    "evaluation",
    "latency_hint",
    "tuned",
    "why",
]


def evaluation(
    policy: Policy,
    result: Evaluation,
    marks: Sequence[str],
    warnings: Sequence[str],
    closed: Mapping[str, float] | None = None,
) -> None:
    """Print every metric of one policy, by dataset, and what its deadline closes."""
    names = {"all": result, **result.by_dataset} if len(result.by_dataset) != 1 else result.by_dataset
    rows = [
        [
            name,
            f"{e.n:,}",
            percent(e.accuracy),
            number(e.skill),
            percent(e.think_rate),
            number(e.tokens),
            seconds(e.mean),
            seconds(e.p50),
            seconds(e.p90),
            seconds(e.p99),
            number(e.ece),
            number(e.brier),
            number(e.nll),
            number(e.macro_f1),
        ]
        for name, e in names.items()
    ]
    columns = "dataset n accuracy skill think tokens mean p50 p90 p99 ECE Brier NLL macro-F1".split()
    table(columns, rows, title=policy_line(policy) + marked_with(marks))
    if result.unanswered:
        say(f"{result.unanswered} questions without a usable answer of System 2 count as wrong")
    if result.clipped:
        say(f"{result.clipped} right answers had a probability below 1e-12: NLL clips them there")
    if closed:
        say(_closed(closed))
    if not math.isnan(result.cost):
        say(f"cost {result.cost:.6g} a question")
    for text in warnings:
        warn(text)


def _closed(shares: Mapping[str, float]) -> str:
    closed, degraded = percent(shares["closed"]), percent(shares["degraded"])
    return f"the deadline closes the thought of {closed} of the questions; System 1 answers {degraded} in its place"


def latency_hint(outcomes: Outcomes, arm: str, think_budget: int) -> list[str]:
    """What to do when the seconds of an arm are not known, else nothing."""
    import numpy as np

    a, b = outcomes.arm_index(arm), outcomes.budget_index(think_budget)
    unknown = np.isnan(outcomes.t1[a]) | (np.isnan(outcomes.t2[a, :, b]) & outcomes.can_think)
    if not unknown.any():
        return []
    return [
        f"latency of arm {arm!r} is unknown for {int(unknown.sum())} of {outcomes.n} questions: import with rates "
        f"(--system1-ms {arm}=45 --tokens-per-second {arm}=250), or measure it: calib collect"
    ]


def tuned(found: Tuned, document: Mapping[str, Any], store: str) -> None:
    """Print what ``calib optimize`` found: verdict, policy, targets, comparison, price of each limit, what is next."""
    n_test = 0 if found.test is None else found.test.n
    marks = marked_with(document["marks"])
    say(f"{found.outcomes.model}: {found.tune.n:,} questions to tune, {n_test:,} held out{marks}")
    policy = found.policy
    if policy is None or found.certificate is None:
        say("   no policy meets the targets on the tune questions", head=click.style("verdict: not_met", bold=True))
        _nearest(found)
        for text in document["warnings"]:
            warn(text)
        return
    say(f"   {found.certificate.statement}", head=click.style(f"verdict: {found.verdict}", bold=True))
    say(f"policy:  {policy_line(policy)}")
    for key, route in policy.routes.items():
        threshold = policy.threshold if route.threshold is None else route.threshold
        budget = policy.think_budget if route.think_budget is None else route.think_budget
        knobs = f"threshold {threshold:.4g}, think_budget {budget:,}" if threshold > 0 else "never think"
        say(f"  {key}: {knobs}")
    say()
    if found.certificate.tests:
        rows = [
            [
                str(test.target),
                in_unit(test.target, test.value),
                f"{in_unit(test.target, test.low)} to {in_unit(test.target, test.high)}",
                "yes" if test.met else "NO",
                "yes" if test.certified else "no",
                "-" if test.needs_more is None else str(test.needs_more),
            ]
            for test in found.certificate.tests
        ]
        on = "held-out" if found.test is not None else "tune"
        table(["target", f"on {on}", "interval", "met", "certified", "needs more"], rows)
        for test in found.certificate.tests:
            if test.reason and not test.certified:
                say(f"  {test.target}: {test.reason}")
        say()
    _comparison(found, document)
    _limits(found, document)
    for text in document["warnings"]:
        warn(text)
    kept = [] if store == DEFAULT_STORE else ["--store", store]
    kept += ["--allow-simulated"] * ("simulated" in document["marks"])
    if policy.routes:
        kept += ["--held-by", "gateway"]
        kept += [word for key in uncarried(policy, ()) for word in ("--route-keys", key)]
    say(f"next: {shlex.join(['calib', 'export', document['name'], '--out', 'serve/', *kept])}")


def _comparison(found: Tuned, document: Mapping[str, Any]) -> None:
    """Tuned and baselines: the optimistic tune figure beside the held-out one, paired differences."""
    rows = []
    own = {"policy": document["policy"], **document["tune"], "test": document["test"]}
    for name, part in {"tuned": own, **document["baselines"]}.items():
        difference = part.get("difference")
        shown = part["test"] or {}
        held_out = [shown.get(key, {}).get("value") for key in ("accuracy", "think_rate", "p50", "p90", "p99")]
        plain = [part[key] for key in ("accuracy", "think_rate", "p50", "p90", "p99")]
        accuracy, think, *latency = held_out if found.test is not None else plain
        rows.append(
            [
                name,
                percent(part["accuracy"]),
                percent(accuracy) if found.test is not None else "-",
                percent(think),
                *(seconds(value) for value in latency),
                "" if difference is None else _difference(difference),
            ]
        )
    columns = ["", "accuracy, tune", "held out", "think rate", "p50", "p90", "p99", "tuned is better by"]
    table(columns, rows)
    for limit, share in (document["test"] or document["tune"])["over_twice_limit"].items():
        say(f"{percent(share)} take more than twice the limit of {limit}")
    say()


def _difference(difference: Mapping[str, Any]) -> str:
    low, high = difference["interval"]
    points = f"{100 * difference['difference']:+.1f} points"
    if low is not None and high is not None:
        points += f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return points if difference["distinguishable"] else points + ", cannot be told apart"


def _limits(found: Tuned, document: Mapping[str, Any]) -> None:
    """What the search knows beside the policy: the optimum, the price of each limit, the load."""
    exact = found.best
    unit = Target(exact.metric, "<", 0.0)
    best = f"{exact.metric} {in_unit(unit, exact.objective)} on the tune questions"
    best = "none is feasible" if exact.policy is None else best
    alone = "" if found.routed is None else ", one policy for all"
    say(f"best of the data ({exact.method}{alone}): {best}")
    _routes(found)
    if not math.isnan(found.margin_cost):
        say(f"the margin below the limits costs {apart(unit, found.margin_cost)} there; --margin 0 leaves none")
    _deadline(found, document)
    study = document["study"]
    if study is not None:
        gap = ""
        if study["gap"] is not None:
            gap = f", {apart(unit, abs(study['gap']))} {'short of' if study['gap'] >= 0 else 'better than'} it"
        best = "nothing feasible" if study["objective"] is None else in_unit(unit, study["objective"])
        say(f"Optuna study {study['name']} ({study['sampler']}, {study['trials']} trials): {best}{gap}")
        if "sentence" in study.get("findings", {}):
            say(f"  {study['findings']['sentence']}")
    for price in found.prices:
        if math.isfinite(price.gain):
            say(f"without {price.target}: {in_unit(unit, price.objective)}, {apart(unit, price.gain)} better")
    rate = found.sustainable
    if rate is not None:
        shown = "any rate" if math.isinf(rate) else f"{number(rate)} requests/s"
        say(f"thinking keeps up with {shown} at the collected concurrency")


def _routes(found: Tuned) -> None:
    """What routes gain over the best one policy for all, where they were asked for and taken."""
    from calib.tuning import ONE_FOR_ALL

    routed = found.routed
    if routed is None or found.policy is None or not found.policy.routes:
        return
    unit = Target(routed.best.metric, "<", 0.0)
    better = "no one policy for all leaves as much room below the limits"
    if routed.without is not None:
        better = f"{apart(unit, routed.gain)} better than one policy for all with the same margin"
    say(f"with routes by {routed.by}: {in_unit(unit, routed.best.objective)} there; {better} ({routed.tried} tried)")
    compared = found.comparisons.get(ONE_FOR_ALL)
    if compared is not None:
        on = "held-out" if found.test is not None else "tune"
        say(f"  accuracy on the {on} questions: {_difference(compared.to_dict())}")


def _deadline(found: Tuned, document: Mapping[str, Any]) -> None:
    """What a deadline changes, where one was asked for."""
    if found.without_deadline is None:
        return
    without, metric = found.without_deadline, Target(found.best.metric, "<", 0.0)
    ascending = sorted(one.deadline for one in found.tried)
    tried = ", ".join(dict.fromkeys(map(seconds, ascending))) or "none closes a thought"
    late = found.policy is not None and found.policy.deadline is not None
    if found.left_out is not None:
        say(f"no deadline does better beyond chance (tried: {tried})")
    elif found.best.policy is None or found.best.policy.deadline is None:
        say(f"{'without a margin ' if late else ''}no deadline does better (tried: {tried})")
    elif without.policy is None:
        say(f"no policy meets the targets without a deadline (tried: {tried})")
    else:
        gain = apart(metric, document["deadline"]["gain"])
        say(f"without a deadline: {in_unit(metric, without.objective)}, {gain} worse (tried: {tried})")
    if late and found.deadline_gain is not None:
        say(f"with the margin a deadline gains {found.deadline_gain}")
    if found.deadline_reason == "margin":
        say("without a deadline no policy leaves as much of the margin: what one gains was not tested")
    shares = document["deadline"]["test"] or document["deadline"]["tune"]
    if shares is not None:
        say(_closed(shares))


def _nearest(found: Tuned) -> None:
    nearest = found.nearest
    if nearest is None:
        return
    for relaxation in nearest.relaxations:
        if relaxation.needs is None:
            say(f"  {relaxation.target}: relaxing this one alone does not help")
        else:
            needs = in_unit(relaxation.target, relaxation.needs)
            say(f"  {relaxation.target} would have to be {needs} for the others to be met")
    if nearest.policy is not None:
        say(f"nearest: {policy_line(nearest.policy)}")


def why(rows: Sequence[WhyRow], warnings: Sequence[str], *, bands: bool) -> None:
    """Print what thinking does to the answers of each dataset."""
    shown = [row for row in rows if bands or row.low is None]
    cells = [
        [
            (row.dataset or "all") if row.low is None else f"  {row.low:g} to {row.high:g}",
            f"{row.n:,}",
            percent(row.system1),
            percent(row.thought),
            f"{row.gained:,}",
            f"{row.lost:,}",
            f"{row.p_value:.2g}",
            number(row.auc, 2),
            seconds(finite(row.seconds_per_correction)),
            number(finite(row.tokens_per_correction), 1),
            row.advice,
        ]
        for row in shown
    ]
    columns = ["dataset", "n", "System 1", "thinking", "wrong to right", "right to wrong", "p", "AUC"]
    table(
        [*columns, "s/correction", "tokens/correction", "advice"],
        cells,
        title="does thinking help here?" + marked_with(rows[0].marks),
    )
    for row in rows:
        if row.low is None and row.dataset is not None and row.advice != "gate":
            say(f"{row.dataset}: {row.reason}")
    for text in warnings:
        warn(text)


def calibration(
    fitted: Calibration,
    before: Mapping[str, Stage],
    after: Mapping[str, Stage],
    n: int,
    *,
    held_out: bool,
) -> None:
    """Print which steps were kept, and the calibration of each stage before and after."""
    rows = [
        [step.stage, step.name, "kept" if step.kept else "no", f"{step.n:,}", *_gain(step.nll), *_gain(step.brier)]
        for step in fitted.steps
    ]
    columns = [
        "stage",
        "step",
        "",
        "n",
        "NLL without",
        "with",
        "gain at least",
        "Brier without",
        "with",
        "gain at least",
    ]
    table(columns, rows, left=3, title="cross-validated on the tune questions; kept when both gains are above 0")
    for step in fitted.steps:
        if step.note:
            say(f"  {step.stage}, {step.name}: {step.note}")
    for cell in fitted.cells:
        say(f"  T = {cell.temperature:.3f} for {cell.stage} of {cell.key} ({cell.rows:,.0f} questions)")
    say()
    on = f"{n:,} held-out questions" if held_out else f"{n:,} questions, the ones that were fitted on"
    shown = [
        [name, *(f"{number(getter(one))} -> {number(getter(two))}" for getter in _STAGE_NUMBERS)]
        for (name, one), two in zip(before.items(), after.values(), strict=True)
    ]
    table(["stage", "accuracy", "mean top", "ECE", "Brier", "NLL", "AURC"], shown, title=f"before -> after, on {on}")


def confidences(rows: Sequence[ConfidenceRow], n: int) -> None:
    """Print what the exact optimum reaches with each definition of the confidence."""
    cells = [
        [
            row.definition,
            number(row.aurc, 4),
            percent(None if row.score is None else row.score.accuracy),
            percent(None if row.score is None else row.score.think_rate),
        ]
        for row in rows
    ]
    say()
    title = f"--confidence: the exact optimum with each, on {n:,} tune questions, uncalibrated"
    table(["confidence", "AURC", "best accuracy", "think rate"], cells, title=title)


def calibration_notes(warnings: Sequence[str]) -> None:
    """Print what to mind of a calibration, and what to type next."""
    for text in warnings:
        warn(text)
    say("next: calib optimize --calibrate auto --target 'p90<10s'")


_STAGE_NUMBERS: tuple[Callable[[Stage], float], ...] = (
    lambda stage: stage.accuracy,
    lambda stage: stage.mean_top,
    lambda stage: stage.ece.value,
    lambda stage: stage.brier.brier,
    lambda stage: stage.nll,
    lambda stage: stage.aurc,
)


def _gain(score: tuple[float, float, float]) -> list[str]:
    without, with_it, bound = score
    return [number(without), number(with_it), "-" if math.isnan(bound) else f"{bound:+.4f}"]

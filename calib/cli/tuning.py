"""Commands that score, explain, tune and calibrate."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import click

from calib.cli.base import NOT_MET, FiniteRange, cli, examples, json_option, load, numbers_of, selection
from calib.errors import CalibError

if TYPE_CHECKING:
    from calib.optimise import Optimum
    from calib.outcomes import Outcomes
    from calib.policy import Policy
    from calib.study import StudyResult
    from calib.target import Target


@cli.command(
    epilog=examples(
        "calib evaluate --threshold 0.8 --mix 0.5 --think-budget 8192 --arm mtp",
        "calib evaluate --threshold 0 --json",
        "calib evaluate --threshold 0.8 --deadline 8s --on-deadline system1",
    )
)
@click.option("--threshold", type=float, default=0.8, show_default=True, help="Think below; 0 never, 1.1 always.")
@click.option("--mix", type=float, default=0.5, show_default=True, help="Weight of System 2 after thinking.")
@click.option("--think-budget", type=int, metavar="TOKENS", help="Most thinking tokens.  [default: largest collected]")
@click.option("--arm", metavar="NAME", help="Way of serving.  [default: the first]")
@click.option("--cost", metavar="wrong=C,second=D", help="Prices for the metric cost (token=E too).")
@click.option("--deadline", metavar="TIME", help="Close a thought in time for an answer by then: 8s, 800ms.")
@click.option(
    "--on-deadline",
    type=click.Choice(["system2", "system1"]),
    help="What answers when the deadline closed the thought: the cut thought, or System 1.  [default: system2]",
)
@selection
@json_option
def evaluate(
    threshold: float,
    mix: float,
    think_budget: int | None,
    arm: str | None,
    cost: str | None,
    deadline: str | None,
    on_deadline: str | None,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Print every metric of one policy, by dataset."""
    from calib import metrics, show
    from calib.certify import marks_of
    from calib.deadline import parse_seconds
    from calib.deadline import warnings as deadline_warnings
    from calib.policy import Cost, Policy, decide, evaluate_decisions

    if on_deadline and deadline is None:
        raise CalibError("--on-deadline means nothing without a deadline; write for instance: --deadline 8s")
    late = {} if deadline is None else {"deadline": parse_seconds(deadline), "on_deadline": on_deadline or "system2"}
    outcomes = load(store, model, datasets, traffic, concurrency)
    if think_budget is None:
        think_budget = int(outcomes.budgets[-1])
    policy = Policy.from_dict(
        {"threshold": threshold, "mix": mix, "think_budget": think_budget, "arm": arm or outcomes.arms[0], **late}
    )
    decisions = decide(outcomes, policy)
    result = evaluate_decisions(outcomes, decisions, by_dataset=True, cost=Cost.parse(cost) if cost else None)
    closed = {
        name: metrics.mean(getattr(decisions, name), outcomes.weight)
        for name in ("closed", "degraded")
        if policy.deadline is not None
    }
    marks = list(marks_of(policy, outcomes))
    warnings = [*outcomes.warnings, *show.latency_hint(outcomes, policy.arm, think_budget)]
    warnings += deadline_warnings(outcomes, policy)
    if as_json:
        show.echo_json(
            {
                "policy": policy.to_dict(),
                "metrics": result.to_dict(),
                "by_dataset": {name: part.to_dict() for name, part in result.by_dataset.items()},
                "n": result.n,
                "marks": marks,
                "warnings": warnings,
                **({"deadline": closed} if closed else {}),
            }
        )
    else:
        show.evaluation(policy, result, marks, warnings, closed)


@cli.command(
    epilog=examples(
        "calib why",
        "calib why --think-budget 2048 --arm mtp --bands",
    )
)
@click.option("--think-budget", type=int, metavar="TOKENS", help="Most thinking tokens.  [default: largest collected]")
@click.option("--mix", type=float, help="Weight of System 2 after thinking.  [default: the server's]")
@click.option("--arm", metavar="NAME", help="Way of serving, for the seconds.  [default: the first]")
@click.option("--bands", is_flag=True, help="Show the confidence bands of each dataset too.")
@selection
@json_option
def why(
    think_budget: int | None,
    mix: float | None,
    arm: str | None,
    bands: bool,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Show whether thinking helps here, by dataset and confidence band, before any tuning."""
    from calib import show
    from calib import why as module

    outcomes = load(store, model, datasets, traffic, concurrency)
    if think_budget is None:
        think_budget = int(outcomes.budgets[-1])
    mix = outcomes.default_mix if mix is None else mix
    rows = module.why(outcomes, think_budget, arm or outcomes.arms[0], mix)
    hurt = [row.dataset for row in module.hurting(rows)]
    if as_json:
        show.echo_json(
            {
                "think_budget": think_budget,
                "mix": mix,
                "arm": arm or outcomes.arms[0],
                "rows": [row.to_dict() for row in rows],
                "thinking_hurts": hurt,
                "warnings": list(outcomes.warnings),
            }
        )
    else:
        show.why(rows, outcomes.warnings, bands=bands)


@cli.command(
    epilog=examples(
        "calib optimize --target 'p90<10s'",
        "calib optimize --target p90:10s --target acc:83%",
        "calib optimize --minimize p90 --target 'accuracy>=83%' --name fast",
        "calib optimize --target 'accuracy[worst]>=60%, p90[GPQA Diamond]<20s' --json",
        "calib optimize --target 'p99<10s' --deadline auto",
        "calib optimize --target 'p90<10s' --routes dataset --trials 300",
    )
    + "\n\n\b\nQuote a target: without quotes the shell reads p90<10s as p90 and a file named 10s; p90:10s needs none.",
)
@click.option(
    "--target", "targets", multiple=True, metavar="TARGET", help="METRIC[DATASET] OP NUMBER UNIT (repeatable)."
)
@click.option("--maximize", metavar="METRIC", help="Objective.  [default: accuracy]")
@click.option("--minimize", metavar="METRIC", help="Objective: p90, mean, tokens, think_rate, cost, ...")
@click.option("--cost", metavar="wrong=C,second=D", help="Prices for the metric cost (token=E too).")
@click.option("--arm", "arms", multiple=True, metavar="NAME", help="Only this arm (repeatable).")
@click.option("--budgets", metavar="A,B", help="Only these think budgets.")
@click.option("--test-share", type=float, default=0.3, show_default=True, help="Share of questions kept for the test.")
@click.option("--level", type=float, default=0.95, show_default=True, help="Level of the certificate.")
@click.option("--margin", default="auto", show_default=True, metavar="auto|0", help="Room left below each limit.")
@click.option(
    "--prefer",
    type=click.Choice(["best", "cheapest"]),
    default="best",
    show_default=True,
    help="cheapest: the cheapest policy that cannot be told apart from the best.",
)
@click.option("--rate", metavar="N/s", help="Requests a second that the thinking must keep up with.")
@click.option(
    "--calibrate",
    type=click.Choice(["none", "auto"]),
    default="none",
    show_default=True,
    help="auto: tune on calibrated probabilities, where cross-validation gains.",
)
@click.option(
    "--confidence",
    type=click.Choice(["max", "margin", "entropy"]),
    default="max",
    show_default=True,
    help="What the threshold is compared with.",
)
@click.option(
    "--deadline",
    default="none",
    show_default=True,
    metavar="none|auto|TIME,..",
    help="Try closing thoughts in time too: 8s or 6s,800ms; auto takes times from the limits and the data.",
)
@click.option(
    "--routes",
    type=click.Choice(["none", "dataset", "kind", "n_options"]),
    default="none",
    show_default=True,
    help="Look for a threshold and a budget of their own for each of these too, see below.",
)
@click.option(
    "--include-failed-audits",
    is_flag=True,
    help="Tune on rows that failed an audit too, and refuse neither an arm nor a gate for what the audits say.",
)
@click.option("--trials", default=100, show_default=True, type=click.IntRange(0), help="Trials of the study; 0: none.")
@click.option("--study", default="policy", show_default=True, metavar="NAME|FILE", help="Study, see below.")
@click.option("--study-name", metavar="NAME", help="Go on with this study of the storage, or begin it.")
@click.option("--storage", metavar="URL|FILE", help="Where studies are kept.  [default: STORE.studies.db]")
@click.option(
    "--sampler", default="tpe", show_default=True, metavar="NAME", help="Optuna sampler: tpe, random, gp, ..."
)
@click.option(
    "--warm-start/--no-warm-start",
    default=True,
    show_default=True,
    help="Begin the study with the exact optimum; without it the gap tells what sampling alone finds.",
)
@click.option("--timeout", type=FiniteRange(0, min_open=True), metavar="SECONDS", help="Begin no trial after this.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Threads of the study.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the bootstrap and the study.")
@click.option("--name", default="best", show_default=True, help="Save the policy under this name.")
@selection
@json_option
def optimize(
    targets: tuple[str, ...],
    maximize: str | None,
    minimize: str | None,
    cost: str | None,
    arms: tuple[str, ...],
    budgets: str | None,
    test_share: float,
    level: float,
    margin: str,
    prefer: str,
    rate: str | None,
    calibrate: str,
    confidence: str,
    deadline: str,
    routes: str,
    include_failed_audits: bool,
    trials: int,
    study: str,
    study_name: str | None,
    storage: str | None,
    sampler: str,
    warm_start: bool,
    timeout: float | None,
    jobs: int,
    seed: int,
    name: str,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Find the best policy inside the targets, with a verdict on how far to trust it.

    \b
    METRIC   p50 p90 p95 p99 mean (s, ms); accuracy skill think_rate ece macro_f1 (% or a share);
             tokens brier nll cost (plain)
    DATASET  one dataset, or worst: must hold in each
    OP       < <= > >=, or : for the natural side
    \b
    DEADLINE is tried beside none; the better one wins, of equals the cheaper one; auto takes one only where
             its gain is beyond chance, or no policy meets the targets or leaves the whole margin without
             one. A thought that would end later is closed in time and counts as at the largest collected
             budget that ends by then, or System 1 answers: whichever is better. Only the gateway keeps it
             (calib serve)
    \b
    ROUTES   the study per_dataset, on the tune questions, looks for exceptions from one policy for all; where one
             gains beyond chance, or only routes leave as much of the margin, it is tested and saved. Only the
             gateway takes routes (calib serve), and those by dataset only from clients that send it
    \b
    STUDY    policy (one for all), pareto (accuracy against p90), per_dataset (a route each),
             truncation (what to do with a cut thought), or a file of your own (see studies/)
    """  # noqa: D301 - click reads the escape
    from dataclasses import replace

    from calib import audit, show
    from calib.arrivals import parse_rate
    from calib.fitness import fit_rows
    from calib.knobs import route_keys_of
    from calib.policy import Cost
    from calib.saved import save
    from calib.store import Store
    from calib.store.contents import content_key
    from calib.study import check_study, default_storage, run_study
    from calib.target import parse_targets
    from calib.tuning import Demand, tune

    demand = Demand(
        targets=parse_targets(targets),
        maximize=maximize,
        minimize=minimize,
        cost=Cost.parse(cost) if cost else None,
        arms=list(arms) or None,
        budgets=numbers_of(budgets, "--budgets") if budgets else None,
        test_share=test_share,
        level=level,
        margin=_margin(margin),
        cheapest=prefer == "cheapest",
        rate=None if rate is None else parse_rate(rate),
        calibrate=calibrate,
        confidence=confidence,
        deadlines=_deadlines(deadline),
        route_by=None if routes == "none" else routes,
        seed=seed,
    )
    if demand.route_by is not None:
        study = _study_of_routes(study, trials, routes)
    if not name.strip():
        raise CalibError("--name is empty; name the result, for instance: --name best")
    outcomes = load(store, model, datasets, traffic, concurrency)
    if trials:  # what cannot be run is said before a look at the test questions is spent
        check_study(study, sampler=sampler, storage=storage or default_storage(store))
    with Store.open(store, must_exist=True) as opened:
        said = audit.look(opened, outcomes)
        fit = fit_rows(outcomes, test_share, everything=include_failed_audits)
        if not include_failed_audits:
            demand = replace(demand, arms=demand.arms or said.fit_arms, repeats=said.repeats)
        line = show.ProgressLine()
        interrupted: list[str] = []
        looked: list[StudyResult] = []

        def run(
            on: Outcomes, exact: Optimum, starts: Sequence[Policy], requirements: Mapping[Target, float] | None = None
        ) -> Sequence[Policy] | None:
            """Run the study on these questions; its policies, None of one that was interrupted."""
            among = demand.arms
            if demand.rate is not None and exact.policy is not None:
                among = [exact.policy.arm]  # each arm sustains another number of tokens
            # with the margin another arm may be the best one
            within = [policy for policy in starts if policy.arm in (among or on.arms)]
            try:
                result = run_study(
                    on,
                    demand.limits(on, among[0]) if among else demand.targets,
                    study=study,
                    name=study_name,
                    storage=storage or default_storage(store),
                    sampler=sampler,
                    trials=trials,
                    timeout=timeout,
                    jobs=jobs,
                    seed=seed,
                    maximize=demand.maximize,
                    minimize=demand.minimize,
                    cost=demand.cost,
                    arms=among,
                    budgets=demand.budgets,
                    exact=exact,
                    route_by=demand.route_by,
                    requirements=requirements,
                    warm_start=within if warm_start else [],
                    progress=None if as_json else lambda done, total, _best: line("study", done, total),
                )
            except KeyboardInterrupt:
                interrupted.append("the study was interrupted: its trials are in the storage")
                return None
            looked.append(result)
            return [attempt.policy for attempt in result.attempts]

        tuned = tune(fit.outcomes, demand, ledger=opened.record_look, routes=run)
        document = tuned.to_dict(name)
        document["fingerprints"]["store"] = content_key(opened)
        document["warnings"] += [*fit.warnings, *said.of(tuned)]
        if stays := save(opened, name, document):  # now, since a study is long and may be stopped
            document["warnings"].append(stays)
        plain = confidence == "max" and (tuned.policy is None or tuned.policy.pool == "linear")
        if trials and not plain:
            document["warnings"].append("no study: it knows only the largest probability and the linear pool")
        elif trials and demand.route_by is None:
            known = said.unrefused(tuned)
            run(tuned.searched or tuned.tune, known, [known.policy] if known.policy is not None else [])
            if looked and known is not tuned.studied:
                document["warnings"].append("the study refuses no gate: its gap is to the optimum with all of them")
            if looked and tuned.best.policy is not None and tuned.best.policy.deadline is not None:
                document["warnings"].append("the study knows no deadline: its gap is to the optimum without one")
        document["warnings"] += interrupted
        for result in looked:
            document["study"] = result.to_dict()
            document["warnings"] += result.warnings
            if demand.route_by is None and result.policy is not None and result.policy.routes and result.gap < 0:
                by = route_keys_of(result.policy)[0]
                document["warnings"].append(
                    f"the study's best policy has routes, and is not what is saved; to have it tested and saved: "
                    f"--routes {by}"
                )
        save(opened, name, document)
    if as_json:
        show.echo_json(document)
    else:
        show.tuned(tuned, document, store)
    if tuned.verdict == "not_met":
        sys.exit(NOT_MET)


def _study_of_routes(study: str, trials: int, by: str) -> str:
    """The study that looks for routes."""
    if study not in ("policy", "per_dataset"):
        raise CalibError(f"--routes {by} runs the study per_dataset: leave out --study {study}, or --routes")
    if not trials:
        raise CalibError(f"--routes {by} looks for routes by a study: give it --trials 100, or more")
    return "per_dataset"


def _margin(text: str) -> bool:
    if text not in ("auto", "0"):
        raise CalibError(f"--margin {text!r}: write auto (sized by the number of test questions) or 0 (none)")
    return text == "auto"


def _deadlines(text: str) -> tuple[float, ...] | Literal["auto"]:
    from calib.deadline import parse_seconds

    if text in ("none", "auto"):
        return "auto" if text == "auto" else ()
    return tuple(parse_seconds(part) for part in text.split(","))


@cli.command(
    epilog=examples(
        "calib calibrate",
        "calib calibrate --threshold 0.7 --mix 0.4 --think-budget 2048",
    )
)
@click.option("--threshold", type=float, help="Policy for the final stage.  [default: the server's]")
@click.option("--mix", type=float, help="Weight of System 2 after thinking.  [default: the server's]")
@click.option("--think-budget", type=int, metavar="TOKENS", help="Most thinking tokens.  [default: largest collected]")
@click.option("--arm", metavar="NAME", help="Way of serving.  [default: the first]")
@click.option("--test-share", type=float, default=0.3, show_default=True, help="Share that nothing is fitted on.")
@selection
@json_option
def calibrate(
    threshold: float | None,
    mix: float | None,
    think_budget: int | None,
    arm: str | None,
    test_share: float,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Fit temperatures and pool, and show calibration before and after, on questions that were not fitted on.

    Changes nothing: calib optimize --calibrate auto tunes a policy on calibrated probabilities.
    """
    import numpy as np

    from calib import show
    from calib.calibrate import fit
    from calib.confidences import compare_confidences
    from calib.policy import Policy
    from calib.stages import stages

    outcomes = load(store, model, datasets, traffic, concurrency)
    policy = Policy(
        outcomes.default_threshold if threshold is None else threshold,
        outcomes.default_mix if mix is None else mix,
        int(outcomes.budgets[-1]) if think_budget is None else think_budget,
        arm or outcomes.arms[0],
    )
    tuned, held_out = outcomes.split(test_share)
    fitted = fit(tuned, policy=policy)
    shown = tuned if held_out is None else held_out
    before = stages(shown, policy, rng=np.random.default_rng(0))
    after = stages(shown, fitted.policy(policy), rng=np.random.default_rng(0))
    confidences = compare_confidences(tuned)
    if as_json:
        show.echo_json(
            {
                "calibration": fitted.to_dict(),
                "policy": fitted.policy(policy).to_dict(),
                "n": shown.n,
                "held_out": held_out is not None,
                "before": {name: stage.to_dict() for name, stage in before.items()},
                "after": {name: stage.to_dict() for name, stage in after.items()},
                "confidences": [row.to_dict() for row in confidences],
                "warnings": list(outcomes.warnings),
            }
        )
    else:
        show.calibration(fitted, before, after, shown.n, held_out=held_out is not None)
        show.confidences(confidences, tuned.n)
        show.calibration_notes(outcomes.warnings)

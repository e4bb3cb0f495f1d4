"""What the commands print: tables (Rich on a terminal, plain text elsewhere), numbers with units, JSON."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from calib.target import RATES, Target

if TYPE_CHECKING:
    from calib.audit import Finding
    from calib.calibrate import Calibration
    from calib.campaign import Campaign
    from calib.crew import Progress
    from calib.doctor import Diagnosis
    from calib.export import Export
    from calib.outcomes import Outcomes
    from calib.policy import Evaluation, Policy
    from calib.staged import Headroom, StagedSummary
    from calib.stages import Stage
    from calib.store import StoreStatus
    from calib.tuning import Tuned
    from calib.why import WhyRow

__all__ = [
    "ProgressLine",
    "calibration",
    "collected",
    "confirm_headroom",
    "diagnosis",
    "duration",
    "echo_json",
    "evaluation",
    "exported",
    "in_unit",
    "latency_hint",
    "number",
    "percent",
    "policy_line",
    "printable",
    "seconds",
    "status",
    "table",
    "tuned",
    "warn",
    "why",
]


DEFAULT_STORE = "calib.db"
"""What the commands read without ``--store``; hints leave it out."""

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text from data or a server without what would drive a terminal: each control character as ``?``."""
    return _CONTROL.sub("?", text)


def _say(text: str = "", *, head: str = "", err: bool = False, nl: bool = True) -> None:
    """Print text, with a head that may be styled."""
    click.echo(head + printable(text), err=err, nl=nl)


def percent(value: float | None, digits: int = 1) -> str:
    """Share as ``83.4 %``; ``-`` when unknown."""
    return "-" if _unknown(value) else f"{100 * _known(value):.{digits}f} %"


def seconds(value: float | None) -> str:
    """Seconds as ``45 ms`` below one second, ``8.20 s`` above; ``-`` when unknown."""
    if _unknown(value):
        return "-"
    value = _known(value)
    if math.isinf(value):
        return "inf"
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if value < 99.995 else f"{value:.0f} s"


def number(value: float | None, digits: int = 3) -> str:
    """Plain number; ``-`` when unknown."""
    if _unknown(value):
        return "-"
    value = _known(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.{digits}f}"


def _unknown(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _known(value: float | None) -> float:
    assert value is not None
    return value


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: int = 1, err: bool = False
) -> None:
    """Print a table; the first ``left`` columns are text, the others align right.

    Parameters
    ----------
    columns : sequence of str
    rows : sequence of sequence of str
    title : str, optional
    left : int, default 1
    err : bool, default False
        Print to stderr.
    """
    stream = sys.stderr if err else sys.stdout
    rows = [[printable(cell).replace("\n", "?") for cell in row] for row in rows]
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        rich = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(columns):
            rich.add_column(name, justify="left" if i < left else "right", overflow="fold")
        for row in rows:
            rich.add_row(*(Text(cell) for cell in row))  # Text: names from data are never markup
        Console(file=stream).print(rich)
        return
    width = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    if title:
        _say(title, err=err)
    for line in [columns, *rows]:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, width, strict=True))]
        _say("  ".join(cells).rstrip(), err=err)


def warn(text: str) -> None:
    """Print one line of warning to stderr."""
    _say(text, head=click.style("warning: ", fg="yellow"), err=True)


def echo_json(document: Mapping[str, Any]) -> None:
    """Print a document for machines: strict JSON, unknown numbers as null."""
    click.echo(json.dumps(_plain(document), ensure_ascii=False, indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def duration(value: float | None) -> str:
    """Long time as ``1:02:03`` or ``4:05``; ``-`` when unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressLine:
    """Progress on stderr: one line that rewrites itself on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = 0.1 if self._terminal else 5.0  # seconds between two updates
        self._last = -math.inf
        self._width = 0
        self._began: float | None = None
        self._at = 0

    def __call__(
        self, label: str, done: int, total: int, rate: float | None = None, eta: float | None = None, note: str = ""
    ) -> None:
        """Show that ``done`` of ``total`` are finished; a rate that is not given counts from the first call."""
        now, finished = time.monotonic(), done >= total
        if rate is None:
            self._began, self._at = (now, done) if self._began is None else (self._began, self._at)
            rate = (done - self._at) / (now - self._began) if now > self._began else 0.0
            eta = (total - done) / rate if rate else None
        if not finished and now - self._last < self._every:
            return
        self._last = now
        share = f"{100 * done / total:3.0f} %" if total else ""
        text = f"{label}  {done:,}/{total:,} {share}  {rate:,.0f}/s  ETA {duration(eta)}" + (
            f"  {note}" if note else ""
        )
        if self._terminal:
            _say(text.ljust(self._width), head="\r", nl=finished, err=True)
            self._width = 0 if finished else len(text)
        else:
            _say(text, err=True)

    def collection(self, progress: Progress) -> None:
        """Show where the collection of one arm stands."""
        label = f"arm {progress.arm}" + ("" if progress.stage == "all" else f", {progress.stage}")
        notes = [f"{progress.failed} failed"] if progress.failed else []
        if progress.gpu_hours_left >= 0.01:
            notes.append(f"about {progress.gpu_hours_left:.2g} GPU hours left")
        if progress.paused:
            notes.append("paused: the server has requests waiting")
        self(label, progress.done, progress.total, progress.rate, progress.eta_s, "; ".join(notes))


def policy_line(policy: Policy) -> str:
    """One policy in words."""
    if policy.threshold == 0:
        return f"never think ({policy.arm})"
    routes = f", {len(policy.routes)} routes" if policy.routes else ""
    return (
        f"threshold {policy.threshold:.4g}, mix {policy.mix:.3g}, think_budget {policy.think_budget:,}, "
        f"arm {policy.arm}{routes}"
    )


def evaluation(policy: Policy, result: Evaluation, marks: Sequence[str], warnings: Sequence[str]) -> None:
    """Print every metric of one policy, by dataset."""
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
    table(columns, rows, title=policy_line(policy) + _marked(marks))
    if result.unanswered:
        _say(f"{result.unanswered} questions without a usable answer of System 2 count as wrong")
    if result.clipped:
        _say(f"{result.clipped} right answers had a probability below 1e-12: NLL clips them there")
    if not math.isnan(result.cost):
        _say(f"cost {result.cost:.6g} a question")
    for text in warnings:
        warn(text)


def _marked(marks: Sequence[str]) -> str:
    return f"   [{', '.join(marks)}]" if marks else ""


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


def exported(result: Export) -> None:
    """Print what an export wrote and who must hold each knob."""
    _say("wrote " + ", ".join(f"{result.folder}/{name}" for name in result.files))
    rows = [[knob.knob, _short(knob.value), knob.holder, knob.how] for knob in result.knobs]
    table(["knob", "value", "held by", "how"], rows, left=4)
    for text in result.warnings:
        warn(text)
    if result.done:
        _say("done: every knob is held")
    else:
        free = ", ".join(knob.knob for knob in result.knobs if knob.holder == "nobody")
        by_client = "" if result.refused else ", or let the clients send decide-defaults.json (--held-by client)"
        _say(
            f"NOT DONE: nobody holds {free} yet. Serve by the gateway (--held-by gateway){by_client}, and export again "
            "with that option"
        )


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def confirm_headroom(headroom: Headroom) -> bool:
    """Show what thinking could win and would cost, and ask whether to go on."""
    for text in headroom.lines():
        _say(text, err=True)
    return click.confirm("go on with the thoughts?", default=True, err=True)


def collected(result: Campaign, store: str) -> None:
    """Print what a collection came to and what to type next."""
    whole = [arm for summary in result.whole for arm in summary.arms]
    arms = whole if result.stages is None else [result.stages.arm]
    rows = [
        [arm.arm, f"{arm.asked:,}", f"{arm.already:,}", f"{arm.failed:,}", f"{arm.rate:,.0f}/s", duration(arm.seconds)]
        for arm in arms
    ]
    table(["arm", "asked", "stored before", "failed", "rate", "time"], rows)
    for arm in arms:
        if arm.reasons:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(arm.reasons.items()))
            _say(f"arm {arm.arm} failed: {reasons}. See calib status; ask again with --retry-failed")
        if arm.failed_before:
            _say(f"arm {arm.arm}: {arm.failed_before} questions failed before; ask again with --retry-failed")
    if result.stages is not None:
        _stages(result.stages)
    for one in result.passes:
        note = f": {one.note}" if one.note else ""
        _say(f"latency of {one.arm} at {one.concurrency}: {one.state}, {one.timed} questions{note}")
    if result.simulated:
        _say("simulated: no real model answered; the numbers say nothing about a real server")
    for text in result.warnings:
        warn(text)
    if result.interrupted:
        _say("stopped before the end; the same command goes on")
    else:
        _say(f"next: calib optimize --store {store} --target 'p90<10s'")


def _stages(stages: StagedSummary) -> None:
    """What the stages did, and why they ended."""
    if stages.headroom is not None:
        for text in stages.headroom.lines():
            _say(text)
    _say(
        f"{stages.thoughts:,} of {stages.questions:,} questions have a thought; {len(stages.rounds)} rounds, "
        f"{stages.tokens:,} thinking tokens, about {stages.gpu_hours:.2g} GPU hours (estimate)"
    )
    _say(f"ended: {stages.ended}")


def status(found: StoreStatus, findings: Sequence[Finding] = ()) -> None:
    """Print what a store holds, what failed and why, and what the audits say."""
    _say(f"{found.location}: {sum(found.questions.values()):,} questions, schema {found.schema_version}")
    for model in found.models:
        mark = "   [simulated]" if model.simulated else ""
        _say(
            f"\nmodel {model.name} ({model.fingerprint[:12]}), serves threshold {model.threshold:g}, "
            f"mix {model.mix:g}{mark}"
        )
        budgets = sorted({budget for row in model.coverage for budget in row.budgets})
        rows = [
            [row.dataset, row.arm, f"{row.questions:,}", f"{row.system1:,}"]
            + [f"{row.budgets.get(budget, 0):,} / {row.timed.get(budget, 0):,}" for budget in budgets]
            for row in model.coverage
        ]
        columns = ["dataset", "arm", "questions", "System 1", *(f"{budget:,}" for budget in budgets)]
        table(columns, rows, left=2, title="answers / with seconds, by think budget")
        for arm, rate in model.rates.items():
            _say(
                f"arm {arm}: seconds estimated from {1000 * rate.system1_s:g} ms System 1, "
                f"{rate.tokens_per_second:g} tokens/s, {1000 * rate.read_s:g} ms answer read"
            )
        if model.failures:
            rows = [
                [f.arm, f.stage, f.reason, f"{f.questions:,}", ", ".join(f.examples[:3]), f.detail]
                for f in model.failures
            ]
            table(["arm", "stage", "failure", "questions", "for instance", "last"], rows, left=3)
            _say("ask again with: calib collect ... --retry-failed")
    if findings:
        fine = sum(f.level == "ok" for f in findings)
        told = [f for f in findings if f.level != "ok" and (f.level != "note" or f.dataset is None)]
        rows = [[f.level, f.audit, f.arm or "-", f.dataset or "-", f.text] for f in told]
        table(["level", "audit", "arm", "dataset", "finding"], rows, left=5, title="\naudits")
        rest = len(findings) - fine - len(told)
        _say(f"{fine} audits are ok" + (f"; {rest} notes on single datasets: calib status --json" if rest else ""))
    for policy in found.policies:
        _say(f"policy {policy.name!r}: {policy.document.get('verdict')}, saved {policy.created}")


def tuned(found: Tuned, document: Mapping[str, Any], store: str) -> None:
    """Print what ``calib optimize`` found: verdict, policy, targets, comparison, price of each limit, what is next."""
    n_test = 0 if found.test is None else found.test.n
    marks = _marked(document["marks"])
    _say(f"{found.outcomes.model}: {found.tune.n:,} questions to tune, {n_test:,} held out{marks}")
    policy = found.policy
    if policy is None or found.certificate is None:
        _say("   no policy meets the targets on the tune questions", head=click.style("verdict: not_met", bold=True))
        _nearest(found)
        for text in document["warnings"]:
            warn(text)
        return
    _say(f"   {found.certificate.statement}", head=click.style(f"verdict: {found.verdict}", bold=True))
    _say(f"policy:  {policy_line(policy)}")
    _say()
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
                _say(f"  {test.target}: {test.reason}")
        _say()
    _comparison(found, document)
    _limits(found, document["study"])
    for text in document["warnings"]:
        warn(text)
    kept = [] if store == DEFAULT_STORE else ["--store", store]
    _say(f"next: {shlex.join(['calib', 'export', document['name'], '--out', 'serve/', *kept])}")


def in_unit(target: Target, value: float) -> str:
    """Value of a target's metric in the metric's unit."""
    if target.is_latency:
        return seconds(value)
    return percent(value) if target.metric in RATES else number(value)


def apart(target: Target, value: float) -> str:
    """Difference of two values of a target's metric: shares differ by points."""
    return f"{100 * value:.1f} points" if target.metric in RATES else in_unit(target, value)


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
        _say(f"{percent(share)} take more than twice the limit of {limit}")
    _say()


def _difference(difference: Mapping[str, Any]) -> str:
    low, high = difference["interval"]
    points = f"{100 * difference['difference']:+.1f} points"
    if low is not None and high is not None:
        points += f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return points if difference["distinguishable"] else points + ", cannot be told apart"


def _limits(found: Tuned, study: Mapping[str, Any] | None) -> None:
    """What the search knows beside the policy: the optimum, the price of each limit, the load."""
    exact = found.best
    unit = Target(exact.metric, "<", 0.0)
    _say(f"best of the data ({exact.method}): {exact.metric} {in_unit(unit, exact.objective)} on the tune questions")
    if not math.isnan(found.margin_cost):
        _say(f"the margin below the limits costs {apart(unit, found.margin_cost)} there; --margin 0 leaves none")
    if study is not None:
        gap = "" if study["gap"] is None else f", {apart(unit, study['gap'])} short of it"
        best = "nothing feasible" if study["objective"] is None else in_unit(unit, study["objective"])
        _say(f"Optuna study {study['name']} ({study['sampler']}, {study['trials']} trials): {best}{gap}")
        if "sentence" in study.get("findings", {}):
            _say(f"  {study['findings']['sentence']}")
    for price in found.prices:
        if math.isfinite(price.gain):
            _say(f"without {price.target}: {in_unit(unit, price.objective)}, {apart(unit, price.gain)} better")
    rate = found.sustainable
    if rate is not None:
        shown = "any rate" if math.isinf(rate) else f"{number(rate)} requests/s"
        _say(f"thinking keeps up with {shown} at the collected concurrency")


def _nearest(found: Tuned) -> None:
    nearest = found.nearest
    if nearest is None:
        return
    for relaxation in nearest.relaxations:
        if relaxation.needs is None:
            _say(f"  {relaxation.target}: relaxing this one alone does not help")
        else:
            needs = in_unit(relaxation.target, relaxation.needs)
            _say(f"  {relaxation.target} would have to be {needs} for the others to be met")
    if nearest.policy is not None:
        _say(f"nearest: {policy_line(nearest.policy)}")


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
            seconds(_finite(row.seconds_per_correction)),
            number(_finite(row.tokens_per_correction), 1),
            row.advice,
        ]
        for row in shown
    ]
    columns = ["dataset", "n", "System 1", "thinking", "wrong to right", "right to wrong", "p", "AUC"]
    table(
        [*columns, "s/correction", "tokens/correction", "advice"],
        cells,
        title="does thinking help here?" + _marked(rows[0].marks),
    )
    for row in rows:
        if row.low is None and row.dataset is not None and row.advice != "gate":
            _say(f"{row.dataset}: {row.reason}")
    for text in warnings:
        warn(text)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def diagnosis(found: Diagnosis) -> None:
    """Print what each server is, and what keeps a collection from being right."""
    rows = [
        [
            server.arm,
            server.url,
            server.engine or "-",
            server.model or "-",
            (server.fingerprint or "-")[:12],
            seconds(server.seconds),
            "-" if server.threshold is None else f"{server.threshold:g} / {number(server.mix)}",
            number(server.acceptance_length),
            f"{number(server.running)} / {number(server.waiting)}",
        ]
        for server in found.servers
    ]
    columns = ["arm", "address", "engine", "model", "fingerprint", "answers in", "threshold / mix"]
    table([*columns, "acceptance length", "running / waiting"], rows, left=5)
    for text in found.notes:
        _say(text)
    for text in found.problems:
        warn(text)
    _say("ok" if found.ok else f"{len(found.problems)} problems")


def calibration(
    fitted: Calibration,
    before: Mapping[str, Stage],
    after: Mapping[str, Stage],
    n: int,
    *,
    held_out: bool,
    warnings: Sequence[str],
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
            _say(f"  {step.stage}, {step.name}: {step.note}")
    for cell in fitted.cells:
        _say(f"  T = {cell.temperature:.3f} for {cell.stage} of {cell.key} ({cell.rows:,.0f} questions)")
    _say()
    on = f"{n:,} held-out questions" if held_out else f"{n:,} questions, the ones that were fitted on"
    shown = [
        [name, *(f"{number(getter(one))} -> {number(getter(two))}" for getter in _STAGE_NUMBERS)]
        for (name, one), two in zip(before.items(), after.values(), strict=True)
    ]
    table(["stage", "accuracy", "mean top", "ECE", "Brier", "NLL", "AURC"], shown, title=f"before -> after, on {on}")
    for text in warnings:
        warn(text)
    _say("next: calib optimize --calibrate auto --target 'p90<10s'")


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

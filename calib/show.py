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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calib.target import RATES, Target, parse_target

if TYPE_CHECKING:
    from calib.audit import Finding
    from calib.calibrate import Calibration
    from calib.campaign import Campaign
    from calib.confidences import ConfidenceRow
    from calib.crew import Progress
    from calib.diff import Difference, MetricChange
    from calib.doctor import Diagnosis
    from calib.export import Export
    from calib.history import Entry
    from calib.intervals import Interval
    from calib.live import Live
    from calib.outcomes import Outcomes
    from calib.policy import Evaluation, Policy
    from calib.promises import Finding as PromiseFinding
    from calib.shadow import Prediction
    from calib.staged import Headroom, StagedSummary
    from calib.stages import Stage
    from calib.store import StoreStatus
    from calib.tuning import Tuned
    from calib.watch import Report
    from calib.watching import Watched
    from calib.why import WhyRow

__all__ = [
    "ProgressLine",
    "calibration",
    "calibration_notes",
    "collected",
    "confidences",
    "confirm_headroom",
    "diagnosis",
    "difference",
    "duration",
    "echo_json",
    "evaluation",
    "exported",
    "history",
    "in_unit",
    "latency_hint",
    "live",
    "number",
    "percent",
    "policy_line",
    "predicted",
    "printable",
    "rolled_back",
    "route_loss",
    "seconds",
    "status",
    "table",
    "tell_headroom",
    "tuned",
    "verification_cells",
    "verified",
    "warn",
    "watch_changes",
    "watched",
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

    def asking(self, done: int, total: int, failed: int) -> None:
        """Show how many questions of a verification have their answer."""
        self("verify", done, total, note=f"{failed} failed" if failed else "")


def policy_line(policy: Policy) -> str:
    """One policy in words."""
    if policy.threshold == 0:
        return f"never think ({policy.arm})"
    routes = f", {len(policy.routes)} routes" if policy.routes else ""
    late = ""
    if policy.deadline is not None:
        late = f", deadline {seconds(policy.deadline)}" + (", then System 1" if policy.on_deadline == "system1" else "")
    return (
        f"threshold {policy.threshold:.4g}, mix {policy.mix:.3g}, think_budget {policy.think_budget:,}, "
        f"arm {policy.arm}{late}{routes}"
    )


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
    table(columns, rows, title=policy_line(policy) + _marked(marks))
    if result.unanswered:
        _say(f"{result.unanswered} questions without a usable answer of System 2 count as wrong")
    if result.clipped:
        _say(f"{result.clipped} right answers had a probability below 1e-12: NLL clips them there")
    if closed:
        _say(_closed(closed))
    if not math.isnan(result.cost):
        _say(f"cost {result.cost:.6g} a question")
    for text in warnings:
        warn(text)


def _closed(shares: Mapping[str, float]) -> str:
    closed, degraded = percent(shares["closed"]), percent(shares["degraded"])
    return f"the deadline closes the thought of {closed} of the questions; System 1 answers {degraded} in its place"


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
    shown = ", ".join(str(Path(result.folder, name)) for name in result.files)
    if result.unchanged:
        _say(f"unchanged: {shown} say this already; nothing was written")
    else:
        _say(f"wrote {shown}")
        _told_changes(result)
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


def _told_changes(result: Export) -> None:
    """What differs from the policy that was there; nothing to say where there was none."""
    if all(change.now is None for change in result.changes if change.what != "limits"):
        return
    knobs = [change for change in result.changes if change.differs]
    if not knobs:
        _say("the policy is the one that was there; its evidence or its files are new")
    for change in knobs:
        _say(f"  {change.what}: {_short(change.now or '-')} -> {_short(change.chosen or '-')}")


def route_loss(lost: Mapping[str, Any] | None) -> list[str]:
    """What it costs when no request can take the routes of a policy, in lines; none without a loss to tell."""
    if lost is None:
        return []
    if "unknown" in lost:
        return [f"what the routes are worth cannot be told: {lost['unknown']}"]
    one, two = lost["with"], lost["without"]
    parts = [
        f"accuracy {percent(one['accuracy'])} -> {percent(two['accuracy'])}",
        f"think rate {percent(one['think_rate'])} -> {percent(two['think_rate'])}",
        *(f"{name} {seconds(one[name])} -> {seconds(two[name])}" for name in ("p50", "p90", "p99")),
    ]
    return [f"all questions under the default policy, without the routes ({lost['n']:,} questions): {', '.join(parts)}"]


def live(found: Live) -> None:
    """Print each knob as a server has it, beside what it should be."""
    words = {True: "live", False: "NOT LIVE", None: "not known"}
    rows = [[k.knob, _short(k.wanted), _short(k.there or "-"), words[k.live], k.how] for k in found.knobs]
    version = "" if found.version is None else f", {found.version}"
    title = f"{found.url} ({found.what} of {found.running.model}{version})"
    table(["knob", "wanted", "there", "", "how"], rows, left=5, title=title)
    for text in found.notes:
        warn(text)
    missing = [knob.knob for knob in found.knobs if knob.live is False]
    unknown = [knob.knob for knob in found.knobs if knob.live is None]
    if missing:
        _say(f"NOT LIVE: {', '.join(missing)}")
    else:
        _say("live" + (f", as far as it can be told; not known: {', '.join(unknown)}" if unknown else ""))


def difference(found: Difference, before: str, after: str) -> None:
    """Print two policies side by side and what the difference means."""
    rows = [
        ["->" if change.differs else "", change.what, _short(change.now or "-"), _short(change.chosen or "-")]
        for change in found.changes
    ]
    _say(f"A: {before}")
    _say(f"B: {after}")
    table(["", "", "A", "B"], rows, left=4)
    if found.metrics:
        on = "held-out questions" if found.on == "test" else "the tune questions"
        cells = [
            [metric.metric, *(_metric(metric.metric, value) for value in (metric.now, metric.chosen)), _step(metric)]
            for metric in found.metrics
        ]
        _say()
        table([f"on {on}", "A", "B", "B - A"], cells)
    _say()
    for text in found.meaning:
        _say(f"- {text}")
    for text in found.notes:
        warn(text)


def _metric(metric: str, value: float | None) -> str:
    return "-" if value is None else in_unit(Target(metric, "<", 0.0), value)


def _step(metric: MetricChange) -> str:
    step = metric.difference
    return "-" if step is None else ("-" if step < 0 else "+") + apart(Target(metric.metric, "<", 0.0), abs(step))


def history(entries: Sequence[Entry], now: Mapping[str, str]) -> None:
    """Print the states of an export folder, the newest first."""
    if not entries:
        _say("no history: nothing was exported there yet")
        return
    rows = [
        [
            f"{entry.number}{' now' if dict(entry.files) == dict(now) else ''}",
            entry.at,
            entry.action,
            "-" if entry.policy is None else policy_line(entry.policy),
            entry.note,
        ]
        for entry in entries
    ]
    table(["entry", "when", "what", "policy", "why"], rows, left=5)


def rolled_back(folder: str, wanted: Entry, done: Entry, was: Mapping[str, Any] | None) -> None:
    """Print what a roll back put back, and what to look out for."""
    policy = "" if done.policy is None else f": {policy_line(done.policy)}"
    _say(f"{folder} is as it was in entry {wanted.number}{policy}. Entered as {done.number}: {done.note}")
    models = [(document or {}).get("model") for document in (was, done.document)]
    if None not in models and models[0] != models[1]:
        warn(f"that policy is for {models[1]}, and what was there for {models[0]}: serve the model that it is for")
    _say("a gateway that serves this file reads it again by itself; the server reads serve.env when it is started")


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def confirm_headroom(headroom: Headroom) -> bool:
    """Show what thinking could win and would cost, and ask whether to go on."""
    for text in headroom.lines():
        _say(text, err=True)
    return click.confirm("go on with the thoughts?", default=True, err=True)


def tell_headroom(headroom: Headroom) -> bool:
    """Show the same where nobody can be asked, and go on."""
    for text in headroom.lines():
        _say(text, err=True)
    _say("no terminal to ask on: it goes on (Ctrl-C stops it; --yes goes on only while it pays)", err=True)
    return True


def collected(result: Campaign, store: str) -> None:
    """Print what a collection came to and what to type next."""
    arms = result.arms
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
        length = ""
        if not math.isnan(one.acceptance_length):
            length = f", acceptance length {one.acceptance_length:.2f} of at most {one.acceptance_length_max:.3g}"
            length += f", {one.acceptance_share:.0%} of at most 100 % of the drafts accepted"
        _say(f"latency of {one.arm} at {one.concurrency}: {one.state}, {one.timed} questions{length}{note}")
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
    if stages.ended == "ended after the pilot":
        _say("to go on: the same command with --yes, or with --all for every question")


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
    _audits(findings)
    for policy in found.policies:
        _say(f"policy {policy.name!r}: {policy.document.get('verdict')}, saved {policy.created}")


def _audits(findings: Sequence[Finding]) -> None:
    """What the audits say, but for what is fine and for notes on single datasets."""
    if not findings:
        return
    fine = sum(f.level == "ok" for f in findings)
    told = [f for f in findings if f.level != "ok" and (f.level != "note" or f.dataset is None)]
    rows = [[f.level, f.audit, f.arm or "-", f.dataset or "-", f.text] for f in told]
    table(["level", "audit", "arm", "dataset", "finding"], rows, left=5, title="\naudits")
    rest = len(findings) - fine - len(told)
    _say(f"{fine} audits are ok" + (f"; {rest} notes on single datasets: calib status --json" if rest else ""))


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
    _limits(found, document)
    for text in document["warnings"]:
        warn(text)
    kept = [] if store == DEFAULT_STORE else ["--store", store]
    kept += ["--allow-simulated"] * ("simulated" in document["marks"])
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


def _limits(found: Tuned, document: Mapping[str, Any]) -> None:
    """What the search knows beside the policy: the optimum, the price of each limit, the load."""
    exact = found.best
    unit = Target(exact.metric, "<", 0.0)
    _say(f"best of the data ({exact.method}): {exact.metric} {in_unit(unit, exact.objective)} on the tune questions")
    if not math.isnan(found.margin_cost):
        _say(f"the margin below the limits costs {apart(unit, found.margin_cost)} there; --margin 0 leaves none")
    _deadline(found, document)
    study = document["study"]
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


def _deadline(found: Tuned, document: Mapping[str, Any]) -> None:
    """What a deadline changes, where one was asked for."""
    if found.without_deadline is None:
        return
    without, metric = found.without_deadline, Target(found.best.metric, "<", 0.0)
    tried = ", ".join(dict.fromkeys(seconds(one.deadline) for one in found.tried)) or "none closes a thought"
    if found.best.policy is None or found.best.policy.deadline is None:
        _say(f"no deadline does better (tried: {tried})")
    elif without.policy is None:
        _say(f"no policy meets the targets without a deadline (tried: {tried})")
    else:
        gain = apart(metric, document["deadline"]["gain"])
        _say(f"without a deadline: {in_unit(metric, without.objective)}, {gain} worse (tried: {tried})")
    shares = document["deadline"]["test"] or document["deadline"]["tune"]
    if shares is not None:
        _say(_closed(shares))


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
    _audits(found.audits)
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
    _say()
    title = f"--confidence: the exact optimum with each, on {n:,} tune questions, uncalibrated"
    table(["confidence", "AURC", "best accuracy", "think rate"], cells, title=title)


def calibration_notes(warnings: Sequence[str]) -> None:
    """Print what to mind of a calibration, and what to type next."""
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


def verification_cells(line: Mapping[str, Any]) -> list[str]:
    """Metric, predicted, measured (each with its interval) and verdict of one line of a verification."""
    show = seconds if line["metric"] in ("p50", "p90", "p99") else number if line["metric"] == "tokens" else percent

    def cell(part: Mapping[str, Any]) -> str:
        low, high = part["interval"]
        text = show(part["value"])
        return text if low is None and high is None else f"{text} [{show(low)}, {show(high)}]"

    return [line["metric"].replace("_", " "), cell(line["predicted"]), cell(line["measured"]), line["verdict"]]


def verified(document: Mapping[str, Any]) -> None:
    """Print predicted beside measured, whether the targets hold, and what differs."""
    load = document["load"]
    at = f"{number(load['rate'])} requests/s" if load["rate"] is not None else f"{load['concurrency']} in flight"
    _say(
        f"{document['name']} (version {document['policy_version']}) on arm {document['arm']} at {document['url']}: "
        f"{document['n']:,} held-out questions, {at}, {duration(document['seconds'])}{_marked(document['marks'])}"
    )
    for text in document["warnings"]:
        warn(text)
    _say()
    rows = [verification_cells(line) for line in document["lines"]]
    table(["", "predicted", "measured", "verdict"], [[*row[:3], row[3]] for row in rows])
    _say()
    if document["targets"]:
        met = {True: "yes", False: "NO", None: "unknown"}
        rows = [
            [
                one["target"],
                _target_value(one["target"], one["predicted"]),
                _target_value(one["target"], one["value"]),
                met[one["met"]],
                {True: "yes", False: "no", None: "-"}[one["certified"]],
            ]
            for one in document["targets"]
        ]
        table(["target", "predicted", "measured", "met", "certified by this run"], rows)
    if document["certificate"] is not None:
        _say(document["certificate"]["statement"])
    _obedience(document)
    _differences(document["differences"], document["n"])
    verdicts = {"kept": "every target is met", "missed": "a target is missed", "no_targets": "no target to look at"}
    _say(f"   {verdicts[document['verdict']]}", head=click.style(f"verdict: {document['verdict']}", bold=True))


def _target_value(target: str, value: float | None) -> str:
    return "-" if value is None else in_unit(parse_target(target), value)


def _obedience(document: Mapping[str, Any]) -> None:
    """Budget and deadline, where they are kept; where not, a warning says so."""
    budget, deadline = document["obedience"]["think_budget"], document["obedience"]["deadline"]
    if not budget["broken"]:
        _say(f"think budget: none of {budget['n']:,} thoughts is longer")
    if deadline is not None and not deadline["broken"]:
        _say(f"deadline {seconds(deadline['limit'])}: none of {deadline['n']:,} answers came later")


def _differences(found: Mapping[str, Any], n: int) -> None:
    from calib.predicted import REASONS

    if not found["n"]:
        _say(f"every answer, and every decision to think, is the predicted one ({n:,} questions)")
        return
    _say(
        f"{found['n']:,} of {n:,} decisions are not the predicted ones: {found['answers']:,} other answers, "
        f"{found['thinking']:,} times thinking instead of not, or the reverse"
    )
    for reason, count in found["reasons"].items():
        first = next((one for one in found["examples"] if one["reason"] == reason), None)
        instance = f", for instance {first['question']}: {first['detail']}" if first else ""
        _say(f"  {count:,}: {REASONS[reason]}{instance}")


_STATE_STYLE = {"ok": "green", "at_risk": "yellow", "broken": "red"}
_STATE_WORD = {"ok": "ok", "at_risk": "at risk", "broken": "broken"}


def watched(found: Watched) -> None:
    """Print whether each promise holds, what is shown beside them, and what to do."""
    report = found.report
    span = "" if math.isnan(report.first) else f", {_moment(report.first)} to {_moment(report.last)}"
    source = f"{report.n:,} requests under {found.policy_file} (version {found.version}){span}"
    _say(f"   {source}", head=click.style(_STATE_WORD[report.state], fg=_STATE_STYLE[report.state], bold=True))
    for finding in report.findings:
        _finding(finding)
    _say()
    shown = report.shown
    rows = [
        ["closed by the deadline", percent(shown["closed"]), percent(shown["closed_promised"])],
        ["System 1 in place of System 2", percent(shown["degraded"]), percent(shown["degraded_promised"])],
        ["tokens a request", number(shown["tokens"]), number(shown["tokens_promised"])],
        ["tokens/s of a thought", number(shown["speed"]), number(shown["speed_promised"])],
        *([name, seconds(shown[name]), seconds(shown[f"{name}_promised"])] for name in ("p50", "p90", "p99")),
    ]
    table(["shown, not tested", "traffic", "questions" + _marked(report.marks)], rows)
    _mixture(report)
    _say(report.about)
    for reason, count in sorted(report.left_out.items()):
        _say(f"left out: {count:,} requests, {reason}")
    if found.broken_lines:
        warn(f"{found.broken_lines:,} lines of the log are no decision")
    for text in report.advice:
        _say(f"do: {text}")


def watch_changes(before: Report | None, now: Watched, *, as_json: bool) -> None:
    """Print the promises whose state changed, one line each; nothing at first when all are ok."""
    from calib.watching import changes

    for finding in changes(before, now.report):
        if as_json:
            line = {"at": now.report.last, "requests": now.report.n} | finding.to_dict()
            click.echo(json.dumps(_plain(line), ensure_ascii=False, allow_nan=False))
        else:
            _finding(finding, at=now.report.last)
    sys.stdout.flush()  # whoever reads the other end of a pipe waits for this line


def _finding(finding: PromiseFinding, at: float = math.nan) -> None:
    when = "" if math.isnan(at) else f"{_moment(at)}  "
    alarm = "" if finding.alarm is None else f" (broken since request {finding.alarm:,}{_when(finding.alarm_at)})"
    state = click.style(_STATE_WORD[finding.state].ljust(8), fg=_STATE_STYLE[finding.state])
    _say(finding.text + alarm, head=f"{when}{state}")


def _when(at: float) -> str:
    return "" if math.isnan(at) else f", {_moment(at)}"


def _moment(at: float) -> str:
    """Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _mixture(report: Report) -> None:
    """Datasets whose share of the traffic is far from that of the questions."""
    for name, row in report.datasets.items():
        share, was = _known(row["share"]), row["share_promised"]
        if name and was is not None and abs(share - was) >= 0.1:
            _say(f"{name}: {percent(share)} of the traffic, {percent(was)} of the questions")


def predicted(found: Prediction) -> None:
    """Print what a policy would do on traffic that System 1 alone answered."""
    _say(f"{policy_line(found.policy)}, on {found.n:,} requests{_marked(found.marks)}")
    unit = {"think_rate": percent, "cut": percent, "tokens": number}
    words = {"think_rate": "think rate", "cut": "cut thoughts, of all requests", "tokens": "tokens a request"}
    rows = []
    for name, value in found.values.items():
        shown = unit.get(name, seconds)
        rows.append([words.get(name, name), shown(value.value), f"{shown(value.low)} to {shown(value.high)}"])
    table(["predicted", "value", f"interval, {percent(found.level, 0)}"], rows)
    if not math.isnan(found.rate):
        needs = [
            ["requests/s", number(found.rate), "", number(found.peak), ""],
            ["thinking tokens/s", *_between(found.tokens_per_second), *_between(found.tokens_per_second_peak)],
            ["requests in flight", *_between(found.in_flight), *_between(found.in_flight_peak)],
            ["servers like the collected one", *_between(found.servers), *_between(found.servers_peak)],
        ]
        _say()
        table(["needed", "all the time", "interval", "busiest minute", "interval"], needs)
    bands = [
        [
            f"{band.low:.3f} to {band.high:.3f}",
            percent(band.traffic),
            percent(band.collected),
            f"{band.n:,}" + (" (none thought)" if band.borrowed else ""),
            percent(band.thinks),
        ]
        for band in found.bands
    ]
    _say()
    table(["confidence", "traffic", "questions", "n", "think"], bands)
    _say(f"both distributions differ by {percent(found.distance)}; seconds are those of the collected load")
    for text in found.warnings:
        warn(text)


def _between(interval: Interval) -> tuple[str, str]:
    """A value and its interval as two cells."""
    value, low, high = interval
    return number(value), "-" if _unknown(value) else f"{number(low)} to {number(high)}"

"""What the commands print that bring a policy to a server and watch it there."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calib.jsonnumbers import finite
from calib.show.text import (
    apart,
    duration,
    in_unit,
    is_unknown,
    known,
    marked_with,
    number,
    percent,
    policy_line,
    say,
    seconds,
    short,
    table,
    warn,
)
from calib.target import Target, parse_target

if TYPE_CHECKING:
    from calib.diff import Difference, MetricChange
    from calib.export import Export
    from calib.history import Entry
    from calib.intervals import Interval
    from calib.live import Live
    from calib.promises import Finding as PromiseFinding
    from calib.shadow import Prediction
    from calib.watch import Report
    from calib.watching import Watched

__all__ = [
    "difference",
    "exported",
    "history",
    "live",
    "predicted",
    "rolled_back",
    "route_loss",
    "verification_cells",
    "verified",
    "watch_changes",
    "watched",
]


def exported(result: Export) -> None:
    """Print what an export wrote and who must hold each knob."""
    shown = ", ".join(str(Path(result.folder, name)) for name in result.files)
    if result.unchanged:
        say(f"unchanged: {shown} say this already; nothing was written")
    else:
        say(f"wrote {shown}")
        _told_changes(result)
    rows = [[knob.knob, short(knob.value), knob.holder, knob.how] for knob in result.knobs]
    table(["knob", "value", "held by", "how"], rows, left=4)
    for text in result.warnings:
        warn(text)
    if result.done:
        say("done: every knob is held")
    else:
        free = ", ".join(knob.knob for knob in result.knobs if knob.holder == "nobody")
        by_client = "" if result.refused else ", or let the clients send decide-defaults.json (--held-by client)"
        say(
            f"NOT DONE: nobody holds {free} yet. Serve by the gateway (--held-by gateway){by_client}, and export again "
            "with that option"
        )


def _told_changes(result: Export) -> None:
    """What differs from the policy that was there; nothing to say where there was none."""
    if all(change.now is None for change in result.changes if change.what != "limits"):
        return
    knobs = [change for change in result.changes if change.differs]
    if not knobs:
        say("the policy is the one that was there; its evidence or its files are new")
    for change in knobs:
        say(f"  {change.what}: {short(change.now or '-')} -> {short(change.chosen or '-')}")


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
    rows = [[k.knob, short(k.wanted), short(k.there or "-"), words[k.live], k.how] for k in found.knobs]
    version = "" if found.version is None else f", {found.version}"
    title = f"{found.url} ({found.what} of {found.running.model}{version})"
    table(["knob", "wanted", "there", "", "how"], rows, left=5, title=title)
    for text in found.notes:
        warn(text)
    missing = [knob.knob for knob in found.knobs if knob.live is False]
    unknown = [knob.knob for knob in found.knobs if knob.live is None]
    if missing:
        say(f"NOT LIVE: {', '.join(missing)}")
    else:
        say("live" + (f", as far as it can be told; not known: {', '.join(unknown)}" if unknown else ""))


def difference(found: Difference, before: str, after: str) -> None:
    """Print two policies side by side and what the difference means."""
    rows = [
        ["->" if change.differs else "", change.what, short(change.now or "-"), short(change.chosen or "-")]
        for change in found.changes
    ]
    say(f"A: {before}")
    say(f"B: {after}")
    table(["", "", "A", "B"], rows, left=4)
    if found.metrics:
        on = "held-out questions" if found.on == "test" else "the tune questions"
        cells = [
            [metric.metric, *(_metric(metric.metric, value) for value in (metric.now, metric.chosen)), _step(metric)]
            for metric in found.metrics
        ]
        say()
        table([f"on {on}", "A", "B", "B - A"], cells)
    say()
    for text in found.meaning:
        say(f"- {text}")
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
        say("no history: nothing was exported there yet")
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
    say(f"{folder} is as it was in entry {wanted.number}{policy}. Entered as {done.number}: {done.note}")
    models = [(document or {}).get("model") for document in (was, done.document)]
    if None not in models and models[0] != models[1]:
        warn(f"that policy is for {models[1]}, and what was there for {models[0]}: serve the model that it is for")
    say("a gateway that serves this file reads it again by itself; the server reads serve.env when it is started")


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
    say(
        f"{document['name']} (version {document['policy_version']}) on arm {document['arm']} at {document['url']}: "
        f"{document['n']:,} held-out questions, {at}, {duration(document['seconds'])}{marked_with(document['marks'])}"
    )
    _predicted_from(load)
    for text in document["warnings"]:
        warn(text)
    say()
    rows = [verification_cells(line) for line in document["lines"]]
    table(["", "predicted", "measured", "verdict"], [[*row[:3], row[3]] for row in rows])
    say()
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
        say(document["certificate"]["statement"])
    _obedience(document)
    _differences(document["differences"], document["n"])
    verdicts = {"kept": "every target is met", "missed": "a target is missed", "no_targets": "no target to look at"}
    say(f"   {verdicts[document['verdict']]}", head=click.style(f"verdict: {document['verdict']}", bold=True))


def _predicted_from(load: Mapping[str, Any]) -> None:
    """What the predicted seconds rest on, where it is more than those of one load."""
    rests_on = load["predicted_from"]
    if rests_on["in_flight"] is None:
        return
    estimated = rests_on["estimated"]
    at = ", ".join(f"{one}{' (estimated)' if one in estimated else ''}" for one in rests_on["concurrency"])
    capacity = ""
    if rests_on["capacity"] is not None:
        least = "at least " if rests_on["lower_bound"] else ""
        capacity = f"; these show {least}{rests_on['capacity']:.3g} requests/s to be possible"
    say(
        f"predicted for these arrivals from seconds at {at} in flight: {rests_on['in_flight']:.3g} in flight "
        f"on average (measured {load['in_flight']:.3g}){capacity}"
    )


def _target_value(target: str, value: float | None) -> str:
    return "-" if value is None else in_unit(parse_target(target), value)


def _obedience(document: Mapping[str, Any]) -> None:
    """Budget and deadline, where they are kept; where not, a warning says so."""
    budget, deadline = document["obedience"]["think_budget"], document["obedience"]["deadline"]
    if not budget["broken"]:
        say(f"think budget: none of {budget['n']:,} thoughts is longer")
    if deadline is not None and not deadline["broken"]:
        say(f"deadline {seconds(deadline['limit'])}: none of {deadline['n']:,} answers came later")


def _differences(found: Mapping[str, Any], n: int) -> None:
    from calib.predicted import REASONS

    if not found["n"]:
        say(f"every answer, and every decision to think, is the predicted one ({n:,} questions)")
        return
    say(
        f"{found['n']:,} of {n:,} decisions are not the predicted ones: {found['answers']:,} other answers, "
        f"{found['thinking']:,} times thinking instead of not, or the reverse"
    )
    for reason, count in found["reasons"].items():
        first = next((one for one in found["examples"] if one["reason"] == reason), None)
        instance = f", for instance {first['question']}: {first['detail']}" if first else ""
        say(f"  {count:,}: {REASONS[reason]}{instance}")


_STATE_STYLE = {"ok": "green", "at_risk": "yellow", "broken": "red"}


_STATE_WORD = {"ok": "ok", "at_risk": "at risk", "broken": "broken"}


def watched(found: Watched) -> None:
    """Print whether each promise holds, what is shown beside them, and what to do."""
    report = found.report
    span = "" if math.isnan(report.first) else f", {_moment(report.first)} to {_moment(report.last)}"
    source = f"{report.n:,} requests under {found.policy_file} (version {found.version}){span}"
    say(f"   {source}", head=click.style(_STATE_WORD[report.state], fg=_STATE_STYLE[report.state], bold=True))
    for finding in report.findings:
        _finding(finding)
    say()
    shown = report.shown
    rows = [
        ["closed by the deadline", percent(shown["closed"]), percent(shown["closed_promised"])],
        ["System 1 in place of System 2", percent(shown["degraded"]), percent(shown["degraded_promised"])],
        ["tokens a request", number(shown["tokens"]), number(shown["tokens_promised"])],
        ["tokens/s of a thought", number(shown["speed"]), number(shown["speed_promised"])],
        *([name, seconds(shown[name]), seconds(shown[f"{name}_promised"])] for name in ("p50", "p90", "p99")),
    ]
    table(["shown, not tested", "traffic", "questions" + marked_with(report.marks)], rows)
    _mixture(report)
    say(report.about)
    for reason, count in sorted(report.left_out.items()):
        say(f"left out: {count:,} requests, {reason}")
    if found.broken_lines:
        warn(f"{found.broken_lines:,} lines of the log are no decision")
    for text in report.advice:
        say(f"do: {text}")


def watch_changes(before: Report | None, now: Watched, *, as_json: bool) -> None:
    """Print the promises whose state changed, one line each; nothing at first when all are ok."""
    from calib.watching import changes

    for finding in changes(before, now.report):
        if as_json:
            line = {"at": now.report.last, "requests": now.report.n} | finding.to_dict()
            click.echo(json.dumps(finite(line), ensure_ascii=False, allow_nan=False))
        else:
            _finding(finding, at=now.report.last)
    sys.stdout.flush()  # whoever reads the other end of a pipe waits for this line


def _finding(finding: PromiseFinding, at: float = math.nan) -> None:
    when = "" if math.isnan(at) else f"{_moment(at)}  "
    alarm = "" if finding.alarm is None else f" (broken since request {finding.alarm:,}{_when(finding.alarm_at)})"
    state = click.style(_STATE_WORD[finding.state].ljust(8), fg=_STATE_STYLE[finding.state])
    say(finding.text + alarm, head=f"{when}{state}")


def _when(at: float) -> str:
    return "" if math.isnan(at) else f", {_moment(at)}"


def _moment(at: float) -> str:
    """Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _mixture(report: Report) -> None:
    """Datasets whose share of the traffic is far from that of the questions."""
    for name, row in report.datasets.items():
        share, was = known(row["share"]), row["share_promised"]
        if name and was is not None and abs(share - was) >= 0.1:
            say(f"{name}: {percent(share)} of the traffic, {percent(was)} of the questions")


def predicted(found: Prediction) -> None:
    """Print what a policy would do on traffic that System 1 alone answered."""
    say(f"{policy_line(found.policy)}, on {found.n:,} requests{marked_with(found.marks)}")
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
        say()
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
    say()
    table(["confidence", "traffic", "questions", "n", "think"], bands)
    say(f"both distributions differ by {percent(found.distance)}; seconds are those of the collected load")
    for text in found.warnings:
        warn(text)


def _between(interval: Interval) -> tuple[str, str]:
    """A value and its interval as two cells."""
    value, low, high = interval
    return number(value), "-" if is_unknown(value) else f"{number(low)} to {number(high)}"

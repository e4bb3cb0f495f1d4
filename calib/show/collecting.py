"""What the commands that fill a store print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from calib.show.text import duration, number, say, seconds, table, warn

if TYPE_CHECKING:
    from calib.audit import Finding
    from calib.campaign import Campaign
    from calib.doctor import Diagnosis
    from calib.staged import Headroom, StagedSummary
    from calib.store import StoreStatus

__all__ = [
    "collected",
    "confirm_headroom",
    "diagnosis",
    "status",
    "tell_headroom",
]


_MOST_RUNS = 5  # of calib verify that are listed


def confirm_headroom(headroom: Headroom) -> bool:
    """Show what thinking could win and would cost, and ask whether to go on."""
    for text in headroom.lines():
        say(text, err=True)
    return click.confirm("go on with the thoughts?", default=True, err=True)


def tell_headroom(headroom: Headroom) -> bool:
    """Show the same where nobody can be asked, and go on."""
    for text in headroom.lines():
        say(text, err=True)
    say("no terminal to ask on: it goes on (Ctrl-C stops it; --yes goes on only while it pays)", err=True)
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
            say(f"arm {arm.arm} failed: {reasons}. See calib status; ask again with --retry-failed")
        if arm.failed_before:
            say(f"arm {arm.arm}: {arm.failed_before} questions failed before; ask again with --retry-failed")
    if result.stages is not None:
        _stages(result.stages)
    for one in result.passes:
        note = f": {one.note}" if one.note else ""
        length = ""
        if not math.isnan(one.acceptance_length):
            length = f", acceptance length {one.acceptance_length:.2f} of at most {one.acceptance_length_max:.3g}"
            length += f", {one.acceptance_share:.0%} of at most 100 % of the drafts accepted"
        say(f"latency of {one.arm} at {one.concurrency}: {one.state}, {one.timed} questions{length}{note}")
    if result.simulated:
        say("simulated: no real model answered; the numbers say nothing about a real server")
    for text in result.warnings:
        warn(text)
    if result.interrupted:
        say("stopped before the end; the same command goes on")
    else:
        say(f"next: calib optimize --store {store} --target 'p90<10s'")


def _stages(stages: StagedSummary) -> None:
    """What the stages did, and why they ended."""
    if stages.headroom is not None:
        for text in stages.headroom.lines():
            say(text)
    say(
        f"{stages.thoughts:,} of {stages.questions:,} questions have a thought; {len(stages.rounds)} rounds, "
        f"{stages.tokens:,} thinking tokens, about {stages.gpu_hours:.2g} GPU hours (estimate)"
    )
    say(f"ended: {stages.ended}")
    if stages.ended == "ended after the pilot":
        say("to go on: the same command with --yes, or with --all for every question")


def status(found: StoreStatus, findings: Sequence[Finding] = ()) -> None:
    """Print what a store holds, what failed and why, and what the audits say."""
    say(f"{found.location}: {sum(found.questions.values()):,} questions, schema {found.schema_version}")
    for model in found.models:
        mark = "   [simulated]" if model.simulated else ""
        say(
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
            say(
                f"arm {arm}: seconds estimated from {1000 * rate.system1_s:g} ms System 1, "
                f"{rate.tokens_per_second:g} tokens/s, {1000 * rate.read_s:g} ms answer read"
            )
        if model.failures:
            rows = [
                [f.arm, f.stage, f.reason, f"{f.questions:,}", ", ".join(f.examples[:3]), f.detail]
                for f in model.failures
            ]
            table(["arm", "stage", "failure", "questions", "for instance", "last"], rows, left=3)
            say("ask again with: calib collect ... --retry-failed")
    _audits(findings)
    for policy in found.policies:
        say(f"policy {policy.name!r}: {policy.document.get('verdict')}, saved {policy.created}")
    for run in found.verifications[-_MOST_RUNS:]:
        say(f"verified {run['name']!r} on arm {run['arm']} at {run['url']}: {run['verdict']}, {run['at']}")


def _audits(findings: Sequence[Finding]) -> None:
    """What the audits say, but for what is fine and for notes on single datasets."""
    if not findings:
        return
    fine = sum(f.level == "ok" for f in findings)
    told = [f for f in findings if f.level != "ok" and (f.level != "note" or f.dataset is None)]
    rows = [[f.level, f.audit, f.arm or "-", f.dataset or "-", f.text] for f in told]
    table(["level", "audit", "arm", "dataset", "finding"], rows, left=5, title="\naudits")
    rest = len(findings) - fine - len(told)
    say(f"{fine} audits are ok" + (f"; {rest} notes on single datasets: calib status --json" if rest else ""))


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
        say(text)
    _audits(found.audits)
    for text in found.problems:
        warn(text)
    say("ok" if found.ok else f"{len(found.problems)} problems")

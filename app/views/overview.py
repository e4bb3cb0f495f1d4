"""Page 1: three answers first, then whether thinking helps, then what the store holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import streamlit as st

from calib import audit, figures
from calib.errors import CalibError
from calib.intervals import Comparison
from calib.show import percent, seconds, verification_cells
from calib.store import ModelStatus, Store
from calib.store.contents import counts
from calib.why import hurting
from views import parts, shell

FOLLOW_SECONDS = 3.0
"""How often the counts of a store are read again."""


def page() -> None:
    """Draw the page."""
    now = shell.bench()
    parts.header("Overview", now, "What tuning gains, which policy, and how far to trust it.")
    _answers(now)
    _verified(now)
    _thinking(now)
    st.subheader("What the store holds", anchor=False)
    _follow()
    _coverage(now)


def _answers(now: shell.Bench) -> None:
    ours = now.space.marked("current", now.policy).values[None]
    default = now.space.marked("default", now.space.baselines["default"]).values[None]
    document = now.document
    gain, which, trust = st.container(key="cards-answers").columns(3, border=True)
    with gain:
        st.markdown("**What does it gain?**")
        if document is not None and document.get("test"):
            _measured_gain(document)
        else:
            st.metric(
                "Accuracy", percent(ours["accuracy"]), f"{100 * (ours['accuracy'] - default['accuracy']):+.1f} points"
            )
            st.caption("against the published default, on the tune questions")
            _seconds_gained(ours, default)
    with which:
        st.markdown("**Which policy?**")
        st.write(shell.plain(now.label(now.view.name)))
        st.markdown(
            f"Think below a confidence of **{now.policy.threshold:.3f}**, for at most "
            f"**{now.policy.think_budget:,}** tokens; then weigh System 2 with **{now.policy.mix:.2f}**. "
            f"Serve it as **{shell.plain(now.policy.arm)}**."
        )
        st.caption(
            f"It thinks about {percent(ours['think_rate'])} of the questions, "
            f"{ours['tokens']:,.0f} tokens each on average over all."
        )
    with trust:
        st.markdown("**How far to trust it?**")
        if document is None:
            st.write(
                "Not tested. These are figures of the tune questions, which flatter a policy that was chosen on them."
            )
            st.caption("Certify it on the page Write back, or run: calib optimize")
        else:
            certificate = document.get("certificate") or {}
            st.markdown(parts.VERDICTS.get(document["verdict"], ""))
            st.write(shell.plain(certificate.get("statement") or "Tuned without a test."))
    if document is not None:
        _differences(now, document)


def _verified(now: shell.Bench) -> None:
    """The last run of `calib verify` under the policy that is shown."""
    with Store.open(now.settings.store, read_only=True) as store:
        runs = [run for run in store.verifications() if run.summary.get("policy") == now.policy.to_dict()]
    if not runs:
        return
    run, found = runs[-1], runs[-1].summary
    st.subheader("Predicted beside measured", anchor=False)
    colour = {"kept": "green", "missed": "red"}.get(found["verdict"], "blue")
    load = f"{run.rate:g} requests/s" if run.rate is not None else f"{run.concurrency} requests in flight"
    where = shell.plain(f"{run.at[:16].replace('T', ' ')} UTC, {found['n']:,} held-out questions, {load}, at")
    st.markdown(f":{colour}-badge[{found['verdict'].replace('_', ' ')}] {where} `{run.url}`")
    names = ("metric", "predicted [interval]", "measured [interval]", "verdict")
    rows = [dict(zip(names, verification_cells(line), strict=True)) for line in found["lines"]]
    st.dataframe(rows, hide_index=True)
    certificate = (found.get("certificate") or {}).get("statement")
    for text in (*([certificate] if certificate else []), *found["warnings"]):
        st.caption(shell.plain(text))
    if len(runs) > 1:
        st.caption(f"The last of {len(runs)} runs of calib verify under this policy.")


def _measured_gain(document: dict[str, Any]) -> None:
    """The gain on the questions that were held out."""
    test, default = document["test"], (document.get("baselines") or {}).get("default") or {}
    difference, theirs = default.get("difference") or {}, default.get("test") or {}
    change = difference.get("difference")
    delta = None if change is None else f"{100 * change:+.1f} points"
    st.metric("Accuracy on held-out questions", percent(test["accuracy"]["value"]), delta)
    if difference.get("sentence"):
        st.caption(f"{difference['sentence']} (the published default)")
    _seconds_gained(
        {name: _number(test.get(name)) for name in ("p90", "p99")},
        {name: _number(theirs.get(name)) for name in ("p90", "p99")},
    )


def _number(entry: Mapping[str, Any] | None) -> float:
    value = (entry or {}).get("value")
    return math.nan if value is None else float(value)


def _seconds_gained(ours: Mapping[str, float], default: Mapping[str, float]) -> None:
    if math.isnan(ours["p90"]):
        st.caption("Seconds are not known: import with rates, or measure them with calib collect.")
        return
    known = not math.isnan(default["p90"])
    delta = f"{ours['p90'] - default['p90']:+.2f} s" if known and ours["p90"] != default["p90"] else None
    st.metric("p90", seconds(ours["p90"]), delta, delta_color="inverse")
    st.caption(f"p99 {seconds(ours['p99'])}" + (f" instead of {seconds(default['p99'])}" if known else ""))


def _differences(now: shell.Bench, document: dict[str, Any]) -> None:
    """Accuracy against each baseline, as `calib optimize` measured it."""
    rows = []
    for name, baseline in (document.get("baselines") or {}).items():
        d = baseline.get("difference")
        if d and d.get("interval") and None not in d["interval"]:
            low, high = d["interval"]
            level = float((document.get("certificate") or {}).get("level", 0.95))
            label = shell.BASELINES.get(name, name)
            rows.append(
                Comparison(label, d["n"], d["difference"], low, high, d["gained"], d["lost"], d["p_value"], level)
            )
    if rows:
        st.subheader("Against what one would serve without tuning", anchor=False)
        held = "held-out" if document.get("test") else "tune"
        figure = figures.differences(rows, marks=document.get("marks") or (), theme=now.theme)
        parts.chart(parts.untitled(figure, "Difference of accuracy (percentage points)"), "differences")
        st.caption(
            f"Difference of accuracy on {rows[0].n:,} {held} questions, with its interval: right of 0 is better."
        )


def _thinking(now: shell.Bench) -> None:
    st.subheader("Does thinking help?", anchor=False)
    try:
        rows = now.space.why(now.policy)
    except CalibError as error:
        st.info(shell.plain(str(error)))
        return
    whole = [row for row in rows if row.low is None]
    figure = figures.thinking_helps(whole, theme=now.theme)
    parts.chart(parts.untitled(figure, "Questions that change (%)"), "thinking")
    st.caption(
        f"When every question thinks, budget {now.policy.think_budget:,}, mix {now.policy.mix:.2f}: answers that turn "
        "from wrong to right, against those that turn from right to wrong."
    )
    for row in hurting(rows):
        if row.proven:
            st.warning(shell.plain(f"{row.dataset}: {row.reason}"))


@st.fragment(run_every=FOLLOW_SECONDS)
def _follow() -> None:
    """Live counts; the figures stay as they are until they are asked to follow."""
    now = shell.bench()
    try:
        with Store.open(now.settings.store, read_only=True) as store:
            found = counts(store)
    except CalibError as error:
        st.warning(shell.plain(str(error)))
        return
    before = {(arm.model, arm.arm): arm.answers for arm in now.found.counts.arms}
    columns = parts.tiles(min(6, 2 + len(found.arms)), "counts")
    columns[0].metric("Questions", f"{found.questions:,}")
    for column, arm in zip(columns[1:-1], found.arms, strict=False):
        column.metric(f"Answers of {arm.arm}", f"{arm.answers:,}")
    columns[-1].metric("Failed", f"{sum(arm.failures for arm in found.arms):,}")
    new = sum(arm.answers - before.get((arm.model, arm.arm), 0) for arm in found.arms)
    if new:
        st.info(f"The store is being filled: {new:+,} answers since these figures were drawn.")
        if st.button("Draw them again", on_click=shell.refresh):
            st.rerun(scope="app")


@st.cache_resource(max_entries=4, show_spinner="Counting ...")
def _status(location: str, content: str, fingerprint: str) -> tuple[ModelStatus, list[audit.Finding]]:  # noqa: ARG001
    """Coverage, failures and audits; ``content`` makes another call of another content."""
    with Store.open(location, read_only=True) as store:
        model = next(one for one in store.status().models if one.fingerprint == fingerprint)
        return model, audit.findings(store, model=fingerprint)


def _coverage(now: shell.Bench) -> None:
    if not st.toggle(
        "Coverage, failures and audits", key="coverage", help="Counts every row: some seconds when large."
    ):
        return
    model, found = _status(now.found.location, now.found.content, now.outcomes.fingerprint)
    rows = [
        {
            "dataset": count.dataset,
            "arm": count.arm,
            "System 1": count.system1,
            **{f"{budget:,} tokens": count.budgets.get(budget, 0) for budget in now.outcomes.budgets.tolist()},
            "timed": min(count.timed.values(), default=0),
        }
        for count in model.coverage
    ]
    st.dataframe(rows, hide_index=True)
    if model.failures:
        st.markdown("**Failures**")
        st.dataframe(
            [
                {"arm": f.arm, "stage": f.stage, "reason": f.reason, "questions": f.questions, "last": f.detail}
                for f in model.failures
            ],
            hide_index=True,
        )
    else:
        st.caption("No question failed.")
    st.markdown("**Audits: is it fit to tune on?**")
    st.dataframe(
        [{"level": f.level, "audit": f.audit, "about": f.dataset or f.arm or "all", "finding": f.text} for f in found],
        hide_index=True,
    )
    for text in now.outcomes.warnings:
        st.caption(shell.plain(f"Note: {text}"))


page()

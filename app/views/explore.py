"""Page 2: curves per dataset around the chosen policy. Every threshold is computed at once; a slider moves a mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from numpy.typing import NDArray

from calib import figures
from calib.curves import Curve
from calib.errors import CalibError
from calib.show import percent, seconds
from views import parts, shell

GROUPS = {
    "threshold": "By threshold",
    "latency": "Latency by threshold",
    "spread": "Latency distribution",
    "budget": "By budget and mix",
    "trust": "Confidence",
}
NO_SECONDS = "Seconds are not known: import with --system1-ms and --tokens-per-second, or measure: calib collect"
POINTS = 300
"""Points of one figure, which is half a page wide: more do not show, and are drawn anew with each move."""
TALL = 560
"""Pixels of a figure with its own legend."""
LINES = 8
"""Datasets that a figure draws one by one; with more, only all of them together unless some are chosen."""


def page() -> None:
    """Draw the page."""
    now = shell.bench()
    parts.header("Explore", now, "Move the knobs at the left; every figure follows.")
    parts.policy_figures(now)
    st.segmented_control(
        "Figures",
        list(GROUPS),
        format_func=GROUPS.__getitem__,
        key=shell.show("w_group", now.view.group),
        required=True,
        label_visibility="collapsed",
        on_change=shell.changed("w_group", "group", str),
    )
    if now.policy.deadline is not None:
        st.caption(f"Lines without the deadline of {now.policy.deadline:g} s; the star and the numbers above have it.")
    draw = {"threshold": _threshold, "latency": _latency, "spread": _spread, "budget": _budget, "trust": _trust}
    try:
        draw[now.view.group](now)
    except CalibError as error:
        st.info(shell.plain(str(error)))


def _datasets(now: shell.Bench) -> list[str | None]:
    """What is drawn line by line."""
    names = list(now.space.curves.datasets)
    if len(names) == 1:
        return list(names)
    if len(names) <= LINES:
        return [None, *names]
    st.caption(f"All {len(names)} datasets together; choose up to {LINES} of them at the left to see each.")
    return [None]


def _against(now: shell.Bench, metric: str, names: Sequence[str | None]) -> None:
    """One metric against the threshold."""
    p, limits = now.policy, [t for t in now.targets if t.metric == metric]

    def draw() -> go.Figure:
        found = now.space.curves_of(p).against_threshold(
            metric, mix=p.mix, think_budget=p.think_budget, arm=p.arm, datasets=names, points=POINTS
        )
        if metric == "p99":  # so few questions bound it from no side: the bands would cover the lines
            found = [c if c.dataset is None else replace(c, low=_unbound(c), high=_unbound(c)) for c in found]
        figure = figures.threshold_curves(
            found,
            marked=parts.fixed_marks(now, against="threshold"),
            targets=limits,
            styles=parts.styles(now),
            theme=now.theme,
        )
        kind = "calibrated confidence" if p.calibration.changes("p1") else "confidence"
        return parts.small(figure, f"Threshold ({kind}, 0 to 1)")

    key = ("threshold", metric, replace(p, threshold=0), tuple(names), now.targets)
    parts.chart(parts.with_current(now, key, draw, x="threshold", y=metric, names=names), f"threshold-{metric}")


def _unbound(curve: Curve) -> NDArray[np.float64]:
    return np.full(len(curve.x), np.nan)


def _threshold(now: shell.Bench) -> None:
    _beside(now, ("accuracy", "think_rate"))


def _latency(now: shell.Bench) -> None:
    if now.space.has_latency(now.policy):
        _beside(now, ("p90", "p99"))
    else:
        st.info(NO_SECONDS)


def _beside(now: shell.Bench, metrics: tuple[str, str]) -> None:
    """Two metrics against the threshold."""
    names = _datasets(now)
    parts.legend(now, names)
    for metric, column in zip(metrics, parts.pair(f"threshold-{metrics[0]}"), strict=True):
        with column:
            _against(now, metric, names)


def _budget(now: shell.Bench) -> None:
    curves, p, names = now.space.curves_of(now.policy), now.policy, _datasets(now)
    look: dict[str, Any] = {"marked": parts.fixed_marks(now), "styles": parts.styles(now), "theme": now.theme}
    parts.legend(now, names)

    def by_budget() -> go.Figure:
        found = curves.against_budget("accuracy", threshold=p.threshold, mix=p.mix, arm=p.arm, datasets=names)
        return parts.small(figures.accuracy_by_budget(found, **look), height=380)

    def by_mix() -> go.Figure:
        found = curves.against_mix(threshold=p.threshold, think_budget=p.think_budget, datasets=names)
        return parts.small(figures.accuracy_by_mix(found, **look), "Mix (weight of System 2)", height=380)

    left, right = parts.pair("budget")
    with left:
        if len(now.outcomes.budgets) > 1:
            key = ("budget", replace(p, think_budget=1), tuple(names), now.targets)
            figure = parts.with_current(now, key, by_budget, x="think_budget", y="accuracy", names=names)
            parts.chart(figure, "budget")
        else:
            st.info(
                f"One think budget was collected, {int(now.outcomes.budgets[0]):,} tokens. To compare: "
                "calib collect QUESTIONS --budgets 512,2048,8192"
            )
    with right:
        other = ("mix", replace(p, mix=0), tuple(names), now.targets)
        parts.chart(parts.with_current(now, other, by_mix, x="mix", y="accuracy", names=names), "mix")


def _spread(now: shell.Bench) -> None:
    arms = [arm for arm in now.outcomes.arms if now.space.tune.has_latency(arm)]
    if not arms:
        st.info(NO_SECONDS)
        return
    found = now.space.curves_of(now.policy).latency(now.policy, arms=arms, points=POINTS)
    limits = [t for t in now.targets if t.is_latency and t.dataset is None and not t.worst]
    parts.chart(figures.latency_distribution(found, targets=limits, theme=now.theme), "latency")
    st.caption("Share of the questions that finish within a time, under the thinking rule of the chosen policy.")
    if now.space.has_latency(now.policy):
        _beside(now, ("p50", "mean"))


def _trust(now: shell.Bench) -> None:
    curves, names = now.space.curves_of(now.policy), _datasets(now)
    marked = [*parts.fixed_marks(now), now.space.marked("current", now.policy)]
    left, right = parts.pair("trust")
    with left:
        found = curves.risk_coverage(datasets=names, points=POINTS)
        figure = figures.risk_coverage(found, marked=marked, styles=parts.styles(now), theme=now.theme)
        figure = parts.small(
            figure, "Coverage (share kept, surest first)", "Risk (share wrong)", height=TALL, legend=True
        )
        parts.chart(figure, "risk")
        st.caption("Errors among the answers that System 1 keeps: a good confidence keeps the curve low at the left.")
    with right:
        marks = now.space.marked("", now.policy).marks
        figure = figures.reliability(curves.reliability(now.policy), marks=marks, theme=now.theme)
        parts.chart(parts.small(figure, "Confidence (0 to 1, 15 bins)", height=TALL, legend=True), "reliability")
        st.caption(
            "Is a confidence of 80 % right 80 times of 100? Each system as it answered, and after the policy, "
            "with 95 % intervals by bin."
        )
    left, right = parts.pair("confidences")
    with left:

        def draw() -> dict[str, Any]:
            figure = figures.confidences(curves.confidences(points=POINTS), theme=now.theme)
            titles = ("Coverage (share kept, surest first)", "Risk (share wrong)")
            return dict(parts.small(figure, *titles, height=400, legend=True).to_plotly_json())

        parts.chart(now.space.kept(("figure", "confidences", curves.like, now.theme), draw), "confidences")
    with right:
        st.markdown("**Which confidence?**")
        st.dataframe(
            [
                {
                    "confidence": row.definition,
                    "area under risk": f"{row.aurc:.4f}",
                    "best accuracy": "-" if row.score is None else percent(row.score.accuracy),
                    "think rate": "-" if row.score is None else percent(row.score.think_rate),
                    "p90": "-" if row.score is None else seconds(row.score.p90),
                }
                for row in now.space.confidences(() if parts.needs_unknown_latency(now, now.targets) else now.targets)
            ],
            hide_index=True,
        )
        inside = f" inside {shell.plain(', '.join(map(str, now.targets)))}" if now.targets else ""
        st.caption(
            f"The exact optimum{inside} with each, on the tune questions and uncalibrated. serve.env knows `max` only; "
            "calib optimize --confidence margin tunes with another, for the gateway."
        )


page()

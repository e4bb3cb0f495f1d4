"""Page 5: the Optuna studies in the storage: history, what mattered, the best trials, gap to the exact optimum."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import streamlit as st

from calib import figures, trials
from calib.errors import CalibError
from calib.optimise import optimum
from calib.target import HIGHER_IS_BETTER, parse_targets
from calib.trials import Trials
from views import parts, shell

BEST = 10
"""Trials in the table."""


def page() -> None:
    """Draw the page."""
    now = shell.bench()
    st.title("Studies", anchor=False)
    st.caption("What a search tried, beside the exact optimum of the same question.")
    parts.marks(now.space.marked("", now.policy).marks)
    there = shell.studies(now)
    if not there:
        st.info("No study is in the storage yet. Each run of calib optimize adds one:")
        st.code(f"calib optimize --store {now.settings.store} --target 'p90<10s' --trials 100", language="bash")
        return
    counts = {study.name: study.trials for study in there}
    chosen = now.view.study if now.view.study in counts else there[0].name
    st.selectbox(
        "Study",
        list(counts),
        format_func=lambda name: f"{name} ({counts[name]:,} trials)",
        key=shell.show("w_study_page", chosen),
        on_change=shell.changed("w_study_page", "study", str),
    )
    found = shell.trials_of(now, chosen)
    if not len(found.values):
        st.info("No trial of this study is completed yet; look again when some are.")
        st.button("Look again", on_click=shell.refresh)
        return
    exact = _exact(now, found)
    _summary(found, exact)
    marks = now.space.marked("", now.policy).marks
    parts.chart(
        figures.study_history(
            found.values,
            found.feasible,
            metric=found.metric,
            maximize=found.maximize,
            exact=exact,
            marks=marks,
            theme=now.theme,
        ),
        "history",
    )
    mattered = _importance(now.settings.store, chosen, len(found.values))
    if mattered:
        figure = figures.study_importance(mattered, metric=found.metric, marks=marks, theme=now.theme)
        parts.chart(figure, "importance")
    else:
        st.info("Too few different trials to tell which parameter mattered.")
    figure = figures.study_parallel(found.params, found.values, metric=found.metric, marks=marks, theme=now.theme)
    st.subheader("Trials across the parameters", anchor=False)
    # turned, since names of axes overlap on a narrow window; without the title, which is where they turn to
    figure.update_traces(labelangle=-15).update_layout(margin_t=100)
    parts.chart(parts.untitled(figure), "parallel")
    _best(found)


@st.cache_resource(max_entries=8, show_spinner="Asking which parameter mattered ...")
def _importance(store: str, name: str, count: int) -> dict[str, float]:  # noqa: ARG001 - more trials, another call
    return trials.importance(store, name)


def _exact(now: shell.Bench, found: Trials) -> float | None:
    """Value of the exact optimum of the study's question on the questions that are shown; None where it has none."""
    if found.metric not in HIGHER_IS_BETTER and found.maximize:
        return None
    try:
        targets = parse_targets(found.targets) if found.targets else ()
        way: dict[str, Any] = {"maximize": found.metric} if found.maximize else {"minimize": found.metric}
        key = ("exact", found.metric, found.maximize, targets)
        best = now.space.kept(key, lambda: optimum(now.space.table, targets, **way))
    except CalibError:
        return None
    return None if math.isnan(best.objective) else best.objective


def _summary(found: Trials, exact: float | None) -> None:
    best = found.best
    columns = parts.tiles(4, "study")
    columns[0].metric("Trials", f"{len(found.values):,}")
    columns[1].metric("Keep all limits", f"{int(found.feasible.sum()):,}")
    columns[2].metric(f"Best {found.metric}", "-" if best is None else f"{found.values[best]:.4f}")
    gap = None
    if best is not None and exact is not None:
        gap = exact - found.values[best] if found.maximize else found.values[best] - exact
    columns[3].metric(
        "Gap to exact",
        "-" if gap is None else f"{gap:.4f}",
        help="On the tune questions that are shown now; a study that was run on others has another optimum.",
    )
    if found.targets:
        st.caption(shell.plain(f"Limits of the study: {', '.join(found.targets)}."))


def _best(found: Trials) -> None:
    st.subheader("Best trials", anchor=False)
    order = found.order[:BEST]
    columns: dict[str, Any] = {"trial": order, found.metric: found.values[order], "keeps limits": found.feasible[order]}
    columns |= {f"margin of {target}": column[order] for target, column in found.margins.items()}
    for metric in ("accuracy", "p90", "p99", "think_rate", "tokens"):
        if metric in found.metrics and metric != found.metric:
            columns[metric] = found.metrics[metric][order]
    columns |= {
        "threshold": [found.policies[i].threshold for i in order],
        "mix": [found.policies[i].mix for i in order],
        "think budget": [found.policies[i].think_budget for i in order],
        "arm": [found.policies[i].arm for i in order],
    }
    picked = st.dataframe(
        pd.DataFrame(columns).round(4),
        hide_index=True,
        key="best-trials",
        on_select="rerun",
        selection_mode="single-row",
    )
    rows = picked["selection"]["rows"]
    if rows:
        policy = found.policies[int(order[rows[0]])]
        st.button(
            f"Choose trial {int(order[rows[0]])} everywhere", on_click=shell.choose, args=(policy,), type="primary"
        )
    else:
        st.caption("Select a row to choose its policy. A margin below 0 breaks the limit; its unit is the limit's.")


page()

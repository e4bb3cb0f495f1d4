"""Page 3: the exact front of accuracy against latency or tokens. A click chooses the policy everywhere."""

from __future__ import annotations

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from calib import figures
from calib.errors import CalibError
from calib.show import number, percent, seconds
from calib.view import FRONT_METRICS
from calib.workspace import point_of
from views import parts, shell

LABELS = {"p90": "p90", "mean": "mean seconds", "tokens": "tokens"}


def page() -> None:
    """Draw the page."""
    now = shell.bench()
    parts.header(
        "Frontier",
        now,
        "The best accuracy for any latency, over all thresholds, mixes and budgets. Click a point to choose it.",
    )
    metrics = [name for name in FRONT_METRICS if name == "tokens" or _arms(now)]
    left, right = parts.pair("front", (2, 3))
    with left:
        st.segmented_control(
            "Accuracy against",
            metrics,
            format_func=LABELS.__getitem__,
            key=shell.show("w_metric", now.view.metric if now.view.metric in metrics else metrics[0]),
            required=True,
            on_change=shell.changed("w_metric", "metric", str),
        )
    metric = now.view.metric if now.view.metric in metrics else metrics[0]
    with right:
        tried = _tried(now, metric)
    if "p90" not in metrics:
        st.info("Seconds are not known: import with --system1-ms and --tokens-per-second, or measure: calib collect")
    try:
        _front(now, metric, tried)
    except CalibError as error:
        st.info(shell.plain(str(error)))
        return
    _chosen(now)


def _arms(now: shell.Bench) -> list[str]:
    return [arm for arm in now.outcomes.arms if now.space.tune.has_latency(arm)]


def _tried(now: shell.Bench, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Trials of a study, as the figure wants them."""
    names = [study.name for study in shell.studies(now)]
    if not names:
        return None
    st.selectbox(
        "Trials of a study",
        ["", *names],
        format_func=lambda name: name or "none",
        key=shell.show("w_study", now.view.study if now.view.study in names else ""),
        on_change=shell.changed("w_study", "study", str),
    )
    if now.view.study not in names:
        return None
    found = shell.trials_of(now, now.view.study)
    if metric not in found.metrics or "accuracy" not in found.metrics:
        return None
    return found.metrics[metric], found.metrics["accuracy"]


def _front(now: shell.Bench, metric: str, tried: tuple[NDArray[np.float64], NDArray[np.float64]] | None) -> None:
    arms = list(now.outcomes.arms) if metric == "tokens" else _arms(now)
    fronts = [now.space.front(metric, arm, now.policy) for arm in arms]
    if metric == "tokens":  # which do not depend on the arm
        fronts = fronts[:1]
    baselines = [now.space.marked(shell.BASELINES[name], p) for name, p in now.space.baselines.items()]
    figure = figures.frontier(
        fronts,
        marked=baselines,
        chosen=now.space.marked("chosen", now.policy),
        alike=[now.space.alike(front, now.policy) for front in fronts],
        targets=[t for t in now.targets if t.metric in (metric, "accuracy") and t.dataset is None and not t.worst],
        trials=tried,
        theme=now.theme,
    )

    def clicked() -> None:
        points = st.session_state["front"]["selection"]["points"]
        policy = point_of(fronts, points)
        if policy is not None:
            shell.choose(policy)

    parts.chart(parts.untitled(figure), "front", on_select=clicked, selection_mode="points")


def _chosen(now: shell.Bench) -> None:
    st.subheader("The chosen policy", anchor=False)
    st.write(shell.plain(f"{now.label(now.view.name)}: {parts.knobs(now.policy)}"))
    parts.policy_figures(now)
    tuned = parts.tuned_policy(now)
    if now.targets and tuned is None:
        st.warning("No policy keeps all limits on the tune questions. Relax one; calib optimize names the nearest.")
    elif tuned is not None and tuned != now.policy:
        values = now.space.marked("tuned", tuned).values[None]
        inside = f" inside {shell.plain(', '.join(map(str, now.targets)))}" if now.targets else ""
        st.button(
            f"Choose the most accurate{inside}: {percent(values['accuracy'])}, p90 {seconds(values['p90'])}, "
            f"p99 {seconds(values['p99'])}, {number(values['tokens'], 1)} tokens",
            on_click=shell.choose,
            args=(tuned,),
            key="take-optimum",
        )


page()

"""What an Optuna study did, from plain arrays: history, importance of the parameters, parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from calib.figures.drawing import SHARES, hover_of, metric_axis, shown, title_of, unit_of
from calib.figures.palette import COLOURS, Theme, axis, canvas, label, settle, theme_colours

__all__ = ["study_history", "study_importance", "study_parallel"]

_PARAMETER_UNITS = {"threshold": "confidence", "mix": "weight, 0 to 1", "think_budget": "tokens", "deadline": "s"}


def study_history(
    values: ArrayLike,
    feasible: ArrayLike,
    *,
    metric: str,
    maximize: bool,
    exact: float | None = None,
    marks: Sequence[str] = (),
    theme: Theme = "light",
) -> go.Figure:
    """Objective of each trial in turn, the best feasible one so far, and the exact optimum.

    Parameters
    ----------
    values : array_like of shape (T,)
        Objective of each trial in order; NaN for one without.
    feasible : array_like of bool, shape (T,)
        Whether the trial meets all targets.
    metric : str
        The objective.
    maximize : bool
    exact : float, optional
        The exact optimum under the same targets.
    marks : sequence of str
    theme : {"light", "dark"}
    """
    y, kept = np.asarray(values, dtype=np.float64), np.asarray(feasible, dtype=bool)
    number = np.arange(len(y))
    colours = theme_colours(theme)
    figure = canvas("Trials of the study", theme=theme, marks=marks)
    figure.update_layout(
        xaxis=axis("Trial (number)", theme=theme, tickformat=",d", rangemode="tozero"),
        yaxis=metric_axis(metric, [y, [exact] if exact is not None else []], theme),
    )
    hover = f"trial %{{x}}<br>{title_of(metric)} {hover_of(metric)}<extra></extra>"
    for name, where, marker in (
        ("breaks a target", ~kept, {"symbol": "x-thin-open", "color": "#7F7F7F", "size": 6}),
        ("meets all targets", kept, {"symbol": "circle", "color": COLOURS[0], "size": 6}),
    ):
        figure.add_scatter(x=number[where], y=y[where], mode="markers", marker=marker, name=name, hovertemplate=hover)
    known = kept & ~np.isnan(y)
    if known.any():
        extreme = np.maximum if maximize else np.minimum
        best = extreme.accumulate(np.where(known, y, -np.inf if maximize else np.inf))
        began = np.isfinite(best)
        figure.add_scatter(
            x=number[began],
            y=best[began],
            mode="lines",
            line={"shape": "hv", "color": COLOURS[0], "width": 1.8},
            name="best so far",
            hovertemplate=f"best up to trial %{{x}}<br>{title_of(metric)} {hover_of(metric)}<extra></extra>",
        )
    if exact is not None and math.isfinite(exact) and len(y):
        figure.add_scatter(
            x=[0, len(y) - 1],
            y=[exact, exact],
            mode="lines",
            line={"color": colours["ink"], "dash": "dash", "width": 1.2},
            name=f"exact optimum {shown(metric, exact)}",
            hovertemplate=f"exact optimum<br>{title_of(metric)} {hover_of(metric)}<extra></extra>",
        )
    return settle(figure)


def study_importance(
    importance: Mapping[str, float], *, metric: str, marks: Sequence[str] = (), theme: Theme = "light"
) -> go.Figure:
    """How much of the objective's variation each parameter explains.

    Parameters
    ----------
    importance : mapping of str to float
        By parameter, 0 to 1.
    metric : str
        The objective.
    marks : sequence of str
    theme : {"light", "dark"}
    """
    rows = sorted(importance.items(), key=lambda item: item[1])
    figure = canvas(f"What decides {title_of(metric).lower()}", theme=theme, marks=marks, showlegend=False)
    figure.update_layout(
        xaxis=axis("Importance (share of the variation, 0 to 1)", theme=theme, range=[0, 1.02]),
        yaxis=axis("Parameter", theme=theme, type="category"),
    )
    figure.add_bar(
        x=[value for _, value in rows],
        y=[label(name) for name, _ in rows],
        orientation="h",
        marker={"color": COLOURS[0]},
        name="importance",
        hovertemplate="%{y}<br>importance %{x:.4f}<extra></extra>",
    )
    return settle(figure, plot=30 + 30 * len(rows))


def study_parallel(
    columns: Mapping[str, Sequence[Any]],
    values: ArrayLike,
    *,
    metric: str,
    marks: Sequence[str] = (),
    theme: Theme = "light",
) -> go.Figure:
    """Parameters and objective of each trial as one line across parallel axes (drag along an axis to select).

    Parameters
    ----------
    columns : mapping of str to sequence of length T
        Values of each parameter: numbers, or texts.
    values : array_like of shape (T,)
        The objective; trials without one are left out.
    metric : str
        The objective.
    marks : sequence of str
    theme : {"light", "dark"}

    Notes
    -----
    Plotly shows no hover on parallel coordinates: the axes carry the values.
    """
    y = np.asarray(values, dtype=np.float64)
    kept = np.isfinite(y)
    colours = theme_colours(theme)
    figure = canvas("Trials across the parameters", theme=theme, marks=marks)
    dimensions = [
        _dimension(name, [v for v, k in zip(column, kept.tolist(), strict=True) if k])
        for name, column in columns.items()
    ]
    dimensions.append(
        {
            "label": f"{title_of(metric)} ({unit_of(metric)})",
            "values": y[kept],
            "tickformat": ".1~%" if metric in SHARES else "~g",
        }
    )
    figure.add_trace(
        go.Parcoords(
            dimensions=dimensions,
            line={"color": y[kept], "colorscale": [[0, COLOURS[5]], [1, COLOURS[1]]]},
            labelfont={"color": colours["ink"], "size": 12},
            tickfont={"color": colours["muted"], "size": 11},
            rangefont={"color": colours["muted"], "size": 10},
            unselected={"line": {"color": colours["grid"], "opacity": 0.3}},
        )
    )
    settle(figure, top=100)
    figure.update_layout(title={"pad": {"b": 58}}, margin={"l": 80, "r": 70, "b": 30})  # above the names of the axes
    figure.update_annotations(yshift=52)
    return figure


def _dimension(name: str, column: list[Any]) -> dict[str, Any]:
    title = f"{label(name)} ({_PARAMETER_UNITS[name]})" if name in _PARAMETER_UNITS else label(name)
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in column):
        return {"label": title, "values": column}
    texts = sorted({str(v) for v in column})
    place = {text: i for i, text in enumerate(texts)}
    return {
        "label": title,
        "values": [place[str(v)] for v in column],
        "tickvals": list(range(len(texts))),
        "ticktext": [label(text) for text in texts],
    }

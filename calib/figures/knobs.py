"""Curves against a knob: threshold, think budget, mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from calib.curves import Curve, Marked
from calib.figures.drawing import (
    draw_curves,
    draw_limits,
    draw_marked,
    marks_of,
    metric_axis,
    metric_of,
    styles_of,
    title_of,
)
from calib.figures.palette import Styles, Theme, axis, canvas, settle
from calib.policy import LATENCY_METRICS
from calib.target import Target

__all__ = ["accuracy_by_budget", "accuracy_by_mix", "threshold_curves"]


def threshold_curves(
    curves: Sequence[Curve],
    *,
    beside: Sequence[Curve] = (),
    marked: Sequence[Marked] = (),
    targets: Sequence[Target] = (),
    styles: Styles | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """One metric against the threshold, for all questions and per dataset.

    Parameters
    ----------
    curves : sequence of Curve
        From `Curves.against_threshold`, all of one metric.
    beside : sequence of Curve
        Drawn dotted: p99 beside p90.
    marked : sequence of Marked
        Policies: a dotted line at the threshold, a symbol at the value that the policy itself has.
    targets : sequence of Target
        Those on this metric are drawn, the side that breaks them shaded.
    styles : mapping of str to Style, optional
        `dataset_colours` of all datasets.
    theme : {"light", "dark"}

    Raises
    ------
    CalibError
        Without a curve, or with curves of several metrics.
    """
    x_axis = axis("Threshold on System 1's confidence (0 never thinks, 1.1 always)", theme=theme, range=[-0.02, 1.12])
    more = f" (dotted: {beside[0].metric})" if beside else ""
    x_hover = "threshold %{customdata:.5f}"
    return _against(curves, "threshold", x_axis, x_hover, more, beside, marked, targets, styles, theme)


def accuracy_by_budget(
    curves: Sequence[Curve],
    *,
    marked: Sequence[Marked] = (),
    targets: Sequence[Target] = (),
    styles: Styles | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """Accuracy (or another metric) against the think budget, one point for each budget that was collected.

    Parameters
    ----------
    curves : sequence of Curve
        From `Curves.against_budget`.
    marked, targets, styles, theme
        As for `threshold_curves`.
    """
    budgets = curves[0].x if curves else np.empty(0)
    log = len(budgets) > 1 and budgets[0] > 0 and budgets[-1] > 4 * budgets[0]
    x_axis = axis(
        f"Think budget (tokens{', log scale' if log else ''})",
        theme=theme,
        type="log" if log else "linear",
        tickvals=budgets.tolist(),
        ticktext=[f"{budget:,.0f}" for budget in budgets.tolist()],
    )
    return _against(curves, "think_budget", x_axis, "budget %{x:,.0f} tokens", "", (), marked, targets, styles, theme)


def accuracy_by_mix(
    curves: Sequence[Curve],
    *,
    marked: Sequence[Marked] = (),
    targets: Sequence[Target] = (),
    styles: Styles | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """Accuracy against the mix, at one threshold and think budget.

    Parameters
    ----------
    curves : sequence of Curve
        From `Curves.against_mix`.
    marked, targets, styles, theme
        As for `threshold_curves`.
    """
    x_axis = axis("Mix (weight of System 2: 0 System 1 alone, 1 System 2 alone)", theme=theme, range=[-0.02, 1.02])
    return _against(curves, "mix", x_axis, "mix %{x:.3f}", "", (), marked, targets, styles, theme)


def _against(
    curves: Sequence[Curve],
    knob: str,
    x_axis: dict[str, Any],
    x_hover: str,
    more: str,
    beside: Sequence[Curve],
    marked: Sequence[Marked],
    targets: Sequence[Target],
    styles: Styles | None,
    theme: Theme,
) -> go.Figure:
    metric = metric_of(curves)
    styles = styles_of(styles, curves)
    datasets = [curve.dataset for curve in curves]
    title = f"{title_of(metric)} against {knob.replace('_', ' ')}{more}"
    touching = marked if metric in LATENCY_METRICS else ()
    values = [curve.y for curve in (*curves, *beside)]
    values += [np.array([one.values[d][metric] for d in datasets if d in one.values]) for one in marked]
    marks = marks_of(curves, beside, touching)
    figure = canvas(title, theme=theme, marks=marks, xaxis=x_axis, yaxis=metric_axis(metric, values, theme))
    draw_curves(figure, curves, styles, theme, x_hover=x_hover, markers=knob == "think_budget")
    draw_curves(figure, beside, styles, theme, x_hover=x_hover, beside=True)
    draw_limits(figure, targets, metric, "y", theme)
    draw_marked(figure, marked, datasets, x=knob, y=metric, styles=styles, theme=theme, lines=knob != "think_budget")
    return settle(figure)

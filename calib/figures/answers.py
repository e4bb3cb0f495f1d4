"""Right and wrong: risk against coverage, reliability, whether thinking helps, what tuning gains, one question."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots

from calib.curves import Curve, Marked
from calib.figures.drawing import draw_curves, draw_marked, marks_of, name_of, styles_of
from calib.figures.palette import BAD, COLOURS, GOOD, Styles, Theme, axis, canvas, faded, label, settle, theme_colours
from calib.intervals import Comparison
from calib.stages import Bins
from calib.why import WhyRow

__all__ = ["STAGES", "confidences", "differences", "flip_bars", "reliability", "risk_coverage", "thinking_helps"]

_MOST_OPTIONS = 12  # of one question, shown as bars


def risk_coverage(
    curves: Sequence[Curve],
    *,
    marked: Sequence[Marked] = (),
    styles: Styles | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """Share of wrong answers among the most confident questions, against their share.

    Parameters
    ----------
    curves : sequence of Curve
        From `Curves.risk_coverage`.
    marked : sequence of Marked
        Policies, at the share that they answer without thinking.
    styles, theme
        As for `threshold_curves`.
    """
    styles = styles_of(styles, curves)
    figure = canvas("Risk against coverage", theme=theme, marks=marks_of(curves))
    _risk_axes(figure, curves, theme)
    draw_curves(figure, curves, styles, theme, x_hover="coverage %{x:.2%}", bands=False)
    datasets = [c.dataset for c in curves]
    draw_marked(figure, marked, datasets, x="coverage", y="risk", styles=styles, theme=theme)
    return settle(figure)


def _risk_axes(figure: go.Figure, curves: Sequence[Curve], theme: Theme) -> None:
    """Axes of risk against coverage.

    Among the few most confident questions the risk is all chance: the figure is as high as the rest needs.
    """
    top = max((float(np.nanmax(c.y[c.x >= 0.05], initial=0.0)) for c in curves), default=0.0)
    figure.update_layout(
        xaxis=axis(
            "Coverage: share of the questions kept, most confident first (%)",
            theme=theme,
            range=[0, 1.02],
            tickformat=".0%",
        ),
        yaxis=axis(
            "Risk: share wrong among the kept (%)", theme=theme, range=[0, 1.08 * top or 1.0], tickformat=".1~%"
        ),
    )


def confidences(curves: Mapping[str, Curve], *, theme: Theme = "light") -> go.Figure:
    """Risk against coverage of System 1's answers by each definition of the confidence.

    Parameters
    ----------
    curves : mapping of str to Curve
        From `Curves.confidences`.
    theme : {"light", "dark"}
    """
    figure = canvas("Which confidence puts the wrong answers last?", theme=theme, marks=marks_of(curves.values()))
    _risk_axes(figure, list(curves.values()), theme)
    for (name, curve), colour, dash in zip(curves.items(), COLOURS, ("solid", "dash", "dot"), strict=False):
        figure.add_scatter(
            x=curve.x,
            y=curve.y,
            mode="lines",
            name=f"{label(name)} (area {curve.summary:.4f})",
            line={"color": colour, "width": 2, "dash": dash},
            hovertemplate=(
                f"<b>{label(name)}</b><br>coverage %{{x:.2%}}<br>wrong among the kept %{{y:.2%}}"
                f"<br>{curve.n:,} questions<extra></extra>"
            ),
        )
    return settle(figure)


STAGES = {
    "p1": ("System 1", COLOURS[0], "circle"),
    "p2": ("System 2 alone", COLOURS[1], "square"),
    "final": ("after the policy", COLOURS[3], "diamond"),
}
"""Name, colour and symbol of each stage of a probability."""


def reliability(stages: Mapping[str, Bins], *, marks: Sequence[str] = (), theme: Theme = "light") -> go.Figure:
    """Accuracy against confidence by bin, with intervals, and the number of questions in each bin.

    Parameters
    ----------
    stages : mapping of str to Bins
        From `Curves.reliability`: System 1's answers, System 2's, those of the policy.
    marks : sequence of str
    theme : {"light", "dark"}
    """
    colours = theme_colours(theme)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.06)
    figure.update_layout(canvas("Reliability before and after mixing", theme=theme, marks=marks).layout)
    bins = max(len(found.count) for found in stages.values())
    figure.update_layout(
        xaxis={**axis("", theme=theme, range=[0, 1.01]), "matches": "x2", "showticklabels": False},
        xaxis2=axis(
            f"Confidence: probability of the answer given (0 to 1, {bins} equal bins)", theme=theme, range=[0, 1.01]
        ),
        yaxis=axis("Accuracy (%)", theme=theme, range=[-0.02, 1.02], tickformat=".0%"),
        yaxis2=axis("Questions (count)", theme=theme),
        barmode="group",
        bargap=0.15,
    )
    figure.add_scatter(
        x=[0, 1],
        y=[0, 1],
        mode="lines",
        line={"color": colours["muted"], "dash": "dot", "width": 1},
        name="as sure as right",
        hoverinfo="skip",
        row=1,
        col=1,
    )
    for stage, found in stages.items():
        name, colour, symbol = STAGES[stage]
        held = found.count > 0
        edges = [f"({lo:.3f}, {hi:.3f}]" for lo, hi in zip(found.edges[:-1], found.edges[1:], strict=True)]
        share, low, high = found.accuracy[held], found.low[held], found.high[held]
        sides = ["" if math.isnan(lo) else f" [{lo:.2%}, {hi:.2%}]" for lo, hi in zip(low, high, strict=True)]
        figure.add_scatter(
            x=found.confidence[held],
            y=share,
            mode="lines+markers",
            line={"color": colour, "width": 1.8},
            marker={"symbol": symbol, "size": 8},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": np.nan_to_num(high - share),
                "arrayminus": np.nan_to_num(share - low),
                "color": faded(colour, 0.55),
                "thickness": 1.2,
                "width": 3,
            },
            name=f"{name}: ECE {found.ece:.2%}",
            legendgroup=name,
            customdata=list(zip(np.array(edges)[held].tolist(), found.count[held].tolist(), sides, strict=True)),
            hovertemplate=(
                f"<b>{name}</b>, bin %{{customdata[0]}}<br>mean confidence %{{x:.4f}}"
                "<br>accuracy %{y:.2%}%{customdata[2]}<br>%{customdata[1]:,} questions<extra></extra>"
            ),
            row=1,
            col=1,
        )
        figure.add_bar(
            x=(found.edges[:-1] + found.edges[1:]) / 2,
            y=found.count,
            marker={"color": colour},
            name=f"{name}: questions",
            legendgroup=name,
            showlegend=False,
            text=edges,
            textposition="none",
            hovertemplate=f"<b>{name}</b>, bin %{{text}}<br>%{{y:,}} questions<extra></extra>",
            row=2,
            col=1,
        )
    return settle(figure, plot=330)


def thinking_helps(rows: Sequence[WhyRow], *, theme: Theme = "light") -> go.Figure:
    """Wrong to right against right to wrong when all questions are thought about, per dataset.

    Parameters
    ----------
    rows : sequence of WhyRow
        From `calib.why.why`; confidence bands are left out.
    theme : {"light", "dark"}
    """
    whole = sorted(
        (r for r in rows if r.low is None), key=lambda r: (r.dataset is not None, -(r.net / r.n)), reverse=True
    )
    colours = theme_colours(theme)
    marks = [mark for mark in marks_of(whole) if mark != "estimated"]
    figure = canvas("Does thinking help?", theme=theme, marks=marks, barmode="relative", bargap=0.35)
    names = [name_of(r.dataset) for r in whole]
    figure.update_layout(
        xaxis=axis("Questions that turn right or wrong by thinking (%)", theme=theme, tickformat=".1~%"),
        yaxis=axis("Dataset", theme=theme, tickmode="array", tickvals=list(range(len(names))), ticktext=names),
    )
    details = [
        [
            name,
            f"{r.gained:,} gained, {r.lost:,} lost of {r.n:,}",
            f"{100 * r.system1:.2f} % → {100 * r.thought:.2f} %",
            f"p = {r.p_value:.2g}" + ("" if r.p_holm is None else f", Holm {r.p_holm:.2g}"),
            r.advice,
        ]
        for name, r in zip(names, whole, strict=True)
    ]
    hover = (
        "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>accuracy %{customdata[2]}<br>%{customdata[3]}"
        "<br>advice: %{customdata[4]}<extra></extra>"
    )
    where = list(range(len(whole)))
    for name, values, colour in (
        ("wrong to right", [r.gained / r.n for r in whole], GOOD),
        ("right to wrong", [-r.lost / r.n for r in whole], BAD),
    ):
        figure.add_bar(
            x=values,
            y=where,
            orientation="h",
            marker={"color": colour},
            name=name,
            customdata=details,
            hovertemplate=hover,
        )
    figure.add_scatter(
        x=[r.net / r.n for r in whole],
        y=where,
        mode="markers",
        marker={
            "symbol": "diamond",
            "size": 10,
            "color": colours["ink"],
            "line": {"width": 1, "color": colours["page"]},
        },
        name="net",
        customdata=details,
        hovertemplate=hover,
    )
    figure.add_shape(type="line", x0=0, x1=0, y0=0, y1=1, yref="y domain", line={"color": colours["muted"], "width": 1})
    return settle(figure, plot=60 + 30 * len(whole))


def differences(comparisons: Sequence[Comparison], *, marks: Sequence[str] = (), theme: Theme = "light") -> go.Figure:
    """Accuracy of the tuned policy minus that of each baseline, with its interval.

    Parameters
    ----------
    comparisons : sequence of Comparison
        From `calib.intervals.compare`.
    marks : sequence of str
    theme : {"light", "dark"}
    """
    colours = theme_colours(theme)
    figure = canvas("What tuning gains in accuracy", theme=theme, marks=marks, showlegend=False)
    rows = list(reversed(comparisons))
    figure.update_layout(
        xaxis=axis("Accuracy of the policy minus the baseline's (percentage points)", theme=theme),
        yaxis=axis(
            "Baseline",
            theme=theme,
            tickmode="array",
            tickvals=list(range(len(rows))),
            ticktext=[label(c.name) for c in rows],
            range=[-0.6, len(rows) - 0.4],
        ),
    )
    figure.add_shape(type="line", x0=0, x1=0, y0=0, y1=1, yref="y domain", line={"color": colours["muted"], "width": 1})
    value = np.array([100 * c.difference for c in rows])
    high = np.array([100 * c.high for c in rows]) - value
    low = value - np.array([100 * c.low for c in rows])
    shade = [(GOOD if c.difference > 0 else BAD) if c.distinguishable else "#7F7F7F" for c in rows]
    for i, one in enumerate(rows):
        figure.add_scatter(
            x=[value[i]],
            y=[i],
            mode="markers",
            marker={"size": 10, "color": shade[i], "symbol": "circle" if one.distinguishable else "circle-open"},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high[i] if math.isfinite(high[i]) else 0],
                "arrayminus": [low[i] if math.isfinite(low[i]) else 0],
                "color": shade[i],
                "thickness": 2,
                "width": 5,
            },
            name=label(one.name),
            text=[label(one.sentence, 200)],
            hovertemplate=(
                f"<b>{label(one.name)}</b><br>%{{text}}<br>{one.gained:,} won, {one.lost:,} lost<extra></extra>"
            ),
        )
    return settle(figure, plot=40 + 34 * len(comparisons))


def flip_bars(
    options: Sequence[str],
    p_ours: ArrayLike,
    p_other: ArrayLike,
    answer: int,
    *,
    names: tuple[str, str] = ("ours", "other"),
    marks: Sequence[str] = (),
    theme: Theme = "light",
) -> go.Figure:
    """Both distributions over the options of one question, the right one marked.

    Parameters
    ----------
    options : sequence of str
        Texts; of many options those with the largest probabilities and the right one are shown.
    p_ours, p_other : array_like of shape (C,)
        Padded options are ignored; NaN (no usable answer) draws no bar.
    answer : int
        Index of the right option.
    names : tuple of str
        What both distributions are of.
    marks : sequence of str
    theme : {"light", "dark"}
    """
    ours, other = (np.asarray(p, dtype=np.float64)[: len(options)] for p in (p_ours, p_other))
    top = np.fmax(np.nan_to_num(ours), np.nan_to_num(other))
    top[answer] = np.inf
    shown = np.sort(np.argsort(-top, kind="stable")[:_MOST_OPTIONS])[::-1]
    left = len(options) - len(shown)
    title = "Probability of each option" + (f" ({left} improbable ones left out)" if left else "")
    figure = canvas(title, theme=theme, marks=marks, barmode="group", bargap=0.25)
    ticks = [f"<b>✓ {label(options[i], 48)}</b>" if i == answer else label(options[i], 48) for i in shown]
    figure.update_layout(
        xaxis=axis("Probability (0 to 1)", theme=theme, range=[0, 1.02]),
        yaxis=axis("Option (✓ right)", theme=theme, tickmode="array", tickvals=list(range(len(shown))), ticktext=ticks),
        legend={"traceorder": "reversed"},
    )
    for name, p, colour, pattern in ((names[1], other, COLOURS[1], "/"), (names[0], ours, COLOURS[0], "")):
        figure.add_bar(
            x=p[shown],
            y=list(range(len(shown))),
            orientation="h",
            name=label(name),
            marker={"color": colour, "pattern": {"shape": pattern, "size": 5}},
            text=[label(options[i], 200) for i in shown],
            textposition="none",
            hovertemplate=f"<b>{label(name)}</b><br>%{{text}}<br>probability %{{x:.4f}}<extra></extra>",
        )
    return settle(figure, plot=40 + 36 * len(shown))

"""What several figures share: names and units of metrics, axes, curves with their bands, marked policies, limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from calib.curves import Curve, Marked
from calib.errors import CalibError
from calib.figures.palette import (
    BAD,
    COLOURS,
    Style,
    Styles,
    Theme,
    axis,
    dataset_colours,
    faded,
    label,
    seconds_text,
    theme_colours,
)
from calib.policy import LATENCY_METRICS, Policy
from calib.target import RATES, Target

__all__ = [
    "ALL",
    "MARK_SYMBOLS",
    "SHARES",
    "draw_curves",
    "draw_limits",
    "draw_marked",
    "hover_of",
    "marks_of",
    "metric_axis",
    "metric_of",
    "name_of",
    "policy_text",
    "shown",
    "style_of",
    "styles_of",
    "title_of",
    "unit_of",
]

Floats = NDArray[np.float64]

ALL = "all questions"


_MOST_BANDS = 8  # curves of one figure that keep their band; more of them hide each other


MARK_SYMBOLS = (
    "circle-open",
    "diamond",
    "square-open",
    "triangle-up",
    "triangle-down-open",
    "x-thin-open",
    "hexagon-open",
)


_NARROWEST = 0.004  # step of the threshold that the eye sees as one
_LOG_RATIO = 8.0  # of the largest to the smallest latency, from which on a log axis shows more


_TITLES = {
    "accuracy": "Accuracy",
    "think_rate": "Think rate",
    "tokens": "Thinking tokens",
    "mean": "Mean latency",
    "p50": "p50 latency",
    "p90": "p90 latency",
    "p95": "p95 latency",
    "p99": "p99 latency",
    "risk": "Share wrong among the kept",
    "skill": "Skill",
    "ece": "Calibration error (ECE)",
    "macro_f1": "Macro F1",
    "brier": "Brier score",
    "nll": "Negative log likelihood",
    "cost": "Cost",
}


_UNITS = {"tokens": "tokens per question", "brier": "0 to 2", "nll": "nats", "cost": "per question"}


SHARES = (*RATES, "risk")


def title_of(metric: str) -> str:
    """Name of a metric for titles and axes."""
    return _TITLES.get(metric, metric)


def unit_of(metric: str) -> str:
    """Unit of a metric as it is drawn."""
    if metric in LATENCY_METRICS:
        return "s"
    return "%" if metric in SHARES else _UNITS.get(metric, "no unit")


def shown(metric: str, value: float) -> str:
    """A value with its unit."""
    if metric in LATENCY_METRICS:
        return seconds_text(value)
    if math.isnan(value):
        return "unknown"
    return f"{100 * value:.2f} %" if metric in SHARES else f"{value:,.4g}"


def hover_of(metric: str, axis_name: str = "y") -> str:
    """Placeholder of a hover template with all digits that matter."""
    if metric in LATENCY_METRICS:
        return f"%{{{axis_name}:.5~g}} s"
    return f"%{{{axis_name}:.2%}}" if metric in SHARES else f"%{{{axis_name}:,.5~g}}"


def metric_axis(metric: str, values: Iterable[ArrayLike], theme: Theme, **more: Any) -> dict[str, Any]:
    """Axis of a metric: percent, or seconds on a log scale where they span much."""
    known = np.concatenate([np.empty(0), *(np.ravel(np.asarray(v, dtype=np.float64)) for v in values)])
    known = known[np.isfinite(known)]
    text = f"{title_of(metric)} ({unit_of(metric)}"
    if metric in LATENCY_METRICS and known.size and known.min() > 0 and known.max() > _LOG_RATIO * known.min():
        span = math.log10(known.min()), math.log10(known.max())
        room = 0.05 * (span[1] - span[0])
        return axis(
            f"{text}, log scale)",
            theme=theme,
            **{"type": "log", "range": [span[0] - room, span[1] + room], "tickformat": "~g", "dtick": "D2", **more},
        )
    if known.size:
        low, high = float(known.min()), float(known.max())
        room = 0.05 * (high - low) or 0.02 * abs(high) or 0.02
        more = {"range": [low - room, high + room], **more}
    if metric in SHARES:
        more = {"tickformat": ".1~%", **more}
    return axis(f"{text})", theme=theme, **more)


def _coordinate(figure_axis: Any, value: float) -> float:
    """Where an annotation stands on an axis, whose log scale counts in powers of ten there."""
    return math.log10(max(value, 1e-12)) if figure_axis.type == "log" else value


def name_of(dataset: str | None) -> str:
    """Name of a curve in legends; None is all questions together."""
    return ALL if dataset is None else label(dataset)


def style_of(dataset: str | None, styles: Styles, theme: Theme) -> Style:
    """Style of a curve: all questions in the colour of the text, a dataset that has none in grey."""
    if dataset is None:
        return Style(theme_colours(theme)["ink"])
    return styles[dataset] if dataset in styles else Style(COLOURS[-1])


def styles_of(styles: Styles | None, curves: Sequence[Curve]) -> Styles:
    """The styles given, else those of the datasets that are drawn."""
    return styles if styles is not None else dataset_colours(c.dataset for c in curves if c.dataset is not None)


def metric_of(curves: Sequence[Curve]) -> str:
    """The one metric of all curves; a `CalibError` without a curve or with several metrics."""
    metrics = {curve.metric for curve in curves}
    if len(metrics) != 1:
        raise CalibError(f"a figure shows curves of one metric, got {sorted(metrics) or 'none'}")
    return metrics.pop()


def marks_of(*of: Iterable[Any]) -> tuple[str, ...]:
    """Marks that touch any of the things that are drawn."""
    return tuple(sorted({mark for several in of for one in several for mark in one.marks}))


def draw_curves(
    figure: go.Figure,
    curves: Sequence[Curve],
    styles: Styles,
    theme: Theme,
    *,
    x_hover: str,
    beside: bool = False,
    markers: bool = False,
    bands: bool = True,
) -> None:
    """Draw each curve with its band; a click on the legend hides both.

    Parameters
    ----------
    figure : Figure
    curves : sequence of Curve
    styles : mapping of str to Style
    theme : {"light", "dark"}
    x_hover : str
        What the hover says of x, which is ``customdata``.
    beside : bool
        Dotted, without a band or a line in the legend: beside curves of the same datasets.
    markers : bool
        Whether to mark the points.
    bands : bool
        Bands of datasets; that of all questions is always drawn.
    """
    traces = []
    for curve in curves:
        style, name = style_of(curve.dataset, styles, theme), name_of(curve.dataset)
        if not beside and (curve.dataset is None or (bands and len(curves) <= _MOST_BANDS)):
            traces += _band(curve, style, name)
        area = "" if math.isnan(curve.summary) else f" (area {curve.summary:.3f})"
        x, of = _path(curve)
        bounds = _bounds(curve)
        line = go.Scatter(
            x=x,
            y=curve.y[of],
            mode="lines+markers" if markers else "lines",
            name=f"{name}{', ' + curve.metric if beside else area}",
            legendgroup=name,
            showlegend=not beside,
            line={
                "color": style.colour,
                "width": 1.3 if beside else 2.6 if curve.dataset is None else 1.8,
                "dash": "dot" if beside else style.dash,
            },
            marker={"symbol": style.symbol, "size": 7},
            text=[bounds[i] for i in of.tolist()],
            customdata=curve.x[of],
            hovertemplate=(
                f"<b>{name}</b><br>{x_hover}<br>{title_of(curve.metric)} {hover_of(curve.metric)}%{{text}}"
                f"<br>{curve.n:,} questions<extra></extra>"
            ),
        )
        traces.append(line)
    figure.add_traces(traces)


def _path(curve: Curve) -> tuple[Floats, NDArray[np.intp]]:
    """Where the line of a curve goes: x of each vertex and the point of the curve that gives its y.

    A wide step of a step function is drawn as one, a narrow one as its point.
    """
    number = np.arange(len(curve.x))
    if curve.starts is None or curve.ends is None:
        return curve.x, number
    wide = curve.ends - curve.starts > _NARROWEST
    of = np.repeat(number, np.where(wide, 2, 1))
    second = np.append(False, of[1:] == of[:-1])
    return np.where(second, curve.ends[of], np.where(wide[of], curve.starts[of], curve.x[of])), of


def _bounds(curve: Curve) -> list[str]:
    """Band of each point in words, nothing where there is none."""
    return [
        "" if math.isnan(low) else f" [{shown(curve.metric, low)}, {shown(curve.metric, high)}]"
        for low, high in zip(curve.low.tolist(), curve.high.tolist(), strict=True)
    ]


def _band(curve: Curve, style: Style, group: str) -> list[go.Scatter]:
    """The band of a curve as a trace; none where it has no band."""
    given = ~(np.isnan(curve.low) | np.isnan(curve.high))
    if not given.any():
        return []
    top = float(np.max(curve.y[np.isfinite(curve.y)], initial=0.0))
    finite = curve.high[given & np.isfinite(curve.high)]
    ceiling = 1.2 * float(finite.max(initial=top))  # an open side reaches beyond the edge of the figure
    x, of = _path(curve)
    x, of = x[given[of]], of[given[of]]
    high = np.minimum(curve.high, ceiling)[of]
    low = np.maximum(curve.low, 1e-6 if curve.metric in LATENCY_METRICS else 0.0)[of]
    band = go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        mode="lines",
        line={"width": 0},
        fillcolor=faded(COLOURS[-1], 0.2) if curve.dataset is None else faded(style.colour, 0.12),  # in any theme
        hoverinfo="skip",
        showlegend=False,
        legendgroup=group,
        name=f"{group}: band",
    )
    return [band]


def draw_marked(
    figure: go.Figure,
    marked: Sequence[Marked],
    datasets: Sequence[str | None],
    *,
    x: str,
    y: str,
    styles: Styles,
    theme: Theme,
    lines: bool = False,
) -> None:
    """Mark policies: a symbol on the value of each dataset, and a line at the knob itself.

    x and y name a metric of the marked values, or a knob of the policy.
    """
    ink = theme_colours(theme)["ink"]
    for i, one in enumerate(marked):
        symbol = MARK_SYMBOLS[i % len(MARK_SYMBOLS)]
        shown = [d for d in datasets if d in one.values]
        if not shown:
            continue
        where = [_coordinate_of(one, d, x) for d in shown]
        value = [_coordinate_of(one, d, y) for d in shown]
        figure.add_scatter(
            x=where,
            y=value,
            mode="markers",
            name=label(one.label),
            legendgroup=f"marked {i}",
            marker={
                "symbol": symbol,
                "size": 11,
                "color": [style_of(d, styles, theme).colour for d in shown],
                "line": {"width": 1.5, "color": ink if "open" not in symbol else None},
            },
            text=[name_of(d) for d in shown],
            customdata=[policy_text(one.policy)] * len(shown),
            hovertemplate=(
                f"<b>{label(one.label)}</b>, %{{text}}<br>{title_of(y)} {hover_of(y)}<br>%{{customdata}}<extra></extra>"
            ),
        )
        if lines:
            at = min(float(getattr(one.policy, x)), 1.1)
            figure.add_shape(
                type="line",
                x0=at,
                x1=at,
                y0=0,
                y1=1,
                yref="y domain",
                line={"color": ink, "width": 1, "dash": "dot"},
                layer="below",
            )


def _coordinate_of(one: Marked, dataset: str | None, what: str) -> float:
    values = one.values[dataset]
    return values[what] if what in values else float(getattr(one.policy, what))


def policy_text(policy: Policy) -> str:
    """A policy in one line."""
    plain = (
        f"threshold {policy.threshold:.4g}, mix {policy.mix:.3g}, budget {policy.think_budget:,} tokens, "
        f"arm {label(policy.arm)}"
    )
    more = [f"confidence {policy.confidence}"] * (policy.confidence != "max")
    more += [f"pool {policy.pool}"] * (policy.pool != "linear")
    more += ["calibrated"] * (policy.temperatures is not None)
    more += [f"{len(policy.routes)} routes"] * bool(policy.routes)
    return ", ".join([plain, *more])


def _is_far(drawn: Any, value: float) -> bool:
    """Whether a text that begins here would leave the figure."""
    low, high = drawn.range
    return bool(_coordinate(drawn, value) > low + 0.85 * (high - low))


def draw_limits(figure: go.Figure, targets: Sequence[Target], metric: str, side: str, theme: Theme) -> None:
    """Shade what breaks a target on this metric, and name the target at the edge."""
    for target in targets:
        if target.metric != metric:
            continue
        drawn = figure.layout[f"{side}axis"]
        if drawn.range is None:  # nothing is drawn that a limit could be seen beside
            continue
        low, high = (10.0**end if drawn.type == "log" else float(end) for end in drawn.range)
        outer = max(high, target.value) if target.upper else min(low, target.value)
        other = "y" if side == "x" else "x"
        figure.add_shape(
            type="rect",
            layer="below",
            line={"width": 0},
            fillcolor=faded(BAD, 0.10),
            **{
                f"{side}0": target.value,
                f"{side}1": outer,
                f"{other}0": 0,
                f"{other}1": 1,
                f"{other}ref": f"{other} domain",
            },
        )
        figure.add_shape(
            type="line",
            line={"color": BAD, "width": 1.5},
            **{
                f"{side}0": target.value,
                f"{side}1": target.value,
                f"{other}0": 0,
                f"{other}1": 1,
                f"{other}ref": f"{other} domain",
            },
        )
        if not low <= target.value <= high:
            continue  # the line is off the figure
        place: dict[str, Any] = {
            side: _coordinate(drawn, target.value),
            other: 1 if side == "y" else 0.02,
            f"{other}ref": f"{other} domain",
            "xanchor": "right" if side == "y" or _is_far(drawn, target.value) else "left",
            "yanchor": "bottom",
        }
        figure.add_annotation(
            text=label(str(target)),
            showarrow=False,
            font={"size": 11, "color": BAD},
            bgcolor=theme_colours(theme)["page"],
            name="target",
            **place,
        )

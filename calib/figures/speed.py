"""What speed buys: the latency of each arm, and the front of accuracy against latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from calib.curves import Distribution, Frontier, Marked
from calib.errors import CalibError
from calib.figures.drawing import (
    MARK_SYMBOLS,
    draw_limits,
    hover_of,
    marks_of,
    metric_axis,
    policy_text,
    title_of,
)
from calib.figures.palette import (
    COLOURS,
    Style,
    Styles,
    Theme,
    axis,
    canvas,
    dataset_colours,
    faded,
    label,
    seconds_text,
    settle,
    theme_colours,
)
from calib.target import Target

__all__ = ["frontier", "latency_distribution"]


def latency_distribution(
    distributions: Sequence[Distribution],
    *,
    targets: Sequence[Target] = (),
    styles: Styles | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """Share of the questions that finish within a time, for each arm; log axis, limits drawn.

    Parameters
    ----------
    distributions : sequence of Distribution
        From `Curves.latency`; an arm whose latency is not known is named and has no line.
    targets : sequence of Target
        Latency limits are drawn as vertical lines, for percentiles with a point at their share.
    styles : mapping of str to Style, optional
        Of the arms.
    theme : {"light", "dark"}
    """
    styles = dataset_colours(d.arm for d in distributions) if styles is None else styles
    figure = canvas("Latency of each arm", theme=theme, marks=marks_of(distributions))
    known = [d.seconds for d in distributions if d.seconds.size]
    limits = [t for t in targets if t.is_latency]
    x_axis = metric_axis("p50", [*known, [t.value for t in limits]], theme)
    log = x_axis.get("type") == "log"
    x_axis["title"]["text"] = f"Latency of a question (s{', log scale' if log else ''})"
    figure.update_layout(
        xaxis=x_axis,
        yaxis=axis("Questions that finish within this time (%)", theme=theme, range=[0, 1.02], tickformat=".0%"),
    )
    for one in distributions:
        style = styles.get(one.arm, Style(COLOURS[-1]))
        p = one.percentiles
        name = label(one.arm)
        if not one.seconds.size:
            figure.add_scatter(
                x=[None], y=[None], mode="lines", name=f"{name}: latency unknown", line={"color": style.colour}
            )
            continue
        summary = ", ".join(f"{q} {seconds_text(p[q])}" for q in ("p50", "p90", "p99"))
        figure.add_scatter(
            x=one.seconds,
            y=one.share,
            mode="lines",
            line={"shape": "hv", "color": style.colour, "width": 2.2, "dash": style.dash},
            name=f"{name}: {summary}",
            legendgroup=one.arm,
            hovertemplate=f"<b>{name}</b><br>%{{y:.2%}} within %{{x:.5~g}} s<br>{one.n:,} questions<extra></extra>",
        )
        shown = [q for q in ("p50", "p90", "p99") if math.isfinite(p[q])]
        figure.add_scatter(
            x=[p[q] for q in shown],
            y=[int(q[1:]) / 100 for q in shown],
            mode="markers",
            marker={"color": style.colour, "size": 8, "symbol": style.symbol},
            text=shown,
            legendgroup=one.arm,
            showlegend=False,
            name=f"{name}: percentiles",
            hovertemplate=f"<b>{name}</b> %{{text}} = %{{x:.5~g}} s<extra></extra>",
        )
    for metric in sorted({t.metric for t in limits}):
        draw_limits(figure, limits, metric, "x", theme)
    return settle(figure)


def frontier(
    fronts: Sequence[Frontier],
    *,
    marked: Sequence[Marked] = (),
    chosen: Marked | None = None,
    alike: Sequence[ArrayLike] = (),
    targets: Sequence[Target] = (),
    trials: tuple[ArrayLike, ArrayLike] | None = None,
    styles: Styles | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """Every pair of two metrics that no policy beats; what breaks a target is shaded.

    Parameters
    ----------
    fronts : sequence of Frontier
        All of the same two metrics, for instance one for each arm. ``customdata[0]`` of a point is ``"F:P"``, the
        point ``fronts[F].front[P]``.
    marked : sequence of Marked
        Baselines and the like.
    chosen : Marked, optional
        The chosen point.
    alike : sequence of array_like of bool
        For each front, which points cannot be told apart from the chosen one (`Curves.alike`).
    targets : sequence of Target
        Those on either metric for all questions are drawn.
    trials : pair of array_like, optional
        Both metrics of Optuna's trials.
    styles : mapping of str to Style, optional
        Of the arms.
    theme : {"light", "dark"}
    """
    axes = {one.front.metrics for one in fronts}
    if len(axes) != 1:
        raise CalibError(f"fronts of one figure must be of the same two metrics, got {sorted(axes) or 'none'}")
    x, y = axes.pop()
    colours = theme_colours(theme)
    styles = dataset_colours(arm for one in fronts for arm in one.arms) if styles is None else styles
    points = [*marked, *([chosen] if chosen is not None else [])]
    marks = tuple(sorted({*marks_of(fronts), *marks_of(points)}))
    figure = canvas(f"{title_of(y)} against {title_of(x)}: what no policy beats", theme=theme, marks=marks)
    at = [[m.values[None][name] for m in points if name in m.values[None]] for name in (x, y)]
    tried = [np.empty(0), np.empty(0)] if trials is None else [np.asarray(t, dtype=np.float64) for t in trials]
    figure.update_layout(
        xaxis=metric_axis(x, [*(f.front.x for f in fronts), at[0], tried[0]], theme),
        yaxis=metric_axis(y, [*(f.front.y for f in fronts), at[1], tried[1]], theme),
    )
    overall = [t for t in targets if t.dataset is None and not t.worst]
    draw_limits(figure, overall, x, "x", theme)
    draw_limits(figure, overall, y, "y", theme)
    if trials is not None:
        figure.add_scatter(
            x=tried[0],
            y=tried[1],
            mode="markers",
            marker={"color": faded("#7F7F7F", 0.45), "size": 4},
            name="Optuna trials",
            hovertemplate=f"trial<br>{title_of(x)} {hover_of(x, 'x')}<br>{title_of(y)} {hover_of(y)}<extra></extra>",
        )
    masks = [np.asarray(mask, dtype=bool) for mask in alike]
    _alike_zone(figure, fronts, masks, chosen, y)
    for f, one in enumerate(fronts):
        name = " + ".join(label(arm) for arm in one.arms)
        style = styles[one.arms[0]] if len(one.arms) == 1 and one.arms[0] in styles else Style(colours["ink"])
        figure.add_scatter(
            x=one.front.x,
            y=one.front.y,
            mode="lines+markers",
            line={"shape": "hv", "color": style.colour, "width": 1.6, "dash": style.dash},
            marker={"color": style.colour, "size": 6, "symbol": style.symbol},
            name=f"front of {name}",
            customdata=_front_details(f, one),
            hovertemplate=(
                f"<b>{title_of(y)} {hover_of(y)}</b><br>{title_of(x)} {hover_of(x, 'x')}<br>p90 %{{customdata[1]}}, "
                "p99 %{customdata[2]}<br>%{customdata[3]}<extra></extra>"
            ),
        )
    for i, mark in enumerate(points):
        values = mark.values[None]
        if math.isfinite(values.get(x, math.nan)) and math.isfinite(values.get(y, math.nan)):
            symbol = "star" if mark is chosen else MARK_SYMBOLS[i % len(MARK_SYMBOLS)]
            _mark_point(figure, mark, x, y, symbol, colours)
    return settle(figure, plot=340)


def _mark_point(figure: go.Figure, mark: Marked, x: str, y: str, symbol: str, colours: Mapping[str, str]) -> None:
    values = mark.values[None]
    star = symbol == "star"
    figure.add_scatter(
        x=[values[x]],
        y=[values[y]],
        mode="markers",
        marker={
            "symbol": symbol,
            "size": 17 if star else 11,
            "color": colours["ink"],
            "line": {"width": 1.5, "color": colours["page" if star else "ink"]},
        },
        name=label(mark.label),
        customdata=[[policy_text(mark.policy), seconds_text(values["p90"]), seconds_text(values["p99"])]],
        hovertemplate=(
            f"<b>{label(mark.label)}</b><br>{title_of(y)} {hover_of(y)}<br>{title_of(x)} {hover_of(x, 'x')}"
            "<br>p90 %{customdata[1]}, p99 %{customdata[2]}<br>%{customdata[0]}<extra></extra>"
        ),
    )


def _front_details(f: int, one: Frontier) -> list[list[str]]:
    """What a point of a front says on hover; its place first."""
    return [
        [f"{f}:{p}", seconds_text(p90), seconds_text(p99), policy_text(point.policy)]
        for p, (point, p90, p99) in enumerate(zip(one.front, one.p90.tolist(), one.p99.tolist(), strict=True))
    ]


def _alike_zone(
    figure: go.Figure,
    fronts: Sequence[Frontier],
    masks: Sequence[NDArray[np.bool_]],
    chosen: Marked | None,
    y: str,
) -> None:
    """Halos on the points that cannot be told apart from the chosen one, and the stretch of accuracy that they span."""
    if chosen is None or not masks:
        return
    x_all = np.concatenate([one.front.x[mask] for one, mask in zip(fronts, masks, strict=True)])
    y_all = np.concatenate([one.front.y[mask] for one, mask in zip(fronts, masks, strict=True)])
    if not y_all.size:
        return
    spanned = np.append(y_all, chosen.values[None].get(y, y_all[0]))
    figure.add_shape(
        type="rect",
        layer="below",
        line={"width": 0},
        fillcolor=faded(COLOURS[5], 0.13),
        x0=0,
        x1=1,
        xref="x domain",
        y0=float(spanned.min()),
        y1=float(spanned.max()),
        name="alike",
    )
    figure.add_scatter(
        x=x_all,
        y=y_all,
        mode="markers",
        marker={"color": faded(COLOURS[5], 0.35), "size": 15},
        name="cannot be told apart from the chosen point",
        hoverinfo="skip",
    )

"""How every figure looks: colours that the colour-blind tell apart, light and dark, axes with units, marks.

Colours that depend on the theme are texts of `THEMES`; a page that follows the reader's own theme replaces those of
one theme by those of the other and needs no second set of figures.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import plotly.graph_objects as go

from calib.errors import CalibError
from calib.outcomes import ESTIMATED, SIMULATED

__all__ = [
    "BAD",
    "COLOURS",
    "GOOD",
    "THEMES",
    "Style",
    "Styles",
    "Theme",
    "axis",
    "canvas",
    "dataset_colours",
    "faded",
    "label",
    "seconds_text",
    "settle",
    "theme_colours",
]

Theme = Literal["light", "dark"]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#9C8B00", "#7F7F7F")
"""Okabe and Ito's, legible on white and on black: their yellow is darkened, their black is a grey."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "hexagram")

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {"page": "#fffffe", "ink": "#1f2329", "muted": "#5a636f", "grid": "#e3e7ec", "mark": "#8a4b00"},
    "dark": {"page": "#14171c", "ink": "#e7ebf1", "muted": "#9aa4b1", "grid": "#2d333c", "mark": "#f0b35c"},
}
"""Colours by theme; no text stands for two roles, so that they can be replaced one by one."""

BAD, GOOD = "#D55E00", "#0072B2"
"""Beyond a limit or lost; within it or won."""

_LONGEST = 42  # letters of a name in a legend


@dataclass(frozen=True)
class Style:
    """How one dataset or arm is drawn in every figure."""

    colour: str
    dash: str = "solid"
    symbol: str = "circle"


Styles = Mapping[str, Style]


def dataset_colours(names: Iterable[str]) -> dict[str, Style]:
    """Style of each dataset (or arm): eight colours, then other dashes and symbols with the same colours.

    Parameters
    ----------
    names : iterable of str
        All names of the store, also where a figure shows a few: so a filter changes no colour.
    """
    styles = [Style(c, d, s) for (d, s), c in product(zip(_DASHES, _SYMBOLS, strict=False), COLOURS)]
    styles += [Style(c, d, s) for s, d, c in product(_SYMBOLS, _DASHES, COLOURS) if Style(c, d, s) not in styles]
    return {name: styles[i % len(styles)] for i, name in enumerate(sorted(set(names)))}


def theme_colours(theme: Theme) -> Mapping[str, str]:
    """Colours of a theme by role."""
    if theme not in THEMES:
        raise CalibError(f"theme must be light or dark, got {theme!r}")
    return THEMES[theme]


def faded(colour: str, alpha: float) -> str:
    """A hexadecimal colour, translucent."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def label(text: str, longest: int = _LONGEST) -> str:
    """Text from data as Plotly shows it literally: no tag, no link, no placeholder of a hover template."""
    short = text if len(text) <= longest else text[: longest - 1] + "…"
    return html.escape(short, quote=False).replace("%{", "%&#123;").replace("\n", " ")


def seconds_text(seconds: float) -> str:
    """Seconds for a reader: ``45 ms``, ``8.20 s``."""
    if not math.isfinite(seconds):
        return "no bound" if seconds > 0 else "unknown"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def canvas(title: str, *, theme: Theme, marks: Sequence[str] = (), **layout: Any) -> go.Figure:
    """An empty figure in the house style: transparent, legend below, marks in the upper right corner.

    `settle` gives it its height once everything is drawn.

    Parameters
    ----------
    title : str
        Plain text.
    theme : {"light", "dark"}
    marks : sequence of str
        `estimated`, `simulated`: what the reader must know about the numbers.
    **layout
        More of the layout.
    """
    colours = theme_colours(theme)
    base: dict[str, Any] = {
        "template": go.layout.Template(),
        "title": {
            "text": label(title, 120),
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "pad": {"b": 14},
            "font": {"size": 15, "color": colours["ink"]},
        },
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12, "color": colours["muted"]},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": colours["page"],
            "bordercolor": colours["grid"],
            "font": {"color": colours["ink"], "size": 12},
            "namelength": -1,
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "yanchor": "top",
            "font": {"size": 11},
            "bgcolor": "rgba(0,0,0,0)",
            "groupclick": "togglegroup",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": colours["muted"], "activecolor": colours["ink"]},
        "colorway": list(COLOURS),
    }
    figure = go.Figure(layout=base | layout)  # at once: each update of a layout costs milliseconds
    if marks:
        figure.add_annotation(
            text=" · ".join(_MARK_TEXTS.get(mark, label(mark)) for mark in marks),
            showarrow=False,
            xref="paper",
            yref="paper",
            x=1,
            y=1,
            xanchor="right",
            yanchor="bottom",
            yshift=8,
            name="marks",
            font={"size": 11, "color": colours["mark"]},
            bordercolor=colours["mark"],
            borderwidth=1,
            borderpad=3,
        )
    return figure


_MARK_TEXTS = {ESTIMATED: "estimated latency", SIMULATED: "simulated"}


def axis(title: str, *, theme: Theme, **more: Any) -> dict[str, Any]:
    """An axis in the house style; the title names the unit."""
    colours = theme_colours(theme)
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": colours["grid"],
        "linecolor": colours["grid"],
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": colours["grid"],
        "automargin": True,
        "exponentformat": "none",
        **more,
    }


def settle(figure: go.Figure, *, plot: int = 270, top: int = 54) -> go.Figure:
    """Set the height such that the plot has its own whatever the legend takes below it; returns the figure.

    Parameters
    ----------
    figure : Figure
        Complete.
    plot : int
        Pixels of the plotting area.
    top : int
        Pixels above it.
    """
    names = [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]
    rows, used = 0, _NARROW
    for name in names if figure.layout.showlegend is not False and len(names) > 1 else []:
        width = 44 + 6.2 * len(html.unescape(name))
        if used + width > _NARROW:
            rows, used = rows + 1, 0.0
        used += width
    below = _AXIS + _ROW * rows
    layout = figure.layout
    layout.height = top + plot + below + 8
    layout.margin = {"l": 56, "r": 16, "t": top, "b": below}
    layout.legend.y = -_AXIS / plot
    return figure


_NARROW = 560.0  # pixels of a plot in half a page: what a legend is fitted to
_AXIS, _ROW = 52, 21  # pixels of the labels and title of an axis; of one row of a legend

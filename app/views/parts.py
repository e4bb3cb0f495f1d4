"""Pieces that several pages draw: marks, the figures of a policy, a chart, a verdict."""

from __future__ import annotations

import html
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from calib.curves import Marked
from calib.figures import Style, Styles, dataset_colours
from calib.figures.drawing import draw_marked
from calib.outcomes import ESTIMATED, SIMULATED
from calib.policy import Policy
from calib.show import percent, seconds
from calib.target import Target
from views.shell import Bench, plain

__all__ = [
    "MARKS",
    "chart",
    "fixed_marks",
    "header",
    "interval",
    "knobs",
    "legend",
    "marks",
    "pair",
    "policy_figures",
    "small",
    "styles",
    "tiles",
    "verdict",
    "with_current",
]

MARKS = {
    SIMULATED: ":orange-badge[simulated] no real model answered; the numbers say nothing about a real server",
    ESTIMATED: ":orange-badge[estimated] latency comes from a rate or a fitted line: it can be met, never certified",
}
_CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"], "responsive": True}
_BORDERS = {"solid": "solid", "dot": "dotted"}
VERDICTS = {"certified": ":green-badge[certified]", "met": ":blue-badge[met]", "not_met": ":red-badge[not met]"}


def header(title: str, now: Bench, what: str) -> None:
    """Title, what the page is for, the marks that touch its numbers, what the store warns of."""
    st.title(title, anchor=False)
    st.caption(what)
    marks(now.space.marked("", now.policy).marks)


def marks(found: Sequence[str]) -> None:
    """Say what numbers rest on, where they do not rest on measurements of a real model."""
    for mark in found:
        st.markdown(MARKS[mark])


def knobs(policy: Policy) -> str:
    """A policy in one line."""
    more = ["calibrated"] * (policy.temperatures is not None) + [f"{len(policy.routes)} routes"] * bool(policy.routes)
    more += [f"pool {policy.pool}"] * (policy.pool != "linear")
    knobs = [f"threshold {policy.threshold:.4g}", f"mix {policy.mix:.4g}", f"think budget {policy.think_budget:,}"]
    return ", ".join([*knobs, f"arm {policy.arm}", *more])


def policy_figures(now: Bench) -> None:
    """Accuracy, think rate and latency of the chosen policy on the tune questions, beside the published default."""
    ours = now.space.marked("current", now.policy).values[None]
    theirs = now.space.marked("default", now.space.baselines["default"]).values[None]
    shown: list[tuple[str, str, str]] = [("Accuracy", "accuracy", "normal"), ("Think rate", "think_rate", "inverse")]
    shown += [(name, name, "inverse") for name in ("p50", "p90", "p99")]
    columns = tiles(len(shown), "policy")
    for column, (label, metric, colour) in zip(columns, shown, strict=True):
        share = metric in ("accuracy", "think_rate")
        value, other = ours[metric], theirs[metric]
        text = percent(value) if share else seconds(value)
        delta: str | None = None
        if value == value and other == other and value != other:
            delta = f"{100 * (value - other):+.1f} points" if share else f"{value - other:+.2f} s"
        column.metric(label, text, delta, delta_color=colour)  # type: ignore[arg-type]  # one of its literals
    unknown = "" if now.space.has_latency(now.policy) else _no_latency(now.policy)
    st.caption(
        f"On {now.space.tune.n:,} tune questions; the small numbers compare with the published default.{unknown}"
    )


def _no_latency(policy: Policy) -> str:
    return (
        f" Seconds of arm {policy.arm!r} are not known: import with --system1-ms and --tokens-per-second, "
        "or measure them with calib collect."
    )


def tiles(count: int, key: str) -> list[DeltaGenerator]:
    """Columns for single numbers."""
    return list(st.container(key=f"tiles-{key}").columns(count, gap="small"))


def pair(key: str, spec: Sequence[int] = (1, 1)) -> list[DeltaGenerator]:
    """Two columns for figures, below each other on a narrow window."""
    return list(st.container(key=f"wide-{key}").columns(spec))


def legend(now: Bench, names: Sequence[str | None]) -> None:
    """One legend for several figures of the same lines."""
    colours, ink = styles(now), "currentColor"
    lines = [(name, Style(ink) if name is None else colours[name]) for name in names]
    spans = [
        f"<span style='display:inline-block;width:22px;vertical-align:middle;border-top:{3 if name is None else 2}px "
        f"{_BORDERS.get(style.dash, 'dashed')} {style.colour}'></span>&nbsp;{html.escape(name or 'all questions')}"
        for name, style in lines
    ]
    symbols = {"★": "current", "○": "published default"} | ({"◆": "tuned optimum"} if tuned_policy(now) else {})
    spans += [f"{symbol}&nbsp;{what}" for symbol, what in symbols.items()]
    st.html(
        "<div style='display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.85rem;opacity:.9'>"
        + "".join(f"<span style='white-space:nowrap'>{span}</span>" for span in spans)
        + "</div>"
    )


def small(
    figure: go.Figure,
    x_title: str | None = None,
    y_title: str | None = None,
    *,
    height: int = 300,
    legend: bool = False,
) -> go.Figure:
    """A figure for half a page: lower, with titles of axes that fit, without its own legend unless it needs one."""
    figure.update_layout(height=height)
    if not legend:
        figure.update_layout(showlegend=False, margin={"b": 48, "r": 12})
    for axes, title in ((figure.select_xaxes(), x_title), (figure.select_yaxes(), y_title)):
        for axis in axes:
            if title is not None and axis.title.text:
                axis.title.text = title
    return figure


def untitled(figure: go.Figure, x_title: str | None = None) -> go.Figure:
    """A figure below a heading that says the same as its title."""
    figure.update_layout(title_text="")
    if x_title is not None:
        figure.update_xaxes(title_text=x_title)
    return figure


def styles(now: Bench) -> Styles:
    """The same colour for the same dataset everywhere."""
    return dataset_colours(now.space.names)


def fixed_marks(now: Bench, *, against: str = "") -> list[Marked]:
    """What figures mark and no slider moves: the published default, the tuned optimum.

    Against the threshold the default stands only where its threshold means the same confidence.
    """
    default = now.space.marked("published default", now.space.baselines["default"])
    if against == "threshold" and (now.policy.confidence != "max" or now.policy.calibration.changes("p1")):
        default = replace(default, values={})  # it keeps its place, and with it the others their symbols
    found = [default]
    tuned = tuned_policy(now)
    if tuned is not None:
        found.append(now.space.marked("tuned optimum", tuned))
    return found


def with_current(
    now: Bench,
    key: Hashable,
    draw: Callable[[], go.Figure],
    *,
    x: str,
    y: str,
    names: Sequence[str | None],
) -> dict[str, Any]:
    """A kept figure with the current policy marked in it: drawing the lines takes longer than a slider may.

    Parameters
    ----------
    key : hashable
        All that the figure without the mark depends on, but for the questions and the theme.
    draw : callable
        Draws it.
    x, y, names
        Knob, metric and lines that the mark stands on.
    """
    base = now.space.kept(("figure", key, now.theme), lambda: draw().to_plotly_json())
    top = go.Figure(layout={"template": go.layout.Template()})
    current = now.space.marked("current", now.policy)
    draw_marked(top, [current], names, x=x, y=y, styles=styles(now), theme=now.theme, lines=x != "think_budget")
    mark = top.to_plotly_json()
    for trace in mark["data"]:
        trace["marker"] |= {"symbol": "star", "size": 14}
    layout = dict(base["layout"])
    layout["shapes"] = [*layout.get("shapes", ()), *mark["layout"].get("shapes", ())]
    return {"data": [*base["data"], *mark["data"]], "layout": layout}


def tuned_policy(now: Bench) -> Policy | None:
    """The best policy inside the limits on the tune questions; none where the limits cannot be met or are unknown."""
    if needs_unknown_latency(now, now.targets):
        return None
    return now.space.best(now.targets, now.policy)


def needs_unknown_latency(now: Bench, targets: Sequence[Target]) -> bool:
    """Whether a limit is on seconds that are not known in any arm."""
    return any(t.is_latency for t in targets) and not any(
        now.space.tune.has_latency(arm) for arm in now.space.tune.arms
    )


def chart(figure: go.Figure | dict[str, Any], key: str, **more: Any) -> Any:
    """A figure as it was drawn, without the buttons that nobody needs."""
    return st.plotly_chart(figure, theme=None, key=key, config=_CONFIG, **more)


def interval(entry: Mapping[str, Any] | None, share: bool) -> str:
    """A value with its interval."""
    if not entry or entry.get("value") is None:
        return "-"
    show = percent if share else seconds
    low, high = entry["interval"]
    text = show(entry["value"])
    return text if low is None or high is None else f"{text} [{show(low)}, {show(high)}]"


def verdict(document: Mapping[str, Any]) -> None:
    """How far a document says that its policy can be trusted."""
    st.markdown(f"**Verdict** {VERDICTS.get(document.get('verdict', ''), '')}")
    certificate = document.get("certificate") or {}
    if certificate.get("statement"):
        st.write(plain(certificate["statement"]))
    rows = []
    for test in document.get("targets") or ():
        share = "%" in test["target"]
        needs = test.get("needs_more")
        rows.append(
            {
                "limit": test["target"],
                "measured [interval]": interval(test, share),
                "kept": "yes" if test.get("met") else "no",
                "certified": "yes" if test.get("certified") else "no",
                "more questions needed": "none" if needs is None else str(needs),
            }
        )
    if rows:
        st.dataframe(rows, hide_index=True)
    held = document.get("test")
    if held:
        st.caption(
            f"On {held['n']:,} held-out questions: accuracy {interval(held.get('accuracy'), True)}, "
            f"think rate {interval(held.get('think_rate'), True)}, p90 {interval(held.get('p90'), False)}, "
            f"p99 {interval(held.get('p99'), False)}."
        )

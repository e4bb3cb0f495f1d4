"""Numbers with units, tables (Rich on a terminal, plain text elsewhere), JSON and progress, for every command."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from calib.jsonnumbers import finite
from calib.target import RATES, Target

if TYPE_CHECKING:
    from calib.crew import Progress
    from calib.policy import Policy

__all__ = [
    "DEFAULT_STORE",
    "ProgressLine",
    "apart",
    "duration",
    "echo_json",
    "in_unit",
    "is_unknown",
    "known",
    "marked_with",
    "number",
    "percent",
    "policy_line",
    "printable",
    "say",
    "seconds",
    "short",
    "table",
    "warn",
]

DEFAULT_STORE = "calib.db"
"""What the commands read without ``--store``; hints leave it out."""


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text from data or a server without what would drive a terminal: each control character as ``?``."""
    return _CONTROL.sub("?", text)


def say(text: str = "", *, head: str = "", err: bool = False, nl: bool = True) -> None:
    """Print text, with a head that may be styled."""
    click.echo(head + printable(text), err=err, nl=nl)


def percent(value: float | None, digits: int = 1) -> str:
    """Share as ``83.4 %``; ``-`` when unknown."""
    return "-" if is_unknown(value) else f"{100 * known(value):.{digits}f} %"


def seconds(value: float | None) -> str:
    """Seconds as ``45 ms`` below one second, ``8.20 s`` above; ``-`` when unknown."""
    if is_unknown(value):
        return "-"
    value = known(value)
    if math.isinf(value):
        return "inf"
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if value < 99.995 else f"{value:.0f} s"


def number(value: float | None, digits: int = 3) -> str:
    """Plain number; ``-`` when unknown."""
    if is_unknown(value):
        return "-"
    value = known(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.{digits}f}"


def is_unknown(value: float | None) -> bool:
    """Whether there is no number to show."""
    return value is None or math.isnan(value)


def known(value: float | None) -> float:
    """A number that is not unknown, for the type checker too."""
    assert value is not None
    return value


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", left: int = 1, err: bool = False
) -> None:
    """Print a table; the first ``left`` columns are text, the others align right.

    Parameters
    ----------
    columns : sequence of str
    rows : sequence of sequence of str
    title : str, optional
    left : int, default 1
    err : bool, default False
        Print to stderr.
    """
    stream = sys.stderr if err else sys.stdout
    rows = [[printable(cell).replace("\n", "?") for cell in row] for row in rows]
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        rich = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(columns):
            rich.add_column(name, justify="left" if i < left else "right", overflow="fold")
        for row in rows:
            rich.add_row(*(Text(cell) for cell in row))  # Text: names from data are never markup
        Console(file=stream).print(rich)
        return
    width = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    if title:
        say(title, err=err)
    for line in [columns, *rows]:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, width, strict=True))]
        say("  ".join(cells).rstrip(), err=err)


def warn(text: str) -> None:
    """Print one line of warning to stderr."""
    say(text, head=click.style("warning: ", fg="yellow"), err=True)


def echo_json(document: Mapping[str, Any]) -> None:
    """Print a document for machines: strict JSON, unknown numbers as null."""
    click.echo(json.dumps(finite(document), ensure_ascii=False, indent=2, allow_nan=False))


def duration(value: float | None) -> str:
    """Long time as ``1:02:03`` or ``4:05``; ``-`` when unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressLine:
    """Progress on stderr: one line that rewrites itself on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = 0.1 if self._terminal else 5.0  # seconds between two updates
        self._last = -math.inf
        self._width = 0
        self._began: float | None = None
        self._at = 0

    def __call__(
        self, label: str, done: int, total: int, rate: float | None = None, eta: float | None = None, note: str = ""
    ) -> None:
        """Show that ``done`` of ``total`` are finished; a rate that is not given counts from the first call."""
        now, finished = time.monotonic(), done >= total
        if rate is None:
            self._began, self._at = (now, done) if self._began is None else (self._began, self._at)
            rate = (done - self._at) / (now - self._began) if now > self._began else 0.0
            eta = (total - done) / rate if rate else None
        if not finished and now - self._last < self._every:
            return
        self._last = now
        share = f"{100 * done / total:3.0f} %" if total else ""
        text = f"{label}  {done:,}/{total:,} {share}  {rate:,.0f}/s  ETA {duration(eta)}" + (
            f"  {note}" if note else ""
        )
        if self._terminal:
            say(text.ljust(self._width), head="\r", nl=finished, err=True)
            self._width = 0 if finished else len(text)
        else:
            say(text, err=True)

    def collection(self, progress: Progress) -> None:
        """Show where the collection of one arm stands."""
        label = f"arm {progress.arm}" + ("" if progress.stage == "all" else f", {progress.stage}")
        notes = [f"{progress.failed} failed"] if progress.failed else []
        if progress.gpu_hours_left >= 0.01:
            notes.append(f"about {progress.gpu_hours_left:.2g} GPU hours left")
        if progress.paused:
            notes.append("paused: the server has requests waiting")
        self(label, progress.done, progress.total, progress.rate, progress.eta_s, "; ".join(notes))

    def asking(self, done: int, total: int, failed: int) -> None:
        """Show how many questions of a verification have their answer."""
        self("verify", done, total, note=f"{failed} failed" if failed else "")


def policy_line(policy: Policy) -> str:
    """One policy in words."""
    if policy.threshold == 0 and not policy.routes:
        return f"never think ({policy.arm})"
    routes = f", {len(policy.routes)} routes" if policy.routes else ""
    late = ""
    if policy.deadline is not None:
        late = f", deadline {seconds(policy.deadline)}" + (", then System 1" if policy.on_deadline == "system1" else "")
    return (
        f"threshold {policy.threshold:.4g}, mix {policy.mix:.3g}, think_budget {policy.think_budget:,}, "
        f"arm {policy.arm}{late}{routes}"
    )


def marked_with(marks: Sequence[str]) -> str:
    """What numbers rest on, behind a title; nothing without a mark."""
    return f"   [{', '.join(marks)}]" if marks else ""


def short(text: str, most: int = 40) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else text[: most - 3] + "..."


def in_unit(target: Target, value: float) -> str:
    """Value of a target's metric in the metric's unit."""
    if target.is_latency:
        return seconds(value)
    return percent(value) if target.metric in RATES else number(value)


def apart(target: Target, value: float) -> str:
    """Difference of two values of a target's metric: shares differ by points."""
    return f"{100 * value:.1f} points" if target.metric in RATES else in_unit(target, value)

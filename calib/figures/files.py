"""All figures of one policy, and the same as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from calib.atomic import write_atomically
from calib.curves import Curves, Marked
from calib.errors import CalibError
from calib.figures.answers import confidences, reliability, risk_coverage, thinking_helps
from calib.figures.knobs import accuracy_by_budget, accuracy_by_mix, threshold_curves
from calib.figures.palette import Theme, dataset_colours, theme_colours
from calib.figures.speed import frontier, latency_distribution
from calib.outcomes import Outcomes
from calib.policy import Policy, baselines
from calib.target import Target
from calib.why import why

__all__ = ["FORMATS", "policy_figures", "write_curves"]

FORMATS = ("html", "json", "png", "svg", "pdf")


def policy_figures(
    curves: Curves,
    policy: Policy,
    *,
    marked: Sequence[Marked] = (),
    targets: Sequence[Target] = (),
    datasets: Sequence[str | None] | None = None,
    theme: Theme = "light",
) -> dict[str, go.Figure]:
    """All figures of one policy by name, as `write_curves` and the report show them.

    Parameters
    ----------
    curves : Curves
    policy : Policy
        Its threshold, mix, budget and arm are what the other knobs are held at.
    marked : sequence of Marked, optional
        What is marked; the policy itself and the published default when left out.
    targets : sequence of Target
    datasets : sequence of str or None, optional
        As for `Curves.against_threshold`.
    theme : {"light", "dark"}

    Returns
    -------
    dict of str to Figure
        Without those that need a latency where it is not known.
    """
    o = curves.outcomes
    marked = marked or (
        curves.marked("this policy", policy),
        curves.marked("published default", baselines(o, policy.arm)["default"]),
    )
    styles = dataset_colours(curves.datasets)
    look: dict[str, Any] = {"styles": styles, "theme": theme}
    at: dict[str, Any] = {
        "mix": policy.mix,
        "think_budget": policy.think_budget,
        "arm": policy.arm,
        "datasets": datasets,
    }
    figures: dict[str, go.Figure] = {}
    known = [arm for arm in o.arms if o.has_latency(arm)]
    for metric in ("accuracy", "think_rate", *(("p50", "p90") if policy.arm in known else ())):
        beside = curves.against_threshold("p99", **at) if metric == "p90" else []
        figures[f"{metric}_by_threshold"] = threshold_curves(
            curves.against_threshold(metric, **at), beside=beside, marked=marked, targets=targets, **look
        )
    figures["accuracy_by_budget"] = accuracy_by_budget(
        curves.against_budget(
            "accuracy", threshold=policy.threshold, mix=policy.mix, arm=policy.arm, datasets=datasets
        ),
        marked=marked,
        targets=targets,
        **look,
    )
    figures["accuracy_by_mix"] = accuracy_by_mix(
        curves.against_mix(threshold=policy.threshold, think_budget=policy.think_budget, datasets=datasets),
        marked=marked,
        targets=targets,
        **look,
    )
    if known:
        figures["latency"] = latency_distribution(curves.latency(policy, arms=known), targets=targets, theme=theme)
        fronts = [curves.frontier(arms=[arm]) for arm in known]
        figures["frontier"] = frontier(
            fronts,
            marked=marked[1:],
            chosen=marked[0],
            alike=[curves.alike(one, policy) for one in fronts],
            targets=targets,
            theme=theme,
        )
    figures["risk_coverage"] = risk_coverage(curves.risk_coverage(datasets=datasets), marked=marked, **look)
    answers = ("simulated",) * o.simulated
    figures["confidences"] = confidences(curves.confidences(), theme=theme)
    figures["reliability"] = reliability(curves.reliability(policy), marks=answers, theme=theme)
    if o.can_think.any():
        rows = why(o, policy.think_budget, policy.arm, policy.mix)
        figures["thinking_helps"] = thinking_helps(rows, theme=theme)
    return figures


def write_curves(
    outcomes: Outcomes | Curves,
    policy: Policy,
    folder: str | os.PathLike[str],
    *,
    format: str = "html",  # noqa: A002 - the name of the option
    marked: Sequence[Marked] = (),
    targets: Sequence[Target] = (),
    theme: Theme = "light",
) -> list[Path]:
    """Write all figures of one policy as files, for ``calib curves``.

    Parameters
    ----------
    outcomes : Outcomes or Curves
    policy : Policy
    folder : path
        Made where it is not there.
    format : {"html", "json", "png", "svg", "pdf"}
        HTML files share one ``plotly.min.js`` beside them and need no network.
    marked, targets, theme
        As for `policy_figures`.

    Returns
    -------
    list of Path
        The figures, by name.

    Raises
    ------
    CalibError
        Unknown format; an image without what Plotly needs for images; a folder that cannot be written.
    """
    if format not in FORMATS:
        raise CalibError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}")
    curves = outcomes if isinstance(outcomes, Curves) else Curves(outcomes, like=policy)
    figures = policy_figures(curves, policy, marked=marked, targets=targets, theme=theme)
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibError(f"{target}: cannot be made ({error.strerror or error})", exit_code=1) from None
    files = {target / f"{name}.{format}": figure for name, figure in figures.items()}
    for figure in files.values():
        figure.update_layout(paper_bgcolor=theme_colours(theme)["page"])  # alone in its file, it brings its own ground
    if format == "html":
        from plotly.offline import get_plotlyjs

        texts = {
            path: figure.to_html(include_plotlyjs="directory", include_mathjax=False) for path, figure in files.items()
        }
        write_atomically({target / "plotly.min.js": get_plotlyjs(), **texts})
    elif format == "json":
        write_atomically({path: figure.to_json() for path, figure in files.items()})
    else:
        for path, figure in files.items():
            _write_image(figure, path, format)
    return list(files)


def _write_image(figure: go.Figure, path: Path, kind: str) -> None:
    try:
        image = figure.to_image(kind, width=900, height=int(figure.layout.height), scale=2)
    except (RuntimeError, ValueError) as error:  # no kaleido, or no Chrome for it
        raise CalibError(
            f"--format {kind} needs kaleido and a Chrome ({str(error).strip().splitlines()[0]}). "
            "Install them (pip install kaleido), or use --format html, which needs neither",
            exit_code=1,
        ) from None
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_bytes(image)
    staged.replace(path)

"""Commands that draw and report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import click

from calib.cli.base import cli, examples, json_option, load, selection
from calib.errors import CalibError

if TYPE_CHECKING:
    pass


@cli.command(
    epilog=examples(
        "calib curves best --out curves/",
        "calib curves best --out curves/ --format json --theme dark",
    )
)
@click.argument("name", metavar="NAME")
@click.option("--out", required=True, metavar="DIR", help="Folder for the figures.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "json", "png", "svg", "pdf"]),
    default="html",
    show_default=True,
    help="html needs no network; images need kaleido and Chrome.",
)
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="Colours.")
@selection
@json_option
def curves(
    name: str,
    out: str,
    form: str,
    theme: Literal["light", "dark"],
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Draw the curves of a tuned policy as files: per threshold, budget and mix, latency, reliability, the front."""
    from calib import show
    from calib.figures import write_curves
    from calib.policy import Policy
    from calib.store import Store
    from calib.target import parse_targets

    with Store.open(store, must_exist=True) as opened:
        document = opened.policy(name)
    policy = Policy.from_dict(_tuned_policy(document))
    outcomes = load(store, model, datasets, traffic, concurrency)
    targets = parse_targets([target["target"] for target in document["targets"]])
    files = [str(path) for path in write_curves(outcomes, policy, out, format=form, targets=targets, theme=theme)]
    if as_json:
        show.echo_json({"files": files})
    else:
        click.echo("\n".join(f"wrote {path}" for path in files))


def _tuned_policy(document: Mapping[str, Any]) -> Mapping[str, Any]:
    policy: Mapping[str, Any] | None = document["policy"]
    if policy is None:
        raise CalibError(
            f"{document['name']!r} holds no policy: no policy meets its targets. Relax one, then tune again"
        )
    return policy


@cli.command(
    epilog=examples(
        "calib report best --out report.html",
        "calib report best --out report.html --no-text",
    )
)
@click.argument("name", metavar="NAME")
@click.option("--out", required=True, metavar="FILE", help="The HTML file; it opens without a server.")
@click.option("--no-text", is_flag=True, help="Leave the texts of the questions out.")
@selection
@json_option
def report(
    name: str,
    out: str,
    no_text: bool,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Write one HTML file: did tuning help, which policy, how far to trust it; then curves, front and flips."""
    from calib import show
    from calib.report import write_report
    from calib.store import Store

    outcomes = load(store, model, datasets, traffic, concurrency)
    with Store.open(store, must_exist=True) as opened:
        document = opened.policy(name)
        _tuned_policy(document)
        where = opened.location
        path = write_report(
            document,
            outcomes,
            out,
            questions=opened.questions(),
            keep_text=not no_text,
            store=where,
            verifications=opened.verifications(name),
        )
    if as_json:
        show.echo_json({"file": str(path)})
    else:
        click.echo(f"wrote {path}")

"""The command line: options, one call and its output for each command.

Heavy imports stand inside the commands, so that ``calib --help`` is instant.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from calib import __version__
from calib.errors import CalibError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from calib.arms import Arm
    from calib.outcomes import Outcomes
    from calib.store import Store

__all__ = ["cli", "main"]

ARMS_EXAMPLES = ("running", "gev", "vllm-mtp", "vllm-draft")
"""Kinds of arms.toml that `calib init` writes (`calib.arms` is not imported for their names)."""

NOT_MET = 3
"""Exit code when a target is not met."""

F = TypeVar("F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Commands in the order of the flow; the user's mistakes print without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order in which they are defined."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn a `CalibError` into its message and exit code, without a traceback."""
        try:
            return super().invoke(ctx)
        except CalibError as error:
            text = "".join(char if char.isprintable() or char == "\n" else "?" for char in str(error))
            click.echo(click.style("error: ", fg="red") + text, err=True)
            ctx.exit(error.exit_code)


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=_examples(
        "calib demo                                     the whole loop on the embedded simulated server",
        "calib collect q.jsonl --arm base=http://127.0.0.1:8000 --arm mtp=http://127.0.0.1:8001",
        "calib optimize --target 'accuracy>=83%, p90<10s'   (quote it: a shell reads < and > as redirections)",
        "calib export best --out serve/",
    )
    + "\n\n\b\nExit codes: 0 done, met or certified; 3 a target is not met; 2 wrong usage or input; 1 a failure.",
)
@click.version_option(__version__, prog_name="calib")
def cli() -> None:
    """Find the operating point of a dual-system decision model, learn how far to trust it, and serve it."""


_store = click.option(
    "--store",
    envvar="CALIB_STORE",
    default="calib.db",
    show_default=True,
    metavar="FILE|URL",
    help="SQLite file, or a PostgreSQL URL. Environment: CALIB_STORE.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document for machines.")
_model = click.option("--model", metavar="NAME", help="Which model of the store; needed when it holds several.")
_datasets = click.option("--datasets", metavar="A,B", help="Only these datasets (repeatable).", multiple=True)
_traffic = click.option("--traffic", metavar="A=3,B=1", help="Weigh the datasets by your traffic; others are left out.")
_at_concurrency = click.option(
    "--concurrency", type=int, metavar="N", help="Latency collected at this concurrency; needed when there are several."
)


def _selection(command: F) -> F:
    """Add the options that choose which outcomes are read."""
    for option in (_at_concurrency, _traffic, _datasets, _model, _store):
        command = option(command)
    return command


def _asking(command: F) -> F:
    """Add the options that say how a real server is asked."""
    for option in (
        click.option(
            "--api-key-env", metavar="NAME", help="Environment variable with the key (the key is not stored)."
        ),
        click.option(
            "--sampling", metavar="JSON", help='Of vLLM\'s thoughts: {"temperature": 0.6}.  [default: its own]'
        ),
        click.option("--prompt-template", metavar="FILE", help="TOML with the prompts for a stock vLLM."),
    ):
        command = option(command)
    return command


def _vllm_options(prompt_template: str | None, sampling: str | None, seed: int) -> dict[str, Any]:
    """Arguments of the stock vLLM engine; all of them can change an answer."""
    import json

    found: dict[str, Any] = {"seed": seed}
    if prompt_template:
        from calib.engine.prompts import read_prompt

        found["prompt"] = read_prompt(prompt_template)
    if sampling:
        try:
            found["sampling"] = json.loads(sampling)
        except ValueError:
            found["sampling"] = None
        if not isinstance(found["sampling"], dict):
            raise CalibError(
                f"--sampling {sampling!r} is not a JSON object; write --sampling '{{\"temperature\": 0.6}}'"
            )
    return found


def _names(values: tuple[str, ...]) -> list[str] | None:
    """Names from a repeatable option, None without any; one value may hold several, joined by commas."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()] or None


def _pairs(values: tuple[str, ...] | str | None, option: str, example: str) -> dict[str, str]:
    """NAME=VALUE pairs of an option, in order."""
    found: dict[str, str] = {}
    for text in [values] if isinstance(values, str) else values or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise CalibError(f"{option} {text!r} is not NAME=VALUE; write for instance: {option} {example}")
        if name.strip() in found:
            raise CalibError(f"{option} names {name.strip()!r} twice; give each name once")
        found[name.strip()] = value.strip()
    return found


def _arms(arms: tuple[str, ...], arms_file: str | None, api_key_env: str | None) -> tuple[Arm, ...]:
    """Arms of ``--arm NAME=URL`` or of a file, one of both."""
    from calib.arms import arm_of, read_arms

    if bool(arms) == bool(arms_file):
        raise CalibError("name the arms: --arm base=http://127.0.0.1:8000 (repeatable), or --arms arms.toml")
    if arms_file:
        return read_arms(arms_file)
    urls = _pairs(arms, "--arm", "base=http://127.0.0.1:8000")
    return tuple(arm_of(name, url, api_key_env=api_key_env) for name, url in urls.items())


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise CalibError(f"{option} {text!r} is not a list of whole numbers; write {option} 512,2048,8192") from None
    if found[0] < 1:
        raise CalibError(f"{option} {text!r}: budgets must be 1 or more tokens")
    return found


@contextlib.contextmanager
def _filled(store: str) -> Iterator[Store]:
    """A store to write into; one that this command made and left empty is taken away again."""
    from calib.store import Store

    new = "://" not in store and not os.path.exists(store)  # noqa: PTH110 - pathlib is not loaded for this
    empty = True
    try:
        with Store.open(store) as opened:
            try:
                yield opened
            finally:
                empty = not opened.models()
    finally:
        if new and empty:
            for ending in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    os.unlink(store + ending)  # noqa: PTH108


def _load(
    store: str, model: str | None, datasets: tuple[str, ...], traffic: str | None, concurrency: int | None
) -> Outcomes:
    from calib.store import Store, load_outcomes

    with Store.open(store, must_exist=True) as opened:
        outcomes = load_outcomes(opened, model=model, datasets=_names(datasets), concurrency=concurrency)
    if traffic:
        outcomes = outcomes.reweighted(_traffic_of(traffic))
    return outcomes


def _traffic_of(text: str) -> dict[str, float]:
    shares = _pairs(tuple(part for part in text.split(",") if part.strip()), "--traffic", "gsm8k=3,bbh=1")
    try:
        return {name: float(value) for name, value in shares.items()}
    except ValueError:
        raise CalibError(f"--traffic {text!r}: a share is not a number; write --traffic gsm8k=3,bbh=1") from None


@cli.command(
    epilog=_examples(
        "calib demo",
        "calib demo --folder /tmp/demo --json",
    )
)
@click.option("--folder", default="demo", show_default=True, metavar="DIR", help="Where the store and configs go.")
@click.option("--target", default="p90<10s", show_default=True, metavar="TARGET", help="Limit to tune for.")
@_json
def demo(folder: str, target: str, as_json: bool) -> None:
    """Run the whole loop on the embedded simulated server, in about a minute.

    Starts the server, collects both arms over HTTP, tunes, exports, serves the policy by the gateway and checks it
    with a plain client. All numbers are simulated and say so.
    """
    from calib.demo import run

    run(folder, target, as_json=as_json)


@cli.command(
    epilog=_examples(
        "calib init",
        "calib init gev",
        "calib init vllm-mtp --out arms-mtp.toml",
    )
)
@click.argument("kind", default="running", metavar="[KIND]", type=click.Choice(ARMS_EXAMPLES))
@click.option("--out", default="arms.toml", show_default=True, metavar="FILE", help="Where to write it.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(kind: str, out: str, force: bool) -> None:
    """Write a commented arms.toml: running servers, gev (serve.sh), vllm-mtp or vllm-draft."""
    from calib.arms import write_example

    path = write_example(kind, out, force=force)
    click.echo(f"wrote {path}. Edit it, then type: calib doctor --arms {path}")


@cli.command(
    epilog=_examples(
        "calib doctor --arm base=http://127.0.0.1:8000",
        "calib doctor --arms arms.toml --store runs.db --json",
    )
)
@click.option("--arm", "arms", multiple=True, metavar="NAME=URL", help="A way of serving (repeatable).")
@click.option("--arms", "arms_file", metavar="FILE", help="arms.toml of calib init.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the key (the key is not stored).")
@_store
@_json
def doctor(arms: tuple[str, ...], arms_file: str | None, api_key_env: str | None, store: str, as_json: bool) -> None:
    """Ask the servers what they are, and whether they are what the store says."""
    import asyncio

    from calib import show
    from calib.doctor import diagnose
    from calib.store import Store

    named = _arms(arms, arms_file, api_key_env)
    if os.path.exists(store) or "://" in store:  # noqa: PTH110 - without a store there is only less to compare
        with Store.open(store, must_exist=True) as opened:
            found = asyncio.run(diagnose(named, opened))
    else:
        found = asyncio.run(diagnose(named))
    if as_json:
        show.echo_json(found.to_dict())
    else:
        show.diagnosis(found)
    if not found.ok:
        sys.exit(1)


@cli.command(
    epilog=_examples(
        "calib questions q.jsonl more.csv",
        "calib questions --profile gev-validation --out gev-validation.jsonl",
    )
)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--profile", metavar="NAME", help="The questions that a simulated server knows, instead of files.")
@click.option("--out", metavar="FILE", help="Write the questions as JSONL (.gz).")
@_json
def questions(files: tuple[str, ...], profile: str | None, out: str | None, as_json: bool) -> None:
    """Check question files and count what they hold: JSONL (.gz), CSV, Parquet."""
    from calib import questions as module
    from calib import show

    if bool(files) == bool(profile):
        raise CalibError("name question files or a --profile, one of both: calib questions q.jsonl")
    if profile:
        from calib.engine.simulated import load_profile

        found = load_profile(profile).questions()
    else:
        found = module.read_questions(list(files))
    if out:
        module.write_questions(found, out)
    summary = module.summarise(found)
    if as_json:
        from dataclasses import asdict

        show.echo_json({"n": len(found), "datasets": [asdict(row) for row in summary], "out": out})
        return
    rows = [
        [
            row.dataset,
            ", ".join(row.kinds),
            str(row.n),
            f"{row.options_min}-{row.options_max}" if row.options_min < row.options_max else str(row.options_min),
            str(row.groups),
        ]
        for row in summary
    ]
    show.table(["dataset", "kind", "questions", "options", "groups"], rows, left=2)
    if out:
        click.echo(f"wrote {len(found)} questions to {out}")


@cli.command(
    epilog=_examples(
        "calib collect q.jsonl --arm base=http://127.0.0.1:8000",
        "calib collect q.jsonl --arm base=URL --arm mtp=URL --budgets 512,2048,8192 --concurrency 8 --all",
        "calib collect q.jsonl --arms arms.toml --target 'p90<10s' --yes --budget-gpu-minutes 60",
        "calib collect q.jsonl --arm base=URL --retry-failed",
        "calib collect q.jsonl --arm base=URL1,URL2 --shard 1/3 --store postgresql://HOST/calib",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="QUESTIONS...")
@click.option(
    "--arm", "arms", multiple=True, metavar="NAME=URL", help="A way of serving (repeatable); URL,URL share it."
)
@click.option("--arms", "arms_file", metavar="FILE", help="arms.toml of calib init: may start and stop the servers.")
@click.option("--budgets", default="8192", show_default=True, metavar="A,B", help="Think budgets, tokens.")
@click.option("--concurrency", default=32, show_default=True, type=click.IntRange(1), help="Requests in flight.")
@click.option("--all", "everything", is_flag=True, help="Think about every question with every arm, not in stages.")
@click.option("--yes", is_flag=True, help="Stages without the question whether to go on.")
@click.option("--target", "targets", multiple=True, metavar="TARGET", help="Stages end once its verdict is settled.")
@click.option("--test-share", type=float, default=0.3, show_default=True, help="Of the stages: as calib optimize.")
@click.option("--pilot", default=100, show_default=True, type=click.IntRange(1), help="Thoughts before the question.")
@click.option("--budget-gpu-minutes", type=click.FloatRange(0, min_open=True), metavar="N", help="Stages end after it.")
@click.option("--latency-sample", default=100, show_default=True, type=click.IntRange(0), help="Questions of a pass.")
@click.option("--latency-concurrency", metavar="A,B", help="A latency pass at each.  [default: as --concurrency]")
@click.option("--audit", default=0, show_default=True, type=click.IntRange(0), help="Questions asked again to audit.")
@click.option("--pause-when-waiting", type=click.IntRange(1), metavar="N", help="Pause while N requests wait there.")
@click.option("--shard", metavar="K/N", help="Only this part of the questions; other machines take the others.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N questions, an even sample.")
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Seconds.")
@click.option("--retries", default=4, show_default=True, type=click.IntRange(0), help="Further attempts of a request.")
@click.option("--retry-failed", is_flag=True, help="Ask again what failed before.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of a stock vLLM's thoughts.")
@_asking
@click.option("--no-text", is_flag=True, help="Keep hashes and numbers, no texts.")
@_datasets
@_store
@_json
def collect(
    files: tuple[str, ...],
    arms: tuple[str, ...],
    arms_file: str | None,
    budgets: str,
    concurrency: int,
    everything: bool,
    yes: bool,
    targets: tuple[str, ...],
    test_share: float,
    pilot: int,
    budget_gpu_minutes: float | None,
    latency_sample: int,
    latency_concurrency: str | None,
    audit: int,
    pause_when_waiting: int | None,
    shard: str | None,
    limit: int | None,
    timeout: float,
    retries: int,
    retry_failed: bool,
    seed: int,
    prompt_template: str | None,
    sampling: str | None,
    api_key_env: str | None,
    no_text: bool,
    datasets: tuple[str, ...],
    store: str,
    as_json: bool,
) -> None:
    """Ask the questions of both systems, over HTTP, and keep answers and seconds in the store.

    Resumes where it stopped: what is stored is not asked again. Ctrl-C stops cleanly.

    On a terminal it goes in stages: System 1 for all, a few thoughts, then what thinking could win and cost and the
    question whether to go on; then thoughts where they can move the decision. In a script --yes asks for stages;
    without it, as with --all, every question is thought about with every arm.
    """
    from calib import campaign, show
    from calib.collect import choose, parse_shard
    from calib.questions import read_questions
    from calib.target import parse_targets
    from calib.tuning import Demand

    staged = not everything and (yes or sys.stdin.isatty())
    named = _arms(arms, arms_file, api_key_env)
    part = parse_shard(shard) if shard else None
    chosen = choose(read_questions(list(files)), datasets=_names(datasets), limit=limit, shard=part)
    options = campaign.Options(
        budgets=tuple(_numbers(budgets, "--budgets")),
        concurrency=concurrency,
        everything=not staged,
        demand=Demand(targets=parse_targets(targets), test_share=test_share),
        pilot=pilot,
        budget_gpu_minutes=float("inf") if budget_gpu_minutes is None else budget_gpu_minutes,
        latency_sample=latency_sample,
        latency_concurrency=tuple(_numbers(latency_concurrency, "--latency-concurrency"))
        if latency_concurrency
        else (),
        audit=audit,
        part=shard or "",
        pause_when_waiting=pause_when_waiting,
        retry_failed=retry_failed,
        keep_text=not no_text,
        timeout=timeout,
        retries=retries,
        vllm=_vllm_options(prompt_template, sampling, seed),
    )
    with _filled(store) as opened:
        result = campaign.run(
            chosen,
            named,
            opened,
            options,
            confirm=None if yes else show.confirm_headroom,
            progress=show.ProgressLine().collection,
            say=lambda text: click.echo(text, err=True),
        )
    if as_json:
        show.echo_json(result.to_dict())
    else:
        show.collected(result, store)
    if result.interrupted:
        sys.exit(130)


@cli.command(
    "import",
    epilog=_examples(
        "calib import runs.jsonl.gz",
        "calib import pairs.jsonl.gz --where s1=gpt-4o --group story",
        "calib import trace.jsonl --system1-ms base=45,mtp=50 --tokens-per-second base=250,mtp=438",
    ),
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only rows with this value (repeatable).")
@click.option("--group", metavar="KEY", help="Field that says which questions belong together.")
@click.option("--arm", metavar="NAME", help="Arm of every row, instead of what the file says.  [default: base]")
@click.option("--model", metavar="NAME", help="Name of the model, instead of what the file says.")
@click.option("--system1-ms", metavar="MS|ARM=MS,..", help="Milliseconds of System 1 where the file holds none.")
@click.option("--tokens-per-second", metavar="N|ARM=N,..", help="Thinking speed where the file holds no seconds.")
@click.option("--read-ms", metavar="MS|ARM=MS,..", help="Milliseconds of the answer read after a thought.")
@click.option("--tokens-key", metavar="KEY", help="Field that stands in for missing think_tokens.")
@click.option(
    "--missing-p2",
    type=click.Choice(["skip", "wrong"]),
    default="skip",
    show_default=True,
    help="Rows with p1 alone: leave out, or count System 2 as failed (wrong when it thinks).",
)
@_store
@_json
def import_(
    files: tuple[str, ...],
    where: tuple[str, ...],
    group: str | None,
    arm: str | None,
    model: str | None,
    system1_ms: str | None,
    tokens_per_second: str | None,
    read_ms: str | None,
    tokens_key: str | None,
    missing_p2: str,
    store: str,
    as_json: bool,
) -> None:
    """Read outcomes that were collected elsewhere: JSONL (.gz) with p1, p2 or p2_by_budget, tokens, seconds."""
    from calib import show
    from calib.importer import import_files

    with _filled(store) as opened:
        summary = import_files(
            opened,
            files,
            where=_pairs(where, "--where", "s1=gpt-4o"),
            group_key=group,
            arm=arm,
            model=model,
            system1_ms=system1_ms,
            tokens_per_second=tokens_per_second,
            read_ms=read_ms,
            tokens_key=tokens_key,
            missing_p2=missing_p2,
        )
    if as_json:
        show.echo_json(summary.to_dict())
        return
    for line in summary.lines():
        click.echo(show.printable(line))
    for text in summary.warnings:
        show.warn(text)
    click.echo(f"next: calib optimize --store {store} --target 'p90<10s'")


@cli.command(epilog=_examples("calib status", "calib status --store runs.db --json"))
@_store
@_json
def status(store: str, as_json: bool) -> None:
    """Show what the store holds: questions by dataset, arm and budget; what failed and why; audits."""
    from calib import audit, show
    from calib.store import Store

    with Store.open(store, must_exist=True) as opened:
        found = opened.status()
        audits = {model.fingerprint: audit.findings(opened, model=model.fingerprint) for model in found.models}
    if as_json:
        audited = {name: [finding.to_dict() for finding in several] for name, several in audits.items()}
        show.echo_json(found.to_dict() | {"audits": audited})
    else:
        show.status(found, [finding for several in audits.values() for finding in several])


@cli.command(
    epilog=_examples(
        "calib evaluate --threshold 0.8 --mix 0.5 --think-budget 8192 --arm mtp",
        "calib evaluate --threshold 0 --json",
    )
)
@click.option("--threshold", type=float, default=0.8, show_default=True, help="Think below; 0 never, 1.1 always.")
@click.option("--mix", type=float, default=0.5, show_default=True, help="Weight of System 2 after thinking.")
@click.option("--think-budget", type=int, metavar="TOKENS", help="Most thinking tokens.  [default: largest collected]")
@click.option("--arm", metavar="NAME", help="Way of serving.  [default: the first]")
@click.option("--cost", metavar="wrong=C,second=D", help="Prices for the metric cost (token=E too).")
@_selection
@_json
def evaluate(
    threshold: float,
    mix: float,
    think_budget: int | None,
    arm: str | None,
    cost: str | None,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Print every metric of one policy, by dataset."""
    from calib import show
    from calib.policy import Cost, Policy
    from calib.policy import evaluate as score

    outcomes = _load(store, model, datasets, traffic, concurrency)
    if think_budget is None:
        think_budget = int(outcomes.budgets[-1])
    policy = Policy(threshold, mix, think_budget, arm or outcomes.arms[0])
    result = score(outcomes, policy, by_dataset=True, cost=Cost.parse(cost) if cost else None)
    marks = list(outcomes.marks_of(policy.arm, think_budget))
    warnings = [*outcomes.warnings, *show.latency_hint(outcomes, policy.arm, think_budget)]
    if as_json:
        show.echo_json(
            {
                "policy": policy.to_dict(),
                "metrics": result.to_dict(),
                "by_dataset": {name: part.to_dict() for name, part in result.by_dataset.items()},
                "n": result.n,
                "marks": marks,
                "warnings": warnings,
            }
        )
    else:
        show.evaluation(policy, result, marks, warnings)


@cli.command(
    epilog=_examples(
        "calib why",
        "calib why --think-budget 2048 --arm mtp --bands",
    )
)
@click.option("--think-budget", type=int, metavar="TOKENS", help="Most thinking tokens.  [default: largest collected]")
@click.option("--mix", type=float, help="Weight of System 2 after thinking.  [default: the server's]")
@click.option("--arm", metavar="NAME", help="Way of serving, for the seconds.  [default: the first]")
@click.option("--bands", is_flag=True, help="Show the confidence bands of each dataset too.")
@_selection
@_json
def why(
    think_budget: int | None,
    mix: float | None,
    arm: str | None,
    bands: bool,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Show whether thinking helps here, by dataset and confidence band, before any tuning."""
    from calib import show
    from calib import why as module

    outcomes = _load(store, model, datasets, traffic, concurrency)
    if think_budget is None:
        think_budget = int(outcomes.budgets[-1])
    mix = outcomes.default_mix if mix is None else mix
    rows = module.why(outcomes, think_budget, arm or outcomes.arms[0], mix)
    hurt = [row.dataset for row in module.hurting(rows)]
    if as_json:
        show.echo_json(
            {
                "think_budget": think_budget,
                "mix": mix,
                "arm": arm or outcomes.arms[0],
                "rows": [row.to_dict() for row in rows],
                "thinking_hurts": hurt,
                "warnings": list(outcomes.warnings),
            }
        )
    else:
        show.why(rows, outcomes.warnings, bands=bands)


@cli.command(
    epilog=_examples(
        "calib optimize --target 'p90<10s'",
        "calib optimize --target p90:10s --target acc:83%",
        "calib optimize --minimize p90 --target 'accuracy>=83%' --name fast",
        "calib optimize --target 'accuracy[worst]>=60%, p90[GPQA Diamond]<20s' --json",
    )
    + "\n\n\b\nQuote a target: without quotes the shell reads p90<10s as p90 and a file named 10s; p90:10s needs none.",
)
@click.option(
    "--target", "targets", multiple=True, metavar="TARGET", help="METRIC[DATASET] OP NUMBER UNIT (repeatable)."
)
@click.option("--maximize", metavar="METRIC", help="Objective.  [default: accuracy]")
@click.option("--minimize", metavar="METRIC", help="Objective: p90, mean, tokens, think_rate, cost, ...")
@click.option("--cost", metavar="wrong=C,second=D", help="Prices for the metric cost (token=E too).")
@click.option("--arm", "arms", multiple=True, metavar="NAME", help="Only this arm (repeatable).")
@click.option("--budgets", metavar="A,B", help="Only these think budgets.")
@click.option("--test-share", type=float, default=0.3, show_default=True, help="Share of questions kept for the test.")
@click.option("--level", type=float, default=0.95, show_default=True, help="Level of the certificate.")
@click.option("--margin", default="auto", show_default=True, metavar="auto|0", help="Room left below each limit.")
@click.option(
    "--prefer",
    type=click.Choice(["best", "cheapest"]),
    default="best",
    show_default=True,
    help="cheapest: the cheapest policy that cannot be told apart from the best.",
)
@click.option("--rate", metavar="N/s", help="Requests a second that the thinking must keep up with.")
@click.option(
    "--calibrate",
    type=click.Choice(["none", "auto"]),
    default="none",
    show_default=True,
    help="auto: tune on calibrated probabilities, where cross-validation gains.",
)
@click.option(
    "--confidence",
    type=click.Choice(["max", "margin", "entropy"]),
    default="max",
    show_default=True,
    help="What the threshold is compared with.",
)
@click.option("--trials", default=100, show_default=True, type=click.IntRange(0), help="Trials of the study; 0: none.")
@click.option("--study", default="policy", show_default=True, metavar="NAME|FILE", help="Study, see below.")
@click.option("--study-name", metavar="NAME", help="Go on with this study of the storage, or begin it.")
@click.option("--storage", metavar="URL|FILE", help="Where studies are kept.  [default: STORE.studies.db]")
@click.option(
    "--sampler", default="tpe", show_default=True, metavar="NAME", help="Optuna sampler: tpe, random, gp, ..."
)
@click.option(
    "--warm-start/--no-warm-start",
    default=True,
    show_default=True,
    help="Begin the study with the exact optimum; without it the gap tells what sampling alone finds.",
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Begin no trial after this."
)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Threads of the study.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the bootstrap and the study.")
@click.option("--name", default="best", show_default=True, help="Save the result under this name.")
@_selection
@_json
def optimize(
    targets: tuple[str, ...],
    maximize: str | None,
    minimize: str | None,
    cost: str | None,
    arms: tuple[str, ...],
    budgets: str | None,
    test_share: float,
    level: float,
    margin: str,
    prefer: str,
    rate: str | None,
    calibrate: str,
    confidence: str,
    trials: int,
    study: str,
    study_name: str | None,
    storage: str | None,
    sampler: str,
    warm_start: bool,
    timeout: float | None,
    jobs: int,
    seed: int,
    name: str,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Find the best policy inside the targets, with a verdict on how far to trust it.

    \b
    METRIC   p50 p90 p95 p99 mean (s, ms); accuracy skill think_rate ece macro_f1 (% or a share);
             tokens brier nll cost (plain)
    DATASET  one dataset, or worst: must hold in each
    OP       < <= > >=, or : for the natural side
    \b
    STUDY    policy (one for all), pareto (accuracy against p90), per_dataset (a route each),
             truncation (what to do with a cut thought), or a file of your own (see studies/)
    """  # noqa: D301 - click reads the escape
    from calib import audit, show
    from calib.policy import Cost
    from calib.store import Store
    from calib.study import check_study, default_storage, run_study
    from calib.target import parse_targets
    from calib.tuning import Demand, tune

    demand = Demand(
        targets=parse_targets(targets),
        maximize=maximize,
        minimize=minimize,
        cost=Cost.parse(cost) if cost else None,
        arms=list(arms) or None,
        budgets=_numbers(budgets, "--budgets") if budgets else None,
        test_share=test_share,
        level=level,
        margin=_margin(margin),
        cheapest=prefer == "cheapest",
        rate=_rate(rate) if rate else None,
        calibrate=calibrate,
        confidence=confidence,
        seed=seed,
    )
    if not name.strip():
        raise CalibError("--name is empty; name the result, for instance: --name best")
    outcomes = _load(store, model, datasets, traffic, concurrency)
    if trials:  # what cannot be run is said before a look at the test questions is spent
        check_study(study, sampler=sampler, storage=storage or default_storage(store))
    with Store.open(store, must_exist=True) as opened:
        tuned = tune(outcomes, demand, ledger=opened.record_look)
        document = tuned.to_dict(name)
        if tuned.policy is not None:
            audits = audit.findings(opened, model=outcomes.fingerprint, threshold=tuned.policy.threshold)
            document["warnings"] += [f"audit: {f.text}" for f in audits if f.level in ("warning", "refuse")]
        opened.save_policy(name, document)  # now, since a study is long and may be stopped
        plain = confidence == "max" and (tuned.policy is None or tuned.policy.pool == "linear")
        if trials and not plain:
            document["warnings"].append("no study: it knows only the largest probability and the linear pool")
        elif trials:
            line = show.ProgressLine()
            studied = demand.arms
            if demand.rate is not None and tuned.best.policy is not None:
                studied = [tuned.best.policy.arm]  # each arm sustains another number of tokens
            try:
                result = run_study(
                    tuned.searched or tuned.tune,
                    demand.limits(tuned.tune, studied[0]) if studied else demand.targets,
                    study=study,
                    name=study_name,
                    storage=storage or default_storage(store),
                    sampler=sampler,
                    trials=trials,
                    timeout=timeout,
                    jobs=jobs,
                    seed=seed,
                    maximize=demand.maximize,
                    minimize=demand.minimize,
                    cost=demand.cost,
                    arms=studied,
                    budgets=demand.budgets,
                    exact=tuned.best,
                    warm_start=[tuned.best.policy] if warm_start and tuned.best.policy is not None else [],
                    progress=None if as_json else lambda done, total, _best: line("study", done, total),
                )
            except KeyboardInterrupt:
                document["warnings"].append("the study was interrupted: its trials are in the storage")
            else:
                document["study"] = result.to_dict()
                document["warnings"] += result.warnings
        opened.save_policy(name, document)
    if as_json:
        show.echo_json(document)
    else:
        show.tuned(tuned, document, store)
    if tuned.verdict == "not_met":
        sys.exit(NOT_MET)


def _margin(text: str) -> bool:
    if text not in ("auto", "0"):
        raise CalibError(f"--margin {text!r}: write auto (sized by the number of test questions) or 0 (none)")
    return text == "auto"


def _rate(text: str) -> float:
    number = text.strip().removesuffix("/s")
    try:
        found = float(number)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise CalibError(f"--rate {text!r} is no rate above 0; write for instance: --rate 5/s")
    return found


@cli.command(
    epilog=_examples(
        "calib calibrate",
        "calib calibrate --threshold 0.7 --mix 0.4 --think-budget 2048",
    )
)
@click.option("--threshold", type=float, help="Policy for the final stage.  [default: the server's]")
@click.option("--mix", type=float, help="Weight of System 2 after thinking.  [default: the server's]")
@click.option("--think-budget", type=int, metavar="TOKENS", help="Most thinking tokens.  [default: largest collected]")
@click.option("--arm", metavar="NAME", help="Way of serving.  [default: the first]")
@click.option("--test-share", type=float, default=0.3, show_default=True, help="Share that nothing is fitted on.")
@_selection
@_json
def calibrate(
    threshold: float | None,
    mix: float | None,
    think_budget: int | None,
    arm: str | None,
    test_share: float,
    store: str,
    model: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Fit temperatures and pool, and show calibration before and after, on questions that were not fitted on.

    Changes nothing: calib optimize --calibrate auto tunes a policy on calibrated probabilities.
    """
    import numpy as np

    from calib import show
    from calib.calibrate import fit
    from calib.policy import Policy
    from calib.stages import stages

    outcomes = _load(store, model, datasets, traffic, concurrency)
    policy = Policy(
        outcomes.default_threshold if threshold is None else threshold,
        outcomes.default_mix if mix is None else mix,
        int(outcomes.budgets[-1]) if think_budget is None else think_budget,
        arm or outcomes.arms[0],
    )
    tuned, held_out = outcomes.split(test_share)
    fitted = fit(tuned, policy=policy)
    shown = tuned if held_out is None else held_out
    before = stages(shown, policy, rng=np.random.default_rng(0))
    after = stages(shown, fitted.policy(policy), rng=np.random.default_rng(0))
    if as_json:
        show.echo_json(
            {
                "calibration": fitted.to_dict(),
                "policy": fitted.policy(policy).to_dict(),
                "n": shown.n,
                "held_out": held_out is not None,
                "before": {name: stage.to_dict() for name, stage in before.items()},
                "after": {name: stage.to_dict() for name, stage in after.items()},
                "warnings": list(outcomes.warnings),
            }
        )
    else:
        show.calibration(fitted, before, after, shown.n, held_out=held_out is not None, warnings=outcomes.warnings)


@cli.command(
    epilog=_examples(
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
@_selection
@_json
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
    outcomes = _load(store, model, datasets, traffic, concurrency)
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
    epilog=_examples(
        "calib report best --out report.html",
        "calib report best --out report.html --no-text",
    )
)
@click.argument("name", metavar="NAME")
@click.option("--out", required=True, metavar="FILE", help="The HTML file; it opens without a server.")
@click.option("--no-text", is_flag=True, help="Leave the texts of the questions out.")
@_selection
@_json
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

    outcomes = _load(store, model, datasets, traffic, concurrency)
    with Store.open(store, must_exist=True) as opened:
        document = opened.policy(name)
        _tuned_policy(document)
        where = opened.location
        path = write_report(document, outcomes, out, questions=opened.questions(), keep_text=not no_text, store=where)
    if as_json:
        show.echo_json({"file": str(path)})
    else:
        click.echo(f"wrote {path}")


@cli.command(
    epilog=_examples(
        "calib export best --out serve/",
        "calib export best --out serve/ --held-by gateway",
    )
)
@click.argument("name", metavar="NAME")
@click.option("--out", required=True, metavar="DIR", help="Folder for policy.json, serve.env, decide-defaults.json.")
@click.option(
    "--held-by",
    type=click.Choice(["gateway", "client"]),
    help="Who holds the think budget of each request; no variable of the reference server sets it.",
)
@_store
@_json
def export(name: str, out: str, held_by: str | None, store: str, as_json: bool) -> None:
    """Write the serve configs of a tuned policy, with its evidence, and say who must hold each knob.

    The files are written in any case; while a knob is held by nobody the output says NOT DONE ("done": false).
    """
    from calib import export as module
    from calib import show
    from calib.store import Store

    with Store.open(store, must_exist=True) as opened:
        document = opened.policy(name)
        identity = opened.identity(document.get("fingerprints", {}).get("model", ""))
    result = module.export(document, out, held_by=held_by, server_temperatures=identity.get("temperatures"))
    if as_json:
        show.echo_json(result.to_dict())
    else:
        show.exported(result)


@cli.command(
    epilog=_examples(
        "calib app --store runs.db",
        "calib app --store runs.db --config-dir serve/ --port 8600",
        "CALIB_APP_TOKEN=... calib app --host 0.0.0.0 --token-env CALIB_APP_TOKEN --read-only",
    )
)
@click.option("--port", default=8501, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--config-dir", metavar="DIR", help="Where a chosen policy may be written; writes go only below it.")
@click.option("--read-only", is_flag=True, help="Hide all writing.")
@click.option("--token-env", metavar="NAME", help="Environment variable with the token; needed off loopback.")
@_store
def app(port: int, host: str, config_dir: str | None, read_only: bool, token_env: str | None, store: str) -> None:
    """Open the dashboard: curves per dataset, choose an operating point, see who flips, write it back."""
    from calib.dashboard import run_app

    run_app(store, port, config_dir, read_only, host, token_env)


@cli.command(
    epilog=_examples(
        "calib serve --policy serve/policy.json --upstream http://127.0.0.1:8000 --port 8080",
        "calib serve --engine simulated --profile gev-validation --port 8000",
        "calib serve --engine simulated --profile gev-validation --policy serve/policy.json",
    )
)
@click.option(
    "--engine", type=click.Choice(["simulated", "auto"]), default="auto", show_default=True, help="Who answers."
)
@click.option("--upstream", metavar="URL", help="Server of the real model: POST /v1/decide, or a stock vLLM.")
@click.option("--profile", default="gev-validation", show_default=True, metavar="NAME", help="Simulated figures.")
@click.option("--policy", "policy_file", metavar="FILE", help="policy.json of calib export: apply it to each request.")
@click.option("--arm", metavar="NAME", help="Simulated way of serving: base, mtp.  [default: the policy's, else base]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--time-scale",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the simulated seconds that it really waits.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Of the simulated model, or of vLLM's thoughts.")
@click.option("--timeout", default=600.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Seconds.")
@_asking
def serve(
    engine: str,
    upstream: str | None,
    profile: str,
    policy_file: str | None,
    arm: str | None,
    host: str,
    port: int,
    time_scale: float,
    seed: int,
    timeout: float,
    prompt_template: str | None,
    sampling: str | None,
    api_key_env: str | None,
) -> None:
    """Serve POST /v1/decide and GET /v1/decide/info in front of an engine, under one policy."""
    from calib import serve as module
    from calib.export import load_policy_file

    policy = load_policy_file(policy_file) if policy_file else None
    if (engine == "simulated") == bool(upstream):
        raise CalibError("name who answers: --upstream http://127.0.0.1:8000, or --engine simulated")
    if upstream:
        asked = _vllm_options(prompt_template, sampling, seed) | {"label_mass": False}

        async def opened() -> FastAPI:
            from calib.engine.auto import probe

            real = await probe(upstream, vllm=asked, timeout=timeout, api_key_env=api_key_env)
            context = (await real.info()).raw.get("max_model_len")
            return await module.open_app(real, policy=policy, **({"context_tokens": context} if context else {}))

        name = f"in front of {upstream.rpartition('@')[2]}"
    else:
        if policy and arm and arm != policy.arm:
            raise CalibError(
                f"--arm {arm}, but {policy_file} was tuned for arm {policy.arm}; leave --arm out, or tune again"
            )
        from calib.engine.simulated import SimulatedEngine, load_profile

        arm = arm or (policy.arm if policy else "base")
        simulated = SimulatedEngine(load_profile(profile), arm=arm, time_scale=time_scale, seed=seed)

        async def opened() -> FastAPI:
            return await module.open_app(simulated, policy=policy, context_tokens=simulated.context_tokens)

        name = f"answers for profile {profile}, arm {arm} (simulated)"
    module.run(opened, host=host, port=port, announce=lambda url: click.echo(f"calib: {url} {name}", err=True))


def main() -> None:
    """Run the command line; output that cannot be written is an error without a traceback."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for the life of the process
    try:
        cli(prog_name="calib")
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"error: the output cannot be written ({error.strerror or error})", err=True)
        sys.exit(1)

"""Commands that fill a store and say what it holds."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from calib.cli.base import (
    ARMS_EXAMPLES,
    FiniteRange,
    arms_of,
    asking,
    cli,
    datasets_option,
    examples,
    filled_store,
    json_option,
    names_of,
    numbers_of,
    pairs_of,
    store_option,
    vllm_options,
)
from calib.errors import CalibError

if TYPE_CHECKING:
    pass


@cli.command(
    epilog=examples(
        "calib demo",
        "calib demo --folder /tmp/demo --json",
        "calib demo --recorded",
    )
)
@click.option("--folder", default="demo", show_default=True, metavar="DIR", help="Where the store and configs go.")
@click.option("--target", metavar="TARGET", help="Limit to tune for.  [default: p90<10s; recorded: p90<2s]")
@click.option("--recorded", is_flag=True, help="Tune on recorded runs of a real model instead, in seconds.")
@json_option
def demo(folder: str, target: str | None, recorded: bool, as_json: bool) -> None:
    """Run the whole loop on the embedded simulated server, in about a minute.

    Starts the server, collects both arms over HTTP, tunes, exports, serves the policy by the gateway and checks it
    with a plain client. All numbers are simulated and say so; with --recorded they were measured on a GPU.
    """
    if recorded:
        from calib import recorded as module

        module.run(folder, target or module.TARGET, as_json=as_json)
        return
    from calib.demo import run

    run(folder, target or "p90<10s", as_json=as_json)


@cli.command(
    epilog=examples(
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
    epilog=examples(
        "calib doctor --arm base=http://127.0.0.1:8000",
        "calib doctor --arms arms.toml --store runs.db --json",
    )
)
@click.option("--arm", "arms", multiple=True, metavar="NAME=URL", help="A way of serving (repeatable).")
@click.option("--arms", "arms_file", metavar="FILE", help="arms.toml of calib init.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the key (the key is not stored).")
@store_option
@json_option
def doctor(arms: tuple[str, ...], arms_file: str | None, api_key_env: str | None, store: str, as_json: bool) -> None:
    """Ask the servers what they are, and whether they are what the store says."""
    import asyncio

    from calib import show
    from calib.doctor import diagnose
    from calib.store import Store

    named = arms_of(arms, arms_file, api_key_env)
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
    epilog=examples(
        "calib questions q.jsonl more.csv",
        "calib questions --profile gev-validation --out gev-validation.jsonl",
    )
)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--profile", metavar="NAME", help="The questions that a simulated server knows, instead of files.")
@click.option("--out", metavar="FILE", help="Write the questions as JSONL (.gz).")
@json_option
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
    epilog=examples(
        "calib collect q.jsonl --arm base=http://127.0.0.1:8000",
        "calib collect q.jsonl --arm base=URL --arm mtp=URL --budgets 512,2048,8192 --concurrency 8 --all",
        "calib collect q.jsonl --arms arms.toml --target 'p90<10s' --yes --budget-gpu-minutes 60",
        "calib collect q.jsonl --arms arms.toml --latency-sample 100 --concurrency 1,32",
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
@click.option(
    "--concurrency", default="32", show_default=True, metavar="N|A,B", help="In flight; a latency pass at each."
)
@click.option("--all", "everything", is_flag=True, help="Think about every question with every arm, not in stages.")
@click.option("--yes", is_flag=True, help="Go on after the first thoughts without asking, only while it pays.")
@click.option("--target", "targets", multiple=True, metavar="TARGET", help="Stages end once its verdict is settled.")
@click.option("--test-share", type=float, default=0.3, show_default=True, help="Of the stages: as calib optimize.")
@click.option("--pilot", default=100, show_default=True, type=click.IntRange(1), help="Thoughts before the question.")
@click.option("--budget-gpu-minutes", type=FiniteRange(0, min_open=True), metavar="N", help="Stages end after it.")
@click.option("--latency-sample", default=100, show_default=True, type=click.IntRange(0), help="Questions of a pass.")
@click.option("--latency-concurrency", metavar="A,B", help="Latency passes at these loads instead.")
@click.option("--audit", default=0, show_default=True, type=click.IntRange(0), help="Questions asked again to audit.")
@click.option("--pause-when-waiting", type=click.IntRange(1), metavar="N", help="Pause while N requests wait there.")
@click.option("--shard", metavar="K/N", help="Only this part of the questions; other machines take the others.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N questions, an even sample.")
@click.option("--timeout", default=600.0, show_default=True, type=FiniteRange(0, min_open=True), help="Seconds.")
@click.option("--retries", default=4, show_default=True, type=click.IntRange(0), help="Further attempts of a request.")
@click.option("--retry-failed", is_flag=True, help="Ask again what failed before.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of a stock vLLM's thoughts.")
@asking
@click.option("--no-text", is_flag=True, help="Keep hashes and numbers, no texts.")
@datasets_option
@store_option
@json_option
def collect(
    files: tuple[str, ...],
    arms: tuple[str, ...],
    arms_file: str | None,
    budgets: str,
    concurrency: str,
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

    It goes in stages: System 1 for all, a few thoughts, then what thinking could win and cost and the question
    whether to go on; then thoughts where they can move the decision, until more would not change it, and the seconds
    of each arm on a sample. --yes, or no terminal to ask on, goes on by itself. When nobody says when to stop (no
    terminal, and none of --yes, --target, --budget-gpu-minutes), few questions and those of a simulated server are
    all thought about, by every arm. --all thinks about every question with every arm.

    \b
    Exit codes: 0 done, or ended after the first thoughts on your word; 130 stopped before the end, the same command
    goes on; 2 wrong usage; 1 a failure. What was answered is stored in every case.
    """  # noqa: D301 - click reads the escape
    from calib import campaign, show
    from calib.collect import choose, parse_shard
    from calib.questions import read_questions
    from calib.target import parse_targets
    from calib.tuning import Demand

    asks = sys.stdin.isatty() and not (yes or everything)
    named = arms_of(arms, arms_file, api_key_env)
    part = parse_shard(shard) if shard else None
    chosen = choose(read_questions(list(files)), datasets=names_of(datasets), limit=limit, shard=part)
    loads = numbers_of(concurrency, "--concurrency")
    timed_at = numbers_of(latency_concurrency, "--latency-concurrency") if latency_concurrency else loads
    options = campaign.Options(
        budgets=tuple(numbers_of(budgets, "--budgets")),
        concurrency=loads[-1],
        everything=everything,
        unattended=not (asks or yes or targets or budget_gpu_minutes),
        demand=Demand(targets=parse_targets(targets), test_share=test_share),
        pilot=pilot,
        budget_gpu_minutes=float("inf") if budget_gpu_minutes is None else budget_gpu_minutes,
        latency_sample=latency_sample,
        latency_concurrency=tuple(timed_at) if latency_concurrency or len(loads) > 1 else (),
        audit=audit,
        part=shard or "",
        pause_when_waiting=pause_when_waiting,
        retry_failed=retry_failed,
        keep_text=not no_text,
        timeout=timeout,
        retries=retries,
        vllm=vllm_options(prompt_template, sampling, seed),
    )
    with filled_store(store) as opened:
        result = campaign.run(
            chosen,
            named,
            opened,
            options,
            confirm=None if yes else show.confirm_headroom if asks else show.tell_headroom,
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
    epilog=examples(
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
@store_option
@json_option
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

    with filled_store(store) as opened:
        summary = import_files(
            opened,
            files,
            where=pairs_of(where, "--where", "s1=gpt-4o"),
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


@cli.command(epilog=examples("calib status", "calib status --store runs.db --json"))
@store_option
@json_option
def status(store: str, as_json: bool) -> None:
    """Show what the store holds: questions by dataset, arm and budget; what failed and why; audits."""
    from calib import audit, show
    from calib.store import Store

    with Store.open(store, must_exist=True) as opened:
        found = opened.status()
        audits = {model.fingerprint: audit.findings(opened, model=model.fingerprint) for model in found.answered}
    if as_json:
        audited = {name: [finding.to_dict() for finding in several] for name, several in audits.items()}
        show.echo_json(found.to_dict() | {"audits": audited})
    else:
        show.status(found, [finding for several in audits.values() for finding in several])

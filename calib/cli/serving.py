"""Commands that bring a policy to a server and see whether it holds there."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from calib.cli.base import (
    NOT_MET,
    FiniteRange,
    asking,
    cli,
    datasets_option,
    examples,
    json_option,
    names_of,
    pairs_of,
    store_option,
    traffic_of,
    traffic_option,
    vllm_options,
)
from calib.errors import CalibError

if TYPE_CHECKING:
    from calib.live import Live


@cli.command(
    epilog=examples(
        "calib export best --out serve/",
        "calib export best --out serve/ --held-by gateway --note 'p90 agreed in the meeting'",
        "calib export best --out serve/ --held-by gateway --route-keys dataset      (clients send that field)",
        "calib export best --check http://127.0.0.1:8080                            (is it live, knob by knob)",
    )
)
@click.argument("name", metavar="NAME")
@click.option("--out", metavar="DIR", help="Folder for the files; what it held before stays in its history.")
@click.option("--note", metavar="TEXT", help="Why, for the history.  [default: calib export NAME]")
@click.option(
    "--held-by",
    type=click.Choice(["gateway", "client"]),
    help="Who holds the think budget of each request; no variable of the reference server sets it.",
)
@click.option(
    "--route-keys",
    metavar="KEYS",
    default="",
    help="What requests carry that a route may go by, such as dataset; kind and n_options are always there.",
)
@click.option("--check", "check_url", metavar="URL", help="Ask this server or gateway, knob by knob: is it live.")
@click.option("--upstream", metavar="URL", help="Refuse when this server serves another model; nothing else is asked.")
@click.option("--arm", metavar="NAME", help="What the server was started as, where it does not tell itself.")
@click.option("--allow-simulated", is_flag=True, help="Write the numbers of a simulated model.")
@click.option("--allow-other-model", is_flag=True, help="Write over a policy of another model, or for one.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of vLLM's thoughts, as they were collected.")
@asking
@store_option
@json_option
def export(
    name: str,
    out: str | None,
    note: str | None,
    held_by: str | None,
    route_keys: str,
    check_url: str | None,
    upstream: str | None,
    arm: str | None,
    allow_simulated: bool,
    allow_other_model: bool,
    seed: int,
    prompt_template: str | None,
    sampling: str | None,
    api_key_env: str | None,
    store: str,
    as_json: bool,
) -> None:
    """Write the serve configs of a tuned policy, with its evidence, and say who must hold each knob.

    The files are written in any case; while a knob is held by nobody the output says NOT DONE ("done": false). A result
    that changes no file writes none and says so.

    With --check, each knob as the server has it beside what is wanted: exit code 3 when one is not live. Without --out
    nothing is written then.
    """
    import asyncio

    from calib import export as module
    from calib import saved, show
    from calib.policy import Policy
    from calib.store import Store

    if not out and not check_url:
        raise CalibError("say where to write (--out serve/), or which server to ask (--check http://127.0.0.1:8000)")
    with Store.open(store, must_exist=True) as opened:
        document = opened.policy(name)
        origin = saved.provenance(opened, document)
        policy = None if document["policy"] is None else Policy.from_dict(document["policy"])
        carried = [key.strip() for key in route_keys.split(",") if key.strip()]
        reason = "" if policy is None else module.unroutable(policy, carried)
        lost = None
        if policy is not None and policy.routes and (reason or held_by != "gateway"):
            lost = saved.without_routes(opened, document)
    if reason:
        raise CalibError("\n".join([reason, *show.route_loss(lost)]))

    def asked(url: str) -> Live:
        from calib.live import check

        vllm = vllm_options(prompt_template, sampling, seed)
        return asyncio.run(
            check(url, document, origin=origin, held_by=held_by, arm=arm, vllm=vllm, api_key_env=api_key_env)
        )

    found: dict[str, Any] = {}
    live = None if policy is None or check_url is None else asked(check_url)
    if out:
        server = live if upstream is None or policy is None else asked(upstream)
        result = module.export(
            document,
            out,
            note=note,
            held_by=held_by,
            origin=origin,
            route_keys=carried,
            running=None if server is None else server.running,
            allow_simulated=allow_simulated,
            allow_other_model=allow_other_model,
        )
        found |= result.to_dict() | ({} if lost is None else {"without_routes": lost})
        if not as_json:
            show.exported(result)
            for line in show.route_loss(lost):
                show.warn(line)
    elif policy is None:
        raise CalibError(f"{name!r} holds no policy: no policy meets its targets, so none can be live")
    if live is not None:
        found["check"] = live.to_dict()
        if not as_json:
            show.live(live)
    if as_json:
        show.echo_json(found)
    if live is not None and live.live is False:
        sys.exit(NOT_MET)


@cli.command(
    epilog=examples(
        "calib diff serve/ best                       what exporting best would change",
        "calib diff best cheap --store runs.db        two saved policies",
        "calib diff serve/@3 serve/@5 --json          two entries of a folder's history",
    )
)
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@store_option
@json_option
def diff(before: str, after: str, store: str, as_json: bool) -> None:
    """Compare two policies: knobs, verdict, predicted metrics, and what it means.

    A and B: the name of a policy in the store, a policy.json, an export folder, or FOLDER@N for entry N of its history.
    """
    from calib import show
    from calib.diff import difference
    from calib.saved import saved

    one, two = saved(before, store), saved(after, store)
    found = difference(one.document, two.document)
    if as_json:
        show.echo_json({"a": one.where, "b": two.where, **found.to_dict()})
    else:
        show.difference(found, one.where, two.where)


@cli.command(
    epilog=examples(
        "calib rollback serve/ --list",
        "calib rollback serve/ --note 'p90 broke at noon'       to what was there before",
        "calib rollback serve/ --to 3 --note 'as in May'",
    )
)
@click.argument("folder", metavar="DIR")
@click.option("--to", "number", type=click.IntRange(1), metavar="N", help="Entry.  [default: the one before]")
@click.option("--note", metavar="TEXT", help="Why, for the history.")
@click.option("--list", "listed", is_flag=True, help="Show the history and change nothing.")
@json_option
def rollback(folder: str, number: int | None, note: str | None, listed: bool, as_json: bool) -> None:
    """Put back an earlier state of an export folder, as a new entry of its history.

    Without --to it is the newest state that differs from what is there, so the same command again takes it back.
    """
    from calib import show
    from calib.history import ConfigFolder

    if not os.path.isdir(folder):  # noqa: PTH112 - pathlib is not loaded for this
        raise CalibError(f"there is no folder {folder}; name one that calib export wrote")
    configs = ConfigFolder(folder)
    if listed:
        entries, now = configs.entries(), configs.files()
        if as_json:
            show.echo_json({"folder": folder, "entries": [entry.to_dict(now) for entry in entries]})
        else:
            show.history(entries, now)
        return
    if note is None:
        raise CalibError("say why: --note 'p90 broke at noon'; calib rollback DIR --list shows what there is")
    wanted = configs.entry(number) if number is not None else configs.before()
    was = configs.current()
    done = configs.roll_back(wanted.number, note)
    if as_json:
        told = done.to_dict(configs.files())
        show.echo_json({"folder": folder, "to": wanted.number, "entry": done.number, "now": told})
    else:
        show.rolled_back(folder, wanted, done, was)


@cli.command(
    epilog=examples(
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
@store_option
def app(port: int, host: str, config_dir: str | None, read_only: bool, token_env: str | None, store: str) -> None:
    """Open the dashboard: curves per dataset, choose an operating point, see who flips, write it back."""
    from calib.dashboard import run_app

    run_app(store, port, config_dir, read_only, host, token_env)


@cli.command(
    epilog=examples(
        "calib serve --policy serve/policy.json --upstream http://127.0.0.1:8000 --port 8080",
        "calib serve --policy serve/policy.json --upstream http://10.0.0.1:8000 --upstream http://10.0.0.2:8000",
        "CALIB_KEY=... calib serve --policy serve/policy.json --upstream URL --host 0.0.0.0 --key-env CALIB_KEY",
        "calib serve --policy serve/policy.json --upstream URL --log decisions.jsonl     (calib watch reads it)",
        "calib serve --engine simulated --profile gev-validation --policy serve/policy.json",
        "kill -HUP PID                                  reads the policy again and opens the log anew",
    )
)
@click.option(
    "--engine", type=click.Choice(["simulated", "auto"]), default="auto", show_default=True, help="Who answers."
)
@click.option(
    "--upstream",
    "upstreams",
    metavar="URL",
    multiple=True,
    help="Server of the real model: POST /v1/decide, or a stock vLLM. Repeatable, for several servers of one model.",
)
@click.option("--profile", default="gev-validation", show_default=True, metavar="NAME", help="Simulated figures.")
@click.option(
    "--policy",
    "policy_file",
    metavar="FILE",
    help="policy.json of calib export: apply it to each request. It is read again when it changes.",
)
@click.option("--allow-other-model", is_flag=True, help="Take a policy that was tuned on another model.")
@click.option("--arm", metavar="NAME", help="Simulated way of serving: base, mtp.  [default: the policy's, else base]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--key-env",
    metavar="NAME",
    help="Environment variable with the bearer key that clients must send; needed off loopback.",
)
@click.option("--no-key", is_flag=True, help="Off loopback, answer whoever can reach it.")
@click.option(
    "--max-concurrency",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="Requests answered at a time.",
)
@click.option(
    "--max-queue",
    default=1024,
    show_default=True,
    type=click.IntRange(0),
    help="Requests that may wait; more get 429 with Retry-After, as does one that would wait beyond its deadline.",
)
@click.option(
    "--max-body", default=8.0, show_default=True, type=FiniteRange(0, min_open=True), help="MiB of one request."
)
@click.option("--log", "log_file", metavar="FILE", help="Append one JSON line of numbers for each decision; no text.")
@click.option(
    "--time-scale",
    default=0.0,
    show_default=True,
    type=FiniteRange(0, 1),
    help="Share of the simulated seconds that it really waits.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Of the simulated model, or of vLLM's thoughts.")
@click.option("--timeout", default=600.0, show_default=True, type=FiniteRange(0, min_open=True), help="Seconds.")
@asking
def serve(
    engine: str,
    upstreams: tuple[str, ...],
    profile: str,
    policy_file: str | None,
    allow_other_model: bool,
    arm: str | None,
    host: str,
    port: int,
    key_env: str | None,
    no_key: bool,
    max_concurrency: int,
    max_queue: int,
    max_body: float,
    log_file: str | None,
    time_scale: float,
    seed: int,
    timeout: float,
    prompt_template: str | None,
    sampling: str | None,
    api_key_env: str | None,
) -> None:
    """Serve POST /v1/decide in front of an engine, under one policy.

    GET /v1/decide/info tells the policy in force, /metrics counts (Prometheus), /health and /ready are for probes. A
    changed policy file is taken over between two requests; a broken one, or one of another model, is refused and the
    old one stays. The header x-calib-dataset names the dataset for the policy's routes. SIGTERM finishes the requests
    in flight.
    """
    from calib.serving import Model, Settings, run_gateway

    if (engine == "simulated") == bool(upstreams):
        raise CalibError("name who answers: --upstream http://127.0.0.1:8000, or --engine simulated")

    async def real(_policy_arm: str | None) -> Model:
        from calib.gateway import CONTEXT_TOKENS
        from calib.upstreams import open_upstreams

        asked = vllm_options(prompt_template, sampling, seed) | {"label_mass": False}
        pool, info = await open_upstreams(upstreams, vllm=asked, timeout=timeout, api_key_env=api_key_env)
        names = " and ".join(url.rpartition("@")[2] for url in upstreams)
        return Model(pool, info, info.raw.get("max_model_len") or CONTEXT_TOKENS, f"in front of {names}")

    async def simulated(policy_arm: str | None) -> Model:
        from calib.engine.simulated import SimulatedEngine, load_profile

        way = arm or policy_arm or "base"
        made_up = SimulatedEngine(load_profile(profile), arm=way, time_scale=time_scale, seed=seed)
        name = f"answers for profile {profile}, arm {way} (simulated)"
        return Model(made_up, await made_up.info(), made_up.context_tokens, name, way)

    settings = Settings(
        host=host,
        port=port,
        policy_file=policy_file,
        allow_other_model=allow_other_model,
        key_env=key_env,
        no_key=no_key,
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_body=int(max_body * 2**20),
        log_file=log_file,
    )
    run_gateway(real if upstreams else simulated, settings, lambda line: click.echo(f"calib: {line}", err=True))


@cli.command(
    epilog=examples(
        "calib verify serve/policy.json --arm mtp=http://127.0.0.1:8080",
        "calib verify best --arm mtp=http://127.0.0.1:8080 --rate 2/s --n 300",
        "calib verify serve/ --arm base=https://decide.example.org --concurrency 16 --api-key-env DECIDE_KEY --json",
    )
)
@click.argument("policy", metavar="POLICY")
@click.option("--arm", required=True, metavar="NAME=URL", help="The policy's way of serving: a gateway that obeys it.")
@click.option("--rate", metavar="N/s", help="Requests arrive at this rate, however late the server is (Poisson).")
@click.option("--concurrency", type=int, metavar="N", help="Requests in flight.  [default: as collected]")
@click.option("--n", "most", type=int, metavar="N", help="Questions, drawn from the held-out ones.  [default: all]")
@click.option("--questions", "files", multiple=True, metavar="FILE", help="Texts, for a store that keeps none.")
@click.option("--predict-at", type=int, metavar="N", help="Predict from seconds collected at this load alone.")
@click.option("--test-share", type=float, metavar="SHARE", help="Share held out.  [default: the policy's, else 0.3]")
@click.option("--level", type=float, metavar="LEVEL", help="Of intervals, tests.  [default: the policy's, else 0.95]")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the draw, the arrivals and the bootstrap.")
@click.option("--timeout", default=600.0, show_default=True, type=FiniteRange(0, min_open=True), help="Seconds.")
@click.option("--allow-other-model", is_flag=True, help="Go on where the server is not the model that was tuned.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable with the key (the key is not stored).")
@datasets_option
@traffic_option
@store_option
@json_option
def verify(
    policy: str,
    arm: str,
    rate: str | None,
    concurrency: int | None,
    most: int | None,
    files: tuple[str, ...],
    predict_at: int | None,
    test_share: float | None,
    level: float | None,
    seed: int,
    timeout: float,
    allow_other_model: bool,
    api_key_env: str | None,
    datasets: tuple[str, ...],
    traffic: str | None,
    store: str,
    as_json: bool,
) -> None:
    """Is the promise kept: a plain client asks held-out questions, predicted beside measured.

    POLICY is the name of a saved policy, a policy.json, the folder that holds one, or FOLDER@N for an entry of its
    history. The client sends questions and thinking: auto, nothing else. Ctrl-C ends the asking and compares what was
    asked. Exit code 3: a target is missed.
    """
    from calib import show
    from calib.arrivals import Load, parse_rate
    from calib.measured import read_served
    from calib.questions import read_questions
    from calib.store import Store
    from calib.verify import Trial
    from calib.verify import verify as run

    if rate is not None and concurrency is not None:
        raise CalibError("--rate and --concurrency exclude each other: requests arrive at a rate, or follow each other")
    load = Load(concurrency=concurrency) if concurrency is not None else None
    if rate is not None:
        load = Load(parse_rate(rate))
    named = pairs_of(arm, "--arm", "base=http://127.0.0.1:8080")
    line = show.ProgressLine()
    with Store.open(store, must_exist=True) as opened:
        served = read_served(policy, opened)
        (name, url), *_ = named.items()
        trial = Trial(
            name,
            url,
            load,
            n=most,
            seed=seed,
            level=level,
            test_share=test_share,
            predict_at=predict_at,
            datasets=names_of(datasets),
            traffic=traffic_of(traffic) if traffic else None,
            questions=read_questions(list(files)) if files else None,
            allow_other_model=allow_other_model,
            timeout=timeout,
            api_key_env=api_key_env,
        )
        found = run(served, opened, trial, progress=line.asking)
    if as_json:
        show.echo_json(found.to_dict())
    else:
        show.verified(found.to_dict())
    if found.missed:
        sys.exit(NOT_MET)


@cli.command(
    epilog=examples(
        "calib watch decisions.jsonl --policy serve/policy.json",
        "calib watch decisions.jsonl.2.gz decisions.jsonl.1.gz decisions.jsonl --json        (oldest first)",
        "calib watch decisions.jsonl --follow --every 60        quiet until a promise is at risk, broken or ok again",
        "calib watch day.jsonl --shadow --policy serve/policy.json        a day of System 1 alone: what would it do?",
        "calib watch day.jsonl --shadow --policy serve/policy.json --threshold 0.7 --rate 3/s",
    )
    + "\n\n\b\nExit codes: 0 no promise is broken, 3 one is, 2 wrong usage or input.",
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option(
    "--policy", "policy_file", metavar="FILE", help="policy.json that is served.  [default: the one beside the log]"
)
@click.option("--version", metavar="V", help="Policy version in the log to look at.  [default: the policy file's]")
@click.option(
    "--level",
    default=0.95,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    help="1 minus the chance of ever calling a kept promise broken.",
)
@click.option("--follow", is_flag=True, help="Go on as the log grows; print what changes, and nothing else.")
@click.option("--every", default=10.0, show_default=True, type=FiniteRange(0), help="With --follow: seconds.")
@click.option("--shadow", is_flag=True, help="Predict the policy on this traffic, from System 1's answers alone.")
@click.option("--threshold", type=FiniteRange(0, 1.1), help="With --shadow: instead of the policy's.")
@click.option("--think-budget", type=click.IntRange(1), help="With --shadow: thoughts cut here; seconds estimated.")
@click.option("--rate", metavar="N/s", help="With --shadow: requests arrive at this rate.  [default: the log's]")
@json_option
def watch(
    logs: tuple[str, ...],
    policy_file: str | None,
    version: str | None,
    level: float,
    follow: bool,
    every: float,
    shadow: bool,
    threshold: float | None,
    think_budget: int | None,
    rate: str | None,
    as_json: bool,
) -> None:
    """Tell from the decision log, without labels, whether what was promised at tuning still holds.

    Think rate, confidences, lengths of thoughts and the share over each latency limit are held against the envelope in
    policy.json, with tests that may be looked at after every request.
    """
    from dataclasses import replace

    from calib import show, watching
    from calib.arrivals import parse_rate

    promised = watching.read_promised(policy_file, logs, version)
    for name, value in {"--threshold": threshold, "--think-budget": think_budget, "--rate": rate}.items():
        if value is not None and not shadow:
            raise CalibError(f"{name} predicts another policy: add --shadow")
    if shadow:
        if follow:
            raise CalibError("--shadow reads the log once: leave out --follow")
        policy = promised.policy if threshold is None else replace(promised.policy, threshold=threshold)
        arriving = None if rate is None else parse_rate(rate)
        found = watching.shadow(logs, promised, policy=policy, think_budget=think_budget, rate=arriving, level=level)
        if as_json:
            show.echo_json(found.to_dict())
        else:
            show.predicted(found)
        return
    if not follow:
        watched = watching.watch(logs, promised, level=level)
        if as_json:
            show.echo_json(watched.to_dict())
        else:
            show.watched(watched)
        if watched.report.state == "broken":
            raise SystemExit(NOT_MET)
        return
    last = None
    try:
        for now in watching.follow(logs, promised, level=level, every=every):
            show.watch_changes(None if last is None else last.report, now, as_json=as_json)
            last = now
    except KeyboardInterrupt:  # the way to end it
        if last is not None and last.report.state == "broken":
            raise SystemExit(NOT_MET) from None

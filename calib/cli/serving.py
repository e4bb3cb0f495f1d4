"""Commands that bring a policy to a server and see whether it holds there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from calib.cli.base import asking, cli, examples, json_option, store_option, vllm_options
from calib.errors import CalibError

if TYPE_CHECKING:
    from fastapi import FastAPI


@cli.command(
    epilog=examples(
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
@store_option
@json_option
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
@asking
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
        asked = vllm_options(prompt_template, sampling, seed) | {"label_mass": False}

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

"""The group of commands, the options that several of them share, and reading their values."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from calib import __version__
from calib.errors import CalibError

if TYPE_CHECKING:
    from calib.arms import Arm
    from calib.outcomes import Outcomes
    from calib.store import Store

__all__ = [
    "ARMS_EXAMPLES",
    "NOT_MET",
    "FiniteRange",
    "arms_of",
    "asking",
    "cli",
    "concurrency_option",
    "datasets_option",
    "examples",
    "filled_store",
    "json_option",
    "load",
    "main",
    "model_option",
    "names_of",
    "numbers_of",
    "pairs_of",
    "selection",
    "store_option",
    "traffic_of",
    "traffic_option",
    "vllm_options",
]

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
            plain = str(error).replace("\t", " ")
            text = "".join(char if char.isprintable() or char == "\n" else "?" for char in plain)
            click.echo(click.style("error: ", fg="red") + text, err=True)
            ctx.exit(error.exit_code)


class FiniteRange(click.FloatRange):
    """A number in a range, neither infinite nor NaN: click lets both pass where an end is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a wrong one is a usage error."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def examples(*lines: str) -> str:
    """Epilog of a command: what to type."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=examples(
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


store_option = click.option(
    "--store",
    envvar="CALIB_STORE",
    default="calib.db",
    show_default=True,
    metavar="FILE|URL",
    help="SQLite file, or a PostgreSQL URL. Environment: CALIB_STORE.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document for machines.")
model_option = click.option("--model", metavar="NAME", help="Which model of the store; needed when it holds several.")
datasets_option = click.option("--datasets", metavar="A,B", help="Only these datasets (repeatable).", multiple=True)
traffic_option = click.option(
    "--traffic", metavar="A=3,B=1", help="Weigh the datasets by your traffic; others are left out."
)
concurrency_option = click.option(
    "--concurrency", type=int, metavar="N", help="Latency collected at this concurrency; needed when there are several."
)


def selection(command: F) -> F:
    """Add the options that choose which outcomes are read."""
    for option in (concurrency_option, traffic_option, datasets_option, model_option, store_option):
        command = option(command)
    return command


def asking(command: F) -> F:
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


def vllm_options(prompt_template: str | None, sampling: str | None, seed: int) -> dict[str, Any]:
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


def names_of(values: tuple[str, ...]) -> list[str] | None:
    """Names from a repeatable option, None without any; one value may hold several, joined by commas."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()] or None


def pairs_of(values: tuple[str, ...] | str | None, option: str, example: str) -> dict[str, str]:
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


def arms_of(arms: tuple[str, ...], arms_file: str | None, api_key_env: str | None) -> tuple[Arm, ...]:
    """Arms of ``--arm NAME=URL`` or of a file, one of both."""
    from calib.arms import arm_of, read_arms

    if bool(arms) == bool(arms_file):
        raise CalibError("name the arms: --arm base=http://127.0.0.1:8000 (repeatable), or --arms arms.toml")
    if arms_file:
        return read_arms(arms_file)
    urls = pairs_of(arms, "--arm", "base=http://127.0.0.1:8000")
    return tuple(arm_of(name, url, api_key_env=api_key_env) for name, url in urls.items())


def numbers_of(text: str, option: str) -> list[int]:
    """Whole numbers of 1 or more, ascending, from ``512,2048``."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise CalibError(f"{option} {text!r} is not a list of whole numbers; write {option} 512,2048,8192") from None
    if found[0] < 1:
        raise CalibError(f"{option} {text!r}: each must be 1 or more")
    return found


@contextlib.contextmanager
def filled_store(store: str) -> Iterator[Store]:
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


def load(
    store: str, model: str | None, datasets: tuple[str, ...], traffic: str | None, concurrency: int | None
) -> Outcomes:
    """Outcomes that the options of `selection` choose."""
    from calib.store import Store, load_outcomes

    with Store.open(store, must_exist=True) as opened:
        outcomes = load_outcomes(opened, model=model, datasets=names_of(datasets), concurrency=concurrency)
    if traffic:
        outcomes = outcomes.reweighted(traffic_of(traffic))
    return outcomes


def traffic_of(text: str) -> dict[str, float]:
    """Share of each dataset from ``A=3,B=1``."""
    shares = pairs_of(tuple(part for part in text.split(",") if part.strip()), "--traffic", "gsm8k=3,bbh=1")
    try:
        return {name: float(value) for name, value in shares.items()}
    except ValueError:
        raise CalibError(f"--traffic {text!r}: a share is not a number; write --traffic gsm8k=3,bbh=1") from None


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

"""The whole loop on the embedded simulated server, through the same commands that a user types.

Nothing here is a second implementation: each step is a ``calib`` command in its own process, and the last one asks as
any HTTP client would.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from calib import show
from calib.errors import CalibError
from calib.target import parse_targets

__all__ = ["run"]

PROFILE = "gev-validation"
BUDGETS = "512,1024,2048,4096,8192"
START_SECONDS = 30


def run(folder: str, target: str, *, as_json: bool = False) -> None:
    """Collect, tune, export, serve and check, in ``folder``; prints one table and what to type next.

    Parameters
    ----------
    folder : str
        Made when missing; the demo's own files in it are replaced.
    target : str
        What to tune for.
    as_json : bool, default False
        Print one JSON document instead of the table.
    """
    started = time.monotonic()
    parse_targets(target)  # before anything is collected for it
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibError(f"--folder {out}: {error.strerror or error}; name a folder that can be made") from None
    store, questions, serve = out / "demo.db", out / "questions.jsonl.gz", out / "serve"
    for old in out.glob("demo.db*"):
        old.unlink()
    say = Narrator()

    say("questions of the six simulated validation sets")
    say.calib("questions", "--profile", PROFILE, "--out", str(questions))
    with contextlib.ExitStack() as servers:
        arms = []
        for arm in ("base", "mtp"):
            say(f"a simulated server, arm {arm}")
            url = servers.enter_context(server(say, "--profile", PROFILE, "--arm", arm))
            arms += ["--arm", f"{arm}={url}"]
        say("both systems' answers to every question, over HTTP")
        say.calib("collect", str(questions), *arms, "--budgets", BUDGETS, "--all", "--store", str(store))

    say(f"the best policy inside {target}, and how far to trust it")
    tuned = say.calib_json("optimize", "--target", target, "--trials", "50", "--store", str(store))
    if tuned["policy"] is None:
        if as_json:
            show.echo_json({"optimize": tuned})
        raise CalibError(f"no policy meets {target}; {_nearest(tuned)}", exit_code=3)
    each = {arm: _tuned_arm(say, target, arm, store) for arm in ("base", "mtp")}
    say("serve configs")
    held = ("--held-by", "gateway", "--allow-simulated")
    say.calib("export", "best", "--out", str(serve), *held, "--store", str(store))
    say("the gateway obeys the policy; a plain client sends only thinking: auto, on the test questions")
    with server(say, "--profile", PROFILE, "--policy", str(serve / "policy.json")) as url:
        verified = say.calib_json(
            "verify", str(serve / "policy.json"), "--arm", f"{tuned['policy']['arm']}={url}", "--store", str(store)
        )
    seconds = time.monotonic() - started
    rows = _rows(tuned, each)
    if as_json:
        measured = {"n": verified["n"], **_measured(verified)}
        document = {"rows": rows, "measured": measured, "verify": verified, "optimize": tuned, "seconds": seconds}
        show.echo_json(document)
        return
    _print(target, tuned, rows, verified, seconds, store, serve)


def _tuned_arm(say: Narrator, target: str, arm: str, store: Path) -> dict[str, Any]:
    options = ("--arm", arm, "--name", f"best-{arm}", "--trials", "0", "--store", str(store))
    return say.calib_json("optimize", "--target", target, *options)


def _rows(tuned: dict[str, Any], each: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each policy of the table, on the test questions."""
    base = tuned["baselines"]
    named = [("System 1 alone", base["system1"]), ("default", base["default"]), ("always think", base["always_think"])]
    named += [(f"tuned, {arm}", document) for arm, document in each.items()]
    return [
        {"name": name, "policy": part["policy"], **{key: part["test"][key]["value"] for key in _COLUMNS}}
        for name, part in named
        if part["policy"] is not None
    ]


_COLUMNS = ("accuracy", "think_rate", "p50", "p90", "p99")


def _measured(verified: dict[str, Any]) -> dict[str, float]:
    """What a plain client got, by metric."""
    return {line["metric"]: line["measured"]["value"] for line in verified["lines"] if line["metric"] in _COLUMNS}


def _cells(row: Any) -> list[str]:
    accuracy, think_rate, *latency = (row[key] for key in _COLUMNS)
    return [show.percent(accuracy), show.percent(think_rate), *(show.seconds(value) for value in latency)]


def _print(
    target: str,
    tuned: dict[str, Any],
    rows: list[dict[str, Any]],
    verified: dict[str, Any],
    seconds: float,
    store: Path,
    serve: Path,
) -> None:
    from calib.policy import Policy

    chosen = Policy.from_dict(tuned["policy"])
    table = [[row["name"], show.policy_line(Policy.from_dict(row["policy"])), *_cells(row)] for row in rows]
    table.append(["chosen, through the gateway", "measured by a plain client", *_cells(_measured(verified))])
    click.echo()
    columns = ["on held-out questions", "policy", "accuracy", "think rate", "p50", "p90", "p99"]
    show.table(columns, table, left=2, title=f"{tuned['test']['n']} test questions, target {target}  [simulated]")
    click.echo()
    click.echo(f"verdict: {tuned['verdict']}   policy: {show.policy_line(chosen)}")
    click.echo("simulated: the model is made up to meet published figures; the numbers say nothing about your server")
    click.echo(f"done in {seconds:.0f} s. Type next:")
    click.echo(f"  calib evaluate --store {store} --threshold 0.8 --mix 0.5 --arm mtp")
    click.echo(f"  calib optimize --store {store} --target 'accuracy>=83%' --minimize p90")
    click.echo(f"  cat {serve}/serve.env")
    click.echo("  calib collect YOUR.jsonl --arm base=http://YOUR-SERVER:8000")


def _nearest(tuned: dict[str, Any]) -> str:
    needs = [f"{r['target']} needs {r['needs']}" for r in (tuned["nearest"] or {}).get("relaxations", ())]
    return "nearest: " + "; ".join(needs) if needs else "relax the target"


class Narrator:
    """Shows each step on stderr as the command that a user would type, and runs it."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self, text: str) -> None:
        """Begin a step."""
        self._step += 1
        click.echo(click.style(f"\n{self._step}. {text}", bold=True), err=True)

    def shown(self, *arguments: str) -> list[str]:
        """Show a command and return how to start it with this Python."""
        click.echo(click.style(f"   $ calib {shlex.join(arguments)}", dim=True), err=True)
        return [sys.executable, "-m", "calib", *arguments]

    def calib(self, *arguments: str) -> None:
        """Run a command; its output goes to stderr."""
        self._run(self.shown(*arguments), stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL)

    def calib_json(self, *arguments: str) -> dict[str, Any]:
        """Run a command with ``--json`` and return its document; 3 (a target is not met) is an answer too."""
        done = self._run(self.shown(*arguments, "--json"), stdout=subprocess.PIPE, accepted=(0, 3))
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def _run(
        self, command: list[str], *, stdout: int, accepted: Sequence[int] = (0,)
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(command, stdout=stdout, check=False)  # noqa: S603 - our own commands
        if done.returncode not in accepted:
            raise CalibError(f"this step of the demo failed with code {done.returncode}; see above", exit_code=1)
        return done


def _has_descriptor() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def server(say: Narrator, *arguments: str) -> Iterator[str]:
    """A simulated server in its own process on a free loopback port; gives its URL, stops it on leaving."""
    command = say.shown("serve", "--engine", "simulated", *arguments, "--port", "0")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)  # noqa: S603
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            raise CalibError(f"the simulated server did not start: {line.strip()}", exit_code=1)
        click.echo(f"   {line.strip()}", err=True)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=START_SECONDS)

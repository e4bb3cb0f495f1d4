"""Tunes on a recording, serves the policy by the gateway, and verifies it at several arrival rates.

    python data/reference/promise.py RECORDING --upstream http://127.0.0.1:8001 --out FOLDER

Each step is what a ``calib`` command does. What is predicted for the arrivals from all recorded runs stands beside what
a plain client measures while requests arrive at random, and beside the percentiles of the one run that has about as
many in flight (``at_load``). Writes ``verify.json``, with every question's arrival, latency and prediction in
milliseconds, so that another prediction can be tried on it later (`calib.queueing.replay`).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib import metrics, show
from calib.arrivals import Load
from calib.atomic import write_atomically
from calib.jsonnumbers import finite
from calib.measured import Served, read_served
from calib.policy import decide
from calib.recorded import fill, open_recording
from calib.store import Store, load_outcomes
from calib.verified import Verified
from calib.verify import Trial, verify

PROMPT = Path(__file__).with_name("prompt.toml")
SAMPLING = '{"temperature": 0.6}'
MODEL, ARM = "main", "base"
RATES = "6:500:0,12:500:1,30:887:0,50:887:1,70:887:0,85:887:1,100:887:0"


def calib(store: Path, *arguments: str) -> Any:
    """Run a command, which prints JSON; 3 says that a target is not met."""
    command = [sys.executable, "-m", "calib", *arguments, "--store", str(store), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own commands
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


@dataclass(frozen=True, order=True)
class Run:
    """One verification: requests per second, how many questions, the seed of their choice and of their arrivals."""

    rate: float
    questions: int
    seed: int = 0


_RUN = re.compile(r"(\d+(?:\.\d+)?):(\d+)(?::(\d+))?")


def parse_runs(text: str) -> list[Run]:
    """Runs by ascending rate from ``RATE:QUESTIONS[:SEED],...``."""
    runs = []
    for part in text.split(","):
        match = _RUN.fullmatch(part.strip())
        run = Run(float(match[1]), int(match[2]), int(match[3] or 0)) if match else None
        if run is None or not run.rate or not run.questions:
            raise argparse.ArgumentTypeError(f"{part!r} is not RATE:QUESTIONS[:SEED], for instance 30:887:0")
        runs.append(run)
    return sorted(runs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune-at", type=int, default=64, help="requests in flight of the run that is tuned on")
    parser.add_argument("--target", default="p90<1s")
    parser.add_argument("--rates", type=parse_runs, default=RATES, help="RATE:QUESTIONS[:SEED],... requests per second")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    store = given.out / "promise.db"
    with Store.open(store) as opened:
        fill(opened, MODEL, open_recording(given.recording))
    at = ("--arm", ARM, "--concurrency", str(given.tune_at), "--trials", "0")
    tuned = calib(store, "optimize", "--target", given.target, *at)
    if tuned["policy"] is None:
        raise SystemExit(f"no policy meets {given.target}: {tuned['nearest']}")
    folder = given.out / "serve"
    calib(store, "export", "best", "--out", str(folder), "--held-by", "gateway")
    with Store.open(store) as opened:
        served = read_served(str(folder), opened)
    document = {
        "target": given.target,
        "tuned_at": given.tune_at,
        "policy": tuned["policy"],
        "verdict": tuned["verdict"],
        "verified": [],
    }
    with gateway(folder / "policy.json", given.upstream) as url:
        for run in given.rates:
            one = verified(store, served, url, run)
            document["verified"].append(one)
            text = json.dumps(finite(document), indent=1)
            # after each run, whatever becomes of the next
            write_atomically({given.out / "verify.json": _LISTS.sub(_on_one_line, text) + "\n"})
            sys.stderr.write(f"{run.rate:g}/s, seed {run.seed}: {summary(one)}\n")


_LISTS = re.compile(r"\[[^\[\]{}]*\]")  # innermost ones


def _on_one_line(found: re.Match[str]) -> str:
    return re.sub(r",\s+", ", ", re.sub(r"\[\s+|\s+\]", lambda end: end[0].strip(), found[0]))


_KEPT = ("n", "failed", "load", "seconds", "warnings", "lines")
"""What is kept of the document of ``calib verify``."""


def verified(store: Path, served: Served, url: str, run: Run) -> dict[str, Any]:
    """What ``calib verify`` does, and what is kept of it."""
    began = time.monotonic()
    with Store.open(store) as opened:
        found = verify(served, opened, Trial(ARM, url, Load(rate=run.rate), n=run.questions, seed=run.seed))
    took, told = time.monotonic() - began, found.to_dict()
    load = told["load"]["predicted_from"]["nearest"]
    return {
        "rate": run.rate,
        "seed": run.seed,
        "load": load,
        "took": took,
        "at_load": at_load(store, found, load),
        "verify": {name: told[name] for name in _KEPT},
        "questions": each(found),
    }


def at_load(store: Path, found: Verified, load: int) -> dict[str, float]:
    """Percentiles that the seconds of one recorded run alone predict for the same questions."""
    there = load_outcomes(store, arms=[ARM], concurrency=load)
    place = {name: i for i, name in enumerate(there.ids.tolist())}
    asked = there.take([place[name] for name in found.outcomes.ids.tolist()])
    latency = decide(asked, found.served.policy).latency
    return {f"p{q}": metrics.percentile(latency, q) for q in (50, 90, 99)}


def each(found: Verified) -> dict[str, list[Any]]:
    """Every question that was asked, in its order: when it came and how long it took, milliseconds."""
    assert found.due is not None
    columns = {
        "arrival_ms": found.due,
        "measured_ms": found.measured.latency,
        "predicted_ms": found.predicted.latency,
    }
    told = {name: np.round(1e3 * seconds, 1).tolist() for name, seconds in columns.items()}
    return {"id": found.outcomes.ids.tolist(), "thinks": found.measured.thinks.astype(int).tolist(), **told}


@contextmanager
def gateway(policy: Path, upstream: str) -> Iterator[str]:
    """The address of ``calib serve`` until the block ends."""
    command = [sys.executable, "-m", "calib", "serve", "--policy", str(policy), "--upstream", upstream, "--port", "0"]
    command += ["--prompt-template", str(PROMPT), "--sampling", SAMPLING]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own command
        try:
            yield _address(process)
        finally:
            process.terminate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said: list[str] = []
    while line := process.stderr.readline():
        if line.startswith("calib: "):
            return next(word for word in line.split() if word.startswith("http://"))
        said.append(line)
    raise SystemExit("".join(said))


def summary(one: dict[str, Any]) -> str:
    """One line for the eyes: predicted by the run alone, predicted for the arrivals, measured."""
    lines: Sequence[dict[str, Any]] = one["verify"]["lines"]
    flown = one["verify"]["load"]
    shown = [f"in flight {show.number(flown['predicted_from']['in_flight'])} {show.number(flown['in_flight'])}"]
    for line in lines:
        before = f"{one['at_load'][line['metric']]:.3f} " if line["metric"] in one["at_load"] else ""
        shown.append(f"{line['metric']} {before}{line['predicted']['value']:.4g} {line['measured']['value']:.4g}")
    return "; ".join(shown)


if __name__ == "__main__":
    main()

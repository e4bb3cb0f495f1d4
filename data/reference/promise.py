"""Tunes on a recording, serves the policy by the gateway, and verifies it at several arrival rates.

    python data/reference/promise.py RECORDING --upstream http://127.0.0.1:8001 --out FOLDER

Each step is a ``calib`` command. The rates are those at which, by the prediction, as many requests are in flight as in
a recorded run: mean latency times rate. What is predicted from the seconds of that run then stands beside what a plain
client measures while requests arrive at random. Writes ``verify.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.policy import Policy, evaluate
from calib.recorded import fill, open_recording
from calib.store import Store, load_outcomes

PROMPT = Path(__file__).with_name("prompt.toml")
SAMPLING = '{"temperature": 0.6}'
MODEL, ARM = "main", "base"


def calib(store: Path, *arguments: str) -> Any:
    """Run a command, which prints JSON; 3 says that a target is not met."""
    command = [sys.executable, "-m", "calib", *arguments, "--store", str(store), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own commands
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune-at", type=int, default=64, help="requests in flight of the run that is tuned on")
    parser.add_argument("--target", default="p90<1s")
    parser.add_argument("--loads", default="1:120,8:600,64:2000", help="LOAD:QUESTIONS of each verification")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    store = given.out / "promise.db"
    with Store.open(store) as opened:
        fill(opened, MODEL, open_recording(given.recording))
    at = ("--arm", ARM, "--concurrency", str(given.tune_at), "--trials", "0")
    tuned = calib(store, "optimize", "--target", given.target, *at)
    if tuned["policy"] is None:
        raise SystemExit(f"no policy meets {given.target}: {tuned['nearest']}")
    calib(store, "export", "best", "--out", str(given.out / "serve"), "--held-by", "gateway")
    policy = Policy.from_dict(tuned["policy"])
    gateway, url = serve(given.out / "serve" / "policy.json", given.upstream)
    found = []
    try:
        for load, n in (map(int, part.split(":")) for part in given.loads.split(",")):
            expected = evaluate(load_outcomes(store, arms=[ARM], concurrency=load), policy)
            rate = load / expected.mean
            sent = ("--rate", f"{rate:.3g}/s", "--n", str(n), "--predict-at", str(load))
            began = time.monotonic()
            verified = calib(store, "verify", str(given.out / "serve"), "--arm", f"{ARM}={url}", *sent)
            found.append({"load": load, "rate": rate, "took": time.monotonic() - began, "verify": verified})
            sys.stderr.write(f"{load} in flight, {rate:.3g}/s: {summary(verified)}\n")
    finally:
        gateway.terminate()
        gateway.wait()
    document = {"target": given.target, "tuned_at": given.tune_at, "tuned": tuned, "verified": found}
    (given.out / "verify.json").write_text(json.dumps(document, indent=1) + "\n")


def serve(policy: Path, upstream: str) -> tuple[subprocess.Popen[str], str]:
    """The gateway's process and its address."""
    command = [sys.executable, "-m", "calib", "serve", "--policy", str(policy), "--upstream", upstream, "--port", "0"]
    command += ["--prompt-template", str(PROMPT), "--sampling", SAMPLING]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)  # noqa: S603
    assert process.stderr is not None
    said: list[str] = []
    while line := process.stderr.readline():
        if line.startswith("calib: "):
            return process, next(word for word in line.split() if word.startswith("http://"))
        said.append(line)
    raise SystemExit("".join(said))


def summary(verified: dict[str, Any]) -> str:
    """One line for the eyes."""
    lines: Sequence[dict[str, Any]] = verified["lines"]
    return "; ".join(f"{line['metric']} {line['predicted']} {line['measured']}" for line in lines)


if __name__ == "__main__":
    main()

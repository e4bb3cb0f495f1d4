"""`calib serve` as a process: what it refuses, what it says, and its signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from calib.cli import cli
from calib.engine import EngineInfo
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.errors import CalibError
from calib.gateway import policy_version
from calib.policy import Policy, Route
from calib.policyfile import POLICY_SCHEMA
from calib.serving import Model, Settings, run_gateway
from tests.scripted import ScriptedEngine

ASK = {"kind": "choice", "question": "q", "options": ["a", "b"], "thinking": "auto"}


def write(path, policy=None, **more):
    policy = policy or Policy(0.9, 0.5, 2048)
    path.write_text(json.dumps({"schema": POLICY_SCHEMA, "policy": policy.to_dict()} | more))
    return path


@contextmanager
def served(*arguments, **environment):
    """The process, its address, and the lines that it said at the start."""
    command = [sys.executable, "-m", "calib", "serve", "--engine", "simulated", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        first = process.stderr.readline()
        assert first.startswith("calib: http://127.0.0.1:"), first
        lines = [first.strip()]
        while "requests at a time" not in lines[-1]:
            lines.append(process.stderr.readline().strip())
        lines.append(process.stderr.readline().strip())  # about the key
        try:
            yield process, first.split()[1], lines
        finally:
            process.terminate()
            process.wait(30)


def fetch(url, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as response:
        return json.load(response)


def test_it_says_what_is_effective_and_obeys_hangups(tmp_path):
    policy = Policy(0.9, 0.25, 2048, "mtp", deadline=5.0, routes={"dataset=d": Route(1.1)})
    path, log = write(tmp_path / "policy.json", policy), tmp_path / "d.jsonl"
    with served("--policy", path, "--log", log, "--max-concurrency", 7, "--max-queue", 3) as (process, url, lines):
        version = policy_version(policy)
        assert lines[1:5] == [
            f"policy {version}: threshold 0.9, mix 0.25, think_budget 2048, arm mtp, 1 routes",
            "deadline 5 s: kept by closing the thought in time",
            "7 requests at a time, 3 more may wait, bodies up to 8 MiB",
            "no key is needed",
        ]
        assert process.stderr.readline().strip() == f"one line for each decision goes to {log}"
        assert fetch(f"{url}/v1/decide", ASK)["policy_version"] == version
        until(lambda: log.read_text().count("\n") == 1)
        log.rename(tmp_path / "d.1.jsonl")
        path.write_text("{")
        process.send_signal(signal.SIGHUP)
        assert "not JSON" in (said := process.stderr.readline())
        assert f"policy {version} stays in force" in said
        assert fetch(f"{url}/v1/decide", ASK)["policy_version"] == version
        until(lambda: log.exists() and log.read_text().count("\n") == 1)
        write(path, Policy(0.8, 0.25, 2048, "mtp"))
        process.send_signal(signal.SIGHUP)
        new = policy_version(Policy(0.8, 0.25, 2048, "mtp"))
        assert f"policy {new} is in force now" in process.stderr.readline()
        assert fetch(f"{url}/v1/decide", ASK)["policy_version"] == new
        write(path, Policy(0.8, 0.25, 2048, "base"))
        process.send_signal(signal.SIGHUP)
        assert "tuned for arm base" in process.stderr.readline()
        assert fetch(f"{url}/v1/decide", ASK)["policy_version"] == new
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    assert (tmp_path / "d.1.jsonl").read_text().count("\n") == 1
    assert log.read_text().count("\n") == 3


def until(check):
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_key_from_the_environment():
    with served("--key-env", "SOME_KEY", SOME_KEY="s3cret") as (_, url, lines):
        assert lines[-1] == "a key is needed, but for /health and /ready"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(f"{url}/v1/decide", ASK)
        assert fetch(f"{url}/v1/decide", ASK, Authorization="Bearer s3cret")["kind"] == "choice"
        assert fetch(f"{url}/health") == {"status": "alive"}
        assert "s3cret" not in "".join(lines)


def refused(*arguments, **environment):
    result = CliRunner().invoke(cli, ["serve", *map(str, arguments)], env=environment)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_what_is_refused_before_anything_listens(tmp_path, monkeypatch):
    simulated = ("--engine", "simulated", "--port", "0")
    assert "name who answers" in refused("--port", "0")
    assert "name who answers" in refused(*simulated, "--upstream", "http://127.0.0.1:9")
    said = refused(*simulated, "--host", "0.0.0.0")
    assert "--key-env CALIB_KEY" in said
    assert "--no-key" in said
    assert "this variable is empty" in refused(*simulated, "--key-env", "EMPTY_KEY", EMPTY_KEY="")
    assert "No such file" in refused(*simulated, "--policy", tmp_path / "absent.json")
    assert "No such file" in refused(*simulated, "--log", tmp_path / "absent/d.jsonl")
    other = EngineInfo("large", {"model": "large"}).fingerprint
    path = write(tmp_path / "policy.json", model="large", fingerprints={"model": other})
    said = refused(*simulated, "--policy", path)
    assert "was tuned on large" in said
    assert "--allow-other-model" in said


def test_the_model_that_it_was_tuned_on_and_another_one_if_told_so(tmp_path):
    info = asyncio.run(SimulatedEngine(load_profile("gev-validation")).info())
    path = write(tmp_path / "policy.json", model=info.model, fingerprints={"model": info.fingerprint})
    with served("--policy", path) as (_, url, _):
        assert fetch(f"{url}/v1/decide", ASK)["policy_version"]
    with served("--policy", path, "--seed", 5, "--allow-other-model") as (process, url, _):
        assert "warning: " in (said := process.stderr.readline())
        assert "is not known to hold" in said
        assert fetch(f"{url}/v1/decide", ASK)["policy_version"]


def test_a_refused_policy_leaves_no_engine_open(tmp_path):
    engine = ScriptedEngine()

    async def model(_arm):
        return Model(engine, await engine.info(), 4096, "for a test")

    path = write(tmp_path / "policy.json", model="large", fingerprints={"model": "0" * 64})
    with pytest.raises(CalibError, match="was tuned on large"):
        run_gateway(model, Settings(port=0, policy_file=str(path)), lambda _line: None)
    assert engine.closed == 1

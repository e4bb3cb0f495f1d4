"""``calib collect`` as a script types it: what is asked when nobody says when to stop, and what then follows."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calib.questions import write_questions
from tests.misbehaving import questions

COMMAND = [sys.executable, "-m", "calib"]


@pytest.fixture(scope="module")
def simulated() -> Iterator[str]:
    command = [*COMMAND, "serve", "--engine", "simulated", "--profile", "gev-validation", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        yield next(word for word in line.split() if word.startswith("http://"))
        process.terminate()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("q") / "q.jsonl"
    subprocess.run([*COMMAND, "questions", "--profile", "gev-validation", "--out", path], check=True)
    return path


def run(folder: Path, *arguments: object, code: int = 0, **options: object) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    environment = {**os.environ, "CALIB_STORE": str(folder / "c.db")}
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert done.returncode == code, done.stderr
    return done


def test_a_script_that_says_nothing_gets_stages_and_then_everything(
    simulated: str, asked: Path, tmp_path: Path
) -> None:
    arms = ("--arm", f"base={simulated}", "--arm", f"mtp={simulated}", "--budgets", "512,8192")
    collect = ("collect", asked, *arms, "--limit", 700)
    done = run(tmp_path, *collect, "--json")
    found = json.loads(done.stdout)
    assert "no terminal to ask on: it goes on" in done.stderr
    assert "a simulated server's thoughts cost nothing" in done.stderr
    assert found["stages"]["headroom"]["thoughts"] > 0
    assert found["stages"]["ended"] == "every question was thought about"
    assert [(arm["arm"], arm["asked"], arm["failed"]) for arm in found["arms"]] == [("base", 700, 0), ("mtp", 700, 0)]
    status = json.loads(run(tmp_path, "status", "--json").stdout)
    rows = status["models"][0]["coverage"]
    assert {row["arm"] for row in rows} == {"base", "mtp"}
    for arm in ("base", "mtp"):
        mine = [row for row in rows if row["arm"] == arm]
        assert sum(row["system1"] for row in mine) == 700
        assert sum(row["timed"]["8192"] for row in mine) == 700
    tuned = json.loads(run(tmp_path, "optimize", "--target", "p90<60s", "--trials", 0, "--json").stdout)
    assert tuned["marks"] == ["simulated"]  # nothing is estimated
    assert tuned["tune"]["n"] + tuned["test"]["n"] == 700
    again = json.loads(run(tmp_path, *collect, "--json").stdout)
    assert [(arm["asked"], arm["already"]) for arm in again["arms"]] == [(0, 700), (0, 700)]


def test_yes_ends_once_more_thoughts_would_not_pay(simulated: str, asked: Path, tmp_path: Path) -> None:
    collect = ("collect", asked, "--arm", f"base={simulated}", "--limit", 1000, "--yes", "--json")
    found = json.loads(run(tmp_path, *collect).stdout)
    stages = found["stages"]
    assert stages["ended"].startswith("more thoughts would win at most")
    assert stages["thoughts"] < 0.6 * stages["questions"]
    assert [one["state"] for one in found["passes"]] == ["done"]
    tuned = json.loads(run(tmp_path, "optimize", "--trials", 0, "--json").stdout)
    assert tuned["policy"] is not None


def test_seconds_at_two_loads_by_one_option(simulated: str, asked: Path, tmp_path: Path) -> None:
    loads = ("--concurrency", "2,8", "--latency-sample", 12)
    collect = ("collect", asked, "--arm", f"base={simulated}", "--limit", 120, "--yes", *loads, "--json")
    found = json.loads(run(tmp_path, *collect).stdout)
    assert [(one["concurrency"], one["timed"]) for one in found["passes"]] == [(2, 12), (8, 12)]
    assert "choose: --concurrency 8" in run(tmp_path, "evaluate", code=2).stderr
    evaluated = json.loads(run(tmp_path, "evaluate", "--concurrency", 2, "--json").stdout)
    assert evaluated["marks"] == ["estimated", "simulated"]
    run(tmp_path, "collect", asked, "--arm", f"base={simulated}", "--concurrency", "0,8", code=2)


def test_all_thinks_about_every_question_with_every_arm(simulated: str, asked: Path, tmp_path: Path) -> None:
    arms = ("--arm", f"base={simulated}", "--arm", f"mtp={simulated}", "--limit", 40)
    found = json.loads(run(tmp_path, "collect", asked, *arms, "--all", "--json").stdout)
    assert found["stages"] is None
    assert [(arm["arm"], arm["asked"]) for arm in found["arms"]] == [("base", 40), ("mtp", 40)]


def test_a_terminal_is_asked_and_no_is_an_answer(simulated: str, asked: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "collect", str(asked), "--arm", f"base={simulated}", "--limit", "200", "--pilot", "20"]
    environment = {**os.environ, "CALIB_STORE": str(tmp_path / "c.db"), "TERM": "dumb"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.write(ours, b"n\n")
        out, error = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, error
    assert "go on with the thoughts?" in error
    assert "ended: ended after the pilot" in out
    assert "the same command with --yes" in out
    status = json.loads(run(tmp_path, "status", "--json").stdout)
    assert sum(row["budgets"].get("8192", 0) for row in status["models"][0]["coverage"]) == 20


def test_status_shows_what_failed_where_nothing_was_answered(tmp_path: Path) -> None:
    write_questions(questions(3), tmp_path / "q.jsonl")
    code = """
    import asyncio, sys
    from calib.cli import cli
    from tests.misbehaving import MisbehavingServer, status

    async def main():
        async with MisbehavingServer() as server:
            server.always = [status(404)]
            arguments = ["collect", "q.jsonl", "--arm", f"base={server.url}", "--retries", "0", "--json"]
            await asyncio.to_thread(cli.main, arguments, standalone_mode=False)

    asyncio.run(main())
    """
    lines = "\n".join(line[4:] for line in code.splitlines())
    environment = {**os.environ, "CALIB_STORE": "c.db", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["arms"][0]["failed"] == 3
    status = json.loads(run(tmp_path, "status", "--json").stdout)
    assert {row["reason"] for row in status["models"][0]["failures"]} == {"http_404"}
    assert status["audits"] == {}
    run(tmp_path, "optimize", code=2)

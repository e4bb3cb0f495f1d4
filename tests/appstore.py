"""Small stores for the tests of the dashboard: simulated answers as `calib demo` collects them, and odd ones."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np

from calib.engine.base import Answer, EngineInfo
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.questions import Question
from calib.store import Answered, Store, Verification, VerifiedRows, load_outcomes
from calib.study import run_study
from calib.studystore import default_storage
from calib.target import parse_targets
from calib.tuning import Demand, tune

BUDGETS = (512, 2048, 8192)
NAN = float("nan")


def simulated_store(path: Path, *, every: int = 4, name: str = "best", trials: int = 0) -> Path:
    """A part of the simulated validation sets, both arms, tuned for p90<10s; with a study when trials are given."""
    profile = load_profile("gev-validation")
    questions = profile.questions()[::every]

    async def fill(store: Store) -> None:
        for arm in ("base", "mtp"):
            engine = SimulatedEngine(profile, arm=arm)
            fingerprint = store.register_model(await engine.info())
            answers = [await engine.ask(question, BUDGETS, keep_text=True) for question in questions]
            records = [Answered(question, arm, answer, 8) for question, answer in zip(questions, answers, strict=True)]
            store.write(fingerprint, records)

    with Store.open(path) as store:
        store.add_questions(questions)
        asyncio.run(fill(store))
        outcomes = load_outcomes(store)
        targets = parse_targets("p90<10s")
        tuned = tune(outcomes, Demand(targets=targets, resamples=200), ledger=store.record_look)
        document = tuned.to_dict(name)
        if trials:
            storage = default_storage(path)
            result = run_study(tuned.tune, targets, storage=storage, sampler="random", trials=trials, exact=tuned.best)
            document["study"] = result.to_dict()
        store.save_policy(name, document)
    return path


def verification(document: dict, **changes: object) -> Verification:
    """A run of `calib verify` under the policy of a document: slower than predicted, one target missed."""

    def line(metric: str, predicted: list[float], measured: list[float], verdict: str) -> dict:
        two = [{"value": value, "interval": ends} for value, *ends in (predicted, measured)]
        return {"metric": metric, "predicted": two[0], "measured": two[1], "verdict": verdict}

    summary = {
        "verdict": "missed",
        "marks": ["simulated"],
        "n": 142,
        "policy": document["policy"],
        "lines": [
            line("accuracy", [0.8, 0.7, 0.9], [0.8, 0.7, 0.9], "as predicted"),
            line(
                "p90", [4.5, 4.0, 5.0], [11.2, 10.0, 12.0], "slower than predicted by 149 % (interval +120 % to +170 %)"
            ),
        ],
        "certificate": {"statement": "not certified: p90<10s is missed <b>"},
        "warnings": ["3 of 142 questions got no usable answer <b>"],
    }
    rows = VerifiedRows((("a", "1"),), np.array([0]), np.array([True]), *np.ones((2, 1)), np.array([[0.5, 0.5]]))
    run = Verification("best", "v1", "f" * 64, "mtp", "http://127.0.0.1:8080", 2.0, None, summary, rows)
    return replace(run, **({"at": "2026-02-03T04:05:06.000+00:00"} | changes))


def made_up_store(
    path: Path,
    *,
    n: int = 60,
    datasets: int = 2,
    budgets: tuple[int, ...] = (100, 400),
    arms: tuple[str, ...] = ("base", "mtp"),
    seconds: bool = True,
    name: str = "set {:03d}",
) -> Path:
    """Random answers to questions without texts; imported ones are like that."""
    rng = np.random.default_rng(0)
    questions = [Question(str(i), name.format(i % datasets), "choice", "", "", ("",) * 4, i % 4) for i in range(n)]
    with Store.open(path) as store:
        fingerprint = store.register_model(EngineInfo("made up", {"model": "made up"}, 0.8, 0.5))
        store.add_questions(questions)
        length = rng.integers(50, 800, n)
        p1, p2 = rng.dirichlet(np.ones(4), n), rng.dirichlet(np.full(4, 0.2), (n, len(budgets)))
        knows = np.arange(n) % 3 > 0
        p2[knows] = 0.96 * np.eye(4)[np.arange(n) % 4][knows, None] + 0.01
        records = []
        for arm in arms:
            for i, question in enumerate(questions):
                tokens = np.minimum(length[i], budgets)
                t2 = tokens / (100 if arm == "base" else 200) if seconds else np.full(len(budgets), NAN)
                t1 = 0.05 if seconds else NAN
                answer = Answer(p1[i], t1, budgets, p2[i], tokens, length[i] <= np.array(budgets), t2)
                records.append(Answered(question, arm, answer, 4))
        store.write(fingerprint, records)
    return path


def newer(path: Path) -> Path:
    """A store that a later calib has written."""
    with Store.open(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE calib_schema SET version = 999")
    connection.close()
    return path

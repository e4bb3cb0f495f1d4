"""Recorded runs: what is written comes back, what ships is sound, and the demo tunes on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from calib.cli import cli
from calib.engine.base import Answer, EngineInfo
from calib.errors import CalibError
from calib.questions import Question
from calib.recorded import FOLDER, MODEL, TARGET, Recording, Row, fill, open_recording, write_recorded
from calib.resources import find
from calib.store import Store, load_outcomes
from tests.reference import load

INFO = EngineInfo("m", {"engine": "vllm", "model": "m"}, threshold=0.7, mix=0.4, thinks_about_scores=True)


def asked(i: int) -> Question:
    options = ("a", "b", "c")[: 2 + i % 2]
    return Question(f"q{i}", "d", "choice", f"state {i}", f"question {i}?", options, i % 2)


def answer(i: int, n: int, shift: float = 0.0) -> Answer:
    rng = np.random.default_rng(i)
    p1, *p2 = rng.dirichlet(np.ones(n), size=3)
    return Answer(
        p1=p1,
        t1=0.01 + shift,
        budgets=(16, 64),
        p2=np.array(p2),
        tokens=np.array([16, 20 + i]),
        finished=np.array([False, True]),
        t2=np.array([0.1, 0.2]) + shift,
        label_mass2=np.full(2, np.nan),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    questions = [asked(i) for i in range(6)]
    rows = [Row("m", "base", 8, q, answer(i, len(q.options))) for i, q in enumerate(questions)]
    rows += [Row("m", "draft", 8, q, answer(i, len(q.options), 0.5)) for i, q in enumerate(questions[:3])]
    runs = [{"model": "m", "arm": "base", "concurrency": 8, "asked": 6}]
    write_recorded(tmp_path / "r", questions, rows, runs, {"m": INFO}, {"hardware": "one machine"})
    return tmp_path / "r"


def test_what_is_written_comes_back(folder: Path) -> None:
    recording = open_recording(folder)
    assert recording.budgets == (16, 64)
    assert recording.about == {"hardware": "one machine"}
    assert recording.engines["m"].fingerprint == INFO.fingerprint
    rows = recording.rows("m")
    assert [(row.arm, row.question.id) for row in rows] == [("base", f"q{i}") for i in range(6)] + [
        ("draft", f"q{i}") for i in range(3)
    ]
    for i, row in enumerate(rows[:6]):
        expected = answer(i, len(row.question.options))
        assert row.question == asked(i)
        assert row.answer.p1 == pytest.approx(expected.p1, abs=1e-6)
        assert row.answer.p2 == pytest.approx(expected.p2, abs=1e-6)
        assert row.answer.p2.sum(axis=1) == pytest.approx(1, abs=1e-12)
        assert row.answer.tokens.tolist() == expected.tokens.tolist()
        assert row.answer.finished.tolist() == expected.finished.tolist()
        assert row.answer.t2 == pytest.approx(expected.t2, rel=1e-6)
    assert rows[6].answer.t1 == pytest.approx(0.51)


def test_a_store_holds_what_a_collection_would_have_left(folder: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.db") as store:
        assert fill(store, "m", open_recording(folder)) == INFO.fingerprint
        o = load_outcomes(store, arms=["base"])
    assert o.n == 6
    assert o.budgets.tolist() == [16, 64]
    assert o.concurrency.tolist() == [8]
    assert o.default_threshold == 0.7
    place = {name: i for i, name in enumerate(o.ids.tolist())}
    assert o.p1[place["q1"], :3] == pytest.approx(answer(1, 3).p1, abs=1e-6)
    assert o.t2[0, place["q1"]] == pytest.approx([0.1, 0.2], rel=1e-6)


def test_a_store_can_hold_the_questions_alone_that_all_arms_were_timed_on(folder: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.db") as store:
        fill(store, "m", open_recording(folder), timed_at=8)
        o = load_outcomes(store, arms=["base", "draft"])
    assert sorted(o.ids.tolist()) == ["q0", "q1", "q2"]
    assert not o.estimated.any()


def test_a_model_or_a_file_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(CalibError, match="no model 'x'; there are: m"):
        open_recording(folder).rows("x")
    (folder / "runs.json").unlink()
    with pytest.raises(CalibError, match=r"runs\.json is missing"):
        open_recording(folder)


# --- what ships -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> Recording:
    return open_recording()


def test_what_ships_is_small() -> None:
    assert sum(path.stat().st_size for path in find(FOLDER).iterdir()) < 5_000_000
    assert find("data/reference/main/model.safetensors").stat().st_size < 12_000_000


def test_the_recorded_questions_are_those_of_the_tasks(shipped: Recording) -> None:
    written = {q.id: q for q in load("write_questions").questions(220)}
    rows = [row for row in shipped.rows(MODEL) if (row.arm, row.concurrency) == ("base", 128)]
    assert len(rows) >= 3000
    assert {row.question.id for row in rows} == set(written)
    assert all(written[row.question.id] == row.question for row in rows)


def test_the_recorded_answers_are_sound(shipped: Recording) -> None:
    budgets, rows, ended_early = np.array(shipped.budgets), shipped.rows(MODEL), set()
    for row in rows:
        a = row.answer
        assert a.p1 is not None
        assert a.p1.shape == (len(row.question.options),)
        assert (a.tokens <= budgets).all()
        assert (np.diff(a.tokens) >= 0).all()
        assert 0 < a.t1 < 60
        assert ((a.t2 > 0) & (a.t2 < 60)).all()
        if not (a.finished | (a.tokens == budgets)).all():
            ended_early.add(row.question.dataset)
    # where thinking was never trained, or was never trained to end, the model may end its turn within the thought
    assert ended_early == {"intent", "reach"}


def test_the_runs_are_of_one_model(shipped: Recording) -> None:
    # large is main made wider and deeper: it answers as main does, up to the rounding of bfloat16
    reference = {r.question.id: r.answer.p1 for r in shipped.rows(MODEL) if (r.arm, r.concurrency) == ("base", 128)}
    off: dict[tuple[str, str, int], list[float]] = {}
    for model in shipped.engines:
        for row in shipped.rows(model):
            here = off.setdefault((model, row.arm, row.concurrency), [])
            here.append(float(np.abs(row.answer.p1 - reference[row.question.id]).max()))
    assert set(off) == {(m, a, c) for m in ("main", "large") for a in ("base", "draft") for c in (1, 8, 64, 128)}
    for (model, *_), apart in off.items():
        assert np.quantile(apart, 0.99) < {"main": 0.02, "large": 0.03}[model]
        assert max(apart) < {"main": 0.02, "large": 0.05}[model]


def test_each_run_says_what_it_took(shipped: Recording) -> None:
    counted: dict[tuple[str, str, int], int] = {}
    for model in shipped.engines:
        for row in shipped.rows(model):
            key = (row.model, row.arm, row.concurrency)
            counted[key] = counted.get(key, 0) + 1
    assert counted == {(run["model"], run["arm"], run["concurrency"]): run["asked"] for run in shipped.runs}
    for run in shipped.runs:
        assert run["client_cpu_share"] < 0.5  # the client was not what was measured
        assert (run["acceptance_length"] is None) == (run["arm"] == "base")


# --- the demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_tunes_on_them_without_a_server(tmp_path: Path) -> None:
    found = CliRunner().invoke(cli, ["demo", "--recorded", "--folder", str(tmp_path), "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["optimize"]["verdict"] in ("certified", "met")
    rows = {row["name"]: row for row in document["rows"]}
    assert {"System 1 alone", "default", "always think", "tuned, base", "tuned, draft"} == set(rows)
    assert document["optimize"]["policy"]["arm"] == "draft"  # where thinking is faster, more of it fits into the limit
    assert document["optimize"]["marks"] == []
    assert rows["tuned, draft"]["p90"] < 2 < rows["default"]["p90"]
    accuracy = [rows[name]["accuracy"] for name in ("System 1 alone", "tuned, base", "tuned, draft", "default")]
    assert accuracy == sorted(accuracy)


def test_the_help_names_the_target() -> None:
    assert f"recorded: {TARGET}]" in " ".join(CliRunner().invoke(cli, ["demo", "--help"]).stdout.split())


def test_a_target_that_cannot_be_read_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    found = CliRunner().invoke(cli, ["demo", "--recorded", "--folder", str(tmp_path / "x"), "--target", "p90<1"])
    assert found.exit_code == 2
    assert not (tmp_path / "x").exists()

"""The store: what goes in comes out, from several processes, across versions, and without secrets."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import assume, given, settings

from calib.engine.base import Answer, EngineInfo
from calib.errors import CalibError
from calib.latency import RateModel
from calib.policy import Policy, evaluate
from calib.questions import Question, split_key, split_position
from calib.store import Answered, Covered, Failed, Store, Verification, VerifiedRows, load_outcomes, schema
from calib.store.database import url_of
from tests.postgres import drop_tables, postgres, postgres_server  # noqa: F401 - the last two are fixtures
from tests.strategies import outcomes

NAN = float("nan")
INFO = EngineInfo("gev", {"model": "gev", "head": "v1"}, threshold=0.7, mix=0.4)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "s.db") as opened:
        yield opened


@pytest.fixture
def model(store):
    return store.register_model(INFO)


def question(i=0, dataset="d", options=("x", "y"), **changes):
    fields = {"kind": "choice", "state": "", "question": f"what about {i}?", "answer": 0}
    return Question(id=str(i), dataset=dataset, options=options, **(fields | changes))


def answer(p1=(0.75, 0.25), p2=None, tokens=None, t1=0.05, t2=None, finished=None, **changes):
    """Answer with p2 by budget: ``p2={256: (0.5, 0.5)}``; tokens are the budgets and seconds NaN unless given."""
    p2 = p2 or {}
    budgets = tuple(p2)
    width = len(next(iter(p2.values()), ()))
    return Answer(
        p1=None if p1 is None else np.array(p1, dtype=float),
        t1=t1,
        budgets=budgets,
        p2=np.array(list(p2.values()), dtype=float).reshape(len(budgets), width),
        tokens=np.array(budgets if tokens is None else tokens, dtype=float),
        finished=np.array([False] * len(budgets) if finished is None else finished),
        t2=np.array([NAN] * len(budgets) if t2 is None else t2, dtype=float),
        **changes,
    )


def add(store, model, *answered, concurrency=8, arm="base"):
    """Questions with their answers, all at once."""
    store.add_questions([q for q, _ in answered])
    store.write(model, [Answered(q, arm, a, concurrency) for q, a in answered])


def failed(q, budgets=(256,), arm="base", stage="system2", reason="timeout", seconds=30.0, concurrency=8):
    return Failed(q, arm, budgets, stage, reason, "no answer in time", seconds, 3, concurrency)


# --- opening ----------------------------------------------------------------------------------------------------------


def test_a_store_that_must_exist_is_not_made(tmp_path):
    with pytest.raises(CalibError, match=r"absent\.db.*calib collect.*calib import"):
        Store.open(tmp_path / "absent.db", must_exist=True)
    assert not (tmp_path / "absent.db").exists()
    sqlite3.connect(tmp_path / "other.db").close()
    with pytest.raises(CalibError, match="no store there"):
        Store.open(tmp_path / "other.db", must_exist=True)


def test_location_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CALIB_STORE", str(tmp_path / "env.db"))
    with Store.open() as opened:
        assert opened.location == str(tmp_path / "env.db")
    monkeypatch.delenv("CALIB_STORE")
    monkeypatch.chdir(tmp_path)
    with Store.open() as opened:
        assert opened.location == "calib.db"
    assert Path("calib.db").is_file()


def test_what_is_no_database_is_refused_by_name(tmp_path):
    (tmp_path / "x.db").write_text("hello, this is certainly not a database file\n" * 50)
    with pytest.raises(CalibError, match=r"x\.db: not a store of calib, nor any SQLite file"):
        Store.open(tmp_path / "x.db")
    with pytest.raises(CalibError, match="mkdir -p"):
        Store.open(tmp_path / "missing" / "x.db")
    with pytest.raises(CalibError, match="'mysql' are not supported"):
        Store.open("mysql://host/database")


def test_a_failing_database_is_named(store):
    with sqlite3.connect(store.location) as raw:
        raw.execute("DROP TABLE policies")
    raw.close()
    with pytest.raises(CalibError, match=r"s\.db: the database failed: no such table: policies") as caught:
        store.save_policy("best", {})
    assert caught.value.exit_code == 1


def test_the_journal_is_wal_and_a_new_store_is_empty(store):
    with sqlite3.connect(store.location) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    raw.close()
    assert store.models() == []
    with pytest.raises(CalibError, match="holds no answers yet"):
        load_outcomes(store)


def test_a_password_is_never_shown():
    url, shown = url_of("postgresql://calib:s3cret@127.0.0.1:1/db?sslpassword=s3cret&connect_timeout=1")
    assert url.drivername == "postgresql+psycopg"
    assert "127.0.0.1:1/db" in shown
    with pytest.raises(CalibError) as refused:  # no driver, or nothing listens on port 1
        Store.open("postgresql+psycopg://calib:s3cret@127.0.0.1:1/db?connect_timeout=1")
    with pytest.raises(CalibError) as broken:
        Store.open("postgresql://calib:s3cret@host:port/db")
    engine = sa.create_engine("sqlite://")
    held = Store(engine, shown)
    for text in (shown, str(held), repr(held), held.location, str(refused.value), str(broken.value)):
        assert "s3cret" not in text
    engine.dispose()


# --- versions ---------------------------------------------------------------------------------------------------------


def test_an_older_store_is_migrated_and_a_newer_one_refused(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    with Store.open(path) as first:
        first.save_policy("best", {"threshold": 0.5})

    def add_note(conn):
        if "note" not in {column["name"] for column in sa.inspect(conn).get_columns("policies")}:
            conn.execute(sa.text("ALTER TABLE policies ADD COLUMN note TEXT"))

    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, add_note))
        with Store.open(path) as migrated:
            assert migrated.status().schema_version == len(schema.MIGRATIONS)
            assert migrated.policy("best") == {"threshold": 0.5}
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT name, note FROM policies").fetchall() == [("best", None)]
    raw.close()
    with pytest.raises(CalibError, match=r"schema version 5, this calib knows up to 4; upgrade: pip install"):
        Store.open(path)


def test_a_store_of_the_second_version_gets_whether_scores_are_thought_about(tmp_path):
    path = tmp_path / "s.db"
    with Store.open(path) as first:
        first.register_model(INFO)
    raw = sqlite3.connect(path)
    raw.executescript("ALTER TABLE models DROP COLUMN thinks_about_scores; UPDATE calib_schema SET version = 2")
    raw.close()
    with Store.open(path) as opened:
        assert not opened.models()[0].thinks_about_scores
        opened.register_model(replace(INFO, thinks_about_scores=True))
        assert opened.models()[0].thinks_about_scores


def test_a_store_of_the_first_version_gets_the_stages(tmp_path):
    path = tmp_path / "s.db"
    with Store.open(path) as first:
        model = first.register_model(INFO)
        add(first, model, (question(), answer(p2={8: (0.5, 0.5)})))
    raw = sqlite3.connect(path)
    raw.executescript("DROP TABLE samples; DROP TABLE passes; DROP TABLE audits; UPDATE calib_schema SET version = 1")
    raw.close()
    with Store.open(path) as opened:
        assert opened.status().schema_version == len(schema.MIGRATIONS)
        assert (opened.planned(model), opened.passes(model), opened.audits(model)) == ([], [], [])
        assert load_outcomes(opened).n == 1


def third(path):
    """A store as the third version of the schema was: without runs of `calib verify`."""
    with Store.open(path) as first:
        model = first.register_model(INFO)
        add(first, model, (question(), answer(p2={8: (0.5, 0.5)})))
        first.save_policy("best", {"threshold": 0.5})
    raw = sqlite3.connect(path)
    raw.executescript("DROP TABLE verifications; UPDATE calib_schema SET version = 3")
    raw.close()


def verification(name="best", **changes):
    p = np.array([[0.25, 0.75, 0.0], [np.nan, np.nan, np.nan]])
    rows = VerifiedRows(
        (("small", "0"), ("ü", "1")), np.array([1, -1]), np.array([True, False]), *np.array([[9.0, 0], [0.5, 60]]), p
    )
    summary = {"n": 2, "tokens": {"value": 4.5}, "url": "http://u:secret@h:1/v1?key=secret"}
    url = "http://u:secret@h:1/v1"
    return replace(Verification(name, "v1", "f" * 64, "mtp", url, None, 8, summary, rows), **changes)


def test_a_store_of_the_third_version_gets_runs_of_verify(tmp_path):
    third(tmp_path / "s.db")
    with Store.open(tmp_path / "s.db") as opened:
        assert opened.status().schema_version == len(schema.MIGRATIONS)
        assert opened.verifications() == []
        assert load_outcomes(opened).n == 1
        opened.add_verification(verification())
        assert len(opened.verifications()) == 1


def test_an_older_store_is_read_without_a_write(tmp_path):
    path = tmp_path / "s.db"
    third(path)
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA journal_mode=DELETE")  # so that even the journal's mode would show
    raw.close()
    before = path.read_bytes()
    with Store.open(path, read_only=True) as opened:
        assert (load_outcomes(opened).n, opened.verifications()) == (1, [])
        assert opened.policy("best") == {"threshold": 0.5}
        with pytest.raises(CalibError, match="was opened read-only"):
            opened.save_policy("best", {"threshold": 0.6})
        with pytest.raises(CalibError, match="was opened read-only"):
            opened.record_look("split", {})
        with pytest.raises(CalibError, match="a readonly database"), opened._reading() as conn:  # nor below
            conn.execute(schema.policies.delete())
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["s.db"]


def test_a_store_that_is_too_old_to_be_read_as_it_is_is_refused(tmp_path):
    path = tmp_path / "s.db"
    third(path)
    raw = sqlite3.connect(path)
    raw.executescript("ALTER TABLE models DROP COLUMN thinks_about_scores; UPDATE calib_schema SET version = 2")
    raw.close()
    with pytest.raises(
        CalibError, match=r"version 2; read-only, .* from version 3 on as it is\. .*calib status --store"
    ):
        Store.open(path, read_only=True)
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT version FROM calib_schema").fetchall() == [(2,)]
    raw.close()
    with pytest.raises(CalibError, match="no store there"):
        Store.open(tmp_path / "none.db", read_only=True)
    assert not (tmp_path / "none.db").exists()


def test_a_migration_that_fails_leaves_the_old_store(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    Store.open(path).close()

    def fail(conn):
        conn.execute(sa.text("DROP TABLE policies"))
        raise RuntimeError("halfway")

    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, fail))
        with pytest.raises(RuntimeError, match="halfway"):
            Store.open(path)
    with Store.open(path) as opened:
        assert opened.policies() == []


# --- runs of calib verify ---------------------------------------------------------------------------------------------


def test_runs_of_verify_come_back_without_credentials(store):
    run = verification()
    store.add_verification(run)
    store.add_verification(verification("other", rate=2.5, concurrency=None, at="2026-01-01T00:00:00.000+00:00"))
    first, second = store.verifications(rows=True)
    assert (first.name, first.version, first.arm, first.rate, first.concurrency) == ("best", "v1", "mtp", None, 8)
    assert (second.rate, second.concurrency, second.at) == (2.5, None, "2026-01-01T00:00:00.000+00:00")
    assert first.url == "http://h:1/v1"
    assert first.summary == {"n": 2, "tokens": {"value": 4.5}, "url": "http://h:1/v1"}
    assert first.rows.questions == run.rows.questions
    for name in ("answers", "thinks", "tokens", "seconds", "p"):
        np.testing.assert_array_equal(getattr(first.rows, name), getattr(run.rows, name), strict=True)
    (only,) = store.verifications("other")
    assert only.rows is None
    with pytest.raises(ValueError, match="with its rows"):
        store.add_verification(only)


def test_status_lists_the_runs_of_verify_and_leaves_envelopes_out(store):
    store.save_policy("best", {"policy": None, "verdict": "met", "envelope": {"bulk": [0] * 1000}})
    store.add_verification(verification("best"))
    status = store.status()
    (run,) = status.to_dict()["verifications"]
    assert (run["name"], run["arm"], run["url"]) == ("best", "mtp", "http://h:1/v1")
    (policy,) = status.to_dict()["policies"]
    assert policy["document"] == {"policy": None, "verdict": "met"}
    assert status.policies[0].document["envelope"]["bulk"]  # what was read is not touched


# --- models and questions ---------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_identity_alone(store):
    first = store.register_model(INFO)
    same = EngineInfo("other name", {"head": "v1", "model": "gev"}, threshold=0.9, mix=0.1)
    assert store.register_model(same) == first
    assert [(m.name, m.threshold, m.mix) for m in store.models()] == [("other name", 0.9, 0.1)]
    assert store.register_model(EngineInfo("gev", {"model": "gev", "head": "v2"})) != first
    assert len(first) == 64


def test_questions_are_added_once(store):
    questions = [question(0, state="S", group="g", weight=2.0, options=("x", "ü")), question(1)]
    assert store.add_questions(questions) == 2
    assert store.add_questions(questions) == 0
    assert store.questions() == questions
    assert store.questions(datasets=["other"]) == []
    store.add_questions([replace(questions[1], weight=3.0)])  # a weight is no part of the answers or of the split
    assert [q.weight for q in store.questions()] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"question": "something else?"}, "text"),
        ({"options": ("y", "x")}, "text"),
        ({"answer": 1}, "answer"),
        ({"group": "story 7"}, "group"),
    ],
)
def test_a_changed_question_is_refused(store, changes, what):
    store.add_questions([question()])
    with pytest.raises(CalibError, match=rf"question '0' of dataset 'd' was stored with another {what}"):
        store.add_questions([question(5), replace(question(), **changes)])
    assert [q.id for q in store.questions()] == ["0"]  # nothing of the refused call
    with pytest.raises(CalibError, match=f"another {what}"):
        store.add_questions([question(8), replace(question(8), **changes)])


def test_a_question_needs_an_answer(store):
    with pytest.raises(CalibError, match="has no answer"):
        store.add_questions([question(answer=None)])


def test_without_text_only_hashes_and_numbers_are_kept(store, model):
    q = question(3, question="a very private question?", options=("secret one", "secret two"))
    store.add_questions([q], keep_text=False)
    store.write(model, [Answered(q, "base", answer(p2={9: (1, 0)}, text="private thought"), 1)], keep_text=False)
    assert store.questions() == []
    data = b"".join(path.read_bytes() for path in Path(store.location).parent.iterdir())
    assert b"private" not in data
    assert b"secret" not in data
    o = load_outcomes(store)
    assert o.p2[0, 0].tolist() == [1, 0]
    assert o.split_position[0] == split_position(split_key(q))


def test_the_thought_is_kept_when_wanted(store, model):
    add(store, model, (question(), answer(p2={9: (1, 0)}, text="because")))
    raw = sqlite3.connect(store.location)
    assert raw.execute("SELECT thought FROM answers").fetchall() == [("because",)]
    raw.close()


# --- outcomes: what goes in comes out ---------------------------------------------------------------------------------


def test_outcomes_by_hand(store, model):
    first = answer(
        (0.6, 0.4),
        {256: (0.5, 0.5), 512: (0.1, 0.9)},
        tokens=[256, 300],
        finished=[False, True],
        t2=[1.1, 1.3],
        label_mass1=0.99,
        label_mass2=np.array([0.9, NAN]),
        stages={"thought": 1.2},
    )
    second = answer((0.2, 0.3, 0.5), {256: (0, 0, 1), 512: (0, 0, 1)}, tokens=[100, 100], finished=[True, True])
    add(
        store,
        model,
        (question(1, "z"), first),
        (question(2, "a", options=("x", "y", "z"), answer=2, group="g"), second),
    )
    o = load_outcomes(store.location)
    assert (o.dataset.tolist(), o.ids.tolist()) == (["a", "z"], ["2", "1"])
    np.testing.assert_array_equal(o.p1, [[0.2, 0.3, 0.5], [0.6, 0.4, 0]])
    np.testing.assert_array_equal(o.p2, [[[0, 0, 1], [0, 0, 1]], [[0.5, 0.5, 0], [0.1, 0.9, 0]]])
    np.testing.assert_array_equal(o.tokens, [[100, 100], [256, 300]])
    np.testing.assert_array_equal(o.finished, [[True, True], [False, True]])
    np.testing.assert_array_equal(o.t1, [[0.05, 0.05]])
    np.testing.assert_array_equal(o.t2, [[[NAN, NAN], [1.1, 1.3]]])
    np.testing.assert_array_equal(o.label_mass, [[NAN, NAN, NAN], [0.99, 0.9, NAN]])
    assert (o.n_options.tolist(), o.answer.tolist(), o.budgets.tolist()) == ([3, 2], [2, 0], [256, 512])
    assert (o.arms, o.concurrency.tolist(), o.estimated.any()) == (("base",), [8], False)
    assert o.group.tolist() == ["g", "z\0001"]
    assert o.split_position.tolist() == [split_position("g"), split_position(split_key(question(1, "z")))]
    assert (o.model, o.fingerprint, o.default_threshold, o.default_mix, o.simulated) == ("gev", model, 0.7, 0.4, False)
    assert o.warnings == ()


@settings(max_examples=40)
@given(outcomes())
def test_random_outcomes_come_back_exactly(o):
    assume(o.can_think.any())
    failed_seconds = 99.5
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "s.db") as store:
        fingerprint = store.register_model(EngineInfo("m", {}, simulated=True))
        questions, records = [], []
        for i in range(o.n):
            k = int(o.n_options[i])
            kind = "choice" if o.can_think[i] else "score"
            options = tuple(f"{i} {j}" for j in range(k))
            weight, group = float(o.weight[i]), str(o.group[i])
            q = Question(o.ids[i], o.dataset[i], kind, "", "?", options, int(o.answer[i]), weight, group)
            questions.append(q)
            good = np.flatnonzero(~o.failed[i] & o.can_think[i])
            bad = np.flatnonzero(o.failed[i] & o.can_think[i])
            for a, arm in enumerate(o.arms):
                given_answer = Answer(
                    p1=o.p1[i, :k],
                    t1=float(o.t1[a, i]),
                    budgets=tuple(o.budgets[good].tolist()),
                    p2=o.p2[i, good, :k],
                    tokens=o.tokens[i, good],
                    finished=o.finished[i, good],
                    t2=o.t2[a, i, good],
                )
                records.append(Answered(q, arm, given_answer, 4))
                if bad.size:
                    records.append(
                        failed(q, tuple(o.budgets[bad].tolist()), arm, seconds=failed_seconds, concurrency=4)
                    )
        store.add_questions(questions)
        for start in range(0, len(records), 7):
            store.write(fingerprint, records[start : start + 7])
        store.write(fingerprint, records)  # duplicates are ignored
        got = load_outcomes(store, budgets=o.budgets.tolist())
    order = np.argsort(o.dataset.astype(str), kind="stable")
    want, f = o.take(order), o.failed[order] & o.can_think[order][:, None]
    for name in ("p1", "n_options", "answer", "dataset", "ids", "group", "weight", "t1", "can_think"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    thinks = want.can_think
    np.testing.assert_array_equal(got.p2[thinks], want.p2[thinks])
    np.testing.assert_array_equal(got.tokens[thinks], np.where(f, o.budgets, want.tokens)[thinks])
    np.testing.assert_array_equal(got.finished[thinks], (want.finished & ~f)[thinks])
    np.testing.assert_array_equal(got.t2[:, thinks], np.where(f, failed_seconds, want.t2)[:, thinks])
    assert got.arms == o.arms
    assert got.simulated
    assert not got.estimated.any()
    assert got.concurrency.tolist() == [4] * len(o.arms)


def test_floats_come_back_bit_by_bit(store, model):
    odd = np.array([5e-324, 1 - 2**-53, 2**-53 - 5e-324])
    add(store, model, (question(options=("x", "y", "z")), answer(odd, {7: odd[::-1]}, t1=0.1 + 0.2, t2=[1 / 3])))
    o = load_outcomes(store)
    assert o.p1[0].tobytes() == odd.tobytes()
    assert o.p2[0, 0].tobytes() == odd[::-1].tobytes()
    assert (o.t1[0, 0], o.t2[0, 0, 0]) == (0.1 + 0.2, 1 / 3)


def test_answers_of_a_wrong_shape_never_enter(store, model):
    q = question()
    store.add_questions([q])
    for bad in (answer((0.2, 0.3, 0.5)), answer(p2={5: (0.2, 0.3, 0.5)}), answer(p2={5: (1, 0)}, tokens=[5, 5])):
        with pytest.raises(ValueError, match="shape"):
            store.write(model, [Answered(question(1), "base", answer(), 1), Answered(q, "base", bad, 1)])
    assert store.coverage(model, "base") == {}


# --- rows that meet ---------------------------------------------------------------------------------------------------


def test_later_asks_add_budgets_and_the_earlier_row_wins(store, model):
    q = question()
    add(store, model, (q, answer((0.9, 0.1))))
    add(store, model, (q, answer(None, {256: (0.8, 0.2)}, t1=NAN, t2=[1.0])))
    add(store, model, (q, answer((0.5, 0.5), {256: (0.1, 0.9), 512: (0.3, 0.7)}, t1=9.0, t2=[7.0, 2.0])))
    add(store, model, (q, answer(None, {64: (0.6, 0.4), 512: (0.2, 0.8)}, t1=NAN, t2=[0.5, 8.0])))
    o = load_outcomes(store)
    assert o.budgets.tolist() == [64, 256, 512]
    assert o.p1.tolist() == [[0.9, 0.1]]
    assert o.p2[0].tolist() == [[0.6, 0.4], [0.8, 0.2], [0.3, 0.7]]
    assert o.t1.tolist() == [[0.05]]
    assert o.t2.tolist() == [[[0.5, 1.0, 2.0]]]


def test_questions_with_one_text_share_answers_and_group(store, model):
    one = question(1, "a", question="same?")
    two = replace(one, id="2", dataset="b", answer=1)
    store.add_questions([one, two, question(3)])
    store.write(model, [Answered(q, "base", answer(p2={8: (0, 1)}), 1) for q in (one, question(3))])
    o = load_outcomes(store)
    assert o.ids.tolist() == ["1", "2", "3"]
    np.testing.assert_array_equal(o.p2[0], o.p2[1])
    assert o.group[0] == o.group[1] != o.group[2]
    assert store.coverage(model, "base")["b", "2"] == store.coverage(model, "base")["a", "1"]


def test_label_sets_are_the_fixed_lists_of_a_dataset(store, model):
    def some(dataset, options):
        return [question(f"{dataset}{i}", dataset, options=o) for i, o in enumerate(options)]

    fixed, other = ("x", "y"), ("y", "x")
    questions = some("fixed", [fixed] * 2) + some("again", [fixed] * 3) + some("other", [other] * 2)
    questions += some("mixed", [fixed, other]) + some("single", [fixed])
    questions += [replace(q, question="", options=("", "")) for q in some("unknown", [fixed] * 2)]
    add(store, model, *((q, answer()) for q in questions))
    o = load_outcomes(store)
    sets = {name: set(o.label_set[o.dataset == name].tolist()) for name in o.dataset_names}
    assert sets["fixed"] == sets["again"] != sets["other"]
    assert sets["mixed"] == sets["single"] == sets["unknown"] == {-1}
    assert min(sets["fixed"] | sets["other"]) >= 0


# --- what is selected -------------------------------------------------------------------------------------------------


def test_models_never_mix(store, model):
    other = store.register_model(EngineInfo("jev", {"model": "jev"}))
    store.register_model(EngineInfo("unused", {"model": "unused"}))
    add(store, model, (question(0), answer((0.9, 0.1))))
    add(store, other, (question(0), answer((0.8, 0.2))))
    with pytest.raises(CalibError, match=rf"gev \({model[:12]}\), jev.*--model"):
        load_outcomes(store)
    assert load_outcomes(store, model="jev").p1[0, 0] == 0.8
    assert load_outcomes(store, model=model[:6]).p1[0, 0] == 0.9
    with pytest.raises(CalibError, match="no answers of a model 'unused'; there are: gev"):
        load_outcomes(store, model="unused")
    add(store, store.register_model(EngineInfo("jev", {"model": "jev 2"})), (question(0), answer()))
    with pytest.raises(CalibError, match=f"--model {other[:12]}"):
        load_outcomes(store, model="jev")


def test_datasets_of_another_model_are_not_counted_as_left_out(store, model):
    add(store, model, (question(0, "mine"), answer()))
    store.add_questions([question(1, "theirs")])
    assert load_outcomes(store).warnings == ()
    store.add_questions([question(1, "mine")])
    assert load_outcomes(store).warnings[0].startswith("left out 1 question without an answer of System 1")


def test_datasets_can_be_chosen(store, model):
    add(store, model, (question(0, "a"), answer()), (question(1, "b"), answer()))
    assert load_outcomes(store, datasets=["b"]).ids.tolist() == ["1"]
    with pytest.raises(CalibError, match=r"unknown dataset 'c'; there are: a, b"):
        load_outcomes(store, datasets=["c"])


def test_budgets_that_few_questions_have_are_left_out_and_named(store, model):
    both = {256: (0.5, 0.5), 512: (0.5, 0.5)}
    add(store, model, *((question(i), answer(p2=both)) for i in range(19)))
    add(store, model, (question(19), answer(p2={512: (0.5, 0.5)})), (question(20), answer(p2=both | {64: (1, 0)})))
    o = load_outcomes(store)
    assert o.budgets.tolist() == [256, 512]
    assert o.n == 20
    assert "left out 1 question without an answer of System 1 or one of the budgets 256, 512" in o.warnings[0]
    assert "64 (1 question)" in o.warnings[1]
    assert load_outcomes(store, budgets=[512]).n == 21
    assert load_outcomes(store, budgets=[512, 64]).ids.tolist() == ["20"]
    with pytest.raises(CalibError, match=r"think budget 128 was not collected; there are \[64, 256, 512\]"):
        load_outcomes(store, budgets=[128])


def test_system1_alone_is_enough(store, model):
    add(store, model, (question(), answer()))
    o = load_outcomes(store)
    assert o.budgets.size == 0
    assert o.p2.shape == (1, 0, 2)


def test_system2_alone_is_not(store, model):
    add(store, model, (question(), answer(None, {8: (1, 0)}, t1=NAN)))
    with pytest.raises(CalibError, match=r"no question of 'gev' has System 1 and all of the budgets \[8\]"):
        load_outcomes(store)


# --- arms and seconds -------------------------------------------------------------------------------------------------


def test_answers_are_shared_between_arms_and_latency_is_not(store, model):
    def timed(p, t):
        return answer((p, 1 - p), {8: (p, 1 - p)}, t1=t, t2=[10 * t])

    add(store, model, (question(0), timed(0.9, 0.1)), (question(1), timed(0.8, 0.2)), arm="base")
    add(store, model, (question(0), timed(0.6, 0.3)), (question(2), timed(0.7, 0.4)), arm="aaa")
    o = load_outcomes(store)
    assert o.arms == ("base", "aaa")
    assert o.p1[:, 0].tolist() == [0.9, 0.8, 0.7]  # the third is known from the other arm only
    assert o.p2[:, 0, 0].tolist() == [0.9, 0.8, 0.7]
    np.testing.assert_array_equal(o.t1, [[0.1, 0.2, NAN], [0.3, NAN, 0.4]])
    np.testing.assert_array_equal(o.t2[:, :, 0], [[1, 2, NAN], [3, NAN, 4]])
    only = load_outcomes(store, arms=["aaa"])
    assert only.arms == ("aaa",)
    assert only.p1[0, 0] == 0.9
    with pytest.raises(CalibError, match=r"arm 'mtp' was not collected; there are base, aaa"):
        load_outcomes(store, arms=["mtp"])


def test_a_thought_that_ended_takes_the_same_seconds_at_larger_budgets(store, model):
    short = answer(p2={8: (1, 0), 64: (1, 0)}, tokens=[5, 5], finished=[True, True], t2=[0.5, NAN])
    long = answer(p2={8: (1, 0), 64: (1, 0)}, tokens=[8, 20], finished=[False, True], t2=[NAN, 2.0])
    add(store, model, (question(0), short), (question(1), long))
    o = load_outcomes(store)
    np.testing.assert_array_equal(o.t2[0], [[0.5, 0.5], [NAN, 2.0]])
    assert not o.estimated.any()


def test_rates_fill_what_was_not_measured_and_add_arms(store, model):
    a = answer(p2={8: (1, 0), 64: (1, 0)}, tokens=[8, 20], finished=[False, True], t1=NAN, t2=[NAN, 2.0])
    add(store, model, (question(0), a))
    store.set_rates(model, "base", RateModel(0.5, 1.0))
    store.set_rates(model, "base", RateModel(0.05, 10.0))  # the newer one counts
    store.set_rates(model, "mtp", RateModel(0.06, 20.0, read_s=0.1))
    o = load_outcomes(store)
    assert o.arms == ("base", "mtp")
    np.testing.assert_allclose(o.t1, [[0.05], [0.06]])
    np.testing.assert_allclose(o.t2, [[[0.8, 2.0]], [[0.5, 1.1]]])  # 8 / 10; 8 / 20 + 0.1, 20 / 20 + 0.1
    assert o.estimated.tolist() == [[True, True, False], [True, True, True]]


def test_an_arm_uses_the_tokens_of_its_own_thought(store, model):
    add(store, model, (question(0), answer(p2={8: (1, 0), 64: (1, 0)}, tokens=[8, 50])), concurrency=0)
    own = answer(p2={64: (1, 0)}, tokens=[30], finished=[True])
    add(store, model, (question(0), own), arm="mtp", concurrency=0)
    store.set_rates(model, "mtp", RateModel(0.1, 10.0))
    o = load_outcomes(store)
    assert o.tokens.tolist() == [[8, 50]]
    assert o.t2[1].tolist() == [[0.8, 3.0]]  # min(30, 8) / 10, and 30 / 10 rather than 50 / 10


def test_a_line_fills_what_was_not_measured(store, model):
    def ask(i):
        tokens = 10 * (i + 1)
        known = {16: (1, 0), 512: (1, 0)}
        seconds = [NAN, 0.1 + 0.01 * tokens]
        t1 = 0.05 if i else NAN
        return answer(p2=known, tokens=[min(16, tokens), tokens], finished=[tokens <= 16, True], t1=t1, t2=seconds)

    add(store, model, *((question(i), ask(i)) for i in range(30)))
    o = load_outcomes(store)
    # the first thought has 10 tokens and fits in 16: its seconds are those measured; the others are cut at 16 tokens
    np.testing.assert_allclose(o.t2[0, :, 0], [0.2] + [0.26] * 29)
    np.testing.assert_allclose(o.t1[0], 0.05)
    assert o.estimated.tolist() == [[True, True, False]]
    again = load_outcomes(store)
    np.testing.assert_array_equal(o.t2, again.t2)


def test_too_few_seconds_stay_unknown(store, model):
    add(store, model, (question(0), answer(p2={8: (1, 0)}, t2=[1.0])), (question(1), answer(p2={8: (1, 0)}, t1=NAN)))
    o = load_outcomes(store)
    np.testing.assert_array_equal(o.t1, [[0.05, NAN]])
    np.testing.assert_array_equal(o.t2, [[[1.0], [NAN]]])
    assert not o.has_latency("base")


def test_latency_is_of_one_load(store, model):
    q, other = question(0), question(1)
    add(store, model, (q, answer(t1=0.1)), (other, answer(t1=0.1)), concurrency=1)
    add(store, model, (q, answer(t1=0.5)), (other, answer(t1=0.5)), concurrency=64)
    with pytest.raises(CalibError, match=r"arm 'base' was timed at the concurrencies 1, 64.*--concurrency 64"):
        load_outcomes(store)
    assert load_outcomes(store, concurrency=1).t1.tolist() == [[0.1, 0.1]]
    o = load_outcomes(store, concurrency=64)
    assert (o.t1.tolist(), o.concurrency.tolist()) == ([[0.5, 0.5]], [64])
    o = load_outcomes(store, concurrency=7)
    assert np.isnan(o.t1).all()
    assert o.warnings == ("not timed at concurrency 7: base",)


def test_the_newest_pass_counts(store, model):
    q = question()
    store.add_questions([q])
    for number, seconds in [(0, 1.0), (2, 3.0), (1, 2.0)]:
        store.write(model, [Answered(q, "base", answer(p2={8: (1, 0)}, t1=seconds, t2=[10 * seconds]), 4, number)])
    o = load_outcomes(store)
    assert (o.t1.tolist(), o.t2.tolist()) == ([[3.0]], [[[30.0]]])


def test_unknown_tokens_are_said_and_give_no_seconds_from_rates(store, model):
    add(store, model, (question(), answer(p2={8: (1, 0)}, tokens=[NAN], t1=NAN)))
    store.set_rates(model, "base", RateModel(0.05, 100))
    o = load_outcomes(store)
    assert o.tokens.tolist() == [[0]]
    assert np.isnan(o.t2).all()
    assert "think tokens unknown for 1 question" in o.warnings[0]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_counts_as_asked_and_is_censored(store, model):
    good = answer((0.9, 0.1), {8: (0.9, 0.1)}, t2=[0.4])
    add(store, model, (question(0), good), (question(1), answer((0.9, 0.1), {8: (1, 0)}, t2=[0.4])))
    store.add_questions([question(2)])
    store.write(model, [Answered(question(2), "base", answer(), 8), failed(question(2), (8,), seconds=30.0)])
    o = load_outcomes(store)
    assert o.n == 3
    assert o.failed.tolist() == [[False], [False], [True]]
    assert (o.tokens[2, 0], o.t2[0, 2, 0], o.finished[2, 0]) == (8, 30.0, False)
    assert "1 question without a usable answer of System 2" in o.warnings[0]
    assert evaluate(o, Policy(1.1, 0.5, 8)).accuracy == pytest.approx(2 / 3)


def test_a_success_ends_its_failure_and_only_that(store, model):
    q = question()
    store.add_questions([q])
    store.write(model, [failed(q, (8, 64), stage="both")])
    before = store.coverage(model, "base")["d", "0"]
    assert before == Covered(False, frozenset(), False, frozenset(), frozenset({8, 64}), True)
    store.write(model, [Answered(q, "base", answer(p2={8: (1, 0)}, t2=[1.0]), 8)])
    after = store.coverage(model, "base")["d", "0"]
    assert after == Covered(True, frozenset({8}), True, frozenset({8}), frozenset({64}), False)
    assert [(f.reason, f.questions) for f in store.status().models[0].failures] == [("timeout", 1)]
    store.write(model, [failed(q, (64,)), Answered(q, "base", answer(None, {64: (1, 0)}, t1=NAN), 8)])
    assert store.status().models[0].failures == []


def test_a_later_failure_of_the_same_ask_replaces_the_earlier(store, model):
    q = question()
    store.add_questions([q])
    store.write(model, [failed(q, reason="http_500"), failed(q, reason="nan")])
    store.write(model, [failed(q, reason="timeout")])
    assert [(f.reason, f.questions, f.examples) for f in store.status().models[0].failures] == [("timeout", 1, ["d/0"])]


def test_an_answer_at_another_load_answers_but_leaves_the_censored_seconds(store, model):
    q = question()
    add(store, model, (q, answer(p2={8: (1, 0)}, t2=[0.5])), concurrency=1)
    store.write(model, [failed(q, (8,), seconds=60.0, concurrency=64)])
    o = load_outcomes(store, concurrency=64)
    assert not o.failed.any()
    assert o.t2.tolist() == [[[60.0]]]
    assert store.coverage(model, "base")["d", "0"].failed == frozenset()
    assert store.coverage(model, "base", concurrency=64)["d", "0"].failed == {8}


def test_score_questions_think_only_where_the_server_can(store, model):
    score = {"kind": "score", "options": ("0", "1")}
    cannot, can, broke = question(0, **score), question(1, **score), question(2, **score)
    refused = question(3, **score)
    thought = answer(p2={8: (1, 0)}, t2=[1.0])
    add(
        store, model, (cannot, answer()), (can, thought), (broke, answer()), (refused, answer()), (question(4), thought)
    )
    store.write(model, [failed(broke, (8,)), failed(refused, (8,), reason="refused")])
    o = load_outcomes(store)
    assert o.can_think.tolist() == [False, True, True, False, True]
    assert o.tokens[:, 0].tolist() == [0, 8, 8, 0, 8]
    assert o.has_latency("base")
    assert evaluate(o, Policy(1.1, 0.5, 8)).unanswered == 1


def test_score_questions_are_as_others_of_a_model_that_thinks_about_them(store):
    able = store.register_model(replace(INFO, identity={"model": "able"}, thinks_about_scores=True))
    score = {"kind": "score", "options": ("0", "1")}
    add(store, able, (question(0, **score), answer(p2={8: (1, 0)}, t2=[1.0])), (question(1, **score), answer()))
    o = load_outcomes(store)
    assert (o.ids.tolist(), o.can_think.tolist()) == (["0"], [True])
    assert "left out 1 question" in o.warnings[0]
    assert load_outcomes(store, budgets=[]).can_think.tolist() == [True, True]


# --- coverage and status ----------------------------------------------------------------------------------------------


def test_coverage_tells_what_to_ask(store, model):
    q, untouched = question(0), question(1)
    store.add_questions([untouched])
    add(store, model, (q, answer(p2={8: (1, 0), 64: (1, 0)}, t2=[NAN, 1.0])), concurrency=4)
    add(store, model, (q, answer(None, {512: (1, 0)}, t1=NAN, t2=[5.0])), concurrency=16)
    everything = frozenset({8, 64, 512})
    found = store.coverage(model, "base")
    assert found == {("d", "0"): Covered(True, everything, True, frozenset({64, 512}), frozenset(), False)}
    assert store.coverage(model, "base", concurrency=16)["d", "0"].timed == {512}
    assert store.coverage(model, "base", concurrency=16)["d", "0"].timed_system1 is False
    assert store.coverage(model, "mtp") == {}
    with pytest.raises(CalibError, match="no model with the fingerprint"):
        store.coverage("f" * 64, "base")


def test_status_counts(store, model):
    add(store, model, (question(0, "a"), answer(p2={8: (1, 0)}, t2=[1.0])), (question(1, "a"), answer()))
    add(store, model, (question(2, "b"), answer(p2={8: (1, 0)})), arm="mtp")
    store.write(model, [failed(question(i, "b"), reason="nan") for i in range(5)])
    store.set_rates(model, "mtp", RateModel(0.05, 438))
    store.save_policy("best", {"mix": 0.5})
    store.save_policy("best", {"mix": 0.6})
    status = store.status().to_dict()
    assert status["questions"] == {"a": 2, "b": 1}
    (only,) = status["models"]
    assert only["coverage"] == [
        {"dataset": "a", "arm": "base", "questions": 2, "system1": 2, "budgets": {8: 1}, "timed": {8: 1}},
        {"dataset": "b", "arm": "base", "questions": 1, "system1": 0, "budgets": {}, "timed": {}},
        {"dataset": "b", "arm": "mtp", "questions": 1, "system1": 1, "budgets": {8: 1}, "timed": {}},
    ]
    (failure,) = only["failures"]
    assert (failure["reason"], failure["questions"], failure["examples"]) == ("nan", 5, ["b/0", "b/1", "b/2"])
    assert only["rates"]["mtp"]["tokens_per_second"] == 438
    assert [(p["name"], p["document"], p["versions"]) for p in status["policies"]] == [("best", {"mix": 0.6}, 2)]


# --- policies, ledger, runs -------------------------------------------------------------------------------------------


def test_the_newest_policy_wins(store):
    with pytest.raises(CalibError, match="none is saved yet"):
        store.policy("best")
    for mix in (0.1, 0.2):
        store.save_policy("best", {"mix": mix, "routes": {"dataset=ü": {}}})
    store.save_policy("other", {"mix": 0.9})
    assert store.policy("best") == {"mix": 0.2, "routes": {"dataset=ü": {}}}
    assert [p.name for p in store.policies()] == ["best", "other"]
    with pytest.raises(CalibError, match="no policy 'bets'; there are: best, other"):
        store.policy("bets")


def test_looks_are_numbered_by_split(store):
    assert store.looks("a") == 0
    assert [store.record_look("a", {"mix": mix}) for mix in (0.1, 0.2, 0.3)] == [1, 2, 3]
    assert store.record_look("a", {"mix": 0.2}) == 2  # nothing new was learned
    assert store.record_look("b", {}) == 1
    assert (store.looks("a"), store.looks("b")) == (3, 1)


def test_runs_and_failures_are_kept_without_secrets(store, model):
    arguments = {
        "arm": ["base=https://user:hunter2@gpu.example/v1?key=hunter2", "mtp=http://gpu:8000"],
        "api_key": "hunter2",
        "headers": {"Authorization": "Bearer hunter2", "x-api-key": "hunter2"},
        "api_key_env": "VLLM_KEY",
        "tokens_per_second": 250,
    }
    store.record_run(arguments)
    broken = replace(failed(question()), detail="GET https://user:hunter2@gpu.example/v1?key=hunter2 failed")
    store.write(model, [broken])
    (run,) = store.status().runs
    assert run["arguments"] == {
        "arm": ["base=https://gpu.example/v1", "mtp=http://gpu:8000"],
        "headers": {},
        "api_key_env": "VLLM_KEY",
        "tokens_per_second": 250,
    }
    assert store.status().models[0].failures[0].detail == "GET https://gpu.example/v1 failed"
    data = b"".join(path.read_bytes() for path in Path(store.location).parent.iterdir())
    assert b"hunter2" not in data


def test_a_transaction_is_kept_whole_or_not_at_all(store, model):
    def write_and_fail():
        with store.transaction():
            store.add_questions([question(0)])
            store.save_policy("x", {})
            assert store.policy("x") == {}  # it sees itself
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert store.questions() == []
    assert store.policies() == []
    with store.transaction():
        store.add_questions([question(0)])
    assert len(store.questions()) == 1


# --- several processes ------------------------------------------------------------------------------------------------

HEAD = """
import sys
import numpy as np
from calib.engine.base import Answer, EngineInfo
from calib.questions import Question
from calib.store import Answered, Store

def record(i, arm):
    q = Question(str(i), "d", "choice", "", f"what about {i}?", ("x", "y"), 0)
    p = np.array([0.5, 0.5])
    return Answered(q, arm, Answer(p, 0.1, (8,), p[None], np.array([8]), np.array([False]), np.array([1.0])), 4)

store = Store.open(sys.argv[1])
fingerprint = store.register_model(EngineInfo("m", {}))
"""


def child(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HEAD + code), *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_two_processes_write_one_new_store_at_once(tmp_path, kind, request):
    code = """
    arm, first = sys.argv[2], int(sys.argv[3])
    for start in range(first, first + 300, 10):
        batch = [record(i, arm) for i in range(start, start + 10)] + [record(0, "shared")]
        store.add_questions([r.question for r in batch])
        store.write(fingerprint, batch)
        print(store.record_look("split", {"by": arm, "at": start}))
    """
    path = tmp_path / "s.db" if kind == "sqlite" else request.getfixturevalue("postgres")
    children = [child(textwrap.dedent(code), path, arm, first) for arm, first in (("base", 0), ("mtp", 200))]
    looks = [int(line) for process in children for line in process.communicate(timeout=120)[0].split()]
    assert [process.returncode for process in children] == [0, 0]
    assert sorted(looks) == list(range(1, 61))  # each number was given to one look
    with Store.open(path) as store:
        (model,) = store.models()
        counts = {c.arm: c.questions for c in store.status().models[0].coverage}
        assert counts == {"base": 300, "mtp": 300, "shared": 1}
        assert len(store.questions()) == 500
        assert all(c.budgets == {8} for c in store.coverage(model.fingerprint, "mtp").values())


def test_a_killed_writer_leaves_whole_batches(tmp_path):
    code = """
    store.add_questions([record(i, "base").question for i in range(5000)])
    for start in range(0, 5000, 10):
        store.write(fingerprint, [record(i, "base") for i in range(start, start + 10)])
        print(start, flush=True)
    """
    path = tmp_path / "s.db"
    with child(textwrap.dedent(code), path) as process:
        told = [int(process.stdout.readline()) for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split()]
    assert process.returncode == -signal.SIGKILL
    with Store.open(path) as store:
        (model,) = store.models()
        covered = store.coverage(model.fingerprint, "base")
        assert len(covered) in (told[-1] + 10, told[-1] + 20)  # all that was said, and at most the batch under way
        assert all(c.system1 and c.budgets == c.timed == {8} for c in covered.values())
        assert load_outcomes(store).n == len(covered)
        store.write(model.fingerprint, [failed(question(9999))])  # and it can be written on


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def test_postgresql_holds_the_same(postgres):  # noqa: F811
    with Store.open(postgres) as store:
        model = store.register_model(INFO)
        q, scored = question(0, "ü"), question(1, "a", kind="score")
        add(store, model, (q, answer(p2={8: (0.25, 0.75)}, t2=[0.5], text="hm")), (scored, answer()))
        add(store, model, (q, answer(p2={8: (0.25, 0.75)}, t2=[0.5])))
        store.write(model, [failed(q, (64,)), failed(q, (64,), reason="nan")])
        store.set_rates(model, "mtp", RateModel(0.06, 100))
        store.save_policy("best", {"mix": 0.5})
        assert [store.record_look("s", {"mix": mix}) for mix in (0, 1)] == [1, 2]
        assert store.coverage(model, "base")["ü", "0"] == Covered(
            True, frozenset({8}), True, frozenset({8}), frozenset({64}), False
        )
        assert store.status().models[0].failures[0].reason == "nan"
        assert store.questions() == [scored, q]
        store.add_verification(verification())
        assert store.verifications(rows=True)[0].rows.p.shape == (2, 3)
        with pytest.raises(CalibError, match="another answer"):
            store.add_questions([replace(q, answer=1)])
    o = load_outcomes(postgres, budgets=[8])
    assert (o.dataset.tolist(), o.arms) == (["a", "ü"], ("base", "mtp"))
    assert o.p2[1].tolist() == [[0.25, 0.75]]
    with Store.open(postgres, read_only=True) as looked:
        assert len(looked.verifications()) == 1
        with pytest.raises(CalibError, match="was opened read-only"):
            looked.save_policy("best", {"mix": 0.6})
    drop_tables(postgres)
    with pytest.raises(CalibError, match="no store there"):
        Store.open(postgres, must_exist=True)

"""Audits: each finding by hand, the extra answers from a scripted engine, and the whole over a store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from calib import audit
from calib.audit import Floor
from calib.collect import collect as collect_all
from calib.engine.base import AskFailed
from calib.errors import CalibError
from calib.policy import Policy, Route
from calib.questions import Question
from calib.store import AuditAnswer, FailureCount, LatencyPass, Store, StoredAnswer, load_outcomes
from tests.misbehaving import questions, truth
from tests.scripted import ScriptedEngine
from tests.worlds import few

NAN = float("nan")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "a.db") as store:
        yield store


def row(
    i: int, arm: str = "base", p1: Sequence[float] | None = (0.8, 0.2), p2: Sequence[float] | None = None
) -> StoredAnswer:
    """One ask of question ``i``, whose right answer is the first option; p2 at budget 100."""
    budgets = () if p2 is None else (100,)
    b = len(budgets)
    return StoredAnswer(
        dataset="d",
        id=str(i),
        arm=arm,
        answer=0,
        n_options=2,
        budgets=budgets,
        p1=None if p1 is None else np.array(p1),
        p2=np.array([p2] if b else np.empty((0, 2)), dtype=float).reshape(b, 2),
        tokens=np.full(b, 50.0),
        finished=np.ones(b, dtype=bool),
        label_mass1=NAN,
        label_mass2=np.full(b, NAN),
    )


def extra(i: int, kind: str, arm: str = "base", p1: Sequence[float] | None = None, p2: Sequence[float] | None = None):
    q = None if p2 is None else np.array(p2)
    return AuditAnswer("d", str(i), arm, kind, 1, None if p1 is None else np.array(p1), 100 if p2 else None, q)


def only(found: list[audit.Finding], name: str) -> list[tuple[str, float]]:
    return [(finding.level, finding.value) for finding in found if finding.audit == name]


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_thought_longer_than_its_budget_is_refused() -> None:
    thoughts = [("base", (50, 200), np.array([50.0, 90.0])), ("base", (50,), np.array([51.0]))]
    thoughts += [("mtp", (50,), np.array([np.nan]))]  # not known, so nothing is said of it
    found = audit.budgets_obeyed(thoughts)
    assert [(f.level, f.arm, f.value) for f in found] == [("refuse", "base", 0.5), ("ok", "base", 0.0)]
    lost = FailureCount("mtp", "system2", "budget_exceeded", 3, ["d/1"], "70 thinking tokens at think_budget 50")
    other = FailureCount("mtp", "system2", "timeout", 3, ["d/1"], "")
    (broken,) = audit.budgets_obeyed([], [lost, other])
    assert (broken.level, broken.arm, broken.value) == ("warning", "mtp", 3)
    assert "70 thinking tokens" in broken.text


def test_cut_thoughts_count_at_the_largest_budget_only() -> None:
    finished = np.array([[False, i < 7] for i in range(10)])  # 3 of 10 are cut at the largest
    p2 = np.tile([0.6, 0.4], (10, 2, 1))
    p2[7:, 1] = [0.4, 0.6]  # the cut ones are wrong
    found = audit.cut_thoughts(few(finished=finished, p2=p2))
    assert only(found, "cut") == [("note", 1.0), ("warning", pytest.approx(0.3))]
    assert "right when cut: 0%, when ended: 100%" in found[1].text
    assert "none ended" in found[0].text
    assert only(audit.cut_thoughts(few(finished=np.ones((10, 2), bool))), "cut") == [("ok", 0.0), ("ok", 0.0)]
    # weights are those of the tune side
    weight = np.r_[np.full(7, 7.0), np.ones(3)]
    assert audit.cut_thoughts(few(finished=finished, weight=weight))[1].value == pytest.approx(3 / 52)


def test_label_mass_by_dataset() -> None:
    mass = np.tile([0.9, np.nan, 0.3], (10, 1))
    mass[:5, 0] = 0.2
    found = audit.label_mass(few(label_mass=mass, dataset=["low"] * 5 + ["well"] * 5))
    seen = [(f.dataset, f.level, f.value) for f in found]
    assert seen == [("low", "warning", 0.2), ("low", "warning", 0.3), ("well", "ok", 0.9), ("well", "warning", 0.3)]
    assert only(audit.label_mass(few()), "label mass") == [("note", pytest.approx(NAN, nan_ok=True))]


# --- again, other arms, other orders ----------------------------------------------------------------------------------


def test_the_floor_is_what_p1_moves_when_asked_again() -> None:
    moves = np.linspace(0, 0.099, 100)
    rows = [row(i) for i in range(100)] + [row(i, p1=(0.8 - m, 0.2 + m)) for i, m in enumerate(moves)]
    floor = audit.floors(rows)["base"]
    assert (floor.n, floor.flips) == (100, 0)
    assert floor.value == pytest.approx(moves[94])  # at least 95 % do not exceed it
    assert floor.largest == pytest.approx(0.099)
    assert only(audit.repeatability(rows), "repeatability") == [("ok", pytest.approx(moves[94]))]
    by_load = [extra(i, "load", p1=(0.3, 0.7)) for i in range(100)]
    assert only(audit.repeatability(rows[:100], by_load), "repeatability") == [("warning", pytest.approx(0.1))]
    assert audit.repeatability(rows[:10])[0].level == "note"
    assert audit.floors([row(0, arm="base"), row(0, arm="mtp")]) == {}  # two arms are not one asked twice


def test_a_gate_among_what_is_noise_is_refused() -> None:
    sure = np.r_[np.linspace(0.5, 0.9, 80), np.linspace(0.9990, 0.9999, 20)]
    o = few(100, p1=np.column_stack([sure, 1 - sure]))
    floor = Floor("base", 100, 0.001, 0.002, 0)
    refused = audit.gate_precision(o, 0.9995, floor)
    assert (refused.level, refused.value) == ("refuse", pytest.approx(0.2))
    assert audit.gate_precision(o, 0.95, floor).level == "ok"
    assert audit.gate_precision(o, 0.7, Floor("base", 100, 0.02, 0.02, 0)).level == "warning"
    assert audit.gate_precision(o, 0.9995, Floor("base", 100, 0.0, 0.0, 0)).level == "ok"  # it repeats exactly
    assert audit.gate_precision(o, 0.9995, None).level == "note"
    assert audit.gate_precision(o, 1.1, floor).level == "ok"  # no gate


def test_a_floor_of_a_few_pairs_is_none() -> None:
    o = few(100, p1=np.tile([0.9, 0.1], (100, 1)))
    assert audit.gate_precision(o, 0.9, Floor("base", 3, 0.3, 0.3, 0)).level == "note"


def test_answers_of_a_server_that_was_replaced_are_counted_by_arm() -> None:
    marks = [extra(i, "replaced") for i in range(3)] + [
        extra(5, "replaced", arm="mtp"),
        extra(1, "load", p1=(0.8, 0.2)),
    ]
    found = audit.same_server(marks)
    assert [(f.level, f.arm, f.value) for f in found] == [("refuse", "base", 3.0), ("refuse", "mtp", 1.0)]
    assert audit.same_server(marks[-1:]) == []


def test_single_answers_with_a_low_mass_are_counted() -> None:
    mass = np.tile([0.9, 0.9, 0.9], (10, 1))
    mass[[2, 5], 0] = 0.1
    found = audit.label_mass(few(label_mass=mass))
    assert ("note", pytest.approx(0.2)) in only(found, "label mass")
    assert any("2 questions have less than 0.5" in f.text for f in found)


def test_arms_agree_on_p1() -> None:
    same = [row(i) for i in range(100)] + [row(i, "mtp", p1=(0.79, 0.21)) for i in range(100)]
    assert only(audit.arms_agree(same), "arms p1") == [("ok", 0.0)]
    # 6 flips of 100, as many to right as to wrong: another answer, the same accuracy
    flipped = [row(i, p1=(0.4, 0.6) if i < 3 else (0.8, 0.2)) for i in range(100)]
    flipped += [row(i, "mtp", p1=(0.4, 0.6) if 3 <= i < 6 else (0.8, 0.2)) for i in range(100)]
    assert only(audit.arms_agree(flipped), "arms p1") == [("warning", 0.06)]
    worse = [row(i) for i in range(100)] + [row(i, "mtp", p1=(0.4, 0.6) if i < 12 else (0.8, 0.2)) for i in range(100)]
    assert only(audit.arms_agree(worse), "arms p1") == [("refuse", 0.12)]
    assert [f.level for f in audit.arms_agree([row(0), row(1, "mtp")])] == ["note", "note"]
    assert audit.arms_agree([row(0)]) == []


def test_flips_of_p2_between_arms_are_held_against_those_of_one_arm() -> None:
    good, bad = (0.9, 0.1), (0.1, 0.9)
    rows = [row(i, p2=bad if i < 10 else good) for i in range(100)]
    rows += [row(i, "mtp", p2=bad if 10 <= i < 20 else good) for i in range(100)]
    assert only(audit.arms_agree(rows), "arms p2") == [("note", 0.2)]
    assert "not known" in audit.arms_agree(rows)[1].text
    as_often = [extra(i, "seed", p2=bad if i % 5 == 0 else good) for i in range(20, 70)]
    assert only(audit.arms_agree(rows, as_often), "arms p2") == [("ok", 0.2)]
    steady = [extra(i, "seed", p2=good) for i in range(20, 70)]  # 0 of 50 within, 20 of 100 between
    assert only(audit.arms_agree(rows, steady), "arms p2") == [("warning", 0.2)]


def test_answers_that_hang_on_the_order() -> None:
    rows = [row(i, p2=(0.9, 0.1)) for i in range(50)]
    turned = [extra(i, "rotated", p1=(0.3, 0.7) if i < 10 else (0.7, 0.3), p2=(0.8, 0.2)) for i in range(50)]
    found = audit.option_order(rows, turned)
    assert [(f.level, f.value) for f in found] == [("warning", 0.2), ("ok", 0.0)]
    assert "100% right as they stand, 80% rotated" in found[0].text
    assert audit.option_order(rows)[0].level == "note"


def test_void_passes_are_shown() -> None:
    passes = [
        LatencyPass("base", 1, 2, "done", "", 0.02),
        LatencyPass("base", 32, 2, "void", "3 requests ran on 'mtp'", None),
        LatencyPass("mtp", 1, 2, "done", "no /metrics: not checked", None),
    ]
    found = audit.passes_valid(passes)
    assert [f.level for f in found] == ["ok", "warning", "note"]
    assert "2% of the prompt tokens" in found[0].text
    assert "3 requests" in found[1].text


# --- the extra answers ------------------------------------------------------------------------------------------------


@dataclass
class Seeded(ScriptedEngine):
    """An engine that takes a seed, as that of vLLM does."""

    seed: int = 0


async def test_the_sample_is_asked_rotated_alone_and_with_another_seed(store: Store) -> None:
    asked = questions(60) + questions(5, dataset="yesno", kind="noul") + questions(5, dataset="levels", kind="score")
    levels = {"noul": (0.9, 0.1), "score": (0.5, 0.3, 0.2, 0.0, 0.0, 0.0)}

    def p1(question: Question) -> Sequence[float]:
        if question.kind != "choice":
            return levels[question.kind]
        return [0.6 * (t == "option 3") + 0.4 * (i == 0) for i, t in enumerate(question.options)]

    engine = Seeded()
    engine.p1 = p1
    engine.p2 = lambda q, _: truth(f"{engine.seed}{q.question}", len(q.options))[1]
    await collect_all(asked, {"base": engine}, store, budgets=(600,), concurrency=4)
    engine.asked.clear()
    summary = await audit.collect(asked, "base", engine, store, sample=70, budgets=(100, 600), concurrency=4)
    assert summary.asked == {"rotated": 60, "load": 70, "seed": 65}
    assert (summary.failed, engine.seed) == (0, 0)
    again = await audit.collect(asked, "base", engine, store, sample=70, budgets=(600,))
    assert again.asked == {}

    (model,) = store.models()
    rows = store.audits(model.fingerprint)
    before = {(a.dataset, a.id): a for a in store.answers(model.fingerprint)}
    for one in rows:
        stored = before[one.dataset, one.id]
        if one.audit == "rotated":
            # what hangs on texts comes back in the stored order; what hangs on places has moved by the rotation
            expected = np.zeros(4)
            expected[3] += 0.6
            expected[one.variant] += 0.4
            np.testing.assert_allclose(one.p1, expected)
            assert stored.p1 is not None
            assert (one.p1.argmax(), one.budget) == (3, 600)
        elif one.audit == "load":
            np.testing.assert_array_equal(one.p1, stored.p1)
            assert (one.variant, one.p2) == (1, None)
        else:
            assert not np.array_equal(one.p2, stored.p2[0])
    assert {one.variant for one in rows if one.audit == "rotated"} == {1, 2, 3}
    assert load_outcomes(store).n == 70  # none of it became outcomes
    found = audit.findings(store)
    assert ("ok", 0.0) in only(found, "option order")
    assert only(found, "repeatability") == [("ok", 0.0)]
    json.dumps([finding.to_dict() for finding in found], allow_nan=False)


async def test_what_the_server_cannot_do_is_said(store: Store) -> None:
    engine = ScriptedEngine(p1=lambda q: truth(q.question, 4)[0], p2=lambda q, _: truth(q.question, 4)[1])
    with pytest.raises(CalibError, match="answered none of these questions"):
        await audit.collect(questions(5), "base", engine, store)
    await collect_all(questions(5), {"base": engine}, store, budgets=())
    summary = await audit.collect(questions(5), "base", engine, store, budgets=(600,))
    assert "takes no seed" in summary.notes[0]
    engine.failure, engine.fails_in = AskFailed("nan", "broken"), "system1"
    summary = await audit.collect(questions(6)[:5], "base", engine, store, sample=5)
    assert summary.asked == {}


def test_outcomes_alone_tell_of_cuts_and_label_mass() -> None:
    found = audit.findings(few(finished=np.zeros((10, 2), bool)))
    assert [f.level for f in found] == ["warning", "note", "note"]
    assert {f.audit for f in found} == {"cut", "label mass"}


async def test_the_worst_comes_first_and_the_gate_of_a_policy_is_looked_at(store: Store) -> None:
    engine = ScriptedEngine(p1=lambda q: truth(q.question, 4)[0], p2=lambda q, _: truth(q.question, 4)[1])
    for concurrency in (4, 2):  # answers do not hang on the load, so none has to be named
        await collect_all(questions(40), {"base": engine}, store, budgets=(600,), concurrency=concurrency)
    found = audit.findings(store)
    order = ["refuse", "warning", "note", "ok"]
    assert [f.level for f in found] == sorted((f.level for f in found), key=order.index)
    assert only(found, "budget") == [("ok", 0.0)]

    def gates(**policy: object) -> list[tuple[str, float]]:
        said = audit.look(store, load_outcomes(store, concurrency=4))
        return only(said.gates(Policy(**({"threshold": 0.8, "mix": 0.5, "think_budget": 600} | policy))), "gate")

    assert gates() == [("note", pytest.approx(NAN, nan_ok=True))]
    await audit.collect(questions(40), "base", engine, store, sample=40)
    assert gates() == [("ok", 0.0)]
    assert gates(arm="mtp") == [("ok", 0.0)]  # what was not asked again repeats no better than what was
    assert gates(routes={"dataset=small": Route(0.7)}) == [("ok", 0.0)]
    for no_gate in ({"threshold": 0.0}, {"threshold": 1.1}, {"confidence": "margin"}):
        assert gates(**no_gate) == []

"""Which rows are left out of tuning: by hand, on each side of the split, and from a store through the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from calib.cli import cli
from calib.collect import collect, mark_replaced
from calib.engine.base import AskFailed
from calib.errors import CalibError
from calib.fitness import Repeats, fit_rows, flaws, forced
from calib.optimise import feasible, nearest, optimum, tabulate
from calib.store import Store, load_outcomes
from calib.store.contents import content_key
from calib.target import parse_targets
from tests.misbehaving import questions, truth
from tests.scripted import ScriptedEngine
from tests.worlds import few

NAN = float("nan")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "f.db") as store:
        yield store


def mass(n: int = 10, **rows: tuple[int, ...]) -> np.ndarray:
    """0.9 everywhere but for rows that are low in one column: ``system1``, ``small``, ``largest``."""
    found = np.full((n, 3), 0.9)
    for name, which in rows.items():
        found[list(which), ["system1", "small", "largest"].index(name)] = 0.1
    return found


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_rows_without_a_flaw_all_stay() -> None:
    o = few()
    fit = fit_rows(o, 0.3)
    assert fit.outcomes is o
    assert fit.warnings == ()
    unknown = fit_rows(few(label_mass=np.full((10, 3), NAN)), 0.3)
    assert (unknown.outcomes.n, unknown.warnings) == (10, ())


def test_a_forced_letter_is_no_guide_for_the_search_and_stays_on_the_test_side() -> None:
    # questions 0 to 2 are held out; a cut thought that is closed by force has a low mass by its nature
    fit = fit_rows(few(label_mass=mass(system1=(1, 4), largest=(4, 7), small=(5, 6, 8))), 0.3)
    assert fit.outcomes.ids.tolist() == ["0", "1", "2", "3", "5", "6", "8", "9"]
    (warning,) = fit.warnings
    assert "left out 2 questions where less than 0.5 of the probability lies on the labels" in warning
    assert "--include-failed-audits" in warning


def test_a_system_1_that_is_forced_throughout_is_said_and_not_dropped() -> None:
    low = np.full((10, 3), 0.9)
    low[:5, 0] = [0.001, 0.002, 0.003, 0.6, 0.7]  # the middle one of the first dataset is low
    o = few(label_mass=low, dataset=["low"] * 5 + ["well"] * 5)
    assert forced(o) == {("low", 0): 0.003}
    fit = fit_rows(o, 0.3)
    assert fit.outcomes.n == 10
    (warning,) = fit.warnings
    assert "System 1 is made to give a letter throughout 'low' (median label mass 0.003)" in warning
    assert "No row is left out" in warning


def test_a_broken_budget_counts_as_wrong_on_the_test_side_and_another_model_nowhere() -> None:
    flaw = [""] * 10
    flaw[0] = flaw[5] = "budget"
    flaw[2] = flaw[9] = "replaced"
    fit = fit_rows(few(flaw=flaw), 0.3)
    assert fit.outcomes.ids.tolist() == ["0", "1", "3", "4", "6", "7", "8"]
    assert fit.outcomes.flaw[0] == "budget"
    assert [warning.split(" ")[3] for warning in fit.warnings] == ["2", "1"]
    whole = fit_rows(few(flaw=flaw), 0.0)  # nothing is held out: all is tuned on
    assert whole.outcomes.ids.tolist() == ["1", "3", "4", "6", "7", "8"]


def test_asked_for_all_rows_stay_and_what_is_held_against_them_is_said() -> None:
    o = few(flaw=["budget"] + [""] * 8 + ["replaced"], label_mass=mass(system1=(4,)))
    fit = fit_rows(o, 0.3, everything=True)
    assert fit.outcomes is o
    assert [warning.split(":")[1][:7] for warning in fit.warnings] == [" kept 1"] * 3
    assert {name: int(rows.sum()) for name, rows in flaws(o).items()} == {"replaced": 1, "budget": 1, "label mass": 1}


def test_a_tune_side_without_a_fit_row_is_an_error_that_says_why() -> None:
    with pytest.raises(CalibError, match=r"7 questions whose thought did not keep its budget.*--include-failed-audits"):
        fit_rows(few(flaw=[""] * 3 + ["budget"] * 7), 0.3)


# --- gates ------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.lists(st.integers(-1, 90), min_size=1, max_size=5),
    st.integers(0, 12),
)
def test_a_noisy_gate_is_one_whose_smaller_side_is_mostly_undecided(
    sure: list[int], thresholds: list[int], floor: int
) -> None:
    # forty-fourths and halves of them, so that equal and touching values occur and floats are exact
    at = np.array(thresholds) / 64
    repeats = Repeats(np.sort(np.array(sure) / 32), {"base": floor / 64})
    noisy, undecided = repeats.noisy(at, "base"), repeats.undecided(at, "base")
    for t, is_noise, share in zip(at.tolist(), noisy.tolist(), undecided.tolist(), strict=True):
        near = [abs(c / 32 - t) <= floor / 64 for c in sure] if floor else [False] * len(sure)
        below = [c / 32 < t for c in sure]
        smaller = below if sum(below) * 2 <= len(sure) else [not b for b in below]
        doubtful = sum(n and s for n, s in zip(near, smaller, strict=True))
        assert is_noise == (0 < t <= 1 and 2 * doubtful > sum(smaller))
        assert share == pytest.approx(np.mean(near))


def test_an_arm_that_was_not_asked_again_repeats_no_better_than_the_others() -> None:
    repeats = Repeats(np.array([0.5, 0.9]), {"base": 0.01, "mtp": 0.02})
    assert [repeats.floor(arm) for arm in ("base", "mtp", "other")] == [0.01, 0.02, 0.02]
    unknown = Repeats(np.array([0.5, 0.9]), {})
    assert not unknown.noisy([0.5, 0.9], "base").any()
    assert not Repeats(np.empty(0), {"base": 0.1}).noisy([0.5], "base").any()


def test_the_search_takes_no_noisy_gate() -> None:
    rng = np.random.default_rng(3)
    n = 300
    top = np.sort(rng.choice([0.6, 0.95], n) + rng.uniform(0, 0.01, n))
    right = rng.random(n) < np.where(top > 0.9, 0.97, 0.5)
    p1 = np.column_stack([np.where(right, top, 1 - top), np.where(right, 1 - top, top)])
    o = few(n, p1=p1, p2=np.tile([0.9, 0.1], (n, 2, 1)), tokens=np.tile([50, 200], (n, 1)))
    repeats = Repeats(top, {"base": 0.02})
    limit = parse_targets(["think_rate<30%"])  # fewer than those in doubt: only a gate among equals keeps it
    free, held = (optimum(tabulate(o, repeats=r), limit) for r in (None, repeats))
    assert 0.6 < free.policy.threshold < 0.61
    assert held.policy.threshold == 0.0
    between = optimum(tabulate(o, repeats=repeats), parse_targets(["think_rate<60%"]))
    assert 0.62 < between.policy.threshold < 0.94  # a gate between the two kinds is none among noise
    closest = nearest(tabulate(o, repeats=repeats), parse_targets(["think_rate<30%", "accuracy>=90%"]))
    assert not repeats.noisy(closest.policy.threshold, "base")
    every = list(feasible(tabulate(o, repeats=repeats), ()))
    assert not any(repeats.noisy(policy.threshold, "base") for policy in every)
    assert len(every) < len(list(feasible(tabulate(o), ())))


# --- from a store -----------------------------------------------------------------------------------------------------


def engine(**changes: object) -> ScriptedEngine:
    return ScriptedEngine(
        p1=lambda q: truth(q.question, 4)[0], p2=lambda q, _: truth(q.question, 4)[1], simulated=False, **changes
    )


async def test_a_thought_that_broke_its_budget_is_marked(store: Store) -> None:
    one = engine()

    async def ask(question, budgets, **options):
        if budgets and question.id in ("q3", "q8"):
            raise AskFailed("budget_exceeded", "70 thinking tokens at think_budget 50", stage="system2")
        return await ScriptedEngine.ask(one, question, budgets, **options)

    one.ask = ask  # type: ignore[method-assign]
    await collect(questions(20), {"base": one}, store, budgets=(50,))
    found = load_outcomes(store)
    assert sorted(found.ids[found.flaw == "budget"]) == ["q3", "q8"]
    assert found.failed[found.flaw == "budget"].all()
    # an arm that kept the budget answers for it
    await collect(questions(20), {"mtp": engine()}, store, budgets=(50,))
    assert (load_outcomes(store, arms=["mtp"]).flaw == "budget").sum() == 2
    await collect(questions(20), {"base": engine()}, store, budgets=(50,), retry_failed=True)
    assert (load_outcomes(store).flaw == "").all()


async def test_a_longer_thought_than_its_budget_is_marked(store: Store) -> None:
    await collect(questions(6), {"base": engine()}, store, budgets=(50,))
    with store._writing() as conn:
        one = conn.exec_driver_sql("SELECT n FROM answers ORDER BY n LIMIT 1").scalar_one()
        conn.exec_driver_sql("UPDATE answers SET tokens = ? WHERE n = ?", (np.array([51.0]).tobytes(), one))
    assert (load_outcomes(store).flaw == "budget").sum() == 1


async def test_marks_of_a_replaced_server_belong_to_the_arm(store: Store) -> None:
    asked = questions(10)
    await collect(asked, {"base": engine(), "mtp": engine()}, store, budgets=(50,))
    (model,) = store.models()
    before = content_key(store)
    mark_replaced(store, model.fingerprint, "mtp", asked[:3])
    assert content_key(store) != before
    assert (load_outcomes(store).flaw == "replaced").sum() == 3
    assert (load_outcomes(store, arms=["base"]).flaw == "").all()  # the answers are base's
    mark_replaced(store, model.fingerprint, "mtp", asked[:3])  # marked is marked
    mark_replaced(store, model.fingerprint, "base", asked[5:6])
    assert (load_outcomes(store, arms=["base"]).flaw == "replaced").sum() == 1


# --- calib optimize ---------------------------------------------------------------------------------------------------


def optimize(store: Store, *arguments: str, code: int = 0) -> dict:
    command = ["optimize", "--trials", "0", "--json", "--store", store.location, *arguments]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


async def test_optimize_leaves_failed_rows_out_unless_asked(store: Store) -> None:
    asked = questions(100)
    await collect(asked, {"base": engine()}, store, budgets=(600,))
    (model,) = store.models()
    mark_replaced(store, model.fingerprint, "base", asked[:10])
    found, whole = optimize(store), optimize(store, "--include-failed-audits")
    assert found["tune"]["n"] + found["test"]["n"] == 90
    assert whole["tune"]["n"] + whole["test"]["n"] == 100
    assert any("left out 10 questions that may be another model's" in text for text in found["warnings"])
    assert any("kept 10 questions that may be another model's" in text for text in whole["warnings"])
    status = CliRunner().invoke(cli, ["status", "--json", "--store", store.location])
    (findings,) = json.loads(status.stdout)["audits"].values()
    assert ("refuse", "same server", 10.0) in [(f["level"], f["audit"], f["value"]) for f in findings]


async def test_a_gate_among_what_p1_does_not_repeat_to_is_refused(store: Store) -> None:
    """System 1 is sure of everything, by as much as its noise: sorting its confidences sorts noise."""
    noise = np.random.default_rng(0)

    def p1(question) -> list[float]:
        first = question.answer if int(question.id[1:]) % 4 else (question.answer + 1) % 4
        top = 0.98 + noise.uniform(0, 0.01)
        return [top if i == first else (1 - top) / 3 for i in range(4)]

    def p2(question, _budget: int) -> list[float]:
        return [0.97 if i == question.answer else 0.01 for i in range(4)]

    asked = questions(200)
    one = ScriptedEngine(p1=p1, p2=p2, simulated=False)
    await collect(asked, {"base": one}, store, budgets=(600,), concurrency=8)
    await collect(asked, {"base": one}, store, budgets=(), concurrency=1)  # asked again at another load
    load = ("--concurrency", "8")
    every = optimize(store, *load)  # no gate, no noise
    assert (every["policy"]["threshold"], every["policy"]["think_budget"]) == (1.1, 600)
    gated = ("--target", "think_rate<60%", "--target", "think_rate>20%", *load)
    found = optimize(store, *gated, code=3)
    assert (found["verdict"], found["policy"]) == ("not_met", None)
    assert any(text.startswith("refused: ") and "--include-failed-audits" in text for text in found["warnings"])
    assert found["nearest"]["policy"]["threshold"] in (0.0, 1.1)
    kept = optimize(store, *gated, "--include-failed-audits")
    assert 0.98 < kept["policy"]["threshold"] < 0.99
    assert any("the gate sorts noise" in text for text in kept["warnings"])


async def test_an_arm_with_other_answers_is_left_out_unless_named(store: Store) -> None:
    asked = questions(200)
    wrong = engine()
    wrong.p1 = lambda q: np.roll([0.9, 0.05, 0.03, 0.02], q.answer + 1)
    right = engine()
    right.p1 = lambda q: np.roll([0.9, 0.05, 0.03, 0.02], q.answer)
    await collect(asked, {"base": right, "mtp": wrong}, store, budgets=(600,))
    with store._writing() as conn:  # mtp is quicker, so that it would be chosen
        conn.exec_driver_sql("UPDATE timings SET t1 = 0.001 WHERE arm = 'mtp'")
    quick = ("--minimize", "mean", "--test-share", "0")
    found = optimize(store, *quick)
    assert found["policy"]["arm"] == "base"
    assert any("the arm is left out of tuning" in text for text in found["warnings"])
    assert optimize(store, *quick, "--arm", "mtp")["policy"]["arm"] == "mtp"
    assert optimize(store, *quick, "--include-failed-audits")["policy"]["arm"] == "mtp"

"""Import: real recorded files by their known figures, and every way in which a row can be unfit."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from calib.errors import CalibError
from calib.importer import import_files
from calib.policy import Policy, baselines, evaluate
from calib.store import Store, load_outcomes

NAN = float("nan")


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "s.db") as opened:
        yield opened


@pytest.fixture
def write(tmp_path):
    """Write rows as a JSONL file and return its path."""

    def _write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return _write


def row(i=0, **changes):
    fields = {"dataset": "d", "id": f"q{i}", "answer": 0, "p1": [0.75, 0.25], "p2": [0.5, 0.5], "think_tokens": 100}
    return {key: value for key, value in (fields | changes).items() if value is not ...}


def right(outcomes, policy):
    return round(evaluate(outcomes, policy).accuracy * outcomes.n)


# --- recorded files ---------------------------------------------------------------------------------------------------


def test_gpqa_trajectory(store, shared):
    path = shared / "realdata/unlicensed/gemma4_gpqa_trajectory.jsonl.gz"
    summary = import_files(store, [path], system1_ms="45", tokens_per_second="base=250")
    assert (summary.rows, summary.imported, summary.arms) == (198, 198, ["base"])
    assert summary.budgets == [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert summary.models == ["gemma-4-12B-it:prefix0 -> gemma-4-12B-it:think"]
    o = load_outcomes(store)
    counts = [right(o, Policy(1.1, 1, budget)) for budget in (256, 512, 1024, 2048, 4096)]
    assert counts == [67, 80, 88, 108, 104]
    assert right(o, Policy(0, 1, 256)) == 55
    assert o.estimated.all()
    always = evaluate(o, Policy(1.1, 1, 2048))
    assert always.p90 == pytest.approx(0.045 + 2048 / 250)
    # again: nothing is added, nothing changes
    again = import_files(store, [path], system1_ms="45", tokens_per_second="base=250")
    assert (again.imported, again.new_questions) == (198, 0)
    np.testing.assert_array_equal(load_outcomes(store).p2, o.p2)


def test_two_arms_with_measured_seconds(store, shared):
    for arm in ("base", "draft"):
        summary = import_files(store, [shared / f"reference/h200_{arm}_c128.jsonl.gz"])
        assert (summary.imported, summary.arms, summary.warnings) == (1500, [arm], [])
    o = load_outcomes(store)
    assert (o.arms, o.budgets.tolist(), o.concurrency.tolist()) == (("base", "draft"), [16, 32, 64, 600], [128, 128])
    assert o.estimated.tolist() == [[False, True, True, True, False]] * 2  # the file times the whole thought only
    seconds = {}
    for a, arm in enumerate(o.arms):
        assert o.has_latency(arm)
        with gzip.open(shared / f"reference/h200_{arm}_c128.jsonl.gz", "rt") as stream:
            by_id = {(r["dataset"], r["id"]): r for r in map(json.loads, stream)}
        records = [by_id[key] for key in zip(o.dataset, o.ids, strict=True)]
        np.testing.assert_array_equal(o.t1[a], [r["latency_s1"] for r in records])
        np.testing.assert_array_equal(o.t2[a, :, 3], [r["latency_s2"] for r in records])
        fits = np.array([r["think_tokens"] <= 32 for r in records])
        np.testing.assert_array_equal(o.t2[a, fits, 1], o.t2[a, fits, 3])
        seconds[arm] = [np.median(o.t2[a, :, b]) for b in range(4)]
        assert 0 < seconds[arm][0] < seconds[arm][3]
    scores = {arm: evaluate(o, baselines(o, arm)["always_think"]) for arm in o.arms}
    assert scores["base"].accuracy == scores["draft"].accuracy == pytest.approx(0.93, abs=0.001)
    assert scores["base"].p50 < scores["draft"].p50  # here drafting costs more than it saves


def test_pairs_are_chosen_by_where(store, shared):
    path = shared / "realdata/stated_probs_pairs.jsonl.gz"
    with pytest.raises(CalibError, match=r"the rows differ in s1 \(deepseek-v3, gpt-4o.*--where s1=deepseek-v3"):
        import_files(store, [path])
    assert store.models() == []
    summary = import_files(store, [path], where={"s1": "gpt-4o"})
    assert (summary.rows, summary.imported) == (4702, 4540)
    assert summary.skipped == {"without p1": 18, "without p2": 144}
    import_files(store, [path], where={"s1": "Meta-Llama-3.1-8B-Instruct"})
    with pytest.raises(CalibError, match="several models"):
        load_outcomes(store)
    o = load_outcomes(store, model="gpt-4o -> o3-2025-04-16")
    assert o.n == 4540
    assert any("think tokens unknown for 4540 questions" in warning for warning in o.warnings)


def test_full_vectors_with_words_for_tokens(store, shared):
    path = shared / "realdata/unlicensed/mmlu_direct_cot/llama3.1-8B.jsonl.gz"
    summary = import_files(store, [path], tokens_key="think_words", system1_ms=30, tokens_per_second=100)
    assert summary.imported + sum(summary.skipped.values()) == 14042
    assert summary.budgets == [4096]
    assert "4096 was taken (the smallest power of two that the longest thought, 2,623 tokens" in summary.warnings[0]
    o = load_outcomes(store)
    system1, system2 = (evaluate(o, Policy(t, 1, 4096)).accuracy for t in (0, 1.1))
    assert (system1, system2) == (pytest.approx(0.61, abs=0.01), pytest.approx(0.68, abs=0.01))
    np.testing.assert_allclose(o.t2[0, :, 0], o.tokens[:, 0] / 100)


def test_prompts_and_groups(store, shared):
    path = shared / "realdata/mmlu_llama13b_prompts.jsonl.gz"
    summary = import_files(store, [path], group_key="category")
    assert (summary.imported, summary.budgets) == (2886, [8192])
    assert "no thought's length is known" in summary.warnings[0]
    o = load_outcomes(store)
    assert len(set(o.group)) == 16
    assert right(o, Policy(0, 1, 8192)) / o.n == pytest.approx(0.405, abs=0.001)
    assert right(o, Policy(1.1, 1, 8192)) / o.n == pytest.approx(0.421, abs=0.001)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bbh_codex_direct_cot", "of 5508 rows: 5508 without p1"),
        ("mmlupro_qwen3_modes/Qwen3-8B", "of 12032 rows: 12032 without p1"),
        ("gsm8k_votes_latency", "of 300 rows: 300 open questions have no options"),
    ],
)
def test_files_without_vectors_are_refused(store, shared, name, reason):
    with pytest.raises(CalibError, match=f"no row has vectors to use; {reason}"):
        import_files(store, [shared / f"realdata/{name}.jsonl.gz"])
    assert store.status().questions == {}


# --- rows by hand -----------------------------------------------------------------------------------------------------


def test_a_row_by_hand(store, write):
    path = write(
        row(
            p2=...,
            p2_by_budget={"512": [0.1, 0.9], "64": [0.4, 0.6], "128": None},
            think_tokens=300,
            latency_s1=0.25,
            latency_s2=3.5,
            concurrency=16,
            arm="mtp",
            model="m",
            unknown_field={"is": "ignored"},
        )
    )
    summary = import_files(store, [path])
    assert (summary.budgets, summary.arms, summary.models, summary.warnings) == ([64, 512], ["mtp"], ["m"], [])
    o = load_outcomes(store)
    assert (o.p1.tolist(), o.p2.tolist()) == ([[0.75, 0.25]], [[[0.4, 0.6], [0.1, 0.9]]])
    assert (o.tokens.tolist(), o.finished.tolist()) == ([[64, 300]], [[False, True]])
    assert (o.t1.tolist(), o.concurrency.tolist(), o.arms) == ([[0.25]], [16], ("mtp",))
    np.testing.assert_array_equal(o.t2, [[[NAN, 3.5]]])


@pytest.mark.parametrize(
    ("length", "finished", "expected"),
    [(100, ..., [False, True, True]), (100, False, [False, False, False]), (500, True, [False, False, False])],
)
def test_finished_needs_both_the_flag_and_the_room(store, write, length, finished, expected):
    budgets = {str(b): [0.5, 0.5] for b in (50, 100, 200)}
    import_files(store, [write(row(p2_by_budget=budgets, think_tokens=length, finished=finished, latency_s2=9.0))])
    o = load_outcomes(store)
    assert o.finished[0].tolist() == expected
    assert o.tokens[0].tolist() == [50, min(100, length), min(200, length)]
    assert np.isfinite(o.t2[0, 0]).tolist() == [False, length <= 100, True]


def test_vectors_are_renormalised(store, write):
    import_files(store, [write(row(p1=[0.5, 0.495], p2=[1.01, 0]))])
    o = load_outcomes(store)
    np.testing.assert_allclose(o.p1, [[0.5 / 0.995, 0.495 / 0.995]], rtol=1e-15)
    assert o.p2[0, 0].tolist() == [1, 0]


BAD = {
    "p1 does not sum to 1 within 1 %": {"p1": [0.5, 0.48]},
    "p2 does not sum to 1 within 1 %": {"p2": [0.9, 0.2]},
    "p1 is not finite": {"p1": [NAN, 1.0]},
    "p2 is not finite": {"p2": [float("inf"), 0.0]},
    "p1 is negative": {"p1": [1.25, -0.25]},
    "p1 is not a list of numbers": {"p1": ["0.5", "0.5"]},
    "p1 must have 2 to 255 entries": {"p1": [1.0]},
    "p1 has another length than the options": {"k": 3},
    "p2 has another length than the options": {"p2": [0.2, 0.3, 0.5]},
    "k is not the number of options": {"k": 3, "options": ["x", "y"]},
    "options are not a list of texts": {"options": [1, 2]},
    "answer is not the index of an option": {"answer": 2},
    "think_tokens is out of range": {"think_tokens": -1},
    "latency_s1 is out of range": {"latency_s1": NAN},
    "latency_s2 is out of range": {"latency_s2": "fast"},
    "concurrency is out of range": {"concurrency": 1.5},
    "think_budget is out of range": {"think_budget": 0},
    "finished is neither true nor false": {"finished": "yes"},
    "id must be text or a whole number": {"id": None},
    "unknown kind": {"kind": "essay"},
    "p2_by_budget has a budget that is no number of tokens": {"p2_by_budget": {"many": [0.5, 0.5]}},
    "no think tokens, though other rows have them": {"think_tokens": None},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_refused_counted_and_named(store, write, reason):
    path = write(row(0), row(1, **BAD[reason]))
    summary = import_files(store, [path])
    assert summary.imported == 1
    assert summary.refused == {reason: 1}
    assert summary.examples[0].startswith(f"{path}, line 2, id ")
    assert reason in summary.examples[0]
    assert load_outcomes(store).ids.tolist() == ["q0"]


def test_an_answer_that_is_a_flag_or_a_text_is_refused(store, write):
    summary = import_files(store, [write(row(0), row(1, answer=True), row(2, answer="0"), row(3, answer=None))])
    assert summary.refused == {"answer is not the index of an option": 3}


def test_rows_without_vectors_are_skipped_or_wrong_but_never_made_up(store, write):
    path = write(
        row(0), row(1, p2=None), row(2, p1=None), row(3, kind="open"), row(4, p2=..., p2_by_budget={"128": None})
    )
    summary = import_files(store, [path])
    assert summary.skipped == {"without p2": 2, "without p1": 1, "open questions have no options": 1}
    assert load_outcomes(store).n == 1
    summary = import_files(store, [path], missing_p2="wrong")
    assert (summary.imported, summary.failed, summary.skipped["without p1"]) == (3, 2, 1)
    o = load_outcomes(store)
    assert o.failed[:, 0].tolist() == [False, True, True]
    assert right(o, Policy(1.1, 0, 128)) == 1
    with pytest.raises(CalibError, match="skip or wrong"):
        import_files(store, [path], missing_p2="guess")


def test_nothing_is_kept_of_a_broken_file(store, tmp_path, write):
    good = write(row(0), name="good.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(row(1)) + "\n" + '{"id": "q2", "p1": [0.5\n')
    with pytest.raises(CalibError, match=r"bad\.jsonl, line 2.*broken JSON"):
        import_files(store, [good, bad])
    assert store.status().questions == {}
    import_files(store, [good])
    with pytest.raises(CalibError, match="stored with another answer"):
        import_files(store, [write(row(5), row(0, answer=1), name="changed.jsonl")])
    assert store.status().questions == {"d": 1}


def test_files_are_named_and_of_the_right_kind(store, tmp_path):
    with pytest.raises(CalibError, match="no file was named"):
        import_files(store, [])
    with pytest.raises(CalibError, match="absent.jsonl: no such file"):
        import_files(store, [tmp_path / "absent.jsonl"])
    with pytest.raises(CalibError, match=r"read from JSONL; give a file that ends in \.jsonl"):
        import_files(store, [tmp_path / "x.csv"])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CalibError, match="no rows"):
        import_files(store, [tmp_path / "empty.jsonl"])


# --- which rows, and under which names --------------------------------------------------------------------------------


def test_where_says_what_there_is(store, write):
    path = write(row(0, seed=0, s1="a", s2="b"), row(0, seed=1, s1="a", s2="b"))
    with pytest.raises(CalibError, match=r"already in .*line 1; the rows differ in seed \(0, 1\): .*--where seed=0"):
        import_files(store, [path])
    with pytest.raises(CalibError, match=r"no row has the field 'sed'; there are dataset, id"):
        import_files(store, [path], where={"sed": "0"})
    with pytest.raises(CalibError, match=r"the values of 'seed' are 0, 1"):
        import_files(store, [path], where={"seed": "7"})
    summary = import_files(store, [path], where={"seed": "1"})
    assert (summary.rows, summary.models) == (1, ["a -> b"])
    with pytest.raises(CalibError, match="remove one, or name the arm"):
        import_files(store, [write(row(9), row(9))])


def test_arms_of_one_file_and_the_override(store, write):
    path = write(row(0, arm="base"), row(0, arm="mtp"))
    assert import_files(store, [path]).arms == ["base", "mtp"]
    with pytest.raises(CalibError, match=r"differ in arm \(base, mtp\)"):
        import_files(store, [path], arm="other")
    assert import_files(store, [write(row(0))], arm="eagle").arms == ["eagle"]
    assert load_outcomes(store).arms == ("base", "eagle", "mtp")


def test_names_and_defaults(store, write):
    path = write(row(id=..., question_id=7, dataset=...), row(1, group="story", weight=2), name="set.v1.jsonl")
    import_files(store, [path], model="mine")
    import_files(store, [path], model="mine")
    (model,) = store.models()
    assert model.name == "mine"
    o = load_outcomes(store)
    assert list(zip(o.dataset, o.ids, o.group, o.weight, strict=True)) == [
        ("d", "q1", "story", 2),
        ("set.v1", "7", "set.v1\0007", 1),
    ]
    with pytest.raises(CalibError, match=r"--group story: no row has this field; there are"):
        import_files(store, [path], group_key="story")


def test_texts_make_the_same_question_as_a_question_file_does(store, write):
    texts = {"kind": "choice", "question": "which?", "state": {"a": 1}, "options": ["x", "y"]}
    import_files(store, [write(row(0, **texts), row(1, question="which?"), row(2, options=["x", "y"]))])
    (known,) = store.questions()  # the others lack the options, or the question
    assert (known.id, known.state, known.question, known.options) == ("q0", '{"a":1}', "which?", ("x", "y"))
    assert load_outcomes(store).n == 3


# --- budgets and tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("longest", "budget"), [(0, 1), (1, 1), (2, 2), (64, 64), (65, 128), (100, 128)])
def test_the_budget_of_a_p2_alone(store, write, longest, budget):
    summary = import_files(store, [write(row(0, think_tokens=0), row(1, think_tokens=longest))])
    assert summary.budgets == [budget]
    assert f"{budget} was taken" in summary.warnings[0]
    assert load_outcomes(store).finished.all()


def test_the_budget_of_a_p2_may_be_given(store, write):
    summary = import_files(store, [write(row(0, think_budget=600), row(1, think_budget=600))])
    assert (summary.budgets, summary.warnings) == ([600], [])


def test_unknown_tokens_stay_unknown(store, write):
    path = write(row(0, think_tokens=None, think_words=50), row(1, think_tokens=..., think_words=70))
    summary = import_files(store, [path], system1_ms=45, tokens_per_second=250)
    assert summary.budgets == [8192]
    assert "think tokens unknown" in summary.warnings[1]
    o = load_outcomes(store)
    assert o.tokens.tolist() == [[0], [0]]
    assert np.isnan(o.t2).all()
    assert o.t1.tolist() == [[0.045, 0.045]]
    with pytest.raises(CalibError, match=r"--tokens-key words: no row has a number there; .*think_words"):
        import_files(store, [path], tokens_key="words")


def test_a_named_field_gives_the_tokens(store, write):
    summary = import_files(store, [write(row(0, think_tokens=None, think_words=50))], tokens_key="think_words")
    assert summary.budgets == [64]
    assert load_outcomes(store).tokens.tolist() == [[50]]


# --- rates ------------------------------------------------------------------------------------------------------------


def test_rates_by_arm(store, write):
    path = write(row(0))
    summary = import_files(
        store, [path], system1_ms="base=45,mtp=50", tokens_per_second="base=250,mtp=400", read_ms="45"
    )
    assert summary.arms == ["base", "mtp"]
    o = load_outcomes(store)
    np.testing.assert_allclose(o.t1, [[0.045], [0.05]])
    np.testing.assert_allclose(o.t2[:, 0, 0], [100 / 250 + 0.045, 100 / 400 + 0.045])


@pytest.mark.parametrize(
    ("system1", "speed", "arms"),
    [
        ("45", "250", ["mine"]),  # for the file's arm
        ("45", "base=250,mtp=438", ["mine", "base", "mtp"]),  # for the arms that are named elsewhere
        ("45,base=50", "250", ["mine", "base"]),
        (45.0, {"mtp": 438.0}, ["mine", "mtp"]),
    ],
)
def test_one_number_serves_all_arms(store, write, system1, speed, arms):
    summary = import_files(store, [write(row(0))], arm="mine", system1_ms=system1, tokens_per_second=speed)
    assert sorted(summary.arms) == sorted(arms)
    assert sorted(load_outcomes(store).arms) == sorted(arms)
    assert all(rate["system1_s"] in (0.045, 0.05) for rate in summary.rates.values())


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"system1_ms": "base=45"}, r"arm 'base' has rates, but no --tokens-per-second.*base=NUMBER"),
        ({"tokens_per_second": "base=250"}, "arm 'base' has rates, but no --system1-ms"),
        ({"system1_ms": "45"}, "no --tokens-per-second"),
        ({"read_ms": "45"}, "no --system1-ms"),
        ({"system1_ms": "45", "tokens_per_second": "0"}, "--tokens-per-second of arm 'base' must be above 0"),
        ({"system1_ms": "fast", "tokens_per_second": "250"}, "--system1-ms 'fast'"),
    ],
)
def test_rates_that_are_not_enough(store, write, rates, message):
    with pytest.raises(CalibError, match=message):
        import_files(store, [write(row(0))], **rates)
    assert store.status().questions == {}


def test_the_summary_is_plain(store, write):
    path = write(row(0), row(1, p1=[2, 2]), row(2, p2=None), row(3, kind="open"))
    summary = import_files(store, [path])
    assert json.loads(json.dumps(summary.to_dict())) == summary.to_dict()
    text = "\n".join(summary.lines())
    assert "imported 1 of 4 rows (new questions: 1) of imported: arms base; budgets 128" in text
    assert "skipped 1: without p2" in text
    assert "refused 1: p1 does not sum to 1 within 1 %" in text

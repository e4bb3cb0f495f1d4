"""Published beside simulated: every figure with its tolerance, and the contradictions recomputed by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest

from calib.engine.profiles import PROFILES, load_profile
from calib.errors import CalibError
from calib.policy import Policy, evaluate
from calib.published import Comparison, compare, contradictions, main, render, write_report

ROWS = [(name, seed) for name in PROFILES for seed in (0, 7)]


@pytest.mark.parametrize(("name", "seed"), ROWS)
def test_every_published_figure_is_met_or_its_contradiction_named(name, seed):
    rows = compare(name, seed=seed)
    assert [row for row in rows if row.verdict == "missed"] == []
    named = {row.contradiction for row in rows if row.verdict != "met"}
    if name == "gev-validation":
        assert named == set()  # that table contradicts itself nowhere
    else:
        assert named <= {"A", "B", "E", "G"}
        letters = contradictions(load_profile(name))
        assert named <= set(letters)


@pytest.mark.parametrize("seed", [0, 7])
def test_validation_by_whole_questions(seed):
    # counts worked out by hand from the published percentages of 254 and 300 questions
    expected = {
        "AQuA-RAT": (173, 226, 137, 229),
        "LogiQA": (166, 241, 191, 246),
        "StrategyQA": (204, 236, 213, 237),
        "MedMCQA": (200, 215, 157, 221),
        "OpenBookQA": (283, 289, 44, 287),
        "CommonsenseQA": (260, 255, 96, 250),
    }
    o = load_profile("gev-validation").outcomes([8192], seed=seed)
    total = np.zeros(4, dtype=int)
    for name, counts in expected.items():
        part = o.select([f"{name} (simulated)"])
        system1, adaptive, always = (evaluate(part, Policy(threshold=t)) for t in (0, 0.8, 1.1))
        rates = (system1.accuracy, adaptive.accuracy, adaptive.think_rate, always.accuracy)
        got = tuple(round(part.n * rate) for rate in rates)
        assert got == counts, name
        total += got
    # 73.32, 83.35 and 47.78 %, 83.8 % of 1,754
    assert total.tolist() == [1286, 1462, 838, 1470]


def test_validation_thought_lengths():
    o = load_profile("gev-validation").outcomes([8192, 32768])
    lengths = np.sort(o.tokens[:, 1])
    assert lengths[877 - 1] == 2282  # half of 1,754
    assert lengths[1579 - 1] == 7573  # the first rank that 90 % do not exceed: 1578.6
    assert o.finished[:, 0].sum() == 1607  # 91.6 %


def test_knowledge_request_counts_and_options():
    o = load_profile("gev-knowledge").outcomes([8192])
    assert o.n == 33846
    assert len(o.dataset_names) == 10
    sata = o.select(["SATA-Bench (simulated)"])
    assert (1 / sata.n_options).mean() == pytest.approx(0.013, abs=0.0005)
    assert len(np.unique(sata.n_options)) > 1


def test_gpqa_needs_right_answers_of_cut_thoughts_and_the_others_do_not():
    o = load_profile("gev-knowledge").outcomes([8192], arms=["base"])
    for name in ("GPQA Diamond", "MMLU-Pro", "BBH", "HLE", "ChessBench"):
        part = o.select([f"{name} (simulated)"])
        cut = (part.p1.max(1) < 0.8) & ~part.finished[:, 0]
        before = (part.p1.argmax(1) == part.answer)[cut].sum()
        after = ((0.5 * part.p1 + 0.5 * part.p2[:, 0]).argmax(1) == part.answer)[cut].sum()
        assert (after > before) == (name == "GPQA Diamond"), name


def test_contradictions_hold_the_numbers_worked_out_by_hand():
    text = contradictions(load_profile("gev-knowledge"))
    # B: 63.1 % = (0.869*196 + 0.42*570 + 0.51*5000 + 0.053*2638 + 0.21*1650 + 0.51*752 + 0.876*5000 + 0.879*501
    #    + 0.784*12032 + 0.597*5507) / 33846; without SATA-Bench 21,024, so 0.659*33846 - 21024 = 1280 of 1650
    assert "63.1 %" in text["B"]
    assert "1280 of its 1650" in text["B"]
    # d decisions: (21024 + 0.21 d) / (32196 + d) = 0.51 gives d = 15,347 = 9.3 * 1650
    assert "9.3 of them" in text["B"]
    # C: 170 thoughts, 112 cut, 154 - 84 = 70 more right answers, 70 - 58 = 12
    assert "58 of 170" in text["C"]
    assert "12 cut ones" in text["C"]
    # D: 170/196 and 171/196, 440/501 and 441/501
    for share in ("86.73", "87.24", "87.82", "88.02"):
        assert share in text["D"]
    # F: 0.342 / 0.79
    assert "43 %" in text["F"]
    # G: 0.876 * (0.245 * 2.9 - 0.755 * 0.7)
    assert "+0.16 points" in text["G"]


def row(simulated: float, contradiction: str = "") -> Comparison:
    return Comparison("set", "system1", 68.1, simulated, 0.25, contradiction)


def test_verdicts():
    assert row(68.3).verdict == "met"
    assert row(68.3, "A").verdict == "met"
    assert row(68.4).verdict == "missed"
    assert row(68.4, "A").verdict == "excluded: A"
    assert row(68.4, "G").verdict == "unplaced: G"
    assert row(68.4).difference == pytest.approx(0.3)


def test_a_figure_that_is_off_is_reported_as_missed():
    profile = load_profile("gev-validation")
    off = {**profile.figures, "all": {**profile.figures["all"], "adaptive": 84.35}}
    wrong = type(profile)(profile.name, off)
    missed = [r for r in compare(wrong) if r.verdict == "missed"]
    assert [(r.dataset, r.figure) for r in missed] == [("all", "adaptive")]


def test_the_report_says_simulated_how_it_was_made_and_where_figures_come_from(tmp_path):
    path = tmp_path / "new" / "published.md"
    assert main(["--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    head = text[: text.index("## gev-validation")]
    assert "simulated: no model was run" in head
    assert "python -m calib.published --out reports/published.md" in head
    assert "https://huggingface.co/autotrust/GEV-26B-Decide-NVFP4" in text
    table = re.findall(r"^\| .* \|$", text, flags=re.M)
    rows = sum(len(compare(name)) for name in PROFILES)
    assert len(table) == rows + 2  # and two headers
    assert "missed |" not in text
    assert list(path.parent.iterdir()) == [path]
    assert render() == text


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibError, match="--out"):
        write_report(tmp_path / "file" / "published.md")
    assert main(["--out", str(tmp_path / "file" / "published.md")]) == 1
    assert "cannot write" in capsys.readouterr().err

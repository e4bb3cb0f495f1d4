"""The report opens from a file without a network, answers first, and takes nothing from data as markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from calib import page
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Policy
from calib.questions import Question
from calib.report import MOST_FLIPS, report_html, write_report
from calib.target import parse_targets
from calib.tuning import Demand, tune
from tests.appstore import verification
from tests.worlds import ladder

NAMES = ("<script>alert(1)</script>", 'b "quoted" & <img src=x onerror=alert(2)>', "plain")


def world(n: int = 420, **changes: object) -> Outcomes:
    rng = np.random.default_rng(5)
    o = ladder(8, 2, late1=(0.0, 0.0), late2=0.2, rng=rng).draw(rng, n)
    t2 = o.t2 * np.array([1.0, 0.6])[:, None, None] * rng.uniform(0.5, 2, (2, n, 1))
    changes = {"model": "m <1>", "fingerprint": "f" * 64, "simulated": True} | changes
    names = np.array([NAMES[i % 3] for i in range(n)], object)
    return replace(o, t2=t2, dataset=names, split_position=rng.random(n), **changes)


def asked(o: Outcomes) -> list[Question]:
    """Texts of the questions, as hostile as their names."""
    return [
        Question(
            str(i), str(d), "choice", "</div><script>state()</script>", f"what <b>{i}</b>?", ("<u>", "</script>"), 0
        )
        for d, i in zip(o.dataset, o.ids, strict=True)
    ]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return world()


@pytest.fixture(scope="module")
def document(outcomes) -> dict:
    demand = Demand(parse_targets(["p90<1s", "think_rate<90%"]), resamples=200)
    return json.loads(json.dumps(tune(outcomes, demand).to_dict("best <i>")))


@pytest.fixture(scope="module")
def text(document, outcomes) -> str:
    return report_html(document, outcomes, questions=asked(outcomes), store="runs 1.db")


class Reader(HTMLParser):
    """What a browser would make of the page: elements, attributes, visible text, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.inside.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag  # everything is closed, in order

    def handle_data(self, data):
        if self.inside and self.inside[-1] == "script":
            self.scripts[-1] += data
        elif self.inside and self.inside[-1] != "style":
            self.texts.append(data)

    @property
    def visible(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def read(text) -> Reader:
    return Reader(text)


def test_nothing_is_loaded_from_anywhere(read, text):
    loading = {"src", "srcset", "data", "poster", "background", "action", "ping"}
    for tag, attributes in read.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"), tag
        assert not loading & set(attributes), (tag, attributes)
        assert attributes.get("href", "#").startswith("#")
        assert "url(" not in (attributes.get("style") or "")
    assert not re.search(r"@import|url\(", text[: text.index("</style>")])
    policy = next(a["content"] for t, a in read.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_plotly_is_inside_once_and_the_size_is_sensible(text, read):
    assert sum("plotly.js v" in script for script in read.scripts) == 1
    assert 4e6 < len(text.encode()) < 8e6


def test_no_text_from_data_is_markup(read, text):
    figures = [a for t, a in read.elements if t == "script" and a.get("type") == "application/json"]
    assert sum(t == "script" for t, _ in read.elements) == len(figures) + 2  # the figures, Plotly, the page's own
    assert not any(t in ("i", "u", "b") for t, _ in read.elements)
    assert "state()" not in " ".join(read.scripts)
    assert not any(name.startswith("on") for _, attributes in read.elements for name in attributes)
    for shown in (*NAMES, "best <i>", "m <1>", "</div><script>state()</script>", "<u>"):
        assert shown in read.visible, shown
    for script, (_, attributes) in zip(read.scripts, [e for e in read.elements if e[0] == "script"], strict=True):
        if attributes.get("type") == "application/json":
            assert {"data", "layout"} <= set(json.loads(script))


def test_the_three_answers_come_first(read, document):
    visible = read.visible
    order = [visible.index(question) for question in ("Did tuning help?", "Which policy?", "How far to trust it?")]
    assert order == sorted(order)
    assert order[-1] < visible.index("on held-out questions interval")
    assert document["baselines"]["default"]["difference"]["sentence"] in visible
    policy = document["policy"]
    assert f"confidence {policy['threshold']:.4g}" in visible
    assert document["certificate"]["statement"] in visible
    for target in document["targets"]:
        assert target["target"] in visible
        assert target["reason"] in visible


def test_p99_is_beside_p90_and_marks_are_in_the_head(read):
    assert "p90 p99 tuned is better by" in read.visible
    assert read.visible.index("Simulated: no real model answered") < read.visible.index("Did tuning help?")


def test_what_to_type_is_quoted_for_a_shell(read):
    assert "calib export 'best <i>' --out serve/ --held-by gateway --store 'runs 1.db'" in read.visible
    assert "calib serve --policy serve/policy.json" in read.visible


def test_flipped_questions_have_text_only_where_it_may_be(document, outcomes, read, tmp_path):
    said = re.search(r"([\d,]+) won, ([\d,]+) lost", read.visible[read.visible.index("Of ") :])
    assert said
    shown = [attributes for tag, attributes in read.elements if tag == "details"]
    assert 0 < len(shown) <= MOST_FLIPS
    assert "what <b>" in read.visible
    path = write_report(document, outcomes, tmp_path / "r.html", questions=asked(outcomes), keep_text=False)
    without = Reader(path.read_text())
    assert "what <b>" not in without.visible
    assert "state()" not in without.visible
    assert sum(tag == "details" for tag, _ in without.elements) == len(shown)
    assert "option 0" in without.visible


def test_both_won_and_lost_questions_are_shown(outcomes, document):
    # always thinking against never thinking: more than a report shows on either side
    changed = dict(document, policy=Policy(1.1, 1.0, 200, "arm0").to_dict())
    changed["baselines"] = {"default": {"policy": Policy(0.0, 1.0, 200, "arm0").to_dict()}}
    many = replace(outcomes.take(np.tile(np.arange(420), 6)), ids=[str(i) for i in range(2520)])
    changed["split"] = {"test_share": 0.3}
    found = Reader(report_html(changed, many))
    kinds = [a["class"] for t, a in found.elements if t == "span" and (a.get("class") or "").startswith("badge")]
    details = sum(t == "details" for t, _ in found.elements)
    assert details == MOST_FLIPS
    assert kinds.count("badge bad") >= MOST_FLIPS // 2


def test_no_policy_says_what_would_have_to_give_way(outcomes):
    found = tune(outcomes, Demand(parse_targets(["p90<500ms", "accuracy>=99.9%"]), resamples=200))
    assert found.policy is None
    visible = Reader(report_html(found.to_dict(), outcomes)).visible
    assert "No policy meets the targets" in visible
    assert "would have to be" in visible
    assert "not met" in visible
    assert "calib optimize --target" in visible
    assert "calib serve" not in visible


def test_without_held_out_questions_it_says_optimistic(outcomes):
    found = tune(outcomes, Demand(parse_targets(["p90<1s"]), test_share=0, resamples=200)).to_dict()
    visible = Reader(report_html(found, outcomes)).visible
    assert "on the questions that it was tuned on: optimistic" in visible
    assert "420 questions to tune, 0 held out" in visible


def test_one_arm_one_budget_one_dataset_no_seconds():
    rng = np.random.default_rng(1)
    o = ladder(5).draw(rng, 80)
    o = replace(o, t1=np.full((1, 80), np.nan), t2=np.full((1, 80, 1), np.nan), split_position=rng.random(80))
    found = tune(o, Demand(resamples=200)).to_dict()
    visible = Reader(report_html(found, o)).visible
    assert "Without seconds there is no front" in visible
    assert "No target was asked for" in visible


def test_many_datasets_are_drawn_together():
    rng = np.random.default_rng(2)
    o = ladder(6).draw(rng, 600)
    o = replace(o, dataset=[f"d{i % 60}" for i in range(600)], split_position=rng.random(600))
    text = report_html(tune(o, Demand(parse_targets(["p90<1s"]), resamples=200)).to_dict(), o)
    assert len(text) < 8e6
    assert "d59" in Reader(text).visible


def test_estimated_latency_is_said():
    o = world(simulated=False, estimated=np.ones((2, 3), bool))
    found = tune(o, Demand(parse_targets(["p90<1s"]), resamples=200)).to_dict()
    visible = Reader(report_html(found, o)).visible
    assert "Estimated latency: seconds come from rates" in visible
    assert "Simulated" not in visible


def test_a_store_that_has_grown_is_said(document, outcomes):
    visible = Reader(report_html(document, world(450))).visible
    assert "was tuned and tested on 420 questions" in visible
    assert "tuned and tested on" not in Reader(report_html(document, outcomes)).visible


def test_outcomes_of_another_model_are_refused(document, outcomes):
    with pytest.raises(CalibError, match="was tuned on another model"):
        report_html(document, replace(outcomes, fingerprint="0" * 64))


def test_the_file_is_whole_or_not_there(document, outcomes, tmp_path, monkeypatch):
    path = tmp_path / "new" / "report.html"
    assert write_report(document, outcomes, path) == path
    assert path.read_text().endswith("</html>\n")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibError, match="cannot be made"):
        write_report(document, outcomes, tmp_path / "file" / "r.html")
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CalibError, match="No space left"):
        write_report(document, outcomes, path)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_text_is_escaped_unless_it_is_html():
    assert page.escaped("<a>") == "&lt;a&gt;"
    assert page.escaped(page.Html("<a>")) == "<a>"
    assert page.joined(["<", page.Html("<b>")], " ") == "&lt; <b>"
    assert "&lt;x&gt;" in page.table(["<x>"], [["'"]])
    assert page.bullets([]) == ""


def test_a_browser_draws_it_from_the_file(browser, document, outcomes, tmp_path):
    path = write_report(document, outcomes, tmp_path / "report.html", questions=asked(outcomes))
    expected = Path(path).read_text().count('type="application/json"')
    assert expected > 8
    page, complaints, asked_for = browser.new_page(), [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda request: asked_for.append(request.url))
    page.goto(path.as_uri())
    figures = page.locator(".figure")
    assert figures.count() == expected
    for k in range(expected):  # each is drawn when a reader comes to it
        figures.nth(k).scroll_into_view_if_needed()
        figures.nth(k).locator(".main-svg").first.wait_for()
    page.close()
    assert complaints == []  # neither an error nor a request that the page's own rules refused
    assert asked_for == [path.as_uri()]


def test_runs_of_verify_under_this_very_policy_stand_beside_the_prediction(document, outcomes):
    run = verification(document)
    other = verification({"policy": document["policy"] | {"threshold": 0.123}}, url="http://elsewhere:1")
    found = Reader(report_html(document, outcomes, verifications=[run, other]))
    said = found.visible
    assert "Predicted beside measured" in said
    for text in ("4.50 s [4.00 s, 5.00 s]", "11.20 s [10.00 s, 12.00 s]", "slower than predicted by 149 %"):
        assert text in said
    assert "2026-02-03 04:05 UTC, 142 held-out questions at http://127.0.0.1:8080, 2 requests/s" in said
    assert "not certified: p90<10s is missed <b>" in said  # as text, not as markup
    assert "http://elsewhere:1" not in said
    assert ("a", {"href": "#verified"}) in found.elements
    assert "Predicted beside measured" not in Reader(report_html(document, outcomes, verifications=[other])).visible

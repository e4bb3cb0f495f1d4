"""Every page of the dashboard on ordinary and odd stores, by Streamlit's own test driver."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from calib import workspace
from calib.dashboard import Settings, is_loopback, run_app
from calib.engine.base import Answer, EngineInfo
from calib.errors import CalibError
from calib.export import export
from calib.history import ConfigFolder
from calib.policy import Policy, evaluate
from calib.policyfile import load_policy_file
from calib.questions import Question
from calib.resources import find
from calib.show import percent
from calib.store import Answered, Store, load_outcomes
from calib.tuning import split_identity
from calib.view import GROUPS
from tests.appstore import made_up_store, newer, simulated_store, verification

PAGES = ("overview", "explore", "frontier", "questions", "studies", "writeback")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return simulated_store(tmp_path_factory.mktemp("app") / "demo.db", trials=8)


@pytest.fixture
def store(prepared, tmp_path) -> Path:
    for path in prepared.parent.glob("demo.db*"):
        shutil.copy(path, tmp_path / path.name)
    return tmp_path / "demo.db"


@pytest.fixture
def open_app(monkeypatch):
    """Open a page of a store; every exception of a page fails the test."""

    def start(store: Path | str, page: str = "overview", query: dict | None = None, **settings) -> AppTest:
        for name, value in Settings(str(store), **settings).to_environment().items():
            monkeypatch.setenv(name, value)
        app = AppTest.from_file(find("app/streamlit_app.py"), default_timeout=60)
        for name, value in (query or {}).items():
            app.query_params[name] = value
        run(app)
        return go(app, page)

    return start


def run(app: AppTest) -> AppTest:
    app.run()
    assert [(e.message, e.stack_trace) for e in app.exception] == []
    return app


def go(app: AppTest, page: str) -> AppTest:
    app.switch_page(f"views/{page}.py")
    return run(app)


def figures(app: AppTest) -> list[dict]:
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]


def said(app: AppTest, *kinds: str) -> str:
    """What a reader sees, without the backslashes that keep data from being Markdown."""
    kinds = kinds or ("title", "markdown", "caption", "info", "warning", "error", "success", "text")
    text = "\n".join(str(element.value) for kind in kinds for element in getattr(app, kind))
    return re.sub(r"\\([^\w\s])", r"\1", text)


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


# --- ordinary ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_page_draws_and_says_that_it_is_simulated(store, open_app, page, tmp_path):
    app = open_app(store, page, config_dir=str(tmp_path / "serve"))
    assert [error.value for error in app.error] == []
    assert ":orange-badge[simulated]" in said(app)
    if page != "writeback":
        assert figures(app) or page == "questions"
    for figure in figures(app):
        texts = [note.get("text", "") for note in figure["layout"].get("annotations", ())]
        assert any("simulated" in text for text in texts)


def test_p99_stands_beside_p90(store, open_app):
    app = open_app(store, "explore", {"show": "latency"})
    assert {"p90", "p99"} <= metrics(app).keys()
    titles = [figure["layout"]["title"]["text"] for figure in figures(app)]
    assert any(t.startswith("p90") for t in titles)
    assert any(t.startswith("p99") for t in titles)


def test_the_first_answers_are_those_of_the_saved_policy(store, open_app):
    app = open_app(store)
    with Store.open(store) as opened:
        document = opened.policy("best")
    assert "What does it gain?" in said(app)
    assert metrics(app)["Accuracy on held-out questions"] == f"{100 * document['test']['accuracy']['value']:.1f} %"
    assert document["certificate"]["statement"] in said(app)


@pytest.mark.parametrize(("group", "shown"), [("threshold", ("accuracy", "think_rate")), ("latency", ("p90", "p99"))])
def test_a_slider_moves_the_mark_in_every_figure_to_the_exact_value(store, open_app, group, shown):
    app = open_app(store, "explore", {"show": group})
    app.slider(key="w_t").set_value(0.55)
    run(app)
    view = app.session_state["view"]
    tune = load_outcomes(store).split(workspace.TEST_SHARE)[0]
    score = evaluate(tune, Policy(0.55, view.mix, view.think_budget, view.arm))
    assert metrics(app)["Accuracy"] == f"{100 * score.accuracy:.1f} %"
    marks = [next(t for t in figure["data"] if t.get("name") == "current") for figure in figures(app)]
    for mark, metric in zip(marks, shown, strict=True):
        assert mark["x"][0] == pytest.approx(0.55)
        assert mark["y"][0] == pytest.approx(getattr(score, metric))


def test_moving_a_slider_forgets_the_name_of_the_policy_but_not_its_other_knobs(store, open_app):
    app = open_app(store, "explore")
    before = app.session_state["view"]
    assert before.name == "best"
    app.slider(key="w_m").set_value(0.25)
    run(app)
    after = app.session_state["view"]
    assert (after.name, after.mix) == ("", 0.25)
    assert after.threshold == before.threshold  # exactly, though the slider shows three digits
    app.selectbox(key="w_name").set_value("best")
    run(app)
    assert app.session_state["view"] == before


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_of_figures_has_units_on_both_axes(store, open_app, group):
    app = open_app(store, "explore", {"show": group})
    drawn = figures(app)
    assert len(drawn) >= 2
    for figure in drawn:
        for side in ("xaxis", "yaxis"):
            assert any(axis["title"]["text"] for name, axis in figure["layout"].items() if name.startswith(side))


def test_a_dataset_has_the_same_colour_whatever_is_chosen(store, open_app):
    def colours(app: AppTest) -> dict[str, str]:
        lines = [
            t for t in figures(app)[0]["data"] if t.get("mode") == "lines" and t.get("line", {}).get("width", 0) > 0
        ]
        return {t["name"]: t["line"]["color"] for t in lines}

    app = open_app(store, "explore")
    every = colours(app)
    last = load_outcomes(store).dataset_names[-1]
    app.multiselect(key="w_sets").set_value([last])
    run(app)
    assert colours(app)[last] == every[last]


def test_moved_knobs_keep_the_calibration_of_the_saved_policy_until_it_is_left_out(store, open_app):
    with Store.open(store) as opened:
        document = opened.policy("best")
        special = {"temperatures": {"p1": {"*": 1.5}}, "confidence": "margin"}
        opened.save_policy("best", document | {"policy": document["policy"] | special})
    app = open_app(store, "explore")
    app.slider(key="w_m").set_value(0.25)
    run(app)
    assert "As in best: calibrated probabilities, confidence margin" in said(app)
    outcomes = load_outcomes(store)
    policy = Policy.from_dict(document["policy"] | special | {"mix": 0.25})
    tune, _ = outcomes.split(workspace.TEST_SHARE)
    assert metrics(app)["Accuracy"] == percent(evaluate(tune, policy).accuracy)
    app.button(key="drop-rule").click()
    run(app)
    plain = Policy.from_dict(document["policy"] | {"mix": 0.25})
    assert metrics(app)["Accuracy"] == percent(evaluate(tune, plain).accuracy)
    assert "As in best" not in said(app)


# --- the URL ----------------------------------------------------------------------------------------------------------


def test_a_link_reopens_the_same_view(store, open_app):
    app = open_app(store, "frontier")
    name = load_outcomes(store).dataset_names[1]
    app.slider(key="w_t").set_value(0.4)
    app.segmented_control(key="w_arm").set_value("base")
    run(app)
    app.multiselect(key="w_sets").set_value([name])
    app.text_input(key="w_limits").set_value("p90<12s, accuracy>=50%")
    run(app)
    view = app.session_state["view"]
    assert view.datasets == (name,)
    again = open_app(store, "frontier", dict(app.query_params))
    assert again.session_state["view"] == view
    assert dict(again.query_params) == dict(app.query_params)


def test_the_url_survives_a_change_of_page(store, open_app):
    app = open_app(store, "explore")
    app.slider(key="w_t").set_value(0.4)
    run(app)
    go(app, "questions")
    assert app.query_params["t"] in ("0.4", ["0.4"])


def test_a_link_that_asks_for_what_is_not_there_says_so(store, open_app):
    app = open_app(store, "overview", {"b": "300", "arm": "gone", "t": "0.4"})
    app2 = AppTest.from_file(find("app/streamlit_app.py"), default_timeout=60)
    app2.query_params["b"] = "300"
    run(app2)
    assert "b=300" in said(app2, "warning")
    assert app.session_state["view"].threshold == 0.4


def test_limits_that_cannot_be_read_are_explained_and_break_nothing(store, open_app):
    app = open_app(store, "frontier")
    app.text_input(key="w_limits").set_value("p90<10")
    run(app)
    assert "p90<10s" in said(app, "error")
    app.text_input(key="w_limits").set_value("p90[nowhere]<10s")
    run(app)
    assert "nowhere" in said(app, "error")
    app.text_input(key="w_limits").set_value("p90<1ms")
    run(app)
    assert "No policy keeps all limits" in said(app, "warning")


def test_traffic_weighs_and_its_mistakes_are_explained(store, open_app):
    names = load_outcomes(store).dataset_names
    app = open_app(store, "explore")
    plain = metrics(app)["Accuracy"]
    app.text_input(key="w_traffic").set_value(f"{names[0]}=1")
    run(app)
    assert metrics(app)["Accuracy"] != plain
    app.text_input(key="w_traffic").set_value("nonsense")
    run(app)
    assert "NAME=NUMBER" in said(app, "error")
    assert metrics(app)["Accuracy"] == plain


# --- questions, studies -----------------------------------------------------------------------------------------------


def test_questions_are_filtered_and_searched(store, open_app):
    app = open_app(store, "questions")
    frame = app.dataframe[0].value
    assert set(frame["change"]) <= {"won", "lost", "other answer", "thinking only"}
    assert frame["question"].str.len().min() > 0
    app.text_input(key="flip-search").set_value(str(frame["id"].iloc[0]))
    run(app)
    assert app.dataframe[0].value["id"].tolist() == [frame["id"].iloc[0]]
    app.selectbox(key="w_rival").set_value("best")
    run(app)
    assert "treat every tune question alike" in said(app, "info")


def test_the_study_is_beside_the_exact_optimum(store, open_app):
    app = open_app(store, "studies")
    shown = metrics(app)
    assert shown["Trials"] == "8"
    assert float(shown["Gap to exact"]) >= 0
    assert len(app.dataframe[0].value) == 8


# --- certifying, writing, going back ----------------------------------------------------------------------------------


def test_the_test_questions_are_looked_at_when_certify_is_pressed_and_not_before(store, open_app, tmp_path):
    outcomes = load_outcomes(store)
    with Store.open(store) as opened:
        before = opened.looks(split_identity(outcomes))
    app = open_app(store, "writeback", {"t": "0.3", "m": "0.5", "b": "512", "arm": "mtp", "limits": "p90<20s"})
    for page in PAGES:
        go(app, page)
    with Store.open(store) as opened:
        assert opened.looks(split_identity(outcomes)) == before
    assert f"looked at {before} times" in said(app)
    app.button(key="certify").click()
    run(app)
    with Store.open(store) as opened:
        assert opened.looks(split_identity(outcomes)) == before + 1
    assert ":green-badge[certified]" in said(app)
    assert "held-out questions: accuracy" in said(app)
    app.slider(key="w_t").set_value(0.31)
    run(app)
    assert f"looked at {before + 1} times" in said(app)


def test_writing_needs_every_tick_and_a_reason_and_can_be_taken_back(store, open_app, tmp_path):
    root = tmp_path / "serve"
    app = open_app(store, "writeback", config_dir=str(root))
    assert app.button(key="write").disabled
    for box in app.checkbox:
        box.check()
    run(app)
    assert app.button(key="write").disabled
    app.text_input(key="w_note").set_value("agreed")
    run(app)
    assert not root.exists()
    app.button(key="write").click()
    run(app)
    view = app.session_state["view"]
    with Store.open(store) as opened:
        assert load_policy_file(root / "policy.json") == Policy.from_dict(opened.policy(view.name)["policy"])
    assert "Wrote policy.json" in said(app, "toast")
    assert app.button(key="write").disabled  # ticks hold for one write
    first = ConfigFolder(root).files()

    app.slider(key="w_t").set_value(0.2)
    app.radio(key="w_holder").set_value("gateway")
    run(app)
    for box in app.checkbox:
        box.check()
    app.text_input(key="w_note").set_value("try less thinking")
    run(app)
    app.button(key="write").click()
    run(app)
    assert load_policy_file(root / "policy.json").threshold == 0.2
    written = json.loads((root / "policy.json").read_text())
    assert (written["verdict"], written["marks"]) == ("met", ["simulated"])
    assert {knob["knob"]: knob["holder"] for knob in written["knobs"]}["think_budget"] == "gateway"

    app.button(key="back-1").click()
    run(app)
    assert ConfigFolder(root).files() == first
    assert [entry.action for entry in ConfigFolder(root).entries()] == ["roll back", "write", "write"]
    assert "try less thinking" in said(app)


def test_uncertified_and_simulated_policies_must_be_ticked(store, open_app, tmp_path):
    app = open_app(store, "writeback", {"t": "0.2"}, config_dir=str(tmp_path / "serve"))
    keys = {box.key for box in app.checkbox}
    assert keys == {"tick-uncertified", "tick-simulated", "tick-unheld-think_budget"}
    app.radio(key="w_holder").set_value("client")
    run(app)
    assert "tick-unheld-think_budget" not in {box.key for box in app.checkbox}


def test_the_folder_field_does_not_lead_out(store, open_app, tmp_path):
    app = open_app(store, "writeback", config_dir=str(tmp_path / "serve"))
    app.text_input(key="w_folder").set_value("../outside")
    run(app)
    assert "is not below" in said(app, "error")
    assert "write" not in {button.key for button in app.button}


def test_read_only_hides_all_that_writes(store, open_app, tmp_path):
    root = tmp_path / "serve"
    export(_document(store), root, note="before", allow_simulated=True)
    before = sorted(p.name for p in root.rglob("*"))
    app = open_app(store, "writeback", {"t": "0.2", "limits": "p90<20s"}, config_dir=str(root), read_only=True)
    assert not {button.key for button in app.button} & {"write", "certify", "back-1"}
    assert not app.checkbox
    assert "--read-only" in said(app)
    assert "before" in said(app)  # the history is there to read
    for page in PAGES:
        go(app, page)
    assert sorted(p.name for p in root.rglob("*")) == before


def test_without_a_config_folder_the_page_says_how_to_name_one(store, open_app):
    app = open_app(store, "writeback")
    assert "--config-dir" in said(app, "code")


def _document(store: Path) -> dict:
    with Store.open(store) as opened:
        return opened.policy("best")


# --- odd stores -------------------------------------------------------------------------------------------------------

ODD = {
    "one arm": {"arms": ("base",)},
    "one budget": {"budgets": (400,)},
    "one dataset": {"datasets": 1},
    "no latency": {"seconds": False},
    "200 datasets": {"datasets": 200, "n": 400},
    "three questions": {"n": 3},
    "names that could be markup": {"name": "<b>*{:03d}*</b> $x$ _[a](b)_ :red[x]"},
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_stores_give_a_page_on_every_page(open_app, tmp_path, odd):
    path = made_up_store(tmp_path / "odd.db", **ODD[odd])
    app = open_app(path, config_dir=str(tmp_path / "serve"))
    for page in PAGES:
        go(app, page)
        assert [error.value for error in app.error] == []
        assert app.title
    go(app, "explore")
    for group in GROUPS[1:]:
        app.segmented_control(key="w_group").set_value(group)
        run(app)
        assert figures(app) or (odd == "no latency" and group in ("latency", "spread"))


def test_without_seconds_the_page_says_where_to_get_them(open_app, tmp_path):
    path = made_up_store(tmp_path / "odd.db", seconds=False)
    app = open_app(path, "explore", {"limits": "p90<10s"})
    assert "calib collect" in said(app)
    assert metrics(app)["p90"] == "-"


def test_no_store_an_empty_one_and_a_newer_one_give_a_helpful_page(open_app, tmp_path):
    app = open_app(tmp_path / "absent.db")
    assert "no store there" in said(app)
    with Store.open(tmp_path / "empty.db"):
        pass
    app = open_app(tmp_path / "empty.db")
    assert "holds no answers yet" in said(app)
    app = open_app(newer(tmp_path / "newer.db"))
    assert "pip install --upgrade" in said(app)
    (tmp_path / "text.db").write_text("not a database, only a text that somebody wrote")
    app = open_app(tmp_path / "text.db")
    assert "not a store of calib" in said(app)


def test_an_empty_store_that_was_filled_is_shown_when_asked_again(open_app, tmp_path):
    path = tmp_path / "a.db"
    with Store.open(path):
        pass
    app = open_app(path)
    made_up_store(path)
    app.button[0].click()
    run(app)
    assert metrics(app)["Questions"] == "60"


def test_a_store_that_is_being_filled_shows_live_counts_and_keeps_its_figures(open_app, tmp_path):
    path = made_up_store(tmp_path / "a.db", n=40)
    app = open_app(path)
    made_up_store(path, n=60)
    run(app)
    assert metrics(app)["Questions"] == "60"
    assert metrics(app)["Answers of base"] == "60"
    assert "+40 answers" in said(app, "info")
    assert app.session_state["bench"].outcomes.n == 40
    app.button[-1].click()
    run(app)
    run(app)
    assert app.session_state["bench"].outcomes.n == 60


def test_several_models_are_chosen_from(open_app, tmp_path):
    path = made_up_store(tmp_path / "a.db")
    with Store.open(path) as store:
        other = store.register_model(EngineInfo("second model", {"model": "second"}, 0.6, 0.5))
        question = Question("0", "set 000", "choice", "", "", ("",) * 4, 0)
        answer = Answer([0.4, 0.2, 0.2, 0.2], 0.1, (400,), [[0.4, 0.2, 0.2, 0.2]], [100], [True], [1.0])
        store.write(other, [Answered(question, "base", answer, 4)])
    app = open_app(path)
    assert len(app.selectbox(key="w_model").options) == 2
    app.selectbox(key="w_model").set_value(other)
    run(app)
    assert app.session_state["bench"].outcomes.model == "second model"
    for page in PAGES:
        go(app, page)
    again = open_app(path, "explore", {"model": other})
    assert again.session_state["bench"].outcomes.model == "second model"


def test_several_loads_are_chosen_from(open_app, tmp_path):
    path = made_up_store(tmp_path / "a.db", arms=("base",))
    with Store.open(path) as store:
        (model,) = store.models()
        question = Question("0", "set 000", "choice", "", "", ("",) * 4, 0)
        answer = Answer(
            [0.4, 0.2, 0.2, 0.2], 0.1, (100, 400), [[0.4, 0.2, 0.2, 0.2]] * 2, [100, 100], [True] * 2, [1.0] * 2
        )
        store.write(model.fingerprint, [Answered(question, "base", answer, 16)], timings_only=True)
    app = open_app(path, "explore", {"load": "4"})
    assert app.selectbox(key="w_load").value == 4
    assert app.session_state["bench"].outcomes.concurrency.tolist() == [4]


# --- predicted beside measured ----------------------------------------------------------------------------------------


def test_the_last_run_of_verify_under_this_policy_is_shown(store, open_app):
    with Store.open(store) as opened:
        document = opened.policy("best")
        opened.add_verification(verification(document, at="2026-01-01T00:00:00.000+00:00"))
        opened.add_verification(verification(document))
        opened.add_verification(
            verification({"policy": document["policy"] | {"threshold": 0.123}}, url="http://other:1")
        )
    app = open_app(store)
    text = said(app)
    assert "Predicted beside measured" in [header.value for header in app.subheader]
    assert (
        ":red-badge[missed] 2026-02-03 04:05 UTC, 142 held-out questions, 2 requests/s, at `http://127.0.0.1:8080`"
        in text
    )
    assert "not certified: p90<10s is missed" in text
    assert "The last of 2 runs of calib verify under this policy." in text
    (shown,) = (frame.value for frame in app.dataframe if "verdict" in frame.value.columns)
    assert shown["measured [interval]"].tolist() == ["80.0 % [70.0 %, 90.0 %]", "11.20 s [10.00 s, 12.00 s]"]


def test_without_a_run_nothing_stands_beside_the_prediction(store, open_app):
    app = open_app(store)
    assert "Predicted beside measured" not in [header.value for header in app.subheader]


def _as_version(path: Path, version: int) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE verifications")
        if version < 3:
            connection.execute("ALTER TABLE models DROP COLUMN thinks_about_scores")
        connection.execute("UPDATE calib_schema SET version = ?", (version,))
    connection.close()  # the last one that closes writes the journal into the file


def _version(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        (found,) = connection.execute("SELECT version FROM calib_schema").fetchone()
    connection.close()
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_read_only_dashboard_leaves_an_older_store_as_it_is(store, open_app, page):
    _as_version(store, 3)
    before = store.read_bytes()
    app = open_app(store, page, read_only=True)
    assert [error.value for error in app.error] == []
    assert store.read_bytes() == before
    assert _version(store) == 3


def test_a_store_too_old_to_be_read_as_it_is_says_what_to_type(store, open_app):
    _as_version(store, 2)
    app = open_app(store, read_only=True)
    assert "calib status --store" in said(app)
    assert not app.metric
    assert _version(store) == 2
    workspace.snapshot(str(store))  # a dashboard that may write brings it up to date
    assert _version(store) == 4


# --- who may come in --------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_and_nothing_is_shown_without(store, open_app, monkeypatch):
    monkeypatch.setenv("THE_KEY", "open sesame")
    app = open_app(store, token_env="THE_KEY")
    assert not app.metric
    assert not app.sidebar.slider
    app.text_input(key="token").set_value("wrong")
    run(app)
    assert "not the token" in said(app)
    assert not app.metric
    app.text_input(key="token").set_value("open sesame")
    run(app)
    assert metrics(app)["Questions"]
    assert "open sesame" not in json.dumps(dict(app.query_params))


def test_an_empty_token_admits_nobody(store, open_app, monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    app = open_app(store, token_env="THE_KEY")
    app.text_input(key="token").set_value("")
    run(app)
    assert not app.metric


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.org", "::"])
def test_off_loopback_a_token_is_needed(host, tmp_path):
    assert not is_loopback(host)
    with pytest.raises(CalibError, match="--token-env"):
        run_app(str(tmp_path / "a.db"), host=host)


def test_a_variable_that_is_empty_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_KEY", "")
    with pytest.raises(CalibError, match="THE_KEY: this variable is empty"):
        run_app(str(tmp_path / "a.db"), token_env="THE_KEY")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host):
    assert is_loopback(host)


def test_settings_travel_by_the_environment_without_the_token(monkeypatch):
    monkeypatch.setenv("THE_KEY", "open sesame")
    settings = Settings("s.db", "serve", True, "THE_KEY")
    environment = settings.to_environment()
    assert Settings.from_environment(environment) == settings
    assert "open sesame" not in environment.values()
    assert Settings.from_environment({}) == Settings("calib.db")
    assert Settings.from_environment({"CALIB_STORE": "x.db"}) == Settings("x.db")

"""`calib export`, `diff` and `rollback` as a user types them: output, JSON, exit codes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from calib.cli import cli
from calib.history import ConfigFolder
from calib.policy import Policy
from calib.policyfile import load_policy_file
from calib.serve import ServerThread, open_app
from calib.store import Store
from tests.appstore import made_up_store, simulated_store
from tests.scripted import ScriptedEngine


def calib(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def calib_json(*arguments, code=0):
    return json.loads(calib(*arguments, "--json", code=code).stdout)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = made_up_store(tmp_path_factory.mktemp("store") / "s.db", n=200)
    for name, target in (("best", "p90<9s"), ("fast", "p90<1s")):
        tuned = ("optimize", "--target", target, "--name", name, "--trials", 0, "--test-share", 0)
        calib(*tuned, "--store", path)
    return path


def save(store: Path, name: str, **policy) -> None:
    with Store.open(store) as opened:
        document = opened.policy("best")
        opened.save_policy(name, document | {"name": name, "policy": document["policy"] | policy})


def test_an_export_enters_history_and_the_same_again_does_not(store, tmp_path):
    out = tmp_path / "serve"
    first = calib_json("export", "best", "--out", out, "--store", store)
    assert {"folder", "files", "knobs", "warnings", "refused", "done"} <= first.keys()
    assert (first["done"], first["unchanged"], first["entry"]) == (False, False, 1)
    assert calib_json("export", "best", "--out", out, "--store", store)["unchanged"]
    assert "unchanged: " in calib("export", "best", "--out", out, "--store", store).output
    text = calib("export", "fast", "--out", out, "--note", "too slow for us", "--store", store).output
    assert "think_budget: 400 -> 100" in text or "threshold: " in text
    notes = [(entry.number, entry.note) for entry in ConfigFolder(out).entries()]
    assert notes == [(2, "too slow for us"), (1, "calib export best")]
    assert "say why" in calib("export", "best", "--out", out, "--note", " ", "--store", store, code=2).stderr
    assert "--out" in calib("export", "best", "--store", store, code=2).stderr
    read = json.loads((out / "policy.json").read_text())
    assert all(read["fingerprints"][name] for name in ("model", "questions", "store"))


def test_the_file_names_the_study_and_the_trial_that_suggested_the_policy(store, tmp_path):
    storage = tmp_path / "studies.db"
    found = calib_json("optimize", "--trials", 3, "--name", "studied", "--storage", storage, "--store", store)
    assert found["study"]["trial"] is not None
    calib("export", "studied", "--out", tmp_path / "out", "--store", store)
    read = json.loads((tmp_path / "out" / "policy.json").read_text())
    assert read["study"]["name"] == found["study"]["name"]
    same = found["study"]["policy"] == found["policy"]
    assert read["trial"] == (found["study"]["trial"] if same else None)


def test_roll_back_goes_to_the_state_before_or_to_any(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("best", "fast"):
        calib("export", name, "--out", "serve", "--store", store)
    best, fast = (Policy.from_dict(ConfigFolder("serve").entry(n).document["policy"]) for n in (1, 2))
    assert "say why: --note" in calib("rollback", "serve", code=2).stderr
    done = calib_json("rollback", "serve", "--note", "p90 broke")
    assert (done["to"], done["entry"], done["now"]["note"], done["now"]["now"]) == (1, 3, "to 1: p90 broke", True)
    assert load_policy_file("serve/policy.json") == best
    assert "is as it was in entry 2" in calib("rollback", "serve", "--to", 2, "--note", "no, it was not").output
    assert load_policy_file("serve/policy.json") == fast
    listed = calib("rollback", "serve", "--list").output
    assert "4 now" in listed
    assert "to 2: no, it was not" in listed
    assert [row["number"] for row in calib_json("rollback", "serve", "--list")["entries"]] == [4, 3, 2, 1]
    assert "there are: 1, 2, 3, 4" in calib("rollback", "serve", "--to", 9, "--note", "x", code=2).stderr
    assert "there is no folder" in calib("rollback", "nowhere", "--list", code=2).stderr


def test_diff_in_words_and_as_json(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("best", "fast"):
        calib("export", name, "--out", "serve", "--store", store)
    text = calib("diff", "best", "fast", "--store", store).output
    assert "questions are thought about" in text or "thoughts are cut earlier" in text
    assert "on the tune questions" in text
    found = calib_json("diff", "serve@1", "best", "--store", store)
    assert found["same"]
    assert found["meaning"] == ["the policy is the same: what is served does not change"]
    other = calib_json("diff", "serve@1", "serve", "--store", store)
    assert not other["same"]
    accuracy = next(row for row in other["metrics"] if row["metric"] == "accuracy")
    assert accuracy["difference"] == pytest.approx(accuracy["chosen"] - accuracy["now"])
    assert "is neither" in calib("diff", "best", "nothing", "--store", store, code=2).stderr


def test_a_simulated_store_exports_only_when_that_is_said(tmp_path):
    path = simulated_store(tmp_path / "s.db", every=20)
    refused = calib("export", "best", "--out", tmp_path / "out", "--store", path, code=2)
    assert "--allow-simulated" in refused.stderr
    assert not (tmp_path / "out").exists()
    assert calib_json("export", "best", "--out", tmp_path / "out", "--allow-simulated", "--store", path)["entry"] == 1


def test_routes_that_no_request_carries_are_refused_with_what_that_would_cost(store, tmp_path):
    save(store, "routed", threshold=0.0, routes={"dataset=set 000": {"threshold": 1.1}})
    out = ("--out", tmp_path / "out", "--store", store)
    refused = calib("export", "routed", *out, "--held-by", "gateway", code=2).stderr
    assert "--route-keys dataset" in refused
    assert "all questions under the default policy, without the routes (200 questions): accuracy" in refused
    assert "think rate 50.0 % -> 0.0 %" in refused
    told = ("--route-keys", "dataset,kind")
    assert calib_json("export", "routed", *out, *told, "--held-by", "gateway")["done"]
    by_server = calib_json("export", "routed", *out, *told)  # serve.env cannot hold them
    assert by_server["without_routes"]["without"]["think_rate"] == 0
    assert {knob["knob"]: knob["holder"] for knob in by_server["knobs"]}["routes"] == "nobody"
    assert "a route goes by one of" in calib("export", "routed", *out, "--route-keys", "colour", code=2).stderr


def test_a_policy_of_another_model_is_refused(store, tmp_path):
    other = made_up_store(tmp_path / "o.db")
    calib("optimize", "--test-share", 0, "--trials", 0, "--store", other)
    with Store.open(other) as opened:
        document = opened.policy("best")
        opened.save_policy("best", document | {"fingerprints": {"model": "e" * 64}, "model": "another"})
    out = tmp_path / "out"
    calib("export", "best", "--out", out, "--store", store)
    refused = calib("export", "best", "--out", out, "--store", other, code=2)
    assert "tuned for another (eeeeeeee), and the policy in the folder is for made up" in refused.stderr
    assert calib_json("export", "best", "--out", out, "--allow-other-model", "--store", other)["entry"] == 2
    text = calib("rollback", out, "--note", "back to the old model")
    assert "that policy is for made up" in text.stderr


def test_check_tells_each_knob_and_exits_with_3(store, tmp_path, monkeypatch):
    with Store.open(store) as opened:
        document = opened.policy("best")
    policy = Policy.from_dict(document["policy"])
    here = ("--store", store)
    with ServerThread(lambda: open_app(ScriptedEngine(simulated=False), policy=policy)) as url:
        found = calib_json("export", "best", "--check", url, *here, code=3)["check"]
        states = {knob["knob"]: knob["live"] for knob in found["knobs"]}
        assert states.pop("model") is False  # the scripted engine is not the made-up model
        assert set(states.values()) == {True}
        assert found["what"] == "gateway"
        text = calib("export", "fast", "--check", url, *here, code=3).output
        assert "NOT LIVE: model" in text
        out = tmp_path / "out"
        refused = calib("export", "best", "--out", out, "--check", url, *here, code=2)
        assert f"{url} serves scripted" in refused.stderr
        assert "serves scripted" in calib("export", "best", "--out", out, "--upstream", url, *here, code=2).stderr
        assert not out.exists()
        both = calib_json("export", "best", "--out", out, "--check", url, "--allow-other-model", *here, code=3)
        assert (both["entry"], both["check"]["live"]) == (1, False)
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        missing = calib("export", "best", "--check", url, "--api-key-env", "NO_SUCH_KEY", *here, code=2)
        assert "NO_SUCH_KEY holds no API key" in missing.stderr
    assert calib("export", "best", "--check", url, *here, code=1).stderr.startswith("error: ")


def test_notes_and_names_from_outside_drive_no_terminal_and_leave_no_folder(store, tmp_path):
    evil = "\x1b]0;owned\x07$(touch owned)\n`x`"
    save(store, evil, arm="a;\n$(touch owned)")
    out = tmp_path / "out"
    shown = calib("export", evil, "--out", out, "--note", evil, "--store", store)
    assert not set(shown.output) & {"\x1b", "\x07"}
    assert not set(calib("rollback", out, "--list").output) & {"\x1b", "\x07"}
    assert not set(calib("diff", out, "best", "--store", store).output) & {"\x1b", "\x07"}
    assert ConfigFolder(out).entries()[0].note == evil.strip()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "history").symlink_to(outside)
    assert "is not below" in calib("export", "best", "--out", tmp_path / "trap", "--store", store, code=2).stderr
    assert list(outside.iterdir()) == []
    assert [path.name for path in (tmp_path / "trap").iterdir()] == ["history"]

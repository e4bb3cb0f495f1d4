import json
import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib import __version__
from calib.atomic import write_atomically
from calib.decidefiles import decide_defaults, serve_env
from calib.errors import CalibError
from calib.export import Running
from calib.export import export as export_of
from calib.history import FILES, ConfigFolder
from calib.knobs import knobs, refusals
from calib.policy import Policy, Route
from calib.policyfile import load_policy_file
from calib.provenance import Provenance

export = partial(export_of, allow_simulated=True)

POLICY = Policy(0.71, 0.42, 2048, "mtp")


def document(**changes):
    return {
        "name": "best",
        "verdict": "met",
        "marks": ["simulated"],
        "model": "m",
        "policy": POLICY.to_dict(),
        "targets": [{"target": "p90<10s", "value": 8.2}],
        "tune": {"accuracy": 0.8},
        "test": None,
        "baselines": {},
        "warnings": [],
    } | changes


def sourced(text: str, *names: str) -> list[str]:
    """What a shell sees after it has read the file."""
    script = f"set -eu\n. /dev/stdin <<'EOF'\n{text}EOF\nprintf \"%s\\n\" " + " ".join(f'"${n}"' for n in names)
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def files(folder: str | Path) -> set[str]:
    return {p.name for p in Path(folder).iterdir() if p.is_file()}


def test_export_writes_files_that_say_the_same(tmp_path):
    result = export(document(), tmp_path / "deep" / "serve", held_by="gateway")
    assert result.done
    written = {"decide-defaults.json", "policy.json", "serve.env", "vllm.yaml", "README.md"}
    assert files(result.folder) == set(result.files) == written
    assert load_policy_file(tmp_path / "deep/serve/policy.json") == POLICY
    written = json.loads((tmp_path / "deep/serve/policy.json").read_text())
    assert (written["schema"], written["calib"], written["verdict"]) == (1, __version__, "met")
    assert written["marks"] == ["simulated"]
    assert written["confidence_definition"].startswith("max(p1)")
    fields = json.loads((tmp_path / "deep/serve/decide-defaults.json").read_text())
    assert fields == {"thinking": "auto", "threshold": 0.71, "think_budget": 2048}
    assert any("simulated" in w for w in result.warnings)
    assert any("not certified" in w for w in result.warnings)


def test_export_is_not_done_while_nobody_holds_the_budget(tmp_path):
    result = export(document(), tmp_path)
    assert not result.done
    assert {k.knob: k.holder for k in result.knobs} == {
        "threshold": "server",
        "mix": "server",
        "think_budget": "nobody",
        "arm": "server",
    }
    assert export(document(), tmp_path, held_by="client").done
    with pytest.raises(CalibError, match="gateway, client"):
        knobs(POLICY, "server")


def test_serve_env_opens_with_the_warning_and_sources_in_a_shell():
    text = serve_env(POLICY)
    assert text.startswith("# WARNING: this file does not set the think budget (2048 tokens)")
    names = ("JEV_DECIDE_THRESHOLD", "JEV_DECIDE_MIX", "JEV_DECIDE_THINKING", "MTP")
    assert sourced(text, *names) == ["0.71", "0.42", "auto", "1"]
    assert sourced(serve_env(Policy(0, 0.5, 8, "base")), *names) == ["0.0", "0.5", "off", "0"]


@given(st.text(max_size=30))
def test_nothing_in_an_arm_name_reaches_the_shell(arm):
    text = serve_env(Policy(0.5, 0.5, 8, arm + "x"))
    assert "MTP=" not in "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert [line.partition("=")[0] for line in lines] == [
        "JEV_DECIDE_THRESHOLD",
        "JEV_DECIDE_MIX",
        "JEV_DECIDE_THINKING",
    ]
    assert all(shlex.split(line) == [line] for line in lines)


def test_routes_are_named_as_left_out(tmp_path):
    routed = Policy(0.5, 0.5, 8, "base", routes={"kind=noul": Route(0.9)})
    assert "1 routes of the policy are left out" in serve_env(routed)
    result = export(document(policy=routed.to_dict()), tmp_path)
    assert any("routes need the gateway" in w for w in result.warnings)
    assert load_policy_file(tmp_path / "policy.json") == routed


@given(st.floats(0, 1.1), st.floats(0, 1), st.integers(1, 10**6))
def test_the_environment_holds_every_digit(threshold, mix, budget):
    policy = Policy(threshold, mix, budget)
    values = dict(line.split("=") for line in serve_env(policy).splitlines() if not line.startswith("#"))
    assert float(values["JEV_DECIDE_THRESHOLD"]) == threshold
    assert float(values["JEV_DECIDE_MIX"]) == mix
    assert decide_defaults(policy)["think_budget"] == budget


def test_the_file_holds_the_evidence_and_what_it_was_tuned_on(tmp_path):
    study = {"name": "s", "trial": 7, "policy": POLICY.to_dict()}
    tuned = document(
        fingerprints={"model": "a" * 64, "questions": "b" * 64},
        baselines={"system1": {"accuracy": 0.7}},
        envelope={"schema": 1},
        study=study,
    )
    origin = Provenance({"protocol": "jev27-bare-v1", "model": "m"})
    export(tuned, tmp_path, origin=origin)
    read = json.loads((tmp_path / "policy.json").read_text())
    assert read["fingerprints"] == {
        "model": "a" * 64,
        "prompt": origin.prompt,
        "questions": "b" * 64,
        "store": None,
    }
    assert (read["trial"], read["study"], read["envelope"]) == (7, study, {"schema": 1})
    assert read["baselines"] == {"system1": {"accuracy": 0.7}}
    assert read["route_keys"] == ["kind", "n_options"]
    assert {knob["knob"]: knob["holder"] for knob in read["knobs"]}["think_budget"] == "nobody"
    export(tuned | {"study": study | {"policy": Policy(0.1).to_dict()}}, tmp_path)
    assert json.loads((tmp_path / "policy.json").read_text())["trial"] is None  # another policy than the trial's


def test_the_file_holds_what_was_held_out_and_how_sure_one_wants_to_be(tmp_path):
    export_of(document(marks=[], split={"test_share": 0.2}, certificate={"level": 0.99}), tmp_path)
    read = json.loads((tmp_path / "policy.json").read_text())
    assert (read["split"], read["certificate"]) == ({"test_share": 0.2}, {"level": 0.99})


def test_imported_outcomes_say_that_no_server_can_be_told_to_be_theirs(tmp_path):
    tuned = document(marks=[], fingerprints={"model": "a" * 64})
    server = Running("http://127.0.0.1:8000", "m", "b" * 64)
    done = export(tuned, tmp_path / "a", origin=Provenance({"imported": "m"}), running=server)
    assert any("nobody can tell whether http://127.0.0.1:8000 serves" in warning for warning in done.warnings)
    assert not any(
        "nobody can tell" in w for w in export(tuned, tmp_path / "b", origin=Provenance({"imported": "m"})).warnings
    )


def test_the_guide_promises_nothing_where_nothing_was_asked_for(tmp_path):
    export_of(document(marks=[], targets=[]), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "No limit was asked for" in text
    assert "Each limit" not in text


def test_a_simulated_policy_is_refused_until_it_is_allowed(tmp_path):
    with pytest.raises(CalibError, match="--allow-simulated"):
        export_of(document(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export_of(document(marks=["estimated"]), tmp_path / "out").entry == 1


def test_a_policy_of_another_model_is_refused_with_the_reason(tmp_path):
    ours = document(model="new", fingerprints={"model": "c" * 64})
    export(document(model="old", fingerprints={"model": "a" * 64}), tmp_path)
    before = ConfigFolder(tmp_path).files()
    with pytest.raises(CalibError, match=r"tuned for new \(cccccccc\).*folder is for old \(aaaaaaaa\)") as error:
        export(ours, tmp_path)
    assert "--allow-other-model" in str(error.value)
    assert ConfigFolder(tmp_path).files() == before
    assert export(ours, tmp_path, allow_other_model=True).entry == 2
    running = Running("http://there:8000", "new", "d" * 64)
    with pytest.raises(CalibError, match=r"http://there:8000 serves new \(dddddddd\) under the same name"):
        export(ours, tmp_path, running=running)
    # imported outcomes do not tell whose they are, and a file without a fingerprint cannot contradict
    assert export(ours, tmp_path, running=running, origin=Provenance({"imported": "new"})).entry == 3
    (tmp_path / "policy.json").write_text('{"policy": {}}')
    assert export(ours, tmp_path).entry is not None


def test_a_result_that_changes_nothing_writes_nothing_and_says_so(tmp_path):
    first = export(document(), tmp_path, note="first")
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    again = export(document(), tmp_path, note="again")
    assert (first.unchanged, first.entry) == (False, 1)
    assert (again.unchanged, again.entry) == (True, None)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == stamps
    assert not any(change.differs for change in again.changes)
    evidence = export(document(verdict="certified"), tmp_path)
    assert {change.what for change in evidence.changes if change.differs} == {"verdict"}
    assert [entry.note for entry in ConfigFolder(tmp_path).entries()] == ["calib export best", "first"]


def test_routes_that_no_request_can_take_are_refused(tmp_path):
    routed = Policy(0.5, 0.5, 8, "base", routes={"dataset=a": Route(0.9), "kind=noul": Route(0.1)})
    with pytest.raises(CalibError, match="1 of 2 routes go by dataset.*--route-keys dataset,kind"):
        export(document(policy=routed.to_dict()), tmp_path / "out", held_by="gateway")
    assert not (tmp_path / "out").exists()
    result = export(document(policy=routed.to_dict()), tmp_path, held_by="gateway", route_keys=["dataset"])
    assert result.done
    assert {k.knob: (k.value, k.holder) for k in result.knobs}["routes"] == ("2 by dataset, kind", "gateway")
    read = json.loads((tmp_path / "policy.json").read_text())
    assert read["route_keys"] == ["kind", "n_options", "dataset"]
    with pytest.raises(CalibError, match="--route-keys colour: a route goes by one of dataset, kind, n_options"):
        export(document(), tmp_path, route_keys=["colour"])
    by_server = export(document(policy=routed.to_dict()), tmp_path, held_by="client", route_keys=["dataset"])
    assert {k.knob: k.holder for k in by_server.knobs}["routes"] == "nobody"


def test_a_deadline_is_the_gateways_alone(tmp_path):
    policy = Policy(0.5, 0.5, 512, deadline=2.5, on_deadline="system1")
    (reason,) = refusals(policy)
    assert "2.5 s" in reason
    result = export(document(policy=policy.to_dict()), tmp_path)
    assert result.refused == (reason,)
    assert files(tmp_path) == {"policy.json", "README.md", "vllm.yaml"}
    held = {k.knob: (k.value, k.holder) for k in result.knobs}
    assert held["deadline"] == ("2.5 s, then System 1 answers", "nobody")
    held = {k.knob: k.holder for k in export(document(policy=policy.to_dict()), tmp_path, held_by="gateway").knobs}
    assert held.pop("arm") == "server"
    assert set(held.values()) == {"gateway"}
    assert load_policy_file(tmp_path / "policy.json") == policy


def test_a_stock_vllm_server_holds_no_knob_of_the_rule(tmp_path):
    origin = Provenance({"engine": "vllm", "model": "m", "root": "org/m", "prompt": "p"})
    result = export(document(), tmp_path, origin=origin)
    assert {k.knob: k.holder for k in result.knobs} == {
        "threshold": "nobody",
        "mix": "nobody",
        "think_budget": "nobody",
        "arm": "server",
    }
    assert files(tmp_path) == {"policy.json", "vllm.yaml", "README.md"}
    assert "no POST /v1/decide" in result.refused[0]
    assert export(document(), tmp_path, origin=origin, held_by="gateway").done
    assert 'model: "org/m"' in (tmp_path / "vllm.yaml").read_text()


def test_the_reference_server_gets_no_vllm_yaml_and_an_old_one_goes(tmp_path):
    export(document(), tmp_path)
    assert "vllm.yaml" in files(tmp_path)
    export(document(), tmp_path, origin=Provenance({"protocol": "jev27-bare-v1"}))
    assert files(tmp_path) == {"policy.json", "serve.env", "decide-defaults.json", "README.md"}


def test_files_of_somebody_else_stay(tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    (tmp_path / "vllm.yaml").write_text("port: 1\n")
    result = export(document(), tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    assert (tmp_path / "vllm.yaml").read_text() == "port: 1\n"
    assert set(result.files) == {"policy.json", "serve.env", "decide-defaults.json"}
    assert sum("is not calib's and stays" in warning for warning in result.warnings) == 2
    assert export(document(), tmp_path).unchanged


NASTY = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\n\r`$\"'\\|<>;&#\u2028\x00\x1b"), min_size=1, max_size=20
)


@settings(max_examples=25)
@given(NASTY, NASTY, NASTY)
def test_nothing_in_names_gets_out_of_its_place(tmp_path_factory, name, model, limit):
    folder = tmp_path_factory.mktemp("x")
    arm = f"a$(touch {folder}/owned)\n{name}"
    tuned = document(name=name, model=model, policy=Policy(0.5, 0.5, 8, arm).to_dict(), targets=[{"target": limit}])
    export(tuned, folder, note=f"$(touch {folder}/owned) {name}")
    script = 'set -eu\n. ./serve.env\nprintf %s "$JEV_DECIDE_THRESHOLD"\n'
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0.5", "")
    assert not (folder / "owned").exists()
    read = json.loads((folder / "policy.json").read_text())
    assert (read["name"], read["model"], read["policy"]["arm"]) == (name, model, arm)
    text = (folder / "README.md").read_text()
    assert all(char.isprintable() for char in text if char != "\n")
    shell = text.partition("```sh\n")[2].partition("\n```")[0]
    assert len(re.findall("^```", text, re.MULTILINE)) == 2
    assert [line.split()[0] for line in shell.splitlines()] == ["set", "vllm", *["calib"] * 7]
    for line in shell.splitlines():
        shlex.split(line, comments=True)  # every quote is closed in its line
    assert sorted(p.name for p in folder.iterdir()) == sorted({*FILES, "history"} - {"calibration.json"})


def test_no_policy_to_export(tmp_path):
    with pytest.raises(CalibError, match="holds no policy"):
        export(document(policy=None), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibError, match="file/out: cannot be made"):
        export(document(), tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no field 'policy'"),
        ('{"schema": 1}', "no field 'policy'"),
        ('{"schema": 2, "policy": {}}', "schema 2"),
        ('{"schema": 1, "policy": {"threshold": 3}}', "threshold must be"),
        ('{"schema": 1, "policy": {"treshold": 0.3}}', "unknown field 'treshold'"),
        ('{"schema": 1, "policy": {}, "targets": "p90<10s"}', "targets is not as calib export writes it"),
        ('{"schema": 1, "policy": {}, "targets": [{"target": null}]}', "targets is not"),
        ('{"schema": 1, "policy": {}, "marks": [1]}', "marks is not"),
        ('{"schema": 1, "policy": {}, "fingerprints": 5}', "fingerprints is not"),
        ('{"schema": 1, "policy": {}, "split": {"test_share": true}}', "split.test_share is not"),
        ('{"schema": 1, "policy": {}, "certificate": {"level": NaN}}', "certificate.level is not"),
    ],
)
def test_a_policy_file_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "policy.json"
    path.write_text(content)
    with pytest.raises(CalibError, match=message) as error:
        load_policy_file(path)
    assert str(path) in str(error.value)


def test_a_missing_policy_file_says_how_to_write_one(tmp_path):
    with pytest.raises(CalibError, match="calib export best --out serve/"):
        load_policy_file(tmp_path / "none.json")


def test_a_folder_in_the_place_of_a_file_is_named_before_anything_is_written(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(CalibError, match="b is a folder") as error:
        write_atomically({tmp_path / "a": "new", tmp_path / "b": "new"})
    assert error.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_failed_write_changes_nothing(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("old")
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CalibError, match="No space left"):
        write_atomically({first: "new", second: "new"})
    assert first.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]

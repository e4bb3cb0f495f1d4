import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib import __version__
from calib.errors import CalibError
from calib.export import (
    decide_defaults,
    export,
    knobs,
    load_policy_file,
    serve_env,
    write_atomically,
)
from calib.policy import Policy, Route

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


def test_export_writes_three_files_that_say_the_same(tmp_path):
    result = export(document(), tmp_path / "deep" / "serve", held_by="gateway")
    assert result.done
    assert sorted(p.name for p in Path(result.folder).iterdir()) == ["decide-defaults.json", "policy.json", "serve.env"]
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


def test_no_policy_to_export(tmp_path):
    with pytest.raises(CalibError, match="holds no policy"):
        export(document(policy=None), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibError, match="--out .*file/out"):
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

"""Config folders: what is written, entered, restored, and that nothing leaves the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from calib import atomic
from calib.errors import CalibError
from calib.export import export
from calib.history import FILES, ConfigFolder
from calib.policy import Policy
from calib.policyfile import load_policy_file

CONFIGS = {*FILES} - {"calibration.json"}
"""What an export writes for a plain policy."""

ONE = Policy(0.7, 0.4, 2048, "mtp")
TWO = Policy(0.9, 0.6, 8192, "base")


def document(policy: Policy, verdict: str = "certified") -> dict:
    return {
        "name": "best",
        "model": "m",
        "verdict": verdict,
        "marks": [],
        "targets": [{"target": "p90<10s"}],
        "policy": policy.to_dict(),
    }


@pytest.fixture
def folder(tmp_path: Path) -> ConfigFolder:
    return ConfigFolder(tmp_path / "serve")


def below(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


def test_what_is_written_is_on_disk_and_in_the_history(folder):
    assert folder.current() is None
    assert folder.entries() == []
    done = export(document(ONE), folder, note="agreed on Monday", held_by="gateway")
    assert set(done.files) == CONFIGS
    assert load_policy_file(folder.folder / "policy.json") == ONE
    (entry,) = folder.entries()
    assert (entry.number, entry.action, entry.note, entry.policy) == (1, "write", "agreed on Monday", ONE)
    assert dict(entry.files) == folder.files()
    assert entry.at.endswith("+00:00")


def test_roll_back_restores_every_byte_and_is_an_entry_itself(folder):
    export(document(ONE), folder, note="first")
    before = folder.files()
    export(document(TWO), folder, note="second")
    assert folder.files() != before
    entry = folder.roll_back(1, "too slow")
    assert folder.files() == before
    assert (entry.number, entry.action, entry.note) == (3, "roll back", "to 1: too slow")
    assert [e.action for e in folder.entries()] == ["roll back", "write", "write"]
    folder.roll_back(2, "and forth")
    assert load_policy_file(folder.folder / "policy.json") == TWO


def test_what_somebody_else_left_is_entered_before_it_is_replaced(folder):
    folder.folder.mkdir()
    (folder.folder / "policy.json").write_text(json.dumps({"schema": 1, "policy": ONE.to_dict()}))
    theirs = folder.files()
    export(document(TWO), folder, note="mine")
    assert [(e.number, e.action) for e in folder.entries()] == [(2, "write"), (1, "found")]
    (folder.folder / "policy.json").write_text("edited by hand, no JSON")
    assert folder.current() is None
    folder.roll_back(1, "back")
    assert folder.files() == theirs
    found = folder.entry(3)
    assert found.action == "found"
    assert found.files["policy.json"] == "edited by hand, no JSON"
    assert found.policy is None


def test_a_file_that_a_state_did_not_have_is_taken_away(folder):
    folder.folder.mkdir(parents=True)
    (folder.folder / "serve.env").write_text("X=1\n")
    export(document(ONE), folder, note="all three")
    folder.roll_back(1, "only one")
    assert folder.files() == {"serve.env": "X=1\n"}


@pytest.mark.parametrize("note", ["", "   ", "\n"])
def test_a_write_without_a_reason_is_refused_and_writes_nothing(folder, note):
    with pytest.raises(CalibError, match="say why"):
        export(document(ONE), folder, note=note)
    assert not folder.folder.exists()


@pytest.mark.parametrize("name", ["..", "../other", "a/../../other", "/etc", "a\0b", "./../x"])
def test_no_name_leads_out_of_the_root(tmp_path, name):
    root = tmp_path / "serve"
    root.mkdir()
    with pytest.raises(CalibError, match="is not below"):
        ConfigFolder(root, name)


def test_no_link_leads_out_of_the_root(tmp_path):
    root, outside = tmp_path / "serve", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(CalibError, match="is not below"):
        ConfigFolder(root, "link")
    inside = ConfigFolder(root, "inside")
    inside.folder.mkdir()
    (inside.folder / "history").symlink_to(outside)
    with pytest.raises(CalibError, match="is not below"):
        export(document(ONE), inside, note="why")
    assert list(outside.iterdir()) == []


def test_a_folder_that_becomes_a_link_before_the_write_is_refused(tmp_path):
    root, outside = tmp_path / "serve", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    folder = ConfigFolder(root, "a")
    (root / "a").symlink_to(outside)
    with pytest.raises(CalibError, match="is not below"):
        export(document(ONE), folder, note="why")
    assert list(outside.iterdir()) == []


def test_a_link_in_place_of_a_config_is_replaced_and_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("keep me")
    folder = ConfigFolder(tmp_path / "serve")
    folder.folder.mkdir()
    (folder.folder / "policy.json").symlink_to(secret)
    assert folder.files() == {}
    export(document(ONE), folder, note="why")
    assert secret.read_text() == "keep me"
    assert not (folder.folder / "policy.json").is_symlink()


def test_a_tampered_entry_restores_known_files_only(tmp_path):
    folder = ConfigFolder(tmp_path / "serve")
    export(document(ONE), folder, note="first")
    path = folder.folder / "history" / "000001.json"
    raw = json.loads(path.read_text())
    raw["files"] |= {"../escaped": "x", "/tmp/escaped": "x", "history/000009.json": "x"}
    path.write_text(json.dumps(raw))
    export(document(TWO), folder, note="second")
    folder.roll_back(1, "back")
    assert load_policy_file(folder.folder / "policy.json") == ONE
    assert not (tmp_path / "escaped").exists()
    assert {p.name for p in folder.folder.iterdir()} == {*CONFIGS, "history"}


def test_files_that_are_no_entries_are_passed_over(folder):
    export(document(ONE), folder, note="first")
    history = folder.folder / "history"
    (history / "000002.json").write_text("{}")
    (history / "000003.json").write_text("no JSON")
    (history / "notes.txt").write_text("mine")
    assert [entry.number for entry in folder.entries()] == [1]
    export(document(TWO), folder, note="second")  # does not overwrite what it cannot read
    assert (history / "000002.json").read_text() == "{}"
    assert folder.entries()[0].number == 4


def test_roll_back_names_what_there_is(folder):
    export(document(ONE), folder, note="first")
    with pytest.raises(CalibError, match=r"no entry 7 .* there are: 1"):
        folder.roll_back(7, "why")


def test_a_disk_that_fails_leaves_the_old_files(folder, monkeypatch):
    export(document(ONE), folder, note="first")
    before = below(folder.root)

    def fails(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", fails)
    with pytest.raises(CalibError, match="No space left"):
        export(document(TWO), folder, note="second")
    monkeypatch.undo()
    assert below(folder.root) == before


def test_a_crash_between_configs_and_entry_is_seen_by_the_next_write(folder, monkeypatch):
    export(document(ONE), folder, note="first")

    def crash(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ConfigFolder, "_enter", crash)
    with pytest.raises(KeyboardInterrupt):
        export(document(TWO), folder, note="second")
    monkeypatch.undo()
    lost = folder.files()
    export(document(ONE), folder, note="third")
    assert [e.action for e in folder.entries()] == ["write", "found", "write"]
    assert dict(folder.entry(2).files) == lost


def test_two_writers_get_different_numbers(folder, monkeypatch):
    export(document(ONE), folder, note="first")
    stale = folder.entries()
    monkeypatch.setattr(ConfigFolder, "entries", lambda self: stale)  # as another writer saw it before
    export(document(TWO), folder, note="second")
    export(document(ONE), folder, note="third")
    monkeypatch.undo()
    assert len({entry.number for entry in folder.entries()}) == len(list((folder.folder / "history").iterdir())) >= 3


def test_an_entry_of_an_earlier_calib_is_read_and_restored(folder):
    export(document(ONE), folder)
    path = folder.folder / "history" / "000001.json"
    raw = json.loads(path.read_text())
    raw["files"] = {name: raw["files"][name] for name in ("policy.json", "serve.env", "decide-defaults.json")}
    path.write_text(json.dumps(raw))
    export(document(TWO), folder, note="now with more files")
    folder.roll_back(1, "back")
    assert set(folder.files()) == {"policy.json", "serve.env", "decide-defaults.json"}
    assert load_policy_file(folder.folder / "policy.json") == ONE


def test_the_state_before_is_the_newest_that_differs(folder):
    with pytest.raises(CalibError, match="no other state"):
        folder.before()
    export(document(ONE), folder)
    export(document(TWO), folder)
    assert folder.before().number == 1
    folder.roll_back(1, "back")
    assert folder.before().number == 2  # and forth
    (folder.folder / "serve.env").write_text("MTP=1\n")
    assert folder.before().number == 3  # what a hand changed


def test_an_entry_cannot_bring_an_unsigned_readme(folder):
    export(document(ONE), folder)
    path = folder.folder / "history" / "000001.json"
    raw = json.loads(path.read_text())
    raw["files"]["README.md"] = "# somebody's own\n"
    path.write_text(json.dumps(raw))
    assert "README.md" not in folder.entry(1).files


def test_links_to_a_readme_stay_and_are_not_followed(tmp_path):
    mine = tmp_path / "mine.md"
    mine.write_text("# mine\n")
    folder = ConfigFolder(tmp_path / "serve")
    folder.folder.mkdir()
    (folder.folder / "README.md").symlink_to(mine)
    assert "README.md" not in export(document(ONE), folder).files
    assert (folder.folder / "README.md").is_symlink()
    assert mine.read_text() == "# mine\n"


def test_a_folder_in_the_place_of_a_config_changes_nothing(folder):
    (folder.folder / "serve.env").mkdir(parents=True)
    with pytest.raises(CalibError, match=r"serve\.env is a folder"):
        export(document(ONE), folder)
    assert [p.name for p in folder.folder.iterdir()] == ["serve.env"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(CalibError, match="cannot be made"):
        export(document(ONE), tmp_path / "locked" / "serve")


def test_what_cannot_be_entered_is_not_written(folder):
    export(document(ONE), folder, note="first")
    before = below(folder.folder)
    (folder.folder / "history").rename(folder.folder / "elsewhere")
    (folder.folder / "history").write_text("a file")
    with pytest.raises(CalibError, match=r"history: cannot be made"):
        export(document(TWO), folder, note="second")
    (folder.folder / "history").unlink()
    (folder.folder / "elsewhere").rename(folder.folder / "history")
    assert below(folder.folder) == before


def test_an_entry_can_be_read_by_whoever_reads_the_configs(folder):
    export(document(ONE), folder, note="first")
    modes = {path.stat().st_mode & 0o777 for path in folder.folder.rglob("*") if path.is_file()}
    assert modes == {0o644}

"""The config folder of a server: what is there, what a policy would change, writing with a reason, and the way back.

Each write and each roll back leaves an entry ``history/NNNNNN.json`` beside the configs: when, why, and the whole text
of every file. Files that somebody else put there are entered before they are replaced, so that nothing is lost. All
writes stay below the folder that was given. Leaves to `calib.export` what the files say.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from calib.errors import CalibError
from calib.export import Export, export, write_atomically
from calib.policy import Policy

__all__ = ["FILES", "Action", "Change", "ConfigFolder", "Entry", "changes"]

FILES = ("policy.json", "serve.env", "decide-defaults.json")
"""What a config folder holds; an entry may restore nothing else."""

SCHEMA = 1
"""Version of the form of an entry."""

Action = Literal["found", "write", "roll back"]

_FOLDER = "history"
_ENTRY = re.compile(r"\d{6}\.json")
_ALWAYS_SHOWN = ("threshold", "mix", "think_budget", "arm")
_KNOBS = ("threshold", "mix", "think_budget", "arm", "confidence", "routes", "temperatures", "pool")


@dataclass(frozen=True)
class Change:
    """One line of a diff; None where a side has no policy."""

    what: str
    now: str | None
    chosen: str | None

    @property
    def differs(self) -> bool:
        """Whether writing would change it."""
        return self.now != self.chosen


@dataclass(frozen=True)
class Entry:
    """One state of the config folder.

    Attributes
    ----------
    number : int
        1, 2, 3, ...
    at : str
        ISO 8601, UTC.
    action : {"found", "write", "roll back"}
        ``found``: put there by somebody else.
    note : str
        Why.
    files : mapping of str to str
        Text of each file that was there.
    """

    number: int
    at: str
    action: Action
    note: str
    files: Mapping[str, str]

    @property
    def document(self) -> dict[str, Any] | None:
        """What ``policy.json`` said; None when it was not there or cannot be read."""
        return _document(self.files.get("policy.json"))

    @property
    def policy(self) -> Policy | None:
        """The policy of this state."""
        return _policy(self.document)


class ConfigFolder:
    """A folder of serve configs below a root that is never left.

    Parameters
    ----------
    root : path
        What the user named; made when something is written.
    below : str, default ""
        A folder in it, for instance one for each server.

    Raises
    ------
    CalibError
        When the folder is not below the root, by its name or through a link.
    """

    def __init__(self, root: str | os.PathLike[str], below: str = "") -> None:
        self.root = Path(root).resolve()
        self.folder = self._inside(self.root / below, below)

    def _inside(self, path: Path, shown: str) -> Path:
        resolved = Path() if "\0" in shown else path.resolve()
        if not resolved.is_relative_to(self.root):
            raise CalibError(
                f"{shown!r} is not below {self.root}; name a folder in it, without .. and links that lead out"
            )
        return resolved

    @property
    def _history(self) -> Path:
        return self._inside(self.folder / _FOLDER, _FOLDER)

    def files(self) -> dict[str, str]:
        """Text of each config file that is there."""
        found = {}
        for name in FILES:
            path = self.folder / name
            if path.is_file() and not path.is_symlink():
                try:
                    found[name] = path.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise CalibError(f"{path}: cannot be read ({error}); move it away, then try again") from None
        return found

    def current(self) -> dict[str, Any] | None:
        """What ``policy.json`` says now; None without one that can be read."""
        return _document(self.files().get("policy.json"))

    def entries(self) -> list[Entry]:
        """Every state that was entered, newest first; a file that is no entry is passed over."""
        folder = self._history
        if not folder.is_dir():
            return []
        found = [_entry(path) for path in sorted(folder.iterdir()) if _ENTRY.fullmatch(path.name)]
        return [entry for entry in reversed(found) if entry is not None]

    def entry(self, number: int) -> Entry:
        """One state by its number."""
        entries = self.entries()
        for entry in entries:
            if entry.number == number:
                return entry
        there = ", ".join(str(entry.number) for entry in reversed(entries)) or "none"
        raise CalibError(f"{self.folder}: no entry {number} in the history; there are: {there}")

    def write(self, document: Mapping[str, Any], note: str, *, held_by: str | None = None) -> Export:
        """Write a policy with its evidence, and enter when and why.

        Parameters
        ----------
        document : mapping
            As `calib.export.export` reads it.
        note : str
            Why; not empty.
        held_by : {"gateway", "client"}, optional
            Who holds the think budget.
        """
        note = _reason(note)
        self._enter_strangers()
        written = export(document, self._made(), held_by=held_by)
        self._enter("write", note)
        return written

    def roll_back(self, number: int, note: str) -> Entry:
        """Restore a state of the history, as a new entry; files that it did not have are taken away."""
        note = _reason(note)
        wanted = self.entry(number)
        if not wanted.files:
            raise CalibError(f"{self.folder}: entry {number} holds no files; nothing to go back to")
        self._enter_strangers()
        folder = self._made()
        write_atomically({folder / name: text for name, text in wanted.files.items()})
        for name in set(FILES) - wanted.files.keys():
            (folder / name).unlink(missing_ok=True)
        return self._enter("roll back", f"to {number}: {note}")

    def _made(self) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CalibError(f"{self.folder}: cannot be made ({error.strerror or error})", exit_code=1) from None
        return self._inside(self.folder, self.folder.name)  # again: a link may have come into being meanwhile

    def _enter_strangers(self) -> None:
        """Enter what somebody else left in the folder, or a write that was cut off before it was entered."""
        there, entries = self.files(), self.entries()
        if there and (not entries or dict(entries[0].files) != there):
            self._enter("found", "was there, not written from here")

    def _enter(self, action: Action, note: str) -> Entry:
        self._made()
        folder = self._history
        entries = self.entries()
        number = entries[0].number + 1 if entries else 1
        try:
            folder.mkdir(exist_ok=True)
            while True:
                entry = Entry(number, datetime.now(UTC).isoformat(timespec="seconds"), action, note, self.files())
                if _created(folder / f"{number:06d}.json", entry):
                    return entry
                number += 1  # another writer was first
        except OSError as error:
            raise CalibError(f"{folder}: cannot be written ({error.strerror or error})", exit_code=1) from None


def changes(now: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> list[Change]:
    """What writing a document would change in each knob, and in what is known about it.

    Parameters
    ----------
    now : mapping or None
        ``policy.json`` as it is.
    chosen : mapping
        Document of a tuned or appraised policy.
    """
    before = (now or {}).get("policy") or {}
    after = chosen.get("policy") or {}
    usual = Policy().to_dict()
    rows = [
        Change(knob, _shown(before.get(knob)), _shown(after.get(knob)))
        for knob in _KNOBS
        if knob in _ALWAYS_SHOWN or before.get(knob, usual[knob]) != after.get(knob, usual[knob])
    ]
    rows.append(Change("verdict", _shown((now or {}).get("verdict")), _shown(chosen.get("verdict"))))
    rows.append(Change("limits", _limits(now), _limits(chosen)))
    return rows


def _limits(document: Mapping[str, Any] | None) -> str | None:
    if document is None:
        return None
    return ", ".join(str(target.get("target")) for target in document.get("targets") or ()) or "none"


def _shown(value: Any) -> str | None:
    if value is None or value == {}:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reason(note: str) -> str:
    if not note.strip():
        raise CalibError("say why in a few words: whoever reads the history next will want to know")
    return note.strip()


def _document(text: str | None) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if text is not None else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _policy(document: Mapping[str, Any] | None) -> Policy | None:
    if document is None or not isinstance(document.get("policy"), dict):
        return None
    try:
        return Policy.from_dict(document["policy"])
    except CalibError:
        return None


def _entry(path: Path) -> Entry | None:
    """An entry of the history; None when the file is none. Only the known files count, whatever it names."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8")) if not path.is_symlink() else None
    except (OSError, ValueError):
        return None
    if (
        not isinstance(raw, dict)
        or raw.get("schema") != SCHEMA
        or raw.get("action") not in ("found", "write", "roll back")
    ):
        return None
    files = raw.get("files")
    if not isinstance(files, dict):
        return None
    kept = {name: files[name] for name in FILES if isinstance(files.get(name), str)}
    return Entry(int(path.stem), str(raw.get("at")), raw["action"], str(raw.get("note")), kept)


def _created(path: Path, entry: Entry) -> bool:
    """Write a new file whole or not at all; False when it exists already."""
    text = json.dumps(
        {"schema": SCHEMA, "at": entry.at, "action": entry.action, "note": entry.note, "files": dict(entry.files)},
        ensure_ascii=False,
        indent=2,
    )
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(name, path)  # unlike a rename it refuses to replace
        except FileExistsError:
            return False
        return True
    finally:
        os.unlink(name)  # noqa: PTH108

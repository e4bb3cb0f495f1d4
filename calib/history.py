"""The config folder of a server: what is there, replacing it with a reason, and the way back.

Each write and each roll back leaves an entry ``history/NNNNNN.json`` beside the configs: when, why, and the whole text
of every file. Files that somebody else put there are entered before they are replaced, so that nothing is lost. All
writes stay below the folder that was given, and no link in it is followed. Leaves to `calib.export` what the files say.
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

from calib.atomic import write_atomically
from calib.errors import CalibError
from calib.policy import Policy

__all__ = ["FILES", "SIGNATURE", "Action", "ConfigFolder", "Entry"]

FILES = ("policy.json", "serve.env", "decide-defaults.json", "calibration.json", "vllm.yaml", "README.md")
"""What a config folder holds; an entry may restore nothing else."""

SIGNATURE = "written by calib export"
"""In the first line of those files whose names others use too: without it they are somebody's own, and stay."""

SCHEMA = 1
"""Version of the form of an entry."""

Action = Literal["found", "write", "roll back"]

_SIGNED = ("vllm.yaml", "README.md")
_FOLDER = "history"
_ENTRY = re.compile(r"\d{6}\.json")


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

    def to_dict(self, now: Mapping[str, str]) -> dict[str, Any]:
        """Plain values for JSON, without the texts; ``now`` is what the folder holds."""
        policy = self.policy
        return {
            "number": self.number,
            "at": self.at,
            "action": self.action,
            "note": self.note,
            "files": list(self.files),
            "policy": None if policy is None else policy.to_dict(),
            "now": dict(self.files) == dict(now),
        }


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
        return {name: text for name, text in self._texts().items() if _is_ours(name, text)}

    def foreign(self) -> tuple[str, ...]:
        """Files that have the name of a config file and are somebody's own: they are never replaced."""
        links = [name for name in _SIGNED if (self.folder / name).is_symlink()]
        return (*links, *(name for name, text in self._texts().items() if not _is_ours(name, text)))

    def _texts(self) -> dict[str, str]:
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

    def write(self, files: Mapping[str, str], note: str) -> Entry:
        """Replace all config files, and enter when and why.

        A config file that is not among them is taken away: it would contradict those that are.

        Parameters
        ----------
        files : mapping of str to str
            Text by name, names of `FILES`.
        note : str
            Why; not empty.

        Raises
        ------
        CalibError
            Without a note, or when the folder cannot be written; the old files stay.
        """
        note = _reason(note)
        self._enter_strangers()
        self._replace(files)
        return self._enter("write", note)

    def before(self) -> Entry:
        """The newest state that is not what is there now.

        Raises
        ------
        CalibError
            There is none.
        """
        now = self.files()
        for entry in self.entries():
            if entry.files and dict(entry.files) != now:
                return entry
        raise CalibError(f"{self.folder}: the history holds no other state than the one that is there")

    def roll_back(self, number: int, note: str) -> Entry:
        """Restore a state of the history, as a new entry; files that it did not have are taken away."""
        note = _reason(note)
        wanted = self.entry(number)
        if not wanted.files:
            raise CalibError(f"{self.folder}: entry {number} holds no files; nothing to go back to")
        self._enter_strangers()
        self._replace(wanted.files)
        return self._enter("roll back", f"to {number}: {note}")

    def _replace(self, files: Mapping[str, str]) -> None:
        folder, kept = self._made(), self.foreign()
        for name in FILES:  # those that are taken away too
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                raise CalibError(f"{folder / name} is a folder, where a file has to be; move it away, then try again")
        self._ready()
        write_atomically({folder / name: text for name, text in files.items() if name not in kept})
        for name in set(FILES) - files.keys() - set(kept):
            (folder / name).unlink(missing_ok=True)

    def _made(self) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CalibError(
                f"{self.folder}: cannot be made ({error.strerror or error}); name a folder that can be made"
            ) from None
        return self._inside(self.folder, self.folder.name)  # again: a link may have come into being meanwhile

    def _ready(self) -> Path:
        """The folder of the history, made when missing: without one nothing is replaced."""
        self._made()
        folder = self._history
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise CalibError(f"{folder}: cannot be made ({error.strerror or error}); move it away") from None
        return folder

    def _enter_strangers(self) -> None:
        """Enter what somebody else left in the folder, or a write that was cut off before it was entered."""
        there, entries = self.files(), self.entries()
        if there and (not entries or dict(entries[0].files) != there):
            self._enter("found", "was there, not written from here")

    def _enter(self, action: Action, note: str) -> Entry:
        folder = self._ready()
        entries = self.entries()
        number = entries[0].number + 1 if entries else 1
        try:
            while True:
                entry = Entry(number, datetime.now(UTC).isoformat(timespec="seconds"), action, note, self.files())
                if _created(folder / f"{number:06d}.json", entry):
                    return entry
                number += 1  # another writer was first
        except OSError as error:
            raise CalibError(f"{folder}: cannot be written ({error.strerror or error})", exit_code=1) from None


def _is_ours(name: str, text: str) -> bool:
    return name not in _SIGNED or SIGNATURE in text.partition("\n")[0]


def _reason(note: str) -> str:
    if not note.strip():
        raise CalibError("say why in a few words: whoever reads the history next will want to know")
    return note.strip()


def _document(text: str | None) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
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
    except (OSError, ValueError, RecursionError):
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
    texts = {name: files[name] for name in FILES if isinstance(files.get(name), str)}
    kept = {name: text for name, text in texts.items() if _is_ours(name, text)}
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
        os.chmod(name, 0o644)  # noqa: PTH101 - mkstemp makes it private; whoever reads the configs reads why
        try:
            os.link(name, path)  # unlike a rename it refuses to replace
        except FileExistsError:
            return False
        return True
    finally:
        os.unlink(name)  # noqa: PTH108

"""Policies as they lie about: saved in a store, in files, in export folders and their histories.

`save` keeps what was tuned, `saved` finds it again. Leaves to others: comparing two (`calib.diff`), exporting one
(`calib.export`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calib.errors import CalibError
from calib.history import ConfigFolder
from calib.outcomes import Outcomes
from calib.policy import Policy, evaluate
from calib.policyfile import read_policy
from calib.provenance import Provenance
from calib.store import Store, load_outcomes
from calib.vllmyaml import read_start

__all__ = ["Saved", "provenance", "save", "saved", "without_routes"]

_COMPARED = ("accuracy", "think_rate", "p50", "p90", "p99", "tokens")
_AT_ENTRY = re.compile(r"(?P<folder>.*)@(?P<number>\d{1,6})", re.DOTALL)


@dataclass(frozen=True)
class Saved:
    """A policy with its evidence.

    Attributes
    ----------
    where : str
        What it was found by, in words.
    name : str
        Under which the store holds it, or what the file says.
    document : mapping
        As ``calib optimize`` saved it or as ``policy.json`` says it; its policy is valid.
    """

    where: str
    name: str
    document: Mapping[str, Any]


def save(store: Store, name: str, document: Mapping[str, Any]) -> str | None:
    """Save what ``calib optimize`` found, unless it found no policy and one is saved under the name.

    Parameters
    ----------
    store : Store
    name : str
    document : mapping
        With ``policy`` None where nothing met the targets.

    Returns
    -------
    str or None
        What stays in its place, in words; None where the document was saved.
    """
    if document.get("policy") is None:
        before = next((one for one in store.policies() if one.name == name), None)
        if before is not None and before.document.get("policy") is not None:
            limits = ", ".join(str(one.get("target")) for one in before.document.get("targets") or ())
            return (
                f"{name!r} stays as it was tuned on {before.created[:16].replace('T', ' ')} UTC "
                f"{f'for {limits}' if limits else 'without a target'}: this result has no policy, and was not saved"
            )
    store.save_policy(name, document)
    return None


def saved(name: str, store: Store | str | os.PathLike[str]) -> Saved:
    """The policy that a text names.

    Parameters
    ----------
    name : str
        ``DIR@N`` for entry N of an export folder's history; an export folder; a ``policy.json``; else the name of a
        policy in the store. ``./best`` is a folder or file, ``best`` is one only when the store has no such policy.
    store : Store, str or path
        An open one, or where it is.

    Raises
    ------
    CalibError
        Nothing goes by that name, or what does holds no policy.
    """
    if (match := _AT_ENTRY.fullmatch(name)) and Path(match["folder"]).is_dir():
        entry = ConfigFolder(match["folder"]).entry(int(match["number"]))
        text = entry.files.get("policy.json")
        if text is None:
            raise CalibError(f"{name}: that entry holds no policy.json; calib rollback {match['folder']} --list")
        return _in_file(f"{name} ({entry.note})", text.encode(), name)
    there = ""
    if os.sep not in name:
        location, held = _held(store)
        if name in held:
            return Saved(f"{name} in {location}", name, _valid(held[name], name))
        there = f"; {location} holds {', '.join(map(repr, sorted(held))) or 'no policy'}"
    path = Path(name)
    file = path / "policy.json" if path.is_dir() else path
    try:
        return _in_file(str(file), file.read_bytes(), file)
    except OSError as error:
        raise CalibError(
            f"{name!r} is neither a policy in a store nor a file or folder that can be read ({file}: "
            f"{error.strerror or error}){there}. Give a saved name, a policy.json, an export folder, or FOLDER@N"
        ) from None


def _in_file(where: str, content: bytes, file: str | os.PathLike[str]) -> Saved:
    document = read_policy(content, file)[1]
    return Saved(where, str(document.get("name") or Path(file).parent.name or "policy"), document)


def _held(store: Store | str | os.PathLike[str]) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Where a store is, and its policies by name; one that is not there holds none."""
    if isinstance(store, Store):
        return store.location, {policy.name: policy.document for policy in store.policies()}
    text = os.fspath(store)
    if "://" not in text and not Path(text).is_file():
        return text, {}
    with Store.open(text, must_exist=True) as opened:
        return _held(opened)


def _valid(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if document.get("policy") is None:
        raise CalibError(f"{name!r} holds no policy: no policy met its targets")
    Policy.from_dict(document["policy"])
    return document


# --- what the store knows of one --------------------------------------------------------------------------------------


def provenance(store: Store, document: Mapping[str, Any]) -> Provenance:
    """What the store knows of the model and the arm of a saved policy.

    Parameters
    ----------
    store : Store
    document : mapping
        What ``calib optimize`` saved.
    """
    known = Provenance(store.identity((document.get("fingerprints") or {}).get("model") or ""))
    if known.server != "vllm":
        return known
    arm = (document.get("policy") or {}).get("arm")
    return replace(known, start=_start(store.runs(), arm, known.identity))


def _start(runs: Iterable[Mapping[str, Any]], arm: str | None, identity: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Command of the newest run that started the arm's server, unless it serves another model than the policy's."""
    for run in runs:
        arms = run.get("arms")
        for told in arms if isinstance(arms, list) else ():
            start = told.get("start") if isinstance(told, Mapping) and told.get("name") == arm else None
            words = tuple(word for word in start if isinstance(word, str)) if isinstance(start, list) else ()
            if words and _serves(words, identity):
                return words
    return None


def _serves(start: Sequence[str], identity: Mapping[str, Any]) -> bool:
    """Whether a command serves the model of an identity, as far as it shows; one store may hold several models."""
    found = read_start(start)
    if found is None:
        return True  # a script: it is not said to be anything
    named = [found.values.get(flag) for flag in ("model", "served-model-name")]
    names = {name for value in named for name in (value if isinstance(value, list) else [value])}
    return identity.get("model") in names


def without_routes(store: Store, document: Mapping[str, Any]) -> dict[str, Any]:
    """What a policy with routes is worth where no request can take them: each question under its default policy.

    Parameters
    ----------
    store : Store
    document : mapping
        Of a policy with routes.

    Returns
    -------
    dict
        ``n`` questions; metrics ``with`` and ``without`` the routes, by name; ``unknown`` instead, saying why, when the
        store has no outcomes to tell from.
    """
    policy = Policy.from_dict(document["policy"])
    fingerprint = (document.get("fingerprints") or {}).get("model")
    try:
        outcomes = load_outcomes(store, model=fingerprint)
        return _compared(outcomes, policy)
    except CalibError as error:
        return {"unknown": str(error)}


def _compared(outcomes: Outcomes, policy: Policy) -> dict[str, Any]:
    both = {"with": policy, "without": replace(policy, routes={})}
    scores = {name: evaluate(outcomes, one).to_dict() for name, one in both.items()}
    return {"n": outcomes.n, **{name: {key: score[key] for key in _COMPARED} for name, score in scores.items()}}

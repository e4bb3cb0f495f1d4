"""``policy.json``: what it says, and reading it back.

The gateway reads the policy alone; everything else is the evidence for it, so that a file says by itself what it
promises, how sure that is, and for which model, prompt and questions. New keys may come within a schema version;
readers pass over those that they do not know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calib import __version__
from calib.errors import CalibError
from calib.knobs import ALWAYS_CARRIED, Knob
from calib.policy import Policy

__all__ = ["POLICY_SCHEMA", "dump_json", "load_policy_file", "policy_document", "read_policy"]

POLICY_SCHEMA = 1
"""Version of the form of ``policy.json``."""

FINGERPRINTS = ("model", "prompt", "questions", "store")
"""What a policy was tuned on: each a SHA-256, or null where it is not known."""

_EVIDENCE: Mapping[str, type] = {
    "verdict": str,
    "targets": list,
    "marks": list,
    "certificate": dict,
    "split": dict,
    "tune": dict,
    "test": dict,
    "baselines": dict,
    "envelope": dict,
    "study": dict,
    "warnings": list,
}
"""What ``calib optimize`` found, by name and JSON type; each may be null or missing."""

_CONFIDENCE = {
    "max": "max(p1): the largest entry of System 1's probabilities, recomputed by the reader",
    "margin": "the largest entry of System 1's probabilities minus the second, recomputed by the reader",
    "entropy": "1 - entropy(p1) / ln(number of options), recomputed by the reader from System 1's probabilities",
}
_CALIBRATED = ", after the temperatures of System 1"


def policy_document(
    document: Mapping[str, Any],
    policy: Policy,
    held: Sequence[Knob],
    *,
    carried: Collection[str] = (),
    prompt: str | None = None,
) -> dict[str, Any]:
    """The content of ``policy.json``.

    Parameters
    ----------
    document : mapping
        What ``calib optimize`` saved.
    policy : Policy
        The one in it.
    held : sequence of Knob
        Who holds each knob.
    carried : collection of str
        What clients send that a route may go by, beside the kind and the number of options.
    prompt : str, optional
        Fingerprint of the prompts under which the answers were collected.
    """
    known = {**(document.get("fingerprints") or {}), **({} if prompt is None else {"prompt": prompt})}
    study = document.get("study")
    ours = isinstance(study, Mapping) and study.get("policy") == policy.to_dict()
    return {
        "schema": POLICY_SCHEMA,
        "calib": __version__,
        "name": document.get("name"),
        "model": document.get("model"),
        "policy": policy.to_dict(),
        "confidence_definition": _CONFIDENCE[policy.confidence]
        + (_CALIBRATED if policy.calibration.changes("p1") else ""),
        "route_keys": [*ALWAYS_CARRIED, *sorted(set(carried) - {*ALWAYS_CARRIED})],
        "knobs": [asdict(knob) for knob in held],
        "fingerprints": {**dict.fromkeys(FINGERPRINTS), **known},
        # the trial that suggested this very policy; the exact optimum is mostly no trial's
        "trial": study.get("trial") if isinstance(study, Mapping) and ours else None,
        **{key: document.get(key) for key in _EVIDENCE},
    }


def load_policy_file(path: str | os.PathLike[str]) -> Policy:
    """Policy of a ``policy.json``.

    Raises
    ------
    CalibError
        Naming the file, when it is missing, no JSON, of a newer form, or holds no valid policy.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise CalibError(f"{path}: {error.strerror}; write one with: calib export best --out serve/") from None
    return read_policy(content, path)[0]


def read_policy(content: bytes, path: str | os.PathLike[str]) -> tuple[Policy, dict[str, Any]]:
    """Policy and whole document of the content of a ``policy.json``; raises as `load_policy_file`.

    Parameters
    ----------
    content : bytes
    path : path
        Names the file in errors.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CalibError(f"{path}: not JSON ({error}); write one with: calib export best --out serve/") from None
    if not isinstance(document, dict) or not isinstance(document.get("policy"), dict):
        raise CalibError(f"{path}: no field 'policy'; expected what calib export writes as policy.json")
    schema = document.get("schema")
    if schema != POLICY_SCHEMA:
        raise CalibError(
            f"{path}: schema {schema!r}, this calib {__version__} reads {POLICY_SCHEMA}; "
            "export again, or install the calib that wrote it"
        )
    try:
        policy = Policy.from_dict(document["policy"])
    except CalibError as error:
        raise CalibError(f"{path}: {error}") from None
    if strange := _strange(document):
        raise CalibError(f"{path}: {strange} is not as calib export writes it; export the policy again")
    return policy, document


def _strange(document: Mapping[str, Any]) -> str | None:
    """Evidence of another form than readers take it for; None when all that is there can be read."""
    for name, kind in {**_EVIDENCE, "fingerprints": dict, "name": str, "model": str}.items():
        if document.get(name) is not None and not isinstance(document[name], kind):
            return name
    if not all(isinstance(mark, str) for mark in document.get("marks") or ()):
        return "marks"
    targets = document.get("targets") or ()
    if not all(isinstance(one, dict) and isinstance(one.get("target"), str) for one in targets):
        return "targets"
    for name, share in {"split": "test_share", "certificate": "level"}.items():
        told = document.get(name)
        if told is not None and not (type(told.get(share)) in (int, float) and 0 <= told[share] < 1):
            return f"{name}.{share}"
    return None


def dump_json(document: Mapping[str, Any]) -> str:
    """Text of a JSON file: strict, indented, with a line end."""
    return json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n"

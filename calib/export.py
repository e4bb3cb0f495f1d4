"""Chosen policy to serve configs, with the evidence for it, and back.

A folder gets ``policy.json`` (read by ``calib serve``), ``serve.env`` (for the reference server's ``serve.sh`` and
``serve_decide.py``) and ``decide-defaults.json`` (request fields for clients). Each knob has one holder; the think
budget has none unless a gateway or the clients hold it, since no environment variable of the reference server sets it.
What that server cannot express is refused: it knows one temperature of System 1 for each kind (``calibration.json``), a
linear pool and the top probability; everything else needs the gateway, and then ``policy.json`` alone is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calib import __version__
from calib.errors import CalibError
from calib.policy import Policy
from calib.temperature import ANY

__all__ = [
    "HOLDERS",
    "POLICY_SCHEMA",
    "SERVER_KINDS",
    "Export",
    "Knob",
    "calibration_json",
    "export",
    "knobs",
    "load_policy_file",
    "refusals",
    "write_atomically",
]

POLICY_SCHEMA = 1
"""Version of the form of ``policy.json``."""

HOLDERS = ("gateway", "client")
"""Who can hold the think budget of each request."""

CALIBRATION_FILE = "calibration.json"
_FILES = ("policy.json", "serve.env", "decide-defaults.json", CALIBRATION_FILE)

SERVER_KINDS = ("noul", "choice", "score")
"""Kinds for which the reference server has a temperature of System 1."""

CONFIDENCE_DEFINITIONS = {
    "max": "max(p1): the largest entry of System 1's probabilities, recomputed by the reader",
    "margin": "the largest entry of System 1's probabilities minus the second, recomputed by the reader",
    "entropy": "1 - entropy(p1) / ln(number of options), recomputed by the reader from System 1's probabilities",
}
_CALIBRATED = ", after the temperatures of System 1"


@dataclass(frozen=True)
class Knob:
    """One knob of a policy and who must hold it.

    Attributes
    ----------
    knob : str
    value : str
    holder : {"server", "client", "gateway", "nobody"}
    how : str
        What to do, in words.
    """

    knob: str
    value: str
    holder: str
    how: str


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes
    ----------
    folder : str
    files : tuple of str
    knobs : tuple of Knob
    warnings : tuple of str
    refused : tuple of str
        Why there is no ``serve.env``: what the reference server cannot express. Empty when it was written.
    """

    folder: str
    files: tuple[str, ...]
    knobs: tuple[Knob, ...]
    warnings: tuple[str, ...]
    refused: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether every knob is held by somebody."""
        return all(knob.holder != "nobody" for knob in self.knobs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"done": self.done}


def knobs(policy: Policy, held_by: str | None = None) -> tuple[Knob, ...]:
    """Who holds each knob of the policy.

    Parameters
    ----------
    policy : Policy
    held_by : {"gateway", "client"}, optional
        Who adds the think budget to each request; nobody when left out.
    """
    if held_by is not None and held_by not in HOLDERS:
        raise CalibError(f"--held-by must be one of {', '.join(HOLDERS)}, got {held_by!r}")
    gateway = held_by == "gateway"
    if gateway:
        how = "calib serve --policy policy.json adds it to each request"
    elif held_by == "client":
        how = "each client sends the fields of decide-defaults.json"
    else:
        how = (
            "no variable of the server sets it (its default is unlimited): serve by the gateway, or let clients send it"
        )
    rule = "gateway" if gateway else "server"
    if refusals(policy):
        only = "only the gateway applies it: calib serve --policy policy.json"
        held = "gateway" if gateway else "nobody"
        special = {
            "confidence": (policy.confidence, policy.confidence != "max"),
            "temperatures": (json.dumps(policy.to_dict()["temperatures"]), policy.temperatures is not None),
            "pool": (policy.pool, policy.pool != "linear"),
        }
        return (
            Knob("threshold", repr(policy.threshold), held, only),
            Knob("mix", repr(policy.mix), held, only),
            *(Knob(name, value, held, only) for name, (value, needed) in special.items() if needed),
            Knob("think_budget", str(policy.think_budget), held, how if gateway else only),
            Knob("arm", policy.arm, "server", _arm_how(policy.arm)),
        )
    fitted = json.dumps(policy.to_dict()["temperatures"])
    return (
        Knob("threshold", repr(policy.threshold), rule, "policy.json" if gateway else "JEV_DECIDE_THRESHOLD"),
        Knob("mix", repr(policy.mix), rule, "policy.json" if gateway else "JEV_DECIDE_MIX (no request field sets it)"),
        *[Knob("temperatures", fitted, rule, "policy.json" if gateway else _CALIBRATION_HOW)]
        * (policy.temperatures is not None),
        Knob("think_budget", str(policy.think_budget), held_by or "nobody", how),
        Knob("arm", policy.arm, "server", _arm_how(policy.arm)),
    )


def _arm_how(arm: str) -> str:
    if arm in _MTP:
        return f"MTP={_MTP[arm]} for serve.sh"
    return "start the server the way this arm was collected"


_MTP = {"base": "0", "mtp": "1"}
_CALIBRATION_HOW = (
    "JEV_DECIDE_CALIBRATION names calibration.json; a gateway in front of such a server would apply them twice"
)


def refusals(policy: Policy) -> tuple[str, ...]:
    """What of the policy the reference server cannot express, each with the reason; empty when it can serve it."""
    found = []
    if policy.confidence != "max":
        found.append(f"confidence {policy.confidence!r}: the server thinks by the top probability of System 1 only")
    if policy.pool != "linear":
        found.append(f"pool {policy.pool!r}: the server mixes probabilities linearly")
    t = policy.calibration
    for stage, what in (
        ("p2", "System 2 after a finished thought"),
        ("cut", "System 2 after a cut thought"),
        ("final", "the answer after the mix"),
    ):
        if t.changes(stage):
            found.append(f"a temperature of {what}: the server has temperatures of System 1 only")
    if t.uniform.get("p1", 0.0) > 0:
        found.append("a share of the uniform distribution for System 1: the server knows temperatures only")
    by_number = sorted({key.partition(":")[0] for key in t.p1 if ":" in key})
    for kind in by_number:
        seen = {value for key, value in t.p1.items() if key.partition(":")[0] == kind}
        if len(seen) > 1:
            found.append(f"temperatures of {kind} by number of options: the server has one for each kind")
    return tuple(found)


def calibration_json(policy: Policy, server: Mapping[str, float]) -> dict[str, float]:
    """Content of the server's ``calibration.json``: the temperature of System 1 for each kind.

    Parameters
    ----------
    policy : Policy
    server : mapping of str to float
        The temperatures by kind under which System 1 was collected (``GET /v1/decide/info``): the policy's come on top
        of them, and temperatures multiply.

    Raises
    ------
    CalibError
        When the policy needs more than that, or a kind is missing.
    """
    _refuse(policy)
    missing = [kind for kind in SERVER_KINDS if not isinstance(server.get(kind), (int, float))]
    if missing:
        raise CalibError(
            f"calibration.json: the server's own temperature of {', '.join(missing)} is not known; it is in the answer "
            "to GET /v1/decide/info (calib doctor shows it)"
        )
    return {kind: server[kind] * _of_kind(policy, kind) for kind in SERVER_KINDS}


def _of_kind(policy: Policy, kind: str) -> float:
    """The one temperature of System 1 that a kind has (see `refusals`)."""
    table = policy.calibration.p1
    own = [value for key, value in table.items() if key.partition(":")[0] == kind]
    return own[0] if own else table.get(ANY, 1.0)


def _refuse(policy: Policy) -> None:
    reasons = refusals(policy)
    if reasons:
        raise CalibError(
            "serve.env: serve_decide.py cannot express this policy: "
            + "; ".join(reasons)
            + ". Serve it by the gateway: calib export NAME --out DIR --held-by gateway, calib serve --policy "
            "DIR/policy.json"
        )


def serve_env(policy: Policy, *, calibrated: bool = False) -> str:
    """Environment of the reference server: what it can hold, shell-quoted, with what it cannot hold on top.

    Parameters
    ----------
    policy : Policy
    calibrated : bool, default False
        Whether the server itself applies the policy's temperatures, from a ``calibration.json`` beside this file.

    Raises
    ------
    CalibError
        When the policy needs what the server cannot express (see `refusals`).
    """
    _refuse(policy)
    lines = [
        f"# WARNING: this file does not set the think budget ({policy.think_budget} tokens). No environment variable",
        "# of the server does, and its default is unlimited: the tuned latency holds only when each request carries",
        "# think_budget (decide-defaults.json) or passes the gateway (calib serve --policy policy.json).",
    ]
    if policy.routes:
        lines.append(
            f"# WARNING: {len(policy.routes)} routes of the policy are left out: only the gateway applies them."
        )
    values = {
        "JEV_DECIDE_THRESHOLD": repr(float(policy.threshold)),
        "JEV_DECIDE_MIX": repr(float(policy.mix)),
        "JEV_DECIDE_THINKING": "off" if policy.threshold == 0 else "auto",
    }
    if calibrated:
        lines.append("# calibration.json lies beside this file: write its path as the server sees it.")
        values["JEV_DECIDE_CALIBRATION"] = CALIBRATION_FILE
    elif policy.temperatures is not None:
        lines.append("# The threshold means the confidence that the gateway calibrates: without it do not use this.")
    if policy.arm in _MTP:
        values["MTP"] = _MTP[policy.arm]
    else:
        lines.append(
            f"# The arm {json.dumps(policy.arm)} is not one that serve.sh knows: start it as it was collected."
        )
    return "\n".join([*lines, *(f"{name}={shlex.quote(value)}" for name, value in values.items())]) + "\n"


def decide_defaults(policy: Policy) -> dict[str, Any]:
    """Request fields that a client adds to ``POST /v1/decide``; mix is not among them, no request field sets it."""
    thinking = "off" if policy.threshold == 0 else "auto"
    return {"thinking": thinking, "threshold": policy.threshold, "think_budget": policy.think_budget}


def export(
    document: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    held_by: str | None = None,
    server_temperatures: Mapping[str, float] | None = None,
) -> Export:
    """Write the serve configs of a tuned policy.

    ``policy.json`` always; ``serve.env`` and ``decide-defaults.json`` only when the reference server can express the
    policy, and ``calibration.json`` when it is to apply its temperatures. A file of these names that an earlier export
    left and this one does not write is taken away: it would contradict the policy.

    Parameters
    ----------
    document : mapping
        What ``calib optimize`` saved: the policy with its verdict, targets, intervals, marks and baselines.
    folder : path
        Made when missing. Files are replaced whole, or not at all.
    held_by : {"gateway", "client"}, optional
        Who holds the think budget. The gateway applies the policy's temperatures itself, on a server as it was.
    server_temperatures : mapping of str to float, optional
        Temperatures by kind under which System 1 was collected (see `calibration_json`).

    Raises
    ------
    CalibError
        When the document holds no policy, or the folder cannot be written.
    """
    if document.get("policy") is None:
        raise CalibError(
            f"{document.get('name', 'this result')!r} holds no policy: no policy meets its targets. "
            "Relax a target (calib optimize shows the nearest), then export again"
        )
    policy = Policy.from_dict(document["policy"])
    held = knobs(policy, held_by)
    text = {"policy.json": _dump(policy_document(document, policy, held))}
    by_server = policy.temperatures is not None and held_by != "gateway"
    refused = list(refusals(policy))
    if not refused:
        try:
            if by_server:
                text[CALIBRATION_FILE] = _dump(calibration_json(policy, server_temperatures or {}))
            text["serve.env"] = serve_env(policy, calibrated=by_server)
            text["decide-defaults.json"] = _dump(decide_defaults(policy))
        except CalibError as error:
            refused.append(str(error))
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibError(f"--out {out}: {error.strerror or error}; name a folder that can be made") from None
    write_atomically({out / name: content for name, content in text.items()})
    for name in set(_FILES) - set(text):
        (out / name).unlink(missing_ok=True)
    warnings = _warnings(document, policy)
    if refused:
        reasons = "; ".join(refused)
        warnings += (f"no serve.env: {reasons}. Serve policy.json by the gateway (--held-by gateway, calib serve)",)
    elif by_server:
        warnings += (
            "calibration.json changes the server's own temperatures: answers collected before count as another model's",
        )
    return Export(str(out), tuple(text), held, warnings, tuple(refused))


def _warnings(document: Mapping[str, Any], policy: Policy) -> tuple[str, ...]:
    found = []
    if document.get("verdict") != "certified":
        found.append(f"the verdict of this policy is {document.get('verdict')!r}, not certified")
    if "estimated" in document.get("marks", ()):
        found.append("its latency is estimated, not measured")
    if "simulated" in document.get("marks", ()):
        found.append("its numbers come from a simulated model: they say nothing about a real server")
    if policy.routes:
        found.append("serve.env and decide-defaults.json hold the default policy only: routes need the gateway")
    return tuple(found)


def policy_document(document: Mapping[str, Any], policy: Policy, held: Sequence[Knob]) -> dict[str, Any]:
    """The content of ``policy.json``."""
    evidence = ("verdict", "targets", "marks", "tune", "test", "baselines", "fingerprints", "study", "warnings")
    return {
        "schema": POLICY_SCHEMA,
        "calib": __version__,
        "name": document.get("name"),
        "model": document.get("model"),
        "policy": policy.to_dict(),
        "confidence_definition": CONFIDENCE_DEFINITIONS[policy.confidence]
        + (_CALIBRATED if policy.calibration.changes("p1") else ""),
        "knobs": [asdict(knob) for knob in held],
        **{key: document.get(key) for key in evidence},
    }


def load_policy_file(path: str | os.PathLike[str]) -> Policy:
    """Policy of a ``policy.json``.

    Raises
    ------
    CalibError
        Naming the file, when it is missing, no JSON, of a newer form, or holds no valid policy.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibError(f"{path}: {error.strerror}; write one with: calib export best --out serve/") from None
    except ValueError as error:
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
        return Policy.from_dict(document["policy"])
    except CalibError as error:
        raise CalibError(f"{path}: {error}") from None


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def write_atomically(files: Mapping[Path, str]) -> None:
    """Write texts beside their places first, then rename all: a full disk or a crash leaves no half file.

    Raises
    ------
    CalibError
        Naming the file that cannot be written; the old files stay.
    """
    staged: list[tuple[str, Path]] = []
    path = next(iter(files), Path())
    try:
        for path, content in files.items():
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            staged.append((name, path))
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o644)  # noqa: PTH101 - mkstemp makes it private; a server of another user reads it
        for name, path in staged:
            os.replace(name, path)  # noqa: PTH105 - the pair of names is what is at hand
    except OSError as error:
        raise CalibError(f"{path}: cannot be written ({error.strerror or error})", exit_code=1) from None
    finally:
        for name, _ in staged:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108

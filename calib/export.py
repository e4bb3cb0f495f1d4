"""Chosen policy to serve configs, with the evidence for it, into a folder that remembers what it held before.

Puts the files together (`calib.policyfile`, `calib.decidefiles`, `calib.vllmyaml`, `calib.guide`), refuses what must
not be served, and hands them to `calib.history`: one way for the command and the dashboard. Reads no store: what a
store knows comes in as a `Provenance`. What the server cannot express (`calib.knobs`) needs the gateway: then there is
no ``serve.env``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from calib.decidefiles import CALIBRATION_FILE, calibration_json, decide_defaults, serve_env
from calib.diff import Change, changes
from calib.errors import CalibError
from calib.guide import guide
from calib.history import SIGNATURE, ConfigFolder
from calib.knobs import Knob, knobs, refusals, route_keys_of, uncarried
from calib.outcomes import ESTIMATED, SIMULATED
from calib.policy import Policy
from calib.policyfile import dump_json, policy_document
from calib.provenance import Provenance
from calib.vllmyaml import vllm_yaml

__all__ = ["Export", "Running", "export", "other_model", "unroutable"]

_UNKNOWN = Provenance()


@dataclass(frozen=True)
class Running:
    """The server that is to serve the policy: where, and which model answers there."""

    url: str
    model: str
    fingerprint: str


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
        Why there is no ``serve.env``: what the server cannot express. Empty when it was written.
    unchanged : bool
        Whether every file was there already, to the letter: then nothing was written and nothing entered.
    entry : int or None
        Its number in the history of the folder; None when nothing was entered.
    changes : tuple of Change
        Against the policy that was there.
    """

    folder: str
    files: tuple[str, ...]
    knobs: tuple[Knob, ...]
    warnings: tuple[str, ...]
    refused: tuple[str, ...] = ()
    unchanged: bool = False
    entry: int | None = None
    changes: tuple[Change, ...] = ()

    @property
    def done(self) -> bool:
        """Whether every knob is held by somebody."""
        return all(knob.holder != "nobody" for knob in self.knobs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        told = [asdict(change) | {"differs": change.differs} for change in self.changes]
        return asdict(self) | {"done": self.done, "changes": told}


def export(
    document: Mapping[str, Any],
    folder: str | os.PathLike[str] | ConfigFolder,
    *,
    note: str | None = None,
    held_by: str | None = None,
    origin: Provenance = _UNKNOWN,
    route_keys: Collection[str] = (),
    running: Running | None = None,
    allow_simulated: bool = False,
    allow_other_model: bool = False,
) -> Export:
    """Write the serve configs of a tuned policy.

    ``policy.json`` and ``README.md`` always; ``serve.env`` and ``decide-defaults.json`` only when the reference server
    can express the policy, ``calibration.json`` when it is to apply its temperatures, ``vllm.yaml`` unless the model is
    known to be served by the reference server. A config file that an earlier export left and this one does not write is
    taken away: it would contradict the policy.

    Parameters
    ----------
    document : mapping
        What ``calib optimize`` saved: the policy with its verdict, targets, intervals, marks and baselines.
    folder : path or ConfigFolder
        Made when missing. Files are replaced whole, or not at all, and what was there is kept in its history.
    note : str, optional
        Why, for the history; the name of the policy when left out.
    held_by : {"gateway", "client"}, optional
        Who holds the think budget. The gateway applies the policy's temperatures itself, on a server as it was.
    origin : Provenance, optional
        What is known of the model and its server.
    route_keys : collection of str
        What requests carry that a route may go by, beside their kind and the number of their options: ``dataset``.
    running : Running, optional
        The server that is to serve it.
    allow_simulated : bool, default False
        Whether the numbers of a simulated model may be written.
    allow_other_model : bool, default False
        Whether the policy may be of another model than the policy in the folder, or than the running server's.

    Raises
    ------
    CalibError
        When the document holds no policy, or one that must not be served as it is, or the folder cannot be written.
    """
    if document.get("policy") is None:
        raise CalibError(
            f"{document.get('name', 'this result')!r} holds no policy: no policy meets its targets. "
            "Relax a target (calib optimize shows the nearest), then export again"
        )
    policy = Policy.from_dict(document["policy"])
    if SIMULATED in (document.get("marks") or ()) and not allow_simulated:
        raise CalibError(
            "the numbers of this policy come from a simulated model and say nothing about a real server; write it all "
            "the same with --allow-simulated"
        )
    if reason := unroutable(policy, route_keys):
        raise CalibError(reason)
    configs = folder if isinstance(folder, ConfigFolder) else ConfigFolder(folder)
    now = configs.current()
    asked = None if origin.imported else running  # imported outcomes do not tell which server's they are
    if not allow_other_model and (reason := other_model(document, now, asked)):
        raise CalibError(f"{reason}. Tune on the outcomes of that model, or write it all the same: --allow-other-model")

    held = knobs(policy, held_by, server=origin.server)
    content = policy_document(document, policy, held, carried=route_keys, prompt=origin.prompt)
    text, refused = _texts(content, policy, held_by, origin)
    by_server = CALIBRATION_FILE in text
    text["README.md"] = guide(content, policy, held, tuple(text), refused)
    warnings = _warnings(document, policy, held_by)
    if running is not None and origin.imported:
        warnings += (f"the outcomes were imported: nobody can tell whether {running.url} serves their model",)
    if refused:
        reasons = "; ".join(refused)
        warnings += (f"no serve.env: {reasons}. Serve policy.json by the gateway (--held-by gateway, calib serve)",)
    elif by_server:
        warnings += (
            "calibration.json changes the server's own temperatures: answers collected before count as another model's",
        )
    kept = configs.foreign()
    warnings += tuple(f"{name} there is not calib's and stays; calib's was not written" for name in kept)
    text = {name: one for name, one in text.items() if name not in kept}
    unchanged = configs.files() == text
    entry = None if unchanged else configs.write(text, f"calib export {document.get('name')}" if note is None else note)
    return Export(
        folder=str(configs.folder if isinstance(folder, ConfigFolder) else folder),
        files=tuple(text),
        knobs=held,
        warnings=warnings,
        refused=tuple(refused),
        unchanged=unchanged,
        entry=None if entry is None else entry.number,
        changes=tuple(changes(now, document)),
    )


def unroutable(policy: Policy, carried: Collection[str] = ()) -> str:
    """Why some routes of a policy would never be taken; empty when all can be.

    Parameters
    ----------
    policy : Policy
    carried : collection of str
        What requests carry beside their kind and the number of their options.
    """
    missing = uncarried(policy, carried)
    if not missing:
        return ""
    lost = sum(key.partition("=")[0] in missing for key in policy.routes)
    return (
        f"{lost} of {len(policy.routes)} routes go by {', '.join(missing)}, and requests carry only "
        f"{', '.join(sorted({'kind', 'n_options', *carried}))}: those questions would be answered under the default "
        f"policy. If the clients send it with each request, say so: --route-keys {','.join(route_keys_of(policy))}; "
        "else tune one policy for all: calib optimize --routes none"
    )


def other_model(document: Mapping[str, Any], now: Mapping[str, Any] | None, running: Running | None = None) -> str:
    """Why a policy is of another model than what is there; empty when it is not, or when that is not known.

    Parameters
    ----------
    document : mapping
        Of the policy.
    now : mapping or None
        ``policy.json`` as it is.
    running : Running, optional
        The server that is to serve it.
    """
    ours = _fingerprint(document)
    if ours is None:
        return ""
    tuned = f"the policy was tuned for {document.get('model')} ({ours[:8]})"
    if running is not None and running.fingerprint != ours:
        why = " under the same name: prompt, sampling, temperatures or the decision head differ"
        same = why if running.model == document.get("model") else ""
        return f"{tuned}, and {running.url} serves {running.model} ({running.fingerprint[:8]}){same}"
    theirs = _fingerprint(now or {})
    if theirs is not None and theirs != ours:
        return f"{tuned}, and the policy in the folder is for {(now or {}).get('model')} ({theirs[:8]})"
    return ""


def _fingerprint(document: Mapping[str, Any]) -> str | None:
    known = document.get("fingerprints")
    found = known.get("model") if isinstance(known, Mapping) else None
    return found if isinstance(found, str) and found else None


def _texts(
    content: Mapping[str, Any], policy: Policy, held_by: str | None, origin: Provenance
) -> tuple[dict[str, str], list[str]]:
    """Text of each file but the guide, and why there is no ``serve.env``."""
    text = {"policy.json": dump_json(content)}
    by_server = policy.temperatures is not None and held_by != "gateway"
    refused = list(refusals(policy, origin.server))
    if not refused:
        try:
            if by_server:
                text[CALIBRATION_FILE] = dump_json(calibration_json(policy, origin.temperatures))
            text["serve.env"] = serve_env(policy, calibrated=by_server)
            text["decide-defaults.json"] = dump_json(decide_defaults(policy))
        except CalibError as error:
            refused.append(str(error))
    if origin.server != "decide":
        flags = vllm_yaml(policy.arm, origin.start, root=origin.root, served=origin.served)
        text["vllm.yaml"] = f"# {SIGNATURE}\n{flags}"
    return text, refused


def _warnings(document: Mapping[str, Any], policy: Policy, held_by: str | None) -> tuple[str, ...]:
    found = []
    marks = document.get("marks") or ()
    if document.get("verdict") != "certified":
        found.append(f"the verdict of this policy is {document.get('verdict')!r}, not certified")
    if ESTIMATED in marks:
        found.append("its latency is estimated, not measured")
    if SIMULATED in marks:
        found.append("its numbers come from a simulated model: they say nothing about a real server")
    if policy.routes and held_by != "gateway":
        found.append("serve.env and decide-defaults.json hold the default policy only: routes need the gateway")
    return tuple(found)

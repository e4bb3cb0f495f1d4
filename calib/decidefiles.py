"""What the reference server and its clients read: ``serve.env``, ``calibration.json``, ``decide-defaults.json``.

Leaves to others: who holds what (`calib.knobs`), where it is written (`calib.export`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from calib.errors import CalibError
from calib.knobs import MTP, refusals
from calib.policy import Policy
from calib.temperature import ANY

__all__ = ["CALIBRATION_FILE", "SERVER_KINDS", "calibration_json", "decide_defaults", "serve_env"]

CALIBRATION_FILE = "calibration.json"

SERVER_KINDS = ("noul", "choice", "score")
"""Kinds for which the reference server has a temperature of System 1."""


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
        When the policy needs what the server cannot express (see `calib.knobs.refusals`).
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
    if policy.arm in MTP:
        values["MTP"] = MTP[policy.arm]
    else:
        lines.append(
            f"# The arm {json.dumps(policy.arm)} is not one that serve.sh knows: start it as it was collected."
        )
    return "\n".join([*lines, *(f"{name}={shlex.quote(value)}" for name, value in values.items())]) + "\n"


def decide_defaults(policy: Policy) -> dict[str, Any]:
    """Request fields that a client adds to ``POST /v1/decide``.

    Mix is not among them: no request field sets it. Nor is a deadline: the reference server drops fields that it does
    not know without a word, so a client would believe in a limit that nobody keeps; the gateway takes it from
    ``policy.json``.
    """
    thinking = "off" if policy.threshold == 0 else "auto"
    return {"thinking": thinking, "threshold": policy.threshold, "think_budget": policy.think_budget}


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
    """The one temperature of System 1 that a kind has (see `calib.knobs.refusals`)."""
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

"""Who must hold each knob of a policy, and what a server cannot hold at all.

Each knob has one holder. The think budget has none unless a gateway or the clients hold it, since no environment
variable of the reference server sets it. What that server cannot express is refused with the reason: it knows one
temperature of System 1 for each kind, a linear pool, the top probability and tokens; a stock vLLM server knows nothing
of a policy. All of that needs the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from calib.errors import CalibError
from calib.policy import Policy

__all__ = [
    "ALWAYS_CARRIED",
    "HOLDERS",
    "MTP",
    "ROUTE_KEYS",
    "Knob",
    "knobs",
    "refusals",
    "route_keys_of",
    "uncarried",
]

HOLDERS = ("gateway", "client")
"""Who can hold the think budget of each request."""

MTP: Mapping[str, str] = {"base": "0", "mtp": "1"}
"""``MTP`` of ``serve.sh`` for the arms that it knows."""

ALWAYS_CARRIED = ("kind", "n_options")
"""What a route may go by that every request carries: its kind, and the number of its options."""

ROUTE_KEYS = ("dataset", *ALWAYS_CARRIED)
"""What a route may go by; the dataset is in a request only when its client sends that field."""


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


def knobs(policy: Policy, held_by: str | None = None, *, server: str | None = None) -> tuple[Knob, ...]:
    """Who holds each knob of the policy.

    Parameters
    ----------
    policy : Policy
    held_by : {"gateway", "client"}, optional
        Who adds the think budget to each request; nobody when left out.
    server : {"decide", "vllm"}, optional
        What serves the model: the reference server, taken for granted when left out, or a stock vLLM.
    """
    if held_by is not None and held_by not in HOLDERS:
        raise CalibError(f"--held-by must be one of {', '.join(HOLDERS)}, got {held_by!r}")
    gateway = held_by == "gateway"
    special = bool(refusals(policy, server))
    held = "gateway" if gateway else "nobody" if special else "server"
    only = "only the gateway applies it: calib serve --policy policy.json"

    def of_rule(knob: str, value: str, at_server: str) -> Knob:
        return Knob(knob, value, held, only if special else "policy.json" if gateway else at_server)

    found = [
        of_rule("threshold", repr(policy.threshold), "JEV_DECIDE_THRESHOLD, with JEV_DECIDE_THINKING"),
        of_rule("mix", repr(policy.mix), "JEV_DECIDE_MIX (no request field sets it)"),
    ]
    if policy.confidence != "max":
        found.append(of_rule("confidence", policy.confidence, ""))
    if policy.temperatures is not None:
        found.append(of_rule("temperatures", json.dumps(policy.to_dict()["temperatures"]), _CALIBRATION_HOW))
    if policy.pool != "linear":
        found.append(of_rule("pool", policy.pool, ""))
    if policy.deadline is not None:
        found.append(of_rule("deadline", f"{policy.deadline:g} s, then {_ON_DEADLINE[policy.on_deadline]}", ""))
    if policy.routes:
        by = ", ".join(route_keys_of(policy))
        found.append(Knob("routes", f"{len(policy.routes)} by {by}", "gateway" if gateway else "nobody", only))
    limit = Knob("think_budget", str(policy.think_budget), held_by or "nobody", _how(held_by))
    found += [
        replace(limit, holder="nobody", how=only) if special and not gateway else limit,
        Knob("arm", policy.arm, "server", _arm_how(policy.arm, server)),
    ]
    return tuple(found)


def _how(held_by: str | None) -> str:
    if held_by == "gateway":
        return "calib serve --policy policy.json adds it to each request"
    if held_by == "client":
        return "each client sends the fields of decide-defaults.json"
    return "no variable of the server sets it (its default is unlimited): serve by the gateway, or let clients send it"


def _arm_how(arm: str, server: str | None) -> str:
    if server == "vllm":
        return "vllm serve --config vllm.yaml"
    if arm in MTP:
        return f"MTP={MTP[arm]} for serve.sh"
    return "start the server the way this arm was collected"


_ON_DEADLINE = {"system2": "the cut thought is read", "system1": "System 1 answers"}
_CALIBRATION_HOW = (
    "JEV_DECIDE_CALIBRATION names calibration.json; a gateway in front of such a server would apply them twice"
)


def refusals(policy: Policy, server: str | None = None) -> tuple[str, ...]:
    """What of the policy the server itself cannot hold, each with the reason; empty when it can serve it.

    Routes are not among them: without them the server can still hold the default policy.

    Parameters
    ----------
    policy : Policy
    server : {"decide", "vllm"}, optional
        As for `knobs`.
    """
    if server == "vllm":
        return ("a stock vLLM server has no POST /v1/decide and knows neither threshold nor mix",)
    found = []
    if policy.confidence != "max":
        found.append(f"confidence {policy.confidence!r}: the server thinks by the top probability of System 1 only")
    if policy.pool != "linear":
        found.append(f"pool {policy.pool!r}: the server mixes probabilities linearly")
    if policy.deadline is not None:
        found.append(f"a deadline of {policy.deadline:g} s: the server limits a thought in tokens only, not in seconds")
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


def route_keys_of(policy: Policy) -> tuple[str, ...]:
    """What the routes of a policy go by: ``dataset``, ``kind``, ``n_options``; sorted, each once."""
    return tuple(sorted({key.partition("=")[0] for key in policy.routes}))


def uncarried(policy: Policy, carried: Collection[str]) -> tuple[str, ...]:
    """Keys of the policy's routes that requests do not carry, so that those routes would never be taken.

    Parameters
    ----------
    policy : Policy
    carried : collection of str
        Keys that clients send beside those of `ALWAYS_CARRIED`.

    Raises
    ------
    CalibError
        A key that no route can go by.
    """
    if strange := sorted(set(carried) - {*ROUTE_KEYS}):
        raise CalibError(f"--route-keys {strange[0]}: a route goes by one of {', '.join(ROUTE_KEYS)}")
    return tuple(key for key in route_keys_of(policy) if key not in {*ALWAYS_CARRIED, *carried})

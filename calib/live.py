"""Is a policy live: each knob as a running server or gateway has it, beside what it should be.

Asks and changes nothing. What a server does not tell stays unknown and is not taken for live. Leaves to others: how a
server is asked (`calib.engine`), who should hold what (`calib.knobs`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from calib.decidefiles import calibration_json
from calib.engine import prometheus
from calib.engine.auto import probe
from calib.engine.base import AskFailed, EngineInfo
from calib.engine.decide import DecideEngine
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from calib.export import Running
from calib.knobs import MTP, knobs, refusals
from calib.policy import Policy
from calib.provenance import Provenance
from calib.vllmyaml import NEEDED, read_start, speculates

__all__ = ["Live", "LiveKnob", "check"]

_SAME = 1e-9
_PREFIX_CACHING = re.compile(r'vllm:cache_config_info\{[^}]*enable_prefix_caching="(?P<on>True|False)"')
_GATEWAY = "calib serve --policy policy.json --upstream URL holds it"


@dataclass(frozen=True)
class LiveKnob:
    """One knob, there and wanted.

    Attributes
    ----------
    knob, wanted : str
    there : str or None
        None where the server does not tell.
    live : bool or None
        None where it cannot be told.
    how : str
        What to do, or why it cannot be told; empty for one that is live.
    """

    knob: str
    wanted: str
    there: str | None
    live: bool | None
    how: str = ""


@dataclass(frozen=True)
class Live:
    """What a server was found to hold.

    Attributes
    ----------
    url : str
        Without a login.
    what : {"gateway", "decide", "vllm"}
    running : Running
        Which model answers.
    version : str or None
        Of vLLM, or of the gateway.
    knobs : tuple of LiveKnob
    notes : tuple of str
    """

    url: str
    what: str
    running: Running
    version: str | None
    knobs: tuple[LiveKnob, ...]
    notes: tuple[str, ...] = ()

    @property
    def live(self) -> bool | None:
        """Whether every knob is; None when none is surely not, and some cannot be told."""
        states = [knob.live for knob in self.knobs]
        return False if False in states else None if None in states else True

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"live": self.live, **asdict(self), "notes": list(self.notes)}


async def check(
    url: str,
    document: Mapping[str, Any],
    *,
    origin: Provenance | None = None,
    held_by: str | None = None,
    arm: str | None = None,
    vllm: Mapping[str, Any] | None = None,
    timeout: float = 30.0,
    api_key_env: str | None = None,
) -> Live:
    """Ask a server what it holds of a policy.

    Parameters
    ----------
    url : str
        A gateway, a reference server or a stock vLLM.
    document : mapping
        Of the policy, as ``calib optimize`` saved it.
    origin : Provenance, optional
        What is known of the model that it was tuned for.
    held_by : {"gateway", "client"}, optional
        Who is to hold the think budget.
    arm : str, optional
        Which arm the server was started as, where it does not tell.
    vllm : mapping, optional
        How a stock vLLM is asked (``prompt``, ``sampling``, ``seed``): part of the fingerprint.
    timeout : float
        Seconds that one request may take.
    api_key_env : str, optional
        NAME of the environment variable that holds the server's key.

    Raises
    ------
    CalibError
        Nothing answers there, or nothing that calib can ask.
    """
    policy, origin = Policy.from_dict(document["policy"]), origin or Provenance()
    engine = await probe(url, vllm=vllm or {}, timeout=timeout, retries=1, api_key_env=api_key_env)
    try:
        assert isinstance(engine, (DecideEngine, VllmEngine))
        info = await engine.info()
        metrics = await _metrics(engine)
        shown = engine.client.url.rstrip("/")
    finally:
        await engine.close()
    asked = _Asked(policy, origin, info, metrics, held_by, arm)
    own = info.raw.get("policy")
    if isinstance(own, Mapping):
        what, found = "gateway", asked.of_gateway(own)
    elif isinstance(engine, VllmEngine):
        what, found = "vllm", asked.of_vllm()
    else:
        what, found = "decide", asked.of_decide()
    version = info.raw.get("gateway" if what == "gateway" else "version")
    fingerprint = replace(info, identity=_engines_own(info.identity)).fingerprint
    running = Running(shown, info.model, fingerprint)
    rows = (asked.model(document, running), *found)
    return Live(shown, what, running, version if isinstance(version, str) else None, rows, tuple(asked.notes(running)))


async def _metrics(engine: DecideEngine | VllmEngine) -> str:
    try:
        return str((await engine.client.get_text("/metrics")).data)
    except AskFailed:
        return ""


def _engines_own(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a gateway's policy adds to its engine's identity."""
    return {name: value for name, value in identity.items() if name != "gateway_temperatures"}


class _Asked:
    """One server's answers, compared with one policy."""

    def __init__(
        self, policy: Policy, origin: Provenance, info: EngineInfo, metrics: str, held_by: str | None, arm: str | None
    ) -> None:
        self.policy, self.origin, self.info, self.metrics = policy, origin, info, metrics
        self.held_by, self.arm = held_by, arm
        self.wanted = {knob.knob: knob.value for knob in knobs(policy, "gateway")}

    def of_gateway(self, own: Mapping[str, Any]) -> Iterator[LiveKnob]:
        """A gateway tells its whole policy."""
        names = {field.name for field in fields(Policy)}
        try:
            there = Policy.from_dict({name: value for name, value in own.items() if name in names})
        except CalibError:  # of another version
            there = None
        again = "let the gateway read this policy.json: calib serve --policy policy.json"
        plain = {} if there is None else there.to_dict()
        usual = {"deadline": None, "on_deadline": "system2"}
        for name, value in (usual | self.policy.to_dict()).items():
            held = plain.get(name, usual.get(name))
            plainest = name in usual or name in ("confidence", "routes", "temperatures", "pool")
            if there is not None and plainest and held == value == (usual | Policy().to_dict())[name]:
                continue  # neither has it
            live = there is not None and _same(held, value)
            shown = None if there is None else _shown(held)
            yield LiveKnob(name, self.wanted.get(name, _shown(value)), shown, live, "" if live else again)

    def of_decide(self) -> Iterator[LiveKnob]:
        """The reference server tells its defaults; what a policy needs beyond them only a gateway can hold."""
        defaults = self.info.raw.get("defaults")
        told = defaults if isinstance(defaults, Mapping) else {}
        env = "read serve.env and start the server again"
        yield self._compared("threshold", self.policy.threshold, self.info.threshold, env)
        yield self._compared("mix", self.policy.mix, self.info.mix, env)
        mode = "off" if self.policy.threshold == 0 else "auto"
        yield self._compared("thinking", mode, told.get("thinking"), f"{env}, or let clients send thinking: {mode}")
        yield self._budget(told.get("think_budget"))
        if refusals(self.policy) or self.policy.routes:
            for name in ("confidence", "temperatures", "pool", "deadline", "routes"):
                if name in self.wanted:
                    yield LiveKnob(name, self.wanted[name], "none", live=False, how=_GATEWAY)
        elif self.policy.temperatures is not None:
            yield self._temperatures()
        yield self._arm()

    def of_vllm(self) -> Iterator[LiveKnob]:
        """A stock vLLM tells how it reads; it knows nothing of a policy."""
        for name, value in self.wanted.items():
            if name != "arm":
                yield LiveKnob(name, value, "none", live=False, how=_GATEWAY)
        flags = "start it with vllm.yaml"
        start = read_start(self.origin.start) if self.origin.start is not None else None
        given: dict[str, Any] = {**NEEDED, **({} if start is None else start.values)}
        mode = {"processed": "processed_logprobs", "raw": "raw_logprobs"}.get(str(self.info.raw.get("logprobs")))
        yield self._compared("logprobs-mode", given["logprobs-mode"], mode, flags)
        most, needed = self.info.raw.get("max_logprobs"), str(given["max-logprobs"])
        enough = int(most) >= min(int(needed) % 2**31, 256) if isinstance(most, int) and _whole(needed) else None
        shown = None if most is None else f"{most}{' or more' if enough else ''}"
        yield LiveKnob("max-logprobs", needed, shown, enough, "" if enough else flags)
        match = _PREFIX_CACHING.search(self.metrics)
        caches = None if match is None else match["on"] == "True"
        wants = not (start is not None and "no-enable-prefix-caching" in start.values)
        yield self._compared("enable-prefix-caching", wants, caches, flags)
        yield self._arm()

    def model(self, document: Mapping[str, Any], running: Running) -> LiveKnob:
        """Whether it is the model that the policy was tuned for."""
        wanted = (document.get("fingerprints") or {}).get("model")
        name = f"{document.get('model')} ({str(wanted)[:8]})"
        there = f"{running.model} ({running.fingerprint[:8]})"
        if self.origin.imported or not isinstance(wanted, str):
            how = "the outcomes were imported: they do not tell which server is theirs"
            return LiveKnob("model", str(document.get("model")), there, None, how)
        live = running.fingerprint in (wanted, self._calibrated())
        return LiveKnob("model", name, there, live, "" if live else "serve the model that was collected")

    def notes(self, running: Running) -> Iterator[str]:
        """In what the two models differ."""
        ours, theirs = self.origin.identity, _engines_own(self.info.identity)
        if ours and not self.origin.imported and ours != theirs and running.fingerprint != self._calibrated():
            names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
            shown = "; ".join(f"{name}: {theirs.get(name)!r}, collected with {ours.get(name)!r}" for name in names[:3])
            yield f"the model there differs in {shown}"
        if self.policy.deadline is not None and self.info.raw.get("keeps_deadline") is False:
            yield "the engine behind the gateway cannot close a thought: at the deadline System 1 answers"
        if self.info.simulated:
            yield "the server is simulated: no real model answers"

    # --- one knob -----------------------------------------------------------------------------------------------------

    def _compared(self, knob: str, wanted: Any, there: Any, how: str) -> LiveKnob:
        live = None if there is None else _same(there, wanted)
        why = "" if live else how if live is False else "the server does not tell"
        return LiveKnob(knob, _shown(wanted), None if there is None else _shown(there), live, why)

    def _budget(self, there: Any) -> LiveKnob:
        wanted, shown = str(self.policy.think_budget), "no limit" if there is None else str(there)
        if there == self.policy.think_budget:
            return LiveKnob("think_budget", wanted, shown, live=True)
        if self.held_by == "client":
            how = "each client has to send it (decide-defaults.json): that does not show here"
            return LiveKnob("think_budget", wanted, shown, None, how)
        how = f"no variable sets it: {_GATEWAY}, or clients send decide-defaults.json (--held-by client)"
        return LiveKnob("think_budget", wanted, shown, live=False, how=how)

    def _temperatures(self) -> LiveKnob:
        there, wanted = self.info.raw.get("temperatures"), self._expected()
        if wanted is None:
            how = "the temperatures under which System 1 was collected are not known"
            return LiveKnob("temperatures", self.wanted["temperatures"], _shown(there), None, how)
        return self._compared("temperatures", wanted, there, "name calibration.json by JEV_DECIDE_CALIBRATION")

    def _expected(self) -> dict[str, float] | None:
        """What a server that applies the policy's temperatures tells of its own."""
        if self.policy.temperatures is None:
            return None
        try:
            return calibration_json(self.policy, self.origin.temperatures)
        except CalibError:
            return None

    def _calibrated(self) -> str:
        """Fingerprint of the collected model once it applies the policy's temperatures."""
        identity = dict(self.origin.identity)
        if (expected := self._expected()) is not None:
            identity["temperatures"] = expected
        return EngineInfo(self.info.model, identity).fingerprint

    def _arm(self) -> LiveKnob:
        wanted, how = self.policy.arm, "start the server as this arm"
        if self.arm is not None:
            live = self.arm == wanted
            return LiveKnob("arm", wanted, self.arm, live, "" if live else how)
        told = prometheus.parse(self.metrics).speculates if "vllm:" in self.metrics else None
        there = None if told is None else "speculates" if told else "does not speculate"
        should = wanted == "mtp" if wanted in MTP else speculates(self.origin.start)
        if told is None or should is None:
            return LiveKnob("arm", wanted, there, None, "the server does not tell; say what it was started as: --arm")
        live = told == should
        return LiveKnob("arm", wanted, there, live, "" if live else how)


def _whole(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d{1,9}", text))


def _same(there: Any, wanted: Any) -> bool:
    """Equal, numbers to all the digits that a file or a variable keeps."""
    if isinstance(there, Mapping) and isinstance(wanted, Mapping):
        return there.keys() == wanted.keys() and all(_same(there[name], wanted[name]) for name in wanted)
    if isinstance(there, (int, float)) and isinstance(wanted, (int, float)):
        return math.isclose(there, wanted, rel_tol=_SAME, abs_tol=_SAME)
    return bool(there == wanted)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}" if value else "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else value if isinstance(value, str) else f"{value!r}"

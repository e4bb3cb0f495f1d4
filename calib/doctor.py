"""What the servers of the arms are, and whether they are what the store says: `diagnose`, for ``calib doctor``.

Asks and changes nothing. Leaves to others: what is fit to tune on among the answers (`calib.audit`, whose findings it
repeats for the arms that are named), how it is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from calib import audit
from calib.arms import Arm
from calib.audit import Finding
from calib.engine import prometheus
from calib.engine.auto import probe
from calib.engine.base import AskFailed, Engine, EngineInfo
from calib.engine.decide import DecideEngine
from calib.engine.http import HttpClient
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from calib.store import Store

__all__ = ["Diagnosis", "ServerReport", "StoredModel", "diagnose"]

_NO_ANSWER = ("connection", "timeout")


@dataclass(frozen=True)
class ServerReport:
    """One server of an arm. What it does not tell is None.

    Attributes
    ----------
    arm, url : str
        The address without a login.
    answers : bool
    seconds : float or None
        Until its first answer.
    startable : bool
        Whether calib starts it when it is needed.
    problem : str or None
        Why it cannot be asked.
    engine : str or None
        How it is asked: ``decide`` or ``vllm``.
    protocol, model, version : str or None
    fingerprint : str or None
        Of the model with all that can change an answer, as the store keeps it.
    identity : mapping or None
        What the fingerprint is made of.
    simulated : bool
        Whether no real model answers.
    threshold, mix : float or None
        The server's own defaults; only a decide server has them.
    think_budget : int or None
        The server's own; None for no limit but the context.
    context : int or None
        Tokens.
    running, waiting : int or None
        Requests when it was asked.
    acceptance_length, acceptance_length_max, acceptance_share, prefix_hit_rate : float or None
        Of speculative decoding and prefix caching since the server started.
    notes : tuple of str
        What the engine found odd.
    stored : bool or None
        Whether the store holds this very model; None when it holds none.
    """

    arm: str
    url: str
    answers: bool
    seconds: float | None = None
    startable: bool = False
    problem: str | None = None
    engine: str | None = None
    protocol: str | None = None
    model: str | None = None
    version: str | None = None
    fingerprint: str | None = None
    identity: Mapping[str, Any] | None = None
    simulated: bool = False
    threshold: float | None = None
    mix: float | None = None
    think_budget: int | None = None
    context: int | None = None
    running: int | None = None
    waiting: int | None = None
    acceptance_length: float | None = None
    acceptance_length_max: float | None = None
    acceptance_share: float | None = None
    prefix_hit_rate: float | None = None
    notes: tuple[str, ...] = ()
    stored: bool | None = None


@dataclass(frozen=True)
class StoredModel:
    """A model in the store, with the arms that answered questions."""

    name: str
    fingerprint: str
    simulated: bool
    arms: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes
    ----------
    servers : tuple of ServerReport
        One for each arm and address, in their order.
    store : str or None
        Where the store is, without a login.
    models : tuple of StoredModel
    audits : tuple of Finding
        What is to be said of the stored answers of these arms, by the model that the servers are, or by every model
        of the store where no server says what it is. The worst first.
    problems : tuple of str
        What keeps a collection from being right, and what to do.
    notes : tuple of str
        What is worth knowing.
    """

    servers: tuple[ServerReport, ...]
    store: str | None = None
    models: tuple[StoredModel, ...] = ()
    audits: tuple[Finding, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing keeps a collection from being right."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self) | {"audits": [finding.to_dict() for finding in self.audits]}
        return {"ok": self.ok, **json.loads(json.dumps(plain))}


async def diagnose(
    arms: Sequence[Arm],
    store: Store | None = None,
    *,
    vllm: Mapping[str, Any] | None = None,
    timeout: float = 30.0,
) -> Diagnosis:
    """Ask every server of every arm what it is, and compare.

    Parameters
    ----------
    arms : sequence of Arm
    store : Store, optional
        What the servers are compared with.
    vllm : mapping, optional
        Further arguments of `VllmEngine` (``prompt``, ``sampling``, ``seed``): they are part of the fingerprint.
    timeout : float
        Seconds that one request may take.

    Returns
    -------
    Diagnosis
        A server that does not answer is a finding in it, not an error.

    Raises
    ------
    CalibError
        No arm; a store that cannot be read.
    """
    if not arms:
        raise CalibError("no arm to look at: give --arm base=http://HOST:PORT or --arms arms.toml")
    models = _stored_models(store) if store is not None else ()
    jobs = [_examined(arm, url, vllm or {}, timeout) for arm in arms for url in arm.urls]
    servers = tuple(_compared(server, models) for server in await asyncio.gather(*jobs))
    problems = [*_silent(servers), *_different(servers), *_not_stored(servers, models, store)]
    return Diagnosis(
        servers=servers,
        store=store.location if store is not None else None,
        models=models,
        audits=() if store is None else tuple(await asyncio.to_thread(_audits, store, arms, servers, models)),
        problems=tuple(problems),
        notes=tuple(_notes(arms, servers, models)),
    )


# --- one server -------------------------------------------------------------------------------------------------------


async def _examined(arm: Arm, url: str, vllm: Mapping[str, Any], timeout: float) -> ServerReport:
    report = ServerReport(arm.name, HttpClient(url).url.rstrip("/"), answers=False, startable=arm.start is not None)
    options: dict[str, Any] = {"timeout": timeout, "retries": 0, "api_key_env": arm.api_key_env}
    try:
        async with contextlib.AsyncExitStack() as stack:
            client = HttpClient(url, **options)
            stack.push_async_callback(client.close)
            report = await _knocked(client, report)
            if not report.answers:
                return report
            counters = await prometheus.snapshot(client)  # before the engine's own requests
            if counters is not None:
                report = _counted(report, counters)
            engine = await _engine(arm, url, vllm, options)
            stack.push_async_callback(engine.close)
            return _described(report, engine, await engine.info())
    except (AskFailed, CalibError) as error:
        return replace(report, problem=str(error))


async def _knocked(client: HttpClient, report: ServerReport) -> ServerReport:
    """Whether and how fast anything answers, whatever it says."""
    try:
        reply = await client.get("/v1/decide/info")
    except AskFailed as failure:
        if failure.reason in _NO_ANSWER:
            return replace(report, problem=failure.detail)
        return replace(report, answers=True, seconds=failure.seconds)
    return replace(report, answers=True, seconds=reply.seconds)


async def _engine(arm: Arm, url: str, vllm: Mapping[str, Any], options: Mapping[str, Any]) -> Engine:
    if arm.engine == "decide":
        return DecideEngine(url, **options)
    if arm.engine == "vllm":
        return VllmEngine(url, **vllm, **options)
    return await probe(url, vllm=vllm, **options)


def _counted(report: ServerReport, counters: prometheus.ServerCounters) -> ServerReport:
    speculation = prometheus.between(_since_start(counters), counters)
    return replace(
        report,
        running=_whole(counters.running),
        waiting=_whole(counters.waiting),
        acceptance_length=_known(speculation.acceptance_length),
        acceptance_length_max=_known(speculation.acceptance_length_max),
        acceptance_share=_known(speculation.acceptance_share),
        prefix_hit_rate=_known(speculation.prefix_hit_rate),
    )


def _since_start(counters: prometheus.ServerCounters) -> prometheus.ServerCounters:
    """The counters of a server that was just started."""
    return prometheus.ServerCounters(
        **{name: math.nan if math.isnan(value) else 0.0 for name, value in asdict(counters).items()}
    )


def _described(report: ServerReport, engine: Engine, info: EngineInfo) -> ServerReport:
    decides = isinstance(engine, DecideEngine)
    raw = info.raw
    defaults = raw.get("defaults")
    budget = defaults.get("think_budget") if isinstance(defaults, Mapping) else None
    context, notes = raw.get("max_model_len"), raw.get("notes")
    return replace(
        report,
        engine="decide" if decides else "vllm",
        protocol=_text(raw.get("protocol")),
        model=info.model,
        version=_text(raw.get("version")),
        fingerprint=info.fingerprint,
        identity=dict(info.identity),
        simulated=info.simulated,
        threshold=info.threshold if decides else None,
        mix=info.mix if decides else None,
        think_budget=budget if type(budget) is int else None,
        context=context if type(context) is int else None,
        notes=tuple(map(str, notes)) if isinstance(notes, (list, tuple)) else (),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else round(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# --- the store --------------------------------------------------------------------------------------------------------


def _stored_models(store: Store) -> tuple[StoredModel, ...]:
    return tuple(
        StoredModel(
            name=model.name,
            fingerprint=model.fingerprint,
            simulated=model.simulated,
            arms=tuple(sorted({count.arm for count in model.coverage})),
        )
        for model in store.status().answered  # one that was only registered, or failed, says nothing
    )


def _compared(server: ServerReport, models: Sequence[StoredModel]) -> ServerReport:
    if server.fingerprint is None or not models:
        return server
    return replace(server, stored=any(model.fingerprint == server.fingerprint for model in models))


def _audits(
    store: Store, arms: Sequence[Arm], servers: Sequence[ServerReport], models: Sequence[StoredModel]
) -> list[Finding]:
    """Findings about the stored answers of these arms, and about all arms together."""
    there = {server.fingerprint for server in servers if server.fingerprint is not None}
    named = {arm.name for arm in arms}
    return [
        finding
        for model in models
        if not there or model.fingerprint in there
        for finding in audit.findings(store, model=model.fingerprint)
        if finding.arm is None or finding.arm in named
    ]


# --- findings ---------------------------------------------------------------------------------------------------------


def _silent(servers: Iterable[ServerReport]) -> list[str]:
    found = []
    for server in servers:
        if server.problem is None or (server.startable and not server.answers):
            continue
        what = "cannot be asked" if server.answers else "does not answer: start it, or mend its address"
        found.append(f"arm {server.arm!r}: {server.url} {what} ({server.problem})")
    return found


def _different(servers: Iterable[ServerReport]) -> list[str]:
    """Arms, and the addresses of an arm, are to serve one model."""
    known = [server for server in servers if server.identity is not None]
    if not known:
        return []
    first, *others = known
    found = []
    for other in others:
        if other.fingerprint != first.fingerprint:
            one, two = first.identity or {}, other.identity or {}
            names = sorted(name for name in {*one, *two} if one.get(name) != two.get(name))
            shown = "; ".join(f"{name}: {one.get(name)!r} and {two.get(name)!r}" for name in names[:3])
            found.append(
                f"arm {first.arm!r} at {first.url} and arm {other.arm!r} at {other.url} serve different models "
                f"({shown}); answers of different models never mix: collect each into its own --store"
            )
    return found


def _not_stored(servers: Iterable[ServerReport], models: Sequence[StoredModel], store: Store | None) -> list[str]:
    found = []
    for fingerprint, sharing in _grouped(server for server in servers if server.stored is False).items():
        server = sharing[0]
        held = ", ".join(f"{model.name} ({model.fingerprint[:8]})" for model in models)
        same_name = any(model.name == server.model for model in models)
        why = " The name is the same: prompt, sampling, temperatures or the decision head differ." if same_name else ""
        found.append(
            f"{' and '.join(_arms(sharing))}: the server is {server.model} ({fingerprint[:8]}), and "
            f"{store.location if store else 'the store'} holds {held}.{why} New answers would be another model's: "
            "serve the one that was collected, or collect into a new --store"
        )
    return found


def _notes(arms: Sequence[Arm], servers: Sequence[ServerReport], models: Sequence[StoredModel]) -> list[str]:
    found = []
    for server in servers:
        if server.startable and not server.answers:
            found.append(f"arm {server.arm!r}: {server.url} does not run; calib collect starts it")
        if server.running or server.waiting:
            found.append(
                f"arm {server.arm!r}: {server.url} is at work ({server.running} running, {server.waiting} waiting): "
                "latency collected now would be of that load too"
            )
        if server.simulated:
            found.append(f"arm {server.arm!r}: {server.url} is simulated: no real model answers")
        found += [f"arm {server.arm!r}: {note}" for note in server.notes]
    for url, sharing in _shared(servers).items():
        found.append(
            f"one server answers at {url} for {' and '.join(_arms(sharing))}: which of them it is does not show. "
            "calib collect starts each by itself, and refuses while this one is there"
        )
    current = {server.fingerprint for server in servers if server.stored}
    collected = {arm for model in models if model.fingerprint in current for arm in model.arms}
    named = [arm.name for arm in arms]
    if collected:
        found += [f"the store has no answers of arm {name!r} yet" for name in named if name not in collected]
        found += [
            f"the store has answers of arm {name!r}, which is not asked here" for name in sorted(collected - {*named})
        ]
    return found


def _arms(servers: Iterable[ServerReport]) -> list[str]:
    return [f"arm {name!r}" for name in dict.fromkeys(server.arm for server in servers)]


def _grouped(servers: Iterable[ServerReport]) -> dict[str, list[ServerReport]]:
    groups: dict[str, list[ServerReport]] = defaultdict(list)
    for server in servers:
        groups[str(server.fingerprint)].append(server)
    return groups


def _shared(servers: Iterable[ServerReport]) -> dict[str, list[ServerReport]]:
    groups: dict[str, list[ServerReport]] = defaultdict(list)
    for server in servers:
        if server.answers:
            groups[server.url].append(server)
    return {url: sharing for url, sharing in groups.items() if len(sharing) > 1}

"""Runs an exported policy on held-out questions: a plain client asks, and what it got stands beside the prediction.

The client sends what any application sends (`calib.engine.plain`), at a rate or with a number in flight
(`calib.arrivals`). Leaves to others: the comparison (`calib.predicted`), targets on a measurement (`calib.measured`),
what a run says (`calib.verified`) and what is printed (`calib.show`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calib import predicted as comparison
from calib.arrivals import Load, arrival_times, offer
from calib.collect import in_loop
from calib.engine.base import AskFailed, EngineInfo
from calib.engine.decide import DecideEngine
from calib.engine.plain import PlainAnswer, PlainClient
from calib.errors import CalibError
from calib.gateway import policy_version
from calib.intervals import RESAMPLES
from calib.measured import Served, check
from calib.outcomes import Outcomes
from calib.policy import Policy, decide
from calib.predicted import Measured
from calib.provenance import Provenance
from calib.questions import Question
from calib.queueing import Forecast, forecast
from calib.store import Store, load_outcomes, schema
from calib.store.contents import loads
from calib.verified import Verified, model_behind, served_otherwise, warnings_of

__all__ = ["Trial", "verify"]

TEST_SHARE = 0.3
CONCURRENCY = 8
"""Requests in flight where neither a load is given nor the one of the collection is known."""
Progress = Callable[[int, int, int], None]
"""Gets questions that are done, all of them, and failures."""


# --- how -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """How a policy is verified.

    Attributes
    ----------
    arm, url : str
        The way of serving, which must be the policy's, and its address.
    load : Load or None
        What the server is asked under; the concurrency of the collection when left out.
    n : int or None
        Most questions, drawn from the held-out ones; all when left out.
    seed : int
        Of the order of the questions, the arrivals and the bootstrap.
    level : float or None
        Of intervals and tests; that of the policy's certificate when left out.
    test_share : float or None
        Share that was held out; what the saved policy says, else 0.3, when left out.
    predict_at : int or None
        Concurrency of the stored seconds; at a rate all of them together predict (`calib.queueing`), unless given. In
        a closed loop it is needed where several have the seconds of all questions and none is that of the load.
    datasets : sequence of str or None
        Only these.
    traffic : mapping of str to float or None
        Share of each dataset in the traffic.
    questions : sequence of Question or None
        Texts of the questions, for a store that holds none.
    allow_other_model : bool
        Whether to go on where the server is another model than the policy was tuned for.
    timeout : float
        Seconds after which an answer is given up.
    api_key_env : str or None
        NAME of the environment variable with the key.
    resamples : int
    """

    arm: str
    url: str
    load: Load | None = None
    n: int | None = None
    seed: int = 0
    level: float | None = None
    test_share: float | None = None
    predict_at: int | None = None
    datasets: Sequence[str] | None = None
    traffic: Mapping[str, float] | None = None
    questions: Sequence[Question] | None = None
    allow_other_model: bool = False
    timeout: float = 600.0
    api_key_env: str | None = None
    resamples: int = RESAMPLES


# --- the run ----------------------------------------------------------------------------------------------------------


def verify(served: Served, store: Store, trial: Trial, *, progress: Progress | None = None) -> Verified:
    """Ask held-out questions of a server under a policy, compare with the prediction, and keep the run in the store.

    In the main thread the first SIGINT (Ctrl-C) or SIGTERM ends the asking and what was asked is compared; a second one
    does not wait for the questions in flight.

    Raises
    ------
    CalibError
        Another arm or model than the policy's, nothing held out whose text is known, a server that cannot be asked, or
        that answered nothing.
    """
    if trial.arm != served.policy.arm:
        raise CalibError(
            f"--arm {trial.arm}=..., but {served.name!r} is tuned for arm {served.policy.arm}, and latency is never "
            f"shared between arms: give its address, --arm {served.policy.arm}=URL, or tune for {trial.arm}"
        )
    if trial.level is not None and not 0 < trial.level < 1:
        raise CalibError(f"--level must be between 0 and 1, for instance 0.95, got {trial.level}")
    basis = _stored(served, store, trial)
    load, outcomes = basis.load, basis.asked[-1]
    served = replace(served, imported=Provenance(store.identity(outcomes.fingerprint)).imported)
    held_out, asked, counts = _questions(served, store, trial, outcomes)
    where, rng = _drawn(held_out, asked, trial)
    questions = [asked[_key(held_out, i)] for i in where]
    chosen = held_out.take(where)
    due = None if load.rate is None else arrival_times(len(where), load.rate, rng)

    got: list[_Got] = []
    began = time.perf_counter()
    info: list[EngineInfo] = []

    async def main(stop: asyncio.Event) -> None:
        info.append(await _who(trial))
        _refuse_other_model(info[0], chosen, served, trial)
        by_dataset = any(key.startswith("dataset=") for key in served.policy.routes)
        await _ask(questions, trial, load, info[0], got, stop, progress, due, by_dataset=by_dataset)

    interrupted = False
    try:
        in_loop(main)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - began
    if not got:
        raise CalibError("nothing was asked: it was stopped before the first answer", exit_code=1)
    interrupted = interrupted or len(got) < len(questions)
    found = _compare(served, store, trial, info[0], basis, chosen, due, got, counts, seconds, interrupted)
    store.add_verification(found.row())
    return found


@dataclass(frozen=True, eq=False)
class _Basis:
    """What a prediction rests on, at one load or at several, ascending.

    Attributes
    ----------
    recorded : tuple of Outcomes
        All questions that were collected, which were in flight together.
    asked : tuple of Outcomes
        Of these the datasets that are asked about, weighted as the traffic.
    load : Load
        Of the run.
    note : str
        See `Verified`.
    """

    recorded: tuple[Outcomes, ...]
    asked: tuple[Outcomes, ...]
    load: Load
    note: str = ""


def _stored(served: Served, store: Store, trial: Trial) -> _Basis:
    model, load, note = served.fingerprint, trial.load, ""
    known = _known(store, model, trial)
    at, outcomes = trial.predict_at, None
    if at is None and load is not None and load.concurrency in known:
        at = load.concurrency
    if at is None and len(known) > 1:
        usable = _at_loads(store, trial, model, known)
        # a simulated server tells the seconds of one load, however many are in flight
        several = [o for c, o in usable.items() if c > 0 and not o.simulated]
        if load is not None and load.rate is not None and len(several) > 1:
            return _Basis(tuple(several), tuple(_as_traffic(o, trial) for o in several), load)
        outcomes, note = _the_usable(store, trial, known, usable)
    if outcomes is None:
        outcomes = load_outcomes(store, model=model, arms=[trial.arm], concurrency=at)
    taken = int(outcomes.concurrency[outcomes.arm_index(trial.arm)])
    return _Basis((outcomes,), (_as_traffic(outcomes, trial),), load or Load(concurrency=taken or CONCURRENCY), note)


def _known(store: Store, model: str | None, trial: Trial) -> tuple[int, ...]:
    """Loads at which the arm was timed; refuses to predict at another one."""
    known = loads(store, model).get(trial.arm, ()) if model is not None else ()
    if not known:  # a file may not say whose it is; a model or an arm that is not there is refused here
        model = load_outcomes(store, model=model, arms=[trial.arm], budgets=[], concurrency=0).fingerprint
        known = loads(store, model or "").get(trial.arm, ())
    if trial.predict_at is not None and trial.predict_at not in known:
        there = f"it was timed at {_listed(known)}" if known else "it was timed at none; leave --predict-at out"
        raise CalibError(f"{store.location}: arm {trial.arm} was not timed at --predict-at {trial.predict_at}: {there}")
    return known


def _listed(known: Sequence[int]) -> str:
    return ", ".join(str(load) if load else "0 (not known)" for load in known)


def _the_usable(
    store: Store, trial: Trial, known: Sequence[int], usable: Mapping[int, Outcomes]
) -> tuple[Outcomes, str]:
    """The only one of several loads at which all seconds are known, and the words that say so."""
    if len(usable) == 1:
        ((load, outcomes),) = usable.items()
        return outcomes, (
            f"of the concurrencies {_listed(known)} the seconds of every question are known at {load} alone: "
            "they are the prediction"
        )
    where = f"{store.location}: arm {trial.arm} was timed at the concurrencies {_listed(known)}"
    if not usable:
        raise CalibError(
            f"{where}, at none of them on every question; time the rest: calib collect QUESTIONS --concurrency "
            f"{known[-1] or CONCURRENCY}"
        )
    raise CalibError(f"{where}; say which seconds are the prediction: --predict-at {max(usable)}")


def _at_loads(store: Store, trial: Trial, model: str | None, loads: Sequence[int]) -> dict[int, Outcomes]:
    """The arm at each load at which the seconds of all questions are known."""
    found = {load: load_outcomes(store, model=model, arms=[trial.arm], concurrency=load) for load in loads}
    return {load: outcomes for load, outcomes in found.items() if outcomes.has_latency(trial.arm)}


def _as_traffic(outcomes: Outcomes, trial: Trial) -> Outcomes:
    if trial.datasets is not None:
        outcomes = outcomes.select(trial.datasets)
    return outcomes if trial.traffic is None else outcomes.reweighted(dict(trial.traffic))


def _questions(
    served: Served, store: Store, trial: Trial, outcomes: Outcomes
) -> tuple[Outcomes, dict[tuple[str, str], Question], dict[str, int]]:
    """Held-out questions, the texts of those whose text is known, and how many are left out."""
    share = _test_share(served, store, trial)
    _, held_out = outcomes.split(share)
    if held_out is None and trial.test_share is not None:
        raise CalibError("--test-share 0 holds no question out to verify on; give the share that calib optimize had")
    if held_out is None:
        raise CalibError(
            f"{served.name!r} was tuned on all questions (--test-share 0): none is held out to verify it on. Tune "
            "again with a test share: calib optimize --test-share 0.3"
        )
    stored = {} if trial.questions else {(q.dataset, q.id): q for q in store.questions()}
    given = {(q.dataset, q.id): q for q in trial.questions} if trial.questions else stored
    keys = store.text_keys() if trial.questions else {}
    texts: dict[tuple[str, str], Question] = {}
    other = 0
    for i in range(held_out.n):
        name = _key(held_out, i)
        question = given.get(name)
        if question is None:
            continue
        nameless = schema.text_key(replace(question, question=""))  # the key of a question imported without its text
        if name in keys and keys[name] not in (schema.text_key(question), nameless):
            other += 1
            continue
        texts[name] = question
    counts = {"held_out": held_out.n, "without_text": held_out.n - len(texts) - other, "other_text": other}
    if not texts:
        raise CalibError(
            f"none of the {held_out.n} held-out questions of {store.location} has a known text"
            + (f" ({other} have another text in the file)" if other else "")
            + "; give the file that they came from: --questions FILE"
        )
    return held_out, texts, counts


def _test_share(served: Served, store: Store, trial: Trial) -> float:
    if trial.test_share is not None:
        return trial.test_share
    if served.document.get("split"):
        return float(served.document["split"]["test_share"])
    for saved in store.policies():  # a file that an earlier calib exported does not hold its split
        if saved.document.get("policy") == served.document.get("policy") and "split" in saved.document:
            return float(saved.document["split"]["test_share"])
    return TEST_SHARE


def _key(outcomes: Outcomes, i: int) -> tuple[str, str]:
    return str(outcomes.dataset[i]), str(outcomes.ids[i])


def _drawn(
    held_out: Outcomes, asked: Mapping[tuple[str, str], Question], trial: Trial
) -> tuple[NDArray[np.int64], np.random.Generator]:
    """Places of the questions, in a random order: a run that is stopped has asked a random part of them."""
    rng = np.random.default_rng(trial.seed)
    if trial.n is not None and trial.n < 1:
        raise CalibError(f"--n must be 1 question or more, got {trial.n}")
    known = np.array([i for i in range(held_out.n) if _key(held_out, i) in asked])
    return rng.permutation(known)[: trial.n], rng


async def _who(trial: Trial) -> EngineInfo:
    """What the server says it is."""
    engine = DecideEngine(trial.url, timeout=min(trial.timeout, 60.0), retries=1, api_key_env=trial.api_key_env)
    try:
        info = await engine.info()
    except CalibError as error:
        raise CalibError(
            f"{error}\ncalib verify asks a gateway (calib serve --policy serve/policy.json --upstream URL) or a decide "
            "server",
            exit_code=error.exit_code,
        ) from None
    finally:
        await engine.close()
    return info


def _refuse_other_model(info: EngineInfo, outcomes: Outcomes, served: Served, trial: Trial) -> None:
    expected = served.fingerprint or outcomes.fingerprint
    if not expected or trial.allow_other_model or model_behind(info) == expected:
        return
    if served.imported:
        raise CalibError(
            f"the outcomes of {served.name!r} were imported: nobody can tell whether {info.model} at the server is "
            f"their model {outcomes.model or ''}. If you know that it is, verify it all the same: --allow-other-model"
        )
    raise CalibError(
        f"the server is another model than {served.name!r} was tuned for: {info.model} ({model_behind(info)[:12]}) "
        f"instead of {outcomes.model or 'the stored one'} ({expected[:12]}). Model, prompt, sampling, decision head or "
        "temperatures differ (calib doctor shows what the server says). Verify it all the same: --allow-other-model"
    )


@dataclass(frozen=True, slots=True)
class _Got:
    """What one question got.

    Attributes
    ----------
    index : int
        Its place in the order of asking.
    answer : PlainAnswer or None
    failure : str or None
    latency, spent : float
        See `Measured`; of a simulated server its own seconds.
    wall : float
        Seconds in which the request was in flight.
    """

    index: int
    answer: PlainAnswer | None
    failure: str | None
    latency: float
    spent: float
    wall: float


async def _ask(
    questions: Sequence[Question],
    trial: Trial,
    load: Load,
    info: EngineInfo,
    got: list[_Got],
    stop: asyncio.Event,
    progress: Progress | None,
    due: NDArray[np.float64] | None,
    *,
    by_dataset: bool,
) -> None:
    client = PlainClient(trial.url, with_dataset=by_dataset, timeout=trial.timeout, api_key_env=trial.api_key_env)
    now = time.perf_counter
    failed = 0

    async def one(i: int, due: float) -> None:
        nonlocal failed
        sent = now()
        try:
            answer = await client.ask(questions[i])
        except AskFailed as failure:
            failed += 1
            waited = now() - sent
            got.append(_Got(i, None, failure.reason, math.inf, waited, waited))
            return
        done = now()
        latency, spent = done - due, done - sent
        if info.simulated and math.isfinite(answer.elapsed):  # it does not sleep the seconds that it tells
            latency = spent = answer.elapsed
        got.append(_Got(i, answer, None, latency, spent, done - sent))

    def tick() -> None:
        if progress is not None:
            progress(len(got), len(questions), failed)

    try:
        await offer(one, len(questions), load, times=due, stop=stop, tick=tick)
    finally:
        await client.close()
        tick()


def _measured(got: Sequence[_Got], outcomes: Outcomes) -> Measured:
    """Arrays in the order of ``got``, which is that of the outcomes."""
    n, c = outcomes.p1.shape
    p, told = np.full((n, c), np.nan), [one.answer for one in got]
    for i, answer in enumerate(told):
        if answer is not None:
            p[i] = 0.0
            p[i, : len(answer.p)] = answer.p

    def flags(name: str) -> NDArray[np.bool_]:
        return np.array([answer is not None and getattr(answer, name) for answer in told], dtype=bool)

    def numbers(name: str) -> NDArray[np.float64]:
        values = [None if answer is None else getattr(answer, name) for answer in told]
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    return Measured(
        p=p,
        thinks=flags("thinks"),
        closed=flags("closed"),
        degraded=flags("degraded"),
        tokens=np.nan_to_num(numbers("tokens")),
        latency=np.array([one.latency for one in got]),
        spent=np.array([one.spent for one in got]),
        threshold=numbers("threshold"),
        budget=numbers("budget"),
        version=np.array([None if answer is None else answer.version for answer in told], dtype=object),
        failure=np.array([one.failure for one in got], dtype=object),
    )


# --- what it says -----------------------------------------------------------------------------------------------------


def _compare(
    served: Served,
    store: Store,
    trial: Trial,
    info: EngineInfo,
    basis: _Basis,
    chosen: Outcomes,
    due: NDArray[np.float64] | None,
    got: Sequence[_Got],
    counts: Mapping[str, int],
    seconds: float,
    interrupted: bool,
) -> Verified:
    got, policy, everything = sorted(got, key=lambda one: one.index), served.policy, basis.asked[-1]
    load = basis.load
    asked = [one.index for one in got]
    due = None if due is None else due[asked]
    outcomes, flight = chosen.take(asked), None
    if len(basis.recorded) > 1 and due is not None:
        flight, each = _forecast(basis, outcomes, policy, due)
        outcomes = each[flight.nearest]
    measured, prediction = _measured(got, outcomes), decide(outcomes, policy)
    if flight is not None:
        prediction = replace(prediction, latency=flight.latency)
    if measured.failed.all():
        reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(one.failure for one in got).most_common())
        raise CalibError(f"{_shown(trial)}: none of {len(got)} questions was answered: {reasons}", exit_code=1)
    level = trial.level or served.level
    rng = np.random.default_rng(trial.seed)
    decisions = measured.decisions(prediction)
    in_flight = sum(one.wall for one in got) / seconds if seconds > 0 else math.nan
    version = policy_version(policy)
    obstacle = "the run was stopped, and a test needs a number of questions that is fixed before" if interrupted else ""
    if served_otherwise(served, info, outcomes, measured):
        obstacle = "the server does not serve this policy of this model"
        if served.imported:
            obstacle = "nobody can tell whether the server is the model of the imported outcomes"
    conditions = f"at {load}" + (f", {in_flight:.3g} in flight on average" if load.rate is not None else "")
    targets, certificate = check(
        served,
        outcomes,
        (prediction, decisions),
        everything,
        level=level,
        rng=rng,
        ledger=store.record_look,
        conditions=conditions,
        obstacle=obstacle,
        resamples=trial.resamples,
    )
    found = Verified(
        served=served,
        url=_shown(trial),
        info=info,
        load=load,
        outcomes=outcomes,
        predicted=prediction,
        forecast=flight,
        note=basis.note,
        due=due,
        measured=measured,
        lines=comparison.lines(outcomes, prediction, decisions, rng=rng, level=level, resamples=trial.resamples),
        targets=targets,
        budgets=comparison.budgets_kept(outcomes, policy, measured),
        deadline=None if policy.deadline is None else comparison.deadline_kept(outcomes, policy.deadline, measured),
        differences=comparison.differences(outcomes, policy, prediction, measured, version=version),
        certificate=certificate,
        counts={**counts, "asked": len(got)},
        seconds=seconds,
        in_flight=in_flight,
        interrupted=interrupted,
        warnings=(),
    )
    return replace(found, warnings=tuple(warnings_of(found)))


def _forecast(
    basis: _Basis, outcomes: Outcomes, policy: Policy, due: NDArray[np.float64]
) -> tuple[Forecast, list[Outcomes]]:
    """What these arrivals do to the questions that were asked, and these at each recorded load."""
    each = []
    for there in basis.asked:  # answers are shared between loads, and so are the questions
        place = {_key(there, i): i for i in range(there.n)}
        each.append(there.take([place[_key(outcomes, i)] for i in range(outcomes.n)]))
    return forecast(basis.recorded, each, policy, due), each


def _shown(trial: Trial) -> str:
    """Address without credentials."""
    scheme, slashes, rest = trial.url.partition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2].partition('?')[0]}"

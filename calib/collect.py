"""Asks servers what the store lacks, times it, and writes it down as it goes.

Arms are asked one after the other, never two at once: they may share a machine, and latency is what is measured. What
is stored is not asked again, so the same command goes on after an interruption. An answer counts as in flight until it
is written: a process that is killed at any moment loses at most ``concurrency`` questions.

Leaves to others: the workers of one arm (`calib.crew`), wire formats, retries and the checks of an answer
(`calib.engine`), the schema (`calib.store`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from calib.busyness import Brake
from calib.crew import Crew, Job, Progress
from calib.engine.base import Engine, EngineInfo
from calib.engine.decide import DecideEngine
from calib.errors import CalibError
from calib.fitness import REPLACED
from calib.processes import stop_signals
from calib.questions import Question, text_hash
from calib.sampling import place
from calib.store import AuditAnswer, Covered, Store

__all__ = [
    "ArmSummary",
    "CollectSummary",
    "Plan",
    "Progress",
    "ServerReplaced",
    "blind",
    "choose",
    "collect",
    "in_loop",
    "in_order",
    "mark_replaced",
    "one_model",
    "parse_shard",
    "plan_jobs",
    "run",
    "still_the_same",
]

GRACE = 60.0
"""Seconds that questions in flight get after a clean stop."""

T = TypeVar("T")


@dataclass(frozen=True)
class ArmSummary:
    """What one arm's collection came to.

    Attributes
    ----------
    arm, model, fingerprint : str
    asked : int
        Questions asked and written in this run.
    failed : int
        Those of them of which a part failed.
    reasons : dict of str to int
        Failures by reason.
    already : int
        Questions of which the store held everything.
    failed_before : int
        Questions left alone because all that they lack failed before; ``retry_failed`` asks them again.
    seconds : float
        Wall time.
    """

    arm: str
    model: str
    fingerprint: str
    asked: int
    failed: int
    reasons: dict[str, int]
    already: int
    failed_before: int
    seconds: float

    @property
    def rate(self) -> float:
        """Questions per second."""
        return self.asked / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"rate": self.rate}


@dataclass(frozen=True)
class CollectSummary:
    """What a collection came to.

    Attributes
    ----------
    arms : tuple of ArmSummary
        Those that were begun.
    interrupted : bool
        Whether it was stopped before the end; the same call goes on.
    simulated : bool
        Whether no real model answered.
    warnings : tuple of str
    """

    arms: tuple[ArmSummary, ...]
    interrupted: bool = False
    simulated: bool = False
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self)
        plain["arms"] = [arm.to_dict() for arm in self.arms]
        plain["warnings"] = list(self.warnings)
        return plain


# --- what is asked ----------------------------------------------------------------------------------------------------


def choose(
    questions: Iterable[Question],
    datasets: Sequence[str] | None = None,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
) -> list[Question]:
    """The questions of these datasets, at most ``limit`` of them, in the order in which they are asked.

    The order is by a hash of dataset and id: whatever part of it is done is an even sample, and a larger limit
    contains a smaller one. Of n shards (k, n) takes part k, from 1: by a hash of the text, so that each question is in
    one of them, and equal ones in the same.

    Raises
    ------
    CalibError
        An unknown dataset; a limit below 1; a shard that is not one of n.
    """
    chosen = list(questions)
    if datasets:
        known = sorted({question.dataset for question in chosen})
        for name in datasets:
            if name not in known:
                raise CalibError(f"unknown dataset {name!r}; there are: {', '.join(known)}")
        wanted = set(datasets)
        chosen = [question for question in chosen if question.dataset in wanted]
    if limit is not None and limit < 1:
        raise CalibError(f"--limit must be 1 or more, got {limit}")
    if shard is not None:
        k, n = shard
        if not 1 <= k <= n:
            raise CalibError(f"--shard {k}/{n}: the part is from 1 to the number of parts; write for instance 1/4")
        chosen = [question for question in chosen if int(place(text_hash(question), "shard") * n) == k - 1]
    return in_order(chosen)[:limit]


def parse_shard(text: str) -> tuple[int, int]:
    """Part and number of parts from ``k/n``.

    Raises
    ------
    CalibError
        Not two whole numbers with 1 <= k <= n.
    """
    k, slash, n = text.partition("/")
    if not (slash and k.strip().isdecimal() and n.strip().isdecimal() and 1 <= int(k) <= int(n)):
        raise CalibError(f"--shard {text!r} is not PART/PARTS, with the part from 1; write for instance --shard 1/4")
    return int(k), int(n)


def in_order(questions: Iterable[Question]) -> list[Question]:
    """Sort questions by a hash of dataset and id: whatever part of them is done is an even sample."""
    return sorted(questions, key=_place)


def _place(question: Question) -> bytes:
    name = f"{question.dataset}\0{question.id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=8, person=b"collect").digest()


@dataclass(slots=True)
class Plan:
    """What is to be asked, and how many questions need nothing."""

    jobs: list[Job] = field(default_factory=list)
    already: int = 0
    failed_before: int = 0


def plan_jobs(
    questions: Iterable[Question],
    coverage: Mapping[tuple[str, str], Covered],
    budgets: Sequence[int],
    retry_failed: bool,
    info: EngineInfo,
) -> Plan:
    """What each question lacks: answers, or seconds of this arm at this concurrency."""
    plan = Plan()
    for question in questions:
        ladder = set(budgets) if info.can_think_about(question) else set()
        system1 = True
        covered = coverage.get((question.dataset, question.id))
        if covered is not None:
            system1 = not (covered.system1 and covered.timed_system1)
            ladder -= set(covered.budgets) & set(covered.timed)
        if not system1 and not ladder:
            plan.already += 1
            continue
        if covered is not None and not retry_failed:
            system1 = system1 and not covered.failed_system1
            ladder -= set(covered.failed)
        if system1 or ladder:
            plan.jobs.append(Job(question, tuple(sorted(ladder)), system1))
        else:
            plan.failed_before += 1
    return plan


# --- the collection ---------------------------------------------------------------------------------------------------


async def collect(
    questions: Sequence[Question],
    arms: Mapping[str, Engine],
    store: Store,
    *,
    budgets: Sequence[int] = (8192,),
    concurrency: int = 32,
    retry_failed: bool = False,
    keep_text: bool = True,
    pause_when_waiting: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
    grace: float = GRACE,
) -> CollectSummary:
    """Fill the store with both systems' answers to every question, by every arm in turn.

    Parameters
    ----------
    questions : sequence of Question
        See `choose`.
    arms : mapping of str to Engine
        Ways of serving ONE model, by name. They are not closed here.
    store : Store
    budgets : sequence of int
        Think budgets, tokens; empty asks System 1 only.
    concurrency : int
        Questions in flight. Latency belongs to it: seconds taken at another concurrency do not count as stored.
    retry_failed : bool
        Whether to ask again what failed before.
    keep_text : bool
        Whether the store keeps texts of questions and thoughts.
    pause_when_waiting : int, optional
        Begin no question while more requests than that wait on the server, by its ``/metrics``.
    progress : callable, optional
        Called about five times a second, in the event loop.
    stop : asyncio.Event, optional
        Once set, no question is begun; those in flight get ``grace`` seconds, and what was answered is written.
    grace : float
        Seconds.

    Raises
    ------
    CalibError
        A server that cannot be asked, arms of different models, a server that is another one all at once, or one that
        stopped answering. What was answered is stored.
    """
    ladder = _checked(questions, arms, budgets, concurrency)
    questions = in_order(questions)
    stop = stop or asyncio.Event()
    infos = {arm: await engine.info() for arm, engine in arms.items()}
    one_model(infos)
    summaries: list[ArmSummary] = []
    warnings: list[str] = []
    complete = True
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="calib-store") as thread:

        async def on_disk(call: Callable[..., T], *args: Any, **options: Any) -> T:
            """Run a call of the store in its own thread: the event loop, and with it every clock, runs on."""
            return await loop.run_in_executor(thread, partial(call, *args, **options))

        await on_disk(store.add_questions, questions, keep_text=keep_text)
        for arm, engine in arms.items():
            if stop.is_set():
                break
            info = infos[arm]
            fingerprint = await on_disk(store.register_model, info)
            coverage = await on_disk(store.coverage, fingerprint, arm, concurrency=concurrency)
            plan = plan_jobs(questions, coverage, ladder, retry_failed, info)
            brake = None if pause_when_waiting is None else Brake(engine, pause_when_waiting)
            crew = Crew(
                arm,
                engine,
                plan.jobs,
                partial(on_disk, store.write, fingerprint, keep_text=keep_text),
                concurrency=concurrency,
                keep_text=keep_text,
                progress=progress,
                already=plan.already + plan.failed_before,
                brake=brake,
                check=partial(still_the_same, arm, engine, info),
            )
            try:
                await crew.run(stop, grace)
                if plan.jobs and not stop.is_set():
                    warnings += await still_the_same(arm, engine, info)
            except ServerReplaced:
                await on_disk(mark_replaced, store, fingerprint, arm, crew.unchecked)
                raise
            if brake is not None and brake.blind:
                warnings.append(blind(arm))
            summaries.append(_summary(arm, info, fingerprint, plan, crew))
            complete = complete and crew.complete
    return CollectSummary(
        arms=tuple(summaries),
        interrupted=not complete or len(summaries) < len(arms),
        simulated=any(info.simulated for info in infos.values()),
        warnings=tuple(warnings),
    )


def blind(arm: str) -> str:
    """Warn of a server whose load is not known."""
    return f"arm {arm!r}: no /metrics, so whether requests wait there is not known: it was never paused"


def _checked(
    questions: Sequence[Question], arms: Mapping[str, Engine], budgets: Sequence[int], concurrency: int
) -> tuple[int, ...]:
    if not questions:
        raise CalibError("there are no questions to ask")
    if not arms:
        raise CalibError("no arm to ask: give one or more as --arm base=http://HOST:PORT")
    if concurrency < 1:
        raise CalibError(f"--concurrency must be 1 or more, got {concurrency}")
    ladder = tuple(sorted(set(budgets)))
    if ladder and ladder[0] < 1:
        raise CalibError(f"--budgets must be 1 token or more, got {ladder[0]}")
    return ladder


def one_model(infos: Mapping[str, EngineInfo]) -> None:
    """Refuse arms of different models."""
    (first, one), *others = infos.items()
    for arm, other in others:
        if other.identity != one.identity:
            raise CalibError(
                f"the arms {first!r} and {arm!r} serve different models ({_difference(one, other)}). Arms are ways of "
                "serving one model, and answers of different models never mix: collect them by two commands; "
                "later ones then ask for --model"
            )


def _difference(one: EngineInfo, other: EngineInfo) -> str:
    """What differs between two identities, at most three fields."""
    names = sorted(
        name for name in {*one.identity, *other.identity} if one.identity.get(name) != other.identity.get(name)
    )
    shown = [f"{name}: {one.identity.get(name)!r} and {other.identity.get(name)!r}" for name in names[:3]]
    return "; ".join(shown)


def _summary(arm: str, info: EngineInfo, fingerprint: str, plan: Plan, crew: Crew) -> ArmSummary:
    return ArmSummary(
        arm=arm,
        model=info.model,
        fingerprint=fingerprint,
        asked=crew.done,
        failed=crew.failed,
        reasons=dict(crew.reasons.most_common()),
        already=plan.already,
        failed_before=plan.failed_before,
        seconds=crew.seconds,
    )


class ServerReplaced(CalibError):  # noqa: N818 - says what was found
    """The server is another model than it was at the start."""


async def still_the_same(arm: str, engine: Engine, before: EngineInfo) -> list[str]:
    """Ask the server again who it is; warnings.

    Raises
    ------
    ServerReplaced
        It is another model than it was at the start.
    """
    try:
        after = await engine.info()
    except CalibError as error:
        if error.exit_code != 1:
            raise
        return [f"arm {arm!r}: whether the server was the same one to the end is not known: {error}"]
    if after.identity != before.identity:
        raise ServerReplaced(
            f"the server of arm {arm!r} was replaced while it was asked ({_difference(before, after)}). Answers since "
            f"the last look at it are stored under the first one, {before.model!r}, and some may be of the second: "
            "they are marked, and left out of tuning. Collect into a new --store",
            exit_code=1,
        )
    return []


def mark_replaced(store: Store, fingerprint: str, arm: str, questions: Iterable[Question]) -> None:
    """Mark answers that may be another model's than the one under which they are stored."""
    rows = [(q, AuditAnswer(q.dataset, q.id, arm, REPLACED, 0, None)) for q in questions]
    store.add_audits(fingerprint, rows)


# --- from the command line --------------------------------------------------------------------------------------------


def run(
    questions: Sequence[Question],
    urls: Mapping[str, str],
    store: Store,
    *,
    budgets: Sequence[int] = (8192,),
    concurrency: int = 32,
    timeout: float = 600.0,
    retries: int = 4,
    retry_failed: bool = False,
    api_key_env: str | None = None,
    keep_text: bool = True,
    progress: Callable[[Progress], None] | None = None,
    grace: float = GRACE,
) -> CollectSummary:
    """`collect` from servers with a decide route, for callers that are not asynchronous.

    In the main thread the first SIGINT (Ctrl-C) or SIGTERM stops cleanly, a second one does not wait for the questions
    in flight. What was answered is written in both cases.

    Parameters
    ----------
    urls : mapping of str to str
        Address of each arm.
    timeout : float
        Seconds that one request may take.
    retries : int
        Further attempts of a request.
    api_key_env : str, optional
        NAME of the environment variable that holds the servers' API key.
    questions, store, budgets, concurrency, retry_failed, keep_text, progress, grace
        See `collect`.

    Raises
    ------
    CalibError
        See `collect`; an address that cannot be used, or no key in the environment variable.
    KeyboardInterrupt
        At the second signal.
    """
    told = {
        "arms": dict(urls),
        "questions": len(questions),
        "budgets": list(budgets),
        "concurrency": concurrency,
        "timeout": timeout,
        "retries": retries,
        "retry_failed": retry_failed,
        "api_key_env": api_key_env,
        "keep_text": keep_text,
    }

    async def main(stop: asyncio.Event) -> CollectSummary:
        async with contextlib.AsyncExitStack() as stack:
            arms: dict[str, Engine] = {}
            for arm, url in urls.items():
                engine = DecideEngine(url, timeout=timeout, retries=retries, api_key_env=api_key_env)
                stack.push_async_callback(engine.close)
                arms[arm] = engine
            store.record_run(told)
            return await collect(
                questions,
                arms,
                store,
                budgets=budgets,
                concurrency=concurrency,
                retry_failed=retry_failed,
                keep_text=keep_text,
                progress=progress,
                stop=stop,
                grace=grace,
            )

    return in_loop(main)


def in_loop(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run in an event loop of its own: the first SIGINT or SIGTERM sets the event, the second one cancels.

    A SIGINT that the process was started to ignore, as a shell starts its background jobs, stays ignored.

    Raises
    ------
    KeyboardInterrupt
        At the second signal.
    """

    async def watched() -> T:
        stop = asyncio.Event()
        with _signals(stop):
            return await main(stop)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(watched())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT, unless it is ignored, and SIGTERM set ``stop``; the second one cancels the current task."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    numbers = stop_signals()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop's loop where it is installed, since it serves more requests; else the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

"""One ``calib collect``: opens the arms, and makes stages, latency passes and audits of them in the right order.

Arms that run already are open together, so that one can be watched while another is timed; an arm that calib starts has
the machine for itself. Leaves to others: each part (`calib.staged`, `calib.collect`, `calib.passes`, `calib.audit`),
starting servers (`calib.launch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calib import audit, passes, staged
from calib.arms import Arm
from calib.audit import AuditSummary
from calib.collect import CollectSummary, in_loop, one_model
from calib.collect import collect as collect_all
from calib.crew import Progress
from calib.engine.auto import probe
from calib.engine.base import Engine, EngineInfo
from calib.engine.decide import DecideEngine
from calib.engine.pool import EnginePool
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from calib.launch import launched, needs_launch
from calib.passes import PassReport
from calib.questions import Question, split_key, split_position, text_hash
from calib.sampling import place
from calib.staged import Confirm, StagedSummary
from calib.store import Store, load_outcomes
from calib.tuning import Demand

__all__ = ["Campaign", "Options", "collect", "connect", "groups", "run"]

COMPARED = 30
"""Questions on which a decide server is compared with its base model."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What a collection is told.

    Attributes
    ----------
    budgets : tuple of int
        Think budgets, tokens.
    concurrency : int
        Questions in flight; an arm may have its own.
    everything : bool
        Whether all questions are thought about by every arm, instead of in stages by the first one.
    demand : Demand
        Targets that the stages look at between rounds, and the test share.
    pilot : int
        Thoughts before the question whether to go on.
    budget_gpu_minutes : float
        See `calib.staged.collect`.
    latency_sample : int
        Questions of a latency pass; 0 makes none.
    latency_concurrency : tuple of int
        A pass for each; empty for the concurrency of the answers.
    audit : int
        Questions that are asked again for the audits; 0 for none.
    part : str
        ``k/n`` of a shard; empty without.
    pause_when_waiting : int or None
        See `calib.collect.collect`.
    retry_failed, keep_text : bool
    timeout : float
        Seconds that one request may take.
    retries : int
        Further attempts of a request.
    vllm : mapping
        Further arguments of `calib.engine.vllm.VllmEngine`.
    """

    budgets: tuple[int, ...] = (8192,)
    concurrency: int = 32
    everything: bool = False
    demand: Demand = field(default_factory=Demand)
    pilot: int = staged.PILOT
    budget_gpu_minutes: float = math.inf
    latency_sample: int = passes.SAMPLE
    latency_concurrency: tuple[int, ...] = ()
    audit: int = 0
    part: str = ""
    pause_when_waiting: int | None = None
    retry_failed: bool = False
    keep_text: bool = True
    timeout: float = 600.0
    retries: int = 4
    vllm: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """What the store remembers of a run."""
        return {
            "budgets": list(self.budgets),
            "concurrency": self.concurrency,
            "everything": self.everything,
            "targets": [str(target) for target in self.demand.targets],
            "budget_gpu_minutes": self.budget_gpu_minutes if math.isfinite(self.budget_gpu_minutes) else None,
            "latency_sample": self.latency_sample,
            "latency_concurrency": list(self.latency_concurrency),
            "audit": self.audit,
            "part": self.part,
            "pause_when_waiting": self.pause_when_waiting,
            "retry_failed": self.retry_failed,
            "keep_text": self.keep_text,
            "timeout": self.timeout,
            "retries": self.retries,
        }


@dataclass(frozen=True)
class Campaign:
    """What a collection came to.

    Attributes
    ----------
    stages : StagedSummary or None
        Of the first arm.
    whole : tuple of CollectSummary
        With ``everything``, of each group of arms.
    passes : tuple of PassReport
    audits : tuple of AuditSummary
    interrupted, simulated : bool
    warnings : tuple of str
    """

    stages: StagedSummary | None
    whole: tuple[CollectSummary, ...]
    passes: tuple[PassReport, ...]
    audits: tuple[AuditSummary, ...]
    interrupted: bool
    simulated: bool
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        arms = [arm for summary in self.whole for arm in summary.to_dict()["arms"]]
        return {
            "arms": arms if self.stages is None else [self.stages.to_dict()["arm"]],
            "stages": None if self.stages is None else self.stages.to_dict(),
            "passes": [one.to_dict() for one in self.passes],
            "audits": [one.to_dict() for one in self.audits],
            "interrupted": self.interrupted,
            "simulated": self.simulated,
            "warnings": list(self.warnings),
        }


# --- engines ----------------------------------------------------------------------------------------------------------


async def connect(
    arm: Arm,
    urls: Sequence[str],
    options: Options,
    questions: Sequence[Question] = (),
    say: Callable[[str], None] = log.info,
) -> Engine:
    """The engine of an arm: of one address, or several that share its work.

    A decide server that is asked for several budgets reads the smaller ones on its base model, where one answers on
    the same address and gives the server's own answers to some of the ``questions``.

    Raises
    ------
    CalibError
        An address that no engine can speak to.
    """
    how: dict[str, Any] = {"timeout": options.timeout, "retries": options.retries, "api_key_env": arm.api_key_env}
    engines: list[Engine] = []
    try:
        for url in urls:
            if arm.engine == "decide":
                engines.append(DecideEngine(url, **how))
            elif arm.engine == "vllm":
                engines.append(VllmEngine(url, **options.vllm, **how))
            else:
                engines.append(await probe(url, vllm=options.vllm, **how))
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines))
        raise
    for engine in engines:
        if isinstance(engine, DecideEngine) and len(set(options.budgets)) > 1:
            engine.offer_ladder(_to_compare(questions, options.demand.test_share), say)
    return engines[0] if len(engines) == 1 else EnginePool(engines)


def _to_compare(questions: Sequence[Question], test_share: float) -> list[Question]:
    """A random sample, of the test side first: latency passes want questions new to a server, and take none there."""

    def order(question: Question) -> tuple[bool, float]:
        return split_position(split_key(question)) >= test_share, place(text_hash(question), "compared")

    return sorted((question for question in questions if question.kind != "score"), key=order)[:COMPARED]


def groups(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that are open at the same time, in the order in which each group's first one was named."""
    together: list[list[Arm]] = []
    running: list[Arm] = []
    for arm in arms:
        if needs_launch(arm):
            together.append([arm])
        else:
            if not running:
                together.append(running)
            running.append(arm)
    return together


@contextlib.asynccontextmanager
async def _opened(
    arms: Sequence[Arm],
    options: Options,
    questions: Sequence[Question],
    log_dir: str,
    say: Callable[[str], None],
) -> AsyncIterator[dict[str, Engine]]:
    """Engines of one group, by arm."""
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for arm in arms:
            served = await stack.enter_async_context(launched(arm, log_dir=log_dir, say=say))
            engine = await connect(arm, served.urls, options, questions, say)
            stack.push_async_callback(engine.close)
            engines[arm.name] = engine
        yield engines


# --- the collection ---------------------------------------------------------------------------------------------------


async def collect(
    questions: Sequence[Question],
    arms: Sequence[Arm],
    store: Store,
    options: Options,
    *,
    confirm: Confirm | None = None,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = log.info,
    stop: asyncio.Event | None = None,
    log_dir: str | None = None,
) -> Campaign:
    """Make a collection of all arms: answers, then seconds, then audits.

    Parameters
    ----------
    questions : sequence of Question
        See `calib.collect.choose`.
    arms : sequence of Arm
        The first one gives the answers, unless ``everything`` is asked for.
    store : Store
    options : Options
    confirm : callable, optional
        See `calib.staged.collect`. When it says no, neither passes nor audits are made.
    progress : callable, optional
    say : callable
        Gets lines about servers that are started and stopped, and about how they are asked.
    stop : asyncio.Event, optional
        Stops cleanly once set.
    log_dir : path, optional
        For the output of servers that are started; a temporary folder when left out.

    Raises
    ------
    CalibError
        No arm, arms of different models, or a server that cannot be started or asked. What was answered is stored.
    """
    if not arms:
        raise CalibError("no arm to ask: give one or more as --arm base=http://HOST:PORT, or --arms arms.toml")
    one = _Running(questions, arms, store, options, confirm, progress, say, stop or asyncio.Event())
    with (
        tempfile.TemporaryDirectory(prefix="calib-logs-") if log_dir is None else contextlib.nullcontext(log_dir) as at
    ):
        for group in groups(arms):
            if one.stop.is_set() or one.declined:
                break
            async with _opened(group, options, questions, at, say) as engines:
                await one.group(group, engines)
    return one.result()


@dataclass(eq=False)
class _Running:
    """A collection under way."""

    questions: Sequence[Question]
    arms: Sequence[Arm]
    store: Store
    options: Options
    confirm: Confirm | None
    progress: Callable[[Progress], None] | None
    say: Callable[[str], None]
    stop: asyncio.Event
    infos: dict[str, EngineInfo] = field(default_factory=dict)
    stages: StagedSummary | None = None
    whole: list[CollectSummary] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    audits: list[AuditSummary] = field(default_factory=list)
    declined: bool = False

    async def group(self, arms: Sequence[Arm], engines: Mapping[str, Engine]) -> None:
        """All that is to be had of one group of arms."""
        o = self.options
        self.infos |= {arm: await engine.info() for arm, engine in engines.items()}
        one_model(self.infos)
        if o.everything:
            for load, names in _by_load(arms, o.concurrency).items():
                await self._everything({name: engines[name] for name in names}, load)
        elif self.arms[0].name in engines:
            await self._staged(self.arms[0], engines[self.arms[0].name])
        if self.stop.is_set() or self.declined:
            return
        if o.latency_sample and o.budgets and not o.everything:
            for arm in arms:
                self.passes += await passes.collect(
                    self.questions,
                    engines,
                    self.store,
                    budgets=o.budgets,
                    concurrencies=self._loads(),
                    sample=o.latency_sample,
                    test_share=o.demand.test_share,
                    answers_at=self.arms[0].concurrency or o.concurrency,
                    only=[arm.name],
                    keep_text=o.keep_text,
                    progress=self.progress,
                    stop=self.stop,
                )
            if self.arms[0].name in engines and not self.stop.is_set():
                await self._rest(self.arms[0], engines[self.arms[0].name])
        for arm in arms if o.audit else ():
            if not self.stop.is_set():
                await self._audit(arm, engines[arm.name])

    def _loads(self) -> tuple[int, ...]:
        return self.options.latency_concurrency or (self.arms[0].concurrency or self.options.concurrency,)

    async def _everything(self, engines: Mapping[str, Engine], load: int) -> None:
        o = self.options
        if self.stop.is_set():
            return
        self.whole.append(
            await collect_all(
                self.questions,
                engines,
                self.store,
                budgets=o.budgets,
                concurrency=load,
                retry_failed=o.retry_failed,
                keep_text=o.keep_text,
                pause_when_waiting=o.pause_when_waiting,
                progress=self.progress,
                stop=self.stop,
            )
        )

    async def _staged(self, arm: Arm, engine: Engine) -> None:
        o = self.options
        share = o.demand.test_share
        timed = o.latency_sample and not passes.takes_salt(engine)
        info = self.infos[arm.name]
        self.stages = await staged.collect(
            self.questions,
            arm.name,
            engine,
            self.store,
            budgets=o.budgets,
            concurrency=arm.concurrency or o.concurrency,
            demand=o.demand,
            confirm=self._confirm,
            budget_gpu_minutes=o.budget_gpu_minutes,
            pilot=o.pilot,
            part=o.part,
            reserved=passes.reserve(self.questions, o.latency_sample, self._loads(), info, test_share=share)
            if timed
            else (),
            retry_failed=o.retry_failed,
            keep_text=o.keep_text,
            pause_when_waiting=o.pause_when_waiting,
            progress=self.progress,
            stop=self.stop,
        )

    def _confirm(self, found: staged.Headroom) -> bool:
        self.declined = self.confirm is not None and not self.confirm(found)
        return not self.declined

    async def _rest(self, arm: Arm, engine: Engine) -> None:
        """System 1 of what was kept for the passes and is without an answer yet, and what it stands for."""
        if self.stages is None or passes.takes_salt(engine):
            return
        o = self.options
        summary = await collect_all(
            self.questions,
            {arm.name: engine},
            self.store,
            budgets=(),
            concurrency=arm.concurrency or o.concurrency,
            keep_text=o.keep_text,
            pause_when_waiting=o.pause_when_waiting,
            progress=self.progress,
            stop=self.stop,
        )
        self.whole.append(summary)

        def enter() -> None:
            fingerprint = self.store.register_model(self.infos[arm.name])
            names = sorted({question.dataset for question in self.questions})
            system1 = load_outcomes(
                self.store, model=fingerprint, datasets=names, budgets=[], arms=[arm.name], concurrency=0
            )
            rows = staged.strata(self.questions, system1, test_share=o.demand.test_share, part=o.part)
            self.store.plan(fingerprint, rows)

        await asyncio.to_thread(enter)

    async def _audit(self, arm: Arm, engine: Engine) -> None:
        o = self.options
        self.audits.append(
            await audit.collect(
                self.questions,
                arm.name,
                engine,
                self.store,
                sample=o.audit,
                budgets=o.budgets,
                concurrency=arm.concurrency or o.concurrency,
                progress=self.progress,
                stop=self.stop,
            )
        )

    def result(self) -> Campaign:
        """What it came to."""
        parts: list[StagedSummary | CollectSummary] = [*self.whole, *([self.stages] if self.stages else [])]
        found = [text for part in parts for text in part.warnings]
        found += [
            f"latency pass of {one.arm!r} at {one.concurrency} in flight is {one.state}: {one.note}"
            for one in self.passes
            if one.note
        ]
        return Campaign(
            stages=self.stages,
            whole=tuple(self.whole),
            passes=tuple(self.passes),
            audits=tuple(self.audits),
            interrupted=self.stop.is_set() or any(part.interrupted for part in parts),
            simulated=any(info.simulated for info in self.infos.values()),
            warnings=tuple(dict.fromkeys(found)),
        )


def _by_load(arms: Iterable[Arm], concurrency: int) -> dict[int, list[str]]:
    """Names of arms by their concurrency, in order."""
    found: dict[int, list[str]] = {}
    for arm in arms:
        found.setdefault(arm.concurrency or concurrency, []).append(arm.name)
    return found


def run(
    questions: Sequence[Question],
    arms: Sequence[Arm],
    store: Store,
    options: Options,
    *,
    confirm: Confirm | None = None,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = log.info,
    log_dir: str | None = None,
) -> Campaign:
    """`collect` for callers that are not asynchronous, with clean stops on SIGINT and SIGTERM (`calib.collect.run`).

    Raises
    ------
    CalibError
        See `collect`.
    KeyboardInterrupt
        At the second signal.
    """
    told = {"arms": [arm.to_dict() for arm in arms], "questions": len(questions), **options.to_dict()}
    store.record_run(told)
    return in_loop(
        lambda stop: collect(
            questions, arms, store, options, confirm=confirm, progress=progress, say=say, stop=stop, log_dir=log_dir
        )
    )

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
from dataclasses import dataclass, field, replace
from typing import Any

from calib import audit, passes, staged
from calib.arms import Arm
from calib.audit import AuditSummary
from calib.collect import ArmSummary, CollectSummary, in_loop, one_model
from calib.collect import collect as collect_all
from calib.crew import Progress
from calib.engine.auto import probe
from calib.engine.base import Engine, EngineInfo
from calib.engine.decide import DecideEngine
from calib.engine.pool import EnginePool
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from calib.launch import launched, needs_launch
from calib.outcomes import Outcomes
from calib.passes import PassReport
from calib.questions import Question, split_key, split_position, text_hash
from calib.sampling import place
from calib.staged import Confirm, NothingToStage, StagedSummary
from calib.store import Store, load_outcomes
from calib.tuning import Demand

__all__ = ["Campaign", "Options", "collect", "connect", "groups", "run"]

COMPARED = 30
"""Questions on which a decide server is compared with its base model."""
FEW = 500
"""Questions up to which a part of the thoughts would say too little on the test side, whatever the stages save."""

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
    unattended : bool
        Whether nobody said when to stop. Where more thoughts are cheap (a simulated server, or at most `FEW`
        questions) the stages then go on to the end, and every arm answers everything: nothing is left to estimate.
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
    unattended: bool = False
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
            "unattended": self.unattended,
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
        Of arms that were asked everything.
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

    @property
    def arms(self) -> tuple[ArmSummary, ...]:
        """What each arm's collection came to: by stages, else by asking everything."""
        staged = () if self.stages is None else (self.stages.arm,)
        whole = (arm for summary in self.whole for arm in summary.arms)
        return (*staged, *(arm for arm in whole if arm.arm not in {one.arm for one in staged}))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "arms": [arm.to_dict() for arm in self.arms],
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
                engines.append(await probe(url, vllm=options.vllm, say=say, **how))
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
                one.heard(engines)
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
    nothing_to_stage: bool = False
    remarks: list[str] = field(default_factory=list)

    async def group(self, arms: Sequence[Arm], engines: Mapping[str, Engine]) -> None:
        """All that is to be had of one group of arms."""
        o = self.options
        self.infos |= {arm: await engine.info() for arm, engine in engines.items()}
        one_model(self.infos)
        if o.everything:
            # seconds first, while the questions are new to the servers and to their caches; a simulated server's are
            # made up, and those of the answers as good
            if o.latency_concurrency or not all(self.infos[arm.name].simulated for arm in arms):
                await self._passes(arms, engines)
        elif self.arms[0].name in engines:
            await self._staged(self.arms[0], engines[self.arms[0].name])
        if self.stop.is_set() or self.declined:
            return
        if not (o.everything or self._to_the_end):
            await self._passes(arms, engines)
            if self.arms[0].name in engines and o.latency_sample:
                await self._rest(self.arms[0], engines[self.arms[0].name])
        else:
            for load, names in _by_load(arms, o.concurrency).items():
                await self._everything({name: engines[name] for name in names}, load)
        for arm in arms if o.audit else ():
            if not self.stop.is_set():
                await self._audit(arm, engines[arm.name])

    @property
    def _to_the_end(self) -> bool:
        """Whether stages are to save nothing: nobody said when to stop, and more thoughts are cheap."""
        cheap = len(self.questions) <= FEW or all(info.simulated for info in self.infos.values())
        return self.nothing_to_stage or (self.options.unattended and cheap)

    def _loads(self, arm: Arm) -> tuple[int, ...]:
        """Loads at which an arm is timed: that of the answers, which is the arm's own where it gives all of them."""
        o = self.options
        answers = arm if o.everything else self.arms[0]
        return o.latency_concurrency or (answers.concurrency or o.concurrency,)

    async def _passes(self, arms: Sequence[Arm], engines: Mapping[str, Engine]) -> None:
        o = self.options
        if not (o.latency_sample and o.budgets and self._tune_side(*self.infos.values())):
            return
        for arm in arms:
            if self.stop.is_set():
                return
            self.passes += await passes.collect(
                self.questions,
                engines,
                self.store,
                budgets=o.budgets,
                concurrencies=self._loads(arm),
                sample=o.latency_sample,
                test_share=o.demand.test_share,
                answers_at=(arm if o.everything else self.arms[0]).concurrency or o.concurrency,
                only=[arm.name],
                asked_again=o.everything,
                keep_text=o.keep_text,
                progress=self.progress,
                stop=self.stop,
            )

    def _tune_side(self, *infos: EngineInfo) -> bool:
        """Whether the tune side holds a question that can be thought about."""
        share = self.options.demand.test_share
        return any(
            split_position(split_key(question)) >= share and all(info.can_think_about(question) for info in infos)
            for question in self.questions
        )

    async def _everything(self, engines: Mapping[str, Engine], load: int) -> None:
        o = self.options
        if self.stop.is_set():
            return
        summary = await collect_all(
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
        self.whole.append(replace(summary, arms=tuple(map(self._with_passes, summary.arms))))

    def _with_passes(self, arm: ArmSummary) -> ArmSummary:
        """What a pass of this run has answered was asked, and not there before."""
        load = next(one for one in self.arms if one.name == arm.arm).concurrency or self.options.concurrency
        asked = sum(one.timed for one in self.passes if (one.arm, one.concurrency) == (arm.arm, load))
        asked = min(asked, arm.already) if self.options.everything else 0
        return replace(arm, asked=arm.asked + asked, already=arm.already - asked)

    async def _staged(self, arm: Arm, engine: Engine) -> None:
        o = self.options
        share = o.demand.test_share
        info = self.infos[arm.name]
        if not self._tune_side(info):
            self.nothing_to_stage = True
            self.say("no question of the tune side can be thought about, so there are no stages: everything is asked")
            return
        to_the_end = self._to_the_end
        if to_the_end:
            why = "a simulated server's thoughts cost nothing" if info.simulated else "there are few questions"
            self.say(f"{why}: every one of them is thought about, by every arm (--yes: only while it pays)")
        timed = o.latency_sample and not passes.takes_salt(engine) and not to_the_end
        loads = self._loads(arm)
        try:
            self.stages = await staged.collect(
                self.questions,
                arm.name,
                engine,
                self.store,
                budgets=o.budgets,
                concurrency=arm.concurrency or o.concurrency,
                demand=o.demand,
                confirm=self._confirm,
                settled=_never if to_the_end else None,
                budget_gpu_minutes=o.budget_gpu_minutes,
                pilot=o.pilot,
                part=o.part,
                reserved=passes.reserve(self.questions, o.latency_sample, loads, info, test_share=share)
                if timed
                else (),
                retry_failed=o.retry_failed,
                keep_text=o.keep_text,
                pause_when_waiting=o.pause_when_waiting,
                progress=self.progress,
                say=self.say,
                stop=self.stop,
            )
        except NothingToStage as error:
            if not to_the_end:
                raise
            self.nothing_to_stage = True
            self.say(f"{error}: everything is asked")

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

    def heard(self, engines: Mapping[str, Engine]) -> None:
        """Keep what the engines have to say of the answers."""
        for arm, engine in engines.items():
            if (tell := getattr(engine, "remarks", None)) is not None:
                self.remarks += [f"arm {arm!r}: {line}" for line in tell()]

    def result(self) -> Campaign:
        """What it came to."""
        parts: list[StagedSummary | CollectSummary] = [*self.whole, *([self.stages] if self.stages else [])]
        found = [*self.remarks, *(text for part in parts for text in part.warnings)]
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


def _never(_outcomes: Outcomes) -> None:
    """More thoughts are always worth it."""


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

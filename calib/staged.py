"""A collection in stages: what System 1 can do, what thinking could win, then thoughts where they move the decision.

System 1 answers all questions. About a hundred thoughts, stratified by dataset, confidence and System 1's own mistakes,
show what is to be had and what it would cost, and whoever called is asked whether to go on. Then rounds of thoughts,
first near the gate, until the verdict is settled or the server's time is spent. The questions that were thought about
stand for the others by their weights (`calib.sampling`); the test side is a plain random sample, so that exact tests
stay valid.

Leaves to others: asking (`calib.crew`), the whole of everything (`calib.collect`), seconds worth tuning on
(`calib.passes`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from calib import intervals, metrics
from calib.busyness import Brake
from calib.collect import (
    GRACE,
    ArmSummary,
    ServerReplaced,
    blind,
    in_order,
    mark_replaced,
    plan_jobs,
    still_the_same,
)
from calib.crew import Crew, Job, Progress
from calib.engine.base import Engine, EngineInfo
from calib.errors import CalibError
from calib.fitness import LOW_MASS
from calib.jsonnumbers import finite
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import Policy, confidence
from calib.questions import Question, split_key, split_position, text_hash
from calib.regret import regrets
from calib.sampling import allocate, bands, place
from calib.store import Covered, Planned, Store, load_outcomes
from calib.tuning import Demand, Ledger, tune
from calib.why import USELESS_AUC, ranking_auc

__all__ = [
    "Headroom",
    "NothingToStage",
    "Round",
    "Settled",
    "StagedSummary",
    "System1Report",
    "collect",
    "headroom",
    "strata",
    "system1_report",
    "verdict",
]

PILOT = 100
"""Thoughts before the question whether to go on."""
TEST_SHARE = 0.3
GROWTH, GROWTH_WITH_TARGETS, LEAST_ROUND = 0.25, 0.5, 50
"""What a round adds to the thoughts that are there. With targets rounds are few, so that few looks at the test side are
paid for."""
CONFIDENT_SHARE = 0.1
"""Share of a round that goes evenly over all bands, the very confident ones too: a gate may be wrong there."""
ENOUGH, SURE, LEAST_JUDGED = 0.005, 0.9, 150
"""Without targets: what more thoughts may still win of the objective, 0 to 1, when the stages end; how sure that has to
be; and the thoughts of the tune side below which it is not judged, since a stratum then has one or two."""
SHOWN = 12
"""Datasets of which each is told by itself what System 1 does there; of more only all together."""
PASS = 1
"""Number of the timings of the rounds: newer than those of System 1 alone, where nothing else kept the server busy."""

log = logging.getLogger(__name__)

_NOTHING = (
    "System 1 answered no question of the tune side that can be thought about, so there is nothing to choose from "
    "(calib status says what failed; --all asks everything all the same)"
)

T = TypeVar("T")
Floats = NDArray[np.float64]
Name = tuple[str, str]
_Stratum = tuple[str, int, bool]
Confirm = Callable[["Headroom"], bool]
Settled = Callable[[Outcomes], str | None]
"""Asked between rounds: why no more thoughts are needed, or None."""


class NothingToStage(CalibError):  # noqa: N818 - says what was found
    """No question of the tune side has an answer of System 1 and can be thought about."""


# --- what is found on the way -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System1Report:
    """What System 1 does by itself, over all datasets or one.

    Attributes
    ----------
    dataset : str or None
    n : int
    accuracy : float
        0 to 1.
    auc, auc_p : float
        How well its confidence ranks right answers above wrong ones, and the p-value that it does not; see
        `calib.why.ranking_auc`.
    label_mass : float
        Median share of the probability that lies on the labels; NaN where unknown.
    """

    dataset: str | None
    n: int
    accuracy: float
    auc: float
    auc_p: float
    label_mass: float

    @property
    def gate_is_useless(self) -> bool:
        """Whether confidence cannot choose what to think about."""
        return not self.auc >= USELESS_AUC

    def __str__(self) -> str:
        where = "System 1" if self.dataset is None else f"  {self.dataset}"
        gate = f"{'no gate' if self.gate_is_useless else 'a gate'} (AUC {self.auc:.2f})"
        said = f"{where}: {self.accuracy:.1%} right on {self.n} questions; its confidence is {gate}"
        if self.label_mass < LOW_MASS:
            said += f"; its letter is forced (median label mass {self.label_mass:.2g}), and may mean little"
        return said


def system1_report(outcomes: Outcomes) -> tuple[System1Report, ...]:
    """Accuracy and gate of System 1: all datasets together, then each."""
    right = metrics.chosen(outcomes.p1) == outcomes.answer
    sure = confidence(outcomes.p1)

    def one(name: str | None, where: NDArray[np.bool_]) -> System1Report:
        mass = outcomes.label_mass[where, 0]
        known = mass[np.isfinite(mass)]
        auc, p = ranking_auc(sure[where], right[where])
        middle = float(np.median(known)) if known.size else math.nan
        return System1Report(name, int(where.sum()), metrics.mean(right[where]), auc, p, middle)

    names = outcomes.dataset_names
    sets = [one(name, outcomes.dataset_codes == k) for k, name in enumerate(names)]
    return (one(None, np.ones(outcomes.n, dtype=bool)), *sets)


@dataclass(frozen=True)
class Headroom:
    """What thinking could win and what it would cost: what is asked before most of the thoughts are paid for.

    Attributes
    ----------
    system1 : tuple of System1Report
        All datasets together, then each.
    thoughts : int
        Questions that were thought about so far.
    accuracy : float
        Of System 1 on the tune side, 0 to 1, as the thoughts stand for it.
    gain : tuple of float
        What thinking about every question adds to it, at the largest budget and the server's own mix; and its 95 %
        interval.
    reachable : tuple of float
        What a gate that knew the answers would add, so the most that any policy could: the share that System 1 gets
        wrong and System 2 right; and its 95 % interval.
    tokens, seconds : float
        Mean of one thought; seconds NaN where unknown.
    left : int
        Questions without a thought.
    gpu_hours : float
        Estimate for those: seconds by questions in flight.
    """

    system1: tuple[System1Report, ...]
    thoughts: int
    accuracy: float
    gain: tuple[float, float, float]
    reachable: tuple[float, float, float]
    tokens: float
    seconds: float
    left: int
    gpu_hours: float

    def lines(self) -> list[str]:
        """The report in words, a line for each fact."""
        hours = "unknown" if math.isnan(self.gpu_hours) else f"about {self.gpu_hours:.2g} GPU hours (estimate)"
        return [
            str(self.system1[0]),
            f"thinking about all ({self.thoughts} tried) adds {100 * self.gain[0]:+.1f} points ({_span(self.gain)})",
            f"no policy can add more than {100 * self.reachable[0]:.1f} points ({_span(self.reachable)})",
            f"a thought takes {self.tokens:.0f} tokens and {self.seconds:.3g} s in the mean; "
            f"the {self.left} that are left: {hours}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not known."""
        plain: dict[str, Any] = finite(asdict(self))
        for row, report in zip(plain["system1"], self.system1, strict=True):
            row["gate_is_useless"] = report.gate_is_useless
        return plain


def _span(interval: tuple[float, float, float]) -> str:
    return f"95 % interval {100 * interval[1]:+.1f} to {100 * interval[2]:+.1f}"


def headroom(
    system1: Outcomes, outcomes: Outcomes, *, concurrency: int, left: int, rng: np.random.Generator
) -> Headroom:
    """What thinking could win and cost, from the questions that were thought about.

    Parameters
    ----------
    system1 : Outcomes
        All questions; nothing of System 2 is read.
    outcomes : Outcomes
        Those of the tune side with a thought, weighted by what they stand for.
    concurrency : int
        Questions in flight while they were asked.
    left : int
        Questions without a thought.
    rng : numpy.random.Generator
    """
    o, arm = outcomes, outcomes.arms[0]
    always = Policy(1.1, o.default_mix, int(o.budgets[-1]), arm)
    before = metrics.chosen(o.p1) == o.answer
    last = np.where(o.failed[:, -1:], 0.0, o.p2[:, -1])
    second = (metrics.chosen(last) == o.answer) & ~o.failed[:, -1]
    mixed = metrics.chosen(always.combine(o.p1, o.p2[:, -1])) == o.answer
    mixed = np.where(o.can_think, mixed & ~o.failed[:, -1], before)
    thinking = o.can_think

    def interval(values: Floats) -> tuple[float, float, float]:
        top, bottom = o.weight * values, o.weight
        low, high = intervals.bootstrap_interval(top, bottom, o.group_codes, rng=rng)
        return float(top.sum() / bottom.sum()), low, high

    weight = o.weight[thinking]
    seconds = metrics.mean(o.t2[0, thinking, -1], weight)
    return Headroom(
        system1=system1_report(system1),
        thoughts=int(thinking.sum()),
        accuracy=metrics.mean(before, o.weight),
        gain=interval(mixed * 1.0 - before),
        reachable=interval((~before & second & thinking) * 1.0),
        tokens=metrics.mean(o.tokens[thinking, -1], weight),
        seconds=seconds,
        left=left,
        gpu_hours=left * seconds / concurrency / 3600,
    )


@dataclass(frozen=True)
class Round:
    """One round of thoughts.

    Attributes
    ----------
    number : int
        1 is the pilot.
    tune, test : int
        Questions chosen on each side.
    tokens : int
        Thinking tokens.
    gpu_hours : float
        Estimate.
    threshold : float or None
        The gate of the policy that was best before; None for the pilot.
    """

    number: int
    tune: int
    test: int
    tokens: int
    gpu_hours: float
    threshold: float | None


@dataclass(frozen=True)
class StagedSummary:
    """What a staged collection came to.

    Attributes
    ----------
    arm : ArmSummary
        All its stages together.
    headroom : Headroom or None
        None when it ended before the pilot did.
    rounds : tuple of Round
        Those of this run.
    ended : str
        Why it ended, in words.
    thoughts, questions : int
        Questions with a thought now; those that can be thought about.
    tokens : int
        Thinking tokens of this run.
    gpu_hours : float
        Estimate of this run.
    interrupted : bool
        Whether it was stopped; the same call goes on.
    simulated : bool
    warnings : tuple of str
    """

    arm: ArmSummary
    headroom: Headroom | None
    rounds: tuple[Round, ...]
    ended: str
    thoughts: int
    questions: int
    tokens: int
    gpu_hours: float
    interrupted: bool = False
    simulated: bool = False
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain: dict[str, Any] = finite(asdict(self))
        plain["headroom"] = None if self.headroom is None else self.headroom.to_dict()
        return plain


# --- when it is enough ------------------------------------------------------------------------------------------------


def verdict(demand: Demand, system1: Outcomes, *, ledger: Ledger | None = None, seed: int = 0) -> Settled:
    """A judge that stops once more thoughts cannot change what ``calib optimize`` says.

    With targets: certified; or twice in a row not met, on held-out questions that say "never at this rate". Each look
    at the test side is entered in the ledger, and the certificate pays for all of them. Without targets: the policy is
    within `ENOUGH` of the best one that all thoughts would give, with the probability `SURE` (`calib.regret`), in the
    mean of this look and the one before, since a single one may be lucky. Never before the test side holds a thought.

    Parameters
    ----------
    demand : Demand
    system1 : Outcomes
        All questions; nothing of System 2 is read.
    ledger : callable, optional
        Of the store, see `calib.store.Store.record_look`.
    seed : int
        Of what is filled in for thoughts that are not there.
    """
    hopeless = 0
    looks: list[float] = []
    whole = system1.test_mask(demand.test_share)

    def judge(outcomes: Outcomes) -> str | None:
        nonlocal hopeless
        test = outcomes.test_mask(demand.test_share)
        if demand.test_share and (test.all() or not test.any()):
            return None
        if not demand.targets:
            tuned_on = outcomes.take(~test)
            if tuned_on.n < LEAST_JUDGED:
                return None
            asked: dict[str, Any] = {
                "maximize": demand.maximize,
                "minimize": demand.minimize,
                "budgets": demand.budgets,
            }
            rng = np.random.default_rng(seed)
            lost = regrets(system1.take(~whole), tuned_on, rng=rng, cost=demand.cost, **asked)
            looks.append(float(np.quantile(lost, SURE)))
            most = float(np.mean(looks[-2:]))
            words = f"more thoughts would win at most {100 * most:.2g} points of the objective ({SURE:.0%} sure)"
            return words if len(looks) > 1 and most <= ENOUGH else None
        tuned = tune(outcomes, demand, ledger=ledger)
        if tuned.verdict == "certified":
            return "certified"
        never = tuned.certificate is None or tuned.certificate.needs_more == "never"
        hopeless = hopeless + 1 if tuned.verdict == "not_met" and never else 0
        return "not met, and never at this rate" if hopeless > 1 else None

    return judge


# --- the collection ---------------------------------------------------------------------------------------------------


async def collect(
    questions: Sequence[Question],
    arm: str,
    engine: Engine,
    store: Store,
    *,
    budgets: Sequence[int] = (8192,),
    concurrency: int = 32,
    demand: Demand | None = None,
    confirm: Confirm | None = None,
    settled: Settled | None = None,
    budget_gpu_minutes: float = math.inf,
    pilot: int = PILOT,
    part: str = "",
    reserved: Sequence[Question] = (),
    retry_failed: bool = False,
    keep_text: bool = True,
    pause_when_waiting: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = log.info,
    stop: asyncio.Event | None = None,
    grace: float = GRACE,
) -> StagedSummary:
    """Fill the store in stages from one arm.

    Parameters
    ----------
    questions : sequence of Question
        See `calib.collect.choose`.
    arm : str
    engine : Engine
        Not closed here.
    store : Store
    budgets : sequence of int
        Think budgets, tokens; at least one.
    concurrency : int
        Questions in flight.
    demand : Demand, optional
        What will be asked of `calib.tuning.tune`: its targets say where the gate is looked for, its ``test_share``
        which questions are the test side.
    confirm : callable, optional
        Gets the `Headroom` after the pilot; False ends it there. Without it the collection goes on.
    settled : callable, optional
        Asked between rounds, see `verdict`; made of the demand when left out.
    budget_gpu_minutes : float
        Of this run: seconds of all answers by questions in flight. Those in flight at the end are still answered.
    pilot : int
        Thoughts before ``confirm``.
    part : str
        Which part of the questions these are, when several collectors share them (``1/4``).
    reserved : sequence of Question
        Left to the latency passes (see `calib.passes.reserve`).
    pause_when_waiting : int, optional
        Begin no question while more requests than that wait on the server.
    say : callable
        Gets what System 1 can do, line by line, before the first thought.
    retry_failed, keep_text, progress, stop, grace
        See `calib.collect.collect`.

    Raises
    ------
    CalibError
        See `calib.collect.collect`; no budget; no question that can be thought about.
    """
    ladder = tuple(sorted(set(budgets)))
    if not questions:
        raise CalibError("there are no questions to ask")
    if not ladder or ladder[0] < 1:
        raise CalibError("--budgets must name one think budget or more, of 1 token or more; write --budgets 512,2048")
    if concurrency < 1 or pilot < 1:
        raise CalibError(f"--concurrency and --pilot must be 1 or more, got {concurrency} and {pilot}")
    # the arm that answers is the only one whose outcomes are there yet
    demand = replace(demand or Demand(test_share=TEST_SHARE), arms=None)
    info = await engine.info()
    with ThreadPoolExecutor(1, thread_name_prefix="calib-store") as thread:
        staged = _Staged(
            questions=in_order(questions),
            arm=arm,
            engine=engine,
            info=info,
            store=store,
            ladder=ladder,
            concurrency=concurrency,
            demand=demand,
            part=part,
            reserved={(q.dataset, q.id) for q in reserved},
            retry_failed=retry_failed,
            keep_text=keep_text,
            pause_when_waiting=pause_when_waiting,
            progress=progress,
            say=say,
            stop=stop or asyncio.Event(),
            grace=grace,
            gpu_budget_s=60 * budget_gpu_minutes,
            thread=thread,
        )
        return await staged.run(pilot, confirm, settled)


@dataclass(eq=False)
class _Staged:
    """One staged collection: its options, and what it came to so far."""

    questions: list[Question]
    arm: str
    engine: Engine
    info: EngineInfo
    store: Store
    ladder: tuple[int, ...]
    concurrency: int
    demand: Demand
    part: str
    reserved: set[Name]
    retry_failed: bool
    keep_text: bool
    pause_when_waiting: int | None
    progress: Callable[[Progress], None] | None
    say: Callable[[str], None]
    stop: asyncio.Event
    grace: float
    gpu_budget_s: float
    thread: ThreadPoolExecutor
    fingerprint: str = ""
    by_name: dict[Name, Question] = field(default_factory=dict)
    summary: ArmSummary | None = None
    headroom: Headroom | None = None
    rounds: list[Round] = field(default_factory=list)
    gpu_seconds: float = 0.0
    tokens: int = 0
    complete: bool = True
    blind: bool = False
    warnings: list[str] = field(default_factory=list)
    touched: set[Name] = field(default_factory=set)
    failing: set[Name] = field(default_factory=set)

    async def on_disk(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a call of the store in its own thread: the event loop, and with it every clock, runs on."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(call, *args, **options))

    async def run(self, pilot: int, confirm: Confirm | None, settled: Settled | None) -> StagedSummary:
        """All stages."""
        self.by_name = {(q.dataset, q.id): q for q in self.questions}
        await self.on_disk(self.store.add_questions, self.questions, keep_text=self.keep_text)
        self.fingerprint = await self.on_disk(self.store.register_model, self.info)
        ended = await self._stages(pilot, confirm, settled)
        warnings = [*self.warnings, *([blind(self.arm)] if self.blind else [])]
        asked = await self._asked()
        assert self.summary is not None
        return StagedSummary(
            arm=self.summary,
            headroom=self.headroom,
            rounds=tuple(self.rounds),
            ended=ended,
            thoughts=sum(asked[name] for name in self.by_name if name in asked),
            questions=sum(self.info.can_think_about(question) for question in self.questions),
            tokens=self.tokens,
            gpu_hours=self.gpu_seconds / 3600,
            interrupted=self.stop.is_set() and not self.complete,
            simulated=self.info.simulated,
            warnings=tuple(warnings),
        )

    async def _stages(self, pilot: int, confirm: Confirm | None, settled: Settled | None) -> str:
        await self._system1()
        if (over := self._over()) is not None:
            return over
        if not await self._asked():
            raise NothingToStage(_NOTHING)
        system1 = await self._load(())
        whole, *each = system1_report(system1)
        for report in (whole, *(each if 1 < len(each) <= SHOWN else ())):
            self.say(str(report))
        await self._plan(system1)
        settled = settled or verdict(self.demand, system1, ledger=self.store.record_look)
        growth = GROWTH_WITH_TARGETS if self.demand.targets else GROWTH
        await self._ask_chosen("going on")
        if not await self._chosen_rounds():
            await self._round(None, pilot, "pilot")
        if (over := self._over()) is not None:
            return over
        outcomes = await self._load(self.ladder)
        asked = await self._asked()
        left = sum(not done for done in asked.values())
        tuned_on = outcomes.take(~outcomes.test_mask(self.demand.test_share))
        self.headroom = headroom(
            system1, tuned_on, concurrency=self.concurrency, left=left, rng=np.random.default_rng(self.demand.seed)
        )
        if left and confirm is not None and not confirm(self.headroom):
            return "ended after the pilot"
        while True:
            if all((await self._asked()).values()):
                return "every question was thought about"
            if (over := self._over()) is not None:
                return over
            if (reason := await asyncio.to_thread(settled, outcomes)) is not None:
                return reason
            tuned_on = outcomes.take(~outcomes.test_mask(self.demand.test_share))
            extra = max(LEAST_ROUND, math.ceil(growth * tuned_on.n))
            number = len(await self._chosen_rounds()) + 1
            await self._round(tuned_on, extra, f"round {number}")
            outcomes = await self._load(self.ladder)

    def _over(self) -> str | None:
        """Why nothing more may be asked."""
        if self.stop.is_set():
            return "interrupted"
        return f"{self.gpu_budget_s / 60:g} GPU minutes are spent" if self.gpu_seconds >= self.gpu_budget_s else None

    # --- stages ---

    async def _system1(self) -> None:
        coverage = await self.on_disk(self.store.coverage, self.fingerprint, self.arm, concurrency=self.concurrency)
        questions = [q for q in self.questions if (q.dataset, q.id) not in self.reserved]
        plan = plan_jobs(questions, coverage, (), self.retry_failed, self.info)
        crew = await self._ask(plan.jobs, "system1", already=plan.already + plan.failed_before, pass_number=0)
        self._add(crew, plan.already, plan.failed_before)

    async def _plan(self, system1: Outcomes) -> None:
        """Enter the strata of questions that have an answer of System 1."""
        rows = strata(self.questions, system1, test_share=self.demand.test_share, part=self.part)
        if all(row.test for row in rows):
            raise NothingToStage(_NOTHING)
        await self.on_disk(self.store.plan, self.fingerprint, rows)

    async def _round(self, tuned_on: Outcomes | None, extra: int, stage: str) -> None:
        """Choose, write down and ask the next thoughts."""
        planned, asked = await self._mine(), await self._asked()
        policy = None
        if tuned_on is not None:
            policy = optimum(tuned_on, self.demand.targets, arms=[self.arm]).policy or optimum(tuned_on).policy
        tune_side = [row for row in planned if not row.test]
        names = _next_thoughts(tune_side, asked, self.by_name, tuned_on, policy, extra)
        test: list[Name] = []
        if tuned_on is not None:
            done = sum(asked[row.dataset, row.id] for row in tune_side) + len(names)
            test = _next_test([row for row in planned if row.test], self.by_name, done / max(len(tune_side), 1))
        number = len(await self._chosen_rounds()) + 1
        await self.on_disk(self.store.choose, self.fingerprint, [*names, *test], number)
        before, gpu = self.tokens, self.gpu_seconds
        await self._ask_chosen(stage)
        threshold = None if policy is None else policy.threshold
        hours = (self.gpu_seconds - gpu) / 3600
        self.rounds.append(Round(number, len(names), len(test), self.tokens - before, hours, threshold))

    async def _ask_chosen(self, stage: str) -> None:
        """Ask what was chosen and not answered yet, both systems: seconds of one load, and p1 a second time."""
        asked = await self._asked(again=self.retry_failed)
        chosen = [row for row in await self._mine() if row.round > 0 and not asked.get((row.dataset, row.id), True)]
        jobs = [Job(self.by_name[row.dataset, row.id], self.ladder, system1=True) for row in chosen]
        jobs.sort(key=lambda job: place(text_hash(job.question), "asked"))
        self._add(await self._ask(jobs, stage, already=0, pass_number=PASS), 0, 0)
        self.retry_failed = False  # once in a run

    async def _ask(self, jobs: Sequence[Job], stage: str, *, already: int, pass_number: int) -> Crew:
        brake = None if self.pause_when_waiting is None else Brake(self.engine, self.pause_when_waiting)
        crew = Crew(
            self.arm,
            self.engine,
            jobs,
            partial(self.on_disk, self.store.write, self.fingerprint, keep_text=self.keep_text),
            concurrency=self.concurrency,
            keep_text=self.keep_text,
            progress=self.progress,
            already=already,
            stage=stage,
            pass_number=pass_number,
            brake=brake,
            gpu_budget_s=self.gpu_budget_s - self.gpu_seconds,
            check=partial(still_the_same, self.arm, self.engine, self.info),
        )
        if jobs:
            try:
                await crew.run(self.stop, self.grace)
                if not self.stop.is_set():
                    self.warnings = await still_the_same(self.arm, self.engine, self.info)
            except ServerReplaced:
                unchecked = list(crew.unchecked)
                await self.on_disk(mark_replaced, self.store, self.fingerprint, self.arm, unchecked)
                raise
        self.blind = self.blind or (brake is not None and brake.blind)
        return crew

    def _add(self, crew: Crew, already: int, failed_before: int) -> None:
        self.gpu_seconds += crew.gpu_seconds
        self.tokens += crew.tokens
        self.complete = self.complete and crew.complete
        self.touched |= crew.asked
        self.failing |= crew.failing
        before = self.summary or ArmSummary(self.arm, self.info.model, self.fingerprint, 0, 0, {}, 0, 0, 0.0)
        reasons = dict(before.reasons)
        for reason, count in crew.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
        self.summary = ArmSummary(
            arm=self.arm,
            model=self.info.model,
            fingerprint=self.fingerprint,
            asked=len(self.touched),
            failed=len(self.failing),
            reasons=reasons,
            already=before.already + already,
            failed_before=before.failed_before + failed_before,
            seconds=before.seconds + crew.seconds,
        )

    # --- what the store holds ---

    async def _load(self, budgets: Sequence[int]) -> Outcomes:
        return await self.on_disk(
            load_outcomes,
            self.store,
            model=self.fingerprint,
            datasets=sorted({question.dataset for question in self.questions}),
            budgets=list(budgets),
            arms=[self.arm],
            concurrency=self.concurrency,
        )

    async def _mine(self) -> list[Planned]:
        planned = await self.on_disk(self.store.planned, self.fingerprint)
        return [row for row in planned if row.part == self.part and (row.dataset, row.id) in self.by_name]

    async def _chosen_rounds(self) -> set[int]:
        return {row.round for row in await self._mine()} - {0}

    async def _asked(self, *, again: bool = False) -> dict[Name, bool]:
        """Whether all budgets of each question that can think were asked, with or without (``again``) an answer."""
        coverage = await self.on_disk(self.store.coverage, self.fingerprint, self.arm)
        nothing = Covered(False, frozenset(), False, frozenset(), frozenset(), False)
        found = {}
        for name, question in self.by_name.items():
            if self.info.can_think_about(question):
                covered = coverage.get(name, nothing)
                if covered.system1:
                    found[name] = set(self.ladder) <= covered.budgets | (frozenset() if again else covered.failed)
        return found


def strata(questions: Sequence[Question], system1: Outcomes, *, test_share: float, part: str = "") -> list[Planned]:
    """What the store enters of questions that have an answer of System 1.

    Parameters
    ----------
    questions : sequence of Question
    system1 : Outcomes
        Of them, and of others perhaps; nothing of System 2 is read.
    test_share : float
    part : str
        See `collect`.
    """
    by_name = {(question.dataset, question.id): question for question in questions}
    band = bands(confidence(system1.p1)).tolist()
    wrong = (metrics.chosen(system1.p1) != system1.answer).tolist()
    names = zip(system1.dataset.tolist(), system1.ids.tolist(), strict=True)
    rows = []
    for name, number, errs, thinkable in zip(names, band, wrong, system1.can_think.tolist(), strict=True):
        if (question := by_name.get(name)) is not None:
            test = split_position(split_key(question)) < test_share
            if test or thinkable:  # what cannot be thought about stands for itself
                rows.append(Planned(*name, part, test, number, errs))
    return rows


# --- who is next ------------------------------------------------------------------------------------------------------


def _next_thoughts(
    rows: Sequence[Planned],
    asked: dict[Name, bool],
    by_name: dict[Name, Question],
    tuned_on: Outcomes | None,
    policy: Policy | None,
    extra: int,
) -> list[Name]:
    """Questions of the tune side to think about next, by strata: near the gate first, and some of every band."""
    waiting: dict[_Stratum, list[Name]] = {}
    numbers: dict[_Stratum, int] = {}
    of: dict[Name, int] = {}
    for row in rows:
        name, key = (row.dataset, row.id), (row.dataset, row.band, row.wrong)
        of[name] = numbers.setdefault(key, len(numbers))
        if not asked.get(name, True) and row.round == 0:
            waiting.setdefault(key, []).append(name)
    strata = list(numbers)
    codes = np.array([of[row.dataset, row.id] for row in rows], dtype=np.int64)
    size = np.bincount(codes, minlength=len(strata))
    held = size - np.array([len(waiting.get(key, ())) for key in strata], dtype=np.int64)
    variance, cost = _guesses(strata, of, tuned_on, policy)
    if policy is not None:
        gate = int(bands(np.array([policy.threshold]))[0])
        distance = np.abs(np.array([band for _, band, _ in strata]) - gate)
        variance = variance * (1 + 3 * np.exp(-distance))  # the threshold is decided there
    plain = np.ones(len(strata))
    even = allocate(size, held, plain, plain, CONFIDENT_SHARE * extra) if policy is not None else np.zeros_like(size)
    more = even + allocate(size, held + even, variance, cost, extra - even.sum())
    chosen: list[Name] = []
    for key, count in zip(strata, more.tolist(), strict=True):
        order = sorted(waiting.get(key, ()), key=lambda name: place(text_hash(by_name[name])))
        chosen += order[:count]
    return chosen


def _guesses(
    strata: Sequence[_Stratum], of: dict[Name, int], tuned_on: Outcomes | None, policy: Policy | None
) -> tuple[Floats, Floats]:
    """Variance of the gain of thinking in each stratum, and tokens of a thought there, (H,) each.

    Before anything is known of a stratum: thinking mends about half of System 1's mistakes and spoils few of its right
    answers, as often and at as many tokens as in all other strata where System 1 does alike. That counts as four
    thoughts.
    """
    wrong = np.array([errs for *_, errs in strata], dtype=bool)
    change, cost = np.where(wrong, 0.5, 0.1), np.ones(len(strata))
    if tuned_on is None or policy is None:
        return change * (1 - change), cost
    o = tuned_on
    names = list(zip(o.dataset.tolist(), o.ids.tolist(), strict=True))
    where = np.array([i for i, name in enumerate(names) if name in of and o.can_think[i]], dtype=np.int64)
    if not where.size:
        return change * (1 - change), cost
    code = np.array([of[names[i]] for i in where], dtype=np.int64)
    b = o.budget_index(policy.think_budget)
    after = metrics.chosen(policy.combine(o.p1, o.p2[:, b])) == o.answer
    changed = np.where(wrong[code], after[where], ~after[where])
    used = o.tokens[where, -1]
    h, guess = len(strata), 4.0
    for errs in (False, True):
        alike = wrong[code] == errs
        change[wrong == errs] = (change[wrong == errs] + changed[alike].sum()) / (1 + alike.sum())
    n = np.bincount(code, minlength=h)
    change = (guess * change + np.bincount(code, changed, minlength=h)) / (guess + n)
    tokens = (guess * used.mean() + np.bincount(code, used, minlength=h)) / (guess + n)
    return change * (1 - change), np.maximum(tokens, 1.0)


def _next_test(rows: Sequence[Planned], by_name: dict[Name, Question], share: float) -> list[Name]:
    """Questions of the test side to think about next: those first in a random order, up to this share of all."""
    return [
        (row.dataset, row.id)
        for row in rows
        if row.round == 0 and place(text_hash(by_name[row.dataset, row.id])) < share
    ]

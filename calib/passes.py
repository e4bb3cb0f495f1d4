"""Latency passes: seconds of a small sample per arm and load, taken while nothing else keeps the servers busy.

Answers come at high concurrency from one arm; seconds worth tuning on are taken here, one arm at a time, at each stated
load. The questions of a pass are new to the server, or sent with a cache salt of their own, so that its prefix cache
does not flatter it. The load is reached before the first measured question begins and kept until the last one ends. A
pass during which another server worked is void: its seconds are kept and do not count. A robust line through them fills
in the other questions when outcomes are loaded (`calib.latency`), marked as estimated.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from calib.busyness import counters_of, running
from calib.collect import ServerReplaced, mark_replaced, still_the_same
from calib.crew import Progress
from calib.engine.base import Answer, AskFailed, Engine, EngineInfo, PartlyFailed, ServerBusy
from calib.engine.http import UNREACHABLE
from calib.engine.prometheus import Serving, between
from calib.errors import CalibError
from calib.questions import Question, split_key, split_position, text_hash
from calib.sampling import place
from calib.store import Answered, Failed, LatencyPass, PassState, Store

__all__ = ["CONCURRENCIES", "SAMPLE", "PassReport", "collect", "reserve", "takes_salt"]

SAMPLE = 100
CONCURRENCIES = (1, 32)
WARM_UP = 3
"""Questions that are asked and thrown away before a pass, besides those that fill the load."""
PATIENCE_S = 30.0
"""How long a pass waits for other servers to come to rest."""
POLL_S = 1.0

Name = tuple[str, str]


@dataclass(frozen=True)
class PassReport:
    """What one latency pass came to.

    Attributes
    ----------
    arm : str
    concurrency, number : int
    state : {"done", "void", "open"}
        ``open``: interrupted; the same call goes on.
    timed, failed : int
        Questions of this run.
    note : str
        Why it is void, or what could not be checked.
    hit_rate : float
        Share of the prompt tokens that came from the prefix cache; NaN where unknown.
    acceptance_length, acceptance_length_max, acceptance_share : float
        Of speculative decoding during the pass: tokens of a step and the most that they could be, share of the drafted
        tokens that were accepted (at most 1); NaN without.
    seconds, gpu_hours : float
        Wall time and, of it, an estimate of the server's.
    """

    arm: str
    concurrency: int
    number: int
    state: PassState
    timed: int
    failed: int
    note: str
    hit_rate: float
    seconds: float
    gpu_hours: float
    acceptance_length: float = math.nan
    acceptance_length_max: float = math.nan
    acceptance_share: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not known."""
        plain = asdict(self)
        unknown = {name for name, value in plain.items() if isinstance(value, float) and math.isnan(value)}
        return plain | dict.fromkeys(unknown)


def takes_salt(engine: Engine) -> bool:
    """Whether requests can be kept from sharing cached prefixes."""
    return bool(getattr(engine, "takes_salt", hasattr(engine, "cache_salt")))


def reserve(
    questions: Iterable[Question], sample: int, concurrencies: Sequence[int], info: EngineInfo, *, test_share: float
) -> list[Question]:
    """Questions that an arm is not asked before its latency passes, where its server takes no salt.

    Parameters
    ----------
    questions : iterable of Question
    sample : int
        Of one pass.
    concurrencies : sequence of int
        Each pass has questions of its own.
    info : EngineInfo
        Who is asked.
    test_share : float
        None of the test side: it is a random sample, and these are not.

    Returns
    -------
    list of Question
        An even share of each dataset, at most a fifth of the questions that can be thought about.
    """
    there = [q for q in questions if info.can_think_about(q) and split_position(split_key(q)) >= test_share]
    return _spread(there)[: min(sample * len(concurrencies), len(there) // 5)]


def _spread(questions: Sequence[Question]) -> list[Question]:
    """Random order in which every dataset has its share of each part."""
    by_dataset: dict[str, list[Question]] = defaultdict(list)
    for question in sorted(questions, key=lambda q: place(text_hash(q), "latency")):
        by_dataset[question.dataset].append(question)
    placed = [
        ((i + 0.5) / len(rows), name, question) for name, rows in by_dataset.items() for i, question in enumerate(rows)
    ]
    return [question for *_, question in sorted(placed, key=lambda row: row[:2])]


# --- the passes -------------------------------------------------------------------------------------------------------


async def collect(
    questions: Sequence[Question],
    arms: Mapping[str, Engine],
    store: Store,
    *,
    budgets: Sequence[int] = (8192,),
    concurrencies: Sequence[int] = CONCURRENCIES,
    sample: int = SAMPLE,
    test_share: float = 0.3,
    answers_at: int | None = None,
    only: Sequence[str] | None = None,
    again: bool = False,
    asked_again: bool = False,
    keep_text: bool = True,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
    patience_s: float = PATIENCE_S,
    poll_s: float = POLL_S,
) -> list[PassReport]:
    """Time a sample by each arm at each load; what is there already is left alone.

    Parameters
    ----------
    questions : sequence of Question
    arms : mapping of str to Engine
        All that run now: while one is timed, the others have to be idle. Not closed here.
    store : Store
    budgets : sequence of int
        Think budgets, tokens.
    concurrencies : sequence of int
        Questions in flight, a pass for each.
    sample : int
        Questions of a pass.
    test_share : float
        Passes take their questions from the tune side.
    answers_at : int, optional
        Load at which the answers were collected. A pass at another load that asks questions which have no answer
        leaves them without one, since their seconds at that load would be missing.
    only : sequence of str, optional
        Arms to time; all by default.
    again : bool
        Whether to make a new pass where one is done.
    asked_again : bool
        Whether the questions will be asked once more, so that one that fails here need not be kept as a failure.
    keep_text, progress, stop
        See `calib.collect.collect`.
    patience_s, poll_s : float
        Seconds to wait for other servers to come to rest, and between two looks at them.

    Raises
    ------
    CalibError
        A sample or a load below 1, no budget, an unknown arm, or a server that cannot be asked or stopped answering.
        What was answered is stored, and the same call goes on.
    """
    ladder = tuple(sorted(set(budgets)))
    if sample < 1 or not concurrencies or min(concurrencies) < 1 or not ladder or ladder[0] < 1:
        raise CalibError(
            "a latency pass needs budgets, a sample and loads of 1 or more; write for instance "
            "--latency-sample 100 --latency-concurrency 1,32"
        )
    chosen = list(arms) if only is None else list(only)
    if unknown := [arm for arm in chosen if arm not in arms]:
        raise CalibError(f"arm {unknown[0]!r} does not run; there are: {', '.join(arms)}")
    stop = stop or asyncio.Event()
    infos = {arm: await arms[arm].info() for arm in chosen}
    thinkable = [q for q in questions if all(info.can_think_about(q) for info in infos.values())]
    there = [q for q in thinkable if split_position(split_key(q)) >= test_share]
    if not there:
        raise CalibError("no question of the tune side can be thought about: nothing to time")
    reports: list[PassReport] = []
    for arm in chosen:
        fingerprint = await asyncio.to_thread(store.register_model, infos[arm])
        await asyncio.to_thread(partial(store.add_questions, keep_text=keep_text), questions)
        for concurrency in dict.fromkeys(concurrencies):
            if stop.is_set():
                return reports
            one = _Pass(
                *(arm, arms, store, fingerprint, ladder, concurrency, stop, asked_again, keep_text, progress),
                *(patience_s, poll_s),
            )
            report = await one.run(there, sample, answers_at, again=again)
            if report is not None:
                reports.append(report)
                await one.end(infos[arm])
    return reports


@dataclass(eq=False)
class _Pass:
    """One arm at one load."""

    arm: str
    arms: Mapping[str, Engine]
    store: Store
    fingerprint: str
    ladder: tuple[int, ...]
    concurrency: int
    stop: asyncio.Event
    asked_again: bool
    keep_text: bool
    progress: Callable[[Progress], None] | None
    patience_s: float
    poll_s: float
    number: int = 0
    timed: int = 0
    failed: int = 0
    busy_s: float = 0.0
    silent: int = 0
    written: list[Question] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    disturbed: str = ""

    @property
    def engine(self) -> Engine:
        """The arm that is timed."""
        return self.arms[self.arm]

    async def run(
        self, there: Sequence[Question], sample: int, answers_at: int | None, *, again: bool
    ) -> PassReport | None:
        """Make the pass; None where one is done already."""
        mine = [
            one
            for one in await asyncio.to_thread(self.store.passes, self.fingerprint)
            if (one.arm, one.concurrency) == (self.arm, self.concurrency)
        ]
        if not again and any(one.state == "done" for one in mine):
            return None
        self.number = await asyncio.to_thread(self.store.open_pass, self.fingerprint, self.arm, self.concurrency)
        measured, fillers, storing = await self._chosen(there, sample, answers_at)
        started = time.perf_counter()
        salted = takes_salt(self.engine)
        before_salt = getattr(self.engine, "cache_salt", None)
        if salted:
            self.engine.cache_salt = secrets.token_hex(8)  # type: ignore[attr-defined]
        try:
            before = await counters_of(self.engine)
            if await self._at_rest():
                await self._measure(measured, fillers, storing)
            after = await counters_of(self.engine)
        finally:
            if salted:
                self.engine.cache_salt = before_salt  # type: ignore[attr-defined]
        seconds = time.perf_counter() - started
        unfinished = self.stop.is_set() and self.timed + self.failed < len(measured)
        state: PassState = "void" if self.disturbed else "open" if unfinished else "done"
        note = "; ".join([*([self.disturbed] if self.disturbed else []), *dict.fromkeys(self.notes)])
        served = None if before is None or after is None else between(before, after)
        hit_rate = math.nan if served is None else served.prefix_hit_rate
        known = None if math.isnan(hit_rate) else hit_rate
        row = LatencyPass(self.arm, self.concurrency, self.number, state, note, known)
        await asyncio.to_thread(self.store.set_pass, self.fingerprint, row)
        hours = self.busy_s / self.concurrency / 3600
        speculation = () if served is None else _speculation(served)
        return PassReport(
            *(self.arm, self.concurrency, self.number, state, self.timed, self.failed, note, hit_rate, seconds, hours),
            *speculation,
        )

    async def end(self, info: EngineInfo) -> None:
        """See that the server is the one that it was; else the pass is void and its answers are marked."""
        try:
            await still_the_same(self.arm, self.engine, info)
        except ServerReplaced:
            row = LatencyPass(self.arm, self.concurrency, self.number, "void", "the server was replaced", None)
            await asyncio.to_thread(self.store.set_pass, self.fingerprint, row)
            await asyncio.to_thread(mark_replaced, self.store, self.fingerprint, self.arm, self.written)
            raise

    # --- which questions ---

    async def _chosen(
        self, there: Sequence[Question], sample: int, answers_at: int | None
    ) -> tuple[list[Question], list[Question], dict[Name, bool]]:
        """Questions to time, others that keep up the load, and whether the answer of each timed one is kept."""
        status = await asyncio.to_thread(self.store.status)
        held = next(model for model in status.models if model.fingerprint == self.fingerprint)
        by_arm = {
            arm: await asyncio.to_thread(self.store.coverage, self.fingerprint, arm)
            for arm in {self.arm, *(row.arm for row in held.coverage)}
        }
        thought = {
            name
            for coverage in by_arm.values()
            for name, covered in coverage.items()
            if covered.system1 and set(self.ladder) <= covered.budgets | covered.failed
        }
        touched = set(by_arm[self.arm])
        done = await asyncio.to_thread(
            self.store.timed_in_pass, self.fingerprint, self.arm, self.concurrency, self.number
        )
        order = _spread(there)
        fresh = order if takes_salt(self.engine) else [q for q in order if _name(q) not in touched]
        answered = [q for q in fresh if _name(q) in thought]
        # those that another arm has answered first, so that arms are compared on the same questions
        wanted = answered + [q for q in fresh if _name(q) not in thought]
        if len(wanted) + len(done) < sample and not takes_salt(self.engine):
            known = [q for q in order if _name(q) in touched and _name(q) not in done]
            if known:
                self.notes.append("the server was asked some of these questions before: its cache may flatter it")
            wanted += known
        measured = [q for q in wanted if _name(q) not in done][: max(0, sample - len(done))]
        picked = {_name(q) for q in measured} | done
        fillers = [q for q in order if _name(q) not in picked][::-1]  # from the other end: later passes need the front
        keeps = answers_at is None or answers_at == self.concurrency
        return measured, fillers, {_name(q): keeps or _name(q) in thought for q in measured}

    # --- asking ---

    async def _at_rest(self) -> bool:
        """Wait until no server works; False where one goes on and the pass is void."""
        until = time.monotonic() + self.patience_s
        while True:
            busy = await self._busy(self.arms)
            if not busy:
                return True
            if time.monotonic() >= until or self.stop.is_set():
                self.disturbed = f"{busy} before it began"
                return False
            await asyncio.sleep(self.poll_s)

    async def _busy(self, arms: Iterable[str]) -> str:
        """Which of these servers work, in words; empty for none."""
        for arm in arms:
            now = await running(self.arms[arm])
            if math.isnan(now):
                self.notes.append(f"{arm!r} has no /metrics that tell its load: whether it was idle is not known")
            elif now > 0:
                return f"{now:g} requests ran on {arm!r}"
        return ""

    async def _watch(self, over: asyncio.Event) -> None:
        """End the pass once another server works."""
        others = [arm for arm in self.arms if arm != self.arm]
        while others and not over.is_set():
            if busy := await self._busy(others):
                self.disturbed = f"{busy} meanwhile"
                over.set()
            await asyncio.sleep(self.poll_s)

    async def _measure(
        self, measured: Sequence[Question], fillers: Sequence[Question], storing: dict[Name, bool]
    ) -> None:
        """Time the questions, the load being full from the first to the last of them."""
        if not measured:
            return
        warm_up = max(WARM_UP, self.concurrency)
        others: Iterator[Question] = itertools.cycle(fillers) if fillers else iter(())
        if not fillers:
            self.notes.append("no other questions for a warm-up: the first seconds may hold that of the server")
        queue: Iterator[tuple[Question, bool]] = itertools.chain(
            ((question, False) for question in itertools.islice(others, warm_up)),
            ((question, True) for question in measured),
            ((question, False) for question in others),
        )
        over = asyncio.Event()
        left = len(measured)
        started = time.perf_counter()

        async def work() -> None:
            nonlocal left
            for question, counts in queue:
                if over.is_set() or self.stop.is_set():
                    return
                record = await self._ask(question)
                self._bear(record)
                if not counts:
                    continue
                await self._keep(record, storing[_name(question)])
                left -= 1
                self._report(len(measured) - left, len(measured), time.perf_counter() - started)
                if left == 0:
                    over.set()

        crew = [asyncio.create_task(work()) for _ in range(self.concurrency)]
        watch = asyncio.create_task(self._watch(over))
        ended = asyncio.create_task(over.wait())
        try:
            pending: set[asyncio.Task[Any]] = set(crew)
            while pending and not over.is_set():
                done, _ = await asyncio.wait({*pending, ended}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & pending:
                    task.result()
                pending -= done
        finally:
            for task in (*crew, watch, ended):  # questions that only kept up the load are given up
                task.cancel()
            await asyncio.gather(*crew, watch, ended, return_exceptions=True)

    async def _ask(self, question: Question) -> Answered | Failed:
        """Both systems' answer, or why there is none: a timeout is censored at its seconds, not dropped."""
        try:
            answer = await self.engine.ask(question, self.ladder, system1=True, keep_text=self.keep_text)
        except PartlyFailed as failure:
            return self._answered(question, failure.partial)
        except AskFailed as failure:
            seconds, attempts = failure.seconds, failure.attempts
            return Failed(
                question,
                self.arm,
                self.ladder,
                "both",
                failure.reason,
                failure.detail,
                seconds,
                attempts,
                self.concurrency,
            )
        except ServerBusy as busy:
            return Failed(question, self.arm, self.ladder, "both", "busy", str(busy), math.nan, 1, self.concurrency)
        return self._answered(question, answer)

    def _answered(self, question: Question, answer: Answer) -> Answered:
        return Answered(question, self.arm, answer, self.concurrency, self.number)

    async def _keep(self, record: Answered | Failed, store_answer: bool) -> None:
        if isinstance(record, Failed):
            self.failed += 1
            self.busy_s += 0.0 if math.isnan(record.seconds) else record.seconds
            # as a failure it would stand for an answer that nobody asked for at this load, or that comes yet; and a
            # server that cannot be reached says nothing of the question
            if not store_answer or self.asked_again or record.reason in UNREACHABLE:
                self.notes.append("questions failed and are not among its seconds")
                return
        else:
            self.timed += 1
            self.busy_s += float(np.nan_to_num(record.answer.t1)) + float(
                np.nan_to_num(record.answer.t2).max(initial=0)
            )
        write = partial(self.store.write, keep_text=self.keep_text, timings_only=not store_answer)
        await asyncio.to_thread(write, self.fingerprint, [record])
        self.written.append(record.question)

    def _bear(self, record: Answered | Failed) -> None:
        """Give up on a server that many questions in a row could not reach."""
        self.silent = self.silent + 1 if isinstance(record, Failed) and record.reason in UNREACHABLE else 0
        if isinstance(record, Failed) and self.silent >= max(20, 2 * self.concurrency):
            raise CalibError(
                f"arm {self.arm!r}: the server is gone. {self.silent} questions in a row got no answer, the last one: "
                f"{record.reason}, {record.detail}. What was answered is stored. See the server's log, start it again, "
                "and give the same command",
                exit_code=1,
            )

    def _report(self, done: int, total: int, elapsed: float) -> None:
        if self.progress is None:
            return
        rate = done / elapsed if elapsed > 0 else 0.0
        hours = self.busy_s / self.concurrency / 3600
        self.progress(
            Progress(
                self.arm,
                done,
                total,
                0,
                self.failed,
                self.concurrency,
                rate,
                elapsed,
                (total - done) / rate if rate > 0 else math.nan,
                stage=f"latency at {self.concurrency}",
                gpu_hours=hours,
                gpu_hours_left=hours / done * (total - done) if done else math.nan,
            )
        )


def _speculation(served: Serving) -> tuple[float, float, float]:
    return served.acceptance_length, served.acceptance_length_max, served.acceptance_share


def _name(question: Question) -> Name:
    return question.dataset, question.id

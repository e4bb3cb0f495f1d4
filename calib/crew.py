"""One arm's collection: a fixed crew of workers that ask, and one writer; counts, progress, and a server that dies.

Leaves to others: what is asked and which arms there are (`calib.collect`), wire formats and the checks of an answer
(`calib.engine`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import numpy as np

from calib.busyness import Brake
from calib.engine.base import Answer, AskFailed, Engine, PartlyFailed, ServerBusy
from calib.engine.http import UNREACHABLE
from calib.errors import CalibError
from calib.questions import Question
from calib.store import Answered, Failed

__all__ = ["Crew", "Job", "Progress", "Record", "Writer"]

_TICK = 0.2
"""Seconds between two calls of ``progress``."""
CHECK_S = 300.0
"""Seconds between two looks whether the server is the same one."""

Record: TypeAlias = Answered | Failed
Write: TypeAlias = Callable[[Sequence[Record]], Awaitable[None]]


@dataclass(frozen=True)
class Progress:
    """Where the collection of one arm stands.

    Attributes
    ----------
    arm : str
    done, total : int
        Questions that are stored, or were given up; all that were chosen.
    already : int
        Those of ``done`` that needed nothing: stored before, or failed before and not to be asked again.
    failed : int
        Questions of this run of which a part failed.
    in_flight : int
        Questions that wait for the server, or to be written.
    rate : float
        Questions per second of this run.
    elapsed_s, eta_s : float
        Seconds since the arm's start, and until its end at this rate; NaN before the first answer.
    stage : str
        What is done: ``all``, ``system1``, ``pilot``, ``round 2``, ``latency at 32``, ``audit``.
    gpu_hours, gpu_hours_left : float
        What this stage took of the server and will take, an estimate: seconds of the answers by requests in flight.
        What is left is NaN before the first answer.
    paused : bool
        Whether no question is begun because the server has requests waiting.
    """

    arm: str
    done: int
    total: int
    already: int
    failed: int
    in_flight: int
    rate: float
    elapsed_s: float
    eta_s: float
    stage: str = "all"
    gpu_hours: float = 0.0
    gpu_hours_left: float = math.nan
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What one question lacks: budgets of System 2, ascending, and whether System 1."""

    question: Question
    budgets: tuple[int, ...]
    system1: bool


class _Batch:
    """Records that are written together, and the news that they are."""

    __slots__ = ("records", "written")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.written = asyncio.Event()


class Writer:
    """Writes batch after batch; what arrives while one is written is the next.

    So a lone record is written at once, and under load one transaction serves many.

    Parameters
    ----------
    write : callable
        Returns once the records are on disk.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._batch = _Batch()
        self._wake = asyncio.Event()
        self._closing = False

    async def put(self, records: Sequence[Record]) -> None:
        """Return once the records are written."""
        batch = self._batch
        batch.records += records
        self._wake.set()
        await batch.written.wait()

    def close(self) -> None:
        """Let `run` end once all is written."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Write until closed; an error of ``write`` ends it, and whoever waits in `put` has to be cancelled."""
        while not self._closing or self._batch.records:
            await self._wake.wait()
            if not self._closing:
                self._wake.clear()
            if self._batch.records:
                batch, self._batch = self._batch, _Batch()
                await self._write(batch.records)
                batch.written.set()


class Crew:
    """One arm: a fixed number of workers that each take the next question, and one writer.

    A question counts as in flight until it is written, so no more than ``concurrency`` can be lost.

    Parameters
    ----------
    arm : str
    engine : Engine
    jobs : sequence of Job
        Asked in this order.
    write : callable
        Returns once the records are on disk.
    concurrency : int
        Workers.
    keep_text : bool
        Whether to ask for thoughts.
    progress : callable, optional
        Called about five times a second, and at the end.
    already : int
        Questions beside the jobs, which need nothing; for the progress.
    stage : str
        For the progress.
    pass_number : int
        Number of the timings.
    brake : Brake, optional
        Holds back new questions while the server has requests waiting.
    gpu_budget_s : float
        No question is begun once the answers took this many seconds of the server (see ``gpu_seconds``).
    check : callable, optional
        Called every `CHECK_S` seconds; what it raises ends the collection.

    Attributes
    ----------
    done, failed : int
        Questions answered or given up; those of which a part failed.
    asked, failing : set of (str, str)
        The same by dataset and id.
    unchecked : list of Question
        Those of them that were written since the last ``check`` without an error began.
    gpu_seconds : float
        Estimate of the server's time: seconds of all answers and failures by the number of workers.
    tokens : int
        Thinking tokens, of each thought at its largest budget.
    reasons : Counter
        Failures by reason.
    seconds : float
        Wall time of `run`.
    """

    def __init__(
        self,
        arm: str,
        engine: Engine,
        jobs: Sequence[Job],
        write: Write,
        *,
        concurrency: int,
        keep_text: bool,
        progress: Callable[[Progress], None] | None = None,
        already: int = 0,
        stage: str = "all",
        pass_number: int = 0,
        brake: Brake | None = None,
        gpu_budget_s: float = math.inf,
        check: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.done = self.failed = self.tokens = 0
        self.asked: set[tuple[str, str]] = set()
        self.failing: set[tuple[str, str]] = set()
        self.unchecked: list[Question] = []
        self.gpu_seconds = 0.0
        self.reasons: Counter[str] = Counter()
        self.seconds = 0.0
        self._arm = arm
        self._engine = engine
        self._jobs = jobs
        self._concurrency = concurrency
        self._keep_text = keep_text
        self._progress = progress
        self._already = already
        self._stage = stage
        self._pass = pass_number
        self._brake = brake
        self._gpu_budget_s = gpu_budget_s
        self._check = check
        self._writer = Writer(write)
        self._in_flight = 0
        self._patience = max(20, 2 * concurrency)
        self._silent: list[Failed] = []
        self._started = time.perf_counter()

    @property
    def complete(self) -> bool:
        """Whether every question was answered or given up."""
        return self.done == len(self._jobs)

    @property
    def spent(self) -> bool:
        """Whether the server's time is used up."""
        return self.gpu_seconds >= self._gpu_budget_s

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Ask all, until ``stop`` is set; questions in flight then get ``grace`` seconds.

        Raises
        ------
        CalibError
            The server is gone, is another one, or wants another key. What was answered is written.
        """
        self._started = time.perf_counter()
        work = asyncio.create_task(self._ask_all(stop))
        writer = asyncio.create_task(self._writer.run())
        ticker = asyncio.create_task(self._tick())
        braking = asyncio.create_task(self._brake.run() if self._brake else _nothing())
        checking = asyncio.create_task(self._watch())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, writer, checking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await asyncio.wait({work, writer}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, ticker, braking, checking, stopping):
                task.cancel()
            await asyncio.gather(work, ticker, braking, checking, stopping, return_exceptions=True)
            self._writer.close()
            await writer  # what was answered is written, also when we are cancelled; raises when it cannot be
            self.seconds = time.perf_counter() - self._started
        for task in (checking, work):
            if not task.cancelled():
                task.result()
        self._report()

    async def _watch(self) -> None:
        """Look again and again whether the server is the same one; never returns."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._check is not None:
                written = len(self.unchecked)  # those that came while it looked may be another server's
                await self._check()
                del self.unchecked[:written]

    async def _ask_all(self, stop: asyncio.Event) -> None:
        jobs = iter(self._jobs)
        try:
            async with asyncio.TaskGroup() as crew:
                for _ in range(min(self._concurrency, len(self._jobs))):
                    crew.create_task(self._work(jobs, stop))
        except ExceptionGroup as group:  # the first one ended the others
            raise group.exceptions[0] from None
        if self._silent and not stop.is_set():
            await self._settle()

    async def _work(self, jobs: Iterator[Job], stop: asyncio.Event) -> None:
        for job in jobs:
            if self._brake is not None and not stop.is_set():
                await self._brake.released(stop)
            if stop.is_set() or self.spent:
                return
            self._in_flight += 1
            try:
                records = await self._ask(job)
                if _is_silence(records):
                    self._bear(records[0])
                else:
                    spoken, self._silent = self._silent, []
                    await self._keep([records, *([failure] for failure in spoken)])
            finally:
                self._in_flight -= 1

    async def _ask(self, job: Job) -> list[Record]:
        """One question's records: what was answered, what failed."""
        try:
            answer = await self._answer(job)
        except PartlyFailed as failure:
            missing = tuple(budget for budget in job.budgets if budget not in failure.partial.budgets)
            return [self._answered(job, failure.partial), self._failure(job, failure, missing, "system2")]
        except AskFailed as failure:
            if not (job.system1 and job.budgets) or failure.reason in UNREACHABLE:
                stage = "both" if job.system1 and job.budgets else "system1" if job.system1 else "system2"
                return [self._failure(job, failure, job.budgets, stage)]
            return await self._without_thinking(job, failure)
        return [self._answered(job, answer)]

    async def _without_thinking(self, job: Job, failure: AskFailed) -> list[Record]:
        """System 1 alone, so that a thought that failed does not cost its answer."""
        try:
            answer = await self._answer(Job(job.question, (), system1=True))
        except AskFailed as second:
            # A server that cannot be reached says nothing of System 1: it is asked again by the next run.
            stage = "system2" if second.reason in UNREACHABLE else "both"
            return [self._failure(job, failure, job.budgets, stage)]
        return [self._answered(job, answer), self._failure(job, failure, job.budgets, "system2")]

    async def _answer(self, job: Job) -> Answer:
        try:
            return await self._engine.ask(
                job.question, job.budgets, system1=job.system1, keep_text=self._keep_text and bool(job.budgets)
            )
        except ServerBusy as busy:
            raise AskFailed("busy", str(busy)) from None

    def _answered(self, job: Job, answer: Answer) -> Answered:
        return Answered(job.question, self._arm, answer, self._concurrency, self._pass)

    def _failure(self, job: Job, failure: AskFailed, budgets: tuple[int, ...], stage: str) -> Failed:
        return Failed(
            job.question,
            self._arm,
            budgets,
            stage,
            failure.reason,
            failure.detail,
            failure.seconds,
            failure.attempts,
            self._concurrency,
        )

    # A server that died fails every question, which says nothing of the questions. So failures without any answer are
    # held back: they are kept as failures once the server speaks again, and dropped, to be asked by the next run, when
    # it does not.

    def _bear(self, failure: Failed) -> None:
        self._silent.append(failure)
        if len(self._silent) >= self._patience:
            raise self._gone()

    async def _settle(self) -> None:
        """At the end of all questions: the last ones got no answer."""
        try:
            await self._engine.info()
        except CalibError:
            raise self._gone() from None
        await self._keep([[failure] for failure in self._silent])

    def _gone(self) -> CalibError:
        last = self._silent[-1]
        return CalibError(
            f"arm {self._arm!r}: the server is gone. {len(self._silent)} questions in a row got no answer, the last "
            f"one: {last.reason}, {last.detail}. What was answered is stored, and these do not count as failed. "
            "See the server's log, start it again, and give the same command",
            exit_code=1,
        )

    async def _keep(self, questions: Sequence[Sequence[Record]]) -> None:
        """Count these questions, and return once their records are written."""
        written = [record for records in questions for record in records]
        reasons = [record.reason for record in written if isinstance(record, Failed)]  # at most one a question
        self.done += len(questions)
        self.failed += len(reasons)
        self.reasons.update(reasons)
        for records in questions:
            question = records[0].question
            self.unchecked.append(question)
            self.asked.add((question.dataset, question.id))
            if any(isinstance(record, Failed) for record in records):
                self.failing.add((question.dataset, question.id))
        for record in written:
            self.gpu_seconds += _seconds(record) / self._concurrency
            if isinstance(record, Answered) and len(record.answer.tokens):
                self.tokens += int(np.nan_to_num(record.answer.tokens[-1]))
        await self._writer.put(written)

    async def _tick(self) -> None:
        while self._progress is not None:
            self._report()
            await asyncio.sleep(_TICK)

    def _report(self) -> None:
        if self._progress is None:
            return
        elapsed = time.perf_counter() - self._started
        rate = self.done / elapsed if elapsed > 0 else 0.0
        left = len(self._jobs) - self.done
        self._progress(
            Progress(
                arm=self._arm,
                done=self._already + self.done,
                total=self._already + len(self._jobs),
                already=self._already,
                failed=self.failed,
                in_flight=self._in_flight,
                rate=rate,
                elapsed_s=elapsed,
                eta_s=left / rate if rate > 0 else math.nan,
                stage=self._stage,
                gpu_hours=self.gpu_seconds / 3600,
                gpu_hours_left=self.gpu_seconds / self.done * left / 3600 if self.done else math.nan,
                paused=self._brake is not None and self._brake.held,
            )
        )


async def _nothing() -> None:
    """For a crew without a brake."""


def _seconds(record: Record) -> float:
    """Seconds that a record took of the server, the largest budget's thought; 0 where unknown."""
    if isinstance(record, Failed):
        return 0.0 if math.isnan(record.seconds) else record.seconds
    t2 = np.asarray(record.answer.t2, dtype=np.float64)
    return float(np.nan_to_num(record.answer.t1)) + (float(np.nan_to_num(t2).max()) if t2.size else 0.0)


def _is_silence(records: Sequence[Record]) -> TypeGuard[Sequence[Failed]]:
    """Whether the server could not be reached for any part of a question."""
    return all(isinstance(record, Failed) and record.reason in UNREACHABLE for record in records)

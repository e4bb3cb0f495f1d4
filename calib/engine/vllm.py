"""`VllmEngine`: both systems of any reasoning model on a stock vLLM server.

System 1 is one read of the label distribution with thinking off. System 2 is one thought with thinking on, sampled once
up to the largest budget, and the answer read from cuts of it at every budget (`calib.engine.ladder`).

What is counted. Thinking tokens are what the server generates after the start mark, the end mark among them; a thought
that the context leaves less room than the budget is cut there. ``t1`` is the wall time of rendering the chat and of one
read. ``t2`` at the largest budget is the wall time of rendering, thought and one read, the read being sent alone, as a
server with that one budget would. ``t2`` at a smaller budget is derived from it: the same, with the seconds that
generating took in proportion to the tokens. Reads that exist for the cache alone (smaller budgets, label mass) are not
counted.

With a deadline the thought is streamed and closed where it stands once only the time of a read is left
(`calib.engine.closing`); the answer is read from that cut as from any other.

Leaves to others: requests (`calib.engine.completions`), prompts (`calib.engine.prompts`), labels
(`calib.engine.labels`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import PurePath
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from calib.engine.base import Answer, AskFailed, EngineInfo, PartlyFailed
from calib.engine.closing import Closing, ReadTimes
from calib.engine.completions import Trace, VllmServer
from calib.engine.http import HttpClient, shorten
from calib.engine.labels import LabelFinder, Labels
from calib.engine.ladder import Ladder, Reader, Reading, Rungs
from calib.engine.prompts import DEFAULT_PROMPT, KNOWN_MARKS, Marks, PromptTemplate
from calib.errors import CalibError
from calib.jsonnumbers import is_number
from calib.questions import NOUL_OPTIONS, SCORE_LEVELS, Question, text_hash

__all__ = ["LOW_MASS", "SAMPLING", "VllmEngine"]

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""What ``sampling`` may set. Seed, budget and stops are calib's own."""

LOW_MASS = 0.5
"""Label mass under which the letter that System 1 is made to give is not what the model would say."""

log = logging.getLogger(__name__)

_WANTED_LOGPROBS = 256
_LONGEST_TAIL = 32
_PROBES = ("x", "Which one?")
"""User turns that share nothing, so that what their chats end with in common is the template's."""

_EXAMPLES = (
    Question("1", "probe", "choice", "", "Which of these is a colour?", ("a spoon", "green", "running", "seven")),
    Question("2", "probe", "noul", "", "Is Paris the capital of France?", NOUL_OPTIONS),
    Question("3", "probe", "score", "", "How good is a review that reads: could not be better?", SCORE_LEVELS),
)
"""Questions that any model answers, to see whether it answers by a label at all."""

_END_MARK = re.compile(r"</[^<>]+>|\[/[^\[\]]+\]|<[^<>]*\|>|<\|[^<>]*\|>")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Setup:
    """What was found out about a server and its model."""

    info: EngineInfo
    room: int
    marks: Marks
    end: int
    opening: tuple[int, ...]
    tail: tuple[int, ...]
    finder: LabelFinder
    ladder: Ladder

    @property
    def reader(self) -> Reader:
        return self.ladder.reader


class VllmEngine:
    """A stock vLLM server with a reasoning model.

    Parameters
    ----------
    base_url : str
        ``http://host:port``; a trailing ``/v1`` is dropped.
    model : str, optional
        Served name. By default the only model that is no LoRA adapter.
    client : HttpClient, optional
        Used instead of one made from the options below.
    prompt : PromptTemplate, optional
    sampling : mapping, optional
        Of the thought, keys of `SAMPLING`. What it leaves out is the server's default, which vLLM takes from the
        model's generation_config.
    seed : int, default 0
        Each question's thought has a seed of its own, made from its text and this.
    marks : Marks, optional
        Of a thought; by default found out.
    label_mass : bool, default True
        Send one more request a read for the label mass, where the read does not give it. A gateway does not need it.
    cache_salt : str, optional
        Only requests with the same one share cached prefixes.
    **options
        Of `HttpClient`: ``timeout``, ``retries``, ``api_key_env``, ``connections``.

    Raises
    ------
    CalibError
        A sampling field that is unknown or not a number.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        client: HttpClient | None = None,
        prompt: PromptTemplate = DEFAULT_PROMPT,
        sampling: Mapping[str, float] | None = None,
        seed: int = 0,
        marks: Marks | None = None,
        label_mass: bool = True,
        cache_salt: str | None = None,
        **options: Any,
    ) -> None:
        self.client = client or HttpClient(base_url.rstrip("/").removesuffix("/v1"), **options)
        self.prompt = prompt
        self.sampling = _checked_sampling(sampling or {})
        self.seed = seed
        self._model = model
        self._marks = marks
        self._label_mass = label_mass
        self._server = VllmServer(self.client, cache_salt=cache_salt)
        self._setup: _Setup | None = None
        self._said: Sequence[str] = ()
        self._setting_up = asyncio.Lock()
        self._read_times = ReadTimes()

    def __repr__(self) -> str:
        return f"VllmEngine({self.client.url!r})"

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same one share cached prefixes."""
        return self._server.cache_salt

    @cache_salt.setter
    def cache_salt(self, salt: str | None) -> None:
        self._server.cache_salt = salt

    async def info(self) -> EngineInfo:
        """Who answers, found out anew each time.

        ``raw`` says how the server is asked and what is odd about it: version, context length, how log-probabilities
        are listed, the marks of a thought, label mass on three plain questions, and ``notes`` in words.

        Raises
        ------
        CalibError
            No server, not vLLM, or one that cannot be asked this way; it says what to change.
        """
        async with self._setting_up:
            self._setup = await self._find_out()
        return self._setup.info

    async def ask(
        self,
        question: Question,
        budgets: Sequence[int],
        *,
        system1: bool = True,
        keep_text: bool = False,
        deadline: float | None = None,
    ) -> Answer:
        """System 1 and, for each budget of one thought, System 2.

        Raises
        ------
        AskFailed
            No good answer. As `PartlyFailed` it carries System 1, and the largest budget where only smaller ones
            failed.
        CalibError
            The server cannot be asked this way (see `info`), or the model has no labels for so many options.
        """
        until = None if deadline is None else asyncio.get_running_loop().time() + deadline
        ladder = tuple(sorted({int(budget) for budget in budgets}))
        if ladder and ladder[0] < 1:
            raise CalibError(f"a think budget must be 1 token or more, got {ladder[0]}")
        setup = await self._ready()
        labels = await setup.finder.find(self.prompt.kinds[question.kind], question)
        first, t1 = None, math.nan
        if system1:
            first, t1 = await self._system1(setup, question, labels)
        if not ladder:
            return _answer(first, t1)
        try:
            answer = await self._system2(setup, question, labels, ladder, keep_text, first, t1, until)
        except PartlyFailed:
            raise
        except AskFailed as failure:
            if first is None:
                raise
            raise PartlyFailed(failure, _answer(first, t1)) from None
        return answer

    async def read_thought(
        self, question: Question, text: str, budgets: Sequence[int], *, tokens: int, finished: bool
    ) -> Rungs:
        """System 2 at each budget of a thought that another route of this server generated.

        Parameters
        ----------
        question : Question
        text : str
            The thought, with or without its marks.
        budgets : sequence of int
        tokens : int
            Thinking tokens that the other route counted.
        finished : bool
            Whether the thought ended by itself.

        Raises
        ------
        AskFailed
            The text is not as many tokens, so that its cuts would be others; or the answer could not be read.
        """
        setup = await self._ready()
        with _stage("system2"):
            labels = await setup.finder.find(self.prompt.kinds[question.kind], question)
            ids = await self._server.tokenize(text.removesuffix(setup.marks.end))
            if abs(len(ids) + finished - tokens) > max(2, 0.01 * tokens):
                raise AskFailed("other_tokens", f"a thought of {tokens} tokens came back as text of {len(ids)}")
            opening = await self._render(question, labels, setup.marks.on)
            if not text.startswith(setup.marks.start.strip()):
                opening = (*opening, *setup.opening)
            trace = Trace(ids, finished, len(ids) + finished, math.nan)
            return await setup.ladder.read(opening, trace, sorted(budgets), labels.thought)

    async def obeys_seed(self, question: Question, *, tokens: int = 32) -> bool:
        """Whether a thought asked for twice is the same one.

        It rarely is under speculative decoding, and may not be on a busy server, whose batches change the last digits.
        p2 at several budgets does not hang on it: they are cuts of one thought.
        """
        setup = await self._ready()
        labels = await setup.finder.find(self.prompt.kinds[question.kind], question)
        opening = await self._opening(setup, question, labels)
        one, other = [await self._think(setup, question, opening, tokens) for _ in range(2)]
        return one.ids == other.ids

    async def close(self) -> None:
        """Give back connections."""
        await self.client.close()

    # --- one question -------------------------------------------------------------------------------------------------

    async def _system1(self, setup: _Setup, question: Question, labels: Labels) -> tuple[Reading, float]:
        with _stage("system1") as clock:
            chat = await self._render(question, labels, setup.marks.off)
            if setup.tail and chat[-len(setup.tail) :] != setup.tail:
                raise AskFailed("other_template", "the rendered chat does not end as the template's other chats do")
            prompt = (*chat[: len(chat) - len(setup.tail)], *labels.direct.context)
            (reading,) = await setup.reader.read([prompt], labels.direct.labels)
        seconds = clock.seconds
        self._read_times.system1_took(seconds)
        if self._label_mass and math.isnan(reading.mass):
            try:
                (mass,) = await setup.reader.mass([prompt], labels.direct.labels)
            except AskFailed:  # the answer is good without it
                return reading, seconds
            reading = replace(reading, mass=mass)
        return reading, seconds

    async def _system2(
        self,
        setup: _Setup,
        question: Question,
        labels: Labels,
        budgets: tuple[int, ...],
        keep_text: bool,
        first: Reading | None,
        t1: float,
        until: float | None,
    ) -> Answer:
        with _stage("system2") as clock:
            opening = await self._opening(setup, question, labels)
            rendered = clock.seconds
            room = setup.room - len(opening) - len(setup.ladder.cut) - len(labels.thought.context) - 1
            if room < 1:
                raise AskFailed("context", f"a prompt of {len(opening)} tokens leaves no room for a thought")
            most = min(budgets[-1], room)
            closing = None if until is None else Closing(self._read_times, until)
            trace = await self._think(setup, question, opening, most, closing)
            with nullcontext() if closing is None else closing.reading(closed=trace.closed):
                try:
                    rungs = await setup.ladder.read(opening, trace, budgets, labels.thought)
                except AskFailed as failure:
                    failure.tokens = trace.length
                    raise
        text = (await self._text(trace) if trace.text is None else trace.text) if keep_text else None
        seconds, stages = _seconds(trace, rungs, rendered, t1)
        answer = _answer(first, t1, rungs, seconds, stages, text, trace.closed)
        if rungs.failure is not None:
            rungs.failure.stage = "system2"
            raise PartlyFailed(rungs.failure, answer)
        return answer

    async def _text(self, trace: Trace) -> str | None:
        try:
            return await self._server.detokenize(trace.ids)
        except AskFailed:  # the answer is good without it
            return None

    async def _opening(self, setup: _Setup, question: Question, labels: Labels) -> tuple[int, ...]:
        """Chat and start mark, after which the model thinks."""
        return (*await self._render(question, labels, setup.marks.on), *setup.opening)

    async def _think(
        self, setup: _Setup, question: Question, opening: Sequence[int], most: int, closing: Closing | None = None
    ) -> Trace:
        seed = crc32(f"{self.seed}:{text_hash(question)}".encode()) & 0x7FFFFFFF
        return await self._server.think(
            opening, most=most, end=setup.end, seed=seed, sampling=self.sampling, closing=closing
        )

    async def _render(self, question: Question, labels: Labels, switch: Mapping[str, Any]) -> tuple[int, ...]:
        messages = self.prompt.messages(question, labels.texts)
        return await self._server.render(messages, {**switch, **self.prompt.chat_template_kwargs})

    # --- finding out --------------------------------------------------------------------------------------------------

    async def _ready(self) -> _Setup:
        if self._setup is None:
            async with self._setting_up:
                if self._setup is None:
                    self._setup = await self._find_out()
        return self._setup

    async def _find_out(self) -> _Setup:
        try:
            return await self._probe()
        except AskFailed as failure:
            raise CalibError(
                f"{self.client.url} cannot be asked as a vLLM server ({failure.reason} after {failure.attempts} "
                f"attempts: {failure.detail}). See that it runs and that this answers: "
                f"curl {self.client.url.rstrip('/')}/v1/models",
                exit_code=1,
            ) from None

    async def _probe(self) -> _Setup:
        server = self._server
        models = await server.models()
        described = self._chosen(models)
        server.model = described["id"]
        told = [model.get("max_model_len") for model in (described, *models)]  # an adapter has that of its base model
        room = next((length for length in told if type(length) is int), 0)
        if room < 1:
            raise CalibError(f"{self.client.url}: /v1/models tells no max_model_len, so it is not vLLM's")
        chats = _Chats(self._server, self.prompt)
        marks, notes = await self._find_marks(chats)
        end = await server.tokenize(marks.end)
        if len(end) != 1:
            raise CalibError(
                f"{marks.end!r} is {len(end)} tokens of {server.model}, and a thought must end by one; "
                "give the marks of this model's thoughts"
            )
        opening, tail, direct = await self._find_seams(chats, marks, notes)
        finder = LabelFinder(server.tokenize, direct=direct, thought=marks.end + marks.after)
        off = await chats.ids(_PROBES[0], marks.off)
        processed, most = await self._find_logprobs(off, finder)
        reader = Reader(server, processed=processed, most=most)
        ladder = Ladder(reader, await server.tokenize(marks.cut), label_mass=self._label_mass)
        on = await chats.ids(_PROBES[0], marks.on)
        rendering = hashlib.sha256(json.dumps([off, on]).encode()).hexdigest()
        raw = {
            "version": await server.version(),
            "max_model_len": room,
            "logprobs": "processed" if processed else "raw",
            "max_logprobs": most,
            "marks": asdict(marks),
            "notes": notes,
        }
        identity = self._identity(described, marks, rendering)
        info = EngineInfo(described["id"], identity, raw=raw, thinks_about_scores=True, keeps_deadline=True)
        setup = _Setup(info, room, marks, end[0], opening, tail, finder, ladder)
        raw["system1_label_mass"] = await self._masses(setup)
        notes += _remarks(raw)
        if _shows_today(await chats.text(_PROBES[0], marks.off)):
            notes.append(
                "the chat template or the system prompt holds today's date, so tomorrow the answers count as another "
                "model's: fix the date in [chat_template_kwargs] of a --prompt-template (Llama: date_string)"
            )
        for note in notes:
            if note not in self._said:
                log.warning("%s: %s", self.client.url, note)
        self._said = notes
        return setup

    def _chosen(self, models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        names = [str(model["id"]) for model in models]
        if self._model is not None:
            if self._model not in names:
                raise CalibError(f"{self.client.url} serves no {self._model!r}; it serves: {', '.join(names)}")
            return models[names.index(self._model)]
        own = [model for model in models if model.get("parent") is None]
        if len(own) != 1 and len(models) != 1:
            raise CalibError(f"{self.client.url} serves several models; name one of: {', '.join(names)}")
        return own[0] if own else models[0]

    async def _find_marks(self, chats: _Chats) -> tuple[Marks, list[str]]:
        if self._marks is not None:
            return self._marks, []
        shown = []
        for marks in KNOWN_MARKS:
            if len(await self._server.tokenize(marks.end)) != 1:
                continue
            texts = [await chats.text(_PROBES[0], switch) for switch in (marks.on, marks.off)]
            if any(sign in text for sign in marks.signs for text in texts):
                break
            shown.append(marks.end)
        else:
            asked = await self._ask_parser(chats)
            if isinstance(asked, str):
                raise CalibError(
                    f"how {self._server.model} begins and ends a thought was not found. Its chat template shows no "
                    f"known mark, with thinking on or off ({', '.join(m.end for m in KNOWN_MARKS)}; tokens of it are: "
                    f"{', '.join(shown) or 'none'}), and its reasoning parser shows none ({asked}). Give the marks, "
                    "or serve a model that thinks"
                )
            return asked, [f"the marks of a thought are those of the reasoning parser: {asked.end!r}"]
        _, closed, after = texts[1].rpartition(marks.end)
        if closed and len(after) <= 8 and marks.start.strip() not in after:
            marks = replace(marks, after=after)  # the template shows how it closes a thought
        return marks, []

    async def _ask_parser(self, chats: _Chats) -> Marks | str:
        """Let the server's reasoning parser end a thought before it begins; its end mark shows."""
        try:
            ids = await self._server.forced_end(chats.messages(_PROBES[1]), Marks().on)
        except AskFailed as failure:
            return failure.detail or failure.reason
        for place, token in enumerate(ids):
            text = await self._server.detokenize([token])
            if _END_MARK.fullmatch(text.strip()):
                return Marks(start=await self._server.detokenize(ids[:place]), end=text.strip())
        return f"it generated {shorten(await self._server.detokenize(ids), 60)!r}"

    async def _find_seams(
        self, chats: _Chats, marks: Marks, notes: list[str]
    ) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Tokens that open a thought; tokens that chats without thinking end with, and their text up to the answer."""
        on, off = await chats.tail(marks.on), await chats.tail(marks.off)
        opened = marks.opened_by(await self._server.detokenize(on))
        opening = () if opened else await self._server.tokenize(marks.start)
        closed = not marks.opened_by(await self._server.detokenize(off))
        if not closed:
            notes.append("the chat template always opens a thought: System 1 is read after closing it at once")
        for length in range(1, len(off) + 1):
            tail = off[-length:]
            text = await self._server.detokenize(tail)
            if await self._server.tokenize(text) == tail:
                return opening, tail, text if closed else text + marks.end + marks.after
        return opening, (), "" if closed else marks.end + marks.after

    async def _find_logprobs(self, chat: Sequence[int], finder: LabelFinder) -> tuple[bool, int]:
        """Whether log-probabilities are listed after masks, and how many."""
        labels = (await self._any_labels(finder)).direct.labels[:2]
        alone = [(await self._server.first_token([chat], allowed=[label], top=1))[0] for label in labels]
        values = [row.get(label, math.nan) for row, label in zip(alone, labels, strict=True)]
        listed = (await self._server.first_token([chat], allowed=None, top=2))[0]
        if any(value > 1e-3 for value in (*values, *listed.values())):
            raise CalibError(
                f"{self.client.url} lists logits instead of log-probabilities; start vllm serve with "
                "--logprobs-mode processed_logprobs (or raw_logprobs)"
            )
        most = await self._server.most_logprobs(chat, _WANTED_LOGPROBS)
        # a token that alone is allowed has all of the probability, but only once the mask counts
        return all(value > -1e-3 for value in values), _WANTED_LOGPROBS if most < 0 else most

    async def _any_labels(self, finder: LabelFinder) -> Labels:
        """Labels of a kind of question that this model has labels for."""
        for question in _EXAMPLES[:-1]:
            try:
                return await finder.find(self.prompt.kinds[question.kind], question)
            except CalibError:  # that kind cannot be asked, and says so when it is
                continue
        return await finder.find(self.prompt.kinds[_EXAMPLES[-1].kind], _EXAMPLES[-1])

    def _identity(self, described: Mapping[str, Any], marks: Marks, rendering: str) -> dict[str, Any]:
        """All that can change an answer, as far as the server tells.

        The version of vLLM and the context length are left out: arms of one model may differ in them, and both would
        split answers that are the same. A thought that the context cuts shows by its tokens.
        """
        identity = {
            "engine": "vllm",
            "model": described["id"],
            "prompt": self.prompt.fingerprint,
            "labels": {kind: _plain(layout.labels) for kind, layout in self.prompt.kinds.items()},
            "rendering": rendering,
            "marks": asdict(marks),
            "sampling": dict(self.sampling) or "the server's defaults",
            "seed": self.seed,
        }
        for name in ("root", "parent"):
            if isinstance(told := described.get(name), str):
                # a folder's place differs between machines, and is nobody's business
                identity[name] = PurePath(told).name if told.startswith(("/", ".", "~")) else told
        return identity

    async def _masses(self, setup: _Setup) -> dict[str, float]:
        """Label mass of System 1 on a plain question of each kind."""
        masses = {}
        for question in _EXAMPLES:
            try:
                labels = await setup.finder.find(self.prompt.kinds[question.kind], question)
            except CalibError:  # a kind that this model has no labels for; it says so when asked
                continue
            chat = await self._render(question, labels, setup.marks.off)
            prompt = (*chat[: len(chat) - len(setup.tail)], *labels.direct.context)
            if setup.reader.processed:
                (mass,) = await setup.reader.mass([prompt], labels.direct.labels)
            else:
                mass = (await setup.reader.read([prompt], labels.direct.labels))[0].mass
            masses[question.kind] = round(mass, 6)
        return masses


class _Chats:
    """Chats of one user turn, rendered once each."""

    def __init__(self, server: VllmServer, prompt: PromptTemplate) -> None:
        self._server = server
        self._prompt = prompt
        self._ids: dict[tuple[str, str], tuple[int, ...]] = {}

    def messages(self, user: str) -> list[dict[str, str]]:
        return self._prompt.chat(user)

    async def ids(self, user: str, switch: Mapping[str, Any]) -> tuple[int, ...]:
        key = (user, json.dumps(switch, sort_keys=True))
        if key not in self._ids:
            kwargs = {**switch, **self._prompt.chat_template_kwargs}
            self._ids[key] = await self._server.render(self.messages(user), kwargs)
        return self._ids[key]

    async def text(self, user: str, switch: Mapping[str, Any]) -> str:
        return await self._server.detokenize(await self.ids(user, switch))

    async def tail(self, switch: Mapping[str, Any]) -> tuple[int, ...]:
        """Tokens that every chat ends with: what the template puts behind the user turn."""
        one, other = [await self.ids(user, switch) for user in _PROBES]
        length = 0
        while length < min(len(one), len(other), _LONGEST_TAIL) and one[-length - 1] == other[-length - 1]:
            length += 1
        return one[len(one) - length :]


def _remarks(raw: Mapping[str, Any]) -> list[str]:
    notes = []
    if raw["logprobs"] == "raw":
        notes.append(
            "log-probabilities are raw, so each label costs a request of its own; vllm serve with --logprobs-mode "
            "processed_logprobs --max-logprobs 256 reads all labels by one"
        )
    elif raw["max_logprobs"] < 26:
        notes.append(
            f"the server lists {raw['max_logprobs']} log-probabilities, so more options than that are read in groups; "
            "vllm serve with --max-logprobs 256 reads them by one request"
        )
    low = {kind: mass for kind, mass in raw["system1_label_mass"].items() if mass < LOW_MASS}
    if low:
        shown = ", ".join(f"{kind} {mass:.2g}" for kind, mass in low.items())
        notes.append(
            f"System 1 would rather say something else than a label (label mass on plain questions: {shown}). What it "
            "is made to say is then weakly founded, and a gate on it may be useless: try another --prompt-template"
        )
    return notes


def _shows_today(text: str) -> bool:
    today = datetime.now().astimezone()
    return any(today.strftime(form) in text for form in ("%Y-%m-%d", "%d %b %Y", "%d %B %Y", "%B %d, %Y"))


def _plain(labels: str | tuple[str, ...]) -> str | list[str]:
    return labels if isinstance(labels, str) else list(labels)


def _checked_sampling(sampling: Mapping[str, float]) -> dict[str, float]:
    for name, value in sampling.items():
        if name not in SAMPLING:
            raise CalibError(f"sampling: unknown field {name!r}; expected some of {', '.join(SAMPLING)}")
        if not is_number(value):
            raise CalibError(f"sampling: {name} should be a number, got {value!r}")
    return dict(sorted(sampling.items()))


# --- answers ----------------------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self) -> None:
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started


@contextmanager
def _stage(stage: str) -> Iterator[_Clock]:
    """Puts the stage, and the seconds since it began, into an `AskFailed` raised within."""
    clock = _Clock()
    try:
        yield clock
    except AskFailed as failure:
        failure.stage, failure.seconds = stage, clock.seconds
        raise


def _seconds(trace: Trace, rungs: Rungs, rendered: float, t1: float) -> tuple[Floats, dict[str, float]]:
    """Seconds of System 2 at each budget, and by stage at the largest one."""
    before = (trace.queue or 0.0) + (trace.prefill or 0.0)
    thought = max(0.0, trace.seconds - before)
    tokens = np.array(rungs.tokens)
    share = np.where(tokens < trace.length, tokens / max(trace.generated, 1), 1.0)
    t2 = rendered + before + thought * share + rungs.read_seconds
    stages = {"render": rendered, "thought": thought, "read": rungs.read_seconds}
    if trace.prefill is not None and trace.queue is not None:
        stages |= {"queue": trace.queue, "prefill": trace.prefill}
    elif not math.isnan(t1):
        stages["prefill"] = t1  # System 1: the prefill of the same text, and one token
    return t2, stages


def _answer(
    first: Reading | None,
    t1: float,
    rungs: Rungs | None = None,
    t2: Floats | None = None,
    stages: Mapping[str, float] | None = None,
    text: str | None = None,
    closed: bool = False,
) -> Answer:
    n = len(rungs.budgets) if rungs else 0
    return Answer(
        p1=None if first is None else first.p,
        t1=t1,
        budgets=rungs.budgets if rungs else (),
        p2=np.array([reading.p for reading in rungs.readings])
        if rungs
        else np.empty((0, 0 if first is None else len(first.p))),
        tokens=np.array(rungs.tokens if rungs else (), dtype=np.int64),
        finished=np.array(rungs.finished if rungs else (), dtype=np.bool_),
        t2=np.empty(n) if t2 is None else t2,
        label_mass1=math.nan if first is None else first.mass,
        label_mass2=np.array([reading.mass for reading in rungs.readings] if rungs else (), dtype=np.float64),
        stages=stages or {},
        text=text,
        closed=closed,
    )

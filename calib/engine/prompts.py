"""What a chat model is shown: the prompt template, the labels that stand for options, and the marks of a thought.

Pure text; leaves to others: tokens (`calib.engine.labels`), requests (`calib.engine.completions`).

A prompt file is TOML. Every field may be left out; what a table ``[choice]``, ``[noul]`` or ``[score]`` says holds for
that kind, what stands above the tables for all kinds::

    system = "You review structural checks."       # system message; none when empty
    user = '''
    {state}

    Question: {question}
    {options}

    Answer in this form: Answer: (X)'''
    line = "({label}) {option}"                    # one for each option
    answer = "Answer: ("                           # put in front of the label when the answer is read
    labels = "letters"                             # or "digits", "options", "levels", or a list of texts
    [noul]
    labels = ["no", "yes"]                         # in the order false, true; yes is shown first
    [chat_template_kwargs]                         # handed to the chat template, such as reasoning_effort

``letters`` are A to Z and then further single tokens; ``digits`` count from 0; ``options`` are the options' own texts;
``levels`` are the own texts where each is one token, else digits, else letters.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from calib.errors import CalibError
from calib.questions import KINDS, MAX_OPTIONS, Question

__all__ = [
    "DECIDE_PROMPT",
    "DEFAULT_PROMPT",
    "KNOWN_MARKS",
    "Layout",
    "Marks",
    "PromptTemplate",
    "label_pool",
    "read_prompt",
]

SCHEMES = ("letters", "digits", "options", "levels")
_PLACE = re.compile(r"\{(state|question|options|label|option)\}")
_LAYOUT = ("user", "line", "answer", "labels")


@dataclass(frozen=True)
class Layout:
    """How questions of one kind are shown and read.

    Attributes
    ----------
    user : str
        User turn with ``{state}``, ``{question}`` and ``{options}``; that of a noul may name its two by itself.
    line : str
        One option, with ``{label}`` and ``{option}``.
    answer : str
        What the model's reply is begun with; the label is the next token.
    labels : str or tuple of str
        One of `SCHEMES`, or the labels themselves in the order of the options.
    """

    user: str
    line: str
    answer: str
    labels: str | tuple[str, ...]

    def candidates(self, question: Question) -> list[tuple[str, ...] | None]:
        """Label texts to try, best first: one for each option; None stands for the pool of letters."""
        n = len(question.options)
        digits = tuple(map(str, range(n)))
        if isinstance(self.labels, tuple):
            return [self.labels[:n]]
        if self.labels == "levels":
            return [question.options, digits, None]
        return [{"letters": None, "digits": digits, "options": question.options}[self.labels]]


@dataclass(frozen=True)
class PromptTemplate:
    """The text around a question.

    Attributes
    ----------
    system : str
        System message; empty for none.
    kinds : mapping of str to Layout
        For ``choice``, ``noul`` and ``score``.
    chat_template_kwargs : mapping
        Handed to the server's chat template beside the switch of thinking.
    """

    system: str
    kinds: Mapping[str, Layout]
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def messages(self, question: Question, labels: Sequence[str]) -> list[dict[str, str]]:
        """The chat that asks ``question``, its options named by ``labels``."""
        layout = self.kinds[question.kind]
        lines = [
            _filled(_line(layout.line, label, option), {"label": label, "option": option})
            for label, option in zip(labels, question.options, strict=True)
        ]
        if question.kind == "noul":
            lines.reverse()  # yes before no, as people write it
        parts = {"state": question.state, "question": question.question, "options": "\n".join(lines)}
        return self.chat(_filled(layout.user, parts).strip())

    def chat(self, user: str) -> list[dict[str, str]]:
        """The messages of one user turn."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": user}]

    @property
    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, of all of it."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _line(line: str, label: str, option: str) -> str:
    """An option that is its own label is named once."""
    return line.partition("{option}")[0].rstrip(" :.-") if label == option and "{label}" in line else line


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """All places at once, so that braces within a state stay what they are."""
    return _PLACE.sub(lambda match: parts.get(match[1], match[0]), template)


_USER = "{state}\n\nQuestion: {question}\n{options}\n\n"
DEFAULT_PROMPT = PromptTemplate(
    system="",
    kinds={
        "choice": Layout(
            _USER + "End with the letter of the one best option, in this form: Answer: (X)",
            "({label}) {option}",
            "Answer: (",
            "letters",
        ),
        "noul": Layout(
            _USER + "End with yes or no, in this form: Answer: (yes) or Answer: (no)",
            "({label})",
            "Answer: (",
            ("no", "yes"),
        ),
        "score": Layout(
            _USER + "End with the one level that fits best, in this form: Answer: (X)",
            "({label}) {option}",
            "Answer: (",
            "levels",
        ),
    },
)


_DECIDE_USER = "{state}\n\n{question}\n\n{options}\n\n"
_DECIDE_END = "Think step by step, then end with: Answer: (X)"
DECIDE_PROMPT = PromptTemplate(
    system="",
    kinds={
        **DEFAULT_PROMPT.kinds,
        "choice": Layout(_DECIDE_USER + _DECIDE_END, "({label}) {option}", "Answer: (", "letters"),
        "noul": Layout(
            "{state}\n\n{question}\n\n(A) yes\n(B) no\n\n" + _DECIDE_END, "({label})", "Answer: (", ("B", "A")
        ),
    },
)
"""As a decide server shows a question to its base model, up to the words: state, question, lettered options, a request
to think. Whether that is near enough is checked before it is used (`DecideEngine.try_ladder`)."""


def label_pool() -> Iterator[str]:
    """Texts that may stand for an option: letters first, then what else is often one token."""
    yield from ascii_uppercase
    yield from map("".join, product(ascii_uppercase, repeat=2))
    yield from ascii_lowercase
    yield from map(str, range(1000))


# --- a user's file ----------------------------------------------------------------------------------------------------


def read_prompt(path: str | os.PathLike[str]) -> PromptTemplate:
    """Read a prompt file; what it leaves out stays as in `DEFAULT_PROMPT`.

    Raises
    ------
    CalibError
        What is wrong, with file and field.
    """
    file = Path(path)
    try:
        document = tomllib.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise CalibError(f"the prompt file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CalibError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        example = "user = '''{state}\n\nQuestion: {question}\n{options}'''"
        raise CalibError(
            f"{file} is not TOML: {error}. Texts of several lines stand in three quotes: {example}"
        ) from None
    known = ("system", "chat_template_kwargs", *_LAYOUT, *KINDS)
    for name in document:
        if name not in known:
            raise CalibError(f"{file}: unknown field {name!r}; expected one of {', '.join(known)}")
    system = document.get("system", DEFAULT_PROMPT.system)
    if not isinstance(system, str):
        raise CalibError(f"{file}, system: expected text, got {system!r}")
    kwargs = document.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise CalibError(f"{file}, chat_template_kwargs: expected a table, got {kwargs!r}")
    common = {name: document[name] for name in _LAYOUT if name in document}
    kinds = {kind: _layout(file, kind, common, document.get(kind, {})) for kind in KINDS}
    return PromptTemplate(system, kinds, _plain(file, kwargs))


def _plain(file: Path, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        json.dumps(kwargs)
    except TypeError:  # TOML has dates, JSON has none
        raise CalibError(f"{file}, chat_template_kwargs: a date must be text; put it in quotes") from None
    return kwargs


def _layout(file: Path, kind: str, common: Mapping[str, Any], own: Any) -> Layout:
    if not isinstance(own, dict):
        raise CalibError(f"{file}, {kind}: expected a table [{kind}], got {own!r}")
    for name in own:
        if name not in _LAYOUT:
            raise CalibError(f"{file}, {kind}.{name}: unknown field; expected one of {', '.join(_LAYOUT)}")
    default = DEFAULT_PROMPT.kinds[kind]
    shared = {name: value for name, value in common.items() if name != "labels" or kind == "choice"}
    given = {**shared, **own}
    for name in ("user", "line", "answer"):
        if not isinstance(given.get(name, ""), str):
            raise CalibError(f"{file}, {kind}.{name}: expected text, got {given[name]!r}")
    labels = _labels(file, kind, given["labels"]) if "labels" in given else default.labels
    layout = replace(default, **{**given, "labels": labels})
    for place in ("question", "options") if kind != "noul" else ("question",):
        if f"{{{place}}}" not in layout.user:
            raise CalibError(
                f"{file}, {kind}.user: {{{place}}} is missing; expected {{state}}, {{question}}, {{options}}"
            )
    if "{label}" not in layout.line:
        raise CalibError(
            f"{file}, {kind}.line: {{label}} is missing; write for instance: line = '({{label}}) {{option}}'"
        )
    return layout


def _labels(file: Path, kind: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value in SCHEMES:
        return value
    if isinstance(value, list) and all(isinstance(label, str) and label for label in value):
        if not 2 <= len(set(value)) == len(value) <= MAX_OPTIONS:
            raise CalibError(f"{file}, {kind}.labels: expected 2 to {MAX_OPTIONS} different texts, got {value!r}")
        return tuple(value)
    raise CalibError(f"{file}, {kind}.labels: expected {', '.join(SCHEMES)} or a list of texts, got {value!r}")


# --- the marks of a thought -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """What begins and ends a thought, and how the chat template is told to think.

    Attributes
    ----------
    start : str
        Opens the thought where the chat template does not; empty when nothing must be added.
    end : str
        Ends it: one token of the model.
    cut : str
        Put in front of ``end`` when a thought is cut.
    after : str
        Between ``end`` and the answer.
    on, off : mapping
        ``chat_template_kwargs`` with thinking, and without.
    """

    start: str = "<think>\n"
    end: str = "</think>"
    cut: str = "\n"
    after: str = "\n\n"
    on: Mapping[str, Any] = field(default_factory=lambda: {"enable_thinking": True, "thinking": True})
    off: Mapping[str, Any] = field(default_factory=lambda: {"enable_thinking": False, "thinking": False})

    @property
    def signs(self) -> tuple[str, str, str]:
        """Texts of which one shows in a rendered chat of a model that has these marks."""
        word = self.start.strip()
        return word, self.end, "<|think|>" if "channel" in word else word

    def opened_by(self, text: str) -> bool:
        """Whether ``text`` ends within a thought."""
        word = self.start.strip()
        return bool(word) and text.rfind(word) > text.rfind(self.end)


KNOWN_MARKS = (
    Marks(),  # Qwen, DeepSeek, GLM and most others
    Marks("<|channel>thought\n", "<channel|>", cut="", after=""),  # Gemma 4; its template shows <|think|>
    Marks("[THINK]", "[/THINK]", cut="", after=""),  # Mistral
    Marks("<seed:think>", "</seed:think>", cut="", after=""),  # Seed-OSS
)

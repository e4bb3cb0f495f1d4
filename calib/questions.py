"""Question sets: the `Question` record, reading and checking files of them, and the keys made from their text.

A file is JSONL (one JSON object a line, also gzipped), CSV or Parquet, told apart by its suffix. The fields:

========== =====================================================================================================
``id``       required; text or an integer, unique within its dataset
``dataset``  the file's name without its suffixes when absent
``kind``     required; ``choice``, ``noul`` or ``score``
``state``    the context: text, or JSON (kept as compact JSON text in the order of the file); empty when absent
``question`` required text
``options``  2 to 255 texts. noul: always false, true, so leave it out. score: the levels, "0" to "5" when absent
``answer``   required; see below
``weight``   weight in traffic, finite and above 0; 1 when absent
``group``    text or an integer; questions that share a story or are paraphrases
========== =====================================================================================================

An answer is read by its kind:

* choice: a number is an index, counted from 0. A text is first the text of an option; only when no option has that
  text and it is made of digits is it an index. With the options "0", "4", "2", "6" the number 2 means "2" by index 2,
  the text "4" means "4", and the text "1", which no option has, means index 1. CSV cells are texts.
* noul: yes, no, true, false (any case), 1 or 0.
* score: the level itself, as text or number. Only when no level is an integer ("poor", "fair", "good") is an integer
  an index.

Blank lines, a byte-order mark and unknown fields are ignored; null and an empty CSV cell count as absent. In CSV the
options are one cell that holds a JSON list; in Parquet they are a list column or JSON text. The first mistake stops the
reading with an error that names file, line and field. One flaw is let through where it is rare: published benchmarks
hold the odd choice question with two equal options, so up to 1 in 100 of a file's questions may, each named in a
logged warning; the index still says which of the two is the right one.

Leaves to others: the form of the files (`calib.records`), outcomes collected elsewhere, whose questions may have no
text, and what an engine makes of a question.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from calib.errors import CalibError
from calib.records import (
    FORMATS,
    Record,
    described,
    listed,
    place,
    quoted,
    read_records,
    stem,
    write_jsonl,
)

__all__ = [
    "DatasetSummary",
    "Question",
    "read_questions",
    "split_key",
    "split_position",
    "summarise",
    "text_hash",
    "write_questions",
]

log = logging.getLogger(__name__)

KINDS = ("choice", "noul", "score")
NOUL_OPTIONS = ("false", "true")
SCORE_LEVELS = ("0", "1", "2", "3", "4", "5")
MAX_OPTIONS = 255

_FIELDS = ("id", "dataset", "kind", "state", "question", "options", "answer", "weight", "group")
_REQUIRED = ("id", "kind", "question", "answer")
_YES, _NO = frozenset({"yes", "true", "1"}), frozenset({"no", "false", "0"})
_ONE_FLAW_IN = 100  # questions; more repeated options than that is a broken file, not a benchmark's odd slip


@dataclass(frozen=True)
class Question:
    """One option question.

    Attributes
    ----------
    id, dataset : str
        Unique together.
    kind : {"choice", "noul", "score"}
        Free choice; no/yes with the option order [false, true]; a level.
    state : str
        The context, as text (JSON is kept as its compact text).
    question : str
        What is asked.
    options : tuple of str
        2 to 255 texts. noul: ("false", "true").
    answer : int or None
        Index of the right option; None when it is unknown (a gateway's request).
    weight : float
        Weight in traffic.
    group : str or None
        Questions that share a story or are paraphrases: split and resampled together.
    """

    id: str
    dataset: str
    kind: str
    state: str
    question: str
    options: tuple[str, ...]
    answer: int | None = None
    weight: float = 1.0
    group: str | None = None


@dataclass(frozen=True)
class DatasetSummary:
    """What one dataset of a question set holds.

    Attributes
    ----------
    dataset : str
        Its name.
    n : int
        Number of questions.
    kinds : dict of str to int
        Questions of each kind that occurs, in the order choice, noul, score.
    options_min, options_max : int
        Fewest and most options of a question.
    groups : int
        Distinct groups; questions without one are not counted.
    weighted : bool
        Whether any weight differs from 1.
    """

    dataset: str
    n: int
    kinds: dict[str, int]
    options_min: int
    options_max: int
    groups: int
    weighted: bool


# --- keys -------------------------------------------------------------------------------------------------------------


def text_hash(question: Question) -> str:
    """SHA-256, hexadecimal, of all that a model sees: kind, state, question and options in their order.

    Each part is written as its length in UTF-8 bytes, a colon and the bytes, so that no two questions share an input.
    Stores and splits hang on this value: it must never change.
    """
    parts = [part.encode() for part in (question.kind, question.state, question.question, *question.options)]
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()


def split_key(question: Question) -> str:
    """Return what decides a question's side of the tune/test split: its group as it stands, else its text hash.

    A group may span datasets, so the dataset is not part of the key. The options are: in some sets they alone differ
    between questions ("Which of these sentences is sarcastic?").
    """
    return text_hash(question) if question.group is None else question.group


def split_position(key: str) -> float:
    """Place of a split key on [0, 1), uniform over keys; a question is a test question iff it is below the test share.

    The first 53 bits of the key's SHA-256: the same for ever, whatever else is in the set.
    """
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


# --- reading ----------------------------------------------------------------------------------------------------------


def read_questions(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Question]:
    """Read and check one or several question files; the order of files and lines is kept.

    Parameters
    ----------
    paths : path or sequence of paths
        ``.jsonl``, ``.ndjson``, ``.jsonl.gz``, ``.csv`` or ``.parquet``.

    Returns
    -------
    list of Question
        At least one, each with its answer; (dataset, id) is unique over all files.

    Raises
    ------
    CalibError
        A file that is absent, empty, of another format or broken, or a mistake in a question: the message names the
        file, the line (for Parquet the record, counted from 1) and the field.
    """
    files = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    if not files:
        raise CalibError(f"no question file was named; give one or more files that end in {', '.join(FORMATS)}")
    places: dict[tuple[str, str], tuple[Path, int]] = {}
    questions: list[Question] = []
    for path in files:
        found = _check(read_records(path, fields=_FIELDS, required=_REQUIRED), path, places)
        if not found:
            raise CalibError(f"{path}: holds no questions; expected at least one with {listed(_REQUIRED)}")
        questions += found
    return questions


def _check(
    records: Iterable[tuple[int, Record]], path: Path, places: dict[tuple[str, str], tuple[Path, int]]
) -> list[Question]:
    """Turn a file's records into questions; ``places`` knows every (dataset, id) so far and learns the new ones."""
    default_dataset = stem(path)
    questions: list[Question] = []
    repeated: list[str] = []
    for number, record in records:
        try:
            question = _question(record, default_dataset)
        except _Flaw as flaw:
            raise CalibError(f"{place(path, number)}, {flaw.field}: {flaw.problem}") from None
        here = (path, number)
        first = places.setdefault((question.dataset, question.id), here)
        if first is not here:
            raise CalibError(
                f"{place(*here)}, id: {quoted(question.id)} of dataset {quoted(question.dataset)} was already used in "
                f"{place(*first)}; ids must be unique within a dataset: give one of the two another id, or remove it"
            )
        if len(set(question.options)) < len(question.options):
            repeated.append(f"{place(*here)}, options: {_repetition(question.options)}")
        questions.append(question)
    if len(repeated) * _ONE_FLAW_IN > len(questions):
        raise CalibError(
            f"{repeated[0]}; options must differ, so mend or remove this question ({len(repeated)} of the "
            f"{len(questions)} questions of this file repeat an option; at most 1 in {_ONE_FLAW_IN} may)"
        )
    for repetition in repeated:
        log.warning("%s; kept, and only the one that the answer names counts as right", repetition)
    return questions


# --- one question -----------------------------------------------------------------------------------------------------


class _Flaw(Exception):  # noqa: N818 - becomes a CalibError where file and line are known
    """What is wrong with one field of a record."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


def _question(record: Record, default_dataset: str) -> Question:
    kind = _text(record, "kind")
    if kind not in KINDS:
        raise _Flaw(
            "kind",
            "'open' has no options; calib tunes option questions: choice, noul, score"
            if kind == "open"
            else f"{quoted(kind)} is unknown; expected choice, noul or score",
        )
    options = _options(record.get("options"), kind)
    question = Question(
        id=_name(record, "id") or _missing("id"),
        dataset=_name(record, "dataset") or default_dataset,
        kind=kind,
        state=_state(record.get("state")),
        question=_text(record, "question"),
        options=options,
        answer=_ANSWERS[kind](_required(record, "answer"), options),
        weight=_weight(record.get("weight")),
        group=_name(record, "group"),
    )
    _check_characters(question)
    return question


def _missing(field: str) -> NoReturn:
    raise _Flaw(field, f"missing; every question needs {listed(_REQUIRED)}")


def _required(record: Record, field: str) -> Any:
    value = record.get(field)
    return _missing(field) if value is None else value


def _text(record: Record, field: str) -> str:
    value = _required(record, field)
    if not isinstance(value, str):
        raise _Flaw(field, f"expected text, got {described(value)}")
    if not value or value.isspace():
        raise _Flaw(field, "is empty; expected text")
    return value


def _name(record: Record, field: str) -> str | None:
    """Return an identifier: text, or an integer as its digits; None when absent or empty."""
    value = record.get(field)
    if isinstance(value, str):
        return value or None
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _Flaw(field, f"expected text or an integer, got {described(value)}")


def _state(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Flaw("state", f"expected text or JSON, got what JSON cannot hold: {error}") from None


def _options(value: Any, kind: str) -> tuple[str, ...]:
    if value is None:
        if kind == "choice":
            raise _Flaw("options", f"missing; a choice needs a list of 2 to {MAX_OPTIONS} texts")
        return NOUL_OPTIONS if kind == "noul" else SCORE_LEVELS
    if isinstance(value, str):
        value = _options_from_text(value)
    if not isinstance(value, list):
        raise _Flaw("options", f"expected a list of texts, got {described(value)}")
    if kind == "score":  # a level may be written as a number: no index is meant here
        value = [str(level) if isinstance(level, int) and not isinstance(level, bool) else level for level in value]
    if set(map(type, value)) - {str}:
        at, bad = next((i, option) for i, option in enumerate(value) if not isinstance(option, str))
        raise _Flaw("options", f"option {at} should be text, got {described(bad)}; put it in quotes")
    options = tuple(value)
    if kind == "noul":
        if tuple(map(str.casefold, options)) not in (NOUL_OPTIONS, ("no", "yes")):
            raise _Flaw("options", f"those of a noul are false, true in that order, got {_shortened(options)}; drop it")
        return NOUL_OPTIONS
    if not 2 <= len(options) <= MAX_OPTIONS:
        raise _Flaw("options", f"expected 2 to {MAX_OPTIONS}, got {len(options)}: {_shortened(options)}")
    if not all(map(str.strip, options)):
        raise _Flaw("options", f"option {[not option.strip() for option in options].index(True)} is empty")
    if kind == "score" and len(set(options)) < len(options):
        raise _Flaw("options", f"{_repetition(options)}; levels must differ")
    return options


def _options_from_text(text: str) -> Any:
    """Read the JSON list of a CSV cell or a Parquet text column."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Flaw(
            "options",
            f'expected a JSON list such as ["red", "blue"], got {quoted(text)} ({error}); '
            "in a CSV cell write each quote twice, and the whole cell in quotes",
        ) from None


def _choice_answer(value: Any, options: tuple[str, ...]) -> int:
    if isinstance(value, str):
        found = options.count(value)
        if found == 1:
            return options.index(value)
        if found > 1:
            raise _Flaw("answer", f"{quoted(value)} is the text of {found} options; give the index of the right one")
        index = _digits(value)
        if index is None:
            near = [option for option in options if option.strip().casefold() == value.strip().casefold()]
            raise _Flaw(
                "answer",
                f"{quoted(value)} is not among the options {_shortened(options)}; give the exact text of an option "
                "or its index, counted from 0" + (f" (did you mean {quoted(near[0])}?)" if near else ""),
            )
    else:
        index = _integer(value)
        if index is None:
            raise _Flaw("answer", f"expected an index or the text of an option, got {described(value)}")
    if not 0 <= index < len(options):
        raise _Flaw(
            "answer",
            f"{value} is not among the indices 0 to {len(options) - 1} of the options {_shortened(options)}"
            + (f'; to name an option by its text, put it in quotes: "{value}"' if str(value) in options else ""),
        )
    return index


def _noul_answer(value: Any, _options: tuple[str, ...]) -> int:
    integer = _integer(value)
    text = str(value if integer is None else integer).strip().casefold()
    if text in _YES:
        return 1
    if text in _NO:
        return 0
    raise _Flaw("answer", f"expected yes, no, true, false, 1 or 0, got {described(value)}")


def _score_answer(value: Any, levels: tuple[str, ...]) -> int:
    integer = _integer(value)
    if integer is None and isinstance(value, (bool, list, dict)):
        raise _Flaw("answer", f"expected one of the levels {_shortened(levels)}, got {described(value)}")
    text = str(value if integer is None else integer)
    if text in levels:
        return levels.index(text)
    index = _digits(text)
    if index is not None and index < len(levels) and not any(_digits(level) is not None for level in levels):
        return index
    raise _Flaw("answer", f"{quoted(text)} is not among the levels {_shortened(levels)}")


_ANSWERS = {"choice": _choice_answer, "noul": _noul_answer, "score": _score_answer}


def _weight(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _Flaw("weight", f"expected a number above 0, got {described(value)}")
    try:
        weight = float(value)  # a CSV cell is text
    except OverflowError:
        weight = math.inf
    except ValueError:
        raise _Flaw("weight", f"expected a number above 0, got {described(value)}") from None
    if not 0 < weight < math.inf:  # NaN fails both comparisons
        raise _Flaw("weight", f"expected a finite number above 0, got {weight}")
    return weight


def _check_characters(question: Question) -> None:
    """Refuse what no server or database can take: NUL, and half a surrogate pair (no UTF-8 form)."""
    texts = (question.id, question.dataset, question.group or "", question.state, question.question, *question.options)
    joined = "".join(texts)
    if "\0" not in joined and _encodable(joined):
        return
    fields = ("id", "dataset", "group", "state", "question", *["options"] * len(question.options))
    for field, text in zip(fields, texts, strict=True):
        if "\0" in text:
            raise _Flaw(field, "holds the character U+0000; remove it")
        if not _encodable(text):
            raise _Flaw(field, f"{quoted(text)} holds half a surrogate pair; write the whole character")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer(value: Any) -> int | None:
    """Return the value of an integer, also of a float such as 2.0 (tables with gaps make floats of integers)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _digits(text: str) -> int | None:
    """Return the value of a text of plain digits; long ones are names, not indices."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


# --- texts for errors -------------------------------------------------------------------------------------------------


def _shortened(options: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(quoted(option, 40) for option in options[:most])
    return f"[{shown}]" if len(options) <= most else f"[{shown}, ... {len(options)} in all]"


def _repetition(options: Sequence[str]) -> str:
    """Return which two options are equal, for options of which two are."""
    text = next(option for option, n in Counter(options).items() if n > 1)
    first = options.index(text)
    return f"options {first} and {options.index(text, first + 1)} are both {quoted(text)}"


# --- writing and counting ---------------------------------------------------------------------------------------------


def write_questions(questions: Iterable[Question], path: str | os.PathLike[str]) -> None:
    """Write a question file that `read_questions` reads back as the same questions.

    The file appears whole or not at all; an existing one is replaced.

    Parameters
    ----------
    questions : iterable of Question
        Each with its answer.
    path : path
        ``.jsonl``, ``.ndjson`` or ``.jsonl.gz``.

    Raises
    ------
    CalibError
        Another suffix; no questions; a question that `read_questions` would refuse; a folder that cannot be written.
    """
    path = Path(path)
    records = [_record(question) for question in questions]
    if not _check(enumerate(records, start=1), path, {}):
        raise CalibError(f"{path}: there are no questions to write")
    write_jsonl(records, path)


def _record(question: Question) -> dict[str, Any]:
    """Return the fields to write; an option is named by its index, a level by its text (see the rules above)."""
    index = question.answer
    answer: int | str | None = index
    if index is not None and 0 <= index < len(question.options) and question.kind == "score":
        answer = question.options[index]
    record: dict[str, Any] = {
        "id": question.id,
        "dataset": question.dataset,
        "kind": question.kind,
        "state": question.state,
        "question": question.question,
        "options": list(question.options),
        "answer": answer,
    }
    if question.kind == "noul":
        del record["options"]
    if question.weight != 1:
        record["weight"] = question.weight
    if question.group is not None:
        record["group"] = question.group
    return record


def summarise(questions: Iterable[Question]) -> list[DatasetSummary]:
    """Return what each dataset holds, in the order in which the datasets first occur."""
    by_dataset: dict[str, list[Question]] = {}
    for question in questions:
        by_dataset.setdefault(question.dataset, []).append(question)
    return [
        DatasetSummary(
            dataset=dataset,
            n=len(members),
            kinds={kind: n for kind in KINDS if (n := sum(q.kind == kind for q in members))},
            options_min=min(len(q.options) for q in members),
            options_max=max(len(q.options) for q in members),
            groups=len({q.group for q in members} - {None}),
            weighted=any(q.weight != 1 for q in members),
        )
        for dataset, members in by_dataset.items()
    ]

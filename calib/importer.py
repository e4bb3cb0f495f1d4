"""`import_files`: outcomes that were collected elsewhere, from JSONL (.gz) into the store.

One row is one question asked of both systems by one arm. Fields:

================== =============================================================================================
``id``             or ``question_id``; unique within its ``dataset`` (the file's name when absent) and arm
``kind``           choice (default), noul or score; rows of the kind ``open`` are counted and skipped
``answer``         index of the right option
``k``, ``options`` number of options, or their texts; when absent, the length of p1
``p1``             System 1's probability of each option
``p2_by_budget``   System 2's by think budget, ``{"256": [...], "512": [...]}``; else ``p2`` alone
``think_budget``   the budget of a ``p2`` alone
``think_tokens``   length of the whole thought; ``finished`` whether it ended by itself (default true)
``latency_s1``     seconds of System 1; ``latency_s2`` of thought and answer read of the whole thought; null = unknown
``arm``            way of serving (default base); ``concurrency`` requests in flight (default 0, unknown)
``model``          else ``s1 -> s2`` when these are there; rows of one name belong to one model
``group``          or another field by name; ``weight``, ``state``, ``question`` as in question files
================== =============================================================================================

Other fields are ignored. A row whose vectors are no distributions within 1 % is refused and counted; one without
vectors is counted and skipped. Nothing is made up in their place.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.engine.base import Answer, EngineInfo
from calib.errors import CalibError
from calib.latency import RateModel, parse_rates
from calib.questions import KINDS, MAX_OPTIONS, NOUL_OPTIONS, Question
from calib.records import described, listed, place, quoted, read_records, stem
from calib.store import Answered, Failed, Store

__all__ = ["ImportSummary", "import_files"]

UNKNOWN_BUDGET = 8192
"""Budget of a p2 alone when neither the budget nor any thought's length is known: what the reference server was
evaluated with."""

_TOLERANCE = 0.01  # of the sum of a vector
_EXAMPLES = 5  # refused rows that are named
_CHUNK = 2048  # rows in one write: bounds the memory that packing takes

Rates = str | float | Mapping[str, float] | None


@dataclass(frozen=True)
class ImportSummary:
    """What an import took and what it left.

    Attributes
    ----------
    files, models, arms : list of str
        Arms include those that rates name.
    rows : int
        Rows that were looked at, after ``where``.
    imported, new_questions : int
        Rows that are now in the store (importing them again changes nothing); questions that it did not know.
    datasets : dict of str to int
        Imported rows by dataset.
    budgets : list of int
    failed : int
        Rows kept as a failure of System 2 (``missing_p2="wrong"``).
    skipped, refused : dict of str to int
        Rows that were left out, by reason: without the data, or with data that cannot be.
    examples : list of str
        The first refused rows: file, line, id, reason.
    rates : dict of str to dict
        Rate model by arm.
    warnings : list of str
    """

    files: list[str]
    models: list[str]
    rows: int
    imported: int
    new_questions: int
    datasets: dict[str, int]
    arms: list[str]
    budgets: list[int]
    failed: int
    skipped: dict[str, int]
    refused: dict[str, int]
    examples: list[str]
    rates: dict[str, dict[str, float]]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same for people, without the warnings."""
        found = [
            f"imported {self.imported} of {self.rows} rows (new questions: {self.new_questions}) of "
            f"{', '.join(self.models)}: arms {', '.join(self.arms)}; budgets {', '.join(map(str, self.budgets))}"
        ]
        found += [f"  {name}: {count}" for name, count in self.datasets.items()]
        if self.failed:
            found.append(f"kept {self.failed} rows without p2 as failures of System 2: wrong when they think")
        found += [f"skipped {count}: {reason}" for reason, count in self.skipped.items()]
        found += [f"refused {count}: {reason}" for reason, count in self.refused.items()]
        return found + [f"  {example}" for example in self.examples]


def import_files(
    store: Store,
    paths: Sequence[str | os.PathLike[str]],
    *,
    arm: str | None = None,
    where: Mapping[str, str] | None = None,
    group_key: str | None = None,
    model: str | None = None,
    system1_ms: Rates = None,
    tokens_per_second: Rates = None,
    read_ms: Rates = None,
    tokens_key: str | None = None,
    missing_p2: str = "skip",
) -> ImportSummary:
    """Import outcomes; all rows of all files in one transaction, or after an error none.

    Parameters
    ----------
    store : Store
    paths : sequence of path
        ``.jsonl``, ``.ndjson`` or ``.jsonl.gz``.
    arm : str, optional
        Instead of the rows' own.
    where : mapping of str to str, optional
        Only rows whose field has this value, compared as text: ``{"s1": "gpt-4o"}``.
    group_key : str, optional
        Field that questions which belong together share, instead of ``group``.
    model : str, optional
        Name of the model, instead of the rows' own.
    system1_ms, tokens_per_second, read_ms : str, float or mapping, optional
        Rates for seconds that the files do not hold: ``"base=250,mtp=438"``, or one number for all arms. An arm needs
        the first two; an arm that only rates name is added.
    tokens_key : str, optional
        Field with the length of the thought, instead of ``think_tokens``.
    missing_p2 : {"skip", "wrong"}
        What to do with rows that have p1 only: "wrong" keeps them as failures of System 2.

    Raises
    ------
    CalibError
        A broken file; several rows of one question and arm; no row with both vectors; rates of an arm that lack one
        of the two; a question that the store knows with another answer.
    """
    if missing_p2 not in ("skip", "wrong"):
        raise CalibError(f"--missing-p2 must be skip or wrong, got {missing_p2!r}")
    rows = _read(paths, where or {})
    names = _Names(arm, model, group_key, _tokens_key(rows, tokens_key))
    if group_key is not None and not any(group_key in row.record for row in rows):
        raise CalibError(f"--group {group_key}: no row has this field; there are {_fields(rows)}")
    found = _Found()
    for row in rows:
        found.add(row, names, keep_without_p2=missing_p2 == "wrong")
    _refuse_repetition(found.outcomes, rows)
    found.need_tokens()
    if not any(outcome.p2 for outcome in found.outcomes):
        raise CalibError(_nothing(paths, found, len(rows)))

    warnings = _fill_budgets(found.outcomes)
    tokens_known = any(outcome.length is not None for outcome in found.outcomes)
    if not tokens_known:
        warnings.append(
            "think tokens unknown: tokens are shown as 0, and seconds from rates are not available; "
            "name a field that holds the length of the thought: --tokens-key think_words"
        )
    file_arms = sorted({outcome.arm for outcome in found.outcomes}, key=lambda name: (name != "base", name))
    rates = _rate_models(file_arms, system1_ms, tokens_per_second, read_ms)
    budgets = sorted({budget for outcome in found.outcomes for budget in outcome.budgets})
    models = list(dict.fromkeys(outcome.model for outcome in found.outcomes))
    with store.transaction():
        new = store.add_questions(outcome.question for outcome in found.outcomes)
        for name in models:
            fingerprint = store.register_model(EngineInfo(name, {"imported": name}))
            records = [r for o in found.outcomes if o.model == name for r in o.records(budgets)]
            for start in range(0, len(records), _CHUNK):
                store.write(fingerprint, records[start : start + _CHUNK])
            for name_of_arm, rate in rates.items():
                store.set_rates(fingerprint, name_of_arm, rate)
    return ImportSummary(
        files=[os.fspath(path) for path in paths],
        models=models,
        rows=len(rows),
        imported=len(found.outcomes),
        new_questions=new,
        datasets=dict(Counter(outcome.question.dataset for outcome in found.outcomes)),
        arms=list(dict.fromkeys([*file_arms, *rates])),
        budgets=budgets,
        failed=sum(not outcome.p2 for outcome in found.outcomes),
        skipped=dict(found.skipped),
        refused=dict(found.refused),
        examples=found.examples,
        rates={name: asdict(rate) for name, rate in rates.items()},
        warnings=warnings,
    )


# --- files to rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    path: Path
    line: int
    record: Mapping[str, Any]

    @property
    def place(self) -> str:
        return place(self.path, self.line)


def _read(paths: Sequence[str | os.PathLike[str]], where: Mapping[str, str]) -> list[_Row]:
    if not paths:
        raise CalibError("no file was named; give one or more files that end in .jsonl or .jsonl.gz")
    rows: list[_Row] = []
    for path in map(Path, paths):
        if not path.name.lower().endswith((".jsonl", ".ndjson", ".jsonl.gz")):
            raise CalibError(f"{path}: outcomes are read from JSONL; give a file that ends in .jsonl or .jsonl.gz")
        rows += [_Row(path, line, record) for line, record in read_records(path, fields=(), required=())]
    if not rows:
        raise CalibError(f"{listed([str(path) for path in paths])}: no rows; expected one JSON object on each line")
    for key, value in where.items():
        values = Counter(_plain(row.record.get(key)) for row in rows if key in row.record)
        if not values:
            raise CalibError(f"--where {key}={value}: no row has the field {key!r}; there are {_fields(rows)}")
        rows = [row for row in rows if key in row.record and _plain(row.record[key]) == value]
        if not rows:
            shown = ", ".join(str(v) for v, _ in values.most_common(10))
            raise CalibError(f"--where {key}={value}: no row has this value; the values of {key!r} are {shown}")
    return rows


def _plain(value: Any) -> str:
    """Value as one types it in ``--where``: texts as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _fields(rows: Sequence[_Row]) -> str:
    return ", ".join(dict.fromkeys(key for row in rows for key in row.record))


def _tokens_key(rows: Sequence[_Row], given: str | None) -> str:
    if given is not None and not any(_is_number(row.record.get(given)) for row in rows):
        numeric = dict.fromkeys(key for row in rows for key, value in row.record.items() if _is_number(value))
        raise CalibError(f"--tokens-key {given}: no row has a number there; fields with numbers: {', '.join(numeric)}")
    return given or "think_tokens"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- rows to outcomes -------------------------------------------------------------------------------------------------


class _Unusable(Exception):  # noqa: N818 - a row to count, not an error of the program
    """Why a row is left out: ``reason`` to count by, ``detail`` for the example; ``skipped`` when it lacks data."""

    def __init__(self, reason: str, detail: str = "", *, skipped: bool = False) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.skipped = reason, detail, skipped


@dataclass(frozen=True)
class _Names:
    """What the user named."""

    arm: str | None
    model: str | None
    group_key: str | None
    tokens_key: str


@dataclass(eq=False)
class _Outcome:
    """One usable row. ``p2`` by budget; None as the budget of a p2 alone until it is decided."""

    row: _Row
    question: Question
    model: str
    arm: str
    concurrency: int
    p1: NDArray[np.float64]
    p2: dict[int | None, NDArray[np.float64]]
    length: float | None
    finished: bool
    t1: float
    t2: float

    @property
    def budgets(self) -> list[int]:
        return sorted(budget for budget in self.p2 if budget is not None)

    def records(self, all_budgets: Sequence[int]) -> list[Answered | Failed]:
        """What the store keeps; a thought's seconds hold at the largest budget and at those that it fits in."""
        budgets = np.array(self.budgets, dtype=np.int64)
        length = math.nan if self.length is None else self.length
        whole = (budgets >= length) | (budgets == budgets.max(initial=0))
        answer = Answer(
            p1=self.p1,
            t1=self.t1,
            budgets=tuple(budgets.tolist()),
            p2=np.array([self.p2[budget] for budget in budgets.tolist()]).reshape(len(budgets), len(self.p1)),
            tokens=np.minimum(length, budgets),
            finished=self.finished & ~(length > budgets),
            t2=np.where(whole, self.t2, math.nan),
        )
        records: list[Answered | Failed] = [Answered(self.question, self.arm, answer, self.concurrency)]
        if not self.p2:
            detail = f"no p2 in {self.row.place}"
            asked = (tuple(all_budgets), "system2", "missing_p2", detail, self.t2, 1, self.concurrency)
            records.append(Failed(self.question, self.arm, *asked))
        return records


@dataclass(eq=False)
class _Found:
    """Usable rows, and the others by reason."""

    outcomes: list[_Outcome] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, row: _Row, names: _Names, *, keep_without_p2: bool) -> None:
        try:
            self.outcomes.append(_outcome(row, names, keep_without_p2))
        except _Unusable as unusable:
            self._leave_out(row, unusable)

    def need_tokens(self) -> None:
        """Refuse rows without the length of a thought when others have it: 0 would flatter them."""
        if all(outcome.length is None for outcome in self.outcomes):
            return
        for outcome in self.outcomes:
            if outcome.p2 and outcome.length is None:
                self._leave_out(outcome.row, _Unusable("no think tokens, though other rows have them"))
        self.outcomes = [o for o in self.outcomes if o.length is not None or not o.p2]

    def _leave_out(self, row: _Row, unusable: _Unusable) -> None:
        if unusable.skipped:
            self.skipped[unusable.reason] += 1
            return
        self.refused[unusable.reason] += 1
        if len(self.examples) < _EXAMPLES:
            name = row.record.get("id", row.record.get("question_id"))
            detail = f" ({unusable.detail})" if unusable.detail else ""
            self.examples.append(f"{row.place}, id {_plain(name)}: {unusable.reason}{detail}")


def _outcome(row: _Row, names: _Names, keep_without_p2: bool) -> _Outcome:
    record = row.record
    kind = record.get("kind", "choice")
    if kind == "open":
        raise _Unusable("open questions have no options", skipped=True)
    if kind not in KINDS:
        raise _Unusable("unknown kind", f"{described(kind)}; expected {listed(KINDS)}")
    options, k = _options(record, kind)
    p1 = _vector(record.get("p1"), "p1", k)
    if p1 is None:
        raise _Unusable("without p1", skipped=True)
    p2 = _p2(record, len(p1))
    if not p2 and not keep_without_p2:
        raise _Unusable("without p2", skipped=True)
    question = Question(
        id=_name(record, "id" if record.get("id") is not None else "question_id"),
        dataset=_name(record, "dataset", stem(row.path)),
        kind=kind,
        state=_state(record.get("state")) if options else "",
        question=_text(record, "question") if options else "",  # a text is whole with its options, or unknown
        options=options or ("",) * len(p1),
        answer=_index(record.get("answer"), len(p1)),
        weight=_number(record, "weight", 1.0, lowest=math.ulp(0.0)),
        group=_group(record, names.group_key),
    )
    length = record.get(names.tokens_key)
    finished = record.get("finished")
    if finished is not None and not isinstance(finished, bool):
        raise _Unusable("finished is neither true nor false", described(finished))
    return _Outcome(
        row=row,
        question=question,
        model=names.model or _model(record),
        arm=names.arm or _name(record, "arm", "base"),
        concurrency=int(_number(record, "concurrency", 0.0, whole=True)),
        p1=p1,
        p2=p2,
        length=None if length is None else _number(record, names.tokens_key, 0.0),
        finished=finished is not False,
        t1=_number(record, "latency_s1", math.nan),
        t2=_number(record, "latency_s2", math.nan),
    )


def _options(record: Mapping[str, Any], kind: str) -> tuple[tuple[str, ...], int | None]:
    """Texts of the options, where they are known, and their number."""
    options, k = record.get("options"), record.get("k")
    if options is not None:
        if not isinstance(options, list) or not all(isinstance(option, str) and _sound(option) for option in options):
            raise _Unusable("options are not a list of texts")
        if k is not None and k != len(options):
            raise _Unusable("k is not the number of options", f"k {_plain(k)}, {len(options)} options")
        return tuple(options), len(options)
    if kind == "noul":
        return NOUL_OPTIONS, len(NOUL_OPTIONS)
    if k is not None and (not isinstance(k, int) or isinstance(k, bool)):
        raise _Unusable("k is not a whole number", described(k))
    return (), k


def _vector(value: Any, name: str, k: int | None) -> NDArray[np.float64] | None:
    """Distribution with the sum 1 from one with the sum 1 within 1 %."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise _Unusable(f"{name} is not a list of numbers")
    if not 2 <= len(value) <= MAX_OPTIONS:
        raise _Unusable(f"{name} must have 2 to {MAX_OPTIONS} entries", f"{len(value)}")
    if k is not None and len(value) != k:
        raise _Unusable(f"{name} has another length than the options", f"{len(value)} instead of {k}")
    try:
        vector = np.array(value, dtype=np.float64)
    except OverflowError:
        vector = np.array([math.inf])
    if not np.isfinite(vector).all():
        raise _Unusable(f"{name} is not finite")
    if (vector < 0).any():
        raise _Unusable(f"{name} is negative", f"{vector.min():g}")
    total = float(vector.sum())
    if not abs(total - 1) <= _TOLERANCE + 1e-9:  # 0.99 itself passes
        raise _Unusable(f"{name} does not sum to 1 within 1 %", f"{total:.4g}")
    return vector / total


def _p2(record: Mapping[str, Any], k: int) -> dict[int | None, NDArray[np.float64]]:
    by_budget = record.get("p2_by_budget")
    if by_budget is not None and not isinstance(by_budget, dict):
        raise _Unusable("p2_by_budget is not an object", described(by_budget))
    found: dict[int | None, NDArray[np.float64]] = {}
    for text, value in (by_budget or {}).items():
        vector = _vector(value, f"p2 at budget {quoted(text)}", k)
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
            raise _Unusable("p2_by_budget has a budget that is no number of tokens", quoted(text))
        if vector is not None:
            found[int(text)] = vector
    if found:
        return found
    vector = _vector(record.get("p2"), "p2", k)
    if vector is None:
        return {}
    budget = record.get("think_budget")
    return {None if budget is None else int(_number(record, "think_budget", 0.0, lowest=1, whole=True)): vector}


def _number(record: Mapping[str, Any], name: str, default: float, *, lowest: float = 0.0, whole: bool = False) -> float:
    value = record.get(name)
    if value is None:
        return default
    if not _is_number(value) or not lowest <= value < 2**53 or (whole and value != int(value)):
        raise _Unusable(f"{name} is out of range", described(value))
    return float(value)


def _index(value: Any, k: int) -> int:
    if not _is_number(value) or value not in range(k):
        raise _Unusable("answer is not the index of an option", f"{described(value)}; expected 0 to {k - 1}")
    return int(value)


def _name(record: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = record.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value or not _sound(value):
        raise _Unusable(f"{'id' if default is None else key} must be text or a whole number", described(value))
    return value


def _group(record: Mapping[str, Any], key: str | None) -> str | None:
    return None if record.get(key or "group") is None else _name(record, key or "group", "")


def _model(record: Mapping[str, Any]) -> str:
    if record.get("model") is not None:
        return _name(record, "model", "")
    return (
        f"{_name(record, 's1', '')} -> {_name(record, 's2', '')}"
        if record.get("s1") and record.get("s2")
        else "imported"
    )


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) and _sound(value) and not value.isspace() else ""


def _state(value: Any) -> str:
    """Context as question files have it: text, or JSON as its compact text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "" if value is None or not _sound(text) else text


def _sound(text: str) -> bool:
    """Whether a database can take the text: no NUL, no half of a surrogate pair."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


# --- all rows together ------------------------------------------------------------------------------------------------


def _refuse_repetition(outcomes: Sequence[_Outcome], rows: Sequence[_Row]) -> None:
    """One row for each question and arm: several are several systems, which never mix."""
    first: dict[tuple[str, str, str, int], _Outcome] = {}
    for outcome in outcomes:
        question = outcome.question
        earlier = first.setdefault((question.dataset, question.id, outcome.arm, outcome.concurrency), outcome)
        if earlier is outcome:
            continue
        again = (
            f"{outcome.row.place}: {quoted(question.id)} of dataset {quoted(question.dataset)} was already in "
            f"{earlier.row.place}; "
        )
        keys = _differing(earlier.row.record, outcome.row.record)
        if not keys:
            raise CalibError(again + "a question needs one row for each arm: remove one, or name the arm: --arm NAME")
        shown = []
        for key in keys[:3]:
            values = list(dict.fromkeys(_plain(row.record.get(key)) for row in rows))
            shown.append(f"{key} ({', '.join(values[:8])}{', ...' if len(values) > 8 else ''})")
        choice = f"{keys[0]}={_plain(earlier.row.record[keys[0]])}"
        raise CalibError(f"{again}the rows differ in {listed(shown)}: choose with --where {choice}")


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Fields that name what the rows are: texts that differ, else flags and whole numbers."""
    keys = [key for key in one if key in other and one[key] != other[key] and key not in ("answer", "finished")]
    texts = [key for key in keys if isinstance(one[key], str) and isinstance(other[key], str)]
    return texts or [key for key in keys if isinstance(one[key], int) and isinstance(other[key], int)]


def _fill_budgets(outcomes: Iterable[_Outcome]) -> list[str]:
    """Decide the budget of each p2 whose budget the files do not say; return what to tell the user."""
    alone = [outcome for outcome in outcomes if None in outcome.p2]
    if not alone:
        return []
    longest = max((outcome.length for outcome in alone if outcome.length is not None), default=None)
    if longest is None:
        budget, why = UNKNOWN_BUDGET, "no thought's length is known"
    else:
        budget = 1 << max(0, math.ceil(longest) - 1).bit_length()
        why = f"the smallest power of two that the longest thought, {longest:,.0f} tokens, fits in"
    for outcome in alone:
        outcome.p2[budget] = outcome.p2.pop(None)
    return [f"the think budget of p2 is not in the files: {budget} was taken ({why}); a field think_budget sets it"]


def _rate_models(
    file_arms: Sequence[str], system1_ms: Rates, tokens_per_second: Rates, read_ms: Rates
) -> dict[str, RateModel]:
    """Rate model of each arm that is named, and of the files' arms when numbers for all arms make one."""
    options = ("--system1-ms", "--tokens-per-second", "--read-ms")
    given = [_rates(r, name) for r, name in zip((system1_ms, tokens_per_second, read_ms), options, strict=True)]
    arms = list(dict.fromkeys(arm for rates in given for arm in rates if arm))
    if any(given) and (not arms or ("" in given[0] and "" in given[1])):
        arms += [arm for arm in file_arms if arm not in arms]
    models: dict[str, RateModel] = {}
    for arm in arms:
        system1, speed, read = (rates.get(arm, rates.get("")) for rates in given)
        if system1 is None or speed is None:
            missing = options[0] if system1 is None else options[1]
            raise CalibError(f"arm {arm!r} has rates, but no {missing}; seconds need both: {missing} {arm}=NUMBER")
        if speed == 0:
            raise CalibError(f"{options[1]} of arm {arm!r} must be above 0")
        models[arm] = RateModel(system1 / 1000, speed, (read or 0.0) / 1000)
    return models


def _rates(given: Rates, option: str) -> dict[str, float]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    return parse_rates(str(given), option)


def _nothing(paths: Sequence[str | os.PathLike[str]], found: _Found, rows: int) -> str:
    reasons = [f"{count} {reason}" for reason, count in (found.skipped + found.refused).most_common()]
    examples = "".join(f"\n  {example}" for example in found.examples)
    return (
        f"{listed([os.fspath(path) for path in paths])}: no row has vectors to use; of {rows} rows: "
        f"{'; '.join(reasons)}. calib needs the probability of each option, p1 and p2 (or p2_by_budget){examples}"
    )

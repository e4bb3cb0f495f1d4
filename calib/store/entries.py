"""What is written: questions, answers and failures as rows, without anything secret.

Leaves to others: the tables (`calib.store.schema`) and transactions (`calib.store.store`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from calib.engine.base import Answer
from calib.errors import CalibError
from calib.questions import Question, split_position
from calib.store import schema

__all__ = [
    "FIXED",
    "Answered",
    "Failed",
    "answer_row",
    "as_json",
    "failure_row",
    "now",
    "question_row",
    "refuse_change",
    "timing_row",
    "without_secrets",
]


@dataclass(frozen=True, eq=False)
class Answered:
    """A good answer to one question by one arm.

    Attributes
    ----------
    question : Question
    arm : str
        Way of serving.
    answer : Answer
        ``p1`` None and empty budgets say what was not asked; NaN seconds are unknown, NaN tokens too.
    concurrency : int
        Requests in flight meanwhile; 0 where unknown.
    pass_number : int, default 0
        Repetition of the timing; the newest counts.
    """

    question: Question
    arm: str
    answer: Answer
    concurrency: int
    pass_number: int = 0


@dataclass(frozen=True)
class Failed:
    """No usable answer from one arm: kept with its reason, and its seconds as a censored latency.

    Attributes
    ----------
    question : Question
    arm : str
    budgets : tuple of int
        Think budgets that were asked for and not answered.
    stage : {"system1", "system2", "both"}
        What was asked; "system2" leaves System 1 out, "system1" the budgets.
    reason, detail : str
        Slug to count by; one line for the user.
    seconds : float
        Wall seconds from the first attempt until it was given up; NaN where unknown.
    attempts : int
        Requests sent.
    concurrency : int
        Requests in flight meanwhile; 0 where unknown.
    """

    question: Question
    arm: str
    budgets: tuple[int, ...]
    stage: str
    reason: str
    detail: str
    seconds: float
    attempts: int
    concurrency: int

    @property
    def asked(self) -> tuple[int, ...]:
        """Budgets without an answer, `schema.SYSTEM1` among them where System 1 has none."""
        system1 = () if self.stage == "system2" else (schema.SYSTEM1,)
        return system1 + (() if self.stage == "system1" else self.budgets)


def now() -> str:
    """Present time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def as_json(document: Any) -> str:
    """JSON text; a NaN or an infinity, which JSON does not know, is a ValueError."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(seconds)


def question_row(question: Question, keep_text: bool) -> dict[str, Any]:
    """Row of ``questions``; without ``keep_text`` hashes and numbers only."""
    if question.answer is None:
        raise CalibError(f"question {question.id!r} of dataset {question.dataset!r} has no answer; calib needs one")
    key = schema.text_key(question)
    options = as_json(question.options)
    has_options = any(question.options)
    return {
        "dataset": question.dataset,
        "ext_id": question.id,
        "text_key": key,
        "kind": question.kind,
        "n_options": len(question.options),
        "answer": question.answer,
        "weight": float(question.weight),
        "grp": question.group,
        # as questions.split_key, which knows no question without its text
        "split_position": split_position(key if question.group is None else question.group),
        "label_key": sha256(options.encode()).hexdigest() if has_options else None,
        "state": question.state if keep_text and question.question else None,
        "question": question.question if keep_text and question.question else None,
        "options": options if keep_text and has_options else None,
    }


FIXED = {"text_key": "text", "kind": "kind", "n_options": "number of options", "answer": "answer", "grp": "group"}


def refuse_change(location: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse a question that is stored with other values of what answers and the split hang on."""
    for column, what in FIXED.items():
        if old[column] != new[column]:
            raise CalibError(
                f"{location}: question {new['ext_id']!r} of dataset {new['dataset']!r} was stored with another {what}; "
                "answers and the tune/test split hang on it: give the changed question another id, or use a new store"
            )


def answer_row(record: Answered, model: int, key: bytes, keep_text: bool) -> dict[str, Any]:
    """Row of ``answers``."""
    a, b, c = record.answer, len(record.answer.budgets), len(record.question.options)
    p2, mass2 = np.asarray(a.p2, dtype=np.float64), np.asarray(a.label_mass2, dtype=np.float64)
    if (a.p1 is not None and np.shape(a.p1) != (c,)) or (b and p2.shape != (b, c)):
        raise ValueError(f"p1 and p2 of {record.question.id!r} must have the shapes ({c},) and ({b}, {c})")
    return {
        "model": model,
        "key": key,
        "arm": record.arm,
        "budgets": schema.pack(a.budgets, schema.BUDGET),
        "system1": a.p1 is not None,
        "p1": None if a.p1 is None else schema.pack(a.p1),
        "label_mass1": _known(a.label_mass1),
        "p2": schema.pack(p2),
        "tokens": _packed(a.tokens, b),
        "finished": schema.pack(_flags(a.finished, b), schema.FLAG),
        "label_mass2": schema.pack(mass2 if mass2.size else np.full(b, np.nan)),
        "thought": a.text if keep_text else None,
    }


def timing_row(record: Answered, model: int, key: bytes) -> dict[str, Any]:
    """Row of ``timings``."""
    a, b = record.answer, len(record.answer.budgets)
    return {
        "model": model,
        "key": key,
        "arm": record.arm,
        "concurrency": record.concurrency,
        "pass": record.pass_number,
        "budgets": schema.pack(a.budgets, schema.BUDGET),
        "system1": a.p1 is not None,
        "timed": not math.isnan(a.t1) or not np.isnan(np.asarray(a.t2, dtype=np.float64)).all(),
        "t1": _known(a.t1),
        "t2": _packed(a.t2, b),
        "tokens": _packed(a.tokens, b),
        "finished": schema.pack(_flags(a.finished, b), schema.FLAG),
        "stages": as_json(dict(a.stages)) if a.stages else None,
    }


def _packed(values: ArrayLike, length: int) -> bytes:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (length,):
        raise ValueError(f"expected one value for each of {length} budgets, got the shape {array.shape}")
    return schema.pack(array)


def _flags(values: ArrayLike, length: int) -> np.ndarray[Any, Any]:
    flags = np.asarray(values, dtype=bool)
    if flags.shape != (length,):
        raise ValueError(f"expected one flag for each of {length} budgets, got the shape {flags.shape}")
    return flags


def failure_row(record: Failed, model: int, key: bytes, at: str) -> dict[str, Any]:
    """Row of ``failures`` but for its budget."""
    return {
        "model": model,
        "key": key,
        "dataset": record.question.dataset,
        "ext_id": record.question.id,
        "arm": record.arm,
        "concurrency": record.concurrency,
        "stage": record.stage,
        "reason": record.reason,
        "detail": _without_logins(record.detail),
        "seconds": _known(record.seconds),
        "attempts": record.attempts,
        "at": at,
    }


_SECRET = re.compile(r"(?i)(password|passwd|secret|credential|authorization|api_?key|token)$")


def without_secrets(value: Any) -> Any:
    """Copy without entries named as a secret is; ``api_key_env`` names an environment variable and stays."""
    if isinstance(value, Mapping):
        return {k: without_secrets(v) for k, v in value.items() if not _SECRET.search(str(k).replace("-", "_"))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    return _without_logins(value) if isinstance(value, str) else value


def _without_logins(text: str) -> str:
    """Cut user, password and query out of the URLs in a text."""
    return re.sub(r"(\w+://)(?:[^/@\s]*@)?([^\s?#'\"]*)(?:[?#][^\s'\"]*)?", r"\1\2", text)

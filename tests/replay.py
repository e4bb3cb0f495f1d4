"""An engine that replays recorded outcomes: what a real server said, without the server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calib.engine import Answer, EngineInfo
from calib.questions import Question

BUDGETS = (16, 32, 64, 600)
NAN = float("nan")


def recorded(path: Path) -> list[dict[str, Any]]:
    """Rows of a recording in the form that ``calib import`` reads."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def asked(rows: Sequence[dict[str, Any]], salt: str = "") -> list[Question]:
    """The questions of recorded rows; another salt gives other texts, and so another split and other samples."""
    return [
        Question(
            row["id"],
            row["dataset"],
            "choice",
            "",
            f"{salt}{row['dataset']} {row['id']}?",
            tuple("ABCDEFGHIJ"[: len(row["p1"])]),
            row["answer"],
        )
        for row in rows
    ]


@dataclass
class ReplayEngine:
    """Answers by id; seconds of a cut thought are its share of the whole one's."""

    rows: Sequence[dict[str, Any]]
    asked: list[tuple[str, tuple[int, ...], bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_id = {row["id"]: row for row in self.rows}

    async def info(self) -> EngineInfo:
        return EngineInfo("recorded", {"model": "recorded"}, 0.8, 0.5)

    async def ask(
        self,
        question: Question,
        budgets: Sequence[int],
        *,
        system1: bool = True,
        keep_text: bool = False,
        deadline: float | None = None,
    ) -> Answer:
        self.asked.append((question.id, tuple(budgets), system1))
        row = self._by_id[question.id]
        p1, length = np.array(row["p1"]), row["think_tokens"]
        p2 = np.array([row["p2_by_budget"][str(b)] for b in budgets]).reshape(len(budgets), len(p1))
        used = np.array([min(length, b) for b in budgets], dtype=np.int64)
        return Answer(
            p1=p1 / p1.sum() if system1 else None,
            t1=row["latency_s1"] if system1 else NAN,
            budgets=tuple(budgets),
            p2=p2 / p2.sum(axis=1, keepdims=True),
            tokens=used,
            finished=np.array([length <= b and row["finished"] for b in budgets], dtype=bool),
            t2=row["latency_s2"] * used / max(length, 1),
        )

    async def close(self) -> None:
        pass

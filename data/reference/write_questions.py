"""Writes questions of the reference model's tasks, held out from its training.

    python data/reference/write_questions.py --per-task 220 --out questions.jsonl.gz

The same numbers give the same questions everywhere; a larger ``--per-task`` contains a smaller one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import tasks

from calib.questions import Question, write_questions

__all__ = ["questions"]


def questions(per_task: int, *, seed: int = 0, only: tuple[str, ...] = ()) -> list[Question]:
    """``per_task`` different questions of each task, in turn.

    Parameters
    ----------
    per_task : int
    seed : int
        From 0 to 999,998; another one gives other questions, a few of which may be the same where a task has few.
    only : tuple of str
        Tasks; all by default.
    """
    columns = [list(islice(_distinct(task, seed), per_task)) for task in only or tuple(tasks.TASKS)]
    return [question for row in zip(*columns, strict=True) for question in row]


def _distinct(task: str, seed: int) -> Iterator[Question]:
    seen: set[tuple[str, str]] = set()
    for case in tasks.cases(task, tasks.QUESTION_SEED + seed, training=False):
        if (case.state, case.question) in seen:
            continue
        seen.add((case.state, case.question))
        name = f"{task}-{seed}-{len(seen):05d}"
        yield Question(name, task, case.kind, case.state, case.question, case.options, case.answer)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-task", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSONL (.gz)")
    given = parser.parse_args()
    write_questions(questions(given.per_task, seed=given.seed), given.out)


if __name__ == "__main__":
    main()

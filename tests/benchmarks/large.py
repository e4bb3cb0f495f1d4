"""A store of the size of a published index: 33,846 questions with 4 to 18 options, 10 datasets, 10 budgets, 2 arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from calib.engine.base import Answer, EngineInfo
from calib.questions import Question
from calib.store import Answered, Store

N, ARMS, BATCH = 33_846, ("base", "mtp"), 512
BUDGETS = tuple(2**i for i in range(6, 16))


def records() -> list[Answered]:
    """Made-up answers of both arms, without a meaning."""
    rng = np.random.default_rng(0)
    budgets = np.array(BUDGETS)
    k = rng.integers(4, 19, N)
    p = np.where(np.arange(18) < k[:, None, None], rng.random((N, 11, 18)), 0)
    p /= p.sum(axis=2, keepdims=True)
    length = rng.lognormal(7.5, 1, N).round()
    tokens = np.minimum(length[:, None], budgets)
    found = []
    for i in range(N):
        options = tuple(f"option {j}" for j in range(k[i]))
        question = Question(str(i), f"set {i % 10}", "choice", "", f"What about {i}?", options, 0)
        p1, p2 = p[i, 0, : k[i]], p[i, 1:, : k[i]]
        for speed, arm in zip((250, 438), ARMS, strict=True):
            seconds = tokens[i] / speed + 0.05
            answer = Answer(p1, 0.05, BUDGETS, p2, tokens[i], length[i] <= budgets, seconds)
            found.append(Answered(question, arm, answer, 8))
    return found


def fill(path: Path, found: Sequence[Answered]) -> str:
    """Write the answers into a new store; gives the model's fingerprint."""
    with Store.open(path) as store:
        fingerprint = store.register_model(EngineInfo("m", {}))
        store.add_questions([record.question for record in found[:: len(ARMS)]])
        for start in range(0, len(found), BATCH):
            store.write(fingerprint, found[start : start + BATCH])
    return fingerprint

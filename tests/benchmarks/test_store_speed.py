"""How long the store takes at the size of a published index: 33,846 questions, 10 budgets, 2 arms.

Aims: loading under 3 s; coverage, which a collector reads before it asks anything, under 1 s.
"""

from __future__ import annotations

import numpy as np
import pytest

from calib.engine.base import Answer, EngineInfo
from calib.questions import Question
from calib.store import Answered, Store, load_outcomes

pytestmark = pytest.mark.slow  # filling the store takes about fifteen seconds

N, ARMS, BATCH = 33_846, ("base", "mtp"), 512
BUDGETS = tuple(2**i for i in range(6, 16))


@pytest.fixture(scope="module")
def records():
    """Answers of both arms to questions with 4 to 18 options."""
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


@pytest.fixture(scope="module")
def filled(records, tmp_path_factory):
    """Path of a store that holds all of it, and the fingerprint."""
    path = tmp_path_factory.mktemp("store") / "s.db"
    with Store.open(path) as store:
        fingerprint = store.register_model(EngineInfo("m", {}))
        store.add_questions([record.question for record in records[:: len(ARMS)]])
        for start in range(0, len(records), BATCH):
            store.write(fingerprint, records[start : start + BATCH])
    return path, fingerprint


def test_load(benchmark, filled):
    o = benchmark.pedantic(load_outcomes, args=(filled[0],), rounds=3, warmup_rounds=1)
    assert o.p2.shape == (N, 10, 18)
    assert o.arms == ARMS
    assert np.isfinite(o.t2).all()
    if benchmark.stats is not None:  # None with --benchmark-disable
        assert benchmark.stats.stats.min < 3


def test_coverage(benchmark, filled):
    path, fingerprint = filled
    with Store.open(path) as store:
        covered = benchmark.pedantic(store.coverage, args=(fingerprint, "base"), kwargs={"concurrency": 8}, rounds=3)
    assert len(covered) == N
    assert all(c.timed == frozenset(BUDGETS) for c in covered.values())


def test_write(benchmark, records, tmp_path):
    """Seconds for 20 batches; the extra info holds answers a second."""
    with Store.open(tmp_path / "s.db") as store:
        fingerprint = store.register_model(EngineInfo("m", {}))

        def write():
            for start in range(0, 20 * BATCH, BATCH):
                store.write(fingerprint, records[start : start + BATCH])

        benchmark.pedantic(write, rounds=1)
        assert len(store.coverage(fingerprint, "base")) == 0  # no question was added: only answers were
    if benchmark.stats is not None:
        benchmark.extra_info["answers_per_s"] = round(20 * BATCH / benchmark.stats.stats.min)

"""How long the store takes at the size of a published index: 33,846 questions, 10 budgets, 2 arms.

Aims: loading under 3 s; coverage, which a collector reads before it asks anything, under 1 s.
"""

from __future__ import annotations

import numpy as np
import pytest

from calib.engine.base import EngineInfo
from calib.store import Store, load_outcomes
from tests.benchmarks import large
from tests.benchmarks.large import ARMS, BATCH, BUDGETS, N

pytestmark = pytest.mark.slow  # filling the store takes about fifteen seconds


@pytest.fixture(scope="module")
def records():
    return large.records()


@pytest.fixture(scope="module")
def filled(records, tmp_path_factory):
    """Path of a store that holds all of it, and the fingerprint."""
    path = tmp_path_factory.mktemp("store") / "s.db"
    return path, large.fill(path, records)


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

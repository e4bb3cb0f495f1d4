"""10,000 requests that share a server, as `calib verify --rate` predicts them; one costs the same among more."""

from __future__ import annotations

import timeit

import numpy as np

from calib.arrivals import arrival_times
from calib.queueing import Flight, Pace, simulate

N = 10_000
SERVER = Pace(np.array([1, 8, 64, 128]), np.array([[13.0, 400], [84, 2500], [290, 8600], [290, 8600]]))
"""Prompts and thought tokens a second."""


def flown(n: int) -> Flight:
    """Half of the requests think; about 25 are in flight."""
    rng = np.random.default_rng(0)
    thinks = rng.random(n) < 0.5
    tokens = np.where(thinks, rng.integers(10, 129, n), 0)
    seconds = (0.014 + thinks * 0.02 + 0.0021 * tokens)[:, None] * np.array([1.0, 1.3, 3.0, 6.0])
    return simulate(arrival_times(n, 115.0, rng), seconds, np.column_stack([1 + 2 * thinks, tokens]), SERVER)


def test_ten_thousand_requests(benchmark):
    found = benchmark.pedantic(flown, args=(N,), rounds=3, warmup_rounds=1)
    assert 10 < found.in_flight < 100
    many = benchmark.stats.stats.min
    assert many < 5
    few = min(timeit.repeat(lambda: flown(N // 10), number=1, repeat=5))
    assert many / few < 20  # ten times as many

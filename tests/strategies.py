"""Hypothesis strategies that several test modules share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from calib.outcomes import Outcomes


def distributions(rng: np.random.Generator, n_options: np.ndarray, width: int, *, coarse: bool) -> np.ndarray:
    """Random distributions over the first n_options of width places; coarse ones tie often."""
    raw = rng.integers(1, 4, (len(n_options), width)) if coarse else rng.random((len(n_options), width)) + 1e-3
    raw = np.where(np.arange(width) < n_options[:, None], raw, 0).astype(float)
    return raw / raw.sum(1, keepdims=True)


@st.composite
def outcomes(draw, *, max_n: int = 12, max_width: int = 5, weighted: bool | None = None, failures: bool = True):
    """Small Outcomes: ragged options, ties, several budgets and arms, failed System 2, questions that cannot think."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, width = draw(st.integers(1, max_n)), draw(st.integers(2, max_width))
    b, a = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    coarse = draw(st.booleans())
    k = rng.integers(2, width + 1, n)
    k[0] = width
    p2 = np.stack([distributions(rng, k, width, coarse=coarse) for _ in range(b)], axis=1)
    if failures and draw(st.booleans()):
        p2[rng.random((n, b)) < 0.2] = np.nan
    uneven = draw(st.booleans()) if weighted is None else weighted
    weight = rng.integers(1, 5, n) / 2 if uneven else np.ones(n)
    length = rng.integers(1, 40, n)
    budgets = np.array([8, 16, 32])[:b]
    tokens = np.minimum(length[:, None], budgets)
    t1 = rng.integers(1, 5, (a, n)) / 100
    return Outcomes(
        p1=distributions(rng, k, width, coarse=coarse),
        p2=p2,
        tokens=tokens,
        finished=length[:, None] <= budgets,
        t1=t1,
        t2=tokens[None] * (rng.integers(1, 4, (a, 1, 1)) / 10) + 0.05,
        answer=rng.integers(0, k),
        n_options=k,
        budgets=budgets,
        arms=("base", "mtp")[:a],
        dataset=np.array(["a", "b", "c, d"], dtype=object)[rng.integers(0, 3, n)],
        group=[f"g{i}" for i in rng.integers(0, max(1, n // 2) + 1, n)],
        can_think=rng.random(n) < 0.9 if draw(st.booleans()) else np.ones(n, bool),
        weight=weight,
        label_set=rng.integers(-1, 2, n),
    )

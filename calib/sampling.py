"""Which questions of a staged collection are thought about, and what each of them then stands for.

Pure: arrays in, arrays out. The tune side is stratified by dataset, confidence band and whether System 1 is right: all
is known of every question before any thought. A question that was thought about stands for its share of the
stratum: it weighs questions / thoughts of the stratum, the inverse of the probability with which it was chosen. So
System 1's part in every band is exact, and only that of System 2 is sampled. The test side is a plain random sample,
where all weigh the same. Leaves to others: who is asked when (`calib.staged`), the rows (`calib.store`).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["EDGES", "Sampling", "allocate", "bands", "place", "presented"]

EDGES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)
"""Confidences at which a new band begins. They never depend on the data, so that a stratum stays what it was."""

_APART = 100  # further apart than any two bands

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def bands(confidence: ArrayLike) -> Ints:
    """Band of each confidence, from 0 (below the first of `EDGES`)."""
    return np.searchsorted(EDGES, np.asarray(confidence, dtype=np.float64), side="right")


def place(text_key: str, salt: str = "thought") -> float:
    """Place of a question in the random order of its stratum, in [0, 1): the same for ever, and for equal texts.

    Another salt than that of the tune/test split, or the sample would not be a random part of its side.
    """
    digest = hashlib.sha256(f"{salt}:{text_key}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


# --- what is thought about next ---------------------------------------------------------------------------------------


def allocate(size: ArrayLike, held: ArrayLike, variance: ArrayLike, cost: ArrayLike, extra: float) -> Ints:
    """Share out further thoughts so that the estimated gain of thinking gets the least variance for its cost.

    Each goes where it takes away most: a stratum of N questions with n thoughts adds N^2 v / n to the variance, one
    more thought takes N^2 v / (n (n + 1)) of it for its cost. A stratum without any comes first, the largest first.

    Parameters
    ----------
    size, held : array_like of int, shape (H,)
        Questions of each stratum, and how many of them have a thought.
    variance : array_like of shape (H,)
        Of the gain within the stratum, above 0.
    cost : array_like of shape (H,)
        Of one thought there, above 0, in any unit.
    extra : float
        Thoughts to share out, as many as cost ``extra`` times the mean cost of a question's thought.

    Returns
    -------
    ndarray of int, shape (H,)
        Further thoughts.

    References
    ----------
    J. Neyman, "On the two different aspects of the representative method", JRSS 97 (1934). The greedy shares are
    exact for whole numbers: B. Fox, "Discrete optimization via marginal analysis", Management Science 13 (1966).
    """
    n_all, n = np.asarray(size, dtype=np.int64), np.array(held, dtype=np.int64)
    v, c = np.asarray(variance, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    more = np.zeros_like(n)
    if not n_all.sum():
        return more

    def worth(h: int) -> tuple[float, float]:
        new = float(n_all[h]) ** 2 * v[h] / c[h]
        return (-math.inf, -float(n_all[h])) if n[h] == 0 else (-new / (n[h] * (n[h] + 1)), 0.0)

    purse = extra * float((n_all * c).sum() / n_all.sum())
    queue = [(*worth(h), h) for h in range(len(n)) if n[h] < n_all[h]]
    heapq.heapify(queue)
    while queue:
        *_, h = heapq.heappop(queue)
        purse -= c[h]
        if purse < -1e-9 * c[h]:
            break
        n[h] += 1
        more[h] += 1
        if n[h] < n_all[h]:
            heapq.heappush(queue, (*worth(h), h))
    return more


# --- what they stand for ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sampling:
    """What a staged collection planned for M questions.

    Attributes
    ----------
    test : ndarray of bool, shape (M,)
        On the test side, which is sampled at random; the others are stratified.
    stratum : ndarray of int, shape (M,)
        Number of the dataset (and of the part of the questions that one collector asks): bands are merged within.
    band : ndarray of int, shape (M,)
        Confidence band within it, see `bands`.
    wrong : ndarray of bool, shape (M,)
        Whether System 1 answers it wrong.
    round : ndarray of int, shape (M,)
        Round in which the question was chosen, from 1; 0 for one that was not.
    """

    test: Bools
    stratum: Ints
    band: Ints
    wrong: Bools
    round: Ints


def presented(sampling: Sampling, complete: ArrayLike) -> Floats:
    """How many questions each of those planned stands for; 0 for one that is left out.

    Tune side: every complete question counts, whatever round it is of. A stratum without any is merged with the one of
    the nearest band that has some (the lower of two), first among those where System 1 does alike; a dataset without
    any is left out. Test side: the rounds that are complete in
    all of their questions (one that was interrupted lacks those that took longest), or all questions when all are.

    Parameters
    ----------
    sampling : Sampling
    complete : array_like of bool, shape (M,)
        Whether all that was asked of the question is there, also as a failure.

    Returns
    -------
    ndarray of shape (M,)
    """
    done = np.asarray(complete, dtype=bool)
    weight = np.zeros(len(done))
    test = sampling.test
    use = test & done
    if not use[test].all():
        broken = set(sampling.round[test & ~done & (sampling.round > 0)].tolist())
        whole = use & (sampling.round > 0) & ~np.isin(sampling.round, list(broken))
        use = whole if whole.any() else use & (sampling.round > 0)
    if use.any():
        weight[use] = test.sum() / use.sum()
    for number in np.unique(sampling.stratum[~test]).tolist():
        here = ~test & (sampling.stratum == number)
        cell = sampling.band + _APART * sampling.wrong
        there = np.unique(cell[here & done])
        if not there.size:
            continue
        merged = there[np.abs(cell[here][:, None] - there).argmin(axis=1)]
        size, held = np.bincount(merged), np.bincount(merged, done[here])
        weight[here] = np.where(done[here], size[merged] / np.maximum(held[merged], 1), 0.0)
    return weight

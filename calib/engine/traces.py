"""`Traces`: simulated answers of both systems, read at any think budget of one thought.

One trace per question: a thought of a fixed length, whose final answer is read when the budget lets it end, and a
leaning that is read when the budget cuts it. Leaves to others: assigning them (`quotas`), serving them (`simulated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["JITTER", "Traces"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

JITTER = 0.02
"""Largest relative deviation of a forward pass from its usual seconds."""


@dataclass(frozen=True, eq=False)
class Traces:
    """Both systems' answers to N questions with at most C options, at any budget.

    Attributes
    ----------
    p1 : ndarray of shape (N, C)
        System 1; padded options hold 0.
    n_options, key : ndarray of int, shape (N,)
    length : ndarray of int, shape (N,)
        Tokens of the whole thought.
    final, leaning : ndarray of int, shape (N,)
        Option that the finished thought reads; option that a thought cut at ``turns`` tokens or later reads. Cut
        earlier it reads System 1's.
    turns : ndarray of int, shape (N,)
    sure_final, sure_cut : ndarray of shape (N,)
        Weight of that option over what System 1 gives, 0 to 1.
    jitter : ndarray of shape (N, 2)
        Relative deviation of System 1's seconds and of the answer read's.
    """

    p1: Floats
    n_options: Ints
    key: Ints
    length: Ints
    final: Ints
    leaning: Ints
    turns: Ints
    sure_final: Floats
    sure_cut: Floats
    jitter: Floats

    def read(self, rows: Ints, budgets: Ints) -> tuple[Floats, Ints, Bools]:
        """System 2 at each budget of one thought: p2 (R, B, C), tokens (R, B), finished (R, B)."""
        length = self.length[rows][:, None]
        p1 = self.p1[rows]
        finished = length <= budgets
        cut = np.where(budgets >= self.turns[rows][:, None], self.leaning[rows][:, None], p1.argmax(1)[:, None])
        option = np.where(finished, self.final[rows][:, None], cut)
        sure = np.where(finished, self.sure_final[rows][:, None], self.sure_cut[rows][:, None])
        p2 = (1 - sure)[..., None] * p1[:, None]
        p2.reshape(-1, p2.shape[-1])[np.arange(option.size), option.ravel()] += sure.ravel()
        return p2, np.minimum(length, budgets), finished

    @classmethod
    def concatenate(cls, parts: Sequence[Traces]) -> Traces:
        """The sets one after the other, p1 padded to the most options."""
        width = max(part.p1.shape[1] for part in parts)
        padded = [np.pad(part.p1, ((0, 0), (0, width - part.p1.shape[1]))) for part in parts]
        rest = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in cls.__annotations__
            if name != "p1"
        }
        return cls(p1=np.concatenate(padded), **rest)

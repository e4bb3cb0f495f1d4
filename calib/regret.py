"""What more thoughts could win: how far a policy tuned on some thoughts falls short of one tuned on all of them.

Questions without a thought are filled in by the thoughts about questions alike: of the same dataset, in the same
confidence band, where System 1 does alike. Each filling is one that the whole collection may turn out to be; on each
the best policy is compared with the one that the thoughts at hand give. Nothing is assumed but that the thoughts of a
stratum stand for it, as they do when outcomes are loaded.

Pure: arrays in, numbers out. Leaves to others: who is asked next (`calib.staged`), the strata (`calib.sampling`).

References
----------
D. B. Rubin, J. L. Schenker, "Multiple imputation for interval estimation from simple random samples with ignorable
nonresponse", JASA 81 (1986): the approximate Bayesian bootstrap, here with the weights of D. B. Rubin, "The Bayesian
bootstrap", Annals of Statistics 9 (1981).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib import metrics
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import confidence, evaluate
from calib.sampling import bands

__all__ = ["REPLICATES", "regrets"]

REPLICATES = 30
LARGEST = 2000
"""Questions of one filling; of more a random part is filled in."""
FEWEST_DONORS = 5
"""Thoughts that a question is filled in from at least, where the stratum has fewer: those of the bands around it."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def regrets(
    system1: Outcomes,
    thought: Outcomes,
    *,
    rng: np.random.Generator,
    replicates: int = REPLICATES,
    cost: Any = None,
    **objective: Any,
) -> Floats:
    """How much of the objective the policy tuned on these thoughts lacks to the best one of the whole.

    Parameters
    ----------
    system1 : Outcomes
        All questions that are tuned on; nothing of System 2 is read.
    thought : Outcomes
        Those of them with a thought, weighted by what they stand for.
    rng : numpy.random.Generator
    replicates : int
        Fillings.
    cost, **objective
        Of `calib.optimise.optimum`.

    Returns
    -------
    ndarray of shape (replicates,)
        0 or more but for rounding, in the unit of the objective.
    """
    policy = optimum(thought, cost=cost, **objective).policy
    assert policy is not None  # without targets every policy is feasible
    found = []
    for _ in range(replicates):
        part = system1
        if system1.n > LARGEST:
            part = system1.take(np.sort(rng.choice(system1.n, LARGEST, replace=False)))
        whole = filled(part, thought, rng)
        best = optimum(whole, cost=cost, **objective)
        ours = float(getattr(evaluate(whole, policy, cost=cost), best.metric))
        found.append(abs(best.objective - ours))
    return np.array(found)


def filled(system1: Outcomes, thought: Outcomes, rng: np.random.Generator) -> Outcomes:
    """All questions with a thought: their own, or one of a question alike.

    A thought is carried over by what it does to the right answer: the right option gets the probability of the right
    one, the others theirs in the order in which System 1 ranks them.

    Parameters
    ----------
    system1, thought : Outcomes
        See `regrets`.
    rng : numpy.random.Generator
    """
    source, own = _sources(system1, thought, rng)
    order, theirs = _ranked(system1), _ranked(thought)[source]
    c, c_there = system1.p1.shape[1], thought.p1.shape[1]
    by_rank = np.take_along_axis(thought.p2[source], theirs[:, None, :], axis=2)
    by_rank = np.pad(by_rank, ((0, 0), (0, 0), (0, max(0, c - c_there))))[:, :, :c]
    by_rank[np.broadcast_to((np.arange(c) >= system1.n_options[:, None])[:, None], by_rank.shape)] = 0
    total = by_rank.sum(axis=2, keepdims=True)
    even = (np.arange(c) < system1.n_options[:, None]) / system1.n_options[:, None]
    by_rank = np.where(total > 0, by_rank / np.where(total > 0, total, 1.0), even[:, None])
    by_rank[np.isnan(thought.p2[source]).all(axis=2)] = np.nan  # a thought that failed
    p2 = np.empty_like(by_rank)
    np.put_along_axis(p2, np.broadcast_to(order[:, None, :], by_rank.shape).copy(), by_rank, axis=2)
    width = min(c, c_there)
    p2[own, :, :width] = thought.p2[source[own], :, :width]
    return replace(
        system1,
        p2=p2,
        budgets=thought.budgets,
        tokens=thought.tokens[source],
        finished=thought.finished[source],
        arms=thought.arms,
        t1=thought.t1[:, source],
        t2=thought.t2[:, source],
        label_mass=np.full((system1.n, 1 + len(thought.budgets)), np.nan),
        concurrency=thought.concurrency,
        estimated=thought.estimated,
    )


def _ranked(outcomes: Outcomes) -> Ints:
    """Options of each question, the right one first and then by System 1's probability; padded ones last, (N, C)."""
    right = np.arange(outcomes.p1.shape[1]) == outcomes.answer[:, None]
    key = np.where(right, np.inf, outcomes.p1)
    return np.argsort(-np.where(outcomes.option_mask, key, -np.inf), axis=1, kind="stable")


def _sources(system1: Outcomes, thought: Outcomes, rng: np.random.Generator) -> tuple[Ints, NDArray[np.bool_]]:
    """Row of ``thought`` that each question is filled in from, and whether it is its own, (N,)."""
    rows = {name: i for i, name in enumerate(_names(thought))}
    source = np.array([rows.get(name, -1) for name in _names(system1)], dtype=np.int64)
    own = source >= 0
    chance = rng.exponential(size=thought.n)  # of each donor, the same for all that it fills in
    donors = _Donors(thought)
    cells: dict[tuple[str, bool, int], list[int]] = {}
    alike, band = _alike(system1), bands(confidence(system1.p1))
    for i in np.flatnonzero(~own).tolist():
        cells.setdefault((*alike[i], int(band[i])), []).append(i)
    for (name, wrong, number), members in cells.items():
        there = donors.of(name, wrong, number)
        share = np.cumsum(chance[there])
        source[members] = there[np.searchsorted(share, rng.random(len(members)) * share[-1], side="right")]
    return source, own


def _names(outcomes: Outcomes) -> list[tuple[str, str]]:
    return list(zip(outcomes.dataset.tolist(), outcomes.ids.tolist(), strict=True))


def _alike(outcomes: Outcomes) -> list[tuple[str, bool]]:
    """Dataset of each question, and whether System 1 is wrong."""
    wrong = metrics.chosen(outcomes.p1) != outcomes.answer
    return list(zip(outcomes.dataset.tolist(), wrong.tolist(), strict=True))


class _Donors:
    """Rows with a thought, by stratum."""

    def __init__(self, thought: Outcomes) -> None:
        self._thinks = thought.can_think
        self._band = bands(confidence(thought.p1))
        self._wrong = np.array([wrong for _, wrong in _alike(thought)], dtype=bool)
        self._dataset = thought.dataset.astype(str)
        self._found: dict[tuple[str, bool, int], Ints] = {}

    def of(self, dataset: str, wrong: bool, band: int) -> Ints:
        """Rows alike: of the same band, or of as many bands around it as it takes; at last of other datasets."""
        key = (dataset, wrong, band)
        if key not in self._found:
            everywhere = self._thinks & (self._wrong == wrong)
            for among in (everywhere & (self._dataset == dataset), everywhere, self._thinks):
                rows = np.flatnonzero(among)
                if len(rows) >= FEWEST_DONORS:
                    break
            apart = np.abs(self._band[rows] - band)
            enough = np.sort(apart)[min(FEWEST_DONORS, len(rows)) - 1]
            self._found[key] = rows[apart <= enough]
        return self._found[key]

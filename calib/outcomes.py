"""`Outcomes`: the arrays that every later stage reads, checked on entry, and the tune/test split.

Leaves to others: where the rows come from (`calib.store`), what a policy makes of them (`calib.policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib.errors import CalibError

__all__ = ["ESTIMATED", "SIMULATED", "Outcomes"]

ESTIMATED = "estimated"
"""Mark: latency comes from a rate model or a fitted line."""
SIMULATED = "simulated"
"""Mark: no real model answered."""

_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Cached answers of both systems to N questions: C options, B think budgets, A arms.

    Attributes
    ----------
    p1 : ndarray of shape (N, C)
        System 1's probability of each option; rows sum to 1, padded options hold 0.
    p2 : ndarray of shape (N, B, C)
        System 2's probability after at most that many thinking tokens of one trace. A row of NaN says that
        System 2 was asked and gave no usable answer.
    tokens : ndarray of shape (N, B)
        Thinking tokens used.
    finished : ndarray of bool, shape (N, B)
        Whether the thought ended by itself within the budget.
    t1 : ndarray of shape (A, N)
        Seconds of System 1; NaN where unknown.
    t2 : ndarray of shape (A, N, B)
        Seconds of thought and answer read by System 2; NaN where unknown.
    n_options, answer : ndarray of int, shape (N,)
        Number of options; index of the right option.
    budgets : ndarray of int, shape (B,)
        Think budgets, tokens, ascending.
    arms : tuple of str, length A
        Ways of serving the same model.
    dataset, kind, ids, group : ndarray of str, shape (N,)
        ``group`` is what is split and resampled together; a question without one is its own group.
    can_think : ndarray of bool, shape (N,)
        False where the server cannot think (score questions of the reference server).
    weight : ndarray of shape (N,)
        Weight in traffic, positive.
    label_mass : ndarray of shape (N, 1 + B)
        Share of the full vocabulary's probability on the labels: System 1, then each budget; NaN where unknown.
    flaw : ndarray of str, shape (N,)
        Why a row failed an audit, as far as its store tells (`calib.fitness`); empty where nothing is held against it.
    label_set : ndarray of int, shape (N,)
        Equal numbers share one fixed list of options, so that a label means the same on each; -1 without one.
    split_position : ndarray of shape (N,)
        Position of the question in [0, 1) by a hash that never changes: a test question iff below the test share.
    concurrency : ndarray of int, shape (A,)
        Requests in flight while the latency of each arm was taken; 0 where unknown.
    estimated : ndarray of bool, shape (A, 1 + B)
        Whether seconds come from a rate model or a fitted line for any question: System 1, then each budget.
    simulated : bool
        Whether no real model answered.
    model, fingerprint : str
        Served model name; hash of all that can change an answer.
    default_threshold, default_mix : float
        What the server does by itself: the ``default`` baseline.
    warnings : tuple of str
        What the user should know about these rows, for instance how many questions were left out.
    """

    p1: NDArray[np.float64]
    p2: NDArray[np.float64]
    tokens: NDArray[np.float64]
    finished: NDArray[np.bool_]
    t1: NDArray[np.float64]
    t2: NDArray[np.float64]
    answer: NDArray[np.int64]
    budgets: NDArray[np.int64]
    arms: tuple[str, ...] = ("base",)
    n_options: NDArray[np.int64] = None  # type: ignore[assignment]  # the columns of p1, unless given
    dataset: NDArray[np.object_] = None  # type: ignore[assignment]  # one unnamed dataset, unless given
    kind: NDArray[np.object_] = None  # type: ignore[assignment]
    ids: NDArray[np.object_] = None  # type: ignore[assignment]
    group: NDArray[np.object_] = None  # type: ignore[assignment]
    can_think: NDArray[np.bool_] = None  # type: ignore[assignment]
    weight: NDArray[np.float64] = None  # type: ignore[assignment]
    label_mass: NDArray[np.float64] = None  # type: ignore[assignment]
    flaw: NDArray[np.object_] = None  # type: ignore[assignment]
    label_set: NDArray[np.int64] = None  # type: ignore[assignment]
    split_position: NDArray[np.float64] = None  # type: ignore[assignment]
    concurrency: NDArray[np.int64] = None  # type: ignore[assignment]
    estimated: NDArray[np.bool_] = None  # type: ignore[assignment]
    simulated: bool = False
    model: str = ""
    fingerprint: str = ""
    default_threshold: float = 0.8
    default_mix: float = 0.5
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n, c = np.shape(self.p1) if np.ndim(self.p1) == 2 else (-1, -1)
        if n < 1 or c < 2:
            raise CalibError(f"p1 must have the shape (questions, options >= 2), got {np.shape(self.p1)}")
        b, a = len(np.atleast_1d(self.budgets)), len(self.arms)
        defaults: dict[str, Callable[[], ArrayLike]] = {
            "n_options": lambda: np.full(n, c),
            "dataset": lambda: ["all"] * n,
            "kind": lambda: ["choice"] * n,
            "ids": lambda: [str(i) for i in range(n)],
            "group": lambda: [f"{d}\0{i}" for d, i in zip(self.dataset, self.ids, strict=True)],
            "can_think": lambda: np.ones(n, bool),
            "weight": lambda: np.ones(n),
            "label_mass": lambda: np.full((n, 1 + b), np.nan),
            "flaw": lambda: [""] * n,
            "label_set": lambda: np.full(n, -1),
            "split_position": lambda: (np.arange(n) + 0.5) / n,
            "concurrency": lambda: np.zeros(a),
            "estimated": lambda: np.zeros((a, 1 + b), bool),
        }
        for name, (shape, dtype) in _layout(n, c, b, a).items():
            value = getattr(self, name)
            array = np.asarray(defaults[name]() if value is None else value)
            if array.shape != shape:
                raise CalibError(f"{name} must have the shape {shape}, got {array.shape}")
            array = np.array(array, dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "arms", tuple(self.arms))
        self._check()

    def _check(self) -> None:
        if len(set(self.arms)) != len(self.arms):
            raise CalibError(f"arms must differ: {list(self.arms)}")
        if self.budgets.size and (self.budgets[0] < 0 or (np.diff(self.budgets) <= 0).any()):
            raise CalibError(f"budgets must ascend from 0 or more, got {self.budgets.tolist()}")
        self._refuse("n_options", (self.n_options < 2) | (self.n_options > self.p1.shape[1]), "2 to the columns of p1")
        self._refuse("answer", (self.answer < 0) | (self.answer >= self.n_options), "an index of one of the options")
        self._refuse("weight", ~(np.isfinite(self.weight) & (self.weight > 0)), "finite and positive")
        padded = ~self.option_mask
        bad = ~np.isfinite(self.p1).all(1) | (self.p1 < 0).any(1) | (np.abs(self.p1.sum(1) - 1) > _SUM_TOLERANCE)
        self._refuse("p1", bad, "finite, non-negative, and with the sum 1")
        self._refuse("p1", (self.p1 * padded).any(1), "0 at padded options")
        if self.budgets.size:
            p2 = np.where(self.failed[..., None], self.p1[:, None], self.p2)
            bad = ~np.isfinite(p2).all(2) | (p2 < 0).any(2) | (np.abs(p2.sum(2) - 1) > _SUM_TOLERANCE)
            bad |= (p2 * padded[:, None]).any(2)
            self._refuse("p2", bad.any(1), "a distribution over the options, or NaN in the whole row")
            self._refuse("tokens", ~(self.tokens >= 0).all(1), "0 or more")
        self._refuse("t1", (self.t1 < 0).any(0), "0 or more seconds, or NaN where unknown")
        self._refuse("t2", (self.t2 < 0).any((0, 2)), "0 or more seconds, or NaN where unknown")

    def _refuse(self, name: str, bad: Any, expected: str) -> None:
        if bad.any():
            i = int(np.argmax(bad))
            raise CalibError(
                f"{name} of question {self.ids[i]!r} in {self.dataset[i]!r} must be {expected}; "
                f"{int(bad.sum())} of {bad.size} questions are not"
            )

    @property
    def n(self) -> int:
        """Number of questions."""
        return len(self.p1)

    @cached_property
    def option_mask(self) -> NDArray[np.bool_]:
        """True where an option exists, shape (N, C)."""
        return np.asarray(np.arange(self.p1.shape[1]) < self.n_options[:, None])

    @cached_property
    def failed(self) -> NDArray[np.bool_]:
        """True where System 2 was asked and gave no usable answer, shape (N, B)."""
        return np.asarray(np.isnan(self.p2).all(axis=2))

    @cached_property
    def dataset_names(self) -> tuple[str, ...]:
        """Names of the datasets, sorted."""
        return tuple(sorted(set(self.dataset.tolist())))

    @cached_property
    def dataset_codes(self) -> NDArray[np.int64]:
        """Index into `dataset_names` of each question, shape (N,)."""
        code = {name: i for i, name in enumerate(self.dataset_names)}
        return np.array([code[name] for name in self.dataset.tolist()], dtype=np.int64)

    @cached_property
    def group_codes(self) -> NDArray[np.int64]:
        """Number of the group of each question, in order of first appearance, shape (N,)."""
        code: dict[str, int] = {}
        return np.array([code.setdefault(name, len(code)) for name in self.group.tolist()], dtype=np.int64)

    @property
    def unweighted(self) -> bool:
        """Whether each question counts the same (exact binomial tests need it)."""
        return bool((self.weight == self.weight[0]).all())

    def arm_index(self, arm: str) -> int:
        """Position of an arm; a `CalibError` says which were collected."""
        if arm not in self.arms:
            raise CalibError(
                f"arm {arm!r} was not collected; there are {', '.join(self.arms)}. "
                f"Choose one of these, or run: calib collect QUESTIONS --arm {arm}=URL"
            )
        return self.arms.index(arm)

    def budget_index(self, think_budget: int) -> int:
        """Position of a think budget; a `CalibError` says which were collected."""
        found = np.flatnonzero(self.budgets == think_budget)
        if not found.size:
            raise CalibError(
                f"think_budget {think_budget} was not collected; there are {self.budgets.tolist()}. "
                f"Choose one of these, or run: calib collect QUESTIONS --budgets {think_budget}"
            )
        return int(found[0])

    def take(self, which: NDArray[Any] | Sequence[int]) -> Outcomes:
        """The questions at these positions, or where the mask is true; no check is repeated."""
        where = np.asarray(which)
        if where.dtype == bool:
            where = np.flatnonzero(where)
        if not where.size:
            raise CalibError("no question is left: widen the selection of datasets or the split")
        taken = object.__new__(Outcomes)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _QUESTION_AXIS:
                value = np.take(value, where, axis=_QUESTION_AXIS[f.name])
                value.setflags(write=False)
            object.__setattr__(taken, f.name, value)
        return taken

    def select(self, datasets: Sequence[str]) -> Outcomes:
        """The questions of these datasets."""
        unknown = sorted(set(datasets) - set(self.dataset_names))
        if unknown:
            raise CalibError(f"unknown dataset {unknown[0]!r}; there are: {', '.join(self.dataset_names)}")
        return self.take(np.isin(self.dataset.astype(str), list(datasets)))

    def reweighted(self, traffic: dict[str, float]) -> Outcomes:
        """Weights such that each dataset has its share of the traffic; a dataset that is not named gets none.

        Parameters
        ----------
        traffic : dict of str to float
            Relative traffic by dataset, for instance ``{"gsm8k": 3, "bbh": 1}``. Within a dataset the questions keep
            their own weights relative to each other. The weights sum to the number of questions that are left.
        """
        for name, share in traffic.items():
            if not (np.isfinite(share) and share >= 0):
                raise CalibError(f"traffic of {name!r} must be 0 or more, got {share}")
        named = [name for name, share in traffic.items() if share > 0]
        if not named:
            raise CalibError("traffic must give at least one dataset a share above 0, for instance: --traffic gsm8k=3")
        unknown = sorted(set(traffic) - set(self.dataset_names))
        if unknown:
            raise CalibError(
                f"traffic names the unknown dataset {unknown[0]!r}; there are: {', '.join(self.dataset_names)}"
            )
        kept = self.select(named)
        total = np.bincount(kept.dataset_codes, kept.weight)
        shares = np.array([traffic[name] for name in kept.dataset_names])
        weight = kept.weight * (shares / total)[kept.dataset_codes]
        return replace(kept, weight=weight * kept.n / weight.sum())

    def test_mask(self, test_share: float) -> NDArray[np.bool_]:
        """True for test questions, shape (N,): the same side for ever, whatever is added later."""
        if not 0 <= test_share < 1:
            raise CalibError(f"--test-share must be from 0 to below 1, got {test_share}")
        return self.split_position < test_share

    def split(self, test_share: float) -> tuple[Outcomes, Outcomes | None]:
        """Tune and test questions; no test questions at share 0.

        Raises
        ------
        CalibError
            When one side would be empty.
        """
        test = self.test_mask(test_share)
        if test_share == 0:
            return self, None
        if test.all() or not test.any():
            raise CalibError(
                f"--test-share {test_share:g} puts {int(test.sum())} of {self.n} questions on the test side: "
                "too few to split. Collect more questions, or use --test-share 0 to tune on all (met at best)"
            )
        return self.take(~test), self.take(test)

    def marks_of(self, arm: str, think_budget: int | None) -> tuple[str, ...]:
        """Marks that follow every number at this arm and budget, None for System 1 alone: `ESTIMATED`, `SIMULATED`."""
        seconds = self.estimated[self.arm_index(arm)]
        estimated = bool(seconds[0] or (think_budget is not None and seconds[1 + self.budget_index(think_budget)]))
        return (ESTIMATED,) * estimated + (SIMULATED,) * self.simulated

    def has_latency(self, arm: str) -> bool:
        """Whether the seconds of every question are known for this arm."""
        a = self.arm_index(arm)
        return not (np.isnan(self.t1[a]).any() or np.isnan(self.t2[a][self.can_think]).any())


def _layout(n: int, c: int, b: int, a: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and type of each array, in the order in which the defaults can be made."""
    return {
        "p1": ((n, c), np.float64),
        "budgets": ((b,), np.int64),
        "p2": ((n, b, c), np.float64),
        "tokens": ((n, b), np.float64),
        "finished": ((n, b), np.bool_),
        "t1": ((a, n), np.float64),
        "t2": ((a, n, b), np.float64),
        "answer": ((n,), np.int64),
        "n_options": ((n,), np.int64),
        "dataset": ((n,), np.object_),
        "kind": ((n,), np.object_),
        "ids": ((n,), np.object_),
        "group": ((n,), np.object_),
        "can_think": ((n,), np.bool_),
        "weight": ((n,), np.float64),
        "label_mass": ((n, 1 + b), np.float64),
        "flaw": ((n,), np.object_),
        "label_set": ((n,), np.int64),
        "split_position": ((n,), np.float64),
        "concurrency": ((a,), np.int64),
        "estimated": ((a, 1 + b), np.bool_),
    }


_QUESTION_AXIS = {
    **dict.fromkeys(
        ("p1", "p2", "tokens", "finished", "answer", "n_options", "dataset", "kind", "ids", "group", "can_think"), 0
    ),
    **dict.fromkeys(("weight", "label_mass", "flaw", "label_set", "split_position"), 0),
    "t1": 1,
    "t2": 1,
}

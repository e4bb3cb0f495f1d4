"""Fits what makes probabilities mean something: temperatures of both systems, the pool, a temperature after the mix.

A linear mix of two calibrated forecasts is not calibrated (it lacks confidence), so each stage has a step of its own.
Each step is kept only when cross-validation, whole groups in a fold, gains beyond noise in NLL and in Brier score; the
figures of every step are recorded either way. Nothing here looks at test questions: give it the tune side of a split.

Leaves to others: what a temperature does to a distribution (`calib.temperature`), the rule that is calibrated
(`calib.policy`), how well calibrated the result is (`calib.stages`).

References
----------
Guo et al. (2017), On calibration of modern neural networks.
Gneiting, Ranjan (2013), Combining predictive distributions: a linear pool of calibrated forecasts is uncalibrated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from calib import metrics
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import POOLS, Policy, pooled
from calib.temperature import ANY, HIGHEST, LOWEST, Temperatures, cell, retempered

__all__ = [
    "CELL_ROWS",
    "FOLDS",
    "LEAST_GROUPS",
    "START_ROWS",
    "Calibration",
    "Cell",
    "Step",
    "apply",
    "finish",
    "fit",
    "fit_temperature",
    "folds_of",
    "refit",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

START_ROWS = 20.0
"""The pooled fit starts as if that many more questions had found the forecast right as it stands: without it a system
that was always right would become one-hot, and infinitely wrong on the first question that it misses."""

CELL_ROWS = 200.0
"""A kind and band of n questions keeps n / (n + 200) of its own temperature: above 200 it outweighs the pooled one."""

LEAST_GROUPS = 50
"""With fewer groups a step is not tried: noise is not known well enough to tell a gain from it."""

FOLDS = 5
_MOST_UNIFORM = 0.5
_SAME_MIX = 1e-6

STEPS = {
    "p1": "System 1",
    "p2": "System 2, finished thoughts",
    "cut": "System 2, cut thoughts",
    "final": "after the mix",
}


@dataclass(frozen=True)
class Step:
    """One step that was tried, with its cross-validated gain over doing without.

    Attributes
    ----------
    stage : str
        ``p1``, ``p2``, ``cut``, ``pool`` or ``final``.
    name : str
        What was tried.
    kept : bool
    n : int
        Questions that it was judged on.
    nll, brier : tuple of float
        Out of fold: without the step, with it, and the one-sided lower bound of the gain. NaN where it was not tried.
    note : str
        Why it was not tried, or nothing.
    """

    stage: str
    name: str
    kept: bool
    n: int
    nll: tuple[float, float, float]
    brier: tuple[float, float, float]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not known."""
        return {
            "stage": self.stage,
            "name": self.name,
            "kept": self.kept,
            "n": self.n,
            **{name: _plain_scores(getattr(self, name)) for name in ("nll", "brier")},
            "note": self.note,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """The step of `to_dict`."""
        scores = {name: _scores_of(values[name]) for name in ("nll", "brier")}
        return cls(values["stage"], values["name"], values["kept"], values["n"], **scores, note=values["note"])


_SCORES = ("without", "with", "gain_at_least")


def _plain_scores(values: tuple[float, float, float]) -> dict[str, float | None]:
    return {name: v if math.isfinite(v) else None for name, v in zip(_SCORES, values, strict=True)}


def _scores_of(values: Mapping[str, float | None]) -> tuple[float, float, float]:
    without, with_, least = (math.nan if values[name] is None else float(values[name] or 0.0) for name in _SCORES)
    return without, with_, least


@dataclass(frozen=True)
class Cell:
    """Temperature of one kind and band, and how far it is its own.

    Attributes
    ----------
    stage, key : str
    rows : float
        Questions in it.
    temperature : float
        After shrinking.
    own : float
        Share of it that its own questions say, 0 to 1: rows / (rows + `CELL_ROWS`).
    """

    stage: str
    key: str
    rows: float
    temperature: float
    own: float


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and why.

    Attributes
    ----------
    temperatures : Temperatures
        Of the steps that were kept.
    pool : {"linear", "log_odds"}
    steps : tuple of Step
        Everything that was tried, in order.
    cells : tuple of Cell
    n : int
        Tune questions.
    level : float
        Of the one-sided bounds that decide what is kept.
    final_mix : float or None
        The mix that the step after the mix was fitted for; it means nothing at another.
    """

    temperatures: Temperatures
    pool: str
    steps: tuple[Step, ...]
    cells: tuple[Cell, ...]
    n: int
    level: float
    final_mix: float | None = None

    @property
    def nothing(self) -> bool:
        """Whether no step was kept: policies then mean what they did."""
        return self.temperatures.nothing and self.pool == "linear"

    @property
    def kept(self) -> tuple[Step, ...]:
        """The steps that were kept."""
        return tuple(step for step in self.steps if step.kept)

    def policy(self, policy: Policy) -> Policy:
        """The policy with temperatures and pool, to be used on probabilities as the systems give them.

        A step after the mix goes along only at the mix that it was fitted for (see `finish`).
        """
        fitted = self.temperatures
        if self.final_mix is None or abs(policy.mix - self.final_mix) > _SAME_MIX:
            fitted = fitted.only("p1", "p2", "cut")
        return replace(policy, temperatures=None if fitted.nothing else fitted, pool=self.pool)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "temperatures": self.temperatures.to_dict(),
            "pool": self.pool,
            "steps": [step.to_dict() for step in self.steps],
            "cells": [asdict(one) for one in self.cells],
            "n": self.n,
            "level": self.level,
            "final_mix": self.final_mix,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """The calibration of `to_dict`.

        Raises
        ------
        CalibError
            When a field is missing, or a temperature out of range.
        """
        try:
            return cls(
                Temperatures.read(values["temperatures"]),
                values["pool"],
                tuple(Step.from_dict(step) for step in values["steps"]),
                tuple(Cell(**one) for one in values["cells"]),
                values["n"],
                values["level"],
                values["final_mix"],
            )
        except (KeyError, TypeError) as error:
            raise CalibError(f"not a calibration ({error}); write one with: calib calibrate --json") from None


def apply(outcomes: Outcomes, calibration: Calibration | Temperatures) -> Outcomes:
    """The same questions with calibrated p1 and p2.

    A plain policy decides them as the policy with these temperatures decides the questions as they were, so the exact
    optimum on them is exact. The step after the mix is not in them: it acts on answers, and changes none.
    """
    t = calibration.temperatures if isinstance(calibration, Calibration) else calibration
    if t.only("p1", "p2", "cut").nothing:
        return outcomes
    kind, k = outcomes.kind, outcomes.n_options
    p2 = t.system2(outcomes.p2, outcomes.finished, kind, k) if outcomes.budgets.size else outcomes.p2
    return replace(outcomes, p1=t.at("p1", outcomes.p1, kind, k), p2=p2)


# --- one temperature --------------------------------------------------------------------------------------------------


def fit_temperature(
    p: ArrayLike,
    answer: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    start: float = 1.0,
    rows: float = 0.0,
    uniform: float = 0.0,
    n_options: ArrayLike | None = None,
) -> float:
    """The temperature with the least NLL (p clipped at 1e-12, as `calib.metrics.nll`).

    With ``rows`` 0 it is the temperature scaling of scikit-learn; that one has no ragged options, no share of the
    uniform distribution, no start, and lifts a stored 0.

    Parameters
    ----------
    p : array_like of shape (N, C)
        Distributions; padded options hold 0.
    answer : array_like of int, shape (N,)
    weight : array_like of shape (N,), optional
        Its sum is the number of questions that the start is weighed against.
    start : float, default 1
        Temperature that is found without questions.
    rows : float, default 0
        How many questions the start counts for: that many that are right as often as it says.
    uniform : float, default 0
        Share of the uniform distribution that is added afterwards.
    n_options : array_like of int, shape (N,), optional

    Returns
    -------
    float
        From 0.05 to 100.
    """
    loss = _Loss(np.asarray(p, dtype=np.float64), np.asarray(answer), weight, n_options)
    return loss.best_temperature(start, rows, uniform)


class _Loss:
    """NLL of one set of forecasts at any temperature and share of the uniform distribution."""

    def __init__(self, p: Floats, answer: Ints, weight: ArrayLike | None, n_options: ArrayLike | None) -> None:
        self.p, self.answer = p, answer
        self.weight = np.ones(len(p)) if weight is None else np.asarray(weight, dtype=np.float64)
        self.n_options = np.full(len(p), p.shape[1]) if n_options is None else np.asarray(n_options)
        self.total = float(self.weight.sum())

    def forecast(self, temperature: float, uniform: float) -> Floats:
        return retempered(self.p, temperature, uniform, self.n_options)

    def _value(self, temperature: float, uniform: float, prior: Floats, rows: float) -> float:
        q = np.maximum(self.forecast(temperature, uniform), metrics.NLL_CLIP)
        right = np.take_along_axis(q, self.answer[:, None], 1)[:, 0]
        value = -float(self.weight @ np.log(right))
        if rows:
            value -= rows / self.total * float(self.weight @ (prior * np.log(q)).sum(axis=1))
        return value / (self.total + rows)

    def best_temperature(self, start: float, rows: float, uniform: float) -> float:
        prior = self.forecast(start, uniform)
        found = optimize.minimize_scalar(
            lambda log_t: self._value(math.exp(log_t), uniform, prior, rows),
            bounds=(math.log(LOWEST), math.log(HIGHEST)),
            method="bounded",
            options={"xatol": 1e-9},
        )
        return float(np.clip(math.exp(found.x), LOWEST, HIGHEST))

    def best_pair(self, start: float, rows: float) -> tuple[float, float]:
        """Temperature and share of the uniform distribution; the start has no share."""
        prior = self.forecast(start, 0.0)
        found = optimize.minimize(
            lambda x: self._value(math.exp(x[0]), float(x[1]), prior, rows),
            x0=[math.log(start), 0.02],
            bounds=[(math.log(LOWEST), math.log(HIGHEST)), (0.0, _MOST_UNIFORM)],
            method="L-BFGS-B",
        )
        return float(np.clip(math.exp(found.x[0]), LOWEST, HIGHEST)), float(found.x[1])


# --- one stage --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """Forecasts of one stage: M rows of N questions (a question may have several cut thoughts, which share its weight).

    Attributes
    ----------
    p : ndarray of shape (M, C)
    question : ndarray of int, shape (M,)
    weight : ndarray of shape (M,)
        Scaled such that the rows count as many questions as they come from.
    """

    p: Floats
    question: Ints
    weight: Floats
    answer: Ints
    n_options: Ints
    kind: NDArray[np.object_]

    @classmethod
    def of(cls, o: Outcomes, p: Floats, question: Ints) -> _Rows:
        """Rows of these questions."""
        times = np.bincount(question, minlength=o.n)
        weight = o.weight[question] / times[question]
        questions = int((times > 0).sum())
        scale = questions / weight.sum() if questions else 1.0
        return cls(p, question, weight * scale, o.answer[question], o.n_options[question], o.kind[question])

    @cached_property
    def cells(self) -> NDArray[np.object_]:
        """Key of each row's kind and band, shape (M,)."""
        pairs = list(zip(self.kind.tolist(), self.n_options.tolist(), strict=True))
        name = {pair: cell(*pair) for pair in set(pairs)}
        return np.array([name[pair] for pair in pairs], dtype=object)

    def take(self, where: Mask) -> _Rows:
        """Some of the rows."""
        return _Rows(
            self.p[where],
            self.question[where],
            self.weight[where],
            self.answer[where],
            self.n_options[where],
            self.kind[where],
        )


@dataclass(frozen=True)
class _Form:
    """Which steps of a stage are taken."""

    temperature: bool = False
    by_kind: bool = False
    by_number: bool = False
    uniform: bool = False


def _fit_stage(rows: _Rows, form: _Form, stage: str) -> tuple[Temperatures, tuple[Cell, ...]]:
    """Temperatures of one stage in a form; nothing without rows."""
    if not form.temperature or not len(rows.p):
        return Temperatures(), ()
    loss = _Loss(rows.p, rows.answer, rows.weight, rows.n_options)
    share = 0.0
    if form.uniform:
        t, share = loss.best_pair(1.0, START_ROWS)
    else:
        t = loss.best_temperature(1.0, START_ROWS, 0.0)
    table, cells = {ANY: t}, [Cell(stage, ANY, loss.total, t, 1.0)]

    def shrunk(keys: NDArray[np.object_], wider: Callable[[str], str]) -> None:
        for key in sorted(set(keys.tolist())):
            here = rows.take(keys == key)
            inside = _Loss(here.p, here.answer, here.weight, here.n_options)
            table[key] = inside.best_temperature(table[wider(key)], CELL_ROWS, share)
            cells.append(Cell(stage, key, inside.total, table[key], inside.total / (inside.total + CELL_ROWS)))

    if form.by_kind:
        shrunk(rows.kind, lambda _: ANY)
    if form.by_number:
        shrunk(rows.cells, lambda key: key.partition(":")[0] if form.by_kind else ANY)
    return Temperatures(**{stage: table}, uniform={stage: share} if share > 0 else {}), tuple(cells)


def _form_of(t: Temperatures, stage: str) -> _Form:
    table = getattr(t, stage)
    by_number = any(":" in key for key in table)
    by_kind = any(":" not in key and key != ANY for key in table)
    return _Form(bool(table), by_kind, by_number, stage in t.uniform)


def _pointless(rows: _Rows, form: _Form, trial: _Form) -> str:
    """Why a step cannot change anything here; nothing when it can."""
    kinds, cells = (len(set(keys.tolist())) for keys in (rows.kind, rows.cells))
    if trial.by_kind and not form.by_kind and kinds < 2:
        return "all questions are of one kind"
    if trial.by_number and cells <= (kinds if form.by_kind else 1):
        return "each kind has one band of options"
    return ""


def _merged(parts: Sequence[Temperatures]) -> Temperatures:
    tables = {stage: dict(getattr(t, stage)) for t in parts for stage in STEPS if getattr(t, stage)}
    return Temperatures(**tables, uniform={stage: share for t in parts for stage, share in t.uniform.items()})


# --- cross-validation -------------------------------------------------------------------------------------------------


def folds_of(outcomes: Outcomes, folds: int = FOLDS) -> Ints:
    """Number of the fold of each question, shape (N,): whole groups, the same folds whatever the order of the rows."""
    codes = outcomes.group_codes
    first = np.full(int(codes.max()) + 1, np.inf)
    np.minimum.at(first, codes, outcomes.split_position)
    place = np.empty(first.size, np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(first.size)  # of each group, by its split position
    return np.asarray((place % folds)[codes])


class _Fitter:
    """Tries one step after another on the tune questions."""

    def __init__(self, outcomes: Outcomes, folds: int, level: float) -> None:
        if folds < 2:
            raise CalibError(f"cross-validation needs 2 folds or more, got {folds}")
        self.o, self.level, self.folds = outcomes, level, folds
        self.groups = int(outcomes.group_codes.max()) + 1
        self.fold = folds_of(outcomes, folds)
        self.steps: list[Step] = []

    def rows(self, stage: str) -> _Rows:
        """Forecasts of System 1, of finished thoughts (one of each question), or of cut ones (each budget)."""
        o = self.o
        if stage == "p1":
            return _Rows.of(o, o.p1, np.arange(o.n))
        usable = o.can_think[:, None] & ~o.failed
        if stage == "cut":
            question, b = np.nonzero(usable & ~o.finished)
            return _Rows.of(o, o.p2[question, b], question)
        done = usable & o.finished
        question = np.flatnonzero(done.any(axis=1)) if done.size else np.empty(0, np.int64)
        largest = done.shape[1] - 1 - np.argmax(done[question, ::-1], axis=1) if question.size else question
        return _Rows.of(o, o.p2[question, largest], question)

    def stage(self, stage: str, rows: _Rows | None = None) -> tuple[Temperatures, tuple[Cell, ...]]:
        """Try the steps of one stage; what was kept, fitted on all rows."""
        rows = self.rows(stage) if rows is None else rows
        form = _Form()
        for name, richer in self._richer(rows, stage):
            trial = richer(form)
            label = f"{STEPS[stage]}: {name}"
            reason = _pointless(rows, form, trial)
            if reason:
                self._untried(stage, label, rows, reason)
            elif self._judge(stage, label, rows.question, rows, self._out_of_fold(rows, form, trial, stage)):
                form = trial
        return _fit_stage(rows, form, stage)

    @staticmethod
    def _richer(rows: _Rows, stage: str) -> Iterator[tuple[str, Callable[[_Form], _Form]]]:
        if not len(rows.p):
            return
        yield "one temperature", lambda form: replace(form, temperature=True)
        if stage != "final":
            yield "a share of the uniform distribution", lambda form: replace(form, temperature=True, uniform=True)
        yield "temperature by kind", lambda form: replace(form, temperature=True, by_kind=True)
        yield "temperature by number of options", lambda form: replace(form, temperature=True, by_number=True)

    def _out_of_fold(self, rows: _Rows, form: _Form, trial: _Form, stage: str) -> Callable[[], tuple[Floats, Floats]]:
        def forecasts() -> tuple[Floats, Floats]:
            both = np.empty_like(rows.p), np.empty_like(rows.p)
            fold = self.fold[rows.question]
            for f in range(self.folds):
                seen, held = rows.take(fold != f), rows.take(fold == f)
                for q, taken in zip(both, (form, trial), strict=True):
                    t, _ = _fit_stage(seen, taken, stage)
                    q[fold == f] = t.at(stage, held.p, held.kind, held.n_options)
            return both

        return forecasts

    def _judge(
        self,
        stage: str,
        name: str,
        question: Ints,
        rows: _Rows,
        forecasts: Callable[[], tuple[Floats, Floats]],
    ) -> bool:
        """Enter the step; whether it is kept."""
        groups = len(set(self.o.group_codes[question].tolist()))
        if groups < LEAST_GROUPS:
            self._untried(stage, name, rows, f"{groups} groups; from {LEAST_GROUPS} on it is tried")
            return False
        without, with_ = forecasts()
        nll, brier = (self._gain(score, rows, without, with_) for score in (_nll, _brier))
        kept = nll[2] > 0 and brier[2] > 0
        self.steps.append(Step(stage, name, kept, len(set(question.tolist())), nll, brier))
        return kept

    def _untried(self, stage: str, name: str, rows: _Rows, note: str) -> None:
        nan = (math.nan,) * 3
        self.steps.append(Step(stage, name, False, len(set(rows.question.tolist())), nan, nan, note))

    def _gain(
        self, score: Callable[[Floats, Ints], Floats], rows: _Rows, without: Floats, with_: Floats
    ) -> tuple[float, float, float]:
        """Mean score of both and the lower bound of the gain; its error from the sums over groups."""
        before, after = score(without, rows.answer), score(with_, rows.answer)
        codes = self.o.group_codes[rows.question]
        gain = np.bincount(codes, rows.weight * (before - after), self.groups)
        weight = np.bincount(codes, rows.weight, self.groups)
        total = float(weight.sum())
        mean = float(gain.sum()) / total
        groups = int((weight > 0).sum())
        error = math.sqrt(float(((gain - mean * weight) ** 2).sum()) * groups / (groups - 1)) / total
        least = mean - float(stats.t.ppf(self.level, groups - 1)) * error
        return metrics.mean(before, rows.weight), metrics.mean(after, rows.weight), least

    # --- both systems together ---

    def in_folds(self, fitted: Temperatures) -> list[Temperatures]:
        """The same steps of both systems, fitted without each fold in turn."""
        stages = [stage for stage in ("p1", "p2", "cut") if fitted.changes(stage)]
        rows = {stage: self.rows(stage) for stage in stages}
        return [
            _merged(
                [_fit_stage(rows[s].take(self.fold[rows[s].question] != f), _form_of(fitted, s), s)[0] for s in stages]
            )
            for f in range(self.folds)
        ]

    def pool(self, fitted: Temperatures, think_budget: int) -> str:
        """Which pool: the log-odds one only when it gains, each at the mix with the least NLL."""
        o, b = self.o, self.o.budget_index(think_budget)
        question = np.flatnonzero(o.can_think & ~o.failed[:, b])
        rows = _Rows.of(o, o.p1[question], question)
        fold = self.fold[question]

        def forecasts() -> tuple[Floats, Floats]:
            both = np.empty_like(rows.p), np.empty_like(rows.p)
            for f, t in enumerate(self.in_folds(fitted)):
                p1, p2 = self._systems(t, question, b)
                seen, held = fold != f, fold == f
                for q, pool in zip(both, POOLS, strict=True):
                    mix = _best_mix(p1[seen], p2[seen], rows.take(seen), pool)
                    q[held] = pooled(p1[held], p2[held], mix, pool, rows.n_options[held])
            return both

        kept = self._judge("pool", f"log-odds pool at budget {think_budget}", question, rows, forecasts)
        return "log_odds" if kept else "linear"

    def _systems(self, t: Temperatures, question: Ints, b: int) -> tuple[Floats, Floats]:
        o = self.o
        kind, k = o.kind[question], o.n_options[question]
        return t.at("p1", o.p1[question], kind, k), t.system2(o.p2[question, b], o.finished[question, b], kind, k)

    def after_mix(self, fitted: Temperatures, policy: Policy) -> tuple[Temperatures, tuple[Cell, ...]]:
        """Try the steps after the mix, on the questions that the policy thinks about."""
        o, b = self.o, self.o.budget_index(policy.think_budget)

        def mixed(t: Temperatures) -> _Rows:
            plain = replace(policy, temperatures=None if t.nothing else t, routes={})
            thinks = plain.thinks(o.p1, kind=o.kind, n_options=o.n_options) & o.can_think & ~o.failed[:, b]
            question = np.flatnonzero(thinks)
            p1, p2 = self._systems(t, question, b)
            return _Rows.of(o, pooled(p1, p2, policy.mix, policy.pool, o.n_options[question]), question)

        rows = mixed(fitted)
        if not len(rows.p):
            return Temperatures(), ()
        # the mix of each fold with what the other folds say of both systems
        within = [mixed(t) for t in self.in_folds(fitted)]
        held = [one.take(self.fold[one.question] == f) for f, one in enumerate(within)]
        seen = [one.take(self.fold[one.question] != f) for f, one in enumerate(within)]
        question = np.concatenate([one.question for one in held])
        unseen = _Rows.of(o, np.concatenate([one.p for one in held]), question)

        form = _Form()
        for name, richer in self._richer(rows, "final"):
            trial, label = richer(form), f"{STEPS['final']}: {name}"

            def forecasts(form: _Form = form, trial: _Form = trial) -> tuple[Floats, Floats]:
                found = []
                for taken in (form, trial):
                    fits = [_fit_stage(one, taken, "final")[0] for one in seen]
                    parts = zip(fits, held, strict=True)
                    found.append(np.concatenate([t.at("final", one.p, one.kind, one.n_options) for t, one in parts]))
                return found[0], found[1]

            reason = _pointless(rows, form, trial)
            if reason:
                self._untried("final", label, rows, reason)
            elif self._judge("final", label, question, unseen, forecasts):
                form = trial
        return _fit_stage(rows, form, "final")


def _nll(p: Floats, answer: Ints) -> Floats:
    return -np.log(np.maximum(np.take_along_axis(p, answer[:, None], 1)[:, 0], metrics.NLL_CLIP))


def _brier(p: Floats, answer: Ints) -> Floats:
    right = np.take_along_axis(p, answer[:, None], 1)[:, 0]
    return np.asarray((p * p).sum(axis=1) - 2 * right + 1)


def _best_mix(p1: Floats, p2: Floats, rows: _Rows, pool: str) -> float:
    """The mix with the least NLL."""

    def value(mix: float) -> float:
        return metrics.mean(_nll(pooled(p1, p2, mix, pool, rows.n_options), rows.answer), rows.weight)

    found = optimize.minimize_scalar(value, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-4})
    return float(found.x)


def fit(outcomes: Outcomes, *, policy: Policy | None = None, folds: int = FOLDS, level: float = 0.95) -> Calibration:
    """Fit every step that gains beyond noise.

    Parameters
    ----------
    outcomes : Outcomes
        Tune questions, with the probabilities as the systems gave them.
    policy : Policy, optional
        Gives threshold, mix and budget of the step after the mix; its threshold means the calibrated confidence. That
        step is not tried when left out.
    folds : int, default 5
        Of the cross-validation, whole groups in each.
    level : float, default 0.95
        A step is kept when the one-sided lower bounds of its gain in NLL and in Brier score are above 0.

    Returns
    -------
    Calibration
        Temperatures of the steps that were kept, fitted on all of the questions.
    """
    fitted = _both_systems(outcomes, None if policy is None else policy.think_budget, folds, level)
    return fitted if policy is None else finish(outcomes, fitted, policy, folds=folds)


def _both_systems(outcomes: Outcomes, think_budget: int | None, folds: int, level: float) -> Calibration:
    fitter = _Fitter(outcomes, folds, level)
    parts, cells, pool = [], list[Cell](), "linear"
    for stage in ("p1", "p2", "cut") if outcomes.budgets.size else ("p1",):
        fitted, of_stage = fitter.stage(stage)
        parts.append(fitted)
        cells.extend(of_stage)
    temperatures = _merged(parts)
    if outcomes.budgets.size:
        pool = fitter.pool(temperatures, think_budget or int(outcomes.budgets[-1]))
    return Calibration(temperatures, pool, tuple(fitter.steps), tuple(cells), outcomes.n, level)


def refit(outcomes: Outcomes, temperatures: Temperatures) -> Temperatures:
    """The same steps of both systems, fitted on other questions, whether they gain there or not.

    Parameters
    ----------
    outcomes : Outcomes
    temperatures : Temperatures
        Says which steps; a step after the mix is left out.
    """
    fitter = _Fitter(outcomes, FOLDS, math.nan)
    stages = [stage for stage in ("p1", "p2", "cut") if temperatures.changes(stage)]
    return _merged([_fit_stage(fitter.rows(stage), _form_of(temperatures, stage), stage)[0] for stage in stages])


def finish(outcomes: Outcomes, calibration: Calibration, policy: Policy, *, folds: int = FOLDS) -> Calibration:
    """Fit the step after the mix anew, for another policy on the same tune questions.

    Parameters
    ----------
    outcomes : Outcomes
        The tune questions as the systems answered them.
    calibration : Calibration
        Of both systems; a step after the mix that it has is replaced.
    policy : Policy
        Threshold, mix, budget and confidence; temperatures and pool are those of the calibration.
    folds : int, default 5
    """
    fitter = _Fitter(outcomes, folds, calibration.level)
    both = calibration.temperatures.only("p1", "p2", "cut")
    final, cells = fitter.after_mix(both, replace(policy, pool=calibration.pool))
    return replace(
        calibration,
        temperatures=_merged([both, final]),
        steps=(*(step for step in calibration.steps if step.stage != "final"), *fitter.steps),
        cells=(*(one for one in calibration.cells if one.stage != "final"), *cells),
        final_mix=policy.mix if final.changes("final") else None,
    )

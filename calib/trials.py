"""Optuna studies as the dashboard shows them: trials in columns, what mattered, margins of each target.

Only reads. Leaves to others: running a study (`calib.study`), where it is kept (`calib.studystore`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calib.policy import Policy
from calib.studystore import default_storage, opened

if TYPE_CHECKING:
    from optuna.study import Study

__all__ = ["StudyName", "Trials", "importance", "names", "read_trials"]

_MARGIN = "margin "


@dataclass(frozen=True)
class StudyName:
    """A study in the storage and how many trials it has."""

    name: str
    trials: int


@dataclass(frozen=True, eq=False)
class Trials:
    """Completed trials of a study that calib made, in order.

    Attributes
    ----------
    name, metric : str
        Metric: the first objective.
    maximize : bool
    targets : tuple of str
    values : ndarray of shape (T,)
        First objective.
    feasible : ndarray of bool, shape (T,)
        Whether all targets are met.
    params : mapping of str to list
        What was suggested; None where a trial had no such parameter.
    metrics : mapping of str to ndarray of shape (T,)
        Figures of each trial, NaN where unknown.
    margins : mapping of str to ndarray of shape (T,)
        By target: distance to the limit in its unit, below 0 where it is broken.
    policies : tuple of Policy
    """

    name: str
    metric: str
    maximize: bool
    targets: tuple[str, ...]
    values: NDArray[np.float64]
    feasible: NDArray[np.bool_]
    params: Mapping[str, list[Any]]
    metrics: Mapping[str, NDArray[np.float64]]
    margins: Mapping[str, NDArray[np.float64]]
    policies: tuple[Policy, ...]

    @property
    def order(self) -> NDArray[np.int64]:
        """Positions of the trials, best first: feasible before infeasible, then by the objective."""
        value = self.values if self.maximize else -self.values
        return np.lexsort((np.arange(len(value)), -np.nan_to_num(value, nan=-np.inf), ~self.feasible))

    @property
    def best(self) -> int | None:
        """Position of the best feasible trial."""
        order = self.order
        return int(order[0]) if order.size and self.feasible[order[0]] else None


def _absent(storage: str) -> bool:
    """Whether opening would make a new file: reading must not."""
    return storage.startswith("sqlite:///") and not Path(storage.removeprefix("sqlite:///")).is_file()


def names(store: str | os.PathLike[str]) -> tuple[StudyName, ...]:
    """Studies that belong to a store, the newest first.

    Raises
    ------
    CalibError
        When the storage cannot be read.
    """
    storage = default_storage(store)
    if _absent(storage):
        return ()
    import optuna

    with opened(storage) as kept:
        found = optuna.get_all_study_summaries(kept, include_best_trial=False)
    found.sort(key=lambda one: (one.datetime_start is not None, one.datetime_start, one.study_name), reverse=True)
    return tuple(StudyName(one.study_name, one.n_trials) for one in found)


def read_trials(store: str | os.PathLike[str], name: str) -> Trials:
    """Trials of one study.

    Raises
    ------
    CalibError
        When the storage cannot be read.
    """
    with opened(default_storage(store)) as kept:
        study = _loaded(kept, name)
        done = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE" and "policy" in t.user_attrs]
        question = study.user_attrs.get("question") or {}
        limits = set(question.get("targets") or ())
        metric = (study.metric_names or ["objective"])[0]
        maximize = study.directions[0].name == "MAXIMIZE"
    keys = sorted({key for trial in done for key in trial.user_attrs})
    numeric = [key for key in keys if any(isinstance(trial.user_attrs.get(key), (int, float)) for trial in done)]

    def column(key: str) -> NDArray[np.float64]:
        values = [trial.user_attrs.get(key) for trial in done]
        return np.array([math.nan if not isinstance(value, (int, float)) else value for value in values], dtype=float)

    params = sorted({key for trial in done for key in trial.params})
    return Trials(
        name,
        metric,
        maximize,
        tuple(question.get("targets") or ()),
        np.array([trial.values[0] for trial in done], dtype=float),
        np.array([all(v <= 0 for k, v in trial.constraints.items() if k in limits) for trial in done], dtype=bool),
        {key: [trial.params.get(key) for trial in done] for key in params},
        {key: column(key) for key in numeric if not key.startswith(_MARGIN)},
        {key.removeprefix(_MARGIN): column(key) for key in keys if key.startswith(_MARGIN)},
        tuple(Policy.from_dict(trial.user_attrs["policy"]) for trial in done),
    )


def importance(store: str | os.PathLike[str], name: str) -> dict[str, float]:
    """How much each parameter mattered for the first objective, shares that sum to 1; empty when it cannot be told."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator

    with opened(default_storage(store)) as kept:
        study = _loaded(kept, name)
        many = len(study.directions) > 1
        try:
            found = optuna.importance.get_param_importances(
                study,
                evaluator=PedAnovaImportanceEvaluator(),
                target=(lambda trial: trial.values[0]) if many else None,
            )
        except (ValueError, RuntimeError):  # too few trials, or all alike
            return {}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _loaded(storage: Any, name: str) -> Study:
    import optuna

    return optuna.load_study(study_name=name, storage=storage)

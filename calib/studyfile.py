"""Study files: finding and loading them, what they are given, and errors in them that name file and line.

The protocol that a study file follows is written down in ``studies/__init__.py``. Leaves to `calib.study` the running.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calib import resources
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Cost, Decisions, Policy, candidate_thresholds, confidence
from calib.target import METRICS, Target

if TYPE_CHECKING:
    from optuna.trial import Trial

__all__ = ["Attempt", "Context", "Gate", "StudyFile", "built_in", "load_study"]

BEYOND = 0.05
"""How far shares are drawn beyond 0 and 1."""


@dataclass(frozen=True, eq=False)
class Gate:
    """The thresholds that make a difference, by the share of questions that think.

    Confidences crowd together, often just below 1: drawn evenly, a threshold would mostly change nothing, and a search
    would not find out that it ever does. Evenly in the share, every draw counts.

    Attributes
    ----------
    confidences : ndarray of shape (M,)
        Of the questions that can think, ascending.
    thresholds : ndarray of shape (K,)
        Ascending, never on an observed confidence; the first never thinks, the last always does.
    """

    confidences: NDArray[np.float64]
    thresholds: NDArray[np.float64]

    @classmethod
    def of(cls, outcomes: Outcomes) -> Gate:
        """The thresholds of these questions; only the one that never thinks where none can."""
        seen = np.sort(confidence(outcomes.p1[outcomes.can_think]))
        return cls(seen, candidate_thresholds(seen) if seen.size else np.zeros(1))

    def suggest(self, trial: Trial, name: str, step: float | None) -> float:
        """A share that may think, 0 to 1.

        Drawn a little beyond both ends, since otherwise hardly a draw would be that nobody thinks, or everybody.
        """
        return min(max(trial.suggest_float(name, -BEYOND, 1 + BEYOND, step=step), 0.0), 1.0)

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """Share of the questions that think at each threshold, shape (K,), ascending."""
        return np.searchsorted(self.confidences, self.thresholds) / max(1, self.confidences.size)

    def threshold(self, share: float) -> float:
        """The threshold at which the share that thinks is nearest to this one."""
        return float(self.thresholds[np.argmin(np.abs(self.shares - share))])

    def share(self, threshold: float) -> float:
        """Share of the questions that think at any threshold."""
        return int(np.searchsorted(self.confidences, threshold)) / max(1, self.confidences.size)

    def midway(self, threshold: float) -> float:
        """The threshold that decides the same for every question and lies midway between observed confidences."""
        return self.threshold(self.share(threshold))


@dataclass(frozen=True, eq=False)
class Context:
    """What a study file is given.

    Attributes
    ----------
    outcomes : Outcomes
        The tune questions; a study never sees others.
    targets : tuple of Target
    metric : str
        What the caller wants to maximise or minimise.
    maximize : bool
    arms : tuple of str
    budgets : tuple of int
        Where to look.
    cost : Cost or None
        Prices of the metric ``cost``.
    step : float or None
        Width of the grid for samplers that try every policy; None in a continuous space.
    route_by : str or None
        What routes are to go by: ``dataset``, ``kind`` or ``n_options``; None leaves it to the study file.
    requirements : mapping of Target to float
        Share of questions that may break each of these targets at most, where sampling is to leave a margin below the
        targets; what meets the targets alone is feasible all the same.
    """

    outcomes: Outcomes
    targets: tuple[Target, ...]
    metric: str
    maximize: bool
    arms: tuple[str, ...]
    budgets: tuple[int, ...]
    cost: Cost | None = None
    step: float | None = None
    route_by: str | None = None
    requirements: Mapping[Target, float] = field(default_factory=dict)

    @cached_property
    def gate(self) -> Gate:
        """The thresholds of all questions."""
        return Gate.of(self.outcomes)

    def suggest_policy(self, trial: Trial) -> Policy:
        """One policy for all, over threshold, mix, think_budget and arm: the space of the exact optimum.

        The threshold is drawn by ``think_share``, the share of questions that think (see `Gate`).
        """
        return Policy(
            threshold=self.gate.threshold(self.gate.suggest(trial, "think_share", self.step)),
            mix=trial.suggest_float("mix", 0.0, 1.0, step=self.step),
            think_budget=trial.suggest_categorical("think_budget", self.budgets),
            arm=trial.suggest_categorical("arm", self.arms),
        )

    def policy_params(self, policy: Policy) -> dict[str, Any]:
        """How `suggest_policy` has to draw to suggest this policy, without its routes."""
        return {
            "think_share": self.on_grid(self.gate.share(policy.threshold)),
            "mix": self.on_grid(policy.mix),
            "think_budget": policy.think_budget,
            "arm": policy.arm,
        }

    def on_grid(self, value: float) -> float:
        """The value from 0 to 1, at the nearest point of the grid where there is one."""
        value = min(max(value, 0.0), 1.0)
        return value if self.step is None else round(round(value / self.step) * self.step, 9)


@dataclass(frozen=True, eq=False)
class Attempt:
    """One completed trial.

    Attributes
    ----------
    number : int
    params : mapping
        As the trial suggested them.
    policy : Policy
    value : float
        The caller's objective; NaN where it has no meaning.
    values : tuple of float
        The study's objectives.
    feasible : bool
        Whether all targets are met.
    metrics : mapping of str to float or None
        As `Evaluation.to_dict`.
    """

    number: int
    params: Mapping[str, Any]
    policy: Policy
    value: float
    values: tuple[float, ...]
    feasible: bool
    metrics: Mapping[str, float | None]


Space = Callable[["Trial", Context], Policy]
Decide = Callable[["Trial", Context, Policy], Decisions]
Params = Callable[[Policy, Context], Mapping[str, Any]]
Findings = Callable[[Sequence[Attempt], Context], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class StudyFile:
    """A loaded study file.

    Attributes
    ----------
    name : str
        The file's name without ending.
    path : Path
    space : callable
        Suggests a policy.
    objectives : tuple of str
        Metrics; empty for the caller's own objective.
    decide, params, findings : callable or None
        The optional functions of the protocol.
    """

    name: str
    path: Path
    space: Space
    objectives: tuple[str, ...] = ()
    decide: Decide | None = None
    params: Params | None = None
    findings: Findings | None = None

    @contextmanager
    def blamed(self, what: str) -> Iterator[None]:
        """Turn what the file's code raises into a `CalibError` that names the line."""
        with _blamed(self.path, what):
            yield


def built_in() -> tuple[str, ...]:
    """Names of the studies that come with calib."""
    return tuple(sorted(p.stem for p in resources.find("studies").glob("*.py") if p.stem != "__init__"))


def load_study(study: str | os.PathLike[str]) -> StudyFile:
    """Study by the name of a file that comes with calib, or by the path of one's own.

    Raises
    ------
    CalibError
        No such study, an error while the file is run, or a file that does not follow the protocol.
    """
    text = os.fspath(study)
    own = text.endswith(".py") or "/" in text or os.sep in text
    if not own and text not in built_in():
        raise CalibError(
            f"unknown study {text!r}; there are: {', '.join(built_in())}. Give the path of your own file: ./{text}.py"
        )
    path = Path(text) if own else resources.find(f"studies/{text}.py")
    if not path.is_file():
        raise CalibError(f"{path}: no study file there; studies that come with calib: {', '.join(built_in())}")
    name = "calib_study_" + re.sub(r"\W", "_", str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise CalibError(f"{path}: a study file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the file look themselves up there
    with _blamed(path, "the file does not run"):
        spec.loader.exec_module(module)
    return _checked(path, vars(module))


def _checked(path: Path, found: Mapping[str, Any]) -> StudyFile:
    if not callable(found.get("space")):
        raise CalibError(f"{path}: a study file needs a function space(trial, context) that returns a Policy")
    for name in ("decide", "params", "findings"):
        if found.get(name) is not None and not callable(found[name]):
            raise CalibError(f"{path}: {name} must be a function, got {found[name]!r}")
    objectives = found.get("OBJECTIVES", ())
    if isinstance(objectives, str) or not all(name in METRICS for name in objectives):
        raise CalibError(f"{path}: OBJECTIVES must be a tuple of metrics, got {objectives!r}; {', '.join(METRICS)}")
    return StudyFile(
        path.stem,
        path,
        found["space"],
        tuple(objectives),
        decide=found.get("decide"),
        params=found.get("params"),
        findings=found.get("findings"),
    )


@contextmanager
def _blamed(path: Path, what: str) -> Iterator[None]:
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (OptunaError, SQLAlchemyError):
        raise  # a pruned trial is an answer, and a storage that fails is not the file's fault
    except Exception as error:
        said = str(error) or type(error).__name__
        kind = "" if isinstance(error, CalibError) else f"{type(error).__name__}: "
        raise CalibError(f"{path}, line {_line(error, path)}: {what}: {kind}{said}") from error


def _line(error: BaseException, path: Path) -> int | str:
    """Last line of the file that was running; where none was, Python could not read the file."""
    here = {str(path), str(path.resolve())}
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in here]
    if isinstance(error, SyntaxError) and error.filename in here:
        lines.append(error.lineno)
    return next((line for line in reversed(lines) if line), "unknown")

"""`run_study`: a study file on Optuna, with named constraints, warm starts and the gap to the exact optimum.

The best trial of a study is the luckiest one on the questions that it was given: whether it holds on new questions is
for `calib.certify`. Leaves to others: what is tried (``studies/``, `calib.studyfile`), how it is drawn
(`calib.samplers`), where it is kept (`calib.studystore`), the exact optimum (`calib.optimise`). Optuna is imported
when a study is run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from calib.errors import CalibError
from calib.jsonnumbers import finite
from calib.optimise import Optimum, optimum
from calib.outcomes import Outcomes
from calib.policy import Cost, Evaluation, Policy, decide, evaluate_decisions
from calib.risk import violation_share
from calib.search import Search
from calib.studyfile import Attempt, Context, StudyFile, load_study
from calib.studystore import default_storage, opened, patiently, shown
from calib.target import HIGHER_IS_BETTER, Target

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

__all__ = ["GRID_STEP", "StudyResult", "check_study", "default_storage", "run_study"]

GRID_STEP = 0.05
"""Width of the grid of thresholds and mixes for samplers that try every policy."""
UNKNOWN = 1e9
"""By how much a target is missed whose metric is unknown: a sampler's arithmetic needs a finite number."""

_QUESTION = "question"  # attribute of the study: what was asked, so that answers to different questions never mix
_POLICY = "policy"  # attribute of a trial
_METRICS = tuple(f.name for f in fields(Evaluation) if f.name != "by_dataset")  # attributes of a trial
_CHEAP = ("mean", "tokens", "think_rate")  # in this order a policy is cheaper than another
_SAME = 1e-12  # objectives this close are equal: they may be summed in another order

Progress = Callable[[int, int, float | None], None]
"""Trials done in this run, trials asked for, best objective of a feasible trial so far."""


@dataclass(frozen=True, eq=False)
class StudyResult:
    """What a study found; `to_dict` is the ``study`` of ``calib optimize --json``.

    Attributes
    ----------
    name : str
        In the storage; a later run with this name goes on.
    study, sampler : str
        Study file, sampler.
    storage : str or None
        URL without password and query; None in memory.
    trials : int
        Completed in the study so far, by all runs and processes.
    feasible : int
        Those of them that meet all targets.
    metric : str
        The caller's objective.
    maximize : bool
    objective : float
        Best of the feasible trials; NaN without one. Ties go to the cheaper policy, then to the earlier trial.
    policy : Policy or None
        Of that trial. Where the study file decides in its own way, the objective is what that way gives.
    params : mapping
        Of that trial.
    exact : Optimum
        The exact optimum of one policy for all, under the same targets.
    front : tuple of Attempt
        Feasible trials that no other beats in all objectives, by the first one; empty with one objective.
    findings : mapping
        What the study file says was learned.
    seconds : float
        Of this run.
    warnings : tuple of str
    trial : int or None
        Number of the best of the feasible trials.
    attempts : tuple of Attempt
        Every completed trial, in order.
    """

    name: str
    study: str
    sampler: str
    storage: str | None
    trials: int
    feasible: int
    metric: str
    maximize: bool
    objective: float
    policy: Policy | None
    params: Mapping[str, Any]
    exact: Optimum
    front: tuple[Attempt, ...] = ()
    findings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    trial: int | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def gap(self) -> float:
        """How much better the exact optimum is, in the unit of the objective; NaN when either found nothing.

        Never below 0 in the space of the exact optimum; below 0 where routes or another rule for cut thoughts win.
        """
        gap = self.exact.objective - self.objective if self.maximize else self.objective - self.exact.objective
        return 0.0 if abs(gap) <= _SAME else gap

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, unknown numbers None."""
        found: dict[str, Any] = {
            "name": self.name,
            "storage": self.storage,
            "trials": self.trials,
            "objective": finite(self.objective),
            "policy": None if self.policy is None else self.policy.to_dict(),
            "trial": self.trial,
            "gap": finite(self.gap),
            "study": self.study,
            "sampler": self.sampler,
            "metric": self.metric,
            "feasible": self.feasible,
            "seconds": round(self.seconds, 3),
        }
        if self.front:
            found["front"] = [{"values": list(a.values), "policy": a.policy.to_dict()} for a in self.front]
        if self.findings:
            found["findings"] = dict(self.findings)
        if self.warnings:
            found["warnings"] = list(self.warnings)
        return found


def run_study(
    outcomes: Outcomes,
    targets: Sequence[Target] = (),
    *,
    study: str | os.PathLike[str] = "policy",
    name: str | None = None,
    storage: str | None = None,
    sampler: str = "tpe",
    trials: int = 200,
    timeout: float | None = None,
    jobs: int = 1,
    seed: int = 0,
    warm_start: Sequence[Policy] = (),
    maximize: str | None = None,
    minimize: str | None = None,
    cost: Cost | None = None,
    arms: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    exact: Optimum | None = None,
    route_by: str | None = None,
    requirements: Mapping[Target, float] | None = None,
    progress: Progress | None = None,
) -> StudyResult:
    """Run a study, or go on with it.

    Parameters
    ----------
    outcomes : Outcomes
        The questions to tune on: a study must not see those held out.
    targets : sequence of Target
        Named constraints of each trial.
    study : str or path
        A study that comes with calib, or a study file of one's own.
    name : str, optional
        Name in the storage: an existing study is resumed, by any number of processes at once. When left out, a new
        name under which the storage gets the trials at the end.
    storage : str, optional
        Database URL or SQLite file (see `default_storage`); in memory when left out.
    sampler : str
        One of `calib.samplers.SAMPLERS`.
    trials : int
        Trials to add, warm starts among them.
    timeout : float, optional
        Seconds after which no further trial begins.
    jobs : int
        Threads.
    seed : int
        With one job and one process the same seed finds the same trials, also when a study is resumed.
    warm_start : sequence of Policy
        Tried first, where the study file can express them and they were not tried before.
    maximize, minimize : str, optional
        The objective; accuracy is maximised when both are left out.
    cost : Cost, optional
        Prices for the metric ``cost``.
    arms, budgets : sequence, optional
        Where to look; everywhere when left out.
    exact : Optimum, optional
        The optimum for the same question where it is known; found here when left out.
    route_by : str, optional
        What the routes of a study that makes some are to go by.
    requirements : mapping of Target to float, optional
        Margins that sampling is to leave (see `Context`).
    progress : callable, optional

    Raises
    ------
    CalibError
        An unknown study, sampler, arm or budget; an error in a study file (with its line); a storage that cannot be
        used; a study of that name which asked another question.
    """
    from calib.samplers import COUNTING, UNGUIDED, sampler_of

    began = time.monotonic()
    _check_extent(trials, timeout, jobs)
    file = load_study(study)
    if exact is None:
        exact = optimum(outcomes, targets, maximize=maximize, minimize=minimize, cost=cost, arms=arms, budgets=budgets)
    context = Context(
        outcomes,
        tuple(targets),
        exact.metric,
        exact.maximize,
        tuple(outcomes.arms if arms is None else arms),
        tuple(outcomes.budgets.tolist() if budgets is None else [int(b) for b in budgets]),
        cost,
        GRID_STEP if sampler in COUNTING else None,
        route_by,
        dict(requirements or {}),
    )
    objectives = file.objectives or (context.metric,)
    Search(outcomes, (), None, None, cost, arms, budgets, None, metrics=objectives)  # refuses what is not known
    drawn = sampler_of(sampler, seed, objectives=len(objectives))
    alone = name is None  # nobody can join under a name that nobody knows yet
    name = name or f"{file.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    with opened(storage) as kept, _quiet(), opened(None) as memory:
        joined = _joined(memory if alone else kept, drawn, name, objectives, context, file)
        run = _Run(joined, file, context, objectives, trials, progress)
        run.enqueue(warm_start)
        try:
            joined.optimize(run.objective, n_trials=trials, timeout=timeout, n_jobs=jobs, callbacks=[run.completed])
        finally:
            if alone and storage is not None:
                joined = _moved(joined, _joined(kept, drawn, name, objectives, context, file))
        attempts = run.attempts()
        best = max(attempts, key=lambda a: _rank(a, context.maximize), default=None)
        best = best if best is not None and best.feasible and not math.isnan(best.value) else None
        front = {trial.number for trial in joined.best_trials} if len(objectives) > 1 else set()
        findings: Mapping[str, Any] = {}
        if file.findings is not None:
            with file.blamed("findings"):
                findings = _plain(file.findings(attempts, context))
            joined.set_user_attr("findings", findings)
    return StudyResult(
        name,
        file.name,
        sampler,
        None if storage is None else shown(storage),
        trials=len(attempts),
        feasible=sum(a.feasible for a in attempts),
        metric=context.metric,
        maximize=context.maximize,
        objective=math.nan if best is None else best.value,
        policy=None if best is None else best.policy,
        params={} if best is None else best.params,
        exact=exact,
        front=_distinct(a for a in attempts if a.number in front),
        findings=findings,
        seconds=time.monotonic() - began,
        warnings=(f"the sampler {sampler!r} does not look at the targets",) if sampler in UNGUIDED and targets else (),
        trial=None if best is None else best.number,
        attempts=tuple(attempts),
    )


def _moved(done: Study, kept: Study) -> Study:
    """Enter the ended trials of a study in another one, each as a whole.

    A database takes each attribute of a running trial in a transaction of its own, which takes several times as long.
    """
    kept.add_trials([trial for trial in done.get_trials(deepcopy=False) if trial.state.is_finished()])
    return kept


def check_study(study: str | os.PathLike[str], *, sampler: str, storage: str | None) -> None:
    """Refuse a study, a sampler or a storage that `run_study` would refuse, before anything is done for it."""
    from calib.samplers import sampler_of

    file = load_study(study)
    sampler_of(sampler, 0, objectives=len(file.objectives or ("accuracy",)))
    with opened(storage):
        pass


class _Run:
    """One process at work on a study: what a trial does, what is told about it, and what came of all of them."""

    def __init__(
        self,
        study: Study,
        file: StudyFile,
        context: Context,
        objectives: Sequence[str],
        trials: int,
        progress: Progress | None,
    ) -> None:
        self._study, self._file, self._context = study, file, context
        self._objectives, self._trials, self._progress = objectives, trials, progress
        self._by_dataset = any(target.dataset is not None or target.worst for target in context.targets)
        self._lock, self._done = threading.Lock(), 0
        self._best = max(self.attempts(), key=lambda a: _rank(a, context.maximize), default=None)

    def enqueue(self, policies: Sequence[Policy]) -> None:
        """Queue policies, those aside that the study file cannot express or that were tried or queued before."""
        context, file = self._context, self._file
        for policy in policies if file.params is not None else ():
            if policy.arm not in context.arms or policy.think_budget not in context.budgets:
                raise CalibError(
                    f"the warm start uses arm {policy.arm!r} and think_budget {policy.think_budget}, and the study "
                    f"looks at {', '.join(context.arms)} and {list(context.budgets)}"
                )
            assert file.params is not None
            with file.blamed("params"):
                params = dict(file.params(policy, context))
            self._study.enqueue_trial(params, user_attrs={"warm start": True}, skip_if_exists=True)

    def objective(self, trial: Trial) -> list[float]:
        """Score what the study file suggests; NaN marks the trial as failed and the study goes on."""
        context, file = self._context, self._file
        with file.blamed("space"):
            policy = file.space(trial, context)
            if not isinstance(policy, Policy):
                raise CalibError(f"space must return a Policy, got {policy!r}")
        if file.decide is None:
            decisions = decide(context.outcomes, policy)
        else:
            with file.blamed("decide"):
                decisions = file.decide(trial, context, policy)
        score = evaluate_decisions(context.outcomes, decisions, by_dataset=self._by_dataset, cost=context.cost)
        trial.set_user_attr(_POLICY, policy.to_dict())
        trial.set_user_attr("threshold", policy.threshold)  # a number can be plotted, and may be drawn by its share
        for metric, value in score.to_dict().items():
            trial.set_user_attr(metric, value)
        for target in context.targets:
            margin = target.margin(score)
            trial.set_constraint(str(target), -margin if math.isfinite(margin) else UNKNOWN)
            # the dashboard does not show constraints: a reader finds the margins here, in the unit of the target
            trial.set_user_attr(f"margin {target}", finite(margin * {"%": 100, "ms": 1000}.get(target.unit, 1)))
        for target, most in context.requirements.items():
            trial.set_constraint(f"room below {target}", violation_share(target, context.outcomes, decisions) - most)
        return [float(getattr(score, metric)) for metric in self._objectives]

    def completed(self, _study: Study, trial: FrozenTrial) -> None:
        """Tell how far the run is, one thread at a time."""
        attempt = self._attempt(trial)
        with self._lock:
            self._done += 1
            found = [one for one in (attempt, self._best) if one is not None]
            self._best = max(found, key=lambda a: _rank(a, self._context.maximize), default=None)
            if self._progress is not None:
                best = self._best.value if self._best is not None and self._best.feasible else None
                self._progress(self._done, self._trials, best)

    def attempts(self) -> list[Attempt]:
        """Every completed trial of the study, in order."""
        found = (self._attempt(trial) for trial in self._study.get_trials(deepcopy=False))
        return [attempt for attempt in found if attempt is not None]

    def _attempt(self, trial: FrozenTrial) -> Attempt | None:
        if trial.state.name != "COMPLETE" or _POLICY not in trial.user_attrs:  # or entered by hand
            return None
        metrics = {metric: trial.user_attrs[metric] for metric in _METRICS}
        value = metrics[self._context.metric]
        return Attempt(
            trial.number,
            dict(trial.params),
            Policy.from_dict(trial.user_attrs[_POLICY]),
            math.nan if value is None else value,
            tuple(trial.values),
            all(trial.constraints.get(str(target), -1.0) <= 0 for target in self._context.targets),
            metrics,
        )


def _joined(
    storage: BaseStorage,
    sampler: BaseSampler,
    name: str,
    objectives: Sequence[str],
    context: Context,
    file: StudyFile,
) -> Study:
    """The study of that name, made when there is none; refused when it asked another question."""
    import optuna

    ways: list[Literal["minimize", "maximize"]]
    ways = ["maximize" if _upwards(metric, context) else "minimize" for metric in objectives]
    study = patiently(
        lambda: optuna.create_study(
            storage=storage, sampler=sampler, study_name=name, directions=ways, load_if_exists=True
        )
    )
    question = _question(file, objectives, ways, context)
    before = study.user_attrs.get(_QUESTION)
    if before is None and study.get_trials(deepcopy=False):
        raise CalibError(f"the storage has a study {name!r} that calib did not make; give another name")
    if before is None:
        study.set_user_attr(_QUESTION, question)
        study.set_metric_names(list(objectives))
    elif changed := [key for key in question | before if before.get(key) != question.get(key)]:
        raise CalibError(
            f"the study {name!r} asked another question: {', '.join(changed)} differ. Trials of different questions "
            "cannot be compared: give another name, or ask the same again"
        )
    return study


def _question(file: StudyFile, objectives: Sequence[str], ways: Sequence[str], context: Context) -> dict[str, Any]:
    question = {
        "study": file.name,
        "objectives": [f"{way} {metric}" for way, metric in zip(ways, objectives, strict=True)],
        "targets": sorted(str(target) for target in context.targets),
        "cost": None if context.cost is None else asdict(context.cost),
        "arms": list(context.arms),
        "budgets": list(context.budgets),
        "grid": context.step,
        "routes": context.route_by,
        "room": {str(target): most for target, most in context.requirements.items()} or None,
        "outcomes": _fingerprint(context.outcomes),
    }
    return _plain(question)


def _fingerprint(o: Outcomes) -> str:
    """Identity of the numbers that a trial is scored on."""
    digest = hashlib.sha256()
    arrays = (o.p1, o.p2, o.tokens, o.finished, o.t1, o.t2, o.answer, o.n_options, o.can_think, o.weight, o.label_set)
    for array in arrays:
        digest.update(f"{array.shape}{array.dtype.str}".encode())
        digest.update(array.tobytes())
    digest.update(json.dumps([o.dataset.tolist(), o.kind.tolist(), list(o.arms), o.budgets.tolist()]).encode())
    return digest.hexdigest()


def _upwards(metric: str, context: Context) -> bool:
    return context.maximize if metric == context.metric else metric in HIGHER_IS_BETTER


def _rank(attempt: Attempt, maximize: bool) -> tuple[Any, ...]:
    """Feasible before infeasible, better before worse, cheaper before dearer, earlier before later; larger is first."""
    known = not math.isnan(attempt.value)
    value = (attempt.value if maximize else -attempt.value) if known else -math.inf
    cheap = [-(number if number is not None else math.inf) for number in map(attempt.metrics.get, _CHEAP)]
    return (attempt.feasible, known, value, *cheap, -attempt.number)


def _distinct(attempts: Iterator[Attempt]) -> tuple[Attempt, ...]:
    """The first of those with the same values, by the first objective."""
    found: dict[tuple[float, ...], Attempt] = {}
    for attempt in attempts:
        found.setdefault(attempt.values, attempt)
    return tuple(found[values] for values in sorted(found))


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna without its log of trials, and without warnings that a sampler is experimental or ignores constraints."""
    from optuna import logging
    from optuna.exceptions import ExperimentalWarning

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.filterwarnings(
                "ignore", "Constraints have been set, but CmaEsSampler"
            )  # in `StudyResult.warnings`
            yield
    finally:
        logging.set_verbosity(before)


def _check_extent(trials: int, timeout: float | None, jobs: int) -> None:
    if trials < 1:
        raise CalibError(f"a study needs 1 trial or more, got --trials {trials}")
    if timeout is not None and not timeout > 0:
        raise CalibError(f"--timeout must be above 0 seconds, got {timeout}")
    if jobs < 1:
        raise CalibError(f"--jobs must be 1 or more, got {jobs}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they come back from a storage; a value that JSON cannot hold is an error."""
    found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return found

"""Optuna's samplers by name, seeded so that a study can be stopped, resumed and shared and still be repeated.

Leaves to `calib.study` what is sampled and why. Importing this module imports Optuna.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIIISampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from calib.errors import CalibError

__all__ = ["COUNTING", "SAMPLERS", "UNGUIDED", "sampler_of"]

Make = Callable[[int, int], BaseSampler]
"""From the seed of the study and the seed of the trial."""

SAMPLERS: dict[str, Make] = {
    # both arguments are named: their defaults have changed between major versions. The liar keeps trials that run at
    # the same time, here or in another process, from trying the same place; alone it changes nothing
    "tpe": lambda _, seed: TPESampler(seed=seed, multivariate=True, constant_liar=True),
    "random": lambda _, seed: RandomSampler(seed=seed),
    # one low-discrepancy sequence for the whole study; what it cannot draw (categories) is drawn at random
    "qmc": lambda study, seed: QMCSampler(
        seed=study, scramble=True, independent_sampler=RandomSampler(seed=seed), warn_independent_sampling=False
    ),
    "gp": lambda _, seed: GPSampler(seed=seed, warn_independent_sampling=False),
    "cmaes": lambda _, seed: CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "nsga2": lambda _, seed: NSGAIISampler(seed=seed),
    "nsga3": lambda _, seed: NSGAIIISampler(seed=seed),
    "bruteforce": lambda _, seed: BruteForceSampler(seed=seed),
}
"""How each sampler is made."""

COUNTING = ("bruteforce",)
"""Samplers that need a space which can be counted."""

UNGUIDED = ("cmaes",)
"""Samplers that follow the objective alone, and so lead away from where the targets are met."""

_PACKAGES = {"gp": "torch", "cmaes": "cmaes"}
_ONE_OBJECTIVE = ("cmaes",)


def sampler_of(name: str, seed: int, *, objectives: int = 1) -> BaseSampler:
    """Sampler by name.

    Parameters
    ----------
    name : str
        One of `SAMPLERS`.
    seed : int
        Each trial draws from this seed and its own number. So the same study is found again with one job, whether or
        not it was interrupted, and processes that share a study do not repeat each other.
    objectives : int, default 1

    Raises
    ------
    CalibError
        An unknown name, a package that is not installed, or a sampler that cannot take several objectives.
    """
    if name not in SAMPLERS:
        raise CalibError(f"unknown sampler {name!r}; there are: {', '.join(SAMPLERS)}")
    package = _PACKAGES.get(name)
    if package and find_spec(package) is None:
        raise CalibError(f"the sampler {name!r} needs a package that is not installed: pip install {package}")
    if objectives > 1 and name in _ONE_OBJECTIVE:
        raise CalibError(f"the sampler {name!r} takes one objective and the study has {objectives}; use tpe or nsga2")
    if seed < 0:
        raise CalibError(f"the seed must be 0 or more, got {seed}")
    return _Seeded(name, seed)


class _Seeded(BaseSampler):
    """A new sampler for each trial, seeded by the study's seed and the trial's number.

    What a sampler learns, it learns from the storage, so nothing is lost. A thread runs one trial at a time.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._make, self._seed = SAMPLERS[name], seed
        self._current = threading.local()

    @property
    def _sampler(self) -> BaseSampler:
        found: BaseSampler = self._current.sampler
        return found

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        seed = int(np.random.SeedSequence([self._seed, trial.number]).generate_state(1)[0])
        self._current.sampler = self._make(self._seed, seed)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._sampler.after_trial(study, trial, state, values)

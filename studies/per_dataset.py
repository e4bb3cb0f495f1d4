"""A threshold, a think budget and thinking on or off for each dataset, with one mix for all: is it worth it.

A route must be something that a request carries: its ``dataset`` field, its ``kind`` or its number of options. The
first of these that tells the questions apart is used, or the one that ``calib optimize --routes`` names.

Few questions say little about their own best policy, so a route with n questions is pulled towards the pooled policy:

* below `FEW` questions it has no values of its own;
* the share of its questions that think is ``w * own + (1 - w) * pooled`` with ``w = n / (n + PULL)``, where ``pooled``
  is the share that thinks at the pooled threshold;
* its own budget, and thinking on or off, need `ENOUGH` questions: a choice cannot be pulled, only kept or dropped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calib.knobs import ROUTE_KEYS
from calib.policy import NEVER, Route
from calib.routing import column
from calib.studyfile import Gate

if TYPE_CHECKING:
    from optuna.trial import Trial

    from calib.policy import Policy
    from calib.studyfile import Context

FEW, ENOUGH, PULL = 30, 100, 100


class Group(NamedTuple):
    """The questions of one route."""

    route: str
    gate: Gate
    n: int

    @property
    def weight(self) -> float:
        """Of the route's own share, 0 to 1."""
        return self.n / (self.n + PULL)


def space(trial: Trial, context: Context) -> Policy:
    """A pooled policy, and a route for each group of questions that is large enough."""
    policy = context.suggest_policy(trial)
    routes = {}
    for group in groups(context):
        pooled = group.gate.share(policy.threshold)
        own = group.gate.suggest(trial, f"think_share {group.route}", context.step)
        threshold = group.gate.threshold(pooled + group.weight * (own - pooled))
        budget = policy.think_budget
        if group.n >= ENOUGH:
            budget = trial.suggest_categorical(f"think_budget {group.route}", context.budgets)
            if not trial.suggest_categorical(f"thinking {group.route}", (True, False)):
                threshold = NEVER
        exception = Route(
            threshold=None if group.gate.share(threshold) == pooled else threshold,
            think_budget=budget if threshold > NEVER and budget != policy.think_budget else None,
        )
        if exception != Route():
            routes[group.route] = exception
    return replace(policy, routes=routes)


def params(policy: Policy, context: Context) -> dict[str, Any]:
    """The policy in this space: what each route's own share must be so that the pull ends at the policy's."""
    found = context.policy_params(policy)
    for group in groups(context):
        exception = policy.routes.get(group.route, Route())
        threshold = policy.threshold if exception.threshold is None else exception.threshold
        pooled = group.gate.share(policy.threshold)
        own = pooled + (group.gate.share(threshold) - pooled) / group.weight
        found[f"think_share {group.route}"] = context.on_grid(own)
        if group.n >= ENOUGH:
            found[f"think_budget {group.route}"] = exception.think_budget or policy.think_budget
            found[f"thinking {group.route}"] = threshold > NEVER or policy.threshold == NEVER
    return found


@lru_cache(maxsize=4)  # the same for every trial of a study
def groups(context: Context) -> tuple[Group, ...]:
    """Routes with enough questions, by name; none where nothing that a request carries tells the questions apart."""
    o = context.outcomes
    for key in ROUTE_KEYS if context.route_by is None else (context.route_by,):
        own = column(o, key)
        values, counts = np.unique(own, return_counts=True)
        if len(values) > 1:
            return tuple(
                Group(f"{key}={value}", Gate.of(o.take(own == value)), int(n))
                for value, n in zip(values, counts, strict=True)
                if n >= FEW
            )
    return ()

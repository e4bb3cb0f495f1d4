"""How much accuracy each second buys: accuracy up and p90 down, in the space of one policy for all.

The result is a front of policies of which none is better in both; the one that is named is the best of them by the
caller's own objective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import Trial

    from calib.policy import Policy
    from calib.studyfile import Context

OBJECTIVES = ("accuracy", "p90")


def space(trial: Trial, context: Context) -> Policy:
    """One policy for all."""
    return context.suggest_policy(trial)


def params(policy: Policy, context: Context) -> dict[str, Any]:
    """The policy in this space, without its routes."""
    return context.policy_params(policy)

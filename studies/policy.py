"""The best threshold, mix, think budget and arm when all requests are served by one policy.

The space of the exact optimum: a study here can come as close as its trials allow, and never beat it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import Trial

    from calib.policy import Policy
    from calib.studyfile import Context


def space(trial: Trial, context: Context) -> Policy:
    """One policy for all."""
    return context.suggest_policy(trial)


def params(policy: Policy, context: Context) -> dict[str, Any]:
    """The policy in this space, without its routes."""
    return context.policy_params(policy)

"""What to do with a cut thought, one that had not ended when the budget was spent.

Three rules are compared, with one policy for all otherwise:

* ``use``: as any other thought, at the policy's mix;
* ``system1``: drop it, and answer by System 1 (the seconds are spent all the same);
* ``own_mix``: give it a mix of its own, ``cut_mix``.

No policy can be served with the last two today: this is a finding about the questions, not a policy to export. A
thought that failed is not a cut one, and stays a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calib import policy as rule_of
from calib.intervals import Comparison, compare
from calib.outcomes import Outcomes
from calib.policy import Decisions, Policy, evaluate_decisions

if TYPE_CHECKING:
    from optuna.trial import Trial

    from calib.studyfile import Attempt, Context

RULES = ("use", "system1", "own_mix")
SHORTLIST = 20
"""How many of the best trials of each rule are scored under all rules, which so share the luck of the search."""


def space(trial: Trial, context: Context) -> Policy:
    """One policy for all; the rule is read by `decide`."""
    return context.suggest_policy(trial)


def decide(trial: Trial, context: Context, policy: Policy) -> Decisions:
    """The policy's decisions, with cut thoughts treated by the suggested rule."""
    rule = trial.suggest_categorical("rule", RULES)
    return under(rule, context.outcomes, policy, trial.suggest_float("cut_mix", 0.0, 1.0, step=context.step))


def params(policy: Policy, context: Context) -> dict[str, Any]:
    """The policy in this space, with cut thoughts used as any other."""
    return context.policy_params(policy) | {"rule": "use", "cut_mix": context.on_grid(policy.mix)}


def under(rule: str, outcomes: Outcomes, policy: Policy, cut_mix: float) -> Decisions:
    """Decisions under one of the `RULES`."""
    decided = rule_of.decide(outcomes, policy)
    if rule == "use":
        return decided
    cut = is_cut(outcomes, policy, decided)
    p2 = outcomes.p2[:, outcomes.budget_index(policy.think_budget)]
    own = replace(policy, mix=cut_mix).combine(outcomes.p1, p2) if rule == "own_mix" else outcomes.p1
    return replace(decided, p=np.where(cut[:, None], own, decided.p))


def is_cut(outcomes: Outcomes, policy: Policy, decided: Decisions) -> NDArray[np.bool_]:
    """Which questions are answered after a cut thought, shape (N,)."""
    b = outcomes.budget_index(policy.think_budget)
    return decided.thinks & ~outcomes.finished[:, b] & ~outcomes.failed[:, b]


def findings(attempts: Sequence[Attempt], context: Context) -> dict[str, Any]:
    """Which rule wins, and by how much in the caller's objective over ``use``, or ``use`` over the next rule."""
    best = _best(attempts, context)
    if not best:
        return {"rule": None, "sentence": "no rule for cut thoughts meets the targets"}
    sign = 1 if context.maximize else -1
    order = sorted(best, key=lambda rule: -sign * best[rule].value)  # of equal rules the simpler first, as in `RULES`
    winner = best[order[0]]
    rivals = order[1:] if order[0] == "use" else ["use"]
    lead = next((abs(winner.value - best[rule].value) for rule in rivals if rule in best), None)
    cut = int(is_cut(context.outcomes, winner.policy, winner.decided).sum())
    others = {rule: best[rule].decided for rule in order[1:]}
    pairs = compare(context.outcomes, winner.decided, others, rng=np.random.default_rng(0))
    return {
        "rule": order[0],
        "lead": lead,
        "metric": context.metric,
        "objective": {rule: best[rule].value if rule in best else None for rule in RULES},
        "policy": winner.policy.to_dict(),
        "cut_mix": winner.cut_mix if order[0] == "own_mix" else None,
        "cut_thoughts": cut,
        "accuracy_over": {rule: pair.to_dict() for rule, pair in pairs.items()},
        "sentence": f"{_sentence(order[0], lead, context.metric, pairs)} ({cut} cut thoughts)",
    }


class _Best(NamedTuple):
    """The best policy under one rule."""

    value: float
    policy: Policy
    cut_mix: float
    decided: Decisions


def _best(attempts: Sequence[Attempt], context: Context) -> dict[str, _Best]:
    """Best policy under each rule that meets the targets, of the same policies, in the order of the rules."""
    sign = 1 if context.maximize else -1
    found: dict[str, _Best] = {}
    for rule in RULES:
        for attempt in _shortlist(attempts, sign):
            decided = under(rule, context.outcomes, attempt.policy, attempt.params["cut_mix"])
            score = evaluate_decisions(context.outcomes, decided, by_dataset=True, cost=context.cost)
            value = float(getattr(score, context.metric))
            met = all(target.met(score) for target in context.targets)
            if met and value == value and (rule not in found or sign * value > sign * found[rule].value):
                found[rule] = _Best(value, attempt.policy, attempt.params["cut_mix"], decided)
    return found


def _shortlist(attempts: Sequence[Attempt], sign: int) -> list[Attempt]:
    known = sorted((a for a in attempts if a.value == a.value), key=lambda a: (not a.feasible, -sign * a.value))
    return [a for rule in RULES for a in [a for a in known if a.params["rule"] == rule][:SHORTLIST]]


def _sentence(rule: str, lead: float | None, metric: str, pairs: Mapping[str, Comparison]) -> str:
    what = {
        "use": "use a cut thought as any other",
        "system1": "answer by System 1 after a cut thought",
        "own_mix": "give cut thoughts a mix of their own",
    }[rule]
    if lead is None:
        return f"{what}: " + ("no other rule meets the targets" if rule == "use" else "using it breaks the targets")
    if lead == 0:
        return f"no other rule for cut thoughts is better for {metric}"
    other = "the next rule" if rule == "use" else "using it as any other"
    alike = [name for name, pair in pairs.items() if not pair.distinguishable]
    doubt = f"; accuracy cannot be told apart from {', '.join(alike)}" if alike else ""
    return f"{what}: {metric} is better by {lead:.4g} than {other}{doubt}"

"""One question per file: its search space and its objectives.

``calib optimize --study NAME`` runs a file of this folder, ``--study ./mine.py`` a file of one's own. A study file is
a Python module with

``space(trial, context) -> Policy``
    Suggests a policy by ``trial.suggest_float``, ``trial.suggest_categorical`` and so on (Optuna's `Trial`). `context`
    (`calib.studyfile.Context`) holds the tune questions ``outcomes``, the ``targets``, the ``arms`` and ``budgets``
    that may be used; ``suggest_policy(trial)``, one policy for all; and the ``gate``, which turns the share of
    questions that think into a threshold, and ``gate.midway(threshold)`` moves a threshold away from observed
    confidences without changing any decision. Give real numbers ``step=context.step``, so that samplers that try
    everything can count them.

and, where they are needed,

``OBJECTIVES = ("accuracy", "p90")``
    Metrics to be traded against each other; which way is better is known. Without it the study has the caller's
    objective (``--maximize``, ``--minimize``).
``params(policy, context) -> dict``
    How a policy is written in this space (``context.policy_params(policy)`` for ``suggest_policy``). Makes warm starts
    possible, for instance from the exact optimum.
``decide(trial, context, policy) -> Decisions``
    What the policy does with each question, where it is not what `calib.policy.decide` does.
``findings(attempts, context) -> dict``
    What was learned, from the completed trials (`calib.studyfile.Attempt`): kept with the study and in the result. An
    entry ``sentence`` is printed.

Targets need no code: calib scores what the file suggests, tells Optuna by how much each target is missed, and records
every metric and the margin of each target with the trial. A file may raise ``optuna.TrialPruned`` for a combination
that makes no sense. Files are loaded by path and cannot import one another.
"""

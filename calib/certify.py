"""Will the targets hold on new questions: exact tests on the test split, verdicts, how many more questions.

A verdict is about questions like the test questions, at the load at which their latency was taken. It is worth its
level only because the test questions had no part in finding the policy and every look at them is paid for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calib import exact, metrics
from calib.errors import CalibError
from calib.intervals import RESAMPLES, Interval, intervals
from calib.outcomes import ESTIMATED, Outcomes
from calib.policy import Cost, Decisions, Evaluation, Policy, decide, evaluate_decisions
from calib.risk import Risk, Untestable, capacities, independent, restate, split_selector
from calib.target import Target

__all__ = [
    "Certificate",
    "Method",
    "NeedsMore",
    "TargetTest",
    "Terms",
    "Verdict",
    "alpha_at_look",
    "certify",
    "check_target",
    "check_targets",
    "marks_of",
]

Verdict = Literal["certified", "met", "not_met"]
Method = Literal["binomial", "conservative", "never"]
NeedsMore = int | Literal["never"] | None


def alpha_at_look(level: float, look: int) -> float:
    """What the k-th look at one test split may spend, (1 - level) * 6 / (pi^2 k^2): all looks together 1 - level."""
    if not 0 < level < 1:
        raise CalibError(f"--level must be between 0 and 1, for instance 0.95, got {level}")
    if look < 1:
        raise CalibError(f"looks at a test split are counted from 1, got {look}")
    return (1 - level) * 6 / (math.pi * look) ** 2


@dataclass(frozen=True)
class Terms:
    """What a test is held to.

    Attributes
    ----------
    alpha : float
        Chance of passing that a broken target may have, see `alpha_at_look`.
    level : float
        Of the intervals.
    cost : Cost or None
        Prices of the metric ``cost``.
    deadline : float or None
        Seconds after which the gateway answers at the latest, the policy's own when left out; without one no mean
        latency is certified.
    datasets : tuple of str
        Datasets that exist besides those of the questions: ``worst`` cannot be certified without a question of each.
    resamples : int
    """

    alpha: float
    level: float = 0.95
    cost: Cost | None = None
    deadline: float | None = None
    datasets: tuple[str, ...] = ()
    resamples: int = RESAMPLES


@dataclass(frozen=True)
class TargetTest:
    """One target on the reported questions.

    Attributes
    ----------
    target : Target
    n : int
        Questions that it is about.
    value, low, high : float
        The metric and its two-sided interval; for ``worst`` those of the dataset with the least slack.
    met : bool
        Whether the value keeps the limit.
    method : {"binomial", "conservative", "never"}
        Exact binomial test; a bound for bounded values in independent groups; no test.
    p_value : float or None
        Of the hypothesis that the target is broken; for ``worst`` the largest over the datasets.
    passed : bool
        Whether the p-value is at most alpha: what the verdict on all targets together needs.
    certified : bool
        Whether the target is certified by itself among all targets tested (Holm).
    needs_more : int, "never" or None
        How many more such questions would make it pass at the observed rate, in the sum over datasets for ``worst``;
        None when it passed.
    reason : str
        What the method rests on, or why the target is not certified.
    """

    target: Target
    n: int
    value: float
    low: float
    high: float
    met: bool
    method: Method
    p_value: float | None
    passed: bool
    certified: bool
    needs_more: NeedsMore
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what is not finite."""
        return {
            "target": str(self.target),
            **Interval(self.value, self.low, self.high).to_dict(),
            "met": self.met,
            "certified": self.certified,
            "needs_more": self.needs_more,
            "method": self.method,
            "p_value": self.p_value,
            "n": self.n,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class _Result:
    """A test on one set of questions."""

    method: Method
    p_value: float | None
    needs_more: NeedsMore
    reason: str
    slack: float = -math.inf


def check_target(
    target: Target,
    outcomes: Outcomes,
    policy: Policy,
    terms: Terms,
    *,
    rng: np.random.Generator,
    decisions: Decisions | None = None,
) -> TargetTest:
    """Test one target on held-out questions; see `check_targets` for several.

    Parameters
    ----------
    target : Target
    outcomes : Outcomes
        Questions that had no part in finding the policy.
    policy : Policy
    terms : Terms
    rng : numpy.random.Generator
        For intervals that are bootstrapped.
    decisions : Decisions, optional
        What the policy did, when it was worked out already.

    Raises
    ------
    CalibError
        When the target names a dataset that neither the outcomes nor the terms know.
    """
    d = decide(outcomes, policy) if decisions is None else decisions
    score = evaluate_decisions(outcomes, d, by_dataset=bool(target.selector), cost=terms.cost)
    if target.dataset is not None and target.dataset not in terms.datasets:
        target.value_of(score)  # raises where the dataset is unknown, with what there is
    result = _test(target, outcomes, policy, d, terms)
    value, met, where = _value(target, score, outcomes)
    interval = Interval(math.nan, math.nan, math.nan)
    if where is not None:
        interval = intervals(
            outcomes.take(where),
            d.take(where),
            rng=rng,
            level=terms.level,
            resamples=terms.resamples,
            cost=terms.cost,
            names=[target.metric],
        )[target.metric]
    passed = result.p_value is not None and result.p_value <= terms.alpha
    return TargetTest(
        target,
        sum(len(at) for _, at in split_selector(target, outcomes)),
        value,
        interval.low,
        interval.high,
        met,
        result.method,
        result.p_value,
        passed,
        passed,
        result.needs_more,
        result.reason,
    )


def check_targets(
    targets: Sequence[Target],
    outcomes: Outcomes,
    policy: Policy,
    terms: Terms,
    *,
    rng: np.random.Generator,
    decisions: Decisions | None = None,
) -> tuple[TargetTest, ...]:
    """Test several targets of one policy: each `passed` at alpha, each `certified` after Holm's correction.

    Arguments as for `check_target`.
    """
    d = decide(outcomes, policy) if decisions is None else decisions
    tests = [check_target(target, outcomes, policy, terms, rng=rng, decisions=d) for target in targets]
    tested = [(i, t.p_value) for i, t in enumerate(tests) if t.p_value is not None]
    for (i, _), p in zip(tested, exact.holm([p for _, p in tested]), strict=True):
        if tests[i].passed and p > terms.alpha:
            reason = f"{tests[i].reason}; holds as part of the whole, not by itself among several targets (Holm)"
            tests[i] = replace(tests[i], certified=False, reason=reason)
    return tuple(tests)


@dataclass(frozen=True)
class Certificate:
    """The verdict on a policy and what it rests on.

    Attributes
    ----------
    verdict : {"certified", "met", "not_met"}
        All targets pass their tests; all are met on the reported questions, no more; one is not met.
    policy : Policy
        The policy that the verdict is about.
    index : int
        Its place among the candidates.
    tests : tuple of TargetTest
        One for each target.
    split : {"test", "tune"}
        The questions that are reported; tune when there are no test questions.
    n : int
        Their number.
    level, alpha : float
        Asked for, and what this look may spend.
    look : int
    candidates : int
        How many there were: the reported questions had a say in which of them is returned.
    tested, passed : tuple of int
        Candidates in the order in which they were tested, and those that passed.
    marks : tuple of str
        `estimated`, `simulated`.
    statement : str
        The verdict in words, with what it is about.
    """

    verdict: Verdict
    policy: Policy
    index: int
    tests: tuple[TargetTest, ...]
    split: Literal["test", "tune"]
    n: int
    level: float
    alpha: float
    look: int
    candidates: int
    tested: tuple[int, ...]
    passed: tuple[int, ...]
    marks: tuple[str, ...]
    statement: str

    @property
    def needs_more(self) -> NeedsMore:
        """Most that a target needs; None when all pass, "never" when one cannot."""
        needs = [test.needs_more for test in self.tests]
        if "never" in needs:
            return "never"
        return max((n for n in needs if isinstance(n, int)), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "verdict": self.verdict,
            "targets": [test.to_dict() for test in self.tests],
            "split": self.split,
            "n": self.n,
            "level": self.level,
            "alpha": self.alpha,
            "look": self.look,
            "candidates": self.candidates,
            "candidates_tested": len(self.tested),
            "candidates_passed": len(self.passed),
            "marks": list(self.marks),
            "statement": self.statement,
        }


def certify(
    candidates: Sequence[Policy],
    tune: Outcomes,
    test: Outcomes | None,
    targets: Sequence[Target],
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    look: int = 1,
    cost: Cost | None = None,
    deadline: float | None = None,
    resamples: int = RESAMPLES,
    fallback: int = 0,
) -> Certificate:
    """Test candidates on held-out questions; the best that passes is certified.

    The order is fixed on the tune questions, from the candidate with the most slack (the largest p-value of its targets
    there is smallest) to the least. Each is tested at alpha on the test questions, and the first failure ends it: so
    the chance that any broken candidate passes stays at alpha, however many there are.

    Parameters
    ----------
    candidates : sequence of Policy
        Best first, by the objective on the tune questions; at least one.
    tune, test : Outcomes
        ``test`` None: nothing is held out, and the verdict is ``met`` at best.
    targets : sequence of Target
        Without any there is nothing to certify: ``met``.
    rng : numpy.random.Generator
    level : float, default 0.95
    look : int, default 1
        How many times this test split has been looked at, this time included.
    cost, deadline, resamples
        As in `Terms`.
    fallback : int, default 0
        Candidate to report on when none passes.

    Returns
    -------
    Certificate
        On the best candidate that passed, else on the fallback.
    """
    if not candidates:
        raise CalibError("no policy to certify: no candidate is feasible on the tune questions")
    alpha = alpha_at_look(level, look)
    reported = tune if test is None else test

    terms = Terms(alpha, level, cost, deadline, tune.dataset_names, resamples)

    def tests_of(index: int) -> tuple[TargetTest, ...]:
        return check_targets(targets, reported, candidates[index], terms, rng=rng)

    done: dict[int, tuple[TargetTest, ...]] = {}
    passed: list[int] = []
    if test is not None and targets:
        for i in _order(candidates, tune, targets, terms):
            done[i] = tests_of(i)
            if not all(t.passed for t in done[i]):
                break
            passed.append(i)
    best = min(passed, default=fallback)
    tests = done[best] if best in done else tests_of(best)
    if test is None:
        tests = tuple(replace(t, **_NOT_HELD_OUT) for t in tests)
    elif not passed and len(candidates) > 1:
        # Flags of single targets beside a whole sequence of tests would add to the chance of a false one.
        tests = tuple(replace(t, certified=False) for t in tests)
    verdict: Verdict = "certified" if passed else ("met" if all(t.met for t in tests) else "not_met")
    marks = marks_of(candidates[best], reported)
    statement = _statement(verdict, tests, candidates[best], reported, test is not None, level, look, marks)
    return Certificate(
        verdict,
        candidates[best],
        best,
        tests,
        "tune" if test is None else "test",
        reported.n,
        level,
        alpha,
        look,
        len(candidates),
        tuple(done),
        tuple(passed),
        marks,
        statement,
    )


_NOT_HELD_OUT: dict[str, Any] = {
    "method": "never",
    "p_value": None,
    "passed": False,
    "certified": False,
    "needs_more": "never",
    "reason": "nothing is held out: the policy was tuned on these questions; use --test-share 0.3",
}


def marks_of(policy: Policy, outcomes: Outcomes) -> tuple[str, ...]:
    """Marks that follow the numbers of a policy, over all its routes."""
    return tuple(sorted({mark for arm, budget in policy.readings(outcomes) for mark in outcomes.marks_of(arm, budget)}))


def _order(candidates: Sequence[Policy], tune: Outcomes, targets: Sequence[Target], terms: Terms) -> list[int]:
    """Candidates from most to least slack on the tune questions; ties keep the given order."""
    terms = replace(terms, alpha=1.0)  # only p-values are wanted, not how many more questions would pass

    def key(index: int) -> tuple[float, float, int]:
        policy = candidates[index]
        d = decide(tune, policy)
        results = [_test(target, tune, policy, d, terms) for target in targets]
        p = max(1.0 if r.p_value is None else r.p_value for r in results)
        return p, -min(r.slack for r in results), index

    if len(candidates) == 1:
        return [0]
    return sorted(range(len(candidates)), key=key)


def _test(target: Target, outcomes: Outcomes, policy: Policy, d: Decisions, terms: Terms) -> _Result:
    """The test without value and interval: on all questions of the target, a conjunction over datasets for worst."""
    if _needs_seconds(target, terms.cost) and ESTIMATED in marks_of(policy, outcomes):
        return _never("its latency is estimated, not measured: it can be met, never certified")
    results = []
    for part, where in split_selector(target, outcomes, terms.datasets):
        if not where.size:
            return _never(f"no question of {part.dataset!r} is among the test questions")
        taken, decided = (outcomes, d) if where.size == outcomes.n else (outcomes.take(where), d.take(where))
        deadline = policy.deadline if terms.deadline is None else terms.deadline
        risk = restate(part, taken, policy, decided, cost=terms.cost, deadline=deadline)
        results.append(_never(risk.reason) if isinstance(risk, Untestable) else _test_risk(risk, taken, terms.alpha))
    if len(results) == 1:
        return results[0]
    return _conjunction(results, terms.alpha)


def _never(reason: str) -> _Result:
    return _Result("never", None, "never", reason)


def _conjunction(results: Sequence[_Result], alpha: float) -> _Result:
    p_values = [r.p_value for r in results if r.p_value is not None]
    if len(p_values) < len(results):
        return next(r for r in results if r.p_value is None)
    failed = [r.needs_more for r in results if r.p_value is not None and r.p_value > alpha]
    more = sum(n for n in failed if isinstance(n, int))
    needs: NeedsMore = "never" if "never" in failed else more or None
    method: Method = "conservative" if any(r.method == "conservative" for r in results) else "binomial"
    reason = f"passes in {len(results) - len(failed)} of {len(results)} datasets"
    return _Result(method, max(p_values), needs, reason, min(r.slack for r in results))


def _test_risk(risk: Risk, outcomes: Outcomes, alpha: float) -> _Result:
    """Test that the mean loss is below the limit; the losses of a group are one block."""
    share = metrics.mean(risk.loss, outcomes.weight)
    slack = risk.limit - share
    exactly = risk.binary and outcomes.unweighted and independent(outcomes)
    if risk.always_holds:
        return _Result("binomial" if exactly else "conservative", 0.0, None, "no question can break it", slack)
    if exactly:
        k, n = int(risk.loss.sum()), outcomes.n
        p = exact.binomial_test_at_most(k, n, risk.limit)
        reason = f"exact binomial test: {k} of {n} break it, at most {risk.limit:.4g} of all may"
        total = exact.questions_needed(k, n, risk.limit, alpha) if p > alpha else None
    else:
        capacity = capacities(outcomes)
        lost = float((risk.loss * outcomes.weight).sum())
        p = exact.bounded_test_at_most(lost, capacity, risk.limit)
        reason = f"conservative bound for bounded values ({_why_conservative(risk, outcomes, capacity)})"
        factor = exact.bounded_needed(lost, capacity, risk.limit, alpha) if p > alpha else None
        total = None if factor is None else math.ceil(outcomes.n * factor)
    method: Method = "binomial" if exactly else "conservative"
    if p <= alpha:
        return _Result(method, p, None, reason, slack)
    if total is None:
        return _Result(method, p, "never", f"{reason}; never at this rate", slack)
    return _Result(method, p, max(total - outcomes.n, 1), reason, slack)


def _why_conservative(risk: Risk, outcomes: Outcomes, capacity: NDArray[np.float64]) -> str:
    if not risk.binary:
        return "a mean, not a share"
    if not independent(outcomes):
        return f"{outcomes.n} questions in {capacity.size} groups that count as one draw each"
    return "questions differ in weight"


def _needs_seconds(target: Target, cost: Cost | None) -> bool:
    return target.is_latency or (target.metric == "cost" and cost is not None and cost.second > 0)


def _value(target: Target, score: Evaluation, outcomes: Outcomes) -> tuple[float, bool, NDArray[np.int64] | None]:
    """Value of the metric, whether it is met, and the questions that it is the value of (None without any)."""
    least, value, of = math.inf, math.nan, None
    for part, where in split_selector(target, outcomes):
        if not where.size:
            continue
        here = part.value_of(score)
        # macro F1 has no value in a dataset without a fixed label set, which `worst` passes over as `Target` does
        if target.worst and math.isnan(here) and not target.is_latency:
            continue
        if of is None or part.slack(here) < least:
            least, value, of = part.slack(here), here, where
    return value, of is not None and least >= 0, of


def _statement(
    verdict: Verdict,
    tests: Sequence[TargetTest],
    policy: Policy,
    outcomes: Outcomes,
    held_out: bool,
    level: float,
    look: int,
    marks: Sequence[str],
) -> str:
    """One paragraph: the verdict, what it is about, and what would make it more."""
    questions = f"{outcomes.n} {'test' if held_out else 'tune'} questions"
    if not tests:
        return f"No target was set, so there is nothing to certify; the numbers are from {questions}."
    load = int(outcomes.concurrency[outcomes.arm_index(policy.arm)])
    at = f"at {load} requests in flight" if load else "at the load at which they were collected (not recorded)"
    about = f"It is about questions like these {outcomes.n}, drawn independently, {at}."
    if policy.deadline is not None:
        about += (
            f" It takes for granted that the gateway keeps the deadline of {policy.deadline:g} s, and reads a thought "
            "that it closes as at the largest collected budget that ends in time."
        )
    if marks:
        about += f" The numbers are {' and '.join(marks)}."
    if verdict == "certified":
        paid = f" (look {look} at this test split)" if look > 1 else ""
        return f"Certified at level {level:.0%} on {questions}{paid}: every target passes its test. {about}"
    if verdict == "not_met":
        broken = ", ".join(str(t.target) for t in tests if not t.met)
        return f"Not met on {questions}: {broken}. {about}"
    if not held_out:
        return f"Met on {questions}, on which the policy was tuned: expect less on new ones. {about}"
    hints = [_hint(t) for t in tests if not t.passed]
    return f"Met on {questions}, not certified: {'; '.join(hints) or 'see each target'}. {about}"


def _hint(test: TargetTest) -> str:
    if isinstance(test.needs_more, int):
        return f"{test.target} needs about {test.needs_more} more test questions at this rate"
    return f"{test.target}: {test.reason}"

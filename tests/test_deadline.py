"""Deadlines: what they do to cached thoughts, the optimum with them against brute force, and `calib optimize`."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from calib import deadline as module
from calib import show
from calib.certify import Terms, check_target, marks_of
from calib.cli import cli
from calib.deadline import as_read, budgets_to_collect, candidates, close_in_time, parse_seconds
from calib.demand import Demand
from calib.errors import CalibError
from calib.gain import gain_over
from calib.optimise import feasible, nearest, optimum, pareto, tabulate
from calib.outcomes import Outcomes
from calib.policy import (
    ON_DEADLINE,
    Cost,
    Evaluation,
    Policy,
    Route,
    candidate_thresholds,
    confidence,
    decide,
    evaluate,
)
from calib.show import policy_line
from calib.spaces import Serving, Spaces
from calib.target import parse_target, parse_targets
from calib.temperature import Temperatures
from calib.tuning import tune
from tests.strategies import outcomes as any_outcomes

FEW = 50  # bootstrap resamples where intervals are not looked at
PRICES = Cost(wrong=2.0, second=0.25, token=0.001)


def case(**changes: object) -> Outcomes:
    """Six questions of a right answer 0, read after 10, 20 and 40 tokens; 40 are reached after 2 s.

    System 1 says 1 (wrong). Read after 10 tokens the thought still says 1, after 20 and 40 it says 0. The last question
    ends by itself after 10 tokens; the one before is never asked for a thought.
    """
    wrong, right = [0.4, 0.6], [0.9, 0.1]
    seconds = np.array([[0.5, 1.0, 2.0]] * 5 + [[0.5, 0.5, 0.5]])
    given_ = {
        "p1": [wrong] * 4 + [[0.05, 0.95], wrong],
        "p2": np.array([[wrong, right, right]] * 5 + [[right] * 3]),
        "tokens": np.array([[10, 20, 40]] * 5 + [[10, 10, 10]]),
        "finished": np.array([[False, False, True]] * 5 + [[True] * 3]),
        "t1": [[0.25, 0.25, 0.25, 3.0, 0.25, 0.25]],
        "t2": seconds[None],
        "answer": np.zeros(6, int),
        "budgets": [10, 20, 40],
    }
    return Outcomes(**{**given_, **changes})


def late(seconds: float, rule: str = "system2", **changes: object) -> Policy:
    return Policy(
        **{"threshold": 0.9, "mix": 1.0, "think_budget": 40, "deadline": seconds, "on_deadline": rule, **changes}
    )


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_late_thought_is_read_at_the_largest_budget_that_ends_in_time():
    # 2.25 s without a deadline; at 1.75 s the thought has had 1.5 s: halfway from 20 tokens (1 s) to 40 (2 s)
    d = decide(case(), late(1.75))
    assert d.latency.tolist() == [1.75, 1.75, 1.75, 3.0, 0.25, 0.75]
    assert d.tokens.tolist() == [30, 30, 30, 0, 0, 10]
    assert d.closed.tolist() == [True, True, True, True, False, False]
    assert d.degraded.tolist() == [False, False, False, True, False, False]  # System 1 alone took all of the time
    assert d.choice.tolist() == [0, 0, 0, 1, 1, 0]
    assert d.thinks.tolist() == [True, True, True, True, False, True]
    # 0.8 s: 0.55 s of thought, read at 10 tokens and still wrong; a tenth of the way to 20 tokens
    d = decide(case(), late(0.8))
    assert d.choice.tolist() == [1, 1, 1, 1, 1, 0]
    assert d.tokens[:3] == pytest.approx([11, 11, 11])


def test_before_the_first_budget_nothing_is_known_and_system_1_answers():
    d = decide(case(), late(0.5, mix=0.5))
    assert d.degraded.tolist() == [True, True, True, True, False, True]
    assert d.latency.tolist() == [0.5, 0.5, 0.5, 3.0, 0.25, 0.5]
    assert d.tokens.tolist() == [5, 5, 5, 0, 0, 5]  # half of the 0.5 s that 10 tokens take
    assert d.p[0].tolist() == [0.4, 0.6]  # System 1's own, not a mix


def test_a_thought_that_ends_exactly_at_the_deadline_is_in_time():
    d = decide(case(), late(2.25))
    assert not d.closed[:3].any()
    assert d.latency[0] == 2.25
    assert decide(case(), late(math.nextafter(2.25, 0))).closed[0]


def test_system_1_answers_every_closed_thought_where_the_policy_says_so():
    d = decide(case(), late(1.75, "system1"))
    assert d.closed.tolist() == d.degraded.tolist() == [True, True, True, True, False, False]
    assert d.choice.tolist() == [1, 1, 1, 1, 1, 0]
    assert d.latency.tolist() == decide(case(), late(1.75)).latency.tolist()
    assert d.tokens.tolist() == decide(case(), late(1.75)).tokens.tolist()


def test_metrics_by_hand():
    e = evaluate(case(), late(1.75))
    # right: the first three by 20 tokens, the last by its whole thought
    assert (e.accuracy, e.think_rate) == (4 / 6, 5 / 6)
    assert e.tokens == pytest.approx((3 * 30 + 10) / 6)
    assert e.mean == pytest.approx((3 * 1.75 + 3.0 + 0.25 + 0.75) / 6)
    assert (e.p50, e.p90) == (1.75, 3.0)


def test_a_closed_thought_has_the_temperature_of_a_cut_one():
    cut = Temperatures.read({"cut": {"*": 2.0}})
    d = decide(case(), late(1.75, temperatures=cut))
    plain = decide(case(), late(1.75))
    expected = cut.system2(np.array([[0.9, 0.1]]), np.array([False]), np.array(["choice"]), np.array([2]))[0]
    assert d.p[0] == pytest.approx(expected)
    assert plain.p[0].tolist() == [0.9, 0.1]
    assert d.p[5].tolist() == plain.p[5].tolist()  # this one ended by itself


# --- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10, 20, 40])
def test_seconds_that_a_deadline_needs_and_nobody_knows_are_an_error(budget):
    o = case()
    t2 = o.t2.copy()
    t2[0, 1, o.budget_index(budget)] = np.nan
    o = replace(o, t2=t2)
    with pytest.raises(CalibError, match=rf"1 of 6 questions .*'1'.*think_budget {budget}.*calib collect .*base=URL"):
        decide(o, late(1.75))
    assert module.unknown(o, "base", 40) is not None
    assert decide(o, late(1.75, threshold=0.5)).latency[1] == 0.25  # it does not think, so nobody asks
    if budget < 40:  # in time at the budget itself, so no smaller one is needed
        assert not decide(o, late(2.5)).closed[1]


def test_unknown_seconds_of_system_1_are_an_error_too():
    with pytest.raises(CalibError, match="deadline 1.75 s: the seconds of 6 of 6|of 5 of 6"):
        decide(case(t1=np.full((1, 6), np.nan)), late(1.75))


def test_a_thought_that_failed_at_an_unknown_time_stays_a_failure_and_takes_until_the_deadline():
    o = case()
    p2, t2 = o.p2.copy(), o.t2.copy()
    p2[0, 2], t2[0, 0, 2] = np.nan, np.nan
    for rule in ON_DEADLINE:
        d = decide(replace(o, p2=p2, t2=t2), late(1.75, rule))
        assert (d.choice[0], d.latency[0], d.closed[0], d.degraded[0]) == (-1, 1.75, False, False)
    known = replace(o, p2=p2)  # it failed after 2.25 s: at 1.75 s it was still a thought, that of 20 tokens
    assert decide(known, late(1.75)).choice[0] == 0


def test_a_reading_that_failed_in_time_is_no_answer():
    p2 = case().p2.copy()
    p2[0, 1] = np.nan
    assert decide(case(p2=p2), late(1.75)).choice.tolist() == [-1, 0, 0, 1, 1, 0]


# --- properties -------------------------------------------------------------------------------------------------------

seconds_ = st.one_of(st.floats(0.005, 15), st.sampled_from([0.01, 0.05, 0.86, 1.66]))
rules = st.sampled_from(ON_DEADLINE)


def by_the_rule(o: Outcomes, policy: Policy, i: int) -> tuple[int, float, float, bool, bool]:
    """Choice, latency, tokens, closed, degraded of one question, in plain words."""
    assert policy.deadline is not None
    a, b, c = o.arms.index(policy.arm), o.budgets.tolist().index(policy.think_budget), int(o.n_options[i])
    p1, t1, end = o.p1[i, :c], float(o.t1[a, i]), policy.deadline
    if not o.can_think[i] or p1.max() >= policy.threshold:
        return int(p1.argmax()), t1, 0.0, False, False

    def answer(k: int) -> int:
        p = (1 - policy.mix) * p1 + policy.mix * o.p2[i, k, :c]
        return -1 if np.isnan(p).any() else int(p.argmax())

    times = [t1 + float(t) for t in o.t2[a, i, : b + 1]]
    if times[b] <= end:
        return answer(b), times[b], float(o.tokens[i, b]), False, False
    in_time = [k for k in range(b) if times[k] <= end]
    if in_time:
        k = in_time[-1]
        x0, y0 = times[k], float(o.tokens[i, k])
    else:
        k = -1
        x0, y0 = t1, 0.0
    tokens = float(np.interp(end, [x0, times[k + 1]], [y0, float(o.tokens[i, k + 1])])) if end > t1 else 0.0
    degraded = k < 0 or policy.on_deadline == "system1"
    return (int(p1.argmax()) if degraded else answer(k)), max(t1, end), tokens, True, degraded


@given(any_outcomes(), st.floats(0, 1.1), st.floats(0, 1), seconds_, rules)
def test_decide_equals_the_rule_question_by_question(o, threshold, mix, end, rule):
    policy = Policy(threshold, mix, int(o.budgets[-1]), o.arms[-1], deadline=end, on_deadline=rule)
    d = decide(o, policy)
    for i in range(o.n):
        choice, latency, tokens, closed, degraded = by_the_rule(o, policy, i)
        assert (d.choice[i], d.latency[i], d.closed[i], d.degraded[i]) == (choice, latency, closed, degraded)
        assert d.tokens[i] == pytest.approx(tokens)


@given(any_outcomes(), st.floats(0, 1.1), st.floats(0, 1), seconds_, rules)
def test_no_answer_is_later_than_the_deadline_or_system_1(o, threshold, mix, end, rule):
    policy = Policy(threshold, mix, int(o.budgets[-1]), o.arms[-1], deadline=end, on_deadline=rule)
    d, free = decide(o, policy), decide(o, replace(policy, deadline=None))
    assert (d.latency <= np.maximum(o.t1[-1], end)).all()
    assert (d.latency <= free.latency).all()
    assert ((d.tokens <= free.tokens) & (d.tokens >= 0)).all()
    assert (d.thinks == free.thinks).all()
    same = ~d.closed
    np.testing.assert_array_equal(d.p[same], free.p[same])
    np.testing.assert_array_equal(d.latency[same], free.latency[same])
    assert (d.closed | ~d.degraded).all()
    np.testing.assert_array_equal(d.p[d.degraded], o.p1[d.degraded])
    assert (d.closed == (d.thinks & (free.latency > end))).all()


@given(any_outcomes(), st.floats(0, 1.1), st.floats(0, 1), rules)
def test_without_a_deadline_that_matters_nothing_changes(o, threshold, mix, rule):
    plain = Policy(threshold, mix, int(o.budgets[-1]), o.arms[0])
    assert replace(plain, deadline=math.inf, on_deadline=rule) == plain
    free = decide(o, plain)
    assert not free.closed.any()
    assert not free.degraded.any()
    d = decide(o, replace(plain, deadline=1e6, on_deadline=rule))
    for name in ("p", "thinks", "latency", "tokens", "closed", "degraded"):
        np.testing.assert_array_equal(getattr(d, name), getattr(free, name))


@given(any_outcomes(), st.floats(0, 1.1), seconds_, seconds_, rules)
def test_a_later_deadline_never_closes_more(o, threshold, one, two, rule):
    low, high = sorted([one, two])
    policy = Policy(threshold, 0.5, int(o.budgets[-1]), o.arms[0], deadline=low, on_deadline=rule)
    early, later = decide(o, policy), decide(o, replace(policy, deadline=high))
    assert (early.closed >= later.closed).all()
    assert (early.latency <= later.latency).all()
    assert (early.tokens <= later.tokens + 1e-9).all()


@given(any_outcomes(), st.floats(0, 1.1), seconds_, rules)
def test_routes_keep_the_deadline(o, threshold, end, rule):
    routes = {"dataset=a": Route(threshold=0.5), "n_options=2": Route(think_budget=int(o.budgets[0]))}
    policy = Policy(threshold, 0.5, int(o.budgets[-1]), routes=routes, deadline=end, on_deadline=rule)
    d = decide(o, policy)
    for i in range(o.n):
        alone = policy.routed(dataset=o.dataset[i], kind=o.kind[i], n_options=int(o.n_options[i]))
        assert (alone.deadline, alone.on_deadline) == (end, rule)
        one = decide(o.take([i]), alone)
        for name in ("p", "thinks", "latency", "tokens", "closed", "degraded"):
            np.testing.assert_array_equal(getattr(one, name)[0], getattr(d, name)[i])


@given(any_outcomes(), st.floats(0, 1), seconds_, rules)
def test_as_read_gives_the_same_probabilities_without_a_deadline(o, mix, end, rule):
    policy = Policy(0.7, mix, int(o.budgets[-1]), o.arms[-1], deadline=end, on_deadline=rule)
    view = as_read(o, policy.arm, policy.think_budget, end, rule)
    np.testing.assert_array_equal(decide(view, replace(policy, deadline=None)).p, decide(o, policy).p)


# --- the knob ---------------------------------------------------------------------------------------------------------


@given(seconds_, rules)
def test_a_deadline_survives_json(end, rule):
    policy = Policy(deadline=end, on_deadline=rule)
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert hash(policy) == hash(Policy(deadline=end, on_deadline=rule))


def test_a_policy_without_a_deadline_does_not_speak_of_one():
    assert not {"deadline", "on_deadline"} & set(Policy().to_dict())
    assert Policy(on_deadline="system1") == Policy() == Policy.from_dict({"deadline": None})
    assert hash(Policy(deadline=2)) != hash(Policy())
    assert "deadline" not in policy_line(Policy())
    assert "deadline 8.00 s, then System 1" in policy_line(Policy(deadline=8, on_deadline="system1"))


@pytest.mark.parametrize(
    "values",
    [
        *({"deadline": bad} for bad in (0, -1, True, "8s", float("nan"), [8])),
        *({"deadline": 8, "on_deadline": bad} for bad in ("wait", 1, None)),
    ],
)
def test_what_is_no_deadline_is_refused(values):
    with pytest.raises(CalibError, match="deadline"):
        Policy.from_dict(values)


@pytest.mark.parametrize(("text", "expected"), [("8s", 8.0), (" 800ms", 0.8), ("1.5 s", 1.5), ("1e3ms", 1.0)])
def test_seconds_are_read(text, expected):
    assert parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["8", "", "s", "0s", "-1s", "nans", "infs", "8h", "8s9"])
def test_other_times_are_refused_with_what_to_write(text):
    with pytest.raises(CalibError, match=r"--deadline 8?s? ?.*--deadline \S+ms|--deadline 8s"):
        parse_seconds(text)


def test_candidates_by_hand():
    o = case()
    # thinking takes 2.25 s four times (5 s with the slow System 1 once) and 0.75 s once
    assert candidates(o, "base", 40, [4.0, 0.01]) == [0.0095, 2.25, 3.8, 5.0]


def test_budgets_to_collect_are_powers_of_two_that_the_closed_thoughts_reach():
    o = case(tokens=np.array([[100, 200, 400]] * 6))
    cut = close_in_time(o, 0, 2, 0.5, "system2")
    assert cut.unread.tolist() == [True] * 6
    assert cut.tokens.tolist() == [50, 50, 50, 0, 50, 50]
    assert budgets_to_collect(cut.tokens[cut.unread]) == [16, 32]  # nine in ten reach 25 tokens, one half 50
    assert budgets_to_collect([]) == budgets_to_collect([0.5, 0.2]) == []


def test_warnings_say_who_keeps_it_and_what_to_collect():
    o = case(tokens=np.array([[100, 200, 400]] * 6))
    assert module.warnings(o, Policy(0.9, 1.0, 40)) == []
    kept, more = module.warnings(o, late(0.5))
    assert "only the gateway keeps the deadline of 0.5 s" in kept
    assert "of 5 of 5 thoughts" in more
    assert more.endswith("calib collect QUESTIONS --budgets 10,16,20,32,40")  # one in ten reach fewer than 20, half 50
    assert len(module.warnings(o, late(1.75, threshold=0.9, deadline=2.0))) == 2  # one of four: System 1 was too slow
    assert len(module.warnings(case(t1=np.full((1, 6), 0.25)), late(1.75))) == 1
    routes = {"dataset=all": Route(threshold=0.0)}
    assert len(module.warnings(o, late(0.5, routes=routes))) == 1  # nobody thinks there, so nothing is closed


# --- the optimum against brute force ----------------------------------------------------------------------------------

DEADLINES = (0.06, 1.2)
TARGETS = [
    "",
    "p90<=1.2s",
    "p99<1.3s, accuracy>=30%",
    "mean<0.9s",
    "think_rate<60%, p50<=500ms",
    "tokens<7, p95<=2.6s",
    "cost<1.2",
    "p90[a]<1.2s, think_rate[worst]<=80%",
    "p99[worst]<=500ms",
]


@st.composite
def timed(draw: st.DrawFn) -> Outcomes:
    """Few questions with coarse numbers, each budget with seconds of its own, so that ties of every sort are common."""
    o = draw(any_outcomes(max_n=5, max_width=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    t2 = rng.integers(0, 5, o.t2.shape) / 2
    return replace(o, t2=np.sort(t2, axis=-1) if draw(st.booleans()) else t2)


def every_policy(o: Outcomes) -> list[tuple[Policy, Evaluation]]:
    able = o.p1[o.can_think]
    thresholds = candidate_thresholds(confidence(able)) if len(able) else [0.0]
    lead1, lead2 = (p[..., :, None] - p[..., None, :] for p in (o.p1[:, None], o.p2))
    with np.errstate(all="ignore"):
        ties = lead1 / (lead1 - lead2)
    ends = np.unique(np.concatenate([[0, 1], ties[(ties > 0) & (ties < 1)]]))
    mixes = np.unique(np.concatenate([ends, ends[:-1] + np.diff(ends) / 2])).tolist()
    deadlines = [(None, "system2"), *((d, rule) for d in DEADLINES for rule in ON_DEADLINE)]
    return [
        (policy, evaluate(o, policy, by_dataset=True, cost=PRICES))
        for threshold in thresholds
        for mix in mixes
        for budget in o.budgets.tolist()
        for arm in o.arms
        for end, rule in deadlines
        for policy in [Policy(float(threshold), float(mix), budget, arm, deadline=end, on_deadline=rule)]
    ]


def spaces(o: Outcomes, targets: str, metric: str) -> Spaces:
    up = metric in ("accuracy", "skill")
    demand = Demand(
        parse_targets(targets) if targets else (),
        maximize=metric if up else None,
        minimize=None if up else metric,
        cost=PRICES,
        deadlines=DEADLINES,
        test_share=0,
    )
    return Spaces(Serving(o, demand), demand, o)


def best(entries: list[tuple[Policy, Evaluation]], targets, metric: str) -> float:
    sign = 1 if metric in ("accuracy", "skill") else -1
    values = [sign * getattr(e, metric) for _, e in entries if all(t.met(e) for t in targets)]
    return sign * max(values) if values else math.nan


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=1e-11, abs=1e-12)


@given(timed(), st.sampled_from(TARGETS), st.sampled_from(["accuracy", "p90", "mean", "tokens", "cost"]))
@settings(max_examples=25)
def test_the_optimum_is_that_of_brute_force(o, text, metric):
    targets = parse_targets(text) if text else ()
    entries = every_policy(o)
    found = spaces(o, text, metric)
    assert same(found.best.objective, best(entries, targets, metric))
    plain = [(policy, e) for policy, e in entries if policy.deadline is None]
    assert same(found.without_deadline.objective, best(plain, targets, metric))
    if found.best.policy is None:
        return
    scored = evaluate(o, found.best.policy, by_dataset=True, cost=PRICES)
    assert all(target.met(scored) for target in targets)
    # no equally good policy is cheaper, and a deadline is there only where it does better or costs less
    good = [
        (p, e) for p, e in entries if all(t.met(e) for t in targets) and same(getattr(e, metric), found.best.objective)
    ]
    assert scored.mean <= min(e.mean for _, e in good) + 1e-12
    if found.best.policy.deadline is not None:
        costs = [(e.mean, e.tokens, e.think_rate) for p, e in good if p.deadline is None]
        assert all((scored.mean, scored.tokens, scored.think_rate) < cost for cost in costs)


@given(timed(), st.sampled_from([*TARGETS[1:], "accuracy>=90%, p90<300ms", "accuracy>=90%, p50<300ms, tokens<3"]))
@settings(max_examples=15)
def test_prices_and_nearest_are_those_of_brute_force(o, text):
    targets, entries = parse_targets(text), every_policy(o)
    found = spaces(o, text, "accuracy")
    if found.best.policy is not None:
        for price in found.prices(found.best):
            rest = [target for target in targets if target != price.target]
            assert same(price.objective, best(entries, rest, "accuracy"))
        return
    close = found.nearest()
    violation = [
        sum(max(0.0, -t.margin(e)) / (abs(t.value) or 1.0) for t in targets)
        for _, e in entries
        if not any(math.isnan(t.value_of(e)) for t in targets)
    ]
    assert close.violation == pytest.approx(min(violation), abs=1e-9)
    for relaxation, target in zip(close.relaxations, targets, strict=True):
        rest = [other for other in targets if other != target]
        values = [target.value_of(e) for _, e in entries if all(other.met(e) for other in rest)]
        known = [value for value in values if not math.isnan(value)]
        if relaxation.needs is None:
            assert not known
        else:
            assert relaxation.needs == pytest.approx(min(known) if target.upper else max(known), abs=1e-12)


@given(
    timed(), st.sampled_from(DEADLINES), rules, st.sampled_from(["accuracy[a]>=40%, p90<2s", "ece<0.3", "brier<=0.8"])
)
@settings(max_examples=30)
def test_the_table_under_a_deadline_is_what_evaluate_says(o, end, rule, text):
    arm = o.arms[-1]
    table = tabulate(o, [arm], deadline=end, on_deadline=rule)
    columns = {name: table.latency(name)[0] for name in ("mean", "p50", "p90", "p99")}
    for b, budget in enumerate(table.budgets):
        for k, threshold in enumerate(table.thresholds.tolist()):
            policy = Policy(threshold, float(table.mix[b, k]), budget, arm, deadline=end, on_deadline=rule)
            e = evaluate(o, policy)
            assert e.accuracy == pytest.approx(table.accuracy[b, k], abs=1e-12)
            assert e.tokens == pytest.approx(table.tokens[b, k], rel=1e-12)
            assert e.think_rate == pytest.approx(table.think_rate[k], rel=1e-12)
            assert all(same(getattr(e, name), column[b, k]) for name, column in columns.items())
    for point in pareto(table, "p90", "accuracy"):
        e = evaluate(o, point.policy)
        assert point.policy.deadline == end
        assert (same(e.p90, point.x), same(e.accuracy, point.y)) == (True, True)
    assume("[a]" not in text or "a" in o.dataset_names)
    targets = parse_targets(text)
    for policy in feasible(table, targets):
        assert all(target.met(evaluate(o, policy, by_dataset=True)) for target in targets)


def test_one_arm_at_a_time():
    o = case(arms=("base", "mtp"), t1=np.full((2, 6), 0.1), t2=np.ones((2, 6, 3)))
    with pytest.raises(CalibError, match="one arm at a time"):
        tabulate(o, deadline=1.0)
    with pytest.raises(CalibError, match="on_deadline"):
        tabulate(o, ["base"], deadline=1.0, on_deadline="both")


# --- tune -------------------------------------------------------------------------------------------------------------


def world(
    n: int = 900, *, budgets=(64, 256, 1024, 4096), seed: int = 0, rate: float = 200.0, estimated: bool = False
) -> Outcomes:
    """Thinking helps, more so when it ends; its length has a long tail."""
    rng = np.random.default_rng(seed)
    top = rng.uniform(0.35, 1, n)
    answer = rng.integers(0, 2, n)
    said = np.where(rng.random(n) < top, answer, 1 - answer)
    length = rng.lognormal(5.5, 1.2, n).round()
    ladder = np.array(budgets)
    used = np.minimum(length[:, None], ladder)
    luck = rng.random((n, 1))
    right = luck < 0.55 + 0.4 * used / length[:, None]
    chosen = np.where(right, answer[:, None], 1 - answer[:, None])
    return Outcomes(
        p1=np.where(np.arange(2) == said[:, None], np.maximum(top, 0.51)[:, None], 1 - np.maximum(top, 0.51)[:, None]),
        p2=np.where(np.arange(2) == chosen[..., None], 0.95, 0.05),
        tokens=used,
        finished=length[:, None] <= ladder,
        t1=np.full((1, n), 0.05),
        t2=(used / rate + 0.02)[None],
        answer=answer,
        budgets=ladder,
        split_position=rng.random(n),
        concurrency=[8],
        estimated=np.full((1, 1 + len(ladder)), estimated),
    )


def demand(*targets: str, **options: object) -> Demand:
    return Demand(parse_targets(targets) if targets else (), **{"resamples": FEW, **options})


def test_a_deadline_buys_accuracy_under_a_limit_on_the_tail():
    o = world(1500)
    plain, found = (tune(o, demand("p99<4s", deadlines=d)) for d in ((), (2.0, 3.9)))
    assert found.policy is not None
    assert found.policy.deadline == 3.9
    assert plain.policy is not None
    assert plain.policy.deadline is None
    assert found.best.objective > plain.best.objective + 0.005
    assert found.without_deadline is not None
    assert found.without_deadline.objective == plain.best.objective
    assert found.studied.policy == plain.best.policy
    assert found.verdict == "certified"
    assert found.certificate is not None
    assert found.certificate.policy == found.policy
    assert "keeps the deadline of 3.9 s" in found.certificate.statement
    assert any("serve.env" in text for text in found.warnings)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["policy"]["deadline"] == 3.9
    assert document["tune"]["p99"] == 3.9
    assert document["test"]["p99"]["value"] <= 3.9
    assert document["deadline"]["gain"] == pytest.approx(found.best.objective - plain.best.objective)
    assert document["deadline"]["without"]["policy"] == plain.best.policy.to_dict()
    assert {(one["deadline"], one["on_deadline"]) for one in document["deadline"]["tried"]} == {
        (d, rule) for d in (2.0, 3.9) for rule in ON_DEADLINE
    }
    decisions = decide(found.test, found.policy)
    assert document["deadline"]["test"]["closed"] == pytest.approx(decisions.closed.mean())
    assert document["deadline"]["seconds"] == 3.9
    assert "deadline" not in plain.to_dict()
    assert document["baselines"] == plain.to_dict()["baselines"] | {
        name: row | {"difference": document["baselines"][name]["difference"]}
        for name, row in plain.to_dict()["baselines"].items()
    }


def test_auto_tries_a_little_below_the_limits_and_the_percentiles_of_the_seconds():
    o = world()
    found = tune(o, demand("p99<4s", "p50<10s", deadlines="auto"))
    tried = {one.deadline for one in found.tried}
    assert {3.8, 9.5} <= tried
    assert tried == set(candidates(found.tune, "base", 4096, [4.0, 10.0])) & tried
    assert found.policy is not None
    assert found.policy.deadline == 3.8


def idle(seed: int, n: int = 700) -> Outcomes:
    """A world in which no deadline gains: every budget is right on the same share of the questions, by its own luck."""
    o = world(n, seed=seed)
    right = np.random.default_rng(seed + 9999).random(o.tokens.shape) < 0.8
    chosen = np.where(right, o.answer[:, None], 1 - o.answer[:, None])
    return replace(o, p2=np.where(np.arange(2) == chosen[..., None], 0.95, 0.05))


def test_auto_takes_no_deadline_whose_gain_could_be_chance():
    left, larger = 0, 0
    for seed in range(6):
        o = idle(seed)
        found = tune(o, demand("p90<6s", deadlines="auto"))
        tried = sorted({one.deadline for one in found.tried})
        asked = tune(o, demand("p90<6s", deadlines=tuple(tried)))
        plain = tune(o, demand("p90<6s"))
        assert found.policy == plain.policy
        assert found.best.policy == plain.best.policy == found.without_deadline.policy
        assert found.prices == plain.prices
        assert found.margin_cost == plain.margin_cost
        document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert document["deadline"]["seconds"] is None
        assert document["deadline"]["gain"] == 0
        larger += asked.best.objective > plain.best.objective  # what is asked for by its seconds is taken
        if found.left_out is None:
            continue
        left += 1
        out = document["deadline"]["left_out"]
        assert out["gain"] > 0
        assert not found.left_out.gain.beyond_noise
        assert Policy.from_dict(out["policy"]) == found.left_out.policy
        (text,) = [text for text in found.warnings if "was left out" in text]
        assert f"a deadline of {out['policy']['deadline']:g}s was left out" in text
        assert f"{100 * out['gain']:.1f} points [{100 * out['interval'][0]:.1f}, " in text
    assert left >= 2
    assert larger >= 2


@pytest.mark.parametrize(
    ("metric", "limit", "taken"),
    [("p90", 80, True), ("p90", 90, False), ("mean", 86, True), ("mean", 92, False), ("tokens", 80, True)],
)
def test_auto_asks_of_every_objective_that_its_gain_is_beyond_chance(metric, limit, taken):
    o, asks = world(1500, budgets=(4096,)), {"minimize": metric, "margin": False}
    found = tune(o, demand(f"accuracy>={limit}%", deadlines="auto", **asks))
    seconds = tuple({one.deadline for one in found.tried})
    plain, free = found.without_deadline, tune(o, demand(f"accuracy>={limit}%", deadlines=seconds, **asks)).best
    assert free.policy.deadline is not None
    gain = gain_over(
        *(found.tune, decide(found.tune, free.policy), decide(found.tune, plain.policy), metric),
        maximize=False,
        rng=np.random.default_rng(0),
        resamples=FEW,
    )
    assert gain.value > 0
    assert gain.value == pytest.approx(plain.objective - free.objective)
    assert gain.beyond_noise is taken
    assert found.best.policy == (free.policy if taken else plain.policy)
    assert (found.left_out is None) is taken
    assert found.deadline_reason == ("gain" if taken else None)


def test_auto_takes_a_deadline_where_nothing_is_feasible_without():
    o = world()
    targets = ("accuracy>=88%", "p99<4s")
    assert tune(o, demand(*targets, margin=False)).policy is None
    found = tune(o, demand(*targets, deadlines="auto", margin=False))
    assert found.policy is not None
    assert found.policy.deadline == 3.8
    assert found.left_out is None
    assert found.deadline_reason == found.to_dict()["deadline"]["reason"] == "feasible"
    assert tune(o, demand(*targets, deadlines=(3.8,), margin=False)).deadline_reason is None  # it was asked for


def test_auto_takes_a_deadline_untested_where_no_policy_leaves_the_margin_without(capsys):
    o = world()
    plain, found = (tune(o, demand("accuracy>=80%", "p99<5s", deadlines=d)) for d in ((), "auto"))
    assert plain.best.policy is not None
    assert any("no policy leaves the whole margin" in text for text in plain.warnings)
    assert not any("no policy leaves the whole margin" in text for text in found.warnings)
    assert found.policy.deadline == 4.75
    assert found.deadline_gain is found.left_out is None
    document = found.to_dict()
    assert document["deadline"]["reason"] == "margin"
    show.tuned(found, document, "calib.db")
    assert (
        "without a deadline no policy leaves as much of the margin: what one gains was not" in capsys.readouterr().out
    )


def test_no_deadline_wins_where_none_helps():
    found = tune(world(), demand(deadlines=(1.0, 2.0)))
    assert found.policy is not None
    assert found.policy.deadline is None
    document = found.to_dict()
    assert len(document["deadline"]["tried"]) == 4
    assert document["deadline"]["gain"] == 0
    assert document["deadline"]["seconds"] is None
    assert document["deadline"]["tune"] is None
    assert tune(world(), demand(deadlines=(1e6,))).tried == ()  # closes nothing, so there is nothing to try


def test_without_a_feasible_policy_the_deadlines_are_in_what_comes_nearest():
    o = world()
    plain, found = (tune(o, demand("accuracy>=85%", "p99<1s", deadlines=d)) for d in ((), (0.9, 3.0)))
    assert plain.nearest is not None
    assert found.policy is None
    assert found.nearest is not None
    assert found.nearest.violation <= plain.nearest.violation
    for better, alone in zip(found.nearest.relaxations, plain.nearest.relaxations, strict=True):
        sign = 1 if alone.target.upper else -1
        assert sign * better.needs <= sign * alone.needs
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["deadline"]["gain"] is None


def test_one_budget_alone_says_which_to_collect():
    o = world(budgets=(4096,))
    found = tune(o, demand("p99<4s", deadlines=(3.9,)))
    assert found.policy is not None
    assert found.policy.on_deadline == "system1"  # both rules are one here, and this one is what was predicted
    assert {one.on_deadline for one in found.tried} == {"system1"}
    (text,) = [text for text in found.warnings if "--budgets" in text]
    assert "--budgets 512,4096" in text  # 200 tokens/s for 3.85 s reach 770


def test_cheapest_keeps_the_deadline_in_the_race():
    o = world()
    found = tune(o, demand("p99<4s", deadlines=(3.9,), cheapest=True))
    best_ = tune(o, demand("p99<4s", deadlines=(3.9,)))
    means = [evaluate(found.tune, policy).mean for policy in (found.policy, best_.policy)]
    assert means[0] <= means[1]


def test_estimated_seconds_are_never_certified_under_a_deadline_either():
    o = world(estimated=True)
    assert tune(o, demand("p99<4s", deadlines=(3.9,))).verdict == "met"
    some = replace(world(), estimated=np.array([[False, True, False, False, False]]))
    assert marks_of(Policy(think_budget=4096), some) == ()
    assert marks_of(Policy(think_budget=4096, deadline=2.0), some) == ("estimated",)  # it says where a thought is cut


def test_a_mean_can_be_tested_under_a_deadline():
    o, rng = world(2000), np.random.default_rng(0)
    policy = Policy(0.9, 0.7, 4096, deadline=3.0)
    with_it, without = (
        check_target(parse_target("mean<2.5s"), o, p, Terms(0.05, resamples=FEW), rng=rng)
        for p in (policy, replace(policy, deadline=None))
    )
    assert (with_it.method, with_it.passed) == ("conservative", True)
    assert (without.method, without.passed) == ("never", False)


def test_the_look_knows_the_smaller_budgets_of_a_deadline():
    o = world()
    looks: list[object] = []

    def ledger(_: str, look: object) -> int:
        looks.append(look)
        return 1

    t2 = o.t2.copy()
    test = np.flatnonzero(o.test_mask(0.3))
    t2[0, test[0], 0] += 1e-6
    for deadlines in ((3.9,), ()):
        for data in (o, replace(o, t2=t2)):
            tune(data, demand("p99<4s", deadlines=deadlines, budgets=[4096]), ledger=ledger)
    assert looks[0] != looks[1]
    assert looks[2] == looks[3]  # without a deadline that budget is not read


def test_a_deadline_on_calibrated_probabilities_is_what_is_served():
    o = world(1500)
    p2 = np.where(o.p2 > 0.5, 0.999, 0.001)  # overconfident, so that a temperature gains
    found = tune(replace(o, p2=p2), demand("p99<4s", deadlines=(3.9,), calibrate="auto", minimize=None))
    assert found.policy is not None
    assert found.policy.deadline == 3.9
    assert found.policy.temperatures is not None
    assert found.best.objective == pytest.approx(evaluate(found.tune, found.best.policy).accuracy)
    plain = optimum(
        tabulate(found.searched, ["base"], deadline=3.9, on_deadline=found.best.policy.on_deadline),
        parse_targets("p99<4s"),
    )
    assert plain.objective == pytest.approx(found.best.objective)


def test_an_arm_without_seconds_is_left_out_and_told():
    o = world()
    two = replace(
        o,
        arms=("base", "mtp"),
        t1=np.repeat(o.t1, 2, 0),
        t2=np.concatenate([o.t2, np.full_like(o.t2, np.nan)]),
        concurrency=[8, 8],
        estimated=np.zeros((2, 5), bool),
    )
    found = tune(two, demand("p99<4s", deadlines=(3.9,)))
    assert {one.arm for one in found.tried} == {"base"}
    assert any("no deadline was tried in one arm" in text and "'mtp'" in text for text in found.warnings)
    with pytest.raises(CalibError, match="--deadline: the seconds of 900 of 900"):
        tune(two, demand(deadlines=(3.9,), arms=["mtp"]))


def test_many_tables_are_made_anew_and_say_the_same(monkeypatch):
    o = world(300)
    kept = tune(o, demand("p99<4s", deadlines="auto")).to_dict()
    monkeypatch.setattr("calib.spaces._KEPT", 0)
    assert tune(o, demand("p99<4s", deadlines="auto")).to_dict() == kept


def test_deadlines_that_are_none_are_refused():
    with pytest.raises(CalibError, match="deadlines must be seconds above 0"):
        demand(deadlines=(0.0,))


def test_nearest_and_front_of_a_table_carry_the_deadline():
    table = tabulate(world(200), deadline=2.0, on_deadline="system1")
    found = nearest(table, parse_targets("accuracy>=99%, p99<3s"))
    assert found.policy is not None
    assert (found.policy.deadline, found.policy.on_deadline) == (2.0, "system1")
    assert {(point.policy.deadline, point.policy.on_deadline) for point in pareto(table)} == {(2.0, "system1")}


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of `world`'s questions with measured seconds."""
    folder = tmp_path_factory.mktemp("deadline")
    o = world(400)
    lines = [
        {
            "dataset": "a",
            "id": str(i),
            "answer": int(o.answer[i]),
            "p1": o.p1[i].tolist(),
            "p2_by_budget": {str(b): o.p2[i, k].tolist() for k, b in enumerate(o.budgets.tolist())},
            "think_tokens": int(o.tokens[i, -1]),
            "finished": bool(o.finished[i, -1]),
            "latency_s1": float(o.t1[0, i]),
            "latency_s2": float(o.t2[0, i, -1]),
            "concurrency": 8,
        }
        for i in range(o.n)
    ]
    file, path = folder / "rows.jsonl", folder / "calib.db"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert CliRunner().invoke(cli, ["import", str(file), "--store", str(path)]).exit_code == 0
    return path


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def test_optimize_prints_and_saves_the_deadline(store):
    result = run("optimize", "--store", store, "--target", "p99<4s", "--deadline", "3.9s,2s", "--trials", 0)
    assert "deadline 3.90 s" in result.output
    assert "worse (tried: 2.00 s, 3.90 s)" in result.output
    assert "the deadline closes the thought of" in result.output
    assert "only the gateway keeps the deadline" in result.output
    auto = run("optimize", "--store", store, "--target", "p99<4s", "--deadline", "auto", "--trials", 0)
    assert "no deadline does better beyond chance (tried: 1.55 s, 3.25 s, 3.80 s, " in auto.output
    assert "warning: a deadline of 3.8s was left out: its gain on the tune questions, 3.6 points [" in auto.stderr
    worth = run("optimize", "--store", store, "--target", "p90<5s", "--deadline", "auto", "--trials", 0).output
    assert "deadline 4.75 s, then System 1" in worth
    assert "without a margin no deadline does better" in worth
    assert "with the margin a deadline gains " in worth
    told = run("optimize", "--store", store, "--deadline", "1000s", "--trials", 0).output
    assert "no deadline does better (tried: none closes a thought)" in told


def test_the_gap_of_a_study_is_to_the_optimum_without_a_deadline(store):
    arguments = ["optimize", "--store", store, "--target", "p99<4s", "--trials", 3, "--json"]
    document = json.loads(run(*arguments, "--deadline", "3.9s").stdout)
    plain = json.loads(run(*arguments).stdout)
    assert document["policy"]["deadline"] == 3.9
    assert document["exact"]["objective"] > plain["exact"]["objective"]
    assert document["study"]["gap"] == plain["study"]["gap"] == 0  # the warm start is the optimum without one
    assert any("the study knows no deadline" in text for text in document["warnings"])
    assert not any("the study knows no deadline" in text for text in plain["warnings"])


def test_evaluate_under_a_deadline(store):
    base = ["evaluate", "--store", store, "--threshold", 0.9]
    document = json.loads(run(*base, "--deadline", "800ms", "--on-deadline", "system1", "--json").stdout)
    assert (document["policy"]["deadline"], document["policy"]["on_deadline"]) == (0.8, "system1")
    assert document["metrics"]["p99"] == 0.8
    assert 0 < document["deadline"]["closed"] == document["deadline"]["degraded"] < 1
    assert "the deadline closes the thought of" in run(*base, "--deadline", "800ms").output
    assert "deadline" not in json.loads(run(*base, "--json").stdout)


def test_a_deadline_that_cannot_be_read_says_what_to_write(store):
    assert (
        "write --deadline 8s or --deadline 8ms" in run("evaluate", "--store", store, "--deadline", "8", code=2).output
    )
    assert "--deadline 8s" in run("optimize", "--store", store, "--deadline", "soon", code=2).output
    assert "without a deadline" in run("evaluate", "--store", store, "--on-deadline", "system1", code=2).output

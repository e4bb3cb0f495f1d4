"""`tune` from end to end: split, search with a margin, candidates, ledger, verdict, document."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib import certify as certify_module
from calib import exact, intervals, risk
from calib.certify import alpha_at_look
from calib.errors import CalibError
from calib.optimise import optimum, tabulate
from calib.outcomes import Outcomes
from calib.policy import Cost, Policy, candidate_thresholds, decide, evaluate
from calib.store import Store
from calib.target import parse_targets
from calib.tuning import Demand, sustainable_rate, throughput, tune
from tests.reports import recorded, simulated
from tests.reports.recorded import CASES
from tests.strategies import outcomes as any_outcomes
from tests.worlds import LATE, World, indifferent, ladder, seven_percent

P90 = parse_targets("p90<1s")
FEW = 50  # bootstrap resamples where intervals are not looked at


def demand(*targets: str, **options: object) -> Demand:
    return Demand(parse_targets(targets) if targets else (), **{"resamples": FEW, **options})


def drawn(seed: int, n: int = 1000, world: World | None = None) -> Outcomes:
    """A law with room inside the limits: thinking helps, and thinking about everything is late on a quarter."""
    world = world or ladder(20, 2, late1=[0.01, 0.03], late2=0.25)
    return world.draw(np.random.default_rng(seed), n)


class Recorder:
    """A ledger that remembers what it was told, and numbers looks as a store does."""

    def __init__(self) -> None:
        self.looks: list[tuple[str, str]] = []

    def __call__(self, split: str, look: object) -> int:
        self.looks.append((split, json.dumps(look, sort_keys=True, allow_nan=False)))
        return 1 + list(dict.fromkeys(self.looks)).index(self.looks[-1])


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> list[list[Policy]]:
    """What `tune` hands to `certify`, run by run."""
    seen: list[list[Policy]] = []
    original = certify_module.certify

    def spy(policies, *arguments, **options):
        seen.append(list(policies))
        return original(policies, *arguments, **options)

    monkeypatch.setattr(certify_module, "certify", spy)
    return seen


# --- the policy that is returned --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cheapest", [False, True])
@pytest.mark.parametrize("targets", [["p90<1s"], ["accuracy>=60%", "p90<1s"], ["think_rate<50%"], []])
def test_the_policy_is_a_candidate_and_every_candidate_is_feasible_on_the_tune_questions(candidates, targets, cheapest):
    for seed in range(3):
        tuned = tune(drawn(seed), demand(*targets, cheapest=cheapest))
        assert tuned.policy in candidates[-1]
        assert len(set(candidates[-1])) == len(candidates[-1])
        scores = [evaluate(tuned.tune, policy) for policy in candidates[-1]]
        assert all(target.met(score) for target in tuned.demand.targets for score in scores)
        assert all(tuned.best.objective >= score.accuracy for score in scores)
        if not cheapest:
            assert [s.accuracy for s in scores] == sorted((s.accuracy for s in scores), reverse=True)


@given(any_outcomes(), st.sampled_from(["accuracy", "p90", "tokens", "think_rate"]), st.booleans())
@settings(max_examples=40)
def test_exact_is_never_worse_than_what_is_chosen(o, metric, margin):
    up = metric == "accuracy"
    found = tune(
        o,
        demand(
            "accuracy>=20%",
            "p90<15s",
            maximize=metric if up else None,
            minimize=None if up else metric,
            test_share=0.5 if o.test_mask(0.5).any() and not o.test_mask(0.5).all() else 0,
            margin=margin,
        ),
    )
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    if found.policy is None:
        assert document["exact"]["objective"] is None
        assert document["verdict"] == "not_met"
        return
    chosen = document["tune"][metric]
    assert document["exact"]["objective"] == pytest.approx(found.best.objective, abs=1e-15)
    assert (chosen <= found.best.objective + 1e-12) if up else (chosen >= found.best.objective - 1e-12)


def test_the_margin_leaves_the_share_that_it_says():
    for seed in range(5):
        o = drawn(seed, 2000)
        ledger_alpha = alpha_at_look(0.95, 1)
        tuned, bare = (tune(o, demand("p90<1s", margin=margin)) for margin in (True, False))
        assert tuned.test is not None
        (requirement,) = risk.auto_margin(P90, tuned.tune, tuned.test, alpha=ledger_alpha)
        share, onto = (risk.violation_share(P90[0], t.tune, decide(t.tune, t.policy)) for t in (tuned, bare))
        assert requirement.limit == 0.1
        assert requirement.max_share < onto <= 0.1  # without a margin the search goes closer to the limit
        # a candidate with less margin is returned only where it was certified
        assert share <= requirement.max_share + 1e-12 or tuned.verdict == "certified"
        fallback = optimum(tuned.tune, P90, requirements={P90[0]: requirement.max_share})
        assert fallback.objective <= tuned.best.objective
        assert tuned.margin_cost == pytest.approx(tuned.best.objective - fallback.objective)
        assert math.isnan(bare.margin_cost)
        assert bare.best.objective == bare.to_dict()["tune"]["accuracy"]


def test_when_no_candidate_passes_the_one_with_the_whole_margin_is_reported(candidates):
    """The test questions are all late: nothing passes, whatever the margin."""
    o = drawn(3)
    t1 = o.t1.copy()
    t1[:, o.test_mask(0.3)] = LATE
    tuned = tune(replace(o, t1=t1), demand("p90<1s"))
    assert tuned.certificate is not None
    assert tuned.test is not None
    assert tuned.verdict == "not_met"
    assert tuned.certificate.passed == ()
    assert len(tuned.certificate.tested) == 1 < len(candidates[-1])  # the first failure ends it
    (requirement,) = risk.auto_margin(P90, tuned.tune, tuned.test, alpha=alpha_at_look(0.95, 1))
    whole = optimum(tuned.tune, P90, requirements={P90[0]: requirement.max_share})
    assert tuned.policy == whole.policy
    assert not any(test.certified for test in tuned.certificate.tests)


def test_less_than_the_whole_margin_is_said():
    """Every policy is late on 8 % of the tune questions: inside the limit, outside the margin of 300 test questions."""
    o = drawn(4, 1000, ladder(4))
    t1 = o.t1.copy()
    tune_rows = np.flatnonzero(~o.test_mask(0.3))
    t1[:, tune_rows[: int(0.08 * tune_rows.size)]] = LATE
    tuned = tune(replace(o, t1=t1), demand("p90<1s"))
    assert any("no policy leaves the whole margin" in warning for warning in tuned.warnings)
    assert not any("whole margin" in warning for warning in tune(o, demand("p90<1s")).warnings)


def test_candidates_come_from_the_tune_questions_alone(candidates):
    """Other answers and seconds of the test questions change the verdict, never what is tested."""
    o = drawn(5)
    test = o.test_mask(0.3)
    rng = np.random.default_rng(0)
    answer, t1, p2 = o.answer.copy(), o.t1.copy(), o.p2.copy()
    answer[test] = rng.integers(0, 2, test.sum())
    t1[:, test] = rng.uniform(0, 3, t1[:, test].shape)
    p2[test] = p2[test][:, :, ::-1]
    for cheapest in (False, True):
        verdicts = [
            tune(x, demand("accuracy>=60%", "p90<1s", cheapest=cheapest)).verdict
            for x in (o, replace(o, answer=answer, t1=t1, p2=p2))
        ]
        assert candidates[-1] == candidates[-2]
        assert verdicts == ["certified", "not_met"]


def test_share_0_never_certifies():
    tuned = tune(drawn(6, 2000), demand("p90<5s", test_share=0))
    document = tuned.to_dict()
    assert tuned.verdict == "met"
    assert document["test"] is None
    assert document["tune"]["n"] == 2000
    assert not any(test["certified"] for test in document["targets"])
    assert not document["margin"]["auto"]
    assert tuned.policy == tuned.best.policy


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_one_look_a_run_and_none_where_nothing_is_looked_at():
    o, ledger = drawn(7), Recorder()
    tune(o, demand("p90<1s"), ledger=ledger)
    assert len(ledger.looks) == 1
    tune(o, demand("p90<1s", test_share=0), ledger=ledger)
    infeasible = tune(o, demand("accuracy>=99.9%", "p90<1ms"), ledger=ledger)
    assert infeasible.policy is None
    assert infeasible.nearest is not None
    assert len(ledger.looks) == 1


def test_the_look_decides_what_a_test_may_spend():
    o = drawn(8)
    for look in (1, 2, 30):
        tuned = tune(o, demand("p90<1s"), ledger=lambda split, document, look=look: look)
        assert tuned.certificate is not None
        assert (tuned.certificate.look, tuned.certificate.alpha) == (look, alpha_at_look(0.95, look))


def test_the_same_look_keeps_its_number_and_whatever_changes_a_test_takes_a_new_one(tmp_path):
    o = drawn(9)
    price = Cost(wrong=1.0, token=0.001)
    again = o.t1 * np.where(np.arange(o.n) < 5, 1.0001, 1.0)  # five test questions timed again, nothing else
    runs = [
        (o, demand("p90<1s"), 1),
        (o, demand("p90<1s"), 1),
        (o.take(np.arange(o.n)[::-1]), demand("p90<1s"), 1),  # the order of the rows is nothing new
        (o, demand("p90<1s", seed=3), 1),  # nor is the bootstrap
        (replace(o, t1=again), demand("p90<1s"), 2),
        (o, demand("p90<1s", level=0.9), 3),
        (o, demand("cost<0.9", cost=price), 4),
        (o, demand("cost<0.9", cost=replace(price, token=0.0011)), 5),
        (o, demand("p90<1s"), 1),
    ]
    with Store.open(tmp_path / "ledger.db") as store:
        for i, (outcomes, asked, look) in enumerate(runs):
            certificate = tune(outcomes, asked, ledger=store.record_look).certificate
            assert certificate is not None
            assert certificate.look == look, i


# --- load -------------------------------------------------------------------------------------------------------------


def served(**changes: object) -> Outcomes:
    """Four questions; the second arm answers twice as fast. Lengths 10, 20, 30, 40; 0.1 s and 0.1 s a token."""
    tokens = np.array([[10.0], [20], [30], [40]])
    return Outcomes(
        **{
            "p1": np.array([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]]),
            "p2": np.tile([0.1, 0.9], (4, 1, 1)),
            "tokens": tokens,
            "finished": np.ones((4, 1), bool),
            "t1": np.array([[0.1] * 4, [0.05] * 4]),
            "t2": np.array([tokens * 0.1, tokens * 0.05]),
            "answer": np.array([1, 1, 0, 0]),
            "budgets": np.array([64]),
            "arms": ("base", "mtp"),
            "concurrency": np.array([8, 8]),
            **changes,
        }
    )


def test_throughput_is_littles_law():
    o = served()
    # 8 in flight, 100 tokens in 0.1 * 4 + 100 * 0.1 = 10.4 s of requests: 8 * 100 / 10.4
    assert throughput(o, "base") == pytest.approx(800 / 10.4)
    assert throughput(o, "mtp") == pytest.approx(800 / 5.2)
    # questions that cannot think or whose thought failed take no part: 8 * 50 / (0.2 + 5)
    p2 = o.p2.copy()
    p2[0] = np.nan
    some = served(p2=p2, can_think=np.array([True, True, True, False]))
    assert throughput(some, "base") == pytest.approx(400 / 5.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"concurrency": np.zeros(2)},
        {"simulated": True},
        {"estimated": np.array([[False, True], [False, True]])},
        {"t2": np.full((2, 4, 1), np.nan)},
        {"p2": np.full((4, 1, 2), np.nan)},
    ],
)
def test_throughput_is_unknown_where_it_was_not_measured(changes):
    o = served(**changes)
    assert throughput(o, "base") is None
    assert sustainable_rate(o, Policy(1.1, 0.5, 64)) is None


def test_the_sustainable_rate_by_hand():
    o = served()
    # thinks about the two least confident: (10 + 20) / 4 = 7.5 tokens a request
    assert sustainable_rate(o, Policy(0.75, 0.5, 64)) == pytest.approx(800 / 10.4 / 7.5)
    assert sustainable_rate(o, Policy(0.0, 0.5, 64)) == math.inf


def test_the_rate_binds_each_arm_by_what_it_carries():
    o, think = served(), demand(test_share=0)
    free = tune(o, think)
    # both arms answer alike: the tie goes to the faster one, with a rate as without
    assert free.policy is not None
    assert (free.policy.arm, free.policy.threshold) == ("mtp", pytest.approx(0.75))
    slack = tune(o, replace(think, rate=0.01))
    assert slack.policy == free.policy
    # thinking of the right two costs 7.5 tokens: base carries 800/10.4/7.5 = 10.3 a second, mtp 20.5
    at_15 = tune(o, replace(think, rate=15.0))
    assert at_15.policy == free.policy
    assert at_15.to_dict()["sustainable_rate"] == pytest.approx(800 / 5.2 / 7.5)
    base_at_15 = tune(o, replace(think, rate=15.0, arms=["base"]))
    assert base_at_15.policy is not None
    assert base_at_15.policy.threshold == pytest.approx(0.65)  # one thought of 10 tokens: 2.5 a request, up to 30.8/s
    for tuned, rate in ((at_15, 15.0), (base_at_15, 15.0)):
        assert tuned.sustainable is not None
        assert tuned.sustainable >= rate
    never = tune(o, replace(think, rate=1000.0))
    assert never.policy is not None
    assert never.policy.threshold == 0
    assert never.sustainable == math.inf
    assert never.to_dict()["sustainable_rate"] is None  # JSON has no infinity


def test_an_unmeasured_arm_warns_and_binds_nothing():
    o = served(concurrency=np.array([0, 8]))
    tuned = tune(o, demand(test_share=0, rate=1000.0))
    assert tuned.policy is not None
    assert tuned.policy.arm == "base"  # what it carries is unknown, so that nothing refuses it
    assert sum("--rate" in warning and "'base'" in warning for warning in tuned.warnings) == 1


# --- the cheapest that cannot be told apart ---------------------------------------------------------------------------


def cheapest_by_force(o: Outcomes, best: Policy, seed: int, mixes: dict[tuple[int, float], float]) -> float:
    """Least mean seconds of a policy that is on the front of accuracy and seconds and cannot be told apart."""
    rows = []
    for arm in o.arms:
        for (budget, threshold), mix in mixes.items():
            policy = Policy(threshold, mix, budget, arm)
            score = evaluate(o, policy)
            rows.append((round(score.mean, 12), score.tokens, score.think_rate, -score.accuracy, policy))
    rows.sort(key=lambda row: row[:4])
    most, ours = -math.inf, decide(o, best)
    for mean, _, _, negative, policy in rows:
        if -negative <= most:
            continue
        most = -negative
        rng = np.random.default_rng(seed)
        compared = intervals.compare(o, ours, {"": decide(o, policy)}, rng=rng, resamples=2000)[""]
        if not compared.distinguishable:
            return mean
    raise AssertionError("the best is no different from itself")


@pytest.mark.parametrize("rate", [None, 1e-6])
def test_prefer_cheapest_against_brute_force(rate):
    cheaper = 0
    for seed in range(5):
        o = replace(drawn(seed, 150, ladder(12, 2, late1=[0.0, 0.2])), concurrency=np.array([4, 4]))
        tuned, best = (tune(o, Demand(cheapest=c, test_share=0, rate=rate)) for c in (True, False))
        assert tuned.policy is not None
        assert best.policy is not None
        table = tabulate(o)
        mixes = {
            (budget, float(t)): float(table.mix[b, k])
            for b, budget in enumerate(table.budgets)
            for k, t in enumerate(candidate_thresholds(o.p1.max(axis=1)))
        }
        ours = evaluate(o, tuned.policy)
        assert ours.mean == pytest.approx(cheapest_by_force(o, best.policy, 0, mixes), rel=1e-9)
        cheaper += ours.mean < evaluate(o, best.policy).mean
    assert cheaper >= 3


def test_prefer_cheapest_keeps_the_margin(candidates):
    """The cheapest that is as good may not give back the room that its candidate left below a limit on accuracy."""
    o = drawn(11, 1500, ladder(20))
    tuned = tune(o, demand("accuracy>=87%", cheapest=True))
    assert tuned.test is not None
    (requirement,) = risk.auto_margin(tuned.demand.targets, tuned.tune, tuned.test, alpha=alpha_at_look(0.95, 1))
    wrong = [1 - evaluate(tuned.tune, policy).accuracy for policy in candidates[-1]]
    assert min(wrong) <= requirement.max_share + 1e-12
    assert tuned.verdict == "certified"


def test_prefer_cheapest_needs_accuracy_as_the_objective():
    with pytest.raises(CalibError, match="--prefer cheapest compares accuracy"):
        tune(drawn(0, 100), demand(cheapest=True, minimize="tokens"))


# --- what may not be certified, and what is certified with more care -----------------------------------------------


def certificate_methods(o: Outcomes, *targets: str) -> tuple[str, list[str], list[float]]:
    tuned = tune(o, demand(*targets))
    assert tuned.certificate is not None
    tests = tuned.certificate.tests
    return tuned.verdict, [test.method for test in tests], [test.p_value or 0.0 for test in tests]


def test_traffic_weights_make_the_verdict_conservative():
    o = replace(drawn(12, 1500), dataset=np.array(["a", "b"], object)[np.arange(1500) % 2])
    _, plain, (p,) = certificate_methods(o, "p90<5s")
    _, weighted, (p_weighted,) = certificate_methods(o.reweighted({"a": 3.0, "b": 1.0}), "p90<5s")
    assert (plain, weighted) == (["binomial"], ["conservative"])
    assert p < p_weighted
    # equal traffic of equal datasets is no weight at all, and one dataset alone counts its questions the same
    assert certificate_methods(o.reweighted({"a": 1.0, "b": 1.0}), "p90<5s")[1] == ["binomial"]
    assert certificate_methods(o.reweighted({"a": 2.0}), "p90<5s")[1] == ["binomial"]


def test_the_split_does_not_shift_the_traffic():
    """20 questions carry half the traffic, and 3 of them, not 6, fell on the test side: they carry half of it there."""
    o = drawn(12, 1000)
    rare = np.isin(np.arange(1000), [*range(3), *range(900, 917)])
    o = replace(o, dataset=np.where(rare, "rare", "common").astype(object)).reweighted({"rare": 1.0, "common": 1.0})
    tuned = tune(o, demand("p90<5s"))
    for side, rows in ((tuned.tune, 17), (tuned.test, 3)):
        assert side is not None
        carried = side.weight[side.dataset == "rare"]
        assert carried.size == rows
        assert carried.sum() / side.weight.sum() == pytest.approx(0.5)
    assert not any("no test question" in warning for warning in tuned.warnings)
    none = replace(o, split_position=np.where(o.dataset == "rare", 0.9, o.split_position))
    assert any("no test question of 'rare'" in warning for warning in tune(none, demand("p90<5s")).warnings)
    # without weights every question counts the same, as it was drawn
    plain = tune(replace(o, weight=np.ones(o.n)), demand("p90<5s"))
    assert plain.test is not None
    assert plain.test.unweighted


def test_weights_of_the_tune_side_leave_the_test_side_to_the_exact_test():
    """A staged collection weighs the thoughts of the tune side and draws those of the test side evenly."""
    o = drawn(12, 1500)
    tuned_on = o.split_position >= demand("p90<5s").test_share
    o = replace(o, dataset=np.array(["a", "b", "c"], object)[np.arange(1500) % 3])
    staged = replace(o, weight=np.where(tuned_on, np.where(np.arange(1500) % 2, 3.0, 1.0), 2.0))
    assert certificate_methods(staged, "p90<5s")[1] == ["binomial"]


def test_questions_in_groups_make_the_verdict_conservative():
    o = drawn(13, 1500)
    pairs = replace(o, group=[f"story {i // 2}" for i in range(o.n)])
    assert certificate_methods(pairs, "p90<5s")[1] == ["conservative"]
    assert certificate_methods(o, "p90<5s")[1] == ["binomial"]


def test_estimated_seconds_are_met_and_never_certified():
    o = drawn(14, 1500)
    estimated = replace(o, estimated=np.ones((2, 3), bool))
    tuned = tune(estimated, demand("p90<5s"))
    assert tuned.verdict == "met"
    assert tuned.to_dict()["marks"] == ["estimated"]
    assert any("never certified" in warning for warning in tuned.warnings)
    # a target that no second enters is certified all the same
    assert tune(estimated, demand("think_rate<99%")).verdict == "certified"
    assert tune(o, demand("p90<5s")).verdict == "certified"
    # nor does the estimate of a thought keep System 1 alone from its certificate
    thoughts = replace(o, estimated=np.array([[False, True, True]] * 2))
    alone = tune(thoughts, demand("p90<100ms"))
    assert (alone.policy.threshold, alone.verdict) == (0.0, "certified")


# --- the document -----------------------------------------------------------------------------------------------------


def strict(document: dict[str, object]) -> dict[str, object]:
    text = json.dumps(document, allow_nan=False)
    again = json.loads(text)
    assert json.dumps(again, allow_nan=False) == text
    return again


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        ([], {}),
        (["p90<1s"], {}),
        (["p90<1s"], {"test_share": 0}),
        (["accuracy>=99.9%", "p90<1ms"], {}),
        (["accuracy[worst]>=10%", "p99<9s"], {"rate": 0.1}),
        (["ece<90%", "brier<1.9", "nll<9", "mean<9s", "tokens<999"], {"cheapest": True}),
        (["cost<9"], {"cost": Cost(1.0, 0.1, 0.001), "minimize": "cost"}),
    ],
)
def test_the_document_is_strict_json_and_comes_back_equal(targets, options):
    o = replace(drawn(15, 200), concurrency=np.array([8, 0]))
    tuned = tune(o, demand(*targets, **options))
    document = tuned.to_dict("mine")
    assert strict(document) == document
    assert document["name"] == "mine"
    assert document["verdict"] == tuned.verdict
    if tuned.policy is not None:
        assert Policy.from_dict(document["policy"]) == tuned.policy
    counts = document["split"]["by_dataset"]["all"]
    assert counts["tune"] + counts["test"] == o.n


def test_unknown_seconds_are_null_and_never_a_flattering_number():
    """The second arm has no seconds; its baselines must not look as if nothing there were late."""
    o = drawn(16, 300)
    t2 = o.t2.copy()
    t2[1] = np.nan
    document = strict(tune(replace(o, t2=t2), demand("p90<1s")).to_dict())
    assert document["policy"]["arm"] == "arm0"
    other = replace(o, t2=t2[::-1], t1=o.t1[::-1], arms=("arm1", "arm0"))
    document = strict(tune(other, demand("p90<1s")).to_dict())
    assert document["policy"]["arm"] == "arm0"
    always = document["baselines"]["always_think"]
    assert always["p90"] is None
    assert always["over_twice_limit"] == {"p90<1s": None}
    assert document["baselines"]["system1"]["over_twice_limit"]["p90<1s"] is not None  # System 1's seconds are known


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_latency_target_without_seconds_says_how_to_get_them():
    o = drawn(17, 100)
    with pytest.raises(CalibError, match=r"--system1-ms 45 --tokens-per-second 250"):
        tune(replace(o, t1=np.full_like(o.t1, np.nan), t2=np.full_like(o.t2, np.nan)), demand("p90<1s"))


def test_one_question_is_too_few_to_split_and_can_be_tuned_on():
    o = drawn(18, 1)
    with pytest.raises(CalibError, match=r"too few to split.*--test-share 0"):
        tune(o, demand("p90<9s"))
    tuned = tune(o, demand("p90<9s", test_share=0))
    assert tuned.verdict == "met"
    strict(tuned.to_dict())


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_where_every_thought_failed_nobody_thinks(share):
    o = drawn(19, 200)
    o = replace(o, p2=np.full_like(o.p2, np.nan))
    tuned = tune(o, demand(test_share=share))
    assert tuned.policy is not None
    assert tuned.policy.threshold == 0
    document = strict(tuned.to_dict())
    assert document["baselines"]["always_think"]["accuracy"] == 0
    assert document["baselines"]["always_think"]["unanswered"] == tuned.tune.n
    assert tuned.best.objective == pytest.approx(np.mean(tuned.tune.answer == 0))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda o: o.reweighted({"gsm8k": 3.0}), "traffic names the unknown dataset 'gsm8k'; there are: all"),
        (lambda o: tune(o, demand("p90[gsm8k]<1s")), "no dataset 'gsm8k'"),
        (lambda o: tune(o, demand(budgets=[77])), r"think_budget 77 was not collected; there are \[100, 200\]"),
        (lambda o: tune(o, demand(arms=["turbo"])), "arm 'turbo' was not collected; there are arm0, arm1"),
        (lambda o: tune(o, demand("cost<1")), "needs prices"),
        (lambda o: tune(o, demand("p90<1s", test_share=1.5)), "--test-share must be from 0 to below 1"),
        (lambda o: tune(o, demand("p90<1s", level=1.5)), "--level must be between 0 and 1"),
        (lambda o: tune(o, demand("p90")), "has no limit"),
    ],
)
def test_bad_input_says_what_there_is(run, message):
    with pytest.raises(CalibError, match=message):
        run(drawn(20, 100))


# --- the promise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [ladder(8, 2, late1=[0.03, 0.1], late2=0.2), indifferent(8, 2), seven_percent()])
def test_the_truth_of_a_world_is_what_many_questions_show(world):
    n = 200_000
    o = world.draw(np.random.default_rng(0), n)
    rng = np.random.default_rng(1)
    for _ in range(8):
        policy = Policy(
            float(rng.choice(candidate_thresholds(world.confidence))),
            float(rng.random()),
            int(rng.choice(world.budgets)),
            str(rng.choice(world.arms)),
        )
        d, truth = decide(o, policy), world.truth(policy)
        seen = [(d.choice == o.answer).mean(), risk.violation_share(P90[0], o, d), d.thinks.mean()]
        assert seen == pytest.approx(list(truth), abs=5 * math.sqrt(0.25 / n))


@pytest.mark.parametrize("family", [simulated.FAMILIES[0], simulated.FAMILIES[2]], ids=lambda f: f.name)
def test_false_certificates_where_every_policy_is_on_the_limit(family):
    """Every certificate is a false one; a first look may give one with a chance of 3 %."""
    stores = 150
    found = [simulated.verdicts(family._replace(n=600), seed) for seed in range(stores)]
    false = sum(one["false"] for one in found)
    assert false == sum(one["certified"] for one in found)
    assert sum(one["feasible"] for one in found) > 0.9 * stores  # there was something to test nearly every time
    assert false > 0  # the limit is where the test spends what it may: never one would be no test at all
    assert exact.clopper_pearson(false, stores)[0] <= alpha_at_look(0.95, 1)
    assert exact.clopper_pearson(false, stores)[1] <= 0.1


def test_twenty_runs_on_one_split_spend_the_level_together():
    found = [simulated.twenty_runs(seed) for seed in range(10)]
    assert max(one["looks"] for one in found) > 5
    false, naive = (sum(one[name] for one in found) for name in ("false", "naive"))
    assert exact.clopper_pearson(int(false), len(found))[0] <= 0.05
    assert naive > false  # without a ledger each run would spend what the first may


def test_power_where_the_best_policy_is_late_on_seven_percent():
    stores = 40
    certified = sum(simulated.power(seed)["certified"] for seed in range(stores))
    assert exact.clopper_pearson(int(certified), stores)[1] >= 0.8
    assert certified / stores > 0.7
    assert simulated.power_by_law() > 0.8


def test_a_policy_tuned_onto_the_limit_breaks_it_and_one_with_a_margin_does_not():
    found = [simulated.onto_the_limit(seed) for seed in range(20)]
    broken, certified = (
        {m: sum(one[f"{w} {m}"] for one in found) for m in ("auto", "0")} for w in ("broken", "certified")
    )
    assert broken["auto"] == 0
    assert broken["0"] >= 4
    assert certified["auto"] >= 16 > certified["0"]


# --- recorded data ----------------------------------------------------------------------------------------------------


def test_the_optima_of_recorded_answers(shared: Path):
    gemma, h200 = (case.load(shared) for case in CASES[:2])
    found = optimum(gemma)
    assert found.policy is not None
    assert (round(found.objective * gemma.n), gemma.n, found.policy.think_budget) == (111, 198, 32_768)
    assert round(optimum(gemma, budgets=[512]).objective * gemma.n) == 80
    found = optimum(h200)
    assert found.policy is not None
    assert (round(found.objective * h200.n), h200.n, found.policy.think_budget) == (1451, 1500, 600)
    assert found.policy.threshold == pytest.approx(0.845, abs=0.001)
    assert found.policy.mix == pytest.approx(0.41, abs=0.005)
    # estimated seconds are never certified, those of a real server may be
    assert tune(gemma, demand("p90<200s")).verdict == "met"
    assert tune(h200, demand("p90<2s")).verdict == "certified"


def test_a_random_split_of_recorded_answers(shared: Path):
    case = CASES[1]
    found = recorded.Splits(case, case.load(shared)).run(0)
    assert 0.9 < found["exact"] < 1
    assert found["exact"] - found["always_think"] == pytest.approx(0.92, abs=0.04)
    assert found["accuracy auto"] <= found["exact"]
    assert {found["unseen auto"], found["all auto"], found["certified auto"]} <= {0.0, 1.0}


def test_the_interval_over_overlapping_splits_by_hand():
    # mean 0.5, variance 0.5; 0.5 * (1/2 + 0.3/0.7) = 0.4643, its root 0.6814, times t(0.975; 1) = 12.706
    assert recorded.over_splits(np.array([0.0, 1.0])) == pytest.approx((0.5, 0.5 - 8.658, 0.5 + 8.658), abs=0.001)

"""Routes in a run of `tune`: who is taken, with which margin, and what is said of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from calib import tuning
from calib.errors import CalibError
from calib.fitness import Repeats
from calib.intervals import compare
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import Policy, Route, decide, evaluate
from calib.risk import violation_share
from calib.routing import check_routes, taken
from calib.show import policy_line
from calib.target import parse_targets
from calib.tuning import Demand, Tuned, tune

FEW = 50
SPLIT = {"dataset=hurt": Route(0.0), "dataset=help": Route(1.1)}


def asked(n: int = 600, seed: int = 0, **changes: object) -> Outcomes:
    """Two datasets with the same confidences: thinking is right on one and wrong on the other, and takes 2 s to 6 s."""
    rng = np.random.default_rng(seed)
    helps = np.arange(n) % 2 == 1
    top = rng.uniform(0.51, 0.99, n)
    answer = rng.integers(0, 2, n)
    first = np.where(rng.random(n) < 0.7, answer, 1 - answer)
    second = np.where(rng.random(n) < np.where(helps, 0.95, 0.3), answer, 1 - answer)
    tokens = rng.uniform(400, 1200, n).round()[:, None]
    given_ = {
        "p1": np.where(np.arange(2) == first[:, None], top[:, None], 1 - top[:, None]),
        "p2": np.where(np.arange(2) == second[:, None], 0.97, 0.03)[:, None],
        "tokens": tokens,
        "finished": np.ones((n, 1), bool),
        "t1": np.full((1, n), 0.05),
        "t2": (tokens / 200)[None],
        "answer": answer,
        "budgets": [2048],
        "dataset": np.where(helps, "help", "hurt"),
        "split_position": rng.random(n),
        "concurrency": [8],
    }
    return Outcomes(**{**given_, **changes})


def demand(*targets: str, **options: object) -> Demand:
    plain = {"resamples": FEW, "route_by": "dataset"}
    return Demand(parse_targets(targets) if targets else (), **{**plain, **options})


def routed(**routes: Route) -> Policy:
    return Policy(0.8, 1.0, 2048, routes={f"dataset={name}": route for name, route in routes.items()} or SPLIT)


class Offers:
    """Offers these policies, and remembers what it was asked."""

    def __init__(self, *policies: Policy) -> None:
        self.policies, self.calls = policies, []

    def __call__(self, *asked: object) -> tuple[Policy, ...]:
        self.calls.append(asked)
        return self.policies


def told(found: Tuned) -> dict:
    return json.loads(json.dumps(found.to_dict(), allow_nan=False))


def test_a_better_policy_with_routes_is_the_result_after_one_look():
    o, looks = asked(), []
    offers = Offers(routed(), Policy(0.7, 1.0, 2048))  # the second has no routes: nothing for this search
    found = tune(o, demand("accuracy>=60%", "p90<10s"), ledger=lambda *look: looks.append(look) or 1, routes=offers)
    plain = tune(o, demand("accuracy>=60%", "p90<10s", route_by=None))
    assert found.policy == routed()
    assert found.verdict == "certified"
    assert len(looks) == len(offers.calls) == 1
    document, alone = told(found), told(plain)
    assert document["policy"]["routes"] == {"dataset=hurt": {"threshold": 0.0}, "dataset=help": {"threshold": 1.1}}
    assert document["exact"] == alone["exact"]  # of one policy for all, as without routes
    assert document["prices"] == alone["prices"]
    assert set(document["baselines"]) == {"system1", "default", "always_think", "system2"}
    assert "routes" not in alone
    said = document["routes"]
    assert (said["by"], said["tried"], said["taken"]) == ("dataset", 1, True)
    assert said["without"]["policy"] == alone["policy"]
    assert said["gain"] == pytest.approx(evaluate(found.tune, routed()).accuracy - said["without"]["objective"])
    ours, theirs = decide(found.test, found.policy), decide(found.test, plain.policy)
    by_hand = compare(found.test, ours, {"": theirs}, rng=np.random.default_rng(0), resamples=FEW)[""]
    assert said["difference"]["difference"] == by_hand.difference > 0.05
    assert (said["difference"]["gained"], said["difference"]["lost"]) == (by_hand.gained, by_hand.lost)
    assert any("--held-by gateway), by the dataset that clients send" in text for text in found.warnings)
    assert not any("send thinking: off" in text for text in found.warnings)  # its route never thinks there
    assert any("send thinking: off" in text and "'hurt'" in text for text in plain.warnings)


def test_what_is_asked_for_is_the_whole_margin_from_policies_that_leave_it():
    o, offers = asked(), Offers()
    found = tune(o, demand("p90<5s"), routes=offers)
    ((outcomes, exact, starts, requirements),) = offers.calls
    assert outcomes.n == found.tune.n < o.n
    assert exact.policy == found.best.policy
    ((target, most),) = requirements.items()
    shares = [violation_share(target, outcomes, decide(outcomes, policy)) for policy in starts]
    assert most < 0.1
    assert min(shares) <= most
    assert max(shares) <= 0.1
    assert all(not policy.routes for policy in starts)


def test_routes_that_do_no_better_change_nothing():
    o = asked()
    plain = tune(o, demand("p90<5s", route_by=None))
    worse = routed(hurt=Route(1.1), help=Route(0.0))
    for offers in (Offers(), Offers(worse), Offers(replace(plain.best.policy, routes={"dataset=none": Route(0.0)}))):
        found = tune(o, demand("p90<5s"), routes=offers)
        assert found.policy == plain.policy
        assert found.margin_cost == plain.margin_cost
        said = told(found)["routes"]
        assert (said["taken"], said["gain"], said["difference"]) == (False, 0, None)
        assert any(f"({len(offers.policies)} tried): this is one policy for all" in text for text in found.warnings)


def test_each_share_of_the_margin_has_its_own_best():
    o = asked(400, t2=np.where(np.arange(400) % 20 == 1, 9.0, 1.0)[None, :, None])
    (target,) = parse_targets("p90<5s")
    all_, half = routed(), routed(hurt=Route(0.0), help=Route(0.75))
    late, some = (violation_share(target, o, decide(o, policy)) for policy in (all_, half))
    assert late == 0.05  # every tenth of the half that thinks
    assert 0 < some < late
    exact = optimum(o, parse_targets("think_rate<=0%"))
    required = {0.0: {}, 0.5: {target: late}, 1.0: {target: some}, 2.0: {target: 0.0}}
    found = taken([half, all_], o, demand("p90<5s"), {0.0: exact, 2.0: exact}, required, exact)
    assert {factor: one.policy for factor, one in found.best.items()} == {
        0.0: all_,
        0.5: all_,
        1.0: half,
        2.0: exact.policy,
    }
    assert found.best[0.5].objective == evaluate(o, all_).accuracy
    assert taken([half, all_], o, demand("p90<500ms"), {}, required, exact).best == {}  # the target itself is broken


def test_routes_may_be_the_only_way_to_keep_the_targets():
    o = asked()
    targets = ("accuracy[hurt]>=60%", "accuracy[help]>=85%")
    plain = tune(o, demand(*targets, route_by=None))
    assert plain.policy is None
    nothing = tune(o, demand(*targets), routes=Offers())
    assert nothing.policy is None
    assert nothing.nearest is not None
    assert told(nothing)["routes"] == {
        "by": "dataset",
        "tried": 0,
        "refused": 0,
        "cut_short": False,
        "taken": False,
        **dict.fromkeys(("gain", "without", "left_out", "passed_over", "difference")),
    }
    cut = tune(o, demand(*targets), routes=lambda *_: None)
    assert told(cut)["routes"]["cut_short"]
    assert any("was cut short" in text for text in cut.warnings)
    assert not any("meets the targets either" in text for text in cut.warnings)
    assert any("routes by dataset meets the targets either (0 tried)" in text for text in nothing.warnings)
    found = tune(o, demand(*targets), routes=Offers(routed()))
    assert found.policy == routed()
    document = told(found)
    assert document["exact"]["objective"] is document["exact"]["policy"] is document["routes"]["without"] is None
    assert document["routes"]["gain"] is None
    assert document["prices"] == []
    assert math.isnan(found.best.objective)


def idle(seed: int, n: int = 400) -> Outcomes:
    """The same on both datasets: no route gains but by luck."""
    second = np.random.default_rng(seed + 500).random(n) < 0.8
    o = asked(n, seed)
    right = np.where(second, o.answer, 1 - o.answer)
    return replace(o, p2=np.where(np.arange(2) == right[:, None], 0.97, 0.03)[:, None])


def many(_outcomes: Outcomes, _exact: object, starts: tuple[Policy, ...], _requirements: object) -> list[Policy]:
    """Policies with a threshold of their own for each dataset, by chance."""
    drawn = np.random.default_rng(0).uniform(0.4, 1.05, (100, 2)).tolist()
    return [
        replace(base, routes={"dataset=hurt": Route(one), "dataset=help": Route(other)})
        for base in starts
        for one, other in drawn
    ]


def test_the_luckiest_of_many_routes_are_left_out_and_told():
    left = 0
    for seed in range(8):
        o = idle(seed)
        found, plain = tune(o, demand("p90<5s"), routes=many), tune(o, demand("p90<5s", route_by=None))
        assert found.policy == plain.policy
        said = told(found)["routes"]
        assert (said["taken"], said["gain"], said["difference"]) == (False, 0, None)
        if said["left_out"] is None:
            continue
        left += 1
        out = found.routed.left_out
        assert out.gain.value > 0
        assert not out.gain.beyond_noise
        assert Policy.from_dict(said["left_out"]["policy"]) == out.policy
        (text,) = [text for text in found.warnings if "routes by dataset were left out" in text]
        assert f"{out.gain}, could be chance (the best of {said['tried']} tried)" in text
        assert not any("does better than one policy for all" in text for text in found.warnings)
    assert left >= 3


def test_a_gate_finer_than_what_p1_repeats_to_is_refused_on_a_route_too():
    o = asked()
    repeats = Repeats(np.sort(o.p1.max(1)), {"base": 0.05})
    fine, whole = routed(hurt=Route(0.0), help=Route(0.53)), routed()
    assert repeats.noisy(0.53, "base")
    exact = optimum(o, parse_targets("think_rate<=0%"))
    asks = demand(repeats=repeats)
    refused = taken([fine], o, asks, {0.0: exact}, {0.0: {}}, exact)
    assert (refused.best, refused.refused, refused.left_out) == ({0.0: exact}, 1, None)
    assert taken([fine], o, demand(), {}, {0.0: {}}, exact).best[0.0].policy == fine
    kept = taken([fine, whole], o, asks, {0.0: exact}, {0.0: {}}, exact)
    assert (kept.best[0.0].policy, kept.refused) == (whole, 1)
    found = tune(o, asks, routes=Offers(fine))
    assert told(found)["routes"]["refused"] == 1
    assert any("1 of 1 policies with routes by dataset were refused" in text for text in found.warnings)


def test_what_is_said_is_about_the_candidate_that_is_returned(monkeypatch):
    o = asked(t2=np.where(np.arange(600) % 40 == 1, 9.0, 1.0)[None, :, None])
    kept = tune(o, demand("p90<5s"), routes=Offers(routed()))
    assert kept.policy == routed()
    certify = tuning.certify.certify

    def without_routes(candidates, *args, **options):
        """As if those with routes had failed the test."""
        return certify([one for one in candidates if not one.routes], *args, **{**options, "fallback": 0})

    monkeypatch.setattr("calib.tuning.certify.certify", without_routes)
    found = tune(o, demand("p90<5s"), routes=Offers(routed()))
    assert found.policy is not None
    assert not found.policy.routes
    said = told(found)["routes"]
    assert (said["taken"], said["gain"], said["difference"]) == (False, 0, None)
    assert said["without"]["policy"] == told(found)["policy"]
    assert Policy.from_dict(said["passed_over"]) == routed()
    assert any("the candidate that passed the test has none" in text for text in found.warnings)
    assert not any("does better than one policy for all" in text for text in found.warnings)


def test_thinking_hurts_is_said_where_a_route_by_another_key_thinks():
    o = asked(kind=np.where(np.arange(600) % 4 < 2, "choice", "noun"))
    for route, said in ((Route(1.1), True), (Route(0.0), False)):
        routes = {"kind=choice": route, "kind=noun": Route(0.0)}
        policy = Policy(1.1, 1.0, 2048, routes=routes)
        certificate = tune(o, demand(route_by="kind"), routes=Offers()).certificate
        texts = tuning._warnings(o, replace(certificate, policy=policy), {})
        assert any("thinking hurts on 'hurt'" in text for text in texts) is said


def test_minimising_goes_down():
    o = asked()
    asks = {"minimize": "tokens", "margin": False}
    plain = tune(o, demand("accuracy>=71%", **asks, route_by=None))
    some = routed(hurt=Route(0.0), help=Route(0.8))
    found = tune(o, demand("accuracy>=71%", **asks), routes=Offers(routed(), some))
    assert found.policy == some
    assert told(found)["routes"]["gain"] == pytest.approx(plain.best.objective - evaluate(found.tune, some).tokens)


def test_routes_by_what_is_the_same_for_all_are_refused():
    o = asked()
    check_routes(o, "dataset")
    with pytest.raises(CalibError, match="--routes kind: kind is 'choice' for all of the 600 tune questions"):
        check_routes(o, "kind")
    with pytest.raises(CalibError, match="--routes n_options: n_options is '2' for all"):
        tune(o, demand(route_by="n_options"), routes=Offers())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"deadlines": "auto"}, "--deadline"),
        ({"deadlines": (1.0,)}, "--deadline"),
        ({"calibrate": "auto"}, "--calibrate auto"),
        ({"confidence": "margin"}, "--confidence margin"),
        ({"cheapest": True}, "--prefer cheapest"),
    ],
)
def test_what_does_not_go_with_routes_is_refused(options, named):
    with pytest.raises(CalibError, match=f"--routes dataset with {named}: "):
        demand(**options)
    with pytest.raises(CalibError, match="--routes must be one of dataset, kind, n_options, got 'colour'"):
        demand(route_by="colour")


def test_a_policy_that_thinks_on_some_routes_alone_does_not_read_as_one_that_never_thinks():
    assert policy_line(Policy(0.0, 0.5, 64)) == "never think (base)"
    assert "1 routes" in policy_line(Policy(0.0, 0.5, 64, routes={"dataset=a": Route(0.5)}))

"""Requests that share a server: by hand, against small steps of time, and what must hold for any of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.arrivals import arrival_times
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Policy, decide
from calib.queueing import Flight, Forecast, Pace, forecast, pace, replay, simulate, work_of

ENDLESS = Pace(np.array([1, 100]), np.array([[1.0], [1e12]]))
"""A server that does any work that is asked for."""

SHARED = Pace(np.array([1, 2]), np.array([[1.0], [1.0]]))
"""One prompt a second, whether one or two are in flight: each then takes twice as long."""


def poisson(n: int, rate: float, seed: int = 0) -> np.ndarray:
    return arrival_times(n, rate, np.random.default_rng(seed))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_at_one_speed_each_request_takes_its_own_seconds():
    seconds = np.random.default_rng(1).exponential(0.5, 300)
    arrivals = poisson(300, 20.0)
    found = simulate(arrivals, np.column_stack([seconds, seconds]), np.ones((300, 1)), ENDLESS)
    np.testing.assert_allclose(found.latency, seconds, rtol=1e-9)  # as with servers without number
    assert found.saturated == 0
    ends = arrivals + seconds
    assert found.most == max(int(((arrivals <= at) & (ends > at)).sum()) for at in arrivals)


def test_two_that_overlap():
    # 0 s to 0.5 s: the first one alone does half of its work; 0.5 s to 1.5 s: both at half speed, the first one ends,
    # the second has done half; 1.5 s to 2 s: it does the rest alone
    found = simulate([0.0, 0.5], [[1.0, 2.0], [1.0, 2.0]], [[1.0], [1.0]], SHARED)
    np.testing.assert_allclose(found.latency, [1.5, 1.5])
    assert (found.most, found.saturated) == (2, 0.0)
    assert found.in_flight == pytest.approx((0.5 * 1 + 1.0 * 2 + 0.5 * 1) / 2.0)


def test_two_of_different_length():
    # from 0 s on both are in flight; the long one (3 s alone, 6 s with another) has done 2/6 when the short one ends at
    # 2 s, and does the other 2/3 alone, in 2 s
    found = simulate([0.0, 0.0], [[1.0, 2.0], [3.0, 6.0]], [[1.0], [3.0]], SHARED)
    np.testing.assert_allclose(found.latency, [2.0, 4.0])


def test_more_than_was_ever_done_is_not_done():
    # three prompts at the speeds of two in flight would be 3/2 a second, 2/3 of it for the others: 1.0 where 0.5 was
    # done. All go at half of their speed, so that each takes 4 s
    found = simulate([0.0] * 3, [[1.0, 2.0]] * 3, [[1.0]] * 3, SHARED)
    np.testing.assert_allclose(found.latency, 4.0)
    assert (found.saturated, found.most) == (1.0, 3)


def test_between_two_loads_speed_is_linear_in_the_work():
    # with 4 and 12 in flight 4 and 12 prompts a second were done, for the others 4 * 3/4 = 3 and 12 * 11/12 = 11. Two
    # requests of 5 prompts ask for half of 10 / seconds: 5 at the speeds of the one load, 2.5 at those of the other.
    # In balance 5 - 2.5 w = 3 + 8 w
    server = Pace(np.array([4, 12]), np.array([[4.0], [12.0]]))
    found = simulate([0.0, 0.0], [[1.0, 2.0]] * 2, [[5.0]] * 2, server)
    w = 2 / 10.5
    np.testing.assert_allclose(found.latency, 1 / ((1 - w) + w / 2))


def test_the_kind_of_work_that_says_slower_counts():
    both = Pace(np.array([1, 2]), np.array([[1.0, 1.0], [1.0, 1e9]]))
    for work in ([[1.0, 0.0]] * 2, [[1.0, 1e-3]] * 2):
        found = simulate([0.0, 0.5], [[1.0, 2.0]] * 2, work, both)
        np.testing.assert_allclose(found.latency, [1.5, 1.5])
    idle = simulate([0.0, 0.5], [[1.0, 2.0]] * 2, [[0.0, 0.0]] * 2, both)  # asks for nothing, and so waits for nothing
    np.testing.assert_allclose(idle.latency, 1.0)


def test_a_lone_request_takes_the_seconds_of_the_lowest_load():
    server = Pace(np.array([8, 16]), np.array([[5.0], [6.0]]))
    found = simulate([0.0, 100.0], [[2.0, 9.0]] * 2, [[50.0]] * 2, server)
    np.testing.assert_allclose(found.latency, 2.0)


# --- small steps of time ----------------------------------------------------------------------------------------------


def by_small_steps(arrivals, seconds, work, server: Pace, dt: float) -> np.ndarray:
    """The same, step by step; the balance found by trying places between the loads."""
    k = len(server.concurrency)
    places = np.linspace(0, k - 1, 200 * (k - 1) + 1)
    at = np.arange(k)
    done = np.array([np.interp(places, at, kind) for kind in server.of_others.T]).T
    left, ended = np.ones(len(arrivals)), np.full(len(arrivals), np.nan)
    now = 0.0
    while np.isnan(ended).any():
        there = np.flatnonzero((arrivals <= now) & np.isnan(ended))
        if there.size:
            speeds = np.array([np.interp(places, at, row) for row in 1 / seconds[there]])
            asked = (1 - 1 / there.size) * speeds.T @ work[there]
            fits = (asked <= done + 1e-12).all(axis=1)
            best = int(np.argmax(fits)) if fits.any() else len(places) - 1
            scale = 1.0 if fits.any() else float((done[-1] / asked[-1]).min())
            left[there] -= scale * speeds[:, best] * dt
            ended[there[left[there] <= 0]] = now + dt
        now += dt
    return ended - arrivals


@pytest.mark.parametrize("rate", [2.0, 6.0, 20.0])
def test_small_steps_of_time_agree(rate):
    rng = np.random.default_rng(4)
    arrivals = poisson(25, rate, seed=2)
    alone = rng.uniform(0.1, 0.6, 25)
    seconds = alone[:, None] * np.array([1.0, 1.4, 3.0])
    work = np.column_stack([rng.integers(1, 4, 25), rng.uniform(0, 50, 25)])
    server = Pace(np.array([1, 4, 16]), np.array([[6.0, 80.0], [15.0, 220.0], [25.0, 330.0]]))
    found = simulate(arrivals, seconds, work, server)
    assert (found.saturated > 0) == (rate == 20.0)
    np.testing.assert_allclose(
        found.latency, by_small_steps(arrivals, seconds, work, server, 5e-4), rtol=0.02, atol=2e-3
    )


# --- what must hold ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(0.5, 50), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_no_request_is_lost_and_none_is_faster_than_alone(seed, rate, n):
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0, n / rate, n))
    alone = rng.exponential(0.4, n)
    seconds = alone[:, None] * np.array([1.0, 1.7, 2.9])
    work = np.column_stack([rng.integers(1, 4, n), rng.integers(0, 100, n)]).astype(float)
    server = Pace(np.array([1, 8, 32]), np.array([[5.0, 70.0], [20.0, 250.0], [40.0, 500.0]]))
    found = simulate(arrivals, seconds, work, server)
    assert np.isfinite(found.latency).all()
    assert (found.latency >= alone * (1 - 1e-9)).all()
    end = float((arrivals + found.latency).max())
    assert found.in_flight * end == pytest.approx(found.latency.sum())  # Little's law, exact over a whole run
    if found.saturated == 0:
        assert (found.latency <= seconds[:, -1] * (1 + 1e-9)).all()


def test_the_same_requests_take_longer_when_they_come_faster():
    seconds = np.random.default_rng(3).exponential(0.3, 400)[:, None] * np.array([1.0, 1.5, 2.5])
    server = Pace(np.array([1, 8, 32]), np.array([[3.0], [16.0], [40.0]]))
    means = [simulate(poisson(400, rate), seconds, np.ones((400, 1)), server).latency.mean() for rate in (1, 5, 20, 60)]
    assert means == sorted(means)
    assert means[0] < 1.1 * seconds[:, 0].mean()
    assert means[-1] > seconds[:, -1].mean()


def test_a_closed_loop_sent_at_its_own_times_takes_its_own_seconds():
    # c in flight at all times, each as recorded at c: what was recorded comes out, at any recorded load
    concurrency = np.array([1, 4, 16])
    seconds = np.array([0.2, 0.3, 0.8])
    server = Pace(concurrency, (concurrency / seconds)[:, None])
    for k, c in enumerate(concurrency.tolist()):
        arrivals = np.arange(40 * c) * seconds[k] / c
        found = simulate(arrivals, np.tile(seconds, (40 * c, 1)), np.ones((40 * c, 1)), server)
        np.testing.assert_allclose(found.latency[20 * c : 39 * c], seconds[k], rtol=0.05)


def test_what_no_load_was_recorded_for():
    for concurrency in ([8], [8, 8], [8, 1], [0, 8]):
        with pytest.raises(CalibError, match="predicted from two or more numbers in flight.*calib collect"):
            Pace(np.array(concurrency), np.ones((len(concurrency), 1)))


# --- a collection, a policy -------------------------------------------------------------------------------------------


def collected(c: int, slower: float, n: int = 40) -> Outcomes:
    """Half of the questions cannot think; thoughts of 100 tokens take 1 s, System 1 takes 0.1 s, both times slower."""
    return Outcomes(
        p1=np.tile([0.6, 0.4], (n, 1)),
        p2=np.tile([0.1, 0.9], (n, 2, 1)),
        tokens=np.tile([50.0, 100.0], (n, 1)),
        finished=np.tile([False, True], (n, 1)),
        t1=np.full((1, n), 0.1 * slower),
        t2=np.tile([0.5 * slower, 1.0 * slower], (1, n, 1)),
        answer=np.ones(n, dtype=int),
        budgets=[50, 100],
        can_think=np.arange(n) % 2 == 0,
        concurrency=[c],
    )


def test_the_pace_of_a_collection():
    # a question that thinks: System 1, the thought, answers at 100 and at 50 tokens, which are 4 prompts; 100 tokens,
    # 0.1 + 1 + 0.1 s; another: 1 prompt, 0.1 s. On average 2.5 prompts, 50 tokens and 0.65 s: with 13 in flight 20
    # questions a second, with 26 at a third of the speed 40 / 3
    found = pace([collected(13, 1.0), collected(26, 3.0)], "base")
    assert found.concurrency.tolist() == [13, 26]
    np.testing.assert_allclose(found.work, [[50.0, 1000.0], [100 / 3, 2000 / 3]])
    np.testing.assert_allclose(found.of_others[0], np.array([50.0, 1000.0]) * 12 / 13)
    # two prompts a request and no tokens: half of the most prompts that were done
    assert found.capacity([[1.0, 0.0], [3.0, 0.0]]) == pytest.approx(25.0)
    assert found.capacity([[1.0, 100.0]]) == pytest.approx(10.0)
    assert found.capacity([[0.0, 0.0]]) == math.inf


def test_only_budgets_that_cut_the_thought_are_read_by_themselves():
    # of four questions one thinks 100 tokens, which only 50 cuts, and one 50, which none cuts: 4 and 3 prompts, in
    # 0.1 + 1 + 0.1 s and 0.1 + 1 s; two do not think, 0.1 s each
    o = collected(10, 1.0, n=4)
    tokens = o.tokens.copy()
    tokens[2] = 50
    found = pace([replace(o, tokens=tokens), collected(20, 2.0)], "base")
    np.testing.assert_allclose(found.work[0], 10 * np.array([(4 + 3 + 1 + 1) / 4, 150 / 4]) / (2.5 / 4))
    # a third budget cuts both: one more prompt each, and one more call of 0.1 s for the second
    more = {"tokens": np.insert(tokens, 0, 20, axis=1), "finished": np.insert(o.finished, 0, False, axis=1)}
    more |= {"p2": np.insert(o.p2, 0, 0.5, axis=1), "t2": np.insert(o.t2, 0, 0.2, axis=2), "budgets": [20, 50, 100]}
    three = replace(o, **more, label_mass=None, estimated=None)
    found = pace([three, replace(three, concurrency=[20])], "base")
    np.testing.assert_allclose(found.work[0], 10 * np.array([(5 + 4 + 1 + 1) / 4, 150 / 4]) / (2.6 / 4))


def test_one_budget_is_read_once():
    o = collected(13, 1.0)
    one = replace(o, p2=o.p2[:, 1:], tokens=o.tokens[:, 1:], finished=o.finished[:, 1:], t2=o.t2[:, :, 1:],
                  budgets=[100], label_mass=None, estimated=None)  # fmt: skip
    found = pace([one, replace(one, concurrency=[26])], "base")
    np.testing.assert_allclose(found.work[0], 13 * np.array([2.0, 50.0]) / 0.6)  # 3 prompts and 1.1 s, or 1 and 0.1 s


def test_seconds_that_are_not_known_have_no_pace():
    o = collected(8, 1.0)
    with pytest.raises(CalibError, match="arm base has no seconds at 8 requests in flight"):
        pace([replace(o, t1=np.full((1, o.n), np.nan)), collected(16, 2.0)], "base")


POLICY = Policy(threshold=0.7, mix=1.0, think_budget=50)


def test_work_of_a_policy():
    np.testing.assert_array_equal(work_of(decide(collected(8, 1.0, n=2), POLICY)), [[3.0, 50.0], [1.0, 0.0]])


def test_a_forecast_says_what_it_rests_on():
    recorded = [collected(1, 1.0), replace(collected(8, 1.5), estimated=[[False, True, True]]), collected(64, 4.0)]
    asked = [o.take(np.arange(30)) for o in recorded]
    found = forecast(recorded, asked, POLICY, np.arange(30) * 100.0)
    np.testing.assert_allclose(found.latency, np.where(np.arange(30) % 2 == 0, 0.6, 0.1))  # each alone
    assert (found.concurrency, found.estimated, found.nearest) == ((1, 8, 64), (8,), 0)
    # a request: 2 prompts, 25 tokens; 64 in flight did 64 * 2.5 prompts and 64 * 50 tokens in 2.6 s
    assert found.capacity == pytest.approx(64 * 2.5 / 2.6 / 2)
    assert found.to_dict() == {
        "concurrency": [1, 8, 64],
        "nearest": 1,
        "estimated": [8],
        "in_flight": pytest.approx(found.latency.sum() / 2900.1),
        "most_in_flight": 1,
        "saturated": 0.0,
        "capacity": pytest.approx(30.77, abs=0.01),
        "lower_bound": True,  # 25 tokens a request would let 49 through
    }
    (guessed,) = found.warnings(0.01)
    assert guessed == "the seconds of some questions at 8 in flight are estimated, and so is what rests on them"
    assert replace(found, estimated=()).warnings(0.01) == []
    # 27.7 of 30.77 requests/s leave a tenth of the server: 1 % of all of it is 9 % of the rest
    assert found.warnings(0.7 * found.capacity) == [guessed]
    near, last = found.warnings(0.9 * found.capacity)
    assert last == guessed
    assert near.startswith(
        "27.7 requests/s are 90% of the 30.8/s that the recorded loads show to be possible: if that is 1 % off, "
        "latency is about 9 % off. The capacity of 30.8 requests/s is a lower bound: prompts bind here"
    )
    said = found.warnings(31.0)[0]
    assert said.startswith("31 requests/s arrive, more than any recorded load shows to be possible")
    assert "lower bound" in said
    assert "overloaded" not in said
    busy = forecast(recorded, asked, POLICY, np.arange(30) / 20.0)
    assert busy.nearest == 1
    assert (busy.latency >= found.latency).all()


def test_a_verification_is_predicted_again_from_its_ids():
    recorded = [collected(1, 1.0), collected(8, 1.5)]
    order = np.random.default_rng(5).permutation(40)[:30]
    arrivals = np.arange(30) / 3
    expected = forecast(recorded, [o.take(order) for o in recorded], POLICY, arrivals)
    found = replay(recorded, POLICY, recorded[0].ids[order].tolist(), arrivals)
    np.testing.assert_array_equal(found.latency, expected.latency)
    assert np.unique(np.round(found.latency, 3)).size > 2  # they wait for each other
    with pytest.raises(CalibError, match="question elsewhere is none of the 40 recorded ones"):
        replay(recorded, POLICY, ["elsewhere"], [0.0])
    twice = [replace(o, ids=["same"] * 2, dataset=["a", "b"]) for o in (r.take(np.arange(2)) for r in recorded)]
    with pytest.raises(CalibError, match="share an id"):
        replay(twice, POLICY, ["same"], [0.0])


def test_no_request_is_predicted_to_outlast_its_deadline():
    recorded = [collected(1, 1.0), collected(8, 4.0)]
    late = forecast(recorded, recorded, POLICY, np.zeros(40))
    kept = forecast(recorded, recorded, replace(POLICY, deadline=1.5), np.zeros(40))
    thinks = np.arange(40) % 2 == 0
    assert late.latency.max() > 1.5
    assert kept.latency[thinks].max() <= 1.5


@pytest.mark.parametrize(
    ("flight", "said"),
    [
        (Flight(np.ones(1), 9.0, 40, 0.2), "for 20% of the time more is asked of the server than at the highest"),
        (Flight(np.ones(1), 3.0, 5, 0.0), "3 requests are in flight on average, fewer than at the lowest recorded"),
    ],
)
def test_what_is_beyond_the_recorded_loads_is_said(flight, said):
    found = Forecast(flight, (8, 32), (), math.inf, prompts_bind=False)
    (warning,) = found.warnings(100.0)
    assert warning.startswith(said)
    assert found.to_dict()["capacity"] is None


@pytest.mark.parametrize(("most", "higher"), [(31, False), (32, True), (40, True)])
@pytest.mark.parametrize("prompts_bind", [False, True])
def test_a_higher_load_is_asked_for_only_where_as_many_were_in_flight(most, higher, prompts_bind):
    found = Forecast(Flight(np.ones(1), 9.0, most, 0.2), (8, 32), (), 500.0, prompts_bind)
    (warning,) = found.warnings(100.0)
    assert ("calib collect QUESTIONS --concurrency 64" in warning) == higher
    assert ("The capacity of 500 requests/s is a lower bound" in warning) == prompts_bind


@pytest.mark.parametrize(("threshold", "budget", "prompts_bind"), [(0.7, 50, True), (0.7, 100, False), (0.0, 50, True)])
def test_which_kind_of_work_sets_the_capacity(threshold, budget, prompts_bind):
    # each question of the collection is 2.5 prompts and 50 tokens; of the policy 2 prompts and 25 or 50 tokens, or 1
    recorded = [collected(1, 1.0), collected(8, 1.5)]
    policy = replace(POLICY, threshold=threshold, think_budget=budget)
    found = forecast(recorded, recorded, policy, np.arange(40) * 10.0)
    assert found.prompts_bind == found.to_dict()["lower_bound"] == prompts_bind
    said = found.warnings(2 * found.capacity)[0]
    assert said.startswith("overloaded: ") == (not prompts_bind)


def test_a_collection_that_never_thought_shows_how_many_prompts_it_can_do():
    recorded = [replace(o, can_think=np.zeros(40, dtype=bool)) for o in (collected(1, 1.0), collected(8, 1.5))]
    found = forecast(recorded, recorded, POLICY, np.arange(40) * 10.0)
    assert found.capacity == pytest.approx(8 / 0.15)
    assert not found.prompts_bind

"""Exact tests: closed forms, published tables, and simulations at the boundary."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from calib import exact
from calib.errors import CalibError


def test_clopper_pearson_at_the_ends_has_a_closed_form():
    # none of n: upper end solves (1 - p)^n = alpha / 2;  all of n: lower end solves p^n = alpha / 2
    low, high = exact.clopper_pearson(0, 10)
    assert low == 0
    assert high == pytest.approx(1 - 0.025 ** (1 / 10))
    low, high = exact.clopper_pearson(10, 10)
    assert low == pytest.approx(0.025 ** (1 / 10))
    assert high == 1
    assert exact.clopper_pearson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 400), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
@settings(max_examples=60)
def test_clopper_pearson_is_the_exact_interval_of_scipy(n, data, level):
    k = data.draw(st.integers(0, n))
    expected = stats.binomtest(k, n).proportion_ci(level, method="exact")
    assert exact.clopper_pearson(k, n, level) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_binomial_test_by_hand():
    # nothing over the limit among 29: 0.9^29 = 0.0471 <= 0.05, but 0.9^28 = 0.0523
    assert exact.binomial_test_at_most(0, 29, 0.1) == pytest.approx(0.9**29)
    assert exact.binomial_test_at_most(0, 28, 0.1) == pytest.approx(0.9**28)
    # one of three at share 1/2: (1 + 3) / 8
    assert exact.binomial_test_at_most(1, 3, 0.5) == pytest.approx(0.5)
    assert exact.binomial_test_at_most(0, 0, 0.1) == 1
    assert exact.binomial_test_at_most(3, 3, 0.5) == 1
    assert exact.binomial_test_at_most(0, 50, 0.0) == 1  # no count certifies a share below 0


@pytest.mark.parametrize(
    ("rate", "alpha", "first"),
    [(0, 0.05, 29), (5, 0.05, 76), (7, 0.05, 227), (8, 0.05, 537), (0, 0.0025, 57), (5, 0.0025, 234)],
)
def test_the_first_number_of_questions_that_certifies_ten_percent(rate, alpha, first):
    # the usual table: observed percentage over the limit, counts rounded down, first n that passes
    passing = (n for n in range(1, 2000) if exact.binomial_test_at_most(rate * n // 100, n, 0.1) <= alpha)
    assert next(passing) == first


@given(st.integers(0, 300), st.floats(0.01, 0.99), st.sampled_from([0.05, 0.01, 0.2]))
@settings(max_examples=80)
def test_critical_count_is_the_last_that_passes(n, share, alpha):
    k = exact.critical_count(n, share, alpha)
    assert k == max((j for j in range(n + 1) if n and exact.binomial_test_at_most(j, n, share) <= alpha), default=-1)


def test_critical_count_by_hand():
    assert exact.critical_count(29, 0.1, 0.05) == 0
    assert exact.critical_count(28, 0.1, 0.05) == -1
    assert exact.critical_count(50, 0.0, 0.05) == -1


@given(st.integers(1, 60), st.data(), st.sampled_from([0.1, 0.3, 0.5]), st.sampled_from([0.05, 0.01]))
@settings(max_examples=50)
def test_questions_needed_is_the_point_after_the_last_failure(n, data, share, alpha):
    k = data.draw(st.integers(0, n))
    needed = exact.questions_needed(k, n, share, alpha)
    if k >= share * n:
        assert needed is None
        return
    if share - k / n < 0.02:
        return  # brute force would be long
    m = np.arange(1, 20_000)
    fails = stats.binom.cdf((2 * k * m + n) // (2 * n), m, share) > alpha
    assert needed == int(m[fails][-1]) + 1


def test_questions_needed_at_special_rates():
    assert exact.questions_needed(0, 5, 0.1, 0.05) == 29
    assert exact.questions_needed(1, 10, 0.1, 0.05) is None  # at the limit
    assert exact.questions_needed(0, 0, 0.1, 0.05) is None
    assert exact.questions_needed(0, 9, 0.0, 0.05) is None
    assert exact.questions_needed(99_999, 1_000_000, 0.1, 0.05) is None  # within a hair of it
    needed = exact.questions_needed(99, 1000, 0.1, 0.05)  # 1.645^2 * 0.09 / 0.001^2 = 243,500 by normal approximation
    assert needed == pytest.approx(243_500, rel=0.03)


def test_a_count_outside_its_questions_is_refused():
    with pytest.raises(CalibError, match="4 of 3"):
        exact.clopper_pearson(4, 3)


def test_bounded_test_by_hand():
    # four blocks of capacity 1, nothing lost, share 1/2: Bentkus e / 16, Hoeffding exp(-4 ln 2) = 1 / 16
    assert exact.bounded_test_at_most(0, np.ones(4), 0.5) == pytest.approx(1 / 16)
    # two of ten at 1/2: kl(0.2, 0.5) = 0.2 ln 0.4 + 0.8 ln 1.6 = 0.19274; exp(-1.9274) = 0.1455 beats e * 56 / 1024
    assert exact.bounded_test_at_most(2, np.ones(10), 0.5) == pytest.approx(
        math.exp(-2 * math.log(0.4) - 8 * math.log(1.6))
    )
    # 60 of 400 at 0.2: Bentkus is the smaller one
    assert exact.bounded_test_at_most(60, np.ones(400), 0.2) == pytest.approx(math.e * stats.binom.cdf(60, 400, 0.2))
    # capacities 1 and 3, nothing lost at 1/2: scaled to 3 the mean is 1/3, Hoeffding (2/3)^2 = 0.444;
    # unequal capacities exp(-2 * 2^2 / 10) = 0.449
    assert exact.bounded_test_at_most(0, np.array([1.0, 3.0]), 0.5) == pytest.approx(4 / 9)
    assert exact.bounded_test_at_most(5, np.ones(10), 0.5) == 1
    assert exact.bounded_test_at_most(5, np.ones(10), 1.01) == 0
    assert exact.bounded_test_at_most(0, np.ones(10), 0.0) == 1


@given(st.integers(1, 60), st.data(), st.floats(0.05, 0.95))
@settings(max_examples=60)
def test_the_conservative_bound_never_beats_the_exact_test(n, data, share):
    k = data.draw(st.integers(0, n))
    assert exact.bounded_test_at_most(k, np.ones(n), share) >= exact.binomial_test_at_most(k, n, share) - 1e-12


def test_scaling_capacities_changes_nothing():
    c = np.array([0.3, 0.7, 0.7, 1.1])
    assert exact.bounded_test_at_most(0.5, c, 0.8) == pytest.approx(exact.bounded_test_at_most(500, 1000 * c, 0.8))


def test_the_bound_keeps_its_level_when_groups_answer_as_one():
    rng = np.random.default_rng(1)
    sizes = np.tile([1.0, 1, 2, 4], 40)
    naive, kept = 0, 0
    for _ in range(2000):
        lost = float((sizes * (rng.random(sizes.size) < 0.3)).sum())  # a whole group breaks it or none of it
        kept += exact.bounded_test_at_most(lost, sizes, 0.3) <= 0.05
        naive += exact.binomial_test_at_most(int(lost), int(sizes.sum()), 0.3) <= 0.05
    assert exact.clopper_pearson(kept, 2000)[1] <= 0.05
    assert exact.clopper_pearson(naive, 2000)[0] > 0.05  # taking questions of a group as independent does not


def test_bounded_interval_is_the_inverse_of_the_test():
    c = np.array([1.0, 2, 2, 3, 5] * 8)
    low, high = exact.bounded_interval(40.0, c)
    assert low < 40 / c.sum() < high
    assert exact.bounded_test_at_most(40, c, high) == pytest.approx(0.025, rel=1e-3)
    assert exact.bounded_test_at_most(c.sum() - 40, c, 1 - low) == pytest.approx(0.025, rel=1e-3)
    assert exact.bounded_interval(0.0, np.ones(20))[0] == 0
    assert exact.bounded_interval(20.0, np.ones(20))[1] == 1


def test_bounded_needed_is_enough():
    c, lost = np.ones(20), 2.0
    factor = exact.bounded_needed(lost, c, 0.3, 0.05)
    assert factor is not None
    times = math.ceil(factor)
    assert exact.bounded_test_at_most(lost * times, np.ones(20 * times), 0.3) <= 0.05
    assert exact.bounded_needed(6.0, c, 0.3, 0.05) is None


def test_mcnemar_by_hand():
    assert exact.mcnemar(0, 0) == 1
    assert exact.mcnemar(5, 0) == pytest.approx(2 / 32)
    assert exact.mcnemar(1, 4) == pytest.approx(2 * (1 + 5) / 32)
    assert exact.mcnemar(3, 3) == 1


def test_holm_by_hand():
    # sorted 0.01, 0.02, 0.04: times 3, 2, 1
    assert exact.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    # an adjusted value never falls below that of a smaller p: 0.03 * 2 = 0.06 holds for 0.04 too
    assert exact.holm([0.03, 0.04]) == pytest.approx([0.06, 0.06])
    assert exact.holm([]).size == 0


@pytest.mark.parametrize(("n", "ranks"), [(100, (84, 96)), (325, (282, 304)), (1000, (881, 919))])
def test_ranks_of_a_measured_p90(n, ranks):
    assert exact.percentile_ranks(n, 90) == ranks


def test_percentile_interval_says_when_it_has_no_end():
    low, high = exact.percentile_interval(np.arange(20.0), 99)
    assert math.isfinite(low)
    assert high == math.inf
    assert exact.percentile_interval([1.0, 2.0], 50)[0] == -math.inf
    assert all(math.isnan(x) for x in exact.percentile_interval([1.0, np.nan], 50))
    assert all(math.isnan(x) for x in exact.percentile_interval([], 50))


def test_percentile_interval_covers_the_truth_often_enough():
    rng = np.random.default_rng(2)
    truth = -math.log(0.1)  # p90 of an exponential distribution
    ends = np.array([exact.percentile_interval(rng.exponential(size=150), 90) for _ in range(1000)])
    covered = int(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).sum())
    assert exact.clopper_pearson(covered, 1000)[1] >= 0.95

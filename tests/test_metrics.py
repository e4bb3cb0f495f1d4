import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from calib import metrics
from calib.errors import CalibError

NAN = float("nan")


def random_case(seed, n=40, c=4):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(c), n)
    return p, rng.integers(0, c, n), rng.integers(1, 5, n).astype(float)


def test_brier_by_hand():
    p = np.array([[0.8, 0.2], [0.4, 0.6]])
    # (0.8 - 1)^2 + 0.2^2 = 0.08;  (0.4 - 1)^2 + 0.6^2 = 0.72;  mean 0.40
    assert metrics.brier(p, [0, 0]) == pytest.approx(0.40)
    assert metrics.brier(p, [0, 0], [3, 1]) == pytest.approx((3 * 0.08 + 0.72) / 4)


def test_nll_by_hand_and_clipped():
    p = np.array([[0.5, 0.5], [1.0, 0.0]])
    assert metrics.nll(p, [0, 1]) == pytest.approx((np.log(2) - np.log(1e-12)) / 2)
    assert metrics.nll_clipped(p, [0, 1]) == 1
    assert metrics.nll_clipped(p, [0, 0]) == 0


def test_ece_by_hand_bin_edges_belong_to_the_lower_bin():
    # With 2 bins, (0, 0.5] and (0.5, 1]: 0.5 lies in the first.
    p = np.array([[0.5, 0.5], [0.9, 0.1], [0.7, 0.3]])
    bins = metrics.reliability(p, [1, 0, 1], bins=2)
    assert bins.count.tolist() == [1, 2]
    assert bins.confidence.tolist() == pytest.approx([0.5, 0.8])
    assert bins.accuracy.tolist() == pytest.approx([0.0, 0.5])
    assert bins.ece == pytest.approx((1 * 0.5 + 2 * 0.3) / 3)


def test_the_first_of_equal_probabilities_wins_and_nan_is_no_answer():
    p = np.array([[0.4, 0.4, 0.2], [NAN, NAN, NAN], [0.2, 0.4, 0.4]])
    assert metrics.chosen(p).tolist() == [0, -1, 1]
    assert metrics.accuracy(p, [0, 0, 1]) == pytest.approx(2 / 3)


def test_scores_of_probabilities_leave_out_what_has_no_answer():
    p = np.array([[0.8, 0.2], [NAN, NAN]])
    assert metrics.brier(p, [0, 0]) == pytest.approx(0.08)
    assert metrics.nll(p, [0, 0]) == pytest.approx(-np.log(0.8))
    assert metrics.ece(p, [0, 0]) == pytest.approx(0.2)


@pytest.mark.parametrize("score", [metrics.accuracy, metrics.brier, metrics.nll, metrics.ece])
def test_no_data_is_nan_and_not_a_flattering_zero(score):
    assert np.isnan(score(np.empty((0, 2)), np.empty(0, int)))


def test_skill_by_hand():
    # chance = (1/2 + 1/4) / 2 = 0.375
    assert metrics.skill(0.75, [2, 4]) == pytest.approx(0.375 / 0.625)
    assert metrics.skill(0.375, [2, 4]) == 0


@given(st.integers(0, 10_000))
def test_agreement_with_scikit_learn(seed):
    p, y, w = random_case(seed)
    assert metrics.accuracy(p, y, w) == pytest.approx(reference.accuracy_score(y, p.argmax(1), sample_weight=w))
    assert metrics.nll(p, y, w) == pytest.approx(reference.log_loss(y, p, sample_weight=w, labels=range(4)))
    expected = reference.brier_score_loss(y, p, sample_weight=w, labels=range(4), scale_by_half=False)
    assert metrics.brier(p, y, w) == pytest.approx(expected)
    f1 = reference.f1_score(y, p.argmax(1), average="macro", sample_weight=w)
    assert metrics.macro_f1(p, y, weight=w) == pytest.approx(f1)


def test_macro_f1_pools_the_labels_of_fixed_sets_only():
    p = np.eye(2)[[0, 1, 1, 0]]
    # set 7: label 0 right once, label 1 once: F1 1 and 1; the third question has no fixed set, the fourth is wrong
    # in set 9: its right label 1 has F1 0, the chosen label 0 has F1 0
    assert metrics.macro_f1(p, [0, 1, 0, 1], [7, 7, -1, 9]) == pytest.approx((1 + 1 + 0 + 0) / 4)
    assert np.isnan(metrics.macro_f1(p, [0, 1, 0, 1], [-1] * 4))


def test_macro_f1_counts_a_missing_answer_as_missed():
    p = np.array([[1.0, 0.0], [NAN, NAN]])
    # label 0: one hit, one miss, no false alarm: F1 = 2 / (2 + 1)
    assert metrics.macro_f1(p, [0, 0]) == pytest.approx(2 / 3)


def test_percentile_is_the_smallest_value_that_enough_do_not_exceed():
    x = np.arange(1, 11)
    assert metrics.percentiles(x, [50, 90, 91, 100]).tolist() == [5, 9, 10, 10]
    assert metrics.percentile([3.0], 50) == 3.0
    assert metrics.percentile([1, 2, np.inf], 99) == np.inf
    assert np.isnan(metrics.percentile([1, NAN], 50))
    assert np.isnan(metrics.percentile([], 50))


def test_weighted_percentile_by_hand():
    # cumulative weight of 1, 2, 3 is 1, 2, 10: 20 % of 10 is reached at 2, anything above at 3
    assert metrics.percentiles([3, 1, 2], [10, 20, 21], [8, 1, 1]).tolist() == [1, 2, 3]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=60),
    st.sampled_from([1.0, 0.1, 1 / 3, 7.7]),
    st.sampled_from([1, 10, 30, 50, 70, 90, 95, 99, 100]),
)
def test_constant_weights_equal_no_weights_and_numpy(values, weight, q):
    plain = metrics.percentile(values, q)
    assert metrics.percentile(values, q, np.full(len(values), weight)) == plain
    x = np.sort(values)
    rank = next(k for k in range(1, len(x) + 1) if 100 * k >= q * len(x))  # exact in integers
    assert plain == x[rank - 1]


@given(st.integers(0, 10_000))
def test_integer_weights_equal_repetition(seed):
    _, _, w = random_case(seed, 15)
    x = np.random.default_rng(seed).integers(0, 6, 15)
    repeated = np.repeat(x, w.astype(int))
    for q in (10, 50, 90, 99):
        assert metrics.percentile(x, q, w) == metrics.percentile(repeated, q)


@pytest.mark.parametrize("q", [0, -1, 101])
def test_a_percentile_outside_its_range_is_refused(q):
    with pytest.raises(CalibError, match="percentile"):
        metrics.percentile([1.0], q)


def test_risk_coverage_by_hand():
    curve = metrics.risk_coverage([0.9, 0.8, 0.8, 0.5], [True, False, True, False])
    assert curve.coverage.tolist() == [0.25, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 3, 2 / 4])
    assert metrics.aurc([0.9, 0.8, 0.8, 0.5], [True, False, True, False]) == pytest.approx(0.5 / 3 + 0.25 / 2)

"""Who is thought about next, and what each thought stands for: by hand, by brute force, and as properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.sampling import Sampling, allocate, bands, place, presented


def sampling(test, stratum, band, rounds, wrong=None):
    wrong = np.zeros(len(test), dtype=bool) if wrong is None else np.array(wrong, dtype=bool)
    return Sampling(np.array(test, dtype=bool), np.array(stratum), np.array(band), wrong, np.array(rounds))


def test_bands_begin_at_their_edge():
    assert bands([0.2, 0.5, 0.6999, 0.7, 0.95, 0.9995, 1.0]).tolist() == [0, 1, 1, 2, 5, 7, 7]


def test_places_are_uniform_and_have_nothing_to_do_with_the_split():
    keys = [f"{i:064x}" for i in range(2000)]
    one, other = np.array([place(key) for key in keys]), np.array([place(key, "other") for key in keys])
    assert abs(one.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.07
    assert place("a") == place("a")


def test_a_thought_on_the_tune_side_stands_for_its_stratum():
    # band 0: 4 questions, 2 thoughts -> 2 each; band 3: 3 questions, 1 thought -> 3; the other dataset: 1 of 1
    plan = sampling([0] * 8, [0] * 7 + [1], [0, 0, 0, 0, 3, 3, 3, 0], [1, 1, 0, 0, 2, 0, 0, 1])
    done = [True, True, False, False, True, False, False, True]
    assert presented(plan, done).tolist() == [2, 2, 0, 0, 3, 0, 0, 1]


def test_a_band_without_a_thought_joins_the_nearest_one_and_a_dataset_without_any_is_left_out():
    plan = sampling([0] * 5, [0, 0, 0, 0, 1], [1, 3, 2, 2, 1], [1, 1, 0, 0, 0])
    # band 2 is as near to 1 as to 3: the lower takes its two questions
    assert presented(plan, [True, True, False, False, False]).tolist() == [3, 1, 0, 0, 0]


def test_a_stratum_without_a_thought_joins_one_where_system1_does_alike_before_a_nearer_band():
    # wrong in band 0 has none: its 2 questions join the wrong one of band 7, not the right one of band 0
    plan = sampling([0] * 4, [0] * 4, [0, 0, 7, 0], [0, 0, 1, 1], wrong=[1, 1, 1, 0])
    assert presented(plan, [False, False, True, True]).tolist() == [0, 0, 3, 1]
    # nothing of the kind anywhere: then the other one
    plan = sampling([0] * 3, [0] * 3, [0, 0, 7], [0, 0, 1], wrong=[1, 1, 0])
    assert presented(plan, [False, False, True]).tolist() == [0, 0, 3]


def test_the_test_side_is_a_plain_random_sample_of_whole_rounds():
    plan = sampling([1] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [1, 1, 2, 2, 0, 0])
    # a question that was not chosen does not count, though it was thought about
    assert presented(plan, [True, True, True, True, True, False]).tolist() == [1.5, 1.5, 1.5, 1.5, 0, 0]
    # round 2 was interrupted: its answered question is one of those that were quick
    assert presented(plan, [True, True, True, False, False, False]).tolist() == [3, 3, 0, 0, 0, 0]
    # once all were thought about, all count
    assert presented(plan, [True] * 6).tolist() == [1] * 6


@given(st.integers(0, 2**32 - 1))
def test_what_is_there_stands_for_all_but_lost_datasets(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    test, stratum = rng.random(n) < 0.3, rng.integers(0, 4, n)
    chosen = rng.integers(0, 3, n)
    plan = Sampling(test, stratum, rng.integers(0, 8, n), rng.random(n) < 0.4, chosen)
    done = chosen > 0
    weight = presented(plan, done)
    assert (weight[~done] == 0).all()
    if (test & done).any():
        assert weight[test].sum() == pytest.approx(test.sum())
        assert len(set(weight[test & done].tolist())) == 1  # exact tests need equal weights
    for number in range(4):
        here = ~test & (stratum == number)
        if (here & done).any():
            assert weight[here].sum() == pytest.approx(here.sum())


def test_the_mean_over_all_samples_is_the_mean_of_all():
    """Horvitz and Thompson: 3 of 5 in one band, 1 of 3 in the other; every sample that can be drawn."""
    values = np.array([1.0, 0, 0, 1, 1, 0, 1, 1])
    band = np.array([0] * 5 + [6] * 3)
    found = []
    for low in itertools.combinations(range(5), 3):
        for high in range(5, 8):
            chosen = np.isin(np.arange(8), [*low, high]).astype(int)
            weight = presented(sampling(np.zeros(8), np.zeros(8, int), band, chosen), chosen > 0)
            found.append((weight * values).sum() / weight.sum())
    assert np.mean(found) == pytest.approx(values.mean())


def test_every_stratum_comes_first_then_the_most_uncertain():
    # one thought each for the three, largest first; then where N^2 v / (n (n + 1)) is largest
    size, held = [10, 20, 5], [0, 0, 0]
    assert allocate(size, held, [0.1, 0.1, 0.1], [1, 1, 1], 2).tolist() == [1, 1, 0]
    assert allocate(size, held, [0.1, 0.1, 0.1], [1, 1, 1], 4).tolist() == [1, 2, 1]
    assert allocate([3, 3], [1, 1], [1.0, 1e-9], [1, 1], 9).tolist() == [2, 2]
    assert allocate([], [], [], [], 5).tolist() == []


@given(st.integers(0, 2**32 - 1))
def test_no_other_sharing_out_has_less_variance(seed):
    rng = np.random.default_rng(seed)
    size = rng.integers(2, 6, 3)
    variance = rng.random(3) + 0.01
    held = np.ones(3, dtype=int)
    extra = int(rng.integers(0, size.sum() - 3 + 1))
    more = allocate(size, held, variance, np.ones(3), extra)
    assert more.sum() == extra
    assert (held + more <= size).all()

    def left(n):
        return float((size**2 * variance / n).sum())

    rivals = [n for n in itertools.product(*(range(1, s + 1) for s in size)) if sum(n) == extra + 3]
    assert left(held + more) <= min(left(np.array(n)) for n in rivals) * (1 + 1e-12)


def test_dear_thoughts_are_bought_less_often():
    cheap, dear = allocate([100, 100], [1, 1], [0.2, 0.2], [1, 4], 40)
    assert cheap > dear > 0
    assert cheap * 1 + dear * 4 <= 40 * 2.5 + 1e-9  # what 40 thoughts cost in the mean

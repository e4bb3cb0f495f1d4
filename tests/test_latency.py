"""Rates, the robust line with resampled residuals, and the grammar of rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.latency import MIN_ROWS, RateModel, fit_line, parse_rates, picks, resample


def keys(n):
    return np.arange(n, dtype=np.uint64) * np.uint64(7919)


def test_rate_model_by_hand():
    model = RateModel(0.045, 250, read_s=0.04)
    assert model.t1 == 0.045
    # 500 tokens at 250 a second are 2 s, and the read 0.04 s
    np.testing.assert_array_equal(model.t2([0, 500, np.nan]), [0.04, 2.04, np.nan])


@pytest.mark.parametrize("bad", [(-1, 250, 0), (0.1, 0, 0), (0.1, np.inf, 0), (0.1, 250, -0.1), (np.nan, 250, 0)])
def test_rate_model_refuses(bad):
    with pytest.raises(CalibError):
        RateModel(*bad)


def test_line_is_exact_on_a_line():
    tokens = np.array([10, 20, 30, 40, 50, 60, 70, 80, 90, 100])
    line = fit_line(tokens, 0.5 + 0.02 * tokens)
    assert (line.slope, line.intercept) == (pytest.approx(0.02), pytest.approx(0.5))
    np.testing.assert_allclose(line.predict([55, 200], keys(2)), [0.5 + 1.1, 0.5 + 4.0])


def test_stragglers_do_not_tilt_the_line_but_stay_in_the_tail():
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, 1000, 2000).astype(float)
    slow = rng.random(2000) < 0.1 * (tokens > 500)  # a tenth of the long ones hang for 10 s
    line = fit_line(tokens, 0.1 + 0.01 * tokens + 0.02 * rng.standard_normal(2000) + 10 * slow)
    assert line.slope == pytest.approx(0.01, rel=0.02)
    least_squares = np.polyfit(line.tokens, line.intercept + line.slope * line.tokens + line.residuals, 1)[0]
    assert least_squares > 0.0105  # what the stragglers would have done
    long = line.predict(np.full(4000, 900.0), picks(keys(4000), 900.0))
    short = line.predict(np.full(4000, 100.0), picks(keys(4000), 100.0))
    assert (long > 15).mean() == pytest.approx(0.1, abs=0.04)
    assert short.max() < 2  # the tail of long thoughts is not lent to short ones


@given(st.integers(0, 2**32 - 1), st.integers(MIN_ROWS, 700))
def test_predictions_are_never_negative_and_do_not_hang_on_the_order_of_rows(seed, n):
    rng = np.random.default_rng(seed)
    tokens, seconds = rng.integers(0, 50, n).astype(float), rng.exponential(1.0, n)
    line, order = fit_line(tokens, seconds), rng.permutation(n)
    again = fit_line(tokens[order], seconds[order])
    assert line.slope >= 0
    at, pick = rng.uniform(0, 60, 20), picks(keys(20), 0.0)
    assert (line.predict(at, pick) >= 0).all()
    np.testing.assert_array_equal(line.predict(at, pick), again.predict(at, pick))


def test_more_rows_than_pairs_can_be_looked_at():
    tokens = np.arange(5000.0)
    line = fit_line(tokens, 1 + 0.001 * tokens)
    assert (line.slope, line.intercept) == (pytest.approx(0.001), pytest.approx(1))


def test_constant_tokens_give_the_observed_seconds():
    seconds = np.linspace(1, 2, 11)
    line = fit_line(np.full(11, 64.0), seconds)
    assert (line.slope, line.intercept) == (0, pytest.approx(1.5))
    drawn = line.predict(np.full(500, 64.0), picks(keys(500), 64.0))
    np.testing.assert_allclose(np.unique(drawn.round(9)), seconds.round(9))  # every row lends its residual


def test_a_falling_trend_becomes_flat():
    tokens = np.arange(20.0)
    assert fit_line(tokens, 5 - 0.1 * tokens).slope == 0


def test_too_few_rows_give_no_line():
    tokens = np.arange(MIN_ROWS, dtype=float)
    assert fit_line(tokens, tokens) is not None
    tokens[3] = np.nan
    assert fit_line(tokens, np.arange(MIN_ROWS)) is None


def test_unknown_tokens_give_unknown_seconds():
    line = fit_line(np.arange(20.0), np.arange(20.0))
    assert np.isnan(line.predict([np.nan], keys(1))).all()


def test_resample_returns_observed_values_only():
    values = np.array([np.nan, *np.linspace(0.1, 0.2, 12)])
    drawn = resample(values, picks(keys(400), 0.0))
    assert set(drawn.tolist()) == set(values[1:].tolist())
    assert resample(values[:MIN_ROWS], keys(3)) is None


def test_picks_depend_on_key_and_tokens_alone_and_are_spread():
    a = picks(keys(10_000), 128.0)
    np.testing.assert_array_equal(a, picks(keys(10_000), np.full(10_000, 128.0)))
    assert (a != picks(keys(10_000), 129.0)).all()
    assert np.bincount((a % np.uint64(10)).astype(int)).min() > 850


def test_picks_are_pinned():
    # seconds that are estimated must not change between versions
    assert picks(np.array([1, 2], dtype=np.uint64), [0, 5]).tolist() == picks_by_hand([(1, 0), (2, 5)])


def picks_by_hand(pairs):
    mask, found = 2**64 - 1, []
    for key, tokens in pairs:
        z = (key + (tokens + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


def test_parse_rates():
    assert parse_rates("base=250, mtp=438") == {"base": 250, "mtp": 438}
    assert parse_rates("45") == {"": 45}
    assert parse_rates("45,mtp=50.5") == {"": 45, "mtp": 50.5}


@pytest.mark.parametrize("text", ["", "base", "base=", "=5", "base=fast", "base=-1", "base=nan", "1,,2", "base=1=2,="])
def test_parse_rates_says_how_to_write_them(text):
    with pytest.raises(CalibError, match=r"--system1-ms base=45,mtp=50"):
        parse_rates(text, "--system1-ms")


def test_parse_rates_refuses_an_arm_twice():
    with pytest.raises(CalibError, match="arm 'base' is given twice"):
        parse_rates("base=1,base=2")

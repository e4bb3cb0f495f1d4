"""Numbers that JSON lets in."""

from __future__ import annotations

import json
import math

import pytest

from calib.jsonnumbers import finite, is_number


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e308", "9" * 308])
def test_numbers_that_a_float_can_hold(text):
    assert is_number(json.loads(text))
    assert math.isfinite(float(json.loads(text)))


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "true", "null", '"1"', "[1]"]
)
def test_what_is_none(text):
    assert not is_number(json.loads(text))


def test_what_is_written_is_strict_json():
    assert finite([1, math.nan, [math.inf, 2.5], "x", None, True]) == [1, None, [None, 2.5], "x", None, True]
    assert finite({128: (1.5, -math.inf), "a": {"b": math.nan}}) == {"128": [1.5, None], "a": {"b": None}}

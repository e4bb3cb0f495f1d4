"""What a temperature does to stored probabilities: by hand, against logits, and which one applies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from calib.errors import CalibError
from calib.temperature import HIGHEST, LOWEST, Temperatures, band, cell, retempered

TABLE = Temperatures(p1={"*": 2.0, "choice": 0.5, "choice:3-4": 4.0})


def test_by_hand():
    # squares: 0.64 and 0.04, sum 0.68
    assert retempered([0.8, 0.2], 0.5).tolist() == pytest.approx([0.64 / 0.68, 0.04 / 0.68])
    # roots: of 0.81 and 0.01 they are 0.9 and 0.1, sum 1
    assert retempered(np.array([0.81, 0.01]) / 0.82, 2.0).tolist() == pytest.approx([0.9, 0.1])
    # then nine tenths of it and a tenth of (1/2, 1/2, 0): the third place is padding
    shared = retempered([[0.81 / 0.82, 0.01 / 0.82, 0.0]], [2.0], 0.1, [2])
    assert shared.tolist() == [pytest.approx([0.86, 0.14, 0.0])]
    assert shared[0, 2] == 0


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 20), st.integers(2, 30))
def test_it_is_the_temperature_of_the_softmax_behind(seed, t, options):
    z = np.random.default_rng(seed).normal(0, 4, (5, options))
    np.testing.assert_allclose(retempered(softmax(z, axis=1), t), softmax(z / t, axis=1), rtol=1e-9)


def test_temperature_1_changes_no_bit_whatever_its_neighbours_have():
    p = np.random.default_rng(0).dirichlet(np.ones(4), 6)
    assert (retempered(p, 1.0) == p).all()
    some = retempered(p, np.array([1.0, 2.0] * 3))
    assert (some[::2] == p[::2]).all()
    assert (some[1::2] != p[1::2]).any()


def test_a_stored_0_stays_0_and_no_answer_stays_none():
    q = retempered([[0.0, 1.0], [0.0, 1.0], [np.nan, np.nan]], [0.3, 30.0, 2.0])
    assert q[:2].tolist() == [[0.0, 1.0], [0.0, 1.0]]
    assert np.isnan(q[2]).all()
    assert retempered([0.0, 1.0], 1.0, 0.2).tolist() == pytest.approx([0.1, 0.9])


@given(st.integers(0, 2**32 - 1), st.floats(LOWEST, HIGHEST), st.floats(0, 0.9))
def test_the_order_of_the_options_stays(seed, t, share):
    p = np.random.default_rng(seed).dirichlet(np.ones(5))
    q = retempered(p, t, share)
    assert q.sum() == pytest.approx(1)
    assert (np.diff(q[np.argsort(p)]) >= 0).all()


@pytest.mark.parametrize(
    ("options", "name"),
    [(2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (8, "5-8"), (9, "9-16"), (16, "9-16"), (17, "17-"), (256, "17-")],
)
def test_bands(options, name):
    assert band(options) == name
    assert cell("choice", options) == f"choice:{name}"


def test_the_closest_temperature_holds():
    assert float(TABLE.of("p1")) == 2.0
    assert float(TABLE.of("p1", "noul", 2)) == 2.0
    assert float(TABLE.of("p1", "choice")) == 0.5
    assert float(TABLE.of("p1", "choice", 8)) == 0.5
    assert float(TABLE.of("p1", "choice", 3)) == 4.0
    kinds, counts = np.array(["noul", "choice", "choice"], dtype=object), np.array([2, 8, 3])
    assert TABLE.of("p1", kinds, counts).tolist() == [2.0, 0.5, 4.0]
    assert float(TABLE.of("p2", "choice", 3)) == 1.0


def test_one_question_and_many_agree_to_the_last_bit():
    p = np.random.default_rng(1).dirichlet(np.ones(4), 3)
    kinds, counts = np.array(["choice", "noul", "choice"], dtype=object), np.array([4, 4, 4])
    many = TABLE.at("p1", p, kinds, counts)
    for i in range(3):
        assert TABLE.at("p1", p[i], kinds[i], 4).tolist() == many[i].tolist()


def test_a_cut_thought_is_its_own_class():
    t = Temperatures(p2={"*": 0.5}, cut={"*": 2.0})
    p2 = np.array([[[0.8, 0.2], [0.8, 0.2]]])
    found = t.system2(p2, np.array([[False, True]]))
    assert found[0, 0].tolist() == pytest.approx([2 / 3, 1 / 3])  # roots of 4 : 1
    assert found[0, 1].tolist() == pytest.approx([16 / 17, 1 / 17])
    assert t.system2([0.8, 0.2], finished=False).tolist() == found[0, 0].tolist()
    # without a temperature of its own it stays as it is, and does not take that of finished thoughts
    assert Temperatures(p2={"*": 0.5}).system2([0.8, 0.2], finished=False).tolist() == [0.8, 0.2]


def test_what_changes_nothing_is_not_written():
    t = Temperatures(p2={"*": 1.5}, uniform={"p2": 0.1})
    assert t.to_dict() == {"p2": {"*": 1.5}, "uniform": {"p2": 0.1}}
    assert Temperatures.read(json.loads(json.dumps(t.to_dict()))) == t
    assert hash(Temperatures.read(t.to_dict())) == hash(t)
    assert t.only("p1", "final").nothing
    assert t.only("p2") == t
    assert not t.changes("p1")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"p1": 1.2}, "must map a kind to a number"),
        ({"p1": {"*": "hot"}}, "must be a number"),
        ({"p1": {"*": True}}, "must be a number"),
        ({"p1": {"*": float("nan")}}, "must be a number"),
        ({"p1": {"*": 0.0}}, "from 0.05 to 100"),
        ({"p3": {"*": 1.0}}, "unknown stage 'p3'"),
        ({"uniform": {"p3": 0.1}}, "a stage is one of"),
        ({"uniform": {"p1": 1.0}}, "below 1"),
        ([1.0], "must be a mapping"),
    ],
)
def test_what_is_no_temperature_is_refused(values, said):
    with pytest.raises(CalibError, match=said):
        Temperatures.read(values)

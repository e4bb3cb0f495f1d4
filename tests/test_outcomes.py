import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.outcomes import Outcomes

from .strategies import outcomes


def small(**changes):
    values = {
        "p1": [[0.6, 0.4, 0.0], [0.2, 0.3, 0.5]],
        "p2": [[[0.1, 0.9, 0.0]], [[0.0, 0.0, 1.0]]],
        "tokens": [[5], [7]],
        "finished": [[True], [True]],
        "t1": [[0.1, 0.1]],
        "t2": [[[1.0], [2.0]]],
        "answer": [1, 2],
        "n_options": [2, 3],
        "budgets": [16],
    }
    return Outcomes(**(values | changes))


def test_defaults_are_one_dataset_with_equal_weights():
    o = small()
    assert o.n == 2
    assert o.dataset_names == ("all",)
    assert o.unweighted
    assert o.option_mask.tolist() == [[True, True, False], [True, True, True]]
    assert o.marks_of("base", 16) == ()


def test_arrays_are_frozen():
    with pytest.raises(ValueError, match="read-only"):
        small().p1[0, 0] = 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p1": [[0.6, 0.4, 0.0], [0.2, 0.3, 0.6]]}, "p1 of question '1' in 'all'.*sum 1; 1 of 2"),
        ({"p1": [[0.6, 0.5, -0.1], [0.2, 0.3, 0.5]]}, "p1"),
        ({"p1": [[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]]}, "padded"),
        ({"p1": [[np.nan] * 3, [0.2, 0.3, 0.5]]}, "p1"),
        ({"p2": [[[0.1, 0.8, 0.1]], [[0.0, 0.0, 1.0]]]}, "p2"),
        ({"p2": [[[0.1, np.nan, 0.9]], [[0.0, 0.0, 1.0]]]}, "p2"),
        ({"answer": [2, 2]}, "answer"),
        ({"n_options": [1, 3]}, "n_options"),
        ({"weight": [1, 0]}, "weight"),
        ({"weight": [1, np.inf]}, "weight"),
        ({"tokens": [[-1], [7]]}, "tokens"),
        ({"t1": [[-0.1, 0.1]]}, "t1"),
        ({"budgets": [16, 8]}, "shape"),
        ({"arms": ("a", "b")}, "shape"),
        ({"budgets": [-1]}, "ascend"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    with pytest.raises(CalibError, match=message):
        small(**changes)


def test_a_failed_thought_is_a_row_of_nan():
    o = small(p2=[[[np.nan] * 3], [[0.0, 0.0, 1.0]]])
    assert o.failed.tolist() == [[True], [False]]


def test_what_was_not_collected_is_named_with_the_command_that_collects_it():
    with pytest.raises(CalibError, match=r"there are base.*calib collect .*--arm mtp=URL"):
        small().arm_index("mtp")
    with pytest.raises(CalibError, match=r"there are \[16\].*--budgets 32"):
        small().budget_index(32)


def test_estimated_seconds_and_simulation_are_marks_of_arm_and_budget():
    o = small(estimated=[[False, True]], simulated=True)
    assert o.marks_of("base", 16) == ("estimated", "simulated")
    assert small(estimated=[[True, False]]).marks_of("base", 16) == ("estimated",)


def test_unknown_seconds_are_told():
    assert small().has_latency("base")
    assert not small(t2=[[[np.nan], [2.0]]]).has_latency("base")
    assert small(t2=[[[np.nan], [2.0]]], can_think=[False, True]).has_latency("base")


@given(outcomes(), st.data())
def test_take_keeps_every_field_in_step(o, data):
    which = np.array(data.draw(st.lists(st.integers(0, o.n - 1), min_size=1)))
    t = o.take(which)
    assert t.n == len(which)
    for name in ("p1", "p2", "tokens", "finished", "answer", "weight", "label_mass"):
        np.testing.assert_array_equal(getattr(t, name), getattr(o, name)[which])
    np.testing.assert_array_equal(t.t2, o.t2[:, which])
    assert t.group.tolist() == o.group[which].tolist()
    assert t.budgets is o.budgets


def test_nothing_left_is_an_error():
    with pytest.raises(CalibError, match="no question"):
        small().take(np.zeros(2, bool))


def test_split_is_by_position_and_says_when_a_side_is_empty():
    o = small(split_position=[0.1, 0.9])
    tune, test = o.split(0.3)
    assert tune.ids.tolist() == ["1"]
    assert test is not None
    assert test.ids.tolist() == ["0"]
    assert o.split(0) == (o, None)
    with pytest.raises(CalibError, match="too few to split"):
        o.split(0.05)
    with pytest.raises(CalibError, match="test-share"):
        o.split(1.0)


def test_traffic_gives_each_dataset_its_share():
    o = small(dataset=["x", "y"])
    r = o.reweighted({"x": 3, "y": 1})
    assert r.weight.tolist() == pytest.approx([1.5, 0.5])
    assert o.reweighted({"x": 1}).n == 1
    with pytest.raises(CalibError, match="unknown dataset 'z'; there are: x, y"):
        o.reweighted({"z": 1})
    with pytest.raises(CalibError, match="above 0"):
        o.reweighted({"x": 0})
    with pytest.raises(CalibError, match="0 or more"):
        o.reweighted({"x": -1})


@pytest.mark.parametrize("module", ["calib.policy", "calib.target", "calib.optimise", "calib.certify"])
def test_pure_modules_do_not_load_what_has_disk_or_clock(module):
    heavy = "vllm optuna streamlit sqlalchemy aiohttp fastapi pandas".split()
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

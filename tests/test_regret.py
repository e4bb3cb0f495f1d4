"""What more thoughts could win: what is filled in by hand, and the promise against what all thoughts then say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import evaluate
from calib.regret import filled, regrets


def whole(n: int, seed: int = 0, *, wins: float = 0.5) -> Outcomes:
    """System 1 is calibrated; a thought mends its mistakes with the chance ``wins``, and spoils a tenth of the rest."""
    rng = np.random.default_rng(seed)
    top = rng.uniform(0.4, 1.0, n)
    right = rng.random(n) < top
    answer = rng.integers(3, size=n)
    first = np.where(right, answer, (answer + 1) % 3)
    p1 = np.tile(((1 - top) / 2)[:, None], 3)
    p1[np.arange(n), first] = top
    mended = rng.random(n) < np.where(right, 0.9, wins)
    p2 = np.full((n, 1, 3), 0.01)
    p2[np.arange(n), 0, np.where(mended, answer, (answer + 2) % 3)] = 0.98
    return Outcomes(
        p1=p1,
        p2=p2,
        tokens=np.full((n, 1), 100),
        finished=np.ones((n, 1), bool),
        t1=np.full((1, n), 0.1),
        t2=np.full((1, n, 1), 1.0),
        answer=answer,
        budgets=[100],
    )


def system1(o: Outcomes) -> Outcomes:
    """The same without any thought."""
    return replace(
        o,
        p2=np.empty((o.n, 0, o.p1.shape[1])),
        tokens=np.empty((o.n, 0)),
        finished=np.empty((o.n, 0), bool),
        t2=np.empty((1, o.n, 0)),
        budgets=np.empty(0),
        label_mass=np.full((o.n, 1), np.nan),
        estimated=np.zeros((1, 1), bool),
    )


def test_a_thought_is_carried_over_by_what_it_does_to_the_right_answer() -> None:
    # both are wrong in the same band; the donor's right option is 0, its System 1 ranks 1 before 2; the other's right
    # option is 2, and its System 1 ranks 0 before 1
    o = Outcomes(
        p1=[[0.1, 0.6, 0.3], [0.55, 0.25, 0.2]],
        p2=[[[0.7, 0.2, 0.1]], [[np.nan] * 3]],
        tokens=[[40], [0]],
        finished=[[True], [False]],
        t1=[[0.1, 0.2]],
        t2=[[[1.0], [2.0]]],
        answer=[0, 2],
        budgets=[100],
    )
    thought = o.take([0])
    found = filled(system1(o), thought, np.random.default_rng(0))
    np.testing.assert_allclose(found.p2[:, 0], [[0.7, 0.2, 0.1], [0.2, 0.1, 0.7]])
    assert found.tokens[:, 0].tolist() == [40, 40]
    assert found.t2[0, :, 0].tolist() == [1.0, 1.0]
    assert found.ids.tolist() == ["0", "1"]


def test_more_and_fewer_options_and_failures() -> None:
    two = Outcomes(
        p1=[[0.2, 0.8, 0.0, 0.0], [0.1, 0.6, 0.2, 0.1]],
        p2=[[[0.9, 0.1, 0.0, 0.0]], [[0.4, 0.3, 0.2, 0.1]]],
        tokens=[[1], [1]],
        finished=np.ones((2, 1), bool),
        t1=np.zeros((1, 2)),
        t2=np.zeros((1, 2, 1)),
        answer=[0, 2],
        n_options=[2, 4],
        budgets=[100],
    )
    more = filled(system1(two), two.take([0]), np.random.default_rng(0))
    np.testing.assert_allclose(more.p2[1, 0], [0.0, 0.1, 0.9, 0.0])
    fewer = filled(system1(two), two.take([1]), np.random.default_rng(0))
    np.testing.assert_allclose(fewer.p2[0, 0], [0.2 / 0.5, 0.3 / 0.5, 0, 0])  # of 0.2 and the best of the others, 0.3
    lost = replace(two, p2=np.array([[[np.nan] * 4], two.p2[1]]))
    assert filled(system1(two), lost.take([0]), np.random.default_rng(0)).failed.all()


def test_donors_are_of_the_stratum_and_of_the_bands_around_it_where_it_has_few() -> None:
    o = whole(600, 1)
    rng = np.random.default_rng(0)
    taken = np.sort(rng.choice(600, 200, replace=False))
    marked = replace(o, tokens=np.arange(600.0)[:, None])
    found = filled(system1(marked), marked.take(taken), rng)
    source = found.tokens[:, 0].astype(int)
    assert set(source) <= set(taken.tolist())
    assert (source[taken] == taken).all()  # its own where it has one
    wrong = o.p1.argmax(axis=1) != o.answer
    assert (wrong[source] == wrong).all()
    apart = np.abs(o.p1.max(axis=1)[source] - o.p1.max(axis=1))
    assert np.quantile(apart, 0.9) < 0.3
    # what stands for the others is as good as what they are, in the mean
    np.testing.assert_allclose(found.p2.mean(axis=0), o.p2.mean(axis=0), atol=0.05)


def test_with_all_thoughts_there_is_nothing_to_win() -> None:
    o = whole(200)
    assert regrets(system1(o), o, rng=np.random.default_rng(0), replicates=5).tolist() == [0.0] * 5


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_promise_holds_for_what_all_thoughts_say(share: float) -> None:
    """In nine of ten collections the loss is no larger than the 90th percentile of what was filled in."""
    kept = 0
    for seed in range(20):
        o = whole(500, seed)
        rng = np.random.default_rng(100 + seed)
        taken = np.sort(rng.choice(o.n, int(share * o.n), replace=False))
        thought = o.take(taken)
        promise = np.quantile(regrets(system1(o), thought, rng=rng, replicates=15), 0.9)
        best, ours = optimum(o), optimum(thought).policy
        lost = best.objective - evaluate(o, ours).accuracy
        kept += bool(lost <= promise + 1e-12)
    assert kept >= 15  # 18 are promised; fewer than 15 has a chance of 1 in 100 then


def test_a_large_collection_is_filled_in_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calib.regret.LARGEST", 100)
    o = whole(400)
    found = regrets(system1(o), o.take(np.arange(150)), rng=np.random.default_rng(0), replicates=4)
    assert found.shape == (4,)
    assert (found >= -1e-12).all()
    again = regrets(system1(o), o.take(np.arange(150)), rng=np.random.default_rng(0), replicates=4)
    assert found.tolist() == again.tolist()
    tokens = regrets(system1(o), o.take(np.arange(150)), rng=np.random.default_rng(0), replicates=2, minimize="tokens")
    assert tokens.tolist() == [0.0, 0.0]  # never thinking is the cheapest, whatever is filled in

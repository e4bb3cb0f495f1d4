"""The envelope by hand, and predictions for other traffic that start from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.anytime import reference_interval
from calib.envelope import SAMPLE, bin_of, envelope, read_envelope, sample_of
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Policy, Route, decide, evaluate
from calib.shadow import PREDICTED, predict
from calib.target import parse_targets
from tests.strategies import outcomes

POLICY = Policy(0.7, 0.5, 100)


def questions(**more):
    """Eight questions, two options; the first four think under `POLICY`."""
    sure = np.array([0.55, 0.6, 0.62, 0.68, 0.75, 0.8, 0.9, 0.95])
    tokens = np.array([40.0, 80.0, 100.0, 20.0, 10.0, 10.0, 10.0, 10.0])
    values = {
        "p1": np.stack([sure, 1 - sure], axis=1),
        "p2": np.tile([0.9, 0.1], (8, 1, 1)),
        "tokens": tokens[:, None],
        "finished": (tokens < 100)[:, None],
        "t1": np.full((1, 8), 0.1),
        "t2": tokens[None, :, None] / 10,
        "answer": np.zeros(8, int),
        "budgets": np.array([100]),
        "concurrency": np.array([2]),
    }
    return Outcomes(**(values | more))


def traffic(outcomes):
    """The questions themselves as they would appear in a log of System 1 alone."""
    return [
        {"p1": p1[:k].tolist(), "kind": kind, "dataset": dataset, "at": 10.0 * i}
        for i, (p1, k, kind, dataset) in enumerate(
            zip(outcomes.p1, outcomes.n_options.tolist(), outcomes.kind, outcomes.dataset, strict=True)
        )
    ]


def predicted(record, policy, rows, **more):
    return predict(record, policy, rows, rng=np.random.default_rng(0), resamples=200, **more)


def test_the_record_by_hand():
    record = envelope(questions(), POLICY, parse_targets("p90<8s, accuracy>=90%, tokens<=50"))
    assert record["think"] == {"share": 0.5, "n": 8.0}
    assert record["cut"] == {"share": 0.25, "n": 4.0}  # one of the four thoughts reaches the budget
    assert record["closed"] == record["degraded"] == 0
    assert record["n"] == 8
    assert record["questions"] == "tuned on"
    assert record["chosen_among"] == 9  # a threshold below each question, and one above all
    assert record["limits"] == [
        # latencies 4.1, 8.1, 10.1, 2.1 and four of 0.1: two of eight take 8 s or longer
        {"target": "p90<8s", "dataset": None, "of": 1, "allowed": 0.1, "found": 0.25, "n": 8},
        {"target": "tokens<=50", "dataset": None, "of": 1, "allowed": 50.0, "found": 30.0, "n": 8},
    ]
    assert record["unseen"] == ["accuracy>=90%"]
    assert record["speed"] == pytest.approx(10.0)
    assert record["thought"]["cuts"] == pytest.approx([20, 30, 60, 90, 100])
    assert record["thought"]["below"] == [0, 0.25, 0.5, 0.75, 1]
    assert record["confidence"]["below"] == pytest.approx(np.arange(9) / 8)
    assert record["load"] == {"arm": "base", "concurrency": 2, "tokens_per_second": pytest.approx(2 * 280 / 28.8)}


@given(outcomes(), st.floats(0, 1.1))
@settings(max_examples=30)
def test_every_record_is_read_back_as_it_was_written(o, threshold):
    policy = Policy(threshold, 0.5, int(o.budgets[-1]), o.arms[0])
    record = envelope(o, policy, parse_targets("think_rate<50%, tokens<=50"))
    assert read_envelope(json.loads(json.dumps(record, allow_nan=False))) == record


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("schema", 2, "envelope of schema 2"),
        ("n", 8.5, "envelope.n "),
        ("n", True, "envelope.n "),
        ("closed", math.nan, "envelope.closed "),
        ("closed", 10**400, "envelope.closed "),
        ("chosen_among", 0, "envelope.chosen_among "),
        ("marks", ["estimated", 3], r"envelope.marks\[1\] "),
        ("think", None, "envelope.think "),
        ("cut", {"share": None}, "envelope.cut "),
        ("confidence", {"cuts": [0.1, 0.2], "below": [0.0], "n": 8}, "envelope.confidence "),
        ("limits", [{"target": "p90<8s"}], r"envelope.limits\[0\] "),
        ("datasets", {"d": {"share": 1}}, "envelope.datasets.d "),
        ("shadow", {"low": 0, "high": 1, "edges": [0.5], "bands": []}, "envelope.shadow.bands "),
    ],
)
def test_a_record_that_was_changed_names_the_part(part, value, named):
    with pytest.raises(CalibError, match=named):
        read_envelope(envelope(questions(), POLICY) | {part: value})


def test_a_packed_sample_that_was_changed_names_its_band():
    record = json.loads(json.dumps(envelope(questions(), POLICY)))
    for tokens in ("x", "1 2 3 4 5"):
        record["shadow"]["bands"][1]["tokens"] = tokens
        with pytest.raises(CalibError, match=r"envelope.shadow.bands\[1\]"):
            read_envelope(record)
    for record in (None, [], "envelope"):
        with pytest.raises(CalibError, match="envelope of schema None"):
            read_envelope(record)


def test_held_out_questions_chose_among_few_candidates():
    record = envelope(questions(), POLICY, held_out=True, candidates=3)
    assert record["questions"] == "held out"
    assert record["chosen_among"] == 3
    assert envelope(questions(), POLICY, candidates=3)["chosen_among"] == 27  # nine thresholds at each of three budgets


def test_confidences_and_thoughts_are_those_of_all_questions_that_were_collected():
    whole = questions()
    record = envelope(whole.take([0, 7]), POLICY, held_out=True, sample=whole)
    assert record["n"] == 2
    assert record["confidence"]["n"] == record["shadow"]["n"] == 8


def test_weights_and_groups_leave_fewer_independent_questions():
    weighted = envelope(questions(weight=np.array([4.0, 1, 1, 1, 1, 1, 1, 1])), POLICY)
    assert weighted["think"] == {"share": pytest.approx(7 / 11), "n": pytest.approx(121 / 23)}
    grouped = envelope(questions(group=list("aabbccdd")), POLICY)
    assert grouped["think"] == {"share": 0.5, "n": 4.0}


def test_worst_is_one_limit_for_each_dataset():
    record = envelope(questions(dataset=list("aaaabbbb")), POLICY, parse_targets("p90[worst]<8s"))
    assert [(row["dataset"], row["of"], row["found"]) for row in record["limits"]] == [("a", 2, 0.5), ("b", 2, 0.0)]


def test_a_mean_from_below_cannot_be_seen():
    assert envelope(questions(), POLICY, parse_targets("mean>=1s"))["unseen"] == ["mean>=1s"]


def test_unknown_seconds_are_unknown_shares():
    record = envelope(questions(t2=np.full((1, 8, 1), np.nan)), POLICY, parse_targets("p90<8s"))
    assert record["limits"][0]["found"] is None
    assert record["speed"] is None
    assert record["expected"]["p90"] is None


def test_a_deadline_closes_and_what_it_closes_is_no_finished_thought():
    slow = questions(tokens=np.array([[40.0, 80.0]] * 8), finished=np.array([[False, True]] * 8),
                     budgets=np.array([50, 100]), p2=np.tile([0.9, 0.1], (8, 2, 1)),
                     t2=np.array([[[4.0, 8.0]] * 8]))  # fmt: skip
    record = envelope(slow, replace(POLICY, deadline=5.0))
    assert record["closed"] == 0.5
    assert record["cut"]["share"] == 1.0
    assert record["degraded"] == 0.0
    late = envelope(slow, replace(POLICY, deadline=1.0))  # no collected budget ends in time
    assert late["degraded"] == 0.5
    assert late["cut"]["share"] is None


def test_the_sample_is_whole_and_tells_bands_at_thresholds():
    shadow = envelope(questions(), POLICY)["shadow"]
    assert 0.7 in shadow["edges"]
    assert sum(band["n"] for band in shadow["bands"]) == 8
    tokens = np.concatenate([sample_of(band["tokens"]) for band in shadow["bands"]])
    assert sorted(tokens) == [10, 10, 10, 10, 20, 40, 80, 100]
    assert bin_of([0.7], [0.69, 0.7, 0.71]).tolist() == [0, 1, 1]  # equal stays: it does not think


def test_a_large_envelope_stays_small():
    rng = np.random.default_rng(0)
    n = 5000
    sure = rng.uniform(0.5, 1, n)
    tokens = rng.integers(1, 30000, n).astype(float)
    o = questions(
        p1=np.stack([sure, 1 - sure], 1), p2=np.tile([0.9, 0.1], (n, 1, 1)), tokens=tokens[:, None],
        finished=np.ones((n, 1), bool), t1=rng.random((1, n)), t2=(tokens / 251.7)[None, :, None],
        answer=np.zeros(n, int), budgets=np.array([32768]), dataset=[f"a fairly long name {i % 60}" for i in range(n)],
    )  # fmt: skip
    record = envelope(o, Policy(0.7123, 0.5, 32768), parse_targets("p90<8s, p99<20s"))
    assert len(json.dumps(record, indent=2)) < 30_000
    kept = [len(sample_of(band["t2"])) for band in record["shadow"]["bands"]]
    assert max(kept) == SAMPLE


@given(outcomes(max_n=40), st.floats(0, 1.1))
@settings(max_examples=60)
def test_the_record_is_plain_and_its_shares_are_those_of_the_policy(o, threshold):
    policy = Policy(threshold, 0.5, int(o.budgets[-1]), o.arms[-1])
    record = json.loads(json.dumps(envelope(o, policy), allow_nan=False))
    assert record["think"]["share"] == pytest.approx(evaluate(o, policy).think_rate)
    for name in ("confidence", "thought"):
        assert record[name]["cuts"] == sorted(record[name]["cuts"])
        assert record[name]["below"] == sorted(record[name]["below"])
    assert sum(band["share"] for band in record["shadow"]["bands"]) == pytest.approx(1)


# --- other traffic ----------------------------------------------------------------------------------------------------


@given(outcomes(max_n=40, weighted=False, failures=False), st.floats(0, 1.1))
@settings(max_examples=60)
def test_on_the_questions_themselves_the_prediction_is_the_evaluation(o, threshold):
    policy = Policy(threshold, 0.5, int(o.budgets[-1]), o.arms[-1])
    can = np.array([kind != "score" for kind in o.kind])
    o = replace(o, can_think=can)
    found = predicted(envelope(o, policy), policy, traffic(o))
    score = evaluate(o, policy)
    for name in ("think_rate", "tokens", "mean", "p50", "p90", "p99"):
        interval = found.values[name]
        assert interval.value == pytest.approx(getattr(score, name), rel=1e-4, abs=1e-9), name
        assert interval.low <= interval.high
    assert found.outside == 0
    assert found.distance == pytest.approx(0, abs=1e-9)


def test_another_mixture_of_the_same_questions_is_predicted_exactly():
    o = questions()
    twice = o.take([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6, 7])
    found = predicted(envelope(o, POLICY), POLICY, traffic(twice))
    score = evaluate(twice, POLICY)
    assert found.values["think_rate"].value == 0.75
    assert found.values["mean"].value == pytest.approx(score.mean)
    assert found.values["p90"].value == pytest.approx(score.p90)


def test_intervals_cover_what_fresh_questions_do():
    rng = np.random.default_rng(5)

    def drawn(n):
        sure = rng.uniform(0.5, 1, n)
        tokens = rng.geometric(1 / (30 + 200 * (1 - sure))).astype(float)
        return questions(
            p1=np.stack([sure, 1 - sure], 1), p2=np.tile([0.9, 0.1], (n, 1, 1)), tokens=tokens[:, None],
            finished=np.ones((n, 1), bool), t1=np.full((1, n), 0.1), t2=(tokens / 10)[None, :, None],
            answer=np.zeros(n, int), budgets=np.array([10**6]),
        )  # fmt: skip

    policy = Policy(0.7, 0.5, 10**6)
    truth = evaluate(drawn(100_000), policy)
    inside = dict.fromkeys(("think_rate", "mean", "p90"), 0)
    for _ in range(40):
        found = predicted(envelope(drawn(300), policy), policy, traffic(drawn(400)))
        for name in inside:
            interval = found.values[name]
            inside[name] += interval.low <= getattr(truth, name) <= interval.high
    assert all(count >= 34 for count in inside.values()), inside  # 95 % of 40 is 38


def test_rates_give_tokens_a_second_and_requests_in_flight():
    o = questions()
    record = envelope(o, POLICY)
    found = predicted(record, POLICY, traffic(o))
    assert found.rate == pytest.approx(0.1)  # one every 10 s
    assert found.peak == pytest.approx(6 / 60)
    assert found.tokens_per_second.value == pytest.approx(30 * 0.1)
    assert found.in_flight.value == pytest.approx(evaluate(o, POLICY).mean * 0.1)
    assert found.servers.value == pytest.approx(3 / record["load"]["tokens_per_second"])
    assert predicted(record, POLICY, traffic(o), rate=2.0).tokens_per_second.value == pytest.approx(60)
    timeless = predicted(record, POLICY, [{"p1": row["p1"]} for row in traffic(o)])
    assert math.isnan(timeless.rate)
    assert any("--rate" in text for text in timeless.warnings)


def test_traffic_outside_of_what_was_collected_is_named():
    rows = [{"p1": [0.51, 0.49]}] * 3 + [{"p1": [0.8, 0.2]}] * 7
    found = predicted(envelope(questions(), POLICY), POLICY, rows, rate=1.0)
    assert found.outside == pytest.approx(0.3)
    assert found.thin == pytest.approx(0.3)  # they think where a handful of questions were collected
    assert any("outside" in text for text in found.warnings)
    assert found.to_dict()["outside"] == pytest.approx(0.3)


def test_routes_kinds_and_another_threshold_are_obeyed():
    o = questions(dataset=list("aaaabbbb"), kind=["choice"] * 7 + ["score"], can_think=np.arange(8) < 7)
    policy = replace(POLICY, threshold=0.99, routes={"dataset=a": Route(threshold=0.61)})
    record = envelope(o, policy)
    assert record["cannot_think"] == ["score"]
    found = predicted(record, policy, traffic(o))
    assert found.values["think_rate"].value == decide(o, policy).thinks.mean() == 5 / 8
    assert predicted(record, Policy(0.0, 0.5, 100), traffic(o)).values["tokens"].value == 0


def test_a_smaller_budget_cuts_the_collected_thoughts_and_a_larger_one_is_refused():
    record = envelope(questions(), POLICY)
    found = predicted(record, POLICY, traffic(questions()), think_budget=50)
    assert found.values["tokens"].value == pytest.approx((40 + 50 + 50 + 20) / 8)
    assert found.values["cut"].value == pytest.approx(2 / 8)
    assert found.values["mean"].value == pytest.approx(0.1 + (4 + 5 + 5 + 2) / 8)
    assert found.marks == ("estimated",)
    with pytest.raises(CalibError, match="--budgets 200"):
        predicted(record, POLICY, traffic(questions()), think_budget=200)


def test_what_a_deadline_closed_is_no_thought_that_a_budget_cut():
    late = replace(POLICY, deadline=5.1)  # closes those of 80 and 100 tokens after 5 s, at half of what is 100 tokens
    o = questions()
    record = envelope(o, late)
    whole = predicted(record, late, traffic(o)).values
    assert predicted(record, late, traffic(o), think_budget=90).values["tokens"].value == whole["tokens"].value
    shorter = predicted(record, late, traffic(o), think_budget=30).values["tokens"].value
    assert shorter == pytest.approx((30 + 30 + 30 + 20) / 8)
    with pytest.raises(CalibError, match="cut at 50 tokens"):
        predicted(record, late, traffic(o), think_budget=200)


def test_a_band_without_a_thought_borrows_and_says_so():
    unread = questions(p2=np.where(np.arange(8)[:, None, None] < 4, np.nan, 0.5) * np.ones((8, 1, 2)))
    found = predicted(envelope(unread, POLICY), POLICY, traffic(unread))
    assert any(band.borrowed for band in found.bands)
    assert found.values["tokens"].value == pytest.approx(0.5 * 10)  # those above the threshold had 10 tokens each


def test_only_lines_with_a_distribution_count():
    rows = [{"p1": [0.6, 0.4]}, {"p1": []}, {"p1": [0.9, 0.9]}, {"p1": ["a", "b"]}, {}, {"p1": [True, False]}]
    assert predicted(envelope(questions(), POLICY), POLICY, rows, rate=1.0).left_out == 5
    with pytest.raises(CalibError, match="p1"):
        predicted(envelope(questions(), POLICY), POLICY, rows[1:])


def test_every_prediction_is_named():
    assert set(predicted(envelope(questions(), POLICY), POLICY, traffic(questions())).values) == set(PREDICTED)


@given(st.integers(0, 50), st.integers(1, 50), st.floats(0.001, 0.2))
def test_the_interval_of_a_promised_share_holds_it(k, more, alpha):
    n = k + more
    low, high = reference_interval(k / n, n, alpha)
    assert 0 <= low <= k / n <= high <= 1
    loose_low, loose_high = reference_interval(k / n, n / 2 + 0.25, alpha)  # fewer, not whole: wider
    assert loose_low <= low + 1e-9
    assert loose_high >= high - 1e-9

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.policy import Policy, evaluate
from calib.target import METRICS, Target, parse_target, parse_targets

from .test_outcomes import small


def test_the_sentence_of_the_contract():
    text = "accuracy>=83%, p90<10s, think_rate<50%, p90[GPQA Diamond]<20s, accuracy[worst]>=60%"
    found = parse_targets(text)
    assert found == (
        Target("accuracy", ">=", 0.83, "%"),
        Target("p90", "<", 10.0, "s"),
        Target("think_rate", "<", 0.5, "%"),
        Target("p90", "<", 20.0, "s", dataset="GPQA Diamond"),
        Target("accuracy", ">=", 0.6, "%", worst=True),
    )
    assert ", ".join(map(str, found)) == text


@pytest.mark.parametrize(
    ("text", "expected", "canonical"),
    [
        ("p90:10s", Target("p90", "<", 10.0, "s"), "p90<10s"),
        ("acc:83.4%", Target("accuracy", ">=", 0.834, "%"), "accuracy>=83.4%"),
        ("median <= 250 ms", Target("p50", "<=", 0.25, "ms"), "p50<=250ms"),
        ("accuracy>=0.83", Target("accuracy", ">=", 0.83), "accuracy>=0.83"),
        ("accuracy>=1", Target("accuracy", ">=", 1.0), "accuracy>=1"),
        ("skill>=-5%", Target("skill", ">=", -0.05, "%"), "skill>=-5%"),
        ("tokens<1e3", Target("tokens", "<", 1000.0), "tokens<1000"),
        ("brier:.4", Target("brier", "<", 0.4), "brier<0.4"),
        ('p90["worst"]<2s', Target("p90", "<", 2.0, "s", dataset="worst"), 'p90["worst"]<2s'),
        ("p99['a], \"b']<2s", Target("p99", "<", 2.0, "s", dataset='a], "b'), "p99['a], \"b']<2s"),
        ("P90<1S".lower(), Target("p90", "<", 1.0, "s"), "p90<1s"),
    ],
)
def test_one_target(text, expected, canonical):
    assert parse_target(text) == expected
    assert str(expected) == canonical


def test_joined_by_comma_semicolon_or_repetition_and_once_each():
    one = parse_targets("p90<10s;acc>=80%")
    assert one == parse_targets(["p90<10s", "acc>=80%"]) == parse_targets("p90<10s,acc>=80%,p90<10s")
    assert parse_targets([]) == ()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("p90", ["--target 'p90<10s'", "--target p90:10s", "quote"]),
        ("acc", ["'acc>=80%'", "acc:80%"]),
        ("p90<10", ["p90<10s", "p90<10ms"]),
        ("accuracy>=83", ["accuracy>=83%", "accuracy>=0.83"]),
        ("acc[x]>=83.5", ["acc[x]>=83.5%", "acc[x]>=0.835"]),
        ("p90<10%", ["p90<10s"]),
        ("p90<10m", ["'m'", "p90<10s"]),
        ("p90<0s", ["above 0"]),
        ("p90<1e400s", ["1e400 is out of range"]),
        ("p90<1e-400s", ["1e-400 is out of range"]),
        ("p90<1e999999999s", ["out of range"]),
        ("tokens<1e999999999", ["out of range"]),
        ("accuracy>=1e-999999999999999999999%", ["out of range"]),
        ("accuracy>=120%", ["between 0 and 100%"]),
        ("think_rate<-5%", ["between"]),
        ("accuracy>=5s", ["'s'", "%"]),
        ("tokens<5s", ["no unit", "tokens<5"]),
        ("tokens<-5", ["negative"]),
        ("p91<10s", ["unknown metric 'p91'", "Did you mean p9"]),
        ("accurracy>=80%", ["Did you mean accuracy?"]),
        ("frobnicate", ["unknown metric"]),
        ("p90=10s", ["expected METRIC"]),
        ("p90<<10s", ["expected METRIC"]),
        ("p90[a,b]<3s", ['["a,b"]']),
        ("p90[]<3s", ["expected METRIC"]),
        ("", ["expected METRIC"]),
    ],
)
def test_errors_say_what_to_type(text, parts):
    with pytest.raises(CalibError) as error:
        parse_target(text)
    for part in parts:
        assert part in str(error.value)


def test_an_empty_list_of_items_is_refused():
    with pytest.raises(CalibError, match="empty target"):
        parse_targets(" , ")


names = st.text(min_size=1).filter(lambda s: not ('"' in s and "'" in s))
targets = st.one_of(
    st.builds(
        Target,
        st.sampled_from(["mean", "p50", "p90", "p95", "p99"]),
        st.sampled_from(["<", "<=", ">", ">="]),
        st.floats(1e-6, 1e6),
        st.sampled_from(["s", "ms"]),
        st.none() | names,
    ),
    st.builds(Target, st.sampled_from(["accuracy", "ece"]), st.just(">="), st.floats(0, 1), st.sampled_from(["%", ""])),
    st.builds(Target, st.sampled_from(["tokens", "brier", "nll", "cost"]), st.just("<"), st.floats(0, 1e9)),
    st.builds(Target, st.just("p90"), st.just("<"), st.just(1.0), st.just("s"), worst=st.just(True)),
)


@given(st.lists(targets, min_size=1, max_size=4, unique=True))
def test_text_and_back(several):
    assert parse_targets(";".join(map(str, several))) == tuple(several)


def test_every_metric_of_the_grammar_is_a_field_of_an_evaluation():
    evaluation = evaluate(small(), Policy(think_budget=16))
    assert all(hasattr(evaluation, name) for name in METRICS)


def test_margin_by_hand():
    evaluation = evaluate(small(), Policy(threshold=1.1, think_budget=16))
    assert evaluation.p90 == 2.1
    assert parse_target("p90<2.5s").margin(evaluation) == pytest.approx(0.4)
    assert parse_target("p90<2s").margin(evaluation) == pytest.approx(-0.1)
    assert parse_target("accuracy>=90%").margin(evaluation) == pytest.approx(0.1)
    assert parse_target("p90>=2s").met(evaluation)


def test_equality_meets_a_loose_limit_and_misses_a_strict_one():
    evaluation = evaluate(small(), Policy(threshold=1.1, think_budget=16))
    assert parse_target("p90<=2.1s").met(evaluation)
    assert not parse_target("p90<2.1s").met(evaluation)
    assert parse_target("p90<2.1s").margin(evaluation) < 0
    assert not parse_target("accuracy>100%").met(evaluation)


def test_83_of_100_is_83_percent_exactly():
    evaluation = replace(evaluate(small(), Policy(think_budget=16)), accuracy=83 / 100)
    assert parse_target("accuracy>=83%").met(evaluation)
    assert parse_target("accuracy>=0.83").met(evaluation)
    evaluation = replace(evaluation, accuracy=834 / 1000)
    assert parse_target("accuracy>=83.4%").met(evaluation)


def test_selectors_look_at_one_dataset_or_the_worst():
    o = small(dataset=["easy", "hard"])
    evaluation = evaluate(o, Policy(threshold=0.55, think_budget=16), by_dataset=True)
    assert parse_target("accuracy[easy]>=50%").value_of(evaluation) == 0.0
    assert parse_target("accuracy[hard]>=50%").met(evaluation)
    assert parse_target("accuracy[worst]>=50%").value_of(evaluation) == 0.0
    assert parse_target("p90[worst]<2s").value_of(evaluation) == 2.1
    with pytest.raises(CalibError, match=r"no dataset 'hrad'.*Did you mean \[hard\]"):
        parse_target("p90[hrad]<2s").margin(evaluation)
    with pytest.raises(ValueError, match="by_dataset"):
        parse_target("p90[worst]<2s").margin(evaluate(o, Policy(think_budget=16)))


def test_an_unknown_latency_never_meets_a_limit():
    o = small(t1=[[math.nan, 0.1]])
    evaluation = evaluate(o, Policy(think_budget=16), by_dataset=True)
    assert parse_target("p90<10s").margin(evaluation) == -math.inf
    assert parse_target("p90[worst]<10s").margin(evaluation) == -math.inf

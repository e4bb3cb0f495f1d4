"""What the gateway counts, without a gateway."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from calib.servemetrics import SECONDS, TOKENS, Metrics
from tests.test_declog import SEEN


def samples(metrics: Metrics):
    body, _ = metrics.exposition()
    families = text_string_to_metric_families(body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@settings(max_examples=30)
@given(st.lists(st.one_of(st.sampled_from(SECONDS), st.floats(0, 1000)), max_size=20))
def test_a_bucket_counts_the_answers_up_to_its_end(seconds):
    metrics = Metrics()
    for each in seconds:
        metrics.decided(replace(SEEN, think=False, seconds=each))
    found = samples(metrics)
    for end in SECONDS:
        counted = found["calib_decision_seconds_bucket", (("le", str(end)), ("thought", "no"))]
        assert counted == sum(each <= end for each in seconds)
    assert found["calib_decision_seconds_count", (("thought", "no"),)] == len(seconds)
    assert found["calib_decision_seconds_sum", (("thought", "no"),)] == pytest.approx(sum(seconds))


def test_buckets_go_from_a_millisecond_to_minutes_and_hold_the_usual_budgets():
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 600.0)
    assert list(SECONDS) == sorted(set(SECONDS))
    assert set(TOKENS) >= {512, 1024, 2048, 4096, 8192}


def test_a_thought_in_vain_costs_tokens_and_has_no_length():
    metrics = Metrics()
    metrics.decided(replace(SEEN, tokens=300, degraded=True, finished=False))
    metrics.decided(replace(SEEN, tokens=500))
    found = samples(metrics)
    assert found["calib_thought_tokens_total", ()] == 800
    assert found["calib_thought_length_tokens_sum", ()] == 500
    assert found["calib_thoughts_cut_total", (("by", "budget"),)] == 0


def test_many_reloads_do_not_fill_the_memory():
    metrics = Metrics()
    for i in range(500):
        metrics.decided(replace(SEEN, policy_version=f"v{i}"))
    metrics.decided(replace(SEEN, policy_version=None))
    versions = [dict(labels)["policy_version"] for name, labels in samples(metrics) if name == "calib_decisions_total"]
    assert len(versions) == 50
    assert versions[-2:] == ["v499", "none"]

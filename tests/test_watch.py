"""Is the promise kept: evidence by hand, false alarms and power by simulation, reading the log, the command."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from calib import watching
from calib.anytime import SHIFTS, Bets, confidence_sequence, start_weights
from calib.cli import cli
from calib.envelope import envelope
from calib.errors import CalibError
from calib.gateway import Observation, policy_version
from calib.logread import LogReader
from calib.outcomes import Outcomes
from calib.policy import Policy, decide
from calib.target import parse_targets
from calib.watch import Watch


class DoneError(Exception):
    """Ends what would go on for ever."""


POLICY = Policy(0.7, 0.5, 4096)
TARGETS = parse_targets("p90<10s, accuracy>=80%")
VERSION = policy_version(POLICY)


def questions(rng, n, *, hard=0.0, slow=1.0, long=1.0):
    """Questions of a made-up model: harder ones are less certain, and thoughts get longer there."""
    sure = 0.5 + 0.5 * rng.beta(2.0 - hard, 1.5, n)
    tokens = np.ceil(long * rng.gamma(2.0, 400 * (1.6 - sure), n))
    used = np.minimum(tokens, 4096)
    return Outcomes(
        p1=np.stack([sure, 1 - sure], axis=1),
        p2=np.tile([0.9, 0.1], (n, 1, 1)),
        tokens=used[:, None],
        finished=(tokens <= 4096)[:, None],
        t1=np.full((1, n), 0.05),
        t2=(slow * used / 150 * rng.uniform(0.8, 1.2, n))[None, :, None],
        answer=np.zeros(n, int),
        budgets=np.array([4096]),
    )


def log_of(outcomes, policy=POLICY, *, version=VERSION, at=0.0, **more):
    """What the gateway would log of these questions."""
    d = decide(outcomes, policy)
    return [
        {
            "at": at + i, "hash": f"{i:x}", "dataset": "", "kind": "choice", "n_options": 2, "p1": p1,
            "confidence": max(p1), "think": think, "mode": "auto", "tokens": int(tokens),
            "finished": think and finished, "closed": False, "degraded": False, "seconds": seconds, "t1": 0.05,
            "t2": seconds - 0.05 if think else None, "policy_version": version, **more,
        }
        for i, (p1, think, tokens, finished, seconds) in enumerate(
            zip(outcomes.p1.tolist(), d.thinks.tolist(), d.tokens.tolist(), outcomes.finished[:, 0].tolist(),
                d.latency.tolist(), strict=True)
        )
    ]  # fmt: skip


def record_of(outcomes, **more):
    return envelope(outcomes, POLICY, TARGETS, held_out=True, **more)


def by_name(report):
    return {finding.promise: finding for finding in report.findings}


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_the_stakes_for_all_starts_sum_to_one():
    stake, left = start_weights(0, 1000)
    assert stake[0] == pytest.approx(1 - 1 / math.log2(3))
    assert stake.sum() + left[-1] == pytest.approx(1)
    later, _ = start_weights(600, 400)
    assert later == pytest.approx(stake[600:])


def test_wealth_by_hand():
    # One event at q = 0.5: each bettor's stake for a start now is won at the odds aim / q, the rest is kept.
    aims = special.expit(np.array(SHIFTS))
    stake = 1 - 1 / math.log2(3)
    bets = Bets([0.5])
    wealth = np.exp(bets.update([[1.0]]))[0, 0]
    assert wealth == pytest.approx(stake * (aims / 0.5).mean() + 1 - stake)
    second = 1 / math.log2(3) - 1 / math.log2(4)
    both = np.exp(bets.update([[0.0]]))[0, 0]
    expected = ((stake * aims / 0.5 + second) * (1 - aims) / 0.5).mean() + 1 - stake - second
    assert both == pytest.approx(expected)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(1, 10),
)
def test_the_order_of_batches_does_not_matter(values, q, size):
    x = np.array(values, dtype=float)[:, None]
    whole, parts = Bets([q]), Bets([q])
    expected = whole.update(x)
    found = np.concatenate([parts.update(x[i : i + size]) for i in range(0, len(x), size)])
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert parts.began(0) == pytest.approx(whole.began(0), nan_ok=True)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1), st.data())
def test_wealth_is_never_negative_and_grows_with_each_violation(values, q, data):
    x = np.array(values)[:, None]
    i = data.draw(st.integers(0, len(values) - 1))
    more = x.copy()
    more[i] = 1.0
    log_wealth, log_more = Bets([q]).update(x), Bets([q]).update(more)
    assert np.isfinite(log_wealth).all()
    assert (log_more[i:] >= log_wealth[i:] - 1e-9).all()


@given(st.lists(st.integers(0, 1), max_size=12), st.floats(0.001, 0.999))
def test_a_fair_game_gives_no_expected_profit(values, q):
    """At the largest mean that the promise allows, the expected wealth after one more value is the wealth now."""
    start = Bets([q])
    start.update(np.array(values, dtype=float).reshape(-1, 1))

    def after(x):
        bets = Bets([q])
        return math.exp(bets.update(np.array([*values, x], dtype=float).reshape(-1, 1))[-1, 0])

    assert q * after(1) + (1 - q) * after(0) == pytest.approx(math.exp(start.log_wealth[0]), rel=1e-6)


def test_what_cannot_be_bet_against_stays_at_one():
    bets = Bets([1.0, 0.0])
    wealth = np.exp(bets.update(np.array([[1.0, 0.0]] * 50)))
    assert wealth[:, 0] == pytest.approx(1)
    assert wealth[-1, 1] <= 1
    assert bets.update([[1.0, 1.0]] * 3)[-1, 1] > math.log(1e6)  # what never may happen did


@pytest.mark.parametrize("q", [0.02, 0.1, 0.5, 0.9])
def test_false_alarms_at_the_very_limit_are_as_rare_as_said(q):
    rng = np.random.default_rng(int(100 * q))
    x = (rng.random((1500, 400)) < q).astype(float)
    bets = Bets(np.full(400, q))
    most = np.max([bets.update(x[i : i + 300]).max(axis=0) for i in range(0, 1500, 300)], axis=0)
    alarms = int((most >= math.log(1 / 0.1)).sum())
    assert alarms <= 55  # 40 of 400 at most in expectation; 2.5 standard deviations above


def test_a_change_is_found_as_soon_after_a_long_good_time():
    rng = np.random.default_rng(3)
    late = []
    for good in (0, 20_000):
        bets = Bets([0.1])
        bets.update((rng.random((good, 1)) < 0.05).astype(float))
        after = bets.update((rng.random((3000, 1)) < 0.2).astype(float))[:, 0]
        late.append(int((after >= math.log(100)).argmax()))
        assert after.max() >= math.log(100)
        assert bets.began(0)[0] == pytest.approx(good, abs=60)
        assert bets.began(0)[1] == pytest.approx(0.2, abs=0.02)
    assert late[0] < 500
    assert late[1] < 1000  # 14 nats more evidence, not 20,000 requests more


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.5, 0.999))
def test_a_confidence_sequence_holds_the_share_and_widens_with_the_level(k, rest, level):
    n = k + rest
    low, high = confidence_sequence(k, n, level)
    wide_low, wide_high = confidence_sequence(k, n, (1 + level) / 2)
    assert 0 <= wide_low <= low <= high <= wide_high <= 1
    if n:
        assert low <= k / n <= high


def test_a_confidence_sequence_covers_at_all_times():
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(60):
        k = np.cumsum(rng.random(400) < 0.3)
        ends = [confidence_sequence(int(k[n - 1]), n, 0.9) for n in (*range(1, 20), *range(20, 401, 20))]
        missed += any(not low <= 0.3 <= high for low, high in ends)
    assert missed <= 12  # 6 of 60 at most in expectation


# --- promises ---------------------------------------------------------------------------------------------------------


def test_no_change_is_ok_and_says_so():
    rng = np.random.default_rng(0)
    watch = Watch(record_of(questions(rng, 500)), POLICY)
    watch.update(log_of(questions(rng, 1500)))
    report = watch.report()
    assert report.state == "ok"
    assert report.n == 1500
    assert (report.first, report.last) == (0.0, 1499.0)
    assert report.advice == ()
    assert [f.promise for f in report.findings] == [
        *("p90<10s", "think rate", "cut thoughts", "confidence", "thought length", "accuracy>=80%")
    ]
    assert by_name(report)["p90<10s"].decisive == pytest.approx(5 / 0.05)  # five promises share 5 %
    assert by_name(report)["think rate"].decisive == pytest.approx(2 * 5 / 0.05)  # half of it for what is promised
    json.dumps(report.to_dict(), allow_nan=False)


def test_figures_by_hand():
    """Ten requests: shares, counts and words, before any test says anything."""
    record = record_of(questions(np.random.default_rng(0), 200))
    rows = [
        {"p1": [0.6, 0.4], "confidence": 0.6, "think": True, "tokens": 300, "finished": i != 0, "seconds": 12.0 if i < 2
         else 2.0, "t1": 0.05, "t2": 2.0, "closed": i == 0, "degraded": i == 3, "policy_version": VERSION}
        if i < 4 else {"p1": [0.9, 0.1], "confidence": 0.9, "think": False, "tokens": 0, "seconds": 0.05, "t1": 0.05}
        for i in range(10)
    ]  # fmt: skip
    watch = Watch(record, POLICY)
    watch.update([*rows, rows[0] | {"mode": "on"}, rows[0] | {"mode": "off"}, rows[4] | {"mode": "off"}])
    report = watch.report()
    found = by_name(report)
    assert found["p90<10s"].share == 0.2
    assert "20.0 %" in found["p90<10s"].text
    assert "of 10 requests took 10 s or longer, at most 10.0 % promised" in found["p90<10s"].text
    assert found["think rate"].share == 0.4
    assert found["cut thoughts"].n == 3  # a degraded answer says nothing about its thought
    assert found["cut thoughts"].share == pytest.approx(1 / 3)
    assert report.left_out == {"asked for thinking 'on'": 1, "asked for thinking 'off'": 2}
    assert (report.shown["closed"], report.shown["degraded"]) == (0.1, 0.1)
    assert report.shown["speed"] == 150
    assert report.shown["p90"] == 12.0


CHANGES = {
    "harder": ({"hard": 1.2}, {"think rate", "confidence"}),
    "slower": ({"slow": 3.0}, {"p90<10s"}),
    "longer": ({"long": 2.5}, {"thought length"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_within_some_hundred_requests(name):
    change, promises = CHANGES[name]
    found: dict[str, list[int]] = {promise: [] for promise in promises}
    for seed in range(8):
        rng = np.random.default_rng(seed)
        watch = Watch(record_of(questions(rng, 600)), POLICY)
        watch.update(log_of(questions(rng, 1000)))
        assert watch.report().state == "ok"
        watch.update(log_of(questions(rng, 2000, **change), at=1000.0))
        report = watch.report()
        assert report.state == "broken"
        for promise in promises:
            finding = by_name(report)[promise]
            assert finding.state == "broken", (seed, finding)
            if finding.kind != "thought":  # those are counted in thoughts
                assert finding.alarm > 1000
                assert finding.alarm_at == finding.alarm - 1
                found[promise].append(finding.alarm - 1000)
        if name == "harder":
            assert by_name(report)["accuracy>=80%"].state == "at_risk"  # not seen, but its questions are others now
            assert "not like the questions collected" in report.advice[0]
        if name == "slower":
            assert by_name(report)["accuracy>=80%"].state == "ok"
            assert "tokens/s" in report.advice[0]
    for promise, delays in found.items():
        assert np.median(delays or [0]) < 700, (promise, delays)


def test_false_alarms_over_envelopes_and_streams():
    """Each time with an envelope of its own: its sampling noise must not raise alarms either."""
    alarms = risks = 0
    for seed in range(60):
        rng = np.random.default_rng(1000 + seed)
        watch = Watch(record_of(questions(rng, 150)), POLICY, level=0.8)
        for _ in range(2):
            watch.update(log_of(questions(rng, 600)))
        report = watch.report()
        alarms += report.state == "broken"
        risks += report.state != "ok"
    assert alarms <= 12 + 6  # 20 % of 60 at most in expectation
    assert risks <= 48


def test_a_threshold_chosen_on_the_questions_raises_no_alarm():
    """The threshold where these questions are furthest from the truth: the worst that a search could have done."""
    alarms = 0
    for seed in range(15):
        rng = np.random.default_rng(seed)
        o, fresh = questions(rng, 150), questions(rng, 2500)
        sure, truth = np.sort(o.p1.max(axis=1)), np.sort(fresh.p1.max(axis=1))
        middle = (sure[1:] + sure[:-1]) / 2
        gap = np.abs(np.arange(1, 150) / 150 - np.searchsorted(truth, middle) / 2500)
        policy = Policy(float(middle[int(gap.argmax())]), 0.5, 4096)
        watch = Watch(envelope(o, policy), policy, level=0.8)
        watch.update(log_of(fresh, policy, version=None))
        alarms += by_name(watch.report())["think rate"].state == "broken"
    assert alarms <= 1


def test_worst_and_means_and_think_rate_are_watched():
    rng = np.random.default_rng(0)
    o = questions(rng, 300)
    o = replace(o, dataset=np.where(np.arange(300) < 150, "a", "b").astype(object))
    targets = parse_targets("p90[worst]<10s, mean<2s, tokens<=300, think_rate<60%")
    watch = Watch(envelope(o, POLICY, targets, held_out=True), POLICY)
    rows = log_of(questions(rng, 1500, slow=4.0, long=2.0), dataset="b")
    watch.update(rows)
    found = by_name(watch.report())
    assert found["p90[worst]<10s in 'b'"].state == "broken"
    assert found["p90[worst]<10s in 'a'"].n == 0
    assert "no such request yet" in found["p90[worst]<10s in 'a'"].text
    assert found["mean<2s"].state == "broken"
    assert found["mean<2s"].share == pytest.approx(np.mean([row["seconds"] for row in rows]))
    assert found["tokens<=300"].state == "broken"
    assert found["think_rate<60%"].state == "ok"
    assert found["p90[worst]<10s in 'b'"].decisive == pytest.approx(2 * found["mean<2s"].decisive)


def test_an_alarm_stays_and_says_since_when():
    rng = np.random.default_rng(0)
    watch = Watch(record_of(questions(rng, 500)), POLICY)
    watch.update(log_of(questions(rng, 600)))
    watch.update(log_of(questions(rng, 900, slow=4.0)))
    watch.update(log_of(questions(rng, 6000)))
    finding = by_name(watch.report())["p90<10s"]
    assert finding.state == "broken"
    assert 600 < finding.alarm < 1500
    watch = Watch(record_of(questions(rng, 500)), POLICY)
    watch.update(log_of(questions(rng, 600)))
    watch.update(log_of(questions(rng, 900, slow=4.0)))
    finding = by_name(watch.report())["p90<10s"]
    assert finding.since == pytest.approx(600, abs=150)
    assert "since request" in finding.text


def test_tokens_a_request_count_those_that_were_not_timed_too():
    rows = log_of(questions(np.random.default_rng(0), 300))
    watch = Watch(record_of(questions(np.random.default_rng(1), 300)), POLICY)
    watch.update([row | {"t2": None} for row in rows])
    shown = watch.report().shown
    assert shown["tokens"] == pytest.approx(np.mean([row["tokens"] for row in rows]))
    assert math.isnan(shown["speed"])


def test_a_wrong_level_is_refused():
    record = record_of(questions(np.random.default_rng(0), 50))
    with pytest.raises(CalibError, match="--level"):
        Watch(record, POLICY, level=1.0)


# --- the log ----------------------------------------------------------------------------------------------------------


def write(path, rows, *, end="\n"):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows)[:-1] + end, encoding="utf-8")
    return path


def read(*paths):
    reader = LogReader(paths)
    return [row for batch in reader.batches() for row in batch], reader


async def test_what_the_gateway_logs_is_what_is_read(tmp_path):
    from calib.declog import DecisionLog

    rows = log_of(questions(np.random.default_rng(0), 20))
    path = tmp_path / "log"
    log = DecisionLog(path)
    for row in rows:
        log.put(Observation(**{**row, "p1": tuple(row["p1"]), "t2": math.nan if row["t2"] is None else row["t2"]}))
    await log.close()
    found, reader = read(path)
    assert found == rows
    assert reader.broken == 0


def test_whole_and_broken_and_unfinished_lines(tmp_path):
    rows = log_of(questions(np.random.default_rng(0), 5))
    found, reader = read(write(tmp_path / "whole.jsonl", rows, end=""))
    assert found == rows
    path = write(tmp_path / "log.jsonl", rows)
    with path.open("a") as stream:
        stream.write('{"broken\n[1]\n{"think": 1}\n{"think": true, "seconds": "x"}\n{"p1": ["a"]}\n{"other": 1}\n\n')
        stream.write('{"think": true, "tokens": 1' + 400 * "0" + '}\n{"think": true, "seconds": 1e999}\n')
        stream.write('{"p1": [NaN, 1]}\n{"p1": [1' + 400 * "0" + ", 0]}\n")
        stream.write('{"at": 1')
    found, reader = read(path)
    assert found == rows
    assert (reader.rows, reader.broken) == (5, 10)
    assert reader.versions == {VERSION: 5}


def test_compressed_and_rotated_logs_come_in_order(tmp_path):
    rows = log_of(questions(np.random.default_rng(0), 9))
    old = tmp_path / "log.1.gz"
    old.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows[:4]).encode()))
    found, _ = read(old, write(tmp_path / "log", rows[4:]))
    assert found == rows
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(os.urandom(100) + b"\n", mtime=0)[:-6])
    assert read(torn)[1].broken >= 1
    with pytest.raises(CalibError, match="does not grow"):
        list(LogReader([old]).batches(follow=True))
    with pytest.raises(CalibError, match="no such file"):
        LogReader([tmp_path / "none"])


def test_a_log_is_followed_over_half_lines_rotation_and_cutting(tmp_path):
    rows = log_of(questions(np.random.default_rng(0), 8))
    lines = [json.dumps(row) + "\n" for row in rows]
    path = tmp_path / "log"
    path.write_text(lines[0] + lines[1][:20])

    def append(text):
        with path.open("a") as stream:
            stream.write(text)

    def rotate():
        path.rename(tmp_path / "log.1")

    def last_words():
        with (tmp_path / "log.1").open("a") as stream:
            stream.write(lines[3])
        path.write_text(lines[4])

    steps = [
        lambda: append(lines[1][20:]),
        lambda: append(lines[2]),
        rotate,
        last_words,
        lambda: None,
        lambda: append(lines[5]),
        lambda: path.write_text(lines[6]),  # cut short in place
        lambda: None,
        lambda: append(lines[7]),
        lambda: None,
    ]

    def wait(seconds):
        if not steps:
            raise DoneError
        steps.pop(0)()

    found = []
    with contextlib.suppress(DoneError):
        for batch in LogReader([path]).batches(follow=True, wait=wait):
            found += batch
    assert [row["at"] for row in found] == list(range(8))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """A folder with policy.json and the log of a good day."""
    rng = np.random.default_rng(0)
    record = record_of(questions(rng, 400))
    policy = {"schema": 1, "name": "best", "policy": POLICY.to_dict(), "envelope": record}
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    write(tmp_path / "log.jsonl", log_of(questions(rng, 800), at=1.7e9))
    return tmp_path


def calib(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def calib_json(*arguments, code=0):
    return json.loads(calib(*arguments, "--json", code=code).stdout)


def test_a_good_day(served):
    found = calib_json("watch", served / "log.jsonl")
    assert found["state"] == "ok"
    assert found["requests"] == 800
    assert found["policy_version"] == VERSION
    assert found["marks"] == []
    assert {p["promise"]: p["state"] for p in found["promises"]}["p90<10s"] == "ok"
    text = calib("watch", served / "log.jsonl").stdout
    assert "at most 10.0 % promised" in text
    assert "System 1 in place of System 2" in text


def test_a_broken_promise_exits_with_3_and_says_what_to_do(served):
    bad = log_of(questions(np.random.default_rng(1), 1500, slow=3.0), at=1.7e9 + 800)
    write(served / "log.2.jsonl", bad)
    result = calib("watch", served / "log.jsonl", served / "log.2.jsonl", code=3)
    assert "broken  p90<10s" in result.stdout
    assert "do: " in result.stdout
    assert "broken since request" in result.stdout


def test_only_the_policy_that_is_asked_for_counts(served):
    rows = log_of(questions(np.random.default_rng(1), 1500, slow=3.0), version="0123456789ab")
    with (served / "log.jsonl").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
        stream.write('{"p1": [0.5, 0.5]}\nnonsense\n')
    found = calib_json("watch", served / "log.jsonl")
    assert found["requests"] == 800
    assert found["left_out"] == {"policy version 0123456789ab": 1500, "policy version none": 1}
    assert found["broken_lines"] == 1
    calib("watch", served / "log.jsonl", "--version", "0123456789ab", code=3)
    error = calib("watch", served / "log.jsonl", "--version", "none-such", code=2).stderr
    assert "0123456789ab (1,500)" in error


def test_what_is_missing_is_said(served):
    assert "calib export" in calib("watch", served / "log.jsonl", "--policy", served / "none.json", code=2).stderr
    document = json.loads((served / "policy.json").read_text())
    (served / "bare.json").write_text(json.dumps(document | {"envelope": None}))
    assert "calib optimize" in calib("watch", served / "log.jsonl", "--policy", served / "bare.json", code=2).stderr
    (served / "empty").write_text("")
    assert "no decision in the log" in calib("watch", served / "empty", code=2).stderr
    assert "--shadow" in calib("watch", served / "log.jsonl", "--rate", 2, code=2).stderr
    assert "--follow" in calib("watch", served / "log.jsonl", "--shadow", "--follow", code=2).stderr


@pytest.mark.parametrize("option", ["--rate", "--every", "--threshold", "--level"])
@pytest.mark.parametrize("number", ["nan", "inf", "-1"])
def test_numbers_that_are_none_are_usage_errors(served, option, number):
    assert option in calib("watch", served / "log.jsonl", "--shadow", option, number, code=2).stderr


def test_the_log_is_missed_before_the_policy_beside_it(served):
    assert "no such file; name the log" in calib("watch", served / "nowhere" / "log.jsonl", code=2).stderr


def test_the_policy_is_named_by_its_folder_too(served):
    found = calib_json("watch", served / "log.jsonl", "--policy", served)
    assert found["policy_file"] == str(served / "policy.json")


def test_an_envelope_that_somebody_changed_is_an_error_that_names_the_part(served):
    document = json.loads((served / "policy.json").read_text())

    def error(**changed):
        (served / "changed.json").write_text(json.dumps(document | {"envelope": document["envelope"] | changed}))
        said = [
            calib("watch", served / "log.jsonl", "--policy", served / "changed.json", *more, code=2).stderr
            for more in ((), ("--shadow",))
        ]
        assert said[0] == said[1]
        assert "Traceback" not in said[0]
        return said[0]

    assert "changed.json: envelope of schema 99" in error(schema=99)
    assert "changed.json: envelope.limits is not as calib export writes it" in error(limits=None)
    assert "envelope.think.n is not" in error(think={"share": 0.5, "n": "many"})


def test_shadow_predicts_from_p1_alone(served):
    rows = [{"p1": row["p1"]} for row in log_of(questions(np.random.default_rng(2), 3000, hard=0.5))]
    path = write(served / "p1.jsonl", rows)
    found = calib_json("watch", path, "--shadow", "--rate", "2/s")
    think = np.mean([max(row["p1"]) < 0.7 for row in rows])
    assert found["values"]["think_rate"]["value"] == pytest.approx(think)
    low, high = found["values"]["p90"]["interval"]
    assert low <= found["values"]["p90"]["value"] <= high <= found["values"]["p99"]["value"] * 2
    assert found["tokens_per_second"]["value"] == pytest.approx(2 * found["values"]["tokens"]["value"])
    assert "requests in flight" in calib("watch", path, "--shadow", "--rate", 2).stdout
    lower = calib_json("watch", path, "--shadow", "--threshold", 0.6, "--rate", 2)
    assert lower["values"]["think_rate"]["value"] < think
    assert lower["policy"]["threshold"] == 0.6


def test_shadow_reads_a_log_of_system_1_alone(served):
    rows = [row | {"think": False, "mode": "off"} for row in log_of(questions(np.random.default_rng(2), 500))]
    found = calib_json("watch", write(served / "day", rows), "--shadow")
    assert found["rate"] == pytest.approx(1.0)
    assert found["n"] == 500


def test_following_tells_changes_only(served):
    path = served / "log.jsonl"
    promised = watching.read_promised(None, [path])
    bad = log_of(questions(np.random.default_rng(1), 1500, slow=3.0))

    def append():
        with path.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in bad)

    steps = [lambda: None, lambda: None, append, lambda: None, lambda: None]

    def wait(seconds):
        if not steps:
            raise DoneError
        steps.pop(0)()

    reports = []
    with contextlib.suppress(DoneError):
        for now in watching.follow([path], promised, every=0.0, wait=wait):
            reports.append(now.report)
    assert reports[0].state == "ok"
    assert reports[-1].state == "broken"
    assert watching.changes(None, reports[0]) == []
    assert "p90<10s" in {finding.promise for finding in watching.changes(reports[0], reports[-1])}


def test_follow_prints_a_line_and_ends_with_3_on_an_interrupt(served):
    path = served / "log.jsonl"
    command = [sys.executable, "-m", "calib", "watch", str(path), "--follow", "--every", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    guard = threading.Timer(60, process.kill)
    guard.start()
    try:
        with path.open("a") as stream:
            for row in log_of(questions(np.random.default_rng(1), 1500, slow=3.0)):
                stream.write(json.dumps(row) + "\n")
        line = json.loads(process.stdout.readline())
        assert line["promise"] == "p90<10s"
        assert line["state"] in ("at_risk", "broken")
        while line["state"] != "broken":
            line = json.loads(process.stdout.readline())
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 3, process.stderr.read()
    finally:
        guard.cancel()
        process.kill()
        process.communicate()


def test_from_tuning_to_the_watch(tmp_path):
    """calib import, optimize, export, then a log of the exported policy on questions of the same kind."""
    rng = np.random.default_rng(0)

    def rows(o):
        answers = (rng.random(o.n) > o.p1[:, 0]).astype(int)  # System 1 is calibrated, and thinking finds the answer
        columns = zip(o.p1.tolist(), answers.tolist(), o.tokens[:, 0].tolist(), o.t2[0, :, 0].tolist(), strict=True)
        for i, (p1, answer, tokens, seconds) in enumerate(columns):
            yield {
                "id": str(i), "dataset": "d", "answer": answer, "p1": p1, "p2": [[0.95, 0.05], [0.05, 0.95]][answer],
                "think_tokens": int(tokens), "finished": True, "latency_s1": 0.05, "latency_s2": seconds,
            }  # fmt: skip

    store, out = tmp_path / "runs.db", tmp_path / "serve"
    write(tmp_path / "o.jsonl", rows(questions(rng, 500)))
    calib("import", tmp_path / "o.jsonl", "--store", store)
    tuned = calib_json("optimize", "--store", store, "--target", "p90<8s", "--trials", 0)
    record = tuned["envelope"]
    assert record["questions"] == "held out"
    assert record["think"]["share"] == pytest.approx(tuned["test"]["think_rate"]["value"])
    assert record["n"] == tuned["test"]["n"]
    assert record["shadow"]["n"] == 500
    calib("export", "best", "--out", out, "--store", store)
    promised = watching.read_promised(out / "policy.json", ["log"])
    assert promised.envelope == record

    served = replace(promised.policy, think_budget=4096)  # the made-up questions know no other
    assert served.threshold > 0.6
    log = log_of(questions(rng, 1500), served, version=promised.version)
    found = calib_json("watch", write(out / "log", log))
    assert found["state"] == "ok"
    slower = log_of(questions(rng, 1500, slow=5.0), served, version=promised.version)
    found = calib_json("watch", write(out / "log", slower), code=3)
    assert {p["promise"]: p["state"] for p in found["promises"]}["p90<8s"] == "broken"

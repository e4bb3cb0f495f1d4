"""`calib verify` against real gateways over HTTP: what is predicted comes, each fault gets its words and exit code."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from calib.arrivals import Load, arrival_times
from calib.certify import alpha_at_look
from calib.cli import cli
from calib.engine.base import Answer, AskFailed, EngineInfo
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.errors import CalibError
from calib.export import export
from calib.measured import read_served
from calib.outcomes import Outcomes
from calib.policy import Policy, Route, decide
from calib.questions import Question
from calib.queueing import forecast
from calib.serve import ServerThread, open_app
from calib.store import Answered, Store, load_outcomes
from calib.tuning import split_identity
from calib.verified import Verified
from calib.verify import Trial, verify
from tests.appstore import simulated_store

PROFILE = "gev-validation"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return simulated_store(tmp_path_factory.mktemp("verify") / "s.db")


@pytest.fixture
def store(prepared, tmp_path):
    for path in prepared.parent.glob("s.db*"):
        shutil.copy(path, tmp_path / path.name)
    with Store.open(tmp_path / "s.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def policy(prepared) -> Policy:
    with Store.open(prepared) as opened:
        return Policy.from_dict(opened.policy("best")["policy"])


class Faulty:
    """The simulated engine, with what a test makes of each answer; ``info`` is that of the good one."""

    def __init__(
        self,
        arm: str,
        change: Callable[[Question, Answer], Answer] = lambda _question, answer: answer,
        *,
        seed: int = 0,
        budget: int | None = None,
        honest: bool = True,
        time_scale: float = 0.0,
    ) -> None:
        self.engine = SimulatedEngine(load_profile(PROFILE), arm=arm, seed=seed, time_scale=time_scale)
        self.good = SimulatedEngine(load_profile(PROFILE), arm=arm)
        self.change, self.budget, self.honest = change, budget, honest

    async def info(self) -> EngineInfo:
        return await (self.engine if self.honest else self.good).info()

    async def ask(self, question: Question, budgets: Sequence[int], **options) -> Answer:
        if budgets and self.budget is not None:
            budgets = (self.budget,)
        return self.change(question, await self.engine.ask(question, budgets, **options))

    async def close(self) -> None:
        pass


def serving(engine, policy: Policy | None):
    """URL of a gateway for the length of a block."""
    return ServerThread(lambda: open_app(engine, policy=policy, context_tokens=8192))


def run(store: Store, url: str, policy: Policy, name: str = "best", **how) -> Verified:
    served = read_served(name, store)
    return verify(served, store, Trial(policy.arm, url, **({"resamples": 200} | how)))


def slower(factor: float) -> Callable[[Question, Answer], Answer]:
    return lambda _question, answer: replace(answer, t1=answer.t1 * factor, t2=answer.t2 * factor)


def _number(question: Question) -> int:
    """A number by the text of a question, evenly spread."""
    return zlib.crc32(question.question.encode())


def warned(found: Verified) -> str:
    return "\n".join(found.warnings)


@contextmanager
def saved(store: Store, policy: Policy, name: str = "changed", **changes):
    """The document of the tuned policy with another policy or other marks, under another name."""
    document = store.policy("best") | {"policy": policy.to_dict()} | changes
    store.save_policy(name, document)
    yield name


# --- as predicted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [None, Load(rate=300.0), Load(concurrency=3)], ids=str)
def test_a_deterministic_server_gives_exactly_what_is_predicted(store, policy, load):
    with serving(Faulty(policy.arm), policy) as url:
        found = run(store, url, policy, load=load)
    o = load_outcomes(store).split(0.3)[1]
    assert found.outcomes.n == o.n > 100  # all that was held out, and nothing that was tuned on
    assert set(found.outcomes.ids) == set(o.ids)
    d = decide(found.outcomes, policy)
    np.testing.assert_allclose(found.measured.p, d.p, atol=1e-12)
    np.testing.assert_array_equal(found.measured.thinks, d.thinks)
    np.testing.assert_array_equal(found.measured.tokens, d.tokens)
    np.testing.assert_allclose(found.measured.latency, d.latency, rtol=1e-12)
    assert {line.verdict for line in found.lines} == {"as predicted, on every question"}
    assert found.differences == ()
    assert (found.verdict, found.failures, found.certificate, found.marks) == ("kept", {}, None, ("simulated",))
    assert found.budgets.n == int(d.thinks.sum())
    assert found.budgets.broken == 0
    assert not found.interrupted
    at = warned(found)
    assert ("taken with 8 requests in flight" in at) == (load is not None)
    assert found.load == (load or Load(concurrency=8))  # as collected, unless told


def test_the_run_is_stored(store, policy):
    with serving(Faulty(policy.arm), policy) as url:
        found = run(store, url.replace("//", "//user:secret@"), policy, n=40)
    (kept,) = store.verifications("best", rows=True)
    assert (kept.arm, kept.rate, kept.concurrency, kept.url) == (policy.arm, None, 8, url)
    assert kept.summary == json.loads(json.dumps(found.to_dict()))
    assert kept.fingerprint == found.outcomes.fingerprint
    assert len(kept.rows.questions) == found.outcomes.n == 40
    np.testing.assert_array_equal(kept.rows.p, found.measured.p)
    np.testing.assert_array_equal(kept.rows.answers, decide(found.outcomes, policy).choice)
    assert b"secret" not in Path(store.location).read_bytes()


def test_a_draw_repeats_with_its_seed(store, policy):
    with serving(Faulty(policy.arm), policy) as url:
        first, again, other = (run(store, url, policy, n=30, seed=seed) for seed in (1, 1, 2))
    assert first.outcomes.ids.tolist() == again.outcomes.ids.tolist() != other.outcomes.ids.tolist()


def test_routes_by_dataset_are_asked_with_their_dataset(store, policy):
    dataset = load_outcomes(store).dataset_names[0]
    routed = replace(policy, routes={f"dataset={dataset}": Route(threshold=0.0)})
    with saved(store, routed) as name, serving(Faulty(policy.arm), routed) as url:
        found = run(store, url, routed, name)
    assert not found.measured.thinks[found.outcomes.dataset == dataset].any()
    assert found.differences == ()


def test_a_deadline_is_kept_and_predicted(store, policy):
    limited = replace(policy, deadline=3.0)
    with saved(store, limited) as name, serving(Faulty(policy.arm), limited) as url:
        found = run(store, url, limited, name)
    assert found.deadline is not None
    assert (found.deadline.broken, found.deadline.n) == (0, found.outcomes.n)
    assert found.measured.latency.max() <= 3.0 + 1e-9
    lines = {line.metric: line for line in found.lines}
    assert lines["closed"].predicted.value > 0
    assert lines["closed"].same
    assert lines["p90"].same


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_server_that_is_slower_by_30_percent(store, policy):
    with serving(Faulty(policy.arm, slower(1.3)), policy) as url:
        found = run(store, url, policy)
    lines = {line.metric: line for line in found.lines}
    assert lines["p90"].verdict.startswith("slower than predicted by 30 % (interval +")
    assert lines["accuracy"].verdict == "as predicted, on every question"
    assert found.verdict == "kept"  # p90<10s has room for it


def test_a_server_that_ignores_the_budget(store, policy):
    with serving(Faulty(policy.arm, budget=8192), policy) as url:
        found = run(store, url, policy)
    cut = decide(found.outcomes, policy).tokens == policy.think_budget
    assert 0 < found.budgets.broken <= int(cut.sum())
    assert f"{found.budgets.broken} of {found.budgets.n} thoughts are longer than the think budget, by up to" in warned(
        found
    )
    lines = {line.metric: line for line in found.lines}
    assert lines["tokens"].verdict.startswith("more tokens than predicted")
    assert set(found.to_dict()["differences"]["reasons"]) == {"other_thought"}


def test_a_server_that_fails_for_one_in_ten(store, policy):
    def fails(question: Question, answer: Answer) -> Answer:
        if _number(question) % 10 == 0:
            raise AskFailed("http_500", "broken")
        return answer

    with serving(Faulty(policy.arm, fails), policy) as url:
        found = run(store, url, policy)
    n = sum(found.failures.values())
    assert 0.03 * found.outcomes.n < n < 0.25 * found.outcomes.n
    assert found.failures == {"http_502": n}
    assert f"{n} of {found.outcomes.n} questions got no usable answer (http_502 {n}): counted as wrong" in warned(found)
    assert found.to_dict()["differences"]["reasons"]["failed"] == n
    assert np.isinf(found.measured.latency).sum() == n
    (kept,) = store.verifications(rows=True)
    assert (kept.rows.answers == -1).sum() == n
    assert np.isfinite(kept.rows.seconds).all()


def test_a_system2_that_fails_is_answered_by_system1(store, policy):
    def fails(question: Question, answer: Answer) -> Answer:
        if answer.budgets and _number(question) % 4 == 0:
            raise AskFailed("http_500", "broken", stage="system2")
        return answer

    with serving(Faulty(policy.arm, fails), policy) as url:
        found = run(store, url, policy)
    assert found.failures == {}
    degraded = int(found.measured.degraded.sum())
    assert degraded > 0
    lines = {line.metric: line for line in found.lines}
    assert lines["degraded"].measured.value == pytest.approx(degraded / found.outcomes.n)
    assert lines["degraded"].verdict.startswith("degrades more answers than predicted")
    assert set(found.to_dict()["differences"]["reasons"]) == {"degraded"}


def test_another_threshold(store, policy):
    other = replace(policy, threshold=0.6)
    with serving(Faulty(policy.arm), other) as url:
        found = run(store, url, policy)
    assert "the gateway serves policy version" in warned(found)
    assert set(found.to_dict()["differences"]["reasons"]) == {"other_version"}
    lines = {line.metric: line for line in found.lines}
    assert lines["think_rate"].verdict.startswith("thinks less often than predicted by ")


def test_a_bare_server_that_holds_other_knobs(store, policy):
    with serving(Faulty(policy.arm), None) as url:
        found = run(store, url, policy)
    said = warned(found)
    assert f"the server's threshold is 0.8, the policy's {policy.threshold:g}" in said
    assert f"the server's mix is 0.5, the policy's {policy.mix:g}" in said
    assert f"the server's think budget is unlimited, the policy's {policy.think_budget:,}" in said
    assert "other_threshold" in found.to_dict()["differences"]["reasons"]


def test_another_model_is_refused_before_it_is_asked(store, policy):
    with serving(Faulty(policy.arm, seed=1), policy) as url:
        with pytest.raises(CalibError, match="another model than 'best' was tuned for.*--allow-other-model"):
            run(store, url, policy)
        assert store.verifications() == []
        found = run(store, url, policy, allow_other_model=True)
    assert "the server is another model than the policy was tuned for" in warned(found)
    assert set(found.to_dict()["differences"]["reasons"]) & {"p1_crossed", "other_p1"}


def test_another_model_under_the_same_name_shows_in_its_answers(store, policy):
    with serving(Faulty(policy.arm, seed=1, honest=False), policy) as url:
        found = run(store, url, policy)
    assert "System 1 answers as another model does, whatever the server says it is" in warned(found)
    crossed = next(one for one in found.differences if one.reason == "p1_crossed")
    assert f"threshold {policy.threshold:.6f}" in crossed.detail


# --- what estimated latency may become --------------------------------------------------------------------------------


def test_measured_latency_certifies_what_was_estimated(store, policy):
    identity = split_identity(load_outcomes(store))
    before = store.looks(identity)
    with saved(store, policy, marks=["estimated", "simulated"]) as name, serving(Faulty(policy.arm), policy) as url:
        found = run(store, url, policy, name, load=Load(rate=300.0))
        assert store.looks(identity) == before + 1
        run(store, url, policy, name, load=Load(rate=300.0))
    assert store.looks(identity) == before + 1  # the very same numbers are no other look
    (target,) = found.targets
    n = found.outcomes.n
    assert (target.met, target.certified) == (True, True)
    assert target.test.p_value == pytest.approx(0.9**n)  # none of n is late, where one in ten may be
    certificate = found.certificate
    assert certificate is not None
    assert certificate["alpha"] == alpha_at_look(0.95, before + 1)
    assert certificate["statement"].startswith(
        f"certified at level 95%, look {before + 1} at the test split: p90<10s, by"
    )
    assert f"{n} measured latencies at 300 requests/s, " in certificate["statement"]
    assert certificate["statement"].endswith("It is about a simulated server")


def test_another_policy_in_force_proves_nothing_about_this_one(store, policy):
    identity = split_identity(load_outcomes(store))
    before = store.looks(identity)
    other = replace(policy, threshold=0.1)  # hardly thinks, and would pass
    with saved(store, policy, marks=["estimated"]) as name, serving(Faulty(policy.arm), other) as url:
        found = run(store, url, policy, name)
    assert found.certificate["verdict"] == "not_tested"
    assert "does not serve this policy" in found.certificate["statement"]
    assert (found.targets[0].met, found.targets[0].certified) == (True, None)
    assert store.looks(identity) == before


def test_measured_latency_may_also_refuse(store, policy):
    marked = saved(store, policy, marks=["estimated"])
    with marked as name, serving(Faulty(policy.arm, slower(3)), policy) as url:
        found = run(store, url, policy, name)
        few = run(store, url, policy, name, n=10)
    assert (found.verdict, found.targets[0].certified) == ("missed", False)
    assert "not certified" in found.certificate["statement"]
    assert "p90<10s is missed" in found.certificate["statement"]
    assert few.targets[0].certified is False


def test_a_target_that_was_not_asked_about_is_unknown(store, policy):
    one, other = load_outcomes(store).dataset_names[:2]
    promised = [{"target": f"accuracy[{one}]>=1%"}, {"target": f"accuracy[{other}]>=1%"}, {"target": "cost<1"}]
    with saved(store, policy, targets=promised) as name, serving(Faulty(policy.arm), policy) as url:
        found = run(store, url, policy, name, datasets=[one])
        nothing = run(store, url, policy, name, datasets=[load_outcomes(store).dataset_names[2]])
    assert [target.met for target in found.targets] == [True, None, None]
    assert found.targets[0].predicted == found.targets[0].test.value
    assert (found.verdict, nothing.verdict) == ("kept", "no_targets")


def test_a_promise_that_was_measured_spends_no_look(store, policy):
    identity = split_identity(load_outcomes(store))
    before = store.looks(identity)
    with serving(Faulty(policy.arm), policy) as url:
        found = run(store, url, policy, n=20)
    assert (store.looks(identity), found.targets[0].certified) == (before, None)


# --- seconds that were recorded at several loads ----------------------------------------------------------------------


class Paced(Faulty):
    """A real model by its own account: it sleeps its seconds, a tenth of the simulated ones, at any load."""

    def __init__(self, arm: str) -> None:
        super().__init__(arm, slower(0.1), time_scale=0.1)

    async def info(self) -> EngineInfo:
        told = await super().info()
        return replace(told, simulated=False, raw={**told.raw, "simulated": False})


LOADS = {2: 1.0, 8: 1.0, 32: 3.0}
"""Requests in flight, and how many times as long a question takes then."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A store with the seconds of some questions at each load, and a policy."""
    path = tmp_path_factory.mktemp("recorded") / "r.db"
    questions = load_profile(PROFILE).questions()[::12]
    engine, policy = Paced("base"), Policy(threshold=0.7, mix=0.5, think_budget=512)

    async def collect(store: Store) -> None:
        fingerprint = store.register_model(await engine.info())
        asked = SimulatedEngine(load_profile(PROFILE), arm="base")
        answers = [await asked.ask(question, (512, 2048)) for question in questions]
        for load, times in LOADS.items():
            timed = [slower(0.1 * times)(q, answer) for q, answer in zip(questions, answers, strict=True)]
            store.write(fingerprint, [Answered(q, "base", a, load) for q, a in zip(questions, timed, strict=True)])

    with Store.open(path) as store:
        store.add_questions(questions)
        asyncio.run(collect(store))
        document = {"policy": policy.to_dict(), "split": {"test_share": 0.5}, "marks": [], "targets": []}
        model = load_outcomes(store, concurrency=8).fingerprint
        store.save_policy("best", document | {"fingerprints": {"model": model}})
    return path


def test_arrivals_are_predicted_from_all_recorded_loads(recorded):
    policy = Policy(threshold=0.7, mix=0.5, think_budget=512)
    with serving(Paced("base"), policy) as url, Store.open(recorded) as store:
        asked = [run(store, url, policy, load=Load(rate=30.0), n=25, predict_at=at) for at in (None, 32)]
        with pytest.raises(CalibError, match="timed at the concurrencies 2, 8, 32.*--predict-at 32"):
            run(store, url, policy, n=5, load=Load(concurrency=3))  # a closed loop of another number
        all_loads = [load_outcomes(store, concurrency=load) for load in LOADS]
    found, alone = asked
    each = [o.split(0.5)[1] for o in all_loads]
    place = [each[0].ids.tolist().index(name) for name in found.outcomes.ids.tolist()]
    asked_there = [o.take(place) for o in each]
    rng = np.random.default_rng(0)
    rng.permutation(each[0].n)  # the draw of the questions comes first
    times = arrival_times(25, 30.0, rng)
    np.testing.assert_array_equal(found.due, times)
    expected = forecast(all_loads, asked_there, policy, times)
    np.testing.assert_array_equal(found.predicted.latency, expected.latency)
    np.testing.assert_array_equal(found.predicted.tokens, decide(asked_there[0], policy).tokens)

    told = found.to_dict()["load"]
    assert told["predicted_from"] == expected.to_dict()
    assert told["predicted_from"]["concurrency"] == [2, 8, 32]
    assert told["predicted_from"]["nearest"] == [2, 8, 32][expected.nearest]
    assert told["tuned_concurrency"] is None  # no document says which of them was tuned
    assert told["in_flight"] > 0
    lines = {line.metric: line for line in found.lines}
    assert lines["p90"].predicted.value == np.sort(expected.latency)[math.ceil(0.9 * 25) - 1]
    assert "were taken with" not in warned(found)

    assert alone.forecast is None  # one load, and what it says of each question
    np.testing.assert_array_equal(alone.due, times)
    np.testing.assert_array_equal(alone.predicted.latency, decide(asked_there[2], policy).latency)
    told = alone.to_dict()["load"]
    assert told["predicted_from"] == {"concurrency": [32], "nearest": 32, "in_flight": None}
    assert told["tuned_concurrency"] == 32
    assert "the stored seconds were taken with 32 requests in flight, these at 30 requests/s" in warned(alone)


def test_a_rate_that_nothing_recorded_sustains_is_said(recorded):
    with serving(Paced("base"), Policy(threshold=0.7, mix=0.5, think_budget=512)) as url:
        asked = ("verify", "best", "--arm", f"base={url}", "--store", str(recorded), "--n", "25")
        shown, quiet = called(*asked, "--rate", "900/s"), called(*asked, "--rate", "1/s", "--n", "3", "--json")
    assert shown.exit_code == 0, shown.output
    assert "predicted for these arrivals from seconds at 2, 8, 32 in flight: " in shown.stdout
    assert "900 requests/s arrive, more than any recorded load shows to be possible" in shown.output
    assert "; these show at least " in shown.stdout  # many prompts of few tokens
    document = json.loads(quiet.stdout)
    assert document["load"]["predicted_from"]["saturated"] == 0
    assert document["warnings"] == [
        f"{document['load']['predicted_from']['in_flight']:.3g} requests are in flight on average, fewer than at the "
        "lowest recorded load: the seconds of 2 in flight stand for theirs"
    ]


def test_all_that_was_collected_was_in_flight_whatever_is_asked(recorded, tmp_path):
    policy = Policy(threshold=0.7, mix=0.5, think_budget=512)
    path = shutil.copy(recorded, tmp_path / "r.db")
    with Store.open(path) as store:
        everything = [load_outcomes(store, concurrency=load) for load in LOADS]
        work = {name: everything[0].select([name]).tokens[:, -1].mean() for name in everything[0].dataset_names}
        light, heavy = min(work, key=work.get), max(work, key=work.get)
        assert work[heavy] > 1.2 * work[light]
        with serving(Paced("base"), policy) as url:
            one = run(store, url, policy, load=Load(rate=60.0), datasets=[light])
            two = run(store, url, policy, load=Load(rate=60.0), traffic={light: 1, heavy: 3}, n=20)
    for found in (one, two):
        place = {name: i for i, name in enumerate(zip(everything[0].dataset, everything[0].ids, strict=True))}
        there = [place[name] for name in zip(found.outcomes.dataset, found.outcomes.ids, strict=True)]
        expected = forecast(everything, [o.take(there) for o in everything], policy, found.due)
        np.testing.assert_array_equal(found.predicted.latency, expected.latency)
        assert found.forecast.to_dict() == expected.to_dict()
    assert set(one.outcomes.dataset) == {light}
    assert not two.outcomes.unweighted
    alone = [o.select([light]) for o in everything]
    assert forecast(alone, alone, policy, np.arange(alone[0].n) / 60.0).capacity != one.forecast.capacity


def estimated_at(outcomes_of: Callable[..., Outcomes], *loads: int) -> Callable[..., Outcomes]:
    """Outcomes with the seconds at some loads taken from a fitted line."""

    def load(*args, **how) -> Outcomes:
        found = outcomes_of(*args, **how)
        if how.get("concurrency") not in loads:
            return found
        return replace(found, estimated=np.ones_like(found.estimated))

    return load


@pytest.mark.parametrize(("marks", "looks"), [([], 0), (["estimated"], 1), (None, 1)])
def test_a_measured_promise_spends_no_look_where_the_nearest_load_is_estimated(
    recorded, tmp_path, monkeypatch, marks, looks
):
    policy = Policy(threshold=0.7, mix=0.5, think_budget=512)
    path = shutil.copy(recorded, tmp_path / "r.db")
    monkeypatch.setattr("calib.verify.load_outcomes", estimated_at(load_outcomes, 2))
    with Store.open(path) as store, serving(Paced("base"), policy) as url:
        identity = split_identity(load_outcomes(store, concurrency=8))
        before = store.looks(identity)
        with saved(store, policy, marks=marks, targets=[{"target": "p90<10s"}]) as name:
            found = run(store, url, policy, name, load=Load(rate=5.0), n=5)
        assert store.looks(identity) == before + looks
    told = found.to_dict()
    assert (told["load"]["predicted_from"]["nearest"], told["load"]["predicted_from"]["estimated"]) == (2, [2])
    assert (found.certificate is not None) == bool(looks)
    assert (
        "the seconds of some questions at 2 in flight are estimated, and so is what rests on them" in told["warnings"]
    )


def test_estimated_seconds_are_marked_where_the_prediction_is_printed(recorded, monkeypatch):
    monkeypatch.setattr("calib.verify.load_outcomes", estimated_at(load_outcomes, 2))
    with serving(Paced("base"), Policy(threshold=0.7, mix=0.5, think_budget=512)) as url:
        asked = ("verify", "best", "--arm", f"base={url}", "--store", str(recorded), "--n", "3", "--rate", "9/s")
        shown = called(*asked)
    assert "from seconds at 2 (estimated), 8, 32 in flight: " in shown.stdout


def without_seconds(outcomes_of: Callable[..., Outcomes], *loads: int) -> Callable[..., Outcomes]:
    """Outcomes in which one question was not timed at some loads."""

    def load(*args, **how) -> Outcomes:
        found = outcomes_of(*args, **how)
        if how.get("concurrency") not in loads:
            return found
        t1 = found.t1.copy()
        t1[:, 0] = math.nan
        return replace(found, t1=t1)

    return load


def test_the_load_that_predicts_was_recorded_and_has_seconds(recorded, monkeypatch):
    policy = Policy(threshold=0.7, mix=0.5, think_budget=512)
    with serving(Paced("base"), policy) as url, Store.open(recorded) as store:
        asked = ("verify", "best", "--arm", f"base={url}", "--store", str(recorded), "--n", "3", "--rate", "9/s")
        never = called(*asked, "--predict-at", "7")
        assert never.exit_code == 2
        assert "was not timed at --predict-at 7: it was timed at 2, 8, 32" in never.stderr
        for name, model, said in (
            ("of_nobody", None, "was not timed at --predict-at 7: it was timed at 2, 8, 32"),
            ("of_another", "f" * 64, "no answers of a model 'ffff"),
        ):
            with saved(store, policy, name, fingerprints={"model": model}), pytest.raises(CalibError, match=said):
                run(store, url, policy, name, predict_at=7)
        with monkeypatch.context() as patched:
            patched.setattr("calib.verify.load_outcomes", without_seconds(load_outcomes, 32))
            with pytest.raises(CalibError, match="concurrencies 2, 8, 32.*--predict-at 8"):
                run(store, url, policy, n=3, load=Load(concurrency=3))
            assert run(store, url, policy, n=3, load=Load(rate=9.0)).forecast.concurrency == (2, 8)
            patched.setattr("calib.verify.load_outcomes", without_seconds(load_outcomes, 2, 32))
            for load in (Load(rate=9.0), Load(concurrency=3), None):
                found = run(store, url, policy, n=3, load=load)
                assert found.forecast is None
                assert found.to_dict()["load"]["predicted_from"]["concurrency"] == [8]
                assert (
                    "of the concurrencies 2, 8, 32 the seconds of every question are known at 8 alone: they are the "
                    "prediction" in found.warnings
                )
            assert found.load == Load(concurrency=8)
            patched.setattr("calib.verify.load_outcomes", without_seconds(load_outcomes, 2, 8, 32))
            with pytest.raises(CalibError, match="at none of them on every question.*calib collect"):
                run(store, url, policy, n=3, load=Load(rate=9.0))


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_a_store_without_texts_takes_them_from_a_file(prepared, policy, tmp_path):
    with Store.open(prepared) as full:
        questions, document = full.questions(), full.policy("best")
        outcomes = load_outcomes(full)
    held_out = {(d, i) for d, i in zip(*(getattr(outcomes.split(0.3)[1], k) for k in ("dataset", "ids")), strict=True)}
    bare = shutil.copy(prepared, tmp_path / "bare.db")
    with Store.open(bare) as store, store.transaction():
        conn = store._open
        conn.exec_driver_sql("UPDATE questions SET state = NULL, question = NULL, options = NULL")
    changed = [replace(q, question=q.question + "?") if q.id == questions[0].id else q for q in questions]
    with Store.open(bare) as store, serving(Faulty(policy.arm), policy) as url:
        with pytest.raises(CalibError, match="has a known text; give the file that they came from: --questions FILE"):
            run(store, url, policy)
        some = [q for q in changed if (q.dataset, q.id) in held_out][:50] + [
            q for q in changed if (q.dataset, q.id) not in held_out
        ]
        found = run(store, url, policy, questions=some)
    assert found.outcomes.n in (49, 50)
    assert {(d, i) for d, i in zip(found.outcomes.dataset, found.outcomes.ids, strict=True)} <= held_out
    assert found.differences == ()
    left = found.counts["without_text"] + found.counts["other_text"]
    assert left == len(held_out) - found.outcomes.n
    assert "have no known text" in warned(found)
    assert document["split"]["test_share"] == 0.3


def test_ctrl_c_keeps_what_was_asked(store, policy):
    def stop(done: int, _total: int, _failed: int) -> None:
        if done >= 10:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = []

    def once(done: int, total: int, failed: int) -> None:
        if not stopped and done >= 10:
            stopped.append(done)
            stop(done, total, failed)

    with (
        saved(store, policy, marks=["estimated"]) as name,
        serving(Faulty(policy.arm, time_scale=0.05), policy) as url,
    ):
        served = read_served(name, store)
        found = verify(served, store, Trial(policy.arm, url, Load(concurrency=4), resamples=200), progress=once)
    assert found.interrupted
    assert 10 <= found.outcomes.n < 100
    assert "stopped before the end" in warned(found)
    assert found.certificate["verdict"] == "not_tested"  # the number of questions was not fixed before
    assert found.targets[0].certified is None
    assert len(store.verifications(name)) == 1
    assert found.differences == ()


def test_what_cannot_be_verified_is_said(store, policy, tmp_path):
    with pytest.raises(CalibError, match=f"tuned for arm {policy.arm}"):
        verify(read_served("best", store), store, Trial("other", "http://127.0.0.1:1"))
    with pytest.raises(CalibError, match="'nope' is neither a policy in a store nor a file"):
        read_served("nope", store)
    with pytest.raises(CalibError, match="No such file"):
        read_served(str(tmp_path / "policy.json"), store)
    with (
        saved(store, policy, split={"test_share": 0}) as name,
        pytest.raises(CalibError, match="tuned on all questions"),
    ):
        run(store, "http://127.0.0.1:1", policy, name)
    with pytest.raises(CalibError, match="--test-share 0 holds no question out"):  # that is said of no policy
        run(store, "http://127.0.0.1:1", policy, test_share=0)
    with pytest.raises(CalibError, match="--level must be between 0 and 1"):
        run(store, "http://127.0.0.1:1", policy, level=95)
    with pytest.raises(CalibError, match="--n must be 1"):
        run(store, "http://127.0.0.1:1", policy, n=0)


def test_a_file_knows_by_itself_what_was_held_out(store, policy, tmp_path):
    with saved(store, policy, "other", split={"test_share": 0.1}, certificate={"level": 0.8}) as name:
        export(store.policy(name), tmp_path / "serve", held_by="gateway", allow_simulated=True)
    with Store.open(tmp_path / "s.db") as opened:  # where the policy is saved with another share
        opened.save_policy("other", opened.policy("best"))
    with serving(Faulty(policy.arm), policy) as url:
        found = run(store, url, policy, str(tmp_path / "serve"))
    assert found.outcomes.n == load_outcomes(store).split(0.1)[1].n
    assert found.served.level == 0.8


def test_the_model_of_imported_outcomes_is_known_to_nobody(tmp_path):
    rows = [
        {"id": str(i), "dataset": "d", "answer": i % 2, "p1": [0.6, 0.4], "p2": [0.1, 0.9], "think_tokens": 30}
        for i in range(40)
    ]
    texts = [
        {"id": str(i), "dataset": "d", "kind": "choice", "question": f"Q{i}?", "options": ["a", "b"], "answer": i % 2}
        for i in range(40)
    ]
    for name, lines in (("o.jsonl", rows), ("q.jsonl", texts)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    at = ("--store", str(tmp_path / "i.db"))
    rates = ("--system1-ms", "50", "--tokens-per-second", "100")
    assert called("import", str(tmp_path / "o.jsonl"), *rates, *at).exit_code == 0
    assert called("optimize", "--trials", "0", "--target", "p90<10s", *at).exit_code == 0
    with Store.open(tmp_path / "i.db") as opened:
        policy = Policy.from_dict(opened.policy("best")["policy"])
    with serving(Faulty("base"), policy) as url:
        asked = ("verify", "best", "--arm", f"base={url}", "--questions", str(tmp_path / "q.jsonl"), *at)
        refused, allowed = called(*asked), called(*asked, "--allow-other-model", "--json")
    assert refused.exit_code == 2
    assert "were imported: nobody can tell whether" in refused.stderr
    document = json.loads(allowed.stdout)
    assert any("imported" in warning for warning in document["warnings"])
    assert not any("another model than the policy" in warning for warning in document["warnings"])
    assert "imported" in document["certificate"]["statement"]  # estimated seconds, and no word for whose these are


# --- the command ------------------------------------------------------------------------------------------------------


def called(*arguments: str):
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def exported(store, tmp_path) -> Path:
    export(store.policy("best"), tmp_path / "serve", held_by="gateway", allow_simulated=True)
    return tmp_path / "serve"


def test_the_command_says_kept_and_missed(store, policy, exported):
    with serving(Faulty(policy.arm), policy) as url:
        good = called("verify", str(exported), "--arm", f"{policy.arm}={url}", "--store", store.location, "--n", "60")
    assert good.exit_code == 0, good.output
    assert "verdict: kept" in good.stdout
    assert "as predicted, on every question" in good.stdout
    assert "every answer, and every decision to think, is the predicted one (60 questions)" in good.stdout
    assert "simulated" in good.output
    with serving(Faulty(policy.arm, slower(3)), policy) as url:
        arguments = ("verify", "best", "--arm", f"{policy.arm}={url}", "--store", store.location)
        bad = called(*arguments)
        as_json = called(*arguments, "--json", "--rate", "500/s")
    assert bad.exit_code == as_json.exit_code == 3
    assert "verdict: missed" in bad.stdout
    assert "slower than predicted by 200 %" in bad.stdout
    document = json.loads(as_json.stdout)
    assert document["load"]["rate"] == 500
    assert document["targets"][0]["met"] is False


def test_the_command_refuses_and_fails(store, policy, exported):
    at = ("--arm", f"{policy.arm}=http://127.0.0.1:9", "--store", store.location)
    gone = called("verify", str(exported / "policy.json"), *at)
    assert gone.exit_code == 1, gone.output
    both = called("verify", "best", *at, "--rate", "2/s", "--concurrency", "8")
    assert both.exit_code == 2
    assert "exclude each other" in both.output
    for timeout in ("inf", "nan", "0"):
        assert "--timeout" in called("verify", "best", *at, "--timeout", timeout).stderr
    assert called("verify", "best", "--arm", "nothing", "--store", store.location).exit_code == 2
    assert called("verify", "nobody", *at).exit_code == 2
    key = called("verify", "best", *at, "--api-key-env", "CALIB_TEST_NO_SUCH_KEY")
    assert "CALIB_TEST_NO_SUCH_KEY" in key.output
    assert store.verifications() == []


def test_a_key_is_sent_and_never_kept(store, policy, monkeypatch):
    monkeypatch.setenv("CALIB_TEST_KEY", "a-very-secret-key")
    with ServerThread(lambda: open_app(Faulty(policy.arm), policy=policy, key="a-very-secret-key")) as url:
        with pytest.raises(CalibError, match="wants a key"):
            run(store, url, policy, n=5)
        found = run(store, url, policy, n=5, api_key_env="CALIB_TEST_KEY")
    assert found.failures == {}
    assert b"a-very-secret-key" not in Path(store.location).read_bytes()

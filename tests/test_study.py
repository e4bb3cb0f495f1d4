"""Studies: against the exact optimum, resumed, shared by processes, with files of one's own, and in the dashboard."""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from calib import samplers
from calib.errors import CalibError
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, Cost, Policy, Route, decide, evaluate
from calib.study import default_storage, run_study
from calib.studyfile import Context, Gate, built_in, load_study
from calib.studystore import shown
from calib.target import parse_targets
from calib.trials import read_trials
from tests.strategies import distributions, outcomes

ROOT = Path(__file__).resolve().parents[1]


def sample(n: int = 60, seed: int = 0, **changes) -> Outcomes:
    """Questions on which thinking helps somewhat, at two budgets and by two arms."""
    rng = np.random.default_rng(seed)
    k = np.full(n, 4)
    answer = rng.integers(0, 4, n)
    skilled = np.eye(4)[answer]
    length = rng.integers(20, 400, n)
    budgets = np.array([100, 300])
    tokens = np.minimum(length[:, None], budgets)
    right = rng.random((n, 2)) < [0.6, 0.8]
    p2 = np.where(right[..., None], 0.7 * skilled[:, None], 0) + 0.3 * np.stack(
        [distributions(rng, k, 4, coarse=False) for _ in range(2)], axis=1
    )
    p2 /= p2.sum(2, keepdims=True)
    p1 = 0.5 * distributions(rng, k, 4, coarse=False) + 0.5 * np.where(rng.random((n, 1)) < 0.5, skilled, 0.25)
    speed = np.array([0.01, 0.006])[:, None, None]
    values = {
        "p1": p1 / p1.sum(1, keepdims=True),
        "p2": p2,
        "tokens": tokens,
        "finished": length[:, None] <= budgets,
        "t1": np.full((2, n), [[0.05], [0.06]]),
        "t2": speed * tokens,
        "answer": answer,
        "budgets": budgets,
        "arms": ("base", "mtp"),
    }
    return Outcomes(**(values | changes))


def context_of(o: Outcomes, targets: str = "", **changes) -> Context:
    found = parse_targets(targets) if targets else ()
    plain = Context(o, found, "accuracy", True, o.arms, tuple(o.budgets.tolist()))
    return replace(plain, **changes)


def trials_of(result, storage: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=result.name, storage=storage).trials


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return default_storage(tmp_path / "calib.db")


# ------------------------------------------------------------------------------------------- beside the exact optimum
@settings(max_examples=30)
@given(
    outcomes(),
    st.sampled_from(["", "p90<1.5s", "accuracy>=50%", "tokens<10, accuracy>30%", "p90<1ms"]),
    st.sampled_from([("accuracy", None), (None, "p90"), (None, "tokens"), (None, "cost")]),
    st.sampled_from(["random", "tpe", "qmc"]),
)
def test_no_study_of_the_plain_space_beats_the_exact_optimum(o, text, objective, sampler):
    up, down = objective
    targets = parse_targets(text) if text else ()
    asked = {"maximize": up, "minimize": down, "cost": Cost(wrong=1, second=0.1)}
    exact = optimum(o, targets, **asked)
    found = run_study(o, targets, sampler=sampler, trials=12, seed=1, **asked)
    assert exact.method == "exact"
    if exact.policy is None:
        assert found.policy is None
        assert math.isnan(found.objective)
        assert found.to_dict()["gap"] is None
    elif found.policy is not None:
        assert found.gap >= 0
        score = evaluate(o, found.policy, by_dataset=True, cost=asked["cost"])
        assert all(target.met(score) for target in targets)
        assert found.objective == pytest.approx(getattr(score, exact.metric), abs=1e-12)
    warm = run_study(o, targets, trials=1, warm_start=[exact.policy] if exact.policy else [], exact=exact, **asked)
    assert exact.policy is None or warm.gap == 0


@settings(max_examples=40)
@given(outcomes(), st.floats(0, ALWAYS), st.floats(0, 1))
def test_the_gate_between_thresholds_and_shares(o, threshold, share):
    gate = Gate.of(o)

    def thinks(at):
        return decide(o, Policy(at, 0.5, int(o.budgets[0]))).thinks

    assert (thinks(gate.midway(threshold)) == thinks(threshold)).all()
    assert gate.midway(threshold) in gate.thresholds
    able = max(1, o.can_think.sum())
    assert gate.share(threshold) == thinks(threshold).sum() / able
    reachable = [thinks(t).sum() / able for t in gate.thresholds]
    assert abs(gate.share(gate.threshold(share)) - share) == min(abs(s - share) for s in reachable)


def test_of_equal_trials_the_cheapest_is_the_best(storage):
    o = sample()
    same = replace(o, p2=np.repeat(o.p1[:, None], 2, axis=1))  # thinking changes no answer
    found = run_study(same, storage=storage, trials=20, sampler="random")
    seconds = [trial.user_attrs["mean"] for trial in trials_of(found, storage)]
    assert evaluate(same, found.policy).mean == min(seconds) < max(seconds)
    assert found.gap == 0


# ------------------------------------------------------------------------------------------------ what a trial records
def test_each_trial_holds_every_metric_and_the_margins_in_their_units(storage):
    o = sample()
    targets = parse_targets("p90<2.5s, accuracy>=70%, p50<=900ms, think_rate<0.9")
    found = run_study(o, targets, storage=storage, trials=12)
    trials = trials_of(found, storage)
    assert len(trials) == found.trials == 12
    for trial in trials:
        score = evaluate(o, Policy.from_dict(trial.user_attrs["policy"]))
        assert {name: trial.user_attrs[name] for name in score.to_dict()} == score.to_dict()
        assert trial.value == score.accuracy
        assert trial.user_attrs["threshold"] == trial.user_attrs["policy"]["threshold"]
        assert trial.user_attrs["margin p90<2.5s"] == pytest.approx(2.5 - score.p90)
        assert trial.user_attrs["margin accuracy>=70%"] == pytest.approx(100 * score.accuracy - 70)
        assert trial.user_attrs["margin p50<=900ms"] == pytest.approx(900 - 1000 * score.p50)
        assert trial.user_attrs["margin think_rate<0.9"] == pytest.approx(0.9 - score.think_rate)
        assert trial.constraints == {str(t): -t.margin(score) for t in targets}
    met = [all(t.met(evaluate(o, Policy.from_dict(trial.user_attrs["policy"]))) for t in targets) for trial in trials]
    assert found.feasible == sum(met)
    best = max(trial.value for trial, ok in zip(trials, met, strict=True) if ok)
    assert found.objective == best
    assert found.to_dict() == json.loads(json.dumps(found.to_dict(), allow_nan=False))


def test_targets_by_dataset_are_constraints_too():
    o = sample(dataset=["a", "b"] * 30)
    targets = parse_targets("accuracy[a]>=50%, p90[worst]<3s")
    found = run_study(o, targets, trials=15)
    score = evaluate(o, found.policy, by_dataset=True)
    assert all(t.met(score) for t in targets)


def test_an_unknown_latency_misses_its_target(storage):
    o = sample()
    t2 = o.t2.copy()
    t2[1] = np.nan  # of the second arm no thought was timed
    found = run_study(replace(o, t2=t2), parse_targets("p90<9s"), storage=storage, trials=20, sampler="random")
    trials = trials_of(found, storage)
    unknown = [t for t in trials if t.user_attrs["p90"] is None]
    assert unknown
    assert all(t.constraints == {"p90<9s": 1e9} and t.user_attrs["margin p90<9s"] is None for t in unknown)
    assert found.feasible == len(trials) - len(unknown)


def test_nothing_feasible_gives_no_policy(storage):
    found = run_study(sample(), parse_targets("p90<1ms"), storage=storage, trials=5)
    assert (found.policy, found.feasible, found.trials) == (None, 0, 5)
    told = found.to_dict()
    assert (told["policy"], told["objective"], told["gap"]) == (None, None, None)


# --------------------------------------------------------------------------------- storage, resuming, several processes
def test_a_resumed_study_goes_on_as_if_it_had_not_been_interrupted(storage):
    o, targets = sample(), parse_targets("p90<2.5s")
    for sampler in ("tpe", "random", "qmc"):
        asked = {"storage": storage, "sampler": sampler, "seed": 3}
        run_study(o, targets, name=f"{sampler} in two", trials=7, **asked)
        second = run_study(o, targets, name=f"{sampler} in two", trials=7, **asked)
        at_once = run_study(o, targets, name=f"{sampler} at once", trials=14, **asked)
        assert second.trials == at_once.trials == 14
        assert [t.params for t in trials_of(second, storage)] == [t.params for t in trials_of(at_once, storage)]
        assert second.to_dict()["policy"] == at_once.to_dict()["policy"]
        other = run_study(o, targets, name=f"{sampler} other seed", trials=2, **(asked | {"seed": 4}))
        assert [t.params for t in trials_of(other, storage)] != [t.params for t in trials_of(at_once, storage)][:2]


def test_a_study_without_a_name_is_a_new_one_each_time(storage):
    one, other = (run_study(sample(), storage=storage, trials=2) for _ in range(2))
    assert one.name != other.name
    assert one.trials == other.trials == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"targets": parse_targets("p90<3s")}, "targets"),
        ({"outcomes": sample(seed=1)}, "outcomes"),
        ({"study": "pareto"}, "study, objectives"),
        ({"minimize": "p90"}, "objectives"),
        ({"budgets": [100]}, "budgets"),
    ],
)
def test_trials_of_different_questions_never_mix(storage, change, named):
    asked = {"outcomes": sample(), "targets": parse_targets("p90<2.5s"), "name": "mine", "storage": storage}
    run_study(**asked, trials=2)
    with pytest.raises(CalibError, match=f"another question: {named} differ"):
        run_study(**(asked | change), trials=2)


def test_a_study_from_before_a_key_was_known_goes_on(storage):
    asked = {"outcomes": sample(), "targets": parse_targets("p90<2.5s"), "name": "old", "storage": storage}
    run_study(**asked, trials=2)
    old = optuna.load_study(study_name="old", storage=storage)
    question = old.user_attrs["question"]
    assert question["routes"] is question["room"] is None
    old.set_user_attr("question", {key: question[key] for key in question if key not in ("routes", "room")})
    assert run_study(**asked, trials=2).trials == 4
    with pytest.raises(CalibError, match="another question: routes differ"):
        run_study(**asked, trials=2, route_by="dataset")
    old.set_user_attr("question", question | {"later": 1})
    with pytest.raises(CalibError, match="another question: later differ"):
        run_study(**asked, trials=2)


def test_a_study_that_calib_did_not_make_is_left_alone(storage):
    optuna.create_study(study_name="strange", storage=storage).optimize(lambda t: t.suggest_float("x", 0, 1), 1)
    with pytest.raises(CalibError, match="calib did not make"):
        run_study(sample(), name="strange", storage=storage, trials=2)


WORKER = """
import sys
from tests.test_study import sample
from calib.study import run_study
from calib.target import parse_targets
run_study(sample(), parse_targets("p90<2.5s"), name="shared", storage=sys.argv[1], sampler="random", trials=12)
"""


def test_two_processes_share_one_study(storage):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WORKER, storage], env=environment, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for worker in workers:
        _, stderr = worker.communicate(timeout=120)
        assert worker.returncode == 0, stderr.decode()
    study = optuna.load_study(study_name="shared", storage=storage)
    assert [t.number for t in study.trials] == list(range(24))
    assert all(t.state == optuna.trial.TrialState.COMPLETE for t in study.trials)
    # both have the same seed, and draw what one process alone would have drawn: nothing twice
    alone = run_study(sample(), parse_targets("p90<2.5s"), name="alone", storage=storage, sampler="random", trials=24)
    assert [t.params for t in study.trials] == [t.params for t in trials_of(alone, storage)]
    assert len({json.dumps(t.params) for t in study.trials}) == 24


def test_threads_and_a_time_limit(storage):
    told = []
    o = sample()
    found = run_study(o, storage=storage, trials=10, jobs=3, progress=lambda *now: told.append(now))
    assert found.trials == 10
    assert [done for done, _, _ in told] == list(range(1, 11))
    assert {total for _, total, _ in told} == {10}
    assert max(best for _, _, best in told) == told[-1][2] == found.objective
    began = time.monotonic()
    short = run_study(o, storage=storage, trials=100_000, timeout=0.5)
    assert 0 < short.trials < 1000
    assert time.monotonic() - began < 20


def test_a_password_is_never_shown():
    url = "postgresql://me:hunter2@127.0.0.1:1/studies?sslpassword=hunter3"
    assert "hunter" not in shown(url)
    with pytest.raises(CalibError) as error:
        run_study(sample(), storage=url, trials=1)
    assert "hunter" not in str(error.value)
    assert "127.0.0.1" in str(error.value)


def test_storages_that_cannot_be_used(tmp_path):
    o = sample()
    with pytest.raises(CalibError, match="mkdir -p"):
        run_study(o, storage=str(tmp_path / "nowhere" / "s.db"), trials=1)
    (tmp_path / "text.db").write_text("not a database, but long enough to be taken for one" * 10)
    with pytest.raises(CalibError, match="not a database") as error:
        run_study(o, storage=str(tmp_path / "text.db"), trials=1)
    assert error.value.exit_code == 1
    with pytest.raises(CalibError, match="not a URL"):
        run_study(o, storage="://", trials=1)
    with pytest.raises(CalibError, match="strange"):
        run_study(o, storage="strange://host/db", trials=1)
    assert run_study(o, storage="sqlite:///:memory:", trials=3, jobs=2).trials == 3


def test_default_storage():
    assert default_storage("calib.db") == "sqlite:///calib.db.studies.db"
    assert default_storage(Path("/a/b.db")) == "sqlite:////a/b.db.studies.db"
    assert default_storage("postgresql://u@h/d") == "postgresql://u@h/d"


def test_a_storage_fails_while_it_is_used(storage, tmp_path):
    def spoil(done, _total, _best):
        if done == 2:
            with sqlite3.connect(tmp_path / "calib.db.studies.db") as connection:
                connection.execute("DROP TABLE trial_user_attributes")
            connection.close()

    with pytest.raises(CalibError, match="no such table") as error:
        run_study(sample(), storage=storage, trials=5, progress=spoil)
    assert error.value.exit_code == 1


# ------------------------------------------------------------------------------------------------------------ samplers
@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "nsga2", "nsga3", "bruteforce", "gp"])
@pytest.mark.parametrize("study", ["policy", "pareto"])
def test_samplers_by_name(sampler, study):
    if sampler == "gp":
        pytest.importorskip("torch", reason="needs the package torch")
    found = run_study(sample(), parse_targets("p90<3s"), study=study, sampler=sampler, trials=12)
    assert found.trials == 12
    assert found.policy is not None


def test_cma_es_says_that_it_does_not_look_at_the_targets():
    pytest.importorskip("cmaes", reason="needs the package cmaes")
    found = run_study(sample(), parse_targets("p90<2.5s"), sampler="cmaes", trials=12)
    assert found.trials == 12
    assert found.to_dict()["warnings"] == ["the sampler 'cmaes' does not look at the targets"]
    assert not run_study(sample(), sampler="cmaes", trials=3).warnings


def test_brute_force_tries_every_policy_and_stops(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from calib.policy import Policy\n"
        "def space(trial, context):\n"
        "    threshold = trial.suggest_float('threshold', 0, 0.15, step=context.step)\n"
        "    return Policy(threshold, 0.5, trial.suggest_categorical('b', context.budgets), 'base')\n"
    )
    assert run_study(sample(), study=own, sampler="bruteforce", trials=100).trials == 4 * 2


def test_samplers_that_need_more_say_what(monkeypatch):
    monkeypatch.setattr(samplers, "find_spec", lambda name: None)
    with pytest.raises(CalibError, match="pip install torch"):
        run_study(sample(), sampler="gp", trials=1)
    with pytest.raises(CalibError, match="pip install cmaes"):
        run_study(sample(), sampler="cmaes", trials=1)
    monkeypatch.undo()
    with pytest.raises(CalibError, match="tpe, random, qmc"):
        run_study(sample(), sampler="annealing", trials=1)
    monkeypatch.setattr(samplers, "find_spec", lambda name: object())
    with pytest.raises(CalibError, match="takes one objective"):
        run_study(sample(), study="pareto", sampler="cmaes", trials=1)


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"jobs": 0}, {"timeout": 0}, {"seed": -1}])
def test_extents_that_make_no_sense(wrong):
    with pytest.raises(CalibError):
        run_study(sample(), **({"trials": 1} | wrong))


# --------------------------------------------------------------------------------------------------- files of one's own
BROKEN = {
    "syntax": ("x = 1\ndef space(trial, context)\n    pass\n", "line 2: the file does not run: SyntaxError"),
    "import": ("import json\n\nimport no_such_module\n", "line 3: the file does not run: ModuleNotFoundError"),
    "nothing": ("x = 1\n", "needs a function space"),
    "objectives": ("OBJECTIVES = ('speed',)\ndef space(t, c): pass\n", "tuple of metrics"),
    "one objective": ("OBJECTIVES = 'p90'\ndef space(t, c): pass\n", "tuple of metrics"),
    "params": ("params = 3\ndef space(t, c): pass\n", "params must be a function"),
    "runs": ("def space(trial, context):\n    a = 1\n    return a / 0\n", "line 3: space: ZeroDivisionError"),
    "returns": ("def space(trial, context):\n    return 3\n", "space must return a Policy, got 3"),
    "policy": (
        "from calib.policy import Policy\ndef space(trial, context):\n    return Policy(threshold=7)\n",
        "line 3: space: threshold must be from 0",
    ),
    "decide": (
        "def space(trial, context):\n    return context.suggest_policy(trial)\n"
        "def decide(trial, context, policy):\n    raise KeyError('k')\n",
        "line 4: decide: KeyError",
    ),
    "findings": (
        "def space(trial, context):\n    return context.suggest_policy(trial)\n"
        "def findings(attempts, context):\n    return {'x': float('nan')}\n",
        "findings: ValueError",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_error_in_a_study_file_names_the_file_and_the_line(tmp_path, case):
    text, said = BROKEN[case]
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(CalibError) as error:
        run_study(sample(), study=path, trials=2)
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)


def test_a_file_of_ones_own(tmp_path, storage):
    path = tmp_path / "own.py"
    path.write_text(
        "import optuna\n"
        "OBJECTIVES = ('brier', 'tokens')\n"
        "def space(trial, context):\n"
        "    policy = context.suggest_policy(trial)\n"
        "    if policy.arm == 'mtp':\n"
        "        raise CANNOT\n"
        "    return policy\n"
        "def findings(attempts, context):\n"
        "    return {'sentence': f'{len(attempts)} tried'}\n".replace("CANNOT", "optuna.TrialPruned")
    )
    with pytest.raises(CalibError, match="unknown study 'own'; there are: pareto, per_dataset, policy, truncation"):
        load_study("own")
    with pytest.raises(CalibError, match="no study file there"):
        load_study(tmp_path / "other.py")
    path.write_text(path.read_text().replace("'brier', 'tokens'", "'brier',"))
    found = run_study(sample(), study=path, storage=storage, sampler="random", trials=16)
    arms = [t.params["arm"] for t in trials_of(found, storage)]
    assert found.trials == arms.count("base") < 16
    assert found.findings == {"sentence": f"{found.trials} tried"}
    assert optuna.load_study(study_name=found.name, storage=storage).user_attrs["findings"] == found.findings
    assert optuna.load_study(study_name=found.name, storage=storage).direction.name == "MINIMIZE"
    assert found.metric == "accuracy"  # the caller's own objective names the policy


def test_an_objective_that_is_not_known_is_refused():
    o = sample()
    with pytest.raises(CalibError, match="p90 needs seconds"):
        run_study(replace(o, t2=np.full_like(o.t2, np.nan)), study="pareto", trials=1)
    with pytest.raises(CalibError, match="needs prices"):
        run_study(o, minimize="cost", trials=1)
    with pytest.raises(CalibError, match="was not collected"):
        run_study(o, arms=["fast"], trials=1)
    with pytest.raises(CalibError, match="the warm start uses"):
        run_study(o, budgets=[100], warm_start=[Policy(0.5, 0.5, 300)], trials=1)


# ------------------------------------------------------------------------------------------------- the studies of calib
def test_pareto_gives_a_front_that_nothing_beats():
    o, targets = sample(), parse_targets("tokens<250")
    found = run_study(o, targets, study="pareto", trials=40)
    points = [a.values for a in found.front]
    assert len(points) > 2
    assert points == sorted(set(points))
    for accuracy, seconds in points:
        assert not any(a >= accuracy and s <= seconds and (a, s) != (accuracy, seconds) for a, s in points)
    for attempt in found.front:
        score = evaluate(o, attempt.policy)
        assert attempt.values == (score.accuracy, score.p90)
        assert all(t.met(score) for t in targets)
    assert found.objective == max(a for a, _ in points)
    assert found.gap >= 0


def three_datasets() -> Outcomes:
    return sample(200, dataset=["few"] * 20 + ["some"] * 60 + ["many"] * 120)


def test_per_dataset_pulls_a_route_to_the_pooled_policy():
    space = load_study("per_dataset").space
    drawn = {
        "think_share": 0.8,
        "mix": 0.3,
        "think_budget": 300,
        "arm": "mtp",
        "think_share dataset=some": 0.4,
        "think_share dataset=many": 0.1,
        "think_budget dataset=many": 100,
        "thinking dataset=many": True,
    }
    o = three_datasets()
    context = context_of(o)
    policy = space(FixedTrial(drawn), context)
    few, some, many = (o.dataset == name for name in ("few", "some", "many"))
    pooled = decide(o, replace(policy, routes={})).thinks
    assert pooled.sum() == 160
    thinks = decide(o, policy).thinks
    assert list(policy.routes) == ["dataset=many", "dataset=some"]
    assert (thinks[few] == pooled[few]).all()
    # some: own weight 60 / 160; many: 120 / 220
    assert thinks[some].sum() == pytest.approx(pooled[some].sum() * 100 / 160 + 0.4 * 60 * 60 / 160, abs=0.5)
    assert thinks[many].sum() == pytest.approx(pooled[many].sum() * 100 / 220 + 0.1 * 120 * 120 / 220, abs=0.5)
    assert (policy.routes["dataset=some"].think_budget, policy.routes["dataset=many"].think_budget) == (None, 100)
    off = space(FixedTrial(drawn | {"thinking dataset=many": False}), context)
    assert off.routes["dataset=many"] == Route(0.0)
    assert not decide(o, off).thinks[many].any()
    pulled = {"think_share dataset=some": pooled[some].mean(), "think_share dataset=many": pooled[many].mean()}
    assert not space(FixedTrial(drawn | pulled | {"think_budget dataset=many": 300}), context).routes


def test_per_dataset_starts_from_the_exact_optimum_and_may_beat_it(storage):
    o, targets = three_datasets(), parse_targets("p90<2.5s")
    exact = optimum(o, targets)
    found = run_study(o, targets, study="per_dataset", trials=1, warm_start=[exact.policy], storage=storage)
    assert found.gap == 0
    assert not found.policy.routes
    routed = replace(exact.policy, routes={"dataset=many": Route(0.0), "dataset=some": Route(0.6)})
    again = run_study(o, study="per_dataset", trials=1, warm_start=[routed])
    assert (decide(o, again.policy).p == decide(o, routed).p).all()
    assert run_study(o, targets, study="per_dataset", trials=60, warm_start=[exact.policy]).gap <= 0


def test_per_dataset_takes_the_first_key_that_tells_questions_apart():
    space = load_study("per_dataset").space
    names = {}
    for key, changes in {"kind": {"kind": ["choice", "noul"] * 40}, "dataset": {"dataset": ["a", "b"] * 40}}.items():
        trial = optuna.create_study().ask()
        space(trial, context_of(sample(80, **changes)))
        names[key] = [name for name in trial.params if name.startswith("think_share ")]
    assert names == {
        "kind": ["think_share kind=choice", "think_share kind=noul"],
        "dataset": ["think_share dataset=a", "think_share dataset=b"],
    }
    trial = optuna.create_study().ask()
    assert not space(trial, context_of(sample())).routes
    assert set(trial.params) == {"think_share", "mix", "think_budget", "arm"}


def test_routes_go_by_what_is_asked_for():
    o = sample(80, dataset=["a", "b"] * 40, kind=(["choice"] * 2 + ["noul"] * 2) * 20)
    found = run_study(o, study="per_dataset", trials=12, route_by="kind")
    keys = {key for attempt in found.attempts for key in attempt.policy.routes}
    assert keys == {"kind=choice", "kind=noul"}
    assert [attempt.number for attempt in found.attempts] == list(range(12))
    assert {key for one in run_study(o, study="per_dataset", trials=12).attempts for key in one.policy.routes} == {
        "dataset=a",
        "dataset=b",
    }


def test_room_below_a_target_guides_sampling_and_decides_nothing(storage):
    o, targets = sample(120), parse_targets("think_rate<=60%")
    named = {"study": "policy", "storage": storage, "trials": 40, "requirements": {targets[0]: 0.1}}
    found = run_study(o, targets, name="room", **named)
    for trial, attempt in zip(trials_of(found, storage), found.attempts, strict=True):
        rate = decide(o, attempt.policy).thinks.mean()
        assert attempt.feasible is bool(rate <= 0.6)  # the target alone
        assert trial.constraints["room below think_rate<=60%"] == pytest.approx(rate - 0.1)
    assert found.feasible == sum(attempt.feasible for attempt in found.attempts) > 0
    assert found.gap == optimum(o, targets).objective - found.objective >= 0
    with pytest.raises(CalibError, match="asked another question: room differ"):
        run_study(o, targets, name="room", **named | {"requirements": {}})
    read = read_trials(storage.removeprefix("sqlite:///").removesuffix(".studies.db"), "room")
    assert read.feasible.tolist() == [attempt.feasible for attempt in found.attempts]


def cut_thoughts() -> Outcomes:
    """Ten questions: System 1 is right on four, whose thoughts are cut and wrong; six finish, and are right."""
    cut = np.arange(10) < 4
    return Outcomes(
        p1=np.where(cut[:, None], [0.6, 0.4], [0.3, 0.7]),
        p2=np.where(cut[:, None], [0.0, 1.0], [0.9, 0.1])[:, None],
        tokens=np.where(cut, 100, 50)[:, None],
        finished=~cut[:, None],
        t1=np.full((1, 10), 0.1),
        t2=np.where(cut, 1.0, 0.5)[None, :, None],
        answer=np.zeros(10, int),
        budgets=np.array([100]),
    )


def test_truncation_treats_cut_thoughts_by_the_rule():
    study = load_study("truncation")
    o = cut_thoughts()
    context = context_of(o)
    drawn = {"think_share": 1.0, "mix": 0.5, "think_budget": 100, "arm": "base", "cut_mix": 0.2}
    policy = study.space(FixedTrial(drawn), context)
    by_rule = {
        rule: study.decide(FixedTrial(drawn | {"rule": rule}), context, policy)
        for rule in ("use", "system1", "own_mix")
    }
    # a cut thought: 0.5 * 0.6 used, 0.6 dropped, 0.8 * 0.6 with its own mix; a finished one: 0.5 * 0.3 + 0.5 * 0.9
    assert [d.p[0, 0] for d in by_rule.values()] == pytest.approx([0.3, 0.6, 0.48])
    assert all(d.p[9, 0] == pytest.approx(0.6) for d in by_rule.values())
    assert all((d.latency == by_rule["use"].latency).all() and d.thinks.all() for d in by_rule.values())
    failed = replace(o, p2=np.where(np.arange(10)[:, None, None] == 0, np.nan, o.p2))
    lost = study.decide(FixedTrial(drawn | {"rule": "system1"}), context_of(failed), policy)
    assert np.isnan(lost.p[0]).all()
    assert lost.p[1, 0] == pytest.approx(0.6)


def test_truncation_finds_the_rule_that_wins(storage):
    o = cut_thoughts()
    found = run_study(o, parse_targets("think_rate>=90%"), study="truncation", trials=40, storage=storage)
    told = found.findings
    # all think. A finished thought is right from mix 1/3 on (0.3 + 0.6 m > 0.5), a cut one that is used below 1/6
    # (0.6 - 0.6 m > 0.5): 6 of 10 right. Dropped, the cut ones are right at any mix
    assert told["objective"]["use"] == 0.6
    assert told["objective"]["system1"] == 1.0
    assert (told["rule"], told["lead"], told["cut_thoughts"]) == ("system1", pytest.approx(0.4), 4)
    assert told["sentence"].startswith(
        "answer by System 1 after a cut thought: accuracy is better by 0.4 than using it"
    )
    assert told["accuracy_over"]["use"]["gained"] == 4
    assert optuna.load_study(study_name=found.name, storage=storage).user_attrs["findings"] == told
    assert run_study(o, study="truncation", trials=60).findings["rule"] == "system1"
    nothing = run_study(o, parse_targets("p90<1ms"), study="truncation", trials=3)
    assert nothing.findings["rule"] is None


def test_truncation_without_cut_thoughts_says_that_no_rule_matters():
    o = sample()
    found = run_study(replace(o, finished=np.ones_like(o.finished)), study="truncation", trials=10)
    assert found.findings["lead"] == 0
    assert found.findings["rule"] == "use"
    assert "no other rule for cut thoughts is better" in found.findings["sentence"]


def test_every_study_that_ships_can_start_from_a_policy():
    o = three_datasets()
    start = Policy(0.6, 0.4, 100, "mtp")
    for study in built_in():
        found = run_study(o, study=study, trials=1, warm_start=[start])
        assert found.policy.to_dict() == Policy(context_of(o).gate.midway(0.6), 0.4, 100, "mtp").to_dict()
        assert found.objective == evaluate(o, start).accuracy
        counted = run_study(o, study=study, sampler="bruteforce", trials=1, warm_start=[start])
        assert counted.params["mix"] == 0.4
        assert counted.params["think_share"] == pytest.approx(found.params["think_share"], abs=0.0251)


# --------------------------------------------------------------------------------------------------- quiet, dashboard
def test_optuna_is_quiet_and_left_as_it_was(capfd):
    optuna.logging.set_verbosity(optuna.logging.INFO)
    run_study(sample(), trials=3, sampler="qmc")
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.INFO


def test_importing_the_module_does_not_import_optuna_or_streamlit():
    code = "import calib.study, sys; print([m for m in ('optuna', 'streamlit') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


class _Silent(WSGIRequestHandler):
    def log_message(self, *args):
        pass


def test_the_dashboard_shows_the_margins(storage):
    dashboard = pytest.importorskip("optuna_dashboard", reason="needs the package optuna-dashboard")
    found = run_study(sample(), parse_targets("p90<2.5s, accuracy>=70%"), storage=storage, trials=4)
    rdb = optuna.storages.RDBStorage(storage)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = make_server("127.0.0.1", port, dashboard.wsgi(rdb), handler_class=_Silent)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def get(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return json.load(answer)

    try:
        (listed,) = get("/api/studies")["study_summaries"]
        assert listed["study_name"] == found.name
        trials = get(f"/api/studies/{listed['study_id']}?after=0")["trials"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        rdb.remove_session()
        rdb.engine.dispose()
    assert len(trials) == 4
    for trial in trials:
        shown_there = {a["key"]: a["value"] for a in trial["user_attrs"]}
        assert float(shown_there["margin p90<2.5s"]) == pytest.approx(2.5 - float(shown_there["p90"]))
        assert {"margin accuracy>=70%", "accuracy", "brier", "think_rate"} <= set(shown_there)

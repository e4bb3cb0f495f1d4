"""Policies by name, file, folder and entry; what the store knows of the server behind one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from calib.arms import Arm
from calib.diff import difference
from calib.engine.base import EngineInfo
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.errors import CalibError
from calib.export import export
from calib.policy import Policy, Route, evaluate
from calib.provenance import Provenance
from calib.saved import provenance, save, saved, without_routes
from calib.store import Store, load_outcomes
from tests.appstore import made_up_store

ONE, TWO = Policy(0.7, 0.4, 400, "mtp"), Policy(0.9, 0.6, 400, "base")
VLLM = {"engine": "vllm", "model": "toy", "root": "org/toy", "prompt": "p", "sampling": {"temperature": 0.6}}
START = ("vllm", "serve", "org/toy", "--served-model-name", "toy")


def document(policy: Policy | None, fingerprint: str | None = None, **more) -> dict:
    plain = None if policy is None else policy.to_dict()
    told = {"name": "best", "model": "toy", "verdict": "met", "marks": [], "targets": [], "policy": plain}
    return told | {"fingerprints": {"model": fingerprint}} | more


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = made_up_store(tmp_path / "s.db")
    with Store.open(path) as opened:
        opened.save_policy("best", document(ONE))
        opened.save_policy("none", {"name": "none", "policy": None})
    return path


def test_each_way_to_name_a_policy(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(document(ONE), "serve", note="first")
    export(document(TWO), "serve", note="second")
    found = {name: saved(name, store).document["policy"] for name in ("best", "serve", "serve/policy.json", "serve@1")}
    assert [Policy.from_dict(policy) for policy in found.values()] == [ONE, TWO, TWO, ONE]
    assert saved("serve@1", store).where == "serve@1 (first)"
    (tmp_path / "best").mkdir()
    export(document(TWO), "best")
    assert Policy.from_dict(saved("best", store).document["policy"]) == ONE
    assert Policy.from_dict(saved("./best", store).document["policy"]) == TWO
    assert Policy.from_dict(saved("best", tmp_path / "no.db").document["policy"]) == TWO
    with Store.open(store) as opened:
        assert saved("best", opened) == saved("best", store)
    assert not difference(saved("serve@1", store).document, saved("serve", store).document).same


def test_a_result_without_a_policy_takes_no_policys_place(tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        assert save(store, "best", document(None)) is None  # nothing there: why there is no policy can be looked up
        assert store.policy("best")["policy"] is None
        assert save(store, "best", document(None, targets=[{"target": "p90<1s"}])) is None
        assert save(store, "best", document(ONE)) is None
        said = save(store, "best", document(None))
        assert said is not None
        assert said.startswith("'best' stays as it was tuned on 20")
        assert "UTC without a target: " in said
        save(store, "best", document(TWO, targets=[{"target": "p90<2s"}, {"target": "accuracy>=60%"}]))
        assert " UTC for p90<2s, accuracy>=60%: " in (save(store, "best", document(None)) or "")
        assert store.policy("best")["policy"] == TWO.to_dict()
        assert next(policy.versions for policy in store.policies()) == 4
        assert save(store, "other", document(None)) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bset", r"'bset' is neither .*s\.db holds 'best', 'none'"),
        ("none", "'none' holds no policy"),
        ("serve@9", "no entry 9 in the history; there are: 1"),
        ("serve@1", "that entry holds no policy.json"),
        ("broken.json", "broken.json: not JSON"),
    ],
)
def test_what_goes_by_no_name_says_what_there_is(store, tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "serve.env").write_text("X=1\n")
    export(document(ONE), "serve")
    (tmp_path / "serve" / "history" / "000002.json").unlink()
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CalibError, match=message):
        saved(name, store)


def test_a_path_that_is_not_there_says_nothing_of_the_store(store):
    with pytest.raises(CalibError, match="'./none.json' is neither") as error:
        saved("./none.json", store)
    assert "s.db" not in str(error.value)


# --- the server -------------------------------------------------------------------------------------------------------


def with_model(store: Store, identity: dict) -> str:
    return store.register_model(EngineInfo(str(identity.get("model")), identity))


def run(store: Store, **starts) -> None:
    arms = [Arm(name, ("http://127.0.0.1:8000",), start=start) for name, start in starts.items()]
    store.record_run({"arms": [arm.to_dict() for arm in arms]})


def test_the_start_of_the_policys_arm_is_that_of_the_newest_run_of_its_model(tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        tuned = document(ONE, with_model(store, VLLM))
        assert provenance(store, tuned) == Provenance(VLLM)
        store.record_run({"arms": {"mtp": "http://127.0.0.1:8000"}})  # a server that ran already
        run(store, base=START, mtp=(*START, "--seed", "1"))
        run(store, base=START, mtp=(*START, "--seed", "2"))
        run(store, base=(*START, "--seed", "3"))
        run(store, mtp=("vllm", "serve", "org/other"))  # of another model in the same store
        run(store, mtp=None)
        found = provenance(store, tuned)
        assert found.start == (*START, "--seed", "2")
        assert (found.server, found.root, found.served) == ("vllm", "org/toy", "toy")
        folder = export(tuned, tmp_path / "out", origin=found).folder
        assert 'seed: "2"' in (Path(folder) / "vllm.yaml").read_text()


def test_prompts_have_a_fingerprint_of_their_own(tmp_path):
    one, two = Provenance(VLLM), Provenance(VLLM | {"sampling": {"temperature": 1.0}, "model": "other"})
    assert one.prompt == two.prompt
    assert Provenance(VLLM | {"prompt": "q"}).prompt != one.prompt
    assert Provenance({"imported": "x"}).prompt is None
    with Store.open(tmp_path / "s.db") as store:
        info = asyncio.run(SimulatedEngine(load_profile("gev-validation"), arm="base").info())
        decide = provenance(store, document(ONE, store.register_model(info)))
    assert (decide.server, Provenance({"imported": "x"}).server) == ("decide", None)
    assert set(decide.temperatures) == {"noul", "choice", "score"}
    assert decide.prompt is not None


def test_nothing_that_a_store_holds_of_secrets_is_exported(tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        tuned = document(ONE, with_model(store, VLLM))
        arm = Arm("mtp", ("http://user:secret1@127.0.0.1:8000",), start=START, env={"HF_TOKEN": "$HF_TOKEN"})
        store.record_run(
            {"arms": [arm.to_dict() | {"api_key": "secret2", "start": [*START, "--x", "http://u:secret3@h"]}]}
        )
        export(tuned, tmp_path / "out", origin=provenance(store, tuned))
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or "secret" not in path.read_text()


# --- routes -----------------------------------------------------------------------------------------------------------


def test_the_loss_without_routes_is_that_of_all_questions_under_the_default(store):
    routed = Policy(0.0, 0.9, 400, "mtp", routes={"dataset=set 000": Route(1.1)})
    with Store.open(store) as opened:
        outcomes = load_outcomes(opened)
        lost = without_routes(opened, document(routed, outcomes.fingerprint))
        strange = without_routes(opened, document(routed, "f" * 64))
    assert lost["n"] == outcomes.n == 60
    assert lost["with"]["accuracy"] == evaluate(outcomes, routed).accuracy
    assert lost["without"]["think_rate"] == 0
    assert lost["with"]["think_rate"] == 0.5
    assert lost["with"]["accuracy"] > lost["without"]["accuracy"]
    assert json.dumps(lost)
    assert "unknown" in strange

"""What `diagnose` finds on real HTTP servers: decide, vLLM-like, broken, absent, and against a store."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calib.arms import Arm, arm_of
from calib.collect import collect, mark_replaced
from calib.doctor import diagnose
from calib.engine.decide import DecideEngine
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from calib.store import Store
from tests.misbehaving import MisbehavingServer, questions
from tests.vllm_like import VllmLike

METRICS = """# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="toy"} 2.0
vllm:num_requests_waiting{engine="0",model_name="toy"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="toy"} 400.0
vllm:prefix_cache_hits_total{engine="0",model_name="toy"} 100.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="toy"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="toy"} 400.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="toy"} 250.0
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "s.db") as opened:
        yield opened


@pytest.fixture
def nowhere() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def simulated() -> Iterator[str]:
    command = [sys.executable, "-m", "calib", "serve", "--engine", "simulated", "--profile", "gev-validation"]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        yield next(word for word in line.split() if word.startswith("http://"))
        process.terminate()


async def filled(store: Store, server: MisbehavingServer, *arms: str) -> None:
    engine = DecideEngine(server.url)
    try:
        await collect(questions(4), dict.fromkeys(arms, engine), store, budgets=(64,))
    finally:
        await engine.close()


# --- one server -------------------------------------------------------------------------------------------------------


async def test_the_embedded_server(simulated: str, store: Store) -> None:
    found = await diagnose([arm_of("base", simulated)], store)
    (server,) = found.servers
    assert found.ok
    assert (server.answers, server.engine, server.protocol) == (True, "decide", "jev27-bare-v1")
    assert (server.threshold, server.mix, server.think_budget) == (0.8, 0.5, None)
    assert server.simulated
    assert server.seconds is not None
    assert 0 < server.seconds < 10
    assert server.stored is None  # the store is empty
    assert (server.running, server.acceptance_length) == (None, None)
    assert any("simulated: no real model answers" in note for note in found.notes)
    engine = DecideEngine(simulated)
    assert server.fingerprint == store.register_model(await engine.info())
    await engine.close()


async def test_a_vllm_server_with_its_counters(store: Store) -> None:
    async with VllmLike() as server:
        server.metrics = METRICS
        found = await diagnose([arm_of("mtp", server.url)])
        (report,) = found.servers
        assert found.problems == ()
        assert (report.engine, report.model, report.version, report.context) == ("vllm", "toy", "0.32.0", 600)
        assert (report.threshold, report.mix) == (None, None)
        assert (report.running, report.waiting) == (2, 1)
        assert report.acceptance_length == pytest.approx(3.5)  # 1 + 250 / 100
        assert report.acceptance_length_max == pytest.approx(5)
        assert report.acceptance_share == pytest.approx(0.625)
        assert report.prefix_hit_rate == pytest.approx(0.25)
        assert any("at work (2 running, 1 waiting)" in note for note in found.notes)
        engine = VllmEngine(server.url)
        assert report.fingerprint == store.register_model(await engine.info())
        await engine.close()


async def test_what_vllm_finds_odd_is_noted_and_sampling_is_part_of_the_model() -> None:
    async with VllmLike() as server:
        server.processed = False
        one = await diagnose([Arm("base", (server.url,), engine="vllm")])
        two = await diagnose([Arm("base", (server.url,), engine="vllm")], vllm={"sampling": {"temperature": 0.5}})
    assert one.servers[0].fingerprint != two.servers[0].fingerprint
    assert [f"arm 'base': {note}" for note in one.servers[0].notes] == [n for n in one.notes if n.startswith("arm")]
    assert one.servers[0].acceptance_length is None


async def test_a_dead_server_is_a_finding(nowhere: str) -> None:
    found = await diagnose([arm_of("base", nowhere)])
    (server,) = found.servers
    assert not server.answers
    assert server.seconds is None
    assert not found.ok
    (problem,) = found.problems
    assert problem.startswith(f"arm 'base': {nowhere} does not answer: start it, or mend its address (")


async def test_a_server_that_calib_starts_may_be_off(nowhere: str) -> None:
    found = await diagnose([Arm("base", (nowhere,), start=("bash", "serve.sh"))])
    assert found.ok
    assert found.notes == (f"arm 'base': {nowhere} does not run; calib collect starts it",)


async def test_an_unknown_server_lists_what_was_tried() -> None:
    async with VllmLike() as server:
        server.models = []
        found = await diagnose([arm_of("base", server.url)])
    assert found.servers[0].answers
    (problem,) = found.problems
    assert "cannot be asked (" in problem
    assert "GET /v1/models: no model" in problem


async def test_an_engine_that_is_named_is_not_probed() -> None:
    async with VllmLike() as server:
        found = await diagnose([Arm("base", (server.url,), engine="decide")])
        assert "has no decide route" in str(found.servers[0].problem)
    async with MisbehavingServer() as server:
        found = await diagnose([Arm("base", (server.url,), engine="vllm")])
        assert "cannot be asked as a vLLM server" in str(found.servers[0].problem)


async def test_another_protocol_is_a_finding() -> None:
    async with MisbehavingServer(protocol="other-v2") as server:
        (report,) = (await diagnose([Arm("base", (server.url,), engine="decide")])).servers
    assert "protocol is 'other-v2'" in str(report.problem)


async def test_a_key_that_is_not_set_is_a_finding(simulated: str) -> None:
    found = await diagnose([arm_of("base", simulated, api_key_env="NO_SUCH_VARIABLE")])
    assert "NO_SUCH_VARIABLE holds no API key" in found.problems[0]


async def test_no_login_shows(nowhere: str) -> None:
    found = await diagnose([arm_of("base", nowhere.replace("http://", "http://me:hunter2@"))])
    assert found.servers[0].url == nowhere
    assert "hunter2" not in json.dumps(found.to_dict())


async def test_no_arm_is_an_error() -> None:
    with pytest.raises(CalibError, match="no arm to look at"):
        await diagnose([])


# --- against each other and the store ---------------------------------------------------------------------------------


async def test_arms_of_different_models_are_a_problem() -> None:
    async with MisbehavingServer() as one, MisbehavingServer(model="other") as other:
        found = await diagnose([arm_of("base", one.url), arm_of("mtp", other.url)])
        (problem,) = found.problems
        assert "arm 'base' at" in problem
        assert "serve different models (model: 'tiny' and 'other')" in problem
        same = await diagnose([arm_of("base", f"{one.url},{other.url}")])
        assert len(same.servers) == 2
        assert len(same.problems) == 1


async def test_the_model_of_the_store(store: Store) -> None:
    async with MisbehavingServer() as server:
        await filled(store, server, "base", "old")
        found = await diagnose([arm_of("base", server.url), arm_of("mtp", server.url)], store)
    assert found.ok
    assert [server.stored for server in found.servers] == [True, True]
    (model,) = found.models
    assert (model.name, model.arms) == ("tiny", ("base", "old"))
    assert model.fingerprint == found.servers[0].fingerprint
    assert "the store has no answers of arm 'mtp' yet" in found.notes
    assert "the store has answers of arm 'old', which is not asked here" in found.notes
    assert any("one server answers at" in note and "arm 'base' and arm 'mtp'" in note for note in found.notes)


async def test_the_audits_of_the_named_arms_are_repeated(store: Store, nowhere: str) -> None:
    async with MisbehavingServer() as server:
        await filled(store, server, "base", "old")
        (model,) = store.models()
        mark_replaced(store, model.fingerprint, "old", questions(2))
        found = await diagnose([arm_of("base", server.url)], store)
        assert {finding.arm for finding in found.audits} == {None, "base"}
        assert {"budget", "cut", "repeatability", "label mass", "option order"} <= {f.audit for f in found.audits}
        both = await diagnose([arm_of("base", server.url), arm_of("old", server.url)], store)
        assert both.audits[0].audit == "same server"  # the worst first
        assert both.to_dict()["audits"][0]["arm"] == "old"
        server.info["model"] = "other"
        assert (await diagnose([arm_of("base", server.url)], store)).audits == ()  # they are another model's
    off = await diagnose([arm_of("old", nowhere)], store)  # who it is cannot be asked: what the store says of the arm
    assert off.audits[0].audit == "same server"
    assert (await diagnose([arm_of("base", nowhere)])).audits == ()


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"model": "other"}, False), ({"temperatures": {"noul": 1.2, "choice": 1.1, "score": 1.0}}, True)],
)
async def test_another_model_than_the_stores(store: Store, changed: dict[str, Any], why: bool) -> None:
    async with MisbehavingServer() as server:
        await filled(store, server, "base")
        server.info |= changed
        found = await diagnose([arm_of("base", server.url)], store)
    assert found.servers[0].stored is False
    (problem,) = found.problems
    name = changed.get("model", "tiny")
    assert problem.startswith(f"arm 'base': the server is {name} (")
    assert f"{store.location} holds tiny (" in problem
    assert ("The name is the same" in problem) is why


async def test_the_servers_own_knobs_are_no_other_model(store: Store) -> None:
    async with MisbehavingServer() as server:
        await filled(store, server, "base")
        server.info["defaults"] |= {"threshold": 0.6, "mix": 0.3, "think_budget": 512}
        found = await diagnose([arm_of("base", server.url)], store)
    (report,) = found.servers
    assert report.stored
    assert (report.threshold, report.mix, report.think_budget) == (0.6, 0.3, 512)


async def test_a_model_that_was_only_registered_is_none_of_the_stores(store: Store) -> None:
    async with MisbehavingServer() as server:
        engine = DecideEngine(server.url)
        store.register_model(await engine.info())
        await engine.close()
        found = await diagnose([arm_of("base", server.url)], store)
    assert found.models == ()
    assert found.servers[0].stored is None


async def test_a_diagnosis_is_json(store: Store) -> None:
    async with MisbehavingServer() as server:
        await filled(store, server, "base")
        found = await diagnose([arm_of("base", server.url)], store)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["ok"] is True
    assert plain["store"] == store.location
    assert plain["servers"][0]["model"] == "tiny"
    assert plain["models"][0]["arms"] == ["base"]

"""What `check` tells of real HTTP servers: a gateway, a reference server, a stock vLLM; and of knobs none tells."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from calib.engine.base import EngineInfo
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError
from calib.live import Live, LiveKnob, check
from calib.policy import Policy, Route
from calib.provenance import Provenance
from calib.serve import open_app, serving
from tests.misbehaving import MIX, MisbehavingServer
from tests.scripted import ScriptedEngine
from tests.vllm_like import VllmLike

POLICY = Policy(0.71, 0.42, 2048, "mtp")
SCRIPTED = {"model": "scripted"}


def document(policy: Policy = POLICY, identity: dict | None = None) -> dict:
    fingerprint = EngineInfo("m", SCRIPTED if identity is None else identity).fingerprint
    return {"name": "best", "model": "m", "policy": policy.to_dict(), "fingerprints": {"model": fingerprint}}


@asynccontextmanager
async def gateway(policy: Policy | None):
    async with serving(await open_app(ScriptedEngine(simulated=False), policy=policy)) as url:
        yield url


def states(found: Live) -> dict[str, bool | None]:
    return {knob.knob: knob.live for knob in found.knobs}


def row(found: Live, name: str) -> LiveKnob:
    return next(knob for knob in found.knobs if knob.knob == name)


# --- a gateway --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        replace(POLICY, confidence="entropy", pool="log_odds", temperatures={"p1": {"*": 2.0}, "cut": {"*": 3.0}}),
        replace(POLICY, routes={"kind=noul": Route(0.3), "dataset=a": Route(None, 512)}, deadline=2.5),
    ],
)
async def test_a_gateway_under_the_policy_holds_every_knob(policy):
    async with gateway(policy) as url:
        found = await check(url, document(policy))
    assert (found.what, found.live, found.running.model) == ("gateway", True, "scripted")
    assert {"model", "threshold", "mix", "think_budget", "arm"} <= states(found).keys()
    assert all(knob.how == "" for knob in found.knobs)
    assert ("deadline" in states(found)) == (policy.deadline is not None)
    assert found.version.startswith("calib ")


@pytest.mark.parametrize(
    ("changed", "knobs"),
    [
        ({"threshold": 0.7100001}, {"threshold"}),
        ({"mix": 0.0, "arm": "base"}, {"mix", "arm"}),
        ({"routes": {"kind=noul": Route(0.3)}}, {"routes"}),
        ({"deadline": 2.0}, {"deadline"}),
        ({"confidence": "margin", "pool": "log_odds"}, {"confidence", "pool"}),
        ({"temperatures": {"final": {"*": 2.0}}}, {"temperatures"}),
    ],
)
async def test_what_differs_is_not_live_in_either_direction(changed, knobs):
    other = replace(POLICY, **changed)
    for there, wanted in ((POLICY, other), (other, POLICY)):
        async with gateway(there) as url:
            found = await check(url, document(wanted))
        assert found.live is False
        assert {name for name, live in states(found).items() if live is False} == knobs
        assert "calib serve" in row(found, next(iter(knobs))).how


async def test_a_gateway_without_a_policy_and_one_of_another_model_are_not_live():
    async with gateway(None) as url:
        bare = await check(url, document())
        other = await check(url, document(identity={"model": "another"}), origin=Provenance({"model": "another"}))
    assert (bare.what, bare.live) == ("decide", False)
    assert row(bare, "threshold").there == "0.8"
    assert states(bare)["model"] is True
    assert states(other)["model"] is False
    assert any("model: 'scripted', collected with 'another'" in note for note in other.notes)


async def test_imported_outcomes_do_not_tell_whose_they_are():
    async with gateway(POLICY) as url:
        found = await check(url, document(identity={"imported": "m"}), origin=Provenance({"imported": "m"}))
    assert (states(found)["model"], found.live) == (None, None)
    assert "imported" in row(found, "model").how


# --- the reference server ---------------------------------------------------------------------------------------------


def decide_identity(**changed) -> dict:
    names = {"model": "tiny", "protocol": "jev27-bare-v1", "model_type": "test", "max_options": 256}
    more = {"native_choice_options": 16, "temperatures": {"noul": 1.0, "choice": 1.0, "score": 1.0}}
    return names | more | {"strategy": "single"} | changed


async def test_a_reference_server_tells_its_defaults():
    policy = Policy(0.8, MIX, 2048, "base")
    origin = Provenance(decide_identity())
    async with MisbehavingServer() as server:
        found = await check(server.url, document(policy, decide_identity()), origin=origin)
        by_clients = await check(
            server.url, document(policy, decide_identity()), origin=origin, held_by="client", arm="base"
        )
        other = await check(
            server.url, document(replace(policy, threshold=0.0), decide_identity()), origin=origin, arm="mtp"
        )
    assert found.what == "decide"
    assert states(found) == {
        "model": True,
        "threshold": True,
        "mix": True,
        "thinking": True,
        "think_budget": False,
        "arm": None,  # it has no /metrics
    }
    assert row(found, "think_budget").there == "no limit"
    assert (states(by_clients)["think_budget"], by_clients.live) == (None, None)
    assert states(other)["arm"] is states(other)["threshold"] is states(other)["thinking"] is False
    assert (row(other, "thinking").wanted, row(other, "thinking").there) == ("off", "auto")


async def test_temperatures_at_the_reference_server_are_its_own_times_the_policys():
    policy = Policy(0.8, MIX, 2048, "base", temperatures={"p1": {"*": 1.5}})
    before, after = decide_identity(), {"noul": 1.5, "choice": 1.5, "score": 1.5}
    origin = Provenance(before)
    async with MisbehavingServer() as server:
        asked = {"origin": origin, "held_by": "client", "arm": "base"}
        plain = await check(server.url, document(policy, before), **asked)
        server.info["temperatures"] = after
        applied = await check(server.url, document(policy, before), **asked)
        server.info["temperatures"] = dict.fromkeys(after, 1.4)
        wrong = await check(server.url, document(policy, before), **asked)
    assert (states(plain)["temperatures"], states(applied)["temperatures"]) == (False, True)
    assert (states(applied)["model"], applied.notes) == (True, ())  # the same model, with the file that was exported
    assert (states(wrong)["temperatures"], states(wrong)["model"]) == (False, False)


async def test_what_only_a_gateway_holds_is_not_live_at_the_server():
    policy = Policy(0.8, MIX, 2048, "base", deadline=3.0, routes={"kind=noul": Route(0.1)})
    async with MisbehavingServer() as server:
        found = await check(server.url, document(policy, decide_identity()))
    assert states(found)["deadline"] is states(found)["routes"] is False
    assert "calib serve" in row(found, "deadline").how


# --- a stock vLLM -----------------------------------------------------------------------------------------------------

CACHE = 'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{}",engine="0"}} 1.0\n'
SPECULATION = 'vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'


async def test_a_stock_vllm_tells_how_it_reads_and_holds_no_policy():
    start = ("vllm", "serve", "/models/toy", "--served-model-name", "toy", "--speculative-config", "{}")
    async with VllmLike() as server:
        engine = VllmEngine(server.url)
        info = await engine.info()
        await engine.close()
        origin = Provenance(info.identity, start)
        tuned = document(POLICY, dict(info.identity))
        server.metrics = CACHE.format("True") + SPECULATION
        found = await check(server.url, tuned, origin=origin)
        server.metrics = CACHE.format("False") + 'vllm:num_requests_running{engine="0"} 0.0\n'
        server.processed, server.max_logprobs = False, 20
        poor = await check(server.url, tuned, origin=origin)
        cold = await check(server.url, tuned, origin=origin, vllm={"sampling": {"temperature": 0.1}})
    assert (found.what, found.version, found.live) == ("vllm", "0.32.0", False)
    held_by_gateway = {"threshold": False, "mix": False, "think_budget": False}
    served = ("model", "logprobs-mode", "max-logprobs", "enable-prefix-caching", "arm")
    assert states(found) == held_by_gateway | dict.fromkeys(served, True)
    assert states(poor) == held_by_gateway | dict.fromkeys(served[1:], False) | {"model": True}
    assert (row(poor, "logprobs-mode").there, row(poor, "max-logprobs").there) == ("raw_logprobs", "20")
    assert row(poor, "arm").there == "does not speculate"
    assert states(cold)["model"] is False
    assert any("sampling" in note for note in cold.notes)


async def test_nothing_there_is_an_error_with_what_was_tried(unused_port):
    with pytest.raises(CalibError, match="gives no answer"):
        await check(f"http://127.0.0.1:{unused_port}", document())


@pytest.fixture
def unused_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]

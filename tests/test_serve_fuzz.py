"""The gateway's OpenAPI description, fuzzed: what it says holds, and nothing that a client can send is a 5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from calib.declog import DecisionLog
from calib.engine.simulated import SimulatedEngine, load_profile
from calib.policy import Policy, Route
from calib.serve import ServerThread, open_app

KEY = "s3cret"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
GETS = ("/v1/decide/info", "/v1/models", "/metrics", "/health", "/ready")
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The description of a gateway with all that it can have: policy, routes, deadline, key and log."""
    policy = Policy(0.8, 0.5, 512, deadline=5.0, routes={"dataset=d": Route(1.1)})
    log = tmp_path_factory.mktemp("fuzz") / "d.jsonl"

    async def app():
        engine = SimulatedEngine(load_profile("gev-validation"))
        return await open_app(engine, policy=policy, key=KEY, decision_log=DecisionLog(log), max_body=100_000)

    with ServerThread(app) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json", headers=AUTHORIZED)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_question_is_a_server_error(described, mode):
    fuzz(described["/v1/decide"]["POST"], mode, examples=150)


@pytest.mark.parametrize("path", GETS)
def test_what_is_shown_is_as_described(described, path):
    fuzz(described[path]["GET"], GenerationMode.POSITIVE, examples=5)


def fuzz(operation, mode, examples):
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(operation.as_strategy(generation_mode=mode))
    def validate(case):
        case.call_and_validate(checks=CHECKS, headers=AUTHORIZED)

    validate()


def test_the_description_names_every_route(described):
    assert {(o.path, o.method) for o in (r.ok() for r in described.get_all_operations())} == {
        ("/v1/decide", "post"),
        *((path, "get") for path in GETS),
    }

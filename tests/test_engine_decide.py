"""The decide engine and its HTTP client against a real server that goes wrong on order."""

from __future__ import annotations

import base64
import math
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from email.utils import formatdate

import numpy as np
import pytest

from calib.engine.base import AskFailed, PartlyFailed
from calib.engine.decide import DecideEngine
from calib.engine.http import HttpClient
from calib.errors import CalibError
from tests.misbehaving import (
    BUDGET,
    MIX,
    MisbehavingServer,
    cut_body,
    cut_json,
    edit,
    everywhere,
    questions,
    read,
    reset,
    slow,
    status,
    text,
    think_seconds,
    thought,
    truth,
)

(QUESTION,) = questions(1)
P1, P2, LENGTH = truth(QUESTION.question, 4)


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


class Waits(list[float]):
    """Stands in for sleeping; keeps what was asked for."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
async def engine(server: MisbehavingServer, waits: Waits) -> AsyncIterator[DecideEngine]:
    client = HttpClient(server.url, timeout=5, retries=3, rng=random.Random(7), sleep=waits)
    engine = DecideEngine(server.url, client=client)
    yield engine
    await engine.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# --- good answers -----------------------------------------------------------------------------------------------------


async def test_one_request_gives_both_systems(server: MisbehavingServer, engine: DecideEngine) -> None:
    server.delay = 0.05
    answer = await engine.ask(QUESTION, np.array([4096]), keep_text=True)
    assert answer.p1 == pytest.approx(P1)
    assert answer.p2 == pytest.approx(P2[None])
    assert answer.budgets == (4096,)
    assert answer.tokens.tolist() == [LENGTH]
    assert answer.finished.tolist() == [True]
    seconds = think_seconds(QUESTION.question, 4, LENGTH, 0.05)
    assert answer.t2.tolist() == [seconds]  # the server's own
    assert 0.0495 - seconds < answer.t1 < 0.5  # wall time, at least 0.05 s, less System 2's
    assert answer.text == thought(LENGTH)
    assert server.asked == [
        {
            "kind": "choice",
            "state": "state 0",
            "question": QUESTION.question,
            "options": list(QUESTION.options),
            "thinking": "on",
            "think_budget": 4096,
            "debug": True,
            "return_reasoning": True,
        }
    ]


async def test_without_budgets_nothing_thinks(server: MisbehavingServer, engine: DecideEngine) -> None:
    answer = await engine.ask(QUESTION, ())
    assert answer.p1 == pytest.approx(P1)
    assert answer.p2.shape == (0, 4)
    assert answer.budgets == ()
    assert [body["thinking"] for body in server.asked] == ["off"]


async def test_system1_alone_may_be_left_out(server: MisbehavingServer, engine: DecideEngine) -> None:
    answer = await engine.ask(QUESTION, (4096,), system1=False)
    assert answer.p1 is None
    assert math.isnan(answer.t1)
    assert answer.p2 == pytest.approx(P2[None])
    assert server.asked[0]["system2_only"] is True


async def test_smaller_budgets_cut_the_same_thought_and_larger_ones_cost_nothing(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    ladder = (LENGTH + 500, LENGTH, LENGTH - 1, 50, LENGTH + 9000)
    answer = await engine.ask(QUESTION, ladder)
    assert answer.budgets == (50, LENGTH - 1, LENGTH, LENGTH + 500, LENGTH + 9000)
    assert answer.tokens.tolist() == [50, LENGTH - 1, LENGTH, LENGTH, LENGTH]
    assert answer.finished.tolist() == [False, False, True, True, True]
    expected = [read(QUESTION.question, 4, budget)[0] for budget in answer.budgets]
    assert answer.p2 == pytest.approx(np.array(expected))
    asked = [(body["think_budget"], body.get("system2_only", False)) for body in server.asked]
    assert asked == [(LENGTH + 9000, False), (LENGTH - 1, True), (50, True)]
    assert answer.text is None  # it was asked for to compare the thoughts
    assert engine.remarks() == []


async def test_a_shorter_thought_that_is_no_beginning_of_the_whole_one_is_told(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    def other(answer: dict) -> None:
        if answer["thinking"]["budget"] == 50:
            answer["thinking"]["reasoning"] = thought(20) + " and then something else" + thought(20)

    server.always = [edit(other)]
    answer = await engine.ask(QUESTION, (50, LENGTH - 1, 4096))
    assert answer.budgets == (50, LENGTH - 1, 4096)  # good answers, of other thoughts
    (remark,) = engine.remarks()
    assert remark.startswith("1 of 2 thoughts at a smaller budget are not the beginning")
    server.always = [edit(lambda answer: answer["thinking"].pop("reasoning", None))]
    await engine.ask(QUESTION, (50, 4096))  # a server that keeps the text to itself
    assert engine.remarks() == [remark]


async def test_a_thought_that_met_the_end_of_the_context_needs_no_second_request(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    server.always = [edit(lambda a: a["thinking"].update(finished_within_budget=False, think_tokens=700))]
    answer = await engine.ask(QUESTION, (800, 9000))
    assert answer.tokens.tolist() == [700, 700]
    assert answer.finished.tolist() == [False, False]
    assert len(server.asked) == 1


@pytest.mark.parametrize("kind", ["noul", "score"])
async def test_kinds_with_fixed_options(server: MisbehavingServer, engine: DecideEngine, kind: str) -> None:
    (question,) = questions(1, kind=kind)
    answer = await engine.ask(question, (BUDGET,))
    assert answer.p1 == pytest.approx(truth(question.question, len(question.options))[0])
    assert answer.budgets == (() if kind == "score" else (BUDGET,))  # a level cannot be thought about
    assert "options" not in server.asked[0]


async def test_levels_that_the_server_does_not_have_are_refused_unasked(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    (question,) = questions(1, kind="score")
    with pytest.raises(AskFailed, match="give it the kind choice") as failed:
        await engine.ask(replace(question, options=("low", "high")), ())
    assert failed.value.reason == "refused"
    assert not server.asked


async def test_a_simulated_server_tells_its_own_seconds() -> None:
    def told(answer: dict) -> None:
        answer["elapsed_seconds"] = 7.25
        answer["thinking"]["think_seconds"] = 7.0

    async with MisbehavingServer(simulated=True) as server:
        engine = DecideEngine(server.url)
        server.always = [edit(told)]
        answer = await engine.ask(QUESTION, (BUDGET,))
        assert (answer.t1, answer.t2.tolist()) == (0.25, [7.0])
        assert (await engine.info()).simulated
        await engine.close()


async def test_a_sum_within_one_percent_is_renormalised(server: MisbehavingServer, engine: DecideEngine) -> None:
    server.always = [edit(lambda a: a.update(probabilities=[0.5, 0.25, 0.125, 0.13]))]
    answer = await engine.ask(QUESTION, ())
    assert answer.p1 == pytest.approx(np.array([0.5, 0.25, 0.125, 0.13]) / 1.005)


# --- bad answers ------------------------------------------------------------------------------------------------------


def _swap(values: list[float]) -> None:
    values[0], values[1] = values[1], values[0]


def _set(index: int, value: object):
    return lambda values: values.__setitem__(index, value)


BAD = {
    "nan": everywhere(_set(0, math.nan)),
    "nan: infinite": everywhere(_set(0, math.inf)),
    "nan: null": everywhere(_set(0, None)),
    "nan: text": everywhere(_set(0, "0.5")),
    "nan: true": everywhere(_set(0, True)),
    "nan: an integer that no float holds": everywhere(_set(0, 10**400)),
    "wrong_length": everywhere(lambda values: values.append(0.0)),
    "wrong_length: short": everywhere(lambda values: values.pop()),
    "sum_off": everywhere(lambda values: values.__setitem__(0, values[0] + 0.02)),
    "negative": everywhere(lambda values: values.__setitem__(slice(0, 2), [values[0] + values[1] + 0.1, -0.1])),
    "wrong_options": edit(lambda a: a["options"].reverse()),
    "wrong_options: other": edit(lambda a: a["options"].__setitem__(0, "else")),
    "missing_field: options": edit(lambda a: a.pop("options")),
    "missing_field: probabilities": edit(lambda a: a.pop("probabilities")),
    "missing_field: a list": text("[]"),
}
BAD_THOUGHT = {
    "budget_exceeded": edit(lambda a: a["thinking"].update(think_tokens=BUDGET + 1)),
    "missing_field: thinking": edit(lambda a: a.pop("thinking")),
    "missing_field: system1": edit(lambda a: a["thinking"].pop("system1")),
    "missing_field: system2": edit(lambda a: a["thinking"].pop("system2")),
    "missing_field: think_tokens": edit(lambda a: a["thinking"].pop("think_tokens")),
    "missing_field: think_tokens as text": edit(lambda a: a["thinking"].update(think_tokens="12")),
    "missing_field: finished": edit(lambda a: a["thinking"].pop("finished_within_budget")),
    "missing_field: think_seconds": edit(lambda a: a["thinking"].pop("think_seconds")),
    "bad_seconds": edit(lambda a: a["thinking"].update(think_seconds=-1.0)),
    "bad_seconds: NaN": edit(lambda a: a["thinking"].update(think_seconds=math.nan)),
    "bad_seconds: longer than the whole": edit(lambda a: a["thinking"].update(think_seconds=3600.0)),
    "ignored_thinking": edit(lambda a: a["thinking"].update(used=False)),
    "closed_by_deadline": edit(lambda a: a["thinking"].update(closed_by_deadline=True)),
    "degraded": edit(lambda a: a.update(degraded=True, degraded_reason="timeout")),
    "mix_mismatch": edit(lambda a: _swap(a["probabilities"])),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_answer_of_system1_is_a_failure(server: MisbehavingServer, engine: DecideEngine, case: str) -> None:
    server.faults[QUESTION.question] = [BAD[case]]
    with pytest.raises(AskFailed) as failed:
        await engine.ask(QUESTION, ())
    assert (failed.value.reason, failed.value.stage) == (case.partition(":")[0], "system1")
    assert (await engine.ask(QUESTION, ())).p1 == pytest.approx(P1)


@pytest.mark.parametrize("case", BAD | BAD_THOUGHT)
async def test_a_bad_answer_of_both_is_a_failure(server: MisbehavingServer, engine: DecideEngine, case: str) -> None:
    server.faults[QUESTION.question] = [(BAD | BAD_THOUGHT)[case]]
    with pytest.raises(AskFailed) as failed:
        await engine.ask(QUESTION, (BUDGET,))
    assert failed.value.reason == case.partition(":")[0]
    assert failed.value.attempts == 1  # asking again would get the same
    assert 0 < failed.value.seconds < 5
    assert len(server.asked) == 1


async def test_a_server_that_thinks_unasked_does_not_pass_its_mix_off_as_system1(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    server.always = [edit(lambda a: a.update(thinking={"used": True}))]
    with pytest.raises(AskFailed, match="ignored_thinking"):
        await engine.ask(QUESTION, ())
    server.always = [edit(lambda a: a.update(thinking={"used": False}))]  # thought about it, and left it
    assert (await engine.ask(QUESTION, ())).p1 == pytest.approx(P1)


async def test_a_server_that_ignores_system2_only_does_not_pass_its_mix_off_as_system2(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    server.always = [edit(lambda a: a.pop("system"))]
    with pytest.raises(AskFailed, match="system: 2"):
        await engine.ask(QUESTION, (BUDGET,), system1=False)


async def test_the_mix_is_not_checked_under_a_policy_that_may_route_it() -> None:
    async with MisbehavingServer(policy={"mix": MIX, "routes": {"small": {"mix": 1.0}}}) as server:
        engine = DecideEngine(server.url)
        server.always = [edit(lambda a: a.update(probabilities=a["thinking"]["system2"]))]
        assert (await engine.ask(QUESTION, (9000,))).p2 == pytest.approx(P2[None])
        await engine.close()


async def test_what_was_good_survives_the_failure_of_a_smaller_budget(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    good = edit(lambda a: None)
    server.faults[QUESTION.question] = [good, edit(lambda a: a["thinking"].update(think_tokens=61)), good]
    with pytest.raises(PartlyFailed) as failed:
        await engine.ask(QUESTION, (30, 60, 9000))
    assert (failed.value.reason, failed.value.stage) == ("budget_exceeded", "system2")
    partial = failed.value.partial
    assert partial.p1 == pytest.approx(P1)
    assert partial.budgets == (30, 9000)
    assert partial.p2[1] == pytest.approx(P2)


async def test_a_smaller_budget_must_cut_the_same_thought(server: MisbehavingServer, engine: DecideEngine) -> None:
    ended = edit(lambda a: a["thinking"].update(think_tokens=40, finished_within_budget=True))
    server.faults[QUESTION.question] = [edit(lambda a: None), ended]
    with pytest.raises(PartlyFailed, match="two different thoughts") as failed:
        await engine.ask(QUESTION, (60, 9000))
    assert failed.value.reason == "other_thought"
    assert failed.value.partial.budgets == (9000,)


# --- attempts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [status(500), status(502), status(503), status(504), status(429), reset, cut_body, cut_json]
)
async def test_passing_faults_are_retried(
    server: MisbehavingServer, engine: DecideEngine, waits: Waits, fault: object
) -> None:
    server.faults[QUESTION.question] = [fault, fault]
    answer = await engine.ask(QUESTION, (BUDGET,))
    assert answer.p1 == pytest.approx(P1)
    assert len(server.asked) == 3
    draw = random.Random(7)
    assert waits == [draw.uniform(0, 0.5), draw.uniform(0, 1.0)]  # full jitter, and the range doubles


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(500), "http_500"),
        (status(429), "http_429"),
        (reset, "connection"),
        (cut_body, "bad_json"),
        (cut_json, "bad_json"),
    ],
)
async def test_lasting_faults_end_as_a_failure_with_their_reason(
    server: MisbehavingServer, engine: DecideEngine, waits: Waits, fault: object, reason: str
) -> None:
    server.always = [fault]
    with pytest.raises(AskFailed) as failed:
        await engine.ask(QUESTION, (BUDGET,))
    assert (failed.value.reason, failed.value.attempts) == (reason, 4)
    assert len(waits) == 3


@pytest.mark.parametrize(("code", "reason"), [(400, "refused"), (422, "refused"), (404, "http_404"), (302, "http_302")])
async def test_what_the_server_refuses_is_not_asked_again(
    server: MisbehavingServer, engine: DecideEngine, code: int, reason: str
) -> None:
    server.always = [status(code, "the question\nis too long " + "x" * 500)]
    with pytest.raises(AskFailed) as failed:
        await engine.ask(QUESTION, (BUDGET,))
    assert (failed.value.reason, failed.value.attempts) == (reason, 1)
    assert "the question is too long xxx" in failed.value.detail
    assert len(failed.value.detail) < 450


async def test_the_backoff_is_bounded(server: MisbehavingServer, waits: Waits) -> None:
    class Most(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    server.always = [status(503)]
    client = HttpClient(server.url, retries=8, rng=Most(), sleep=waits)
    with pytest.raises(AskFailed):
        await client.post("/v1/decide", {"question": "?", "kind": "noul", "thinking": "off"})
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
    await client.close()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("1.5", 1.5),
        ("0", 0.0),
        (formatdate(1_700_000_012, usegmt=True), 12.0),
        (formatdate(1_600_000_000, usegmt=True), 0.0),  # a date in the past
        ("86400", 300.0),  # nobody waits a day
        ("soon", 0.0),
        ("inf", 0.0),
    ],
)
async def test_retry_after_is_waited_for(server: MisbehavingServer, waits: Waits, header: str, seconds: float) -> None:
    server.always = [status(429, Retry_After=header)]
    client = HttpClient(server.url, retries=1, rng=random.Random(3), sleep=waits, now=lambda: 1_700_000_000.0)
    with pytest.raises(AskFailed):
        await client.post("/v1/decide", {"question": "?", "kind": "noul", "thinking": "off"})
    assert waits == [pytest.approx(seconds + random.Random(3).uniform(0, 0.5))]
    await client.close()


async def test_latency_counts_from_the_first_attempt(server: MisbehavingServer) -> None:
    engine = DecideEngine(server.url, retries=2)
    server.faults[QUESTION.question] = [status(429, Retry_After="0.3")]
    answer = await engine.ask(QUESTION, (BUDGET,))
    assert answer.t1 >= 0.3
    await engine.close()


async def test_a_timeout_is_censored_at_its_limit_or_above(server: MisbehavingServer) -> None:
    server.always = [slow(30)]
    engine = DecideEngine(server.url, timeout=0.2, retries=1)
    with pytest.raises(AskFailed) as failed:
        await engine.ask(QUESTION, (BUDGET,))
    assert (failed.value.reason, failed.value.attempts) == ("timeout", 2)
    assert failed.value.seconds >= 0.4
    await engine.close()


async def test_a_latency_spike_is_a_latency(server: MisbehavingServer, engine: DecideEngine) -> None:
    server.faults[QUESTION.question] = [slow(0.3)]
    assert (await engine.ask(QUESTION, (BUDGET,))).t1 >= 0.3


# --- who answers ------------------------------------------------------------------------------------------------------


async def test_the_identity_holds_what_changes_answers_and_not_what_calib_writes_back(
    server: MisbehavingServer, engine: DecideEngine
) -> None:
    before = await engine.info()
    assert (before.model, before.threshold, before.mix, before.simulated) == ("tiny", 0.8, MIX, False)
    assert before.identity["temperatures"] == {"noul": 1.0, "choice": 1.0, "score": 1.0}
    assert before.raw == server.info
    defaults = server.info["defaults"]
    defaults.update(threshold=0.3, mix=0.9, think_budget=512, thinking="off")
    server.info.update(policy={"threshold": 0.3}, arm="mtp", uptime=12)
    after = await engine.info()
    assert after.identity == before.identity
    assert (after.threshold, after.mix) == (0.3, 0.9)
    for change in ({"model": "other"}, {"temperatures": {"noul": 2.0}}, {"seed": 1}, {"profile": "x"}):
        server.info |= change
        changed = await engine.info()
        assert changed.identity != after.identity
        after = changed
    defaults["strategy"] = "permute"
    assert (await engine.info()).identity != after.identity


async def test_the_answers_mean_nothing_under_another_protocol(server: MisbehavingServer, engine: DecideEngine) -> None:
    server.info["protocol"] = "jev99"
    with pytest.raises(CalibError, match=r"protocol is 'jev99', expected 'jev27-bare-v1'"):
        await engine.info()
    with pytest.raises(CalibError, match="jev99"):
        await engine.ask(QUESTION, ())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": None}, "model"),
        ({"defaults": None}, "defaults"),
        ({"defaults": {"threshold": 0.8}}, "defaults.mix"),
        ({"defaults": {"threshold": 0.8, "mix": 1.5}}, "defaults.mix should be from 0 to 1, got 1.5"),
        ({"defaults": {"threshold": "high", "mix": 0.5}}, "defaults.threshold"),
    ],
)
async def test_a_description_that_lacks_what_is_needed(
    server: MisbehavingServer, engine: DecideEngine, change: dict, named: str
) -> None:
    server.info |= change
    with pytest.raises(CalibError, match=named):
        await engine.info()


async def test_a_server_without_the_route_is_told_by_what_was_tried(server: MisbehavingServer) -> None:
    engine = DecideEngine(f"{server.url}/elsewhere", retries=0)
    with pytest.raises(CalibError, match=r"no decide route. Tried: GET /v1/decide/info .*404.*GET /v1/models") as error:
        await engine.info()
    assert "calib serve" in str(error.value)
    await engine.close()


async def test_no_server_at_all_names_the_address_and_what_to_do() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    engine = DecideEngine(url, client=HttpClient(url, retries=2, sleep=Waits()))
    with pytest.raises(CalibError, match="3 attempts") as error:
        await engine.info()
    assert error.value.exit_code == 1
    assert f"curl {url}/v1/decide/info" in str(error.value)
    await engine.close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/decide"])
async def test_spellings_of_the_same_address(server: MisbehavingServer, suffix: str) -> None:
    engine = DecideEngine(server.url + suffix)
    assert (await engine.info()).model == "tiny"
    await engine.close()


@pytest.mark.parametrize(
    "address", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://host?key=1", ""]
)
def test_what_is_not_an_address(address: str) -> None:
    with pytest.raises(CalibError, match="expected http://HOST:PORT"):
        DecideEngine(address)


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRET = "hunter2-hunter2"


async def test_the_key_comes_from_the_named_variable_and_shows_nowhere(
    server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_KEY", SECRET + "\n")
    engine = DecideEngine(server.url, api_key_env="SOME_KEY", retries=0)
    await engine.info()
    assert server.headers[-1]["Authorization"] == f"Bearer {SECRET}"
    server.always = [status(400, f"bad token {SECRET}")]
    with pytest.raises(AskFailed) as failed:
        await engine.ask(QUESTION, ())
    server.always = [status(401, f"bad token {SECRET}")]
    with pytest.raises(CalibError, match="refuses the key in SOME_KEY") as refused:
        await engine.ask(QUESTION, ())
    server.always = [status(403, f"{SECRET} may only look")]
    with pytest.raises(CalibError, match="let the key in SOME_KEY ask there") as forbidden:
        await engine.ask(QUESTION, ())
    shown = [repr(engine), repr(engine.client), str(failed.value), failed.value.detail, caplog.text]
    shown += [str(refused.value), str(forbidden.value)]
    assert not any(SECRET in text for text in shown)
    await engine.close()


def test_a_variable_without_a_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "  "):
        monkeypatch.setenv("SOME_KEY", value)
        with pytest.raises(CalibError, match="export SOME_KEY="):
            DecideEngine("http://host", api_key_env="SOME_KEY")


async def test_a_server_that_wants_a_key_says_how_to_give_one(server: MisbehavingServer, engine: DecideEngine) -> None:
    server.always = [status(401)]
    with pytest.raises(CalibError, match="--api-key-env NAME"):
        await engine.ask(QUESTION, ())


async def test_a_server_that_forbids_to_ask_stops_it_all(server: MisbehavingServer, engine: DecideEngine) -> None:
    server.always = [status(403)]
    for budgets in ((), (BUDGET,)):
        with pytest.raises(CalibError, match="forbids to ask it .*--api-key-env NAME") as forbidden:
            await engine.ask(QUESTION, budgets)
        assert forbidden.value.exit_code == 1


async def test_a_password_in_the_address_is_used_and_never_shown(server: MisbehavingServer) -> None:
    url = server.url.replace("http://", f"http://me:{SECRET}@")
    engine = DecideEngine(url, retries=0)
    await engine.info()
    assert server.headers[-1]["Authorization"].startswith("Basic ")
    assert SECRET not in repr(engine)
    await engine.close()
    gone = DecideEngine(f"http://me:{SECRET}@127.0.0.1:{closed_port()}", retries=0)
    with pytest.raises(CalibError, match=r"127\.0\.0\.1") as error:
        await gone.info()
    assert SECRET not in str(error.value)
    await gone.close()


async def test_a_login_that_a_server_echoes_is_not_passed_on(server: MisbehavingServer) -> None:
    engine = DecideEngine(server.url.replace("http://", f"http://me:{SECRET}@"), retries=0)
    encoded = base64.b64encode(f"me:{SECRET}".encode()).decode()
    server.always = [status(400, f"no such login: Basic {encoded}, {SECRET}")]
    with pytest.raises(AskFailed) as failed:
        await engine.ask(QUESTION, ())
    assert "no such login: Basic ***, ***" in failed.value.detail
    await engine.close()


@pytest.mark.parametrize(
    "address",
    [f"me:{SECRET}@host", f"ftp://me:{SECRET}@host", f"http://me:{SECRET}@host:port", f"http://me:{SECRET}@host?x=1"],
)
def test_a_password_in_what_is_not_an_address_is_not_shown_either(address: str) -> None:
    with pytest.raises(CalibError, match="expected") as error:
        DecideEngine(address)
    assert SECRET not in str(error.value)

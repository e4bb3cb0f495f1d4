"""Taking over a changed policy file: whole, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.engine import EngineInfo
from calib.errors import CalibError
from calib.gateway import policy_version
from calib.policy import Policy
from calib.policyfile import POLICY_SCHEMA
from calib.reload import PolicyFile, PolicyWatch, check_model
from calib.serve import open_app, serving
from tests.scripted import ScriptedEngine

CHOICE = {"kind": "choice", "state": "s", "question": "q", "options": ["red", "green", "blue"], "thinking": "auto"}


def content(policy: Policy, **more) -> str:
    return json.dumps({"schema": POLICY_SCHEMA, "policy": policy.to_dict()} | more)


def put(path, text: str) -> None:
    """Replace a file by renaming, as `calib export` does."""
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(path)


@pytest.fixture
def path(tmp_path):
    """A file with a policy of threshold 0.5."""
    path = tmp_path / "policy.json"
    path.write_text(content(Policy(0.5)))
    return path


def watching(path, refuse=None):
    """A watch, the thresholds that it put in force, and what it said."""
    served, said = [], []

    def serve(file: PolicyFile) -> None:
        if refuse is not None:
            refuse(file)
        served.append(file.policy.threshold)

    return PolicyWatch(PolicyFile.read(path), serve, say=said.append), served, said


# --- the file ---------------------------------------------------------------------------------------------------------


async def test_a_file_that_is_renamed_into_place_is_taken_over(path):
    watch, served, said = watching(path)
    assert not await watch.look()
    put(path, content(Policy(0.6)))
    assert await watch.look()
    assert not await watch.look()
    old, new = policy_version(Policy(0.5)), policy_version(Policy(0.6))
    assert (served, watch.file.version, watch.counts) == ([0.6], new, {"ok": 1, "failed": 0})
    assert said == [f"{path}: policy {new} is in force now, before it {old}"]


async def test_a_file_that_is_written_in_place_with_the_same_times_and_size_is_taken_over(path):
    watch, served, _ = watching(path)
    await watch.look()
    before = path.stat()
    with path.open("r+") as stream:
        stream.write(content(Policy(0.6)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await watch.look()
    assert served == [0.6]


async def test_a_link_that_is_turned_to_another_folder_is_followed(tmp_path):
    """As a mounted config map changes: the name stays, a folder's link is replaced."""
    for name, threshold in (("one", 0.5), ("two", 0.6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.json").write_text(content(Policy(threshold)))
    (tmp_path / "now").symlink_to("one")
    watch, served, _ = watching(tmp_path / "now/policy.json")
    (tmp_path / "then").symlink_to("two")
    (tmp_path / "then").replace(tmp_path / "now")
    await watch.look()
    assert served == [0.6]


async def test_a_file_that_was_only_touched_is_not_reported(path):
    watch, served, said = watching(path)
    os.utime(path)
    assert not await watch.look()
    put(path, path.read_text())
    assert not await watch.look()
    assert (served, said, watch.counts["ok"]) == ([], [], 0)


async def test_other_evidence_for_the_same_policy_is_read_again(path):
    watch, _, said = watching(path)
    put(path, content(Policy(0.5), verdict="certified"))
    assert await watch.look()
    assert watch.file.document["verdict"] == "certified"
    assert said == [f"{path}: read again, policy {watch.file.version} stays in force"]


async def test_an_old_file_is_not_read_again_and_again(path, monkeypatch):
    os.utime(path, (1, 1))
    watch, _, _ = watching(path)
    await watch.look()
    monkeypatch.setattr("calib.reload._content", lambda _path: pytest.fail("read without need"))
    assert not await watch.look()


@pytest.mark.parametrize(
    "broken",
    [
        *("", "{", "[]", "null", '{"schema": 1}', '{"schema": 99, "policy": {}}', "\x00" * 50, "[" * 100_000),
        *('{"schema": 1, "policy": {"threshold": 7}}', '{"schema": 1, "policy": {"surprise": 1}}'),
        *('{"schema": 1, "policy": {"temperatures": 7}}', '{"schema": 1, "policy": {"routes": [1]}}'),
        '{"schema": 1, "policy": {"threshold": NaN}}',
    ],
)
async def test_a_broken_file_keeps_the_old_policy_and_is_told_once(path, broken):
    watch, served, said = watching(path)
    put(path, broken)
    for _ in range(3):
        assert not await watch.look()
    assert (served, watch.file.policy, watch.counts) == ([], Policy(0.5), {"ok": 0, "failed": 1})
    assert len(said) == 1
    assert said[0].startswith(f"{path}: ")
    assert said[0].endswith(f"; policy {policy_version(Policy(0.5))} stays in force")
    assert watch.error == said[0].rpartition("; ")[0]
    put(path, content(Policy(0.5)))  # the old one, put back
    assert await watch.look()
    assert watch.error is None


async def test_a_refused_policy_keeps_the_old_one(path):
    def refuse(file: PolicyFile) -> None:
        if file.policy.arm != "base":
            raise CalibError("this server runs another arm")

    watch, served, said = watching(path, refuse)
    put(path, content(Policy(0.6, arm="mtp")))
    assert not await watch.look()
    assert (served, watch.error, len(said)) == ([], "this server runs another arm", 1)
    put(path, content(Policy(0.7)))
    assert await watch.look()
    assert (served, watch.error) == ([0.7], None)


async def test_a_file_that_goes_and_comes_back(path):
    watch, served, said = watching(path)
    text = path.read_text()
    path.unlink()
    for _ in range(3):
        assert not await watch.look()
    assert said == [f"{path}: No such file or directory; policy {watch.file.version} stays in force"]
    path.write_text(text)
    assert await watch.look()
    assert (watch.error, served, watch.counts) == (None, [0.5], {"ok": 1, "failed": 1})


async def test_being_told_to_read_it_counts_and_answers_in_any_case(path):
    watch, served, said = watching(path)
    assert await watch.look(force=True)
    assert (served, len(said)) == ([0.5], 1)
    path.write_text("{")
    for _ in range(2):
        assert not await watch.look(force=True)
    assert (watch.counts, len(said)) == ({"ok": 1, "failed": 2}, 3)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from([*Policy().to_dict(), "deadline", "on_deadline"]),
)
def test_no_value_in_a_policy_file_breaks_its_reader(tmp_path_factory, value, field):
    path = tmp_path_factory.getbasetemp() / "any.json"
    text = json.dumps({"schema": POLICY_SCHEMA, "policy": Policy().to_dict() | {field: value}})
    with contextlib.suppress(CalibError):
        assert PolicyFile.of(path, text.encode()).policy


# --- the model --------------------------------------------------------------------------------------------------------

INFO = EngineInfo("tiny", {"model": "tiny", "seed": 0})


def told(tmp_path, info=INFO, allow_other=False, **document):
    path = tmp_path / "policy.json"
    path.write_text(content(Policy(), **document))
    return check_model(PolicyFile.read(path), info, allow_other=allow_other)


def test_the_model_that_it_was_tuned_on_is_welcome(tmp_path):
    assert told(tmp_path, model="tiny", fingerprints={"model": INFO.fingerprint}) is None
    assert told(tmp_path) is None  # a file by hand says nothing
    assert told(tmp_path, model="tiny", fingerprints=None) is None


def test_another_model_is_refused_with_the_reason(tmp_path):
    other = EngineInfo("large", {"model": "large"})
    with pytest.raises(CalibError, match="was tuned on large .*and tiny .*another model.*--allow-other-model"):
        told(tmp_path, model="large", fingerprints={"model": other.fingerprint})
    again = EngineInfo("tiny", {"model": "tiny", "seed": 7})
    with pytest.raises(CalibError, match="the same name: its prompt template, sampling, seed"):
        told(tmp_path, model="tiny", fingerprints={"model": again.fingerprint})
    doubt = told(tmp_path, allow_other=True, model="tiny", fingerprints={"model": again.fingerprint})
    assert "not known to hold" in doubt


def test_imported_answers_name_no_server_and_that_is_said(tmp_path):
    imported = EngineInfo("tiny", {"imported": "tiny"})
    doubt = told(tmp_path, model="tiny", fingerprints={"model": imported.fingerprint})
    assert "tuned on imported answers of tiny" in doubt


# --- behind the gateway -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def gateway(path, **options):
    app = await open_app(ScriptedEngine(), policy=PolicyFile.read(path), **options)
    async with serving(app) as url, aiohttp.ClientSession(url) as session:
        yield app, session


async def test_a_change_is_in_force_within_a_second_and_shown(path):
    async with gateway(path) as (_, session):
        put(path, content(Policy(0.9, mix=0.25)))
        async with asyncio.timeout(5):
            while (answer := await ask(session))["policy_version"] != policy_version(Policy(0.9, mix=0.25)):
                await asyncio.sleep(0.05)
        assert answer["thinking"]["used"] is True  # 0.7 is below 0.9, and was not below 0.5
        path.write_text("{")
        async with asyncio.timeout(5):
            while (told := await info(session))["policy_file"]["error"] is None:
                await asyncio.sleep(0.05)
        assert "not JSON" in told["policy_file"]["error"]
        assert (told["policy"]["version"], told["defaults"]["mix"]) == (answer["policy_version"], 0.25)
        async with session.get("/metrics") as response:
            text = await response.text()
        assert 'calib_policy_reloads_total{result="failed"} 1.0' in text
        assert f'version="{answer["policy_version"]}"' in text


async def ask(session):
    async with session.post("/v1/decide", json=CHOICE) as response:
        assert response.status == 200
        return await response.json()


async def info(session):
    async with session.get("/v1/decide/info") as response:
        return await response.json()


async def test_a_thousand_reloads_under_load_and_no_answer_under_two_policies(path):
    """Each policy gives other probabilities, a third of them do not think, and one in ten files is broken."""
    rng = random.Random(3)
    policies = [Policy(0.5 if i % 3 == 0 else 0.9, mix=i / 1000, think_budget=100 + i % 7) for i in range(1000)]
    by_version = {policy_version(policy): policy for policy in policies}
    by_version[policy_version(Policy(0.5))] = Policy(0.5)
    answers, over = [], asyncio.Event()

    async def client(session):
        while not over.is_set():
            answers.append(await ask(session))

    async with gateway(path, say=lambda _line: None) as (app, session):
        clients = [asyncio.create_task(client(session)) for _ in range(4)]
        watch = app.state.service.watch
        for i, policy in enumerate(policies):
            put(path, content(policy) if i % 10 else "{")
            await watch.look()  # or the watch itself was quicker
            await asyncio.sleep(rng.random() * 0.002)
        over.set()
        await asyncio.gather(*clients)
        assert watch.counts == {"ok": 900, "failed": 100}
    seen = set()
    for answer in answers:
        policy = by_version[answer["policy_version"]]
        thinking = answer["thinking"]
        assert (thinking["threshold"], thinking["budget"]) == (policy.threshold, policy.think_budget)
        assert thinking["used"] == (policy.threshold == 0.9)
        m = policy.mix if thinking["used"] else 0.0
        expected = [(1 - m) * p1 + m * p2 for p1, p2 in zip((0.7, 0.2, 0.1), (0.1, 0.8, 0.1), strict=True)]
        assert answer["probabilities"] == pytest.approx(expected, abs=1e-12)
        assert thinking.get("think_tokens", policy.think_budget) == policy.think_budget
        seen.add(answer["policy_version"])
    assert len(answers) > 300
    assert len(seen) > 100

"""The decision log: whole lines, no text, nothing that a request waits for."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import threading
from dataclasses import asdict, replace

import pytest

from calib.declog import DecisionLog
from calib.errors import CalibError
from calib.gateway import Observation

SEEN = Observation(
    at=1.5,
    hash="ab",
    dataset='d"\n1',
    kind="choice",
    n_options=2,
    p1=(0.75, 0.25),
    confidence=0.75,
    think=True,
    mode="auto",
    tokens=600,
    finished=True,
    closed=False,
    degraded=False,
    seconds=6.05,
    t1=0.05,
    t2=math.nan,
    policy_version="f00",
)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_has_the_fields_of_an_observation(tmp_path):
    log = DecisionLog(tmp_path / "d.jsonl")
    log.put(SEEN)
    log.put(replace(SEEN, confidence=math.nan, p1=(), policy_version=None, dataset="x" * 5000))
    await log.close()
    assert log.written == 2
    first, second = lines(tmp_path / "d.jsonl")
    assert first == asdict(SEEN) | {"p1": [0.75, 0.25], "t2": None}
    assert list(first) == list(asdict(SEEN))
    assert (second["confidence"], second["p1"], second["policy_version"]) == (None, [], None)
    assert second["dataset"] == "x" * 200  # the client chooses the name, not how much of the disk it takes


async def test_it_appends_and_is_not_for_everyone_to_read(tmp_path):
    path = tmp_path / "d.jsonl"
    for _ in range(2):
        log = DecisionLog(path)
        log.put(SEEN)
        await log.close()
    assert len(lines(path)) == 2
    assert path.stat().st_mode & 0o007 == 0


async def test_half_a_line_of_a_crash_is_ended(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"at": 1}\n{"at": 2, "ha')
    log = DecisionLog(path)
    log.put(SEEN)
    await log.close()
    assert path.read_text().splitlines()[1] == '{"at": 2, "ha'
    assert json.loads(path.read_text().splitlines()[2])["at"] == 1.5


async def test_the_background_task_writes_soon(tmp_path):
    log = DecisionLog(tmp_path / "d.jsonl")
    task = asyncio.create_task(log.run())
    log.put(SEEN)
    async with asyncio.timeout(5):
        while log.written == 0:
            await asyncio.sleep(0.02)
    assert len(lines(tmp_path / "d.jsonl")) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await log.close()


async def test_stopping_while_lines_wait_for_the_disk_loses_none(tmp_path):
    log, free = DecisionLog(tmp_path / "d.jsonl"), threading.Event()
    log._thread.submit(free.wait, 10)  # the disk is busy, so that the write has not begun when the task is cancelled
    log.put(SEEN)
    task = asyncio.create_task(log.run())
    while log._lines:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    log.put(replace(SEEN, tokens=7))
    free.set()
    await log.close()
    assert [line["tokens"] for line in lines(tmp_path / "d.jsonl")] == [600, 7]
    assert (log.written, log.dropped) == (2, 0)


async def test_after_a_rotation_lines_go_to_the_new_file(tmp_path):
    path = tmp_path / "d.jsonl"
    log = DecisionLog(path)
    log.put(SEEN)
    await log._flush()
    path.rename(tmp_path / "d.1.jsonl")
    log.put(SEEN)
    await log._flush()
    log.reopen()
    log.put(replace(SEEN, at=9.0))
    await log.close()
    assert len(lines(tmp_path / "d.1.jsonl")) == 2
    assert [line["at"] for line in lines(path)] == [9.0]


async def test_a_full_memory_drops_lines_and_counts_them(tmp_path):
    log = DecisionLog(tmp_path / "d.jsonl", max_bytes=2000)
    for _ in range(100):
        log.put(SEEN)
    kept = 100 - log.dropped
    assert 3 <= kept <= 10
    await log._flush()
    log.put(SEEN)  # there is room again
    await log.close()
    assert (log.written, len(lines(tmp_path / "d.jsonl"))) == (kept + 1, kept + 1)


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    log = DecisionLog(tmp_path / "d.jsonl", max_bytes=2000)
    hang = threading.Event()
    real = os.write
    monkeypatch.setattr(os, "write", lambda *a: hang.wait(10) and real(*a))
    log.put(SEEN)
    flush = asyncio.create_task(log._flush())
    await asyncio.sleep(0.05)
    started = asyncio.get_running_loop().time()
    for _ in range(1000):
        log.put(SEEN)
    assert asyncio.get_running_loop().time() - started < 0.5
    assert log.dropped > 980  # what is being written still fills the memory
    hang.set()
    await flush
    await log.close()
    assert log.written + log.dropped == 1001
    assert len(lines(tmp_path / "d.jsonl")) == log.written


async def test_a_full_disk_is_told_once_and_the_lines_before_and_after_are_whole(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    log = DecisionLog(path)
    log.put(SEEN)
    await log._flush()
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * 2.5), hard))  # room for one line and a half
    try:
        for _ in range(2):
            for _ in range(3):
                log.put(SEEN)
            await log._flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (log.written, log.dropped) == (2, 5)
    assert [message.split(":")[0] for message in caplog.messages] == [f"the decision log {path} cannot be written"]
    log.put(SEEN)
    await log.close()
    assert log.written == 3
    good, broken = 0, 0
    for line in path.read_text().splitlines():
        try:
            json.loads(line)
            good += 1
        except ValueError:
            broken += 1
    assert (good, broken) == (3, 1)


async def test_a_log_that_cannot_be_opened_anew_goes_on_where_it_was(tmp_path, caplog):
    folder = tmp_path / "logs"
    folder.mkdir()
    log = DecisionLog(folder / "d.jsonl")
    folder.rename(tmp_path / "moved")
    log.reopen()
    log.put(SEEN)
    await log._flush()
    await log.close()
    assert (log.dropped, len(caplog.messages)) == (0, 1)
    assert len(lines(tmp_path / "moved/d.jsonl")) == 1


def test_a_log_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(CalibError, match="--log .*No such file or directory; name a file"):
        DecisionLog(tmp_path / "absent/d.jsonl")

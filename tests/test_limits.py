"""Places for requests, the queue before them, and the key."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.errors import CalibError
from calib.limits import Admission, KeyGuard, Refused, read_key


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_are_given_in_the_order_of_asking():
    admission, order = Admission(2, 10), []

    async def ask(name: int) -> None:
        await admission.enter()
        order.append(name)

    tasks = [asyncio.create_task(ask(i)) for i in range(5)]
    await settle()
    assert (order, admission.in_flight, admission.queued) == ([0, 1], 2, 3)
    for taken in range(3):
        admission.leave(0.1)
        await settle()
        assert (order, admission.in_flight, admission.queued) == (list(range(taken + 3)), 2, 2 - taken)
    admission.leave(0.1)
    admission.leave(0.1)
    assert (admission.in_flight, admission.queued) == (0, 0)
    await asyncio.gather(*tasks)


async def test_a_full_queue_is_refused_with_the_seconds_that_a_place_takes():
    admission = Admission(2, 1)
    await admission.enter()
    admission.leave(9.0)  # a place is held 9 s
    await admission.enter()
    await admission.enter()
    waiting = asyncio.create_task(admission.enter())
    await settle()
    # the next one would be the second in the queue of two places: 9 s * 2 / 2
    assert admission.expected_wait == pytest.approx(9.0)
    with pytest.raises(Refused, match="2 requests are being answered and 1 wait; try again in 9 s") as caught:
        await admission.enter()
    assert (caught.value.reason, caught.value.retry_after) == ("queue_full", 9)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (admission.in_flight, admission.queued) == (2, 0)


async def test_who_would_wait_beyond_its_deadline_is_refused_at_once():
    admission = Admission(1, 10)
    await admission.enter()
    admission.leave(5.0)
    await admission.enter()
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(Refused, match="a place would come after the deadline of 4 s") as caught:
        await admission.enter(4.0)
    assert loop.time() - started < 0.1
    assert (caught.value.reason, caught.value.retry_after, admission.queued) == ("too_late", 5, 0)


async def test_who_waited_until_its_deadline_is_refused():
    admission = Admission(1, 10)
    await admission.enter()  # nothing is known of how long places are held
    with pytest.raises(Refused, match="no place came within the deadline of 0.05 s"):
        await admission.enter(0.05)
    assert (admission.in_flight, admission.queued) == (1, 0)


async def test_a_place_that_is_given_in_the_moment_of_giving_up_goes_to_the_next_one():
    admission = Admission(1, 10)
    await admission.enter()
    first = asyncio.create_task(admission.enter())
    second = asyncio.create_task(admission.enter())
    await settle()
    admission.leave(0.1)  # to the first, which has not run yet
    first.cancel()
    await settle()
    assert first.cancelled()
    assert second.done()
    assert (admission.in_flight, admission.queued) == (1, 0)


@settings(max_examples=30)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.sampled_from(["enter", "leave", "cancel", "hurry"]), max_size=40),
)
def test_no_place_is_lost_or_made(places, queue, steps):
    async def play() -> None:
        admission, holders, waiting = Admission(places, queue), 0, []
        for step in steps:
            if step in ("enter", "hurry"):
                waiting.append(asyncio.create_task(admission.enter(0.0 if step == "hurry" else math.inf)))
            elif step == "leave" and holders:
                admission.leave(0.0)
                holders -= 1
            elif step == "cancel" and waiting:
                waiting[0].cancel()
            await settle()
            for task in [task for task in waiting if task.done()]:
                waiting.remove(task)
                holders += not task.cancelled() and task.exception() is None
            assert admission.in_flight == holders <= places
            assert admission.queued == len(waiting) <= queue
            assert not waiting or holders == places  # nobody waits beside a free place
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(play())


@pytest.mark.parametrize(("places", "queue"), [(0, 1), (1, -1)])
def test_limits_that_cannot_be(places, queue):
    with pytest.raises(CalibError, match="--max-concurrency must be 1 or more"):
        Admission(places, queue)


# --- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_is_that_of_the_variable(monkeypatch):
    monkeypatch.setenv("SOME_KEY", " s3cret\n")
    assert read_key("SOME_KEY") == "s3cret"


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "clé", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(monkeypatch, value):
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(CalibError, match="--key-env SOME_KEY") as caught:
        read_key("SOME_KEY")
    assert not value or not value.strip() or value not in str(caught.value)


async def status(headers: list[tuple[bytes, bytes]], path: str = "/v1/decide", key: str = "s3cret") -> int:
    """Status of a request with these headers: 200 from the guarded application."""
    sent = []

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    guard = KeyGuard(app, key=key, open_paths=("/health",))
    await guard({"type": "http", "path": path, "headers": headers}, None, send)
    return sent[0]["status"]


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"s3cret", b"Bearer", b"Bearer ", b"Bearer s3cre", b"Bearer s3cret2", b"Basic s3cret", b"Bearer S3CRET"),
        *(b"Bearer s3cret s3cret", b"Bearer,s3cret", b"\xff\xfe", b"Bearer " + b"x" * 100_000),
    ],
)
async def test_a_wrong_key_is_refused(value):
    assert await status([(b"authorization", value)]) == 401


async def test_the_right_key_and_open_paths_pass():
    assert await status([(b"authorization", b"Bearer s3cret")]) == 200
    assert await status([(b"authorization", b"bearer  s3cret")]) == 200  # schemes have no case
    assert await status([], "/health") == 200
    assert await status([], "/health/") == 401
    assert await status([]) == 401
    both = [(b"authorization", b"Bearer s3cret"), (b"authorization", b"Bearer other")]
    assert await status(both) == 401  # which of them counts would be a guess

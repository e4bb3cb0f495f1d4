"""When questions are asked, by a clock that the tests own: arrivals wait for nobody, a crew waits for itself."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from scipy import stats

from calib.arrivals import Load, arrival_times, offer, parse_rate
from calib.errors import CalibError


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to what is due next, so that hours take no time."""

    clock = 0.0

    def time(self) -> float:
        return self.clock

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.clock = max(self.clock, self._scheduled[0]._when)
        super()._run_once()


def run(main) -> float:
    """Run a coroutine in virtual time; how long it took."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        runner.run(main(loop))
        return loop.time()


def test_a_slow_server_slows_no_arrival():
    load, sent, done = Load(rate=2.0), [], []

    async def main(loop):
        async def ask(i, due):
            sent.append((loop.time(), due))
            await asyncio.sleep(100)  # fifty times as long as the mean gap
            done.append(loop.time() - due)
            return i

        found = await offer(ask, 60, load, times=arrival_times(60, 2.0, np.random.default_rng(3)), now=loop.time)
        assert found == list(range(60))

    seconds = run(main)
    times = arrival_times(60, 2.0, np.random.default_rng(3))
    np.testing.assert_allclose([at for at, _ in sent], times, atol=1e-9)
    np.testing.assert_allclose([due for _, due in sent], times, atol=1e-9)
    np.testing.assert_allclose(done, 100)
    assert seconds == pytest.approx(times[-1] + 100)


def test_a_client_that_stalls_counts_from_when_the_question_was_due():
    waits = []

    async def main(loop):
        async def ask(i, due):
            if i == 0:
                loop.clock += 10  # the client itself hangs: several arrivals pass meanwhile
            waits.append(loop.time() - due)

        await offer(ask, 20, Load(rate=1.0), times=arrival_times(20, 1.0, np.random.default_rng(0)), now=loop.time)

    run(main)
    times = arrival_times(20, 1.0, np.random.default_rng(0))
    late = np.maximum(times[0] + 10 - times, 0)
    np.testing.assert_allclose(waits, late, atol=1e-9)
    assert (late > 0).sum() > 5


def test_a_crew_has_as_many_in_flight_as_told_and_not_one_more():
    most, flying, order = 0, 0, []

    async def main(loop):
        async def ask(i, due):
            nonlocal most, flying
            assert due == loop.time()
            flying += 1
            most = max(most, flying)
            order.append(i)
            await asyncio.sleep(1 + i % 2)
            flying -= 1
            return i

        found = await offer(ask, 12, Load(concurrency=3), now=loop.time)
        assert sorted(found) == list(range(12))

    seconds = run(main)
    assert (most, order) == (3, list(range(12)))
    assert seconds == 7  # 18 seconds of work for 3, of which the last two begin at 5


@pytest.mark.parametrize("load", [Load(rate=1.0), Load(concurrency=4)])
def test_a_stop_begins_no_question_and_waits_for_those_in_flight(load):
    begun, found, times = [], [], arrival_times(100, 1.0, np.random.default_rng(1))

    async def main(loop):
        stop = asyncio.Event()

        async def ask(i, due):
            begun.append(i)
            if i == 7:
                stop.set()
            await asyncio.sleep(50)
            return i

        found.extend(await offer(ask, 100, load, times=times, stop=stop, now=loop.time))

    run(main)
    assert begun == list(range(8))
    assert sorted(found) == begun


@pytest.mark.parametrize("load", [Load(rate=1.0), Load(concurrency=4)])
def test_an_error_ends_everything_at_once(load):
    ended, times = [], arrival_times(100, 1.0, np.random.default_rng(1))

    async def main(loop):
        async def ask(i, due):
            if i == 3:
                raise CalibError("another key")
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(i)

        with pytest.raises(CalibError, match="another key"):
            await offer(ask, 100, load, times=times, now=loop.time)

    assert run(main) < 20
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("times", [None, np.ones(3)])
def test_a_rate_needs_a_time_for_each_question(times):
    async def main(loop):
        with pytest.raises(CalibError, match=r"4 questions at 1 requests/s need a time each, got [03]"):
            await offer(None, 4, Load(rate=1.0), times=times)

    run(main)


def test_gaps_are_exponential_and_repeat_with_the_seed():
    times = arrival_times(4000, 5.0, np.random.default_rng(7))
    assert stats.kstest(np.diff(times, prepend=0.0), "expon", args=(0, 0.2)).pvalue > 0.01
    np.testing.assert_array_equal(times, arrival_times(4000, 5.0, np.random.default_rng(7)))


def test_progress_is_told_while_it_runs():
    calls = []

    async def main(loop):
        async def ask(i, due):
            await asyncio.sleep(1)

        await offer(ask, 3, Load(concurrency=1), now=loop.time, tick=lambda: calls.append(1))

    run(main)
    assert len(calls) == pytest.approx(15, abs=2)  # three seconds, five times a second


@pytest.mark.parametrize(
    ("text", "rate"),
    [("2/s", 2.0), ("2", 2.0), ("90/min", 1.5), (" 0.5 / second ", 0.5), ("36/h", 0.01), ("1e2/s", 100)],
)
def test_rates_are_read(text, rate):
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "2/week", "-1/s", "0/s", "1.2.3/s", "nan", "1e999/s"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(CalibError, match="--rate"):
        parse_rate(text)


def test_a_load_is_one_of_both():
    for wrong in ({}, {"rate": 1.0, "concurrency": 2}):
        with pytest.raises(CalibError, match="one of both"):
            Load(**wrong)
    with pytest.raises(CalibError, match="--concurrency must be 1"):
        Load(concurrency=0)
    assert [str(Load(rate=2.5)), str(Load(concurrency=1))] == ["2.5 requests/s", "1 request in flight"]

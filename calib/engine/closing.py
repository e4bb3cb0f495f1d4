"""When to close a thought so that its answer can still be read in time.

The time that a read takes is measured on the server itself, read by read, so that it follows the load. Leaves to
others: streaming the thought (`calib.engine.completions`), reading it (`calib.engine.ladder`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SLACK", "Closing", "ReadTimes"]

SLACK = 0.02
"""Seconds kept besides the read, for all that comes after it until the answer is sent."""

_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4


class _Running:
    """Mean and deviation of seconds, new ones weighing 1/8 and 1/4."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self.any = False

    def count(self, seconds: float) -> None:
        off = seconds - self._mean
        if not self.any:
            self._mean, self._deviation, self.any = seconds, seconds / 2, True
            return
        self._mean += _GAIN * off
        self._deviation += _DEVIATION_GAIN * (abs(off) - self._deviation)

    @property
    def high(self) -> float:
        return self._mean + _DEVIATIONS * self._deviation


class ReadTimes:
    """How long reading an answer takes on one server: mean + 4 deviations, the estimate of retransmission timers.

    One slow read raises it at once, and about ten usual ones bring it back. System 1's answers are such reads too, and
    each question has one, so that they tell first when the load grows: the larger of both estimates holds.

    References
    ----------
    V. Jacobson, Congestion avoidance and control, SIGCOMM 1988; RFC 6298.
    """

    def __init__(self) -> None:
        self._behind_thoughts, self._system1 = _Running(), _Running()

    @property
    def reserve(self) -> float:
        """Seconds to leave for a read and what follows; infinite as long as nothing was measured."""
        if not (self._behind_thoughts.any or self._system1.any):
            return float("inf")
        return max(self._behind_thoughts.high, self._system1.high) + SLACK

    def took(self, seconds: float) -> None:
        """Count a read behind a thought."""
        self._behind_thoughts.count(seconds)

    def system1_took(self, seconds: float) -> None:
        """Count a read by System 1."""
        self._system1.count(seconds)


class Closing:
    """When one thought, begun now, must be closed.

    Parameters
    ----------
    times : ReadTimes
    until : float
        When the answer must be there, by the clock of the running event loop.
    """

    def __init__(self, times: ReadTimes, until: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._times = times
        self._until = until
        self._half = (until - self._clock()) / 2

    @property
    def due(self) -> float:
        """Time of the event loop's clock; moves as reads of other questions become slower or faster.

        At most half of the time is kept for the read: else one slow read could leave no time for any thought, and so
        no read that would show that it is over.
        """
        return self._until - min(self._times.reserve, self._half)

    @contextmanager
    def reading(self, *, closed: bool) -> Iterator[None]:
        """Measures the read within.

        Behind a thought that was closed it counts from when that was due, so that a busy event loop, which closes late,
        counts too. A read that is given up would have taken longer: it counts twice.
        """
        now = self._clock()
        since = min(now, self.due) if closed else now
        try:
            yield
        except asyncio.CancelledError:
            self._times.took(2 * (self._clock() - since))
            raise
        self._times.took(self._clock() - since)

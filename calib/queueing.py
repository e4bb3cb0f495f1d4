"""Latency under open arrivals, from seconds that were recorded at several numbers of requests in flight.

A collection keeps a fixed number of requests in flight (a closed loop); users arrive when they like (an open loop), so
that the number in flight moves, and the seconds of a request with it. `simulate` sends requests through a shared
server: each advances at a speed that hangs on what the others take of it at that moment.

State. How slow the server is at a moment is told by the work it does for the others, and not by their number alone: a
collection thinks up to the largest budget, and a policy that thinks shorter calls the server more often with as many in
flight. Two kinds of work are counted: prompts, each a request that the server schedules, passes over and answers, while
thoughts wait; and thought tokens. Several prompts in one call are several (`pace`, `work_of`). A moment is as slow as
the recorded load at which the server did as much a second for the others, by that kind of the two that says slower.

Assumed. The server spends some time on each prompt or token, and a request gets the rest: its speed is linear in the
work, so that between two loads it is interpolated linearly, which is the same as seconds that are linear in the number
in flight. Any prompt costs as much as another, and a request's work is spread evenly over its seconds. Nothing is
fitted to latency under arrivals.

Where it stops being true. With fewer in flight than at the lowest load its seconds stand. Above the highest load the
server does no more work than there, which is a guess: `Flight.saturated` says how long it counted. Near the capacity
latency hangs on small errors, since speed falls as 1 - rate / capacity. The two kinds are not added, because one
collection cannot tell what a token costs beside a prompt: where both weigh, the server is slower than predicted. So it
is where a gateway is busy itself, whose own seconds were not recorded. It is faster where prompts bind, since the time
of the collection went to thoughts (`Forecast.prompts_bind`), and where the collection did more than is counted:
requests for the label mass alone, or a new thought for each budget.

Pure: arrays in, numbers out. Leaves to others: when requests arrive (`calib.arrivals`), what was recorded
(`calib.store`), the comparison with a measurement (`calib.verify`).

References
----------
L. Kleinrock, "Time-shared systems: a theoretical treatment", JACM 14 (1967): processor sharing.
J. D. C. Little, "A proof for the queuing formula L = lambda W", Operations Research 9 (1961).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Decisions, Policy, decide

__all__ = ["Flight", "Forecast", "Pace", "forecast", "pace", "replay", "simulate", "work_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_WORTH_SAYING = 0.01
"""Share of the time beyond all recorded loads that is worth a warning."""
_NEAR = 0.75
"""Share of the capacity from which on an error in it counts three times and more in the latency."""
_SHORTEST = 1e-9  # seconds; a request that takes none would have no speed


# --- what was recorded ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pace:
    """Work that a server did at K recorded loads.

    Attributes
    ----------
    concurrency : ndarray of int, shape (K,)
        Requests in flight, ascending.
    work : ndarray of shape (K, W)
        Of each kind a second.
    """

    concurrency: Ints
    work: Floats

    def __post_init__(self) -> None:
        if len(self.concurrency) < 2 or (np.diff(self.concurrency) <= 0).any() or self.concurrency[0] < 1:
            raise CalibError(
                f"open arrivals are predicted from two or more numbers in flight, ascending from 1 or more, got "
                f"{list(self.concurrency)}; collect at another one: calib collect QUESTIONS --concurrency 64"
            )

    @property
    def of_others(self) -> Floats:
        """What was done a second for the others, seen from one request, (K, W): nothing with one in flight."""
        return np.asarray(self.work * (1 - 1 / self.concurrency[:, None]))

    def capacities(self, work: ArrayLike) -> Floats:
        """Requests a second that took the most work of each kind that was recorded, (W,); infinite without any.

        Parameters
        ----------
        work : array_like of shape (N, W)
            Of each request.
        """
        each = np.asarray(work, dtype=np.float64).mean(axis=0)
        return np.asarray(np.divide(self.work.max(axis=0), each, out=np.full(each.shape, math.inf), where=each > 0))

    def capacity(self, work: ArrayLike) -> float:
        """The least of the capacities: that of the kind that binds."""
        return float(self.capacities(work).min())


def pace(recorded: Sequence[Outcomes], arm: str) -> Pace:
    """Prompts and thought tokens a second of a collection, by Little's law: c / (mean seconds) questions a second.

    A collected question is a prompt for System 1, one for the thought, and one for the answer at the largest budget and
    at each smaller one that cuts the thought. The answers at the smaller ones are read by one call, whose seconds are
    not recorded: those of System 1 stand for them.

    Parameters
    ----------
    recorded : sequence of Outcomes
        The same questions with the seconds of each load, ascending.
    arm : str

    Raises
    ------
    CalibError
        Fewer than two loads, or seconds that are not known.
    """
    concurrency, work = [], []
    for o in recorded:
        a = o.arm_index(arm)
        prompts, tokens, seconds = np.ones(o.n), np.zeros(o.n), o.t1[a].copy()
        if o.budgets.size:
            thought = o.can_think
            tokens[thought] = o.tokens[thought, -1]
            cuts = (o.budgets < tokens[:, None]).sum(axis=1)
            prompts[thought] += 2 + cuts[thought]
            seconds[thought] += o.t2[a, thought, -1] + (cuts > 0)[thought] * o.t1[a, thought]
        mean = float(seconds.mean())
        if not mean > 0:
            raise CalibError(f"arm {arm} has no seconds at {o.concurrency[a]} requests in flight")
        concurrency.append(int(o.concurrency[a]))
        work.append([concurrency[-1] * kind.mean() / mean for kind in (prompts, tokens)])
    return Pace(np.array(concurrency, dtype=np.int64), np.array(work, dtype=np.float64))


def work_of(decisions: Decisions) -> Floats:
    """Prompts and thought tokens of each request under a policy, (N, 2).

    One prompt for System 1; where it thinks, one for the thought and one for the answer.
    """
    return np.column_stack([1 + 2.0 * decisions.thinks, decisions.tokens])


# --- the simulation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Flight:
    """N simulated requests.

    Attributes
    ----------
    latency : ndarray of shape (N,)
        Seconds from the arrival to the answer.
    in_flight : float
        Mean number, from the start to the last answer.
    most : int
    saturated : float
        Share of that time in which more work was asked for than any recorded load did.
    """

    latency: Floats
    in_flight: float
    most: int
    saturated: float


def simulate(arrivals: ArrayLike, seconds: ArrayLike, work: ArrayLike, recorded: Pace) -> Flight:
    """Send requests through a server that they share.

    Parameters
    ----------
    arrivals : array_like of shape (N,)
        Seconds from the start, ascending.
    seconds : array_like of shape (N, K)
        Of each request at each recorded load.
    work : array_like of shape (N, W)
        Of each request, in the kinds of the pace.
    recorded : Pace
    """
    due, needed = np.asarray(arrivals, dtype=np.float64), np.asarray(work, dtype=np.float64)
    speeds = 1 / np.maximum(np.asarray(seconds, dtype=np.float64), _SHORTEST)
    done_there = recorded.of_others
    n = due.size
    left, latency = np.ones(n), np.empty(n)
    flying = np.empty(0, dtype=np.int64)
    now = area = saturated = 0.0
    arrived = most = 0
    while arrived < n or flying.size:
        until = float(due[arrived]) - now if arrived < n else math.inf
        step, first, speed, full = until, -1, np.empty(0), False
        if flying.size:
            own = speeds[flying]
            speed, full = _speed(own, (1 - 1 / flying.size) * (own.T @ needed[flying]), done_there)
            ends = left[flying] / speed
            soonest = int(ends.argmin())
            if ends[soonest] <= until:
                step, first = float(ends[soonest]), soonest
            left[flying] -= speed * step
        area += flying.size * step
        saturated += full * step
        now += step
        if first >= 0:
            latency[flying[first]] = now - due[flying[first]]
            flying = np.delete(flying, first)
        else:
            flying = np.append(flying, arrived)
            arrived += 1
            most = max(most, flying.size)
    return Flight(latency, area / now if now > 0 else 0.0, most, saturated / now if now > 0 else 0.0)


def _speed(own: Floats, asked: Floats, done: Floats) -> tuple[Floats, bool]:
    """Speed of each request in flight, (R,), and whether more work is asked for than was ever done.

    Parameters
    ----------
    own : ndarray of shape (R, K)
        Speeds of the requests at each load.
    asked, done : ndarray of shape (K, W)
        Work a second for the others: what these would take at the speeds of each load, what was done there. Where the
        two are equal the speeds are in balance.
    """
    excess = asked - done
    top = len(excess) - 1
    place, scale = 0.0, 1.0
    for kind in range(excess.shape[1]):
        over = excess[:, kind]
        fits = np.flatnonzero(over <= 0)
        if not fits.size:
            place, scale = float(top), min(scale, float(done[top, kind] / asked[top, kind]))
        elif fits[0] > 0:
            k = int(fits[0])
            place = max(place, k - 1 + float(over[k - 1] / (over[k - 1] - over[k])))
    k = min(int(place), top - 1)
    share = place - k
    return scale * ((1 - share) * own[:, k] + share * own[:, k + 1]), scale < 1


# --- a policy under arrivals ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Forecast:
    """What is predicted of questions that arrive at given times.

    Attributes
    ----------
    flight : Flight
    concurrency : tuple of int
        Recorded loads that it rests on.
    estimated : tuple of int
        Those at which seconds of some question come from a fitted line.
    capacity : float
        Requests a second that these loads show the server to sustain.
    prompts_bind : bool
        Whether it is the prompts that set the capacity, which is then a lower bound: the time of a collection goes to
        its thoughts, so that it tells how many prompts came beside these and not how many could have.
    """

    flight: Flight
    concurrency: tuple[int, ...]
    estimated: tuple[int, ...]
    capacity: float
    prompts_bind: bool

    @property
    def latency(self) -> Floats:
        """Seconds from the arrival to the answer, (N,)."""
        return self.flight.latency

    @property
    def nearest(self) -> int:
        """Which of the loads has about as many in flight."""
        return int(np.abs(np.log(np.array(self.concurrency) / max(self.flight.in_flight, 1.0))).argmin())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: requests, shares 0 to 1, requests a second (None without a limit)."""
        return {
            "concurrency": list(self.concurrency),
            "nearest": self.concurrency[self.nearest],
            "estimated": list(self.estimated),
            "in_flight": self.flight.in_flight,
            "most_in_flight": self.flight.most,
            "saturated": self.flight.saturated,
            "capacity": self.capacity if math.isfinite(self.capacity) else None,
            "lower_bound": self.prompts_bind,
        }

    def warnings(self, rate: float) -> list[str]:
        """What one should know before believing it, at a rate in requests a second."""
        said = self._beyond(rate)
        if self.estimated:
            at = ", ".join(map(str, self.estimated))
            said.append(f"the seconds of some questions at {at} in flight are estimated, and so is what rests on them")
        return said

    def _beyond(self, rate: float) -> list[str]:
        """Where the arrivals leave what was recorded, the gravest case alone."""
        lowest, highest, flight = self.concurrency[0], self.concurrency[-1], self.flight
        bound = (
            f". The capacity of {self.capacity:.3g} requests/s is a lower bound: prompts bind here, and the time of "
            "the collection went to thoughts, so that it does not show how many prompts the server can do"
        )
        if rate > self.capacity:
            if self.prompts_bind:
                return [
                    f"{rate:.3g} requests/s arrive, more than any recorded load shows to be possible: the prediction "
                    f"is of a server that does no more, whose queue grows as long as they come{bound}"
                ]
            return [
                f"overloaded: {rate:.3g} requests/s arrive, and nothing recorded shows that the server does more than "
                f"{self.capacity:.3g}/s of them: the queue grows as long as they come, and no latency holds for long"
            ]
        if flight.saturated > _WORTH_SAYING:
            higher = f". Collect at a higher one: calib collect QUESTIONS --concurrency {2 * highest}"
            return [
                f"for {flight.saturated:.0%} of the time more is asked of the server than at the highest recorded load "
                f"({highest} in flight): the prediction is a guess there"
                # with fewer in flight than were recorded it is their kind that was not, and more of them tell nothing
                + (bound if self.prompts_bind else "")
                + (higher if flight.most >= highest else "")
            ]
        used = rate / self.capacity
        if _NEAR < used < 1:
            return [
                f"{rate:.3g} requests/s are {used:.0%} of the {self.capacity:.3g}/s that the recorded loads show to be "
                f"possible: if that is 1 % off, latency is about {used / (1 - used):.0f} % off"
                + (bound if self.prompts_bind else "")
            ]
        if lowest > 1 and flight.in_flight < lowest:
            return [
                f"{flight.in_flight:.3g} requests are in flight on average, fewer than at the lowest recorded load: "
                f"the seconds of {lowest} in flight stand for theirs"
            ]
        return []


def forecast(recorded: Sequence[Outcomes], asked: Sequence[Outcomes], policy: Policy, arrivals: ArrayLike) -> Forecast:
    """Predict the latency of questions that are served under a policy while they arrive at given times.

    A thought that a deadline closes is closed by the seconds of each recorded load; no request that thinks is predicted
    to take longer than the deadline. System 1 alone is not closed by it, and takes what it takes.

    Parameters
    ----------
    recorded : sequence of Outcomes
        All questions that were in flight together, with the seconds of each load, ascending: a part of them, or other
        weights, would not tell how much work the server did.
    asked : sequence of Outcomes
        Of these the ones that arrive, in their order.
    policy : Policy
    arrivals : array_like of shape (N,)
        Seconds from the start, ascending.
    """
    decided = [decide(o, policy) for o in asked]
    server, a = pace(recorded, policy.arm), recorded[0].arm_index(policy.arm)
    work = np.mean([work_of(d) for d in decided], axis=0)  # one and the same, but for what a deadline closes
    flight = simulate(arrivals, np.column_stack([d.latency for d in decided]), work, server)
    if policy.deadline is not None:
        latency = np.where(decided[0].thinks, np.minimum(flight.latency, policy.deadline), flight.latency)
        flight = replace(flight, latency=latency)
    loads = tuple(server.concurrency.tolist())
    guessed = tuple(load for load, o in zip(loads, recorded, strict=True) if o.estimated[a].any())
    capacities = server.capacities(work)
    binding = bool(capacities[0] <= capacities.min() and server.work[:, 1].any())
    return Forecast(flight, loads, guessed, float(capacities.min()), binding)


def replay(recorded: Sequence[Outcomes], policy: Policy, ids: Sequence[str], arrivals: ArrayLike) -> Forecast:
    """Predict again what a verification asked.

    Parameters
    ----------
    recorded : sequence of Outcomes
        All questions, with the seconds of each load, ascending.
    policy : Policy
    ids : sequence of str
        Of the questions, in the order in which they came.
    arrivals : array_like of shape (N,)
        Seconds from the start, ascending.

    Raises
    ------
    CalibError
        An id that is not recorded, or that several datasets have.
    """
    asked = []
    for o in recorded:
        known = o.ids.tolist()
        place = {name: i for i, name in enumerate(known)}
        if missing := [name for name in ids if name not in place]:
            raise CalibError(f"question {missing[0]} is none of the {o.n:,} recorded ones: this is another recording")
        if len(place) < len(known):
            raise CalibError("questions of several datasets share an id; take one dataset: Outcomes.select")
        asked.append(o.take([place[name] for name in ids]))
    return forecast(recorded, asked, policy, arrivals)

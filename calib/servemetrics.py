"""What the gateway counts, and ``GET /metrics`` in Prometheus' text format.

Counting costs a request a few additions: plain numbers of one event loop, made into samples only when they are asked
for. Leaves to others: what is counted where (`calib.serve`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from calib import __version__

if TYPE_CHECKING:
    from calib.declog import DecisionLog
    from calib.engine.pool import EnginePool
    from calib.gateway import Observation
    from calib.limits import Admission

__all__ = ["SECONDS", "TOKENS", "Metrics"]

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)
"""Upper ends of the latency buckets: System 1 answers in milliseconds, a thought takes seconds to minutes."""
TOKENS = (64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
"""Upper ends of the buckets of thought tokens: the budgets that are tuned, and those between."""
_VERSIONS = 50
"""Policy versions whose decisions are still told apart; the oldest goes, so that reloads do not fill the memory."""


class _Histogram:
    """Values by bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper end and number of values up to it."""
        ends = [*(f"{float(bound)}" for bound in self.bounds), "+Inf"]
        return list(zip(ends, accumulate(self.counts), strict=True))


@dataclass(eq=False)
class Metrics(Collector):
    """Counters of one gateway.

    Attributes
    ----------
    admission, pool, log : optional
        Asked for their own numbers at each exposition.
    reloads : mapping of str to int
        ``ok`` and ``failed``: the counts of `calib.reload.PolicyWatch`.
    upstream_errors : Counter of (str, str)
        By stage (``system1``, ``system2``) and kind.
    degraded, refused, responses : Counter of str
        Degraded answers by reason, answers 429 by reason, answers by status code.
    """

    admission: Admission | None = None
    pool: EnginePool | None = None
    log: DecisionLog | None = None
    reloads: Mapping[str, int] = field(default_factory=lambda: {"ok": 0, "failed": 0})
    upstream_errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    degraded: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    responses: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        # by version, then by mode and whether a thought was made
        self._decisions: OrderedDict[str, Counter[tuple[str, bool]]] = OrderedDict()
        self._seconds = {thought: _Histogram(SECONDS) for thought in (False, True)}
        self._tokens = _Histogram(TOKENS)
        self._spent = 0
        self._cut = {"budget": 0, "deadline": 0}
        self._policy: dict[str, str] | None = None
        self._policy_since = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def serves(self, policy: Mapping[str, str]) -> None:
        """Remember the policy that is in force now, with its ``version``."""
        self._policy, self._policy_since = dict(policy), time.time()

    def decided(self, seen: Observation) -> None:
        """Count one decision."""
        version = seen.policy_version or "none"
        found = self._decisions.get(version)
        if found is None:
            found = self._decisions[version] = Counter()
            if len(self._decisions) > _VERSIONS:
                self._decisions.popitem(last=False)
        found[seen.mode, seen.think] += 1
        self._seconds[seen.think].add(seen.seconds)
        self._spent += seen.tokens
        if seen.think and not seen.degraded:
            self._tokens.add(seen.tokens)
            if not seen.finished:
                self._cut["deadline" if seen.closed else "budget"] += 1

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of ``GET /metrics`` for what the header Accept wants."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Samples now."""
        yield InfoMetricFamily("calib_build", "The calib that answers.", {"version": __version__})
        yield from self._of_decisions()
        yield _counts(
            "calib_degraded", "Answers of System 1 in place of a System 2 that failed.", "reason", self.degraded
        )
        errors = CounterMetricFamily(
            "calib_upstream_errors", "Calls to the model that failed.", labels=["stage", "kind"]
        )
        for (stage, kind), number in self.upstream_errors.items():
            errors.add_metric([stage, kind], number)
        yield errors
        yield _counts("calib_refused", "Requests answered 429.", "reason", self.refused)
        yield _counts("calib_responses", "Answers to POST /v1/decide by status.", "code", self.responses)
        yield from self._of_policy()
        if self.admission is not None:
            yield _gauge("calib_requests_in_flight", "Requests being answered.", self.admission.in_flight)
            yield _gauge("calib_requests_queued", "Requests that wait for a place.", self.admission.queued)
            yield _gauge("calib_requests_in_flight_limit", "Most requests answered at a time.", self.admission.places)
            yield _gauge("calib_requests_queued_limit", "Most requests that may wait.", self.admission.queue)
        if self.pool is not None:
            yield from _of_upstreams(self.pool)
        if self.log is not None:
            lines = {"written": self.log.written, "dropped": self.log.dropped}
            yield _counts("calib_log_lines", "Lines for the decision log.", "result", lines)

    def _of_decisions(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "calib_decisions",
            "Questions answered. Think share: thought=yes over all.",
            labels=["policy_version", "mode", "thought"],
        )
        for version, found in self._decisions.items():
            for (mode, thought), number in found.items():
                decisions.add_metric([version, mode, _YES[thought]], number)
        yield decisions
        seconds = HistogramMetricFamily(
            "calib_decision_seconds", "Seconds from request to answer, with and without a thought.", labels=["thought"]
        )
        for thought, one in self._seconds.items():
            seconds.add_metric([_YES[thought]], one.buckets(), one.total)
        yield seconds
        tokens = HistogramMetricFamily("calib_thought_length_tokens", "Tokens of a thought that was answered from.")
        tokens.add_metric([], self._tokens.buckets(), self._tokens.total)
        yield tokens
        yield CounterMetricFamily("calib_thought_tokens", "Tokens of all thoughts, also in vain.", self._spent)
        yield _counts("calib_thoughts_cut", "Thoughts that did not end by themselves.", "by", self._cut)

    def _of_policy(self) -> Iterator[Metric]:
        yield _counts("calib_policy_reloads", "Readings of the changed policy file.", "result", self.reloads)
        if self._policy is not None:
            yield InfoMetricFamily("calib_policy", "The policy in force.", self._policy)
            since = "When the policy in force was read, seconds since 1970."
            yield _gauge("calib_policy_loaded_timestamp_seconds", since, self._policy_since)


_YES = {False: "no", True: "yes"}


def _counts(name: str, about: str, label: str, numbers: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, number in numbers.items():
        family.add_metric([value], number)
    return family


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value)


def _of_upstreams(pool: EnginePool) -> Iterator[Metric]:
    up = GaugeMetricFamily("calib_upstream_up", "Whether a server of the model can be asked.", labels=["upstream"])
    busy = GaugeMetricFamily("calib_upstream_requests", "Calls in flight to a server.", labels=["upstream"])
    for member in pool.upstreams():
        up.add_metric([member.name], float(member.alive))
        busy.add_metric([member.name], member.open)
    yield up
    yield busy

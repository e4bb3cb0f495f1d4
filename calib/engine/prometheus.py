"""What a vLLM server counts: load, prefix cache and speculative decoding, from ``GET /metrics``.

A snapshot is taken before and after; their difference says what happened between. Counters of all engines behind one
address (data parallelism) are added up.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from calib.engine.base import AskFailed
from calib.engine.http import HttpClient

__all__ = ["ServerCounters", "Serving", "between", "parse", "snapshot"]

_LINE = re.compile(r"(?P<name>vllm:[a-z0-9_]+)(?:\{[^}]*\})? (?P<value>\S+)(?: \d+)?")
_COUNTERS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:generation_tokens": "generated",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}


@dataclass(frozen=True)
class ServerCounters:
    """One look at a server's counters.

    Attributes
    ----------
    running, waiting : float
        Requests now; NaN when the server does not tell.
    prefix_queries, prefix_hits : float
        Prompt tokens looked up in the prefix cache, and found there, since the server started.
    generated : float
        Tokens generated since the server started.
    drafts, draft_tokens, accepted_tokens : float
        Of speculative decoding, since the server started; NaN without it.
    """

    running: float = math.nan
    waiting: float = math.nan
    prefix_queries: float = math.nan
    prefix_hits: float = math.nan
    generated: float = math.nan
    drafts: float = math.nan
    draft_tokens: float = math.nan
    accepted_tokens: float = math.nan

    @property
    def speculates(self) -> bool:
        """Whether the server decodes speculatively."""
        return not math.isnan(self.drafts)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits; a server that does not tell is not known to be idle."""
        return self.running == 0 and self.waiting == 0


@dataclass(frozen=True)
class Serving:
    """What a server did between two looks. NaN where nothing happened or nothing is told.

    Attributes
    ----------
    prefix_hit_rate : float
        Share of the prompt tokens that came from the prefix cache, 0 to 1.
    acceptance_length : float
        Tokens a step of speculative decoding gave, 1 to ``acceptance_length_max``: 1 + accepted / drafts.
    acceptance_length_max : float
        1 + drafted tokens / drafts.
    acceptance_share : float
        Share of the drafted tokens that were accepted, 0 to 1.
    generated : float
        Tokens.
    """

    prefix_hit_rate: float
    acceptance_length: float
    acceptance_length_max: float
    acceptance_share: float
    generated: float

    def __str__(self) -> str:
        parts = []
        if not math.isnan(self.acceptance_length):
            parts.append(f"acceptance length {self.acceptance_length:.2f} of at most {self.acceptance_length_max:g}")
            parts.append(f"{self.acceptance_share:.0%} of the drafted tokens accepted, of at most 100%")
        if not math.isnan(self.prefix_hit_rate):
            parts.append(f"{self.prefix_hit_rate:.0%} of the prompt tokens from the prefix cache")
        return "; ".join(parts) or "nothing counted"


def parse(text: str) -> ServerCounters:
    """Counters in Prometheus' text format; what is not vLLM's is passed over."""
    sums: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            continue
        name = _COUNTERS.get(match["name"].removesuffix("_total"))
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if name is not None:
            sums[name] += value
    return ServerCounters(**sums)


async def snapshot(client: HttpClient) -> ServerCounters | None:
    """The server's counters now; None when it has no ``/metrics``."""
    try:
        return parse((await client.get_text("/metrics")).data)
    except AskFailed:
        return None


def between(before: ServerCounters, after: ServerCounters) -> Serving:
    """What happened between two snapshots of one server; all NaN when it was restarted, which sets counters to 0."""
    drafts, drafted, accepted, queries, hits, generated = (
        getattr(after, name) - getattr(before, name)
        for name in ("drafts", "draft_tokens", "accepted_tokens", "prefix_queries", "prefix_hits", "generated")
    )
    if any(value < 0 for value in (drafts, drafted, accepted, queries, hits, generated)):
        drafts = drafted = accepted = queries = hits = generated = math.nan
    return Serving(
        prefix_hit_rate=_ratio(hits, queries),
        acceptance_length=1 + _ratio(accepted, drafts),
        acceptance_length_max=1 + _ratio(drafted, drafts),
        acceptance_share=_ratio(accepted, drafted),
        generated=generated,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan

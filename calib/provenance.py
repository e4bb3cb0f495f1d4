"""`Provenance`: what is known of the model, the prompts and the server that a tuned policy comes from.

Pure. Leaves to others: reading it from a store (`calib.saved`), what is made of it (`calib.export`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Provenance"]

_PROMPT = ("protocol", "prompt", "labels", "rendering", "marks")
"""What an identity says of the texts that a model reads."""


@dataclass(frozen=True)
class Provenance:
    """Where a policy comes from; everything may be unknown.

    Attributes
    ----------
    identity : mapping
        All that can change an answer of the model (`calib.engine.base.EngineInfo`); empty when it is not known.
    start : tuple of str or None
        Command with which calib started the arm's server.
    """

    identity: Mapping[str, Any] = field(default_factory=dict)
    start: tuple[str, ...] | None = None

    @property
    def server(self) -> str | None:
        """``decide`` for the reference server's protocol, ``vllm`` for a stock vLLM, None where it is not known."""
        if self.identity.get("engine") == "vllm":
            return "vllm"
        return "decide" if "protocol" in self.identity else None

    @property
    def imported(self) -> bool:
        """Whether the outcomes were collected elsewhere: no server can be told to be their model's."""
        return "imported" in self.identity

    @property
    def prompt(self) -> str | None:
        """Fingerprint of the prompts under which the answers were collected."""
        texts = {name: self.identity[name] for name in _PROMPT if name in self.identity}
        if not texts:
            return None
        return hashlib.sha256(json.dumps(texts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def temperatures(self) -> Mapping[str, float]:
        """System 1's, by kind, under which it was collected; empty when they are not known."""
        told = self.identity.get("temperatures")
        return told if isinstance(told, Mapping) else {}

    @property
    def root(self) -> str | None:
        """Name of the weights, as a vLLM server told it."""
        return self._text("root")

    @property
    def served(self) -> str | None:
        """Served model name; of imported outcomes the name that they go by."""
        return self._text("model") or self._text("imported")

    def _text(self, name: str) -> str | None:
        value = self.identity.get(name)
        return value if isinstance(value, str) else None

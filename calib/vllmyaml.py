"""``vllm.yaml`` for ``vllm serve --config``: an arm of a stock vLLM server as it was when it was measured.

What is known comes from the command with which calib started the arm's server; what is not known is a comment and no
invention. Every text is quoted and escaped here, in the part of YAML that is also nearly JSON: a name can neither end
its quotes nor begin a key, nor, as a value, be taken for another option by vLLM's parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from calib.environment import is_issued, is_secret

__all__ = ["NEEDED", "StartFlags", "read_start", "speculates", "vllm_yaml"]

NEEDED: Mapping[str, str | int | bool] = {
    "logprobs-mode": "processed_logprobs",
    "max-logprobs": 256,
    "enable-prefix-caching": True,
}
"""What calib asks of a stock vLLM: one request reads all labels, and the cuts of a thought share its prefix."""

_WHY = {
    "logprobs-mode": "one request reads the probability of every answer letter",
    "max-logprobs": "up to 256 letters at once; vLLM's own limit is 20",
    "enable-prefix-caching": "question and thought are read again for each answer",
}
_OF_THE_PLACE = re.compile(r"host|port|uds|fd|config|api-key|root-path|ssl-.*|uvicorn-.*|disable-log-.*|allowed-.*")
"""Flags that say where a server listens and what it logs: they belong to the machine and not to the arm."""

_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*")
_NUMBER = re.compile(r"-\d+(\.\d+)?")

_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")

Value = str | int | bool | list[str] | dict[str, Any]


def vllm_yaml(arm: str, start: Sequence[str] | None, *, root: str | None = None, served: str | None = None) -> str:
    """Text of the file.

    Parameters
    ----------
    arm : str
    start : sequence of str or None
        The command that started the arm's server; None where it is not known.
    root : str, optional
        Name of the weights as the server told it (``/v1/models``).
    served : str, optional
        Served model name.
    """
    known = read_start(start) if start is not None else None
    lines = [
        "# vLLM as it has to serve for this policy: vllm serve --config vllm.yaml [--port 8000]",
        "# Flags on the command line win over this file. Threshold, mix and think budget are not vLLM's: the gateway",
        "# holds them (calib serve --policy policy.json --upstream URL).",
    ]
    if known is None:
        lines += _unknown(arm, start)
        if root is not None and "/" in root:  # a folder was cut down to its name, which does not find it
            lines.append(_entry("model", root))
            if served not in (None, root):
                lines.append(_entry("served-model-name", str(served)))
        else:
            lines.append(f"# model: not known{'' if served is None else f'; it was served as {_quoted(served)}'}")
        lines.append("# speculative-config: not known; write what the arm was started with, if it speculates")
    else:
        lines.append(f"# From the command with which calib started the arm {_quoted(arm)}.")
        lines += [_entry(name, value) for name, value in known.values.items()]
        lines += [f"# left out: {text}" for text in known.left_out]
        if not speculates(start):
            lines.append("# speculative-config: none, the arm was started without")
    given = {} if known is None else known.values
    for name, value in NEEDED.items():
        if name not in given and f"no-{name}" not in given:
            lines.append(f"# {_WHY[name]}")
            lines.append(_entry(name, value))
    return "\n".join(lines) + "\n"


def _unknown(arm: str, start: Sequence[str] | None) -> list[str]:
    if start is None:
        why = "calib did not start its server"
    else:
        why = f"it was started by {_quoted(PurePath(start[0]).name)}, and what that starts does not show"
    return [f"# How the arm {_quoted(arm)} was started is not known: {why}."]


class StartFlags:
    """What a command says: a value for each flag, and in words what cannot stand in the file."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.left_out: list[str] = []

    def add(self, name: str, values: Sequence[str]) -> None:
        """Keep a flag with the words behind it, or say why not."""
        name, dot, inner = name.partition(".")
        name = name.replace("_", "-") + dot + inner  # vLLM takes both, but for what stands behind a dot
        if _OF_THE_PLACE.fullmatch(name):
            return
        if is_issued(" ".join(values)) or any(is_secret(name, value) for value in values):
            self.left_out.append(f"--{name}, which looks like a secret: give it in the environment")
        elif any(value.startswith("-") and not _NUMBER.fullmatch(value) for value in values):
            self.left_out.append(f"--{name}, whose value would read as another option")
        else:
            self.values.pop(name, None)  # the last one counts, also against its no- form
            self.values[name] = True if not values else _plain(values[0]) if len(values) == 1 else list(values)


def read_start(start: Sequence[str]) -> StartFlags | None:
    """Flags of a command that starts ``vllm serve``; None when it starts something else, a script for instance."""
    words = list(start)
    program = PurePath(words[0]).name if words else ""
    if program == "vllm" and words[1:2] == ["serve"]:
        rest = words[2:]
    elif program.startswith("python") and words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
        rest = words[3:]
    else:
        return None
    found = StartFlags()
    if rest and not rest[0].startswith("-"):
        found.add("model", rest[:1])
        rest = rest[1:]
    for flag, values in _options(rest):
        if _FLAG.fullmatch(flag):
            found.add(flag[2:], values)
        elif flag in _SHORT:
            found.add(_SHORT[flag], values)
        else:
            found.left_out.append(f"{_quoted(' '.join([flag, *values]))}: write its long name")
    return found


def speculates(start: Sequence[str] | None) -> bool | None:
    """Whether a command starts vLLM with speculative decoding; None where that does not show."""
    known = read_start(start) if start is not None else None
    return None if known is None else any(name.partition(".")[0] == "speculative-config" for name in known.values)


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words up to the next."""
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            if flag or values:
                yield flag, values
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if flag or values:
        yield flag, values


def _plain(text: str) -> Value:
    """An object as it is nested in a config; anything else is the text that vLLM would have got."""
    if text.startswith("{"):
        try:
            found = json.loads(text, parse_constant=_refused)
        except (ValueError, RecursionError):
            return text
        if isinstance(found, dict):
            return found
    return text


def _refused(constant: str) -> None:
    raise ValueError(constant)


def _entry(name: str, value: Value) -> str:
    return f"{_quoted(name) if name.lower() in _YAML_WORDS else name}: {_written(value)}"


def _written(value: Any) -> str:
    """A value in the flow style of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(str(key))}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return _quoted(value)
    text = json.dumps(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML takes 1e-05 for a text
    return text


def _quoted(text: str) -> str:
    """A text in double quotes, in one line of ASCII."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if " " <= char <= "~":
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

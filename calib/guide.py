"""``README.md`` of an export: how to use each file, who holds which knob, what is promised, what to type.

Names from data stand in it as code, in one line, without what could end that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calib.history import SIGNATURE
from calib.knobs import Knob
from calib.policy import Policy

__all__ = ["code", "guide"]

_FILES: Mapping[str, str] = {
    "policy.json": "The policy with its evidence. `calib serve`, `calib verify` and `calib watch` read it; the gateway "
    "reads it again when it changes.",
    "serve.env": "Environment of the reference server (`serve.sh`, `serve_decide.py`), read when it starts. It holds "
    "the default policy only, and no think budget: no variable sets one.",
    "decide-defaults.json": "Fields that a client adds to each `POST /v1/decide` when no gateway does. A deadline is "
    "never among them: the reference server drops fields that it does not know without a word.",
    "calibration.json": "Temperatures of System 1 for the reference server, named by `JEV_DECIDE_CALIBRATION`. Never "
    "together with a gateway: both would apply them.",
    "vllm.yaml": "Flags of a stock vLLM server. It holds how the model is served, the gateway in front of it holds "
    "the policy.",
    "README.md": "This text.",
}

_VERDICTS = {
    "certified": "Each limit passed an exact test on questions that had no part in the search.",
    "met": "Each limit holds on the questions that were looked at. That is no guarantee for new ones.",
    "not_met": "The limits do not hold.",
}


def guide(
    content: Mapping[str, Any], policy: Policy, held: Sequence[Knob], files: Sequence[str], refused: Sequence[str]
) -> str:
    """Text of the file.

    Parameters
    ----------
    content : mapping
        What ``policy.json`` says.
    policy : Policy
    held : sequence of Knob
    files : sequence of str
        Names of what is written beside it.
    refused : sequence of str
        Why there is no ``serve.env``.
    """
    return "\n".join(_lines(content, policy, held, files, refused)) + "\n"


def _lines(
    content: Mapping[str, Any], policy: Policy, held: Sequence[Knob], files: Sequence[str], refused: Sequence[str]
) -> Iterator[str]:
    yield f"<!-- {SIGNATURE}: the next export replaces this file -->"
    yield f"# Policy {code(content.get('name'))} for {code(content.get('model'))}"
    yield ""
    yield from _promise(content)
    yield "## Who holds each knob"
    yield ""
    yield "| knob | value | held by | how |"
    yield "|---|---|---|---|"
    for knob in held:
        yield f"| {knob.knob} | {code(knob.value)} | {knob.holder} | {knob.how} |"
    yield ""
    nobody = [knob.knob for knob in held if knob.holder == "nobody"]
    if nobody:
        yield f"**Not done: nobody holds {', '.join(nobody)} yet.** Without that the promise does not hold."
        yield ""
    yield "## Files"
    yield ""
    for name in (*files, "README.md"):
        yield f"- `{name}`: {_FILES[name]}"
    if refused:
        yield f"- No `serve.env`: {'; '.join(map(_in_line, refused))}."
    yield ""
    yield from _typing(content, policy, files)


def _promise(content: Mapping[str, Any]) -> Iterator[str]:
    yield "## What is promised, and how sure that is"
    yield ""
    verdict = content.get("verdict")
    targets = [target for target in content.get("targets") or () if isinstance(target, Mapping)]
    if targets:
        yield f"Verdict: **{_plain(verdict)}**. {_VERDICTS.get(str(verdict), '')}".rstrip()
        yield ""
        yield "| limit | value | interval | holds | certified |"
        yield "|---|---|---|---|---|"
        for target in targets:
            low, high = target.get("interval") or (None, None)
            yield (
                f"| {code(target.get('target'))} | {_number(target.get('value'))} | {_number(low)} to {_number(high)} "
                f"| {_yes(target.get('met'))} | {_yes(target.get('certified'))} |"
            )
        yield ""
        yield "Seconds, and shares from 0 to 1. It is about questions like those that were collected, at that load."
    else:
        yield "No limit was asked for, so none is promised."
    marks = content.get("marks") or ()
    if "estimated" in marks:
        yield "Latency is **estimated**, not measured: `calib verify` measures it."
    if "simulated" in marks:
        yield "The numbers are of a **simulated** model and say nothing about a real server."
    yield ""


def _typing(content: Mapping[str, Any], policy: Policy, files: Sequence[str]) -> Iterator[str]:
    name = _word(content.get("name"), "NAME")
    arm = _word(policy.arm, "ARM")
    yield "## What to type"
    yield ""
    yield "In this folder; SERVER is the address of the model's server, GATEWAY that of `calib serve`:"
    yield ""
    yield "```sh"
    lines = {
        "calib serve --policy policy.json --upstream SERVER": "the gateway: holds every knob; with the "
        "--prompt-template and --sampling that calib collect had, if any",
        f"calib export {name} --check GATEWAY": "is it live, knob by knob",
        f"calib verify policy.json --arm {arm}=GATEWAY": "predicted beside measured, on held-out questions",
        "calib watch LOG --policy policy.json": "is the promise kept; LOG of calib serve --log",
        f"calib diff . {name}": "what exporting it again would change",
        "calib rollback . --list": "earlier states",
        "calib rollback . --note 'why'": "back to the one before",
    }
    if "vllm.yaml" in files:
        lines = {"vllm serve --config vllm.yaml --port 8000": "a stock vLLM"} | lines
    if "serve.env" in files:
        lines = {"set -a; . ./serve.env; set +a; bash serve.sh": "the reference server, with what it can hold"} | lines
    width = max(map(len, lines))
    for line, why in lines.items():
        yield f"{line.ljust(width)}  # {why}"
    yield "```"


def code(value: object) -> str:
    """A text of data as inline code of a table cell."""
    return f"`{_in_line(value)}`"


def _plain(value: object) -> str:
    """A text of data as words, without what would be markup."""
    return _in_line(value).translate({ord(mark): "?" for mark in "<>*_[]"})


def _in_line(value: object) -> str:
    """One line without what ends code or a cell."""
    text = "".join(char if char.isprintable() else "?" for char in str(value))
    return text.translate({ord("`"): "'", ord("|"): "¦"}) or "-"


def _word(value: object, otherwise: str) -> str:
    """A text as a word of a command line; a placeholder for one that does not stand in a line."""
    text = str(value)
    return shlex.quote(text) if text and text.isprintable() and "`" not in text else otherwise


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else "-"


def _yes(value: object) -> str:
    return "yes" if value is True else "no"

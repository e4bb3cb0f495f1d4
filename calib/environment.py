"""Environment variables of a server: which hold secrets, what ``$NAME`` stands for, what a server is started with.

Leaves to others: which file or option says so (`calib.arms`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from calib.errors import CalibError

__all__ = ["Environment", "dangling", "flags", "is_issued", "is_reference", "is_secret", "is_variable", "resolve"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(rf"\$(?:\$|(?P<plain>{_VARIABLE.pattern})|\{{(?P<braced>{_VARIABLE.pattern})\}})")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
_SECRET_PART = re.compile(r".*(KEYS?|TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?)|AUTH|AUTHORIZATION")
_NO_SECRET_LAST = ("PATH", "FILE", "DIR", "HOME", "ENV")
_ISSUED = re.compile(r"(?<![A-Za-z0-9_])((hf|gh[po]|github_pat)_|sk-|nvapi-)[\w-]{16,}")
"""How keys begin that well-known places issue."""

_LOGIN = re.compile(r"\w+://[^/@\s]*:[^/@\s]+@")


@dataclass(frozen=True)
class Environment:
    """What a server is started with.

    Attributes
    ----------
    values : dict of str to str
        The whole environment, references resolved. It is never shown or logged.
    secrets : tuple of str
        Those values in it that must not show where the server's output does, longest first.
    withheld : tuple of str
        Names of calib's own variables that look like secrets and are therefore not passed on.
    """

    values: dict[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    withheld: tuple[str, ...]

    def masked(self, text: str) -> str:
        """The text without the secrets: a server may print what it was given."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def resolve(
    around: Mapping[str, str], env: Mapping[str, str], env_from: Sequence[str] = (), *, where: str = ""
) -> Environment:
    """What a server is started with.

    Parameters
    ----------
    around : mapping of str to str
        calib's own environment. It is passed on, all but what looks like a secret.
    env : mapping of str to str
        Set on top; ``$NAME`` and ``${NAME}`` stand for variables of ``around``, ``$$`` for a dollar.
    env_from : sequence of str
        Variables of ``around`` that are passed on whatever they look like.
    where : str
        What messages begin with.

    Raises
    ------
    CalibError
        A named variable is not set.
    """
    values = {name: value for name, value in around.items() if not is_secret(name, value)}
    held_back = around.keys() - values.keys()
    secrets: set[str] = set()

    def look_up(name: str, field: str) -> str:
        if name not in around:
            raise CalibError(f"{where} {field}: the variable {name} is not set; set it: export {name}=...".lstrip())
        if is_secret(name, around[name]):
            secrets.add(around[name])
        return around[name]

    def resolved(name: str, text: str) -> str:
        def one(match: re.Match[str]) -> str:
            referred = match["plain"] or match["braced"]
            return look_up(referred, f"env.{name}") if referred else "$"

        return _REFERENCE.sub(one, text)

    values |= {name: look_up(name, "env_from") for name in env_from}
    values |= {name: resolved(name, text) for name, text in env.items()}
    secrets |= {values[name] for name in env if is_secret(name, values[name])}
    return Environment(values, tuple(sorted(secrets, key=len, reverse=True)), tuple(sorted(held_back - values.keys())))


def is_variable(name: str) -> bool:
    """Whether it can be the name of a variable, and is not a well-known kind of key itself."""
    return bool(_VARIABLE.fullmatch(name)) and not is_issued(name)


def is_reference(text: str) -> bool:
    """Whether a text is ``$NAME`` or ``${NAME}`` and nothing else."""
    return text != "$$" and bool(_REFERENCE.fullmatch(text))


def dangling(text: str) -> str:
    """The first ``$`` that names no variable, with what follows it; empty when there is none."""
    rest = _REFERENCE.sub("", text)
    return rest[rest.index("$") :][:2] if "$" in rest else ""


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's name says that it holds a secret, or its value is a URL with a password.

    ``TOKENIZERS_PARALLELISM`` and ``HF_TOKEN_PATH`` do not say so; a switch (empty, 0 or 1) is none either.
    """
    if _LOGIN.search(value):
        return True
    parts = name.upper().replace("-", "_").split("_")
    if parts[-1] in _NO_SECRET_LAST or value.strip() in ("", "0", "1"):
        return False
    return any(_SECRET_PART.fullmatch(part) for part in parts)


def is_issued(text: str) -> bool:
    """Whether a text holds what begins as the keys of well-known places do."""
    return bool(_ISSUED.search(text))


def flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Name and value of each argument: ``--name value``, ``--name=value``, ``NAME=value``, else ("", argument)."""
    found = []
    for place, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        if equals and (_VARIABLE.fullmatch(name) or _FLAG.fullmatch(name)):
            found.append((name, value))
        elif _FLAG.fullmatch(text) and not following.startswith("-"):
            found.append((text, following))
        else:
            found.append(("", text))
    return found

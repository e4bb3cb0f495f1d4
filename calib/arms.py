"""Arms, ways of serving one model: `arms.toml` read and checked, and the same `Arm` from ``--arm NAME=URL``.

A file never holds a secret: one is refused with what to write instead, and the variables that ``env`` and ``env_from``
name are looked up only when a server is started (`Arm.environment`). Leaves to others: starting and stopping
(`calib.launch`), what a server is (`calib.doctor`, `calib.engine`).
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from yarl import URL

from calib.engine.http import HttpClient, shorten
from calib.environment import Environment, dangling, flags, is_issued, is_reference, is_secret, is_variable, resolve
from calib.errors import CalibError
from calib.resources import find

__all__ = ["EXAMPLES", "Arm", "EngineName", "arm_of", "example", "read_arms", "write_example"]

EngineName = Literal["auto", "decide", "vllm"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

EXAMPLES: Mapping[str, str] = {
    "running": "arms.toml",
    "gev": "arms-gev.toml",
    "vllm-mtp": "arms-vllm-mtp.toml",
    "vllm-draft": "arms-vllm-draft.toml",
}
"""File of each commented example, in ``data/example``."""

READY_SECONDS, STOP_SECONDS = 1200.0, 30.0

_NAME = re.compile(r"\w[\w.+-]{0,63}")
_HUGE = 1e9
_SHELLS = ("bash", "sh", "dash", "zsh")


@dataclass(frozen=True)
class Arm:
    """A way of serving the model.

    Attributes
    ----------
    name : str
    urls : tuple of str
        Addresses that share its work, without a trailing ``/v1``. One from the command line may hold a login:
        show `shown_urls`.
    engine : {"auto", "decide", "vllm"}
        How it is asked; ``auto`` finds out.
    start : tuple of str or None
        Command that starts its server, run without a shell; None when the server runs already.
    env : mapping of str to str
        Set for that server; ``$NAME`` and ``${NAME}`` stand for variables of calib's environment, ``$$`` for a dollar.
    env_from : tuple of str
        Variables passed on as they are. Others are passed on too, unless they look like secrets.
    folder : Path
        Where ``start`` runs.
    ready_seconds, stop_seconds : float
        How long it may load; how long it may take to end before it is killed.
    log : Path or None
        Where its output goes; None for ``NAME.log`` in a folder of the caller's.
    gpu_free_gib : float or None
        Memory that must be free on its GPU, GiB; 0 does not look, None takes what vLLM would reserve.
    concurrency : int or None
        Requests in flight; None leaves that to the command.
    api_key_env : str or None
        NAME of the environment variable that holds the server's API key.
    origin : str
        Where it was read, for messages: ``arms.toml: [arms.base]``.
    """

    name: str
    urls: tuple[str, ...] = field(repr=False)
    engine: EngineName = "auto"
    start: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_from: tuple[str, ...] = ()
    folder: Path = Path()
    ready_seconds: float = READY_SECONDS
    stop_seconds: float = STOP_SECONDS
    log: Path | None = None
    gpu_free_gib: float | None = None
    concurrency: int | None = None
    api_key_env: str | None = None
    origin: str = field(default="", compare=False)

    @property
    def shown_urls(self) -> tuple[str, ...]:
        """The addresses without logins."""
        return tuple(HttpClient(url).url.rstrip("/") for url in self.urls)

    def environment(self, environ: Mapping[str, str] | None = None) -> Environment:
        """Resolve what the server is started with.

        Parameters
        ----------
        environ : mapping of str to str, optional
            Where variables are looked up; by default this process's environment.

        Raises
        ------
        CalibError
            A named variable is not set.
        """
        return resolve(os.environ if environ is None else environ, self.env, self.env_from, where=self.origin)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: no login, and ``env`` with its references as written."""
        return {
            "name": self.name,
            "urls": list(self.shown_urls),
            "engine": self.engine,
            "start": None if self.start is None else list(self.start),
            "env": dict(self.env),
            "env_from": list(self.env_from),
            "concurrency": self.concurrency,
            "api_key_env": self.api_key_env,
        }


# --- the command line -------------------------------------------------------------------------------------------------


def arm_of(name: str, url: str, *, api_key_env: str | None = None) -> Arm:
    """The arm of ``--arm NAME=URL``: a running server, or several (``URL,URL``) that share its work.

    Raises
    ------
    CalibError
        A name or an address that cannot be used.
    """
    where = f"--arm {name}"
    if not _NAME.fullmatch(name):
        raise CalibError(f"--arm: {_bad_name(name)}")
    texts = [text.strip() for text in url.split(",") if text.strip()]
    if not texts:
        raise CalibError(f"{where}: expected an address: --arm {name}=http://127.0.0.1:8000")
    return Arm(name, _urls(texts, where), api_key_env=api_key_env, origin=where)


# --- arms.toml --------------------------------------------------------------------------------------------------------


def read_arms(path: str | os.PathLike[str]) -> tuple[Arm, ...]:
    """Read the arms of a file, in its order.

    Parameters
    ----------
    path : path
        TOML with one table ``[arms.NAME]`` for each arm. Relative folders and logs in it count from where it stands.

    Raises
    ------
    CalibError
        What is wrong, with file, table and field, and what to write.
    """
    file = Path(path)
    document = _parsed(file)
    for name in document:
        if name != "arms":
            raise CalibError(f"{file}: {_stray(name, document[name])}")
    tables = document.get("arms")
    if not isinstance(tables, dict) or not tables:
        raise CalibError(f'{file}: there is no arm; write one as:\n\n[arms.base]\nurl = "http://127.0.0.1:8000"')
    arms = []
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise CalibError(f"{file}: arms.{name} should be a table; write [arms.NAME] above the fields of each arm")
        if not _NAME.fullmatch(name):
            raise CalibError(f"{file}: {_bad_name(name)}")
        arms.append(_Table(file, name, values).arm())
    _check_apart(file, arms)
    return tuple(arms)


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise CalibError(f"there is no file {file}; calib init writes a commented example") from None
    except OSError as error:
        raise CalibError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CalibError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise CalibError(f'{file} is not TOML: {error}. Texts stand in quotes: url = "http://127.0.0.1:8000"') from None


def _stray(name: str, value: object) -> str:
    if isinstance(value, dict) and value.keys() & _FIELDS.keys():
        return f"unknown table [{name}]; an arm's table is called [arms.{name}]"
    if name in _FIELDS:
        return f"{name} stands outside of an arm; write it below a line [arms.NAME]"
    return f"unknown {'table' if isinstance(value, (dict, list)) else 'field'} {name!r}; expected only [arms.NAME]"


def _bad_name(name: str) -> str:
    return f"{name!r} is no name for an arm; use letters, digits and . _ + - (at most 64), such as base or mtp"


def _check_apart(file: Path, arms: Sequence[Arm]) -> None:
    """Two arms whose servers both run already are two servers."""
    seen: dict[str, str] = {}
    for arm in arms:
        if arm.start is not None:
            continue
        for url in arm.urls:
            if url in seen:
                raise CalibError(
                    f"{file}: the arms {seen[url]!r} and {arm.name!r} both name {url}, and calib starts neither: one "
                    "server would be measured twice. Give each its own address, or a start"
                )
            seen[url] = arm.name


_FIELDS: Mapping[str, str] = {
    "url": '"http://127.0.0.1:8000"',
    "urls": '["http://gpu1:8000", "http://gpu2:8000"]',
    "engine": '"auto"',
    "start": '["bash", "serve.sh"]',
    "env": '{ MTP = "1" }',
    "env_from": '["HF_TOKEN"]',
    "folder": '"GEV-26B-Decide"',
    "ready_seconds": "1200",
    "stop_seconds": "30",
    "log": '"logs/base.log"',
    "gpu_free_gib": "70",
    "concurrency": "32",
    "api_key_env": '"SERVER_KEY"',
}
"""Every field, with how it is written."""

_OF_START = ("env", "env_from", "folder", "ready_seconds", "stop_seconds", "log", "gpu_free_gib")


class _Table:
    """The table of one arm, while it is read. No message shows a value that may be a secret."""

    def __init__(self, file: Path, name: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self.name = name
        self.values = values
        self.where = f"{file}: [arms.{name if re.fullmatch('[A-Za-z0-9_-]+', name) else repr(name)}]"

    def arm(self) -> Arm:
        self._check_fields()
        start = self._start()
        if start is None:
            for name in _OF_START:
                if name in self.values:
                    raise self._error(name, "is for a server that calib starts, and this arm has no start; add one")
        folder = self.file.resolve().parent
        env, env_from = self._env(), self._env_from()
        urls = self._urls()
        if start is not None:
            self._check_port(start, env, urls)
        log = self._path("log", folder)
        return Arm(
            name=self.name,
            urls=urls,
            engine=self._engine(),
            start=start,
            env=env,
            env_from=env_from,
            folder=self._path("folder", folder) or folder,
            ready_seconds=self._number("ready_seconds", READY_SECONDS, above=True),
            stop_seconds=self._number("stop_seconds", STOP_SECONDS),
            log=log,
            gpu_free_gib=self._number("gpu_free_gib", 0.0) if "gpu_free_gib" in self.values else None,
            concurrency=self._concurrency(),
            api_key_env=self._api_key_env(),
            origin=self.where,
        )

    def _error(self, name: str, text: str) -> CalibError:
        return CalibError(f"{self.where} {name}: {text}")

    def _expected(self, name: str, what: str) -> CalibError:
        return self._error(name, f"expected {what}; write for instance: {name} = {_FIELDS[name]}")

    def _check_fields(self) -> None:
        for name in self.values:
            if name not in _FIELDS:
                close = difflib.get_close_matches(name.lower(), _FIELDS, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise CalibError(f"{self.where}: unknown field {name!r}; {hint}Known: {', '.join(_FIELDS)}")

    def _text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise self._expected(name, "a text")
        return value.strip()

    def _texts(self, name: str) -> tuple[str, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
            raise self._expected(name, "a list of texts, not an empty one")
        return tuple(value)

    def _number(self, name: str, default: float, *, above: bool = False) -> float:
        value = self.values.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < _HUGE or (above and value == 0):
            raise self._expected(name, "a number above 0" if above else "a number, 0 or more")
        return float(value)

    def _path(self, name: str, base: Path) -> Path | None:
        text = self._text(name)
        return None if text is None else base / Path(text).expanduser()

    def _urls(self) -> tuple[str, ...]:
        if ("url" in self.values) == ("urls" in self.values):
            raise CalibError(
                f"{self.where}: give either url or urls, one of both; write for instance: url = {_FIELDS['url']}"
            )
        one, several = self._text("url"), self._texts("urls")
        where = f"{self.where} {'url' if one else 'urls'}"
        urls = _urls([one] if one else several or (), where)
        for url in urls:
            if URL(url).user is not None:
                raise CalibError(
                    f"{where}: a login does not belong in this file. Leave out user:password@, put a bearer token in "
                    'an environment variable and name that: api_key_env = "SERVER_KEY"'
                )
        return urls

    def _engine(self) -> EngineName:
        engine = self._text("engine") or "auto"
        if engine not in ENGINES:
            close = difflib.get_close_matches(engine.lower(), ENGINES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise self._error("engine", f"{shorten(engine, 40)!r} is not one of {', '.join(ENGINES)}{hint}")
        return engine

    def _start(self) -> tuple[str, ...] | None:
        value = self.values.get("start")
        if isinstance(value, str):
            raise self._error("start", f"expected a list, one text for each argument: start = {_as_list(value)}")
        start = self._texts("start")
        if start is None:
            return None
        if not start[0].strip():
            raise self._expected("start", "a program first")
        if secret := _given_away(start):
            raise self._error(
                "start",
                f"{secret} looks like a secret, and arguments show in every list of processes. Leave it out, and hand "
                'it over in the environment: env_from = ["NAME"], or for vLLM env = { VLLM_API_KEY = "$SERVER_KEY" }',
            )
        for text in start[1:]:
            if is_reference(text) and Path(start[0]).name not in _SHELLS:
                raise self._error(
                    "start",
                    f"runs without a shell, so {text} would stay as it is. Write the value, or call a script: "
                    f"start = {_FIELDS['start']}",
                )
        return start

    def _env(self) -> dict[str, str]:
        values = self.values.get("env", {})
        if not isinstance(values, dict):
            raise self._expected("env", "a table")
        env = {}
        for count, (name, value) in enumerate(values.items(), start=1):
            place = f"env.{name}"
            if not is_variable(name):
                raise self._error(
                    "env", f"entry {count} has no name for an environment variable, such as MAX_MODEL_LEN"
                )
            text = str(value) if type(value) in (int, float) else value  # a number is what it looks like
            if not isinstance(text, str) or "\0" in text:
                raise self._error(place, f'expected a text: env = {{ {name} = "1" }}')
            if is_issued(text) or (is_secret(name, text) and not is_reference(text)):
                raise self._error(
                    place,
                    "looks like a secret, and secrets never stand in this file. Set it in the shell "
                    f'(export {name}=...) and name it here: env = {{ {name} = "${name}" }}, or env_from = ["{name}"]',
                )
            if dollar := dangling(text):
                raise self._error(place, f"{dollar} names no variable; write $NAME or ${{NAME}}, and $$ for a dollar")
            env[name] = text
        return env

    def _env_from(self) -> tuple[str, ...]:
        names = self._texts("env_from") if self.values.get("env_from") != [] else ()
        for place, name in enumerate(names or (), start=1):
            if not is_variable(name):
                raise self._error("env_from", f"entry {place} is no name of a variable; write names only, no values")
            if name in self.values.get("env", {}):
                raise self._error("env_from", f"{name} stands in env too; give it once")
        return names or ()

    def _api_key_env(self) -> str | None:
        name = self._text("api_key_env")
        if name is not None and not is_variable(name):
            raise self._error(
                "api_key_env",
                "expected the NAME of an environment variable, not the key itself; write: "
                f"api_key_env = {_FIELDS['api_key_env']}, and in the shell: export SERVER_KEY=...",
            )
        return name

    def _concurrency(self) -> int | None:
        value = self.values.get("concurrency")
        if value is not None and (type(value) is not int or value < 1):
            raise self._expected("concurrency", "a whole number, 1 or more")
        return value

    def _check_port(self, start: Sequence[str], env: Mapping[str, str], urls: Sequence[str]) -> None:
        """A server that listens elsewhere would load for minutes and never be seen.

        Only of commands whose port is surely the address's: not of a container, whose port may be mapped.
        """
        program = Path(start[0]).name
        if program in _SHELLS:
            given, where = env.get("PORT", ""), "env.PORT"
        elif program == "vllm" or program.startswith("python"):
            given, where = dict(flags(start)).get("--port", ""), "start: --port"
        else:
            return
        local = [URL(url) for url in urls if URL(url).host in ("127.0.0.1", "localhost", "::1")]
        if given.isdecimal() and len(local) == len(urls) and int(given) not in [url.port for url in local]:
            raise CalibError(
                f"{self.where} {where} is {given}, and the address is {urls[0]}; let both name the same port"
            )


# --- addresses --------------------------------------------------------------------------------------------


def _urls(texts: Sequence[str], where: str) -> tuple[str, ...]:
    """Checked addresses, each without ``/v1`` or ``/v1/decide`` at its end."""
    urls: list[str] = []
    for text in texts:
        root = text.strip().rstrip("/").removesuffix("/decide").removesuffix("/v1")
        try:
            shown = HttpClient(root).url
        except CalibError as error:
            raise CalibError(f"{where}: {error}") from None
        if root in urls:
            raise CalibError(f"{where}: {shown} stands there twice; name each server once")
        urls.append(root)
    return tuple(urls)


def _given_away(start: Sequence[str]) -> str:
    """What holds a secret among a command's arguments, by its name; empty when nothing does."""
    words = list(start)
    if Path(start[0]).name in _SHELLS:  # a script in an argument
        words += [word.strip("\"';") for text in start[1:] for word in text.split()]
    for name, value in flags(words):
        if is_issued(value) or (is_secret(name.lstrip("-"), value) and not is_reference(value.strip("\"'"))):
            return name or "an argument"
    return ""


def _as_list(command: str) -> str:
    """A command line as a list in TOML, to be copied; a general one when it cannot or should not be shown."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words or _given_away(words) or any("'" in word or not word.isprintable() for word in words):
        return _FIELDS["start"]
    return "[" + ", ".join(f"'{word}'" if '"' in word or "\\" in word else f'"{word}"' for word in words) + "]"


# --- examples ---------------------------------------------------------------------------------------------------------


def example(kind: str) -> str:
    """Text of a commented ``arms.toml``.

    Parameters
    ----------
    kind : {"running", "gev", "vllm-mtp", "vllm-draft"}
        Servers that run already; GEV by its ``serve.sh``; a model on stock vLLM, plain and with MTP, or plain and with
        a draft model.

    Raises
    ------
    CalibError
        Another kind.
    """
    if kind not in EXAMPLES:
        close = difflib.get_close_matches(kind, EXAMPLES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise CalibError(f"there is no example {kind!r}; {hint}There are: {', '.join(EXAMPLES)}")
    return find(f"data/example/{EXAMPLES[kind]}").read_text("utf-8")


def write_example(kind: str, path: str | os.PathLike[str] = "arms.toml", *, force: bool = False) -> Path:
    """Write an example and return where.

    Raises
    ------
    CalibError
        The file is there already and ``force`` is not set; it cannot be written; an unknown kind.
    """
    file = Path(path)
    text = example(kind)
    if file.exists() and not force:
        raise CalibError(f"{file} is there already; write over it with --force, or name another file")
    try:
        descriptor, name = tempfile.mkstemp(dir=file.resolve().parent, prefix=f".{file.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as written:
                written.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CalibError(f"{file} cannot be written: {error.strerror}", exit_code=1) from None
    return file

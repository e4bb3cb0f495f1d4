"""JSON over HTTP with patience: retries, back-off, seconds counted from the first attempt, and no secret in any text.

Answers come whole, or as a stream of events that are handed on one by one.

Owns what every engine behind a URL shares. Leaves to others: what is asked and whether the answer is good (`decide`,
`vllm`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from yarl import URL

from calib.engine.base import AskFailed
from calib.errors import CalibError

__all__ = ["UNREACHABLE", "HttpClient", "Reply", "shorten"]

UNREACHABLE = frozenset({"connection", "http_502", "http_503", "http_504"})
"""Reasons that blame the way to the server, not the question."""

_AGAIN = frozenset({429, 500, 502, 503, 504})
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_LONGEST_RETRY_AFTER = 300.0
_CONNECT_TIMEOUT = 10.0
_KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept. Below the 5 s after which uvicorn hangs up, or a request could meet that."""
_ERROR_BODY, _DETAIL = 65_536, 200


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed answer.

    Attributes
    ----------
    data : JSON value
        May hold NaN and Infinity, which Python's reader lets through: the caller checks numbers.
    seconds : float
        Wall seconds from the first attempt until the answer was read.
    attempts : int
        Requests sent.
    """

    data: Any
    seconds: float
    attempts: int


class _Flaw(Exception):  # noqa: N818 - becomes an AskFailed once the patience is over
    """Why one attempt gave no answer, and whether another may."""

    def __init__(self, reason: str, detail: str, *, again: bool = True, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail
        self.again = again
        self.retry_after = retry_after


class _NotJson(Exception):  # noqa: N818 - what a body turned out to be
    """A body is not JSON."""


_Read = Callable[[aiohttp.ClientResponse], Awaitable[Any]]
"""Reads an answer of status 200."""


class HttpClient:
    """A keep-alive session with one server.

    Parameters
    ----------
    base_url : str
        ``http://host:port``, optionally with a path. ``user:password@`` is used and never shown.
    timeout : float, default 600
        Seconds that one attempt may take.
    retries : int, default 4
        Further attempts after status 429, 500, 502, 503 or 504, a failed connection, a timeout, or an answer that is
        cut or not JSON. Any other status is final.
    api_key_env : str, optional
        NAME of the environment variable that holds the bearer token.
    connections : int, default 0
        Most connections at a time; 0 for no limit. A limit below the number of requests in flight makes requests
        wait here, and that wait counts as latency.
    rng : random.Random, optional
        Source of the jitter.
    sleep, now : callable
        Waiting in seconds, and the time of day in seconds since 1970; tests replace them.

    Raises
    ------
    CalibError
        An address that cannot be used, or an environment variable that is absent or empty.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = 600.0,
        retries: int = 4,
        api_key_env: str | None = None,
        connections: int = 0,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        if not timeout > 0 or retries < 0 or connections < 0:
            raise CalibError(
                "timeout must be above 0, retries and connections 0 or more; "
                f"got {timeout}, {retries} and {connections}"
            )
        url = _checked(base_url)
        self.url = str(url.with_user(None))
        self.timeout = timeout
        self.retries = retries
        self._base = self.url.rstrip("/")
        self._secrets: tuple[str, ...] = ()
        self._headers = {"Accept": "application/json"}
        if url.user is not None:
            basic = aiohttp.encode_basic_auth(url.user, url.password or "")
            self._secrets = tuple(part for part in (url.password, basic.removeprefix("Basic ")) if part)
            self._headers["Authorization"] = basic
        if api_key_env is not None:
            if url.user is not None:
                raise CalibError(f"{self.url}: give either user:password@ in the address or --api-key-env, not both")
            key = os.environ.get(api_key_env, "").strip()
            if not key:
                raise CalibError(
                    f"the environment variable {api_key_env} holds no API key; set it: export {api_key_env}=..."
                )
            self._secrets = (key,)
            self._headers["Authorization"] = f"Bearer {key}"
        self._api_key_env = api_key_env
        self._connections = connections
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._sleep = sleep
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"HttpClient({self.url!r}, timeout={self.timeout:g}, retries={self.retries})"

    async def get(self, path: str) -> Reply:
        """Fetch ``path``; see `post`."""
        return await self._patiently("GET", path, None, _json)

    async def get_text(self, path: str) -> Reply:
        """Fetch ``path``, whose answer is text and not JSON (``/metrics``); see `post`."""
        return await self._patiently("GET", path, None, _text)

    async def post(self, path: str, payload: Mapping[str, Any], *, asks: bool = False) -> Reply:
        """Send ``payload`` as JSON and return the parsed answer.

        Parameters
        ----------
        path : str
        payload : mapping
        asks : bool, default False
            Whether answers come from this path, so that its status 403 says that nobody gets any. Elsewhere 403 may
            only say that a route is switched off.

        Raises
        ------
        AskFailed
            Given up. The reason is ``timeout``, ``connection``, ``bad_json``, ``refused`` (400 or 422: this question)
            or ``http_STATUS``; the seconds run from the first attempt.
        CalibError
            Status 401, and 403 where it ``asks``: no question will be answered without another key.
        """
        return await self._patiently("POST", path, _encoded(payload), _json, asks=asks)

    async def stream(self, path: str, payload: Mapping[str, Any], take: Callable[[Any], None]) -> Reply:
        """Send ``payload`` as JSON and hand each event of the answer to ``take`` as it comes.

        The answer is a stream of server-sent events that hold JSON, the last one ``[DONE]``; the reply's data is None.
        Cancelling closes the connection, by which the server knows that nobody listens any more; events that had come
        by then are handed on first. An answer that breaks
        after its first event is not asked for again: what came of it is with the caller.

        Raises
        ------
        AskFailed, CalibError
            See `post`, of a path that ``asks``. What ``take`` raises passes through.
        """
        begun = False

        def taken(event: Any) -> None:
            nonlocal begun
            begun = True
            take(event)

        async def read(response: aiohttp.ClientResponse) -> None:
            await _read_events(response, taken)

        return await self._patiently("POST", path, _encoded(payload), read, lambda: not begun, asks=True)

    async def close(self) -> None:
        """Give back the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _patiently(
        self,
        method: str,
        path: str,
        body: bytes | None,
        read: _Read,
        again: Callable[[], bool] = lambda: True,
        *,
        asks: bool = False,
    ) -> Reply:
        started = time.perf_counter()
        attempts = 0
        while True:
            attempts += 1
            try:
                data = await self._attempt(method, path, body, read, asks=asks)
            except _Flaw as flaw:
                if not flaw.again or attempts > self.retries or not again():
                    seconds = time.perf_counter() - started
                    detail = self._without_secrets(flaw.detail)
                    raise AskFailed(flaw.reason, detail, seconds=seconds, attempts=attempts) from None
                await self._sleep(self._delay(attempts, flaw.retry_after))
            else:
                return Reply(data, time.perf_counter() - started, attempts)

    def _delay(self, attempts: int, retry_after: float | None) -> float:
        """Seconds to wait: what the server asks for, plus a random share of a time that doubles with each attempt.

        The whole of it is random (not a fixed part plus noise), so that clients that failed together part ways.
        """
        backoff = self._rng.uniform(0, min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (attempts - 1)))
        return backoff + min(retry_after or 0.0, _LONGEST_RETRY_AFTER)

    async def _attempt(self, method: str, path: str, body: bytes | None, read: _Read, *, asks: bool) -> Any:
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            async with self._open().request(
                method, self._base + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    content = await response.content.read(_ERROR_BODY)
                    raise self._refusal(method, path, response, content, asks=asks)
                return await read(response)
        except _NotJson as error:
            raise _Flaw("bad_json", f"the answer of {method} {path} is not JSON: {shorten(error)}") from None
        except aiohttp.ClientPayloadError as error:
            raise _Flaw("bad_json", f"the answer of {method} {path} was cut: {shorten(error)}") from None
        except aiohttp.ConnectionTimeoutError:
            raise _Flaw("connection", f"no connection to {self.url} within {_CONNECT_TIMEOUT:g} s") from None
        except TimeoutError:
            raise _Flaw("timeout", f"{method} {path} gave no answer within {self.timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            said = shorten(error) or type(error).__name__
            raise _Flaw("connection", f"{method} {path} at {self.url}: {said}") from None

    def _refusal(
        self, method: str, path: str, response: aiohttp.ClientResponse, content: bytes, *, asks: bool
    ) -> _Flaw | CalibError:
        status = response.status
        detail = f"HTTP {status} from {method} {path}"
        if said := _message(content):
            detail += f": {said}"
        if status == 401:
            what = (
                f"refuses the key in {self._api_key_env}"
                if self._api_key_env
                else "wants a key: put it in an environment variable and name that with --api-key-env NAME"
            )
            return CalibError(self._without_secrets(f"{self.url} {what} ({detail})"), exit_code=1)
        if status == 403 and asks:
            allowed = (
                f"let the key in {self._api_key_env} ask there"
                if self._api_key_env
                else "name a key that may by --api-key-env NAME, or let this machine ask there"
            )
            return CalibError(self._without_secrets(f"{self.url} forbids to ask it ({detail}): {allowed}"), exit_code=1)
        if 300 <= status < 400:
            target = response.headers.get("Location", "")
            detail += f"; redirects are not followed, give the address it points to: {shorten(target)}"
        reason = "refused" if status in (400, 422) else f"http_{status}"
        retry_after = _retry_after(response.headers.get("Retry-After"), self._now())
        return _Flaw(reason, detail, again=status in _AGAIN, retry_after=retry_after)

    def _without_secrets(self, text: str) -> str:
        """Servers may echo what they were sent."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _open(self) -> aiohttp.ClientSession:
        """Return the session, made here because it belongs to the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_KEEP_ALIVE),
                timeout=aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(_CONNECT_TIMEOUT, self.timeout)),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _encoded(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, separators=(",", ":")).encode()


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _NotJson(error) from None


async def _json(response: aiohttp.ClientResponse) -> Any:
    return _decoded(await response.read())


async def _text(response: aiohttp.ClientResponse) -> str:
    return (await response.read()).decode("utf-8", "replace")


async def _read_events(response: aiohttp.ClientResponse, take: Callable[[Any], None]) -> None:
    """Hand on the data of each server-sent event; other fields and comments are skipped."""
    rest = b""

    def feed(chunk: bytes) -> None:  # several events may come at once, or half of one
        nonlocal rest
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            field, _, data = line.partition(b":")
            if field == b"data" and data.strip() != b"[DONE]":
                take(_decoded(data))

    try:
        async for chunk in response.content.iter_any():
            feed(chunk)
    except asyncio.CancelledError:
        # in a busy loop much may have come that was not looked at yet; what is wrong with it matters no more
        with suppress(_NotJson, AskFailed, aiohttp.ClientError, TimeoutError):
            feed(response.content.read_nowait())
        raise


def _checked(base_url: str) -> URL:
    expected = "expected http://HOST:PORT or https://HOST"
    try:
        url = URL(base_url.strip())
        url.port  # noqa: B018 - a bad port shows only when asked for
    except ValueError:  # its text holds the address, and so perhaps a password
        raise CalibError(f"a server address cannot be read; {expected}") from None
    if url.scheme not in ("http", "https") or not url.host:
        # What precedes an @ may be a password, also in an address that is not one.
        raise CalibError(f"{base_url.strip().rpartition('@')[2]!r} is not the address of a server; {expected}")
    if url.query_string or url.fragment:
        raise CalibError(
            f"{url.with_user(None).with_query(None).with_fragment(None)}: leave out what follows ? or #; {expected}"
        )
    return url


def shorten(value: object, most: int = _DETAIL) -> str:
    """One line of at most ``most`` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _message(content: bytes) -> str:
    """Return what an error body says, in autotrust's, OpenAI's or FastAPI's shape, or its text."""
    text = content.decode("utf-8", "replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return shorten(text)
    if isinstance(data, dict):
        error = data.get("error", data.get("detail", data))
        return shorten(error["message"] if isinstance(error, dict) and "message" in error else error)
    return shorten(data)


def _retry_after(value: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks for, given as seconds or as a date; None when absent or unreadable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None

"""What the gateway lets in: so many requests at a time, a bounded queue before them, and who has the key.

Leaves to others: what a request asks (`calib.gateway`), bodies and status codes (`calib.serve`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
from collections import deque
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from calib.errors import CalibError

__all__ = ["MAX_CONCURRENCY", "MAX_QUEUE", "Admission", "KeyGuard", "Refused", "read_key"]

MAX_CONCURRENCY = 1024
"""Requests answered at a time: what one process holds open with ease, and several times what vLLM runs at once."""
MAX_QUEUE = 1024
"""Requests that may wait for a place."""
_LONGEST_RETRY_AFTER = 60
_MEMORY = 0.05
"""Share of the newest request in the mean of the seconds that a place is held."""


class Refused(Exception):  # noqa: N818 - an answer to the client, not a failure of the gateway
    """No place for a request now.

    Parameters
    ----------
    reason : {"queue_full", "too_late"}
    message : str
    retry_after : int
        Seconds after which a place is likely.
    """

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class Admission:
    """Places for requests, first come, first served, within one event loop.

    Parameters
    ----------
    places : int
        Requests that may be answered at a time, 1 or more.
    queue : int
        Requests that may wait for a place, 0 or more.

    Attributes
    ----------
    in_flight : int
        Places that are held.
    """

    def __init__(self, places: int = MAX_CONCURRENCY, queue: int = MAX_QUEUE) -> None:
        if places < 1 or queue < 0:
            raise CalibError(f"--max-concurrency must be 1 or more and --max-queue 0 or more, got {places} and {queue}")
        self.places, self.queue = places, queue
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._held = 0.0  # mean seconds that a place is held; the newest count most

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def expected_wait(self) -> float:
        """Seconds until a request that comes now would have a place, as places were held lately."""
        if self.in_flight < self.places:
            return 0.0
        return self._held * (self.queued + 1) / self.places

    async def enter(self, patience: float = math.inf) -> None:
        """Take a place, or wait for one; whoever got in calls `leave`.

        Parameters
        ----------
        patience : float
            Seconds that the request may wait: its deadline. One that would wait longer is refused at once.

        Raises
        ------
        Refused
            The queue is full, or the wait is longer than the patience.
        """
        if self.in_flight < self.places:  # then nobody waits: a place that comes free goes to the queue first
            self.in_flight += 1
            return
        expected = self.expected_wait
        if self.queued >= self.queue:
            raise self._refusal("queue_full", f"{self.in_flight} requests are being answered and {self.queued} wait")
        if expected > patience:
            raise self._refusal("too_late", f"a place would come after the deadline of {patience:g} s")
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout(None if math.isinf(patience) else patience):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # it was given in the same moment: on to the next one
                self._pass_on()
            else:
                self._waiting.remove(place)
            if isinstance(error, TimeoutError):
                raise self._refusal("too_late", f"no place came within the deadline of {patience:g} s") from None
            raise

    def leave(self, seconds: float) -> None:
        """Give the place back, held for so many seconds."""
        self._held += _MEMORY * (seconds - self._held) if self._held else seconds
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.in_flight -= 1

    def _refusal(self, reason: str, message: str) -> Refused:
        seconds = min(_LONGEST_RETRY_AFTER, max(1, math.ceil(self.expected_wait)))
        return Refused(reason, f"{message}; try again in {seconds} s", seconds)


# --- the key ----------------------------------------------------------------------------------------------------------


def read_key(name: str) -> str:
    """The bearer key that an environment variable holds.

    Raises
    ------
    CalibError
        It holds none, or one that no header can carry.
    """
    key = os.environ.get(name, "").strip()
    if not key:
        raise CalibError(f"--key-env {name}: this variable is empty; set it first: export {name}=...")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise CalibError(f"--key-env {name}: a key must be printable ASCII without spaces, as a header carries it")
    return key


class KeyGuard:
    """Middleware that answers 401 to requests without the bearer key.

    Parameters
    ----------
    app : ASGI application
    key : str
    open_paths : collection of str
        Paths that need none.
    """

    def __init__(self, app: ASGIApp, *, key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest()
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        if scope["type"] != "http" or scope["path"] in self._open or self._fits(scope["headers"]):
            await self._app(scope, receive, send)
            return
        body = (
            b'{"error":{"message":"a key is needed: send the header Authorization: Bearer KEY",'
            b'"type":"AuthenticationError","code":401}}'
        )
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _fits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        # digests, so that the comparison takes as long for a key of any length
        fits = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return fits and scheme.lower() == b"bearer"

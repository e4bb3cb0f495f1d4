"""Running an ASGI application: one process, one event loop, a clean start and a clean end.

Leaves to others: the application itself (`calib.serve`).
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from calib.errors import CalibError
from calib.processes import stop_signals

__all__ = ["DRAIN_SECONDS", "ServerThread", "listen", "run", "serving"]

DRAIN_SECONDS = 60
_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75  # longer than the pools of usual clients, so that they close first and no request is lost

OpenApp = Callable[[], Awaitable[FastAPI]]


class _Server(uvicorn.Server):
    """A server on a socket that listens already; leaves signals to its caller."""

    def __init__(self, app: FastAPI, listener: socket.socket, host: str, drain_seconds: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=drain_seconds,
            )
        )
        self.listener = listener
        self.up = asyncio.Event()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{listener.getsockname()[1]}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _running(app: FastAPI, listener: socket.socket, host: str, drain_seconds: int) -> AsyncIterator[_Server]:
    server = _Server(app, listener, host, drain_seconds)
    task = asyncio.create_task(server.serve([listener]))
    up = asyncio.create_task(server.up.wait())
    try:
        await asyncio.wait((task, up), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            raise CalibError(f"the server on {server.url} did not start", exit_code=1)
        yield server
    finally:
        up.cancel()
        server.should_exit = True
        await task


@asynccontextmanager
async def serving(
    app: FastAPI, *, host: str = "127.0.0.1", port: int = 0, drain_seconds: int = DRAIN_SECONDS
) -> AsyncIterator[str]:
    """Serve an application in the running loop and give its base URL; on leaving, requests in flight are finished.

    Parameters
    ----------
    app : FastAPI
        From `create_app` or `open_app`.
    host, port : str, int
        Where to listen; port 0 takes a free one.
    drain_seconds : int, default 60
        Longest wait for requests in flight.

    Raises
    ------
    CalibError
        When the address cannot be had.
    """
    with listen(host, port) as listener:
        async with _running(app, listener, host, drain_seconds) as server:
            yield server.url


def run(
    open_app: OpenApp,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    announce: Callable[[str], None] | None = None,
    drain_seconds: int = DRAIN_SECONDS,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in flight; a second signal does not wait for them.

    A SIGINT that the process was started to ignore, as a shell starts its background jobs, stays ignored. SIGHUP calls
    the application's ``state.hang_up``, if it has one. To be called from the main thread, as
    ``run(lambda: open_app(engine, policy=policy), port=8000)``.

    Parameters
    ----------
    open_app : callable
        Makes the application, inside the loop that serves it.
    host, port : str, int
        Where to listen; port 0 takes a free one.
    announce : callable, optional
        Gets the URL once the server listens.
    drain_seconds : int, default 60
        Longest wait for requests in flight.

    Raises
    ------
    CalibError
        When the address cannot be had.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(open_app, host, port, announce, drain_seconds))


async def _run(
    open_app: OpenApp, host: str, port: int, announce: Callable[[str], None] | None, drain_seconds: int
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    with listen(host, port) as listener:  # first of all: a port that is taken should not cost a model's start
        app = await open_app()
        async with _running(app, listener, host, drain_seconds) as server:

            def on_signal() -> None:
                server.force_exit = stop.is_set()
                stop.set()

            numbers = stop_signals()
            for number in numbers:
                loop.add_signal_handler(number, on_signal)
            if (hang_up := getattr(app.state, "hang_up", None)) is not None:
                loop.add_signal_handler(signal.SIGHUP, hang_up)
            if announce is not None:
                announce(server.url)
            await stop.wait()
        for number in numbers:  # not before the drain is over: until then a second signal has to reach us
            loop.remove_signal_handler(number)


class ServerThread:
    """A gateway in a thread with its own loop, for callers that are not asynchronous.

    ``with ServerThread(lambda: open_app(engine)) as url: ...``; on leaving, requests in flight are finished.

    Parameters
    ----------
    open_app : callable
        Makes the application, inside the loop that serves it.
    host, port : str, int
        Where to listen; port 0 takes a free one.
    """

    def __init__(self, open_app: OpenApp, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._open_app, self._host, self._port = open_app, host, port
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="calib-serve")
        self._up: Future[str] = Future()
        self._done: Future[None] | None = None
        self._stop: Callable[[], None] = lambda: None

    def __enter__(self) -> str:
        self._done = self._pool.submit(self._main)
        either: tuple[Future[Any], ...] = (self._up, self._done)
        wait(either, return_when=FIRST_COMPLETED)
        if not self._up.done():  # it failed before it listened
            self._pool.shutdown()
            self._done.result()
        return self._up.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._pool.shutdown()
        if self._done is not None:
            self._done.result()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(await self._open_app(), host=self._host, port=self._port) as url:
            self._stop = lambda: cast(None, loop.call_soon_threadsafe(stop.set))
            self._up.set_result(url)
            await stop.wait()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop's loop where it is installed, else the standard one."""
    return uvicorn.Config(app="", log_config=None).get_loop_factory()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    With the protocol named: for a listener that leaves it at 0, asyncio does not turn Nagle's algorithm off on the
    connections, and headers and body of an answer then arrive 40 ms apart.
    """
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise CalibError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; "
            "choose another with --port, or --port 0 for a free one",
            exit_code=1,
        ) from None

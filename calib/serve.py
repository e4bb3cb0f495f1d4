"""The gateway as an HTTP server: the application around `calib.gateway.Gateway`, and running it.

No text of a request is logged. Leaves to others: what is answered (`calib.gateway`), policy files (`calib.export`).
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from calib import __version__
from calib.engine.base import AskFailed, Engine, EngineInfo, ServerBusy
from calib.errors import CalibError
from calib.gateway import CONTEXT_TOKENS, BadRequest, DecideAnswer, DecideRequest, ErrorBody, Gateway, System2Answer
from calib.policy import Policy

__all__ = ["ServerThread", "create_app", "open_app", "run", "serving"]

MAX_BODY = 8 * 1024 * 1024
DRAIN_SECONDS = 60
_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75  # longer than the pools of usual clients, so that they close first and no request is lost

# --- HTTP -------------------------------------------------------------------------------------------------------------


class _PlainRoute(APIRoute):
    """Documented in OpenAPI as any route, but the endpoint gets the bare request.

    The framework's own handler solves dependencies and validates twice for each request; the endpoint parses the body
    once and writes the answer once.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return cast(Callable[[Request], Coroutine[Any, Any, Response]], self.endpoint)


def create_app(
    engine: Engine,
    *,
    info: EngineInfo,
    policy: Policy | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """The gateway as an ASGI application; it owns the engine and closes it on shutdown.

    Parameters
    ----------
    engine : Engine
    info : EngineInfo
        What ``engine.info()`` returned.
    policy : Policy, optional
        Without one the engine's defaults hold, and a thought may fill the context window.
    context_tokens : int, default 32768
        The longest thought that the engine can hold.
    max_body : int, default 8 MiB
        Bytes of a request's body above which it is refused.
    """
    gateway = Gateway(engine, info, policy, context_tokens=context_tokens)
    described = to_json(gateway.describe())
    models = to_json(_models(info, context_tokens))

    async def decide(request: Request) -> Response:
        try:
            parsed = DecideRequest.model_validate_json(await _body(request, max_body))
            return _respond(to_json(await gateway.decide(parsed)))
        except ValidationError as error:
            return _error(400, "BadRequestError", _explained(error))
        except BadRequest as error:
            return _error(400, "BadRequestError", str(error))
        except ClientDisconnect:
            return _error(400, "BadRequestError", "the client closed the connection")  # nobody reads it
        except AskFailed as error:
            return _error(502, "UpstreamError", str(error))
        except ServerBusy as error:
            wait_seconds = max(1, math.ceil(error.retry_after or 1))
            message = str(error) or "the model is busy; try again later"
            return _error(429, "ServerBusyError", message, {"Retry-After": str(wait_seconds)})
        except asyncio.CancelledError:  # only when the drain is over; the task ends here, so nothing is held up
            return _error(503, "ShuttingDownError", "the gateway is stopping", {"Retry-After": "1"})

    async def show_info(_request: Request) -> Response:
        return _respond(described)

    async def list_models(_request: Request) -> Response:
        return _respond(models)

    async def health(_request: Request) -> Response:
        return _respond(b'{"status":"alive"}')

    async def ready(_request: Request) -> Response:
        return _respond(to_json({"status": "ready", "model": info.model}))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(
        title="calib gateway",
        version=__version__,
        description="Option questions for a dual-system decision model, answered under one policy.",
        lifespan=lifespan,
        docs_url=None,  # both pages would load scripts from elsewhere; /openapi.json says it all
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )
    app.router.route_class = _PlainRoute
    problems: dict[int | str, dict[str, Any]] = {
        400: {"model": ErrorBody, "description": "The request cannot be answered as it stands"},
        413: {"model": ErrorBody, "description": f"The body has more than {max_body} bytes"},
        429: {"model": ErrorBody, "description": "The model is busy; Retry-After says for how long"},
        502: {"model": ErrorBody, "description": "The model failed"},
        503: {"model": ErrorBody, "description": "The gateway stops before the model has answered"},
    }
    schema = {"content": {"application/json": {"schema": DecideRequest.model_json_schema()}}, "required": True}
    app.post(
        "/v1/decide",
        response_model=DecideAnswer | System2Answer,
        responses=problems,
        openapi_extra={"requestBody": schema},
        summary="Answer one option question",
    )(decide)
    app.get("/v1/decide/info", response_model=dict[str, Any], summary="The model and what is effective")(show_info)
    app.get("/v1/models", response_model=dict[str, Any], summary="The served model")(list_models)
    app.get("/health", response_model=dict[str, str], summary="The process is alive")(health)
    app.get("/ready", response_model=dict[str, str], summary="The engine has said who it is")(ready)
    return app


async def open_app(
    engine: Engine,
    *,
    policy: Policy | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """Ask the engine who it is, then `create_app`."""
    info = await engine.info()
    return create_app(engine, info=info, policy=policy, context_tokens=context_tokens, max_body=max_body)


async def _body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises
    ------
    HTTPException
        413 when it is too long. The rest need not be read: the server discards it.
    """
    too_long = HTTPException(413, f"the body has more than {most} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise too_long
        chunks.append(chunk)
    return b"".join(chunks)


def _respond(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _respond(to_json({"error": {"message": message, "type": kind, "code": status}}), status, headers)


_HTTP_ERRORS = {404: "NotFoundError", 405: "MethodNotAllowedError", 413: "RequestTooLargeError"}


async def _http_error(request: Request, error: Exception) -> Response:
    problem = cast(HTTPException, error)
    message = problem.detail
    if problem.status_code == 404:
        message = f"no route {request.url.path}; there are /v1/decide, /v1/decide/info, /v1/models, /health and /ready"
    elif problem.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    kind = _HTTP_ERRORS.get(problem.status_code, "BadRequestError")
    return _error(problem.status_code, kind, message, problem.headers)


async def _unexpected(_request: Request, _error_raised: Exception) -> Response:
    """Body for a bug; the server's own log holds the traceback."""
    return _error(500, "InternalServerError", "the gateway failed; its log says where")


def _explained(error: ValidationError) -> str:
    """One line that names the field; never the value, which may be a user's text."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]


def _models(info: EngineInfo, context_tokens: int) -> dict[str, Any]:
    model = {
        "id": info.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "calib",
        "max_model_len": context_tokens,
    }
    return {"object": "list", "data": [model]}


# --- running ----------------------------------------------------------------------------------------------------------

OpenApp = Callable[[], Awaitable[FastAPI]]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
    with _listen(host, port) as listener:
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

    To be called from the main thread, as ``run(lambda: open_app(engine, policy=policy), port=8000)``.

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
    with _listen(host, port) as listener:  # first of all: a port that is taken should not cost a model's start
        async with _running(await open_app(), listener, host, drain_seconds) as server:

            def on_signal() -> None:
                server.force_exit = stop.is_set()
                stop.set()

            for number in _SIGNALS:
                loop.add_signal_handler(number, on_signal)
            if announce is not None:
                announce(server.url)
            await stop.wait()
        for number in _SIGNALS:  # not before the drain is over: until then a second signal has to reach us
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


def _listen(host: str, port: int) -> socket.socket:
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

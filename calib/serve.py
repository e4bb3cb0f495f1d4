"""The gateway as an HTTP server: the application around `calib.gateway.Gateway`.

A request takes the gateway that is in force when it arrives, and is answered by that one wholly: a new policy is a new
`Gateway` in its place. No text of a request is logged.

Leaves to others: what is answered (`calib.gateway`), reading the policy again (`calib.reload`), who is let in
(`calib.limits`), what is counted (`calib.servemetrics`), running the application (`calib.running`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from calib import __version__
from calib.declog import DecisionLog
from calib.engine.base import AskFailed, Engine, EngineInfo, ServerBusy
from calib.engine.pool import EnginePool
from calib.errors import CalibError
from calib.gateway import (
    CONTEXT_TOKENS,
    BadRequest,
    DecideAnswer,
    DecideRequest,
    ErrorBody,
    Gateway,
    Observation,
    System2Answer,
)
from calib.limits import Admission, KeyGuard, Refused
from calib.policy import Policy
from calib.reload import PolicyFile, PolicyWatch
from calib.running import ServerThread, run, serving
from calib.servemetrics import Metrics
from calib.upstreams import CountedEngine

__all__ = ["DATASET_HEADER", "MAX_BODY", "ServerThread", "create_app", "open_app", "run", "serving"]

MAX_BODY = 8 * 1024 * 1024
DATASET_HEADER = "x-calib-dataset"
"""Names the dataset of a request for the policy's routes, where the body does not."""
OPEN_PATHS = ("/health", "/ready")
"""Paths that need no key: probes ask them, and they tell no more than whether the gateway can answer.

``/metrics`` tells how much traffic there is, and under which policy, so it needs the key; Prometheus can send one.
"""
_BODY_SECONDS = 60.0
_LOOK_SECONDS = 2.0

log = logging.getLogger(__name__)

# --- HTTP -------------------------------------------------------------------------------------------------------------


class _PlainRoute(APIRoute):
    """Documented in OpenAPI as any route, but the endpoint gets the bare request.

    The framework's own handler solves dependencies and validates twice for each request; the endpoint parses the body
    once and writes the answer once.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return cast(Callable[[Request], Coroutine[Any, Any, Response]], self.endpoint)


class _Service:
    """What the routes share: the gateway in force, and all around it."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        policy: Policy | PolicyFile | None,
        *,
        context_tokens: int,
        max_body: int,
        admission: Admission | None,
        keyed: bool,
        decision_log: DecisionLog | None,
        accept: Callable[[PolicyFile], object] | None,
        say: Callable[[str], None],
    ) -> None:
        self.engine, self.info, self.max_body, self.log = engine, info, max_body, decision_log
        self.admission = admission or Admission()
        self.pool = engine if isinstance(engine, EnginePool) else None
        self.metrics = Metrics(self.admission, self.pool, decision_log)
        self._counted = CountedEngine(engine, self.metrics.upstream_errors)
        self._context_tokens, self._keyed = context_tokens, keyed
        self._accept, self._said = accept, ""
        self._hang_ups: set[asyncio.Task[bool]] = set()
        self.watch: PolicyWatch | None = None
        if isinstance(policy, PolicyFile):
            self.watch = PolicyWatch(policy, self._reload, say=say)
            self.metrics.reloads = self.watch.counts
            policy = policy.policy
        self.gateway = self._serve(policy)

    def _serve(self, policy: Policy | None) -> Gateway:
        gateway = Gateway(self._counted, self.info, policy, context_tokens=self._context_tokens, observe=self._observe)
        self.described = gateway.describe()
        if policy is not None:
            told = {"version": str(gateway.version), "arm": policy.arm}
            self.metrics.serves(told | {name: str(getattr(policy, name)) for name in _KNOBS})
        return gateway

    def _reload(self, file: PolicyFile) -> None:
        if self._accept is not None:
            self._accept(file)
        self.gateway = self._serve(file.policy)

    def _observe(self, decided: Observation) -> None:
        self.metrics.decided(decided)
        if self.log is not None:
            self.log.put(decided)

    def hang_up(self) -> None:
        """Read the policy again and open the log anew: what SIGHUP asks for."""
        if self.log is not None:
            self.log.reopen()
        if self.watch is not None:
            task = asyncio.get_running_loop().create_task(self.watch.look(force=True))
            self._hang_ups.add(task)
            task.add_done_callback(self._hang_ups.discard)

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Everything that goes on beside the requests; the engine and the log are closed at the end."""
        beside: list[Coroutine[Any, Any, None]] = []
        if self.watch is not None:
            beside.append(self.watch.run())
        if self.log is not None:
            beside.append(self.log.run())
        if self.pool is not None:
            beside.append(_look(self.pool))
        tasks = [asyncio.create_task(each) for each in beside]
        for task in tasks:
            task.add_done_callback(_mourn)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._hang_ups, return_exceptions=True)
        if self.log is not None:
            await self.log.close()
        await self.engine.close()

    def effective(self) -> tuple[str, ...]:
        """What holds for each request, in a few lines for whoever started the gateway."""
        gateway, admission = self.gateway, self.admission
        lines = [_policy_line(gateway)]
        if gateway.policy is not None and gateway.policy.deadline is not None:
            lines.append(_deadline_line(gateway.policy.deadline, self.info.keeps_deadline))
        elif self.info.keeps_deadline:
            lines.append("no deadline, unless a request has one: it is kept by closing the thought")
        size = f"bodies up to {self.max_body / 2**20:g} MiB"
        lines.append(f"{admission.places} requests at a time, {admission.queue} more may wait, {size}")
        lines.append("a key is needed, but for " + " and ".join(OPEN_PATHS) if self._keyed else "no key is needed")
        if self.log is not None:
            lines.append(f"one line for each decision goes to {self.log.path}")
        return tuple(lines)

    # --- routes -------------------------------------------------------------------------------------------------------

    async def decide(self, request: Request) -> Response:
        status = 500
        try:
            response = await self._decide(request)
            status = response.status_code
            return response
        finally:
            self.metrics.responses[str(status)] += 1

    async def _decide(self, request: Request) -> Response:
        asked: DecideRequest | None = None
        try:
            body = await _body(request, self.max_body)
            arrived = time.perf_counter()  # all of it: a client that sends slowly does not use up its deadline
            asked = DecideRequest.model_validate_json(body)
            gateway = self.gateway
            deadline = asked.deadline or (gateway.policy.deadline if gateway.policy is not None else None)
            await self.admission.enter(deadline or math.inf)
            entered = time.perf_counter()
            try:
                answer = await gateway.decide(asked, dataset=_dataset(request), arrived=arrived)
            finally:
                self.admission.leave(time.perf_counter() - entered)
            if "degraded" in answer:
                self.metrics.degraded[answer["degraded_reason"]] += 1
            return _respond(to_json(answer))
        except ValidationError as error:
            return _error(400, "BadRequestError", _explained(error))
        except BadRequest as error:
            return _error(400, "BadRequestError", str(error))
        except ClientDisconnect:
            return _error(400, "BadRequestError", "the client closed the connection")  # nobody reads it
        except HTTPException as error:
            return await _http_error(request, error)
        except AskFailed as error:
            if error.reason == "deadline":  # the client's own may be shorter than any model can keep
                own = asked is not None and asked.deadline is not None
                return _error(408 if own else 504, "DeadlineError", "the model gave no answer within the deadline")
            return _error(502, "UpstreamError", str(error))
        except ServerBusy as error:
            wait_seconds = max(1, math.ceil(error.retry_after or 1))
            self.metrics.refused["upstream_busy"] += 1
            message = str(error) or "the model is busy; try again later"
            return _error(429, "ServerBusyError", message, {"Retry-After": str(wait_seconds)})
        except Refused as error:
            self.metrics.refused[error.reason] += 1
            return _error(429, "ServerBusyError", str(error), {"Retry-After": str(error.retry_after)})
        except CalibError as error:  # the server of the model wants another key, or is another one now
            if self._said != str(error):
                self._said = str(error)
                log.error("%s", error)
            return _error(502, "UpstreamError", "the model's server cannot be used; the gateway's log says why")
        except asyncio.CancelledError:  # only when the drain is over; the task ends here, so nothing is held up
            return _error(503, "ShuttingDownError", "the gateway is stopping", {"Retry-After": "1"})

    async def show_info(self, _request: Request) -> Response:
        watch = self.watch
        file = None if watch is None else {"loaded_at": watch.loaded_at, "error": watch.error}
        return _respond(to_json(self.described | {"policy_file": file}))

    async def list_models(self, _request: Request) -> Response:
        return _respond(to_json(_models(self.info, self._context_tokens)))

    async def health(self, _request: Request) -> Response:
        return _respond(b'{"status":"alive"}')

    async def ready(self, _request: Request) -> Response:
        if self.pool is not None and not self.pool.alive:
            return _error(503, "UpstreamError", "no server of the model can be reached", {"Retry-After": "5"})
        return _respond(to_json({"status": "ready"} | ({} if self._keyed else {"model": self.info.model})))

    async def show_metrics(self, request: Request) -> Response:
        body, content_type = self.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


_KNOBS = ("threshold", "mix", "think_budget", "deadline")


def _policy_line(gateway: Gateway) -> str:
    policy = gateway.policy
    if policy is None:
        told = gateway.describe()["defaults"]
        return f"no policy: threshold {told['threshold']:g} and mix {told['mix']:g} of the model's server, any budget"
    knobs = f"threshold {policy.threshold:.6g}, mix {policy.mix:.6g}, think_budget {policy.think_budget}"
    more = [f"confidence {policy.confidence}"] * (policy.confidence != "max")
    more += [f"pool {policy.pool}"] * (policy.pool != "linear")
    more += ["temperatures"] * (policy.temperatures is not None)
    more += [f"{len(policy.routes)} routes"] * bool(policy.routes)
    return ", ".join([f"policy {gateway.version}: {knobs}, arm {policy.arm}", *more])


def _deadline_line(seconds: float, kept: bool) -> str:
    how = (
        "kept by closing the thought in time"
        if kept
        else "this engine cannot close a thought, so System 1 answers where System 2 would be late"
    )
    return f"deadline {seconds:g} s: {how}"


async def _look(pool: EnginePool) -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        await pool.look()


def _mourn(task: asyncio.Task[None]) -> None:
    """A task beside the requests that ends by itself is a bug; the requests go on."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task of the gateway ended", exc_info=error)


def create_app(
    engine: Engine,
    *,
    info: EngineInfo,
    policy: Policy | PolicyFile | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    max_body: int = MAX_BODY,
    admission: Admission | None = None,
    key: str | None = None,
    decision_log: DecisionLog | None = None,
    accept: Callable[[PolicyFile], object] | None = None,
    say: Callable[[str], None] = log.warning,
) -> FastAPI:
    """The gateway as an ASGI application; it owns the engine and the log, and closes them on shutdown.

    Parameters
    ----------
    engine : Engine
        For several servers an `EnginePool`.
    info : EngineInfo
        What ``engine.info()`` returned.
    policy : Policy or PolicyFile, optional
        A file is read again when it changes. Without any the engine's defaults hold, and a thought may fill the context
        window.
    context_tokens : int, default 32768
        The longest thought that the engine can hold.
    max_body : int, default 8 MiB
        Bytes of a request's body above which it is refused.
    admission : Admission, optional
        How many requests are let in at a time, and how many wait.
    key : str, optional
        Bearer key that all paths but `OPEN_PATHS` need.
    decision_log : DecisionLog, optional
    accept : callable, optional
        Gets a policy file that changed; a `CalibError` refuses it.
    say : callable, optional
        Gets a line when the policy file changes.
    """
    service = _Service(
        engine,
        info,
        policy,
        context_tokens=context_tokens,
        max_body=max_body,
        admission=admission,
        keyed=key is not None,
        decision_log=decision_log,
        accept=accept,
        say=say,
    )
    app = FastAPI(
        title="calib gateway",
        version=__version__,
        description="Option questions for a dual-system decision model, answered under one policy.",
        lifespan=service.lifespan,
        docs_url=None,  # both pages would load scripts from elsewhere; /openapi.json says it all
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )
    app.state.service = service
    if service.watch is not None or decision_log is not None:
        app.state.hang_up = service.hang_up
    if key is not None:
        app.add_middleware(KeyGuard, key=key, open_paths=OPEN_PATHS)
    app.router.route_class = _PlainRoute
    _add_routes(app, service, keyed=key is not None)
    return app


def _describe_key(app: FastAPI) -> None:
    """Say in the OpenAPI description which key is meant."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        found = plain()
        found.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        return found

    app.openapi = described  # type: ignore[method-assign]


def _add_routes(app: FastAPI, service: _Service, *, keyed: bool) -> None:
    def problem(description: str) -> dict[str, Any]:
        return {"model": ErrorBody, "description": description}

    refused: dict[int | str, dict[str, Any]] = {401: problem("The key is missing or wrong")} if keyed else {}
    secured: dict[str, Any] = {}
    if keyed:
        secured = {"security": [{"bearer": []}]}
        _describe_key(app)
    problems: dict[int | str, dict[str, Any]] = refused | {
        400: problem("The request cannot be answered as it stands"),
        408: problem(f"No answer within the request's deadline, or its body took more than {_BODY_SECONDS:g} s"),
        413: problem(f"The body has more than {service.max_body} bytes"),
        429: problem("Too many requests, or the model is busy; Retry-After says for how long"),
        502: problem("The model failed"),
        503: problem("The gateway stops before the model has answered"),
        504: problem("System 1 gave no answer within the policy's deadline"),
    }
    content = {"application/json": {"schema": DecideRequest.model_json_schema()}}
    dataset = {
        "name": DATASET_HEADER,
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": "Dataset of the question for the policy's routes, where the body names none.",
    }
    app.post(
        "/v1/decide",
        response_model=DecideAnswer | System2Answer,
        responses=problems,
        openapi_extra=secured | {"requestBody": {"content": content, "required": True}, "parameters": [dataset]},
        summary="Answer one option question",
    )(service.decide)
    shown: dict[str, Any] = {"response_model": dict[str, Any], "responses": refused, "openapi_extra": secured}
    app.get("/v1/decide/info", **shown, summary="The model and what is effective")(service.show_info)
    app.get("/v1/models", **shown, summary="The served model")(service.list_models)
    app.get("/health", response_model=dict[str, str], summary="The process is alive")(service.health)
    app.get(
        "/ready",
        response_model=dict[str, str],
        responses={503: problem("No server of the model can be reached")},
        summary="Questions can be answered",
    )(service.ready)
    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.get(
        "/metrics",
        response_class=Response,
        responses=refused | text,
        openapi_extra=secured,
        summary="Counters in Prometheus' text format",
    )(service.show_metrics)


async def open_app(
    engine: Engine,
    *,
    policy: Policy | PolicyFile | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    max_body: int = MAX_BODY,
    **options: Any,
) -> FastAPI:
    """Ask the engine who it is, then `create_app`, which documents the options."""
    info = await engine.info()
    return create_app(engine, info=info, policy=policy, context_tokens=context_tokens, max_body=max_body, **options)


def _dataset(request: Request) -> str | None:
    """The header's dataset; headers are Latin-1 on the way, and a name may be UTF-8."""
    told = request.headers.get(DATASET_HEADER)
    return told.strip().encode("latin-1").decode("utf-8", "replace") if told else None


async def _body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises
    ------
    HTTPException
        413 when it is too long. The rest need not be read: the server discards it. 408 when it comes too slowly.
    """
    too_long = HTTPException(413, f"the body has more than {most} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise too_long
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {_BODY_SECONDS:g} s") from None
    return b"".join(chunks)


def _respond(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _respond(to_json({"error": {"message": message, "type": kind, "code": status}}), status, headers)


_HTTP_ERRORS = {
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
}
_ROUTES = "/v1/decide, /v1/decide/info, /v1/models, /metrics, /health and /ready"


async def _http_error(request: Request, error: Exception) -> Response:
    problem = cast(HTTPException, error)
    message = problem.detail
    if problem.status_code == 404:
        message = f"no route {request.url.path}; there are {_ROUTES}"
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

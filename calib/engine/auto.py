"""`probe`: finds out which engine an address needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from calib.engine.base import AskFailed, Engine
from calib.engine.completions import ABSENT
from calib.engine.decide import PROTOCOLS, DecideEngine
from calib.engine.http import HttpClient, shorten
from calib.engine.vllm import VllmEngine
from calib.errors import CalibError

__all__ = ["probe"]

log = logging.getLogger(__name__)


async def probe(
    url: str,
    *,
    vllm: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = log.info,
    **options: Any,
) -> Engine:
    """The engine that speaks to the server at ``url``.

    A decide route of a known protocol wins; then vLLM's completions, known by ``/v1/models`` with a context length and
    ``/tokenize``. Several projects use the path of the decide route for something else, so its protocol is looked at.

    Parameters
    ----------
    url : str
        ``http://host:port``; a trailing ``/v1`` or ``/v1/decide`` is dropped.
    vllm : mapping, optional
        Further arguments of `VllmEngine`: ``model``, ``prompt``, ``sampling``, ``seed``, ``marks``.
    say : callable
        Gets one line about what was found.
    **options
        Of `HttpClient`: ``timeout``, ``retries``, ``api_key_env``, ``connections``.

    Raises
    ------
    CalibError
        No engine can speak to it; lists what was tried and what each answered.
    """
    root = url.rstrip("/").removesuffix("/decide").removesuffix("/v1")
    client = HttpClient(root, **options)
    try:
        return await _probe(root, client, vllm or {}, say)
    except BaseException:
        await client.close()
        raise


async def _probe(root: str, client: HttpClient, vllm: Mapping[str, Any], say: Callable[[str], None]) -> Engine:
    tried: list[str] = []
    try:
        info = (await client.get("/v1/decide/info")).data
    except AskFailed as failure:
        tried.append(_said("GET /v1/decide/info", failure))
        if failure.reason not in ABSENT and failure.reason != "bad_json":
            raise _unknown(client, tried, failure) from None
    else:
        protocol = info.get("protocol") if isinstance(info, dict) else None
        if protocol in PROTOCOLS:
            say(f"{client.url}: a decide server, protocol {protocol}, model {shorten(info.get('model'), 60)}")
            return DecideEngine(root, client=client)
        tried.append(f"GET /v1/decide/info: answered with protocol {shorten(repr(protocol), 60)}, another one")
    try:
        models = (await client.get("/v1/models")).data
    except AskFailed as failure:
        tried.append(_said("GET /v1/models", failure))
        raise _unknown(client, tried, failure) from None
    listed = models.get("data") if isinstance(models, dict) else None
    served = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    names = ", ".join(str(model.get("id")) for model in served)
    if not any(model.get("max_model_len") for model in served):
        tried.append(f"GET /v1/models: {'serves ' + shorten(names) if served else 'no model'}, no max_model_len")
        raise _unknown(client, tried)
    tried.append(f"GET /v1/models: serves {shorten(names)}")
    payload = {"model": vllm.get("model") or served[0].get("id"), "prompt": "A", "add_special_tokens": False}
    try:
        tokens = (await client.post("/tokenize", payload)).data
    except AskFailed as failure:
        tried.append(_said("POST /tokenize", failure))
        raise _unknown(client, tried, failure) from None
    if not isinstance(tokens, dict) or not isinstance(tokens.get("tokens"), list):
        tried.append(f"POST /tokenize: no tokens in {shorten(tokens, 80)}")
        raise _unknown(client, tried)
    say(f"{client.url}: a stock vLLM server of {shorten(names)}")
    return VllmEngine(root, client=client, **vllm)


def _said(request: str, failure: AskFailed) -> str:
    return failure.detail if request in failure.detail else f"{request}: {failure.detail}"


def _unknown(client: HttpClient, tried: list[str], failure: AskFailed | None = None) -> CalibError:
    gone = failure is not None and failure.reason in ("connection", "timeout")
    what = "gives no answer" if gone else "is no server that calib can ask"
    return CalibError(
        f"{client.url} {what}. Tried:\n"
        + "".join(f"  {line}\n" for line in tried)
        + "Expected autotrust's server or calib's gateway (GET /v1/decide/info), or vLLM (GET /v1/models with "
        "max_model_len, POST /tokenize). Give the address of one, or name the engine to skip this look",
        exit_code=1 if gone else 2,
    )

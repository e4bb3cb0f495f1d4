"""A server of ``/v1/completions`` that waits a fixed time, answers the same, and tells how long it held each request.

python tests/benchmarks/null_server.py SECONDS     prints its address; GET /held gives the seconds since the last call
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop
from aiohttp import web

LOGPROBS = {
    "text_offset": [0],
    "tokens": ["token_id:5"],
    "token_logprobs": [-0.7],
    "top_logprobs": [{"token_id:5": -0.7, "token_id:6": -0.7}],
}
USAGE = {"prompt_tokens": 64, "completion_tokens": 1, "total_tokens": 65}


def completion(*choices: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": choices, **more}).encode()


CHOICE = {"index": 0, "text": "A", "logprobs": LOGPROBS, "finish_reason": "length"}
WHOLE = completion(CHOICE, usage=USAGE)
STREAM = b"".join(b"data: " + part + b"\n\n" for part in (completion(CHOICE), completion(usage=USAGE), b"[DONE]"))


async def main(delay: float) -> None:
    held: list[float] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        came = time.perf_counter()
        body = await request.json()
        await asyncio.sleep(delay)
        held.append(time.perf_counter() - came)
        if not body.get("stream"):
            return web.Response(body=WHOLE, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM)
        await response.write_eof()
        return response

    async def tell(_request: web.Request) -> web.Response:
        seconds, held[:] = list(held), []
        return web.json_response(seconds)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/held", tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1])))

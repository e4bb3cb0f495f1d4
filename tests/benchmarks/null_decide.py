"""A server of ``/v1/decide`` that costs next to nothing, and fails and dawdles as it is told.

python tests/benchmarks/null_decide.py THOUGHT_SECONDS FAILING_SHARE     prints its address

System 1 answers at once, a thought takes the given seconds, or up to twice that by chance when some calls are to fail:
then they are answered 500 or 503, cut, or their connection is reset, and one failing thought in four hangs. ``GET
/asked`` tells the number of calls, of those that failed on purpose, and of those that are open.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import uvloop
from aiohttp import web

INFO = {
    "protocol": "jev27-bare-v1",
    "model": "null",
    "temperatures": {"noul": 1.0, "choice": 1.0, "score": 1.0},
    "defaults": {"strategy": "single", "thinking": "auto", "threshold": 0.8, "mix": 0.5, "think_budget": None},
}
P1, P2 = [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]


def answer(p: list[float], **more: object) -> bytes:
    return json.dumps(
        {"kind": "choice", "options": ["a", "b", "c"], "model": "null", "probabilities": p}
        | {"choice_index": p.index(max(p)), "elapsed_seconds": 0.001}
        | more
    ).encode()


async def main(thought_seconds: float, failing: float) -> None:
    rng = random.Random(11)
    first = answer(P1)
    counts = {"asked": 0, "failed": 0, "open": 0}

    async def fail(request: web.Request, body: bytes, thinks: bool) -> web.StreamResponse:
        counts["failed"] += 1
        how = rng.randrange(4)
        if how == 0 and thinks:
            await asyncio.sleep(3600)
        if how <= 1:
            return web.Response(status=rng.choice([500, 503]))
        assert request.transport is not None
        if how == 2:
            request.transport.abort()
            return web.Response()
        response = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        request.transport.close()
        return response

    async def decide(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        counts["asked"] += 1
        counts["open"] += 1
        try:
            thinks = asked["thinking"] == "on"
            body = first
            if thinks:
                seconds = thought_seconds * (2 * rng.random() if failing else 1)
                await asyncio.sleep(seconds)
                told = {"used": True, "budget": asked["think_budget"], "think_tokens": 100, "think_seconds": seconds}
                told |= {"finished_within_budget": True, "mode": "on", "threshold": 0.8, "system1": P1, "system2": P2}
                body = answer(P2, thinking=told, system=2, elapsed_seconds=seconds + 0.001)
            if rng.random() < failing:
                return await fail(request, body, thinks)
            return web.Response(body=body, content_type="application/json")
        finally:
            counts["open"] -= 1

    async def info(_request: web.Request) -> web.Response:
        return web.json_response(INFO)

    async def tell(_request: web.Request) -> web.Response:
        return web.json_response(counts)

    app = web.Application()
    app.router.add_post("/v1/decide", decide)
    app.router.add_get("/v1/decide/info", info)
    app.router.add_get("/asked", tell)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), float(sys.argv[2])))

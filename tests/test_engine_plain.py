"""What a plain client makes of the answers of servers that are not what they should be."""

from __future__ import annotations

import json

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from calib.engine.base import AskFailed
from calib.engine.plain import PlainAnswer, PlainClient
from calib.questions import Question

QUESTION = Question("1", "d", "choice", "", "Which?", ("a", "b"), 0)


async def answered(text: str) -> PlainAnswer:
    """The answer to a question, of a server that says this text."""

    async def decide(_request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/decide", decide)
    async with TestServer(app) as server:
        client = PlainClient(str(server.make_url("")))
        try:
            return await client.ask(QUESTION)
        finally:
            await client.close()


async def test_what_a_server_tells():
    thinking = {"used": True, "think_tokens": 12, "finished_within_budget": True, "threshold": 0.7, "budget": 64}
    told = {"probabilities": [0.25, 0.75], "thinking": thinking, "policy_version": "v", "elapsed_seconds": 1.5}
    found = await answered(json.dumps(told))
    np.testing.assert_array_equal(found.p, [0.25, 0.75])
    assert (found.thinks, found.finished, found.tokens, found.threshold, found.budget) == (True, True, 12, 0.7, 64.0)
    assert (found.version, found.elapsed, found.closed, found.degraded) == ("v", 1.5, False, False)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "NaN", "1e999", '"12"', "true", "-3", "null"])
async def test_numbers_that_are_none_are_not_told(number):
    thinking = f'{{"used": true, "think_tokens": {number}, "threshold": {number}}}'
    found = await answered(f'{{"probabilities": [1, 0], "thinking": {thinking}, "elapsed_seconds": {number}}}')
    assert found.tokens == 0
    assert found.threshold in (None, -3)
    assert np.isnan(found.elapsed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "missing_field"),
        ("{}", "wrong_length"),
        ('{"probabilities": [1]}', "wrong_length"),
        ('{"probabilities": [NaN, 1]}', "nan"),
        ('{"probabilities": [1' + "0" * 400 + ", 0]}", "nan"),
        ('{"probabilities": [0.5, 0.7]}', "sum_off"),
        ("[" * 200_000, "bad_json"),
    ],
)
async def test_answers_that_cannot_be_used_have_a_reason(text, reason):
    with pytest.raises(AskFailed) as failure:
        await answered(text)
    assert failure.value.reason == reason
    assert failure.value.seconds >= 0

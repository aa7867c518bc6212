"""Requests with anything in any place are answered or refused, and the gateway never fails on them."""

from __future__ import annotations

import asyncio
import copy
import random

import aiohttp
import pytest
from gateway_playing import BASH, check_exact, playing

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
TALK = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "ok"},
]
USE = {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "ok"}]}
SCHEMA = BASH["function"]["parameters"]
BODIES = {
    "v1/chat/completions": {
        "model": "m", "messages": TALK, "tools": [BASH], "max_tokens": 60, "stop": ["x"], "stream": True,
    },
    "v1/responses": {
        "model": "m", "instructions": "be good", "stream": True,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                  {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "ok"}],
        "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
    },
    "v1/messages": {
        "model": "m", "max_tokens": 60, "system": [{"type": "text", "text": "be good"}],
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [USE]},
                     {"role": "user", "content": [RESULT]}],
        "tools": [{"name": "bash", "description": "Run.", "input_schema": SCHEMA}],
    },
    "v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "v1/completions": {"model": "m", "prompt": "hi", "max_tokens": 60, "stop": "x"},
    "v1beta/models/m:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]},
                     {"role": "model", "parts": [{"functionCall": {"name": "bash", "args": {"command": "ls"}}}]},
                     {"role": "user", "parts": [{"functionResponse": {"name": "bash", "response": {"output": "ok"}}}]}],
        "tools": [{"functionDeclarations": [{"name": "bash", "parameters": {"type": "OBJECT"}}]}],
        "generationConfig": {"temperature": 0.5, "stopSequences": ["x"]},
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    },
}  # fmt: skip
JUNK = [None, True, -1, 2**70, 1.5, "", "text", "\u0000", [], [None], {}, {"a": {}}, [[]], {"type": "text"}, "é" * 40]


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def spoil(body, rng):
    """The body with something else in one or two places, or without them."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2])):
        path = rng.choice([path for path in places(body) if path])
        at = body
        for key in path[:-1]:
            at = at[key]
        if rng.random() < 0.15:
            del at[path[-1]]
        else:
            at[path[-1]] = copy.deepcopy(rng.choice(JUNK))
    return body


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.quick_cases(6)
def test_no_request_makes_the_gateway_fail(engine, path, caplog):
    async def play():
        rng, seen = random.Random(path), set()
        async with playing(engine) as place, aiohttp.ClientSession() as http:
            session = place.gateway.open()
            for number in range(150):
                body = spoil(BODIES[path], rng) if number else BODIES[path]
                async with http.post(f"{place.url(session)}/{path}", json=body) as response:
                    text = await response.text()
                    assert response.status in (200, 400, 413, 422), (response.status, body, text)
                    assert response.status != 200 or "event: error" not in text, (body, text)
                    seen.add(response.status)
            assert {200, 400} <= seen or path.endswith("count_tokens")
            check_exact(engine, [each.tokens for each in session.trace().sequences])

    asyncio.run(play())
    assert "a request failed" not in caplog.text

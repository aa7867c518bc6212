"""An OpenAI-compatible endpoint whose model follows a script: some answers are right.

    with scripted_chat() as url: ...            # http://127.0.0.1:PORT/v1

With `scripts`, a model of one of their names says what its script says, turn by turn. The model `broken` answers 500,
`broken-later` from its second turn on, and `silent` never answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from aiohttp import web
from beside import running


@contextmanager
def scripted_chat(scripts: dict[str, list[Any]] | None = None) -> Iterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", partial(complete, scripts or {}))
    with running(app) as port:
        yield f"http://127.0.0.1:{port}/v1"


def answer(messages: list[dict[str, Any]], tools: list[Any]) -> dict[str, Any]:
    """What the model says: text, or calls of tools."""
    first = next(str(message["content"]) for message in messages if message["role"] == "user")
    said = [message for message in messages if message["role"] == "assistant"]
    numbers = [int(number) for number in re.findall(r"\d+", first)]
    right = sum(numbers) % 2 == 0
    if first.startswith("Double") and tools and not said:
        return _call("double", {"number": numbers[0] if right else numbers[0] + 1})
    if first.startswith("Double"):
        results = [message["content"] for message in messages if message["role"] == "tool"]
        return {"content": results[-1] if results else str(2 * numbers[0] if right else 1)}
    if first.startswith("Count down"):
        return {"content": ["2", "1" if numbers[-1] % 2 == 0 else "9"][min(len(said), 1)]}
    if first.startswith("What is"):
        return {"content": str(eval(first[8 : first.index("?")])) if right else "none"}  # noqa: S307
    return {"content": "I do not know."}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


async def complete(scripts: dict[str, list[Any]], request: web.Request) -> web.Response:
    body = json.loads(await request.read())
    model, messages = body["model"], body["messages"]
    turns = sum(message["role"] == "assistant" for message in messages)
    if model == "broken" or (model == "broken-later" and turns):
        return web.json_response({"error": {"message": "out of order"}}, status=500)
    if model == "silent":
        await asyncio.sleep(3600)
    if model in scripts:
        said = scripts[model][turns]
        message = {"role": "assistant", **(said if isinstance(said, dict) else {"content": said})}
    else:
        message = {"role": "assistant", **answer(messages, body.get("tools") or [])}
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    whole = {"id": "c", "object": "chat.completion", "created": 0, "model": model, "choices": [choice], "usage": usage}
    return web.json_response(whole)

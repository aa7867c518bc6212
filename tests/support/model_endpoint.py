"""A model behind an endpoint: an answer of one, and how a policy is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from treetune import Task, Taskset, run_rollout
from treetune.core.policy import Completion, Request, Sampling
from treetune.models import EndpointConfig
from treetune.models.openai import OpenAIPolicy

GOOD = {
    "choices": [{"message": {"role": "assistant", "content": "42", "refusal": None}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


class Ask(Taskset):
    def load_tasks(self):
        return [Task(prompt="6 * 7?")]

    def reward(self, task, answer):
        return float(answer == "42")


def said(content: str | None = None, *, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """What a server sends for an answer."""
    return {"choices": [{"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}]}


def calls(*calls: tuple[str, Any], content: str | None = None) -> dict[str, Any]:
    """What a server sends for calls of tools: names and arguments."""
    made = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return said(content, finish="tool_calls", tool_calls=made)


@asynccontextmanager
async def endpoint(
    answer: Callable[[int, web.Request], Any], **options: Any
) -> AsyncIterator[tuple[OpenAIPolicy, list[dict[str, Any]]]]:
    """A policy at a server that answers request number n with `answer(n, request)`, and what it was asked."""
    requests: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append({"headers": dict(request.headers), "body": json.loads(await request.read())})
        answered = answer(len(requests) - 1, request)
        answered = await answered if asyncio.iscoroutine(answered) else answered
        return web.json_response(answered) if isinstance(answered, dict) else answered

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    policy = OpenAIPolicy("m", EndpointConfig(base_url=f"http://127.0.0.1:{port}/v1", **options))
    try:
        yield policy, requests
    finally:
        await policy.close()
        await runner.cleanup()


def ask(answer: Callable[[int, web.Request], Any], sampling: Sampling | None = None, **options):
    """One rollout against such a server."""

    async def run():
        async with endpoint(answer, **options) as (policy, requests):
            taskset = Ask()
            return await run_rollout(taskset, taskset[0], policy, sampling=sampling), requests

    return asyncio.run(run())


def complete(
    answer: Any,
    *,
    messages: Any = None,
    tools: Any = (),
    turn: int = 0,
    sampling: Sampling | None = None,
    **options: Any,
) -> tuple[Completion, dict[str, Any]]:
    """One completion, and the body of the request for it."""
    messages = messages or [{"role": "user", "content": "6 * 7?"}]

    async def run():
        async with endpoint(lambda n, r: answer, **options) as (policy, requests):
            request = Request(messages, sampling or Sampling(), Task(prompt="?"), turn, "key", tools=list(tools))
            return await policy.complete(request), requests[0]["body"]

    return asyncio.run(run())

"""A model behind an endpoint: an answer of one, and how a policy is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from treetune import Task, Taskset, run_rollout
from treetune.policies import EndpointConfig
from treetune.policies.openai import OpenAIPolicy
from treetune.policy import Sampling

GOOD = {
    "choices": [{"message": {"role": "assistant", "content": "42", "refusal": None}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


class Ask(Taskset):
    def load_tasks(self):
        return [Task(prompt="6 * 7?")]

    def reward(self, task, answer):
        return float(answer == "42")


def ask(answer: Callable[[int, web.Request], Any], sampling: Sampling | None = None, **endpoint):
    """One rollout against a server that answers request number n with `answer(n, request)`."""
    requests: list[dict] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append({"headers": dict(request.headers), "body": json.loads(await request.read())})
        answered = answer(len(requests) - 1, request)
        return await answered if asyncio.iscoroutine(answered) else answered

    async def run():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        policy = OpenAIPolicy("m", EndpointConfig(base_url=f"http://127.0.0.1:{port}/v1", **endpoint))
        try:
            taskset = Ask()
            return await run_rollout(taskset, taskset[0], policy, sampling=sampling)
        finally:
            await policy.close()
            await runner.cleanup()

    return asyncio.run(run()), requests

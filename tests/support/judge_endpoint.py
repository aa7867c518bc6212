"""A judge behind an endpoint: an OpenAI-compatible server that a scripted judge answers.

    with serving("Fair") as judge:
        judge.url, judge.answered

It answers at most `judge.most` requests; others wait until that changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import scripted_judges
from aiohttp import web
from beside import running

from treetune import Task
from treetune.core.policy import Request, Sampling


class JudgeEndpoint:
    url: str

    def __init__(self, judge: str, most: int) -> None:
        self._judge = getattr(scripted_judges, judge)()
        self.most = most
        self.answered: list[dict[str, Any]] = []
        """What it was asked and has answered."""

    def prompts(self) -> list[str]:
        return [request["body"]["messages"][-1]["content"] for request in self.answered]

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        while len(self.answered) >= self.most:  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.02)
        messages = body["messages"]
        said = self._judge.complete(Request(messages, Sampling(), Task(prompt=messages), 0, ""))
        self.answered.append({"headers": dict(request.headers), "body": body})
        usage = {"prompt_tokens": said.usage.prompt_tokens, "completion_tokens": said.usage.completion_tokens}
        message = {"role": "assistant", "content": said.text}
        return web.json_response(
            {"choices": [{"message": message, "finish_reason": said.finish_reason}], "usage": usage}
        )


@contextmanager
def serving(judge: str, most: int = 1_000_000) -> Iterator[JudgeEndpoint]:
    served, app = JudgeEndpoint(judge, most), web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    with running(app) as port:
        served.url = f"http://127.0.0.1:{port}/v1"
        yield served

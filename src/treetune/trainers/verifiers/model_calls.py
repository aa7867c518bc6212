"""Model calls between Treetune and verifiers, in both directions.

    conversation = await Conversation.open()
    running = asyncio.ensure_future(env.run_episode(task, client_at(conversation.url)))
    shown = await conversation.next(running)            # what the model is asked; None once the episode is over
    conversation.answer({"role": "assistant", "content": "42"})

When verifiers plays an episode, the policy that Treetune evaluates answers each of its model calls. verifiers addresses
models by URL, so this module serves an endpoint on the loopback interface of this process, with an unguessable path for
each conversation. All of it runs on the background loop.

When Treetune plays for verifiers, an `InterceptedModel` calls the model through verifiers' own endpoint.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any, NamedTuple, Self

from aiohttp import web

from treetune.chat.calls import read_call
from treetune.chat.message import Message, text_of
from treetune.core.policy import Completion, Request
from treetune.errors import ContextFullError, EnvironmentFault, PolicyError
from treetune.models import EndpointConfig
from treetune.models.openai import OpenAIPolicy

_open: dict[str, Conversation] = {}
_endpoints: dict[asyncio.AbstractEventLoop, asyncio.Future[str]] = {}
"""The endpoint address of each loop. There is one loop, and another one after a fork."""


class ModelCall(NamedTuple):
    """A model call by verifiers."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    stream: bool
    model: str
    reply: asyncio.Future[Message]


class Conversation:
    def __init__(self, token: str, base: str) -> None:
        self._token = token
        self.url = f"{base}/{token}/v1"
        self._asked: asyncio.Queue[ModelCall] = asyncio.Queue()
        self._current: ModelCall | None = None
        self._messages: list[Message] = []
        """The messages that were shown and answered so far."""
        self.tools: list[dict[str, Any]] = []

    @classmethod
    async def open(cls) -> Self:
        loop = asyncio.get_running_loop()
        if loop not in _endpoints:
            _endpoints[loop] = asyncio.ensure_future(_listen())
        token = secrets.token_urlsafe(16)
        conversation = cls(token, await asyncio.shield(_endpoints[loop]))
        _open[token] = conversation
        return conversation

    async def next(self, running: asyncio.Future[Any]) -> list[Message] | None:
        """Return the new messages when verifiers asks the model; None if the episode ended instead."""
        asking = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({asking, running}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return None
            asked = asking.result()
        finally:
            asking.cancel()
        if not self._asked.empty():
            raise EnvironmentFault(
                "verifiers requested several answers at once, but an episode has one conversation",
                remedy="use a harness without sub-agents (--taskset.harness)",
            )
        known = self._messages
        if list(map(_gist, asked.messages[: len(known)])) != list(map(_gist, known)):
            raise EnvironmentFault(
                "verifiers sent a conversation that differs from the last one: its harness shortens or rewrites it",
                remedy="use a harness that only adds to a conversation (--taskset.harness)",
            )
        self._current, self.tools = asked, asked.tools
        new = asked.messages[len(known) :]
        self._messages = list(asked.messages)
        return new

    def answer(self, message: Message) -> None:
        asked, self._current = self._current, None
        if asked is None:
            raise EnvironmentFault("verifiers has not requested an answer")
        self._messages.append(message)
        if not asked.reply.done():
            asked.reply.set_result(message)

    def close(self) -> None:
        _open.pop(self._token, None)
        waiting = [self._current] if self._current is not None else []
        while not self._asked.empty():
            waiting.append(self._asked.get_nowait())
        for asked in waiting:
            asked.reply.cancel()

    def ask(self, body: dict[str, Any]) -> ModelCall:
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        asked = ModelCall(
            body["messages"], body.get("tools") or [], bool(body.get("stream")), str(body.get("model")), reply
        )
        self._asked.put_nowait(asked)
        return asked


def _gist(message: Message) -> tuple[Any, ...]:
    """Return the role, text and calls of a message in one form."""
    calls = [(call.name, call.arguments) for call in map(read_call, message.get("tool_calls") or [])]
    content = message.get("content")
    return message.get("role"), (text_of(content) or "").strip(), calls


# The endpoint


async def _listen() -> str:
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/{token}/v1/chat/completions", _complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _complete(request: web.Request) -> web.StreamResponse:
    conversation = _open.get(request.match_info["token"])
    if conversation is None:
        return web.json_response({"error": {"message": "this episode is over"}}, status=404)
    asked = conversation.ask(json.loads(await request.read()))
    try:
        message = await asked.reply
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return web.json_response({"error": {"message": "this episode is over"}}, status=404)
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    whole = {"id": secrets.token_hex(8), "created": 0, "model": asked.model}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    if not asked.stream:
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return web.json_response({**whole, "object": "chat.completion", "choices": [choice], "usage": usage})
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or [])]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": usage},
    ]
    events = [json.dumps({**whole, "object": "chat.completion.chunk", **part}) for part in parts]
    text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return web.Response(text=text, content_type="text/event-stream")


class InterceptedModel(OpenAIPolicy):
    def __init__(self, model: str, endpoint: str, secret: str, trace: Any, system: str | None, config: Any) -> None:
        """`trace` is verifiers' own, which tells whether one of verifiers' limits has ended it. `system` replaces the
        task's system prompt."""
        place = EndpointConfig(base_url=endpoint, timeout=config.model_timeout, max_retries=config.model_retries)
        super().__init__(model, place)
        self._server.headers["Authorization"] = f"Bearer {secret}"
        self._trace, self._system = trace, system

    async def complete(self, request: Request) -> Completion:
        if self._system is not None:
            request.messages = _with_system(request.messages, self._system)
        try:
            return await super().complete(request)
        except PolicyError as error:
            if self._trace.stop_condition is None:
                raise
            # Not a failure: it counts with what it has earned so far, as under our own limits.
            raise ContextFullError(f"verifiers ended it: {self._trace.stop_condition}") from error

    def _call_headers(self, request: Request) -> dict[str, str]:
        # A call that is repeated because its reply was lost is not sampled and recorded twice.
        return {"Idempotency-Key": f"turn-{request.turn}"}


def _with_system(messages: list[Message], system: str) -> list[Message]:
    rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [{"role": "system", "content": system}, *rest]

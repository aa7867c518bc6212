"""OpenAI's chat completions: `POST /chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from treetune.chat.calls import function_of
from treetune.chat.message import Message
from treetune.gateway.call import Call, Refused, Reply
from treetune.gateway.dialects import Body, check_fields, choose_tools, read_sampling, write_error
from treetune.gateway.streaming import Part
from treetune.system.http_error import HttpError, encode

_KNOWN = (
    "messages model tools tool_choice max_tokens max_completion_tokens temperature top_p top_k stop seed stream "
    "stream_options n"
)
_OPTIONAL = (
    "user metadata store parallel_tool_calls service_tier prompt_cache_key prompt_cache_retention reasoning_effort "
    "frequency_penalty presence_penalty logit_bias logprobs top_logprobs response_format safety_identifier verbosity"
)
_ROLES = ("system", "user", "assistant", "tool")


def read(body: Body) -> Call:
    ignored = check_fields(body, _KNOWN, _OPTIONAL)
    if (body.get("n") or 1) != 1:
        raise Refused(400, "n must be 1: a call is answered once; send several calls")
    tools = [_read_tool(tool) for tool in body.get("tools") or []]
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    asked = {name: body.get(name) for name in ("temperature", "top_p", "stop", "seed")}
    return Call(
        messages=[_read_message(message) for message in body["messages"]],
        tools=choose_tools(tools, body.get("tool_choice"), ignored),
        sampling=read_sampling({"max_tokens": most, **asked}, top_k=body.get("top_k")),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        ignored=ignored,
        stream_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def _read_tool(tool: Body) -> Body:
    if tool.get("type") != "function":
        raise Refused(400, f"tools of the kind {tool.get('type')!r} are not supported: send functions")
    if not isinstance(tool["function"]["name"], str):
        raise Refused(400, "a tool has no name")
    return tool


def _read_message(message: Message) -> Message:
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls") or []
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise Refused(400, f"the role {role!r} is not supported: use {', '.join(_ROLES)}")
    if not isinstance(content, str | list | None) or not isinstance(calls, list):
        raise Refused(400, f"the content of a message is text or a list of parts, not {content!r:.60}")
    for call in calls:
        if not isinstance(function_of(call)["name"], str):
            raise Refused(400, "a tool call has no name")
    read = {key: value for key, value in message.items() if value is not None}
    if not calls:
        read.pop("tool_calls", None)
    return {**read, "role": role, "content": content}


def write(call: Call, reply: Reply) -> bytes:
    choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish, "logprobs": None}
    return encode(
        {**_head(call, reply.number), "object": "chat.completion", "choices": [choice], "usage": usage(reply)}
    )


def _head(call: Call, number: int) -> Body:
    return {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": call.model}


def usage(reply: Reply) -> dict[str, int]:
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return {**counts, "total_tokens": sum(counts.values())}


class ChatEvents:
    def __init__(self, call: Call) -> None:
        self._call = call
        base = {**_head(call, time.monotonic_ns()), "object": "chat.completion.chunk"}
        self._start = b"data: " + encode(base)[:-1]

    def _event(self, delta: bytes, finish: bytes = b"null") -> bytes:
        return b'%b,"choices":[{"index":0,"delta":%b,"finish_reason":%b}]}\n\n' % (self._start, delta, finish)

    def begin(self) -> bytes:
        return self._event(b'{"role":"assistant","content":""}')

    def part(self, part: Part) -> bytes:
        kind, text = part
        name = b"content" if kind == "content" else b"reasoning_content"
        return self._event(b'{"%b":%b}' % (name, encode(text)))

    def end(self, reply: Reply) -> Iterator[bytes]:
        for number, call in enumerate(reply.message.get("tool_calls") or []):
            yield self._event(encode({"tool_calls": [{"index": number, **call}]}))
        yield self._event(b"{}", encode(reply.finish))
        if self._call.stream_usage:
            yield b'%b,"choices":[],"usage":%b}\n\n' % (self._start, encode(usage(reply)))
        yield b"data: [DONE]\n\n"

    def fail(self, error: HttpError) -> bytes:
        return b"data: " + encode({"error": write_error(error)}) + b"\n\n"


def openai_error(error: Refused) -> dict[str, Any]:
    return {"message": str(error), "type": error.kind, "code": error.kind, "param": None}

"""Anthropic's messages: `POST /messages` and `/messages/count_tokens`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from treetune.chat.message import Message
from treetune.gateway.call import Call, Refused, Reply
from treetune.gateway.dialects import Body, check_fields, choose_tools, read_sampling, read_text, write_tool
from treetune.gateway.pieces import arguments_of
from treetune.gateway.streaming import Part
from treetune.system.http_error import HttpError, encode

_KNOWN = "messages model system tools tool_choice max_tokens temperature top_p top_k stop_sequences stream"
_OPTIONAL = (
    "metadata thinking service_tier context_management output_config betas mcp_servers container cache_control "
    "inference_geo speed"
)
_BILLING = re.compile(r"^x-anthropic-[a-z-]+:[^\n]*\n?")
"""A line at the beginning of Claude Code's system prompt, with a number that differs in every request."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "treetune"


def read(body: Body) -> Call:
    ignored = check_fields(body, _KNOWN, _OPTIONAL)
    messages: list[Message] = []
    if system := _read_system(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _read_message(message)
    tools = [_read_tool(tool) for tool in body.get("tools") or []]
    asked = {name: body.get(name) for name in ("temperature", "top_p", "max_tokens")}
    return Call(
        messages=messages,
        tools=choose_tools(tools, (body.get("tool_choice") or {}).get("type"), ignored),
        sampling=read_sampling({**asked, "stop": body.get("stop_sequences")}, top_k=body.get("top_k")),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        continues=bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"),
        ignored=ignored,
    )


def read_count(body: Body) -> Call:
    return read({"max_tokens": 1, **body})


def _read_system(content: Any) -> str:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    texts = (_BILLING.sub("", read_text([block])) for block in blocks)
    return "\n\n".join(filter(None, texts))


def _read_tool(tool: Body) -> Body:
    if "input_schema" not in tool:
        kind = tool.get("type")
        raise Refused(400, f"the tool {tool.get('name')!r} ({kind}) runs on Anthropic's servers, and not here")
    return write_tool(tool["name"], tool.get("description"), tool["input_schema"])


def _read_message(message: Message) -> list[Message]:
    content, role = message["content"], message["role"]
    if role not in ("user", "assistant", "system"):
        raise Refused(400, f"the role {role!r} is not supported")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    calls: list[Message] = []
    results: list[Message] = []
    for block in content:
        match block["type"]:
            case "text":
                texts.append(str(block["text"]))
            case "tool_use":
                function = {"name": str(block["name"]), "arguments": encode(block["input"]).decode()}
                calls.append({"id": str(block["id"]), "type": "function", "function": function})
            case "tool_result":
                text = read_text(block.get("content"))
                results.append({"role": "tool", "tool_call_id": str(block["tool_use_id"]), "content": text})
            case "thinking" | "redacted_thinking":
                pass  # the tokens that were sampled have it
            case kind:
                raise Refused(400, f"content of the kind {kind!r} is not supported: send text")
    text = "\n\n".join(texts)
    if calls:
        return [*results, {"role": role, "content": text or None, "tool_calls": calls}]
    return [*results, {"role": role, "content": text}] if texts or not results else results


def _write_call(call: Message) -> Body:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": arguments_of(function["arguments"]),
    }


def _write_blocks(reply: Reply) -> list[Body]:
    message, blocks = reply.message, []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    return blocks + [_write_call(call) for call in message.get("tool_calls") or []]


def _write_whole(call: Call, reply: Reply | None, number: int) -> Body:
    usage = {
        "input_tokens": reply.prompt_tokens if reply is not None else 0,
        "output_tokens": reply.completion_tokens if reply is not None else 0,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
    }
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": _write_blocks(reply) if reply is not None else [],
        "stop_reason": _REASONS.get(reply.finish, reply.finish) if reply is not None else None,
        "stop_sequence": None,
        "usage": usage,
    }


def write(call: Call, reply: Reply) -> bytes:
    return encode(_write_whole(call, reply, reply.number))


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


class MessageEvents:
    def __init__(self, call: Call) -> None:
        self._call, self._number = call, time.monotonic_ns()
        self._index, self._open = -1, ""

    def begin(self) -> bytes:
        return _event("message_start", message=_write_whole(self._call, None, self._number)) + _event("ping")

    def part(self, part: Part) -> bytes:
        kind, text = part
        head = self._begin_block(kind) if kind != self._open else b""
        name, field = ("text_delta", "text") if kind == "content" else ("thinking_delta", "thinking")
        return head + self._delta({"type": name, field: text})

    def _begin_block(self, kind: str) -> bytes:
        head = self._end_block()
        self._index, self._open = self._index + 1, kind
        text = {"type": "text", "text": ""}
        block = text if kind == "content" else {"type": "thinking", "thinking": "", "signature": ""}
        return head + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Body) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        reasoning, self._open = self._open == "reasoning", ""
        signature = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if reasoning else b""
        return signature + _event("content_block_stop", index=self._index)

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield self._end_block()
        for call in reply.message.get("tool_calls") or []:
            self._index += 1
            block = _write_call(call)
            yield _event("content_block_start", index=self._index, content_block={**block, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": encode(block["input"]).decode()})
            yield _event("content_block_stop", index=self._index)
        whole = _write_whole(self._call, reply, self._number)
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=whole["usage"])
        yield _event("message_stop")

    def fail(self, error: HttpError) -> bytes:
        return _event("error", error={"type": "api_error", "message": str(error)})

"""OpenAI's responses: `POST /responses`. The gateway keeps no conversations, so each request sends its whole input."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from treetune.chat.message import Message
from treetune.gateway.call import Call, Refused, Reply
from treetune.gateway.dialects import (
    Body,
    check_fields,
    choose_tools,
    read_sampling,
    read_text,
    write_tool,
)
from treetune.gateway.streaming import Part
from treetune.system.http_error import HttpError, encode

_KNOWN = (
    "input model instructions tools tool_choice max_output_tokens temperature top_p stream previous_response_id "
    "conversation"
)
_OPTIONAL = (
    "user metadata store parallel_tool_calls service_tier prompt_cache_key prompt_cache_retention reasoning include "
    "text truncation background top_logprobs client_metadata stream_options safety_identifier max_tool_calls"
)
_OPTIONAL_TOOLS = ("namespace", "web_search", "web_search_preview", "image_generation")
"""Kinds of tools that agents offer next to their own, and can do without."""
_TEXTS = ("input_text", "output_text", "text")


def read(body: Body) -> Call:
    ignored = check_fields(body, _KNOWN, _OPTIONAL)
    for name in ("previous_response_id", "conversation"):
        if body.get(name):
            raise Refused(400, f"{name} is not supported: the gateway keeps no conversations; send the whole input")
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": str(instructions)})
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        _read_item(item, messages)
    tools = [read for tool in body.get("tools") or [] if (read := _read_tool(tool, ignored)) is not None]
    asked = {name: body.get(name) for name in ("temperature", "top_p")}
    return Call(
        messages=messages,
        tools=choose_tools(tools, body.get("tool_choice"), ignored),
        sampling=read_sampling({**asked, "max_tokens": body.get("max_output_tokens")}),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        ignored=ignored,
    )


def _read_tool(tool: Body, ignored: list[str]) -> Body | None:
    if tool.get("type") in _OPTIONAL_TOOLS:
        ignored.append(f"tool {tool.get('name') or tool['type']} is left out")
        return None
    if tool.get("type") != "function":
        raise Refused(400, f"tools of the kind {tool.get('type')!r} are not supported: send functions")
    return write_tool(tool["name"], tool.get("description"), tool.get("parameters"))


def _read_item(item: Body, messages: list[Message]) -> None:
    last = messages[-1] if messages else {}
    match item.get("type", "message"):
        case "message":
            role = "system" if item["role"] == "developer" else item["role"]
            if role not in ("system", "user", "assistant"):
                raise Refused(400, f"the role {role!r} is not supported")
            messages.append({"role": role, "content": read_text(item["content"], _TEXTS)})
        case "function_call":
            function = {"name": str(item["name"]), "arguments": str(item["arguments"])}
            call = {"id": str(item["call_id"]), "type": "function", "function": function}
            if last.get("role") == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", []), call]
                last["content"] = last["content"] or None
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            content = read_text(item["output"], _TEXTS)
            messages.append({"role": "tool", "tool_call_id": str(item["call_id"]), "content": content})
        case "reasoning":
            pass  # the tokens that were sampled have it
        case kind:
            raise Refused(400, f"input of the kind {kind!r} is not supported")


def _write_reasoning(number: int, text: str) -> Body:
    return {"type": "reasoning", "id": f"rs_{number}", "summary": [{"type": "summary_text", "text": text}]}


def _write_text(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _write_message(number: int, text: str, status: str = "completed") -> Body:
    content = [_write_text(text)] if status == "completed" else []
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": content}


def _write_call(call: Body) -> Body:
    id = call["id"]
    return {"type": "function_call", "id": f"fc_{id}", "call_id": id, "status": "completed", **call["function"]}


def _write_items(reply: Reply, number: int) -> list[Body]:
    message, items = reply.message, []
    if thought := message.get("reasoning_content"):
        items.append(_write_reasoning(number, thought))
    if text := message.get("content"):
        items.append(_write_message(number, text))
    return items + [_write_call(call) for call in message.get("tool_calls") or []]


def _write_whole(call: Call, reply: Reply | None, number: int) -> Body:
    is_cut = reply is not None and reply.finish == "length"
    usage = None
    if reply is not None:
        usage = {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": call.model,
        "status": "in_progress" if reply is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "output": _write_items(reply, number) if reply is not None else [],
        "parallel_tool_calls": True,
        "temperature": call.sampling.temperature,
        "top_p": call.sampling.top_p,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def write(call: Call, reply: Reply) -> bytes:
    return encode(_write_whole(call, reply, reply.number))


class ResponseEvents:
    def __init__(self, call: Call) -> None:
        self._call, self._sequence, self._number = call, 0, time.monotonic_ns()
        self._index, self._open, self._text = -1, "", ""

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(event))

    def begin(self) -> bytes:
        whole = _write_whole(self._call, None, self._number)
        return self._event("response.created", response=whole) + self._event("response.in_progress", response=whole)

    def part(self, part: Part) -> bytes:
        kind, text = part
        head = self._begin_item(kind) if kind != self._open else b""
        self._text += text
        if kind == "reasoning":
            place = {"item_id": f"rs_{self._number}", "output_index": self._index, "summary_index": 0}
            return head + self._event("response.reasoning_summary_text.delta", delta=text, **place)
        return head + self._event("response.output_text.delta", delta=text, logprobs=[], **self._place())

    def _place(self) -> Body:
        return {"item_id": f"msg_{self._number}", "output_index": self._index, "content_index": 0}

    def _begin_item(self, kind: str) -> bytes:
        head = self._end_item()
        self._index, self._open = self._index + 1, kind
        if kind == "reasoning":
            item: Body = {**_write_reasoning(self._number, ""), "summary": []}
            place = {"item_id": item["id"], "output_index": self._index, "summary_index": 0}
            part = {"type": "summary_text", "text": ""}
            added = self._event("response.output_item.added", output_index=self._index, item=item)
            return head + added + self._event("response.reasoning_summary_part.added", part=part, **place)
        item = _write_message(self._number, "", "in_progress")
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return head + added + self._event("response.content_part.added", part=_write_text(""), **self._place())

    def _end_item(self) -> bytes:
        kind, text, at = self._open, self._text, self._index
        self._open = self._text = ""
        if not kind:
            return b""
        if kind == "reasoning":
            item = _write_reasoning(self._number, text)
            place = {"item_id": item["id"], "output_index": at, "summary_index": 0}
            done = self._event("response.reasoning_summary_text.done", text=text, **place)
            done += self._event("response.reasoning_summary_part.done", part=item["summary"][0], **place)
        else:
            item = _write_message(self._number, text)
            done = self._event("response.output_text.done", text=text, logprobs=[], **self._place())
            done += self._event("response.content_part.done", part=_write_text(text), **self._place())
        return done + self._event("response.output_item.done", output_index=at, item=item)

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield self._end_item()
        for call in reply.message.get("tool_calls") or []:
            self._index += 1
            item, at = _write_call(call), self._index
            begun = {**item, "status": "in_progress", "arguments": ""}
            yield self._event("response.output_item.added", output_index=at, item=begun)
            place, arguments = {"item_id": item["id"], "output_index": at}, item["arguments"]
            yield self._event("response.function_call_arguments.delta", delta=arguments, **place)
            yield self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **place)
            yield self._event("response.output_item.done", output_index=at, item=item)
        kind = "response.incomplete" if reply.finish == "length" else "response.completed"
        yield self._event(kind, response=_write_whole(self._call, reply, self._number))

    def fail(self, error: HttpError) -> bytes:
        return self._event("error", code=error.kind, message=str(error), param=None)

"""Google's `POST /models/MODEL:generateContent`, and `:streamGenerateContent?alt=sse`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treetune.chat.message import Message
from treetune.gateway.call import Call, Refused, Reply
from treetune.gateway.dialects import Body, check_fields, choose_tools, read_sampling, write_error, write_tool
from treetune.gateway.pieces import arguments_of
from treetune.gateway.streaming import Part
from treetune.system.http_error import HttpError, encode

_KNOWN = "contents systemInstruction tools toolConfig generationConfig model stream"
_OPTIONAL = "safetySettings labels cachedContent"
_KNOWN_SETTINGS = "temperature topP topK maxOutputTokens stopSequences seed candidateCount"
_OPTIONAL_SETTINGS = (
    "thinkingConfig responseMimeType responseModalities responseSchema responseJsonSchema presencePenalty "
    "frequencyPenalty responseLogprobs logprobs mediaResolution speechConfig"
)
_SETTINGS = {"temperature": "temperature", "topP": "top_p", "maxOutputTokens": "max_tokens", "seed": "seed"}
_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}


def read(body: Body) -> Call:
    """The body of a request, with the `model` and the `stream` that its path names."""
    body = {_camel(name): value for name, value in body.items()}
    ignored = check_fields(body, _KNOWN, _OPTIONAL)
    settings = {_camel(name): value for name, value in (body.get("generationConfig") or {}).items()}
    ignored += check_fields(settings, _KNOWN_SETTINGS, _OPTIONAL_SETTINGS)
    if (settings.get("candidateCount") or 1) != 1:
        raise Refused(400, "candidateCount must be 1: a call is answered once; send several calls")
    messages: list[Message] = []
    if (system := body.get("systemInstruction")) is not None:
        text = system if isinstance(system, str) else "".join(_text(part) for part in system["parts"])
        messages.append({"role": "system", "content": text})
    for at, content in enumerate(body["contents"]):
        messages += _read_content(content, at)
    _name_calls(messages)
    asked = {name: settings.get(key) for key, name in _SETTINGS.items()}
    mode = (((body.get("toolConfig") or {}).get("functionCallingConfig") or {}).get("mode") or "AUTO").lower()
    return Call(
        messages=messages,
        tools=choose_tools(_read_tools(body.get("tools") or [], ignored), mode, ignored),
        sampling=read_sampling({**asked, "stop": settings.get("stopSequences")}, top_k=settings.get("topK")),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        ignored=ignored,
    )


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _text(part: Body) -> str:
    if "text" not in part:
        raise Refused(400, f"a part with {', '.join(part) or 'nothing'} is not supported: send text")
    return str(part["text"])


def _read_tools(tools: list[Body], ignored: list[str]) -> list[Body]:
    read = []
    for tool in tools:
        for kind, value in tool.items():
            if _camel(kind) != "functionDeclarations":
                ignored.append(f"tool {kind} is left out")
                continue
            for function in value:
                schema = function.get("parametersJsonSchema") or function.get("parameters_json_schema")
                parameters = schema or _lower_types(function.get("parameters"))
                read.append(write_tool(function["name"], function.get("description"), parameters))
    return read


def _lower_types(schema: Any) -> Any:
    """A schema with JSON Schema's names of types: Google writes them in capitals."""
    if isinstance(schema, list):
        return [_lower_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) else _lower_types(value)
        for key, value in schema.items()
    }


def _read_content(content: Body, at: int) -> list[Message]:
    role = content.get("role") or "user"
    if role not in ("user", "model", "function"):
        raise Refused(400, f"the role {role!r} is not supported")
    texts: list[str] = []
    calls: list[Message] = []
    results: list[Message] = []
    for raw in content.get("parts") or []:
        part = {_camel(key): value for key, value in raw.items()}
        if (made := part.get("functionCall")) is not None:
            function = {"name": str(made["name"]), "arguments": encode(made.get("args") or {}).decode()}
            calls.append({"id": made.get("id"), "type": "function", "function": function})
        elif (given := part.get("functionResponse")) is not None:
            name, response = str(given["name"]), given.get("response") or {}
            text = response["output"] if response.keys() == {"output"} else response
            text = text if isinstance(text, str) else encode(text).decode()
            results.append({"role": "tool", "name": name, "tool_call_id": given.get("id"), "content": text})
        elif not part.get("thought"):
            texts.append(_text(part))
    said: Message = {"role": "assistant" if role == "model" else "user", "content": "".join(texts)}
    if calls:
        said |= {"content": said["content"] or None, "tool_calls": calls}
    return [*results, said] if texts or calls or not results else results


def _name_calls(messages: list[Message]) -> None:
    """Gives ids to calls and results without one, in their order."""
    waiting: list[str] = []
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or []):
            call["id"] = str(call["id"] or f"g{at % 10_000:04}{number % 10_000:04}")
            waiting.append(call["id"])
        if message["role"] == "tool":
            first = waiting.pop(0) if waiting else f"g{at % 10_000:04}0000"
            message["tool_call_id"] = str(message["tool_call_id"] or first)


def _whole(call: Call, parts: list[Body], reply: Reply | None) -> Body:
    candidate: Body = {"content": {"role": "model", "parts": parts}, "index": 0}
    whole: Body = {"candidates": [candidate], "modelVersion": call.model}
    if reply is not None:
        candidate["finishReason"] = _REASONS.get(reply.finish, "OTHER")
        whole["usageMetadata"] = {
            "promptTokenCount": reply.prompt_tokens,
            "candidatesTokenCount": reply.completion_tokens,
            "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
        }
    return whole


def _write_calls(reply: Reply) -> list[Body]:
    calls = reply.message.get("tool_calls") or []
    functions = [(call["id"], call["function"]) for call in calls]
    return [
        {"functionCall": {"id": id, "name": function["name"], "args": arguments_of(function["arguments"])}}
        for id, function in functions
    ]


def write(call: Call, reply: Reply) -> bytes:
    parts: list[Body] = []
    if thought := reply.message.get("reasoning_content"):
        parts.append({"text": thought, "thought": True})
    if text := reply.message.get("content"):
        parts.append({"text": text})
    return encode(_whole(call, parts + _write_calls(reply), reply))


class GoogleEvents:
    def __init__(self, call: Call) -> None:
        self._call = call

    def _event(self, parts: list[Body], reply: Reply | None = None) -> bytes:
        return b"data: " + encode(_whole(self._call, parts, reply)) + b"\n\n"

    def begin(self) -> bytes:
        return b""

    def part(self, part: Part) -> bytes:
        kind, text = part
        return self._event([{"text": text, "thought": True} if kind == "reasoning" else {"text": text}])

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield self._event(_write_calls(reply), reply)

    def fail(self, error: HttpError) -> bytes:
        return b"data: " + encode({"error": {**write_error(error), "code": error.status}}) + b"\n\n"

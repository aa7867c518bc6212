"""NeMo Gym's rows: each line of JSON holds a request of OpenAI's Responses API plus free fields.

    to_nemo({"prompt": [{"role": "user", "content": "2 + 2?"}], "ground_truth": "4", "extra_info": {}})
    # {"responses_create_params": {"input": [...]}, "expected_answer": "4", "extra_info": {}}

`from_nemo` returns the row with the columns that other formats have. Everything else in a request (tools, temperature)
is kept in `extra_info`, and written back into the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treetune.chat.calls import function_of
from treetune.chat.message import Message

PARAMS, TRUTH = "responses_create_params", "expected_answer"
KEPT = "treetune_columns"
"""Columns stored unchanged because the layout has no place for them."""


def to_nemo(row: Mapping[str, Any]) -> dict[str, Any]:
    row, extra = dict(row), dict(row["extra_info"])
    prompt, truth = row.pop("prompt"), row.pop("ground_truth", None)
    further = extra.pop(PARAMS) if isinstance(extra.get(PARAMS), dict) else {}
    kept = {TRUTH: row.pop(TRUTH)} if TRUTH in row else {}
    items = to_items(prompt)
    if from_items(items) != prompt:
        kept["prompt"] = prompt
    answer = {} if truth is None else {TRUTH: truth}
    added = {KEPT: kept} if kept else {}
    return {PARAMS: {"input": items, **further}, **answer, **row, "extra_info": extra, **added}


def from_nemo(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read a row, including rows of other programs and faulty rows, which validation reports."""
    if PARAMS not in row:
        return dict(row)
    params, kept = row[PARAMS], row.get(KEPT)
    plain = {name: value for name, value in row.items() if name not in (PARAMS, TRUTH, KEPT)}
    if isinstance(params, dict):
        if "input" in params:
            plain["prompt"] = from_items(params["input"])
        further = {key: value for key, value in params.items() if key != "input"}
        extra = plain.get("extra_info", {})
        if further and isinstance(extra, dict):
            plain["extra_info"] = {**extra, PARAMS: further}
    if TRUTH in row:
        plain["ground_truth"] = row[TRUTH]
    return {**plain, **kept} if isinstance(kept, dict) else plain


def to_items(messages: list[Message]) -> list[dict[str, Any]]:
    """Convert chat messages to items of the Responses API, where tool calls and their results are separate items."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if role == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": content or ""}
            )
            continue
        if content or not calls:
            further = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
            items.append({**further, "content": _map_parts(content, _to_part, role)})
        for call in calls or ():
            function = function_of(call)
            named = {"name": function.get("name"), "arguments": function.get("arguments")}
            items.append({"type": "function_call", "call_id": call.get("id"), **named})
    return items


def from_items(items: Any) -> Any:
    """Convert such items, or a text, to messages. Anything else is returned unchanged."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        return items
    messages: list[Any] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif isinstance(item, dict) and "role" in item:
            named = {key: value for key, value in item.items() if (key, value) != ("type", "message")}
            if "content" in named:
                named["content"] = _map_parts(named["content"], _from_part, None)
            messages.append(named)
        else:
            messages.append(item)
    return messages


def _map_parts(content: Any, change: Any, role: Any) -> Any:
    return [change(part, role) for part in content] if isinstance(content, list) else content


def _to_part(part: Any, role: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return {**part, "type": "output_text" if role == "assistant" else "input_text"}
    if kind == "image_url":
        image = part["image_url"]
        named = image if isinstance(image, dict) else {"url": image}
        return {"type": "input_image", "image_url": named.get("url"), "detail": named.get("detail", "auto")}
    return part


def _from_part(part: Any, role: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {**part, "type": "text"}
    if kind == "input_image":
        detail = {} if part.get("detail", "auto") == "auto" else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), **detail}}
    return part

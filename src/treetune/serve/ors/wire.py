"""What ORS's clients ask, and what they are answered (ors-sdk 0.1).

POST /my-tasks/call {"name": "answer", "input": {"text": "42"}}
event: end
data: {"ok": true, "output": {"blocks": [...], "metadata": {...}, "reward": 1.0, "finished": true}}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from treetune.core.environment import Observation, Step
from treetune.core.tool_messages import parts_of
from treetune.serve.http.asgi import format_event
from treetune.serve.http.wire import encode

_CHUNK = 4096
"""Characters of an event: the client reads lines, and long ones are none to it."""


class CreateBody(msgspec.Struct, forbid_unknown_fields=True):
    env_name: str | None = None
    task_spec: dict[str, Any] | None = None
    split: str | None = None
    index: int | None = None
    secrets: dict[str, str] | None = None
    """Not used: what an environment needs is in the config of the server."""

    def __post_init__(self) -> None:
        by_index = self.split is not None and self.index is not None
        if (self.task_spec is not None) == by_index:
            raise ValueError("Provide either task_spec or both split and index, not both/neither")


class CallBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input: dict[str, Any]
    task_id: str | None = None
    """Of a call that was made before: its result is asked for again."""


def blocks_of(observation: Observation) -> list[dict[str, Any]]:
    return [_block(part) for part in parts_of(observation.messages())]


def _block(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"text": part["text"], "detail": None, "type": "text"}
    image = part["image_url"]
    url = str(image.get("url", "") if isinstance(image, dict) else image)
    head, _, data = url.partition(";base64,")
    if head.startswith("data:image/") and data:
        return {"data": data, "mimeType": head.removeprefix("data:"), "detail": None, "type": "image"}
    return {"text": f"[image {url}]", "detail": None, "type": "text"}


def result_of(step: Step) -> str:
    """The result of a call. One that went wrong, and changed nothing, is ORS's error: its text is for the model."""
    errors = [call.error for call in step.calls if call.error is not None]
    if errors and not step.done and not step.reward:
        return error_result(errors[0])
    output = {
        "blocks": blocks_of(step.observation),
        "metadata": step.info or None,
        "reward": step.reward,
        "finished": step.done,
    }
    return encode({"ok": True, "output": output}).decode()


def error_result(problem: str) -> str:
    return encode({"ok": False, "error": problem}).decode()


def events_of(result: str) -> Iterator[bytes]:
    """The events that a result is sent in."""
    for begin, end in _cut(result):
        name = "end" if end == len(result) else "chunk"
        yield format_event(name, result[begin:end].encode())


def _cut(text: str) -> Iterator[tuple[int, int]]:
    """No part begins with a space: the client would drop it."""
    begin = 0
    while begin < len(text):
        end = min(begin + _CHUNK, len(text))
        while end < len(text) and text[end].isspace():
            end += 1
        yield begin, end
        begin = end

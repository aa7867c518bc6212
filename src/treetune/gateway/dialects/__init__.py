"""The APIs that agents speak. Each dialect reads a request as a `Call`, and writes a `Reply`, whole or as a stream.

A field that a dialect does not know is refused by name. A few that make no difference to what is sampled, or that
agents can do without, are left out; the notes of the session name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec

from treetune.core.policy import Sampling
from treetune.errors import did_you_mean
from treetune.gateway.call import Call, Refused, Reply
from treetune.gateway.streaming import Part
from treetune.system.http_error import HttpError

Body = dict[str, Any]


class Events(Protocol):
    """Writes one streamed answer."""

    def begin(self) -> bytes: ...

    def part(self, part: Part) -> bytes: ...

    def end(self, reply: Reply) -> Iterator[bytes]:
        """Writes tool calls and the end. The parts before had all of the reasoning and the content."""
        ...

    def fail(self, error: HttpError) -> bytes: ...


class Dialect(NamedTuple):
    read: Callable[[Body], Call]
    write: Callable[[Call, Reply], bytes]
    events: Callable[[Call], Events]


def check_fields(body: Body, known: str, optional: str) -> list[str]:
    """The fields that are left out. Raises `Refused` for unknown ones."""
    names, left_out = _split(known), _split(optional)
    for name in body:
        if name not in names and name not in left_out:
            hint = did_you_mean(name, names | left_out)
            raise Refused(400, f"this gateway does not know the field {name!r}{hint}")
    given = [name for name in body if name in left_out]
    return [f"field {name} is left out" for name in given if body[name] not in (None, {}, [], False)]


@lru_cache
def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


def read_sampling(values: Body, **extra: Any) -> Sampling:
    """The settings of a call, by their names in `Sampling`; None is not set."""
    given = {name: value for name, value in values.items() if value is not None}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = [stop]
    further = {name: value for name, value in extra.items() if value is not None}
    try:
        return msgspec.convert({**given, "extra": further}, Sampling)
    except msgspec.ValidationError as error:
        raise Refused(400, str(error)) from None


def read_text(content: Any, kinds: tuple[str, ...] = ("text",), between: str = "") -> str:
    """A content of text, or of text blocks of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.get("type") not in kinds:
            raise Refused(400, f"content of the kind {block.get('type')!r} is not supported: send text")
    return between.join(str(block["text"]) for block in content)


def choose_tools(tools: list[Body], choice: Any, ignored: list[str]) -> list[Body]:
    """The tools that may be called. A choice other than `auto` and `none` cannot be enforced, and is noted."""
    if choice == "none":
        return []
    if choice not in (None, "auto"):
        ignored.append("tool_choice is not enforced")
    return tools


def write_tool(name: Any, description: Any, parameters: Any) -> Body:
    """A tool in OpenAI's form."""
    if not isinstance(name, str) or not name:
        raise Refused(400, "a tool has no name")
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def write_error(error: HttpError) -> Body:
    """An error in OpenAI's form."""
    return {"message": str(error), "type": error.kind, "code": error.kind, "param": None}

"""What the MCP door says: its own tools, those of environments, and steps as results of the protocol."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from mcp_types import CallToolResult, ImageContent, TextContent, Tool

from treetune.chat.calls import call_message
from treetune.core.environment import Step
from treetune.core.task import Task
from treetune.core.tool_messages import parts_of
from treetune.errors import TreetuneError, UsageError
from treetune.play.episode import Started
from treetune.serve.http.wire import encode, read_content

INSTRUCTIONS = (
    "Tasks to solve. `start` begins one and gives its prompt; then call the tools that it offers, or `answer`. "
    "Results say `reward` and `done`; after `done`, `start` begins the next."
)
_EPISODE = {"type": "string", "description": "The episode that `start` named. Only needed where there is no session."}


def _own(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name=name, description=description, input_schema=schema)


_INDEX = {"type": "integer", "minimum": 0, "description": "Which task; without it the next one."}
_TEXT = {"type": "string", "description": "What you say."}
OWN = [
    _own("start", "Begin a task: gives its prompt. A task that is under way is given up.", {"task_index": _INDEX}, []),
    _own("answer", "Say something in the task under way.", {"text": _TEXT, "episode": _EPISODE}, ["text"]),
    _own("close", "Give up the task under way.", {"episode": _EPISODE}, []),
]
OWN_NAMES = {tool.name for tool in OWN}
_CLASH = "env_"
"""Before the name of an environment's tool that is called as one of ours."""


class Start(msgspec.Struct, forbid_unknown_fields=True):
    task_index: Annotated[int, msgspec.Meta(ge=0)] | None = None


class NoEpisode(UsageError):
    def __init__(self, *, needs_name: bool) -> None:
        remedy = "call `start`, and pass the `episode` that it names" if needs_name else "call `start` first"
        super().__init__("no task is under way", remedy=remedy)


def describe_tool(schema: dict[str, Any], names_episode: bool) -> Tool:
    """A tool of an environment; where there are no sessions, a call of it names the episode."""
    function = schema["function"]
    name = f"{_CLASH}{function['name']}" if function["name"] in OWN_NAMES else function["name"]
    parameters = dict(function["parameters"])
    if names_episode and "episode" not in (parameters.get("properties") or {}):
        parameters["properties"] = {**(parameters.get("properties") or {}), "episode": _EPISODE}
        parameters["required"] = [*parameters.get("required", []), "episode"]
    return Tool(name=name, description=function.get("description", ""), input_schema=parameters)


def read_action(name: str, arguments: dict[str, Any]) -> Any:
    """What a call means to an episode: an answer, or a message that calls a tool of it."""
    if name == "answer":
        text = arguments.get("text")
        if not isinstance(text, str):
            raise UsageError("answer: `text` is missing or no text", remedy='call it with {"text": "..."}')
        return text
    if name.removeprefix(_CLASH) in OWN_NAMES:
        name = name.removeprefix(_CLASH)
    return call_message(name, arguments)


def start_result(started: Started, index: int, task: Task) -> CallToolResult:
    found = {
        "episode": started.episode,
        "task_index": index,
        "data_source": task.data_source,
        "tools": started.tools,
        "done": False,
    }
    return _result(parts_of(started.observation.messages()), found)


def step_result(step: Step, episode: str) -> CallToolResult:
    found = {"episode": episode, "reward": step.reward, "done": step.done, "info": step.info}
    failed = [call.error for call in step.calls if call.error is not None]
    parts = parts_of(step.observation.messages())
    if step.done:
        parts.append({"type": "text", "text": f"done, reward {step.reward:g}"})
    return _result(parts, found, is_error=bool(failed))


def text_result(text: str, found: dict[str, Any]) -> CallToolResult:
    return _result([{"type": "text", "text": text}], found)


def error_result(error: TreetuneError) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)


def _result(parts: list[dict[str, Any]], found: dict[str, Any], *, is_error: bool = False) -> CallToolResult:
    plain = msgspec.json.decode(encode(found))  # whatever `info` holds
    return CallToolResult(content=list(map(_block, parts)), structured_content=plain, is_error=is_error)


def _block(part: dict[str, Any]) -> TextContent | ImageContent:
    content = read_content(part)
    if isinstance(content, str):
        return TextContent(type="text", text=content)
    return ImageContent(type="image", data=content[1], mime_type=content[0])

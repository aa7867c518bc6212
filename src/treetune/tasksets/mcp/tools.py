"""The tools of an MCP server, as those of an episode.

tools: [calculator, {mcp: {command: [python, server.py]}}]      # in a config
McpTools(task, url="http://127.0.0.1:8000/mcp")                 # in `tools_for` of a taskset
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from treetune.config.structs import convert
from treetune.core.task import Task
from treetune.core.tool import Tool, ToolSource
from treetune.errors import ToolError, UsageError, did_you_mean
from treetune.tasksets.mcp.config import McpServer
from treetune.tasksets.mcp.session import McpSession, load_sdk

_UNUSABLE = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64
"""Of a function, where models are asked as OpenAI's API has it."""


class McpTools(ToolSource):
    def __init__(self, task: Task, **settings: Any) -> None:
        super().__init__(task)
        self._server = _read_settings(settings)
        self._session = McpSession(self._server)

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        _read_settings(settings)

    @classmethod
    def require(cls) -> None:
        load_sdk()

    async def open(self) -> list[Tool]:
        offered = {tool.name: tool for tool in await self._session.open()}
        for name in self._server.only or ():
            if name not in offered:
                problem = f"MCP server {self._server.shown} has no tool {name!r}{did_you_mean(name, offered)}"
                raise UsageError(problem, remedy=f"correct tools.mcp.only; there are: {', '.join(offered)}")
        return [self._make(offered[name]) for name in self._server.only or offered]

    def _make(self, offered: Any) -> Tool:
        name = _UNUSABLE.sub("_", f"{self._server.prefix}{offered.name}")[:_LONGEST_NAME]
        description = offered.description or offered.title or ""
        run = partial(self._call, offered.name)
        return Tool(name, description, dict(offered.input_schema), run, timeout=self._server.timeout)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        result = await self._session.call(name, arguments)
        shown = read_result(result)
        if result.is_error:
            raise ToolError(shown if isinstance(shown, str) and shown else f"failed: {shown}")
        return shown

    async def close(self) -> None:
        await self._session.close()


def _read_settings(settings: Mapping[str, Any]) -> McpServer:
    if not settings:
        remedy = "a config or code says which server: tools: [{mcp: {command: [python, server.py]}}]"
        raise UsageError("the tool 'mcp' names no server", remedy=remedy)
    return convert(settings, McpServer, path="tools.mcp")


def read_result(result: Any) -> Any:
    """What a model is shown of a result: text; parts where there are images; the structured content where there is
    nothing else, for a server says the same in both."""
    parts = [_read_part(block) for block in result.content]
    if not parts:
        return "" if result.structured_content is None else result.structured_content
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _read_part(block: Any) -> dict[str, Any]:
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{block.mime_type};base64,{block.data}"}}
    return {"type": "text", "text": _text_of(block)}


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return f"[resource {block.resource.uri}]" if text is None else str(text)
    if block.type == "resource_link":
        return f"[resource {block.uri}] {block.description or block.name}"
    return f"[{block.type}, which cannot be shown]"

"""A harness for verifiers that is a plain conversation: the model answers, and may call the tools of the task's
servers.

It runs in the environment's process. verifiers' own `null` harness does the same in a program that it installs first.
verifiers finds harnesses by module name; `install` registers this one as `treetune_chat` in this process.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from treetune.chat.calls import ToolCall, read_call
from treetune.system.http_body import read_body

__all__ = ["ChatHarness"]

ID = "treetune-chat"


def install() -> str:
    """Register the harness with verifiers; return its id."""
    sys.modules.setdefault(ID.replace("-", "_"), sys.modules[__name__])
    return ID


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        messages = self._opening(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                async with http.post(f"{endpoint.rstrip('/')}/chat/completions", json=body) as response:
                    content = await read_body(response)
                    if response.status != 200:
                        return ProgramResult(exit_code=1, stdout="", stderr=content.decode(errors="replace"))
                    message = json.loads(content)["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    content = await _call(connections, dispatch, read_call(call))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return messages + [message_to_wire(message) for message in prompt or []]


async def _call(connections: Any, dispatch: Any, call: ToolCall) -> Any:
    """Return the result of a call. Errors are returned too, for the model to read."""
    if call.error is not None:
        return f"error: {call.error}"
    if call.name not in dispatch:
        return f"error: no such call: {call.name}"
    return await call_mcp(connections, dispatch, call.name, call.arguments)

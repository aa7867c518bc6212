"""The tools of a task over JSON-RPC, as in OpenEnv: `tools/list`, `tools/call`, and sessions that are opened over HTTP.

{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", "arguments": {"query": "red"}}}
"""

from __future__ import annotations

from typing import Any

import msgspec

from treetune.chat.calls import call_message
from treetune.core.environment import Step
from treetune.serve.http.wire import HttpError, read_body
from treetune.serve.openenv.session import Session, SessionTable
from treetune.serve.openenv.wire import Fault, describe_tool, fault_of, show

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
INTERNAL_ERROR, SERVER_ERROR = -32603, -32000
ANSWER = "answer"
"""The tool for the model's text, for clients that can only call tools."""


class RpcRequest(msgspec.Struct, forbid_unknown_fields=True):
    jsonrpc: str
    method: str
    params: dict[str, Any] = {}
    id: str | int | None = None

    def __post_init__(self) -> None:
        if self.jsonrpc != "2.0":
            raise ValueError("jsonrpc must be '2.0'")


class RpcError(Exception):
    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "data": data}


async def answer_body(sessions: SessionTable, body: bytes) -> dict[str, Any]:
    """Answers a request over HTTP."""
    try:
        request = read_body(dict[str, Any], body)
    except HttpError as error:
        return _error(None, RpcError(PARSE_ERROR, "Parse error", str(error)))
    return await answer(sessions, request)


async def answer(sessions: SessionTable, request: dict[str, Any], session: Session | None = None) -> dict[str, Any]:
    """Returns the response to a request; `session` is the session of its WebSocket."""
    id: str | int | None = None
    try:
        try:
            asked = msgspec.convert(request, RpcRequest)
        except msgspec.ValidationError as error:
            raise RpcError(INVALID_REQUEST, f"Invalid request: {error}") from None
        id = asked.id
        return {"jsonrpc": "2.0", "id": id, "result": await _handle(sessions, asked, session)}
    except RpcError as error:
        return _error(id, error)
    except Exception as error:
        fault = fault_of(error).data
        code = SERVER_ERROR if fault["code"] == "CAPACITY_REACHED" else INTERNAL_ERROR
        return _error(id, RpcError(code, fault["message"]))


def _error(id: str | int | None, error: RpcError) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": error.error}


async def _handle(sessions: SessionTable, asked: RpcRequest, session: Session | None) -> Any:
    named = asked.params.get("session_id")
    if asked.method == "openenv/session/create":
        return {"session_id": (session or _open(sessions)).id}
    if asked.method == "openenv/session/close":
        return await _close(sessions, named, session)
    if session is None and named:
        if (session := sessions.by_id.get(named) if isinstance(named, str) else None) is None:
            raise RpcError(INVALID_PARAMS, f"Unknown session_id: {named}")
        session.hear()
    if session is not None:
        return await _use_tools(asked, session)
    session = _open(sessions)  # used for this one request only
    try:
        return await _use_tools(asked, session)
    finally:
        await sessions.close(session)


def _open(sessions: SessionTable) -> Session:
    try:
        return sessions.add(Session(sessions))
    except Fault as fault:
        further = {key: value for key, value in fault.data.items() if key not in ("message", "code")}
        raise RpcError(SERVER_ERROR, str(fault), further) from None


async def _close(sessions: SessionTable, named: Any, session: Session | None) -> dict[str, Any]:
    if not named:
        raise RpcError(INVALID_PARAMS, "Invalid params - 'session_id' is required")
    if session is not None and session.id == named:
        raise RpcError(INVALID_REQUEST, "Cannot close active WebSocket-managed session via MCP method")
    if (found := sessions.by_id.get(named) if isinstance(named, str) else None) is None:
        raise RpcError(INVALID_PARAMS, f"Unknown session_id: {named}")
    await sessions.close(found)
    return {"session_id": named, "closed": True}


async def _use_tools(asked: RpcRequest, session: Session) -> Any:
    params = asked.params
    if asked.method == "tools/list":
        return {"tools": [describe_tool(tool, "inputSchema") for tool in with_answer(await _tools_of(session))]}
    if asked.method != "tools/call":
        raise RpcError(METHOD_NOT_FOUND, f"Method not found: {asked.method}")
    name, arguments = params.get("name"), params.get("arguments", {})
    if not name:
        raise RpcError(INVALID_PARAMS, "Missing 'name' in params")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise RpcError(INVALID_PARAMS, "'name' is a text and 'arguments' is an object")
    tools = await _tools_of(session)
    if not has_tool(with_answer(tools), name):
        raise RpcError(INVALID_PARAMS, f"Tool not found: {name}")
    return _result(await session.play(action_of_call(name, arguments, tools)))


async def _tools_of(session: Session) -> list[dict[str, Any]]:
    tools = (await session.ensure_started()).started.tools
    if not tools:
        raise RpcError(INTERNAL_ERROR, "Environment does not support MCP")
    return tools


def has_tool(tools: list[dict[str, Any]], name: str) -> bool:
    return any(tool["function"]["name"] == name for tool in tools)


def with_answer(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a task plus `answer`, unless one of them has that name."""
    if has_tool(tools, ANSWER):
        return tools
    text = {"type": "string", "description": "What you say."}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"], "additionalProperties": False}
    function = {"name": ANSWER, "description": "Say something, such as the answer.", "parameters": parameters}
    return [*tools, {"type": "function", "function": function}]


def action_of_call(name: str, arguments: dict[str, Any], tools: list[dict[str, Any]]) -> Any:
    """Converts a call to an episode's action: a call of one of its tools, or text."""
    text = arguments.get("text")
    if name == ANSWER and not has_tool(tools, ANSWER) and isinstance(text, str) and len(arguments) == 1:
        return text
    return call_message(name, arguments)


def _result(step: Step) -> dict[str, Any]:
    """Converts a step to the result of a call, as in MCP. OpenEnv's own client returns `data`."""
    text = show(step.observation)["text"]
    return {
        "content": [{"type": "text", "text": text}],
        "structured_content": {"reward": step.reward, "done": step.done, "info": step.info},
        "is_error": any(call.error is not None for call in step.calls),
        "data": text,
    }

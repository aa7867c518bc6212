"""`openenv:http://HOST:PORT`: the environment of an OpenEnv server as a taskset, and the client that plays it.

    treetune eval openenv:http://127.0.0.1:8000 -m MODEL -n 20

A task is an index of the server's task routes. If the server has none, a task is a seed, and the tasks are endless. The
model's text goes into the only text field of the server's actions. If an action has no such field, the model answers
with JSON. The server's tools become the model's tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec

from treetune.chat.calls import ToolCall
from treetune.core.environment import Environment, Observation, Step
from treetune.core.task import Task
from treetune.errors import InvalidAction, UsageError, format_error
from treetune.serve.errors import Busy, Denied, ServeError, Unreachable
from treetune.serve.http.transport import CONNECT_SECONDS, HttpTransport
from treetune.serve.remote_taskset import ForeignConfig, ForeignEnvironment, ForeignTasks
from treetune.system.http_body import MOST_BYTES, BodyTooLarge, check_values

_ENVELOPE = ("metadata", "reward", "done")
"""The fields of an observation that are not shown to the model."""
FIRST_PAUSE, LAST_PAUSE = 0.1, 3.0
_ALIVE_SECONDS = 20.0
"""How often a silent server is pinged, in seconds."""
_CLOSE_SECONDS = 5.0
_CLOSED = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


class OpenEnvError(ServeError):
    """An error that the server answers with, and its `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the server answered {code}: {message}")
        self.code = code


class OpenEnvClient(HttpTransport):
    """Plays environments of an OpenEnv server, of any implementation.

        async with OpenEnvClient("http://127.0.0.1:8000") as client:
            session, first = await client.start({"seed": 3})
            await session.ask("step", {"message": "42"})
            await session.close()

    Many servers have room for only one session: `start` waits until one is free.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 300.0, patience: float = 600.0) -> None:
        """An answer may take `timeout` seconds; `start` waits `patience` seconds for a free session."""
        super().__init__(url, token, "is an OpenEnv server running there?")
        self._timeout, self._patience = timeout, patience

    async def get(self, path: str, body: Any = None) -> Any:
        """Returns the server's answer over HTTP; None if the server has no such path, or reports that it has no
        answer."""
        reply = await self.ask("GET" if body is None else "POST", path, body, self._timeout)
        return None if reply.status in (404, 405, 501) else reply.read(object)

    async def start(self, reset: dict[str, Any]) -> tuple[OpenEnvSession, Any]:
        """Opens a new session; returns it with its first observation."""
        until, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            session = await self._connect()
            try:
                return session, await session.ask("reset", reset)
            except OpenEnvError as error:
                await session.close()
                if error.code != "CAPACITY_REACHED":
                    raise
                if time.monotonic() + pause > until:
                    remedy = "play fewer at once (--max-concurrent), or give the server more sessions"
                    raise Busy(f"{self.url} had no free session: {error}", remedy=remedy) from None
            except BaseException:
                await session.close()
                raise
            await asyncio.sleep(pause)
            pause = min(LAST_PAUSE, 2 * pause)

    async def _connect(self) -> OpenEnvSession:
        url = f"{self.url}/ws"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await self.session.ws_connect(url, heartbeat=_ALIVE_SECONDS, max_msg_size=MOST_BYTES)
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise Denied(
                    f"{url} answered {error.status}", remedy="set TREETUNE_TOKEN to the token of the server"
                ) from None
            raise ServeError(f"{url} answered {error.status}", remedy="is it an OpenEnv server?") from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{url}: {format_error(error)}", remedy=self.remedy) from error
        return OpenEnvSession(socket, url, self._timeout)


class OpenEnvSession:
    """One connection, which is one session."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout: float) -> None:
        self._socket, self._url, self._timeout = socket, url, timeout

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> Any:
        """Returns the data of the answer. If no answer comes, the session is unusable and is closed."""
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with contextlib.suppress(ConnectionError):  # the server may have closed it with a reason
                await self._socket.send_str(json.dumps(message))
            answer = await self._hear()
        except (TimeoutError, ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            await self._socket.close()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"{self._url} did not answer within {self._timeout:g} seconds") from None
            raise ServeError(f"{self._url} has closed the session: {format_error(error)}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise ServeError(f"{self._url} sent an unexpected answer: {answer!r:.200}")
        if answer.get("type") == "error":
            fault = answer["data"]
            raise OpenEnvError(str(fault.get("code", "ERROR")), str(fault.get("message", "")))
        return answer["data"]

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        """Returns the result of a request over JSON-RPC."""
        answer = await self.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        if (error := answer.get("error")) is not None:
            raise OpenEnvError(str(error.get("code", "ERROR")), str(error.get("message", "")))
        return answer.get("result")

    async def _hear(self) -> Any:
        async with asyncio.timeout(self._timeout):
            message = await self._socket.receive()
        if message.type in _CLOSED:
            raise ConnectionError(f"closed with {self._socket.close_code}")
        try:
            check_values(self._url, message.data.encode() if isinstance(message.data, str) else message.data)
            return json.loads(message.data)
        except BodyTooLarge as error:
            raise ServeError(error.message) from None
        except (ValueError, RecursionError):
            raise ServeError(f"{self._url} did not send JSON: {message.data!r:.200}") from None

    async def close(self) -> None:
        """Ends the session on the server, too."""
        with contextlib.suppress(TimeoutError, ConnectionError, aiohttp.ClientError, RuntimeError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                if not self._socket.closed:
                    await self._socket.send_str('{"type": "close"}')
                await self._socket.close()


class OpenEnvConfig(ForeignConfig, frozen=True, kw_only=True):
    action_field: str | None = None
    """The action field that receives the model's text; by default the only text field that is required."""
    observation_field: str | None = None
    """The observation field that the model sees; by default the whole observation, as JSON if it has several fields."""
    patience: float = 600.0
    """How long to wait for a free session of the server, in seconds."""


class Actions(NamedTuple):
    """The form of the server's actions."""

    field: str | None
    """The field for the model's text; None if the text has to be JSON."""
    schema: dict[str, Any]
    takes_calls: bool
    """Actions accept tool calls in OpenAI's form."""
    takes_tools: bool
    """Actions accept only a call of one tool, in OpenEnv's own form."""


class OpenEnvTasks(ForeignTasks):
    """The environment of an OpenEnv server."""

    config_type = OpenEnvConfig
    config: OpenEnvConfig
    actions: Actions

    def connect(self) -> OpenEnvClient:
        config = self.config
        return OpenEnvClient(config.address, self.token, timeout=config.timeout, patience=config.patience)

    async def _ask(self, client: OpenEnvClient) -> None:
        found = await client.get("/metadata")
        self.name = str(found.get("name") or "") if isinstance(found, dict) else ""
        schemas = await client.get("/schema")
        if not isinstance(schemas, dict) or not isinstance(schemas.get("action"), dict):
            raise UsageError(f"{self.config.address} is not an OpenEnv server: it has no /schema")
        self.actions = _read_actions(schemas["action"], self.config.action_field)
        names = await client.get("/list_environments")
        if isinstance(names, list) and names:
            await self._ask_tasks(client, str(names[0]))

    async def _ask_tasks(self, client: OpenEnvClient, name: str) -> None:
        """Asks for the tasks if the server numbers them."""
        name = quote(name, safe="")
        splits = await client.get(f"/{name}/splits")
        if not isinstance(splits, list):
            return
        self.split = self.choose_split([str(split["name"]) for split in splits])
        counted = await client.get(f"/{name}/num_tasks", {"split": self.split})
        if isinstance(counted, dict):
            self.num_tasks = int(counted["num_tasks"])

    def environment(self, task: Task) -> Environment:
        return OpenEnvEnvironment(task, self)

    def reset_of(self, task: Task) -> dict[str, Any]:
        """Returns the reset request for a task."""
        index = task.reward_spec["index"]
        return {"seed": index} if self.num_tasks is None else {"split": self.split, "index": index}


taskset_class = OpenEnvTasks.at_address


def _read_actions(schema: dict[str, Any], named: str | None) -> Actions:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    texts = [name for name, one in properties.items() if isinstance(one, dict) and one.get("type") == "string"]
    required = [name for name in texts if name in (schema.get("required") or [])]
    field = named or (required[0] if len(required) == 1 else texts[0] if len(texts) == 1 else None)
    is_tool = "tool_name" in properties
    return Actions(None if is_tool and named is None else field, schema, "tool_calls" in properties, is_tool)


class OpenEnvEnvironment(ForeignEnvironment):
    def __init__(self, task: Task, taskset: OpenEnvTasks) -> None:
        super().__init__(task, taskset.connect())
        self._taskset, self._actions = taskset, taskset.actions

    async def start(self) -> Observation:
        self._session, data = await self._client.start(self._taskset.reset_of(self.task))
        metadata = data.get("metadata") or {}
        if self._actions.takes_calls and isinstance(metadata.get("tools"), list):
            self.raw_tools = metadata["tools"]
        elif self._actions.takes_tools:
            found = await self.session.call("tools/list", {})
            self.offer(found["tools"] if isinstance(found, dict) else [])
        opening = self._read_observation(data.get("observation"))
        if self._actions.field is None and not self.raw_tools:
            schema = json.dumps(self._actions.schema)
            request = {"role": "user", "content": f"Answer with one JSON object of this schema: {schema}"}
            return Observation("messages", [*opening.messages(), request])
        return opening

    async def say(self, text: str, calls: list[Any]) -> Step:
        if calls and not self._actions.takes_calls:
            return await self.call_each(calls)
        if calls:
            return await self._play({"message": text, "tool_calls": calls})
        if self._actions.field is not None:
            return await self._play({self._actions.field: text})
        return self.end_without_call() if self.raw_tools else await self._play(_read_json(text))

    async def call(self, name: str, arguments: dict[str, Any], call: ToolCall) -> Step:
        step = await self._play({"type": "call_tool", "tool_name": name, "arguments": arguments})
        call.result = self._read_result(step.observation)
        return step

    def _read_result(self, observation: Observation) -> Any:
        """Returns the result of a tool: FastMCP puts it in `data`, or in blocks of text."""
        shown = observation.content
        result = shown.get("result") if isinstance(shown, dict) else shown
        if isinstance(shown, dict) and (error := shown.get("error")):
            return error.get("message", str(error)) if isinstance(error, dict) else str(error)
        if isinstance(result, dict) and result.get("data") is not None:
            return result["data"]
        if isinstance(result, dict) and isinstance(result.get("content"), list):
            return "\n".join(str(part.get("text", part)) for part in result["content"] if isinstance(part, dict))
        return result

    async def _play(self, action: dict[str, Any]) -> Step:
        try:
            data = await self.session.ask("step", action)
        except OpenEnvError as error:
            if error.code == "VALIDATION_ERROR":
                raise InvalidAction(f"the server rejects this action: {error.message}") from None
            raise
        shown = self._read_observation(data.get("observation"))
        return self.make_step(shown, data.get("reward"), data.get("done", False), data.get("metadata"))

    def _read_observation(self, shown: Any) -> Observation:
        if not isinstance(shown, dict):
            return Observation.of(shown)
        if (field := self._taskset.config.observation_field) is not None:
            return Observation.of(shown.get(field))
        messages = shown.get("messages")
        if isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages):
            return Observation("messages", messages) if messages else Observation()
        rest = {key: value for key, value in shown.items() if key not in _ENVELOPE}
        texts = [value for value in rest.values() if isinstance(value, str)]
        return Observation("text", texts[0]) if len(rest) == len(texts) == 1 else Observation("json", rest)


def _read_json(text: str) -> dict[str, Any]:
    begin, end = text.find("{"), text.rfind("}")
    try:
        found = msgspec.json.decode(text[begin : end + 1])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidAction("the answer has no JSON object, but an action of this environment is one")
    return found

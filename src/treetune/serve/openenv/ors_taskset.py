"""`ors:http://HOST:PORT`: an environment of an ORS server as a taskset, and the client that plays it.

    treetune eval ors:http://127.0.0.1:8080 -m MODEL -n 20 --taskset.split test

The model gets the server's tools, and earns its reward by calling them. Text without a call goes to the only tool that
takes a single string; if there is no such tool, the text ends the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from treetune.chat.calls import ToolCall
from treetune.core.environment import Environment, Observation, Step
from treetune.core.task import Task
from treetune.errors import UsageError
from treetune.play.toolbox import render
from treetune.serve.errors import ServeError
from treetune.serve.http.transport import HttpReply, HttpTransport
from treetune.serve.openenv.session import ANSWER
from treetune.serve.remote_taskset import ForeignConfig, ForeignEnvironment, ForeignTasks

_PING_SECONDS = 60.0
_QUICK_SECONDS = 10.0


class CallRefused(ServeError):
    """The server refused a call: no such tool, or invalid input."""


class OrsClient(HttpTransport):
    """Plays environments of an ORS server, of any implementation.

    async with OrsClient("http://127.0.0.1:8080") as client:
        session = await client.create("my-env", {"split": "train", "index": 3})
        output = await session.call("submit", {"answer": "42"})
        await session.close()
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 300.0) -> None:
        super().__init__(url, token, "is an ORS server running there?")
        self._timeout = timeout
        if token:
            self.headers["X-API-Key"] = token

    async def get(self, method: str, path: str, body: Any = None, session: str | None = None) -> Any:
        """Returns the body of the answer; None if the server says that it has none."""
        reply = await self.send(method, path, body, session)
        return None if reply.status == 501 else reply.read(object)

    async def send(self, method: str, path: str, body: Any, session: str | None) -> HttpReply:
        headers = {"X-Session-ID": session} if session is not None else None
        return await self.ask(method, path, body, self._timeout, headers)

    async def create(self, environment: str, task: dict[str, Any]) -> OrsClientSession:
        session = OrsClientSession(self, environment, str(uuid.uuid4()))
        try:
            await self.get("POST", "/create", {"env_name": environment, **task}, session.id)
        except BaseException:
            await session.close()  # the server may have created the session anyway
            raise
        session.keep_alive()
        return session

    async def call(self, path: str, body: dict[str, Any], session: str) -> Any:
        """Returns the data that the server sends as events."""
        reply = await self.send("POST", path, body, session)
        if not reply.good:
            raise reply.error()
        parts: list[str] = []
        for event, data in read_events(reply.body.decode(errors="replace")):
            if event == "error":
                raise ServeError(f"{reply.url} failed: {data or 'it gave no reason'}")
            if event in ("chunk", "end"):
                parts.append(data)
            if event == "end":
                break
        else:
            raise ServeError(f"{reply.url} ended before it sent its result")
        try:
            return json.loads("".join(parts))
        except ValueError:
            raise ServeError(f"{reply.url} did not send JSON: {''.join(parts)!r:.200}") from None


class OrsClientSession:
    """The environment of one task, which exists until it is deleted."""

    def __init__(self, client: OrsClient, environment: str, id: str) -> None:
        self._client, self.id = client, id
        self._path = f"/{quote(environment, safe='')}"
        self._pinging: asyncio.Task[None] | None = None

    def keep_alive(self) -> None:
        """Keeps the session open, because the server closes silent ones."""
        self._pinging = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_SECONDS)
            with contextlib.suppress(ServeError):  # the next call reports it
                await self._client.get("POST", "/ping", {}, self.id)

    async def prompt(self) -> list[Any]:
        return list(await self._client.get("GET", f"{self._path}/prompt", None, self.id))

    async def tools(self) -> list[Any]:
        return list((await self._client.get("GET", f"{self._path}/task_tools", None, self.id))["tools"])

    async def call(self, name: str, input: dict[str, Any]) -> dict[str, Any]:
        """Returns the result of a tool: `blocks`, `reward`, `finished`, `metadata`."""
        result = await self._client.call(f"{self._path}/call", {"name": name, "input": input}, self.id)
        if isinstance(result, dict) and result.get("ok") and isinstance(result.get("output"), dict):
            output: dict[str, Any] = result["output"]
            return output
        if isinstance(result, dict) and isinstance(result.get("error"), str):
            raise CallRefused(result["error"])
        raise ServeError(f"{self._path}/call sent an unexpected result: {result!r:.200}")

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        with contextlib.suppress(ServeError, TimeoutError):
            async with asyncio.timeout(_QUICK_SECONDS):
                await self._client.get("POST", "/delete", {}, self.id)


def read_events(text: str) -> Iterator[tuple[str, str]]:
    for block in text.replace("\r\n", "\n").split("\n\n"):
        event, data = "", []
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data":
                data.append(value.removeprefix(" "))
        if event:
            yield event, "\n".join(data)


_OWN_ANSWER = (ANSWER, "text")


class OrsConfig(ForeignConfig, frozen=True, kw_only=True):
    environment: str | None = None
    """Which of the server's environments to use; absent: its first."""
    answer_tool: str | None = None
    """The tool that receives the model's text if it calls no tool; by default the only one that takes a
    single string."""


class OrsTasks(ForeignTasks):
    """An environment of an ORS server."""

    config_type = OrsConfig
    config: OrsConfig
    environment_name = ""

    def connect(self) -> OrsClient:
        token = self.token or os.environ.get("ORS_API_KEY") or None
        return OrsClient(self.config.address, token, timeout=self.config.timeout)

    async def _ask(self, client: OrsClient) -> None:
        names = await client.get("GET", "/list_environments")
        if not isinstance(names, list) or not names:
            raise UsageError(f"{self.config.address} is not an ORS server: it lists no environments")
        self.environment_name = self._choose_environment([str(name) for name in names])
        self.name = self.environment_name
        splits = await client.get("GET", f"/{self.environment_name}/splits")
        self.split = self.choose_split([str(split["name"]) for split in splits or []])
        counted = await client.get("POST", f"/{self.environment_name}/num_tasks", {"split": self.split})
        if isinstance(counted, dict):
            self.num_tasks = int(counted["num_tasks"])

    def _choose_environment(self, names: list[str]) -> str:
        named = self.config.environment
        if named is not None and named.lower() not in map(str.lower, names):
            problem = f"{self.config.address} has no environment {named!r}"
            raise UsageError(problem, remedy=f"it has: {', '.join(names)}")
        return named or names[0]

    def environment(self, task: Task) -> Environment:
        return OrsEnvironment(task, self)


taskset_class = OrsTasks.at_address


class OrsEnvironment(ForeignEnvironment):
    def __init__(self, task: Task, taskset: OrsTasks) -> None:
        super().__init__(task, taskset.connect())
        self._taskset = taskset
        self._answer: tuple[str, str] | None = None
        """The tool that receives the model's text, and the name of its argument."""

    async def start(self) -> Observation:
        taskset = self._taskset
        task = {"split": taskset.split, "index": self.task.reward_spec["index"]}
        self._session = await self._client.create(taskset.environment_name, task)
        prompt = await self.session.prompt()
        tools = await self.session.tools()
        self._answer = _find_answer(tools, taskset.config.answer_tool)
        # Our own server offers `answer` to clients that can only call tools. Here, text is sent to it.
        own = self._answer == _OWN_ANSWER
        self.offer([tool for tool in tools if not own or tool["name"] != ANSWER])
        return _read_blocks(prompt)

    async def say(self, text: str, calls: list[Any]) -> Step:
        if calls:
            return await self.call_each(calls)
        if self._answer is None:
            return self.end_without_call()
        try:
            return await self._play(self._answer[0], {self._answer[1]: text})
        except CallRefused as error:
            return Step(error.message, info={"explanation": error.message})

    async def call(self, name: str, arguments: dict[str, Any], call: ToolCall) -> Step:
        try:
            step = await self._play(name, arguments)
        except CallRefused as error:
            call.error = error.message
            return Step()
        call.result = render(step.observation)
        return step

    async def _play(self, name: str, arguments: dict[str, Any]) -> Step:
        output = await self.session.call(name, arguments)
        shown = _read_blocks(output.get("blocks"))
        return self.make_step(shown, output.get("reward"), output.get("finished", False), output.get("metadata"))


def _find_answer(tools: list[Any], named: str | None) -> tuple[str, str] | None:
    """Finds the tool that takes a single string, and the name of that argument."""
    found = []
    for tool in tools:
        properties = (tool.get("input_schema") or {}).get("properties") or {}
        texts = [name for name, one in properties.items() if isinstance(one, dict) and one.get("type") == "string"]
        if len(texts) == len(properties) == 1:
            found.append((str(tool["name"]), texts[0]))
    if named is not None:
        found = [one for one in found if one[0] == named]
        if not found:
            raise UsageError(f"answer_tool: {named!r} is not a tool that takes a single string")
    if _OWN_ANSWER in found:
        return _OWN_ANSWER
    return found[0] if len(found) == 1 else None


def _read_blocks(blocks: Any) -> Observation:
    """Reads text, or a message with images."""
    parts: list[dict[str, Any]] = []
    for block in blocks if isinstance(blocks, list) else []:
        if isinstance(block, dict) and block.get("type") == "image":
            url = f"data:{block.get('mimeType')};base64,{block.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif isinstance(block, dict):
            parts.append({"type": "text", "text": str(block.get("text", ""))})
    if all(part["type"] == "text" for part in parts):
        return Observation("text", "\n\n".join(part["text"] for part in parts))
    return Observation("messages", [{"role": "user", "content": parts}])

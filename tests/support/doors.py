"""Plays one episode over a protocol of our server: `play(door, target, index, actions)` gives the rewards of its steps.

An action is a text, or a message with calls of tools. Over MCP and ORS calls are made one by one, and `answer` is one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import mcp
import openenv_playing
from serving import served, serving

from treetune.serve.http import HttpConfig
from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.routes import HttpDoor
from treetune.tasksets.target import load_taskset

Result = tuple[float, bool]
"""The reward of a step, and whether it was the last."""


def play(door: str, target: str, index: int, actions: list[Any]) -> list[float]:
    results = asyncio.run(DOORS[door](target, index, actions))
    assert [done for _, done in results] == [False] * (len(results) - 1) + [True], results
    return [reward for reward, _ in results]


async def _zmq(target: str, index: int, actions: list[Any]) -> list[Result]:
    async with served(load_taskset(target)) as client:
        started = await client.start(await client.sample(index))
        steps = [await client.step(started.episode, action, turn) for turn, action in enumerate(actions)]
        return [(step.reward, step.done) for step in steps]


async def _http(target: str, index: int, actions: list[Any]) -> list[Result]:
    async with (
        serving(load_taskset(target), doors=[HttpDoor(HttpConfig(address=":0"))]) as server,
        TaskServerClient(server.address) as client,
        await client.start(index) as episode,
    ):
        steps = [await episode.step(action) for action in actions]
        return [(step.reward, step.done) for step in steps]


async def _openenv(target: str, index: int, actions: list[Any]) -> list[Result]:
    async with openenv_playing.playing(load_taskset(target)) as client, client.socket() as socket:
        await socket.ask("reset", {"task_index": index})
        results = []
        for action in actions:
            said = {"message": action} if isinstance(action, str) else _of_message(action)
            step = (await socket.ask("step", said))["data"]
            results.append((step["reward"], step["done"]))
        return results


def _of_message(message: dict[str, Any]) -> dict[str, Any]:
    return {"message": message.get("content") or "", "tool_calls": message["tool_calls"]}


async def _mcp(target: str, index: int, actions: list[Any]) -> list[Result]:
    """The SDK's own client, and a server in a process of its own."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TREETUNE_TASK_CACHE_DIR") if name in os.environ}
    command = ["-m", "treetune", "serve", target, "--mcp"]
    parameters = mcp.StdioServerParameters(command=sys.executable, args=command, cwd=Path.cwd(), env=environment)
    with TemporaryFile("w") as errors:
        async with mcp.stdio_client(parameters, errors) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            started = await session.call_tool("start", {"task_index": index})
            assert not started.is_error, started

            async def call(name: str, arguments: dict[str, Any]) -> Result:
                found = (await session.call_tool(name, arguments)).structured_content or {}
                return found.get("reward", 0.0), found.get("done", False)

            return await _one_by_one(actions, call)


async def _ors(target: str, index: int, actions: list[Any]) -> list[Result]:
    headers = {"X-Session-ID": "a-session"}
    async with openenv_playing.playing(load_taskset(target)) as client:
        _, names = await client.ask("GET", "/list_environments")
        task = {"split": "train", "index": index}
        status, told = await client.ask("POST", "/create", task, headers=headers)
        assert status == 200, told

        async def call(name: str, arguments: dict[str, Any]) -> Result:
            address = f"{client.door.address}/{names[0]}/call"
            body = {"name": name, "input": arguments}
            async with client.session.post(address, json=body, headers=headers) as reply:
                lines = (await reply.text()).splitlines()
            parts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            result = json.loads("".join(parts[1:]))  # the first is the id of the call
            output = result["output"] if result["ok"] else {"reward": 0.0, "finished": False}
            return output["reward"], output["finished"]

        return await _one_by_one(actions, call)


async def _one_by_one(actions: list[Any], call: Callable[[str, dict[str, Any]], Awaitable[Result]]) -> list[Result]:
    results = []
    for action in actions:
        functions = [] if isinstance(action, str) else [made["function"] for made in action["tool_calls"]]
        calls = [(one["name"], json.loads(one["arguments"])) for one in functions] or [("answer", {"text": action})]
        results += [await call(name, arguments) for name, arguments in calls]
    return results


DOORS: dict[str, Callable[[str, int, list[Any]], Awaitable[list[Result]]]] = {
    "ZMQ": _zmq,
    "HTTP": _http,
    "MCP": _mcp,
    "OpenEnv": _openenv,
    "ORS": _ors,
}

"""`serve --mcp`: a taskset as an MCP server, played by the SDK's own client, each in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client, ClientSession, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from treetune import Environment, Task, Taskset
from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.serve.mcp_door import SESSION_HEADER, McpDoor
from treetune.serve.server import EnvServer

TOKEN = "a-token-of-the-test"
SHOP = """
from treetune import Environment, Step, Task, Taskset, tool

print("user code prints")

class Shop(Environment):
    @tool
    def search(self, query: str, limit: int = 2) -> list[str]:
        "Find items. query: what to look for."
        print("and prints again")
        return [f"{query} {number}" for number in range(limit)]

    @tool(final=True)
    def buy(self, item: str) -> Step:
        "Buy an item, which ends it."
        return Step("bought", reward=float(item == self.task.ground_truth))

    def step(self, action):
        return Step("Use the tools." if action.text == "hello" else "", done=action.text != "hello")

class Shopping(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"Buy red {n}.", reward_spec={"ground_truth": f"red {n}"}) for n in range(3)]

    def environment(self, task):
        return Shop(task)
"""


@pytest.fixture
def shop(tmp_path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def texts(result: Any) -> list[str]:
    return [block.text for block in result.content]


async def play(session: Any, *, named: bool = False) -> None:
    """One episode; where requests have no session, each names it."""
    # Many clients ask once, before anything is started.
    tools = {tool.name: tool.input_schema for tool in (await session.list_tools()).tools}
    assert list(tools) == ["start", "answer", "close", "search", "buy"]
    assert ("episode" in tools["search"]["required"]) == named
    refused = await session.call_tool("answer", {"text": "hello"})
    assert refused.is_error
    assert "call `start`" in texts(refused)[0]
    started = await session.call_tool("start", {"task_index": 1})
    assert texts(started) == ["Buy red 1."]
    found = started.structured_content
    assert (found["task_index"], found["done"]) == (1, False)
    assert [tool["function"]["name"] for tool in found["tools"]] == ["search", "buy"]
    episode = {"episode": found["episode"]} if named else {}
    tools = {tool.name: tool.input_schema for tool in (await session.list_tools()).tools}
    assert list(tools) == ["start", "answer", "close", "search", "buy"]
    assert ("episode" in tools["search"]["required"]) == named
    searched = await session.call_tool("search", {"query": "red", **episode})
    assert texts(searched) == ['["red 0","red 1"]']
    assert searched.structured_content["reward"] == 0.0
    assert not searched.structured_content["done"]
    wrong = await session.call_tool("search", {"qury": "red", **episode})
    assert wrong.is_error
    assert "did you mean 'query'?" in texts(wrong)[0]
    assert texts(await session.call_tool("answer", {"text": "hello", **episode})) == ["Use the tools."]
    bought = await session.call_tool("buy", {"item": "red 1", **episode})
    assert texts(bought) == ["bought", "done, reward 1"]
    assert bought.structured_content["reward"] == 1.0
    assert bought.structured_content["done"]
    assert bought.structured_content["info"]["success"]
    assert (await session.call_tool("search", {"query": "red", **episode})).is_error
    beyond = await session.call_tool("start", {"task_index": 3})
    assert (beyond.is_error, texts(beyond)) == (True, ["there is no task 3: indices go from 0 to 2"])
    assert texts(await session.call_tool("start", {})) == ["Buy red 0."]  # left behind, and closed with the session


@pytest.mark.parametrize("workers", [[], pytest.param(["-w", "2"], marks=pytest.mark.thorough)], ids=["here", "pool"])
def test_over_standard_input_and_output(shop, workers):
    arguments = ["-m", "treetune", "serve", "shop.py:Shopping", "--mcp", "--traces", "kept", *workers]
    environment = {"PATH": os.environ["PATH"], "HOME": str(shop)}
    parameters = StdioServerParameters(command=sys.executable, args=arguments, cwd=shop, env=environment)

    async def run(errors: Any) -> None:
        async with stdio_client(parameters, errors) as (reads, writes), ClientSession(reads, writes) as session:
            await session.initialize()
            await play(session)

    with open(shop / "errors", "w") as errors:
        asyncio.run(run(errors))
    said = (shop / "errors").read_text()
    assert "stopped; the next index is 1" in said
    traces = [json.loads(line) for line in (shop / "kept" / "traces.jsonl").read_text().splitlines()]
    assert [trace["outcome"] for trace in traces] == ["completed", "cancelled"]
    calls = [call["name"] for turn in traces[0]["turns"] for call in turn.get("calls", [])]
    assert calls == ["search", "search", "buy"]


@contextmanager
def serving(shop: Path, *options: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "treetune", "serve", "shop.py:Shopping", "--mcp", *options]
    with subprocess.Popen(
        command, cwd=shop, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdout is not None
        try:
            lines = b""
            while not lines.rstrip().endswith(b"}"):
                line = server.stdout.readline()
                assert line, "the server has ended"
                lines += line
            yield json.loads(lines)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_over_http_with_sessions_and_without_once_the_token_was_checked(shop):
    import httpx2

    async def run(url: str) -> None:
        assert httpx2.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).status_code == 401
        assert httpx2.get(url, headers={"authorization": "Bearer wrong"}).status_code == 401
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as client,
            streamable_http_client(url, http_client=client) as (reads, writes),
            ClientSession(reads, writes) as session,
        ):
            await session.initialize()
            await play(session)
            health = url.replace("/mcp", "/api/health")
            assert (await client.get(health)).status_code == 200
        async with httpx2.AsyncClient(headers=headers, timeout=60) as client:
            figures = await client.get(url.replace("/mcp", "/metrics"))
            # The one that was left has ended with its session.
            assert re.search(r"(?m)^treetune_episodes 0(\.0)?$", figures.text)

    with serving(shop, "--http", ":0", "--token", TOKEN, "--json") as found:
        asyncio.run(run(f"{found['http']}/mcp"))


def test_over_http_requests_without_a_session_name_their_episode(shop):
    async def run(url: str) -> None:
        async with Client(url) as client:
            await play(client, named=True)

    with serving(shop, "--http", ":0", "--json") as found:
        asyncio.run(run(f"{found['http']}/mcp"))


def test_no_more_sessions_are_opened_than_episodes_may_live(shop):
    import httpx2

    version = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": version}
    headers = {"accept": "application/json, text/event-stream"}
    with serving(shop, "--http", ":0", "--max-episodes", "3", "--json") as found:
        url = f"{found['http']}/mcp"
        opened = [httpx2.post(url, json=hello, headers=headers) for _ in range(4)]
        assert [one.status_code for one in opened] == [200, 200, 200, 503]
        session = {"mcp-session-id": opened[0].headers["mcp-session-id"]}
        assert httpx2.request("DELETE", url, headers=session).status_code == 200
        assert httpx2.post(url, json=hello, headers=headers).status_code == 200


def test_a_server_over_standard_input_ends_when_it_is_asked_to(shop):
    command = [sys.executable, "-m", "treetune", "serve", "shop.py:Shopping", "--mcp"]
    with subprocess.Popen(
        command, cwd=shop, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stderr is not None
        assert server.stdout is not None
        while b"serving" not in server.stderr.readline():
            pass
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert server.stdout.read() == b""  # what user code prints goes elsewhere


@pytest.mark.parametrize("option", [["--json"], ["--zmq", "tcp://127.0.0.1:0"], ["--supervise"]])
def test_what_does_not_go_with_standard_output_is_refused(treetune, shop, option):
    refused = treetune("serve", "shop.py:Shopping", "--mcp", *option)
    assert refused.code == 2
    assert "--http" in refused.err + refused.out


def test_what_vanished_clients_leave_is_forgotten(monkeypatch):
    """Over HTTP nobody says that a client is gone: its episodes end by themselves."""
    monkeypatch.setattr("treetune.serve.mcp_door.MANY_ENDED", 4)

    class Stays(Taskset):
        def load_tasks(self):
            return [Task(prompt="?")]

        def environment(self, task):
            return Environment(task)

    class Context:
        def __init__(self, session):
            self.request = SimpleNamespace(headers={SESSION_HEADER: session})

    async def vanish():
        door = McpDoor(idle_seconds=0.01)
        http = HttpDoor(HttpConfig(address="127.0.0.1:0"), mounts={"/mcp": door})
        server = EnvServer(Stays(), doors=[http, door])
        await server.start()
        try:
            for number in range(40):
                started = await door._call_tool(Context(f"s{number}"), SimpleNamespace(name="start", arguments={}))
                assert not started.is_error
                while server.host.episodes.live:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return len(door._episodes)
        finally:
            await server.close()

    assert asyncio.run(vanish()) < 10


def test_tools_that_cannot_be_listed_before_a_start_are_listed_after_it():
    class Broken(Taskset):
        tries = 0

        def load_tasks(self):
            return [Task(prompt="?")]

        def environment(self, task):
            self.tries += 1
            if self.tries == 1:
                raise OSError("the disk is away")
            return Environment(task)

    async def look():
        door = McpDoor()
        server = EnvServer(Broken(), doors=[HttpDoor(HttpConfig(address="127.0.0.1:0"), mounts={"/mcp": door}), door])
        await server.start()
        try:
            context = SimpleNamespace(request=None)
            listed = await door._list_tools(context, None)
            started = await door._call_tool(context, SimpleNamespace(name="start", arguments={}))
            return [tool.name for tool in listed.tools], started.is_error, (await server.host.info()).cursor
        finally:
            await server.close()

    assert asyncio.run(look()) == (["start", "answer", "close"], False, 1)

"""Tools at the doors of a server: the same calls come to the same in process, over ZMQ, over HTTP, and in a pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from treetune import run_rollout
from treetune.core.from_config import build_taskset
from treetune.core.tool import message_of_action
from treetune.core.trace import Trace
from treetune.models.scripted import Gold
from treetune.serve.host import ModelsConfig
from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.serve.pool import PoolConfig
from treetune.serve.pool.broker import EnvServerPool
from treetune.serve.remote_taskset import read_server_node
from treetune.serve.server import EnvServer, ServerConfig
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor
from treetune.tasksets.target import load_taskset

CODE = '''
from treetune import Environment, Step, Task, Taskset, tool


class Shop(Environment):
    def start(self):
        self.seen = []
        return super().start()

    @tool
    def search(self, query: str, limit: int = 2) -> list[str]:
        """Find items. query: what to look for."""
        self.seen.append(query)
        return [f"{query} {number}" for number in range(limit)]

    @tool(final=True)
    def buy(self, item: str) -> Step:
        return Step("bought", reward=float(item == self.task.ground_truth and bool(self.seen)))


class Shopping(Taskset):
    def load_tasks(self):
        return [Task(prompt="Buy red 1.", reward_spec={"ground_truth": "red 1"}, tools=["calculator"])]

    def environment(self, task):
        return Shop(task)

    def gold(self, task):
        return [
            [{"tool": "search", "arguments": {"query": "red"}}, {"tool": "serch", "arguments": {}}],
            {"tool": "calculator", "arguments": {"expression": "1 + 1"}},
            {"tool": "buy", "arguments": {"item": "red 1"}},
        ]
'''


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "shop_of.py").write_text(CODE)
    return f"{tmp_path}/shop_of.py:Shopping"


@asynccontextmanager
async def served(target: str, workers: int = 0) -> AsyncIterator[tuple[Any, Any]]:
    pull, http = ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))
    models, doors = ModelsConfig(model="scripted:gold"), [pull, http]
    if workers:
        pool = PoolConfig(workers=workers)
        server: Any = EnvServerPool(load_taskset(target), ServerConfig(), models, pool, doors=doors)
    else:
        server = EnvServer(load_taskset(target), models=models, doors=doors)
    await server.start()
    try:
        yield pull, http
    finally:
        await server.close()


def summary(trace: Trace) -> Any:
    """What must be the same wherever it was played."""
    turns = [
        (
            turn.observed,
            turn.message,
            turn.reward,
            [(one.name, one.arguments, one.result, one.error) for one in turn.calls],
        )
        for turn in trace.turns
    ]
    return msgspec.to_builtins((turns, trace.tools, trace.reward, trace.metrics, trace.outcome, trace.final))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_same_calls_come_to_the_same_trace_everywhere(target: str, workers: int) -> None:
    async def play() -> None:
        taskset = load_taskset(target)
        gold = Gold(taskset, probability=1.0, name="scripted:gold")
        here = await run_rollout(taskset, taskset[0], gold)
        assert (here.reward, here.metrics) == (1.0, {"tool_calls": 4.0, "tool_errors": 1.0})
        async with served(target, workers) as (pull, http), EnvClient(pull.address) as client:
            task = await client.sample(0)
            assert task.tools == ["calculator"]
            assert summary(await client.run_rollout(task)) == summary(here)
            for address in (pull.address, http.address):
                remote = build_taskset(read_server_node(address))
                await remote.learn()
                played = (await remote.first_tasks(1))[0] if address == pull.address else remote[0]
                assert summary(await run_rollout(remote, played, Answers(here))) == summary(here)
                await remote.aclose()

    asyncio.run(play())


class Answers:
    """Says what another rollout said."""

    name = "answers"

    def __init__(self, trace: Trace) -> None:
        self._actions = [turn.message for turn in trace.turns]

    async def complete(self, request: Any) -> Any:
        from treetune import Completion

        return Completion(message=self._actions[request.turn], finish_reason="tool_calls")

    async def close(self) -> None: ...


def test_http_start_answers_the_tools_and_a_step_takes_calls_in_each_form(target: str) -> None:
    search = message_of_action({"tool": "search", "arguments": {"query": "red", "limit": 1}})

    async def play() -> None:
        async with served(target) as (_, http), aiohttp.ClientSession() as session:

            async def post(path: str, body: Any) -> tuple[int, Any]:
                async with session.post(f"{http.address}/api/episode/{path}", json=body) as reply:
                    return reply.status, await reply.json()

            _, begun = await post("start", {})
            assert [one["function"]["name"] for one in begun["tools"]] == ["search", "buy", "calculator"]
            episode = {"episode_id": begun["episode_id"]}
            for body in (
                {"action": search},
                {"tool_calls": search["tool_calls"]},
                {"action": "let me see", "tool_calls": search["tool_calls"]},
                {"action": {"type": "json", "content": search}},
            ):
                status, step = await post("step", {**episode, **body})
                assert status == 200, step
                assert step["observation"]["content"][0]["content"] == '["red 0"]'
                assert [(one["name"], one["error"]) for one in step["calls"]] == [("search", None)]
            assert (await post("step", episode))[0] == 422
            assert (await post("step", {**episode, "action": {"type": "json"}}))[0] == 422
            assert (await post("step", {**episode, "tool_calls": "search"}))[0] == 422
            _, step = await post("step", {**episode, "tool_calls": [None, {"function": {"name": "buy"}}]})
            assert [message["content"][:6] for message in step["observation"]["content"]] == ["Error:", "Error:"]
            async with session.ws_connect(f"{http.address}/api/episode/ws") as socket:
                await socket.send_json({})
                assert (await socket.receive_json())["tools"] == begun["tools"]
                await socket.send_json({"tool_calls": search["tool_calls"]})
                assert (await socket.receive_json())["calls"][0]["result"] == '["red 0"]'

    asyncio.run(play())


def test_the_trace_of_an_episode_that_others_step_has_its_calls(target: str, tmp_path: Path) -> None:
    from treetune.play.episode_record import EpisodeRecord
    from treetune.play.host import LocalHost, always

    ended: list[Any] = []

    class Recording(LocalHost):
        def _new_record(self, task: Any, step: int | None) -> EpisodeRecord:
            return EpisodeRecord(task, lambda *told: ended.append(told), keeps_trace=True)

    async def play() -> None:
        host = await Recording.open(load_taskset(target), always(None))  # type: ignore[arg-type]
        started = await host.start(await host.sample(0))
        message = message_of_action({"tool": "search", "arguments": {"query": "a"}})
        del message["tool_calls"][0]["id"]
        await host.step(started.episode, message)
        await host.step(started.episode, message_of_action({"tool": "buy", "arguments": {"item": "red 1"}}))

    asyncio.run(play())
    trace = ended[0][3]
    assert (trace.reward, trace.metrics["tool_calls"]) == (1.0, 2.0)
    assert trace.turns[0].message["tool_calls"][0]["id"] == trace.turns[1].observed[0]["tool_call_id"]
    assert [one.name for turn in trace.turns for one in turn.calls] == ["search", "buy"]
    assert len(trace.tools) == 3

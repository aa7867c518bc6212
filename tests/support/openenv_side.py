"""The real clients of OpenEnv and ORS: openenv_side.py STORY.json, whose result is printed as JSON.

Run with the Python of `venv(*OPENENV)`. The story has the addresses of two servers, of a task of several turns and of a
task with tools, and what to say to them.
"""

import asyncio
import json
import sys
from pathlib import Path

from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
from ors.client import ORS, AsyncORS

story = json.loads(Path(sys.argv[1]).read_text())
headers = {"Authorization": f"Bearer {story['token']}"}


def told(result):
    return [result.reward, result.done]


async def generic():
    async with GenericEnvClient(base_url=story["turns"], headers=headers) as env:
        first = await env.reset(index=story["index"])
        assert first.observation["text"] == story["prompt"], first
        return [told(await env.step({"message": text})) for text in story["answers"]]


def generic_sync():
    with GenericEnvClient(base_url=story["turns"], headers=headers).sync() as env:
        env.reset(seed=story["index"])
        steps = [told(env.step({"message": text})) for text in story["answers"]]
        assert env.state()["step_count"] == len(steps)
        return steps


async def many():
    """Sixteen at once, each with its own episode."""
    return (await asyncio.gather(*(generic() for _ in range(16))))[-1]


async def generic_tools():
    async with GenericEnvClient(base_url=story["tools"], headers=headers) as env:
        first = await env.reset(index=1)
        assert [tool["function"]["name"] for tool in first.metadata["tools"]] == ["search", "buy"]
        return [told(await env.step(turn)) for turn in story["turns_with_calls"]]


async def mcp_tools():
    async with MCPToolClient(base_url=story["tools"], headers=headers) as env:
        await env.reset(index=1)
        assert [tool.name for tool in await env.list_tools()] == ["search", "buy", "answer"]
        found = await env.call_tool("search", query="red", limit=2)
        assert json.loads(found) == ["red 0", "red 1"], found
        action = CallToolAction(tool_name="search", arguments={"query": "red", "limit": 1})
        assert (await env.step(action)).observation.result == '["red 0"]'
        return told(await env.step(CallToolAction(tool_name="buy", arguments={"item": "red 1"})))


def ors_tools():
    with ORS(base_url=story["tools"], api_key=story["token"]) as client:
        env = client.environment("shopping")
        assert (env.list_splits(), env.num_tasks("train")) == (["train"], 2)
        assert [tool.name for tool in env.list_tools()] == ["search", "buy", "answer"]
        steps = []
        with env.session(task=env.get_task("train", 1)) as session:
            assert session.get_prompt()[0].text == "Buy red 1."
            for name, arguments in story["calls"]:
                try:
                    output = session.call_tool(name, arguments)
                    steps.append([output.reward, output.finished])
                except Exception as error:
                    steps.append(type(error).__name__)
        return steps


async def ors_turns():
    client = AsyncORS(base_url=story["turns"], api_key=story["token"])  # which closes its connections when it is gone
    env = client.environment("guesses")
    steps = []
    async with env.session(split="train", index=story["index"]) as session:
        assert (await session.get_prompt())[0].text == story["prompt"]
        for text in story["answers"]:
            output = await session.call_tool("answer", {"text": text})
            steps.append([output.reward, output.finished])
    await env.client.close()
    return steps


print(
    json.dumps(
        {
            "generic": asyncio.run(generic()),
            "generic, sync": generic_sync(),
            "generic, sixteen at once": asyncio.run(many()),
            "generic with tools": asyncio.run(generic_tools()),
            "mcp": asyncio.run(mcp_tools()),
            "ors with tools": ors_tools(),
            "ors": asyncio.run(ors_turns()),
        }
    )
)

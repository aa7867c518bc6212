"""The real clients and servers of OpenEnv and ORS. Run with the Python of `venv(*OPENENV)`.

    python openenv_side.py play STORY.json              # what their clients make of two of our servers, as JSON
    python openenv_side.py openenv PORT SESSIONS FOLDER # OpenEnv's server with the echo environment of its own template
    python openenv_side.py ors PORT                     # ORS's server with an environment of its own

The story has the addresses of the servers, of a task of several turns and of a task with tools, and what to say.
"""

import asyncio
import json
import sys
from pathlib import Path


def play(file: str) -> None:
    from openenv.core.env_server.mcp_types import CallToolAction
    from openenv.core.generic_client import GenericEnvClient
    from openenv.core.mcp_client import MCPToolClient
    from ors.client import ORS, AsyncORS

    story = json.loads(Path(file).read_text())
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
        client = AsyncORS(
            base_url=story["turns"], api_key=story["token"]
        )  # which closes its connections when it is gone
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


def openenv(port: str, sessions: str, place: str) -> None:
    """The environment may end an episode, and fail, where it is told to: the template does neither."""
    import openenv.cli.templates as templates
    import uvicorn

    folder = Path(place)
    names = {"__ENV_NAME__": "echo", "__ENV_TITLE_NAME__": "Echo", "__ENV_CLASS_NAME__": "Echo"}
    template = Path(templates.__file__).parent / "openenv_env"
    for file in template.rglob("*.py"):
        text, name = file.read_text(), str(file.relative_to(template))
        for mark, value in names.items():
            text, name = text.replace(mark, value), name.replace(mark, value)
        if name == "server/app.py":
            text = text.replace("max_concurrent_envs=1", f"max_concurrent_envs={sessions}")
        (folder / "echo" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "echo" / name).write_text(text)
    sys.path.insert(0, str(folder))
    from echo.server import app as served
    from echo.server.echo_environment import EchoEnvironment

    echo = EchoEnvironment.step

    def step(self, action):
        if action.message == "fail":
            raise RuntimeError("the machine is gone")
        observation = echo(self, action)
        observation.done = action.message.startswith("end")
        return observation

    EchoEnvironment.step = step
    uvicorn.run(served.app, host="127.0.0.1", port=int(port), log_level="warning")


def ors(port: str) -> None:
    from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
    from pydantic import BaseModel
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    class Answer(BaseModel):
        answer: str

    class Word(BaseModel):
        word: str
        times: int = 1

    class Sums(Environment):
        alive: set[int] = set()

        def setup(self):
            Sums.alive.add(id(self))

        def teardown(self):
            Sums.alive.discard(id(self))

        def get_prompt(self):
            return [TextBlock(text=f"What is {self.task_spec['a']} + {self.task_spec['b']}?")]

        @classmethod
        def list_splits(cls):
            return [Split(name="train", type="train"), Split(name="test", type="test")]

        @classmethod
        def list_tasks(cls, split):
            return [{"a": number, "b": 1 if split == "train" else 2} for number in range(4)]

        @tool
        def look(self, params: Word) -> ToolOutput:
            """Look at a word."""
            if params.word == "fail":
                raise RuntimeError("the machine is gone")
            return ToolOutput(blocks=[TextBlock(text=params.word * params.times)], reward=0.25)

        @tool
        def submit(self, params: Answer) -> ToolOutput:
            """Submit the answer."""
            right = params.answer.strip() == str(self.task_spec["a"] + self.task_spec["b"])
            return ToolOutput(
                blocks=[TextBlock(text="right" if right else "wrong")], reward=float(right), finished=True
            )

    server = Server([Sums])
    server.app.router.routes.insert(0, Route("/alive", lambda request: JSONResponse(len(Sums.alive))))
    server.app.user_middleware = [one for one in server.app.user_middleware if "Redirect" not in one.cls.__name__]
    server.run(host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    {each.__name__: each for each in (play, openenv, ors)}[sys.argv[1]](*sys.argv[2:])

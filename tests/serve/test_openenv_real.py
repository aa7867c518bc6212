"""OpenEnv 0.10.0 and ors-sdk 0.1.0 themselves: their clients on our server, the same messages to their server and to
ours, and their servers as TARGETs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import aiohttp
import pytest
import tool_shop
from openenv_playing import Socket
from serve_process import serve
from venvs import OPENENV, run, venv

from treetune import load_taskset, run_rollout
from treetune.core.tool import message_of_action
from treetune.play.episode import Episode

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-the-test"
GUESSES = """
from treetune import Environment, Step, Task, Taskset

class Guess(Environment):
    def start(self):
        self.tries = 0
        return f"Guess a number below {self.task.prompt}."

    def step(self, action):
        self.tries += 1
        right = action.text == self.task.ground_truth
        done = right or self.tries == 3
        return Step("right" if right else "wrong", 1.0 if right else -0.125, done, {"tries": self.tries})

class Guesses(Taskset):
    "Numbers to guess."
    def load_tasks(self):
        return [Task(prompt=str(n + 5), reward_spec={"ground_truth": str(n)}) for n in range(4)]

    def environment(self, task):
        return Guess(task)

class EchoEnvironment(Environment):
    async def start(self):
        return "Echo environment ready!"

    async def step(self, action):
        return Step(action.text, reward=min(len(action.text) * 0.1, 1.0), info={"original_message": action.text})

class Echo(Taskset):
    INFINITE = True
    def task_at(self, index):
        return Task(prompt=str(index))

    def environment(self, task):
        return EchoEnvironment(task)
"""
SUM = """
import re

class Sum:
    async def complete(self, request):
        return str(sum(map(int, re.findall(r"[0-9]+", request.messages[-1]["content"]))))

class Fails:
    async def complete(self, request):
        return "fail"

class Ends:
    async def complete(self, request):
        return "hello" if request.turn < 2 else "end of it"

class Calls:
    async def complete(self, request):
        from treetune.core.policy import Completion
        from treetune.core.tool import message_of_action
        call = [
            [{"tool": "look", "arguments": {"word": "a", "times": 3}}, {"tool": "lok", "arguments": {}}],
            [{"tool": "look", "arguments": {"word": "fail" if "fail" in self.words else "b"}}],
            [{"tool": "submit", "arguments": {"answer": "1"}}],
        ][request.turn]
        return Completion("", message_of_action(call), "tool_calls")

    words = ""

class Broken(Calls):
    words = "fail"
"""


@pytest.fixture(scope="module")
def python():
    return venv(*OPENENV)


SIDE = Path(__file__).parents[1] / "support" / "openenv_side.py"


@contextlib.contextmanager
def running(python: Path, server: str, *arguments: str | int):
    """A server of theirs: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, SIDE, server, str(port), *map(str, arguments)], stdout=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, "it could not start"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "guesses.py").write_text(GUESSES)
    (tmp_path / "policies.py").write_text(SUM)
    tool_shop.write(tmp_path)
    return tmp_path


# Out


async def rewards(target: str, index: int, actions: list) -> list:
    """What each action earns in an episode played here."""
    taskset = load_taskset(target)
    episode = await Episode.start(taskset, taskset[index])
    steps = [await episode.step(action) for action in actions]
    await episode.close()
    return [[step.reward, step.done] for step in steps]


def test_their_clients_earn_on_our_server_what_eval_says(folder, python, monkeypatch):
    monkeypatch.chdir(folder)
    answers = ["7", "8", "2"]
    said = [{"role": "assistant", "content": one.text, **message_of_action(_calls(one))} for one in tool_shop.STORY]
    guessed = asyncio.run(rewards("guesses.py:Guesses", 2, answers))
    bought = asyncio.run(rewards("shop.py:Shopping", 1, [{"type": "json", "content": one} for one in said]))
    evaluated = asyncio.run(_evaluate("shop.py:Shopping"))
    with (
        serve(folder, "guesses.py:Guesses", "--openenv", ":0", "--token", TOKEN) as turns,
        serve(folder, "shop.py:Shopping", "--openenv", ":0", "--token", TOKEN, "-w", "1") as tools,
    ):
        story = {
            "token": TOKEN,
            "turns": turns.report["openenv"],
            "tools": tools.report["openenv"],
            "index": 2,
            "prompt": "Guess a number below 7.",
            "answers": answers,
            "turns_with_calls": [
                {"message": one.text, "tool_calls": message["tool_calls"]}
                for one, message in zip(tool_shop.STORY, said, strict=True)
            ],
            "calls": [call for one in tool_shop.STORY for call in one.calls],
        }
        (folder / "story.json").write_text(json.dumps(story))
        found = json.loads(run(python, SIDE, "play", folder / "story.json"))
    assert found["generic"] == found["generic, sync"] == found["generic, sixteen at once"] == found["ors"] == guessed
    assert found["generic with tools"] == bought
    assert sum(reward for reward, _ in bought) == evaluated
    assert found["mcp"] == [1.0, True]
    assert found["ors with tools"] == [[0, False], "ToolCallError", "ToolCallError", [0, False], [1.0, True]]


def _calls(said):
    return [{"tool": name, "arguments": arguments} for name, arguments in said.calls]


async def _evaluate(target):
    taskset = load_taskset(target)
    return (await run_rollout(taskset, taskset[1], tool_shop.Script())).reward


# The same messages to both

CONVERSATION = [
    {"type": "step", "data": {"message": "before a reset"}},
    "{bad",
    "",
    {"type": "nope"},
    {"type": 5},
    {},
    {"type": "reset"},
    {"type": "reset", "data": {}},
    {"type": "reset", "data": None},
    {"type": "reset", "data": {"seed": 3, "episode_id": "mine", "else": 1}},
    {"type": "state"},
    {"type": "state", "data": {}},
    {"type": "step"},
    {"type": "step", "data": "text"},
    {"type": "step", "data": {}},
    {"type": "step", "data": {"nope": 1}},
    {"type": "step", "data": {"message": 5}},
    {"type": "step", "data": {"message": "a", "nope": 1}},
    {"type": "step", "data": {"message": "a", "metadata": 1}},
    {"type": "step", "data": {"message": "a", "metadata": {"b": 1}}},
    {"type": "step", "data": {"message": "a"}, "more": 1},
    {"type": "step", "data": {"message": "ab\u00e9\ud83d\ude00"}},
    {"type": "state"},
    {"type": "mcp"},
    {"type": "mcp", "data": {}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": "x", "method": "tools/call", "params": {}}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "a"}}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "nope"}},
    {"type": "mcp", "data": {"jsonrpc": "1.0", "id": 1, "method": "tools/list"}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {}}},
    {
        "type": "mcp",
        "data": {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {"session_id": "n"}},
    },
    {"type": "close", "data": {}},
    {"type": "close"},
]
REQUESTS = [
    ("GET", "/health", None),
    ("GET", "/list_environments", None),
    ("GET", "/nothing/splits", None),
    ("POST", "/nothing/tasks", {"split": "train"}),
    ("POST", "/echo/num_tasks", {"split": "train"}),
    ("POST", "/reset", {}),
    ("POST", "/reset", {"seed": -1}),
    ("POST", "/reset", {"seed": [1]}),
    ("POST", "/step", {"action": {"message": "hello"}}),
    ("POST", "/step", {"action": {"nope": 1}}),
    ("POST", "/step", {}),
    ("POST", "/mcp", {}),
    ("POST", "/mcp", {"jsonrpc": "2.0", "id": 4, "method": "tools/list"}),
    ("POST", "/mcp", {"jsonrpc": "2.0", "id": 4, "method": "nope"}),
    ("POST", "/mcp", {"jsonrpc": "2.0", "id": 4, "method": "openenv/session/close", "params": {"session_id": "n"}}),
]


async def converse(address: str) -> list:
    """What a server answers to each message; at last the code that it closes the connection with."""
    heard = []
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}/ws") as connection:
        socket = Socket(connection)
        for message in CONVERSATION:
            await socket.tell(message)
            answer = await socket.hear()
            if isinstance(message, dict) and message.get("type") == "reset":
                answer["data"].pop("reward", None)  # whatever the environment says: 0 there, nothing here
            heard.append((message, answer))
        for method, path, body in REQUESTS:
            async with session.request(method, address + path, json=body) as reply:
                answer = await reply.json()
                if path == "/reset" and reply.status == 200:
                    del answer["reward"]
                heard.append(((method, path, body), [reply.status, answer]))
    for first in ("[1]", b"{}"):
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}/ws") as connection:
            await (connection.send_str(first) if isinstance(first, str) else connection.send_bytes(first))
            socket = Socket(connection)
            heard.append((first, [(await socket.hear())["data"]["code"], await socket.hear()]))
    return heard


def alike(value, key: str = ""):
    """An answer without what only one of them can know: what the environment shows, ids, words of errors."""
    if key == "observation":
        return sorted(value) and "shown"
    if key in ("episode_id", "session_id") and value != "mine":
        return type(value).__name__
    if key in ("message", "detail", "msg") and isinstance(value, str):
        # Words in which pydantic and msgspec differ; that of ours is not compared where theirs is a traceback of it.
        return re.sub(
            r"(Invalid JSON|Invalid request|unknown environment|is not supported).*", r"\1", value, flags=re.DOTALL
        )
    if isinstance(value, dict):
        return {name: alike(item, name) for name, item in value.items() if name not in ("url", "ctx", "metadata")}
    return [alike(item) for item in value] if isinstance(value, list) else value


def test_the_same_messages_get_the_same_answers_from_their_server_and_ours(folder, python):
    with (
        running(python, "openenv", 8, folder) as theirs,
        serve(folder, "guesses.py:Echo", "--openenv", ":0") as server,
    ):
        ours = server.report["openenv"]
        expected, found = asyncio.run(converse(theirs)), asyncio.run(converse(ours))
        report = json.loads(run(python, "-m", "openenv.cli", "validate", "--url", ours, "--json"))
    pairs = [(said, alike(answer), alike(mine)) for (said, answer), (_, mine) in zip(expected, found, strict=True)]
    assert [pair for pair in pairs if pair[1] != pair[2]] == []
    assert report["passed"], report


# In


@pytest.fixture
def evaluate(treetune):
    def run(target: str, policy: str, *options: str, code: int = 0) -> tuple[int, float | None]:
        """How many rollouts were scored, and the mean reward."""
        done = treetune("eval", target, "-m", f"scripted:policies.py:{policy}", *options, "--no-resume", "--json")
        assert done.code == code, done.out + done.err
        mean = done.json["mean_reward"]
        return done.json["scored"], None if mean is None else round(mean, 6)

    return run


def test_the_environment_of_an_openenv_server_is_a_target(folder, python, treetune, evaluate):
    with running(python, "openenv", 1, folder) as address:  # for one at a time: others wait
        target = f"openenv:{address}"
        shown = treetune("show", target, "-n", "2", "--json").json
        assert shown["infinite"]
        assert "Echo environment ready!" in shown["tasks"][1]["prompt"][0]["content"]
        assert evaluate(target, "Ends", "-n", "4") == (4, 0.5 + 0.5 + 0.9)
        assert evaluate(target, "Fails", "-n", "3", code=1) == (0, None)
        audited = treetune("audit", target, "-n", "2", "--json")
        assert not audited.json["sound"]  # an echo pays anybody
        with serve(folder, target, "--openenv", ":0", "-w", "1") as server:
            served = f"openenv:{server.report['openenv']}"
            assert evaluate(served, "Ends", "-n", "2") == (2, 1.9)
        assert evaluate(target, "Ends", "-n", "1") == (1, 1.9)  # its one session is free again


def test_the_environment_of_an_ors_server_is_a_target(folder, python, treetune, evaluate):
    with running(python, "ors") as address:
        target = f"ors:{address}"
        shown = treetune("show", target, "-n", "2", "--taskset.split", "test", "--json").json
        assert not shown["infinite"]
        assert shown["tasks"][1]["prompt"] == [{"role": "user", "content": "What is 1 + 2?"}]
        assert shown["tasks"][1]["tools"] == ["look", "submit"]
        given = ("--taskset.answer_tool", "submit")  # two tools take a text
        assert evaluate(target, "Sum", *given) == (4, 1.0)
        assert evaluate(target, "Calls") == (4, 0.25 + 0.25 + 0.25)  # one of four answers is right
        assert evaluate(target, "Broken", code=1) == (0, None)
        with serve(folder, target, "--openenv", ":0", "--http", ":0") as server:
            assert evaluate(f"ors:{server.report['openenv']}", "Calls") == (4, 0.75)
            assert evaluate(server.report["http"], "Calls") == (4, 0.75)
        with urllib.request.urlopen(f"{address}/alive", timeout=30) as reply:
            assert json.load(reply) == 0

"""A session of an agent that every trainer's bridge plays: a main conversation with a turn that the template shows
differently, a sub-agent of two calls, and a call for a title. It is an agent in Python, `agent_session.py:converse`,
and a program that asks by `urllib`:

    python agent_session.py

What answers it is fixed by the prompt alone (`sample`), so what a trainer gets is compared with the session `alone`."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

TASKS = """
from treetune import Environment, Task, Taskset


class Questions(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"How many, {n}?", reward_spec={"ground_truth": "4"}) for n in range(2)]

    def reward(self, task, answer):
        return 0.75 * (answer == task.ground_truth)


class Asking(Environment):
    MULTI_TURN = True


class Handing(Asking):
    def hand_in(self, answer):
        return answer


class Several(Questions):
    def load_tasks(self):
        return [Task(prompt="Ask.", env_class="questions.py:Asking")]


class Machines(Questions):
    def load_tasks(self):
        return [Task(prompt="Work.", env_class="questions.py:Handing")]
"""
TARGET, SEVERAL, MACHINES = "questions.py:Questions", "questions.py:Several", "questions.py:Machines"
REWARD = 0.75
AGENT = f"{Path(__file__).absolute()}:converse"
SILENT = f"{Path(__file__).absolute()}:answers_by_itself"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ANSWERS = {"How many": ("It may be the yes ", False), "Sure?": ("4", True), "A title": ("the Red", True),
           "Count.": ("1 2", True), "Go on.": ("3", True)}  # fmt: skip
"""What the model says to the last of these words in a prompt, and whether it ends its answer."""
CALLS = 5
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ (message['content'] or '') | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It drops the space at the end of an answer, so that the next prompt is realigned with what was sampled."""
Talk = Generator[tuple[list[dict[str, Any]], list[dict[str, Any]]], dict[str, Any], str]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def talk(problem: str) -> Talk:
    """The conversation: yields the messages and tools of each call, and receives the answer."""
    first = yield [user(problem)], [TOOL]
    yield [user("A title")], []
    counting = [{"role": "system", "content": "You count."}, user("Count.")]
    counted = yield counting, [TOOL]
    yield [*counting, counted, user("Go on.")], [TOOL]
    last = yield [user(problem), first, user("Sure?")], [TOOL]
    return str(last["content"])


async def converse(task: Any, client: Any) -> str:
    talking = talk(task.problem)
    messages, tools = next(talking)
    while True:
        said = await client.chat(messages, tools=tools or None)
        try:
            messages, tools = talking.send(said)
        except StopIteration as ended:
            return str(ended.value)


async def answers_by_itself(task: Any, client: Any) -> str:
    return "4"


def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def main() -> None:
    talking = talk(Path(os.environ["TREETUNE_TASK"]).read_text())
    messages, tools = next(talking)
    while True:
        try:
            messages, tools = talking.send(ask(messages, tools))
        except StopIteration as ended:
            return print(ended.value, end="")


# What answers


def sample(tokenizer: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The answer to a prompt, token by letter: not as the tokenizer would put it."""
    text = tokenizer.decode(prompt)
    words = max(ANSWERS, key=text.rfind)
    said, ends = ANSWERS[words]
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in said]
    ids = [token for letter in letters for token in letter] + [tokenizer.eos_token_id] * ends
    return ids, [-1.0 - len(prompt) / 1000 - at / 100 for at in range(len(ids))]


def version(prompt: list[int]) -> int:
    """The weights that answer a prompt."""
    return 3 + len(prompt) % 5


def alone(tokenizer: Any, calls: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The sequences of the session without a trainer, the main agent's last. What is sampled is added to `calls`."""
    from treetune import Task
    from treetune.chat.tokens import ChatTokens
    from treetune.core.agent import Assignment
    from treetune.gateway import AgentPolicy, Prompts, PythonAgent, Sampled, TokenModel

    class Engine:
        context = None

        async def __call__(self, prompt: Any, sampling: Any, hear: Any) -> Sampled:
            ids, logprobs = sample(tokenizer, prompt.ids)
            finish = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
            if calls is not None:
                calls.append({"ids": ids, "logprobs": logprobs, "version": version(prompt.ids)})
            return Sampled(ids, logprobs, finish, [version(prompt.ids)] * len(ids))

    async def play() -> Any:
        agent = AgentPolicy(PythonAgent("alone", converse))
        try:
            behind = TokenModel(Prompts(ChatTokens(tokenizer, rewrites="keep")), Engine())
            return await agent.play_behind(behind, Assignment("How many, 0?", Task()))
        finally:
            await agent.close()

    run = asyncio.run(play())
    assert len(run.record.calls) == CALLS
    assert [each.kind for each in run.record.lineage] == ["sub-agent", "main", "side"]
    assert run.tokens.sequences[-1].realigned
    names = ("ids", "mask", "logprobs", "versions")
    return [{name: getattr(each, name) for name in names} for each in run.tokens.sequences]


if __name__ == "__main__":
    main()

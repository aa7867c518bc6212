"""An environment with tools, written as its author writes it, and one story that every place plays alike."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from treetune import run_rollout
from treetune.chat.call_formats import FORMATS
from treetune.core.policy import Completion, Policy, Request
from treetune.core.tool import message_of_action
from treetune.core.trace import Trace
from treetune.runs.folder import TRACES
from treetune.tasksets.target import load_taskset

CODE = '''
from treetune import Environment, Step, Task, Taskset, tool


class Shop(Environment):
    @tool
    async def search(self, query: str, limit: int = 5) -> list[str]:
        """Find items. query: what to look for."""
        return [f"{query} {number}" for number in range(limit)]

    @tool(final=True)
    def buy(self, item: str) -> Step:
        """Buy an item, which ends it."""
        return Step("bought", reward=float(item == self.task.ground_truth))


class Shopping(Taskset):
    def load_tasks(self):
        for number in range(2):
            yield Task(
                prompt=f"Buy red {number}.", env_class="shop.py:Shop", reward_spec={"ground_truth": f"red {number}"}
            )
'''


class Said(NamedTuple):
    """What a model says in one turn."""

    text: str
    calls: list[tuple[str, dict[str, Any]]] = []

    def written(self, format: str = "hermes") -> str:
        """As a model of that convention writes it."""
        calls = [(name, json.dumps(arguments)) for name, arguments in self.calls]
        mark = "<|python_tag|>" if format == "llama" and self.text and calls else ""
        return self.text + mark + (FORMATS[format].write(calls) if calls else "")


STORY = [
    Said("I look.", [("search", {"query": "red", "limit": 2}), ("serach", {"query": "é"}), ("search", {"limit": "x"})]),
    Said("", [("search", {"query": "red", "limit": 1})]),
    Said("", [("buy", {"item": "red 1"})]),
]
"""Task 1, solved; a wrong name and wrong arguments on the way."""


def write(folder: Path) -> str:
    (folder / "shop.py").write_text(CODE)
    return f"{folder}/shop.py:Shopping"


class Script(Policy):
    """Says the story, in messages."""

    name = "script"

    async def complete(self, request: Request) -> Completion:
        said = STORY[request.turn]
        calls = [{"tool": name, "arguments": arguments} for name, arguments in said.calls]
        message = {**message_of_action(calls), "content": said.text}
        return Completion(said.text, message, "tool_calls")


def expected(target: str) -> list[Turn]:
    """What eval makes of the story."""
    taskset = load_taskset(target)
    return story_of(asyncio.run(run_rollout(taskset, taskset[1], Script())))


def kept(folder: Path) -> list[Trace]:
    """The traces that `treetune serve --traces` wrote; it does so a moment after an episode has ended."""
    for _ in range(100):
        if traces := list(TRACES.read(folder)):
            return traces
        time.sleep(0.1)
    return []


class Turn(NamedTuple):
    text: str
    calls: list[tuple[str, Any]]
    shown: list[str]
    """What the model is told by its tools."""
    reward: float


def story_of(trace: Trace) -> list[Turn]:
    """What happened, without what differs from place to place: ids and times."""
    assert (trace.outcome, trace.reward) == ("completed", 1.0), trace.failure
    return [
        Turn(
            ((turn.message or {}).get("content") or "").strip(),
            [(call.name, call.arguments) for call in turn.calls],
            [call.result for call in turn.calls],
            turn.reward,
        )
        for turn in trace.turns
    ]


def check_messages(trace: Trace) -> None:
    """Each result is a message with the id of its call, after the message that made it."""
    following = [*(turn.observed for turn in trace.turns[1:]), trace.final]
    for turn, observed in zip(trace.turns, following, strict=True):
        results = [message for message in observed if message["role"] == "tool"]
        made = [call["id"] for call in (turn.message or {}).get("tool_calls") or []]
        assert made == [call.id for call in turn.calls] == [message["tool_call_id"] for message in results]
        assert [message["content"] for message in results] == [call.result for call in turn.calls]

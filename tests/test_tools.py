"""Tools: what a model may call, and what it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from treetune import Environment, Outcome, Step, Task, Taskset, run_rollout, tool
from treetune.errors import UsageError
from treetune.policy import Completion, Request
from treetune.tools import message_of_action
from treetune.trace import Trace


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
    def load_tasks(self) -> list[Task]:
        return [Task(prompt="Buy red 1.", reward_spec={"ground_truth": "red 1"})]

    def environment(self, task: Task) -> Environment:
        return Shop(task)


class Script:
    """Says one thing after the other."""

    name = "script"

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.requests: list[Request] = []

    async def complete(self, request: Request) -> Completion:
        self.requests.append(request)
        answer = self._answers[request.turn]
        if isinstance(answer, str):
            return Completion(answer)
        message = answer if isinstance(answer, dict) and "role" in answer else message_of_action(answer)
        return Completion(message=message, finish_reason="tool_calls")

    async def close(self) -> None: ...


def play(taskset: Taskset, *answers: Any, **options: Any) -> Trace:
    return asyncio.run(run_rollout(taskset, taskset[0], Script(*answers), **options))


def test_a_model_calls_tools_until_a_final_one_ends_the_episode() -> None:
    trace = play(
        Shopping(),
        {"tool": "search", "arguments": {"query": "red", "limit": 2}},
        {"tool": "buy", "arguments": {"item": "red 1"}},
    )
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 1.0)
    assert trace.turns[1].observed == [
        {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": '["red 0","red 1"]'}
    ]
    assert [call.name for turn in trace.turns for call in turn.calls] == ["search", "buy"]
    assert trace.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}
    assert [schema["function"]["name"] for schema in trace.tools] == ["search", "buy"]
    assert trace.tools[0]["function"] == {
        "name": "search",
        "description": "Find items.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what to look for."},
                "limit": {"type": "integer", "default": 5},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    }


def test_a_tool_without_types_is_refused_where_it_is_written() -> None:
    with pytest.raises(UsageError, match="does not say what 'query' is"):

        @tool
        def search(query):  # type: ignore[no-untyped-def]
            return query

"""Two tasks that every trainer and protocol plays: one with tools, one of several turns; and what a model says to them.

    stories.write(folder)               # shop.py and counting.py, as their authors write them
    story = STORIES["tools"]            # story.target, story.index, story.says
    stories.expected(folder, story)     # what eval makes of it

A place that plays one tells what came of it as a `Played`, or as its JSON where it is a program of its own.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import tool_shop
from tool_shop import Said

from treetune import run_rollout
from treetune.core.policy import Completion, Policy, Request
from treetune.core.tool import message_of_action
from treetune.tasksets.target import load_taskset

COUNTING = '''
from treetune import Environment, Step, Task, Taskset


class Count(Environment):
    """Counts down, a number in each turn; each right one earns half of what the one before could."""

    MULTI_TURN = True

    def start(self):
        self.left, self.worth = int(self.task.ground_truth), 0.5
        return f"Count down from {self.left} to 0."

    def step(self, action):
        reward = self.worth * (action.text.strip() == str(self.left))
        self.left, self.worth = self.left - 1, self.worth / 2
        return Step(f"Now {self.left}." if self.left >= 0 else "", reward=reward, done=self.left < 0)


class Counting(Taskset):
    def load_tasks(self):
        for number in range(3):
            yield Task(
                prompt=f"Count down from {number} to 0.",
                env_class="counting.py:Count",
                reward_spec={"ground_truth": str(number)},
            )
'''


class Story(NamedTuple):
    target: str
    environment: str
    index: int
    says: list[Said]

    @property
    def texts(self) -> list[str]:
        """What the model says, calls as most models write them."""
        return [said.written() for said in self.says]

    @property
    def pieces(self) -> list[str]:
        """What it samples, a token for each letter: what must be trained on, everywhere."""
        return [*chain(*([*text, END] for text in self.texts))]


END = "<end>"
"""An end token in `pieces`, whatever a tokenizer calls it."""
STORIES = {
    "tools": Story("shop.py:Shopping", "shop.py:Shop", 1, tool_shop.STORY),
    "several turns": Story("counting.py:Counting", "counting.py:Count", 2, [Said("2"), Said("so: 7"), Said("0")]),
}


class Played(NamedTuple):
    reward: float
    turns: list[float] | None = None
    """The reward of each, where a place tells."""
    trained: list[str] | None = None
    """The tokens that are trained on, where there are tokens: `pieces_of`."""


def write(folder: Path) -> None:
    tool_shop.write(folder)
    (folder / "counting.py").write_text(COUNTING)


class Script(Policy):
    """Says the story, in messages."""

    name = "script"

    def __init__(self, story: Story) -> None:
        self._story = story

    async def complete(self, request: Request) -> Completion:
        said = self._story.says[request.turn]
        return Completion(said.text, message_of(said), "tool_calls" if said.calls else "stop")


def message_of(said: Said) -> dict[str, Any]:
    calls = [{"tool": name, "arguments": arguments} for name, arguments in said.calls]
    return {**message_of_action(calls), "content": said.text} if calls else {"role": "assistant", "content": said.text}


def action_of(said: Said) -> Any:
    """What is given to an episode that others step: a text, or a message with calls."""
    return message_of(said) if said.calls else said.text


def expected(folder: Path, story: Story) -> Played:
    """What eval makes of it."""
    taskset = load_taskset(str(folder / story.target))
    trace = asyncio.run(run_rollout(taskset, taskset[story.index], Script(story)))
    assert trace.reward is not None, trace.failure
    return Played(trace.reward, [turn.reward for turn in trace.turns], story.pieces)


def letters(tokenizer: Any, text: str) -> list[int]:
    """The text in tokens of the model's own choice, one for each letter, and an end token."""
    ids = [id for letter in text for id in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    return [*ids, tokenizer.eos_token_id]


def pieces_of(tokenizer: Any, ids: Any, mask: Any = None) -> list[str]:
    """The texts of the tokens that the mask has."""
    mine = [int(id) for id, one in zip(ids, [1] * len(ids) if mask is None else mask, strict=True) if one]
    return [END if id == tokenizer.eos_token_id else tokenizer.decode([id]) for id in mine]

"""Conversations that every trainer and protocol plays: with the first task of a target, and what a model says to it.

    stories.write(folder)               # the tasks, as their authors write them: conversations.py, mixture.yaml
    story = STORIES["tools"]            # story.target, story.says, story.reward
    stories.by_eval(story)              # what eval makes of it

A place that plays one tells what came of it as a `Played`, or as its JSON where it is a program of its own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import conversations
from tool_shop import STORY, Said

from treetune import run_rollout
from treetune.core.policy import Completion, Policy, Request
from treetune.core.tool import message_of_action
from treetune.core.trace import Trace
from treetune.tasksets.target import load_taskset


class Story(NamedTuple):
    target: str
    says: list[Said]
    reward: float | None
    """None if a rollout has no reward without the others of its group."""
    truncated: bool = False
    shaped: float | None = None
    """What trainers train on, if that is not the reward."""
    grouped: float | None = None
    """What each rollout earns where a group of them is scored together, if the tasks score groups."""

    @property
    def texts(self) -> list[str]:
        """What the model says, calls as most models write them."""
        return texts_of(self.says)

    @property
    def endless(self) -> bool:
        """Whether a trainer must be given a number of tasks."""
        return self.target in ("conversations.py:Boards", "mixture.yaml")


def _story(name: str, reward: float, *says: str | Said, **further: Any) -> Story:
    target = name if "." in name else f"conversations.py:{name}"
    return Story(target, [Said(one) if isinstance(one, str) else one for one in says], reward, **further)


STORIES = {
    "several turns": _story("Counting", 0.625, "2", "so: 7", "0"),
    "tools": _story("Shopping", 1.0, *STORY),
    "tools that raise": _story(
        "Reading", 1.0, Said("", [("fetch", {"page": 1}), ("fetch", {"page": 2})]), Said("", [("fetch", {})]), "sesame"
    ),
    "slow tools": _story("Digging", 1.0, Said("Both.", [("dig", {"shelf": n}) for n in ("a", "b")]), " sesame "),
    "a truncation": _story("CutShort", 0.5, "I walk", "on", truncated=True),
    "rewards by turn": _story("Steps", 0.6, *["go"] * 5),
    "a reward at turn 12": _story("Twelve", 1.0, *map(str, range(1, 13))),
    "a reward at turn 30": _story("Thirty", 1.0, *map(str, range(1, 31))),
    "an endless taskset with nested fields": _story("Boards", 0.75, "a b0"),
    "a weighted mixture": _story("mixture.yaml", 0.625, "2", "so: 7", "0"),
    "thoughts": _story("Thinking", 1.0, "<think>Hm, 2 ways.</think>left", "<think>\nAgain?\n</think>\n\nright"),
    "an empty answer": _story("Silent", 1.0, "", "now"),
    "unicode": _story("Foreign", 1.0, "naïve — 日本語 🙂 é"),
    "a reward after zeros": _story("Late", 1.0, "a", "b", "c"),
    "a declared discount": _story("Discounting", 1.0, "a", "b", shaped=0.25),
    "a declared limit": _story("Limiting", 0.5, "a", "b", truncated=True),
    "a group": _story("Grouped", 0.5, "more"),
    "a group alone": _story("Ranked", 0.5, "more"),
}
END = "<end>"
"""An end token in the pieces that are trained on, whatever a tokenizer calls it."""


class Played(NamedTuple):
    reward: float | None
    turns: list[float] | None = None
    """The reward of each, where a place tells."""
    trained: list[str] | None = None
    """The tokens that are trained on, where there are tokens: `pieces_of`."""
    truncated: bool | None = None
    """Where a place tells."""
    refused: str | None = None
    """Why it is not played, if that is said before anything is sampled."""


def check(played: Played, story: Story, trains: bool = False) -> None:
    """What eval makes of a story is made of it everywhere; a trainer trains on its shaped reward."""
    assert played.refused is None
    assert played.reward is not None
    assert story.reward is not None
    expected = story.reward if not trains or story.shaped is None else story.shaped
    assert abs(played.reward - expected) < 1e-6  # trainers have floats of 32 bits
    assert played.turns is None or abs(sum(played.turns) - story.reward) < 1e-6
    assert played.trained in (None, [piece for text in story.texts for piece in [*text, END]])
    assert played.truncated in (None, story.truncated)


def texts_of(says: Any) -> list[str]:
    """Each turn as most models write it; also of a story that came as JSON."""
    return [Said(*said).written() for said in says]


def write(folder: Path) -> None:
    (folder / "conversations.py").write_text(Path(conversations.__file__).read_text())
    (folder / "mixture.yaml").write_text(conversations.MIXTURE)


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


def by_eval(story: Story, policy: Policy | None = None) -> Played:
    taskset = load_taskset(story.target)
    return of_trace(asyncio.run(run_rollout(taskset, taskset.at(0), policy or Script(story))))


def of_trace(trace: Trace) -> Played:
    assert trace.outcome.scored, trace.failure
    return Played(trace.reward, [turn.reward for turn in trace.turns], truncated=trace.outcome == "truncated")


def letters(tokenizer: Any, text: str) -> list[int]:
    """The text in tokens of the model's own choice, those of one letter after the other, and an end token."""
    ids = [id for letter in text for id in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    return [*ids, tokenizer.eos_token_id]


def pieces_of(tokenizer: Any, ids: Any, mask: Any = None) -> list[str]:
    """The texts of the tokens that the mask has; tokens that are parts of one letter are one piece."""
    pieces, part = [], []
    for id, mine in zip(ids, [1] * len(ids) if mask is None else mask, strict=True):
        if not mine:
            assert not part
        elif id == tokenizer.eos_token_id:
            pieces.append(END)
        else:
            part.append(int(id))
            if "\ufffd" not in (text := tokenizer.decode(part)):
                pieces.append(text)
                part = []
    return pieces

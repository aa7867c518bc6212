"""The tasks that an audit tries, each with what is known of it: prompt, ground truth, gold answer, what gold earned.

    sample = await draw_sample(host, 50, seed=0)

A finite taskset that gives any task by its index is sampled at random, by the seed; of others the first are taken.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cached_property
from typing import Any

import msgspec

from treetune.audit.answers import AnswerFormat, texts_of
from treetune.chat.message import Message, text_of
from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.play.protocol import Host

Answer = str | list[Any]
"""One text, given each turn until the episode ends, or one action a turn: text, or calls of tools."""


class Subject(msgspec.Struct, eq=False):
    """One task under audit."""

    task: Task
    occurrence: int
    gold: Answer | None = None
    trace: Trace | None = None
    """What the gold answer came to."""
    first: Trace | None = None
    """Of the first episode: with the gold answer, or where there is none an empty one."""

    @property
    def idx(self) -> int:
        return self.task.idx

    @property
    def prompt(self) -> str:
        """What the environment shows first, where that was seen; else the task's own."""
        seen = self.first.turns[0].observed if self.first is not None and self.first.turns else []
        return as_text(seen or self.task.messages)

    @property
    def truth(self) -> str | None:
        """The ground truth as one text, where it is one, or the first of several."""
        found = texts_of(self.task.ground_truth)
        return found[0] if found and not isinstance(self.task.ground_truth, dict) else None

    @property
    def last_gold(self) -> str | None:
        """The gold answer, or its last action where that is text."""
        last = self.gold if isinstance(self.gold, str) else self.gold[-1] if self.gold else None
        return last if isinstance(last, str) else None

    @property
    def gold_texts(self) -> list[str]:
        """The actions of the gold answer that are text."""
        actions = [self.gold] if isinstance(self.gold, str) else self.gold or []
        return [action for action in actions if isinstance(action, str)]

    @property
    def has_several_actions(self) -> bool:
        """Whether the last of the gold actions is only the end of what is to be done."""
        return isinstance(self.gold, list) and len(self.gold) > 1

    @property
    def is_program(self) -> bool:
        """Whether its gold answer hands in a program, which is nothing that is said."""
        return "```" in "\n".join(self.gold_texts)

    @property
    def gold_reward(self) -> float | None:
        return self.trace.reward if self.trace is not None else None


def as_text(messages: list[Message]) -> str:
    return "\n".join(text_of(message.get("content")) or "" for message in messages)


class Sample:
    def __init__(self, subjects: list[Subject], num_tasks: int | None) -> None:
        self.subjects, self.num_tasks = subjects, num_tasks
        self.truths: Counter[str] = Counter()
        """How often each ground truth occurs among all tasks that were read, where there are any."""

    def __len__(self) -> int:
        return len(self.subjects)

    @property
    def idxs(self) -> list[int]:
        return [subject.idx for subject in self.subjects]

    @cached_property
    def _shared(self) -> AnswerFormat:
        golds = [subject.last_gold for subject in self.subjects]
        return AnswerFormat.shared([gold for gold in golds if gold is not None and "```" not in gold])

    def format_of(self, subject: Subject) -> AnswerFormat:
        """How its answer is written. Asked for once the gold answers are known."""
        if subject.last_gold is None or "```" in subject.last_gold:
            return AnswerFormat()
        return AnswerFormat.of(subject.last_gold, subject.task.ground_truth) or self._shared

    def content_of(self, subject: Subject) -> str | None:
        """The right answer without its format: from the gold answer, else the ground truth."""
        if subject.last_gold is None or subject.is_program:
            return subject.truth
        found = self.format_of(subject).read(subject.last_gold.rpartition("\n")[2])
        return subject.last_gold if found is None and subject.truth is None else found or subject.truth

    @cached_property
    def contents(self) -> Counter[str]:
        """How often each right answer occurs among the tasks."""
        found = (self.content_of(subject) for subject in self.subjects)
        return Counter(content for content in found if content is not None)

    @cached_property
    def choices(self) -> list[str]:
        """All right answers that there are, where they are so few that they must be choices: a chance of one in so
        many is nobody's fault."""
        counts = self.truths or self.contents
        return sorted(counts) if 2 <= len(counts) <= 10 and counts.total() >= 4 * len(counts) else []


async def draw_sample(host: Host, num_tasks: int, seed: int) -> Sample:
    info = await host.info()
    seen: Counter[str] = Counter()
    subjects: list[Subject] = []

    def add(task: Task) -> None:
        uid = task.uid
        subjects.append(Subject(task, seen[uid]))
        seen[uid] += 1

    if info.by_index and info.num_tasks is not None:
        wanted = min(num_tasks, info.num_tasks)
        for index in sorted(random.Random(f"audit {seed}").sample(range(info.num_tasks), wanted)):
            add(await host.sample(index))
    else:
        async for task, _ in host.draw(num_tasks):
            add(task)
    return Sample(subjects, info.num_tasks)


def describe(value: Any) -> str:
    """An answer as evidence shows it."""
    text = "\n".join(value) if isinstance(value, list) else str(value)
    return repr(text if len(text) <= 120 else f"{text[:100]}…")

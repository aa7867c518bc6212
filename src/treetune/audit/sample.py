"""The tasks that an audit tests, the text around their answers, and the player of answers.

    sample = await draw_sample(host, 50, seed=0)
    format = Wrapping.of("#### 72", "72")        # Wrapping(before="#### ", after="")
    player = Player(taskset, limits, max_concurrent=16)
    trace = await player.play(subject, ["ls", "DONE"])          # the last action is repeated until the episode ends

A finite taskset that can return any task by index is sampled at random, using the seed; for other tasksets, the first
tasks are taken. A policy that solves nothing writes its answers in the format of the gold answers, because otherwise
the scorer would not find an answer in them.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from treetune.chat.message import Message, text_of
from treetune.core.contract import Limits
from treetune.core.policy import Completion, Policy, Request
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace
from treetune.data.validate.gold import Answer
from treetune.models.scripted import Echo, completion_of
from treetune.play.episode import with_deadline
from treetune.play.protocol import Host
from treetune.play.rollout import run_rollout, score_together

NUMBER = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?(?![\w])")
_OPTION = re.compile(r"^\s*[(\[]?([A-Ha-h]|\d)[).\]:]\s+(\S.*)$", re.M)
_WORDY_END = re.compile(r"\w+$")
_WORDY_BEGIN = re.compile(r"^\w+")


class Wrapping(msgspec.Struct, frozen=True):
    """The parts that all gold answers have in common."""

    before: str = ""
    after: str = ""

    def write(self, content: str) -> str:
        return f"{self.before}{content}{self.after}"

    def read(self, answer: str) -> str | None:
        """Returns the content of an answer; None if the answer does not have the format."""
        if len(answer) < len(self.before) + len(self.after):
            return None
        if not (answer.startswith(self.before) and answer.endswith(self.after)):
            return None
        return answer[len(self.before) : len(answer) - len(self.after)]

    @classmethod
    def of(cls, gold: str, truth: Any) -> Wrapping | None:
        """Derives the format from a gold answer that contains the ground truth. Of the text before it only the current
        line counts, because the rest may be a worked solution."""
        texts = sorted((text for text in texts_of(truth) if text and text in gold), key=len)
        if not texts:
            return None
        before, _, after = gold.rpartition(texts[-1])
        return cls(before.rpartition("\n")[2], after.partition("\n")[0])

    @classmethod
    def shared(cls, golds: Sequence[str]) -> Wrapping:
        """Returns the common beginning and end of all gold answers, without partial words."""
        if len(set(golds)) < 2:
            return cls()
        before = _common_beginning(golds)
        rest = [gold[len(before) :] for gold in golds]
        after = _common_beginning([text[::-1] for text in rest])[::-1]
        if any(text[:1].isalnum() for text in rest):
            before = _WORDY_END.sub("", before)
        if any(text[: len(text) - len(after)][-1:].isalnum() for text in rest):
            after = _WORDY_BEGIN.sub("", after)
        return cls(before, after)


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    return first[
        : next((place for place, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), None)
    ]


def texts_of(truth: Any) -> list[str]:
    """The texts and numbers of a ground truth, as an answer may contain them."""
    if isinstance(truth, dict | list | tuple):
        return [text for item in (truth.values() if isinstance(truth, dict) else truth) for text in texts_of(item)]
    if isinstance(truth, float) and truth.is_integer():
        return [str(int(truth)), str(truth)]
    return [str(truth)] if isinstance(truth, str | int | float) and not isinstance(truth, bool) else []


def numbers_in(text: str) -> list[str]:
    """The distinct numbers in a text, without thousands separators and currency."""
    return list(dict.fromkeys(found.replace(",", "").replace("$", "") for found in NUMBER.findall(text)))


def options_in(text: str) -> list[str]:
    """The labels of the choices that a prompt lists one per line: A, B, C. None if there are fewer than two."""
    marks = list(dict.fromkeys(mark for mark, _ in _OPTION.findall(text)))
    return marks if len(marks) >= 2 and (marks[0] in "Aa1" or marks[0] == "0") else []


def is_number(text: str) -> bool:
    return NUMBER.fullmatch(text.strip()) is not None


class Subject(msgspec.Struct, eq=False):
    """One task under audit."""

    task: Task
    occurrence: int
    gold: Answer | None = None
    trace: Trace | None = None
    """The rollout of the gold answer."""
    first: Trace | None = None
    """The rollout of the first episode: with the gold answer, or with an empty one if there is no gold answer."""

    @property
    def idx(self) -> int:
        return self.task.idx

    @property
    def prompt(self) -> str:
        """The first observation of the environment if one was seen; otherwise the task's own prompt."""
        seen = self.first.turns[0].observed if self.first is not None and self.first.turns else []
        return as_text(seen or self.task.messages)

    @property
    def truth(self) -> str | None:
        """The ground truth as text: the only one, or the first of several."""
        found = texts_of(self.task.ground_truth)
        return found[0] if found and not isinstance(self.task.ground_truth, dict) else None

    @property
    def last_gold(self) -> str | None:
        """The gold answer, or its last action if that is text."""
        last = self.gold if isinstance(self.gold, str) else self.gold[-1] if self.gold else None
        return last if isinstance(last, str) else None

    @property
    def gold_texts(self) -> list[str]:
        """The text actions of the gold answer."""
        actions = [self.gold] if isinstance(self.gold, str) else self.gold or []
        return [action for action in actions if isinstance(action, str)]

    @property
    def has_several_actions(self) -> bool:
        """Whether the gold answer has several actions, so that the last one alone solves nothing."""
        return isinstance(self.gold, list) and len(self.gold) > 1

    @property
    def is_program(self) -> bool:
        """Whether its gold answer is a program."""
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
        """How often each ground truth occurs among all tasks that were read; empty if there are none."""

    def __len__(self) -> int:
        return len(self.subjects)

    @property
    def idxs(self) -> list[int]:
        return [subject.idx for subject in self.subjects]

    @cached_property
    def _shared(self) -> Wrapping:
        golds = [subject.last_gold for subject in self.subjects]
        return Wrapping.shared([gold for gold in golds if gold is not None and "```" not in gold])

    def format_of(self, subject: Subject) -> Wrapping:
        """The format of the task's answer. Requires the gold answers."""
        if subject.last_gold is None or "```" in subject.last_gold:
            return Wrapping()
        return Wrapping.of(subject.last_gold, subject.task.ground_truth) or self._shared

    def content_of(self, subject: Subject) -> str | None:
        """The right answer without its format: from the gold answer, otherwise from the ground truth."""
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
        """All right answers, if there are few enough to be choices. Guessing one of them by chance is not a
        fault."""
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


def quote_answer(value: Any) -> str:
    """Formats an answer as evidence."""
    text = "\n".join(value) if isinstance(value, list) else str(value)
    return repr(text if len(text) <= 120 else f"{text[:100]}…")


ECHO = "\0echo"
"""A placeholder for an action that repeats the last message."""

T = TypeVar("T")


class RepeatLast(Policy):
    """Takes one action per turn, and repeats the last one."""

    name = "audit"

    def __init__(self, answer: Answer) -> None:
        self._actions = [answer] if isinstance(answer, str) else answer or [""]

    async def complete(self, request: Request) -> Completion:
        action = self._actions[min(request.turn, len(self._actions) - 1)]
        if not isinstance(action, str):
            return completion_of(action)
        if action == ECHO:
            return await Echo().complete(request)
        return Completion(text=action if action.startswith(request.prefix) else request.prefix + action)


class Player:
    def __init__(
        self,
        taskset: Taskset[Any, Any],
        limits: Limits,
        max_concurrent: int,
        on_rollout: Callable[[], object] = lambda: None,
    ) -> None:
        self.taskset, self.limits = taskset, limits
        self._free = asyncio.Semaphore(max_concurrent)
        self._on_rollout = on_rollout
        self.rollouts = 0

    async def play(self, subject: Subject, answer: Answer, *, max_turns: int | None = None) -> Trace:
        """Plays one answer and returns its trace. If tasks are scored in groups, the gold answer is the other member of
        the group."""
        limits = self.limits if max_turns is None else msgspec.structs.replace(self.limits, max_turns=max_turns)
        async with self._free:
            trace = await self._play(subject, answer, limits)
            if trace.outcome.scored and self.taskset.scores_group_of(subject.task):
                others = [] if subject.gold is None else [await self._play(subject, subject.gold, limits)]
                await score_together(self.taskset, subject.task, [trace, *others], self.limits)
        self._on_rollout()
        return trace

    async def _play(self, subject: Subject, answer: Answer, limits: Limits) -> Trace:
        self.rollouts += 1
        return await run_rollout(
            self.taskset, subject.task, RepeatLast(answer), limits=limits, occurrence=subject.occurrence
        )

    async def each_of(self, answers: Iterable[tuple[Subject, Answer]]) -> list[Trace]:
        return list(await asyncio.gather(*(self.play(subject, answer) for subject, answer in answers)))

    async def bounded(self, work: Awaitable[T]) -> T:
        """Runs work other than a rollout under the same concurrency limit."""
        async with self._free:
            return await with_deadline(work, self.limits)

    async def each(self, work: Callable[[Subject], Awaitable[T]], subjects: Iterable[Subject]) -> list[T]:
        """Runs `work` on every task at once; `play` limits how many run."""
        return list(await asyncio.gather(*map(work, subjects)))

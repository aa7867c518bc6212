"""Each row's environment with its gold answer and with wrong ones: gold must earn more than any of them.

Wrong are the empty answer, an empty one in the format (`<answer></answer>`), the prompt itself, a shrug, and the gold
answer of a changed ground truth. An environment that pays for one of these would teach a model just that. What is right
in another row is not tried: 0.5 and 1/2 may both be right in both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from treetune.environment import Environment
from treetune.episode import Limits
from treetune.errors import TreetuneError, described
from treetune.plugins import environments
from treetune.policies.scripted import WRONG, Replay
from treetune.policy import Completion
from treetune.rollout import run_rollout
from treetune.rows.layouts import detect, format_named
from treetune.rows.sources import Batch
from treetune.task import Task
from treetune.taskset import ByEnvironment
from treetune.threads import call
from treetune.trace import Outcome
from treetune.validate.report import Report

CONCURRENT = 16
"""Rows that are tried at a time."""
TURNS = 100
"""No gold answer has more actions."""


class Place(NamedTuple):
    file: str
    unit: str
    number: int


async def check_gold(
    batches: Iterable[Batch], format: str | None, report: Report, on_row: Callable[[], None] | None = None
) -> None:
    """Try every row that can be read as a task; others are told by the other rules."""
    free = asyncio.Semaphore(CONCURRENT)

    async def one(place: Place, task: Task) -> None:
        try:
            rule, found = await _tried(task)
            if rule is not None:
                report.add(rule, place.file, found, [place.number], place.unit)
            if rule in (None, "gold-not-rewarded"):
                report.gold_checked += 1
            if on_row is not None:
                on_row()
        finally:
            free.release()

    async with asyncio.TaskGroup() as group:
        async for place, task in _tasks(batches, format):
            await free.acquire()
            group.create_task(one(place, task))


async def _tasks(batches: Iterable[Batch], format: str | None) -> AsyncIterator[tuple[Place, Task]]:
    for batch in batches:
        for number, row in zip(batch.numbers, batch.rows, strict=True):
            try:
                task = (format_named(format) if format is not None else detect(row)).task_of_pruned(row)
            except TreetuneError:
                continue
            if isinstance(task.env_class, str) and task.env_class in environments.names():
                yield Place(batch.source, batch.unit, number), task
        await asyncio.sleep(0)


async def _tried(task: Task) -> tuple[str | None, str]:
    """The rule that is broken, if any, and what was found."""
    try:
        cls: type[Environment] = environments.resolve(task.env_class or "")
        gold = await call(cls.gold, task)
        if gold is None:
            return "gold-unknown", f"{task.env_class} knows no gold answer"
        earned = await _earned(task, gold)
        for what, answer in _wrong(cls, task, gold):
            wrong = await _earned(task, answer)
            if wrong >= earned:
                return "gold-not-rewarded", f"the gold answer earns {earned:g}, {what} {wrong:g}"
    except Exception as error:
        message = error.message if isinstance(error, TreetuneError) else described(error)
        return "environment-fails", f"{task.env_class}: {message}"
    return None, ""


def _wrong(cls: type[Environment], task: Task, gold: str | list[str]) -> Iterator[tuple[str, str | list[str]]]:
    """Wrong answers, each once, with what they are."""
    prompt = "\n".join(str(message.get("content", "")) for message in task.messages)
    once = changed(task.ground_truth)
    wrong: list[tuple[str, Any]] = [
        ("an empty answer", ""),
        ("an empty answer in the format", emptied(gold, task.ground_truth)),
        # A prompt that shows the format is not the wrong answer that it looks like.
        ("the prompt itself", None if _TAG.search(prompt) else prompt),
        (f"{WRONG!r}", WRONG),
        ("the answer to a changed ground truth", cls.gold(_with(task, once))),
        ("the answer to a ground truth that was changed twice", cls.gold(_with(task, changed(once)))),
    ]
    tried: list[Any] = [None, gold]
    for what, answer in wrong:
        if answer not in tried:
            tried.append(answer)
            yield what, answer


_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
_PAIR = re.compile(r"(.*<([A-Za-z][\w-]*)>).*?(</\2>.*)", re.DOTALL)
_CODE = re.compile(r"(.*```\w*\n).*?(```.*)", re.DOTALL)


def emptied(gold: str | list[str], truth: Any) -> str | list[str] | None:
    """A gold answer that says nothing: between the last tags, in the last block of code, or where the truth stands.
    None where no such place is seen."""
    if isinstance(gold, list):
        last = emptied(gold[-1], truth) if gold else None
        return [*gold[:-1], last] if isinstance(last, str) else None
    for pattern in (_PAIR, _CODE):
        if match := pattern.fullmatch(gold):
            return match[1] + match[match.lastindex or 0]
    texts = [text for text in truth_texts(truth) if text and text in gold]
    return gold.replace(max(texts, key=len), "") if texts else None


def truth_texts(truth: Any) -> list[str]:
    """The texts and numbers of a ground truth, as an answer may have them."""
    if isinstance(truth, dict | list):
        return [text for item in (truth.values() if isinstance(truth, dict) else truth) for text in truth_texts(item)]
    if isinstance(truth, float) and truth.is_integer():
        return [str(truth), str(int(truth))]
    return [str(truth)] if isinstance(truth, str | int | float) else []


def changed(truth: Any) -> Any:
    """Another ground truth of the same kind: numbers one more, text backwards."""
    if isinstance(truth, str):
        try:
            return str(int(truth) + 1)
        except ValueError:
            return truth[::-1] if truth[::-1].strip().casefold() != truth.strip().casefold() else f"{truth}x"
    if isinstance(truth, bool) or truth is None:
        return truth
    if isinstance(truth, int | float):
        return truth + 1
    if isinstance(truth, dict):
        return {key: value if key == "input" else changed(value) for key, value in truth.items()}
    return [changed(item) for item in truth] if isinstance(truth, list) else truth


def _with(task: Task, truth: Any) -> Task:
    return msgspec.structs.replace(
        task, reward_spec={**task.reward_spec, "ground_truth": truth}, extra_info=_other(task)
    )


def _other(task: Task) -> dict[str, Any]:
    """Without what a gold answer may be taken from instead of the ground truth."""
    return {key: value for key, value in task.extra_info.items() if key not in ("solution", "answer")}


async def _earned(task: Task, answer: str | list[str]) -> float:
    """The reward of an answer, given each turn until the episode ends, or of one action a turn."""
    texts = [answer] * TURNS if isinstance(answer, str) else answer
    trace = await run_rollout(_ROWS, task, Replay([Completion(text=text) for text in texts]), limits=_LIMITS)
    if trace.reward is not None:
        return trace.reward
    if isinstance(answer, list) and trace.outcome is Outcome.POLICY_ERROR:  # it has no more actions
        return sum(turn.reward for turn in trace.turns)
    raise TreetuneError(trace.failure.message if trace.failure else trace.outcome.value)


_ROWS = ByEnvironment()
_LIMITS = Limits(max_turns=TURNS, timeout=120.0)

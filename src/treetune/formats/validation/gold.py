"""Each row's environment with its gold answer and with wrong ones: gold must earn more than any of them.

Wrong are the empty answer, the prompt itself, a shrug, the gold answer of a changed ground truth, and that of another
row. An environment that pays for one of these would teach a model just that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from treetune.environment import Environment, make
from treetune.errors import TreetuneError, described
from treetune.formats.batch import Batch
from treetune.formats.format import detect, named
from treetune.formats.validation.report import Report
from treetune.offload import call
from treetune.plugins import environments
from treetune.policies.scripted import WRONG, Replay
from treetune.policy import Completion
from treetune.rollout import Limits, run_rollout
from treetune.task import Task

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
    earlier: dict[str, Task] = {}
    """The last task of each environment: its gold answer is wrong for the next, unless they agree."""

    async def one(place: Place, task: Task, other: Task | None) -> None:
        try:
            rule, found = await _tried(task, other)
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
            group.create_task(one(place, task, earlier.get(task.env_class or "")))
            earlier[task.env_class or ""] = task


async def _tasks(batches: Iterable[Batch], format: str | None) -> AsyncIterator[tuple[Place, Task]]:
    for batch in batches:
        for number, row in zip(batch.numbers, batch.rows, strict=True):
            try:
                task = (named(format) if format is not None else detect(row)).task_of_pruned(row)
            except TreetuneError:
                continue
            if task.env_class in environments.names():
                yield Place(batch.source, batch.unit, number), task
        await asyncio.sleep(0)


async def _tried(task: Task, other: Task | None) -> tuple[str | None, str]:
    """The rule that is broken, if any, and what was found."""
    try:
        cls: type[Environment] = environments.resolve(task.env_class or "")
        gold = await call(cls.gold, task)
        if gold is None:
            return "gold-unknown", f"{task.env_class} knows no gold answer"
        earned = await _earned(task, gold)
        for what, answer in _wrong(cls, task, other, gold):
            wrong = await _earned(task, answer)
            if wrong >= earned:
                return "gold-not-rewarded", f"the gold answer earns {earned:g}, {what} {wrong:g}"
    except Exception as error:
        message = error.message if isinstance(error, TreetuneError) else described(error)
        return "environment-fails", f"{task.env_class}: {message}"
    return None, ""


def _wrong(
    cls: type[Environment], task: Task, other: Task | None, gold: str | list[str]
) -> Iterator[tuple[str, str | list[str]]]:
    prompt = "\n".join(str(message.get("content", "")) for message in task.messages)
    wrong: list[tuple[str, Any]] = [
        ("an empty answer", ""),
        ("the prompt itself", prompt),
        (f"{WRONG!r}", WRONG),
        ("the answer to a changed ground truth", cls.gold(_with(task, changed(task.ground_truth)))),
    ]
    if other is not None and other.ground_truth != task.ground_truth:
        wrong.append(("the gold answer of another row", cls.gold(_with(task, other.ground_truth))))
    else:
        wrong.append(("the gold answer twice changed", cls.gold(_with(task, changed(changed(task.ground_truth))))))
    return ((what, answer) for what, answer in wrong if answer is not None and answer != gold)


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
    trace = await run_rollout(_ByEnvironment(), task, Replay([Completion(text=text) for text in texts]), limits=_LIMITS)  # type: ignore[arg-type]
    if trace.failure is not None and not (isinstance(answer, list) and trace.outcome.value == "policy_error"):
        raise TreetuneError(trace.failure.message)
    return trace.reward


_LIMITS = Limits(max_turns=TURNS, timeout=120.0)


class _ByEnvironment:
    """The taskset that rows are: each is scored by the environment that it names."""

    name = "rows"

    def environment(self, task: Task) -> Environment:
        return make(task.env_class or "", task)

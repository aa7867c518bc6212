"""Scores one answer to a row's task, for trainers that sample an answer and ask a function for its reward.

    play_row(scored, task, "42").shaped_reward

A row that cannot be scored raises an error and never scores zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from treetune.chat.message import Message, begins_answer
from treetune.core.task import Task
from treetune.data.rows.scorer import SEVERAL_TURNS, ScoredBy, taskset_of, with_type
from treetune.errors import TasksetError, UsageError, reason_of
from treetune.play.episode import Episode, play_answer
from treetune.system.threads import run_in_background


def read_scored_by(extra_info: Any, data_source: Any) -> ScoredBy:
    """Return what scores a row's task, according to the row."""
    scored = ScoredBy.read((extra_info or {}).get("scorer"))
    if scored is None:
        raise TasksetError(
            f"a row of data_source {str(data_source)!r} does not say how it is scored",
            remedy="build it with Treetune, with ground_truth, env_class or a custom_cls that has reward()",
        )
    return scored


def refuse_begun_answer(messages: list[Message], where: str) -> None:
    if begins_answer(messages):
        raise UsageError(
            f"{where}: the prompt ends with the beginning of an answer, but the trainer does not continue it",
            remedy="leave out the assistant's last message, or train with TrlTasks and rollout_func=tasks.rollout",
        )


def play_row(scored: ScoredBy, task: Task, answer: str) -> Episode:
    return play_rows([(scored, task, answer)])[0]


def play_rows(rows: Sequence[tuple[ScoredBy, Task, str]]) -> list[Episode]:
    """Score the answers to several rows. All are played at once, because a judge or a test may be slow."""
    names = [f"row {task.extra_info.get('index', '?')} of {task.data_source}" for _, task, _ in rows]
    for name, (_, task, _) in zip(names, rows, strict=True):
        refuse_begun_answer(task.messages, name)
    played: list[Episode | BaseException] = run_in_background(_play_all(rows))
    return [_check(one, name) for one, name in zip(played, names, strict=True)]


def _check(episode: Episode | BaseException, row: str) -> Episode:
    if isinstance(episode, UsageError) or not isinstance(episode, Episode | Exception):
        raise episode
    if isinstance(episode, Exception):
        why = reason_of(episode)
        raise TasksetError(f"{row} could not be scored: {why}") from episode
    if episode.tools:
        raise UsageError(f"{row}: a model may call tools, but the trainer plays one answer", remedy=SEVERAL_TURNS)
    if not episode.finished:
        raise TasksetError(
            f"{row} continues after the first answer, and the trainer plays only that", remedy=SEVERAL_TURNS
        )
    return episode


async def _play_all(rows: Sequence[tuple[ScoredBy, Task, str]]) -> list[Episode | BaseException]:
    return await asyncio.gather(*(_play(*row) for row in rows), return_exceptions=True)


async def _play(scored: ScoredBy, task: Task, answer: str) -> Episode:
    taskset = taskset_of(scored)
    return await play_answer(taskset, with_type(task, taskset), answer)

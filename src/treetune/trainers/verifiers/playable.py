"""Which tasksets verifiers can play: it runs each rollout by itself, in an order of the client's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from treetune.chat.message import begins_answer
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import UsageError


def check_playable(taskset: Taskset[Any, Any], tasks: Iterable[Task] = ()) -> None:
    """Refuses what cannot be played there."""
    if taskset.learning() is not None:
        raise UsageError(
            f"rewards move the order of {taskset.name}, and verifiers draws tasks in an order of its own",
            remedy="leave out profile.online; prime-rl has difficulty pools of its own",
        )
    if taskset.scores_groups:
        raise _refuse_group(taskset)
    for task in tasks:
        check_task(taskset, task)


def check_task(taskset: Taskset[Any, Any], task: Task) -> None:
    if taskset.scores_group_of(task):
        raise _refuse_group(taskset)
    if begins_answer(task.messages):
        raise UsageError(
            f"task {task.idx} of {taskset.name} begins the answer, and a model behind verifiers cannot go on with it",
            remedy="leave out the assistant's message at the end of the prompt",
        )


def _refuse_group(taskset: Taskset[Any, Any]) -> UsageError:
    return UsageError(
        f"{taskset.name} scores the rollouts of a task together, and verifiers scores each by itself",
        remedy="serve it (`treetune serve`), where `run_group` scores them; or give it a reward of its own",
    )

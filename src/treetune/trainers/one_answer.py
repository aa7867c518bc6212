"""What one answer to a row's task earns: for trainers that sample an answer and ask a function for its reward.

    trace = play_row(scorer, task, "42")
    trace.reward

A row that cannot be scored is an error, never a zero.
"""

from __future__ import annotations

from typing import Any

from treetune.errors import TasksetError
from treetune.formats.scorer import SEVERAL_TURNS
from treetune.task import Task
from treetune.trace import Outcome, Trace


def scorer_in(extra_info: Any, data_source: Any) -> str:
    """What a row says of its scorer."""
    scorer = (extra_info or {}).get("scorer")
    if not isinstance(scorer, str):
        raise TasksetError(
            f"a row of data_source {str(data_source)!r} does not say how it is scored",
            remedy="build it with Treetune, with ground_truth, env_class or a custom_cls that has reward()",
        )
    return scorer


def play_row(scorer: str, task: Task, answer: str, *, trust: bool = False) -> Trace:
    from treetune.background import run

    trace: Trace = run(_play(scorer, task, answer, trust))
    row = f"row {task.extra_info.get('index', '?')} of {task.data_source}"
    if trace.outcome is Outcome.TRUNCATED:
        raise TasksetError(
            f"{row} goes on after the first answer, and the trainer plays only that", remedy=SEVERAL_TURNS
        )
    if not trace.outcome.scored:
        raise TasksetError(
            f"{row} could not be scored: {trace.failure.message if trace.failure else trace.outcome.value}"
        )
    return trace


async def _play(scorer: str, task: Task, answer: str, trust: bool) -> Trace:
    from treetune.formats.scorer import taskset_of, with_type
    from treetune.policies.scripted import Replay
    from treetune.policy import Completion
    from treetune.rollout import Limits, run_rollout

    taskset = taskset_of(scorer, trust=trust)
    policy = Replay([Completion(text=answer)])
    return await run_rollout(taskset, with_type(task, taskset), policy, limits=Limits(max_turns=1))

"""verl: tasks into its config, and rewards for its rows.

    run_with_tasks(config)      # train_tasks and val_tasks become parquet, then verl runs

In a verl config, `reward.custom_reward_function: {path: pkg://treetune.trainers.verl, name: compute_score}` scores each
row by its own task: the taskset's `reward`, the row's environment, or the rule. verl itself is never changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from treetune.datasets.resolve import resolve_tasks_into_config
from treetune.errors import MissingExtraError, TasksetError
from treetune.formats.note import RULE
from treetune.formats.scorer import SEVERAL_TURNS
from treetune.formats.verl import task_to_score as _task
from treetune.trace import Outcome


def run_with_tasks(config: Any) -> Any:
    """Resolve the tasks of a verl config and start verl's own training with it."""
    resolve_tasks_into_config(config)
    try:
        from verl.trainer import main_ppo
    except ImportError as error:
        raise MissingExtraError(f"verl cannot be imported: {error}", remedy="install verl") from error
    runner = inspect.signature(main_ppo.run_ppo).parameters.get("task_runner_class")
    if runner is not None and runner.default is inspect.Parameter.empty:
        # From 0.9 on only main() knows which runner belongs to the config; given a config, hydra hands it on.
        return main_ppo.main(config)
    return main_ppo.run_ppo(config)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
    **rest: Any,
) -> dict[str, Any]:
    """The reward of one row. The same keys for every row: verl takes those of the first for all.

    `trust` runs a file that a row names though no build of this user's kept it; verl passes it on from
    `reward.custom_reward_function.reward_kwargs`.
    """
    scorer = (extra_info or {}).get("scorer")
    if scorer is None:
        raise TasksetError(
            f"a row of data_source {str(data_source)!r} does not say how it is scored",
            remedy="build it with Treetune, with ground_truth, env_class or a custom_cls that has reward()",
        )
    task = _task(str(data_source), ground_truth, extra_info or {})
    if scorer == RULE and task.ground_truth is None:
        raise TasksetError(f"a row of data_source {str(data_source)!r} has no ground truth to compare with")
    if scorer == RULE:
        from treetune.datasets.rule import score

        result = score(solution_str, task.ground_truth)
        return {"score": result.reward, "acc": float(result.reward >= 1), "answer": result.answer or ""}
    from treetune.background import run

    trace = run(_answered(scorer, task, solution_str, trust))
    if trace.outcome is Outcome.TRUNCATED:
        raise TasksetError(
            f"row {task.extra_info.get('index')} of {data_source!s} goes on after the first answer, and verl plays one",
            remedy=SEVERAL_TURNS,
        )
    if not trace.outcome.scored:
        raise TasksetError(
            f"row {task.extra_info.get('index')} of {data_source!s} could not be scored: "
            f"{trace.failure.message if trace.failure else trace.outcome.value}"
        )
    return {"score": trace.reward, "acc": float(trace.passed()), "answer": trace.answer or ""}


async def _answered(scorer: str, task: Any, answer: str, trust: bool) -> Any:
    from treetune.formats.scorer import taskset_of, with_type
    from treetune.policies.scripted import Replay
    from treetune.policy import Completion
    from treetune.rollout import Limits, run_rollout

    taskset = taskset_of(scorer, trust=trust)
    policy = Replay([Completion(text=answer)])
    return await run_rollout(taskset, with_type(task, taskset), policy, limits=Limits(max_turns=1))

"""verl: tasks into its config, and rewards for its rows.

    run_with_tasks(config)      # train_tasks and val_tasks become parquet, then verl runs

In a verl config, `reward.custom_reward_function: {path: pkg://treetune.trainers.verl, name: compute_score}` scores each
row by its own task: the taskset's `reward`, the row's environment, or the rule. verl itself is never changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from treetune.datasets.verl_config import build_into_config, find_unscored, load_lists, score_by_tasks
from treetune.errors import MissingExtraError, TasksetError, UsageError
from treetune.rows.layouts import task_to_score as _task
from treetune.rows.rule import RULE
from treetune.trainers.one_answer import play_row, scorer_in


def run_with_tasks(config: Any) -> Any:
    """Resolve the tasks of a verl config, have their rows scored, and start verl's own training with it.

    Where the config names no way of scoring and verl knows none for a data source, each row is scored by its own task.
    Rows that nothing can score are refused; `leave_scoring: true` in the config leaves all this alone.
    """
    lists = load_lists(config)
    tasksets = [taskset for entries in lists.values() for taskset in entries]
    if any(find_unscored(config, tasksets)):
        score_by_tasks(config)
    for problem in find_unscored(config, tasksets):
        raise problem
    config = build_into_config(config, lists)
    for taskset in tasksets:
        _refuse_begun_answers(taskset.get_parquet_path())
    return start(config)


def _refuse_begun_answers(path: str) -> None:
    """verl answers every prompt: it does not go on with one that ends with the beginning of an answer."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    first = 0
    for batch in pq.ParquetFile(path).iter_batches(columns=["prompt"]):
        prompts = batch.column(0)
        last = prompts.values.field("role").take(pc.subtract(prompts.offsets[1:], 1))  # no prompt is empty
        if (at := pc.index(last, "assistant").as_py()) >= 0:
            raise UsageError(
                f"{path}, row {first + at}: the prompt ends with the beginning of an answer, a message of the "
                "assistant's, and verl would answer it",
                remedy="leave that message out, or filter such rows",
            )
        first += len(batch)


def start(config: Any) -> Any:
    """Start the training of the verl that is installed: what `run_ppo(config)` was before verl 0.9."""
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
    scorer = scorer_in(extra_info, data_source)
    task = _task(str(data_source), ground_truth, extra_info or {})
    if scorer == RULE:  # the commonest, and the quickest
        from treetune.rows.rule import score

        if task.ground_truth is None:
            raise TasksetError(f"a row of data_source {str(data_source)!r} has no ground truth to compare with")
        result = score(solution_str, task.ground_truth)
        return {"score": result.reward, "acc": float(result.reward >= 1), "answer": result.answer or ""}
    played = play_row(scorer, task, solution_str, trust=trust)
    return {"score": played.reward, "acc": float(played.passed()), "answer": played.answer or ""}

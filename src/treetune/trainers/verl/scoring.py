"""The reward of an answer to one of our rows, as verl's reward functions give it.

reward.custom_reward_function: {path: pkg://treetune.trainers.verl, name: compute_score}
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

from treetune.chat.message import without_surrogates
from treetune.core.score import Score
from treetune.data.rows.formats import task_to_score
from treetune.data.rows.rule import RULE
from treetune.data.rows.scorer import taskset_of
from treetune.scorers import SCORER
from treetune.system.threads import run_in_background
from treetune.trainers.single_turn import play_row, scorer_in


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """The reward of one row. The same keys for every row: verl takes those of the first for all."""
    scorer = scorer_in(extra_info, data_source)
    task = task_to_score(str(data_source), ground_truth, extra_info or {})
    if scorer == RULE or (scorer.startswith(SCORER) and not taskset_of(scorer).scorer.calls_models):  # the quickest
        result = taskset_of(scorer).reward(task, without_surrogates(solution_str))
        if inspect.isawaitable(result):
            result = run_in_background(_wait(result))
        return {"score": result.reward, "acc": float(result.reward >= 1), "answer": result.answer or ""}
    played = play_row(scorer, task, solution_str)
    return {"score": played.reward, "acc": float(played.passed()), "answer": played.answer or ""}


async def _wait(result: Awaitable[Score]) -> Score:
    return await result

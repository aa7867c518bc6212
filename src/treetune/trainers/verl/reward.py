"""Decides what scores rows in a verl config (a function, verl itself by data source, a user's component, or each row's
own task), and provides the reward function for the last case.

    score_by_tasks(config)                # from now on each row is scored by its own task

    reward.custom_reward_function: {path: pkg://treetune.trainers.verl, name: compute_score}
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from treetune.chat.message import without_surrogates
from treetune.core.score import Score
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows.formats import task_to_score
from treetune.data.rows.scorer import taskset_of
from treetune.errors import TasksetError
from treetune.system.threads import run_in_background
from treetune.trainers.config import get_value, set_value
from treetune.trainers.single_turn import play_row, read_scored_by

OURS = "pkg://treetune.trainers.verl"
"""Our reward function's name in a verl config."""

VERL_SOURCES = frozenset(
    "openai/gsm8k lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math_dapo math "
    "math_dapo_reasoning numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12 "
    "numina_olympiads codecontests apps codeforces taco hiyouga/geometry3k searchR1_nq searchR1_triviaqa "
    "searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique searchR1_bamboogle".split()
)
"""The data sources that verl 0.9 scores itself, in addition to every name that begins with `aime`."""

_LEAVE = (
    "to score in another way, name it in the config (reward.custom_reward_function.path, "
    "reward.reward_model.enable=true, or reward.reward_manager.source=importlib) or set leave_scoring: true"
)

Lists = Mapping[str, Sequence[DatasetTaskset]]


def warn_of_unscored(config: Any, lists: Lists) -> None:
    """Warn of rows that nothing can score: the trainer would notice only after loading the model."""
    for problem in find_unscored(config, chain.from_iterable(lists.values())):
        warnings.warn(f"{problem.message}: {problem.remedy}", stacklevel=3)


def leaves_scoring(config: Any) -> bool:
    """Whether scoring is left to another function, to the user's reward model or reward manager, or to
    `leave_scoring`."""
    if get_value(config, "leave_scoring") or get_value(config, "reward.reward_model.enable"):
        return True
    own_manager = get_value(config, "reward.reward_manager.source") == "importlib"
    return own_manager or reward_function(config) not in (OURS, "", None)


def reward_function(config: Any) -> str | None:
    """Return the reward function that a verl config names; "" if it names none, so that verl uses the data source; None
    if it is not a trainer's config."""
    # verl keeps an empty node in one place while the user writes to the other.
    places = (get_value(config, key) for key in ("reward.custom_reward_function", "custom_reward_function"))
    nodes = [node for node in places if isinstance(node, Mapping)]
    return next((str(node["path"]) for node in nodes if node.get("path")), "" if nodes else None)


def score_by_tasks(config: Any) -> Any:
    """Set our reward function in a verl config that names no other way of scoring; change nothing else."""
    if reward_function(config) == "" and not leaves_scoring(config):
        place = "reward." if isinstance(get_value(config, "reward"), Mapping) else ""
        for key, value in (("path", OURS), ("name", "compute_score")):
            set_value(config, f"{place}custom_reward_function.{key}", value)
    return config


def find_unscored(config: Any, tasksets: Iterable[DatasetTaskset]) -> Iterator[TasksetError]:
    """Return an error, with its remedy, for each data source whose rows nothing would score."""
    if leaves_scoring(config):
        return
    by_verl = reward_function(config) == ""
    for taskset in tasksets:
        data_source = taskset.config.data_source
        if taskset.row_scorer is None:
            yield TasksetError(
                f"data_source {data_source!r} cannot be scored here: it has no ground truth",
                remedy=f"set ground_truth or env_class, or write reward(task, answer) in a custom_cls; {_LEAVE}",
            )
        elif by_verl and data_source not in VERL_SOURCES and not data_source.startswith("aime"):
            yield TasksetError(
                f"verl itself cannot score data_source {data_source!r}",
                remedy=f"call score_by_tasks(config), or set reward.custom_reward_function to {{path: {OURS}, name: "
                f"compute_score}}; {_LEAVE}",
            )


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """Return the reward of one row. The keys are the same for every row: verl uses the keys of the first row for all
    rows."""
    scored = read_scored_by(extra_info, data_source)
    task = task_to_score(str(data_source), ground_truth, extra_info or {})
    # A scorer that calls no model needs no episode, which is faster.
    if scored.kind == "rule" or (scored.kind == "scorer" and not taskset_of(scored).scorer.calls_models):
        result = taskset_of(scored).reward(task, without_surrogates(solution_str))
        if inspect.isawaitable(result):
            result = run_in_background(_wait(result))
        return {"score": result.reward, "acc": float(result.reward >= 1), "answer": result.answer or ""}
    played = play_row(scored, task, solution_str)
    result = played.result
    return {"score": played.shaped_reward, "acc": float(result.passed()), "answer": result.answer or ""}


async def _wait(result: Awaitable[Score]) -> Score:
    return await result

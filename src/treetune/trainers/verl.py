"""verl: tasks into its config, and rewards for its rows. verl itself is never changed.

run_with_tasks(config)                # train_tasks and val_tasks become parquet, then verl runs
resolve_tasks_into_config(config)     # config.data.train_files and .val_files now name our files
score_by_tasks(config)                # from now on each row is scored by its own task
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from treetune.datasets.declared import check_columns, check_environments, load_tasks
from treetune.datasets.join import join_files
from treetune.datasets.taskset import DatasetTaskset
from treetune.errors import ConfigError, Faults, MissingExtraError, TasksetError, UsageError
from treetune.rows.formats import task_to_score as _task
from treetune.rows.rule import RULE
from treetune.rows.scorer import taskset_of
from treetune.score import Score
from treetune.scorers import SCORER
from treetune.task import without_surrogates
from treetune.threads import run_in_background
from treetune.trainers.config import get_value, load_lists, set_value
from treetune.trainers.one_answer import play_row, scorer_in

OURS = "pkg://treetune.trainers.verl"
"""How a verl config names our reward function."""

VERL_SOURCES = frozenset(
    "openai/gsm8k lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math_dapo math "
    "math_dapo_reasoning numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12 "
    "numina_olympiads codecontests apps codeforces taco hiyouga/geometry3k searchR1_nq searchR1_triviaqa "
    "searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique searchR1_bamboogle".split()
)
"""The data sources that verl 0.9 scores by itself; besides these, every name that begins with `aime`."""

_LEAVE = (
    "to leave scoring to something else, name it in the config (reward.custom_reward_function.path, "
    "reward.reward_model.enable=true, or reward.reward_manager.source=importlib) or set leave_scoring: true"
)

Lists = Mapping[str, Sequence[DatasetTaskset]]


def run_with_tasks(config: Any) -> Any:
    """Resolve the tasks of a verl config, have their rows scored, and start verl's own training with it.

    Where the config names no way of scoring and verl knows none for a data source, each row is scored by its own task.
    Rows that nothing can score are refused; `leave_scoring: true` in the config leaves all this alone.
    """
    lists = load_tasksets(config)
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


def get_dataset_paths(task_configs: Iterable[Any], cache_dir: str | Path | None = None) -> list[str]:
    """The parquet path of each task, built where it is not cached; refused where the files could not be joined."""
    tasksets = load_tasks(task_configs, cache_dir)
    check_environments({"tasks": tasksets})
    check_columns({"tasks": tasksets})
    return _build_paths(tasksets)


def resolve_tasks_into_config(config: Any, cache_dir: str | Path | None = None) -> Any:
    """Put the paths of `train_tasks` and `val_tasks` into `config.data`; nothing else is touched. A warning says which
    rows nothing would score."""
    lists = load_tasksets(config, cache_dir)
    warn_of_unscored(config, lists)
    return build_into_config(config, lists)


def load_tasksets(config: Any, cache_dir: str | Path | None = None) -> dict[str, list[DatasetTaskset]]:
    """The tasksets of a verl config, by the names of its lists; all their faults at once."""
    faults: Faults = []
    data = get_value(config, "data")
    if data is not None and not isinstance(data, Mapping):
        faults.append(("data", f"expected keys and values, got {data!r}"))
    lists = load_lists(config, cache_dir, faults)
    if faults:
        raise ConfigError(faults)
    check_environments(lists, one_turn=not leaves_scoring(config))
    check_columns(lists)
    return lists


def build_into_config(config: Any, lists: Lists) -> Any:
    """Build the lists, and name their files in `config.data`."""
    for name, tasksets in lists.items():
        set_value(config, f"data.{name}_files", _build_paths(tasksets))
    return config


def _build_paths(tasksets: Sequence[DatasetTaskset]) -> list[str]:
    return [str(path) for _, path, _ in join_files(tasksets, [taskset.build() for taskset in tasksets])]


def warn_of_unscored(config: Any, lists: Lists) -> None:
    """A row that nothing can score is found out by the trainer only after the model is loaded."""
    for problem in find_unscored(config, chain.from_iterable(lists.values())):
        warnings.warn(f"{problem.message}: {problem.remedy}", stacklevel=3)


def leaves_scoring(config: Any) -> bool:
    """To another function, a reward model, a reward manager of the user's own, or because it says so."""
    if get_value(config, "leave_scoring") or get_value(config, "reward.reward_model.enable"):
        return True
    own_manager = get_value(config, "reward.reward_manager.source") == "importlib"
    return own_manager or reward_function(config) not in (OURS, "", None)


def reward_function(config: Any) -> str | None:
    """The one that a verl config names; "" where it names none, so that verl looks at the data source; None where it is
    no config of a trainer."""
    # verl keeps an empty node in one place where the user writes into the other.
    places = (get_value(config, key) for key in ("reward.custom_reward_function", "custom_reward_function"))
    nodes = [node for node in places if isinstance(node, Mapping)]
    return next((str(node["path"]) for node in nodes if node.get("path")), "" if nodes else None)


def score_by_tasks(config: Any) -> Any:
    """Name our reward function in a verl config that names no other way of scoring; nothing else is touched."""
    if reward_function(config) == "" and not leaves_scoring(config):
        place = "reward." if isinstance(get_value(config, "reward"), Mapping) else ""
        for key, value in (("path", OURS), ("name", "compute_score")):
            set_value(config, f"{place}custom_reward_function.{key}", value)
    return config


def find_unscored(config: Any, tasksets: Iterable[DatasetTaskset]) -> Iterator[TasksetError]:
    """The data sources whose rows nothing would score, each with its remedy."""
    if leaves_scoring(config):
        return
    by_verl = reward_function(config) == ""
    for taskset in tasksets:
        data_source = taskset.config.data_source
        if taskset.row_scorer is None:
            yield TasksetError(
                f"nothing here can score data_source {data_source!r}: it has no ground truth",
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
    """The reward of one row. The same keys for every row: verl takes those of the first for all."""
    scorer = scorer_in(extra_info, data_source)
    task = _task(str(data_source), ground_truth, extra_info or {})
    if scorer == RULE or (scorer.startswith(SCORER) and not taskset_of(scorer).scorer.calls_models):  # the quickest
        result = taskset_of(scorer).reward(task, without_surrogates(solution_str))
        if inspect.isawaitable(result):
            result = run_in_background(_wait(result))
        return {"score": result.reward, "acc": float(result.reward >= 1), "answer": result.answer or ""}
    played = play_row(scorer, task, solution_str)
    return {"score": played.reward, "acc": float(played.passed()), "answer": played.answer or ""}


async def _wait(result: Awaitable[Score]) -> Score:
    return await result

"""Tasks in a verl config: `train_tasks` and `val_tasks` become the parquet files that verl reads.

resolve_tasks_into_config(config)     # config.data.train_files and .val_files now name our files
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.chat.tokens import NO_IMAGES
from treetune.data.datasets.list_files import build_files
from treetune.data.datasets.task_lists import check_columns, check_environments, has_turns, load_tasks
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows.agent_column import LOOP
from treetune.errors import ConfigError, Faults, UsageError
from treetune.trainers.config import get_value, load_lists, set_value
from treetune.trainers.verl.reward import Lists, leaves_scoring, warn_of_unscored

Agents = Mapping[str, Sequence[str] | None]
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
"""Where a verl config names the YAML file of its agent loops."""
DEFAULT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
"""The agent loop of rows that name none."""


def get_dataset_paths(task_configs: Iterable[Any], cache_dir: str | Path | None = None) -> list[str]:
    """The parquet path of each task, built where it is not cached; refused where the files could not be joined."""
    lists = {"tasks": load_tasks(task_configs, cache_dir, of_any_class=True)}
    check_environments(lists)
    check_columns(lists)
    return _build_paths(lists["tasks"], name_agents(lists)["tasks"])


def resolve_tasks_into_config(config: Any, cache_dir: str | Path | None = None) -> Any:
    """Put the paths of `train_tasks` and `val_tasks` into `config.data`; nothing else is touched. A warning says which
    rows nothing would score or play."""
    lists = load_tasksets(config, cache_dir)
    warn_of_unscored(config, lists)
    agents = name_agents(lists, config)
    if any(agents.values()) and not get_value(config, LOOPS):
        warnings.warn(f"rows name the agent loop {LOOP}, and {LOOPS} no file: call play_by_tasks(config)", stacklevel=2)
    return build_into_config(config, lists, agents)


def load_tasksets(config: Any, cache_dir: str | Path | None = None) -> dict[str, list[DatasetTaskset]]:
    """The tasksets of a verl config, by the names of its lists; all their faults at once."""
    faults: Faults = []
    data = get_value(config, "data")
    if data is not None and not isinstance(data, Mapping):
        faults.append(("data", f"expected keys and values, got {data!r}"))
    lists = load_lists(config, cache_dir, faults, of_any_class=True)
    if faults:
        raise ConfigError(faults)
    check_environments(lists)
    check_columns(lists)
    return lists


def build_into_config(config: Any, lists: Lists, agents: Agents | None = None) -> Any:
    """Build the lists, and name their files in `config.data`."""
    agents = name_agents(lists, config) if agents is None else agents
    for name, tasksets in lists.items():
        set_value(config, f"data.{name}_files", _build_paths(tasksets, agents[name]))
    return config


def name_agents(lists: Lists, config: Any = None, *, silent_too: bool = False) -> dict[str, list[str] | None]:
    """The agent loop of each task, by list; None where verl asks for one answer. All rows of a training name one, or
    none does. Ours plays what says that one answer is not all and, where there is such a task, what else it can play;
    `silent_too`: also an environment that does not say."""
    turns = {taskset: has_turns(taskset) for tasksets in lists.values() for taskset in tasksets}
    wanted = (True, None) if silent_too else (True,)
    if leaves_scoring(config) or not any(each in wanted for each in turns.values()):
        return dict.fromkeys(lists)
    other = get_value(config, DEFAULT_LOOP) or "single_turn_agent"

    def choose(taskset: DatasetTaskset) -> str:
        if taskset.config.images and turns[taskset]:
            remedy = "train it with TRL or SkyRL"
            raise UsageError(f"{taskset.name} has several turns, and {NO_IMAGES}", remedy=remedy)
        return other if taskset.row_scorer is None or taskset.config.images else LOOP

    return {name: [choose(taskset) for taskset in tasksets] for name, tasksets in lists.items()}


def _build_paths(tasksets: Sequence[DatasetTaskset], agents: Sequence[str] | None) -> list[str]:
    return [str(file.path) for file in build_files(tasksets, agents=agents)]

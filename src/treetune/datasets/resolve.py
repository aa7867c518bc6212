"""From `train_tasks` and `val_tasks` in a config to parquet paths.

    resolve_tasks_into_config(config)     # config.data.train_files and .val_files now name our files

All faults of all tasks are found before the first is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from treetune.datasets.cache import Sidecar
from treetune.datasets.schema import clashes
from treetune.datasets.taskset import DatasetTaskset, _plain, read_config
from treetune.errors import ConfigError, PluginError, TasksetError
from treetune.plugins import load_object

OURS = "pkg://treetune.trainers.verl"
"""How a verl config names our reward function."""

_SCORABLE = "set ground_truth or env_class, or write reward(task, answer) in a custom_cls"

VERL_SOURCES = frozenset(
    "openai/gsm8k lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math_dapo math "
    "math_dapo_reasoning numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12 "
    "numina_olympiads codecontests apps codeforces taco hiyouga/geometry3k searchR1_nq searchR1_triviaqa "
    "searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique searchR1_bamboogle".split()
)
"""The data sources that verl 0.9 scores by itself; besides these, every name that begins with `aime`."""


LISTS = {"train_tasks": "train_files", "val_tasks": "val_files"}


def load_tasks(
    nodes: Iterable[Any],
    cache_dir: str | Path | None = None,
    *,
    path: str = "tasks",
    faults: list[tuple[str, str]] | None = None,
) -> list[DatasetTaskset]:
    """The tasksets of a list of configs; one error names every fault of all of them."""
    found = faults if faults is not None else []
    tasksets = []
    for number, node in enumerate(nodes):
        here = f"{path}[{number}]"
        try:
            tasksets.append(load_task(_plain(node), cache_dir))
        except ConfigError as error:
            found += [(f"{here}.{key}" if key else here, problem) for key, problem in error.faults]
        except PluginError as error:
            found.append((f"{here}.custom_cls", error.message))
    if found and faults is None:
        raise ConfigError(found)
    return tasksets


def load_task(node: Mapping[str, Any], cache_dir: str | Path | None = None) -> DatasetTaskset:
    """One entry: the base class, or the one that `custom_cls` names."""
    cls: type = DatasetTaskset
    if ":" in str(node.get("id", "")):
        cls = load_object(str(node["id"]))
    if node.get("custom_cls") and node["custom_cls"].get("path"):
        from treetune.target import custom_class

        cls = custom_class(node["custom_cls"], "custom_cls")
        if not issubclass(cls, DatasetTaskset):
            raise ConfigError([("custom_cls", f"{cls.__name__} is no dataset task: subclass treetune_verl.tasks.Task")])
    read_config(cls, node)  # all its faults, before the class itself runs
    taskset: DatasetTaskset = cls(node, cache_dir=cache_dir)
    return taskset


def get_dataset_paths(task_configs: Iterable[Any], cache_dir: str | Path | None = None) -> list[str]:
    """The parquet path of each task, built where it is not cached; refused where the files could not be joined."""
    tasksets = load_tasks(task_configs, cache_dir)
    built = [taskset.built() for taskset in tasksets]
    refuse_clashes([taskset.name for taskset in tasksets], [sidecar for sidecar, _, _ in built])
    return [str(path) for _, path, _ in built]


def resolve_tasks_into_config(config: Any, cache_dir: str | Path | None = None) -> Any:
    """Put the paths of `train_tasks` and `val_tasks` into `config.data`; nothing else is touched."""
    faults: list[tuple[str, str]] = []
    tasksets = {
        name: load_tasks(config[name], cache_dir, path=name, faults=faults) for name in LISTS if config.get(name)
    }
    if faults:
        raise ConfigError(faults)
    refuse_unscorable(config, [taskset for entries in tasksets.values() for taskset in entries])
    for name, entries in tasksets.items():
        built = [taskset.built() for taskset in entries]
        refuse_clashes([taskset.name for taskset in entries], [sidecar for sidecar, _, _ in built])
        _set(config, LISTS[name], [str(path) for _, path, _ in built])
    return config


def refuse_clashes(names: Sequence[str], sidecars: Sequence[Sidecar]) -> None:
    """Files of one list are joined by the trainer: what cannot be joined is told now, not when the model is loaded."""
    for (one, first), (other, second) in combinations(enumerate(sidecars), 2):
        if found := clashes(first.schema, second.schema):
            raise TasksetError(
                f"tasks {one} ({names[one]}) and {other} ({names[other]}) cannot be used in one list: "
                f"{'; '.join(found)}",
                remedy="give the key the same type in both: another extra_fields, or a custom_cls that converts it",
            )


def refuse_unscorable(config: Any, tasksets: Sequence[DatasetTaskset]) -> None:
    """A row that nothing can score is found out by the trainer only after the model is loaded."""
    function = _reward_function(config)
    for taskset in tasksets:
        source = taskset.config.data_source
        if taskset.scorer is None and (function == "" or function == OURS):
            raise TasksetError(f"nothing can score data_source {source!r}: it has no ground truth", remedy=_SCORABLE)
        if taskset.scorer is None and function is None:
            warnings.warn(f"nothing here can score data_source {source!r}: {_SCORABLE}", stacklevel=2)
        if function == "" and not knows_data_source(source):
            raise TasksetError(
                f"verl itself cannot score data_source {source!r}",
                remedy=f"set reward.custom_reward_function to {{path: {OURS}, name: compute_score}}",
            )


def knows_data_source(data_source: str) -> bool:
    """Whether verl 0.9 scores rows of this source by itself."""
    return data_source in VERL_SOURCES or data_source.startswith("aime")


def _reward_function(config: Any) -> str | None:
    """The path of the reward function a trainer's config names, "" where it leaves scoring to verl, None where it is
    no trainer's config."""
    for place in (config.get("reward"), config):
        if place is not None and place.get("custom_reward_function") is not None:
            return str(place["custom_reward_function"].get("path") or "")
    return None


def _set(config: Any, key: str, paths: list[str]) -> None:
    if isinstance(config, dict):
        config.setdefault("data", {})[key] = paths
        return
    from omegaconf import open_dict

    with open_dict(config):
        if config.get("data") is None:
            config["data"] = {}
        with open_dict(config["data"]):
            config["data"][key] = paths

"""From `train_tasks` and `val_tasks` in a config to parquet paths.

    resolve_tasks_into_config(config)     # config.data.train_files and .val_files now name our files

All faults of all tasks are found before the first is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.datasets.column_faults import refuse_column_faults
from treetune.datasets.config import filter_file
from treetune.datasets.joining import joined
from treetune.datasets.scoring import Scoring, problems, scoring_of
from treetune.datasets.taskset import DatasetTaskset, unknown_environment
from treetune.errors import ConfigError, TreetuneError
from treetune.plugins import absolute_spec, environments, folders_of, load_object
from treetune.rows.content import check_loading
from treetune.target import collect_taskset, custom_class, missing_values, names_class

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
    before = len(found)
    tasksets = []
    for number, node in enumerate(_entries(nodes, path, found)):
        here = f"{path}[{number}]"
        missing = missing_values(node, here)
        found += missing
        if missing:
            continue
        try:
            taskset = load_task(node, cache_dir)
        except ConfigError as error:
            found += [(f"{here}.{key}" if key else here, problem) for key, problem in error.faults]
        except TreetuneError as error:
            found.append((here, str(error)))
        else:
            found += [(f"{here}.{key}", problem) for key, problem in _further_faults(taskset, node)]
            tasksets.append(taskset)
    if len(found) > before and faults is None:
        raise ConfigError(found)
    return tasksets


def load_task(node: Any, cache_dir: str | Path | None = None) -> DatasetTaskset:
    """One entry: the base class, or the one that `custom_cls` names."""
    node = _plain(node)
    if not isinstance(node, Mapping):
        raise ConfigError([("", f"expected keys and values, got {node!r}")])
    cls = task_class(node)
    faults: list[tuple[str, str]] = []
    taskset = collect_taskset(node, "", {}, faults, cls=cls, cache_dir=cache_dir)
    if taskset is None:
        raise ConfigError(faults)
    assert isinstance(taskset, DatasetTaskset)
    return taskset


def task_class(node: Mapping[str, Any]) -> type[DatasetTaskset]:
    """The class that an entry names; what is wrong with it is a fault of its key."""
    cls: Any = DatasetTaskset
    key = "custom_cls" if names_class(node) else "id"
    try:
        if key == "custom_cls":
            cls = custom_class(node["custom_cls"], key)
        elif ":" in str(node.get("id", "")):
            cls = load_object(str(node["id"]))
    except ConfigError:
        raise
    except TreetuneError as error:
        raise ConfigError([(key, str(error))]) from error
    if not isinstance(cls, type) or not issubclass(cls, DatasetTaskset):
        name = getattr(cls, "__name__", repr(cls))
        raise ConfigError([(key, f"{name} is no dataset task: subclass treetune_verl.tasks.Task")])
    return cls


def get_dataset_paths(task_configs: Iterable[Any], cache_dir: str | Path | None = None) -> list[str]:
    """The parquet path of each task, built where it is not cached; refused where the files could not be joined."""
    tasksets = load_tasks(task_configs, cache_dir)
    refuse_unknown_environments({"tasks": tasksets})
    refuse_column_faults({"tasks": tasksets})
    return _built_paths(tasksets)


def _built_paths(tasksets: Sequence[DatasetTaskset]) -> list[str]:
    return [str(path) for _, path, _ in joined(tasksets, [taskset.built() for taskset in tasksets])]


def resolve_tasks_into_config(config: Any, cache_dir: str | Path | None = None) -> Any:
    """Put the paths of `train_tasks` and `val_tasks` into `config.data`; nothing else is touched. A warning says which
    rows nothing would score."""
    lists = declared_tasks(config, cache_dir)
    warn_of_unscored(config, lists)
    return build_into_config(config, lists)


def declared_tasks(config: Any, cache_dir: str | Path | None = None) -> dict[str, list[DatasetTaskset]]:
    """The tasksets of a verl config, by the names of its lists; all their faults at once."""
    faults: list[tuple[str, str]] = []
    if config.get("data") is not None and not isinstance(config["data"], Mapping):
        faults.append(("data", f"expected keys and values, got {config['data']!r}"))
    faults += [fault for name in LISTS if _is_missing(config, name) for fault in missing_values("???", name)]
    lists = {name: load_tasks(config[name], cache_dir, path=name, faults=faults) for name in LISTS if config.get(name)}
    if faults:
        raise ConfigError(faults)
    refuse_unknown_environments(lists)
    if scoring_of(config) is not Scoring.OTHER:
        refuse_several_turns(lists)
    refuse_column_faults(lists)
    return lists


def build_into_config(config: Any, lists: Mapping[str, Sequence[DatasetTaskset]]) -> Any:
    for name, tasksets in lists.items():
        _set(config, LISTS[name], _built_paths(tasksets))
    return config


def warn_of_unscored(config: Any, lists: Mapping[str, Sequence[DatasetTaskset]]) -> None:
    """A row that nothing can score is found out by the trainer only after the model is loaded."""
    for problem in problems(config, [taskset for tasksets in lists.values() for taskset in tasksets]):
        warnings.warn(f"{problem.message}: {problem.remedy}", stacklevel=3)


def refuse_several_turns(lists: Mapping[str, Sequence[DatasetTaskset]], source: str = "config") -> None:
    """verl's reward functions are given one answer."""
    from treetune.rows.scorer import SEVERAL_TURNS, has_several_turns

    faults = []
    for name, tasksets in lists.items():
        for number, taskset in enumerate(tasksets):
            config = taskset.config
            # Rows may each say that they have one turn.
            if config.env_class is None or "max_turns" in config.extra_fields or taskset.overrides_rows:
                continue
            try:
                cls = environments.resolve(absolute_spec(config.env_class, folders_of(type(taskset))))
            except TreetuneError:
                continue  # told as one that is not known
            if has_several_turns(cls):
                faults.append(
                    (_env_class_of(name, number), f"has episodes of several turns, and verl plays one: {SEVERAL_TURNS}")
                )
    if faults:
        raise ConfigError(faults, source=source)


def refuse_unknown_environments(
    lists: Mapping[str, Sequence[DatasetTaskset]], *, known: bool = True, source: str = "config"
) -> None:
    """Every `env_class` must be known; without `known` (SkyRL may have more than are known here) this is a warning."""
    faults = [
        (_env_class_of(name, number), fault)
        for name, tasksets in lists.items()
        for number, taskset in enumerate(tasksets)
        if (fault := unknown_environment(taskset, taskset.config.env_class)) is not None
    ]
    if faults and known:
        raise ConfigError(faults, source=source)
    for key, problem in faults:
        warnings.warn(f"{key}: {problem}; the trainer must know it", stacklevel=3)


def _env_class_of(name: str, number: int) -> str:
    """The path of the key: in a list (`train` or `train_tasks`, `tasks`), or in the only `taskset` of a config."""
    if name == "taskset":
        return "taskset.env_class"
    return f"{name if name == 'tasks' else name.removesuffix('_tasks') + '_tasks'}[{number}].env_class"


def _is_missing(config: Any, name: str) -> bool:
    """Whether an OmegaConf node holds `???` there, which it hides from `get`."""
    if not type(config).__module__.startswith("omegaconf"):
        return False
    from omegaconf import OmegaConf

    return OmegaConf.is_missing(config, name)


def _entries(nodes: Any, path: str, faults: list[tuple[str, str]]) -> list[Any]:
    """The entries of a list as plain values."""
    try:
        if isinstance(nodes, str | Mapping) or not isinstance(nodes, Iterable):
            raise ConfigError([("", f"expected a list of tasks, got {_plain(nodes)!r:.60}")])
        nodes = _plain(nodes)
        return [_plain(node) for node in nodes]
    except ConfigError as error:
        faults += [(path, problem) for _, problem in error.faults]
        return []


def _further_faults(taskset: DatasetTaskset, node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What no single key shows."""
    config = taskset.config
    yield from check_loading(config.loading_params)
    if config.max_prompt_length is not None and config.tokenizer is None:
        yield "tokenizer", "is required where max_prompt_length is set"
    file = filter_file(config.filter)
    if file is not None and not file.is_file():
        yield "filter", f"no such file: {file}"


def _plain(value: Any) -> Any:
    """Plain values all through, however deep an OmegaConf node lies."""
    if type(value).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError([("", str(error).splitlines()[0])]) from None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _set(config: Any, key: str, paths: list[str]) -> None:
    if isinstance(config, dict):
        if config.get("data") is None:
            config["data"] = {}
        config["data"][key] = paths
        return
    from omegaconf import open_dict

    with open_dict(config):
        if config.get("data") is None:
            config["data"] = {}
        with open_dict(config["data"]):
            config["data"][key] = paths

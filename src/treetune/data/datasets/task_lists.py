"""Reads tasks from a config: lists of nodes, or `train_tasks` and `val_tasks` in YAML (also in a trainer's own recipe).

    lists = read_declared("recipe.yaml", {"train_tasks[0].max_rows": "100"})      # {"train": [taskset]}
    check_environments(lists); check_columns(lists, "verl")

Only these two lists are resolved and checked; the rest of a recipe belongs to the trainer. All faults of all tasks are
reported before the first task is built.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from treetune.chat.images import has_images
from treetune.config.interpolation import with_overrides
from treetune.config.plugins import file_of, tasksets
from treetune.config.structs import CodeName, convert, convert_node, declared_values, load_yaml, to_plain
from treetune.config.trust import current_origin, names_from, origin_of
from treetune.core.contract import Contract
from treetune.core.from_config import build_taskset, custom_class, find_files, names_class
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.datasets.config import DatasetConfig, plain_values
from treetune.data.datasets.dataset_rows import unknown_environment
from treetune.data.datasets.list_files import draws_by_weight
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows.agent_column import has_several_turns, needs_loop
from treetune.data.rows.cache import Sidecar
from treetune.data.rows.scorer import ScoredBy, only_groups, scored_by
from treetune.data.sources.loading_params import LoadingParams, check_loading
from treetune.errors import (
    UNKNOWN_KEY,
    ConfigError,
    EmptyTasksetError,
    Faults,
    TreetuneError,
    UsageError,
    check_all,
    did_you_mean,
    gather_faults,
    suggest_file,
)
from treetune.scorers.scorer import Rule
from treetune.system.folders import default_cache_dir

LISTS = ("train_tasks", "val_tasks")

Lists = Mapping[str, Sequence[DatasetTaskset]]
"""Tasksets by list name: `train`, `train_tasks`, `tasks`, or `taskset` for a config's only one."""


def read_declared(
    path: str,
    overrides: Mapping[str, str],
    *,
    cache_dir: str | Path | None = None,
    further: Mapping[str, Any] | None = None,
) -> dict[str, list[DatasetTaskset]]:
    """Return the tasksets of `train` and `val` that a YAML file declares, with the `further` keys added to each. All
    faults of both lists are reported at once."""
    faults: Faults = []
    lists: dict[str, list[DatasetTaskset]] = {}
    data = load_yaml(path)
    with names_from(origin_of(path, data)):
        for name, nodes in _read_nodes(data, overrides, path).items():
            entries = [{**node, **(further or {})} if isinstance(node, dict) else node for node in nodes]
            with gather_faults(faults):
                lists[name.removesuffix("_tasks")] = load_tasks(entries, cache_dir, path=name)
    if faults:
        raise ConfigError(faults, source=path)
    return lists


def declares_tasks(data: Mapping[str, Any]) -> bool:
    return any(data.get(name) for name in LISTS)


def read_list_node(
    data: dict[str, Any], target: str, split: str | None, usual: str, overrides: Mapping[str, str]
) -> dict[str, Any]:
    """Return the taskset node of the list that `split` names, or of the `usual` list."""
    if not declares_tasks(data):
        missing = ("taskset", "is required (such as {id: arithmetic}), or train_tasks and val_tasks")
        raise ConfigError(_find_empty_lists(data) or [missing], source=target)
    lists = _read_nodes(data, overrides, target)
    names = [name.removesuffix("_tasks") for name in lists]
    if split is None:
        split = usual if usual in names else names[0]
    if split not in names:
        raise ConfigError([("--split", f"there is no list {split!r}; use {' or '.join(names)}")], source=target)
    if unused := [key for key in overrides if not key.startswith(f"{split}_tasks")]:
        faults = [(key, f"sets a key of the other list, but {split}_tasks is used; see --split") for key in unused]
        raise ConfigError(faults, source="the overrides")
    entries = lists[f"{split}_tasks"]
    faults = [
        (f"{split}_tasks[{number}]", f"expected keys and values, got {node!r}")
        for number, node in enumerate(entries)
        if not isinstance(node, Mapping)
    ]
    if faults:
        raise ConfigError(faults, source=target)
    plain = [{key: value for key, value in node.items() if key != "custom_cls"} for node in entries]
    nodes = [node if names_class(node) else {"id": "dataset", **plain[number]} for number, node in enumerate(entries)]
    if len(nodes) == 1:
        return nodes[0]
    weighted = draws_by_weight([node.get("weight") for node in nodes])
    return {"id": "mixture" if weighted else "union", "sources": nodes}


def load_tasks(
    nodes: Iterable[Any], cache_dir: str | Path | None = None, *, path: str = "tasks", of_any_class: bool = False
) -> list[DatasetTaskset]:
    """Load the tasksets of a list of configs. All faults of all entries are raised as one error. With `of_any_class`,
    those that are not dataset tasks become `TaskRows`."""
    try:
        entries = plain_values(nodes)
    except ConfigError as error:
        # A key's path starts at the whole config, or at the list.
        raise ConfigError([(f"{path}{key.removeprefix(path)}", problem) for key, problem in error.faults]) from None
    if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
        raise ConfigError([(path, f"expected a list of tasks, got {entries!r:.60}")])
    loaded: list[DatasetTaskset] = []

    def load(node: Any) -> None:
        faults: Faults = []
        with gather_faults(faults, ""):
            loaded.append(load_task(node, cache_dir, of_any_class=of_any_class))
            if isinstance(loaded[-1], DatasetTaskset):
                faults += _further_faults(loaded[-1].config)
        if faults:
            raise ConfigError(faults)

    check_all((f"{path}[{number}]", partial(load, node)) for number, node in enumerate(entries))
    return loaded


def load_task(node: Any, cache_dir: str | Path | None = None, *, of_any_class: bool = False) -> DatasetTaskset:
    """Load one entry, with the base class or the class that `custom_cls` names."""
    node = plain_values(node)
    if not isinstance(node, Mapping):
        raise ConfigError([("", f"expected keys and values, got {node!r}")])
    cls = _task_class(node, of_any_class)
    if not issubclass(cls, DatasetTaskset):
        of_list = [key for key in _RowsOfTaskset.__struct_fields__ if key in node]
        keys = convert({key: node[key] for key in of_list}, _RowsOfTaskset)
        taskset = build_taskset({key: node[key] for key in node if key not in of_list}, path="", cls=cls)
        rows = TaskRows(taskset, keys.max_rows, cache_dir, keys.weight)
        return cast(DatasetTaskset, rows)
    made = build_taskset(node, path="", cls=cls, cache_dir=cache_dir)
    assert isinstance(made, DatasetTaskset)
    return made


class _RowsOfTaskset(msgspec.Struct):
    """The keys of an entry that is not a dataset task, in addition to those of its class."""

    max_rows: Annotated[int, msgspec.Meta(ge=1)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None


def _task_class(node: Mapping[str, Any], of_any_class: bool = False) -> type[Taskset[Any, Any]]:
    """Return the class that an entry names. Errors are reported as faults of its key."""
    key = "custom_cls" if names_class(node) else "id"
    try:
        if key == "custom_cls":
            cls = custom_class(node[key], key)
        else:
            cls = tasksets.resolve(str(node.get("id", "dataset")), current_origin())
    except ConfigError:
        raise
    except TreetuneError as error:
        raise ConfigError([(key, str(error))]) from error
    if not isinstance(cls, type) or not issubclass(cls, Taskset if of_any_class else DatasetTaskset):
        name = getattr(cls, "__name__", repr(cls))
        raise ConfigError([(key, f"{name} is not a dataset task: subclass treetune_verl.tasks.Task")])
    return cls


def _further_faults(config: DatasetConfig) -> Iterator[tuple[str, str]]:
    """Return the faults that show only when several keys are read together."""
    yield from check_loading(config.loading_params)
    if config.scorer is not None and config.env_class is not None:
        yield "scorer", f"the environment {config.env_class!r} scores these rows: leave out one of scorer and env_class"
    if config.answer is not None:
        faults: Faults = []
        with gather_faults(faults):
            msgspec.structs.replace(config.scorer or Rule(), answer=config.answer)
        yield from faults
    if config.answer is not None and config.scorer is not None and config.scorer.answer not in (None, config.answer):
        yield (
            "answer",
            f"the scorer reads another place, {config.scorer.answer}: leave out one of answer and scorer.answer",
        )
    if config.max_prompt_length is not None and config.tokenizer is None:
        yield "tokenizer", "is required if max_prompt_length is set"
    for key, specs in declared_values(config, CodeName).items():
        for file in map(file_of, specs):
            if file is not None and not file.is_file():
                yield key, f"no such file: {file}{suggest_file(file)}"


# Checks of loaded lists; each raises one error for all tasks


def check_columns(lists: Lists, format: str = "verl", *, force: bool = False, source: str = "config") -> None:
    """Open the source of each task that is not in the cache, and raise an error for columns that a config names but the
    source lacks."""
    checks = [(place, partial(taskset.check_source, format, force=force)) for place, taskset in _places(lists)]
    check_all(checks, source=source)


def check_environments(lists: Lists, *, known: bool = True, source: str = "config") -> None:
    """Check that every `env_class` is known. Without `known` (SkyRL may know more environments) this is a warning."""
    faults: Faults = []
    for place, taskset in _places(lists):
        config, key = taskset.config, f"{place}.env_class"
        if config.env_class is None:
            if config.scorer is not None and config.scorer.scores_groups and not taskset.overrides("reward"):
                faults.append((f"{place}.scorer", str(only_groups("it"))))
            continue
        if (problem := unknown_environment(taskset, config.env_class)) is not None:
            if known:
                faults.append((key, problem))
            else:
                warnings.warn(f"{key}: {problem}; the trainer must know it", stacklevel=3)
    if faults:
        raise ConfigError(faults, source=source)


def has_turns(taskset: DatasetTaskset) -> bool | None:
    """Whether its episodes have several turns or tools. None if this is only known once it is played."""
    config = taskset.config
    if not isinstance(taskset, DatasetTaskset):
        return taskset.has_turns()  # any other taskset: its tasks determine this
    if config.tools or taskset.tool_methods or (taskset.CONTRACT.max_turns or 1) > 1:
        return True
    if config.env_class is None:
        return None if taskset.overrides("environment") else False
    environment: Any = taskset.environment_class(config.env_class)
    if has_several_turns(environment):
        rows_decide = "max_turns" in config.extra_fields or taskset.overrides_rows
        return None if rows_decide else True
    return None if getattr(environment, "CONTRACT", Contract()).max_turns is None else False


def _places(lists: Lists) -> Iterator[tuple[str, DatasetTaskset]]:
    """Yield each taskset with its place in the config."""
    for name, entries in lists.items():
        key = f"{name}_tasks" if name in ("train", "val") else name
        for number, taskset in enumerate(entries):
            yield key if name == "taskset" else f"{key}[{number}]", taskset


# Nodes of a file, with overrides


def _read_nodes(data: Mapping[str, Any], overrides: Mapping[str, str], path: str) -> dict[str, list[Any]]:
    """Return the entries of each list of the file `path`, overridden and resolved. Files that the config names are
    looked up next to it first; those in an override only in the working directory."""
    written = {name: data[name] for name in LISTS if data.get(name)}
    if not written:
        near = [(str(key), f"{UNKNOWN_KEY}{meant}") for key in data if (meant := did_you_mean(str(key), LISTS))]
        missing = ("train_tasks", "is required, or val_tasks: the tasks to build")
        raise ConfigError(_find_empty_lists(data) or near or [missing], source=path)
    # Interpolations may refer to the rest of the file, so it is merged in below; only the lists are resolved.
    resolved = with_overrides(data, overrides, source=path, only=list(written))
    if faults := [(name, "expected a list of tasks") for name in written if not isinstance(resolved[name], list)]:
        raise ConfigError(faults, source=path)
    folders = [Path(path).expanduser().resolve().parent]
    lists: dict[str, list[Any]] = {}
    for name, nodes in resolved.items():
        # An interpolation may produce a different number of entries than the file shows.
        same = isinstance(written[name], list) and len(written[name]) == len(nodes)
        lists[name] = [
            _keep_text(node, written[name][number] if same else None, folders, _overrides_of(overrides, name, number))
            if isinstance(node, dict)
            else node
            for number, node in enumerate(nodes)
        ]
    return lists


def _find_empty_lists(data: Mapping[str, Any]) -> Faults:
    example = "- {loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}}}"
    return [(name, f"has no tasks: add one, such as {example}") for name in LISTS if name in data and not data[name]]


def _overrides_of(overrides: Mapping[str, str], name: str, number: int) -> dict[str, str]:
    """Return the overrides of one entry by key, as they were typed."""
    entry = re.compile(rf"{name}(?:\[{number}\]|\.{number})\.([^\[\]]+)")
    matches = [(entry.fullmatch(key), raw) for key, raw in overrides.items()]
    return {match[1]: raw for match, raw in matches if match is not None}


def _keep_text(node: dict[str, Any], written: Any, folders: list[Path], raw: Mapping[str, str]) -> dict[str, Any]:
    """Return an entry with its file names resolved, and with each override as typed. File names in overrides are not
    resolved, and an override stays text if its key is text, even if YAML would read it otherwise (`Q: {question}`). A
    class's own key is text if the file's value is."""
    given = {key.partition(".")[0] for key in raw if not key.startswith("profile.") or key == "profile.path"}
    entry: dict[str, Any] = find_files(node, folders, DatasetTaskset)
    entry |= {key: node[key] for key in given & node.keys()}
    with gather_faults([]):  # reported when the entry is loaded
        typed = to_plain(convert_node(entry, _task_class(entry), raw=raw)) if raw else {}
        own = typed.get("extra", {}).keys() & raw.keys() if isinstance(written, dict) else ()
        entry |= {key: typed[key] for key in given & typed.keys()}
        entry |= {key: raw[key] for key in own if isinstance(entry[key], dict) and isinstance(written.get(key), str)}
    return entry


# Other tasksets in a list

LOOKED_AT = 100
"""The number of tasks that are checked for whether they have several turns."""


class TaskRows:
    """A taskset that is not a dataset task, such as `- {id: "doubles.py:Doubles", max_rows: 100}`. It has the methods
    of a `DatasetTaskset` that a list of tasks uses; `build_rows` makes its rows."""

    tool_methods = ()
    overrides_rows = overrides_build = False

    def __init__(
        self,
        taskset: Taskset[Any, Any],
        num_tasks: int | None,
        cache_dir: str | Path | None = None,
        weight: float | None = None,
    ) -> None:
        if taskset.INFINITE and num_tasks is None:
            raise UsageError(f"{taskset.name} is INFINITE: its rows need an end", remedy="set max_rows")
        self.taskset, self.name = taskset, taskset.name
        self.cache_dir = default_cache_dir(cache_dir)
        self._num_tasks, self._weight = num_tasks, weight

    def build(self, format: str = "verl", **how: Any) -> tuple[Sidecar, Path, bool]:
        from treetune.data.datasets.build import build_rows

        sidecar, path = build_rows(self.taskset, format, self._num_tasks, self.cache_dir)
        self._count = sidecar.rows
        return sidecar, path, False

    # In a mixture, once it is built: its rows have their own order.

    @property
    def _unscheduled(self) -> TaskRows:
        return self

    def order_key(self, format: str) -> None:
        """None: its rows identify it."""

    def _size(self) -> int:
        return self._count

    def position_at(self, index: int, size: int) -> int:
        return index % size

    @cached_property
    def _built(self) -> Path:
        return self.build()[1]

    def get_parquet_path(self, format: str = "verl") -> str:
        return str(self._built)

    def check_source(self, format: str = "verl", *, force: bool = False) -> None:
        """Do nothing: its tasks have no columns that a config could name."""

    @cached_property
    def _first(self) -> list[Task]:
        most = LOOKED_AT if self._num_tasks is None else min(LOOKED_AT, self._num_tasks)
        if not (tasks := self.taskset.select_tasks(most)):
            raise EmptyTasksetError(f"{self.name} has no tasks")
        return tasks

    @cached_property
    def config(self) -> DatasetConfig:
        images = ["images"] if any(has_images(task.messages) for task in self._first) else []
        source = self._first[0].data_source or self.name
        params = LoadingParams(args=[])
        return DatasetConfig(loading_params=params, data_source=source, images=images, weight=self._weight)

    @cached_property
    def row_scorer(self) -> ScoredBy | None:
        return scored_by(self.taskset, self._first[0])

    def has_turns(self) -> bool | None:
        if any(needs_loop(self.taskset, task) for task in self._first):
            return True
        says = all(task.env_class is None for task in self._first) and not self.taskset.overrides("environment")
        return False if says else None

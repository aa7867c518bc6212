"""DatasetRows is the part of a dataset task that makes rows: its config, its map function, and what scores a row.

    rows.config.prompt_template, rows.row_scorer, rows.tool_names

`RowBuilder` makes its rows. `DatasetTaskset` adds the source, the cache and the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from treetune.config.structs import convert_node
from treetune.core.contract import Contract
from treetune.core.task import UID_VERSION, Task
from treetune.core.taskset import Taskset
from treetune.data.datasets.choices import TEXTS
from treetune.data.datasets.config import DatasetConfig, plain_values
from treetune.data.rows.scorer import (
    BY_RULE,
    ScoredBy,
    describe_environment,
    describe_scorer,
    describe_taskset,
    scorer_of_method,
)
from treetune.errors import ConfigError, TreetuneError
from treetune.scorers import Scorer
from treetune.scorers.scorer import Rule
from treetune.system.folders import default_cache_dir

BUILDER_VERSION = f"7.{UID_VERSION}"
"""Part of every cache key. Increase it when the same config gives different rows or different notes."""


class DatasetRows(Taskset[Task, DatasetConfig]):
    default_scorer = Rule()
    overrides_rows: ClassVar[bool] = False
    """Whether a subclass has its own map function."""
    overrides_build: ClassVar[bool] = False
    """Whether a subclass returns the trainer's rows itself."""

    def __init__(self, config: Mapping[str, Any] | DatasetConfig, cache_dir: str | Path | None = None) -> None:
        typed = config if isinstance(config, DatasetConfig) else convert_node(plain_values(config), type(self))
        read = set() if typed.scorer is None else set(typed.scorer.columns())
        if typed.choices is not None:
            read.add(TEXTS)  # so that a scorer knows the texts of the options, and notices a second one
        if more := read.difference(typed.extra_fields):
            typed = msgspec.structs.replace(typed, extra_fields=[*typed.extra_fields, *sorted(more)])
        super().__init__(typed)
        if self.config.data_source != "unknown":
            self.name = self.config.data_source
        self.cache_dir = default_cache_dir(cache_dir)
        self._env_scorers: dict[str, ScoredBy] = {}

    def _make_map_fn(self) -> Callable[..., Any]:
        """Return the function that makes a trainer's row from a source row and its index."""
        raise NotImplementedError

    @cached_property
    def scorer(self) -> Scorer | None:
        """The scorer that the config sets, with the form of the answer that it declares."""
        named = self.config.scorer or scorer_of_method(self.config.reward_method)
        form = self.config.answer or self.ANSWER
        scores_itself = self.config.env_class is not None or (named is None and self.overrides("reward"))
        if form is None or scores_itself or (named is not None and named.answer is not None):
            return named
        return msgspec.structs.replace(named or Rule(), answer=form)

    def answer_format(self, task: Task) -> Any:
        return super().answer_format(task) or self.config.answer

    def _format_of(self, env_class: str) -> Any:
        read, asked = super()._format_of(env_class), self.config.answer
        if asked is None or env_class != self.config.env_class:
            return read
        if read is None or msgspec.structs.replace(asked, instruct=read.instruct) != read:
            where = "does not say where it reads the answer" if read is None else f"reads the answer from {read}"
            raise ConfigError([("answer", f"the environment {env_class!r} {where}, not from {asked}: leave it out")])
        return asked

    def environment_spec(self, env_class: str) -> str:
        """Rows name the file as the config did; in a taskset that was built from a row, the config names its copy."""
        own = self.config.env_class
        named = own is not None and own.rpartition(":")[2] == env_class.rpartition(":")[2]
        return super().environment_spec(own if own is not None and named else env_class)

    @cached_property
    def row_scorer(self) -> ScoredBy | None:
        """How any process can score a row from the row alone: by the rule, by its environment, by a scorer, or by this
        taskset as JSON. None if none of them can."""
        if Contract() != self.CONTRACT:
            return describe_taskset(self, self.cache_dir)
        if self.config.env_class is not None:
            return self.describe_environment(self.config.env_class)
        if self.overrides("reward") or self.tool_methods or len(self.tool_names) < len(self.config.tools):
            return describe_taskset(self, self.cache_dir)
        if self.scorer is not None:
            return describe_scorer(self.scorer)
        if self.config.ground_truth is not None or self.overrides_rows or self.overrides_build:
            return BY_RULE
        return None

    def describe_environment(self, env_class: str) -> ScoredBy:
        """Return what scores rows that name an environment."""
        if env_class not in self._env_scorers:
            self._env_scorers[env_class] = describe_environment(self.environment_spec(env_class), self.cache_dir)
        return self._env_scorers[env_class]

    @property
    def tool_names(self) -> list[str]:
        """The tools that its tasks name. Tools with settings belong to the taskset."""
        return [entry for entry in self.config.tools if isinstance(entry, str)]


def unknown_environment(taskset: DatasetRows, env_class: str | None) -> str | None:
    """Return why the name of an environment is not valid, or None."""
    try:
        if env_class is not None:
            taskset.environment_class(env_class)
    except TreetuneError as error:
        return error.message
    return None

"""RowsTaskset reads tasks from trainers' rows: parquet, JSON and JSON lines files, folders, globs, hub datasets.

    taskset = RowsTaskset(RowsConfig(files=["train.parquet"]))
    taskset[5], taskset.reward(taskset[5], "42")

Rows are read on demand. Each row says how it is scored: by its `extra_info.scorer`, its environment, or the rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import msgspec

from treetune.config.structs import FileName
from treetune.config.trust import Origin
from treetune.core.draws import with_request
from treetune.core.mixture import ask_owner
from treetune.core.task import ForeignTask, Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import Tool, ToolSource
from treetune.data.rows.cache import Cache
from treetune.data.rows.code_store import locate_files
from treetune.data.rows.formats import detect, format_named
from treetune.data.rows.reading import read_tasks
from treetune.data.rows.row_store import ParquetRows, RowStore
from treetune.data.rows.scorer import ScoredBy, describe_scorer, row_tools, scored_by_row, taskset_of, with_type
from treetune.data.sources.names import File, FileKind, HubName, find
from treetune.errors import TasksetError, TreetuneError
from treetune.play.given_tasks import GivenTasks
from treetune.scorers import Scorer
from treetune.scorers.scorer import Rule
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir


class RowsConfig(TasksetConfig, frozen=True, kw_only=True):
    files: list[FileName] = []
    """Files, folders, globs, or hub datasets (`name[@config][:split]`)."""
    format: str | None = None
    """The format of the rows: verl, skyrl or trl. By default their columns determine it."""
    scorer: Scorer | None = None
    """How to score answers, whatever the rows say; rows with an environment keep it."""
    trust: bool = False
    """Run code that rows name, even if you did not build the rows."""


class RowsTaskset(Taskset[Task, RowsConfig]):
    def __init__(self, config: RowsConfig | None = None) -> None:
        super().__init__(config)
        if not self.config.files:
            raise TasksetError("there are no files of rows", remedy="name some: files: [train.parquet]")
        self._format = None if self.config.format is None else format_named(self.config.format)
        self.name = Path(self.config.files[0]).name
        # A config that is itself data cannot declare its rows trusted.
        self._trusts_rows = self.config.trust and self._origin.trusted

    # Tasks

    def load_tasks(self) -> Iterable[Task]:
        return map(_as_foreign, read_tasks(self.config.files, self.config.format))

    def task_at(self, index: int) -> Task:
        part = bisect_right(self._ends, index)
        if part == len(self._parts):
            raise IndexError(index)
        _, rows = self._parts[part]
        row = rows[index - (self._ends[part - 1] if part else 0)]
        return _as_foreign((self._format or detect(row)).task_of_pruned(row))

    def count(self) -> int:
        return self._ends[-1]

    def source(self) -> str | None:
        return digest([identity for identity, _ in self._parts])

    def type_of(self, task: Task) -> type[Task]:
        return ForeignTask if _is_scored_by_taskset(task) else Task

    def _set_position(self, task: Task, position: int) -> Task:
        placed = msgspec.structs.replace(task, idx=position)  # it was read from a file, so a file can hold it
        own = self.config.scorer if task.env_class is None else None
        return placed if own is None else with_request(placed, own.answer)  # a row's own prompt is final

    # Scoring

    environment = ask_owner("environment")
    contract_of = ask_owner("contract_of")
    reward = ask_owner("reward")
    validate = ask_owner("validate")

    def answer_format(self, task: Task) -> Any:
        owner, inner = self._owner(task)
        return owner.answer_format(inner)

    def offers_tools(self, task: Task) -> bool:
        if self.config.tools or task.tools:
            return True
        scorer, inner = self._owner(task)
        return scorer.offers_tools(inner)

    def tools_for(self, task: Task) -> list[Tool | ToolSource]:
        scorer, inner = self._owner(task)
        own = super().tools_for(msgspec.structs.replace(task, tools=[]))
        return [*own, *row_tools(inner, scorer, trust=self._trusts_rows)]

    @property
    def tasks_origin(self) -> Origin:
        return Origin.of_data("a row", self._trusts_rows)

    def environment_spec(self, env_class: str) -> str:
        return str(locate_files(env_class))

    def gold(self, task: Task) -> Any:
        try:
            scorer, inner = self._owner(task)
        except TreetuneError:
            return None  # a task that cannot be scored here can still be viewed
        return scorer.gold(inner)

    def scored_by(self, task: Task) -> ScoredBy | None:
        """Return what scores a row's task, according to the config or the row; None if neither says."""
        if self.config.scorer is not None and task.env_class is None:
            return describe_scorer(self.config.scorer)
        return ScoredBy.read(task.extra_info.get("scorer")) or scored_by_row(task)

    def refuse_untrusted(self) -> None:
        """Raise an error before anything is played if the first row names code that may not run."""
        for task in islice(self, 1):
            self._owner(task)

    def _owner(self, task: Task) -> tuple[Taskset[Any, Any], Task]:
        """Return what scores a task, and the task as that scorer knows it."""
        if (scored := self.scored_by(task)) is None:
            raise TasksetError(
                f"row {task.idx} of {self.name} does not say how it is scored",
                remedy="give it a ground truth or an env_class, or build the rows with `treetune build`",
            )
        own = self.config.scorer if task.env_class is None else None
        scorer = (
            taskset_of(scored, trust=self._trusts_rows)
            if own is None
            else GivenTasks(scorer=own, default_scorer=Rule())
        )
        extra = {key: value for key, value in task.extra_info.items() if key != "scorer"}
        return scorer, with_type(msgspec.structs.replace(task, extra_info=extra), scorer)

    # Rows

    @cached_property
    def _parts(self) -> Sequence[tuple[str, ParquetRows | RowStore]]:
        """The sources: a key for each, and its rows."""
        cache = Cache(default_cache_dir())
        return [_open_rows(source, cache) for source in find(self.config.files)]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(rows) for _, rows in self._parts))


def _open_rows(source: File | HubName, cache: Cache) -> tuple[str, ParquetRows | RowStore]:
    """Open a source. Parquet is read directly; rows of any other source are stored in the cache."""
    if isinstance(source, File) and source.kind is FileKind.PARQUET:
        return cache.hash_content(source.path), ParquetRows(source.path)
    store = RowStore.open(source, cache, prompt_key="prompt", env_class_key="env_class")
    return store.path.stem, store


def _is_scored_by_taskset(task: Task) -> bool:
    """Whether a taskset scores it, which may declare a task class with more fields."""
    text = task.extra_info.get("scorer")
    scored = ScoredBy.read(text) if isinstance(text, str) else None
    return scored is not None and scored.kind == "taskset"


def _as_foreign(task: Task) -> Task:
    if type(task) is Task and _is_scored_by_taskset(task):
        return ForeignTask(**{name: getattr(task, name) for name in Task.__struct_fields__})
    return task

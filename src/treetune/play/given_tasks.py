"""GivenTasks plays and scores tasks that come from elsewhere, such as rows.

GivenTasks(scorer=includes()).reward(task, "Paris")
GivenTasks("gsm8k").environment(task)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from treetune.config.plugins import environments
from treetune.config.trust import USER, Origin, current_origin, names_from
from treetune.core.contract import Contract
from treetune.core.environment import Environment, SingleTurn, make
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import Tool, ToolSource


class GivenTasks(Taskset[Task, TasksetConfig]):
    """Plays and scores tasks that come from elsewhere, such as rows: with a scorer, with one environment, or each with
    the environment that it names."""

    def __init__(
        self,
        environment: str | type[Environment] | None = None,
        *,
        scorer: Any = None,
        default_scorer: Any = None,
        name: str = "rows",
    ) -> None:
        super().__init__()
        self.name, self.scorer, self.default_scorer = name, scorer, default_scorer
        self._environment = environment
        self._one_answer = scorer is not None or default_scorer is not None

    def load_tasks(self) -> Iterable[Task]:
        return ()

    @property
    def tasks_origin(self) -> Origin:
        return self._origin if self._one_answer or self._origin != USER else Origin.of_data("a row")

    def offers_tools(self, task: Task) -> bool:
        return bool(task.tools) or self._finds_tools is not None

    def tools_for(self, task: Task) -> list[Tool | ToolSource]:
        if self._finds_tools is not None:
            return self._finds_tools(task)  # type: ignore[no-any-return]
        return super().tools_for(task)

    @cached_property
    def _finds_tools(self) -> Any:
        """The method that finds the tools of a task, if the environment represents others, as `scored` does."""
        named = self._environment
        cls = environments.resolve(named, self._origin) if isinstance(named, str) else named
        return getattr(cls, "tools_for", None)

    def contract_of(self, task: Task, environment: type | None = None) -> Contract:
        if environment is None and not self._one_answer:
            named: Any = self._environment or task.env_class
            with names_from(self.tasks_origin if self._environment is None else self._origin):
                environment = environments.resolve(named, current_origin()) if isinstance(named, str) else named
        return super().contract_of(task, environment)

    def answer_format(self, task: Task) -> Any:
        if self._one_answer:
            return super().answer_format(task)
        named = self._environment or task.env_class or ""
        return self._format_of(named) if isinstance(named, str) else getattr(named, "ANSWER", None)

    def environment(self, task: Task) -> Environment:
        if self._one_answer:
            return SingleTurn(task, self)
        if isinstance(self._environment, type):
            return self._environment(task)
        with names_from(self.tasks_origin if self._environment is None else self._origin):
            return make(self._environment or task.env_class or "", task)

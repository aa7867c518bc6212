"""ByEnvironment: the taskset of tasks that come from elsewhere, such as rows.

taskset = ByEnvironment("gsm8k")
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from treetune.config.trust import USER, Origin, names_from
from treetune.core.draws import TasksetConfig
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.tool import Tool, ToolSource

if TYPE_CHECKING:
    from treetune.core.environment import Environment


class ByEnvironment(Taskset[Task, TasksetConfig]):
    """The taskset of tasks that come from elsewhere: each is played by the environment that it names, or by the one
    that is given for all of them."""

    def __init__(self, environment: str | type[Environment] | None = None, name: str = "rows") -> None:
        super().__init__()
        self.name = name
        self._environment = environment

    def load_tasks(self) -> Iterable[Task]:
        return ()

    @property
    def tasks_origin(self) -> Origin:
        return self._origin if self._origin != USER else Origin.of_data("a row")

    def offers_tools(self, task: Task) -> bool:
        return bool(task.tools) or self._finds_tools is not None

    def tools_for(self, task: Task) -> list[Tool | ToolSource]:
        if self._finds_tools is not None:
            return self._finds_tools(task)  # type: ignore[no-any-return]
        return super().tools_for(task)

    @cached_property
    def _finds_tools(self) -> Any:
        """Of an environment that stands for others, such as `scored`: what finds the tools of a task."""
        from treetune.config.plugins import environments

        named = self._environment
        cls = environments.resolve(named, self._origin) if isinstance(named, str) else named
        return getattr(cls, "tools_for", None)

    def environment(self, task: Task) -> Environment:
        from treetune.core.environment import make

        if isinstance(self._environment, type):
            return self._environment(task)
        with names_from(self.tasks_origin if self._environment is None else self._origin):
            return make(self._environment or task.env_class or "", task)

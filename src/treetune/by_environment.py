"""ByEnvironment: the taskset of tasks that come from elsewhere, such as rows.

taskset = ByEnvironment("gsm8k")
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from treetune.task import Task
from treetune.taskset import Taskset
from treetune.taskset_config import TasksetConfig

if TYPE_CHECKING:
    from treetune.environment import Environment


class ByEnvironment(Taskset[Task, TasksetConfig]):
    """The taskset of tasks that come from elsewhere: each is played by the environment that it names, or by the one
    that is given for all of them."""

    def __init__(self, environment: str | type[Environment] | None = None, name: str = "rows") -> None:
        super().__init__()
        self.name = name
        self._environment = environment

    def load_tasks(self) -> Iterable[Task]:
        return ()

    def environment(self, task: Task) -> Environment:
        from treetune.environment import make

        if isinstance(self._environment, type):
            return self._environment(task)
        return make(self._environment or task.env_class or "", task)

"""What is known here of a taskset that lives on a server; its tasks and rollouts come from the server's `Host`.

taskset = Served(ServedConfig(address="tcp://127.0.0.1:5555"))
taskset.describe_as(await host.info())
"""

from __future__ import annotations

from treetune.errors import TasksetError
from treetune.host import Info
from treetune.task import Task
from treetune.taskset import Taskset, TasksetConfig


class ServedConfig(TasksetConfig, frozen=True, kw_only=True):
    address: str
    """Where the server listens."""


class Served(Taskset[Task, ServedConfig]):
    """What is known here of a taskset that lives on a server."""

    def __init__(self, config: ServedConfig | None = None) -> None:
        super().__init__(config)
        self._info = Info()

    def describe_as(self, info: Info) -> None:
        self._info = info
        self.name = info.name
        self.INFINITE = info.num_tasks is None  # type: ignore[misc]

    def count(self) -> int | None:
        return self._info.num_tasks

    def task_at(self, index: int) -> Task:
        raise TasksetError(
            f"the tasks of {self.name} are on the server at {self.config.address}",
            remedy="evaluate with --server; to score again here, name the taskset itself",
        )

    @property
    def scores_groups(self) -> bool:
        return self._info.requires_group_scoring

    def source(self) -> str | None:
        return self._info.fingerprint

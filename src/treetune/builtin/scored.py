"""The environment of trainers' rows that name none: one answer, scored as the row says.

SkyRL plays every row in an environment. `treetune build --format skyrl` gives this one to the rows of tasks that have
none, and `extra_info.scorer` says what scores them: the rule, or the taskset itself.
"""

from __future__ import annotations

from typing import Any

from treetune.environment import Environment
from treetune.rows.scorer import environment_of
from treetune.task import Task


class ScoredEnvironment(Environment):
    def __new__(cls, task: Task, **settings: Any) -> Any:
        # Not an environment around another: what is played is the one that eval plays.
        return environment_of(task)

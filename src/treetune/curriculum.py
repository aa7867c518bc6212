"""A Curriculum shifts which tasks come next by what it observes: what a taskset's `curriculum()` returns.

    class Levels(Taskset):
        INFINITE = True
        def task_at(self, index): ...          # still a pure function of the position
        def curriculum(self): return Harder()  # one for each stream

The tasks stay fixed, position by position; only the choice of the next position learns. So a task that comes back from
anywhere is still found by its `idx`, and the state of a run is the cursor plus the curriculum's own small state.
"""

from __future__ import annotations

from typing import Any, Protocol

from treetune.errors import TasksetError
from treetune.task import Task
from treetune.taskset import Taskset


class Curriculum(Protocol):
    def draw(self, index: int) -> int:
        """The position of the task that draw number `index` gives."""
        ...

    def observe(self, task: Task, reward: float) -> None:
        """What a rollout of a task earned."""
        ...

    def state(self) -> Any:
        """A small plain value (numbers, texts, lists, dicts) that `restore` goes on from."""
        ...

    def restore(self, state: Any) -> None: ...


def curriculum_of(taskset: Taskset[Any, Any]) -> Curriculum | None:
    """A fresh curriculum of this taskset; None where its order is fixed."""
    make = getattr(taskset, "curriculum", None)
    if make is None:
        return None
    curriculum = make()
    if missing := [name for name in ("draw", "observe", "state", "restore") if not hasattr(curriculum, name)]:
        raise TasksetError(
            f"{taskset.name}.curriculum() gave a {type(curriculum).__name__} without {', '.join(missing)}",
            remedy="return an object with draw, observe, state and restore",
        )
    found: Curriculum = curriculum
    return found

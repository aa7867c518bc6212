"""What a taskset needs of the machine, asked before its first task."""

from __future__ import annotations

from typing import Any

from treetune.errors import TasksetError
from treetune.taskset import Taskset


def refuse_unservable(taskset: Taskset[Any, Any]) -> None:
    """A taskset whose tasks run code is refused where nothing can contain that code."""
    parts = [taskset, *getattr(taskset, "sources", [])]
    for part in parts:
        if part.NEEDS_CONTAINER:
            raise TasksetError(
                f"{part.name} runs code in a container, and this version of Treetune has no sandbox to run it in",
                remedy="its tasks can be looked at (`treetune show`), not run",
            )

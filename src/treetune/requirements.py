"""What a taskset needs of the machine, asked before its first task."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from treetune.errors import TasksetError
from treetune.taskset import Taskset


def refuse_unservable(taskset: Taskset[Any, Any]) -> None:
    """A taskset whose tasks run code is refused where nothing can contain that code."""
    for part in [taskset, *getattr(taskset, "sources", [])]:
        if part.NEEDS_CONTAINER:
            from treetune.sandbox import probe

            found = probe()
            if not found.available:
                raise TasksetError(
                    f"{part.name} runs code, and no sandbox can start here to run it in: {found.cause}",
                    remedy=found.remedy,
                )


def missing_extra(cls: type) -> str | None:
    """The extra that a taskset's class names as `EXTRA`, where what it installs is not there."""
    extra: str | None = getattr(cls, "EXTRA", None)
    return extra if extra is not None and find_spec(extra.replace("-", "_")) is None else None

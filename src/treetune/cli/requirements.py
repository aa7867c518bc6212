"""What a taskset needs of the machine, asked before its first task."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from treetune.environment import contract_of
from treetune.errors import TasksetError
from treetune.taskset import Taskset


def refuse_unservable(taskset: Taskset[Any, Any]) -> None:
    """A taskset whose tasks run code is refused where nothing can contain that code, or nobody trusts it."""
    for part in [taskset, *getattr(taskset, "sources", [])]:
        if (refuse_untrusted := getattr(part, "refuse_untrusted", None)) is not None:
            refuse_untrusted()
        if _runs_code(part):
            from treetune.sandbox import probe

            found = probe()
            if not found.available:
                raise TasksetError(
                    f"{part.name} runs code, and no sandbox can start here to run it in: {found.cause}",
                    remedy=found.remedy,
                )


def _runs_code(taskset: Taskset[Any, Any]) -> bool:
    """By itself, or by the environment that its config names for all tasks."""
    if getattr(taskset.config, "sandbox", None) == "docker":
        return False  # the engine contains it, and says itself where it does not
    env_class = getattr(taskset.config, "env_class", None)
    contract = contract_of(env_class) if isinstance(env_class, str) else None
    return taskset.NEEDS_CONTAINER or (contract is not None and contract.sandbox)


def missing_extra(cls: type) -> str | None:
    """The extra that a taskset's class names as `EXTRA`, where what it installs is not there."""
    extra: str | None = getattr(cls, "EXTRA", None)
    return extra if extra is not None and find_spec(extra.replace("-", "_")) is None else None

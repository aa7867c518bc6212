"""Renders a rollout as its environment or taskset draws it for people: a board, a path, a shell session.

    rendered, why_not = render(run, "17/3")
    rendered.kind, rendered.text

The second value says what went wrong, because a task's code must not stop a user from looking at a run. That code runs
only for a run that this user's `eval` wrote. For any other run, only built-in or installed code runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, get_type_hints

import msgspec

from treetune.chat.message import without_surrogates
from treetune.config.plugins import absolute_spec, environments, folders_of
from treetune.config.trust import Origin, nodes_of
from treetune.core.environment import Environment, Rendered
from treetune.core.from_config import taskset_class
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import TreetuneError, UsageError, format_error, place_of
from treetune.evaluation.config import TaskCode
from treetune.runs.entry import Entry
from treetune.runs.run import Run

_SECONDS = 5.0
"""The time limit for the task's code, which may never end."""
_MOST = 500_000
"""The maximum number of characters in a drawing."""

Renders = type[Environment] | type[Taskset[Any, Any]]


def render(run: Run, name: str | Entry) -> tuple[Rendered | None, str | None]:
    """Returns the environment's drawing of a rollout, None if there is none; and the reason if drawing failed."""
    found: list[tuple[Rendered | None, str | None]] = []

    def work() -> None:
        try:
            found.append((_render(run, name), None))
        except TreetuneError as error:
            found.append((None, str(error)))
        except BaseException as error:  # including those that would end the program
            where = f" at {place}" if (place := place_of(error)) else ""
            found.append((None, f"render failed{where}: {format_error(error)}"))

    thread = threading.Thread(target=work, name="treetune render", daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return found[0] if found else (None, f"render took more than {_SECONDS:g} seconds")


def _render(run: Run, name: str | Entry) -> Rendered | None:
    plain = run.trace(name)
    code = TaskCode(run.folder)
    for cls in _classes(run.config.get("taskset") if code.own else None, plain.task, code.origin_of(plain.task)):
        if not _renders(cls):
            continue
        made: object = cls.render(run.trace(name, partial(_task_type, cls)))
        if made is not None:
            return _check(made, cls)
    return None


def _check(made: object, cls: Renders) -> Rendered:
    """Reads the result of `render`: text, a `Rendered`, or a mapping with its fields."""
    try:
        fields = {"text": made} if isinstance(made, str) else msgspec.to_builtins(made)
        rendered = msgspec.convert(fields, Rendered)
    except (TypeError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{cls.__name__}.render() returned {made!r:.80}: {error}", remedy="return text, a Rendered, or None"
        ) from None
    return msgspec.structs.replace(rendered, text=without_surrogates(rendered.text[:_MOST]))


def _renders(cls: Renders) -> bool:
    """Whether a class has its own `render` class method; an environment may have another method of that name."""
    written = inspect.getattr_static(cls, "render")
    if isinstance(written, classmethod | staticmethod):
        return written not in (inspect.getattr_static(base, "render") for base in (Environment, Taskset))
    if inspect.isfunction(written) and list(inspect.signature(written).parameters)[1:] == ["trace"]:
        raise UsageError(
            f"{cls.__name__}.render() must accept a trace as its only argument", remedy="mark it @classmethod"
        )
    return False


def _classes(node: Any, task: Task, origin: Origin) -> Iterator[Renders]:
    """The classes that may draw it, the nearest first."""
    tasksets = [cls for each in nodes_of(node) if (cls := taskset_class(each)) is not None]
    if task.env_class is not None:
        folders = [folder for cls in tasksets for folder in folders_of(cls)]
        yield environments.resolve(absolute_spec(task.env_class, folders), origin)
    yield from tasksets


def _task_type(cls: Renders, task: Task) -> type[Task]:
    """The type of the tasks, so that their own fields are decoded: a taskset's own type, or the type that an
    environment declares."""
    if issubclass(cls, Taskset):
        return cls.task_type
    try:
        declared = get_type_hints(cls).get("task")
    except Exception:  # the hint has names that only a type checker knows
        return Task
    return declared if isinstance(declared, type) and issubclass(declared, Task) else Task

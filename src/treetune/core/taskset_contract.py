"""Checks that a taskset keeps its promises: its methods, its tasks and their types.

task = check_task(task, Task, of="doubles", by="Doubles", position=3)
"""

from __future__ import annotations

import inspect
import re
from functools import cached_property, lru_cache
from typing import TypeVar
from weakref import WeakSet

import msgspec

from treetune.chat.images import is_address, urls_in
from treetune.config.aliases import keys_meant
from treetune.config.code_files import parse_again
from treetune.core.task import Task
from treetune.errors import EmptyTasksetError, TasksetError, UsageError, did_you_mean

TaskT = TypeVar("TaskT", bound=Task)


def check_task(task: TaskT, declared: type[Task], *, of: str, by: str, position: int) -> TaskT:
    """Return the task as read back from its record, in its declared type; `of` is the taskset, `by` its class."""
    if type(task) is not declared:
        kind = type(task).__name__
        remedy = f"declare it: class {by}(Taskset[{kind}, ...])"
        problem = f"{of} declares tasks of type {declared.__name__}, but gave a {kind}"
        raise TasksetError(problem, remedy=remedy if isinstance(task, Task) else "give Task(prompt=...) objects")
    try:
        # Structs do not check their fields when made. After this round trip, the task holds the same values wherever it
        # is played: a date in `extra_info` becomes text.
        kept: TaskT = _decoder(declared).decode(_encoder.encode(task))  # type: ignore[assignment]
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        problem = f"{of}: task {position} cannot be saved as JSON and read back: {error}"
        remedy = "give its fields values of their declared types: text, numbers, lists, dicts"
        raise TasksetError(problem, remedy=remedy) from None
    if isinstance(kept.prompt, list):
        for url in urls_in(kept.prompt):
            if not is_address(url):
                problem = f"{of}: task {position} has an image at {url!r:.100}, which only a program here could read"
                raise TasksetError(problem, remedy="write image_part(to_url(path)): then the task holds the image")
    return kept


def suggest_fields(error: Exception, task_type: type[Task]) -> str | None:
    """Suggest how to fix a task made with fields that it does not have; None if another error was raised."""
    kind, said = task_type.__name__, str(error)
    if not isinstance(error, TypeError):
        return None
    if said == "Extra positional arguments provided":
        return f"name its fields: {kind}(prompt=..., ground_truth=...)"
    if (unknown := re.fullmatch(r"Unexpected keyword argument '(\w+)'", said)) is None:
        return None
    meant = keys_meant(unknown[1])
    if "ground_truth" in meant:
        return "write ground_truth=..."
    if "prompt_template" in meant:
        return "write prompt=..."
    near = did_you_mean(unknown[1], task_type.__struct_fields__)
    return f"a {kind} has no field {unknown[1]!r}{near or f'; write extra_info={{{unknown[1]!r}: ...}}'}"


def scored_in_group(name: str, task: Task) -> UsageError:
    remedy = "call run_group(task, n), or write reward(task, answer) for an answer that is alone"
    return UsageError(f"task {task.idx} of {name} is scored with its group", remedy=remedy)


def no_tasks(name: str) -> EmptyTasksetError:
    remedy = "load_tasks() must give at least one; look at its filters and files"
    return EmptyTasksetError(f"{name} has no tasks", remedy=remedy)


_METHODS = {
    "load_tasks": (),
    "task_at": ("index",),
    "count": (),
    "reward": ("task", "answer"),
    "gold": ("task",),
    "validate": ("task",),
    "score_group": ("task", "traces"),
    "environment": ("task",),
}
"""The methods that an author may write, with the arguments that each receives."""


_sound: WeakSet[type] = WeakSet()
"""Classes that were already checked; tasksets are also made during rollouts."""


def check_methods(cls: type, base: type) -> None:
    """Raise if a method cannot be called with its arguments, such as `def reward(self, answer)`."""
    if cls in _sound:
        return
    for name, given in _METHODS.items():
        written = inspect.getattr_static(cls, name)
        if written is inspect.getattr_static(base, name) or isinstance(written, property | cached_property):
            continue
        method = getattr(cls, name)
        takes_self = inspect.isfunction(written)
        try:
            signature = inspect.signature(method)
        except ValueError:  # a C function without a signature
            continue
        except TypeError:
            problem = f"{cls.__name__}.{name} is a {type(method).__name__}, not a method"
            raise TasksetError(problem, remedy=_write(name, given)) from None
        try:
            signature.bind(*(("self",) if takes_self else ()), *given)
        except TypeError as error:
            problem = f"{cls.__name__}.{name}{signature} cannot be called as {name}({', '.join(given)}): {error}"
            raise TasksetError(problem, remedy=_write(name, given)) from None
    _sound.add(cls)


def _write(name: str, given: tuple[str, ...]) -> str:
    return f"write def {name}({', '.join(('self', *given))})"


def may_read_seed(cls: type, upto: type) -> bool:
    """Whether the source of a class, or of a base below `upto`, mentions a seed. A config that is passed on whole
    counts, because it may be read anywhere."""
    bases = cls.__mro__[: cls.__mro__.index(upto)]
    try:
        source = "".join(parse_again(lambda: list(map(inspect.getsource, bases))))
    except (OSError, TypeError):
        return True
    return re.search(r"seed|shuffle|self\.config\b(?!\.)", source) is not None


_encoder = msgspec.json.Encoder()


@lru_cache(maxsize=256)
def _decoder(task_type: type[Task]) -> msgspec.json.Decoder[Task]:
    return msgspec.json.Decoder(task_type)

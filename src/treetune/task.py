"""A Task is one problem: frozen, serialisable, no behaviour.

    Task(prompt="What is 2 + 3?", reward_spec={"ground_truth": "5"})

Subclass it to add typed fields; they travel with the task and come back as the concrete type.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from treetune.uid import uid_of

Message = dict[str, Any]
"""A chat message: `role`, `content`, and whatever else the chat format knows (`name`, `tool_calls`)."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    idx: int = -1
    """Its position in the taskset, set by the taskset when the task is drawn: `taskset[task.idx] == task`."""

    prompt: str | list[Message] | None = None
    """A string (one user message), chat messages, or None where the environment opens the conversation."""

    data_source: str = ""
    """Where it comes from; the taskset's name unless set. Results are reported per data source."""

    env_class: str | None = None
    """The environment that runs it: a registered id, `module:Class` or `file.py:Class`. None: one answer."""

    reward_spec: dict[str, Any] = {}
    """What the scorer needs, above all `ground_truth`."""

    ability: str | None = None
    """A category such as `math` or `code`."""

    extra_info: dict[str, Any] = {}
    """Anything else; it never changes the uid."""

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages."""
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt

    @property
    def ground_truth(self) -> Any:
        return self.reward_spec.get("ground_truth")

    @property
    def uid(self) -> str:
        """A hash of what makes the problem: prompt, environment, reward and a subclass's own fields.

        It survives filtering, reordering and file formats. Equal problems share it, so whatever is keyed by
        uid also counts occurrences.
        """
        return uid_of(self.messages, self.env_class, self.reward_spec, own_values(self))


class ForeignTask(Task, frozen=True, kw_only=True):
    """A task whose class is not known here: what its subclass adds is in `own`, and read as an attribute."""

    own: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.own[name]
        except KeyError:
            raise AttributeError(f"the task has no {name!r}") from None


@lru_cache(maxsize=1024)
def own_fields(task_type: type[Task]) -> tuple[str, ...]:
    """The fields that a subclass adds."""
    return tuple(name for name in task_type.__struct_fields__ if name not in Task.__struct_fields__)


def own_values(task: Task) -> dict[str, Any]:
    """What a task has beyond the fields of every task."""
    if isinstance(task, ForeignTask):
        return task.own
    return {name: getattr(task, name) for name in own_fields(type(task))}

"""A Task is one problem: frozen, serialisable, no behaviour.

    Task(prompt="What is 2 + 3?", ground_truth="5")

Subclass it to add typed fields. They are sent and saved with the task, and read back as the concrete type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.chat.message import Message
from treetune.errors import UsageError
from treetune.system.digest import canonical


class _TaskMeta(msgspec.StructMeta):
    """Makes `Task(ground_truth="5")` the same as `Task(reward_spec={"ground_truth": "5"})`, which is the form used in
    memory, in files and on the wire."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        if "ground_truth" in fields and "ground_truth" not in cls.__struct_fields__:
            truth = fields.pop("ground_truth")
            if truth is not None and "reward_spec" not in fields:
                fields["reward_spec"] = {"ground_truth": truth}
            elif truth is not None:
                spec = fields["reward_spec"]
                if (other := spec.get("ground_truth", truth)) != truth:
                    problem = f"a task has two ground truths: {truth!r:.80}, and {other!r:.80} in reward_spec"
                    raise UsageError(problem, remedy="leave one of them out")
                fields["reward_spec"] = {**spec, "ground_truth": truth}
        return _construct(cls, *args, **fields)


_construct = msgspec.StructMeta.__call__


class Task(msgspec.Struct, frozen=True, kw_only=True, metaclass=_TaskMeta):
    """One problem: the prompt that the model sees, and the data that its answer is scored by.

    Subclass it to add typed fields:

        class Sum(Task, frozen=True, kw_only=True):
            level: int = 1

        class Sums(Taskset[Sum]):
            scorer = number()                # from treetune.scorers; or write reward(self, task, answer)

            def load_tasks(self):
                for n in range(100):
                    yield Sum(prompt=f"What is {n} + 1?", ground_truth=n + 1, level=len(str(n)))
    """

    idx: int = -1
    """The position in the taskset, set by the taskset when the task is drawn: `taskset[task.idx] == task`."""

    prompt: str | list[Message] | None = None
    """A string (one user message), chat messages, or None if the environment opens the conversation."""

    data_source: str = ""
    """Where the task comes from; the taskset's name by default. Results are reported per data source."""

    env_class: str | None = None
    """The environment that runs the task: a registered id, `module:Class` or `file.py:Class`. None: one answer."""

    reward_spec: dict[str, Any] = {}
    """The data for the scorer. `Task(ground_truth="5")` is short for `Task(reward_spec={"ground_truth": "5"})`."""

    ability: str | None = None
    """A category such as `math` or `code`."""

    tools: list[str] = []
    """Names of tools that a model may call in addition to the environment's: built-in or installed ones, `module:name`
    or `file.py:name`. Their settings (a command, a file) belong in a config, never here."""

    extra_info: dict[str, Any] = {}
    """Anything else. It never affects the uid."""

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages."""
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt

    if TYPE_CHECKING:
        ground_truth: Any = None
    else:

        @property
        def ground_truth(self) -> Any:
            """The right answer, for comparison; None if the task has none."""
            return self.reward_spec.get("ground_truth")

    def __repr__(self) -> str:
        """The fields that are set, with long values shortened and images replaced by names."""
        from treetune.chat.images import name_images, shorten  # only needed for display

        asked = name_images(self.prompt[-1].get("content")) if isinstance(self.prompt, list) and self.prompt else None
        shown: dict[str, Any] = {"idx": self.idx, "prompt": asked or self.prompt, "ground_truth": self.ground_truth}
        shown |= {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("idx", "prompt")}
        shown["reward_spec"] = {key: value for key, value in self.reward_spec.items() if key != "ground_truth"}
        fields = [f"{name}={shorten(value)}" for name, value in shown.items() if value not in (None, "", [], {}, -1)]
        return f"{type(self).__name__}({', '.join(fields)})"

    @property
    def uid(self) -> str:
        """A hash of the problem. It is stable under filtering, reordering and changes of file format. Equal problems
        share it, so anything keyed by uid also counts occurrences."""
        own = own_values(self)
        return uid_of(
            self.messages, self.reward_spec, self.env_class, {**own, "tools": self.tools} if self.tools else own
        )


class ForeignTask(Task, frozen=True, kw_only=True):
    """A task of an unknown class. The fields of its subclass are in `own`, and can be read as attributes."""

    own: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.own[name]
        except KeyError:
            raise AttributeError(f"the task has no {name!r}") from None


@lru_cache(maxsize=1024)
def own_fields(task_type: type[Task]) -> tuple[str, ...]:
    """The names of the fields that a subclass adds."""
    return tuple(name for name in task_type.__struct_fields__ if name not in Task.__struct_fields__)


def own_values(task: Task) -> dict[str, Any]:
    """The fields that the task's subclass adds, with their values."""
    if isinstance(task, ForeignTask):
        return task.own
    return {name: getattr(task, name) for name in own_fields(type(task))}


def fill_form(form: Any, truth: Any) -> str | None:
    """A ground truth, or the first of several, in the form of an answer (an `AnswerFormat`); None without either."""
    first = next(iter(truth), None) if isinstance(truth, list) else truth
    return None if form is None or first is None else str(form.fill(str(first)))


UID_VERSION = 1
"""The version of the uid's definition. Built files hold uids, and their keys include this version."""
_SIZE = 16
"""The size of the hash in bytes."""
UID_LENGTH = 2 * _SIZE


def uid_of(
    prompt: Sequence[Message], reward_spec: Mapping[str, Any], env_class: str | None, own: Mapping[str, Any] = {}
) -> str:
    """A hash of what defines a problem; `own` are the fields of a subclass."""
    problem = {**own, "prompt": prompt, "reward_spec": reward_spec}
    if env_class is not None:  # leaving it out keeps the fast path of `canonical`
        problem["env_class"] = env_class
    return hashlib.blake2b(canonical(problem), digest_size=_SIZE).hexdigest()


def uids_of_texts(
    texts: Sequence[str],
    truths: Sequence[Any] | None,
    system_prompt: str | None,
    env_class: str | None,
    method: str,
    tools: Sequence[str] = (),
) -> list[str]:
    """`uid_of` for tasks that each have one user message, after an optional system prompt, and one ground truth."""
    # Only the text and the ground truth differ, so the JSON around them is encoded once.
    text_mark, truth_mark = "\x00text", "\x00truth"
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    spec = {"ground_truth": truth_mark, "method": method} if truths is not None else {}
    prompt = [*system, {"role": "user", "content": text_mark}]
    offered = {"tools": tools} if tools else {}
    around = canonical({"prompt": prompt, "env_class": env_class, "reward_spec": spec, **offered})
    encode, blake = msgspec.json.Encoder().encode, hashlib.blake2b
    head, _, tail = around.rpartition(encode(text_mark))
    if truths is None:
        return [blake(head + encode(text) + tail, digest_size=_SIZE).hexdigest() for text in texts]
    middle, _, tail = tail.rpartition(encode(truth_mark))
    encoded = [encode(truth) if isinstance(truth, str) else canonical(truth) for truth in truths]
    return [
        blake(head + encode(text) + middle + truth + tail, digest_size=_SIZE).hexdigest()
        for text, truth in zip(texts, encoded, strict=True)
    ]

"""Several tasksets as one. `Mixture` draws by weight and never ends; `Union` has every task of its sources once.

    Mixture.of([Arithmetic(), ReverseText()], weights=[3, 1]).at(1000)

A draw is a pure function of its index: which source, and which of that source's own draws. Finite sources loop
over epochs, each a pass over all their tasks; infinite ones are drawn lazily. Each source comes in the order that it
has alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self

import msgspec

from treetune import order
from treetune.errors import ConfigError, Faults, TasksetError, UsageError, check_all, gather_faults
from treetune.order import Interleave, Spread
from treetune.task import Task
from treetune.taskset import ConfigT, Taskset, TasksetConfig


class UnionConfig(TasksetConfig, frozen=True, kw_only=True):
    sources: list[dict[str, Any]] = []
    """The tasksets, each with its `id` and own keys."""


class MixtureConfig(TasksetConfig, frozen=True, kw_only=True):
    sources: list[dict[str, Any]] = []
    """The tasksets, each with its `id`, own keys, and `weight` (1 unless given). Where the mixture has `shuffle`, a
    source without one (an infinite one: without `seed` too) is shuffled by a seed of its own, derived from it."""


def ask_owner(method: str) -> Any:
    """A method of a taskset that another one answers: the one to which `_owner` says that its task belongs."""

    def ask(self: Any, task: Task, *args: Any) -> Any:
        owner, inner = self._owner(task)
        return getattr(owner, method)(inner, *args)

    return ask


class _Sources(Taskset[Task, ConfigT]):
    """What both have in common: a task belongs to one source, found from its index, and that source answers."""

    sources: Sequence[Taskset[Any, Any]]

    def place(self, index: int) -> tuple[int, int]:
        """The source of the task at `index`, and its position there."""
        raise NotImplementedError

    def task_at(self, index: int) -> Task:
        source, position = self.place(index)
        task: Task = self.sources[source][position]
        return task

    def _set_position(self, task: Task, position: int) -> Task:
        # The source has checked its own type already.
        return msgspec.structs.replace(task, idx=position)

    def _owner(self, task: Task) -> tuple[Taskset[Any, Any], Task]:
        source, position = self.place(task.idx)
        return self.sources[source], msgspec.structs.replace(task, idx=position)

    type_of = ask_owner("type_of")
    validate = ask_owner("validate")
    reward = ask_owner("reward")
    gold = ask_owner("gold")
    environment = ask_owner("environment")
    score_group = ask_owner("score_group")
    scores_group_of = ask_owner("scores_group_of")

    @property
    def scores_groups(self) -> bool:
        return any(source.scores_groups for source in self.sources)

    @property
    def random_access(self) -> bool:
        return all(source.random_access for source in self.sources)


def owner_of(taskset: Taskset[Any, Any], task: Task) -> tuple[Taskset[Any, Any], Task]:
    """The taskset that a task of a mixture or union comes from, and the task as it is there."""
    while isinstance(taskset, _Sources):
        taskset, task = taskset._owner(task)
    return taskset, task


class Mixture(_Sources[MixtureConfig]):
    """Several tasksets drawn by weight, without end."""

    INFINITE = True

    def __init__(
        self,
        config: MixtureConfig | None = None,
        sources: Sequence[Taskset[Any, Any]] | None = None,
        weights: Sequence[float] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(config)
        nodes = [dict(node) for node in self.config.sources]
        own_weights = [_weight(node.pop("weight", None), number) for number, node in enumerate(nodes)]
        if self.config.shuffle is not None:
            seed = self.seed
            nodes = [_shuffle_source(node, number, seed) for number, node in enumerate(nodes)]
        self.sources = _build_sources(nodes) if sources is None else sources
        self.weights = list(own_weights if weights is None else weights)
        if len(self.sources) != len(self.weights):
            raise UsageError(f"{len(self.sources)} sources but {len(self.weights)} weights")
        self._interleave = Interleave(self.weights, seed)

    @classmethod
    def of(cls, sources: Sequence[Taskset[Any, Any]], weights: Sequence[float], seed: int | None = None) -> Self:
        """A mixture of tasksets that exist already, each with its own config."""
        return cls(None, sources, weights, seed)

    def place(self, index: int) -> tuple[int, int]:
        number, within = self._interleave.at(index)
        source = self.sources[number]
        return number, source.position_at(within, source._size())

    def source(self) -> str | None:
        return f"weights {self.weights}"


class Union(_Sources[UnionConfig]):
    """Several finite tasksets as one, every task once; the first of them are some of each, in proportion."""

    def __init__(self, config: UnionConfig | None = None, sources: Sequence[Taskset[Any, Any]] | None = None) -> None:
        super().__init__(config)
        self.sources = _build_sources(self.config.sources) if sources is None else sources
        endless = [source.name for source in self.sources if source.INFINITE]
        if endless:
            raise UsageError(f"{', '.join(endless)} never ends", remedy="use a mixture, with a weight for each source")
        self._sizes = [source._count() or 0 for source in self.sources]
        self._starts = [0, *accumulate(self._sizes)]
        self._spread = Spread(self._sizes)

    @classmethod
    def of(cls, sources: Sequence[Taskset[Any, Any]]) -> Self:
        """A union of tasksets that exist already."""
        return cls(None, sources)

    def count(self) -> int:
        return self._starts[-1]

    def place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.count():
            raise TasksetError(f"{self.name} has no task {index}", remedy="its sources may have changed")
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def position_at(self, index: int, count: int | None) -> int:
        """In each epoch the sources come in proportion, so that the first hundred tasks are some of each; each source
        in the order that it has alone. A shuffle of the union itself mixes them all."""
        if self.order_seed is not None or self.in_load_order:
            return super().position_at(index, count)
        epoch, offset = divmod(index, self.count())
        number, within = self._spread.at(offset)
        size = self._sizes[number]
        return self._starts[number] + self.sources[number].position_at(epoch * size + within, size)

    @property
    def in_load_order(self) -> bool:
        return self.order_seed is None and len(self.sources) == 1 and self.sources[0].in_load_order


def _shuffle_source(node: dict[str, Any], number: int, seed: int) -> dict[str, Any]:
    """The node with a shuffle of its own. Two sources never share a seed: they might be the same taskset."""
    from treetune.target import taskset_class

    cls = taskset_class(node)
    if "shuffle" in node or cls is None or (cls.INFINITE and "seed" in node):
        return node
    own = int.from_bytes(order.stream_key(seed, f"source {number}", 0)[:4], "little") >> 1
    return {**node, "shuffle": {"seed": own}}


def _build_sources(nodes: list[dict[str, Any]]) -> list[Taskset[Any, Any]]:
    from treetune.target import build_taskset

    if not nodes:
        raise ConfigError([("taskset.sources", "is required: at least one taskset")])
    faults: Faults = []
    sources = []
    for number, node in enumerate(nodes):
        with gather_faults(faults):
            sources.append(build_taskset(node, path=f"taskset.sources[{number}]"))
    if faults:
        raise ConfigError(faults)
    check_all((f"taskset.sources[{number}]", source.check_source) for number, source in enumerate(sources))
    return sources


def _weight(value: Any, number: int) -> float:
    value = 1 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError([(f"taskset.sources[{number}].weight", f"expected a number, got {value!r}")])
    return float(value)

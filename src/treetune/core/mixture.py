"""Combines several tasksets. `Mixture` draws by weight and never ends; `Union` has each task of its sources once;
`Selection` has some tasks of each.

    Mixture.of([Arithmetic(), ReverseText()], weights=[3, 1]).at(1000)

A draw is a pure function of its index, which gives the source and the position among that source's own draws. Finite
sources repeat in epochs, each a pass over all their tasks; infinite ones are drawn lazily. Each source keeps the order
it has alone. `ByParameter` is one taskset with several values of one of its keys, drawn by their pass rates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Self

import msgspec

from treetune.core import order
from treetune.core.curriculum import Learning, SourceCurriculum, split_position
from treetune.core.draws import ConfigT
from treetune.core.from_config import build_taskset, taskset_class
from treetune.core.interleave import Interleave, Spread
from treetune.core.profile import PRIOR, ProfileConfig, Rates, hashable
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import Tool, ToolSource
from treetune.errors import ConfigError, Faults, TasksetError, UsageError, check_all, gather_faults
from treetune.system.digest import digest


class UnionConfig(TasksetConfig, frozen=True, kw_only=True):
    sources: list[dict[str, Any]] = []
    """The tasksets, each with its `id` and own keys."""


class MixtureConfig(TasksetConfig, frozen=True, kw_only=True):
    sources: list[dict[str, Any]] = []
    """The tasksets, each with its `id`, own keys, and `weight` (1 by default). If the mixture has `shuffle`, each
    source without one (and, if infinite, without `seed`) is shuffled by its own seed, derived from the mixture's
    seed."""


def ask_owner(method: str) -> Any:
    """Make a taskset method that calls the same method of the taskset that owns the task, as given by `_owner`."""

    def ask(self: Any, task: Task, *args: Any) -> Any:
        owner, inner = self._owner(task)
        return getattr(owner, method)(inner, *args)

    return ask


class _Sources(Taskset[Task, ConfigT]):
    """The base of `Mixture` and `Union`: a task belongs to one source, found by its index, which handles the task."""

    sources: Sequence[Taskset[Any, Any]]

    def place(self, index: int) -> tuple[int, int]:
        """The source of the task at `index`, and its position there."""
        raise NotImplementedError

    def task_at(self, index: int) -> Task:
        source, position = self.place(index)
        task: Task = self.sources[source][position]
        return task

    def _set_position(self, task: Task, position: int) -> Task:
        # The source has already checked the task's type.
        return msgspec.structs.replace(task, idx=position)

    def _owner(self, task: Task) -> tuple[Taskset[Any, Any], Task]:
        source, position = self.place(task.idx)
        return self.sources[source], msgspec.structs.replace(task, idx=position)

    type_of = ask_owner("type_of")
    validate = ask_owner("validate")
    reward = ask_owner("reward")
    gold = ask_owner("gold")
    answer_format = ask_owner("answer_format")
    environment = ask_owner("environment")
    contract_of = ask_owner("contract_of")
    score_group = ask_owner("score_group")
    scores_group_of = ask_owner("scores_group_of")
    scores_alone = ask_owner("scores_alone")

    def offers_tools(self, task: Task) -> bool:
        owner, inner = self._owner(task)
        return bool(self.config.tools) or owner.offers_tools(inner)

    def tools_for(self, task: Task) -> list[Tool | ToolSource]:
        # The tools in the mixture's own config are offered in the tasks of every source.
        owner, inner = self._owner(task)
        return [*super().tools_for(msgspec.structs.replace(task, tools=[])), *owner.tools_for(inner)]

    @property
    def scores_groups(self) -> bool:
        return any(source.scores_groups for source in self.sources)

    @property
    def random_access(self) -> bool:
        return all(source.random_access for source in self.sources)

    @property
    def sequential(self) -> bool:
        return any(source.sequential for source in self.sources)


def owner_of(taskset: Taskset[Any, Any], task: Task) -> tuple[Taskset[Any, Any], Task]:
    """The taskset that a task of a mixture or union comes from, and the task in the form of that taskset."""
    while isinstance(taskset, _Sources):
        taskset, task = taskset._owner(task)
    return taskset, task


def is_made_alone(taskset: Taskset[Any, Any], position: int) -> bool:
    """Whether the task at a position can be made alone; if not, its source keeps all of its tasks in memory."""
    while isinstance(taskset, _Sources):
        number, position = taskset.place(position)
        taskset = taskset.sources[number]
    return taskset.random_access


def parts_of(taskset: Taskset[Any, Any]) -> Iterator[Taskset[Any, Any]]:
    """Yield the taskset and all sources in it."""
    yield taskset
    for source in getattr(taskset, "sources", []):
        yield from parts_of(source)


class Mixture(_Sources[MixtureConfig]):
    """An endless taskset that draws from several tasksets by weight."""

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
        self.sources = _build_sources(nodes, elsewhere=["weight"]) if sources is None else sources
        self.weights = list(own_weights if weights is None else weights)
        if len(self.sources) != len(self.weights):
            raise UsageError(f"{len(self.sources)} sources but {len(self.weights)} weights")
        self._interleave = Interleave(self.weights, seed)
        self._seed = seed
        self._by_position = _learns(self) or self.config.profile is not None
        """Whether `idx` encodes the source's own position, because shares follow pass rates or a source learns."""

    @classmethod
    def of(cls, sources: Sequence[Taskset[Any, Any]], weights: Sequence[float], seed: int | None = None) -> Self:
        """Make a mixture of tasksets that already exist, each with its own config."""
        return cls(None, sources, weights, seed)

    def place(self, index: int) -> tuple[int, int]:
        if self._by_position:
            return split_position(index, len(self.sources))
        number, within = self._interleave.at(index)
        source = self.sources[number]
        return number, source.position_at(within, source._size())

    @cached_property
    def _curriculum(self) -> SourceCurriculum | None:  # type: ignore[override]
        if not self._by_position:
            return None
        profile = self.config.profile
        _refuse_generators(self)
        rates = (
            [PRIOR] * len(self.sources) if profile is None else _rates_of(self.sources, "source", profile, self.name)
        )
        return SourceCurriculum(self.sources, self.weights, self._seed, profile, rates)

    @property
    def in_load_order(self) -> bool:
        return not self._by_position

    def learning(self) -> Learning | None:
        return self._curriculum.learn() if self._curriculum is not None and _learns(self) else None

    def source(self) -> str | None:
        return f"weights {self.weights}"


class Union(_Sources[UnionConfig]):
    """Several finite tasksets as one, with every task once. The first tasks come from all sources in proportion."""

    def __init__(self, config: UnionConfig | None = None, sources: Sequence[Taskset[Any, Any]] | None = None) -> None:
        super().__init__(config)
        self.sources = _build_sources(self.config.sources) if sources is None else sources
        endless = [source.name for source in self.sources if source.endless]
        if endless:
            raise UsageError(f"{', '.join(endless)} never ends", remedy="use a mixture, with a weight for each source")
        # Per source: the number of its tasks, and the number of tasks in an epoch.
        self._starts = [0, *accumulate(source._count() or 0 for source in self.sources)]
        self._sizes = [(source._size() if source._count() else 0) or 0 for source in self.sources]
        self._ends = list(accumulate(self._sizes))
        self._spread = Spread(self._sizes)

    @classmethod
    def of(cls, sources: Sequence[Taskset[Any, Any]]) -> Self:
        """Make a union of tasksets that already exist."""
        return cls(None, sources)

    def count(self) -> int:
        return self._starts[-1]

    def place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.count():
            raise TasksetError(f"{self.name} has no task {index}", remedy="its sources may have changed")
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def position_at(self, index: int, size: int | None) -> int:
        """In each epoch the sources come in proportion, so the first hundred tasks include some of each. Each source
        keeps the order it has alone. A shuffle of the union itself mixes all tasks."""
        if self.config.profile is not None or self.in_load_order:
            return super().position_at(index, size)
        total = sum(self._sizes)
        if self.order_seed is not None:
            offset = order.locate(index, total, self.order_seed)[1]
            number = bisect_right(self._ends, offset)
            epoch, within = 0, offset - (self._ends[number] - self._sizes[number])
        else:
            epoch, offset = divmod(index, total)
            number, within = self._spread.at(offset)
        own = self._sizes[number]
        return self._starts[number] + self.sources[number].position_at(epoch * own + within, own)

    def list_uids(self) -> Iterable[tuple[str, str]]:
        return chain.from_iterable(source.list_uids() for source in self.sources)

    def _size(self) -> int | None:
        size = super()._size()
        return size if self.config.profile is not None else sum(self._sizes)

    @property
    def in_load_order(self) -> bool:
        return super().in_load_order and len(self.sources) == 1 and self.sources[0].in_load_order


class ByParameter(_Sources[TasksetConfig]):
    """An endless taskset with several values of one of its keys, such as `level`; each value is a source."""

    INFINITE = True

    def __init__(self, config: TasksetConfig, sources: Sequence[Taskset[Any, Any]], name: str) -> None:
        """`config` is the taskset's config; each of the `sources` has the same config with one of the values."""
        self.config_type = type(config)  # type: ignore[misc]
        super().__init__(config)
        assert config.profile is not None
        self.profile, self.parameter = config.profile, str(config.profile.parameter)
        self.sources, self.name = sources, name

    def place(self, index: int) -> tuple[int, int]:
        return split_position(index, len(self.sources))

    def position_at(self, index: int, size: int | None) -> int:
        if self.profile.path is None and self.profile.schedule is None:
            return index  # no pass rates are known: the values take turns
        return super().position_at(index, size)

    def value_of(self, task: Task) -> Any:
        """The value of the parameter that a task was made with."""
        return self.profile.values[self.place(task.idx)[0]]

    @cached_property
    def _curriculum(self) -> SourceCurriculum:  # type: ignore[override]
        _refuse_generators(self)
        values = self.profile.values
        rates = (
            _rates_of(values, self.parameter, self.profile, self.name) if self.profile.path else [PRIOR] * len(values)
        )
        return SourceCurriculum(self.sources, [1.0] * len(values), self._order_seed, self.profile, rates)

    @property
    def _order_seed(self) -> int | None:
        return None if self.config.shuffle is None else self.config.shuffle.seed

    @property
    def in_load_order(self) -> bool:
        return False


class SelectionConfig(TasksetConfig, frozen=True, kw_only=True):
    selected: str = ""
    """A hash of the selected tasks."""


class Selection(_Sources[SelectionConfig]):
    """Some tasks of one or several tasksets, by their indices in the order of each source, one source after the
    other."""

    def __init__(self, parts: Sequence[tuple[Taskset[Any, Any], Sequence[int]]]) -> None:
        self.sources, self._indices = zip(*parts, strict=True)
        self._ends = list(accumulate(map(len, self._indices)))
        super().__init__(SelectionConfig(selected=digest([list(indices) for indices in self._indices])))
        self.name = "+".join(dict.fromkeys(source.name for source in self.sources))

    def count(self) -> int:
        return self._ends[-1]

    def place(self, index: int) -> tuple[int, int]:
        number = bisect_right(self._ends, index)
        if number == len(self._ends):
            raise TasksetError(f"{self.name} has no task {index}", remedy="its sources may have changed")
        indices, source = self._indices[number], self.sources[number]
        return number, source.position_at(indices[index - self._ends[number] + len(indices)], source._size())


def _learns(taskset: Taskset[Any, Any]) -> bool:
    """Whether the taskset or one of its sources has pass rates that change."""
    return any(part.config.profile is not None and part.config.profile.online for part in parts_of(taskset))


def _refuse_generators(taskset: _Sources[Any]) -> None:
    if named := [source.name for source in taskset.sources if source.sequential]:
        problem = (
            f"{', '.join(named)} is only a generator, but the shares of {taskset.name} follow pass rates, which needs "
            "tasks by index"
        )
        raise UsageError(problem, remedy="write task_at(index)")


def _rates_of(arms: Sequence[Any], key: str, profile: ProfileConfig, name: str) -> list[float]:
    """The pass rate of each source or value; lines of the profile name it under `key`."""
    rates = Rates(profile)
    known = rates.by(key)
    names = [arm.name if isinstance(arm, Taskset) else hashable(arm) for arm in arms]
    found = [known.get(name, rates.unrated) for name in names]
    if missing := [name for name, rate in zip(names, found, strict=True) if rate is None]:
        listing = ", ".join(map(str, known)) or "none"
        raise UsageError(
            f"{profile.path} has no pass rate for {key} {', '.join(map(str, missing))} of {name}; it has: {listing}",
            remedy="profile them, or give them a rate with unrated: 0.5",
        )
    return [rate for rate in found if rate is not None]


def _shuffle_source(node: dict[str, Any], number: int, seed: int) -> dict[str, Any]:
    """Give the node its own shuffle. Two sources never share a seed, because they may be the same taskset."""
    cls = taskset_class(node)
    if "shuffle" in node or cls is None or (cls.INFINITE and "seed" in node):
        return node
    return {**node, "shuffle": {"seed": order.derive_seed(seed, f"source {number}")}}


def _build_sources(nodes: list[dict[str, Any]], elsewhere: Sequence[str] = ()) -> list[Taskset[Any, Any]]:
    if not nodes:
        raise ConfigError([("taskset.sources", "is required: at least one taskset")])
    faults: Faults = []
    sources = []
    for number, node in enumerate(nodes):
        with gather_faults(faults):
            sources.append(build_taskset(node, path=f"taskset.sources[{number}]", elsewhere=elsewhere))
    if faults:
        raise ConfigError(faults)
    check_all((f"taskset.sources[{number}]", source.check_source) for number, source in enumerate(sources))
    return sources


def _weight(value: Any, number: int) -> float:
    value = 1 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError([(f"taskset.sources[{number}].weight", f"expected a number, got {value!r}")])
    return float(value)

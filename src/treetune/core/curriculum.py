"""The draw order of a taskset with a profile: which tasks are drawn, how often, and how observed rewards change that.

    curriculum = TaskCurriculum(config.profile, taskset.list_uids(), seed=0, name="sums")
    curriculum.position_at(17)              # a pure function of the profile and the index
    learning = curriculum.learn()           # the same with pass rates that change: draw, observe, state, restore

Tasks with the same pass rate (and source) form an arm. Every task of an arm is drawn once before any is drawn again;
with a schedule, "once an epoch" means such a pass. `SourceCurriculum` does the same for the sources of a mixture.
"""

from __future__ import annotations

import copy
import warnings
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

from treetune.core import order
from treetune.core.interleave import Credits, Staged, normalise
from treetune.core.profile import OUTSIDE, SOLVED, UNRATED, ProfileConfig, Rates, Schedule
from treetune.core.task import Task
from treetune.errors import ConfigError, EmptyTasksetError, UsageError, did_you_mean

SCALE = 65_520
"""Changing pass rates are stored in units of 1/65520: two bytes each, exact for rates of 8, 10 and 16 rollouts."""


class Learning(Protocol):
    """Draws tasks for one stream while pass rates change. Its state is part of the stream's state."""

    def draw(self, index: int) -> int:
        """Return the position of the task for draw number `index`."""
        ...

    def observe(self, task: Task, reward: float) -> None:
        """Record the reward of a rollout of a task."""
        ...

    def state(self) -> Any:
        """Return a small plain value that `restore` resumes from."""
        ...

    def restore(self, state: Any) -> None: ...


class Curriculum(Protocol):
    size: int | None
    """The number of draws in an epoch; None if the order is endless."""

    def position_at(self, index: int) -> int: ...
    def learn(self) -> Learning: ...


class TaskCurriculum:
    """The curriculum of a finite taskset, with a pass rate for each task."""

    def __init__(self, config: ProfileConfig, tasks: Iterable[tuple[str, str]], seed: int | None, name: str) -> None:
        """`tasks` are the uid and source of each task, by position."""
        rates = Rates(config)
        self.dropped: Counter[str] = Counter()
        self.config, self.seed = config, seed
        self.positions = array("q")
        self.rates = array("d")
        self.sources: list[str] = []
        """The position, pass rate and source of each task that is kept."""
        for position, (uid, source) in enumerate(tasks):
            rate = rates.of(uid)
            if rate is None or not config.keeps(rate):
                self.dropped[UNRATED if rate is None else OUTSIDE] += 1
                continue
            self.positions.append(position)
            self.rates.append(rate)
            self.sources.append(source)
        if not self.positions:
            raise _explain_empty(config, self.dropped, name)
        if unrated := self.dropped[UNRATED]:
            problem = f"{unrated} of {len(self.positions) + self.dropped.total()} tasks of {name} have no pass rate"
            warnings.warn(f"{problem} in {config.path} and are left out; unrated: 0.5 keeps them", stacklevel=2)
        self.size = len(self.positions) if config.schedule is None else None
        if config.schedule is not None:
            self.arms = _Arms(config.schedule, config.shares, sorted(set(self.sources)))
            self._members: list[list[int]] = [[] for _ in range(self.arms.count)]
            for number, (rate, source) in enumerate(zip(self.rates, self.sources, strict=True)):
                self._members[self.arms.of(source, rate)].append(number)
            self._seeds = [
                None if seed is None else order.derive_seed(seed, f"arm {arm}") for arm in range(self.arms.count)
            ]
            full = [bool(members) for members in self._members]
            if not any(self.arms.weights(0, full)):
                problem = f"no task of {name} has a pass rate that the schedule draws"
                raise UsageError(problem, remedy="give another pool a weight, or profile more tasks")
            self._staged = Staged(config.schedule.starts(), lambda stage: self.arms.shares(stage, full), seed)

    def position_at(self, index: int) -> int:
        if self.size is not None:
            return self.positions[order.locate(index, self.size, self.seed)[1]]
        arm, within = self._staged.at(index)
        members, seed = self._members[arm], self._seeds[arm]
        return self.positions[members[order.locate(within, len(members), seed)[1]]]

    @cached_property
    def _untaught(self) -> _LearnTasks:
        return _LearnTasks(self)

    def learn(self) -> Learning:
        return self._untaught.copy()


def _explain_empty(config: ProfileConfig, dropped: Counter[str], name: str) -> EmptyTasksetError:
    if dropped[UNRATED] == dropped.total():
        return EmptyTasksetError(
            f"{config.path} has no pass rate for any task of {name}",
            remedy="profile this taskset (a changed prompt is another task), or keep them with unrated: 0.5",
        )
    reasons = ", ".join(f"{count} ({reason})" for reason, count in dropped.items())
    return EmptyTasksetError(f"the profile drops every task of {name}: {reasons}", remedy="widen its bounds")


class _Arms:
    """The arms of a finite taskset: one for each distinct pass rate and each source with a share."""

    def __init__(self, schedule: Schedule, shares: dict[str, float], sources: Sequence[str]) -> None:
        self.schedule = schedule
        if shares:
            problems = [f"{name!r} has no tasks{did_you_mean(name, sources)}" for name in shares if name not in sources]
            problems += [f"{name!r} has no share" for name in sources if name not in shares]
            if problems:
                raise ConfigError([("profile.shares", problem) for problem in problems])
        self._shares = [shares[source] for source in sources] if shares else [1.0]
        self._groups = {source: number for number, source in enumerate(sources)} if shares else {}
        self._bins = schedule.bin_of(1.0) + 1
        self.count = len(self._shares) * self._bins

    def of(self, source: str, rate: float) -> int:
        return self._groups.get(source, 0) * self._bins + self.schedule.bin_of(rate)

    def weights(self, stage: int, full: Sequence[bool]) -> list[float]:
        """The weight of each arm under the schedule; 0 if the arm has no tasks."""
        return [self.schedule.weight(arm % self._bins, stage) if full[arm] else 0.0 for arm in range(self.count)]

    def shares(self, stage: int, full: Sequence[bool]) -> list[float]:
        """The share of each arm, scaled so that each source gets its configured share."""
        weights = self.weights(stage, full)
        groups = []
        for group, share in enumerate(self._shares):
            part = slice(group * self._bins, (group + 1) * self._bins)
            if not any(weights[part]) and any(full[part]):
                weights[part] = [float(one) for one in full[part]]  # all weights are 0: give its arms equal weights
            total = sum(weights[part])
            groups += [share * weight / total if total else 0.0 for weight in weights[part]]
        return normalise(groups)


class _LearnTasks:
    """Changing pass rates, by task. An arm draws its tasks by rank, and inserts new tasks by rank."""

    def __init__(self, curriculum: TaskCurriculum) -> None:
        self._curriculum, self._arms = curriculum, curriculum.arms
        schedule = curriculum.config.schedule
        assert schedule is not None
        self._step = curriculum.config.online or 0.0
        self._starts = schedule.starts()
        self._clear()
        self._rates = array("H", (round(rate * SCALE) for rate in curriculum.rates))
        self._members = self._sort_tasks()

    def _clear(self) -> None:
        self._credits = Credits(self._arms.count)
        self._passes = [0] * self._arms.count
        """How many passes through each arm are complete."""
        self._last = [-1] * self._arms.count
        """The rank of the last task drawn from each arm."""
        self._shares: dict[int, list[float]] = {}
        """The shares of the arms in the current stage."""

    def _sort_tasks(self) -> list[list[tuple[int, int]]]:
        """The rank and number of each task, by arm."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self._arms.count)]
        for number in range(len(self._rates)):
            if (arm := self._arm(number)) is not None:
                found[arm].append((self._rank(arm, number), number))
        for members in found:
            members.sort()
        return found

    def copy(self) -> _LearnTasks:
        """A copy for another stream; sorting many tasks is slow."""
        other = copy.copy(self)
        other._clear()
        other._rates, other._members = self._rates[:], [members[:] for members in self._members]
        return other

    def _arm(self, number: int) -> int | None:
        """The arm of a task; None if the task is solved and solved tasks are dropped."""
        rate = self._rates[number] / SCALE
        if self._curriculum.config.drop_solved and rate >= SOLVED:
            return None
        return self._arms.of(self._curriculum.sources[number], rate)

    def _rank(self, arm: int, number: int) -> int:
        """The rank of a task in the current pass through an arm; load order without a seed."""
        seed = self._curriculum.seed
        return number if seed is None else order.scramble(number, seed, self._passes[arm])

    def draw(self, index: int) -> int:
        if not any(self._members):  # all tasks are solved: draw by the initial pass rates
            return self._curriculum.position_at(index)
        stage = bisect_right(self._starts, index) - 1
        if stage not in self._shares:
            self._shares = {stage: self._arms.shares(stage, [bool(members) for members in self._members])}
        arm = self._credits.draw(self._shares[stage])
        members = self._members[arm]
        place = bisect_right(members, (self._last[arm], len(self._rates)))
        if place == len(members):
            self._passes[arm] += 1
            members[:] = sorted((self._rank(arm, number), number) for _, number in members)
            place = 0
        self._last[arm], number = members[place]
        return self._curriculum.positions[number]

    def observe(self, task: Task, reward: float) -> None:
        number = bisect_left(self._curriculum.positions, task.idx)
        if number == len(self._rates) or self._curriculum.positions[number] != task.idx:
            return  # a task that the profile leaves out, drawn by its index
        before = self._arm(number)
        self._rates[number] = move(self._rates[number], reward, self._step)
        after = self._arm(number)
        if before == after:
            return
        if before is not None:
            members = self._members[before]
            del members[bisect_left(members, (self._rank(before, number), number))]
            self._shares = self._shares if members else {}  # shares change if an arm becomes empty
        if after is not None:
            members = self._members[after]
            insort(members, (self._rank(after, number), number))
            self._shares = self._shares if len(members) > 1 else {}

    def state(self) -> Any:
        used = [arm for arm in range(self._arms.count) if self._last[arm] >= 0 or self._credits.values[arm]]
        drawn = [[arm, self._credits.values[arm], self._passes[arm], self._last[arm]] for arm in used]
        return {"rates": _to_bytes(self._rates), "drawn": drawn}

    def restore(self, state: Any) -> None:
        kept = read_state(state, _TasksState)
        rates = _from_bytes(kept.rates)
        fits = len(rates) == len(self._rates) and max(rates) <= SCALE
        if not fits or any(not 0 <= entry[0] < self._arms.count for entry in kept.drawn):
            raise UsageError("the state of a curriculum does not fit this taskset")
        self._clear()
        for arm, credit, passes, last in kept.drawn:
            self._credits.values[arm], self._passes[arm], self._last[arm] = credit, passes, last
        self._rates = rates
        self._members = self._sort_tasks()


class _TasksState(msgspec.Struct):
    rates: bytes
    drawn: list[tuple[int, float, int, int]]


def read_state(state: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"the state of a curriculum cannot be read: {error}") from None


def move(rate: int, reward: float, step: float) -> int:
    """Move a rate in units of `SCALE` towards a reward, which is clamped to 0..1."""
    return round(rate + step * (min(1.0, max(0.0, reward)) * SCALE - rate))


def _to_bytes(rates: array[int]) -> bytes:
    """Little-endian on every platform."""
    if _BIG_ENDIAN:
        rates = array("H", rates)
        rates.byteswap()
    return rates.tobytes()


def _from_bytes(data: bytes) -> array[int]:
    rates = array("H")
    rates.frombytes(data[: len(data) // 2 * 2])
    if _BIG_ENDIAN:
        rates.byteswap()
    return rates


_BIG_ENDIAN = array("H", [1]).tobytes()[0] == 0


def join_position(number: int, position: int, count: int) -> int:
    """The position, counted over all sources, of the task at `position` in source `number`."""
    return position * count + number


def split_position(position: int, count: int) -> tuple[int, int]:
    """The number of the source, and the position in it."""
    within, number = divmod(position, count)
    return number, within


class Source(Protocol):
    """The interface of a source of draws; implemented by every `Taskset`."""

    def position_at(self, index: int, size: int | None) -> int: ...

    def learning(self) -> Learning | None: ...

    def _size(self) -> int | None: ...


class SourceCurriculum:
    """The curriculum of several sources: those of a mixture, or the values of a parameter. Each has a pass rate."""

    size = None

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        seed: int | None,
        config: ProfileConfig | None,
        rates: Sequence[float],
    ) -> None:
        """`rates` are the pass rates of the sources; without a schedule only the weights count."""
        self.sources, self.config, self.rates = sources, config, list(rates)
        self._weights = [
            weight if config is None or config.keeps(rate) else 0.0 for weight, rate in zip(weights, rates, strict=True)
        ]
        if not any(self._weights):
            raise EmptyTasksetError(
                "the profile leaves no source: every pass rate is outside", remedy="widen its bounds"
            )
        schedule = config.schedule if config is not None else None
        self.starts = schedule.starts() if schedule is not None else [0]
        self._staged = Staged(self.starts, lambda stage: self.shares(stage, self.rates), seed)

    def shares(self, stage: int, rates: Sequence[float]) -> list[float]:
        weights, config = self._weights, self.config
        if config is None or config.schedule is None:
            return normalise(weights)
        drawn = [not (config.drop_solved and rate >= SOLVED) for rate in rates]
        chances = [
            config.schedule.weight(config.schedule.bin_of(rate), stage) * on
            for rate, on in zip(rates, drawn, strict=True)
        ]
        both = [weight * chance for weight, chance in zip(weights, chances, strict=True)]
        return normalise(both if any(both) else weights)

    def position_at(self, index: int) -> int:
        number, within = self._staged.at(index)
        source = self.sources[number]
        return join_position(number, source.position_at(within, source._size()), len(self.sources))

    def learn(self) -> Learning:
        return _LearnSources(self)


class _LearnSources:
    """Shares that follow the pass rates of sources. Sources that learn on their own keep doing so."""

    def __init__(self, curriculum: SourceCurriculum) -> None:
        self._curriculum = curriculum
        self._step = curriculum.config.online if curriculum.config is not None else None
        self._credits = Credits(len(curriculum.sources))
        self._drawn = [0] * len(curriculum.sources)
        self._rates = list(curriculum.rates)
        self._inner = [source.learning() for source in curriculum.sources]

    def draw(self, index: int) -> int:
        curriculum = self._curriculum
        number = self._credits.draw(curriculum.shares(bisect_right(curriculum.starts, index) - 1, self._rates))
        within, inner, source = self._drawn[number], self._inner[number], curriculum.sources[number]
        self._drawn[number] += 1
        position = source.position_at(within, source._size()) if inner is None else inner.draw(within)
        return join_position(number, position, len(curriculum.sources))

    def observe(self, task: Task, reward: float) -> None:
        number, position = split_position(task.idx, len(self._drawn))
        if self._step is not None:
            self._rates[number] = move(round(self._rates[number] * SCALE), reward, self._step) / SCALE
        if (inner := self._inner[number]) is not None:
            inner.observe(msgspec.structs.replace(task, idx=position), reward)

    def state(self) -> Any:
        inner = [None if one is None else one.state() for one in self._inner]
        return {
            "credits": list(self._credits.values),
            "drawn": list(self._drawn),
            "rates": self._rates[:],
            "inner": inner,
        }

    def restore(self, state: Any) -> None:
        kept = read_state(state, _SourcesState)
        lengths = {len(kept.credits), len(kept.drawn), len(kept.rates), len(kept.inner)}
        if lengths != {len(self._drawn)} or any(not 0 <= rate <= 1 for rate in kept.rates) or min(kept.drawn) < 0:
            raise UsageError("the state of a curriculum does not fit this taskset")
        for inner, own in zip(self._inner, kept.inner, strict=True):
            if inner is not None and own is not None:
                inner.restore(own)
        self._credits.values, self._drawn, self._rates = kept.credits, kept.drawn, kept.rates


class _SourcesState(msgspec.Struct):
    credits: list[float]
    drawn: list[int]
    rates: list[float]
    inner: list[Any]

"""The order of several sources that have pass rates: the sources of a mixture, the values of a parameter.

    curriculum = SourceCurriculum(sources, weights=[3, 1], seed=0, config=profile, rates=[0.5, 0.9])
    curriculum.position_at(17)              # which source comes at an index, and which of its tasks

The share of a source is its weight times what the schedule says of its pass rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from treetune.core.curriculum.profile import SOLVED, ProfileConfig
from treetune.core.curriculum.schedule import Credits, Staged, normalise
from treetune.core.curriculum.tasks import SCALE, Learning, move, read_state
from treetune.core.task import Task
from treetune.errors import EmptyTasksetError, UsageError


def join_position(number: int, position: int, count: int) -> int:
    """The position in several sources of a task that is at a position in one of them."""
    return position * count + number


def split_position(position: int, count: int) -> tuple[int, int]:
    """The number of its source, and the position there."""
    within, number = divmod(position, count)
    return number, within


class Source(Protocol):
    """What is drawn from: every `Taskset`."""

    def position_at(self, index: int, size: int | None) -> int: ...

    def learning(self) -> Learning | None: ...

    def _size(self) -> int | None: ...


class SourceCurriculum:
    """Of several sources: a pass rate for each. The sources of a mixture, or the values of a parameter."""

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
    """Shares that move with the pass rates of sources; and each source that learns, learns here too."""

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

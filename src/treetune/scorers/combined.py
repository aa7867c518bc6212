"""Scorers that combine other scorers: `weighted` and `all_of`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from treetune.config.structs import convert
from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError
from treetune.scorers.scorer import Scorer


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    weight: float
    """The part's share of the reward."""
    scorer: Scorer
    """The scorer of this part."""
    name: str | None = None
    """The name in explanations and metrics; the kind by default."""

    @classmethod
    def read_config(cls, value: Any, path: str = "", raw: Mapping[str, str] | None = None) -> Part:
        if isinstance(value, Part):
            return value
        return convert(value, cls, path=path, raw=raw)


class Combination(Scorer, frozen=True):
    """The base of both combinations: each part scores the reply independently."""

    def combine(self, rewards: Sequence[float]) -> float:
        raise NotImplementedError

    def named(self) -> list[tuple[str, Scorer]]:
        raise NotImplementedError

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Any:
        scores = {name: scorer.score(answer, truth, task) for name, scorer in self.named()}
        if any(not isinstance(score, Score) and inspect.isawaitable(score) for score in scores.values()):
            return self._wait(scores)
        return self._join(scores)

    async def _wait(self, scores: dict[str, Any]) -> Score:
        return self._join(
            {name: await score if inspect.isawaitable(score) else score for name, score in scores.items()}
        )

    def _join(self, given: dict[str, Any]) -> Score:
        scores = {name: Score.of(score) for name, score in given.items()}
        why = "; ".join(f"{name} {score.reward:g}: {score.explanation}" for name, score in scores.items())
        metrics = {name: score.reward for name, score in scores.items()}
        reward = self.combine(list(metrics.values()))
        for score in scores.values():
            metrics |= score.metrics
        said = next((score.answer for score in scores.values() if score.answer is not None), None)
        return Score(reward, answer=said, explanation=why, metrics=metrics)

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        """The first gold reply of a part that gets the full reward from all parts."""
        for _, scorer in self.named():
            reply = scorer.gold(truth, task)
            if reply is not None and self._is_right(reply, truth, task):
                return reply
        return None

    def _is_right(self, reply: str, truth: Any, task: Task | None) -> bool:
        for _, scorer in self.named():
            score = scorer.score(reply, truth, task)
            if inspect.iscoroutine(score):
                score.close()  # cannot be awaited here
            elif Score.of(score).reward < 1:
                return False
        return True

    @property
    def calls_models(self) -> bool:
        return any(scorer.calls_models for _, scorer in self.named())

    def check(self) -> None:
        for _, scorer in self.named():
            scorer.check()

    def check_reachable(self) -> None:
        for _, scorer in self.named():
            scorer.check_reachable()

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        problems = (scorer.problem(truth, task) for _, scorer in self.named())
        return next((problem for problem in problems if problem is not None), None)

    def columns(self) -> list[str]:
        return [column for _, scorer in self.named() for column in scorer.columns()]


class Weighted(Combination, frozen=True, tag="weighted"):
    parts: list[Part]
    """The parts, each with its `weight` and `scorer`. The weights must sum to 1."""

    def __post_init__(self) -> None:
        _check_parts(self.parts, "parts", lambda part: part.scorer, self.answer)
        weights = [part.weight for part in self.parts]
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ConfigError([("parts", f"weights must be above 0, got {', '.join(f'{one:g}' for one in weights)}")])
        if not math.isclose(total := math.fsum(weights), 1, abs_tol=1e-6):
            raise ConfigError([("parts", f"the weights sum to {total:g}, not to 1")])

    def without_files(self) -> Weighted:
        parts = [msgspec.structs.replace(part, scorer=part.scorer.without_files()) for part in self.parts]
        return msgspec.structs.replace(self, parts=parts)

    def combine(self, rewards: Sequence[float]) -> float:
        return math.fsum(part.weight * reward for part, reward in zip(self.parts, rewards, strict=True))

    def named(self) -> list[tuple[str, Scorer]]:
        return _named([part.scorer for part in self.parts], [part.name for part in self.parts])


class AllOf(Combination, frozen=True, tag="all_of"):
    scorers: list[Scorer]
    """The scorers. The reward is the lowest of theirs, so all must accept the answer."""

    def __post_init__(self) -> None:
        _check_parts(self.scorers, "scorers", lambda scorer: scorer, self.answer)

    def without_files(self) -> AllOf:
        return msgspec.structs.replace(self, scorers=[scorer.without_files() for scorer in self.scorers])

    def combine(self, rewards: Sequence[float]) -> float:
        return min(rewards)

    def named(self) -> list[tuple[str, Scorer]]:
        return _named(self.scorers, [None] * len(self.scorers))


def _check_parts(parts: Sequence[Any], key: str, scorer_of: Callable[[Any], Any], place: Any) -> None:
    if not parts:
        raise ConfigError([(key, "there must be at least one")])
    if place is not None:
        raise ConfigError([("answer", "is a key of the parts: each part may read a different place")])
    if not all(isinstance(scorer_of(part), Scorer) for part in parts):
        raise ConfigError([(key, "expected scorers, such as includes()")])
    if any(scorer_of(part).scores_groups for part in parts):
        raise ConfigError([(key, "a judge that compares rollouts with each other cannot be one of several parts")])


def _named(scorers: Sequence[Scorer], names: Sequence[str | None]) -> list[tuple[str, Scorer]]:
    """Give each scorer a unique name."""
    found: dict[str, Scorer] = {}
    for scorer, given in zip(scorers, names, strict=True):
        name = given or str(scorer.__struct_config__.tag)
        number = 2
        while name in found:
            name, number = f"{given or scorer.__struct_config__.tag}_{number}", number + 1
        found[name] = scorer
    return list(found.items())

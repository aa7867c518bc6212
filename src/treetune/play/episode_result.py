"""An `EpisodeResult` is the result of an episode so far: rewards, answer, metrics.

result = EpisodeResult()
result.add(step)
result.reward                   # the sum over the steps
"""

from __future__ import annotations

import msgspec

from treetune.core.environment import Step
from treetune.core.score import finite, total
from treetune.core.trace import Judgement, Trace
from treetune.errors import EnvironmentFault


class EpisodeResult(msgspec.Struct):
    """The result of an episode so far, from the steps of its environment."""

    reward: float = 0.0
    """The sum over the steps."""
    rewards: list[float] = []
    """The reward of each step."""
    answer: str | None = None
    explanation: str | None = None
    success: bool | None = None
    """Whether the environment reports success; None if it does not say."""
    metrics: dict[str, float] = {}
    warnings: list[str] = []
    """Warnings for the author of the environment."""
    judgements: list[Judgement] = []
    """The judge calls made in its steps."""

    def add(self, step: Step) -> None:
        """Add a step. This is the only place that reads the `info` of steps."""
        info = step.info
        metrics = info.get("metrics") or {}
        if not isinstance(metrics, dict):
            raise EnvironmentFault(f"metrics must be a dict of numbers, got {metrics!r:.60}")
        for name, value in metrics.items():
            self.metrics[str(name)] = finite(value, f"metric {name!r}")
        if (answer := info.get("answer")) is not None:
            self.answer = str(answer)
        if (explanation := info.get("explanation")) is not None:
            self.explanation = str(explanation)
        if (success := info.get("success")) is not None:
            self.success = bool(success)
        if (warning := info.get("warning")) is not None:
            self.warnings.append(str(warning))
        if judgements := info.get("judgements"):  # from a step that was played elsewhere
            self.judgements += msgspec.convert(judgements, list[Judgement])
        self.pay(step.reward)

    def pay(self, reward: float) -> None:
        self.rewards.append(reward)
        self.reward = total(self.rewards)

    def write_to(self, trace: Trace) -> None:
        """Copy the result into the trace of the episode."""
        trace.answer, trace.explanation, trace.success = self.answer, self.explanation, self.success
        trace.metrics, trace.judgements = self.metrics, self.judgements

    def passed(self, threshold: float = 1.0) -> bool:
        """Whether it counts as solved: the environment's `success` if set, else a reward of at least `threshold`."""
        return self.success if self.success is not None else self.reward >= threshold

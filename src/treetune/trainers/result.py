"""The result of a training, read from the rollouts in its run folder: the rewards of its steps and validations.

before = count_written(launch.run)
...
result = read_result(launch, before)
result.problem                  # "no step was taken", or None
result.lines()                  # the curve, validation before and after, the best checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from treetune.errors import plural
from treetune.runs.discovery import find_run
from treetune.system.folders import write_atomically
from treetune.trainers.launch import Launch
from treetune.trainers.train_run import TrainRun

RESULT = "result.json"
"""The result, in the run folder."""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
"""The maximum number of bars in a curve."""

Curve = dict[int, float | None]
"""The mean reward by step; None if no rollout of the step has a reward."""
Written = tuple[int, int] | None
"""The size and time of the rollouts; None if there are none."""


class TrainResult(msgspec.Struct, frozen=True):
    rewards: Curve
    validation: Curve
    best: int | None = None
    """The step with the best validation among those with a checkpoint."""
    checkpoint: str | None = None
    """The checkpoint of that step."""
    problem: str | None = None
    """Why nothing was learned; None if something was."""

    def lines(self) -> Iterator[str]:
        for name, curve in (("reward", self.rewards), ("validation", self.validation)):
            if known := {step: reward for step, reward in curve.items() if reward is not None}:
                steps, values = list(known), list(known.values())
                ends = [f"{values[at]:.3f} at step {steps[at]}" for at in (0, -1)]
                yield f"{name}: {ends[0]} {_draw(values)} {ends[1]}"
        if self.checkpoint is not None and self.best is not None:
            yield f"best validation: {self.validation[self.best]:.3f} at step {self.best}: {self.checkpoint}"


def count_written(run: TrainRun) -> Written:
    """The size of the run folder, to detect later whether anything was added."""
    place = find_run(run.rollouts)
    return None if place is None else place.stamp()


def read_result(launch: Launch, before: Written) -> TrainResult:
    """Read the result, and write it to the run folder. `before` is the count from the start of the training."""
    run = launch.run
    rewards, validation = read_curve(run.rollouts), read_curve(run.validation)
    problem = None
    if launch.watched and count_written(run) == before:
        problem = "no step was taken"
    elif launch.watched and all(reward is None for reward in rewards.values()):
        problem = f"none of {plural(len(rewards), 'step')} had a rollout with a reward"
    known = ((reward, step) for step, reward in validation.items() if reward is not None)
    saved = [(reward, step, path) for reward, step in known if (path := launch.find_checkpoint(step)) is not None]
    _, best, path = max(saved, default=(None, None, None))
    result = TrainResult(rewards, validation, best, None if path is None else str(path), problem)
    run.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(run.folder / RESULT, msgspec.json.encode(result))
    return result


def read_curve(folder: Path) -> Curve:
    place = find_run(folder)
    if place is None:
        return {}
    run = place.open()
    sums: dict[int, list[float]] = {}
    for step, reward in zip(run.columns.numbers("step").tolist(), run.columns.reward.tolist(), strict=True):
        if step == step:  # a number: rollouts of other programs may have no step
            scored = sums.setdefault(int(step), [])
            scored += [reward] if reward == reward else []
    return {step: sum(scored) / len(scored) if scored else None for step, scored in sorted(sums.items())}


def _draw(values: list[float]) -> str:
    """A bar for each value, or for the mean of a few of them."""
    size = -(-len(values) // _WIDTH)
    means = [sum(some) / len(some) for some in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    return "".join(_BARS[int((mean - low) / ((high - low) or 1) * (len(_BARS) - 1))] for mean in means)

"""The mean reward of each step, a line for each trainer: plain SVG.

python curves.py results/*.json > every_trainer.svg

A result is what `tests/support/cpu_training.py` writes: the trainer with its version, and the rewards of its steps. One
step is 16 episodes, so its mean moves by chance: a line shows the mean of five steps.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train_tiny"))
from curve import COLOURS, GREY, Line, draw_lines

MEAN_OF = 5


def smoothed(rewards: list[float]) -> list[tuple[float, float]]:
    """The mean of each step and those just before it."""
    points = []
    for last in range(1, len(rewards) + 1):
        some = rewards[max(0, last - MEAN_OF) : last]
        points.append((last, sum(some) / len(some)))
    return points


def draw(files: list[Path]) -> str:
    colours = [*COLOURS, GREY]
    results = [json.loads(file.read_text()) for file in sorted(files)]
    lines = [Line(result["trainer"], smoothed(result["rewards"]), colours[at]) for at, result in enumerate(results)]
    return draw_lines(lines, "steps", "mean reward")


if __name__ == "__main__":
    print(draw([Path(name) for name in sys.argv[1:]]), end="")

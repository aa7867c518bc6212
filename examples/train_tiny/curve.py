"""Curves as a picture: plain SVG, no library.

python curve.py train-tiny/*.json > curve.svg
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 330, 60, 20, 20, 50
COLOURS = ["#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e"]
GREY = "#888888"


class Line(NamedTuple):
    name: str
    points: list[tuple[float, float]]
    colour: str
    dashes: str = "none"


def draw(files: Iterable[Path]) -> str:
    """A line for each result of train.py; those of controls are dashed."""
    results = sorted((json.loads(file.read_text()) for file in files), key=lambda one: (one["control"], one["seed"]))
    lines = []
    for result in results:
        colour, dashes = (GREY, "6 3") if result["control"] else (COLOURS[result["seed"] % len(COLOURS)], "none")
        name = f"seed {result['seed']}" + (", rewards shuffled" if result["control"] else "")
        lines.append(Line(name, result["curve"], colour, dashes))
    return draw_lines(lines, "steps of GRPO", "exact match on held-out tasks")


def draw_lines(lines: Iterable[Line], below: str, beside: str) -> str:
    """Shares over steps, with what stands below and beside them."""
    lines = list(lines)
    last = max(step for line in lines for step, _ in line.points) or 1
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return LEFT + wide * step / last

    def y(share: float) -> float:
        return TOP + high * (1 - share)

    def text(at_x: float, at_y: float, what: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" {more}>{what}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT + wide / 2, HEIGHT - 10, below),
        text(16, TOP + high / 2, beside, more=f'transform="rotate(-90 16 {TOP + high / 2})"'),
    ]
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y(share) + 4, f"{share:.1f}", "end"))
    for step in (0, last / 4, last / 2, last * 3 / 4, last):
        parts.append(text(x(step), TOP + high + 18, f"{step:.0f}"))
    for number, line in enumerate(lines):
        points = " ".join(f"{x(step):.1f},{y(share):.1f}" for step, share in line.points)
        stroke = f'fill="none" stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dashes}"'
        parts.append(f'<polyline points="{points}" {stroke}/>')
        parts.append(text(LEFT + wide - 8, y(0.3) + 16 * number, line.name, "end", f'fill="{line.colour}"'))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    print(draw(map(Path, sys.argv[1:])), end="")

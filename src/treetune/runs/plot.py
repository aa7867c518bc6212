"""Plots of a run: SVG of its own making, so that nothing need be installed; PNG where matplotlib is.

    run.plot()                          # how rewards are spread; a notebook shows it
    run.plot("sources").save("sources.svg")
    run.plot("groups").save("groups.png")

A plot is bars and what stands beside them: the drawing knows nothing of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treetune.errors import MissingExtraError, UnknownNameError, UsageError
from treetune.runs.columns import Columns, Numbers

BLUE, GREEN, RED, GREY, AMBER = "#4c78a8", "#3a9d5d", "#d1495b", "#9a9a9a", "#d9a441"
INK = "#767676"
"""Of words and lines: it can be read on white and on black."""
FLAGS = {"all 1": GREEN, "mixed": AMBER, "same": BLUE, "all 0": RED, "failed": GREY}
_MOST_VALUES = 12
"""With more different rewards than these, they are put in bins."""
_BINS = 20
_MOST_BARS = 160


class Bar(msgspec.Struct, frozen=True):
    label: str
    height: float
    colour: str = BLUE
    note: str = ""
    """What a pointer that rests on it is told."""


class Plot(msgspec.Struct, frozen=True):
    title: str
    across: str
    """What the bars are."""
    up: str
    """What their height is."""
    bars: list[Bar]

    def svg(self, width: int = 640, height: int = 320) -> str:
        left, right, top, bottom = 56, 12, 30, 48
        inside, room = width - left - right, height - top - bottom
        low, high, ticks = _scale(bar.height for bar in self.bars)

        def y(value: float) -> float:
            return top + room * (high - value) / (high - low)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="sans-serif" font-size="11" fill="{INK}">',
            f"<title>{as_text(self.title)}</title>",
            f'<text x="{left}" y="18" font-size="13">{as_text(self.title)}</text>',
            f'<text x="{left + inside / 2:.1f}" y="{height - 6}" text-anchor="middle">{as_text(self.across)}</text>',
            f'<text transform="translate(12 {top + room / 2:.1f}) rotate(-90)" text-anchor="middle">'
            f"{as_text(self.up)}</text>",
        ]
        for tick in ticks:
            parts.append(
                f'<line x1="{left}" x2="{width - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{INK}" '
                f'stroke-opacity="0.25"/><text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
            )
        step = inside / max(1, len(self.bars))
        shown = max(1, math.ceil(len(self.bars) * 7 * max((len(b.label) for b in self.bars), default=1) / inside))
        for number, bar in enumerate(self.bars):
            x, at, zero, note = left + number * step, y(bar.height), y(0), as_text(bar.note or bar.label)
            tall = abs(zero - at) if bar.colour == BLUE else max(2.0, abs(zero - at))  # a colour is seen at 0 too
            parts.append(
                f'<rect x="{x + step * 0.1:.2f}" y="{min(at, zero - tall):.2f}" width="{step * 0.8:.2f}" '
                f'height="{tall:.2f}" fill="{bar.colour}"><title>{note}</title></rect>'
            )
            if number % shown == 0 and bar.label:
                label = bar.label if len(bar.label) <= 24 else bar.label[:23] + "…"
                parts.append(
                    f'<text x="{x + step / 2:.1f}" y="{top + room + 16}" text-anchor="middle">{as_text(label)}</text>'
                )
        return "".join(parts) + "</svg>"

    def _repr_svg_(self) -> str:
        return self.svg()

    def save(self, path: str | Path) -> Path:
        """As SVG, or by matplotlib as what the ending of the name says."""
        path = Path(path).expanduser()
        if path.suffix == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
            return path
        try:
            from matplotlib.figure import Figure
        except ImportError:
            error = MissingExtraError.of("matplotlib", "plots")
            raise MissingExtraError(error.message, remedy=f"{error.remedy}, or save it as .svg") from None
        figure: Any = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        places = range(len(self.bars))
        axes.bar(places, [bar.height for bar in self.bars], color=[bar.colour for bar in self.bars])
        every = max(1, math.ceil(len(self.bars) / 20))
        axes.set_xticks(places[::every], [bar.label for bar in self.bars[::every]])
        axes.set(title=self.title, xlabel=self.across, ylabel=self.up)
        try:
            figure.savefig(path, dpi=150)
        except ValueError as problem:
            raise UsageError(f"{path}: {problem}", remedy="name a .svg or a .png") from None
        return path


def _scale(heights: Iterable[float]) -> tuple[float, float, list[float]]:
    """From where to where, with 0 in it, and round numbers in between."""
    known = [height for height in heights if math.isfinite(height)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if low == high:
        high = 1.0
    size = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(size * each for each in (1, 2, 2.5, 5, 10) if (high - low) / (size * each) <= 5)
    low, high = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
    return low, high, [round(low + number * step, 10) for number in range(round((high - low) / step) + 1)]


def as_text(text: str) -> str:
    """Any text as that of a page: nothing in it is markup, and what XML cannot hold is left out."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))


# What is drawn of a run


def draw(columns: Columns, kind: str) -> Plot:
    if kind not in KINDS:
        raise UnknownNameError.of("kind of plot", kind, KINDS)
    return KINDS[kind](columns)


def _rewards(columns: Columns) -> Plot:
    reward = columns.reward
    scored = reward[~np.isnan(reward)]
    values, counts = np.unique(scored, return_counts=True)
    if len(values) <= _MOST_VALUES:
        bars = [
            Bar(f"{value:.4g}", int(count), note=f"{count:,} rollouts earned {value:g}")
            for value, count in zip(values, counts, strict=True)
        ]
    else:
        sizes, edges = np.histogram(scored, bins=_BINS)
        bars = [
            Bar(f"{start:.3g}", int(size), note=f"{size:,} rollouts from {start:.4g} to {end:.4g}")
            for size, start, end in zip(sizes, edges[:-1], edges[1:], strict=True)
        ]
    if failed := len(reward) - len(scored):
        bars.append(Bar("failed", failed, GREY, f"{failed:,} rollouts failed and have no reward"))
    return Plot("Rewards", "reward", "rollouts", bars)


def _sources(columns: Columns) -> Plot:
    names = columns.texts("source")
    return Plot(
        "Mean reward by source", "source", "mean reward", _means(columns.reward, columns.codes("source"), names)
    )


def _turns(columns: Columns) -> Plot:
    turns = columns.numbers("turns")
    values, codes = np.unique(turns, return_inverse=True)
    bars = _means(columns.reward, codes, [f"{value:g}" for value in values])
    return Plot("Mean reward by turns", "turns", "mean reward", bars[:_MOST_BARS])


def _steps(columns: Columns) -> Plot:
    step = columns.numbers("step")
    known = ~np.isnan(step)
    if not known.any():
        raise UsageError("no rollout tells its step", remedy="steps are told by a trainer, to `serve --traces`")
    values, codes = np.unique(step[known], return_inverse=True)
    if len(values) > _MOST_BARS:
        parts = np.arange(len(values)) * _MOST_BARS // len(values)
        codes, values = parts[codes], values[np.unique(parts, return_index=True)[1]]
    names = [f"{value:g}" for value in values]
    return Plot(
        "Mean reward by step", "step of the trainer", "mean reward", _means(columns.reward[known], codes, names)
    )


def _groups(columns: Columns) -> Plot:
    groups = columns.groups()
    flags = np.array(groups.flags())
    mean = np.where(np.isnan(groups.mean), 0.0, groups.mean)
    order = np.lexsort((mean, flags != "failed"))
    every = max(1, math.ceil(len(order) / _MOST_BARS))
    task = columns.numbers("task")[groups.first]
    bars = []
    for at in order[::every]:
        flag = str(flags[at])
        told = f"task {task[at]:.0f}: {flag}, mean {mean[at]:.4g} of {groups.scored[at]} scored"
        bars.append(Bar("", float(mean[at]), FLAGS[flag], told))
    counts = ", ".join(f"{int((flags == flag).sum()):,} {flag}" for flag in FLAGS if (flags == flag).any())
    across = "tasks, by their mean reward" + (f" (one of {every})" if every > 1 else "")
    return Plot(f"Groups: {counts}", across, "mean reward", bars)


def _means(reward: Numbers, codes: Any, names: list[str]) -> list[Bar]:
    scored = ~np.isnan(reward)
    counts = np.bincount(codes[scored], minlength=len(names))
    sums = np.bincount(codes[scored], reward[scored], minlength=len(names))
    alls = np.bincount(codes, minlength=len(names))
    return [
        Bar(name, float(total / count) if count else 0.0, BLUE if count else GREY, _told(name, total, count, all_of))
        for name, total, count, all_of in zip(names, sums, counts, alls, strict=True)
    ]


def _told(name: str, total: float, scored: int, rollouts: int) -> str:
    mean = f"mean {total / scored:.4f}" if scored else "no reward"
    return f"{name}: {mean}, {scored:,} scored of {rollouts:,}"


KINDS: dict[str, Callable[[Columns], Plot]] = {
    "rewards": _rewards,
    "sources": _sources,
    "turns": _turns,
    "groups": _groups,
    "steps": _steps,
}

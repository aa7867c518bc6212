"""The display of a running evaluation: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Self

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from treetune.core.trace import Outcome, Trace
from treetune.errors import truncate
from treetune.evaluation.config import Evaluation
from treetune.runs.summary import Tally
from treetune.system.screen import Screen

_PLAIN_SECONDS = 5.0
_LATEST = 8
_NARROW = 70
_LONGEST_VALUE = 60

_COLOURS = {
    Outcome.COMPLETED: "green",
    Outcome.TRUNCATED: "yellow",
    Outcome.TIMEOUT: "magenta",
    Outcome.CANCELLED: "dim",
    Outcome.STALE: "dim",
}


class Display:
    """On a terminal, a live display: the overridden settings, a bar with mean reward and errors, the latest rollouts.
    Elsewhere, for logs: a line at the start, one for each of the first errors, and one every few seconds."""

    def __init__(self, screen: Screen, evaluation: Evaluation, done: int, place: str = "") -> None:
        """`place` says which of several runs this is (`2 of 3`); its display is then removed at the end."""
        self._screen = screen
        config, taskset = evaluation.config, evaluation.taskset
        # The number of rollouts, if it is known without building every task.
        count = taskset._size() if not taskset.INFINITE and taskset.random_access else None
        known = [number for number in (config.num_tasks, count) if number is not None]
        self._total = min(known) * config.num_rollouts if known else None
        self._next = time.monotonic() + _PLAIN_SECONDS
        self._latest: deque[Text] = deque(maxlen=_LATEST)
        counts = (MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
        # A narrow terminal has room only for the figures.
        bar, times = BarColumn(bar_width=None), (TimeElapsedColumn(), TimeRemainingColumn())
        columns = counts if screen.width < _NARROW else (bar, *counts, *times)
        self._progress = Progress(*columns, console=screen)
        self._bar = self._progress.add_task("", total=self._total, completed=done, state="")
        settings = [_setting(key, value) for key, value in evaluation.overridden().items()]
        above = Text("\n".join([*([f"run {place}"] if place else []), *settings]))
        self._live = Live(
            get_renderable=lambda: Group(above, self._progress, *self._latest),
            console=screen,
            refresh_per_second=8,
            transient=bool(place),
        )
        if not screen.is_terminal:
            begun = f" ({done} rollouts done already)" if done else ""
            screen.say(f"evaluating {f'({place}) ' if place else ''}{' '.join(settings)}{begun}")

    def __enter__(self) -> Self:
        if self._screen.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._screen.is_terminal:
            self._live.stop()

    def on_trace(self, trace: Trace, tally: Tally) -> None:
        mean = "-" if tally.mean_reward is None else f"{tally.mean_reward:.3f}"
        over_all = f" ({tally.mean_reward_all:.3f} over all)" if tally.errors else ""
        retries = f"  retries {tally.retries}" if tally.retries else ""
        total, state = tally.expected or self._total, f"reward {mean}{over_all}  errors {tally.errors}{retries}"
        if self._screen.is_terminal:
            self._latest.append(_rollout_line(trace))
            self._progress.update(self._bar, completed=tally.rollouts, total=total, state=state)
            return
        if not trace.scored and tally.errors <= 3:
            self._screen.say(_rollout_line(trace).plain)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_SECONDS
            self._screen.say(f"{tally.rollouts}/{total or '?'} {state}")


def _setting(key: str, value: Any) -> str:
    """Puts a setting on one line, because a prompt may have several lines, and a scorer a rubric."""
    return f"{key}={truncate(str(value), _LONGEST_VALUE)}"


def _rollout_line(trace: Trace) -> Text:
    what = trace.answer or trace.explanation or ""
    if (failure := trace.failure) is not None:
        what = failure.full_message
    return Text.assemble(
        # The reward comes early: a narrow terminal cuts off the end.
        f"task {trace.task.idx:<6} r{trace.rollout:<3} ",
        f"{'-' if trace.reward is None else format(trace.reward, '.2f'):>6}  ",
        (f"{trace.outcome.value:<18}", _COLOURS.get(trace.outcome, "red")),
        f"{trace.timing.total:7.2f}s  ",
        truncate(what.partition("\n")[0], 80),
        no_wrap=True,
    )

"""What a person sees while an evaluation runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from treetune.evaluation.config import Evaluation
from treetune.evaluation.summary import Summary, Tally
from treetune.trace import Outcome, Trace

_PLAIN_SECONDS = 5.0
_LATEST = 8

_COLOURS = {
    Outcome.COMPLETED: "green",
    Outcome.TRUNCATED: "yellow",
    Outcome.TIMEOUT: "magenta",
    Outcome.CANCELLED: "dim",
}


class Display(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    def on_trace(self, trace: Trace, tally: Tally) -> None: ...


def display_for(console: Console, evaluation: Evaluation, total: int | None, done: int) -> Display:
    if console.is_terminal:
        return LiveDisplay(console, evaluation, total, done)
    return PlainDisplay(console, evaluation, total, done)


class LiveDisplay:
    """The overridden settings, one bar with mean reward and errors, the latest rollouts."""

    def __init__(self, console: Console, evaluation: Evaluation, total: int | None, done: int) -> None:
        self._latest: deque[Text] = deque(maxlen=_LATEST)
        self._total = total
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._bar = self._progress.add_task("", total=total, completed=done, state="")
        self._overview = overview(evaluation)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def on_trace(self, trace: Trace, tally: Tally) -> None:
        self._latest.append(rollout_line(trace))
        self._progress.update(
            self._bar, completed=tally.rollouts, total=tally.expected or self._total, state=state_line(tally)
        )

    def _render(self) -> Group:
        return Group(self._overview, self._progress, *self._latest)


class PlainDisplay:
    """One line at the start and one every few seconds: for logs."""

    def __init__(self, console: Console, evaluation: Evaluation, total: int | None, done: int) -> None:
        self._console = console
        self._total = total
        self._next = time.monotonic() + _PLAIN_SECONDS
        settings = " ".join(f"{key}={value}" for key, value in evaluation.overridden().items())
        self._line(f"evaluating {settings}" + (f" ({done} rollouts done already)" if done else ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def on_trace(self, trace: Trace, tally: Tally) -> None:
        if not trace.outcome.scored and tally.errors <= 3:
            self._line(rollout_line(trace).plain)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_SECONDS
            self._line(f"{tally.rollouts}/{tally.expected or self._total or '?'} {state_line(tally)}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def overview(evaluation: Evaluation) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in evaluation.overridden().items():
        table.add_row(Text(key, style="bold"), Text(str(value)))
    return table


def state_line(tally: Tally) -> str:
    mean = "-" if tally.mean_reward is None else f"{tally.mean_reward:.3f}"
    return f"reward {mean}  errors {tally.errors}"


def rollout_line(trace: Trace) -> Text:
    what = trace.failure.message if trace.failure else (trace.answer or trace.explanation or "")
    what = what.partition("\n")[0]
    return Text.assemble(
        f"task {trace.task.idx:<6} r{trace.rollout:<3} ",
        (f"{trace.outcome.value:<18}", _COLOURS.get(trace.outcome, "red")),
        f"{'-' if trace.reward is None else format(trace.reward, '.2f'):>6}  {trace.timing.total:7.2f}s  ",
        what if len(what) <= 80 else what[:79] + "…",
        no_wrap=True,
    )


def summary_table(summary: Summary) -> RenderableType:
    """A run's figures; below them, where there are several sources, a table with a line for each."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))

    def row(name: str, value: Any) -> None:
        table.add_row(Text(name, style="bold"), Text(str(value)))

    mean = "-" if summary.mean_reward is None else f"{summary.mean_reward:.4f}"
    error = "" if summary.stderr is None else f" ± {summary.stderr:.4f} (standard error)"
    row("mean reward", f"{mean}{error}")
    if summary.pass_at_k:
        row("pass@k", "  ".join(f"{k}: {value:.3f}" for k, value in summary.pass_at_k.items()))
    row("rollouts", f"{summary.scored} scored of {summary.rollouts}, {summary.tasks} tasks")
    row("outcomes", "  ".join(f"{name}: {count}" for name, count in summary.outcomes.items()))
    for name, value in summary.metrics.items():
        row(name, f"{value:.4f}")
    if summary.completion_tokens:
        row("tokens", f"{summary.prompt_tokens} in, {summary.completion_tokens} out")
    return Group(table, "", _source_table(summary)) if len(summary.data_sources) > 1 else table


def _source_table(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("source")
    for heading in ("tasks", "rollouts", "mean reward"):
        table.add_column(heading, justify="right")
    for name, source in summary.data_sources.items():
        reward = "-" if source.mean_reward is None else f"{source.mean_reward:.4f}"
        table.add_row(Text(name), f"{source.tasks:,}", f"{source.rollouts:,}", reward)
    return table
